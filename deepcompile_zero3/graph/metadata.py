"""What this library notes in a node's ``meta``."""

# Of a parameter's placeholder, and of what hands it on to backward: the facts of it.
PARAMETER = "zero3_parameter"
# Of a backward's input that its forward has gathered and kept: the name of the parameter.
KEPT_OF = "zero3_kept_of"
# What a graph's text says after the node's line.
COMMENT = "zero3_comment"

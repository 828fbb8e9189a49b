"""Keys that this library sets in a node's ``meta``."""

# On a parameter's placeholder, and on the nodes that hand it on to backward: the ParameterFacts.
PARAMETER = "zero3_parameter"
# On an input of a backward that its forward gathered and kept: the FQN of the parameter.
KEPT_OF = "zero3_kept_of"
# On any node: the comment after its line in the graph's text.
COMMENT = "zero3_comment"

"""Keys that this library sets in a node's ``meta``."""

from typing import Any

from torch import fx

from deepcompile_zero3.runtime import ops

#: The ParameterFacts, on a parameter's placeholder and on the nodes that save it for backward.
PARAMETER = "zero3_parameter"
#: Whether an input of a forward is to be kept gathered for backward.
KEEP = "zero3_keep"
#: The FQN of a parameter, on an input of a backward that its forward gathered and kept.
KEPT_OF = "zero3_kept_of"
# On the output of a forward: number of results, the last ones, that are saved for backward. torch
# loses the descriptions of results where it makes random numbers functional.
NUM_SAVED = "zero3_num_saved"
# On any node: the comment after its line in the graph's text.
COMMENT = "zero3_comment"


def formats_of(start: fx.Node) -> list[str]:
    """Returns the formats of the parameters of a gather's start; empty if not quantized."""
    placeholders: Any = start.args[0]
    formats: Any = start.args[2] if len(start.args) > 2 else ""
    return formats.split(",") if formats else [""] * len(placeholders)


def fqns_of(collective: fx.Node) -> list[str]:
    """Returns the FQNs of the parameters of a gather's start or of a reduction in a graph."""
    starts = collective.target is ops.all_gather_start.default
    placeholders: Any = collective.args[0] if starts else [collective.args[1]]
    return [placeholder.meta[PARAMETER].fqn for placeholder in placeholders]

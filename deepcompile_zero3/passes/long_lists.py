"""Reads the items of long lists from parts of them.

A wait returns the tensors of its bucket as a list, hundreds in a deep model of small layers. A
compiler's passes go through all that a node takes: n items of a list of n tensors cost n * n. Items
of parts, which have the square root of n items each, cost less. Compiled code is the same, since
no part is a tensor.
"""

import math
import operator
from typing import Any

from torch import fx

from deepcompile_zero3.runtime import WAITS

SHORT = 16  # items of a list that is read as a whole


def read_in_parts(gm: fx.GraphModule) -> None:
    """Makes the nodes of ``gm`` read the items of long lists of gathered tensors from parts.

    The last change before a compiler gets the graph: other passes know items of waits.
    """
    changed = False
    for target in WAITS:
        for wait in gm.graph.find_nodes(op="call_function", target=target):
            values = wait.meta["val"]
            if len(values) > SHORT:
                _read_in_parts(wait, values, math.isqrt(len(values)))
                changed = True
    if changed:
        gm.recompile()  # caches find the graph by its code


def _read_in_parts(wait: fx.Node, values: list[Any], length: int) -> None:
    parts: dict[int, fx.Node] = {}
    for item in list(wait.users):
        position: Any = item.args[1] if item.target is operator.getitem else None
        if not isinstance(position, int):
            continue
        first = position - position % length
        if first not in parts:
            items = slice(first, first + length)
            with wait.graph.inserting_after(wait):
                parts[first] = wait.graph.call_function(operator.getitem, (wait, items))
            parts[first].meta["val"] = values[items]
        item.args = (parts[first], position - first)

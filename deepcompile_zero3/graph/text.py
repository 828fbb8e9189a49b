"""Graphs as text: stable from run to run, readable without a table."""

import re
import textwrap
from typing import Any

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.calls import arguments_of, called_by, calls_by_region, region_named
from deepcompile_zero3.graph.metadata import COMMENT
from deepcompile_zero3.torch_internals import compiler

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def graph_text(gm: fx.GraphModule) -> str:
    """Returns the graph as text, one line a node: ``name: dtype[shape] = op(arguments)``.

    Names are those of the graph. Ops are written without their default overload (``aten.mm``).
    Nothing depends on the machine, the process or the run. A subgraph appears once, below the graph
    that calls it.
    """
    regions = calls_by_region(gm)
    lines = [node_text(node) for node in gm.graph.nodes if node.target not in regions]
    for name, calls in regions.items():
        text = graph_text(region_named(gm, name))
        lines += ["", f"{name}, called {len(calls)} times:", textwrap.indent(text, "    ")]
    return "\n".join(lines)


def node_text(node: fx.Node) -> str:
    """Returns ``node`` as a line of :func:`graph_text`."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = _value(node.meta.get("val"))
    head = f"{node.name}: {value}" if value else node.name
    if node.op == "placeholder":
        return head
    if node.target is compiler.invoke_subgraph:
        return f"{head} = {called_by(node)}({', '.join(map(_argument, arguments_of(node)))})"
    arguments = [_argument(argument) for argument in node.args]
    comment = f"  # {node.meta[COMMENT]}" if COMMENT in node.meta else ""
    for key, argument in node.kwargs.items():
        if not comment or key != "contract":  # the comment has the contract
            arguments.append(f"{key}={_argument(argument)}")
    return f"{head} = {_target(node)}({', '.join(arguments)}){comment}"


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch_internals.OpOverload):
        return str(target).removesuffix(".default")
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def short_name(dtype: torch.dtype) -> str:
    """Returns the name of ``dtype`` in the texts, such as ``bf16``."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{short_name(value.dtype)}[{shape}]"
    return ""


def _argument(argument: Any) -> str:
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_argument(item) for item in argument)}]"
    if isinstance(argument, fx.Node):
        return argument.name
    return re.sub(r"^torch\.", "", repr(argument)) if argument is not None else "None"

"""Lets one process of a host compile a graph while the others wait, and load what it compiled."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import fx

from deepcompile_zero3.torch_internals import compiler

PATIENCE = 600.0  # seconds that a process waits for another that compiles


def graph_key(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Any, config: Mapping[str, Any]
) -> str | None:
    """Returns a key that graphs share if compilers make the same code of them.

    The key tells graphs apart. It does not find compiled code: torch's own keys are finer. Graphs
    on two GPUs have two keys, as in torch's caches. Returns None if a setting of a compiler cannot
    be pickled, and so not be compared between processes.

    Args:
        gm: the graph that AOTAutograd will trace.
        example_inputs: its inputs.
        settings: other inputs of the passes, whose ``repr`` is the same in every process.
        config: changes to Inductor's settings.
    """
    config_key = compiler.config_key(config)
    if config_key is None:
        return None
    inputs = [
        (*map(str, (value.shape, value.stride(), value.device)), value.dtype, value.requires_grad)
        if isinstance(value, torch.Tensor)
        else str(value)
        for value in example_inputs
    ]
    code = [module.code for module in gm.modules() if isinstance(module, fx.GraphModule)]
    described = (config_key, torch.is_grad_enabled(), settings, inputs, code)
    return hashlib.sha256(repr(described).encode()).hexdigest()


@contextlib.contextmanager
def first_alone(key: str, patience: float = PATIENCE) -> Iterator[None]:
    """Admits one process of this host to the block, and all others once it has left the block.

    The first one compiles a graph and stores it; the others load it. If the first one dies or
    raises, the next one takes its place. If torch cannot store the graph, the others compile it,
    and so does a later process, without waiting.

    Args:
        key: the graph's key.
        patience: seconds after which a process that waits compiles too.
    """
    compiled = compiler.cache_folder() / "zero3" / f"{key}.compiled"
    with contextlib.ExitStack() as stack:
        try:
            compiled.parent.mkdir(parents=True, exist_ok=True)
            if not compiled.exists():
                stack.enter_context(FileLock(compiled.with_suffix(".lock"), timeout=patience))
            if compiled.exists():
                stack.close()  # nobody need wait for this process
        except (OSError, NotImplementedError, Timeout):
            pass  # no folder to write to, no locks in it, or the first one takes too long
        yield
        with contextlib.suppress(OSError):
            compiled.touch()

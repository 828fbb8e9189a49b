"""Lets one process of a host compile a graph while the others wait, and load what it compiled."""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import fx

from deepcompile_zero3.torch_internals import stored_graphs

PATIENCE = 600.0  # seconds that a process waits for another that compiles
TELL_AFTER = 60.0  # seconds after which a process says that it waits

_log = logging.getLogger(__name__)


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
    config_key = stored_graphs.config_key(config)
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
def first_alone(key: str, patience: float = PATIENCE) -> Iterator[bool]:
    """Admits one process of this host to the block, and all others once it has left the block.

    Yields whether no process has left it.

    The first one compiles a graph and stores it; the others load it. If the first one dies or
    raises, the next one takes its place. If torch cannot store the graph, the others compile it,
    and so does a later process, without waiting.

    Args:
        key: the graph's key.
        patience: seconds after which a process that waits compiles too.
    """
    compiled = stored_graphs.cache_folder() / "zero3" / f"{key}.compiled"
    with contextlib.ExitStack() as stack:
        try:
            compiled.parent.mkdir(parents=True, exist_ok=True)
            if not compiled.exists():
                stack.enter_context(_locked(compiled.with_suffix(".lock"), patience))
            if compiled.exists():
                stack.close()  # nobody need wait for this process
        except OSError:
            pass  # no folder to write to, no locks in it, or the first one takes too long
        yield not compiled.exists()
        with contextlib.suppress(OSError):
            compiled.touch()


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Leaves a mark if the process is killed in the block, and cleans up after others.

    A process that is killed while it compiles may leave half a shared object, which torch would
    load for ever, and for any graph that has the same kernel. The next process of this host that
    finds the mark removes such objects.
    """
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:16]
    folder = stored_graphs.cache_folder() / "zero3"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no folder to write to, or no locks in it
            folder.mkdir(parents=True, exist_ok=True)
            for mark in folder.glob(f"{host}-*.compiles"):
                with contextlib.suppress(TimeoutError), _locked(mark, patience=0):
                    _remove_unfinished()
                    mark.unlink(missing_ok=True)
            mark = folder / f"{host}-{os.getpid()}-{threading.get_ident()}.compiles"
            stack.enter_context(_locked(mark, patience=0))
            stack.callback(mark.unlink, missing_ok=True)
        yield


def _remove_unfinished() -> None:
    """Removes the shared objects that compilers of C++ have not finished, and do not write now."""
    for lock, objects in stored_graphs.unfinished_objects():
        with contextlib.suppress(OSError), _locked(lock, patience=0):
            for path in objects():
                path.unlink()
                _log.warning("removed %s: whoever wrote the file did not finish", path)


@contextlib.contextmanager
def _locked(path: Path, patience: float) -> Iterator[None]:
    """Holds a lock that ends with the process.

    Raises:
        TimeoutError: another process has held the lock for ``patience`` seconds.
        OSError: the file system has no locks.
    """
    with path.open("w") as file:
        start = time.monotonic()
        while not _try_lock(file):
            waited = time.monotonic() - start
            if waited > patience:
                raise TimeoutError
            if waited > TELL_AFTER:
                _tell_of_wait(path, patience)
            time.sleep(0.05)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have the file open


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _tell_of_no_locks(Path(file.name).parent, str(error))
        raise
    return True


@functools.cache
def _tell_of_wait(path: Path, patience: float) -> None:
    warnings.warn(
        f"another process, usually a rank of the same job, has held {path} for {TELL_AFTER:.0f} s, "
        f"and compiles the graph that this one waits for; after {patience:.0f} s, this one "
        f"compiles too. `fuser {path}` names both. If that process hangs, end it; if there is "
        "none, set TORCHINDUCTOR_CACHE_DIR to a folder of this host",
        stacklevel=2,
    )


@functools.cache
def _tell_of_no_locks(folder: Path, error: str) -> None:
    warnings.warn(
        f"files in {folder} cannot be locked ({error}): each process compiles all graphs, and "
        "none waits for another. Set TORCHINDUCTOR_CACHE_DIR to a folder with locks (flock), "
        "such as one of this host",
        stacklevel=2,
    )

"""Processes that play the ranks of a job over gloo.

Processes are forked from a process that has imported torch, its compiler and this library, so that
they start at once. The processes of a pool live as long as the test session; each run has its own
process group. A run fails if it takes too long or if a rank fails. The other ranks then get a few
seconds to fail on their own, the pool is killed, and the next run starts a new one. The stack of a
rank that had to be killed, or that crashed, is reported.
"""

import contextlib
import faulthandler
import fcntl
import functools
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.collectives import backend_of_ranks
from support.job import collect_for_good
from support.paths import ROOT
from torch.distributed.tensor import DTensor, _random, _redistribute

from deepcompile_zero3.runtime import _C

# Seconds that the other ranks may go on after one has failed: they are likely to wait for it.
GRACE_SECONDS = 5.0


class RankPool:
    """``world_size`` processes that run one function at a time, with ``environment`` set.

    Forked processes share the hash seed and the addresses of existing objects; "spawn" starts new
    interpreters, which share neither.
    """

    def __init__(self, world_size, start_method="forkserver", **environment):
        self.world_size = world_size
        self._context = mp.get_context(start_method)
        if start_method == "forkserver":
            _start_forkserver()
        self._environment = environment
        self._ranks = []
        self._leaves_some = False  # whether models or process groups of a run are alive
        self._folder = None  # where a rank that hangs or crashes writes its stack

    def run(self, function, *args, timeout=120):
        """Runs ``function(*args)`` on every rank and returns the results by rank.

        Args:
            function: a function of a module that the ranks can import.
            args: arguments of the function; each rank gets a copy.
            timeout: seconds that the run may take.

        Raises:
            AssertionError: with the traceback of every rank that failed, did not finish, or died.
        """
        __tracebackhide__ = True
        if self._leaves_some:
            self._kill()
        if not self._ranks:
            self._start()
        with _four_at_once(self.world_size), tempfile.TemporaryDirectory() as folder:
            for _, pipe in self._ranks:
                pipe.send((function, args, os.path.join(folder, "store")))
            results, errors = self._collect(timeout)
        if errors:
            self._kill()  # the ranks are out of step
            raise AssertionError(_told_once(errors))
        return [results[rank] for rank in range(self.world_size)]

    def close(self):
        """Ends the processes; a further run starts new ones."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(GRACE_SECONDS)
        self._kill()

    def _kill(self):
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()

    def _collect(self, timeout):
        """Returns the results and the errors, by rank."""
        results, errors = {}, {}
        self._leaves_some = False
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, value, leaves_some = pipe.recv()
                    self._leaves_some |= leaves_some
                except EOFError:
                    succeeded, value = False, self._how_it_died(rank)
                (results if succeeded else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        limit = f"{GRACE_SECONDS} s after another rank failed" if errors else f"{timeout} s"
        for rank in waiting.values():
            errors[rank] = f"killed after {limit}, in\n{self._stack_of(rank)}"
        return results, errors

    def _how_it_died(self, rank):
        process, _ = self._ranks[rank]
        process.join(1)
        stack = self._written_stack(rank)
        return f"died with exit code {process.exitcode}" + (f", in\n{stack}" if stack else "")

    def _stack_of(self, rank):
        """Returns a Python traceback of all threads of ``rank``."""
        process, _ = self._ranks[rank]
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._written_stack(rank)

    def _written_stack(self, rank):
        with open(os.path.join(self._folder.name, str(rank))) as file:
            return file.read()

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(
                    theirs,
                    rank,
                    self.world_size,
                    self._environment,
                    os.path.join(self._folder.name, str(rank)),
                ),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self._ranks.append((process, ours))


def _start_forkserver():
    """Starts the process from which ranks are forked, if it does not run."""
    forkserver.set_forkserver_preload(["support.preloaded"])
    # The server looks for modules before it takes the path of this process.
    tests = str(ROOT / "tests")
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


@contextlib.contextmanager
def _four_at_once(world_size):
    """Waits until all processes that run these tests have no more than four ranks, with these."""
    folder = ROOT / "build" / "ranks-at-once"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        slots = [files.enter_context(open(folder / str(i), "w")) for i in range(4)]
        with open(folder / "turn", "w") as turn:  # who waits for slots is the only one that does
            fcntl.flock(turn, fcntl.LOCK_EX)
            missing = min(world_size, len(slots))
            while missing:
                for slot in list(slots):
                    if missing and _try_lock(slot):
                        slots.remove(slot)
                        missing -= 1
                time.sleep(0.01 if missing else 0)
        yield


def _try_lock(file):
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _told_once(errors):
    """Returns the errors as text, the first to come first: the others may be its consequences. An
    error that several ranks share appears once.
    """
    ranks = {}
    for rank, error in errors.items():
        ranks.setdefault(error, []).append(rank)
    return "\n".join(
        f"rank {', '.join(map(str, sorted(who)))} {error}" for error, who in ranks.items()
    )


def _serve(pipe, rank, world_size, environment, stack_path):
    """Runs functions in a process of a pool until its pipe is closed."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **environment)
    torch.set_num_threads(1)
    stack = open(stack_path, "w")  # noqa: SIM115 (as long as the process)
    faulthandler.register(signal.SIGUSR1, stack)
    faulthandler.enable(stack)
    caches = _caches_of_dtensor()
    while True:
        try:
            function, args, store = pipe.recv()
        except EOFError:
            return  # the session is over
        try:
            answer = True, _run(function, args, store, rank, world_size, caches)
        except BaseException:
            answer = False, f"failed with\n{traceback.format_exc()}"
        sys.stdout.flush()
        pipe.send((*answer, _leaves_some()))


def _run(function, args, store, rank, world_size, caches):
    dist.init_process_group(
        backend_of_ranks(),
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(hours=1),  # the pool's shorter limit shows a stack
    )
    try:
        torch.manual_seed(0)
        result = function(*args)
        dist.barrier()  # an early rank must not hang up on a late one
        return result
    finally:
        torch._dynamo.reset()
        _forget_meshes(caches)
        dist.destroy_process_group()
        # A backward that failed leaves tasks in the queue of its thread, which keep the autograd
        # graph, and with it a model, until the next backward.
        torch.zeros((), requires_grad=True).backward()
        collect_for_good()


def _leaves_some():
    """Returns whether models or process groups of a run are alive.

    Models of the next run would get other names. Each group has threads that wake 100 times a
    second; guards of Dynamo on DTensors keep them, which no collection finds.
    """
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread may have ended
            names.append(path.read_text())
    return bool(_C.live_model_numbers()) or any("gloo" in name for name in names)


def _forget_meshes(caches):
    """Empties DTensor's caches, which return meshes of earlier runs for equal ones, and keep them
    with their process groups.
    """
    # Imports torch's compiler, before which conftest.py sets the folder of its cache.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for cache in caches:
        cache.cache_clear()
    _random._rng_tracker = None
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in every torch
        _redistribute.clear_redistribute_planner_cache()


def _caches_of_dtensor():
    """Returns what functools caches in DTensor's modules and in their classes."""
    modules = [vars(m) for name, m in sys.modules.items() if name.startswith(DTensor.__module__)]
    values = [value for module in modules for value in module.values()]
    values += [each for value in values if type(value) is type for each in vars(value).values()]
    found = {getattr(value, "__func__", value) for value in values if callable(value)}
    return [each for each in found if type(each) is functools._lru_cache_wrapper]

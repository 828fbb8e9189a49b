"""Resident rank processes that answer commands, such as a step of a mode of a workload."""

import faulthandler
import os
import resource
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Cost:
    """The cost of one step on one rank.

    Attributes:
        wall: elapsed seconds.
        main: CPU seconds of the thread that computes; less than ``wall`` if the thread waits for
            other ranks or if other threads occupy its core.
        user, system: CPU seconds of all threads of the process.
        page_faults: the number of page faults.
    """

    wall: float
    main: float
    user: float
    system: float
    page_faults: int


@dataclass(frozen=True)
class Memory:
    """The memory of one rank's process, in bytes.

    Attributes:
        resident: resident memory now; shared memory counts in full in each process.
        peak: the peak of resident memory since the last query.
        proportional: resident memory now; shared memory is divided among its processes.
    """

    resident: int
    peak: int
    proportional: int


class Ranks:
    """Rank processes that are resident from construction to :meth:`close`."""

    def __init__(self, make: partial[object], world_size: int, cache: str) -> None:
        """Starts the processes. Each calls ``make(rank, world_size, store)`` with the path of the
        rendezvous file; the methods of the result answer commands. After an error, a process
        answers every command with this error.
        """
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        context = mp.get_context("spawn")
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": cache,
        }
        self._ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = f"{self._folder.name}/store"
            process = context.Process(
                target=_serve,
                args=(theirs, make, rank, world_size, store),
                daemon=True,
            )
            with patch.dict(os.environ, environment):  # as torchrun has it
                process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def call(self, command: str, *args: object, timeout: float = TIMEOUT_SECONDS) -> list:
        """Runs ``command`` on all ranks at once and returns the answers by rank.

        Raises:
            TimeoutError: a rank does not answer within ``timeout`` seconds. Ranks that run
                have written to stderr what their threads do.
        """
        for _, pipe in self._ranks:
            pipe.send((command, args))
        deadline = time.monotonic() + timeout
        answers = []
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                for process, _ in self._ranks:
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)
                raise TimeoutError(f"rank {rank} did not answer '{command}' in {timeout:.0f} s")
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()


class Training:
    """A rank of one mode of one workload.

    Args:
        workload, mode: names of the workload and of the mode.
        changes: changes to the workload; with ``device="cuda"`` each rank has a GPU.
    """

    def __init__(
        self, workload: str, mode: str, rank: int, world_size: int, store: str, **changes: object
    ) -> None:
        join(rank, world_size, store, str(changes.get("device", "cpu")))
        from bench.ablations import ABLATIONS
        from bench.modes import MODES, ON_GPU, OVER_HOSTS
        from bench.workloads import LLAMAS, WORKLOADS

        self._mode = (MODES | ABLATIONS | ON_GPU | OVER_HOSTS)[mode]
        self._workload = replace((WORKLOADS | LLAMAS)[workload], **changes)
        self._generator = torch.Generator().manual_seed(rank)
        self._step = self._mode.build(self._workload)

    def step(self) -> Cost:
        tokens = self._workload.tokens(self._generator)
        dist.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        main, start = time.thread_time(), time.perf_counter()
        self._step(tokens)
        wall, main = time.perf_counter() - start, time.thread_time() - main
        after = resource.getrusage(resource.RUSAGE_SELF)
        return Cost(
            wall,
            main,
            after.ru_utime - before.ru_utime,
            after.ru_stime - before.ru_stime,
            after.ru_minflt - before.ru_minflt,
        )

    def timed(self, warmup: int, number: int) -> dict:
        """Times a first step, and ``number`` steps after ``warmup`` more, on the device's clock."""
        from bench.gpu import time_steps

        return time_steps(self._step, self._tokens(1 + warmup + number), warmup)

    def traced(self, path: str) -> None:
        """Writes the trace of a step to ``path``."""
        from bench.overlap import record

        record(self._step, self._tokens(2), path)

    def _tokens(self, number: int) -> list[torch.Tensor]:
        return [self._workload.tokens(self._generator) for _ in range(number)]

    def collectives(self) -> dict[str, tuple[int, int]]:
        """Returns, by kind, the number of a step's collectives and their full bytes."""
        from bench.collectives import count

        return count(lambda: self._step(self._workload.tokens(self._generator)))

    def agreement(self) -> tuple[float, float]:
        """Returns the seconds that ranks take to agree on gradients, and the step's seconds."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            cost = self.step()
        microseconds = sum(
            event.cpu_time_total
            for event in profiler.key_averages()
            if event.key.startswith("zero3::presence")
        )
        return microseconds / 1e6, cost.wall

    def memory(self) -> Memory:
        return memory_of_this_process()


def memory_of_this_process() -> Memory:
    """Returns the memory of this process, and begins a new peak."""
    fields: dict[str, str] = {}
    for path in ("/proc/self/status", "/proc/self/smaps_rollup"):
        with open(path) as file:
            fields.update(line.split(":", 1) for line in file if ":" in line)
    names = ("VmRSS", "VmHWM", "Pss")
    memory = Memory(*(int(fields[name].split()[0]) * 1024 for name in names))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    return memory


def join(rank: int, world_size: int, store: str, device: str = "cpu") -> None:
    """Makes the process a rank, whose collectives time out after :data:`TIMEOUT_SECONDS`."""
    of_rank = None
    if device == "cuda":
        of_rank = torch.device("cuda", rank)
        torch.cuda.set_device(of_rank)
        # For AdamW over tensors in host memory.
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // world_size, 1))
    dist.init_process_group(
        "gloo" if of_rank is None else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        device_id=of_rank,
    )


def _serve(pipe, make, rank, world_size, store) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    made = error = None
    while True:
        try:
            command, args = pipe.recv()
        except EOFError:
            break
        try:
            if error is None:
                made = made or make(rank, world_size, store)
                pipe.send(getattr(made, command)(*args))
        except Exception as raised:
            traceback.print_exc()
            what = ", ".join(map(str, make.args))
            error = RuntimeError(f"{what}, rank {rank}: {type(raised).__name__}: {raised}")
        if error is not None:
            pipe.send(error)
    if dist.is_initialized():
        dist.destroy_process_group()

"""``DigestLog``: a file with a digest of every tenth step, and how the file is read.

A line is a JSON object. The first of each start has the number of ranks, the release of torch and
the first step::

    {"ranks": 2, "torch": "2.13.0+cpu", "start": 0}
    {"step": 10, "shards": {FQN: digest}, "gradients": {...}, "states": {FQN: {NAME: digest}}}
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.digests.training_digest import (
    Optimizers,
    TrainingDigest,
    training_digest,
)
from deepcompile_zero3.transport.on_all_ranks import on_all_ranks


class DigestLog:
    """Appends a :func:`training_digest` of some steps to a file, which rank 0 writes.

    For example::

        log = DigestLog("run.jsonl", model, optimizer, every=10, start=steps_of_checkpoint)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            log.step()  # before zero_grad(): gradients are in the digest
            optimizer.zero_grad()

    ``python -m deepcompile_zero3 digest A.jsonl B.jsonl`` compares two such files. A line is
    written at once, so that a run that is killed leaves all lines before it, and half a line at the
    end of a file is dropped. A run that goes on from a checkpoint appends to its file, and replaces
    the digests of all steps after ``start``, also of those that it does not take again.

    Attributes:
        steps: number of steps taken: ``start`` and the calls of ``step``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        every: int = 10,
        start: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Opens the file. Collective.

        Args:
            path: the file, which need not exist. Its folder must.
            model: see :func:`training_digest`.
            optimizer: see :func:`training_digest`.
            every: a digest is taken after each step whose number is a multiple of this one.
            start: number of steps that the model has taken before.
            group: see :func:`training_digest`.

        Raises:
            ValueError: ``every`` is not positive, or ``start`` is negative.
            Zero3Error: the file cannot be written. All ranks raise this.
        """
        if type(every) is not int or every < 1:
            raise ValueError(f"DigestLog: every must be a positive integer, got {every!r}")
        if type(start) is not int or start < 0:
            raise ValueError(f"DigestLog: start must be an integer of at least 0, got {start!r}")
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.steps = start
        self._path = Path(path)
        self._model, self._optimizer = model, optimizer
        self._every = every
        self._group = group
        self._writes = group is None or group.rank() == 0
        ranks = 1 if group is None else group.size()
        begin = {"ranks": ranks, "torch": torch.__version__, "start": start}
        on_all_ranks("DigestLog", lambda: self._begin(begin), group)

    def step(self) -> TrainingDigest | None:
        """Counts a step, and returns its digest if it is one of those that are logged.

        Collective.

        Raises:
            OSError: rank 0 cannot write. Only rank 0 raises this.
            Zero3Error: see :func:`training_digest`.
        """
        self.steps += 1
        if self.steps % self._every:
            return None
        digest = training_digest(self._model, self._optimizer, group=self._group)
        self._write({"step": self.steps, **dataclasses.asdict(digest)})
        return digest

    def _begin(self, line: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        with self._path.open("ab+") as file:
            end = _end_of_whole_lines(file)
            file.truncate(end)
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._writes:
            with self._path.open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")  # in one piece


def _end_of_whole_lines(file: Any) -> int:
    """Returns the position after the last line end of ``file``, which is open for reading."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - (1 << 16))
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


@dataclass
class Run:
    """The lines of a log.

    Attributes:
        settings: number of ranks and release of torch, of the latest start.
        digests: the digest of each logged step of the run that started last and of those that it
            went on from, in order of steps.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    digests: dict[int, TrainingDigest] = field(default_factory=dict)


def read_log(path: str | os.PathLike[str]) -> Run:
    """Reads the file of a :class:`DigestLog`. A last line without an end is ignored.

    Raises:
        Zero3Error: the file is not such a log, or has no digest.
        OSError: the file cannot be read.
    """
    run = Run()
    *lines, _ = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            read = json.loads(line)
            if "step" in read:
                step = int(read.pop("step"))
                run.digests[step] = TrainingDigest(**read)
            else:
                run.settings = {"ranks": read["ranks"], "torch": read["torch"]}
                # Steps after this start were another attempt's.
                run.digests = {n: d for n, d in run.digests.items() if n <= read["start"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Zero3Error(
                f"line {number} of {path} is not one of a DigestLog: {line[:80]!r}"
            ) from error
    if not run.digests:
        raise Zero3Error(f"{path} has no digest of a step: DigestLog(..., every=10) writes them")
    run.digests = dict(sorted(run.digests.items()))
    return run

"""A predicted step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deepcompile_zero3.tools.document import Document
from deepcompile_zero3.tools.planning.machine import Machine, Ranks
from deepcompile_zero3.tools.planning.simulate import Moved, Traffic
from deepcompile_zero3.tools.report import Report
from deepcompile_zero3.tools.table import Cell, Table
from deepcompile_zero3.tools.timeline import Timeline


@dataclass(frozen=True)
class Plan(Document):
    """A predicted step of one rank, the one with the largest shards.

    Attributes:
        report: what the graphs gather, keep and reduce.
        machine: the machine that the step is predicted for.
        ranks: the number of ranks of all replicas.
        seconds: seconds of the step.
        computing: seconds of the step in which the rank computes.
        waiting: seconds of the step in which the rank waits.
        flops: FLOPs of a rank's matrix products.
        product_seconds: seconds that the products take at least, at the machine's FLOP/s for their
            dtypes.
        traffic: traffic by kind of collective.
        moved: bytes that leave memory for a file, or the GPU for host memory, and come back.
        peak: the largest number of bytes in use.
        memory: bytes by kind of memory, at the peak.
        tokens: tokens of a rank: the elements of "input_ids", or 0 if the call has none.
        advice: changes that would help, and by how much.
    """

    report: Report
    machine: Machine
    ranks: int
    seconds: float
    computing: float
    waiting: float
    flops: float
    product_seconds: float
    traffic: dict[str, Traffic]
    moved: Moved
    peak: int
    memory: dict[str, int]
    tokens: int
    advice: tuple[str, ...] = ()

    @property
    def utilization(self) -> float:
        """The fraction of the machine's FLOP/s that the matrix products of the step reach."""
        return self.product_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens * self.ranks / self.seconds

    @property
    def host_bytes(self) -> float:
        """Bytes of a step that a host receives from other hosts, or sends to them, at most.

        Headers are not counted.
        """
        return self._ranks_of_host * sum(traffic.remote for traffic in self.traffic.values())

    @property
    def link_seconds(self) -> float:
        """Seconds that these bytes take on the link of a host, a bound of the step."""
        return self.host_bytes / (self._ranks_of_host * self.machine.remote.bandwidth)

    @property
    def _ranks_of_host(self) -> int:
        return Ranks(self.ranks, min(self.machine.ranks_per_host, self.ranks)).on_last_host

    @property
    def fits(self) -> bool:
        """Whether the peak fits in the machine's memory."""
        return self.peak <= self.machine.memory

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as numbers, strings, lists and dicts, for JSON; without the report."""
        names = ("ranks", "seconds", "computing", "waiting", "flops", "utilization")
        more = ("tokens_per_second", "peak", "memory", "fits", "host_bytes", "link_seconds")
        return {
            "model": self.report.model,
            "machine": self.machine.name,
            "source": self.machine.source,
            "compared": self.machine.compared,
            "traffic": {op: asdict(traffic) for op, traffic in self.traffic.items()},
            "moved": self.moved._asdict(),
            "advice": list(self.advice),
        } | {name: getattr(self, name) for name in (*names, *more)}

    def _title(self) -> str:
        return f"{self.report.model} on {self.ranks} ranks of {self.machine.name}"

    def _timelines(self) -> tuple[Timeline]:
        return (self.report.timeline,)

    def _tables(self) -> list[Table]:
        return self.report._tables()

    def _parts(self) -> Iterator[str | Table]:
        buckets = [bucket for graph in self.report.graphs for bucket in graph.gathers]
        dtypes = "/".join(dict.fromkeys(dtype for bucket in buckets for dtype in bucket.dtypes))
        yield f"{self._title()}, each model over {self.report.world_size}, computed in {dtypes}"
        waits = self.waiting / self.seconds
        reached = self.flops / self.product_seconds if self.product_seconds else 0.0
        speed = f"{self.tokens_per_second:,.0f} tokens/s in all; " if self.tokens else ""
        seconds = self.seconds
        step = f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
        yield (
            f"predicted: {step} a step, {waits:.1%} of it waiting for others; {speed}"
            f"{self.utilization:.0%} of the {reached / 1e12:.0f} TFLOP/s that a rank is taken to "
            "reach"
        )
        unit, scale = ("GB", 1e9) if self.peak >= 1e9 else ("MB", 1e6)
        yield (
            f"memory: {self.peak / scale:.1f} {unit} of {self.machine.memory / 1e9:.0f} GB"
            + ("" if self.fits else ": does not fit")
        )
        yield ""
        memory = [(kind, f"{nbytes / scale:.2f}") for kind, nbytes in self.memory.items()]
        yield Table("", ("at the peak", unit), memory)
        yield ""
        if any(self.moved):
            out, back = (f"{nbytes / scale:.2f} {unit}" for nbytes in self.moved)
            yield f"a step moves {out} out of memory, and {back} back into it"
            yield ""
        columns = ("a step", "number", f"{unit} full", f"{unit} local", f"{unit} remote", "ms")
        rows: list[tuple[Cell, ...]] = []
        for op, sent in self.traffic.items():
            sizes = (f"{size / scale:.2f}" for size in (sent.nbytes, sent.local, sent.remote))
            rows.append((op, sent.number, *sizes, f"{sent.seconds * 1e3:.1f}"))
        yield Table("", columns, rows)
        for line in (self.machine.provenance, *self.advice):
            yield ""
            yield line

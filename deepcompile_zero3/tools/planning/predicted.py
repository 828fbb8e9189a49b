"""A predicted step, and its text."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from deepcompile_zero3.tools.page import save_page
from deepcompile_zero3.tools.planning.machine import Machine
from deepcompile_zero3.tools.planning.simulate import Step, Traffic
from deepcompile_zero3.tools.report import Report, tables_of, text_of


@dataclass(frozen=True)
class Plan:
    """A predicted step of one rank, the one with the largest shards.

    Attributes:
        report: what the graphs gather, keep and reduce.
        machine: the machine that the step is predicted for.
        ranks: the number of ranks of all replicas.
        seconds: seconds of the step.
        computing, waiting: seconds of the step in which the rank computes, or waits.
        flops: FLOPs of a rank's matrix products.
        product_seconds: seconds that the products take at least, at the machine's FLOP/s for their
            dtypes.
        traffic: traffic by kind of collective.
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
    peak: int
    memory: dict[str, int]
    tokens: int
    advice: tuple[str, ...]

    @property
    def utilisation(self) -> float:
        """The fraction of the machine's FLOP/s that the matrix products of the step reach."""
        return self.product_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens * self.ranks / self.seconds

    @property
    def fits(self) -> bool:
        """Whether the peak fits in the machine's memory."""
        return self.peak <= self.machine.memory

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as numbers, strings, lists and dicts, for JSON; without the report."""
        return {
            "model": self.report.model,
            "machine": self.machine.name,
            "source": self.machine.source,
            "compared": self.machine.compared,
            "ranks": self.ranks,
            "seconds": self.seconds,
            "computing": self.computing,
            "waiting": self.waiting,
            "flops": self.flops,
            "utilisation": self.utilisation,
            "tokens_per_second": self.tokens_per_second,
            "traffic": {op: asdict(traffic) for op, traffic in self.traffic.items()},
            "peak": self.peak,
            "memory": self.memory,
            "fits": self.fits,
            "advice": list(self.advice),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the timeline, the memory and tables: see :func:`save_page`."""
        title = f"{self.report.model} on {self.ranks} ranks of {self.machine.name}"
        timeline = self.report.timeline
        save_page(path, title, str(self), [timeline], tables_of(self.report, timeline))

    def __str__(self) -> str:
        return text_of(_parts(self))


def plan_of(report: Report, machine: Machine, ranks: int, step: Step, tokens: int) -> Plan:
    """Returns the plan of a simulated step, without advice."""
    spans = step.timeline.spans
    seconds = {
        lane: sum(span.end - span.start for span in spans if span.lane == lane)
        for lane in ("compute", "waiting")
    }
    return Plan(
        report=report,
        machine=machine,
        ranks=ranks,
        seconds=sum(seconds.values()),
        computing=seconds["compute"],
        waiting=seconds["waiting"],
        flops=step.flops,
        product_seconds=step.product_seconds,
        traffic=step.traffic,
        peak=sum(report.peak.values()),
        memory=report.peak,
        tokens=tokens,
        advice=(),
    )


def _parts(plan: Plan) -> list[Any]:
    report = plan.report
    waits = plan.waiting / plan.seconds
    buckets = [bucket for graph in report.graphs for bucket in graph.gathers]
    dtypes = "/".join(dict.fromkeys(dtype for bucket in buckets for dtype in bucket.dtypes))
    unit, scale = ("GB", 1e9) if plan.peak >= 1e9 else ("MB", 1e6)
    reached = plan.flops / plan.product_seconds if plan.product_seconds else 0.0
    speed = f"{plan.tokens_per_second:,.0f} tokens/s in all; " if plan.tokens else ""
    parts: list[Any] = [
        f"{report.model} on {plan.ranks} ranks of {plan.machine.name}, each model over "
        f"{report.world_size}, computed in {dtypes}",
        f"predicted: {_ms(plan.seconds)} a step, {waits:.1%} of it waiting for others; {speed}"
        f"{plan.utilisation:.0%} of the {reached / 1e12:.0f} TFLOP/s that a rank is taken to reach",
        f"memory: {plan.peak / scale:.1f} {unit} of {plan.machine.memory / 1e9:.0f} GB"
        + ("" if plan.fits else ": does not fit"),
        "",
    ]
    memory = Table("at the peak", unit, box=None, pad_edge=False)
    memory.columns[1].justify = "right"
    for kind, nbytes in plan.memory.items():
        memory.add_row(kind, f"{nbytes / scale:.2f}")
    parts += [memory, ""]
    columns = [f"{unit} {what}" for what in ("full", "local", "remote")]
    sent = Table("a step", "number", *columns, "ms", box=None)
    sent.pad_edge = False
    for column in sent.columns[1:]:
        column.justify = "right"
    for op, traffic in plan.traffic.items():
        sizes = (traffic.nbytes, traffic.local, traffic.remote)
        sent.add_row(
            op,
            str(traffic.number),
            *(f"{size / scale:.2f}" for size in sizes),
            f"{traffic.seconds * 1e3:.1f}",
        )
    parts.append(sent)
    parts += ["", plan.machine.provenance]
    return [*parts, *(line for advice in plan.advice for line in ("", advice))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

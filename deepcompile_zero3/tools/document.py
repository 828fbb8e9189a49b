"""The findings of a tool, as text, as JSON and as a page."""

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from deepcompile_zero3.tools.page import save_page
from deepcompile_zero3.tools.table import Table
from deepcompile_zero3.tools.timeline import Timeline

_Path: TypeAlias = str | os.PathLike[str]


class Document:
    """The findings of a tool, as a dataclass. ``print`` it, save it, or see :meth:`to_dict`.

    A subclass has its text, and the title, the timelines and perhaps more tables of its page.
    """

    def _parts(self) -> Iterable[str | Table]:
        raise NotImplementedError

    def _title(self) -> str:
        raise NotImplementedError

    def _timelines(self) -> Sequence[Timeline]:
        return ()

    def _tables(self) -> Sequence[Table]:
        return [table for timeline in self._timelines()[:1] for table in tables_of(timeline)]

    def __str__(self) -> str:
        return text_of(self._parts())

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, strings, lists and dicts, for JSON."""
        return asdict(self)  # type: ignore[call-overload]

    def save(self, path: _Path) -> None:
        """Writes a page with timelines and searchable tables, which needs no other file.

        Args:
            path: the path of the page. An existing file is replaced.

        Raises:
            ImportError: plotly is not installed.
        """
        save_page(path, self._title(), str(self), self._timelines(), self._tables())

    def show(self, page: _Path | None = None, data: _Path | None = None) -> None:
        """Prints the text, and writes a page and JSON if their paths are given."""
        print(self, flush=True)
        if data is not None:
            Path(data).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        if page is not None:
            self.save(page)


def text_of(parts: Iterable[str | Table]) -> str:
    """Returns the parts as rich prints them, 80 columns wide."""
    text = io.StringIO()
    console = Console(file=text, width=80, color_system=None, emoji=False)
    for part in parts:
        shown = part.as_rich() if isinstance(part, Table) else part
        console.print(shown, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def tables_of(timeline: Timeline) -> list[Table]:
    """Returns tables of the collectives, the waits and the operators of a timeline."""
    columns = ("collective", "parameters", "MiB", "starts, ms", "lasts, ms")
    tables = []
    for name, lanes in (("Collectives", ("gather", "reduce")), ("Waits", ("waiting",))):
        rows = [
            (s.name, ", ".join(s.parameters), s.nbytes / 2**20, s.start * 1e3, s.seconds * 1e3)
            for s in timeline.of(*lanes)
        ]
        tables.append(Table(name, columns, rows))
    calls: dict[str, list[float]] = defaultdict(list)
    for span in timeline.of("compute"):
        calls[span.name].append(span.seconds * 1e3)
    operators = [(name, len(ms), sum(ms)) for name, ms in calls.items()]
    operators.sort(key=itemgetter(2), reverse=True)
    return [*tables, Table("Operators", ("operator", "calls", "ms"), operators)]

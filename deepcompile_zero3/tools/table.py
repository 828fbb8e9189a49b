"""Tables for texts and for pages, and how their cells say names and bytes."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import rich.table

Cell: TypeAlias = str | int | float

_NUMBER = re.compile(r"([-+]?[\d,.]+(e[-+]?\d+)?%?|inf|nan)?")


@dataclass(frozen=True)
class Table:
    """A table of a text or a page. Columns of numbers are right-aligned."""

    name: str  # the heading on a page, whose rows can be searched
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]  # a cell for each column; floats have three decimals

    def as_rich(self) -> rich.table.Table:
        """Returns the table for rich, which prints it."""
        table = rich.table.Table(box=None, pad_edge=False, header_style="")
        for column, is_number in zip(self.columns, self._are_numbers(), strict=True):
            if is_number:
                table.add_column(column, justify="right", no_wrap=True)
            else:
                table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*map(_text, row))
        return table

    def as_html(self) -> str:
        """Returns the table as a section of a page."""
        classes = [" class='number'" if is_number else "" for is_number in self._are_numbers()]

        def row(tag: str, cells: Iterable[Cell]) -> str:
            texts = (html.escape(_text(cell)) for cell in cells)
            return "".join(
                f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(classes, texts, strict=True)
            )

        rows = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in self.rows)
        return (
            f"<section><h2>{html.escape(self.name)}</h2><div class='scroll'><table>"
            f"<thead><tr>{row('th', self.columns)}</tr></thead><tbody>\n{rows}\n</tbody>"
            "</table></div></section>\n"
        )

    def _are_numbers(self) -> list[bool]:
        """Returns for each column whether it has numbers, and nothing else but empty cells."""
        columns = ([_text(row[i]) for row in self.rows] for i in range(len(self.columns)))
        return [any(texts) and all(map(_NUMBER.fullmatch, texts)) for texts in columns]


def _text(cell: Cell) -> str:
    return f"{cell:,.3f}" if isinstance(cell, float) else str(cell)


def and_more(names: Sequence[str], shown: int = 1, separator: str = ", ") -> str:
    """Returns the first names and the number of further names."""
    more = len(names) - shown
    return separator.join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def mib(nbytes: int) -> str:
    """Returns a number of MiB, with three decimals if it is small."""
    return f"{nbytes / 2**20:,.{1 if nbytes >= 10 * 2**20 else 3}f}"

"""A step as a web page: what happens when, how much memory is alive, and tables to search."""

import html
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import TypeAlias

from deepcompile_zero3.tools.drawing import FOUND, draw
from deepcompile_zero3.tools.timeline import Timeline

Cell: TypeAlias = str | int | float


@dataclass(frozen=True)
class Table:
    """A table whose rows can be searched.

    Attributes:
        name: the heading of the table.
        columns: the headings of the columns.
        rows: rows of one cell for each column. Numbers are right-aligned, floats have three
            decimals.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def save_page(
    path: str | os.PathLike[str],
    title: str,
    text: str,
    timelines: Sequence[Timeline],
    tables: Sequence[Table],
) -> None:
    """Writes one HTML file, of 5 MB or more, that needs no network.

    Args:
        path: the path of the file. An existing file is replaced.
        title: the heading of the page.
        text: shown below the title, line by line.
        timelines: drawn below one another, with the same time axis. In long timelines, neighbouring
            spans that are too narrow to see are drawn as one.
        tables: shown below the timelines. The text in the page's search box selects the rows that
            contain it, and the spans whose operator or parameters contain it.

    Raises:
        ImportError: plotly is not installed.
        ValueError: a time is infinite or not a number.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            'a page needs plotly; install it with: pip install "deepcompile_zero3[report]"'
        ) from error
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    drawing = json.dumps(asdict(draw(timelines)), allow_nan=False, separators=(",", ":"))
    content = page.substitute(
        title=html.escape(title),
        text=html.escape(text),
        found=FOUND,
        tables="".join(map(_section, tables)),
        drawing=drawing.replace("<", r"\u003c"),  # no name can end the script element
        plotly=get_plotlyjs(),
    )
    Path(path).write_text(content, encoding="utf-8")


def _section(table: Table) -> str:
    first = table.rows[0] if table.rows else ("",) * len(table.columns)
    heads = "".join(map(_head, table.columns, first))
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f"<section><h2>{html.escape(table.name)}</h2><div class='scroll'><table>"
        f"<thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div></section>\n"
    )


def _head(column: str, value: Cell) -> str:
    """Returns the heading cell of a column whose first value is ``value``."""
    number = "" if isinstance(value, str) else " class='number'"
    return f"<th{number}>{html.escape(column)}</th>"


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    number = f"{value:,.3f}" if isinstance(value, float) else str(value)
    return f"<td class='number'>{number}</td>"

"""Reads the documents: rows of tables that name tests, blocks of code, and anchors."""

import re
import textwrap
from typing import NamedTuple

from support.paths import ROOT

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
# A block, and the comment in the line before it that says who runs it, or why nobody does.
_BLOCK = re.compile(
    r"^(?: *<!-- not run here: (?P<reason>[^\n]+) -->\n)?"
    r"(?P<fence> *)```(?P<language>\S*)\n(?P<code>.*?)^(?P=fence)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code in a document. A ``reason`` says why its own test does not run it."""

    language: str
    code: str
    line: int
    reason: str | None


def rows_of(document):
    """Returns the table rows of ``docs/<document>`` that end with tests, as lists of cells."""
    lines = (ROOT / "docs" / document).read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if "::" in row[-1]]


def assert_tests_exist(cell):
    """Asserts that each of a cell's tests exists."""
    for test in cell.split(", "):
        file, name = test.strip("`").split("::")
        (path,) = (ROOT / "tests").rglob(file)  # its room may change, its name is its own
        assert f"def {name}(" in path.read_text(), test


def blocks_of(page):
    """Returns the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            match["language"],
            textwrap.dedent(match["code"]),
            text.count("\n", 0, match.start("language")) + 1,
            match["reason"],
        )
        for match in _BLOCK.finditer(text)
    ]


def anchors_of(page):
    """Returns the anchors of a page, as repositories show it and as Sphinx builds it."""
    text = re.sub(_BLOCK, "", (ROOT / page).read_text())
    anchors = set(re.findall(r'<a id="(.+?)"></a>', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).lower())
        anchors.add(plain.strip().replace(" ", "-"))
    return anchors


def links_of(page):
    """Returns the links of a page that lead into this repository."""
    text = re.sub(_BLOCK, "", (ROOT / page).read_text())
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]

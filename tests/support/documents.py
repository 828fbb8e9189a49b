"""Reads tables of the documents whose rows name tests in their last cell."""

from support.paths import ROOT


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

"""Each folder of csrc includes only headers of folders below it."""

import re
from pathlib import Path

from support.paths import CSRC

LEVELS = {
    "": 6,
    "gather": 5,
    "reduce": 4,
    "transport": 3,
    "parameter": 2,
    "kernels": 1,
    "tier": 1,
    "support": 0,
}


def test_no_folder_includes_one_above_or_beside_it():
    sources = [
        path for path in CSRC.rglob("*.*") if path.name not in ("bindings.h", "bindings.cpp")
    ]
    assert {path.parent.relative_to(CSRC).as_posix() for path in sources} == {*LEVELS} - {""} | {
        "."
    }
    for path in sources:
        folder = path.parent.relative_to(CSRC).as_posix().strip(".")
        for name in re.findall(r'#include "(.*)"', path.read_text()):
            included = Path(name).parent.as_posix().strip(".")
            assert included == folder or LEVELS[included] < LEVELS[folder], f"{path}: {name}"

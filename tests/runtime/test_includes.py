"""Who includes whom in csrc/: a folder only what is below it, and the core no feature."""

import re
from collections.abc import Iterator

from support.paths import CSRC

# Folders of the core, and how high each stands.
CORE = {
    "": 8,
    "gather": 7,
    "reduce": 6,
    "transport/shared": 5,  # asks c10d for the timeout of a process group, and whether it exists
    "transport/c10d": 4,
    "transport/simulated": 4,
    "transport": 3,
    "parameter": 2,
    "kernels": 1,
    "support": 0,
}
HOW_BYTES_TRAVEL = {"transport/c10d", "transport/shared", "transport/simulated"}
FEATURES = {"features/digests", "features/hybrid", "features/quantized", "features/tier"}


def included(of_bindings: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yields each include of one of our headers: the folder, that of the header, and a text."""
    for path in CSRC.rglob("*.*"):
        if (path.name in ("bindings.h", "bindings.cpp")) is not of_bindings:
            continue
        for name in re.findall(r'#include "(.*)"', path.read_text()):
            header = name.rpartition("/")[0]
            yield path.parent.relative_to(CSRC).as_posix().strip("."), header, f"{path}: {name}"


def test_each_folder_is_known():
    folders = {path.parent.relative_to(CSRC).as_posix().strip(".") for path in CSRC.rglob("*.*")}
    assert folders == {*CORE} | FEATURES


def test_no_folder_includes_one_above_or_beside_it():
    for folder, header, text in included():
        if folder in CORE and header in CORE:
            assert header == folder or CORE[header] < CORE[folder], text


def test_only_a_transport_knows_how_its_bytes_travel():
    for folder, header, text in included():
        assert header not in HOW_BYTES_TRAVEL or folder in HOW_BYTES_TRAVEL, text


def test_the_core_includes_no_feature():
    for folder, header, text in included():
        assert header not in FEATURES or folder in FEATURES, text


def test_features_do_not_include_each_other():
    for bindings in (False, True):
        for folder, header, text in included(bindings):
            if folder in FEATURES:
                assert header == folder or header in CORE, text

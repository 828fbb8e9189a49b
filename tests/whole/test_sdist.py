"""A source distribution has all that a build takes, and the pages that errors lead to."""

import subprocess
import sys
import tarfile

import pytest
from support.paths import ROOT


def _files(folder):
    """Returns the files of a folder, without what Python and a build leave there."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix not in (".pyc", ".so") and "__pycache__" not in path.parts
    }


@pytest.mark.more
def test_a_source_distribution_has_all_sources(tmp_path):
    command = [
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        tmp_path,
        "sdist",
        "--dist-dir",
        tmp_path,
    ]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=120)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        files = {file.name.partition("/")[2] for file in packed if file.isfile()}
    expected = _files("csrc") | _files("deepcompile_zero3") | _files("docs")
    expected |= {"setup.py", "pyproject.toml", "README.md", "CHANGELOG.md"}
    assert expected - files == set()
    assert {file for file in files if file.endswith(".so")} == set()

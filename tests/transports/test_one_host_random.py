"""Threads that play the ranks of one host gather and reduce correctly, without data races."""

import os
import subprocess

import pytest
from support import cxx_programs
from support.paths import CSRC, ROOT

OURS = [
    CSRC / "transport" / "shared" / f"{name}.cpp"
    for name in ("rank_waiter", "reduce_words", "ring")
]
OURS += [CSRC / "support" / f"{name}.cpp" for name in ("error", "signals")]
SOURCES = [ROOT / "tests/transports/one_host_random/main.cpp", *OURS]
FLAGS = ["-O1", "-fsanitize=thread", f"-I{CSRC}"]


def _run(program):
    options = {"TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [program], capture_output=True, text=True, timeout=120, env=os.environ | options
    )


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Returns ``build(*arguments)``, which compiles the program with the arguments."""
    folder = tmp_path_factory.mktemp("one_host_random")
    build = cxx_programs.builder(folder, *FLAGS)
    ran = _run(folder / "empty")
    if ran.returncode != 0:
        pytest.skip(f"ThreadSanitizer does not run here: {ran.stderr}")
    return lambda *arguments: build(*SOURCES, *arguments)


@pytest.mark.long
def test_random_gathers_and_reductions_are_right(build):
    ran = _run(build())
    assert "WARNING: ThreadSanitizer" not in ran.stderr, ran.stderr
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("mistake", [1, 2, 3, 4])
def test_a_rank_that_waits_for_no_reader_is_found(build, mistake):
    ran = _run(build(f"-DMISTAKE={mistake}"))
    assert ran.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in ran.stderr or "is wrong" in ran.stderr

"""The runtime runs on any processor of its architecture, and chooses wider instructions itself."""

import platform
import re
import shutil
import subprocess

import pytest

from deepcompile_zero3.runtime import _C

# Instructions of AVX and later begin with a v, or use registers that they brought.
WIDE = re.compile(r"\t(?:v[a-z]\w+ |.*%[yz]mm)")
CHOSEN_AT_LOAD = re.compile(r"\.(?:avx2|arch_x86_64_v[34])(?:\.|$)")  # by target_clones


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_only_clones_that_are_chosen_at_load_have_instructions_beyond_the_baseline():
    command = ["objdump", "--disassemble", "--no-show-raw-insn", _C.__file__]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    wide = set()
    for function in re.split(r"^[0-9a-f]+ <", printed.stdout, flags=re.MULTILINE)[1:]:
        name, _, body = function.partition(">:\n")
        if WIDE.search(body):
            wide.add(name)
    assert wide  # they are there
    assert [name for name in wide if not CHOSEN_AT_LOAD.search(name)] == []

"""The GPU's copy kernel is right, thread by thread, on a CPU."""

import subprocess

import pytest
from support import cxx_programs
from support.paths import CSRC, ROOT
from torch.utils.cpp_extension import include_paths

SOURCE = ROOT / "tests/runtime/copy_kernel.cpp"
FLAGS = ["-O2", "-fsanitize=address,undefined", "-fno-sanitize-recover", f"-I{CSRC}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns ``run(*arguments)``, which compiles the program with the arguments and runs it."""
    includes = [f"-isystem{path}" for path in include_paths()]
    build = cxx_programs.builder(tmp_path_factory.mktemp("copy_kernel"), *FLAGS, *includes)

    def run(*arguments):
        program = build(*arguments, SOURCE)
        return subprocess.run([program], capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.more
def test_every_element_is_cast_divided_and_in_its_place(run):
    ran = run()
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.parametrize(("mistake", "message"), [(1, "in place of"), (2, "in place of")])
def test_a_mistake_is_found(run, mistake, message):
    ran = run(f"-DMISTAKE={mistake}")
    assert ran.returncode == 1
    assert message in ran.stdout

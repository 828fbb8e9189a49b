"""The GPU's copy kernel is right, thread by thread, on a CPU."""

import shutil
import subprocess

import pytest
from support.paths import CSRC, ROOT
from torch.utils.cpp_extension import include_paths

SOURCE = ROOT / "tests/runtime/copy_kernel.cpp"
FLAGS = ["-std=c++20", "-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]


def _compile(program, source, *arguments):
    includes = [f"-I{CSRC}", *(f"-isystem{path}" for path in include_paths())]
    command = ["g++", *FLAGS, *includes, *arguments, source, "-o", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns ``run(*arguments)``, which compiles the program with the arguments and runs it."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("copy_kernel")
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}")
    compiled = _compile(folder / "empty", empty)
    if compiled.returncode != 0:
        pytest.skip(f"g++ cannot build with AddressSanitizer: {compiled.stderr}")

    def run(*arguments):
        program = folder / "program"
        compiled = _compile(program, SOURCE, *arguments)
        assert compiled.returncode == 0, compiled.stderr
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

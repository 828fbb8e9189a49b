"""C++ programs that sanitizers watch."""

import shutil
import subprocess

import pytest


def builder(folder, *flags):
    """Returns ``build(*arguments)``, which compiles a program in ``folder`` and returns its path.

    The test is skipped where g++ cannot build an empty program, which is ``folder / "empty"``.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")

    def compile_to(program, *arguments):
        command = ["g++", "-std=c++20", "-g", *flags, *arguments, "-o", program]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    def build(*arguments):
        compiled = compile_to(folder / "program", *arguments)
        assert compiled.returncode == 0, compiled.stderr
        return folder / "program"

    empty = folder / "empty.cpp"
    empty.write_text("int main() {}")
    compiled = compile_to(folder / "empty", empty)
    if compiled.returncode != 0:
        pytest.skip(f"g++ cannot build with {' '.join(flags)}: {compiled.stderr}")
    return build

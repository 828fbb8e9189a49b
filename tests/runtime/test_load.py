"""A wheel has several runtimes, of which the one for the installed torch is loaded."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from support.command_line import in_new_process

import deepcompile_zero3
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.runtime.load import folders_of_runtime
from deepcompile_zero3.torch_release import RELEASE

PACKAGE = Path(deepcompile_zero3.__file__).parent


def test_a_runtime_is_chosen_by_the_release_of_torch(tmp_path):
    for release in ("2_9", "2_13"):
        (tmp_path / f"for_torch_{release}").mkdir()
    assert folders_of_runtime(tmp_path, (2, 13)) == [str(tmp_path / "for_torch_2_13")]
    assert folders_of_runtime(tmp_path, (2, 9)) == [str(tmp_path / "for_torch_2_9")]


def test_a_torch_without_a_runtime_is_named_beside_those_that_have_one(tmp_path):
    for release in ("2_13", "2_9"):
        (tmp_path / f"for_torch_{release}").mkdir()
    expected = f"for torch 2.9, 2.13, not for torch {torch.__version__}: install one of these, or"
    with pytest.raises(ImportError, match=re.escape(expected)):
        folders_of_runtime(tmp_path, (2, 1))


def test_a_build_from_source_has_its_runtime_in_the_package(tmp_path):
    assert folders_of_runtime(tmp_path, RELEASE) == []


def test_the_runtime_of_a_wheel_has_the_name_of_one_from_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which a new process looks into first
    without = shutil.ignore_patterns("*.so", "__pycache__", "for_torch_*")
    copied = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=without)
    folder = copied / "runtime" / f"for_torch_{RELEASE[0]}_{RELEASE[1]}"
    folder.mkdir()
    runtime = shutil.copy2(_C.__file__, folder)
    printed = in_new_process(
        """
        import torch
        from deepcompile_zero3 import _C
        from deepcompile_zero3.runtime import _C as loaded

        assert loaded is _C and _C.__name__ == _C.Settings.__module__ == "deepcompile_zero3._C"
        print(_C.__file__, torch.ops.zero3.unshard.default)
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert printed.split() == [str(runtime), "zero3.unshard.default"]

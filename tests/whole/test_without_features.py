"""The core trains without each feature: its folder is deleted, and its lines in ``plugins/``."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "deepcompile_zero3"
FEATURES = sorted(path.parent.name for path in PACKAGE.glob("features/*/__init__.py"))
# Tests of the core alone. Files in other rooms import features.
TESTS = (
    "contract/test_dtypes.py",
    "contract/test_grad_dtype_at_leaf.py",
    "passes",
    "runtime/test_large_gradients.py",
)
# Features that others are allowed to need, by pyproject.toml.
NEEDED_BY = {"owned": ["optimizer_steps"], "offload": ["optimizer_steps"]}
_IMPORT = r"^from deepcompile_zero3\.features\.%s\b.* import (.+)\n"


def _names(text, feature):
    """Returns what a file of ``plugins/`` imports from a feature."""
    return [n for found in re.findall(_IMPORT % feature, text, re.M) for n in found.split(", ")]


def _without(text, feature):
    """Returns the text of a file of ``plugins/`` without the lines of a feature."""
    text, names = re.sub(_IMPORT % feature, "", text, flags=re.M), _names(text, feature)
    for name in names:
        text = re.sub(rf"^ +{name}\b.*,\n", "", text, flags=re.M)
    return text


def test_each_plugin_has_lines_of_its_own():
    for path in (PACKAGE / "plugins").glob("*.py"):
        for feature in FEATURES:
            text = path.read_text()
            left = _without(text, feature)
            assert (left == text) == (f"features.{feature}" not in text)
            assert f"features.{feature}" not in left
            read = {node.id for node in ast.walk(ast.parse(left)) if isinstance(node, ast.Name)}
            assert not read & set(_names(text, feature))


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_trains_without_a_feature(tmp_path, feature):
    package = tmp_path / "deepcompile_zero3"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (feature, *NEEDED_BY.get(feature, ())):
        shutil.rmtree(package / "features" / name)
        for path in (package / "plugins").glob("*.py"):
            path.write_text(_without(path.read_text(), name))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    where = [sys.executable, "-c", "import deepcompile_zero3; print(deepcompile_zero3.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(package / "__init__.py"), found.stderr
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-m", "smoke"]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            *settings,
            *(ROOT / "tests" / t for t in TESTS),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]

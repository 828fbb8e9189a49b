"""The command that a failed test shows to run it alone."""

import os
from types import SimpleNamespace

from support.progress import how_to_repeat


def test_the_command_finds_a_test_from_the_folder_of_the_run(request, monkeypatch):
    monkeypatch.chdir(request.path.parent)  # make test-torch runs in tests/
    *_, test = how_to_repeat(SimpleNamespace(nodeid=request.node.nodeid), request.config).split()
    path, _, name = test.partition("::")
    assert os.path.samefile(path, request.path)
    assert name == request.node.name

"""Calls programs, in this process where they allow it: a new one takes seconds to import torch."""

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from unittest import mock


def call(main, *arguments, **environment):
    """Calls ``main(arguments)`` and returns status and output, as ``subprocess.run`` does."""
    arguments = [str(argument) for argument in arguments]
    out, error = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    if isinstance(status, str):
        error.write(f"{status}\n")
        status = 1
    return subprocess.CompletedProcess(arguments, status or 0, out.getvalue(), error.getvalue())


def in_new_process(program, **environment):
    """Runs ``program`` in a new process and returns its output."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout

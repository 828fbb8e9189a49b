"""What a person wants to know of a run of the tests: how far it is, and how to repeat a failure."""

import os
import shlex
import sys

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressLine:
    """A line on a terminal, in place of a dot for each test, if workers run the tests."""

    def __init__(self):
        self._line = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tests, [red]{task.fields[failed]}[/red] failed,"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        self._failed = 0
        self._task = self._line.add_task("", total=None, failed=0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._line.update(self._task, total=len(ids))
        self._line.start()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed += 1
            self._line.console.print(f"FAILED {report.nodeid}", markup=False)
        if report.when == "teardown":
            self._line.update(self._task, advance=1, failed=self._failed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        if report.when == "call" or report.skipped:
            return report.outcome, "", ""  # no letter
        return ("error", "", "") if report.failed else None

    def pytest_sessionfinish(self):
        self._line.stop()


def is_wanted(config):
    """Returns whether a person watches: on a terminal, and workers run the tests."""
    return (
        config.pluginmanager.hasplugin("dsession")
        and config.option.verbose == 0
        and sys.stderr.isatty()
        and sys.stdout.isatty()
    )


def how_to_repeat(report, config):
    """Returns a command that runs a report's test alone, in the folder of this run."""
    pytest_path = os.path.relpath(os.path.join(os.path.dirname(sys.executable), "pytest"))
    path, *names = report.nodeid.split("::")
    test = "::".join([os.path.relpath(config.rootpath / path), *names])
    transport, device = config.getoption("--transport"), config.getoption("--device")
    arguments = [f"--transport={transport}"] if transport else []
    arguments += [f"--device={device}"] if device != "cpu" else []
    return f"OMP_NUM_THREADS=1 {shlex.join([pytest_path, *arguments, test])}"

"""One process of a host compiles a graph; the others wait for it and load."""

import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from support.pass_graphs import each_fact_changed, facts
from torch import nn

from deepcompile_zero3 import Options, Zero3Error, compile_once, graph_pass, source_key
from deepcompile_zero3.compile_once import cleaning_up, first_alone, graph_key
from deepcompile_zero3.graph.log import logs_are_requested
from deepcompile_zero3.graph_inputs import passes_of
from deepcompile_zero3.passes import pipeline
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.partitioner import Partitioner
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.tools.planning.ahead import compile_ahead
from deepcompile_zero3.torch_internals import compiler, stored_graphs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of torch's caches, for one test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


class Process:
    """A forked process that enters a block for a graph and stays there until it is killed."""

    def __init__(self, block=lambda: first_alone("key")):
        entered, enters = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            with block():
                os.write(enters, b"!")
                time.sleep(60)
            os._exit(0)
        os.read(entered, 1)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_process_waits_for_the_first_and_takes_its_place_if_it_dies():
    first = Process()
    with first_alone("other"):
        pass  # graphs wait only for the same graph: this one would wait for ever
    killer = threading.Timer(0.3, first.kill)
    start = time.monotonic()
    killer.start()
    with first_alone("key"):
        assert time.monotonic() - start >= 0.3
    killer.join()


def test_nobody_waits_longer_than_is_said():
    first = Process()
    try:
        with first_alone("key", patience=0.1):
            pass
    finally:
        first.kill()


def test_nobody_waits_for_what_was_compiled_before_unless_it_failed():
    with pytest.raises(RuntimeError), first_alone("key"):
        raise RuntimeError
    first = Process()  # compiles, since the one before it raised
    with first_alone("key", patience=0.1):
        pass
    with first_alone("key", patience=60):  # the one before has compiled: no wait for `first`
        first.kill()


def test_a_folder_that_cannot_be_written_stops_nobody(folder):
    (folder / "zero3").write_text("a file")
    with first_alone("key"), cleaning_up():
        pass


def _half_an_object(folder, name):
    """Leaves what torch leaves if it is killed while a compiler writes a shared object."""
    place = folder / name[1:3]
    (place / f"{name}.main_CxxBuild").mkdir(parents=True)
    (place / f"{name}.main.cpp").write_text("int main() {}")
    (place / f"{name}.main.so").write_bytes(b"\x7fELF")
    lock = folder / "locks" / f"{name}.lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    return place / f"{name}.main.so", lock


def test_a_process_removes_what_another_that_was_killed_has_half_written(folder, caplog):
    half, _ = _half_an_object(folder, "cabhalf")
    under_way, lock = _half_an_object(folder, "cabother")  # by a process that lives
    whole = folder / "ab" / "cabwhole.main.so"
    whole.touch()
    first = Process(cleaning_up)
    with cleaning_up():
        assert half.exists(), "nobody has died: a compiler may be writing the file"
    first.kill()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with cleaning_up():
            assert not half.exists()
            assert half.with_suffix(".cpp").exists()
            assert under_way.exists()
            assert whole.exists()
    assert f"removed {half}" in caplog.text
    assert not list(folder.glob("zero3/*.compiles"))


def test_what_is_finished_while_others_take_its_lock_stays(folder, monkeypatch):
    finished, _ = _half_an_object(folder, "cabhalf")
    Process(cleaning_up).kill()
    flock = fcntl.flock

    def finish(file, operation):
        build_folder = finished.with_name("cabhalf.main_CxxBuild")
        if "cabhalf" in file.name and build_folder.exists():
            build_folder.rmdir()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", finish)
    with cleaning_up():
        assert finished.exists()


def test_a_process_that_raises_is_not_taken_for_a_dead_one(folder):
    half, _ = _half_an_object(folder, "cabhalf")
    with pytest.raises(RuntimeError), cleaning_up():
        raise RuntimeError
    with cleaning_up():
        assert half.exists()


def test_a_folder_without_locks_is_told_once_and_stops_nobody(folder, monkeypatch):
    def refuse(file, operation):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for key in ("key", "other"):
            with first_alone(key), cleaning_up():
                pass
    (warning,) = told
    assert f"{folder / 'zero3'} cannot be locked ([Errno 13] Permission denied)" in str(
        warning.message
    )
    assert "Set TORCHINDUCTOR_CACHE_DIR" in str(warning.message)


def test_a_long_wait_is_told_once(folder, monkeypatch):
    monkeypatch.setattr(compile_once, "TELL_AFTER", 0.05)
    first = Process()
    try:
        with pytest.warns(UserWarning, match="key.lock for") as told, first_alone("key", 0.4):
            pass
    finally:
        first.kill()
    assert len(told) == 1


def _traced(function):
    return torch.fx.symbolic_trace(function)


class _Partition:
    cut = 1


def test_keys_tell_graphs_inputs_and_settings_apart(monkeypatch):
    x = torch.ones(2, 3)

    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    keys = [graph_key(_traced(double), [x], 1, {})]
    assert graph_key(_traced(double), [torch.zeros(2, 3)], 1, {}) == keys[0]
    keys += [graph_key(_traced(f), [x], s, {}) for f, s in ((triple, 1), (double, 2))]
    others = (x.double(), torch.ones(3, 3), torch.ones(3, 2).t())
    others += (torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, device="meta"))
    keys += [graph_key(_traced(double), [other], 1, {}) for other in others]
    with torch.no_grad():
        keys.append(graph_key(_traced(double), [x], 1, {}))
    with torch._inductor.config.patch(max_fusion_size=1):
        keys.append(graph_key(_traced(double), [x], 1, {}))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        keys.append(graph_key(_traced(double), [x], 1, {}))
    partitioners = [_Partition() for _ in range(3)]
    partitioners[2].cut = 2
    one, same, other = ({"custom_partitioner_fn": each} for each in partitioners)
    keys += [graph_key(_traced(double), [x], 1, one), graph_key(_traced(double), [x], 1, other)]
    assert graph_key(_traced(double), [x], 1, same) == keys[-2]
    assert graph_key(_traced(double), [x], 1, {"post_grad_custom_pre_pass": lambda _: 0}) is None
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    keys.append(graph_key(_traced(double), [x], 1, {}))
    assert len(set(keys)) == len(keys) == 14


@pytest.mark.smoke
def test_a_graph_is_stored_only_where_ranks_need_not_compile_together():
    assert stored_graphs.why_not_stored({}) == ""
    assert "caches are off" in stored_graphs.why_not_stored({"force_disable_caches": True})
    first, *_ = stored_graphs.COMMUNICATING_IN_AOT  # the other one is of torch 2.15
    settings = [(torch._inductor.config, name) for name in stored_graphs.COMMUNICATING]
    for config, name in [*settings, (torch._functorch.config, first)]:
        with config.patch({name: True}):  # raises if there is no such setting
            assert f": {name} is set" in stored_graphs.why_not_stored({})


@pytest.mark.parametrize(
    ("levels", "asked"),
    [
        ({"": "INFO"}, False),
        ({"deepcompile_zero3": "INFO"}, True),
        ({"deepcompile_zero3": "DEBUG", "deepcompile_zero3.graph": "WARNING"}, False),
        ({"deepcompile_zero3": "WARNING", "deepcompile_zero3.graph.log": "INFO"}, True),
    ],
)
def test_logging_of_the_whole_process_does_not_ask_for_graphs(monkeypatch, levels, asked):
    monkeypatch.setattr(compiler, "is_traced", lambda: False)  # unknown until torch has compiled
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: logger.level for logger in loggers}
    try:
        for logger, level in loggers.items():
            logger.setLevel(level)
        assert logs_are_requested() is asked
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def test_all_that_shapes_a_graph_is_in_the_key_of_stored_graphs(monkeypatch):
    def uuid(facts, regions=(), other=None, share=0.5, **options):
        parsed = Options(**options)
        passes = Pipeline({0: facts}, parsed, share, order=passes_of(options=parsed))
        return repr(Partitioner(passes, dict(regions), other).uuid())

    def mine(key):
        return graph_pass(uuid=key)(lambda gm, facts: None)

    class Other(compiler.CustomPartitionerFn):
        def __call__(self, *args, **kwargs):
            raise NotImplementedError

        def uuid(self):
            return "other"

    one = facts("fc.weight")
    keys = [uuid(one)]
    assert uuid(facts("fc.weight")) == keys[0]
    keys += [uuid(other) for _, other in each_fact_changed(one)]
    keys.append(uuid(one, gather_bucket_mb=2))
    keys += [uuid(one, passes=[mine("a")]), uuid(one, passes=[mine("b")])]
    keys.append(uuid(one, share=0.25))
    keys.append(uuid(one, fp32_weight_grads=True))
    keys.append(uuid(one, regions={"Block_0": {1: one}}))
    keys.append(uuid(one, other=Other()))
    monkeypatch.setattr(source_key, "AT_IMPORT", "another release of this library")
    keys.append(uuid(one))
    assert len(set(keys)) == len(keys) == 9 + len(dataclasses.fields(ParameterFacts))


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A copy of the package, in place of its files."""
    copy = tmp_path / "package"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(source_key.__file__).parent, copy, ignore=ignored)
    monkeypatch.setattr(source_key, "_PACKAGE", copy)
    monkeypatch.setattr(source_key, "AT_IMPORT", source_key.source_key())
    source_key.is_unchanged.cache_clear()
    yield copy
    source_key.is_unchanged.cache_clear()


def test_the_sources_of_all_passes_are_in_the_key(package):
    sources = Path(source_key.__file__).parent
    keys = {source_key.source_key()}
    for module in (pipeline, compile_once, compiler):
        path = package / Path(module.__file__).relative_to(sources)
        path.write_text(path.read_text() + "\n")
        keys.add(source_key.source_key())
    (package / "passes" / "another.py").touch()
    assert len({*keys, source_key.source_key()}) == 5


def test_no_graph_is_stored_once_the_sources_have_changed(package):
    passes = Pipeline({0: facts("fc.weight")}, Options(), 1.0, order=passes_of(options=Options()))
    assert passes.may_be_stored
    (package / "another.py").touch()
    source_key.is_unchanged.cache_clear()
    with pytest.warns(UserWarning, match="have changed since this process imported them"):
        assert not passes.may_be_stored
    with pytest.raises(Zero3Error, match="nothing that is compiled would be stored"):
        compile_ahead(lambda: nn.Linear(4, 4), {"input": torch.ones(2, 4)}, world_size=2)

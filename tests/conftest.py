import gc
import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from ranks import RankPool

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--transport",
        choices=["shared_memory", "c10d"],
        help="how ranks gather and reduce where a test leaves that open",
    )


def pytest_configure(config):
    """Ranks use the transport that was asked for, and compilers share a folder.

    Importing torch's compiler is too late for this: it sets the variable itself.
    """
    if transport := config.getoption("--transport"):
        os.environ["ZERO3_TRANSPORT"] = transport
        config.add_cleanup(lambda: os.environ.pop("ZERO3_TRANSPORT", None))
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_compiler_cache())
        config.add_cleanup(lambda: os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None))


def _compiler_cache():
    """What is compiled is kept for the next session, as long as torch and this library are as now.

    A stale graph would hide what a change breaks, so that any change begins the folder anew.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    for pattern in ("deepcompile_zero3/**/*.py", "csrc/*"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    folder = ROOT / "build" / "compiled-by-tests" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        if time.time() - other.stat().st_mtime > 7 * 86400:  # no session can be using it
            shutil.rmtree(other, ignore_errors=True)
    return folder


def pytest_collection_finish():
    gc.freeze()  # or each collection would visit all of torch, which takes a fifth of a second


def pytest_sessionfinish(session, exitstatus):
    """A rank that was killed while it compiled may have left half a file."""
    if hasattr(session.config, "workerinput"):
        return  # other workers of this session still read it
    if exitstatus != 0 and (folder := os.environ["TORCHINDUCTOR_CACHE_DIR"]).startswith(str(ROOT)):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def pools():
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run_ranks(pools):
    """``run_ranks(world_size, function, *args)``: ``function(*args)`` on every rank, its results.

    ``timeout`` is in seconds; see :class:`ranks.RankPool`.
    """

    def run(world_size, function, *args, timeout=120):
        __tracebackhide__ = True
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].run(function, *args, timeout=timeout)

    return run


@pytest.fixture
def run_apart():
    """As ``run_ranks(2, ...)``, in new processes: torch remembers equal meshes, and their groups,
    for longer than those live.
    """

    def run(function, *args):
        pool = RankPool(2)
        try:
            return pool.run(function, *args, timeout=60)
        finally:
            pool.close()

    return run

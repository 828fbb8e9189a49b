import os
import tempfile

import pytest
from ranks import RankPool


def pytest_addoption(parser):
    parser.addoption(
        "--transport",
        choices=["shared_memory", "c10d"],
        help="how ranks gather and reduce where a test leaves that open",
    )


def pytest_configure(config):
    """Ranks use the transport that was asked for.

    Compilers find nothing on disk and leave nothing, unless TORCHINDUCTOR_CACHE_DIR is set.

    A rank that is killed while it compiles may leave half a file, which no later run can load.
    Importing torch's compiler is too late for this: it sets the variable itself.
    """
    if transport := config.getoption("--transport"):
        os.environ["ZERO3_TRANSPORT"] = transport
        config.add_cleanup(lambda: os.environ.pop("ZERO3_TRANSPORT", None))
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None))


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

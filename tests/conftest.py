import os
import tempfile

import pytest
from ranks import RankPool


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "smoke: the few tests that every supported torch has to pass (make test-torch)"
    )


@pytest.fixture(scope="session", autouse=True)
def inductor_cache():
    """Compilers find nothing on disk and leave nothing, unless TORCHINDUCTOR_CACHE_DIR is set.

    A rank that is killed while it compiles may leave half a file, which no later run can load.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        yield


@pytest.fixture(scope="session")
def pools(inductor_cache):
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

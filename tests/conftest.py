import pytest
from ranks import RankPool


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "smoke: the few tests that every supported torch has to pass (make test-torch)"
    )


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

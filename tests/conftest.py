import functools
import gc
import os
import shutil
import sys

import pytest
import torch
from support import collectives, job, progress, tiers
from support.compiler_cache import CompilerCache
from support.ranks import RankPool


def pytest_addoption(parser):
    parser.addoption(
        "--transport",
        choices=["shared_memory", "c10d", "collectives"],
        help="how ranks gather and reduce where a test leaves that open; collectives: by c10d in "
        "the way of NCCL, on CPUs",
    )
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where tests of one process make their models; cuda omits other tests",
    )


def pytest_configure(config):
    """Sets the transport that was asked for, and a cache folder that compilers share.

    The folder is set before torch's compiler is imported, which would set the variable itself.
    """
    if transport := config.getoption("--transport"):
        variables = {"ZERO3_TRANSPORT": transport}
        if transport == "collectives":
            variables = {"ZERO3_TRANSPORT": "c10d", collectives.LIBRARY: collectives.build()}
            # c10d's flight recorder keeps the code on the stacks of the last 2,000 collectives, and
            # with it graphs and what they refer to: no test could tell that a model is freed.
            variables["TORCH_FR_BUFFER_SIZE"] = "0"
        os.environ.update(variables)
        config.add_cleanup(lambda: [os.environ.pop(name, None) for name in variables])
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        if "torch._inductor" in sys.modules:
            raise pytest.UsageError(
                "a plugin has imported torch's compiler: set the folder of its cache, "
                "TORCHINDUCTOR_CACHE_DIR"
            )
        config.stash[_CACHE] = cache = CompilerCache()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.folder)
        config.add_cleanup(lambda: os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None))


@pytest.hookimpl(trylast=True)  # after pytest-xdist has its say
def pytest_sessionstart(session):
    if progress.is_wanted(session.config):
        session.config.pluginmanager.register(progress.ProgressLine())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        command = progress.how_to_repeat(report, item.config)
        report.sections.append(("this test alone", command))
    return report


_CACHE = pytest.StashKey[CompilerCache]()


def pytest_sessionfinish(session, exitstatus):
    cache = session.config.stash.get(_CACHE, None)
    if cache is not None and exitstatus not in (
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.INTERRUPTED,
        pytest.ExitCode.INTERNAL_ERROR,
    ):
        cache.end_well()


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(config, items):
    all_variants = not any("::" in argument for argument in config.args)
    if all_variants:
        tiers.check(items)
    if config.getoption("--device") == "cuda":
        of_one = [i for i in items if {"one_rank", "pools"} & {*i.fixturenames} == {"one_rank"}]
        _omit(config, items, set(items) - set(of_one))
    if config.getoption("--transport") == "collectives":  # which need ranks on gloo
        others = [
            item
            for item in items
            if item.get_closest_marker("gloo") or "shared_memory" in tiers.values_of(item).values()
        ]
        _omit(config, items, others)
    tiers.mark(items)
    if all_variants and not config.option.keyword:
        _omit(config, items, tiers.products_through_inductor(items))


def _omit(config, items, some):
    omitted = set(some)
    config.hook.pytest_deselected(items=list(omitted))
    items[:] = [item for item in items if item not in omitted]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # otherwise each collection visits all of torch, which takes 0.2 s


@pytest.fixture(scope="session")
def pools():
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run_ranks(pools):
    """``run_ranks(world_size, function, *args)`` runs ``function(*args)`` on every rank.

    It returns the results by rank. ``timeout`` is in seconds; see :class:`ranks.RankPool`.
    """

    def run(world_size, function, *args, timeout=120):
        __tracebackhide__ = True
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].run(function, *args, timeout=timeout)

    return run


def _run_in_new_ranks(start_method):
    def run(function, *args, world_size=2):
        __tracebackhide__ = True
        pool = RankPool(world_size, start_method)
        try:
            return pool.run(function, *args, timeout=60)
        finally:
            pool.close()

    return run


@pytest.fixture
def run_apart():
    """Like ``run_ranks(2, ...)``, but in new processes: torch remembers equal meshes and their
    groups longer than they live.
    """
    return _run_in_new_ranks("forkserver")


@pytest.fixture
def run_spawned():
    """Like ``run_apart``, but in new interpreters with their own hash seeds and addresses."""
    return _run_in_new_ranks("spawn")


@pytest.fixture(scope="module")
def run_collectives():
    """``run_collectives(world_size, function, *args)`` runs ``function(*args)`` on every rank, over
    collectives in the way of NCCL, on CPUs.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    library = collectives.build()
    environment = {collectives.LIBRARY: library, "ZERO3_TRANSPORT": "c10d"}
    pools = {number: RankPool(number, **environment) for number in (1, 2, 3, 4)}
    yield lambda number, *call: pools[number].run(*call)
    for pool in pools.values():
        pool.close()


@pytest.fixture
def one_rank(tmp_path, request):
    """A process group of one rank; sharded models and their names are gone afterwards.

    With ``--device cuda`` models are made on a GPU, over NCCL.
    """
    if request.config.getoption("--device") == "cpu":
        job.start("gloo", tmp_path)
        yield
    else:
        torch.cuda.set_device(0)
        job.start("nccl", tmp_path, device_id=torch.device("cuda", 0))
        with torch.device("cuda"):
            yield
    job.end()


def _job_on_gpu(backend, folder):
    torch.cuda.set_device(0)
    job.start(backend, folder, device_id=torch.device("cuda", 0))
    yield
    job.end()


@pytest.fixture
def nccl(tmp_path):
    """A job of one rank on a GPU."""
    yield from _job_on_gpu("nccl", tmp_path)


@pytest.fixture
def nccl_and_gloo(tmp_path):
    """A job of one rank on a GPU, with collectives on tensors of the CPU too."""
    yield from _job_on_gpu("cpu:gloo,cuda:nccl", tmp_path)


@pytest.fixture(scope="module")
def two_ranks():
    """Returns ``two_ranks(function, *args)``, which calls it on two ranks that are new processes.

    torch's compiler counts the GPUs when it is imported, and a process that is forked afterwards
    cannot use them.
    """
    pool = RankPool(2, "spawn")
    yield functools.partial(pool.run, timeout=120)
    pool.close()

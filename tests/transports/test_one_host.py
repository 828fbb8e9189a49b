"""Ranks of one host share memory: which ranks do, how much, and what they leave behind."""

import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    in_little_memory,
    optimizers_of,
    shard,
)
from support.ranks import RankPool
from support.shared_memory import needs_shared_memory
from torch import nn

from deepcompile_zero3 import Zero3Error, fully_shard
from deepcompile_zero3.sharding.module_parameters import parameters_of
from deepcompile_zero3.transport import one_host, shared_files
from deepcompile_zero3.transport.shared_files import SharedFile

pytestmark = needs_shared_memory


def _is_shared(model):
    parameters = [p for m in model.modules() for p in parameters_of(m).values()]
    [name] = {parameter.handle.transport.name for parameter in parameters}
    return name == "shared_memory"


# ---- which ranks share memory


def _shares(**settings):
    model, reference = shard(Stack(), **settings)
    assert_same_step(model, reference, batch_of(4, 8))
    return _is_shared(model)


def _by_arguments():
    return [_shares(transport=name) for name in ("auto", "shared_memory", "c10d")]


def test_ranks_share_memory_by_default(run_ranks):
    assert run_ranks(2, _by_arguments) == [[True, True, False]] * 2


def _by_environment(name):
    os.environ["ZERO3_TRANSPORT"] = name
    try:
        return [_shares(), _shares(transport="shared_memory")]
    finally:
        del os.environ["ZERO3_TRANSPORT"]


def test_the_environment_decides_what_is_left_open(run_ranks):
    assert run_ranks(2, _by_environment, "c10d") == [[False, True]] * 2


def _disagreeing():
    model = Stack()
    with pytest.raises(Zero3Error, match="transport, 'c10d' on rank 0, 'auto' on rank 1"):
        fully_shard(model, transport="c10d" if dist.get_rank() == 0 else "auto")
    assert type(model) is Stack  # unchanged
    assert_same_step(*shard(model), batch_of(4, 8))


def test_ranks_that_disagree_on_the_transport_get_an_error(run_ranks):
    run_ranks(2, _disagreeing)


@pytest.mark.usefixtures("one_rank")
def test_an_unknown_transport_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"transport is one of 'auto', .*, got 'carrier pigeon'"):
        fully_shard(nn.Linear(2, 2), transport="carrier pigeon")
    monkeypatch.setenv("ZERO3_TRANSPORT", "socket")
    with pytest.raises(ValueError, match=r"ZERO3_TRANSPORT is one of .*, got 'socket'"):
        fully_shard(nn.Linear(2, 2))


@contextlib.contextmanager
def _no_large_files():
    """Fails as on a machine without memory to share."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _without_memory():
    with _no_large_files():
        assert not _shares()
        with pytest.raises(Zero3Error, match="not possible: rank 0: no memory to share"):
            fully_shard(Stack(), transport="shared_memory")


def test_where_there_is_no_memory_messages_are_exchanged(run_ranks):
    run_ranks(2, _without_memory)


def _without_a_wrapper():
    """Acts like a Python that was built without ``memfd_create`` in libc."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "memfd_create")
        return _shares(transport="shared_memory")


def test_memory_is_shared_where_python_has_no_memfd_create(run_ranks):
    assert run_ranks(2, _without_a_wrapper) == [True, True]


def test_memory_is_reserved_where_the_kernel_never_overcommits(tmp_path):
    """Another file stands in for the kernel's setting, which is one for the whole machine."""
    setting, nbytes = tmp_path / "overcommit_memory", 1 << 20
    setting.write_text("2\n")
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    replace = f"mount --bind {setting} /proc/sys/vm/overcommit_memory"
    if shutil.which("unshare") is None or subprocess.run([*apart, replace]).returncode != 0:
        pytest.skip("this process may not make namespaces of its own")
    program = (
        "import os; from deepcompile_zero3.runtime import _C; "
        f"print(os.fstat(_C.new_shared_file({nbytes})).st_blocks * 512)"
    )
    command = [*apart, f'{replace} && exec "$@"', "sh", sys.executable, "-c", program]
    assert int(subprocess.check_output(command)) == nbytes


def _one_fails(function):
    """Makes one rank fail to offer or to map memory, with an unexpected error."""

    def fail(*args):
        raise AttributeError("unheard of")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(one_host, function, fail)
        shares = _shares()
        with pytest.raises(Zero3Error, match=r"not possible: rank 0: .*unheard of"):
            fully_shard(Stack(), transport="shared_memory")
        return shares


def _meet_a_stranger():
    """Lets rank 1 find another file in place of rank 0's."""

    class Strange(SharedFile):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            self.nonce = "0" * len(self.nonce)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_host, "SharedFile", Strange)
        assert not _shares()
        with pytest.raises(
            Zero3Error, match=r"not possible: .*is not the file that process \d+ has made"
        ):
            fully_shard(Stack(), transport="shared_memory")


def test_a_file_of_somebody_else_is_not_written_to(run_ranks):
    run_ranks(2, _meet_a_stranger)


def _built_apart():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_files, "_build", lambda: str(dist.get_rank()))
        assert not _shares()
        with pytest.raises(Zero3Error, match=r"not possible: rank 1: .*another build of"):
            fully_shard(Stack(), transport="shared_memory")


def test_ranks_of_two_builds_do_not_share_memory(run_ranks):
    run_ranks(2, _built_apart)


@pytest.mark.parametrize("function", ["SharedFile", "_map"])
def test_a_rank_that_cannot_share_memory_makes_all_exchange_messages(run_ranks, function):
    assert run_ranks(2, _one_fails, function) == [False, False]


def _mapped():
    """Returns the bytes of shared memory that this process has mapped."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if "memfd:zero3" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def _left_behind():
    def files():
        return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))

    before = files()
    model, reference = shard(Stack(width=64))
    assert_same_step(model, reference, batch_of(4, 64))
    assert files() == before
    with_model = _mapped()
    del model, reference
    gc.collect()
    with_mailboxes = _mapped()
    assert 0 < with_mailboxes < with_model
    shard(Stack(width=64))
    gc.collect()
    assert _mapped() == with_mailboxes


def test_nothing_is_left_behind(run_ranks):
    run_ranks(2, _left_behind)


def _host_bytes(depth, reshard_after_forward):
    """Returns this rank's part of the shared memory, which counts proportionally."""
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    model = fully_shard(model, reshard_after_forward=reshard_after_forward)
    run = compiled(model, "interpreted", keep_mb=64)
    for seed in range(3):
        run(batch_of(4, width, seed=seed)).sum().backward()
    nbytes = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split()[0]:
                ours = "memfd:zero3" in line
            elif ours and line.startswith("Pss:"):
                nbytes += int(line.split()[1]) * 1024
    dist.barrier()  # no rank unmaps before all have counted
    return nbytes


@pytest.mark.parametrize(
    "reshard_after_forward", [pytest.param(None, marks=pytest.mark.long), True]
)
def test_a_host_holds_one_copy_or_less_and_bounded_mailboxes(reshard_after_forward):
    world_size = 3
    weight = 4 << 20
    for depth in (4, 12):
        pool = RankPool(world_size)  # new processes have new mailboxes
        try:
            taken = sum(pool.run(in_little_memory, _host_bytes, depth, reshard_after_forward))
        finally:
            pool.close()
        mailboxes = taken - weight * (3 if reshard_after_forward else depth)
        page = world_size * 16384  # bytes of words, and rounding of counts
        assert world_size * weight - page <= mailboxes
        assert mailboxes <= world_size * (2 * weight + (32 << 20)) + page


def _train(seed):
    torch.manual_seed(seed)
    model, reference = shard(Stack(32))
    optimizers = optimizers_of(model, reference)
    for step in range(30):
        assert_same_step(model, reference, batch_of(4, 32, seed=step), optimizers=optimizers)


def test_two_jobs_of_one_user_do_not_meet():
    jobs = [RankPool(2), RankPool(2)]
    try:
        with ThreadPoolExecutor() as threads:
            runs = [threads.submit(job.run, _train, seed) for seed, job in enumerate(jobs)]
            for run in runs:
                run.result()
    finally:
        for job in jobs:
            job.close()


# ---- what may be sharded


def _different_models():
    with pytest.raises(Zero3Error, match=r"parameter 0: .* rank 0 and .* rank 1|rank 1 and"):
        fully_shard(nn.Linear(8, 8 + dist.get_rank()))


def test_ranks_with_other_parameters_get_an_error(run_ranks):
    run_ranks(2, _different_models)


def _sharded_in_inference_mode():
    with torch.inference_mode():
        model, reference = shard(nn.Linear(8, 8))
        for _ in range(2):
            torch.testing.assert_close(model(batch_of(4, 8)), reference(batch_of(4, 8)))


def test_a_model_may_be_sharded_in_inference_mode(run_ranks):
    run_ranks(2, _sharded_in_inference_mode)

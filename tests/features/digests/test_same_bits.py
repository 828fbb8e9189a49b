"""The same seed and number of ranks give the same bits, however the ranks run and communicate."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support import reproducible
from support.reproducible import Way
from torch import nn
from torch.profiler import profile

from deepcompile_zero3 import fully_shard, training_digest

_EAGER = Way("shared_memory", "eager")
_SMALL = {"gather_bucket_mb": 2**-8, "keep_mb": 0}

# The first of each list is one way, the others differ from it and from each other in all else.
_WAYS = [
    Way("c10d", "eager", bucket_bytes=1 << 10, reshard=False),
    Way("shared_memory", "blocks", _SMALL, bucket_bytes=1 << 10),
    Way("c10d", "graph", _SMALL, bucket_bytes=1 << 10),
]
_MORE_WAYS = [
    Way("c10d", "eager", bucket_bytes=1 << 10),
    Way("shared_memory", "eager", reshard=False),
    Way("c10d", "blocks"),
    Way("c10d", "graph", reshard=False),
    Way("shared_memory", "graph"),
    Way("shared_memory", "graph", _SMALL, reshard=True),
]


def _name(way):
    return f"{way.how}-{way.transport}"


@pytest.mark.parametrize("way", _WAYS, ids=_name)
@pytest.mark.gloo  # shared memory is among the ways
def test_transports_buckets_and_graphs_give_the_same_bits(run_ranks, way):
    expected = run_ranks(2, reproducible.digests, "llama", _EAGER, 2)
    assert run_ranks(2, reproducible.digests, "llama", way, 2) == expected


@pytest.mark.more
@pytest.mark.parametrize(
    "way",
    [*_WAYS[1:], *(pytest.param(way, marks=pytest.mark.long) for way in _MORE_WAYS)],
    ids=_name,
)
def test_a_mixture_of_experts_gives_the_same_bits(run_ranks, way):
    expected = run_ranks(2, reproducible.digests, "qwen3_moe", _EAGER, 3)
    assert run_ranks(2, reproducible.digests, "qwen3_moe", way, 3) == expected


# Each pair of values of two of these stands in one of the ways: the transport, one graph or blocks,
# the size of buckets, keep or gather again, a cold or warm start, and whether the run resumes. (The
# default buckets have no warm start.)
_KEPT = {"keep_mb": 64}
_SINGLE = {"gather_bucket_mb": 2**-20, "keep_mb": 0}  # a bucket for each parameter
_LONG_WAYS = [
    Way("shared_memory", "graph", reshard=False),
    Way("c10d", "blocks", reshard=True, resumes=True),
    Way("shared_memory", "blocks", _SMALL, reshard=True, bucket_bytes=1 << 10),
    Way(
        "c10d",
        "graph",
        {**_SMALL, "keep_mb": 64},
        False,
        False,
        1 << 10,
        is_warm=True,
        resumes=True,
    ),
    Way("shared_memory", "graph", _SINGLE, False, True, 1, is_warm=True, resumes=True),
    Way("c10d", "blocks", _SINGLE | _KEPT, False, False, 1, is_warm=True),
]


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_hundred_steps_give_the_same_bits(run_ranks, tmp_path, model):
    """Compares digests of every tenth step, of two ranks."""
    expected = run_ranks(2, reproducible.digests, model, _EAGER, 100, 10, timeout=240)
    assert [*expected[0]] == [*range(9, 100, 10)]
    for number, way in enumerate(_LONG_WAYS):
        folder = str(tmp_path / str(number))
        found = run_ranks(2, reproducible.digests, model, way, 100, 10, folder, timeout=240)
        assert found == expected, way


@pytest.mark.more
def test_collectives_of_two_ranks_give_the_same_bits(run_ranks, run_collectives):
    way = Way("c10d", "eager")
    expected = run_ranks(2, reproducible.digests, "llama", way, 2)
    assert run_collectives(2, reproducible.digests, "llama", way, 2) == expected


@pytest.mark.more
@pytest.mark.inductor
@pytest.mark.parametrize("how", [pytest.param("blocks", marks=pytest.mark.long), "graph"])
def test_graphs_through_inductor_give_the_same_bits_over_either_transport(run_ranks, how):
    one = Way("shared_memory", how, inductor=True)
    expected = run_ranks(2, reproducible.digests, "llama", one, 2)
    # The second run finds the first one's graphs in the cache.
    assert run_ranks(2, reproducible.digests, "llama", one, 2) == expected
    other = Way("c10d", how, _SMALL, inductor=True, bucket_bytes=1 << 10)
    assert run_ranks(2, reproducible.digests, "llama", other, 2) == expected


@contextlib.contextmanager
def _profiled():
    with profile():
        yield


def _resumed(way, folder, steps, around=contextlib.nullcontext):
    """Returns the digests of the later half of ``steps`` steps, taken by a model that is loaded."""
    half = steps // 2
    first = reproducible.start("llama", way)
    list(reproducible.train(*first, range(half)))
    again = reproducible.resumed("llama", first, way, folder)
    return dict(reproducible.train(*again, range(half, steps), around))


def test_a_run_that_is_resumed_and_profiled_gives_the_same_bits(run_ranks, tmp_path):
    way = Way("c10d", "eager")
    expected = run_ranks(2, reproducible.digests, "llama", way, 4)
    for whole, later in zip(
        expected, run_ranks(2, _resumed, way, tmp_path, 4, _profiled), strict=True
    ):
        assert later == {step: whole[step] for step in (2, 3)}


class Scaled(nn.Module):
    """One parameter, which the second rank reads without a gradient if ``alone``."""

    def __init__(self, alone):
        super().__init__()
        self.alone = alone
        self.scale = nn.Parameter(torch.ones(6))
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, x):
        scale = self.scale
        if self.alone and dist.get_rank() == 1:
            scale = scale.detach()
        return scale * x + self.shift


def _negative_zeros(transport):
    model = fully_shard(Scaled(alone=True), transport=transport)
    model(torch.full([6], -0.0)).sum().backward()
    return training_digest(model).gradients, model.scale.grad.full_tensor().signbit().any().item()


@pytest.mark.gloo
def test_a_zero_in_place_of_a_missing_gradient_is_added(run_ranks):
    over_memory = run_ranks(2, _negative_zeros, "shared_memory")
    assert over_memory == run_ranks(2, _negative_zeros, "c10d")
    assert not over_memory[0][1]

"""Streams of full parameters are bit for bit those of ``full_tensor()``, from every layout."""

import pytest
import torch
import torch.distributed as dist
from support.mesh_models import data_and_tensor_parallel, replicas, tensor_parallel
from support.models import Stack, batch_of, compiled, either_transport, mean_square, shard
from support.owned_models import owned
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from deepcompile_zero3 import FileOffloadPolicy, Zero3Error, fully_shard, stream_full_parameters

KIB = 2**-10  # of a MiB


class Mixture(nn.Module):
    """Tied parameters, odd sizes, a scalar, a buffer, a frozen and an ignored parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False)
        self.ignored = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("not_saved", torch.ones(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens))) * self.scale


def rows(folder):
    return shard(*_stack())[0]


def columns(folder):
    return shard(*_stack(), shard_placement_fn=lambda p: Shard(p.dim() - 1))[0]


def owners(folder):
    return owned(Stack())[0]


def mixed_precision(folder):
    return shard(*_stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))[0]


def offloaded(folder):
    return shard(*_stack(), offload_policy=CPUOffloadPolicy(pin_memory=False))[0]


def in_a_file(folder):
    model = shard(*_stack(), offload_policy=FileOffloadPolicy(folder))[0]
    mean_square(compiled(model, "interpreted"), batch_of(8, 8)).backward()
    return model


def mixture(folder):
    model = Mixture()
    return fully_shard(model, ignored_params={model.ignored})


def two_dimensions(folder):
    mesh = data_and_tensor_parallel()
    return shard(tensor_parallel(Stack(), mesh["tp"]), mesh=mesh["dp"])[0]


def columns_of_two(folder):
    mesh = data_and_tensor_parallel()
    model = tensor_parallel(Stack(), mesh["tp"])
    return shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.dim() - 1))[0]


def replicated(folder):
    return shard(*_stack(), mesh=replicas())[0]


def owned_replicas(folder):
    return owned(Stack(), replicas())[0]


def plain_copies(folder):
    """Pairs of ranks shard the same model: no mesh has all ranks."""
    return shard(*_stack(), mesh=replicas()["shard"])[0]


def _stack():
    model = Stack()
    return model, model.blocks


OF_TWO = [rows, columns, owners, mixed_precision, offloaded, in_a_file, mixture]
OF_FOUR = [two_dimensions, columns_of_two, replicated, owned_replicas, plain_copies]


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _streams(layout, folder, transport, to):
    model = layout(folder)
    expected = [(name, full(parameter)) for name, parameter in model.named_parameters()]
    names = []
    gets_tensors = to in ("all", dist.get_rank())
    for name, tensor in stream_full_parameters(model, max_mb=KIB, to=to, transport=transport):
        reference = expected[len(names)][1]
        names.append(name)
        assert (tensor is not None) == gets_tensors
        if gets_tensors:
            assert tensor.dtype == reference.dtype
            assert torch.equal(tensor, reference), name
    assert names == [name for name, _ in expected]
    last = {}
    stream = stream_full_parameters(
        model, dtype=torch.bfloat16, max_mb=100 * KIB, buffers=True, transport=transport
    )
    for name, tensor in stream:
        last[name] = tensor  # tensors may be kept
    for name, reference in expected:
        assert torch.equal(last[name], reference.to(torch.bfloat16))
    saved = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    assert list(last) == [*(name for name, _ in expected), *saved]


@either_transport
@pytest.mark.parametrize("layout", OF_TWO)
def test_full_parameters_are_streamed_from_two_ranks(run_ranks, tmp_path, layout, transport):
    run_ranks(2, _streams, layout, str(tmp_path), transport, "all")


@pytest.mark.parametrize("layout", OF_FOUR)
@pytest.mark.parametrize(
    ("transport", "to"),
    [("shared_memory", "all"), pytest.param("c10d", 2, marks=pytest.mark.more)],
)
def test_full_parameters_are_streamed_from_four_ranks(run_ranks, tmp_path, layout, transport, to):
    run_ranks(4, _streams, layout, str(tmp_path), transport, to)


@either_transport
def test_one_rank_may_get_all(run_ranks, tmp_path, transport):
    run_ranks(2, _streams, mixture, str(tmp_path), transport, 1)


@either_transport
def test_a_job_of_one_rank_streams(one_rank, tmp_path, transport):
    _streams(mixture, str(tmp_path), transport, "all")


def _after_a_step(transport):
    model = rows(None)
    mean_square(compiled(model, "interpreted"), batch_of(8, 8)).backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for name, tensor in stream_full_parameters(model, transport=transport):
        assert torch.equal(tensor, full(model.get_parameter(name)))
    mean_square(compiled(model, "interpreted"), batch_of(8, 8)).backward()


@either_transport
def test_a_model_streams_between_steps(run_ranks, transport):
    run_ranks(2, _after_a_step, transport)


def _with_a_default_device(transport):
    model = mixture(None)
    with torch.device("meta"):
        found = dict(stream_full_parameters(model, transport=transport))
    for name, tensor in found.items():
        assert torch.equal(tensor, full(model.get_parameter(name)))


@either_transport
def test_a_stream_is_on_the_device_of_the_mesh_whatever_the_default_is(run_ranks, transport):
    run_ranks(2, _with_a_default_device, transport)


def _meta():
    with torch.device("meta"):
        model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(Zero3Error, match=r"'weight' is on the meta device: call model\.to_empty"):
        stream_full_parameters(model)


def test_a_model_without_values_is_refused(run_ranks):
    run_ranks(2, _meta)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_mb": 0}, ValueError, "max_mb is a positive number of MiB, got 0"),
        ({"dtype": torch.int8}, TypeError, "dtype is a floating torch.dtype or None"),
        ({"dtype": "bfloat16"}, TypeError, "dtype is a floating torch.dtype or None"),
        ({"to": 1}, ValueError, "to=1, and the group has 1 ranks"),
        ({"to": "first"}, TypeError, 'to is "all", a rank or a SharedMemorySender'),
        ({"buffers": 1}, ValueError, "buffers must be a bool"),
        ({"transport": "mail"}, ValueError, "transport is one of"),
    ],
)
def test_wrong_arguments_are_refused(one_rank, arguments, error, message):
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(error, match=message):
        stream_full_parameters(model, **arguments)


def _disagree():
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(Zero3Error, match=r"rank . has \[.*call it with the same arguments"):
        stream_full_parameters(model, max_mb=1 + dist.get_rank())


def test_ranks_that_disagree_on_arguments_raise(run_ranks):
    run_ranks(2, _disagree)

"""Random arguments are refused by a clear error that changes nothing, or train correctly."""

import copy
import math
import os
import random
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from support.models import for_all, stack_and_state
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from deepcompile_zero3 import Zero3Error, Zero3Module, fully_shard

# ---- options and parameters

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD_DTYPES = [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
parameters = st.fixed_dictionaries(
    {
        "shape": shapes,
        "dtype": st.sampled_from(DTYPES * 3 + ODD_DTYPES),
        "layout": st.sampled_from(["contiguous"] * 3 + ["transposed", "expanded", "strided"]),
        "requires_grad": st.sampled_from([True, True, False]),
        "tied": st.sampled_from([False, False, True]),  # to the previous parameter
    }
)
policy_dtypes = st.sampled_from([None] * 4 + DTYPES * 2 + ODD_DTYPES + ["bfloat16"])
policies = st.one_of(
    st.builds(
        MixedPrecisionPolicy,
        param_dtype=policy_dtypes,
        reduce_dtype=policy_dtypes,
        output_dtype=policy_dtypes,
        cast_forward_inputs=st.booleans(),
    ),
    st.sampled_from([None, "bf16", torch.bfloat16]),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "reshard_after_forward": st.sampled_from([None, True, False, 1, 2, 3, 0, -1, 2.0, "no"]),
        "mp_policy": policies,
        "shard_placement_fn": st.sampled_from(
            [None, Shard(0), Shard(1), Shard(-1), Shard(7), Replicate(), 0, "refused"]
        ),
        "ignored_params": st.sampled_from(["none", "first", "foreign", "list", "name"]),
        "transport": st.sampled_from(["auto", "shared_memory", "c10d", "nccl", None, 3]),
        "offload_policy": st.sampled_from([OffloadPolicy(), CPUOffloadPolicy(), None, "cpu"]),
    },
)
cases = st.fixed_dictionaries({"parameters": st.lists(parameters, max_size=4), "options": options})


def _counted(shape, dtype):
    """Returns distinct elements that, like sums of a few of them, are exact in every dtype."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape).to(dtype)


def _tensor(shape, dtype, layout):
    if layout == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if layout == "transposed":
        return _counted(shape[::-1], dtype).permute(tuple(reversed(range(len(shape)))))
    if layout == "strided":
        return _counted((*shape, 2), dtype)[..., 0]
    return _counted(shape, dtype)


class _Anything(nn.Module):
    """A module with parameters of all kinds."""

    def __init__(self, parameters):
        super().__init__()
        before = None
        for i, facts in enumerate(parameters):
            if not facts["tied"] or before is None:
                tensor = _tensor(facts["shape"], facts["dtype"], facts["layout"])
                may = tensor.is_floating_point() or tensor.is_complex()
                before = nn.Parameter(tensor, requires_grad=may and facts["requires_grad"])
            self.register_parameter(f"p{i}", before)
        self.plain = nn.Parameter(torch.ones(3))

    def forward(self, factor):
        """Returns the sum of dot products of each parameter with its elements' numbers."""
        used = [getattr(self, name) for name in self._parameters]
        return sum(
            (factor * p * _counted(p.shape, p.dtype)).double().sum()
            for p in used
            if p.is_floating_point() and p.dtype.itemsize > 1
        )


def _arguments(model, options):
    """Returns the options, with values that depend on the model or cannot be sent."""
    options = dict(options)
    if (placement := options.pop("shard_placement_fn", None)) is not None:
        options["shard_placement_fn"] = lambda parameter: placement
    match options.pop("ignored_params", None):
        case "none":
            options["ignored_params"] = set()
        case "first":
            options["ignored_params"] = {next(model.parameters())}
        case "foreign":
            options["ignored_params"] = {nn.Parameter(torch.ones(2))}
        case "list":
            options["ignored_params"] = [next(model.parameters())]
        case "name":
            options["ignored_params"] = {"plain"}
    return options


def _facts(model):
    """Returns the facts that must be the same after an error."""
    hooks = (model._forward_hooks, model._forward_pre_hooks)
    tensors = [(name, id(p), p._version, p.grad) for name, p in model._parameters.items()]
    return type(model), tensors, [list(hook) for hook in hooks], sorted(model.__dict__)


def _shard_and_train(case, counts):
    model = _Anything(case["parameters"])
    reference = copy.deepcopy(model)
    before = _facts(model)
    arguments = _arguments(model, case["options"])
    refused = None
    try:
        fully_shard(model, **arguments)
    except (Zero3Error, TypeError, ValueError, NotImplementedError) as error:
        refused = str(error)
    if refused is not None:
        assert len(refused) > 20
        assert _facts(model) == before
        counts["refused"] += 1
        return
    assert isinstance(model, Zero3Module)
    factor = 1 + 2 * dist.get_rank()  # mean over ranks: the world size
    output = model(torch.tensor(float(factor)))
    assert torch.equal(output.double(), reference(torch.tensor(factor)).to(output.dtype).double())
    output.backward()
    reference(torch.tensor(float(dist.get_world_size()))).backward()
    for (name, p), (_, whole) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        if p in set(arguments.get("ignored_params", ())):
            assert not isinstance(p, DTensor)
            continue
        assert isinstance(p, DTensor)
        assert p.dtype == whole.dtype
        if whole.dtype != torch.float8_e4m3fn:  # which gloo does not send
            assert torch.equal(p.full_tensor(), whole)
        if whole.grad is None:
            assert p.grad is None, name
            continue
        assert p.grad.dtype == p.dtype
        assert torch.equal(p.grad.full_tensor(), whole.grad), (name, p.grad, whole.grad)
    counts["trained"] += 1


def _check_many(examples):
    counts = {"refused": 0, "trained": 0}

    for_all(cases, lambda case: _shard_and_train(case, counts), examples)
    return counts


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.more), 2])
def test_options_and_parameters_are_refused_or_right(run_ranks, world_size):
    for counts in run_ranks(world_size, _check_many, 300):
        assert min(counts.values()) > 50, counts


# ---- checkpoints


def _save(folder):
    dcp.save(stack_and_state(0)[1], checkpoint_id=folder)


def _values(model):
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def _load_each(good, folders):
    """Returns, for this rank, whether each checkpoint was loaded or refused."""
    expected = _values(stack_and_state(0)[0])
    outcomes = []
    for folder in folders:
        model, state = stack_and_state(1)
        try:
            dcp.load(state, checkpoint_id=folder)
        except CheckpointException:
            outcomes.append("refused")
        else:
            outcomes.append("loaded")
            torch.testing.assert_close(_values(model), expected, rtol=0, atol=0)
        dcp.load(state, checkpoint_id=good)
        torch.testing.assert_close(_values(model), expected, rtol=0, atol=0)
    return outcomes


def _spoil(folder, chance):
    """Spoils one file of a checkpoint in a way that torch detects. (Torch has no checksums.)"""
    file = chance.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    match chance.choice(["truncate", "empty", "remove", "append"]):
        case "truncate":
            del content[chance.randrange(len(content)) :]
        case "empty":
            content.clear()
        case "remove":
            os.unlink(file)
            return
        case "append":
            content += chance.randbytes(64)
    file.write_bytes(content)


@pytest.mark.more
def test_a_spoiled_checkpoint_is_refused_or_was_whole(run_ranks, tmp_path):
    good = tmp_path / "good"
    run_ranks(2, _save, str(good))
    chance = random.Random(0)
    folders = []
    for i in range(40):
        folders.append(tmp_path / str(i))
        shutil.copytree(good, folders[-1])
        _spoil(folders[-1], chance)
    outcomes = run_ranks(2, _load_each, str(good), [str(folder) for folder in folders])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].count("refused") >= 10

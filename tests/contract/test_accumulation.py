"""Gradients that come in pieces: in micro-batches, late, in several dtypes, in any order."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accumulation import Experts, ops
from support.contract import Kernel
from support.job import needs_a_job
from support.models import batch_of, compiled, each_way, for_all, in_backward, mine
from support.paths import ROOT
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from deepcompile_zero3 import defer_reduction, deposit_grad, fully_shard, record_collectives

# ---- micro-batches


def _three_micro_batches(how):
    low, high = torch.bfloat16, torch.float32
    model = Experts()
    reference = copy.deepcopy(model).to(low)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high))
    run = compiled(model, how)
    world_size = dist.get_world_size()

    # Sums, in fp32, of the raw bf16 gradients of every rank.
    sums = {}
    raw = {}
    for rank in range(world_size):
        for step in range(3):
            rows = batch_of(4 * world_size, 8, seed=step).narrow(0, 4 * rank, 4).to(low)
            reference(rows, use_both=step == 2).float().square().mean().backward()
            for name, parameter in reference.named_parameters():
                if parameter.grad is not None:
                    raw[name] = parameter.grad.float()
                    key = name, rank
                    sums[key] = sums[key] + raw[name] if key in sums else raw[name]
                    parameter.grad = None
        late = batch_of(8, 8, seed=100 + rank).to(low)
        sums["late", rank] = late.float()
        if rank == dist.get_rank():
            my_late = late

    with record_collectives() as log:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss = run(mine(batch_of(4 * world_size, 8, seed=step)), use_both=step == 2)
            if step < 2:
                loss.float().square().mean().backward()
            else:
                with defer_reduction(model):
                    loss.float().square().mean().backward()
                    deposit_grad(model.late, my_late)
    assert {c.dtype for c in log if c.op == "reduce_scatter"} == {high}
    for name, parameter in model.named_parameters():
        expected = sum(sums[name, rank] for rank in range(world_size)) / world_size
        assert parameter.grad.dtype == high
        actual = parameter.grad.full_tensor()
        assert torch.equal(actual, expected), name
        if name.startswith("first"):
            assert not torch.equal(actual, raw[name])


@pytest.mark.parametrize("how", ["interpreted", "eager"])
def test_micro_batches_and_late_gradients_are_summed_in_the_wider_dtype(run_ranks, how):
    run_ranks(2, _three_micro_batches, how)


# ---- what the optimizer sees


def _adamw(how):
    low, high = nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16)
    model = nn.Sequential(low, nn.Tanh(), high)
    model[0].register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    model[2].register_forward_pre_hook(lambda module, args: args[0].float())
    fully_shard(model)
    run = compiled(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    storages = {p: p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    with warnings.catch_warnings(), record_collectives() as log:
        warnings.simplefilter("error")
        for step in range(3):
            run(mine(batch_of(8, 16, seed=step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        local = parameter._local_tensor
        assert parameter.is_leaf, name
        assert local.is_leaf, name
        assert local.untyped_storage().data_ptr() == storages[parameter], name
        dtype = torch.bfloat16 if name.startswith("0") else torch.float32
        assert parameter.dtype == local.dtype == dtype
        assert {c.dtype for c in log if name in c.params} == {dtype}
        assert all(s.dtype == dtype for s in optimizer.state[parameter].values() if s.dim())


@each_way
def test_adamw_steps_parameters_of_two_dtypes_without_a_warning(run_ranks, how):
    run_ranks(2, _adamw, how)


# ---- a bucket for each dtype on the wire


@needs_a_job
@pytest.mark.parametrize("how", ["interpreted", "eager"])
@pytest.mark.parametrize(
    ("grad_dtype", "reduce_dtype", "on_the_wire"),
    [
        ("default", None, [(torch.bfloat16, ["0.weight", "1.weight", "2.weight"])]),
        ("default", torch.float32, [(torch.float32, ["0.weight", "1.weight", "2.weight"])]),
        (
            torch.float32,
            None,
            [(torch.bfloat16, ["0.weight", "2.weight"]), (torch.float32, ["1.weight"])],
        ),
    ],
    ids=str,
)
def test_the_contract_chooses_the_bucket(how, grad_dtype, reduce_dtype, on_the_wire):
    layers = [nn.Linear(8, 8, bias=False), Kernel(8, 8, bias=False), nn.Linear(8, 8, bias=False)]
    model = nn.Sequential(*layers).bfloat16()
    if grad_dtype != "default":
        model[1].weight.grad_dtype = grad_dtype
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with record_collectives() as log:
        compiled(model, how)(torch.randn(4, 8).bfloat16()).sum().backward()
    found = [(c.dtype, sorted(c.params)) for c in log if c.op == "reduce_scatter"]
    assert found == on_the_wire


# ---- random gradients, in any order


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
maybe_dtypes = st.sampled_from([None, *DTYPES])


@st.composite
def _cases(draw):
    """Draws cases of small integers: every dtype represents them and sums of a few of them."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    arrivals = draw(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.integers(0, 2**16), st.booleans()),
            min_size=1,
            max_size=5,
        )
    )
    return {
        "shape": draw(st.sampled_from([(rows,), (rows, columns), (rows, columns, 2)])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "grad_dtype": draw(st.sampled_from(["default", None, *DTYPES])),
        "reduce_dtype": draw(maybe_dtypes),
        "arrivals": arrivals,  # (raw dtype, seed, whether the micro-batch ends after it)
        "syncs": draw(st.lists(st.booleans(), min_size=5, max_size=5)),  # for each micro-batch
    }


class _Holder(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(case["shape"], dtype=case["dtype"]))
        if case["grad_dtype"] != "default":
            self.weight.grad_dtype = case["grad_dtype"]

    def forward(self):
        return self.weight


def _check_arrivals(case):
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def integers(seed, who, dtype):
        generator = torch.Generator().manual_seed(seed * 4 + who)
        return torch.randint(-8, 8, case["shape"], generator=generator).to(dtype)

    model = fully_shard(
        _Holder(case), mp_policy=MixedPrecisionPolicy(reduce_dtype=case["reduce_dtype"])
    )
    groups, group = [], []
    for dtype, seed, ends in case["arrivals"]:
        group.append((dtype, seed))
        if ends:
            groups.append(group)
            group = []
    groups += [group] if group else []
    leaf = case["dtype"] if case["grad_dtype"] == "default" else case["grad_dtype"]
    unreduced = []  # dtypes that have arrived
    for group, sync in zip(groups, [*case["syncs"][: len(groups) - 1], True], strict=True):
        model.set_requires_gradient_sync(sync)
        with record_collectives() as log, defer_reduction(model):
            for dtype, seed in group:
                deposit_grad(model.weight, integers(seed, rank, dtype))
                unreduced.append(dtype if leaf is None else leaf)
        if sync:
            arrived = functools.reduce(torch.promote_types, unreduced)
            assert [c.dtype for c in log] == [case["reduce_dtype"] or arrived]
            unreduced = []
        else:
            assert len(log) == 0

    everything = [
        integers(seed, who, torch.float64)
        for _, seed, _ in case["arrivals"]
        for who in range(world_size)
    ]
    assert torch.equal(model.weight.grad.full_tensor().double(), sum(everything) / world_size)
    assert leaf is None or model.weight.grad.dtype == leaf


def _check_many(examples):
    for_all(_cases(), _check_arrivals, examples)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_order_and_dtypes_of_arrival_do_not_matter(run_ranks, world_size):
    run_ranks(world_size, _check_many, 100)


# ---- in one pass: raw -> leaf -> wire


rounding_dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def _check_roundings():
    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(
        raw=st.sampled_from(DTYPES),
        leaf=rounding_dtypes,
        wire=rounding_dtypes,
        rows=st.integers(1, 700),
        columns=st.integers(1, 70),
        transposed=st.booleans(),
    )
    def check(raw, leaf, wire, rows, columns, transposed):
        case = {"shape": (rows, columns), "dtype": torch.float64, "grad_dtype": leaf}
        model = fully_shard(_Holder(case), mp_policy=MixedPrecisionPolicy(reduce_dtype=wire))
        grad = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
        grad = (3 * grad).to(raw)
        (parameter,) = model._zero3_group.parameters
        in_backward(lambda: ops.reduce_grad(grad, parameter.placeholder))
        assert torch.equal(model.weight.grad.full_tensor(), grad.to(leaf).to(wire).to(leaf))

    check()


def test_every_rounding_of_the_contract_is_made(run_ranks):
    run_ranks(1, _check_roundings)


# ---- as the documentation has it


@needs_a_job
@each_way
def test_the_documented_late_layer_gives_the_gradient_of_a_usual_one(how):
    documentation = (ROOT / "docs" / "grad_dtype.md").read_text()
    (example,) = (b for b in documentation.split("```")[1::2] if "LateLinear" in b)
    layer, steps = example.removeprefix("python\n").split("model.head.late = []")
    names = {"torch": torch, "nn": nn, "F": F}
    exec(layer, names)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(4, 8))
    model.add_module("head", names["LateLinear"](8, 3))
    usual = copy.deepcopy(model)
    usual.head.__class__ = nn.Linear
    micro_batches = [torch.randn(2, 5, 4) for _ in range(3)]
    for batch in micro_batches:
        usual(batch).mean().backward()
    fully_shard(model)
    model.head.late = []

    run = compiled(model, how, keep_mb=64)
    late = {"defer_reduction": defer_reduction, "deposit_grad": deposit_grad}
    exec(steps, late | {"model": run, "micro_batches": micro_batches})

    for name, parameter in usual.named_parameters():
        grad = model.get_parameter(name).grad
        assert grad is not None, name
        torch.testing.assert_close(grad.full_tensor(), parameter.grad)


def _wider_later():
    """Checks that gradients keep their dtypes: in bf16, 256 + 1 is 256."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    model.weight.grad_dtype = None
    fully_shard(model)
    for value, dtype in ((256.0, torch.bfloat16), (1.0, torch.float32)):
        with defer_reduction(model):
            deposit_grad(model.weight, torch.full((4, 4), value, dtype=dtype))
        assert model.weight.grad.dtype == dtype
    assert (model.weight.grad.full_tensor() == 257).all()


@needs_a_job
@pytest.mark.parametrize(("grad_dtype", "total"), [(None, 258), (torch.bfloat16, 256)], ids=str)
@pytest.mark.parametrize("sync", [True, False])
def test_low_gradients_are_summed_in_fp32_unless_the_contract_names_their_dtype(
    grad_dtype, total, sync
):
    """In bf16, 256 + 1 is 256."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    model.weight.grad_dtype = grad_dtype
    fully_shard(model)
    parts = [[256.0, 1.0, 1.0]] if sync else [[256.0], [1.0], [1.0]]
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        with defer_reduction(model):
            for value in part:
                deposit_grad(model.weight, torch.full((4, 4), value, dtype=torch.bfloat16))
    assert model.weight.grad.dtype == torch.bfloat16
    assert (model.weight.grad.full_tensor() == total).all()


def _low_after_one_that_raised():
    """Checks that a lost gradient does not affect later gradients."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    model.weight.grad_dtype = None
    fully_shard(model)
    with contextlib.suppress(KeyError), defer_reduction(model):
        deposit_grad(model.weight, torch.ones(4, 4))
        raise KeyError
    with defer_reduction(model):
        deposit_grad(model.weight, torch.ones(4, 4, dtype=torch.bfloat16))
    assert model.weight.grad.dtype == torch.bfloat16


def test_a_gradient_that_was_lost_leaves_no_dtype_behind(run_ranks):
    run_ranks(2, _low_after_one_that_raised)


def _summed_before():
    model = fully_shard(nn.Linear(4, 4, bias=False), transport="c10d")
    with record_collectives() as log:
        for is_last in (False, False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(2, 4)).sum().backward()
    reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
    assert reduced == ["weight"]
    assert (model.weight.grad.full_tensor() == 6).all()


def test_unsynced_sums_are_reduced_with_the_last_gradient(run_ranks):
    run_ranks(2, _summed_before)


def test_a_later_gradient_that_is_wider_widens_what_is_there(run_ranks):
    run_ranks(2, _wider_later)

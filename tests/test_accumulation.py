"""Gradients that come in pieces: micro-batches, late ones, of several dtypes, in any order."""

import contextlib
import copy
import functools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from contract import Kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batch_of, compiled, compiled_each_way, each_way, for_all, in_backward, mine
from one_rank import one_rank  # noqa: F401
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from deepcompile_zero3 import (
    Zero3Error,
    defer_reduction,
    deposit_grad,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.sharding.module import parameters_of

ops = torch.ops.zero3
needs_a_job = pytest.mark.usefixtures("one_rank")


class _Experts(nn.Module):
    """Uses its second layer only when asked to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.late = nn.Parameter(torch.randn(8, 8))  # autograd never sees it

    def forward(self, x, use_both=False):
        x = torch.tanh(self.first(x))
        return self.second(x) if use_both else x


# ---- micro-batches


def _three_micro_batches(how):
    low, high = torch.bfloat16, torch.float32
    model = _Experts()
    reference = copy.deepcopy(model).to(low)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high))
    run = compiled(model, how)
    world_size = dist.get_world_size()

    # The raw gradients of every rank, in bf16, summed in fp32 as they come.
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


# ---- defer_reduction


@needs_a_job
@each_way
def test_deferred_gradients_come_when_the_block_ends(how):
    model = fully_shard(_Experts())
    run = compiled(model, how)
    fired = []
    model.late.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.full_tensor()))
    late = parameters_of(model)["late"]
    with record_collectives() as log, defer_reduction(model):
        run(torch.ones(2, 8), use_both=True).sum().backward()
        run(torch.ones(2, 8), use_both=False).sum().backward()
        deposit_grad(model.late, torch.ones(8, 8))
        ops.reduce_grad(2 * torch.ones(8, 8, dtype=torch.float64), late.placeholder)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(c.op == "reduce_scatter" for c in log)
    reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
    assert sorted(reduced) == sorted(name for name, _ in model.named_parameters())
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 3.0))
    assert len(fired) == 1


@needs_a_job
def test_a_deferred_block_that_raises_leaves_nothing_behind():
    model = fully_shard(_Experts())

    def fail():
        with defer_reduction(model):
            deposit_grad(model.late, torch.ones(8, 8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with defer_reduction(model):
        deposit_grad(model.late, torch.ones(8, 8))
    assert torch.equal(model.late.grad.full_tensor(), torch.ones(8, 8))
    assert model.first.weight.grad is None


@needs_a_job
def test_what_cannot_be_deposited_is_refused():
    model = fully_shard(_Experts())
    model.first.weight.requires_grad_(False)
    with pytest.raises(Zero3Error, match="with defer_reduction"):
        deposit_grad(model.late, torch.ones(8, 8))
    with pytest.raises(RuntimeError, match=r"'late'.* inside of defer_reduction"):
        ops.reduce_grad(torch.ones(8, 8), parameters_of(model)["late"].placeholder)
    with pytest.raises(Zero3Error, match="no parameter of the Linear is sharded"):
        defer_reduction(nn.Linear(2, 2)).__enter__()
    with defer_reduction(model):
        with pytest.raises(RuntimeError, match=r"'late' has shape \[4, 8\]"):
            deposit_grad(model.late, torch.ones(4, 8))
        with pytest.raises(RuntimeError, match=r"'late' is Long, which cannot be summed"):
            deposit_grad(model.late, torch.ones(8, 8, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="'late' is on meta"):
            deposit_grad(model.late, torch.ones(8, 8, device="meta"))
        with pytest.raises(Zero3Error, match=r"'first\.weight' needs no gradient"):
            deposit_grad(model.first.weight, torch.ones(8, 8))
        with pytest.raises(Zero3Error, match="is a DTensor"):
            deposit_grad(model.late, model.late.detach())
        with pytest.raises(Zero3Error, match="deferred already"):
            defer_reduction(model).__enter__()
        with pytest.raises(Zero3Error, match=r"model\.parameters\(\)"):
            deposit_grad(nn.Parameter(torch.ones(8, 8)), torch.ones(8, 8))


@needs_a_job
def test_a_deferred_backward_that_raises_is_not_forgotten():
    model = fully_shard(_Experts())

    def raise_in_backward():
        deposit_grad(model.late, torch.ones(8, 8))
        x = torch.ones(2, 8, requires_grad=True) * 1
        x.register_hook(lambda grad: 1 / 0)  # after the gradients of the second layer
        model(x, use_both=True).sum().backward()

    def block():
        with defer_reduction(model), contextlib.suppress(ZeroDivisionError):
            raise_in_backward()

    with pytest.raises(Zero3Error, match="a backward in the block raised"):
        block()
    assert model.late.grad is None


@needs_a_job
def test_a_deposit_counts_whatever_the_backward_around_it_is_asked_for():
    model = fully_shard(_Experts())
    x = torch.ones(2, 8, requires_grad=True)
    with defer_reduction(model):
        output = model(x)
        late = model._parameters["late"]
        output.register_hook(lambda grad: deposit_grad(late, torch.ones(8, 8)))
        output.sum().backward(inputs=[x])
    assert torch.equal(model.late.grad.full_tensor(), torch.ones(8, 8))
    assert model.first.weight.grad is None


def _deposit_on_one_rank_each():
    model = fully_shard(_Experts())
    rank = dist.get_rank()
    weights = [model.first.weight, model.second.weight]
    weights[rank].grad_dtype = None
    weights[1 - rank].grad_dtype = None
    with defer_reduction(model):
        deposit_grad(weights[rank], torch.full((8, 8), rank + 1.0, dtype=torch.bfloat16))
    for owner, weight in enumerate(weights):
        expected = torch.full((8, 8), (owner + 1) / 2).bfloat16()
        assert torch.equal(weight.grad.full_tensor(), expected)
    assert model.late.grad is None


def test_a_rank_without_a_deposit_counts_as_zero(run_ranks):
    run_ranks(2, _deposit_on_one_rank_each)


def _keep_a_sum_of_one_rank():
    model = fully_shard(_Experts())
    model.set_requires_gradient_sync(False)
    with defer_reduction(model):
        if dist.get_rank() == 0:
            deposit_grad(model.late, torch.ones(8, 8))
    model.set_requires_gradient_sync(True)
    model(batch_of(2, 8)).sum().backward()
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 0.5))


def test_a_sum_that_is_kept_on_one_rank_is_reduced_on_all(run_ranks):
    run_ranks(2, _keep_a_sum_of_one_rank)


@needs_a_job
def test_gradients_may_be_deposited_in_inference_mode():
    model = fully_shard(_Experts())
    x = batch_of(2, 8)
    for _ in range(2):
        with torch.inference_mode(), defer_reduction(model):
            deposit_grad(model.late, torch.ones(8, 8))
        with defer_reduction(model):
            with torch.inference_mode():
                deposit_grad(model.second.bias, torch.ones(8))
            model(x, use_both=True).sum().backward()
    assert not model.late.grad.is_inference()
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 2.0))
    assert torch.equal(model.second.bias.grad.full_tensor(), torch.full((8,), 6.0))


@needs_a_job
def test_a_parameter_that_was_replaced_after_its_forward_gets_no_deferred_gradient():
    model = fully_shard(_Experts())
    loss = model(batch_of(2, 8)).sum()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(Zero3Error, match="was replaced"), defer_reduction(model):
        loss.backward()
    assert model.first.weight.grad is None


class _Constant(torch.autograd.Function):
    """Has a gradient that does not depend on that of the loss."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, _):
        return None, torch.sign(ctx.saved_tensors[0])


class _Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return _Constant.apply(x, self.weight)


@needs_a_job
@pytest.mark.parametrize("deferred", [False, True])
def test_a_gradient_that_a_backend_computes_in_forward_is_refused(deferred):
    model = fully_shard(_Signs())
    run = torch.compile(model, backend="aot_eager")
    block = defer_reduction(model) if deferred else contextlib.nullcontext()
    with pytest.raises(RuntimeError, match="'weight' was computed in forward"), block:
        run(torch.ones(4))


@needs_a_job
@compiled_each_way
def test_a_gradient_that_depends_on_no_tangent_is_reduced(how):
    model = fully_shard(_Signs())
    run = compiled(model, how)
    x = torch.tensor([1.0, -2.0, 3.0, -4.0])
    run(x).backward()
    assert torch.equal(model.weight.grad.full_tensor(), x.sign())


# ---- whatever comes, in whatever order

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
maybe_dtypes = st.sampled_from([None, *DTYPES])


@st.composite
def _cases(draw):
    """Small integers, which every dtype holds, and the sums of few of them too."""
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
        "syncs": draw(st.lists(st.booleans(), min_size=5, max_size=5)),  # by micro-batch
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


# ---- the same in one pass: raw -> leaf -> wire

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
    documentation = (Path(__file__).parent.parent / "docs" / "grad_dtype.md").read_text()
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
    """Whatever arrives is kept: in bf16 256 + 1 is 256."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    model.weight.grad_dtype = None
    fully_shard(model)
    for value, dtype in ((256.0, torch.bfloat16), (1.0, torch.float32)):
        with defer_reduction(model):
            deposit_grad(model.weight, torch.full((4, 4), value, dtype=dtype))
        assert model.weight.grad.dtype == dtype
    assert (model.weight.grad.full_tensor() == 257).all()


def _low_after_one_that_raised():
    """What was lost has no say in what follows."""
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


def test_what_was_summed_before_is_reduced_with_the_last(run_ranks):
    run_ranks(2, _summed_before)


def test_a_later_gradient_that_is_wider_widens_what_is_there(run_ranks):
    run_ranks(2, _wider_later)

"""Parameters gathered as codes of one byte and scales: the option ``gather_dtype``."""

import itertools
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    compiled_each_way,
    either_transport,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from support.quantization import bits, difficult, each_format, rounded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from deepcompile_zero3 import (
    Zero3Error,
    capture_graphs,
    explain,
    fully_shard,
    plan,
    record_collectives,
)


class Reads(nn.Module):
    """Returns what it reads of its parameters: uneven rows, other dimensions, a norm's weight."""

    def __init__(self):
        super().__init__()
        self.even = nn.Parameter(difficult(8, 24, seed=1))
        self.uneven = nn.Parameter(difficult(7, 4, 6, seed=2))
        self.short = nn.Parameter(difficult(2, 128, seed=3))
        self.columns = nn.Parameter(difficult(24, 5, seed=4))
        self.norm = nn.Parameter(torch.randn(24, generator=torch.Generator().manual_seed(5)))
        self.frozen = nn.Parameter(difficult(3, 256, seed=6), requires_grad=False)

    def forward(self):
        names = ("even", "uneven", "short", "columns", "norm", "frozen")
        return {name: getattr(self, name) * 1 for name in names}


def _read(dtype, transport):
    model = Reads()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(
        model,
        transport=transport,
        shard_placement_fn=lambda p: Shard(1 if p.shape == (24, 5) else 0),
    )
    run = compiled(model, "interpreted", gather_dtype=dtype)
    with record_collectives() as log:
        read = run()
    sum(value.nan_to_num(0, 0, 0).sum() for value in read.values()).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is (name == "frozen")
        if parameter.grad is not None:
            finite = _gathered(name, whole[name], dtype).isfinite()
            assert torch.equal(parameter.grad.full_tensor().detach(), finite.float()), name
    values = {name: value.detach() for name, value in read.items()}
    return values, whole, [(c.dtype, c.nbytes, sorted(c.params)) for c in log]


def _gathered(name, value, dtype):
    """Returns what a module reads of a parameter of ``Reads``."""
    if name == "norm":
        return value
    if name == "columns":
        return rounded(value.T.contiguous(), dtype, 24).T
    row = value[0].numel()
    return rounded(value, dtype, 128 if row % 128 == 0 else row)


def _wire_bytes(rows, row, block, world_size):
    """Returns the bytes of all chunks: codes, filled up to four bytes a row, and scales."""
    return world_size * -(-rows // world_size) * (-(-row // 4) * 4 + 4 * (row // block))


@each_format
@either_transport
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_each_rank_computes_with_the_rounded_parameter(run_ranks, world_size, dtype, transport):
    for read, whole, log in run_ranks(world_size, _read, dtype, transport):
        for name, value in whole.items():
            assert torch.equal(bits(read[name]), bits(_gathered(name, value, dtype))), name
        rows = [(8, 24, 24), (7, 24, 24), (2, 128, 128), (5, 24, 24), (3, 256, 128)]
        sent = sum(nbytes for dtype, nbytes, _ in log if dtype == torch.uint8)
        assert sent == sum(_wire_bytes(*each, world_size) for each in rows)
        assert [names for dtype, _, names in log if dtype != torch.uint8] == [["norm"]]


def _fraction(dtype, block):
    model, _ = shard(nn.Linear(512, 512, bias=False), transport="c10d")
    nbytes = []
    for options in ({}, {"gather_dtype": dtype, "gather_block": block}):
        torch.compiler.reset()
        run = compiled(model, "interpreted", **options)
        with record_collectives() as log:
            run(torch.ones(2, 512, requires_grad=True)).sum().backward()
        nbytes.append(sum(c.nbytes for c in log if c.op == "all_gather"))
    return nbytes


@each_format
@pytest.mark.parametrize("block", [None, 64, 256])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_bytes_on_the_wire(run_ranks, world_size, dtype, block):
    for full, sent in run_ranks(world_size, _fraction, dtype, block):
        assert full == 2 * 4 * 512 * 512  # a forward and a backward
        assert sent == pytest.approx(full * (1 / 4 + 1 / (block or 128)), rel=0.02)
        assert sent <= 0.27 * full


def _train(how, dtype, policy, settings, steps=4):
    model = Stack(width=16)
    model, reference = shard(model, model.blocks, mp_policy=policy, **settings)
    masters = [p.detach().clone() for p in reference.parameters()]
    if policy.param_dtype:
        reference.to(policy.param_dtype)
    run = compiled(model, how, gather_dtype=dtype)
    [optimizer] = optimizers_of(model)
    leaves = [nn.Parameter(master) for master in masters]
    plain = torch.optim.SGD(leaves, lr=0.1, momentum=0.9)
    names = [name for name, _ in reference.named_parameters()]
    for seed in range(steps):
        for parameter, leaf in zip(reference.parameters(), leaves, strict=True):
            value = leaf.detach()
            if value.dim() > 1:
                value = rounded(value, dtype, 128 if value.shape[1] % 128 == 0 else value.shape[1])
            parameter.data.copy_(value)
            parameter.grad = None
        batch = batch_of(8, 16, seed=seed).to(policy.param_dtype)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        tolerance = 1e-5 if policy.param_dtype is None else 3e-2
        assert_same_gradients(model, reference, tolerance)
        for leaf, name in zip(leaves, names, strict=True):  # both go on from the same gradients
            leaf.grad = model.get_parameter(name).grad.full_tensor()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()


@compiled_each_way
@each_format
@pytest.mark.thin
def test_gradients_are_those_at_the_rounded_parameters(run_ranks, how, dtype):
    run_ranks(2, _train, how, dtype, MixedPrecisionPolicy(), {}, timeout=300)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), {}),
        (MixedPrecisionPolicy(), {"reshard_after_forward": False}),
        (MixedPrecisionPolicy(), {"reshard_after_forward": 2, "transport": "c10d"}),
    ],
    ids=["bf16", "kept", "fewer"],
)
def test_settings(run_ranks, policy, settings):
    world_size = 4 if settings.get("reshard_after_forward") == 2 else 2
    run_ranks(world_size, _train, "interpreted", torch.float8_e4m3fn, policy, settings, 2)


def _gathered_again(keep_mb):
    """Returns the weights that a backward gathers, on ranks that share memory."""
    layers = nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False)
    model, _ = shard(nn.Sequential(*layers), transport="shared_memory")
    run = compiled(model, "interpreted", gather_dtype=torch.int8, keep_mb=keep_mb)
    loss = run(torch.ones(2, 16, requires_grad=True)).sum()  # so that backward needs all weights
    with record_collectives() as log:
        loss.backward()
    return [fqn for c in log if c.op == "all_gather" for fqn in c.params]


@pytest.mark.gloo
@pytest.mark.parametrize(("keep_mb", "expected"), [(1, []), (0, ["2.weight", "0.weight"])])
def test_codes_come_in_messages_and_so_forward_keeps_the_weights(run_ranks, keep_mb, expected):
    assert run_ranks(2, _gathered_again, keep_mb) == [expected] * 2


def _changed_behind_torch(how):
    model, _ = shard(nn.Linear(16, 16, bias=False))
    run = compiled(model, how, gather_dtype=torch.int8)
    for value in (1.0, 2.0, 3.0):
        model.weight.data.to_local().fill_(value)
        x = torch.ones(1, 16, requires_grad=True)
        run(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((1, 16), 16 * value))


def test_a_forward_sees_the_shards_as_they_are(run_ranks):
    run_ranks(2, _changed_behind_torch, "interpreted")


def _unsharded_and_retained(settings):
    """Graphs compute with rounded values, and eager code with the others, in any order."""
    torch.manual_seed(0)
    model, _ = shard(nn.Linear(16, 16, bias=False), **settings)
    whole = model.weight.full_tensor().detach()
    run = compiled(model, "interpreted", gather_dtype=torch.int8)
    model.set_reshard_after_backward(False)
    x = torch.eye(16)
    for _ in range(2):
        torch.testing.assert_close(run(x).T, rounded(whole, torch.int8, 16))
        run(x.clone().requires_grad_()).sum().backward()
        model.unshard()
        assert torch.equal(model.weight.detach(), whole)
        torch.testing.assert_close(run(x).T, rounded(whole, torch.int8, 16))
        with torch.no_grad():
            torch.testing.assert_close(model(x).T, whole)
    with torch.no_grad():
        torch.testing.assert_close(run(x).T, rounded(whole, torch.int8, 16))


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.more)])
def test_eager_code_reads_no_rounded_values(run_ranks, world_size):
    settings = {"reshard_after_forward": 2, "transport": "c10d"} if world_size == 4 else {}
    run_ranks(world_size, _unsharded_and_retained, settings)


def _mixed_dtypes():
    """Parameters of few bits, and integers, are gathered as they are."""
    model = nn.Linear(16, 16)
    model.table = nn.Parameter(torch.ones(8, 16).to(torch.float8_e4m3fn), requires_grad=False)
    model.codes = nn.Parameter(torch.ones(8, 16, dtype=torch.uint8), requires_grad=False)
    model.forward = lambda x: x @ model.weight.T + model.table.float().sum() + model.codes.sum()
    fully_shard(model)
    run = compiled(model, "interpreted", gather_dtype=torch.int8)
    with record_collectives() as log:
        value = run(torch.ones(1, 16))
    assert torch.float8_e4m3fn in {c.dtype for c in log}
    weight = rounded(model.weight.full_tensor().detach(), torch.int8, 16)
    torch.testing.assert_close(value, weight.sum(1)[None] + 2 * 8 * 16)


def test_other_dtypes_are_gathered_as_they_are(run_ranks):
    run_ranks(2, _mixed_dtypes)


def _graph():
    model = Stack()
    model, _ = shard(model, model.blocks)
    chosen = []

    def choose(name, parameter):
        chosen.append((name, tuple(parameter.shape)))
        return torch.float8_e5m2 if name.endswith("up.weight") else None

    with capture_graphs() as graphs:
        run = compiled(model, "interpreted", gather_dtype=choose, gather_block=4)
        run(batch_of(4, 8)).sum().backward()
    assert ("blocks.0.up.weight", (16, 8)) in chosen
    lines = [g.text.splitlines() for g in (*graphs.forward, *graphs.backward)]
    texts = [line for line in itertools.chain(*lines) if "float8" in line]
    eager = mean_square(model, batch_of(4, 8)).item()
    return texts, eager, mean_square(run, batch_of(4, 8)).item()


def test_a_function_chooses_and_graphs_say_it(run_ranks):
    for texts, eager, rounded_loss in run_ranks(2, _graph):
        # Two blocks, forward and backward. Where ranks send messages, the blocks share a bucket.
        assert sum(text.count("float8_e5m2/4") for text in texts) == 4
        assert eager != rounded_loss  # eager gathers in full


def _twins():
    model = Stack()
    model, _ = shard(model, model.blocks)
    options = {"inductor": False, "gather_dtype": lambda name, _: _of_first(name)}
    for block in model.blocks:
        block.compile(backend="zero3", options=options)
    with pytest.raises(Exception, match=r"says None of 'blocks.1.up.weight', and float8_e5m2/8"):
        model(batch_of(4, 8).requires_grad_())


def _of_first(name):
    return torch.float8_e5m2 if "blocks.0.up" in name else None


def test_twins_that_share_a_graph_are_told_apart(run_ranks):
    run_ranks(1, _twins)


def _explained():
    model, _ = shard(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)), transport="c10d")
    report = explain(model, torch.ones(2, 512), options={"gather_dtype": torch.float8_e4m3fn})
    return str(report)


@pytest.mark.more
def test_explain_tells_bytes_and_error(run_ranks):
    for text in run_ranks(2, _explained):
        [row] = [line.split() for line in text.splitlines() if "float8_e4m3fn/128" in line]
        assert row[:4] == ["0.weight", "float8_e4m3fn/128", "1.000", "0.258"]
        assert 1 / 22.7 / 16 > float(row[4]) > 1 / 22.7 / 64  # a weight is at most 1 / sqrt(512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gather_dtype": torch.int16},
            "'gather_dtype' must be one of torch.float8_e4m3fn, ",
        ),
        ({"gather_dtype": "fp8"}, "'gather_dtype' must be one of .*'fp8'"),
        ({"gather_block": 64}, "'gather_block' needs 'gather_dtype'"),
        ({"gather_dtype": torch.int8, "gather_block": 0}, "an int of at least 1, got 0"),
        ({"gather_dtype": torch.int8, "gather_block": True}, "an int of at least 1, got True"),
        (
            {"gather_dtype": torch.int8, "gather_block": 5},
            r"'gather_block' is 5, which does not divide a row of 'up.weight' \[16, 8\], 8 el",
        ),
        (
            {"gather_dtype": lambda name, _: torch.int32},
            "gather_dtype of '.*' must be one of .*torch.int32",
        ),
    ],
)
def test_bad_options_are_named(run_ranks, options, message):
    run_ranks(1, _fails, {k: _picklable(v) for k, v in options.items()}, message)


def _picklable(value):
    return ("function", value("", None)) if callable(value) else value


def _fails(options, message):
    options = {
        key: (lambda *_, dtype=value[1]: dtype) if isinstance(value, tuple) else value
        for key, value in options.items()
    }
    model, _ = shard(nn.Sequential(OrderedDict(up=nn.Linear(8, 16))))
    with pytest.raises(Exception, match=message):
        compiled(model, "interpreted", **options)(torch.ones(1, 8))


def _on_two_ranks_with_other_values():
    """Ranks quantize their own rows, whatever the others have."""
    model, _ = shard(nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        model.weight.to_local().fill_(1.0 + dist.get_rank())
    return compiled(model, "interpreted", gather_dtype=torch.int8)(torch.ones(1, 8)).tolist()


def test_each_rank_quantizes_its_rows(run_ranks):
    for result in run_ranks(2, _on_two_ranks_with_other_values):
        assert result == [[8.0, 16.0]]


class _Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def _planned(**options):
    call = {"x": torch.empty(4, 512)}
    found = plan(_Loss, call, world_size=8, advise=False, options=options)
    return found.traffic["all_gather"].nbytes


def test_a_plan_counts_the_bytes():
    full, sent = _planned(keep_mb=0), _planned(keep_mb=0, gather_dtype=torch.float8_e4m3fn)
    assert full >= 3 * 512 * 512 * 4
    assert sent == pytest.approx(full * (1 / 4 + 1 / 128), rel=0.01)
    with pytest.raises(Zero3Error, match="'gather_block' is 7, which does not divide"):
        _planned(gather_dtype=torch.int8, gather_block=7)

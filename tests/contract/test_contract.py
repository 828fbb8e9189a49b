"""The leaf's contract: sharded and compiled gradients are those of plain eager PyTorch.

One test makes the tables in ``docs/grad_dtype.md``, of the torch at hand. After an intended change,
``EXPECTTEST_ACCEPT=1 pytest tests/contract/test_contract.py`` rewrites them.
"""

import copy
import os

import pytest
import torch
from support.contract import CONTRACTS, LAYERS, MATMULS, Contracts, batch
from support.models import compiled, each_way, relative_difference
from support.paths import ROOT
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from deepcompile_zero3 import fully_shard

DOCS = ROOT / "docs" / "grad_dtype.md"


def _plain(dtype):
    torch.manual_seed(0)
    model = Contracts(dtype)
    return model.gradients(model, batch(dtype))


def _sharded(dtype, how, shard=fully_shard, layers_how="eager"):
    torch.manual_seed(0)
    model = Contracts(dtype)
    for layer in model.layers.values():
        shard(layer)
        if layers_how != "eager":
            layer.compile(backend=layers_how)
    shard(model)
    grads = model.gradients(compiled(model, how), batch(dtype))
    return {name: grad.full_tensor() for name, grad in grads.items()}


def _is_same(actual, expected):
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def _is_as_near_as_kernels_are(actual, expected, compute_dtype):
    """Compares within the coarser dtype's rounding: kernels sum and round in different places."""
    coarser = max(torch.finfo(compute_dtype).eps, torch.finfo(expected.dtype).eps)
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    return actual.dtype == expected.dtype and bool(difference <= 3 * coarser * scale)


def _compare(dtype, how):
    """Returns the layers whose gradients differ from plain eager code."""
    expected = _plain(dtype)
    actual = _sharded(dtype, how)
    wrong = []
    for name, grad in actual.items():
        agrees = _is_same(grad, expected[name])
        if how == "zero3" and name.split(":")[0] not in MATMULS:
            agrees = _is_as_near_as_kernels_are(grad, expected[name], dtype)
        if not agrees:
            wrong.append((name, grad.dtype, expected[name].dtype))
    return wrong


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_those_of_plain_eager_autograd(run_ranks, world_size, dtype, how):
    # All ranks have the same batch, so that the mean over ranks is exact.
    for wrong in run_ranks(world_size, _compare, dtype, how, timeout=400):
        assert wrong == []


# ---- the table in the documentation


def _differences():
    """Returns layers that differ from plain eager code, by (parameter dtype, whose gradients)."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        expected = _plain(dtype)
        torch.manual_seed(0)
        stock = Contracts(dtype)
        grads = {
            "torch.compile": stock.gradients(
                torch.compile(stock, backend="aot_eager", fullgraph=True), batch(dtype)
            ),
            "FSDP2": _sharded(dtype, "eager", shard=fsdp2),
            "FSDP2, blocks compiled": _sharded(dtype, "eager", fsdp2, layers_how="aot_eager"),
            "zero3": _sharded(dtype, "interpreted"),
        }
        for who, theirs in grads.items():
            found[dtype, who] = {n for n, g in theirs.items() if not _is_same(g, expected[n])}
    return found


def _table(dtype, differences):
    lines = [
        f"| {str(dtype).removeprefix('torch.')} parameter | {' | '.join(CONTRACTS)} |",
        "|---" * (1 + len(CONTRACTS)) + "|",
    ]
    for layer in LAYERS:
        cells = []
        for contract in CONTRACTS:
            who = [
                w
                for (d, w), wrong in differences.items()
                if d == dtype and f"{layer}: {contract}" in wrong
            ]
            if "FSDP2" in who and "FSDP2, blocks compiled" in who:
                who.remove("FSDP2, blocks compiled")
            cells.append("; ".join(who) or "-")
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.long
def test_the_documentation_tells_whose_gradients_differ(run_ranks):
    (differences,) = run_ranks(1, _differences)
    tables = "\n\n".join(_table(dtype, differences) for dtype in (torch.bfloat16, torch.float32))
    print(tables)
    text = DOCS.read_text()
    release = ".".join(torch.__version__.split(".")[:2])
    before, after = f"<!-- tables of torch {release} -->\n", "\n<!-- end -->"
    if before not in text:
        pytest.skip(f"the document has no tables of torch {release}")
    start = text.index(before) + len(before)
    end = text.index(after, start)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        DOCS.write_text(text[:start] + tables + text[end:])
    else:
        assert text[start:end] == tables
    assert "zero3" not in tables


# ---- beyond the contract


def _errors_of_weight_gradients(inductor):
    """Returns errors relative to double precision, with and without fp32_weight_grads."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = {}
    for wide in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(256, 256).bfloat16()
        model.weight.grad_dtype = torch.float32
        exact = copy.deepcopy(model).double()
        fully_shard(model)
        options = {"inductor": inductor, "fp32_weight_grads": wide}
        torch._dynamo.reset()
        run = torch.compile(model, backend="zero3", options=options, fullgraph=True)
        tangent = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
        run(x).backward(tangent)
        exact(x.double()).backward(tangent.double())
        assert model.weight.grad.dtype == torch.float32
        errors[wide] = relative_difference(model.weight.grad.full_tensor(), exact.weight.grad)
    return errors


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_fp32_weight_grads_are_nearer_to_the_truth(run_ranks, inductor):
    (errors,) = run_ranks(1, _errors_of_weight_gradients, inductor)
    print(f"relative error in bf16 {errors[False]:.1e}, with fp32_weight_grads {errors[True]:.1e}")
    assert errors[True] < 1e-5 < 1e-3 < errors[False]

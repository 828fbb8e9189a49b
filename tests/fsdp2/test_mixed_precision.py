"""Mixed precision, compared step by step with torch's FSDP2."""

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from support.models import Stack, batch_of, compiled, mine
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepcompile_zero3 import fully_shard, record_collectives

# Whether FSDP2 reduces in the gradient dtype of a parameter where a policy has no reduce_dtype, as
# we do. Before torch 2.15 it reduces in param_dtype.
FSDP2_REDUCES_IN_GRAD_DTYPE = hasattr(torch.Tensor, "_has_grad_dtype_override")
CHOICES = [None, torch.float32, torch.bfloat16]
OPS = {"all_gather", "reduce_scatter"}


class _DtypesOnTheWire(TorchDispatchMode):
    """Records the dtypes of c10d ops that the calling thread issues, by op."""

    def __init__(self):
        super().__init__()
        self.dtypes = {op: set() for op in OPS}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            for op in OPS:
                if op.replace("_", "") in name.replace("_", ""):
                    self.dtypes[op] |= {t.dtype for t in tree_leaves(args) if hasattr(t, "dtype")}
        return func(*args, **(kwargs or {}))


def _sharded(model, shard, policy, output_dtype):
    model = copy.deepcopy(model)
    for block in model.blocks:
        shard(block, mp_policy=MixedPrecisionPolicy(**policy))
    return shard(model, mp_policy=MixedPrecisionPolicy(**policy, output_dtype=output_dtype))


def _train(model, run, dtype):
    """Returns losses, output dtypes and gradient dtypes of ten steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, dtypes = [], set()
    for step in range(10):
        output = run(mine(batch_of(8, 8, seed=step)).to(dtype))
        loss = output.float().square().mean()
        loss.backward()
        dtypes.add((output.dtype, frozenset(p.grad.dtype for p in model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dtypes


def _beside_fsdp2(dtype, how, policies):
    for param, reduce, output in policies:
        where = f"{param=} {reduce=} {output=}"
        policy = {"param_dtype": param, "reduce_dtype": reduce}
        torch.manual_seed(0)
        whole = Stack(depth=1).to(dtype)

        as_ours = {} if FSDP2_REDUCES_IN_GRAD_DTYPE else {"reduce_dtype": reduce or dtype}
        theirs = _sharded(whole, fsdp2, policy | as_ours, output)
        with _DtypesOnTheWire() as wire:
            losses, dtypes = _train(theirs, theirs, dtype)

        torch._dynamo.reset()
        ours = _sharded(whole, fully_shard, policy, output)
        with record_collectives() as log:
            our_losses, our_dtypes = _train(ours, compiled(ours, how), dtype)

        assert our_dtypes == dtypes, where
        for op in OPS:
            assert wire.dtypes[op], "nothing was seen"
            assert {c.dtype for c in log if c.op == op} == wire.dtypes[op], (where, op)
        torch.testing.assert_close(our_losses, losses, rtol=1e-5, atol=0, msg=where)


def _pairs():
    """Returns policies that cover each pair of choices."""
    n = len(CHOICES)
    return [(CHOICES[i], CHOICES[j], CHOICES[(i + j) % n]) for i in range(n) for j in range(n)]


@pytest.mark.parametrize(
    "policies",
    [_pairs(), pytest.param([*itertools.product(CHOICES, repeat=3)], marks=pytest.mark.long)],
    ids=["pairs", "all"],
)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("interpreted", torch.bfloat16),
        pytest.param("eager", torch.float32, marks=pytest.mark.long),
        pytest.param("eager", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("interpreted", torch.float32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_dtypes_and_losses_are_those_of_fsdp2(run_ranks, dtype, how, policies):
    run_ranks(2, _beside_fsdp2, dtype, how, policies, timeout=400)


def _keep_norms(how):
    """Trains norms in fp32 in a bf16 model, as a policy of torch 2.15 may request."""

    @dataclasses.dataclass(frozen=True)
    class Policy(MixedPrecisionPolicy):
        param_dtype_override_fn: Any = dataclasses.field(default=None, kw_only=True)

    def override(parameter):
        return parameter.dtype if parameter.dim() == 1 else None

    policy = Policy(param_dtype=torch.bfloat16, param_dtype_override_fn=override)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.RMSNorm(8))
    seen = []
    for module in model:
        module.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    fully_shard(model, mp_policy=policy)
    with record_collectives() as log:
        compiled(model, how)(batch_of(4, 8)).float().square().mean().backward()
    if how == "eager":
        assert seen == [torch.bfloat16, torch.float32]
    gathered = {name: c.dtype for c in log if c.op == "all_gather" for name in c.params}
    assert gathered == {"0.weight": torch.bfloat16, "1.weight": torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}

    wrong = dataclasses.replace(policy, param_dtype_override_fn=lambda _: torch.float16)
    with pytest.raises(
        ValueError, match=r"gave torch\.float16 for 'weight'; it gives None, .*bfloat16"
    ):
        fully_shard(nn.Linear(2, 2), mp_policy=wrong)


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_a_policy_may_override_the_dtype_of_some_parameters(run_ranks, how):
    run_ranks(2, _keep_norms, how)


@dataclasses.dataclass
class _Pair:
    first: torch.Tensor
    second: torch.Tensor | None = None


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair, mask=None, *, scale=1.0, causal=True, kind=dict):
        assert (mask, causal, kind) == (None, True, dict)
        return _Pair(self.linear(pair.first) * scale)


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x):
        pair = _Pair(x)
        for layer in self.layers:
            pair = layer(pair, None, scale=2.0)
        return pair.first


@pytest.mark.smoke
@pytest.mark.usefixtures("one_rank")
def test_arguments_of_all_kinds_are_cast_in_one_graph():
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = _Layers()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    run = compiled(fully_shard(model, mp_policy=policy), "interpreted", fullgraph=True)
    output = run(batch_of(2, 4))
    assert output.dtype == torch.float32
    output.sum().backward()


class _Batch(dict):
    """A dict that torch does not know as a container."""


class _TakesABatch(nn.Linear):
    def forward(self, batch):
        return _Batch(y=super().forward(batch["x"]), extra=[batch["x"]])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_tensors_in_a_subclass_of_dict_are_cast(how):
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(_TakesABatch(4, 4), mp_policy=policy)
    output = compiled(model, how, fullgraph=True)(_Batch(x=batch_of(2, 4)))
    assert type(output) is _Batch
    assert output["y"].dtype == output["extra"][0].dtype == torch.float32
    assert torch.equal(output["extra"][0], batch_of(2, 4).bfloat16().float())

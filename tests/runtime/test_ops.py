"""The seven operators, called directly."""

import sys

import pytest
import torch
from support.models import call_in_backward, in_backward
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves, tree_map_only

from deepcompile_zero3 import fully_shard, record_collectives
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.module_parameters import parameters_of

pytestmark = pytest.mark.usefixtures("one_rank")


class Weights(nn.Module):
    """A module with parameters of all supported layouts and dtypes."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Parameter(torch.randn(3, 4))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.vector = nn.Parameter(torch.randn(5))
        self.bf16 = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))

    def forward(self):
        return sum(p.float().sum() for p in (self.dense, self.transposed, self.vector, self.bf16))


NAMES = ("dense", "transposed", "vector", "bf16")


def test_no_operator_may_be_captured_in_a_cuda_graph():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("zero3::")]
    assert len(names) == 13
    for name in names:
        op = getattr(ops, name.removeprefix("zero3::")).default
        assert torch.Tag.cudagraph_unsafe in op.tags, name


@pytest.fixture
def model(one_rank):
    model = fully_shard(Weights())
    model()  # a forward passes the shards to the runtime
    return model


def placeholder(model, name):
    """Returns the placeholder of a parameter."""
    return parameters_of(model)[name].placeholder


def gathered(model, *names):
    placeholders = [placeholder(model, name).detach() for name in names]
    handle = ops.all_gather_start.default(placeholders)
    return ops.all_gather_wait.default(handle, placeholders)[:-1]


# ---- fakes: opcheck copies its inputs, and placeholders cannot be copied


def assert_fake_is_like_real(op, *args):
    """Asserts that the results of ``op`` equal, but for values, the results of its fake."""
    real = op(*args)
    with FakeTensorMode() as mode:
        fake = op(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    for mine, theirs in zip(tree_leaves(real), tree_leaves(fake), strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert mine.stride() == theirs.stride()
        assert mine.requires_grad == theirs.requires_grad
    return real


@pytest.mark.parametrize("name", NAMES)
def test_unshard_is_as_its_fake(model, name):
    contract = "bfloat16" if name == "bf16" else "float32"
    assert_fake_is_like_real(ops.unshard.default, placeholder(model, name), contract)


def test_a_gather_is_as_its_fake(model):
    placeholders = [placeholder(model, name).detach() for name in NAMES]
    handle = assert_fake_is_like_real(ops.all_gather_start.default, placeholders)
    handle = assert_fake_is_like_real(ops.all_gather_start.default, placeholders, handle)
    assert_fake_is_like_real(ops.all_gather_wait.default, handle, placeholders)
    assert_fake_is_like_real(ops.all_gather_wait.default, handle, placeholders, handle)


@pytest.mark.parametrize("name", NAMES)
def test_reduce_grad_is_as_its_fake(model, name):
    leaf = placeholder(model, name)
    grad = torch.ones_like(leaf, device="meta")
    grad = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype).fill_(1)
    for after in ((), (torch.empty(0),)):
        in_backward(
            lambda: assert_fake_is_like_real(ops.reduce_grad.default, grad, leaf, *after)  # noqa: B023
        )


def test_written_gradients_are_as_their_fakes(model):
    leaf = placeholder(model, "dense")
    factors = [torch.randn(3, 2), torch.randn(2, 4)]
    rows = [torch.tensor([[2], [0]]), torch.randn(2, 1, 4)]
    in_backward(lambda: assert_fake_is_like_real(ops.reduce_mm.default, factors, leaf))
    in_backward(
        lambda: assert_fake_is_like_real(ops.reduce_rows.default, rows, leaf, torch.empty(0))
    )


def test_a_wait_takes_the_handle_of_a_start(model):
    with pytest.raises(RuntimeError, match="take what zero3::all_gather_start returned"):
        ops.all_gather_wait.default(
            torch.zeros(1, dtype=torch.int64), [placeholder(model, "dense")]
        )


# ---- values


def test_all_gather_returns_the_full_tensors(model):
    fulls = gathered(model, *NAMES)

    assert len(fulls) == len(NAMES)
    for full, name in zip(fulls, NAMES, strict=True):
        shard = getattr(model, name)
        assert (full.dtype, full.shape) == (shard.dtype, shard.shape)
        assert torch.equal(full, shard.full_tensor())


def test_a_gathered_tensor_has_the_strides_that_the_parameter_had(model):
    fulls = gathered(model, "dense", "transposed")

    assert [full.stride() for full in fulls] == [(4, 1), (1, 3)]


def test_the_cast_to_the_compute_dtype_comes_before_the_wire(one_rank):
    model = fully_shard(nn.Linear(4, 3), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    with record_collectives() as log:
        model(torch.ones(1, 4))

    assert [(c.op, c.dtype, c.nbytes, c.params) for c in log] == [
        ("all_gather", torch.bfloat16, 2 * (3 * 4 + 3), ["weight", "bias"])
    ]
    assert repr(log[0]) == (
        "Collective(op='all_gather', dtype=torch.bfloat16, nbytes=30, world_size=1, "
        "params=['weight', 'bias'])"
    )


def test_parameters_of_one_dtype_are_gathered_in_one_collective(model):
    with record_collectives() as log:
        gathered(model, *NAMES)

    assert [(c.op, c.dtype, c.params) for c in log] == [
        ("all_gather", torch.float32, ["dense", "transposed", "vector"]),
        ("all_gather", torch.bfloat16, ["bf16"]),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_gathered_tensor_never_shares_memory_with_the_shard(model, name):
    shard = getattr(model, name)
    before = shard.full_tensor().clone()

    (full,) = gathered(model, name)
    again = ops.unshard.default(placeholder(model, name).detach(), "any")
    full.fill_(7)
    again.fill_(8)

    assert torch.equal(shard.full_tensor(), before)
    assert (full == 7).all()


def test_a_collective_keeps_no_hooks_of_saved_tensors(model):
    # In about 1% of calls, torch's own collectives keep the hooks until their thread releases them.
    def pack(tensor):
        return tensor

    references = sys.getrefcount(pack)
    vector = placeholder(model, "vector").detach()

    for _ in range(3000):
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            ops.all_gather_start.default([vector])
        assert sys.getrefcount(pack) == references


def test_reduce_grad_returns_a_token_and_gives_the_shard_its_gradient(model):
    grads = {name: torch.rand_like(getattr(Weights(), name)) for name in NAMES}

    tokens = in_backward(
        lambda: [ops.reduce_grad.default(g, placeholder(model, n)) for n, g in grads.items()]
    )

    assert all(token.shape == (0,) for token in tokens)
    for name, grad in grads.items():
        assert torch.equal(getattr(model, name).grad.full_tensor(), grad)


def test_gradients_of_one_backward_add_up_in_the_shard(model):
    grad = torch.rand(3, 4)

    in_backward(
        lambda: [ops.reduce_grad.default(grad, placeholder(model, "dense")) for _ in range(3)]
    )
    in_backward(lambda: ops.reduce_grad.default(grad, placeholder(model, "dense")))

    torch.testing.assert_close(model.dense.grad.full_tensor(), 4 * grad)


def test_written_gradients_are_a_product_and_a_sum_of_rows(model):
    left, right = torch.randn(3, 2), torch.randn(2, 4)
    in_backward(lambda: ops.reduce_mm.default([left, right], placeholder(model, "dense")))
    assert torch.equal(model.dense.grad.full_tensor(), left @ right)

    model.zero_grad()
    indices, values = torch.tensor([2, 0, 2]), torch.randn(3, 4)
    in_backward(lambda: ops.reduce_rows.default([indices, values], placeholder(model, "dense")))
    expected = torch.stack([values[1], torch.zeros(4), values[0] + values[2]])
    assert torch.equal(model.dense.grad.full_tensor(), expected)


def test_a_gradient_may_be_overwritten_as_soon_as_reduce_grad_returns(model):
    def reduce_and_overwrite():
        grad = torch.ones(3, 4)
        ops.reduce_grad.default(grad, placeholder(model, "dense"))
        grad.fill_(float("nan"))

    in_backward(reduce_and_overwrite)

    assert torch.equal(model.dense.grad.full_tensor(), torch.ones(3, 4))


def test_a_gradient_of_any_strides_is_reduced_rightly(model):
    transposed = torch.rand(4, 3).t()
    expanded = torch.rand(3, 1).expand(3, 4)

    in_backward(lambda: ops.reduce_grad.default(transposed, placeholder(model, "dense")))
    in_backward(lambda: ops.reduce_grad.default(expanded, placeholder(model, "transposed")))

    assert torch.equal(model.dense.grad.full_tensor(), transposed)
    assert torch.equal(model.transposed.grad.full_tensor(), expanded)


def test_uninitialized_memory_never_reaches_a_result(run_ranks):
    # Three rows on two ranks are padded to four. Deterministic mode fills fresh memory with NaN.
    for results in run_ranks(2, train_where_fresh_memory_is_nan):
        for tensor in results:
            assert torch.equal(tensor, torch.ones_like(tensor))


def train_where_fresh_memory_is_nan():
    model = fully_shard(nn.Linear(1, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    torch.use_deterministic_algorithms(True)
    try:
        out = model(torch.zeros(1, 1))
        (out + model(torch.ones(1, 1)) - out).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return [out.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())]


# ---- errors


class _Large(nn.Module):
    """A module of at least a bucket's size, so that reductions start before a backward ends."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))

    def forward(self, x, trap=None):
        for layer in self.layers:
            x = trap(layer(x)) if trap is not None and layer is self.layers[0] else layer(x)
        return x


def _raise():
    raise ValueError("trap")


def _trap(x):
    return call_in_backward(x, _raise)


def _abandon():
    torch.manual_seed(0)
    model = _Large()
    whole = [layer.weight.detach().clone() for layer in model.layers]
    fully_shard(model)
    x = torch.ones(2, 1024)
    for _ in range(3):
        with pytest.raises(ValueError, match="trap"):
            model(x, _trap).sum().backward()
        placeholders = [parameter.placeholder for parameter in model._zero3_group.parameters]
        ops.all_gather_start.default(placeholders)  # drops the handle
        handle = ops.all_gather_start.default(placeholders)
        *fulls, _ = ops.all_gather_wait.default(handle, placeholders)
        assert all(map(torch.equal, fulls, whole))
        assert all(parameter.grad is None for parameter in model.parameters())
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_exchanges_that_nobody_waits_for_do_not_disturb_later_ones(run_ranks):
    run_ranks(2, _abandon, timeout=60)


def test_a_placeholder_raises_when_it_is_read(model):
    placeholders = []

    def backend(gm, example_inputs):
        placeholders.extend(t for t in example_inputs if isinstance(t, nn.Parameter))
        return gm.forward

    torch.compile(model, backend=backend)()

    assert len(placeholders) == len(NAMES)
    for placeholder in placeholders:
        assert placeholder.untyped_storage().nbytes() == 0
        for read in (repr, torch.clone, torch.sum):
            with pytest.raises(RuntimeError, match="placeholder"):
                read(placeholder)


def test_tensors_that_are_no_placeholder_are_refused(model):
    other = torch.ones(3, 4)
    refused = r"a tensor \[3, 4\] of Float is the placeholder of no live sharded parameter"
    with pytest.raises(RuntimeError, match=refused):
        ops.unshard.default(other, "any")
    with pytest.raises(RuntimeError, match=refused):
        ops.all_gather_start.default([other])
    with pytest.raises(RuntimeError, match=refused):
        in_backward(lambda: ops.reduce_grad.default(torch.ones(3, 4), other))


def test_a_placeholder_stands_for_nothing_when_its_model_is_gone(model):
    other = fully_shard(nn.Linear(2, 2))
    other(torch.ones(1, 2))
    leaf = placeholder(other, "weight")
    ops.unshard.default(leaf, "any")

    del other

    with pytest.raises(RuntimeError, match="its model was deleted"):
        ops.unshard.default(leaf, "any")
    ops.unshard.default(placeholder(model, "dense"), "any")


def test_a_gradient_of_another_shape_is_refused_with_both_shapes(model):
    with pytest.raises(RuntimeError, match=r"'dense' has shape \[4, 3\].* has \[3, 4\]"):
        in_backward(lambda: ops.reduce_grad.default(torch.ones(4, 3), placeholder(model, "dense")))


def test_a_sparse_gradient_is_refused_by_name(model):
    with pytest.raises(RuntimeError, match=r"'dense' is Sparse.*sparse=False"):
        in_backward(
            lambda: ops.reduce_grad.default(
                torch.ones(3, 4).to_sparse(), placeholder(model, "dense")
            )
        )


def test_reduce_grad_outside_of_a_backward_is_refused(model):
    with pytest.raises(RuntimeError, match="outside of a backward"):
        ops.reduce_grad.default(torch.ones(3, 4), placeholder(model, "dense"))


def test_a_refused_gradient_leaves_the_next_backward_clean(model):
    def one_right_one_wrong():
        ops.reduce_grad.default(torch.ones(3, 4), placeholder(model, "dense"))
        ops.reduce_grad.default(torch.ones(6), placeholder(model, "vector"))

    with pytest.raises(RuntimeError, match="'vector' has shape"):
        in_backward(one_right_one_wrong)
    in_backward(lambda: ops.reduce_grad.default(torch.ones(5), placeholder(model, "vector")))

    assert model.dense.grad is None
    assert torch.equal(model.vector.grad.full_tensor(), torch.ones(5))

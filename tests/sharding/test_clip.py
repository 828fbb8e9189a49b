"""``clip_grad_norm_``: gradients on several meshes are clipped by the norm of all of them."""

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from support.mesh_models import data_and_tensor_parallel, replicas, sharded_by, tensor_parallel
from support.models import Stack, batch_of, mean_square, mine
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from deepcompile_zero3 import clip_grad_norm_, fully_shard

NORMS = [1.0, 2.0, 3.0, 0.0, -1.0, math.inf, -math.inf]


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _copy(tensor):
    """Returns a copy with the same placements, also if they are partial."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    local, mesh, placements = tensor.to_local().clone(), tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def _parameter(value, grad):
    parameter = nn.Parameter(value)
    parameter.grad = grad
    return parameter


def _on_four_meshes():
    """Returns parameters with gradients: on (dp, tp), on dp, on replicas, plain, and not reduced.

    The first has no gradient, and some ranks have no row of the last.
    """
    mesh = data_and_tensor_parallel()
    model = tensor_parallel(Stack(), mesh["tp"])
    sharded_by(fully_shard, model, mesh=mesh["dp"])
    mean_square(model, mine(batch_of(8, 8), mesh.get_group("dp"))).backward()
    rows = batch_of(1, 4, seed=1)
    short = [distribute_tensor(rows, replicas(), [Replicate(), Shard(0)]) for _ in range(2)]
    not_reduced = [
        DTensor.from_local(torch.full([3], 0.5), mesh["tp"], [placement])
        for placement in (Replicate(), Partial())
    ]
    return [
        nn.Parameter(torch.ones(2)),
        *model.parameters(),
        _parameter(torch.ones(3), torch.tensor([3.0, -1.0, 2.0])),
        _parameter(*not_reduced),
        _parameter(*short),
    ]


def _clipped():
    parameters = _on_four_meshes()
    before = [p.grad for p in parameters]
    wholes = [None if g is None else _whole(g) for g in before]
    for norm_type in NORMS:
        reference = [_parameter(torch.empty(p.shape), None) for p in parameters]
        for ours, whole, grad, whole_grad in zip(
            parameters, reference, before, wholes, strict=True
        ):
            if grad is not None:
                ours.grad, whole.grad = _copy(grad), whole_grad.clone()
        foreach = None if norm_type == 2 else False
        with CommDebugMode() as collectives:
            norm = clip_grad_norm_(iter(parameters), 0.01, norm_type, foreach=foreach)
        # Over tp, over dp and over shard, and one to sum the gradient that is not reduced.
        assert collectives.get_total_counts() == 4
        expected = nn.utils.clip_grad_norm_(reference, 0.01, norm_type)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected)
        copies = [torch.empty_like(norm) for _ in range(4)]
        dist.all_gather(copies, norm)
        assert all(torch.equal(norm, copy) for copy in copies)
        for ours, whole in zip(parameters, reference, strict=True):
            assert (ours.grad is None) == (whole.grad is None)
            if whole.grad is not None:
                torch.testing.assert_close(_whole(ours.grad), whole.grad)


def test_gradients_of_several_meshes_are_clipped_by_the_norm_of_all(run_ranks):
    run_ranks(4, _clipped)


def _missing_on_some_ranks():
    """Ranks differ in the gradients that they have, as experts do without tokens."""
    mesh = data_and_tensor_parallel()
    low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    low.grad_dtype = torch.float32
    wholes = [batch_of(4, 3, seed=seed) for seed in range(4)]
    grads, parameters = [], []
    for whole, on, placements, having in (  # the ranks that have a gradient
        (wholes[0], mesh, [Shard(1), Shard(0)], [0]),
        (wholes[1], mesh["tp"], [Shard(0)], [0, 2]),
        (wholes[2], mesh["dp"], [Shard(0)], [0, 1]),
        (wholes[3], mesh, [Replicate(), Shard(0)], []),
    ):
        grad = distribute_tensor(whole, on, placements)
        has_one = dist.get_rank() in having
        parameters.append(_parameter(torch.ones_like(grad), grad if has_one else None))
        grads.append((grad if has_one else torch.zeros_like(grad)).full_tensor())
    reference = [_parameter(torch.ones(4, 3), grad) for grad in grads]
    for norm_type in (0.0, 1.0, 2.0, math.inf):
        with CommDebugMode() as collectives:
            norm = clip_grad_norm_([low, *parameters], 1e9, norm_type)
        assert collectives.get_total_counts() == 3  # twice over tp: with dp, and alone
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference, 1e9, norm_type))
    clip_grad_norm_(parameters, 0.5)
    assert clip_grad_norm_(parameters, 1.0) == pytest.approx(0.5, rel=1e-4)
    for parameter in parameters:
        parameter.grad = None
    assert clip_grad_norm_(parameters, 1.0) == 0


def test_a_gradient_that_some_ranks_do_not_have_counts_as_zero_there(run_ranks):
    run_ranks(4, _missing_on_some_ranks)


def _nan_on_one_rank():
    parameters = _on_four_meshes()
    weight = parameters[5]
    assert weight.device_mesh.ndim == 2
    if dist.get_rank() == 3:
        weight.grad.to_local()[0] = torch.nan
    before = [p.grad.to_local().clone() for p in parameters[1:5]]
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match=rf"order {norm_type} of the gradients is nan"):
            clip_grad_norm_(parameters, 0.01, norm_type, error_if_nonfinite=True)
        for parameter, grad in zip(parameters[1:5], before, strict=True):
            assert torch.equal(parameter.grad.to_local(), grad)
    assert clip_grad_norm_(parameters, 0.01, math.inf).isnan()


def test_a_nan_on_one_rank_reaches_the_norm_of_all(run_ranks):
    run_ranks(4, _nan_on_one_rank)


def test_without_gradients_the_norm_is_zero():
    parameter = nn.Parameter(torch.ones(2))
    assert clip_grad_norm_([], 1.0) == clip_grad_norm_(parameter, 1.0) == 0
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(parameter, 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_the_dtype_of_the_norm_is_that_of_declared_gradients():
    low, frozen = torch.bfloat16, (torch.float8_e4m3fn, torch.int64)
    parameters = [nn.Parameter(torch.ones(2).to(dtype), False) for dtype in frozen]
    parameters.append(_parameter(torch.ones(2, dtype=low), torch.tensor([3.0, 4.0], dtype=low)))
    for norm_type in (2, 0):
        assert clip_grad_norm_(parameters, 9.0, norm_type).dtype == low
    parameters.append(nn.Parameter(torch.ones(2, dtype=low)))
    parameters[-1].grad_dtype = None
    norm = clip_grad_norm_(parameters, 1.0)
    assert (norm.dtype, norm) == (torch.float32, 5)
    torch.testing.assert_close(parameters[2].grad, torch.tensor([0.6, 0.8], dtype=low))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_a_parameter_of_any_dtype_has_a_norm_if_its_gradient_has(dtype):
    parameters = [nn.Parameter(torch.ones(2).to(dtype)) for _ in range(2)]
    if not dtype.is_complex:
        parameters[0].grad_dtype = torch.float32
    parameters[0].grad = torch.tensor([3.0, 4.0], dtype=parameters[0].grad_dtype)
    assert clip_grad_norm_(parameters, 1.0) == 5
    assert parameters[0].grad.abs().sum() == pytest.approx(1.4)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", NORMS)
def test_many_small_gradients_have_the_norm_that_torch_computes(norm_type, foreach):
    torch.manual_seed(0)
    shapes = [(3, 5), (), (0, 4), (64, 64), (65, 64), (7,)] * 30
    gradients = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    gradients[0] = gradients[0].t().contiguous().t()  # clones keep its strides
    ours, theirs = ([_parameter(g.clone(), g.clone()) for g in gradients] for _ in range(2))
    if norm_type in (-1.0, math.inf, -math.inf):  # torch has none of a tensor without elements
        ours, theirs = ([p for p in each if p.numel()] for each in (ours, theirs))
    norm = clip_grad_norm_(ours, 1.0, norm_type, foreach=foreach)
    torch.testing.assert_close(
        norm, nn.utils.clip_grad_norm_(theirs, 1.0, norm_type, foreach=foreach)
    )
    for clipped, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(clipped.grad, expected.grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_many_small_gradients_of_low_precision_keep_their_norm(norm_type):
    halves = [torch.full((100,), 400.0, dtype=torch.float16) for _ in range(128)]
    floats = [torch.full((4096,), 0.1) for _ in range(200)]
    # The norm of order 1 of all these halves is too large for a half.
    for gradients in ([*halves, torch.ones(5000)], floats):
        parts = torch.cat([gradient.double() for gradient in gradients])
        norm = clip_grad_norm_([_parameter(g, g.clone()) for g in gradients], 1.0, norm_type)
        assert norm.dtype == torch.float32
        expected = torch.linalg.vector_norm(parts, norm_type)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)


def test_the_signature_is_torchs():
    def described(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert described(clip_grad_norm_) == described(nn.utils.clip_grad_norm_)

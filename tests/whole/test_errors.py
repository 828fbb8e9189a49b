"""Errors come at once and name the module or parameter, the values and a remedy."""

import copy
import sys
import warnings

import pytest
import torch
from support.job import needs_a_job
from support.models import Stack
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from deepcompile_zero3 import Options, Zero3Error, fully_shard

in_every_way = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture
def x():
    return torch.ones(1, 2)


def runnable(model, compiled):
    return torch.compile(model, backend="zero3", options={"inductor": False}) if compiled else model


# ---- the backend's options


def test_a_misspelt_option_is_refused_with_the_list_of_options(x):
    compiled = torch.compile(nn.Linear(2, 2), backend="zero3", options={"inductr": False})

    with pytest.raises(BackendCompilerFailed) as error:
        compiled(x)

    message = str(error.value)
    assert "unknown option 'inductr' of backend 'zero3'; did you mean 'inductor'?" in message
    assert all(repr(name) in message for name in vars(Options()))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("inductor", 0),
        ("fp32_weight_grads", "yes"),
        ("regions", 1),
        ("inductor_config", ["max_autotune"]),
        ("gather_bucket_mb", 0),
        ("gather_bucket_mb", -1),
        ("gather_bucket_mb", "64"),
        ("gather_bucket_mb", float("nan")),
        ("gather_bucket_mb", float("inf")),
        ("gather_bucket_mb", sys.maxsize),
        ("gathers_ahead", 0),
        ("gathers_ahead", 1.0),
        ("gathers_ahead", True),
        ("activations_mb", -1),
        ("activations_mb", "4096"),
        ("activations_mb", float("nan")),
    ],
)
def test_a_bad_value_of_an_option_is_refused_with_the_value(option, value):
    with pytest.raises(ValueError, match=f"option '{option}' must be .*, got ") as error:
        Options.parse({option: value})

    assert repr(value) in str(error.value)


@pytest.mark.parametrize("settings", [(2.0**40, 1), (2**40, 10**30), (0.5, 10**400)])
def test_any_number_of_bytes_ahead_is_one_for_the_runtime(settings):
    bucket, ahead = settings
    options = Options.parse({"gather_bucket_mb": bucket, "gathers_ahead": ahead})
    assert 0 < options.bytes_ahead < 2**63


def test_settings_for_inductor_without_inductor_are_refused():
    with pytest.raises(ValueError, match="'inductor_config' needs 'inductor': True"):
        Options.parse({"inductor": False, "inductor_config": {"max_autotune": True}})


def test_cuda_graphs_are_refused():
    with pytest.raises(NotImplementedError, match=r"'triton.cudagraphs': True.*leave it out"):
        Options.parse({"inductor_config": {"triton.cudagraphs": True}})


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("reduce-overhead", r"'triton.cudagraphs'.*use one of .*'max-autotune-no-cudagraphs'"),
        ("max-autotune", r"'triton.cudagraphs'.*use one of .*'max-autotune-no-cudagraphs'"),
        ("lite", r"(sets 'selective_decompose'|unknown mode).*'max-autotune-no-cudagraphs'"),
        ("fastest", r"unknown mode 'fastest'.*'default'.*'max-autotune-no-cudagraphs'"),
    ],
)
def test_other_modes_are_refused_and_those_to_use_named(x, mode, message):
    compiled = torch.compile(nn.Linear(2, 2), backend="zero3", mode=mode)

    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(x)


@pytest.mark.inductor
def test_a_model_that_was_never_sharded_compiles_as_with_inductor():
    torch.manual_seed(0)
    models = {"inductor": nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))}
    models["zero3"] = copy.deepcopy(models["inductor"])
    x = torch.randn(3, 8)

    results = {}
    for backend, model in models.items():
        out = torch.compile(model, backend=backend)(x)
        out.square().sum().backward()
        results[backend] = [out.detach(), *(parameter.grad for parameter in model.parameters())]

    for ours, inductors in zip(results["zero3"], results["inductor"], strict=True):
        assert torch.equal(ours, inductors)


class Named(Stack):
    def forward(this, x):
        return super().forward(x)


def _shard_by_torch():
    model = torch_fully_shard(Named())
    run = torch.compile(model, backend="zero3", options={"inductor": False})
    told = "zero3: FSDPNamed was sharded by torch's fully_shard, .* Import"
    with pytest.warns(UserWarning, match=told):
        run(torch.ones(1, 8)).sum().backward()
    assert (model.head.bias.grad.full_tensor() == 1).all()


def test_a_model_that_torch_has_sharded_is_told_of(run_ranks):
    run_ranks(1, _shard_by_torch)


def _forget_to_shard():
    """Compiles a module on two ranks while no module is sharded, and another while one is."""
    options, x = {"inductor": False}, torch.ones(1, 8)
    run = torch.compile(Named(), backend="zero3", options=options)
    with pytest.warns(UserWarning, match="zero3: Named is compiled on several ranks, and no"):
        run(x)
    teacher, model = Stack(), Stack()
    fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(teacher, backend="zero3", options=options)(x)


def test_a_model_that_was_never_sharded_is_told_of_where_ranks_are_several(run_ranks):
    run_ranks(2, _forget_to_shard)


# ---- a sharded model


@needs_a_job
@in_every_way
def test_a_model_on_the_meta_device_runs_only_once_it_is_materialized(x, compiled):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    fully_shard(model)
    run = runnable(model, compiled)

    with pytest.raises(RuntimeError, match=r"'weight' is still on the meta device.*to_empty"):
        run(x)

    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert torch.equal(run(x), torch.tensor([[3.0, 3.0]]))


@needs_a_job
@in_every_way
@pytest.mark.parametrize("already_ran", [False, True], ids=["before the first step", "later"])
def test_a_plain_tensor_cannot_take_the_place_of_a_shard(x, compiled, already_ran):
    model = fully_shard(nn.Linear(2, 2))
    run = runnable(model, compiled)
    if already_ran:
        run(x).sum().backward()

    model.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(
        Zero3Error, match=r"'weight' was replaced by a Parameter .*assign a DTensor"
    ):
        run(x)


@needs_a_job
def test_a_quantized_gather_names_a_parameter_that_was_replaced(x):
    model = fully_shard(nn.Linear(2, 2))
    options = {"inductor": False, "gather_dtype": torch.int8}
    run = torch.compile(model, backend="zero3", options=options)

    model.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(Exception, match=r"'weight' was replaced by a Parameter .*assign a DTensor"):
        run(x)


@needs_a_job
@in_every_way
def test_a_dtensor_of_the_same_placement_can_take_the_place_of_a_shard(x, compiled):
    model = fully_shard(nn.Linear(2, 2, bias=False))
    run = runnable(model, compiled)
    run(x).sum().backward()

    model.weight = nn.Parameter(
        DTensor.from_local(torch.ones(2, 2), model.weight.device_mesh, [Shard(0)])
    )
    out = run(x)
    out.sum().backward()

    assert torch.equal(out, torch.tensor([[2.0, 2.0]]))
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 2))


@needs_a_job
@in_every_way
@pytest.mark.parametrize(
    ("shape", "placement"), [((3, 2), Shard(0)), ((2, 2), Shard(1)), ((2, 2), Replicate())]
)
def test_a_dtensor_of_another_shape_or_placement_is_refused(x, compiled, shape, placement):
    model = fully_shard(nn.Linear(2, 2))
    run = runnable(model, compiled)
    run(x).sum().backward()

    model.weight = nn.Parameter(
        DTensor.from_local(torch.ones(shape), model.weight.device_mesh, [placement])
    )

    with pytest.raises(Zero3Error, match="'weight'"):
        run(x)


@needs_a_job
@in_every_way
def test_a_change_of_dtype_after_sharding_is_refused(x, compiled):
    model = fully_shard(nn.Linear(2, 2))
    run = runnable(model, compiled)
    run(x).sum().backward()

    model.half()

    with pytest.raises(
        Zero3Error, match=r"'weight' was torch.float32 .* torch.float16 now.*param_"
    ):
        run(x)


class Decaying(nn.Linear):
    """A layer that writes to its weight in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("how", ["eager", "interpreted", "inductor"])
def test_a_forward_cannot_write_to_a_weight(run_ranks, how):
    (error,) = run_ranks(1, write_in_forward, how)

    assert error is not None, "the write was lost"
    assert "'weight'" in error


def write_in_forward(how):
    model = fully_shard(Decaying(2, 2))
    options = {"inductor": how == "inductor"}
    run = model if how == "eager" else torch.compile(model, backend="zero3", options=options)
    try:
        run(torch.ones(1, 2))
    except RuntimeError as error:
        return str(error)
    return None


# ---- dtypes


@needs_a_job
def test_a_grad_dtype_that_holds_no_gradient_is_refused_by_name(x):
    late, early = fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)
    late.weight.grad_dtype = early.weight.grad_dtype = torch.int32

    with pytest.raises(Zero3Error, match=r"grad_dtype of 'weight' is torch\.int32; a gradient"):
        fully_shard(early)
    with pytest.raises(Zero3Error, match=r"grad_dtype of 'weight' is torch\.int32; a gradient"):
        late(x)

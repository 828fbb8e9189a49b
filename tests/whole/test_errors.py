"""Errors come at once and name the module or parameter, the values and a remedy."""

import copy
import io
import pickle

import pytest
import torch
from support.job import needs_a_job
from support.mesh_models import mesh_dims
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

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


# ---- fully_shard: what cannot be sharded


def test_sharding_without_a_process_group_is_refused():
    with pytest.raises(Zero3Error, match=r"init_process_group\(\) first"):
        fully_shard(nn.Linear(2, 2))


class WithCachedWeights(nn.Linear):
    """A layer that caches its weights."""

    def __init__(self):
        super().__init__(2, 2)
        self.cache = {"transposed": 1, "plain": self.weight}


def linear_with_weight(weight):
    linear = nn.Linear(2, 2)
    linear.weight = weight
    return linear


UNSHARDABLE = {
    "a cache of weights": (
        WithCachedWeights,
        r"'bad' \(WithCachedWeights\) .*'bad.weight' in self.cache\['plain'\].*self.weight in forw",
    ),
    "a scripted module": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        r"'bad' \(RecursiveScriptModule\) is a ScriptModule",
    ),
    "a lazy module": (
        lambda: nn.LazyLinear(2),
        r"'bad.weight' has no shape yet: run the lazy module once before fully_shard",
    ),
    "a complex weight": (
        lambda: linear_with_weight(nn.Parameter(torch.eye(2, dtype=torch.complex64))),
        r"'bad.weight' is torch.complex64.*view_as_real, or .*ignored_params",
    ),
    "a sparse weight": (
        lambda: linear_with_weight(nn.Parameter(torch.eye(2).to_sparse())),
        r"'bad.weight' is torch.sparse_coo; only dense",
    ),
}


def model_with(bad):
    model = nn.Sequential()
    model.append(nn.Linear(2, 2))
    model.register_module("bad", bad)
    return model


@needs_a_job
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize(("build", "message"), UNSHARDABLE.values(), ids=UNSHARDABLE)
def test_a_model_that_cannot_be_sharded_is_refused_and_left_as_it_was(build, message):
    model = model_with(build())
    before = anatomy(model)

    with pytest.raises(Zero3Error, match=message):
        fully_shard(model)

    assert anatomy(model) == before
    fully_shard(model[0])
    assert isinstance(model[0].weight, DTensor)


def anatomy(model):
    """Returns what sharding changes in a model: classes, parameters, attributes and hooks."""
    return [
        (
            name,
            type(module),
            {attribute: id(p) for attribute, p in module._parameters.items()},
            sorted(vars(module)),
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ]


@needs_a_job
@pytest.mark.parametrize("container", [nn.ModuleList, nn.ParameterList], ids=lambda c: c.__name__)
def test_a_container_without_a_forward_is_refused(container):
    inside = nn.Linear(2, 2) if container is nn.ModuleList else nn.Parameter(torch.ones(2))

    with pytest.raises(Zero3Error, match=f"a {container.__name__} has no forward.*modules in it"):
        fully_shard(container([inside]))


@needs_a_job
def test_a_module_is_sharded_only_once():
    model = fully_shard(nn.Linear(2, 2))
    before = anatomy(model)

    with pytest.raises(Zero3Error, match=r"called twice on the same \w*Linear"):
        fully_shard(model)

    assert anatomy(model) == before


@needs_a_job
def test_a_block_cannot_be_sharded_after_the_model():
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    before = anatomy(model)

    with pytest.raises(Zero3Error, match=r"\w*Linear were sharded already.*blocks first.*last"):
        fully_shard(model[0])

    assert anatomy(model) == before


@needs_a_job
def test_objects_that_are_no_module_are_refused():
    with pytest.raises(TypeError, match=r"takes an nn.Module, got int"):
        fully_shard(3)


# ---- fully_shard: arguments


@needs_a_job
def test_data_parallel_dimensions_that_cannot_be_used_are_refused():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(2, 2)
    sharded = distribute_module(
        nn.Linear(2, 2),
        mesh,
        lambda _, module, mesh: module.register_parameter(
            "weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0), Replicate()]))
        ),
    )
    for model, dims, error, message in [
        (linear, ("dp",), TypeError, r"is a DataParallelMeshDims of torch, got \('dp',\)"),
        (
            linear,
            mesh_dims(replicate="dp"),
            NotImplementedError,
            "shards nothing: name a dimension",
        ),
        (
            linear,
            mesh_dims(shard="pp"),
            ValueError,
            "has to name dimensions of DeviceMesh.*dp.*, each once",
        ),
        (
            linear,
            mesh_dims("dp", "dp"),
            ValueError,
            "has to name dimensions of DeviceMesh.*dp.*, each once",
        ),
        (
            linear,
            mesh_dims(shard="dp"),
            ValueError,
            "'weight' is on no mesh: call distribute_module",
        ),
        (
            sharded,
            mesh_dims(shard="dp"),
            ValueError,
            r"'weight' is .*Shard.*has to be Replicate\(\) on",
        ),
    ]:
        before = anatomy(model)
        with pytest.raises(error, match=message):
            fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        assert anatomy(model) == before


@needs_a_job
def test_a_value_that_is_no_choice_for_reshard_after_forward_is_refused():
    with pytest.raises(ValueError, match=r"True, False, None or a divisor .*, 1; got 'never'"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="never")
    with pytest.raises(ValueError, match="must be a bool, got 'never'"):
        fully_shard(nn.Linear(2, 2)).set_reshard_after_forward("never")


@needs_a_job
@pytest.mark.parametrize(
    "name",
    [
        "set_is_last_backward",
        "set_manual_backward_finalization",
        "set_reduce_scatter_unused_params",
        "set_requires_all_reduce",
        "set_requires_gradient_on_all_ranks",
        "set_requires_gradient_sync",
        "set_reshard_after_backward",
    ],
)
def test_a_setting_that_is_no_bool_is_refused(name):
    with pytest.raises(ValueError, match="must be a bool, got 'last'"):
        getattr(fully_shard(nn.Linear(2, 2)), name)("last")


# ---- a sharded model


@needs_a_job
@pytest.mark.parametrize(
    ("copying", "message"),
    [
        (copy.deepcopy, "cannot be deep-copied: copy the model before fully_shard"),
        (pickle.dumps, "cannot be pickled: save its state_dict"),
        (lambda model: torch.save(model, io.BytesIO()), "cannot be pickled: save its state_dict"),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("enclosed", [False, True], ids=["itself", "in another module"])
def test_a_sharded_model_cannot_be_copied(copying, message, enclosed):
    model = fully_shard(nn.Linear(2, 2))

    with pytest.raises(Zero3Error, match=message):
        copying(nn.Sequential(model) if enclosed else model)


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
@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (None, TypeError, "mp_policy must be a .*MixedPrecisionPolicy, got None;"),
        (
            MixedPrecisionPolicy(param_dtype="bfloat16"),
            ValueError,
            "param_dtype of mp_policy is 'bfloat16'; it is None or one of .*torch.bfloat16",
        ),
        (
            MixedPrecisionPolicy(reduce_dtype=torch.int32),
            ValueError,
            "reduce_dtype of mp_policy is torch.int32; it is None or one of torch.float64",
        ),
    ],
    ids=["none", "string", "integer"],
)
def test_a_policy_that_cannot_be_kept_is_refused(policy, error, message):
    model = nn.Linear(2, 2)

    with pytest.raises(error, match=message):
        fully_shard(model, mp_policy=policy)

    assert type(model) is nn.Linear


@needs_a_job
def test_a_grad_dtype_that_holds_no_gradient_is_refused_by_name(x):
    late, early = fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)
    late.weight.grad_dtype = early.weight.grad_dtype = torch.int32

    with pytest.raises(Zero3Error, match=r"grad_dtype of 'weight' is torch\.int32; a gradient"):
        fully_shard(early)
    with pytest.raises(Zero3Error, match=r"grad_dtype of 'weight' is torch\.int32; a gradient"):
        late(x)

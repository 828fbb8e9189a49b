"""What ``fully_shard`` refuses, and what may not be done to a sharded model; it stays as it was."""

import copy
import io
import pickle

import pytest
import torch
from support.job import needs_a_job
from support.mesh_models import mesh_dims
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from deepcompile_zero3 import Zero3Error, fully_shard

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

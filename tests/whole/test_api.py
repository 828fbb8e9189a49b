"""The interface beside training: signatures, names, backends, imports and torch's releases."""

import gc
import inspect

import expecttest
import pytest
import torch
from support.command_line import in_new_process
from support.job import needs_a_job
from torch import nn
from torch.distributed.fsdp import FSDPModule, share_comm_ctx
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from deepcompile_zero3 import Zero3Error, Zero3Module, fully_shard

# ---- fully_shard


def test_fully_shard_has_the_signature_of_torchs_and_two_arguments_more():
    ours = dict(inspect.signature(fully_shard).parameters)
    assert ours.pop("transport").default == "auto"
    assert ours.pop("shard_optimizer_over_replicas").default is False
    if "dp_mesh_dims" not in inspect.signature(torch_fully_shard).parameters:
        del ours["dp_mesh_dims"]  # newer than this torch
    torchs = inspect.signature(torch_fully_shard).parameters

    def described(parameters):
        return [(p.name, p.kind, p.default) for p in parameters.values()]

    assert described(ours) == described(torchs)


class Tied(nn.Module):
    """Two layers with tied weights, a buffer and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


@needs_a_job
def test_a_sharded_model_keeps_its_names_and_their_order():
    model = Tied()
    names = [name for name, _ in model.named_parameters()]
    with_duplicates = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    keys = list(model.state_dict())

    fully_shard(model.head)
    fully_shard(model)

    assert [name for name, _ in model.named_parameters()] == names
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == with_duplicates
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embed.weight


@needs_a_job
def test_parameters_are_leaf_dtensors_sharded_by_rows_with_the_old_values():
    model = Tied()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    fully_shard(model)

    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.is_leaf
        assert parameter.requires_grad == (name != "frozen")
        assert torch.equal(parameter.full_tensor(), before[name])


@needs_a_job
def test_ignored_parameters_stay_as_they_are():
    model = Tied()
    ignored = model.embed.weight

    fully_shard(model, ignored_params={ignored})

    assert model.embed.weight is model.head.weight is ignored
    assert isinstance(model.head.bias, DTensor)
    model(torch.tensor([1, 2])).sum().backward()
    assert type(ignored.grad) is torch.Tensor


@needs_a_job
def test_a_sharded_module_is_of_a_subclass_of_its_class():
    model = nn.Sequential(nn.Linear(2, 3))

    sharded = fully_shard(model)

    assert sharded is model
    assert isinstance(model, nn.Sequential)
    assert isinstance(model, Zero3Module)
    assert type(model).__name__ == "FSDPSequential"
    assert isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "Zero3Linear"
    assert type(model[0]).__doc__ == nn.Linear.__doc__
    expecttest.assert_expected_inline(
        repr(model),
        """\
FSDPSequential(
  (0): Zero3Linear(in_features=2, out_features=3, bias=True)
)""",
    )


@needs_a_job
def test_a_module_given_to_fully_shard_is_an_fsdp_module():
    model = fully_shard(nn.Sequential(nn.Linear(2, 3)))

    assert isinstance(model, FSDPModule)
    assert not isinstance(model[0], FSDPModule)
    inherited = {
        name for name, method in vars(FSDPModule).items() if getattr(type(model), name) is method
    }
    assert {name for name in inherited if callable(getattr(FSDPModule, name))} == set()
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        torch_fully_shard(model)
    share_comm_ctx([model, model])
    with pytest.raises(NotImplementedError, match="_training_state of FSDP2's private state"):
        model._get_fsdp_state()._training_state  # noqa: B018


@needs_a_job
def test_a_schedule_cannot_end_the_micro_batches_of_a_deleted_module():
    model = fully_shard(nn.Sequential(nn.Linear(2, 3)))
    state = model._get_fsdp_state()
    del model
    gc.collect()

    with pytest.raises(Zero3Error, match="a sharded module that was deleted"):
        state._root_post_backward_final_callback()


@needs_a_job
def test_attributes_and_hooks_of_a_parameter_survive():
    model = nn.Linear(2, 3)
    model.weight.is_for_muon = True
    model.weight.grad = torch.full((3, 2), 0.5)

    fully_shard(model)

    assert model.weight.is_for_muon
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((3, 2), 0.5))


# ---- the backend


def test_the_backend_is_found_without_an_import():
    printed = in_new_process(
        """
        import sys
        import torch

        assert "zero3" in torch._dynamo.list_backends()
        assert "deepcompile_zero3" not in sys.modules
        model = torch.nn.Linear(2, 2)
        compiled = torch.compile(model, backend="zero3", options={"inductor": False})
        x = torch.ones(1, 2)
        assert torch.equal(compiled(x), model(x))
        print("deepcompile_zero3" in sys.modules)
        """
    )

    assert printed == "True\n"


# ---- any other backend


def replace_by_loading(model):
    model.load_state_dict({"weight": model.state_dict()["weight"] * 3}, assign=True)


def materialize(model):
    model.to_empty(device="cpu")
    nn.init.constant_(model.weight, 3)


@needs_a_job
def test_another_backend_may_be_the_first_to_run():
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)

    compiled = torch.compile(fully_shard(model), backend="aot_eager")
    out = compiled(torch.ones(1, 2))
    out.sum().backward()

    assert torch.equal(out, torch.tensor([[2.0, 2.0]]))
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 2))


@needs_a_job
@pytest.mark.parametrize("replace", [replace_by_loading, materialize])
@pytest.mark.parametrize("backend", ["zero3", "aot_eager"])
def test_every_backend_sees_a_shard_that_was_replaced(backend, replace):
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    compiled = torch.compile(fully_shard(model), backend=backend)
    x = torch.ones(1, 2)
    model(x)
    compiled(x)

    replace(model)

    assert torch.equal(compiled(x), torch.tensor([[6.0, 6.0]]))


# ---- other releases of torch


def test_heavy_modules_are_imported_at_first_use():
    printed = in_new_process(
        """
        import sys
        import torch

        before = set(sys.modules)
        import deepcompile_zero3

        def loaded():
            names = {name.partition(".")[0] for name in sys.modules.keys() - before}
            heavy = {"torch.distributed.tensor", "torch._dynamo", "torch._inductor"}
            return names & {"rich", "plotly", "transformers"} | heavy & sys.modules.keys()

        print(sorted(loaded()))
        from deepcompile_zero3 import fully_shard
        print(sorted(loaded()))
        assert callable(deepcompile_zero3.fully_shard) and callable(deepcompile_zero3.explain)
        names = {name for name in deepcompile_zero3.__all__ if hasattr(deepcompile_zero3, name)}
        print(names == set(deepcompile_zero3.__all__) <= set(dir(deepcompile_zero3)))
        """
    )

    assert printed.splitlines() == ["[]", "['torch.distributed.tensor']", "True"]


@pytest.mark.more
def test_training_needs_no_rich_and_the_tools_say_that_they_do():
    printed = in_new_process(
        """
        import sys

        sys.modules["rich"] = None
        import deepcompile_zero3
        from deepcompile_zero3 import Options, capture_graphs, fully_shard, zero3

        try:
            deepcompile_zero3.explain
        except ImportError as error:
            print(error)
        """
    )
    assert printed.endswith("which training does not need: pip install rich\n")


@pytest.mark.more
def test_an_untried_torch_warns_once():
    printed = in_new_process(
        """
        import warnings
        import torch

        torch.__version__ = "2.99.0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import deepcompile_zero3
            from deepcompile_zero3 import backend
        print([str(w.message) for w in caught if "deepcompile_zero3" in str(w.message)])
        """
    )

    assert printed.count("not with 2.99.0") == 1
    assert "was tried with torch 2.11" in printed


@pytest.mark.more
def test_a_tried_torch_does_not_warn():
    in_new_process(
        "import warnings; warnings.simplefilter('error', UserWarning); import deepcompile_zero3"
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(
            "torch._C._autograd", "_top_saved_tensors_default_hooks", marks=pytest.mark.more
        ),
        ("torch._inductor.compile_fx", "compile_fx"),
    ],
)
def test_a_missing_piece_of_torch_is_named(module, name):
    printed = in_new_process(
        f"""
        import {module} as module

        del module.{name}
        try:
            from deepcompile_zero3 import fully_shard, zero3
        except ImportError as error:
            print(error)
        """
    )

    assert f"needs {module}.{name}, which torch {torch.__version__} does not have" in printed
    assert "2.11" in printed

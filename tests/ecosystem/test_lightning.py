"""Lightning's Trainer and Fabric with ``ModelParallelStrategy``, on CPU ranks."""

import importlib.util
import os
import runpy

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    batch_of,
    compiled,
    join_as_torchrun,
    mean_square,
    mine,
    relative_difference,
)
from support.paths import EXAMPLES
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives

# Not by importorskip: at its import Lightning replaces torch.compile, for the whole process.
if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

EXAMPLE = EXAMPLES / "train_lightning.py"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


# ---- Trainer


def _fit(example, folder, epochs, batches, path=None):
    """Returns the module and the losses of the whole batches; saves each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    losses = []

    class Recorded(example["Regression"]):
        def training_step(self, batch, number):
            losses.append(super().training_step(batch, number))
            return losses[-1]

    module = Recorded(inductor=False)
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    settings = {"callbacks": [saves], "use_distributed_sampler": False, **QUIET}
    trainer = example["trainer"](epochs, **settings)
    parts = [(mine(x), mine(y)) for x, y in batches]
    trainer.fit(module, DataLoader(parts, batch_size=None), ckpt_path=path)
    losses = torch.stack(losses).detach()
    dist.all_reduce(losses)
    return module, losses / 2


def _expected(module, batches):
    """Returns one process's losses, and its model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)), nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for number, (x, y) in enumerate(batches):
        losses.append(nn.functional.mse_loss(model(x), y))
        (losses[-1] / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).detach(), model


def _whole(module):
    return {fqn: parameter.full_tensor() for fqn, parameter in module.named_parameters()}


def _train(folder):
    join_as_torchrun()
    example = runpy.run_path(str(EXAMPLE))
    rows = example["data"]()
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    batches = list(zip(x.split(16), y.split(16), strict=True))  # an epoch
    with capture_graphs() as graphs:
        module, losses = _fit(example, folder, 2, batches)
    assert len(graphs.forward) == len(graphs.backward) == 1
    expected, model = _expected(module, batches * 2)
    assert_close(losses, expected, rtol=1e-5, atol=0)
    for (fqn, ours), theirs in zip(_whole(module).items(), model.parameters(), strict=True):
        assert relative_difference(ours, theirs) < 1e-5, fqn

    path = os.path.join(folder, "epoch=0.ckpt")
    assert os.path.isdir(path)
    resumed, again = _fit(example, os.path.join(folder, "again"), 2, batches, path)
    assert torch.equal(again, losses[4:])
    assert_close(_whole(resumed), _whole(module), rtol=0, atol=0)


def test_the_example_trains_as_one_process_and_goes_on(run_apart, tmp_path):
    run_apart(_train, str(tmp_path))


# ---- Fabric


def _of_fabric(how, folder):
    join_as_torchrun()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model, mesh):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
        return compiled(model, how)

    def prepare():
        model = fabric.setup(Stack())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, fabric.setup_optimizers(optimizer)

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(0)
    model, optimizer = prepare()
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        batch, accumulates = batch_of(4, 8, seed=number), number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates), record_collectives() as log:
            fabric.backward(mean_square(model, mine(batch)))
        assert any(c.op == "reduce_scatter" for c in log) != accumulates
        mean_square(reference, batch).backward()
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_difference(ours.full_tensor(), theirs) < 1e-5

    fabric.save(path := os.path.join(folder, "shards"), {"model": model, "optimizer": optimizer})
    torch.manual_seed(9)
    again, loaded = prepare()
    fabric.load(path, {"model": again, "optimizer": loaded})
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        moments = [o.state[p]["momentum_buffer"] for o, p in ((optimizer, one), (loaded, other))]
        assert torch.equal(*(moment.to_local() for moment in moments))


@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_fabric_trains_saves_and_loads_a_sharded_model(run_apart, tmp_path, how):
    run_apart(_of_fabric, how, str(tmp_path))

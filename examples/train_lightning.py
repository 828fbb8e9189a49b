"""Trains with Lightning: torchrun --nproc-per-node 2 examples/train_lightning.py

The lines that differ from a script for FSDP2 are marked. Needs `pip install lightning`.
"""

import argparse
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from deepcompile_zero3 import fully_shard  # marked


class Regression(lightning.LightningModule):
    """Blocks of a feedforward network, sharded and compiled."""

    def __init__(self, width: int = 16, inductor: bool = True):
        super().__init__()
        self.width, self.inductor = width, inductor
        self.model: nn.Sequential | None = None

    def configure_model(self) -> None:
        """Builds, shards and compiles the model, once the mesh is there."""
        if self.model is not None:
            return  # Lightning calls this for each stage
        torch.manual_seed(0)  # the same weights on all ranks
        width = self.width
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)),
            nn.Linear(width, 1),
        )
        mesh = self.device_mesh["data_parallel"]
        for block in self.model[:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.compile(backend="zero3", options={"inductor": self.inductor})  # marked

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Returns the loss of a micro-batch."""
        assert self.model is not None
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns an optimizer of the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def trainer(epochs: int, **settings: Any) -> lightning.Trainer:
    """Returns a Trainer of two ranks on this CPU, whose checkpoints are folders of shards."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        **settings,
    )


def data(width: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns rows and targets."""
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(1))
    return list(zip(x, x.square().mean(1, keepdim=True), strict=True))


def main() -> None:
    """Trains two epochs, and goes on from the checkpoint for two more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-inductor", action="store_true", help="run the graphs op by op")
    inductor = not parser.parse_args().no_inductor
    path = None
    for epochs in (2, 4):
        run = trainer(epochs)
        run.fit(Regression(inductor=inductor), DataLoader(data(), batch_size=8), ckpt_path=path)
        path = run.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        print(f"epoch {epochs}: loss {run.callback_metrics['loss']:.4f}, checkpoint {path}")


if __name__ == "__main__":
    main()

"""Trains with the Trainer of transformers: torchrun --nproc-per-node 2 examples/trainer.py

Needs transformers 5 and accelerate. The lines that differ from a script for FSDP2 are marked.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

from deepcompile_zero3 import shard_in_transformers  # marked


def train(folder: str, steps: int, inductor: bool) -> Trainer:
    """Trains the model in ``folder`` for some steps, and saves it to ``folder/trained``."""
    shards = DistributedConfig(fsdp_size=dist.get_world_size())
    with shard_in_transformers():  # marked
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=shards)
    model.compile(backend="zero3", options={"inductor": inductor})  # marked

    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(256, (64, 32), generator=generator)
    arguments = TrainingArguments(
        os.path.join(folder, "trained"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return trainer


def main() -> None:
    """Builds a small model and trains it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-inductor", action="store_true", help="run the graphs op by op")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])
    if dist.get_rank() == 0:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    train(folder, options.steps, inductor=not options.no_inductor)
    if dist.get_rank() == 0:
        print(f"trained model: {folder}/trained")
    dist.barrier()  # so that gloo's threads hold nothing of Python's when it ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

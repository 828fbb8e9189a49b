"""The model that the command line plans: a config of transformers, or a model of the user's."""

import argparse
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph_inputs import parse_options
from deepcompile_zero3.tools.arguments import load, positive
from deepcompile_zero3.tools.planning.graphs import ShardModel, check_ranks, shard_blocks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-built": None}
_RESHARD = {"auto": None, "always": True, "never": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe the model, its ranks and the options of the backend."""
    add = parser.add_argument
    add(
        "model",
        help="config.json of transformers, built in fp32, or FILE.py:FUNCTION, which gives a model "
        "that is not sharded yet, a dict of the arguments of its call on one rank, and perhaps a "
        "function that shards it: shard(model, mesh)",
    )
    add("--ranks", type=positive, required=True, metavar="N", help="of all replicas together")
    add("--replicas", type=positive, default=1, metavar="N", help="copies of the model (HSDP)")
    over = "of each shard, replicas have a part to step (fully_shard's argument of this name)"
    add("--shard-optimizer-over-replicas", action="store_true", help=over)
    add("--batch", type=positive, help="of a config: sequences a rank (default: 1)")
    add("--sequence", type=positive, help="of a config: tokens of each (default: 4096)")
    add("--checkpoint", action="store_true", help="of a config: checkpoints each block")
    add("--param-dtype", choices=_DTYPES, help="computed with (default: bf16)")
    add("--reduce-dtype", choices=_DTYPES, help="on the wire (default: bf16)")
    add("--reshard", choices=_RESHARD, help="after forward (default: auto)")
    spread = "shards parameters of fewer rows than ranks over their largest dimension"
    add("--spread", action="store_true", help=spread)
    add("--keep-mb", type=float, help="the option keep_mb of the backend")
    add("--gather-bucket-mb", type=float, help="the option gather_bucket_mb of the backend")


def check(asked: argparse.Namespace) -> None:
    """Raises ValueError if numbers of ranks or options of the backend are wrong."""
    check_ranks(asked.ranks, asked.replicas)
    parse_options(_options_of(asked))


def _options_of(asked: argparse.Namespace) -> dict[str, float]:
    names = ("keep_mb", "activations_mb", "gather_bucket_mb")
    options = {name: vars(asked).get(name) for name in names}  # compile has no activations_mb
    return {name: value for name, value in options.items() if value is not None}


def job_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of :func:`plan` and :func:`compile_ahead`, without the machine."""
    build, call, shard = _model_of(asked)
    return {
        "build": build,
        "call": call,
        "world_size": asked.ranks,
        "replicas": asked.replicas,
        "shard": shard,
        "options": _options_of(asked),
    }


def _shard(asked: argparse.Namespace, model: nn.Module, mesh: DeviceMesh) -> None:
    param_dtype = _DTYPES[asked.param_dtype or "bf16"]
    reduce_dtype = _DTYPES[asked.reduce_dtype or "bf16"]
    shard_blocks(
        model,
        mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype),
        reshard_after_forward=_RESHARD[asked.reshard or "auto"],
        shard_placement_fn=functools.partial(_widest, mesh.size(-1)) if asked.spread else None,
        shard_optimizer_over_replicas=asked.shard_optimizer_over_replicas,
    )


def _widest(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Returns the largest dimension of a parameter that has fewer rows than there are ranks."""
    if parameter.dim() == 0 or parameter.shape[0] >= ranks:
        return None
    return Shard(max(range(parameter.dim()), key=parameter.shape.__getitem__))


def _model_of(
    asked: argparse.Namespace,
) -> tuple[Callable[[], nn.Module], dict[str, Any], ShardModel]:
    """Returns a function that builds the model, the arguments of its call, and one that shards."""
    shard: ShardModel = functools.partial(_shard, asked)
    if asked.model.endswith(".json"):
        tokens = torch.zeros(asked.batch or 1, asked.sequence or 4096, dtype=torch.int64)
        call = {"input_ids": tokens, "labels": tokens}
        return functools.partial(_from_config, asked), call, shard
    if asked.batch or asked.sequence or asked.checkpoint:
        raise Zero3Error(
            "--batch, --sequence and --checkpoint are of a config; a function of one's own says "
            "all of that itself"
        )
    path, _, name = asked.model.rpartition(":")
    what = "the model is a config.json of transformers, or FILE.py:FUNCTION as in job.py:build"
    function = load(path, name, f"{what}; nothing is downloaded")
    if not callable(function):
        raise Zero3Error(f"'{name}' of {path} is no function")
    _check_call(f"{asked.model} is called without arguments", function)
    try:
        with torch.device("meta"):
            job = function()
    except Zero3Error as error:
        raise Zero3Error(
            f"{asked.model}: {error}. It gives a model that is not sharded yet, and third what "
            "shards it, if not this command: a function shard(model, mesh)"
        ) from error
    match job:
        case (nn.Module() as model, dict() as call):
            pass
        case (nn.Module() as model, dict() as call, shard) if callable(shard):
            _check_sharding(asked, model, shard)
        case _:
            parts = job if isinstance(job, tuple) else (job,)
            names = ", ".join(type(part).__name__ for part in parts)
            raise Zero3Error(
                f"{asked.model} has to give a module, a dict and perhaps a function that shards, "
                f"and gave {names}"
            )
    _check_call(f"the dict of {asked.model} is the model's arguments", model.forward, **call)
    on_cpu = functools.partial(torch.zeros_like, device="cpu")
    call = torch_internals.tree_map_only(torch.Tensor, on_cpu, call)
    return lambda: model, call, shard


def _check_sharding(asked: argparse.Namespace, model: nn.Module, shard: ShardModel) -> None:
    options = ("param_dtype", "reduce_dtype", "reshard", "spread", "shard_optimizer_over_replicas")
    given = ["--" + name.replace("_", "-") for name in options if getattr(asked, name)]
    if given:
        raise Zero3Error(f"{', '.join(given)}: {asked.model} says itself how its model is sharded")
    _check_call(
        f"the function that {asked.model} gives is called with model, mesh", shard, model, None
    )


def _from_config(asked: argparse.Namespace) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("a config needs transformers: pip install transformers") from error
    try:
        values = json.loads(Path(asked.model).read_text())
    except json.JSONDecodeError as error:
        raise Zero3Error(f"{asked.model} is not JSON: {error}") from error
    if "model_type" not in values:
        raise Zero3Error(f"{asked.model} has no 'model_type': it is not a config of transformers")
    try:
        config = AutoConfig.for_model(**values | {"use_cache": False})
    except ValueError as error:
        kind = values["model_type"]
        raise Zero3Error(f"{asked.model}: transformers has no model_type {kind!r}") from error
    except Exception as error:
        raise Zero3Error(f"{asked.model}: transformers refuses it: {error}") from error
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if asked.checkpoint:
        old = "gradient_checkpointing_enable"  # the name in older transformers
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old)
        enable({"use_reentrant": False})
    return model


def _check_call(what: str, function: Callable, /, *args: Any, **kwargs: Any) -> None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise Zero3Error(f"{what}: {error}") from error

"""The model that the command line plans: a config of transformers, or a model of the user's."""

import argparse
import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.tools.planning.ahead import CompiledAhead, compile_ahead
from deepcompile_zero3.tools.planning.machine import MACHINES, Machine, machine_of
from deepcompile_zero3.tools.planning.plan import ShardModel, plan, shard_blocks
from deepcompile_zero3.tools.planning.predicted import Plan

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-built": None}
_RESHARD = {"auto": None, "always": True, "never": False}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe the model, its ranks and the options of the backend."""
    parser.add_argument(
        "model",
        help="config.json of transformers, built in fp32, or FILE.py:FUNCTION, which gives a model "
        "that is not sharded yet, a dict of the arguments of its call on one rank, and perhaps a "
        "function that shards it: shard(model, mesh)",
    )
    add = parser.add_argument
    add("--ranks", type=_positive, required=True, metavar="N", help="of all replicas together")
    add("--replicas", type=_positive, default=1, metavar="N", help="copies of the model (HSDP)")
    add("--batch", type=_positive, help="of a config: sequences a rank (default: 1)")
    add("--sequence", type=_positive, help="of a config: tokens of each (default: 4096)")
    add("--checkpoint", action="store_true", help="of a config: checkpoints each block")
    add("--param-dtype", choices=_DTYPES, help="computed with (default: bf16)")
    add("--reduce-dtype", choices=_DTYPES, help="on the wire (default: bf16)")
    add("--reshard", choices=_RESHARD, help="after forward (default: auto)")
    add(
        "--spread",
        action="store_true",
        help="shards parameters of fewer rows than ranks over their largest dimension",
    )
    add("--keep-mb", type=float, help="the option keep_mb of the backend")
    add("--gather-bucket-mb", type=float, help="the option gather_bucket_mb of the backend")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe the machine and what a step does beside the model."""
    add = parser.add_argument
    add("--machine", default="h100", choices=MACHINES, help="(default: h100)")
    add_numbers(parser)
    add(
        "--optimizer-bytes",
        type=int,
        default=8,
        help="state of each element (default: 8, AdamW in fp32)",
    )
    add("--no-prefetch", action="store_true", help="gathers start when they are waited for")


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Adds ``--set``, for ``Machine.with_numbers(**dict(arguments.set))``."""
    parser.add_argument(
        "--set",
        type=_number,
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="of the machine: flops, bandwidth, remote_bandwidth, ranks_per_host...",
    )


def plan_of(
    arguments: argparse.Namespace,
    tell: Callable[[str], object],
    *,
    advise: bool = True,
    **changes: Any,
) -> Plan:
    """Returns the plan of the arguments, updated by ``changes``; :func:`plan` gets ``tell``."""
    asked = argparse.Namespace(**vars(arguments) | changes)
    build, call, shard = _job(asked)
    return plan(
        build,
        call,
        world_size=asked.ranks,
        replicas=asked.replicas,
        machine=_machine(asked),
        shard=shard,
        options=_options(asked),
        optimizer_bytes=asked.optimizer_bytes,
        prefetch=not asked.no_prefetch,
        advise=advise,
        tell=tell,
    )


def compiled(asked: argparse.Namespace) -> CompiledAhead:
    """Compiles the graphs of the arguments ahead of time."""
    build, call, shard = _job(asked)
    return compile_ahead(
        build,
        call,
        world_size=asked.ranks,
        replicas=asked.replicas,
        shard=shard,
        options=_options(asked),
    )


def _options(asked: argparse.Namespace) -> dict[str, float]:
    names = ("keep_mb", "gather_bucket_mb")
    return {name: value for name in names if (value := getattr(asked, name)) is not None}


def _machine(asked: argparse.Namespace) -> Machine:
    return machine_of(asked.machine).with_numbers(**dict(asked.set))


def _shard(asked: argparse.Namespace, model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES[asked.param_dtype or "bf16"],
        reduce_dtype=_DTYPES[asked.reduce_dtype or "bf16"],
    )
    reshard = _RESHARD[asked.reshard or "auto"]
    shard_blocks(
        model,
        mesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=functools.partial(_widest, mesh.size(-1)) if asked.spread else None,
    )


def _widest(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Returns the largest dimension of a parameter that has fewer rows than there are ranks."""
    if parameter.dim() == 0 or parameter.shape[0] >= ranks:
        return None
    return Shard(max(range(parameter.dim()), key=parameter.shape.__getitem__))


def _job(
    asked: argparse.Namespace,
) -> tuple[Callable[[], nn.Module], dict[str, Any], ShardModel]:
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
    function = _function(path, name)
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
    call = tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device="cpu"), call)
    return lambda: model, call, shard


def _check_sharding(asked: argparse.Namespace, model: nn.Module, shard: ShardModel) -> None:
    options = ("param_dtype", "reduce_dtype", "reshard", "spread")
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
        raise Zero3Error(f"{asked.model} is no JSON: {error}") from error
    if "model_type" not in values:
        raise Zero3Error(f"{asked.model} has no 'model_type': it is no config of transformers")
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


def _function(path: str, name: str) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if not path or spec is None or spec.loader is None:
        raise Zero3Error(
            "the model is a config.json of transformers, or FILE.py:FUNCTION as in job.py:build; "
            "nothing is downloaded"
        )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as in `python FILE.py`
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise Zero3Error(f"{path} has no function '{name}'")
    return getattr(module, name)


def _check_call(what: str, function: Callable, /, *args: Any, **kwargs: Any) -> None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise Zero3Error(f"{what}: {error}") from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a positive number, got {text!r}")
    return int(text)


def _number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        message = f"NAME=NUMBER without a unit, as in memory=80e9; got {text!r}"
        raise argparse.ArgumentTypeError(message) from None

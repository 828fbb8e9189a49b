"""The library changes nothing process-wide: after training, torch is as before the import.

As a program, this file compares both and prints the differences.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import torch
import torch._inductor.decomposition
import torch._inductor.lowering
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.modules import module as nn_module

CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)


@pytest.mark.inductor
def test_torch_is_the_same_after_training_as_before_the_import():
    # Without caches, so that torch alone has run its whole compiler and filled its tables.
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1:] == ["nothing differs"], run.stdout


def main():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        train_with_torch_alone()  # first use imports and registers a lot
        modules = torch_modules()
        before = snapshot(modules)
        train_sharded()
        after = snapshot(modules)
        dist.destroy_process_group()

    torch_alone = {name for name in before.keys() | after.keys() if "zero3" not in name}
    different = sorted(
        f"{name}: {before.get(name, MISSING)!r} -> {after.get(name, MISSING)!r}"
        for name in torch_alone
        if not same(before.get(name, MISSING), after.get(name, MISSING))
    )
    print(f"compared {len(torch_alone)} functions and values")
    print("\n".join(different) or "nothing differs")


MISSING = "nothing"
DESCRIPTORS = (property, staticmethod, classmethod)


def same(before, after):
    if before is after:
        return True
    return not callable(before) and type(before) is type(after) and before == after


# ---- training


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))


def train(model, *runs):
    optimizer = torch.optim.AdamW(model.parameters())
    for run in runs:
        for _ in range(2):
            run(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch._dynamo.reset()


def train_with_torch_alone():
    plain = model()
    train(plain, torch.compile(plain), torch.compile(plain, backend="aot_eager"))
    sharded = torch_fully_shard(model())
    train(sharded, sharded)


def train_sharded():
    from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives

    sharded = model()
    fully_shard(sharded[0])
    fully_shard(sharded)
    interpreted = torch.compile(sharded, backend="zero3", options={"inductor": False})
    with capture_graphs(), record_collectives():
        train(sharded, sharded, torch.compile(sharded, backend="zero3"), interpreted)
    sharded.unshard()
    sharded.reshard()


# ---- comparison


def snapshot(modules):
    """Returns a dict from names to the objects that the process shares."""
    return {**attributes(modules), **configs(), **state(), **tables()}


def torch_modules():
    """Returns torch's modules, except modules that create attributes on first access."""
    made_on_demand = ("torch.ops", "torch._ops.", "torch.classes")
    return {
        name: module
        for name, module in sys.modules.items()
        if name.split(".")[0] in ("torch", "functorch") and not name.startswith(made_on_demand)
    }


def attributes(modules):
    """Returns functions and classes of ``modules``, and methods of the classes, by name."""
    found = {}
    for module_name, module in modules.items():
        for name, value in list(vars(module).items()):
            if not callable(value) or name.startswith("__compiled_fn_"):
                continue  # Dynamo stores compiled code under such names
            found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module_name:
                for method_name, method in list(vars(value).items()):
                    if callable(method) or isinstance(method, DESCRIPTORS):
                        found[f"{module_name}.{name}.{method_name}"] = method
    return found


def configs():
    return {
        f"{config}.{name}": value
        for config in CONFIGS
        for name, value in sys.modules[config].get_config_copy().items()
    }


def state():
    state = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "saved-tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "sys.meta_path": list(sys.meta_path),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
    }
    for name, hooks in vars(nn_module).items():
        if name.startswith("_global_") and name.endswith("hooks"):
            state[name] = list(hooks)
    return state | {f"environment: {name}": value for name, value in os.environ.items()}


def tables():
    """Returns the entries of torch's tables of operators, types and backends."""
    by_key = {
        "decomposition": torch._decomp.decomposition_table,
        "meta": torch._decomp.meta_table,
        "Inductor decomposition": torch._inductor.decomposition.decompositions,
        "Inductor lowering": torch._inductor.lowering.lowerings,
        "pytree node": torch.utils._pytree.SUPPORTED_NODES,
        "backend": torch._dynamo.backends.registry._BACKENDS,
    }
    found = {
        f"{table}: {key}": value
        for table, entries in by_key.items()
        for key, value in entries.items()
    }
    sets = {
        "operator": torch._C._dispatch_get_all_op_names(),
        "side effect": torch.fx.node._side_effectful_functions,
    }
    found.update({f"{name}: {entry}": True for name, entries in sets.items() for entry in entries})
    return found


if __name__ == "__main__":
    main()

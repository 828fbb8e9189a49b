"""Collectives on CPUs, as NCCL has them on GPUs: a backend of c10d, see like_nccl.cpp."""

import importlib.util
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

_SOURCE = Path(__file__).parent / "like_nccl.cpp"
LIBRARY = "ZERO3_TESTS_COLLECTIVES"


def build():
    """Compiles the backend and returns the path of its library."""
    folder = _SOURCE.parent.parent / "build" / f"like-nccl-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"extra_cflags": ["-O0", "-g0"], "build_directory": str(folder)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where ninja is
    with mock.patch.dict(os.environ, PATH=path):
        load("like_nccl", [str(_SOURCE)], is_python_module=False, **settings)
    return str(folder / "like_nccl.so")


def backend_of_ranks():
    """Returns the name of the backend that ranks are told to use."""
    library = os.environ.get(LIBRARY)
    return backend(library) if library else "gloo"


def backend(library):
    """Returns the name of the backend, registered with c10d in this process."""
    if "like_nccl" not in dist.Backend.backend_list:
        spec = importlib.util.spec_from_file_location("like_nccl", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def create(store, rank, size, timeout):
            return module.LikeNccl(dist.ProcessGroupGloo(store, rank, size, timeout))

        dist.Backend.register_backend("like_nccl", create, devices=["cpu"])
    return "like_nccl"

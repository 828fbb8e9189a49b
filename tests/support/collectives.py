"""Collectives on CPUs, as NCCL has them on GPUs: a backend of c10d, see like_nccl.cpp."""

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from support.paths import ROOT
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE = Path(__file__).parent / "like_nccl.cpp"
LIBRARY = "ZERO3_TESTS_COLLECTIVES"


def build():
    """Compiles the backend if need be, and returns the path of its library."""
    library = ROOT / "build" / f"like-nccl-torch-{torch.__version__}.so"
    if not library.exists() or library.stat().st_mtime < _SOURCE.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        includes = [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]]
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=like_nccl"]
        libraries = [f"-L{path}" for path in library_paths()]
        libraries += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
        command = ["g++", *flags, *includes, _SOURCE, "-o", new, *libraries]
        subprocess.run(command, check=True, timeout=300)
        new.replace(library)
    return str(library)


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

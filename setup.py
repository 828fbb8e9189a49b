"""Builds the C++ runtime, ``deepcompile_zero3._C``, against the installed torch."""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))

with_cuda = torch.version.cuda is not None and CUDA_HOME is not None
if os.environ.get("ZERO3_CUDA"):
    with_cuda = os.environ["ZERO3_CUDA"] == "1"
extension = CUDAExtension if with_cuda else CppExtension

setup(
    ext_modules=[
        extension(
            "deepcompile_zero3._C",
            SOURCES,
            extra_compile_args=[
                "-O3",
                "-std=c++20",
                "-Wall",
                "-Wextra",
                "-Wno-unused-parameter",
                "-fvisibility=hidden",
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)

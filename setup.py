"""Builds the C++ runtime, ``deepcompile_zero3._C``, against the installed torch."""

import hashlib
import os
from pathlib import Path

from setuptools import setup

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit("the C++ runtime is built against torch: install torch first") from None
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent


def sources(*suffixes: str) -> list[str]:
    """Returns the files of csrc with one of these suffixes."""
    paths = (ROOT / "csrc").rglob("*")
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in suffixes)


def has_cuda() -> bool:
    """Whether torch was built for CUDA and a toolkit to link against is at hand.

    ``ZERO3_CUDA=0`` or ``1`` decides otherwise.
    """
    if "ZERO3_CUDA" in os.environ:
        return os.environ["ZERO3_CUDA"] == "1"
    if torch.version.cuda is None or CUDA_HOME is None:
        return False
    return any((Path(CUDA_HOME) / folder / "libcudart.so").exists() for folder in ("lib64", "lib"))


def sanitizer_flags() -> list[str]:
    """Returns flags of compiler and linker for the sanitizers that ``ZERO3_SANITIZE`` names.

    An example is ``address,undefined``. The vptr check needs the type information of torch's
    classes, not all of which torch exports.
    """
    sanitizers = os.environ.get("ZERO3_SANITIZE")
    if not sanitizers:
        return []
    return [
        f"-fsanitize={sanitizers}",
        "-fno-sanitize=vptr",
        "-fno-omit-frame-pointer",
        "-O1",
        "-g",
    ]


class Build(BuildExtension):
    """Keeps its objects in ``build/``, so that a change compiles again only what it touches.

    An editable install would build in a folder that it removes. Each release of torch and set of
    flags has objects of its own.
    """

    def finalize_options(self) -> None:
        """Names that folder."""
        super().finalize_options()
        key = f"{CXX_FLAGS} {NVCC_FLAGS if has_cuda() else None}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-{digest}")


CXX_FLAGS = [
    "-iquote",
    str(ROOT / "csrc"),
    "-O3",
    "-g0",  # Python's own flags ask for debug information, which takes half of a build
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    *sanitizer_flags(),
]
NVCC_FLAGS = [
    f"-Xcompiler=-iquote{ROOT / 'csrc'}",
    "-O3",
    "-std=c++20",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
]
if os.environ.get("ZERO3_WERROR") == "1":
    CXX_FLAGS.append("-Werror")
    NVCC_FLAGS += ["--Werror=all-warnings"]

if has_cuda():
    extension = CUDAExtension(
        "deepcompile_zero3._C",
        sources(".cpp", ".cu"),
        define_macros=[("ZERO3_WITH_CUDA", None)],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
        extra_link_args=sanitizer_flags(),
    )
else:
    extension = CppExtension(
        "deepcompile_zero3._C",
        sources(".cpp"),
        extra_compile_args=CXX_FLAGS,
        extra_link_args=sanitizer_flags(),
    )

setup(ext_modules=[extension], cmdclass={"build_ext": Build})

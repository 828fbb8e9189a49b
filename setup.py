"""Builds the C++ runtime, ``deepcompile_zero3._C``, against the installed torch.

For a wheel, ``make wheel`` names releases of torch, and the runtime is built against each of them.
"""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, setup

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit("the C++ runtime is built against torch: install torch first") from None
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent


def sources(suffix: str) -> list[str]:
    """Returns the files of csrc with this suffix."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(f"*{suffix}"))


def units() -> list[str]:
    """Writes a file for each folder of csrc, which includes the folder's sources, and returns them.

    Torch's headers take more of a compiler's time than a source: so they are read once a folder.
    With ``ZERO3_UNITS=0`` each source is compiled by itself, and has to include what it uses.
    """
    if os.environ.get("ZERO3_UNITS") == "0":
        return sources(".cpp")
    texts: dict[Path, str] = {}
    for source in map(Path, sources(".cpp")):
        unit = Path("build", "units", f"{source.parent}.cpp")
        line = f'#include "{source.relative_to("csrc")}"\n'
        texts[unit] = texts.get(unit, "") + line
    for unit, text in texts.items():
        file = ROOT / unit
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:  # else ninja would compile it again
            file.write_text(text)
    return [str(unit) for unit in texts]


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


def runtime_name(version: str) -> str:
    """Returns the name of the runtime for a version of torch, in a wheel that has several."""
    major, minor = version.split(".")[:2]
    return f"deepcompile_zero3.runtime.for_torch_{major}_{minor}._C"


def runtime_for(folder: Path) -> Extension:
    """Returns the runtime for the torch whose headers and libraries are in a folder.

    The folder has the name of that version. Its torch is not imported, which would take libraries
    of CUDA. ``deepcompile_zero3.runtime.load`` chooses among such runtimes.
    """
    include = folder / "torch" / "include"
    return Extension(
        runtime_name(folder.name),
        units(),
        include_dirs=[str(include), str(include / "torch" / "csrc" / "api" / "include")],
        library_dirs=[str(folder / "torch" / "lib")],
        libraries=["c10", "torch_cpu", "torch_python"],
        extra_compile_args=[*CXX_FLAGS, f"-ffile-prefix-map={ROOT}/="],  # errors name csrc/...
        language="c++",
    )


class Build(BuildExtension):
    """Keeps its objects in ``build/``, so that a change compiles again only what it touches.

    An editable install would build in a folder that it removes. Each release of torch and set of
    flags has objects of its own.
    """

    def build_extension(self, extension: Extension) -> None:
        """Names that folder."""
        key = f"{CXX_FLAGS} {NVCC_FLAGS if has_cuda() else None}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        built_for = BUILT_FOR.get(extension.name, torch.__version__)
        self.build_temp = str(ROOT / "build" / f"torch-{built_for}-{digest}")
        super().build_extension(extension)


RUNTIME = "deepcompile_zero3._C"
TORCHES = [Path(folder).absolute() for folder in os.environ.get("ZERO3_TORCHES", "").split()]
BUILT_FOR = {runtime_name(folder.name): folder.name for folder in TORCHES}
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

if TORCHES:
    extensions = [runtime_for(folder) for folder in TORCHES]
elif has_cuda():
    if not torch.cuda.is_available():  # torch looks at the GPUs of this machine, and needs one
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    extensions = [
        CUDAExtension(
            RUNTIME,
            [*sources(".cu"), *units()],  # first what takes longest
            define_macros=[("ZERO3_WITH_CUDA", None)],
            extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
            extra_link_args=sanitizer_flags(),
        )
    ]
else:
    extensions = [
        CppExtension(
            RUNTIME,
            units(),
            extra_compile_args=CXX_FLAGS,
            extra_link_args=sanitizer_flags(),
        )
    ]

setup(ext_modules=extensions, cmdclass={"build_ext": Build})

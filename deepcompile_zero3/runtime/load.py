"""Loads ``_C``, the C++ runtime, which defines the operators of ``zero3``.

A build from source has one runtime, in the folder of the package, which is built for the installed
torch. A wheel has one for each release of torch, in the folders ``for_torch_*`` beside this file.
"""

from pathlib import Path

import torch

import deepcompile_zero3
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.guides import Guide
from deepcompile_zero3.torch_release import RELEASE


def folders_of_runtime(folder: Path, release: tuple[int, int]) -> list[str]:
    """Returns where a wheel has the runtime for a release of torch: nowhere, if built from source.

    Patch versions of a release share a runtime.

    Raises:
        ImportError: the wheel has runtimes for other releases only.
    """
    built = {tuple(map(int, path.name.split("_")[2:])): path for path in folder.glob("for_torch_*")}
    if not built:
        return []
    if release not in built:
        releases = ", ".join(f"{major}.{minor}" for major, minor in sorted(built))
        raise ImportError(
            f"this wheel of deepcompile_zero3 has C++ runtimes for torch {releases}, not for torch "
            f"{torch.__version__}: install one of these, or build the library from source against "
            f"this torch. See {Guide.FROM_SOURCE}"
        )
    return [str(built[release])]


_folders = folders_of_runtime(Path(__file__).parent, RELEASE)
deepcompile_zero3.__path__.extend(_folders)
try:
    from deepcompile_zero3 import _C
except ImportError as error:
    if _folders:
        raise ImportError(
            f"the C++ runtime of this wheel, in {_folders[0]}, does not load with torch "
            f"{torch.__version__}: build the library from source against this torch. See "
            f"{Guide.FROM_SOURCE}"
        ) from error
    raise ImportError(
        "the C++ runtime deepcompile_zero3._C is not built for this Python and torch "
        f"({torch.__version__}), in {__file__.rsplit('/', 2)[0]}; build it there with: pip install "
        "--no-build-isolation -e . (or, if it is installed elsewhere, run outside of this folder). "
        f"See {Guide.INSTALLATION}"
    ) from error

_C.set_error(Zero3Error)

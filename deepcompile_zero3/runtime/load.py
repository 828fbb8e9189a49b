"""Loads ``_C``, the C++ runtime, which defines the operators of ``zero3``."""

import torch

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.guides import Guide

try:
    from deepcompile_zero3 import _C
except ImportError as error:
    raise ImportError(
        "the C++ runtime deepcompile_zero3._C is not built for this Python and torch "
        f"({torch.__version__}), in {__file__.rsplit('/', 2)[0]}; build it there with: pip install "
        "--no-build-isolation -e . (or, if it is installed elsewhere, run outside of this folder). "
        f"See {Guide.INSTALLATION}"
    ) from error

_C.set_error(Zero3Error)

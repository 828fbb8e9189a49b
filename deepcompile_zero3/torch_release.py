"""The releases of torch that were tried, and the lookup of private names in torch.

An untried release of torch warns once. The lookup of a missing private name raises with that name,
so that a new torch fails at the lookup and not in the middle of a training step.
"""

import importlib
import operator
import warnings
from typing import Any

import torch

from deepcompile_zero3.guides import Guide

TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def _release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


RELEASE = _release()

if ".".join(map(str, RELEASE)) not in TRIED:
    warnings.warn(
        f"deepcompile_zero3 was tried with torch {', '.join(TRIED)}, not with {torch.__version__}",
        stacklevel=2,
    )


def private(module: str, name: str) -> Any:
    """Returns ``module.name`` of torch.

    Raises:
        ImportError: this release of torch has no such name.
    """
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"deepcompile_zero3 needs {module}.{name}, which torch {torch.__version__} does not "
            f"have. Install one of the releases it was tried with: {', '.join(TRIED)}. See "
            f"{Guide.INSTALLATION}"
        ) from error

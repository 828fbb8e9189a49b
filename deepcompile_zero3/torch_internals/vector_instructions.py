"""What this machine's vector instructions are, which Inductor finds out by compiling files."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from deepcompile_zero3.torch_internals import compiler
from deepcompile_zero3.torch_release import private

_is_avx2_supported: Any = private("torch.cpu", "_is_avx2_supported")
_is_avx512_supported: Any = private("torch.cpu", "_is_avx512_supported")


def known_vector_instructions(config: Mapping[str, Any]) -> dict[str, bool]:
    """Returns Inductor's settings that spare a check of vector instructions, empty if it is needed.

    For each set of instructions that the processor has, Inductor compiles a file with torch's
    headers, to see whether torch's library has the functions for them (``docs/compilation.md`` has
    the seconds that this takes). The library has them if it uses the widest set itself. A compiler
    that is new enough for these headers knows the instructions; for those of some processors only,
    Inductor still compiles a few lines each.

    Args:
        config: changes to Inductor's settings.
    """
    name = "cpp.vec_isa_ok"
    is_set = name in config or compiler.setting(config, name) is not None
    if sys.platform != "linux" or is_set:
        return {}
    widest = "AVX512" if _is_avx512_supported() else "AVX2" if _is_avx2_supported() else None
    return {name: True} if torch.backends.cpu.get_cpu_capability() == widest else {}

"""Inductor does not check vector instructions where it is known what the check would find."""

import os
import subprocess
import sys

import pytest
import torch

from deepcompile_zero3.torch_internals.vector_instructions import known_vector_instructions

KNOWN = """
from deepcompile_zero3.torch_internals.vector_instructions import known_vector_instructions
print(known_vector_instructions({}))
"""
CHOSEN = """
from torch._inductor import config, cpu_vec_isa
print(config.cpp.vec_isa_ok, cpu_vec_isa.pick_vec_isa())
"""

torch_uses_the_widest = pytest.mark.skipif(
    not known_vector_instructions({}), reason="torch does not use the widest instructions here"
)


def printed(code, **environment):
    """Returns the words that ``code`` prints in a new process."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split(maxsplit=1)


@torch_uses_the_widest
def test_a_setting_of_the_users_is_kept(monkeypatch):
    assert known_vector_instructions({"cpp.vec_isa_ok": False}) == {}
    assert known_vector_instructions({"cpp.vec_isa_ok": None}) == {}  # asks for the check
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    assert known_vector_instructions({}) == {}


@pytest.mark.more
@torch_uses_the_widest
def test_nothing_is_known_where_torch_uses_less_than_the_processor_has():
    assert printed(KNOWN, ATEN_CPU_CAPABILITY="default") == ["{}"]


@torch_uses_the_widest
@pytest.mark.long
def test_the_check_finds_the_same():
    _, found = printed(CHOSEN, TORCHINDUCTOR_VEC_ISA_OK="")
    assert printed(CHOSEN, TORCHINDUCTOR_VEC_ISA_OK="1") == ["True", found]

"""The mark of tests whose ranks share memory."""

import os

import pytest

needs_shared_memory = pytest.mark.skipif(
    os.environ.get("ZERO3_TRANSPORT") == "c10d", reason="ranks are told to exchange messages"
)

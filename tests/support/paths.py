"""Folders of this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CSRC = ROOT / "csrc"

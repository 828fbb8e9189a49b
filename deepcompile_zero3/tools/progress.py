"""Says on standard error what a command does now: standard output is for what it finds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console

Tell: TypeAlias = Callable[[str], object]


def say_nothing(stage: str) -> None:
    """Does nothing, for callers who want no progress."""


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """Yields a function that is called with the name of each stage as it begins.

    A terminal shows the present stage until the block ends. Elsewhere, each is a line with the
    seconds since the first one.
    """
    console = Console(stderr=True, emoji=False)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda stage: status.update(stage)
        return
    start = time.monotonic()

    def tell(stage: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {stage}", file=sys.stderr, flush=True)

    yield tell

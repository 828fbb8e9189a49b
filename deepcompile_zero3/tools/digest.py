"""``python -m deepcompile_zero3 digest``: finds the first difference between two runs."""

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.digests.digest_log import Run, read_log
from deepcompile_zero3.features.digests.training_digest import TrainingDigest

ALIKE, DIFFERENT, BAD_INPUT = 0, 1, 2  # exit statuses

# The kinds of values, causes first: a gradient that differs changes the states and the shard.
_KINDS = ("gradients", "states", "shards")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("run_a", metavar="RUN_A", help="a file that DigestLog wrote")
    parser.add_argument("run_b", metavar="RUN_B", help="another one")


def main(arguments: argparse.Namespace) -> int:
    """Prints the first difference between two runs, and returns whether there is one."""
    try:
        a, b = read_log(arguments.run_a), read_log(arguments.run_b)
        steps = _common_steps(a, b)
    except (Zero3Error, OSError) as error:
        print(f"python -m deepcompile_zero3: {error}", file=sys.stderr)
        return BAD_INPUT
    for line in _notes(a, b):
        print(line)
    for step in steps:
        if a.digests[step] != b.digests[step]:
            print("\n".join(_described(step, a.digests[step], b.digests[step])))
            return DIFFERENT
    print(f"alike in all {len(steps)} steps that both have, {steps[0]} to {steps[-1]}")
    return ALIKE


class Difference(NamedTuple):
    """A value of which two runs have different digests, or one run has none."""

    what: str
    of_a: str | None
    of_b: str | None


def differences(kind: str, a: TrainingDigest, b: TrainingDigest) -> list[Difference]:
    """Returns the differences of one kind, in the order of parameters in the first run.

    Args:
        kind: a field of :class:`TrainingDigest`.
        a: a digest of the first run.
        b: a digest of the second run.
    """
    ours, theirs = dict(_named(kind, a)), dict(_named(kind, b))
    return [
        Difference(what, ours.get(what), theirs.get(what))
        for what in dict.fromkeys([*ours, *theirs])
        if ours.get(what) != theirs.get(what)
    ]


def _named(kind: str, digest: TrainingDigest) -> Iterator[tuple[str, str]]:
    """Yields the name of each value of a kind, as a sentence has it, and its digest."""
    match kind:
        case "gradients":
            for fqn, value in digest.gradients.items():
                yield f"the gradient of '{fqn}'", value
        case "states":
            for fqn, states in digest.states.items():
                for name, value in states.items():
                    yield f"the state '{name}' of '{fqn}'", value
        case "shards":
            for fqn, value in digest.shards.items():
                yield f"the shard of '{fqn}'", value


def _described(step: int, a: TrainingDigest, b: TrainingDigest) -> Iterator[str]:
    """Yields lines on a step that differs."""
    found = {kind: differences(kind, a, b) for kind in _KINDS}
    first = next(each for of_kind in found.values() for each in of_kind)
    yield f"the runs differ first at step {step}, in {first.what}:"
    yield f"  {_shown(first.of_a)} in RUN_A, {_shown(first.of_b)} in RUN_B"
    counts = []
    for kind, of_kind in found.items():
        names = {what for digest in (a, b) for what, _ in _named(kind, digest)}
        counts.append(f"{len(of_kind)} of {len(names)} {kind}")
    yield f"at step {step} {', '.join(counts)} differ"


def _shown(digest: str | None) -> str:
    return "missing" if digest is None else digest


def _common_steps(a: Run, b: Run) -> list[int]:
    """Returns the steps that both runs have.

    Raises:
        Zero3Error: there is none.
    """
    steps = [step for step in a.digests if step in b.digests]
    if not steps:
        raise Zero3Error(
            f"the runs have no step in common: RUN_A has {_listed([*a.digests])}, RUN_B has "
            f"{_listed([*b.digests])}; give DigestLog the same `every`, and `start` after a "
            "checkpoint"
        )
    return steps


def _notes(a: Run, b: Run) -> Iterator[str]:
    """Yields lines on steps that only one run has, and on settings that are not the same."""
    for name, mine, other in (("RUN_A", a, b), ("RUN_B", b, a)):
        if more := [step for step in mine.digests if step not in other.digests]:
            yield f"only {name} has {_listed(more)}"
    for name in a.settings:
        if a.settings[name] != b.settings.get(name):
            yield f"{name}: {a.settings[name]} in RUN_A, {b.settings.get(name)} in RUN_B"


def _listed(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"

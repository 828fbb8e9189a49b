"""All interleavings of programs that share memory: :func:`explore` tries them.

A program is a list of atomic steps. Each step reads or writes a word of the memory that programs
share. Data that is not an atomic word in C++ takes two steps to write and is ``TORN`` in between,
so that a read that comes too early or too late is detected.

A wait is one step, which is possible once its condition holds. It may look at several words in one
step: if words only grow, one look at all of them finds the same as looks at one after the other.

Memory is sequentially consistent here.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

TORN = 255
RAISES = 1 << 20  # steps by which a rank that raises goes on: beyond its last

Memory = bytes  # one byte for each word

# Maps memory and the rank's local state to outcomes: new memory, new state, and the number of steps
# to go on by. There is no outcome if the rank has to wait, and several if it has a choice.
Step = Callable[[Memory, Any], Iterable[tuple[Memory, Any, int]]]


class ProtocolError(Exception):
    """An interleaving that breaks the protocol."""


class Layout:
    """The positions of words in memory; each rank has ``counts[kind]`` words of a kind."""

    def __init__(self, world_size: int, **counts: int):
        self.world_size = world_size
        names = [
            (kind, which, rank)
            for kind, count in counts.items()
            for which in range(count)
            for rank in range(world_size)
        ]
        self._index = {name: index for index, name in enumerate(names)}

    def zeros(self) -> Memory:
        return bytes(len(self._index))

    def of(self, kind: str, which: int, rank: int) -> int:
        return self._index[kind, which, rank]

    def of_all(self, kind: str, which: int) -> list[int]:
        return [self.of(kind, which, rank) for rank in range(self.world_size)]


class Program:
    """The named steps of one rank."""

    def __init__(self, layout: Layout, rank: int, local: Any):
        self.layout = layout
        self.rank = rank
        self.local = local  # the initial state
        self.steps: list[tuple[str, Step]] = []

    def add(self, name: str, step: Step) -> None:
        self.steps.append((name, step))

    def store(self, kind: str, which: int, value: int, then: int = 1) -> None:
        index = self.layout.of(kind, which, self.rank)
        self.add(
            f"{kind} of {which} = {value}",
            lambda memory, local: [(with_word(memory, index, value), local, then)],
        )


def with_word(memory: Memory, index: int, value: int) -> Memory:
    return b"%b%c%b" % (memory[:index], value, memory[index + 1 :])


def explore(programs: Sequence[Program]) -> int:
    """Visits all states that the ranks can reach and returns their number.

    After a rank has raised, the others may wait for ever.

    Raises:
        ProtocolError: a state is wrong; the message has a shortest path to it.
    """
    start = (programs[0].layout.zeros(), tuple((0, program.local) for program in programs))
    came_from: dict[Any, Any] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        memory, ranks = state
        is_stuck = True
        for rank, (at, local) in enumerate(ranks):
            steps = programs[rank].steps
            if at >= len(steps):
                continue
            try:
                outcomes = list(steps[at][1](memory, local))
            except ProtocolError as error:
                raise ProtocolError(f"{error}{_way_to(state, came_from, programs)}") from None
            for new_memory, new_local, further in outcomes:
                is_stuck = False
                new_rank = (at + further, new_local)
                new_state = (new_memory, (*ranks[:rank], new_rank, *ranks[rank + 1 :]))
                if new_state not in came_from:
                    came_from[new_state] = state
                    queue.append(new_state)
        waits = [
            program.steps[at][0]
            for program, (at, _) in zip(programs, ranks, strict=True)
            if at < len(program.steps)
        ]
        if is_stuck and waits and not any(at >= RAISES for at, _ in ranks):
            raise ProtocolError(f"deadlock: {waits}{_way_to(state, came_from, programs)}")
    return len(came_from)


def _way_to(state: Any, came_from: dict[Any, Any], programs: Sequence[Program]) -> str:
    lines = []
    while (before := came_from[state]) is not None:
        for rank, (old, new) in enumerate(zip(before[1], state[1], strict=True)):
            if old != new:
                lines.append(f"\n  rank {rank}: {programs[rank].steps[old[0]][0]}")
        state = before
    return "".join(reversed(lines))

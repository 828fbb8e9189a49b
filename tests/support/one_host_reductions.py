"""A model of mailboxes of ``csrc/transport/shared``: ranks that share memory sum gradients."""

from collections.abc import Callable
from typing import NamedTuple

from support.interleavings import TORN, Layout, Memory, Program, ProtocolError, with_word

GRADIENTS = 8  # at most, of a parameter in a backward: 1 << kGradientBits in C++
ROUNDS = 2  # of announcements, at most, in a backward: 1 << kRoundBits in C++
BACKWARDS = 2  # at most, between two gathers of forwards: 1 << kBackwardBits in C++


class PendingSum(NamedTuple):
    """A gradient that has been posted."""

    parameter: int
    epoch: int
    backward: int
    gradient: int | None  # the same on all ranks; None if the backward will raise


class Local(NamedTuple):
    """A rank's local state, as far as it depends on other ranks."""

    held: tuple[tuple[int, int], ...]  # parameter and epoch of each cell of the mailbox
    cell: int = 0  # the cell of the next gradient
    unsummed: tuple[PendingSum, ...] = ()
    summing: PendingSum | None = None
    cells: tuple[int, ...] = ()  # cells of other ranks' gradients


class Reductions(Program):
    """The steps of one rank on mailboxes, and what it announces.

    ``without`` names an action that the rank omits, which ``explore`` has to find. ``counts`` are
    numbers of further words of a rank, by kind.
    """

    def __init__(
        self, rank: int, world_size: int, parameters: int, cells: int, without: str, **counts: int
    ):
        counts |= dict.fromkeys(("posted", "description", "consumed"), parameters)
        counts |= dict.fromkeys(("oldest_backward", "topic", "announced", "acknowledged"), 1)
        super().__init__(
            Layout(world_size, **counts, mailbox=cells), rank, Local(held=((0, 0),) * cells)
        )
        self._without = without
        self._others = [other for other in range(world_size) if other != rank]
        self._latest = [0] * parameters  # as in ReduceWords
        self._gathers = 0  # of forwards
        self._latest_backward = 0
        self._latest_round = 0
        self._running: set[int] = set()

    def begin(self) -> int:
        """Begins a backward and returns its number."""
        number = self._latest_backward = self._next_backward()
        self._running.add(number)
        return number

    def _next_backward(self) -> int:
        number = self._latest_backward + 1
        return number if self._without == "gathers" else max(number, self._gathers * BACKWARDS)

    def _show_oldest(self) -> None:
        if self._without != "oldest_backward":
            self.store("oldest_backward", 0, min(self._running, default=self._next_backward()))

    def end(self, backward: int) -> None:
        """Tells the others that this rank reads nothing of the backward any more."""
        self._running.remove(backward)
        self._show_oldest()

    def announce(self, backward: int, what: int) -> int:
        """Announces ``what`` once all ranks have read the previous round; returns the new round."""
        latest = self._latest_round
        self._latest_round = max(latest, backward * ROUNDS) + 1
        self._summing(
            f"wait for readers of round {latest}",
            lambda memory, local: (
                [local]
                if self._without == "acknowledged" or self._is_acknowledged(memory, latest)
                else []
            ),
        )
        self.store("topic", 0, TORN)
        self.store("topic", 0, what)
        self.store("announced", 0, self._latest_round)
        return self._latest_round

    def read_announcements(self, round: int, what: int) -> None:
        """Waits until all ranks have announced, and reads what they have announced."""
        is_complete = self._reached("announced", 0, round)
        self._summing(
            f"wait for round {round}",
            lambda memory, local: (
                [local] if self._without == "announced" or is_complete(memory) else []
            ),
        )
        for other in self._others:
            self._read_topic(other, what)
        self.acknowledge(round)

    def _read_topic(self, other: int, what: int) -> None:
        index = self.layout.of("topic", 0, other)

        def read(memory: Memory, local: Local):
            self._expect(f"topic of {other}", memory[index], what)
            return [(memory, local, 1)]

        self.add(f"read topic of {other}", read)

    def acknowledge(self, round: int) -> None:
        """Tells the others that this rank reads nothing of the round any more."""
        self.store("acknowledged", 0, round)

    def _is_acknowledged(self, memory: Memory, round: int) -> bool:
        return self._is_over(memory, "acknowledged", 0, round, round // ROUNDS)

    def post(self, p: int, backward: int, gradient: int, raises: bool = False) -> None:
        """Finds a cell, writes the gradient into it and posts the gradient."""
        latest = self._latest[p]
        first = 0 if self._without == "backward" else backward * GRADIENTS
        epoch = max(latest, first) + 1
        self._latest[p] = epoch
        pending = PendingSum(p, epoch, backward, None if raises else gradient)

        self._poll()
        self._summing(f"find a cell for {gradient}", self._take)
        self._store_in_cell(TORN)
        self._store_in_cell(gradient)
        self._summing(
            f"wait for readers of {latest} of {p}",
            lambda memory, local: (
                [local] if self._without == "latest" or self._is_read(memory, p, latest) else []
            ),
        )
        self.store("description", p, TORN)
        self._describe(pending)
        self.store("posted", p, epoch)
        self._poll()

    def finish(self, backward: int) -> None:
        """Sums all gradients that this rank posted in the backward."""
        self._summing(
            f"finish {backward}",
            lambda memory, local: (
                [] if any(pending.backward == backward for pending in local.unsummed) else [local]
            ),
        )

    def drop(self) -> None:
        """Drops all unsummed gradients, as when a backward raises."""

        def drop(memory: Memory, local: Local):
            if not local.unsummed:
                return [(memory, local, 1)]
            pending, *rest = local.unsummed
            return [(self._consumed(memory, pending), local._replace(unsummed=tuple(rest)), 0)]

        self.add("drop", drop)

    def _take(self, memory: Memory, local: Local) -> list[Local]:
        """Returns all free cells. An arena returns the lowest that it knows to be free."""
        return [
            local._replace(cell=cell)
            for cell, held in enumerate(local.held)
            if self._without == "consumed" or self._is_read(memory, *held)
        ]

    def _store_in_cell(self, value: int) -> None:
        def store(memory: Memory, local: Local):
            index = self.layout.of("mailbox", local.cell, self.rank)
            return [(with_word(memory, index, value), local, 1)]

        self.add(f"write {value}", store)

    def _describe(self, pending: PendingSum) -> None:
        index = self.layout.of("description", pending.parameter, self.rank)

        def describe(memory: Memory, local: Local):
            held = list(local.held)
            held[local.cell] = pending[:2]
            unsummed = (*local.unsummed, pending)
            noted = local._replace(held=tuple(held), unsummed=unsummed)
            return [(with_word(memory, index, local.cell), noted, 1)]

        self.add(f"describe {pending.gradient}", describe)

    def _poll(self) -> None:
        """Computes pending sums in order until one is not there."""

        def poll(memory: Memory, local: Local):
            if local.unsummed and self._is_there(memory, local.unsummed[0]):
                return [(memory, local._replace(summing=local.unsummed[0]), 1)]
            return [(memory, local, 1 + self._steps_of_sum)]

        self.add("poll", poll)
        self._sum()

    def _summing(self, name: str, leave: Callable[[Memory, Local], list[Local]]) -> None:
        """Waits until ``leave`` returns a state, and computes any pending sum that is there."""

        def wait(memory: Memory, local: Local):
            for pending in local.unsummed:
                if self._is_there(memory, pending):
                    yield memory, local._replace(summing=pending), 1
            for left in leave(memory, local):
                yield memory, left, 1 + self._steps_of_sum

        self.add(name, wait)
        self._sum()

    @property
    def _steps_of_sum(self) -> int:
        return 2 * len(self._others) + 1

    def _sum(self) -> None:
        """Computes the sum that the previous step chose, and goes back to that step."""
        for other in self._others:
            self._find_addend(other)
        for other in self._others:
            self._read_addend(other)

        def consume(memory: Memory, local: Local):
            pending = local.summing
            unsummed = tuple(kept for kept in local.unsummed if kept != pending)
            forgotten = local._replace(unsummed=unsummed, summing=None)
            return [(self._consumed(memory, pending), forgotten, -self._steps_of_sum)]

        self.add("consume", consume)

    def _find_addend(self, other: int) -> None:
        def find(memory: Memory, local: Local):
            cell = memory[self.layout.of("description", local.summing.parameter, other)]
            self._expect(f"description of {other} is whole", cell != TORN, True)
            return [(memory, local._replace(cells=(*local.cells, cell)), 1)]

        self.add(f"find gradient of {other}", find)

    def _read_addend(self, other: int) -> None:
        def read(memory: Memory, local: Local):
            cell, *cells = local.cells
            gradient = memory[self.layout.of("mailbox", cell, other)]
            expected = local.summing.gradient
            if expected is None:  # the sum is dropped, but nobody may write there
                self._expect(f"gradient of {other} is whole", gradient != TORN, True)
            else:
                self._expect(f"gradient of {other}", gradient, expected)
            return [(memory, local._replace(cells=tuple(cells)), 1)]

        self.add(f"read gradient of {other}", read)

    def _consumed(self, memory: Memory, pending: PendingSum) -> Memory:
        index = self.layout.of("consumed", pending.parameter, self.rank)
        return with_word(memory, index, max(memory[index], pending.epoch))

    def _is_read(self, memory: Memory, p: int, epoch: int) -> bool:
        return self._is_over(memory, "consumed", p, epoch, epoch // GRADIENTS)

    def _is_over(self, memory: Memory, kind: str, which: int, value: int, backward: int) -> bool:
        """Returns whether each rank's word has reached ``value`` or its backward is over."""
        return all(
            memory[word] >= value or memory[oldest] > backward
            for word, oldest in zip(
                self.layout.of_all(kind, which),
                self.layout.of_all("oldest_backward", 0),
                strict=True,
            )
        )

    def _is_there(self, memory: Memory, pending: PendingSum) -> bool:
        return self._without == "posted" or self._reached(
            "posted", pending.parameter, pending.epoch
        )(memory)

    def _reached(self, kind: str, which: int, value: int) -> Callable[[Memory], bool]:
        words = self.layout.of_all(kind, which)
        return lambda memory: all(memory[index] >= value for index in words)

    def _expect(self, what: str, value: int, expected: int) -> None:
        if value != expected:
            raise ProtocolError(f"rank {self.rank} reads {what}: {value}, not {expected}")

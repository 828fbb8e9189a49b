"""A model of ``csrc/transport`` where ranks share memory: :func:`explore` tries all interleavings.

A rank is a list of atomic steps. Each step reads or writes a word of the memory that ranks share:
words of ``Progress`` and ``RankState``, rows of a copy, and cells of a mailbox or of a ``Ring`` of
copies. Data that is not an atomic word in C++ takes two steps to write and is ``TORN`` in between,
so that a read that comes too early or too late is detected.

A wait is one step, which is possible once its condition holds; :class:`Sleeper` models how a rank
is woken. A wait may look at several words in one step. The words only grow, so that one look at all
of them finds the same as looks at one after the other. A rank goes back to an earlier step only
after it has published or summed something, or after a notification. No run is therefore endless:
if no rank gets stuck, all finish.

Memory is sequentially consistent here. ThreadSanitizer checks in ``test_one_host_random.py`` that
each acquire of the C++ code meets its release.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TORN = 255
GRADIENTS = 8  # at most, of a parameter in a backward: 1 << kGradientBits in C++
ROUNDS = 2  # of announcements, at most, in a backward: 1 << kRoundBits in C++
BACKWARDS = 2  # at most, between two gathers of forwards: 1 << kBackwardBits in C++
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


@dataclass(eq=False)
class Turn:
    """The turn of a publication in a cell of a ring."""

    cell: int
    history: int = 0  # the number of turns that the ring has had
    pins: int = 0
    is_viewed: bool = False
    is_over: bool = False  # another turn has the cell


@dataclass(eq=False)
class Bucket:
    """A ``SharedGather``."""

    parameters: tuple[int, ...]
    in_backward: bool
    started: int = 0
    pinned: list[Turn] = field(default_factory=list)  # turns of gathers under way


class Rank(Program):
    """The steps of one rank on copies and mailboxes.

    Copies take turns in ``ring`` cells, or each copy has its own cell. ``without`` names an action
    that the rank omits, which ``explore`` has to find. ``explore`` also finds ranks that have
    gathered different things, unless ``may_raise`` lets the ranks raise, as real ranks do.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        parameters: int = 1,
        cells: int = 1,
        ring: int | None = None,
        without: str = "",
        may_raise: bool = False,
    ):
        kinds = ("history", "arrived", "published", "posted", "description", "consumed")
        counts = dict.fromkeys(kinds, parameters)
        counts |= dict.fromkeys(("oldest_backward", "topic", "announced", "acknowledged"), 1)
        super().__init__(
            Layout(world_size, **counts, rows=ring or parameters, mailbox=cells),
            rank,
            Local(held=((0, 0),) * cells),
        )
        self._without = without
        self._may_raise = may_raise
        self._others = [other for other in range(world_size) if other != rank]
        shared = deque(Turn(cell) for cell in range(ring or 0))  # the oldest turn ends next
        self._rings = [shared if ring else deque([Turn(p)]) for p in range(parameters)]
        self._turns = [Turn(p, is_over=True) for p in range(parameters)]  # the latest
        self._buckets: dict[tuple[int, ...], Bucket] = {}  # buckets that have been started
        self._waiting_for_room: list[Bucket] = []
        self._epochs = [0] * parameters  # as in GatherWords
        self._latest = [0] * parameters  # as in ReduceWords
        self._gathers = 0  # of forwards
        self._latest_backward = 0
        self._latest_round = 0
        self._running: set[int] = set()

    # ---- gathers

    def start(self, *parameters: int, in_backward: bool = False) -> None:
        """Arrives as far as there is room, and publishes to copies that nobody reads any more."""
        bucket = self._buckets[parameters] = Bucket(parameters, in_backward)
        if not in_backward:
            self._gathers += 1
            self._show_oldest()
        if not self._waiting_for_room or self._without == "line":
            for p in self._start_some(bucket):
                self._start_publishing(p)
        if bucket.started < len(parameters):
            self._waiting_for_room.append(bucket)

    def _start_some(self, bucket: Bucket, at_least_one: bool = False) -> list[int]:
        arrived = []
        for p in bucket.parameters[bucket.started :]:
            if not bucket.in_backward or self._turns[p].is_over:
                if not self._arrive(p, even_if_pinned=at_least_one):
                    break
                arrived.append(p)
            if self._without != "pins":
                self._turns[p].pins += 1
            bucket.pinned.append(self._turns[p])
            bucket.started += 1
            at_least_one = False
        return arrived

    def _arrive(self, p: int, even_if_pinned: bool) -> bool:
        ring = self._rings[p]
        if ring[0].pins > 0 and not even_if_pinned:
            return False
        old = ring.popleft()
        if old.is_viewed and self._without != "leave":
            self._read(old)  # copies its views out
        old.is_over = True
        self._epochs[p] += 1
        history = max(turn.history for turn in (old, *ring)) + 1
        self._turns[p] = Turn(old.cell, history)
        ring.append(self._turns[p])
        self.store("history", p, history)
        self.store("arrived", p, self._epochs[p])
        return True

    def _start_publishing(self, p: int) -> None:
        may_publish = self._may_publish(p)
        self.add(
            f"look for readers of {p}",
            lambda memory, local: [
                (memory, local, 1 if may_publish(memory) else 1 + self._steps_of_publish)
            ],
        )
        self._publish(p, waits=self._without == "patience")

    def wait(self, *parameters: int) -> None:
        """Publishes the remaining rows and waits for other ranks' rows, in rounds."""
        bucket = self._buckets.pop(parameters)
        finished = 0
        while finished < len(parameters):
            self._start_some(bucket, at_least_one=bucket.started == finished)
            under_way = parameters[finished : bucket.started]
            self._wait(under_way)
            for p, pinned in zip(under_way, bucket.pinned, strict=True):
                if pinned.is_over and self._without != "pins":
                    raise ProtocolError(f"{p} is waited for after others that came later")
                pinned.pins -= 1
                self._turns[p].is_viewed = True
            bucket.pinned.clear()
            finished = bucket.started
        if bucket in self._waiting_for_room:
            self._waiting_for_room.remove(bucket)

    def _wait(self, under_way: tuple[int, ...]) -> None:
        parts = [
            (self.layout.of("published", p, self.rank), self._epochs[p], self._may_publish(p))
            for p in under_way
        ]
        complete = [self._reached("published", p, self._epochs[p]) for p in under_way]
        sums = self._steps_of_sum if self._running else 0

        def wait(memory: Memory, local: Local):
            for i, (published, epoch, may_publish) in enumerate(parts):
                if memory[published] < epoch and may_publish(memory):
                    yield memory, local, 1 + sums + self._steps_of_publish * i
            # Other ranks may wait for the sum.
            if sums and local.unsummed and self._is_there(memory, local.unsummed[0]):
                yield memory, local._replace(summing=local.unsummed[0]), 1
            if self._without == "published" or all(check(memory) for check in complete):
                yield memory, local, 1 + sums + self._steps_of_publish * len(under_way)

        self.add(f"wait for {under_way}", wait)
        if sums:
            self._sum()
        for i, p in enumerate(under_way):
            self._publish(p, waits=True, then=-sums - self._steps_of_publish * (i + 1))

    def _may_publish(self, p: int) -> Callable[[Memory], bool]:
        if self._without == "arrived":
            return lambda memory: True
        return self._reached("arrived", p, self._epochs[p])

    _steps_of_publish = 4

    def _publish(self, p: int, waits: bool, then: int = 1) -> None:
        turn = self._turns[p]
        histories = self.layout.of_all("history", p)

        def check(memory: Memory, local: Local):
            alike = all(memory[index] == turn.history for index in histories)
            if alike or self._without in ("arrived", "history"):
                return [(memory, local, 1)]
            if not waits:  # others have raised, as this rank will, and are elsewhere
                return [(memory, local, self._steps_of_publish)]
            if self._may_raise:
                return [(memory, local, RAISES)]
            raise ProtocolError(f"rank {self.rank} has {p} where others have it not")

        self.add(f"look where {p} is", check)
        self.store("rows", turn.cell, TORN)
        self.store("rows", turn.cell, turn.history)
        self.store("published", p, self._epochs[p], then)

    def read(self, p: int) -> None:
        """Reads the copy rank by rank; all rows must be of the latest publication."""
        turn = self._turns[p]
        if not turn.is_over or self._without == "leave":  # otherwise the view has its own memory
            self._read(turn)

    def _read(self, turn: Turn) -> None:
        for other in self._others:
            self._read_rows(turn, other)

    def _read_rows(self, turn: Turn, other: int) -> None:
        index = self.layout.of("rows", turn.cell, other)

        def read(memory: Memory, local: Local):
            self._expect(f"rows of {other}", memory[index], turn.history)
            return [(memory, local, 1)]

        self.add(f"read rows of {other} of publication {turn.history}", read)

    # ---- reductions

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

    # ---- both

    def _reached(self, kind: str, which: int, value: int) -> Callable[[Memory], bool]:
        words = self.layout.of_all(kind, which)
        return lambda memory: all(memory[index] >= value for index in words)

    def _expect(self, what: str, value: int, expected: int) -> None:
        if value != expected:
            raise ProtocolError(f"rank {self.rank} reads {what}: {value}, not {expected}")


class Sleeper(Program):
    """The steps of ``RankWaiter::notify`` and ``wait``, which must not depend on the wait's naps.

    ``order`` names two actions that are done in the wrong order.
    """

    def __init__(self, rank: int, world_size: int, order: str = ""):
        layout = Layout(world_size, notified=1, sleepers=1, asleep=1, word=1)
        super().__init__(layout, rank, local=0)
        self._notified = layout.of("notified", 0, 0)  # the words of other ranks are not used
        self._sleepers = layout.of("sleepers", 0, 0)
        self._order = order

    def notify(self) -> None:
        notifies_first = self._order != "wakes before it notifies"
        if notifies_first:
            self._count(self._notified, 1)
        self.add(
            "look for sleepers",
            lambda memory, local: [(memory, local, 1 if memory[self._sleepers] > 0 else 2)],
        )
        self.add("wake", self._wake)
        if not notifies_first:
            self._count(self._notified, 1)

    def _wake(self, memory: Memory, local: int):
        for index in self.layout.of_all("asleep", 0):
            memory = with_word(memory, index, 0)
        return [(memory, local, 1)]

    def wait(self, value: int) -> None:
        """Waits until the words of all ranks have reached ``value``."""
        asleep = self.layout.of("asleep", 0, self.rank)
        words = self.layout.of_all("word", 0)
        listens_first = self._order != "looks before it listens"

        def listen(memory: Memory, local: int):
            return [(memory, memory[self._notified], 1)]

        def look(memory: Memory, local: int):
            is_there = all(memory[index] >= value for index in words)
            return [(memory, local, 1 if not is_there else 4 if listens_first else 5)]

        def sleep(memory: Memory, local: int):  # unless it was notified
            return [(with_word(memory, asleep, memory[self._notified] == local), 0, 1)]

        def wake_up(memory: Memory, local: int):
            return [] if memory[asleep] else [(memory, local, 1)]

        self._count(self._sleepers, 1)
        if listens_first:
            self.add("listen", listen)
        self.add("look", look)
        if not listens_first:
            self.add("listen", listen)
        self.add("sleep", sleep)
        self.add("wake up", wake_up)
        self._count(self._sleepers, -1, then=-5)
        self._count(self._sleepers, -1)

    def _count(self, index: int, by: int, then: int = 1) -> None:
        self.add(
            f"count {by}",
            lambda memory, local: [(with_word(memory, index, memory[index] + by), local, then)],
        )

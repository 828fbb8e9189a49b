"""A model of ``csrc/transport/shared``, where ranks share memory, for ``interleavings.explore``.

The words that the steps of a rank read and write are those of ``Progress`` and ``RankState``, rows
of a copy, and cells of a mailbox or of a ``Ring`` of copies. ``rank_waiter_model.Sleeper`` models
how a rank that waits is woken. A rank goes back to an earlier step only after it has published or
summed something, or after a notification. No run is therefore endless: if no rank gets stuck, all
finish.

Memory is sequentially consistent in the model. ThreadSanitizer checks in
``test_one_host_random.py`` that each acquire of the C++ code meets its release.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from support.interleavings import RAISES, TORN, Memory, ProtocolError
from support.one_host_reductions import Local, Reductions


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


class Rank(Reductions):
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
        counts = dict.fromkeys(("history", "arrived", "published"), parameters)
        super().__init__(
            rank, world_size, parameters, cells, without, rows=ring or parameters, **counts
        )
        self._may_raise = may_raise
        shared = deque(Turn(cell) for cell in range(ring or 0))  # the oldest turn ends next
        self._rings = [shared if ring else deque([Turn(p)]) for p in range(parameters)]
        self._turns = [Turn(p, is_over=True) for p in range(parameters)]  # the latest
        self._buckets: dict[tuple[int, ...], Bucket] = {}  # buckets that have been started
        self._waiting_for_room: list[Bucket] = []
        self._epochs = [0] * parameters  # as in GatherWords

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

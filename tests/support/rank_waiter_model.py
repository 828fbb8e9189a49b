"""A model of ``RankWaiter``, by which a rank that waits for others is woken."""

from support.interleavings import Layout, Memory, Program, with_word


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

"""A waiting queue that is obviously right: each pass looks all requests up again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Hits = Callable[[list[int]], int]


@dataclass
class Waiter:
    """A waiting request, with the tokens that later requests may still compute before it."""

    name: int
    tokens: list[int]
    priority: int
    came_at: int
    left: int = 0
    is_back: bool = False


class QueueOracle:
    """The requests in the order in which they came; those that were put back are in front."""

    def __init__(self, hits: Hits, by_work: bool, max_overtaken: int, max_stretch: float, promote_after: int) -> None:
        self.hits, self.by_work, self.max_overtaken, self.max_stretch = hits, by_work, max_overtaken, max_stretch
        self.promote_after = promote_after
        self.waiters: list[Waiter] = []
        self.num_computed = self.num_overtakes = self.num_charged = 0

    def work(self, waiter: Waiter) -> int:
        return len(waiter.tokens) - self.hits(waiter.tokens)

    def add(self, name: int, tokens: list[int], priority: int, is_back: bool = False) -> None:
        waiter = Waiter(name, tokens, priority, self.num_computed, is_back=is_back)
        ahead = sum(self.work(other) for other in self.waiters if other.is_back or other.priority >= priority)
        ahead += self.work(waiter)
        waiter.left = self.max_overtaken + int(self.max_stretch * ahead)
        self.waiters.insert(0 if is_back else len(self.waiters), waiter)

    def in_class(self, waiter: Waiter) -> bool:
        above = {other.priority for other in self.waiters if not other.is_back and other.priority > waiter.priority}
        return waiter.is_back or self.num_computed - waiter.came_at >= len(above) * self.promote_after

    def find_next(self) -> Waiter | None:
        eligible = [waiter for waiter in self.waiters if self.in_class(waiter)]
        if not eligible or eligible[0].is_back or not self.by_work:
            return eligible[0] if eligible else None
        allowed = [
            waiter for i, waiter in enumerate(eligible) if all(self.work(waiter) <= earlier.left for earlier in eligible[:i])
        ]
        return min(allowed, key=self.work)  # the first of equals

    def take(self, waiter: Waiter) -> None:
        work = self.work(waiter)
        for earlier in self.waiters[: self.waiters.index(waiter)]:
            if self.in_class(earlier):
                earlier.left -= work
                assert earlier.left >= 0, "a request was overtaken beyond its bound"
                self.num_overtakes += 1
                self.num_charged += work
        self.num_computed += work
        self.waiters.remove(waiter)

    def list_order(self) -> list[tuple[int, int]]:
        """Return names and hits in the order of admission, by a copy of the queue."""
        copy = QueueOracle(self.hits, self.by_work, self.max_overtaken, self.max_stretch, self.promote_after)
        copy.num_computed = self.num_computed
        copy.waiters = [Waiter(**vars(waiter)) for waiter in self.waiters]
        order = []
        while (waiter := copy.find_next()) is not None:
            order.append((waiter.name, self.hits(waiter.tokens)))
            copy.take(waiter)
        return order

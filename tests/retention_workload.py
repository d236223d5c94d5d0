"""The random work of `pin_workload`, with retained and protected pages."""

from __future__ import annotations

from random import Random
from typing import Any

from pin_workload import Actions, PinningBatchWorkload, PinningWorkload, random_span


def random_retention(rng: Random) -> dict[str, Any]:
    """Return a priority, for good, for a moment or for long; sometimes what is refused."""
    retention: dict[str, Any] = {"priority": rng.choice((0, 1, 49, 50, 51, 99, 100, rng.randint(0, 100)))}
    if rng.random() < 0.6:
        retention["seconds"] = rng.choice((1e-9, 1e-9, 1e6, 1e300))
    if rng.random() < 0.05:
        retention |= rng.choice(({"priority": -1}, {"priority": 101}, {"seconds": 0.0}, {"seconds": float("inf")}))
    return retention


class RetainingWorkload(PinningWorkload):
    """Requests whose pages are retained, and waiting ones that are protected."""

    def _weighted_actions(self) -> Actions:
        return super()._weighted_actions() | {self.pin: 1, self.unpin: 1, self.retain: 4, self.protect: 2}

    def retain(self) -> None:
        """Retain what a request holds, or would hit."""
        requests = self.engine.running + self.engine.waiting
        if requests:
            request = self.rng.choice(requests)
            self.twins.call("retain", request, *random_span(self.rng, request.num_tokens), **random_retention(self.rng))

    def protect(self) -> None:
        """Protect what waits, mostly, or nothing."""
        waiting = self.engine.waiting if self.rng.random() < 0.8 else []
        self.twins.call("protect", [*waiting, *self.engine.running] if self.rng.random() < 0.2 else waiting)


class RetainingBatchWorkload(PinningBatchWorkload):
    """Rows, and requests beside them, whose pages are retained, and prompts that are protected."""

    def _weighted_actions(self, trims: bool) -> Actions:
        others = {self.pin: 1, self.unpin: 1, self.retain: 4, self.retain_neighbour: 1, self.protect: 2}
        return super()._weighted_actions(trims) | others

    def retain(self) -> None:
        if self.rows():
            row = self.rng.choice(self.rows())
            self.twins.call("retain", row, *random_span(self.rng, self.num_tokens(row)), **random_retention(self.rng))

    def retain_neighbour(self) -> None:
        if self.twins.live_request_ids:
            name = self.rng.choice(list(self.twins.live_request_ids))
            span = random_span(self.rng, self.model.neighbours[name].num_tokens)
            self.twins.call("retain_neighbour", name, *span, **random_retention(self.rng))

    def protect(self) -> None:
        self.twins.call("protect", [self._new_request() for _ in range(self.rng.choice((0, 1, 2, 4)))])

"""The random work of `workload` and `batch_workload`, with pins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from batch_workload import BatchWorkload
from workload import RandomWorkload, Request

Actions = dict[Callable[[], None], float]
Span = tuple[()] | tuple[int] | tuple[int, int | None]
NUM_REMEMBERED = 6


def random_span(rng: Random, num_tokens: int) -> Span:
    """Return all tokens of a request, mostly, or some; sometimes what is refused."""
    start = rng.choice((0, 0, rng.randint(0, num_tokens)))
    stop = rng.choice((None, rng.randint(start, num_tokens + 3), rng.randint(start, num_tokens)))
    return rng.choice(((), (), (start,), (start, stop), (start, stop), rng.choice(((-1,), (3, 2), (start, stop)))))


class Unpinning:
    """Takes all pins of a workload's twins back."""

    twins: Any
    rng: Random

    def unpin_all(self) -> None:
        self.twins.call("unpin_all")

    def drain(self) -> None:
        """Mostly without pins, so that the reset succeeds."""
        if self.rng.random() < 0.7:
            self.unpin_all()
        super().drain()  # type: ignore[misc]


class PinningWorkload(Unpinning, RandomWorkload):
    """Requests that are pinned and unpinned, also after they ended, and by other requests with equal tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pinned: deque[tuple[Request, Span]] = deque(maxlen=NUM_REMEMBERED)

    def _weighted_actions(self) -> Actions:
        return super()._weighted_actions() | {self.pin: 3, self.unpin: 2, self.unpin_all: 0.1}

    def pin(self) -> None:
        """Pin what a request holds, or would hit."""
        requests = self.engine.running + self.engine.waiting
        if requests:
            request = self.rng.choice(requests)
            span = random_span(self.rng, request.num_tokens)
            if self.twins.call("pin", request, *span):
                self.pinned.append((replace(request, all_token_ids=list(request.all_token_ids)), span))

    def unpin(self) -> None:
        """Unpin by the request that pinned, as it was then, or by any."""
        requests = self.engine.running + self.engine.waiting
        if self.pinned and self.rng.random() < 0.7:
            request, span = self.rng.choice(self.pinned)
            request = replace(request, request_id="unpins")
            self.twins.call("unpin", request, *span)
            self.twins.call("free_page_hashes", request)
        elif requests:
            request = self.rng.choice(requests)
            self.twins.call("unpin", request, *random_span(self.rng, request.num_tokens))


class PinningBatchWorkload(Unpinning, BatchWorkload):
    """Rows, and requests beside them, that are pinned and unpinned."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pinned: deque[tuple[list[int], dict[str, Any], Span]] = deque(maxlen=NUM_REMEMBERED)

    def _weighted_actions(self, trims: bool) -> Actions:
        return super()._weighted_actions(trims) | {self.pin: 4, self.pin_neighbour: 1, self.unpin: 3, self.unpin_all: 0.1}

    def pin(self) -> None:
        if self.rows():
            row = self.rng.choice(self.rows())
            span = random_span(self.rng, self.num_tokens(row))
            if self.twins.call("pin", row, *span):
                self.pinned.append((list(self.model.requests[row].all_token_ids), self.attributes[row], span))

    def pin_neighbour(self) -> None:
        if self.twins.live_request_ids:
            name = self.rng.choice(list(self.twins.live_request_ids))
            request = self.model.neighbours[name]
            self.twins.call("pin_neighbour", name, *random_span(self.rng, request.num_tokens))

    def unpin(self) -> None:
        """Unpin by what was pinned, as it was then, or by any row."""
        if self.pinned and self.rng.random() < 0.6:
            token_ids, attributes, span = self.rng.choice(self.pinned)
            self.twins.call("unpin_tokens", token_ids, attributes, *span)
        elif self.rows():
            row = self.rng.choice(self.rows())
            self.twins.call("unpin", row, *random_span(self.rng, self.num_tokens(row)))

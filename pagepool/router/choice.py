"""The choice of a worker for each request."""

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool.arguments import as_list, require_callable, require_int, require_number
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.router.index import PrefixIndex, require_worker

MAX_CLOCK = 1 << 62  # more than any clock in nanoseconds shows


class Route(NamedTuple):
    """The worker chosen for a request, and the number of prompt tokens cached there."""

    worker: int
    num_cached_tokens: int


class PrefixRouter:
    """A router: chooses the worker with the least to compute for a request. A worker's cost is the number of prompt tokens not
    cached there, plus the uncached tokens of its unfinished requests, counted when they were routed. If costs are equal,
    the worker with less unfinished work is chosen, then the first.

    `workers` are the workers of the index that take requests; `add_worker` and `remove_worker` change them. With
    `max_imbalance` a worker is passed over, whatever it has cached, while its unfinished tokens exceed this multiple of the
    mean of all workers, even if `among` names only some: 1.0 balances strictly, infinity (the default) not at all. If every
    allowed worker exceeds it, one with the fewest unfinished tokens is chosen. With `max_age` a worker's cached prefixes count
    only if `note_report` was called for it within this number of seconds of `clock`. Any thread may call `note_report`; the
    caller serialises all other calls.

    >>> index = PrefixIndex(page_size=16)
    >>> router = PrefixRouter(index, range(2))
    >>> router.choose("a", list(range(100)))
    Route(worker=0, num_cached_tokens=0)
    >>> router.choose("b", list(range(100)))
    Route(worker=1, num_cached_tokens=0)
    >>> router.end("a"); router.loads
    {0: 0, 1: 100}
    """

    def __init__(
        self,
        index: PrefixIndex,
        workers: Iterable[int],
        *,
        max_imbalance: float = math.inf,
        max_age: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise ArgumentError or ArgumentTypeError for other values."""
        if not isinstance(index, PrefixIndex):
            raise ArgumentTypeError(f"index: got {type(index).__name__}, allowed: PrefixIndex")
        self._index = index
        self._max_imbalance = require_number("max_imbalance", max_imbalance, 1.0)
        self._max_age = require_number("max_age", max_age)
        self._clock = require_callable("clock", clock)
        self._loads: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._routed: dict[Hashable, tuple[int, int]] = {}
        for worker in _list_workers("workers", workers):
            self.add_worker(worker)

    @property
    def loads(self) -> dict[int, int]:
        """Tokens that each worker has to compute for its unfinished requests."""
        return dict(self._loads)

    def add_worker(self, worker: int) -> None:
        """Add a worker that takes requests."""
        self._loads.setdefault(require_worker(worker), 0)

    def remove_worker(self, worker: int) -> list[Hashable]:
        """Remove a worker, and drop its entries. Return its unfinished requests, which are ended."""
        worker = require_worker(worker)
        lost = [request for request, (chosen, _) in self._routed.items() if chosen == worker]
        for request in lost:
            self.end(request)
        self._loads.pop(worker, None)
        self._heard_at.pop(worker, None)
        self._index.remove_worker(worker)
        return lost

    def note_report(self, worker: int, seconds: float | None = None) -> None:
        """Note that the index was up to date for a worker at this time of the clock, by default now. Raise ArgumentError
        or ArgumentTypeError for other times than finite numbers.
        """
        at = self._clock() if seconds is None else require_number("seconds", seconds, -MAX_CLOCK, MAX_CLOCK)
        self._heard_at[require_worker(worker)] = at

    def choose(
        self,
        request: Hashable,
        token_ids: Sequence[int] | npt.NDArray[Any],
        *,
        among: Collection[int] | None = None,
        **keys: Any,
    ) -> Route:
        """Choose a worker for a request, which counts as its load until `end`.

        `among` names the allowed workers, None allows all. `keys` are as in `PrefixIndex.hash_tokens`. Raise ArgumentError
        without workers, or for a request that has not ended. O(tokens + workers).
        """
        if not hasattr(token_ids, "__len__"):
            token_ids = as_list("token_ids", token_ids, "ints")
        hashes = self._index.hash_tokens(token_ids, **keys)
        return self.choose_by_hashes(request, len(token_ids), hashes, among=among)

    def choose_by_hashes(
        self, request: Hashable, num_tokens: int, hashes: Any, *, among: Collection[int] | None = None
    ) -> Route:
        """Choose like `choose`, for a prompt of `num_tokens` tokens and the hashes of pages that may hit. Raise ArgumentError
        also for more hashes than the prompt has full pages. O(pages + workers).
        """
        num_tokens = require_int("num_tokens", num_tokens, 0)
        if self._is_under_way(request):
            raise ArgumentError(f"request: got {shown(request)}, allowed: one that is not under way")
        chosen_among = self._loads if among is None else _list_workers("among", among)
        loads = {worker: load for worker, load in self._loads.items() if worker in chosen_among}
        if not self._loads:
            raise ArgumentError("workers: got none, allowed: at least one")
        if not loads:
            raise ArgumentError(f"among: got {shown(among)}, allowed: at least one of the {len(self._loads)} workers")
        if not hasattr(hashes, "__len__"):
            hashes = as_list("hashes", hashes, "hashes")
        cached = self._count_cached(hashes)
        num_pages = num_tokens // self._index.page_size
        if len(hashes) > num_pages:
            raise ArgumentError(f"hashes: got {len(hashes)}, allowed: at most {num_pages}, as num_tokens is {num_tokens}")
        costs = {worker: num_tokens - cached[worker] for worker in loads}
        chosen = min(self._list_balanced(loads), key=lambda worker: (loads[worker] + costs[worker], loads[worker]))
        self._routed[request] = chosen, costs[chosen]
        self._loads[chosen] += costs[chosen]
        return Route(chosen, cached[chosen])

    def end(self, request: Hashable) -> None:
        """Note that a request has ended, or was lost. Raise ArgumentError if it is not under way."""
        if not self._is_under_way(request):
            raise ArgumentError(f"request: got {shown(request)}, allowed: one that is under way")
        worker, cost = self._routed.pop(request)
        self._loads[worker] -= cost

    def _is_under_way(self, request: Hashable) -> bool:
        try:
            return request in self._routed
        except TypeError:
            raise ArgumentTypeError(f"request: got {type(request).__name__}, allowed: what can be hashed") from None

    def _count_cached(self, hashes: Any) -> dict[int, int]:
        """Count the tokens of a prompt that each worker has, according to recent reports."""
        found: npt.NDArray[np.int32] = self._index.find(hashes)
        cached = dict.fromkeys(self._loads, 0) | {i: num for i, num in enumerate(found.tolist()) if i in self._loads}
        if self._max_age < math.inf:
            oldest = self._clock() - self._max_age
            cached |= dict.fromkeys((i for i in cached if self._heard_at.get(i, -math.inf) < oldest), 0)
        return cached

    def _list_balanced(self, loads: dict[int, int]) -> list[int]:
        """List the workers in `loads` that are within `max_imbalance`; if none is, those with the least load."""
        total, least = sum(self._loads.values()), min(loads.values())
        balanced = [worker for worker, load in loads.items() if load * len(self._loads) <= self._max_imbalance * total]
        return balanced or [worker for worker, load in loads.items() if load == least]


def _list_workers(name: str, workers: Iterable[int]) -> list[int]:
    return [require_int(name, worker) for worker in as_list(name, workers, "ints", is_ordered=False)]

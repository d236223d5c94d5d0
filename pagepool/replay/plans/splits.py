"""Hits of a model with a pool of keys and values and one of states, by the share of memory that the states have.

Both pools belong to one `CacheManager`, and a `RunningBatch` writes states where requests resume. With too few states hits are
lost for want of checkpoints, with too few pages of attention for want of keys and values. The pools count both losses, and the
split at which these are equal is near the best split.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import numpy as np

from pagepool._core import search_all_lost
from pagepool.errors import RequestTooLargeError
from pagepool.manager import CacheManager
from pagepool.page_table import MultiGroupPageTable
from pagepool.replay.models.pools import KV, STATES, ModelPools
from pagepool.replay.plans.link import PlannedLink
from pagepool.replay.simulation.figures import find_hit_rate
from pagepool.replay.simulation.runs import make_manager_of_pools
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.request import RequestTraits
from pagepool.running_batch import RunningBatch

NUM_SEARCH_RUNS = 6
MOST_SHARE = 0.9
SPREAD = (-0.1, -0.05, 0.0, 0.05, 0.1)

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class SplitFigures:
    """Hits in two pools of `num_pages`, null pages included, if states have a `share` of the memory and requests run one after
    another. `lost_tokens` are the prompt tokens that each pool lost with evicted pages: see `PoolStats`. Requests larger than
    the pools count as `skipped`; their prompts count, without hits.
    """

    share: float
    num_pages: Mapping[str, int]
    prompt_tokens: int
    hit_tokens: int
    lost_tokens: Mapping[str, int]
    skipped: int
    written_states: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens' share of all prompt tokens."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens)

    def find_lost_rate(self, name: str) -> float:
        """Return the share of prompt tokens that a pool lost."""
        return find_hit_rate(self.lost_tokens[name], self.prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}


class SplitSimulator:
    """Simulator of requests in two pools of any sizes, one after another or several at once.

    >>> from pagepool.replay import TraceRecord, make_requests
    >>> chat = make_requests([TraceRecord(i, 1024, 1, ids) for i, ids in enumerate([(7, 8), (5, 6), (7, 8)])])
    >>> SplitSimulator(chat, ModelPools(token_bytes=1, state_bytes=100)).run(memory=10_000, share=0.2).hit_tokens
    960
    """

    def __init__(self, requests: Sequence[SimulatedRequest], pools: ModelPools, num_at_once: int = 1) -> None:
        """Hold the last `num_at_once` requests: the oldest ends when the next one begins. Nothing is computed yet."""
        self._requests = requests
        self._pools = pools
        self._num_at_once = num_at_once
        self._max_num_tokens = max((request.num_final_tokens for request in requests), default=1)

    def run(self, memory: int, share: float, on_request: Progress | None = None) -> SplitFigures:
        """Run in new pools that take at most `memory` bytes. `on_request` gets the number of requests done. Errors as in
        `make_manager_of_pools`. O(tokens).
        """
        num_pages = self._pools.divide(memory, share)
        manager = make_manager_of_pools(num_pages, self._pools, self._requests)
        search_all_lost(manager.registry.store)
        queue = Queue(manager, self._num_at_once, self._max_num_tokens)
        num_skipped = 0
        for num_done, request in enumerate(self._requests, start=1):
            try:
                manager.require_capacity(request.num_slots)
            except RequestTooLargeError:
                num_skipped += 1
            else:
                queue.start(request)
            if on_request is not None:
                on_request(num_done)
        return SplitFigures(
            share,
            num_pages,
            sum(request.num_prompt_tokens for request in self._requests),
            queue.hit_tokens,
            {name: pool.num_lost_hit_tokens for name, pool in manager.stats().pools.items()},
            num_skipped,
            queue.num_written,
        )


class Queue:
    """Running requests; each has computed all its tokens. The oldest ends when a new request needs its row; further ones end
    until the new request has room. `hit_tokens` and `num_written` count hit tokens and written states.
    """

    def __init__(self, manager: CacheManager, num_rows: int, max_num_tokens: int) -> None:
        """Start without requests."""
        page_sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
        table = MultiGroupPageTable(num_rows, max_num_tokens, 0, page_sizes)
        self._batch = RunningBatch(manager, table)
        self._free_rows = [*range(num_rows)]
        self._running: deque[int] = deque()
        self.hit_tokens = self.num_written = 0

    def start(self, request: SimulatedRequest) -> None:
        """Run a request to its last token, with one step for the prompt and one for the answer."""
        if not self._free_rows:
            self._end_oldest()
        row, token_ids = self._free_rows[-1], request.make_token_ids()
        prompt, answer = token_ids[: request.num_prompt_tokens], token_ids[request.num_prompt_tokens : request.num_slots]
        traits = RequestTraits(session_id=request.session_id)
        while (num_hits := self._batch.admit(row, prompt, traits=traits)) is None:
            self._end_oldest()
        self._running.append(self._free_rows.pop())
        self.hit_tokens += num_hits
        self._take_moves()
        self._batch.append(np.full(len(answer), row, np.int32), answer)
        while len(answer) and not self._batch.plan([row], len(answer)).num_grown:
            self._end_oldest()
        self._take_moves()

    def _take_moves(self) -> None:
        self.num_written += len(self._batch.take_moves().writes)

    def _end_oldest(self) -> None:
        row = self._running.popleft()
        self._batch.release([row])
        self._free_rows.insert(0, row)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A proposed split of `memory` bytes. `runs` has the figures of all simulated splits, sorted by share. Without a trace
    there are none, and `share`, unless given, follows the rule for requests of `mean_tokens` tokens. At most `max_num_seqs`
    requests run at once. `notes` list unknown properties of the trace. `link` is the link from another engine.
    """

    pools: ModelPools
    memory: int
    share: float
    max_num_seqs: int
    mean_tokens: float
    runs: tuple[SplitFigures, ...] = ()
    notes: tuple[str, ...] = ()
    link: PlannedLink | None = None

    @property
    def num_pages(self) -> dict[str, int]:
        """The pages of each pool, null pages included."""
        return self.pools.divide(self.memory, self.share)

    def count_requests(self) -> tuple[int, int]:
        """Count the requests of `mean_tokens` tokens whose keys and values fit at once, and those whose states fit."""
        num_kv, num_states = (self.num_pages[name] - 1 for name in (KV, STATES))
        return num_kv // max(1, ceil(self.mean_tokens / self.pools.page_size)), max(0, num_states - 1)

    @property
    def chosen(self) -> SplitFigures | None:
        """The figures of the proposed split, None without a trace."""
        return next((figures for figures in self.runs if figures.share == self.share), None)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""
        names = ("memory", "share", "max_num_seqs", "mean_tokens", "num_pages")
        return {
            "arrays": "apart",
            **{name: getattr(self, name) for name in names},
            "page_size": self.pools.page_size,
            "page_bytes": self.pools.page_bytes,
            **self.pools.fixed.as_dict(),
            "checkpoint_interval": self.pools.interval,
            "requests": min(self.count_requests()),
            "splits": [figures.as_dict() for figures in self.runs],
            "link": self.link and self.link.as_dict(),
            "notes": self.notes,
        }


def find_split(
    run: Callable[[float], SplitFigures], least_share: float, num_runs: int = NUM_SEARCH_RUNS
) -> tuple[SplitFigures, list[SplitFigures]]:
    """Search the split at which both pools lose equally many hits, by bisection from `least_share` on. Then run splits around
    the one that hit most. Return the best run, and all runs sorted by share.
    """
    low, high = min(least_share, MOST_SHARE), MOST_SHARE
    runs: list[SplitFigures] = []
    for _ in range(num_runs):
        figures = run((low + high) / 2)
        runs.append(figures)
        if figures.lost_tokens[STATES] > figures.lost_tokens[KV]:
            low = figures.share
        else:
            high = figures.share
    found = choose_best(runs).share
    runs += [run(share) for share in list_around(found, least_share) if share != found]
    return choose_best(runs), sorted(runs, key=lambda figures: figures.share)


def list_around(share: float, least_share: float) -> list[float]:
    """List a share and up to four around it, ascending."""
    around = [share + distance for distance in SPREAD]
    return [each for each in around if each == share or least_share <= each <= MOST_SHARE]


def choose_best(runs: Sequence[SplitFigures]) -> SplitFigures:
    """Return the run that hit most; of equals, the one with the largest share of states."""
    return max(runs, key=lambda figures: (figures.hit_tokens, figures.share))

"""Hits of eviction policies that learn from the requests, and of pools with a host tier. They have no curve from one pass: each
pool size needs a simulation. Pool and tier are no stack, even with LRU in both: a page that was loaded is in both.

The hits are those of `Scheduler` with one running request: a prompt takes and enters its pages in steps, and an answer page by
page, since policies learn from each entry. No call is made for tokens that fill no page, and all simulations share the hashes.
With a tier a step is made behind each one in an answer, as pages may be entered, and noted to be saved, only in the next step.
"""

from collections.abc import Callable, Sequence

from pagepool._core import (
    CacheGroups,
    HashChain,
    PageIds,
    PageRules,
    PageStore,
    PrefixQuery,
    RequestPages,
    end_step,
    end_transfers,
    load_hits,
    take_transfers,
)
from pagepool.arguments import require_int
from pagepool.coordinator import ANY_PAGE
from pagepool.hashing import get_siphash_key
from pagepool.page_pool import PagePool
from pagepool.replay.simulation.allocator import HASH_SEED
from pagepool.replay.simulation.figures import HostFigures
from pagepool.replay.simulation.host import HostMemory
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.specs import cdiv

__all__ = ["PolicySimulator"]

Progress = Callable[[int], object]
GROUP = 0


class PolicySimulator:
    """Runs requests one after another in pools of any size and policy, with one full-attention group.

    >>> from pagepool.replay import TraceRecord, make_requests
    >>> chat = make_requests([TraceRecord(i, 1024, 1, ids) for i, ids in enumerate([(7, 8), (5, 6), (7, 8)])])
    >>> PolicySimulator(chat, page_size=16).count_hits("adaptive", num_pages=100)
    560
    """

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        page_size: int,
        max_batched_tokens: int = 8192,
        on_request: Progress | None = None,
    ) -> None:
        """Hash all pages; `on_request` gets the number of requests done. O(tokens) in time, 16 bytes a page of memory. Raises
        ArgumentError or ArgumentTypeError if a size is not a positive integer.
        """
        self._requests = requests
        self._page_size = require_int("page_size", page_size, minimum=1)
        self._max_batched_tokens = require_int("max_batched_tokens", max_batched_tokens, minimum=1)
        self._groups = CacheGroups([(PageRules(page_size), GROUP, 1)])
        self._chains: list[HashChain] = []
        key = get_siphash_key(HASH_SEED)
        for num_done, request in enumerate(requests, start=1):
            chain = HashChain(page_size, key)
            chain.extend(request.make_token_ids()[: request.num_slots // page_size * page_size])
            self._chains.append(chain)
            if on_request is not None:
                on_request(num_done)

    def count_hits(self, eviction: str, num_pages: int, on_request: Progress | None = None) -> int:
        """Count the prompt tokens that hit in a new pool of `num_pages`, including the null page, under a policy of `PagePool`.
        Requests larger than the pool are skipped. Raises as `PagePool` does. O(pages).
        """
        return self._run_all(Steps(PagePool(num_pages, True, eviction=eviction).store), on_request)

    def run_with_host(self, num_pages: int, host: HostMemory, on_request: Progress | None = None) -> tuple[int, HostFigures]:
        """Count the same in a new LRU pool with a host tier, with what moves between them. Raises as `HostTier` does, too."""
        store, tier = PagePool(num_pages, True).store, host.make_tier()
        tier._bind(store)
        hit_tokens = self._run_all(Steps(store), on_request)
        stats = tier.stats()
        loaded_tokens = stats.num_loaded_pages * self._page_size
        moved = stats.num_saved_pages, stats.num_loaded_pages, loaded_tokens, stats.num_evicted_pages, stats.num_refused_pages
        return hit_tokens, HostFigures(*moved)

    def _run_all(self, steps: "Steps", on_request: Progress | None) -> int:
        num_hit_pages = 0
        for num_done, (request, chain) in enumerate(zip(self._requests, self._chains, strict=True), start=1):
            if cdiv(request.num_slots, self._page_size) < steps.store.num_pages:
                num_hit_pages += self._run(request, chain, steps)
            if on_request is not None:
                on_request(num_done)
        steps.begin()
        return num_hit_pages * self._page_size

    def _run(self, request: SimulatedRequest, chain: HashChain, steps: "Steps") -> int:
        """Run a request from its look-up to its end. Returns the number of pages it hit."""
        store, has_tier = steps.store, steps.store.has_tier
        held = RequestPages(store, self._groups, request.num_slots)
        num_hits = num_queried_pages = (request.num_prompt_tokens - 1) // self._page_size
        steps.begin()
        if has_tier:
            num_hits = PrefixQuery(store, chain, reaches_tier=True).find_leading_hits(PageIds([GROUP]), 1, 0, num_queried_pages)
            load_hits(store, chain, [(GROUP, 1, 0, num_hits, False)], ANY_PAGE)
        query = PrefixQuery(store, chain)
        num_hits = query.find_leading_hits(PageIds([GROUP]), 1, 0, num_hits)
        hits = query.get_hits(GROUP, 1, 0, num_hits) if num_hits else None
        num_computed_tokens = 0
        for num_tokens in self._list_lengths(request, num_hits * self._page_size, has_tier):
            steps.begin()
            held.allocate(num_tokens, num_computed_tokens, () if hits is None else (hits,), chain, num_tokens)
            steps.end()
            hits, num_computed_tokens = None, num_tokens
        held.give_back()
        return num_hits

    def _list_lengths(self, request: SimulatedRequest, num_hit_tokens: int, has_tier: bool) -> list[int]:
        """List the numbers of tokens at which a request takes and enters pages: the ends of its steps, in the answer only those
        that fill a page, and with a tier of the steps behind them.
        """
        num_tokens, num_slots, size = request.num_prompt_tokens, request.num_slots, self._page_size
        steps = range(num_hit_tokens + self._max_batched_tokens, num_tokens, self._max_batched_tokens)
        ends = [num_tokens, *range(num_tokens - num_tokens % size + size, num_slots, size), num_slots]
        if has_tier:
            ends = sorted({min(end + i, num_slots) for end in ends for i in (0, 1)})
        return [*steps, *ends]


class Steps:
    """Begins and ends steps on a store. What its tier saves and loads at the end of a step is done when the next begins."""

    def __init__(self, store: PageStore) -> None:
        """Start before the first step."""
        self.store = store
        self._number = 0

    def begin(self) -> None:
        """Begin a step."""
        if self._number:
            end_transfers(self.store, self._number)
            self._number = 0

    def end(self) -> None:
        """End it."""
        self._number = take_transfers(self.store).number
        end_step(self.store)

"""Hits of eviction policies that learn from the requests, of pools with a host tier, and of models with windows. One pass
cannot give a curve for these: each pool size needs a simulation. Even with LRU in both, pool and tier do not form one stack,
since a loaded page is in both.

The hits equal those of `Scheduler` with one running request. A prompt takes and caches its pages in steps, an answer page by
page, since policies learn from each entry. Tokens that neither fill a page nor let one leave a window need no call, and all
simulations share the hashes. With a tier each step of an answer is followed by another one, since pages may be cached, and
queued for saving, only in the next step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from pagepool._core import (
    HashChain,
    PageIds,
    RequestPages,
    end_transfers,
    load_prefix,
    take_moves,
)
from pagepool.arguments import require_int
from pagepool.group_rules import make_rules
from pagepool.hashing import get_siphash_key
from pagepool.page_pool import PagePool
from pagepool.page_pool.pool import EvictionPolicy
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.simulation.allocator import HASH_SEED
from pagepool.replay.simulation.figures import HostFigures
from pagepool.replay.simulation.host import HostMemory
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.retention import Retention, WindowRule

Progress = Callable[[int], object]


class PolicySimulator:
    """Simulator of requests run one after another in pools of any size and policy, for a model without states.

    >>> from pagepool.replay import TraceRecord, make_requests
    >>> chat = make_requests([TraceRecord(i, 1024, 1, ids) for i, ids in enumerate([(7, 8), (5, 6), (7, 8)])])
    >>> PolicySimulator(chat, ModelPages(16)).count_hits("adaptive", num_pages=100)
    560
    """

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        model: ModelPages,
        max_batched_tokens: int = 8192,
        on_request: Progress | None = None,
    ) -> None:
        """Hash all pages; `on_request` gets the number of requests done. O(tokens) in time, 16 bytes of memory per page. Raise
        ArgumentError or ArgumentTypeError if a size is not a positive integer.
        """
        self._requests = requests
        self._model = model
        self._groups = model.make_groups()
        self._num_pages = [model.count_pages(request.num_slots) for request in requests]
        self._max_batched_tokens = require_int("max_batched_tokens", max_batched_tokens, minimum=1)
        self._chains: list[HashChain] = []
        key, size = get_siphash_key(HASH_SEED), model.hash_size
        for num_done, request in enumerate(requests, start=1):
            chain = HashChain(size, key)
            chain.extend(request.make_token_ids()[: request.num_slots // size * size])
            self._chains.append(chain)
            if on_request is not None:
                on_request(num_done)

    def count_hits(
        self, eviction: str, num_pages: int, on_request: Progress | None = None, *, windows: WindowRule = "ends"
    ) -> int:
        """Count the hit prompt tokens in a new pool of `num_pages`, including the null page, under a policy of `PagePool` and a
        rule `windows` of `Retention`. Skip requests larger than the pool. Errors as in `PagePool`. O(pages).
        """
        return self._run_all(Steps(PagePool(num_pages, True, eviction=cast("EvictionPolicy", eviction))), windows, on_request)

    def run_with_host(self, num_pages: int, host: HostMemory, on_request: Progress | None = None) -> tuple[int, HostFigures]:
        """Count the hit prompt tokens in a new LRU pool with a host tier, and the traffic between pool and tier, for a model
        with full attention only. Errors as in `PagePool` and `HostTier`.
        """
        pool, tier = PagePool(num_pages, True), host.make_tier()
        tier.bind(pool.store)
        hit_tokens = self._run_all(Steps(pool), "all", on_request)
        stats = tier.stats()
        loaded_tokens = stats.num_loaded_pages * self._model.page_size
        moved = stats.num_saved_pages, stats.num_loaded_pages, loaded_tokens, stats.num_evicted_pages, stats.num_refused_pages
        return hit_tokens, HostFigures(*moved)

    def _run_all(self, steps: "Steps", windows: WindowRule, on_request: Progress | None) -> int:
        pool, hit_tokens = steps.pool, 0
        groups = make_rules(self._groups, False, True, Retention(windows=windows)).groups
        for num_done, (request, chain) in enumerate(zip(self._requests, self._chains, strict=True), start=1):
            if self._num_pages[num_done - 1] < pool.num_pages:
                held = RequestPages(steps.store, groups, request.num_slots)
                steps.begin()
                found = load_prefix(steps.store, groups, chain, request.num_prompt_tokens)
                held.begin(request.num_prompt_tokens, found)
                lengths = self._list_lengths(request, found.num_hit_tokens, steps.store.has_tier)
                self._run(held, found.hits, chain, lengths, steps)
                hit_tokens += found.num_hit_tokens
            if on_request is not None:
                on_request(num_done)
        steps.begin()
        return hit_tokens

    def _run(
        self, held: RequestPages, hits: Iterable[PageIds], chain: HashChain, lengths: Iterable[int], steps: "Steps"
    ) -> None:
        num_computed_tokens = 0
        for num_tokens in lengths:
            steps.begin()
            held.allocate(num_tokens, num_computed_tokens, hits if num_computed_tokens == 0 else (), chain, num_tokens)
            steps.end()
            num_computed_tokens = num_tokens
        held.give_back()

    def _list_lengths(self, request: SimulatedRequest, num_hit_tokens: int, has_tier: bool) -> list[int]:
        """List the token counts at which a request takes, caches or skips pages: the ends of its steps. In the answer these are
        only the steps that fill a page or let a page leave a window and, with a tier, the steps after them.
        """
        num_tokens, num_slots = request.num_prompt_tokens, request.num_slots
        steps = range(num_hit_tokens + self._max_batched_tokens, num_tokens, self._max_batched_tokens)
        ends = [num_tokens, *self._model.list_page_ends(num_tokens, num_slots)]
        if has_tier:
            ends = sorted({min(end + i, num_slots) for end in ends for i in (0, 1)})
        return [*steps, *ends]


class Steps:
    """Simulated steps on a pool. Transfers of its tier at the end of a step complete when the next step begins."""

    def __init__(self, pool: PagePool) -> None:
        """Begin with no step in progress."""
        self.pool, self.store = pool, pool.store
        self._number = 0

    def begin(self) -> None:
        """Begin a step."""
        if self._number:
            end_transfers(self.store, self._number)
            self._number = 0

    def end(self) -> None:
        """End a step."""
        self._number = take_moves(self.store).number

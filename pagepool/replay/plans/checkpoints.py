"""Hits of a model with states, by the interval of its checkpoints. A hit must end where all states were kept, so one pass
cannot give a curve: each interval and pool size needs a simulation.

The hits equal those of `Scheduler` with one running request. In an answer, slots are allocated only where a page ends or leaves
a window, and at its end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pagepool.manager import CacheManager, CachePages
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.plan import CheckpointFigures
from pagepool.replay.simulation.runs import make_manager
from pagepool.replay.traces.simulated_request import SimulatedRequest


def count_states(requests: Sequence[SimulatedRequest], interval: int) -> int:
    """Return the most states that requests hold or keep: each request's current state, and checkpoints at multiples of the
    interval in its prompt, near the end of the prompt, and where it diverges from another prompt.

    >>> from pagepool.replay import TraceRecord, make_requests
    >>> count_states(make_requests([TraceRecord(0, 1024, 600, (7, 8))]), interval=256)
    7
    """
    return sum(request.num_prompt_tokens // interval + 3 for request in requests)


class CheckpointSimulator:
    """Simulator of requests run one after another in pools of any size, with checkpoints at any interval.

    >>> from pagepool.replay import TraceRecord, make_requests
    >>> chat = make_requests([TraceRecord(i, 1024, 1, ids) for i, ids in enumerate([(7, 8), (5, 6), (7, 8)])])
    >>> simulator = CheckpointSimulator(chat, ModelPages(num_state_groups=1), max_batched_tokens=512)
    >>> simulator.run(num_pages=1000, interval=256).hit_tokens  # up to 64 tokens before the end of the prompt
    960
    """

    def __init__(self, requests: Sequence[SimulatedRequest], model: ModelPages, max_batched_tokens: int = 8192) -> None:
        """Prepare the requests; `model` must have states."""
        self._requests = requests
        self._model = model
        self._max_batched_tokens = max_batched_tokens

    def run(
        self, num_pages: int, interval: int, eviction: str = "lru", on_request: Callable[[int], object] | None = None
    ) -> CheckpointFigures:
        """Run in a new pool of `num_pages`, including the null page. Skip requests larger than the pool. `on_request` gets the
        number of requests done. Errors as in `make_manager`. O(tokens).
        """
        manager = make_manager(num_pages, self._model, self._requests, interval, eviction=eviction)
        hit_tokens = num_copies = 0
        for num_done, request in enumerate(self._requests, start=1):
            if self._model.count_pages(request.num_slots) < num_pages:
                num_hits, num_copied = self._run_request(manager, replace(request))
                hit_tokens, num_copies = hit_tokens + num_hits, num_copies + num_copied
            if on_request is not None:
                on_request(num_done)
        first_group = self._model.num_attention_groups + sum(each.num_groups for each in self._model.windows)
        num_kept = sum(key.group_id >= first_group for key in manager.page_pool.cached_page_hash_to_page)
        return CheckpointFigures(interval, num_pages, hit_tokens, num_copies, num_kept, eviction)

    def _run_request(self, manager: CacheManager, request: SimulatedRequest) -> tuple[int, int]:
        """Run a request from its look-up to its end. Return its numbers of hit tokens, and of states copied and written."""
        pages, num_hits = manager.get_computed_pages(request)
        num_copies = 0
        hits: tuple[int, CachePages] | tuple[()] = (num_hits, pages)
        for end in self._list_ends(request, num_hits):
            request.num_tokens = max(request.num_tokens, end)
            manager.allocate_slots(request, end - max(request.num_computed_tokens, num_hits), *hits)
            hits, request.num_computed_tokens = (), end
            num_copies += len(manager.take_moves())
        manager.free(request)
        manager.free_page_hashes(request)
        return num_hits, num_copies

    def _list_ends(self, request: SimulatedRequest, num_hit_tokens: int) -> Iterator[int]:
        """List the token counts at which a request takes and caches pages: the ends of its steps. In the answer these are only
        the steps that fill a page or let a page leave a window, and the last one.
        """
        end, stop = num_hit_tokens, request.num_slots
        while end < request.num_prompt_tokens:
            end = min(request.num_prompt_tokens, end + self._max_batched_tokens)
            yield end
        if self._model.has_attention:
            yield from self._model.list_page_ends(end, stop)
        elif end < stop:
            yield stop

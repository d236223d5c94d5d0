"""Which free pages go first: with states that are kept, those without an entry, which nobody can hit, in every pool and however
they were given back; for other models those that were released first. `test_differential.py` has the order on random work.
"""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import FULL, PROMPT, STATE, keep_every, make_batch, make_manager, make_request, manager_state, run, start
from refusing import refused
from replays import SHARED_TRACE
from test_host_tier import complete, make_tiered

from pagepool import PageHash, PageHashWithGroupId, PagePool, RequestTraits
from pagepool.errors import ArgumentError
from pagepool.replay import make_requests, read_trace
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.checkpoints import CheckpointSimulator

NUM_SHORT = 60


def test_a_tier_is_as_its_pool() -> None:
    """What failed to be saved leaves pages there that nobody can hit."""
    manager = make_tiered(FULL, STATE, num_pages=12, num_host_pages=12)
    request = make_request("kept", 9)
    for num_tokens in (8, 1):
        run(manager, request, num_tokens)
    manager.free(request)
    manager.page_pool.free_page_ids(manager.page_pool.get_new_page_ids(11))
    complete(manager)
    assert manager.stats().host_tier.num_cached_pages == 3
    for i in range(NUM_SHORT):
        manager.free(start(manager, f"short {i}", [i] * 4))
        manager.page_pool.free_page_ids(manager.page_pool.get_new_page_ids(11))
        transfers = manager.take_moves()
        assert manager.fail(transfers.number, saves=range(len(transfers.saves.src))).page_ids == []
    assert manager.stats().host_tier.num_cached_pages == 3
    manager.check()


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_pool_that_is_given_is_divided(num_shards: int | None) -> None:
    """Unless the manager is refused, and only for a model whose states are kept."""
    pool = PagePool(10, enable_caching=True)
    pages = pool.get_new_pages(6)
    for place in (1, 3):
        pages[place].page_hash = PageHashWithGroupId(PageHash(place, ()), 0)
    pool.free_pages(pages)
    if num_shards is not None:
        taken = pool.get_new_pages(1, dp_shard_hint=1, data_parallel_size=num_shards)
        pool.free_pages(taken)
    before = pool.free_page_ids_in_order().tolist()
    make_manager(FULL, num_pages=10, page_pool=pool)
    with refused(lambda: pool.free_page_ids_in_order().tolist(), ArgumentError, "page_pool: "):
        make_manager(num_pages=10, page_pool=pool)  # whose pages were cached for another model
    assert pool.free_page_ids_in_order().tolist() == before
    pool.configuration = None
    make_manager(num_pages=10, page_pool=pool).check()
    assert pool.free_page_ids_in_order().tolist() == [page for page in before if page not in (2, 4)] + [2, 4]
    shard = {} if num_shards is None else {"dp_shard_hint": 0, "data_parallel_size": num_shards}
    assert pool.get_new_page_ids(3, **shard).tolist() == ([7, 8, 9] if num_shards is None else [1, 3, 2])
    pool.check()


@pytest.mark.parametrize("specs", [(FULL, keep_every(None)), (FULL, STATE, keep_every(None))])
@pytest.mark.parametrize("enable_caching", [True, False])
def test_places_to_resume_are_refused_with_states_that_are_not_kept(specs: tuple[Any, ...], enable_caching: bool) -> None:
    manager = make_manager(*specs, enable_caching=enable_caching)
    batch, request = make_batch(manager), make_request("a", 20, resume_at=[8])
    message = r"^resume_at: got \[8\], allowed for a model with states without checkpoint_interval: none$"
    with refused(lambda: manager_state(manager), ArgumentError, message):
        batch.admit(0, PROMPT[:20], traits=RequestTraits(resume_at=(8,)))
    with refused(lambda: manager_state(manager), ArgumentError, message):
        manager.allocate_slots(request, 20)
    request.resume_at = ()
    assert batch.admit(0, PROMPT[:20], traits=RequestTraits(resume_at=[])) == 0
    assert manager.allocate_slots(request, 20) is not None


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the trace is not here")
def test_hits_of_a_recorded_trace() -> None:
    """Those that the plan of Qwen3-Next has in 200 GiB, with a checkpoint every 8,704 tokens of a prompt."""
    requests = make_requests(read_trace(str(SHARED_TRACE)))
    simulator = CheckpointSimulator(requests, ModelPages(page_size=544, num_state_groups=3))
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    assert round(100 * simulator.run(16_062, 8704).hit_tokens / num_tokens, 2) == 19.25

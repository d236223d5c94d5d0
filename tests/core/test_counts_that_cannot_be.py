"""Numbers of tokens and pages that no request and no pool can have, and tables of two owners."""

import gc

import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    MultiGroupPageTable,
    PageTable,
    RequestTraits,
    RunningBatch,
)
from pagepool.compat import easydel
from pagepool.errors import ArgumentError

FULL = CacheGroupSpec(FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=8, dtype="float16", use_mla=False))
PROMPT = list(range(12))


def make_manager() -> CacheManager:
    """Make a manager that has cached two pages of the prompt."""
    manager = CacheManager(16, [FULL], 64)
    first = EngineRequest("first", PROMPT)
    manager.allocate_slots(first, 8)
    manager.free(first)
    return manager


@pytest.mark.parametrize("num_new_tokens", [12, 50])
def test_hits_are_not_counted_among_the_new_tokens(num_new_tokens: int) -> None:
    """The usual mistake is to pass the tokens of the whole prompt behind its hits."""
    manager = make_manager()
    request = EngineRequest("second", PROMPT)
    hits, num_hits = manager.get_computed_pages(request)
    with pytest.raises(
        ArgumentError, match=rf"^request 'second': got {num_new_tokens} tokens behind 8 hit ones, allowed: fewer than"
    ):
        manager.allocate_slots(request, num_new_tokens, num_hits, hits)
    pages = manager.allocate_slots(request, 4, num_hits, hits)
    assert pages is not None
    assert pages.get_page_ids() == ([3],)
    request.num_computed_tokens = 8
    with pytest.raises(ArgumentError, match="allowed: 0 new ones for a request that holds pages already"):
        manager.allocate_slots(request, 4, num_hits)


def test_unknown_tokens_get_slots_and_are_not_cached() -> None:
    manager = CacheManager(16, [FULL], 64)
    request = EngineRequest("a", [1, 2, 3, 4, 5])
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 5
    manager.allocate_slots(request, 6)  # drafts, or tokens in flight: of a request that runs they may be unknown
    assert manager.get_page_ids("a") == ([1, 2, 3],)
    assert manager.stats().num_cached_pages == 1
    manager.check()


def test_the_drop_in_takes_what_its_engine_takes() -> None:
    manager = easydel.CacheManager(16, [FULL], 64)
    pages = manager.allocate_slots(EngineRequest("a", [1, 2, 3, 4, 5]), 50)
    assert pages is not None
    assert len(pages.get_page_ids()[0]) == 13


@pytest.mark.parametrize("stop", [13, 16, 2**40, 2**63 - 2])
def test_a_lease_ends_within_the_known_tokens(stop: int) -> None:
    manager = make_manager()
    batch = RunningBatch(manager, PageTable(2, 16, 64))
    batch.admit(0, PROMPT)
    for lease in (
        lambda: batch.lease(0, 0, stop, seconds=60),
        lambda: manager.lease(EngineRequest("b", PROMPT), 0, stop, seconds=60),
    ):
        with pytest.raises(ArgumentError, match=rf"^stop: got {stop}, allowed: 0 to 12, the known tokens$"):
            lease()
    assert manager.leases == ()
    assert batch.lease(0, 0, 12, seconds=60).page_ids == [1, 2, 3]
    assert batch.expect(0, 0, stop, seconds=60) == 3  # a hint: tokens behind the last are left out


def test_a_lease_has_no_end_that_stands_for_another() -> None:
    manager = make_manager()
    batch = RunningBatch(manager, PageTable(2, 16, 64))
    batch.admit(0, PROMPT)
    with pytest.raises(ArgumentError, match=rf"^stop: got {2**63 - 1}, allowed: 0 to {2**63 - 2}$"):
        batch.lease(0, 0, 2**63 - 1, seconds=60)
    with pytest.raises(ArgumentError, match=r"^start: got 14, allowed: 0 to 12, the known tokens$"):
        batch.lease(0, 14, 16, seconds=60)
    assert batch.lease(0, 0, seconds=60).page_ids == [1, 2, 3]


@pytest.mark.parametrize("size", [0, -1])
def test_there_is_a_shard_at_least(size: int) -> None:
    manager = make_manager()
    request = EngineRequest("a", PROMPT)
    for call in (
        lambda: manager.allocate_slots(request, 12, data_parallel_size=size),
        lambda: manager.get_computed_pages(request, dp_shard_hint=0, data_parallel_size=size),
    ):
        with pytest.raises(ArgumentError, match=rf"^data_parallel_size: got {size}, allowed: 1 to "):
            call()
    assert manager.page_pool.get_num_free_pages() == manager.page_pool.num_pages - 1


def test_a_pool_has_a_page_beside_the_null_page() -> None:
    with pytest.raises(ArgumentError, match=r"^num_pages: got 1, which is the null page, allowed with groups: at least 2$"):
        CacheManager(1, [FULL], 64)
    assert CacheManager(1, [], 64).num_pages == 1
    with pytest.raises(ArgumentError, match=r"^num_pages\['kv'\]: got 1099511627776, allowed: 2 to 1073741824$"):
        CacheManager({"kv": 2**40}, [FULL], 64)


def test_a_table_is_filled_by_one_batch() -> None:
    table, groups = PageTable(2, 16, 64), MultiGroupPageTable(2, 64, 64, [4])
    for shared, again in ((table, table), (groups, groups), (groups, groups.page_tables[0])):
        manager = make_manager()
        batch = RunningBatch(manager, shared)
        with pytest.raises(ArgumentError, match=r"^page_table: got one that another batch fills, allowed: one of its own"):
            RunningBatch(manager, again)
        batch.admit(0, PROMPT)
        batch.release([0])
        del batch
        gc.collect()
        RunningBatch(manager, again).admit(0, PROMPT)
        gc.collect()
        with pytest.raises(ArgumentError, match=r"^page_table: got one with pages in row 0, allowed: empty rows; clear_row"):
            RunningBatch(manager, again)
        again.clear_row(0)


@pytest.mark.parametrize("row", [0, 1])
def test_a_step_does_not_put_its_token_behind_a_prompt_that_is_not_computed(row: int) -> None:
    batch = RunningBatch(make_manager(), PageTable(2, 16, 64))
    batch.admit(row, PROMPT, max_num_new_tokens=5, traits=RequestTraits(look_up=False))
    batch.admit(1 - row, PROMPT[:6], traits=RequestTraits(look_up=False))
    before = batch.num_tokens.tolist(), batch.num_computed_tokens.tolist(), batch.get_page_ids(row)
    message = (
        rf"^row {row} \(at {row}\): got a token behind 7 known ones that are not computed, allowed: one behind computed ones"
    )
    with pytest.raises(ArgumentError, match=message):
        batch.step([0, 1], [1, 2])
    assert (batch.num_tokens.tolist(), batch.num_computed_tokens.tolist(), batch.get_page_ids(row)) == before
    batch.plan([row], 7)
    assert batch.step([0, 1], [1, 2]).num_grown == 2
    batch.append([row], [3])
    with pytest.raises(ArgumentError, match="behind 1 known one"):
        batch.step([row], [4])
    batch.plan([row], 1)
    assert batch.step([row], [4]).num_grown == 1
    batch.check()

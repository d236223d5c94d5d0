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


@pytest.mark.usefixtures("quick_collection")
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

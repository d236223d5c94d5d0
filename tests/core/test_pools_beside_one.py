"""Pools by kind beside one pool: the random work with several pools is in `test_differential.py`."""

from __future__ import annotations

from typing import Any

import pytest
from settings import POOL_SETTINGS, Setting, sizes

import pagepool
from pagepool import CacheManager, MultiGroupPageTable, RunningBatch
from pagepool.errors import DoubleFreeError, PageIdError, RequestTooLargeError

NUM_ROWS = 5
HYBRID = POOL_SETTINGS[0]


def make(setting: Setting, num_pages: Any, num_rows: int = NUM_ROWS) -> RunningBatch:
    manager = setting.manager(CacheManager, setting.cache_groups(pagepool), num_pages, hash_seed=1)
    tables = MultiGroupPageTable(num_rows, setting.max_model_len, 64, [group.page_size for group in setting.groups])
    return RunningBatch(manager, tables)


def test_errors_name_the_page_and_its_pool() -> None:
    manager = make(HYBRID, sizes(16, 8))._manager
    states = manager.pools["states"]
    ids = states.get_new_page_ids(3)
    assert ids.tolist() == [1, 2, 3]
    assert [page.page_id for page in states.pages[1:]] == [1, 2, 3, 4, 5, 6, 7]
    assert [states.pages[page_id].ref_cnt for page_id in (3, 4, -1)] == [1, 0, 0]
    states.free_page_ids(ids)
    with pytest.raises(DoubleFreeError, match=r"page 1 of the pool 'states' \(at 0 of 3\)"):
        states.free_page_ids(ids)
    for call in (lambda: states.pages[8], lambda: states.evict_pages([8]), lambda: states.touch_page_ids([8])):
        with pytest.raises(PageIdError, match="got 8, allowed in the pool 'states': 0 to 7"):
            call()


def test_a_request_that_is_too_large_names_the_pool() -> None:
    batch = make(HYBRID, sizes(4, 8))
    with pytest.raises(RequestTooLargeError, match="4 pages at once, the pool 'kv' has 3"):
        batch.admit(0, [1] * 16)
    with pytest.raises(RequestTooLargeError, match="4 pages, the pool 'kv' has 3"):
        batch._manager.require_capacity(16)

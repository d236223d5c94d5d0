"""Pools by kind beside one pool: the random work with several pools is in `test_differential.py`."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from admissions import admission
from settings import POOL_SETTINGS, Setting, in_pool, sizes

import pagepool
from pagepool import CacheManager, MultiGroupPageTable, RunningBatch
from pagepool.errors import DoubleFreeError, PageIdError, RequestTooLargeError

NUM_ROWS = 5
NUM_TURNS = 100
ONE_EACH = 2048  # pages, so that none is evicted
ROOMY = [setting for setting in POOL_SETTINGS if setting.enable_caching]
HYBRID = POOL_SETTINGS[0]


def make(setting: Setting, num_pages: Any, num_rows: int = NUM_ROWS) -> RunningBatch:
    manager = setting.manager(CacheManager, setting.cache_groups(pagepool), num_pages, hash_seed=1)
    tables = MultiGroupPageTable(num_rows, setting.max_model_len, 64, [group.page_size for group in setting.groups])
    return RunningBatch(manager, tables)


@pytest.mark.parametrize("setting", ROOMY, ids=lambda setting: setting.name)
def test_pools_without_pressure_hit_what_one_pool_hits(setting: Setting) -> None:
    """Two batches under the same random calls; their rows never lack pages."""
    names = dict.fromkeys(group.pool for group in setting.groups)
    in_one = Setting(
        setting.name,
        tuple(in_pool(group, "kv") for group in setting.groups),
        use_eagle=setting.use_eagle,
        windows=setting.windows,
    )
    batches = make(setting, dict.fromkeys(names, ONE_EACH)), make(in_one, len(names) * ONE_EACH)
    rng, num_hit_tokens = Random(setting.name), 0
    families = [rng.choices(range(3), k=setting.max_model_len) for _ in range(3)]
    for turn in range(NUM_TURNS):
        [rows] = {tuple(batch.is_admitted.nonzero()[0].tolist()) for batch in batches}
        free = [row for row in range(NUM_ROWS) if row not in rows]
        if free and rng.random() < 0.7:
            tokens = [*rng.choice(families)[: rng.randint(1, setting.max_model_len - 2)], rng.randrange(3)]
            options = {"num_tokens": rng.randint(1, len(tokens))}
            hits = [batch.admit(free[0], tokens, **admission(**options)) for batch in batches]
            assert hits[0] == hits[1] is not None, f"turn {turn}: {hits}"
            num_hit_tokens += hits[0]
        nums = batches[0].num_tokens - batches[0].num_computed_tokens
        for batch in batches:
            batch.take_moves()
            batch.plan(nums.nonzero()[0], nums[nums > 0])
        gone = [row for row in rows if rng.random() < 0.4]
        for batch in batches:
            batch.take_moves()
            batch.release(gone)
    for batch in batches:
        batch.check()
    assert num_hit_tokens > 0 or any(group.kind == "mamba" and not group.interval for group in setting.groups)


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

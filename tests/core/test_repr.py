"""The repr of large objects: sizes and state in one line."""

from __future__ import annotations

from hybrids import FULL, make_manager

from pagepool import EngineRequest, MultiGroupPageTable, PageTable, RunningBatch


def test_sizes_and_state_in_one_line() -> None:
    manager = make_manager(FULL, num_pages=16, eviction="adaptive")
    table = PageTable(3, 16, 64)
    batch = RunningBatch(manager, table)
    assert repr(batch) == "RunningBatch(num_rows=3, num_admitted=0, max_num_tokens=64, num_tokens=0, num_computed_tokens=0)"
    manager.allocate_slots(EngineRequest("a", [1, 2, 3, 4, 5]), 5)
    batch.admit(1, [1, 2, 3, 4, 6, 7], num_tokens=5)
    shown = "PagePool(num_pages=16, num_free_pages=12, num_cached_pages=1, enable_caching=True, eviction='adaptive')"
    assert repr(manager.page_pool) == shown
    assert repr(manager) == (
        "CacheManager(num_pages=16, num_free_pages=12, num_cached_pages=1, num_requests=1, num_kv_cache_groups=1, "
        "max_model_len=64, enable_caching=True, eviction='adaptive')"
    )
    assert repr(batch) == "RunningBatch(num_rows=3, num_admitted=1, max_num_tokens=64, num_tokens=6, num_computed_tokens=5)"
    shown = f"PageTable(max_num_reqs=3, max_num_pages_per_req=16, num_rows=1, num_pages=2, cpu_version={table.cpu_version})"
    assert repr(table) == shown
    tables = MultiGroupPageTable(2, 64, 64, [16, 32])
    assert repr(tables) == (
        "MultiGroupPageTable(page_sizes=[16, 32], page_tables=["
        "PageTable(max_num_reqs=2, max_num_pages_per_req=4, num_rows=0, num_pages=0, cpu_version=0), "
        "PageTable(max_num_reqs=2, max_num_pages_per_req=2, num_rows=0, num_pages=0, cpu_version=0)])"
    )

"""Calls that are wrong, and that the types refuse: each comment is an error once its line is none."""

import numpy as np

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    PageHashing,
    PagePool,
    PageTable,
    Retention,
    RunningBatch,
)


def make() -> None:
    spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")  # type: ignore[call-arg]
    CacheGroupSpec("full")  # type: ignore[arg-type]
    CacheManager(100, [spec], 64)  # type: ignore[list-item]
    CacheManager("100", [CacheGroupSpec(spec)], 64)  # type: ignore[arg-type]
    CacheManager(100, [CacheGroupSpec(spec)], 64, hashing=PageHashing(hash_algo=5))  # type: ignore[arg-type]
    CacheManager(100, [CacheGroupSpec(spec)], 64, True, False, "sha256")  # type: ignore[arg-type, call-arg]
    CacheManager(100, [CacheGroupSpec(spec)], 64, window_slack=32)  # type: ignore[call-arg]
    CacheManager(100, [CacheGroupSpec(spec)], 64, caches="late")  # type: ignore[arg-type]
    Retention(64)  # type: ignore[arg-type, call-arg]
    PagePool(100)  # type: ignore[call-arg]


def allocate(manager: CacheManager, request: EngineRequest) -> list[int]:
    manager.allocate_slots(request)  # type: ignore[call-arg]
    manager.allocate_slots("a", 3)  # type: ignore[arg-type]
    manager.allocate_slots(request, 3, num_tokens=3)  # type: ignore[call-arg]
    manager.allocate_slots(request, 3).get_page_ids()  # type: ignore[union-attr]
    manager.get_page_ids(request)  # type: ignore[arg-type]
    manager.usage = 0.5  # type: ignore[misc]
    return manager.get_page_ids("a")  # type: ignore[return-value]


def run(batch: RunningBatch, table: PageTable) -> int:
    batch.step(0, 1)  # type: ignore[arg-type]
    batch.step([0])  # type: ignore[call-arg]
    batch.step(["0"], [1])  # type: ignore[list-item]
    batch.step([0], [1.5])  # type: ignore[list-item]
    batch.step(np.zeros(1), [1])  # type: ignore[arg-type]
    batch.settle([0], failed=True)  # type: ignore[arg-type]
    batch.settle(batch.new_step(), [1], None, True)  # type: ignore[call-arg]
    batch.release([0], num_computed_tokens=0)  # type: ignore[call-arg]
    batch.plan([0], num_lookahead_tokens=1)  # type: ignore[call-arg]
    batch.num_tokens = np.zeros(8, dtype=np.int32)  # type: ignore[misc]
    batch.append_row([1], 0)  # type: ignore[attr-defined]
    table.append_row(1, 0)  # type: ignore[arg-type]
    return batch.admit(0, [1, 2])  # type: ignore[return-value]

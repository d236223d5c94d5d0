"""An engine that allocates request by request."""

from typing import assert_type

import numpy as np
import numpy.typing as npt

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CachePages,
    CacheStats,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    Lease,
    MambaSpec,
    Moves,
    PageCopies,
    PageHashing,
    PrefixProbe,
    Request,
    Retention,
    SlidingWindowSpec,
    StateWrites,
)


def make_manager(num_pages: int) -> CacheManager:
    full = FullAttentionSpec(page_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    window = SlidingWindowSpec(
        page_size=16, num_kv_heads=8, head_size=128, dtype=np.dtype("float16"), use_mla=False, sliding_window=512
    )
    groups = [CacheGroupSpec(full), CacheGroupSpec(window, layer_names=["model.layers.1"])]
    retention = Retention(window_slack=32, window_interval=2048, max_leased_share=0.1)
    assert_type(retention.window_interval, int | None)
    return CacheManager(
        num_pages,
        groups,
        4096,
        host_tier=HostTier(100),
        retention=retention,
        caches="computed",
        hashing=PageHashing(hash_algo="sha256", hash_seed=b"seed"),
    )


def make_hybrid() -> CacheGroupSpec:
    return CacheGroupSpec(MambaSpec(page_size=64, shapes=((4, 8), (16,)), dtype="float32", checkpoint_interval=256))


def start(manager: CacheManager, request: Request) -> list[int] | None:
    hits, num_hit_tokens = manager.get_computed_pages(request)
    assert_type(hits, CachePages)
    assert_type(num_hit_tokens, int)
    new = manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits)
    if new is None:
        return None
    (ids,) = new.get_page_ids()
    assert_type(ids, list[int])
    (both,) = (hits + new).get_page_ids()
    return both


def run(manager: CacheManager) -> None:
    request = EngineRequest("a", [1, 2, 3], cache_salt="tenant", lora_id=("name", "path"))
    arrays: npt.NDArray[np.int32] = np.arange(4, dtype=np.int32)
    other = EngineRequest("b", arrays.tolist())
    start(manager, request)
    request.append_output_token_ids(4)
    request.append_output_token_ids([5, 6])
    assert_type(manager.get_page_ids("a"), tuple[list[int], ...])
    assert_type(manager.probe(other), PrefixProbe)
    assert_type(manager.usage, float)
    assert_type(manager.page_pool.ref_counts(), npt.NDArray[np.int32])
    manager.free(request, num_computed_tokens=2)
    manager.check()


def look(manager: CacheManager, request: Request) -> float:
    stats = manager.stats()
    assert_type(stats, CacheStats)
    tier = stats.host_tier
    return stats.queries.hit_rate if tier is None else tier.num_saved_pages / stats.num_pages


def move(manager: CacheManager, request: Request) -> list[tuple[int, int]]:
    with manager.lease(manager.get_page_ids(request.request_id)[0]) as lease:
        assert_type(lease, Lease)
        sent = lease.page_ids
    assert_type(sent, list[int])
    moves = manager.take_moves()
    assert_type(moves, Moves)
    copies = moves.copies
    assert_type(copies, PageCopies)
    assert_type(moves.loads, PageCopies)
    assert_type(moves.writes, StateWrites)
    manager.complete(moves.number)
    return list(zip(copies.src.tolist(), copies.dst.tolist(), strict=True))

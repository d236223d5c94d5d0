"""What `bench.races.vllm` compares: vLLM as it is, with an early return in Python, with pagepool, and without a KV manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager


def leave_alone() -> None:
    """Measure vLLM as it is."""


def return_early() -> None:
    """Return at once where a running request neither needs a block nor fills one, and no block leaves a window."""
    allocate, cache = KVCacheManager.allocate_slots, KVCacheManager.cache_blocks

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        if not args and num_new_tokens > 0 and options.keys() <= {"num_lookahead_tokens"}:
            num_computed = request.num_computed_tokens
            num_tokens = num_computed + num_new_tokens
            num_slots = min(num_tokens + options.get("num_lookahead_tokens", 0), self.max_model_len)
            num_cacheable = min(num_tokens, request.num_tokens) if self.enable_caching else 0
            if is_idle(self, request.request_id, num_slots, num_computed - request.num_in_flight_tokens, num_cacheable):
                return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *args, **options)

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        if not is_idle(self, request.request_id, 0, 0, min(num_computed_tokens, request.num_tokens)):
            cache(self, request, num_computed_tokens)

    KVCacheManager.allocate_slots, KVCacheManager.cache_blocks = allocate_slots, cache_blocks


def is_idle(self: Any, name: str, num_slots: int, num_processed: int, num_cacheable: int) -> bool:
    """Return whether nothing changes for a request in a manager of full attention and windows."""
    for manager in self.coordinator.single_type_managers:
        kind, size, blocks = type(manager), manager.block_size, manager.req_to_blocks.get(name)
        if (
            kind not in (FullAttentionManager, SlidingWindowManager)
            or size != manager.block_pool.hash_block_size
            or blocks is None
            or num_slots > len(blocks) * size
            or num_cacheable // size > manager.num_cached_block.get(name, -1)
        ):
            return False
        if kind is SlidingWindowManager and num_processed:
            num_dropped = min(manager.get_num_skipped_tokens(num_processed) // size, len(blocks))
            if num_dropped > 0 and blocks[num_dropped - 1] is not manager.block_pool.null_block:
                return False
    return True


def install_pagepool() -> None:
    """Replace parts of vLLM by pagepool's."""
    from pagepool.compat import vllm

    vllm.install()


def remove_manager() -> None:
    """Let the manager and the hashing do nothing, the ceiling: each prompt is cached, each request has its blocks."""

    def find_all(self: Any, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        num_hits = (request.num_tokens - 1) // self.coordinator.scheduler_block_size
        return self.empty_kv_cache_blocks, num_hits * self.coordinator.scheduler_block_size, 0

    def make_hasher(*_: Any) -> Callable[[Any], list[Any]]:
        return lambda _: []

    def give(result: Any) -> Callable[..., Any]:
        return lambda *_, **__: result

    for name in ("cache_blocks", "free", "new_step_starts", "remove_skipped_blocks"):
        setattr(KVCacheManager, name, give(None))
    for name in ("allocate_slots", "get_blocks"):
        setattr(KVCacheManager, name, lambda self, *_, **__: self.empty_kv_cache_blocks)
    KVCacheManager.take_new_block_ids = KVCacheManager.take_events = give([])
    KVCacheManager.take_boundary_state_offloads = give({})
    KVCacheManager.take_kv_cache_block_copies = give(([], []))
    KVCacheManager.get_computed_blocks = find_all
    kv_cache_utils.get_request_block_hasher = make_hasher


RIVALS: dict[str, Callable[[], None]] = {
    "vllm": leave_alone,
    "early": return_early,
    "pagepool": install_pagepool,
    "null": remove_manager,
}

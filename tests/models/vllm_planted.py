"""Bugs that are planted in vLLM itself, to prove that the differential test would catch such bugs in what replaces it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from vllm.v1.core import block_pool, kv_cache_coordinator, kv_cache_manager, kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.request import Request, RequestStatus

Pool = block_pool.BlockPool
Map = block_pool.BlockHashToBlockMap
Queue = kv_cache_utils.FreeKVCacheBlockQueue
Manager = kv_cache_manager.KVCacheManager
Blocks = kv_cache_manager.KVCacheBlocks
Hybrid = kv_cache_coordinator.HybridKVCacheCoordinator
Coordinator = kv_cache_coordinator.KVCacheCoordinator
Single = single_type_kv_cache_manager.SingleTypeKVCacheManager
Full = single_type_kv_cache_manager.FullAttentionManager
Window = single_type_kv_cache_manager.SlidingWindowManager


class Bug(NamedTuple):
    """A function of vLLM, what makes a wrong one of it, and a setting in which that must show."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    setting: str = "full"
    since: tuple[int, ...] = ()
    """The version of vLLM that first had what is made wrong."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the function for the length of the context."""
        original = vars(self.owner)[self.name]
        is_class_method = isinstance(original, classmethod)
        wrong = self.make(original.__func__ if is_class_method else original)
        wrong.__name__ = self.name
        with mock.patch.object(self.owner, self.name, classmethod(wrong) if is_class_method else wrong):
            yield


def forget_lag(original: Any) -> Any:
    """Cache tokens that multi-token prediction may compute again."""
    return lambda self, num_computed_tokens, group_id: original(
        self, num_computed_tokens + self.num_reprefillable_tokens, group_id
    )


def lag_too_little(original: Any) -> Any:
    return lambda self, num_computed_tokens, group_id: original(
        self, num_computed_tokens + bool(self.num_reprefillable_tokens), group_id
    )


def tell_no_stored_of_others(original: Any) -> Any:
    """Report blocks of the first group only."""

    def cache_full_blocks(self: Any, request: Any, **options: Any) -> None:
        enabled, self.enable_kv_cache_events = self.enable_kv_cache_events, options["kv_cache_group_id"] == 0
        try:
            original(self, request, **options)
        finally:
            self.enable_kv_cache_events = enabled

    return cache_full_blocks


def touch_without_queue(original: Any) -> Any:
    """Leave a free block in the queue when it hits, where it is one of several."""

    def touch(self: Any, blocks: Any) -> None:
        if len(blocks) < 3:
            original(self, blocks)
            return
        original(self, blocks[:-1])
        if not blocks[-1].is_null:
            blocks[-1].ref_cnt += 1

    return touch


def count_no_touch(original: Any) -> Any:
    def touch(self: Any, blocks: Any) -> None:
        with mock.patch.object(self, "metrics_collector", None):
            original(self, blocks)

    return touch


def widen_window(original: Any) -> Any:
    return lambda self, num_computed_tokens: max(0, original(self, num_computed_tokens) - 1)


def hit_short_of_window(original: Any) -> Any:
    return lambda cls, window_size, block_size, use_eagle: max(1, original(cls, window_size + 1, block_size, use_eagle))


def take_last_duplicate(original: Any) -> Any:
    def get_one_block(self: Any, key: Any) -> Any:
        blocks = self._cache.get(key)
        return list(blocks.values())[-1] if isinstance(blocks, dict) else blocks

    return get_one_block


def drop_all_duplicates(original: Any) -> Any:
    def pop(self: Any, key: Any, block_id: int) -> Any:
        block = original(self, key, block_id)
        if block is not None:
            self._cache.pop(key, None)
        return block

    return pop


def forget_further_hashes(original: Any) -> Any:
    def remove(self: Any, block: Any) -> Any:
        if block.block_hash is not None:
            self.cached_block_hashes_by_block.pop(block.block_id, None)
        return original(self, block)

    return remove


def evict_no_held_blocks(original: Any) -> Any:
    return lambda self, block_ids: original(
        self, {block_id for block_id in block_ids if block_id >= len(self.blocks) or not self.blocks[block_id].ref_cnt}
    )


def keep_hashes_at_reset(original: Any) -> Any:
    """Forget what blocks are cached as, and leave the number of hashed tokens."""

    def reset_prefix_cache(self: Any) -> bool:
        kept = [block.block_hash_num_tokens for block in self.blocks]
        done = original(self)
        if done:
            for block, num_tokens in zip(self.blocks, kept, strict=True):
                block._block_hash_num_tokens = num_tokens
        return done

    return reset_prefix_cache


def allocate_with(**changes: Any) -> Callable[[Any], Any]:
    """Return what makes an `allocate_slots` that ignores some of its keywords."""

    def make(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **options: Any) -> Any:
            return original(
                self, request, *args, **(options | {key: value for key, value in changes.items() if key in options})
            )

        return allocate_slots

    return make


def quick_return(returns_quickly: Callable[..., bool], caches: bool = True) -> Callable[[Any], Any]:
    """Return what makes an `allocate_slots` that returns early where no group needs a block."""

    def make(original: Any) -> Any:
        def allocate_slots(self: Any, request: Request, num_new_tokens: int, *args: Any, **options: Any) -> Any:
            ahead = options.get("num_lookahead_tokens", 0)
            num_tokens = min(request.num_computed_tokens + num_new_tokens + ahead, self.max_model_len)
            managers = self.coordinator.single_type_managers
            held = [len(manager.req_to_blocks.get(request.request_id, ())) * manager.block_size for manager in managers]
            running = request.status == RequestStatus.RUNNING and not args and num_new_tokens > 0
            if not running or min(held) < num_tokens or not returns_quickly(self, request, num_new_tokens):
                return original(self, request, num_new_tokens, *args, **options)
            if caches and self.enable_caching:
                self.coordinator.cache_blocks(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))
            return self.empty_kv_cache_blocks

        return allocate_slots

    return make


def cache_what_is_in_flight(original: Any) -> Any:
    return lambda self, request, num_computed_tokens: original(
        self, request, min(request.num_tokens, num_computed_tokens + request.num_in_flight_tokens)
    )


def cache_late(original: Any) -> Any:
    """Cache a block a token too late."""
    return lambda self, request, num_tokens, *args, **options: original(self, request, num_tokens - 1, *args, **options)


def give_empty_lists(original: Any) -> Any:
    return lambda self, allow_none=False, *, group_ids=None: original(self, False, group_ids=group_ids)


def hash_without(name: str) -> Callable[[Any], Any]:
    """Return what makes extra keys of a request that ignore one of its attributes."""

    def make(original: Any) -> Any:
        def generate(request: Any, *args: Any) -> Any:
            with mock.patch.object(request, name, None):
                return original(request, *args)

        return generate

    return make


def hash_first_image_only(original: Any) -> Any:
    def generate(request: Any, start: int, end: int, first: int) -> Any:
        keys, following = original(request, start, end, first)
        return keys[:1], following

    return generate


def drop_eagle_twice(original: Any) -> Any:
    def find(cls: Any, *args: Any, **options: Any) -> Any:
        blocks, num_tokens = original(cls, *args, **options)
        if options["drop_eagle_block"] and num_tokens > 2 * options["alignment_tokens"]:
            for group in blocks:
                group.pop()
            return blocks, num_tokens - options["alignment_tokens"]
        return blocks, num_tokens

    return find


def keep_no_boundaries(original: Any) -> Any:
    return lambda cls, *args, **options: original(cls, *args, **options | {"reachable_boundaries": ()})


def has_no_window(manager: Any, *_: Any) -> bool:
    return not any(isinstance(one, Window) for one in manager.coordinator.single_type_managers)


BUGS = {
    "caches tokens that are computed again": Bug(
        Coordinator, "get_num_cacheable_tokens", forget_lag, "full, multi-token prediction", (0, 32)
    ),
    "lags by a token too little in several groups": Bug(
        Hybrid, "get_num_cacheable_tokens", lag_too_little, "full and window, multi-token prediction", (0, 32)
    ),
    "frees blocks in reverse": Bug(
        Pool, "free_blocks", lambda original: lambda self, ordered_blocks: original(self, reversed(list(ordered_blocks)))
    ),
    "frees blocks without a hash at the end": Bug(Queue, "prepend_n", lambda _: lambda self, blocks: self.append_n(blocks)),
    "frees blocks without a hash in reverse": Bug(
        Queue, "prepend_n", lambda original: lambda self, blocks: original(self, blocks[::-1]), "full, uncached"
    ),
    "misses an event of a removal": Bug(
        Pool, "_emit_block_removed_events", lambda original: lambda self, block_hashes: original(self, block_hashes[1:])
    ),
    "misses events of the second group": Bug(Pool, "cache_full_blocks", tell_no_stored_of_others, "full and window"),
    "leaves a hit in the queue": Bug(Pool, "touch", touch_without_queue),
    "reports no touch": Bug(Pool, "touch", count_no_touch, "full, no events, metrics"),
    "frees what is behind the window too late": Bug(Window, "get_num_skipped_tokens", widen_window, "full and window, async"),
    "hits with too long a window": Bug(Window, "_contiguous_blocks_for_hit", hit_short_of_window, "window"),
    "hits the last duplicate": Bug(Map, "get_one_block", take_last_duplicate),
    "evicts all duplicates": Bug(Map, "pop", drop_all_duplicates),
    "forgets further hashes of a block": Bug(
        Pool, "_remove_cached_block_hashes", forget_further_hashes, "full and mamba, hits within blocks"
    ),
    "misses a reuse": Bug(Pool, "_notify_reuse", lambda original: lambda self, blocks: original(self, list(blocks)[1:])),
    "evicts free blocks only": Bug(Pool, "evict_blocks", evict_no_held_blocks),
    "keeps numbers of hashed tokens at a reset": Bug(Pool, "reset_prefix_cache", keep_hashes_at_reset),
    "caches what is being loaded": Bug(
        Manager, "allocate_slots", allocate_with(delay_cache_blocks=False), "full, external tokens"
    ),
    "ignores reserved blocks": Bug(Manager, "allocate_slots", allocate_with(reserved_blocks=0)),
    "ignores the watermark": Bug(Manager, "allocate_slots", allocate_with(has_scheduled_reqs=False), "full and window"),
    "admits what does not fit": Bug(Manager, "allocate_slots", allocate_with(full_sequence_must_fit=False)),
    "zeroes what is being loaded": Bug(
        Manager, "allocate_slots", allocate_with(skip_zeroing_group_ids=()), "full and window, mixed precision", (0, 32)
    ),
    "forgets slots for drafts": Bug(Manager, "allocate_slots", allocate_with(num_lookahead_tokens=0), "full, async, drafts"),
    "returns early without a look at the window": Bug(
        Manager, "allocate_slots", quick_return(lambda *_: True), "full and window, async"
    ),
    "returns early without caching": Bug(Manager, "allocate_slots", quick_return(has_no_window, caches=False), "full, async"),
    "caches what is in flight": Bug(Manager, "cache_blocks", cache_what_is_in_flight, "full, async, drafts"),
    "caches a token too late": Bug(Single, "cache_blocks", cache_late),
    "takes hits for free blocks": Bug(Single, "_get_num_evictable_blocks", lambda _: lambda cls, blocks: 0),
    "returns empty lists for None": Bug(Blocks, "get_block_ids", give_empty_lists),
    "returns another object without blocks": Bug(
        Manager, "create_kv_cache_blocks", lambda _: lambda self, blocks: Blocks(blocks)
    ),
    "hashes without the salt": Bug(kv_cache_utils, "generate_block_hash_extra_keys", hash_without("cache_salt")),
    "hashes without the adapter": Bug(
        kv_cache_utils, "generate_block_hash_extra_keys", hash_without("lora_request"), "full in blocks of 16, sha256 over cbor"
    ),
    "hashes one image a block": Bug(kv_cache_utils, "_gen_mm_extra_hash_keys", hash_first_image_only),
    "hashes no image behind a block": Bug(
        kv_cache_utils,
        "generate_lookahead_block_hash_extra_keys",
        lambda original: lambda request, start, end, hash_end, image: original(request, start, end, end, image),
        "full, lookahead in hashes, async",
        (0, 33),
    ),
    "reports lookahead too early": Bug(
        Pool,
        "_lookahead_token_ids",
        lambda original: lambda self, request, block_end: original(self, request, block_end - 1),
        "full, lookahead in hashes",
        (0, 33),
    ),
    "drops two blocks for a draft model": Bug(Full, "find_longest_cache_hit", drop_eagle_twice, "full, eagle"),
    "keeps nothing where a prompt ends": Bug(
        Window, "reachable_block_mask", keep_no_boundaries, "full and window, keep the last"
    ),
    "counts the null block": Bug(
        Pool, "get_usage", lambda _: lambda self: 1.0 - self.get_num_free_blocks() / self.num_gpu_blocks
    ),
}

"""All that can be seen of vLLM's `KVCacheManager`, in plain values that do not depend on the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

SCALARS = frozenset({int, str, bytes, bool, float, type(None)})
CONTAINERS = (list, dict, set, deque)


class Reader:
    """Turns a manager, its blocks and its results into plain values.

    A block is "#" and its id where it is the pool's own object, else "?" and its id. Of sets only the elements count, of
    dictionaries only the items; a hash's blocks, and whatever else is a list or a tuple, are in order.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.pool = manager.block_pool
        self._block_type = type(self.pool.blocks[0])
        self._managers = manager.coordinator.single_type_managers
        self._names = [[name for name, value in vars(one).items() if isinstance(value, CONTAINERS)] for one in self._managers]

    def plain(self, value: Any) -> Any:
        """Return a value without objects of vLLM in it."""
        if type(value) in SCALARS:
            return value
        if isinstance(value, self._block_type):
            return self._block(value)
        if type(value) in (list, tuple, deque):
            return [type(value).__name__, *(self.plain(item) for item in value)]
        if isinstance(value, dict):
            return sorted(([self.plain(key), self.plain(item)] for key, item in value.items()), key=itemgetter(0))
        if isinstance(value, set):
            return sorted(self.plain(item) for item in value)
        return self._object(value)

    def _block(self, block: Any) -> str:
        mark = "#" if self.pool.blocks[block.block_id] is block else "?"
        return f"{mark}{block.block_id}"

    def _object(self, value: Any) -> Any:
        if isinstance(value, Request):
            return value.request_id
        if isinstance(value, KVCacheBlocks):
            return ["blocks", value is self.manager.empty_kv_cache_blocks, self.plain(value.blocks)]
        if callable(value):
            return value.__name__
        return repr(value)

    def read(self, requests: Iterable[Request], extras: dict[str, Any]) -> dict[str, Any]:
        """Return the state, with what is known of these requests and further values of the workload."""
        state = self._pool_state()
        for group_id, (manager, names) in enumerate(zip(self._managers, self._names, strict=True)):
            values = vars(manager)
            state |= {f"{name} of group {group_id}": self.plain(values[name]) for name in names if values[name]}
        state["requests"] = [
            (request.request_id, request.num_computed_tokens, request.num_in_flight_tokens, b"".join(request.block_hashes))
            for request in requests
        ]
        return state | {name: self.plain(value) for name, value in extras.items()}

    def _pool_state(self) -> dict[str, Any]:
        pool = self.pool
        queue = pool.free_block_queue
        free = islice(queue.iter_blocks_after(None), len(pool.blocks) + 1)  # more than there are: the queue has a loop
        return {
            # vLLM before 0.33 counts the null block's references, pagepool in no version: nothing reads their number.
            "ref counts": [0 if block.is_null else block.ref_cnt for block in pool.blocks],
            "hashes": [block.block_hash for block in pool.blocks],
            "hashed tokens": [block.block_hash_num_tokens for block in pool.blocks],
            "free blocks": [self._block(block) for block in free],
            "number of free blocks": queue.num_free_blocks,
            "usage": self.manager.usage,
            "blocks by hash": self._blocks_by_hash(),
            "number of hashes": len(pool.cached_block_hash_to_block),
            "further hashes by block": self.plain(pool.cached_block_hashes_by_block),
            "watched blocks": sorted(pool._reuse_watchers),
            "events": repr(pool.kv_event_queue),
            "statistics": repr(self.manager.prefix_cache_stats),
        }

    def _blocks_by_hash(self) -> list[tuple[bytes, list[str]]]:
        """Return the blocks of each hash, the one that is hit first."""
        entries = self.pool.cached_block_hash_to_block._cache
        held = {key: list(blocks.values()) if isinstance(blocks, dict) else [blocks] for key, blocks in entries.items()}
        return sorted((key, [self._block(block) for block in blocks]) for key, blocks in held.items())

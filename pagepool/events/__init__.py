"""Events of the prefix cache, in vLLM's format: routers for vLLM can read them.

`CacheManager.enable_events` turns events on, and `take_events` returns them. On the wire (`encode_batch`) a batch is a msgpack
array ``[ts, events, data_parallel_rank]``, and an event is a map with ``type`` first, as in vLLM 0.33.
`pagepool.events.publisher` sends events to routers. Needs the extra ``pagepool[events]``.

>>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
>>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
>>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
>>> manager.enable_events()
>>> request = EngineRequest("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
>>> _ = manager.allocate_slots(request, 9)
>>> [stored] = manager.take_events()
>>> len(stored.block_hashes), stored.parent_block_hash, stored.token_ids.tolist(), stored.block_size
(2, None, [1, 2, 3, 4, 5, 6, 7, 8], 4)
>>> manager.free(request); manager.reset_prefix_cache(), manager.take_events()
(True, [AllBlocksCleared()])
"""

from pagepool.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from pagepool.events.source import Contexts, EventSource

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Contexts", "Event", "EventBatch", "EventSource", "encode_batch"]

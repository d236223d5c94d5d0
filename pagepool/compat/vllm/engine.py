"""What is replaced in vLLM, and what the replacements rely on, as recorded from a version that was tried.

``python -m pagepool.compat.vllm --record`` prints `SIGNATURES` and `DIGESTS` of the installed version.
"""

from typing import NamedTuple

__all__ = ["BOUND", "DIGESTS", "OURS", "REPLACEMENTS", "SIGNATURES", "SUBCLASSED", "VERSIONS", "Replacement"]

VERSIONS = "0.33.*"
"""The versions of vLLM that are accepted where nothing in `DIGESTS` differs; they were recorded from 0.33.0."""

OURS = "pagepool.compat.vllm"
"""The package of the replacements."""


class Replacement(NamedTuple):
    """A definition of vLLM, and what replaces it."""

    home: str
    """vLLM's module that defines it."""
    name: str
    """A class or function, which is replaced wherever a module of vLLM binds it; or ``Class.method``, set on the class."""
    module: str
    """Our module, below `OURS`."""
    ours: str
    """The name in it."""

    @property
    def place(self) -> str:
        """The full name of vLLM's definition."""
        return f"{self.home}.{self.name}"

    @property
    def source(self) -> str:
        """The full name of ours."""
        return f"{OURS}.{self.module}.{self.ours}"


UTILS = "vllm.v1.core.kv_cache_utils"
POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
GROUPS = "vllm.v1.core.single_type_kv_cache_manager"
HASHING = "vllm.utils.hashing"
REQUEST = "vllm.v1.request"

REPLACEMENTS = (
    Replacement(UTILS, "KVCacheBlock", "blocks", "Block"),
    Replacement(UTILS, "FreeKVCacheBlockQueue", "blocks", "BlockQueue"),
    Replacement(POOL, "BlockHashToBlockMap", "blocks", "BlockMap"),
    Replacement(UTILS, "get_request_block_hasher", "hasher", "get_request_block_hasher"),
    Replacement(POOL, "BlockPool.get_cached_block", "pool", "get_cached_block"),
    Replacement(POOL, "BlockPool.get_new_blocks", "pool", "get_new_blocks"),
    Replacement(POOL, "BlockPool.touch", "pool", "touch"),
    Replacement(POOL, "BlockPool.free_blocks", "pool", "free_blocks"),
    Replacement(POOL, "BlockPool.cache_full_blocks", "pool", "cache_full_blocks"),
    Replacement(MANAGER, "KVCacheBlocks.get_block_ids", "pool", "get_block_ids"),
    Replacement(MANAGER, "KVCacheManager.allocate_slots", "slots", "allocate_slots"),
    Replacement(MANAGER, "KVCacheManager.cache_blocks", "slots", "cache_blocks"),
    Replacement(MANAGER, "KVCacheManager.estimate_cached_tokens", "slots", "estimate_cached_tokens"),
    Replacement(GROUPS, "SingleTypeKVCacheManager._get_num_evictable_blocks", "pool", "count_evictable"),
    Replacement(GROUPS, "FullAttentionManager.find_longest_cache_hit", "hits", "find_full_hit"),
    Replacement(GROUPS, "SlidingWindowManager.find_longest_cache_hit", "hits", "find_window_hit"),
)

SUBCLASSED = ((POOL, "BlockPool"), (MANAGER, "KVCacheManager"), (UTILS, "KVCacheBlock"), (UTILS, "FreeKVCacheBlockQueue"))
"""Classes of which a package other than vLLM may have subclasses that know nothing of ours: then nothing is replaced."""

BOUND = (UTILS, POOL, MANAGER, COORDINATOR, GROUPS, "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core")
"""Modules in which a name of `DIGESTS` means what vLLM defines, where they bind it."""

SIGNATURES: dict[str, str] = {
    "KVCacheBlock": "(block_id, ref_cnt=0, _block_hash=None, _block_hash_num_tokens=None, prev_free_block=None, "
    "next_free_block=None, is_null=False, *, pool=None)",
    "FreeKVCacheBlockQueue": "(blocks)",
    "BlockHashToBlockMap": "()",
    "get_request_block_hasher": "(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0)",
    "BlockPool.get_cached_block": "(self, block_hash, kv_cache_group_ids)",
    "BlockPool.get_new_blocks": "(self, num_blocks)",
    "BlockPool.touch": "(self, blocks)",
    "BlockPool.free_blocks": "(self, ordered_blocks)",
    "BlockPool.cache_full_blocks": "(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, "
    "kv_cache_group_id, block_mask=None)",
    "KVCacheBlocks.get_block_ids": "(self, allow_none=False, *, group_ids=None)",
    "KVCacheManager.allocate_slots": "(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None, "
    "num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False, num_encoder_tokens=0, "
    "full_sequence_must_fit=False, reserved_blocks=0, has_scheduled_reqs=True, skip_zeroing_group_ids=())",
    "KVCacheManager.cache_blocks": "(self, request, num_computed_tokens)",
    "KVCacheManager.estimate_cached_tokens": "(self, request)",
    "SingleTypeKVCacheManager._get_num_evictable_blocks": "(cls, blocks)",
    "FullAttentionManager.find_longest_cache_hit": "(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, "
    "kv_cache_spec, drop_eagle_block, alignment_tokens, dcp_world_size=1, pcp_world_size=1)",
    "SlidingWindowManager.find_longest_cache_hit": "(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, "
    "kv_cache_spec, drop_eagle_block, alignment_tokens, dcp_world_size=1, pcp_world_size=1)",
}
"""The parameters of what is replaced, by `Replacement.name`, without types; of a class, those of its constructor."""

DIGESTS: dict[str, dict[str, str]] = {
    UTILS: {
        "BlockHashListWithBlockSize": "00aa7fb747f948bb87dcff605e3857bf1ac4d591d244bb55e4a9caf70f3bc829",
        "FreeKVCacheBlockQueue": "9849f2e9a6e41fba0010502c2db8ce7bdba6357b1597651b09b309938b7219b9",
        "KVCacheBlock": "c059877cdb7fd2f10e16979c2d91c59c8d4516869bfbbbea5f7979fa3bb68ce0",
        "_gen_lora_extra_hash_keys": "4f67791285cae1c3ecef19b273789c1684998e4a28192dd0e3e412fa090e8591",
        "_gen_mm_extra_hash_keys": "b7886f59849b49dedef0b7c3489d5b1fe6a67059eb1abb52a5d1b8fa162b417a",
        "_gen_prompt_embeds_extra_hash_keys": "63cfdf7516ecdb18ba926b0968c40c38aca4e78b2faf117416da3670289b2026",
        "generate_block_hash_extra_keys": "fabb6e4b928af21a67a57d3268e5ced668c8188b22e8e31177a237e4cd9ad3c4",
        "generate_lookahead_block_hash_extra_keys": "2bfe8534090991199c67b86f02f907b636d6448cf0db46c5f62b48cfd6d2c02e",
        "get_request_block_hasher": "6e4728966af6ef0ca2877698171de04b728ab4aea2b41827b7487c9cc4cdad32",
        "hash_block_tokens": "8b8ae296b756507875eb40ee6763dd37854ed7ca326fb0168af579930d2f89bd",
        "init_none_hash": "5113ef26e70d956b89a3c3f218da10fba69904d7b5d9b88e5de8c66337325694",
        "make_block_hash_with_group_id": "f34dae022dc86adcf33ab095583ed63a6dd9eca090b8aeded8d0a405e2b9063f",
        "null_head_len": "0b809d7233685e4720f787165a736f97c2e753bfe7bce9b905d055f5f62f151a",
        "resolve_block_hashes": "52bbbf4bef20acfc3c258dfb0be77d11302c1c261d746a6a8d3d4d595610d9ee",
        "trim_null_head": "9ae3feeda98f04b85d21095b617e4e61ba307c52098d44e0814ea5c18b81b532",
    },
    POOL: {
        "BlockHashToBlockMap": "cc5fab5530d173cf11e590731bd3fad0c6c4a552f7f175907e95e0eb43621748",
        "BlockPool": "c176c238dbe9a621c15f9103c364c3f567ece6de8779bf9bad43212ac3831250",
    },
    MANAGER: {
        "KVCacheBlocks": "1a9017054129042d7c1d1fadb03c5924d6f3bcb860c13598b36e3cede4ac8dd3",
        "KVCacheManager": "dd438b1bf57d9639b35ecd2c116cd7302a61b14352593ea45e4a45bb43d6b8de",
    },
    COORDINATOR: {
        "HybridKVCacheCoordinator": "90f1405ea76d1fd7922db8f44bd7a69a84bb054aca8d0ad59257828aee4abee7",
        "KVCacheCoordinator": "8591b7c1d9f51437bad4133c36e25bf3023fbb386a807bfaf3535d815d98d85c",
        "KVCacheCoordinatorNoPrefixCache": "412c01b67ec7fa2eb31e9ae4817b182f8fbe4d0ef04eb7a2a9a3e7d3e0e33c33",
        "UnitaryKVCacheCoordinator": "692152d3201b5ed877f0eb0447eee2271063ad48f82601d8292d921d9296c4b4",
        "replay_boundaries": "52b5b29e1460f179e80a7085d2922c494821cb9e8b63a63eb50b78249037c435",
    },
    GROUPS: {
        "FullAttentionManager": "aebe22ab01bf5786be8c523bbd6729fd23eb7be520dd6866ea2acf1298dc48e9",
        "SingleTypeKVCacheManager": "36aff2c13acd2797b3fac2ecb04045eb5e34cb045d6531a482dbaf504e7d3a71",
        "SlidingWindowManager": "d7a4616cfa3f532d183d6931604bbf184bbf329c33d43f9b074326e420007c39",
    },
    HASHING: {
        "sha256": "35bbae0345ea40ee9ddf8326f387ee33f11e411027dcc2f18d40af15e24c9279",
        "sha256_cbor": "6f0a776356608c14e5e05d1bd46947485736286ab6d2c6c4ae2ffce2e99e068f",
    },
    REQUEST: {
        "Request": "53bd7cff8118743c211854828dfec601a15a4451295d55cb2406a277c21d4cc3",
    },
}
"""SHA-256 of the source, decorators included, of what is replaced and of what the replacements call or repeat."""

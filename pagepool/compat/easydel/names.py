"""Names of EasyDeL's allocator without a use in pagepool itself: page budgets, groups, shards, hashes by request."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError
from pagepool.hashing import KeyHolder, PageHash
from pagepool.request_registry import RequestRegistry
from pagepool.specs import CacheGroupSpec, CacheSpec, cdiv, check_groups, pages_per_dp_shard, usable_pages_count


@dataclass(frozen=True)
class CacheGroupsConfig:
    """Size of a pool in pages, including the null page, and its groups."""

    num_pages: int
    kv_cache_groups: list[CacheGroupSpec]


def dp_shard_for_page_id(page_id: int, pages_per_shard: int, dp_size: int) -> int | None:
    """Return the shard of a page; None for the null page or a size below 1.

    >>> dp_shard_for_page_id(256, 256, 4), dp_shard_for_page_id(0, 256, 4)
    (1, None)
    """
    page_id, dp_size = require_int("page_id", page_id), require_int("dp_size", dp_size)
    pages_per_shard = require_int("pages_per_shard", pages_per_shard)
    if page_id <= 0 or pages_per_shard <= 0 or dp_size <= 0:
        return None
    return min(page_id // pages_per_shard, dp_size - 1)


@dataclass(frozen=True)
class RuntimePageBudgetEstimate:
    """Number of maximum-length requests that fit in a pool at once, and the page counts behind it.

    `pages_per_request` is the sum of `per_group_pages` (one entry per group, in order). `usable_pages` excludes the null page.
    """

    pages_per_request: int
    max_num_seqs: int
    usable_pages: int
    per_group_pages: tuple[int, ...]


def _max_pages_per_request(spec: CacheSpec, max_model_len: int, max_num_batched_tokens: int) -> int:
    page_size_bytes = spec.page_size_bytes
    if page_size_bytes <= 0:
        raise ArgumentError(f"{type(spec).__name__}.page_size_bytes: got {page_size_bytes}, allowed: at least 1")
    num_bytes = spec.max_memory_usage_bytes(max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens)
    return max(1, cdiv(num_bytes, page_size_bytes))


def _max_concurrent_requests(num_pages: int, pages_per_request: int, data_parallel_size: int) -> int:
    """Return the number of requests that fit at once, each within one shard if the pool has shards."""
    pages_per_shard = pages_per_dp_shard(num_pages, data_parallel_size)
    if pages_per_shard is None:
        return usable_pages_count(num_pages) // pages_per_request
    first, others = usable_pages_count(pages_per_shard) // pages_per_request, pages_per_shard // pages_per_request
    return first + (data_parallel_size - 1) * others


def estimate_runtime_page_budget(
    *,
    num_pages: int,
    kv_cache_groups: Iterable[CacheGroupSpec],
    max_model_len: int,
    max_num_batched_tokens: int,
    data_parallel_size: int = 1,
) -> RuntimePageBudgetEstimate:
    """Estimate how many requests of `max_model_len` tokens fit in the pool at once, with windows and chunks.

    A step computes at most `max_num_batched_tokens` tokens. With `data_parallel_size > 1` and evenly divided pages, each
    request stays in one shard. `max_num_seqs` is at least 1, even if no request fits; without groups it is the number of usable
    pages. Lengths below 1 count as 1. Raise ArgumentError for a spec whose pages have no bytes. O(groups).

    >>> from pagepool import CacheGroupSpec, FullAttentionSpec
    >>> groups = [CacheGroupSpec(FullAttentionSpec(16, 8, 128, "bfloat16", use_mla=False))]
    >>> estimate = estimate_runtime_page_budget(
    ...     num_pages=1025, kv_cache_groups=groups, max_model_len=4096, max_num_batched_tokens=512
    ... )
    >>> estimate.pages_per_request, estimate.usable_pages, estimate.max_num_seqs
    (256, 1024, 4)
    """
    max_model_len = max(1, require_int("max_model_len", max_model_len))
    step_tokens = max(1, min(require_int("max_num_batched_tokens", max_num_batched_tokens), max_model_len))
    data_parallel_size = require_int("data_parallel_size", data_parallel_size)
    per_group_pages = tuple(
        _max_pages_per_request(group.kv_cache_spec, max_model_len, step_tokens) for group in check_groups(kv_cache_groups)
    )
    pages_per_request = sum(per_group_pages)
    usable_pages = usable_pages_count(num_pages)
    fitting = _max_concurrent_requests(num_pages, pages_per_request, data_parallel_size) if per_group_pages else usable_pages
    return RuntimePageBudgetEstimate(pages_per_request, max(1, fitting), usable_pages, per_group_pages)


class RequestPageHashes(KeyHolder, Mapping[str, list[PageHash]]):
    """A live, read-only view of hashes by request id. A look-up makes a new list of `PageHash` in O(pages), empty for an
    unknown id.
    """

    def __init__(self, registry: RequestRegistry) -> None:
        """View the hashes of a manager's requests."""
        self._is_native = registry.hasher.is_native
        self._hashes = registry.hashes

    def __getitem__(self, request_id: str) -> list[PageHash]:
        """Return the hashes made so far for a request. Native hashes are read from its chain."""
        hashes = self._hashes.get(request_id)
        if hashes is None or not self._is_native:
            return [] if hashes is None else list(hashes.page_hashes)
        chain = hashes.chain
        return [PageHash(chain[i], chain.page_token_ids(i)) for i in range(len(chain))]

    def __contains__(self, request_id: object) -> bool:
        """Whether a request has hashes."""
        return request_id in self._hashes

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids, since other threads may add some."""
        return iter(list(self._hashes))

    def __len__(self) -> int:
        """Return the number of requests with hashes."""
        return len(self._hashes)

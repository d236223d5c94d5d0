"""Rows that run together: a whole step of an engine's batch in one native call."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pagepool._core import HashChain, PageIds, RunningRows, StepResult
from pagepool.attention import SingleTypeCacheManager
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.hashing import RequestExtraKeys, encode_extra_keys, list_features
from pagepool.manager import CacheManager
from pagepool.page_table import MultiGroupPageTable, PageTable
from pagepool.request import LoraId, TokenIds
from pagepool.specs import require_int

__all__ = ["RunningBatch", "StepResult"]


class RunningBatch(RunningRows):
    """The running requests of an engine, one in each row of its page table, grown together.

    A row has known tokens (``num_tokens``: the prompt and what was appended); of these, ``num_computed_tokens`` have their
    slots, because they were computed before or are computed in this step. Pages that get full by that are entered in the prefix
    index at once. ``num_cached_tokens`` were hit when the row was admitted, as far as `trim` left them. These, and
    ``is_admitted``, are read-only arrays by row, live. Pool and prefix index are the manager's: what one caches the other hits.
    A batch that is dropped gives nothing back: release its rows before.

    One owner at a time, as with the manager; calls are serialised, and each is all or nothing but for the rows behind the first
    that does not fit. The rows of the table are the batch's to fill.

    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
    >>> batch = RunningBatch(manager, table)
    >>> batch.admit(0, [1, 2, 3, 4, 5, 6, 7]), batch.admit(1, [1, 2, 3, 4, 9])
    (0, 4)
    >>> result = batch.step(rows=[0, 1], token_ids=[8, 10])
    >>> result.num_grown, result.new_page_ids.tolist(), batch.num_computed_tokens.tolist()
    (2, [], [8, 6])
    >>> batch.step([0, 1], [11, 12]).new_page_rows.tolist(), table.page_table_cpu[:, :3].tolist()
    ([0], [[1, 2, 4], [1, 3, 0]])
    >>> batch.release([0, 1])
    """

    def __init__(
        self, manager: CacheManager, page_table: PageTable | MultiGroupPageTable, *, data_parallel_size: int | None = None
    ) -> None:
        """`page_table` has a table for each group of the manager; a `PageTable` serves one group. `data_parallel_size` divides
        the pool for `admit`'s `dp_shard`.

        ArgumentError where they do not fit together, and for a manager that caches with another `hash_algo` than
        ``"siphash128"``: a step hashes natively. Memory by row is reserved for the longest one and touched only as rows grow:
        4 bytes a token, 16 a page hashed, 4 a page.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        size = 0 if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size, 1)
        is_divided = size > 0 and manager.page_pool.find_shard(0, size) is not None
        hash_page_size = manager.coordinator.hash_page_size if manager.enable_caching else 0
        super().__init__(
            manager.page_pool.store,
            _tables_of(page_table, manager),
            [(group.rules, group.index_group_id, group.num_hashes_per_page) for group in _groups_of(manager)],
            manager.max_model_len,
            hash_page_size,
            _native_key_of(manager),
            size if is_divided else 0,
        )
        self._manager = manager
        self._data_parallel_size = size or None
        self._hash_page_size = hash_page_size
        self._counters = manager.query_counters if manager.enable_caching else (None, None)

    def __repr__(self) -> str:
        """Its size, and what its rows know and have computed."""
        return (
            f"RunningBatch(num_rows={self.num_tokens.size}, num_admitted={self.is_admitted.sum()}, "
            f"max_num_tokens={self.max_num_tokens}, num_tokens={self.num_tokens.sum()}, "
            f"num_computed_tokens={self.num_computed_tokens.sum()})"
        )

    def admit(
        self,
        row: int,
        token_ids: TokenIds,
        *,
        num_tokens: int | None = None,
        max_num_new_tokens: int | None = None,
        cache_salt: str | None = None,
        lora_id: LoraId | None = None,
        mm_features: Sequence[Any] | None = None,
        dp_shard: int | None = None,
        num_reserved_pages: int = 0,
        look_up: bool = True,
        is_preempted: bool = False,
    ) -> int | None:
        """Start a request in a free row: take its longest cached prefix and room for its first `num_tokens` tokens, the cached
        ones included (None: for all it knows), and fill the table's row. `max_num_new_tokens`, a step's budget, is
        the most that get room behind the cached ones.

        `token_ids`, a list or an int32 array, are the tokens that the row knows. Returns how many of them were cached, at most
        one less than all; None, and nothing changed, if too few pages are free, with `num_reserved_pages` left for rows that
        run (`CacheManager.require_capacity` tells whether waiting can help). `cache_salt`, `lora_id` and `mm_features` keep
        prefixes apart as for `CacheManager`. With `dp_shard` hits and pages, later ones too, come from that shard. Without
        `look_up` no prefix is taken: for a request that wants ``prompt_logprobs``. A request with images that names no features
        must have a salt of its own, for it has no id here by which it could be told from others. A shard is taken modulo
        `data_parallel_size`. With `is_preempted`, a request that ran before, `CacheManager.stats` counts it apart.

        `CacheManager.stats` counts a request when it is admitted, not when it is refused. Refusing the same request again in
        the same row costs O(1) while too few pages are free, no hit of it gets another holder and no further page of it is
        cached; with windows, chunks or eagle, while nothing is cached or evicted. Pass the same list, or an array over the same
        memory, and the same `mm_features`: tokens in a new object are compared one by one, and features in a new one are
        hashed. Do not change either in place meanwhile.

        RowIndexError outside the table, RowOverflowError for more tokens than `max_num_tokens`, ArgumentError for a row that is
        admitted already, for no tokens and values out of range, ArgumentTypeError for other types; PageHashError if another
        thread took a page that was hit, IntegrityError for a free page that somebody gave a reference to. O(tokens), and with
        features O(pages with features x features); a row keeps its last request's hashes, so a request that is tried again,
        or comes back, in the same row is hashed no second time unless it has extra keys.
        """
        pool, size = self._manager.page_pool, self._data_parallel_size
        if dp_shard is not None and size is None:
            raise ArgumentError(f"dp_shard: got {dp_shard}, allowed without data_parallel_size: None")
        options = cache_salt, lora_id, mm_features, dp_shard, look_up
        if self.is_refused_still(row, token_ids, num_tokens, max_num_new_tokens, num_reserved_pages, options):
            return None
        hint = None if dp_shard is None else require_int("dp_shard", dp_shard, 0)

        def find_hits(chain: HashChain, num_known_tokens: int) -> tuple[tuple[PageIds, ...], int]:
            bounds = pool.find_shard_bounds(hint, size)
            return self._manager.coordinator.find_longest_cache_hit(chain, num_known_tokens - 1, bounds)

        shard, _ = pool.find_shard(hint, size) or (None, 0)
        keys = _make_extra_keys(cache_salt, lora_id, mm_features)
        finder, counter = (find_hits, self._counters[bool(is_preempted)]) if look_up else (None, None)
        keyed, context = self._list_keyed(keys), self._manager.hold_context(keys)
        try:
            return self.admit_row(
                row,
                token_ids,
                num_tokens,
                max_num_new_tokens,
                keyed,
                finder,
                shard,
                num_reserved_pages,
                context,
                options,
                counter,
            )
        finally:
            self._manager.release_context(context)

    def _list_keyed(self, keys: RequestExtraKeys | None) -> list[tuple[int, bytes]]:
        """The pages whose hash is made of more than tokens, and what else enters it."""
        if keys is None or not self._hash_page_size:
            return []
        keyed = []
        page, page_keys = keys.find_keyed_page(0, self._hash_page_size)
        while page is not None and page * self._hash_page_size < self.max_num_tokens:
            if page_keys:  # a feature of no tokens has none
                keyed.append((page, encode_extra_keys(page_keys)))
            page, page_keys = keys.find_keyed_page(page + 1, self._hash_page_size)
        return keyed

    def check(self) -> None:
        """IntegrityError unless every page of a row is held by it, no page stands in more rows and requests of the manager than
        its ref count says, the table shows what the rows hold, and the pool is right. O(pages + table).
        """
        self.check_rows(self._manager.coordinator.get_all_held())
        self._manager.page_pool.check()


def _make_extra_keys(
    cache_salt: str | None, lora_id: LoraId | None, mm_features: Sequence[Any] | None
) -> RequestExtraKeys | None:
    if cache_salt is None and lora_id is None and mm_features is None:
        return None
    features = list_features(mm_features)
    return RequestExtraKeys.of(SimpleNamespace(cache_salt=cache_salt, lora_id=lora_id, mm_features=features))


def _tables_of(page_table: PageTable | MultiGroupPageTable, manager: CacheManager) -> tuple[PageTable, ...]:
    """One table for each group."""
    page_sizes = [group.page_size for group in _groups_of(manager)]
    if isinstance(page_table, MultiGroupPageTable):
        if page_table.page_sizes != page_sizes:
            raise ArgumentError(f"page_table: got page sizes {page_table.page_sizes}, allowed: the groups' {page_sizes}")
        tables = page_table.page_tables
    elif isinstance(page_table, PageTable):
        tables = (page_table,)
    else:
        raise ArgumentTypeError(f"page_table: got {type(page_table).__name__}, allowed: PageTable or MultiGroupPageTable")
    if not page_sizes or len(tables) != len(page_sizes):
        raise ArgumentError(f"page_table: got {len(tables)} tables for {len(page_sizes)} groups, allowed: one each, at least 1")
    return tables


def _groups_of(manager: CacheManager) -> tuple[SingleTypeCacheManager, ...]:
    return manager.coordinator.single_type_managers


def _native_key_of(manager: CacheManager) -> bytes:
    """The key under which the core hashes pages; zeros where it never does."""
    if not manager.enable_caching:
        return bytes(16)
    key = manager.hasher.native_key
    if key is None:
        raise ArgumentError("manager: got one with another hash_algo, allowed with caching: 'siphash128'")
    return key

"""What each kind of attention needs of its pages: how many, which of them still, and how long a prefix hit may be.

One manager looks after one cache group. It holds no state of requests; the coordinator does, and passes in what a request
holds (`HeldPages`).
"""

from abc import ABC, abstractmethod
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from pagepool._core import HashChain, HeldPages, PageIds, PageRules
from pagepool.arguments import require_int
from pagepool.errors import ArgumentError
from pagepool.page_pool import PagePool
from pagepool.specs import (
    CacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)

__all__ = [
    "ChunkedLocalAttentionManager",
    "FullAttentionManager",
    "MambaManager",
    "PrefixQuery",
    "SingleTypeCacheManager",
    "SlidingWindowManager",
    "get_manager_for_kv_cache_spec",
]


class PrefixQuery(NamedTuple):
    """Where and for what a prefix is looked up: the request's digests, the groups that must all hit, and the half-open range
    of the page ids that may (`stop_id` None: to the end of the pool).
    """

    chain: HashChain
    group_ids: PageIds
    start_id: int
    stop_id: int | None


class SingleTypeCacheManager(ABC):
    """The rules of one cache group. Subclasses say what differs from full attention.

    ``num_hashes_per_page`` of the request's hashes make a page; the coordinator sets it. Of a kind that is ``is_prefix_closed``
    any shorter prefix of a hit is a hit; one that ``can_drop_page`` can give up the last page of a hit for eagle.
    """

    is_prefix_cached = True
    is_prefix_closed = False
    can_drop_page = True

    def __init__(
        self,
        kv_cache_spec: Any,
        page_pool: PagePool,
        kv_cache_group_id: int,
    ) -> None:
        """`kv_cache_spec` describes the group with that index."""
        self.kv_cache_spec: CacheSpec = kv_cache_spec
        self.page_pool = page_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.page_size = require_int("page_size", kv_cache_spec.page_size, 1)
        self.num_hashes_per_page = 1

    @cached_property
    def rules(self) -> PageRules:
        """Which pages a request needs: all of its tokens'."""
        return PageRules(self.page_size)

    @property
    def index_group_id(self) -> int | None:
        """The group that its pages are entered for in the prefix index; None: they never are."""
        return self.kv_cache_group_id if self.is_prefix_cached else None

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """Groups with equal values have equal rules for hits and are looked up together."""
        return type(self), self.page_size

    def describe(self) -> dict[str, int | str | None]:
        """By name, what decides which of its pages a prefix hits."""
        names = "page_size", "sliding_window", "attention_chunk_size"
        sizes = {name: getattr(self.kv_cache_spec, name, None) for name in names}
        return {
            "kind": type(self).__name__.removesuffix("Manager"),
            **{name: None if size is None else int(size) for name, size in sizes.items()},
            "index_group_id": self.index_group_id,
            "num_hashes_per_page": self.num_hashes_per_page,
        }

    def get_num_pages(self, num_tokens: int) -> int:
        """Places that `num_tokens` tokens take, those of skipped pages included."""
        return self.rules.count_pages(num_tokens)

    def get_min_num_pages(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at once, at its peak, in the smallest steps."""
        return self.get_num_pages(num_tokens)

    def get_num_room_tokens(self, num_pages: int) -> int:
        """Tokens that have a slot in `num_pages` places."""
        return self.rules.count_room_tokens(num_pages)

    def find_first_useful_page(self, held: HeldPages, num_computed_tokens: int) -> int:
        """Pages before it are of no use to tokens from `num_computed_tokens` on."""
        return self.rules.find_first_useful_page(num_computed_tokens, held.num_cached_pages)

    def find_next_skip(self, held: HeldPages) -> int:
        """The least number of computed tokens at which a page more may be skipped."""
        return self.rules.find_next_skip(held.num_skipped_pages)

    def get_num_common_prefix_pages(self, held: HeldPages, num_scheduled_requests: int) -> int:
        """Leading pages that at least `num_scheduled_requests` requests hold; 0 for kinds that skip pages."""
        return 0

    @abstractmethod
    def find_hit_length(self, query: PrefixQuery, max_num_tokens: int, use_eagle: bool, is_recheck: bool) -> int:
        """The longest prefix, in tokens and at most `max_num_tokens`, from which a request can go on. O(pages x groups).

        With eagle the last page is dropped, since the drafter needs its hidden states computed anew; a re-check, of a length
        that another group shortened, drops no more.
        """

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """For a hit of that length, pages before it are not needed."""
        return 0


class FullAttentionManager(SingleTypeCacheManager):
    """Each token attends to all before it: every page is needed, and any leading pages are a hit."""

    is_prefix_closed = True

    def get_num_common_prefix_pages(self, held: HeldPages, num_scheduled_requests: int) -> int:
        """O(pages of the answer)."""
        return self.page_pool.store.count_shared(held, num_scheduled_requests)

    def find_hit_length(self, query: PrefixQuery, max_num_tokens: int, use_eagle: bool, is_recheck: bool) -> int:
        """Forwards from the first page to the first that misses. A shorter prefix of a hit is a hit."""
        if is_recheck:
            return max_num_tokens
        num_pages = self.page_pool.store.find_leading_hits(
            query.chain,
            self.num_hashes_per_page,
            0,
            max_num_tokens // self.page_size,
            query.group_ids,
            query.start_id,
            query.stop_id,
        )
        return (num_pages - (1 if use_eagle and num_pages else 0)) * self.page_size


class SlidingWindowManager(SingleTypeCacheManager):
    """Each token attends to the `sliding_window` last ones, itself included: pages wholly before them are given back."""

    def __init__(
        self,
        kv_cache_spec: SlidingWindowSpec,
        page_pool: PagePool,
        kv_cache_group_id: int,
    ) -> None:
        """See `SingleTypeCacheManager`."""
        super().__init__(kv_cache_spec, page_pool, kv_cache_group_id)
        self.sliding_window = kv_cache_spec.sliding_window

    @cached_property
    def rules(self) -> PageRules:
        """Those in the next token's window."""
        return PageRules(self.page_size, window=self.sliding_window)

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """The window counts too."""
        return type(self), self.page_size, self.sliding_window

    def get_min_num_pages(self, num_tokens: int) -> int:
        """The window and one page more, where it straddles a boundary."""
        return min(self.get_num_pages(num_tokens), cdiv(self.sliding_window - 1, self.page_size) + 1)

    def _get_num_run_pages(self, use_eagle: bool) -> int:
        """Consecutive pages that a hit needs: those of the window, and the one that eagle drops."""
        return max(1, cdiv(self.sliding_window - 1, self.page_size) + (1 if use_eagle else 0))

    def find_hit_length(self, query: PrefixQuery, max_num_tokens: int, use_eagle: bool, is_recheck: bool) -> int:
        """Backwards to the last run of pages that fills the window; failing that, the leading pages."""
        num_dropped = 1 if use_eagle else 0
        num_run_pages = self._get_num_run_pages(use_eagle) - (num_dropped if is_recheck else 0)
        if num_run_pages == 0:
            return max_num_tokens
        num_pages = self.page_pool.store.find_last_run(
            query.chain,
            self.num_hashes_per_page,
            max_num_tokens // self.page_size,
            num_run_pages,
            query.group_ids,
            query.start_id,
            query.stop_id,
        )
        return (num_pages - (num_dropped if num_pages and not is_recheck else 0)) * self.page_size

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """The first page of the window."""
        num_kept_pages = self._get_num_run_pages(use_eagle) - (1 if use_eagle else 0)
        return max(0, num_hit_tokens // self.page_size - num_kept_pages)


class ChunkedLocalAttentionManager(SingleTypeCacheManager):
    """Each token attends within its chunk of `attention_chunk_size` tokens: pages of earlier chunks are given back."""

    can_drop_page = False

    def __init__(
        self,
        kv_cache_spec: ChunkedLocalAttentionSpec,
        page_pool: PagePool,
        kv_cache_group_id: int,
    ) -> None:
        """See `SingleTypeCacheManager`."""
        super().__init__(kv_cache_spec, page_pool, kv_cache_group_id)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    @cached_property
    def rules(self) -> PageRules:
        """Those from the page on in which the chunk begins, but never past the last cached page."""
        return PageRules(self.page_size, chunk=self.attention_chunk_size)

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """The chunk size counts too."""
        return type(self), self.page_size, self.attention_chunk_size

    def get_min_num_pages(self, num_tokens: int) -> int:
        """Those of the chunk that reaches into most; with caching the last cached page stays besides. O(page_size)."""
        size = self.attention_chunk_size
        starts = range(0, min(num_tokens, lcm(size, self.page_size)), size)
        spans = [cdiv(min(start + size, num_tokens), self.page_size) - start // self.page_size for start in starts]
        return min(self.get_num_pages(num_tokens), max([2 if self.page_pool.enable_caching else 1, *spans]))

    def find_hit_length(self, query: PrefixQuery, max_num_tokens: int, use_eagle: bool, is_recheck: bool) -> int:
        """Forwards from the page in which the last chunk begins; all before it is not needed."""
        num_pages = self.page_pool.store.find_leading_hits(
            query.chain,
            self.num_hashes_per_page,
            self.find_first_hit_page(max_num_tokens, use_eagle),
            max_num_tokens // self.page_size,
            query.group_ids,
            query.start_id,
            query.stop_id,
        )
        return num_pages * self.page_size

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """The page in which the chunk of the next token begins."""
        return self.rules.find_first_useful_page(num_hit_tokens, 0)


class MambaManager(SingleTypeCacheManager):
    """A state of fixed size for each request: one page, which holds no prefix that another request could use."""

    is_prefix_cached = False

    @cached_property
    def rules(self) -> PageRules:
        """One page, however many tokens."""
        return PageRules(None)

    def find_hit_length(self, query: PrefixQuery, max_num_tokens: int, use_eagle: bool, is_recheck: bool) -> int:
        """Never a hit: the state after a prefix is not kept."""
        return 0


_MANAGER_OF_SPEC: dict[type[CacheSpec], type[SingleTypeCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
}


def get_manager_for_kv_cache_spec(kv_cache_spec: CacheSpec, **kwargs: Any) -> SingleTypeCacheManager:
    """The manager for the kind of attention that a spec describes, made with `kwargs`.

    Specs are known by the name of their class or of one it derives from, so that an engine's own spec classes work.
    ArgumentError for a kind that has none.
    """
    by_name = {spec.__name__: manager for spec, manager in _MANAGER_OF_SPEC.items()}
    for cls in type(kv_cache_spec).__mro__:
        if cls.__name__ in by_name:
            return by_name[cls.__name__](kv_cache_spec, **kwargs)
    raise ArgumentError(f"kv_cache_spec: got {type(kv_cache_spec).__name__}, allowed: {', '.join(by_name)}")

"""The rules of each kind of attention: the pages that tokens need, and the prefixes that hit."""

from abc import ABC, abstractmethod
from functools import cached_property
from math import lcm
from typing import Any

from pagepool._core import PageIds, PageRules, PrefixQuery
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


class SingleTypeCacheManager(ABC):
    """The rules of one cache group. It holds no state of requests.

    ``entry_size`` is the number of tokens between prefix entries: those of a page, or between checkpoints of a state; and
    ``num_hashes_per_page`` that of a request's hashes. Hits have a multiple of ``num_hit_tokens`` tokens, 0: any number. The
    coordinator sets these. If ``is_prefix_closed``, any shorter prefix of a hit is a hit. If ``can_drop_page``, the last page
    of a hit can be dropped for eagle. If ``is_state``, a hit is copied, not attached.
    """

    is_prefix_cached = True
    is_prefix_closed = False
    can_drop_page = True
    is_state = False

    def __init__(
        self,
        kv_cache_spec: Any,
        page_pool: PagePool,
        kv_cache_group_id: int,
    ) -> None:
        """`kv_cache_spec` describes the group with index `kv_cache_group_id`."""
        self.kv_cache_spec: CacheSpec = kv_cache_spec
        self.page_pool = page_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.page_size = require_int("page_size", kv_cache_spec.page_size, 1)
        self.entry_size = self.page_size
        self.num_hashes_per_page = 1
        self.num_hit_tokens = 0

    @cached_property
    def rules(self) -> PageRules:
        """The pages that a request needs: those of all its tokens."""
        return PageRules(self.page_size)

    @property
    def index_group_id(self) -> int | None:
        """The group id in the prefix index; None if pages are never cached."""
        return self.kv_cache_group_id if self.is_prefix_cached else None

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """A key of the rules for hits: groups with equal keys are looked up together."""
        return type(self), self.page_size

    def describe(self) -> dict[str, int | str | None]:
        """Return, by name, the settings that decide which pages a prefix hits."""
        names = "page_size", "sliding_window", "attention_chunk_size"
        sizes = {name: getattr(self.kv_cache_spec, name, None) for name in names}
        return {
            "kind": type(self).__name__.removesuffix("Manager"),
            **{name: None if size is None else int(size) for name, size in sizes.items()},
            "index_group_id": self.index_group_id,
            "num_hashes_per_page": self.num_hashes_per_page,
        }

    def get_num_pages(self, num_tokens: int) -> int:
        """Return the places that `num_tokens` tokens take, including those of skipped pages."""
        return self.rules.count_pages(num_tokens)

    def get_min_num_pages(self, num_tokens: int) -> int:
        """Return the peak number of pages that a request of `num_tokens` tokens holds, computed in the smallest steps."""
        return self.get_num_pages(num_tokens)

    @abstractmethod
    def find_hit_length(
        self, query: PrefixQuery, groups: PageIds, max_num_tokens: int, use_eagle: bool, is_recheck: bool
    ) -> int:
        """Return the longest prefix, in tokens and at most `max_num_tokens`, that hits in all `groups`. O(pages x groups).

        With eagle the last page is dropped, because the drafter needs its hidden states. A re-check of a length that another
        group shortened drops no further page.
        """

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """Return the first page that a request needs of a hit of `num_hit_tokens` tokens."""
        return 0


class FullAttentionManager(SingleTypeCacheManager):
    """Each token attends to all tokens before it: every page is needed, and any number of leading pages is a hit."""

    is_prefix_closed = True

    def find_hit_length(
        self, query: PrefixQuery, groups: PageIds, max_num_tokens: int, use_eagle: bool, is_recheck: bool
    ) -> int:
        """Look up pages from the first to the first miss."""
        if is_recheck:
            return max_num_tokens
        num_pages = query.find_leading_hits(groups, self.num_hashes_per_page, 0, max_num_tokens // self.page_size)
        return (num_pages - (1 if use_eagle and num_pages else 0)) * self.page_size


class SlidingWindowManager(SingleTypeCacheManager):
    """Each token attends to the last `sliding_window` tokens, including itself. Pages before the window are given back."""

    kv_cache_spec: SlidingWindowSpec

    @property
    def sliding_window(self) -> int:
        """The window in tokens."""
        return self.kv_cache_spec.sliding_window

    @cached_property
    def rules(self) -> PageRules:
        """The pages in the next token's window."""
        return PageRules(self.page_size, window=self.sliding_window, hit_tokens=self.num_hit_tokens)

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """The key includes the window."""
        return type(self), self.page_size, self.sliding_window

    def get_min_num_pages(self, num_tokens: int) -> int:
        """Count the window and, where it straddles a page boundary, one page more."""
        return min(self.get_num_pages(num_tokens), cdiv(self.sliding_window - 1, self.page_size) + 1)

    def _get_num_run_pages(self, use_eagle: bool) -> int:
        """Return the consecutive pages that a hit needs: those of the window, and the page that eagle drops."""
        return max(1, cdiv(self.sliding_window - 1, self.page_size) + (1 if use_eagle else 0))

    def find_hit_length(
        self, query: PrefixQuery, groups: PageIds, max_num_tokens: int, use_eagle: bool, is_recheck: bool
    ) -> int:
        """Look up pages backwards for the last run that fills the window; without one, the leading pages hit."""
        num_dropped = 1 if use_eagle else 0
        num_run_pages = self._get_num_run_pages(use_eagle) - (num_dropped if is_recheck else 0)
        if num_run_pages == 0:
            return max_num_tokens
        num_pages = query.find_last_run(groups, self.num_hashes_per_page, max_num_tokens // self.page_size, num_run_pages)
        return (num_pages - (num_dropped if num_pages and not is_recheck else 0)) * self.page_size

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """Return the first page of the window."""
        num_kept_pages = self._get_num_run_pages(use_eagle) - (1 if use_eagle else 0)
        return max(0, num_hit_tokens // self.page_size - num_kept_pages)


class ChunkedLocalAttentionManager(SingleTypeCacheManager):
    """Each token attends to its chunk of `attention_chunk_size` tokens. Pages of earlier chunks are given back."""

    can_drop_page = False
    kv_cache_spec: ChunkedLocalAttentionSpec

    @property
    def attention_chunk_size(self) -> int:
        """The chunk in tokens."""
        return self.kv_cache_spec.attention_chunk_size

    @cached_property
    def rules(self) -> PageRules:
        """The pages of the current chunk, and the last cached page."""
        return PageRules(self.page_size, chunk=self.attention_chunk_size, hit_tokens=self.num_hit_tokens)

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """The key includes the chunk size."""
        return type(self), self.page_size, self.attention_chunk_size

    def get_min_num_pages(self, num_tokens: int) -> int:
        """Count the pages of the chunk that spans most, and with caching the last cached page, which stays. O(page_size)."""
        size = self.attention_chunk_size
        starts = range(0, min(num_tokens, lcm(size, self.page_size)), size)
        spans = [cdiv(min(start + size, num_tokens), self.page_size) - start // self.page_size for start in starts]
        return min(self.get_num_pages(num_tokens), max([2 if self.page_pool.enable_caching else 1, *spans]))

    def find_hit_length(
        self, query: PrefixQuery, groups: PageIds, max_num_tokens: int, use_eagle: bool, is_recheck: bool
    ) -> int:
        """Look up pages from the start of the last chunk on. Earlier pages are not needed."""
        start = self.find_first_hit_page(max_num_tokens, use_eagle)
        num_pages = query.find_leading_hits(groups, self.num_hashes_per_page, start, max_num_tokens // self.page_size)
        return num_pages * self.page_size

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """Return the page in which the chunk of the next token begins."""
        return self.rules.find_first_useful_page(num_hit_tokens)


class MambaManager(SingleTypeCacheManager):
    """Each request has a state of fixed size in one page, which is never shared. With a ``checkpoint_interval`` copies of it
    stay cached.
    """

    is_state = True

    @property
    def checkpoint_interval(self) -> int | None:
        """The tokens between checkpoints; None: none are kept. The coordinator may keep fewer."""
        return getattr(self.kv_cache_spec, "checkpoint_interval", None)

    @property
    def is_prefix_cached(self) -> bool:  # type: ignore[override]
        """Whether checkpoints are kept."""
        return self.checkpoint_interval is not None

    @cached_property
    def rules(self) -> PageRules:
        """One page for any number of tokens."""
        return PageRules(None, interval=self.entry_size if self.is_prefix_cached else 0)

    @property
    def hit_class(self) -> tuple[Any, ...]:
        """States hit together, except those without checkpoints."""
        return type(self), self.is_prefix_cached

    def find_hit_length(
        self, query: PrefixQuery, groups: PageIds, max_num_tokens: int, use_eagle: bool, is_recheck: bool
    ) -> int:
        """Look up checkpoints backwards; 0 if none are kept. With eagle none is dropped: the pages of attention are."""
        if not self.is_prefix_cached:
            return 0
        num_entries = query.find_last_run(groups, self.num_hashes_per_page, max_num_tokens // self.entry_size, 1)
        return num_entries * self.entry_size

    def find_first_hit_page(self, num_hit_tokens: int, use_eagle: bool) -> int:
        """Return the place of the checkpoint."""
        return max(0, num_hit_tokens // self.entry_size - 1)


_MANAGER_OF_SPEC: dict[type[CacheSpec], type[SingleTypeCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
}


def get_manager_for_kv_cache_spec(kv_cache_spec: CacheSpec, **kwargs: Any) -> SingleTypeCacheManager:
    """Make the manager for the kind of attention of a spec. `kwargs` go to its constructor.

    A spec is recognised by the name of its class or of a base class, so an engine's own spec classes work. ArgumentError for
    other names.
    """
    by_name = {spec.__name__: manager for spec, manager in _MANAGER_OF_SPEC.items()}
    for cls in type(kv_cache_spec).__mro__:
        if cls.__name__ in by_name:
            return by_name[cls.__name__](kv_cache_spec, **kwargs)
    raise ArgumentError(f"kv_cache_spec: got {type(kv_cache_spec).__name__}, allowed: {', '.join(by_name)}")

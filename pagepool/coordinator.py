"""The cache groups of a model, together: what each request holds in each of them, and the prefix they all agree on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import gcd, lcm

from pagepool._core import HashChain, HeldPages, PageIds
from pagepool.attention import PrefixQuery, SingleTypeCacheManager, get_manager_for_kv_cache_spec
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.page_pool import PagePool
from pagepool.page_pool.snapshot import Configuration
from pagepool.specs import CacheGroupSpec

__all__ = [
    "CacheCoordinator",
    "CacheCoordinatorNoPrefixCache",
    "HybridCacheCoordinator",
    "RequestPages",
    "UnitaryCacheCoordinator",
    "get_kv_cache_coordinator",
]

IdRange = tuple[int, int | None]
"""Half-open range of the page ids that may hit; None: to the end of the pool."""

ANY_PAGE: IdRange = (0, None)

DueEntries = tuple[HeldPages, int, int, int]
"""Pages of a group to enter in the prefix index: what is held, how many of it are full, hashes of a page, the group's id."""

NEVER = 1 << 62
"""A number of tokens that no request reaches."""


class RequestPages:
    """What one request holds in each group, and up to where nothing needs doing.

    The request needs no page while its tokens are at most ``num_room_tokens``, has none to enter in the prefix index while
    they are fewer than ``num_next_full_tokens``, and none to skip while fewer than ``num_next_skip_tokens`` are computed. Its
    pages were entered up to ``num_cached_tokens``: once fewer are computed, some may have to be entered again.
    """

    __slots__ = ("by_group", "groups", "num_cached_tokens", "num_next_full_tokens", "num_next_skip_tokens", "num_room_tokens")

    def __init__(self, managers: Sequence[SingleTypeCacheManager]) -> None:
        """Holds nothing yet in the group of any manager. ``by_group`` pairs each manager with the pages of its group."""
        self.groups = tuple([HeldPages() for _ in managers])
        self.by_group = tuple(zip(managers, self.groups, strict=True))
        self.forget_thresholds()

    def forget_thresholds(self) -> None:
        """Let everything be looked at anew."""
        self.num_room_tokens = 0
        self.num_next_full_tokens = 1
        self.num_next_skip_tokens = 0
        self.num_cached_tokens = 0


class CacheCoordinator(ABC):
    """Keeps the pages of requests for all groups of a model. Subclasses say how a prefix is looked up.

    ``requests`` has what each request holds; ``single_type_managers`` the rules of each group. A hash covers
    ``hash_page_size`` tokens: the greatest common divisor of the page sizes of the groups that are prefix-cached, of which
    ``max_cached_page_size`` is the largest.
    """

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        enable_caching: bool,
        page_pool: PagePool | None = None,
    ) -> None:
        """See `CacheManager`."""
        self.kv_cache_groups = kv_cache_groups
        self.max_model_len = max_model_len
        self.use_eagle = use_eagle
        self.enable_caching = enable_caching
        self.page_pool = page_pool or PagePool(num_pages, enable_caching)
        self.num_pages = self.page_pool.num_pages
        self.requests: dict[str, RequestPages] = {}
        self.single_type_managers = tuple(
            get_manager_for_kv_cache_spec(group.kv_cache_spec, page_pool=self.page_pool, kv_cache_group_id=group_id)
            for group_id, group in enumerate(kv_cache_groups)
        )
        cached = [manager for manager in self.single_type_managers if manager.is_prefix_cached]
        self.hash_page_size = gcd(*(manager.page_size for manager in cached)) or 1
        self.max_cached_page_size = max([manager.page_size for manager in cached], default=1)
        for manager in cached:
            manager.num_hashes_per_page = manager.page_size // self.hash_page_size
        self._strides = PageIds([manager.num_hashes_per_page for manager in self.single_type_managers])
        self._group_ids = PageIds([manager.kv_cache_group_id for manager in self.single_type_managers])

    def describe(self) -> Configuration:
        """By name, what decides which pages a prefix hits, but for the hashes."""
        configuration: Configuration = {"num_kv_cache_groups": len(self.single_type_managers)}
        for i, manager in enumerate(self.single_type_managers):
            configuration |= {f"kv_cache_groups[{i}].{name}": value for name, value in manager.describe().items()}
        return {**configuration, "hash_page_size": self.hash_page_size}

    # What requests hold.

    def get_pages(self, request_id: str) -> tuple[PageIds, ...]:
        """The ids of a request's pages, for each group; empty for an unknown request."""
        held = self.requests.get(request_id)
        return tuple(PageIds() for _ in self.single_type_managers) if held is None else held.groups

    def get_all_held(self) -> list[HeldPages]:
        """What all requests hold, in any group. Other threads may add requests meanwhile."""
        return [group for held in list(self.requests.values()) for group in held.groups]

    def count_pages_to_allocate(self, held: RequestPages, num_tokens: int, hits: Sequence[PageIds]) -> list[int]:
        """New pages that each group needs so that `num_tokens` tokens have a slot, the hits being attached."""
        return [
            max(0, manager.get_num_pages(num_tokens) - len(group) - len(hits[i]))
            for i, (manager, group) in enumerate(held.by_group)
        ]

    def count_room_tokens(self, held: RequestPages) -> int:
        """Tokens that have a slot in every group, at most `max_model_len`, also where an interrupt kept thresholds back."""
        self.update_thresholds(held)
        return held.num_room_tokens

    def count_hit_tokens(self, hits: Sequence[PageIds]) -> int:
        """Tokens whose pages are among the hits of every group that is prefix-cached."""
        managers = zip(self.single_type_managers, hits, strict=True)
        return min([len(ids) * manager.page_size for manager, ids in managers if manager.is_prefix_cached], default=0)

    def remove_skipped_pages(self, held: RequestPages, num_computed_tokens: int) -> None:
        """Give back the pages that fell out of an attention window; the null page takes their places."""
        if num_computed_tokens < held.num_next_skip_tokens:
            return
        for manager, group in held.by_group:
            first_useful_page = manager.find_first_useful_page(group, num_computed_tokens)
            self.page_pool.store.skip(group, max(0, first_useful_page))

    def rewind(self, held: RequestPages, num_computed_tokens: int) -> None:
        """Look at pages again as they get full, if their tokens are computed again: after a failed load, for example, for which
        `PagePool.evict_pages` dropped their entries.
        """
        if num_computed_tokens < held.num_cached_tokens:
            for manager, group in held.by_group:
                self.page_pool.store.rewind(group, num_computed_tokens // manager.page_size)

    def take_pages(
        self,
        held: RequestPages,
        num_new_pages: Sequence[int],
        hits: Sequence[PageIds],
        chain: HashChain | None,
        shard: tuple[int, int] | None,
        num_reserved_pages: int,
    ) -> tuple[PageIds, ...] | None:
        """Give a request its hits, which are cached under `chain`, and that many new pages of each group, from one shard of so
        many. The new pages; None, and nothing taken, if too few are free. All in one native call, which nothing interrupts.
        """
        shard_id, num_shards = shard or (None, 0)
        return self.page_pool.store.take_for(
            held.groups, num_new_pages, hits, chain, self._strides, self._group_ids, shard_id, num_shards, num_reserved_pages
        )

    def count_cached_hashes(self, held: RequestPages) -> int:
        """Leading hashes whose pages need no entry any more, in any group."""
        counts = [
            group.num_cached_pages * manager.num_hashes_per_page for manager, group in held.by_group if manager.is_prefix_cached
        ]
        return min(counts, default=NEVER)

    def list_due(self, held: RequestPages, hits: Sequence[PageIds], chain: HashChain, num_tokens: int) -> list[DueEntries]:
        """What `cache_pages` is to enter of each group that `num_tokens` tokens fill further than before, or than the hits that
        the request will get. PageHashError if another caller gave an entry to one of the pages.
        """
        due = [
            (group, num_tokens // manager.page_size, manager.num_hashes_per_page, manager.kv_cache_group_id)
            for (manager, group), ids in zip(held.by_group, hits, strict=True)
            if manager.is_prefix_cached and num_tokens // manager.page_size > max(group.num_cached_pages, len(ids))
        ]
        for group, num_full_pages, stride, group_id in due:
            self.page_pool.store.check_enterable(group, chain, num_full_pages, stride, group_id)
        return due

    def cache_pages(self, due: Sequence[DueEntries], chain: HashChain, context: int) -> None:
        """Enter pages of a request in the prefix index. `context` stands for the request's extra keys where events are made
        (`CacheManager.hold_context`).
        """
        for group, num_full_pages, stride, group_id in due:
            self.page_pool.store.enter_held(group, chain, num_full_pages, stride, group_id, context)

    def update_thresholds(self, held: RequestPages) -> None:
        """Work out anew up to where the request needs nothing."""
        num_room_tokens, num_next_full_tokens, num_next_skip_tokens = self.max_model_len, NEVER, NEVER
        num_cached_tokens = 0
        for manager, group in held.by_group:
            num_room_tokens = min(num_room_tokens, manager.get_num_room_tokens(len(group)))
            num_next_skip_tokens = min(num_next_skip_tokens, manager.find_next_skip(group))
            if self.enable_caching and manager.is_prefix_cached:
                num_tokens = group.num_cached_pages * manager.page_size
                num_cached_tokens = max(num_cached_tokens, num_tokens)
                num_next_full_tokens = min(num_next_full_tokens, num_tokens + manager.page_size)
        held.num_room_tokens = num_room_tokens
        held.num_next_full_tokens = num_next_full_tokens
        held.num_next_skip_tokens = num_next_skip_tokens
        held.num_cached_tokens = num_cached_tokens

    def free(self, request_id: str, num_computed_tokens: int | None = None, chain: HashChain | None = None) -> None:
        """Give back all pages of a request, group by group, the last page first. An unknown request has none.

        With `num_computed_tokens` pages that it entered under `chain` with tokens from there on lose their entries.
        """
        held = self.requests.get(request_id)
        if held is None:
            return
        held.forget_thresholds()  # first, for an interrupt may come before the request is forgotten
        if num_computed_tokens is None:
            self.page_pool.store.give_back_held(held.groups)
        else:
            num_computed_pages = PageIds([num_computed_tokens // manager.page_size for manager in self.single_type_managers])
            chain = chain or HashChain(self.hash_page_size, bytes(16))
            self.page_pool.store.give_back_held(held.groups, chain, num_computed_pages, self._strides, self._group_ids)
        del self.requests[request_id]

    def get_num_common_prefix_pages(self, request_id: str, num_scheduled_requests: int) -> list[int]:
        """For each group the leading pages that at least that many requests hold."""
        held = self.requests.get(request_id)
        if held is None or not self.enable_caching:
            return [0] * len(self.single_type_managers)
        return [manager.get_num_common_prefix_pages(group, num_scheduled_requests) for manager, group in held.by_group]

    # What the prefix index holds.

    @abstractmethod
    def find_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE
    ) -> tuple[tuple[PageIds, ...], int]:
        """The longest cached prefix of at most `max_cache_hit_length` tokens: page ids for each group, with the null page in
        the places that the group's attention does not reach, and its length in tokens. Changes nothing.
        """


class CacheCoordinatorNoPrefixCache(CacheCoordinator):
    """Any number of groups, none included, without prefix caching."""

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        page_pool: PagePool | None = None,
    ) -> None:
        """See `CacheManager`."""
        super().__init__(num_pages, kv_cache_groups, max_model_len, use_eagle, False, page_pool)

    def find_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE
    ) -> tuple[tuple[PageIds, ...], int]:
        """Nothing is ever cached."""
        return tuple(PageIds() for _ in self.single_type_managers), 0


class HybridCacheCoordinator(CacheCoordinator):
    """Any number of groups of any kinds, page sizes and order.

    Groups whose rules are equal are looked up together. The hit is the longest length that is a common multiple of all page
    sizes and a hit for each kind: every kind in turn shortens it to what it has, until none shortens it any more. With eagle
    each kind drops its last page once, in the first round. A state group makes every hit 0.
    """

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        enable_caching: bool,
        page_pool: PagePool | None = None,
    ) -> None:
        """ArgumentError for eagle with chunked local attention, which cannot drop a page across chunks."""
        super().__init__(num_pages, kv_cache_groups, max_model_len, use_eagle, enable_caching, page_pool)
        self._kinds = self._group_by_hit_class()
        self._page_size_lcm = lcm(*(manager.page_size for manager, _ in self._kinds if manager.is_prefix_cached))
        if use_eagle and not all(manager.can_drop_page for manager, _ in self._kinds):
            raise ArgumentError("use_eagle: got True, allowed with chunked local attention and caching: False")

    def _group_by_hit_class(self) -> list[tuple[SingleTypeCacheManager, PageIds]]:
        """A manager and the group ids of each kind; full attention first, since it bounds the others at the least cost."""
        kinds: dict[tuple[object, ...], list[SingleTypeCacheManager]] = {}
        for manager in self.single_type_managers:
            kinds.setdefault(manager.hit_class, []).append(manager)
        groups = [(kind[0], PageIds([manager.kv_cache_group_id for manager in kind])) for kind in kinds.values()]
        return sorted(groups, key=lambda group: not group[0].is_prefix_closed)

    def find_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE
    ) -> tuple[tuple[PageIds, ...], int]:
        """O(pages x groups) a round, and rarely more than two rounds. Again if other threads drop what was found."""
        while True:
            num_tokens = self._find_hit_length(chain, max_cache_hit_length, ids)
            hits = self._fetch(chain, num_tokens, ids)
            if hits is not None:
                return hits, num_tokens

    def _find_hit_length(self, chain: HashChain, max_cache_hit_length: int, ids: IdRange) -> int:
        """The length on which all kinds agree."""
        num_tokens = self._shorten(chain, max_cache_hit_length, ids, is_recheck=False)
        previous = -1
        while num_tokens != previous:
            previous = num_tokens
            num_tokens = self._shorten(chain, num_tokens, ids, is_recheck=True)
        return num_tokens

    def _shorten(self, chain: HashChain, num_tokens: int, ids: IdRange, is_recheck: bool) -> int:
        """One round: let each kind shorten the hit to what it has."""
        num_tokens -= num_tokens % self._page_size_lcm
        for manager, group_ids in self._kinds:
            query = PrefixQuery(chain, group_ids, *ids)
            num_tokens = manager.find_hit_length(query, num_tokens, self.use_eagle, is_recheck)
            num_tokens -= num_tokens % self._page_size_lcm
        return num_tokens

    def _fetch(self, chain: HashChain, num_tokens: int, ids: IdRange) -> tuple[PageIds, ...] | None:
        """The pages of a hit of that length; None if one of them is not cached any more."""
        hits = []
        for manager in self.single_type_managers:
            start, stop = manager.find_first_hit_page(num_tokens, self.use_eagle), num_tokens // manager.page_size
            stride, group_id = manager.num_hashes_per_page, manager.kv_cache_group_id
            pages = self.page_pool.store.fetch_hits(chain, stride, start, stop, group_id, *ids)
            if pages is None:
                return None
            hits.append(pages)
        return tuple(hits)


class UnitaryCacheCoordinator(HybridCacheCoordinator):
    """One group: its own longest hit is the answer."""

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        enable_caching: bool,
        page_pool: PagePool | None = None,
    ) -> None:
        """ArgumentError unless there is exactly one group."""
        if len(kv_cache_groups) != 1:
            raise ArgumentError(f"kv_cache_groups: got {len(kv_cache_groups)}, allowed: 1")
        super().__init__(num_pages, kv_cache_groups, max_model_len, use_eagle, enable_caching, page_pool)


def get_kv_cache_coordinator(
    num_pages: int,
    kv_cache_groups: Sequence[CacheGroupSpec],
    max_model_len: int,
    use_eagle: bool,
    enable_caching: bool,
    page_pool: PagePool | None = None,
) -> CacheCoordinator:
    """The coordinator for the number of groups and whether prefixes are cached, on `page_pool` or a new one.

    ArgumentError for a pool of another size, or that caches otherwise.
    """
    if page_pool is not None and not isinstance(page_pool, PagePool):
        raise ArgumentTypeError(f"page_pool: got {type(page_pool).__name__}, allowed: PagePool, or None")
    if page_pool is not None and (page_pool.num_pages, page_pool.enable_caching) != (num_pages, enable_caching):
        raise ArgumentError(
            f"page_pool: got {page_pool.num_pages} pages, caching {page_pool.enable_caching}; "
            f"allowed: {shown(num_pages)} pages, caching {enable_caching}"
        )
    if not enable_caching:
        return CacheCoordinatorNoPrefixCache(num_pages, kv_cache_groups, max_model_len, use_eagle, page_pool)
    cls = UnitaryCacheCoordinator if len(kv_cache_groups) == 1 else HybridCacheCoordinator
    return cls(num_pages, kv_cache_groups, max_model_len, use_eagle, enable_caching, page_pool)

"""The cache groups of a model: the pages of requests in all groups, and the prefixes that hit in all of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import gcd, lcm

from pagepool._core import CacheGroups, HashChain, PageIds, PrefixQuery, RequestPages, load_hits
from pagepool.arguments import require_flag
from pagepool.attention import MambaManager, SingleTypeCacheManager, get_manager_for_kv_cache_spec
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.page_pool import PagePool
from pagepool.page_pool.snapshot import Configuration
from pagepool.specs import CacheGroupSpec

__all__ = [
    "CacheCoordinator",
    "CacheCoordinatorNoPrefixCache",
    "HybridCacheCoordinator",
    "UnitaryCacheCoordinator",
    "get_kv_cache_coordinator",
]

IdRange = tuple[int, int | None]
"""Half-open range of the page ids that may hit; None: to the end of the pool."""

ANY_PAGE: IdRange = (0, None)


class CacheCoordinator(ABC):
    """Keeps the pages of requests for all groups of a model. Subclasses look up prefixes.

    ``requests`` maps request ids to the pages that they hold; ``single_type_managers`` are the rules of each group, and
    ``groups`` the same for the core. A hash covers ``hash_page_size`` tokens, the greatest common divisor of the page sizes of
    the prefix-cached groups; ``max_cached_page_size`` is the largest of these sizes, and ``num_hit_tokens``, of which hits have
    a multiple, their least common multiple, and that of the intervals at which states are kept. All states are kept at
    multiples of it: ``checkpoint_interval``, None without such states.
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
        self.use_eagle = require_flag("use_eagle", use_eagle)
        self.enable_caching = require_flag("enable_caching", enable_caching)
        self.page_pool = page_pool or PagePool(num_pages, self.enable_caching)
        self.num_pages = self.page_pool.num_pages
        self.requests: dict[str, RequestPages] = {}
        self.single_type_managers = tuple(
            get_manager_for_kv_cache_spec(group.kv_cache_spec, page_pool=self.page_pool, kv_cache_group_id=group_id)
            for group_id, group in enumerate(kv_cache_groups)
        )
        cached = [manager for manager in self.single_type_managers if manager.is_prefix_cached]
        page_sizes = [manager.page_size for manager in cached if not manager.is_state]
        states = [manager for manager in cached if isinstance(manager, MambaManager)]
        intervals = [manager.checkpoint_interval or 1 for manager in states]
        self.hash_page_size = gcd(*(page_sizes or intervals)) or 1
        self.max_cached_page_size = max(page_sizes, default=self.hash_page_size)
        self.num_hit_tokens = lcm(*page_sizes, *intervals)
        self.checkpoint_interval = self.num_hit_tokens if intervals and self.enable_caching else None
        _check_intervals(intervals, self.hash_page_size)
        for manager in cached:
            manager.entry_size = self.num_hit_tokens if manager.is_state else manager.page_size
            manager.num_hashes_per_page = manager.entry_size // self.hash_page_size
            manager.num_hit_tokens = 0 if self.use_eagle else self.num_hit_tokens  # eagle's hits are sought one page further
        self.groups = CacheGroups(
            [
                (manager.rules, manager.index_group_id if self.enable_caching else None, manager.num_hashes_per_page)
                for manager in self.single_type_managers
            ]
        )

    def describe(self) -> Configuration:
        """Return, by name, the settings that decide which pages a prefix hits, except those of hashes."""
        configuration: Configuration = {"num_kv_cache_groups": len(self.single_type_managers)}
        for i, manager in enumerate(self.single_type_managers):
            configuration |= {f"kv_cache_groups[{i}].{name}": value for name, value in manager.describe().items()}
        return {**configuration, "hash_page_size": self.hash_page_size}

    # What requests hold.

    def hold_nothing(self) -> RequestPages:
        """Return what a new request holds."""
        return RequestPages(self.page_pool.store, self.groups, self.max_model_len)

    def get_pages(self, request_id: str) -> tuple[PageIds, ...]:
        """Return the ids of a request's pages, for each group; empty for an unknown request."""
        held = self.requests.get(request_id)
        return tuple(PageIds() for _ in self.single_type_managers) if held is None else held.get_page_ids()

    def count_hit_tokens(self, hits: Sequence[PageIds]) -> int:
        """Return the tokens whose pages are among the hits of every group that is prefix-cached."""
        managers = zip(self.single_type_managers, hits, strict=True)
        return min([len(ids) * manager.entry_size for manager, ids in managers if manager.is_prefix_cached], default=0)

    def free(
        self,
        request_id: str,
        num_computed_tokens: int | None = None,
        chain: HashChain | None = None,
        num_last_tokens: int = 0,
        context: int = 0,
    ) -> None:
        """Give back all pages of a request, group by group, the last page first. An unknown request has none.

        With `num_computed_tokens`, pages that it entered under `chain` with later tokens lose their entries. States after
        `num_last_tokens` tokens become checkpoints, if they are due.
        """
        held = self.requests.get(request_id)
        if held is not None:
            held.give_back(num_computed_tokens, chain, num_last_tokens, context)
            del self.requests[request_id]

    def get_num_common_prefix_pages(self, request_id: str, num_scheduled_requests: int) -> list[int]:
        """Return, for each group, the number of leading pages that at least that many requests hold."""
        held = self.requests.get(request_id)
        if held is None or not self.enable_caching:
            return [0] * len(self.single_type_managers)
        return [
            held.count_shared(i, num_scheduled_requests) if manager.is_prefix_closed else 0
            for i, manager in enumerate(self.single_type_managers)
        ]

    # What the prefix index holds.

    @abstractmethod
    def find_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE
    ) -> tuple[tuple[PageIds, ...], int]:
        """Return the longest cached prefix of at most `max_cache_hit_length` tokens, and its length in tokens. The prefix is
        page ids for each group, with the null page where the group's attention does not reach. Changes nothing.
        """

    def load_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE, context: int = 0, num_reserved: int = 0
    ) -> tuple[tuple[PageIds, ...] | None, int]:
        """Return what `find_longest_cache_hit` does once the pages that only the host tier has are noted to be loaded, or None
        in place of page ids if too few pages are free for them beside `num_reserved`. They have the `context`, for events.
        """
        return self.find_longest_cache_hit(chain, max_cache_hit_length, ids)

    @abstractmethod
    def count_cached_tokens(self, chain: HashChain, max_cache_hit_length: int) -> int:
        """Return the length of the longest prefix that is cached in the pool or its host tier, in tokens."""


class CacheCoordinatorNoPrefixCache(CacheCoordinator):
    """Any number of groups, including none, without prefix caching."""

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
        """Return no hit."""
        return tuple(PageIds() for _ in self.single_type_managers), 0

    def count_cached_tokens(self, chain: HashChain, max_cache_hit_length: int) -> int:
        """Return 0."""
        return 0


class HybridCacheCoordinator(CacheCoordinator):
    """Any number of groups of any kinds, page sizes and order.

    Groups with equal rules are looked up together. The hit is the longest common multiple of all page sizes that hits for each
    kind: the kinds shorten it in turn until none shortens it any more. With eagle each kind drops its last page once, in the
    first round. A state group without checkpoints makes every hit 0.
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
        if self.use_eagle and not all(manager.can_drop_page for manager, _ in self._kinds):
            raise ArgumentError("use_eagle: got True, allowed with chunked local attention and caching: False")

    def _group_by_hit_class(self) -> list[tuple[SingleTypeCacheManager, PageIds]]:
        """Return a manager and the group ids of each kind, full attention first: it bounds the others at the least cost."""
        kinds: dict[tuple[object, ...], list[SingleTypeCacheManager]] = {}
        for manager in self.single_type_managers:
            kinds.setdefault(manager.hit_class, []).append(manager)
        groups = [(kind[0], PageIds([manager.kv_cache_group_id for manager in kind])) for kind in kinds.values()]
        return sorted(groups, key=lambda group: not group[0].is_prefix_closed)

    def find_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE
    ) -> tuple[tuple[PageIds, ...], int]:
        """O(pages x groups) a round, rarely more than two rounds. Repeats if another thread drops a page that was found."""
        query = PrefixQuery(self.page_pool.store, chain, *ids)
        return self._fetch_longest(query, self._find_hit_length(query, max_cache_hit_length), max_cache_hit_length)

    def load_longest_cache_hit(
        self, chain: HashChain, max_cache_hit_length: int, ids: IdRange = ANY_PAGE, context: int = 0, num_reserved: int = 0
    ) -> tuple[tuple[PageIds, ...] | None, int]:
        """O(pages x groups) a round. Without a tier it is `find_longest_cache_hit`."""
        store = self.page_pool.store
        if not store.has_tier:
            return self.find_longest_cache_hit(chain, max_cache_hit_length, ids)
        query = PrefixQuery(store, chain, *ids)
        num_tokens = self._find_hit_length(query, max_cache_hit_length)
        if num_tokens < max_cache_hit_length - max_cache_hit_length % self.num_hit_tokens:
            num_all_tokens = self._find_hit_length(PrefixQuery(store, chain, *ids, True), max_cache_hit_length)
            if num_all_tokens > num_tokens and not self._load(chain, num_all_tokens, ids, context, num_reserved):
                return None, num_all_tokens
            num_tokens = num_all_tokens
        return self._fetch_longest(query, num_tokens, max_cache_hit_length)

    def _fetch_longest(self, query: PrefixQuery, num_tokens: int, max_cache_hit_length: int) -> tuple[tuple[PageIds, ...], int]:
        """Return the pages of a prefix that was found, or of what another thread has left of it."""
        hits = self._fetch(query, num_tokens)
        while hits is None:
            num_tokens = self._find_hit_length(query, max_cache_hit_length)
            hits = self._fetch(query, num_tokens)
        return hits, num_tokens

    def count_cached_tokens(self, chain: HashChain, max_cache_hit_length: int) -> int:
        """O(pages x groups) a round, as `find_longest_cache_hit`."""
        return self._find_hit_length(PrefixQuery(self.page_pool.store, chain, *ANY_PAGE, True), max_cache_hit_length)

    def _load(self, chain: HashChain, num_tokens: int, ids: IdRange, context: int, num_reserved: int) -> bool:
        """Have the pages of a prefix that are not in the pool loaded from the tier. False if too few pages are free."""
        spans = [
            (
                manager.kv_cache_group_id,
                manager.num_hashes_per_page,
                manager.find_first_hit_page(num_tokens, self.use_eagle),
                num_tokens // manager.entry_size,
                manager.is_state,
            )
            for manager in self.single_type_managers
        ]
        return load_hits(self.page_pool.store, chain, spans, ids, context, num_reserved)

    def _find_hit_length(self, query: PrefixQuery, max_cache_hit_length: int) -> int:
        """Return the length on which all kinds agree."""
        num_tokens = self._shorten(query, max_cache_hit_length, is_recheck=False)
        previous = -1
        while num_tokens != previous:
            previous = num_tokens
            num_tokens = self._shorten(query, num_tokens, is_recheck=True)
        return num_tokens

    def _shorten(self, query: PrefixQuery, num_tokens: int, is_recheck: bool) -> int:
        """Let each kind shorten the hit once."""
        num_tokens -= num_tokens % self.num_hit_tokens
        for manager, group_ids in self._kinds:
            num_tokens = manager.find_hit_length(query, group_ids, num_tokens, self.use_eagle, is_recheck)
            num_tokens -= num_tokens % self.num_hit_tokens
        return num_tokens

    def _fetch(self, query: PrefixQuery, num_tokens: int) -> tuple[PageIds, ...] | None:
        """Return the pages of a hit; None if one of them is not cached any more."""
        hits = []
        for manager in self.single_type_managers:
            start, stop = manager.find_first_hit_page(num_tokens, self.use_eagle), num_tokens // manager.entry_size
            pages = query.get_hits(manager.kv_cache_group_id, manager.num_hashes_per_page, start, stop)
            if pages is None:
                return None
            hits.append(pages)
        return tuple(hits)


class UnitaryCacheCoordinator(HybridCacheCoordinator):
    """One group."""

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


def _check_intervals(intervals: Sequence[int], hash_page_size: int) -> None:
    """Raise ArgumentError unless states are kept where hashes end."""
    for interval in intervals:
        if interval % hash_page_size:
            raise ArgumentError(
                f"checkpoint_interval: got {interval}, allowed: multiples of {hash_page_size}, the tokens of a hash"
            )


def get_kv_cache_coordinator(
    num_pages: int,
    kv_cache_groups: Sequence[CacheGroupSpec],
    max_model_len: int,
    use_eagle: bool,
    enable_caching: bool,
    page_pool: PagePool | None = None,
) -> CacheCoordinator:
    """Make the coordinator for a number of groups, with or without prefix caching, on `page_pool` or a new pool.

    ArgumentError for a pool of another size or with another `enable_caching`.
    """
    enable_caching = require_flag("enable_caching", enable_caching)
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

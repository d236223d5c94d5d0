"""The door for engines: prefix look-up, slots for tokens, and giving pages back, request by request."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagepool._core import CachePage, PageIds, PageStore, QueryCounter, Refusal, lists_of
from pagepool.arguments import MAX_SIZE, has_status, id_of, read_count, refuse_incomplete, require_int
from pagepool.coordinator import ANY_PAGE, CacheCoordinator, DueEntries, RequestPages, get_kv_cache_coordinator
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError, count_of, shown
from pagepool.forking import MANAGERS, make_lock
from pagepool.hashing import KeyHolder, RequestExtraKeys
from pagepool.hashing.algorithms import HashAlgorithm, make_page_hasher
from pagepool.hashing.request_hashes import RequestHashes, RequestPageHashes
from pagepool.page_pool import PagePool
from pagepool.request import EngineRequestStatus, Request
from pagepool.specs import (
    CacheGroupSpec,
    check_groups,
    pages_per_dp_shard,
    usable_pages_count,
)
from pagepool.stats import CacheStats, QueryCounts, TimeHistogram

if TYPE_CHECKING:
    from pagepool.events import Event, EventSource

__all__ = ["CacheManager", "CachePages", "PrefixProbe"]

logger = logging.getLogger(__name__)

ZERO = 0
"""What a count is where it is left out: there is one such int, which `is` tells from those of other types."""


class CachePages:
    """Pages for each cache group: what a look-up hit, or what an allocation added.

    Holds ids; the page objects of ``pages`` are made when they are first read.
    """

    __slots__ = ("_groups", "_store")

    _groups: tuple[PageIds, ...] | tuple[list[CachePage], ...]

    def __init__(self, pages: tuple[list[CachePage], ...] | tuple[PageIds, ...], store: PageStore | None = None) -> None:
        """One list of pages for each group; with `store`, that pool's page ids instead."""
        self._groups = pages
        self._store = store

    @property
    def pages(self) -> tuple[list[CachePage], ...]:
        """One list of page objects for each group."""
        if self._store is not None:
            self._groups = tuple([self._store.pages(ids) for ids in self._groups])  # type: ignore[arg-type]
            self._store = None
        return self._groups  # type: ignore[return-value]

    def get_page_ids(self) -> tuple[list[int], ...]:
        """One list of page ids for each group. O(pages)."""
        if self._store is not None:
            return lists_of(self._groups)  # type: ignore[arg-type]
        return tuple([page.page_id for page in group] for group in self.pages)

    def get_ids(self, store: PageStore) -> tuple[PageIds, ...]:
        """The native ids; PageIdError unless the pages are of `store`."""
        if self._store is store:
            return self._groups  # type: ignore[return-value]
        return tuple(store.ids_of_pages(group) for group in self.pages)

    def get_unhashed_page_ids(self) -> list[int]:
        """Ids of the pages that are not cached. ArgumentError unless there is exactly one group."""
        if len(self._groups) != 1:
            raise ArgumentError(f"get_unhashed_page_ids: got {len(self._groups)} groups, allowed: 1")
        return [page.page_id for page in self.pages[0] if page.page_hash is None]

    def new_empty(self) -> "CachePages":
        """No pages, for as many groups."""
        return CachePages(tuple([] for _ in self._groups))

    def __add__(self, other: "CachePages") -> "CachePages":
        """The pages of both, group by group. ArgumentError for another number of groups."""
        if not isinstance(other, CachePages):
            return NotImplemented
        if len(self.pages) != len(other.pages):
            raise ArgumentError(f"+: got {len(other.pages)} groups, allowed: {len(self.pages)}, as many as on the left")
        return CachePages(tuple([*mine, *others] for mine, others in zip(self.pages, other.pages, strict=True)))

    def __eq__(self, other: object) -> bool:
        """The same pages in the same order."""
        return isinstance(other, CachePages) and self.pages == other.pages

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """The ids."""
        return f"CachePages(page_ids={self.get_page_ids()})"


class PrefixProbe(NamedTuple):
    """What `CacheManager.probe` found: tokens that would be hit, of those asked for, and why not more."""

    num_hit_tokens: int
    num_queried_tokens: int
    reason: str


class CacheManager(KeyHolder):
    """Allocates pages to requests and finds prefixes that are cached already.

    One owner at a time. Calls from several threads are made one after another all the same, each as a whole; a call that an
    exception interrupts, ``KeyboardInterrupt`` among them, loses no page: `free` gives back what a request got.

    `num_pages` counts the null page. Without groups prefix caching is off. `hash_algo` is ``"siphash128"`` (keyed with a secret
    of the process), ``"sha256"`` (the same in every process), ``"sha256_cbor"`` (vLLM's: see docs/engines.md), or a callable
    such as the builtin `hash`; `hash_seed`, which must not be empty, or ``PYTHONHASHSEED``, makes a keyed one deterministic.
    `keep_token_ids` keeps the tokens of cached pages in their hashes, at 4 bytes a token. `page_pool` is a pool of its own to
    go on with, such as `PagePool.restore` brings back. What it has cached hits; it is refused if the seed, the algorithm or the
    groups are not those that its pages were cached with. Whether tokens are kept may differ. A manager cannot be pickled or
    copied; `PagePool.snapshot` saves its pages.

    >>> from pagepool import CacheGroupSpec, EngineRequest, FullAttentionSpec
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> first = EngineRequest("first", [1, 2, 3, 4, 5, 6])
    >>> manager.allocate_slots(first, num_new_tokens=6).get_page_ids()
    ([1, 2],)
    >>> second = EngineRequest("second", [1, 2, 3, 4, 9])
    >>> hits, num_hit_tokens = manager.get_computed_pages(second)
    >>> hits.get_page_ids(), num_hit_tokens
    (([1],), 4)
    >>> manager.allocate_slots(second, 1, num_hit_tokens, hits).get_page_ids()
    ([3],)
    >>> manager.free(first); manager.free(second)
    """

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        *,
        hash_algo: HashAlgorithm = "siphash128",
        hash_seed: int | str | bytes | None = None,
        keep_token_ids: bool = False,
        page_pool: PagePool | None = None,
    ) -> None:
        """`max_model_len` in tokens. ArgumentError for values out of range and for combinations that cannot work."""
        if not isinstance(kv_cache_groups, Sequence):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(kv_cache_groups).__name__}, allowed: a list of CacheGroupSpec")
        check_groups(kv_cache_groups)
        self.kv_cache_groups = kv_cache_groups
        self.num_kv_cache_groups = len(kv_cache_groups)
        self.max_model_len = require_int("max_model_len", max_model_len, 1, MAX_SIZE)
        self.enable_caching = bool(enable_caching and kv_cache_groups)
        self.use_eagle = use_eagle
        self.coordinator: CacheCoordinator = get_kv_cache_coordinator(
            num_pages, kv_cache_groups, self.max_model_len, use_eagle, self.enable_caching, page_pool
        )
        self.page_pool = self.coordinator.page_pool
        self.num_pages = self.page_pool.num_pages
        self.page_size = self.coordinator.single_type_managers[0].page_size if self.enable_caching else None
        self._store = self.page_pool.store
        self.hasher = make_page_hasher(hash_algo, self.coordinator.hash_page_size, hash_seed)
        self.hasher.keep_token_ids = keep_token_ids
        if self.enable_caching:
            self._bind_pool(keep_token_ids)
        if keep_token_ids and self.enable_caching:
            self._store.keep_token_ids(self.coordinator.max_cached_page_size)
        self._hashes: dict[str, RequestHashes] = {}
        self._lock = make_lock(self, "_lock", MANAGERS)  # a request's attributes, and a garbage collection, may call us back
        self._requests = self.coordinator.requests
        self.event_source: EventSource | None = None
        self.query_counters = QueryCounter(self._store), QueryCounter(self._store, is_preempted=True)
        self._no_ids = tuple(PageIds() for _ in kv_cache_groups)

    def _bind_pool(self, keep_token_ids: bool) -> None:
        """ArgumentError, and nothing changed, for a pool in which pages were cached otherwise, or that keeps too few tokens."""
        num_kept, num_needed = self._store.num_kept_token_ids, self.coordinator.max_cached_page_size
        if 0 < num_kept < num_needed and not keep_token_ids:
            raise ArgumentError(
                f"page_pool: got one that keeps {num_kept} token ids of a page, allowed for pages of {num_needed}: none, "
                f"at least {num_needed}, or any with keep_token_ids=True"
            )
        self.page_pool.bind({**self.hasher.describe(), **self.coordinator.describe()})

    def __repr__(self) -> str:
        """Its sizes, and how much of the pool is in use."""
        return (
            f"CacheManager(num_pages={self.num_pages}, num_free_pages={self._store.num_free_pages}, "
            f"num_cached_pages={self._store.num_cached_pages}, num_requests={len(self._requests)}, "
            f"num_kv_cache_groups={self.num_kv_cache_groups}, max_model_len={self.max_model_len}, "
            f"enable_caching={self.enable_caching})"
        )

    @property
    def usage(self) -> float:
        """Share of the pages that are not free, the null page counted as used: 0.0 to 1.0."""
        return self.page_pool.get_usage()

    @property
    def req_to_page_hashes(self) -> RequestPageHashes:
        """The hashes of each request's pages, by request id: a live, read-only view."""
        return RequestPageHashes(self.hasher, self._hashes)

    # Prefix look-up.

    def get_computed_pages(
        self, request: Request, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> tuple[CachePages, int]:
        """The longest cached prefix of a request, in full pages, and its length in tokens: at most ``num_tokens - 1``, so that
        one token is left to compute.

        Nothing when caching is off or the request wants ``prompt_logprobs``. With eagle the last page that hits is dropped;
        with a hint only pages of that shard hit. Takes no references: pass the pages to `allocate_slots` before anything else
        is allocated. The look-up counts in `stats` once `allocate_slots` admits the request. O(pages), hashing included the
        first time; O(1) for a request of one group of full attention that `allocate_slots` refused with its hits, until one of
        these finds another holder or another page of it is cached.
        """
        query = self._read_query(request)
        if query is None:
            return self.create_empty_page_list(), 0
        num_queried_tokens, is_preempted = query
        is_anywhere = dp_shard_hint is None and data_parallel_size is None
        ids = ANY_PAGE if is_anywhere else self.page_pool.find_shard_bounds(dp_shard_hint, data_parallel_size)
        with self._lock:
            hashes = self._extend_hashes(request, num_queried_tokens)
            refusal = hashes.refusal
            if refusal and ids == ANY_PAGE and refusal.num_tokens == num_queried_tokens and refusal.has_same_hits():
                pages, num_tokens = refusal.hits, refusal.num_hit_tokens
            else:
                hashes.refusal = None
                pages, num_tokens = self.coordinator.find_longest_cache_hit(hashes.chain, num_queried_tokens - 1, ids)
            hashes.query = num_queried_tokens, num_tokens, is_preempted or hashes.is_counted
        return CachePages(pages, self._store), num_tokens

    def probe(self, request: Request) -> PrefixProbe:
        """What `get_computed_pages` would find, and why not more. Changes nothing, counters and stored hashes included."""
        query = self._read_query(request)
        if query is None:
            reason = "prompt_logprobs are asked for" if self.enable_caching else "prefix caching is off"
            return PrefixProbe(0, read_count(request, "num_tokens"), reason)
        num_queried_tokens, _ = query
        hashes = self.hasher.start(request, self._hashes.get(request.request_id))
        self.hasher.extend(hashes, request, num_queried_tokens // self.coordinator.hash_page_size)
        _, num_tokens = self.coordinator.find_longest_cache_hit(hashes.chain, num_queried_tokens - 1)
        is_all = num_queried_tokens - num_tokens <= self.coordinator.hash_page_size
        reason = "all full pages hit" if is_all else f"the page at token {num_tokens} is not cached for every group"
        return PrefixProbe(num_tokens, num_queried_tokens, reason)

    def _read_query(self, request: Request) -> tuple[int, bool] | None:
        """The number of a request's tokens, and whether it was preempted; None if it takes no hits."""
        try:
            num_tokens, is_preempted = request.num_tokens, request.status == EngineRequestStatus.PREEMPTED
            params = request.sampling_params
        except AttributeError as error:
            refuse_incomplete(request, error)
            raise
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = require_int("num_tokens", num_tokens, 0)
        if type(is_preempted) is not bool:  # of NumPy
            is_preempted = has_status(request, EngineRequestStatus.PREEMPTED)
        return (num_tokens, is_preempted) if self.enable_caching and getattr(params, "prompt_logprobs", None) is None else None

    def _extend_hashes(self, request: Request, num_tokens: int) -> RequestHashes:
        """The request's hashes, made at least for its full pages up to `num_tokens`."""
        try:
            hashes = self._hashes.get(request.request_id)
        except (AttributeError, TypeError):
            hashes = self._hashes.get(id_of(request))
        if hashes is None or hashes.request is not request:  # another request may have had this id, and other tokens
            hashes = self._hashes[request.request_id] = self.hasher.start(request)
        self.hasher.extend(hashes, request, num_tokens // self.coordinator.hash_page_size)
        return hashes

    # Slots.

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: CachePages | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_pages: bool = False,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        *,
        num_external_computed_tokens: int = 0,
        num_reserved_pages: int = 0,
    ) -> CachePages | None:
        """Make room for the next tokens of a request and return the new pages; None, and nothing taken, if too few are free.

        The request has ``num_computed_tokens`` computed; `num_new_computed_tokens` more are in `new_computed_pages`, the hits
        of `get_computed_pages`, for a request that holds no page yet; `num_external_computed_tokens` more will be filled by a
        transfer; then come `num_new_tokens` to compute now and room for `num_lookahead_tokens` drafts, up to `max_model_len`.
        All but the drafts are entered in the prefix index as far as they fill pages and the request knows their tokens, unless
        `delay_cache_pages` (call `cache_pages` later). If the step does not run, `free` with `num_computed_tokens` drops those
        entries. Pages that an attention window has left are given back first, even if None is returned.

        With `data_parallel_size` > 1 pages come from the shard that the request's pages are in, else from the hinted one; where
        that shard is too short the hits count as used just now and None is returned. `num_reserved_pages` free pages are left
        for others (a watermark for admission).

        ArgumentError, a ValueError, and nothing changed, for 0 new tokens, for more tokens than `max_model_len`, and for tokens
        that cannot have been computed: of a request that holds nothing those beyond the hits (one that was preempted starts at
        0 again), of another one those beyond its slots. The state of a state group cannot go back: free a request whose
        ``num_computed_tokens`` does, or restore its state. Amortised O(new pages).
        """
        try:
            num_computed_tokens = request.num_computed_tokens
            counts = num_new_tokens | num_lookahead_tokens | num_computed_tokens  # a plain int, not negative, if all three are
            is_plain = type(counts) is int and counts >= 0 and num_new_tokens
            held = self._requests.get(request.request_id)
        except (AttributeError, OverflowError, TypeError):
            is_plain = False
        if is_plain and num_new_computed_tokens is num_external_computed_tokens is ZERO:
            num_tokens = num_computed_tokens + num_new_tokens
        else:
            num_new_tokens, num_external_computed_tokens, num_new_computed_tokens, num_lookahead_tokens = _read_num_tokens(
                num_new_tokens, num_external_computed_tokens, num_new_computed_tokens, num_lookahead_tokens
            )
            num_computed_tokens = read_count(request, "num_computed_tokens")
            held = self._requests.get(id_of(request))
            num_tokens = num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens + num_new_tokens
        if (
            held is not None
            and num_tokens + num_lookahead_tokens <= held.num_room_tokens
            and num_tokens < held.num_next_full_tokens
            and held.num_cached_tokens <= num_computed_tokens < held.num_next_skip_tokens
            and new_computed_pages is None
            and not num_new_computed_tokens
        ):
            return CachePages(self._no_ids, self._store)
        if num_tokens > self.max_model_len:
            raise ArgumentError(
                f"request {shown(request.request_id)}: got {shown(num_tokens)} tokens, allowed: {self.max_model_len}"
            )
        num_reserved_pages = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        if new_computed_pages is not None and not isinstance(new_computed_pages, CachePages):
            raise ArgumentTypeError(f"new_computed_pages: got {type(new_computed_pages).__name__}, allowed: CachePages")
        num_tokens_with_slot = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        with self._lock:
            hits = self._get_hits(request, new_computed_pages)
            if held is None or num_new_computed_tokens or num_computed_tokens > held.num_room_tokens:
                self._check_computed(request, num_computed_tokens, num_new_computed_tokens, hits)
            if data_parallel_size is None and self._is_refused_still(request, hits, num_tokens_with_slot, num_reserved_pages):
                return None
            return self._allocate_slots(
                request,
                num_computed_tokens,
                hits,
                num_tokens_with_slot,
                0 if delay_cache_pages or not self.enable_caching else min(num_tokens, read_count(request, "num_tokens")),
                dp_shard_hint,
                data_parallel_size,
                num_reserved_pages,
            )

    def _allocate_slots(
        self,
        request: Request,
        num_computed_tokens: int,
        hits: tuple[PageIds, ...],
        num_tokens_with_slot: int,
        num_tokens_to_cache: int,
        dp_shard_hint: int | None,
        data_parallel_size: int | None,
        num_reserved_pages: int,
    ) -> CachePages | None:
        """Do what is due: hash first, which may fail for want of tokens, then skip, take and enter pages."""
        if hits is not self._no_ids:
            managers = self.coordinator.single_type_managers
            self._extend_hashes(request, max(len(ids) * manager.page_size for ids, manager in zip(hits, managers, strict=True)))
        is_admission = request.request_id not in self._requests
        held = self._requests.get(request.request_id) or RequestPages(self.coordinator.single_type_managers)
        is_full = num_tokens_to_cache >= held.num_next_full_tokens or num_computed_tokens < held.num_cached_tokens
        self.page_pool.find_shard(dp_shard_hint, data_parallel_size)  # refuses wrong ones before anything changes
        hashes = self._extend_hashes(request, num_tokens_to_cache) if is_full else None
        self.coordinator.rewind(held, num_computed_tokens)
        due = [] if hashes is None else self.coordinator.list_due(held, hashes.chain, num_tokens_to_cache)
        self.coordinator.remove_skipped_pages(held, num_computed_tokens)
        new_ids: tuple[PageIds, ...] | None = self._no_ids
        if num_tokens_with_slot > held.num_room_tokens or hits is not self._no_ids:
            shard = self._find_shard(held, hits, dp_shard_hint, data_parallel_size)
            new_ids = self._take_pages(request, held, hits, num_tokens_with_slot, shard, num_reserved_pages)
        if new_ids is not None and hashes is not None and due:
            self._cache_pages(held, hashes, num_tokens_to_cache, due)
        self.coordinator.update_thresholds(held)
        if new_ids is not None and is_admission:
            self._count_admission(request, hits)
        return None if new_ids is None else CachePages(new_ids, self._store)

    def _check_computed(
        self, request: Request, num_computed_tokens: int, num_new_computed_tokens: int, hits: tuple[PageIds, ...]
    ) -> None:
        """ArgumentError for more computed tokens than a request can have: what nobody computed would be cached. O(groups)."""
        num_tokens = num_computed_tokens + num_new_computed_tokens
        held = self._requests.get(request.request_id)
        if num_tokens == 0 or not self.kv_cache_groups:
            return
        if held is None:
            allowed = num_allowed_tokens = self.coordinator.count_hit_tokens(hits)
            reason = "together, the tokens of new_computed_pages, for a request that holds no pages"
        elif num_new_computed_tokens == 0:
            allowed = num_allowed_tokens = self.coordinator.count_room_tokens(held)
            reason = "the tokens for which it has slots"
        else:
            allowed, num_allowed_tokens = 0, num_computed_tokens
            reason = "new ones for a request that holds pages already"
        if num_tokens > num_allowed_tokens:
            raise ArgumentError(
                f"request {shown(request.request_id)}: got num_computed_tokens {shown(num_computed_tokens)} and "
                f"num_new_computed_tokens {shown(num_new_computed_tokens)}, allowed: {allowed} {reason}"
            )

    def _get_hits(self, request: Request, new_computed_pages: CachePages | None) -> tuple[PageIds, ...]:
        """The native ids of hits, which only a request without pages may take."""
        if new_computed_pages is None:
            return self._no_ids
        hits = new_computed_pages.get_ids(self._store)
        if len(hits) != self.num_kv_cache_groups:
            raise ArgumentError(f"new_computed_pages: got {len(hits)} groups, allowed: {self.num_kv_cache_groups}")
        if not any(hits):
            return self._no_ids
        if not self.enable_caching:
            raise ArgumentError("new_computed_pages: got pages, allowed without prefix caching: none")
        held = self._requests.get(request.request_id)
        if held is not None and any(held.groups):
            raise ArgumentError(
                f"new_computed_pages: got pages for request {shown(request.request_id)}, "
                "which holds some already; allowed: none"
            )
        return hits

    def _find_shard(
        self,
        held: RequestPages,
        hits: Sequence[PageIds],
        dp_shard_hint: int | None,
        data_parallel_size: int | None,
    ) -> tuple[int, int] | None:
        """The shard that all pages of the request are in, else the hinted one, of how many; None: anywhere."""
        pages_per_shard = pages_per_dp_shard(self.num_pages, data_parallel_size)
        if pages_per_shard is None:
            return None
        shard = PageIds.joined((*held.groups, *hits)).shard(pages_per_shard)
        return self.page_pool.find_shard(dp_shard_hint if shard < 0 else shard, data_parallel_size)

    def _take_pages(
        self,
        request: Request,
        held: RequestPages,
        hits: tuple[PageIds, ...],
        num_tokens: int,
        shard: tuple[int, int] | None,
        num_reserved_pages: int,
    ) -> tuple[PageIds, ...] | None:
        """Attach the hits and take the new pages, or nothing of it."""
        num_new_pages = self.coordinator.count_pages_to_allocate(held, num_tokens, hits)
        has_hits = hits is not self._no_ids
        hashes = self._hashes[request.request_id] if has_hits else None
        self._requests[request.request_id] = held  # before anything is taken, so that no interrupt can lose it
        try:
            new_ids = self.coordinator.take_pages(
                held, num_new_pages, hits if has_hits else (), hashes.chain if hashes else None, shard, num_reserved_pages
            )
        finally:
            if not any(held.groups):
                del self._requests[request.request_id]
        if new_ids is None:
            self._warn_if_hopeless((*held.groups, *hits), sum(num_new_pages))
        if new_ids is None and hashes and shard is None:
            self._note_refusal(hashes, hits)
        return new_ids

    def _is_refused_still(self, request: Request, hits: tuple[PageIds, ...], num_tokens: int, num_reserved_pages: int) -> bool:
        """Whether the request was refused with these hits, and is again for certain."""
        hashes = self._hashes.get(request.request_id)
        if hashes is None or hashes.refusal is None or hashes.request is not request:
            return False
        if hashes.refusal.hits is not hits or request.request_id in self._requests:
            return False
        num_new_pages = max(0, self.coordinator.single_type_managers[0].get_num_pages(num_tokens) - len(hits[0]))
        if not hashes.refusal.is_short(num_new_pages, num_reserved_pages):
            return False
        self._warn_if_hopeless(hits, num_new_pages)
        return True

    def _note_refusal(self, hashes: RequestHashes, hits: tuple[PageIds, ...]) -> None:
        """Remember the hits of a refused request, if they are the leading pages of its only group."""
        manager = self.coordinator.single_type_managers[0]
        if hashes.query is None or len(hits) > 1 or not manager.is_prefix_closed or self.use_eagle:
            return
        refusal = Refusal(hits, hashes.query[0], len(hits[0]) * manager.page_size)
        is_watched = refusal.watch_hits(self._store, hashes.chain, manager.num_hashes_per_page, manager.kv_cache_group_id)
        hashes.refusal = refusal if is_watched else None

    def _count_admission(self, request: Request, hits: Sequence[PageIds]) -> None:
        """Count the look-up of a request that was just admitted, with the hits that it took."""
        hashes = self._hashes.get(request.request_id)
        if hashes is None or hashes.query is None:
            return
        num_queried_tokens, num_hit_tokens, is_preempted = hashes.query
        hashes.query, hashes.refusal, hashes.is_counted = None, None, True
        managers = self.coordinator.single_type_managers
        num_taken_tokens = max(len(ids) * manager.page_size for ids, manager in zip(hits, managers, strict=True))
        self.query_counters[is_preempted].add(num_queried_tokens, min(num_hit_tokens, num_taken_tokens))

    def _warn_if_hopeless(self, held: Sequence[PageIds], num_new_pages: int) -> None:
        num_usable_pages = usable_pages_count(self.num_pages)
        if sum(map(len, held)) + num_new_pages <= num_usable_pages:  # most often; null pages need not be told apart
            return
        num_needed_pages = num_new_pages + sum([page_id != 0 for ids in held for page_id in ids.to_list()])
        if num_needed_pages > num_usable_pages:
            logger.warning(
                "a request needs %d pages at once, the pool has %d: no waiting helps, see CacheManager.require_capacity",
                num_needed_pages,
                num_usable_pages,
            )

    def require_capacity(self, num_tokens: int) -> None:
        """RequestTooLargeError if a request of `num_tokens` tokens could not run to its end even alone in the pool.

        Ask at admission: `allocate_slots` returns None for such a request for ever. O(groups).
        """
        num_tokens = min(require_int("num_tokens", num_tokens, 0), self.max_model_len)
        num_pages = sum(manager.get_min_num_pages(num_tokens) for manager in self.coordinator.single_type_managers)
        if num_pages > usable_pages_count(self.num_pages):
            needed = f"a request of {count_of(num_tokens, 'token')} needs {count_of(num_pages, 'page')}"
            raise RequestTooLargeError(f"{needed}, the pool has {usable_pages_count(self.num_pages):,}")

    # Caching what got full.

    def cache_pages(self, request: Request, num_computed_tokens: int) -> None:
        """Enter the pages that the first `num_computed_tokens` tokens fill in the prefix index: what a delayed allocation left
        out. Nothing without caching. ArgumentError if the request does not hold them. O(new full pages).
        """
        if not self.enable_caching:
            return
        num_tokens = require_int("num_computed_tokens", num_computed_tokens, 0)
        with self._lock:
            held = self._requests.get(id_of(request))
            if held is None:
                raise ArgumentError(f"request {shown(request.request_id)} holds no pages")
            num_room_tokens = self.coordinator.count_room_tokens(held)
            if num_tokens > num_room_tokens:
                raise ArgumentError(f"num_computed_tokens: got {shown(num_tokens)}, allowed: at most {num_room_tokens}")
            num_before = read_count(request, "num_computed_tokens")
            hashes = self._extend_hashes(request, num_tokens)
            self.coordinator.rewind(held, num_before)
            self._cache_pages(held, hashes, num_tokens, self.coordinator.list_due(held, hashes.chain, num_tokens))
            self.coordinator.update_thresholds(held)

    def _cache_pages(self, held: RequestPages, hashes: RequestHashes, num_tokens: int, due: Sequence[DueEntries]) -> None:
        if hashes.page_hashes:
            start = max(0, self.coordinator.count_cached_hashes(held) - 1)  # with the parent of the first
            self.hasher.name_pages(self._store.names, hashes, start, num_tokens // self.coordinator.hash_page_size)
        context = self.hold_context(hashes.extra_keys) if hashes.extra_keys else 0
        try:
            self.coordinator.cache_pages(due, hashes.chain, context)
        finally:
            if context:
                self._store.release_context(context)
        if hashes.page_hashes:
            self.page_pool.forget_evicted_names()

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, after new weights for instance. False, and nothing changed, while a page is held."""
        with self._lock:
            return self.page_pool.reset_prefix_cache()

    # Events.

    def enable_events(self, *, hashes_as_bytes: bool = False) -> None:
        """Note from now on what comes into the prefix cache and goes, for `take_events`: before the first request.

        Hashes are told as unsigned ints, the lowest 64 bits of the digest, or as the bytes of all of it. Other processes make
        the same hashes only with the same `hash_seed`, or ``"sha256"`` or ``"sha256_cbor"`` as `hash_algo`. Costs 56 bytes a
        page and 4 a token, and a cold prompt 5 to 11 % more time. ImportError without the extra ``pagepool[events]``;
        ArgumentError without prefix caching, where pages are held or cached already, and for another choice than before.
        """
        try:
            from pagepool.events import EventSource
        except ImportError:
            raise ImportError("events need msgspec: pip install 'pagepool[events]'") from None
        if not self.enable_caching:
            raise ArgumentError("events: got a manager without prefix caching, which has none")
        with self._lock:
            if self.event_source is None:
                self._store.keep_token_ids(self.coordinator.max_cached_page_size)
                self.event_source = EventSource(self._store, self.kv_cache_groups, self.hasher, hashes_as_bytes)
                self.hasher.keep_token_ids = True
                self._hashes.clear()  # those of requests that were looked up already have no tokens
            elif self.event_source.hashes_as_bytes != hashes_as_bytes:
                raise ArgumentError(f"hashes_as_bytes: got {hashes_as_bytes}, allowed: {self.event_source.hashes_as_bytes}")

    def take_events(self) -> "list[Event]":
        """What changed in the prefix cache since this was called last, a running batch's pages included: `AllBlocksCleared`,
        `BlockRemoved`, `BlockStored` of `pagepool.events`, in this order, parents before their children.

        Of what came and went again since nothing is told. Where a call was interrupted the next one starts over, with
        `AllBlocksCleared` and all that is cached. ArgumentError unless events were enabled. O(changes).
        """
        return self.require_event_source().take()

    def snapshot_events(self) -> "list[Event]":
        """All that can be hit now as `BlockStored`, parents first: for a router that starts late. What changed since
        `take_events` is in it, and is told again by the next `take_events`, so take those before. O(num_pages).
        """
        return self.require_event_source().list_all()

    def require_event_source(self) -> "EventSource":
        """Where events come from; ArgumentError unless they were enabled."""
        if self.event_source is None:
            raise ArgumentError("events: call enable_events before the first request")
        return self.event_source

    def hold_context(self, extra_keys: RequestExtraKeys | None) -> int:
        """What stands for extra keys in the core until `release_context`; 0 for none, and where no events are made."""
        if extra_keys is None or self.event_source is None:
            return 0
        with self._lock:
            return self.event_source.contexts.hold(extra_keys)

    def release_context(self, context: int) -> None:
        """Let what `hold_context` returned stand for something else, once no page has it any more. 0 stands for nothing."""
        if context:
            self._store.release_context(context)

    # Giving back.

    def free(self, request: Request, *, num_computed_tokens: int | None = None) -> None:
        """Give back the pages of a request, the last first, so that the ends of prefixes are evicted before their beginnings.

        Nothing for a request that holds none. Its hashes stay, for when it comes back. O(pages).

        `num_computed_tokens` is for a request that was scheduled and did not run, because the step failed or it was preempted
        after it was scheduled: how many of its tokens were computed indeed, hits included. Pages that it entered in the prefix
        index with tokens from there on lose their entries, held by others or not. Free others that hit them since as well.
        """
        if num_computed_tokens is not None:
            num_computed_tokens = require_int("num_computed_tokens", num_computed_tokens, 0)
        with self._lock:
            hashes = self._hashes.get(id_of(request))
            self.coordinator.free(request.request_id, num_computed_tokens, hashes.chain if hashes else None)
            if num_computed_tokens is not None:
                self.page_pool.forget_evicted_names()

    def free_page_hashes(self, request: Request) -> None:
        """Forget the hashes of a request that is finished. Not for one that is preempted and will come back: if it has images
        without features, it hits none of its pages any more.
        """
        with self._lock:
            self._hashes.pop(id_of(request), None)

    # Looking.

    def stats(self) -> CacheStats:
        """What the cache holds and did: see `CacheStats`. Numbers of one call fit together unless other threads go on
        meanwhile. O(1), 10 us.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=11, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", [1, 2, 3, 4, 9])
        >>> _ = manager.get_computed_pages(request), manager.allocate_slots(request, 5)
        >>> stats = manager.stats()
        >>> stats.num_held_pages, stats.num_cached_pages, stats.usage, stats.queries.num_queried_tokens
        (2, 1, 0.2, 5)
        """
        pool = self.page_pool.stats
        queries, preempted_queries = (QueryCounts(*counter.counts) for counter in self.query_counters)
        num_pages, num_free_pages = self.num_pages - 1, self._store.num_free_pages
        num_held_pages = num_pages - num_free_pages
        lifetime, idle_before_eviction, reuse_gap = (TimeHistogram.of(*counts) for counts in self._store.residency)
        return CacheStats(
            num_pages=num_pages,
            num_free_pages=num_free_pages,
            num_held_pages=num_held_pages,
            num_cached_pages=self._store.num_cached_pages,
            usage=num_held_pages / num_pages if num_pages else 0.0,
            queries=queries,
            preempted_queries=preempted_queries,
            num_allocated_pages=pool.num_allocated_pages,
            num_freed_pages=pool.num_freed_pages,
            num_evicted_pages=pool.num_evicted_pages,
            lifetime=lifetime,
            idle_before_eviction=idle_before_eviction,
            reuse_gap=reuse_gap,
        )

    def check(self) -> None:
        """IntegrityError, naming the first page that is wrong, unless each page has at least the references that requests hold,
        and the pool is right. O(num_pages + pages held).
        """
        with self._lock:
            self._store.check_holders(self.coordinator.get_all_held())
            self.page_pool.check()

    def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of a request's pages, one list for each group; the null page, 0, where one was skipped. O(pages)."""
        try:
            pages = self.coordinator.get_pages(request_id)
        except TypeError:
            raise ArgumentTypeError(f"request_id: got {type(request_id).__name__}, allowed: a string") from None
        return lists_of(pages)

    def get_num_common_prefix_pages(self, request: Request, num_scheduled_requests: int) -> list[int]:
        """For each group the leading pages of a running request that at least `num_scheduled_requests` requests hold.

        Counts holders, not batches: a page held by a request that is not scheduled counts too. 0 for groups that are not full
        attention, and without caching. ArgumentError unless the request is RUNNING.
        """
        request_id = id_of(request)
        if not has_status(request, EngineRequestStatus.RUNNING):
            status = request.status if isinstance(request.status, EngineRequestStatus) else shown(request.status)
            raise ArgumentError(f"request {shown(request_id)}: status is {status}, allowed: RUNNING")
        num_scheduled_requests = require_int("num_scheduled_requests", num_scheduled_requests)
        return self.coordinator.get_num_common_prefix_pages(request_id, num_scheduled_requests)

    def create_empty_page_list(self) -> CachePages:
        """No pages, for the groups of this manager."""
        return CachePages(self._no_ids, self._store)


def _read_num_tokens(
    num_new_tokens: int, num_external_tokens: int, num_new_computed_tokens: int, num_lookahead_tokens: int
) -> tuple[int, int, int, int]:
    """The four as ints of Python's: sums of NumPy's wrap around. ArgumentError for negative counts and for nothing to do,
    ArgumentTypeError for what is no int.
    """
    num_new_computed_tokens = require_int("num_new_computed_tokens", num_new_computed_tokens, 0)
    num_lookahead_tokens = require_int("num_lookahead_tokens", num_lookahead_tokens, 0)
    num_external_tokens = require_int("num_external_computed_tokens", num_external_tokens, 0)
    num_new_tokens = require_int("num_new_tokens", num_new_tokens, 0 if num_external_tokens else 1)
    return num_new_tokens, num_external_tokens, num_new_computed_tokens, num_lookahead_tokens

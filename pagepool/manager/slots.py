"""Allocates slots for the next tokens of requests, and enters full pages in the prefix index."""

from collections.abc import Sequence
from typing import NamedTuple

from pagepool._core import PageIds, RequestPages, are_states_due, check_copies_taken, keep_states, pass_states
from pagepool.arguments import id_of, read_count
from pagepool.coordinator import CacheCoordinator
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing import KeyHolder
from pagepool.hashing.request_hashes import RequestHashes
from pagepool.manager.cache_pages import CachePages
from pagepool.manager.lookups import PrefixLookups
from pagepool.request import Request
from pagepool.specs import pages_per_dp_shard

__all__ = ["ANYWHERE", "Placement", "SlotAllocator"]


class Placement(NamedTuple):
    """Where new pages may come from: the data-parallel shard, and the pages that stay free."""

    dp_shard_hint: int | None = None
    data_parallel_size: int | None = None
    num_reserved_pages: int = 0


ANYWHERE = Placement()


class SlotAllocator(KeyHolder):
    """Takes and enters the pages of requests. The manager holds its lock during each call, and has checked the counts.

    ``no_ids`` is an empty list of pages for each group.
    """

    def __init__(self, coordinator: CacheCoordinator, lookups: PrefixLookups, num_groups: int, enable_caching: bool) -> None:
        """`coordinator` has the pages of requests, `lookups` their hashes."""
        self.no_ids = tuple(PageIds() for _ in range(num_groups))
        self._coordinator = coordinator
        self._lookups = lookups
        self._enable_caching = enable_caching
        self._pool = coordinator.page_pool
        self._store = self._pool.store
        self._requests = coordinator.requests

    def get_hits(self, request: Request, new_computed_pages: CachePages | None) -> tuple[PageIds, ...]:
        """Return the native ids of hits. ArgumentError if the request already holds pages."""
        if new_computed_pages is None:
            return self.no_ids
        if not isinstance(new_computed_pages, CachePages):
            raise ArgumentTypeError(f"new_computed_pages: got {type(new_computed_pages).__name__}, allowed: CachePages")
        hits = new_computed_pages.get_ids(self._store)
        if len(hits) != len(self.no_ids):
            raise ArgumentError(f"new_computed_pages: got {len(hits)} groups, allowed: {len(self.no_ids)}")
        if not any(hits):
            return self.no_ids
        if not self._enable_caching:
            raise ArgumentError("new_computed_pages: got pages, allowed without prefix caching: none")
        held = self._requests.get(request.request_id)
        if held:
            raise ArgumentError(
                f"new_computed_pages: got pages for request {shown(request.request_id)}, "
                "which holds some already; allowed: none"
            )
        return hits

    def check_computed(
        self, request: Request, num_computed_tokens: int, num_new_computed_tokens: int, hits: tuple[PageIds, ...]
    ) -> None:
        """Raise ArgumentError for more computed tokens than the request can have: they would be cached. O(groups)."""
        num_tokens = num_computed_tokens + num_new_computed_tokens
        held = self._requests.get(request.request_id)
        if self._coordinator.checkpoint_interval and any(hits):
            managers = self._coordinator.single_type_managers
            lengths = [len(ids) * manager.entry_size for ids, manager in zip(hits, managers, strict=True)]
            if any(length != num_tokens for length in lengths):
                raise ArgumentError(
                    f"request {shown(request.request_id)}: got {num_tokens} computed tokens, and new_computed_pages of "
                    f"{lengths} tokens by group; allowed with a state: all equal"
                )
        if num_tokens == 0 or not self.no_ids:
            return
        if held is None:
            allowed = num_allowed_tokens = self._coordinator.count_hit_tokens(hits)
            reason = "together, the tokens of new_computed_pages, for a request that holds no pages"
        elif num_new_computed_tokens == 0:
            allowed = num_allowed_tokens = held.num_room_tokens
            reason = "the tokens for which it has slots"
        else:
            allowed, num_allowed_tokens = 0, num_computed_tokens
            reason = "new ones for a request that holds pages already"
        if num_tokens > num_allowed_tokens:
            raise ArgumentError(
                f"request {shown(request.request_id)}: got num_computed_tokens {shown(num_computed_tokens)} and "
                f"num_new_computed_tokens {shown(num_new_computed_tokens)}, allowed: {allowed} {reason}"
            )

    def allocate(
        self,
        request: Request,
        num_computed_tokens: int,
        hits: tuple[PageIds, ...],
        num_slots: int,
        num_tokens_to_cache: int,
        placement: Placement,
    ) -> tuple[PageIds, ...] | None:
        """Hash first, which fails if tokens are missing; then skip, take and enter pages. None if too few pages are free."""
        if hits is not self.no_ids:
            managers = self._coordinator.single_type_managers
            self._lookups.extend(
                request, max(len(ids) * manager.entry_size for ids, manager in zip(hits, managers, strict=True))
            )
        held = self._requests.get(request.request_id)
        is_admission = held is None
        if is_admission and self._lookups.is_short(request):
            return None
        held = held or self._coordinator.hold_nothing()
        check_copies_taken(held)
        is_due_state = not is_admission and are_states_due(held, num_computed_tokens)
        is_kept = is_due_state and self._is_kept_after(num_computed_tokens, num_tokens_to_cache)
        kept_hashes = self._lookups.extend_named(request, num_computed_tokens) if is_kept else None
        is_full = num_tokens_to_cache > 0 and (is_admission or held.is_due(num_tokens_to_cache, num_computed_tokens))
        self._pool.find_shard(placement.dp_shard_hint, placement.data_parallel_size)  # raises before anything changes
        hashes = self._lookups.extend(request, num_tokens_to_cache) if is_full else None
        held.rewind(num_computed_tokens)
        is_due = hashes is not None and held.check_enterable(hashes.chain, num_tokens_to_cache, hits)
        held.skip(num_computed_tokens)
        new_ids: tuple[PageIds, ...] | None = self.no_ids
        if num_slots > held.num_room_tokens or hits is not self.no_ids:
            new_ids = self._take_pages(request, held, hits, num_slots, placement)
        if new_ids is not None and kept_hashes is not None:
            new_ids = self._keep_states(held, kept_hashes, num_computed_tokens, new_ids, placement)
        elif new_ids is not None and is_due_state:
            pass_states(held, num_computed_tokens)
        if new_ids is not None and hashes is not None and is_due:
            self.enter_pages(held, hashes, num_tokens_to_cache)
        if new_ids is not None and is_admission:
            self._lookups.count_admission(request, hits)
        return new_ids

    def _find_shard(self, held: RequestPages, hits: Sequence[PageIds], placement: Placement) -> tuple[int, int] | None:
        """Return the shard of the request's pages, else the hinted one, and the number of shards; None: any page will do."""
        pages_per_shard = pages_per_dp_shard(self._pool.num_pages, placement.data_parallel_size)
        if pages_per_shard is None:
            return None
        shard = PageIds.joined((*held.get_page_ids(), *hits)).shard(pages_per_shard)
        return self._pool.find_shard(placement.dp_shard_hint if shard < 0 else shard, placement.data_parallel_size)

    def _take_pages(
        self, request: Request, held: RequestPages, hits: tuple[PageIds, ...], num_tokens: int, placement: Placement
    ) -> tuple[PageIds, ...] | None:
        """Attach the hits and take the new pages, or do neither."""
        found = self._find_shard(held, hits, placement)
        shard, num_shards = found or (None, 0)
        has_hits = hits is not self.no_ids
        hashes = self._lookups.hashes[request.request_id] if has_hits else None
        self._requests[request.request_id] = held  # before anything is taken, so that no interrupt can lose it
        try:
            new_ids = held.take(
                num_tokens,
                hits if has_hits else (),
                hashes.chain if hashes else None,
                shard,
                num_shards,
                placement.num_reserved_pages,
            )
        finally:
            if not held:
                del self._requests[request.request_id]
        if new_ids is None:
            num_new_pages = held.count_needed(num_tokens, hits if has_hits else ())
            managers = zip(self._coordinator.single_type_managers, hits, strict=True)
            attached = [ids for manager, ids in managers if not manager.is_state]
            self._lookups.warn_if_hopeless((*held.get_page_ids(), *attached), num_new_pages)
        if new_ids is None and hashes and found is None:
            self._lookups.note_refusal(hashes, hits, num_tokens, placement.num_reserved_pages)
        return new_ids

    def _keep_states(
        self,
        held: RequestPages,
        hashes: RequestHashes,
        num_computed_tokens: int,
        new_ids: tuple[PageIds, ...],
        placement: Placement,
    ) -> tuple[PageIds, ...]:
        """Keep states as checkpoints, and return the new pages of each group with the next working pages of states."""
        shard = self._find_shard(held, (), placement)
        context = self._lookups.hold_context(hashes.extra_keys)
        try:
            kept = keep_states(held, hashes.chain, num_computed_tokens, context, shard, placement.num_reserved_pages)
        finally:
            self._lookups.release_context(context)
        return tuple(working or ids for working, ids in zip(kept, new_ids, strict=True))

    def free(self, request: Request, num_computed_tokens: int | None) -> None:
        """Give back the pages of a request. A state at a multiple of the interval becomes a checkpoint."""
        num_last_tokens = self._count_last_tokens(request, num_computed_tokens)
        if num_last_tokens:
            self._lookups.extend_named(request, num_last_tokens)
        hashes = self._lookups.hashes.get(request.request_id)
        context = self._lookups.hold_context(hashes.extra_keys if hashes and num_last_tokens else None)
        try:
            self._coordinator.free(
                request.request_id, num_computed_tokens, hashes.chain if hashes else None, num_last_tokens, context
            )
        finally:
            self._lookups.release_context(context)

    def _is_kept_after(self, num_computed_tokens: int, num_known_tokens: int) -> bool:
        """Whether a checkpoint can be made after these tokens."""
        interval = self._coordinator.checkpoint_interval
        return interval is not None and num_computed_tokens % interval == 0 and num_computed_tokens <= num_known_tokens

    def _count_last_tokens(self, request: Request, num_computed_tokens: int | None) -> int:
        """Return the computed tokens of a request whose states become checkpoints as it ends; 0 if they do not."""
        held = self._requests.get(id_of(request))
        if not self._coordinator.checkpoint_interval or not held:
            return 0
        num_tokens = read_count(request, "num_computed_tokens")
        is_kept = num_computed_tokens in (None, num_tokens)
        is_kept = is_kept and self._is_kept_after(num_tokens, read_count(request, "num_tokens"))
        return num_tokens if is_kept and are_states_due(held, num_tokens) else 0

    def enter_pages(self, held: RequestPages, hashes: RequestHashes, num_tokens: int) -> None:
        """Enter the pages that the first `num_tokens` tokens fill in the prefix index."""
        if hashes.page_hashes:
            start = max(0, held.num_cached_hashes - 1)  # with the parent of the first
            self._lookups.hasher.name_pages(self._store.names, hashes, start, num_tokens // self._coordinator.hash_page_size)
        context = self._lookups.hold_context(hashes.extra_keys)
        try:
            held.enter(hashes.chain, num_tokens, context)
        finally:
            self._lookups.release_context(context)
        if hashes.page_hashes:
            self._pool.forget_evicted_names()

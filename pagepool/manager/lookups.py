"""Looks up the prefixes of requests, and keeps their hashes and refusals."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from pagepool._core import HashChain, PageIds, QueryCounter, RequestHashes, load_prefix
from pagepool.arguments import has_status, id_of, refuse_incomplete, require_int
from pagepool.coordinator import CacheCoordinator
from pagepool.hashing import KeyHolder, RequestExtraKeys
from pagepool.hashing.algorithms import PageHasher
from pagepool.request import EngineRequestStatus, Request

if TYPE_CHECKING:
    from pagepool.events import Contexts

__all__ = ["PrefixLookups", "PrefixProbe"]

logger = logging.getLogger(__package__)

Query = tuple[int, bool]
"""The number of a request's tokens, and whether it was preempted."""

ANY_PAGE: tuple[int, int | None] = (0, None)
"""The half-open range of page ids to the end of the pool."""


class PrefixProbe(NamedTuple):
    """Result of `CacheManager.probe`: the tokens that would hit, the tokens queried, and why not more hit."""

    num_hit_tokens: int
    num_queried_tokens: int
    reason: str


class PrefixLookups(KeyHolder):
    """The hashes, the last look-up and the refusal of each request. The manager holds its lock during calls that change them.

    ``counters`` count the look-ups of admitted requests, new ones and preempted ones; ``contexts`` is set with events.
    """

    def __init__(self, coordinator: CacheCoordinator, hasher: PageHasher) -> None:
        """`hasher` makes the hashes of new requests."""
        self.hashes: dict[str, RequestHashes] = {}
        self.hasher = hasher
        self.contexts: Contexts | None = None
        self._coordinator = coordinator
        self._store = coordinator.page_pool.store
        self.counters = QueryCounter(self._store), QueryCounter(self._store, is_preempted=True)

    def read_query(self, request: Request) -> Query | None:
        """Return the query of a request; None if it takes no hits."""
        try:
            num_tokens, is_preempted = request.num_tokens, request.status == EngineRequestStatus.PREEMPTED
            params = request.sampling_params
        except AttributeError as error:
            refuse_incomplete(request, error)
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = require_int("num_tokens", num_tokens, 0)
        if type(is_preempted) is not bool:  # NumPy's
            is_preempted = has_status(request, EngineRequestStatus.PREEMPTED)
        takes_hits = self._coordinator.enable_caching and getattr(params, "prompt_logprobs", None) is None
        return (num_tokens, is_preempted) if takes_hits else None

    def extend(self, request: Request, num_tokens: int) -> RequestHashes:
        """Return the hashes of a request, made at least for its full pages up to `num_tokens`."""
        try:  # each look-up comes here: an id is checked only where it cannot be used
            hashes = self.hashes.get(request.request_id)
        except (AttributeError, TypeError):
            hashes = self.hashes.get(id_of(request))
        if hashes is None or hashes.request is not request:  # another request may have had this id, and other tokens
            hashes = self.hashes[request.request_id] = self.hasher.start(request)
        self.hasher.extend(hashes, request, num_tokens // self._coordinator.hash_page_size)
        return hashes

    def share_hashes(self, request: Request, new_request: Request, num_tokens: int) -> bool:
        """Keep hashes of a new request that goes on from `num_tokens` tokens of another; False unless these are the same."""
        known, size = self.extend(request, num_tokens), self._coordinator.hash_page_size
        hashes = self.hasher.start(new_request)
        if known.extra_keys is not None and known.extra_keys.has_nonce:
            hashes.extra_keys = known.extra_keys
        self.hasher.extend(hashes, new_request, num_tokens // size)
        num_pages, rest = len(hashes.chain), slice(num_tokens - num_tokens % size, num_tokens)
        is_same = num_pages == 0 or hashes.chain[num_pages - 1] == known.chain[num_pages - 1]
        is_same = is_same and hashes.extra_keys == known.extra_keys
        if not is_same or list(request.all_token_ids[rest]) != list(new_request.all_token_ids[rest]):
            return False
        self.hashes[new_request.request_id] = hashes
        return True

    def hash_apart(self, request: Request, num_tokens: int) -> HashChain:
        """Return the hashes of a request's full pages up to `num_tokens`. Stored hashes do not change. O(tokens)."""
        hashes = self.hasher.start(request, self.hashes.get(id_of(request)))
        self.hasher.extend(hashes, request, num_tokens // self._coordinator.hash_page_size)
        return hashes.chain

    def find(
        self, request: Request, query: Query, ids: tuple[int, int | None], num_reserved: int
    ) -> tuple[tuple[PageIds, ...], int]:
        """Return the longest cached prefix among pages `ids`, or a refusal's that holds. Loads leave `num_reserved` free."""
        num_queried_tokens, is_preempted = query
        hashes = self.extend(request, num_queried_tokens)
        refusal = hashes.refusal
        if refusal and ids == ANY_PAGE and refusal.num_tokens == num_queried_tokens and refusal.has_same_hits():
            pages, num_tokens = refusal.hits, refusal.num_hit_tokens
        else:
            hashes.refusal = None
            if self._store.has_tier:  # pages that are loaded have their names, and their parents'
                self.hasher.name_pages(self._store.names, hashes, 0, len(hashes.page_hashes))
            context = self.hold_context(hashes.extra_keys)
            try:
                pages, num_tokens, hashes.is_short = load_prefix(
                    self._store, self._coordinator.groups, hashes.chain, num_queried_tokens, ids, context, num_reserved
                )
            finally:
                self.release_context(context)
        hashes.query = num_queried_tokens, num_tokens, is_preempted or hashes.is_counted
        return pages, num_tokens

    def hold_context(self, extra_keys: RequestExtraKeys | None) -> int:
        """Return the int for extra keys in the core until `release_context`; 0 without keys or events."""
        return 0 if self.contexts is None or extra_keys is None else self.contexts.hold(extra_keys)

    def release_context(self, context: int) -> None:
        """Release an int from `hold_context`. It is reused when no page has it any more."""
        if context and self.contexts is not None:
            self.contexts.release(context)

    @contextmanager
    def naming(self, hashes: RequestHashes | None, start: int, num_tokens: int) -> Iterator[int]:
        """Name the keys of a request from page `start` on, and their parents', where hashes have names, for the calls that
        enter them. Yield the context of the extra keys in the core.
        """
        context = self.hold_context(None if hashes is None else hashes.extra_keys)
        try:
            if hashes is not None and hashes.page_hashes:
                stop = num_tokens // self._coordinator.hash_page_size
                self.hasher.name_pages(self._store.names, hashes, max(0, start - 1), stop)
            yield context
        finally:
            self.release_context(context)
            if hashes is not None and hashes.page_hashes:
                self._coordinator.page_pool._forget_evicted_names()

    def count_admission(self, request: Request, num_taken_tokens: int) -> None:
        """Count the look-up of a request that was just admitted, with the tokens whose pages it took."""
        hashes = self.hashes.get(request.request_id)
        if hashes is None or hashes.query is None:
            return
        num_queried_tokens, num_hit_tokens, is_preempted = hashes.query
        hashes.query, hashes.refusal, hashes.is_counted = None, None, True
        self.counters[is_preempted].add(num_queried_tokens, min(num_hit_tokens, num_taken_tokens))

    def warn_if_hopeless(self, held: Sequence[PageIds], num_new_pages: int) -> None:
        """Log a warning if a request needs more pages at once than the pool has, or than it has besides the other pins."""
        num_pages, num_pinned_pages = self._coordinator.num_pages - 1, self._store.num_pinned_pages
        if sum(map(len, held)) + num_new_pages + num_pinned_pages <= num_pages:  # the common case, null pages included
            return
        num_needed_pages = num_new_pages + sum([page_id != 0 for ids in held for page_id in ids.to_list()])
        num_other_pins = num_pinned_pages - sum(map(self._store.count_pinned, held)) if num_pinned_pages else 0
        if num_needed_pages + num_other_pins > num_pages:
            reason = f", and {num_other_pins} are pinned for others: no waiting helps, see unpin"
            if num_needed_pages > num_pages:
                reason = ": no waiting helps, see CacheManager.require_capacity"
            logger.warning("a request needs %d pages at once, the pool has %d%s", num_needed_pages, num_pages, reason)

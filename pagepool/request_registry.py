"""The requests of a manager, by id: their pages, the hashes of their tokens, and their look-ups."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pagepool._core import (
    HashChain,
    PageClaim,
    PageIds,
    PageSessions,
    RequestHashes,
    RequestMaps,
    RequestPages,
    list_claims,
    list_leases,
)
from pagepool.arguments import has_status, id_of, read_count, refuse_incomplete, require_int, require_name
from pagepool.errors import ArgumentError, shown
from pagepool.group_rules import GroupRules
from pagepool.hashing import KeyHolder, RecentKeys, RequestExtraKeys
from pagepool.holders import HeldPages, Preempted
from pagepool.media import Media
from pagepool.page_hashing import PageHasher
from pagepool.page_pool import PagePool
from pagepool.page_pool.pool import Configuration
from pagepool.request import EngineRequestStatus, Request
from pagepool.specs import find_shard

if TYPE_CHECKING:
    from pagepool.events import EventSource


FindFetch = Callable[[HashChain], str | None]
"""Function that says what became of a store's pages for the prompt with these hashes: a cause; None: it lacks them."""


class RequestRegistry(KeyHolder, RequestMaps):
    """The requests of a manager, and what its running batches and the store behind its tier share with it.

    ``page_pool`` is its first pool, and ``store`` has the records of all pools. ``configuration`` are the settings in which
    managers that share cached pages agree. ``max_steps_ahead`` is the most steps that a batch plans ahead.

    Callers hold ``lock``, except for methods that take it themselves.
    """

    def __init__(
        self,
        page_pool: PagePool,
        rules: GroupRules,
        hasher: PageHasher,
        configuration: Configuration,
        trusts_requests: bool,
    ) -> None:
        """Start without requests. With `trusts_requests` requests of one id share pages, and hits may be counted twice."""
        super().__init__(page_pool.store, trusts_requests)
        self.page_pool, self.rules, self.hasher, self.configuration = page_pool, rules, hasher, configuration
        self.max_steps_ahead = 0
        self.sessions = PageSessions(page_pool.store)
        self.event_source: EventSource | None = None
        self.media: Media | None = None  # without cross-attention
        self.recent_keys: RecentKeys | None = None  # without explanations
        self._batches: WeakSet[Any] = WeakSet()
        self._batch_numbers = count()
        self.watcher: Callable[[Any], None] | None = None
        self.find_fetch: FindFetch | None = None  # without a store, or with one that tells nothing

    # Running batches.

    def add_batch(self, batch: Any, max_steps_ahead: int) -> None:
        """Record a running batch, under a weak reference, and number it. It plans up to `max_steps_ahead` steps ahead."""
        with self.lock:
            batch.number = next(self._batch_numbers)
            self.max_steps_ahead = max(self.max_steps_ahead, max_steps_ahead)
            self._batches.add(batch)
            if self.watcher is not None:
                self.watcher(batch)

    def watch_batches(self, watcher: Callable[[Any], None] | None) -> None:
        """Call `watcher` with each running batch, now and when one is made; None ends this."""
        with self.lock:
            self.watcher = watcher
            if watcher is not None:
                for batch in self._list_batches():
                    watcher(batch)

    def _list_batches(self) -> list[Any]:
        """Return the running batches in the order in which they were made."""
        return sorted(self._batches, key=attrgetter("number"))

    def require_native_hashes(self) -> None:
        """Raise ArgumentError if a callable hashes pages: rows and waiting queues hash natively."""
        if not self.hasher.is_native:
            allowed = "'siphash128', 'sha256' or 'sha256_cbor'"
            raise ArgumentError(f"manager: got one with a callable as hash_algo, allowed with caching: {allowed}")

    def find_shard(self, dp_shard: int, data_parallel_size: int | None) -> int | None:
        """Return the number of the shard that `dp_shard` names; None if the pool is not divided. Raise ArgumentError without a
        `data_parallel_size`.
        """
        if data_parallel_size is None:
            raise ArgumentError(f"dp_shard: got {shown(dp_shard)}, allowed without data_parallel_size: None")
        found = find_shard(self.page_pool.num_pages, dp_shard, data_parallel_size)
        return None if found is None else found[0]

    # Pages.

    def list_held(self) -> list[RequestPages]:
        """Return the pages of all requests and media."""
        return [*self.held.values(), *(() if self.media is None else self.media.list_pages())]

    def list_claims(self, sinks: Sequence[PageIds]) -> list[tuple[str, str, PageClaim]]:
        """Return the kind, name and claim of each holder of pages. `sinks` are records of the store. O(pages held + rows)."""
        store, batches = self.page_pool.store, {batch.number: batch for batch in self._list_batches()}
        media = {} if self.media is None else self.media.name_pages()
        leases = list_leases(store)
        names: dict[Any, tuple[str, str]] = {held: ("request", name) for name, held in self.held.items()}
        names |= {pages: ("medium", ", ".join(owners)) for pages, owners in media.items()}
        names |= dict.fromkeys(sinks, ("sink", ""))
        names |= {lease: ("lease", f"{i}") for i, lease in enumerate(leases)}
        rows = {batch: number for number, batch in batches.items()}
        claims = list_claims(store, [*self.held.values(), *batches.values(), *media, *sinks, *leases])
        named: list[tuple[str, str, PageClaim]] = []
        for claim in claims:
            if claim.row >= 0:
                named.append(("row", f"{claim.row} of batch {rows[claim.holder]}", claim))
            else:
                named.append((*names.get(claim.holder, (claim.holder, "")), claim))
        return named

    def report_held(self, sinks: Sequence[PageIds]) -> HeldPages:
        """Return who holds the pages."""
        return HeldPages.of(self.list_claims(sinks), self.page_pool.store.bank_names)

    def name_holders(self, first_ids: Sequence[int], sinks: Sequence[PageIds]) -> dict[str, dict[int, list[str]]]:
        """Return the kinds and names of holders, without sinks, by pool and page id, from the given id of each pool on."""
        names: dict[str, dict[int, list[str]]] = {}
        first = dict(zip(self.page_pool.store.bank_names, first_ids, strict=True))
        for kind, name, claim in self.list_claims(sinks):
            for pool, page_ids in claim.page_ids_by_pool.items() if kind != "sink" else ():
                for page_id in page_ids:
                    if page_id >= first[pool]:
                        names.setdefault(pool, {}).setdefault(page_id, []).append(f"{kind} {name}".strip())
        return names

    def list_preemptable(self) -> Preempted:
        """Return the rows and requests that hold pages."""
        rows: dict[Any, list[int]] = {}
        claims = self.list_claims(())
        for kind, _, claim in claims:
            if kind == "row":
                rows.setdefault(claim.holder, []).append(claim.row)
        return Preempted(rows, [name for kind, name, _ in claims if kind == "request"])

    def require_held(self, request: Request) -> RequestPages:
        """Return the pages of a request. Raise ArgumentError if it holds none, and the errors of `find_held`."""
        held = self.find_held(request)
        if held is None:
            raise ArgumentError(f"request {shown(request.request_id)}: got one that holds no pages, allowed: one that does")
        return held

    def require_same(self, request: Request, held: RequestPages | None) -> None:
        """Raise ArgumentError unless a request still holds `held`: reading its attributes may have called the manager."""
        if self.held.get(request.request_id) is not held:
            self.refuse_nested(request.request_id)

    def read_query(self, request: Request) -> tuple[int, bool] | None:
        """Return how many of a request's tokens are looked up, though the last may not hit, and whether it was preempted; None
        if it may not hit. The lock is not needed.
        """
        try:
            num_tokens, is_preempted = request.num_tokens, request.status == EngineRequestStatus.PREEMPTED
            params = request.sampling_params
        except AttributeError as error:
            refuse_incomplete(request, error)
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = require_int("num_tokens", num_tokens, 0)
        if type(is_preempted) is not bool:  # a bool of NumPy, for example
            is_preempted = has_status(request, EngineRequestStatus.PREEMPTED)
        if self.rules.has_reference_window:  # pages of answers are never hit
            num_tokens = min(num_tokens, self.count_prompt_tokens(request) + 1)
        takes_hits = self.page_pool.enable_caching and getattr(params, "prompt_logprobs", None) is None
        return (num_tokens, is_preempted) if takes_hits else None

    def count_prompt_tokens(self, request: Request) -> int:
        """Return the number of tokens in a request's prompt: those that it has now, if it does not say."""
        num_tokens = getattr(request, "num_prompt_tokens", None)
        return read_count(request, "num_tokens") if num_tokens is None else require_int("num_prompt_tokens", num_tokens, 0)

    def cache_due(self, request: Request, num_computed_tokens: int) -> None:
        """Do the work of `cache_pages` where pages may be due. Take the lock."""
        num_tokens = require_int("num_computed_tokens", num_computed_tokens, 0)
        with self.lock:
            held = self.require_held(request)
            if num_tokens > held.num_room_tokens:
                raise ArgumentError(f"num_computed_tokens: got {shown(num_tokens)}, allowed: at most {held.num_room_tokens}")
            num_before = read_count(request, "num_computed_tokens")
            start, hashes = held.count_entered_hashes(num_before), self.hashes.get(request.request_id)
            if hashes is not None and num_before < held.num_cached_tokens:
                hashes.cut(start)
            hashes = self.extend_hashes(request, num_tokens)
            self.require_same(request, held)
            if hashes.page_hashes or hashes.extra_keys is not None or held.session_id is not None:
                with self.naming(held, hashes, start, num_tokens) as context:
                    held.enter(hashes.chain, num_tokens, num_before, context)
            else:
                held.enter(hashes.chain, num_tokens, num_before)

    # Hashes.

    def extend_hashes(self, request: Request, num_tokens: int) -> RequestHashes:
        """Return the hashes of a request, extended to its full pages up to `num_tokens` whose lookahead is known. Raise the
        errors of `find_held`: hashes under the id of a request that holds pages belong to it.
        """
        try:  # each look-up passes here: check an id only after a failure
            hashes = self.hashes.get(request.request_id)
        except (AttributeError, TypeError):
            hashes = self.hashes.get(id_of(request))
        if hashes is None or not self._belong_to(hashes, request):
            self.find_held(request)
            hashes = self.hashes[request.request_id] = self.hasher.start(request)
            if hashes.extra_keys is not None and self.recent_keys is not None:
                self.recent_keys.keep(hashes.extra_keys)
        if hashes.are_unsure and hashes.refusal is None:
            hashes.cut(self.count_sure_hashes(request))
        self.hasher.extend(hashes, request, self._count_pages(request, num_tokens))
        return hashes

    def _belong_to(self, hashes: RequestHashes, request: Request) -> bool:
        """Whether hashes belong to a request: another may have had its id, or it may be back with another adapter, salt or
        medium.
        """
        if hashes.request is not request:
            return False
        keys = self.hasher.extra_keys
        are_same = keys.have_same_names(request, hashes.extra_keys)
        if self.media is not None:
            are_same = are_same and keys.have_same_medium(request, hashes.extra_keys)
        return are_same or self.find_held(request) is not None

    def _count_pages(self, request: Request, num_tokens: int) -> int:
        """Count the full pages of a request up to `num_tokens` whose lookahead is known."""
        hash_lookahead = self.hasher.hash_lookahead
        if hash_lookahead:
            num_tokens = max(0, min(num_tokens, read_count(request, "num_tokens") - hash_lookahead))
        return num_tokens // self.rules.hash_page_size

    def count_sure_hashes(self, request: Request) -> int:
        """Count the leading pages, computed and cached, whose tokens and hashes no longer change."""
        held = self.find_held(request)
        return 0 if held is None else held.count_entered_hashes(read_count(request, "num_computed_tokens"))

    def share_hashes(self, request: Request, new_request: Request, num_tokens: int) -> bool:
        """Keep hashes of a new request that continues `num_tokens` tokens of another. Return False if tokens or keys differ."""
        known, num_pages = self.extend_hashes(request, num_tokens), self.hasher.count_pages(num_tokens)
        hashes = self.hasher.start(new_request)
        if known.extra_keys is not None and known.extra_keys.has_nonce:
            if hashes.extra_keys is not None and hashes.extra_keys.name_contents() != known.extra_keys.name_contents():
                return False
            hashes.extra_keys = known.extra_keys
        self.hasher.extend(hashes, new_request, num_pages)
        rest = slice(num_pages * self.rules.hash_page_size, num_tokens)
        is_same = num_pages == 0 or hashes.chain[num_pages - 1] == known.chain[num_pages - 1]
        is_same = is_same and hashes.extra_keys == known.extra_keys
        if not is_same or list(request.all_token_ids[rest]) != list(new_request.all_token_ids[rest]):
            return False
        self.hashes[new_request.request_id] = hashes
        return True

    def hash_apart(self, request: Request, num_tokens: int) -> HashChain:
        """Return the digests of `hash_alone`."""
        return self.hash_alone(request, num_tokens).chain

    def hash_alone(self, request: Request, num_tokens: int) -> RequestHashes:
        """Return new hashes of a request's full pages up to `num_tokens` whose lookahead is known. Stored hashes stay as they
        are. O(tokens).
        """
        self.find_held(request)
        known = self.hashes.get(request.request_id)
        hashes = self.hasher.start(request, known if known is not None and self._belong_to(known, request) else None)
        self.hasher.extend(hashes, request, self._count_pages(request, num_tokens))
        return hashes

    def name_pages(self, hashes: RequestHashes, start: int, num_tokens: int) -> None:
        """Name the keys of the pages from `start` up to `num_tokens` tokens, and of their parent."""
        self.hasher.name_pages(self.page_pool.store.names, hashes, max(0, start - 1), num_tokens // self.rules.hash_page_size)

    def forget_evicted_names(self) -> None:
        """Drop the names of evicted pages. Amortised O(1)."""
        self.page_pool.forget_evicted_names()

    @contextmanager
    def naming(self, held: RequestPages | None, hashes: RequestHashes | None, start: int, num_tokens: int) -> Iterator[int]:
        """Name the pages cached by the body, from page `start` on, if the hashes have names. Yield the core's int for the
        request's context.
        """
        context = 0 if held is None or hashes is None else self.hold_context(hashes.extra_keys, held.session_id)
        try:
            if hashes is not None and hashes.page_hashes:
                self.name_pages(hashes, start, num_tokens)
            yield context
        finally:
            self.release_context(context)
            if hashes is not None and hashes.page_hashes:
                self.forget_evicted_names()

    # The core's ints for extra keys and sessions. These methods take the lock.

    def hold_context(self, extra_keys: RequestExtraKeys | None, session_id: str | None) -> int:
        """Return the core's int for extra keys and session, valid until `release_context`; 0 with neither or without events."""
        if self.event_source is None or (extra_keys is None and session_id is None):  # fast path without the lock
            return 0
        with self.lock:
            return self.event_source.contexts.hold((extra_keys, require_name("session_id", session_id)))

    def release_context(self, context: int) -> None:
        """Release an int from `hold_context`. It is reused once no page or row has it."""
        if context and self.event_source is not None:
            self.event_source.contexts.release(context)

    def hold_session_of(self, request: Request) -> int:
        """Return the core's int for the session of a request: see `hold_session`."""
        return self.hold_session(getattr(request, "session_id", None), getattr(request, "tenant", None))

    def hold_session(self, session_id: str | None, tenant: str | None) -> int:
        """Return the core's int for a session, valid until `release_session`; 0 for None, and without caching."""
        with self.lock:
            return self.sessions.hold(session_id, tenant)

    def release_session(self, session: int) -> None:
        """Release an int from `hold_session`."""
        if session:
            with self.lock:
                self.sessions.release(session)

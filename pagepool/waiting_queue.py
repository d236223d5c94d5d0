"""A waiting queue that knows what each request would hit.

Native work is in ``core/waiting/waiting.pyx``.
"""

from collections.abc import Callable, Hashable, Iterator
from threading import RLock
from typing import Any, Literal, NamedTuple, Protocol

from pagepool._core import WaitingLine, WaitingRequest
from pagepool.arguments import MAX_SIZE, require_choice, require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.manager import CacheManager
from pagepool.request import EngineRequestStatus, RequestTraits, TokenIds
from pagepool.specs import find_shard
from pagepool.stats import WaitingStats

__all__ = ["Admission", "WaitingQueue"]

MAX_PREFETCHED_SHARE = 0.05
"""Part of the first pool for pages that were prefetched and not hit yet. Prefetching leaves as much free."""

NO_TRAITS = RequestTraits()

NUM_FETCHED = 16
"""Requests in order whose pages in a store are looked up before their turn."""

IsReady = Callable[[Hashable], bool]
"""Whether to admit the request of a name now."""

Admit = Callable[[WaitingRequest], int | None]
"""Admits a request, and returns the number of its tokens that hit, or None for a refusal."""


class Admission(NamedTuple):
    """A request that leaves a `WaitingQueue`, or is next there, and the number of its tokens that hit."""

    name: Hashable
    num_cached_tokens: int


class Fetcher(Protocol):
    """The part of a `pagepool.stores.StoreTier` that a queue calls."""

    def fetch(self, request: Any) -> None:
        """Start to look up the pages of a request."""

    def is_ready(self, request: Any) -> bool:
        """Whether to admit a request whose turn it is."""

    def forget(self, request: Any) -> None:
        """Forget a request that will not be admitted."""


class _Stored:
    """A waiting request as a store's tier reads it, under an id of its own. It has the attributes of its traits."""

    sampling_params, status, num_computed_tokens = None, EngineRequestStatus.WAITING, 0

    def __init__(self, request_id: str, request: WaitingRequest) -> None:
        self.request_id, self.traits = request_id, request.traits
        self.all_token_ids = request.token_ids.to_array()
        self.num_tokens = len(self.all_token_ids)
        self.is_ready = not self.traits.look_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traits, name)


class WaitingQueue:
    """The requests that wait for a row of a `RunningBatch`, or for the pages of a `CacheManager`, in the order in which they
    should be admitted.

    Each request is hashed and looked up once, when it is added. From then on its hits are kept current as pages are cached and
    evicted, which costs O(1) a page, so that the order always follows what requests would hit now. With sliding windows, chunks
    or states the number of hits is the one of full attention until the request is next; then it is looked up in all groups.

    With `order` ``"work"`` the request with the least work is next: the fewest tokens to compute. A request may be overtaken by
    requests of `max_overtaken_tokens` tokens of work and, as a part `max_stretch`, of the work in front of it when it was
    added, its own included: then it goes first. With ``"arrival"`` the first is next.

    Calls from several threads are serialised: threads may add and remove requests while another one plans a step.

    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch, WaitingQueue
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=32, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> table = PageTable(max_num_reqs=4, max_num_pages_per_req=16, max_num_batched_tokens=64)
    >>> batch, queue = RunningBatch(manager, table), WaitingQueue(manager)
    >>> queue.add("long", list(range(40)))
    >>> queue.add("short", [1, 2, 3, 4, 5, 6])
    >>> queue.peek(2)
    [Admission(name='short', num_cached_tokens=0), Admission(name='long', num_cached_tokens=0)]
    >>> batch.admit_next(0, queue)
    Admission(name='short', num_cached_tokens=0)
    >>> queue.add("same", [1, 2, 3, 4, 5, 6, 7])
    >>> batch.admit_next(1, queue, max_num_new_tokens=8)
    Admission(name='same', num_cached_tokens=4)
    >>> "long" in queue, len(queue), queue.stats().num_overtakes
    (True, 1, 2)
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        order: Literal["work", "arrival"] = "work",
        max_overtaken_tokens: int = 8192,
        max_stretch: float = 0.25,
        promote_after_tokens: int = 100_000,
        data_parallel_size: int | None = None,
        store: Fetcher | None = None,
    ) -> None:
        """`max_overtaken_tokens` is about a step's budget of tokens. Smaller bounds are fairer, and larger ones wait less on
        average.

        Of requests with several priorities those of the highest go first. After `promote_after_tokens` tokens of work were
        admitted since it was added, a request also counts in the next higher priority that waits, so that none waits for ever.
        `data_parallel_size` is the batch's.

        With a `store`, the `StoreTier` of the manager, pages of requests are fetched from it: `prefetch` does so for those that
        are next, and a request whose pages are on their way is passed over.

        Raise ArgumentError for values out of range, or if the manager caches with a callable as `hash_algo`; ArgumentTypeError
        for other types.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        require_choice("order", order, "work", "arrival")
        registry = manager.registry
        size = 0 if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size, 1)
        registry.store.require_even(size or None)
        if manager.enable_caching:
            registry.require_native_hashes()
        self._size = size
        self._num_pages = registry.page_pool.num_pages
        num_shards = size if size and find_shard(self._num_pages, 0, size) is not None else 0
        self._line = WaitingLine(
            registry.store,
            registry.rules.groups,
            order == "work",
            require_int("max_overtaken_tokens", max_overtaken_tokens, 0, MAX_SIZE),
            max_stretch,
            require_int("promote_after_tokens", promote_after_tokens, 1, MAX_SIZE),
            num_shards,
            manager.caches == "computed" and manager.enable_caching,
        )
        self.manager, self.order = manager, order
        self._page_size = manager.hash_page_size if manager.enable_caching else 0
        self._lock = RLock()  # taken before the batch's
        self._requests: dict[Hashable, WaitingRequest] = {}
        self._store = store
        self._stored: dict[WaitingRequest, _Stored] = {}
        self._num_stored = 0

    def __repr__(self) -> str:
        """Return the order, and the number of waiting requests."""
        return f"WaitingQueue(order={self.order!r}, num_waiting={len(self)})"

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the names of the waiting requests, in the order in which they were added."""
        return iter([*self._requests])

    def __contains__(self, name: object) -> bool:
        """Whether a request of this name waits."""
        return name in self._requests

    # Requests come and go.

    def add(self, name: Hashable, token_ids: TokenIds, *, priority: int = 0, traits: RequestTraits | None = None) -> None:
        """Add a request behind all others of its `priority`. `token_ids`, which are copied, are its known tokens, and `traits`
        say who it is, as for `RunningBatch.admit`.

        Call `CacheManager.require_capacity` before: a request that is larger than the pool makes `RunningBatch.admit_next`
        raise when it is next. Raise ArgumentError for the name of a request that waits, for no tokens, for more than
        ``max_model_len`` tokens, and for a `priority` that does not fit int32; ArgumentTypeError for other types. O(tokens +
        waiting requests).
        """
        self._enter(name, token_ids, require_int("priority", priority, -(2**31), 2**31 - 1), traits, is_back=False)

    def put_back(self, name: Hashable, token_ids: TokenIds, *, traits: RequestTraits | None = None) -> None:
        """Add a preempted request in front of all others, whatever their priority. The arguments and errors are those of `add`;
        `token_ids` include what it generated.
        """
        self._enter(name, token_ids, 0, traits, is_back=True)

    def _enter(
        self, name: Hashable, token_ids: TokenIds, priority: int, traits: RequestTraits | None, *, is_back: bool
    ) -> None:
        named = NO_TRAITS if traits is None else traits
        if not isinstance(named, RequestTraits):
            raise ArgumentTypeError(f"traits: got {type(traits).__name__}, allowed: RequestTraits, or None")
        request = self._make_request(name, token_ids, named)
        dp_shard, registry = named.dp_shard, self.manager.registry
        shard = None if dp_shard is None else registry.find_shard(dp_shard, self._size or None)
        with self._lock:
            try:
                is_known = name in self._requests
            except TypeError:
                raise ArgumentTypeError(f"name: got {type(name).__name__}, allowed: something hashable") from None
            if is_known:
                raise ArgumentError(f"name: got {shown(name)}, which waits already, allowed: another one")
            self._line.enter(request, named.num_prompt_tokens, priority, shard, is_back)
            self._requests[name] = request

    def _make_request(self, name: Hashable, token_ids: TokenIds, traits: RequestTraits) -> WaitingRequest:
        """Return a request with a copy of its tokens, hashed unless it hits nothing on purpose."""
        manager, hasher = self.manager, self.manager.registry.hasher
        keys = hasher.extra_keys.of(traits)
        request = WaitingRequest(
            token_ids,
            self._page_size if traits.look_up else 0,
            hasher.chain_key,
            hasher.list_keyed(keys, manager.max_model_len) if self._page_size else (),
            hasher.keep_token_ids,
            hasher.chain_algorithm,
            hasher.hash_lookahead,
        )
        request.name, request.traits, request.keys = name, traits, keys
        if len(request.token_ids) > manager.max_model_len:
            allowed = f"up to {manager.max_model_len}, which is max_model_len"
            raise ArgumentError(f"token_ids: got {len(request.token_ids)}, allowed: {allowed}")
        return request

    def remove(self, name: Hashable) -> bool:
        """Remove a request that was cancelled. Return False if none of this name waits: it may have been admitted. O(waiting
        requests).
        """
        with self._lock:
            request = self._requests.pop(name, None)
            if request is not None:
                self._line.leave(request)
                self._forget(request)
            return request is not None

    # Requests are admitted.

    def admit_by(
        self,
        admit: Admit,
        step: int | None = None,
        *,
        is_idle: bool = False,
        skips_misfits: bool = False,
        is_ready: IsReady | None = None,
    ) -> Admission | None:
        """Let `admit` admit the request that is next, as `RunningBatch.admit_next` does. It gets a `WaitingRequest`, with
        ``name``, ``token_ids`` and ``traits``, and returns the number of tokens that hit, or None for a refusal. Return None if
        none waits, or the next one was refused.

        `step` is the number of the last step: with ``caches="computed"`` a request waits in this step and up to two more while
        another one computes the same tokens, but not if the engine `is_idle`: then none is computed. The other arguments are
        those of `RunningBatch.admit_next`.
        """
        is_idle, skips_misfits = require_flag("is_idle", is_idle), require_flag("skips_misfits", skips_misfits)
        with self._lock:
            has_skipped = False
            try:
                while (request := self._line.choose(None if is_idle else step)) is not None:
                    if not self._has_come(request) or not (is_ready is None or is_ready(request.name)):
                        self._line.set_away(request)
                        has_skipped = True
                        continue
                    try:
                        num_hit_tokens = admit(request)
                    except Exception as error:
                        error.add_note(f"The request is {shown(request.name)} of the waiting queue, where it stays.")
                        raise
                    if num_hit_tokens is not None:
                        self._line.admit(request, num_hit_tokens, step)
                        return self._leave(request, num_hit_tokens)
                    if request.hits_fewer and self._line.correct(request):
                        continue
                    if not skips_misfits:
                        return None
                    self._line.set_misfit(request)
                    has_skipped = True
            finally:
                if has_skipped:
                    self._line.begin_round()
            return None

    def take(self) -> Admission | None:
        """Take the next request out of the queue, for an engine with calls of `CacheManager.allocate_slots`. Return None if
        none waits. If the manager refuses the request, `put_back` puts it in front again. O(tokens + waiting requests).
        """
        with self._lock:
            while (request := self._line.choose()) is not None:
                if self._line.correct(request):
                    continue
                num_hit_tokens = self._line.count_hits(request)
                self._line.admit(request, num_hit_tokens)
                return self._leave(request, num_hit_tokens)
            return None

    def _leave(self, request: WaitingRequest, num_hit_tokens: int) -> Admission:
        """Forget a request that was admitted."""
        del self._requests[request.name]
        self._forget(request)
        return Admission(request.name, num_hit_tokens)

    def peek(self, n: int = 1) -> list[Admission]:
        """Return the first `n` requests in the order in which they would be admitted now, with the tokens that they would hit.
        O(n x waiting requests).
        """
        num = require_int("n", n, 0)
        with self._lock:
            requests = self._line.list_next(min(num, len(self._requests)))
            return [Admission(request.name, self._line.count_hits(request)) for request in requests]

    def prefetch(self) -> int:
        """Queue loads of pages in the host tier for the requests that are next, and look these up in the store. Return the
        number of requests with loads. Call it once a step, before `take_moves`.

        Loaded pages are cached, and nothing holds them. A twentieth of the pool stays free, and at most a twentieth is
        prefetched for requests that still wait. O(waiting requests) for each request with loads.
        """
        most = int(MAX_PREFETCHED_SHARE * (self._num_pages - 1))
        if self.manager.host_tier is None or not self._page_size:
            return 0
        num_loaded = 0
        with self._lock:
            if self._store is not None:
                for request in self._line.list_next(NUM_FETCHED):
                    self._fetch(self._store, request)
            num_left = most - sum(request.num_prefetched for request in self._requests.values())
            for request in self._line.list_next(len(self._requests)):
                num_pages = self._line.count_loads(request) // self._page_size
                if not num_pages:
                    continue
                if num_pages > num_left or not self._load(request, most):
                    break
                request.num_prefetched += num_pages
                num_left, num_loaded = num_left - num_pages, num_loaded + 1
        return num_loaded

    def _fetch(self, store: Fetcher, request: WaitingRequest) -> _Stored:
        """Start to look up a request in the store, unless this was done."""
        stored = self._stored.get(request)
        if stored is None:
            self._num_stored += 1
            stored = self._stored[request] = _Stored(f"waiting {id(self):x}-{self._num_stored}", request)
            if not stored.is_ready:
                store.fetch(stored)
        return stored

    def _has_come(self, request: WaitingRequest) -> bool:
        """Whether no page of a request is on its way from the store."""
        if self._store is None:
            return True
        stored = self._fetch(self._store, request)
        stored.is_ready = stored.is_ready or self._store.is_ready(stored)
        return stored.is_ready

    def _forget(self, request: WaitingRequest) -> None:
        """Let the store forget a request that leaves."""
        stored = self._stored.pop(request, None)
        if self._store is not None and stored is not None and not stored.is_ready:
            self._store.forget(stored)

    def _load(self, request: WaitingRequest, num_reserved_pages: int) -> bool:
        """Queue the loads of a request. Return False if too few pages are free for them."""
        registry, session_id = self.manager.registry, request.traits.session_id
        session = registry.hold_session(session_id, request.traits.tenant)
        context = registry.hold_context(request.keys, session_id)
        try:
            return self._line.prefetch(request, num_reserved_pages, context, session)
        finally:
            registry.release_context(context)
            registry.release_session(session)

    # Inspection.

    def stats(self) -> WaitingStats:
        """Return state and counters. O(waiting requests)."""
        with self._lock:
            return WaitingStats(**self._line.counters())

    def check(self) -> None:
        """Raise IntegrityError if the queue is damaged. O(waiting requests)."""
        with self._lock:
            self._line.check()

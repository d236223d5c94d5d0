"""Slots for the next tokens of requests, and the pages that look-ups and allocations return."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.lookups cimport *
from pagepool.core.holding.request_maps cimport *
from pagepool.core.holding.request_pages cimport *
from pagepool.core.pool cimport CachePage
from pagepool.core.values cimport is_small

from pagepool.arguments import MAX_SIZE, id_of, read_count, require_flag, require_int, require_name
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.specs import find_shard, pages_per_dp_shard

cdef int64_t MAX_COUNT = <int64_t>1 << 60  # the sum of a few counts is below 2**63


cdef inline bint is_count(object value, int64_t *count) noexcept:
    """Whether a value is an int from 0 to `MAX_COUNT`; if so, store it in `count`."""
    cdef int overflow = 0
    cdef int32_t number
    if is_small(value, &number):
        count[0] = number
        return True
    if type(value) is not int:
        return False
    count[0] = as_long_long(value, &overflow)
    return not overflow and 0 <= count[0] <= MAX_COUNT


cdef int64_t require_count(str name, object value, int64_t least) except -1:
    """Return a count of at least `least`, and at most `MAX_COUNT`. Raise the errors of `require_int`."""
    return min(require_int(name, value, least), MAX_COUNT)


cdef inline int64_t checked_count(str name, object value, int64_t least) except -1:
    """Do the work of `require_count`, by a short way for most values."""
    cdef int64_t count
    return count if is_count(value, &count) and count >= least else require_count(name, value, least)


cdef int64_t count_known(object request) except -1:
    """Return the number of a request's tokens, checked, at most `MAX_COUNT`."""
    try:
        num_tokens = request.num_tokens
    except AttributeError:
        return min(read_count(request, "num_tokens"), MAX_COUNT)
    return checked_count("num_tokens", num_tokens, 0)


@cython.auto_pickle(False)
cdef class SlotAllocator:
    """The native half of `CacheManager`. It calls nothing of the façade's half: a `RequestRegistry` hashes tokens that are not
    in a list, have extra keys, or are hashed by a callable, and names their pages.
    """

    cdef RequestMaps maps           # the requests
    cdef object registry            # the same object, where its Python methods are called
    cdef PageStore store
    cdef CacheGroups groups
    cdef dict held                  # the registry's own dict, as is the next
    cdef dict hashes
    cdef readonly tuple _no_ids
    cdef int64_t max_num_tokens
    cdef int64_t hash_page_size
    cdef bint enables_caching
    cdef bint caches_computed       # tokens are cached once they are computed, not when they get slots
    cdef bint has_media             # the model has cross-attention
    cdef bint has_state             # some group is a state, kept or not
    cdef object on_too_large        # called for each refused request, in place of RequestTooLargeError; None: raise that
    cdef bint hashes_natively
    cdef int64_t hash_lookahead     # tokens behind a page that its hash covers
    cdef int64_t max_num_lookahead  # lookahead tokens that rings can take back

    def __init__(self, RequestMaps registry not None, max_num_tokens, on_too_large=None, bint caches_computed=False):
        """Allocate to the requests of a `RequestRegistry`, each of at most `max_num_tokens` tokens."""
        self.maps = self.registry = registry
        self.store, self.held, self.hashes = registry.store, registry.held, registry.hashes
        self.groups, self.has_state = self.registry.rules.groups, self.registry.rules.has_state
        self._no_ids = new_ids(self.groups.num)
        self.max_num_tokens, self.hash_page_size = max_num_tokens, self.registry.rules.hash_page_size
        self.enables_caching, self.caches_computed = self.store.enable_caching, caches_computed
        self.on_too_large, self.has_media = on_too_large, self.registry.media is not None
        if caches_computed:
            self.store.prefer_held()
        self.max_num_lookahead = limit_drafts(self.groups.groups, self.groups.num, 0, MAX_COUNT)
        self.hashes_natively, self.hash_lookahead = self.registry.hasher.is_native, self.registry.hasher.hash_lookahead

    @cython.final
    cdef inline int64_t count_filled(self, const Step *step, bint is_delayed) noexcept:
        """Count the tokens whose full pages a call is to cache."""
        if self.caches_computed:
            return step.num_computed
        return 0 if is_delayed else step.num_tokens

    @cython.final
    cdef inline bint caches_nothing(self, object delay_cache_pages) except -1:
        """Whether a call caches no pages, so that its tokens may be written to cached pages."""
        cdef bint is_delayed = delay_cache_pages is not False and require_flag("delay_cache_pages", delay_cache_pages)
        return not self.enables_caching or (is_delayed and not self.caches_computed)

    def allocate_slots(
        self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_pages=None, num_lookahead_tokens=0,
        delay_cache_pages=False, dp_shard_hint=None, data_parallel_size=None, *, num_external_computed_tokens=0,
        num_reserved_pages=0,
    ):
        """Allocate slots for the next tokens of a request and return the new pages; None if too few pages are free now.

        The tokens of a request, from its first on::

            | num_computed | num_new_computed | num_external_computed |    num_new    | num_lookahead |
            |    tokens    |      tokens      |         tokens        |    tokens     |    tokens     |
            |--------------|------------------|-----------------------|---------------|---------------|
            | held already;| hits: each page  | pages are taken; a    | pages are     | pages are     |
            | behind a     | gets a reference | transfer fills them   | taken; full   | taken, and    |
            | window given |                  |                       | ones are      | cached by a   |
            | back         |                  |                       | cached        | later call    |

        The request has ``num_computed_tokens`` computed tokens. `new_computed_pages` are the hits of `get_computed_pages`, if
        the request holds no page yet. Slots for drafts, `num_lookahead_tokens`, end at `max_model_len`. Pages that are filled
        by known tokens other than drafts are cached, unless `delay_cache_pages` (then call `commit_external` or `cache_pages`
        later). With ``caches="computed"`` the pages filled by known computed tokens are cached instead, also if None is
        returned, and `delay_cache_pages` changes nothing. If the step does not run, `free` with `num_computed_tokens` drops
        those entries. Pages that have left an attention window are freed first, even if None is returned. After None, and after
        an error, known tokens without slots may be taken back or replaced: docs/engines.md says what else may change.

        With `data_parallel_size` > 1 new pages come from the shard of the request's pages, else from the hinted shard. If that
        shard has too few, the hits count as recently used and None is returned. `num_reserved_pages` free pages are left
        for others (a watermark for admission).

        RequestTooLargeError, and no change, for a request that would hold more pages than the pool, or its shard, has at all:
        no waiting helps, but steps of fewer tokens may (see `CacheManager.require_capacity`).

        New tokens may be unknown ones, such as drafts and tokens in flight: they get slots, but are not cached yet.

        ArgumentError, and no change, for 0 new tokens, for more tokens than `max_model_len`, for more lookahead tokens than a
        ring can take back, for hits that are counted among
        the new tokens too, and for computed tokens that cannot be: beyond the hits of a request that holds nothing (a preempted
        request starts at 0 again), or beyond the slots of one with pages. MovesDueError, and no change, while moves of its
        pages, or states that its step writes, are due. The state of a state group cannot go back: free a request whose
        ``num_computed_tokens`` decreases, or restore its state. One native transaction; if nothing is due, the manager's lock
        is not taken. Amortised O(new pages).
        """
        cdef Step step
        cdef RequestPages held = None
        cdef object request_id
        cdef int64_t num_filled, num_reserved, num_hits = checked_count("num_new_computed_tokens", num_new_computed_tokens, 0)
        cdef int64_t num_lookahead = checked_count("num_lookahead_tokens", num_lookahead_tokens, 0)
        cdef int64_t num_external = checked_count("num_external_computed_tokens", num_external_computed_tokens, 0)
        cdef int64_t num_new = checked_count("num_new_tokens", num_new_tokens, num_external == 0)
        if num_lookahead > self.max_num_lookahead:
            allowed = f"up to {self.max_num_lookahead}, which a ring can take back"
            raise ArgumentError(f"num_lookahead_tokens: got {shown(num_lookahead_tokens)}, allowed: {allowed}")
        try:
            request_id, num_computed_tokens = request.request_id, request.num_computed_tokens
            held = find_held(self.held, request_id)
        except (AttributeError, TypeError):
            num_computed_tokens, request_id = read_count(request, "num_computed_tokens"), id_of(request)
            held = find_held(self.held, request_id)
        if not is_count(num_computed_tokens, &step.num_computed):
            step.num_computed = min(read_count(request, "num_computed_tokens"), MAX_COUNT)
        step.num_held = step.num_computed + num_hits
        step.num_before = step.num_held + num_external
        step.num_tokens = step.num_before + num_new
        step.demand.num_tokens = step.num_tokens + num_lookahead
        if held is not None and held.owner is not request:
            self.maps.find_held(request)
        if held is not None and new_computed_pages is None and num_hits == 0:
            num_filled = self.count_filled(&step, delay_cache_pages is True)
            if held.is_idle(step.num_computed, num_filled, step.demand.num_tokens):
                return pages_of(self._no_ids, self.store)
        if step.num_tokens > self.max_num_tokens:
            num_tokens = int(num_computed_tokens) + int(num_new_computed_tokens)
            num_tokens += int(num_external_computed_tokens) + int(num_new_tokens)
            raise ArgumentError(f"request {shown(request_id)}: got {shown(num_tokens)} tokens, allowed: {self.max_num_tokens}")
        step.demand.num_tokens = min(step.demand.num_tokens, self.max_num_tokens)
        if not is_count(num_reserved_pages, &num_reserved):
            num_reserved_pages = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        step.demand.num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        step.may_overwrite = self.caches_nothing(delay_cache_pages)
        return self.allocate_locked(request, request_id, &step, new_computed_pages, dp_shard_hint, data_parallel_size)

    def cache_pages(self, request, num_computed_tokens) -> None:
        """Cache the pages filled by the first `num_computed_tokens` tokens, after a delayed allocation.

        With ``caches="computed"``, after any allocation: other requests then hit the pages before the next call for this one.
        Does nothing without caching. ArgumentError if the request does not hold the pages. If nothing is due, the manager's
        lock is not taken. O(new full pages).
        """
        cdef RequestPages held = None
        cdef int64_t num_before = 0, num_tokens = 0
        cdef bint is_plain = False
        try:
            held = find_held(self.held, request.request_id)
            is_plain = is_count(request.num_computed_tokens, &num_before) and is_count(num_computed_tokens, &num_tokens)
        except (AttributeError, TypeError):
            pass
        if held is not None and held.owner is not request:
            self.maps.find_held(request)
        if self.enables_caching and (not is_plain or held is None or not held.is_idle(num_before, num_tokens, num_tokens)):
            self.registry.cache_due(request, num_computed_tokens)

    cdef object allocate_locked(
        self, object request, object request_id, Step *step, object new_computed_pages, object hint, object data_parallel_size
    ):
        """Call `allocate_due` under the manager's lock. After a refusal or an error the request's tokens may change."""
        cdef RequestHashes hashes
        cdef object pages = None
        lock = self.maps.lock
        lock.acquire()
        try:
            try:
                pages = self.allocate_due(request, request_id, step, new_computed_pages, hint, data_parallel_size)
            finally:
                if pages is None:
                    hashes = self.hashes.get(request_id)
                    if hashes is not None:
                        hashes.are_unsure = True
        finally:
            lock.release()
        return pages

    cdef object allocate_due(
        self, object request, object request_id, Step *step, object new_computed_pages, object hint, object data_parallel_size
    ):
        """Check a call for which something is due, hash the pages that it fills, and allocate. Hashing fails if tokens are
        missing. The manager's lock is held.
        """
        cdef tuple hits = self.read_hits(request_id, new_computed_pages)
        cdef RequestPages held = self.held.get(request_id)
        cdef bint needs_hashes, has_hits = hits is not self._no_ids
        cdef RequestHashes known, hashes = self.hashes.get(request_id)
        cdef PageIds tokens = None
        cdef object pages
        step.is_new, step.demand.end = held is None, NULL
        if not step.is_new and held.owner is not request:  # another thread's, since the first check
            self.maps.find_held(request)
        self.check_computed(request_id, step, hits, held)
        if step.is_new and has_hits and not self.maps.trusts_requests:
            self.check_known(request_id, step, count_known(request))
        if step.is_new and hashes is not None and hashes.request is request and data_parallel_size is None:
            if hashes.refusal is not None and self.is_refused_still(hashes.refusal, hits, step):
                return None
        if not step.is_new and step.num_computed < held.num_looked_up:
            self.cut_replaced(hashes, held, step.num_computed)
        self.count_tokens(request, step)
        if step.is_new:
            held = self.start(request, hashes, step)
        held.count_hashed(step)
        assert 0 <= step.num_hashed <= max(step.num_known, step.num_tokens)
        if has_hits:
            step.num_hashed = max(step.num_hashed, self.count_most_hit_tokens(hits))
        self.choose_shard(step, held, has_hits, hint, data_parallel_size)
        needs_hashes = has_hits or step.num_hashed
        if needs_hashes:
            hashes = self.cut_unsure(request, hashes, held, step)
            tokens = self.read_tokens(request, hashes, step.num_hashed // self.hash_page_size)
        if step.is_new and hashes is not None and hashes.request is request and hashes.query is not None:
            if hashes.query.is_short:
                return None
        known = hashes if step.is_new or (needs_hashes and writes_states(&held.holding)) else None
        if not needs_hashes:
            hashes = None
        if step.is_new and self.has_media:
            pages = self.allocate_with_medium(request_id, held, hits, hashes, tokens, step, hint, data_parallel_size)
        else:
            pages = self.allocate_hashed(request_id, held, hits, hashes, tokens, step)
        if pages is not None and known is not None:
            held.note_looked_up(min(known.chain.count_tokens(known.chain.num), step.num_tokens))
        return pages

    cdef object allocate_with_medium(
        self, object request_id, RequestPages held, tuple hits, RequestHashes hashes, PageIds tokens, Step *step, object hint,
        object data_parallel_size,
    ):
        """Hold the medium of a new request, and allocate for it: both, or nothing. The medium evicts none of the hits."""
        cdef object pages = None, request = held.owner, media = self.registry.media
        cdef bint is_planned = not (self.caches_computed or step.may_overwrite or step.num_before > step.num_held)
        cdef Py_ssize_t num_kept = 0
        cdef int64_t num_new = media.count_own_pages(step.num_held, step.demand.num_tokens) - sum(map(len, hits))
        try:
            for ids in hits:
                self.store.touch(ids)
                num_kept += 1
            if media.begin(request, hint, data_parallel_size, step.num_before, is_planned, max(0, num_new)):
                pages = self.allocate_hashed(request_id, held, hits, hashes, tokens, step)
        finally:
            for ids in hits[:num_kept]:
                self.store.give_back(ids)
            if pages is None:
                media.end(request, 0)
        if pages is None and self.on_too_large is None:
            media.require_fit(request, hint, data_parallel_size, step.num_held, step.demand.num_tokens)
        return pages

    cdef RequestPages start(self, object request, RequestHashes hashes, Step *step):
        """Return the `RequestPages`, still empty, of a new request, with the boundaries at which other requests can resume. Let
        the step know the end of its hits.
        """
        cdef RequestPages held = RequestPages.__new__(RequestPages, self.store, self.groups, self.max_num_tokens, request)
        if held.holding.boundaries != NULL or self.has_state:
            counts = self.registry.rules.require_resume_at(
                getattr(request, "resume_at", ()), min(self.max_num_tokens, <int64_t>MAX_TOKENS)
            )
            step.end = new_end()
            if hashes is not None and hashes.request is request and hashes.query is not None:
                step.end, step.demand.end = hashes.query.end, &step.end
            assert step.num_held <= step.num_before
            held.fix_boundaries(
                count_known(request), &step.end, step.num_before if step.num_before > step.num_held else 0,
                as_page_ids(counts, "resume_at"),
            )
        if self.groups.kinds.has_answers:
            set_prompt(&held.holding, self.registry.count_prompt_tokens(request))
        return held

    cdef int count_tokens(self, object request, Step *step) except -1:
        """Read the number of known tokens where it matters, and derive which of them are cached."""
        step.num_known = 0
        if not step.may_overwrite or self.has_state:
            step.num_known = count_known(request)
        begin_step(step, self.hash_lookahead, self.caches_computed)
        assert step.may_overwrite or self.enables_caching
        return 0

    cdef int choose_shard(
        self, Step *step, RequestPages held, bint has_hits, object hint, object data_parallel_size
    ) except -1:
        """Set the shard of new pages, -1 for any, and the number of shards into which the request needs the pool divided."""
        cdef object num_pages
        step.demand.shard, step.num_shards = -1, 0
        if hint is None and data_parallel_size is None:
            return 0
        num_pages = self.store.pool.banks[0].stop
        self.store.require_even(data_parallel_size)
        found = find_shard(num_pages, hint, data_parallel_size)
        pages_per_shard = pages_per_dp_shard(num_pages, data_parallel_size)
        if found is not None:
            step.demand.shard, step.num_shards = found
        elif pages_per_shard is not None and (has_hits or count_places(&held.holding)):
            step.num_shards = num_pages // pages_per_shard
        assert -1 <= step.demand.shard < max(1, step.num_shards)
        return 0

    cdef int cut_replaced(self, RequestHashes hashes, RequestPages held, int64_t num_computed) except -1:
        """Forget the hashes of tokens that may have been replaced: the request was set back into the tokens of its look-up."""
        cdef int64_t num_sure = max(<int64_t>0, num_computed - self.hash_lookahead) // self.hash_page_size
        assert 0 <= num_sure and num_computed < held.num_looked_up
        if hashes is not None and hashes.chain.num > num_sure:
            hashes.cut(num_sure)
        held.note_looked_up(0)
        return 0

    cdef bint is_refused_still(self, RefusedRequest refusal, tuple hits, const Step *step) except -1:
        """Whether a request with the same hits is refused as it was the last time."""
        cdef int64_t num_pages
        if refusal.hits is not hits:
            return False
        assert self.groups.num == 1 and refusal.shard < 0
        num_pages = max(pages_for(&self.groups.groups[0].rules, step.demand.num_tokens), <int64_t>len(hits[0]))
        if num_pages >= self.store.pool.num_pages and self.on_too_large is None:
            return False
        if not refusal.is_request_short(num_pages, step.demand.num_reserved):
            return False
        if self.on_too_large is not None:
            self.on_too_large(self.store.pool.num_pages, hits, num_pages - len(hits[0]))
        return True

    cdef RequestHashes cut_unsure(self, object request, RequestHashes hashes, RequestPages held, const Step *step):
        """Return the hashes of a request without those of tokens that may have changed."""
        if hashes is None or hashes.request is not request:
            return self.registry.extend_hashes(request, step.num_hashed)
        if hashes.are_unsure or step.num_computed < held.num_cached_tokens or (
            step.num_hashed <= step.num_known < hashes.chain.count_tokens(hashes.chain.num)
        ):
            hashes.cut(held.count_entered_hashes(step.num_computed))
        return hashes

    cdef object allocate_hashed(
        self, object request_id, RequestPages held, tuple hits, RequestHashes hashes, PageIds tokens, Step *step
    ):
        """Allocate for a checked call in one native transaction, then record the admission or the refusal. `hashes` belong to
        the first `num_hashed` tokens (None: no hashes are needed); those still missing are computed from `tokens`.
        """
        cdef tuple new = None, checked = () if hits is self._no_ids else hits
        cdef bint needs_pages = hits is not self._no_ids or step.demand.num_tokens > held.limits.num_room
        cdef HashChain chain = None if hashes is None else hashes.chain
        cdef object tenant = None
        cdef Outcome outcome
        if needs_pages:
            new = new_ids(self.groups.num)
        if needs_pages and step.is_new and self.enables_caching:
            held.session_id = require_name("session_id", getattr(held.owner, "session_id", None))
            tenant = require_name("tenant", getattr(held.owner, "tenant", None))
        if hashes is not None and hashes.page_hashes:
            self.name_pages(hashes, held, hits, step)
        if self.held.get(request_id) is not (None if step.is_new else held):
            self.maps.refuse_nested(request_id)
        if needs_pages and step.is_new:
            self.held[request_id] = held  # before anything is taken, so that no interrupt can lose it
        assert held.num_looked_up == 0 if step.is_new else self.held[request_id] is held
        step.context, step.session, step.may_be_too_large = 0, NO_SESSION, self.on_too_large is not None
        try:
            if hashes is not None and (hashes.extra_keys is not None or held.session_id is not None):
                context = self.registry.hold_context(hashes.extra_keys, held.session_id)
                step.context = self.store.checked_context(context)
            if step.is_new and (held.session_id is not None or tenant is not None):
                step.session = self.registry.sessions.hold(held.session_id, tenant)
            outcome = held.allocate_checked(step, checked, chain, tokens, new)
        finally:
            if needs_pages and count_places(&held.holding) == 0:
                self.held.pop(request_id, None)
            if step.context:
                self.registry.release_context(step.context)
            if step.session != NO_SESSION:
                self.registry.sessions.release(step.session)
        if hashes is not None and hashes.page_hashes:
            self.registry.forget_evicted_names()
        if outcome == TOO_FEW:
            self.keep_refusal(hashes if checked else None, held, hits, step)
            return None
        if outcome != DONE:
            held.refuse(outcome, step, checked, chain)
        if step.is_new:
            self.maps.count_admission(held.owner, request_id, self.count_most_hit_tokens(hits))
        if held.has_writes_due() and held not in self.maps.writing:
            self.maps.writing.append(held)
        assert held.limits.num_room >= step.demand.num_tokens and count_places(&held.holding) >= self.groups.num
        return pages_of(self._no_ids if new is None else new, self.store)

    cdef tuple read_hits(self, object request_id, object new_computed_pages):
        """Return the native ids of hits. ArgumentError if the request already holds pages."""
        cdef tuple hits
        if new_computed_pages is None:
            return self._no_ids
        if not isinstance(new_computed_pages, CachePages):
            raise ArgumentTypeError(f"new_computed_pages: got {type(new_computed_pages).__name__}, allowed: CachePages")
        hits = new_computed_pages.get_ids(self.store)
        if len(hits) != len(self._no_ids):
            raise ArgumentError(f"new_computed_pages: got {len(hits)} groups, allowed: {len(self._no_ids)}")
        if not any([len(ids) for ids in hits]):
            return self._no_ids
        if not self.enables_caching:
            raise ArgumentError("new_computed_pages: got pages, allowed without prefix caching: none")
        if self.held.get(request_id):
            raise ArgumentError(
                f"new_computed_pages: got pages for request {shown(request_id)}, which holds some already, allowed: none"
            )
        return hits

    cdef int64_t count_most_hit_tokens(self, tuple hits) except -1:
        """Count the hit tokens of the group whose hits reach furthest."""
        cdef Py_ssize_t g
        cdef int64_t num_tokens = 0
        for g in range(self.groups.num):
            num_tokens = max(num_tokens, self.count_hit_tokens(hits, g))
        return num_tokens

    cdef int64_t count_hit_tokens(self, tuple hits, Py_ssize_t group) except -1:
        """Count the tokens whose pages are among the hits of a group."""
        return <int64_t>(<PageIds?>hits[group]).num * self.groups.groups[group].stride * self.hash_page_size

    cdef int check_computed(self, object request_id, const Step *step, tuple hits, RequestPages held) except -1:
        """Raise ArgumentError for more computed tokens than the request can have: they would be cached. O(groups)."""
        cdef int64_t allowed, num_allowed, num_hits = step.num_held - step.num_computed
        cdef Py_ssize_t g
        if held is not None and num_hits == 0 and step.num_computed <= held.limits.num_room:
            return 0
        if self.groups.boundaries.writes_states and hits is not self._no_ids:
            lengths = [
                self.count_hit_tokens(hits, g) for g in range(self.groups.num) if not is_ring(&self.groups.groups[g].rules)
            ]
            if any([length != step.num_held for length in lengths]):
                raise ArgumentError(
                    f"request {shown(request_id)}: got {step.num_held} computed tokens, and new_computed_pages of "
                    f"{lengths} tokens by group, allowed with a state: all equal"
                )
        if step.num_held == 0 or not self._no_ids:
            return 0
        if held is None:
            allowed = num_allowed = min(
                [self.count_hit_tokens(hits, g) for g in range(self.groups.num) if self.groups.groups[g].id != NO_GROUP],
                default=0,
            )
            reason = "together, the tokens of new_computed_pages, for a request that holds no pages"
        elif num_hits == 0:
            allowed = num_allowed = held.limits.num_room
            reason = "the tokens for which it has slots"
        else:
            allowed, num_allowed = 0, step.num_computed
            reason = "new ones for a request that holds pages already"
        if step.num_held > num_allowed:
            raise ArgumentError(
                f"request {shown(request_id)}: got num_computed_tokens {step.num_computed} and "
                f"num_new_computed_tokens {num_hits}, allowed: {allowed} {reason}"
            )
        return 0

    cdef int check_known(self, object request_id, const Step *step, int64_t num_known) except -1:
        """Raise ArgumentError for hits that are counted twice: the tokens behind them are as many as the whole request has."""
        if step.num_tokens - step.num_held >= num_known:
            raise ArgumentError(
                f"request {shown(request_id)}: got {step.num_tokens - step.num_held} tokens behind {step.num_held} hit ones, "
                f"allowed: fewer than its {num_known} known ones, since hits are not new"
            )
        return 0

    cdef PageIds read_tokens(self, object request, RequestHashes hashes, Py_ssize_t num_pages):
        """Return the tokens still to be hashed for the first `num_pages` pages of a request; None if there are none."""
        cdef PageIds tokens
        if hashes.chain.num >= num_pages:
            return None
        assert num_pages > 0
        if self.hashes_natively and hashes.extra_keys is None:
            token_ids = request.all_token_ids
            if type(token_ids) is list:
                tokens = hashes.chain.read_next(token_ids, num_pages)
                if tokens is not None:
                    return tokens
        self.registry.extend_hashes(request, num_pages * self.hash_page_size)
        return None

    cdef int name_pages(self, RequestHashes hashes, RequestPages held, tuple hits, const Step *step) except -1:
        """Name the keys of pages that may be cached, and of their parents."""
        cdef int64_t start = held.count_entered_hashes(step.num_computed)
        cdef Py_ssize_t g
        assert len(hits) == self.groups.num
        if hits is not self._no_ids:
            start = min([len(hits[g]) * self.groups.groups[g].stride for g in range(self.groups.num)])
        self.registry.name_pages(hashes, start, step.num_hashed)
        return 0

    cdef int keep_refusal(self, RequestHashes hashes, RequestPages held, tuple hits, const Step *step) except -1:
        """Remember the hits of a refused request, unless hashes of its look-up were cut since and are missing now."""
        cdef RefusedRequest refusal
        assert 0 < step.demand.num_taken and step.wrong_page == NULL_PAGE
        if self.on_too_large is not None:
            self.report_shortage(held, hits, step.demand.num_new)
        if hashes is None or hashes.query is None or (
            hashes.chain.num < (hashes.query.num_queried_tokens - self.hash_lookahead) // self.hash_page_size
        ):
            return 0
        if step.demand.shard < 0 and self.groups.num == 1:
            refusal = RefusedRequest.__new__(RefusedRequest)
            refusal.hits, refusal.num_tokens = hits, hashes.query.num_queried_tokens
            refusal.num_hit_tokens = self.count_hit_tokens(hits, 0)
            is_watched = refusal.begin_request(self.store, self.groups, hashes.chain, step.num_changes)
            hashes.refusal = refusal if is_watched else None
        return 0

    cdef int report_shortage(self, RequestPages held, tuple hits, int64_t num_new) except -1:
        """Tell `on_too_large` which pages a refused request would hold."""
        cdef Py_ssize_t g
        attached = [hits[g] for g in range(self.groups.num) if not is_state(&self.groups.groups[g].rules)]
        self.on_too_large(self.store.pool.num_pages, (*held.get_page_ids(), *attached), num_new)
        return 0


@cython.freelist(64)
@cython.auto_pickle(False)
cdef class CachePages:
    """Pages for each cache group: the hits of a look-up, or the new pages of an allocation.

    It holds ids; the page objects in ``pages`` are made when they are first read.
    """

    cdef tuple groups         # `PageIds` of each group, or, without a store, a list of `CachePage` of each
    cdef PageStore store

    def __init__(self, tuple pages not None, PageStore store=None):
        """`pages` is one list of `CachePage` for each group or, with `store`, `PageIds` of that pool."""
        for group in pages:
            if store is not None:
                store.checked(group)
            elif type(group) is not list or not all([isinstance(page, CachePage) for page in group]):
                allowed = "lists of CachePage, or PageIds and a store"
                raise ArgumentTypeError(f"pages: got {type(group).__name__}, allowed: {allowed}")
        self.groups, self.store = pages, store

    @property
    def pages(self) -> tuple:
        """One list of page objects for each group."""
        cdef PageStore store = self.store
        if store is not None:
            self.groups = tuple([store.pages(ids) for ids in self.groups])
            self.store = None
        return self.groups

    def get_page_ids(self) -> tuple:
        """Return one list of page ids for each group. O(pages)."""
        if self.store is not None:
            return self.store.lists_in_banks(self.groups)
        return tuple([[page.page_id for page in group] for group in self.groups])

    def get_ids(self, PageStore store not None) -> tuple:
        """Return the native ids; PageIdError unless the pages belong to `store`."""
        if self.store is store:
            return self.groups
        return tuple([store.ids_of_pages(group) for group in self.pages])

    def get_unhashed_page_ids(self) -> list:
        """Return the ids of the pages that are not cached. ArgumentError unless there is exactly one group."""
        if len(self.groups) != 1:
            raise ArgumentError(f"get_unhashed_page_ids: got {len(self.groups)} groups, allowed: 1")
        return [page.page_id for page in self.pages[0] if page.page_hash is None]

    def new_empty(self):
        """Return empty lists of pages for the same number of groups."""
        return CachePages(tuple([[] for _ in self.groups]))

    def __add__(self, other):
        """Return the pages of both, group by group. ArgumentError if the numbers of groups differ."""
        if not isinstance(self, CachePages) or not isinstance(other, CachePages):
            return NotImplemented
        if len(self.pages) != len(other.pages):
            raise ArgumentError(f"+: got {len(other.pages)} groups, allowed: {len(self.pages)}, as many as on the left")
        return CachePages(tuple([[*mine, *others] for mine, others in zip(self.pages, other.pages)]))

    def __eq__(self, other):
        """Whether both have the same pages in the same order."""
        return isinstance(other, CachePages) and self.pages == other.pages

    def __reduce__(self):
        return type(self), (self.groups, self.store)

    def __repr__(self):
        """Show the ids."""
        return f"CachePages(page_ids={self.get_page_ids()})"


cdef CachePages pages_of(tuple groups, PageStore store):
    """Wrap native ids in `CachePages`."""
    cdef CachePages pages = CachePages.__new__(CachePages)
    pages.groups, pages.store = groups, store
    return pages

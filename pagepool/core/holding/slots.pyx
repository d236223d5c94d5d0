"""Slots for the next tokens of requests, and the pages that look-ups and allocations return."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.lookups cimport *
from pagepool.core.holding.request_maps cimport *
from pagepool.core.holding.request_pages cimport *
from pagepool.core.pool cimport CachePage
from pagepool.core.values cimport as_long_long, as_page_ids, as_shard, is_small, new_ids, size_of

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


cdef int64_t count_of(object value) except -1:
    """Return a checked count, at most `MAX_COUNT`."""
    return min(value, MAX_COUNT)


cdef struct Counts:           # tokens of a call of `allocate_slots`
    int64_t num_computed      # before the call
    int64_t num_new_computed  # tokens of hits
    int64_t num_before        # the above and external tokens together
    int64_t num_tokens        # the same with new tokens
    int64_t num_slots         # the same with drafts, at most `max_num_tokens`
    int64_t num_reserved      # pages to leave free


@cython.auto_pickle(False)
cdef class SlotAllocator:
    """The native half of `CacheManager`. It calls nothing of the façade's half: a `RequestRegistry` hashes tokens that are not
    in a list, with extra keys, or by a callable, and names their pages.
    """

    cdef RequestMaps maps           # the requests
    cdef object registry            # the same object, where its Python methods are called
    cdef object rules               # `GroupRules`
    cdef PageStore store
    cdef CacheGroups groups
    cdef dict held                  # the registry's own; so are the next two
    cdef dict hashes
    cdef object sessions            # `PageSessions`
    cdef readonly tuple _no_ids
    cdef int64_t max_num_tokens
    cdef int64_t hash_page_size
    cdef bint writes_states         # states are kept: steps write checkpoints
    cdef bint enables_caching
    cdef bint caches_computed       # tokens are cached once they are computed, not when they get slots
    cdef bint keeps_boundaries      # see `Boundaries`
    cdef bint has_state             # some group is a state
    cdef object on_too_large        # called for each refused request, in place of RequestTooLargeError; None: raise that
    cdef bint hashes_natively
    cdef int64_t num_lookahead      # tokens behind a page that its hash covers

    def __init__(
        self, RequestMaps registry not None, rules, sessions, max_num_tokens, on_too_large=None, bint caches_computed=False, *,
        bint hashes_natively=True, num_lookahead=0,
    ):
        """Allocate to the requests of a `RequestRegistry`, each of at most `max_num_tokens` tokens, by these `GroupRules`.
        `sessions` are the `PageSessions` of its store. Hashes are made by `registry`, or here if they are native, and cover
        `num_lookahead` tokens behind their page.
        """
        self.maps, self.registry, self.store = registry, registry, registry.store
        self.rules, self.groups = rules, rules.groups
        self.held, self.hashes, self.sessions = registry.held, registry.hashes, sessions
        self._no_ids = new_ids(self.groups.num)
        self.max_num_tokens, self.hash_page_size = max_num_tokens, rules.hash_page_size
        self.writes_states = self.groups.boundaries.writes_states
        self.enables_caching = self.store.enable_caching
        self.keeps_boundaries = self.groups.boundaries.multiple > 0
        self.has_state = rules.has_state
        self.on_too_large, self.caches_computed = on_too_large, caches_computed
        if caches_computed:
            self.store.prefer_held()
        self.hashes_natively, self.num_lookahead = hashes_natively, num_lookahead

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

        ArgumentError, and no change, for 0 new tokens, for more tokens than `max_model_len`, for hits that are counted among
        the new tokens too, and for computed tokens that cannot be: beyond the hits of a request that holds nothing (a preempted
        request starts at 0 again), or beyond the slots of one that does. MovesDueError, and no change, while moves of its
        pages, or states that its step writes, are due. The state of a state group cannot go back: free a request whose
        ``num_computed_tokens`` decreases, or restore its state. One native transaction; if nothing is due, the manager's lock
        is not taken. Amortised O(new pages).
        """
        cdef Counts counts
        cdef RequestPages held = None
        cdef object request_id = None
        cdef int64_t num_new = 0, num_external = 0, num_lookahead = 0, num_filled
        cdef bint is_delayed, is_plain = False
        try:
            request_id = request.request_id
            held = find_held(self.held, request_id)
            is_plain = is_count(request.num_computed_tokens, &counts.num_computed)
        except (AttributeError, TypeError):
            pass
        is_plain = is_plain and is_count(num_new_tokens, &num_new)
        is_plain = is_plain and is_count(num_new_computed_tokens, &counts.num_new_computed)
        is_plain = is_plain and is_count(num_lookahead_tokens, &num_lookahead)
        is_plain = is_plain and is_count(num_external_computed_tokens, &num_external)
        if not is_plain or num_new + num_external == 0:
            num_new_computed_tokens = require_int("num_new_computed_tokens", num_new_computed_tokens, 0)
            num_lookahead_tokens = require_int("num_lookahead_tokens", num_lookahead_tokens, 0)
            num_external_tokens = require_int("num_external_computed_tokens", num_external_computed_tokens, 0)
            num_new_tokens = require_int("num_new_tokens", num_new_tokens, 0 if num_external_tokens else 1)
            num_computed_tokens = read_count(request, "num_computed_tokens")
            request_id = id_of(request)
            held = find_held(self.held, request_id)
            num_tokens = num_computed_tokens + num_new_computed_tokens + num_external_tokens + num_new_tokens
            if num_tokens > self.max_num_tokens:
                self.refuse_length(request_id, num_tokens)
            counts.num_computed, counts.num_new_computed = num_computed_tokens, num_new_computed_tokens
            num_new, num_external, num_lookahead = num_new_tokens, num_external_tokens, count_of(num_lookahead_tokens)
        counts.num_before = counts.num_computed + counts.num_new_computed + num_external
        counts.num_tokens = counts.num_before + num_new
        counts.num_slots = counts.num_tokens + num_lookahead
        if held is not None and held.owner is not request:
            self.maps.find_held(request)
        if held is not None and new_computed_pages is None and counts.num_new_computed == 0:
            num_filled = counts.num_tokens
            if self.caches_computed:
                num_filled = counts.num_computed
            elif delay_cache_pages is True:
                num_filled = 0
            if held.is_idle(counts.num_computed, num_filled, counts.num_slots):
                return pages_of(self._no_ids, self.store)
        if counts.num_tokens > self.max_num_tokens:
            self.refuse_length(request_id, counts.num_tokens)
        counts.num_slots = min(counts.num_slots, self.max_num_tokens)
        if not is_count(num_reserved_pages, &counts.num_reserved):
            num_reserved_pages = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        counts.num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        is_delayed = delay_cache_pages is not False and require_flag("delay_cache_pages", delay_cache_pages)
        lock = self.maps.lock
        lock.acquire()
        try:
            return self.allocate_or_doubt(
                request, request_id, &counts, new_computed_pages, is_delayed, dp_shard_hint, data_parallel_size
            )
        finally:
            lock.release()

    cdef object allocate_or_doubt(
        self, object request, object request_id, Counts *counts, object hits, bint is_delayed, object hint, object size
    ):
        """Allocate under the manager's lock. After None or an error the request's tokens may change, so its hashes become
        unsure.
        """
        cdef RequestHashes hashes
        cdef object pages = None
        try:
            pages = self.allocate_due(request, request_id, counts, hits, is_delayed, hint, size)
        finally:
            if pages is None:
                hashes = self.hashes.get(request_id)
                if hashes is not None:
                    hashes.are_unsure = True
        return pages

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

    cdef int begin_boundaries(self, object request, RequestHashes hashes, RequestPages held, int64_t external_end) except -1:
        """Fix the numbers of tokens at which other requests can resume where this one was."""
        cdef int64_t junction = 0
        counts = self.rules.require_resume_at(
            getattr(request, "resume_at", ()), min(self.max_num_tokens, <int64_t>MAX_TOKENS)
        )
        if hashes is not None and hashes.request is request and hashes.query is not None:
            junction = hashes.query[3]
        held.fix_boundaries(count_of(read_num_tokens(request)), junction, external_end, as_page_ids(counts, "resume_at"))
        return 0

    cdef int refuse_length(self, object request_id, object num_tokens) except -1:
        """Raise the error for a request that is longer than the model allows."""
        raise ArgumentError(f"request {shown(request_id)}: got {shown(num_tokens)} tokens, allowed: {self.max_num_tokens}")

    cdef object allocate_due(
        self, object request, object request_id, Counts *counts, object new_computed_pages, bint is_delayed, object hint,
        object data_parallel_size
    ):
        """Check a call for which something is due, hash the pages that it fills, and allocate. Hashing fails if tokens are
        missing. The manager's lock is held.
        """
        cdef tuple found = None, hits = self.read_hits(request_id, new_computed_pages)
        cdef RequestPages held = self.held.get(request_id)
        cdef bint is_admission = held is None, has_hits = hits is not self._no_ids, is_rewound = False
        cdef RequestHashes hashes = self.hashes.get(request_id), known
        cdef object pages
        cdef PageIds tokens = None
        cdef int64_t num_known = 0, num_hashed = 0, num_keyed
        cdef int32_t num_shards = 0
        cdef Step step
        if not is_admission and held.owner is not request:  # of another thread, since the first check
            self.maps.find_held(request)
        if is_admission or counts.num_new_computed or counts.num_computed > held.limits.num_room:
            self.check_computed(request_id, counts, hits, held)
        if is_admission and has_hits and not self.maps.trusts_requests:
            self.check_known(request_id, counts, count_of(read_num_tokens(request)))
        if is_admission and hashes is not None and hashes.refusal is not None and data_parallel_size is None:
            if hashes.request is request and self.is_refused_still(hashes.refusal, hits, counts):
                return None
        if not is_admission and counts.num_computed < held.num_looked_up:
            self.cut_replaced(hashes, held, counts.num_computed)
        step.num_to_cache, step.caches_first = 0, self.caches_computed
        step.may_overwrite = not self.enables_caching or (is_delayed and not self.caches_computed)
        if not step.may_overwrite or self.writes_states:
            num_known = count_of(read_num_tokens(request))
        if not step.may_overwrite:
            step.num_to_cache = min(counts.num_computed if self.caches_computed else counts.num_tokens, num_known)
            is_rewound = not is_admission and counts.num_computed < held.num_cached_tokens
        num_keyed = max(<int64_t>0, num_known - self.num_lookahead)
        step.num_settled = counts.num_computed
        if self.num_lookahead and not step.may_overwrite:
            step.num_settled = min(step.num_settled, num_keyed)
        num_keyed = min(step.num_to_cache, num_keyed)
        if has_hits:
            num_hashed = self.count_most_hit_tokens(hits)
        step.write_from, step.num_before = counts.num_computed + counts.num_new_computed, counts.num_before
        step.write_to = min(counts.num_tokens, num_known)
        step.num_final = 0 if step.may_overwrite else min(counts.num_computed, max(<int64_t>0, num_known - self.num_lookahead))
        if is_admission:
            held = RequestPages.__new__(RequestPages, self.store, self.groups, self.max_num_tokens, request)
        if is_admission and (self.keeps_boundaries or self.has_state):
            self.begin_boundaries(request, hashes, held, counts.num_before if counts.num_before > step.write_from else 0)
        if is_rewound:  # known tokens of a page that is computed again in part
            num_hashed = max(num_keyed, min(num_known - self.num_lookahead, held.num_cached_tokens))
        elif num_keyed > 0 and (is_admission or num_keyed >= held.limits.num_full):
            num_hashed = max(num_hashed, num_keyed)
        if self.writes_states and not step.may_overwrite:
            num_keyed = max(<int64_t>0, min(counts.num_tokens, num_known - self.num_lookahead))
            if held.writes.num or held.find_boundary(step.write_from) <= num_keyed:
                num_hashed = max(num_hashed, num_keyed)
        if hint is not None or data_parallel_size is not None:
            self.store.require_even(data_parallel_size)
            found = find_shard(self.store.pool.banks[0].stop, hint, data_parallel_size)
            num_shards = self.count_shards(held, has_hits, hint, data_parallel_size)
        if has_hits or num_hashed:
            hashes = self.cut_unsure(request, hashes, held, counts.num_computed, num_known, num_hashed)
            tokens = self.read_tokens(request, hashes, num_hashed // self.hash_page_size)
        if is_admission and hashes is not None and hashes.is_short:
            return None
        step.num_computed, step.context, step.session = counts.num_computed, 0, NO_SESSION
        step.demand.num_tokens, step.demand.num_reserved = counts.num_slots, counts.num_reserved
        step.demand.shard, step.stays_in_shard = as_shard(found[0], num_shards) if found else -1, num_shards > 0
        step.may_be_too_large = self.on_too_large is not None
        known = hashes if is_admission else None
        if not has_hits and not num_hashed:
            hashes = None
        pages = self.allocate_hashed(
            request, request_id, held, is_admission, hits, hashes, num_hashed, tokens, &step, num_shards
        )
        if self.writes_states and hashes is not None:  # boundaries are hashed as their step is planned
            known = hashes
        if pages is not None and known is not None:
            held.note_looked_up(min(known.chain.count_tokens(known.chain.num), counts.num_tokens))
        if held.has_writes_due() and held not in self.maps.writing:
            self.maps.writing.append(held)
        return pages

    cdef int cut_replaced(self, RequestHashes hashes, RequestPages held, int64_t num_computed) except -1:
        """Forget the hashes of tokens that may have been replaced: the request was set back, before tokens of its look-up."""
        cdef int64_t num_sure = max(<int64_t>0, num_computed - self.num_lookahead) // self.hash_page_size
        if hashes is not None and hashes.chain.num > num_sure:
            hashes.cut(num_sure)
        held.note_looked_up(0)
        return 0

    cdef bint is_refused_still(self, RefusedRequest refusal, tuple hits, const Counts *counts) except -1:
        """Whether a request with the same hits is refused as it was the last time."""
        cdef int64_t num_pages
        if refusal.hits is not hits:
            return False
        num_pages = max(pages_for(&self.groups.groups[0].rules, counts.num_slots), <int64_t>len(hits[0]))
        if num_pages >= self.store.pool.num_pages and self.on_too_large is None:
            return False
        if not refusal.is_request_short(num_pages, counts.num_reserved):
            return False
        if self.on_too_large is not None:
            self.on_too_large(self.store.pool.num_pages, hits, num_pages - len(hits[0]))
        return True

    cdef inline RequestHashes cut_unsure(
        self, object request, RequestHashes hashes, RequestPages held, int64_t num_computed, int64_t num_known,
        int64_t num_hashed,
    ):
        """Return the hashes of a request without those of tokens that may have changed."""
        if hashes is None or hashes.request is not request:
            return self.registry.extend_hashes(request, num_hashed)
        if hashes.are_unsure or num_computed < held.num_cached_tokens or (
            num_hashed <= num_known < hashes.chain.count_tokens(hashes.chain.num)
        ):
            hashes.cut(held.count_entered_hashes(num_computed))
        return hashes

    cdef object allocate_hashed(
        self, object request, object request_id, RequestPages held, bint is_admission, tuple hits, RequestHashes hashes,
        int64_t num_hashed, PageIds tokens, Step *step, int32_t num_shards
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
        if needs_pages and is_admission and self.enables_caching:
            held.session_id = require_name("session_id", getattr(request, "session_id", None))
            tenant = require_name("tenant", getattr(request, "tenant", None))
        if hashes is not None and hashes.page_hashes:
            self.name_pages(hashes, held, hits, step.num_computed, num_hashed)
        if self.held.get(request_id) is not (None if is_admission else held):
            self.maps.refuse_nested(request_id)
        if needs_pages and is_admission:
            self.held[request_id] = held  # before anything is taken, so that no interrupt can lose it
        try:
            if hashes is not None and (hashes.extra_keys is not None or held.session_id is not None):
                context = self.registry.hold_context(hashes.extra_keys, held.session_id)
                step.context = self.store.checked_context(context)
            if is_admission and (held.session_id is not None or tenant is not None):
                step.session = self.sessions.hold(held.session_id, tenant)
            outcome = held.allocate_checked(step, checked, chain, tokens, num_shards, new)
        finally:
            if needs_pages and count_places(&held.holding) == 0:
                self.held.pop(request_id, None)
            if step.context:
                self.registry.release_context(step.context)
            if step.session != NO_SESSION:
                self.sessions.release(step.session)
        if hashes is not None and hashes.page_hashes:
            self.registry.forget_evicted_names()
        if outcome == TOO_FEW:
            self.keep_refusal(hashes if checked else None, held, hits, step)
            return None
        if outcome == TOO_LARGE:
            self.store.refuse_size(f"request {shown(request_id)}", step.wrong_num, step.wrong_shard)
        if outcome != DONE:
            held.refuse(outcome, step, checked, chain)
        if is_admission:
            self.maps.count_admission(request, request_id, self.count_most_hit_tokens(hits))
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
        """Count the tokens of the group whose hits reach furthest."""
        cdef Py_ssize_t g
        cdef int64_t num_tokens = 0
        for g in range(self.groups.num):
            num_tokens = max(num_tokens, self.count_hit_tokens(hits, g))
        return num_tokens

    cdef int64_t count_hit_tokens(self, tuple hits, Py_ssize_t group) except -1:
        """Count the tokens whose pages are among the hits of a group."""
        return <int64_t>(<PageIds?>hits[group]).num * self.groups.groups[group].stride * self.hash_page_size

    cdef int check_computed(self, object request_id, const Counts *counts, tuple hits, RequestPages held) except -1:
        """Raise ArgumentError for more computed tokens than the request can have: they would be cached. O(groups)."""
        cdef int64_t allowed, num_allowed, num_tokens = counts.num_computed + counts.num_new_computed
        cdef Py_ssize_t g
        if self.writes_states and hits is not self._no_ids:
            lengths = [self.count_hit_tokens(hits, g) for g in range(self.groups.num)]
            if any([length != num_tokens for length in lengths]):
                raise ArgumentError(
                    f"request {shown(request_id)}: got {num_tokens} computed tokens, and new_computed_pages of "
                    f"{lengths} tokens by group, allowed with a state: all equal"
                )
        if num_tokens == 0 or not self._no_ids:
            return 0
        if held is None:
            allowed = num_allowed = min(
                [self.count_hit_tokens(hits, g) for g in range(self.groups.num) if self.groups.groups[g].id != NO_GROUP],
                default=0,
            )
            reason = "together, the tokens of new_computed_pages, for a request that holds no pages"
        elif counts.num_new_computed == 0:
            allowed = num_allowed = held.limits.num_room
            reason = "the tokens for which it has slots"
        else:
            allowed, num_allowed = 0, counts.num_computed
            reason = "new ones for a request that holds pages already"
        if num_tokens > num_allowed:
            raise ArgumentError(
                f"request {shown(request_id)}: got num_computed_tokens {counts.num_computed} and "
                f"num_new_computed_tokens {counts.num_new_computed}, allowed: {allowed} {reason}"
            )
        return 0

    cdef int check_known(self, object request_id, const Counts *counts, int64_t num_known) except -1:
        """Raise ArgumentError for hits that are counted twice: behind them the new tokens are the whole request again."""
        num_hits = counts.num_computed + counts.num_new_computed
        if counts.num_tokens - num_hits >= num_known:
            raise ArgumentError(
                f"request {shown(request_id)}: got {counts.num_tokens - num_hits} tokens behind {num_hits} hit ones, allowed: "
                f"fewer than its {num_known} known ones, since hits are not new"
            )
        return 0

    cdef PageIds read_tokens(self, object request, RequestHashes hashes, Py_ssize_t num_pages):
        """Return the tokens still to be hashed for the first `num_pages` pages of a request; None if there are none."""
        cdef PageIds tokens
        if hashes.chain.num >= num_pages:
            return None
        if self.hashes_natively and hashes.extra_keys is None:
            token_ids = request.all_token_ids
            if type(token_ids) is list:
                tokens = hashes.chain.read_next(token_ids, num_pages)
                if tokens is not None:
                    return tokens
        self.registry.extend_hashes(request, num_pages * self.hash_page_size)
        return None

    cdef int32_t count_shards(self, RequestPages held, bint has_hits, object hint, object data_parallel_size) except -1:
        """Return the number of shards into which a request needs the pool divided; 0: any page will do."""
        cdef object num_pages = self.store.pool.banks[0].stop
        pages_per_shard = pages_per_dp_shard(num_pages, data_parallel_size)
        if pages_per_shard is None or (hint is None and not has_hits and not count_places(&held.holding)):
            return 0
        return num_pages // pages_per_shard

    cdef int name_pages(
        self, RequestHashes hashes, RequestPages held, tuple hits, int64_t num_computed, int64_t num_tokens
    ) except -1:
        """Name the keys of pages that may be cached, and of their parents."""
        cdef int64_t start = held.count_entered_hashes(num_computed)
        cdef Py_ssize_t g
        if hits is not self._no_ids:
            start = min([len(hits[g]) * self.groups.groups[g].stride for g in range(self.groups.num)])
        self.registry.name_pages(hashes, start, num_tokens)
        return 0

    cdef int keep_refusal(self, RequestHashes hashes, RequestPages held, tuple hits, const Step *step) except -1:
        """Remember the hits of a refused request. If its hashes were cut since the look-up, the refusal before has them."""
        cdef Py_ssize_t g
        cdef RefusedRequest refusal
        if self.on_too_large is not None:
            attached = [hits[g] for g in range(self.groups.num) if not is_state(&self.groups.groups[g].rules)]
            self.on_too_large(self.store.pool.num_pages, (*held.get_page_ids(), *attached), step.demand.num_new)
        if hashes is None or hashes.query is None or (
            hashes.chain.num < (<int64_t>hashes.query[0] - self.num_lookahead) // self.hash_page_size
        ):
            return 0
        if step.demand.shard < 0 and self.groups.num == 1:
            refusal = RefusedRequest.__new__(RefusedRequest)
            refusal.hits, refusal.num_tokens, refusal.num_hit_tokens = hits, hashes.query[0], self.count_hit_tokens(hits, 0)
            is_watched = refusal.begin_request(self.store, self.groups, hashes.chain, step.num_changes)
            hashes.refusal = refusal if is_watched else None
        return 0


cdef object read_num_tokens(object request):
    """Return the number of a request's tokens, checked."""
    cdef int64_t count
    try:
        num_tokens = request.num_tokens
    except AttributeError:
        return read_count(request, "num_tokens")
    return num_tokens if is_count(num_tokens, &count) else require_int("num_tokens", num_tokens, 0)


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

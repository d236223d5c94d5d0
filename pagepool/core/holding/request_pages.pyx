"""The pages that requests hold. Requests and running rows share the rules of `pagepool.core.holding.holding`.

Always: a step is checked before anything changes. Its writes are noted only if the writes of the step before were taken. A
write stays in the list until its tokens are final, the request goes back to fewer tokens, or the request ends.
"""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT64_MAX

from pagepool.core.base cimport GIL_DISABLED, MAX_LOOKAHEAD, process_number
from pagepool.core.pool cimport NOBODY, count_changes, count_holders, count_refusal, give_back_all, overdrawn_page, set_session
from pagepool.core.values cimport ids_in, refuse_hashed

from pagepool.errors import ArgumentError, ArgumentTypeError, MovesDueError, PageHashError, PageIdError, shown


cdef int lock_chain(HashChain chain, PageStore store) except -1:
    """Lock a chain, if there is one. Its lock is taken before the store's. IntegrityError if either is of another process."""
    store.require_own()
    if chain is not None:
        chain.own_lock()[0].acquire()
    return 0


cdef void unlock_chain(HashChain chain) noexcept:
    if chain is not None:
        chain.lock.release()


cdef int refuse_due(PageStore store, str name) except -1:
    """Raise the error for moves that are due. If they are taken next, that begins no step."""
    with store.own_lock()[0]:
        store.pool.copies.is_between = True
    raise MovesDueError(f"{name}: got moves of its pages that are due, allowed: none; call take_moves, and make them, before")


cdef int refuse_unshareable(str name) except -1:
    """Raise the error for a fork of pages that cannot get a further reference."""
    raise PageIdError(
        f"{name}: got a page that cannot have a further reference, or was given back, or is free and has one, allowed: pages "
        "that it holds"
    )


cdef int require_banks(PageStore store, CacheGroups groups) except -1:
    """Raise ArgumentError unless a store has the banks of all groups."""
    if groups.num_banks > store.pool.num_banks:
        raise ArgumentError(f"groups: got {groups.num_banks} banks, allowed: the {store.pool.num_banks} of the store")
    return 0


cdef Contents contents_of(HashChain chain, int32_t context, int32_t session) noexcept:
    """Return the hashes and tokens in a request's locked chain (None: none), with the request's context and session."""
    cdef Contents contents = Contents(
        digests=NULL, uppers=NULL, num_digests=0, token_ids=NULL, num_token_ids=0, hash_lookahead=0, context=context,
        session=session,
    )
    if chain is not None:
        contents.digests, contents.uppers, contents.num_digests = chain.digests, chain.uppers, chain.num
        contents.hash_lookahead = chain.hashing.hash_lookahead
    if chain is not None and chain.token_ids is not None:
        contents.token_ids, contents.num_token_ids = chain.token_ids.ids, chain.token_ids.num
    return contents


@cython.final
@cython.auto_pickle(False)
cdef class RequestPages:
    """The pages of `store` that the request `owner`, of at most `max_num_tokens` tokens, holds in each cache group.

    ``len()`` counts their places, including those of skipped pages. Each call is atomic.
    """

    def __cinit__(self, PageStore store not None, CacheGroups groups not None, max_num_tokens, owner=None):
        cdef Py_ssize_t g
        self.max_num_tokens = size_of(max_num_tokens, "max_model_len", 0, INT64_MAX)
        for g in range(0 if store.enable_caching else groups.num):
            if groups.groups[g].id != NO_GROUP:
                raise ArgumentError(f"groups: got id {groups.groups[g].id}, allowed without prefix caching: None")
        if store.pool.num_banks > 1 or groups.num_banks > 1:
            require_banks(store, groups)
        self.store, self.groups, self.owner, self.begun = store, groups, owner, now_of(&store.pool.expected)
        self.holding = Holding(
            groups=groups.groups, held=<Held *>calloc(max(1, groups.num), sizeof(Held)), num_groups=groups.num, boundaries=NULL,
            session=NO_SESSION, num_once_cached=0,
        )
        if self.holding.held == NULL:
            raise MemoryError("the pages of a request")
        if groups.boundaries.multiple:
            self.boundaries = groups.boundaries
            self.holding.boundaries = &self.boundaries
        self.plan()

    def __dealloc__(self):
        cdef Py_ssize_t g
        if self.store is not None and self.store.process != process_number:  # another thread may have been changing it
            return
        for g in range(self.holding.num_groups if self.holding.held != NULL else 0):
            free(self.holding.held[g].ids)
        free(self.holding.held)
        free(self.writes.items)
        if self.holding.session != NO_SESSION and self.store is not None:  # destroyed without `give_back`
            with self.store.lock:
                set_session(&self.store.pool.sessions, &self.holding.session, NO_SESSION)

    def __reduce__(self):
        raise ArgumentTypeError("what a request holds cannot be pickled")

    def __repr__(self):
        """Show the places held, and the tokens up to which nothing is due."""
        return (
            f"RequestPages(num_places={len(self)}, num_room={self.limits.num_room}, num_full={self.limits.num_full}, "
            f"num_skip={self.limits.num_skip}, num_cached_tokens={self.num_cached_tokens})"
        )

    def __len__(self):
        cdef Py_ssize_t count
        with self.store.own_lock()[0]:
            count = count_places(&self.holding)
        return count

    def begin(self, num_tokens, FoundPrefix found not None) -> None:
        """Fix the boundaries of a request of `num_tokens` tokens that holds no pages, as at admission: see `ResumePlaces`."""
        cdef int64_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        if len(self):
            raise ArgumentError("request: got one that holds pages, allowed: one without")
        self.fix_boundaries(num, &found.end, 0, None)

    cdef void fix_boundaries(self, int64_t num_tokens, const PrefixEnd *end, int64_t external_end, PageIds resume_at) noexcept:
        """Call `begin_boundaries` if pages or states are kept at boundaries."""
        cdef ResumePlaces places = ResumePlaces(
            num_tokens=num_tokens, junction=end.junction, has_parted=end.has_parted, external_end=external_end,
            writes_answer=pays_to_write_answers(&self.store.pool, self.holding.groups, self.holding.num_groups),
            named=ids_in(resume_at), num_named=0 if resume_at is None else resume_at.num,
        )
        if self.holding.boundaries != NULL:
            begin_boundaries(&self.groups.boundaries, &self.boundaries, &places)

    cdef void plan(self) noexcept:
        """Recompute the token counts below which nothing is due."""
        cdef const Group *group
        cdef const Held *held
        cdef Py_ssize_t g
        self.limits = limits_of(&self.holding)
        self.limits.num_room = min(self.limits.num_room, self.max_num_tokens)
        if self.writes.num or has_moves_due(&self.store.pool, &self.holding):
            self.limits.num_skip = 0
        self.num_cached_tokens, self.num_idle = self.holding.num_once_cached, self.limits.num_room
        assert 0 <= self.limits.num_room <= self.max_num_tokens and self.holding.num_once_cached >= 0
        for g in range(self.holding.num_groups):
            group, held = &self.holding.groups[g], &self.holding.held[g]
            assert 0 <= held.num_skipped <= held.num_pages and 0 <= held.num_hits and 0 <= held.num_cached
            if keeps_checkpoints(group):
                self.num_idle = min(self.num_idle, find_checkpoint(&self.holding, g) - 1)
            elif group.id != NO_GROUP:
                self.num_cached_tokens = max(self.num_cached_tokens, held.num_cached * <int64_t>group.rules.page_size)

    @property
    def num_room_tokens(self) -> int:
        """Tokens that have a slot in every group, at most `max_num_tokens`."""
        return self.limits.num_room

    @property
    def num_full_tokens(self) -> int:
        """Tokens that fill the next page to be cached, or after which a step writes the next checkpoint."""
        return self.limits.num_full

    def count_entered_hashes(self, num_computed_tokens) -> int:
        """Count the leading hashes whose pages need no prefix entry any more, in any group. Pages behind the computed tokens
        do not count: they are cached again if they lost their entries.
        """
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        cdef int64_t count = MAX_TOKENS
        cdef const Group *group
        cdef Py_ssize_t g
        with self.store.own_lock()[0]:
            for g in range(self.holding.num_groups):
                group = &self.holding.groups[g]
                if group.id != NO_GROUP:
                    count = min(count, count_entered(group, &self.holding.held[g], num_computed) * group.stride)
        return count

    cdef bint is_idle(self, int64_t num_computed, int64_t num_tokens, int64_t num_slots) noexcept:
        """Whether a call has nothing to do: `num_slots` tokens have slots and pass no checkpoint, `num_tokens` tokens fill no
        further page, and after `num_computed` tokens no page is skipped, kept or cached again. O(1).
        """
        cdef bint is_enough
        if self.store.process != process_number:  # the call goes on, and raises
            return False
        if GIL_DISABLED:
            self.store.lock.acquire()
        is_enough = num_slots <= self.num_idle and num_tokens < self.limits.num_full
        is_enough = is_enough and self.num_cached_tokens <= num_computed < self.limits.num_skip
        is_enough = is_enough and self.num_looked_up <= num_computed
        if GIL_DISABLED:
            self.store.lock.release()
        return is_enough

    cdef int note_looked_up(self, int64_t num_tokens) except -1:
        with self.store.own_lock()[0]:
            self.num_looked_up = num_tokens
        return 0

    cdef bint has_writes_due(self) noexcept:
        """Whether a write of its states was not taken."""
        return self.writes.num > self.writes.num_taken

    cdef void count_hashed(self, Step *step) noexcept:
        """Set `num_hashed`: hashes are needed to cache pages, to compare pages computed again in part, and to write states."""
        cdef int64_t num_to_cache = min(step.num_to_cache, step.num_keyed), num_planned = min(step.num_tokens, step.num_keyed)
        cdef int32_t boundary
        step.num_hashed = 0
        if step.may_overwrite:
            return
        if step.num_computed < self.num_cached_tokens:
            step.num_hashed = max(num_to_cache, min(step.num_keyed, self.num_cached_tokens))
        elif step.is_new or num_to_cache >= self.limits.num_full:
            step.num_hashed = num_to_cache
        if writes_states(&self.holding):
            boundary = find_next_boundary(&self.boundaries, <int32_t>min(step.num_held, <int64_t>MAX_TOKENS))
            if self.writes.num or boundary <= num_planned:
                step.num_hashed = max(step.num_hashed, num_planned)
        assert 0 <= step.num_hashed <= step.num_known

    def find_last_write(self, num_tokens) -> int:
        """Return the token count of the last written, still uncached state within `num_tokens` tokens; 0: none. O(writes)."""
        cdef int64_t most = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef int32_t last = 0
        cdef Py_ssize_t i
        with self.store.own_lock()[0]:
            for i in range(self.writes.num_taken):
                assert 0 < self.writes.items[i].num_tokens and self.writes.items[i].row == 0
                if self.writes.items[i].num_tokens <= most:
                    last = max(last, self.writes.items[i].num_tokens)
        return last

    def get_page_ids(self) -> tuple:
        """Return the ids of each group's pages, with the null page for skipped ones. O(pages)."""
        cdef tuple copies = new_ids(self.holding.num_groups)
        cdef bint has_room
        with self.store.own_lock()[0]:
            has_room = copy_ids(&self.holding, copies)
        if not has_room:
            raise MemoryError("the page ids of a request")
        return copies

    def allocate(
        self, num_tokens, num_computed_tokens=0, hits=(), HashChain chain=None, num_tokens_to_cache=0, shard=None, num_shards=0
    ) -> tuple | None:
        """Give `num_tokens` tokens slots in one transaction. Return the new pages of each group; None if the pool has too few
        free pages. The steps: give back the pages that no token from `num_computed_tokens` on attends to (they stay given back
        even after None); make `hits`, found under `chain`, the first pages; take the missing pages; keep the states that are
        due after `num_computed_tokens` tokens; cache the pages that `num_tokens_to_cache` tokens fill. New pages come from the
        `shard` of `num_shards`. Errors, after which nothing has changed: PageHashError for a hit with other content by now, and
        for a page cached under another hash; ArgumentError for hits of a request that holds pages; MovesDueError while moves
        of its pages are due; DoubleFreeError if another caller gave back a page due to be given back. O(pages).
        """
        cdef tuple checked = checked_hits(self.store, hits, &self.holding)
        cdef tuple new = new_ids(self.holding.num_groups)
        cdef Outcome outcome
        cdef Step step
        memset(&step, 0, sizeof(Step))
        step.num_computed = step.num_final = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        step.num_to_cache = size_of(num_tokens_to_cache, "num_tokens_to_cache", 0, INT64_MAX)
        step.demand.num_tokens = size_of(num_tokens, "num_tokens", 0, INT64_MAX - MAX_TOKENS)
        step.num_shards = <int32_t>size_of(num_shards, "num_shards", 0, MAX_TOKENS)
        step.demand.shard = -1 if shard is None else <int32_t>size_of(shard, "shard", 0, step.num_shards - 1)
        step.may_be_too_large, step.may_overwrite = True, step.num_to_cache == 0
        if chain is None and checked:
            chain = HashChain.__new__(HashChain, 1, bytes(16))
        if chain is not None and chain.hashing.hash_lookahead:
            step.num_cached_first = min(step.num_to_cache, step.num_computed)
        outcome = self.allocate_checked(&step, checked, chain, None, new)
        if outcome != DONE and outcome != TOO_FEW:
            self.refuse(outcome, &step, checked, chain)
        return new if outcome == DONE else None

    cdef Outcome allocate_checked(self, Step *step, tuple hits, HashChain chain, PageIds tokens, tuple new) except *:
        """Let the chain hash `tokens`, divide the store into the step's shards (0: as it is), and allocate, both locked."""
        cdef Hits *array = list_hits(hits)
        cdef Outcome outcome
        if hits and array == NULL:
            return NO_MEMORY
        try:
            lock_chain(chain, self.store)
            outcome = hash_missing(chain, tokens, step.num_hashed)
            if outcome == DONE:
                self.store.lock_divided(step.num_shards, &chain.lock if chain is not None else <cython.pymutex *>NULL)
                step.demand.hits = array
                outcome = allocate_locked(self, step, chain, new)
                self.store.lock.release()
            unlock_chain(chain)
        finally:
            free(array)
        return outcome

    def fork(self, RequestPages target not None, num_computed_tokens, session=0, hash_lookahead=0) -> bool:
        """Let `target`, which holds nothing, continue from the computed tokens of the request. Full pages are shared, others
        copied; in a pool of shards the copies come from the shard of the first page. A full page is copied too unless the
        `hash_lookahead` tokens behind it are computed. `session` comes from `PageSessions.hold`, or is 0 for the request's own
        session. False, and nothing changed, if too few pages are free. PageIdError for a page that cannot be shared. O(pages).
        """
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, self.limits.num_room)
        cdef int32_t checked_session = self.store.checked_session(session)
        cdef ForkExtent extent = fork_extent(num_computed, <int32_t>size_of(hash_lookahead, "hash_lookahead", 0, MAX_LOOKAHEAD))
        cdef ForkOutcome outcome = SHORT_OF_MEMORY
        cdef bint is_past_pages
        if target is self or target.store is not self.store or target.groups is not self.groups or len(target):
            raise ArgumentError(
                "target: got one of another pool or other groups, or that holds pages, allowed: another request, with the same "
                "pool and groups, without pages"
            )
        with self.store.own_lock()[0]:
            is_past_pages = lacks_pages(&self.holding, <int32_t>num_computed)
            if not is_past_pages:
                outcome = fork_locked(self, target, &extent, checked_session or self.holding.session)
            self.plan()
            target.plan()
            assert outcome != FORKED or count_places(&target.holding) <= count_places(&self.holding)
        if is_past_pages:
            raise ArgumentError(
                f"num_computed_tokens: got {num_computed}, allowed: as many as the request had, since pages that further "
                "tokens attend to were given back behind a window"
            )
        if outcome == SHORT_OF_MEMORY:
            raise MemoryError("the page ids of a request")
        if outcome == UNSHAREABLE:
            refuse_unshareable("request")
        return outcome == FORKED

    def enter(self, HashChain chain not None, num_tokens, num_computed_tokens, context=0) -> None:
        """Cache the pages that `num_tokens` tokens fill. Pages with tokens from `num_computed_tokens` on are cached again if
        they lost their entry. PageHashError, and nothing changed, if a page was cached under another hash. O(pages due).
        """
        cdef Step step
        step.num_to_cache = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        step.num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        step.context = self.store.checked_context(context)
        cache_computed(self, chain, &step, False, False)

    def end_external(self, HashChain chain, num_tokens, bint is_failed, context=0, bint is_last=True) -> None:
        """Cache the pages that `num_tokens` tokens fill, after an engine has filled some of them from elsewhere; before the
        last ones only if they can hit by then. Then give back the pages that no later token attends to, and after a failure
        those behind the tokens. PageHashError, and nothing changed, if a page has another hash. O(pages given back and cached).
        """
        cdef Step step
        step.num_to_cache, step.num_computed = size_of(num_tokens, "num_tokens", 0, MAX_TOKENS), INT64_MAX
        step.context = self.store.checked_context(context)
        if is_last or hits_all_leading_pages(self.holding.groups, self.holding.num_groups):
            cache_computed(self, chain, &step, is_last, is_failed)

    def require_moves_taken(self, bint may_be_read=False) -> None:
        """Raise MovesDueError while moves of the pages are due. Copies from the pages do not count if they `may_be_read`.
        """
        cdef Pool *pool = &self.store.pool
        cdef bint is_due
        with self.store.own_lock()[0]:
            is_due = awaits_moves(pool, &self.holding) if may_be_read else has_moves_due(pool, &self.holding)
            is_due = is_due or self.has_writes_due()
        if is_due:
            self.refuse(MOVES_DUE, NULL, (), None)

    cdef int refuse(self, Outcome outcome, const Step *step, tuple hits, HashChain chain) except -1:
        """Raise the error for a step that was not done."""
        if outcome == MOVES_DUE:
            refuse_due(self.store, "request")
        if outcome == ALREADY_HASHED:
            refuse_hashed()
        if outcome == NOT_EMPTY:
            raise ArgumentError("hits: got some for a request that holds pages, allowed: none")
        if outcome == WRONG_HIT:
            refuse_hits(self, hits, chain)
        if outcome == LOST_PAGE:
            raise overdrawn_page(self.store.shown_page(step.wrong_page))
        if outcome == CACHED_OTHERWISE:
            page = f"{self.store.shown_page(step.wrong_page)} (at {step.wrong_at} of {step.wrong_num})"
            raise PageHashError(
                f"{page}, which has a hash already: got other tokens than those that it was cached for, or an entry made by "
                "hand, allowed: the same tokens, as long as the page is held"
            )
        if outcome == HELD_FREE:
            self.store.check_untaken(step.wrong_page)
        if outcome == TOO_LARGE:
            self.store.refuse_size(f"request {shown(self.owner.request_id)}", step.wrong_num, step.wrong_shard)
        raise MemoryError("the page ids of a request")

    def give_back(
        self, num_computed_tokens=None, HashChain chain=None, num_last_tokens=0, context=0, term=0, num_tokens_to_cache=0
    ) -> None:
        """Give back all pages, group by group, the last page first. Pages without other holders get `term`, which
        comes from `term_of`, unless it is 0. O(pages).

        First the pages that `num_tokens_to_cache` tokens fill are cached, unless one was cached under another hash. States
        that steps wrote among the first `num_last_tokens` tokens become checkpoints. Pages with tokens from
        `num_computed_tokens` on were not computed, and lose the entries that they got under `chain`, except hits.
        DoubleFreeError, and nothing changed, if another caller gave one of the pages back.
        """
        cdef Pool *pool = &self.store.pool
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t num_computed = MAX_TOKENS
        cdef int64_t num_last = size_of(num_last_tokens, "num_last_tokens", 0, MAX_TOKENS)
        cdef int32_t checked_context = self.store.checked_context(context)
        cdef Step step
        cdef Contents contents
        cdef Py_ssize_t num_staying, bad = -1
        cdef int32_t checked_term = <int32_t>size_of(term, "term", 0, NEVER)
        cdef PageIds given = PageIds([checked_term]) if checked_term != UNKNOWN else None
        cdef PageIds terms = None if given is None else PageIds.__new__(PageIds)
        cdef int32_t overdrawn = NULL_PAGE
        cdef bint has_room
        if num_computed_tokens is not None:
            num_computed = <int32_t>min(size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX), <int64_t>MAX_TOKENS)
        step.num_to_cache = size_of(num_tokens_to_cache, "num_tokens_to_cache", 0, MAX_TOKENS)
        step.num_computed = MAX_TOKENS
        lock_chain(chain, self.store)
        with self.store.lock:
            contents = contents_in(self, chain, checked_context)
            assert 0 <= num_computed <= MAX_TOKENS
            # Check before pages are cached or kept, or the queue is divided.
            if self.holding.boundaries != NULL or given is not None or step.num_to_cache:
                overdrawn = find_overdrawn(pool, &self.holding)
            has_room = overdrawn == NULL_PAGE and ids.try_reserve(count_places(&self.holding))
            if has_room and given is not None:
                has_room = terms.try_reserve(ids.capacity) and self.store.make_terms(given)
            if has_room and step.num_to_cache and not has_foreign_entry(pool, &self.holding, &step, &contents):
                cache_full(pool, &self.holding, &contents, min(step.num_to_cache, self.limits.num_room))
                self.plan()
            num_staying = list_all(self, num_computed, ids) if has_room else -1
            if num_staying >= 0:
                if given is not None:
                    self.store.pad_terms(terms, checked_term, num_staying)
                bad = self.store.give_back_row(ids, num_staying, ids_in(terms))
            if num_staying >= 0 and bad < 0:
                note_run_end(pool, &self.holding)
                cache_writes(pool, &self.holding, &self.writes, &contents, num_last, checked_term)
                forget_all(self, &contents, num_computed if num_computed_tokens is not None else -1)
        unlock_chain(chain)
        if overdrawn != NULL_PAGE:
            raise overdrawn_page(f"{self.store.shown_page(overdrawn)} of the request")
        if num_staying < 0:
            raise MemoryError("the page ids of a request, or their terms")
        if bad >= 0:
            self.store.refuse_give_back(ids, bad)

    def count_shared(self, group, num_holders) -> int:
        """Count the leading pages of a group with at least `num_holders` references, not counting those of leases, copies and
        loads. 0 without caching, and for groups other than full attention. O(pages of the answer).
        """
        cdef Py_ssize_t checked_group = size_of(group, "group", 0, self.holding.num_groups - 1)
        cdef Held *held = &self.holding.held[checked_group]
        cdef Py_ssize_t need = size_of(num_holders, "num_scheduled_requests")
        cdef int32_t i = 0
        cdef Pool *pool = &self.store.pool
        if not hits_leading_pages(&self.groups.groups[checked_group]):
            return 0
        with self.store.own_lock()[0]:
            while i < held.num_pages and count_holders(pool, held.ids[i]) - count_moves(pool, held.ids[i]) >= need:
                i += 1
        return i


cdef ForkOutcome fork_locked(
    RequestPages request, RequestPages target, const ForkExtent *extent, int32_t session
) noexcept:
    """Let `target` continue from a request whose pages are all there. Copies come from the shard of its first page."""
    cdef Pool *pool = &request.store.pool
    cdef int32_t g, shard = find_first_shard(pool, &request.holding)
    cdef ForkOutcome outcome = SHORT_OF_MEMORY
    if make_room(&target.holding, &request.holding):
        outcome = prepare_fork(pool, &request.holding, extent, 1, shard)
    if outcome == FORKED:
        target.boundaries = request.boundaries
        assert target.holding.session == NO_SESSION
        set_session(&pool.sessions, &target.holding.session, session)
        for g in range(<int32_t>request.holding.num_groups):
            fork_group(pool, &request.holding, &target.holding, g, extent, shard)
    return outcome


cdef Contents contents_in(RequestPages request, HashChain chain, int32_t context) noexcept:
    """Return `contents_of` for a request that holds pages."""
    return contents_of(chain, context, request.holding.session)


cdef Py_ssize_t list_all(RequestPages request, int32_t num_computed, PageIds ids) noexcept:
    """List all pages of a request in the order of giving back, first those that stay cached. Return the number of these; -1 if
    memory is short.
    """
    cdef Pool *pool = &request.store.pool
    cdef Py_ssize_t num_staying
    rate_pages(pool, &request.holding, num_computed)
    if not list_last_first(pool, &request.holding, num_computed, ids, False):
        return -1
    num_staying = ids.num
    return num_staying if list_last_first(pool, &request.holding, num_computed, ids, True) else -1


cdef void forget_all(RequestPages request, const Contents *contents, int32_t num_computed) noexcept:
    """Forget the pages of a request, which were given back. Those with tokens from `num_computed` on lose their entries; -1
    means that all were computed.
    """
    cdef Pool *pool = &request.store.pool
    drop_behind(pool, &request.writes, 0, 0)
    drop_copies(pool, &request.holding)
    if num_computed >= 0:
        forget_uncomputed(pool, &request.holding, num_computed, contents)
    empty(&request.holding)
    request.holding.num_once_cached = 0
    assert count_places(&request.holding) == 0
    set_session(&pool.sessions, &request.holding.session, NO_SESSION)
    request.plan()


cdef Outcome allocate_locked(RequestPages request, Step *step, HashChain chain, tuple new) noexcept:
    """Check everything, then change. `new` gets the new pages of each group; it is None if there can be none."""
    cdef Pool *pool = &request.store.pool
    cdef Holding *holding = &request.holding
    cdef Contents contents = contents_of(chain, step.context, step.session or holding.session)
    cdef bint is_rewound = step.num_computed < request.num_cached_tokens
    cdef bint is_past_skip = is_rewound or step.num_computed >= request.limits.num_skip
    cdef Outcome outcome = MOVES_DUE if request.has_writes_due() else check(pool, holding, step, &contents, is_past_skip)
    if outcome != DONE:
        return outcome
    if is_rewound and overwrites_entry(pool, holding, step, &contents):
        return CACHED_OTHERWISE
    if not reserve(pool, holding, &step.demand, new):
        return NO_MEMORY
    settle_before(request, step, &contents, is_past_skip)
    stay_in_shard(pool, holding, step)
    if step.demand.num_new or step.demand.hits != NULL:
        outcome = take_demanded(pool, holding, step, new)
        request.plan()
    elif step.session != NO_SESSION:
        set_session(&pool.sessions, &holding.session, step.session)
    if outcome == DONE:
        if step.num_to_cache > step.num_cached_first and contents.num_digests:
            cache_full(pool, holding, &contents, min(step.num_to_cache, request.limits.num_room))
        plan_writes(pool, holding, &request.writes, step, &contents)
    request.plan()
    assert outcome != DONE or request.limits.num_room >= min(step.demand.num_tokens, request.max_num_tokens)
    return outcome


cdef void settle_before(RequestPages request, const Step *step, const Contents *contents, bint is_past_skip) noexcept:
    """Go back to the computed tokens, cache final states and pages, and skip pages that the step does not read."""
    cdef Pool *pool = &request.store.pool
    cdef int64_t num_cached_first = min(step.num_cached_first, request.limits.num_room)
    cdef Py_ssize_t g
    assert request.writes.num == request.writes.num_taken and step.num_final <= step.num_computed
    assert 0 <= num_cached_first <= step.num_computed
    rewind(request, step.num_computed)
    end_writes(request, contents, min(step.num_final, step.num_to_cache), step.num_computed)
    if num_cached_first and contents.num_digests:
        cache_full(pool, &request.holding, contents, num_cached_first)
    for g in range(request.holding.num_groups if is_past_skip else 0):
        skip_pages(pool, &request.holding, g, <int32_t>min(step.num_final, <int64_t>MAX_TOKENS))


cdef bint reserve(Pool *pool, const Holding *holding, const Demand *demand, tuple new) noexcept:
    """Make room for hits and new pages in the holding, for new pages in `new`, and for copies; False if memory is short."""
    cdef Held *held
    cdef Py_ssize_t g, num_copies = count_state_hits(holding, demand.hits)
    cdef int64_t n, num_held
    for g in range(holding.num_groups if new is not None else 0):
        held = &holding.held[g]
        n = count_needed(holding, demand, g)
        num_held = held.num_pages + count_attached(holding, demand, g) + n
        assert n >= 0 and num_held >= held.num_pages
        if n > pool.num_pages:  # it will not fit
            continue
        if not reserve_ids(held, num_held):
            return False
        if not (<PageIds>new[g]).try_reserve(n + is_state(&holding.groups[g].rules)):
            return False
    return reserve_copies(pool, num_copies)


cdef Outcome refuse_demand(Pool *pool, const Holding *holding, Step *step, Fit result) noexcept:
    """Count a refusal. If only the shard has too few pages, the hits move to the back of the queue, as if they were used."""
    cdef const Demand *demand = &step.demand
    cdef Py_ssize_t g
    for g in range(holding.num_groups if result == SHORT_IN_SHARD and demand.hits != NULL else 0):
        hit(pool, demand.hits[g].ids, demand.hits[g].num, NOBODY)  # the request is not admitted
    for g in range(holding.num_groups if result == SHORT_IN_SHARD and demand.hits != NULL else 0):
        give_back_all(pool, demand.hits[g].ids, demand.hits[g].num, False)
    count_refusal(pool, queue_of_bank(demand.short_bank))
    step.num_changes = count_changes(pool)
    assert 0 <= demand.short_bank < pool.num_banks and (demand.num_new or demand.hits != NULL)
    return TOO_FEW


cdef Outcome take_demanded(Pool *pool, Holding *holding, Step *step, tuple new) noexcept:
    """Attach the hits of a checked step and take its new pages, or refuse it."""
    cdef Demand *demand = &step.demand
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t n
    cdef Fit result = fit_or_adopt(pool, holding, demand, NULL)
    if result != FITS:
        return refuse_demand(pool, holding, step, result)
    if rare(step.session != NO_SESSION):
        set_session(&pool.sessions, &holding.session, step.session)
    attach(pool, holding, demand)
    for g in range(holding.num_groups):
        held = &holding.held[g]
        n = held.num_pages if demand.num_adopted and is_state(&holding.groups[g].rules) else 0
        n += take_missing(pool, &holding.groups[g], held, demand.num_tokens, demand.shard, holding.session)
        assert 0 <= n <= held.num_pages and pages_for(&holding.groups[g].rules, demand.num_tokens) <= held.num_pages
        (<PageIds>new[g]).put(held.ids + held.num_pages - n, n)
    copy_states(pool, holding, demand)
    return DONE


cdef int cache_computed(RequestPages request, HashChain chain, Step *step, bint is_external, bint is_failed) except -1:
    """Do the work of `end_external` if it `is_external`, else that of `enter`."""
    cdef Contents contents
    cdef bint is_right
    assert is_external or not is_failed
    lock_chain(chain, request.store)
    with request.store.lock:
        contents = contents_in(request, chain, step.context)
        is_right = not has_foreign_entry(&request.store.pool, &request.holding, step, &contents)
        if is_right:
            cache_checked(request, step, &contents, is_external, is_failed)
    unlock_chain(chain)
    if not is_right:
        request.refuse(CACHED_OTHERWISE, step, (), chain)
    return 0


cdef void cache_checked(
    RequestPages request, const Step *step, const Contents *contents, bint is_external, bint is_failed
) noexcept:
    """Do the work of `cache_computed` after the check that no page is cached under another hash."""
    cdef Pool *pool = &request.store.pool
    cdef Holding *holding = &request.holding
    cdef int32_t num_tokens = <int32_t>min(step.num_to_cache, <int64_t>MAX_TOKENS)
    rewind(request, step.num_computed)
    if is_external:
        skip_unread(pool, holding, num_tokens)
    cache_full(pool, holding, contents, min(step.num_to_cache, request.limits.num_room))
    if is_failed:
        forget_uncomputed(pool, holding, num_tokens, contents)
        give_back_behind(pool, holding, num_tokens)
    else:
        end_writes(request, contents, step.num_to_cache, INT64_MAX)
    request.plan()


cdef void end_writes(RequestPages request, const Contents *contents, int64_t num_final, int64_t num_computed) noexcept:
    """Cache the states written within `num_final` tokens, and drop the writes behind `num_computed` tokens."""
    cache_writes(&request.store.pool, &request.holding, &request.writes, contents, num_final, UNKNOWN)
    assert 0 <= request.writes.num_taken <= request.writes.num <= request.writes.capacity
    drop_behind(&request.store.pool, &request.writes, 0, num_computed)


cdef void rewind(RequestPages request, int64_t num_computed) noexcept:
    """Let pages be cached again if their tokens are computed again and they have lost their entries. `PagePool.evict_pages`
    drops entries after a failed load, for example.
    """
    cdef Holding *holding = &request.holding
    cdef Py_ssize_t g
    assert 0 <= num_computed and 0 <= request.num_cached_tokens
    if num_computed < request.num_cached_tokens:
        holding.num_once_cached = <int32_t>request.num_cached_tokens
        for g in range(holding.num_groups):
            recompute_from(&holding.groups[g], &holding.held[g], <int32_t>num_computed)
            assert holding.held[g].num_cached <= full_entries(&holding.groups[g].rules, <int32_t>num_computed)


cdef int refuse_hits(RequestPages request, tuple hits, HashChain chain) except -1:
    """Raise the error for the first wrong hit."""
    cdef const Group *group
    cdef PageIds ids
    cdef Py_ssize_t g, i = 0, flaw = 0, num_hits = sum([len(ids) for ids in hits])
    for g in range(len(hits)):
        ids, group = hits[g], &request.holding.groups[g]
        request.store.require_own()
        with chain.own_lock()[0], request.store.lock:
            for i in range(ids.num):
                flaw = STALE
                if (i + 1) * group.stride <= chain.num:
                    flaw = count_free_hits(
                        &request.store.pool, group, &chain.digests[i * group.stride], ids.ids + i, 1, num_hits
                    )
                if flaw < 0:
                    break
        if flaw < 0:
            break
    if flaw == UNTOUCHABLE:
        request.store.refuse_touch(ids.ids[i])
    page = "a page"  # no hit is wrong any more
    if flaw < 0:
        page = f"{request.store.shown_page(ids[i])} (at {i} of group {group.id})"
    raise PageHashError(
        f"{page}: got a hit that does not hold this prefix, allowed: hits of a look-up right before allocate_slots"
    )

"""What requests hold, and how they come to hold it: by the rules of `pagepool.core.holdings`, as running rows do."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from cpython.mem cimport PyMem_RawRealloc as realloc
from libc.stdint cimport INT64_MAX

from pagepool.core.arguments cimport as_list, size_of
from pagepool.core.holdings cimport (
    FITS, FORKED, SHORT_IN_SHARD, SHORT_OF_MEMORY, STALE, UNSHAREABLE, UNTOUCHABLE, Fit, ForkOutcome, Held, Waiting,
    are_checkpoints_due, attach, awaits_copies, check_fork, copy_states, count_attached, count_free_hits, count_moves,
    count_needed, count_places, count_state_hits, drop_copies, empty, enter_full_pages, enter_states, enter_waiting,
    find_lost_page, fit, forget_uncomputed, fork_group, has_copies_due, keep_state, lacks_page, limits_of, list_last_first,
    price, put_back_behind, recompute_from, reserve_copies, skip_pages, skip_unread, take_missing,
)
from pagepool.core.ids cimport new_ids
from pagepool.core.index cimport is_entered_otherwise
from pagepool.core.pages cimport give_back, touch_all
from pagepool.core.platform cimport GIL_DISABLED
from pagepool.core.queue cimport find_held_free
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, count_changes, shard_of
from pagepool.core.rules cimport MAX_TOKENS, full_entries, hits_leading_pages, is_state, pages_for

from pagepool.errors import ArgumentError, ArgumentTypeError, CopiesDueError, DoubleFreeError, PageHashError, PageIdError


cdef Py_ssize_t find_late_null(const int32_t *ids, Py_ssize_t n) noexcept:
    """Index of a null page behind another page, or -1."""
    cdef Py_ssize_t i
    cdef int32_t num_found = 0
    for i in range(1, n):  # several at once, for there is no way out
        num_found |= (ids[i] == NULL_PAGE) & (ids[i - 1] != NULL_PAGE)
    if num_found:
        for i in range(1, n):
            if ids[i] == NULL_PAGE and ids[i - 1] != NULL_PAGE:
                return i
    return -1


cdef void lock_chain(HashChain chain) noexcept:
    """Lock a chain, if there is one: `lock` is taken before the store's."""
    if chain is not None:
        chain.lock.acquire()


cdef void unlock_chain(HashChain chain) noexcept:
    if chain is not None:
        chain.lock.release()


cdef void set_contents(Contents *contents, HashChain chain) noexcept:
    """What pages hold, by a locked chain."""
    contents.digests = chain.digests
    if chain.token_ids is not None:
        contents.token_ids, contents.num_token_ids = chain.token_ids.ids, chain.token_ids.num


cdef tuple checked_hits(PageStore store, object hits, const Holding *holding):
    """`hits` as page ids of the pool for each group, null pages first, or none at all. O(hits)."""
    cdef tuple checked = tuple(as_list(hits, "hits"))
    cdef Py_ssize_t bad
    if checked and len(checked) != holding.num_groups:
        raise ArgumentError(f"hits: got {len(checked)} groups, allowed: {holding.num_groups}")
    for ids in checked:
        if not isinstance(ids, PageIds):
            raise ArgumentTypeError(f"hits: got {type(ids).__name__}, allowed: PageIds")
        store.checked(ids)
        bad = find_late_null((<PageIds>ids).ids, (<PageIds>ids).num)
        if bad >= 0:
            raise ArgumentError(f"hits: got the null page (at {bad} of {len(ids)}) behind others, allowed: before them")
    return checked


cdef Hits *list_hits(tuple hits) noexcept:
    """The hits of each group in new memory; NULL without any, and where memory is short."""
    cdef Py_ssize_t g
    cdef Hits *array = <Hits *>malloc(len(hits) * sizeof(Hits)) if hits else NULL
    for g in range(len(hits) if array != NULL else 0):
        array[g] = Hits((<PageIds>hits[g]).ids, <int32_t>(<PageIds>hits[g]).num)
    return array


cdef bint lacks_pages(const Holding *holding, int32_t num_computed) noexcept:
    """Whether pages were given back that tokens from `num_computed` on need: of a request that went back behind a window."""
    cdef const Group *group
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if lacks_page(group, &holding.held[g], num_computed, pages_for(&group.rules, num_computed)):
            return True
    return False


cdef int64_t capacity_for(int64_t num_pages) noexcept:
    """Ids for which there is room where `num_pages` are held: a power of 2, or none."""
    cdef int64_t capacity = 4 if num_pages else 0
    while capacity < num_pages:
        capacity *= 2
    return capacity


cdef bint reserve_ids(Held *held, int64_t num_pages) noexcept:
    """Make room for `num_pages` ids; False where memory is short."""
    cdef int32_t *ids
    if capacity_for(num_pages) > capacity_for(held.num_pages):
        ids = <int32_t *>realloc(held.ids, capacity_for(num_pages) * sizeof(int32_t))
        if ids == NULL:
            return False
        held.ids = ids
    return True


@cython.final
@cython.auto_pickle(False)
cdef class RequestPages:
    """The pages of `store` that a request of at most `max_num_tokens` tokens holds in each cache group.

    ``len()`` counts their places, including those of skipped pages. Each call is atomic.
    """

    def __cinit__(self, PageStore store not None, CacheGroups groups not None, max_num_tokens):
        cdef Py_ssize_t g
        self.max_num_tokens = size_of(max_num_tokens, "max_model_len", 0, INT64_MAX)
        for g in range(0 if store.enable_caching else groups.num):
            if groups.groups[g].id != NO_GROUP:
                raise ArgumentError(f"groups: got id {groups.groups[g].id}, allowed without prefix caching: None")
        self.store, self.groups = store, groups
        self.holding = Holding(groups.groups, <Held *>calloc(max(1, groups.num), sizeof(Held)), groups.num)
        if self.holding.held == NULL:
            raise MemoryError("the pages of a request")
        self.plan()

    def __dealloc__(self):
        cdef Py_ssize_t g
        for g in range(self.holding.num_groups if self.holding.held != NULL else 0):
            free(self.holding.held[g].ids)
        free(self.holding.held)

    def __reduce__(self):
        raise ArgumentTypeError("what a request holds cannot be pickled")

    def __repr__(self):
        """The tokens up to which nothing is due."""
        return (
            f"RequestPages(num_places={len(self)}, num_room={self.limits.num_room}, num_full={self.limits.num_full}, "
            f"num_skip={self.limits.num_skip}, num_cached_tokens={self.num_cached_tokens})"
        )

    def __len__(self):
        cdef Py_ssize_t count
        with self.store.lock:
            count = count_places(&self.holding)
        return count

    cdef void plan(self) noexcept:
        """Compute up to which tokens nothing is due."""
        cdef const Group *group
        cdef Py_ssize_t g
        self.limits = limits_of(&self.holding)
        self.limits.num_room = min(self.limits.num_room, self.max_num_tokens)
        if has_copies_due(&self.store.pool, &self.holding):
            self.limits.num_skip = 0
        self.num_cached_tokens = 0
        for g in range(self.holding.num_groups):
            group = &self.holding.groups[g]
            if group.id != NO_GROUP:
                self.num_cached_tokens = max(
                    self.num_cached_tokens, <int64_t>self.holding.held[g].num_cached * group.rules.entry_size
                )

    @property
    def num_room_tokens(self) -> int:
        """Tokens that have a slot in every group, at most those of the model."""
        return self.limits.num_room

    @property
    def num_cached_hashes(self) -> int:
        """Leading hashes whose pages need no prefix entry any more, in any group."""
        cdef Py_ssize_t g, count = MAX_TOKENS
        with self.store.lock:
            for g in range(self.holding.num_groups):
                if self.holding.groups[g].id != NO_GROUP:
                    count = min(count, <Py_ssize_t>self.holding.held[g].num_cached * self.holding.groups[g].stride)
        return count

    cdef bint is_idle(self, int64_t num_computed, int64_t num_tokens, int64_t num_slots) noexcept:
        """Whether `num_slots` tokens have slots, no page gets full by `num_tokens` tokens, and none is to be skipped, kept or
        entered again with `num_computed`. O(1).
        """
        cdef bint is_enough
        if GIL_DISABLED:
            self.store.lock.acquire()
        is_enough = num_slots <= self.limits.num_room and num_tokens < self.limits.num_full
        is_enough = is_enough and self.num_cached_tokens <= num_computed < self.limits.num_skip
        if GIL_DISABLED:
            self.store.lock.release()
        return is_enough

    def keeps_states_after(self, num_computed_tokens) -> bool:
        """Return whether a state has come to, or past, the next multiple of its interval. O(groups)."""
        return self.has_states_due(size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX))

    cdef bint has_states_due(self, int64_t num_computed) noexcept:
        return are_checkpoints_due(&self.holding, <int32_t>min(num_computed, <int64_t>MAX_TOKENS))

    def get_page_ids(self) -> tuple:
        """Return the ids of each group's pages, with the null page for skipped ones. O(pages)."""
        cdef tuple copies = new_ids(self.holding.num_groups)
        cdef Py_ssize_t g
        cdef bint has_room = True
        with self.store.lock:
            for g in range(self.holding.num_groups):
                has_room = has_room and (<PageIds>copies[g]).try_reserve(self.holding.held[g].num_pages)
                if has_room:
                    (<PageIds>copies[g]).put(self.holding.held[g].ids, self.holding.held[g].num_pages)
        if not has_room:
            raise MemoryError("the page ids of a request")
        return copies

    def allocate(
        self, num_tokens, num_computed_tokens=0, hits=(), HashChain chain=None, num_tokens_to_cache=0
    ) -> tuple | None:
        """Give `num_tokens` tokens slots, as one transaction: first give back the pages that no token from
        `num_computed_tokens` on attends to; then make `hits`, found under `chain`, the first pages, and take the missing ones;
        then keep the states after `num_computed_tokens` tokens that are due, and enter the pages that `num_tokens_to_cache`
        tokens fill in the prefix index. Return the new pages of each group; None if the pool has too few free pages. Pages that
        were given back stay so.

        Errors, where nothing has changed: PageHashError for a hit that has another content by now, and for a page that was
        entered as something else; ArgumentError for hits of a request that holds pages; CopiesDueError while copies or
        transfers of its pages are due; DoubleFreeError if somebody else gave back a page that is due. O(pages).
        """
        cdef tuple checked = checked_hits(self.store, hits, &self.holding)
        cdef tuple new = new_ids(self.holding.num_groups)
        cdef Step step
        cdef Outcome outcome
        step.num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        step.num_to_cache = size_of(num_tokens_to_cache, "num_tokens_to_cache", 0, INT64_MAX)
        step.demand.num_tokens = size_of(num_tokens, "num_tokens", 0, INT64_MAX - MAX_TOKENS)
        step.context, step.demand.num_reserved, step.demand.shard, step.stays_in_shard = 0, 0, -1, False
        if chain is None and checked:
            chain = HashChain.__new__(HashChain, 1, bytes(16))
        outcome = self.allocate_checked(&step, checked, chain, None, 0, new)
        if outcome != DONE and outcome != TOO_FEW:
            self.refuse(outcome, &step, checked, chain)
        return new if outcome == DONE else None

    cdef Outcome allocate_checked(
        self, Step *step, tuple hits, HashChain chain, PageIds tokens, int32_t num_shards, tuple new
    ) except *:
        """Allocate with the locks of the chain, which hashes `tokens` first, and of the store, divided into `num_shards` shards
        (0: as it is).
        """
        cdef Hits *array = list_hits(hits)
        cdef Outcome outcome
        if hits and array == NULL:
            return NO_MEMORY
        lock_chain(chain)
        try:
            if tokens is not None and not chain.extend_locked(tokens):
                return NO_MEMORY
            self.store.lock_divided(num_shards)
            step.demand.hits = array
            outcome = self.allocate_locked(step, chain, new)
            self.store.lock.release()
        finally:
            unlock_chain(chain)
            free(array)
        return outcome

    cdef Outcome allocate_locked(self, Step *step, HashChain chain, tuple new) noexcept:
        """Check everything, then change. `new` takes the new pages of each group; None if none can be needed."""
        cdef Pool *pool = &self.store.pool
        cdef Demand *demand = &step.demand
        cdef int32_t num_computed = <int32_t>min(step.num_computed, <int64_t>MAX_TOKENS)
        cdef bint is_rewound = step.num_computed < self.num_cached_tokens
        cdef bint is_past_skip = is_rewound or step.num_computed >= self.limits.num_skip
        cdef bint has_states = self.has_states_due(step.num_computed)
        cdef Contents contents = Contents(NULL, NULL, 0, step.context)
        cdef Py_ssize_t g, num_digests = 0
        cdef Outcome outcome
        if chain is not None:
            set_contents(&contents, chain)
            num_digests = chain.num
        outcome = self.check(step, &contents, num_digests, is_past_skip)
        if outcome != DONE:
            return outcome
        if not self.reserve(demand, new, has_states):
            return NO_MEMORY
        self.rewind(step.num_computed)
        for g in range(self.holding.num_groups if is_past_skip else 0):
            skip_pages(pool, &self.holding.groups[g], &self.holding.held[g], num_computed)
        if step.stays_in_shard:
            self.stay_in_shard(demand)
        if demand.num_new or demand.hits != NULL:
            outcome = self.take(demand, new)
            step.num_changes = count_changes(pool)
        if outcome == DONE and has_states:
            self.keep_states(step, &contents, <int64_t>num_digests * chain.page_size if chain is not None else 0, new)
        if outcome == DONE and step.num_to_cache and chain is not None:
            self.enter_full(&contents, num_digests, step.num_to_cache)
        self.plan()
        return outcome

    cdef Outcome check(self, Step *step, const Contents *contents, Py_ssize_t num_digests, bint is_past_skip) noexcept:
        """Whether a step can be tried: DONE, or what is wrong with it."""
        cdef Pool *pool = &self.store.pool
        if has_copies_due(pool, &self.holding):
            return COPIES_DUE
        if step.demand.hits != NULL and count_places(&self.holding):
            return NOT_EMPTY
        if not price(pool, &self.holding, &step.demand, contents.digests, num_digests):
            return WRONG_HIT
        if is_past_skip:
            step.wrong_page = find_lost_page(pool, &self.holding, <int32_t>min(step.num_computed, <int64_t>MAX_TOKENS))
            if step.wrong_page != NULL_PAGE:
                return LOST_PAGE
        if self.has_foreign_entry(step, contents, num_digests):
            return ENTERED_OTHERWISE
        step.wrong_page = find_held_free(pool, step.demand.num_taken)
        return DONE if step.wrong_page == NULL_PAGE else HELD_FREE

    cdef bint has_foreign_entry(self, Step *step, const Contents *contents, Py_ssize_t num_digests) noexcept:
        """Whether a page that is to be entered was entered under another hash. O(pages due)."""
        cdef const Group *group
        cdef const Held *held
        cdef int32_t num_computed = <int32_t>min(step.num_computed, <int64_t>MAX_TOKENS)
        cdef int64_t stop
        cdef Py_ssize_t g, i
        for g in range(self.holding.num_groups if num_digests else 0):
            group, held = &self.holding.groups[g], &self.holding.held[g]
            if group.id == NO_GROUP or is_state(&group.rules):
                continue
            stop = min(step.num_to_cache // group.rules.page_size, <int64_t>(num_digests // group.stride))
            for i in range(min(held.num_cached, full_entries(&group.rules, num_computed)), min(stop, <int64_t>held.num_pages)):
                if is_entered_otherwise(&self.store.pool, held.ids[i], contents.digests[(i + 1) * group.stride - 1], group.id):
                    step.wrong_page, step.wrong_at, step.wrong_num = held.ids[i], i, held.num_pages
                    return True
        return False

    cdef void stay_in_shard(self, Demand *demand) noexcept:
        """Take new pages from the shard of all pages, or hits, if they are in one, in place of the demanded one. O(pages)."""
        cdef Pool *pool = &self.store.pool
        cdef const int32_t *ids
        cdef int32_t shard = -1
        cdef Py_ssize_t g, i
        for g in range(self.holding.num_groups if pool.num_shards else 0):
            ids = self.holding.held[g].ids if demand.hits == NULL else demand.hits[g].ids
            for i in range(self.holding.held[g].num_pages if demand.hits == NULL else demand.hits[g].num):
                if ids[i] != NULL_PAGE and shard >= 0 and shard_of(pool, ids[i]) != shard:
                    return
                if ids[i] != NULL_PAGE:
                    shard = shard_of(pool, ids[i])
        if shard >= 0:
            demand.shard = shard

    cdef bint reserve(self, const Demand *demand, tuple new, bint has_states) noexcept:
        """Allocate room for hits, and for new pages here and in `new`, and for copies; False where memory is short."""
        cdef Held *held
        cdef Py_ssize_t g, num_copies = count_state_hits(&self.holding, demand.hits)
        cdef int64_t n, num_held
        for g in range(self.holding.num_groups if new is not None else 0):
            held = &self.holding.held[g]
            n = count_needed(&self.holding, demand, g)
            num_held = held.num_pages + count_attached(&self.holding, demand, g) + n
            if n > self.store.pool.num_pages:  # it will not fit
                continue
            if not reserve_ids(held, num_held):
                return False
            if not (<PageIds>new[g]).try_reserve(n + is_state(&self.holding.groups[g].rules)):
                return False
        return reserve_copies(&self.store.pool, num_copies + (self.holding.num_groups if has_states else 0))

    cdef Outcome take(self, Demand *demand, tuple new) noexcept:
        """Attach the hits of a checked demand and take its new pages, or change nothing. If only the shard has too few pages,
        the hits go to the back of the queue, as if they were used.
        """
        cdef Pool *pool = &self.store.pool
        cdef Held *held
        cdef Py_ssize_t g
        cdef int32_t n
        cdef Fit result = fit(pool, &self.holding, demand)
        for g in range(self.holding.num_groups if result == SHORT_IN_SHARD and demand.hits != NULL else 0):
            touch_all(pool, demand.hits[g].ids, demand.hits[g].num)
        for g in range(self.holding.num_groups if result == SHORT_IN_SHARD and demand.hits != NULL else 0):
            give_back(pool, demand.hits[g].ids, demand.hits[g].num, False)
        if result != FITS:
            return TOO_FEW
        attach(pool, &self.holding, demand)
        for g in range(self.holding.num_groups):
            held = &self.holding.held[g]
            n = held.num_pages if demand.num_adopted and is_state(&self.holding.groups[g].rules) else 0
            n += take_missing(pool, &self.holding.groups[g], held, demand.num_tokens, demand.shard)
            (<PageIds>new[g]).put(held.ids + held.num_pages - n, n)
        copy_states(pool, &self.holding, demand)
        self.plan()
        return DONE

    cdef void keep_states(self, const Step *step, const Contents *contents, int64_t num_hashed_tokens, tuple new) noexcept:
        """Keep the states that are due as checkpoints, if their tokens are known and hashed; then look at them no more, since
        the step writes the working pages.
        """
        cdef int32_t num_computed = <int32_t>min(step.num_computed, <int64_t>MAX_TOKENS)
        cdef bint is_known = num_computed <= step.num_to_cache and num_computed <= num_hashed_tokens
        cdef Py_ssize_t g
        for g in range(self.holding.num_groups):
            if keep_state(
                &self.store.pool, &self.holding, <int32_t>g, contents if is_known else NULL, num_computed, step.demand.shard,
                step.demand.num_reserved,
            ):
                (<PageIds>new[g]).put(self.holding.held[g].ids, 1)

    cdef void enter_full(self, const Contents *contents, Py_ssize_t num_digests, int64_t num_tokens) noexcept:
        """Enter the hashed pages that `num_tokens` tokens fill in the prefix index. A page that has an entry keeps it."""
        cdef Waiting waiting
        cdef const Group *group
        cdef int64_t num_hashed
        cdef Py_ssize_t g
        waiting.pool, waiting.num_to_hash, waiting.num_to_enter = &self.store.pool, 0, 0
        for g in range(self.holding.num_groups):
            group = &self.holding.groups[g]
            num_hashed = <int64_t>(num_digests // group.stride) * group.rules.page_size
            enter_full_pages(
                &waiting, group, &self.holding.held[g], contents, min(num_tokens, num_hashed, self.limits.num_room)
            )
        enter_waiting(&waiting)

    cdef bint make_room(self, const Holding *source) noexcept:
        """Allocate room for the pages that another request holds; False where memory is short."""
        cdef Py_ssize_t g
        for g in range(source.num_groups):
            if not reserve_ids(&self.holding.held[g], source.held[g].num_pages):
                return False
        return True

    cdef int32_t find_shard(self) noexcept:
        """The shard of the first page, if the pool is divided into shards, or -1."""
        cdef Py_ssize_t g, i
        for g in range(self.holding.num_groups if self.store.pool.num_shards else 0):
            for i in range(self.holding.held[g].num_pages):
                if self.holding.held[g].ids[i] != NULL_PAGE:
                    return shard_of(&self.store.pool, self.holding.held[g].ids[i])
        return -1

    def fork(self, RequestPages target not None, num_computed_tokens) -> bool:
        """Let `target`, which holds nothing, go on from the computed tokens of the request: full pages are shared, others
        copied, within the shard of the first page, if the pool is divided. False, and nothing changed, if too few pages are
        free. PageIdError for a page that cannot be shared. O(pages).
        """
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, self.limits.num_room)
        cdef Pool *pool = &self.store.pool
        cdef ForkOutcome outcome = SHORT_OF_MEMORY
        cdef Py_ssize_t g
        cdef bint is_past_pages
        if target is self or target.store is not self.store or target.groups is not self.groups or len(target):
            raise ArgumentError("target: got one of another pool or other groups, or that holds pages")
        with self.store.lock:
            is_past_pages = lacks_pages(&self.holding, <int32_t>num_computed)
            if not is_past_pages and target.make_room(&self.holding):
                outcome = check_fork(pool, &self.holding, <int32_t>num_computed, 1, self.find_shard())
            for g in range(self.holding.num_groups if outcome == FORKED else 0):
                fork_group(pool, &self.holding, &target.holding, <int32_t>g, <int32_t>num_computed, self.find_shard())
            self.plan()
            target.plan()
        if is_past_pages:
            raise ArgumentError(
                f"num_computed_tokens: got {num_computed}, allowed: as many as the request had, since pages that further "
                "tokens attend to were given back behind a window"
            )
        if outcome == SHORT_OF_MEMORY:
            raise MemoryError("the page ids of a request")
        if outcome == UNSHAREABLE:
            raise PageIdError(
                "a page of the request cannot have a further reference, or was given back, or a free page has one"
            )
        return outcome == FORKED

    def enter(self, HashChain chain not None, num_tokens, num_computed_tokens, context=0) -> None:
        """Enter the pages that `num_tokens` tokens fill in the prefix index, those with tokens from `num_computed_tokens` on
        again. A page that has an entry keeps it. PageHashError, and nothing changed, if a page was entered as something else.
        O(pages due).
        """
        cdef int64_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        self.enter_computed(chain, num, num_computed, False, False, context)

    def end_external(self, HashChain chain, num_tokens, bint is_failed, context=0) -> None:
        """Enter the pages that `num_tokens` tokens fill, some of which came from elsewhere, in the prefix index. Give back
        the pages that no later token attends to, and if it `is_failed` those wholly behind the tokens, the last first.

        PageHashError, and nothing changed, if a page was entered as something else. O(pages given back and entered).
        """
        cdef int64_t num = size_of(num_tokens, "num_tokens", 0, MAX_TOKENS)
        self.enter_computed(chain, num, INT64_MAX, True, is_failed, context)

    cdef int enter_computed(
        self, HashChain chain, int64_t num_tokens, int64_t num_computed, bint is_external, bint is_failed, object context
    ) except -1:
        """`end_external` if it `is_external`, else `enter`."""
        cdef Pool *pool = &self.store.pool
        cdef Step step
        cdef Contents contents = Contents(NULL, NULL, 0, self.store.checked_context(context))
        cdef Py_ssize_t num_digests = 0
        cdef bint is_right
        step.num_to_cache, step.num_computed = num_tokens, num_computed
        lock_chain(chain)
        self.store.lock.acquire()
        if chain is not None:
            set_contents(&contents, chain)
            num_digests = chain.num
        is_right = not self.has_foreign_entry(&step, &contents, num_digests)
        if is_right:
            self.rewind(num_computed)
            if is_external:
                skip_unread(pool, &self.holding, <int32_t>num_tokens)
            self.enter_full(&contents, num_digests, num_tokens)
            if is_failed:
                forget_uncomputed(pool, &self.holding, <int32_t>num_tokens, contents.digests, num_digests)
                put_back_behind(pool, &self.holding, <int32_t>num_tokens)
            self.plan()
        self.store.lock.release()
        unlock_chain(chain)
        if not is_right:
            self.refuse(ENTERED_OTHERWISE, &step, (), chain)
        return 0

    def require_copies_taken(self, bint may_be_read=False) -> None:
        """CopiesDueError while copies or transfers of the pages are due, except copies from them if they `may_be_read`."""
        cdef bint is_due
        with self.store.lock:
            is_due = awaits_copies(&self.store.pool, &self.holding)
            is_due = is_due or not may_be_read and has_copies_due(&self.store.pool, &self.holding)
        if is_due:
            self.refuse(COPIES_DUE, NULL, (), None)

    cdef void rewind(self, int64_t num_computed) noexcept:
        """Let pages be entered again whose tokens are computed again, if they have lost their entries: after a failed load, for
        example, for which `PagePool.evict_pages` dropped them.
        """
        cdef Py_ssize_t g
        for g in range(self.holding.num_groups if num_computed < self.num_cached_tokens else 0):
            recompute_from(&self.holding.groups[g], &self.holding.held[g], <int32_t>min(num_computed, <int64_t>MAX_TOKENS))

    cdef int refuse(self, Outcome outcome, const Step *step, tuple hits, HashChain chain) except -1:
        """Raise the error for a step that was not done."""
        if outcome == COPIES_DUE:
            raise CopiesDueError(
                "copies of pages of the request are due, or transfers: call take_copies, and with a host tier take_transfers, "
                "and do them, before"
            )
        if outcome == NOT_EMPTY:
            raise ArgumentError("hits: got some for a request that holds pages, allowed: none")
        if outcome == WRONG_HIT:
            self.refuse_hits(hits, chain)
        if outcome == LOST_PAGE:
            raise DoubleFreeError(f"page {step.wrong_page} is freed more often than it is held")
        if outcome == ENTERED_OTHERWISE:
            raise PageHashError(f"page {step.wrong_page} (at {step.wrong_at} of {step.wrong_num}) has a hash already")
        if outcome == HELD_FREE:
            self.store.check_untaken(step.wrong_page)
        raise MemoryError("the page ids of a request")

    cdef int refuse_hits(self, tuple hits, HashChain chain) except -1:
        """Raise what is wrong with the first wrong hit."""
        cdef const Group *group
        cdef PageIds ids
        cdef Py_ssize_t g, i = 0, flaw = 0, num_hits = sum([len(ids) for ids in hits])
        for g in range(len(hits)):
            ids, group = hits[g], &self.holding.groups[g]
            with chain.lock, self.store.lock:
                for i in range(ids.num):
                    flaw = STALE
                    if (i + 1) * group.stride <= chain.num:
                        flaw = count_free_hits(
                            &self.store.pool, group, &chain.digests[i * group.stride], ids.ids + i, 1, num_hits
                        )
                    if flaw < 0:
                        break
            if flaw < 0:
                break
        if flaw == UNTOUCHABLE:
            self.store.refuse_touch(ids.ids[i])
        page = f"page {ids[i]} (at {i} of group {group.id})" if flaw < 0 else "a page"  # which is right again by now
        raise PageHashError(f"{page} does not hold this prefix: look it up again, right before allocate_slots")

    def give_back(self, num_computed_tokens=None, HashChain chain=None, num_last_tokens=0, context=0) -> None:
        """Give back all pages, group by group, the last page first; nothing is held then. O(pages).

        States after `num_last_tokens` tokens become checkpoints, if they are due. Pages with tokens from `num_computed_tokens`
        on, which were not computed, lose the entries that they got under `chain`, except hits. DoubleFreeError, and nothing
        changed, if somebody else gave one of the pages back.
        """
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int64_t num_computed = MAX_TOKENS
        cdef int64_t num_last = size_of(num_last_tokens, "num_last_tokens", 0, MAX_TOKENS)
        cdef Contents contents = Contents(NULL, NULL, 0, self.store.checked_context(context))
        cdef Py_ssize_t bad = -1, num_digests = 0
        cdef bint has_room
        if num_computed_tokens is not None:
            num_computed = min(size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX), num_computed)
        lock_chain(chain)
        self.store.lock.acquire()
        has_room = ids.try_reserve(count_places(&self.holding))
        if has_room:
            ids.num = list_last_first(&self.holding, ids.ids)
            bad = self.store.give_back_ids(ids.ids, ids.num, False)
        if has_room and bad < 0:
            if chain is not None:
                num_digests = chain.num
                set_contents(&contents, chain)
                if num_last <= <int64_t>num_digests * chain.page_size and not awaits_copies(&self.store.pool, &self.holding):
                    enter_states(&self.store.pool, &self.holding, &contents, <int32_t>num_last)
            drop_copies(&self.store.pool, &self.holding)
            if num_computed_tokens is not None:
                forget_uncomputed(&self.store.pool, &self.holding, <int32_t>num_computed, contents.digests, num_digests)
            empty(&self.holding)
            self.plan()
        self.store.lock.release()
        unlock_chain(chain)
        if not has_room:
            raise MemoryError("the page ids of a request")
        if bad >= 0:
            self.store.refuse_give_back(ids, bad)

    def count_shared(self, group, num_holders) -> int:
        """Return how many leading pages of a group have at least `num_holders` references, besides those of pins, leases,
        copies and loads. 0 without caching, and unless it is full attention. O(pages of the answer).
        """
        cdef Py_ssize_t checked_group = size_of(group, "group", 0, self.holding.num_groups - 1)
        cdef Held *held = &self.holding.held[checked_group]
        cdef Py_ssize_t need = size_of(num_holders, "num_scheduled_requests")
        cdef int32_t i = 0
        cdef Pool *pool = &self.store.pool
        if not hits_leading_pages(&self.groups.groups[checked_group]):
            return 0
        with self.store.lock:
            while i < held.num_pages and self.store.count_holders(held.ids[i]) - count_moves(pool, held.ids[i]) >= need:
                i += 1
        return i

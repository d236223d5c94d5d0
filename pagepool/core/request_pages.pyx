"""What requests hold, and how they come to hold it: by the rules of `pagepool.core.holdings`, as running rows do."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawRealloc as realloc
from libc.stdint cimport INT64_MAX

from pagepool.core.arguments cimport as_list, as_shard, group_of, size_of
from pagepool.core.checkpoints cimport adopt_state, enter_states
from pagepool.core.copies cimport awaits_copies, count_moves, drop_copies, has_copies_due, note_copy, reserve_copies
from pagepool.core.entering cimport Contents, Waiting, enter_full_pages, enter_waiting
from pagepool.core.holdings cimport (
    STALE, UNTOUCHABLE, Held, attach_hits, count_free_hits, count_missing, count_places, empty,
    find_load_number, find_lost_page, forget_uncomputed, limits_of, list_last_first, note_loads, note_taken, recompute_from,
    skip_pages, take_missing,
)
from pagepool.core.ids cimport PageIds
from pagepool.core.index cimport is_entered_otherwise
from pagepool.core.lookups cimport FoundIds
from pagepool.core.pages cimport give_back, note_request
from pagepool.core.platform cimport GIL_DISABLED
from pagepool.core.queue cimport count_free_in, find_held_free
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Range, ids_in_shard, is_free, shard_of
from pagepool.core.rules cimport MAX_TOKENS, first_useful_page, is_state, pages_for

from pagepool.errors import ArgumentError, ArgumentTypeError, DoubleFreeError, PageHashError

cdef int64_t MOST_PAGES = INT64_MAX >> 1


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


@cython.final
@cython.auto_pickle(False)
cdef class PageRules:
    """Which pages a request needs in one cache group.

    `page_size` tokens share a page; None is a state, one page for any number of tokens. With a `window` a token attends to that
    many tokens, including itself; with a `chunk` to those of its chunk. Pages that no later token attends to are skipped. Hits
    have a multiple of `hit_tokens` tokens, or with 0 any number: see `is_needed_by_hits`. A state is kept at multiples of
    `interval` tokens; 0: never.
    """

    def __cinit__(self, page_size, window=0, chunk=0, hit_tokens=0, interval=0):
        self.rules.page_size = MAX_TOKENS if page_size is None else <int32_t>size_of(page_size, "page_size", 1, MAX_TOKENS)
        self.rules.window = <int32_t>min(size_of(window, "sliding_window", 0, INT64_MAX), MAX_TOKENS)
        self.rules.chunk = <int32_t>min(size_of(chunk, "attention_chunk_size", 0, INT64_MAX), MAX_TOKENS)
        self.rules.hit_tokens = <int32_t>size_of(hit_tokens, "hit_tokens", 0, MAX_TOKENS)
        self.rules.entry_size = <int32_t>size_of(interval, "checkpoint_interval", 0, MAX_TOKENS) or self.rules.page_size

    def count_pages(self, num_tokens) -> int:
        """Return the places that tokens take, including those of skipped pages."""
        return pages_for(&self.rules, size_of(num_tokens, "num_tokens", 0, INT64_MAX - MAX_TOKENS))

    def find_first_useful_page(self, num_computed_tokens) -> int:
        """Return the first page that tokens from `num_computed_tokens` on attend to."""
        cdef int64_t num_computed = min(size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX), MAX_TOKENS)
        return first_useful_page(&self.rules, <int32_t>num_computed, 0)


@cython.final
@cython.auto_pickle(False)
cdef class CacheGroups:
    """The cache groups of a model.

    `groups` are ``(PageRules, id, hashes of a page)``, with the id in the prefix index, or None where pages are not cached.
    """

    def __cinit__(self, groups):
        cdef PageRules rules
        cdef tuple items = tuple(as_list(groups, "groups"))
        self.groups = <Group *>calloc(max(1, len(items)), sizeof(Group))
        if self.groups == NULL:
            raise MemoryError("cache groups")
        for rules, group_id, stride in items:
            if rules is None:
                raise ArgumentTypeError("groups: got None, allowed: PageRules")
            self.groups[self.num] = Group(
                rules.rules,
                NO_GROUP if group_id is None else group_of(group_id),
                <int32_t>size_of(stride, "stride", 1, MAX_TOKENS),
            )
            self.num += 1

    def __dealloc__(self):
        free(self.groups)

    def __len__(self):
        return self.num


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


cdef tuple by_group(object hits, const Holding *holding):
    """`hits` as `PageIds` for each group, or none at all."""
    cdef tuple checked = tuple(as_list(hits, "hits"))
    if checked and len(checked) != holding.num_groups:
        raise ArgumentError(f"hits: got {len(checked)} groups, allowed: {holding.num_groups}")
    for ids in checked:
        if not isinstance(ids, PageIds):
            raise ArgumentTypeError(f"hits: got {type(ids).__name__}, allowed: PageIds")
    return checked


cdef tuple checked_hits(PageStore store, object hits, const Holding *holding):
    """`hits` as page ids of the pool for each group, null pages first, or none at all. O(hits)."""
    cdef tuple checked = by_group(hits, holding)
    cdef Py_ssize_t bad
    for ids in checked:
        store.checked(ids)
        bad = find_late_null((<PageIds>ids).ids, (<PageIds>ids).num)
        if bad >= 0:
            raise ArgumentError(f"hits: got the null page (at {bad} of {len(ids)}) behind others, allowed: before them")
    return checked


cdef Py_ssize_t count_all_free_hits(
    const Pool *pool, const Holding *holding, tuple hits, HashChain chain, const Digest *digests, Py_ssize_t num_digests
) noexcept:
    """How many hits, looked up with `chain`, are in the free queue; negative if one of them cannot be taken."""
    cdef const Group *group
    cdef PageIds ids
    cdef Py_ssize_t g, num_free, num_hits = 0, num_all = 0
    cdef bint is_known
    for ids in hits:
        num_hits += ids.num
    for g in range(len(hits)):
        ids = hits[g]
        group = &holding.groups[g]
        is_known = isinstance(ids, FoundIds) and (<FoundIds>ids).is_known(chain, group, pool)
        if ids.num * group.stride > num_digests:
            return STALE
        num_free = count_free_hits(pool, group, NULL if is_known else digests, ids.ids, ids.num, num_hits)
        if num_free < 0:
            return num_free
        num_all += num_free
    return num_all


cdef int32_t count_hit_pages(const Group *group, PageIds hits) noexcept:
    """Pages of a group that are attached as hits: not the checkpoint of a state."""
    return 0 if is_state(&group.rules) else <int32_t>hits.num


cdef Py_ssize_t count_state_hits(const Holding *holding, tuple hits) noexcept:
    cdef Py_ssize_t g, count = 0
    for g in range(len(hits)):
        count += is_state(&holding.groups[g].rules) and (<PageIds>hits[g]).num > 0
    return count


cdef Py_ssize_t count_adoptable(const Pool *pool, const Holding *holding, tuple hits) noexcept:
    """How many checkpoints are hit, if all of them are free pages; else 0."""
    cdef PageIds ids
    cdef Py_ssize_t g, count = 0
    for g in range(len(hits)):
        ids = hits[g]
        if is_state(&holding.groups[g].rules) and ids.num:
            if not is_free(pool, ids.ids[ids.num - 1]):
                return 0
            count += 1
    return count


cdef Py_ssize_t count_outside(const Pool *pool, tuple hits, int32_t shard) noexcept:
    """How many hits are free pages of other shards than this."""
    cdef Range inside = ids_in_shard(pool, shard)
    cdef PageIds ids
    cdef Py_ssize_t i, count = 0
    for ids in hits if shard >= 0 else ():
        for i in range(ids.num):
            if ids.ids[i] != NULL_PAGE and is_free(pool, ids.ids[i]):
                count += not inside.start <= ids.ids[i] < inside.stop
    return count


cdef int64_t count_needed(const Holding *holding, tuple hits, int64_t num_tokens) noexcept:
    """New pages that `num_tokens` tokens need behind the hits; at most `MOST_PAGES`."""
    cdef Py_ssize_t g
    cdef int64_t num_pages, count = 0
    for g in range(holding.num_groups):
        num_pages = holding.held[g].num_pages + (count_hit_pages(&holding.groups[g], hits[g]) if hits else 0)
        count += min(count_missing(&holding.groups[g], num_pages, num_tokens), MOST_PAGES - count)
    return count


cdef int64_t capacity_for(int64_t num_pages) noexcept:
    """Ids for which there is room where `num_pages` are held: a power of 2, or none."""
    cdef int64_t capacity = 4 if num_pages else 0
    while capacity < num_pages:
        capacity *= 2
    return capacity


cdef void attach_all(Pool *pool, const Holding *holding, tuple hits, bint adopts) noexcept:
    """Attach hits. Checkpoints are adopted as working pages, or get a reference for `copy_states`."""
    cdef PageIds ids
    cdef Py_ssize_t g
    cdef int64_t number = 0
    for g in range(len(hits)):
        ids = hits[g]
        number = max(number, find_load_number(pool, ids.ids, ids.num))
        if not adopts or not is_state(&holding.groups[g].rules):
            attach_hits(pool, &holding.groups[g], &holding.held[g], ids.ids, <int32_t>ids.num)
    note_loads(pool, holding, number)


cdef void adopt_states(Pool *pool, const Holding *holding, tuple hits) noexcept:
    """Make the checkpoints that are hit working pages."""
    cdef PageIds ids
    cdef Py_ssize_t g
    for g in range(len(hits)):
        ids = hits[g]
        if is_state(&holding.groups[g].rules) and ids.num:
            adopt_state(pool, &holding.held[g], ids.ids, <int32_t>ids.num)
            note_taken(pool, &holding.held[g])


cdef void copy_states(Pool *pool, const Holding *holding, tuple hits) noexcept:
    """Note copies of the checkpoints that are hit, and referred to, into the working pages."""
    cdef PageIds ids
    cdef Py_ssize_t g
    for g in range(len(hits)):
        ids = hits[g]
        if is_state(&holding.groups[g].rules) and ids.num:
            note_copy(pool, ids.ids[ids.num - 1], &holding.held[g], 0, <int32_t>g)


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

    def needs_nothing(self, num_computed_tokens, num_tokens, num_slots) -> bool:
        """Return whether slots for `num_slots` tokens are there, no page gets full by `num_tokens` tokens, and none is to be
        skipped or entered again with `num_computed_tokens`. False for values that are not ints of 64 bits. O(1).
        """
        cdef int64_t num_computed, num_full, num_room
        cdef bint is_enough
        try:
            num_computed, num_full, num_room = num_computed_tokens, num_tokens, num_slots
        except (OverflowError, TypeError, ValueError):
            return False
        if GIL_DISABLED:
            self.store.lock.acquire()
        is_enough = num_room <= self.limits.num_room and num_full < self.limits.num_full
        is_enough = is_enough and self.num_cached_tokens <= num_computed < self.limits.num_skip
        if GIL_DISABLED:
            self.store.lock.release()
        return is_enough

    def is_due(self, num_tokens, num_computed_tokens) -> bool:
        """Return whether pages get full by `num_tokens` tokens, or may have to be entered again. O(1)."""
        cdef int64_t num_full = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        return num_full >= self.limits.num_full or num_computed < self.num_cached_tokens

    def get_page_ids(self) -> tuple:
        """Return the ids of each group's pages, with the null page for skipped ones. O(pages)."""
        cdef tuple copies = tuple([PageIds.__new__(PageIds) for _ in range(self.holding.num_groups)])
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

    def rewind(self, num_computed_tokens) -> None:
        """Let `enter` look again at pages whose tokens are computed again: after a failed load, for example, for which
        `PagePool.evict_pages` dropped their entries.
        """
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        cdef Py_ssize_t g
        with self.store.lock:
            if num_computed < self.num_cached_tokens:
                for g in range(self.holding.num_groups):
                    recompute_from(
                        &self.holding.groups[g], &self.holding.held[g], <int32_t>min(num_computed, <int64_t>MAX_TOKENS)
                    )
                self.plan()

    def check_enterable(self, HashChain chain not None, num_tokens, hits=()) -> bool:
        """Return whether `enter` will have anything to do for `num_tokens` tokens once `hits` are attached. PageHashError if a
        page was entered as something else. O(pages due).
        """
        cdef tuple checked = by_group(hits, &self.holding)
        cdef const Group *group
        cdef const Held *held
        cdef int64_t num_full, num_entered, num_wanted = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef int32_t bad = NULL_PAGE
        cdef Py_ssize_t g, i, bad_at = 0, num_pages = 0
        cdef bint is_due = False
        with chain.lock, self.store.lock:
            for g in range(self.holding.num_groups):
                group, held = &self.holding.groups[g], &self.holding.held[g]
                num_full = num_wanted // group.rules.page_size
                num_entered = max(held.num_cached, (<PageIds>checked[g]).num if checked else 0)
                if group.id == NO_GROUP or is_state(&group.rules) or num_full <= num_entered:
                    continue
                is_due = True
                for i in range(held.num_cached, min(num_full, held.num_pages, chain.num // group.stride)):
                    if bad == NULL_PAGE and is_entered_otherwise(
                        &self.store.pool, held.ids[i], chain.digests[(i + 1) * group.stride - 1], group.id
                    ):
                        bad, bad_at, num_pages = held.ids[i], i, held.num_pages
        if bad != NULL_PAGE:
            raise PageHashError(f"page {bad} (at {bad_at} of {num_pages}) has a hash already")
        return is_due

    def enter(self, HashChain chain not None, num_tokens, context=0) -> None:
        """Enter the pages that `num_tokens` tokens fill in the prefix index, with a context of `EntryJournal.add_context`. A
        page that has an entry keeps it. O(pages due).
        """
        cdef int64_t num_hashed, num_full = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef const Group *group
        cdef int32_t checked_context = self.store.checked_context(context)
        cdef Contents contents = Contents(NULL, NULL, 0, checked_context)
        cdef Waiting waiting
        cdef Py_ssize_t g
        waiting.pool, waiting.num_to_hash, waiting.num_to_enter = &self.store.pool, 0, 0
        with chain.lock, self.store.lock:
            set_contents(&contents, chain)
            for g in range(self.holding.num_groups):
                group = &self.holding.groups[g]
                num_hashed = <int64_t>(chain.num // group.stride) * group.rules.page_size
                enter_full_pages(
                    &waiting, group, &self.holding.held[g], &contents, min(num_full, num_hashed, self.limits.num_room)
                )
            enter_waiting(&waiting)
            self.plan()

    cdef bint make_room(self, const Holding *source) noexcept:
        """Allocate room for the pages that another request holds; False where memory is short."""
        cdef Py_ssize_t g
        cdef int32_t *ids
        for g in range(source.num_groups):
            ids = <int32_t *>realloc(self.holding.held[g].ids, capacity_for(source.held[g].num_pages) * sizeof(int32_t))
            if ids == NULL and source.held[g].num_pages:
                return False
            self.holding.held[g].ids = ids
        return True

    cdef int32_t find_shard(self) noexcept:
        """The shard of the first page, if the pool is divided into shards, or -1."""
        cdef Py_ssize_t g, i
        for g in range(self.holding.num_groups if self.store.pool.num_shards else 0):
            for i in range(self.holding.held[g].num_pages):
                if self.holding.held[g].ids[i] != NULL_PAGE:
                    return shard_of(&self.store.pool, self.holding.held[g].ids[i])
        return -1

    def skip(self, num_computed_tokens) -> None:
        """Give back the pages that no token from `num_computed_tokens` on attends to. The null page takes their places.

        DoubleFreeError, and nothing changed, if somebody else gave one of them back.
        """
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
        cdef int32_t lost = NULL_PAGE, num = <int32_t>min(num_computed, <int64_t>MAX_TOKENS)
        cdef Py_ssize_t g
        with self.store.lock:
            if num_computed >= self.limits.num_skip:
                lost = find_lost_page(&self.store.pool, &self.holding, num)
                for g in range(self.holding.num_groups if lost == NULL_PAGE else 0):
                    skip_pages(&self.store.pool, &self.holding.groups[g], &self.holding.held[g], num)
                self.plan()
        if lost != NULL_PAGE:
            raise DoubleFreeError(f"page {lost} is freed more often than it is held")

    def count_needed(self, num_tokens, hits=()) -> int:
        """Return how many new pages `num_tokens` tokens need behind the hits, or those that are held."""
        cdef tuple checked = by_group(hits, &self.holding)
        cdef int64_t count, num_wanted = size_of(num_tokens, "num_tokens", 0, INT64_MAX - MAX_TOKENS)
        with self.store.lock:
            count = count_needed(&self.holding, checked, num_wanted)
        return count

    def take(self, num_tokens, hits=(), HashChain chain=None, shard=None, num_shards=0, num_reserved=0) -> tuple | None:
        """Take a reference to hits, found under `chain`, which become the first pages, and the new pages that `num_tokens`
        tokens need. Return the new pages of each group.

        None, and nothing changed, if the pool has too few free pages beside `num_reserved`; None, too, if only the shard has,
        and the hits count as used just now. PageHashError for a hit that has another content by now, ArgumentError for hits
        of a request that holds pages. O(pages).
        """
        cdef tuple checked = checked_hits(self.store, hits, &self.holding)
        cdef int64_t num_wanted = size_of(num_tokens, "num_tokens", 0, INT64_MAX - MAX_TOKENS)
        cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
        cdef int32_t checked_shard = as_shard(shard, divided)
        cdef Demand demand = Demand(num_wanted, size_of(num_reserved, "num_reserved_pages"), checked_shard, NULL_PAGE)
        cdef Outcome outcome
        cdef tuple new = tuple([PageIds.__new__(PageIds) for _ in range(self.holding.num_groups)])
        if chain is None and checked:
            chain = HashChain.__new__(HashChain, 1, bytes(16))
        lock_chain(chain)
        try:
            self.store.lock_divided(divided)
            outcome = self.take_locked(checked, chain, new, &demand)
            self.store.lock.release()
        finally:
            unlock_chain(chain)
        if outcome == WRONG_HIT:
            self.refuse_hits(checked, chain)
        if outcome == NOT_EMPTY:
            raise ArgumentError("hits: got some for a request that holds pages, allowed: none")
        if outcome == NO_MEMORY:
            raise MemoryError("the page ids of a request")
        self.store.check_untaken(demand.held_free)
        return new if outcome == DONE else None

    cdef Outcome take_locked(self, tuple hits, HashChain chain, tuple new, Demand *demand) noexcept:
        """Take all or nothing. The locks of the store, and of the chain of hits, are held."""
        cdef Pool *pool = &self.store.pool
        cdef Held *held
        cdef Py_ssize_t g, num_free_hits = 0, num_before = count_places(&self.holding)
        cdef int32_t n
        cdef int64_t num_needed, num_inside, num_new = count_needed(&self.holding, hits, demand.num_tokens)
        cdef Py_ssize_t num_adopted = 0
        if hits and num_before:
            return NOT_EMPTY
        if hits:
            num_free_hits = count_all_free_hits(pool, &self.holding, hits, chain, chain.digests, chain.num)
        if num_free_hits < 0:
            return WRONG_HIT
        num_needed = num_new + num_free_hits
        num_inside = num_needed - count_outside(pool, hits, demand.shard)
        if num_needed + demand.num_reserved > pool.num_free or num_inside > count_free_in(pool, demand.shard):
            num_adopted = count_adoptable(pool, &self.holding, hits)
            if num_inside - num_adopted > count_free_in(pool, demand.shard):
                num_adopted = 0
        if num_needed and num_needed - num_adopted + demand.num_reserved > pool.num_free:
            return SHORT
        demand.held_free = find_held_free(pool, num_needed)
        if demand.held_free != NULL_PAGE:
            return HELD_FREE
        if not self.reserve(hits, new, demand.num_tokens):
            return NO_MEMORY
        attach_all(pool, &self.holding, hits, num_adopted)
        if num_new > count_free_in(pool, demand.shard) and not num_adopted:
            for g in range(len(hits)):
                give_back(pool, (<PageIds>hits[g]).ids, (<PageIds>hits[g]).num, False)
            if hits:
                empty(&self.holding)
            return SHORT
        if num_before == 0:
            note_request(pool)
        if num_adopted:
            adopt_states(pool, &self.holding, hits)
        for g in range(self.holding.num_groups):
            held = &self.holding.held[g]
            n = held.num_pages if num_adopted and is_state(&self.holding.groups[g].rules) else 0
            n += take_missing(pool, &self.holding.groups[g], held, demand.num_tokens, demand.shard)
            (<PageIds>new[g]).put(held.ids + held.num_pages - n, n)
        if not num_adopted:
            copy_states(pool, &self.holding, hits)
        self.plan()
        return DONE

    cdef bint reserve(self, tuple hits, tuple new, int64_t num_tokens) noexcept:
        """Allocate room for hits, and for new pages here and in `new`; False where memory is short."""
        cdef Held *held
        cdef int32_t *ids
        cdef Py_ssize_t g
        cdef int64_t n, num_held
        for g in range(self.holding.num_groups):
            held = &self.holding.held[g]
            num_held = held.num_pages + (count_hit_pages(&self.holding.groups[g], hits[g]) if hits else 0)
            n = count_missing(&self.holding.groups[g], num_held, num_tokens)
            if capacity_for(num_held + n) > capacity_for(held.num_pages):
                ids = <int32_t *>realloc(held.ids, capacity_for(num_held + n) * sizeof(int32_t))
                if ids == NULL:
                    return False
                held.ids = ids
            if not (<PageIds>new[g]).try_reserve(n):
                return False
        return reserve_copies(&self.store.pool, count_state_hits(&self.holding, hits))

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
        cdef const Digest *digests = NULL
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
                digests, num_digests = chain.digests, chain.num
                set_contents(&contents, chain)
                if num_last <= <int64_t>num_digests * chain.page_size and not awaits_copies(&self.store.pool, &self.holding):
                    enter_states(&self.store.pool, &self.holding, &contents, <int32_t>num_last)
            drop_copies(&self.store.pool, &self.holding)
            if num_computed_tokens is not None:
                forget_uncomputed(&self.store.pool, &self.holding, <int32_t>num_computed, digests, num_digests)
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
        copies and loads. O(pages of the answer).
        """
        cdef Held *held = &self.holding.held[size_of(group, "group", 0, self.holding.num_groups - 1)]
        cdef Py_ssize_t need = size_of(num_holders, "num_scheduled_requests")
        cdef int32_t i = 0
        cdef Pool *pool = &self.store.pool
        with self.store.lock:
            while i < held.num_pages and self.store.count_holders(held.ids[i]) - count_moves(pool, held.ids[i]) >= need:
                i += 1
        return i

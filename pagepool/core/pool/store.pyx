"""One pool: its records, its free queue and its prefix index."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport INT32_MAX, INT64_MAX, uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from pagepool.core.base cimport (
    GIL_DISABLED, MAX_GROUP, MAX_PAGES, WideDigest, copy_bytes, go_on, let_others_run, process_number, require_allocated,
    reserve_items, resize,
)
from pagepool.core.pool.leases cimport *
from pagepool.core.pool.parts cimport *
from pagepool.core.values cimport (
    as_list, as_shard, float_of, group_of, index_of, int_of_wide, lists_of, page_id_of, size_of, wide_of_int,
)

import os

from pagepool.arguments import require_flag, require_name
from pagepool.errors import (
    ArgumentError, ArgumentTypeError, DoubleFreeError, IntegrityError, OutOfPagesError, PageHashError, PageIdError,
    RequestTooLargeError, made_twice, shown,
)
from pagepool.hashing import HashNames, PageHash, PageHashWithGroupId, checked_hash

cdef enum:
    SAMPLE_SHIFT = 7          # in large pools every 128th page is sampled

cdef Counters NO_COUNTS       # all zeros
COUNTERS = tuple(<dict>NO_COUNTS)

cdef double MAX_SECONDS = 2.0 ** 27  # 4 years

EVICTION_POLICIES = ("lru", "adaptive")


cdef str checked_policy(object name):
    """Return the name of a policy as a str. ArgumentError for an unknown name, ArgumentTypeError for another type."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"eviction: got {type(name).__name__}, allowed: a string")
    policy = str.__str__(name)  # a subclass may equal anything
    if policy not in EVICTION_POLICIES:
        raise ArgumentError(f"eviction: got {shown(policy)}, allowed: {', '.join(map(repr, EVICTION_POLICIES))}")
    return policy


cdef tuple histogram_of(const Histogram *histogram):
    cdef Py_ssize_t i
    return [histogram.counts[i] for i in range(NUM_BUCKETS)], histogram.sum


cdef Py_ssize_t count_remembered(const Pool *pool, Py_ssize_t num_shards) noexcept nogil:
    """Count the `Links` that hold `shard_newest`, two ids each."""
    return num_shards * NUM_PARTS // 2 if pool.policy != NULL else 0


cdef Links *new_shard_links(const Pool *pool, Py_ssize_t num_shards) noexcept:
    """Allocate the links of shards; NULL if memory is short."""
    cdef Py_ssize_t num_twins = pool.num_pages if pool.slots != NULL else 0
    cdef Py_ssize_t num_links = count_queue_links(pool, num_shards) + pool.num_banks * num_shards
    num_links += count_remembered(pool, num_shards)
    assert num_shards > 0
    return <Links *>calloc(num_links + 2 * num_twins, sizeof(Links))


cdef void use_shard_links(Pool *pool, Links *links, int32_t num_shards) noexcept:
    """Divide a locked pool into shards with these links. O(num_pages + pages of equal content x shards)."""
    cdef Links *newest = links + count_queue_links(pool, num_shards) + pool.num_banks * num_shards
    cdef int32_t bank
    assert links != NULL and num_shards > 0
    free(pool.shard_links)
    pool.shard_links = links
    pool.shard_num_free = <int32_t *>(newest - pool.num_banks * num_shards)
    pool.shard_newest = <int32_t *>newest
    pool.shard_twins = newest + count_remembered(pool, num_shards) if pool.slots != NULL else <Links *>NULL
    pool.shard_firsts = pool.shard_twins + pool.num_pages
    pool.num_shards, pool.is_divided = num_shards, True
    for bank in range(pool.num_banks):
        pool.banks[bank].pages_per_shard = (count_pages_in(pool, queue_of_bank(bank)) + 1) // num_shards
    link_shards(pool)
    link_shard_twins(pool)


cdef object short_of_pages(Py_ssize_t num, Py_ssize_t num_free, str where=""):
    """Return the error for pages that are not free."""
    return OutOfPagesError(f"pages: got {num} asked for, {num_free} free{where}, allowed: at most the free ones")


cdef object hashed_page(str page):
    """Return the error for a hash of a page that has one."""
    return PageHashError(f"{page}, which has a hash already: got another one, allowed: none")


cdef object overdrawn_page(str page):
    """Return the error for a page that is freed more often than it is held."""
    return DoubleFreeError(f"{page}: got more frees than references, allowed: one for each")


cdef inline int32_t record_of(PageStore store, object page) except -1:
    """Return the page id of a view; PageIdError for one of another pool."""
    if type(page) is not CachePage:
        raise ArgumentTypeError(f"pages: got {type(page).__name__}, allowed: CachePage")
    if (<CachePage>page).store is not store:
        raise PageIdError(f"page {(<CachePage>page).page_id}: got one that belongs to another pool, allowed: this pool's")
    return (<CachePage>page).index


cdef Py_ssize_t find_outside(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Find the index of an id outside the pool, or -1."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0, last = pool.num_pages - 1
    for i in range(n if GUARDS else 0):  # no early exit, so that it vectorises
        signs |= ids[i] | <int32_t>(<uint32_t>last - <uint32_t>ids[i])
    if signs < 0:
        for i in range(n):
            if not 0 <= ids[i] <= last:
                return i
    return -1


cdef bint add_records(PageStore store, Py_ssize_t num_pages) noexcept:
    """Add records up to `num_pages`, neither free nor cached; False if memory is short. Amortised O(1) a record."""
    cdef Py_ssize_t i, capacity = max(num_pages, 2 * store.capacity)
    if num_pages > store.capacity:
        if not resize(<void **>&store.pool.pages, capacity * sizeof(Page)):
            return False
        store.capacity = capacity
    for i in range(store.pool.num_pages, num_pages):
        store.pool.pages[i] = Page(key_lo=0, key_hi=0, ref_cnt=0, prev_free=NOT_FREE, next_free=NOT_FREE, group=NO_GROUP)
    if store.pool.num_pages == 0:
        store.pool.pages[NULL_PAGE] = Page(
            key_lo=0, key_hi=0, ref_cnt=0, prev_free=NULL_PAGE, next_free=NULL_PAGE, group=NO_GROUP,
        )
    store.pool.num_pages = <int32_t>num_pages
    store.pool.banks[store.pool.num_banks - 1].stop = <int32_t>num_pages
    assert is_free(&store.pool, NULL_PAGE) and store.pool.pages[NULL_PAGE].group == NO_GROUP
    return True


cdef int make_queue(PageStore store) except -1:
    """Make the empty queues, with the parts of the policy. Allocate room for all other parts, so that records never move."""
    cdef Pool *pool = &store.pool
    cdef size_t num_records
    assert pool.num_free == 0 and pool.num_parts == 0
    if store.enable_caching and store.eviction != "lru":
        pool.policy = make_policy(pool.banks[0].stop)
        if pool.policy == NULL:
            raise MemoryError(f"the eviction policy of {pool.banks[0].stop} pages")
        pool.num_ranked = pool.banks[0].stop
        pool.num_parts, pool.num_parts_each, pool.is_divided = NUM_PARTS, NUM_PARTS, True
    num_records = <size_t>pool.num_pages + MAX_BANKS
    if store.enable_caching:  # otherwise all pages are worth the same, and nothing divides a queue
        num_records += pool.num_banks * MAX_TENANTS * (count_plain_parts(pool) + NEVER)
    if not resize(<void **>&pool.pages, num_records * sizeof(Page)):
        raise MemoryError(f"{pool.num_pages} page records")
    begin_queues(pool)
    return 0


cdef int32_t add_banks(Pool *pool, Py_ssize_t num_pages, object further_banks) except -1:
    """Set the banks of a pool without records: one of `num_pages` pages with the null page, and further ones of these sizes.
    Return the number of all pages.
    """
    cdef list sizes = as_list(further_banks, "further_banks")
    cdef int64_t stop = num_pages
    cdef Py_ssize_t bank
    if len(sizes) >= MAX_BANKS:
        raise ArgumentError(f"further_banks: got {len(sizes)}, allowed: {MAX_BANKS - 1}")
    pool.banks[0].start, pool.banks[0].stop = 1, <int32_t>num_pages
    for bank in range(1, 1 + len(sizes)):
        pool.banks[bank].start = <int32_t>stop
        stop = size_of(stop + size_of(sizes[bank - 1], "further_banks"), "num_pages of all pools")
        pool.banks[bank].stop = <int32_t>stop
    pool.num_banks, pool.is_divided = 1 + <int32_t>len(sizes), len(sizes) > 0
    return <int32_t>stop


cdef bint make_index(Pool *pool) noexcept:
    """Make an empty prefix index; False if memory is short."""
    cdef uint32_t num_slot_bits = 2
    while <Py_ssize_t>1 << num_slot_bits < 2 * <Py_ssize_t>pool.num_pages:
        num_slot_bits += 1
    pool.slots = <Slot *>calloc(<size_t>1 << num_slot_bits, sizeof(Slot))
    pool.mask, pool.home_shift = (<uint32_t>1 << num_slot_bits) - 1, 32 - num_slot_bits
    assert <Py_ssize_t>pool.mask + 1 >= 2 * <Py_ssize_t>pool.num_pages
    return pool.slots != NULL and resize(<void **>&pool.twins, pool.num_pages * sizeof(Links))


cdef int sample_residency(Pool *pool) except -1:
    """Sample every 128th page, and more of a small pool. Stays begin now for pages already in use."""
    cdef Residency *residency
    cdef Py_ssize_t i, num_stays
    cdef int32_t shift = SAMPLE_SHIFT
    cdef int64_t now = monotonic_ns()
    assert pool.residency == NULL
    while shift and pool.num_pages >> (shift + SAMPLE_SHIFT) == 0:
        shift -= 1
    num_stays = (pool.num_pages >> shift) + 1
    residency = pool.residency = <Residency *>calloc(1, sizeof(Residency) + num_stays * sizeof(Stay))
    if residency == NULL:
        raise MemoryError("the residency of pages")
    residency.shift = shift
    residency.stays = <Stay *>(residency + 1)
    for i in range(num_stays):
        residency.stays[i] = Stay(start=now, last_use=now)
    pool.sample_mask = (1 << shift) - 1
    return 0


cdef void overwrite_count(Pool *pool, int32_t page_id, int32_t count) noexcept:
    cdef Page *page = &pool.pages[page_id]
    assert 0 < page_id < pool.num_pages and count >= 0
    if is_free(pool, page_id):
        pool.num_held_free += (count != 0) - (page.ref_cnt != 0)
    page.ref_cnt = count
    assert pool.num_held_free >= 0


cdef bint change_ref_count(PageStore store, int32_t page_id, int32_t change) except -1:
    """Add `change` to a ref count; False, with nothing changed, if the count would leave its range."""
    cdef Pool *pool = &store.pool
    cdef bint is_right
    with store.own_lock()[0]:
        is_right = pool.pages[page_id].ref_cnt + <int64_t>change < INT32_MAX
        is_right = is_right and pool.pages[page_id].ref_cnt + change >= 0
        if is_right and page_id != NULL_PAGE:
            overwrite_count(pool, page_id, pool.pages[page_id].ref_cnt + change)
    return is_right


cdef Py_ssize_t find_cached(Pool *pool, const int32_t *ids, Range span) noexcept:
    """Return the index of the first page in ``ids[span]`` that has an entry or is repeated; -1 if there is none. Null pages may
    repeat.
    """
    cdef Py_ssize_t i, bad = -1
    for i in range(span.start, span.stop):
        if ids[i] == NULL_PAGE:
            continue
        if pool.pages[ids[i]].group != NO_GROUP:
            bad = i
            break
        pool.pages[ids[i]].group = MAX_GROUP  # until all are checked: a page that is repeated looks cached
    for i in range(span.start, span.stop if bad < 0 else bad):
        if ids[i] != NULL_PAGE:
            pool.pages[ids[i]].group = NO_GROUP
    return bad


cdef Entry entry_of(HashChain chain, Py_ssize_t at, int32_t group, Origin first) noexcept:
    """Return the entry of a page of a locked chain, with its tokens where the chain has them. The first page of the request
    has this place and context.
    """
    cdef bint has_tokens = chain.token_ids is not None and chain.count_tokens(at + 1) <= chain.token_ids.num
    cdef Entry entry = bare_entry(&chain.digests[at], group)
    entry.place, entry.context = first.place + <int32_t>at, first.context
    entry.parent = chain.digests + at - 1 if at else NULL
    if chain.uppers != NULL:
        entry.upper = chain.uppers + at
        entry.parent_upper = chain.uppers + at - 1 if at else NULL
    if has_tokens:
        entry.token_ids = chain.token_ids.ids + at * chain.page_size
        entry.num_tokens = <int32_t>chain.count_tokens(1)
    return entry


cdef tuple token_ids_of(PageStore store, int32_t page_id):
    cdef PageIds ids = PageIds.__new__(PageIds)
    cdef const int32_t *tokens
    cdef bint has_room = True
    if store.pool.page_tokens == NULL:
        return ()
    with store.own_lock()[0]:
        tokens = store.pool.page_tokens + page_id * store.pool.tokens_width
        assert 0 <= tokens[0] < store.pool.tokens_width
        has_room = ids.try_reserve(tokens[0])
        if has_room:
            ids.put(tokens + 1, tokens[0])
    if not has_room:
        raise MemoryError("the token ids of a page")
    return tuple(ids.to_list())


@cython.auto_pickle(False)
cdef class PageStore:
    """The records of one pool, its free queue and its prefix index. Users call `pagepool.PagePool`.

    Methods take and return page ids. Making a store is O(num_pages). Memory for each page: 32 bytes of record, and with caching
    8 of twin links and 16 to 32 of index slots; 24 more after the first data-parallel hint (8 without caching); 6 more after
    the first expectation, or once shares are set; 16 more for digests of 32 bytes, 48 with events.
    """

    def __cinit__(
        self, num_pages, bint enable_caching=True, bint is_pool=True, eviction="lru", further_banks=(), bank_names=("kv",)
    ):
        cdef int32_t page_id, num_records
        self.process = process_number
        require_allocated(&self.lock)
        self.views, self.leases = {}, {}
        self.is_pool = is_pool
        self.enable_caching = enable_caching and is_pool
        self.names = HashNames()
        self.pool.multiplier = int.from_bytes(os.urandom(8), "little") | 1
        self.pool.sample_mask = -1
        self.pool.lost_interval, self.pool.list_number = LOST_INTERVAL, 1
        num_records = add_banks(&self.pool, size_of(num_pages, "num_pages", 1), further_banks)
        if not add_records(self, num_records) or (self.enable_caching and not make_index(&self.pool)):
            raise MemoryError(f"{num_records} page records")
        if is_pool:
            sample_residency(&self.pool)
        self.eviction = checked_policy(eviction)
        self.name_banks(bank_names)
        if self.enable_caching or self.pool.num_banks > 1:
            make_queue(self)
        for page_id in range(1, self.pool.num_pages):
            push(&self.pool, page_id)

    def __dealloc__(self):
        cdef Py_ssize_t bank
        if self.process != process_number:  # another thread may have been changing it
            return
        free(self.pool.pages)
        for bank in range(MAX_BANKS):
            free(self.pool.banks[bank].ghost.memory)
        free(self.pool.slots)
        free(self.pool.twins)
        free(self.pool.shard_links)
        free(self.pool.page_tokens)
        free(self.pool.uppers)
        free(self.pool.journal.notes)
        free(self.pool.journal.contexts)
        free(self.pool.residency)
        free_policy(self.pool.policy)
        free(self.pool.leases.counts)
        free(self.pool.sessions.links)
        free(self.pool.sessions.items)
        free(self.pool.expected.stamps)
        free(self.pool.dependents.state_groups)
        free(self.pool.copies.items)
        Py_XDECREF(self.tier)

    def __reduce__(self):
        raise ArgumentTypeError("a page store cannot be pickled")

    # Memory.

    cdef bint make_terms(self, PageIds terms) noexcept:
        """Divide the queue by terms, unless all of these are UNKNOWN; False if memory is short."""
        cdef int32_t all_terms = UNKNOWN
        cdef Py_ssize_t i
        for i in range(terms.num):
            all_terms |= terms.ids[i]
        return all_terms == UNKNOWN or self.divide(True, False)

    def put_blank_first(self) -> None:
        """Hand out pages without an entry first from now on, as with a policy. O(num_pages)."""
        cdef bint has_room
        with self.own_lock()[0]:
            has_room = self.divide(False, False)
            self.has_blank_first |= has_room
        if not has_room:
            raise MemoryError(f"links of {self.pool.num_pages} pages in {self.pool.num_shards} shards")

    def prefer_held(self) -> None:
        """Let look-ups find a held page from now on, if any page with the content is held. O(num_pages), once."""
        with self.own_lock()[0]:
            if self.pool.slots != NULL:
                prefer_held(&self.pool)

    def remember_evicted(self, bank) -> None:
        """Remember the keys of pages evicted from a bank from now on, of the last ones twice as many as it has pages. So
        look-ups count the hits lost with these pages. 16 bytes a page. O(pages of the bank), once.
        """
        cdef Bank *kept = &self.pool.banks[self.checked_bank(bank)]
        cdef Ghost ghost
        cdef bint has_room = kept.ghost.entries != NULL or make_ghost(&ghost, 2.0 * (kept.stop - kept.start))
        with self.own_lock()[0]:
            if has_room and kept.ghost.entries == NULL:
                kept.ghost = ghost
        if not has_room:
            raise MemoryError(f"the evicted keys of {kept.stop - kept.start} pages")

    def search_all_lost(self) -> None:
        """Let each look-up search for checkpoints behind its hits, so that the hits lost for want of pages are exact."""
        with self.own_lock()[0]:
            self.pool.lost_interval = 1

    def drop_dependents(self, group, state_groups) -> None:
        """Uncache the free checkpoints of these groups of states, if there is a policy, as the page with the keys and values of
        `group` before them is evicted.
        """
        cdef int32_t checked = group_of(group)
        cdef PageIds groups = PageIds([group_of(number) for number in as_list(state_groups, "state_groups")])
        cdef bint has_room
        with self.own_lock()[0]:
            has_room = resize(<void **>&self.pool.dependents.state_groups, max(1, groups.num) * sizeof(int32_t))
            if has_room:
                copy_bytes(self.pool.dependents.state_groups, groups.ids, groups.num * sizeof(int32_t))
                self.pool.dependents.group, self.pool.dependents.num = checked, <int32_t>groups.num
        if not has_room:
            raise MemoryError(f"{groups.num} groups")

    cdef bint divide(self, bint by_terms, bint by_tenants) noexcept:
        """Divide the queue of the locked pool by entries, and optionally by terms and tenants; tenants need terms. Do nothing
        if it is divided so already, or nothing is cached. False, with nothing changed, if memory is short.
        """
        cdef Pool *pool = &self.pool
        cdef Pool divided = self.pool
        cdef Links *links = NULL
        cdef uint32_t *stamps = pool.expected.stamps
        cdef bint by_entry = pool.num_parts == 0
        by_terms = by_terms and stamps == NULL
        by_tenants = by_tenants and pool.tenants.of_pages == NULL
        assert not by_tenants or by_terms or stamps != NULL
        if not self.enable_caching or not (by_entry or by_terms or by_tenants):
            return True
        divided.num_parts = count_plain_parts(pool) + (NEVER if by_terms or stamps != NULL else 0)
        divided.num_parts *= MAX_TENANTS if by_tenants else 1
        if pool.num_shards:
            links = new_shard_links(&divided, pool.num_shards)
        if by_terms and (links != NULL or not pool.num_shards):
            stamps = <uint32_t *>calloc(pool.num_pages, sizeof(uint32_t) + 2 * sizeof(uint8_t))
        if (stamps == NULL and by_terms) or (links == NULL and pool.num_shards):
            free(links)
            return False
        if by_entry:
            begin_plain_parts(pool)
        if by_terms:
            begin_terms(pool, stamps)
        if by_tenants:
            begin_tenants(pool)
        if pool.num_shards:
            use_shard_links(pool, links, pool.num_shards)
        assert pool.num_parts == divided.num_parts
        return True

    cdef bint pad_terms(self, PageIds terms, int32_t term, Py_ssize_t n) noexcept:
        """Append a term to a list up to length `n`, if pages of the locked pool can have terms. False if memory is short."""
        if self.pool.expected.terms != NULL and not terms.try_reserve(n - terms.num):
            return False
        while terms.num < n and self.pool.expected.terms != NULL:
            terms.put(&term, 1)
        return True

    cdef bint make_leases(self) noexcept:
        """Allocate the counts of leases once; False if memory is short."""
        if self.pool.leases.counts == NULL:
            self.pool.leases.counts = <int32_t *>calloc(self.pool.num_pages, sizeof(int32_t))
        return self.pool.leases.counts != NULL

    # Figures.

    cdef int32_t read(self, const int32_t *value) except? -1:
        """Read a value of the pool. Reads are never torn: only a build without the GIL needs the lock."""
        cdef int32_t copied
        self.require_own()
        if GIL_DISABLED:
            self.lock.acquire()
        copied = value[0]
        if GIL_DISABLED:
            self.lock.release()
        return copied

    cdef Page record(self, int32_t page_id) except *:
        """Copy the record of a page between two calls."""
        cdef Page page
        with self.own_lock()[0]:
            assert 0 <= page_id < self.pool.num_pages
            page = self.pool.pages[page_id]
        return page

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def has_tier(self) -> bool:
        """Whether there is a host tier behind the pool."""
        return self.pool.tier != NULL

    @property
    def num_free_pages(self) -> int:
        return self.read(&self.pool.num_free)

    @property
    def num_keys(self) -> int:
        """Count the distinct (hash, group) pairs in the prefix index."""
        return self.read(&self.pool.num_keys)

    @property
    def num_cached_pages(self) -> int:
        """Count the pages with a prefix entry."""
        return self.read(&self.pool.num_entries)

    @property
    def num_leased_pages(self) -> list:
        """Count the pages of leases with an end, once for each lease, by bank."""
        cdef Leases leases
        cdef Py_ssize_t i
        with self.own_lock()[0]:
            leases = self.pool.leases
        return [leases.num_pages_in[i] for i in range(self.pool.num_banks)]

    @property
    def num_sessions(self) -> int:
        """Count the sessions that have pages, rows or requests."""
        return self.read(&self.pool.sessions.num_live)

    @property
    def expectations(self) -> tuple:
        """Return the numbers of free pages by term, from no term to `NEVER`, and the `Outcomes` by name.
        """
        cdef Expectations copied
        with self.own_lock()[0]:
            copied = self.pool.expected
        return list(copied.num_free), copied.outcomes

    def set_time(self, seconds) -> None:
        """Stop the clock of expectations and leases at a time, for tests and replays. ArgumentError for a time before the last
        one, after the first expectation.
        """
        cdef double time = float_of(seconds, "seconds")
        cdef bint is_past
        if not 1 <= time < MAX_SECONDS:
            raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: 1 to {MAX_SECONDS}")
        with self.own_lock()[0]:
            is_past = self.pool.expected.terms != NULL and time * SECOND < now_of(&self.pool.expected)
            if not is_past:
                self.pool.expected.fixed_time = <int64_t>(time * SECOND)
        if is_past:
            raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: the last time, or a later one")

    @property
    def num_kept_token_ids(self) -> int:
        """Return how many tokens are kept for a page at most; 0 means none."""
        return max(0, self.pool.tokens_width - 1)

    @property
    def residency(self) -> tuple:
        """Return lifetimes, idle times before eviction and gaps between uses of sampled pages: for each, counts of times below
        1 ms, 2, 4, ..., 2**22 ms, and longer, and the sum in ns. O(1).
        """
        cdef Residency copied
        if self.pool.residency == NULL:
            return ()
        with self.own_lock()[0]:
            copied = self.pool.residency[0]
        return histogram_of(&copied.lifetimes), histogram_of(&copied.idle_times), histogram_of(&copied.reuse_gaps)

    @property
    def counters(self) -> dict:
        """Return the `Counters` by name."""
        cdef Counters counters
        with self.own_lock()[0]:
            counters = self.pool.counters
        return counters

    @property
    def estimated_hits(self) -> tuple | None:
        """Return how many pages were hit since the store was made, and the adaptive policy's estimate for LRU; None for other
        policies.
        """
        cdef int64_t num_shared, num_free, num_lru
        if self.pool.policy == NULL:
            return None
        with self.own_lock()[0]:
            num_shared, num_free = self.pool.policy.num_shared_hits, self.pool.policy.num_free_hits
            num_lru = self.pool.policy.num_lru_hits
        return num_shared + num_free, num_shared + num_lru

    # Arguments.

    cdef int32_t checked_id(self, object page_id) except -1:
        cdef int32_t checked = page_id_of(page_id)
        self.check_range(checked)
        return checked

    cdef PageIds checked(self, object page_ids):
        """Return `page_ids` as ids within the pool, which do not change."""
        cdef PageIds ids = page_ids if isinstance(page_ids, PageIds) else PageIds(page_ids)
        cdef Py_ssize_t bad = find_outside(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            self.check_range(ids.ids[bad])
        return ids

    cdef int32_t checked_bank(self, object bank) except -1:
        return <int32_t>size_of(bank, "bank", 0, self.pool.num_banks - 1)

    def name_banks(self, names) -> None:
        """Name the pools of the store in errors and refusals."""
        cdef tuple checked = tuple([require_name("pool", name) for name in as_list(names, "names")])
        if len(checked) != self.pool.num_banks:
            raise ArgumentError(f"names: got {len(checked)}, allowed: {self.pool.num_banks}")
        self.bank_names = checked

    def count_pages(self, bank) -> int:
        """Count the pages of a bank without the null page."""
        return count_pages_in(&self.pool, queue_of_bank(self.checked_bank(bank)))

    def count_entries(self, bank) -> tuple:
        """Count the cached pages of a bank, and what `PoolStats` has of it: the pages that were ever handed out and evicted
        there, tokens of lost hits, refusals, and checkpoints that found no page.
        """
        cdef int32_t checked = self.checked_bank(bank)
        cdef Bank counted
        with self.own_lock()[0]:
            counted = counted_bank(&self.pool, checked)
        return (
            counted.num_entries, counted.num_allocated_pages, counted.num_evicted_pages, counted.num_lost_hit_tokens,
            counted.num_refusals, counted.num_passed_checkpoints,
        )

    def count_free(self, bank) -> int:
        """Count the free pages of a bank."""
        cdef int32_t queue = queue_of_bank(self.checked_bank(bank)), count
        with self.own_lock()[0]:
            count = count_free_in(&self.pool, queue)
        return count

    def ids_in_banks(self, PageIds page_ids not None) -> PageIds:
        """Return the ids of pages in their banks. O(n) with several banks, else O(1)."""
        cdef PageIds ids = page_ids
        cdef Py_ssize_t i
        if self.pool.num_banks > 1:
            ids = PageIds.__new__(PageIds)
            ids.add(page_ids.ids, page_ids.num)
            for i in range(ids.num):
                ids.ids[i] = id_in_bank(&self.pool, ids.ids[i])
        return ids

    cpdef tuple lists_in_banks(self, tuple groups):
        """Return the ids of pages in their banks, a list for each group."""
        return lists_of(groups if self.pool.num_banks == 1 else tuple([self.ids_in_banks(ids) for ids in groups]))

    def page_in_bank(self, page_id, bank) -> CachePage:
        """Return the view of the page with this id in a bank. PageIdError for an id outside the bank."""
        return self.page(page_id if self.pool.num_banks == 1 else self.records_in_bank([page_id], bank)[0])

    def bounds_of(self, bank) -> tuple:
        """Return the first page of a bank and the one behind its last, which is None in a store of one bank, for look-ups."""
        cdef Bank *pages = &self.pool.banks[self.checked_bank(bank)]
        return (0, None) if self.pool.num_banks == 1 else (pages.start, pages.stop)

    def records_in_bank(self, page_ids, bank) -> PageIds:
        """Return the pages with these ids in a bank. PageIdError for an id outside the bank. O(n) with several banks."""
        cdef int32_t checked = self.checked_bank(bank)
        cdef int32_t first = self.pool.banks[checked].start - 1, size = self.pool.banks[checked].stop - first
        cdef PageIds ids = page_ids if isinstance(page_ids, PageIds) else PageIds(page_ids)
        cdef PageIds records = PageIds.__new__(PageIds)
        cdef Py_ssize_t i
        if self.pool.num_banks == 1:
            return ids
        records.add(ids.ids, ids.num)
        for i in range(records.num):
            if not 0 <= records.ids[i] < size:
                raise PageIdError(
                    f"page id: got {records.ids[i]}, allowed in the pool {self.bank_names[checked]!r}: 0 to {size - 1}"
                )
            if records.ids[i] != NULL_PAGE:
                records.ids[i] += first
        return records

    cdef int check_range(self, int32_t page_id) except -1:
        if not 0 <= page_id < self.pool.num_pages:
            raise PageIdError(f"page id: got {page_id}, allowed: 0 to {self.pool.num_pages - 1}")
        return 0

    cdef Range range_of(self, first_id, stop_id) except *:
        """Return a half-open range of page ids; `stop_id` None means the end of the pool."""
        cdef Py_ssize_t stop = self.pool.num_pages if stop_id is None else size_of(stop_id, "stop")
        return Range(start=<int32_t>size_of(first_id, "start"), stop=<int32_t>stop)

    cdef int check_caching(self) except -1:
        """Raise PageHashError without prefix caching."""
        if not self.enable_caching:
            raise PageHashError("page hash: got one without prefix caching, allowed: none")
        return 0

    cdef int check_fixed(self) except -1:
        """Raise ArgumentError for the store of a queue: it grows, and arrays beside its records do not."""
        if not self.is_pool:
            raise ArgumentError(
                "store: got that of a queue, which has no shards, token ids and journal, allowed: that of a pool"
            )
        return 0

    def require_even(self, data_parallel_size) -> None:
        """Raise ArgumentError for less than one shard, and in a store of several banks unless the number divides all sizes."""
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t i, n
        if data_parallel_size is None:
            return
        n = size_of(data_parallel_size, "data_parallel_size", 1, INT64_MAX)
        if pool.num_banks == 1:
            return
        sizes = {name: count_pages_in(pool, queue_of_bank(<int32_t>i)) + 1 for i, name in enumerate(self.bank_names)}
        if any([size % n for size in sizes.values()]):
            allowed = f"a divisor of each size of {sizes}"
            raise ArgumentError(f"data_parallel_size: got {n}, allowed with several pools: {allowed}")

    def require_one_bank(self, what) -> None:
        """Raise ArgumentError in a store of several banks, which `what` does not support."""
        if self.pool.num_banks > 1:
            raise ArgumentError(f"{what}: got several pools ({', '.join(self.bank_names)}), allowed: one pool")

    cdef int32_t checked_context(self, object context) except -1:
        """Return a context as a valid number."""
        cdef Py_ssize_t checked = size_of(context, "context")
        cdef int32_t num_contexts = max(1, self.read(&self.pool.journal.num_contexts)) if checked else 1
        if checked >= num_contexts:
            raise ArgumentError(f"context: got {context}, allowed: 0 to {num_contexts - 1}")
        return <int32_t>checked

    cdef int32_t checked_session(self, object session) except -1:
        """Return a session as a valid number."""
        return <int32_t>size_of(session, "session", 0, max(1, self.read(&self.pool.sessions.num)) - 1)

    cdef int32_t add_session(self, bint has_pages) except -1:
        """Return the number of a new session without pages and holders. The caller sets its main session. Pages get it as owner
        only if it `has_pages`.
        """
        cdef Sessions *sessions = &self.pool.sessions
        cdef Py_ssize_t number = 0, n = self.pool.num_pages
        cdef bint has_room
        with self.own_lock()[0]:
            if sessions.links == NULL and has_pages:
                sessions.links = <Links *>calloc(n, sizeof(Links) + sizeof(int32_t))
                sessions.owners = <int32_t *>(sessions.links + n) if sessions.links != NULL else <int32_t *>NULL
            has_room = (sessions.links != NULL or not has_pages) and reserve_items(
                <void **>&sessions.items, &sessions.capacity, max(<Py_ssize_t>2, sessions.num + 1), sizeof(Session)
            )
            if has_room and sessions.num == 0:
                sessions.items[NO_SESSION] = Session(
                    first=NULL_PAGE, num_pages=0, num_closed=0, num_holders=0, main=NO_SESSION, tenant=COMMON,
                )
                sessions.num = 1
            if has_room:
                number = sessions.num
                sessions.items[number] = Session(
                    first=NULL_PAGE, num_pages=0, num_closed=0, num_holders=0, main=NO_SESSION, tenant=COMMON,
                )
                sessions.num += 1
                assert sessions.items[NO_SESSION].main == NO_SESSION and sessions.items[NO_SESSION].num_pages == 0
        if not has_room:
            raise MemoryError(f"sessions of {n} pages")
        return <int32_t>number

    # Ref counts.

    cdef int32_t count_holders(self, int32_t page_id) noexcept:
        """Count the references to a page except those of leases."""
        return self.pool.pages[page_id].ref_cnt - (self.pool.leases.counts[page_id] if is_leased(&self.pool, page_id) else 0)

    def ref_counts(self, bank=0):
        """Return the ref counts of the null page and all pages of a bank, an int32 array. O(pages of the bank)."""
        cdef PageIds counts = PageIds.__new__(PageIds)
        cdef Bank pages = self.pool.banks[self.checked_bank(bank)]  # a copy: the store of a queue may grow
        cdef Py_ssize_t i
        counts.reserve(1 + pages.stop - pages.start)
        with self.own_lock()[0]:
            counts.put(&self.pool.pages[NULL_PAGE].ref_cnt, 1)
            for i in range(pages.start, pages.stop):
                counts.put(&self.pool.pages[i].ref_cnt, 1)
        return counts.to_array()

    def set_ref_count(self, page_id, ref_cnt) -> None:
        """Overwrite a ref count, except the null page's. `check` and the next `take` report a free page with references."""
        cdef Py_ssize_t count = size_of(ref_cnt, "ref_cnt", 0, INT32_MAX - 1)
        cdef int32_t checked = self.checked_id(page_id)
        if checked != NULL_PAGE:
            with self.own_lock()[0]:
                overwrite_count(&self.pool, checked, <int32_t>count)

    def touch(self, page_ids) -> None:
        """Add a reference to each page; free pages leave the queue. Null pages are ignored. O(n)."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t i, bad
        with self.own_lock()[0]:
            bad = find_untouchable(&self.pool, ids.ids, ids.num, ids.num)
            if bad < 0:
                hit(&self.pool, ids.ids, ids.num, NOBODY)
                for i in range(ids.num):
                    assert ids.ids[i] == NULL_PAGE or not is_free(&self.pool, ids.ids[i]) or self.pool.num_held_free
        if bad >= 0:
            self.refuse_touch(ids.ids[bad])

    cdef int refuse_touch(self, int32_t page_id) except -1:
        cdef int32_t ref_cnt = self.record(page_id).ref_cnt
        allowed = f"fewer than {INT32_MAX}" if ref_cnt else "at least 1 outside the free queue"
        raise PageIdError(f"{self.shown_page(page_id)}: got ref count {ref_cnt}, allowed for a touch: {allowed}")

    # Pages taken, and given back.

    def take(self, n, shard=None, num_shards=0, bank=0) -> PageIds:
        """Take `n` pages from the front of a bank's queue, or of a shard. They get ref count 1 and lose their prefix entries.
        O(n).
        """
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t i, num = size_of(n, "num_pages")
        cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
        cdef int32_t checked_bank = self.checked_bank(bank), checked_shard = as_shard(shard, divided)
        cdef int32_t queue, num_free, bad = NULL_PAGE
        cdef void *thread
        ids.reserve(min(num, self.pool.num_pages))
        self.lock_divided(divided)
        queue = queue_in(&self.pool, checked_bank, checked_shard)
        num_free = count_free_in(&self.pool, queue)
        if num <= num_free:
            bad = find_held_free(&self.pool, num)
            if bad == NULL_PAGE:
                thread = let_others_run(num)
                take(&self.pool, ids.ids, num, queue, NO_SESSION)
                count_request(&self.pool)
                go_on(thread)
                ids.num = num
                for i in range(num):
                    assert self.pool.pages[ids.ids[i]].ref_cnt == 1 and self.pool.pages[ids.ids[i]].group == NO_GROUP
                    assert not is_free(&self.pool, ids.ids[i])
        self.lock.release()
        if num > num_free:
            where = "" if queue < 0 else f" in shard {checked_shard}"
            raise short_of_pages(num, num_free, where)
        self.check_untaken(bad)
        return ids

    cdef str shown_queue(self, int32_t queue):
        """Name a pool or shard in an error."""
        cdef int32_t bank = bank_of_queue(&self.pool, queue)
        if queue >= 0:
            return "its shard" if self.pool.num_banks == 1 else f"its shard of the pool {self.bank_names[bank]!r}"
        return "the pool" if self.pool.num_banks == 1 else f"the pool {self.bank_names[bank]!r}"

    cdef str shown_page(self, int32_t page_id):
        """Name a page in an error."""
        cdef int32_t bank = bank_of(&self.pool, page_id)
        where = "" if self.pool.num_banks == 1 else f" of the pool {self.bank_names[bank]!r}"
        return f"page {id_in_bank(&self.pool, page_id)}{where}"

    cdef int refuse_size(self, str what, int64_t num_pages, int32_t queue) except -1:
        """Raise the error for a request or row larger than a shard or bank, given by its queue."""
        raise RequestTooLargeError(
            f"{what} needs {num_pages:,} pages at once, {self.shown_queue(queue)} has "
            f"{count_pages_in(&self.pool, queue):,}: no waiting helps, fewer tokens a step may "
            "(see CacheManager.require_capacity)"
        )

    cdef int check_untaken(self, int32_t bad) except -1:
        """Raise IntegrityError for a free page with references; the null page means there is none."""
        if bad != NULL_PAGE:
            ref_cnt = self.pool.pages[bad].ref_cnt
            raise IntegrityError(f"{self.shown_page(bad)} is in the free queue with ref count {ref_cnt}, allowed: 0")
        return 0

    def give_back(self, page_ids, bint tail_first=False) -> None:
        """Take a reference from each page; pages without any go to the back of the queue in order. Null pages are ignored.
        """
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.own_lock()[0]:
            bad = self.give_back_ids(ids.ids, ids.num, tail_first)
        if bad >= 0:
            self.refuse_give_back(ids, bad)

    cdef Py_ssize_t give_back_ids(self, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept:
        """Give back ids within the pool. Return -1, or the index of a page without references, with nothing changed."""
        cdef void *thread = let_others_run(n)
        cdef Py_ssize_t bad = give_back_all(&self.pool, ids, n, tail_first)
        go_on(thread)
        return bad

    cdef Py_ssize_t give_back_row(self, PageIds ids, Py_ssize_t num_staying, const int32_t *terms=NULL) noexcept:
        """Give back ids within the pool. Pages from `num_staying` on lose their entry with their last reference; others get the
        terms at the same indices.
        """
        cdef void *thread = let_others_run(ids.num)
        cdef Py_ssize_t bad = give_back_and_uncache(&self.pool, ids.ids, num_staying, ids.num, terms)
        go_on(thread)
        return bad

    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1:
        raise overdrawn_page(f"{self.shown_page(ids[bad])} (at {bad} of {len(ids)})")

    # The free queue.

    def is_free(self, page_id) -> bool:
        """Whether the page is in the free queue."""
        cdef int32_t checked = self.checked_id(page_id)
        return checked != NULL_PAGE and self.read(&self.pool.pages[checked].prev_free) != NOT_FREE

    def free_ids(self, bank=0) -> PageIds:
        """Return the free queue of a bank, front first; with a policy, part by part. O(pages of the bank)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t queue = queue_of_bank(self.checked_bank(bank)), page_id, num_free
        cdef bint has_room
        with self.own_lock()[0]:
            page_id, num_free = end_of_queue(&self.pool, queue), count_free_in(&self.pool, queue)
            has_room = ids.try_reserve(num_free)
            while has_room and ids.num < num_free:
                page_id = page_behind(&self.pool, page_id, queue)
                assert is_page(&self.pool, page_id) and (self.pool.pages[page_id].ref_cnt == 0 or self.pool.num_held_free)
                ids.put(&page_id, 1)
        if not has_room:
            raise MemoryError("the ids of free pages")
        return ids

    def neighbours(self, page_id) -> tuple:
        """Return the pages before and after a page in the free queue; None at the ends and outside the queue."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef int32_t before = NULL_PAGE, behind = NULL_PAGE, queue
        with self.own_lock()[0]:
            if checked != NULL_PAGE and is_free(&self.pool, checked):
                queue = queue_of(&self.pool, checked)
                before, behind = page_before(&self.pool, checked), page_behind(&self.pool, checked, queue)
        return tuple([self.view(each) if is_page(&self.pool, each) else None for each in (before, behind)])

    def pop(self, n) -> PageIds:
        """Take the first `n` pages out of the queue without changes to ref counts and prefix entries."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num = size_of(n, "n")
        cdef int32_t num_free
        cdef bint has_room
        cdef Supply supply
        with self.own_lock()[0]:
            num_free = count_free_in(&self.pool, -1)
            has_room = num > num_free or ids.try_reserve(num)  # under the lock, because a queue may grow
            supply = begin_supply(&self.pool, COMMON)
            while has_room and num <= num_free and ids.num < num:
                ids.ids[ids.num] = pick(&self.pool, -1, &supply)
                reuse(&self.pool, ids.ids[ids.num])
                assert not is_free(&self.pool, ids.ids[ids.num])
                ids.num += 1
        if num > num_free:
            raise short_of_pages(num, num_free)
        if not has_room:
            raise MemoryError(f"{num} page ids")
        return ids

    def remove_page(self, page) -> None:
        """Take a page out of the queue, wherever it stands. PageIdError for a page of another pool. O(1)."""
        cdef int32_t page_id = record_of(self, page)
        cdef bint was_free
        with self.own_lock()[0]:
            was_free = page_id != NULL_PAGE and is_free(&self.pool, page_id)
            if was_free:
                reuse(&self.pool, page_id)
                assert not is_free(&self.pool, page_id)
        if not was_free:
            raise PageIdError(f"page {page.page_id}: got one that is not in the free queue, allowed: one that is")

    def append(self, page_ids) -> None:
        """Append pages to the queue in order. PageIdError for pages that are in it, or held."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.own_lock()[0]:
            bad = push_all(&self.pool, ids.ids, ids.num)
            assert bad >= 0 or ids.num == 0 or is_free(&self.pool, ids.ids[0])
        if bad >= 0:
            raise PageIdError(
                f"page {self.page(ids[bad]).page_id}: got one in the free queue, a held one, or the null page, allowed: others"
            )

    def adopt(self, CachePage page not None) -> None:
        """Move the record of a page without a pool into this store: `page` becomes its view. Amortised O(1)."""
        cdef PageStore home = page.store
        cdef int32_t index = page.index
        cdef Page record
        cdef bint has_room
        if home is self:
            return
        if page.is_null:
            raise PageIdError(f"page {page.page_id}: got a null page, allowed: others")
        if home.is_pool or self.is_pool or home.is_free(index):
            raise PageIdError(f"page {page.page_id}: got one that belongs to another pool or queue, allowed: others")
        record = home.record(index)
        with self.own_lock()[0]:
            has_room = add_records(self, self.pool.num_pages + <Py_ssize_t>1)
            if has_room:
                index = self.pool.num_pages - 1
                self.pool.pages[index].ref_cnt = record.ref_cnt
        if not has_room:
            raise MemoryError(f"{self.pool.num_pages + 1} page records")
        del home.views[page.index]
        with cython.critical_section(page):
            page.store, page.index = self, index
        self.views[index] = page

    # Shards.

    cdef int lock_divided(self, int32_t num_shards) except -1:
        """Lock the pool once it is divided into `num_shards`; 0 accepts any. Other callers may divide it again before the lock
        is taken, so this repeats. Pages of expired leases are given back.
        """
        self.own_lock()[0].acquire()
        while num_shards and self.pool.num_shards != num_shards:
            self.lock.release()
            self.set_shards(num_shards)
            self.lock.acquire()
        end_leases(&self.pool)
        assert num_shards == 0 or self.pool.num_shards == num_shards
        return 0

    def set_shards(self, num_shards) -> None:
        """Divide the pool into `num_shards` equal ranges of ids, each with a free queue and its first pages of equal content.
        O(num_pages + pages of equal content x shards) when the number changes.
        """
        cdef Pool *pool = &self.pool
        cdef int32_t n = <int32_t>size_of(num_shards, "data_parallel_size", 1, pool.num_pages)
        cdef Links *links
        if n == self.read(&pool.num_shards):
            return
        self.check_fixed()
        self.require_even(n)
        if pool.num_banks == 1 and pool.num_pages % n:
            raise ArgumentError(f"data_parallel_size: got {n}, allowed: a divisor of the {pool.num_pages} pages")
        with self.own_lock()[0]:
            links = new_shard_links(pool, n)
            if links != NULL:
                use_shard_links(pool, links, n)
                if pool.policy != NULL and pool.policy.learned.decision.shard >= 0:
                    pool.policy.learned.decision.part = BLANK  # that shard is another one now
        if links == NULL:
            raise MemoryError(f"links of {pool.num_pages} pages in {n} shards")

    # The prefix index.

    def find(self, key, group, start=0, stop=None):
        """Return the page cached first under an int key and a group, among ids in ``[start, stop)``, or None. A key has 128
        bits; in a store that keeps whole digests it is one of these, or its lower half.
        """
        cdef WideDigest digest = wide_of_int(key, self.pool.uppers != NULL)
        cdef Digest upper
        cdef Range ids = self.range_of(start, stop)
        cdef int32_t page_id = NULL_PAGE
        cdef int32_t checked_group = group_of(group)
        if self.enable_caching:
            with self.own_lock()[0]:
                page_id = find_within(&self.pool, digest.key, checked_group, ids)
                upper = upper_of(&self.pool, page_id)
                if digest.upper.lo | digest.upper.hi and memcmp(&digest.upper, &upper, sizeof(Digest)) != 0:
                    page_id = NULL_PAGE
                assert page_id == NULL_PAGE or ids.start <= page_id < ids.stop
                assert page_id == NULL_PAGE or self.pool.pages[page_id].group & ~FLAGS == checked_group
        return None if page_id == NULL_PAGE else page_id

    def find_pages(self, key, groups, start=0, stop=None):
        """Return the views of the pages found under a key in each group; None if a group has none."""
        pages = []
        for group in as_list(groups, "groups"):
            page_id = self.find(key, group, start, stop)
            if page_id is None:
                return None
            pages.append(self.view(page_id))
        return pages

    def twins(self, page_id) -> PageIds:
        """Return the pages with the content of a cached page, in the order they were cached, starting with this page."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t first = self.checked_id(page_id)
        cdef int32_t twin = first
        cdef bint has_room, has_twins
        with self.own_lock()[0]:
            has_twins = self.pool.pages[first].group != NO_GROUP and self.pool.pages[first].group & TWIN
            has_room = ids.try_reserve(1)
            while has_room:
                assert twin == first or self.pool.pages[twin].group & TWIN
                ids.put(&twin, 1)
                twin = self.pool.twins[twin].next if has_twins else first
                if twin == first:
                    break
                has_room = ids.try_reserve(1)
        if not has_room:
            raise MemoryError(f"{ids.num + 1} page ids")
        return ids

    def enter(self, page_id, key, group) -> None:
        """Cache a page under a key and a group. PageHashError if it is cached already."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef WideDigest digest = wide_of_int(key, self.pool.uppers != NULL)
        cdef int32_t checked_group = group_of(group)
        cdef Entry entry
        cdef bint is_cached
        self.check_caching()
        if checked == NULL_PAGE:
            raise PageIdError("page: got the null page, allowed: others, which can be cached")
        with self.own_lock()[0]:
            is_cached = self.pool.pages[checked].group != NO_GROUP
            if not is_cached:
                entry = bare_entry(&digest.key, checked_group)
                entry.upper = &digest.upper
                cache(&self.pool, checked, &entry, NULL, NULL, 0)
            assert 0 < self.pool.num_keys <= self.pool.num_entries < self.pool.num_pages
        if is_cached:
            raise hashed_page(f"page {checked}")

    def enter_pages(self, PageIds ids not None, HashChain chain not None, start, group, context=0, first_place=0) -> None:
        """Cache ``ids[start:]`` under their digests in the chain, all or nothing. Null pages are ignored.

        `context` is one of `EntryJournal.add_context`; `first_place` is the place of ``ids[0]`` in its request. PageHashError
        if a page is cached already. O(pages).
        """
        cdef Py_ssize_t i, bad, last = self.checked(ids).num
        cdef Py_ssize_t first = size_of(start, "num_cached_pages", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef Origin first_page = Origin(parent=Digest(lo=0, hi=0), place=0, context=self.checked_context(context))
        cdef Range span = Range(start=<int32_t>first, stop=<int32_t>last)
        cdef Ranking ranking = Ranking(num_ranked=span.start, num_unseen=0)
        cdef Entry entry
        first_page.place = <int32_t>size_of(first_place, "first_place", 0, MAX_PAGES - ids.num)
        size_of(last, "num_full_pages", 0, len(chain))
        if last > first:
            self.check_caching()
        if self.pool.page_tokens != NULL and chain.count_tokens(1) >= self.pool.tokens_width:
            kept = self.pool.tokens_width - 1
            raise ArgumentError(f"page size: got {chain.count_tokens(1)} tokens, allowed: {kept}, as many as are kept")
        self.require_own()
        with chain.own_lock()[0], self.lock:
            bad = find_cached(&self.pool, ids.ids, span)
            for i in range(span.start, span.stop if bad < 0 else span.start):
                if ids.ids[i] != NULL_PAGE:
                    entry = entry_of(chain, i, checked_group, first_page)
                    cache(&self.pool, ids.ids[i], &entry, &ranking, ids.ids, <int32_t>i)
        if bad >= 0:
            raise hashed_page(f"{self.shown_page(ids.ids[bad])} (at {bad} of {ids.num})")

    def drop(self, page_ids) -> int:
        """Drop the prefix entries of pages, which stay where they are. Return how many had one."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t i, num_dropped = 0
        with self.own_lock()[0]:
            for i in range(ids.num):
                if self.pool.pages[ids.ids[i]].group != NO_GROUP:
                    uncache_everywhere(&self.pool, ids.ids[i])
                    assert self.pool.pages[ids.ids[i]].group == NO_GROUP
                    num_dropped += 1
        return num_dropped

    def drop_all(self) -> int:
        """Drop every prefix entry, in the tier too, unless pages are held. Return how many are. O(num_pages).
        """
        cdef int32_t num_held, following, page_id, bank, queue
        with self.own_lock()[0]:
            num_held = self.pool.num_pages - 1 - self.pool.num_free
            for bank in range(self.pool.num_banks if num_held == 0 else 0):
                queue = queue_of_bank(bank)
                page_id = page_behind(&self.pool, end_of_queue(&self.pool, queue), queue)
                while is_page(&self.pool, page_id):  # in the order of the queue, so that pages keep it
                    following = page_behind(&self.pool, page_id, queue)
                    if self.pool.pages[page_id].group != NO_GROUP:
                        uncache(&self.pool, page_id)
                    page_id = following
            if num_held == 0:
                uncache_all(&self.pool)
                assert self.pool.num_entries == 0 and self.pool.num_keys == 0
            if num_held == 0 and self.pool.tier != NULL:
                uncache_tier(self.pool.tier)
        return num_held

    def key_of(self, page_id):
        """Return ``(int key, group)`` of a cached page, or None. The key is the whole digest in a store that keeps these."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef Page page
        cdef Digest upper
        with self.own_lock()[0]:
            page, upper = self.pool.pages[checked], upper_of(&self.pool, checked)
        if page.group == NO_GROUP:
            return None
        return int_of_wide(WideDigest(key=digest_of(&page), upper=upper)), page.group & ~FLAGS

    def page_hash_of(self, page_id):
        """Return the PageHashWithGroupId of a cached page, or None."""
        cdef int32_t checked = self.checked_id(page_id)
        found = self.key_of(checked)
        if found is None:
            return None
        page_hash = self.names.hash_of(found[0]) or PageHash(found[0], token_ids_of(self, checked))
        return PageHashWithGroupId(page_hash, found[1])

    # Digests and token ids of cached pages.

    def keep_whole_digests(self) -> None:
        """Keep the upper halves of digests of 32 bytes beside the keys, of pages cached from now on. No effect if they are kept
        already.
        """
        cdef Digest *uppers
        self.check_fixed()
        uppers = <Digest *>calloc(3 * <Py_ssize_t>self.pool.num_pages, sizeof(Digest))
        if uppers == NULL:
            raise MemoryError(f"digests of {self.pool.num_pages} pages")
        self.names.max_key = (1 << 256) - 1
        with self.own_lock()[0]:
            if self.pool.uppers == NULL:
                self.pool.uppers, uppers = uppers, NULL
        free(uppers)

    @property
    def keeps_whole_digests(self) -> bool:
        """Whether `keep_whole_digests` was called."""
        return self.pool.uppers != NULL

    def keep_token_ids(self, width) -> None:
        """Keep up to `width` tokens of each page cached from now on, at 4 bytes a token. Tokens kept so far stay; a width that
        is not greater changes nothing.
        """
        cdef Py_ssize_t i, num_values = size_of(width, "page_size", 1) + 1
        cdef int32_t *page_tokens
        if num_values <= self.pool.tokens_width:
            return
        self.check_fixed()
        page_tokens = <int32_t *>calloc(num_values * self.pool.num_pages, sizeof(int32_t))
        if page_tokens == NULL:
            raise MemoryError(f"{width} token ids for each of {self.pool.num_pages} pages")
        with self.own_lock()[0]:
            for i in range(self.pool.num_pages if self.pool.tokens_width else 0):
                memcpy(
                    page_tokens + i * num_values,
                    self.pool.page_tokens + i * self.pool.tokens_width,
                    self.pool.tokens_width * sizeof(int32_t),
                )
            free(self.pool.page_tokens)
            self.pool.page_tokens = page_tokens
            self.pool.tokens_width = num_values

    # Views of pages.

    def page(self, page_id) -> CachePage:
        """Return the view of a page. It is made once."""
        return self.view(self.checked_id(page_id))

    cdef CachePage view(self, int32_t page_id):
        """Return the view of a page within the pool."""
        cdef CachePage view = self.views.get(page_id)
        if view is None:
            view = CachePage.__new__(CachePage)
            view.store, view.index, view.page_id = self, page_id, id_in_bank(&self.pool, page_id)
            view = self.views.setdefault(page_id, view)  # another thread may have made one
        return view

    def pages(self, PageIds ids not None) -> list:
        """Return the views of pages."""
        cdef PageIds checked = self.checked(ids)
        cdef Py_ssize_t i
        return [self.view(checked.ids[i]) for i in range(checked.num)]

    def ids_of_pages(self, pages) -> PageIds:
        """Return the ids of views; PageIdError for a page of another pool."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t index
        for item in as_list(pages, "pages"):
            index = record_of(self, item)
            if ids.num == ids.capacity:
                ids.reserve(1)
            ids.ids[ids.num] = index
            ids.num += 1
        return ids


cdef class QueryCounter:
    """Counts of requests admitted after a look-up, of their tokens and of hit tokens. The store counts them too, except
    preempted requests.
    """

    def __cinit__(self, PageStore store not None, bint is_preempted=False):
        self.store = store
        self.is_preempted = is_preempted

    def __reduce__(self):
        raise ArgumentTypeError("a query counter cannot be pickled")

    @property
    def counts(self) -> dict:
        """Return the `QueryCounts` by name."""
        cdef QueryCounts counts
        with self.store.own_lock()[0]:
            counts = self.counted
        return counts

    def add(self, num_tokens, num_hit_tokens, tuple lost=None) -> None:
        """Count a request, and the `LostHits` of its look-up, in which the first is one more than the bank; None: no hits."""
        cdef Py_ssize_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX >> 20)
        cdef Py_ssize_t num_hits = size_of(num_hit_tokens, "num_hit_tokens", 0, num)
        cdef LostHits checked
        self.count(num, num_hits)
        if lost is not None:
            number, num_for_states, num_for_pages = lost
            checked = LostHits(
                states_bank=<int32_t>size_of(number, "lost", 0, self.store.pool.num_banks) - 1,
                num_for_states=size_of(num_for_states, "lost", 0, num),
                num_for_pages=size_of(num_for_pages, "lost", 0, LOST_INTERVAL * num),
            )
            self.count_lost(&checked)

    cdef void count_lost(self, const LostHits *lost) noexcept:
        cdef Bank *banks = self.store.pool.banks
        with self.store.lock:
            if not self.is_preempted:
                banks[0].num_lost_hit_tokens += lost.num_for_pages
                if lost.states_bank != NO_BANK:
                    banks[lost.states_bank].num_lost_hit_tokens += lost.num_for_states

    cdef int count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) except -1:
        assert 0 <= num_hit_tokens <= num_tokens
        with self.store.own_lock()[0]:
            self.counted.num_requests += 1
            self.counted.num_queried_tokens += num_tokens
            self.counted.num_hit_tokens += num_hit_tokens
            if not self.is_preempted:
                self.store.pool.counters.num_queried_tokens += num_tokens
                self.store.pool.counters.num_hit_tokens += num_hit_tokens
        return 0


@cython.final
cdef class CachePage:
    """A view of one page's record: ``pool.pages[i]``. Each page has one view.

    ``CachePage(page_id)`` makes a page without a pool, for a `FreeCachePageQueue`. Pages of different pools, or without one,
    are equal if their visible values are: `page_id`, `ref_cnt`, `page_hash`, `is_null`, and the ids of their neighbours in the
    free queue. The hash is that of `page_id`, which never changes.

    >>> page = CachePage(7)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=7, ref_cnt=1, page_hash=None, prev_free_page=None, next_free_page=None)
    >>> page == CachePage(7), page == CachePage(page_id=7, ref_cnt=1)
    (False, True)
    """

    def __init__(self, page_id, ref_cnt=0, _page_hash=None, prev_free_page=None, next_free_page=None, is_null=False):
        """Make a page. `ref_cnt` must not be negative; `_page_hash` is the PageHashWithGroupId of a cached page, or None. A
        null page stands for no page, and queues refuse it. ArgumentError for neighbours: a queue links its pages itself.
        """
        cdef PageStore store
        cdef bint is_made_null = require_flag("is_null", is_null)
        if prev_free_page is not None or next_free_page is not None:
            raise ArgumentError("prev_free_page, next_free_page: got a page, allowed: None; a FreeCachePageQueue links its own")
        page_hash = None if _page_hash is None else checked_page_hash(_page_hash)
        store = PageStore(2, is_pool=False)
        checked_id = index_of(page_id, "page_id")
        if not -INT64_MAX <= checked_id <= INT64_MAX:
            raise ArgumentError(f"page_id: got {shown(checked_id)}, allowed: ints of 64 bits")
        store.pop(1)
        store.set_ref_count(1, ref_cnt)
        if self.store is not None:  # last, because reading arguments may run Python code
            raise made_twice("page")
        self.page_id, self.store, self.index, self.is_made_null = checked_id, store, 1, is_made_null
        self.own_hash = page_hash
        store.views[1] = self

    def __eq__(self, other):
        if self is other:
            return True
        if type(other) is not CachePage:
            return NotImplemented
        return self.page_id == other.page_id and self.fields() == (<CachePage>other).fields()

    def __hash__(self):
        return hash(self.page_id)

    cdef tuple fields(self):
        """Return the values that equal pages share. Neighbours are compared by id, because their fields lead through the queue.
        """
        before, behind = self.store.neighbours(self.index)
        return self.ref_cnt, self.page_hash, self.is_null, before and before.page_id, behind and behind.page_id

    def __reduce__(self):
        raise ArgumentTypeError("a CachePage is a view of its pool and cannot be pickled")

    @property
    def ref_cnt(self) -> int:
        """Return or set how many references the page has, 0 for a free page. Never negative."""
        with cython.critical_section(self):
            if self.store.is_pool:
                return self.store.read(&self.store.pool.pages[self.index].ref_cnt)
            return self.store.record(self.index).ref_cnt  # locked, because a growing queue moves its records

    @ref_cnt.setter
    def ref_cnt(self, value):
        self.store.set_ref_count(self.index, value)

    def incr_ref(self) -> None:
        """Add a reference."""
        if not change_ref_count(self.store, self.index, 1):
            raise ArgumentError(f"page {self.page_id}: got {self.ref_cnt} references before, allowed: fewer than {INT32_MAX}")

    def decr_ref(self) -> None:
        """Take a reference; DoubleFreeError at 0. The page does not enter the free queue; `PagePool.free_pages` puts it there.
        """
        if not change_ref_count(self.store, self.index, -1):
            raise overdrawn_page(f"page {self.page_id}")

    @property
    def page_hash(self):
        """Return the PageHashWithGroupId of a cached page, or None. Setting it caches the page; PageHashError if it is cached
        already.
        """
        if self.store.is_pool:
            return self.store.page_hash_of(self.index)
        with cython.critical_section(self):
            return self.own_hash

    @page_hash.setter
    def page_hash(self, page_hash):
        cdef bint is_cached
        checked = checked_page_hash(page_hash)
        if self.store.is_pool:
            self.store.enter(self.index, self.store.names.key_of(checked.page_hash), checked.group_id)
            return
        with cython.critical_section(self):
            is_cached = self.own_hash is not None
            if not is_cached:
                self.own_hash = checked
        if is_cached:
            raise hashed_page(f"page {self.page_id}")

    def reset_hash(self) -> None:
        """Drop the page's prefix entry, if it has one."""
        with cython.critical_section(self):
            self.own_hash = None
        self.store.drop([self.index])

    @property
    def is_null(self) -> bool:
        """Whether this is a pool's null page, or was made as one."""
        return self.is_made_null or (self.store.is_pool and self.index == NULL_PAGE)

    @property
    def is_free(self) -> bool:
        """Whether the page is in the free queue."""
        return self.store.is_free(self.index)

    @property
    def prev_free_page(self):
        """Return the page before this one in the free queue, or None."""
        return self.store.neighbours(self.index)[0]

    @property
    def next_free_page(self):
        """Return the page behind this one in the free queue, or None."""
        return self.store.neighbours(self.index)[1]

    def __repr__(self):
        before, behind = self.store.neighbours(self.index)
        return (
            f"CachePage(page_id={self.page_id}, ref_cnt={self.ref_cnt}, page_hash={self.page_hash}, "
            f"prev_free_page={before and before.page_id}, next_free_page={behind and behind.page_id})"
        )


cdef object checked_page_hash(object page_hash):
    if not isinstance(page_hash, PageHashWithGroupId):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHashWithGroupId")
    return PageHashWithGroupId(checked_hash(page_hash.page_hash), group_of(page_hash.group_id))

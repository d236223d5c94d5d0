"""One pool: the records of its pages, its free queue and its prefix index."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport INT32_MAX, INT64_MAX
from libc.string cimport memcmp

from pagepool.core.base cimport MAX_PAGES
from pagepool.core.pool.arrays cimport *
from pagepool.core.pool.retired cimport *
from pagepool.core.values cimport as_shard, lists_of, wide_of_int

import os

from pagepool.arguments import require_name
from pagepool.errors import (
    ArgumentError, ArgumentTypeError, IntegrityError, PageHashError, PageIdError, RequestTooLargeError, shown,
)
from pagepool.hashing import HashNames, PageHash, PageHashWithGroupId

cdef enum:
    SAMPLE_SHIFT = 7          # in large pools every 128th page is sampled

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
        pool.num_parts = pool.num_parts_each = count_plain_parts(pool)
        pool.is_divided = True
    num_records = <size_t>pool.num_pages + MAX_BANKS
    if store.enable_caching:  # otherwise all pages are worth the same, and nothing divides a queue
        num_records += pool.num_banks * MAX_TENANTS * (count_plain_parts(pool) + NEVER)
    if not resize(<void **>&pool.pages, num_records * sizeof(Page)):
        raise MemoryError(f"{pool.num_pages} page records")
    begin_queues(pool)
    return 0


cdef int32_t add_banks(Pool *pool, Py_ssize_t num_pages, object further_banks) except -1:
    """Set the banks of a pool without records: a first bank of `num_pages` pages, including the null page, and further banks of
    these sizes. Return the number of all pages.
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
    if pool.num_banks > 1:
        pool.hear_removal = hear_removal
    return <int32_t>stop


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


cdef Py_ssize_t find_cached(Pool *pool, const int32_t *ids, Range span) noexcept:
    """Return the index of the first page in ``ids[span]`` that has an entry, is out of use or is repeated; -1 if there is none.
    Null pages may repeat.
    """
    cdef Py_ssize_t i, bad = -1
    for i in range(span.start, span.stop):
        if ids[i] == NULL_PAGE:
            continue
        if pool.pages[ids[i]].group != NO_GROUP or is_put_away(pool, ids[i]):
            bad = i
            break
        pool.pages[ids[i]].group = MAX_GROUP  # until all are checked: a page that is repeated looks cached
    for i in range(span.start, span.stop if bad < 0 else bad):
        if ids[i] != NULL_PAGE:
            pool.pages[ids[i]].group = NO_GROUP
    return bad


cdef Entry entry_of(HashChain chain, Py_ssize_t at, int32_t group, Origin first) noexcept:
    """Return the entry for page `at` of a locked chain, with its tokens if the chain has them. `first` has the place and the
    context of the chain's first page.
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


cdef int check_caching(PageStore store) except -1:
    """Raise PageHashError without prefix caching."""
    if not store.enable_caching:
        raise PageHashError("page hash: got one without prefix caching, allowed: none")
    return 0


@cython.auto_pickle(False)
cdef class PageStore(PageRecords):
    """The records of one pool, its free queue and its prefix index. Users call `pagepool.PagePool`.

    Methods take and return page ids. Making a store is O(num_pages). Memory for each page: 32 bytes of record, and with caching
    8 of twin links and 16 to 32 of index slots; 24 more after the first data-parallel hint (8 without caching); 6 more after
    the first expectation, or once shares are set; 16 more for digests of 32 bytes, 48 with events.
    """

    def __cinit__(
        self, num_pages, bint enable_caching=True, eviction="lru", further_banks=(), bank_names=("kv",)
    ):
        cdef int32_t page_id, num_records
        cdef Py_ssize_t capacity = 0
        self.leases, self.names, self.enable_caching = {}, HashNames(), enable_caching
        self.pool.multiplier = int.from_bytes(os.urandom(8), "little") | 1
        self.pool.lost_interval, self.pool.list_number = LOST_INTERVAL, 1
        num_records = add_banks(&self.pool, size_of(num_pages, "num_pages", 1), further_banks)
        if not add_records(&self.pool, &capacity, num_records) or (self.enable_caching and not make_index(&self.pool)):
            raise MemoryError(f"{num_records} page records")
        sample_residency(&self.pool)
        self.eviction = checked_policy(eviction)
        self.name_banks(bank_names)
        if self.enable_caching or self.pool.num_banks > 1:
            make_queue(self)
        for page_id in range(1, self.pool.num_pages):
            push(&self.pool, page_id)

    def __dealloc__(self):
        if self.process == process_number:  # in a forked process another thread may have been changing it
            free_arrays(&self.pool)
            if self.pool.tier != NULL and self.pool.tier.pool != NULL:
                self.pool.tier.pool.awaited = NULL  # the pool's own list
            free_closed(&self.pool.awaited, True)
            Py_XDECREF(self.tier)

    # Terms, and what look-ups prefer.

    cdef bint make_terms(self, PageIds terms) noexcept:
        """Divide the queue by terms, unless all of these are UNKNOWN; False if memory is short."""
        cdef int32_t all_terms = UNKNOWN
        cdef Py_ssize_t i
        for i in range(terms.num):
            all_terms |= terms.ids[i]
        return all_terms == UNKNOWN or divide(&self.pool, True, False)

    def put_blank_first(self) -> None:
        """Hand out pages without an entry first from now on, as with a policy. O(num_pages)."""
        cdef bint has_room
        with self.own_lock()[0]:
            has_room = divide(&self.pool, False, False)
            self.has_blank_first |= has_room
        if not has_room:
            raise MemoryError(f"links of {self.pool.num_pages} pages in {self.pool.num_shards} shards")

    def prefer_held(self) -> None:
        """Let look-ups find a held page from now on, if any page with the content is held. O(num_pages), once."""
        with self.own_lock()[0]:
            if self.pool.slots != NULL:
                prefer_held(&self.pool)

    cdef bint pad_terms(self, PageIds terms, int32_t term, Py_ssize_t n) noexcept:
        """Append a term to a list up to length `n`, if pages of the locked pool can have terms. False if memory is short."""
        if self.pool.expected.terms != NULL and not terms.try_reserve(n - terms.num):
            return False
        while terms.num < n and self.pool.expected.terms != NULL:
            terms.put(&term, 1)
        return True

    # Figures.

    @property
    def has_tier(self) -> bool:
        """Whether there is a host tier behind the pool."""
        return self.pool.tier != NULL

    @property
    def num_keys(self) -> int:
        """Count the distinct (hash, group) pairs in the prefix index."""
        return self.read(&self.pool.num_keys)

    @property
    def num_cached_pages(self) -> int:
        """Count the pages with a prefix entry."""
        return self.read(&self.pool.num_entries)

    @property
    def num_sessions(self) -> int:
        """Count the sessions that have pages, rows or requests."""
        return self.read(&self.pool.sessions.num_live)

    @property
    def expectations(self) -> tuple:
        """Return the numbers of free pages by term, from `UNKNOWN`, which is always 0, to `NEVER`, and the `Outcomes` by name.
        """
        cdef Expectations copied
        with self.own_lock()[0]:
            copied = self.pool.expected
        return list(copied.num_free), copied.outcomes

    def set_time(self, seconds) -> None:
        """Stop the clock of expectations and leases at a time, for tests and replays. Once a page was expected, ArgumentError
        for a time before the last one.
        """
        cdef double time = float_of(seconds, "seconds")
        cdef bint is_past
        if not 1 <= time < MAX_SECONDS:
            raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: 1 to {MAX_SECONDS}")
        with self.own_lock()[0]:
            is_past = self.pool.expected.terms != NULL and time * SECOND < now_of(&self.pool.expected)
            if not is_past:
                self.pool.expected.fixed_time = <int64_t>(time * SECOND)
                if self.pool.tier != NULL and self.pool.tier.pool != NULL:
                    self.pool.tier.pool.expected.fixed_time = self.pool.expected.fixed_time
        if is_past:
            raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: the last time, or a later one")

    @property
    def num_kept_token_ids(self) -> int:
        """Return the largest number of tokens kept for a page; 0 means none."""
        return max(0, self.pool.tokens_width - 1)

    @property
    def counters(self) -> dict:
        """Return the `Counters` by name."""
        cdef Counters counters
        with self.own_lock()[0]:
            counters = self.pool.counters
        return counters

    # Arguments.

    def name_banks(self, names) -> None:
        """Name the pools of the store in errors and refusals."""
        cdef tuple checked = tuple([require_name("pool", name) for name in as_list(names, "names")])
        if len(checked) != self.pool.num_banks:
            raise ArgumentError(f"names: got {len(checked)}, allowed: {self.pool.num_banks}")
        self.bank_names = checked

    def count_pages(self, bank) -> int:
        """Count the pages of a bank without the null page."""
        return count_pages_in(&self.pool, queue_of_bank(self.checked_bank(bank)))

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

    def bounds_of(self, bank) -> tuple:
        """Return the bounds of a bank's page ids for look-ups, as ``(start, stop)``; ``(0, None)`` in a store of one bank."""
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

    cdef Range range_of(self, first_id, stop_id) except *:
        """Return a half-open range of page ids; `stop_id` None means the end of the pool."""
        cdef Py_ssize_t stop = self.pool.num_pages if stop_id is None else size_of(stop_id, "stop")
        return Range(start=<int32_t>size_of(first_id, "start"), stop=<int32_t>stop)

    def require_even(self, data_parallel_size) -> None:
        """Raise ArgumentError for less than one shard and, in a store of several banks, unless it divides all their sizes."""
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t i, n
        if data_parallel_size is None:
            return
        n = size_of(data_parallel_size, "data_parallel_size", 1, INT64_MAX)
        if n > 1 and count_set_aside(pool) + count_retired(pool):
            raise ArgumentError(f"data_parallel_size: got {n}, allowed with pages set aside, as for sinks, or out of use: 1")
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

    # References to pages.

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

    def take(self, n, shard=None, num_shards=0, bank=0) -> PageIds:
        """Take the next `n` victims of a bank or of its shard. They get ref count 1 and lose their prefix entries. O(n)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t i, num = size_of(n, "num_pages")
        cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
        cdef int32_t checked_bank = self.checked_bank(bank), checked_shard = as_shard(shard, divided)
        cdef int32_t queue, num_free, bad = NULL_PAGE
        cdef void *thread
        ids.reserve(min(num, self.pool.num_pages))
        self.require_own()
        self.lock_divided(divided, NULL)
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

    def set_aside(self, n, bank=0) -> PageIds:
        """Take `n` pages of a bank for good: requests can never have them, and no shard of the pool can be made. O(n)."""
        cdef int32_t checked = self.checked_bank(bank)
        if self.pool.num_shards > 1:
            raise ArgumentError(f"set_aside: got a pool of {self.pool.num_shards} shards, allowed: one that is not divided")
        ids = self.take(n, bank=checked)
        with self.own_lock()[0]:
            self.pool.banks[checked].num_set_aside += <int32_t>len(ids)
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
            f"{count_usable_in(&self.pool, queue):,}: no waiting helps, fewer tokens a step may "
            "(see CacheManager.require_capacity)"
        )

    cdef int check_untaken(self, int32_t bad) except -1:
        """Raise IntegrityError for a free page with references; the null page means there is none."""
        if bad != NULL_PAGE:
            ref_cnt = self.pool.pages[bad].ref_cnt
            raise IntegrityError(f"{self.shown_page(bad)} is in the free queue with ref count {ref_cnt}, allowed: 0")
        return 0

    def give_back(self, page_ids, bint tail_first=False) -> None:
        """Drop a reference to each page; pages without any left go to the back of the queue in order. Null pages are ignored.
        """
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        cdef void *thread
        with self.own_lock()[0]:
            thread = let_others_run(ids.num)
            bad = give_back_all(&self.pool, ids.ids, ids.num, tail_first)
            go_on(thread)
        if bad >= 0:
            self.refuse_give_back(ids, bad)

    cdef Py_ssize_t give_back_row(self, PageIds ids, Py_ssize_t num_staying, const int32_t *terms=NULL) noexcept:
        """Give back pages of the pool. Those from index `num_staying` on lose their entry with their last reference; the others
        get the terms at their indices.
        """
        cdef void *thread = let_others_run(ids.num)
        cdef Py_ssize_t bad = give_back_and_uncache(&self.pool, ids.ids, num_staying, ids.num, terms)
        go_on(thread)
        return bad

    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1:
        raise overdrawn_page(f"{self.shown_page(ids[bad])} (at {bad} of {len(ids)})")

    # Shards.

    cdef int lock_divided(self, int32_t num_shards, cython.pymutex *outer) except -1:
        """Lock the pool once it is divided into `num_shards`; 0 accepts any number. Another caller may divide it again before
        the lock is taken, so try until it fits. Pages of expired leases are given back. The caller holds the lock `outer`
        (NULL: none): it is released while the pool is divided, and after an error.
        """
        self.lock.acquire()
        while num_shards and self.pool.num_shards != num_shards:
            self.lock.release()
            if outer != NULL:
                outer[0].release()  # a finalizer that runs while an error is made may wait for it
            self.set_shards(num_shards)
            if outer != NULL:
                outer[0].acquire()
            self.lock.acquire()
        end_leases(&self.pool)
        assert num_shards == 0 or self.pool.num_shards == num_shards
        return 0

    def set_shards(self, num_shards) -> None:
        """Divide the pool into `num_shards` equal ranges of ids, each with its own free queue and rings of twins.
        O(num_pages + pages of equal content x shards) when the number changes.
        """
        cdef Pool *pool = &self.pool
        cdef int32_t n = <int32_t>size_of(num_shards, "data_parallel_size", 1, pool.num_pages)
        cdef Links *links
        if n == self.read(&pool.num_shards):
            return
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
        """Return the page cached first under an int key and a group, with an id in ``[start, stop)``, or None. A key has 128
        bits; in a store that keeps whole digests it may be a whole digest, or the lower half of one.
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
        """Cache a page under a key and a group. PageHashError if it is cached already, or out of use."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef WideDigest digest = wide_of_int(key, self.pool.uppers != NULL)
        cdef int32_t checked_group = group_of(group)
        cdef Entry entry
        cdef bint is_cached
        check_caching(self)
        if checked == NULL_PAGE:
            raise PageIdError("page: got the null page, allowed: others, which can be cached")
        with self.own_lock()[0]:
            is_cached = self.pool.pages[checked].group != NO_GROUP or is_put_away(&self.pool, checked)
            if not is_cached:
                entry = bare_entry(&digest.key, checked_group)
                entry.upper = &digest.upper
                cache(&self.pool, checked, &entry, NULL, NULL, 0)
            assert 0 < self.pool.num_keys <= self.pool.num_entries < self.pool.num_pages
        if is_cached:
            raise hashed_page(f"page {checked}")

    def cache_hash(self, page_id, page_hash) -> None:
        """Cache a page under a PageHashWithGroupId. PageHashError if it is cached already."""
        checked = checked_page_hash(page_hash)
        self.enter(page_id, self.names.key_of(checked.page_hash), checked.group_id)

    def enter_pages(self, PageIds ids not None, HashChain chain not None, start, group, context=0, first_place=0) -> None:
        """Cache ``ids[start:]`` under their digests in the chain, all or nothing. Null pages are ignored.

        `context` is 0 or a result of `EntryJournal.add_context`; `first_place` is the place of ``ids[0]`` in its request.
        PageHashError if a page is cached already. O(pages).
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
            check_caching(self)
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
        """Drop every prefix entry, in the tier too, unless pages are held. Return the number of held pages. O(num_pages).
        """
        cdef int32_t num_held, following, page_id, bank, queue
        with self.own_lock()[0]:
            num_held = count_held(&self.pool)
            for bank in range(self.pool.num_banks if num_held == 0 else 0):
                queue = queue_of_bank(bank)
                page_id = page_behind(&self.pool, end_of_queue(&self.pool, queue), queue)
                while is_page(&self.pool, page_id):  # in the order of the queue, so that pages keep it
                    following = page_behind(&self.pool, page_id, queue)
                    if self.pool.pages[page_id].group != NO_GROUP:
                        uncache_for(&self.pool, page_id, BY_RESET)
                    page_id = following
            if num_held == 0:
                uncache_all(&self.pool)
                assert self.pool.num_entries == 0 and self.pool.num_keys == 0
            if num_held == 0 and self.pool.tier != NULL:
                uncache_tier(self.pool.tier)
        return num_held

    def key_of(self, page_id):
        """Return ``(int key, group)`` of a cached page, or None. In a store that keeps whole digests, the key is the digest."""
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

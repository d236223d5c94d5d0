"""The records of a pool, and its prefix index."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport INT32_MAX, uint32_t
from libc.string cimport memcpy

from pagepool.core.arguments cimport digest_of_int, group_of, int_of_digest, page_id_of, size_of
from pagepool.core.eviction cimport checked_policy, free_policy, set_policy
from pagepool.core.index cimport drop, enter, enter_all, find_within, keep_tokens
from pagepool.core.levels cimport forget_deadlines
from pagepool.core.locks cimport STORE_LOCK, delist_lock, enlist_lock
from pagepool.core.notes cimport is_journaled, note_clear, note_entry
from pagepool.core.pages cimport find_outside
from pagepool.core.platform cimport GIL_DISABLED, monotonic_ns
from pagepool.core.queue cimport begin_parts, blank_all, link_shards, page_behind, push
from pagepool.core.records cimport (
    FLAGS, MAX_PAGES, NOT_FREE, NO_GROUP, NULL_PAGE, NUM_BUCKETS, NUM_LEVEL_PARTS, TWIN, Histogram, Links, Origin, Residency,
    Slot, Stay, count_queue_links, count_remembered, digest_of, is_free, is_pinned, resize,
)
from pagepool.core.references cimport lose_pins
from pagepool.core.siphash cimport Digest
from pagepool.core.transfers cimport drop_everywhere, empty_tier
from pagepool.core.twins cimport link_shard_twins

import os

from pagepool.errors import ArgumentError, ArgumentTypeError, PageHashError, PageIdError
from pagepool.hashing import HashNames, PageHash, PageHashWithGroupId

cdef enum:
    SAMPLE_SHIFT = 7          # in large pools every 128th page is sampled


cdef tuple histogram_of(const Histogram *histogram):
    cdef Py_ssize_t i
    return [histogram.counts[i] for i in range(NUM_BUCKETS)], histogram.sum


cdef tuple counters_of(Pool pool):
    return pool.num_allocated, pool.num_freed, pool.num_evicted, pool.num_cached, pool.num_queried, pool.num_hit


cdef Links *new_shard_links(const Pool *pool, Py_ssize_t num_shards) noexcept:
    """Memory for the links of shards; NULL where it is short."""
    cdef Py_ssize_t num_twins = pool.num_pages if pool.slots != NULL else 0
    cdef Py_ssize_t num_links = count_queue_links(pool, num_shards) + num_shards + count_remembered(pool, num_shards)
    return <Links *>calloc(num_links + 2 * num_twins, sizeof(Links))


cdef void use_shard_links(Pool *pool, Links *links, int32_t num_shards) noexcept:
    """Divide a locked pool into shards, with new links. O(num_pages + pages of equal content x shards)."""
    cdef Links *newest = links + count_queue_links(pool, num_shards) + num_shards
    free(pool.shard_links)
    pool.shard_links = links
    pool.shard_num_free = <int32_t *>(newest - num_shards)
    pool.shard_newest = <int32_t *>newest
    pool.shard_twins = newest + count_remembered(pool, num_shards) if pool.slots != NULL else <Links *>NULL
    pool.shard_firsts = pool.shard_twins + pool.num_pages
    pool.num_shards, pool.is_divided = num_shards, True
    pool.pages_per_shard = pool.num_pages // num_shards
    link_shards(pool)
    link_shard_twins(pool)


cdef class PageRecords:
    """The records of one pool in native memory."""

    def __cinit__(self, num_pages, bint enable_caching=True, bint is_pool=True, eviction="lru", ghost_size=None):
        cdef int32_t page_id, num_records
        enlist_lock(&self.lock_node, &self.lock, STORE_LOCK)
        self.is_pool = is_pool
        self.enable_caching = enable_caching and is_pool
        self.names = HashNames()
        self.pool.multiplier = int.from_bytes(os.urandom(8), "little") | 1
        self.pool.sample_mask = -1
        num_records = size_of(num_pages, "num_pages", 1)
        if not self.add_records(num_records) or (self.enable_caching and not self.make_index()):
            raise MemoryError(f"{num_records} page records")
        if is_pool:
            self.sample_residency()
        self.eviction, self.ghost_size = checked_policy(eviction, ghost_size)
        if self.enable_caching:  # without it no page is worth more than another
            self.divide()
        for page_id in range(1, self.pool.num_pages):
            push(&self.pool, page_id)

    def __dealloc__(self):
        delist_lock(&self.lock_node)
        free(self.pool.pages)
        free(self.pool.slots)
        free(self.pool.twins)
        free(self.pool.shard_links)
        free(self.pool.page_tokens)
        free(self.pool.journal.notes)
        free(self.pool.journal.contexts)
        free(self.pool.residency)
        free_policy(&self.pool)
        free(self.pool.pins)
        free(self.pool.levels)
        free(self.pool.deadlines.times)
        free(self.pool.copies.items)
        Py_XDECREF(self.tier)

    def __reduce__(self):
        raise ArgumentTypeError("a page store cannot be pickled")

    cdef bint add_records(self, Py_ssize_t num_pages) noexcept:
        """Add records up to `num_pages`: neither free nor cached. False where memory is short. Amortised O(1) a record."""
        cdef Py_ssize_t i, capacity = max(num_pages, 2 * self.capacity)
        if num_pages > self.capacity:
            if not resize(<void **>&self.pool.pages, capacity * sizeof(Page)):
                return False
            self.capacity = capacity
        for i in range(self.pool.num_pages, num_pages):
            self.pool.pages[i] = Page(0, 0, 0, NOT_FREE, NOT_FREE, NO_GROUP)
        if self.pool.num_pages == 0:
            self.pool.pages[NULL_PAGE] = Page(0, 0, 0, NULL_PAGE, NULL_PAGE, NO_GROUP)
        self.pool.num_pages = <int32_t>num_pages
        return True

    cdef int divide(self) except -1:
        """Divide the empty queue into the parts of the policy. Leave room for those of levels, so that records never move."""
        cdef size_t num_records
        set_policy(&self.pool, self.eviction, self.ghost_size)
        num_records = <size_t>self.pool.num_pages + max(1, self.pool.num_parts) + NUM_LEVEL_PARTS
        if not resize(<void **>&self.pool.pages, num_records * sizeof(Page)):
            raise MemoryError(f"{self.pool.num_pages} page records")
        begin_parts(&self.pool)
        return 0

    cdef bint make_index(self) noexcept:
        """Make an empty prefix index; False where memory is short."""
        cdef uint32_t num_slot_bits = 2
        while <Py_ssize_t>1 << num_slot_bits < 2 * <Py_ssize_t>self.pool.num_pages:
            num_slot_bits += 1
        self.pool.slots = <Slot *>calloc(<size_t>1 << num_slot_bits, sizeof(Slot))
        self.pool.mask, self.pool.home_shift = (<uint32_t>1 << num_slot_bits) - 1, 32 - num_slot_bits
        return self.pool.slots != NULL and resize(<void **>&self.pool.twins, self.pool.num_pages * sizeof(Links))

    cdef int sample_residency(self) except -1:
        """Sample every 128th page, and more of a small pool. The stays of pages that a restored pool has in use begin now."""
        cdef Residency *residency
        cdef Py_ssize_t i, num_stays
        cdef int32_t shift = SAMPLE_SHIFT
        cdef int64_t now = monotonic_ns()
        while shift and self.pool.num_pages >> (shift + SAMPLE_SHIFT) == 0:
            shift -= 1
        num_stays = (self.pool.num_pages >> shift) + 1
        residency = self.pool.residency = <Residency *>calloc(1, sizeof(Residency) + num_stays * sizeof(Stay))
        if residency == NULL:
            raise MemoryError("the residency of pages")
        residency.shift = shift
        residency.stays = <Stay *>(residency + 1)
        for i in range(num_stays):
            residency.stays[i] = Stay(now, now)
        self.pool.sample_mask = (1 << shift) - 1
        return 0

    cdef bint make_pins(self) noexcept:
        """Make room for pins, unless there is; False where memory is short."""
        if self.pool.pins == NULL:
            self.pool.pins = <int32_t *>calloc(self.pool.num_pages, sizeof(int32_t))
        return self.pool.pins != NULL

    cdef int32_t read(self, const int32_t *value) noexcept:
        """One value. It is never torn: the lock is needed only in a build without the GIL."""
        cdef int32_t copied
        if GIL_DISABLED:
            self.lock.acquire()
        copied = value[0]
        if GIL_DISABLED:
            self.lock.release()
        return copied

    cdef Page record(self, int32_t page_id) noexcept:
        """A copy of a page's record, as it is between calls."""
        cdef Page page
        with self.lock:
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
        """Distinct (hash, group) pairs in the prefix index."""
        return self.read(&self.pool.num_keys)

    @property
    def num_cached_pages(self) -> int:
        """Pages with a prefix entry."""
        return self.read(&self.pool.num_entries)

    @property
    def num_pinned_pages(self) -> int:
        return self.read(&self.pool.num_pinned)

    @property
    def num_kept_token_ids(self) -> int:
        """Tokens that are kept of a page, at most; 0: none are."""
        return max(0, self.pool.tokens_width - 1)

    @property
    def residency(self) -> tuple:
        """Lifetimes, idle times before eviction and gaps between uses of sampled pages: for each the counts of times below 1
        ms, below 2, 4, ..., 2**22 ms, and longer, and their sum in ns. O(1).
        """
        cdef Residency copied
        if self.pool.residency == NULL:
            return ()
        with self.lock:
            copied = self.pool.residency[0]
        return histogram_of(&copied.lifetimes), histogram_of(&copied.idle_times), histogram_of(&copied.reuse_gaps)

    @property
    def counters(self) -> tuple:
        """Pages allocated, freed, evicted and cached, and tokens queried and hit, since the store was made."""
        cdef Pool pool
        with self.lock:
            pool = self.pool
        return counters_of(pool)

    @property
    def estimated_hits(self) -> tuple | None:
        """Pages that were hit, and that LRU would have hit by the adaptive policy's estimate, since the store was made; None
        for other policies.
        """
        cdef int64_t num_shared, num_free, num_lru
        if self.eviction != "adaptive" or not self.pool.num_parts:
            return None
        with self.lock:
            num_shared, num_free = self.pool.policy.num_shared_hits, self.pool.policy.num_free_hits
            num_lru = self.pool.policy.num_lru_hits
        return num_shared + num_free, num_shared + num_lru

    def set_ref_count(self, page_id, ref_cnt) -> None:
        """Overwrite a count; that of the null page is not kept. `check` and the next `take` notice a free page that is held."""
        cdef Py_ssize_t count = size_of(ref_cnt, "ref_cnt", 0, INT32_MAX - 1)
        cdef int32_t checked = self.checked_id(page_id)
        if checked != NULL_PAGE:
            with self.lock:
                self.overwrite_count(checked, <int32_t>count)

    cdef void overwrite_count(self, int32_t page_id, int32_t count) noexcept:
        cdef Page *page = &self.pool.pages[page_id]
        self.pool.is_restored &= count <= page.ref_cnt
        if is_free(&self.pool, page_id):
            self.pool.num_held_free += (count != 0) - (page.ref_cnt != 0)
        page.ref_cnt = count

    cdef bint add_reference(self, int32_t page_id, int32_t change) noexcept:
        """One reference more or less; False, and nothing changed, where the count would leave its range. Pins keep theirs."""
        cdef bint is_right
        with self.lock:
            is_right = self.pool.pages[page_id].ref_cnt + <int64_t>change < INT32_MAX
            is_right = is_right and self.pool.pages[page_id].ref_cnt + change >= is_pinned(&self.pool, page_id)
            if is_right and page_id != NULL_PAGE:
                self.overwrite_count(page_id, self.pool.pages[page_id].ref_cnt + change)
        return is_right

    def is_free(self, page_id) -> bool:
        """Whether the page is in the free queue."""
        cdef int32_t checked = self.checked_id(page_id)
        return checked != NULL_PAGE and self.read(&self.pool.pages[checked].prev_free) != NOT_FREE

    def ref_counts(self):
        """The ref counts of all pages: int32 array ``[num_pages]``. O(num_pages)."""
        cdef PageIds counts = PageIds.__new__(PageIds)
        cdef Py_ssize_t i, n = self.pool.num_pages
        counts.reserve(n)
        with self.lock:
            for i in range(n):
                counts.put(&self.pool.pages[i].ref_cnt, 1)
        return counts.to_array()

    def free_ids(self) -> PageIds:
        """The free queue, front first; with a policy part by part. O(num_pages)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t page_id = NULL_PAGE
        cdef bint has_room
        with self.lock:
            has_room = ids.try_reserve(self.pool.num_free)
            while has_room and ids.num < self.pool.num_free:
                page_id = page_behind(&self.pool, page_id, -1)
                ids.put(&page_id, 1)
        if not has_room:
            raise MemoryError("the ids of free pages")
        return ids

    cdef int32_t checked_id(self, object page_id) except -1:
        cdef int32_t checked = page_id_of(page_id)
        self.check_range(checked)
        return checked

    cdef PageIds checked(self, object page_ids):
        """`page_ids` as ids that lie within the pool and do not change."""
        cdef PageIds ids = page_ids if isinstance(page_ids, PageIds) else PageIds(page_ids)
        cdef Py_ssize_t bad = find_outside(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            self.check_range(ids.ids[bad])
        return ids

    cdef int check_range(self, int32_t page_id) except -1:
        if not 0 <= page_id < self.pool.num_pages:
            raise PageIdError(f"page id: got {page_id}, allowed: 0 to {self.pool.num_pages - 1}")
        return 0

    cdef Range range_of(self, first_id, stop_id) except *:
        """Half-open range of page ids; None: to the end of the pool."""
        cdef Py_ssize_t stop = self.pool.num_pages if stop_id is None else size_of(stop_id, "stop")
        return Range(<int32_t>size_of(first_id, "start"), <int32_t>stop)

    cdef int check_fixed(self) except -1:
        """The store of a queue grows, and arrays beside its records do not."""
        if not self.is_pool:
            raise ArgumentError("the store of a queue has no shards, keeps no token ids and no journal")
        return 0

    cdef int lock_divided(self, int32_t num_shards) except -1:
        """Take the lock while the pool is divided into `num_shards` (0: as it is); other callers may divide it otherwise."""
        self.lock.acquire()
        while num_shards and self.pool.num_shards != num_shards:
            self.lock.release()
            self.set_shards(num_shards)
            self.lock.acquire()
        return 0

    def set_shards(self, num_shards) -> None:
        """Keep a free queue and the pages cached first for each of `num_shards` equal id ranges from now on.
        O(num_pages + pages of equal content x shards) when the number changes.
        """
        cdef Pool *pool = &self.pool
        cdef int32_t n = <int32_t>size_of(num_shards, "data_parallel_size", 1, pool.num_pages)
        cdef Links *links
        if n == self.read(&pool.num_shards):
            return
        self.check_fixed()
        if pool.num_pages % n:
            raise ArgumentError(f"data_parallel_size: got {n}, allowed: a divisor of the {pool.num_pages} pages")
        with self.lock:
            links = new_shard_links(pool, n)
            if links != NULL:
                use_shard_links(pool, links, n)
        if links == NULL:
            raise MemoryError(f"links of {pool.num_pages} pages in {n} shards")


@cython.auto_pickle(False)
cdef class CachedPages(PageRecords):
    """The prefix index of a pool."""

    def find(self, key, group, start=0, stop=None):
        """The page cached first under a 128-bit int key in a group, among ids in ``[start, stop)``; None if there is none."""
        cdef Digest digest = digest_of_int(key)
        cdef Range ids = self.range_of(start, stop)
        cdef int32_t page_id = NULL_PAGE
        cdef int32_t checked_group = group_of(group)
        if self.enable_caching:
            with self.lock:
                page_id = find_within(&self.pool, digest, checked_group, ids)
        return None if page_id == NULL_PAGE else page_id

    def twins(self, page_id) -> PageIds:
        """All pages with the content of a cached page, in the order they were cached, from this one on."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t first = self.checked_id(page_id)
        cdef int32_t twin = first
        cdef bint has_room
        with self.lock:
            has_room = ids.try_reserve(1)
            while has_room:
                ids.ids[ids.num] = twin
                ids.num += 1
                if self.pool.pages[first].group == NO_GROUP or not self.pool.pages[first].group & TWIN:
                    break
                twin = self.pool.twins[twin].next
                if twin == first:
                    break
                has_room = ids.try_reserve(1)
        if not has_room:
            raise MemoryError(f"{ids.num + 1} page ids")
        return ids

    def enter(self, page_id, key, group) -> None:
        """Give a page without a prefix entry one."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef Digest digest = digest_of_int(key)
        cdef int32_t checked_group = group_of(group)
        cdef bint is_cached
        if not self.enable_caching:
            raise PageHashError("prefix caching is off")
        if checked == NULL_PAGE:
            raise PageIdError("the null page cannot be cached")
        with self.lock:
            is_cached = self.pool.pages[checked].group != NO_GROUP
            if not is_cached:
                enter(&self.pool, checked, digest, checked_group)
                if is_journaled(&self.pool):
                    note_entry(&self.pool, checked, Origin(Digest(0, 0), 0, 0))
                keep_tokens(&self.pool, checked, NULL, 0)
        if is_cached:
            raise PageHashError(f"page {checked} has a hash already")

    def drop(self, page_ids) -> int:
        """Drop the prefix entries of pages; the pages stay where they are. Returns how many had one."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t i
        cdef Py_ssize_t num_dropped = 0
        with self.lock:
            for i in range(ids.num):
                if self.pool.pages[ids.ids[i]].group != NO_GROUP:
                    drop_everywhere(&self.pool, ids.ids[i])
                    num_dropped += 1
        return num_dropped

    def drop_all(self) -> int:
        """Drop every prefix entry, in the tier too, unless pages are held, or rows have pages in the tier. Returns how many
        are. O(num_pages).
        """
        cdef int32_t i, num_held
        with self.lock:
            num_held = self.pool.num_pages - 1 - self.pool.num_free
            if self.pool.tier != NULL:
                num_held += <int32_t>self.pool.tier.num_swapped
            if num_held == 0 and self.pool.num_parts:
                blank_all(&self.pool)
                forget_deadlines(&self.pool.deadlines)
            for i in range(1, self.pool.num_pages if num_held == 0 else 1):
                if self.pool.pages[i].group != NO_GROUP:
                    drop(&self.pool, i)
            if num_held == 0 and self.pool.tier != NULL:
                empty_tier(self.pool.tier)
            if num_held == 0 and is_journaled(&self.pool):
                note_clear(&self.pool.journal)
        return num_held

    def unpin_all(self) -> int:
        """Take back all pins, in order of page ids. Returns how many pages were pinned. O(num_pages)."""
        cdef int32_t page_id, num_pinned
        with self.lock:
            num_pinned = self.pool.num_pinned
            for page_id in range(1, self.pool.num_pages if num_pinned else 1):
                if is_pinned(&self.pool, page_id):
                    lose_pins(&self.pool, page_id)
        return num_pinned

    def count_pinned(self, PageIds ids not None) -> int:
        """How many of the pages are pinned. O(pages)."""
        cdef PageIds checked = self.checked(ids)
        cdef Py_ssize_t i, count = 0
        with self.lock:
            for i in range(checked.num):
                count += is_pinned(&self.pool, checked.ids[i])
        return count

    def key_of(self, page_id):
        """``(128-bit int key, group)`` of a cached page, or None."""
        cdef Page page = self.record(self.checked_id(page_id))
        if page.group == NO_GROUP:
            return None
        return int_of_digest(digest_of(&page)), page.group & ~FLAGS

    def page_hash_of(self, page_id):
        """The PageHashWithGroupId of a cached page, or None."""
        cdef int32_t checked = self.checked_id(page_id)
        found = self.key_of(checked)
        if found is None:
            return None
        page_hash = self.names.hash_of(found[0]) or PageHash(found[0], self.token_ids_of(checked))
        return PageHashWithGroupId(page_hash, found[1])

    def keep_token_ids(self, width) -> None:
        """Keep the tokens of pages that are entered from now on, `width` at most a page. 4 bytes a token. Tokens kept
        so far stay; a width that is no greater changes nothing.
        """
        cdef Py_ssize_t i, num_values = size_of(width, "page_size", 1) + 1
        cdef int32_t *page_tokens
        if num_values <= self.pool.tokens_width:
            return
        self.check_fixed()
        page_tokens = <int32_t *>calloc(num_values * self.pool.num_pages, sizeof(int32_t))
        if page_tokens == NULL:
            raise MemoryError(f"{width} token ids for each of {self.pool.num_pages} pages")
        with self.lock:
            for i in range(self.pool.num_pages if self.pool.tokens_width else 0):
                memcpy(
                    page_tokens + i * num_values,
                    self.pool.page_tokens + i * self.pool.tokens_width,
                    self.pool.tokens_width * sizeof(int32_t),
                )
            free(self.pool.page_tokens)
            self.pool.page_tokens = page_tokens
            self.pool.tokens_width = num_values

    cdef tuple token_ids_of(self, int32_t page_id):
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef const int32_t *tokens
        cdef bint has_room = True
        if self.pool.page_tokens == NULL:
            return ()
        with self.lock:
            tokens = self.pool.page_tokens + page_id * self.pool.tokens_width
            has_room = ids.try_reserve(tokens[0])
            if has_room and tokens[0]:
                memcpy(ids.ids, tokens + 1, tokens[0] * sizeof(int32_t))
                ids.num = tokens[0]
        if not has_room:
            raise MemoryError("the token ids of a page")
        return tuple(ids.to_list())

    def enter_pages(self, PageIds ids not None, HashChain chain not None, start, group, context=0, first_place=0) -> None:
        """Enter ``ids[start:]`` under their digests of the chain, except null pages. All or nothing.

        The pages have a `context` of `EntryJournal.add_context`; ``ids[0]`` stands at `first_place` in its request.
        PageHashError if a page is cached already. O(pages).
        """
        cdef Py_ssize_t i, bad, last = self.checked(ids).num
        cdef Py_ssize_t first = size_of(start, "num_cached_pages", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef Origin first_page = Origin(Digest(0, 0), 0, self.checked_context(context))
        cdef Range span = Range(<int32_t>first, 0)
        first_page.place = <int32_t>size_of(first_place, "first_place", 0, MAX_PAGES - ids.num)
        size_of(last, "num_full_pages", 0, len(chain))
        if last > first and not self.enable_caching:
            raise PageHashError("prefix caching is off")
        if self.pool.page_tokens != NULL and chain.page_size >= self.pool.tokens_width:
            kept = self.pool.tokens_width - 1
            raise ArgumentError(f"page size: got {chain.page_size} tokens, allowed: {kept}, as many as are kept")
        with chain.lock, self.lock:
            span.stop = <int32_t>min(last, chain.num)  # a chain that was lent is empty afterwards
            bad = enter_all(&self.pool, ids.ids, chain.digests, span, checked_group, first_page)
            for i in range(span.start, span.stop if bad < 0 else span.start):
                self.copy_tokens(ids.ids[i], chain, i * chain.page_size)
        if bad >= 0:
            raise PageHashError(f"page {ids.ids[bad]} (at {bad} of {ids.num}) has a hash already")

    cdef void copy_tokens(self, int32_t page_id, HashChain chain, Py_ssize_t start) noexcept:
        """Keep the tokens of a page that begins at token `start` of a chain, or none where the chain does not have them."""
        if chain.token_ids is not None and start + chain.page_size <= chain.token_ids.num:
            keep_tokens(&self.pool, page_id, chain.token_ids.ids + start, chain.page_size)
        else:
            keep_tokens(&self.pool, page_id, NULL, 0)

    cdef int32_t checked_context(self, object context) except -1:
        """A context as a number, which stays one, whatever it stands for."""
        cdef Py_ssize_t checked = size_of(context, "context")
        cdef int32_t num_contexts = max(1, self.read(&self.pool.journal.num_contexts)) if checked else 1
        if checked >= num_contexts:
            raise ArgumentError(f"context: got {context}, allowed: 0 to {num_contexts - 1}")
        return <int32_t>checked

"""Changes of the prefix index, for events."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.base cimport resize
from pagepool.core.pool.index cimport *
from pagepool.core.pool.store cimport *

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError

cdef struct Run:              # consecutive cached pages of a request
    Origin origin             # origin of the first page
    Digest parent_upper       # upper half of the parent's digest
    int32_t group
    int32_t num_pages
    int32_t num_tokens        # kept for each page

cdef struct Copied:           # entries, either with runs of their pages or with their groups alone
    Digest *keys              # [num], or [num, 2] with the upper half behind each key
    bint is_wide              # whether `keys` has the upper halves
    Run *runs                 # [num_runs]; NULL: there are `groups` instead
    int32_t *token_ids        # [num_tokens]
    int32_t *groups           # [num]
    Py_ssize_t num
    Py_ssize_t num_runs
    Py_ssize_t num_tokens


cdef bint continues(const Run *run, const Run *first, const Digest *last_key) noexcept nogil:
    """Whether a run that begins with `first` continues `run`, whose last page has the key `last_key`."""
    return (
        first.origin.place == run.origin.place + run.num_pages
        and memcmp(&first.origin.parent, last_key, sizeof(Digest)) == 0
        and first.group == run.group
        and first.origin.context == run.origin.context
        and first.num_tokens == run.num_tokens
    )


cdef inline void put_key(Digest key, Digest upper, Copied *copies) noexcept nogil:
    """Append a key. There must be room."""
    if copies.is_wide:
        copies.keys[2 * copies.num], copies.keys[2 * copies.num + 1] = key, upper
    else:
        copies.keys[copies.num] = key
    copies.num += 1


cdef void copy_key(Digest key, Digest upper, int32_t group, Copied *copies) noexcept nogil:
    """Append a key with its group. There must be room."""
    assert copies.runs == NULL and group >= 0
    copies.groups[copies.num] = group & ~FLAGS
    put_key(key, upper, copies)


cdef void copy_key_of(const Pool *pool, int32_t page_id, Copied *copies) noexcept nogil:
    copy_key(digest_of(&pool.pages[page_id]), upper_of(pool, page_id), pool.pages[page_id].group, copies)


cdef void copy_page(const Pool *pool, int32_t page_id, Copied *copies) noexcept nogil:
    """Append a cached page to the last run, or begin a new one. There must be room."""
    cdef const int32_t *kept = pool.page_tokens + page_id * pool.tokens_width
    cdef int32_t num_tokens = kept[0] if pool.tokens_width else 0
    cdef Py_ssize_t last = (copies.num - 1) * (1 + copies.is_wide)
    cdef Run run = Run(
        origin=pool.journal.notes[page_id].origin, parent_upper=Digest(lo=0, hi=0), group=pool.pages[page_id].group & ~FLAGS,
        num_pages=0, num_tokens=num_tokens,
    )
    if pool.uppers != NULL:
        run.parent_upper = uppers_of_parents(pool)[page_id]
    assert pool.pages[page_id].group != NO_GROUP and 0 <= num_tokens <= max(<Py_ssize_t>0, pool.tokens_width - 1)
    if not copies.num_runs or not continues(&copies.runs[copies.num_runs - 1], &run, &copies.keys[last]):
        copies.runs[copies.num_runs] = run
        copies.num_runs += 1
    copies.runs[copies.num_runs - 1].num_pages += 1
    put_key(digest_of(&pool.pages[page_id]), upper_of(pool, page_id), copies)
    if num_tokens:
        memcpy(copies.token_ids + copies.num_tokens, kept + 1, num_tokens * sizeof(int32_t))
        copies.num_tokens += num_tokens


cdef void copy_entry(const Pool *pool, int32_t page_id, Copied *copies) noexcept nogil:
    if copies.runs != NULL:
        copy_page(pool, page_id, copies)
    else:
        copy_key_of(pool, page_id, copies)


cdef void copy_new(const Pool *pool, Copied *copies) noexcept nogil:
    """Copy the first page of each new key, in the order in which the keys came."""
    cdef int32_t page_id = pool.journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        assert is_first(<Pool *>pool, page_id)
        copy_entry(pool, page_id, copies)
        page_id = pool.journal.notes[page_id].new.next
    assert copies.num == pool.journal.num_new


cdef void copy_removed(const Pool *pool, Copied *copies) noexcept nogil:
    cdef const Journal *journal = &pool.journal
    cdef Digest upper = Digest(lo=0, hi=0)
    cdef Py_ssize_t i
    assert journal.num_removed >= 0 and not (journal.is_cleared and journal.num_removed)
    for i in range(journal.num_removed):
        if pool.uppers != NULL:
            upper = uppers_of_removed(pool)[i]
        copy_key(journal.removed[i].key, upper, journal.removed[i].group, copies)


cdef int32_t find_parent(Pool *pool, int32_t page_id) noexcept nogil:
    """Return the first page with the key of a cached page's parent, or NULL_PAGE."""
    cdef const Origin *origin = &pool.journal.notes[page_id].origin
    cdef int32_t parent = find(pool, origin.parent, pool.pages[page_id].group & ~FLAGS) if origin.place else NULL_PAGE
    return parent if pool.journal.notes[parent].origin.place + 1 == origin.place else NULL_PAGE


cdef void copy_in_runs(Pool *pool, Links *links, Copied *copies) noexcept nogil:
    """Copy the first page of each key in as few runs as possible. `links` comes in with zeros for each page, and gets the order
    of pages.
    """
    cdef int32_t page_id, parent
    for page_id in range(1, pool.num_pages):
        parent = find_parent(pool, page_id) if is_first(pool, page_id) else NULL_PAGE
        if parent != NULL_PAGE and links[parent].next == NULL_PAGE:
            links[parent].next = page_id
            links[page_id].prev = parent
    for page_id in range(1, pool.num_pages):
        if links[page_id].prev == NULL_PAGE and is_first(pool, page_id):
            parent = page_id
            while parent != NULL_PAGE:
                copy_page(pool, parent, copies)
                parent = links[parent].next


cdef void copy_all_keys(Pool *pool, Copied *copies) noexcept nogil:
    cdef int32_t page_id
    for page_id in range(1, pool.num_pages):
        if is_first(pool, page_id):
            copy_key_of(pool, page_id, copies)


cdef void copy_kept_keys(Pool *pool, Copied *copies) noexcept nogil:
    """Copy the keys that `EntryJournal.list_kept_keys` returns."""
    cdef const Tier *tier = pool.tier
    cdef Digest upper = Digest(lo=0, hi=0)
    cdef const Origin *origin
    cdef int32_t page_id
    cdef Py_ssize_t i
    copy_all_keys(pool, copies)
    for page_id in range(1, pool.num_pages if is_journaled(pool) else 1):
        origin = &pool.journal.notes[page_id].origin
        if is_first(pool, page_id) and origin.place:
            copy_key(origin.parent, upper, pool.pages[page_id].group, copies)
    copy_removed(pool, copies)
    if tier != NULL:
        copy_all_keys(tier.pool, copies)
        copy_removed(tier.pool, copies)
        for i in range(tier.num):
            copy_key(tier.items[i].key, upper, tier.items[i].group, copies)


cdef void end_journal(Journal *journal) noexcept nogil:
    """Empty the journal, whose changes were copied."""
    cdef int32_t following, page_id = journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        following = journal.notes[page_id].new.next
        journal.notes[page_id].new = Links(prev=NOT_NEW, next=NOT_NEW)
        page_id = following
    journal.notes[NULL_PAGE].new = Links(prev=NULL_PAGE, next=NULL_PAGE)
    journal.num_new = journal.num_removed = 0
    journal.is_cleared = 0


cdef object frombuffer = np.frombuffer
cdef object NO_KEYS = np.frombuffer(b"", np.uint64)
cdef object NO_NUMBERS = np.frombuffer(b"", np.int32)


@cython.final
@cython.auto_pickle(False)
cdef class EntryCopies:
    """Copies of entries, with runs of their pages or with groups alone. Arrays share this memory; Python can only read it."""

    cdef char *memory
    cdef Py_ssize_t size            # bytes
    cdef bint has_runs
    cdef Copied copied

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.size, 1, flags)

    cdef bint make_room(self, Py_ssize_t num, Py_ssize_t tokens_width, bint is_wide) noexcept:
        """Allocate room for `num` entries; False if memory is short."""
        cdef Py_ssize_t num_halves = num * (1 + is_wide)
        self.copied.is_wide = is_wide
        self.size = num_halves * <Py_ssize_t>sizeof(Digest) + num * <Py_ssize_t>(
            sizeof(Run) + tokens_width * sizeof(int32_t) if self.has_runs else sizeof(int32_t)
        )
        self.memory = <char *>malloc(self.size)
        self.copied.keys = <Digest *>self.memory
        if self.has_runs:
            self.copied.runs = <Run *>(self.copied.keys + num_halves)
            self.copied.token_ids = <int32_t *>(self.copied.runs + num)
        else:
            self.copied.groups = <int32_t *>(self.copied.keys + num_halves)
        return self.memory != NULL

    cdef bint copy_all(self, Pool *pool) noexcept:
        """Copy all entries; False if memory is short."""
        cdef Links *links = <Links *>calloc(pool.num_pages if self.has_runs else 1, sizeof(Links))
        cdef bint has_room = links != NULL and self.make_room(pool.num_keys, pool.tokens_width, pool.uppers != NULL)
        if has_room:
            with nogil:
                if self.has_runs:
                    copy_in_runs(pool, links, &self.copied)
                else:
                    copy_all_keys(pool, &self.copied)
        free(links)
        return has_room

    cdef object array(self, object empty, const void *start, Py_ssize_t n):
        """Return an array of `n` values with the type of `empty`."""
        return frombuffer(self, empty.dtype, n, <const char *>start - self.memory) if n else empty

    cdef tuple to_tuple(self):
        """Return the copies in the form of `EntryJournal.list_entries`, for the pool or the tier."""
        cdef Run run
        cdef list runs = []
        keys = self.array(NO_KEYS, self.copied.keys, 2 * self.copied.num * (1 + self.copied.is_wide))
        if not self.has_runs:
            return keys, self.array(NO_NUMBERS, self.copied.groups, self.copied.num)
        for run in self.copied.runs[:self.copied.num_runs]:
            key = int_of_wide(WideDigest(key=run.origin.parent, upper=run.parent_upper))
            runs.append((key, run.origin.place, run.origin.context, run.group, run.num_pages, run.num_tokens))
        return keys, runs, self.array(NO_NUMBERS, self.copied.token_ids, self.copied.num_tokens)


cdef EntryCopies new_copies(bint has_runs):
    cdef EntryCopies copies = EntryCopies.__new__(EntryCopies)
    copies.has_runs = has_runs
    return copies


@cython.final
@cython.auto_pickle(False)
cdef class TakenChanges:
    """Changes in the index of a pool or tier since they were last taken, and optionally all entries."""

    cdef EntryCopies removed, new, entries

    cdef bint prepare(self, Pool *pool) noexcept:
        """Copy the entries, and allocate room for the changes; False if memory is short."""
        if not self.removed.make_room(pool.journal.num_removed, 0, pool.uppers != NULL):
            return False
        if not self.new.make_room(pool.journal.num_new, pool.tokens_width, pool.uppers != NULL):
            return False
        return self.entries is None or self.entries.copy_all(pool)

    cdef void take(self, Pool *pool) noexcept:
        """Copy the changes, and empty the journal."""
        cdef void *thread = let_others_run(pool.journal.num_new)
        copy_removed(pool, &self.removed.copied)
        copy_new(pool, &self.new.copied)
        end_journal(&pool.journal)
        go_on(thread)
        assert pool.journal.notes[NULL_PAGE].new.next == NULL_PAGE and pool.journal.notes[NULL_PAGE].new.prev == NULL_PAGE

    cdef tuple to_tuple(self):
        return self.removed.to_tuple(), self.new.to_tuple(), None if self.entries is None else self.entries.to_tuple()


cdef TakenChanges new_changes(bint has_runs, bint with_entries):
    cdef TakenChanges changes = TakenChanges.__new__(TakenChanges)
    changes.removed, changes.new = new_copies(False), new_copies(has_runs)
    changes.entries = new_copies(has_runs) if with_entries else None
    return changes


cdef Pool *journaled_tier(const Pool *pool) noexcept nogil:
    """Return the pool of the tier behind a pool; NULL without a tier, or if the tier has no journal."""
    return pool.tier.pool if pool.tier != NULL and is_journaled(pool.tier.pool) else NULL


cdef int32_t add_context(Journal *journal) noexcept:
    """Append a context with one holder, and return its number; -1 if memory is short."""
    cdef int32_t context = journal.num_contexts
    if context & (context - 1) == 0:  # the array is full
        if not resize(<void **>&journal.contexts, (2 * <size_t>context if context else 1) * sizeof(Context)):
            return -1
    journal.contexts[context] = Context(num_users=0, num_holders=1)
    journal.num_contexts += 1
    return context


cdef bint make_journal(Journal *journal, Py_ssize_t num_pages) noexcept:
    """Make an empty journal for `num_pages` pages; False if memory is short."""
    memset(journal, 0, sizeof(Journal))
    journal.notes = <Note *>malloc(num_pages * (sizeof(Note) + sizeof(Removal)))
    if journal.notes == NULL or add_context(journal) != 0:
        return False
    journal.removed = <Removal *>(journal.notes + num_pages)
    memset(journal.notes, NOT_NEW, num_pages * (sizeof(Note) + sizeof(Removal)))
    journal.notes[NULL_PAGE] = Note(
        origin=Origin(parent=Digest(lo=0, hi=0), place=0, context=0), new=Links(prev=NULL_PAGE, next=NULL_PAGE)
    )
    return True


cdef class EntryJournal:
    """Changes in the prefix index of a store, and of the tier behind it, for events. The lock of the store guards both."""

    cdef PageStore store
    cdef Pool *pool                 # pool of the store

    def __cinit__(self, PageStore store not None):
        self.store = store
        self.pool = &store.pool

    def __reduce__(self):
        raise ArgumentTypeError("a journal cannot be pickled")

    def start(self) -> None:
        """Record from now on which keys come and go, and the places of cached pages in their requests. 56 bytes a page, in the
        tier too. Touch this memory and the kept tokens' now, so that the first prompts do not wait for page faults.

        ArgumentError if there is a journal already, or if pages are held or cached, because their origin is unknown.
        """
        cdef Pool *pool = self.pool
        cdef Pool *tier = NULL if pool.tier == NULL else pool.tier.pool
        cdef Pool **pools = [pool, tier]
        cdef Journal[2] journals
        cdef int32_t num_held = 0, num_keys = 0
        cdef Py_ssize_t i, num_pools = 1 if tier == NULL else 2
        cdef bint has_room = True, has_journal = False
        for i in range(num_pools):
            has_room = make_journal(&journals[i], pools[i].num_pages) and has_room
        if has_room:
            with self.store.own_lock()[0]:
                has_journal = is_journaled(pool)
                for i in range(num_pools):
                    num_held += pools[i].num_pages - 1 - pools[i].num_free
                    num_keys += pools[i].num_keys
                if not has_journal and num_held == 0 and num_keys == 0:
                    if pool.tokens_width:
                        memset(pool.page_tokens, 0, pool.num_pages * pool.tokens_width * sizeof(int32_t))
                    for i in range(num_pools):
                        pools[i].journal, journals[i] = journals[i], pools[i].journal
                        assert pools[i].num_entries == 0 and is_journaled(pools[i])
        for journal in journals[:num_pools]:
            free(journal.notes)
            free(journal.contexts)
        if not has_room:
            raise MemoryError(f"the journal of {pool.num_pages} pages")
        if has_journal:
            raise ArgumentError("pool: got one that has a journal already, allowed: one without")
        if num_held or num_keys:
            raise ArgumentError(f"pool: got one with {num_held} held pages and {num_keys} cached prefixes, allowed: 0 and 0")

    def add_context(self) -> int:
        """Return a new context: a small int for the extra keys and the session of a request; 0 means neither. It is kept while
        cached pages or rows have it, or callers hold it. This caller holds it.
        """
        cdef int32_t context
        self.check_journaled()
        with self.store.own_lock()[0]:
            context = add_context(&self.pool.journal)
        if context < 0:
            raise MemoryError("contexts of pages")
        return context

    def hold_context(self, context) -> None:
        """Hold a context once more."""
        self.change_holders(context, 1)

    def release_context(self, context) -> None:
        """Release a context once. ArgumentError if it is not held."""
        self.change_holders(context, -1)

    cdef int change_holders(self, object context, int32_t change) except -1:
        cdef int32_t checked = self.store.checked_context(context)
        cdef Context *changed
        cdef bint is_right
        self.check_journaled()
        with self.store.own_lock()[0]:
            changed = &self.pool.journal.contexts[checked]
            assert changed.num_users >= 0 and changed.num_holders >= 0
            is_right = 0 <= changed.num_holders + <int64_t>change < INT32_MAX
            if is_right:
                changed.num_holders += change
        if not is_right:
            raise ArgumentError(f"context: got {context}, allowed: one that is held, and not by {INT32_MAX} others")
        return 0

    def kept_contexts(self):
        """Return the contexts in use as a set; None while taken changes are being made into events. O(contexts)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Journal *journal = &self.pool.journal
        cdef int32_t i
        cdef bint has_room, is_told
        with self.store.own_lock()[0]:
            is_told = journal.is_told
            has_room = ids.try_reserve(journal.num_contexts)
            for i in range(journal.num_contexts if has_room else 0):
                if journal.contexts[i].num_users or journal.contexts[i].num_holders:
                    ids.put(&i, 1)
        if not has_room:
            raise MemoryError("the contexts of a journal")
        return None if is_told else set(ids.to_list())

    @property
    def max_num_kept_keys(self) -> int:
        """Return the largest number of keys that `list_kept_keys` can return now."""
        cdef Py_ssize_t num
        with self.store.own_lock()[0]:
            num = self.count_kept_keys()
        return num

    cdef Py_ssize_t count_kept_keys(self) noexcept:
        """Return an upper bound for the kept keys: entries and their parents, removed entries, and pages in transfer."""
        cdef const Pool *pool = self.pool
        cdef Py_ssize_t num = pool.num_pages + pool.num_pages * is_journaled(pool) + pool.journal.num_removed
        if pool.tier != NULL:
            num += pool.tier.pool.num_pages + pool.tier.pool.journal.num_removed + pool.tier.num
        return num

    def list_kept_keys(self):
        """Return the keys whose names may still be needed, uint64 ``[2 n]``: keys of entries, of their parents, of removed
        entries and of pages in transfer. None while taken changes are being made into events. O(num_pages).
        """
        cdef EntryCopies kept = new_copies(False)
        cdef bint is_told, has_room
        with self.store.own_lock()[0]:
            is_told = self.pool.journal.is_told
            has_room = is_told or kept.make_room(self.count_kept_keys(), 0, False)
            if has_room and not is_told:
                with nogil:
                    copy_kept_keys(self.pool, &kept.copied)
        if not has_room:
            raise MemoryError("the keys of a prefix index")
        return None if is_told else kept.to_tuple()[0]

    def take_changes(self, bint with_entries=False) -> tuple:
        """Return the changes in the index since the last call: ``(is_cleared, changes, changes of the tier)``.

        If `is_cleared`, all entries were removed first, in the tier too. Changes are ``(removed, new, entries)``; removed
        entries went before new ones came. A key that came and went again is in neither. `entries` is the index afterwards, or
        None. Each of the three is as `list_entries` returns entries; removed ones, and all of the tier, have keys and groups
        alone. Names and contexts are kept until `end_report`. O(changes), or O(num_pages).
        """
        cdef TakenChanges changes = new_changes(True, with_entries), tier_changes = new_changes(False, with_entries)
        cdef Journal *journal = &self.pool.journal
        cdef Pool *tier
        cdef bint has_room, is_cleared = False
        self.check_journaled()
        with self.store.own_lock()[0]:
            tier = journaled_tier(self.pool)
            has_room = changes.prepare(self.pool) and (tier == NULL or tier_changes.prepare(tier))
            if has_room:
                is_cleared = journal.is_cleared
                changes.take(self.pool)
                if tier != NULL:
                    tier_changes.take(tier)
                journal.is_told = True
        if not has_room:
            raise MemoryError("copies of what changed in the prefix index")
        return is_cleared, changes.to_tuple(), tier_changes.to_tuple()

    def list_entries(self) -> tuple:
        """Return the entries of the index and of the tier. Names and contexts are kept until `end_report`. O(num_pages).

        Entries of the index are ``(keys, runs, token_ids)``: the lower and upper half of each key, uint64 ``[2 n]``, or four
        quarters of each digest, the lowest first, ``[4 n]``, in a store that keeps whole digests; the runs of consecutive
        pages, ``(key of the parent, place of the first page, context, group, pages, tokens kept for each)``; and the kept
        tokens, int32. Entries of the tier are ``(keys, groups)``, the groups int32 ``[n]``.
        """
        cdef EntryCopies entries = new_copies(True), tier_entries = new_copies(False)
        cdef Pool *tier
        cdef bint has_room
        self.check_journaled()
        with self.store.own_lock()[0]:
            tier = journaled_tier(self.pool)
            has_room = entries.copy_all(self.pool) and (tier == NULL or tier_entries.copy_all(tier))
            self.pool.journal.is_told = has_room
        if not has_room:
            raise MemoryError("copies of the prefix index")
        return entries.to_tuple(), tier_entries.to_tuple()

    def end_report(self) -> None:
        """Allow names and contexts of the taken changes to be forgotten, now that the events are built."""
        with self.store.own_lock()[0]:
            self.pool.journal.is_told = False

    cdef int check_journaled(self) except -1:
        if not self.store.read(&self.pool.journal.num_contexts):
            raise ArgumentError("pool: got one without a journal, allowed: one that has one")
        return 0

"""What enters and leaves the prefix index, for events."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.arguments cimport int_of_digest
from pagepool.core.ids cimport PageIds
from pagepool.core.index cimport find, is_first
from pagepool.core.notes cimport add_context, end_journal, is_journaled
from pagepool.core.platform cimport go_on, let_others_run
from pagepool.core.records cimport FLAGS, NOT_NEW, NULL_PAGE, Context, Journal, Links, Note, Origin, Pool, Removal, digest_of
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError

cdef struct Run:              # cached pages that follow one another in a request
    Origin origin             # of the first
    int32_t group
    int32_t num_pages
    int32_t num_tokens        # that were kept of each

cdef struct CopiedPages:
    Digest *keys              # [num_pages]
    Run *runs                 # [num_runs]
    int32_t *token_ids        # [num_tokens]
    Py_ssize_t num_pages
    Py_ssize_t num_runs
    Py_ssize_t num_tokens


cdef bint continues(const Run *run, const Run *first, const Digest *last_key) noexcept nogil:
    """Whether a run that begins with `first` goes on where `run` ends, with a page of the key `last_key`."""
    return (
        first.origin.place == run.origin.place + run.num_pages
        and memcmp(&first.origin.parent, last_key, sizeof(Digest)) == 0
        and first.group == run.group
        and first.origin.context == run.origin.context
        and first.num_tokens == run.num_tokens
    )


cdef void copy_page(const Pool *pool, int32_t page_id, CopiedPages *copies) noexcept nogil:
    """Append a cached page, for which there is room, to the last run or as one of its own."""
    cdef const int32_t *kept = pool.page_tokens + page_id * pool.tokens_width
    cdef int32_t num_tokens = kept[0] if pool.tokens_width else 0
    cdef Run run = Run(pool.journal.notes[page_id].origin, pool.pages[page_id].group & ~FLAGS, 0, num_tokens)
    if not copies.num_runs or not continues(&copies.runs[copies.num_runs - 1], &run, &copies.keys[copies.num_pages - 1]):
        copies.runs[copies.num_runs] = run
        copies.num_runs += 1
    copies.runs[copies.num_runs - 1].num_pages += 1
    copies.keys[copies.num_pages] = digest_of(&pool.pages[page_id])
    copies.num_pages += 1
    if num_tokens:
        memcpy(copies.token_ids + copies.num_tokens, kept + 1, num_tokens * sizeof(int32_t))
        copies.num_tokens += num_tokens


cdef void copy_new(const Pool *pool, CopiedPages *copies) noexcept nogil:
    """The first page of each new key, in the order in which these came."""
    cdef int32_t page_id = pool.journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        copy_page(pool, page_id, copies)
        page_id = pool.journal.notes[page_id].new.next


cdef int32_t find_parent(Pool *pool, int32_t page_id) noexcept nogil:
    """The first page with the key of a cached page's parent, or NULL_PAGE."""
    cdef const Origin *origin = &pool.journal.notes[page_id].origin
    cdef int32_t parent = find(pool, origin.parent, pool.pages[page_id].group & ~FLAGS) if origin.place else NULL_PAGE
    return parent if pool.journal.notes[parent].origin.place + 1 == origin.place else NULL_PAGE


cdef void copy_all(Pool *pool, Links *links, CopiedPages *copies) noexcept nogil:
    """The first page of each key, as few runs as can be: `links`, zeros for each page, will say what follows a page."""
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


cdef object frombuffer = np.frombuffer
cdef object NO_KEYS = np.frombuffer(b"", np.uint64)
cdef object NO_NUMBERS = np.frombuffer(b"", np.int32)


@cython.final
@cython.auto_pickle(False)
cdef class CopyMemory:
    """Copies of cached pages and of removed keys. Arrays share the memory. Read-only for Python."""

    cdef char *memory
    cdef Py_ssize_t size            # bytes
    cdef CopiedPages pages
    cdef Digest *removed_keys
    cdef int32_t *removed_groups
    cdef Py_ssize_t num_removed

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.size, 1, flags)

    cdef bint reserve(self, Py_ssize_t num_pages, Py_ssize_t tokens_width, Py_ssize_t num_removed) noexcept:
        """Allocate room for these numbers of pages and keys; False if memory is short."""
        cdef Py_ssize_t page_size = sizeof(Digest) + sizeof(Run) + tokens_width * sizeof(int32_t)
        self.size = num_pages * page_size + num_removed * <Py_ssize_t>(sizeof(Digest) + sizeof(int32_t))
        self.memory = <char *>malloc(self.size)
        if self.memory != NULL:
            self.pages.keys = <Digest *>self.memory
            self.removed_keys = self.pages.keys + num_pages
            self.pages.runs = <Run *>(self.removed_keys + num_removed)
            self.pages.token_ids = <int32_t *>(self.pages.runs + num_pages)
            self.removed_groups = self.pages.token_ids + num_pages * tokens_width
        return self.memory != NULL

    cdef object array(self, object empty, const void *start, Py_ssize_t n):
        """An array like `empty`, which it is if `n` is 0."""
        return frombuffer(self, empty.dtype, n, <const char *>start - self.memory) if n else empty

    cdef tuple list_pages(self):
        """What `EntryJournal.list_entries` returns."""
        cdef Run run
        cdef list runs = []
        for run in self.pages.runs[:self.pages.num_runs]:
            key = int_of_digest(run.origin.parent)
            runs.append((key, run.origin.place, run.origin.context, run.group, run.num_pages, run.num_tokens))
        keys = self.array(NO_KEYS, self.pages.keys, 2 * self.pages.num_pages)
        return keys, runs, self.array(NO_NUMBERS, self.pages.token_ids, self.pages.num_tokens)


cdef class EntryJournal:
    """What enters and leaves the prefix index of a store, for events."""

    cdef PageStore store
    cdef Pool *pool                 # of the store

    def __cinit__(self, PageStore store not None):
        self.store = store
        self.pool = &store.pool

    def __reduce__(self):
        raise ArgumentTypeError("a journal cannot be pickled")

    def start(self) -> None:
        """Note from now on which keys come and go, and where cached pages stand in their requests. 56 bytes a page. This memory
        and that of kept tokens is touched now, so that the first prompts need not wait for it.

        ArgumentError if there is a journal already, or if pages are held or cached: their origin is not known.
        """
        cdef Pool *pool = self.pool
        cdef Journal journal
        cdef Py_ssize_t n = pool.num_pages
        cdef int32_t num_held = 0, num_keys = 0
        cdef bint has_room, has_journal = False
        memset(&journal, 0, sizeof(journal))
        self.store.check_fixed()
        journal.notes = <Note *>malloc(n * (sizeof(Note) + sizeof(Removal)))
        has_room = journal.notes != NULL and add_context(&journal) == 0
        if has_room:
            journal.removed = <Removal *>(journal.notes + n)
            memset(journal.notes, NOT_NEW, n * (sizeof(Note) + sizeof(Removal)))
            journal.notes[NULL_PAGE] = Note(Origin(Digest(0, 0), 0, 0), Links(NULL_PAGE, NULL_PAGE))
            with self.store.lock:
                has_journal = is_journaled(pool)
                num_held, num_keys = pool.num_pages - 1 - pool.num_free, pool.num_keys
                if not has_journal and num_held == 0 and num_keys == 0:
                    if pool.tokens_width:
                        memset(pool.page_tokens, 0, n * pool.tokens_width * sizeof(int32_t))
                    pool.journal, journal = journal, pool.journal
        free(journal.notes)
        free(journal.contexts)
        if not has_room:
            raise MemoryError(f"the journal of {n} pages")
        if has_journal:
            raise ArgumentError("the pool has a journal already")
        if num_held or num_keys:
            raise ArgumentError(f"{num_held} pages are held and {num_keys} prefixes cached already, allowed: none")

    def add_context(self) -> int:
        """A new context: a small int that stands for what pages are hashed with besides their tokens; 0 stands for nothing. It
        is kept while cached pages or rows have it, or callers hold it. This caller holds it.
        """
        cdef int32_t context
        self.check_journaled()
        with self.store.lock:
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
        with self.store.lock:
            changed = &self.pool.journal.contexts[checked]
            is_right = 0 <= changed.num_holders + <int64_t>change < INT32_MAX
            if is_right:
                changed.num_holders += change
        if not is_right:
            raise ArgumentError(f"context: got {context}, allowed: one that is held, and not by {INT32_MAX} others")
        return 0

    def kept_contexts(self):
        """The contexts to keep, as a set; None while taken changes are being made into events. O(contexts)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Journal *journal = &self.pool.journal
        cdef int32_t i
        cdef bint has_room, is_told
        with self.store.lock:
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
        """The largest number of `list_kept_keys` there can be."""
        cdef Py_ssize_t num_removed = self.store.read(&self.pool.journal.num_removed)
        return 2 * <Py_ssize_t>self.pool.num_pages + num_removed if is_journaled(self.pool) else self.pool.num_pages

    def take_changes(self, bint with_entries=False) -> tuple:
        """What changed in the index since this was called last: ``(is_cleared, removed_keys, removed_groups, new, entries)``.

        If `is_cleared`, all entries were removed first. Then the removed keys, uint64 ``[2 n]`` with groups int32 ``[n]``, and
        then the new ones, as `list_entries` has them. A key that came and went again is in neither. `entries` are those of
        the index afterwards, or None. Names and contexts are kept until `end_report`. O(changes), or O(num_pages).
        """
        cdef CopyMemory changes = CopyMemory.__new__(CopyMemory)
        cdef CopyMemory entries = CopyMemory.__new__(CopyMemory)
        cdef Journal *journal = &self.pool.journal
        cdef Py_ssize_t i
        cdef void *thread
        cdef bint has_room, is_cleared = False
        self.check_journaled()
        with self.store.lock:
            has_room = changes.reserve(journal.num_new, self.pool.tokens_width, journal.num_removed)
            has_room = has_room and (not with_entries or self.copy_entries_to(entries))
            if has_room:
                for i in range(journal.num_removed):
                    changes.removed_keys[i], changes.removed_groups[i] = journal.removed[i].key, journal.removed[i].group
                changes.num_removed = journal.num_removed
                thread = let_others_run(journal.num_new)
                copy_new(self.pool, &changes.pages)
                go_on(thread)
                is_cleared = journal.is_cleared
                end_journal(journal)
                journal.is_told = True
        if not has_room:
            raise MemoryError("copies of what changed in the prefix index")
        return (
            is_cleared,
            changes.array(NO_KEYS, changes.removed_keys, 2 * changes.num_removed),
            changes.array(NO_NUMBERS, changes.removed_groups, changes.num_removed),
            changes.list_pages(),
            entries.list_pages() if with_entries else None,
        )

    def list_entries(self) -> tuple:
        """The keys of the index, uint64 ``[2 n]``, each its lower half and its upper; the runs of pages that follow one another
        in a request, ``(key of the parent, place of the first page, context, group, pages, tokens kept of each)``; and these
        tokens, int32. Changes nothing. Names and contexts are kept until `end_report`. O(num_pages).
        """
        cdef CopyMemory entries = CopyMemory.__new__(CopyMemory)
        cdef bint has_room
        self.check_journaled()
        with self.store.lock:
            has_room = self.copy_entries_to(entries)
            self.pool.journal.is_told = has_room
        if not has_room:
            raise MemoryError("copies of the prefix index")
        return entries.list_pages()

    def end_report(self) -> None:
        """Let names and contexts of the taken changes be forgotten: the events have been built."""
        with self.store.lock:
            self.pool.journal.is_told = False

    cdef int check_journaled(self) except -1:
        if not self.store.read(&self.pool.journal.num_contexts):
            raise ArgumentError("the pool has no journal")
        return 0

    cdef bint copy_entries_to(self, CopyMemory copies) noexcept:
        """Copy all entries; False where memory is short."""
        cdef Links *links = <Links *>calloc(self.pool.num_pages, sizeof(Links))
        cdef bint has_room = links != NULL and copies.reserve(self.pool.num_keys, self.pool.tokens_width, 0)
        if has_room:
            with nogil:
                copy_all(self.pool, links, &copies.pages)
        free(links)
        return has_room

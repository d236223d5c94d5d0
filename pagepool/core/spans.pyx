"""Spans of tokens of a request or a running row, and the cached pages in them."""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t

from pagepool.core.arguments cimport size_of
from pagepool.core.batch cimport digests_of, held_by
from pagepool.core.holdings cimport Held, Holding
from pagepool.core.index cimport find, has_key
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Pool
from pagepool.core.request_pages cimport checked_hits
from pagepool.core.rules cimport MAX_TOKENS, is_state
from pagepool.core.siphash cimport Digest

from pagepool.errors import ArgumentError, ArgumentTypeError


cdef struct Listed:           # pages of a group
    const int32_t *ids
    Py_ssize_t num
    Range places              # those within a span


cdef Py_ssize_t list_cached(
    Pool *pool, const Group *group, const Listed *listed, const Digest *digests, PageIds found
) noexcept:
    """List those of a group's pages, or of a state's checkpoints, that are cached under their digests. Returns how many pages
    are not, null pages aside.
    """
    cdef Py_ssize_t num_missed = 0
    cdef int32_t i, page_id
    cdef Digest key
    for i in range(listed.places.start, listed.places.stop):
        key = digests[(i + 1) * group.stride - 1]
        page_id = find(pool, key, group.id) if is_state(&group.rules) else listed.ids[i]
        if page_id != NULL_PAGE and has_key(&pool.pages[page_id], key, group.id):
            found.put(&page_id, 1)
        else:
            num_missed += i < listed.num and listed.ids[i] != NULL_PAGE
    return num_missed


@cython.auto_pickle(False)
cdef class TokenSpan:
    """Pages of `store`: those of a request, or row, that lie wholly within its tokens ``[start, stop)``.

    A `stop` of None is the end of its tokens.
    """

    def __cinit__(self, PageStore store not None, start=0, stop=None):
        self.store = store
        self.start = size_of(start, "start", 0, INT64_MAX)
        self.stop = INT64_MAX if stop is None else size_of(stop, "stop", self.start, INT64_MAX)

    def __reduce__(self):
        raise ArgumentTypeError("a span of tokens cannot be pickled")

    cdef Range pages_of(self, const Group *group, Py_ssize_t num_pages, Py_ssize_t num_digests) noexcept:
        """The places of a group's pages: of `num_pages` those that have digests. Of a state those of its checkpoints."""
        cdef int64_t size = group.rules.entry_size
        cdef int64_t start = (min(self.start, <int64_t>MAX_TOKENS) + size - 1) // size
        cdef int64_t stop = min(min(self.stop, <int64_t>MAX_TOKENS) // size, num_digests // group.stride)
        if group.id == NO_GROUP:
            return Range(0, 0)
        return Range(<int32_t>start, <int32_t>(stop if is_state(&group.rules) else min(stop, num_pages)))

    cdef tuple checked_pages(self, CacheGroups groups, HashChain chain, object ids, PageIds found):
        """`ids` as pages of each group, with room in `found` for all of them, and for the checkpoints of states."""
        cdef Holding holding = Holding(groups.groups, NULL, groups.num)
        cdef tuple checked = checked_hits(self.store, ids, &holding)
        cdef PageIds listed
        cdef Py_ssize_t g, num_all = 0
        for g in range(len(checked)):
            listed = checked[g]
            num_all += chain.num // groups.groups[g].stride if is_state(&groups.groups[g].rules) else listed.num
        found.reserve(num_all)
        return checked

    cdef Py_ssize_t list_pages(self, CacheGroups groups, HashChain chain, tuple checked, PageIds found) noexcept:
        """List those of checked pages that are cached under the digests of the chain. Returns how many are not. Chain and pool
        are locked.
        """
        cdef const Group *group
        cdef PageIds listed
        cdef Py_ssize_t g, num_missed = 0
        cdef Listed pages
        for g in range(len(checked)):
            group, listed = &groups.groups[g], checked[g]
            pages = Listed(listed.ids, listed.num, self.pages_of(group, listed.num, chain.num))
            num_missed += list_cached(&self.store.pool, group, &pages, chain.digests, found)
        return num_missed

    cdef bint list_row(self, RowMemory rows, Py_ssize_t row, PageIds found) noexcept:
        """List the cached pages of a row of a locked batch, none if it is not admitted. False where memory is short."""
        cdef const Group *group
        cdef Held *held
        cdef Py_ssize_t g
        cdef Range places
        cdef Listed listed
        for g in range(rows.batch.num_groups if rows.batch.states[row].is_admitted else 0):
            group, held = &rows.batch.groups[g], held_by(&rows.batch, row, g)
            places = self.pages_of(group, held.num_pages, rows.batch.states[row].num_hashed)
            if not found.try_reserve(max(0, places.stop - places.start)):
                return False
            listed = Listed(held.ids, held.num_pages, places)
            list_cached(&self.store.pool, group, &listed, digests_of(&rows.batch, row), found)
        return True

    cdef Py_ssize_t checked_row(self, RowMemory rows, object row) except -1:
        cdef Py_ssize_t checked = rows.checked_row(row)
        if rows.store is not self.store:
            raise ArgumentError("rows: got those of another pool")
        return checked

    cdef int check_admitted(self, Py_ssize_t row, bint is_admitted) except -1:
        if not is_admitted:
            raise ArgumentError(f"row {row} is not admitted")
        return 0

# One list of moves: what an engine has to move before its next step, taken under one number. Copies, loads and saves belong to
# the pool, writes of states to a batch or to a manager's requests.

cimport cython

from pagepool.core.tier.tier cimport *


@cython.final
cdef class PageCopies:
    cdef readonly object src, dst, group


@cython.final
cdef class StateWrites:
    cdef readonly object rows, request_ids, num_tokens, page_ids, group


@cython.final
cdef class Moves:
    cdef readonly int64_t number
    cdef readonly PageCopies copies, loads, saves
    cdef readonly StateWrites writes


cdef StateWrites NO_WRITES

cdef StateWrites writes_of(object columns)
cdef Moves take_with(PageStore store, StateWrites writes, int64_t *last_step)

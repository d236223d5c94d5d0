# The cache groups of a model.

cimport cython

from pagepool.core.holding.boundaries cimport *
from pagepool.core.pool cimport PageStore
from pagepool.core.values cimport HashChain, PageIds, as_list, as_long_long, as_page_ids, new_ids, size_of

cdef struct Kinds:            # groups of one kind have equal rules, or hit leading pages alike
    const Group **items       # [num] first group of each kind; full attention first: it bounds all hits at the least cost
    Py_ssize_t num
    Py_ssize_t num_hit_hashes  # hits are multiples of this many hashes; 0: nothing hits, because a group is never cached
    int32_t num_hit_tokens    # tokens of these hashes
    bint use_eagle            # the last page of a hit is dropped
    bint has_answers          # some group has a reference window, so that the end of a prompt matters
    Py_ssize_t num_later_drops  # with eagle: kinds of windows, behind full attention in `items`; each drops one page


@cython.final
cdef class CacheGroups:
    cdef Group *groups
    cdef Py_ssize_t num
    cdef Kinds kinds
    cdef int32_t num_banks          # banks that a store needs for the groups
    cdef Boundaries boundaries      # template of a new request

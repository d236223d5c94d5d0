# The cache groups of a model.

cimport cython

from pagepool.core.holding.boundaries cimport Boundaries
from pagepool.core.holding.rules cimport Group

cdef struct Kinds:            # of groups, those that hit alike together
    const Group **items       # [num] the first group of each kind; full attention first: it bounds the others at the least cost
    Py_ssize_t num
    Py_ssize_t num_hit_hashes  # of which hits have a multiple; 0: nothing hits, because a group is never cached
    bint use_eagle            # the last page of a hit is dropped
    Py_ssize_t num_later_drops  # with eagle: kinds of windows behind full attention, each drops one page


@cython.final
cdef class CacheGroups:
    cdef Group *groups
    cdef Py_ssize_t num
    cdef Kinds kinds
    cdef Boundaries boundaries      # of a request about which nothing is known

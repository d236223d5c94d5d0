# The ghost of a pool: what its policy remembers of a sample of the pages that were evicted.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memmove

from pagepool.core.records cimport SET_SIZE, Ghost, GhostEntry
from pagepool.core.siphash cimport Digest

cdef enum:
    SAMPLE_INTERVAL = 8       # keys, of which one is remembered: a power of 2


cdef inline uint64_t hash_key(Digest key, int32_t group) noexcept nogil:
    """The hash of a key and group: the same in each process, so that a policy's choices are."""
    cdef uint64_t word = key.lo ^ key.hi * <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>(group + 1) * <uint64_t>0xC2B2AE3D27D4EB4F
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    return word ^ word >> 32


cdef inline bint is_sampled(uint64_t word) noexcept nogil:
    """Whether a key with this hash is remembered."""
    return word & (SAMPLE_INTERVAL - 1) == 0


cdef inline uint32_t tag_in_ghost(uint64_t word) noexcept nogil:
    return <uint32_t>(word >> 32) or 1


cdef inline GhostEntry *set_of(const Ghost *ghost, uint32_t tag) noexcept nogil:
    return ghost.entries + SET_SIZE * (<uint64_t>tag * ghost.num_sets >> 32)


cdef inline GhostEntry *find_ghost(const Ghost *ghost, uint64_t word) noexcept nogil:
    """The entry of a key, or NULL."""
    cdef uint32_t tag = tag_in_ghost(word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i
    for i in range(SET_SIZE):
        if entries[i].tag == tag:
            return &entries[i]
    return NULL


cdef inline void remember(Ghost *ghost, uint64_t word, uint32_t mark) noexcept nogil:
    """Add a key as the last of its set. It takes the place of its own entry, if nobody asked for the key since it was evicted
    before, else of the first that left a gap, else of the oldest.
    """
    cdef uint32_t tag = tag_in_ghost(word)
    cdef GhostEntry *own = find_ghost(ghost, word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i = 0 if own == NULL else own - entries
    while own == NULL and i < SET_SIZE - 1 and entries[i].tag:
        i += 1
    memmove(entries + 1, entries, i * sizeof(GhostEntry))
    entries[0] = GhostEntry(tag, mark)

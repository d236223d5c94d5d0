# Keys that move the hits of waiting requests. A pool has a list of `AwaitedKeys`, one for each waiting queue in front of it. It
# tells each of them when a page is cached under a key, and when such a page loses its entry. The caller holds the store's lock.
#
# Always:
#
# * Each waiter has `NUM_KEYS_EACH` places for keys. A place with a key is in the bucket of this key, once.
# * `moved` lists waiters whose keys came or went since they were taken out of it, each once.

from libc.stdint cimport int32_t, uint64_t, uint8_t

from pagepool.core.base cimport Digest, raw_free

cdef enum:
    NUM_KEYS_EACH = 4         # a page that hits and the next one, in the pool, and with its tier
    NO_PLACE = -1             # end of a bucket
    NO_KEY = -2               # `next` of a place without a key

cdef struct AwaitedKey:
    Digest key
    int32_t group
    int32_t prev              # places in the bucket; NO_PLACE at its ends, NO_KEY in a place without a key
    int32_t next

cdef struct AwaitedKeys

cdef struct AwaitedKeys:
    AwaitedKey *places        # [capacity, NUM_KEYS_EACH]
    int32_t *moved            # [num_moved], and room for `capacity`
    uint8_t *has_moved        # [capacity]
    int32_t *buckets          # [num_buckets] first places
    Py_ssize_t capacity       # waiters
    Py_ssize_t num_moved
    Py_ssize_t num_buckets    # a power of two
    uint64_t multiplier       # odd and secret: nobody can choose keys of one bucket
    int32_t shift             # shifts a product to its bucket
    uint8_t is_closed         # its queue is gone, and the pool may free it
    # Notes a key in this and all further ones. Calls through a pointer keep its code out of the loops that cache and evict.
    void (*note)(AwaitedKeys *awaited, Digest key, int32_t group) noexcept nogil
    AwaitedKeys *next         # next one in the pool's list


cdef inline Py_ssize_t bucket_of(const AwaitedKeys *awaited, Digest key) noexcept nogil:
    return <Py_ssize_t>((key.lo * awaited.multiplier) >> awaited.shift)


cdef inline void note_moved(AwaitedKeys *awaited, int32_t waiter) noexcept nogil:
    """Note that the hits of a waiter may have moved."""
    assert 0 <= waiter < awaited.capacity
    if not awaited.has_moved[waiter]:
        awaited.has_moved[waiter] = True
        awaited.moved[awaited.num_moved] = waiter
        awaited.num_moved += 1
        assert awaited.num_moved <= awaited.capacity


cdef inline void forget_key(AwaitedKeys *awaited, int32_t at) noexcept nogil:
    """Take the key from a place, if it has one."""
    cdef AwaitedKey *place = &awaited.places[at]
    if place.next == NO_KEY:
        return
    if place.prev == NO_PLACE:
        assert awaited.buckets[bucket_of(awaited, place.key)] == at
        awaited.buckets[bucket_of(awaited, place.key)] = place.next
    else:
        awaited.places[place.prev].next = place.next
    if place.next != NO_PLACE:
        awaited.places[place.next].prev = place.prev
    place.prev = place.next = NO_KEY


cdef inline void await_key(AwaitedKeys *awaited, int32_t at, Digest key, int32_t group) noexcept nogil:
    """Give a place another key."""
    cdef AwaitedKey *place = &awaited.places[at]
    cdef int32_t *bucket = &awaited.buckets[bucket_of(awaited, key)]
    if place.next != NO_KEY and place.key.lo == key.lo and place.key.hi == key.hi and place.group == group:
        return
    forget_key(awaited, at)
    place[0] = AwaitedKey(key=key, group=group, prev=NO_PLACE, next=bucket[0])
    if bucket[0] != NO_PLACE:
        awaited.places[bucket[0]].prev = at
    bucket[0] = at


cdef inline void free_awaited(AwaitedKeys *awaited) noexcept nogil:
    """Free one of a pool's `AwaitedKeys`, which is in no list."""
    raw_free(awaited.places)
    raw_free(awaited.moved)
    raw_free(awaited.has_moved)
    raw_free(awaited.buckets)
    raw_free(awaited)


cdef inline void free_closed(AwaitedKeys **link, bint frees_all) noexcept nogil:
    """Take those whose queue is gone out of a list, or all, and free them."""
    cdef AwaitedKeys *awaited
    while link[0] != NULL:
        awaited = link[0]
        if frees_all or awaited.is_closed:
            link[0] = awaited.next
            free_awaited(awaited)
        else:
            link = &awaited.next

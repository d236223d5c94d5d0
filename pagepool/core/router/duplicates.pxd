# Duplicates: a worker's copies of a block beyond the first.
#
# They are rare, so the index has a bit for each block of a worker, and this hash table with linear probing counts its
# duplicates. Always:
#
# * A slot is empty exactly when its key is 0. A taken slot counts one copy or more.
# * At least a quarter of the slots is empty, so that each search ends.
# * No slot from a key's home to the slot with the key is empty: deletion moves later keys back.

from libc.stdint cimport uint64_t

from pagepool.core.base cimport raw_calloc, raw_free

cdef enum:
    MIN_DUPLICATE_SLOTS = 256  # slots, at least

cdef struct Duplicate:        # duplicates of a block at a worker
    uint64_t key              # entry, group, medium and worker; 0: empty
    uint64_t num              # copies beyond the first

cdef struct DuplicateTable:
    Duplicate *slots          # [num_slots]
    Py_ssize_t num_slots
    Py_ssize_t num            # taken slots
    uint64_t multiplier


cdef inline Py_ssize_t _home_of_key(const DuplicateTable *table, uint64_t key) noexcept nogil:
    return <Py_ssize_t>(((key * table.multiplier) >> 32) * <uint64_t>table.num_slots >> 32)


cdef inline Py_ssize_t _duplicate_behind(const DuplicateTable *table, Py_ssize_t slot) noexcept nogil:
    return 0 if slot + 1 == table.num_slots else slot + 1


cdef inline Py_ssize_t find_duplicate(const DuplicateTable *table, uint64_t key) noexcept nogil:
    """Find the slot of a key, or the empty slot that ends the search. The table has slots."""
    cdef Py_ssize_t slot = _home_of_key(table, key)
    assert key and table.num < table.num_slots
    while table.slots[slot].key not in (0, key):
        slot = _duplicate_behind(table, slot)
    return slot


cdef inline void _empty_duplicate(DuplicateTable *table, Py_ssize_t slot) noexcept nogil:
    """Empty a slot, and move back the later keys whose search passes it."""
    cdef Py_ssize_t home, other = slot
    assert table.num > 0 and table.slots[slot].key
    while True:
        other = _duplicate_behind(table, other)
        if table.slots[other].key == 0:
            break
        home = _home_of_key(table, table.slots[other].key)
        if (home <= slot or home > other) if slot < other else (other < home <= slot):
            table.slots[slot] = table.slots[other]
            slot = other
    table.slots[slot] = Duplicate(key=0, num=0)
    table.num -= 1


cdef inline int put_duplicate(DuplicateTable *table, uint64_t key, uint64_t num) noexcept nogil:
    """Set the number of duplicates under a key, and return the change in taken slots: -1, 0 or 1. There is room."""
    cdef Py_ssize_t slot = find_duplicate(table, key)
    cdef bint is_new = table.slots[slot].key == 0
    if num:
        table.slots[slot] = Duplicate(key=key, num=num)
        table.num += is_new
        assert table.num + table.num // 3 + 2 <= table.num_slots
        return is_new
    if is_new:
        return 0
    _empty_duplicate(table, slot)
    return -1


cdef inline bint _resize_duplicates(DuplicateTable *table, Py_ssize_t num_slots) noexcept nogil:
    """Resize the table to hold all of its keys; return False, with nothing changed, if memory is short."""
    cdef DuplicateTable resized = table[0]
    cdef Duplicate taken
    resized.num_slots = num_slots
    resized.slots = <Duplicate *>raw_calloc(num_slots, sizeof(Duplicate))
    if resized.slots == NULL:
        return False
    for taken in table.slots[:table.num_slots]:
        if taken.key:
            resized.slots[find_duplicate(&resized, taken.key)] = taken
    assert resized.num == table.num < num_slots
    raw_free(table.slots)
    table[0] = resized
    return True


cdef inline Py_ssize_t _slots_for(Py_ssize_t num) noexcept nogil:
    return max(num + num // 3 + 2, <Py_ssize_t>MIN_DUPLICATE_SLOTS)


cdef inline bint reserve_duplicates(DuplicateTable *table, Py_ssize_t num_more) noexcept nogil:
    """Make room for more keys; return False if memory is short."""
    cdef Py_ssize_t num_slots = _slots_for(table.num + num_more)
    return num_slots <= table.num_slots or _resize_duplicates(table, max(num_slots, 2 * _slots_for(table.num)))


cdef inline void trim_duplicates(DuplicateTable *table, Py_ssize_t num_kept) noexcept nogil:
    """Free slots that no key needs, except `num_kept` spare ones."""
    cdef Py_ssize_t num_slots = 2 * _slots_for(table.num) + num_kept
    if table.num_slots > 2 * num_slots:
        _resize_duplicates(table, num_slots)

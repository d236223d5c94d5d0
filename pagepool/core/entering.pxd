# Pages of running rows that got full: hashed, and entered in the prefix index before the call ends.

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcmp

from pagepool.core.batch cimport (
    NUM_ENTRIES, Batch, Entry, ExtraKey, Group, Held, Link, Provenance, digests_of, ids_of, tokens_of,
)
from pagepool.core.index cimport enter, home_of, keep_tokens
from pagepool.core.notes cimport is_journaled, note_entry
from pagepool.core.platform cimport fetch
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Origin
from pagepool.core.siphash cimport Digest, hash_after, hash_two_after


cdef inline Digest hash_page_of(
    const Batch *batch, Py_ssize_t row, Py_ssize_t page, Digest parent, const ExtraKey **next_key
) noexcept nogil:
    """The digest of a row's page behind `parent`; `next_key` goes on to the first extra key that is not before the page."""
    cdef const ExtraKey *key = next_key[0]
    while key != NULL and key.data != NULL and key.page < page:
        key += 1
    next_key[0] = key
    if key != NULL and key.data != NULL and key.page == page:
        parent = hash_after(batch.extra_key, parent, key.data, key.size)
    return hash_after(
        batch.key,
        parent,
        <const uint8_t *>(tokens_of(batch, row) + page * batch.hash_page_size),
        batch.hash_page_size * sizeof(int32_t),
    )


cdef inline void hash_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, as far as they are not yet."""
    cdef Digest *digests = digests_of(batch, row)
    cdef const ExtraKey *key = batch.extra_keys[row]
    cdef Py_ssize_t i = batch.states[row].num_hashed
    cdef Digest parent = digests[i - 1] if i else Digest(0, 0)
    while (i + 1) * batch.hash_page_size <= num_tokens:
        parent = hash_page_of(batch, row, i, parent, &key)
        digests[i] = parent
        i += 1
    batch.states[row].num_hashed = <int32_t>i


cdef inline Py_ssize_t count_hashed_before(
    const Batch *batch, Py_ssize_t row, const int32_t *token_ids, Py_ssize_t n
) noexcept nogil:
    """How many pages of `token_ids` a free row has hashed already, because its last request began with them."""
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef Py_ssize_t i, size = batch.hash_page_size
    cdef Py_ssize_t num_pages = min(<Py_ssize_t>batch.states[row].num_hashed, n // size)
    for i in range(num_pages):
        if memcmp(tokens + i * size, token_ids + i * size, size * sizeof(int32_t)) != 0:
            return i
    return num_pages


cdef inline void hash_later(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """`hash_row`, but a single page, which is what decoding fills, waits for another row's: two are hashed at once."""
    cdef Py_ssize_t i = batch.states[row].num_hashed
    cdef Digest *digests = digests_of(batch, row)
    cdef Link *link = &batch.links[batch.num_links]
    if batch.extra_keys[row] != NULL or batch.num_links == NUM_ENTRIES or num_tokens // batch.hash_page_size != i + 1:
        hash_row(batch, row, num_tokens)
    else:
        link.parent = digests[i - 1] if i else Digest(0, 0)
        link.digest = &digests[i]
        link.tokens = <const uint8_t *>(tokens_of(batch, row) + i * batch.hash_page_size)
        batch.num_links += 1
        batch.states[row].num_hashed += 1


cdef inline void hash_waiting(Batch *batch) noexcept nogil:
    """Hash the pages that wait for it, two at a time; the last of an odd number twice."""
    cdef const uint8_t *tokens[2]
    cdef Digest[2] parents
    cdef Digest[2] digests
    cdef Py_ssize_t i, lane
    for i in range(0, batch.num_links, 2):
        for lane in range(2):
            parents[lane] = batch.links[min(i + lane, batch.num_links - 1)].parent
            tokens[lane] = batch.links[min(i + lane, batch.num_links - 1)].tokens
        hash_two_after(batch.key, parents, tokens, batch.hash_page_size * sizeof(int32_t), digests)
        for lane in range(2):
            batch.links[min(i + lane, batch.num_links - 1)].digest[0] = digests[lane]
    batch.num_links = 0


cdef inline void enter_waiting(Batch *batch) noexcept nogil:
    """Hash and enter the pages that wait for it, in order. A page that has an entry keeps it. The slots of the
    index, likely far away, are all fetched before the first is read.
    """
    cdef const Entry *entry
    cdef Py_ssize_t i
    hash_waiting(batch)
    for i in range(batch.num_entries):
        fetch(home_of(batch.pool, batch.entries[i].key[0], batch.entries[i].group))
    for i in range(batch.num_entries):
        entry = &batch.entries[i]
        if batch.pool.pages[entry.page_id].group == NO_GROUP:
            enter(batch.pool, entry.page_id, entry.key[0], entry.group)
            if is_journaled(batch.pool):
                note_entry(batch.pool, entry.page_id, origin_from(&batch.provenances[i]))
            keep_tokens(batch.pool, entry.page_id, entry.tokens, entry.num_tokens)
    batch.num_entries = 0


cdef inline Origin origin_from(const Provenance *provenance) noexcept nogil:
    cdef Digest parent = Digest(0, 0) if provenance.parent == NULL else provenance.parent[0]
    return Origin(parent, provenance.place, provenance.context)


cdef inline void enter_later(Batch *batch, Entry entry) noexcept nogil:
    """Enter a page before the call ends. Its record, likely far away, is fetched meanwhile."""
    fetch(&batch.pool.pages[entry.page_id])
    batch.entries[batch.num_entries] = entry
    batch.num_entries += 1


cdef inline void note_later(Batch *batch, const Group *group, Py_ssize_t row, int32_t place) noexcept nogil:
    """Remember where the page of a row that is to be entered next comes from."""
    cdef int32_t page_id = ids_of(group, row)[place]
    cdef const Digest *parent = digests_of(batch, row) + place * group.stride - 1 if place else NULL
    batch.provenances[batch.num_entries] = Provenance(parent, place, batch.contexts[row])
    fetch(&batch.pool.journal.notes[page_id])
    fetch(batch.pool.page_tokens + page_id * batch.pool.tokens_width)


cdef inline void enter_full_pages(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, and have them entered."""
    cdef const Group *group
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t size, page_id
    if not batch.hash_page_size:
        return
    if (batch.states[row].num_hashed + <int64_t>1) * batch.hash_page_size <= num_tokens:
        hash_later(batch, row, num_tokens)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        held = &group.held[row]
        size = group.rules.page_size
        while group.id != NO_GROUP and (held.num_cached + <int64_t>1) * size <= num_tokens:
            page_id = ids_of(group, row)[held.num_cached]
            if page_id != NULL_PAGE:
                if batch.num_entries == NUM_ENTRIES:
                    enter_waiting(batch)
                if is_journaled(batch.pool):
                    note_later(batch, group, row, held.num_cached)
                enter_later(
                    batch,
                    Entry(
                        digests_of(batch, row) + (held.num_cached + 1) * group.stride - 1,
                        tokens_of(batch, row) + held.num_cached * size,
                        size,
                        page_id,
                        group.id,
                    ),
                )
            held.num_cached += 1

# Lineage: how runs go on from cached pages, and which checkpoints they leave behind.
#
# A run (see checkpoints.pxd) that continues from a checkpoint and makes another one leaves the first one, and those before it:
# the next turn of the chat continues from the last one. Checkpoints at junctions are never left.
#
# `Pool.children` has a word for each cached page of tokens. Its lowest bit says that a run ended with the page. The other bits
# are bits of the key of the page that was cached last behind it, or, once it was loaded, of the page behind it in that hit; 0
# if there was none. So a look-up whose hits end with the page sees whether prompts part there.
#
# Always: the words of checkpoints and of pages without an entry are never read.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagepool.core.pool.queue cimport *

cdef enum:
    RUN_END = 1               # bit in a word of `Pool.children`
    MAX_STEPS = 64            # longest walk along the checkpoints of a run


cdef inline uint32_t child_word(Digest key) noexcept nogil:
    """Return the bits of a child's key; never 0."""
    return <uint32_t>(key.lo >> 32) & ~<uint32_t>RUN_END or 2


cdef inline void note_child(Pool *pool, int32_t page_id, int32_t parent, Digest key) noexcept nogil:
    """Note a page that is being cached under a key in its parent, the page before it; the null page: there is none."""
    pool.children[page_id] = 0
    if parent != NULL_PAGE and pool.pages[parent].group != NO_GROUP:
        pool.children[parent] = pool.children[parent] & RUN_END | child_word(key)


cdef inline void restore_child(Pool *pool, int32_t page_id, Digest key) noexcept nogil:
    """Note the key of the page that comes next in the run with which a page is loaded; other ways to go on are forgotten."""
    pool.children[page_id] = child_word(key)


cdef inline bint parts_at(const Pool *pool, int32_t page_id, const Digest *child) noexcept nogil:
    """Whether runs went on from a page of tokens in another way than with `child`; NULL: the next page is not known yet."""
    cdef uint32_t word = pool.children[page_id] & ~<uint32_t>RUN_END
    return word != 0 and child != NULL and word != child_word(child[0])


cdef inline bint ends_run(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a run ended with a page of tokens."""
    return pool.children[page_id] & RUN_END


cdef inline int32_t _valid_page(const Pool *pool, int32_t page_id, uint64_t key) noexcept nogil:
    """Return a checkpoint's page if it still has the checkpoint, else the null page."""
    if page_id == NULL_PAGE or pool.pages[page_id].group == NO_GROUP or pool.pages[page_id].key_lo != key:
        return NULL_PAGE
    return page_id


cdef inline int32_t _page_before(const Pool *pool, const CheckpointNote *note) noexcept nogil:
    """Return the checkpoint before another one in its run; the null page: it is not cached any more, or there was none."""
    return _valid_page(pool, note.prev, note.prev_key)


cdef inline Checkpoints *checkpoints_of(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.banks[bank_of(pool, page_id)].checkpoints


cdef inline void _move_to_class(Pool *pool, Checkpoints *checkpoints, int32_t page_id, uint8_t number) noexcept nogil:
    """Move a checkpoint to the back of a class."""
    cdef CheckpointNote *note = note_of(checkpoints, page_id)
    cdef bint is_moved = is_free(pool, page_id)
    if is_moved:
        pull_unused(pool, page_id)
    change_class(checkpoints, note.number, -1)
    note.number = number
    change_class(checkpoints, number, 1)
    if is_moved:
        push(pool, page_id)


cdef inline void _leave(Pool *pool, Checkpoints *checkpoints, int32_t page_id) noexcept nogil:
    """Let a checkpoint be a left one, unless it is at a junction, or several runs continued from it."""
    cdef CheckpointNote *note = note_of(checkpoints, page_id)
    if note.kind & AT_JUNCTION or note.num_continued == MAX_CONTINUED or note.number == LEFT:
        return
    note.num_continued, note.stamp = 1, checkpoints.now
    _move_to_class(pool, checkpoints, page_id, LEFT)


cdef inline int32_t _count_saved(const Pool *pool, const Checkpoints *checkpoints, int32_t page_id) noexcept nogil:
    """Count the tokens that a hit of a checkpoint saves: those behind the last one before it in its run that is not left.
    O(checkpoints of the run).
    """
    cdef const CheckpointNote *note = note_of(checkpoints, page_id)
    cdef int32_t num_tokens = note.num_tokens
    cdef Py_ssize_t _
    for _ in range(MAX_STEPS):
        page_id = _page_before(pool, note)
        if page_id == NULL_PAGE:
            break
        note = note_of(checkpoints, page_id)
        if note.number != LEFT and note.number != OUTDONE:
            return max(0, num_tokens - note.num_tokens)
    return num_tokens


cdef inline void _leave_before(Pool *pool, Checkpoints *checkpoints, int32_t page_id) noexcept nogil:
    """Leave the checkpoints before one in its run, up to the first from which a run continued. Amortised O(1)."""
    cdef Py_ssize_t _
    for _ in range(MAX_STEPS):
        page_id = _page_before(pool, note_of(checkpoints, page_id))
        if page_id == NULL_PAGE or note_of(checkpoints, page_id).num_continued:
            break
        _leave(pool, checkpoints, page_id)


cdef inline void continue_from(Pool *pool, Lineage *lineage, int32_t page_id, int32_t num_tokens) noexcept nogil:
    """Let a run continue from a checkpoint of `num_tokens` tokens, which it hits."""
    cdef Checkpoints *checkpoints = checkpoints_of(pool, page_id)
    cdef CheckpointNote *note
    if pool.pages[page_id].group == NO_GROUP:  # it is being loaded, and cached only then
        return
    lineage[0] = Lineage(last_key=pool.pages[page_id].key_lo, last=page_id, last_tokens=num_tokens, is_source=True)
    if checkpoints == NULL:
        return
    note = note_of(checkpoints, page_id)
    note.num_tokens = num_tokens
    count_residency(checkpoints, note.number)
    checkpoints.classes[note.number].num_hit_tokens += _count_saved(pool, checkpoints, page_id)
    note.stamp, note.num_continued = tick(checkpoints), <uint8_t>min(note.num_continued + 1, <int32_t>MAX_CONTINUED)
    _move_to_class(pool, checkpoints, page_id, RECENT)
    if note.num_continued == 1:
        _leave_before(pool, checkpoints, page_id)


cdef inline void _leave_source(Pool *pool, Checkpoints *checkpoints, Lineage *lineage) noexcept nogil:
    """Leave the checkpoint from which a run continues, if no other run did."""
    cdef int32_t page_id = _valid_page(pool, lineage.last, lineage.last_key) if lineage.is_source else <int32_t>NULL_PAGE
    if page_id != NULL_PAGE and note_of(checkpoints, page_id).num_continued == 1:
        _leave(pool, checkpoints, page_id)


cdef inline int32_t find_outrun(const Pool *pool, const Lineage *lineage) noexcept nogil:
    """Return the run's own checkpoint at the end of its answer, if that is its last one and nobody hit or holds it. The null
    page: there is none.
    """
    cdef int32_t page_id = _valid_page(pool, lineage.last, lineage.last_key)
    if lineage.is_source or page_id == NULL_PAGE or class_of(pool, page_id) != OF_ANSWER:
        return NULL_PAGE
    if pool.pages[page_id].ref_cnt:  # a lease holds it
        return NULL_PAGE
    return page_id


cdef inline void add_kind(Pool *pool, int32_t page_id, uint8_t kind) noexcept nogil:
    """Let a cached checkpoint also be kept for the reasons `kind`, for which another run would have made it."""
    cdef Checkpoints *checkpoints = checkpoints_of(pool, page_id)
    cdef CheckpointNote *note
    if checkpoints == NULL:
        return
    note = note_of(checkpoints, page_id)
    note.kind |= kind
    if first_class(kind) == RECENT and (note.number == OF_ANSWER or note.number == LONE):
        _move_to_class(pool, checkpoints, page_id, RECENT)


cdef inline void step_back(Pool *pool, Lineage *lineage, int32_t page_id) noexcept nogil:
    """Let a run go back to the checkpoint before its last one, `page_id`, which loses its entry."""
    cdef const CheckpointNote *note = note_of(checkpoints_of(pool, page_id), page_id)
    lineage.last, lineage.last_key, lineage.last_tokens = note.prev, note.prev_key, note.prev_tokens


cdef inline void _outdo_prompt(Pool *pool, Checkpoints *checkpoints, const Lineage *lineage) noexcept nogil:
    """Let the checkpoint at the end of a run's prompt be evicted before others, since the answer has one."""
    cdef int32_t page_id = _valid_page(pool, lineage.last, lineage.last_key) if not lineage.is_source else <int32_t>NULL_PAGE
    cdef CheckpointNote *note
    if page_id == NULL_PAGE:
        return
    note = note_of(checkpoints, page_id)
    if note.kind & AT_PROMPT_END and note.num_continued == 0 and note.number == RECENT:
        _move_to_class(pool, checkpoints, page_id, OUTDONE)


cdef inline void go_on_with(Pool *pool, Lineage *lineage, int32_t page_id, const NewCheckpoint *new) noexcept nogil:
    """Let a run go on with a checkpoint that it has just made. One at a lone place stays outside the run."""
    cdef Checkpoints *checkpoints = checkpoints_of(pool, page_id)
    if new.kind == AT_LONE_PLACE:
        return
    if checkpoints != NULL and new.kind == AT_ANSWER_END:
        _outdo_prompt(pool, checkpoints, lineage)
    elif checkpoints != NULL:
        _leave_source(pool, checkpoints, lineage)
    lineage[0] = Lineage(last_key=pool.pages[page_id].key_lo, last=page_id, last_tokens=new.num_tokens, is_source=False)


cdef inline void share_run(Lineage *lineage) noexcept nogil:
    """Let a fork continue from the last checkpoint of the run, which stays the other's."""
    lineage.is_source = True


cdef inline void count_ghost(Checkpoints *checkpoints, Ghost *ghost, uint64_t word, int64_t num_tokens) noexcept nogil:
    """Count the tokens that an admitted request lost with an evicted checkpoint, once, if its class learns from them."""
    cdef GhostEntry *entry = find_ghost(ghost, word)
    cdef uint32_t number
    if entry == NULL or entry.mark & DROPPED:
        return
    number = entry.mark >> CLASS_SHIFT & CLASS_MASK
    if LEFT <= number < NUM_CHECKPOINT_CLASSES and is_recent_ghost(checkpoints, entry.mark):
        count_residency(checkpoints, number)
        checkpoints.classes[number].num_hit_tokens += <double>num_tokens
    entry.mark |= NO_CLASS << CLASS_SHIFT


cdef inline bint was_at_prompt_end(const Ghost *ghost, uint64_t word) noexcept nogil:
    """Whether an evicted checkpoint was at the end of a prompt."""
    cdef const GhostEntry *entry = find_ghost(ghost, word)
    return entry != NULL and not entry.mark & DROPPED and entry.mark >> PROMPT_END_SHIFT & 1

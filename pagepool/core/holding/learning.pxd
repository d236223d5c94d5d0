# What admitted requests teach a bank of states: which checkpoints are missed, and whether states at the ends of answers pay.

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.core.base cimport Digest
from pagepool.core.holding.holding cimport *
from pagepool.core.pool cimport (
    AT_ANSWER_END, AT_PROMPT_END, NO_GROUP, NULL_PAGE, RUN_END, Bank, CheckpointNote, Checkpoints, LostHits, count_answers,
    count_ghost, hash_key, note_of, was_at_prompt_end, writes_answers,
)


cdef struct PrefixEnd:        # where the hit of a look-up ends, and what it lacks behind
    int64_t junction          # tokens that all groups of full attention hit, if others hit fewer; 0: they do not
    bint has_parted           # other runs went on from the last page of these in another way
    bint is_run_end           # a run ended there
    LostHits lost
    Digest lost_key           # of the checkpoint behind the tokens that were lost for states


cdef inline bint pays_to_write_answers(const Pool *pool, const Group *groups, Py_ssize_t num_groups) noexcept nogil:
    """Whether states at the ends of answers are to be kept, as measured in the bank of the first state. With windows they are
    not: these would have to keep their pages at each place where the answer may end, and reference windows cannot hit there.
    """
    cdef const Checkpoints *checkpoints = NULL
    cdef Py_ssize_t g
    for g in range(num_groups):
        if groups[g].rules.leaves_pages:
            return False
        if keeps_checkpoints(&groups[g]) and checkpoints == NULL:
            checkpoints = pool.banks[groups[g].bank].checkpoints
    return checkpoints != NULL and writes_answers(checkpoints)


cdef inline void _compare_ends(
    Bank *bank, const PrefixEnd *end, int32_t page_id, int64_t num_hit_tokens, uint64_t lost
) noexcept nogil:
    """Compare what a state at the end of an answer would have saved an admitted request with what one at the end of a prompt
    saved it, or would have. The request hits the checkpoint `page_id`; the null page: none.
    """
    cdef const CheckpointNote *note = note_of(bank.checkpoints, page_id) if page_id != NULL_PAGE else <CheckpointNote *>NULL
    cdef int64_t num_lost = end.lost.num_for_states, num_gained = 0, num_spared = 0
    if note != NULL and note.kind == AT_ANSWER_END:
        num_gained = num_hit_tokens - note.prev_tokens
    elif note != NULL and note.kind & AT_PROMPT_END and end.is_run_end:
        num_gained = end.junction - num_hit_tokens
    elif note != NULL and note.kind & AT_PROMPT_END:
        num_spared = num_hit_tokens
    if num_lost and was_at_prompt_end(&bank.ghost, lost):
        num_spared += 0 if end.is_run_end and end.junction > num_hit_tokens + num_lost else num_lost
    count_answers(bank.checkpoints, <double>max(<int64_t>0, num_gained), <double>num_spared)


cdef inline void learn_of_state(
    Pool *pool, const Group *group, const PrefixEnd *end, int32_t page_id, int64_t num_hit_tokens, bint is_first
) noexcept nogil:
    """Let the bank of a state learn from a request that is admitted, before its run continues from the checkpoint `page_id`.
    Ends of answers are compared for the first state of a model.
    """
    cdef Bank *bank = &pool.banks[group.bank]
    cdef uint64_t lost = hash_key(end.lost_key, group.id)
    if bank.checkpoints == NULL or not keeps_checkpoints(group):
        return
    if page_id != NULL_PAGE and pool.pages[page_id].group == NO_GROUP:
        page_id = NULL_PAGE
    if is_first:
        _compare_ends(bank, end, page_id, num_hit_tokens, lost)
    if end.lost.num_for_states:
        count_ghost(bank.checkpoints, &bank.ghost, lost, end.lost.num_for_states)


cdef inline void note_run_end(Pool *pool, const Holding *holding) noexcept nogil:
    """Note that a run has ended with its last cached page of full attention."""
    cdef const Held *held
    cdef Py_ssize_t g
    for g in range(holding.num_groups if pool.children != NULL else 0):
        held = &holding.held[g]
        if not hits_leading_pages(&holding.groups[g]):
            continue
        if held.num_cached and pool.pages[held.ids[held.num_cached - 1]].group != NO_GROUP:
            pool.children[held.ids[held.num_cached - 1]] |= RUN_END
        return

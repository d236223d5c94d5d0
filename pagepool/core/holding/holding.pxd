# The pages that a request (`RequestPages`) or running row (`RunningRows`) holds; the same functions serve both. The caller
# holds the store's lock.
#
# A request or row has a `Held` for each cache group, and a `Holding` points to all of them. A state has one page, the working
# page; its checkpoints are in the prefix index, and no request or row holds them. Always:
#
# * In each group null pages come first, then pages to which the holder has a reference. The first `num_skipped` are null pages;
#   with a reference window the pages of the prompt are held before them.
# * The first `num_cached` pages of a group, or checkpoints of a state, need no prefix entry any more.
# * A working page has no prefix entry, and only its holder writes to it.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.string cimport memset

from pagepool.core.base cimport rare
from pagepool.core.holding.boundaries cimport *
from pagepool.core.pool cimport MAX_BANKS, NO_SESSION, Lineage, Pool, Ranking


cdef struct Held:             # pages of one group
    int32_t *ids              # page ids in token order
    int32_t num_pages
    int32_t num_cached        # leading pages, or checkpoints of a state, that need no prefix entry any more
    int32_t num_skipped       # leading pages that were given back: no further token attends to them
    int32_t num_hits          # leading pages that were hits
    Ranking ranking           # how a policy ranked the pages behind the hits
    Lineage lineage           # its checkpoints, for a state
    int32_t next_needed       # no boundary needs a page between `num_skipped` and this place
    int32_t num_prompt        # tokens of the prompt, if some group has a reference window: no pages behind them are cached
    int32_t num_written       # checkpoints of a state up to the last one whose write was cached, or found cached
    int64_t read_list         # last list of moves with a copy from one of the pages; see `Pool.list_number`
    int64_t due_list          # last list with moves into the pages, or with saves of what they had before they were taken
    int64_t load_number       # last list that loads hits; 0: none does

cdef struct Holding:
    const Group *groups       # [num_groups]
    Held *held                # [num_groups]
    Py_ssize_t num_groups
    Boundaries *boundaries    # NULL: all pages of windows and chunks stay cached
    int32_t session           # number, or NO_SESSION
    int32_t num_once_cached   # tokens whose pages or checkpoints were cached before the holder was set back; 0: it was not


cdef inline Py_ssize_t count_places(const Holding *holding) noexcept nogil:
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups):
        count += holding.held[g].num_pages
    return count


cdef inline void empty(const Holding *holding) noexcept nogil:
    """Forget all pages, after they were given back."""
    cdef int32_t *ids
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        ids = holding.held[g].ids
        memset(&holding.held[g], 0, sizeof(Held))
        holding.held[g].ids = ids


cdef inline void set_prompt(const Holding *holding, int64_t num_tokens) noexcept nogil:
    """Let the first `num_tokens` tokens of a holder be its prompt, for reference windows. Its boundaries are set."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if rare(holding.groups[g].rules.caches_prompts):
            holding.held[g].num_prompt = <int32_t>min(num_tokens, <int64_t>MAX_TOKENS)
            if holding.boundaries != NULL:
                holding.boundaries.last = holding.held[g].num_prompt


cdef inline int32_t count_prompt_pages(const Rules *rules, const Held *held) noexcept nogil:
    """Count the pages with tokens of the prompt, which a reference window does not skip; 0 without one."""
    return <int32_t>pages_for(rules, held.num_prompt) if rare(rules.answer_window) else 0


cdef inline void cut_prompt(const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Let no more than the first `num_tokens` tokens be of the prompt. Pages behind that were kept for it can be skipped."""
    cdef Held *held
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        held = &holding.held[g]
        if held.num_prompt <= num_tokens:
            continue
        held.num_prompt = num_tokens
        if holding.groups[g].rules.answer_window:
            held.num_skipped = min(held.num_skipped, count_prompt_pages(&holding.groups[g].rules, held))
    if holding.boundaries != NULL and holding.num_groups and rare(holding.groups.rules.caches_prompts):
        holding.boundaries.last = min(holding.boundaries.last, num_tokens)


cdef inline int32_t first_to_skip(const Rules *rules, const Held *held) noexcept nogil:
    """Return the first page that can be skipped, and was not."""
    return max(held.num_skipped, count_prompt_pages(rules, held))


cdef inline int32_t first_answer_page(const Rules *rules, const Held *held, int32_t num_computed) noexcept nogil:
    """Return the first page behind the prompt that tokens from `num_computed` on attend to, with a reference window."""
    return max(count_prompt_pages(rules, held), full_pages(rules, max(0, num_computed - rules.answer_window + 1)))


# Nothing is due below the `Limits`, which are computed after each change.

cdef struct Limits:           # numbers of tokens
    int64_t num_room          # tokens with slots
    int64_t num_full          # tokens that fill the next page, or after which the next checkpoint is written
    int64_t num_skip          # computed tokens at which the next page is skipped


cdef inline bint writes_states(const Holding *holding) noexcept nogil:
    """Whether states are kept: steps write checkpoints to pages of their own."""
    return holding.boundaries != NULL and holding.boundaries.writes_states


cdef inline int64_t find_checkpoint(const Holding *holding, Py_ssize_t g) noexcept nogil:
    """Return the token count of the first checkpoint of a state that no step was planned to write; INT32_MAX: there is none.
    O(1).
    """
    cdef const Group *group = &holding.groups[g]
    assert keeps_checkpoints(group) and writes_states(holding)
    return find_next_boundary(
        holding.boundaries, <int32_t>min(holding.held[g].num_cached * <int64_t>group.rules.entry_size, <int64_t>MAX_TOKENS)
    )


cdef inline bint is_past_prompt(const Rules *rules, const Held *held) noexcept nogil:
    """Whether the next full page, or state, is not cached because it has tokens of an answer, with a reference window."""
    return rare(rules.caches_prompts) and (held.num_cached + <int64_t>1) * rules.entry_size > held.num_prompt


cdef inline int64_t count_entered(const Group *group, const Held *held, int64_t num_computed) noexcept nogil:
    """Count the leading pages or checkpoints of computed tokens that need no prefix entry any more."""
    cdef int64_t num_filled = num_computed // group.rules.entry_size
    return num_filled if is_past_prompt(&group.rules, held) else min(<int64_t>held.num_cached, num_filled)


cdef inline Limits limits_of(const Holding *holding) noexcept nogil:
    """Compute the numbers of tokens below which nothing is due. O(groups)."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int64_t num_room = INT64_MAX, num_full = INT64_MAX, num_skip = INT64_MAX
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        held = &holding.held[g]
        num_room = min(num_room, <int64_t>held.num_pages * group.rules.page_size)
        if rare(group.rules.leaves_pages):
            num_skip = min(num_skip, <int64_t>next_skip(group, first_to_skip(&group.rules, held)))
            if is_past_prompt(&group.rules, held):
                continue
        if rare(keeps_checkpoints(group)):
            num_full = min(num_full, find_checkpoint(holding, g))
        elif group.id != NO_GROUP:
            num_full = min(num_full, (held.num_cached + <int64_t>1) * group.rules.page_size)
    return Limits(num_room=num_room, num_full=num_full, num_skip=num_skip)


cdef inline int64_t count_missing(const Group *group, int64_t num_pages, int64_t num_tokens) noexcept nogil:
    """Count the pages that `num_tokens` tokens need beyond `num_pages`."""
    if num_tokens <= num_pages * group.rules.page_size:
        return 0
    return max(<int64_t>0, pages_for(&group.rules, num_tokens) - num_pages)


cdef inline int64_t count_new_pages(const Holding *holding, int64_t num_tokens) noexcept nogil:
    """Count the pages that `num_tokens` tokens need beyond those held, in all groups."""
    cdef Py_ssize_t g
    cdef int64_t count = 0
    for g in range(holding.num_groups):
        count += count_missing(&holding.groups[g], holding.held[g].num_pages, num_tokens)
    return count


cdef inline void count_new_in_banks(const Holding *holding, int64_t num_tokens, int64_t *num_new_in) noexcept nogil:
    """Set `num_new_in` to the numbers of pages that `num_tokens` tokens need beyond those held, by bank."""
    cdef Py_ssize_t g
    memset(num_new_in, 0, MAX_BANKS * sizeof(int64_t))
    for g in range(holding.num_groups):
        num_new_in[holding.groups[g].bank] += count_missing(&holding.groups[g], holding.held[g].num_pages, num_tokens)

# Which pages a request needs in a cache group, by the kind of attention.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pagepool.core.base cimport MAX_TOKENS
from pagepool.core.pool cimport NO_GROUP

cdef struct Rules:            # numbers of tokens
    int32_t page_size         # MAX_TOKENS: a state, which has one page
    int32_t window            # tokens that a token attends to, itself included; 0: no sliding window
    int32_t chunk             # tokens of a chunk, which attend only to each other; 0: not chunked
    int32_t answer_window     # tokens of the answer that one of them attends to, itself included; 0: no reference window
    uint8_t caches_prompts    # no page or state with tokens of an answer is cached: some group has a reference window
    uint8_t leaves_pages      # pages are skipped, or not cached behind a prompt, by one of the four rules above
    int32_t hit_tokens        # hits are multiples of it; 0: any length
    int32_t entry_size        # tokens between prefix entries: page_size, or the interval of a state's checkpoints
    int32_t period            # of a ring: nothing of it is needed at multiples of this many tokens, where hits end; 0: no ring
    int32_t capacity          # tokens that a ring has; a later token overwrites the one this many before it

cdef struct Group:            # layers that need the same pages
    Rules rules
    int32_t id                # in the prefix index; NO_GROUP: its pages are never cached
    int32_t stride            # hashes per page
    int32_t bank              # source of its pages
    const Group *next_alike   # next group of the same kind, in `CacheGroups`
    int32_t num_read_behind   # tokens behind a hit that its look-up reads and drops, with eagle
    int32_t end_step          # another request can resume at multiples of this many tokens; 0: no pages are held for that
    int32_t num_dropped       # least number of computed tokens behind such a multiple, with eagle
    int32_t num_step_pages    # pages of `end_step` tokens
    int32_t num_run_pages     # pages of a window that a hit needs


cdef inline bint is_state(const Rules *rules) noexcept nogil:
    return rules.page_size == MAX_TOKENS


cdef inline bint is_ring(const Rules *rules) noexcept nogil:
    """Whether a group is a ring: a state that hits do not need."""
    return rules.period > 0


cdef inline bint is_recurrent(const Rules *rules) noexcept nogil:
    """Whether a group is a state that cannot go back, and that hits need."""
    return is_state(rules) and not is_ring(rules)


cdef inline int32_t count_drafts(const Rules *rules, int32_t max_steps_ahead) noexcept nogil:
    """Count the draft tokens that each step of a row may have, so that its ring can take them back with `max_steps_ahead` steps
    ahead.
    """
    return max(0, rules.capacity - rules.period - max_steps_ahead) // (max_steps_ahead + 1)


cdef inline int64_t limit_drafts(
    const Group *groups, Py_ssize_t num_groups, int32_t max_steps_ahead, int64_t max_num_drafts,
) noexcept nogil:
    """Return the most draft tokens of a step, at most `max_num_drafts`, that all rings can take back."""
    cdef Py_ssize_t g
    for g in range(num_groups):
        if is_ring(&groups[g].rules):
            max_num_drafts = min(max_num_drafts, <int64_t>count_drafts(&groups[g].rules, max_steps_ahead))
    return max_num_drafts


cdef inline bint ring_has(const Rules *rules, int32_t num_tokens, int32_t first, int32_t num_written) noexcept nogil:
    """Whether a ring, to which the tokens from `first` up to `num_written` were written in order, has all tokens since the last
    multiple of its period before `num_tokens`.
    """
    cdef int32_t start = num_tokens - num_tokens % rules.period
    return start == num_tokens or (first <= start and num_written - start <= rules.capacity)


cdef inline bint has_window(const Rules *rules) noexcept nogil:
    """Whether a window or chunk leaves the first pages behind."""
    return rules.window or rules.chunk


cdef inline int64_t pages_for(const Rules *rules, int64_t num_tokens) noexcept nogil:
    """Count the pages of `num_tokens` tokens, skipped pages included."""
    if num_tokens <= MAX_TOKENS:  # a 32-bit division is faster
        return (<uint32_t>num_tokens + <uint32_t>rules.page_size - 1) // <uint32_t>rules.page_size
    return 1 if is_state(rules) else (num_tokens + rules.page_size - 1) // rules.page_size


cdef inline int32_t full_pages(const Rules *rules, int32_t num_tokens) noexcept nogil:
    assert num_tokens >= 0 and rules.page_size > 0
    return <int32_t>(<uint32_t>num_tokens // <uint32_t>rules.page_size)


cdef inline int32_t full_entries(const Rules *rules, int32_t num_tokens) noexcept nogil:
    """Count the prefix entries of tokens: full pages, or checkpoints of a state."""
    assert num_tokens >= 0 and rules.entry_size > 0
    return <int32_t>(<uint32_t>num_tokens // <uint32_t>rules.entry_size)


cdef inline Py_ssize_t last_hash(const Group *group, Py_ssize_t place) noexcept nogil:
    """Return the index of the hash whose digest is the key of a page, or checkpoint, at a place."""
    return (place + 1) * group.stride - 1


cdef inline bint keeps_checkpoints(const Group *group) noexcept nogil:
    return group.id != NO_GROUP and is_state(&group.rules)


cdef inline bint caches_full_pages(const Group *group) noexcept nogil:
    return group.id != NO_GROUP and not is_state(&group.rules)


cdef inline int32_t first_useful_page(const Rules *rules, int32_t num_computed, int32_t num_cached) noexcept nogil:
    """Return the first page that tokens from `num_computed` on attend to; with chunks, at most the last cached page."""
    cdef int32_t page
    if rules.window:
        return full_pages(rules, max(0, num_computed - rules.window + 1))
    if rules.chunk:
        page = full_pages(rules, num_computed - num_computed % rules.chunk)
        return min(page, num_cached - 1) if num_cached else page
    return 0


cdef inline int32_t first_held_page(const Group *group, int32_t num_computed, int32_t num_cached) noexcept nogil:
    """Return the first page that a holder of `num_computed` computed tokens keeps: its next tokens attend to it, or a request
    needs it to resume where this one may end. Such an end is a multiple of all page sizes, so its window may begin earlier.
    """
    cdef const Rules *rules = &group.rules
    cdef int32_t num = max(0, num_computed - group.num_dropped)
    if not group.end_step:
        return first_useful_page(rules, num_computed, num_cached)
    if rules.window:
        num = <int32_t>(<uint32_t>num // <uint32_t>group.end_step) * group.num_step_pages
        return max(0, num - group.num_run_pages)
    return first_useful_page(rules, num - num % group.end_step, num_cached)


cdef inline int32_t next_skip(const Group *group, int32_t num_skipped) noexcept nogil:
    """Return the least number of computed tokens at which one more page may be skipped, of the first `num_skipped`, which were,
    or cannot be; MAX_TOKENS: never.
    """
    cdef const Rules *rules = &group.rules
    cdef int64_t stop = (<int64_t>num_skipped + 1) * rules.page_size
    if rules.window and group.end_step:
        stop = num_skipped + <int64_t>1 + group.num_run_pages
        if group.num_step_pages > 1:
            stop = (stop + group.num_step_pages - 1) // group.num_step_pages
        return <int32_t>min(stop * group.end_step + group.num_dropped, <int64_t>MAX_TOKENS)
    if rules.window or rules.answer_window:
        return <int32_t>min(stop + rules.window + rules.answer_window - 1, <int64_t>MAX_TOKENS)
    if rules.chunk:
        stop = (stop + rules.chunk - 1) // rules.chunk * rules.chunk
        if group.end_step:
            stop = (stop + group.end_step - 1) // group.end_step * group.end_step
        return <int32_t>min(stop, <int64_t>MAX_TOKENS)
    return MAX_TOKENS


cdef inline bint hits_leading_pages(const Group *group) noexcept nogil:
    """Whether any number of leading pages of a group is a hit, as with full attention."""
    return group.id != NO_GROUP and not group.rules.window and not group.rules.chunk and not is_state(&group.rules)


cdef inline bint hits_all_leading_pages(const Group *groups, Py_ssize_t num_groups) noexcept nogil:
    """Whether any number of leading pages is a hit in all groups, so that the pages of a prompt hit before its end is there."""
    cdef Py_ssize_t g
    for g in range(num_groups):
        if not hits_leading_pages(&groups[g]):
            return False
    return True


cdef inline int32_t _count_window_pages(const Rules *rules) noexcept nogil:
    """Count the full pages in the window of the next token."""
    return <int32_t>((rules.window + <int64_t>rules.page_size - 2) // rules.page_size)


cdef inline int32_t count_run_pages(const Rules *rules, bint use_eagle) noexcept nogil:
    """Count the pages that a window needs before the end of a hit. With eagle the hit's last page, if any, was dropped."""
    return max(0 if use_eagle else 1, _count_window_pages(rules))


cdef inline int32_t first_hit_page(const Rules *rules, int32_t num_tokens, bint use_eagle) noexcept nogil:
    """Return the first page that a request needs from a hit of `num_tokens` tokens."""
    if rules.window:
        return max(0, full_pages(rules, num_tokens) - count_run_pages(rules, use_eagle))
    return first_useful_page(rules, num_tokens, 0)


cdef inline bint is_needed_by_hits(const Rules *rules, int32_t page) noexcept nogil:
    """Whether any hit may need a page of a window or chunk. If the shortest hit that reaches the page does not, none does."""
    cdef int64_t stop, num_tokens = (page + <int64_t>1) * rules.page_size
    assert page >= 0
    if not rules.hit_tokens:
        return True
    num_tokens = (num_tokens + rules.hit_tokens - 1) // rules.hit_tokens * rules.hit_tokens
    if rules.window:
        stop = num_tokens // rules.page_size
        return page >= stop - max(1, _count_window_pages(rules))
    if rules.chunk:
        return page >= num_tokens // rules.chunk * rules.chunk // rules.page_size
    return True


cdef inline int64_t count_step_pages(const Group *group, int64_t num_computed, int64_t num_slots) noexcept nogil:
    """Count the pages that a request with `num_computed` cached tokens holds once `num_slots` tokens have slots."""
    cdef const Rules *rules = &group.rules
    cdef int32_t num = <int32_t>min(num_computed, <int64_t>MAX_TOKENS)
    cdef int32_t num_cached = 0 if group.id == NO_GROUP else full_pages(rules, num)
    cdef int32_t first = first_held_page(group, num, num_cached)
    if rules.window and num_cached:  # the last page of a hit is taken even if the window is one token
        first = min(first, full_pages(rules, num - 1))
    return pages_for(rules, num_slots) - first

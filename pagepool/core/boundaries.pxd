# At which numbers of tokens a later request can resume, and which pages of windows and chunks it needs there.
#
# A row or request has its `Boundaries` from its admission on. Always: they are multiples of `multiple`, so that a hit can end
# there, and ascend.

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagepool.core.records cimport Range
from pagepool.core.rules cimport MAX_TOKENS, Rules, first_hit_page, full_pages

cdef enum:
    NUM_BOUNDARIES = 7        # end of the prompt, junction, four that the engine names, and the end at release

cdef struct Boundaries:       # numbers of tokens
    int32_t[NUM_BOUNDARIES] tokens  # [num] ascending
    int32_t num
    int32_t num_prompt        # that were known at admission
    int32_t multiple          # hits have a multiple of these; 0: pages of windows and chunks stay cached, whatever their place
    int32_t slack             # before a boundary, at which a request can resume as well
    int32_t interval          # each multiple of it is a boundary, too, without slack; 0: none is
    bint use_eagle


cdef inline void add_boundary(Boundaries *boundaries, int64_t num_tokens) noexcept nogil:
    """Add the last multiple up to `num_tokens`, if there is one, it is new, and there is room."""
    cdef int32_t i, j = boundaries.num, last = <int32_t>(num_tokens - num_tokens % boundaries.multiple)
    while j and boundaries.tokens[j - 1] > last:
        j -= 1
    if last <= 0 or boundaries.num == NUM_BOUNDARIES or (j and boundaries.tokens[j - 1] == last):
        return
    for i in range(boundaries.num, j, -1):
        boundaries.tokens[i] = boundaries.tokens[i - 1]
    boundaries.tokens[j] = last
    boundaries.num += 1


cdef inline Range find_needed(const Boundaries *boundaries, const Rules *rules, int32_t place) noexcept nogil:
    """Find the next pages of a window or chunk, from `place` on, that a request needs which resumes at a boundary; none before
    them is needed. With eagle it needs the page behind the boundary, too, which it drops. O(1).
    """
    cdef int32_t i, end, start, first = max(0, place - boundaries.use_eagle) * rules.page_size
    cdef Range needed = Range(INT32_MAX, INT32_MAX)
    for i in range(boundaries.num):
        end = boundaries.tokens[i]
        if end > first:
            start = first_hit_page(rules, max(0, end - boundaries.slack), boundaries.use_eagle)
            needed = Range(max(place, start), full_pages(rules, end) + boundaries.use_eagle)
            break
    if boundaries.interval and first <= MAX_TOKENS - boundaries.interval:
        end = (first // boundaries.interval + 1) * boundaries.interval
        start = max(place, first_hit_page(rules, end, boundaries.use_eagle))
        if start < needed.start:
            needed = Range(start, full_pages(rules, end) + boundaries.use_eagle)
    return needed

# At which numbers of tokens a later request can resume, and which pages of windows and chunks it needs there.
#
# A row or request has its `Boundaries` from its admission on. Always: they are multiples of `multiple`, so that a hit can end
# there, and ascend; no page that begins between `calm_start` and `calm_stop` is needed at a boundary.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t

from pagepool.core.rules cimport MAX_TOKENS, Rules, first_hit_page

cdef enum:
    NUM_BOUNDARIES = 8        # end of the prompt, junction, four that the engine names, one of a pin, and the end at release

cdef struct Boundaries:       # numbers of tokens
    int32_t[NUM_BOUNDARIES] tokens  # [num] ascending
    int32_t num
    int32_t num_prompt        # that were known at admission
    int32_t multiple          # hits have a multiple of these; 0: pages of windows and chunks stay cached, whatever their place
    int32_t slack             # before a boundary, at which a request can resume as well
    int32_t interval          # each multiple of it is a boundary, too, without slack; 0: none is
    int32_t reach             # tokens of the longest window or chunk, and of four pages: none that ends before needs a page
    int32_t calm_start, calm_stop  # pages that begin there are at no boundary
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
    boundaries.calm_stop = 0


cdef inline bint is_at_boundary(Boundaries *boundaries, const Rules *rules, int32_t place) noexcept nogil:
    """Whether a page of a window, or of chunks, is one that a request needs which resumes at a boundary. With eagle it needs
    the page behind, too, which it drops. O(1), and two comparisons where no boundary is near.
    """
    cdef int32_t i, end, next_end = INT32_MAX, first = max(0, place - boundaries.use_eagle) * rules.page_size
    if boundaries.calm_start <= first < boundaries.calm_stop:
        return False
    for i in range(boundaries.num - 1, -1, -1):
        if boundaries.tokens[i] <= first:
            break
        next_end = boundaries.tokens[i]
        if place >= first_hit_page(rules, max(0, next_end - boundaries.slack), boundaries.use_eagle):
            return True
    if boundaries.interval and first <= MAX_TOKENS - boundaries.interval:
        end = (first // boundaries.interval + 1) * boundaries.interval
        if place >= first_hit_page(rules, end, boundaries.use_eagle):
            return True
        next_end = min(next_end, end)
    boundaries.calm_start = first
    boundaries.calm_stop = <int32_t>max(<int64_t>0, <int64_t>next_end - boundaries.slack - boundaries.reach)
    return False

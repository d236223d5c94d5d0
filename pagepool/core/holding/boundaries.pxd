# Boundaries: token counts at which a later request can resume, and the pages of windows and chunks that it needs there.
#
# A row or request gets its `Boundaries` at its admission. If states are kept, hits end at checkpoints, which steps write at
# boundaries and nowhere else.
#
# Always: boundaries ascend, and are multiples of `multiple`, so that a hit can end there.

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memmove

from pagepool.core.holding.rules cimport *
from pagepool.core.pool cimport Range

cdef enum:
    NUM_BOUNDARIES = 7        # end of prompt; end of external tokens, or the end at release; junction; four from `resume_at`

cdef struct Boundaries:       # numbers of tokens
    int32_t[NUM_BOUNDARIES] tokens  # [num] ascending
    int32_t num
    int32_t num_prompt        # tokens known at admission
    int32_t multiple          # hits are multiples of it; 0: all pages of windows and chunks stay cached
    int32_t slack             # a request can also resume up to this many tokens before a boundary; see `begin_boundaries`
    int32_t interval          # requests can share prompt prefixes of its multiples and resume there without slack; 0: no
    int32_t num_dropped       # least number of shared tokens that are computed again, with eagle or a lookahead
    int32_t hash_lookahead    # tokens behind a cached page that a request has to share, too, for the page to hit
    int32_t num_uncertain     # further dropped tokens with eagle, if a request has hardly any tokens but the shared ones
    bint use_eagle
    bint writes_states        # checkpoints are written at boundaries; the end at release is no boundary then


cdef struct ResumePlaces:     # token counts at which requests that share tokens with a new request will resume
    int64_t num_tokens        # known tokens of the new request
    int64_t junction          # hit tokens of its groups of full attention, if its windows or states hit fewer; 0: they do not
    int64_t external_end      # end of the tokens awaited from elsewhere; 0: there are none
    const int32_t *named      # [num_named] places from the engine's `resume_at`
    Py_ssize_t num_named


cdef inline int32_t find_resumption(const Boundaries *boundaries, int64_t num_tokens) noexcept nogil:
    """Return where a request resumes if it shares `num_tokens` cached tokens with another one; 0: at its beginning."""
    assert boundaries.multiple > 0
    num_tokens = max(<int64_t>0, num_tokens - boundaries.num_dropped)
    return <int32_t>(num_tokens - num_tokens % boundaries.multiple)


cdef inline void add_boundary(Boundaries *boundaries, int32_t end) noexcept nogil:
    """Add a boundary, unless it is 0 or there already. If there is no room, the least boundary is dropped."""
    cdef int32_t i = boundaries.num
    assert boundaries.multiple > 0 and end % boundaries.multiple == 0
    while i and boundaries.tokens[i - 1] > end:
        i -= 1
    if end <= 0 or (i and boundaries.tokens[i - 1] == end) or (i == 0 and boundaries.num == NUM_BOUNDARIES):
        return
    if boundaries.num == NUM_BOUNDARIES:
        i -= 1
        memmove(boundaries.tokens, boundaries.tokens + 1, i * sizeof(int32_t))
    else:
        memmove(boundaries.tokens + i + 1, boundaries.tokens + i, (boundaries.num - i) * sizeof(int32_t))
        boundaries.num += 1
    boundaries.tokens[i] = end
    assert 0 <= i < boundaries.num <= NUM_BOUNDARIES
    assert i == 0 or boundaries.tokens[i - 1] < end
    assert i == boundaries.num - 1 or end < boundaries.tokens[i + 1]


cdef inline int64_t _next_shared(const Boundaries *boundaries, int32_t num_tokens) noexcept nogil:
    """Return the length of the shortest shared prefix, a multiple of the interval within the prompt, with which a request
    resumes behind `num_tokens` tokens; INT32_MAX: there is none.
    """
    cdef int64_t num_shared
    if not boundaries.interval:
        return INT32_MAX
    num_shared = (num_tokens // boundaries.multiple + <int64_t>1) * boundaries.multiple + boundaries.num_dropped
    num_shared = (num_shared + boundaries.interval - 1) // boundaries.interval * boundaries.interval
    return num_shared if num_shared <= boundaries.num_prompt else <int64_t>INT32_MAX


cdef inline int32_t find_next_boundary(const Boundaries *boundaries, int32_t num_tokens) noexcept nogil:
    """Return the first boundary behind `num_tokens` tokens; INT32_MAX: there is none. O(1)."""
    cdef int64_t num_shared = _next_shared(boundaries, num_tokens)
    cdef int32_t i, first = INT32_MAX
    if num_shared < INT32_MAX:
        first = find_resumption(boundaries, num_shared)
    for i in range(boundaries.num):
        if boundaries.tokens[i] > num_tokens:
            first = min(first, boundaries.tokens[i])
            break
    assert first > num_tokens
    return first


cdef inline Range _pages_at(const Boundaries *boundaries, const Group *group, int32_t end, int32_t slack) noexcept nogil:
    """Return the pages of a window or chunk that a request needs to resume at `end`, or up to `slack` tokens before it."""
    return Range(
        start=first_hit_page(&group.rules, max(0, end - slack), boundaries.use_eagle),
        stop=<int32_t>((end + <int64_t>group.num_read_behind) // group.rules.page_size),
    )


cdef inline Range find_needed(const Boundaries *boundaries, const Group *group, int32_t place) noexcept nogil:
    """Find the next pages of a window or chunk, from `place` on, that a request needs to resume at a boundary. No page from
    `place` up to these is needed. O(1).
    """
    cdef int32_t i, end, first = <int32_t>max(<int64_t>0, <int64_t>place * group.rules.page_size - group.num_read_behind)
    cdef int64_t num_shared = _next_shared(boundaries, first)
    cdef Range pages, needed = Range(start=INT32_MAX, stop=INT32_MAX)
    for i in range(boundaries.num):
        end = boundaries.tokens[i]
        if end > first:
            needed = _pages_at(boundaries, group, end, boundaries.slack + boundaries.num_uncertain)
            break
    if num_shared < INT32_MAX:
        pages = _pages_at(boundaries, group, find_resumption(boundaries, num_shared), boundaries.num_uncertain)
        if pages.start < needed.start:
            needed = pages
    needed.start = max(needed.start, place)
    assert place <= needed.start and 0 <= needed.stop
    return needed


cdef inline void _add_floor(Boundaries *boundaries, int64_t num_tokens) noexcept nogil:
    """Add the last possible boundary within `num_tokens` tokens."""
    num_tokens = min(num_tokens, <int64_t>MAX_TOKENS)
    assert num_tokens >= 0
    add_boundary(boundaries, <int32_t>(num_tokens - num_tokens % boundaries.multiple))


cdef inline void begin_boundaries(const Boundaries *rules, Boundaries *boundaries, const ResumePlaces *places) noexcept nogil:
    """Set the boundaries of a request from the template `rules`. If states are written, requests resume at boundaries and not
    before them, so the boundary for the prompt lies `slack` tokens before its end.
    """
    cdef int64_t num_tokens = min(places.num_tokens, <int64_t>MAX_TOKENS)
    cdef Py_ssize_t i
    assert rules.num == 0 and places.num_tokens >= 0
    boundaries[0] = rules[0]
    boundaries.num_prompt = <int32_t>num_tokens
    if boundaries.writes_states:
        num_tokens = max(<int64_t>0, num_tokens - boundaries.slack)
        boundaries.slack = 0
        if places.external_end % boundaries.multiple == 0:
            _add_floor(boundaries, places.external_end)
    assert boundaries.multiple > 0 and 0 <= num_tokens <= MAX_TOKENS
    add_boundary(boundaries, find_resumption(boundaries, num_tokens))
    _add_floor(boundaries, places.junction)
    for i in range(places.num_named):
        add_boundary(boundaries, find_resumption(boundaries, places.named[i]))

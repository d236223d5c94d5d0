# Boundaries: token counts at which a later request can resume, and the pages of windows and chunks that it needs there.
#
# A row or request gets its `Boundaries` at its admission. If states are kept, hits end at checkpoints, which steps write at
# boundaries and nowhere else.
#
# Always: boundaries ascend, and are multiples of `multiple`, so that a hit can end there.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memmove

from pagepool.core.holding.rules cimport *
from pagepool.core.pool cimport AT_ANSWER_END, AT_JUNCTION, AT_LONE_PLACE, AT_PROMPT_END, Range

cdef enum:
    NUM_BOUNDARIES = 7        # end of prompt; end of external tokens, or the end at release; junction; four from `resume_at`

cdef struct Boundaries:       # numbers of tokens
    int32_t[NUM_BOUNDARIES] tokens  # [num] ascending
    uint8_t[NUM_BOUNDARIES] kinds  # [num] bits: why a request resumes there
    int32_t num
    int32_t num_prompt        # tokens known at admission
    int32_t last              # the last place of a boundary: with a reference window, the end of the prompt
    int32_t multiple          # hits are multiples of it; 0: all pages of windows and chunks stay cached
    int32_t slack             # a request can also resume up to this many tokens before a boundary; see `begin_boundaries`
    int32_t interval          # requests can share prompt prefixes of its multiples and resume there without slack; 0: no
    int32_t num_dropped       # least number of shared tokens that are computed again, with eagle or a lookahead
    int32_t hash_lookahead    # tokens behind a cached page that a request has to share, too, for the page to hit
    int32_t first_answer      # from here on, states are kept at each multiple until the next one; 0: not
    int32_t num_uncertain     # further dropped tokens with eagle, if a request has hardly any tokens but the shared ones
    bint use_eagle
    bint writes_states        # checkpoints are written at boundaries; the end at release is no boundary then


cdef struct ResumePlaces:     # token counts at which requests that share tokens with a new request will resume
    int64_t num_tokens        # known tokens of the new request
    int64_t junction          # hit tokens of its groups of full attention, if its windows or states hit fewer; 0: they do not
    bint has_parted           # others went on from there in another way
    bint writes_answer        # the state at the end of its answer is to be kept
    int64_t external_end      # end of the tokens awaited from elsewhere; 0: there are none
    const int32_t *named      # [num_named] places from the engine's `resume_at`
    Py_ssize_t num_named


cdef inline int32_t find_resumption(const Boundaries *boundaries, int64_t num_tokens) noexcept nogil:
    """Return where a request resumes if it shares `num_tokens` cached tokens with another one; 0: at its beginning."""
    assert boundaries.multiple > 0
    num_tokens = max(<int64_t>0, num_tokens - boundaries.num_dropped)
    return <int32_t>(num_tokens - num_tokens % boundaries.multiple)


cdef inline void add_boundary(Boundaries *boundaries, int32_t end, uint8_t kind) noexcept nogil:
    """Add a boundary, unless it is 0; one that is there already gets the bits of `kind`, too. If there is no room, the least
    boundary is dropped.
    """
    cdef int32_t i = boundaries.num
    assert boundaries.multiple > 0 and end % boundaries.multiple == 0
    while i and boundaries.tokens[i - 1] > end:
        i -= 1
    if i and boundaries.tokens[i - 1] == end:
        boundaries.kinds[i - 1] |= kind
        return
    if end <= 0 or (i == 0 and boundaries.num == NUM_BOUNDARIES):
        return
    if boundaries.num == NUM_BOUNDARIES:
        i -= 1
        memmove(boundaries.tokens, boundaries.tokens + 1, i * sizeof(int32_t))
        memmove(boundaries.kinds, boundaries.kinds + 1, i)
    else:
        memmove(boundaries.tokens + i + 1, boundaries.tokens + i, (boundaries.num - i) * sizeof(int32_t))
        memmove(boundaries.kinds + i + 1, boundaries.kinds + i, boundaries.num - i)
        boundaries.num += 1
    boundaries.tokens[i], boundaries.kinds[i] = end, kind
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
    if boundaries.first_answer:
        first = min(first, max(boundaries.first_answer, _next_multiple(boundaries, num_tokens)))
    assert first > num_tokens
    return first if first <= boundaries.last else INT32_MAX


cdef inline int32_t _next_multiple(const Boundaries *boundaries, int32_t num_tokens) noexcept nogil:
    """Return the first possible boundary behind `num_tokens` tokens; INT32_MAX: there is none."""
    cdef int64_t end = (num_tokens // boundaries.multiple + <int64_t>1) * boundaries.multiple
    return <int32_t>min(end, <int64_t>INT32_MAX)


cdef inline uint8_t kind_at(const Boundaries *boundaries, int32_t end) noexcept nogil:
    """Return the bits for a boundary; 0 for a multiple of the interval."""
    cdef int64_t num_shared = _next_shared(boundaries, end - 1)
    cdef int32_t i
    for i in range(boundaries.num):
        if boundaries.tokens[i] == end:
            return boundaries.kinds[i]
    if num_shared < INT32_MAX and find_resumption(boundaries, num_shared) == end:
        return 0
    assert boundaries.first_answer and boundaries.first_answer <= end
    return AT_ANSWER_END


cdef inline int32_t find_next_write(const Boundaries *boundaries, int32_t num_tokens, int64_t num_planned) noexcept nogil:
    """Return the first boundary behind `num_tokens` tokens whose state is written by a step up to `num_planned`: of the places
    that may be the end of the answer, only the last.
    """
    cdef int32_t following, end = find_next_boundary(boundaries, num_tokens)
    while end <= num_planned and kind_at(boundaries, end) == AT_ANSWER_END:
        following = find_next_boundary(boundaries, end)
        if following > num_planned:
            break
        end = following
    return end


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
    assert boundaries.first_answer == 0
    needed.start = max(needed.start, place)
    assert place <= needed.start and 0 <= needed.stop
    return needed


cdef inline int32_t _floor_of(const Boundaries *boundaries, int64_t num_tokens) noexcept nogil:
    """Return the last possible boundary within `num_tokens` tokens."""
    num_tokens = min(num_tokens, <int64_t>MAX_TOKENS)
    assert num_tokens >= 0
    return <int32_t>(num_tokens - num_tokens % boundaries.multiple)


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
        _add_places_of_states(boundaries, places, max(<int64_t>0, num_tokens - boundaries.slack))
        boundaries.slack = 0
    else:
        add_boundary(boundaries, find_resumption(boundaries, num_tokens), 0)
        add_boundary(boundaries, _floor_of(boundaries, places.junction), 0)
    for i in range(places.num_named):
        add_boundary(boundaries, find_resumption(boundaries, places.named[i]), AT_JUNCTION)


cdef inline void _add_places_of_states(
    Boundaries *boundaries, const ResumePlaces *places, int64_t num_tokens
) noexcept nogil:
    """Add the places where the states of a request are written; the boundary for the prompt is within `num_tokens` tokens.
    Where keys and values hit further than the states, another run has parted, or has just ended. In the second case few
    requests come that way again, so that place is worth a state of its own only if it is the deeper one.
    """
    cdef int32_t end = find_resumption(boundaries, num_tokens), junction = _floor_of(boundaries, places.junction)
    if places.external_end % boundaries.multiple == 0:
        add_boundary(boundaries, _floor_of(boundaries, places.external_end), 0)
    if places.has_parted:
        add_boundary(boundaries, junction, AT_JUNCTION)
    elif junction > end:
        end = junction
    else:
        add_boundary(boundaries, junction, AT_LONE_PLACE)
    add_boundary(boundaries, end, AT_PROMPT_END)
    if places.writes_answer:
        boundaries.first_answer = _next_multiple(boundaries, end)

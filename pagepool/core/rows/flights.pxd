# Steps in flight. A batch with `max_steps_ahead` keeps a `Flight` for each row: the tokens that planned steps compute and
# sample beyond the known ones.
#
# A step that computes all known tokens of a row samples its next ones: one, and one more for each accepted draft. A step
# planned ahead computes the token sampled by the step before it, and drafts behind that. So positions are planned for the
# longest outcome, and `num_planned` shrinks by the rejected drafts once a step is resolved. While a step is in flight, all
# known tokens are computed.
#
# Always, in such a batch: ``num_told <= num_launched``, and ``num_ahead`` counts the planned tokens behind the known ones.
# Free rows have zeros.

from libc.stdint cimport int32_t


cdef struct Flight:           # 32 bytes, two to a cache line
    int32_t num_planned       # tokens that are computed once all planned steps have run, if more than are counted
    int32_t num_ahead         # planned tokens behind the known ones
    int32_t num_launched      # steps of the stay that sample tokens
    int32_t num_told          # leading ones of these whose tokens are known
    int32_t num_resolved      # leading tokens whose steps are resolved, if pages are cached then
    int32_t next_full         # resolved count at which the row fills a page to cache
    int32_t next_work         # planned count at which the row has work otherwise
    int32_t unused

cdef struct Launch:           # a row's part of a planned step, with the row's counts before it
    int32_t num_planned
    int32_t num_told
    int32_t ordinal           # `num_launched` with this step; 0: it samples no token
    int32_t num_drafts        # drafts with slots


cdef inline void count_ahead(Flight *flight, int32_t num_tokens) noexcept nogil:
    """Count the planned tokens of a row behind its known ones."""
    flight.num_ahead = max(0, flight.num_planned - num_tokens)


cdef inline void tell_token(Flight *flight, int32_t num_tokens) noexcept nogil:
    """Take a token that the row got as sampled by its oldest step in flight. The row knows `num_tokens` now."""
    flight.num_told += flight.num_told < flight.num_launched
    count_ahead(flight, num_tokens)

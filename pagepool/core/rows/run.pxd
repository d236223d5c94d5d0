# A run: the progress of a row's request. Three counts share one ruler:
#
#     0 ...... settled ...... known ...... planned
#
# Known tokens have ids. Planned positions are written by planned steps; drafts, and the token that a step in flight samples,
# lie behind the known tokens. Settled tokens have their pages cached: each group counts its own pages in `Held`. All other
# counts are derived from these and from the launches, the row's steps in flight, oldest first:
#
# * A launch writes from its `before` to the `before` of the next launch; the last launch writes to `num_planned`.
# * A told row was last changed by `step`, which appended ("told") a token and made the row's only launch. This launch is not
#   stored: it writes from `num_resolved`, and samples one token. So the next `step` writes tokens and `RowRecord`s alone.
# * `num_computed` counts the known tokens that planned steps write, and `num_ahead` the planned positions behind known tokens.
# * `num_resolved` is the oldest launch's `before`: no step in flight writes before it.
# * Pages are cached up to `count_final` tokens. A failed step undoes that.
# * Pages are skipped only if no token from ``min(count_final, num_resolved)`` on attends to them: a skip cannot be undone.
#
# A launch that computes all known tokens samples the next one, and another for each accepted draft. Positions are planned as if
# all drafts were accepted, and move back by the rejected ones once the step is settled. A launch can outlive its tokens: after
# a cut, and in a fork, it samples nothing, but may still fail.
#
# Always, for each row:
# - ``0 <= num_computed <= min(num_tokens, num_planned)``, and in a running row `num_computed` equals that minimum.
# - Launches ascend: neither `before` nor `step` falls from one to the next, and the last `before` is at most `num_planned`.
# - Launches that sample nothing, or nothing any more, come before those whose tokens are awaited.
# - A row that is not running has no launch, and a free row has no token.
# - A told row is running, with ``num_planned == num_tokens == num_resolved + 1`` and one launch, and its ring has one place.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t


cdef enum RunState:
    FREE
    CLAIMED                   # a call is admitting a request
    PENDING                   # its next tokens are computed elsewhere
    RUNNING
    ENDED                     # `settle` has told so: it takes no more tokens, and is to be released

cdef enum:
    NOBODYS = -1              # a `num_sampled`: the tokens were cut, or belong to a fork's source
    MAX_STEPS_AHEAD = 254     # a ring has one place more, and a byte counts its places

cdef struct RowRecord:        # 32 bytes, two to a cache line
    int32_t num_tokens        # known tokens
    int32_t num_computed      # known tokens that planned steps write; in a pending row, tokens before the awaited ones
    int32_t num_planned       # positions that planned steps write
    int32_t num_resolved      # leading positions that no step in flight writes
    int32_t next_plan         # planned count from which a plan has work; 0: free, 1: pending, or moves may be due
    int32_t next_settle       # final count from which a settled step has work
    uint32_t told_step        # lower half of the number of the step that told the row; 0: the row is not told
    uint8_t state             # a `RunState`
    uint8_t is_admitted       # whether the state is PENDING or later
    uint8_t first_launch      # place of the oldest launch in the ring
    uint8_t num_launches

cdef struct Launch:           # a row's part of a step in flight
    int32_t before            # planned positions before the step
    int32_t num_sampled       # most tokens that it may still yield: drafts plus one; 0: none; or NOBODYS
    int64_t step              # number of the step

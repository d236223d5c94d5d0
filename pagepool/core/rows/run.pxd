# A run: how far a row's request is. One ruler has three counts:
#
#     0 ...... settled ...... known ...... planned
#
# Known tokens have ids. Planned positions are written by planned steps; drafts, and the token that a step in flight samples,
# lie behind the known tokens. Settled tokens have their pages cached: each group counts its own pages in `Held`. All other
# counts are derived from these and from the launches, the row's steps in flight, oldest first:
#
# * A launch writes from its `before` to the next launch's, and the last one to `num_planned`.
# * A told row has got a token by its last step, its only launch, and has not changed since. Its launch is not stored: it
#   writes from `num_resolved`, and samples one token. So telling all rows a token again writes nothing but their records.
# * `num_computed` counts the known tokens that planned steps write, and `num_ahead` the planned positions behind them.
# * `num_resolved` is the oldest launch's `before`: no step in flight writes before it.
# * `count_final` is the line up to which pages are cached. A failed step takes that back.
# * ``min(count_final, num_resolved)`` is the line up to which windows leave pages, since that cannot be taken back.
#
# A launch that computes all known tokens samples the next one, and another for each accepted draft. So positions are planned
# for the longest outcome, and fall by the rejected drafts once the step is settled. A launch outlives its tokens: after a cut,
# and in a fork, it may still fail, and samples nothing.
#
# Always, for each row:
# - ``0 <= num_computed <= num_tokens``, and ``num_computed <= num_planned``; in a running row `num_computed` is the lesser one.
# - Launches ascend: ``before`` does not fall from one to the next, nor do their steps, and the last one's is at most
#   `num_planned`.
# - A launch that samples nothing any more comes before those whose tokens are still awaited.
# - A row that is not running has no launch, and a free row has no token.
# - A told row is running, with ``num_planned == num_tokens == num_resolved + 1`` and one launch, and its ring has one place.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t


cdef enum RunState:
    FREE
    CLAIMED                   # a call is admitting a request
    PENDING                   # its next tokens are computed elsewhere
    RUNNING

cdef enum:
    NOBODYS = -1              # of `num_sampled`: the tokens were cut, or are those of a fork's source
    MAX_STEPS_AHEAD = 254     # the ring of launches is counted by bytes

cdef struct RowRecord:        # 32 bytes, two to a cache line
    int32_t num_tokens        # known tokens
    int32_t num_computed      # known tokens that planned steps write; in a pending row those before the awaited ones
    int32_t num_planned       # positions that planned steps write
    int32_t num_resolved      # positions that no step in flight writes
    int32_t next_plan         # planned count from which a plan has work; 0: free, 1: pending, or moves may be due
    int32_t next_settle       # final count from which a settled step has work
    uint32_t told_step        # lower half of the number of a told row's step; 0: the row is not told
    uint8_t state             # a `RunState`
    uint8_t is_admitted       # whether the state is PENDING or RUNNING
    uint8_t first_launch      # place of the oldest launch in the ring
    uint8_t num_launches

cdef struct Launch:           # a row's part of a step in flight
    int32_t before            # planned positions before the step
    int32_t num_sampled       # most tokens that it still has to tell: drafts and one; 0: none; NOBODYS
    int64_t step              # number of the step

"""The answer to a call that got too few pages."""

from typing import NamedTuple

__all__ = ["Refusal"]


class Refusal(NamedTuple):
    """Why a call got no pages: `RunningBatch.refusal` and `StepResult.refusal`.

    The pool ``pool``, or its shard ``shard`` (None: the whole pool), has ``num_free`` free pages. ``num_reserved`` of them had
    to stay free, and the request needs at least ``num_needed``, including free pages that it hits, and pages for loads from a
    host tier. ``num_hit_tokens`` of its tokens were cached, in the tier too; 0 for `plan` and `step`. With ``shard``,
    ``num_reserved`` is 0: pages are reserved in the whole pool. ``can_wait`` is False if no page there is held: then nothing
    that runs can free one.
    """

    num_needed: int
    num_free: int
    num_reserved: int
    num_hit_tokens: int
    pool: str
    shard: int | None
    can_wait: bool

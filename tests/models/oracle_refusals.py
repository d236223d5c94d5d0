"""What a refusal is to say: see `pagepool.Refusal`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pool_ranges import Shard

from pagepool import Refusal

if TYPE_CHECKING:
    from oracle import OracleManager

HitsByGroup = Sequence[Sequence[int | None]]
"""Pages of hits by group; None stands for those that have to be loaded from the tier."""


def find_refusal(
    manager: OracleManager,
    num_missing: Sequence[int],
    hits: HitsByGroup,
    shard: range | Shard | None,
    shard_number: int | None,
    num_reserved: int = 0,
    num_hit_tokens: int = 0,
    *,
    is_growth: bool = False,
) -> Refusal | None:
    """Say what is short for hits and `num_missing` further pages of each group; None if nothing is. An admission looks at all
    pools before it looks at shards; growth and loads look at pool by pool.
    """
    pools, pool = manager.pools, manager.page_pool
    checkpoints = manager.states.checkpoints_in(hits)
    are_adopted = bool(checkpoints) and pool.free_queue.keys() >= set(checkpoints.values())
    ranges = list(pools.ranges)
    parts = ranges if shard is None else [pools.part_of(shard, i) for i in range(len(ranges))]
    free, free_in_part = ([len(pool.free_in(pages)) for pages in places] for places in (ranges, parts))
    nums_taken, nums_needed, is_loading = [], [], False
    for i, pages in enumerate(ranges):
        found = [page for group_id in pools.groups_of(i) for page in hits[group_id]]
        is_loading |= None in found
        nums_taken.append(found.count(None) + len({*pool.free_in(pages)} & {*found}))
        num_adopted = sum(group_id in checkpoints for group_id in pools.groups_of(i)) if are_adopted else 0
        nums_needed.append(nums_taken[-1] + sum(num_missing[group_id] for group_id in pools.groups_of(i)) - num_adopted)
    asked = nums_taken if is_loading else nums_needed
    reserved = [num_reserved if i == 0 else 0 for i in range(len(ranges))]
    short = [bool(num) and num + kept > num_free for num, kept, num_free in zip(asked, reserved, free, strict=True)]
    short_in_part = [num > num_free for num, num_free in zip(asked, free_in_part, strict=True)]
    if is_loading or is_growth:
        short = [any(each) for each in zip(short, short_in_part, strict=True)]
    i = next((i for are_short in (short, short_in_part) for i, is_short in enumerate(are_short) if is_short), None)
    if i is None:
        return None
    is_in_part = shard is not None and nums_needed[i] > free_in_part[i]
    pages, num_free = (parts[i], free_in_part[i]) if is_in_part else (ranges[i], free[i])
    return Refusal(
        nums_needed[i],
        num_free,
        0 if is_in_part else reserved[i],
        num_hit_tokens,
        pools.names[i],
        shard_number if is_in_part else None,
        can_wait=num_free < len(pool.sizes.usable_in(pages)),
    )

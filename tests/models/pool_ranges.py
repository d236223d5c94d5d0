"""Pools by kind as the oracle and the simulation number their pages: records, which are ranges one behind another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NULL_PAGE = 0

PageIds = list[int]


@dataclass(frozen=True)
class Shard:
    """The records of a shard in each of several pools."""

    ranges: tuple[range, ...]
    num_shards: int

    def __contains__(self, record: int) -> bool:
        return any(record in pages for pages in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(*self.ranges)


@dataclass(frozen=True)
class Pools:
    """The names of pools, the records of each, and the number of each group's pool. Record 0 is the null page of all."""

    names: tuple[str, ...]
    ranges: tuple[range, ...]
    of_group: tuple[int, ...]

    @classmethod
    def of(cls, num_pages: int | Mapping[str, int], groups: Sequence[tuple[str, bool]]) -> Pools:
        """Return the pools of groups, given by the name of the pool and whether it is a state. Those with attention come first.
        A number of pages is that of one pool.
        """
        if not isinstance(num_pages, Mapping):
            return cls(("kv",), (range(1, num_pages),), (0,) * len(groups))
        of_attention = {name for name, is_state in groups if not is_state}
        names = [name for name in num_pages if name in of_attention] + [name for name in num_pages if name not in of_attention]
        ranges: list[range] = []
        for name in names:
            start = ranges[-1].stop if ranges else 1
            ranges.append(range(start, start + num_pages[name] - 1))
        return cls(tuple(names), tuple(ranges), tuple(names.index(name) for name, _ in groups))

    @property
    def num_records(self) -> int:
        return self.ranges[-1].stop

    @property
    def are_several(self) -> bool:
        return len(self.ranges) > 1

    def items(self) -> Iterator[tuple[str, range]]:
        return zip(self.names, self.ranges, strict=True)

    def range_of(self, group_id: int) -> range | None:
        """Return the records from which a group takes pages; None where there is one pool."""
        return self.ranges[self.of_group[group_id]] if self.are_several else None

    # Shards: in one pool a range, which has the null page if it is the first.

    def are_divided(self, num_shards: int | None) -> bool:
        """Whether each pool divides evenly among more than one shard."""
        return num_shards is not None and num_shards > 1 and all((len(pages) + 1) % num_shards == 0 for pages in self.ranges)

    def shard_of_hint(self, hint: int | None, num_shards: int | None) -> range | Shard | None:
        """Return the hinted shard; None if there is no hint, or if the pools are not divided."""
        if hint is None or not self.are_divided(num_shards):
            return None
        parts = []
        for pages in self.ranges:
            size, first = (len(pages) + 1) // num_shards, pages.start - 1
            start = first + hint % num_shards * size
            parts.append(range(max(start, pages.start) if self.are_several else start, start + size))
        return Shard(tuple(parts), num_shards) if self.are_several else parts[0]

    def shard_number(self, record: int, num_shards: int) -> int:
        """Return the number of the shard that has a page."""
        pages = next((pages for pages in self.ranges if record in pages), self.ranges[0])
        return (record - pages.start + 1) * num_shards // (len(pages) + 1)

    def count_shards(self, shard: range | Shard) -> int:
        return shard.num_shards if isinstance(shard, Shard) else self.num_records // len(shard)

    def part_of(self, shard: range | Shard, pool: int) -> range:
        """Return the records of a shard in a pool."""
        return shard.ranges[pool] if isinstance(shard, Shard) else shard

    def groups_of(self, pool: int) -> list[int]:
        return [group_id for group_id, number in enumerate(self.of_group) if number == pool]

    def id_of(self, record: int, group_id: int) -> int:
        """Return the id of a group's page, which counts in its pool; another pool's page has none."""
        pages = self.ranges[self.of_group[group_id]]
        if record == NULL_PAGE:
            return NULL_PAGE
        if record not in pages:
            raise LookupError(f"group {group_id} has page {record}, its pool has {pages}")
        return record - pages.start + 1

    def record_of(self, page_id: int, group_id: int) -> int:
        """Return the record of a group's page. An id outside the pool has none."""
        pages = self.ranges[self.of_group[group_id]]
        if not 0 <= page_id <= len(pages):
            raise LookupError(f"group {group_id} has page {page_id}, its pool has {len(pages)}")
        return page_id and page_id + pages.start - 1

    def ids_by_group(self, records: Iterable[Iterable[int]]) -> tuple[PageIds, ...]:
        return tuple([self.id_of(record, group_id) for record in some] for group_id, some in enumerate(records))

    def records_by_group(self, page_ids: Iterable[Iterable[int]]) -> tuple[PageIds, ...]:
        return tuple([self.record_of(page_id, group_id) for page_id in ids] for group_id, ids in enumerate(page_ids))

    def join(self, parts: Mapping[str, Iterable[int]]) -> PageIds:
        """Return the records of ids in each pool, one pool behind another."""
        starts = {name: pages.start for name, pages in self.items()}
        return [page_id + starts[name] - 1 for name in parts for page_id in parts[name]]

    def part(self, records: Iterable[int]) -> dict[str, PageIds]:
        """Return the ids of pages in each pool that has any of them. The null page is one of the first."""
        parts: dict[str, PageIds] = {}
        for record in records:
            number = next((i for i, pages in enumerate(self.ranges) if record in pages), 0)
            parts.setdefault(self.names[number], []).append(record and record - self.ranges[number].start + 1)
        return parts

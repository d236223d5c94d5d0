"""The device of the simulation: an array of cells in place of keys and values, and numbers that identify their contents.

All groups of a pool draw from the same cells, as layers do that share one buffer, so that a page which two groups hold is seen
too. Each pool has cells of its own, exactly as many as its pages, so that an id of another pool is out of bounds or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pool_ranges import Pools
from settings import Group

NOTHING = 0
"""The value of a cell that was never written, and the history of no tokens."""

MAX_GROUPS = 64

Cells = npt.NDArray[np.int64]

Content = tuple[int, int]
"""Group, and the history of the last token of a page's lookahead, without lookahead of the page, which covers all before it."""


class ContentsError(AssertionError):
    """A wrong page, a wrong hit, a wrong count."""


def require(condition: bool, what: str, *values: Any) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise ContentsError(": ".join((what, *map(str, values))))


class Histories:
    """Numbers for everything that determines a token's keys and values: the token, the tokens before it, salt, adapter, images.

    Equal numbers are equal histories: they are the nodes of a tree of tokens, and nothing is hashed.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Any], int] = {}
        self._parents = [NOTHING]
        self.garbage: set[int] = set()

    def follow(self, parent: int, inputs: Any) -> int:
        """Return the history of `parent` followed by one token's inputs."""
        number = self._numbers.setdefault((parent, inputs), len(self._parents))
        if number == len(self._parents):
            self._parents.append(parent)
        return number

    def make_garbage(self) -> int:
        """Return a number that differs from all tokens."""
        self._parents.append(NOTHING)
        self.garbage.add(len(self._parents) - 1)
        return len(self._parents) - 1

    def list_last(self, number: int, num_tokens: int) -> list[int]:
        """Return the last histories of a prefix, the longest last."""
        numbers = []
        for _ in range(num_tokens):
            numbers.append(number)
            number = self._parents[number]
        return numbers[::-1]


class Device:
    """Cells of each pool by page and offset, shared by its groups. Page 0 is never written. With lookahead, a drafter's values
    are in further cells of each page: at each slot, the history of the last token behind its own on which they depend.
    """

    def __init__(
        self, pools: Pools, groups: Sequence[Group], histories: Histories | None = None, hash_lookahead: int = 0
    ) -> None:
        self.pools = pools
        self.groups = groups
        self.histories = histories or Histories()
        self.hash_lookahead = hash_lookahead
        self.width = max([1, *(group.page_size for group in groups if group.kind != "mamba")])
        num_cells = self.width * (2 if hash_lookahead else 1)
        self.arrays: list[Cells] = [np.zeros((len(pages) + 1, num_cells), dtype=np.int64) for pages in pools.ranges]
        self.num_written = 0
        self.num_compared = 0

    def write(self, group_id: int, slots: npt.NDArray[np.int32], histories: Sequence[int]) -> None:
        """Write computed histories into slots of a group. What the drafter has there is gone."""
        pages, offsets = self._places(group_id, slots)
        if not (pages > 0).all():
            raise ContentsError(f"a write into the null page: {slots.tolist()}")
        self._cells_of(group_id)[pages, offsets] = self._values(group_id, histories)
        if self.hash_lookahead:
            self._cells_of(group_id)[pages, offsets + self.width] = NOTHING
        self.num_written += len(histories)

    def draft(self, group_id: int, slots: npt.NDArray[np.int32], histories: Sequence[int]) -> None:
        """Write the drafter's values into slots of a group, other than those of pages that were given back."""
        pages, offsets = self._places(group_id, slots)
        values = self._values(group_id, histories)[pages > 0]
        self._cells_of(group_id)[pages[pages > 0], offsets[pages > 0] + self.width] = values

    def compare_drafts(self, group_id: int, slots: npt.NDArray[np.int32], histories: Sequence[int], what: str) -> None:
        """Raise unless the drafter's values are in slots of a group."""
        self.compare(group_id, slots, histories, f"drafter's {what}", self.width)

    def compare(self, group_id: int, slots: npt.NDArray[np.int32], histories: Sequence[int], what: str, shift: int = 0) -> None:
        """Raise unless slots of a group hold these histories."""
        pages, offsets = self._places(group_id, slots)
        offsets = offsets + shift
        read, expected = self._cells_of(group_id)[pages, offsets], self._values(group_id, histories)
        self.num_compared += len(histories)
        if not (pages > 0).all() or not np.array_equal(read, expected):
            bad = int(np.argmax((read != expected) | (pages == 0)))
            found = f"history {read[bad] // MAX_GROUPS} of group {read[bad] % MAX_GROUPS}"
            place = f"number {bad} of {len(histories)} tokens, page {pages[bad]}, slot {offsets[bad]}"
            raise ContentsError(f"{what}: group {group_id}, {place}: read {found}, computed was {histories[bad]}")

    def holds(self, group_id: int, slots: npt.NDArray[np.int32], histories: Sequence[int]) -> bool:
        """Whether slots of a group hold these histories."""
        self.num_compared += len(histories)
        read = self._cells_of(group_id)[self._places(group_id, slots)]
        return bool((slots > 0).all()) and np.array_equal(read, self._values(group_id, histories))

    def compare_page(self, record: int, content: Content) -> None:
        """Raise unless a page has a content."""
        group_id, page_id = content[0], self.pools.id_of(record, content[0])
        histories, drafts = self.list_slots(content)
        slots = np.arange(len(histories), dtype=np.int32) + page_id * len(histories)
        self.compare(group_id, slots, histories, f"cached page {page_id}")
        if self.hash_lookahead:
            self.compare_drafts(group_id, slots, drafts, f"cached page {page_id}")

    def list_slots(self, content: Content) -> tuple[list[int], list[int]]:
        """Return the histories that a page with a content holds, and the drafter's values."""
        group_id, history = content
        page_size = 1 if self.groups[group_id].kind == "mamba" else self.groups[group_id].page_size
        histories = self.histories.list_last(history, page_size + self.hash_lookahead)
        return histories[:page_size], histories[self.hash_lookahead :]

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy pages: source, destination and group of each. All are read before any is written."""
        read = [self._cells_of(group_id)[source].copy() for source, _, group_id in copies]
        for cells, (_, destination, group_id) in zip(read, copies, strict=True):
            self._cells_of(group_id)[destination] = cells

    def page(self, group_id: int, record: int) -> Cells:
        """Return the cells of a group's page."""
        return self._cells_of(group_id)[self.pools.id_of(record, group_id)]

    def read_pages(self, records: Sequence[int]) -> Cells:
        """Return a copy of the cells of pages, given by record."""
        return np.concatenate([array[1:] for array in self.arrays])[np.array(records, dtype=np.int64) - 1]

    def _cells_of(self, group_id: int) -> Cells:
        return self.arrays[self.pools.of_group[group_id]]

    def _places(self, group_id: int, slots: npt.NDArray[np.int32]) -> tuple[Any, Any]:
        """Return page and offset of each slot. A state's slots are page ids."""
        if self.groups[group_id].kind == "mamba":
            return slots, np.zeros_like(slots)
        return np.divmod(slots, self.groups[group_id].page_size)

    def _values(self, group_id: int, histories: Sequence[int]) -> Cells:
        return np.asarray(histories, dtype=np.int64) * MAX_GROUPS + group_id


def find_first_read(group: Group, position: int) -> int:
    """Return the first of the tokens that the token at `position` attends to, or whose raw keys it needs. With a reference
    window, see `find_unread`.
    """
    if group.kind == "sliding":
        return max(0, position - group.span + 1)
    if group.kind == "chunked" or group.is_ring:
        return position // group.span * group.span
    return 0


def find_unread(group: Group, position: int, prompt_end: int) -> range:
    """Return the tokens before `position` to which no token from there on attends."""
    start = prompt_end if group.kind == "reference" else 0
    first = position - group.span + 1 if group.kind == "reference" else find_first_read(group, position)
    return range(start, max(start, first))


def find_unread_pages(group: Group, position: int, prompt_end: int) -> range:
    """Return the pages to which no token from `position` on attends."""
    unread = find_unread(group, position, prompt_end)
    return range(-(-unread.start // group.page_size), unread.stop // group.page_size)

"""Reading by lists, as kernels do that get no table: the pages of a step's rows one row behind another, and the pages that
groups of rows share.

The inputs of a step are filled when the step is scheduled, and read when it has run, though rows of it may have ended. Each
token to which the step attends is read at the place that the lists give it, and compared with the history that was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from contents_device import find_first_read, find_unread, require
from contents_fronts import NUM_ROWS, BatchFront, Work

from pagepool import SharedPrefixes, StepInputs
from pagepool.errors import ArgumentError

BY_ROW = ["rows", "query_start_loc", "starts", "seq_lens"]
LISTS = ["page_starts", "page_indices", "last_page_lens", "page_offsets"]
LEVELS = ["level_query_starts", "level_page_starts", "level_page_indices", "level_last_page_lens"]
LINES = ["prefix_page_ids", "prefix_rows", "own_starts"]

Slots = npt.NDArray[np.int32]
Compare = Callable[[SimpleNamespace, int, Work], None]


class Inputs(NamedTuple):
    """Inputs that are filled for each step, and how a row of them is compared."""

    inputs: StepInputs
    fields: list[str]
    compare: Compare


class ListReader:
    """Fills the inputs of a batch's steps, and reads through them."""

    def __init__(self, front: BatchFront, rng: Random) -> None:
        self.front = front
        self.rng = rng
        self.groups = front.setting.groups
        self.listed = [i for i, group in enumerate(self.groups) if not group.is_state]
        self.shared = [i for i, group in enumerate(self.groups) if group.kind == "full"]
        self.all_inputs: list[Inputs] = []
        if self.listed:
            self._make([*BY_ROW, *LISTS], self._compare_lists, order=rng.choice(("given", "decodes")))
        if self.shared:
            num_rows, num_pages = rng.choice((None, None, 2)), rng.choice((None, None, 3))
            prefixes = SharedPrefixes(rng.randint(1, 3), rng.choice((None, 1)), num_pages, num_rows, rng.randint(0, 2))
            self._make([*BY_ROW, *LEVELS, *LINES], self._compare_groups, order="prefixes", prefixes=prefixes)
        self.filled: dict[Any, list[tuple[SimpleNamespace, Compare]]] = {}  # by step

    def _make(self, fields: list[str], compare: Compare, **options: Any) -> None:
        num_tokens = NUM_ROWS * self.front.setting.max_model_len
        options |= {"depth": self.front.depth + self.rng.randint(1, 3)}
        inputs = StepInputs(self.front.batch, num_tokens=num_tokens, num_reqs=NUM_ROWS, fields=fields, **options)
        self.all_inputs.append(Inputs(inputs, fields, compare))

    def fill(self) -> None:
        """Fill inputs for most of the steps that are scheduled; rows change unseen in the others."""
        self.filled = {step: filled for step, filled in self.filled.items() if step in self.front.steps}
        for step in self.front.steps:
            if step not in self.filled:
                are_filled = len(step) > 0 and self.rng.random() < 0.9
                self.filled[step] = [filled for each in self.all_inputs if are_filled for filled in self._fill(each, step)]

    def _fill(self, each: Inputs, step: Any) -> list[tuple[SimpleNamespace, Compare]]:
        """Fill inputs for a step; return their arrays, none if a row has no tokens in the step, which is refused."""
        has_empty = any(work.start == work.num_planned for work in self.front.list_works(step))
        try:
            self.front.batch.inputs(step, out=each.inputs)
        except ArgumentError:
            require(has_empty, "inputs are refused", step)
            return []
        require(not has_empty, "a row without tokens has inputs", step)
        self.front.world.counts["inputs filled"] += 1
        self.front.world.counts["pages that need not be read again"] += each.inputs.num_saved_pages
        arrays = {name: getattr(each.inputs, name) for name in each.fields}
        return [(SimpleNamespace(**arrays, num_rows=len(step)), each.compare)]

    def compare(self, works: Sequence[Work]) -> None:
        """Read what these works attend to, whose steps have run."""
        for step, filled in self.filled.items():
            by_row = {work.job.row: work for work in works if work.step is step}
            for arrays, compare in filled if by_row else ():
                rows = arrays.rows[arrays.query_start_loc[: arrays.num_rows]].tolist()
                for i, work in enumerate(by_row.get(row) for row in rows):
                    if work is not None:
                        planned = int(arrays.starts[i]), int(arrays.seq_lens[i])
                        require(planned == (work.start, work.num_planned), "tokens of a row", work.job, planned)
                        compare(arrays, i, work)

    # Each row alone.

    def _compare_lists(self, arrays: SimpleNamespace, i: int, work: Work) -> None:
        for group_id in self.listed:
            size, first = self.groups[group_id].page_size, find_first_read(self.groups[group_id], work.start)
            start, stop = arrays.page_starts[group_id][i : i + 2]
            pages, offset = arrays.page_indices[group_id][start:stop], int(arrays.page_offsets[group_id][i])
            require(offset == first // size * size, "a list begins at another page", work.job, group_id, offset, first)
            slots = self._list_slots(group_id, pages, int(arrays.last_page_lens[group_id][i]))
            self._compare_slots(work, group_id, slots, offset, "lists")

    # Groups of rows that share a prefix.

    def _compare_groups(self, arrays: SimpleNamespace, i: int, work: Work) -> None:
        """Compare what a row reads, with others and alone. It writes none of the pages that it reads with others, but another
        row of the step may fill them, unless pages hit only once they are computed.
        """
        for group_id in self.shared:
            shared, own = self._read_levels(arrays, group_id, i)
            lines = self._read_lines(arrays, group_id, i)
            num_shared = int(arrays.own_starts[i])
            require(num_shared == len(shared) == len(lines), "tokens of groups", work.job, group_id, shared, lines)
            self._compare_slots(work, group_id, np.concatenate([shared, own]), 0, "levels")
            self._compare_slots(work, group_id, np.concatenate([lines, own]), 0, "lines")
            pages, written = self._list_pages(group_id, shared) | self._list_pages(group_id, lines), set()
            for writer in self.front.list_works(work.step) if self.front.caches_computed else [work]:
                slots = writer.find_slots(group_id, writer.start, writer.num_planned)
                written |= self._list_pages(group_id, slots)
            require(pages.isdisjoint(written), "a page that is shared and written", work.job, group_id, pages, written)

    def _read_levels(self, arrays: SimpleNamespace, group_id: int, i: int) -> tuple[Slots, Slots]:
        """Return the slots that a row reads with others, level by level, and those that it reads alone."""
        found = []
        for level, queries in enumerate(arrays.level_query_starts):
            run = int(np.searchsorted(queries, arrays.query_start_loc[i], side="right")) - 1
            start, stop = arrays.level_page_starts[group_id][level, run : run + 2]
            pages = arrays.level_page_indices[group_id][level, start:stop]
            found.append(self._list_slots(group_id, pages, int(arrays.level_last_page_lens[group_id][level, run])))
        return np.concatenate(found[:-1]), found[-1]

    def _read_lines(self, arrays: SimpleNamespace, group_id: int, i: int) -> Slots:
        """Return the slots that a row reads with others, group by group."""
        lines = arrays.prefix_page_ids[group_id][(arrays.prefix_rows == i).any(axis=1)]
        return self._list_slots(group_id, lines[lines > 0], self.groups[group_id].page_size)

    def _list_pages(self, group_id: int, slots: Slots) -> set[int]:
        return set((slots // self.groups[group_id].page_size).tolist())

    def _list_slots(self, group_id: int, pages: Slots, last_page_len: int) -> Slots:
        """Return the slots of pages that are full up to the last one."""
        size = self.groups[group_id].page_size
        require(0 <= last_page_len <= size, "tokens in the last page", group_id, last_page_len)
        slots: Slots = (pages[:, None] * size + np.arange(size, dtype=np.int32)).ravel()
        return slots[: max(0, len(slots) - size + last_page_len)]

    def _compare_slots(self, work: Work, group_id: int, slots: Slots, offset: int, what: str) -> None:
        """Compare the slots of tokens from `offset` on up to the last one of a step, each once. Behind the known tokens and the
        drafts there is room.
        """
        group, world = self.groups[group_id], self.front.world
        require(offset + len(slots) == work.num_planned, f"tokens in a row's {what}", work.job, group_id, offset, len(slots))
        read = [range(find_first_read(group, work.start), work.stop)]
        if group.kind == "reference":
            unread = find_unread(group, work.start, work.job.prompt_end)
            read = [range(min(unread.start, work.stop)), range(unread.stop, work.stop)]
        for tokens in read:
            values, at = work.list_values(tokens.start, tokens.stop), slots[tokens.start - offset : tokens.stop - offset]
            world.device.compare(group_id, at, values, f"{what} of {work.job}")
            world.counts[f"tokens read by {what}"] += len(values)
        room, expected = slots[work.stop - offset :], work.find_slots(group_id, work.stop, work.num_planned)
        require(np.array_equal(room, expected), f"room for drafts in {what}", work.job, group_id, room, expected)

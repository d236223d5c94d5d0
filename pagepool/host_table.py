"""The host's half of page tables, the same with jax and with torch, and how much of a table a commit sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import ref

import numpy as np

from pagepool._core import GroupedRows, TableRows
from pagepool.arguments import MAX_SIZE, as_list, require_int
from pagepool.errors import ArgumentError
from pagepool.specs import cdiv

SEGMENT = 64
"""Columns per segment, the unit of transfer."""

SMALLEST_PAYLOAD = 16
"""Smallest payload in segments. Each payload size is four times the previous one."""

FULL_UPLOAD_SHARE = 16
"""If more than 1/16 of a table is dirty, sending the whole table is cheaper."""


class HostTable(TableRows):
    """The page ids of each row on the host: the base of `pagepool.PageTable` and `pagepool.torch.PageTable`."""

    batch: ref[Any] | None = None  # the batch that fills the rows

    def __repr__(self) -> str:
        """Return the size and use of the table."""
        return (
            f"PageTable(max_num_reqs={self.max_num_reqs}, max_num_pages_per_req={self.max_num_pages_per_req}, "
            f"num_rows={np.count_nonzero(self.num_pages_per_row)}, num_pages={self.num_pages_per_row.sum()}, "
            f"cpu_version={self.cpu_version})"
        )


class HostTables(GroupedRows):
    """The host tables of several groups: the base of both `MultiGroupPageTable` classes."""

    def __init__(
        self,
        max_model_len: int,
        page_sizes: Sequence[int],
        make_table: Callable[[int, Sequence[int]], HostTable],
        sink_page_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Call `make_table` with the number of columns of each group, ``ceil(max_model_len / page_size)``, and its sinks."""
        max_model_len = require_int("max_model_len", max_model_len, 1, MAX_SIZE)
        listed = as_list("page_sizes", page_sizes, "a list of ints")
        self.page_sizes = [require_int("page_sizes", page_size, 1, MAX_SIZE) for page_size in listed]
        sinks = (
            [()] * len(listed) if sink_page_ids is None else as_list("sink_page_ids", sink_page_ids, "a list for each group")
        )
        if len(sinks) != len(listed):
            raise ArgumentError(f"sink_page_ids: got {len(sinks)} groups, allowed: {len(listed)}, as many as page_sizes")
        columns = [cdiv(max_model_len, page_size) for page_size in self.page_sizes]
        super().__init__(make_table(*each) for each in zip(columns, sinks, strict=True))

    def __repr__(self) -> str:
        """Describe the page size and the table of each group."""
        return f"MultiGroupPageTable(page_sizes={self.page_sizes}, page_tables={list(self.page_tables)})"

    def clear(self) -> None:
        """Empty all rows of all groups, on the host and on the device."""
        for table in self.page_tables:
            table.clear()

    def check(self) -> None:
        """Check each group's table. See `PageTable.check`."""
        for table in self.page_tables:
            table.check()


def count_values(tables: Sequence[TableRows]) -> int:
    """Return the number of page ids in all tables together."""
    return sum([table.max_num_reqs * table.max_num_pages_per_req for table in tables])


@lru_cache(maxsize=64)
def get_payload_sizes(num_values: int) -> tuple[int, ...]:
    """Return the payload sizes in segments. The last holds the most segments worth sending instead of all `num_values` ids."""
    sizes = [SMALLEST_PAYLOAD]
    last = get_max_num_segments(num_values)
    while sizes[-1] < last:
        sizes.append(4 * sizes[-1])
    return tuple(sizes)


def get_max_num_segments(num_values: int) -> int:
    """Return the largest number of dirty segments worth sending instead of all ids. The smallest payload is cheaper than any
    table.
    """
    return max(SMALLEST_PAYLOAD, num_values // (FULL_UPLOAD_SHARE * SEGMENT))

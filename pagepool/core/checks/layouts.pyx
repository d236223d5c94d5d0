"""Addresses of numbers in requests, rows and page tables, for tests that overwrite them."""

from libc.stdint cimport uintptr_t

from pagepool.core.holding cimport Held, Holding, RequestPages
from pagepool.core.rows cimport RowRecord, RowStore, RunningRows
from pagepool.core.tables cimport TableRows

import numpy as np

from pagepool.errors import ArgumentTypeError

cdef RowRecord NO_ROW         # all zeros
cdef object RECORD = np.asarray(<RowRecord[:1]>&NO_ROW).dtype
cdef object INT32 = np.dtype(np.int32)


cdef dict addresses_in(const Holding *holding):
    """Locate the page ids and counts of the first group of a holding."""
    cdef const Held *held = holding.held
    if holding.num_groups == 0:
        return {}
    return {
        "ids": (<uintptr_t>held.ids, (held.num_pages,), INT32), "num_pages": (<uintptr_t>&held.num_pages, (), INT32),
        "num_cached": (<uintptr_t>&held.num_cached, (), INT32), "num_skipped": (<uintptr_t>&held.num_skipped, (), INT32),
    }


def locate_numbers(holder) -> dict:
    """Return the address, shape and type of numbers by name: the pages of a request, or of the first row, in the first group,
    the stamp and the records of rows, or the dirty flags of a table's rows. Addresses change when a list of pages grows.
    """
    cdef RowStore rows
    cdef TableRows table
    if isinstance(holder, RequestPages):
        return addresses_in(&(<RequestPages>holder).holding)
    if isinstance(holder, RunningRows):
        rows = (<RunningRows>holder).rows
        rows.check_made()
        return dict(
            addresses_in(&rows.batch.rows[0].holding), stamp=(<uintptr_t>&rows.batch.stamp, (), np.dtype(np.uint32)),
            records=(<uintptr_t>rows.batch.records, (rows.batch.num_rows,), RECORD),
        )
    if isinstance(holder, TableRows):
        table = holder
        return {"is_row_dirty": (<uintptr_t>table.table.is_row_dirty, (table.table.num_rows,), np.dtype(np.uint8))}
    raise ArgumentTypeError(f"holder: got {type(holder).__name__}, allowed: RequestPages, RunningRows or TableRows")

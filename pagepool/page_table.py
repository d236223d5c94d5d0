"""Page tables: which pages hold each running request's tokens, on the host and on the device.

A commit copies the dirty segments, 64 columns each, into a new payload, which is never written again, and passes it to one
compiled program, a donated scatter. Later writes to the host table therefore cannot reach the device, although jax on CPU
aliases 64-byte-aligned NumPy buffers (jax issue 37830).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagepool._core import pack_dirty_segments
from pagepool.arguments import MAX_SIZE, require_flag, require_int
from pagepool.device import call_with_payload, get_shard_map, import_jax
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError
from pagepool.host_table import HostTable, HostTables, count_values, get_max_num_segments, get_payload_sizes

if TYPE_CHECKING:
    import jax

__all__ = ["PAGE_TABLE_PADDING_VAL", "SLOT_MAPPING_PADDING_VAL", "MultiGroupPageTable", "PageTable", "device_slot_mapping"]

PAGE_TABLE_PADDING_VAL = 0
"""Value after a row's last page: the null page."""

SLOT_MAPPING_PADDING_VAL = 0
"""Slot of padding tokens: the first slot of the null page."""

Int32Array = npt.NDArray[np.int32]

COMMIT_LOCK = threading.RLock()
"""Lock that serialises commits: two commits donating the same array would lose it."""


def _renew_commit_lock() -> None:
    """Replace the lock in a forked process, where a thread that held it does not exist."""
    global COMMIT_LOCK
    COMMIT_LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_commit_lock)


class PageTable(HostTable):
    """The page ids of each row: int32 ``[max_num_reqs, max_num_pages_per_req]``, zeros after each row's last page.

    Rows change on the host, one native call each; `commit` sends the changes to the device. ``num_pages_per_row`` counts each
    row's pages; ``cpu_version`` changes with each change. After writing to ``page_table_cpu`` directly, call `mark_dirty`.

    >>> table = PageTable(max_num_reqs=4, max_num_pages_per_req=8, max_num_batched_tokens=64)
    >>> table.append_row([5, 6], 1)
    >>> table.append_row([7], 1)
    >>> table.page_table_cpu[1].tolist(), table.num_pages_per_row.tolist()
    ([5, 6, 7, 0, 0, 0, 0, 0], [0, 3, 0, 0])
    >>> table.slot_mapping(rows=[1, 1], positions=[0, 35], page_size=16).tolist()
    [80, 115]
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_pages_per_req: int,
        max_num_batched_tokens: int,
        sharding: jax.sharding.Sharding | None = None,
        *,
        donate: bool = True,
        sink_page_ids: Sequence[int] = (),
    ) -> None:
        """Pages `sink_page_ids`, those of `CacheManager.sink_page_ids` for a group with sinks, stand in front of each row, in
        columns of their own: ``num_pages_per_row`` and positions do not count them.

        `sharding` None means the first device. With `donate` False the arrays of earlier commits stay valid, and each commit
        copies the table. `max_num_batched_tokens`, the engine's token limit per step, is only stored.

        Making a table neither imports jax nor makes an array; reading `page_table` does.
        """
        if sharding is not None and not hasattr(sharding, "is_fully_addressable"):
            raise ArgumentTypeError(f"sharding: got {type(sharding).__name__}, allowed: a jax.sharding.Sharding, or None")
        donate = require_flag("donate", donate)
        super().__init__(max_num_reqs, max_num_pages_per_req, sink_page_ids)
        self.max_num_batched_tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, 0, MAX_SIZE)
        self._donate = donate
        self._sharding = sharding
        self._array: jax.Array | None = None

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of the array, never None: an uncommitted array would need one more compiled program."""
        if self._sharding is None:
            jax = import_jax()
            self._sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return self._sharding

    @property
    def page_table(self) -> jax.Array:
        """The device array as of the last commit, int32; zeros before the first commit. Reading it raises ImportError without
        jax.
        """
        array = self._array
        if array is None:
            with COMMIT_LOCK:
                if self._array is None:
                    self._array = upload(np.zeros_like(self.page_table_cpu), self.sharding)
                array = self._array
        return array

    def distrust(self) -> None:
        """Mark all rows dirty after a failure that left the device array in an unknown state. A lost array is made again."""
        self.mark_dirty()
        if self._array is not None and is_lost(self._array):
            self._array = None

    def clear(self) -> None:
        """Empty all rows, on the host and on the device."""
        with COMMIT_LOCK:
            try:
                self.clear_rows()
                self._array = None  # the next read makes zeros again
            except BaseException:
                self.distrust()
                raise

    def check(self) -> None:
        """Check the host table, and compare the device array with it outside dirty segments.

        Raise IntegrityError naming the first wrong row. O(table), and a copy of the device array if there is one.
        """
        super().check()
        with COMMIT_LOCK:
            if self._array is not None and self.sharding.is_fully_addressable:
                unsent = self.find_unsent(np.asarray(self._array))
                if unsent is not None:
                    row, column = unsent
                    raise IntegrityError(f"row {row}, column {column}: the device has another page in a clean segment")

    def get_device_tensor(self) -> jax.Array:
        """Return the device array as of the last commit."""
        return self.page_table

    def get_cpu_tensor(self) -> npt.NDArray[np.int32]:
        """Return the host table itself, not a copy."""
        return self.page_table_cpu

    def commit(self, num_reqs: int) -> jax.Array:
        """Send the changes in the first `num_reqs` rows and return the device array. Later rows stay dirty.

        Without changes this returns the same array. Otherwise arrays returned before become invalid, unless the table was made
        with ``donate=False``; a running step that reads one is safe. Tables replicated over processes need equal host tables in
        all of them, which jax does not check. Commits from several threads are serialised; other threads may change rows
        meanwhile. Do not donate the array to programs of your own. Raise ArgumentError for a number of rows outside the table,
        ArgumentTypeError in a traced function.
        """
        return commit_tables((self,), num_reqs)[0]

    def warmup(self) -> None:
        """Compile all programs of `commit` now, so that none is compiled later: four for 256 x 2048."""
        warmup_tables((self,))


class MultiGroupPageTable(HostTables):
    """Page tables with the same rows, one for each cache group. A call changes all or none; one program commits all.

    >>> tables = MultiGroupPageTable(4, max_model_len=64, max_num_batched_tokens=64, page_sizes=[16, 32])
    >>> tables.append_rows_batch([[[1, 2], [3]], [[4], [5]]], req_indices=[0, 2])
    >>> tables[0].page_table_cpu[0].tolist(), tables[1].page_table_cpu[2].tolist()
    ([1, 2, 0, 0], [5, 0])
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        page_sizes: Sequence[int],
        sharding: jax.sharding.Sharding | None = None,
        *,
        donate: bool = True,
        sink_page_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`page_sizes` are in tokens, one a group: group ``g`` has ``ceil(max_model_len / page_sizes[g])`` columns behind
        those of ``sink_page_ids[g]``; None: no group has sinks.
        """
        super().__init__(
            max_model_len,
            page_sizes,
            lambda num_columns, sinks: PageTable(
                max_num_reqs, num_columns, max_num_batched_tokens, sharding, donate=donate, sink_page_ids=sinks
            ),
            sink_page_ids,
        )

    if TYPE_CHECKING:

        @property
        def page_tables(self) -> tuple[PageTable, ...]:
            """The table of each group."""

        def __getitem__(self, i: int, /) -> PageTable:
            """Return the table of a group."""

    def commit(self, num_reqs: int) -> tuple[jax.Array, ...]:
        """Send the changes in the first `num_reqs` rows of all groups together. See `PageTable.commit`."""
        return commit_tables(self.page_tables, num_reqs) if self.page_tables else ()

    def warmup(self) -> None:
        """Compile all programs of `commit`."""
        if self.page_tables:
            warmup_tables(self.page_tables)


def device_slot_mapping(page_table: Any, rows: Any, positions: Any, page_size: int) -> Any:
    """Return the slots of tokens, int32 ``[num_tokens]``, computed on the device inside the caller's jit.

    `page_table` is a device array ``[max_num_reqs, max_num_pages_per_req]``; `rows` and `positions` are int32 ``[num_tokens]``,
    and count from the first sink in a table that has any.
    In jax, indices outside the table are clamped and not reported; torch indexes tensors by its own rules.
    """
    return page_table[rows, positions // page_size] * page_size + positions % page_size


def commit_tables(tables: tuple[PageTable, ...], num_reqs: int) -> tuple[jax.Array, ...]:
    """Send changes in the first `num_reqs` rows and return the arrays. A failure makes all rows dirty. O(segments + rows)."""
    with COMMIT_LOCK:
        num_dirty = sum([table.count_dirty_segments(0, num_reqs) for table in tables])
        if num_dirty:
            try:
                send(tables, num_reqs, num_dirty)
            except BaseException:
                for table in tables:
                    table.distrust()
                raise
        return tuple([table.page_table for table in tables])


def send(tables: tuple[PageTable, ...], num_reqs: int, num_dirty: int) -> None:
    """Send the dirty segments, or the whole tables if that is cheaper and no later row is dirty."""
    num_rows, num_values = tables[0].max_num_reqs, count_values(tables)
    if num_dirty > get_max_num_segments(num_values) and not any(t.count_dirty_segments(num_reqs, num_rows) for t in tables):
        for table in tables:
            table._array = upload(table.copy_aligned(), table.sharding)
        return
    sizes = get_payload_sizes(num_values)
    while num_dirty > 0:
        size = next((size for size in sizes if size >= num_dirty), sizes[-1])
        scatter_payload(tables, pack_dirty_segments(tables, num_reqs, size))
        num_dirty -= size


def warmup_tables(tables: tuple[PageTable, ...]) -> None:
    """Compile the program for each payload size, with payloads that change nothing."""
    with COMMIT_LOCK:
        for size in get_payload_sizes(count_values(tables)):
            scatter_payload(tables, pack_dirty_segments(tables, 0, size))


def scatter_payload(tables: tuple[PageTable, ...], payload: tuple[Int32Array, Int32Array]) -> None:
    """Write a payload, and replace the device arrays by the results."""
    scatter = get_scatter(tuple([table.sharding for table in tables]), tables[0]._donate)
    arrays = call_with_payload(scatter, tuple([table.page_table for table in tables]), *payload)
    refuse_tracers(arrays)
    for table, array in zip(tables, arrays, strict=True):
        table._array = array


def refuse_tracers(arrays: Sequence[jax.Array]) -> None:
    """Raise ArgumentTypeError if the caller is traced: the arrays exist in its program only."""
    if any(isinstance(array, import_jax().core.Tracer) for array in arrays):
        raise ArgumentTypeError("page table: got a call in a traced function, allowed: calls outside of jax.jit")


def is_lost(array: jax.Array) -> bool:
    """Whether an array, or one of its shards, was donated or deleted."""
    return array.is_deleted() or any(shard.data.is_deleted() for shard in array.addressable_shards)


def upload(table: Int32Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Send an array that is never written again. Each process sends its own part, since `device_put` would first compare all
    parts.
    """
    jax = import_jax()
    with jax.transfer_guard_host_to_device("allow"):
        if sharding.is_fully_addressable:
            array: Any = jax.device_put(table, sharding)
        else:
            array = jax.make_array_from_callback(table.shape, sharding, lambda index: table[index])
    refuse_tracers([array])
    return array  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def get_scatter(shardings: tuple[jax.sharding.Sharding, ...], donate: bool) -> Callable[..., Any]:
    """Return the program that writes a payload into tables with these shardings. jax compiles it once per shape."""
    jax = import_jax()
    donated = (0,) if donate else ()
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.jit(write_segments, donate_argnums=donated, out_shardings=shardings)  # type: ignore[no-any-return]
    return LocalScatter(shardings, donated)


def write_segments(tables: tuple[Any, ...], segments: Any, starts: Any, first_rows: Any = None) -> tuple[Any, ...]:
    """Write a payload (traced). If the arrays are parts of tables, `first_rows` [1] is the table row of their row 0.

    Without `first_rows` only the scatter runs: jax on CPU runs trivial programs immediately, and others later, on a thread.
    """
    written = []
    for table, at in zip(tables, starts, strict=True):
        local = at if first_rows is None else find_local_starts(at, first_rows[0], table.shape[0])
        written.append(scatter_segments(table, local, segments[:, : table.shape[1]]))
    return tuple(written)


def find_local_starts(starts: Any, first_row: Any, num_rows: int) -> Any:
    """Return starts relative to a part of a table (traced). Starts in other parts get distinct rows outside this part."""
    jax = import_jax()
    rows, columns = starts[:, 0] - first_row, starts[:, 1]
    outside = num_rows + jax.lax.iota(rows.dtype, rows.shape[0])
    return jax.numpy.stack([jax.numpy.where((rows >= 0) & (rows < num_rows), rows, outside), columns], axis=1)


def scatter_segments(table: Any, starts: Any, segments: Any) -> Any:
    """Set ``table[row, column:column + width] = segments[i]`` for each ``starts[i]`` (traced); starts outside are dropped."""
    lax = import_jax().lax
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(table, starts, segments, dimensions, mode=lax.GatherScatterMode.FILL_OR_DROP)


class LocalScatter:
    """Program writing a payload into this process's parts of tables that span several processes.

    The parts are treated as one array over the local devices, so no process waits for another, and each may send its own
    payload or none. Tables may be replicated or sharded by rows.
    """

    def __init__(self, shardings: tuple[jax.sharding.Sharding, ...], donated: tuple[int, ...]) -> None:
        """Raise ArgumentError if the tables' shardings differ."""
        jax = import_jax()
        if len(set(shardings)) != 1:
            raise ArgumentError(f"sharding: got {len(set(shardings))} for tables that span processes, allowed: one for all")
        self._sharding: Any = shardings[0]
        devices: list[Any] = list(self._sharding.addressable_devices)
        self._devices = sorted(devices, key=lambda device: int(device.id))
        mesh = jax.sharding.Mesh(np.array(self._devices), ("local",))
        by_device, everywhere = jax.sharding.PartitionSpec("local"), jax.sharding.PartitionSpec()
        self._local_sharding = jax.sharding.NamedSharding(mesh, by_device)
        program = get_shard_map()(
            write_segments, mesh=mesh, in_specs=(by_device, everywhere, everywhere, by_device), out_specs=by_device
        )
        self._program = jax.jit(program, donate_argnums=donated)

    def __call__(self, tables: tuple[Any, ...], segments: Int32Array, starts: Int32Array) -> tuple[Any, ...]:
        """Write the payload, and return the new tables."""
        local = self._program(*self.localize(tables, segments, starts))
        make, sharding = import_jax().make_array_from_single_device_arrays, self._sharding
        parts = [[shard.data for shard in array.addressable_shards] for array in local]
        return tuple(make(table.shape, sharding, own) for table, own in zip(tables, parts, strict=True))

    def localize(self, tables: tuple[Any, ...], segments: Int32Array, starts: Int32Array) -> tuple[Any, ...]:
        """Return the program's arguments; the last one is the first table row of each local device's part."""
        num_rows, num_columns = tables[0].shape
        slices = self._sharding.addressable_devices_indices_map(tables[0].shape)
        if any(columns.indices(num_columns) != (0, num_columns, 1) for _, columns in slices.values()):
            raise ArgumentError("sharding: got one of the columns of a table that spans processes, allowed: one of its rows")
        first_rows = [slices[device][0].indices(num_rows)[0] for device in self._devices]
        return tuple([self._as_local(table) for table in tables]), segments, starts, np.array(first_rows, dtype=np.int32)

    def _as_local(self, table: Any) -> Any:
        parts = {shard.device: shard.data for shard in table.addressable_shards}
        ordered = [parts[device] for device in self._devices]
        shape = (sum(part.shape[0] for part in ordered), table.shape[1])
        return import_jax().make_array_from_single_device_arrays(shape, self._local_sharding, ordered)

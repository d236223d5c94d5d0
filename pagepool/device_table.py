"""The programs that write page tables on the device. A commit sends only what changed, by one donated scatter for all groups.

A commit copies the dirty 64-column windows into a new payload, which is never written again, and passes it to one compiled
program. Later writes to the host table therefore cannot reach the device, although jax on CPU aliases 64-byte-aligned NumPy
buffers (jax issue 37830). docs/design.md compares this approach with others that were measured.

jax is imported when a device copy is first requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagepool.errors import ArgumentError

if TYPE_CHECKING:
    import jax

__all__ = [
    "call_with_payload",
    "get_max_num_windows",
    "get_payload_sizes",
    "get_scatter",
    "get_shard_map",
    "import_jax",
    "is_lost",
    "upload",
]

WINDOW = 64
"""Columns per window, the unit of transfer."""

SMALLEST_PAYLOAD = 16
"""In windows; each payload size is four times the previous one."""

FULL_UPLOAD_SHARE = 16
"""If more than one part in 16 of a table is dirty, sending the whole table is cheaper."""

Int32Array = npt.NDArray[np.int32]


def import_jax() -> Any:
    """Return the module jax. ImportError names the extra to install."""
    try:
        import jax
    except ImportError as error:
        raise ImportError(
            "page tables, page copies and host pages on a device need jax: pip install 'pagepool[jax]' (all else works without)"
        ) from error
    return jax


def is_lost(array: jax.Array) -> bool:
    """Whether an array, or one of its shards, was donated or deleted."""
    return array.is_deleted() or any(shard.data.is_deleted() for shard in array.addressable_shards)


def upload(table: Int32Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Send an array that is never written again. With several processes each sends its own part, because `device_put` would
    first compare the whole table between them.
    """
    module = import_jax()
    array: jax.Array
    with module.transfer_guard_host_to_device("allow"):
        if sharding.is_fully_addressable:
            array = module.device_put(table, sharding)
        else:
            array = module.make_array_from_callback(table.shape, sharding, lambda index: table[index])
    return array


@lru_cache(maxsize=64)
def get_payload_sizes(num_values: int) -> tuple[int, ...]:
    """Return the payload sizes in windows. The last holds the most windows that are sent instead of all `num_values` ids."""
    sizes = [SMALLEST_PAYLOAD]
    last = get_max_num_windows(num_values)
    while sizes[-1] < last:
        sizes.append(4 * sizes[-1])
    return tuple(sizes)


def get_max_num_windows(num_values: int) -> int:
    """Return the most dirty windows that are sent instead of all ids. The smallest payload is cheaper than any table."""
    return max(SMALLEST_PAYLOAD, num_values // (FULL_UPLOAD_SHARE * WINDOW))


def call_with_payload(program: Callable[..., Any], arrays: Sequence[jax.Array], *payload: Any) -> Any:
    """Call a program with arrays of the device and with host arrays, which a transfer guard does not refuse."""
    jax = import_jax()
    if jax.config.jax_transfer_guard_host_to_device is None:  # no guard is set, and entering the context takes time
        return program(arrays, *payload)
    with jax.transfer_guard_host_to_device("allow"):
        return program(arrays, *payload)


Scatter = Callable[[tuple[Any, ...], Int32Array, Int32Array], tuple[Any, ...]]


@lru_cache(maxsize=64)
def get_scatter(shardings: tuple[jax.sharding.Sharding, ...], donate: bool) -> Scatter:
    """Return the program that writes a payload into tables with these shardings. jax compiles it once per shape."""
    jax = import_jax()
    donated = (0,) if donate else ()
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.jit(write_windows, donate_argnums=donated, out_shardings=shardings)  # type: ignore[no-any-return]
    return LocalScatter(shardings, donated)


def write_windows(tables: tuple[Any, ...], windows: Any, starts: Any, first_rows: Any = None) -> tuple[Any, ...]:
    """Write a payload (traced). If the arrays are parts of tables, `first_rows` [1] is the table row of their row 0.

    Without it nothing is computed: jax on CPU runs trivial programs immediately, and others later, on a thread.
    """
    written = []
    for table, at in zip(tables, starts, strict=True):
        local = at if first_rows is None else find_local_starts(at, first_rows[0], table.shape[0])
        written.append(scatter_windows(table, local, windows[:, : table.shape[1]]))
    return tuple(written)


def find_local_starts(starts: Any, first_row: Any, num_rows: int) -> Any:
    """Return starts relative to a part of a table (traced). Starts in other parts get distinct rows outside this part."""
    jax = import_jax()
    rows, columns = starts[:, 0] - first_row, starts[:, 1]
    outside = num_rows + jax.lax.iota(rows.dtype, rows.shape[0])
    return jax.numpy.stack([jax.numpy.where((rows >= 0) & (rows < num_rows), rows, outside), columns], axis=1)


def scatter_windows(table: Any, starts: Any, windows: Any) -> Any:
    """Set ``table[row, column:column + width] = windows[i]`` for each ``starts[i]`` (traced); starts outside are dropped."""
    lax = import_jax().lax
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(table, starts, windows, dimensions, mode=lax.GatherScatterMode.FILL_OR_DROP)


class LocalScatter:
    """Writes a payload into this process's parts of tables that span several processes.

    The parts are treated as one array over the local devices, so no process waits for another, and each may send its own
    payload or none. Tables may be replicated or sharded by rows.
    """

    def __init__(self, shardings: tuple[jax.sharding.Sharding, ...], donated: tuple[int, ...]) -> None:
        """ArgumentError if the tables' shardings differ."""
        jax = import_jax()
        if len(set(shardings)) != 1:
            raise ArgumentError("sharding: tables that span processes must all have the same sharding")
        self._sharding: Any = shardings[0]
        devices: list[Any] = list(self._sharding.addressable_devices)
        self._devices = sorted(devices, key=lambda device: int(device.id))
        mesh = jax.sharding.Mesh(np.array(self._devices), ("local",))
        by_device, everywhere = jax.sharding.PartitionSpec("local"), jax.sharding.PartitionSpec()
        self._local_sharding = jax.sharding.NamedSharding(mesh, by_device)
        program = get_shard_map()(
            write_windows, mesh=mesh, in_specs=(by_device, everywhere, everywhere, by_device), out_specs=by_device
        )
        self._program = jax.jit(program, donate_argnums=donated)

    def __call__(self, tables: tuple[Any, ...], windows: Int32Array, starts: Int32Array) -> tuple[Any, ...]:
        """Write the payload, and return the new tables."""
        local = self._program(*self.localize(tables, windows, starts))
        make, sharding = import_jax().make_array_from_single_device_arrays, self._sharding
        parts = [[shard.data for shard in array.addressable_shards] for array in local]
        return tuple(make(table.shape, sharding, own) for table, own in zip(tables, parts, strict=True))

    def localize(self, tables: tuple[Any, ...], windows: Int32Array, starts: Int32Array) -> tuple[Any, ...]:
        """Return the program's arguments, last the first table row of each local device's part."""
        num_rows, num_columns = tables[0].shape
        slices = self._sharding.addressable_devices_indices_map(tables[0].shape)
        if any(columns.indices(num_columns) != (0, num_columns, 1) for _, columns in slices.values()):
            raise ArgumentError("sharding: a table that spans processes may be sharded by rows, not by columns")
        first_rows = [slices[device][0].indices(num_rows)[0] for device in self._devices]
        return tuple([self._as_local(table) for table in tables]), windows, starts, np.array(first_rows, dtype=np.int32)

    def _as_local(self, table: Any) -> Any:
        parts = {shard.device: shard.data for shard in table.addressable_shards}
        ordered = [parts[device] for device in self._devices]
        shape = (sum(part.shape[0] for part in ordered), table.shape[1])
        return import_jax().make_array_from_single_device_arrays(shape, self._local_sharding, ordered)


def get_shard_map(is_checked: bool = True) -> Callable[..., Any]:
    """Return jax's `shard_map`. With `is_checked` it checks that replicated values are equal."""
    jax = import_jax()
    if hasattr(jax, "shard_map"):
        return jax.shard_map if is_checked else partial(jax.shard_map, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map if is_checked else partial(shard_map, check_rep=False)

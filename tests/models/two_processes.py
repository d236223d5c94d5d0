"""Program: one of two processes that share page tables. Arguments: the coordinator's address, and which process this is.

Each has two simulated CPU devices. The tables are replicated, or each process holds half of the rows. What and when the
processes commit differs: payloads of other sizes, full uploads, commits in one of them alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest
from devices import COLLECTIVES, commit_in_all_ways, count_compilations, count_compilations_of_warmup, read_shards
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from settings import NUM_OPERATIONS
from table_model import Work, make_grouped_work, make_work

import pagepool
from pagepool._core import pack_dirty_segments
from pagepool.errors import ArgumentError
from pagepool.page_table import LocalScatter, get_payload_sizes, get_scatter, is_lost

NUM_ROWS = 16
NUM_COLUMNS = 257


def make_shardings() -> dict[str, NamedSharding]:
    """Return ways to place a table: in the quick suite two of them."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("rows",))
    shardings = {
        "replicated": NamedSharding(mesh, PartitionSpec()),
        "by rows, devices in turn": NamedSharding(Mesh(devices[[0, 2, 1, 3]], ("rows",)), PartitionSpec("rows")),
    }
    if NUM_OPERATIONS >= 200_000:
        shardings["by rows"] = NamedSharding(mesh, PartitionSpec("rows"))
        halves = Mesh(devices.reshape(2, 2), ("rows", "copies"))
        shardings["by rows in halves"] = NamedSharding(halves, PartitionSpec("rows"))
    return shardings


def commit(work: Work, num_reqs: int) -> None:
    """What this process holds is what its model says."""
    arrays = work.commit(num_reqs)
    work.overwrite_host()
    work.model.commit(num_reqs)
    for array, (table, model) in zip(arrays, work.pairs, strict=True):
        assert array.sharding == table.sharding
        for index, part in read_shards(array):
            np.testing.assert_array_equal(part, model.on_device[index])
    work.restore_host()


def commit_unlike(work: Work, process: int) -> None:
    """The same rows in both processes, but other payloads, more or fewer commits, or one full upload."""
    for step in range(30):
        if step % 5 == process:
            commit(work, NUM_ROWS)  # the other one sends this with its next, larger payload
        for _ in range(1 + step % 4):
            work.do()
        if step % 7 == process:
            work.tables.mark_dirty()
    commit(work, NUM_ROWS)


def commit_alone(work: Work, process: int) -> None:
    """Process 1 changes and commits rows, process 0 does nothing."""
    if process == 1:
        for num_reqs in (3, NUM_ROWS, NUM_ROWS // 2, NUM_ROWS):
            work.do()
            commit(work, num_reqs)


def check_program(sharding: NamedSharding) -> None:
    """The program runs on this process's devices alone, in place."""
    table = pagepool.PageTable(NUM_ROWS, NUM_COLUMNS, 64, sharding)
    scatter = get_scatter((sharding,), True)
    assert isinstance(scatter, LocalScatter)
    arguments = scatter.localize((table.page_table,), *pack_dirty_segments((table,), 0, 16))
    text = scatter._program.lower(*arguments).compile().as_text()
    assert not [name for name in COLLECTIVES if name in text]
    assert "input_output_alias" in text


def check_compilations(sharding: NamedSharding, process: int) -> None:
    """As many as payload sizes, whatever the other process does."""
    table = pagepool.PageTable(NUM_ROWS, 2000, 64, sharding)
    assert count_compilations_of_warmup(table) == len(get_payload_sizes(table.page_table_cpu.size))
    with count_compilations() as later:
        for num_reqs in range(process, NUM_ROWS + 1):
            table.mark_dirty()
            table.commit(num_reqs).block_until_ready()
    assert not later


def check_donation(sharding: NamedSharding) -> None:
    """A commit replaces the array, unless it is told not to, and it can be used by a program of both processes."""
    for donate in (True, False):
        table = pagepool.PageTable(NUM_ROWS, NUM_COLUMNS, 64, sharding, donate=donate)
        old = table.page_table
        table.append_row([5], 0)
        new = table.commit(NUM_ROWS)
        assert is_lost(old) is donate
        if not donate:
            assert not any(part.any() for _, part in read_shards(old))
        assert int(jax.jit(lambda table: table.sum())(new)) == 5


def check_columns() -> None:
    """Tables that span processes are not sharded by columns."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("columns",)), PartitionSpec(None, "columns"))
    table = pagepool.PageTable(NUM_ROWS, 256, 64, sharding)
    table.append_row([1], 0)
    with pytest.raises(ArgumentError):
        table.commit(NUM_ROWS)


def main(address: str, process: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # old versions of jax have none on CPU unless told
    jax.distributed.initialize(address, num_processes=2, process_id=process, initialization_timeout=60)
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    make_single: Callable[..., Work] = partial(make_work, (NUM_ROWS, NUM_COLUMNS))
    make_groups: Callable[..., Work] = partial(make_grouped_work, NUM_ROWS, 600, [16, 5])
    for name, sharding in make_shardings().items():
        check_program(sharding)
        check_donation(sharding)
        check_compilations(sharding, process)
        with jax.transfer_guard("disallow"):
            commit_in_all_ways(pagepool.PageTable(NUM_ROWS, NUM_COLUMNS, 64, sharding))
        for make in (make_single, make_groups):
            commit_unlike(make(7, sharding=sharding), process)
            if name != "replicated":
                commit_unlike(make(process, sharding=sharding), process)  # rows of its own
            commit_alone(make(8, sharding=sharding), process)
        multihost_utils.sync_global_devices(name)
    check_columns()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

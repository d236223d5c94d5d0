"""Program: tables and pages on the simulated CPU devices of one process. Tables are replicated, and sharded by rows."""

from __future__ import annotations

import jax
import moved_pages_devices
import numpy as np
from devices import (
    COLLECTIVES,
    commit_in_all_ways,
    count_compilations,
    count_compilations_of_warmup,
    read,
    read_shards,
    run_work,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from table_model import make_grouped_work, make_work

import pagepool
from pagepool._core import pack_dirty_segments
from pagepool.page_table import get_payload_sizes, get_scatter

SPECS = [PartitionSpec(), PartitionSpec("rows"), PartitionSpec("rows", None), PartitionSpec(("rows", "copies"))]


def make_shardings() -> list[NamedSharding]:
    """Return ways to place a table: on fewer than eight devices two of them."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2), ("rows", "copies"))
    shardings = [*(NamedSharding(mesh, spec) for spec in SPECS), NamedSharding(Mesh(devices, ("rows",)), PartitionSpec("rows"))]
    return shardings if devices.size == 8 else shardings[:2]


def check_program(table: pagepool.PageTable) -> None:
    """No device communicates with another, and the table is updated in place."""
    payload = pack_dirty_segments((table,), 0, 16)
    program = get_scatter((table.sharding,), True).lower((table.page_table,), *payload).compile()  # type: ignore[attr-defined]
    text = program.as_text()
    assert not [name for name in COLLECTIVES if name in text]
    assert "input_output_alias" in text


def check_compilations(sharding: NamedSharding) -> None:
    """As many programs as payload sizes, all compiled by `warmup`."""
    table = pagepool.PageTable(64, 640, 64, sharding)
    assert count_compilations_of_warmup(table) == len(get_payload_sizes(table.page_table_cpu.size))
    with count_compilations() as later:
        for num_reqs in range(0, 65, 3):
            table.append_row([num_reqs] * (10 if num_reqs % 2 else 1), num_reqs % 64)
            table.mark_dirty(range(num_reqs))
            table.commit(num_reqs).block_until_ready()
    assert not later


def check_shards(sharding: NamedSharding) -> None:
    """The array keeps its sharding, and each shard holds its rows."""
    work = make_work((64, 257), 3, sharding=sharding)
    for _ in range(30):
        work.do()
    array = work.tables.commit(64)
    assert array.sharding == sharding
    for index, part in read_shards(array):
        np.testing.assert_array_equal(part, work.model.table[index])  # type: ignore[union-attr]


def check_donation(sharding: NamedSharding) -> None:
    """A commit replaces the array, unless donation is off."""
    for donate in (True, False):
        table = pagepool.PageTable(8, 100, 64, sharding, donate=donate)
        old = table.page_table
        table.append_row([1], 0)
        new = table.commit(8)
        assert old.is_deleted() is donate
        assert read(new)[0, 0] == 1


def check_tables() -> None:
    for seed, sharding in enumerate(make_shardings()):
        check_program(pagepool.PageTable(64, 257, 64, sharding))
        check_shards(sharding)
        check_donation(sharding)
        check_compilations(sharding)
        run_work(make_work((8, 100), seed, sharding=sharding), 20)
        run_work(make_work((64, 257), seed, sharding=sharding), 8)
        run_work(make_work((8, 100), seed, sharding=sharding), 3, is_pending=True)
        run_work(make_grouped_work(8, 600, [16, 5], seed, sharding=sharding), 10)
        with jax.transfer_guard("disallow"):
            commit_in_all_ways(pagepool.PageTable(8, 100, 64, sharding))


if __name__ == "__main__":
    check_tables()
    moved_pages_devices.check_pages()

"""Page copies and host pages on the simulated CPU devices of one process, with heads or pages divided between them."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import COLLECTIVES, IS_OLD_COMPILER, count_compilations
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from moved_pages import (
    CopiedPages,
    Copies,
    TransferredPages,
    compile_program,
    draw_array,
    draw_copies,
    make_copies,
    make_transfers,
)

from pagepool.errors import ArgumentError
from pagepool.host_pages import HostPages, get_reader, get_writer
from pagepool.page_copies import copy_pages

NUM_PAGES = 64
SHAPES = [(NUM_PAGES, 3, 8), (8, NUM_PAGES, 3)]
"""Of arrays with page axis 0 and 1. The heads are the last axis, or the first."""
DIVISIONS = [(None, None), (None, "a"), ("a", None), ("a", "b"), (("a", "b"), None), (("b", "a"), None)]
"""The axes of the mesh that divide the pages, and the heads."""
DTYPES = ["float32", "bfloat16", "complex64", "float8_e4m3fn", "int8", "bool"]


def make_meshes() -> list[Mesh]:
    devices = np.array(jax.devices())
    half = devices.size // 2
    meshes = [Mesh(devices.reshape(half, 2), ("a", "b")), Mesh(devices[::-1].reshape(2, half), ("b", "a"))]
    if hasattr(jax, "make_mesh"):  # its axes are explicit in later versions of jax
        meshes.append(jax.make_mesh((half, 2), ("a", "b")))
    return meshes


def make_spec(page_axis: int, pages: Any, heads: Any) -> PartitionSpec:
    return PartitionSpec(pages, None, heads) if page_axis == 0 else PartitionSpec(heads, pages)


def list_cases() -> list[tuple[int, NamedSharding, list[str]]]:
    """Return page axes, shardings, and two dtypes for each. On fewer than eight devices: heads divided, pages divided by two
    axes in another order, and both."""
    first, *others = make_meshes()
    cases = [(first, page_axis, pages, heads) for page_axis in (0, 1) for pages, heads in DIVISIONS]
    cases += [(mesh, page_axis, "a", "b") for mesh in others for page_axis in (0, 1)]
    chosen = cases if jax.device_count() == 8 else [cases[1], cases[5], cases[-1]]
    dtypes = cycle(DTYPES)
    return [
        (page_axis, NamedSharding(mesh, make_spec(page_axis, pages, heads)), [next(dtypes), next(dtypes)])
        for mesh, page_axis, pages, heads in chosen
    ]


def draw(page_axis: int, *dtypes: str) -> list[Any]:
    rng = np.random.default_rng(1)
    return [draw_array(rng, SHAPES[page_axis], dtype) for dtype in dtypes]


def count_parts(sharding: NamedSharding, page_axis: int) -> int:
    return int(NUM_PAGES // sharding.shard_shape(SHAPES[page_axis])[page_axis])


def draw_within_parts(rng: np.random.Generator, num_parts: int) -> Copies:
    """Return copies of which each stays in its part."""
    size = NUM_PAGES // num_parts
    copies = draw_copies(rng, NUM_PAGES, 8)
    src = copies.dst // size * size + copies.src % size
    return make_copies(np.stack([np.maximum(src, 1), copies.dst], axis=1))


def check_copies(page_axis: int, sharding: NamedSharding, dtypes: list[str]) -> None:
    """Within parts and between them."""
    rng = np.random.default_rng(1)
    pages = CopiedPages(draw(page_axis, *dtypes), sharding, page_axis)
    for i in range(6):
        old = pages.arrays
        pages.copy(draw_within_parts(rng, count_parts(sharding, page_axis)) if i % 2 else draw_copies(rng, NUM_PAGES, 8))
        pages.check()
        assert all(array.is_deleted() for array in old)


def check_transfers(page_axis: int, sharding: NamedSharding, dtypes: list[str], memory_kind: str | None) -> None:
    """Pages are loaded into the part that they were saved from, and into others."""
    rng = np.random.default_rng(1)
    pages = TransferredPages(draw(page_axis, *dtypes), sharding, page_axis, memory_kind=memory_kind)
    for _ in range(5):
        old, transfers = pages.arrays, pages.move(rng, 2)
        pages.check()
        assert IS_OLD_COMPILER or all(array.is_deleted() for array in old) == bool(len(transfers.loads.src))
    page = 1 + NUM_PAGES // 2  # back to where it was
    pages.transfer(make_transfers([(page, 1)], [(1, page)]))
    pages.check()


def check_rows(page_axis: int, sharding: NamedSharding, dtypes: list[str]) -> None:
    """Each device's part of a row has its parts of the page, unless the page is another device's."""
    pages = TransferredPages(draw(page_axis, *dtypes), sharding, page_axis)
    page_id, num_parts = NUM_PAGES - 3, count_parts(sharding, page_axis)
    pages.transfer(make_transfers([(page_id, 7)]))
    pages.check()
    (group,) = pages.host_pages._groups
    rows, num_found = group.rows[7], 0
    assert rows.shape[0] == jax.device_count()
    for pack in group.packs:
        for row, device in zip(rows, pack.list_devices(), strict=True):
            (part,) = [part for (i,) in [pack.places] for part in pages.arrays[i].addressable_shards if part.device == device]
            first = part.index[page_axis].start or 0
            if first <= page_id < first + NUM_PAGES // num_parts:
                page = np.take(np.asarray(part.data), page_id - first, axis=page_axis)
                assert row[pack.start : pack.stop].tobytes() == page.tobytes()
                num_found += 1
    assert num_found == len(group.packs) * jax.device_count() // num_parts
    layout = pages.host_pages.layout
    assert layout.startswith(
        f"all groups: {jax.device_count()} x {rows.shape[1]} bytes, 1 x {dtypes[0]}[3,8]" if page_axis == 0 else ""
    )
    assert (" of pages " in layout) == (num_parts > 1)
    if num_parts > 1:
        with pytest.raises(ArgumentError, match=r"^group: got None, allowed: .* not divided$"):
            pages.host_pages.mark_saved([7])
    else:
        pages.host_pages.mark_saved([7])


def check_programs(page_axis: int, sharding: NamedSharding) -> None:
    """Only moves between parts communicate, by all-reduce of the pages; arrays are updated in place."""
    moved = TransferredPages(draw(page_axis, "float32"), sharding, page_axis)
    leaves, (pack,) = moved.arrays, moved.host_pages._groups[0].packs
    read = get_reader((sharding,), page_axis).lower(leaves, np.zeros(4, np.int32)).compile().as_text()
    assert not [name for name in COLLECTIVES if name in read]
    pages, arrived = pack.save(leaves, np.arange(1, 5, dtype=np.int32))
    assert (pages.sharding, arrived.sharding) == (pack.device, pack.host)
    is_divided = count_parts(sharding, page_axis) > 1
    for crosses in (False, True):
        writer = get_writer((sharding,), page_axis, crosses).lower(leaves, pages, np.zeros((2, 4), np.int32))
        copying = compile_program(leaves, page_axis, crosses)
        for text in (writer.compile().as_text(), copying):
            assert [name for name in COLLECTIVES if name in text] == (["all-reduce"] if crosses and is_divided else [])
            assert "input_output_alias" in text
        # The pages are transposed for the all-reduce if their axis is not the first.
        assert crosses or IS_OLD_COMPILER or "} copy(" not in copying


def check_compilations(kind: type[CopiedPages], page_axis: int, sharding: NamedSharding) -> None:
    """For each way as many as powers of two, twice where pages are written if their axis is divided, all by `warmup`."""
    rng = np.random.default_rng(3)
    jax.clear_caches()
    pages = kind(draw(page_axis, "int8"), sharding, page_axis)
    num_ways = 1 + (kind is TransferredPages) + (count_parts(sharding, page_axis) > 1)
    with jax.transfer_guard("disallow"):
        with count_compilations() as in_warmup:
            pages.warmup(2)
        # Older jax also compiles programs that bring the parts together on the CPU's first device.
        is_exact = kind is CopiedPages or pages.host_pages.memory_kind is not None
        assert len(in_warmup) == 2 * num_ways or not is_exact
        with count_compilations() as later:
            for num in (0, 1, 2, 2, 2, 2, 2, 2):
                pages.move(rng, num)
        assert not later
    pages.check()


def check_mixed(kind: type[CopiedPages], shardings: list[NamedSharding]) -> None:
    """Arrays of one pytree may be sharded in different ways."""
    rng = np.random.default_rng(4)
    pages = kind(draw(0, *["float32"] * len(shardings)), shardings)
    for _ in range(3):
        pages.move(rng, 5)
        pages.check()


def check_refusals(mesh: Mesh) -> None:
    array = jax.device_put(jnp.array(draw(0, "int8")[0]), NamedSharding(mesh, PartitionSpec()))
    arrays = [array, jnp.zeros(NUM_PAGES)]
    message = r"^arrays: got arrays on different devices, allowed: the same devices for all$"
    for call in (partial(copy_pages, copies=make_copies([(1, 2)])), partial(HostPages, num_pages=4)):
        with pytest.raises(ArgumentError, match=message):
            call(arrays)
    assert not any(array.is_deleted() for array in arrays)
    divided = jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
    with pytest.raises(ArgumentError, match=r"^arrays: got int8 .*, allowed: as at first, int8 "):
        HostPages(array, 4).run(divided, make_transfers([(1, 1)]))


def check_pages() -> None:
    for i, (page_axis, sharding, dtypes) in enumerate(list_cases()):
        check_copies(page_axis, sharding, dtypes)
        check_transfers(page_axis, sharding, dtypes, None if i == 1 else "pinned_host")
        check_rows(page_axis, sharding, dtypes)
        check_programs(page_axis, sharding)
        for kind in (CopiedPages, TransferredPages):
            check_compilations(kind, page_axis, sharding)
    first, second, *_ = meshes = make_meshes()
    specs = [PartitionSpec(), PartitionSpec("a"), PartitionSpec(None, None, "b"), PartitionSpec(("b", "a"))]
    check_mixed(CopiedPages, [NamedSharding(meshes[-1], spec) for spec in specs])
    check_mixed(TransferredPages, [NamedSharding(mesh, spec) for mesh in (first, second) for spec in specs[2:]])
    check_refusals(first)

"""Host pages on the simulated CPU devices of one process, with heads or pages divided between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from copies import assert_same
from copies_devices import NUM_PAGES, count_parts, list_cases, make_meshes, put
from devices import COLLECTIVES, IS_OLD_COMPILER, count_compilations
from host_transfers import HostModel, make_transfers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagepool.errors import ArgumentError
from pagepool.host_pages import HostPages, get_reader, get_writer

NUM_HOST_PAGES = 50


def check_values(page_axis: int, sharding: NamedSharding, memory_kind: str | None, dtypes: list[str]) -> None:
    """Pages are loaded into the part that they were saved from, and into others."""
    rng = np.random.default_rng(1)
    pairs = [put(rng, page_axis, dtype, sharding) for dtype in dtypes]
    arrays, models = [array for array, _ in pairs], [HostModel(host, NUM_HOST_PAGES, page_axis) for _, host in pairs]
    host_pages = HostPages(arrays, NUM_HOST_PAGES, page_axis=page_axis, memory_kind=memory_kind)
    for _ in range(5):
        transfers = models[0].draw(rng, 2)
        old, arrays = arrays, host_pages.run(arrays, transfers)
        for array, model in zip(arrays, models, strict=True):
            model.run(transfers)
            assert_same(array, model.array)
            assert array.sharding == sharding
        assert IS_OLD_COMPILER or all(array.is_deleted() for array in old) == bool(len(transfers.load_src))
    page = 1 + NUM_PAGES // 2  # back to where it was
    arrays = host_pages.run(arrays, make_transfers([(page, 1)], [(1, page)]))
    assert_same(arrays[0], models[0].array)


def check_programs(page_axis: int, sharding: NamedSharding) -> None:
    """Only loads into other parts communicate, by all-reduce of the pages; arrays are updated in place."""
    leaves = [put(np.random.default_rng(2), page_axis, "float32", sharding)[0]]
    host_pages = HostPages(leaves, NUM_HOST_PAGES, page_axis=page_axis)
    (pack,) = host_pages._groups[0].packs
    read = get_reader((sharding,), page_axis).lower(leaves, np.zeros(4, np.int32)).compile().as_text()
    assert not [name for name in COLLECTIVES if name in read]
    pages = pack.save(leaves, np.arange(1, 5, dtype=np.int32))
    assert all(page.sharding == pack.host for page in pages)
    staged = jax.device_put(pages, pack.device)
    is_divided = count_parts(sharding, page_axis) > 1
    for crosses in (False, True):
        program = get_writer((sharding,), page_axis, crosses)
        text = program.lower(leaves, staged, np.zeros((2, 4), np.int32)).compile().as_text()
        assert [name for name in COLLECTIVES if name in text] == (["all-reduce"] if crosses and is_divided else [])
        assert "input_output_alias" in text


def check_compilations(page_axis: int, sharding: NamedSharding) -> None:
    rng = np.random.default_rng(3)
    array, host = put(rng, page_axis, "int8", sharding)
    model, host_pages = HostModel(host, NUM_HOST_PAGES, page_axis), HostPages(array, NUM_HOST_PAGES, page_axis=page_axis)
    jax.clear_caches()
    is_divided = count_parts(sharding, page_axis) > 1
    with jax.transfer_guard("disallow"):
        with count_compilations() as in_warmup:
            array = host_pages.warmup(array, 2)
        # Older jax also compiles programs that bring the parts together on the CPU's first device.
        assert len(in_warmup) == 2 * (2 + is_divided) or host_pages.memory_kind is None
        with count_compilations() as later:
            for _ in range(8):
                transfers = model.draw(rng, 2)
                array = host_pages.run(array, transfers)
                model.run(transfers)
        assert not later
    assert_same(array, model.array)


def check_mixed(mesh: Mesh, other: Mesh) -> None:
    """Arrays of one pytree may be sharded in different ways, on different meshes."""
    rng = np.random.default_rng(4)
    specs = [PartitionSpec(None, None, "b"), PartitionSpec(("b", "a"))]
    shardings = [NamedSharding(one, spec) for one in (mesh, other) for spec in specs]
    pairs = [put(rng, 0, "float32", sharding) for sharding in shardings]
    arrays, models = [array for array, _ in pairs], [HostModel(host, NUM_HOST_PAGES) for _, host in pairs]
    host_pages = HostPages(arrays, NUM_HOST_PAGES)
    assert len(host_pages._groups[0].packs) == 2
    for _ in range(3):
        transfers = models[0].draw(rng, 2)
        arrays = host_pages.run(arrays, transfers)
        for array, model, sharding in zip(arrays, models, shardings, strict=True):
            model.run(transfers)
            assert_same(array, model.array)
            assert array.sharding == sharding


def check_refusals(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, PartitionSpec())
    array = put(np.random.default_rng(5), 0, "int8", sharding)[0]
    with pytest.raises(ArgumentError, match=r"^arrays: got arrays on different devices, allowed: the same devices for all$"):
        HostPages([array, jnp.zeros(NUM_PAGES)], 4)
    host_pages = HostPages(array, 4)
    divided = jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
    with pytest.raises(ArgumentError, match=r"^arrays: got int8 .*, allowed: as at first, int8 "):
        host_pages.run(divided, make_transfers([(1, 1)]))


def check_pages() -> None:
    for i, (page_axis, sharding, dtypes) in enumerate(list_cases()):
        check_values(page_axis, sharding, None if i == 1 else "pinned_host", dtypes)
        check_programs(page_axis, sharding)
        check_compilations(page_axis, sharding)
    first, second, *_ = make_meshes()
    check_mixed(first, second)
    check_refusals(first)

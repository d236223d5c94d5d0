"""Page copies on the simulated CPU devices of one process, with heads or pages divided between them."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from copies import Copies, assert_same, compile_program, copy_in_numpy, draw_array, draw_copies, make_copies
from devices import COLLECTIVES, IS_OLD_COMPILER, count_compilations
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagepool.errors import ArgumentError
from pagepool.page_copies import copy_pages, warmup

NUM_PAGES = 64
SHAPES = [(NUM_PAGES, 3, 8), (8, NUM_PAGES, 3)]
"""Of arrays with page axis 0 and 1. The heads are the last axis, or the first."""
DIVISIONS = [(None, None), (None, "a"), ("a", None), ("a", "b"), (("a", "b"), None), (("b", "a"), None)]
"""The axes of the mesh that divide the pages, and the heads."""
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool"]


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


def put(rng: np.random.Generator, page_axis: int, dtype: str, sharding: NamedSharding) -> tuple[jax.Array, Any]:
    host = draw_array(rng, SHAPES[page_axis], jnp.dtype(dtype))
    return jax.device_put(jnp.array(host), sharding), host


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
    arrays = {dtype: put(rng, page_axis, dtype, sharding) for dtype in dtypes}
    for i in range(6):
        copies = draw_within_parts(rng, count_parts(sharding, page_axis)) if i % 2 else draw_copies(rng, NUM_PAGES, 8)
        copied = copy_pages({dtype: array for dtype, (array, _) in arrays.items()}, copies, page_axis=page_axis)
        for dtype, (old, host) in arrays.items():
            expected = copy_in_numpy(host, copies, page_axis)
            assert_same(copied[dtype], expected)
            assert copied[dtype].sharding == sharding
            assert old.is_deleted()
            arrays[dtype] = copied[dtype], expected


def check_program(page_axis: int, sharding: NamedSharding) -> None:
    """Only copies between parts communicate, by all-reduce of the pages; arrays are updated in place."""
    leaves = [put(np.random.default_rng(2), page_axis, "float32", sharding)[0]]
    is_divided = count_parts(sharding, page_axis) > 1
    for crosses in (False, True):
        text = compile_program(leaves, page_axis, crosses)
        assert [name for name in COLLECTIVES if name in text] == (["all-reduce"] if crosses and is_divided else [])
        assert "input_output_alias" in text
        # The pages are transposed for the all-reduce if their axis is not the first.
        assert crosses or IS_OLD_COMPILER or "} copy(" not in text


def check_compilations(page_axis: int, sharding: NamedSharding) -> None:
    """As many as powers of two, twice if the page axis is divided, all of them compiled by `warmup`."""
    rng = np.random.default_rng(3)
    array, host = put(rng, page_axis, "int8", sharding)
    jax.clear_caches()
    is_divided = count_parts(sharding, page_axis) > 1
    with jax.transfer_guard("disallow"):
        with count_compilations() as in_warmup:
            array = warmup(array, 2, page_axis=page_axis)
        assert len(in_warmup) == 2 * (1 + is_divided)
        with count_compilations() as later:
            for num_copies in range(3):
                copies = draw_copies(rng, NUM_PAGES, num_copies)
                array = copy_pages(array, copies, page_axis=page_axis)
                host = copy_in_numpy(host, copies, page_axis)
        assert not later
    assert_same(array, host)


def check_mixed(mesh: Mesh) -> None:
    """Arrays of one pytree may be sharded in different ways, and have different numbers of pages."""
    rng = np.random.default_rng(4)
    specs = [PartitionSpec(), PartitionSpec("a"), PartitionSpec(None, None, "b"), PartitionSpec(("b", "a"))]
    pairs = [put(rng, 0, "float32", NamedSharding(mesh, spec)) for spec in specs]
    for _ in range(3):
        copies = draw_copies(rng, NUM_PAGES, 5)
        arrays = copy_pages([array for array, _ in pairs], copies)
        pairs = [(array, copy_in_numpy(host, copies)) for array, (_, host) in zip(arrays, pairs, strict=True)]
        for (array, expected), spec in zip(pairs, specs, strict=True):
            assert_same(array, expected)
            assert array.sharding == NamedSharding(mesh, spec)


def check_different_devices(mesh: Mesh) -> None:
    arrays = [put(np.random.default_rng(5), 0, "int8", NamedSharding(mesh, PartitionSpec()))[0], jnp.zeros(NUM_PAGES)]
    with pytest.raises(ArgumentError, match=r"^arrays: got arrays on different devices, allowed: the same devices for all$"):
        copy_pages(arrays, make_copies([(1, 2)]))
    assert not any(array.is_deleted() for array in arrays)


def check_pages() -> None:
    for page_axis, sharding, dtypes in list_cases():
        check_copies(page_axis, sharding, dtypes)
        check_program(page_axis, sharding)
        check_compilations(page_axis, sharding)
    *_, mesh = make_meshes()
    check_mixed(mesh)
    check_different_devices(mesh)

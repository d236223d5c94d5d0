"""Page copies on the device: `copy_pages` makes the copies of `take_moves` within an engine's arrays.

A call writes the page ids into a new payload, since jax may alias it or read it late. One compiled program for all arrays
gathers every source before it scatters. Arrays with a `NamedSharding` are copied by `shard_map`, each part on its own device.
jax is imported by the first call that copies something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pagepool.arguments import require_int
from pagepool.device import call_with_payload, get_shard_map, import_jax
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError

if TYPE_CHECKING:
    import jax

__all__ = ["copy_pages", "warmup"]

Int32Array = npt.NDArray[np.int32]
Arrays = TypeVar("Arrays")


class Columns(Protocol):
    """The attributes of `pagepool.PageCopies` read on the device: int32 arrays of equal length. They are not changed."""

    @property
    def src(self) -> Int32Array: ...
    @property
    def dst(self) -> Int32Array: ...
    @property
    def group(self) -> Int32Array: ...


def copy_pages(arrays: Arrays, copies: Columns, *, group: int | Sequence[int] | None = None, page_axis: int = 0) -> Arrays:
    """Copy page ``src[i]`` to page ``dst[i]`` in each array, for all `i`. All sources are read before any page is written.

    `copies` are the copies returned by `take_moves`, or any object with the arrays `src`, `dst` and `group`. `arrays` is any
    pytree of jax arrays whose `page_axis` has a place for each page. The result is a pytree of the same structure, shapes,
    dtypes and shardings. The arrays are donated: they are updated in place, and the ones passed become invalid. `group` selects
    the copies of one cache group or of several; None means all. If there is nothing to copy, `arrays` is returned.

    >>> import numpy as np, jax.numpy as jnp
    >>> from types import SimpleNamespace
    >>> src, dst, group = np.array([[1, 2], [2, 3], [0, 0]], dtype=np.int32)
    >>> arrays = {"keys": jnp.array([0, 10, 20, 30]), "values": jnp.array([0, 11, 21, 31])}
    >>> arrays = copy_pages(arrays, SimpleNamespace(src=src, dst=dst, group=group), group=0)
    >>> arrays["keys"].tolist(), arrays["values"].tolist()
    ([0, 10, 10, 20], [0, 11, 11, 21])

    Cost: the pages are read and written once, through a buffer of their size. (XLA on CPU converts all of an array of bfloat16
    or 8-bit floats for this, which also changes the bits of NaNs in other pages.) The number of copies is padded to a power of
    two, so a pytree has at most 1 + ceil(log2(number of pages)) programs; `warmup` compiles them. If devices divide the page
    axis, there are twice as many: copies between their parts need an all-reduce of all pages of the call, copies within parts,
    such as data-parallel shards, do not. Arrays that span processes need equal calls in all processes, which jax does not
    check.

    Before any array is donated, raise ArgumentTypeError for arguments of other types or dtypes; PageIdError for pages beyond an
    array, and for the null page; ArgumentError for a page written twice, unequal lengths, and arrays without a page axis,
    deleted, repeated, or on different devices.
    """
    moves = read_copies(copies, "copies")
    pairs = moves[:2, find_places(moves[2], group)]
    if pairs.shape[1] == 0:
        return arrays
    leaves, tree = import_jax().tree_util.tree_flatten(arrays)
    num_pages = check_arrays(leaves, page_axis)
    check_moves("copies.", pairs, num_pages, num_pages)
    crosses = find_crossing(leaves, pairs, page_axis)
    return tree.unflatten(run_copies(leaves, pairs, page_axis, crosses))  # type: ignore[no-any-return]


def warmup(arrays: Arrays, max_num_copies: int, *, page_axis: int = 0) -> Arrays:
    """Compile the programs for calls of `copy_pages` with up to `max_num_copies` copies. Return the arrays, unchanged.

    The arrays are donated; errors are those of `copy_pages`. Each program runs once, on the null page.
    """
    leaves, tree = import_jax().tree_util.tree_flatten(arrays)
    num_pages = check_arrays(leaves, page_axis)
    max_num_copies = require_int("max_num_copies", max_num_copies, 1, num_pages - 1)
    for num_copies, crosses in list_programs(leaves, page_axis, max_num_copies):
        leaves = run_copies(leaves, np.zeros((2, num_copies), dtype=np.int32), page_axis, crosses)
    return tree.unflatten(leaves)  # type: ignore[no-any-return]


def read_copies(copies: Any, name: str) -> Int32Array:
    """Return the sources, destinations and groups of copies as one array ``[3, n]``."""
    found: dict[str, Int32Array] = {}
    for field in ("src", "dst", "group"):
        if not hasattr(copies, field):
            raise ArgumentTypeError(f"{name}: got {type(copies).__name__}, allowed: PageCopies")
        found[field] = ids = getattr(copies, field)
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
            got = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise ArgumentTypeError(f"{name}.{field}: got {got}, allowed: an int32 array with one axis")
    if len({len(ids) for ids in found.values()}) > 1:
        lengths = ", ".join(f"{len(ids)} {field}" for field, ids in found.items())
        raise ArgumentError(f"{name}: got {lengths}, allowed: arrays of equal length")
    return np.stack(list(found.values()))


def find_places(groups: Int32Array, group: int | Sequence[int] | None) -> npt.NDArray[np.intp]:
    """Return the indices in `groups` of entries for `group`, one group or several; None means all."""
    if group is None:
        return np.arange(len(groups))
    wanted = group if isinstance(group, Iterable) else [group]
    return np.flatnonzero(np.isin(groups, [require_int("group", one, 0) for one in wanted]))


def check_moves(name: str, pairs: Int32Array, num_src: int, num_dst: int) -> None:
    """Check that sources and destinations are pages, not null pages, and none is written twice. O(n log n)."""
    for field, ids, num_pages in (("src", pairs[0], num_src), ("dst", pairs[1], num_dst)):
        wrong = ids[(ids < 1) | (ids >= num_pages)]
        if wrong.size:
            raise PageIdError(f"{name}{field}: got page {wrong[0]}, allowed: 1 to {num_pages - 1}")
    ordered = np.sort(pairs[1])
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise ArgumentError(f"{name}dst: got page {repeated[0]} twice, allowed: each page once")


def check_arrays(leaves: Sequence[Any], page_axis: int) -> int:
    """Check that the arrays can be donated together. Return the number of pages present in all of them."""
    require_int("page_axis", page_axis, 0)
    jax = import_jax()
    for leaf in leaves:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            raise ArgumentTypeError(f"arrays: got {type(leaf).__name__}, allowed: jax arrays, outside of traced functions")
        if not isinstance(leaf.dtype, np.dtype):
            raise ArgumentTypeError(f"arrays: got {leaf.dtype}, allowed: types of numbers")
        if leaf.dtype.itemsize >= 8 and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ArgumentError(f"arrays: got {leaf.dtype}, allowed without jax_enable_x64: types of 32 bits and less")
        if leaf.ndim <= page_axis:
            raise ArgumentError(f"arrays: got shape {leaf.shape}, allowed: more axes than page_axis, {page_axis}")
        if leaf.is_deleted():
            raise ArgumentError(f"arrays: got a deleted array of shape {leaf.shape}, allowed: arrays that are not yet donated")
        if leaf.sharding.device_set != leaves[0].sharding.device_set:
            raise ArgumentError("arrays: got arrays on different devices, allowed: the same devices for all")
    check_different(leaves)
    if not leaves:
        raise ArgumentError("arrays: got a pytree without arrays, allowed: at least one array")
    return int(min([leaf.shape[page_axis] for leaf in leaves]))


def check_different(leaves: Sequence[Any]) -> None:
    """Check that no array is repeated: it could be donated only once."""
    if len({id(leaf) for leaf in leaves}) < len(leaves):
        raise ArgumentError("arrays: got the same array twice, allowed: each array once")


def get_part_size(leaf: jax.Array, page_axis: int) -> int:
    """Return the number of pages in one device's part of an array."""
    return int(leaf.sharding.shard_shape(leaf.shape)[page_axis])


def list_programs(leaves: Sequence[jax.Array], page_axis: int, max_num_pages: int) -> list[tuple[int, bool]]:
    """List the programs: each by a number of pages, a power of two, and a value of `crosses` as in `run_copies`."""
    is_divided = any(get_part_size(leaf, page_axis) < leaf.shape[page_axis] for leaf in leaves)
    exponents = range((max_num_pages - 1).bit_length() + 1)
    return [(1 << exponent, crosses) for crosses in ((False, True) if is_divided else (False,)) for exponent in exponents]


def find_crossing(leaves: Sequence[jax.Array], pairs: Int32Array, page_axis: int) -> bool:
    """Whether some page is written to another device's part."""
    sizes = {get_part_size(leaf, page_axis) for leaf in leaves}
    return any((pairs[0] // size != pairs[1] // size).any() for size in sizes)


def run_copies(leaves: Sequence[jax.Array], pairs: Int32Array, page_axis: int, crosses: bool) -> Sequence[jax.Array]:
    """Copy pages by the program for this number of copies. `crosses`: some page is copied into another device's part."""
    payload = pad(pairs, 0)
    program = get_program(tuple([leaf.sharding for leaf in leaves]), page_axis, crosses)
    return call_with_payload(program, leaves, payload)  # type: ignore[no-any-return]


def pad(pairs: Int32Array, filler: int) -> Int32Array:
    """Return a new array with its last axis padded to a power of two. It is new because jax may read it late."""
    num = pairs.shape[-1]
    payload = np.full((*pairs.shape[:-1], 1 << (num - 1).bit_length()), filler, dtype=np.int32)
    payload[..., :num] = pairs
    return payload


@lru_cache(maxsize=64)
def get_program(shardings: tuple[jax.sharding.Sharding, ...], page_axis: int, crosses: bool) -> Callable[..., Any]:
    """Return the program for arrays with these shardings. jax compiles it once per size of the payload."""
    jax = import_jax()
    copies = []
    for sharding in shardings:
        copy = partial(copy_in_part, page_axis=page_axis, axes=get_page_axes(sharding, page_axis), crosses=crosses)
        if isinstance(sharding, jax.sharding.NamedSharding):
            specs = {"in_specs": (sharding.spec, jax.sharding.PartitionSpec()), "out_specs": sharding.spec}
            copy = get_shard_map()(copy, mesh=sharding.mesh, **specs)
        copies.append(copy)

    def copy_all(arrays: Sequence[Any], pairs: Any) -> list[Any]:
        return [copy(array, pairs) for copy, array in zip(copies, arrays, strict=True)]

    # An array on one device may be uncommitted. The result must be so too: a committed array would need another program.
    kept = [None if isinstance(sharding, jax.sharding.SingleDeviceSharding) else sharding for sharding in shardings]
    return jax.jit(copy_all, donate_argnums=0, out_shardings=kept)  # type: ignore[no-any-return]


Axes = str | tuple[str, ...]


def get_page_axes(sharding: jax.sharding.Sharding, page_axis: int) -> Axes:
    """Return the axes of the mesh that divide the page axis."""
    spec: Any = getattr(sharding, "spec", ())
    axes: Axes | None = spec[page_axis] if page_axis < len(spec) else None
    return axes or ()


def copy_in_part(part: Any, pairs: Any, page_axis: int, axes: Axes, crosses: bool) -> Any:
    """Copy pages within one device's part of an array (traced). The mesh `axes` divide the page axis."""
    return write_in_part(part, read_in_part(part, pairs[0], page_axis, axes), pairs, page_axis, axes, crosses)


def read_in_part(part: Any, page_ids: Any, page_axis: int, axes: Axes) -> Any:
    """Return pages from one device's part of an array, with arbitrary contents for pages in other parts (traced)."""
    local = find_local_pages(page_ids, part.shape[page_axis], axes)
    return part.at[(*(slice(None),) * page_axis, local)].get(mode="clip")


def write_in_part(part: Any, pages: Any, pairs: Any, page_axis: int, axes: Axes, crosses: bool) -> Any:
    """Write the pages read from ``pairs[0]`` to the pages ``pairs[1]`` in one device's part of an array (traced)."""
    src, dst = find_local_pages(pairs, part.shape[page_axis], axes)
    if axes and crosses:
        pages = exchange(pages, src < part.shape[page_axis], page_axis, axes)
    return part.at[(*(slice(None),) * page_axis, dst)].set(pages, mode="drop")


def find_local_pages(pairs: Any, num_pages: int, axes: Axes) -> Any:
    """Return page ids relative to this device's part of `num_pages` pages; `num_pages` for pages in other parts (traced)."""
    if not axes:
        return pairs
    jax = import_jax()
    local = pairs - jax.lax.axis_index(axes) * num_pages
    return jax.numpy.where((local >= 0) & (local < num_pages), local, num_pages)


def exchange(pages: Any, is_here: Any, page_axis: int, axes: Axes) -> Any:
    """Return pages from all parts (traced). Each page is in the part with `is_here`; other parts add zero.

    The bits of floats are added, since a sum of floats may change the sign of zero.
    """
    jax = import_jax()
    dtype = pages.dtype
    if jax.numpy.issubdtype(dtype, np.complexfloating):
        parts = [exchange(part, is_here, page_axis, axes) for part in (pages.real, pages.imag)]
        return jax.lax.complex(*parts)
    bits = cast_bits(pages, find_bits(dtype))
    is_here = is_here.reshape(-1, *[1] * (pages.ndim - page_axis - 1))
    total = jax.lax.psum(jax.numpy.where(is_here, bits, jax.numpy.zeros_like(bits)), axes).astype(bits.dtype)
    return cast_bits(total, dtype)


def find_bits(dtype: Any) -> Any:
    """Return the unsigned type of equal size for a type of floats, any other type itself."""
    jnp = import_jax().numpy
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}" if jnp.issubdtype(dtype, np.floating) else dtype)


def cast_bits(array: Any, dtype: Any) -> Any:
    """Return the bits of an array as another type (traced)."""
    return array if array.dtype == dtype else import_jax().lax.bitcast_convert_type(array, dtype)

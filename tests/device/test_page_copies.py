"""Page copies on one device: values, donation, compilations, errors, and what host pages share with them. Several devices are
in `moved_pages_devices`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from devices import after_slow_work, assert_separate, count_compilations  # noqa: E402
from moved_pages import (  # noqa: E402
    CopiedPages,
    Copies,
    TransferredPages,
    assert_same,
    compile_program,
    copy_in_numpy,
    draw_array,
    draw_copies,
    make_copies,
)

from pagepool import page_copies  # noqa: E402
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError  # noqa: E402
from pagepool.host_pages import HostPages  # noqa: E402
from pagepool.page_copies import copy_pages, warmup  # noqa: E402

NUM_PAGES = 40
both_kinds = pytest.mark.parametrize("kind", [CopiedPages, TransferredPages])
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "bool", "complex64"]
WIDE = ["float64", "int64", "complex128"]


# Values.


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("page_axis", [0, 1, 2])
def test_copies_are_those_of_numpy(page_axis: int) -> None:
    rng = np.random.default_rng(page_axis)
    shape = [2, 3, 5]
    shape[page_axis] = NUM_PAGES
    dtypes = [*DTYPES, *(WIDE if jax.config.jax_enable_x64 else [])][page_axis::3]
    pages = CopiedPages([draw_array(rng, tuple(shape), dtype) for dtype in dtypes], page_axis=page_axis)
    for num_copies in (8, 3, 0, 1, 5, 7):
        pages.move(rng, num_copies)
        pages.check()


@pytest.mark.usefixtures("word")
def test_pytrees_keep_their_structure() -> None:
    state = {"conv": jnp.arange(8.0).reshape(4, 2), "none": None, "layers": [jnp.arange(4), (jnp.arange(6) * 2,), []]}
    copied = copy_pages(state, make_copies([(3, 1)]))
    assert jax.tree_util.tree_structure(copied) == jax.tree_util.tree_structure(state)
    conv, first, second = jax.tree_util.tree_leaves(copied)
    assert conv.tolist() == [[0, 1], [6, 7], [4, 5], [6, 7]]
    assert first.tolist() == [0, 3, 2, 3]
    assert second.tolist() == [0, 6, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (None, [0, 4, 5, 6, 4, 5, 6]),
        (0, [0, 4, 2, 3, 4, 5, 6]),
        (np.int32(1), [0, 1, 5, 3, 4, 5, 6]),
        ([0, 2], [0, 4, 2, 6, 4, 5, 6]),
        ((), [0, 1, 2, 3, 4, 5, 6]),
        (np.array([1, 7]), [0, 1, 5, 3, 4, 5, 6]),
    ],
    ids=str,
)
def test_the_copies_of_some_groups(group: Any, expected: list[int]) -> None:
    copies = make_copies([(4, 1), (5, 2), (6, 3)], groups=[0, 1, 2])
    assert copy_pages(jnp.arange(7), copies, group=group).tolist() == expected


def test_nothing_to_copy_gives_the_same_arrays() -> None:
    """Nothing is sent, and jax is not asked for."""
    arrays = {"keys": jnp.arange(4), "host": np.arange(4)}
    assert copy_pages(arrays, make_copies([])) is arrays
    assert copy_pages(arrays, make_copies([(1, 2)]), group=1) is arrays
    assert not arrays["keys"].is_deleted()


# Donation, and host arrays.


def test_arrays_are_updated_in_place() -> None:
    arrays = warmup([jnp.zeros((64, 8)), jnp.ones((64, 8))], 4)  # the first arrays may be views of host memory
    pointers = [array.unsafe_buffer_pointer() for array in arrays]
    copied = copy_pages(arrays, make_copies([(1, 2), (5, 6)]))
    assert all(array.is_deleted() for array in arrays)
    assert [array.unsafe_buffer_pointer() for array in copied] == pointers
    text = compile_program(copied)
    assert "input_output_alias" in text
    assert "} copy(" not in text


@both_kinds
def test_a_step_that_still_reads_the_arrays_is_safe(kind: type[CopiedPages]) -> None:
    rng, pages = np.random.default_rng(7), kind([np.arange(64, dtype=np.int32)])
    pages.warmup(3)
    for _ in range(6):
        step, expected = after_slow_work(pages.arrays[0]), pages.hosts[0].copy()
        pages.move(rng, 3)
        np.testing.assert_array_equal(step, expected)
    pages.check()


def test_host_writes_never_reach_a_pending_copy() -> None:
    """The array is still being computed when the copies are overwritten."""
    for num_copies in (1, 16, 256):
        copies = draw_copies(np.random.default_rng(num_copies), 1024, num_copies)
        expected = copy_in_numpy(np.arange(1024, dtype=np.int32), copies)
        array = copy_pages(after_slow_work(jnp.arange(1024, dtype=jnp.int32)), copies)
        for ids in copies:
            ids[:] = 1
        assert_same(array, expected)


def test_payloads_are_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    call = page_copies.call_with_payload
    monkeypatch.setattr(page_copies, "call_with_payload", lambda *args: sent.append(args[-1]) or call(*args))
    array = jnp.arange(8)
    copies = make_copies([(1, 2), (3, 4)])
    for _ in range(4):
        array = copy_pages(array, copies)
    assert len(sent) == 4
    assert_separate([*sent, *copies])


@both_kinds
@pytest.mark.parametrize("guard", [jax.transfer_guard, jax.transfer_guard_host_to_device])
def test_moves_pass_a_transfer_guard(guard: Any, kind: type[CopiedPages]) -> None:
    rng, pages = np.random.default_rng(3), kind([np.arange(8, dtype=np.int32)])
    with guard("disallow"):
        pages.prepare()
        pages.warmup(2)
        for _ in range(4):
            pages.move(rng, 2)
    pages.check()


# Compilations.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_pages", "max_num", "num_programs", "is_committed"),
    [(CopiedPages, 40, 39, 7, True), (TransferredPages, 100, 500, 2 * 3 * 7, True)],
)
def test_no_compilation_after_warmup(
    kind: type[CopiedPages], num_pages: int, max_num: int, num_programs: int, is_committed: bool
) -> None:
    rng = np.random.default_rng(6)
    hosts = [draw_array(rng, (num_pages, 3), dtype) for dtype in ("int8", "int32")]
    pages = kind(hosts, jax.devices()[0] if is_committed else None)
    jax.clear_caches()
    with count_compilations() as in_warmup:
        pages.warmup(max_num)
    assert len(in_warmup) == num_programs
    with count_compilations() as later:
        for num in (*range(min(40, max_num + 1)), max_num // 2, max_num):
            pages.move(rng, min(num, num_pages - 1))
            jax.block_until_ready(pages.arrays)
    assert not later
    pages.check()


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize(("kind", "num_pages", "num_programs"), [(CopiedPages, 40, 3), (TransferredPages, 100, 2 * 3 * 3)])
def test_no_compilation_after_warmup_for_few(kind: type[CopiedPages], num_pages: int, num_programs: int) -> None:
    """Programs save, and load from rows and from saves, for each dtype."""
    test_no_compilation_after_warmup(kind, num_pages, 3, num_programs, False)


# Errors: nothing is donated.


@pytest.mark.parametrize(
    ("copies", "error", "message"),
    [
        (make_copies([(1, 2), (3, 2**31 - 1)]), PageIdError, r"copies\.dst: got page 2147483647, allowed: 1 to 7"),
        (make_copies([(-1, 2)]), PageIdError, r"copies\.src: got page -1, allowed: 1 to 7"),
        (make_copies([(0, 1)]), PageIdError, r"copies\.src: got page 0, allowed: 1 to 7"),
        (make_copies([(1, 3), (2, 4), (5, 3)]), ArgumentError, r"copies\.dst: got page 3 twice, allowed: each page once"),
        (None, ArgumentTypeError, r"copies: got NoneType, allowed: PageCopies"),
        (Copies([1], np.array([2], np.int32), np.zeros(1, np.int32)), ArgumentTypeError,
         r"copies\.src: got list, allowed: an int32 array with one axis"),
        (Copies(np.array([1], np.int32), np.array([2]), np.zeros(1, np.int32)), ArgumentTypeError,
         r"copies\.dst: got int64 \(1,\), allowed: an int32 array with one axis"),
        (Copies(np.array([1], np.int32), np.array([2], np.int32), np.zeros(3, np.int32)), ArgumentError,
         r"copies: got 1 src, 1 dst, 3 group, allowed: arrays of equal length"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_copies(copies: Any, error: type[Exception], message: str) -> None:
    arrays = {"larger": jnp.arange(100), "smaller": jnp.arange(8)}
    with pytest.raises(error, match=f"^{message}$"):
        copy_pages(arrays, copies)
    assert not any(array.is_deleted() for array in arrays.values())


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (-1, ArgumentError, "group: got -1, allowed: at least 0"),
        (True, ArgumentTypeError, "group: got True, allowed: an int"),
        ([0, 0.5], ArgumentTypeError, "group: got 0.5, allowed: an int"),
        ("0", ArgumentTypeError, "group: got '0', allowed: an int"),
    ],
)
def test_wrong_groups(group: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        copy_pages(jnp.arange(8), make_copies([(1, 2)]), group=group)


def deleted() -> jax.Array:
    array = jnp.arange(8)
    array.delete()
    return array


def wide() -> jax.Array:
    if jax.config.jax_enable_x64:
        pytest.skip("types of 64 bits are allowed")
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):
        return jnp.full((8, 2), 2**40, jnp.int64)


def twice() -> list[jax.Array]:
    return [jnp.arange(8)] * 2


def copy_one(arrays: Any, page_axis: Any) -> Any:
    return copy_pages(arrays, make_copies([(1, 2)]), page_axis=page_axis)


def warmup_one(arrays: Any, page_axis: Any) -> Any:
    return warmup(arrays, 1, page_axis=page_axis)


def keep_on_host(arrays: Any, page_axis: Any) -> Any:
    return HostPages(arrays, 4, page_axis=page_axis)


@pytest.mark.parametrize("call", [copy_one, warmup_one, keep_on_host])
@pytest.mark.parametrize(
    ("make", "page_axis", "error", "message"),
    [
        (lambda: np.arange(8), 0, ArgumentTypeError, "arrays: got ndarray, allowed: jax arrays, outside of traced functions"),
        (lambda: {"scale": 1.0}, 0, ArgumentTypeError, "arrays: got float, allowed: jax arrays, outside of traced functions"),
        (lambda: jnp.array(1), 0, ArgumentError, r"arrays: got shape \(\), allowed: more axes than page_axis, 0"),
        (lambda: jnp.arange(8), 1, ArgumentError, r"arrays: got shape \(8,\), allowed: more axes than page_axis, 1"),
        (lambda: jnp.arange(8), -1, ArgumentError, "page_axis: got -1, allowed: at least 0"),
        (lambda: jnp.arange(8), None, ArgumentTypeError, "page_axis: got None, allowed: an int"),
        (wide, 0, ArgumentError, "arrays: got int64, allowed without jax_enable_x64: types of 32 bits and less"),
        (
            lambda: jax.random.split(jax.random.key(0), 8),
            0,
            ArgumentTypeError,
            "arrays: got key<fry>, allowed: types of numbers",
        ),
        (deleted, 0, ArgumentError, r"arrays: got a deleted array of shape \(8,\), allowed: arrays that are not yet donated"),
        (twice, 0, ArgumentError, "arrays: got the same array twice, allowed: each array once"),
        (lambda: {"none": None}, 0, ArgumentError, "arrays: got a pytree without arrays, allowed: at least one array"),
    ],
)
def test_wrong_arrays(
    call: Callable[..., Any], make: Callable[[], Any], page_axis: Any, error: type[Exception], message: str
) -> None:
    first, arrays = jnp.arange(8), make()
    with pytest.raises(error, match=f"^{message}$"):
        call([first, arrays] if "without" not in message else arrays, page_axis)
    assert not first.is_deleted()


def test_traced_arrays_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"arrays: got .*Tracer, allowed: jax arrays, outside of traced functions"):
        jax.jit(lambda array: copy_pages(array, make_copies([(1, 2)])))(jnp.arange(8))


@pytest.mark.parametrize(("number", "message"), [(0, "got 0, allowed: 1 to 7"), (8, "got 8, allowed: 1 to 7")])
def test_wrong_warmup(number: int, message: str) -> None:
    array = jnp.arange(8)
    with pytest.raises(ArgumentError, match=f"^max_num_copies: {message}$"):
        warmup(array, number)
    assert not array.is_deleted()

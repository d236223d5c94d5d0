"""Host pages with torch: values, rows, order, failures, errors that change nothing, and work at random beside a manager.

`make test-torch` runs these on the CPU, and on a GPU if there is one; `make torch-gpu` runs those of the GPU.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from page_moves import Moves, make_copies, make_transfers
from settings import NUM_OPERATIONS

torch = pytest.importorskip("torch")

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, HostTier, RunningBatch, SlidingWindowSpec  # noqa: E402
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, PageIdError  # noqa: E402
from pagepool.host_pages import FinishedTransfers  # noqa: E402
from pagepool.torch import HostPages, MultiGroupPageTable  # noqa: E402
from pagepool.torch_pages import GroupPages  # noqa: E402
from pagepool.transfers import Copy  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if HAS_GPU else [])]
NUM_PAGES, NUM_HOST_PAGES = 24, 40
NUM_ROUNDS = min(NUM_OPERATIONS // 500, 100)
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "uint8", "bool", "int64", "complex64", "complex128", "float16"]
each_device = pytest.mark.parametrize("device", DEVICES)
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU")


def done(transfers: Moves) -> FinishedTransfers:
    return FinishedTransfers(transfers.number, [], [], None)


def fill(rng: np.random.Generator, tensor: Any) -> None:
    """Fill a tensor with any bits."""
    bits = torch.from_numpy(rng.integers(0, 256, (*tensor.shape, tensor.dtype.itemsize), np.uint8))
    tensor.copy_((bits[..., 0] > 127) if tensor.dtype == torch.bool else bits.view(tensor.dtype).squeeze(-1))


def read_page(tensors: list[Any], page_axis: int, page_id: int) -> list[bytes]:
    """Return the bytes of a page of each tensor."""
    pages = [tensor.select(page_axis, page_id).cpu().contiguous().reshape(-1) for tensor in tensors]
    return [page.view(torch.uint8).numpy().tobytes() if len(page) else b"" for page in pages]


class MovedTensors:
    """Tensors of several groups whose pages are moved, and what their pages should have, page by page: a model that knows
    nothing of rows. None stands for a host page that cannot be loaded.
    """

    def __init__(self, groups: list[list[Any]], page_axes: list[int], **options: Any) -> None:
        self.groups, self.page_axes = groups, page_axes
        sizes = {"groups": range(len(groups)), "page_axis": page_axes}
        self.host_pages = HostPages(groups, NUM_HOST_PAGES, **{**sizes, **options})
        self.device = {key: self.read(*key) for key in self.list_pages(NUM_PAGES)}
        self.host: dict[tuple[int, int], Any] = dict.fromkeys(self.list_pages(NUM_HOST_PAGES))

    def list_pages(self, num_pages: int) -> list[tuple[int, int]]:
        return [(group, page_id) for group in range(len(self.groups)) for page_id in range(num_pages)]

    def read(self, group: int, page_id: int) -> list[bytes]:
        return read_page(self.groups[group], self.page_axes[group], page_id)

    def compute(self, rng: np.random.Generator) -> None:
        """Overwrite some pages."""
        for group, (tensors, axis) in enumerate(zip(self.groups, self.page_axes, strict=True)):
            for page_id in rng.integers(1, NUM_PAGES, 4).tolist():
                for tensor in tensors:
                    fill(rng, tensor.select(axis, page_id))
                self.device[group, page_id] = self.read(group, page_id)

    def draw(self, rng: np.random.Generator, most: int) -> Moves:
        """Return saves of any pages, and loads of any pages of the host, of all groups in any order."""
        saved, loaded = (
            rng.permutation([key for key in self.list_pages(num_pages) if key[1]])[: rng.integers(0, most + 1)]
            for num_pages in (NUM_HOST_PAGES, NUM_PAGES)
        )
        saves = np.stack([rng.integers(1, NUM_PAGES, len(saved)), saved[:, 1]], axis=1)
        loads = np.stack([rng.integers(1, NUM_HOST_PAGES, len(loaded)), loaded[:, 1]], axis=1)
        return make_transfers(saves, loads, saved[:, 0], loaded[:, 0])

    def run(self, transfers: Moves) -> None:
        assert self.host_pages.run(self.groups, transfers) is self.groups

    def follow(self, transfers: Moves, finished: FinishedTransfers) -> None:
        """Do the same in the model. Only loads of pages that were never saved, or whose save failed, may have failed."""
        saves, loads = (list(zip(*map(np.ndarray.tolist, pairs), strict=True)) for pairs in (transfers.saves, transfers.loads))
        assert finished.number == transfers.number
        assert (finished.error is None) == (not finished.failed_saves and not finished.failed_loads)
        saved = {(group, dst): self.device[group, src] for src, dst, group in saves}
        failed = {(group, dst) for i, (_, dst, group) in enumerate(saves) if i in finished.failed_saves}
        must_fail = [i for i, (src, _, group) in enumerate(loads) if (saved.get((group, src)) or self.host[group, src]) is None]
        may_fail = [i for i, (src, _, group) in enumerate(loads) if (group, src) in failed]
        assert {*must_fail} <= {*finished.failed_loads} <= {*must_fail, *may_fail}
        for i, (src, dst, group) in enumerate(loads):
            if i not in finished.failed_loads:
                self.device[group, dst] = saved.get((group, src)) or self.host[group, src]
        self.host |= {key: None if key in failed else pages for key, pages in saved.items()}

    def check(self) -> None:
        assert {key: self.read(*key) for key in self.device} == self.device


def make_tensors(rng: np.random.Generator, device: str, dtypes: list[str], page_axis: int) -> list[Any]:
    shape = [2, 3, 5]
    shape[page_axis] = NUM_PAGES
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype in dtypes]
    for tensor in tensors:
        fill(rng, tensor)
    return tensors


def make_moved(rng: np.random.Generator, device: str, **options: Any) -> MovedTensors:
    groups = [make_tensors(rng, device, DTYPES[i::3] * 2, i) for i in range(3)]
    return MovedTensors(groups, [0, 1, 2], **options)


class HeldCopies:
    """Copies into rows wait until they are released, or a random time, and fail at random."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, random: Random | None = None, rate: float = 0.0) -> None:
        self.released, self.write_rows = threading.Event(), GroupPages._write_rows
        self.random, self.rate = random, rate
        monkeypatch.setattr(GroupPages, "_write_rows", lambda *args: self.run(*args))

    def run(self, *args: Any) -> None:
        if self.random is None:
            assert self.released.wait(60)
        else:
            time.sleep(self.random.choice((0, 0.0005, 0.002)))
            if self.random.random() < self.rate:
                raise MemoryError("at random")
        self.write_rows(*args)


# Values.


@each_device
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_transfers_are_those_of_the_model(device: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some loads come before the rows of their saves, some saves fail, and each call is answered before the next one."""
    rng, num_failed = np.random.default_rng(1), 0
    HeldCopies(monkeypatch, Random(1), rate)
    moved = make_moved(rng, device)
    for _ in range(NUM_ROUNDS):
        moved.compute(rng)
        moved.run(transfers := moved.draw(rng, 20))
        for finished in moved.host_pages.wait():
            moved.follow(transfers, finished)
            num_failed += len(finished.failed_saves)
        moved.check()
    assert (num_failed > 0) == (rate > 0)


@each_device
def test_many_calls_may_be_in_flight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    HeldCopies(monkeypatch, Random(2))
    moved = make_moved(rng, device)
    transfers = make_transfers(
        [(1, i) for i in range(1, NUM_HOST_PAGES)] * 3, save_groups=np.repeat(range(3), NUM_HOST_PAGES - 1)
    )
    moved.run(transfers)
    moved.follow(transfers, done(transfers))  # every page is saved, so no load fails
    started, finished = [transfers], []
    for _ in range(NUM_ROUNDS):
        moved.compute(rng)
        moved.run(transfers := moved.draw(rng, 20))
        moved.follow(transfers, done(transfers))
        started += [transfers] * (len(transfers.saves.src) + len(transfers.loads.src) > 0)
        finished += moved.host_pages.poll()
    assert sorted([*finished, *moved.host_pages.wait()]) == [done(each) for each in started]
    moved.check()


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_tensors_of_a_page_by_dtype(dtype: str, device: str) -> None:
    rng = np.random.default_rng(3)
    tensors = make_tensors(rng, device, [dtype, "int32", dtype], 1)
    host_pages = HostPages(tensors, 9, page_axis=1)
    host_pages.run(tensors, make_transfers([(5, 1), (7, 3)]))
    host_pages.wait()
    (rows,) = host_pages.rows
    for page_id, row in ((5, rows[1]), (7, rows[3])):
        first, second, third = read_page(tensors, 1, page_id)
        padding = -len(first + third) % 64
        assert row.tobytes() == (first + third + bytes(padding) + second).ljust(rows.shape[1], b"\0")
    assert not rows[[0, 2]].any()
    assert rows.shape[1] % 64 == 0


def test_the_text_of_the_layout_is_that_of_jax() -> None:
    """These texts are in the tests of jax too."""
    keys, scales = torch.zeros(8, 4, 2), torch.zeros(8, 3, dtype=torch.bfloat16)
    first = HostPages([keys, scales, keys + 1], 5)
    assert first.layout == "all groups: 1 x 128 bytes, 2 x float32[4,2], 1 x bfloat16[3]"
    wide = torch.zeros(4, 16, 2)
    other = HostPages([wide, torch.zeros(3, 16, dtype=torch.bfloat16), wide + 1], 9, page_axis=1)
    assert other.layout == first.layout
    grouped = HostPages([[keys], [], [scales]], 5, groups=[2, 0, 1])
    assert (
        grouped.layout
        == "group 2: 1 x 64 bytes, 1 x float32[4,2]; group 0: 1 x 0 bytes; group 1: 1 x 64 bytes, 1 x bfloat16[3]"
    )
    assert [rows.shape for rows in grouped.rows] == [(5, 64), (5, 0), (5, 64)]


def test_jax_reads_the_rows_of_torch() -> None:
    """In an environment with both. On CPUs jax keeps the bits of numbers, but not those of all NaNs."""
    jax = pytest.importorskip("jax")
    from pagepool.host_pages import HostPages as JaxHostPages

    rng = np.random.default_rng(4)
    dtypes = ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"]
    numbers = torch.from_numpy(rng.integers(0, 9, (NUM_PAGES, 3, 5)))
    tensors = {key: numbers.to(getattr(torch, dtype)) for key, dtype in zip("fbadce", dtypes, strict=True)}  # any order
    arrays = {key: jax.numpy.zeros(tensors[key].shape, str(tensors[key].dtype)[6:]) for key in tensors}
    ours, theirs = HostPages(tensors, 9), JaxHostPages(arrays, 9)
    assert ours.layout == theirs.layout
    ours.run(tensors, make_transfers([(5, 1)]))
    ours.wait()
    theirs.rows[0][1] = ours.rows[0][1]
    theirs.mark_saved([1])
    arrays = theirs.run(arrays, make_transfers([], [(1, 2)]))
    found = [np.asarray(arrays[key])[2].tobytes() for key in sorted(arrays)]
    assert found == read_page([tensors[key] for key in sorted(tensors)], 0, 5)


@each_device
def test_tensors_in_any_lists_and_dicts(device: str) -> None:
    arrays = {"values": [torch.arange(4, device=device), None], "keys": (torch.arange(8.0, device=device).view(4, 2),)}
    host_pages = HostPages(arrays, 4)
    assert host_pages.layout == "all groups: 1 x 128 bytes, 1 x float32[2], 1 x int64[]"
    assert host_pages.run(arrays, make_transfers([(1, 3)], [(3, 2)])) is arrays
    assert arrays["values"][0].tolist() == [0, 1, 1, 3]
    assert arrays["keys"][0].tolist() == [[0, 1], [2, 3], [2, 3], [6, 7]]
    moves = make_transfers()._replace(number=0)
    assert host_pages.run(arrays, moves) is arrays
    assert len(host_pages.wait()) == 1


@each_device
def test_pools_have_tensors_of_their_own_lengths(device: str) -> None:
    arrays = [[torch.arange(5, device=device)], [torch.arange(3, device=device) * 10], []]
    host_pages = HostPages(arrays, (7, 4, 4), groups=[0, 1, 4])
    host_pages.run(arrays, make_transfers([(4, 6), (2, 3)], save_groups=[0, 1]))
    host_pages.run(arrays, make_transfers(loads=[(6, 1), (3, 1)], load_groups=[0, 1]))
    assert [tensor.tolist() for own in arrays for tensor in own] == [[0, 4, 2, 3, 4], [0, 20, 20]]
    assert (host_pages.num_pages, host_pages.groups) == ((7, 4, 4), [0, 1, 4])


@pytest.mark.parametrize("is_inference", [False, True])
def test_tensors_of_inference_and_of_training(is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        arrays = [torch.arange(5.0), torch.ones(5, 2, requires_grad=not is_inference), torch.arange(5, dtype=torch.int32)]
    host_pages = HostPages(arrays, 4)
    host_pages.run(host_pages.warmup(arrays), make_transfers([(3, 1)], [(1, 2)]))
    assert arrays[0].tolist() == arrays[2].tolist() == [0, 1, 3, 3, 4]
    with torch.inference_mode():
        host_pages.run(arrays, make_transfers([], [(1, 4)]))
    assert arrays[0].tolist() == arrays[2].tolist() == [0, 1, 3, 3, 3]


@each_device
def test_parts_of_a_tensor_are_moved_in_place(device: str) -> None:
    """One with pages of several tokens in the middle, as caches of slots have."""
    cache = torch.arange(2 * 12 * 3, device=device).view(2, 12, 3)
    before = cache.clone()
    pages = cache.unflatten(1, (4, 3))
    host_pages = HostPages([pages[0], pages[1]], 8)
    host_pages.run([pages[0], pages[1]], make_transfers([(1, 5)], [(5, 3)]))
    before[:, 9:12] = before[:, 3:6]
    assert cache.equal(before)


@each_device
def test_warmup_changes_nothing(device: str) -> None:
    rng = np.random.default_rng(5)
    moved = make_moved(rng, device)
    assert moved.host_pages.warmup(moved.groups) is moved.groups
    moved.check()
    assert not any(rows.any() for rows in moved.host_pages.rows)
    moved.host_pages.warmup(moved.groups, 1)


# Rows.


@pytest.mark.parametrize("make", [bytearray, lambda size: mmap.mmap(-1, size), lambda size: np.zeros(size, np.uint8)])
def test_rows_are_in_the_memory_that_was_given(make: Any) -> None:
    memory = [make(10 * 64 + 4), make(7 * 64)]
    caches = [[torch.arange(8, dtype=torch.int32)], [torch.arange(8.0)]]
    host_pages = HostPages(caches, (10, 7), groups=[0, 1], memory=memory)
    host_pages.run(host_pages.warmup(caches, 1), make_transfers([(3, 9), (4, 6)], save_groups=[0, 1]))
    host_pages.wait()
    assert int(np.frombuffer(memory[0], np.int32)[9 * 16]) == 3
    assert float(np.frombuffer(memory[1], np.float32)[6 * 16]) == 4.0


@each_device
def test_rows_that_others_wrote_are_loaded(device: str) -> None:
    tensor = torch.arange(8, dtype=torch.int32, device=device)
    host_pages = HostPages(tensor, 8)
    host_pages.rows[0][2:4].view(np.int32)[:, 0] = [70, 80]
    host_pages.run(tensor, make_transfers([], [(2, 1)]))
    assert [finished.failed_loads for finished in host_pages.wait()] == [[0]]
    host_pages.mark_saved([2, 3])
    host_pages.run(tensor, make_transfers([(4, 3)], [(2, 1), (3, 2), (2, 5)]))
    assert host_pages.wait()[0].error is None
    assert tensor.tolist() == [0, 70, 4, 3, 4, 70, 6, 7]
    for page_ids, group, error, message in (
        ([1, 8], None, PageIdError, "page_ids: got page 8, allowed: 1 to 7"),
        ([0], None, PageIdError, "page_ids: got page 0, allowed: 1 to 7"),
        ([1], 0, ArgumentError, "group: got 0, allowed: a group of this object, whose page axis is not divided"),
    ):
        with pytest.raises(error, match=f"^{message}$"):
            host_pages.mark_saved(page_ids, group=group)


@each_device
@pytest.mark.parametrize(("num_kib", "num_calls"), [(1, 3), (1024, 9)])
def test_up_to_64_pages_or_16_mib_cross_together(
    num_kib: int, num_calls: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, start_save = [], GroupPages.start_save
    monkeypatch.setattr(GroupPages, "start_save", lambda *args: sizes.append(len(args[2])) or start_save(*args))
    tensor = torch.zeros(140, num_kib * 256, device=device)
    tensor[:, 7] = torch.arange(140)
    host_pages = HostPages(tensor, 140)
    ids = np.arange(1, 140)
    host_pages.run(tensor, make_transfers(np.stack([ids, ids], axis=1)))
    assert (len(sizes), sum(sizes)) == (num_calls, 139)
    host_pages.run(tensor, make_transfers([], np.stack([ids, ids[::-1]], axis=1)))
    host_pages.wait()
    assert tensor[1:, 7].tolist() == ids[::-1].tolist()
    host_pages.run(tensor, make_transfers([], np.stack([ids, ids], axis=1)))
    assert tensor[1:, 7].tolist() == ids.tolist()


# Loads that do not wait for saves.


@each_device
def test_pages_on_their_way_are_loaded_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also into two places, and after the page was saved again."""
    held, tensor = HeldCopies(monkeypatch), torch.arange(20, device=device)
    host_pages = HostPages(tensor, 8)
    host_pages.run(tensor, first := make_transfers([(1, 1), (2, 2), (3, 3)]))
    second = make_transfers([(4, 2)], [(1, 10), (2, 11), (2, 12), (3, 13), (1, 14)])
    host_pages.run(tensor, second)
    assert tensor[10:15].tolist() == [1, 4, 4, 3, 1]
    assert host_pages.poll() == []
    assert not host_pages.rows[0].any()
    held.released.set()
    assert host_pages.wait() == [done(first), done(second)]
    host_pages.run(tensor, make_transfers([], [(1, 5), (2, 6), (3, 7)]))
    assert tensor[5:8].tolist() == [1, 4, 3]


# Failures.


@each_device
def test_pages_that_were_never_saved_are_not_loaded(device: str) -> None:
    tensor = torch.arange(5, device=device)
    host_pages = HostPages(tensor, 5)
    host_pages.run(tensor, transfers := make_transfers([(1, 1)], [(2, 2), (1, 3), (4, 4)]))
    ((number, failed_saves, failed_loads, error),) = host_pages.wait()
    assert (number, failed_saves, failed_loads) == (transfers.number, [], [0, 2])
    assert isinstance(error, PageIdError)
    assert str(error) == "page 2 of the host: got one that was not saved, allowed: pages that were saved"
    assert tensor.tolist() == [0, 1, 2, 1, 4]


@pytest.mark.parametrize("name", ["_gather", "_scatter"])
def test_what_torch_raises_for_a_call_fails_its_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved in the page before is gone too."""
    tensor = torch.arange(6)
    host_pages = HostPages(tensor, 6)
    host_pages.run(tensor, make_transfers([(1, 1), (2, 2)]))
    host_pages.wait()
    with monkeypatch.context() as patches:

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        patches.setattr(GroupPages, name, fail)
        host_pages.run(tensor, make_transfers([(3, 1)], [(2, 4), (1, 5)]))
    ((_, failed_saves, failed_loads, error),) = host_pages.wait()
    assert isinstance(error, torch.OutOfMemoryError)
    if name == "_gather":
        assert (failed_saves, failed_loads, tensor.tolist()) == ([0], [1], [0, 1, 2, 3, 2, 5])
    else:
        assert (failed_saves, failed_loads, tensor.tolist()) == ([], [0, 1], [0, 1, 2, 3, 4, 5])
    host_pages.run(tensor, make_transfers([(3, 1)], [(2, 4), (1, 5)]))
    assert host_pages.wait()[0].error is None
    assert tensor.tolist() == [0, 1, 2, 3, 2, 3]


# Errors: nothing is done.


@pytest.mark.parametrize(
    ("transfers", "error", "message"),
    [
        (make_transfers([(8, 1)]), PageIdError, r"moves\.saves\.src: got page 8, allowed: 1 to 7"),
        (make_transfers([(0, 1)]), PageIdError, r"moves\.saves\.src: got page 0, allowed: 1 to 7"),
        (make_transfers([(1, 1), (2, 1)]), ArgumentError, r"moves\.saves\.dst: got page 1 twice, allowed: each page once"),
        (make_transfers([(1, 1)], [(10, 1)]), PageIdError, r"moves\.loads\.src: got page 10, allowed: 1 to 9"),
        (make_transfers([(1, 1)], [(1, 8)]), PageIdError, r"moves\.loads\.dst: got page 8, allowed: 1 to 7"),
        (make_transfers([(1, 1)], save_groups=[2]), ArgumentError, r"moves\.saves\.group: got 2, allowed: 0, 1"),
        (make_transfers([(1, 1)])._replace(number=0), ArgumentError, "number: got 0, allowed: at least 1"),
        (make_transfers([(1, 1)])._replace(loads=make_copies([(1, 1)])._replace(dst=[])), ArgumentTypeError,
         r"moves\.loads\.dst: got list, allowed: an int32 array with one axis"),
        (None, ArgumentTypeError, "moves: got NoneType, allowed: Moves"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_transfers(transfers: Any, error: type[Exception], message: str) -> None:
    arrays = [torch.arange(8), torch.arange(8)]
    host_pages = HostPages(arrays, 10, groups=[0, 1])
    with pytest.raises(error, match=f"^{message}$"):
        host_pages.run(arrays, transfers)
    assert host_pages.wait() == []
    assert [tensor.tolist() for tensor in arrays] == [[*range(8)]] * 2


def test_a_number_in_flight_is_not_taken_again() -> None:
    host_pages = HostPages(tensor := torch.arange(8), 8)
    host_pages.run(tensor, transfers := make_transfers([(1, 1)]))
    with pytest.raises(ArgumentError, match=rf"^number: got {transfers.number}, allowed: one that is not in flight$"):
        host_pages.run(tensor, transfers)
    assert host_pages.wait() == [done(transfers)]


def free(tensor: Any) -> Any:
    """Take the memory of a tensor away, as engines do that sleep."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "call", [HostPages.warmup, lambda host_pages, arrays: host_pages.run(arrays, make_transfers([(1, 1)], [(1, 2)]))]
)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [torch.arange(8)], ArgumentError, r"arrays: got tensors at \[0\], allowed: as at first, \[0\], \[1\]"),
        (lambda: torch.arange(8), ArgumentError, r"arrays: got tensors at the top, allowed: as at first, \[0\], \[1\]"),
        (lambda: [torch.arange(8), np.arange(8)], ArgumentTypeError, "arrays: got ndarray, allowed: torch tensors"),
        (lambda: [torch.arange(8), torch.arange(9)], ArgumentError,
         r"arrays: got torch.int64 \(9,\) \(1,\) cpu, allowed: as at first, torch.int64 \(8,\) \(1,\) cpu"),
        (lambda: [torch.arange(8), torch.arange(8.0)], ArgumentError, "arrays: got torch.float32 .*, allowed: as at first, .*"),
        (lambda: [torch.arange(16)[::2], torch.arange(8)], ArgumentError, "arrays: got .*, allowed: as at first, .*"),
        (lambda: [torch.arange(8).to("meta"), torch.arange(8)], ArgumentError, "arrays: got .* meta, allowed: as at first, .*"),
        (lambda: [torch.arange(8), free(torch.arange(8))], ArgumentError,
         r"arrays: got a tensor of shape \[8\] without memory, allowed: tensors with memory"),
        (lambda: [torch.arange(8)] * 2, ArgumentError, "arrays: got the same array twice, allowed: each array once"),
    ],
)  # fmt: skip
def test_wrong_arrays(call: Callable[..., Any], make: Callable[[], Any], error: type[Exception], message: str) -> None:
    host_pages = HostPages([torch.arange(8), torch.arange(8)], 10)
    with pytest.raises(error, match=f"^{message}$"):
        call(host_pages, make())
    assert host_pages.wait() == []


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        (torch.arange(8), {"num_pages": 1}, ArgumentError, r"num_pages: got 1, allowed: 2 to 2\*\*62"),
        ({"a": torch.arange(8)}, {"groups": [0]}, ArgumentTypeError, "arrays: got dict, allowed with groups: a list or tuple"),
        ([torch.arange(8)], {"groups": [-1]}, ArgumentError, "group: got -1, allowed: at least 0"),
        (torch.arange(8), {"num_copy_threads": 0}, ArgumentError, "num_copy_threads: got 0, allowed: at least 1"),
        (torch.arange(8), {"memory": 7}, ArgumentTypeError, "memory: got int, allowed: a contiguous buffer"),
        (torch.arange(8), {"memory": bytes(640)}, ArgumentError,
         "memory: got 640 read-only bytes, allowed: at least 640 writable ones"),
        (torch.arange(8), {"memory": bytearray(639)}, ArgumentError,
         "memory: got 639 writable bytes, allowed: at least 640 writable ones"),
        ([torch.arange(8)], {"groups": [0], "memory": bytearray(640)}, ArgumentTypeError,
         "memory: got bytearray, allowed: a buffer for each of 1 groups"),
        ([torch.arange(8)], {"groups": [0, 1]}, ArgumentError,
         "groups: got 1 arrays, 2 groups, 1 page axes, allowed: as many .*"),
        ([torch.arange(8)], {"groups": [0], "num_pages": [4, 4]}, ArgumentError,
         "num_pages: got 2 numbers, allowed for 1 groups: 1"),
        (torch.arange(8), {"page_axis": 1}, ArgumentError, r"arrays: got shape \[8\], allowed: more axes than page_axis, 1"),
        (torch.arange(8), {"page_axis": -1}, ArgumentError, "page_axis: got -1, allowed: at least 0"),
        ([], {}, ArgumentError, "arrays: got no tensor, allowed: at least one"),
        (np.arange(8), {}, ArgumentTypeError, "arrays: got ndarray, allowed: torch tensors"),
        ([torch.arange(8), torch.zeros(8, device="meta")], {}, ArgumentError,
         "arrays: got tensors on cpu and meta, allowed: one device for all"),
        (torch.zeros(8, device="meta"), {}, ArgumentError,
         "arrays: got a tensor that is without memory, allowed: strided tensors with memory"),
        (torch.zeros(8, 2).to_sparse(), {}, ArgumentError,
         "arrays: got a tensor that is torch.sparse_coo, allowed: strided tensors with memory"),
        (torch.zeros(8, dtype=torch.complex64).conj(), {}, ArgumentError,
         "arrays: got a conjugate or negative view, allowed: tensors with values of their own"),
        (torch.zeros(8, 1).expand(8, 4), {}, ArgumentError,
         r"arrays: got an expanded tensor of shape \[8, 4\], allowed: elements of their own memory"),
        ({1: torch.arange(8), "a": torch.arange(8)}, {}, ArgumentTypeError,
         "arrays: got a dict whose keys have no order, allowed: keys that can be sorted"),
    ],
)  # fmt: skip
def test_wrong_host_pages(arrays: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        HostPages(arrays, **{"num_pages": 10, **options})


# The thread.


def test_the_thread_ends_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, held = {*threading.enumerate()}, HeldCopies(monkeypatch)
    host_pages = HostPages(tensor := torch.arange(8, dtype=torch.int32), 8)
    rows, freed = host_pages.rows[0], weakref.ref(host_pages)
    host_pages.run(tensor, make_transfers([(3, 1)]))
    (thread,) = {*threading.enumerate()} - before
    del host_pages
    gc.collect()
    assert freed() is None
    held.released.set()
    thread.join(60)
    assert not thread.is_alive()
    assert rows[1].view(np.int32)[0] == 3


def test_close_ends_the_thread_after_its_copies() -> None:
    before = {*threading.enumerate()}
    host_pages = HostPages(tensor := torch.arange(8, dtype=torch.int32), 8)
    host_pages.run(tensor, transfers := make_transfers([(3, 1)]))
    host_pages.close()
    host_pages.close()
    assert host_pages.rows[0][1].view(np.int32)[0] == 3
    assert {*threading.enumerate()} <= before
    assert host_pages.poll() == [done(transfers)]
    host_pages.run(tensor, make_transfers([(4, 2)], [(1, 5), (2, 6)]))
    assert [finished[1:3] for finished in host_pages.wait()] == [([0], [1])]
    assert tensor.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_calls_in_a_forked_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldCopies(monkeypatch)
    host_pages = HostPages(tensor := torch.arange(8), 8)
    host_pages.run(tensor, transfers := make_transfers([(3, 1)]))
    calls = [host_pages.poll, host_pages.wait, lambda: host_pages.run(tensor, make_transfers([(4, 2)]))]
    calls += [lambda: host_pages.mark_saved([1]), lambda: host_pages.warmup(tensor)]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except IntegrityError:
                refused += 1
        host_pages.close()  # does nothing
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)
    held.released.set()
    assert host_pages.wait() == [done(transfers)]


# Streams of a GPU.


@on_gpu
def test_cuda_calls_return_before_the_device_has_computed() -> None:
    """Saves read what earlier work writes, and later work reads what is loaded. The tensors change at once behind a call."""
    tensor = torch.zeros(64, 1 << 10, dtype=torch.int32, device="cuda")
    host_pages = HostPages(tensor, 64)
    host_pages.warmup(tensor)
    for turn in range(1, 9):
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        tensor.fill_(turn)
        host_pages.run(tensor, both := make_transfers([(5, 1), (6, 2)], [(1, 10)]))
        assert not torch.cuda.current_stream().query()
        assert host_pages.poll() == []
        tensor[:9].fill_(-1)
        host_pages.run(tensor, loads := make_transfers([], [(1, 11), (2, 12)]))
        found = tensor[[5, 10, 11, 12]].amax(1) + tensor[[5, 10, 11, 12]].amin(1)
        assert found.tolist() == [-2, 2 * turn, 2 * turn, 2 * turn]
        assert host_pages.wait() == [done(both), done(loads)]
        assert (host_pages.rows[0][1:3].view(np.int32) == turn).all()


@on_gpu
def test_cuda_calls_on_several_streams() -> None:
    """A page on its way is loaded by another stream than the one that saved it."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensor = torch.arange(64, device="cuda", dtype=torch.int32)[:, None].repeat(1, 1 << 12)
    host_pages = HostPages(tensor, 64)
    torch.cuda.synchronize()
    for turn in range(30):
        first, second = streams[turn % 3], streams[(turn + 1) % 3]
        first.wait_stream(second)
        with torch.cuda.stream(first):
            torch.cuda._sleep(1_000_000)
            tensor[1].fill_(turn)
            host_pages.run(tensor, make_transfers([(1, 1)]))
        with torch.cuda.stream(second):
            host_pages.run(tensor, make_transfers([], [(1, 2 + turn)]))
    torch.cuda.synchronize()
    assert all(finished.error is None for finished in host_pages.wait())
    assert tensor[2:32].amin(1).tolist() == tensor[2:32].amax(1).tolist() == [*range(30)]


@on_gpu
def test_cuda_transfers_while_a_graph_is_captured_are_refused() -> None:
    tensor = torch.arange(8, device="cuda")
    host_pages = HostPages(tensor, 8)
    host_pages.warmup(tensor)
    torch.cuda.synchronize()
    message = "^HostPages: got a stream that captures a graph, allowed: before or after the capture$"
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.add_(1)  # torch warns of empty graphs
        with pytest.raises(ArgumentError, match=message):
            host_pages.run(tensor, make_transfers([(1, 1)]))
    assert host_pages.wait() == []


@on_gpu
def test_cuda_transfers_at_a_rate_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """1 GiB of pages of 256 KiB, in 8 layers, beside one copy of as many bytes between the GPU and pinned memory."""
    num_pages, ids = 4097, np.arange(1, 4097)
    layers = [torch.zeros(num_pages, 8192, device="cuda") for _ in range(8)]
    for layer in layers:
        layer += torch.arange(num_pages, device="cuda")[:, None]
    host_pages = HostPages(layers, num_pages)
    host_pages.warmup(layers)
    pairs = np.stack([ids, ids], axis=1)
    on_device = torch.stack(layers)
    on_host = torch.empty(on_device.shape, pin_memory=True)

    def measure(call: Callable[[], Any]) -> float:
        """Return the GiB in a second of the fastest of three calls."""
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            assert all(finished.error is None for finished in host_pages.wait())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return 1 / min(seconds)

    rates = {
        "saves": measure(lambda: host_pages.run(layers, make_transfers(pairs))),
        "one copy to the host": measure(lambda: on_host.copy_(on_device)),
        "loads": measure(lambda: host_pages.run(layers, make_transfers([], pairs[::-1]))),
        "one copy to the GPU": measure(lambda: on_device.copy_(on_host)),
    }
    with capsys.disabled():
        print("", *(f"{name}: {rate:.1f} GiB/s" for name, rate in rates.items()), sep="\n")
    assert all(layer.amin(1).equal(layer.amax(1)) for layer in layers)
    assert all(layer[:, 7].tolist() == [*range(num_pages)] for layer in layers)


# Beside a manager.


class Cache:
    """The tensors of two groups, with a token's id in each slot, behind a manager with a host tier. Answers of transfers reach
    the manager before the step that reads their pages.
    """

    def __init__(self, policy: str, device: str) -> None:
        groups = [
            CacheGroupSpec(FullAttentionSpec(4, 1, 8, "bfloat16", use_mla=False)),
            CacheGroupSpec(SlidingWindowSpec(4, 1, 8, "bfloat16", sliding_window=8, use_mla=False)),
        ]
        self.manager = CacheManager(50, groups, 64, host_tier=HostTier(110, policy=policy))
        self.batch = RunningBatch(self.manager, MultiGroupPageTable(1, 64, [4, 4], device="cpu"))
        own = {"dtype": torch.bfloat16, "device": device}
        scales = torch.zeros(50, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.tensors = [{"keys": torch.zeros(50, 4, **own), "scales": scales}, [torch.zeros(4, 50, device=device)]]
        self.host_pages = HostPages(self.tensors, 110, groups=[0, 1], page_axis=[0, 1])
        self.num_failed_loads = 0

    def move_pages(self) -> tuple[list[int], list[int]]:
        """Make the moves that are due. Return the rows that are to compute again, and those that lost their pages."""
        self.host_pages.run(self.tensors, self.batch.take_moves())
        rewound, lost = [], []
        for finished in self.host_pages.wait():
            self.num_failed_loads += len(finished.failed_loads)
            failed = self.manager.fail(finished.number, saves=finished.failed_saves, loads=finished.failed_loads)
            for rows, more in zip((rewound, lost), self.batch.rewind(failed), strict=True):
                rows += more
        return rewound, lost

    def write(self, token_ids: list[int], start: int) -> None:
        keys, scales = self.tensors[0]["keys"], self.tensors[0]["scales"].view(torch.uint8)
        for position in range(start, len(token_ids)):
            full, window = (page_ids[position // 4] for page_ids in self.batch.get_page_ids(0))
            keys[full, position % 4] = scales[full, position % 4] = token_ids[position]
            self.tensors[1][0][position % 4, window] = token_ids[position]

    def read(self) -> list[list[int]]:
        """Return the ids of all tokens, by each tensor."""
        full, window = (list(page_ids) for page_ids in self.batch.get_page_ids(0))
        scales = self.tensors[0]["scales"].view(torch.uint8)
        pages = self.tensors[0]["keys"][full], scales[full], self.tensors[1][0].T[window]
        return [page.to(torch.int64).ravel().tolist() for page in pages]

    def compute(self, token_ids: list[int]) -> None:
        """Compute a prompt, behind its hits, and check that the right tokens are read."""
        start = self.batch.admit(0, token_ids)
        while True:
            rewound, lost = self.move_pages()
            if lost:
                return
            if not rewound:
                break
            start = int(self.batch.num_computed_tokens[0])
            self.batch.plan([0], len(token_ids) - start)
        self.write(token_ids, start)
        keys, scales, window = (tokens[: len(token_ids)] for tokens in self.read())
        assert keys == scales == token_ids
        assert window[-8:] == token_ids[-8:]
        self.batch.release([0])


@each_device
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_prompts_hit_the_pages_of_the_host(policy: str, rate: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary of prompts is the model: each page of a prompt has its tokens, in whatever way it came back."""
    rng, random, load_rows = np.random.default_rng(6), Random(6), GroupPages.load_rows
    HeldCopies(monkeypatch, Random(6), rate)

    def load_at_times(*args: Any) -> Copy:
        return Copy(error=MemoryError("at random")) if random.random() < rate else load_rows(*args)

    monkeypatch.setattr(GroupPages, "load_rows", load_at_times)
    cache, prompts = Cache(policy, device), rng.integers(1, 250, (8, 40)).tolist()
    for _ in range(3 * NUM_ROUNDS):
        prompt = prompts[rng.integers(len(prompts))][: rng.integers(9, 41)]
        cache.compute(prompt + rng.integers(1, 250, rng.integers(0, 9)).tolist())
    stats = cache.manager.stats()
    assert stats.host_tier.num_loaded_pages > NUM_ROUNDS
    assert (cache.num_failed_loads > 0) == (rate > 0)
    cache.manager.check()

"""The rows of host pages: what is in them, loads of pages on their way there, memory that jax may alias, and the thread."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from devices import after_slow_work, count_compilations  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from moved_pages import TransferredPages, draw_array, make_transfers  # noqa: E402
from settings import NUM_OPERATIONS  # noqa: E402
from sources import run_python  # noqa: E402

from pagepool.errors import ArgumentError, IntegrityError, PageIdError  # noqa: E402
from pagepool.host_pages import HostPages, Pack, get_writer  # noqa: E402
from pagepool.host_rows import MAX_STAGING, Staging  # noqa: E402

NUM_PAGES = 40
DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64"]
NUM_ROUNDS = min(NUM_OPERATIONS // 500, 100)


def make_pages(*dtypes: str, num_pages: int = NUM_PAGES, seed: int = 1, **options: Any) -> TransferredPages:
    rng = np.random.default_rng(seed)
    return TransferredPages([draw_array(rng, (num_pages, 3, 5), dtype) for dtype in dtypes], **options)


class HeldCopies:
    """Copies into rows wait until they are released, or a random time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, random: Random | None = None) -> None:
        self.released, self.write_rows = threading.Event(), Pack.write_rows
        self.random = random
        monkeypatch.setattr(Pack, "write_rows", lambda *args: self.run(*args))

    def run(self, *args: Any) -> None:
        if self.random is None:
            assert self.released.wait(60)
        else:
            time.sleep(self.random.choice((0, 0.001, 0.01)))
        self.write_rows(*args)


# Rows.


def test_a_row_has_all_arrays_of_a_page_by_dtype() -> None:
    pages = make_pages("int8", "float32", "int8")
    pages.transfer(make_transfers([(5, 1), (7, 3)]))
    pages.check()
    (rows,) = pages.host_pages.rows
    assert (rows.shape, rows.dtype, rows.flags.c_contiguous) == ((100, 128), np.uint8, True)
    for page, row in ((5, rows[1]), (7, rows[3])):
        first, second, third = (host[page].tobytes() for host in pages.hosts)
        assert row.tobytes() == (first + third).ljust(64, b"\0") + second.ljust(64, b"\0")
    assert not rows[[0, 2]].any()


def test_the_text_of_the_layout() -> None:
    keys, scales = jnp.zeros((8, 4, 2), jnp.float32), jnp.zeros((8, 3), jnp.bfloat16)
    assert HostPages([keys, scales, keys + 1], 5).layout == "all groups: 1 x 128 bytes, 2 x float32[4,2], 1 x bfloat16[3]"
    wide = jnp.zeros((4, 16, 2), jnp.float32)
    other = HostPages([wide, jnp.zeros((3, 16), jnp.bfloat16), wide + 1], 9, page_axis=1)
    assert other.layout == HostPages([keys, scales, keys + 1], 5).layout
    grouped = HostPages([[keys], [], [scales]], 5, groups=[2, 0, 1])
    assert (
        grouped.layout
        == "group 2: 1 x 64 bytes, 1 x float32[4,2]; group 0: 1 x 0 bytes; group 1: 1 x 64 bytes, 1 x bfloat16[3]"
    )
    assert [rows.shape for rows in grouped.rows] == [(5, 64), (5, 0), (5, 64)]


@pytest.mark.parametrize("make", [bytearray, lambda size: mmap.mmap(-1, size), lambda size: np.zeros(size, np.uint8)])
def test_rows_are_in_the_memory_that_was_given(make: Any) -> None:
    memory = [make(10 * 64 + 4), make(7 * 64)]
    caches = [[jnp.arange(8, dtype=jnp.int32)], [jnp.arange(8, dtype=jnp.float32)]]
    host_pages = HostPages(caches, (10, 7), groups=[0, 1], memory=memory)
    caches = host_pages.run(host_pages.warmup(caches, 1), make_transfers([(3, 9), (4, 6)], save_groups=[0, 1]))
    host_pages.wait()
    assert int(np.frombuffer(memory[0], np.int32)[9 * 16]) == 3
    assert float(np.frombuffer(memory[1], np.float32)[6 * 16]) == 4.0


@pytest.mark.usefixtures("word")
def test_rows_that_others_wrote_are_loaded() -> None:
    array = jnp.arange(8)
    host_pages = HostPages(array, 8)
    host_pages.rows[0][2:4].view(np.int32)[:, 0] = [70, 80]
    host_pages.rows[0][0] = 9  # where the system's first page begins
    array = host_pages.run(array, make_transfers([], [(2, 1)]))
    assert [finished.failed_loads for finished in host_pages.wait()] == [[0]]
    array = host_pages.warmup(array, 1)
    host_pages.mark_saved([2, 3])
    array = host_pages.run(array, make_transfers([(4, 3)], [(2, 1), (3, 2), (2, 5)]))
    assert host_pages.wait()[0].error is None
    assert array.tolist() == [0, 70, 4, 3, 4, 70, 6, 7]
    assert host_pages.rows[0][0].tolist() == [9] * 64
    for page_ids, group, error, message in (
        ([1, 8], None, PageIdError, "page_ids: got page 8, allowed: 1 to 7"),
        ([0], None, PageIdError, "page_ids: got page 0, allowed: 1 to 7"),
        ([1], 0, ArgumentError, "group: got 0, allowed: a group of this object, whose page axis is not divided"),
    ):
        with pytest.raises(error, match=f"^{message}$"):
            host_pages.mark_saved(page_ids, group=group)


# Pages that cross together.


@pytest.mark.parametrize(("num_kib", "num_calls"), [(1, 3), (1024, 9)])
def test_up_to_64_pages_or_16_mib_cross_together(num_kib: int, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, save = [], Pack.save
    monkeypatch.setattr(Pack, "save", lambda *args: sizes.append(len(args[2])) or save(*args))
    array = jnp.zeros((140, num_kib * 256), jnp.float32).at[:, 7].set(jnp.arange(140))
    host_pages = HostPages(array, 140)
    ids = np.arange(1, 140)
    array = host_pages.run(array, make_transfers(np.stack([ids, ids], axis=1)))
    assert (len(sizes), sum(sizes)) == (num_calls, 139)
    array = host_pages.run(array, make_transfers([], np.stack([ids, ids[::-1]], axis=1)))
    host_pages.wait()
    assert array[1:, 7].tolist() == ids[::-1].tolist()
    array = host_pages.run(array, make_transfers([], np.stack([ids, ids], axis=1)))
    assert array[1:, 7].tolist() == ids.tolist()


@pytest.mark.parametrize("has_mesh", [False, True])
def test_loads_from_rows_and_from_saves_under_way_use_the_same_programs(
    has_mesh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they read rows in place."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), PartitionSpec("a"))
    pages = make_pages("bfloat16", "int32", placement=sharding if has_mesh else None, is_aligned=has_mesh)
    with count_compilations() as in_warmup:
        pages.warmup(64)
    assert len(in_warmup) == 2 * 2 * 7
    with count_compilations() as compilations:
        pages.transfer(make_transfers([(i, i) for i in range(1, 8)]))
        pages.host_pages.wait()
        held = HeldCopies(monkeypatch)
        pages.transfer(make_transfers([(i, i + 3) for i in range(1, 8)], [(i, 2 * i) for i in range(1, 11)]))
        held.released.set()
        pages.host_pages.wait()
    assert not compilations
    pages.check()


# Loads that do not wait for saves.


@pytest.mark.usefixtures("word")
def test_pages_on_their_way_are_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also into two places, and after the page was saved again."""
    held, pages = HeldCopies(monkeypatch), make_pages(*DTYPES)
    pages.transfer(make_transfers([(1, 1), (2, 2), (3, 3)]))
    pages.transfer(make_transfers([(4, 2)], [(1, 10), (2, 11), (2, 12), (3, 13), (1, 14)]))
    jax.block_until_ready(pages.arrays)
    assert pages.host_pages.poll() == []
    assert not pages.host_pages.rows[0].any()
    held.released.set()
    pages.check()
    pages.transfer(make_transfers([], [(1, 5), (2, 6), (3, 7)]))
    pages.check()


@pytest.mark.parametrize("memory_kind", ["pinned_host", None])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_random_transfers_with_a_slow_thread(
    is_aligned: bool, memory_kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(is_aligned)
    HeldCopies(monkeypatch, Random(is_aligned))
    pages = make_pages(*DTYPES, memory_kind=memory_kind, num_host_pages=20, is_aligned=is_aligned)
    for i in range(NUM_ROUNDS):
        pages.move(rng, int(rng.integers(1, 18)))
        if i % 5 == 0:
            pages.check()
    pages.check()


def test_copies_that_fail_at_random_spoil_their_own_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, random, write_rows = np.random.default_rng(4), Random(4), Pack.write_rows

    def write_at_times(self: Pack, *args: Any) -> None:
        if random.random() < 0.3:
            raise MemoryError("at random")
        write_rows(self, *args)

    monkeypatch.setattr(Pack, "write_rows", write_at_times)
    pages = make_pages("float32", "int8")
    good: dict[int, Any] = {}
    num_failed = 0
    for _ in range(NUM_ROUNDS):
        saves = np.stack([rng.integers(1, NUM_PAGES, 3), 1 + rng.permutation(9)[:3]], axis=1)
        contents = [host[saves[:, 0]].copy() for host in pages.hosts]
        pages.arrays = pages.host_pages.run(pages.arrays, make_transfers(saves))
        ((_, failed, _, error),) = pages.host_pages.wait()
        assert (failed, str(error)) in (([], "None"), ([0, 1, 2], "at random"))
        good |= {int(dst): None if failed else [c[i] for c in contents] for i, (_, dst) in enumerate(saves)}
        loads = np.stack([1 + rng.permutation(9)[:4], 1 + rng.permutation(NUM_PAGES - 1)[:4]], axis=1)
        pages.arrays = pages.host_pages.run(pages.arrays, make_transfers([], loads))
        ((_, _, failed, _),) = pages.host_pages.wait()
        assert failed == [i for i, (src, _) in enumerate(loads) if good.get(int(src)) is None]
        num_failed += len(failed)
        for src, dst in loads:
            for host, page in zip(pages.hosts, good.get(int(src)) or (), strict=False):
                host[dst] = page
        pages.check()
    assert num_failed


# Memory that jax may alias.


def test_what_jax_got_may_be_overwritten_once_loads_have_ended() -> None:
    rng = np.random.default_rng(5)
    pages = make_pages(*DTYPES, is_aligned=False)
    staging = pages.host_pages._groups[0].staging
    for i in range(NUM_ROUNDS):
        pages.move(rng, 10)
        pages.host_pages.wait()
        for memory, _ in staging._used:
            memory[:] = i
        for rows in pages.host_pages.rows:
            np.testing.assert_array_equal(rows, rows.copy())
        pages.check()
    assert len(staging._used) == 1


class Use:
    """A use of memory that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_ended, self.error = False, error

    def is_ready(self) -> bool:
        return self.has_ended

    def wait(self) -> Exception | None:
        assert self.has_ended
        return self.error


def test_memory_is_given_again_only_after_its_use() -> None:
    """Not after an error, and only so much is kept."""
    staging, uses = Staging(1000), [Use(), Use(MemoryError()), Use()]
    memories = []
    for use in uses:
        memories.append(staging.take())
        staging.keep(memories[-1], use)
    memories.append(staging.take())
    starts = [memory.ctypes.data for memory in memories]
    assert len({*starts}) == 4
    assert not any(start % 64 for start in starts)
    assert [len(memory) for memory in memories] == [1000] * 4
    for use in uses:
        use.has_ended = True
    assert [staging.take().ctypes.data for _ in range(2)] == [starts[0], starts[2]]
    for memory in (*memories, *memories):
        staging.keep(memory, Use())
    assert len(staging._used) == MAX_STAGING


@pytest.mark.parametrize("is_aligned", [True, False])
def test_loads_behind_slow_work_use_other_memory(is_aligned: bool) -> None:
    pages = make_pages("int32", is_aligned=is_aligned)
    pages.transfer(make_transfers([(i, i) for i in range(1, 7)]))
    pages.check()
    pages.arrays = [after_slow_work(array) for array in pages.arrays]
    for i in range(1, 7):
        pages.transfer(make_transfers([], [(i, 7 + i)]))
    pages.check()


def test_jax_gets_no_rows_that_it_would_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    load, given = Pack.load, []
    monkeypatch.setattr(Pack, "load", lambda *args: given.append(args[2]) or load(*args))
    pages = make_pages("float32", "int8", is_aligned=False)
    pages.transfer(make_transfers([(1, 1), (2, 2)]))
    pages.host_pages.wait()
    pages.transfer(make_transfers([], [(1, 3)]))
    assert [type(array) for array in given] == [np.ndarray] * 2  # a jax array would hide its memory
    assert not any(np.shares_memory(array, pages.host_pages.rows[0]) for array in given)
    pages.check()


# Rows that programs read.


class Fence:
    """The end of a program, which comes when it is told to."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def is_ready(self) -> bool:
        return self.has_ended.is_set()

    def block_until_ready(self) -> None:
        assert self.has_ended.wait(60)


def test_a_row_is_written_after_the_loads_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fence, load = Fence(), Pack.load
    host_pages = HostPages(array := jnp.arange(8), 8)
    array = host_pages.run(array, make_transfers([(3, 1)]))
    host_pages.wait()
    monkeypatch.setattr(Pack, "load", lambda *args: load(*args) and fence)
    array = host_pages.run(array, make_transfers([], [(1, 5)]))
    monkeypatch.setattr(Pack, "load", load)
    array = host_pages.run(array, make_transfers([(6, 1)], [(1, 7)]))
    assert array.tolist() == [0, 1, 2, 3, 4, 3, 6, 6]
    time.sleep(0.05)
    assert host_pages.poll() == []
    assert host_pages.rows[0][1].view(np.int32)[0] == 3
    fence.has_ended.set()
    assert [finished[1:] for finished in host_pages.wait()] == [([], [], None)] * 2
    assert host_pages.rows[0][1].view(np.int32)[0] == 6


def test_rows_outlive_their_object_while_loads_read_them() -> None:
    array = jnp.arange(8)
    host_pages = HostPages(array, 8)
    array = host_pages.run(host_pages.warmup(array, 1), make_transfers([(3, 1)]))
    host_pages.wait()
    array = host_pages.run(after_slow_work(array, 10), make_transfers([], [(1, 5)]))
    del host_pages
    gc.collect()
    assert array.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]


def test_rows_are_those_of_others_again_after_the_end() -> None:
    """Also while a load reads them. Later loads copy rows."""
    array = jnp.arange(8)
    memory = mmap.mmap(-1, 1 << 12)
    host_pages = HostPages(array, 8, memory=memory)
    array = host_pages.run(host_pages.warmup(array, 1), make_transfers([(3, 1)]))
    host_pages.wait()
    array = host_pages.run(after_slow_work(array, 10), make_transfers([], [(1, 5)]))
    host_pages.close()
    array = host_pages.run(array, make_transfers([], [(1, 6)]))
    assert [finished[1:] for finished in host_pages.wait()] == [([], [], None)] * 2
    del host_pages
    for _ in range(5000):  # jax's threads hold memory a little longer than programs run
        with suppress(BufferError):
            memory.close()
            break
        gc.collect()
        time.sleep(0.001)
    assert memory.closed
    assert array.tolist() == [0, 1, 2, 3, 4, 3, 3, 7]


def test_rows_that_jax_deleted_are_copied() -> None:
    array = jnp.arange(8)
    host_pages = HostPages(array, 8)
    array = host_pages.run(array, make_transfers([(3, 1)]))
    host_pages.wait()
    for alias in host_pages._groups[0].aliases:
        alias.delete()
    array = host_pages.run(array, make_transfers([], [(1, 5)]))
    assert host_pages.wait()[0].error is None
    assert array.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]


@pytest.mark.parametrize(
    ("dtype", "page_axis"),
    [
        pytest.param(dtype, axis, marks=pytest.mark.slow if (i + axis) % 2 else ())
        for i, dtype in enumerate([*DTYPES, "float8_e4m3fn"])
        for axis in (0, 1)
    ],
)
def test_programs_copy_none_but_their_rows(dtype: str, page_axis: int) -> None:
    """Also for one page, and where the arrays are a part of the row: XLA copied all rows then, and the host may have more of
    them than memory."""
    arrays = [jnp.zeros((3,) * page_axis + (6, 3, 5), kind) for kind in (dtype, dtype, "uint8")]
    (group,) = HostPages(arrays, 8, page_axis=page_axis)._groups
    for pack, alias in zip(group.packs, group.aliases, strict=True):
        many = jax.ShapeDtypeStruct((1 << 20, alias.shape[1]), alias.dtype)
        first_item = pack.start // alias.dtype.itemsize
        for num_pages in (1, 2, 64):
            writer = get_writer(pack.shardings, page_axis, False, first_item)
            lowered = writer.lower([arrays[i] for i in pack.places], many, np.zeros((2, num_pages), np.int32))
            assert lowered.compile().memory_analysis().temp_size_in_bytes < 1 << 18


def test_rows_behind_two_gigabytes() -> None:
    array = jnp.zeros((4, 4096), jnp.int8).at[3].set(1)
    num_host_pages = (1 << 31) // 4096 + 10  # most of these are never allocated
    host_pages = HostPages(array, num_host_pages)
    array = host_pages.run(array, make_transfers([(3, num_host_pages - 1)]))
    host_pages.wait()
    array = host_pages.run(array, make_transfers([], [(num_host_pages - 1, 1)]))
    assert host_pages.wait()[0].error is None
    assert array[:, 5].tolist() == [0, 1, 0, 1]


# The thread.


def list_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pagepool-host-pages")]


def test_the_thread_ends_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, held = list_threads(), HeldCopies(monkeypatch)
    array = jnp.arange(8)
    host_pages = HostPages(array, 8)
    rows, freed = host_pages.rows[0], weakref.ref(host_pages)
    host_pages.run(array, make_transfers([(3, 1)]))
    (thread,) = set(list_threads()) - {*before}
    del host_pages
    gc.collect()
    assert freed() is None
    held.released.set()
    thread.join(60)
    assert not thread.is_alive()
    assert rows[1].view(np.int32)[0] == 3


def test_close_ends_the_thread_after_its_copies() -> None:
    before = list_threads()
    host_pages = HostPages(array := jnp.arange(8), 8)
    array = host_pages.run(array, transfers := make_transfers([(3, 1)]))
    host_pages.close()
    host_pages.close()
    assert host_pages.rows[0][1].view(np.int32)[0] == 3
    assert set(list_threads()) <= {*before}
    assert host_pages.poll() == [(transfers.number, [], [], None)]
    array = host_pages.run(array, make_transfers([(4, 2)], [(1, 5), (2, 6)]))
    assert [finished[1:3] for finished in host_pages.wait()] == [([0], [1])]
    assert array.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]


EXITING = """
import mmap, sys, time
from types import SimpleNamespace
import jax.numpy as jnp, numpy as np
from pagepool.host_pages import HostPages, Pack

write_rows = Pack.write_rows
Pack.write_rows = lambda *args: (time.sleep(0.1), write_rows(*args))
file = open(sys.argv[1], "r+b")
array, ids = jnp.arange(300), np.arange(1, 300, dtype=np.int32)
host_pages = HostPages(array, 300, memory=mmap.mmap(file.fileno(), 0))
none, zeros = ids[:0], np.zeros_like(ids)
saves, loads = SimpleNamespace(src=ids, dst=ids, group=zeros), SimpleNamespace(src=none, dst=none, group=none)
host_pages.run(array, SimpleNamespace(number=1, saves=saves, loads=loads))
print(len(host_pages.poll()))
"""


def test_the_interpreter_exits_after_copies_under_way(tmp_path: Path) -> None:
    program, memory = tmp_path / "exiting.py", tmp_path / "memory"
    program.write_text(EXITING)
    memory.write_bytes(bytes(300 * 64))
    process = run_python(program, memory, JAX_PLATFORMS="cpu")
    assert (process.returncode, process.stdout, process.stderr) == (0, "0\n", "")
    assert np.frombuffer(memory.read_bytes(), np.int32)[::16].tolist() == list(range(300))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_calls_in_a_forked_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldCopies(monkeypatch)
    host_pages = HostPages(array := jnp.arange(8), 8)
    host_pages.run(array, transfers := make_transfers([(3, 1)]))
    calls = [host_pages.poll, host_pages.wait, lambda: host_pages.run(array, make_transfers([(4, 2)]))]
    calls.append(lambda: host_pages.mark_saved([1]))
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
    assert host_pages.wait() == [(transfers.number, [], [], None)]

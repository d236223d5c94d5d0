"""Page tables with torch: what reaches the device, rows gathered, the order on streams, errors that change nothing.

`make test-torch` runs these on the CPU, and on a GPU if there is one; `make torch-gpu` runs those of the GPU.
"""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from settings import NUM_OPERATIONS
from table_model import SHAPES, GroupedModel, TableModel, Work, commit_groups_alone, slots_in_numpy

torch = pytest.importorskip("torch")

import pagepool  # noqa: E402
import pagepool.torch  # noqa: E402
from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, RunningBatch, SlidingWindowSpec  # noqa: E402
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, RowIndexError  # noqa: E402
from pagepool.torch import Buffer, Buffers, MultiGroupPageTable, PageTable  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if HAS_GPU else [])]
GROUPS = [[16], [16, 16], [16, 1, 7], [64, 3]]
each_device = pytest.mark.parametrize("device", DEVICES)
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU")


def make_work(shape: tuple[int, int], seed: int, **options: Any) -> Work:
    return Work(PageTable(*shape, **options), TableModel(*shape), seed)


def make_grouped_work(num_rows: int, max_model_len: int, page_sizes: list[int], seed: int, **options: Any) -> Work:
    tables = MultiGroupPageTable(num_rows, max_model_len, page_sizes, **options)
    return Work(tables, GroupedModel([(num_rows, -(-max_model_len // page_size)) for page_size in page_sizes]), seed)


def columns_at_least(num_columns: int, kind: str) -> int:
    """Return the columns of an engine's tensor: as many as are needed, one more, or a multiple of 64."""
    return {"same": num_columns, "one more": num_columns + 1, "of 64": -(-num_columns // 64) * 64 + 64}[kind]


def commit_at_random(work: Work) -> None:
    """Commit some rows, overwrite the host tables at once, and compare the tensors with the models."""
    num_reqs = work.num_rows if work.coin() else int(work.rng.integers(0, work.num_rows + 1))
    tensors = work.commit(num_reqs)
    work.overwrite_host()
    for tensor, (table, model) in zip(tensors, work.pairs, strict=True):
        model.commit(num_reqs)
        assert tensor is table.page_table
        assert tensor.dtype == torch.int32
        found, num_columns = tensor.cpu().numpy(), model.table.shape[1]
        np.testing.assert_array_equal(found[:, :num_columns], model.on_device, f"seed {work.rng.bit_generator.seed_seq}")
        assert not found[:, num_columns:].any()
    work.restore_host()
    work.tables.check()


def run_work(work: Work, num_steps: int) -> None:
    for _ in range(num_steps):
        for _ in range(int(work.rng.integers(1, 6))):
            work.do()
        commit_at_random(work)


# Random work.


@each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_commits_send_what_changed(shape: tuple[int, int], device: str) -> None:
    run_work(make_work(shape, seed=1, device=device), 200 * NUM_OPERATIONS // 200_000 + 40)


@each_device
@pytest.mark.parametrize("page_sizes", GROUPS, ids=str)
def test_commits_send_all_groups(page_sizes: list[int], device: str) -> None:
    run_work(make_grouped_work(6, 300, page_sizes, seed=2, device=device), 150 * NUM_OPERATIONS // 200_000 + 30)


@each_device
@pytest.mark.parametrize("kind", ["same", "one more", "of 64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_commits_into_a_tensor_of_the_engine(shape: tuple[int, int], kind: str, device: str) -> None:
    tensor = torch.full((shape[0], columns_at_least(shape[1], kind)), 7, dtype=torch.int32, device=device)
    work = make_work(shape, seed=3, tensor=tensor)
    assert work.tables.page_table is tensor
    run_work(work, 30)


@each_device
@pytest.mark.parametrize("kind", ["same", "of 64"])
def test_commits_into_tensors_of_the_engine(kind: str, device: str) -> None:
    page_sizes = [16, 1, 7]
    shapes = [(6, columns_at_least(-(-300 // page_size), kind)) for page_size in page_sizes]
    tensors = [torch.full(shape, -1, dtype=torch.int32, device=device) for shape in shapes]
    work = make_grouped_work(6, 300, page_sizes, seed=4, tensors=tensors, device=device)
    work.tables.warmup()
    run_work(work, 30)
    assert all(table.page_table is tensor for table, tensor in zip(work.tables.page_tables, tensors, strict=True))


@each_device
def test_a_group_may_be_committed_alone(device: str) -> None:
    commit_groups_alone(make_grouped_work(6, 300, [16, 5], seed=5, device=device), commit_at_random)


def test_a_large_table_is_that_of_the_host() -> None:
    rng = np.random.default_rng(6)
    table = PageTable(256, 2048, device="cpu")
    address = table.page_table.data_ptr()
    for step in range(20):
        rows = rng.permutation(256)[: (16, 250)[step % 5 == 4]]
        table.append_rows_batch([rng.integers(0, 1 << 31, 1 + 60 * (step % 5 == 4)).astype(np.int32) for _ in rows], rows)
        np.testing.assert_array_equal(table.commit(256).numpy(), table.page_table_cpu)
    assert table.page_table.data_ptr() == address


# One tensor, and the choice between windows and rows.


def test_all_groups_are_in_one_tensor_of_windows() -> None:
    tables = MultiGroupPageTable(4, 300, [16, 1], device="cpu")
    first, second = (table.page_table for table in tables.page_tables)
    assert (list(first.shape), list(second.shape)) == ([4, 64], [4, 320])
    storage = first.untyped_storage()
    assert storage.data_ptr() == second.untyped_storage().data_ptr()
    assert storage.nbytes() == 4 * 64 * (4 * 1 + 4 * 5 + 1)


def test_windows_or_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    send_lines, send_rows = Buffers._send_lines, Buffers._send_rows
    monkeypatch.setattr(Buffers, "_send_lines", lambda *args: calls.append(args[3]) or send_lines(*args))
    monkeypatch.setattr(Buffers, "_send_rows", lambda *args: calls.append("rows") or send_rows(*args))
    table = PageTable(64, 640, device="cpu")  # 640 windows in all, so 40 at most
    for num_rows, num_committed, expected in (
        (1, 64, [16]), (4, 64, [64]), (5, 64, ["rows"]), (0, 64, []), (5, 4, [64]), (0, 64, [16]), (64, 63, ["rows"]),
        (0, 64, [16]),
    ):  # fmt: skip
        table.mark_dirty(range(num_rows))
        calls.clear()
        table.commit(num_committed)
        assert calls == expected
    calls.clear()
    table.warmup()
    assert calls == [16, 64]


def test_warmup_changes_nothing() -> None:
    table = PageTable(8, 100, device="cpu")
    table.append_row([1], 0)
    version = table.cpu_version
    table.warmup()
    assert (table.cpu_version, table.count_dirty_segments(0, 8), int(table.page_table.sum())) == (version, 1, 0)
    assert int(table.commit(8).sum()) == 1
    table.warmup()
    table.check()


def test_the_inference_mode_of_the_constructor_is_no_matter() -> None:
    with torch.inference_mode():
        table = PageTable(8, 100, device="cpu")
        table.append_row([1], 0)
        table.commit(8)
    table.append_row([2], 0)
    table.mark_dirty()
    assert table.commit(8)[0, :3].tolist() == [1, 2, 0]
    table.clear()
    with torch.inference_mode():
        table.append_row([3], 1)
        assert table.gather([1], out=table.commit(8).new_zeros(1, 2)).tolist() == [[3, 0]]


def test_the_default_device_is_that_of_torch() -> None:
    assert PageTable(2, 2).page_table.device == torch.empty(0).device
    with torch.device("meta"):
        assert PageTable(2, 2, device="cpu").commit(2).sum() == 0
    assert PageTable(2, 2, device="cpu").committed is None


def test_no_groups() -> None:
    tables = MultiGroupPageTable(4, 64, [])
    tables.warmup()
    assert (tables.commit(4), tables.gather([0]), tables.committed) == ((), (), None)


# Failures.


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("grouped", [False, True])
def test_after_a_failure_all_is_sent_again(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_grouped_work(6, 300, [16, 5], seed=7, device="cpu") if grouped else make_work((6, 300), seed=7, device="cpu")
    run_work(work, 5)
    for name in ("_send_lines", "_send_rows"):
        work.tables.mark_dirty([0] if name == "_send_lines" else None)
        with monkeypatch.context() as patch:
            patch.setattr(Buffers, "_finish", interrupt)
            with pytest.raises(KeyboardInterrupt):
                work.tables.commit(6)
        for table, model in work.pairs:
            assert table.count_dirty_segments(0, 6) == 6 * -(-model.table.shape[1] // 64)
            model.on_device[:] = table.page_table[:, : model.table.shape[1]].numpy()
        commit_at_random(work)
    with monkeypatch.context() as patch:
        patch.setattr(PageTable, "clear_rows", interrupt)
        with pytest.raises(KeyboardInterrupt):
            work.tables.clear()
    run_work(work, 10)


@pytest.mark.parametrize(("row", "column"), [(3, 1), (5, 100)])
def test_check_finds_what_the_device_does_not_have(row: int, column: int) -> None:
    table = PageTable(8, 100, device="cpu")
    table.append_row([1, 2], 3)
    table.check()
    table.commit(8)
    table.check()
    table.page_table[row, column] = 9
    with pytest.raises(IntegrityError, match=rf"^row {row}, column {column}: the device has another page in a clean window$"):
        table.check()


def test_tables_leave_at_once_with_their_tensors() -> None:
    gc.collect()
    gc.disable()
    try:
        for make in (lambda: PageTable(4, 100, device="cpu"), lambda: MultiGroupPageTable(4, 100, [1, 2], device="cpu")):
            tables: Any = make()
            tables.mark_dirty()
            tables.commit(4)
            references = [weakref.ref(table.page_table) for table in getattr(tables, "page_tables", (tables,))]
            del tables
            assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


def test_tables_are_not_pickled() -> None:
    with pytest.raises(ArgumentTypeError):
        pickle.dumps(PageTable(2, 2, device="cpu"))


def test_commits_of_several_threads(switch_often: None) -> None:
    table = PageTable(16, 300, device="cpu")

    def work(first: int) -> None:
        for i in range(150):
            table.append_row([i + 1], first + i % 4)
            table.commit(16 if i % 3 else first)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 16, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(table.commit(16)[:, :300].numpy(), table.page_table_cpu)
    assert int(table.num_pages_per_row.sum()) == 4 * 150


# Rows in batch order.


@each_device
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.int32)])
def test_gather_puts_rows_into_the_order_of_the_batch(kind: Callable[[Any], Any], device: str) -> None:
    work = make_grouped_work(8, 300, [16, 1], seed=8, device=device)
    for _ in range(60):
        work.do()
    for (table, _), tensor in zip(work.pairs, work.commit(8), strict=True):
        rows = [5, 0, 7, 5]
        expected = tensor.cpu().numpy()[rows]
        np.testing.assert_array_equal(table.gather(kind(rows)).cpu().numpy(), expected)
        on_device = torch.tensor(rows, device=device)
        out = torch.full((9, 3), 77, dtype=torch.int32, device=device)
        assert table.gather(on_device, out=out, num_reqs=6) is out
        np.testing.assert_array_equal(out[:4].cpu().numpy(), expected[:, :3])
        assert not out[4:6].any()
        assert bool((out[6:] == 77).all())
        table.gather(kind(rows[:2]), out=out)
        assert not out[2:].any()
        assert list(table.gather([], num_reqs=2).shape) == [2, tensor.shape[1]]
    both = work.tables.gather(kind([1, 2]), num_reqs=3)
    assert [list(tensor.shape) for tensor in both] == [[3, 64], [3, 320]]
    for tensor, (table, _) in zip(both, work.pairs, strict=True):
        np.testing.assert_array_equal(tensor[:2].cpu().numpy(), table.page_table[1:3].cpu().numpy())
        assert not tensor[2].any()


def test_slots_on_the_device_are_those_of_the_host() -> None:
    table = PageTable(8, 64, device="cpu")
    for row in range(8):
        table.append_row(range(64 * row, 64 * row + 64), row)
    rows, positions = np.arange(200) % 8, np.arange(200) * 5 % 1024
    slots = pagepool.device_slot_mapping(table.commit(8), torch.tensor(rows), torch.tensor(positions), 16)
    np.testing.assert_array_equal(slots.numpy(), slots_in_numpy(table.page_table_cpu, rows, positions, 16))


# Errors.


def int32(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "max_num_reqs: got 0, allowed: 1 to 1073741824": (ArgumentError, lambda _: PageTable(0, 8)),
    "max_model_len: got 0, allowed: 1 to 2**62": (ArgumentError, lambda _: MultiGroupPageTable(4, 0, [1])),
    "device: got 'here', allowed: a device that torch can use, or None": (
        ArgumentError, lambda _: PageTable(4, 8, device="here")),
    "device: got 3.5, allowed: a device that torch can use, or None": (ArgumentError, lambda _: PageTable(4, 8, device=3.5)),  # type: ignore[arg-type]
    "tensors: got ndarray, allowed: a torch.Tensor": (ArgumentTypeError, lambda _: PageTable(4, 8, tensor=np.zeros((4, 8)))),
    "tensors: got torch.int64 [4, 8], allowed: contiguous torch.int32 with 2 dimensions": (
        ArgumentError, lambda _: PageTable(4, 8, tensor=torch.zeros((4, 8), dtype=torch.int64))),
    "tensors: got torch.int32 [8, 4], not contiguous, allowed: contiguous torch.int32 with 2 dimensions": (
        ArgumentError, lambda _: PageTable(8, 4, tensor=int32(4, 8).T)),
    "tensors: got [4, 7], allowed: 4 rows and at least 8 columns": (
        ArgumentError, lambda _: PageTable(4, 8, tensor=int32(4, 7))),
    "tensors: got [5, 8], allowed: 4 rows and at least 8 columns": (
        ArgumentError, lambda _: PageTable(4, 8, tensor=int32(5, 8))),
    "tensors: got one on meta, allowed: on cpu": (
        ArgumentError, lambda _: PageTable(4, 8, device="cpu", tensor=torch.zeros((4, 8), dtype=torch.int32, device="meta"))),
    "tensors: got 1, allowed: one for each group, 2": (
        ArgumentError, lambda _: MultiGroupPageTable(4, 8, [1, 1], tensors=[int32(4, 8)])),
    "tensors: got one twice, allowed: each once": (
        ArgumentError, lambda _: MultiGroupPageTable(4, 8, [1, 1], tensors=[int32(4, 8)] * 2)),
    "num_reqs: got 5, allowed: 0 to 4": (ArgumentError, lambda table: table.commit(5)),
    "row: got 4 (at 1), allowed: 0 to 3": (RowIndexError, lambda table: table.gather([0, 4])),
    "row: got -1 (at 0), allowed: 0 to 3": (RowIndexError, lambda table: table.gather(torch.tensor([-1]))),
    "rows: got float64 with 1 dimensions, allowed: ints with 1 dimension": (
        ArgumentTypeError, lambda table: table.gather([1.0])),
    "rows: got bool with 1 dimensions, allowed: ints with 1 dimension": (ArgumentTypeError, lambda table: table.gather([True])),
    "rows: got int64 with 0 dimensions, allowed: ints with 1 dimension": (ArgumentTypeError, lambda table: table.gather(1)),
    "rows: got list, allowed: a list of ints": (ArgumentTypeError, lambda table: table.gather([[1], [1, 2]])),
    "num_reqs: got 1, allowed: at least 2": (ArgumentError, lambda table: table.gather([0, 1], num_reqs=1)),
    "out: got [1, 8], allowed: at least 2 rows and 1 to 64 columns": (
        ArgumentError, lambda table: table.gather([0, 1], out=int32(1, 8))),
    "out: got [2, 65], allowed: at least 2 rows and 1 to 64 columns": (
        ArgumentError, lambda table: table.gather([0, 1], out=int32(2, 65))),
    "out: got torch.int64 [2, 8], allowed: contiguous torch.int32 with 2 dimensions": (
        ArgumentError, lambda table: table.gather([0, 1], out=torch.zeros((2, 8), dtype=torch.int64))),
    "out: got 1, allowed: one for each group, 2": (
        ArgumentError, lambda _: MultiGroupPageTable(4, 8, [1, 1]).gather([0], out=[int32(1, 8)])),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_arguments_are_refused(message: str) -> None:
    table = PageTable(4, 8, device="cpu")
    table.append_row([1, 2], 1)
    kind, call = REFUSED[message]
    with pytest.raises(kind) as caught:
        call(table)
    assert str(caught.value) == message
    assert (table.count_dirty_segments(0, 4), int(table.page_table.sum())) == (1, 0)


# Running batches.


def test_a_running_batch_fills_either_kind() -> None:
    """The same calls with tables of both kinds: the same steps, and the same pages in the host's and the device's tables."""
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16, "use_mla": False}
    groups = [
        CacheGroupSpec(FullAttentionSpec(4, **shape)),
        CacheGroupSpec(SlidingWindowSpec(8, **shape, sliding_window=16)),
    ]
    sizes = [group.kv_cache_spec.page_size for group in groups]
    ours = MultiGroupPageTable(4, 256, sizes, device="cpu")
    plain = pagepool.MultiGroupPageTable(4, 256, 64, sizes)
    batches = [RunningBatch(CacheManager(300, groups, 256), tables) for tables in (ours, plain)]
    rng = np.random.default_rng(9)
    for step in range(60):
        if step % 15 == 0:
            for row in range(4):
                prompt = rng.integers(0, 100, 5 + 20 * row).tolist()
                for batch in batches:
                    if batch.is_admitted[row]:
                        batch.release([row])
                    batch.admit(row, prompt)
        tokens = rng.integers(0, 100, 4).tolist()
        for batch in batches:
            batch.step([0, 1, 2, 3], tokens)
        for tensor, table in zip(ours.commit(4), plain.page_tables, strict=True):
            np.testing.assert_array_equal(tensor[:, : table.max_num_pages_per_req].numpy(), table.page_table_cpu)
    ours.check()


def test_a_table_of_one_group_and_wrong_sizes() -> None:
    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype="bf16", use_mla=False)
    manager = CacheManager(30, [CacheGroupSpec(spec)], 64)
    batch = RunningBatch(manager, PageTable(2, 16, device="cpu"))
    assert batch.admit(0, [1, 2, 3]) == 0
    with pytest.raises(ArgumentError, match=r"^page_table: got page sizes \[8\], allowed: the groups' \[4\]$"):
        RunningBatch(manager, MultiGroupPageTable(2, 64, [8], device="cpu"))


# The order of copies and kernels, on streams that only write down what they are asked.


class Recorded:
    """Stands in for a CUDA stream, and with a number for an event."""

    def __init__(self, log: list[Any], number: int | None = None) -> None:
        self.log, self.number = log, number

    def wait_event(self, event: Recorded) -> None:
        self.log.append(("wait", event.number))

    def record(self, stream: Recorded) -> None:
        self.log.append(("record", self.number))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.number))


def test_a_buffer_is_reused_after_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits for the one before on the device, and for the one with the same buffer on the host."""
    log: list[Any] = []
    table = PageTable(64, 640, device="cpu")
    buffers, memory = table._buffers, torch.zeros(66 * 64, dtype=torch.int32)
    buffers._buffers = [Buffer(66 * 64, memory) for _ in range(4)]
    for number, buffer in enumerate(buffers._buffers):
        monkeypatch.setattr(buffer, "event", Recorded(log, number))
    monkeypatch.setattr(buffers, "_is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Recorded(log))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    for step in range(6):
        table.append_row([step + 1], step)
        log.clear()
        np.testing.assert_array_equal(table.commit(64).numpy(), table.page_table_cpu)
        before = [("wait", (step - 1) % 4)] if step else []
        assert log == [*before, ("synchronize", step % 4), ("record", step % 4)]
        assert table.committed.number == step % 4
    log.clear()
    table.mark_dirty()
    table.commit(64)
    assert log == [("wait", 1), ("record", 2)]
    log.clear()
    assert table.gather([2])[0, 0] == 3
    assert log == [("wait", 2)]
    table.clear()
    assert log[1:] == [("wait", 2), ("record", 3)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    table.append_row([1], 0)
    for call in (lambda: table.commit(64), table.clear, table.warmup):
        with pytest.raises(ArgumentError, match="got a stream that captures a graph, allowed: before or after the capture"):
            call()
    with pytest.raises(ArgumentError, match="rows: got rows of the host while a graph is captured"):
        table.gather([1])
    assert table.count_dirty_segments(0, 64) == 1


# On a GPU.


@on_gpu
def test_cuda_graphs_read_the_table_at_its_address() -> None:
    table = PageTable(64, 640, device="cuda")
    table.warmup()
    rows, out = torch.arange(8, device="cuda"), torch.zeros((16, 640), dtype=torch.int32, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.gather(rows, out=out)
        total.copy_(table.page_table.sum())
    for step in range(1, 30):
        table.append_row([step] * (1 if step % 5 else 600), step)
        table.commit(64)
        rows.copy_(torch.randperm(64)[:8])
        graph.replay()
        expected = torch.from_numpy(table.page_table_cpu)
        assert int(total) == int(expected.sum())
        assert torch.equal(out[:8].cpu(), expected[rows.cpu()])
        assert not out[8:].any()
    table.append_row([1], 0)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        total.add_(1)  # torch warns of empty graphs
        with pytest.raises(ArgumentError, match="captures a graph"):
            table.commit(64)


@on_gpu
def test_cuda_steps_in_flight_read_the_table_before_the_next_commits() -> None:
    """The GPU is busy while the host changes the table, commits, and changes it again: more commits than there are buffers."""
    table = PageTable(64, 640, device="cuda")
    table.warmup()
    copies, expected = [], []
    for step in range(1, 13):
        torch.cuda._sleep(20_000_000)
        table.append_row([step] * (2 if step % 4 else 600), step)
        expected.append(table.page_table_cpu.copy())
        table.commit(64)
        copies.append(table.page_table.clone())
        table.page_table_cpu[:, 630:] = -1
        table.page_table_cpu[:, 630:] = 0
    for copied, host in zip(copies, expected, strict=True):
        np.testing.assert_array_equal(copied.cpu().numpy(), host)


@on_gpu
def test_cuda_commits_on_several_streams() -> None:
    """Each commit follows the one before, and a step on another stream waits for `committed`."""
    table = PageTable(64, 640, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(60):
        with torch.cuda.stream(streams[step % 3]):
            torch.cuda._sleep(2_000_000 * (step % 2))
            table.add_row([step + 1] * 10, 5)
            table.commit(64)
    reader = streams[0]
    reader.wait_event(table.committed)
    with torch.cuda.stream(reader):
        copied = table.page_table.clone()
    reader.synchronize()
    np.testing.assert_array_equal(copied.cpu().numpy(), table.page_table_cpu)


@each_device
def test_sinks_reach_the_device(device: str) -> None:
    """With the first commit and after `clear`."""
    table = PageTable(4, 100, device=device, sink_page_ids=[7, 8])
    table.add_row([3, 4], 1)
    for _ in range(2):
        committed = table.commit(4).cpu().numpy()[:, :102]
        assert committed.tolist() == table.page_table_cpu.tolist()
        assert committed[:, :2].tolist() == [[7, 8]] * 4
        table.check()
        table.clear()

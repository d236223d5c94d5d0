"""The torch engine of examples/: its answers are those of its model without a cache, which its option `--check` compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from contents_store import STORE_MODULES

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
example = pytest.importorskip("torch_engine", reason="examples/ is not here")

from pagepool.torch_pages import GroupPages  # noqa: E402

torch.set_num_threads(1)  # its tensors are small

ROOMY, SHORT = ("--num-pages", "400"), ("--num-pages", "32")
HOST = ("--host-pages", "200")


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], int, int]:
    """Run the command. Return the answers, the number of hit tokens, and of preemptions."""
    example.main(["--check", *options])
    *answers, queries, preempted, _ = capsys.readouterr().out.splitlines()
    hits, [num_preempted] = re.findall(r"hit_tokens=(\d+)", queries + preempted), re.findall(r"num_requests=(\d+)", preempted)
    return answers, sum(map(int, hits)), int(num_preempted)


class CountingBatch(example.RunningBatch):
    """A batch that counts the plans with tokens in flight, and the lost tokens: those that nobody waits for, but for the ones
    behind a stop token that the step before has sampled.
    """

    num_ahead = num_lost = 0
    ended_rows: Any = ()

    def plan(self, rows: Any, num_tokens: Any = 1, num_drafts: Any = 0, step: Any = None) -> Any:
        CountingBatch.num_ahead += int((self.num_tokens[rows] == self.num_computed_tokens[rows]).any())
        return super().plan(rows, num_tokens, num_drafts, step)

    def settle(self, step: Any, token_ids: Any = None, counts: Any = None, **options: Any) -> Any:
        places = super().settle(step, token_ids, counts, **options)
        CountingBatch.num_lost += len({*step.rows[places < 0]} - {*self.ended_rows})
        self.ended_rows = step.ended_rows
        return places


# `make torch-gpu` runs the tests with cuda in their names.
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"{example.DEVICE}-{seed}")
def test_answers_are_those_of_the_model_without_a_cache(
    seed: int, steps_ahead: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in chunks, hits, ends, and in a small pool preemptions, which lose no token that a step computes."""
    monkeypatch.setattr(example, "RunningBatch", CountingBatch)
    CountingBatch.num_ahead = CountingBatch.num_lost = 0
    options = ["--seed", str(seed), "--steps-ahead", str(steps_ahead)]
    roomy, num_hits, num_preempted = run(capsys, *options, *ROOMY)
    assert (num_hits > 200, num_preempted) == (True, 0)
    short, num_hits, num_preempted = run(capsys, *options, *SHORT)
    assert (short, num_hits > 200, num_preempted > 5) == (roomy, True, True)
    assert len(set(roomy)) > len(roomy) // 2  # a model that repeats itself would hide what it reads
    assert CountingBatch.num_ahead > 50 if steps_ahead else CountingBatch.num_ahead == 0
    assert CountingBatch.num_lost == 0


@pytest.mark.parametrize("steps_ahead", ["0", "1"])
def test_steps_of_other_sizes(steps_ahead: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-requests", "5", "--samples", "2", "--steps-ahead", steps_ahead]
    sizes = [("1", "1"), ("3", "5"), ("9", "2"), ("24", "100")]
    answers = [run(capsys, *options, "--num-reqs", n, "--num-tokens", tokens)[0] for n, tokens in sizes]
    assert all(found == answers[0] for found in answers)


def test_rows_of_the_table_in_another_order_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = example.PageTable.gather

    def gather_backwards(table: Any, rows: Any, **options: Any) -> Any:
        return gather(table, rows[::-1].copy(), **options)

    monkeypatch.setattr(example.PageTable, "gather", gather_backwards)
    with pytest.raises(SystemExit) as exit_info:
        run(capsys)
    assert exit_info.value.code == 1
    assert "differs" in capsys.readouterr().err


# A shared prefix.

SAMPLES = ("--num-requests", "6", "--samples", "6")
SIZES = (1, 2, 4, 8)


def count_pages(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], int, int]:
    """Run the command. Return the answers, the pages read in decode steps, and those that the rows read one by one."""
    example.main(["--check", *options])
    *answers, _, _, pages = capsys.readouterr().out.splitlines()
    found = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", pages.partition("(")[0])]
    return answers, found[0], found[-1]


class WarmEngine(example.Engine):
    """An engine that computes all shapes of graphs before the first request, and notes those of its decode steps."""

    def __init__(self, args: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        super().__init__(args)
        WarmEngine.last, widths = self, [(), *product(self.sharing.widths, repeat=2)]
        self.allowed = [(size, *each) for size in SIZES for each in widths]
        for shape in self.allowed:
            self.compute(*shape)
            assert self.cache.isfinite().all()
        self.shapes.clear()

    def compute(self, *shape: int) -> None:
        self.shapes.append(shape)
        super().compute(*shape)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The numbers of rows in the groups of each step that shares pages."""
    find_widths, found = example.Sharing.find_widths, []

    def note_groups(sharing: Any) -> Any:
        widths = find_widths(sharing)
        if widths is not None:
            found.append(tuple((sharing.inputs.prefix_rows >= 0).sum(axis=1).tolist()))
        return widths

    monkeypatch.setattr(example.Sharing, "find_widths", note_groups)
    return found


@pytest.mark.parametrize("steps_ahead", ["0", "1"], ids=["at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"{example.DEVICE}-{seed}")
def test_samples_read_their_prompt_once(seed: int, steps_ahead: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps are the same with sharing and without, so the pages can be compared."""
    options = ["--seed", str(seed), "--steps-ahead", steps_ahead, *SAMPLES, *ROOMY]
    answers, num_read, num_row_pages = count_pages(capsys, *options)
    assert count_pages(capsys, *options, "--no-sharing") == (answers, num_row_pages, num_row_pages)
    assert num_row_pages > 1.5 * num_read


@pytest.mark.parametrize("steps_ahead", ["0", "1"], ids=["at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"{example.DEVICE}-{seed}")
def test_rows_that_share_come_and_go(
    seed: int, steps_ahead: str, groups: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a small pool they are preempted too, and prompts in chunks lie between decode steps. A step has several groups."""
    options = ["--seed", str(seed), "--steps-ahead", steps_ahead, "--samples", "3", "--num-tokens", "12"]
    answers, _, _ = run(capsys, *options, *ROOMY, "--no-sharing")
    assert not groups
    shared, _, num_preempted = run(capsys, *options, *SHORT)
    assert (shared, num_preempted > 5) == (answers, True)
    assert len(set(groups)) > 5
    assert sum(sum(size > 0 for size in sizes) > 1 for sizes in groups) > 5


def test_a_prompt_in_chunks_is_shared_once_it_is_computed(
    groups: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with a chunk share nothing: their tokens are more than their rows."""
    monkeypatch.setattr(example, "Engine", WarmEngine)
    options = ["--num-requests", "3", "--samples", "6", "--num-tokens", "8", "--steps-ahead", "0", *ROOMY]
    answers, num_read, num_row_pages = count_pages(capsys, *options)
    chunks = [size for size, *widths in WarmEngine.last.shapes if not widths]
    assert (len(chunks) > 10, len(groups) > 10, num_row_pages > 1.2 * num_read) == (True, True, True)
    assert answers == count_pages(capsys, *options, "--no-sharing")[0]


@pytest.mark.parametrize("num_reqs", ["5", "8"])
def test_shapes_are_those_of_graphs(num_reqs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured before the inputs are filled. NaN in the null page would reach all that mask it."""
    expected = run(capsys, *SAMPLES)[0]
    monkeypatch.setattr(example, "Engine", WarmEngine)
    assert run(capsys, *SAMPLES, "--num-reqs", num_reqs)[0] == expected
    engine = WarmEngine.last
    shared = [shape for shape in engine.shapes if len(shape) > 1]
    assert len(shared) > 20
    assert len(set(shared)) > 3
    assert {*shared} <= {*engine.allowed}


def test_pages_that_are_not_read_are_missed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    list_reads = example.list_shared_reads
    monkeypatch.setattr(example, "list_shared_reads", lambda page_ids, tokens: list_reads(page_ids[:, 1:], tokens))
    with pytest.raises(SystemExit) as exit_info:
        run(capsys, *SAMPLES)
    assert exit_info.value.code == 1


# Pages behind the pool.


def fail_at_random(call: Callable[..., Any], random: Random) -> Callable[..., Any]:
    """Let half of the calls raise."""

    def fail_or_call(*args: Any) -> Any:
        if random.random() < 0.5:
            raise MemoryError("at random")
        return call(*args)

    return fail_or_call


@pytest.mark.parametrize("name", [None, "_gather", "_scatter", "_write_rows"])
@pytest.mark.parametrize("steps_ahead", ["0", "1"])
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"{example.DEVICE}-{seed}")
def test_answers_are_the_same_with_pages_on_the_host(
    seed: int, steps_ahead: str, name: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if transfers fail: gathers of saves, scatters of loads, or copies into rows."""
    options = ["--seed", str(seed), "--steps-ahead", steps_ahead, *SHORT]
    answers, num_hits, _ = run(capsys, *options)
    if name is not None:
        monkeypatch.setattr(GroupPages, name, fail_at_random(getattr(GroupPages, name), Random(seed)))
    failed, fail = [], example.CacheManager.fail

    def count_failed(manager: Any, number: int, saves: Any, loads: Any) -> Any:
        failed.extend([*saves, *loads])
        return fail(manager, number, saves=saves, loads=loads)

    monkeypatch.setattr(example.CacheManager, "fail", count_failed)
    with_host, num_host_hits, _ = run(capsys, *options, *HOST)
    assert with_host == answers
    assert (len(failed) > 0) == (name is not None)
    assert num_host_hits > num_hits or failed


def test_another_engine_hits_the_pages_of_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of another seed have pages of their own."""
    pytest.importorskip("xxhash")
    for module in STORE_MODULES:  # requests wait until the store has answered, on slow machines too
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    answers, num_hits, _ = run(capsys, *ROOMY)
    store = ("--store", str(tmp_path))
    assert run(capsys, *ROOMY, *store)[:2] == (answers, num_hits)
    again, num_stored_hits, _ = run(capsys, *ROOMY, *store)
    assert (again, num_stored_hits > num_hits + 100) == (answers, True)
    assert run(capsys, *SHORT, *store, "--steps-ahead", "0")[0] == answers
    others, num_hits, _ = run(capsys, *ROOMY, "--seed", "1")
    assert run(capsys, *ROOMY, *store, "--seed", "1")[:2] == (others, num_hits)


def test_it_is_short() -> None:
    """An example is read."""
    assert len(Path(example.__file__).read_text().splitlines()) <= 270

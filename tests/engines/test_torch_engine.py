"""The torch engine of examples/: its answers are those of its model without a cache, which its option `--check` compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
example = pytest.importorskip("torch_engine", reason="examples/ is not here")

torch.set_num_threads(1)  # its tensors are small

ROOMY, SHORT = ("--num-pages", "400"), ("--num-pages", "32")


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], int, int]:
    """Run the command. Return the answers, the number of hit tokens, and of preemptions."""
    example.main(["--check", *options])
    *answers, queries, preempted = capsys.readouterr().out.splitlines()
    [num_hits], [num_preempted] = re.findall(r"hit_tokens=(\d+)", queries), re.findall(r"num_requests=(\d+)", preempted)
    return answers, int(num_hits), int(num_preempted)


class CountingBatch(example.RunningBatch):
    """A batch that counts the plans with tokens in flight, and the tokens that nobody waits for."""

    num_ahead = num_dropped = 0

    def plan(self, rows: Any, num_tokens: Any = 1, num_drafts: Any = 0, step: Any = None) -> Any:
        CountingBatch.num_ahead += int((self.num_tokens[rows] == self.num_computed_tokens[rows]).any())
        return super().plan(rows, num_tokens, num_drafts, step)

    def settle(self, step: Any, token_ids: Any = None, counts: Any = None, **options: Any) -> Any:
        places = super().settle(step, token_ids, counts, **options)
        CountingBatch.num_dropped += int((places < 0).sum())
        return places


# `make torch-gpu` runs the tests with cuda in their names.
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"{example.DEVICE}-{seed}")
def test_answers_are_those_of_the_model_without_a_cache(
    seed: int, steps_ahead: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in chunks, hits, ends, and in a small pool preemptions, which drop no token that a step computes."""
    monkeypatch.setattr(example, "RunningBatch", CountingBatch)
    CountingBatch.num_ahead = CountingBatch.num_dropped = 0
    options = ["--seed", str(seed), "--steps-ahead", str(steps_ahead)]
    roomy, num_hits, num_preempted = run(capsys, *options, *ROOMY)
    assert (num_hits > 200, num_preempted) == (True, 0)
    num_dropped = CountingBatch.num_dropped  # behind stop tokens
    short, num_hits, num_preempted = run(capsys, *options, *SHORT)
    assert (short, num_hits > 200, num_preempted > 5) == (roomy, True, True)
    assert len(set(roomy)) > len(roomy) // 2  # a model that repeats itself would hide what it reads
    assert CountingBatch.num_ahead > 50 if steps_ahead else num_dropped == CountingBatch.num_ahead == 0
    assert CountingBatch.num_dropped == 2 * num_dropped


@pytest.mark.parametrize("steps_ahead", ["0", "1"])
def test_steps_of_other_sizes(steps_ahead: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-requests", "9", "--steps-ahead", steps_ahead]
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


def test_it_is_short() -> None:
    """An example is read."""
    assert len(Path(example.__file__).read_text().splitlines()) <= 200

"""Pagepool under vLLM beside vLLM as it is: ``python -m bench.races.vllm`` prints a table. ``make bench-vllm`` runs it.

The rivals are vLLM alone, vLLM with a few lines of Python that return early (`vllm_rivals`), vLLM with pagepool, and the
ceiling, whose KV manager and hashing do nothing. Since pagepool replaces classes of vLLM, each rival has a process of its own
(`vllm_work`). They take turns of a few rounds, so that other load affects all alike. Times are CPU time of the thread:
medians over turns of medians over rounds. Ratios are medians over turns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click

from bench.races import results
from bench.tables import as_table

ROOT = Path(__file__).parents[2]
RIVALS = ("vllm", "early", "pagepool", "null")
OURS, CEILING = "pagepool", "null"
PAIRS = (("vllm", OURS), ("early", OURS), ("vllm", "early"), ("vllm", CEILING))
COLUMNS = ("CPU time, ms", *RIVALS, *(" / ".join(pair) for pair in PAIRS))
SCHEDULED = ("steps", "long")
"""How the works begin that have a scheduler, and with it a ceiling."""

ROUNDS_PER_TURN = 4
MILLISECONDS = 1e3
MISSED = " !"


@dataclass(frozen=True)
class Line:
    """A line of the table: the sum of some parts of a work, and how many times faster than vLLM it has to be."""

    name: str
    work: str
    parts: tuple[str, ...]
    target: float | None = None
    target_to_early: float | None = None


SLOTS = ("allocate", "append", "cache")
PROMPT = ("admit", "free")
HASH = ("hash",)
STEP = ("schedule", "update")

LINES = (
    Line("decode, 256 running: slots, tokens and their hashes", "decode 256", SLOTS, 4.5),
    Line("decode, 256 running: allocate_slots alone", "decode 256", ("allocate",)),
    Line("decode, 1,024 running: slots, tokens and their hashes", "decode 1024", SLOTS, 4.5),
    Line("decode, 1,024 running: allocate_slots alone", "decode 1024", ("allocate",)),
    Line("decode, 1,024 running, async: slots, tokens, cache_blocks", "decode 1024 async", SLOTS),
    Line("decode, 1,024 running, async: allocate_slots and cache_blocks", "decode 1024 async", ("allocate", "cache")),
    Line("cold prompt of 8k tokens, hashing included", "cold", PROMPT, 4.5),
    Line("cached prompt of 8k tokens", "cached", PROMPT, 4.5),
    Line("prompt of 8k tokens that evicts", "evicting", PROMPT, 4.5),
    Line("hashes of 8k tokens, sha256", "hashes, sha256", HASH, 3.5),
    Line("hashes of 8k tokens, sha256, a token of lookahead", "hashes, sha256, lookahead", HASH, 3.5),
    Line("hashes of 8k tokens, sha256_cbor", "hashes, sha256_cbor", HASH, 10),
    Line("hashes of 8k tokens, sha256_cbor, a token of lookahead", "hashes, sha256_cbor, lookahead", HASH, 10),
    Line("cached prompt of 128k tokens, Request() to schedule()", "long", ("add", "schedule"), 4),
    Line("the same, schedule() alone", "long", ("schedule",)),
    Line("schedule(), 1,024 running", "steps 1024", ("schedule",), 2),
    Line("schedule() and update, 1,024 running", "steps 1024", STEP, None, 1.15),
    Line("schedule(), 1,024 running, async", "steps 1024 async", ("schedule",)),
    Line("schedule() and update, 1,024 running, async", "steps 1024 async", STEP, None, 1.15),
    Line("schedule() and update, 256 running", "steps 256", STEP),
    Line("schedule() and update, 256 running, async", "steps 256 async, 1 group", STEP, 1.9),
    Line("the same, full and sliding groups", "steps 256 async, 2 groups", STEP, 2.3),
    Line("the same, one full and three sliding groups", "steps 256 async, 4 groups", STEP, 3.2),
)

Seconds = Mapping[str, Sequence[float]]
"""The median of the rounds of each turn, by rival."""


class Worker:
    """A rival in a process of its own."""

    def __init__(self, rival: str) -> None:
        self.rival = rival
        command = [sys.executable, "-m", "bench.races.vllm_work", rival]
        env = {"VLLM_TARGET_DEVICE": "cpu", **os.environ}
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, question: object) -> Any:
        with suppress(BrokenPipeError):
            print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise click.ClickException(f"{self.rival}: ended at {question!r}, see above")
        return json.loads(answer)

    def end(self) -> None:
        with self._process:
            self._process.kill()


def race(workers: Mapping[str, Worker], work: str, num_turns: int) -> dict[str, list[Any]]:
    """Let the workers do a work in turn. Returns the seconds by part of each round, by rival and turn."""
    for worker in workers.values():
        worker.ask(work)
    check_same_blocks(workers, work)
    turns: dict[str, list[Any]] = {rival: [] for rival in workers}
    for _ in range(num_turns):
        for rival, worker in workers.items():
            turns[rival].append(worker.ask(ROUNDS_PER_TURN))
    check_same_blocks(workers, work)
    return turns


def check_same_blocks(workers: Mapping[str, Worker], work: str) -> None:
    """Assert that all but the ceiling, which has none, have the same block ids."""
    first, *others = [worker.ask("block_ids") for rival, worker in workers.items() if rival != CEILING]
    assert all(block_ids == first for block_ids in others), f"{work}: not the same blocks"


def add_up(line: Line, turns: Mapping[str, list[Any]]) -> Seconds:
    """Add the parts of a line in each round."""

    def add(seconds: Mapping[str, float]) -> float:
        return sum(seconds.get(part, 0) for part in line.parts)

    return {rival: [median(map(add, rounds)) for rounds in held] for rival, held in turns.items()}


def find_ratio(seconds: Seconds, slow: str, fast: str) -> float | None:
    """Return how many times faster one rival is than another."""
    if slow not in seconds or fast not in seconds:
        return None
    return median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def show(line: Line, seconds: Seconds) -> list[str]:
    """Return the cells of a line; a target that is missed has an exclamation mark."""
    times = [f"{median(seconds[rival]) * MILLISECONDS:.2f}" if rival in seconds else "-" for rival in RIVALS]
    ratios = [find_ratio(seconds, *pair) for pair in PAIRS]
    targets = (line.target, line.target_to_early, None, None)
    return [line.name, *times, *map(show_ratio, ratios, targets)]


def show_ratio(ratio: float | None, target: float | None) -> str:
    if ratio is None or target is None:
        return "-" if ratio is None else f"{ratio:.2f}x"
    return f"{ratio:.2f}x of {target:g}x{MISSED if ratio < target else ''}"


def as_result(name: str, unit: str, measured: Seconds, scale: float = MILLISECONDS) -> results.Line:
    """Return a line of the file of results. Quartiles are of turns."""
    times = {rival: [scale * value for value in values] for rival, values in measured.items()}
    medians = {rival: results.shorten(median(values)) for rival, values in times.items()}
    quartiles = {rival: find_quartiles(values) for rival, values in times.items() if len(values) > 1}
    ratios = {rival: find_ratio(measured, rival, OURS) for rival in times if rival != OURS}
    shortened = {rival: results.shorten(ratio) for rival, ratio in ratios.items() if ratio is not None}
    return results.Line("vllm", name, "", unit, OURS, medians, quartiles, shortened)


def find_quartiles(values: Sequence[float]) -> list[float]:
    return [results.shorten(value) for value in quantiles(values, n=4, method="inclusive")[::2]]


def measure_memory(workers: Mapping[str, Worker]) -> tuple[list[str], results.Line]:
    """Return the line of memory."""
    num_bytes = {rival: [worker.ask("memory")] for rival, worker in workers.items() if rival in ("vllm", OURS)}
    ratio = find_ratio(num_bytes, "vllm", OURS)
    cells = [f"{num_bytes[rival][0]:.0f}" if rival in num_bytes else "-" for rival in RIVALS]
    name = "a new pool of 1M blocks, bytes a block"
    return [name, *cells, show_ratio(ratio, 1), "-", "-", "-"], as_result(name, "bytes", num_bytes, 1)


def measure(workers: Mapping[str, Worker], word: str, num_turns: int) -> Iterator[tuple[list[str], results.Line]]:
    """Yield the lines of all works whose names contain a word, as cells and as a result."""
    if word in "memory":
        yield measure_memory(workers)
    for work in dict.fromkeys(line.work for line in LINES if word in line.work):
        click.echo(work, err=True)
        has_ceiling = work.startswith(SCHEDULED)
        turns = race({rival: worker for rival, worker in workers.items() if rival != CEILING or has_ceiling}, work, num_turns)
        for line in LINES:
            if line.work == work:
                seconds = add_up(line, turns)
                yield show(line, seconds), as_result(line.name, "ms", seconds)


@click.command()
@click.option(
    "--turns", "num_turns", default=15, show_default=True, help=f"Turns of each rival, of {ROUNDS_PER_TURN} rounds each."
)
@click.option("--rival", "rivals", multiple=True, type=click.Choice(RIVALS), default=RIVALS, help="What to compare with vllm.")
@click.option("-k", "word", default="", help="Only works whose names contain this.")
@click.option("--check", is_flag=True, help="Exit with 1 if a target is missed.")
@click.option(
    "--results", "path", type=click.Path(dir_okay=False, path_type=Path), help="Put the results of all rivals into this file."
)
def main(num_turns: int, rivals: tuple[str, ...], word: str, check: bool, path: Path | None) -> None:
    """Run all works, each by all rivals in turn, and print a table."""
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException("vllm is not installed here: `make test-vllm` installs it in an environment of its own")
    workers = {rival: Worker(rival) for rival in RIVALS if rival in ("vllm", *rivals)}
    try:
        measured = list(measure(workers, word, num_turns))
    finally:
        for worker in workers.values():
            worker.end()
    lines = [cells for cells, _ in measured]
    if path is not None and OURS in workers:
        results.merge(path, results.describe_machine(), [result for _, result in measured], [])
    click.echo(as_table(COLUMNS, lines))
    click.echo(f"\nvLLM {version('vllm')}, CPython {platform.python_version()}, {platform.system()} {platform.machine()}.")
    if check and any(cell.endswith(MISSED) for cells in lines for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Pagepool under vLLM beside vLLM as it is: ``python -m bench.vllm`` prints a table. ``make bench-vllm`` sets up what it needs.

The rivals are vLLM alone, vLLM whose `allocate_slots` and `cache_blocks` return early (a few lines of Python, `bench.vllm_rivals`),
vLLM with pagepool, and the ceiling: vLLM whose KV manager and hashing do nothing. Since pagepool replaces classes of vLLM, each
has a process of its own; the parent asks one after the other for a few rounds, so that other load affects all alike. Times are
CPU time of the thread, medians over all rounds; ratios are medians of the ratios of turns.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.race import as_table

ROOT = Path(__file__).parents[1]
RIVALS = ("vllm", "early", "pagepool", "null")
OURS, CEILING = "pagepool", "null"
ROUNDS_PER_TURN = 4
MILLISECONDS = 1e3


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

Turns = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
"""Seconds by part, for each round of each turn of each rival."""


class Worker:
    """A rival in a process of its own."""

    def __init__(self, rival: str) -> None:
        command = [sys.executable, "-m", "bench.vllm_work", rival]
        env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, question: object) -> Any:
        print(question, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()


def race(workers: Mapping[str, Worker], work: str, num_turns: int) -> dict[str, list[list[dict[str, float]]]]:
    """Let the workers do a work in turn, and check that all but the ceiling have the same blocks before and after."""
    for worker in workers.values():
        worker.ask(work)
    check_same_blocks(workers, work)
    turns: dict[str, list[list[dict[str, float]]]] = {rival: [] for rival in workers}
    for _ in range(num_turns):
        for rival, worker in workers.items():
            turns[rival].append(worker.ask(ROUNDS_PER_TURN))
    check_same_blocks(workers, work)
    return turns


def check_same_blocks(workers: Mapping[str, Worker], work: str) -> None:
    first, *others = [worker.ask("block_ids") for rival, worker in workers.items() if rival != CEILING]
    assert all(block_ids == first for block_ids in others), f"{work}: not the same blocks"


def add_up(line: Line, turns: Turns) -> dict[str, list[float]]:
    """Return the median seconds of the line's parts in each turn."""

    def total(seconds: Mapping[str, float]) -> float:
        return sum(seconds.get(part, 0) for part in line.parts)

    return {rival: [median(map(total, rounds)) for rounds in held] for rival, held in turns.items()}


def find_ratio(seconds: Mapping[str, list[float]], slow: str, fast: str) -> float | None:
    """Return how many times faster one rival is than another: the median over turns."""
    if slow not in seconds or fast not in seconds:
        return None
    return median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def show(line: Line, seconds: Mapping[str, list[float]]) -> tuple[list[str], bool]:
    """Return the cells of a line, and whether it reaches its targets."""
    has_manager = CEILING in seconds and line.work.startswith(("steps", "long"))
    shown = [rival for rival in RIVALS if rival != CEILING or has_manager]
    times = [f"{median(seconds[rival]) * MILLISECONDS:.2f}" if rival in shown and rival in seconds else "-" for rival in RIVALS]
    ours = find_ratio(seconds, "vllm", OURS)
    ours_to_early = find_ratio(seconds, "early", OURS)
    ceiling = find_ratio(seconds, "vllm", CEILING) if has_manager else None
    ratios = [ours, line.target, ours_to_early, line.target_to_early, find_ratio(seconds, "vllm", "early"), ceiling]
    pairs = ((ours, line.target), (ours_to_early, line.target_to_early))
    return [line.name, *times, *map(show_ratio, ratios)], all(a is None or b is None or a >= b for a, b in pairs)


def show_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def measure_memory(workers: Mapping[str, Worker]) -> tuple[list[str], bool]:
    """Return the line of memory, in bytes a block of a new pool, and whether ours is not above vLLM's."""
    held = {rival: worker.ask("memory") for rival, worker in workers.items() if rival in ("vllm", OURS)}
    ratio = held["vllm"] / held[OURS] if OURS in held else None
    cells = [f"{held[rival]:.0f}" if rival in held else "-" for rival in RIVALS]
    return ["bytes a block of a new pool of 1M blocks", *cells, show_ratio(ratio), "1.00x", *"----"], ratio is None or ratio >= 1


COLUMNS = ("CPU time of the thread, ms", *RIVALS, "vllm / pagepool", "target", "early / pagepool", "target", "vllm / early", "vllm / null")


@click.command()
@click.option("--turns", "num_turns", default=15, show_default=True, help="Turns of each rival, of four rounds each.")
@click.option("--rival", "rivals", multiple=True, type=click.Choice(RIVALS), default=RIVALS, help="Rivals to compare; vllm always.")
@click.option("-k", "word", default="", help="Only works whose name contains this.")
@click.option("--check", is_flag=True, help="Exit with 1 if a target is missed.")
def main(num_turns: int, rivals: tuple[str, ...], word: str, check: bool) -> None:
    """Run all works, each by all rivals in turn, and print a table."""
    with ExitStack() as stack:
        workers = {rival: stack.enter_context(Worker(rival)) for rival in RIVALS if rival in ("vllm", *rivals)}
        lines = [measure_memory(workers)] if word in "memory" else []
        for work in dict.fromkeys(line.work for line in LINES if word in line.work):
            takers = {rival: worker for rival, worker in workers.items() if rival != CEILING or work.startswith(("steps", "long"))}
            turns = race(takers, work, num_turns)
            lines += [show(line, add_up(line, turns)) for line in LINES if line.work == work]
            click.echo(f"{work}: done", err=True)
    click.echo(as_table(COLUMNS, [cells for cells, _ in lines]))
    click.echo(f"\nvLLM {version('vllm')}, CPython {platform.python_version()}, {platform.system()} {platform.machine()}.")
    if check and not all(is_reached for _, is_reached in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Write docs/benchmarks.md and docs/speed.svg from bench/results.json and bench/hits.json: ``python -m bench.report``.

Text around the tables is in bench/benchmarks.md.in, where ``{{NAME}}`` stands for all tables of a benchmark, or for one of the
parts in `PARTS`. The tables leave out the lines in `LEFT_OUT`, which the files of results keep. Needs no package, not even
pagepool. The same results make the same bytes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from bench.races.results import ENGINES, MACHINE, Line, Remark, Results, environment_of, read
from bench.speed import Group, draw
from bench.studies import hits
from bench.tables import as_table, show_ratio, show_time

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "bench" / "benchmarks.md.in"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "speed.svg"
LINE_LENGTH = 128

NAMES = {
    "easydel": "EasyDeL",
    "vllm": "vLLM",
    "oracle": "plain Python",
    "manager": "`CacheManager`",
    "batched": "`RunningBatch`",
    "early": "early return",
    "null": "no manager",
}
"""How the page calls the contenders. Others have their own names."""

HEADLINES = {
    "decode: 1024 rows, context 2048": "decode: 1,024 rows, context 2,048, per row and step",
    "cold prompt of 8192 tokens in an array": "cold prompt of 8,192 tokens, per page",
    "cached prompt of 8192 tokens in an array": "cached prompt of 8,192 tokens, per page",
    "evicting prompt of 8192 tokens in an array": "cold prompt of 8,192 tokens that evicts, per page",
}
"""The works of the picture, in the benchmark of running batches, and what the picture calls them."""
CONTENDERS = (*ENGINES, "manager", "batched")

LEFT_OUT: Mapping[str, str] = {
    "drop_in": r"takes a page|nothing due|^evicting",
    "running_batch": r"in a list|(256|4096) rows, context 2048|take and give back|pool of 100?,000\b|pool of 1,000,000$"
    r"|^(cached|cold|evicting).*, pool",
    "core": r"pool of (1|10|100),000$|page objects",
    "page_table": r"append 1 page|dispatch only|, swap,|^(move|swap|clear|slots|replace) |each of 256|, nothing,|prefill",
    "host_pages": r"of 8 pages|of 64 KiB|loads of|^A step of",
    "hashes": r"^(cached|evicting)",
    "digests": r"^digests|256 rows",
    "refusals": r"(1,024|8,192) tokens",
    "host_tier": r"pool of 100,000|^cached",
    "stores": r"files of (64|1024) KiB|^`take_moves`|^A prompt of",
    "torch_table": r"4 groups|of 256 x 2048, a page",
    "page_copies": r"of (1|64) of",
    "pools": r"^(cached|look-up)",
    "ahead": r"256 rows",
    "forks": r"^A step of|in (1|4) rows",
    "windows": r"2 windows alone|within them",
    "events": r"request by request|^cached|^evicting",
    "eviction": r"pool of 100?,000\b|^cold",
    "router": r", 16 workers|^remove",
    "late": r"pages of 256|nothing due|^pages of 16$",
    "keeping": r"pool of 100,000|adaptive|^(expect|close)",
    "vllm": r"allocate_slots|async: slots|schedule\(\)(, async)?, 1,024|^schedule\(\), |schedule\(\) alone"
    r"|256 running|full and sliding|one full and three|^cached prompt of 8k|that evicts|^a new pool|update, 1,024 running$",
    "windows_hits": r" (60|200|800),000 pages|conversation, raw|synthetic.*(Gemma, 100|gpt-oss|chunks)"
    r"|^generated (agents|conversations|drift|loop|recency|retrieval|chats)|synthetic|^generated.*gpt-oss"
    r"|^generated.*10,000 pages|Gemma, 100,000",
    "states_hits": r" 80 GiB|4 system prompts|38% states|, 80 states|, 400 states|Nemotron.*200|Qwen3.5.*400",
    "tenants_hits": r"90,000 pages|no flood, 60,000|(flood|twice), 60,000 pages: tenant [23]$|users.*tenant 2",
    "keeping_hits": r"1/3|0.2 a second|sessions that tell$|the others$|3/4",
    "loading_times": r"20 GB/s|generated.*50,000|50,000 tokens/s, load 90%|5,000 tokens/s, load 30%|conversation.*50,000"
    r"|conversation, 0.2",
}
"""Patterns of works and remarks, by table: variations of a shown line, in other sizes or workloads."""
WITHOUT_ORACLE = {"drop_in", "running_batch", "refusals", "core", "forks"}
"""Benchmarks whose oracle is the twin of the tests, written for correctness. Their tables have no column for it."""


class Merged(NamedTuple):
    """A work as it was measured in one or several environments. Ratios are taken in the run of the rival."""

    medians: Mapping[str, float]
    ratios: Mapping[str, float]


def rank(item: Line | Remark) -> int:
    """Return the place of the environment of a line or remark: EasyDeL's, vLLM's, the developers'."""
    environment = environment_of(item.setup)
    return ENGINES.index(environment) if environment in ENGINES else len(ENGINES)


def merge_runs(lines: Sequence[Line]) -> Merged:
    """Merge the lines of one work. What several environments have comes from the first of them."""
    medians: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for line in sorted(lines, key=rank, reverse=True):
        medians.update(line.medians)
        ratios.update(line.ratios)
    return Merged(medians, ratios)


def find_headlines(results: Results) -> list[Group]:
    """Return the works of the picture that were measured, with the times by contender."""
    groups = []
    for work, name in HEADLINES.items():
        medians, ratios = merge_runs([line for line in results.lines if line.bench == "running_batch" and line.work == work])
        if medians:
            bars = {contender: medians[contender] for contender in CONTENDERS if contender in medians}
            groups.append(Group(name, bars, {engine: ratios[engine] for engine in ENGINES if engine in ratios}))
    return groups


def is_shown(table: str, work: str) -> bool:
    """Whether the page shows a work in a table, or a remark below it."""
    return table not in LEFT_OUT or re.search(LEFT_OUT[table], work) is None


def make_tables(results: Results, bench: str) -> str:
    """Return the tables and remarks of a benchmark. A remark that several environments left comes from the first of them."""
    lines = [line for line in results.lines if line.bench == bench and is_shown(bench, line.work)]
    tables = [make_table([line for line in lines if line.ours == ours]) for ours in dict.fromkeys(line.ours for line in lines)]
    remarks = {remark.test: remark.text for remark in sorted(results.remarks, key=rank, reverse=True) if remark.bench == bench}
    shown = [text for text in remarks.values() if is_shown(bench, text)]
    return "\n\n".join([*tables, *shown]) or "Not measured."


def make_table(lines: Sequence[Line]) -> str:
    """Return the lines that have the same ours."""
    lines = sorted(lines, key=rank)
    ours = lines[0].ours
    seen = dict.fromkeys(name for line in lines for name in line.medians if name != ours)
    if lines[0].bench in WITHOUT_ORACLE:
        seen.pop("oracle", None)
    rivals = sorted(seen, key=lambda name: ENGINES.index(name) if name in ENGINES else len(ENGINES))
    columns = ["work", *(NAMES.get(name, name) for name in (*rivals, ours))]
    return as_table(columns, [make_cells(work, lines, rivals) for work in dict.fromkeys(map(find_work, lines))])


def find_work(line: Line) -> tuple[str, str]:
    return line.work, line.unit


def make_cells(work: tuple[str, str], lines: Sequence[Line], rivals: Sequence[str]) -> list[str]:
    """Return the line of a work: a rival's times with its ratio, then ours."""
    runs = [line for line in lines if find_work(line) == work]
    unit, ours = runs[0].time, runs[0].ours
    medians, ratios = merge_runs(runs)
    name = f"{work[0]}, per {work[1]}" if work[1] else work[0]
    return [name, *(show_cell(medians.get(rival), unit, ratios.get(rival)) for rival in rivals), show_time(medians[ours], unit)]


def show_cell(time: float | None, unit: str, ratio: float | None) -> str:
    """Return how many times longer a rival takes than ours, or its time where both were not in one run."""
    return show_time(time, unit) if ratio is None else show_ratio(ratio)


def make_setups(results: Results) -> str:
    """Return machines and versions: what all setups share, and a table with a column for each other one."""
    setups = {name: results.setups[name] for name in sorted(results.setups)}
    dates = sorted(str(setup["date"]) for setup in setups.values())
    rows = [name for name in MACHINE if name != "date" and any(name in setup for setup in setups.values())]
    values = {row: [str(setup.get(row, "-")) for setup in setups.values()] for row in rows}
    shared = [f"{NAMES.get(row, row)} {values[row][0]}" for row in rows if len({*values[row]}) == 1]
    different = [row for row in rows if len({*values[row]}) > 1]
    names = [NAMES.get(environment_of(name), "developers'") for name in setups]
    columns = list(dict.fromkeys(zip(names, *(values[row] for row in different), strict=True)))
    lines = [[NAMES.get(row, row), *(column[i] for column in columns)] for i, row in enumerate(different, 1)]
    text = f"Measured from {dates[0]} to {dates[-1]}. The same in all setups: {', '.join(shared)}."
    return f"{text}\n\n{as_table(['', *(column[0] for column in columns)], lines)}"


def make_noise(results: Results) -> str:
    """Say how far the quartiles of ours are apart."""
    spreads = [
        (line.quartiles[line.ours][1] - line.quartiles[line.ours][0]) / 2 / line.medians[line.ours]
        for line in results.lines
        if line.quartiles.get(line.ours)
    ]
    deciles = quantiles(spreads, n=10, method="inclusive")
    text = (
        f"Noise: of the {len(spreads)} measured lines, half have quartiles of pagepool's rounds within {deciles[4]:.0%} of the "
        f"median, and nine of ten within {deciles[8]:.0%}."
    )
    return textwrap.fill(text, LINE_LENGTH)


def make_hits(name: str, part: str, title: str, _: Results) -> str:
    """Return a table of the file of hits, where it has a name of its own."""
    return hits.show(title, {line: cells for line, cells in hits.read()[name].items() if is_shown(part, line)})


HITS = "prompt tokens hit, %"

PARTS: Mapping[str, Callable[[Results], str]] = {
    "setups": make_setups,
    "noise": make_noise,
    "windows_hits": partial(make_hits, "windows", "windows_hits", HITS),
    "states_hits": partial(make_hits, "states", "states_hits", HITS),
    "keeping_hits": partial(make_hits, "keeping", "keeping_hits", HITS),
    "tenants_hits": partial(make_hits, "tenants", "tenants_hits", HITS),
    "loading_times": partial(make_hits, "loading", "loading_times", hits.TO_FIRST_TOKEN),
}


def make_page(results: Results) -> str:
    """Return docs/benchmarks.md."""

    def fill(match: re.Match[str]) -> str:
        return PARTS[match[1]](results) if match[1] in PARTS else make_tables(results, match[1])

    return re.sub(r"\{\{(\w+)\}\}", fill, TEMPLATE.read_text())


def make_picture(results: Results) -> str:
    """Return docs/speed.svg."""
    names = sorted({line.setup for line in results.lines if line.bench == "running_batch"})
    setups = [results.setups[name] for name in names]
    versions = {package: setup[package] for setup in setups for package in ("pagepool", *ENGINES) if package in setup}
    machine = setups[0]
    caption = (
        f"Medians, logarithmic axis. {', '.join(f'{NAMES.get(name, name)} {version}' for name, version in versions.items())}; "
        f"CPython {machine['python']}; {machine['cpu']}, {machine['cores']} cores, {machine['os']}; {machine['date']}. "
        "In brackets: by how much RunningBatch takes less, in the run of that engine."
    )
    return draw(find_headlines(results), caption)


if __name__ == "__main__":
    measured = read()
    PAGE.write_text(make_page(measured))
    PICTURE.write_text(make_picture(measured))

"""What models with windows or chunks hit: ``python -m bench.studies.windows`` prints a table. ``make bench-windows`` runs it.

Requests go through a `RunningBatch` one after another: the prompt in chunks, the answer page by page, the release. Pages have
16 tokens. The figures are the prompt tokens that were hit, in percent of all, by eviction policy and ``windows``, and those of
vLLM's own manager where vLLM is installed (`vllm_hits`).

Arguments are words. Those that name a column, such as ``"LRU, ends"``, choose columns; of the others a line has to contain one
to be measured: ``python -m bench.studies.windows "chat, Gemma, 100,000" vLLM``. Each figure is on stderr as soon as it is
known, with the seconds that it took. ``--results FILE`` puts the figures into a file, and prints all that it has.

The recorded trace is not part of the repository; without it, its lines are left out. ``--trace FILE`` adds the lines of another
one: see docs/benchmarks.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from bench.studies.chats import NUM_CHATS, make_chats, make_chats_in_turn
from bench.studies.command import Chosen, make_parser
from bench.studies.hits import Table, merge, show
from bench.studies.layouts import CHUNKS, GEMMA, GPT_OSS, Layout
from bench.workload import PAGE_SIZE
from pagepool import CacheManager, MultiGroupPageTable, PageHashing, Retention, RunningBatch
from pagepool.replay import WORKLOADS, SimulatedRequest, generate_workload, make_requests, read_trace

Windows = Literal["all", "ends"]
Int32Array = npt.NDArray[np.int32]
Requests = Sequence[SimulatedRequest]
Sizes = Sequence[tuple[Layout, Sequence[int]]]

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
NUM_GENERATED, SEED = 2000, 1
CHUNK_LEN = 2048
MAX_MODEL_LEN = 262_144
POLICIES: Mapping[str, tuple[str, Windows]] = {
    "LRU, all": ("lru", "all"),
    "LRU, ends": ("lru", "ends"),
    "adaptive, all": ("adaptive", "all"),
    "adaptive, ends": ("adaptive", "ends"),
}
"""The eviction policy and `windows` of each column of pagepool."""
ROW = np.zeros(1, np.int32)
TOO_SMALL = "the pool is too small for a request"


@dataclass(frozen=True)
class Trace:
    """Requests, which are made when they are needed. The hits of the first `num_warm` ones are not counted."""

    name: str
    make: Callable[[], Requests]
    num_warm: int = 0


@cache
def read_records(path: Path) -> list[Any]:
    return read_trace(str(path))


def make_traces(name: str, path: Path) -> tuple[Trace, Trace]:
    """Return a recorded trace as chats, and as it is."""
    chats = Trace(f"{name}, chat", lambda: make_chats(read_records(path)))
    return chats, Trace(f"{name}, raw", lambda: make_requests(read_records(path)))


IN_TURN = Trace(f"{NUM_CHATS} chats in turn", make_chats_in_turn, NUM_CHATS)
CHATS, RAW = make_traces("conversation", TRACE)
GENERATED = [Trace(f"generated {name}", partial(generate_workload, name, NUM_GENERATED, SEED)) for name in WORKLOADS]


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    trace: Trace
    layout: Layout
    num_pages: int

    @property
    def name(self) -> str:
        return f"{self.trace.name}, {self.layout.name}, {self.num_pages:,} pages"


SIZES = ((GEMMA, (100_000, 400_000)), (GPT_OSS, (60_000, 200_000)), (CHUNKS, (200_000, 400_000)))
CHAT_SIZES = (
    (GEMMA, (60_000, 100_000, 200_000, 400_000, 800_000)),
    (GPT_OSS, (60_000, 200_000, 400_000)),
    (CHUNKS, (200_000, 400_000)),
)
GENERATED_SIZES = ((GEMMA, (10_000, 30_000)), (GPT_OSS, (4_000, 12_000)))


def list_lines(paths: Sequence[Path] = ()) -> Iterator[Line]:
    """Yield the lines in order: one trace after another, since their requests are many. `paths` lead to further traces."""
    yield Line(IN_TURN, GEMMA, 16_000)
    sizes: list[tuple[Trace, Sizes]] = [(CHATS, CHAT_SIZES), (RAW, SIZES)] if TRACE.exists() else []
    sizes += [(trace, SIZES) for path in paths for trace in make_traces(path.stem, path)]
    sizes += [(trace, GENERATED_SIZES) for trace in GENERATED]
    for trace, sizes_of_trace in sizes:
        for layout, nums_pages in sizes_of_trace:
            yield from (Line(trace, layout, num_pages) for num_pages in nums_pages)


class Rival(Protocol):
    """A prefix cache. `run` runs a request alone, and returns how many tokens of its prompt hit."""

    def run(self, request: SimulatedRequest) -> int: ...


class Batched:
    """A running batch of one row."""

    num_rows = 1
    data_parallel_size: int | None = None

    def __init__(
        self, layout: Layout, num_pages: int, eviction: str, windows: Windows, use_eagle: bool = False, **options: Any
    ) -> None:
        groups = layout.make_groups()
        hashing, retention = PageHashing(hash_seed=SEED, use_eagle=use_eagle), Retention(windows=windows)
        self.manager = CacheManager(
            num_pages, groups, MAX_MODEL_LEN, eviction=eviction, hashing=hashing, retention=retention, **options
        )
        table = MultiGroupPageTable(self.num_rows, MAX_MODEL_LEN, CHUNK_LEN, [PAGE_SIZE] * len(groups))
        self.batch = RunningBatch(self.manager, table, data_parallel_size=self.data_parallel_size)

    def run(self, request: SimulatedRequest) -> int:
        num_prompt_tokens, token_ids = request.num_prompt_tokens, request.make_token_ids()
        num_hits = self.admit(request, token_ids[:num_prompt_tokens])
        assert num_hits is not None, TOO_SMALL
        self.end_step()
        for start in range(num_hits + CHUNK_LEN, num_prompt_tokens, CHUNK_LEN):
            self.compute(ROW, min(CHUNK_LEN, num_prompt_tokens - start))
        self.answer(token_ids[num_prompt_tokens : request.num_slots], PAGE_SIZE - num_prompt_tokens % PAGE_SIZE)
        return num_hits

    def admit(self, _: SimulatedRequest, prompt: Int32Array) -> int | None:
        return self.batch.admit(0, prompt, max_num_new_tokens=CHUNK_LEN)

    def compute(self, rows: Int32Array, num_new_tokens: int) -> None:
        """Compute so many tokens in each row."""
        if num_new_tokens:
            assert self.batch.plan(rows, num_new_tokens).num_grown == len(rows), TOO_SMALL
        self.end_step()

    def end_step(self) -> None:
        """Do what is due at the end of a step: nothing here."""

    def answer(self, token_ids: Int32Array, num_first: int) -> None:
        """Decode the answer, of which `num_first` tokens fill a page, and release the row."""
        self.decode(ROW, token_ids[None], num_first)
        self.batch.release(ROW)

    def decode(self, rows: Int32Array, token_ids: Int32Array, num_first: int) -> None:
        """Decode the tokens ``[len(rows), tokens]`` of rows, page by page as `vllm_hits` does."""
        for page in np.split(token_ids, range(num_first, token_ids.shape[1], PAGE_SIZE), axis=1):
            self.batch.append(np.repeat(rows, page.shape[1]), page.ravel())
            self.compute(rows, page.shape[1])


Rivals = Mapping[str, Callable[[Layout, int], Rival]]
"""What makes each rival, for a layout and a number of pages, by the name of its column."""


def list_rivals() -> Rivals:
    """List the policies of pagepool, and vLLM where it is installed."""
    rivals: dict[str, Callable[[Layout, int], Rival]] = {
        column: partial(Batched, eviction=eviction, windows=windows) for column, (eviction, windows) in POLICIES.items()
    }
    if find_spec("vllm"):
        rivals["vLLM"] = make_vllm
    return rivals


def make_vllm(layout: Layout, num_pages: int) -> Rival:
    from bench.studies.vllm_hits import Vllm

    return Vllm(layout, num_pages, MAX_MODEL_LEN, CHUNK_LEN)


def measure(rival: Rival, requests: Requests, num_warm: int = 0) -> float:
    """Run requests one after another, and return the prompt tokens that hit, in percent."""
    num_hits = [rival.run(request) for request in requests]
    return 100 * sum(num_hits[num_warm:]) / sum(request.num_prompt_tokens for request in requests[num_warm:])


def measure_line(line: Line, requests: Requests, rivals: Rivals) -> dict[str, float]:
    """Return the cells of a line."""

    def measure_rival(make: Callable[[Layout, int], Rival]) -> float:
        return measure(make(line.layout, line.num_pages), requests, line.trace.num_warm)

    return measure_columns(line.name, {column: partial(measure_rival, make) for column, make in rivals.items()})


def measure_columns(name: str, measures: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return the cells of a line, in percent, and report each one with its time."""
    percents = {}
    for column, run in measures.items():
        start = perf_counter()
        percents[column] = round(run(), 2)
        print(f"{name}, {column}: {percents[column]:.1f} ({perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return percents


def measure_lines(
    lines: Iterable[Any], measure_line: Callable[[Any, Requests], dict[str, float]], study: str, results: Path | None
) -> Table:
    """Return the table of lines, each with a name and a trace, whose requests are made once. With a file of results the cells
    are put into its table of the study, which is then returned.
    """
    table: Table = {}
    for trace, lines_of_trace in groupby(lines, attrgetter("trace")):
        requests = trace.make()
        for line in lines_of_trace:
            cells = {line.name: measure_line(line, requests)}
            table = merge(results, study, cells) if results else {**table, **cells}
    return table


def main(arguments: Sequence[str]) -> None:
    logging.disable(logging.WARNING)  # vLLM warns that there is no accelerator
    parser = make_parser("windows")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a further trace")
    options = parser.parse_intermixed_args(arguments)
    chosen = Chosen(options.words)
    rivals = {column: make for column, make in list_rivals().items() if chosen.has_column(column)}
    lines = (line for line in list_lines(options.trace) if chosen.has_line(line.name))
    table = measure_lines(lines, partial(measure_line, rivals=rivals), "windows", options.results)
    print(show("prompt tokens hit, %", table))


if __name__ == "__main__":
    main(sys.argv[1:])

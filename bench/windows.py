"""What models with windows or chunks hit: ``python -m bench.windows`` prints a table. ``make bench-windows`` runs it.

Requests go through a `RunningBatch` one after another: the prompt in chunks, the answer token by token, the release. Pages have
16 tokens. The figures are the prompt tokens that were hit, in percent of all, by eviction policy, and those of vLLM's own
manager where vLLM is installed (`bench.vllm_hits`).

Arguments are words: only lines that contain one of them are measured. Each figure is on stderr as soon as it is known, with the
seconds that it took. The recorded trace is not part of the repository; without it, its lines are left out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from bench.chats import NUM_CHATS, make_chats, make_chats_in_turn
from bench.tables import as_table
from bench.workload import PAGE_SIZE
from pagepool import (
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MultiGroupPageTable,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.replay import WORKLOADS, SimulatedRequest, generate_workload, make_requests, read_trace

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
NUM_GENERATED, SEED = 2000, 1
CHUNK_LEN = 2048
MAX_MODEL_LEN = 131_072
EVICTIONS = {"lru": "LRU", "adaptive": "adaptive"}
TOO_SMALL = "the pool is too small for a request"

Requests = Sequence[SimulatedRequest]


@dataclass(frozen=True)
class Layout:
    """One group of full attention, and others whose windows or chunks have `size` tokens."""

    name: str
    num_local: int
    size: int
    is_chunked: bool = False

    def make_groups(self) -> list[CacheGroupSpec]:
        shape: dict[str, Any] = {
            "page_size": PAGE_SIZE,
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": "bfloat16",
            "use_mla": False,
        }
        local = (
            ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.size)
            if self.is_chunked
            else SlidingWindowSpec(**shape, sliding_window=self.size)
        )
        return [CacheGroupSpec(spec) for spec in (FullAttentionSpec(**shape), *[local] * self.num_local)]


GEMMA, GPT_OSS, CHUNKS = Layout("Gemma", 5, 1024), Layout("gpt-oss", 1, 128), Layout("chunks", 3, 8192, is_chunked=True)


@dataclass(frozen=True)
class Trace:
    """Requests, which are made when they are needed. The hits of the first `num_warm` ones are not counted."""

    name: str
    make: Callable[[], Requests]
    num_warm: int = 0


@cache
def read_records() -> list[Any]:
    return read_trace(str(TRACE))


IN_TURN = Trace(f"{NUM_CHATS} chats in turn", make_chats_in_turn, NUM_CHATS)
CHATS = Trace("conversation, chat", lambda: make_chats(read_records()))
RAW = Trace("conversation, raw", lambda: make_requests(read_records()))
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


def list_lines() -> Iterator[Line]:
    """Yield the lines in order: one trace after another, since their requests are many."""
    yield Line(IN_TURN, GEMMA, 16_000)
    if TRACE.exists():
        for trace in (CHATS, RAW):
            for layout, sizes in (
                (GEMMA, (100_000, 400_000)),
                (GPT_OSS, (60_000, 200_000)),
                (CHUNKS, (200_000, 400_000)),
            ):
                yield from (Line(trace, layout, num_pages) for num_pages in sizes)
    for trace in GENERATED:
        for layout, sizes in ((GEMMA, (10_000, 30_000)), (GPT_OSS, (4_000, 12_000))):
            yield from (Line(trace, layout, num_pages) for num_pages in sizes)


class Rival(Protocol):
    """A prefix cache. `run` runs a request alone, and returns how many tokens of its prompt hit."""

    def run(self, request: SimulatedRequest) -> int: ...


class Batched:
    """A running batch of one row."""

    def __init__(self, layout: Layout, num_pages: int, eviction: str) -> None:
        groups = layout.make_groups()
        manager = CacheManager(num_pages, groups, MAX_MODEL_LEN, hash_seed=SEED, eviction=eviction)
        table = MultiGroupPageTable(1, MAX_MODEL_LEN, CHUNK_LEN, [PAGE_SIZE] * len(groups))
        self.batch = RunningBatch(manager, table)

    def run(self, request: SimulatedRequest) -> int:
        batch, num_prompt_tokens = self.batch, request.num_prompt_tokens
        row, token_ids = np.zeros(1, np.int32), request.make_token_ids()
        num_hits = batch.admit(0, token_ids[:num_prompt_tokens], max_num_new_tokens=CHUNK_LEN)
        assert num_hits is not None, TOO_SMALL
        for start in range(num_hits + CHUNK_LEN, num_prompt_tokens, CHUNK_LEN):
            grown = batch.grow(row, min(CHUNK_LEN, num_prompt_tokens - start))
            assert grown.num_grown == 1, TOO_SMALL
        for i in range(num_prompt_tokens, request.num_slots):
            grown = batch.step(row, token_ids[i : i + 1])
            assert grown.num_grown == 1, TOO_SMALL
        batch.release(row)
        return num_hits


Rivals = Mapping[str, Callable[[Layout, int], Rival]]
"""What makes each rival, for a layout and a number of pages, by the name of its column."""


def list_rivals() -> Rivals:
    """List the policies of pagepool, and vLLM where it is installed."""
    rivals: dict[str, Callable[[Layout, int], Rival]] = {
        column: partial(Batched, eviction=eviction) for eviction, column in EVICTIONS.items()
    }
    if find_spec("vllm"):
        rivals["vLLM"] = make_vllm
    return rivals


def make_vllm(layout: Layout, num_pages: int) -> Rival:
    from bench.vllm_hits import Vllm

    return Vllm(layout, num_pages, MAX_MODEL_LEN, CHUNK_LEN)


def measure(rival: Rival, requests: Requests, num_warm: int = 0) -> float:
    """Run requests one after another, and return the prompt tokens that hit, in percent."""
    num_hits = [rival.run(request) for request in requests]
    return 100 * sum(num_hits[num_warm:]) / sum(request.num_prompt_tokens for request in requests[num_warm:])


def measure_line(line: Line, requests: Requests, rivals: Rivals) -> list[str]:
    """Return the cells of a line."""
    percents = []
    for column, make in rivals.items():
        start = perf_counter()
        percents.append(f"{measure(make(line.layout, line.num_pages), requests, line.trace.num_warm):.1f}")
        print(f"{line.name}, {column}: {percents[-1]} ({perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return [line.name, *percents]


def main(words: Sequence[str]) -> None:
    logging.disable(logging.WARNING)  # vLLM warns that there is no accelerator
    rivals, cells = list_rivals(), []
    lines = [line for line in list_lines() if not words or any(word in line.name for word in words)]
    for trace, lines_of_trace in groupby(lines, attrgetter("trace")):
        requests = trace.make()
        cells += [measure_line(line, requests, rivals) for line in lines_of_trace]
    print(as_table(("prompt tokens hit, %", *rivals), cells))


if __name__ == "__main__":
    main(sys.argv[1:])

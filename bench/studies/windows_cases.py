"""What ``windows="ends"`` hits beside ``"all"`` in other uses of a pool: ``python -m bench.studies.windows_cases``.

`windows` runs requests one after another. Here they run together, under the scheduler of ``pagepool replay``, which has
no clock: all of them wait from the start. Or one after another, in one of several shards, before a host tier, with eagle, and
with samples that are forks. The requests are the first chats of the recorded trace. Those of the last lines are generated
questions about documents, whose ends the engine names (``resume_at``). Arguments are those of `windows`, without
``--trace``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, islice
from time import perf_counter

import numpy as np

from bench.studies.command import Chosen, make_parser
from bench.studies.hits import Table, merge, show
from bench.studies.layouts import GEMMA, GPT_OSS, Layout
from bench.studies.windows import (
    CHATS,
    CHUNK_LEN,
    GENERATED_SIZES,
    MAX_MODEL_LEN,
    POLICIES,
    SEED,
    TOO_SMALL,
    TRACE,
    Batched,
    Int32Array,
    Requests,
    Sizes,
    Windows,
    measure,
)
from pagepool import CacheManager, HostTier, PageHashing, RequestTraits, Retention
from pagepool.arguments import MAX_TOKEN_COUNTS
from pagepool.replay import Scheduler, SimulatedRequest, generate_workload
from pagepool.replay.traces.arrivals import make_request
from pagepool.replay.traces.workloads import KINDS

NUM_REQUESTS = 2000
NUM_SHARDS = 4
NUM_SAMPLES = 4
ROUTED_TOKEN = 512
"""The place of the token that decides on the shard: the first block of all prompts of the trace is the same."""
FIRST_SAMPLED = 1 << 30
"""The first token of samples that nothing goes on with."""
FEW, MANY = ((GEMMA, (100_000, 400_000)), (GPT_OSS, (60_000, 200_000))), ((GEMMA, (400_000, 800_000)), (GPT_OSS, (200_000,)))

Figures = Mapping[str, float]
"""What was measured, by what it adds to the name of a line."""


class Tiered(Batched):
    """A pool before a host tier of as many pages, to which evicted pages are saved."""

    def __init__(self, layout: Layout, num_pages: int, eviction: str, windows: Windows) -> None:
        self.tier = HostTier(num_pages)
        super().__init__(layout, num_pages, eviction, windows, host_tier=self.tier)

    def end_step(self) -> None:
        if number := self.manager.take_moves().number:
            self.manager.complete(number)


class Sharded(Batched):
    """A pool in shards. All turns of a chat go to one of them."""

    data_parallel_size = NUM_SHARDS

    def admit(self, _: SimulatedRequest, prompt: Int32Array) -> int | None:
        shard = int(prompt[min(ROUTED_TOKEN, len(prompt) - 1)]) % NUM_SHARDS
        return self.batch.admit(0, prompt, max_num_new_tokens=CHUNK_LEN, traits=RequestTraits(dp_shard=shard))


class Sampled(Batched):
    """Each prompt gets several answers, whose rows are forks. The chat goes on with the first."""

    num_rows = NUM_SAMPLES
    num_sampled = FIRST_SAMPLED

    def answer(self, token_ids: Int32Array, num_first: int) -> None:
        rows = np.arange(self.num_rows, dtype=np.int32)
        self.batch.fork(0, rows[1:])
        self.batch.take_moves()
        num_others = (self.num_rows - 1) * len(token_ids)
        others = np.arange(self.num_sampled, self.num_sampled + num_others, dtype=np.int32)
        self.num_sampled += num_others
        self.decode(rows, np.append(token_ids, others).reshape(self.num_rows, -1), num_first)
        self.batch.release(rows)


@dataclass(slots=True, eq=False)
class Question(SimulatedRequest):
    """A request whose prompt ends with a question, and the ends of the parts before it: of the system prompt and documents."""

    resume_at: Sequence[int] = ()


class Named(Batched):
    """The engine names the ends of the parts of a prompt."""

    def admit(self, request: SimulatedRequest, prompt: Int32Array) -> int | None:
        assert isinstance(request, Question)
        return self.batch.admit(0, prompt, max_num_new_tokens=CHUNK_LEN, traits=RequestTraits(resume_at=request.resume_at))


@cache
def make_chats() -> Requests:
    """Make the first chats of the recorded trace, or generated ones where it is missing."""
    return CHATS.make()[:NUM_REQUESTS] if TRACE.exists() else generate_workload("conversations", NUM_REQUESTS, SEED)


@cache
def make_questions() -> Requests:
    """Make the generated questions about documents of which most are replaced at once."""
    questions = []
    for arrival in islice(KINDS["shift"](SEED), NUM_REQUESTS):
        request = make_request(arrival, SEED)
        ends = tuple(accumulate(part.length for part in arrival.parts[:-1]))
        questions.append(
            Question(
                request.request_id,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.make_token_ids,
                resume_at=ends[-MAX_TOKEN_COUNTS:],
            )
        )
    return questions


def measure_alone(
    make: Callable[..., Batched], layout: Layout, num_pages: int, eviction: str, windows: Windows, requests: Requests
) -> Figures:
    """Run requests one after another."""
    batched = make(layout, num_pages, eviction, windows)
    figures = {"": measure(batched, requests)}
    if isinstance(batched, Tiered):
        figures[": pages saved, a request"] = batched.tier.stats().num_saved_pages / len(requests)
    return figures


def measure_together(
    num_seqs: int, layout: Layout, num_pages: int, eviction: str, windows: Windows, requests: Requests
) -> Figures:
    """Run up to `num_seqs` requests at once."""
    manager = CacheManager(
        num_pages,
        layout.make_groups(),
        MAX_MODEL_LEN,
        eviction=eviction,
        hashing=PageHashing(hash_seed=SEED),
        retention=Retention(windows=windows),
    )
    figures = Scheduler(manager, [replace(request) for request in requests], max_num_seqs=num_seqs).run()
    assert figures.requests == len(requests), TOO_SMALL
    return {"": 100 * figures.hit_rate}


@dataclass(frozen=True)
class Case:
    """A use of a pool, and where it is measured. `measure` gets layout, pages, policy, `windows` and requests."""

    name: str
    measure: Callable[[Layout, int, str, Windows, Requests], Figures]
    sizes: Sizes = FEW
    make_requests: Callable[[], Requests] = make_chats


CASES = (
    Case("64 at once", partial(measure_together, 64)),
    Case("256 at once", partial(measure_together, 256), MANY),
    Case(f"{NUM_SHARDS} shards", partial(measure_alone, Sharded)),
    Case("host tier", partial(measure_alone, Tiered)),
    Case("eagle", partial(measure_alone, partial(Batched, use_eagle=True))),
    Case(f"{NUM_SAMPLES} samples", partial(measure_alone, Sampled)),
    Case("generated shift, named ends", partial(measure_alone, Named), GENERATED_SIZES, make_questions),
)


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    case: Case
    layout: Layout
    num_pages: int

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.layout.name}, {self.num_pages:,} pages"


def list_lines() -> Iterator[Line]:
    for case in CASES:
        for layout, nums_pages in case.sizes:
            yield from (Line(case, layout, num_pages) for num_pages in nums_pages)


def measure_line(line: Line, columns: Sequence[str]) -> Table:
    """Return a line, and others for what else was measured."""
    lines: dict[str, dict[str, float]] = {}
    for column in columns:
        eviction, windows = POLICIES[column]
        start = perf_counter()
        figures = line.case.measure(line.layout, line.num_pages, eviction, windows, line.case.make_requests())
        for name, figure in figures.items():
            lines.setdefault(line.name + name, {})[column] = round(figure, 2)
        print(f"{line.name}, {column}: {figures} ({perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return lines


def main(arguments: Sequence[str]) -> None:
    options = make_parser("windows_cases").parse_intermixed_args(arguments)
    chosen = Chosen(options.words)
    columns = [column for column in POLICIES if chosen.has_column(column)]
    table: Table = {}
    for line in list_lines():
        if chosen.has_line(line.name):
            cells = measure_line(line, columns)
            table = merge(options.results, "windows_cases", cells) if options.results else {**table, **cells}
    print(show("prompt tokens hit, %", table))


if __name__ == "__main__":
    main(sys.argv[1:])

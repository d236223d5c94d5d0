"""What models with states hit: ``python -m bench.studies.states`` prints a table. ``make bench-states`` runs it.

Two pools, one of keys and values and one of states, share the memory that a line names, with the share of states that it names.
States are kept where requests resume. The figures are the prompt tokens that were hit, in percent of all:

``two pools``
    Requests run one after another through a `RunningBatch`, or with a line's number at once: then the oldest ends when the next
    one begins.
``scheduler``
    The replay's scheduler runs so many at once, which decode token by token. Only for lines with several at once.
``an array for each layer``
    One pool with as many page ids as fit into the memory if each id has a row in the arrays of attention and in those of
    states. States are kept where requests resume, too. The best of three page sizes, requests one after another.

Arguments are words. Those that name a column choose columns; of the others a line has to contain one to be measured:
``python -m bench.studies.states "chat, Qwen3.5" "two pools"``. Each figure is on stderr as soon as it is known, with the
seconds that it took. ``--results FILE`` puts the figures into a file, and prints all that it has.

Chats that take turns at random share nothing, or one of four system prompts; their lines name the number of states. The
recorded trace is not part of the repository; without it, its lines are left out. ``--trace FILE`` adds those of another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.studies.chats import make_chats_in_a_loop
from bench.studies.command import Chosen, make_parser
from bench.studies.hits import show
from bench.studies.windows import TRACE, Requests, Trace, make_traces, measure_columns, measure_lines
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.models.pools import ModelPools
from pagepool.replay.plans.checkpoints import CheckpointSimulator
from pagepool.replay.plans.splits import SplitSimulator
from pagepool.replay.simulation.runs import make_manager_of_pools, make_scheduler

GIB = 1 << 30
MAX_BATCHED_TOKENS = 8192
LONG_PAGES = 2048, 4096
NUM_CHAT_TOKENS = 1 << 20  # more than all chats have


@dataclass(frozen=True)
class Model:
    """A model with states: its pools, and the tokens of a page in which `pagepool plan` would put a third of its states, or
    fewer.
    """

    name: str
    pools: ModelPools
    page_size: int


def count_delta_bytes(num_heads: int, num_channels: int) -> int:
    """Count the bytes of a gated delta net's state in a layer: 128 x 128 for each head in 32 bits, and a convolution."""
    return num_heads * 128 * 128 * 4 + num_channels * 3 * 2


QWEN = Model("Qwen3.5-27B", ModelPools(16 * 4096, 48 * count_delta_bytes(48, 10_240)), 784)
QWEN_NEXT = Model("Qwen3-Next", ModelPools(12 * 2048, 36 * (count_delta_bytes(16, 0) + 8192 * 3 * 2)), 544)
NEMOTRON = Model("Nemotron-H-8B", ModelPools(4 * 4096, 24 * (128 * 64 * 128 * 4 + 10_240 * 3 * 2)), 1040)


@dataclass(frozen=True)
class Line:
    """A line of the table: `num_at_once` requests at once, with a share of the memory for states."""

    trace: Trace
    model: Model
    memory: int
    share: float
    num_at_once: int = 1

    @property
    def name(self) -> str:
        at_once = f", {self.num_at_once} at once" if self.num_at_once > 1 else ""
        return f"{self.trace.name}, {self.model.name}, {self.memory // GIB} GiB, {self.share:.0%} states{at_once}"


@dataclass(frozen=True)
class ChatLine(Line):
    """A line with a number of states, beside keys and values that never run out."""

    @property
    def name(self) -> str:
        num_states = round(self.memory * self.share / self.model.pools.state_bytes) - 1  # the running row has one
        return f"{self.trace.name}, {self.model.name}, {num_states} states"


def list_chat_lines() -> Iterator[Line]:
    """Yield the lines of chats in a closed loop."""
    for num_systems, name in ((0, "60 chats"), (4, "60 chats, 4 system prompts")):
        chats = Trace(name, partial(make_chats_in_a_loop, 0, num_systems))
        for num_states in (40, 80, 120, 400):
            state_bytes = (num_states + 1) * QWEN_NEXT.pools.state_bytes
            memory = state_bytes + NUM_CHAT_TOKENS * QWEN_NEXT.pools.token_bytes
            yield ChatLine(chats, QWEN_NEXT, memory, state_bytes / memory)


def list_lines(paths: Sequence[Path] = ()) -> Iterator[Line]:
    """Yield the lines in order: one trace after another, since their requests are many. `paths` lead to further traces."""
    yield from list_chat_lines()
    pairs = [make_traces("conversation", TRACE)] if TRACE.exists() else []
    for chats, raw in [*pairs, *(make_traces(path.stem, path) for path in paths)]:
        for model, share in ((QWEN, 0.32), (NEMOTRON, 0.45)):
            yield from (Line(chats, model, num_gib * GIB, share) for num_gib in (80, 200, 400))
        yield from (Line(chats, QWEN, 200 * GIB, share, num_at_once=64) for share in (0.32, 0.38))
        yield Line(raw, QWEN_NEXT, 200 * GIB, 0.28)


def measure_pools(line: Line, requests: Requests) -> float:
    simulator = SplitSimulator(requests, line.model.pools, line.num_at_once)
    return 100 * simulator.run(line.memory, line.share).hit_rate


def measure_scheduler(line: Line, requests: Requests) -> float:
    manager = make_manager_of_pools(line.model.pools.divide(line.memory, line.share), line.model.pools, requests)
    scheduler = make_scheduler(manager, requests, max_batched_tokens=MAX_BATCHED_TOKENS, max_num_seqs=line.num_at_once)
    return 100 * scheduler.run().trace_hit_rate


def measure_array_for_each(line: Line, requests: Requests) -> float:
    """Return the best of three page sizes, where all arrays have a row for each page id."""
    pools, prompt_tokens = line.model.pools, sum(request.num_prompt_tokens for request in requests)
    hit_tokens = []
    for size in (line.model.page_size, *LONG_PAGES):
        num_pages = line.memory // (size * pools.token_bytes + pools.state_bytes)
        simulator = CheckpointSimulator(requests, ModelPages(size, num_state_groups=1), MAX_BATCHED_TOKENS)
        hit_tokens.append(simulator.run(num_pages, size).hit_tokens)
    return 100 * max(hit_tokens) / prompt_tokens


MEASURES: Mapping[str, Callable[[Line, Requests], float]] = {
    "two pools": measure_pools,
    "scheduler": measure_scheduler,
    "an array for each layer": measure_array_for_each,
}


def measure_line(line: Line, requests: Requests, chosen: Chosen) -> dict[str, float]:
    """Return the cells of a line."""
    columns = [column for column in MEASURES if chosen.has_column(column)]
    without = ["scheduler" if line.num_at_once == 1 else "an array for each layer"]
    if isinstance(line, ChatLine):  # an array for each layer has no number of states
        without.append("an array for each layer")
    columns = [column for column in columns if column not in without]
    return measure_columns(line.name, {column: partial(MEASURES[column], line, requests) for column in columns})


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("states")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a further trace")
    options = parser.parse_intermixed_args(arguments)
    chosen = Chosen(options.words)
    lines = [line for line in list_lines(options.trace) if chosen.has_line(line.name)]
    if not lines:
        print(f"bench-states: nothing to measure; without {TRACE} name a trace with --trace", file=sys.stderr)
        return
    table = measure_lines(lines, partial(measure_line, chosen=chosen), "states", options.results)
    print(show("prompt tokens hit, %", table))


if __name__ == "__main__":
    main(sys.argv[1:])

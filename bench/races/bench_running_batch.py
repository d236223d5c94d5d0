"""A running batch compared with managers that work request by request: decode, prompts, a mixed run, scaling.

Pages of 16 tokens, one full-attention group, prefix caching on. Every contender appends the sampled tokens, counts computed
tokens and maintains its row of the page table, since a running batch does so itself; the rivals also make their requests.
Easydel, vllm and the oracle get lists even if ours get arrays. The oracle walks all free pages for each token and would take
minutes, so it does not run decode of more than 16 rows, the mixed run, and pools of other sizes. Easydel takes seconds to make
a pool of a million pages; with pools of other sizes it and vllm run only the allocation. The mixed run is without vllm, which
would hit other pages: its pool gives uncached pages again first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.races.batch_rivals import ENGINES, Batched, Engine, make_engines, shuffle_free_pages
from bench.races.bench_core import TakeAndGiveBack, count_with_vllm
from bench.races.limit import Limit
from bench.races.race import BATCHED, Race, Work, count_rounds, run_untimed
from bench.races.rivals import OTHERS, PAGEPOOL, PAGEPOOL_ARRAYS
from bench.workload import PAGE_SIZE, SEED, VOCABULARY

NUM_TURNS = 10
NUM_SCALING_TURNS = 3  # few, so that the cold prompts of all rounds fit into a pool of ten thousand pages

NUM_STEPS = PAGE_SIZE  # of a round of decode: each row takes a page and fills one
NUM_DECODE_TURNS = 5
MAX_NUM_ORACLE_ROWS = 16
CONTEXT_LEN = 2048
SHORT_CONTEXT_LEN = 256  # of the rows that fit into the smallest pool
NUM_SCALING_ROWS = 256

PROMPT_LEN = 8192
PAGES_PER_PROMPT = PROMPT_LEN // PAGE_SIZE
NUM_PROMPTS_IN_POOL = 4  # of a pool that evicts
NUM_TAKEN = 5_000

POOLS = [(10_000, False), (100_000, False), (1_000_000, False), (1_000_000, True)]
POOL_IDS = ["10k", "100k", "1M", "1M-shuffled"]


@pytest.fixture
def measured_limit(limit: Limit) -> None:
    """Run the limit before a race that is compared with it."""
    limit.measure()


class Decode:
    """All rows get a token and its slot, for as many steps as a page has tokens.

    The context lengths vary: in each step one row in 16 fills a page, and one in 16 needs a new page. The untimed round of a
    turn touches the memory of all rows once.
    """

    def __init__(self, engine: Engine, num_rows: int, context_len: int) -> None:
        self.engine = engine
        self.rows: Any = np.arange(num_rows, dtype=np.int32)
        self.num_rounds = 0
        rng = np.random.default_rng(SEED)
        for row in range(num_rows):
            tokens = rng.integers(0, 250, context_len - row % PAGE_SIZE, dtype=np.int32)  # ints that CPython shares
            engine.admit(row, tokens if isinstance(engine, Batched) else tokens.tolist())
        if not isinstance(engine, Batched):
            self.rows = self.rows.tolist()

    def prepare(self) -> None:
        self.num_rounds += 1
        rng = np.random.default_rng([SEED, self.num_rounds])
        sampled = rng.integers(0, VOCABULARY, (NUM_STEPS, len(self.rows)), dtype=np.int32)
        self.sampled = list(sampled) if isinstance(self.engine, Batched) else sampled.tolist()

    def run(self) -> None:
        step, rows = self.engine.step, self.rows
        self.results = [step(rows, token_ids) for token_ids in self.sampled]

    @property
    def page_ids(self) -> list[tuple[int, int]]:
        return self.engine.list_new_pages(self.results)


def num_decode_pages(num_rows: int, context_len: int, num_turns: int) -> int:
    """Return the number of pages that the rows need by the end of a race."""
    num_steps = count_rounds(num_turns) * NUM_STEPS
    return num_rows * ((context_len + num_steps) // PAGE_SIZE + 1) + 1


class Prompt:
    """One prompt is looked up, gets its pages, and is freed. The contents of the pool determine the case."""

    def __init__(self, engine: Engine, as_list: bool, is_repeated: bool = False) -> None:
        self.engine, self.is_repeated = engine, is_repeated
        self.as_list = as_list or not engine.takes_arrays
        self.num_prompts = 0

    def prepare(self) -> None:
        rng = np.random.default_rng([SEED, self.num_prompts % 2 if self.is_repeated else self.num_prompts])
        tokens = rng.integers(0, VOCABULARY, PROMPT_LEN, dtype=np.int32)
        self.tokens = tokens.tolist() if self.as_list else tokens
        self.num_prompts += 1

    def run(self) -> None:
        self.page_ids = self.engine.admit(0, self.tokens)
        self.engine.release([0])


def cached_prompt(engine: Engine, as_list: bool) -> Prompt:
    """Return a contender that repeats two cached prompts in turn, since a row keeps the hashes of its last prompt."""
    contender = Prompt(engine, as_list, is_repeated=True)
    for _ in range(2):
        run_untimed(contender)
    return contender


def evicting_prompt(engine: Engine, as_list: bool) -> Prompt:
    """Fill the pool with prompts, so that each further prompt evicts the pages of the oldest."""
    contender = Prompt(engine, as_list)
    for _ in range(engine.num_pages // PAGES_PER_PROMPT):
        run_untimed(contender)
    return contender


@dataclass(frozen=True)
class PromptCase:
    """A kind of prompt, the pool it needs, its target in nanoseconds a page, and its name in the limit."""

    name: str
    make: Callable[[Engine, bool], Prompt]
    num_prompts_in_pool: int
    target: float
    limit: str


PROMPT_CASES = [
    PromptCase("cold prompt", Prompt, count_rounds(NUM_TURNS), 100, "cold"),
    PromptCase("cached prompt", cached_prompt, NUM_PROMPTS_IN_POOL, 80, "hot"),
    PromptCase("evicting prompt", evicting_prompt, NUM_PROMPTS_IN_POOL, 120, "evict"),
]
PROMPT_IDS = [case.limit for case in PROMPT_CASES]


@pytest.mark.parametrize("num_rows", [16, 256, 1024, 4096])
@pytest.mark.usefixtures("measured_limit")
def test_decode(race: Race, num_rows: int) -> None:
    rivals = ["oracle", *ENGINES] if num_rows <= MAX_NUM_ORACLE_ROWS else ENGINES
    engines = make_engines(num_decode_pages(num_rows, CONTEXT_LEN, NUM_DECODE_TURNS), num_rows, rivals)
    contenders = {name: Decode(engine, num_rows, CONTEXT_LEN) for name, engine in engines.items()}
    target = 15 if num_rows == 1024 else None
    name = f"decode: {num_rows} rows, context {CONTEXT_LEN}"
    race(
        contenders, Work(name, "row", num_rows * NUM_STEPS, NUM_DECODE_TURNS, target, suite=BATCHED, limit=f"decode_{num_rows}")
    )


@pytest.mark.parametrize("as_list", [False, True], ids=["array", "list"])
@pytest.mark.parametrize("case", PROMPT_CASES, ids=PROMPT_IDS)
@pytest.mark.usefixtures("measured_limit")
def test_prompt(race: Race, case: PromptCase, as_list: bool) -> None:
    engines = make_engines(case.num_prompts_in_pool * PAGES_PER_PROMPT + 1, 1, ["oracle", *ENGINES])
    contenders = {name: case.make(engine, as_list) for name, engine in engines.items()}
    name = f"{case.name} of {PROMPT_LEN} tokens in {'a list' if as_list else 'an array'}"
    race(
        contenders,
        Work(name, "page", PAGES_PER_PROMPT, NUM_TURNS, None if as_list else case.target, suite=BATCHED, limit=case.limit),
    )


@pytest.mark.parametrize("num_pages", [10_000, 100_000, 1_000_000])
def test_take_and_give_back(race: Race, num_pages: int) -> None:
    """Time the pool alone: ids in arrays as in a batch, page objects as in the other suite."""
    rivals = {
        "batched": PAGEPOOL_ARRAYS,
        "manager": PAGEPOOL,
        **{rival.name: rival for rival in OTHERS if rival.name != "oracle"},
    }
    contenders = {name: TakeAndGiveBack(rival, num_pages, NUM_TAKEN) for name, rival in rivals.items()}
    is_largest = num_pages == 1_000_000
    work = Work(
        f"take and give back {NUM_TAKEN}, pool of {num_pages:,}",
        "page",
        contenders["batched"].num_units,
        NUM_SCALING_TURNS,
        12 if is_largest else None,
        suite=BATCHED,
        limit="churn_1M" if is_largest else None,
    )
    race(count_with_vllm(contenders), work)


def make_scaling_engines(num_pages: int, num_rows: int, is_shuffled: bool) -> dict[str, Engine]:
    """Make engines with used pools: all their memory has been touched, and nothing is cached."""
    engines = make_engines(num_pages, num_rows, [])
    for engine in engines.values():
        evicting_prompt(engine, as_list=False)
        engine.manager.reset_prefix_cache()
        if is_shuffled:
            shuffle_free_pages(engine)
    return engines


def name_pool(num_pages: int, is_shuffled: bool) -> str:
    return f"pool of {num_pages:,}{', ids shuffled' if is_shuffled else ''}"


@pytest.mark.parametrize(("num_pages", "is_shuffled"), POOLS, ids=POOL_IDS)
def test_scaling_of_decode(race: Race, num_pages: int, is_shuffled: bool) -> None:
    engines = make_scaling_engines(num_pages, NUM_SCALING_ROWS, is_shuffled)
    contenders = {name: Decode(engine, NUM_SCALING_ROWS, SHORT_CONTEXT_LEN) for name, engine in engines.items()}
    name = f"decode: {NUM_SCALING_ROWS} rows, context {SHORT_CONTEXT_LEN}, {name_pool(num_pages, is_shuffled)}"
    race(contenders, Work(name, "row", NUM_SCALING_ROWS * NUM_STEPS, NUM_SCALING_TURNS, suite=BATCHED))


@pytest.mark.parametrize(("num_pages", "is_shuffled"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("case", PROMPT_CASES, ids=PROMPT_IDS)
def test_scaling_of_prompts(race: Race, case: PromptCase, num_pages: int, is_shuffled: bool) -> None:
    engines = make_scaling_engines(num_pages, 1, is_shuffled)
    contenders = {name: case.make(engine, False) for name, engine in engines.items()}
    name = f"{case.name} in an array, {name_pool(num_pages, is_shuffled)}"
    race(contenders, Work(name, "page", PAGES_PER_PROMPT, NUM_SCALING_TURNS, suite=BATCHED))


NUM_MIXED_ROWS = 256
NUM_MIXED_STEPS = 300
NUM_MIXED_PAGES = 20_000
NUM_MIXED_TURNS = 3
MAX_NUM_ARRIVALS = 4  # in a step


@dataclass(frozen=True)
class MixedStep:
    """One step of an engine: rows are released, prompts arrive, and every row gets a token."""

    released: list[int]
    prompts: list[tuple[int, Any]]
    rows: Any
    sampled: Any


def plan_steps(rng: np.random.Generator) -> Iterator[MixedStep]:
    """Yield steps. Requests arrive while rows are free, with one of eight prefixes of 512 tokens and up to 1,024 of their
    own.
    """
    beginnings = random_tokens(rng, (8, 512))
    num_left = np.zeros(NUM_MIXED_ROWS, dtype=np.int64)
    released: list[int] = []
    for _ in range(NUM_MIXED_STEPS):
        arrived = np.flatnonzero(num_left == 0)[:MAX_NUM_ARRIVALS].tolist()
        num_left[arrived] = rng.integers(64, 192, len(arrived))
        own = [random_tokens(rng, int(num_own)) for num_own in rng.integers(256, 1024, len(arrived))]
        prompts = [
            (row, np.concatenate([beginnings[rng.integers(8)], tokens])) for row, tokens in zip(arrived, own, strict=True)
        ]
        rows = np.flatnonzero(num_left).astype(np.int32)
        yield MixedStep(released, prompts, rows, random_tokens(rng, len(rows)))
        num_left[rows] -= 1
        released = rows[num_left[rows] == 0].tolist()


def random_tokens(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Any:
    return rng.integers(0, VOCABULARY, shape, dtype=np.int32)


def with_lists(step: MixedStep) -> MixedStep:
    """Return the step with lists in place of arrays, for engines with Python requests."""
    prompts = [(row, tokens.tolist()) for row, tokens in step.prompts]
    return MixedStep(step.released, prompts, step.rows.tolist(), step.sampled.tolist())


class MixedRun:
    """The planned steps from the start, with nothing cached, in a pool too small for all prompts, so that later ones evict."""

    def __init__(self, engine: Engine, steps: Sequence[MixedStep]) -> None:
        self.engine, self.steps = engine, steps
        self.running: list[int] = []

    def prepare(self) -> None:
        self.engine.release(self.running)
        self.engine.manager.reset_prefix_cache()
        self.running = self.steps[-1].rows.tolist()
        self.plan = self.steps if isinstance(self.engine, Batched) else [with_lists(step) for step in self.steps]

    def run(self) -> None:
        engine = self.engine
        self.admitted, self.results = [], []
        for step in self.plan:
            engine.release(step.released)
            self.admitted += [engine.admit(row, tokens) for row, tokens in step.prompts]
            self.results.append(engine.step(step.rows, step.sampled))

    @property
    def page_ids(self) -> list[Any]:
        return [*map(list, self.admitted), *self.engine.list_new_pages(self.results)]


def test_mixed_run(race: Race) -> None:
    steps = list(plan_steps(np.random.default_rng(SEED)))
    engines = make_engines(NUM_MIXED_PAGES, NUM_MIXED_ROWS, ["easydel"])
    contenders = {name: MixedRun(engine, steps) for name, engine in engines.items()}
    num_prompts, num_row_steps = sum(len(step.prompts) for step in steps), sum(len(step.rows) for step in steps)
    name = f"mixed run: {NUM_MIXED_STEPS} steps, up to {NUM_MIXED_ROWS} rows, {num_prompts} prompts, evicting"
    race(contenders, Work(name, "row and step", num_row_steps, NUM_MIXED_TURNS, suite=BATCHED))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory(remark: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "bench.races.memory"]
    remark(subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True).stdout.strip())

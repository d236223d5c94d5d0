"""What tenants hit beside one that floods the pool: ``python -m bench.studies.tenants`` prints a table.

Each of three tenants has users who chat with pauses of about a minute. A fourth sends long prompts that are of no use to
anybody, or to itself alone. The figures are the prompt tokens that were hit, in percent of all, by tenant, counted from the
time on when the flood begins. Columns:

``alone``, ``alone in its share``
    The tenant without the others, with LRU, in the whole pool and in one of a quarter.
``LRU``, ``adaptive``
    All tenants together, with that policy.
``shares``
    The same with LRU, and a quarter for each of the three. The last quarter is that of all other requests, which are the
    flood.

Arguments are those of `bench.studies.keeping`, without ``--seeds``: ``python -m bench.studies.tenants "90,000" shares``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import log
from time import perf_counter
from typing import Any

import numpy as np

from bench.studies.agents import make_tokens
from bench.studies.command import Chosen, make_parser
from bench.studies.hits import Table, merge, show
from bench.studies.timed import TimedBatch

SEED = 0
NUM_ROWS = 512
MAX_NUM_TOKENS = 65_536
NUM_SECONDS, FLOOD_SECOND = 6_000.0, 1_500.0
"""How long it goes on, and when the flood begins."""
NUM_TENANTS, NUM_USERS = 3, 40
UNEVEN_USERS = (20, 40, 80)
SHARE = 0.25
FLOOD = NUM_TENANTS
"""The number of the tenant that floods the pool."""
SYSTEM_LEN, FIRST_LEN, MESSAGE_LEN, ANSWER_LEN = 2_048, (1_500, 4_000), (300, 2_500), (100, 600)
NUM_TURNS = (3, 15)
PAUSE, PAUSE_SPREAD, PAUSE_BETWEEN = 36.0, 1.0, 120.0
"""The median pause of a chat and the deviation of its logarithm, and the mean pause between two chats."""
FLOOD_LEN, FLOOD_ANSWER_LEN, FLOOD_RATE, FLOOD_TURN = (2_000, 12_000), 200, 4.0, 6.0
LEAST_REPEAT, MEAN_REPEAT = 10.0, 60.0
"""The least seconds after which the flood repeats a prompt, and what it adds to them in the mean."""
CHATS, FLOODS = 10, 11
"""The streams of tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of `num_tokens` with its answer, which takes `seconds`. Its tokens are the first of a context."""

    time: float
    tenant: int
    context: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int
    seconds: float


Requests = Sequence[Request]


def make_chats(tenant: int, num_users: int) -> list[Request]:
    """Make the chats of a tenant's users, each of which has one after another."""
    rng = np.random.default_rng(SEED * 10 + tenant)
    requests: list[Request] = []
    num_chats = 0
    for _ in range(num_users):
        time = rng.exponential(PAUSE_BETWEEN / 2)
        while time < NUM_SECONDS:
            num_turns = int(rng.integers(*NUM_TURNS))
            num_tokens = SYSTEM_LEN + int(rng.integers(*FIRST_LEN))
            for _ in range(num_turns):
                answer_len = int(rng.integers(*ANSWER_LEN))
                seconds = 3 + answer_len / 60
                context = (CHATS, tenant, num_chats)
                requests.append(Request(time, tenant, context, num_tokens, num_tokens + answer_len, seconds))
                num_tokens += answer_len + int(rng.integers(*MESSAGE_LEN))
                time += seconds + rng.lognormal(log(PAUSE), PAUSE_SPREAD)
            num_chats += 1
            time += rng.exponential(PAUSE_BETWEEN)
    return requests


def make_flood(num_times: int) -> list[Request]:
    """Make the requests of the flood, which sends each prompt so many times."""
    rng = np.random.default_rng(SEED * 10 + 9)
    requests: list[Request] = []
    time = FLOOD_SECOND
    while time < NUM_SECONDS:
        time += rng.exponential(num_times / FLOOD_RATE)
        num_tokens = int(rng.integers(*FLOOD_LEN))
        again, context = time, (FLOODS, len(requests))
        for _ in range(num_times):
            requests.append(Request(again, FLOOD, context, num_tokens, num_tokens + FLOOD_ANSWER_LEN, FLOOD_TURN))
            again += rng.exponential(MEAN_REPEAT) + LEAST_REPEAT
    return requests


class Tenants:
    """Requests of tenants in a running batch, and the tokens that each asked for and hit, without those of the flood."""

    def __init__(self, num_pages: int, requests: Requests, eviction: str = "lru", share: float | None = None) -> None:
        self.timed = TimedBatch(num_pages + 1, NUM_ROWS, MAX_NUM_TOKENS, eviction)
        self.num_tokens, self.num_hits = np.zeros((2, NUM_TENANTS), np.int64)
        self.has_shares = share is not None
        if share is not None:
            self.timed.manager.set_shares({name_tenant(tenant): share for tenant in range(NUM_TENANTS)})
        for request in sorted(requests, key=lambda request: request.time):
            self.timed.timeline.call_at(request.time, partial(self.begin, request))

    def begin(self, request: Request) -> None:
        token_ids = make_tokens(request.num_tokens, request.context)
        is_named = self.has_shares and request.tenant != FLOOD
        options = {"tenant": name_tenant(request.tenant)} if is_named else {}
        self.timed.start(token_ids, partial(self.count, request), **options)

    def count(self, request: Request, row: int, num_hits: int) -> None:
        if self.timed.timeline.now >= FLOOD_SECOND and request.tenant != FLOOD:
            self.num_tokens[request.tenant] += request.num_prompt_tokens
            self.num_hits[request.tenant] += num_hits
        self.timed.timeline.call_in(request.seconds, partial(self.timed.end, row))

    def run(self) -> list[float]:
        """Run to the end. Returns the prompt tokens that hit in percent, by tenant; 0 for those without requests."""
        self.timed.timeline.run()
        percents: list[float] = (100 * self.num_hits / np.maximum(self.num_tokens, 1)).tolist()
        return percents


def name_tenant(tenant: int) -> str:
    return f"tenant {tenant + 1}"


def measure_together(num_pages: int, chats: Sequence[Requests], flood: Requests, **options: Any) -> list[float]:
    """Run all tenants and the flood in one pool."""
    return Tenants(num_pages, [*chain(*chats), *flood], **options).run()


def measure_alone(part: float, num_pages: int, chats: Sequence[Requests], _: Requests) -> list[float]:
    """Run each tenant in a pool of its own, a part of the whole one."""
    return [Tenants(int(num_pages * part), requests).run()[tenant] for tenant, requests in enumerate(chats)]


Measure = Callable[[int, Sequence[Requests], Requests], list[float]]
COLUMNS: Mapping[str, Measure] = {
    "alone": partial(measure_alone, 1.0),
    "alone in its share": partial(measure_alone, SHARE),
    "LRU": measure_together,
    "adaptive": partial(measure_together, eviction="adaptive"),
    "shares": partial(measure_together, share=SHARE),
}


@dataclass(frozen=True)
class Case:
    """Users of each tenant, and how often the flood sends a prompt: 0 without it."""

    name: str
    num_users: Sequence[int]
    num_times: int = 0

    def make_chats(self) -> list[list[Request]]:
        return [make_chats(tenant, num_users) for tenant, num_users in enumerate(self.num_users)]

    def make_flood(self) -> list[Request]:
        return make_flood(self.num_times) if self.num_times else []


EVEN_USERS = (NUM_USERS,) * NUM_TENANTS
CASES = (
    Case("no flood", EVEN_USERS),
    Case("flood", EVEN_USERS, 1),
    Case("flood, each prompt twice", EVEN_USERS, 2),
    Case("no flood, 20, 40 and 80 users", UNEVEN_USERS),
)
NUMS_PAGES = (60_000, 90_000)


def list_lines() -> Iterator[tuple[Case, int, str]]:
    """Yield the cases and sizes, with the name that their lines begin with."""
    for case in CASES:
        yield from ((case, num_pages, f"{case.name}, {num_pages:,} pages") for num_pages in NUMS_PAGES)


def main(arguments: Sequence[str]) -> None:
    options = make_parser("tenants").parse_intermixed_args(arguments)
    chosen = Chosen(options.words)
    table: dict[str, dict[str, float]] = {}
    for case, num_pages, name in list_lines():
        if not chosen.has_line(name):
            continue
        chats, flood = case.make_chats(), case.make_flood()
        for column, measure in COLUMNS.items():
            if chosen.has_column(column):
                start = perf_counter()
                percents = measure(num_pages, chats, flood)
                shown = " ".join(f"{percent:.1f}" for percent in percents)
                print(f"{name}, {column}: {shown} ({perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
                for tenant, percent in enumerate(percents):
                    table.setdefault(f"{name}: {name_tenant(tenant)}", {})[column] = round(percent, 2)
    whole: Table = merge(options.results, "tenants", table) if options.results else table
    print(show("prompt tokens hit, %", whole))


if __name__ == "__main__":
    main(sys.argv[1:])

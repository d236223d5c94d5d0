"""`CacheManager`, called request by request as engines do: decode, and prompts of 8192 tokens.

Pages of 16 tokens, one full-attention group, prefix caching on, tokens in Python lists. A decode step appends the sampled
tokens, and a prompt begins with its request, since that is where vllm hashes. Counting computed tokens is not timed. Requests
of the packages' own classes are made in a race of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.races.race import Race, Work, count_rounds, run_untimed
from bench.races.rivals import RIVALS, Rival
from bench.workload import PAGE_SIZE, random_tokens

NUM_RUNNING = 1024
CONTEXT_LEN = 2048
NUM_CALLS = 64
NUM_TURNS = 12
NUM_STEPS = count_rounds(NUM_TURNS)

PROMPT_LEN = 8192
PAGES_PER_PROMPT = PROMPT_LEN // PAGE_SIZE
NUM_PROMPTS = count_rounds(NUM_TURNS)
NUM_PROMPTS_IN_POOL = 4  # of a pool that evicts


class Decode:
    """All running requests get a slot for one more token.

    The context lengths vary: in each step one request in 16 fills a page, and one in 16 needs a new page.
    """

    def __init__(self, rival: Rival) -> None:
        pages_per_request = (CONTEXT_LEN + NUM_STEPS) // PAGE_SIZE + 2
        self.rival = rival
        self.manager = rival.make_manager(NUM_RUNNING * pages_per_request)
        self.requests = [
            rival.make_request(f"request-{i}", random_tokens(CONTEXT_LEN - i % PAGE_SIZE, i)) for i in range(NUM_RUNNING)
        ]
        for request in self.requests:
            rival.find_prefix(self.manager, request)
            self.manager.allocate_slots(request, request.num_tokens)

    def prepare(self) -> None:
        for request in self.requests:
            request.num_computed_tokens = request.num_tokens

    def run(self) -> None:
        allocate, read_ids = self.manager.allocate_slots, self.rival.read_ids
        for i, request in enumerate(self.requests):
            request.append_output_token_ids(i)
        self.page_ids = [read_ids(allocate(request, 1)) for request in self.requests]


class Calls:
    """`allocate_slots` once for each of some requests, which know `num_new` tokens behind a context of whole pages and `rest`
    tokens. Nothing else is timed.
    """

    def __init__(self, rival: Rival, rest: int, num_new: int) -> None:
        self.rival = rival
        self.rest, self.num_new = rest, num_new
        self.manager = rival.make_manager(NUM_CALLS * 8)
        self.requests: list[Any] = []
        self.num_made = 0

    def prepare(self) -> None:
        for request in self.requests:
            self.rival.release(self.manager, request)
        self.num_made += NUM_CALLS
        num_computed = 4 * PAGE_SIZE + self.rest
        self.requests = [
            self.rival.make_request(f"request-{i}", random_tokens(num_computed + self.num_new, i))
            for i in range(self.num_made, self.num_made + NUM_CALLS)
        ]
        for request in self.requests:
            self.rival.find_prefix(self.manager, request)
            self.manager.allocate_slots(request, num_computed)
            request.num_computed_tokens = num_computed

    def run(self) -> None:
        allocate, num_new = self.manager.allocate_slots, self.num_new
        self.results = [allocate(request, num_new) for request in self.requests]

    @property
    def page_ids(self) -> list[tuple[list[int], ...]]:
        return [self.rival.read_ids(pages) for pages in self.results]


class Prompt:
    """One prompt becomes a request, is looked up, gets its pages, and is freed. The contents of the pool determine the case."""

    def __init__(self, rival: Rival, num_prompts_in_pool: int, is_repeated: bool = False) -> None:
        self.rival = rival
        self.manager = rival.make_manager(num_prompts_in_pool * PAGES_PER_PROMPT + 1)
        self.is_repeated = is_repeated
        self.num_prompts = 0

    def prepare(self) -> None:
        self.tokens = random_tokens(PROMPT_LEN, NUM_RUNNING + (0 if self.is_repeated else self.num_prompts))
        self.num_prompts += 1

    def run(self) -> None:
        rival, manager = self.rival, self.manager
        request = rival.make_request(f"prompt-{self.num_prompts}", self.tokens)
        hits, num_hit_tokens = rival.find_prefix(manager, request)
        manager.allocate_slots(request, PROMPT_LEN - num_hit_tokens, num_hit_tokens, hits)
        self.page_ids = rival.get_row(manager, request)
        rival.release(manager, request)


class CachedPrompt(Prompt):
    """The first prompt fills the cache."""

    def __init__(self, rival: Rival) -> None:
        super().__init__(rival, NUM_PROMPTS_IN_POOL, is_repeated=True)
        run_untimed(self)


class EvictingPrompt(Prompt):
    """Prompts fill the pool, so that each further prompt evicts the pages of the oldest."""

    def __init__(self, rival: Rival) -> None:
        super().__init__(rival, NUM_PROMPTS_IN_POOL)
        for _ in range(NUM_PROMPTS_IN_POOL):
            run_untimed(self)


def cold_prompt(rival: Rival) -> Prompt:
    """Make a pool of unused pages, large enough for all rounds."""
    return Prompt(rival, NUM_PROMPTS)


class OwnRequest:
    """A prompt becomes a request of the package's own class, which copies its tokens."""

    def __init__(self, rival: Rival) -> None:
        self.rival = rival
        self.num_prompts = 0

    def prepare(self) -> None:
        self.tokens = random_tokens(PROMPT_LEN, NUM_RUNNING + self.num_prompts)
        self.num_prompts += 1

    def run(self) -> None:
        self.request = self.rival.copy_into_request("prompt", self.tokens)

    @property
    def page_ids(self) -> list[int]:
        """The tokens, in place of pages."""
        return [*self.request.all_token_ids]


def test_decode(race: Race) -> None:
    contenders = {rival.name: Decode(rival) for rival in RIVALS if rival.name != "oracle"}  # it would take minutes
    name = f"decode: {NUM_RUNNING} running, context {CONTEXT_LEN}"
    race(contenders, Work(name, "request-step", NUM_RUNNING, NUM_TURNS, target=8))


@pytest.mark.parametrize(
    ("rest", "num_new", "name"),
    [(3, 1, "a call with nothing due"), (0, PAGE_SIZE, "a call that takes a page and enters it")],
    ids=["idle", "due"],
)
def test_call(race: Race, rest: int, num_new: int, name: str) -> None:
    contenders = {rival.name: Calls(rival, rest, num_new) for rival in RIVALS}
    race(contenders, Work(name, "call", NUM_CALLS, NUM_TURNS))


@pytest.mark.parametrize(
    ("make_contender", "name", "target"),
    [
        (cold_prompt, f"cold prompt of {PROMPT_LEN} tokens", 10),
        (CachedPrompt, f"cached prompt of {PROMPT_LEN} tokens", 12),
        (EvictingPrompt, f"cold prompt of {PROMPT_LEN} tokens that evicts", 9),
    ],
    ids=["cold", "cached", "evict"],
)
def test_prompt(race: Race, make_contender: Callable[[Rival], Prompt], name: str, target: float) -> None:
    contenders = {rival.name: make_contender(rival) for rival in RIVALS}
    race(contenders, Work(name, "page", PAGES_PER_PROMPT, NUM_TURNS, target))


def test_request(race: Race) -> None:
    contenders = {rival.name: OwnRequest(rival) for rival in RIVALS if rival.name != "vllm"}  # it hashes them as well
    race(contenders, Work(f"request of {PROMPT_LEN} tokens", "token", PROMPT_LEN, NUM_TURNS))

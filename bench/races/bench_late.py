"""Caching pages once they are computed: calls of `cache_pages` with nothing due, as in most steps of decoding, beside
`allocate_slots`; and nano-vllm's scheduler, whose port calls it in each step or has ``CacheManager(caches="computed")``.
"""

from __future__ import annotations

from random import Random

import pytest

from bench.races.late_rivals import Late, Nano, Settings, has_nano_vllm
from bench.races.race import LATE, PORTS, Contender, Race, Suite, Work
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, BenchRequest, make_group, random_tokens
from pagepool import CacheManager, specs

NUM_CALLS = 1000
NUM_TURNS = 20
NUM_TOKENS = 100 * PAGE_SIZE + 2
NUM_PROMPTS = 64
WAYS = {suite.ours: suite for suite in PORTS}


class Idle:
    """A request calls again and again."""

    def __init__(self) -> None:
        self.manager = CacheManager(200, [make_group(specs)], 2 * NUM_TOKENS)
        self.request = BenchRequest("idle", random_tokens(NUM_TOKENS + 1, 0))
        self.manager.allocate_slots(self.request, NUM_TOKENS)  # type: ignore[arg-type]  # the attributes that are read
        self.request.num_computed_tokens = NUM_TOKENS

    def prepare(self) -> None:
        pass

    @property
    def page_ids(self) -> tuple[list[int], ...]:
        return self.manager.get_page_ids("idle")


class IdleAllocation(Idle):
    def run(self) -> None:
        allocate_slots, request = self.manager.allocate_slots, self.request
        for _ in range(NUM_CALLS):
            allocate_slots(request, 1)  # type: ignore[arg-type]


class IdleCaching(Idle):
    def run(self) -> None:
        cache_pages, request = self.manager.cache_pages, self.request
        for _ in range(NUM_CALLS):
            cache_pages(request, NUM_TOKENS)  # type: ignore[arg-type]


def test_nothing_due(race: Race) -> None:
    contenders = {"allocate_slots": IdleAllocation(), LATE.ours: IdleCaching()}
    race(contenders, Work("nothing due", "call", NUM_CALLS, NUM_TURNS, suite=LATE))


def make_prompts() -> list[tuple[list[int], int]]:
    """Return prompts and the lengths of their answers: 100 to 1,023 tokens each. Two of three prompts begin as others do."""
    rng = Random(SEED)
    heads = [rng.choices(range(VOCABULARY), k=512) for _ in range(8)]
    prompts = []
    for _ in range(NUM_PROMPTS):
        head = rng.choice(heads)[: rng.choice((0, 128, 512))]
        tail = rng.choices(range(VOCABULARY), k=rng.randrange(100, 1024 - len(head)))
        prompts.append((head + tail, rng.randrange(100, 1024)))
    return prompts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("page_size", "share"), [(16, 1.0), (16, 0.3), (256, 1.0)], ids=["roomy", "tight", "large_pages"])
def test_port_of_nano_vllm(race: Race, page_size: int, share: float, way: str) -> None:
    """A token of an answer, all that its request costs included. Tight: pages for three tenths of all requests."""
    prompts = make_prompts()
    num_pages = sum((len(tokens) + num_new) // page_size + 1 for tokens, num_new in prompts)
    settings = Settings(page_size, int(share * num_pages))
    names = {"plain": "plain", way: way.removeprefix("port, ")}
    contenders: dict[str, Contender] = {"nano-vllm": Nano("", settings, prompts)} if has_nano_vllm() else {}
    contenders |= {column: Late(name, settings, prompts) for column, name in names.items()}
    num_output_tokens = sum(num_new for _, num_new in prompts)
    name = f"pages of {page_size}{', tight' if share < 1 else ''}"
    suite: Suite = WAYS[way]
    race(contenders, Work(name, "token", num_output_tokens, 5, suite=suite))
    nums = {column: contender.num_computed_tokens for column, contender in contenders.items() if isinstance(contender, Late)}
    assert max(nums.values()) < 1.1 * min(nums.values()), f"prompt tokens without hits: {nums}"

"""The work of `bench.races.vllm`, done by one rival in a process of its own: ``python -m bench.races.vllm_work RIVAL``.

Each line on stdin is answered by one line of JSON on stdout. The name of a work makes it, in the place of the previous one, and
is answered by null; a number runs as many rounds after one that does not count, and is answered by the seconds of CPU time that
each part of each round took; ``block_ids`` is answered by what all rivals must have in common, ``memory`` by bytes a block.

Only what stands between two readings of the clock (`Clock.part`) is timed. The garbage collector is off.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bench.races.memory import read_resident_bytes
from bench.workload import random_tokens

sys.path.append(str(Path(__file__).parents[2] / "tests" / "models"))  # the builder lives there

import vllm_engine as engine
from vllm.v1.request import RequestStatus

from bench.races.vllm_rivals import RIVALS

CONTEXT_LEN = 2048
MAX_NUM_ROUNDS = 400
PROMPT_LEN = 8192
LONG_PROMPT_LEN = 131_072
NUM_PROMPTS_IN_POOL = 4  # of a pool that evicts
NUM_BLOCKS_OF_MEMORY = 1_000_000
WINDOW = 1024
HASH_ALGOS = ("sha256", "sha256_cbor")

GROUPS: dict[str, engine.Groups] = {
    "1 group": (None,),
    "2 groups": (None, WINDOW),
    "4 groups": (None, WINDOW, WINDOW, WINDOW),
}


class Clock:
    """CPU time of this thread in one round, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds[name] = time.thread_time() - start


class Work(Protocol):
    """What a rival does in rounds. `block_ids` is the same for all that do it."""

    def run(self, clock: Clock) -> None: ...

    @property
    def block_ids(self) -> Any: ...


class Decode:
    """All running requests get a slot for one more token, as a scheduler asks for it, and then the token.

    Context lengths vary: in each step one in 16 requests fills a block, and one needs one. With `is_async`, the slot is asked
    for before the previous token is known, and the block that this token fills is cached when it comes.
    """

    def __init__(self, num_running: int, is_async: bool) -> None:
        blocks_per_request = (CONTEXT_LEN + MAX_NUM_ROUNDS) // engine.BLOCK_SIZE + 2
        self.manager = engine.make_manager(num_running * blocks_per_request, 2 * CONTEXT_LEN)
        self.is_async, self.num_steps = is_async, 0
        hasher, sampling = engine.make_hasher(), engine.make_sampling(CONTEXT_LEN)
        self.requests = []
        for i in range(num_running):
            tokens = random_tokens(CONTEXT_LEN - i % engine.BLOCK_SIZE, i)
            request = engine.make_request(f"request-{i}", tokens, hasher, sampling)
            hits, num_hits, _ = self.manager.get_computed_blocks(request)
            self.manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits)
            request.num_computed_tokens = request.num_tokens
            request.num_in_flight_tokens = int(is_async)
            request.status = RequestStatus.RUNNING
            self.requests.append(request)
        if not is_async:
            self._append()

    def run(self, clock: Clock) -> None:
        self.num_steps += 1
        allocate = self.manager.allocate_slots
        with clock.part("allocate"):
            for request in self.requests:
                allocate(request, 1, num_lookahead_tokens=0)
        for request in self.requests:
            request.num_computed_tokens += 1
        with clock.part("append"):
            self._append()
        if self.is_async:
            cache = self.manager.cache_blocks
            with clock.part("cache"):
                for request in self.requests:
                    cache(request, request.num_computed_tokens - request.num_in_flight_tokens)

    def _append(self) -> None:
        for request in self.requests:
            request.append_output_token_ids(self.num_steps)

    @property
    def block_ids(self) -> list[Any]:
        return [self.manager.get_block_ids(request.request_id) for request in self.requests]


class Prompt:
    """One prompt is hashed, looked up, gets its blocks, and is freed. The contents of the pool determine the case."""

    def __init__(self, num_prompts_in_pool: int, is_repeated: bool) -> None:
        num_blocks = num_prompts_in_pool * PROMPT_LEN // engine.BLOCK_SIZE + 1
        self.manager = engine.make_manager(num_blocks, 2 * PROMPT_LEN)
        self.is_repeated, self.num_prompts = is_repeated, 0
        self.hasher, self.sampling = engine.make_hasher(), engine.make_sampling(1)
        for _ in range(NUM_PROMPTS_IN_POOL + 1):
            self.run(Clock())

    def run(self, clock: Clock) -> None:
        tokens = random_tokens(PROMPT_LEN, 0 if self.is_repeated else self.num_prompts)
        self.num_prompts += 1
        with clock.part("admit"):
            request = engine.make_request(f"prompt-{self.num_prompts}", tokens, self.hasher, self.sampling)
            hits, num_hits, _ = self.manager.get_computed_blocks(request)
            self.manager.allocate_slots(request, PROMPT_LEN - num_hits, num_hits, hits)
        self.block_ids = self.manager.get_block_ids(request.request_id)
        with clock.part("free"):
            self.manager.free(request)


class Hashes:
    """The blocks of a prompt are hashed."""

    def __init__(self, hash_algo: str, *lookahead: int) -> None:
        self.hasher, self.sampling = engine.make_hasher(hash_algo, *lookahead), engine.make_sampling(1)
        self.num_prompts = 0
        self.run(Clock())

    def run(self, clock: Clock) -> None:
        tokens = random_tokens(PROMPT_LEN, self.num_prompts)
        self.num_prompts += 1
        request = engine.make_request(f"prompt-{self.num_prompts}", tokens, None, self.sampling)
        with clock.part("hash"):
            self.hashes = self.hasher(request)

    @property
    def block_ids(self) -> list[str]:
        return [digest.hex() for digest in self.hashes]


class LongPrompt:
    """A cached prompt goes through an idle scheduler: made and hashed, added, scheduled, answered by one token and freed."""

    def __init__(self) -> None:
        max_model_len = LONG_PROMPT_LEN + engine.BLOCK_SIZE
        self.scheduler = engine.make_scheduler(2 * LONG_PROMPT_LEN // engine.BLOCK_SIZE, max_model_len)
        self.hasher, self.sampling = engine.make_hasher(), engine.make_sampling(1)
        self.num_prompts = 0
        self.run(Clock())
        while self.scheduler.requests:
            self._answer()

    def run(self, clock: Clock) -> None:
        tokens = random_tokens(LONG_PROMPT_LEN, 0)
        self.num_prompts += 1
        with clock.part("add"):
            request = engine.make_request(f"prompt-{self.num_prompts}", tokens, self.hasher, self.sampling)
            self.scheduler.add_request(request)
        with clock.part("schedule"):
            self.scheduled = self.scheduler.schedule()
        self.block_ids = [new.block_ids for new in self.scheduled.scheduled_new_reqs]
        output = engine.sample(self.scheduler, self.scheduled, 0)
        with clock.part("update"):
            self.scheduler.update_from_output(self.scheduled, output)

    def _answer(self) -> None:
        scheduled = self.scheduler.schedule()
        self.scheduler.update_from_output(scheduled, engine.sample(self.scheduler, scheduled, 0))


class Steps:
    """Steps of a scheduler whose requests all decode. With `is_async`, a step is scheduled before the previous one's output."""

    def __init__(self, num_running: int, groups: str, is_async: bool) -> None:
        num_groups = len(GROUPS[groups])
        blocks_per_request = num_groups * ((CONTEXT_LEN + MAX_NUM_ROUNDS) // engine.BLOCK_SIZE + 2)
        self.scheduler = engine.make_scheduler(
            num_running * blocks_per_request, 2 * CONTEXT_LEN, GROUPS[groups], max_num_seqs=num_running, is_async=is_async
        )
        self.is_async, self.num_steps = is_async, 0
        hasher, sampling = engine.make_hasher(), engine.make_sampling(CONTEXT_LEN)
        for i in range(num_running):
            tokens = random_tokens(CONTEXT_LEN - i % engine.BLOCK_SIZE, i)
            self.scheduler.add_request(engine.make_request(f"request-{i}", tokens, hasher, sampling))
        self.in_flight = [self.scheduler.schedule()] if is_async else []
        while any(request.num_output_tokens == 0 for request in self.scheduler.requests.values()):
            self.run(Clock())

    def run(self, clock: Clock) -> None:
        self.num_steps += 1
        with clock.part("schedule"):
            self.in_flight.append(self.scheduler.schedule())
        scheduled = self.in_flight.pop(0)
        output = engine.sample(self.scheduler, scheduled, self.num_steps)
        with clock.part("update"):
            self.scheduler.update_from_output(scheduled, output)

    @property
    def block_ids(self) -> list[Any]:
        return [self.scheduler.kv_cache_manager.get_block_ids(name) for name in self.scheduler.requests]


WORKS: dict[str, Callable[[], Work]] = {
    "decode 256": lambda: Decode(256, False),
    "decode 1024": lambda: Decode(1024, False),
    "decode 1024 async": lambda: Decode(1024, True),
    "cold": lambda: Prompt(MAX_NUM_ROUNDS, False),
    "cached": lambda: Prompt(NUM_PROMPTS_IN_POOL, True),
    "evicting": lambda: Prompt(NUM_PROMPTS_IN_POOL, False),
    **{f"hashes, {name}": lambda name=name: Hashes(name) for name in HASH_ALGOS},
    **{f"hashes, {name}, lookahead": lambda name=name: Hashes(name, 1) for name in HASH_ALGOS},
    "long": LongPrompt,
    "steps 1024": lambda: Steps(1024, "1 group", False),
    "steps 1024 async": lambda: Steps(1024, "1 group", True),
    "steps 256": lambda: Steps(256, "1 group", False),
    **{f"steps 256 async, {groups}": lambda groups=groups: Steps(256, groups, True) for groups in GROUPS},
}


def measure_memory() -> float:
    """Return the growth of resident memory by a new pool, in bytes a block."""
    engine.make_manager(NUM_PROMPTS_IN_POOL, PROMPT_LEN)  # what the first one imports does not count
    gc.collect()
    start = read_resident_bytes()
    manager = engine.make_manager(NUM_BLOCKS_OF_MEMORY, PROMPT_LEN)
    end = read_resident_bytes()
    del manager
    return (end - start) / NUM_BLOCKS_OF_MEMORY


def run_round(work: Work) -> dict[str, float]:
    clock = Clock()
    work.run(clock)
    return clock.seconds


def run_rounds(work: Work, num_rounds: int) -> list[dict[str, float]]:
    """Run a round that does not count, since the rivals' rounds before it have emptied the caches, and then those that do."""
    run_round(work)
    return [run_round(work) for _ in range(num_rounds)]


def main(rival: str) -> None:
    """Answer until stdin ends. Output of vLLM goes to stderr, without its warnings that there is no GPU."""
    logging.disable(logging.WARNING)
    answers, sys.stdout = sys.stdout, sys.stderr
    RIVALS[rival]()
    work: Work | None = None
    for line in sys.stdin:
        question, answer = line.strip(), None
        if question in WORKS:
            gc.enable()
            work = None
            gc.collect()
            gc.disable()
            work = WORKS[question]()
        elif question == "memory":
            answer = measure_memory()
        else:
            answer = work.block_ids if question == "block_ids" else run_rounds(work, int(question))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

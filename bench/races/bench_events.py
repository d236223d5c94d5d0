"""The cost of events: prompts of 8192 tokens and decoding, with the manager request by request and with a running batch.

Four managers do the same work: without events; with events taken outside the timed part, as a publisher's thread takes them;
with events taken by the engine after each prompt or step; and with events taken and encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pagepool
from bench.races.batch_rivals import Batched
from bench.races.bench_drop_in import CachedPrompt, EvictingPrompt, Prompt, cold_prompt
from bench.races.bench_running_batch import (
    NUM_DECODE_TURNS,
    NUM_STEPS,
    PAGES_PER_PROMPT,
    PROMPT_CASES,
    PROMPT_IDS,
    Decode,
    PromptCase,
    num_decode_pages,
)
from bench.races.race import EVENTS, Contender, Race, Work
from bench.races.rivals import MAX_MODEL_LEN, Rival

events = pytest.importorskip("pagepool.events")

NUM_TURNS = 10
NUM_ROWS = 1024
CONTEXT_LEN = 2048


class Told:
    """A contender whose manager records events."""

    def __init__(self, contender: Any, manager: Any) -> None:
        self.contender = contender
        self.manager = manager

    def prepare(self) -> None:
        self.contender.prepare()
        if self.manager.registry.event_source is not None:
            self.manager.take_events()

    def run(self) -> None:
        self.contender.run()

    @property
    def page_ids(self) -> Any:
        return self.contender.page_ids


class Taken(Told):
    """A contender that takes the events too."""

    def run(self) -> None:
        self.contender.run()
        self.taken = self.manager.take_events()


class Encoded(Taken):
    """A contender that encodes the events that it takes."""

    def run(self) -> None:
        super().run()
        self.payload = events.encode_batch(events.EventBatch(0.0, self.taken))


CONTENDERS = {"off": Told, "noted": Told, "taken": Taken, "encoded": Encoded}


def make_contenders(make: Callable[[bool], tuple[Any, Any]]) -> dict[str, Contender]:
    """Return contenders by name. `make` returns a contender, with events or without, and its manager."""
    return {name: cls(*make(name != "off")) for name, cls in CONTENDERS.items()}


@pytest.mark.parametrize("case", PROMPT_CASES, ids=PROMPT_IDS)
def test_prompt_in_a_batch(race: Race, case: PromptCase) -> None:
    def make(has_events: bool) -> tuple[Any, Any]:
        engine = Batched(case.num_prompts_in_pool * PAGES_PER_PROMPT + 1, 1)
        if has_events:
            engine.manager.enable_events()
        return case.make(engine, False), engine.manager

    race(make_contenders(make), Work(f"{case.name}, batch", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=EVENTS))


DROP_IN_PROMPTS: dict[str, Callable[[Any], Prompt]] = {
    "cold prompt": cold_prompt,
    "cached prompt": CachedPrompt,
    "evicting prompt": EvictingPrompt,
}


@pytest.mark.parametrize("name", DROP_IN_PROMPTS)
def test_prompt_in_a_manager(race: Race, name: str) -> None:
    class ToldRival(Rival):
        def __init__(self, has_events: bool) -> None:
            super().__init__("pagepool", pagepool, pagepool, pagepool)
            self.has_events = has_events

        def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
            manager = super().make_manager(num_pages, max_model_len)
            if self.has_events:
                manager.enable_events()
            return manager

    def make(has_events: bool) -> tuple[Any, Any]:
        contender = DROP_IN_PROMPTS[name](ToldRival(has_events))
        return contender, contender.manager

    race(make_contenders(make), Work(f"{name}, request by request", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=EVENTS))


def test_decode_in_a_batch(race: Race) -> None:
    def make(has_events: bool) -> tuple[Any, Any]:
        engine = Batched(num_decode_pages(NUM_ROWS, CONTEXT_LEN, NUM_DECODE_TURNS), NUM_ROWS)
        if has_events:
            engine.manager.enable_events()
        return Decode(engine, NUM_ROWS, CONTEXT_LEN), engine.manager

    name = f"decode: {NUM_ROWS} rows, {NUM_STEPS} steps, batch"
    race(make_contenders(make), Work(name, "row and step", NUM_ROWS * NUM_STEPS, NUM_DECODE_TURNS, suite=EVENTS))

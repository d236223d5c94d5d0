"""Pages of windows and chunks that stay cached: a request resumes at a boundary, and what it needs nowhere else is dropped."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from admissions import admission
from hybrids import manager_state
from managing import grouped
from refusing import refused
from settings import CHUNK_16, FULL_4, FULL_8, WINDOW_5, WINDOW_9, Group

import pagepool
from pagepool import CacheManager, RunningBatch
from pagepool.errors import ArgumentError, ArgumentTypeError

MAX_LEN, CHUNK = 400, 32
FULL_AND_WINDOW = (FULL_4, WINDOW_9)
LAYOUTS = [
    FULL_AND_WINDOW,
    (FULL_4, WINDOW_9, WINDOW_5, WINDOW_9),
    (FULL_4, CHUNK_16),
    (WINDOW_9,),
    (FULL_8, WINDOW_9, CHUNK_16),
    (FULL_4, Group("sliding", 4, 64)),
]


def retain(**settings: Any) -> pagepool.Retention:
    """Return settings for short prompts."""
    return pagepool.Retention(**{"window_slack": 8, "window_interval": 0} | settings)


class Rows:
    """A batch of one row at a time, with chunks of prompts and decoded answers."""

    def __init__(self, groups: tuple[Group, ...], windows: str = "ends", num_pages: int = 20_000, **options: Any) -> None:
        self.windows = windows
        if windows == "ends":
            options = {"retention": retain()} | options
        specs = [pagepool.CacheGroupSpec(group.spec(pagepool, "float16")) for group in groups]
        self.manager = CacheManager(num_pages, specs, MAX_LEN, **grouped(windows=windows, **options))
        sizes = [group.page_size for group in groups]
        self.batch = RunningBatch(self.manager, pagepool.MultiGroupPageTable(3, MAX_LEN, 64, sizes))

    def start(self, prompt: list[int], **options: Any) -> int:
        """Admit and compute a prompt; return what it hit."""
        num_hits = self.batch.admit(0, prompt, max_num_new_tokens=CHUNK, **admission(**options))
        assert num_hits is not None
        while self.batch.num_computed_tokens[0] < len(prompt):
            num_left = len(prompt) - int(self.batch.num_computed_tokens[0])
            assert self.batch.plan([0], min(CHUNK, num_left)).num_grown == 1
        return num_hits

    def run(self, prompt: list[int], answer: list[int] | tuple[int, ...] = (), **options: Any) -> int:
        """Compute a prompt, decode an answer and release the row; return what it hit."""
        num_hits = self.start(prompt, **options)
        for token in answer:
            assert self.batch.step([0], [token]).num_grown == 1
        self.batch.check()
        self.batch.release([0])
        self.manager.check()
        return num_hits


def draw(rng: Random, num_tokens: int) -> list[int]:
    return rng.choices(range(1 << 20), k=num_tokens)


def both(groups: tuple[Group, ...], **options: Any) -> tuple[Rows, Rows]:
    return Rows(groups, "all", **options), Rows(groups, "ends", **options)


@pytest.mark.parametrize("groups", LAYOUTS, ids=str)
@pytest.mark.parametrize("place", ["end of the prompt", "slack", "interval", "named", "junction", "end of the answer"])
@pytest.mark.parametrize("hash_lookahead", [0, 1, 3])
def test_a_request_resumes_at_a_boundary(groups: tuple[Group, ...], place: str, hash_lookahead: int) -> None:
    """As far as if all pages had stayed."""
    rng = Random(place)
    prompt, answer = draw(rng, 200), draw(rng, 120)
    num_shared = {"end of the prompt": 200, "slack": 192, "interval": 64, "named": 104, "junction": 88}.get(place, 320)
    num_hits = num_shared - hash_lookahead - (num_shared - hash_lookahead) % max(group.page_size for group in groups)
    retention = retain(window_interval=64 if place == "interval" else 0)
    for rows in both(groups, retention=retention, use_eagle=hash_lookahead > 0, hash_lookahead=hash_lookahead):
        rows.run(prompt, answer, resume_at=[106] if place == "named" else ())
        if place == "junction":
            hit = rows.run(prompt[:num_shared] + draw(rng, 30))
            assert hit == num_hits if rows.windows == "all" else hit <= num_hits
            if groups[0].kind != "full":
                continue  # nothing tells where requests part
        assert rows.run((prompt + answer)[:num_shared] + draw(rng, 30)) == num_hits


@pytest.mark.parametrize(
    ("groups", "interval"),
    [
        ((("full", 0), *[("sliding", 1024)] * 5), 16_384),  # Gemma 3
        ((("full", 0), ("sliding", 128)), 2048),  # gpt-oss
        ((("full", 0), *[("chunked", 8192)] * 3), 73_728),
        ((("sliding", 1024),), 4096),
    ],
    ids=str,
)
def test_the_default_interval_depends_on_the_model(groups: tuple[tuple[str, int], ...], interval: int) -> None:
    specs = [Group(kind, 16, span).spec(pagepool, "float16") for kind, span in groups]
    assert pagepool.group_rules.find_interval(specs) == interval


# --- leases of spans ----------------------------------------------------------------------------------------------


def test_a_prefix_whose_window_is_gone_is_not_leased() -> None:
    rows, prompt = Rows(FULL_AND_WINDOW, retention=retain(window_slack=0, max_leased_share=1.0)), draw(Random(11), 200)
    other = pagepool.EngineRequest("other", [*prompt[:106], 7])
    rows.start(prompt)
    with refused(lambda: manager_state(rows.manager), ArgumentError, r"stop: got 106, .* gone, .* resume_at=\[104\]"):
        rows.batch.lease(0, stop=106, seconds=600)
    with refused(lambda: manager_state(rows.manager), ArgumentError, r"stop: got 106, .* resume_at=\[104\]"):
        rows.manager.lease(other, stop=106, seconds=600)
    lease = rows.manager.lease(pagepool.EngineRequest("end", [*prompt, 7]), stop=200, seconds=600)
    assert len(lease) == 50 + 4  # the row has left no more of its last step
    rows.batch.release([0])
    with refused(lambda: manager_state(rows.manager), ArgumentError, r"resume_at=\[104\]"):
        rows.manager.lease(other, stop=106, seconds=600)


# --- the rest -----------------------------------------------------------------------------------------------------


def test_an_event_tells_of_each_entry_that_is_dropped() -> None:
    rows, prompt = Rows(FULL_AND_WINDOW, retention=retain(window_slack=0)), draw(Random(15), 64)
    rows.manager.enable_events()
    rows.batch.admit(0, prompt, max_num_new_tokens=CHUNK)
    events = rows.manager.take_events()
    rows.batch.plan([0], CHUNK)
    events += rows.manager.take_events()
    rows.batch.release([0])
    events += rows.manager.take_events()
    removed = [event for event in events if type(event).__name__ == "BlockRemoved"]
    stored = {key for event in events if event not in removed and event.group_idx == 1 for key in event.block_hashes}
    assert [(event.group_idx, len(event.block_hashes)) for event in removed] == [(1, 6), (1, 8)]
    assert len(stored) == 16
    assert {key for event in removed for key in event.block_hashes} < stored


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume_at", [[1, 2, 3, 4, 5], [-1], ["1"], 3, None], ids=str)
def test_a_request_with_wrong_places_gets_no_pages(resume_at: Any) -> None:
    manager = Rows(FULL_AND_WINDOW).manager
    request = pagepool.EngineRequest("wrong", [1, 2, 3], resume_at=resume_at)
    with refused(lambda: manager_state(manager), (ArgumentError, ArgumentTypeError), "resume_at"):
        manager.allocate_slots(request, 3)

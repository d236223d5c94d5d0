"""One step ahead: the next step is planned while one runs, so that its first token is not known yet. Keys and states that a
simulated device reads are checked; what would be wrong is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hybrids import CHUNK, FULL, NUM_ROWS, STATE, WINDOW, batch_state, keep_every, make_batch, make_manager, manager_state, take
from refusing import refused

from pagepool import CacheManager, EngineRequest, Retention, RunningBatch
from pagepool.errors import ArgumentError, StateAheadError

TOKENS = list(range(100, 164))
MAX_DRAFTS = 3
NUM_OUTPUT_TOKENS = 13
VOCABULARY = 97
BAD_DRAFT = 98


def next_token(token_ids: list[int]) -> int:
    return sum((i + 1) * token_id for i, token_id in enumerate(token_ids)) * 7919 % VOCABULARY


def generate(token_ids: list[int], num_tokens: int) -> list[int]:
    """Return a prompt and its answer."""
    for _ in range(num_tokens):
        token_ids = [*token_ids, next_token(token_ids)]
    return token_ids


# --- an engine that plans one step ahead ---------------------------------------------------------------------------


@dataclass(eq=False)
class Stay:
    """A stay of a request in a row; a preempted request comes back in another one."""

    name: str
    row: int | None
    token_ids: list[int]  # that the host knows


@dataclass
class Work:
    """What a step computes of a stay: its tokens from `start` on, or, with None, the token that the step before samples."""

    start: int | None
    num_drafts: int
    pages: tuple[list[int], ...] = ()
    drafts: list[int] = field(default_factory=list)


@dataclass
class Device:
    """Runs steps in order, and knows the tokens of a stay one step before the host does. It checks all that it reads."""

    specs: tuple[Any, ...]
    rng: Random
    cells: dict[tuple[int, int, int], int] = field(default_factory=dict)  # tokens by group, page and offset
    states: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # the tokens that a state has seen
    token_ids: dict[Stay, list[int]] = field(default_factory=dict)

    def run(self, copies: list[tuple[int, int, int]], works: dict[Stay, Work]) -> dict[Stay, list[int]]:
        """Copy pages, run a step, and return the tokens that it samples."""
        sources = [self.states.get((group, src), []) for src, _, group in copies]
        for (_, dst, group), seen in zip(copies, sources, strict=True):
            self.states[group, dst] = seen
        for stay, work in works.items():
            if work.start is not None:
                self.token_ids[stay] = list(stay.token_ids)
            self._write(work, self.token_ids[stay], self._start_of(work, self.token_ids[stay]))
        return {stay: self._sample(work, self.token_ids[stay]) for stay, work in works.items()}

    @staticmethod
    def _start_of(work: Work, token_ids: list[int]) -> int:
        return len(token_ids) - 1 if work.start is None else work.start

    def _write(self, work: Work, token_ids: list[int], start: int) -> None:
        """Write the keys of all tokens of the step, drafts too. The state moves on by those that are known."""
        for right in generate(token_ids, work.num_drafts)[len(token_ids) :]:
            work.drafts.append(right if self.rng.random() < 0.7 else BAD_DRAFT)
        for group, (spec, page_ids) in enumerate(zip(self.specs, work.pages, strict=True)):
            if type(spec) is type(STATE):
                seen = self.states.get((group, page_ids[0]), []) if start else []
                assert seen == token_ids[:start], f"a state of {len(seen)} tokens where {start} are due"
                self.states[group, page_ids[0]] = list(token_ids)
                continue
            for i, token_id in enumerate([*token_ids, *work.drafts][start:], start):
                page_id = page_ids[i // spec.page_size]
                assert page_id, f"no slot for token {i}"
                self.cells[group, page_id, i % spec.page_size] = token_id

    def _sample(self, work: Work, token_ids: list[int]) -> list[int]:
        """Check all keys that the step reads, and sample: after the drafts that are right, too."""
        start = self._start_of(work, token_ids)
        for group, (spec, page_ids) in enumerate(zip(self.specs, work.pages, strict=True)):
            first = 0
            if type(spec) is type(WINDOW):
                first = max(0, start - spec.sliding_window + 1)
            if type(spec) is type(CHUNK):
                first = start // spec.attention_chunk_size * spec.attention_chunk_size
            for i in range(first, len(token_ids) if type(spec) is not type(STATE) else 0):
                found = self.cells[group, page_ids[i // spec.page_size], i % spec.page_size]
                assert page_ids[i // spec.page_size], f"token {i} of group {group} has no page"
                assert found == token_ids[i], f"a wrong key at token {i} of group {group}"
        sampled: list[int] = []
        for draft in [*work.drafts, None]:
            sampled.append(next_token(token_ids + sampled))
            if draft != sampled[-1]:
                break
        token_ids += sampled
        return sampled


class Engine:
    """Serves prompts, and launches a step before it knows the tokens of the step before. Pages that are short preempt rows."""

    def __init__(self, specs: tuple[Any, ...], num_pages: int, num_drafts: int, rng: Random) -> None:
        self.manager = make_manager(*specs, num_pages=num_pages, retention=Retention(window_slack=4, window_interval=16))
        self.batch = make_batch(self.manager)
        self.device, self.rng, self.num_drafts = Device(specs, rng), rng, num_drafts
        self.running: list[Stay] = []
        self.in_flight: dict[Stay, Work] = {}
        self.counts = {"hits": 0, "preempted": 0, "stale": 0, "waited": 0}

    def serve(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        """Return each prompt with its answer."""
        waiting, done = deque(prompts.items()), {}
        copies = []
        while waiting or self.running or self.in_flight:
            works = self._grow(waiting) | self._admit(waiting)
            for stay, work in works.items():
                assert stay.row is not None
                work.pages = self.batch.get_page_ids(stay.row)
            launched, copies = (copies, self.in_flight), take(self.batch)
            for stay, sampled in self.device.run(*launched).items():
                if stay.row is None:  # it ended or was preempted since
                    self.counts["stale"] += len(sampled)
                    continue
                num_left = len(prompts[stay.name]) + NUM_OUTPUT_TOKENS - len(stay.token_ids)
                stay.token_ids += sampled[:num_left]
                if num_left <= len(sampled):
                    done[stay.name] = stay.token_ids
                    self._leave(stay)
                else:
                    self.batch.append([stay.row] * len(sampled), sampled)
            self.in_flight = works
        self.batch.check()
        assert self.manager.stats().num_held_pages == 0
        return done

    def _grow(self, waiting: deque[tuple[str, list[int]]]) -> dict[Stay, Work]:
        works, i = {}, 0
        while i < len(self.running):
            stay = self.running[i]
            row, is_in_flight = stay.row, stay in self.in_flight
            num_new = int(self.batch.num_tokens[row] - self.batch.num_computed_tokens[row])
            num_ahead = self.num_drafts + (self.num_drafts + 1) * is_in_flight
            try:
                num_grown = self.batch.grow([row], num_new, num_ahead).num_grown
                works[stay] = Work(None if is_in_flight else len(stay.token_ids) - 1, self.num_drafts)
            except StateAheadError:
                num_grown = self.batch.grow([row], num_new, 0).num_grown
                assert is_in_flight  # the row waits for its token
                self.counts["waited"] += 1
            if num_grown == 0:
                gone = self.running[-1]
                self._leave(gone)
                works.pop(gone, None)
                waiting.appendleft((gone.name, gone.token_ids))  # the tokens in flight are computed again
                self.counts["preempted"] += 1
                continue
            i += 1
        return works

    def _admit(self, waiting: deque[tuple[str, list[int]]]) -> dict[Stay, Work]:
        """Admit with room for drafts, or without: by a further call for the step."""
        works = {}
        free_rows = [row for row in range(NUM_ROWS) if not self.batch.is_admitted[row]]
        while waiting and free_rows:
            name, token_ids = waiting[0]
            row = free_rows.pop()
            num_hits = self.batch.admit(row, token_ids)
            if num_hits is None:
                break
            waiting.popleft()
            stay = Stay(name, row, list(token_ids))
            self.running.append(stay)
            num_drafts = self.rng.randint(0, self.num_drafts)
            if num_drafts and self.batch.grow([row], 0, num_drafts).num_grown == 0:
                num_drafts = 0
            works[stay] = Work(num_hits, num_drafts)
            self.counts["hits"] += num_hits
        return works

    def _leave(self, stay: Stay) -> None:
        self.batch.release([stay.row])
        self.running.remove(stay)
        stay.row = None


LAYOUTS: dict[str, tuple[Any, ...]] = {
    "full": (FULL,),
    "full and window": (FULL, WINDOW),
    "full and chunk": (FULL, CHUNK),
    "window": (WINDOW,),
    "full and state": (FULL, STATE),
    "state": (STATE,),
    "states, window and full": (keep_every(4), WINDOW, FULL, STATE),
    "full and a state that is not kept": (FULL, keep_every(None)),
}
CASES = [
    (name, num_drafts)
    for name, specs in LAYOUTS.items()
    for num_drafts in range(1 if any(type(spec) is type(STATE) for spec in specs) else 1 + MAX_DRAFTS)
]


def is_kept(spec: Any) -> bool:
    return getattr(spec, "checkpoint_interval", 0) is not None


@pytest.mark.parametrize(("name", "num_drafts"), CASES)
@pytest.mark.parametrize("share", [1, 0.3])
def test_answers_are_right_one_step_ahead(name: str, num_drafts: int, share: float) -> None:
    """With pages for all rows, and for few; rows wait a step where lookahead is refused."""
    specs, rng = LAYOUTS[name], Random(f"{name} {num_drafts} {share}")
    base = [rng.randrange(VOCABULARY) for _ in range(17)]
    prompts = {f"{i}": base[: rng.randint(4, 16)] + [rng.randrange(VOCABULARY) for _ in range(i % 8 + 1)] for i in range(10)}
    prompts |= {f"{name} again": [*generate(prompt, NUM_OUTPUT_TOKENS), 5, 6] for name, prompt in prompts.items()}
    attention = [spec for spec in specs if type(spec) is not type(STATE)]
    num_pages = int(share * 20 * NUM_ROWS * max(1, len(attention))) + 3 * NUM_ROWS * (len(specs) - len(attention)) + 20
    engine = Engine(specs, num_pages, num_drafts, rng)
    assert engine.serve(prompts) == {name: generate(prompt, NUM_OUTPUT_TOKENS) for name, prompt in prompts.items()}
    assert engine.counts["stale"] > 0
    assert engine.counts["hits"] > 0 or share < 1 or not all(map(is_kept, specs))
    assert (engine.counts["waited"] > 0) == (STATE in specs)


@pytest.mark.parametrize("num_drafts", range(1 + MAX_DRAFTS))
@pytest.mark.parametrize("name", ["full and state", "states, window and full"])
def test_states_that_are_restored_are_right_with_drafts(name: str, num_drafts: int) -> None:
    """The recipe of docs/hybrids.md: lookahead passes checkpoints, and the state behind the counted tokens is written back."""
    specs, rng = LAYOUTS[name], Random(f"{name} {num_drafts}")
    batch = make_batch(make_manager(*specs, num_pages=100), restores_states=True)
    states: dict[int, list[int]] = {}
    num_hits = 0

    def copy() -> None:
        moved = {dst: states.get(src, []) for src, dst, group in take(batch) if type(specs[group]) is type(STATE)}
        states.update(moved)

    def working_pages() -> list[int]:
        return [ids[0] for spec, ids in zip(specs, batch.get_page_ids(0), strict=True) if type(spec) is type(STATE)]

    def compute(start: int, tokens: list[int]) -> None:
        """Check the states, and move them on to all tokens."""
        assert all(states.get(page_id, []) == tokens[:start] for page_id in working_pages() if start)
        states.update(dict.fromkeys(working_pages(), tokens))

    for _ in range(40):
        token_ids = TOKENS[: rng.randint(1, 40)]
        num_cached = batch.admit(0, token_ids, ends_at_checkpoint=True)
        copy()
        compute(num_cached or 0, token_ids[: int(batch.num_computed_tokens[0])])
        num_hits += num_cached or 0
        num_final_tokens = rng.randint(len(token_ids), 56)
        while (num_computed := int(batch.num_computed_tokens[0])) < num_final_tokens:
            if num_computed == len(token_ids):
                token_ids = TOKENS[: num_computed + 1]
                batch.append([0], token_ids[-1:])
            batch.grow([0], len(token_ids) - num_computed, num_drafts)
            copy()
            drafts = TOKENS[len(token_ids) :][:num_drafts]
            compute(num_computed, token_ids + drafts)
            states.update(dict.fromkeys(working_pages(), token_ids))  # it is restored
            num_accepted = rng.randint(0, num_drafts)
            token_ids = token_ids + drafts[:num_accepted]
            batch.append([0] * num_accepted, drafts[:num_accepted])
            batch.grow([0], num_accepted)
            copy()
            states.update(dict.fromkeys(working_pages(), token_ids))
        batch.release([0])
    assert num_hits > 0


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_state_that_a_step_in_flight_moves_on_is_no_checkpoint() -> None:
    batch = make_batch(make_manager())
    batch.admit(0, TOKENS[:7])
    batch.grow([0], 0, 1)  # the step that computes the 8th token, which is not known
    batch.append([0], [TOKENS[7]])
    with refused(lambda: batch_state(batch), StateAheadError, "^row 0: lookahead to token 9 passes the checkpoint after 8, "):
        batch.grow([0], 1, 1)
    batch.grow([0], 1, 0)
    batch.append([0], [TOKENS[8]])
    batch.release([0])
    assert batch.admit(1, [*TOKENS[:8], 1, 2]) == 8  # nothing was computed behind it


ROWS_AHEAD = [  # tokens admitted, appended, new, ahead, and the checkpoint that is passed
    (7, 0, 0, 1, None),
    (7, 0, 0, 2, 8),
    (7, 0, 0, 64, 8),
    (7, 1, 1, 0, None),
    (7, 1, 1, 1, 8),
    (7, 1, 0, 1, None),
    (7, 1, 0, 2, 8),
    (7, 2, 2, 7, None),
    (7, 2, 2, 8, 16),
    (8, 0, 0, 0, None),
    (8, 0, 0, 1, 8),  # perhaps a further call for the step that computes the 8th token
    (8, 1, 1, 0, None),
    (8, 1, 1, 7, None),  # the checkpoint is kept by this call
    (8, 1, 1, 8, 16),
    (9, 0, 0, 7, None),
    (9, 7, 7, 0, None),
    (9, 7, 7, 1, 16),
    (9, 8, 8, 7, None),
    (9, 8, 7, 2, 16),
]


@pytest.mark.parametrize(("num_admitted", "num_appended", "num_new", "num_ahead", "passed"), ROWS_AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,), (FULL, keep_every(4), STATE), (WINDOW, STATE, FULL)])
def test_lookahead_of_rows_ends_at_checkpoints(
    specs: tuple[Any, ...], num_admitted: int, num_appended: int, num_new: int, num_ahead: int, passed: int | None
) -> None:
    for restores_states in (False, True):
        batch = make_batch(make_manager(*specs), restores_states=restores_states)
        batch.admit(0, [1, 2, 3])
        batch.admit(1, TOKENS[:num_admitted])
        batch.append([1] * num_appended + [0], TOKENS[num_admitted:][: num_appended + 1])
        if passed is None or restores_states:
            assert batch.grow([0, 1], [1, num_new], [0, num_ahead]).num_grown == 2
            continue
        message = f"^row 1: lookahead to token {min(64, num_admitted + num_new + num_ahead)} passes .* after {passed}, "
        with refused(lambda: batch_state(batch), StateAheadError, message):  # noqa: B023
            batch.grow([0, 1], [1, num_new], [0, num_ahead])
        assert batch.grow([0, 1], [1, num_new], [0, passed - num_admitted - num_new]).num_grown == 2


@pytest.mark.parametrize(("num_admitted", "num_appended", "num_new", "num_ahead", "passed"), ROWS_AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,)])
@pytest.mark.parametrize("are_drafts_new", [False, True])
def test_lookahead_of_requests_ends_at_checkpoints(
    specs: tuple[Any, ...],
    are_drafts_new: bool,
    num_admitted: int,
    num_appended: int,
    num_new: int,
    num_ahead: int,
    passed: int | None,
) -> None:
    """Tokens that the request does not know are drafts, too, whatever the argument that has them."""
    if num_new == 0 or (are_drafts_new and num_new < num_appended):
        return
    for restores_states in (False, True):
        manager = make_manager(*specs, restores_states=restores_states)
        request = EngineRequest("a", TOKENS[:num_admitted])
        manager.allocate_slots(request, num_admitted)
        request.num_computed_tokens = num_admitted
        request.append_output_token_ids(TOKENS[num_admitted:][:num_appended])
        num_drafts = min(num_ahead, 64 - num_admitted - num_new) if are_drafts_new else 0

        def grow(manager: CacheManager = manager, request: EngineRequest = request, num_drafts: int = num_drafts) -> Any:
            return manager.allocate_slots(request, num_new + num_drafts, num_lookahead_tokens=num_ahead - num_drafts)

        if passed is None or restores_states:
            assert grow() is not None
            continue
        message = f"^request 'a': lookahead to token {num_admitted + num_new + num_ahead} passes .* after {passed}, "
        with refused(lambda: manager_state(manager), StateAheadError, message):  # noqa: B023
            grow()
        assert manager.allocate_slots(request, num_new) is not None


def test_lookahead_at_admission_ends_at_checkpoints() -> None:
    manager = make_manager()
    first = EngineRequest("first", TOKENS[:17])
    assert manager.allocate_slots(first, 8) is not None
    first.num_computed_tokens = 8
    assert manager.allocate_slots(first, 9) is not None
    manager.take_copies()
    manager.free(first)
    request = EngineRequest("a", TOKENS[:15])
    for num_ahead in (9, 1000):
        with refused(lambda: manager_state(manager), StateAheadError, "passes the checkpoint after 8, "):
            manager.allocate_slots(request, 7, num_lookahead_tokens=num_ahead)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    assert num_hit_tokens == 8
    with refused(lambda: manager_state(manager), StateAheadError, "lookahead to token 17 passes the checkpoint after 16, "):
        manager.allocate_slots(request, 7, 8, hits, 2)
    assert manager.allocate_slots(request, 7, 8, hits, 1) is not None  # behind the checkpoint that was hit


def test_tokens_from_elsewhere_count_for_lookahead() -> None:
    manager, request = make_manager(), EngineRequest("a", TOKENS[:20])
    options: dict[str, Any] = {"num_external_computed_tokens": 15, "delay_cache_pages": True}
    with refused(lambda: manager_state(manager), StateAheadError, "lookahead to token 17 passes the checkpoint after 16, "):
        manager.allocate_slots(request, 0, num_lookahead_tokens=2, **options)
    assert manager.allocate_slots(request, 0, num_lookahead_tokens=1, **options) is not None


def test_lookahead_after_a_set_back_ends_at_checkpoints_that_were_made_before() -> None:
    manager = make_manager(FULL, STATE)
    request = EngineRequest("a", TOKENS[:30])
    for num_tokens in (8, 8, 4):
        assert manager.allocate_slots(request, num_tokens) is not None
        manager.take_copies()
        request.num_computed_tokens += num_tokens
    request.num_computed_tokens = 5  # the engine has restored the state of 5 tokens
    with refused(lambda: manager_state(manager), StateAheadError, "after 8,"):
        manager.allocate_slots(request, 3, num_lookahead_tokens=4)
    assert manager.allocate_slots(request, 2, num_lookahead_tokens=1) is not None


def test_a_request_that_counts_tokens_of_steps_in_flight_may_go_on() -> None:
    """Its computed tokens include one that it does not know, so no checkpoint is made there."""
    manager, request = make_manager(), EngineRequest("a", TOKENS[:7])
    manager.allocate_slots(request, 7)
    for num_computed in range(7, 24):
        request.num_computed_tokens = num_computed
        assert manager.allocate_slots(request, 1) is not None
        manager.take_copies()
        request.append_output_token_ids(TOKENS[num_computed])
    manager.free(request)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (FULL, keep_every(None))])
@pytest.mark.parametrize("enable_caching", [True, False])
def test_models_without_checkpoints_may_look_ahead_anywhere(specs: tuple[Any, ...], enable_caching: bool) -> None:
    look_ahead_anywhere(lambda: make_manager(*specs, enable_caching=enable_caching))


def test_without_caching_no_state_is_kept() -> None:
    look_ahead_anywhere(lambda: make_manager(FULL, STATE, enable_caching=False))


def look_ahead_anywhere(make: Callable[[], CacheManager]) -> None:
    batch, manager = make_batch(make()), make()
    batch.admit(0, TOKENS[:7])
    assert batch.grow([0], 0, 30).num_grown == 1
    request = EngineRequest("a", TOKENS[:7])
    assert manager.allocate_slots(request, 7, num_lookahead_tokens=30) is not None


def ways_behind(batch: RunningBatch) -> dict[str, Callable[[], Any]]:
    return {
        "cut": lambda: batch.trim([0], 7),
        "moved": lambda: (batch.move_row(0, 2), batch.move_row(2, 0)),
        "forked": lambda: (batch.fork(0, [1]), batch.take_copies(), batch.release([0]), batch.move_row(1, 0)),
        "undone": lambda: (batch.append([0], [TOKENS[7]]), batch.undo(batch.grow([0], 1, 0)), batch.trim([0], 7)),
    }


@pytest.mark.parametrize("way", ways_behind(make_batch(make_manager())))
def test_no_way_leads_behind_a_checkpoint(way: str) -> None:
    """Where rows were cut, moved, forked or undone, the next checkpoint is guarded as before, and may be kept."""
    batch = make_batch(make_manager())
    batch.admit(0, TOKENS[:7])
    ways_behind(batch)[way]()
    with refused(lambda: batch_state(batch), StateAheadError):
        batch.grow([0], 0, 2)
    batch.append([0], [TOKENS[7]])
    with refused(lambda: batch_state(batch), StateAheadError):
        batch.grow([0], 1, 1)
    batch.grow([0], 1)
    batch.release([0])
    assert batch.admit(3, [*TOKENS[:8], 1]) == 8


# --- further calls for a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [WINDOW, CHUNK])
@pytest.mark.parametrize("windows", ["ends", "all"])
def test_a_row_without_new_tokens_gives_no_pages_back(spec: Any, windows: str) -> None:
    """The step that computes its tokens may not have run."""
    batch = make_batch(make_manager(FULL, spec, windows=windows, retention=Retention(window_slack=0, window_interval=0)))
    batch.admit(0, TOKENS[:21])
    held = batch.get_page_ids(0)
    for num_ahead in (0, 1, 4):
        assert batch.grow([0], 0, num_ahead).num_grown == 1
        assert [ids[:6] for ids in batch.get_page_ids(0)] == list(held)
    assert batch._manager.page_pool.get_num_free_pages() == 39 - 2 * 7
    batch.append([0], [1])
    batch.grow([0], 1)
    assert batch.get_page_ids(0)[1][:4] == [0] * 4


def test_a_row_without_new_tokens_keeps_no_checkpoint() -> None:
    batch = make_batch(make_manager(), restores_states=True)
    batch.admit(0, TOKENS[:8])
    batch.grow([0], 0, 3)
    assert take(batch) == []
    batch.append([0], [TOKENS[8]])
    batch.grow([0], 1)
    assert len(take(batch)) == 1


def test_a_row_without_new_tokens_shares_no_page() -> None:
    """Its step may still write there."""
    batch = make_batch(make_manager(FULL), dedupe=True)
    batch.admit(0, TOKENS[:8])
    batch.admit(1, TOKENS[:8])  # it hits the first page, and computes the second
    held = batch.get_page_ids(1)
    batch.grow([0, 1], 0, 1)
    assert [ids[:2] for ids in batch.get_page_ids(1)] == list(held)
    batch.step([0, 1], [1, 1])
    assert batch.get_page_ids(1)[0][:2] == batch.get_page_ids(0)[0][:2]


def test_a_request_gets_new_tokens_by_each_call() -> None:
    manager, request = make_manager(FULL, WINDOW), EngineRequest("a", TOKENS[:21])
    manager.allocate_slots(request, 21)
    held = manager.get_page_ids("a")
    with refused(lambda: manager_state(manager), ArgumentError, "num_new_tokens must be at least 1, got 0"):
        manager.allocate_slots(request, 0, num_lookahead_tokens=1)
    assert manager.allocate_slots(request, 21, num_lookahead_tokens=4) is not None  # a further call for the same step
    assert [ids[:6] for ids in manager.get_page_ids("a")] == list(held)

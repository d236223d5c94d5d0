"""Steps that fail behind a store: nothing that was never computed may hit, now or after a restart.

An engine plans steps one or more ahead, and a failure is found some steps later, when its pages may have been saved. Pages hold
their tokens, and states a checksum of all tokens. A step that fails writes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from lying_store import LyingStore

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    PageHashing,
    RunningBatch,
    SlidingWindowSpec,
    StateWrites,
    StepResult,
)
from pagepool._core import list_absent
from pagepool.stores import StoreTier
from pagepool.stores.frames import HEADER_BYTES, is_intact
from pagepool.stores.pages import Pages

pytest.importorskip("xxhash")

PAGE_SIZE, NUM_ROWS, MAX_TOKENS, CHUNK, INTERVAL = 4, 2, 128, 12, 16
NUM_PAGES, NUM_HOST_PAGES, NUM_STATES = 41, 90, 15
NAMESPACE = "failed steps"
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32", "use_mla": False}
FULL = FullAttentionSpec(PAGE_SIZE, **SHAPE)
WINDOW = SlidingWindowSpec(PAGE_SIZE, sliding_window=9, **SHAPE)
STATE = MambaSpec(PAGE_SIZE, ((4,),), "float32", checkpoint_interval=INTERVAL)
KINDS = {"full": [FULL], "window": [FULL, WINDOW], "hybrid": [FULL, STATE]}


def find_state(token_ids: Sequence[int]) -> list[int]:
    """Return the content of the state behind tokens."""
    return [zlib.crc32(np.array(token_ids, dtype=np.int64).tobytes()) | 1 << 40] * PAGE_SIZE


def make_manager(kind: str, policy: Any = "write_through", num_host_pages: int = NUM_HOST_PAGES) -> CacheManager:
    pools = [{"pool": "states"} if isinstance(spec, MambaSpec) else {} for spec in KINDS[kind]]
    groups = [CacheGroupSpec(spec, **pool) for spec, pool in zip(KINDS[kind], pools, strict=True)]
    has_states = kind == "hybrid"
    sizes: Any = {"kv": NUM_PAGES, "states": NUM_STATES} if has_states else NUM_PAGES
    host_sizes: Any = {"kv": num_host_pages, "states": 2 * NUM_STATES} if has_states else num_host_pages
    tier = HostTier(host_sizes, policy=policy)
    return CacheManager(sizes, groups, MAX_TOKENS, host_tier=tier, hashing=PageHashing(hash_algo="sha256"))


def list_contents(kind: str, prompts: Sequence[Sequence[int]]) -> dict[bytes, list[int]]:
    """Return what the pages of prompts hold, by their names in a store."""
    contents: dict[bytes, list[int]] = {}
    for prompt in prompts:
        manager = make_manager(kind)
        longer = EngineRequest("names", [*prompt, 0])  # a hit leaves a token to compute
        chain = manager.registry.hash_apart(longer, longer.num_tokens)
        keys, groups, _, _ = list_absent(manager._store, manager._rules.groups, chain, longer.num_tokens)
        places = [0] * len(KINDS[kind])
        for group, name in zip(groups.tolist(), Pages(keys, groups).name(), strict=True):
            is_state = isinstance(KINDS[kind][group], MambaSpec)
            start, size = places[group], INTERVAL if is_state else PAGE_SIZE
            places[group] += size
            contents[name] = find_state(prompt[: start + size]) if is_state else list(prompt[start : start + size])
    return contents


class Engine:
    """An engine whose steps may fail. `front` is ``"batch"`` or ``"manager"``."""

    def __init__(self, kind: str, front: str, objects: dict[bytes, bytes], rng: Random, delay: int, write: str) -> None:
        self.kind, self.front, self.rng = kind, front, rng
        policy, num_host_pages = rng.choice((("write_through", NUM_HOST_PAGES), ("write_back", 25)))
        self.manager = make_manager(kind, policy, num_host_pages)
        self.has_states = kind == "hybrid"
        sizes = [NUM_STATES if isinstance(spec, MambaSpec) else NUM_PAGES for spec in KINDS[kind]]
        host_sizes = [2 * NUM_STATES if isinstance(spec, MambaSpec) else num_host_pages for spec in KINDS[kind]]
        self.device = [np.full((size, PAGE_SIZE), -1) for size in sizes]
        self.host = [np.full((size, PAGE_SIZE), -2) for size in host_sizes]
        table = MultiGroupPageTable(NUM_ROWS, MAX_TOKENS, MAX_TOKENS, page_sizes=[PAGE_SIZE] * len(sizes))
        self.batch = RunningBatch(self.manager, table, max_steps_ahead=delay)
        self.store = LyingStore(objects, rng, delay=rng.choice((0, 2)))
        rows = [pages.view(np.uint8) for pages in self.host]
        self.stored = StoreTier(self.manager, self.store, rows, NAMESPACE, write=write, deadline_ms=1e6)  # type: ignore[arg-type]
        self.running: dict[int, tuple[EngineRequest, list[tuple[int, int, int]]]] = {}  # by row: step, first and last token
        self.steps: dict[int, StepResult] = {}  # the batch's steps that may still fail, by their number
        self.step, self.num_hits, self.delay = 0, 0, delay

    def find_step(self) -> StepResult:
        """Return the batch's step that is being planned."""
        return self.steps.setdefault(self.step, self.batch.new_step())

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Begin a request, and check all that it hits."""
        request = EngineRequest(f"{row} {self.step}", prompt)
        self.stored.fetch(request)
        while not self.stored.is_ready(request):
            pass
        num = min(CHUNK, len(prompt))
        if self.front == "batch":
            num_hit_tokens = self.batch.admit(row, prompt, max_num_new_tokens=num, step=self.find_step())
            if num_hit_tokens is None:
                return
        else:
            pages, num_hit_tokens = self.manager.get_computed_pages(request)
            num = min(num, len(prompt) - num_hit_tokens)
            if self.manager.allocate_slots(request, num, num_hit_tokens, pages) is None:
                return
        request.num_computed_tokens = num_hit_tokens
        self.running[row] = request, []
        self.plan(row, num_hit_tokens)
        self.num_hits += num_hit_tokens > 0

    def plan(self, row: int, start: int) -> None:
        """Note the part of a request that the step computes, after it was given slots."""
        request, parts = self.running[row]
        stop = int(self.batch.num_computed_tokens[row]) if self.front == "batch" else min(request.num_tokens, start + CHUNK)
        parts.append((self.step, start, stop))
        request.num_computed_tokens = stop

    def grow(self, row: int) -> None:
        """Give the next part of a request slots, if there are any."""
        request, _ = self.running[row]
        start = request.num_computed_tokens
        num = min(CHUNK, request.num_tokens - start)
        if self.front == "batch":
            step = self.find_step()
            self.batch.plan([row], num, step=step)
            if step.num_grown:
                self.plan(row, start)
        elif self.manager.allocate_slots(request, num) is not None:
            self.plan(row, start)

    def get_page_ids(self, row: int) -> Sequence[Sequence[int]]:
        if self.front == "batch":
            return self.batch.get_page_ids(row)
        return self.manager.get_page_ids(self.running[row][0].request_id)

    def move(self) -> StateWrites:
        """Make saves, loads and copies, in the order of the device. Return the states that the step writes."""
        transfers = (self.batch if self.front == "batch" else self.manager).take_moves()
        saved = [
            (group, target, self.device[group][source].copy())
            for source, target, group in zip(transfers.saves.src, transfers.saves.dst, transfers.saves.group, strict=True)
        ]
        for source, target, group in zip(transfers.loads.src, transfers.loads.dst, transfers.loads.group, strict=True):
            self.device[group][target] = self.host[group][source]
        for group, target, row in saved:
            self.host[group][target] = row
        if transfers.number:
            self.manager.complete(transfers.number)
        copies = transfers.copies
        for group, source, target in zip(copies.group, copies.src, copies.dst, strict=True):
            self.device[group][target] = self.device[group][source]
        return transfers.writes

    def run(self, fails: bool) -> None:
        """Run the planned step. If it fails, its pages and states keep what they had."""
        writes = self.move()
        for row, (request, parts) in self.running.items():
            if not parts or parts[-1][0] != self.step:
                continue
            _, start, stop = parts[-1]
            page_ids = self.get_page_ids(row)
            self.check_hit(request, page_ids, start, parts)
            tokens = list(request.prompt_token_ids)
            for group, ids in enumerate(page_ids if not fails else ()):
                if isinstance(KINDS[self.kind][group], MambaSpec):
                    self.device[group][ids[0]] = find_state(tokens[:stop])
                    continue
                for position in range(start, stop):
                    self.device[group][ids[position // PAGE_SIZE], position % PAGE_SIZE] = tokens[position]
        for row, num, page_id in zip(writes.rows, writes.num_tokens, writes.page_ids, strict=True):
            if not fails:
                self.device[1][page_id] = find_state(list(self.running[int(row)][0].prompt_token_ids)[:num])
        self.step += 1

    def check_hit(self, request: EngineRequest, page_ids: Sequence[Sequence[int]], start: int, parts: Sequence[Any]) -> None:
        """Compare what a request hit, unless a step in flight that failed may have computed it."""
        if len(parts) > 1 or self.failed_at is not None:
            return
        tokens = list(request.prompt_token_ids)
        for group, ids in enumerate(page_ids):
            spec = KINDS[self.kind][group]
            if isinstance(spec, MambaSpec):
                assert not start or self.device[group][ids[0]].tolist() == find_state(tokens[:start])
                continue
            first = max(0, start - 8) // PAGE_SIZE * PAGE_SIZE if spec is WINDOW else 0
            for position in range(first, start):
                assert self.device[group][ids[position // PAGE_SIZE], position % PAGE_SIZE] == tokens[position]

    failed_at: int | None = None

    def end(self, row: int, num_computed_tokens: int | None) -> None:
        """Release a request, with the tokens that were computed if a step failed."""
        request, _ = self.running.pop(row)
        if self.front == "batch":
            self.batch.release([row])
        else:
            self.manager.free(request, num_computed_tokens=num_computed_tokens)

    def settle(self) -> None:
        """End the batch's steps that cannot fail any more."""
        for step in [step for step in self.steps if step < self.step - self.delay]:
            self.batch.settle(self.steps.pop(step))

    def take_back(self, failed_at: int) -> None:
        """Let rows go back to before the failed step. Requests of the manager are freed, those admitted last first, since they
        may have read what the failed step did not write.
        """
        if self.front == "batch":
            for row in self.batch.settle(self.steps[failed_at], failed=True).tolist():
                del self.running[row]
            self.steps = {step: result for step, result in self.steps.items() if step < failed_at}
            for row, (request, parts) in self.running.items():
                request.num_computed_tokens = stop = int(self.batch.num_computed_tokens[row])
                parts[:] = [(step, start, min(end, stop)) for step, start, end in parts if step < failed_at and start < stop]
            return
        for row in sorted(self.running, key=lambda row: -self.running[row][1][0][0]):
            parts = self.running[row][1]
            starts = [start for step, start, _ in parts if step >= failed_at]
            self.end(row, 0 if parts[0][0] > failed_at else min(starts) if starts else parts[-1][2])


def check_objects(objects: dict[bytes, bytes], contents: dict[bytes, list[int]]) -> int:
    """Compare the objects that can hit. Return their number."""
    intact = {name: item for name, item in objects.items() if is_intact(item, NAMESPACE, name)}
    for name, item in intact.items():
        assert np.frombuffer(item[HEADER_BYTES:], np.int64).tolist() == contents[name]
    return len(intact)


@pytest.mark.parametrize("num_late", [0, 1, 4], ids=["at the end of the step", "while the next is planned", "late"])
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "front"),
    [("full", "batch"), ("window", "batch"), ("hybrid", "batch"), ("full", "manager"), ("window", "manager")],
)
def test_what_a_failed_step_did_not_compute_never_hits(kind: str, front: str, num_ahead: int, num_late: int) -> None:
    """A failure is found `num_late` steps later, or `num_ahead` if that is more. The engine stops at times and starts again."""
    rng = Random(f"{kind} {front} {num_ahead} {num_late}")
    stems = [rng.choices(range(5), k=40) for _ in range(4)]
    prompts = [[*stem[: rng.randrange(8, 40)], *rng.choices(range(5), k=rng.randrange(1, 30))] for stem in stems * 5]
    contents = list_contents(kind, prompts)
    objects: dict[bytes, bytes] = {}
    num_failed = num_restarts = num_intact = num_hits = 0
    write = rng.choice(("through", "through", "evicted"))
    delay = max(num_ahead, num_late)
    engine = Engine(kind, front, objects, rng, delay, write)
    for _ in range(250):
        for row in range(NUM_ROWS):
            if row not in engine.running:
                if rng.random() < 0.6:
                    engine.admit(row, rng.choice(prompts))
                continue
            request, parts = engine.running[row]
            if request.num_computed_tokens < request.num_tokens:
                engine.grow(row)
            elif engine.step - parts[-1][0] > delay and engine.failed_at is None:
                engine.end(row, None)
        fails = engine.failed_at is not None or rng.random() < 0.1
        if (
            fails
            and engine.failed_at is None
            and any(parts and parts[-1][0] == engine.step for _, parts in engine.running.values())
        ):
            engine.failed_at = engine.step
            num_failed += 1
        engine.run(fails and engine.failed_at is not None)
        if rng.random() < 0.5:
            engine.stored.poll()
        if num_late <= 1:
            check_objects(objects, contents)  # at any time
        if engine.failed_at is not None and engine.step - engine.failed_at > delay:
            engine.take_back(engine.failed_at)
            engine.failed_at = None
        if engine.failed_at is None:
            engine.settle()
        if engine.failed_at is None and rng.random() < 0.05:
            for row in list(engine.running):
                engine.end(row, 0)
            for _ in range(6):
                engine.move()
            num_intact += check_objects(objects, contents)
            num_hits += engine.num_hits
            if rng.random() < 0.5:
                engine.stored.close(drain_seconds=rng.choice((0.0, 1.0)))
            write = rng.choice(("through", "through", "evicted"))
            engine = Engine(kind, front, objects, rng, delay, write)
            num_restarts += 1
    assert num_failed > 3
    assert num_restarts > 1
    assert num_hits > 3
    assert num_intact > 20

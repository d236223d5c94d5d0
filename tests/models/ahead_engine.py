"""An engine that plans steps ahead of a device which checks what it reads: keys and values of each token, and states.

The device knows each token's history, the tuple of all tokens up to it. A planned step is launched at once, and runs later, in
order; the host knows the tokens that it samples only then. Copies of a step run before its model does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from twins import copies_of

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import StateAheadError

PAGE_SIZE, WINDOW, MAX_LEN, NUM_ROWS, CHUNK = 4, 9, 192, 4, 40
VOCABULARY, LAST_TOKEN = 23, 5
FULL, STATE, SLIDING = range(3)  # groups

Tokens = tuple[int, ...]


class WrongRead(AssertionError):
    """The device read something else than what was computed."""


def sample(tokens: Sequence[int]) -> int:
    """Return the token behind others."""
    return (sum((i + 3) * token for i, token in enumerate(tokens)) * 7919 + 13) % VOCABULARY


@dataclass(eq=False)
class Run:
    """A request, and what the engine and the device know of it."""

    known: list[int]
    num_final: int
    resume_at: list[int]
    row: int = -1  # of its current stay
    stay: int = 0
    num_prompt: int = 0
    num_planned: int = 0  # tokens that launched steps compute
    num_in_flight: int = 0
    is_pending: bool = False  # it waits for tokens from elsewhere
    device: list[int] = field(default_factory=list)  # tokens of its current stay


@dataclass(eq=False)
class Work:
    """The tokens of a run that a step computes, and the pages at that time."""

    run: Run
    start: int
    stop: int
    stay: int = 0
    device: list[int] = field(default_factory=list)  # tokens of this stay; a launched step runs though its row has ended
    page_ids: tuple[list[int], ...] = ()
    writes: list[tuple[int, int]] = field(default_factory=list)  # number of tokens, and page
    is_transfer: bool = False  # of tokens from elsewhere


@dataclass(eq=False)
class Step:
    """A planned step."""

    moves: Any
    works: list[Work]


class AheadEngine:
    """Random requests over a batch, `depth` steps ahead."""

    def __init__(self, seed: int, depth: int, writes: str, has_window: bool = False, has_tier: bool = False) -> None:
        rng = self.rng = Random(f"{seed} {depth} {writes} {has_window} {has_tier}")
        attention = {"num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
        state = MambaSpec(PAGE_SIZE, ((2, 2),), "float32", checkpoint_interval=rng.choice((16, 32)), checkpoints="ends")
        groups = [CacheGroupSpec(FullAttentionSpec(PAGE_SIZE, **attention)), CacheGroupSpec(state, pool="states")]
        if has_window:
            groups.append(CacheGroupSpec(SlidingWindowSpec(PAGE_SIZE, **attention, sliding_window=WINDOW)))
        self.sizes = {"kv": rng.choice((130, 200, 400)) * (1 + has_window), "states": rng.choice((6, 9, 20))}
        tier = HostTier({name: rng.choice((30, 300)) for name in self.sizes}) if has_tier else None
        manager = self.manager = CacheManager(self.sizes, groups, MAX_LEN, hash_seed=seed, host_tier=tier)
        table = MultiGroupPageTable(NUM_ROWS, MAX_LEN, MAX_LEN, [PAGE_SIZE] * len(groups))
        self.batch = RunningBatch(manager, table, writes=writes, max_steps_ahead=depth)
        self.depth = depth
        self.attention = [FULL, SLIDING][: 1 + has_window]
        self.cells: dict[tuple[int, int, int], Tokens] = {}  # history by group, page and offset
        self.host: dict[tuple[int, int], dict[int, Tokens]] = {}  # pages of the tier, by group and id
        base = [[rng.randrange(VOCABULARY) for _ in range(MAX_LEN)] for _ in range(2)]
        self.waiting = deque(self._draw(base[rng.random() < 0.3]) for _ in range(24))
        self.running: list[Run] = []
        self.queue: deque[Step] = deque()
        self.counts: Counter[str] = Counter()

    def _draw(self, base: list[int]) -> Run:
        rng = self.rng
        tokens = base[: rng.randrange(3, MAX_LEN - 60)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
        places = [rng.randrange(MAX_LEN) for _ in range(rng.choice((0, 0, 1, 3)))]
        return Run(tokens, min(MAX_LEN, len(tokens) + rng.randrange(1, 45)), places)

    def run(self) -> Counter[str]:
        """Run all requests to their ends."""
        for _ in range(5000):
            if not (self.waiting or self.running or self.queue):
                break
            self._plan()
            while len(self.queue) > (self.depth if self.waiting or self.running else 0):
                self._finish(self.queue.popleft())
            if self.rng.random() < 0.1:
                self._move()
            self.batch.check()
        assert not self.running
        assert not self.waiting
        return self.counts

    # planning

    def _plan(self) -> None:
        works, results = [], []
        rows = [run for run in self.running if not run.is_pending]
        rows = [run for run in rows if self._next_stop(run) > run.num_planned]
        for run in self.rng.sample(rows, len(rows)):
            if self.rng.random() < 0.03:
                self._preempt(run)
            elif self.rng.random() < 0.9:
                work, result = self._grow(run)
                works += [work] if work else []
                results += [result] if result else []
        admitted = self._admit()
        works += admitted
        for work in works:
            work.stay, work.device, work.page_ids = work.run.stay, work.run.device, self.batch.get_page_ids(work.run.row)
            work.run.num_in_flight += 1
        if self.rng.random() < 0.05 and not self.queue and not any(run.is_pending for run in self.running):
            for work in works:
                work.run.num_in_flight -= 1
            self._take_back(results, admitted)
            return
        moves = self.batch.take_moves()
        step, writes = Step(moves, works), moves.writes
        by_row = {work.run.row: work for work in works}
        for row, num_tokens, page_id, group in zip(writes.rows, writes.num_tokens, writes.page_ids, writes.group, strict=True):
            assert group == STATE
            work = by_row[int(row)]
            assert work.start < num_tokens <= work.stop, f"a write after {num_tokens} tokens, {work.start} to {work.stop}"
            work.writes.append((int(num_tokens), int(page_id)))
        self.queue.append(step)
        self.counts["writes"] += len(writes)
        self.counts["copies"] += len(moves.copies)

    def _next_stop(self, run: Run) -> int:
        """Return where a run's next step can end: in a prompt behind a chunk, then a token further, as far as it may plan."""
        if run.num_planned < run.num_prompt:
            stop = min(run.num_planned + self.rng.randrange(1, CHUNK), run.num_prompt)
            if self.rng.random() < 0.6:
                [place] = self.batch.find_next_checkpoint([run.row])
                stop = min(max(int(place), run.num_planned + 1), stop)
            return stop
        return min(run.num_planned + 1, len(run.known) + self.depth, run.num_final, MAX_LEN)

    def _grow(self, run: Run) -> tuple[Work | None, Any]:
        start, stop = run.num_planned, self._next_stop(run)
        if stop <= start:
            return None, None
        num_computed = int(self.batch.num_computed_tokens[run.row])
        num_new = min(stop, len(run.known)) - num_computed
        result = self.batch.grow([run.row], num_new, stop - num_computed - num_new)
        if not result.num_grown:
            self._preempt(run)
            return None, None
        run.num_planned = stop
        return Work(run, start, stop), result

    def _admit(self) -> list[Work]:
        works = []
        free = [row for row in range(NUM_ROWS) if all(run.row != row for run in self.running)]
        for row in free:
            if not self.waiting or self.rng.random() < 0.3:
                continue
            run = self.waiting[0]
            options = {"max_num_new_tokens": self.rng.randrange(1, CHUNK), "ends_at_checkpoint": self.rng.random() < 0.5}
            if self.rng.random() < 0.2:
                options["num_external_tokens"] = self.rng.randrange(1, MAX_LEN)
            num_hits = self.batch.admit(row, run.known, resume_at=run.resume_at, **options)
            if num_hits is None:
                continue
            self.waiting.popleft()
            run.row, run.stay, run.num_prompt = row, run.stay + 1, len(run.known)
            num_external = int(self.batch.num_external_tokens[row])
            run.device, run.num_planned = list(run.known), int(self.batch.num_computed_tokens[row]) + num_external
            run.is_pending = num_external > 0
            self.running.append(run)
            works.append(Work(run, num_hits, run.num_planned, is_transfer=run.is_pending))
            self.counts["transfers from elsewhere"] += run.is_pending
            self.counts["hit tokens"] += num_hits
            self.counts["admissions"] += 1
        return works

    def _take_back(self, results: list[Any], admitted: list[Work]) -> None:
        """Take a planned step back, as if its model had failed, and let all rows come back."""
        self._make(self.batch.take_moves())
        for work in admitted[::-1]:
            self.batch.release([work.run.row], [work.start])
            self._leave(work.run)
        for result in results[::-1]:
            self.batch.undo(result)
        for run in list(self.running):
            self.batch.release([run.row], [int(self.batch.num_computed_tokens[run.row])])
            self._leave(run)
        self.counts["steps taken back"] += 1

    def _preempt(self, run: Run) -> None:
        self.batch.release([run.row])
        self._leave(run)
        self.counts["preemptions"] += 1

    def _leave(self, run: Run) -> None:
        self.running.remove(run)
        run.row, run.stay, run.is_pending = -1, run.stay + 1, False
        self.waiting.appendleft(run)

    def _move(self) -> None:
        """Exchange two rows, or fork one where that is refused since a step in flight changes its state."""
        first, second = self.rng.sample(range(NUM_ROWS), 2)
        self.batch.swap_row(first, second)
        for run in self.running:
            run.row = {first: second, second: first}.get(run.row, run.row)
        for run in self.running:
            if run.num_planned > int(self.batch.num_computed_tokens[run.row]) and not run.is_pending:
                free = [row for row in range(NUM_ROWS) if all(other.row != row for other in self.running)]
                try:
                    self.batch.fork(run.row, free[:1] or [run.row])
                except StateAheadError:
                    self.counts["forks refused"] += 1
                else:
                    raise AssertionError("a fork of a state in flight")

    # the device

    def _finish(self, step: Step) -> None:
        """Run a launched step on the device, and tell the host what it sampled."""
        self._make(step.moves)
        for work in step.works:
            self._check_state(work)
        for work in step.works:  # a model writes the keys of a layer before it reads any
            self._write_keys(work)
        for work in step.works:
            self._check_keys(work)
            self._write_states(work)
        for work in step.works:
            work.run.num_in_flight -= 1
            if work.is_transfer:
                self._receive(work)
            elif work.stop >= len(work.device):
                work.device.append(sample(work.device[: work.stop]))
                if work.run.stay == work.stay:
                    self._tell(work.run)

    def _make(self, moves: Any) -> None:
        """Make moves, and tell the manager that loads and saves are done."""
        for src, dst, group in copies_of(moves.saves):
            self.host[group, dst] = self._page(group, src)
        for src, dst, group in copies_of(moves.loads):
            self._put(group, dst, self.host[group, src])
        if moves.number:
            self.manager.complete(moves.number)
        self.counts["transfers"] += len(moves.saves) + len(moves.loads)
        read = [self._page(group, src) for src, _, group in copies_of(moves.copies)]
        for (_, dst, group), page in zip(copies_of(moves.copies), read, strict=True):
            self._put(group, dst, page)

    def _page(self, group: int, page_id: int) -> dict[int, Tokens]:
        return {offset: self.cells.get((group, page_id, offset), ()) for offset in range(PAGE_SIZE)}

    def _put(self, group: int, page_id: int, page: dict[int, Tokens]) -> None:
        for offset, history in page.items():
            self.cells[group, page_id, offset] = history

    def _check_state(self, work: Work) -> None:
        """Compare the state with which a work begins. A row that has ended may have lost its pages."""
        if work.run.stay != work.stay or work.is_transfer or not work.start:
            return
        found = self.cells.get((STATE, work.page_ids[STATE][0], 0), ())
        if found != tuple(work.device[: work.start]):
            raise WrongRead(f"a state of {len(found)} tokens where {work.start} are due, page {work.page_ids[STATE][0]}")

    def _check_keys(self, work: Work) -> None:
        """Compare the keys and values that the first token of a work reads."""
        if work.run.stay != work.stay or work.is_transfer:
            return
        for group in self.attention:
            first = max(0, work.start - WINDOW + 1) if group == SLIDING else 0
            for i in range(first, work.start):
                page_id = work.page_ids[group][i // PAGE_SIZE]
                if self.cells.get((group, page_id, i % PAGE_SIZE)) != tuple(work.device[: i + 1]):
                    raise WrongRead(f"token {i} of group {group}, page {page_id}")
        self.counts["works checked"] += 1

    def _write_keys(self, work: Work) -> None:
        for group in self.attention:
            for i in range(work.start, work.stop):
                page_id = work.page_ids[group][i // PAGE_SIZE]
                self.cells[group, page_id, i % PAGE_SIZE] = tuple(work.device[: i + 1])

    def _write_states(self, work: Work) -> None:
        for num_tokens, page_id in [*work.writes, (work.stop, work.page_ids[STATE][0])]:
            if work.is_transfer and num_tokens < work.stop:
                continue  # it brings the state at its end alone
            self.cells[STATE, page_id, 0] = tuple(work.device[:num_tokens])

    def _receive(self, work: Work) -> None:
        """End a transfer from elsewhere. Where it failed, all its tokens are computed, and their writes were dropped."""
        run = work.run
        if run.stay != work.stay:
            return
        run.is_pending = False
        if self.rng.random() < 0.8:
            self.batch.commit_external(run.row, work.stop - work.start)
        else:
            run.num_planned = self.batch.fail_external(run.row, 0)
            assert run.num_planned == 0

    def _tell(self, run: Run) -> None:
        """Let the host know a token, and end a run that is long enough."""
        token = run.device[-1]
        run.known.append(token)
        if len(run.known) >= run.num_final or token == LAST_TOKEN:
            self.batch.release([run.row])
            self.running.remove(run)
            run.row, run.stay = -1, run.stay + 1
            self.counts["ends"] += 1
        else:
            self.batch.append([run.row], [token])

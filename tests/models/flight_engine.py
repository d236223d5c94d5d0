"""An engine with tokens in flight: it plans steps ahead of a device which checks what it reads. Drafts are rejected, requests
end inside steps and are preempted, rows are forked, cut and moved, and steps fail at any time.

It knows what an engine knows: the calls of `RunningBatch`, and the tokens that the device has sampled, a step or two later. All
answers are compared with what the model says without a cache.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from admissions import admission
from contents_device import require
from flight_device import LAST_TOKEN, VOCABULARY, FlightDevice, Stay, Work, sample
from inputs_oracle import Padding, RowTokens, list_inputs
from managing import grouped
from settings import Group, NumPages, Setting, in_pool, kept, written

import pagepool
from pagepool import Moves, StateWrites
from pagepool._core import INPUT_FIELDS
from pagepool.errors import ArgumentError, MovesDueError, OutOfPagesError

NUM_ROWS, MAX_LEN, NUM_RUNS, CHUNK = 5, 72, 20, 24
MAX_ROUNDS, MAX_FORKS = 3000, 12
CACHES = "scheduled", "computed"

FULL_4, FULL_2, WINDOW, CHUNKS = Group("full", 4), Group("full", 2), Group("sliding", 4, 9), Group("chunked", 4, 8)
STATE = Group("mamba", 64)
FLIGHT_SETTINGS = [
    Setting("full 4", (FULL_4,)),
    Setting("full 1", (Group("full", 1),)),
    Setting("full 16 and 4", (Group("full", 16), FULL_4)),
    Setting("full 4, eagle", (FULL_4,), use_eagle=True),
    Setting("full 4, 2 shards", (FULL_4,), data_parallel_size=2),
    Setting("full 4, uncached", (FULL_4,), enable_caching=False),
    Setting("window 9", (WINDOW,)),
    Setting("full 4, window 9", (FULL_4, WINDOW)),
    Setting("full 4, window 9, ends", (FULL_4, WINDOW), windows=(4, 16)),
    Setting("full 4, window 1, ends", (FULL_4, Group("sliding", 4, 1)), windows=(0, 0)),
    Setting("full 4, chunk 8", (FULL_4, CHUNKS)),
    Setting("chunk 6, full 2, ends", (Group("chunked", 4, 6), FULL_2), windows=(0, 10)),
    Setting(
        "window 5 of 2, chunk 8, full 8, 2 shards", (Group("sliding", 2, 5), CHUNKS, Group("full", 8)), data_parallel_size=2
    ),
    Setting("full 4 / window 9, ends", (FULL_4, in_pool(WINDOW, "windows")), windows=(4, 0)),
    Setting("state", (STATE,)),
    Setting("full 4 / state", (FULL_4, in_pool(STATE, "states"))),
    Setting("full 4 / state at ends", (FULL_4, written(16))),
    Setting("full 2, window 9 and state at ends", (FULL_2, WINDOW, written(12, "kv")), windows=(0, 0)),
    Setting("full 4 / state at ends, 2 shards", (FULL_4, written(8)), data_parallel_size=2),
    Setting("full 4, state every 8", (FULL_4, kept(8))),
    Setting("full 4, lookahead", (FULL_4,)).with_lookahead(1),
    Setting("full 4, window 1, lookahead", (FULL_4, Group("sliding", 4, 1))).with_lookahead(2),
    Setting("full 4, chunk 8, ends, lookahead", (FULL_4, CHUNKS), windows=(4, 16)).with_lookahead(3),
    Setting("full 4 / state at ends, lookahead", (FULL_4, written(16))).with_lookahead(1),
]


def answer(tokens: Sequence[int], num_final: int) -> list[int]:
    """Return a request's tokens at its end, without a cache."""
    tokens = list(tokens)
    while len(tokens) < num_final:
        tokens.append(sample(tokens))
        if tokens[-1] == LAST_TOKEN:
            break
    return tokens


@dataclass(eq=False)
class Run:
    """A request, and what the engine knows of it."""

    known: list[int]
    num_final: int
    resume_at: list[int]
    shard: int | None
    row: int = -1
    stay: int = 0  # its number in the batch
    device: Stay | None = None
    works: list[Work] = field(default_factory=list)  # planned, and not settled
    is_pending: bool = False  # it waits for tokens from elsewhere
    next_token: int | None = None  # sampled, and not yet told to the batch
    is_twin: bool = False  # it was forked, or is a fork

    @property
    def num_sampling(self) -> int:
        """The number of tokens at least that steps in flight sample."""
        return sum(not work.is_chunk for work in self.works)


@dataclass(eq=False)
class Launched:
    """A planned step: its rows in order, and what is moved before it."""

    step: Any
    runs: list[Run]
    works: list[Work]
    moves: list[Moves]
    coming: list[tuple[Run, Work]]  # tokens that come from elsewhere
    twins: list[tuple[Run, Stay, Work]] = field(default_factory=list)  # forks, which sample the same token
    failed: list[Work] = field(default_factory=list)  # works whose step has failed


class FlightEngine:
    """Random requests over a batch, up to `depth` steps ahead, with up to `num_drafts` drafts in each."""

    def __init__(
        self,
        setting: Setting,
        seed: int,
        depth: int,
        num_drafts: int,
        caches: str = "scheduled",
        *,
        has_tier: bool | None = None,
        num_rows: int = NUM_ROWS,
        may_fail: bool = True,
    ) -> None:
        rng = self.rng = Random(f"{setting.name} {seed} {depth} {num_drafts}")
        has_tier = setting.enable_caching and rng.random() < 0.4 if has_tier is None else has_tier
        self.setting, self.depth, self.num_drafts, self.caches = setting, depth, num_drafts, caches
        self.num_pages = self._draw_sizes()
        tier_pages = self._draw_tier() if has_tier else None
        slack, interval = setting.windows or (0, 0)
        more: dict[str, Any] = {} if setting.windows is None else {"windows": "ends"}
        more |= {"lookahead": setting.lookahead} if setting.lookahead else {}
        more["retention"] = pagepool.Retention(window_slack=slack, window_interval=interval)
        if setting.windows is None and any(group.kind in ("sliding", "chunked") for group in setting.groups):
            more["windows"] = "all" if not setting.writes_states else "ends"
        manager = self.manager = pagepool.CacheManager(
            self.num_pages,
            setting.cache_groups(pagepool),
            MAX_LEN,
            setting.enable_caching,
            host_tier=None if tier_pages is None else pagepool.HostTier(tier_pages),
            eviction=rng.choice(("lru", "adaptive")),
            caches=caches,
            **grouped(use_eagle=setting.use_eagle, hash_seed=seed, **more),
        )
        sizes = [group.page_size for group in setting.groups]
        self.tables = pagepool.MultiGroupPageTable(num_rows, MAX_LEN, MAX_LEN, sizes)
        self.batch = pagepool.RunningBatch(
            manager,
            self.tables,
            data_parallel_size=setting.data_parallel_size,
            max_steps_ahead=depth,
        )
        self.has_sources = rng.random() < 0.5
        kinds = {group.kind == "mamba" for group in setting.groups}
        left_out = [] if True in kinds else ["state_pages"]
        left_out += [] if False in kinds else ["slots", "page_ids"]
        left_out += [] if self.has_sources else ["sources"]
        self.fields = [name for name in INPUT_FIELDS if name not in left_out]
        self.orders = [rng.choice(("given", "decodes")) for _ in range(rng.choice((1, 2)))]  # as for several buckets of sizes
        self.inputs = [
            pagepool.StepInputs(
                self.batch,
                num_tokens=num_rows * MAX_LEN,
                num_reqs=num_rows,
                fields=[name for name in self.fields if name != "distribution" or order == "decodes"],
                depth=depth + 1 + rng.randrange(2),
                order=order,
            )
            for order in self.orders
        ]
        self.has_tier, self.num_rows, self.may_fail = has_tier, num_rows, may_fail
        self.share_failing, self.share_told = rng.choice((0.02, 0.1, 0.3)), rng.choice((0, 0.2, 0.7)) * may_fail
        self.hits: list[int] = []  # of each admission
        self.device = FlightDevice(setting, self.num_pages, tier_pages, rng, caches == "computed")
        base = [[rng.randrange(VOCABULARY) for _ in range(MAX_LEN)] for _ in range(2)]
        self.runs = [self._draw_run(base[rng.random() < 0.3]) for _ in range(NUM_RUNS)]
        self.expected = {run: answer(run.known, run.num_final) for run in self.runs}
        self.waiting = deque(self.runs)
        self.running: list[Run] = []
        self.queue: deque[Launched] = deque()
        self.num_forks = 0
        self.fills: list[list[Work]] = []  # works of each step whose inputs were filled, and which has not failed
        self.planned: list[Run] = []  # rows of a step that was not launched, while another one ends
        self.unsettled: list[Any] = []  # steps that have run, and may be settled later
        self.counts: Counter[str] = Counter()

    # what is drawn

    def _pages_for_one(self, pool: str) -> int:
        """Count the pages of a pool that a request of the greatest length holds, and a state more for what is kept."""
        groups = [group for group in self.setting.groups if group.pool == pool or not self.setting.has_pools]
        return sum(2 if group.kind == "mamba" else -(-MAX_LEN // group.page_size) for group in groups)

    def _draw_sizes(self) -> NumPages:
        factor = self.rng.choice((1.3, 2.2, 5))
        num_shards = self.setting.data_parallel_size or 1
        sizes = {}
        for pool in dict.fromkeys(group.pool if self.setting.has_pools else "kv" for group in self.setting.groups):
            of_states = all(group.kind == "mamba" for group in self.setting.groups if group.pool == pool)
            least = int(factor * self._pages_for_one(pool)) + 2
            if of_states:
                least = len([1 for group in self.setting.groups if group.pool == pool]) * (NUM_ROWS + 2) + self.rng.choice(
                    (2, 9)
                )
            sizes[pool] = num_shards * least
        return sizes if self.setting.has_pools else sizes["kv"]

    def _draw_tier(self) -> NumPages:
        if isinstance(self.num_pages, int):
            return self.rng.choice((20, 4 * self.num_pages))
        return {name: self.rng.choice((20, 4 * size)) for name, size in self.num_pages.items()}

    def _draw_run(self, base: list[int]) -> Run:
        rng = self.rng
        tokens = base[: rng.randrange(3, MAX_LEN - 25)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
        has_places = self.setting.writes_states or (self.setting.windows is not None and not self.setting.has_state)
        places = [rng.randrange(MAX_LEN) for _ in range(rng.choice((0, 0, 1, 3)))] if has_places else []
        shard = rng.choice((None, 0, 1)) if self.setting.data_parallel_size else None
        return Run(tokens, min(MAX_LEN, len(tokens) + rng.randrange(1, 40)), places, shard)

    # the loop

    def run(self) -> Counter[str]:
        """Run all requests to their ends, and compare their answers."""
        for _ in range(MAX_ROUNDS):
            if not (self.waiting or self.running or self.queue):
                break
            self._plan()
            if self.queue and self.may_fail and self.rng.random() < self.share_failing:
                self._fail(self.rng.randrange(len(self.queue)))
            while len(self.queue) > (self.depth if self.waiting or self.running else 0):
                self._finish()
            if self.queue and self.rng.random() < 0.15:
                self._finish()
            self._move()
            self._fork()
            if self.may_fail:
                self._cut()
            if self.unsettled and self.rng.random() < 0.3:
                self._settle_late()
            self.check()
        require(not self.running and not self.waiting, "requests that never end", self.running, self.waiting)
        for run in self.runs:
            require(run.known == self.expected[run], "a wrong answer", run.known, self.expected[run])
        require(self.manager.stats().num_held_pages == 0, "pages that nobody gives back")
        self.counts["stale works"] = self.device.num_stale
        return self.counts

    def check(self) -> None:
        """Compare what the batch shows with what the engine knows."""
        batch = self.batch
        batch.check()
        for run in self.running:
            require(bool(batch.is_admitted[run.row]), "a row that is lost", run)
            require(int(batch.num_tokens[run.row]) == len(run.known) - (run.next_token is not None), "known tokens", run)
            require(int(batch.stays[run.row]) == run.stay, "another stay", run, batch.stays)
        rows = {run.row for run in self.running}
        require(all(batch.stays[row] == 0 for row in range(self.num_rows) if row not in rows), "a stay of no row", batch.stays)

    # planning

    def _plan(self) -> None:
        rng, batch = self.rng, self.batch
        moves = [self._take_moves()]
        step = batch.new_step()
        planned: list[Run] = []
        coming: list[tuple[Run, Work]] = []
        turns = [self._plan_rows, self._step_rows]
        for turn in rng.sample(turns, len(turns)):
            turn(step, planned)
        self._admit(step, planned, coming)
        require(step.rows.tolist() == [run.row for run in planned], "rows of the step", step.rows, planned)
        require(len(step) == len(planned), "length of the step")
        if planned and self.may_fail and rng.random() < self.share_failing / 2:
            moves += [self._take_moves()] if rng.random() < 0.8 else []
            self.queue.append(Launched(step, [], [], moves, coming))
            self._fail(len(self.queue) - 1)
            moves.append(self._take_moves())
            pending = [pair for pair in coming if pair[0].is_pending]
            for taken in moves[1:]:
                self._note_writes(taken.writes, [], [], pending, may_be_lost=True)
            return
        if planned and self.queue and not coming and rng.random() < 0.2:
            self._finish_before(planned)
        works = self._make_works(step, planned)
        moves.append(self._take_moves())
        self._note_writes(moves[-1].writes, planned, works, coming)
        self.queue.append(Launched(step, planned, works, moves, coming))
        for run, work in zip(planned, works, strict=True):
            run.works.append(work)
        self.counts["steps"] += bool(planned)

    def _counts_of(self, run: Run) -> tuple[int, ...]:
        batch = self.batch
        return tuple(int(values[run.row]) for values in (batch.num_tokens, batch.num_computed_tokens, batch.num_ahead_tokens))

    def _idle(self) -> list[Run]:
        return [run for run in self.running if not run.is_pending]

    def _call(self, runs: list[Run], planned: list[Run], call: Any, step: Any) -> None:
        """Make a call for rows, and preempt others where pages are short."""
        while runs:
            before = {run: self._counts_of(run) for run in runs}
            result = call(runs)
            require(result is step, "another step is returned")
            num_grown = int(step.num_grown)
            planned += runs[:num_grown]
            require((step.refusal is None) is (num_grown == len(runs)), "refusal", step.refusal, num_grown, len(runs))
            for run in runs[num_grown:]:
                require(before[run] == self._counts_of(run), "a row without room has changed", run)
            runs = runs[num_grown:]
            others = [run for run in self._idle() if run not in planned]
            if not runs or not others or self.rng.random() < 0.2:
                return
            victim = self.rng.choice(others)
            self._preempt(victim)
            runs = [run for run in runs if run is not victim]

    def _plan_rows(self, step: Any, planned: list[Run]) -> None:
        """Plan chunks of prompts, and tokens of rows that have none in flight, or whose tokens are in flight."""
        rng, batch = self.rng, self.batch
        amounts = {run: amount for run in self._idle() if rng.random() < 0.9 and (amount := self._draw_amount(run))}
        runs = rng.sample(list(amounts), len(amounts))

        def call(runs: list[Run]) -> Any:
            news, drafts = [amounts[run][0] for run in runs], [amounts[run][1] for run in runs]
            return batch.plan([run.row for run in runs], news, drafts, step=step)

        num_first = rng.choice((0, rng.randint(0, len(runs))))
        for some in (runs[:num_first], runs[num_first:]):
            self._call([run for run in some if run.row >= 0], planned, call, step)
        self.counts["works ahead"] += sum(self._counts_of(run)[2] > amounts[run][1] for run in planned if run in amounts)

    def _draw_amount(self, run: Run) -> tuple[int, int] | None:
        """Return the tokens and drafts of a row's next step; None if there is nothing to compute."""
        rng = self.rng
        num_tokens, num_computed, num_ahead = self._counts_of(run)
        num_drafts = rng.randint(0, self.num_drafts)
        if num_computed < num_tokens:
            num_new = min(num_tokens - num_computed, rng.randrange(1, CHUNK))
            if rng.random() < 0.4:
                step = min((group.interval for group in self.setting.groups if group.interval), default=MAX_LEN)
                num_new = min(num_tokens - num_computed, step - num_computed % step, CHUNK)  # to where a state may be kept
            return num_new, num_drafts * (num_computed + num_new == num_tokens)
        is_ready = 1 <= run.num_sampling <= self.depth and (not self.has_sources or run.works[-1] in self.filled)
        if not is_ready or len(run.known) + run.num_sampling >= run.num_final or num_tokens + num_ahead >= MAX_LEN:
            return None
        return rng.choice((1, 1, 7)), num_drafts

    def _step_rows(self, step: Any, planned: list[Run]) -> None:
        """Decode rows whose tokens the batch was not told: by `step`, or by `append` and a further call."""
        rng, runs = self.rng, []
        for run in [run for run in self._idle() if run.next_token is not None]:
            num_tokens, num_computed, _ = self._counts_of(run)
            if num_computed < num_tokens or rng.random() < 0.2:
                self.batch.append([run.row], [run.next_token])
                run.next_token = None
            elif rng.random() < 0.9:
                runs.append(run)

        def call(runs: list[Run]) -> Any:
            result = self.batch.step([run.row for run in runs], [run.next_token for run in runs], step=step)
            for run in runs[: int(step.num_grown)]:
                run.next_token = None
            return result

        self._call(runs, planned, call, step)

    def _admit(self, step: Any, planned: list[Run], coming: list[tuple[Run, Work]]) -> None:
        rng, batch = self.rng, self.batch
        for row in [row for row in range(self.num_rows) if all(run.row != row for run in self.running)]:
            if not self.waiting or rng.random() < 0.3:
                continue
            run = self.waiting[0]
            options: dict[str, Any] = {"dp_shard": run.shard} if run.shard is not None else {}
            if rng.random() < 0.5:
                options["max_num_new_tokens"] = rng.randrange(1, CHUNK)
                options |= {"reserve": "prompt"} if rng.random() < 0.3 else {}
            else:
                options["num_drafts"] = rng.randint(0, self.num_drafts)
            if rng.random() < 0.15:
                options = {"dp_shard": run.shard} if run.shard is not None else {}
                options["num_external_tokens"] = rng.randrange(1, MAX_LEN)
            options["step"] = step
            num_hits = batch.admit(row, run.known, **admission(resume_at=run.resume_at, **options))
            if num_hits is None:
                require(batch.refusal is not None, "no refusal")
                continue
            self.waiting.popleft()
            run.row, run.device = row, self.device.admit(run.known)
            run.stay, stays = int(batch.stays[row]), [other.stay for other in self.running]
            require(run.stay > 0 and run.stay not in stays, "stays", run.stay, stays)
            self.running.append(run)
            num_external = int(batch.num_external_tokens[row])
            run.is_pending = num_external > 0
            self.counts["hit tokens"] += num_hits
            self.hits.append(num_hits)
            if self.caches == "computed" and not self.has_tier and not self.setting.has_state:
                require(self.device.holds(batch.get_page_ids(row), run.device, num_hits), "a hit before it is computed", run)
            if run.is_pending:
                work = Work(run.device, num_hits, num_hits + num_external, len(run.known), batch.get_page_ids(row), False, True)
                coming.append((run, work))
            else:
                planned.append(run)

    def _make_works(self, step: Any, planned: list[Run]) -> list[Work]:
        """Fill the inputs of a step, compare them with what the engine knows, and return the works of the rows."""
        if not planned:
            return []
        while self.unsettled:
            self._settle_late()
        batch, rng = self.batch, self.rng
        choice, num_given = rng.randrange(len(self.inputs)), self.num_drafts + rng.randrange(2)
        inputs, drafts = self.inputs[choice], [[rng.randrange(VOCABULARY) for _ in range(num_given)] for _ in planned]
        given = np.array(drafts, np.int32).reshape(len(planned), num_given) if rng.random() < 0.5 else None
        num_tokens = batch.inputs(step, out=inputs, draft_token_ids=given)
        works: list[Work | None] = [None] * len(planned)
        rows: list[Any] = [None] * len(planned)
        for place, index in enumerate(inputs.order[: len(planned)].tolist()):
            run, start, stop = planned[index], int(inputs.starts[place]), int(inputs.seq_lens[place])
            pages = [list(pages) for pages in batch.get_page_ids(run.row)]
            known = int(batch.num_tokens[run.row])
            is_ahead = start >= known
            source = run.works[-1].place if is_ahead and self.has_sources else -1
            ids = [] if given is None else drafts[index]
            rows[index] = RowTokens(run.row, start, stop, run.known[:known], pages, ids, is_ahead, source)
            works[index] = Work(run.device, start, stop, known, pages, is_ahead, stop < known, place)
        require(num_tokens == sum(tokens.stop - tokens.start for tokens in rows), "number of tokens", num_tokens)
        self._compare_inputs(inputs, rows, self.orders[choice] == "decodes")
        self.fills.append([work for work in works if work is not None])
        return self.filled

    def _compare_inputs(self, inputs: Any, rows: list[RowTokens], decodes_first: bool) -> None:
        """Compare all arrays of a step with what the engine knows."""
        sizes = [None if group.kind == "mamba" else group.page_size for group in self.setting.groups]
        expected: dict[str, Any] = list_inputs(
            rows, sizes, Padding(self.num_rows * MAX_LEN, self.num_rows, -1, -1), decodes_first
        )
        ordered = [rows[index] for index in expected["order"][: len(rows)]]
        expected["page_ids"] = [[tokens.pages[g] for tokens in ordered] for g in range(len(sizes))]
        for name in self.fields if decodes_first else [name for name in self.fields if name != "distribution"]:
            shown, values = getattr(inputs, name), expected[name]
            if name not in ("slots", "page_ids", "state_pages"):
                require(shown.tolist() == values, name, shown.tolist(), values)
                continue
            for array, each in zip(shown, values, strict=True):
                found = None if array is None else array.tolist()
                if name == "page_ids" and found is not None:
                    each = [ids + [0] * (len(found[0]) - len(ids)) for ids in each]
                    each += [[0] * len(found[0])] * (len(found) - len(each))
                require(found is None or found == each, name, found, each)

    @property
    def filled(self) -> list[Work]:
        """Return the works of the step whose inputs were filled last."""
        return self.fills[-1] if self.fills else []

    def _finish_before(self, planned: list[Run]) -> None:
        """Let the oldest step end before the inputs of the one that was planned last are filled, unless a row of it ends."""
        oldest = self.queue[0]
        for run in [run for run, work in zip(oldest.runs, oldest.works, strict=True) if run in planned and not work.is_chunk]:
            coming = answer(run.known, len(run.known) + self.num_drafts + 1)[len(run.known) :]
            if LAST_TOKEN in coming or len(run.known) + len(coming) >= run.num_final:
                return
        self.planned = planned
        self._finish()
        self.planned = []
        self.counts["exact inputs"] += 1

    def _take_moves(self) -> Moves:
        moves = self.batch.take_moves()
        self.counts["copies"] += len(moves.copies)
        self.counts["transfers"] += len(moves.loads) + len(moves.saves)
        return moves

    def _note_writes(
        self,
        writes: StateWrites,
        planned: list[Run],
        works: list[Work],
        coming: list[tuple[Run, Work]],
        *,
        may_be_lost: bool = False,
    ) -> None:
        """Give the writes to the works of their rows. Those of a failed step may be lost."""
        by_row = {run.row: work for run, work in [*zip(planned, works, strict=True), *coming]}
        for row, num_tokens, page_id, group in zip(writes.rows, writes.num_tokens, writes.page_ids, writes.group, strict=True):
            if not may_be_lost or int(row) in by_row:
                by_row[int(row)].writes.append((int(num_tokens), int(page_id), int(group)))
        self.counts["writes"] += len(writes)

    # steps that fail

    def _fail(self, place: int) -> None:
        """Let a launched step fail that has rows, and with it all later ones."""
        while place < len(self.queue) and not len(self.queue[place].step):
            place += 1
        failed = list(self.queue)[place:]
        if not failed or failed[0].step.is_settled:
            return
        works = {work for one in failed for work in one.works}
        released = self.batch.settle(failed[0].step, failed=True).tolist()
        require(released == sorted(set(released)), "rows that are released", released)
        self.fills = [fill for fill in self.fills if works.isdisjoint(fill)]
        for run in list(self.running):
            first = next((work for work in run.works if work in works), None)
            run.works = [work for work in run.works if work not in works]
            if run.row in released:
                require(run.is_pending or run.is_twin or not self._goes_back_always(), "a row that cannot go back", run)
                self._leave(run)
                self.counts["rows that cannot go back"] += 1
            elif first is not None:
                _, num_computed, num_ahead = self._counts_of(run)
                require(num_computed + num_ahead <= first.start, "a row that does not go back", run, first)
                self.counts["rows that go back"] += 1
            if run.works and run.row >= 0:
                self._drop_lost_works(run)
        for one in failed:
            one.failed += one.works
            one.runs, one.works, one.twins = [], [], []
        for one in self.queue:  # a twin that goes back samples its token itself
            one.twins = [(twin, *more) for twin, *more in one.twins if self._counts_of(twin)[1] == len(twin.known)]
        for one in failed[1:]:
            if not one.step.is_settled and self.rng.random() < 0.5:
                self._settle_failed(one, may_fail=True)
        self.counts["failed steps"] += len(failed)
        self.counts["launched steps that fail"] += bool(works)

    def _drop_lost_works(self, run: Run) -> None:
        """Forget the works in flight of a row which has gone back before them, since it had hit a page of a failed step."""
        num_tokens, num_computed, _ = self._counts_of(run)
        oldest = run.works[0]
        if num_computed < num_tokens if oldest.is_ahead else num_computed <= oldest.start:
            for work in run.works:
                work.is_cut = True
            run.works = []
            self.counts["works lost with a hit"] += 1

    def _goes_back_always(self) -> bool:
        """Whether rows without copies can always go back."""
        has_gaps = any(group.kind != "full" for group in self.setting.groups)
        return not has_gaps and not self.has_tier

    def _settle_failed(self, launched: Launched, may_fail: bool) -> None:
        """Settle a step which has failed since an earlier one has: it has nothing to tell."""
        is_failed = may_fail and self.rng.random() < 0.5
        places = self.batch.settle(launched.step, failed=True) if is_failed else self.batch.settle(launched.step)
        require(places.tolist() == ([] if is_failed else [-1] * len(launched.step)), "places of a failed step", places)

    # rows that end, move, and come back

    def _preempt(self, run: Run) -> None:
        self.batch.release([run.row])
        self._leave(run)
        self.counts["preemptions"] += 1

    def _leave(self, run: Run) -> None:
        self._end_stay(run)
        self.waiting.appendleft(run)

    def _end_stay(self, run: Run) -> None:
        self.running.remove(run)
        if run.device is not None:
            run.device.is_over = True
        self.counts["rows that end with tokens in flight"] += bool(run.works)
        run.row, run.stay, run.works = -1, 0, []
        run.is_pending = False
        run.next_token = None

    def _move(self) -> None:
        """Exchange two rows, or move one, and preempt one, at any time."""
        rng = self.rng
        if rng.random() < 0.2 and self.num_rows > 1:
            first, second = rng.sample(range(self.num_rows), 2)
            rows = {run.row for run in self.running}
            if first in rows and second not in rows and rng.random() < 0.5:
                self.batch.move_row(first, second)
            else:
                self.batch.swap_row(first, second)
            for run in self.running:
                run.row = {first: second, second: first}.get(run.row, run.row)
                self.counts["rows that move with tokens in flight"] += run.row in (first, second) and bool(run.works)
        if self.running and rng.random() < 0.05:
            self._preempt(rng.choice(self.running))

    def _cut(self) -> None:
        """Cut a row's tokens, perhaps with steps in flight, and tell it the same tokens again."""
        rng, batch = self.rng, self.batch
        twins = [pair for launched in self.queue for pair in launched.twins]
        awaiting, forked = {twin for twin, _, _ in twins}, {work for _, _, work in twins}
        runs = [run for run in self._idle() if run.next_token is None and forked.isdisjoint(run.works) and run not in awaiting]
        if not runs or rng.random() < 0.9:
            return
        run = rng.choice(runs)
        num_tokens, num_computed, num_ahead = self._counts_of(run)
        num_kept = rng.randrange(num_tokens)
        try:
            batch.trim([run.row], num_kept)
        except (ArgumentError, MovesDueError):
            require(num_ahead > 0 or not self._goes_back_always() or run.is_twin, "a row that is not cut", run)
            return
        require(not num_ahead, "a row with tokens ahead is cut", run)
        if self._counts_of(run)[1] < num_computed:
            for work in run.works:
                work.is_cut = True
            self.counts["rows cut with steps in flight"] += bool(run.works)
            run.works = []
        told = run.known[num_kept:]
        batch.append([run.row] * len(told), told)

    def _fork(self) -> None:
        """Fork a row, or see that this is refused while later steps write behind its tokens."""
        rng, batch = self.rng, self.batch
        free = [row for row in range(self.num_rows) if all(run.row != row for run in self.running)]
        runs = [run for run in self._idle() if run.next_token is None and len(run.known) < run.num_final]
        if not free or not runs or self.num_forks == MAX_FORKS or rng.random() < 0.8:
            return
        run = rng.choice(runs)
        num_tokens, num_computed, num_ahead = self._counts_of(run)
        if num_ahead:
            for call in (lambda: batch.fork(run.row, free[:1]), lambda: batch.trim([run.row], num_tokens)):
                try:
                    call()
                except (ArgumentError, MovesDueError):
                    self.counts["calls refused"] += 1
                else:
                    raise AssertionError("a row with tokens ahead is forked or cut")
            return
        if (len(run.works) != 1 or run.works[0].is_chunk) if run.works else num_computed == num_tokens:
            return
        try:
            batch.fork(run.row, free[:1])
        except (MovesDueError, OutOfPagesError):
            return
        twin = Run(list(run.known), rng.randint(len(run.known) + 1, run.num_final), [], run.shard, free[0])
        twin.is_twin = run.is_twin = True
        twin.stay, twin.device = int(batch.stays[free[0]]), self.device.admit(run.known)
        self.running.append(twin)
        self.runs.append(twin)
        self.expected[twin] = answer(twin.known, twin.num_final)
        self.num_forks += 1
        self.counts["forks"] += 1
        if run.works:
            [launched] = [one for one in self.queue if run.works[-1] in one.works]
            launched.twins.append((twin, twin.device, run.works[-1]))
            self.counts["forks before a token is known"] += 1

    # steps that end

    def _finish(self) -> None:
        """Run the oldest step on the device, and tell the batch what it has sampled."""
        launched = self.queue.popleft()
        for moves in launched.moves:
            self.device.move(moves)
            if moves.number:
                self.manager.complete(moves.number)
        self.device.run(launched.works)
        self.device.fail(launched.failed)
        for run, work in launched.coming:
            self._receive(run, work)
        if launched.works:
            self._settle(launched)
        elif not launched.step.is_settled:
            self._settle_failed(launched, may_fail=False)

    def _receive(self, run: Run, work: Work) -> None:
        """End a transfer from elsewhere, which may fail."""
        if work.stay.is_over:
            return
        run.is_pending = False
        if self.rng.random() < 0.8:
            self.device.receive(work)
            self.batch.commit_external(run.row, work.stop - work.start)
        else:
            self.batch.fail_external(run.row, 0)

    def _settle(self, launched: Launched) -> None:
        rng = self.rng
        tokens: list[int] = []
        counts: list[int] = []
        ended: list[Run] = []
        expected: list[int] = []
        pairs = list(zip(launched.runs, launched.works, strict=True))
        for run, work in pairs:
            got = list(work.sampled)
            is_gone = work.stay.is_over or work.is_cut
            if work.is_cut:
                got = rng.choices(range(VOCABULARY), k=rng.choice((0, 1)))
            elif not is_gone:
                left = [i + 1 for i, token in enumerate(got) if token == LAST_TOKEN or len(run.known) + i + 1 == run.num_final]
                is_told = not left and len(got) == 1 == run.num_sampling and run not in self.planned
                run.works.remove(work)
                if is_told and rng.random() < self.share_told:
                    self._tell(run, got.pop())
                elif left:
                    ended.append(run)
                    run.known += got[: left[0]]
                    got = got[: left[0]]
                else:
                    run.known += got
            expected.append(-1 if is_gone else run.row)
            tokens += got
            counts.append(len(got))
            self.counts["accepted drafts"] += max(0, len(got) - 1)
        if not tokens and rng.random() < self.share_told:
            self.unsettled.append(launched.step)
        else:
            self._settle_now(launched.step, tokens, counts, expected)
        for run, work in pairs:
            if run.row < 0 or work.stay is not run.device or not launched.step.is_settled:
                continue
            num_tokens, num_computed, num_ahead = self._counts_of(run)
            if not work.is_chunk and not work.is_cut:
                is_ahead = run.num_sampling > 0 or run in self.planned
                num_left = 0 if is_ahead or run.next_token is not None else 1
                require(num_computed == num_tokens - num_left, "computed tokens", run, num_tokens, num_computed)
                require(is_ahead or num_ahead == 0, "tokens ahead", run, num_ahead)
        for twin, stay, work in launched.twins:
            if not stay.is_over:
                stay.extend(work.sampled)
                twin.known += work.sampled
                twin.next_token = twin.known[-1]
                if len(twin.known) == twin.num_final or twin.known[-1] == LAST_TOKEN:
                    ended.append(twin)
        for run in ended:
            if run.row >= 0:
                self.batch.release([run.row])
                self._end_stay(run)
                self.counts["ends"] += 1

    def _tell(self, run: Run, token: int) -> None:
        """Tell a row its token by `append`, or later by `step`, before its step is settled without tokens."""
        run.known.append(token)
        if self.rng.random() < 0.4:
            self.batch.append([run.row], [token])
        else:
            run.next_token = token
        self.counts["tokens told without settle"] += 1

    def _settle_now(self, step: Any, tokens: list[int], counts: list[int], expected: list[int]) -> None:
        """Settle a step by any form of the call."""
        rng = self.rng
        if not tokens and rng.random() < 0.5:
            places = self.batch.settle(step)
        elif counts == [1] * len(counts) and rng.random() < 0.5:
            places = self.batch.settle(step, tokens)
        else:
            form = rng.choice((list, lambda values: np.array(values, np.int32)))
            places = self.batch.settle(step, form(tokens), form(counts))
        require(bool(step.is_settled), "a step that is not settled")
        require(places.tolist() == expected, "places", places, expected)

    def _settle_late(self) -> None:
        """Settle a step whose tokens were told otherwise, perhaps once later steps of its rows are planned."""
        self.batch.settle(self.unsettled.pop(0))
        self.counts["steps settled late"] += 1

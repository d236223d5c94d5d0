"""Random work for a batch of rows and its model: a small engine whose decisions depend on a seed.

Prompts come from a few families over a tiny vocabulary, and pools are tiny, so that hits, duplicates, evictions and shortage
are all frequent. Rows that are preempted come back with all their tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from batch_model import Grown
from features import PLAIN, Actions, Features, Workload, random_seconds, random_span
from settings import NumPages, Setting
from twin_engine import Feature
from twins import Twins

NUM_ROWS = 5
NUM_REMEMBERED = 5
MAX_NEIGHBOURS = 2

Prompt = tuple[list[int], dict[str, Any]]


class BatchWorkload(Workload):
    """Drives rows at random. It reads their state from the model."""

    def __init__(self, setting: Setting, twins: Twins, num_pages: NumPages, rng: Random, features: Features = PLAIN) -> None:
        self.max_tokens = setting.max_model_len
        super().__init__(setting, twins, num_pages, rng, features)
        self.model: Any = twins.oracle  # OracleRows
        self.attributes: dict[int, dict[str, Any]] = {}  # by row
        self.preempted: deque[Prompt] = deque(maxlen=4)
        self.refused: dict[int, tuple[list[int], dict[str, Any], bool]] = {}  # by row
        self.histories: deque[Prompt] = deque(maxlen=NUM_REMEMBERED)
        self._names = (f"neighbour{number}" for number in itertools.count())
        self.actions = self._weighted_actions()

    def _weighted_actions(self) -> Actions:
        actions: Actions = {
            self.admit: 6,
            self.plan: 8,
            self.step: 7,
            self.settle: 5,
            self.append: 1,
            self.release: 2,
            self.move: 1,
            self.swap: 1,
            self.start_neighbour: 1.5,
            self.finish_neighbour: 1.5,
            self.evict: 0.4,
            self.reset: 0.2,
            self.drain: 0.1,
            self.trim: 2,
            self.draft: 3,
            self.fail_load: 1,
            self.fail_step: 1.5,
            self.misuse_steps: 0.3,
        }
        return self._with_features(actions)

    # selection of rows

    def rows(self) -> list[int]:
        """Return the admitted rows that run."""
        pending = self.model.nums_external
        return [row for row, request in enumerate(self.model.requests) if request is not None and not pending[row]]

    def pending(self) -> list[int]:
        """Return the rows that wait for tokens from elsewhere."""
        return [row for row, num_external in enumerate(self.model.nums_external) if num_external]

    def held_by_any(self) -> list[int]:
        row = self.rng.randrange(len(self.model.requests))
        return [page_id for page_ids in self.model.get_page_ids(row) for page_id in page_ids]

    def free_rows(self) -> list[int]:
        return [row for row, request in enumerate(self.model.requests) if request is None]

    def some(self, rows: list[int]) -> list[int]:
        """Return some of the rows in any order, mostly all."""
        return self.rng.sample(rows, len(rows) if self.rng.random() < 0.6 else self.rng.randint(0, len(rows)))

    def num_tokens(self, row: int) -> int:
        return self.model.requests[row].num_tokens

    def num_left(self, row: int) -> int:
        """Return how many known tokens no step computes."""
        return max(0, self.model.count_left(row))

    def can_plan(self, row: int) -> bool:
        """Whether a row has known tokens left, or a token in flight."""
        awaited, has_room = self.model.awaited(row), self.model.planned[row] < self.max_tokens
        if any(launch.step > self.model.num_steps for launch in awaited):  # the row is in the next step already
            return False
        return self.num_left(row) > 0 or (has_room and 1 <= len(awaited) <= self.model.setting.max_steps_ahead)

    def draw_drafts(self) -> int:
        return self.rng.choice((0, 0, 1, 3, self.max_tokens))

    def num_appendable(self, row: int) -> int:
        return self.max_tokens - self.num_tokens(row)

    # admission

    def admit(self) -> None:
        """Start a new request or one that was preempted, with all of its tokens or some; make room if there is none."""
        if not self.free_rows():
            return
        rng = self.rng
        row = rng.choice(self.free_rows())
        if rng.random() < 0.2:
            self.probe(row)
        if self.refused.get(row) and rng.random() < 0.7:
            token_ids, attributes, is_preempted = self.refused.pop(row)
        elif self.preempted and rng.random() < 0.5:
            (token_ids, attributes), is_preempted = self.preempted.popleft(), True
        else:
            (token_ids, attributes), is_preempted = self._new_request(), False
        if not self.try_to_admit(row, token_ids, attributes, is_preempted) and rng.random() < 0.5 and self.rows():
            self.preempt(rng.choice(self.rows()))
        if self.features.external:
            self.twins.call("list_external")

    def try_to_admit(self, row: int, token_ids: list[int], attributes: dict[str, Any], is_preempted: bool) -> bool:
        """Admit, or keep a refused request: the same objects in the same row are recognised at the next try."""
        options = self._admission_options(len(token_ids))
        options |= self.draw_session() | self._draw_step()
        if self.twins.call("admit", row, token_ids, **attributes, **options, is_preempted=is_preempted) is None:
            self.refused[row] = token_ids, attributes, is_preempted
            return False
        self.attributes[row] = attributes
        return True

    def probe(self, row: int) -> None:
        """Ask what a request would hit in a row: the one that was refused there, or that is admitted next, or another one."""
        token_ids, attributes = self.refused.get(row, ([], {}, False))[:2]
        if not token_ids or self.rng.random() < 0.5:
            token_ids, attributes = self._new_request()
        options = {}
        if self.setting.data_parallel_size is not None:
            options["dp_shard"] = self.rng.choice((None, *range(2 * self.setting.data_parallel_size)))
        self.twins.call("probe", row, token_ids, **attributes, **options)

    def _admission_options(self, num_tokens: int) -> dict[str, Any]:
        rng, options = self.rng, {}
        if rng.random() < 0.5:
            options["num_tokens"] = rng.randint(1, num_tokens)
        if rng.random() < 0.3:
            options["max_num_new_tokens"] = rng.randint(1, num_tokens)
        if rng.random() < 0.1:
            options["num_reserved_pages"] = rng.randint(1, self.num_pages // 2)
        if rng.random() < 0.1:
            options["look_up"] = False
        if self.setting.data_parallel_size is not None:
            options["dp_shard"] = rng.choice((None, *range(2 * self.setting.data_parallel_size)))
        if self.features.states:
            self._align(options, num_tokens)
        if self.features.external and rng.random() < 0.4:
            options["num_external_tokens"] = rng.choice((rng.randint(1, num_tokens), num_tokens, 1, 2**40))
        if resume_at := self.draw_places():
            options["resume_at"] = resume_at
        if self.setting.has_reference_window and rng.random() < 0.5:
            options["num_prompt_tokens"] = rng.randint(0, num_tokens + 2)
        if rng.random() < 0.3:
            options["num_drafts"] = rng.choice((1, 3, self.max_tokens))
        if rng.random() < 0.15:
            options["reserve"] = "prompt"
        return options

    def _align(self, options: dict[str, Any], num_tokens: int) -> None:
        """Let an admission often end at a multiple of the interval."""
        if num_tokens > self.interval and self.rng.random() < 0.5:
            options.pop("num_tokens", None)
            options["max_num_new_tokens"] = self.rng.randint(1, num_tokens // self.interval) * self.interval

    @property
    def interval(self) -> int:
        return self.model.manager.checkpoint_interval or self.setting.page_size

    def _new_request(self) -> Prompt:
        """Return a prompt of a family, or one that begins like a running row or goes on with a conversation."""
        if self.features.tier and self.rng.random() < 0.5:
            return self._most_of(self.families, self.max_tokens), {}
        if self.histories and self.rng.random() < 0.5:
            token_ids, attributes = self.rng.choice(self.histories)
            return (token_ids + self._tokens(self.rng.randint(1, self.interval)))[: self.max_tokens], attributes
        row = self.rng.choice(self.rows() or [None])
        if row is not None and self.rng.random() < 0.5:
            return self._prompt(self.model.requests[row].all_token_ids), self.attributes[row]
        return self._prompt(self.rng.choice(self.families)), self._attributes() if self.rng.random() < 0.4 else {}

    def _prompt(self, base: list[int]) -> list[int]:
        """Return the beginning of other tokens and some more; sometimes a tiny prompt, or the longest possible."""
        rng, page_size = self.rng, self.setting.page_size
        num_shared = rng.choice((len(base), rng.randint(0, len(base) // page_size) * page_size + rng.randint(0, 2)))
        tokens = base[:num_shared] + self._tokens(rng.randint(1, 2 * page_size))
        most = rng.choice(
            (self.max_tokens, self.max_tokens // 2, self.max_tokens // 2, 3 * page_size, 2 * page_size, page_size - 1)
        )
        return tokens[: max(1, most)]

    def _attributes(self) -> dict[str, Any]:
        """Return the extra keys of a request."""
        return self._tenant() if self.rng.random() < 0.5 else {"mm_features": self._features()}

    def _features(self) -> tuple[Feature, ...]:
        """Return features at a few fixed places, the last of which most requests reach only late."""
        page_size = self.setting.page_size
        places = ((0, 2), (1, page_size), (page_size, 1), (2 * page_size - 1, page_size + 1), (self.max_tokens - 3, 9))
        chosen: list[Any] = sorted(self.rng.sample(places, self.rng.randint(0, 2)))
        chosen += [None] if self.rng.random() < 0.2 else []
        return tuple(self.draw_feature(place) for place in chosen)

    # steps

    def _draw_step(self) -> dict[str, int]:
        """Return the step of a call: one of its own, a new one, or one that has rows already."""
        steps = self.steps_in_flight()
        if steps and self.rng.random() < 0.4:
            return {"step": steps[-1]}
        return {"step": self.twins.call("new_step")} if self.rng.random() < 0.4 else {}

    def steps_in_flight(self) -> list[int]:
        """Return the steps that are not settled, and may be in flight: later ones of all rows have not been planned."""
        first = self.model.num_steps - self.model.setting.max_steps_ahead
        steps = enumerate(self.model.steps)
        return [i for i, step in steps if not step.is_settled and (step.number is None or step.number >= first)][-8:]

    def plan(self) -> None:
        """Plan a step of some rows, with or without drafts."""
        rng, rows = self.rng, self.rows()
        rows = self.some(rows if rng.random() < 0.03 else [row for row in rows if self.can_plan(row)])
        if rng.random() < 0.2:  # one number for all rows
            most = min((self.num_left(row) for row in rows if self.num_left(row)), default=1)
            self.plan_all(rows, rng.randint(1, most), self.draw_drafts())
            return
        nums_new = {row: rng.choice((self.num_left(row), rng.randint(1, self.num_left(row) or 1))) or 1 for row in rows}
        if rows and rng.random() < 0.02:
            nums_new[rows[0]] += rng.choice((-1, 1))
        self.plan_all(rows, nums_new, {row: self.draw_drafts() for row in rows})

    def plan_all(self, rows: list[int], num_new: int | dict[int, int], num_drafts: int | dict[int, int]) -> None:
        """Plan, and continue with the rest after a preemption; without drafts where they are refused."""

        def of(values: int | dict[int, int], rows: list[int]) -> int | list[int]:
            return values if isinstance(values, int) else [values[row] for row in rows]

        def call(rows: list[int]) -> Grown | None:
            planned = self.twins.call("plan", rows, of(num_new, rows), of(num_drafts, rows), **self._draw_step())
            return self.twins.call("plan", rows, of(num_new, rows)) if planned is None else planned

        self._persist(rows, call)

    def step(self) -> None:
        """Decode a token of some rows; rarely also of rows with known tokens to compute, or steps ahead, which are refused."""
        rows = [row for row in self.rows() if self.num_appendable(row)]
        if self.rng.random() < 0.95:
            rows = [row for row in rows if not self.num_left(row) and len(self.model.awaited(row)) <= 1]
        rows = self.some(rows)
        token_ids = dict(zip(rows, self._tokens(len(rows)), strict=True))
        self._persist(rows, lambda rows: self.twins.call("step", rows, [token_ids[row] for row in rows], **self._draw_step()))

    def _persist(self, rows: list[int], call: Callable[[list[int]], Grown | None]) -> None:
        """Call for the rows; if one does not fit, preempt any row and call again for the rest, or give up."""
        while True:
            self.take_in_time()
            grown = call(rows)
            if grown is None:
                self.take_moves()
                grown = call(rows)
            num_grown = 0 if grown is None else grown.num_grown  # None: a row is larger than the pool
            if num_grown == len(rows) or self.rng.random() < 0.2:
                return
            victim = self.rng.choice(self.rows())
            rows = [row for row in rows[num_grown:] if row != victim]
            self.preempt(victim)

    def chunk(self) -> None:
        """Compute some rows up to the next checkpoint, with all the tokens that it takes, or without."""
        rows = self.some(self.rows())
        stops = [self.model.manager.states.next_checkpoint(self.model.requests[row]) for row in rows]
        nums_new = {}
        for row, stop in zip(rows, stops, strict=True):
            num_unknown = stop - self.num_tokens(row)
            if num_unknown > 0 and self.rng.random() < 0.6:
                self.twins.call("append", [row] * num_unknown, self._tokens(num_unknown))
            nums_new[row] = min(stop - self.model.requests[row].num_computed_tokens, self.num_left(row))
        self.plan_all([row for row in rows if nums_new[row]], nums_new, 0)

    def append(self) -> None:
        """Let rows know tokens that are not yet computed."""
        rows = [row for row in self.rows() for _ in range(self.rng.randint(0, min(3, self.num_appendable(row))))]
        self.rng.shuffle(rows)
        self.twins.call("append", rows, self._tokens(len(rows)))

    def settle(self) -> None:
        """End the oldest step in flight mostly, with some tokens of each row."""
        rng, steps = self.rng, [i for i in self.steps_in_flight() if self.model.steps[i].members]
        if not steps:
            return
        step = steps[0] if rng.random() < 0.9 else rng.choice(steps)
        nums_sampled = [self._num_sampled(step, stay) for stay, _ in self.model.steps[step].members]
        counts = [rng.choice((num, rng.randint(min(num, 1), num))) for num in nums_sampled]
        if rng.random() < 0.05:
            counts[rng.randrange(len(counts))] += rng.choice((-1, 1))
        tokens = self._tokens(max(0, sum(counts)))
        if not any(counts) and rng.random() < 0.5:
            self.twins.call("settle", step)
        else:
            is_plain = counts == [1] * len(counts) and rng.random() < 0.5
            self.twins.call("settle", step, tokens, None if is_plain else counts)

    def _num_sampled(self, step: int, stay: int) -> int:
        """Return how many tokens a step may tell of a row, which may have been released since."""
        launch = self.model.find_launch(self.model.steps[step], stay)
        if launch is None or launch.is_nobodys:
            return self.rng.randint(0, 1)
        return int(launch.num_drafts) + 1 if launch.is_awaited else 0

    def fail_step(self) -> None:
        """Let one of the last steps fail, and with it those behind; then settle these, or let them fail too."""
        for _ in range(self.rng.choice((1, 1, 2))):
            steps = [step for step in self.steps_in_flight() if not self._has_run_in_part(step)]
            if steps:
                self._remember(self.rows())
                self.twins.call("fail_step", steps[0] if self.rng.random() < 0.3 else self.rng.choice(steps))

    def _has_run_in_part(self, step: int) -> bool:
        """Whether a row has got its token of a step otherwise: then the step has run."""
        model, number = self.model, self.model.steps[step].number
        rows = [model.stays.index(stay) for stay, _ in model.steps[step].members if stay in model.stays]
        return any(all(launch.step != number for launch in model.launches[row]) for row in rows)

    def misuse_steps(self) -> None:
        """Settle what was settled, or with other tokens."""
        steps = range(len(self.model.steps))[-5:]
        if steps:
            step = self.rng.choice(steps)
            if self.model.steps[step].is_settled:
                self.twins.call("settle", step, [], [])
                self.twins.call("fail_step", step)
                self.twins.call("plan", self.rows(), 1, 0, step=step)
            else:
                self.twins.call("settle", step, [1], [0] * len(self.model.steps[step].members))

    def draft(self) -> None:
        """Append drafts, compute them with the rest, and remove the rejected ones."""
        rng, rows = self.rng, self.some([row for row in self.rows() if len(self.model.awaited(row)) <= 1])
        nums_drafts = {row: min(rng.randint(0, 4), self.num_appendable(row)) for row in rows}
        repeated = [row for row in rows for _ in range(nums_drafts[row])]
        self.twins.call("append", repeated, self._tokens(len(repeated)))
        self.plan_all([row for row in rows if self.num_left(row)], {row: self.num_left(row) for row in rows}, 0)
        rows = [row for row in rows if self.model.requests[row] is not None and not self.model.count_ahead(row)]
        self.twins.call("trim", rows, [self.num_tokens(row) - rng.randint(0, nums_drafts[row]) for row in rows])

    def trim(self) -> None:
        """Cut rows anywhere, mostly near the end or in shared pages; refused if a window has moved on."""
        rng, rows = self.rng, self.some(self.rows())
        if rng.random() < 0.2:
            self.twins.call("trim", rows, rng.randint(0, min(map(self.num_tokens, rows), default=0)))
            return
        self.twins.call("trim", rows, [self._cut(row) for row in rows])

    def fail_load(self) -> None:
        """Drop the entries of a row's pages from a token on, and compute the tokens again."""
        if not self.rows():
            return
        row = self.rng.choice(self.rows())
        request = self.model.requests[row]
        cut = self.rng.randint(0, request.num_computed_tokens)
        token_ids = list(request.all_token_ids[cut:])
        self._fail_load(self.model.get_page_ids(row), cut)
        self.twins.call("trim", [row], cut)
        if self.num_tokens(row) == cut:  # nothing prevented it
            self.twins.call("append", [row] * len(token_ids), token_ids)
            self.plan_all([row], self.num_left(row), 0)

    def _cut(self, row: int) -> int:
        num_shared = self._num_shared_tokens(row)
        if num_shared and self.rng.random() < 0.5:
            return self.rng.randint(max(0, num_shared - self.setting.page_size), num_shared)
        depth = self.rng.choice((0, 1, self.setting.page_size, self.max_tokens))
        return max(0, self.num_tokens(row) - self.rng.randint(0, depth))

    def _num_shared_tokens(self, row: int) -> int:
        """Return the end of the last page that others hold too; 0 if there is none."""
        ref_counts = self.model.manager.page_pool.ref_counts
        groups = zip(self.setting.groups, self.model.get_page_ids(row), strict=True)
        ends = [(i + 1) * group.page_size for group, pages in groups for i, page in enumerate(pages) if ref_counts[page] > 1]
        return min(max(ends, default=0), self.num_tokens(row))

    # release and moves

    def release(self) -> None:
        """Release some rows, also those whose steps are in flight."""
        self._remember(self.rows())
        rows = self.rng.sample(self.rows(), min(len(self.rows()), self.rng.randint(0, 2)))
        if self.features.expectations:
            seconds = [random_seconds(self.rng) for _ in rows]
            self.twins.call("release", rows, seconds if self.rng.random() < 0.8 else random_seconds(self.rng))
        else:
            self.twins.call("release", rows)

    def preempt(self, row: int) -> None:
        """Release a row whose request returns with all its tokens."""
        self._remember([row])
        token_ids = list(self.model.requests[row].all_token_ids)
        if token_ids:
            self.preempted.append((token_ids, self.attributes[row]))
        self.twins.call("release", [row], self.draw_seconds().get("seconds"))

    def _remember(self, rows: list[int]) -> None:
        for row in rows if self.features.states else ():
            if self.num_tokens(row) and self.rng.random() < 0.3:
                self.histories.append((list(self.model.requests[row].all_token_ids), self.attributes[row]))

    def move(self) -> None:
        if self.rows() and self.free_rows():
            src, tgt = self.rng.choice(self.rows()), self.rng.choice(self.free_rows())
            self.twins.call("move_row", src, tgt)
            self.attributes[tgt] = self.attributes.pop(src)

    def swap(self) -> None:
        """Exchange any two rows, even one with itself."""
        src, tgt = (self.rng.randrange(len(self.model.requests)) for _ in range(2))
        self.twins.call("swap_row", src, tgt)
        mine, theirs = self.attributes.get(src, {}), self.attributes.get(tgt, {})
        self.attributes |= {tgt: mine, src: theirs}

    # other users of the pool

    def start_neighbour(self) -> None:
        """Run a request through the manager, which caches for rows and hits their pages."""
        if len(self.twins.live_request_ids) < MAX_NEIGHBOURS:
            name, (token_ids, attributes) = next(self._names), self._new_request()
            if self.twins.call("start_neighbour", name, token_ids, **attributes | self.draw_session()) is not None:
                self.twins.live_request_ids[name] = None

    def finish_neighbour(self) -> None:
        name = self.neighbour()
        if name is not None:
            del self.twins.live_request_ids[name]
            self.twins.call("finish_neighbour", name)

    def neighbour(self) -> str | None:
        """Choose a request beside the rows, if there are any."""
        return self.rng.choice(list(self.twins.live_request_ids)) if self.twins.live_request_ids else None

    def let_all_go(self) -> None:
        self.let_go()
        for row in self.rows():
            self.preempt(row)
        self.twins.call("release", self.pending())
        while self.twins.live_request_ids:
            self.finish_neighbour()

    def drain(self) -> None:
        """Release all rows and end all requests, so that a reset succeeds."""
        self.let_go()
        self.twins.call("release", self.pending())
        self.twins.call("release", self.some(self.rows()))
        self.twins.call("release", self.rows())
        while self.twins.live_request_ids:
            self.finish_neighbour()
        self.reset()

    # forks

    def fork(self) -> None:
        """Let free rows go on where a row is."""
        free = self.free_rows()
        if not self.rows() or not free:
            return
        row, targets = self.rng.choice(self.rows()), self.rng.sample(free, self.rng.randint(1, len(free)))
        self.twins.call("fork", row, targets)
        for target in targets:
            if self.model.requests[target] is not None:
                self.attributes[target] = self.attributes[row]
                self.refused.pop(target, None)

    def misuse_fork(self) -> None:
        """Fork to rows that are taken, or none, or from a free row."""
        rows, free = self.rows(), self.free_rows()
        if rows and free:
            row, target = self.rng.choice(rows), self.rng.choice(free)
            wrong = ((row, [row]), (row, []), (row, [target, target]), (row, [self.rng.choice(rows)]), (target, [target]))
            self.twins.call("fork", *self.rng.choice(wrong))

    # expectations, and leases of spans

    def expect(self) -> None:
        """Say when pages of a row are wanted, or of a request beside the rows, or of one that waits."""
        rows, name, seconds = self.rows() + self.pending(), self.neighbour(), random_seconds(self.rng)
        if self.rng.random() < 0.3:
            self.twins.call("expect_prompt", *self._new_request(), seconds)
        elif name is not None and self.rng.random() < 0.3:
            span = random_span(self.rng, self.model.neighbours[name].num_tokens)
            self.twins.call("expect_neighbour", name, *span, seconds=seconds)
        elif rows:
            row = self.rng.choice(rows)
            self.twins.call("expect", row, *random_span(self.rng, self.num_tokens(row)), seconds=seconds)

    def lease_span(self) -> None:
        """Lease pages of a row, for a moment or long."""
        rows = self.rows() + self.pending()
        if rows:
            row = self.rng.choice(rows)
            span = random_span(self.rng, self.num_tokens(row))
            self.twins.call("lease_span", row, *span, seconds=self.rng.choice((0, 0.1, 1, 30, 1e9)))

    # tokens from elsewhere, and from the tier

    def draw_arrived(self, row: int) -> int:
        """Draw a number of tokens for which a row waits, all of them mostly."""
        num_external = self.model.nums_external[row]
        return self.rng.choice((num_external, num_external, self.rng.randint(0, num_external)))

    def commit(self) -> None:
        """End a transfer; where fewer tokens came than a state needs, or copies are due, it cannot."""
        self.take_in_time()
        for row in self.pending()[: self.rng.randint(1, 2)]:
            self.twins.call("commit_external", row, self.draw_arrived(row))

    def commit_part(self) -> None:
        """Cache pages of the first tokens that came for a row."""
        self.take_in_time()
        for row in self.pending()[:1]:
            self.twins.call("commit_external", row, self.draw_arrived(row), is_last=False)

    def fail(self) -> None:
        self.take_in_time()
        if self.pending():
            row = self.rng.choice(self.pending())
            self.twins.call("fail_external", row, self.draw_arrived(row))

    def cancel(self) -> None:
        if self.pending():
            self.twins.call("release", [self.rng.choice(self.pending())])

    def misuse_pending(self) -> None:
        """Make calls for a row that waits, or end what no row waits for."""
        for row in self.pending()[:1]:
            self.twins.call("plan", [row], self.rng.randint(0, 1), 0)
            if self.num_appendable(row):
                self.twins.call("step", [row], [1])
            self.twins.call("commit_external", row, self.model.nums_external[row] + 1)
            if self.num_tokens(row):
                self.twins.call("trim", [row], self.num_tokens(row) - 1)
        for row in self.rows()[:1]:
            self.twins.call(self.rng.choice(("commit_external", "fail_external")), row, self.rng.randint(0, 1))

    def go_back(self) -> None:
        """Let rows compute wrong tokens again, which ends those that cannot, and end such requests beside them."""
        self.twins.call("rewind")
        for name in list(self.twins.live_request_ids):
            if self.twins.call("go_back", name) is not None:
                del self.twins.live_request_ids[name]
                self.twins.call("finish_neighbour", name)

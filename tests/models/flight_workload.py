"""Random work for rows with tokens in flight and their model: steps are planned, resolved in order or not, and taken back."""

from __future__ import annotations

from batch_model import Grown
from batch_workload import BatchWorkload
from features import Actions
from flight_model import OracleFlight


class FlightWorkload(BatchWorkload):
    """Drives rows whose steps are resolved. Calls that grow rows belong to a step."""

    model: OracleFlight

    def _weighted_actions(self) -> Actions:
        actions: Actions = {
            self.plan: 14,
            self.resolve: 9,
            self.take_back: 2,
            self.misuse_steps: 0.7,
            self.release: 1,
            self.move: 1,
            self.swap: 1,
            self.start_neighbour: 1,
            self.finish_neighbour: 1,
            self.evict: 0.3,
            self.reset: 0.2,
            self.drain: 0.1,
            self.trim: 1,
        }
        return self._with_features(actions)

    # steps

    def steps_in_flight(self) -> list[int]:
        """Return the numbers of the steps in flight that have rows."""
        return [i for i, step in enumerate(self.model.steps) if step.is_in_flight and step.calls]

    def plan(self) -> None:
        """Plan a step of several calls."""
        rng, step = self.rng, self.twins.call("new_step")
        planned: set[int] = set()
        for turn in rng.sample((self._grow_some, self._go_ahead, self._decode, self._admit_some), rng.randint(1, 4)):
            self.take_in_time()
            turn(step, planned)

    def _left(self, planned: set[int]) -> list[int]:
        return [row for row in self.rows() if row not in planned]

    def _note(self, rows: list[int], grown: Grown | None, planned: set[int]) -> None:
        """Remember the rows of a step; preempt one if pages are short."""
        if grown is None:
            self.take_moves()
            return
        planned |= set(rows[: grown.num_grown])
        others = self._left(planned)
        if grown.num_grown < len(rows) and others:
            self.preempt(self.rng.choice(others))

    def _grow_some(self, step: int, planned: set[int]) -> None:
        """Compute chunks, and tokens of rows that have none in flight, with drafts."""
        rng = self.rng
        rows = [row for row in self._left(planned) if self.num_uncomputed(row)]
        rows = rng.sample(rows, rng.randint(0, len(rows)))
        news = [rng.choice((self.num_uncomputed(row), rng.randint(1, self.num_uncomputed(row)))) for row in rows]
        pairs = zip(rows, news, strict=True)
        drafts = [rng.choice((0, 0, 1, 3)) if num_new == self.num_uncomputed(row) else 0 for row, num_new in pairs]
        self._note(rows, self.twins.call("grow_in", step, rows, news, drafts), planned)

    def _go_ahead(self, step: int, planned: set[int]) -> None:
        """Plan a step ahead for rows with tokens in flight, sometimes for others too."""
        rng, most = self.rng, self.setting.max_steps_ahead
        rows = self._left(planned)
        if rng.random() < 0.95:
            rows = [row for row in rows if not self.num_uncomputed(row) and 1 <= len(self.model.sampling(row)) <= most]
        rows = rng.sample(rows, len(rows) if rng.random() < 0.7 else rng.randint(0, len(rows)))
        self._note(rows, self.twins.call("step_ahead", step, rows, rng.choice((0, 0, 1, 3))), planned)

    def _decode(self, step: int, planned: set[int]) -> None:
        """Append a token to rows that have none in flight."""
        rows = [row for row in self._left(planned) if not self.model.in_flight(row) and self.num_appendable(row)]
        rows = self.rng.sample(rows, self.rng.randint(0, len(rows)))
        self._note(rows, self.twins.call("step_in", step, rows, self._tokens(len(rows))), planned)

    def _admit_some(self, step: int, planned: set[int]) -> None:
        for row in self.free_rows():
            if self.rng.random() < 0.5:
                continue
            token_ids, attributes = self._new_request()
            options = self._admission_options(len(token_ids)) | self.draw_session()
            if options.get("num_external_tokens"):  # a row that waits is in no step
                options.pop("num_drafts", None)
                if self.twins.call("admit", row, token_ids, **attributes, **options) is not None:
                    self.attributes[row] = attributes
                continue
            if options.keys() & {"num_tokens", "max_num_new_tokens", "ends_at_checkpoint"}:
                options.pop("num_drafts", None)  # drafts are behind prompts
            if self.twins.call("admit_in", step, row, token_ids, **attributes, **options) is not None:
                self.attributes[row] = attributes
                planned.add(row)

    def resolve(self) -> None:
        """End the oldest step mostly, with some tokens of each row."""
        rng, steps = self.rng, self.steps_in_flight()
        if not steps:
            return
        step = steps[0] if rng.random() < 0.9 else rng.choice(steps)
        entries = self.model.steps[step].entries
        counts = [rng.randint(1, 1 + entry.num_drafts) if entry.samples else 0 for entry in entries]
        if rng.random() < 0.03 and counts:
            counts[rng.randrange(len(counts))] += rng.choice((-1, 1))
        tokens = self._tokens(max(0, sum(counts)))
        if not any(counts) and rng.random() < 0.5:
            self.twins.call("resolve", step, None, None)
        else:
            is_plain = counts == [1] * len(counts) and rng.random() < 0.5
            self.twins.call("resolve", step, tokens, None if is_plain else counts)

    def take_back(self) -> None:
        """Take back the last steps; rarely another one."""
        for _ in range(self.rng.choice((1, 1, 2))):
            steps = self.steps_in_flight()
            if steps:
                self.take_in_time()
                self.twins.call("undo_step", steps[-1] if self.rng.random() < 0.9 else self.rng.choice(steps))

    def misuse_steps(self) -> None:
        """Resolve what has ended, or with other tokens."""
        rng, steps = self.rng, range(len(self.model.steps))
        if not steps:
            return
        step = rng.choice(steps[-5:])
        if not self.model.steps[step].is_in_flight:
            self.twins.call("resolve", step, [], [])
            self.twins.call("undo_step", step)
        else:
            self.twins.call("resolve", step, [1], [0] * len(self.model.steps[step].entries))

    def chunk(self) -> None:
        """Compute some rows up to the next checkpoint."""
        step, rows = self.twins.call("new_step"), [row for row in self.rows() if self.num_uncomputed(row)]
        stops = self.twins.call("find_next_checkpoint", rows)
        computed = [self.model.requests[row].num_computed_tokens for row in rows]
        pairs = zip(rows, stops, computed, strict=True)
        news = [min(stop - num_computed, self.num_uncomputed(row)) for row, stop, num_computed in pairs]
        self.take_in_time()
        self._note(rows, self.twins.call("grow_in", step, rows, news, 0), set())

    # what needs rows without tokens in flight

    def trim(self) -> None:
        """Cut rows without steps in flight; with tokens ahead it is refused."""
        rows = [row for row in self.rows() if not self.model.in_flight(row) or self.model.count_ahead(row)]
        rows = self.rng.sample(rows, self.rng.randint(0, min(2, len(rows))))
        self.twins.call("trim", rows, [self._cut(row) for row in rows])

    def fork(self) -> None:
        rows = [row for row in self.rows() if self.model.in_flight(row) and not self.model.count_ahead(row)]
        if not rows:
            super().fork()

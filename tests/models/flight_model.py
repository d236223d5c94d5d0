"""Rows with tokens in flight beside the oracle: steps that are planned, resolved and taken back.

`OracleFlight` keeps a list of what each step does for each row, and works out everything else from it, again in each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from batch_model import Amounts, BatchRows, BatchState, Grown, Growth, OracleRows, grown_of

import pagepool


class FlightState(NamedTuple):
    """The observable state of rows with tokens in flight."""

    rows: BatchState
    stays: list[int]  # numbered in the order in which they are seen
    num_ahead_tokens: list[int]
    steps: list[tuple[bool, list[int]]]  # whether each is resolved, and its rows


@dataclass(eq=False)
class Entry:
    """What a step does for a row."""

    stay: int
    row: int  # at the time of the call
    num_drafts: int
    samples: bool
    is_ahead: bool
    stop: int  # counted tokens after the call
    admission: int  # of the row, as moves and forks count it
    is_cut: bool = False  # computed tokens of the row were cut since
    num_hits: int | None = None  # of an admission


@dataclass(eq=False)
class OracleStep:
    """A step: the calls that made it, each with its entries, and with what `undo` needs of one that grew rows."""

    calls: list[tuple[list[Entry], list[Growth]]] = field(default_factory=list)
    is_resolved: bool = False
    is_undone: bool = False

    @property
    def entries(self) -> list[Entry]:
        return [entry for entries, _ in self.calls for entry in entries]

    @property
    def is_in_flight(self) -> bool:
        return not (self.is_resolved or self.is_undone)


def number_as_seen(stays: list[int], seen: dict[int, int]) -> list[int]:
    """Number stays in the order in which they are seen."""
    return [seen.setdefault(stay, len(seen)) for stay in stays]


class OracleFlight(OracleRows):
    """Rows over the oracle whose steps are resolved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.manager.caches_computed:
            self.manager.resolved = {}
        self.steps: list[OracleStep] = []
        self.stays = [0] * len(self.requests)
        self.num_stays = 0
        self.seen: dict[int, int] = {0: 0}  # stays, numbered

    # what follows from the steps

    def in_flight(self, row: int) -> list[Entry]:
        """Return what steps in flight do for a row, in the order of launch."""
        steps = [step for step in self.steps if step.is_in_flight]
        return [entry for step in steps for entry in step.entries if self.stays[row] and self.find_place(entry) == row]

    def sampling(self, row: int) -> list[Entry]:
        return [entry for entry in self.in_flight(row) if entry.samples]

    def count_ahead(self, row: int) -> int:
        """Count the positions behind the known tokens that steps in flight write: each step but the first computes a token that
        the one before samples, and all have drafts.
        """
        sampling = self.sampling(row)
        num_ahead = sum(1 + entry.num_drafts for entry in sampling) - 1 if sampling else 0
        return min(num_ahead, self.setting.max_model_len - self.requests[row].num_tokens) if sampling else 0

    def find_place(self, entry: Entry) -> int:
        """Return the row of an entry's stay; -1 if the stay has ended, or lost computed tokens."""
        return self.stays.index(entry.stay) if entry.stay in self.stays and not entry.is_cut else -1

    def _forget_writes(self, request: Any) -> None:
        """Let steps in flight have no tokens for a row whose computed tokens are cut."""
        super()._forget_writes(request)
        self._set_resolved(request, self.manager.count_resolved(request))
        for entry in self.in_flight(self.requests.index(request)):
            entry.is_cut = True

    # steps

    def new_step(self) -> int:
        self.steps.append(OracleStep())
        return len(self.steps) - 1

    def admit_in(self, step: int, row: int, token_ids: list[int], **options: Any) -> int | None:
        """Admit, as a part of a step."""
        self.refusal = None
        self.require_no_drafts(options.get("num_drafts", 0))
        num_hits = self.admit(row, token_ids, **options)
        if num_hits is not None:
            entry = self._entry_of(row, options.get("num_drafts", 0), False)
            entry.num_hits = num_hits
            self.steps[step].calls.append(([entry], []))
        return num_hits

    def admit(self, row: int, token_ids: list[int], **options: Any) -> int | None:
        self.writes.has_drafts, self.writes.start = self.manager.restores_states, 0
        num_hits = super().admit(row, token_ids, **options)
        if num_hits is not None:
            self.num_stays += 1
            self.stays[row] = self.num_stays
            self._set_resolved(self.requests[row], num_hits)
        return num_hits

    def _set_resolved(self, request: Any, num_tokens: int) -> None:
        """Let pages of so many tokens be cached, if that is done once their steps are resolved."""
        if self.manager.resolved is not None:
            self.manager.resolved[request.request_id] = num_tokens

    def commit_external(self, row: int, num_tokens: int) -> None:
        super().commit_external(row, num_tokens)
        self._set_resolved(self.requests[row], self.requests[row].num_computed_tokens)

    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        num_computed = super().fail_external(row, num_valid_tokens)
        self._set_resolved(self.requests[row], num_computed)
        return num_computed

    def grow_in(self, step: int, rows: list[int], num_new: Amounts, num_ahead: Amounts) -> Grown:
        aheads = [num_ahead] * len(rows) if isinstance(num_ahead, int) else num_ahead
        self.require_no_drafts(max(aheads, default=0))
        return self._note(step, rows, aheads, self.grow(rows, num_new, num_ahead))

    def require_no_drafts(self, num_drafts: int) -> None:
        """Refuse drafts that change states which are kept."""
        if num_drafts and self.writes.max_steps_ahead and self.manager.writes_states and not self.manager.restores_states:
            raise ValueError("drafts would change states")

    def step_in(self, step: int, rows: list[int], token_ids: list[int]) -> Grown:
        return self._note(step, rows, [0] * len(rows), self.step(rows, token_ids))

    def _note(self, step: int, rows: list[int], nums_drafts: Sequence[int], grown: Grown) -> Grown:
        chosen = list(zip(rows, nums_drafts, strict=True))[: grown.num_grown]
        entries = [self._entry_of(row, num_drafts, False) for row, num_drafts in chosen]
        self.steps[step].calls.append((entries, self.growths.pop()))
        return grown

    def _entry_of(self, row: int, num_drafts: int, is_ahead: bool) -> Entry:
        request = self.requests[row]
        num_left = self.setting.max_model_len - request.num_tokens - (self.count_ahead(row) + 1 if is_ahead else 0)
        samples = request.num_computed_tokens == request.num_tokens
        num_drafts = min(num_drafts, num_left) if samples else 0
        return Entry(self.stays[row], row, num_drafts, samples, is_ahead, request.num_computed_tokens, self.admissions[row])

    def step_ahead(self, step: int, rows: list[int], num_drafts: int) -> Grown:
        """Give rows slots for tokens that steps in flight sample."""
        if not self.writes.max_steps_ahead:
            raise ValueError("no steps ahead")
        self.require_running(rows)
        if len({*rows}) < len(rows):
            raise ValueError("a row twice")
        for row in rows:
            self.require_ready(row, num_drafts)
        ends = [self._count_slots(row, num_drafts) for row in rows]
        for row, end in zip(rows, ends, strict=True):
            self.require_fit(row, end)
        grown, entries = Grown(0, [], [], []), []
        self.growths.append([])
        for row, end in zip(rows, ends, strict=True):
            if not self._grow_ahead(row, end, num_drafts, grown):
                grown = grown._replace(refusal=self._explain(row, end))
                break
            entries.append(self._entry_of(row, num_drafts, True))
            grown = grown._replace(num_grown=grown.num_grown + 1)
        self.steps[step].calls.append((entries, self.growths.pop()))
        return grown

    def require_ready(self, row: int, num_drafts: int) -> None:
        """Refuse a step ahead of a row that has no token in flight, or too many steps, or tokens that have no slots."""
        request = self.requests[row]
        if request is None:
            raise ValueError("a free row")
        num_steps = len(self.sampling(row))
        if request.num_computed_tokens < request.num_tokens or not 1 <= num_steps <= self.writes.max_steps_ahead:
            raise ValueError("no step ahead")
        if request.num_tokens + self.count_ahead(row) >= self.setting.max_model_len:
            raise ValueError("no room")
        self.require_no_drafts(num_drafts)
        self.require_no_copies([row])
        self.require_no_writes([row])

    def _count_slots(self, row: int, num_drafts: int) -> int:
        """Return how many tokens behind those that are known have slots after a step ahead."""
        return min(self.count_ahead(row) + 1 + num_drafts, self.setting.max_model_len - self.requests[row].num_tokens)

    def _grow_ahead(self, row: int, num_ahead: int, num_drafts: int, grown: Grown) -> bool:
        """Give back the pages that no step in flight reads, and take others."""
        self.manager.enter_known(self.requests[row])
        self.manager._skip_pages(self.requests[row])
        self.writes.has_drafts = self.manager.restores_states
        self.writes.start = self.requests[row].num_tokens + self.count_ahead(row)
        return super()._grow_row(row, 0, num_ahead, grown, False)

    def _grow_row(self, row: int, num_new: int, num_ahead: int, grown: Grown, is_step: bool) -> bool:
        self.writes.has_drafts, self.writes.start = self.manager.restores_states, 0
        return super()._grow_row(row, num_new, num_ahead, grown, is_step)

    def resolve(self, step: int, token_ids: list[int] | None, counts: list[int] | None) -> list[int]:
        """End a step: rows know its tokens, and what is full is entered."""
        planned = self.steps[step]
        if not planned.is_in_flight:
            raise ValueError("a step that has ended")
        entries = planned.entries
        if counts is None:
            counts = [0 if token_ids is None else 1] * len(entries)
        tokens = list(token_ids or [])
        if len(counts) != len(entries) or sum(counts) != len(tokens) or any(count < 0 for count in counts):
            raise ValueError("other tokens than counts")
        for entry, count in zip(entries, counts, strict=True):
            row = self.find_place(entry)
            if row >= 0:
                if count > (entry.num_drafts + 1 if entry.samples else 0):
                    raise ValueError("more tokens than the step samples")
                if entry.samples and self.sampling(row)[0] is not entry:
                    raise ValueError("an earlier step comes first")
                if entry.samples and not count and len(self.sampling(row)) > 1:
                    raise ValueError("a later step computes a token")
                if self.requests[row].num_tokens + count > self.setting.max_model_len:
                    raise ValueError("too many tokens")
        planned.is_resolved = True
        places = []
        with self.manager.entering_later():
            for entry, count in zip(entries, counts, strict=True):
                row, sampled, tokens = self.find_place(entry), tokens[:count], tokens[count:]
                places.append(row)
                if row >= 0:
                    self._resolve_row(row, entry, sampled)
        return places

    def _resolve_row(self, row: int, entry: Entry, sampled: list[int]) -> None:
        request = self.requests[row]
        request.all_token_ids += sampled
        if entry.samples and sampled:
            request.num_computed_tokens = request.num_tokens - (not self.sampling(row))
        self._plan_anew(row)
        num_resolved = request.num_computed_tokens if entry.is_ahead else min(request.num_computed_tokens, entry.stop)
        num_resolved = request.num_tokens - 1 if sampled else num_resolved
        if self.manager.resolved is not None:
            self._set_resolved(request, max(num_resolved, self.manager.resolved[request.request_id]))
        self.writes.settle(request, request.num_computed_tokens, self._shard_of(row))
        for i in self.writes.state_ids:  # no state is written among drafts
            held = self.manager.held[request.request_id][i]
            held.num_cached_pages = max(held.num_cached_pages, request.num_computed_tokens // self.manager.hit_step)
        self.manager._enter_full_pages(request, self.manager.count_cacheable(request))

    def _plan_anew(self, row: int) -> None:
        """Let no more tokens be planned than steps in flight compute: drafts may have been rejected since they were."""
        if self.writes.max_steps_ahead:
            num_planned = self.requests[row].num_tokens + self.count_ahead(row) if self.sampling(row) else 0
            self.writes.num_planned[self.requests[row].request_id] = num_planned

    def undo_step(self, step: int) -> None:
        """Take back the last step of its rows, the last call first."""
        planned = self.steps[step]
        if not planned.is_in_flight:
            raise ValueError("a step that has ended")
        later = [entry for other in self.steps[step + 1 :] if not other.is_undone for entry in other.entries]
        self._check_undo(planned, {entry.stay for entry in later})
        admitted = [entry for entry in planned.entries[::-1] if entry.num_hits is not None]
        if admitted:
            self.release([self.find_place(entry) for entry in admitted], [entry.num_hits or 0 for entry in admitted])
        for entries, growths in planned.calls[::-1]:
            for entry, growth in list(zip(entries, growths, strict=False))[::-1]:
                request = self.requests[growth.row]
                num_computed, num_tokens = self._counts_before(entry, growth)
                request.num_computed_tokens = num_computed
                self.manager.undo(request, num_computed, num_tokens, growth.new_pages)
                if self.writes.max_steps_ahead:
                    self.writes.num_planned[request.request_id] = growth.num_planned
                self.writes.undo(request)
                del request.all_token_ids[num_tokens:]
                self._set_resolved(request, self.manager.count_resolved(request))
                self._show(growth.row)
        planned.is_undone = True
        for entry in planned.entries:
            if entry.num_hits is None:
                self._plan_anew(entry.row)

    def _check_undo(self, planned: OracleStep, later: set[int]) -> None:
        """Refuse to take back a step if a row was changed, or if others hold what it writes again: not those admitted in it."""
        places = [self.find_place(entry) for entry in planned.entries if entry.num_hits is not None]
        admitted = [self.requests[row] for row in places if row >= 0]
        counts = self.manager.page_pool.ref_counts
        shared = [page for request in admitted for page in self.manager.pages_of(request)]
        for page in shared:
            counts[page] -= 1
        try:
            for entries, growths in planned.calls[::-1]:
                for i in range(len(entries) - 1, -1, -1):
                    self._check_entry(entries[i], growths[i] if growths else None, entries[i].stay in later)
        finally:
            for page in shared:
                counts[page] += 1

    def _check_entry(self, entry: Entry, growth: Growth | None, has_later: bool) -> None:
        """Refuse to take back what a step does for a row, with the error for copies where any are due."""
        is_there = self.find_place(entry) == entry.row and self.admissions[entry.row] == entry.admission and not has_later
        if growth is None and is_there:
            return
        if self.requests[entry.row] is not None:
            self.require_no_copies([entry.row])
        if not is_there:
            raise ValueError("the row has ended, moved or was forked since")
        request = self.requests[entry.row]
        assert growth is not None
        if not entry.is_ahead:
            has_tokens = growth.num_tokens in (None, request.num_tokens)
            if growth.num_computed != request.num_computed_tokens or not has_tokens:
                raise ValueError("the row has changed since")
        self.manager.check_undo(request, self._counts_before(entry, growth)[0], growth.new_pages)

    def _counts_before(self, entry: Entry, growth: Growth) -> tuple[int, int]:
        """Return the computed and known tokens of a row without its last step."""
        request = self.requests[growth.row]
        if entry.is_ahead:
            return request.num_tokens - (len(self.sampling(growth.row)) == 1), request.num_tokens
        return growth.num_computed - growth.num_new, request.num_tokens - (growth.num_tokens is not None)

    # other calls

    def release(self, rows: list[int], num_computed_tokens: Amounts | None = None, seconds: Any = None) -> None:
        super().release(rows, num_computed_tokens, seconds)
        for row in rows:
            self.stays[row] = 0

    def swap_row(self, src: int, tgt: int) -> None:
        super().swap_row(src, tgt)
        self.stays[src], self.stays[tgt] = self.stays[tgt], self.stays[src]

    def fork(self, row: int, targets: list[int]) -> None:
        if self.requests[row] is not None:
            self.require_resolved([row])
        super().fork(row, targets)
        for target in targets:
            self.num_stays += 1
            self.stays[target] = self.num_stays
            self._set_resolved(self.requests[target], self.manager.count_resolved(self.requests[row]))

    def require_resolved(self, rows: list[int]) -> None:
        if self.writes.max_steps_ahead and any(self.count_ahead(row) for row in rows):
            raise ValueError("tokens ahead")

    def state(self, request_ids: Iterable[str]) -> Any:
        is_counted = self.writes.max_steps_ahead > 0
        aheads = [self.count_ahead(row) if is_counted and self.requests[row] else 0 for row in range(len(self.requests))]
        steps = [(step.is_resolved, [entry.row for entry in step.entries]) for step in self.steps if not step.is_undone]
        return FlightState(super().state(request_ids), number_as_seen(self.stays, self.seen), aheads, steps[-4:])


class BatchFlight(BatchRows):
    """A `RunningBatch` whose steps are resolved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[Any] = []
        self.undone: set[int] = set()
        self.nums_pages: dict[int, int] = {}  # new pages of each step
        self.seen: dict[int, int] = {0: 0}  # stays, numbered

    def new_step(self) -> int:
        self.steps.append(self.batch.new_step())
        return len(self.steps) - 1

    def admit_in(self, step: int, row: int, token_ids: list[int], **options: Any) -> int | None:
        return self.admit(row, token_ids, step=self.steps[step], **options)

    def _noted(self, step: int, result: pagepool.StepResult) -> Grown:
        """Return what the last call of a step gave, which lists the new pages of all calls."""
        assert result is self.steps[step]
        grown, start = grown_of(result), self.nums_pages.get(step, 0)
        self.nums_pages[step] = len(grown.page_ids)
        return grown._replace(page_ids=grown.page_ids[start:], rows=grown.rows[start:], groups=grown.groups[start:])

    def grow_in(self, step: int, rows: list[int], num_new: Amounts, num_ahead: Amounts) -> Grown:
        self.named = set(rows)
        return self._noted(step, self.batch.grow(*map(self._formed, (rows, num_new, num_ahead)), step=self.steps[step]))

    def step_in(self, step: int, rows: list[int], token_ids: list[int]) -> Grown:
        self.named = set(rows)
        return self._noted(step, self.batch.step(*map(self._formed, (rows, token_ids)), step=self.steps[step]))

    def step_ahead(self, step: int, rows: list[int], num_drafts: int) -> Grown:
        self.named = set(rows)
        return self._noted(step, self.batch.step_ahead(self._formed(rows), num_drafts, step=self.steps[step]))

    def resolve(self, step: int, token_ids: list[int] | None, counts: list[int] | None) -> list[int]:
        are_right = all(value >= 0 for value in [*(token_ids or ()), *(counts or ())])
        forms = [values if values is None or not are_right else self._formed(values) for values in (token_ids, counts)]
        places = self.batch.resolve(self.steps[step], *forms)
        assert places.dtype == np.int32
        return places.tolist()

    def _plan_anew(self, row: int) -> None:
        """Let no more tokens be planned than steps in flight compute: drafts may have been rejected since they were."""
        if self.writes.max_steps_ahead:
            num_planned = self.requests[row].num_tokens + self.count_ahead(row) if self.sampling(row) else 0
            self.writes.num_planned[self.requests[row].request_id] = num_planned

    def undo_step(self, step: int) -> None:
        self.named = set(range(self.batch.num_tokens.size))
        self.batch.undo(self.steps[step])
        self.undone.add(step)

    def state(self, request_ids: Iterable[str]) -> Any:
        batch = self.batch
        stays = number_as_seen(batch.stays.tolist(), self.seen)
        assert batch.stays.dtype == np.int64
        assert batch.num_ahead_tokens.dtype == np.int32
        steps = [(bool(step.is_resolved), step.rows.tolist()) for i, step in enumerate(self.steps) if i not in self.undone]
        return FlightState(super().state(request_ids), stays, batch.num_ahead_tokens.tolist(), steps[-4:])

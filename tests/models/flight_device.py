"""A device that runs launched steps later, in order, and checks what it reads: see `flight_engine.py`.

It knows the tokens of each stay by itself, since it samples them, and the host knows them a step or two later. The pages of a
step are those of its launch. A step copies first, then writes the keys of its tokens, drafts included, and reads all that they
attend to. States are those behind the accepted drafts, which an engine keeps behind each draft. A failed step writes garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from contents_device import NOTHING, Device, Histories, find_first_read, require
from settings import Group, NumPages, Setting
from twins import copies_of

from pagepool import Moves

VOCABULARY, LAST_TOKEN = 23, 5
WRONG_DRAFT = VOCABULARY  # no token is sampled that is equal to it

PagesByGroup = Sequence[Sequence[int]]


def sample(tokens: Sequence[int]) -> int:
    """Return the token behind others."""
    return (sum((i + 3) * token for i, token in enumerate(tokens)) * 7919 + 13) % VOCABULARY


@dataclass(eq=False)
class Stay:
    """A stay of a request in a row, as the device knows it."""

    histories: Histories
    tokens: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # histories of the tokens
    is_over: bool = False  # for the host; launched steps still run

    def extend(self, tokens: Sequence[int]) -> Stay:
        for token in tokens:
            self.numbers.append(self.histories.follow(self.numbers[-1] if self.numbers else NOTHING, token))
            self.tokens.append(token)
        return self


@dataclass(eq=False)
class Work:
    """The tokens of a stay that a step computes, as the host has planned them: for the longest outcome of the steps before."""

    stay: Stay
    start: int
    stop: int
    num_known: int  # tokens that the host knew
    pages: PagesByGroup
    is_ahead: bool  # its first token is sampled by an earlier step
    is_chunk: bool  # it ends inside a prompt, and samples nothing
    place: int = -1  # in the arrays of the step
    is_cut: bool = False  # its tokens were cut while it was in flight, so that it samples nothing
    writes: list[tuple[int, int, int]] = field(default_factory=list)  # tokens, page and group of states
    sampled: list[int] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        return 0 if self.is_chunk else self.stop - self.start - 1 if self.is_ahead else self.stop - self.num_known


@dataclass
class Span:
    """A work as it is: tokens [first, stop) of these, with drafts behind `num_true`."""

    work: Work
    first: int
    num_true: int
    numbers: list[int]
    drafts: list[int]


class FlightDevice:
    """Cells of pages, and of those of the host tier. With `reads_before` a step reads what earlier steps have written before it
    writes anything itself.
    """

    def __init__(
        self, setting: Setting, num_pages: NumPages, tier_pages: NumPages | None, rng: Random, reads_before: bool
    ) -> None:
        self.groups: tuple[Group, ...] = setting.groups
        self.histories = Histories()
        self.cells = Device(setting.pools(num_pages), setting.groups, self.histories)
        self.host = Device(setting.pools(num_pages if tier_pages is None else tier_pages), setting.groups, self.histories)
        self.rng, self.reads_before = rng, reads_before
        self.num_stale = 0

    def admit(self, tokens: Sequence[int]) -> Stay:
        return Stay(self.histories).extend(tokens)

    # moves

    def move(self, moves: Moves) -> None:
        """Make saves, loads and copies."""
        for src, dst, group in copies_of(moves.saves):
            self.host._cells_of(group)[dst] = self.cells._cells_of(group)[src]
        for src, dst, group in copies_of(moves.loads):
            self.cells._cells_of(group)[dst] = self.host._cells_of(group)[src]
        self.cells.copy(copies_of(moves.copies))

    # steps

    def run(self, works: Sequence[Work]) -> None:
        """Run the works of a step."""
        spans = [self._begin(work) for work in works]
        alive = [span for span in spans if not span.work.stay.is_over and not span.work.is_cut]
        self.num_stale += len(spans) - len(alive)
        for span in alive:
            self._check_states(span)
        for span in alive if self.reads_before else ():
            self._check_keys(span, span.first)
        for span in spans:
            self._write_keys(span)
        for span in alive:
            self._check_keys(span, len(span.numbers))
        for span in spans:
            self._end(span)

    def fail(self, works: Sequence[Work]) -> None:
        """Run the works of a failed step: what they write is garbage, or was not written."""
        for work in works:
            span, garbage = self._begin(work), self.histories.make_garbage()
            for group_id, group in enumerate(self.groups):
                if group.kind == "mamba":
                    self._write_state(group_id, work.pages[group_id][0], garbage)
                    continue
                slots = self._slots(span, group_id, span.first, len(span.numbers))
                slots = slots[[self.rng.random() < 0.8 for _ in slots]]
                self.cells.write(group_id, slots, [garbage] * len(slots))
            for _, page, group_id in work.writes:
                self._write_state(group_id, page, garbage)

    def receive(self, work: Work) -> None:
        """Write tokens that come from elsewhere, and the states behind them."""
        span = Span(work, work.start, work.stop, work.stay.numbers[: work.stop], [])
        self._write_keys(span)
        self._end(span)

    def _begin(self, work: Work) -> Span:
        """Find out which tokens a work has: the host may have planned it behind drafts that were rejected."""
        stay = work.stay
        first = len(stay.tokens) - 1 if work.is_ahead else work.start
        require(first <= work.start, "a step begins behind its tokens", first, work.start)
        if work.is_chunk:
            return Span(work, first, work.stop, stay.numbers[: work.stop], [])
        num_drafts = work.num_drafts
        true, drafts = list(stay.tokens), []
        for _ in range(num_drafts):
            true.append(sample(true))
            drafts.append(true[-1] if self.rng.random() < 0.75 else WRONG_DRAFT)
        numbers = list(stay.numbers)
        for draft in drafts:
            numbers.append(self.histories.follow(numbers[-1], draft))
        return Span(work, first, len(stay.tokens), numbers, drafts)

    def _slots(self, span: Span, group_id: int, start: int, stop: int) -> Any:
        size, pages = self.groups[group_id].page_size, span.work.pages[group_id]
        require(stop <= len(pages) * size, "no slot", group_id, stop, len(pages) * size)
        return np.array([pages[at // size] * size + at % size for at in range(start, stop)], dtype=np.int32)

    def _check_states(self, span: Span) -> None:
        """Compare the states with which a work begins."""
        for group_id, group in enumerate(self.groups):
            if group.kind == "mamba" and span.first:
                page = np.array([span.work.pages[group_id][0]], dtype=np.int32)
                self.cells.compare(group_id, page, [span.numbers[span.first - 1]], f"a state of {span.first} tokens")

    def _check_keys(self, span: Span, stop: int) -> None:
        for group_id, group in enumerate(self.groups):
            first = find_first_read(group, span.first)
            if group.kind != "mamba" and first < stop:
                slots = self._slots(span, group_id, first, stop)
                self.cells.compare(group_id, slots, span.numbers[first:stop], f"keys of tokens {first} to {stop}")

    def _write_keys(self, span: Span) -> None:
        for group_id, group in enumerate(self.groups):
            if group.kind != "mamba":
                slots = self._slots(span, group_id, span.first, len(span.numbers))
                self.cells.write(group_id, slots, span.numbers[span.first :])

    def _end(self, span: Span) -> None:
        """Sample, and write the states behind what is accepted."""
        work, stay = span.work, span.work.stay
        num_right = span.num_true
        for draft in [] if work.is_chunk or work.is_cut else [*span.drafts, None]:
            token = sample(stay.tokens)
            stay.extend([token])
            work.sampled.append(token)
            if draft != token:
                break
            num_right += 1
        for num_tokens, page, group_id in work.writes:
            is_within = span.first < num_tokens <= num_right
            require(
                is_within or stay.is_over or work.is_cut,
                "a write of a state that the step does not have",
                num_tokens,
                span.first,
                num_right,
            )
            self._write_state(group_id, page, span.numbers[num_tokens - 1] if num_tokens <= num_right else NOTHING)
        for group_id, group in enumerate(self.groups):
            if group.kind == "mamba":
                self._write_state(group_id, work.pages[group_id][0], span.numbers[num_right - 1])

    def _write_state(self, group_id: int, page: int, number: int) -> None:
        self.cells.write(group_id, np.array([page], dtype=np.int32), [number])

    def holds(self, pages: PagesByGroup, stay: Stay, num_tokens: int) -> bool:
        """Whether what the token behind some others attends to is there now."""
        span = Span(Work(stay, 0, 0, 0, pages, False, False), num_tokens, num_tokens, stay.numbers, [])
        return all(
            self.cells.holds(i, self._slots(span, i, first, num_tokens), stay.numbers[first:num_tokens])
            for i, group in enumerate(self.groups)
            if group.kind != "mamba" and (first := find_first_read(group, num_tokens)) < num_tokens
        )

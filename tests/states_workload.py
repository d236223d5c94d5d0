"""The random work of `workload` and `batch_workload`, with checkpoints, copies that are taken in time or not, and forks.

Chunks often end where a checkpoint can be made, and conversations come back, so that checkpoints are hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from batch_model import Grown
from batch_workload import BatchWorkload
from pin_workload import PinningBatchWorkload, PinningWorkload
from retention_workload import RetainingBatchWorkload, RetainingWorkload
from settings import Setting
from twins import Twins
from workload import RandomWorkload, Request

Actions = dict[Callable[[], None], float]
NUM_REMEMBERED = 5


class Copying:
    """Takes the copies of a workload's twins, mostly before they are in the way."""

    twins: Any
    rng: Random

    def take_copies(self) -> None:
        self.twins.call("take_copies")

    def take_all(self) -> None:
        """Take everything that is in the way of a step."""
        self.take_copies()

    def take_in_time(self) -> None:
        if self.rng.random() < 0.85:
            self.take_copies()

    def drain(self) -> None:
        """Mostly without copies that are due, so that the reset succeeds."""
        if self.rng.random() < 0.7:
            self.take_copies()
        super().drain()  # type: ignore[misc]


class StatesWorkload(Copying, RandomWorkload):
    """Requests whose states are kept, and which fork."""

    def _weighted_actions(self) -> Actions:
        return super()._weighted_actions() | {self.take_copies: 2, self.fork: 1.5, self.misuse_fork: 0.2}

    def _num_admitted(self, num_tokens: int, num_left: int, least: int) -> int:
        num_aligned = self._num_aligned(num_tokens, num_left)
        is_aligned = num_aligned >= max(1, least) and self.rng.random() < 0.5
        return num_aligned if is_aligned else super()._num_admitted(num_tokens, num_left, least)

    def _num_grown(self, request: Request, num_left: int) -> int:
        if self.rng.random() < 0.5:
            num_new = self.twins.call("find_next_checkpoint", request) - request.num_computed_tokens
            if num_new <= num_left:
                return num_new
        return super()._num_grown(request, num_left)

    def _num_aligned(self, num_tokens: int, num_left: int) -> int:
        """Return how many tokens are computed up to the last multiple of the interval; less than 1 if there is none."""
        interval = self.twins.oracle.manager.states.interval or self.page_size
        return (num_tokens + num_left) // interval * interval - num_tokens

    def grow(self) -> None:
        self.take_in_time()
        super().grow()

    def fork(self) -> None:
        """Let any running request go on twice."""
        if self.engine.running:
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                self.engine.fork(self.rng.choice(self.engine.running))

    def misuse_fork(self) -> None:
        """Fork to a request that has other tokens or pages, or from one without pages."""
        if len(self.engine.running) < 2:
            return
        first, second = self.rng.sample(self.engine.running, 2)
        self.twins.call("fork", first, second)
        other = replace(first, request_id="other", num_computed_tokens=first.num_computed_tokens + 1)
        self.twins.call("fork", first, other)
        if first.num_computed_tokens >= self.setting.page_size and self.setting.enable_caching:
            tokens = [(token + 1) % 3 for token in first.all_token_ids]
            self.twins.call("fork", first, replace(first, request_id="other", all_token_ids=tokens))
        self.twins.call("free_page_hashes", other)
        if self.engine.waiting:
            waiting = self.rng.choice(self.engine.waiting)
            self.twins.call("fork", waiting, replace(waiting, request_id="other"))
            self.twins.call("free_page_hashes", other)


class StatesBatchWorkload(Copying, BatchWorkload):
    """Rows whose states are kept, and which fork. What a manager cannot do in the place of a batch, such as growing by nothing,
    is done only where rows can be trimmed.
    """

    def __init__(self, setting: Setting, twins: Twins, num_pages: int, rng: Random, trims: bool) -> None:
        self.is_whole = trims
        self.histories: deque[tuple[list[int], dict[str, Any]]] = deque(maxlen=NUM_REMEMBERED)
        super().__init__(setting, twins, num_pages, rng, trims)

    @property
    def interval(self) -> int:
        return self.model.manager.checkpoint_interval or self.setting.page_size

    def _weighted_actions(self, trims: bool) -> Actions:
        actions = super()._weighted_actions(trims) | {self.take_copies: 2, self.chunk: 6, self.find_checkpoints: 0.3}
        return actions | {self.fork: 2, self.misuse_fork: 0.2} if trims else actions

    # prompts

    def _new_request(self) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt, sometimes one that goes on with a conversation."""
        if not self.histories or self.rng.random() < 0.5:
            return super()._new_request()
        token_ids, attributes = self.rng.choice(self.histories)
        return (token_ids + self._tokens(self.rng.randint(1, self.interval)))[: self.max_tokens], attributes

    def _admission_options(self, num_tokens: int) -> dict[str, Any]:
        options = super()._admission_options(num_tokens)
        if not self.is_whole:
            options.pop("num_tokens", None)
        if num_tokens > self.interval and self.rng.random() < 0.5:
            options.pop("num_tokens", None)
            options["max_num_new_tokens"] = self.rng.randint(1, num_tokens // self.interval) * self.interval
        if self.rng.random() < 0.3:
            options["ends_at_checkpoint"] = True
        return options

    def release(self) -> None:
        self._remember(self.rows())
        self._prepare_release()
        super().release()

    def drain(self) -> None:
        self._prepare_release()
        super().drain()

    def _prepare_release(self) -> None:
        """Take copies where the model is a manager, which drops them row by row: a batch gives back all pages before."""
        if not self.is_whole:
            self.take_copies()

    def preempt(self, row: int) -> None:
        self._remember([row])
        super().preempt(row)

    def _remember(self, rows: list[int]) -> None:
        for row in rows:
            if self.model.requests[row].num_tokens and self.rng.random() < 0.3:
                self.histories.append((list(self.model.requests[row].all_token_ids), self.attributes[row]))

    # growth

    def grow_all(self, rows: list[int], num_new: Any, num_ahead: Any) -> None:
        """Grow; by one token at least, where the model is a manager."""
        if self.is_whole:
            super().grow_all(rows, num_new, num_ahead)
            return
        rows = [row for row in rows if self.num_uncomputed(row)]
        super().grow_all(rows, [self.rng.randint(1, self.num_uncomputed(row)) for row in rows], 0)

    def chunk(self) -> None:
        """Compute some rows up to the next checkpoint, with all the tokens that it takes, or without."""
        rows = self.some(self.rows())
        stops = self.twins.call("find_next_checkpoint", rows)
        nums_new = []
        for row, stop in zip(rows, stops, strict=True):
            num_unknown = stop - self.num_tokens(row)
            if num_unknown > 0 and self.rng.random() < 0.6:
                self.twins.call("append", [row] * num_unknown, self._tokens(num_unknown))
            nums_new.append(min(stop - self.model.requests[row].num_computed_tokens, self.num_uncomputed(row)))
        some = [(row, num) for row, num in zip(rows, nums_new, strict=True) if num]
        self._persist([row for row, _ in some], lambda rows: self.twins.call("grow", rows, [dict(some)[row] for row in rows]))

    def _persist(self, rows: list[int], call: Callable[[list[int]], Grown]) -> None:
        """Call once the copies are taken, which is sometimes forgotten."""

        def call_with_copies(rows: list[int]) -> Grown:
            self.take_in_time()
            grown = call(rows)
            if grown is None:
                self.take_all()
                grown = call(rows)
            return grown

        super()._persist(rows, call_with_copies)

    def find_checkpoints(self) -> None:
        self.twins.call("find_next_checkpoint", self.some(self.rows()))

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


class PinningStatesWorkload(StatesWorkload, PinningWorkload):
    """With pins, also of checkpoints."""


class PinningStatesBatchWorkload(StatesBatchWorkload, PinningBatchWorkload):
    """With pins, also of checkpoints."""


class RetainingStatesWorkload(StatesWorkload, RetainingWorkload):
    """With retained and protected pages, also checkpoints."""


class RetainingStatesBatchWorkload(StatesBatchWorkload, RetainingBatchWorkload):
    """With retained and protected pages, also checkpoints."""

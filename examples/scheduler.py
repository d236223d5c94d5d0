"""The scheduler: gives requests rows and pages and chooses the tokens of the next step. It makes all calls of pagepool's
running batch.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from drafting import propose
from numpy.typing import NDArray
from request import Request
from rows import Rows

from pagepool import (
    CacheManager,
    EngineRequest,
    FailedLoads,
    MultiGroupPageTable,
    RequestTraits,
    RunningBatch,
    StepResult,
    WaitingQueue,
)
from pagepool.errors import OutOfPagesError
from pagepool.stores import StoreTier

__all__ = ["Scheduler"]

by_arrival = attrgetter("number")


class Scheduler:
    """Scheduler over the rows of a page table: running requests first, the oldest one in front, then waiting ones, those with
    the least to compute first. A step computes up to `max_num_batched_tokens` tokens.
    """

    def __init__(
        self,
        manager: CacheManager,
        table: MultiGroupPageTable,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_steps_ahead: int = 0,
        store: StoreTier | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Use the first `max_num_reqs` rows of the table for requests. Up to `max_steps_ahead` steps are planned before the
        tokens of the one that runs are known. A request waits for its pages in the `store`, if there is one, while others go
        first. Up to `num_drafts` drafts follow the last token of a request.
        """
        self.batch = RunningBatch(manager, table, max_steps_ahead=max_steps_ahead)
        self.rows = Rows(len(self.batch.num_tokens))
        self.max_steps_ahead = max_steps_ahead
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue(manager)
        self.running: list[Request] = []  # oldest first
        self.free_rows = deque(range(max_num_reqs))
        self.store = store
        self.num_drafts = num_drafts
        self.propose = propose
        self.is_fetching = False  # whether the last step was planned without a request whose pages are on their way
        self.has_forked = False  # whether rows were forked since moves were taken
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Look up the pages of a request in the store, and queue it. A step may run in another thread."""
        if self.store is not None:
            self.store.fetch(EngineRequest(request.request_id, request.token_ids))
        self.waiting.add(request, request.own_token_ids)

    def abort(self, request: Request) -> None:
        """Drop a request."""
        if self.store is not None:
            self.store.forget(request)
        if not self.waiting.remove(request):
            self.finish([request])

    def is_ready(self, request: Request) -> bool:
        """Whether no page of a request is on its way from the store."""
        is_ready = self.store is None or self.store.is_ready(request)
        self.is_fetching |= not is_ready
        return is_ready

    def schedule(self) -> tuple[StepResult, list[Request]]:
        """Plan a step: running requests first, then waiting ones with the rest of the budget, unless pages were short. Return
        the step and its requests.
        """
        num_preemptions, self.is_fetching = self.num_preemptions, False
        step, planned = self.batch.new_step(), []
        budget = self.plan_running(step, planned)
        if not planned or self.num_preemptions == num_preemptions:
            self.admit_waiting(step, planned, budget)
        if not planned and not self.rows.num_in_flight.any():
            self.end_deadlock(step, planned)
        self.waiting.prefetch()
        return step, planned

    def end_deadlock(self, step: StepResult, planned: list[Request]) -> None:
        """Admit the oldest waiting request of those with pages before: beams may wait for beams without pages. Preempt newer
        requests until it has pages.
        """
        oldest = min((each for each in self.waiting if each.num_cached_tokens is not None), key=by_arrival, default=None)
        while oldest is not None:
            self.waiting.remove(oldest)
            self.put_back(oldest)
            self.admit_waiting(step, planned, self.max_num_batched_tokens)
            if planned or not self.running or self.running[-1].number <= oldest.number:
                break
            self.preempt(self.running[-1])

    def plan_running(self, step: StepResult, planned: list[Request]) -> int:
        """Plan the due tokens of running requests, oldest request first, and return the rest of the budget. Tokens that a step
        in flight samples come first.

        While pages are short, the newest request that is not in the step is preempted, or if a step in flight computes its
        tokens, the others wait for that.
        """
        budget, num_due = self.max_num_batched_tokens, self.batch.num_tokens - self.batch.num_computed_tokens
        ahead = [request for request in self.running if not num_due[request.row] and self.is_ahead(request)]
        due = [request for request in self.running if num_due[request.row]]
        for request in (requests := ahead + due):
            num_due[request.row] = min(max(num_due[request.row], 1), budget)
            budget -= num_due[request.row]
            request.drafts = self.find_drafts(request)[:budget]
            budget -= len(request.drafts)
        requests = [request for request in requests if num_due[request.row]]
        while requests:
            rows = [request.row for request in requests]
            num_drafts = np.array([len(request.drafts) for request in requests], np.int32)
            num_grown = self.batch.plan(rows, num_due[rows], num_drafts, step=step).num_grown
            planned += requests[:num_grown]
            requests = requests[num_grown:]
            if requests:
                newest = next(request for request in reversed(self.running) if request not in planned)
                if self.rows.num_in_flight[newest.row]:
                    break
                self.preempt(newest)
                requests = [request for request in requests if request is not newest]
        return int(budget)

    def is_ahead(self, request: Request) -> bool:
        """Whether the token that a step in flight samples is to be computed. The last token of an answer never is."""
        return self.rows.num_in_flight[request.row] > 0 and request.is_sampled and self.count_left(request) > 1

    def count_left(self, request: Request) -> int:
        """Return how many tokens an answer lacks besides those known and planned, if all drafts in flight are accepted."""
        row = request.row
        return int(self.rows.limits[row] - self.batch.num_tokens[row] - self.batch.num_ahead_tokens[row])

    def find_drafts(self, request: Request) -> list[int]:
        """Return drafts behind the token that is to be computed, if it is the last known one, or one that a step in flight
        samples. In that case drafts behind known tokens begin with the tokens in flight.
        """
        num_due = int(self.batch.num_tokens[request.row] - self.batch.num_computed_tokens[request.row])
        if not self.num_drafts or num_due > 1 or not request.is_sampled:
            return []
        num_unknown = 0 if num_due else int(self.batch.num_ahead_tokens[request.row]) + 1
        num_drafts = min(self.num_drafts, self.count_left(request) - 1 - (not num_due))
        self.read(request)
        return self.propose(request.token_ids, num_unknown + num_drafts)[num_unknown:]

    def list_drafts(self, requests: Sequence[Request]) -> NDArray[np.int32]:
        """Return the drafts of each request in the planned step, and -1 behind them."""
        draft_token_ids = np.full((len(requests), self.num_drafts), -1, np.int32)
        for request, ids in zip(requests, draft_token_ids, strict=True) if self.num_drafts else ():
            ids[: len(request.drafts)] = request.drafts
        return draft_token_ids

    def preempt(self, request: Request) -> None:
        """Preempt a request: it waits in front of all others, and hits its cached pages when it is admitted again."""
        self.num_preemptions += 1
        self.read(request)
        self.batch.release([request.row])
        self.wait(request)

    def preempt_all(self) -> None:
        """Preempt all running requests, the newest first, so that they come back in the order in which they came."""
        for request in reversed(list(self.running)):
            self.preempt(request)

    def rewind(self, failed: FailedLoads) -> None:
        """Send back requests whose pages failed to load, to the token before these pages. Steps in flight drop their tokens."""
        for request in self.running:
            self.read(request)
        rewound, lost = self.batch.rewind(failed)
        for request in [request for request in reversed(self.running) if request.row in (*rewound, *lost)]:
            request.candidates = ()
            if request.row in lost:
                self.wait(request)

    def fail(self, steps: Sequence[StepResult]) -> None:
        """End steps that failed, oldest first. Rows go back; requests wait if the batch has released their rows."""
        for request in self.running:
            self.read(request)
        lost = [row for step in steps for row in self.batch.settle(step, failed=True).tolist()]
        for request in [request for request in reversed(self.running) if request.row in lost]:
            self.wait(request)

    def settle(self, step: StepResult, token_ids: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """End a step that has run, with `counts` tokens of each row. Return the rows to which they went: -1 for requests that
        are gone. Rows end at stop tokens and limits.
        """
        limits = {"stop_token_ids": self.rows.stop_token_ids, "max_num_tokens": self.rows.limits}
        return self.batch.settle(step, token_ids, counts, **limits)

    def read(self, request: Request) -> list[int]:
        """Give a running request the tokens that were sampled since the last call, and return them. The host itself chooses
        those of beams, and a prompt has none before its samples fork.
        """
        if not request.is_sampled:
            return []
        token_ids: list[int] = self.batch.get_token_ids(request.row, len(request.token_ids)).tolist()
        request.token_ids += token_ids
        return token_ids

    def find(self, rows: NDArray[np.int32]) -> list[Request]:
        """Return the requests in these rows."""
        return [request for row in rows.tolist() if (request := self.rows.requests[row]) is not None]

    def wait(self, request: Request) -> None:
        """Let a request whose row was released wait."""
        self.free_rows.append(request.row)
        request.candidates = ()
        self.running.remove(request)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let a request wait in front of all others."""
        traits = RequestTraits(is_preempted=request.num_cached_tokens is not None)
        self.waiting.put_back(request, request.own_token_ids, traits=traits)

    def admit_waiting(self, step: StepResult, planned: list[Request], budget: int) -> None:
        """Start waiting requests after their cached prefixes, until budget, rows or pages are used up. Requests whose pages are
        on their way are left out.
        """
        while budget and self.free_rows:
            row = self.free_rows[0]
            admission = self.batch.admit_next(row, self.waiting, max_num_new_tokens=budget, step=step, is_ready=self.is_ready)
            if admission is None:
                break
            request, num_cached = admission
            self.start(request, row, num_cached)
            planned.append(request)
            budget -= int(self.batch.num_computed_tokens[row]) - num_cached
            self.free_rows.popleft()

    def start(self, request: Request, row: int, num_cached_tokens: int) -> None:
        """Let a request run in the row that it was given."""
        request.row, request.num_cached_tokens, request.drafts = row, num_cached_tokens, []
        self.rows.put(request)
        insort(self.running, request, key=by_arrival)

    def fork(self, request: Request, children: Sequence[Request]) -> None:
        """Give each child a row with the request's pages. Children without a row or pages wait as if preempted."""
        rows = [self.free_rows.popleft() for _ in children[: len(self.free_rows)]]
        try:
            if rows:
                self.batch.fork(request.row, rows)
                self.has_forked = True
        except OutOfPagesError:
            self.free_rows.extend(rows)
            rows = []
        for child, row in zip(children, rows, strict=False):
            child.row = row
            self.rows.put(child)
            if child.num_cached_tokens is None:  # a sample; a beam has the number of the beam that it extends
                child.num_cached_tokens = int(self.batch.num_computed_tokens[row])
            insort(self.running, child, key=by_arrival)
        for child in reversed(children[len(rows) :]):
            self.put_back(child)

    def replace(self, request: Request, child: Request) -> None:
        """Move the request's row and pages to a child."""
        child.row = request.row
        self.rows.put(child)
        self.running[self.running.index(request)] = child

    def append(self, requests: Sequence[Request]) -> None:
        """Tell the batch the last token of each request."""
        self.batch.append([request.row for request in requests], [request.token_ids[-1] for request in requests])

    def finish(self, requests: Sequence[Request]) -> None:
        """Release finished requests, with all their tokens."""
        for request in requests:
            self.running.remove(request)
            self.read(request)
        rows = [request.row for request in requests]
        self.batch.release(rows)
        self.free_rows.extend(rows)

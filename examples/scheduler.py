"""The scheduler: gives requests rows and pages and chooses the tokens of the next step. It makes all calls of pagepool's
running batch.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from request import Chunk, Request

from pagepool import CacheManager, FailedLoads, MultiGroupPageTable, RunningBatch
from pagepool.errors import OutOfPagesError

__all__ = ["Scheduler", "SwapCosts", "count_tokens"]

by_arrival = attrgetter("number")


class SwapCosts(NamedTuple):
    """Costs that decide whether a preempted request is swapped to the host: it is, if moving its bytes there and back at
    `host_bandwidth` bytes a second takes less time than recomputing its tokens at `prefill_rate` tokens a second. A page of
    cache group `i` has ``page_bytes[i]`` bytes. Pages that may still be cached when the request returns are ignored.
    """

    page_bytes: Sequence[int]
    host_bandwidth: float
    prefill_rate: float

    def is_swap_cheaper(self, batch: RunningBatch, row: int) -> bool:
        """Whether swapping is cheaper for a row."""
        num_bytes = sum(len(ids) * size for ids, size in zip(batch.get_page_ids(row), self.page_bytes, strict=False))
        return 2 * num_bytes / self.host_bandwidth < int(batch.num_computed_tokens[row]) / self.prefill_rate


class Scheduler:
    """Scheduler over the rows of a page table: oldest requests first, in chunks of up to `max_num_batched_tokens` tokens a
    step.
    """

    def __init__(
        self,
        manager: CacheManager,
        table: MultiGroupPageTable,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        costs: SwapCosts | None = None,
        max_steps_ahead: int = 0,
    ) -> None:
        """Use the first `max_num_reqs` rows of the table for requests. Without `costs` no request is swapped to the host. Up to
        `max_steps_ahead` steps are planned before the tokens of the one that runs are known.
        """
        self.batch = RunningBatch(manager, table, writes="anywhere", max_steps_ahead=max_steps_ahead)
        self.max_steps_ahead = max_steps_ahead
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # oldest first, as in the next list
        self.running: list[Request] = []
        self.free_rows = deque(range(max_num_reqs))
        self.costs = costs
        self.num_preemptions = self.num_swaps = 0

    def schedule(self) -> list[Chunk]:
        """Schedule running requests first, then waiting ones with the rest of the budget, unless pages were short.

        If nothing can run because beams wait for beams that wait for pages, newer requests give way.
        """
        num_preemptions = self.num_preemptions
        chunks = self.grow_running()
        if not chunks or self.num_preemptions == num_preemptions:
            chunks += self.admit_waiting(self.max_num_batched_tokens - count_tokens(chunks))
        while not chunks and self.waiting and self.running and self.running[-1].number > self.waiting[0].number:
            self.preempt_newest()
            chunks = self.admit_waiting(self.max_num_batched_tokens)
        return chunks

    def grow_running(self) -> list[Chunk]:
        """Allocate slots for due tokens, oldest request first. While pages are short, the newest request is preempted, or if a
        step in flight computes its tokens, the others wait for that. The token behind the known ones is due too, if a step in
        flight samples it.
        """
        rows = np.array([request.row for request in self.running], dtype=np.int32)
        starts = np.array([request.num_planned_tokens for request in self.running], dtype=np.int32)
        num_due = np.array([self.count_due(request) for request in self.running], dtype=np.int32)
        num_before = np.cumsum(num_due) - num_due
        stops = starts + np.clip(self.max_num_batched_tokens - num_before, 0, num_due)
        num_known = np.array([len(request.token_ids) for request in self.running], dtype=np.int32)
        num_computed = self.batch.num_computed_tokens[rows]
        num_new = np.where(stops > starts, np.minimum(stops, num_known) - num_computed, 0)
        num_ahead = np.where(stops > starts, stops - num_computed - num_new, 0)
        num_grown = 0
        while num_grown < len(self.running):
            todo = slice(num_grown, len(self.running))
            num_grown += self.batch.grow(rows[todo], num_new[todo], num_ahead[todo]).num_grown
            if num_grown < len(self.running) and self.running[-1].num_in_flight:
                break
            if num_grown < len(self.running):  # the newest has not grown in this step: all its cached pages are computed
                self.preempt_newest()
        chunks = []
        for request, start, stop in zip(self.running[:num_grown], starts.tolist(), stops.tolist(), strict=False):
            if start < stop:
                request.num_planned_tokens = stop
                chunks.append(Chunk(request, start, stop, request.stay))
        return chunks

    def count_due(self, request: Request) -> int:
        """Count the tokens that the next step can compute of a request, if its budget is large enough. Samples and beams wait
        for the tokens before their next ones.
        """
        num_left = request.num_due_tokens - request.num_planned_tokens
        if num_left > 0 or not self.max_steps_ahead or request.samples or not request.may_run_ahead:
            return max(0, num_left)
        num_most = request.num_prompt_tokens + request.params.max_tokens - 1  # the last token of an answer is never computed
        return int(num_left == 0 and request.num_planned_tokens < num_most)

    def preempt_newest(self) -> None:
        """Preempt the newest request: swap it to the host if that is cheaper and possible. Its candidates are dropped."""
        request = self.running[-1]
        self.num_preemptions += 1
        may_swap = self.costs and not request.candidates and not request.num_in_flight
        num_uncounted = request.num_planned_tokens - int(self.batch.num_computed_tokens[request.row])
        if may_swap and num_uncounted:  # the last step computed a token that was not known when it was planned
            self.batch.grow([request.row], num_uncounted)
        if may_swap and self.costs.is_swap_cheaper(self.batch, request.row):
            request.is_swapped = self.batch.swap_out(request.row)
        if request.is_swapped:
            request.stay += 1
            self.running.remove(request)
            insort(self.waiting, request, key=by_arrival)
            self.num_swaps += 1
        else:
            self.put_back(request)

    def swap_in(self, request: Request) -> bool:
        """Resume a swapped request from the next step on, if its pages can be loaded."""
        request.is_swapped = self.batch.swap_in(request.row) is None
        if not request.is_swapped:
            request.num_planned_tokens = int(self.batch.num_computed_tokens[request.row])
            self.waiting.remove(request)
            insort(self.running, request, key=by_arrival)
        return not request.is_swapped

    def find_row(self) -> int | None:
        """Return a free row. If there is none, the newest swapped request gives up its row and is computed again."""
        swapped = [request for request in self.waiting if request.is_swapped]
        if swapped and not self.free_rows:
            self.batch.release([swapped[-1].row])
            self.free_rows.append(swapped[-1].row)
            swapped[-1].is_swapped = False
        return self.free_rows[0] if self.free_rows else None

    def rewind(self, failed: FailedLoads) -> list[Request]:
        """Send back requests whose pages failed to load, to the token before these pages. Return them all."""
        rewound, lost = self.batch.rewind(failed)
        requests = [request for request in self.running if request.row in (*rewound, *lost)]
        for request in requests:
            request.candidates, request.stay = (), request.stay + 1
            request.num_planned_tokens = int(self.batch.num_computed_tokens[request.row])
            if request.row in lost:
                self.put_back(request, 0)
        return requests

    def put_back(self, request: Request, num_computed_tokens: int | None = None) -> None:
        """Release a request's pages, and let it wait at its place. Tokens beyond this number are to be computed again."""
        self.batch.release([request.row], num_computed_tokens)
        self.free_rows.appendleft(request.row)  # it returns to its row, which keeps its hashes
        request.candidates, request.stay = (), request.stay + 1
        self.running.remove(request)
        insort(self.waiting, request, key=by_arrival)

    def admit_waiting(self, budget: int) -> list[Chunk]:
        """Start waiting requests in order, after their cached prefixes, until budget, rows or pages are used up."""
        admitted: list[Chunk] = []
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if request.is_swapped and self.swap_in(request):
                continue
            row = None if request.is_swapped else self.find_row()
            if row is None:
                break
            num_cached = self.batch.admit(
                row,
                request.token_ids,
                num_tokens=request.num_due_tokens,
                max_num_new_tokens=budget,
                is_preempted=request.num_cached_tokens is not None,
            )
            if num_cached is None:
                break
            request.row, request.num_cached_tokens = row, num_cached
            request.num_planned_tokens = int(self.batch.num_computed_tokens[row])
            admitted.append(Chunk(request, num_cached, request.num_planned_tokens, request.stay))
            budget -= count_tokens(admitted[-1:])
            insort(self.running, self.waiting.pop(0), key=by_arrival)
            self.free_rows.popleft()
        return admitted

    def take_back(self, chunks: Sequence[Chunk]) -> None:
        """Release the requests of a failed step, last scheduled first, since their states may be spoilt. They wait again."""
        for request, start, _, _ in reversed(chunks):
            self.put_back(request, min(start, int(self.batch.num_computed_tokens[request.row])))

    def fork(self, request: Request, children: Sequence[Request]) -> None:
        """Give each child a row with the request's pages. Children without a row or pages wait as if preempted."""
        rows = [self.free_rows.popleft() for _ in children[: len(self.free_rows)]]
        try:
            if rows:
                self.batch.fork(request.row, rows)
        except OutOfPagesError:
            self.free_rows.extend(rows)
            rows = []
        for child, row in zip(children, rows, strict=False):
            child.row, child.num_planned_tokens = row, request.num_planned_tokens
            insort(self.running, child, key=by_arrival)
        for child in children[len(rows) :]:
            insort(self.waiting, child, key=by_arrival)

    def replace(self, request: Request, child: Request) -> None:
        """Move the request's row and pages to a child."""
        child.row, child.num_planned_tokens = request.row, request.num_planned_tokens
        self.running[self.running.index(request)] = child

    def append(self, requests: Sequence[Request]) -> None:
        """Tell the batch the last token of each request."""
        self.batch.append([request.row for request in requests], [request.token_ids[-1] for request in requests])

    def finish(self, requests: Sequence[Request]) -> None:
        """Release finished requests."""
        rows = [request.row for request in requests]
        self.batch.release(rows)
        self.free_rows.extend(rows)
        for request in requests:
            request.stay += 1
            self.running.remove(request)


def count_tokens(chunks: Sequence[Chunk]) -> int:
    """Return the number of tokens in chunks."""
    return sum(chunk.stop - chunk.start for chunk in chunks)

"""Which requests have rows and pages, and which tokens the next step computes: all calls of pagepool's running batch."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from request import Chunk, Request

from pagepool import CacheManager, MultiGroupPageTable, RunningBatch
from pagepool.errors import OutOfPagesError

__all__ = ["Scheduler", "count_tokens"]

by_arrival = attrgetter("number")


class Scheduler:
    """Gives requests rows of the page table, the oldest first, and chunks of up to `max_num_batched_tokens` tokens a step."""

    def __init__(
        self, manager: CacheManager, table: MultiGroupPageTable, max_num_reqs: int, max_num_batched_tokens: int
    ) -> None:
        """The first `max_num_reqs` rows of the table are for requests."""
        self.batch = RunningBatch(manager, table)
        self.interval = manager.checkpoint_interval or 1
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # the oldest first, as in the next
        self.running: list[Request] = []
        self.free_rows = deque(range(max_num_reqs))
        self.num_preemptions = 0

    def schedule(self) -> list[Chunk]:
        """Schedule running requests first, then waiting ones with the rest of the budget, unless pages were short.

        If nothing can run, because beams wait for others that wait for pages, newer requests give way.
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
        """Allocate slots for due tokens, oldest request first. While pages are short, the newest request is preempted."""
        rows = np.array([request.row for request in self.running], dtype=np.int32)
        starts = self.batch.num_computed_tokens[rows]
        num_due = np.array([request.num_due_tokens for request in self.running], dtype=np.int32) - starts
        num_before = np.cumsum(num_due) - num_due
        stops = self.align(starts, starts + np.clip(self.max_num_batched_tokens - num_before, 0, num_due))
        num_grown = 0
        while num_grown < len(self.running):
            todo = slice(num_grown, len(self.running))
            num_grown += self.batch.grow(rows[todo], (stops - starts)[todo]).num_grown
            if num_grown < len(self.running):  # the newest has not grown in this step, so all its cached pages are computed
                self.preempt_newest()
        chunks = map(Chunk, self.running, starts.tolist(), stops.tolist())
        return [chunk for chunk in chunks if chunk.start < chunk.stop]

    def align(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Let chunks end at the last multiple of the interval behind `starts`, if there is one: checkpoints are made there."""
        checkpoints = stops // self.interval * self.interval
        return np.where(checkpoints > starts, checkpoints, stops)

    def preempt_newest(self) -> None:
        """Let the newest request wait again."""
        self.put_back(self.running[-1])
        self.num_preemptions += 1

    def put_back(self, request: Request, num_computed_tokens: int | None = None) -> None:
        """Release a request's pages, and let it wait at its place. What was to be computed behind these tokens is forgotten."""
        self.batch.release([request.row], num_computed_tokens)
        self.free_rows.appendleft(request.row)  # it returns to the same row, which keeps its hashes
        request.candidates = ()
        self.running.remove(request)
        insort(self.waiting, request, key=by_arrival)

    def admit_waiting(self, budget: int) -> list[Chunk]:
        """Start waiting requests in order, after their cached prefixes, until budget, rows or pages are used up."""
        admitted: list[Chunk] = []
        while self.waiting and self.free_rows and budget > 0:
            request, row = self.waiting[0], self.free_rows[0]
            num_cached = self.batch.admit(
                row,
                request.token_ids,
                num_tokens=request.num_due_tokens,
                max_num_new_tokens=budget,
                ends_at_checkpoint=True,
                is_preempted=request.num_cached_tokens is not None,
            )
            if num_cached is None:
                break
            request.row, request.num_cached_tokens = row, num_cached
            admitted.append(Chunk(request, num_cached, int(self.batch.num_computed_tokens[row])))
            budget -= count_tokens(admitted[-1:])
            insort(self.running, self.waiting.pop(0), key=by_arrival)
            self.free_rows.popleft()
        return admitted

    def take_back(self, chunks: Sequence[Chunk]) -> None:
        """Release the requests of a step that failed, last scheduled first: their states may be spoilt. They wait again."""
        for request, start, _ in reversed(chunks):
            self.put_back(request, start)

    def fork(self, request: Request, children: Sequence[Request]) -> None:
        """Give each child a row with the request's pages. Children for which rows or pages are missing wait as if preempted."""
        rows = [self.free_rows.popleft() for _ in children[: len(self.free_rows)]]
        try:
            if rows:
                self.batch.fork(request.row, rows)
        except OutOfPagesError:
            self.free_rows.extend(rows)
            rows = []
        for child, row in zip(children, rows, strict=False):
            child.row = row
            insort(self.running, child, key=by_arrival)
        for child in children[len(rows) :]:
            insort(self.waiting, child, key=by_arrival)

    def replace(self, request: Request, child: Request) -> None:
        """Let a child have the request's row and pages."""
        child.row = request.row
        self.running[self.running.index(request)] = child

    def append(self, requests: Sequence[Request]) -> None:
        """Tell the batch the last token of each request."""
        self.batch.append([request.row for request in requests], [request.token_ids[-1] for request in requests])

    def finish(self, requests: Sequence[Request]) -> None:
        """Release requests that go on no more."""
        rows = [request.row for request in requests]
        self.batch.release(rows)
        self.free_rows.extend(rows)
        for request in requests:
            self.running.remove(request)


def count_tokens(chunks: Sequence[Chunk]) -> int:
    """Return the number of tokens in chunks."""
    return sum(stop - start for _, start, stop in chunks)

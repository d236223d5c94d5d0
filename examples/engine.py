"""A continuous-batching engine: chunked prefill, prefix caching, preemption, sampling, streaming. See `engine.py --help`."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from attention import attend_by_gather
from model import Attention, Weights, get_sizes
from request import Chunk, Request, SamplingParams
from runner import ModelRunner, pack

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch, StepResult


class Engine:
    """Runs requests, each in a row of the page table. A step computes up to `max_num_batched_tokens` tokens."""

    def __init__(
        self,
        weights: Weights,
        *,
        num_pages: int = 64,
        page_size: int = 8,
        max_num_reqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        attend: Attention = attend_by_gather,
        num_devices: int = 1,
    ) -> None:
        """The cache has `num_pages` pages of `page_size` tokens; at most `max_num_reqs` requests run at once. ValueError for
        values that cannot work.
        """
        for name, value in (("max_num_reqs", max_num_reqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, allowed: at least 1")
        sizes = get_sizes(weights)
        spec = FullAttentionSpec(page_size, sizes["kv_heads"], sizes["head_size"], "float32", use_mla=False)
        self.manager = CacheManager(num_pages, [CacheGroupSpec(spec)], max_model_len)
        self.runner = ModelRunner(weights, num_pages, page_size, attend, num_devices)
        # The last row is never admitted, so all its pages are page 0, the null page. Padding is written there.
        self.num_rows = max_num_reqs + 1
        self.table = PageTable(self.num_rows, -(-max_model_len // page_size), max_num_batched_tokens, self.runner.replicated)
        self.batch = RunningBatch(self.manager, self.table)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.padded_sizes = list_padded_sizes(max_num_batched_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.free_rows = deque(range(max_num_reqs))
        self.grown: list[StepResult] = []  # by this step
        self.admitted: list[Chunk] = []  # by this step
        self.num_preemptions = 0

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a request. ValueError, without a change, for one that could not run to its end."""
        request = Request(prompt, params or SamplingParams())
        num_tokens = len(request.token_ids) + request.params.max_tokens - 1  # the last token is never computed
        wrong = [token_id for token_id in request.token_ids if not 0 <= token_id < self.runner.sizes["vocab"]]
        if not request.token_ids:
            raise ValueError("prompt: got no tokens, allowed: at least 1")
        if wrong:
            raise ValueError(f"prompt: got token id {wrong[0]}, allowed: 0 to {self.runner.sizes['vocab'] - 1}")
        if num_tokens > self.batch.max_num_tokens:
            raise ValueError(f"request: got {num_tokens} tokens with its answer, allowed: {self.batch.max_num_tokens}")
        self.manager.require_capacity(num_tokens)
        self.waiting.append(request)
        return request

    def warmup(self) -> None:
        """Compile all programs: the table's commits, and a step for each padded size."""
        self.table.warmup()
        for padded_size in self.padded_sizes:
            self.runner.run(self.table.page_table, *pack([], self.num_rows, padded_size))

    def stream(self) -> Iterator[tuple[Request, int]]:
        """Run until no request is left. Yields each token with its request as soon as it is sampled."""
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[tuple[Request, int]]:
        """Run the model once. Returns each request that got a token, with the token. RuntimeError if nothing can run.

        If the model fails, the step is undone and the error raised, so the next call schedules the same tokens again.
        """
        chunks = self.schedule()
        if not chunks:
            raise RuntimeError(f"nothing can run: {len(self.waiting)} requests wait, {len(self.running)} have rows")
        num_tokens = count_tokens(chunks)
        padded_size = next(size for size in self.padded_sizes if size >= num_tokens)
        try:
            page_table = self.table.commit(self.num_rows)
            sampled = self.runner.run(page_table, *pack(chunks, self.num_rows, padded_size))
        except BaseException:
            self.take_back()
            raise
        return self.update(chunks, sampled)

    def schedule(self) -> list[Chunk]:
        """Schedule running requests first, then waiting ones with the rest of the budget, unless a request was preempted."""
        num_preemptions = self.num_preemptions
        self.grown, self.admitted = [], []
        chunks = self.grow_running()
        if self.num_preemptions == num_preemptions:
            self.admit_waiting(self.max_num_batched_tokens - count_tokens(chunks))
        return chunks + self.admitted

    def grow_running(self) -> list[Chunk]:
        """Allocate slots for known tokens, oldest request first. While pages are short, the newest request is preempted."""
        rows = np.array([request.row for request in self.running], dtype=np.int32)
        starts = self.batch.num_computed_tokens[rows]
        num_missing = self.batch.num_tokens[rows] - starts
        num_before = np.cumsum(num_missing) - num_missing
        num_new = np.clip(self.max_num_batched_tokens - num_before, 0, num_missing)
        num_grown = 0
        while num_grown < len(self.running):
            todo = slice(num_grown, len(self.running))
            self.grown.append(self.batch.grow(rows[todo], num_new[todo]))
            num_grown += self.grown[-1].num_grown
            if num_grown < len(self.running):  # the newest has not grown in this step, so all its cached pages are computed
                self.preempt(self.running.pop())
        chunks = map(Chunk, self.running, starts.tolist(), (starts + num_new).tolist())
        return [chunk for chunk in chunks if chunk.start < chunk.stop]

    def preempt(self, request: Request) -> None:
        """Release a request's pages, and put it first in the queue."""
        self.batch.release([request.row])
        self.free_rows.appendleft(request.row)  # it returns to the same row, which keeps its hashes
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def admit_waiting(self, budget: int) -> None:
        """Start waiting requests in order, after their cached prefixes, until budget, rows or pages are used up."""
        while self.waiting and self.free_rows and budget > 0:
            request, row = self.waiting[0], self.free_rows[0]
            num_cached = self.batch.admit(
                row, request.token_ids, max_num_new_tokens=budget, is_preempted=request.num_cached_tokens is not None
            )
            if num_cached is None:
                break
            request.row, request.num_cached_tokens = row, num_cached
            self.admitted.append(Chunk(request, num_cached, int(self.batch.num_computed_tokens[row])))
            budget -= count_tokens(self.admitted[-1:])
            self.running.append(self.waiting.popleft())
            self.free_rows.popleft()

    def take_back(self) -> None:
        """Undo the step, last scheduled first: admitted requests wait again, and rows are as before."""
        for request, start, _ in reversed(self.admitted):
            self.batch.release([request.row], num_computed_tokens=start)
            self.free_rows.appendleft(request.row)
            self.waiting.appendleft(self.running.pop())
        for result in reversed(self.grown):
            self.batch.undo(result)

    def update(self, chunks: Sequence[Chunk], sampled: Any) -> list[tuple[Request, int]]:
        """Append the sampled token to each request whose tokens are all computed, and end finished requests."""
        complete = [request for request, _, stop in chunks if stop == len(request.token_ids)]
        for request in complete:
            request.token_ids.append(int(sampled[request.row]))
        going_on = [request for request in complete if not request.is_finished]
        self.batch.append([request.row for request in going_on], [request.token_ids[-1] for request in going_on])
        finished_rows = [request.row for request in complete if request.is_finished]
        self.batch.release(finished_rows)
        self.free_rows.extend(finished_rows)
        self.running = [request for request in self.running if not request.is_finished]
        return [(request, request.token_ids[-1]) for request in complete]


def list_padded_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens to which steps are padded. Each doubles the previous one, so few programs are compiled."""
    sizes = [16]
    while sizes[-1] < max_num_tokens:
        sizes.append(2 * sizes[-1])
    return sizes


def count_tokens(chunks: Sequence[Chunk]) -> int:
    """Return the number of tokens in chunks."""
    return sum(stop - start for _, start, stop in chunks)


if __name__ == "__main__":
    from command import main

    main()

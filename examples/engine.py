"""A continuous-batching engine: chunked prefill, prefix caching, preemption, sampling, streaming. See `engine.py --help`."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from attention import attend_by_gather
from model import Attention, Tokens, Weights
from runner import ModelRunner
from sampling import SamplingParams, SamplingRows

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch


class Request:
    """A prompt and what was generated. A preempted request keeps its tokens, and is admitted again with all of them."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """`prompt` are token ids."""
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.row = -1

    @property
    def output(self) -> list[int]:
        """The tokens that were generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether the answer has its last token."""
        return len(self.output) == self.params.max_tokens or self.output[-1:] == [self.params.stop_token_id]


Schedule = list[tuple[Request, int]]
"""The requests of a step, and how many tokens of each are computed."""


class Engine:
    """Runs requests, each in a row of the page table; a step computes up to `max_num_batched_tokens` tokens of them."""

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
        """`num_pages` of `page_size` tokens; at most `max_num_reqs` requests run at once. ValueError for what cannot work."""
        for name, value in (("max_num_reqs", max_num_reqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, allowed: at least 1")
        self.runner = ModelRunner(weights, num_pages, page_size, attend, num_devices)
        sizes = self.runner.sizes
        spec = FullAttentionSpec(page_size, sizes["kv_heads"], sizes["head_size"], "float32", use_mla=False)
        self.manager = CacheManager(num_pages, [CacheGroupSpec(spec)], max_model_len)
        # The row behind those of requests is never admitted, so its pages are all page 0, the null page: padding goes there.
        self.num_rows = max_num_reqs + 1
        self.table = PageTable(self.num_rows, -(-max_model_len // page_size), max_num_batched_tokens, self.runner.replicated)
        self.batch = RunningBatch(self.manager, self.table)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.padded_sizes = [16 << i for i in range(max(1, (max_num_batched_tokens - 1).bit_length() - 3))]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.free_rows = deque(range(max_num_reqs))
        self.num_preemptions = 0

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a request. ValueError, and nothing changed, for one that could not run to its end."""
        request = Request(prompt, params or SamplingParams())
        num_tokens = len(request.token_ids) + request.params.max_tokens - 1  # the last one is never computed on
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
        """Compile all that there is to compile: a program for each padded size."""
        self.table.warmup()
        for padded_size in self.padded_sizes:
            self.execute([], padded_size)

    def stream(self) -> Iterator[tuple[Request, int]]:
        """Run until no request is left; yield each token with its request, as it comes."""
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[tuple[Request, int]]:
        """Run the model once. Returns each request that got a token, and the token."""
        scheduled = self.schedule()
        num_tokens = sum(num_new for _, num_new in scheduled)
        padded_size = next(size for size in self.padded_sizes if size >= num_tokens)
        return self.update(scheduled, self.execute(scheduled, padded_size))

    def schedule(self) -> Schedule:
        """Running requests first, then waiting ones for what is left of the budget, unless pages are short already."""
        num_preemptions = self.num_preemptions
        scheduled = self.grow_running()
        if self.num_preemptions == num_preemptions:
            scheduled += self.admit_waiting(self.max_num_batched_tokens - sum(num_new for _, num_new in scheduled))
        return scheduled

    def grow_running(self) -> Schedule:
        """Give known tokens their slots, those of the oldest request first. While pages are short the newest gives way."""
        rows = np.array([request.row for request in self.running], dtype=np.int32)
        num_missing = self.batch.num_tokens[rows] - self.batch.num_computed_tokens[rows]
        num_before = np.cumsum(num_missing) - num_missing
        num_new = np.clip(self.max_num_batched_tokens - num_before, 0, num_missing)
        num_grown = 0
        while num_grown < len(self.running):
            todo = slice(num_grown, len(self.running))
            num_grown += self.batch.grow(rows[todo], num_new[todo]).num_grown
            if num_grown < len(self.running):  # who gives way has not grown in this step: its cached pages are computed
                self.preempt(self.running.pop())
        return [(request, n) for request, n in zip(self.running, num_new.tolist(), strict=False) if n]

    def preempt(self, request: Request) -> None:
        """Give its pages back, and let it wait before all others."""
        self.batch.release([request.row])
        self.free_rows.appendleft(request.row)  # comes back in the same row, which has kept its hashes
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def admit_waiting(self, budget: int) -> Schedule:
        """Start waiting requests, in order, behind their cached prefixes, until budget, rows or pages are used up."""
        admitted: Schedule = []
        while self.waiting and self.free_rows and budget > 0:
            request, row = self.waiting[0], self.free_rows[0]
            num_cached = self.batch.admit(row, request.token_ids, max_num_new_tokens=budget)
            if num_cached is None:
                break
            request.row = row
            admitted.append((request, int(self.batch.num_computed_tokens[row]) - num_cached))
            budget -= admitted[-1][1]
            self.running.append(self.waiting.popleft())
            self.free_rows.popleft()
        return admitted

    def execute(self, scheduled: Schedule, padded_size: int) -> Any:
        """Send what changed in the page table, run the model, and return a token for each row."""
        page_table = self.table.commit(self.num_rows)
        return self.runner.run(page_table, *self.pack(scheduled, padded_size))

    def pack(self, scheduled: Schedule, padded_size: int) -> tuple[Tokens, SamplingRows]:
        """The step's tokens one behind the other, then padding; and by row what its request asks for."""
        token_ids, positions = np.zeros((2, padded_size), np.int32)
        rows = np.full(padded_size, self.num_rows - 1, np.int32)
        last, top_k, seed = np.zeros((3, self.num_rows), np.int32)
        temperature = np.zeros(self.num_rows, np.float32)
        end = 0
        for request, num_new in scheduled:
            start, end = end, end + num_new
            num_computed = int(self.batch.num_computed_tokens[request.row])  # those of this step included
            token_ids[start:end] = request.token_ids[num_computed - num_new : num_computed]
            positions[start:end] = np.arange(num_computed - num_new, num_computed)
            rows[start:end] = request.row
            last[request.row] = end - 1
            temperature[request.row] = request.params.temperature
            top_k[request.row] = request.params.top_k
            seed[request.row] = request.params.seed
        return Tokens(token_ids, rows, positions, last), SamplingRows(temperature, top_k, seed)

    def update(self, scheduled: Schedule, sampled: Any) -> list[tuple[Request, int]]:
        """Append what was sampled for requests whose tokens are all computed, and end those that are finished."""
        is_complete = self.batch.num_computed_tokens == self.batch.num_tokens
        streamed = [(request, int(sampled[request.row])) for request, _ in scheduled if is_complete[request.row]]
        for request, token_id in streamed:
            request.token_ids.append(token_id)
        going_on = [(request.row, token_id) for request, token_id in streamed if not request.is_finished]
        self.batch.append([row for row, _ in going_on], [token_id for _, token_id in going_on])
        finished = [request.row for request, _ in streamed if request.is_finished]
        self.batch.release(finished)
        self.free_rows.extend(finished)
        self.running = [request for request in self.running if not request.is_finished]
        return streamed


if __name__ == "__main__":
    from command import main

    main()

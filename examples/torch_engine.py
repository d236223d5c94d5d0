"""An engine on torch: scheduler, inputs of a step, page table, CUDA graphs, one step ahead, shared prefixes read once, host
memory and a store behind the pool. docs/torch.md describes a step.
"""

from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from sharing import Sharing, list_widths
from torch_model import (
    DEVICE,
    DTYPE,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    MAX_MODEL_LEN,
    NUM_COLUMNS,
    PAGE_SIZE,
    STOP_TOKEN,
    VOCAB,
    Model,
    attend_to_cache,
    list_own_reads,
    list_shared_reads,
)

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    PageHashing,
    RequestTraits,
    RunningBatch,
    SharedPrefixes,
    StepInputs,
    StepResult,
    WaitingQueue,
)
from pagepool.stores import FileStore, StoreTier, make_namespace
from pagepool.torch import HostPages, PageTable

HAS_GPU = DEVICE.type == "cuda"


@dataclass(eq=False)
class Request:
    """A prompt and its answer so far. A preempted request waits to be admitted with all these tokens."""

    prompt: list[int]
    max_tokens: int
    answer: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The name by which the store's tier knows the request."""
        return str(id(self))


class Engine:
    """Requests with the least to compute go first, prompts in chunks. While pages are short the newest row is preempted."""

    def __init__(self, args: Namespace) -> None:
        """Make an empty cache, and the tensors of a step: graphs need them where they are. Capture decodes on a GPU."""
        num_tokens, num_reqs, depth, num_pages = args.num_tokens, args.num_reqs, args.steps_ahead + 1, args.num_pages
        spec = FullAttentionSpec(PAGE_SIZE, HEADS, HEAD_SIZE, DTYPE, use_mla=False)
        num_host_pages = max(args.host_pages, 2 * num_pages if args.store else 0)  # twice the pool, to write through
        tier = HostTier(num_host_pages, policy="write_through" if args.store else "write_back") if num_host_pages else None
        hashing = PageHashing(hash_algo="sha256" if args.store else "siphash128")  # keys that all processes have
        self.manager = CacheManager(num_pages, [CacheGroupSpec(spec)], MAX_MODEL_LEN, host_tier=tier, hashing=hashing)
        self.model = Model(args.seed)
        self.table = PageTable(num_reqs, NUM_COLUMNS, device=DEVICE)
        self.batch = RunningBatch(self.manager, self.table, max_steps_ahead=args.steps_ahead)
        self.max_num_tokens, self.waiting, self.is_short = num_tokens, WaitingQueue(self.manager), False
        self.running: dict[int, Request] = {}  # by row, the newest last
        self.limits = np.ones(args.num_reqs, np.int32)  # tokens of a prompt and its answer, by row
        self.in_flight: deque[tuple[Any, ...]] = deque()
        fields = {"token_ids": num_tokens, "positions": num_tokens, "slots": num_tokens, "query_start_loc": num_reqs + 1}
        fields |= dict.fromkeys(("last_tokens", "sources", "order", "seq_lens", "own_starts"), num_reqs)
        num_groups = max(1, num_reqs // 2)
        fields |= {"prefix_page_ids": num_groups * NUM_COLUMNS, "prefix_rows": num_groups * num_reqs}
        self.pinned = torch.zeros(depth, sum(fields.values()), dtype=torch.int32, pin_memory=HAS_GPU)
        options: dict[str, Any] = {"packed": True, "arrays": {"packed": self.pinned.numpy()}, "pad_slot": 0, "pad_last": 0}
        options |= {"order": "prefixes", "prefixes": SharedPrefixes(num_groups=num_groups)}  # rows that share are neighbours
        self.host = StepInputs(self.batch, num_tokens=num_tokens, num_reqs=num_reqs, fields=[*fields], depth=depth, **options)
        self.packed = self.pinned[0].to(DEVICE, copy=True)
        self.inputs = dict(zip(fields, self.packed.split(list(fields.values())), strict=True))
        self.prefixes = [self.inputs[name].view(num_groups, -1) for name in ("prefix_page_ids", "prefix_rows")]
        self.sharing = Sharing(self.host, PAGE_SIZE, list_widths(8, NUM_COLUMNS), not args.no_sharing)
        self.page_ids = torch.zeros(num_reqs, NUM_COLUMNS, dtype=torch.int32, device=DEVICE)
        self.cache = torch.zeros(2, LAYERS, HEADS, num_pages * PAGE_SIZE, HEAD_SIZE, device=DEVICE, dtype=DTYPE)
        self.pages, self.has_loads = self.cache.unflatten(3, (num_pages, PAGE_SIZE)), False
        self.host_pages = HostPages(self.pages, num_host_pages, page_axis=3) if num_host_pages else None
        self.store = make_store_tier(self.manager, self.host_pages, args) if args.store else None
        self.sampled = torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE)
        self.results = torch.zeros(depth, num_reqs, dtype=torch.int32, pin_memory=HAS_GPU)
        sizes = [1 << i for i in range(min(num_reqs, num_tokens).bit_length()) if HAS_GPU]
        widths = [(), *product(self.sharing.widths, repeat=2)] if self.sharing.is_wanted else [()]
        self.graphs = {(size, *each): torch.cuda.CUDAGraph() for size in sizes for each in widths}
        for shape, graph in self.graphs.items():
            self.compute(*shape)  # libraries initialise themselves in their first call
            with torch.cuda.graph(graph):
                self.compute(*shape)

    def compute(self, size: int, num_shared: int = 0, num_own: int = NUM_COLUMNS) -> None:
        """Compute a step padded to `size` tokens, and sample the token behind each row. In a decode step with room for
        `num_shared` pages of a group, these are read once, and each row has `num_own` pages of its own behind them.
        """
        num_reqs = min(size, len(self.sampled))
        token_ids, positions, slots = (self.inputs[name][:size] for name in ("token_ids", "positions", "slots"))
        ends, numbers = self.inputs["query_start_loc"][1 : num_reqs + 1], torch.arange(size, device=DEVICE)
        places = torch.searchsorted(ends, numbers, right=True).clamp(max=num_reqs - 1)  # each token's row
        token_ids = torch.where(token_ids < 0, self.sampled[self.inputs["sources"][places]], token_ids)
        starts = self.inputs["own_starts"][places] if num_shared else torch.zeros_like(positions)
        reads = [list_own_reads(self.page_ids[places], starts, positions, num_own)]
        if num_shared:
            prefix_page_ids, prefix_rows = self.prefixes
            reads.append(list_shared_reads(prefix_page_ids[:, :num_shared], prefix_rows))

        def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache[0, layer][:, slots], self.cache[1, layer][:, slots] = keys, values
            return attend_to_cache(query, self.cache[:, layer], *reads)  # the step's own tokens too

        logits = self.model.forward(token_ids, positions, attend)[self.inputs["last_tokens"][:num_reqs]]
        self.sampled[:num_reqs] = logits.argmax(1)

    def launch(self, step: StepResult) -> None:
        """Start a planned step on the current stream, behind the transfers of its pages."""
        self.move_pages()
        num_tokens = self.batch.inputs(step, out=self.host)
        order = self.host.order[: len(step)].copy()
        size, result = min(1 << (num_tokens - 1).bit_length(), self.max_num_tokens), self.results[self.host.current]
        self.table.commit(self.table.max_num_reqs)
        self.table.gather(step.rows[order], out=self.page_ids, num_reqs=min(size, len(self.sampled)))
        self.packed.copy_(self.pinned[self.host.current], non_blocking=True)
        widths = self.sharing.find_widths() if num_tokens == len(step) else None
        shape = size, *(widths or ())
        (self.graphs[shape].replay if shape in self.graphs else partial(self.compute, *shape))()
        result.copy_(self.sampled, non_blocking=True)
        is_sampled = self.batch.num_computed_tokens[step.rows] == self.batch.num_tokens[step.rows]
        wait = torch.cuda.current_stream().record_event().synchronize if HAS_GPU else lambda: None
        self.in_flight.append((step, is_sampled, result, order.argsort(), wait))

    def move_pages(self) -> None:
        """Start the saves and loads that are due, and loads for waiting requests."""
        if self.host_pages is not None:
            self.waiting.prefetch()
            self.host_pages.run(self.pages, moves := self.batch.take_moves())
            self.has_loads |= len(moves.loads) > 0

    def end_transfers(self, must_wait: bool) -> None:
        """Answer finished transfers. A row whose pages failed to load goes back to them, or its request waits again."""
        if self.host_pages is not None:
            self.has_loads &= not must_wait
            for number, saves, loads, _ in self.host_pages.wait() if must_wait else self.host_pages.poll():
                _, lost = self.batch.rewind(self.manager.fail(number, saves=saves, loads=loads))
                for row in lost:
                    self.put_back(self.running.pop(row))

    def end(self) -> None:
        """Wait for the oldest step in flight, and continue its requests."""
        step, is_sampled, result, places, wait = self.in_flight.popleft()
        wait()
        token_ids = result.numpy()[places][is_sampled]
        self.batch.settle(step, token_ids, is_sampled.astype(int), stop_token_ids=[STOP_TOKEN], max_num_tokens=self.limits)
        for row in step.ended_rows.tolist():
            self.leave(row)
        self.batch.release(step.ended_rows)

    def leave(self, row: int) -> Request:
        """Take a request out of its row, with its answer so far."""
        request = self.running.pop(row)
        request.answer = self.batch.get_token_ids(row, len(request.prompt)).tolist()
        return request

    def put_back(self, request: Request) -> None:
        """Let a request that ran before wait in front of all others."""
        self.waiting.put_back(request, request.prompt + request.answer, traits=RequestTraits(is_preempted=True))

    def plan(self) -> StepResult:
        """Plan a step: rows whose last token is in flight, rows with known tokens, then waiting requests. While pages are short
        preempt the newest row that is not in the step.
        """
        batch, step, budget, self.is_short = self.batch, self.batch.new_step(), self.max_num_tokens, False
        num_new, rows = batch.num_tokens - batch.num_computed_tokens, np.array([*self.running], int)
        is_ahead = (num_new[rows] == 0) & (self.limits[rows] - batch.num_tokens[rows] > 1)
        rows = np.concatenate([rows[is_ahead], rows[num_new[rows] > 0]])
        ends = np.minimum(np.maximum(num_new[rows], 1).cumsum(), budget)
        num_new[rows], budget = np.diff(ends, prepend=0), budget - ends.max(initial=0)
        rows = rows[num_new[rows] > 0]
        while len(rows) and len(rows := rows[batch.plan(rows, num_new[rows], step=step).num_grown :]):
            newest, self.is_short = next(row for row in reversed(self.running) if row not in step.rows), True
            if any(newest in flight.rows for flight, *_ in self.in_flight):
                break  # its token is on the way: plan again once that step has ended
            self.put_back(self.leave(newest))
            self.batch.release([newest])
            rows = rows[rows != newest]
        for row in np.flatnonzero(~batch.is_admitted)[: len(self.waiting) * (not self.is_short)].tolist():
            options = {"max_num_new_tokens": budget, "reserve": "prompt", "is_ready": self.store and self.store.is_ready}
            admission = batch.admit_next(row, self.waiting, step=step, **options) if budget else None
            if admission is None:
                break
            request, num_cached = admission
            budget -= batch.num_computed_tokens[row] - num_cached
            self.running[row], self.limits[row] = request, len(request.prompt) + request.max_tokens
        return step

    def run(self, requests: list[Request]) -> None:
        """Answer requests. Pages of the last steps are then saved too."""
        for request in requests:
            if self.store is not None:
                self.store.fetch(EngineRequest(request.request_id, request.prompt))
            self.waiting.add(request, request.prompt)
        while self.waiting or self.running:
            if len(step := self.plan()):
                self.launch(step)
            elif not self.in_flight:  # the store or the transfers hold what is missing
                sleep(0.001)
                self.move_pages()
            self.end_transfers(must_wait=self.has_loads or not self.in_flight)  # tokens of wrong pages do not count
            if len(self.in_flight) == len(self.results) or (self.in_flight and not len(step)):
                self.end()
        for _ in range(2 + len(self.results)):  # a store gets pages once the steps that may follow have begun
            self.move_pages()
            self.end_transfers(must_wait=True)


def make_store_tier(manager: CacheManager, host_pages: HostPages, args: Namespace) -> StoreTier:
    """Put files behind the pages of the host. Engines with the same weights share them."""
    namespace = make_namespace(manager, host_pages.layout, f"seed {args.seed}, {DEVICE}".encode())
    return StoreTier(manager, FileStore(args.store, namespace), host_pages, namespace, write="through")


def trace(manager: CacheManager, path: Path | None) -> AbstractContextManager[Any]:
    """Record a trace of the allocator while the block runs, unless `path` is None. Needs the extra ``pagepool[events]``."""
    if path is None:
        return nullcontext()
    from pagepool.trace import Recorder

    return Recorder(manager, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: requests with random prompts, which have common beginnings."""
    parser = ArgumentParser(description=__doc__)
    sizes = {"num-requests": 24, "samples": 1, "num-pages": 48, "num-reqs": 8, "num-tokens": 32, "host-pages": 0}
    for name, default in {"seed": 0, **sizes}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--steps-ahead", type=int, default=1, choices=(0, 1), help="default: 1")
    parser.add_argument("--no-sharing", action="store_true", help="let each row read the pages of a shared prefix")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep pages in files, for later runs and other engines")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of the allocator, for ui.perfetto.dev")
    parser.add_argument("--check", action="store_true", help="compare the answers with those of the model without a cache")
    args = parser.parse_args(arguments)
    engine, rng = Engine(args), np.random.default_rng(args.seed)
    tokens = rng.integers(0, VOCAB, (args.num_requests, 64)).tolist()
    prompts = [tokens[i % 3][: 13 * (i % 3 + 1)] + own[: rng.integers(1, 24)] for i, own in enumerate(tokens)]
    samples = [prompt for prompt in prompts for _ in range(args.samples)]
    with trace(engine.manager, args.trace):
        engine.run(requests := [Request(prompt, int(rng.integers(1, 32))) for prompt in samples])
    if engine.store is not None:
        engine.store.close(drain_seconds=10)
    print(*(f"{len(each.prompt)} tokens -> {' '.join(map(str, each.answer))}" for each in requests), sep="\n")
    print(f"All: {(stats := engine.manager.stats()).queries}\nPreempted: {stats.preempted_queries}")
    print(engine.sharing.describe())
    if args.check and any(request.answer != engine.model.answer(request.prompt, request.max_tokens) for request in requests):
        parser.exit(1, "An answer differs from that of the model without a cache.\n")


if __name__ == "__main__":
    main()

"""A continuous-batching engine: chunked prefill, prefix caching, preemption, sampling, beam search. See `engine.py --help`."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
from attention import attend_by_gather
from beams import Beam, BeamSearch
from layers import Mixer, Weights
from model import Attention, digest_weights, find_mixer
from request import Request, SamplingParams
from runner import ModelRunner, pack
from sampling import NextTokens
from scheduler import Scheduler
from shared_prefix import Shared, list_shared
from sharing import Sharing, list_widths

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    FullAttentionSpec,
    HostTier,
    MultiGroupPageTable,
    PageHashing,
    StateWrites,
    StepInputs,
    StepResult,
)
from pagepool.host_pages import HostPages
from pagepool.stores import FileStore, StoreTier, make_namespace

MAX_SAMPLES, MAX_SIZE = 1024, 2**30


class Flight(NamedTuple):
    """A step in flight, with arrays by its rows."""

    step: StepResult

    lengths: Any
    """Tokens of each row, without drafts."""

    num_drafts: Any
    """Drafts of each row behind them."""

    is_due: Any
    """Whether all tokens of the row are computed that are known or on their way."""

    is_sampled: Any
    """Whether the next token is sampled then, and not chosen otherwise."""

    next_tokens: NextTokens | None = None
    """Results on the device; None if the step could not start."""


class Engine:
    """An engine with one row of the page table for each request. A step computes up to `max_num_batched_tokens` tokens."""

    def __init__(
        self,
        weights: Weights,
        *,
        num_pages: int = 64,
        num_state_pages: int = 0,
        page_size: int = 8,
        ring_size: int = 8,
        checkpoint_interval: int = 16,
        max_num_reqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        attend: Attention = attend_by_gather,
        num_devices: int = 1,
        num_host_pages: int = 0,
        hash_seed: str | None = None,
        max_steps_ahead: int = 0,
        num_drafts: int = 0,
        store: Path | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        """The cache has `num_pages` pages of `page_size` tokens; at most `max_num_reqs` requests run at once. A hybrid keeps
        its states where requests resume, and in prompts at multiples of `checkpoint_interval` tokens, in a pool of
        `num_state_pages` pages; 0 means four for each request. One with rings, of `ring_size` tokens, has a ring for each row
        there. Evicted pages move to `num_host_pages` pages of host memory, states to a number in proportion; 0 turns this off.
        Up to `max_steps_ahead` steps are planned and started before the tokens of the one that runs are known. Up to
        `num_drafts` drafts are verified with a token. Routers must hash prompts with the same `hash_seed`. Computed pages are
        also kept in files below the folder `store`, for later engines and others with the same weights; then the host has twice
        the pages of the pool, or more. With `shares_prefixes` decode steps read the pages of a shared prefix once, where that
        saves a tenth. Raise ValueError for values that cannot work.
        """
        sizes = {
            "num_pages": (num_pages, 2),
            "num_state_pages": (num_state_pages, 0),
            "page_size": (page_size, 1),
            "ring_size": (ring_size, 1),
            "checkpoint_interval": (checkpoint_interval, 1),
            "max_num_reqs": (max_num_reqs, 1),
            "max_num_batched_tokens": (max_num_batched_tokens, 1),
            "num_host_pages": (num_host_pages, 0),
            "num_drafts": (num_drafts, 0),
        }
        for name, (size, least) in sizes.items():
            if not least <= size <= MAX_SIZE:
                raise ValueError(f"{name}: got {size}, allowed: {least} to {MAX_SIZE}")
        mixer = find_mixer(weights)
        num_row_pages = num_pages if mixer is None else num_state_pages or mixer.count_pages(max_num_reqs)
        pool_sizes, host_sizes = [num_pages, num_row_pages], []
        if store is not None:
            num_host_pages = max(num_host_pages, 2 * num_pages)
        if num_host_pages:
            # The tier names all pools, and writes through with twice the pages of each, also of rings, which it never saves.
            is_saved = mixer is not None and mixer.is_cached
            num_host_row_pages = num_host_pages * num_row_pages // num_pages if is_saved else 2 * num_row_pages
            host_sizes = [num_host_pages, max(2, num_host_row_pages)]
        pools = ("kv",) if mixer is None else ("kv", mixer.pool)
        policy = "write_back" if store is None else "write_through"
        self.host_tier = HostTier(dict(zip(pools, host_sizes, strict=False)), policy=policy) if host_sizes else None
        self.runner = ModelRunner(weights, *pool_sizes, page_size, ring_size, attend, num_devices, host_sizes, num_drafts)
        of_cache = {"page_size": page_size, "ring_size": ring_size, "checkpoint_interval": checkpoint_interval}
        all_sizes = self.runner.sizes | of_cache
        most = max_num_batched_tokens if mixer is None else mixer.count_drafts(all_sizes, max_steps_ahead)
        if num_drafts > most:
            raise ValueError(f"num_drafts: got {num_drafts}, allowed with {max_steps_ahead} steps ahead: up to {most}")
        groups = make_groups(mixer, all_sizes)
        self.manager = CacheManager(
            dict(zip(pools, pool_sizes, strict=False)),
            groups,
            max_model_len,
            host_tier=self.host_tier,
            max_num_batched_tokens=max_num_batched_tokens,
            hashing=PageHashing(hash_algo="siphash128" if store is None or hash_seed else "sha256", hash_seed=hash_seed),
        )
        self.store = None if store is None else make_store_tier(self.manager, self.runner.host_pages, weights, store)
        # The last row is never admitted, so all its pages are page 0, the null page. Padding is written there.
        self.num_rows = max_num_reqs + 1
        page_sizes = [group.kv_cache_spec.page_size for group in groups]
        self.table = MultiGroupPageTable(
            self.num_rows, max_model_len, max_num_batched_tokens, page_sizes, self.runner.replicated
        )
        limits = max_num_reqs, max_num_batched_tokens
        self.scheduler = Scheduler(self.manager, self.table, *limits, max_steps_ahead, self.store, num_drafts)
        self.padded_sizes = list_padded_sizes(max_num_batched_tokens)
        lengths = {"num_tokens": self.padded_sizes[-1], "num_reqs": max_num_reqs, "depth": max_steps_ahead + 1}
        fields = ["token_ids", "rows", "positions", "last_tokens", "starts", "seq_lens"]
        self.inputs = StepInputs(self.scheduler.batch, fields=fields, **lengths)
        fields = ["order", "seq_lens", "own_starts", "prefix_page_ids", "prefix_rows"]
        self.groups = StepInputs(self.scheduler.batch, fields=fields, order="prefixes", **lengths)
        widths = list_widths(32, self.table[0].max_num_pages_per_req)
        self.sharing = Sharing(self.groups, page_size, widths, shares_prefixes)
        self.in_flight: deque[Flight] = deque()  # the oldest first
        self.numbers = count()
        self.num_copied_pages = 0
        self.has_loads = False  # whether pages may still be loading
        self.busy_since = 0.0  # when the device began the oldest step in flight

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, streams: bool = True) -> Request:
        """Queue a request. It gets its tokens step by step if it streams, otherwise when it ends or is preempted. Raise
        ValueError, without a change, if it could not run to its end.
        """
        return self.add_samples(prompt, params, 1, streams)[0]

    def add_samples(
        self, prompt: Sequence[int], params: SamplingParams | None, num_samples: int, streams: bool = True
    ) -> list[Request]:
        """Queue requests with seeds ``seed``, ``seed + 1``, ..., which fork after their common prompt is computed. Streams and
        errors are as in `add`.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples: got {num_samples}, allowed: 1 to {MAX_SAMPLES}")
        params, number = params or SamplingParams(), next(self.numbers)
        first, *others = (Request(prompt, replace(params, seed=params.seed + i), number, streams) for i in range(num_samples))
        self.require_capacity(first, 1)
        first.samples = others if len(first.token_ids) > 1 else []
        for request in [first] if first.samples else [first, *others]:
            self.scheduler.add(request)
        return [first, *others]

    def add_beams(self, prompt: Sequence[int], params: SamplingParams | None, num_beams: int) -> BeamSearch:
        """Queue a beam search. Its `beams` are the answers once the engine is idle. Errors as in `add`."""
        search = BeamSearch(prompt, params or SamplingParams(), next(self.numbers), num_beams)
        self.require_capacity(search.beams[0], num_beams)
        self.scheduler.add(search.beams[0])
        return search

    def abort(self, request: Request) -> None:
        """End a request before its answer is complete, with samples that have not forked."""
        self.scheduler.abort(request)

    def require_capacity(self, request: Request, num_rows: int) -> None:
        """Raise ValueError if a request that ends with this number of rows could not run even alone."""
        num_tokens = len(request.token_ids) + request.params.max_tokens
        wrong = [token_id for token_id in request.token_ids if not 0 <= token_id < self.runner.sizes["vocab"]]
        if not request.token_ids:
            raise ValueError("prompt: got no tokens, allowed: at least 1")
        if wrong:
            raise ValueError(f"prompt: got token id {wrong[0]}, allowed: 0 to {self.runner.sizes['vocab'] - 1}")
        if num_tokens > self.manager.max_model_len:
            raise ValueError(f"request: got {num_tokens} tokens with its answer, allowed: {self.manager.max_model_len}")
        num_computed = num_tokens - 1  # the last token of an answer never is
        self.manager.require_capacity(num_computed)
        num_pages, pool = num_rows * -(-num_computed // self.table.page_sizes[0]), self.manager.pools["kv"]
        if num_rows >= self.num_rows or num_pages >= pool.num_pages:
            needed = f"{num_rows} rows and {num_pages} pages"
            raise ValueError(f"num_beams: got {num_rows}, which take {needed}, of {self.num_rows - 1} and {pool.num_pages - 1}")

    def warmup(self) -> None:
        """Compile all programs: the table's commits, copies, and a step for each padded size."""
        self.table.warmup()
        self.runner.warmup(max_num_copies=min(self.num_rows - 1, self.manager.num_pages))
        decode_size = next(size for size in self.padded_sizes if size >= min(self.num_rows - 1, self.padded_sizes[-1]))
        for padded_size in self.padded_sizes:
            none, writes = np.zeros(0, np.int32), self.scheduler.batch.take_moves().writes
            packed = pack(self.inputs, 0, padded_size, none, none, self.scheduler.rows, writes)
            self.runner.run(self.table.commit(self.num_rows), *packed)
            is_shared = self.sharing.is_wanted and padded_size <= decode_size
            for widths in product(self.sharing.widths, repeat=2) if is_shared else ():
                self.runner.run(self.table.commit(self.num_rows), *packed, list_shared(self.groups, padded_size, *widths))
        self.runner.wait()  # the first step is as fast as others

    @property
    def is_idle(self) -> bool:
        """Whether all requests are done."""
        return not self.scheduler.waiting and not self.scheduler.running

    def stream(self) -> Iterator[tuple[Request, list[int]]]:
        """Run until no request is left. Yield each request that streams with its new tokens, as soon as they are sampled."""
        while not self.is_idle:
            yield from self.step()

    def step(self) -> list[tuple[Request, list[int]]]:
        """Start a step, if anything can run, and end the oldest one if no more may be in flight. Return each request that
        streams and got tokens, with these. Raise RuntimeError if nothing can run, but for requests that wait for the store.

        If the model fails, the error is raised; later steps compute the same tokens again.
        """
        step, requests = self.scheduler.schedule()
        for _ in range(self.num_rows):  # wait for transfers in progress until some chunk can run
            if requests or self.in_flight or self.host_tier is None:
                break
            self.move_pages()
            self.end_transfers(must_wait=True)
            step, requests = self.scheduler.schedule()
        if not requests and not self.in_flight:
            if self.scheduler.is_fetching:
                sleep(0.001)
                return []
            num_waiting, num_running = len(self.scheduler.waiting), len(self.scheduler.running)
            raise RuntimeError(f"nothing can run: {num_waiting} requests wait, {num_running} have rows")
        if requests:
            self.start_step(step, requests)
        self.end_transfers(must_wait=self.has_loads)  # a token counts only if all pages it was computed from are correct
        if len(self.in_flight) <= self.scheduler.max_steps_ahead and requests:
            return []
        streamed = self.end_step()
        if self.scheduler.has_forked:  # the next step is planned with the copies made
            self.move_pages()
        if self.is_idle and self.store is not None:
            self.save_pages()
        return streamed

    def start_step(self, step: StepResult, requests: list[Request]) -> None:
        """Start a planned step on the device."""
        batch, inputs, rows, in_step = self.scheduler.batch, self.inputs, self.scheduler.rows, step.rows
        draft_token_ids = self.scheduler.list_drafts(requests)
        num_drafts = np.count_nonzero(draft_token_ids >= 0, axis=1)
        num_tokens = batch.inputs(step, out=inputs, draft_token_ids=draft_token_ids)
        padded_size = next(size for size in self.padded_sizes if size >= num_tokens)
        starts, num_known = inputs.starts[: len(step)], batch.num_tokens[in_step]
        lengths, is_due = inputs.seq_lens[: len(step)] - starts - num_drafts, batch.num_computed_tokens[in_step] == num_known
        flight = Flight(step, lengths, num_drafts, is_due, is_due & rows.is_sampled[in_step])
        rows.num_in_flight[in_step] += 1
        rows.num_rejected[in_step[starts < num_known]] = 0
        try:
            writes = self.move_pages()
            page_tables = self.table.commit(self.num_rows)
            packed = pack(inputs, num_tokens, padded_size, in_step, num_drafts, rows, writes)
            shared = self.find_shared(step, padded_size) if num_tokens == len(step) else None
            if not self.in_flight:
                self.busy_since = perf_counter()
            self.in_flight.append(flight._replace(next_tokens=self.runner.run(page_tables, *packed, shared)))
        except BaseException:
            self.take_back([*self.in_flight, flight])
            raise

    def find_shared(self, step: StepResult, padded_size: int) -> Shared | None:
        """Return the groups of a decode step whose rows share pages; None if reading them once would save less than a tenth, or
        the engine was made without. The hidden states of drafters and of a hybrid's other layers are not concerned.
        """
        self.scheduler.batch.inputs(step, out=self.groups)
        widths = self.sharing.find_widths()
        return None if widths is None else list_shared(self.groups, padded_size, *widths)

    def end_step(self) -> list[tuple[Request, list[int]]]:
        """Wait for the oldest step, and continue the requests for which it counts."""
        flight = self.in_flight[0]
        try:
            next_tokens = NextTokens(*map(np.asarray, flight.next_tokens))
        except BaseException:
            self.take_back([*self.in_flight])
            raise
        self.in_flight.popleft()
        self.record_step(flight)
        self.scheduler.rows.num_in_flight[flight.step.rows] -= 1
        return self.update(flight, next_tokens)

    def record_step(self, flight: Flight) -> None:
        """Let the store's tier know how long a step took to compute tokens of prompts, for its choice to load or to compute."""
        start, self.busy_since = self.busy_since, perf_counter()
        num_tokens = int(flight.lengths[flight.lengths > 1].sum())
        if self.store is not None and num_tokens:
            self.store.record_step(num_tokens, self.busy_since - start)

    def take_back(self, flights: Sequence[Flight]) -> None:
        """End steps in flight, oldest first: the first has failed, so the others have too. Their tokens are computed again."""
        for flight in flights:
            self.scheduler.rows.num_in_flight[flight.step.rows] -= 1
        self.scheduler.fail([flight.step for flight in flights])
        self.in_flight.clear()
        self.runner.wait()  # a step that was started reads its inputs, which the next step overwrites

    def move_pages(self) -> StateWrites:
        """Start the transfers to and from the host, and copy the pages that checkpoints, hits and forks need, before the model
        reads or writes them. Return the states that the planned step writes.
        """
        moves = self.scheduler.batch.take_moves()
        self.scheduler.has_forked = False
        self.runner.move_pages(moves)
        self.num_copied_pages += len(moves.copies)
        self.has_loads |= len(moves.loads) > 0
        return moves.writes

    def end_transfers(self, must_wait: bool) -> None:
        """Report finished transfers to the manager. Requests whose pages failed to load go back."""
        self.has_loads &= not must_wait
        for number, saves, loads, _ in self.runner.end_transfers(must_wait):
            failed = self.manager.fail(number, saves=saves, loads=loads)
            if len(failed):
                self.scheduler.rewind(failed)

    def sleep(self) -> list[tuple[Request, list[int]]]:
        """Give back the device memory of the cache until `wake`: end the steps in flight, preempt all requests, save what the
        host can have, and drop the arrays. Return what `step` would return for these steps.
        """
        streamed = [each for _ in range(len(self.in_flight)) for each in self.end_step()]
        self.scheduler.preempt_all()
        self.save_pages()  # copies and loads that are due hold pages
        self.manager.vacate()
        self.move_pages()
        self.end_transfers(must_wait=True)
        self.runner.drop_cache()
        return streamed

    def wake(self) -> None:
        """Make the arrays of the cache anew. Requests go on with the pages that the host has."""
        self.runner.make_cache()
        self.manager.resume()

    def save_pages(self) -> None:
        """Let the pages of the last steps reach the host, then the store, which gets a page only once the steps planned behind
        its own have begun. While steps follow, these do it.
        """
        for _ in range(3 + self.scheduler.max_steps_ahead):
            self.move_pages()
            self.end_transfers(must_wait=True)

    def close(self, drain_seconds: float = 10.0) -> None:
        """End the use of the store, if there is one, after the saves under way, which may take up to `drain_seconds`."""
        if self.store is not None:
            self.store.close(drain_seconds=drain_seconds)

    def update(self, flight: Flight, next_tokens: NextTokens) -> list[tuple[Request, list[int]]]:
        """Settle a step: rows whose due tokens are all computed get their next tokens, and end. Only requests that stream, that
        end or that fork are looked at one by one.
        """
        scheduler, rows = self.scheduler, self.scheduler.rows
        token_ids, counts = next_tokens.list_tokens(flight.step.rows, flight.is_sampled)
        places = scheduler.settle(flight.step, token_ids, counts)
        is_sampled, is_forked = (places >= 0) & flight.is_sampled, (places >= 0) & flight.is_due & ~flight.is_sampled
        sampled = places[is_sampled]
        rows.num_rejected[sampled] += (flight.num_drafts + 1 - counts)[is_sampled]
        streamed = [(request, scheduler.read(request)) for request in scheduler.find(sampled[rows.is_streamed[sampled]])]
        scheduler.finish(scheduler.find(flight.step.ended_rows))
        self.fork(scheduler.find(places[is_forked]), next_tokens)
        return streamed

    def fork(self, requests: Sequence[Request], next_tokens: NextTokens) -> None:
        """Fork samples of computed prompts, and beams whose candidates are known."""
        for request in requests:
            if isinstance(request, Beam):
                request.candidates = next_tokens.list_candidates(request.row)
            else:
                self.scheduler.append([request])  # the prompt's last token, which each sample computes itself
                samples, request.samples = request.samples, []
                self.scheduler.rows.put(request)
                self.scheduler.fork(request, samples)
        for search in {request.search: None for request in requests if isinstance(request, Beam)}:
            if search.is_ready:
                self.extend(search)

    def extend(self, search: BeamSearch) -> None:
        """Choose the next beams. The first child of a beam takes its row, other children fork; beams without children are
        released.
        """
        families = [(beam, [child for child in children if not child.is_finished]) for beam, children in search.choose()]
        self.scheduler.finish([beam for beam, children in families if not children])
        for beam, (heir, *others) in ((beam, children) for beam, children in families if children):
            self.scheduler.fork(beam, others)
            self.scheduler.replace(beam, heir)
        self.scheduler.append([child for _, children in families for child in children if child in self.scheduler.running])


def make_groups(mixer: Mixer | None, sizes: Mapping[str, int]) -> list[CacheGroupSpec]:
    """Return the group of attention layers and, for a hybrid, the group of the rows' pages."""
    attention = FullAttentionSpec(sizes["page_size"], sizes["kv_heads"], sizes["head_size"], "float32", use_mla=False)
    groups = [CacheGroupSpec(attention)]
    if mixer is not None:
        groups.append(CacheGroupSpec(mixer.make_spec(sizes), pool=mixer.pool))
    return groups


def make_store_tier(manager: CacheManager, host_pages: HostPages, weights: Weights, folder: Path) -> StoreTier:
    """Put files in a folder behind the host tier. Engines with equal weights and layouts share them."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # an error is one of the command, and not of each page
    namespace = make_namespace(manager, host_pages.layout, digest_weights(weights))
    return StoreTier(manager, FileStore(folder, namespace), host_pages, namespace, write="through")


def list_padded_sizes(max_num_tokens: int) -> list[int]:
    """Return the padded sizes of steps. Each is twice the previous one, so few programs are compiled."""
    sizes = [16]
    while sizes[-1] < max_num_tokens:
        sizes.append(2 * sizes[-1])
    return sizes


if __name__ == "__main__":
    from command import main

    main()

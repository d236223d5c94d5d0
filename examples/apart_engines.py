"""Engines for prefill and decode apart: one computes prompts, and one pulls their pages and generates the answers."""

from collections.abc import Sequence
from time import sleep
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from engine import Engine, Flight
from layers import Weights
from model import digest_weights
from request import Request, SamplingParams
from sampling import NextTokens

from pagepool.peers import Arrival, PrefillClient, PrefillServer, RemotePrompt, RowsLink
from pagepool.stores import make_namespace

__all__ = ["DecodeEngine", "PrefillEngine"]

PAGE_AXIS = 1
NOWHERE = np.iinfo(np.int32).max
"""A page outside every array: writes to it are dropped."""
IDLE_SECONDS = 0.001

take_pages = jax.jit(lambda array, ids: jnp.take(array, ids, axis=PAGE_AXIS))
put_pages = jax.jit(lambda array, ids, pages: array.at[:, ids].set(pages, mode="drop"), donate_argnums=0)


def pad(ids: Sequence[int], value: int) -> Any:
    """Return page ids with a power of two of places, so few programs are compiled."""
    padded = np.full(1 << (len(ids) - 1).bit_length(), value, np.int32)
    padded[: len(ids)] = ids
    return padded


class CrossingEngine(Engine):
    """An engine whose pages cross to or from others with the same weights, as arrays of NumPy over TCP."""

    def __init__(self, weights: Weights, secret: bytes, **options: Any) -> None:
        """`options` are those of `Engine`. Peers have the same `secret`."""
        super().__init__(weights, **options)
        shapes = [[(leaf.shape[:1], leaf.shape[2:], str(leaf.dtype)) for leaf in leaves] for leaves in self.list_leaves()]
        self.namespace = make_namespace(self.manager, f"pages of {shapes}", digest_weights(weights))
        self.link = RowsLink(secret, self.namespace)

    def list_leaves(self) -> list[list[jax.Array]]:
        """Return the arrays of pages of each cache group."""
        return [jax.tree.leaves(arrays) for arrays in self.runner.cache if jax.tree.leaves(arrays)]

    def gather(self, page_ids: Sequence[Sequence[int]]) -> list[Any]:
        """Return copies of pages, given by cache group, in host memory: one for each array."""
        groups = zip(self.list_leaves(), page_ids, strict=True)
        taken = [(take_pages(leaf, pad(ids, 0)), len(ids)) for leaves, ids in groups if ids for leaf in leaves]
        return [np.ascontiguousarray(np.asarray(pages)[:, :num]) for pages, num in taken]

    def make_parts(self, nums_pages: list[int]) -> list[Any]:
        """Return host memory for numbers of pages, by cache group, as `gather` returns it."""
        groups = zip(self.list_leaves(), nums_pages, strict=True)
        return [np.empty((leaf.shape[0], num, *leaf.shape[2:]), leaf.dtype) for leaves, num in groups if num for leaf in leaves]

    def scatter(self, page_ids: Sequence[Sequence[int]], parts: Sequence[Any]) -> None:
        """Write pages, given by cache group, from host memory."""
        left, arrays = iter(parts), []
        for leaves, ids in zip(self.list_leaves(), page_ids, strict=True):
            for leaf in leaves:
                if ids:
                    part, padded = next(left), pad(ids, NOWHERE)
                    widths = [(0, 0), (0, len(padded) - len(ids))] + [(0, 0)] * (part.ndim - 2)
                    leaf = put_pages(leaf, padded, np.pad(part, widths))
                arrays.append(leaf)
        self.runner.cache = jax.tree.unflatten(jax.tree.structure(self.runner.cache), arrays)

    def close(self, drain_seconds: float = 10.0) -> None:
        """Close the link too."""
        super().close(drain_seconds)
        self.link.close()


class PrefillEngine(CrossingEngine):
    """An engine that computes prompts for others, and offers their pages chunk by chunk."""

    def __init__(self, weights: Weights, secret: bytes, *, lease_seconds: float = 10.0, **options: Any) -> None:
        """A prompt is dropped after `lease_seconds` without a sign of life."""
        super().__init__(weights, secret, **options)
        self.server = PrefillServer(self.manager, self.link, self.namespace, secret, lease_seconds=lease_seconds)
        self.prompts: dict[Request, RemotePrompt] = {}

    def step(self) -> list[tuple[Request, list[int]]]:
        """Queue new prompts, and drop those without a waiting engine. Then do a step, if there is work."""
        for prompt in self.server.take():
            try:
                self.prompts[self.add(prompt.token_ids.tolist(), SamplingParams(max_tokens=1), streams=False)] = prompt
            except ValueError:  # it is too long for this engine
                self.server.drop(prompt)
        for request in [request for request, prompt in self.prompts.items() if not self.server.is_wanted(prompt)]:
            del self.prompts[request]
            self.abort(request)
        self.server.poll()
        return [] if self.is_idle and not self.in_flight else super().step()

    def update(self, flight: Flight, next_tokens: NextTokens) -> list[tuple[Request, list[int]]]:
        """Offer the pages that a step has filled, before the step is settled, which ends complete prompts."""
        batch = self.scheduler.batch
        for row in flight.step.rows.tolist():
            request = self.scheduler.rows.requests[row]
            prompt = None if request is None else self.prompts.get(request)
            if request is None or prompt is None:
                continue
            num_ahead = sum(int(later.lengths[later.step.rows == row].sum()) for later in self.in_flight)
            num_tokens = int(batch.num_computed_tokens[row]) - num_ahead
            page_ids = self.server.list_pages(prompt, batch.get_page_ids(row), num_tokens)
            if any(page_ids):
                self.server.offer(prompt, num_tokens, self.gather(page_ids))
            if num_tokens == len(prompt.token_ids):
                del self.prompts[request]
        return super().update(flight, next_tokens)

    def close(self, drain_seconds: float = 10.0) -> None:
        """Drop all prompts."""
        self.server.close()
        super().close(drain_seconds)


class Fetched(NamedTuple):
    """A request whose row waits for its prompt."""

    request: Request
    num_hit_tokens: int
    checkpoint_ids: list[int]
    """Pages that get the state at the end, beside the row's own."""


class DecodeEngine(CrossingEngine):
    """An engine with prompts from others: it pulls their pages, and computes what does not arrive."""

    def __init__(self, weights: Weights, secret: bytes, *, seconds: float = 10.0, **options: Any) -> None:
        """A request waits at most `seconds` for a sign of life of the other engine."""
        super().__init__(weights, secret, **options)
        self.client = PrefillClient(self.manager, self.link, self.namespace, secret, self.make_parts, seconds=seconds)
        self.asked: list[tuple[Request, str]] = []  # requests without a row, and the engine to be asked
        self.fetched: dict[int, Fetched] = {}
        """Requests by row."""
        self.num_pulled_bytes = self.num_failed = 0

    def add_remote(self, prompt: Sequence[int], params: SamplingParams, address: str) -> Request:
        """Queue a request whose prompt the `PrefillEngine` at an address computes. Errors are those of `add`."""
        request = Request(prompt, params, next(self.numbers))
        self.require_capacity(request, 1)
        self.asked.append((request, address))
        return request

    @property
    def is_idle(self) -> bool:
        """Whether all requests are done."""
        return super().is_idle and not self.asked and not self.fetched

    def step(self) -> list[tuple[Request, list[int]]]:
        """Ask for prompts, write the pages that have arrived, and do a step if any row can run."""
        while self.asked and self.scheduler.free_rows and self.ask(*self.asked[0]):
            del self.asked[0]
        for arrival in self.client.poll():
            self.receive(arrival)
        if self.fetched and not (self.scheduler.waiting or self.scheduler.running or self.in_flight):
            sleep(IDLE_SECONDS)
            return []
        return super().step()

    def ask(self, request: Request, address: str) -> bool:
        """Give a request a row that waits for its prompt. Return False if there are too few pages."""
        batch, row, token_ids = self.scheduler.batch, self.scheduler.free_rows[0], request.own_token_ids
        num_external = self.client.find_end(len(token_ids)) - batch.probe(row, token_ids)
        if num_external <= 0:
            self.scheduler.add(request)
            return True
        num_hits = batch.admit(row, token_ids, num_external_tokens=num_external)
        if num_hits is None:
            if self.scheduler.running or self.fetched:
                return False
            self.scheduler.add(request)  # it is preempted and computed here like others
            return True
        self.scheduler.free_rows.popleft()
        request.row, writes = row, self.move_pages()
        self.fetched[row] = Fetched(request, num_hits, writes.page_ids[writes.rows == row].tolist())
        end = num_hits + int(batch.num_external_tokens[row])
        self.client.ask(row, address, token_ids[:end], num_hits)
        return True

    def receive(self, arrival: Arrival) -> None:
        """Write pages that have arrived, and let the row run once its prompt is there, or has failed."""
        row, batch = int(str(arrival.name)), self.scheduler.batch
        fetched = self.fetched[row]
        if arrival.error is None:
            page_ids = [
                [ids[place] for place in places] for ids, places in zip(batch.get_page_ids(row), arrival.places, strict=True)
            ]
            self.scatter(page_ids, arrival.parts)
            if len(page_ids) > 1 and page_ids[1] and fetched.checkpoint_ids:  # the state, which is cached too
                states = arrival.parts[len(arrival.parts) - len(self.list_leaves()[1]) :]
                self.scatter([[], fetched.checkpoint_ids], states)
            self.num_pulled_bytes += sum(part.nbytes for part in arrival.parts)
            batch.commit_external(row, arrival.num_tokens, is_last=arrival.is_last)
        else:
            self.num_failed += 1
            batch.fail_external(row, arrival.num_tokens)
        if arrival.is_last:
            del self.fetched[row]
            self.scheduler.start(fetched.request, row, fetched.num_hit_tokens)

    def close(self, drain_seconds: float = 10.0) -> None:
        """Pull no more."""
        self.client.close()
        super().close(drain_seconds)

"""An engine that reads pages from other engines' files and writes its own: see page_files.py."""

from bisect import insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from engine import Engine
from model import Weights
from page_files import PageFiles, digest_model
from request import Chunk, Request
from sampling import NextTokens
from scheduler import by_arrival

from pagepool import EngineRequest, StepResult

__all__ = ["SharingEngine"]


class SharingEngine(Engine):
    """An engine that also keeps its pages in a folder, beyond its own end. Engines with the same weights hit them."""

    def __init__(self, weights: Weights, folder: Path, **options: Any) -> None:
        """Make an engine with the `options` of `Engine`. Raise ValueError for a hybrid, since states are not kept in files."""
        super().__init__(weights, **options)
        if self.runner.cache.states:
            raise ValueError("page files: got a hybrid, allowed: a model with attention only")
        pages = self.runner.cache.keys_and_values
        kv_heads, _, page_size, head_size = pages[0][0].shape
        shape = (len(pages), 2, kv_heads, page_size, head_size)
        self.files = PageFiles(folder, digest_model(weights), page_size, shape)
        shardings = jax.tree.map(lambda array: array.sharding, pages)
        self._write = jax.jit(_write_page, donate_argnums=0, out_shardings=shardings)
        self._read = jax.jit(_read_page)

    def warmup(self) -> None:
        """Compile the programs that read and write a page as well."""
        super().warmup()
        self.write_page(0, self.files.blank)
        self.read_page(0)

    def step(self) -> list[tuple[Request, int]]:
        """Admit requests with pages in files, and run the model once: see `Engine.step`."""
        self.admit_from_files()
        return super().step()

    def update(self, step: StepResult, chunks: Sequence[Chunk], next_tokens: NextTokens) -> list[tuple[Request, int]]:
        """Write the pages that a step has filled. They are leased meanwhile, since a request may end and lose its pages."""
        filled = [page for chunk in chunks if self.is_current(chunk) for page in self.list_filled(chunk)]
        with self.manager.lease([page_id for _, page_id in filled]):
            streamed = super().update(step, chunks, next_tokens)
            for digest, page_id in filled:
                self.files.save(digest, self.read_page(page_id))
        return streamed

    def list_filled(self, chunk: Chunk) -> list[tuple[str, int]]:
        """Return the digests and ids of the pages that the tokens of a chunk have filled."""
        request, start, stop, _ = chunk
        stop = min(stop, int(self.scheduler.batch.num_computed_tokens[request.row]))  # fewer if pages failed to load
        filled = slice(start // self.files.page_size, stop // self.files.page_size)
        if filled.start >= filled.stop:
            return []
        (page_ids,) = self.scheduler.batch.get_page_ids(request.row)
        return list(zip(self.files.list_digests(request.token_ids[:stop])[filled], page_ids[filled], strict=True))

    def admit_from_files(self) -> None:
        """Give waiting requests rows, in order, while files hold more of their tokens than the pool."""
        scheduler = self.scheduler
        while scheduler.waiting and scheduler.free_rows:
            request, row = scheduler.waiting[0], scheduler.free_rows[0]
            digests = self.files.list_digests(request.token_ids)
            num_in_files = min(self.files.count_leading(digests) * self.files.page_size, request.num_due_tokens - 1)
            num_external = num_in_files - self.manager.probe(EngineRequest("probe", request.token_ids)).num_hit_tokens
            if num_external <= 0:
                break
            is_preempted = request.num_cached_tokens is not None
            options = {"num_external_tokens": num_external, "is_preempted": is_preempted}
            num_cached = scheduler.batch.admit(row, request.token_ids, **options)
            if num_cached is None:
                break
            request.row, request.num_cached_tokens = row, self.fetch(row, digests, num_cached)
            insort(scheduler.running, scheduler.waiting.pop(0), key=by_arrival)
            scheduler.free_rows.popleft()

    def fetch(self, row: int, digests: Sequence[str], num_cached: int) -> int:
        """Fill the pages of a pending row from files, and run it from there. Return its computed tokens.

        A slow store would fill pages beside the steps, with their rows out of `running` until done.
        """
        batch, page_size = self.scheduler.batch, self.files.page_size
        num_external = int(batch.num_external_tokens[row])
        first, stop = num_cached // page_size, -(-(num_cached + num_external) // page_size)
        (page_ids,) = batch.get_page_ids(row)
        self.move_pages()  # copies of pages that are overwritten
        num_came = 0
        for place in range(first, stop):
            page = self.files.load(digests[place])
            if page is None:
                break
            self.write_page(page_ids[place], page)
            num_came = min((place + 1 - first) * page_size, num_external)
        if num_came == num_external:
            batch.commit_external(row, num_came)
        else:
            batch.fail_external(row, num_came)
        return num_cached + num_came

    def write_page(self, page_id: int, page: np.ndarray) -> None:
        """Write a page of all layers, ``[layers, 2, kv_heads, page_size, head_size]``."""
        written = self._write(self.runner.cache.keys_and_values, np.int32(page_id), page)
        self.runner.cache = self.runner.cache._replace(keys_and_values=written)

    def read_page(self, page_id: int) -> np.ndarray:
        """Return a page of all layers."""
        return np.asarray(self._read(self.runner.cache.keys_and_values, np.int32(page_id)))


def _write_page(layers: list[tuple[Any, Any]], page_id: Any, page: Any) -> list[tuple[Any, Any]]:
    return [
        (keys.at[:, page_id].set(page[layer, 0]), values.at[:, page_id].set(page[layer, 1]))
        for layer, (keys, values) in enumerate(layers)
    ]


def _read_page(layers: list[tuple[Any, Any]], page_id: Any) -> Any:
    return jax.numpy.stack([jax.numpy.stack([pages[:, page_id] for pages in layer]) for layer in layers])

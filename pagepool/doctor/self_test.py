"""A self-test of about a second: seeded random work, done in two ways whose results must agree."""

from random import Random
from typing import Any

import numpy as np

from pagepool._core import EntryJournal
from pagepool.errors import IntegrityError
from pagepool.manager import CacheManager
from pagepool.page_hashing import PageHashing
from pagepool.page_table import MultiGroupPageTable
from pagepool.request import EngineRequest
from pagepool.running_batch import RunningBatch
from pagepool.specs import CacheGroupSpec, FullAttentionSpec, SlidingWindowSpec

PAGE_SIZE = 4
NUM_PAGES = 80
NUM_ROWS = 8
MAX_LENGTH = 64
NUM_STEPS = 1500
STEPS_BETWEEN_CHECKS = 20


def run_self_test() -> None:
    """Do random work. Raise an error of `pagepool.errors` if something is wrong."""
    twins = Twins(seed=0)
    for step in range(NUM_STEPS):
        twins.admit()
        twins.decode()
        twins.release()
        if step % STEPS_BETWEEN_CHECKS == 0:
            twins.check()
    twins.check()


class Twins:
    """A running batch, and a manager doing the same work request by request, each with its own pool; and the prefix index
    rebuilt from the journal of the batch's pool.
    """

    def __init__(self, seed: int) -> None:
        """Draw all work from `seed`."""
        self._random = Random(seed)
        self._documents = [[self._random.randrange(1000) for _ in range(MAX_LENGTH // 2)] for _ in range(8)]
        self._manager, of_batch = _make_manager(), _make_manager()
        self._requests: dict[int, EngineRequest] = {}  # one per row
        table = MultiGroupPageTable(NUM_ROWS, MAX_LENGTH, MAX_LENGTH, [PAGE_SIZE] * len(of_batch.kv_cache_groups))
        self._batch, self._pool = RunningBatch(of_batch, table), of_batch.page_pool
        self._journal = EntryJournal(self._pool.store)
        self._journal.start()
        self._told: set[Any] = set()

    def admit(self) -> None:
        """Start a request with the beginning of a document in each free row, until one does not fit."""
        for row in set(range(NUM_ROWS)) - self._requests.keys():
            document, length = self._random.choice(self._documents), self._random.randrange(1, MAX_LENGTH // 2)
            request = EngineRequest(str(row), [*document[:length], self._random.randrange(1000)])
            hits, num_hits = self._manager.get_computed_pages(request)
            fits = self._manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits) is not None
            _require_same("an admission", num_hits if fits else None, self._batch.admit(row, request.all_token_ids))
            if not fits:
                return
            request.num_computed_tokens = request.num_tokens
            self._requests[row] = request

    def decode(self) -> None:
        """Grow all rows by a token; if pages are short, release the last rows first."""
        while self._pool.get_num_free_pages() < 2 * len(self._requests):
            self._release(max(self._requests))
        tokens = {row: self._random.randrange(1000) for row in self._requests}
        _require_same("a step", len(tokens), self._batch.step([*tokens], [*tokens.values()]).num_grown)
        for row, request in self._requests.items():
            request.append_output_token_ids(tokens[row])
            _require_same("the slots of a token", True, self._manager.allocate_slots(request, 1) is not None)
            request.num_computed_tokens += 1

    def release(self) -> None:
        """Release a random row, and all full rows."""
        chosen = self._random.randrange(NUM_ROWS)
        for row, request in list(self._requests.items()):
            if row == chosen or request.num_tokens == MAX_LENGTH:
                self._release(row)

    def _release(self, row: int) -> None:
        self._manager.free(self._requests.pop(row))
        self._batch.release([row])

    def check(self) -> None:
        """Check both pools, and compare them with each other, and with the journal."""
        self._manager.check()
        self._batch.check()
        for row in self._requests:
            _require_same("the pages of a row", self._manager.get_page_ids(str(row)), self._batch.get_page_ids(row))
        is_cleared, (removed, new, _), _ = self._journal.take_changes()
        self._told = set() if is_cleared else self._told - _keys_of(*removed)
        self._told |= _keys_of_entries(new)
        listed = _keys_of_entries(self._journal.list_entries()[0])
        self._journal.end_report()
        _require_same("the journal", sorted(listed), sorted(self._told))


def _make_manager() -> CacheManager:
    full = FullAttentionSpec(PAGE_SIZE, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
    window = SlidingWindowSpec(PAGE_SIZE, 1, 1, "bfloat16", use_mla=False, sliding_window=4 * PAGE_SIZE)
    return CacheManager(NUM_PAGES, [CacheGroupSpec(full), CacheGroupSpec(window)], MAX_LENGTH, hashing=PageHashing(hash_seed=0))


def _keys_of(keys: Any, groups: Any) -> set[Any]:
    return {(*key, group) for key, group in zip(keys.reshape(-1, 2).tolist(), groups.tolist(), strict=True)}


def _keys_of_entries(entries: Any) -> set[Any]:
    """Return the keys of entries with their groups; a run of pages has one entry."""
    keys, runs, _ = entries
    return _keys_of(keys, np.repeat([run[3] for run in runs], [run[4] for run in runs]).astype(int))


def _require_same(what: str, expected: object, got: object) -> None:
    if got != expected:
        raise IntegrityError(f"{what}: got {got}, allowed: {expected}")

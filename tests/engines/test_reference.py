"""The oracle, and the package, against the engine whose API they keep (easydel 0.3.0), where it is installed.

The same random work as in `test_differential.py`, less what the engine does not know (external tokens,
reserved pages, extra keys, eviction by page id; several types besides full attention, two full groups
alone, interleaved groups, groups of different page sizes; eagle with chunked attention) and less what it
does otherwise than we mean to:

- It hashes a request's tokens once. What is known later is not looked up, and the look-up for a window or a
  chunk reads past the end of the hashes: generated tokens come one at a time and are cached at once, or
  each of them is new to full attention (`BURSTING`); no look-ups of running requests.
- It chains a generated page to the last page before it that the request still holds, to none if all of them
  are null: dropped because a window is no longer than a page, or hits that end with a chunk. So in these
  settings generated tokens are never seen twice, and no request is left unhashed by asking for prompt log
  probabilities.
- It gives the null page a hash when a dropped page is cached late: no delayed caching with windows and
  chunks.
- If a chunk is not a multiple of the page size, a hit may end in a chunk that was not looked up: no such
  chunks.
- An allocation that fails for want of pages in a shard leaves an entry behind, and the next one with hits
  trips over it: the twin frees the request, which drops the entry. With several groups the pages of the
  first ones are lost: shards with one group only.
- It caches the page of a Mamba state when the request is as long as that page: requests are shorter.
- It takes a negative number of tokens, and answers a wrong status with an assertion: no misuse.
- It counts references to its null page: that count is not compared.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from features import run_workload
from oracle import OracleManager
from settings import CHUNK_8, CHUNK_16, FULL_1, FULL_4, SMALL, STATE, WINDOW_3, WINDOW_9, Habits, Setting
from settings import SETTINGS as ALL
from twin_engine import Request
from twins import OracleTwin, PackageTwin, State, Twin, Twins
from workload import RandomWorkload

import pagepool
from pagepool.compat import easydel

reference_manager = pytest.importorskip("easydel.inference.esurge.core.manager")
reference_coordinator = pytest.importorskip("easydel.inference.esurge.core.coordinator")
reference_utils = pytest.importorskip("easydel.inference.esurge.core.utils")
reference_specs = pytest.importorskip("easydel.inference.esurge.core.interface")

NUM_SEEDS = 6
NUM_CALLS = 1500

PLAIN = Habits(**dict.fromkeys((field.name for field in fields(Habits)), False))
CHAINED = replace(PLAIN, prompt_logprobs=True, follow_ups=True, repeated_tokens=True)
BURSTING = replace(PLAIN, prompt_logprobs=True, follow_ups=True, bursts=True, delay_caching=True)
UNSHARED = replace(BURSTING, repeated_tokens=True)

NAMES = {
    "full 4, full eagle, full 2 shards, full uneven shards, window 5, window 9, window 9 eagle": CHAINED,
    "full and window, windows and full, full and window eagle, full and chunk": CHAINED,
    "full 2, full 16, full 4 shards": BURSTING,
    "window 1, window 3, window 1 eagle, chunk 8, chunk 16": PLAIN,
    "full uncached, mamba, full and mamba": UNSHARED,
}
HABITS = {name: habits for names, habits in NAMES.items() for name in names.split(", ")}
SETTINGS = [
    *(replace(setting, habits=HABITS[setting.name]) for setting in ALL if setting.name in HABITS),
    Setting("full 1", (FULL_1,), habits=CHAINED),
    Setting("full 4 bursts", (FULL_4,), habits=BURSTING),
    Setting("window uncached", (WINDOW_9,), enable_caching=False, habits=UNSHARED),
    Setting("chunk 2 shards", (CHUNK_16,), (8, 24), data_parallel_size=2, habits=PLAIN),
    Setting("window 2 shards", (WINDOW_9,), (8, 24), data_parallel_size=2, habits=CHAINED),
    Setting("full and short window", (FULL_4, WINDOW_3), SMALL, habits=PLAIN),
    Setting("chunk and full", (CHUNK_8, FULL_4), SMALL, habits=PLAIN),
    Setting("mamba and full", (STATE, FULL_4), SMALL, habits=UNSHARED),
]
assert len(SETTINGS) == len(HABITS) + 8


class OracleBeside(OracleTwin):
    """The oracle beside the engine, which has no figures of pools."""

    def state(self, request_ids: Iterable[str]) -> State:
        return super().state(request_ids)._replace(pools={})


class PackageBeside(PackageTwin):
    """The package beside the engine."""

    def state(self, request_ids: Iterable[str]) -> State:
        return super().state(request_ids)._replace(pools={})


class ReferenceTwin(Twin):
    """The engine's own manager."""

    def to_page_ids(self, pages: Any) -> tuple[list[int], ...]:
        return pages.get_page_ids()

    def state(self, request_ids: Iterable[str]) -> State:
        pool = self.manager.page_pool
        return State(
            [page.ref_cnt for page in pool.pages[1:]],
            [[page.page_id for page in pool.free_page_queue.get_all_free_pages()]],
            len(pool.cached_page_hash_to_page),
            self.manager.usage,
            {},
            [self.manager.get_page_ids(request_id) for request_id in request_ids],
            {},
            (0, 0, 0),
            {},
            {},
        )

    def allocate(
        self, request: Any, num_new_tokens: int, num_hit_tokens: int | None = None, **options: Any
    ) -> tuple[list[int], ...] | None:
        pages = super().allocate(request, num_new_tokens, num_hit_tokens, **options)
        if pages is None and not any(self.manager.get_page_ids(request.request_id)):
            self.manager.free(request)
        return pages


def reference_twin(setting: Setting, num_pages: int) -> ReferenceTwin:
    groups, options = setting.cache_groups(reference_specs), (setting.max_model_len, setting.enable_caching, setting.use_eagle)
    return ReferenceTwin(reference_manager.CacheManager(num_pages, groups, *options))


def reference_over_our_pool(setting: Setting, num_pages: int) -> Twins:
    """The engine's own manager, coordinator and groups, on a pool of the package that hashes first pages like the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_coordinator, "PagePool", pagepool.PagePool)
        system = reference_twin(setting, num_pages)
    assert type(system.manager.page_pool) is pagepool.PagePool
    twins = Twins(reference_twin(setting, num_pages), system)
    pagepool.hashing.NONE_HASH = reference_utils.none_hash  # made by the last manager
    return twins


class EngineOracle(OracleManager):
    """Returns None for what can never fit, as the engine's manager and the drop-in for it do."""

    def require_fit(self, *_: Any) -> None:
        pass


def oracle_against_reference(setting: Setting, num_pages: int) -> Twins:
    oracle = OracleBeside(setting.manager(EngineOracle, setting.cache_groups(reference_specs), num_pages))
    return Twins(oracle, reference_twin(setting, num_pages))


def package_against_reference(**options: Any) -> Callable[[Setting, int], Twins]:
    def make(setting: Setting, num_pages: int) -> Twins:
        groups = setting.cache_groups(pagepool)
        package = PackageBeside(setting.manager(easydel.CacheManager, groups, num_pages, **options))
        return Twins(reference_twin(setting, num_pages), package)

    return make


@pytest.fixture(autouse=True)
def _own_none_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the package's own hash before first pages at the end."""
    monkeypatch.setattr(pagepool.hashing, "NONE_HASH", pagepool.hashing.NONE_HASH)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep the engine from logging every reset."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("spec", ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"])
def test_the_engines_coordinator_frees_skipped_pages_of_our_pool(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine puts the null page in their places, and frees it with the others."""
    monkeypatch.setattr(reference_coordinator, "PagePool", pagepool.PagePool)
    group = reference_specs.CacheGroupSpec(getattr(reference_specs, spec)(4, 1, 8, "float16", False, 8))
    manager = reference_manager.CacheManager(16, [group], 64)
    request = Request("a", list(range(21)))
    for num_tokens in (20, 1):
        assert manager.allocate_slots(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens
    assert manager.get_page_ids("a")[0][:2] == [0, 0]
    manager.free(request)
    assert manager.page_pool.get_num_free_pages() == 15
    assert manager.page_pool.null_page.ref_cnt == 0
    manager.page_pool.check()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize(
    "make_twins",
    [
        pytest.param(oracle_against_reference, id="oracle"),
        pytest.param(package_against_reference(), id="package"),
        pytest.param(package_against_reference(hash_algo=hash), id="package with builtin hash"),
        pytest.param(reference_over_our_pool, id="engine's manager over the package's pool"),
    ],
)
def test_same_as_reference(make_twins: Callable[[Setting, int], Twins], setting: Setting) -> None:
    for seed in range(NUM_SEEDS):
        run_workload(RandomWorkload, setting, make_twins, zlib.crc32(setting.name.encode()) + seed, NUM_CALLS)

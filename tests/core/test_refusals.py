"""Refused requests: a retry costs next to nothing, and is admitted as soon as a request that is looked up again."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from time import thread_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from admissions import admission
from batch_workload import BatchWorkload
from features import PLAIN
from hybrids import FULL, make_manager
from pairs import run_twins
from settings import NUM_OPERATIONS, SETTINGS, Setting
from workload import RandomWorkload

import pagepool
from pagepool import CacheManager, EngineRequest, PageTable, QueryCounts, RunningBatch
from pagepool.errors import ArgumentError, ArgumentTypeError

NUM_CALLS = max(NUM_OPERATIONS // (20 * len(SETTINGS)), 60)
NUM_SEEDS = max(NUM_OPERATIONS // 100_000, 1)
SOME_SETTINGS = SETTINGS if NUM_OPERATIONS >= 100_000 else SETTINGS[::4]
ids = lambda setting: setting.name  # noqa: E731


class SaturatedRows(BatchWorkload):
    """The pool stays full, and refused requests return again and again, each in its row."""

    def _weighted_actions(self) -> dict[Callable[[], None], float]:
        rare = (self.release, self.swap, self.evict, self.start_neighbour, self.finish_neighbour)
        return {self.retry: 12, self.admit: 2, self.step: 6, self.plan: 2} | dict.fromkeys(rare, 0.4)

    def retry(self) -> None:
        for row in self.refused.keys() & set(self.free_rows()):
            self.try_to_admit(row, *self.refused.pop(row))


class SaturatedRequests(RandomWorkload):
    """The same with a manager, request by request."""

    def _weighted_actions(self) -> dict[Callable[[], None], float]:
        return {self.submit: 2, self.admit: 12, self.grow: 8, self.finish: 0.6, self.evict: 0.4, self.look_up: 0.2}


@pytest.mark.parametrize("setting", SOME_SETTINGS, ids=ids)
def test_rows_are_refused_as_if_they_were_looked_up_anew(setting: Setting) -> None:
    first_seed = zlib.crc32(setting.name.encode())
    for seed in range(first_seed, first_seed + NUM_SEEDS):
        run_twins("rows", setting, PLAIN, seed, NUM_CALLS, SaturatedRows)


@pytest.mark.parametrize("setting", SOME_SETTINGS, ids=ids)
def test_requests_are_refused_as_if_they_were_looked_up_anew(setting: Setting) -> None:
    run_twins("requests", setting, PLAIN, zlib.crc32(setting.name.encode()), 2 * NUM_CALLS, SaturatedRequests)


def test_retries_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tests above prove nothing unless requests are refused, and some of them admitted in the end."""
    found: Counter[str] = Counter()

    is_refused_still, allocate_slots = RunningBatch._is_refused_still, CacheManager.allocate_slots

    def count_rows(*args: Any) -> bool:
        is_refused = is_refused_still(*args)
        found["rows"] += is_refused
        return is_refused

    def count_requests(manager: CacheManager, request: Any, *args: Any, **options: Any) -> Any:
        hashes = manager.registry.hashes.get(request.request_id)
        refusal = hashes and hashes.refusal
        pages = allocate_slots(manager, request, *args, **options)
        found["requests"] += pages is None and refusal is not None and hashes.refusal is refusal  # else a new one is noted
        return pages

    monkeypatch.setattr(RunningBatch, "_is_refused_still", count_rows)
    monkeypatch.setattr(CacheManager, "allocate_slots", count_requests)
    run_twins("rows", SETTINGS[2], PLAIN, 1, 300, SaturatedRows)
    for seed in (3, 4):
        run_twins("requests", SETTINGS[2], PLAIN, seed, 1000, SaturatedRequests)
    assert found["rows"] > 10
    assert found["requests"] > 10


# --- one at a time ------------------------------------------------------------------------------------------


def make_batch(num_pages: int) -> tuple[CacheManager, RunningBatch]:
    manager = make_manager(FULL, num_pages=num_pages, max_model_len=1 << 18)
    return manager, RunningBatch(manager, PageTable(4, 1 << 16, 64))


class Waiting:
    """A pool of 10 pages: five are cached, free and hit by a request of seven pages, row 0 holds four, one is free."""

    def __init__(self) -> None:
        self.manager, self.batch = make_batch(1 + 10)
        self.prompt = list(range(20))
        self.batch.admit(0, self.prompt)
        self.batch.release([0])
        self.batch.admit(0, [99] * 16)
        self.token_ids = self.prompt + list(range(50, 58))
        self.num_looked_up = 0
        original = self.batch._is_refused_still

        def is_refused_still(*args: Any) -> bool:
            is_refused = original(*args)
            self.num_looked_up += not is_refused
            return is_refused

        self.batch._is_refused_still = is_refused_still  # type: ignore[method-assign]
        assert self.retry() is None
        assert self.num_looked_up == 1

    def retry(self, token_ids: Any = None, row: int = 1, **options: Any) -> int | None:
        result = self.batch.admit(row, self.token_ids if token_ids is None else token_ids, **admission(**options))
        self.batch.check()
        return result


class TestRows:
    def test_a_smaller_budget_fits_without_a_change(self) -> None:
        waiting = Waiting()
        assert [waiting.retry() for _ in range(5)] == [None] * 5
        assert waiting.retry(max_num_new_tokens=5) is None
        assert waiting.retry(num_tokens=25) is None
        assert waiting.retry(max_num_new_tokens=4, num_reserved_pages=1) is None
        assert waiting.num_looked_up == 1
        assert waiting.retry(max_num_new_tokens=4) == 20

    def test_a_hit_is_dropped_in_the_middle(self) -> None:
        """With the budget of a step fewer hits need fewer pages."""
        waiting = Waiting()
        assert waiting.retry(max_num_new_tokens=8) is None
        waiting.manager.page_pool.evict_pages([2])
        assert waiting.retry(max_num_new_tokens=8) == 4
        assert waiting.num_looked_up == 2

    @pytest.mark.parametrize("form", [list, np.array])
    def test_tokens_are_another_request_s(self, form: Callable[[list[int]], Any]) -> None:
        waiting = Waiting()
        token_ids = form(waiting.token_ids)
        assert waiting.retry(token_ids) is None
        token_ids[-1] = 5  # a reused list or array
        assert waiting.retry(token_ids) is None
        assert waiting.num_looked_up == 2
        token_ids[0] = 5
        assert waiting.retry(token_ids, num_tokens=4) == 0

    def test_other_tokens_salts_and_features(self) -> None:
        waiting = Waiting()
        assert waiting.retry(waiting.token_ids[:-1]) is None
        assert waiting.retry() is None
        assert waiting.retry(cache_salt="a") is None
        assert waiting.retry(cache_salt="ab"[:1]) is None
        feature = SimpleNamespace(mm_hash="cat", modality="image", placeholder_range=SimpleNamespace(offset=0, length=4))
        for _ in range(3):
            features = (feature,)
            assert waiting.retry(mm_features=features) is None
            assert waiting.retry(mm_features=features) is None
        assert waiting.num_looked_up == 1 + 3 + 3
        assert waiting.retry(look_up=False) is None

    @pytest.mark.parametrize("form", [list, tuple, np.array, lambda ids: np.array(ids, dtype=np.int32)])
    def test_equal_tokens_in_another_object_are_known(self, form: Callable[[list[int]], Any]) -> None:
        waiting = Waiting()
        for _ in range(3):
            assert waiting.retry(form(waiting.token_ids)) is None
            assert waiting.retry() is None
        memory = np.array([*waiting.token_ids, 7, 8], dtype=np.int32)
        assert waiting.retry(memory[: len(waiting.token_ids)]) is None
        assert waiting.num_looked_up == 1
        assert waiting.retry(form([*waiting.token_ids[:5], 77, *waiting.token_ids[6:]]), max_num_new_tokens=20) == 4

    def test_tokens_that_are_iterated_once_are_not_used_up(self) -> None:
        waiting = Waiting()
        for _ in range(2):
            assert waiting.retry(iter(waiting.token_ids)) is None
        assert waiting.num_looked_up == 3

    def test_rows_that_change_places_forget(self) -> None:
        waiting = Waiting()
        waiting.batch.swap_row(1, 2)
        assert waiting.retry() is None
        assert waiting.num_looked_up == 2
        waiting.batch.move_row(0, 1)
        assert waiting.retry(row=0) is None
        with pytest.raises(ArgumentError, match="row 1: got a row that is admitted already"):
            waiting.retry()

    def test_wrong_arguments_are_refused_all_the_same(self) -> None:
        waiting = Waiting()
        for name, value in (("num_tokens", 0), ("num_tokens", 29), ("max_num_new_tokens", 0), ("num_reserved_pages", -1)):
            with pytest.raises(ArgumentError, match="got"):
                waiting.retry(**{name: value})
        assert waiting.retry() is None
        waiting.token_ids[-1] = "a"  # type: ignore[call-overload]
        with pytest.raises(ArgumentTypeError, match="token_ids"):
            waiting.retry()


class TestRequests:
    def test_hits_are_not_looked_up_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = make_manager(FULL, num_pages=1 + 10)
        first, second, third = (
            EngineRequest(name, tokens) for name, tokens in zip("abc", (range(20), [99] * 16, range(28)), strict=True)
        )
        assert manager.allocate_slots(first, 20) is not None
        manager.free(first)
        assert manager.allocate_slots(second, 16) is not None
        hits, num_hit_tokens = manager.get_computed_pages(third)
        assert num_hit_tokens == 20
        assert manager.allocate_slots(third, 8, num_hit_tokens, hits) is None
        monkeypatch.setattr(pagepool.manager, "load_prefix", None)
        for _ in range(3):
            hits, num_hit_tokens = manager.get_computed_pages(third)
            assert manager.allocate_slots(third, 8, num_hit_tokens, hits) is None
        second.num_computed_tokens = 16
        assert manager.allocate_slots(second, 8) is not None  # two pages, one of them the last hit
        monkeypatch.undo()
        hits, num_hit_tokens = manager.get_computed_pages(third)
        assert (hits.get_page_ids(), num_hit_tokens) == (([1, 2, 3, 4],), 16)
        assert manager.allocate_slots(third, 4, num_hit_tokens, hits, num_reserved_pages=1) is None
        manager.free(second)
        hits, num_hit_tokens = manager.get_computed_pages(third)
        assert manager.allocate_slots(third, 12, num_hit_tokens, hits) is not None
        manager.check()
        assert manager.stats().queries == QueryCounts(1, 28, 16)


# --- cost -----------------------------------------------------------------------------------------------------


def time_refusals(num_tokens: int, path: str) -> float:
    """Return the least CPU time of a refused request of that many tokens whose pages but the last are cached and free."""
    manager, batch = make_batch(num_tokens // 4 + 1)
    prompt = np.arange(num_tokens, dtype=np.int32)
    batch.admit(0, prompt[: num_tokens // 2])
    batch.release([0])
    batch.admit(0, [7] * (num_tokens // 2 - 4))
    token_ids = prompt.tolist() if path == "list" else prompt
    request = EngineRequest("a", prompt.tolist() if path == "manager" else [])

    def refuse() -> None:
        if path == "manager":
            hits, num_hit_tokens = manager.get_computed_pages(request)
            assert manager.allocate_slots(request, num_tokens - num_hit_tokens, num_hit_tokens, hits) is None
        else:
            assert batch.admit(1, token_ids) is None

    refuse()
    times = []
    for _ in range(200):
        start = thread_time()
        refuse()
        times.append(thread_time() - start)
    return min(times)


@pytest.mark.parametrize("path", ["array", "list", "manager"])
def test_a_long_request_is_refused_as_fast_as_a_short_one(path: str) -> None:
    assert time_refusals(1 << 17, path) < 4 * time_refusals(1 << 10, path)

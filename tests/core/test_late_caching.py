"""``CacheManager(caches="computed")``: pages are cached once they are computed, and not before."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hybrids import CHUNK, FULL, PROMPT, STATE, WINDOW, count_hits, make_manager, make_request, manager_state, run
from refusing import refused

from pagepool import CacheManager, EngineRequest, PageHash, PageHashWithGroupId
from pagepool.errors import ArgumentError, PageHashError

pytestmark = pytest.mark.usefixtures("drafter")

MODELS = {
    "full": (FULL,),
    "full and window": (FULL, WINDOW),
    "window": (WINDOW,),
    "chunk": (CHUNK,),
    "full and state": (FULL, STATE),
    "full, window and state": (FULL, WINDOW, STATE),
}


def make_late(*specs: Any, **options: Any) -> CacheManager:
    return make_manager(*specs or (FULL,), caches="computed", **options)


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash])
@pytest.mark.parametrize("is_delayed", [False, True])
def test_pages_hit_once_they_are_counted(hash_algo: Any, is_delayed: bool) -> None:
    """Whatever `delay_cache_pages` says."""
    manager, request = make_late(hash_algo=hash_algo), make_request("a", 11)
    seen = []
    for num_new in (6, 3, 2):
        assert manager.allocate_slots(request, num_new, delay_cache_pages=is_delayed) is not None
        seen.append(count_hits(manager))
        request.num_computed_tokens += num_new
    manager.free(request)
    assert (seen, count_hits(manager)) == ([0, 4, 8], 8)
    manager.check()


def test_without_caching_nothing_changes() -> None:
    manager, request = make_late(enable_caching=False), make_request("a", 9)
    for _ in range(9):
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.cache_pages(request, request.num_computed_tokens)
    manager.free(request)
    assert manager.stats().num_cached_pages == 0


@pytest.mark.parametrize("caches", ["late", "", None, 1, True])
def test_other_times_are_refused(caches: Any) -> None:
    with pytest.raises(ArgumentError, match=r"caches: got .*, allowed: scheduled or computed"):
        make_manager(caches=caches)


# A page is cached before it hits: by the request's next call, `cache_pages`, or `free`.


def test_cache_pages_needs_no_next_call() -> None:
    """Nor the number that the request counts itself."""
    manager, request = make_late(), make_request("a", 9)
    manager.allocate_slots(request, 9)
    manager.cache_pages(request, 4)
    assert count_hits(manager) == 4
    request.num_computed_tokens = 9
    manager.cache_pages(request, 9)
    assert count_hits(manager) == 8


def test_a_call_without_room_caches_what_is_computed() -> None:
    manager, request = make_late(num_pages=6), make_request("a", 13)
    run(manager, EngineRequest("other", [1] * 8), 8)
    run(manager, request, 12)
    assert (manager.allocate_slots(request, 1), count_hits(manager)) == (None, 12)


def test_a_window_leaves_only_cached_pages() -> None:
    """Of a prompt that was computed at once, and of tokens before those from elsewhere."""
    manager, request = make_late(WINDOW, windows="all"), make_request("a", 40)
    run(manager, request, 24)
    assert manager.stats().num_cached_pages == 0
    manager.allocate_slots(request, 1)
    assert manager.get_page_ids("a")[0][:5] == [0] * 5
    assert manager.stats().num_cached_pages == 6
    request.num_computed_tokens = 25
    manager.allocate_slots(request, 3)
    request.num_computed_tokens = 28
    manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_pages=True)
    manager.commit_external(request, 8)
    assert manager.stats().num_cached_pages == 8  # the page that no later token attends to did not come
    manager.check()


def test_tokens_from_elsewhere_are_cached_by_the_commit() -> None:
    """Without a delay, too: the call does not cache them."""
    for is_delayed in (False, True):
        manager, request = make_late(), make_request("a", 23)
        manager.allocate_slots(request, 0, num_external_computed_tokens=20, delay_cache_pages=is_delayed)
        assert count_hits(manager) == 0
        manager.commit_external(request, 12)
        assert count_hits(manager) == 12
        request.num_computed_tokens = 12
        manager.free(request)
        assert count_hits(manager) == 12


def test_tokens_from_elsewhere_that_fail_are_not_cached() -> None:
    manager, request = make_late(), make_request("a", 23)
    manager.allocate_slots(request, 0, num_external_computed_tokens=20, delay_cache_pages=True)
    request.num_computed_tokens = manager.fail_external(request, 9)
    assert (request.num_computed_tokens, count_hits(manager)) == (9, 8)
    manager.free(request)
    assert count_hits(manager) == 8


@pytest.mark.parametrize("num_counted", [7, 8])
def test_a_state_is_kept_after_its_step(num_counted: int) -> None:
    """By the next call, or by `free`, and not for tokens that were not counted."""
    for is_freed in (False, True):
        manager, request = make_late(FULL, STATE), make_request("a", 9)
        manager.allocate_slots(request, 8)
        assert count_hits(manager) == 0
        request.num_computed_tokens = num_counted
        if is_freed:
            manager.free(request)
        else:
            manager.allocate_slots(request, 1)
        assert count_hits(manager) == (8 if num_counted == 8 else 0)
        manager.check()


# What was not computed.


@pytest.mark.parametrize("is_told", [False, True])
def test_an_aborted_step_leaves_no_entry(is_told: bool) -> None:
    """Whether or not `free` is told the number of computed tokens."""
    manager, request = make_late(), make_request("a", 20)
    run(manager, request, 6)
    manager.allocate_slots(request, 14)
    assert count_hits(manager) == 4
    manager.free(request, num_computed_tokens=6 if is_told else None)
    assert (count_hits(manager), manager.stats().num_cached_pages) == (4, 1)


@pytest.mark.parametrize(("counted", "told", "num_hits"), [(16, 9, 8), (9, 16, 8), (16, None, 16), (0, 16, 0), (16, 0, 0)])
def test_free_caches_the_least_that_was_computed(counted: int, told: int | None, num_hits: int) -> None:
    """Of what the request counts, and what the caller says."""
    manager, request = make_late(), make_request("a", 17)
    manager.allocate_slots(request, 17)
    request.num_computed_tokens = counted
    manager.free(request, num_computed_tokens=told)
    assert count_hits(manager) == num_hits


def test_more_counted_tokens_than_slots_or_known_ones_are_not_cached() -> None:
    manager, request = make_late(), make_request("a", 6)
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = 40
    manager.free(request)
    assert count_hits(manager) == 4


def test_drafts_are_cached_once_they_are_accepted() -> None:
    manager, request = make_late(), make_request("a", 6)
    run(manager, request, 6)
    manager.allocate_slots(request, 6)  # drafts of which one is accepted
    request.all_token_ids.append(PROMPT[6])
    request.num_computed_tokens = 7
    manager.allocate_slots(request, 5)
    assert (count_hits(manager), manager.stats().num_cached_pages) == (4, 1)
    request.all_token_ids += PROMPT[7:9]
    request.num_computed_tokens = 9
    manager.free(request)
    assert (count_hits(manager), manager.stats().num_cached_pages) == (8, 2)


def test_a_request_that_is_set_back_caches_its_pages_again() -> None:
    """Those that lost their entry, once they are computed again."""
    manager, request = make_late(), make_request("a", 17)
    run(manager, request, 16)
    manager.allocate_slots(request, 1)
    request.num_computed_tokens = 17
    [pages] = manager.get_page_ids("a")
    manager.page_pool.evict_pages(pages[2:4])
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 4)
    assert count_hits(manager) == 8
    request.num_computed_tokens = 12
    manager.allocate_slots(request, 4)
    assert count_hits(manager) == 12
    request.num_computed_tokens = 16
    manager.free(request)
    assert count_hits(manager) == 16


@pytest.mark.parts_at_a_page
@pytest.mark.parametrize("num_computed", [0, 4])
@pytest.mark.parametrize("num_known", [8, 6])
def test_cached_pages_are_not_overwritten(num_computed: int, num_known: int) -> None:
    """A request that is set back computes the same tokens, or is refused, at its start too."""
    manager, request = make_late(), make_request("a", 8)
    run(manager, request, 8)
    manager.cache_pages(request, 8)
    request.num_computed_tokens = num_computed
    request.all_token_ids[5] = 1
    del request.all_token_ids[num_known:]
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already"):
        manager.allocate_slots(request, 6 - num_computed)
    manager.free(request, num_computed_tokens=num_computed)
    assert count_hits(manager) == num_computed


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash])
@pytest.mark.parametrize("end", ["allocate", "free", "cache", "delayed"])
def test_tokens_replaced_before_their_page_is_cached_are_hashed_again(end: str, hash_algo: Any) -> None:
    """The look-up had hashed the ones before."""
    is_delayed = end == "delayed"
    manager = make_manager(FULL, caches="scheduled" if is_delayed else "computed", hash_algo=hash_algo)
    request = make_request("a", 9)
    first = list(request.all_token_ids)
    hits, _ = manager.get_computed_pages(request)
    manager.allocate_slots(request, 9, 0, hits, delay_cache_pages=is_delayed)
    request.num_computed_tokens = 9
    request.num_computed_tokens = 5
    request.all_token_ids[6] += 1
    second = list(request.all_token_ids)
    manager.allocate_slots(request, 4, delay_cache_pages=is_delayed)
    request.num_computed_tokens = 9
    if end == "allocate":
        request.append_output_token_ids(1)
        manager.allocate_slots(request, 1)
    elif end == "free":
        manager.free(request)
    else:
        manager.cache_pages(request, 9)
    assert [manager.probe(EngineRequest("b", tokens)).num_hit_tokens for tokens in (first, second)] == [4, 8]
    manager.check()


def test_an_entry_made_by_hand_is_refused_by_a_call_and_kept_by_free() -> None:
    manager, request = make_late(), make_request("a", 9)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    by_hand = PageHashWithGroupId(PageHash(7, ()), 0)
    manager.page_pool.pages[1].page_hash = by_hand
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already"):
        manager.allocate_slots(request, 1)
    manager.free(request)
    assert (manager.page_pool.pages[1].page_hash, manager.stats().num_cached_pages) == (by_hand, 1)
    assert manager.get_page_ids("a") == ([],)
    manager.check()


def test_a_page_given_back_by_others_leaves_all_as_it_was() -> None:
    """`free` caches nothing before it fails."""
    manager, request = make_late(), make_request("a", 9)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    manager.page_pool.free_page_ids([1])
    before = manager.stats()
    with pytest.raises(Exception, match="got more frees than references, allowed: one for each"):
        manager.free(request)
    assert manager.stats() == before


# Forks, and other requests of the pool.


def test_forks_cache_the_pages_that_they_share() -> None:
    """Once, whichever comes first."""
    manager, request = make_late(), make_request("a", 10)
    run(manager, request, 10)
    forked = make_request("b", 10)
    forked.num_computed_tokens = 10
    assert manager.fork(request, forked) is not None
    manager.take_moves()
    assert count_hits(manager) == 0
    forked.all_token_ids += [1, 2, 3]
    for child in (forked, request):
        manager.allocate_slots(child, 1)
        assert (count_hits(manager), manager.stats().num_cached_pages) == (8, 2)
    forked.num_computed_tokens = 13
    manager.free(forked)
    manager.free(request)
    assert manager.stats().num_cached_pages == 3
    manager.check()


# Against caching by the call that gives slots.


class Engine:
    """Chunks of prompts, preemption of the newest, and tokens that depend on all before. One new request a step."""

    def __init__(self, manager: CacheManager, budget: int, num_new_tokens: int) -> None:
        self.manager, self.budget, self.num_new_tokens = manager, budget, num_new_tokens
        self.waiting: deque[EngineRequest] = deque()
        self.nums_tokens: dict[str, int] = {}  # at the end
        self.running: list[EngineRequest] = []
        self.hits: list[int] = []
        self.answers: dict[str, list[int]] = {}
        self.num_preempted = 0

    def add(self, request: EngineRequest) -> None:
        self.waiting.append(request)
        self.nums_tokens[request.request_id] = request.num_tokens + self.num_new_tokens

    def preempt(self) -> None:
        request = self.running.pop()
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def step(self) -> None:
        budget, scheduled = self.budget, []
        for request in self.running.copy():
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            num_new = min(num_new, self.manager.find_next_checkpoint(request) - request.num_computed_tokens)
            while request in self.running and self.manager.allocate_slots(request, max(1, num_new)) is None:
                self.preempt()
            if request in self.running:
                scheduled.append((request, num_new))
                budget -= num_new
        if self.waiting and budget > 1 and all(not self._is_prefilling(request) for request in self.running):
            request = self.waiting[0]
            hits, num_hits = self.manager.get_computed_pages(request)
            request.num_computed_tokens = num_hits
            num_new = min(request.num_tokens, self.manager.find_next_checkpoint(request), num_hits + budget) - num_hits
            request.num_computed_tokens = 0
            if self.manager.allocate_slots(request, num_new, num_hits, hits) is not None:
                request.num_computed_tokens = num_hits
                self.hits.append(num_hits)
                self.running.append(self.waiting.popleft())
                scheduled.append((request, num_new))
        self.manager.take_moves()
        for request, num_new in scheduled:
            if request not in self.running:
                continue
            request.num_computed_tokens += num_new
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(sum(i * token for i, token in enumerate(request.all_token_ids, 1)) % 97)
            if request.num_tokens == self.nums_tokens[request.request_id]:
                self.running.remove(request)
                self.answers[request.request_id] = list(request.all_token_ids)
                self.manager.free(request)
                self.manager.free_page_hashes(request)

    @staticmethod
    def _is_prefilling(request: EngineRequest) -> bool:
        return request.num_tokens - request.num_computed_tokens > 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_and_hits_where_no_equal_prompts_share_a_step(model: str, seed: int) -> None:
    """With pages for all, and with preemptions."""
    rng = Random(f"{model} {seed}")
    heads = [[rng.randrange(5) for _ in range(24)] for _ in range(3)]
    prompts = [
        rng.choice(heads)[: rng.choice((0, 7, 16, 24))] + [rng.randrange(5) for _ in range(rng.randint(1, 12))]
        for _ in range(14)
    ]
    engines = []
    for caches in ("scheduled", "computed"):
        manager = make_manager(*MODELS[model], num_pages=(25, 120)[seed % 2], caches=caches)
        manager._store.prefer_held()  # of pages that were computed twice, since their state was not kept, both hit the same
        engine = Engine(manager, 64, 20)
        for i, prompt in enumerate(prompts):
            engine.add(EngineRequest(f"{i}", list(prompt)))
        for _ in range(2000):
            if engine.waiting or engine.running:
                engine.step()
        assert not engine.waiting
        manager.check()
        engines.append(engine)
    first, second = engines
    assert second.answers == first.answers
    assert second.hits == first.hits
    assert any(first.hits)
    assert first.num_preempted == second.num_preempted
    assert first.manager.stats().num_cached_pages == second.manager.stats().num_cached_pages

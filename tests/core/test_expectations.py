"""When pages are wanted, leases of spans, and sessions: exact cases, laws, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import hybrids
import pytest
from clocked import PAGE_SIZE, Clocked
from hybrids import FULL, manager_state
from managing import grouped
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    MultiGroupPageTable,
    PageTable,
    Retention,
    RunningBatch,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, LeaseBudgetError


class Pages(Clocked):
    """Requests of one full page each, and a page for the next token."""

    def __init__(self, num_pages: int = 7, **options: Any) -> None:
        super().__init__(num_pages, **options)

    def request(self, name: str, session_id: str | None = None) -> EngineRequest:
        tokens = [ord(name) + i for i in range(PAGE_SIZE)]
        return EngineRequest(name, [*tokens, 0], session_id=session_id)

    def hold(self, name: str, session_id: str | None = None) -> EngineRequest:
        """Start a request, with what it hits."""
        request = self.request(name, session_id)
        hits, num_hit_tokens = self.manager.get_computed_pages(request)
        assert self.manager.allocate_slots(request, PAGE_SIZE + 1 - num_hit_tokens, num_hit_tokens, hits) is not None
        return request

    def leave(self, name: str, session_id: str | None = None, **options: Any) -> None:
        """Compute a request, or use its page again, and free it."""
        self.manager.free(self.hold(name, session_id), **options)

    def list_evicted(self, names: str) -> str:
        """List the names of requests in the order in which their pages are evicted."""
        pool, left = self.manager.page_pool, names
        evicted = ""
        while left:
            pool.get_new_page_ids(1)
            gone = [name for name in left if not self.manager.probe(self.request(name)).num_hit_tokens]
            evicted += "".join(gone)
            left = "".join(name for name in left if name not in gone)
        return evicted


@pytest.fixture(params=["lru", "adaptive"])
def pages(request: pytest.FixtureRequest) -> Iterator[Pages]:
    pages = Pages(eviction=request.param)
    yield pages
    pages.manager.check()


@pytest.mark.parametrize(("seconds", "order"), [(3, "ab"), (10, "ba")])
def test_what_is_late_counts_as_wanted_in_twice_its_idle_time(seconds: float, order: str, pages: Pages) -> None:
    pages.leave("a", seconds=1)
    pages.wait(5)
    pages.leave("b", seconds=seconds)
    assert pages.list_evicted("ab") == order


def test_the_next_use_ends_it(pages: Pages) -> None:
    for name in "abc":
        pages.leave(name, seconds=600)
    pages.wait(1)
    pages.leave("a")
    assert pages.manager.stats().expectations == (0, 0, 2, 1, 0, 0)
    pages.wait(2000)
    pages.leave("b", seconds=math.inf)
    assert pages.manager.stats().expectations == (1, 0, 1, 1, 1, 0)


@pytest.mark.parametrize("seconds", [1, math.inf])
def test_blank_pages_go_first(seconds: float) -> None:
    pages = Pages()
    [page_id] = pages.manager.page_pool.get_new_page_ids(1)
    pages.leave("a", seconds=seconds)
    pages.manager.page_pool.free_page_ids([page_id])
    assert pages.manager.page_pool.free_page_ids_in_order()[-1] != page_id
    assert page_id in pages.manager.page_pool.get_new_page_ids(5)
    assert pages.manager.probe(pages.request("a")).num_hit_tokens


# Sessions.


def test_what_others_use_is_not_closed(pages: Pages) -> None:
    pages.leave("a", "s")
    pages.leave("a", "t")
    pages.leave("b", "s", seconds=600)
    assert pages.manager.close_session("s") == 1
    assert pages.list_evicted("ab") == "ba"


def test_a_fork_is_of_the_session_unless_it_has_its_own() -> None:
    for session_id, num_pages in ((None, 1), ("t", 0)):
        pages = Pages()
        request = pages.hold("a", "s")
        request.num_computed_tokens = PAGE_SIZE
        fork = EngineRequest("fork", [*request.all_token_ids], num_computed_tokens=PAGE_SIZE, session_id=session_id)
        assert pages.manager.fork(request, fork) is not None
        pages.manager.free(request)
        pages.manager.free(fork)
        assert pages.manager.close_session("s") == num_pages
        pages.manager.check()


def test_sessions_are_forgotten() -> None:
    pages = Pages()
    for i in range(2000):
        pages.leave("abcdefghij"[i % 10], f"session {i}")
        assert pages.manager.stats().num_sessions <= 6
    pages.manager.page_pool.reset_prefix_cache()
    assert pages.manager.stats().num_sessions == 0
    assert len(pages.manager.page_pool.store.free_ids()) == 6
    pages.manager.check()


# Leases of spans.


def test_a_lease_is_extended() -> None:
    pages = Pages()
    pages.leave("a")
    lease = pages.manager.lease(pages.request("a"), seconds=10)
    pages.wait(9)
    lease.extend(10)
    pages.wait(9)
    assert lease.is_held
    pages.wait(2)
    with pytest.raises(ArgumentError, match=r"^lease: got one that has ended, or was made without seconds, allowed: others$"):
        lease.extend(10)
    lease.release()
    with pages.manager.lease([1]) as other, pytest.raises(ArgumentError, match="made without seconds"):
        other.extend(10)
    assert pages.manager.leases == ()


def test_two_leases_of_a_page_count_twice() -> None:
    pages = Pages(12)
    pages.leave("a")
    leases = [pages.manager.lease(pages.request("a"), seconds=10) for _ in range(2)]
    with refused(lambda: manager_state(pages.manager), LeaseBudgetError, "got 1 more, 2 are leased, allowed: 2 in all"):
        pages.manager.lease(pages.request("a"), seconds=10)
    leases[0].release()
    pages.manager.lease(pages.request("a"), seconds=10)
    pages.manager.check()


WINDOW = replace(hybrids.WINDOW, sliding_window=9)


def lease_after(lost: Sequence[int], is_row: bool, *specs: Any, stop: int | None, start: int = 0, **options: Any) -> Any:
    """Compute three pages and a token in each group, drop those at these places of the first group, and lease a span. Returns
    the places of the leased pages.
    """
    manager = CacheManager(
        64, [CacheGroupSpec(spec) for spec in specs], 64, **grouped(retention=Retention(max_leased_share=1.0), **options)
    )
    batch = RunningBatch(manager, MultiGroupPageTable(1, 64, 64, [4] * len(specs)))
    request = EngineRequest("a", list(range(13)))
    if is_row:
        batch.admit(0, request.all_token_ids)
        pages = batch.get_page_ids(0)
    else:
        allocated = manager.allocate_slots(request, 13)
        assert allocated is not None
        pages = allocated.get_page_ids()
        manager.free(request)
    manager.page_pool.evict_pages([pages[0][place] for place in lost])
    before = manager_state(manager)
    try:
        lease = batch.lease(0, start, stop, seconds=9) if is_row else manager.lease(request, start, stop, seconds=9)
    except ArgumentError as error:
        assert manager_state(manager) == before
        assert manager.leases == ()
        return str(error)
    manager.check()
    return [[i for i, page in enumerate(group) if page in lease.page_ids] for group in pages]


@pytest.mark.parametrize("is_row", [False, True])
@pytest.mark.parametrize("windows", ["ends", "all"])
def test_a_span_with_a_gone_page_is_not_leased(windows: str, is_row: bool) -> None:
    for lost, allowed in (([0], 0), ([1], 4), ([2], 8), ([0, 1, 2], 0), ([1, 2], 4)):
        text = f"stop: got 12, where the page at token {allowed} is not cached, allowed: at most {allowed}"
        assert lease_after(lost, is_row, FULL, stop=12) == text
        assert lease_after(lost, is_row, FULL, WINDOW, stop=13, windows=windows) == text.replace("12", "13")
    assert lease_after([0], is_row, FULL, start=3, stop=12) == [[1, 2]]
    assert lease_after([2], is_row, FULL, stop=11) == lease_after([2], is_row, FULL, stop=None) == [[0, 1]]
    assert (
        lease_after([1], is_row, FULL, stop=None) == "stop: got the end, where the page at token 4 is gone, allowed: at most 4"
    )
    assert "no page is cached" in lease_after([0, 1, 2], is_row, FULL, stop=None)
    assert "no page is cached" in lease_after([], is_row, FULL, stop=3)
    assert "no page is cached" in lease_after([], is_row, FULL, start=12, stop=13)
    assert "no page is cached" in lease_after([0, 1, 2], is_row, WINDOW, stop=None, windows=windows)
    for lost in ([1], [2], [0, 1, 2]):
        assert "resume_at=[12]" in lease_after(lost, is_row, WINDOW, FULL, stop=12, windows=windows)
    assert lease_after([], is_row, FULL, WINDOW, stop=12, windows=windows) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("specs", "num_hit_tokens", "needed"),
    [((WINDOW,), 20, [3, 4, 5]), ((replace(WINDOW, sliding_window=5), FULL), 16, [3, 4]), ((FULL, WINDOW), 16, [2, 3, 4])],
)
@pytest.mark.parametrize("windows", ["ends", "all"])
def test_with_eagle_a_span_is_leased_if_requests_hit_all_that_they_can(
    windows: str, specs: Sequence[Any], num_hit_tokens: int, needed: Sequence[int]
) -> None:
    window = next(g for g, spec in enumerate(specs) if isinstance(spec, type(WINDOW)))
    for lost in range(6):
        options = {"windows": windows, "retention": Retention(max_leased_share=1.0)}
        manager = CacheManager(64, [CacheGroupSpec(spec) for spec in specs], 64, **grouped(use_eagle=True, **options))
        request, longer = EngineRequest("a", list(range(24))), EngineRequest("b", list(range(30)))
        allocated = manager.allocate_slots(request, 24)
        assert allocated is not None
        manager.free(request)
        manager.page_pool.evict_pages([allocated.get_page_ids()[window][lost]])
        assert (manager.probe(longer).num_hit_tokens == num_hit_tokens) == (lost not in needed)
        if lost not in needed:
            manager.lease(request, stop=24, seconds=9)
        else:
            with refused(lambda m=manager: manager_state(m), ArgumentError, r"got 24, .* gone, .* resume_at=\[24\]"):
                manager.lease(request, stop=24, seconds=9)


def test_without_caching_no_span_is_leased() -> None:
    assert "no page is cached" in lease_after([], True, FULL, stop=12, enable_caching=False)


def test_ended_leases_are_forgotten() -> None:
    pages = Pages()
    pages.leave("a")
    for _ in range(100):
        pages.manager.lease(pages.request("a"), seconds=1)
        pages.wait(1)
    assert pages.manager.leases == ()


@pytest.mark.parametrize("seconds", [-1, math.nan, -math.inf, True, "1", [1]])
def test_what_is_no_time(seconds: Any) -> None:
    pages = Pages()
    request = pages.hold("a", "s")
    batch = RunningBatch(pages.manager, PageTable(2, 16, 64))
    batch.admit(0, [1, 2])
    calls = (
        lambda: pages.manager.expect(request, seconds=seconds),
        lambda: pages.manager.expect_session("s", seconds=seconds),
        lambda: pages.manager.free(request, seconds=seconds),
        lambda: pages.manager.free(pages.request("z"), seconds=seconds),
        lambda: pages.manager.lease(request, seconds=seconds),
        lambda: batch.expect(0, seconds=seconds),
        lambda: batch.release([0], seconds=[seconds]),
    )
    for call in calls:
        with refused(lambda: manager_state(pages.manager), (ArgumentError, ArgumentTypeError), "seconds: got"):
            call()

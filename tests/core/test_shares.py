"""Shares of tenants: whose pages are evicted, to whom they are charged, and what is refused."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from clocked import PAGE_SIZE, Clocked

from pagepool import EngineRequest, PageTable, RequestTraits, RunningBatch


class Tenants(Clocked):
    """Requests of one full page each, by letter."""

    def __init__(self, num_pages: int = 11, **options: Any) -> None:
        super().__init__(num_pages, **options)

    def request(self, name: str, **options: Any) -> EngineRequest:
        return EngineRequest(name, [ord(name)] * PAGE_SIZE, **options)

    def run(self, names: str, tenant: str | None = None, seconds: float | None = None, **options: Any) -> None:
        """Run requests one after another, each a second later."""
        for name in names:
            request = self.request(name, tenant=tenant, **options)
            _, num_hit_tokens = self.manager.get_computed_pages(EngineRequest("look-up", [*request.all_token_ids, 0]))
            if num_hit_tokens:
                request.all_token_ids.append(0)
            hits, num_hit_tokens = self.manager.get_computed_pages(request)
            num_new = request.num_tokens - num_hit_tokens
            assert self.manager.allocate_slots(request, num_new, num_hit_tokens, hits) is not None
            self.manager.free(request, seconds=seconds)
            self.wait()
        self.manager.check()

    def cached(self, names: str) -> str:
        """Return the requests whose pages are cached."""
        return "".join(name for name in names if self.manager.probe(self._longer(name)).num_hit_tokens)

    def _longer(self, name: str) -> EngineRequest:
        return EngineRequest(name, [ord(name)] * PAGE_SIZE + [0])

    @property
    def charged(self) -> dict[str, int]:
        return dict(self.manager.stats().num_pages_by_tenant)


@pytest.fixture(params=["lru", "adaptive"])
def tenants(request: pytest.FixtureRequest) -> Tenants:
    return Tenants(eviction=request.param)


def test_a_tenant_keeps_its_share(tenants: Tenants) -> None:
    tenants.manager.set_shares({"chat": 0.3})
    tenants.run("abc", "chat")
    tenants.run("ABCDEFGHIJKLM", "flood")
    assert tenants.cached("abcABCDEFGHIJKLM") == "abcGHIJKLM"
    assert tenants.charged == {"chat": 3}


def test_room_that_is_left_serves_all(tenants: Tenants) -> None:
    """No request is refused for a share."""
    tenants.manager.set_shares({"chat": 0.9, "flood": 0.01})
    tenants.run("ABCDEFGHIJ", "flood")
    assert tenants.charged == {"chat": 0, "flood": 10}
    assert (
        tenants.manager.allocate_slots(EngineRequest("long", [1] * 10 * PAGE_SIZE, tenant="flood"), 10 * PAGE_SIZE) is not None
    )


def test_of_tenants_above_their_share_the_oldest_page_goes(tenants: Tenants) -> None:
    tenants.manager.set_shares({"x": 0.2, "y": 0.2})
    tenants.run("ab", "x")
    tenants.run("cde", "y")
    tenants.run("fgh", "x")
    tenants.run("ij")
    tenants.run("A")
    assert tenants.cached("abcdefghij") == "bcdefghij"
    tenants.run("BC")
    assert tenants.cached("abcdefghij") == "defghij"


def test_what_nobody_wants_goes_before_older_pages(tenants: Tenants) -> None:
    tenants.manager.set_shares({"x": 0.2, "y": 0.2})
    tenants.run("abcd", "x")
    tenants.run("efgh", "y", seconds=math.inf)
    tenants.run("ij")
    tenants.run("AB", "x")
    assert tenants.cached("abcdefghij") == "abcdghij"


def test_in_a_tenant_what_returns_last_goes_first(tenants: Tenants) -> None:
    tenants.manager.set_shares({"x": 0.5})
    tenants.run("abc", "x", seconds=3)
    tenants.run("def", "x", seconds=600)
    tenants.run("ghij", "x", seconds=3)
    tenants.run("A", "x")
    assert tenants.cached("abcdefghij") == "abcefghij"


def test_a_page_of_two_tenants_is_common(tenants: Tenants) -> None:
    """So the flood cannot take it over, nor is its first user charged. A use by a lease is none."""
    tenants.manager.set_shares({"x": 0.3, "y": 0.3})
    tenants.run("abc", "x")
    with tenants.manager.lease(tenants._longer("a"), seconds=5):
        assert tenants.charged == {"x": 3, "y": 0}
    tenants.run("a", "y")
    assert tenants.charged == {"x": 2, "y": 0}
    tenants.run("a", "x")
    assert tenants.manager.page_pool.evict_pages([1]) == 1
    assert tenants.charged["x"] == 2


@pytest.mark.parametrize("shares", [None, {"x": 0.3, "y": 0.2}])
def test_the_requests_of_all_tenants_with_an_id_are_a_session(shares: dict[str, float] | None, tenants: Tenants) -> None:
    """So a page that several of them use stays its own, though it is charged to no tenant."""
    if shares:
        tenants.manager.set_shares(shares)
    for names, tenant in (("ab", "x"), ("c", None), ("ad", "y"), ("b", "z")):
        tenants.run(names, tenant, session_id="s")
    assert tenants.manager.stats().num_sessions == 1
    assert tenants.charged == ({"x": 0, "y": 1} if shares else {})
    assert [tenants.manager.close_session("s") for _ in range(2)] == [4, 0]
    tenants.run("e", "x")
    assert tenants.manager.stats().num_sessions == 0


@pytest.mark.parametrize("session_id", [None, "s"])
@pytest.mark.parametrize("is_row", [False, True])
def test_a_tenant_is_charged_for_what_it_takes_while_it_has_a_share(is_row: bool, session_id: str | None) -> None:
    """What was taken before stays common."""
    tenants = Tenants(20)
    batch = RunningBatch(tenants.manager, PageTable(1, 16, 64))
    request = EngineRequest("a", list(range(9 * PAGE_SIZE)), tenant="t", session_id=session_id)
    found = []

    def grow(num_pages: int) -> None:
        num_tokens = num_pages * PAGE_SIZE
        if not is_row:
            assert tenants.manager.allocate_slots(request, num_tokens) is not None
            request.num_computed_tokens += num_tokens
        elif not batch.is_admitted[0]:
            batch.admit(
                0, request.all_token_ids, num_tokens=num_tokens, traits=RequestTraits(tenant="t", session_id=session_id)
            )
        else:
            batch.plan([0], num_tokens)
        found.append(tenants.charged.get("t"))

    grow(1)
    for shares in ({"t": 0.3}, {"t": 0.4, "u": 0.1}, {"u": 0.1}, {"u": 0.1, "t": 0.2}):
        tenants.manager.set_shares(shares)
        found.append(tenants.charged.get("t"))
        grow(2 if shares == {"t": 0.3} else 1)
        tenants.manager.check()
    assert found == [None, 0, 2, 2, 3, None, None, 0, 1]
    (batch.release([0]) if is_row else tenants.manager.free(request))
    assert tenants.charged == {"u": 0, "t": 1}
    tenants.manager.check()


def test_a_tenant_without_a_session_is_no_session(tenants: Tenants) -> None:
    tenants.manager.set_shares({"x": 0.3})
    tenants.run("a", "x")
    assert tenants.manager.stats().num_sessions == 0
    tenants.run("ab", "x", session_id="s")
    assert tenants.manager.close_session("s") == 1


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_one_tenant_with_nearly_all_is_as_without_shares(eviction: str) -> None:
    """Page for page. All pages are cached, as blank ones go first with shares."""
    rng, plain, shared = Random(3), Tenants(40, eviction=eviction), Tenants(40, eviction=eviction)
    shared.manager.set_shares({"x": 0.95})
    for _ in range(1500):
        name, wait, used = chr(rng.choice(range(60, 140))), rng.choice((0.0, 1.0, 9.0)), []
        for tenants in (plain, shared):
            used.append(tenants.use_page(name, [ord(name)] * PAGE_SIZE, tenant="x"))
            tenants.wait(wait)
        assert used[0] == used[1]
    shared.manager.check()


def test_pages_of_a_tenant_without_a_share_any_more_are_common_as_old_as_they_were() -> None:
    tenants = Tenants()
    tenants.manager.set_shares({"x": 0.3, "y": 0.3})
    for name, tenant in zip("abcdefghij", ["x", None, "y", "x", None] * 2, strict=True):
        tenants.run(name, tenant)
    tenants.manager.set_shares({"y": 0.3, "z": 0.6})
    assert tenants.charged == {"y": 2, "z": 0}
    tenants.run("ABCD", "z")
    assert tenants.cached("abcdefghij") == "cfghij"  # c, of y, is within its share
    tenants.manager.set_shares({})
    assert tenants.charged == {}
    tenants.run("EF")
    assert tenants.cached("abcdefghij") == "ghij"


def test_rows_and_their_forks_are_charged() -> None:
    tenants = Tenants(20)
    batch = RunningBatch(tenants.manager, PageTable(4, 16, 64))
    tenants.manager.set_shares({"x": 0.3, "y": 0.3})
    batch.admit(0, list(range(PAGE_SIZE + 1)), traits=RequestTraits(tenant="x"))
    batch.fork(0, [1])
    batch.take_moves()
    assert tenants.charged == {"x": 3, "y": 0}
    tenants.manager.set_shares({"y": 0.3})
    batch.append([0] * PAGE_SIZE, [7] * PAGE_SIZE)
    batch.plan([0], PAGE_SIZE)
    assert tenants.charged == {"y": 0}
    tenants.manager.set_shares({"x": 0.1})
    batch.append([0] * PAGE_SIZE, [7] * PAGE_SIZE)
    batch.plan([0], PAGE_SIZE)
    assert tenants.charged == {"x": 1}
    batch.release([0, 1])
    tenants.manager.check()


def test_a_shard_gives_its_own_pages() -> None:
    tenants = Tenants(20)
    tenants.manager.set_shares({"x": 0.2})
    for i in range(40):
        request = tenants.request(chr(60 + i), tenant=("x", None)[i % 3 == 0])
        pages = tenants.manager.allocate_slots(request, PAGE_SIZE, dp_shard_hint=i % 2, data_parallel_size=2)
        assert pages.get_page_ids()[0][0] // 10 == i % 2
        tenants.manager.free(request)
        tenants.wait()
        tenants.manager.check()
    assert tenants.charged["x"] > 4


def test_a_tenant_far_above_its_share_gives_no_page_of_another_shard() -> None:
    tenants = Tenants(20)
    tenants.manager.set_shares({"x": 0.01})
    for i in range(30):
        request = tenants.request(chr(60 + i), tenant="x" if i < 9 else None)
        pages = tenants.manager.allocate_slots(request, PAGE_SIZE, dp_shard_hint=int(i >= 9), data_parallel_size=2)
        assert (pages.get_page_ids()[0][0] < 10) == (i < 9)
        tenants.manager.free(request)
        tenants.wait()
        tenants.manager.check()
    assert tenants.charged == {"x": 9}


def test_without_caching_shares_change_nothing() -> None:
    tenants = Tenants(enable_caching=False)
    tenants.manager.set_shares({"x": 0.3})
    tenants.manager.allocate_slots(tenants.request("a", tenant="x"), PAGE_SIZE)
    assert tenants.charged == {"x": 0}


MANY = {f"tenant {i}": 0.01 for i in range(63)}


def test_63_tenants_have_shares(tenants: Tenants) -> None:
    tenants.manager.set_shares(MANY)
    for i, name in enumerate(MANY):
        tenants.run(chr(300 + i), name)
    assert sum(tenants.charged.values()) == 10
    tenants.manager.set_shares(dict.fromkeys(f"other {i}" for i in range(19)) | {f"other {i}": 0.05 for i in range(19)})

"""Shares of tenants: whose pages are evicted, to whom they are charged, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from clocked import PAGE_SIZE, Clocked

from pagepool import EngineRequest


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


MANY = {f"tenant {i}": 0.01 for i in range(63)}


def test_63_tenants_have_shares(tenants: Tenants) -> None:
    tenants.manager.set_shares(MANY)
    for i, name in enumerate(MANY):
        tenants.run(chr(300 + i), name)
    assert sum(tenants.charged.values()) == 10
    tenants.manager.set_shares(dict.fromkeys(f"other {i}" for i in range(19)) | {f"other {i}": 0.05 for i in range(19)})

"""A host tier behind several pools: ids of each pool's pages, all or none over pools, what is short, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import hybrids
import pytest
from admissions import admission

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    HostTier,
    Moves,
    MultiGroupPageTable,
    PageHash,
    PageHashWithGroupId,
    PoolStats,
    RunningBatch,
)
from pagepool._core import PageStore, PageTier, add_tier
from pagepool.errors import ArgumentError, IntegrityError

FULL, STATE = CacheGroupSpec(hybrids.FULL), CacheGroupSpec(hybrids.STATE, pool="states")
TOKENS = list(range(20))
ROOMY = {"kv": 40, "states": 12}


class Hybrid:
    """A batch over pools with a tier, whose transfers end at once unless a test takes them."""

    def __init__(self, num_pages: dict[str, int], host: Any = ROOMY, num_rows: int = 2, **options: Any) -> None:
        self.manager = CacheManager(num_pages, [FULL, STATE], 64, host_tier=HostTier(host, **options))
        tables = MultiGroupPageTable(num_rows, 64, 64, [4, 4])
        self.batch = RunningBatch(self.manager, tables)

    def complete(self) -> Moves:
        moves = self.batch.take_moves()
        if moves.number:
            self.manager.complete(moves.number)
        return moves

    def admit(self, row: int, token_ids: list[int], **options: Any) -> int | None:
        return self.batch.admit(row, token_ids, **admission(**options))

    def compute(self, row: int, token_ids: list[int]) -> None:
        """Compute a prompt in chunks of 8 tokens."""
        num_computed = 8 * (len(token_ids) // 8)
        assert self.admit(row, token_ids, num_tokens=8) == 0
        self.complete()
        while (num := num_computed - int(self.batch.num_computed_tokens[row])) > 0:
            assert self.batch.plan([row], min(8, num)).num_grown == 1
            self.complete()
        self.batch.plan([row], len(token_ids) - num_computed)
        self.complete()

    def pass_through(self, first: int) -> None:
        """Compute a prompt of 20 tokens, and end it: five full pages, and checkpoints after 8 and 16 tokens."""
        self.compute(0, list(range(first, first + 20)))
        self.batch.release([0])

    def take_all(self, name: str) -> list[int]:
        """Take all free pages of a pool, so that they are evicted, and saved."""
        pool = self.manager.pools[name]
        page_ids = pool.get_new_page_ids(pool.get_num_free_pages())
        self.complete()
        return page_ids

    def evict(self) -> None:
        """Let both pools evict all, and save it."""
        for name in ("kv", "states"):
            self.manager.pools[name].free_page_ids(self.take_all(name))


def filled(num_pages: dict[str, int], host: Any = ROOMY, **options: Any) -> Hybrid:
    """Return a hybrid whose tier has the prompt of `TOKENS`, and whose pools have nothing of it."""
    hybrid = Hybrid(num_pages, host, **options)
    hybrid.pass_through(0)
    hybrid.evict()
    return hybrid


def test_transfers_name_ids_of_the_pool_of_their_group() -> None:
    hybrid = Hybrid({"kv": 16, "states": 6}, {"states": 5, "kv": 40})
    hybrid.pass_through(0)
    manager, kv, states = hybrid.manager, *hybrid.manager.pools.values()
    kv.get_new_page_ids(15)
    states.get_new_page_ids(5)
    saves = hybrid.batch.take_moves()
    assert (saves.saves.src.tolist(), saves.saves.group.tolist()) == ([5, 4, 3, 2, 1, 2, 3], [0] * 5 + [1, 1])
    assert saves.saves.dst.tolist() == [1, 2, 3, 4, 5, 1, 2]
    [in_flight] = manager.list_moves_in_flight()
    assert (in_flight.saves.src.tolist(), in_flight.saves.dst.tolist()) == (saves.saves.src.tolist(), saves.saves.dst.tolist())
    manager.check()
    manager.complete(saves.number)
    kv.free_page_ids(range(1, 16))
    states.free_page_ids([1, 4, 5])
    assert hybrid.admit(0, TOKENS) == 16
    loads = hybrid.batch.take_moves()
    assert (loads.loads.src.tolist(), loads.loads.group.tolist()) == ([5, 4, 3, 2, 2], [0, 0, 0, 0, 1])
    assert (loads.loads.dst.tolist(), len(loads.saves.src)) == ([1, 2, 3, 4, 1], 0)
    copies = loads.copies
    assert (copies.src.tolist(), copies.dst.tolist(), copies.group.tolist()) == ([1], [4], [1])
    assert hybrid.batch.get_page_ids(0) == ([1, 2, 3, 4, 5], [4])
    failed = manager.fail(loads.number, loads=[1, 4])
    assert (failed.page_ids, failed.groups, len(failed)) == ([2, 1], [0, 1], 2)
    assert hybrid.batch.rewind(failed) == ([0], [])
    hybrid.batch.check()


def test_each_pool_of_the_tier_has_its_figures() -> None:
    hybrid = filled({"kv": 16, "states": 6}, {"kv": 40, "states": 5})
    stats = hybrid.manager.stats()
    assert stats.host_pools == {"kv": PoolStats(39, 39, 0, 5, 0, 5, 0), "states": PoolStats(4, 4, 0, 2, 0, 2, 0)}
    assert stats.host_tier is not None
    assert (stats.host_tier.num_pages, stats.host_tier.num_free_pages, stats.host_tier.num_cached_pages) == (43, 43, 7)
    assert hybrid.manager.host_tier.stats() == stats.host_tier
    assert HostTier({"kv": 40, "states": 5}).stats().num_pages == 43


def test_a_pool_that_is_small_in_the_tier_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagepool"):
        hybrid = Hybrid({"kv": 16, "states": 6}, {"kv": 31, "states": 10}, policy="write_through")
    message = "host_tier: 9 pages are fewer than twice the 5 of the pool 'states', so it writes back, in place of write_through"
    assert caplog.messages == [message]
    hybrid.pass_through(0)
    hybrid.complete()
    assert len(hybrid.batch.take_moves()) == 0


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (64, r"host_tier: got 64 pages, allowed with several pools: a size for each, such as \{'kv': 1024, 'states': 1024\}"),
        ({"kv": 64}, r"host_tier: got pools \['kv'\], allowed: those of the groups, \['kv', 'states'\]"),
        (
            {"kv": 64, "states": 8, "windows": 8},
            r"host_tier: got pools \['kv', 'states', 'windows'\], allowed: those of the groups, \['kv', 'states'\]",
        ),
        ({"kv": 64, "states": 1}, r"num_pages\['states'\]: got 1, allowed: 2 to 2\*\*62"),
    ],
)
def test_sizes_that_are_not_those_of_the_pools(host: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        Hybrid({"kv": 16, "states": 6}, host)


def test_one_pool_may_be_named() -> None:
    manager = CacheManager(16, [FULL], 64, host_tier=HostTier({"kv": 40}))
    assert list(manager.stats().host_pools) == ["kv"]
    with pytest.raises(ArgumentError, match=r"^host_tier: got pools \['states'\], allowed: those of the groups, \['kv'\]$"):
        CacheManager(16, [FULL], 64, host_tier=HostTier({"states": 40}))


def test_a_tier_of_other_banks_is_refused() -> None:
    stores = PageStore(8, further_banks=[4], bank_names=("kv", "states")), PageStore(12)
    for store, sizes, num_banks in ((stores[0], (), 0), (stores[1], (4,), 1)):
        with pytest.raises(ArgumentError, match=rf"^further_banks: got {num_banks}, allowed: {1 - num_banks}$"):
            PageTier(store, 8, further_banks=sizes)
    tier = PageTier(stores[0], 8, further_banks=[4])
    with pytest.raises(ArgumentError, match=r"^host_tier: got one for another pool, allowed: "):
        add_tier(stores[1], tier)
    add_tier(stores[0], tier)
    assert tier.count_banks(stores[0]) == [(7, 7, 0, 0, 0), (4, 4, 0, 0, 0)]


def test_a_page_cached_for_the_group_of_another_pool_is_found() -> None:
    """On the device, and in the tier once it was saved."""
    hybrid = Hybrid({"kv": 16, "states": 6})
    page_ids = hybrid.manager.pools["kv"].get_new_page_ids(1)
    hybrid.manager.pools["kv"].pages[1].page_hash = PageHashWithGroupId(PageHash(5, ()), 1)
    for where in ("", " of the host tier"):
        text = f"^page 1{where}, pool 'kv', is cached for group 1, allowed: pages of the pool 'states'$"
        for checked in (hybrid.manager, hybrid.batch):
            with pytest.raises(IntegrityError, match=text):
                checked.check()
        hybrid.manager.pools["kv"].free_page_ids(page_ids)
        page_ids = hybrid.take_all("kv")

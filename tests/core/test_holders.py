"""Who holds the pages: every held page has its holders, whatever holds it."""

from __future__ import annotations

import gc
import pickle
import re
import threading
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from settings import NUM_OPERATIONS

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CrossAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    HeldPages,
    HostTier,
    MambaSpec,
    PageHolder,
    PageTable,
    RunningBatch,
)
from pagepool._core import PageClaim, PageIds, PageStore, list_claims
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError

SPEC = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
GROUPS = [CacheGroupSpec(SPEC)]


def make_batch(manager: CacheManager, num_rows: int = 4) -> RunningBatch:
    return RunningBatch(manager, PageTable(num_rows, 16, 64))


def start(manager: CacheManager, name: str, tokens: list[int]) -> EngineRequest:
    request = EngineRequest(name, tokens)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    assert manager.allocate_slots(request, len(tokens) - num_hit_tokens, num_hit_tokens, hits) is not None
    return request


def by_name(held: HeldPages) -> dict[tuple[str, str], tuple[int, int]]:
    return {(each.kind, each.name): (sum(each.num_pages.values()), sum(each.num_own_pages.values())) for each in held.holders}


def stop_clock(manager: CacheManager, seconds: float) -> None:
    manager._store.set_time(seconds)


def end_moves(manager: CacheManager) -> None:
    moves = manager.take_moves()
    if moves.number:
        manager.complete(moves.number)


# --- each kind ------------------------------------------------------------------------------------------------------


def test_nobody() -> None:
    manager = CacheManager(16, GROUPS, 64)
    assert manager.held() == HeldPages((), {"kv": {}}, {"kv": []})
    assert repr(manager.held()) == "nobody holds a page"


def test_requests_and_rows_that_share_pages() -> None:
    """A holder lists its pages, and of these what would become free without it. The largest comes first."""
    manager = CacheManager(40, GROUPS, 64)
    first, second = start(manager, "first", [*range(13)]), start(manager, "second", [*range(9)])
    batches = [make_batch(manager), make_batch(manager)]
    assert batches[1].admit(2, [*range(8), 99]) == 8
    assert by_name(manager.held()) == {
        ("request", "first"): (4, 2),
        ("request", "second"): (3, 1),
        ("row", "2 of batch 1"): (3, 1),
    }
    assert manager.held().num_pages_by_kind == {"kv": {"request": 5, "row": 1}}
    assert manager.held().holders[0].name == "first"
    manager.free(second)
    manager.free(first)
    assert by_name(manager.held()) == {("row", "2 of batch 1"): (3, 3)}
    batches[1].release([2])
    assert manager.held().holders == ()


def test_a_batch_that_was_dropped() -> None:
    """Its pages are lost: nothing explains them."""
    manager = CacheManager(40, GROUPS, 64)
    make_batch(manager).admit(0, [*range(6)])
    gc.collect()
    held = manager.held()
    assert by_name(held) == {("caller", ""): (2, 2)}
    assert held.caller_page_ids == {"kv": [1, 2]}
    assert held.num_pages_by_kind == {"kv": {"caller": 2}}


def test_pages_that_the_caller_holds() -> None:
    """Also those that others hold too, and several references to one."""
    manager = CacheManager(40, GROUPS, 64)
    start(manager, "a", [*range(9)])
    manager.page_pool.touch([[manager.page_pool.pages[1]] * 2])
    pages = manager.page_pool.get_new_pages(2)
    held = manager.held()
    assert by_name(held) == {("request", "a"): (3, 2), ("caller", ""): (3, 2)}
    assert held.caller_page_ids == {"kv": [1, *(page.page_id for page in pages)]}
    assert held.num_pages_by_kind == {"kv": {"request": 3, "caller": 2}}
    [caller] = (claim for kind, _, claim in manager.registry.list_claims(manager._sinks) if kind == "caller")
    assert (caller.num_references, caller.holder, caller.row, caller.seconds, caller.seconds_left) == (
        4,
        "caller",
        -1,
        None,
        None,
    )
    manager.page_pool.free_pages(pages)
    assert manager.held().caller_page_ids == {"kv": [1]}


def test_another_manager_of_the_pool_is_a_caller() -> None:
    first = CacheManager(40, GROUPS, 64)
    second = CacheManager(40, GROUPS, 64, page_pool=first.page_pool)
    start(second, "b", [*range(9)])
    assert by_name(first.held()) == {("caller", ""): (3, 3)}
    assert by_name(second.held()) == {("request", "b"): (3, 3)}


def test_leases() -> None:
    manager = CacheManager(40, GROUPS, 64)
    stop_clock(manager, 1000)
    request = start(manager, "a", [*range(9)])
    endless = manager.page_pool.lease([1])
    stop_clock(manager, 1010)
    ending = manager.lease(request, 0, 8, seconds=30)
    stop_clock(manager, 1012.5)
    held = {each.name: each for each in manager.held().holders if each.kind == "lease"}
    assert {name: each[2:] for name, each in held.items()} == {
        "0": ({"kv": 1}, {"kv": 0}, 12.5, None),
        "1": ({"kv": 2}, {"kv": 0}, 2.5, 27.5),
    }
    assert manager.leases == (endless, ending)
    stop_clock(manager, 1050)
    assert [each.kind for each in manager.held().holders] == ["request", "lease"]
    endless.release()
    manager.free(request)
    assert manager.held().holders == ()


def test_media_and_sinks() -> None:
    cross = CrossAttentionSpec(
        page_size=4, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False, max_num_encoder_tokens=8
    )
    sinks = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False, num_sink_tokens=8)
    manager = CacheManager(40, [CacheGroupSpec(sinks), CacheGroupSpec(cross)], 64)
    request = EngineRequest("a", [*range(5)])
    request.num_encoder_tokens, request.cross_key = 8, "picture"
    assert manager.allocate_slots(request, 5) is not None
    assert by_name(manager.held()) == {("request", "a"): (2, 2), ("medium", "a"): (2, 2), ("sink", ""): (2, 2)}


def test_loads_and_copies() -> None:
    manager = CacheManager(9, GROUPS, 64, host_tier=HostTier(40))
    request = start(manager, "a", [*range(16)])
    manager.free(request)
    end_moves(manager)
    other = start(manager, "b", [*range(100, 132)])
    end_moves(manager)
    manager.free(other)
    again = EngineRequest("a", [*range(16)])
    _, num_hit_tokens = manager.get_computed_pages(again)
    assert num_hit_tokens == 12
    held = by_name(manager.held())
    assert held == {("load", ""): (3, 3)}
    end_moves(manager)
    assert manager.held().holders == ()


def test_copies_of_forks() -> None:
    manager = CacheManager(40, GROUPS, 64)
    batch = make_batch(manager)
    batch.admit(0, [*range(6)])
    batch.step([0], [7])
    batch.fork(0, [1])
    held = by_name(manager.held())
    assert held[("copy", "")] == (1, 0)
    batch.take_moves()
    assert ("copy", "") not in by_name(manager.held())


def test_pools() -> None:
    """Pages count by pool, and ids within each."""
    state = MambaSpec(page_size=4, shapes=((2,),), dtype="bfloat16")
    manager = CacheManager({"kv": 20, "states": 9}, [*GROUPS, CacheGroupSpec(state, pool="states")], 64)
    start(manager, "a", [*range(6)])
    manager.pools["states"].get_new_pages(2)
    held = manager.held()
    assert [each.num_pages for each in held.holders] == [{"kv": 2, "states": 1}, {"kv": 0, "states": 2}]
    assert held.caller_page_ids == {"kv": [], "states": [2, 3]}
    assert held.num_pages_by_kind == {"kv": {"request": 2}, "states": {"request": 1, "caller": 2}}
    headings = repr(held).splitlines()[0]
    assert re.split(r"  +", headings) == ["kind", "name", "pages of kv", "pages of states", "own", "seconds", "seconds left"]


# --- times ----------------------------------------------------------------------------------------------------------


def test_seconds_since_admission() -> None:
    """They move with a row; a fork, and a request that comes back, begin anew."""
    manager = CacheManager(40, GROUPS, 64)
    batch = make_batch(manager)
    stop_clock(manager, 100)
    request = start(manager, "a", [*range(100, 108)])
    batch.admit(0, [*range(6)])
    stop_clock(manager, 110)
    batch.fork(0, [1])
    batch.move_row(0, 3)
    stop_clock(manager, 115)
    manager.free(request)
    start(manager, "a", [*range(100, 108)])
    stop_clock(manager, 116)
    seconds = {each.name: each.seconds for each in manager.held().holders}
    assert seconds == {"a": 1, "3 of batch 0": 16, "1 of batch 0": 6, "": None}
    batch.swap_row(1, 3)
    assert {each.name: each.seconds for each in manager.held().holders} == seconds | {"1 of batch 0": 16, "3 of batch 0": 6}


# --- all of them ------------------------------------------------------------------------------------------------------


class World:
    """A manager with two batches, and what the caller took of its pool."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.manager = CacheManager(60, GROUPS, 64)
        self.batches = [make_batch(self.manager), make_batch(self.manager)]
        self.requests: dict[str, EngineRequest] = {}
        self.taken: list[int] = []
        self.leases: list[Any] = []
        self.number = 0

    def draw_tokens(self) -> list[int]:
        return [self.rng.randrange(2)] * self.rng.randrange(1, 30) + [self.rng.randrange(5)] * self.rng.randrange(1, 9)

    def act(self) -> None:
        rng, manager = self.rng, self.manager
        action = rng.choice(("start", "free", "admit", "release", "take", "touch", "give", "lease", "end", "fork", "move"))
        batch = rng.choice(self.batches)
        admitted, free = np.flatnonzero(batch.is_admitted).tolist(), np.flatnonzero(~batch.is_admitted).tolist()
        pool = manager.page_pool
        if action == "start":
            self.number += 1
            request = EngineRequest(f"r{self.number}", self.draw_tokens())
            hits, num = manager.get_computed_pages(request)
            if manager.allocate_slots(request, request.num_tokens - num, num, hits) is not None:
                self.requests[request.request_id] = request
        elif action == "free" and self.requests:
            manager.free(self.requests.pop(rng.choice([*self.requests])))
        elif action == "admit" and free:
            batch.admit(rng.choice(free), self.draw_tokens())
        elif action == "release" and admitted:
            batch.release([rng.choice(admitted)])
        elif action == "take" and pool.get_num_free_pages() > 10:
            self.taken += [page.page_id for page in pool.get_new_pages(rng.randrange(1, 3))]
        elif action == "touch" and self.list_held():
            page_id = rng.choice(self.list_held())
            pool.touch([[pool.pages[page_id]]])
            self.taken.append(page_id)
        elif action == "give" and self.taken:
            pool.free_pages([pool.pages[self.taken.pop(rng.randrange(len(self.taken)))]])
        elif action == "lease" and self.list_held():
            self.leases.append(pool.lease(rng.sample(self.list_held(), 1)))
        elif action == "end" and self.leases:
            self.leases.pop(rng.randrange(len(self.leases))).release()
        elif action == "fork" and admitted and free and pool.get_num_free_pages() > 2:
            batch.take_moves()
            batch.fork(rng.choice(admitted), [rng.choice(free)])
            batch.take_moves()
        elif action == "move" and admitted and free:
            batch.move_row(rng.choice(admitted), rng.choice(free))

    def list_held(self) -> list[int]:
        return [page.page_id for page in self.manager.page_pool.pages[1:] if page.ref_cnt]

    def expected(self) -> dict[tuple[str, str], Counter[int]]:
        """Each holder's references, as the public calls name them."""
        held = {("request", name): Counter(self.manager.get_page_ids(name)[0]) for name in self.requests}
        for number, batch in enumerate(self.batches):
            for row in np.flatnonzero(batch.is_admitted).tolist():
                held["row", f"{row} of batch {number}"] = Counter(batch.get_page_ids(row)[0])
        held |= {("lease", f"{i}"): Counter(lease.page_ids) for i, lease in enumerate(self.manager.leases)}
        return held | ({("caller", ""): Counter(self.taken)} if self.taken else {})

    def check(self) -> None:
        held, expected = self.manager.held(), self.expected()
        ref_counts = {page.page_id: page.ref_cnt for page in self.manager.page_pool.pages[1:] if page.ref_cnt}
        assert sum(expected.values(), Counter()) == ref_counts  # the oracle itself names every reference
        own = {name: sum(num == ref_counts[page] for page, num in pages.items()) for name, pages in expected.items()}
        assert by_name(held) == {name: (len(pages), own[name]) for name, pages in expected.items()}
        assert sorted(held.caller_page_ids["kv"]) == sorted({*self.taken})
        sizes = [sum(each.num_pages.values()) for each in held.holders]
        assert sizes == sorted(sizes, reverse=True)
        left, by_kind = {*ref_counts}, Counter[str]()
        for kind in ("request", "row", "lease", "caller"):
            pages = {page for name, each in expected.items() if name[0] == kind for page in each}
            by_kind[kind] = len(pages & left)
            left -= pages
        assert not left
        assert held.num_pages_by_kind == {"kv": dict(+by_kind)}
        self.manager.check()


@pytest.mark.parametrize("seed", range(8))
def test_every_reference_has_a_holder(seed: int) -> None:
    world = World(Random(seed))
    for _ in range(NUM_OPERATIONS // 40):
        world.act()
        world.check()


def test_other_threads_may_go_on() -> None:
    """A report is of one moment: no page that a row holds throughout is ever missing."""
    manager = CacheManager(400, GROUPS, 64)
    batch, ended = make_batch(manager, 8), threading.Event()
    batch.admit(0, [*range(40)])

    def run() -> None:
        for i in range(300):
            batch.admit(1 + i % 7, [i] * 30)
            batch.release([1 + i % 7])
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    while not ended.is_set():
        held = manager.held()
        assert by_name(held)["row", "0 of batch 0"] == (10, 10)
        assert "caller" not in held.num_pages_by_kind["kv"]
    thread.join()


# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table_has_the_20_largest() -> None:
    manager = CacheManager(400, GROUPS, 64)
    for i in range(23):
        start(manager, f"r{i}", [i] * (4 * (i % 5 + 1)))
    lines = repr(manager.held()).splitlines()
    assert len(lines) == 22
    assert lines[0].split() == ["kind", "name", "pages", "own", "seconds", "seconds", "left"]
    assert lines[-1] == "and 3 more with 3 pages"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "\ud800", "x" * 500, "‮", ""], ids=repr)
def test_names_are_printable(name: str) -> None:
    """A request id is whatever a user sends."""
    manager = CacheManager(40, GROUPS, 64)
    start(manager, name, [1])
    held = manager.held()
    assert held.holders[0].name == name
    table = repr(held)
    assert len(table.splitlines()) == 2
    assert all(line.isprintable() and len(line) < 100 for line in table.splitlines())
    table.encode()


def test_holders_are_tuples() -> None:
    holder = PageHolder("request", "a", {"kv": 1}, {"kv": 0}, 1.5, None)
    assert holder._replace(name="b").name == "b"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_holds_no_pages_of_the_pool() -> None:
    manager, other = CacheManager(16, GROUPS, 64), CacheManager(16, GROUPS, 64)
    with pytest.raises(ArgumentTypeError, match=r"^holders: got int, allowed: RequestPages, Lease, PageIds and RunningRows$"):
        list_claims(manager._store, [7])  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match=r"^holders: got "):
        list_claims(manager._store, 7)  # type: ignore[arg-type]
    start(other, "a", [1])
    for holder in (*other.registry.held.values(), make_batch(other), other.page_pool.lease([1])):
        with pytest.raises(ArgumentError, match=r"^holders: got one of another pool, allowed: those of this pool$"):
            list_claims(manager._store, [holder])
    with pytest.raises(PageIdError):
        list_claims(manager._store, [PageIds([16])])
    with pytest.raises(TypeError, match="a PageClaim is what list_claims returns"):
        PageClaim()
    claim = PageClaim.__new__(PageClaim)
    with pytest.raises(ArgumentTypeError, match=r"^a claim of pages cannot be pickled$"):
        pickle.dumps(claim)
    assert (claim.num_pages, claim.page_ids_by_pool, claim.seconds) == ({}, {}, None)
    assert list_claims(PageStore(8), []) == []

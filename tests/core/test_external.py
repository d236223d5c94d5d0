"""Tokens that come from elsewhere or fail to, and leases: exact cases of rows and requests, and what is refused."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import pytest
from hybrids import (
    FULL,
    PROMPT,
    STATE,
    batch_state,
    count_hits,
    make_batch,
    make_manager,
    make_request,
)
from refusing import refused
from threads import run_threads

from pagepool import CacheManager, EngineRequest, HostTier, Lease, PageHash, PageHashWithGroupId, RunningBatch
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    MovesDueError,
    PageHashError,
)

pytestmark = pytest.mark.usefixtures("drafter")


def make_pending(*specs: Any, num_tokens: int = 23, num_external: int = 99, **options: Any) -> RunningBatch:
    """Return a batch whose row 0 waits for tokens."""
    batch = make_batch(make_manager(*specs or (FULL,), **options))
    assert batch.admit(0, PROMPT[:num_tokens], num_external_tokens=num_external) == 0
    return batch


def state_of(batch: RunningBatch) -> tuple[Any, ...]:
    return batch_state(batch), batch.num_external_tokens.tolist()


# Rows.


def test_a_state_is_of_all_tokens() -> None:
    batch = make_pending(FULL, STATE, num_external=16)
    writes = batch.take_moves().writes
    assert (writes.rows.tolist(), writes.num_tokens.tolist()) == ([0], [16])
    with refused(lambda: state_of(batch), ArgumentError, r"^row 0: got 15 tokens, allowed with a state: all 16"):
        batch.commit_external(0, 15)
    batch.commit_external(0, 16)
    batch.plan([0], 7)
    assert count_hits(batch._manager) == 16
    assert batch.admit(1, PROMPT[:30], num_external_tokens=3) == 16
    with refused(lambda: state_of(batch), MovesDueError, "^row 1: got moves"):
        batch.commit_external(1, 3)


def test_transfers_of_a_host_tier_come_first() -> None:
    """What is evicted for a row is read before the tokens from elsewhere are written there."""
    batch = make_pending(num_pages=8, host_tier=HostTier(20))
    batch.commit_external(0, 22)
    batch.release([0])
    assert batch.admit(0, [token_id + 1 for token_id in PROMPT[:23]], num_external_tokens=22) == 0
    with refused(lambda: state_of(batch), MovesDueError, "^row 0: got moves of its pages that are due"):
        batch.commit_external(0, 22)
    assert len(batch.take_moves().saves.src) == 4
    batch.commit_external(0, 22)
    batch.check()


# Pages that were not filled.


def start_loaded(manager: CacheManager) -> EngineRequest:
    """Return a request with six full pages, all of whose tokens but the last came."""
    request = make_request("loaded", 25)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=24) is not None
    request.num_computed_tokens = 25
    return request


def test_a_page_that_got_another_entry_is_refused() -> None:
    manager = make_manager(FULL)
    request = start_loaded(manager)
    bad = manager.get_page_ids("loaded")[0][3]
    manager.page_pool.evict_pages([bad - 1, bad])
    manager.page_pool.pages[bad].page_hash = PageHashWithGroupId(PageHash(5, ()), 0)
    request.num_computed_tokens = 0
    with pytest.raises(PageHashError, match=rf"page {bad} \(at 3 of 7\), which has a hash already"):
        manager.allocate_slots(request, 25)
    assert count_hits(manager) == 8
    manager.page_pool.check()


# Leases.


def make_leased(num_leased: int = 3) -> tuple[CacheManager, Any, Lease]:
    """Return a manager, a request that holds pages 1 to 6, and a lease of the first of these."""
    manager = make_manager(FULL, num_pages=10)
    request = make_request("first", 23)
    assert manager.allocate_slots(request, 23) is not None
    return manager, request, manager.lease(range(1, 1 + num_leased))  # type: ignore[arg-type]


def test_a_lease_is_no_holder_of_a_common_prefix() -> None:
    manager, request, lease = make_leased()
    request.status = request.status.RUNNING
    assert manager.get_num_common_prefix_pages(request, 1) == [6]
    assert manager.get_num_common_prefix_pages(request, 2) == [0]
    lease.release()


def test_a_page_that_was_given_a_reference_in_the_free_queue_cannot_be_leased() -> None:
    manager, request, lease = make_leased()
    manager.free(request)
    manager.page_pool.pages[5].ref_cnt = 1
    with pytest.raises(IntegrityError, match=r"^page 5 is in the free queue with ref count 1"):
        manager.lease([4, 5])
    assert manager.leases == (lease,)


def test_the_reference_of_a_lease_that_somebody_gave_back() -> None:
    manager, request, lease = make_leased()
    manager.page_pool.free_pages([manager.page_pool.pages[2]])
    with pytest.raises(IntegrityError, match=r"^page 2 stands in 1 rows and requests and is leased, its ref count is 1$"):
        manager.check()
    manager.free(request)
    with pytest.raises(DoubleFreeError, match=r"^page 2 "):
        lease.release()
    assert (lease.is_held, manager.leases) == (True, (lease,))


def test_a_lease_that_was_made_by_hand_holds_nothing() -> None:
    with pytest.raises(TypeError, match=r"^a Lease is what CacheManager\.lease returns$"):
        Lease()
    lease = Lease.__new__(Lease)
    lease.release()
    assert (lease.page_ids, len(lease), lease.is_held, repr(lease)) == ([], 0, False, "Lease(page_ids=[], is_held=False)")


def test_leases_are_not_copied() -> None:
    _, _, lease = make_leased()
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ArgumentTypeError, match=r"^a lease cannot be pickled$"):
            call(lease)


# Threads.


def test_threads_that_end_one_transfer() -> None:
    """One of them does; the others are refused."""
    batch = make_pending()
    refused_threads = set()

    def work(rng: Random, number: int) -> None:
        try:
            (batch.fail_external if number % 2 else batch.commit_external)(0, 9)
        except ArgumentError:
            refused_threads.add(number)

    run_threads(4, 0, work)
    assert (len(refused_threads), batch.num_computed_tokens[0]) == (3, 9)
    batch.check()

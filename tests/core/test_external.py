"""Tokens that come from elsewhere or fail to, and leases: exact cases of rows and requests, and what is refused."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from hybrids import (
    FULL,
    PAGE_SIZE,
    PROMPT,
    STATE,
    batch_state,
    count_hits,
    make_batch,
    make_manager,
    make_request,
    run,
)
from refusing import refused
from settings import NUM_OPERATIONS
from threads import run_threads

from pagepool import CacheManager, EngineRequest, HostTier, Lease, PageHash, PageHashWithGroupId, RunningBatch
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    MovesDueError,
    PageHashError,
    PagePoolError,
)

pytestmark = pytest.mark.usefixtures("drafter")

NUM_REQUESTS = min(NUM_OPERATIONS // 500, 150)
"""The requests of each thread."""


def make_pending(*specs: Any, num_tokens: int = 23, num_external: int = 99, **options: Any) -> RunningBatch:
    """Return a batch whose row 0 waits for tokens."""
    batch = make_batch(make_manager(*specs or (FULL,), **options))
    assert batch.admit(0, PROMPT[:num_tokens], num_external_tokens=num_external) == 0
    return batch


def start_pending(manager: CacheManager, num_external: int = 20) -> Any:
    """Return a request that waits for tokens behind its hits."""
    request = make_request("pending", 23)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    options = {"num_external_computed_tokens": num_external, "delay_cache_pages": True}
    assert manager.allocate_slots(request, 0, num_hit_tokens, hits, **options) is not None
    request.num_computed_tokens = num_hit_tokens
    return request


def state_of(batch: RunningBatch) -> tuple[Any, ...]:
    return batch_state(batch), batch.num_external_tokens.tolist()


# Rows.


def test_a_refused_row_is_recognised_by_its_tokens_from_elsewhere() -> None:
    batch = make_pending(num_pages=9)
    token_ids = [token_id + 1 for token_id in PROMPT]
    for num_external in (12, 12, 8):
        assert (batch.admit(1, token_ids, num_tokens=5, num_external_tokens=num_external) is None) == (num_external == 12)
    assert batch.num_external_tokens[:2].tolist() == [22, 8]


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


def test_a_failed_step_releases_rows_that_wait_behind_its_pages() -> None:
    """Other rows that wait stay as they are, also one in the row of a request that the step computed."""
    batch = make_pending(FULL)
    step = batch.new_step()
    batch.admit(1, [1, 2, 3], step=step)
    batch.admit(2, [4] * 9, step=step)
    batch.release([1])
    batch.admit(1, [1, 2, 3], num_external_tokens=1)
    assert batch.admit(3, [4] * 20, num_external_tokens=9) == 8
    waiting = batch.get_page_ids(0), batch.get_page_ids(1)
    assert batch.settle(step, failed=True).tolist() == [3]
    assert batch.num_external_tokens.tolist() == [22, 1, 0, 0]
    assert (batch.get_page_ids(0), batch.get_page_ids(1)) == waiting
    assert batch.num_computed_tokens[2] == 0
    batch.check()


# Requests.


@pytest.mark.parts_at_a_page
def test_tokens_that_were_entered_at_once_lose_their_entries() -> None:
    """Without `delay_cache_pages`; hits keep theirs."""
    manager = make_manager(FULL)
    manager.allocate_slots(make_request("first", 8), 8)
    request = make_request("second", 23)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    manager.allocate_slots(request, 0, num_hit_tokens, hits, num_external_computed_tokens=14)
    request.num_computed_tokens = num_hit_tokens
    assert (num_hit_tokens, count_hits(manager)) == (8, 20)
    assert manager.fail_external(request, 5) == 13
    assert count_hits(manager) == 12
    manager.check()


def test_a_request_with_a_state_starts_anew() -> None:
    manager = make_manager()
    request = start_pending(manager, 16)
    assert manager.take_moves().writes.num_tokens.tolist() == [16]
    manager.commit_external(request, 16)
    request.num_computed_tokens = 16
    assert run(manager, request, 7) is not None
    request.num_computed_tokens = 23
    manager.free(request)
    other = make_request("other", 30)
    hits, num_hit_tokens = manager.get_computed_pages(other)
    manager.allocate_slots(other, 0, num_hit_tokens, hits, num_external_computed_tokens=9, delay_cache_pages=True)
    other.num_computed_tokens = num_hit_tokens
    with pytest.raises(MovesDueError):
        manager.fail_external(other, 4)
    manager.take_moves()
    assert (num_hit_tokens, manager.fail_external(other, 4), manager.get_page_ids("other")) == (16, 0, ([], []))
    other.num_computed_tokens = 0
    assert manager.get_computed_pages(other)[1] == 16
    manager.check()


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


def test_leased_pages_are_not_handed_out() -> None:
    manager, request, lease = make_leased()
    manager.free(request)
    assert (manager.stats().num_held_pages, manager.leases, len(lease), lease.page_ids) == (3, (lease,), 3, [1, 2, 3])
    assert not manager.reset_prefix_cache()
    other = make_request("other", 40)
    other.all_token_ids[0] = 7
    assert manager.allocate_slots(other, 25) is None
    assert manager.allocate_slots(other, 24).get_page_ids() == ([7, 8, 9, 6, 5, 4],)  # type: ignore[union-attr]
    manager.check()
    assert count_hits(manager) == 12
    lease.release()
    assert (repr(lease), manager.leases) == ("Lease(page_ids=[1, 2, 3], is_held=False)", ())
    assert manager.page_pool.free_page_ids_in_order().tolist() == [3, 2, 1]
    lease.release()
    manager.check()
    manager.free(other)
    assert manager.reset_prefix_cache()


def test_free_pages_that_are_cached_may_be_leased() -> None:
    manager, request, lease = make_leased()
    manager.free(request)
    lease.release()
    with manager.lease(np.array([2, 2, 4], dtype=np.int64)) as lease:
        assert manager.page_pool.ref_counts()[:5].tolist()[1:] == [0, 2, 0, 1]
    assert not manager.page_pool.ref_counts()[1:].any()
    manager.check()


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


def test_threads_that_lease_what_others_free() -> None:
    """A leased page keeps what its lessee has found in it, and none is lost."""
    manager = make_manager(FULL, num_pages=24)
    contents = [0] * 24

    def work(rng: Random, number: int) -> None:
        for i in range(NUM_REQUESTS):
            request = EngineRequest(f"{number} {i}", rng.choices(range(3), k=rng.randint(4, 14)))
            hits, num_hit_tokens = manager.get_computed_pages(request)
            with suppress(PagePoolError):
                if manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits) is None:
                    continue
            page_ids = [page_id for page_id in manager.get_page_ids(request.request_id)[0] if page_id]
            with manager.lease(page_ids) as lease:
                for page_id in page_ids[num_hit_tokens // PAGE_SIZE :]:
                    contents[page_id] = number
                found = [contents[page_id] for page_id in page_ids]
                manager.free(request)
                manager.free_page_hashes(request)
                assert found == [contents[page_id] for page_id in page_ids]
                if rng.random() < 0.5:
                    lease.release()

    run_threads(4, 0, work)
    manager.check()
    assert (manager.leases, manager.page_pool.ref_counts()[1:].any()) == ((), False)


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

"""Rows and requests that go on several times, by hand: which pages are shared and copied, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import (
    FULL,
    PROMPT,
    WINDOW,
    batch_state,
    fill,
    like,
    make_batch,
    make_manager,
    make_request,
    manager_state,
    run,
    take,
)
from overwriting import overwrite
from refusing import refused

from pagepool.errors import (
    ArgumentError,
    IntegrityError,
    OutOfPagesError,
    PageIdError,
)

pytestmark = pytest.mark.usefixtures("drafter")

# --- requests ---------------------------------------------------------------------------------------------------


def test_a_request_that_went_back_behind_its_window() -> None:
    manager = make_manager(WINDOW)
    request = make_request("a", 24)
    run(manager, request, 16)
    run(manager, request, 8)
    assert manager.get_page_ids("a") == ([0, 0, 0, 4, 5, 6],)
    request.num_computed_tokens = 10
    target = make_request("b", 24, num_computed_tokens=10)
    with refused(
        lambda: manager_state(manager), ArgumentError, "num_computed_tokens: got 10, allowed: as many as the request had"
    ):
        manager.fork(request, target)


def test_a_page_that_somebody_gave_back_is_not_shared() -> None:
    manager = make_manager(FULL, num_pages=9)
    batch = make_batch(manager)
    batch.admit(0, PROMPT[:5])
    manager.page_pool.store.give_back([1])
    with pytest.raises(PageIdError, match="was given back"):
        batch.fork(0, [1])


# --- damage -----------------------------------------------------------------------------------------------------


def test_check_names_a_written_page_that_is_shared() -> None:
    batch = make_batch(make_manager(FULL, enable_caching=False))
    batch.admit(0, PROMPT[:9])
    batch.fork(0, [1])
    batch.check()
    for name in ("num_computed", "num_planned"):
        overwrite(batch.num_computed_tokens.base[name], 5)
    with pytest.raises(IntegrityError, match=r"^row 0, group 0: page 2 \(at 1\), to which it writes, has another holder$"):
        batch.check()


@pytest.mark.parametrize("page_id", [1, 2])
def test_check_names_a_shared_page_that_was_given_back(page_id: int) -> None:
    manager = make_manager(FULL)
    batch = make_batch(manager)
    batch.admit(0, PROMPT[:6])
    batch.fork(0, [1])
    manager.page_pool.free_page_ids([page_id])
    with pytest.raises(IntegrityError, match=f"^page {page_id} stands in 2 rows and requests, its ref count is 1$"):
        batch.check()


# --- too few pages, and several batches ----------------------------------------------------------------------


def make_forkable(num_pages: int = 40) -> Any:
    """Return a batch with rows 0, of 6 tokens, and 2; rows 1 and 3 are free."""
    batch = make_batch(make_manager(num_pages=num_pages))
    batch.admit(0, PROMPT[:6])
    batch.admit(2, [7])
    return batch


def test_too_few_pages_for_rows() -> None:
    batch = make_forkable(num_pages=9)
    with refused(
        lambda: batch_state(batch),
        OutOfPagesError,
        r"^row 0: got forks that need 4 pages, allowed: at most the 3 that are free$",
    ) as caught:
        batch.fork(0, [1, 3])
    assert isinstance(caught.value, ValueError)
    assert take(batch) == []
    batch.fork(0, [1])
    assert take(batch) == [(2, 6, 0), (3, 7, 1)]


def test_rows_of_another_batch() -> None:
    """Batches of one manager have their own rows, and their copies are in one list."""
    manager = make_manager(FULL)
    batch, other = make_batch(manager), make_batch(manager)
    batch.admit(0, PROMPT[:6])
    with pytest.raises(ArgumentError, match=r"^row 0: got a row that is not admitted, allowed: an admitted one$"):
        other.fork(0, [1])
    other.admit(1, [8] * 6)
    other.fork(1, [0])
    batch.fork(0, [1])
    assert take(batch) == [(4, 5, 0), (2, 6, 0)]
    batch.check()
    other.check()


def test_a_refused_fork_leaves_no_copies() -> None:
    """What is refused is in the table of errors."""
    manager = make_manager()
    request = fill(manager, 6)
    with refused(
        lambda: manager_state(manager),
        ArgumentError,
        "^request 'first': got one that holds pages already, allowed: one without$",
    ):
        manager.fork(request, request)
    assert take(manager) == []
    pages = manager.fork(request, like(request))
    assert pages is not None
    assert pages.get_page_ids() == ([1, 4], [5])

"""What a request holds, and look-ups, at the core's own boundary, where the façade never goes."""

from __future__ import annotations

from typing import Any

import pytest
from refusing import refused

from pagepool._core import (
    CacheGroups,
    HashChain,
    PageIds,
    PageRules,
    PageStore,
    RequestPages,
    RunningRows,
    TableRows,
    check_holders,
    find_prefix,
)
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    PageHashError,
    PageIdError,
)

KEY = bytes(16)
FULL = CacheGroups([(PageRules(4), 0, 1)])
HYBRID = CacheGroups([(PageRules(4), 0, 1), (PageRules(8, 8), 1, 2)])


def make_chain(num_tokens: int = 16, first: int = 0) -> HashChain:
    chain = HashChain(4, KEY)
    chain.extend(list(range(first, first + num_tokens)))
    return chain


def make_request(store: PageStore, groups: CacheGroups = FULL, num_tokens: int = 0) -> RequestPages:
    """Return what a request holds, with `num_tokens` tokens whose full pages are cached."""
    request = RequestPages(store, groups, 64)
    assert request.allocate(num_tokens, chain=make_chain(), num_tokens_to_cache=num_tokens) is not None
    return request


def find_hits(store: PageStore, chain: HashChain, stop: int) -> PageIds:
    (hits,), num_tokens = find_prefix(store, FULL, chain, stop * 4 + 1)
    assert num_tokens == stop * 4
    return hits


def lists(request: RequestPages) -> list[list[int]]:
    return [ids.to_list() for ids in request.get_page_ids()]


def ref_counts(store: PageStore) -> list[int]:
    return store.ref_counts().tolist()


# --- hits ---------------------------------------------------------------------------------------------------


BAD_HITS: dict[str, tuple[Any, type[Exception], str]] = {
    "too few groups": ((PageIds(),), ArgumentError, "hits: got 1 groups, allowed: 2"),
    "too many groups": ((PageIds(), PageIds(), PageIds()), ArgumentError, "hits: got 3 groups"),
    "none": (None, ArgumentTypeError, "hits"),
    "no page ids": ((PageIds(), [1]), ArgumentTypeError, "hits: got list, allowed: PageIds"),
    "a group of None": ((PageIds(), None), ArgumentTypeError, "hits: got NoneType"),
    "a page outside the pool": ((PageIds([9]), PageIds()), PageIdError, "9"),
    "pages that are not cached": ((PageIds([5]), PageIds()), PageHashError, r"page 5 \(at 0 of group 0\)"),
    "a null page behind another": ((PageIds([1, 0, 2]), PageIds()), ArgumentError, r"null page \(at 1 of 3\)"),
    "pages in another order": ((PageIds([2, 1]), PageIds()), PageHashError, r"page 2 \(at 0"),
    "the wrong group": ((PageIds(), PageIds([1])), PageHashError, r"page 1 \(at 0 of group 1\)"),
    "more pages than hashes": ((PageIds([0] * 9), PageIds()), PageHashError, "at 4 of group 0"),
}


@pytest.mark.parametrize(("hits", "error", "message"), BAD_HITS.values(), ids=BAD_HITS)
def test_wrong_hits_change_nothing(hits: Any, error: type[Exception], message: str) -> None:
    store = PageStore(9)
    make_request(store, HYBRID, 8)
    request, before = RequestPages(store, HYBRID, 64), ref_counts(store)
    with pytest.raises(error, match=message):
        request.allocate(9, 0, hits, make_chain())
    assert (lists(request), ref_counts(store)) == ([[], []], before)


def test_hits_of_a_pool_that_is_gone() -> None:
    """A pool at the same address must not be taken for it."""
    chain = make_chain(8)

    def hits_of_a_pool() -> PageIds:
        store = PageStore(9)
        make_request(store, FULL, 8)
        return find_hits(store, chain, 2)

    for _ in range(20):
        hits = hits_of_a_pool()
        with pytest.raises(PageHashError):
            RequestPages(PageStore(9), FULL, 64).allocate(9, 0, (hits,), chain)


# --- pages taken --------------------------------------------------------------------------------------------


def test_tokens_without_end() -> None:
    store = PageStore(9)
    request = RequestPages(store, CacheGroups([(PageRules(1), None, 1)] * 3), 64)
    for num_tokens in (9, 2**62, 2**63 - 2**31):
        assert request.allocate(num_tokens) is None
    assert (len(request), store.num_free_pages) == (0, 8)


def test_cached_groups_without_an_index() -> None:
    for group_id in (0, 3):
        with pytest.raises(ArgumentError, match=f"got id {group_id}, allowed without prefix caching: None"):
            RequestPages(PageStore(9, False), CacheGroups([(PageRules(4), None, 1), (PageRules(4), group_id, 1)]), 64)
    request = RequestPages(PageStore(9, False), CacheGroups([(PageRules(4), None, 1)]), 64)
    assert request.allocate(16, chain=make_chain(), num_tokens_to_cache=16) is not None


# --- pages given back ---------------------------------------------------------------------------------------


def test_pages_that_somebody_else_gave_back() -> None:
    store = PageStore(9)
    request = make_request(store, CacheGroups([(PageRules(4, 5), 0, 1)]), 16)
    store.give_back([2])
    for call in (request.give_back, lambda: request.allocate(16, 16)):
        with refused(lambda: (lists(request), ref_counts(store)), DoubleFreeError, "page 2"):
            call()
    with pytest.raises(IntegrityError, match="page 2 stands in 1 rows and requests, its ref count is 0"):
        check_holders(store, [request])


# --- groups, tokens, holders --------------------------------------------------------------------------------


def test_requests_of_another_pool() -> None:
    store = PageStore(9)
    batch = RunningRows(store, [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, KEY, 0)
    own, other = make_request(store, FULL, 8), make_request(PageStore(9), FULL, 8)
    for check in (lambda requests: check_holders(store, requests), lambda requests: check_holders(store, requests, batch)):
        check([own])
        with pytest.raises(ArgumentError, match="another pool"):
            check([own, other])
        with pytest.raises(ArgumentTypeError, match="requests: got int, allowed: RequestPages"):
            check([own, 1])
        with pytest.raises(IntegrityError, match="page 1 stands in 2"):
            check([own, own])
    with pytest.raises(ArgumentError, match="rows: got those of another pool"):
        check_holders(PageStore(9), [], batch)

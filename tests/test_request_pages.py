"""What a request holds, and look-ups, at the core's own boundary, where the façade never goes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pagepool._core import (
    CacheGroups,
    HashChain,
    PageIds,
    PageRules,
    PageStore,
    PrefixQuery,
    RequestPages,
    RowRequest,
    RunningRows,
    TableRows,
    check_holders,
    check_rows,
)
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    PageHashError,
    PageIdError,
    PagePoolError,
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
    assert request.take(num_tokens) is not None
    request.enter(make_chain(), num_tokens)
    return request


def find_hits(store: PageStore, chain: HashChain, stop: int) -> PageIds:
    hits = PrefixQuery(store, chain).get_hits(0, 1, 0, stop)
    assert hits is not None
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
        request.take(9, hits, make_chain())
    assert (lists(request), ref_counts(store)) == ([[], []], before)


def test_hits_without_their_chain() -> None:
    store = PageStore(9)
    make_request(store, FULL, 8)
    with pytest.raises(PageHashError):
        RequestPages(store, FULL, 64).take(9, (find_hits(store, make_chain(), 2),))


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
            RequestPages(PageStore(9), FULL, 64).take(9, (hits,), chain)


# --- pages taken --------------------------------------------------------------------------------------------


def test_tokens_without_end() -> None:
    store = PageStore(9)
    request = RequestPages(store, CacheGroups([(PageRules(1), None, 1)] * 3), 64)
    for num_tokens in (9, 2**62, 2**63 - 2**31):
        assert request.count_needed(num_tokens) > 8
        assert request.take(num_tokens) is None
    assert (len(request), store.num_free_pages) == (0, 8)


# --- pages entered ------------------------------------------------------------------------------------------


def test_a_chain_of_longer_pages_has_no_more_digests() -> None:
    store, chain = PageStore(9), HashChain(1000, KEY)
    chain.extend([0] * 2000)
    request = RequestPages(store, FULL, 64)
    request.take(32)
    request.enter(chain, 32)
    assert (store.num_keys, request.num_cached_hashes) == (2, 2)


def test_pages_that_have_another_entry() -> None:
    store, request = PageStore(9), RequestPages(PageStore(9), FULL, 64)
    request = RequestPages(store, FULL, 64)
    request.take(16)
    store.enter(2, 7, 0)
    store.enter(4, 8, 0)
    assert request.check_enterable(make_chain(), 7)
    with pytest.raises(PageHashError, match=r"page 2 \(at 1 of 4\) has a hash already"):
        request.check_enterable(make_chain(), 16)
    assert not request.check_enterable(make_chain(), 3)


def test_hits_are_not_due() -> None:
    store, chain = PageStore(9), make_chain()
    make_request(store, FULL, 8)
    request = RequestPages(store, FULL, 64)
    hits = (find_hits(store, chain, 2),)
    assert not request.check_enterable(chain, 11, hits)
    assert request.check_enterable(chain, 12, hits)
    with pytest.raises(ArgumentError, match="groups"):
        request.check_enterable(chain, 12, hits * 2)


def test_cached_groups_without_an_index() -> None:
    for group_id in (0, 3):
        with pytest.raises(ArgumentError, match=f"got id {group_id}, allowed without prefix caching: None"):
            RequestPages(PageStore(9, False), CacheGroups([(PageRules(4), None, 1), (PageRules(4), group_id, 1)]), 64)
    request = RequestPages(PageStore(9, False), CacheGroups([(PageRules(4), None, 1)]), 64)
    request.take(16)
    request.enter(make_chain(), 16)


def test_pages_are_entered_again_after_a_rewind() -> None:
    store = PageStore(9)
    request = make_request(store, FULL, 16)
    store.drop([2, 3])
    request.enter(make_chain(), 16)
    assert (request.num_cached_hashes, store.num_keys) == (4, 2)
    request.rewind(7)
    assert request.is_due(16, 7)
    assert request.num_cached_hashes == 1
    request.rewind(16)  # forwards: nothing
    request.enter(make_chain(), 12)
    assert (request.num_cached_hashes, store.num_keys) == (3, 4)
    assert request.is_due(16, 12)


# --- pages given back ---------------------------------------------------------------------------------------


def test_pages_that_somebody_else_gave_back() -> None:
    store = PageStore(9)
    request = make_request(store, CacheGroups([(PageRules(4, 5), 0, 1)]), 16)
    store.give_back([2])
    for call in (request.give_back, lambda: request.skip(16)):
        before = lists(request), ref_counts(store)
        with pytest.raises(DoubleFreeError, match="page 2"):
            call()
        assert (lists(request), ref_counts(store)) == before
    with pytest.raises(IntegrityError, match="page 2 stands in 1 rows and requests, its ref count is 0"):
        check_holders(store, [request])


# --- groups, tokens, holders --------------------------------------------------------------------------------


BAD_GROUPS: dict[str, tuple[Any, str]] = {
    "None": (None, "groups: got NoneType"),
    "rules that are None": ([(None, 0, 1)], "groups: got None, allowed: PageRules"),
    "a stride of 0": ([(PageRules(4), 0, 0)], "stride: got 0"),
    "a group id below 0": ([(PageRules(4), -1, 1)], "group: got -1"),
}


@pytest.mark.parametrize(("groups", "message"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_groups_that_are_none(groups: Any, message: str) -> None:
    with pytest.raises(PagePoolError, match=message):
        CacheGroups(groups)


def test_questions_of_other_things_than_numbers() -> None:
    request = make_request(PageStore(9), FULL, 6)
    assert request.needs_nothing(4, 6, 8)
    for values in ((4, 8, 8), (4, 6, 9), (3, 6, 8), (4, 6, 2**70), (None, 6, 8), ("4", 6, 8), (4, float("nan"), 8)):
        assert not request.needs_nothing(*values)  # type: ignore[arg-type]


def test_requests_of_another_pool() -> None:
    store = PageStore(9)
    batch = RunningRows(store, [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, KEY, 0)
    own, other = make_request(store, FULL, 8), make_request(PageStore(9), FULL, 8)
    for check in (lambda requests: check_holders(store, requests), lambda requests: check_rows(batch, requests)):
        check([own])
        with pytest.raises(ArgumentError, match="another pool"):
            check([own, other])
        with pytest.raises(ArgumentTypeError, match="requests: got int, allowed: RequestPages"):
            check([own, 1])
        with pytest.raises(IntegrityError, match="page 1 stands in 2"):
            check([own, own])


UNPICKLABLE = [
    RequestPages(PageStore(9), FULL, 64),
    PrefixQuery(PageStore(9), make_chain()),
    FULL,
    PageRules(4),
    PageStore(9),
    RunningRows(PageStore(9), [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, KEY, 0),
]


@pytest.mark.parametrize("value", UNPICKLABLE, ids=lambda value: type(value).__name__)
def test_pickling_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"cannot (be )?pickle"):
        pickle.dumps(value)


def test_hits_are_pickled_as_page_ids() -> None:
    store = PageStore(9)
    make_request(store, FULL, 8)
    copied = pickle.loads(pickle.dumps(find_hits(store, make_chain(), 2)))
    assert (type(copied), copied.to_list()) == (PageIds, [1, 2])


# --- look-ups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "num_hits"), [((), 4), ((1, 5), 4), ((1, 4), 3), ((2,), 0), ((0, None), 4), ((0, 0), 0), ((5, 2), 0)]
)
def test_look_ups_in_a_range_of_page_ids(bounds: tuple[Any, ...], num_hits: int) -> None:
    store, chain = PageStore(9), make_chain()
    make_request(store, FULL, 16)
    query = PrefixQuery(store, chain, *bounds)
    assert query.find_leading_hits(PageIds([0]), 1, 0, 9) == num_hits
    assert query.find_leading_hits(PageIds([0, 1]), 1, 0, 9) == 0
    assert query.find_last_run(PageIds([0]), 1, 9, 2) == num_hits or bounds == (2,)
    hits = query.get_hits(0, 1, 0, num_hits)
    assert hits is not None
    assert hits.to_list() == [1, 2, 3, 4][:num_hits]
    if num_hits < 4:
        assert query.get_hits(0, 1, 0, num_hits + 1) is None


@pytest.mark.parametrize("bounds", [(-1,), (2**40,), (0, 2**40), ("1",), (0, 0.5)], ids=repr)
def test_ranges_that_are_none(bounds: tuple[Any, ...]) -> None:
    with pytest.raises(PagePoolError, match="got"):
        PrefixQuery(PageStore(9), make_chain(), *bounds)


def test_hits_behind_places_that_are_not_needed() -> None:
    store, chain = PageStore(9), make_chain()
    make_request(store, FULL, 16)
    hits = PrefixQuery(store, chain).get_hits(0, 1, 3, 4)
    assert hits is not None
    assert hits.to_list() == [0, 0, 0, 4]
    for start, stop in ((0, 5), (3, 2), (-1, 2)):
        with pytest.raises(ArgumentError, match="got"):
            PrefixQuery(store, chain).get_hits(0, 1, start, stop)


# --- rows ---------------------------------------------------------------------------------------------------


def test_a_request_for_a_row_stays_what_it_is_while_it_is_admitted() -> None:
    batch = RunningRows(PageStore(9), [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, KEY, 0)
    tokens = [1, 2, 3, 4, 5]
    request = RowRequest(batch, 0, tokens)

    def admit_again(*_: Any) -> Any:
        tokens.extend([6] * 20)
        with pytest.raises(ArgumentError, match="row 0 is admitted already, or being admitted"):
            request.admit()
        request.__init__(batch, 1, [7])  # type: ignore[misc]
        return (PageIds(),), 0

    assert request.admit((), admit_again) == 0
    assert (batch.is_admitted.tolist(), batch.num_tokens.tolist()) == ([True, False], [5, 0])
    check_rows(batch, [])


BAD_ANSWERS: list[Any] = [None, 7, (), ((), 0), ([PageIds()], 0), ((PageIds(), PageIds()), 0)]
BAD_ANSWERS += [((PageIds(),), num_tokens) for num_tokens in (-1, 9, 2**70, "4", None)]
BAD_ANSWERS += [((PageIds(ids),), 4) for ids in ([1, 1], [7], [9])]


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=repr)
def test_a_look_up_that_answers_anything(answer: Any) -> None:
    store = PageStore(9)
    batch = RunningRows(store, [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, KEY, 0)
    with pytest.raises((PagePoolError, TypeError, ValueError)):
        RowRequest(batch, 0, [1] * 9).admit((), lambda *_: answer)
    assert store.num_free_pages == 8
    assert RowRequest(batch, 0, [1] * 9).admit() == 0
    check_rows(batch, [])

"""The journal of a pool: added and removed keys, in runs of consecutive pages, and names and contexts that are still needed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from pagepool import PagePool
from pagepool._core import EntryJournal, HashChain, PageIds, PageStore
from pagepool.errors import ArgumentError, PageHashError
from pagepool.page_pool.integrity import check_store
from pagepool.page_pool.prefix_index import list_kept_keys

PAGE_SIZE = 2


class Run(NamedTuple):
    """Consecutive pages as the core reports them, with their keys and tokens."""

    keys: list[int]
    token_ids: list[int]
    parent: int | None
    place: int
    context: int
    group: int


class Changes(NamedTuple):
    """The changes taken from a journal."""

    is_cleared: bool
    removed: list[tuple[int, int]]  # key, group
    new: list[Run]


def make_store(num_pages: int = 16, *, keep_token_ids: bool = True) -> PageStore:
    store = PagePool(num_pages, enable_caching=True).store
    if keep_token_ids:
        store.keep_token_ids(PAGE_SIZE)
    EntryJournal(store).start()
    return store


def make_chain(token_ids: Sequence[int]) -> HashChain:
    chain = HashChain(PAGE_SIZE, bytes(16), True)
    chain.extend(list(token_ids))
    return chain


def enter(store: PageStore, page_ids: Sequence[int], chain: HashChain, start: int = 0, **options: Any) -> None:
    """Enter pages under the digests of a chain from `start` on."""
    ids = PageIds([0] * start + list(page_ids))
    store.enter_pages(ids, chain, start, options.pop("group", 0), **options)


def as_ints(keys: Any) -> list[int]:
    return [high << 64 | low for low, high in keys.reshape(-1, 2).tolist()]


def as_runs(entries: Any) -> list[Run]:
    keys, runs, token_ids = as_ints(entries[0]), *entries[1:]
    listed, page, token = [], 0, 0
    for parent, place, context, group, num_pages, num_tokens in runs:
        stop, stop_token = page + num_pages, token + num_pages * num_tokens
        of_run = keys[page:stop], token_ids[token:stop_token].tolist()
        listed.append(Run(*of_run, parent if place else None, place, context, group))
        page, token = stop, stop_token
    assert (page, token) == (len(keys), len(token_ids))
    return listed


def take(store: PageStore) -> Changes:
    is_cleared, ((removed_keys, removed_groups), new, entries), tier = EntryJournal(store).take_changes()
    EntryJournal(store).end_report()
    assert entries is tier[-1] is None
    removed = list(zip(as_ints(removed_keys), removed_groups.tolist(), strict=True))
    check_store(store)
    return Changes(is_cleared, removed, as_runs(new))


def entries_of(store: PageStore) -> list[Run]:
    listed = as_runs(EntryJournal(store).list_entries()[0])
    EntryJournal(store).end_report()
    return listed


NOTHING = Changes(False, [], [])


def test_pages_that_follow_one_another_are_told_together() -> None:
    store, chain = make_store(), make_chain(range(8))
    enter(store, [5, 3, 9], chain)
    keys = [chain[i] for i in range(4)]
    assert take(store) == Changes(False, [], [Run(keys[:3], list(range(6)), None, 0, 0, 0)])
    assert take(store) == NOTHING
    enter(store, [7], chain, 3)
    assert take(store) == Changes(False, [], [Run(keys[3:], [6, 7], keys[2], 3, 0, 0)])


def test_places_that_hold_the_null_page_end_a_run() -> None:
    store, chain = make_store(), make_chain(range(8))
    enter(store, [1, 0, 2, 3], chain)
    keys = [chain[i] for i in range(4)]
    first, second = take(store).new
    assert first == Run(keys[:1], [0, 1], None, 0, 0, 0)
    assert second == Run(keys[2:], [4, 5, 6, 7], keys[1], 2, 0, 0)


def test_groups_contexts_and_kept_tokens_end_a_run() -> None:
    store, chain = make_store(), make_chain(range(8))
    bare = HashChain(PAGE_SIZE, bytes(16))
    bare.extend(list(range(8)))
    context = EntryJournal(store).add_context()
    enter(store, [1], chain)
    enter(store, [2], chain, 1, group=1)
    enter(store, [3], chain, 1, context=context)
    enter(store, [4], bare, 2, context=context)
    enter(store, [5], bare, 3, context=context)
    assert [(len(run.keys), len(run.token_ids), run.context, run.group) for run in take(store).new] == [
        *[(1, 2, 0, 0), (1, 2, 0, 1), (1, 2, context, 0)],
        (2, 0, context, 0),
    ]


def test_what_comes_and_goes_is_not_told() -> None:
    store, chain = make_store(), make_chain(range(8))
    enter(store, [1, 2], chain)
    assert store.drop([1, 2]) == 2
    assert take(store) == NOTHING
    enter(store, [1, 2], chain)
    take(store)
    for _ in range(40):  # more often than the pool has pages
        store.drop([2])
        enter(store, [2], chain, 1)
        store.drop([2])
    assert take(store) == Changes(False, [(chain[1], 0)], [])


def test_what_goes_and_comes_again_is_told_as_both() -> None:
    store, chain = make_store(), make_chain(range(4))
    enter(store, [1, 2], chain)
    take(store)
    store.drop([1, 2])
    enter(store, [4], chain)
    changes = take(store)
    assert changes.removed == [(chain[0], 0), (chain[1], 0)]
    assert changes.new == [Run([chain[0]], [0, 1], None, 0, 0, 0)]


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("dropped", [[1, 2, 3], [3, 2, 1], [2, 1, 3], [2, 3, 1]])
def test_a_key_stays_until_the_last_page_of_that_content_goes(dropped: list[int], is_told: bool) -> None:
    store, chain = make_store(), make_chain(range(2))
    for page_id in (1, 2, 3):
        enter(store, [page_id], chain)
    if is_told:
        assert len(take(store).new) == 1
    for page_id in dropped[:2]:
        store.drop([page_id])
        check_store(store)
    assert [run.keys for run in entries_of(store)] == [[chain[0]]]
    if is_told:
        assert take(store) == NOTHING
    store.drop(dropped[2:])
    assert take(store) == (Changes(False, [(chain[0], 0)], []) if is_told else NOTHING)


def test_a_new_key_is_told_once_whichever_page_is_its_first() -> None:
    store, chain = make_store(), make_chain(range(2))
    for page_id in (1, 2):
        enter(store, [page_id], chain)
    store.drop([1])
    assert [run.keys for run in take(store).new] == [[chain[0]]]
    enter(store, [1], chain)
    assert take(store) == NOTHING


def test_a_reset_clears_everything() -> None:
    store, chain = make_store(), make_chain(range(8))
    enter(store, [1, 2], chain)
    take(store)
    enter(store, [3, 4], chain, 2)
    store.drop([1])
    assert store.drop_all() == 0
    assert take(store) == Changes(True, [], [])
    store.drop_all()
    enter(store, [1], chain)
    store.drop([1])
    enter(store, [2], chain)
    changes = take(store)
    assert (changes.is_cleared, changes.removed, len(changes.new)) == (True, [], 1)


def test_a_reset_that_is_refused_clears_nothing() -> None:
    store, chain = make_store(), make_chain(range(2))
    enter(store, [1], chain)
    store.take(3)
    assert store.drop_all() == 3
    assert not take(store).is_cleared


def test_pages_handed_out_anew_are_gone() -> None:
    store, chain = make_store(4), make_chain(range(6))
    enter(store, [1, 2, 3], chain)
    take(store)
    store.take(2)
    assert [key for key, _ in take(store).removed] == [chain[0], chain[1]]


def test_a_call_that_enters_a_page_twice_leaves_nothing() -> None:
    store, chain = make_store(), make_chain(range(8))
    context = EntryJournal(store).add_context()
    enter(store, [4], chain, 3)
    take(store)
    with pytest.raises(PageHashError):
        enter(store, [1, 2, 3, 4], chain, context=context)
    assert take(store) == NOTHING
    EntryJournal(store).release_context(context)
    assert context not in EntryJournal(store).kept_contexts()


def test_a_page_with_a_hash_of_its_own_has_no_parent() -> None:
    store = make_store()
    store.enter(3, 77, 2)
    assert take(store).new == [Run([77], [], None, 0, 0, 2)]


def test_entries_are_told_in_as_few_runs_as_can_be() -> None:
    """For any places and order of the pages: three prompts of eight pages share their first four."""
    rng = Random(0)
    store = make_store(64, keep_token_ids=False)
    page_ids = rng.sample(range(1, 64), 24)
    prompts = [[*range(8), *range(10 * i, 10 * i + 8)] for i in range(1, 4)]
    for prompt in prompts:
        enter(store, [page_ids.pop() for _ in range(8)], make_chain(prompt))
    runs = entries_of(store)
    assert sorted(len(run.keys) for run in runs) == [4, 4, 8]
    assert sorted((run.place, run.parent) for run in runs if run.place) == [(4, make_chain(prompts[0])[3])] * 2
    assert {key for run in runs for key in run.keys} == set(list_kept_keys(store))


def test_entries_and_changes_of_one_moment() -> None:
    store, chain = make_store(), make_chain(range(8))
    enter(store, [1, 2], chain)
    take(store)
    store.drop([2])
    enter(store, [3, 4], chain, 2)
    _, ((removed_keys, _), new, entries), _ = EntryJournal(store).take_changes(True)
    EntryJournal(store).end_report()
    assert as_ints(removed_keys) == [chain[1]]
    assert [run.keys for run in as_runs(new)] == [[chain[2], chain[3]]]
    assert [run.keys for run in as_runs(entries)] == [[chain[0]], [chain[2], chain[3]]]
    assert take(store) == NOTHING


def test_many_at_once() -> None:
    """More pages than a call handles with the GIL held."""
    num_pages = 3000
    store, chain = make_store(num_pages + 1), make_chain(range(2 * num_pages))
    enter(store, range(1, num_pages + 1), chain)
    [run] = take(store).new
    assert run == entries_of(store)[0]
    assert run.keys == [chain[i] for i in range(num_pages)]
    assert run.token_ids == list(range(2 * num_pages))
    store.drop(range(1, num_pages + 1))
    assert len(take(store).removed) == num_pages


# Contexts, and names.


def test_contexts_are_kept_while_pages_have_them_or_somebody_holds_them() -> None:
    store, chain = make_store(), make_chain(range(8))
    first, second = EntryJournal(store).add_context(), EntryJournal(store).add_context()
    assert (first, second) == (1, 2)
    enter(store, [1, 2], chain, context=first)
    EntryJournal(store).hold_context(second)
    for context in (first, second):
        EntryJournal(store).release_context(context)
    assert EntryJournal(store).kept_contexts() == {0, first, second}
    store.drop([1])
    EntryJournal(store).release_context(second)
    assert EntryJournal(store).kept_contexts() == {0, first}
    EntryJournal(store).take_changes()
    assert EntryJournal(store).kept_contexts() is None
    assert list_kept_keys(store) is None
    EntryJournal(store).end_report()
    store.drop([2])
    assert EntryJournal(store).kept_contexts() == {0}


def test_the_keys_whose_names_are_kept() -> None:
    """The names of pages in the index, of parents, and of removed pages not yet reported."""
    store, chain = make_store(), make_chain(range(8))
    enter(store, [1, 2], chain)
    enter(store, [4], chain, 3)
    take(store)
    store.drop([1])
    assert set(list_kept_keys(store)) == {chain[i] for i in range(4)}
    take(store)
    assert set(list_kept_keys(store)) == {chain[i] for i in range(4)}
    store.drop([2, 4])
    take(store)
    assert list_kept_keys(store) == []


def test_contexts_that_are_not_there() -> None:
    store, chain = make_store(), make_chain(range(2))
    for call in (
        EntryJournal(store).hold_context,
        EntryJournal(store).release_context,
        lambda context: enter(store, [1], chain, context=context),
    ):
        with pytest.raises(ArgumentError, match=r"^context: got 1, allowed: 0 to 0$"):
            call(1)
    EntryJournal(store).release_context(0)
    with pytest.raises(ArgumentError, match=r"^context: got 0, allowed: one that is held"):
        EntryJournal(store).release_context(0)


def test_without_a_journal() -> None:
    store, chain = PagePool(8, enable_caching=True).store, make_chain(range(2))
    for call in (
        EntryJournal(store).take_changes,
        EntryJournal(store).list_entries,
        EntryJournal(store).add_context,
        lambda: EntryJournal(store).hold_context(0),
    ):
        with pytest.raises(ArgumentError, match=r"^the pool has no journal$"):
            call()
    with pytest.raises(ArgumentError, match=r"^context: got 1, allowed: 0 to 0$"):
        enter(store, [1], chain, context=1)
    assert EntryJournal(store).kept_contexts() == set()
    enter(store, [1], chain)
    assert list_kept_keys(store) == [chain[0]]


def test_a_journal_begins_with_nothing_held_or_cached() -> None:
    store = make_store()
    with pytest.raises(ArgumentError, match=r"^the pool has a journal already$"):
        EntryJournal(store).start()
    held, cached = PagePool(8, enable_caching=True).store, PagePool(8, enable_caching=True).store
    held.take(2)
    cached.enter(1, 5, 0)
    for store, nums in ((held, (2, 0)), (cached, (0, 1))):
        with pytest.raises(ArgumentError, match=r"^{} pages are held and {} prefixes cached already".format(*nums)):
            EntryJournal(store).start()
    with pytest.raises(ArgumentError, match=r"no journal$"):
        EntryJournal(PageStore(8, True, False)).start()

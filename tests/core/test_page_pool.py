"""The pool, its queue and its page objects, call by call. The random tests compare whole workloads with the oracle."""

import gc
import logging
import pickle
import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from pagepool import (
    CachePage,
    CachePages,
    FreeCachePageQueue,
    PageHash,
    PageHashWithGroupId,
    PagePool,
    hash_request_tokens,
)
from pagepool._core import PageIds
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, PageHashError, PageIdError
from pagepool.request import EngineRequest


def page_hash(value, group_id=0):
    return PageHashWithGroupId(PageHash(value, ()), group_id)


def cache(pool, page_id, value, group_id=0):
    pool.pages[page_id].page_hash = page_hash(value, group_id)


def ids(pages):
    return [page.page_id for page in pages]


# Queue.


def test_a_queue_of_pages_made_alone():
    pages = [CachePage(page_id) for page_id in (10, 11, 12, 13)]
    queue = FreeCachePageQueue(pages)
    assert queue.num_free_pages == 4
    assert queue.get_all_free_pages() == pages
    assert pages[0].prev_free_page is None
    assert pages[0].next_free_page is pages[1]
    queue.remove(pages[2])
    assert pages[1].next_free_page is pages[3]
    assert pages[2].next_free_page is None
    assert queue.popleft() is pages[0]
    queue.append(pages[2])
    queue.append_n([pages[0]])
    assert ids(queue.popleft_n(4)) == [11, 13, 12, 10]
    with pytest.raises(ValueError, match="got 1 asked for, 0 free, allowed: at most the free ones"):
        queue.popleft()


def test_a_queue_adopts_pages_later_with_their_counts_and_hashes():
    queue = FreeCachePageQueue([])
    page = CachePage(5)
    page.page_hash = page_hash(1)
    for other in range(20):
        queue.append(CachePage(100 + other))
    queue.append(page)
    assert page.page_hash == page_hash(1)
    assert queue.get_all_free_pages()[-1] is page
    with pytest.raises(RuntimeError):
        page.page_hash = page_hash(2)
    for other in range(20):
        queue.append(CachePage(200 + other))
    assert page.page_hash == page_hash(1)
    page.reset_hash()
    assert page.page_hash is None


# Page objects.


def test_a_page_object_is_a_view_and_there_is_one_of_each():
    pool = PagePool(8, True)
    assert pool.pages[3] is pool.pages[3]
    assert pool.pages[-1] is pool.pages[7]
    assert len(pool.pages) == 8
    assert ids(pool.pages[2:5]) == [2, 3, 4]
    assert pool.pages[3] == pool.pages[3] != pool.pages[4]
    assert len({pool.pages[3], pool.pages[3]}) == 1
    page = pool.get_new_pages(1)[0]
    assert page is pool.pages[1]
    pool.touch_page_ids([1])
    assert page.ref_cnt == 2
    assert pool.null_page.is_null
    assert not page.is_null
    assert not page.is_free
    assert pool.pages[2].is_free
    assert "page_id=1" in repr(page)
    assert "next_free_page=3" in repr(pool.pages[2])


def test_a_page_made_alone_has_all_its_fields():
    page = CachePage(page_id=7, ref_cnt=2, _page_hash=page_hash(5), prev_free_page=None, next_free_page=None, is_null=False)
    assert (page.page_id, page.ref_cnt, page.page_hash, page.is_null) == (7, 2, page_hash(5), False)
    assert (page.prev_free_page, page.next_free_page) == (None, None)
    page.reset_hash()
    page.page_hash = page_hash(6)
    assert page.page_hash == page_hash(6)
    null = CachePage(0, is_null=True)
    assert null.is_null
    queue = FreeCachePageQueue([])
    with pytest.raises(PageIdError, match="page 0: got a null page, allowed: others"):
        queue.append(null)
    for call, error in (
        (lambda: CachePage(7, prev_free_page=page), ArgumentError),
        (lambda: CachePage(7, next_free_page=page), ArgumentError),
        (lambda: CachePage(7, _page_hash=PageHash(5, ())), ArgumentTypeError),
        (lambda: CachePage(7, -1), ArgumentError),
        (lambda: page.__init__(7), ArgumentError),
    ):
        with pytest.raises(error):
            call()
    assert page.page_hash == page_hash(6)


def test_pages_are_equal_field_by_field():
    page, other = CachePage(7), CachePage(7)
    assert page == other
    assert hash(page) == hash(other)
    assert len({page, other, CachePage(8)}) == 2
    for change, undo in (
        (lambda: page.incr_ref(), lambda: page.decr_ref()),
        (lambda: setattr(page, "page_hash", page_hash(5)), lambda: page.reset_hash()),
    ):
        change()
        assert page != other
        undo()
        assert page == other
    assert CachePage(7, 1, page_hash(5)) == CachePage(7, 1, page_hash(5)) != CachePage(7, 1, page_hash(6))
    assert CachePage(7, is_null=True) != page
    assert page != 7
    assert page != SimpleNamespace(page_id=7)


def test_pages_in_queues_are_equal_if_their_neighbours_have_the_same_ids():
    """The neighbours' other fields do not count, so no comparison walks through the queue."""
    one, other = PagePool(50_000, True), PagePool(50_000, True)
    assert one.pages[3] == other.pages[3] != other.pages[4]
    assert one.null_page == other.null_page
    cache(other, 4, 5)
    assert one.pages[3] == other.pages[3]
    assert one.pages[4] != other.pages[4]
    other.get_new_page_ids(2)
    assert one.pages[3] != other.pages[3]
    assert one.pages[5] == other.pages[5]
    assert one.pages[1] != CachePage(1)
    assert one.get_new_pages(1) == [CachePage(1, 1)]
    assert CachePages((one.pages[5:7],)) == CachePages((other.pages[5:7],))


def test_the_entry_of_one_page_is_dropped():
    pool = PagePool(8, True)
    cache(pool, 3, 5)
    assert pool._maybe_evict_cached_page(pool.pages[3])
    assert not pool._maybe_evict_cached_page(pool.pages[3])
    assert not pool._maybe_evict_cached_page(pool.null_page)
    assert len(pool.cached_page_hash_to_page) == 0
    with pytest.raises(PageIdError, match="another pool"):
        pool._maybe_evict_cached_page(CachePage(3))


def count_page_objects():
    while gc.collect():  # what a finalizer of another test kept goes later
        pass
    return sum(isinstance(item, CachePage) for item in gc.get_objects())


@pytest.mark.usefixtures("quick_collection")
def test_page_objects_are_made_only_for_those_who_ask():
    before = count_page_objects()
    pool = PagePool(1000, True)
    pool.free_page_ids(pool.get_new_page_ids(500))
    assert count_page_objects() == before
    assert len(pool.pages[10:20]) == 10
    assert count_page_objects() == before + 10
    assert pool.null_page is pool.pages[0]


def test_page_ids_are_read_like_a_list():
    page_ids = PageIds([7, 8])
    assert repr(page_ids) == "PageIds([7, 8])"
    assert pickle.loads(pickle.dumps(page_ids)).to_list() == [7, 8]
    assert page_ids[1] == 8
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"index: got {index}, allowed: 0 to 1"):
            _ = page_ids[index]


class Meddler:
    """An id that acts when it is read."""

    def __init__(self, act):
        self.act = act

    def __index__(self):
        self.act()
        return 1


def test_a_list_that_shrinks_while_it_is_read_is_refused():
    items = [0, 1, 2]
    items[1] = Meddler(items.clear)
    with pytest.raises(ArgumentError, match="page_ids: got values that changed while they were read"):
        PageIds(items)


# Taking and giving back.


def test_an_engine_may_have_page_hashes_of_its_own():
    """A named tuple with the same fields, and more."""
    own = NamedTuple("PageHash", [("hash_value", int), ("token_ids", tuple), ("extra_keys", object)])(12, (1, 2), None)
    pool = PagePool(8, True)
    pages = pool.get_new_pages(1)
    request = EngineRequest("a", [1, 2])
    assert pool.get_cached_page(own, [0]) is None
    pool.cache_full_pages(request, pages, [own], 0, 1, 2, 0)
    assert pool.get_cached_page(own, [0]) == pages
    assert pool.pages[1].page_hash.page_hash == own


@pytest.mark.parametrize("num_pages", [1_500, 4_000])
def test_long_lists_take_the_road_without_the_gil(num_pages):
    pool = PagePool(num_pages + 1, True)
    taken = pool.get_new_page_ids(num_pages)
    assert taken.dtype == np.int32
    assert taken.tolist() == list(range(1, num_pages + 1))
    pool.free_page_ids(taken[::-1])
    assert pool.free_page_ids_in_order().tolist() == taken[::-1].tolist()
    pool.check()


# Shards.


def test_a_shard_hands_out_no_page_with_a_holder():
    pool = PagePool(12, True)
    pool.pages[7].ref_cnt = 1
    assert pool.get_new_page_ids(1, dp_shard_hint=0, data_parallel_size=2).tolist() == [1]
    with pytest.raises(IntegrityError, match="page 7 is in the free queue with ref count 1, allowed: 0"):
        pool.get_new_page_ids(2, dp_shard_hint=1, data_parallel_size=2)
    pool.pages[7].ref_cnt = 0
    assert pool.get_new_page_ids(2, dp_shard_hint=1, data_parallel_size=2).tolist() == [6, 7]
    pool.check()


# Prefix entries.


@pytest.mark.parametrize("value", [-1, 0, 1 << 128])
def test_values_at_the_bounds_of_a_key(value):
    pool = PagePool(8, True)
    assert pool.get_cached_page(PageHash(value, ()), [0]) is None
    cache(pool, 1, value)
    assert ids(pool.get_cached_page(PageHash(value, ()), [0])) == [1]
    assert pool.pages[1].page_hash == page_hash(value)


def test_the_hash_of_a_cached_page_is_in_its_name():
    assert page_hash(7, 1).get_hash_value() == 7


def test_the_index_as_a_mapping():
    pool = PagePool(8, True)
    cache(pool, 1, 8)
    cache(pool, 2, 9, group_id=1)
    view = pool.cached_page_hash_to_page
    assert set(view) == {page_hash(8), page_hash(9, 1)}
    assert page_hash(8) in view
    assert page_hash(8, 1) not in view
    assert "something else" not in view
    with pytest.raises(KeyError) as caught:
        view[page_hash(7)]
    assert caught.value.args == (page_hash(7),)
    assert view.get(page_hash(9, 1)) == {2: pool.pages[2]}


def test_a_page_evicted_while_the_index_is_iterated_is_passed_over():
    pool = PagePool(8, True)
    for page_id in (1, 2, 3):
        cache(pool, page_id, page_id)
    seen = []
    for key in pool.cached_page_hash_to_page:
        seen.append(key)
        pool.evict_pages([1, 2, 3])
    assert len(seen) == 1


def test_full_pages_are_cached_with_hashes_that_the_pool_completes():
    pool = PagePool(8, True)
    request = EngineRequest("a", list(range(10)))
    pages = pool.get_new_pages(3)
    hashes = hash_request_tokens(hash, 3, request)
    known = hashes[:1]
    pool.cache_full_pages(request, pages, known, 0, 3, 3, 0)
    assert known == hashes
    assert [page.page_hash.page_hash for page in pages] == hashes
    assert pool.get_cached_page(hashes[2], [0]) == [pages[2]]
    pool.cache_full_pages(request, pages, known, 3, 3, 3, 0)
    with pytest.raises(PageHashError):
        pool.cache_full_page_ids(request, [1, 2, 3], known, 2, 3, 3, 0)
    pool.check()


def test_hashes_that_the_pool_completes_have_the_extra_keys():
    pool = PagePool(8, True)
    image = SimpleNamespace(mm_hash="cat", modality="image", placeholder_range=SimpleNamespace(offset=4, length=2))
    request = EngineRequest("a", list(range(10)), cache_salt="salt", mm_features=[image])
    hashes = []
    pool.cache_full_page_ids(request, pool.get_new_page_ids(3), hashes, 0, 3, 3, 0)
    assert hashes == hash_request_tokens(hash, 3, request)
    assert [page_hash.extra_keys is None for page_hash in hashes] == [False, False, True]


def test_the_prefix_cache_is_reset_only_when_nothing_is_held(caplog):
    pool = PagePool(8, True)
    pages = pool.get_new_pages(2)
    cache(pool, 1, 8)
    caplog.set_level(logging.INFO, "pagepool")
    assert not pool.reset_prefix_cache()
    assert caplog.messages == ["prefix cache not reset: 2 pages are held"]
    assert len(pool.cached_page_hash_to_page) == 1
    pool.free_pages(pages)
    order = pool.free_page_ids_in_order().tolist()
    assert pool.reset_prefix_cache()
    assert caplog.messages[1:] == ["prefix cache reset"]
    assert len(pool.cached_page_hash_to_page) == 0
    assert pool.free_page_ids_in_order().tolist() == order


def test_without_caching_nothing_is_cached():
    pool = PagePool(8, False)
    with pytest.raises(PageHashError, match="without prefix caching"):
        cache(pool, 1, 8)
    assert pool.get_cached_page(PageHash(8, ()), [0]) is None
    assert len(pool.cached_page_hash_to_page) == 0


@pytest.mark.parametrize("num_values", [3, 40, 4000])
def test_the_index_equals_a_dict_under_random_entries_and_deletions(num_values):
    """Few values: long rings of duplicates. Many: long probe sequences, with shifts back across the end of the table."""
    rng = random.Random(num_values)
    pool = PagePool(300, True)
    expected: dict[int, list[int]] = {}
    for _ in range(6000):
        page_id = rng.randrange(1, 300)
        current = pool.pages[page_id].page_hash
        if current is None:
            value = rng.randrange(num_values) << 90 | rng.randrange(num_values)
            cache(pool, page_id, value)
            expected.setdefault(value, []).append(page_id)
        else:
            value = current.page_hash.hash_value
            pool.evict_pages([page_id])
            expected[value].remove(page_id)
            if not expected[value]:
                del expected[value]
        assert len(pool.cached_page_hash_to_page) == len(expected)
    pool.check()
    for value, page_ids in expected.items():
        assert list(pool.cached_page_hash_to_page[page_hash(value)]) == page_ids


def test_the_hit_rate_of_a_pool_that_was_never_asked():
    assert PagePool(6, True).stats.hit_rate == 0.0


def test_groups_that_differ_in_high_bits_alone_are_told_apart() -> None:
    """The hash of a key's slot has room for 24 bits of the group."""
    pool = PagePool(8, enable_caching=True)
    pool.store.take(2)
    pool.store.enter(1, 5, 0)
    pool.store.enter(2, 5, 1 << 24)
    pool.check()
    assert (pool.store.find(5, 0), pool.store.find(5, 1 << 24)) == (1, 2)

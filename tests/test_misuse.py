"""Every misuse: the named error, and an unchanged state. Each case makes one wrong call on a pool or manager in use."""

import numpy as np
import pytest

import pagepool
from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CachePage,
    CachePages,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    EngineRequestStatus,
    FreeCachePageQueue,
    FullAttentionSpec,
    PageHash,
    PageHashWithGroupId,
    PagePool,
)
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    OutOfPagesError,
    PageHashError,
    PageIdError,
    PagePoolError,
    RequestTooLargeError,
)

SPEC = FullAttentionSpec(4, 1, 8, "float16", False)


class InUse:
    """A manager of 16 pages: `held` has pages 1 to 3, two of them cached; page 4 is free and cached."""

    def __init__(self, spec=SPEC, **options):
        self.manager = CacheManager(16, [CacheGroupSpec(spec)], 64, **options)
        self.pool = self.manager.page_pool
        self.held = EngineRequest("held", list(range(10)))
        gone = EngineRequest("gone", [7] * 5)
        self.manager.allocate_slots(self.held, 10)
        self.held.num_computed_tokens = 10
        self.manager.allocate_slots(gone, 4)
        self.manager.free(gone)
        self.other_pool = PagePool(16, True)

    def state(self):
        return (
            self.pool.ref_counts().tolist(),
            self.pool.free_page_ids_in_order().tolist(),
            {key: list(pages) for key, pages in self.pool.cached_page_hash_to_page.items()},
            self.manager.get_page_ids("held"),
            self.pool.get_usage(),
        )


HASH = PageHash(99, ())

POOL_CASES = {
    "free twice in one call": (lambda u: u.pool.free_pages([u.pool.pages[1]] * 2), DoubleFreeError),
    "free twice by id in one call": (lambda u: u.pool.free_page_ids([2, 3, 2]), DoubleFreeError),
    "free a free page": (lambda u: u.pool.free_pages([u.pool.pages[1], u.pool.pages[4]]), DoubleFreeError),
    "free a free page by id": (lambda u: u.pool.free_page_ids(np.array([3, 9], dtype=np.int32)), DoubleFreeError),
    "free twice around the null page": (
        lambda u: u.pool.free_pages([u.pool.pages[1], u.pool.null_page, u.pool.pages[1]]),
        DoubleFreeError,
    ),
    "free twice around the null page by id": (lambda u: u.pool.free_page_ids([0, 2, 0, 2]), DoubleFreeError),
    "free another pool's page": (lambda u: u.pool.free_pages([u.pool.pages[1], u.other_pool.pages[1]]), PageIdError),
    "free an id outside": (lambda u: u.pool.free_page_ids([1, 16]), PageIdError),
    "free a negative id": (lambda u: u.pool.free_page_ids([1, -1]), PageIdError),
    "free a float": (lambda u: u.pool.free_page_ids([1, 2.0]), ArgumentTypeError),
    "free a float array": (lambda u: u.pool.free_page_ids(np.array([1.0])), ArgumentTypeError),
    "free a table": (lambda u: u.pool.free_page_ids(np.ones((1, 1), dtype=np.int32)), ArgumentTypeError),
    "free a huge id": (lambda u: u.pool.free_page_ids([1 << 40]), ArgumentError),
    "free what is no page": (lambda u: u.pool.free_pages([u.pool.pages[1], 2]), ArgumentTypeError),
    "touch another pool's page": (lambda u: u.pool.touch(([u.pool.pages[1], u.other_pool.pages[1]],)), PageIdError),
    "touch an id outside": (lambda u: u.pool.touch_page_ids([1, 99]), PageIdError),
    "take more than is free": (lambda u: u.pool.get_new_pages(13), OutOfPagesError),
    "take more than is free by id": (lambda u: u.pool.get_new_page_ids(1000), OutOfPagesError),
    "take more than a shard has": (
        lambda u: u.pool.get_new_pages(8, dp_shard_hint=0, data_parallel_size=2),
        OutOfPagesError,
    ),
    "take a negative number": (lambda u: u.pool.get_new_pages(-1), ArgumentError),
    "take a fraction": (lambda u: u.pool.get_new_pages(1.5), ArgumentTypeError),
    "take a string": (lambda u: u.pool.get_new_pages("3"), ArgumentTypeError),
    "free no list": (lambda u: u.pool.free_page_ids(7), ArgumentTypeError),
    "free no list of pages": (lambda u: u.pool.free_pages(u.pool.pages[1]), ArgumentTypeError),
    "take nothing said": (lambda u: u.pool.get_new_page_ids(None), ArgumentTypeError),
    "take the null page from the queue": (lambda u: u.pool.free_page_queue.remove(u.pool.null_page), PageIdError),
    "queue the null page": (lambda u: u.pool.free_page_queue.append(u.pool.null_page), PageIdError),
    "queue a free page": (lambda u: u.pool.free_page_queue.append(u.pool.pages[9]), PageIdError),
    "queue a held page": (lambda u: u.pool.free_page_queue.append(u.pool.pages[1]), PageIdError),
    "queue a stray page": (lambda u: u.pool.free_page_queue.append(CachePage(3)), PageIdError),
    "queue another pool's page": (lambda u: u.pool.free_page_queue.append(u.other_pool.pages[3]), PageIdError),
    "remove a held page": (lambda u: u.pool.free_page_queue.remove(u.pool.pages[1]), PageIdError),
    "pop too many": (lambda u: u.pool.free_page_queue.popleft_n(13), OutOfPagesError),
    "pop a negative number": (lambda u: u.pool.free_page_queue.popleft_n(-1), ArgumentError),
    "read a page outside": (lambda u: u.pool.pages[16], PageIdError),
    "read a page before the first": (lambda u: u.pool.pages[-17], PageIdError),
    "a negative ref count": (lambda u: setattr(u.pool.pages[1], "ref_cnt", -1), ArgumentError),
    "a fractional ref count": (lambda u: setattr(u.pool.pages[1], "ref_cnt", 1.5), ArgumentTypeError),
    "decrement at zero": (lambda u: u.pool.pages[9].decr_ref(), DoubleFreeError),
    "a second hash": (
        lambda u: setattr(u.pool.pages[1], "page_hash", PageHashWithGroupId(HASH, 0)),
        PageHashError,
    ),
    "a hash for the null page": (
        lambda u: setattr(u.pool.null_page, "page_hash", PageHashWithGroupId(HASH, 0)),
        PageIdError,
    ),
    "a hash that is none": (lambda u: setattr(u.pool.pages[3], "page_hash", HASH), ArgumentTypeError),
    "a negative group": (
        lambda u: setattr(u.pool.pages[3], "page_hash", PageHashWithGroupId(HASH, -1)),
        ArgumentError,
    ),
    "cache a page twice": (
        lambda u: u.pool.cache_full_pages(u.held, u.pool.pages[3:0:-1], [HASH] * 2, 0, 2, 4, 0),
        PageHashError,
    ),
    "cache one page as two": (
        lambda u: u.pool.cache_full_page_ids(u.held, [3, 3], [HASH, PageHash(98, ())], 0, 2, 4, 0),
        PageHashError,
    ),
    "cache without the hashes before": (
        lambda u: u.pool.cache_full_pages(u.held, u.pool.pages[1:4], [], 2, 3, 4, 0),
        ArgumentError,
    ),
    "cache more pages than there are": (
        lambda u: u.pool.cache_full_pages(u.held, [u.pool.pages[3]], [HASH] * 2, 0, 2, 4, 0),
        ArgumentError,
    ),
    "cache more tokens than there are": (
        lambda u: u.pool.cache_full_page_ids(u.held, [3, 3, 3], [], 0, 3, 4, 0),
        ArgumentError,
    ),
    "evict an id outside": (lambda u: u.pool.evict_pages([1, 16]), PageIdError),
    "evict the null page": (lambda u: u.pool.evict_pages([1, 0]), PageIdError),
}

MANAGER_CASES = {
    "no new tokens": (lambda u: u.manager.allocate_slots(u.held, 0), ArgumentError),
    "negative new tokens": (lambda u: u.manager.allocate_slots(u.held, -2), ArgumentError),
    "half a token": (lambda u: u.manager.allocate_slots(u.held, 1.5), ArgumentTypeError),
    "negative lookahead": (lambda u: u.manager.allocate_slots(u.held, 1, num_lookahead_tokens=-1), ArgumentError),
    "half a lookahead": (lambda u: u.manager.allocate_slots(u.held, 1, num_lookahead_tokens=0.5), ArgumentTypeError),
    "negative computed": (lambda u: u.manager.allocate_slots(u.held, 9, -1), ArgumentError),
    "negative external": (
        lambda u: u.manager.allocate_slots(u.held, 9, num_external_computed_tokens=-1),
        ArgumentError,
    ),
    "negative reserve": (lambda u: u.manager.allocate_slots(u.held, 9, num_reserved_pages=-1), ArgumentError),
    "hits for a request that holds pages": (
        lambda u: u.manager.allocate_slots(u.held, 1, 4, u.manager.get_computed_pages(u.held)[0]),
        ArgumentError,
    ),
    "hits for a request that has room": (
        lambda u: u.manager.allocate_slots(u.held, 1, 0, CachePages((u.pool.pages[4:5],))),
        ArgumentError,
    ),
    "hits for another number of groups": (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [1]), 1, 0, CachePages(([], []))),
        ArgumentError,
    ),
    "hits of another pool": (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [7] * 5), 1, 4, CachePages(([u.other_pool.pages[1]],))),
        PageIdError,
    ),
    "hits of another prefix": (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [8] * 5), 1, 4, CachePages(([u.pool.pages[4]],))),
        PageHashError,
    ),
    "more hits than the request has pages": (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [7] * 5), 1, 4, CachePages((u.pool.pages[4:6],))),
        ArgumentError,
    ),
    "hits that are not cached": (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [8] * 5), 1, 4, CachePages(([u.pool.pages[9]],))),
        PageHashError,
    ),
    "the common prefix of a waiting request": (
        lambda u: u.manager.get_num_common_prefix_pages(u.held, 1),
        ArgumentError,
    ),
    "cache the pages of a request that has none": (
        lambda u: u.manager.cache_pages(EngineRequest("new", [1] * 9), 8),
        ArgumentError,
    ),
    "cache more than a request holds": (lambda u: u.manager.cache_pages(u.held, 13), ArgumentError),
    "a request larger than the pool": (lambda u: u.manager.require_capacity(61), RequestTooLargeError),
    "fewer tokens than said": (lambda u: u.manager.allocate_slots(ShortRequest(), 9), ArgumentError),
    "unhashed ids of two groups": (lambda u: CachePages(([], [])).get_unhashed_page_ids(), ArgumentError),
}


class ShortRequest(EngineRequest):
    """A request that reports more tokens than it has."""

    def __init__(self):
        super().__init__("short", [1, 2])

    @property
    def num_tokens(self):
        return 9


@pytest.mark.parametrize(("call", "error"), [*POOL_CASES.values(), *MANAGER_CASES.values()], ids=[*POOL_CASES, *MANAGER_CASES])
def test_a_misuse_raises_and_changes_nothing(call, error):
    in_use = InUse()
    before = in_use.state()
    with pytest.raises(error) as caught:
        call(in_use)
    assert isinstance(caught.value, PagePoolError)
    assert str(caught.value) not in ("", "None")
    assert in_use.state() == before
    in_use.pool.check()


MESSAGES = [
    (lambda u: PagePool(0, True), "num_pages: got 0, allowed: a positive int"),
    (lambda u: u.pool.evict_pages([0]), "page 0, the null page, is never cached"),
    (
        lambda u: u.pool.cache_full_page_ids(u.held, [1, 2], [], 1, 2, 4, 0),
        "page_hashes: got 0, allowed: at least the 1 of the cached pages",
    ),
    (
        lambda u: u.pool.cache_full_page_ids(u.held, [3], [], 0, 2, 4, 0),
        "num_full_pages: got 2, allowed: at most the number of pages",
    ),
    (
        lambda u: u.pool.cache_full_page_ids(u.held, [3, 5, 6], [], 0, 3, 4, 0),
        "request 'held': no full page of 4 tokens from 8 on",
    ),
    (lambda u: CachePages(([], [])).get_unhashed_page_ids(), "get_unhashed_page_ids: got 2 groups, allowed: 1"),
    (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [1]), 1, 0, CachePages(([], []))),
        "new_computed_pages: got 2 groups, allowed: 1",
    ),
    (
        lambda u: InUse(enable_caching=False).manager.allocate_slots(u.held, 1, 4, CachePages((u.other_pool.pages[1:2],))),
        "page 1 belongs to another pool",
    ),
    (
        lambda u: (uncached := InUse(enable_caching=False)).manager.allocate_slots(
            EngineRequest("new", [7] * 5), 1, 4, CachePages((uncached.pool.pages[4:5],))
        ),
        "new_computed_pages: got pages, allowed without prefix caching: none",
    ),
    (lambda u: u.manager.allocate_slots(u.held, 0), "num_new_tokens must be at least 1, got 0"),
    (
        lambda u: u.manager.allocate_slots(u.held, 1, 4, u.manager.get_computed_pages(u.held)[0]),
        "new_computed_pages: got pages for request 'held', which holds some already; allowed: none",
    ),
    (
        lambda u: u.manager.allocate_slots(EngineRequest("new", [8] * 5), 1, 4, CachePages(([u.pool.pages[4]],))),
        "page 4 (at 0 of group 0) does not hold this prefix: look it up again, right before allocate_slots",
    ),
    (lambda u: u.manager.require_capacity(61), "a request of 61 tokens needs 16 pages, the pool has 15"),
    (lambda u: u.manager.cache_pages(EngineRequest("new", [1] * 9), 8), "request 'new' holds no pages"),
    (lambda u: u.manager.cache_pages(u.held, 13), "num_computed_tokens: got 13, allowed: at most 12"),
    (
        lambda u: u.manager.get_num_common_prefix_pages(u.held, 1),
        f"request 'held': status is {EngineRequestStatus.WAITING}, allowed: RUNNING",
    ),
    (
        lambda u: InUse(spec=ChunkedLocalAttentionSpec(4, 1, 8, "float16", False, 8), use_eagle=True),
        "use_eagle: got True, allowed with chunked local attention and caching: False",
    ),
    (
        lambda u: CacheManager(16, [CacheGroupSpec(SPEC)], 64, page_pool=PagePool(8, False)),
        "page_pool: got 8 pages, caching False; allowed: 16 pages, caching True",
    ),
    (
        lambda u: InUse(spec=EngineRequest("no spec", [])),
        "kv_cache_spec: got EngineRequest, allowed: FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec",
    ),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES, ids=[message for _, message in MESSAGES])
def test_a_message_says_what_was_got_and_what_is_allowed(call, message):
    with pytest.raises(PagePoolError) as caught:
        call(InUse())
    assert str(caught.value) == message


@pytest.mark.parametrize(("value", "message"), [(-1, "{} must be at least "), (1.5, "{} must be an integer, got 1.5")])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("max_model_len", lambda u, value: CacheManager(16, [CacheGroupSpec(SPEC)], value)),
        ("num_new_tokens", lambda u, value: u.manager.allocate_slots(u.held, value)),
        ("num_new_computed_tokens", lambda u, value: u.manager.allocate_slots(u.held, 1, value)),
        ("num_lookahead_tokens", lambda u, value: u.manager.allocate_slots(u.held, 1, num_lookahead_tokens=value)),
        (
            "num_external_computed_tokens",
            lambda u, value: u.manager.allocate_slots(u.held, 1, num_external_computed_tokens=value),
        ),
        ("num_reserved_pages", lambda u, value: u.manager.allocate_slots(u.held, 9, num_reserved_pages=value)),
        ("num_tokens", lambda u, value: u.manager.require_capacity(value)),
        ("num_computed_tokens", lambda u, value: u.manager.cache_pages(u.held, value)),
    ],
)
def test_a_wrong_number_is_named(name, call, value, message):
    with pytest.raises(PagePoolError, match=f"^{message.format(name)}"):
        call(InUse(), value)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (OutOfPagesError, ValueError),
        (RequestTooLargeError, ValueError),
        (DoubleFreeError, RuntimeError),
        (IntegrityError, RuntimeError),
        (PageIdError, IndexError),
        (PageHashError, RuntimeError),
        (ArgumentError, ValueError),
        (ArgumentTypeError, TypeError),
        (pagepool.errors.RowIndexError, IndexError),
        (pagepool.errors.RowOverflowError, ValueError),
    ],
)
def test_errors_are_also_the_builtin_ones_that_engines_catch(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, PagePoolError)


@pytest.mark.parametrize("num_pages", [0, -1, 1.5, "8", None, [8]])
def test_a_pool_needs_a_positive_number_of_pages(num_pages):
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(num_pages, True)


def test_freeing_a_request_again_or_one_that_is_unknown_does_nothing():
    in_use = InUse()
    in_use.manager.free(in_use.held)
    before = in_use.state()
    in_use.manager.free(in_use.held)
    in_use.manager.free(EngineRequest("unknown", [1]))
    in_use.manager.free_page_hashes(EngineRequest("unknown", [1]))
    assert in_use.state() == before
    in_use.pool.check()


def test_a_request_whose_pages_were_freed_behind_its_back_is_not_freed_twice():
    in_use = InUse()
    in_use.pool.free_page_ids([2])
    before = in_use.state()
    with pytest.raises(DoubleFreeError, match="page 2"):
        in_use.manager.free(in_use.held)
    assert in_use.state() == before


def test_hits_are_refused_once_their_pages_were_handed_out_again():
    in_use = InUse()
    late = EngineRequest("late", [7] * 5)
    hits, num_hit_tokens = in_use.manager.get_computed_pages(late)
    assert num_hit_tokens == 4
    assert 4 in in_use.pool.get_new_page_ids(12)
    with pytest.raises(PageHashError, match="look it up again"):
        in_use.manager.allocate_slots(late, 1, num_hit_tokens, hits)
    in_use.pool.check()


def test_hits_without_caching_are_refused():
    in_use = InUse(enable_caching=False)
    with pytest.raises(ArgumentError, match="without prefix caching"):
        in_use.manager.allocate_slots(EngineRequest("new", [7] * 5), 1, 4, CachePages(([in_use.pool.pages[4]],)))


def test_eagle_cannot_drop_a_page_of_chunked_local_attention():
    groups = [CacheGroupSpec(ChunkedLocalAttentionSpec(4, 1, 8, "float16", False, 8))]
    with pytest.raises(ArgumentError, match="use_eagle"):
        CacheManager(16, groups, 64, use_eagle=True)
    CacheManager(16, groups, 64, use_eagle=True, enable_caching=False)


def test_a_spec_of_unknown_kind_is_refused():
    with pytest.raises(ArgumentError, match="kv_cache_spec"):
        CacheManager(16, [CacheGroupSpec(object())], 64)


def test_a_page_cannot_stand_in_two_queues():
    page = CachePage(1)
    FreeCachePageQueue([page])
    with pytest.raises(PageIdError):
        FreeCachePageQueue([page])
    with pytest.raises(PageIdError):
        FreeCachePageQueue(PagePool(4, True).pages[1:])


def test_the_common_prefix_is_for_running_requests():
    in_use = InUse()
    in_use.held.status = EngineRequestStatus.RUNNING
    assert in_use.manager.get_num_common_prefix_pages(in_use.held, 1) == [3]


@pytest.mark.parametrize("page_id", [1, 9])
def test_check_names_a_page_whose_count_was_overwritten(page_id):
    """Page 1 is held and loses its count; page 9 is free and gets one. The pool refuses to hand out the latter."""
    in_use = InUse()
    page = in_use.pool.pages[page_id]
    page.ref_cnt = 1 - page.ref_cnt
    with pytest.raises(IntegrityError, match=f"page {page_id} "):
        in_use.pool.check()
    if page_id == 9:
        with pytest.raises(IntegrityError, match="page 9 "):
            in_use.pool.get_new_pages(12)
        assert in_use.pool.get_num_free_pages() == 12


def test_check_names_a_page_that_was_popped_and_never_given_a_holder():
    in_use = InUse()
    page = in_use.pool.free_page_queue.popleft()
    with pytest.raises(IntegrityError, match=f"page {page.page_id} "):
        in_use.pool.check()
    with pytest.raises(PageIdError, match="not in the free queue"):
        in_use.pool.touch(([page],))
    in_use.pool.free_page_queue.append(page)
    in_use.pool.check()

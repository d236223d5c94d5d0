"""Every misuse: the named error, and an unchanged state. Each case makes one wrong call on a pool or manager in use.

Values of wrong types are in `argument_cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch_model import package_pool_state

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
    MambaSpec,
    PageHash,
    PageHashWithGroupId,
    PagePool,
    SlidingWindowSpec,
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
WINDOW = SlidingWindowSpec(4, 1, 8, "float16", False, 9)
CHUNK = ChunkedLocalAttentionSpec(4, 1, 8, "float16", False, 8)
STATE = MambaSpec(4, ((1, 1),), "float16")
HASH = PageHash(99, ())
ALGORITHMS: list[Any] = ["siphash128", "sha256", hash]


class InUse:
    """A manager of 16 pages: `held` has pages 1 to 3, two of them cached; page 4 is free and cached, a hit of `new`.

    With more groups, each has pages of its own.
    """

    def __init__(self, *specs: Any, num_pages: int = 16, **options: Any) -> None:
        self.manager = CacheManager(num_pages, [CacheGroupSpec(spec) for spec in specs or (SPEC,)], 64, **options)
        self.pool = self.manager.page_pool
        self.held = EngineRequest("held", list(range(10)))
        self.new = EngineRequest("new", [7] * 5)
        gone = EngineRequest("gone", [7] * 5)
        self.manager.allocate_slots(self.held, 10)
        self.held.num_computed_tokens = 10
        self.manager.allocate_slots(gone, 4)
        self.manager.free(gone)
        self.other_pool = PagePool(16, True)

    def allocate(self, *args: Any, **options: Any) -> Any:
        return self.manager.allocate_slots(self.held, *args, **options)

    def start(self, *args: Any, **options: Any) -> Any:
        return self.manager.allocate_slots(self.new, *args, **options)

    def start_with(self, *pages: Any, prompt: int = 7, num_computed_tokens: int = 4) -> Any:
        """Start a request of five equal tokens with these pages for hits."""
        request = EngineRequest("new", [prompt] * 5)
        return self.manager.allocate_slots(request, 1, num_computed_tokens, CachePages((list(pages),)))

    def state(self) -> list[Any]:
        """Return the observable state."""
        thresholds = [
            (pages.num_room_tokens, pages.num_cached_hashes, [pages.needs_nothing(n, n, n) for n in range(64)])
            for pages in self.manager.coordinator.requests.values()
        ]
        held = [self.manager.get_page_ids(request_id) for request_id in ("held", "new")]
        pool = package_pool_state(self.pool, with_hashes=False)
        return [pool.ref_counts, pool.free_page_ids, pool.prefix_entries, held, thresholds, self.manager.stats().queries]


Case = tuple[Callable[[InUse], Any], type[Exception], str]

POOL_CASES: dict[str, Case] = {
    "free twice in one call": (lambda u: u.pool.free_pages([u.pool.pages[1]] * 2), DoubleFreeError, "page 1 "),
    "free twice by id in one call": (lambda u: u.pool.free_page_ids([2, 3, 2]), DoubleFreeError, "page 2 "),
    "free a free page": (lambda u: u.pool.free_pages([u.pool.pages[1], u.pool.pages[4]]), DoubleFreeError, "page 4 "),
    "free a free page by id": (lambda u: u.pool.free_page_ids(np.array([3, 9], dtype=np.int32)), DoubleFreeError, "page 9 "),
    "free twice around the null page": (
        lambda u: u.pool.free_pages([u.pool.pages[1], u.pool.null_page, u.pool.pages[1]]),
        DoubleFreeError,
        "page 1 ",
    ),
    "free twice around the null page by id": (lambda u: u.pool.free_page_ids([0, 2, 0, 2]), DoubleFreeError, "page 2 "),
    "free another pool's page": (
        lambda u: u.pool.free_pages([u.pool.pages[1], u.other_pool.pages[1]]),
        PageIdError,
        "page 1 belongs to another pool",
    ),
    "free an id outside": (lambda u: u.pool.free_page_ids([1, 16]), PageIdError, "got 16, allowed: 0 to 15"),
    "free a negative id": (lambda u: u.pool.free_page_ids([1, -1]), PageIdError, "got -1, allowed: 0 to 15"),
    "free one page and something else": (
        lambda u: u.pool.free_pages([u.pool.pages[1], 2]),
        ArgumentTypeError,
        "pages: got int, allowed: CachePage",
    ),
    "touch another pool's page": (
        lambda u: u.pool.touch(([u.pool.pages[1], u.other_pool.pages[1]],)),
        PageIdError,
        "another pool",
    ),
    "touch an id outside": (lambda u: u.pool.touch_page_ids([1, 99]), PageIdError, "got 99, allowed: 0 to 15"),
    "take more than is free": (lambda u: u.pool.get_new_pages(13), OutOfPagesError, "13"),
    "take more than is free by id": (lambda u: u.pool.get_new_page_ids(1000), OutOfPagesError, "1000"),
    "take more than a shard has": (
        lambda u: u.pool.get_new_pages(8, dp_shard_hint=0, data_parallel_size=2),
        OutOfPagesError,
        "8",
    ),
    "take the null page from the queue": (
        lambda u: u.pool.free_page_queue.remove(u.pool.null_page),
        PageIdError,
        "page 0 is not in the free queue",
    ),
    "queue the null page": (lambda u: u.pool.free_page_queue.append(u.pool.null_page), PageIdError, "null page"),
    "queue a free page": (lambda u: u.pool.free_page_queue.append(u.pool.pages[9]), PageIdError, "page 9 "),
    "queue a held page": (lambda u: u.pool.free_page_queue.append(u.pool.pages[1]), PageIdError, "page 1 "),
    "queue a stray page": (lambda u: u.pool.free_page_queue.append(CachePage(3)), PageIdError, "page 3 "),
    "queue another pool's page": (lambda u: u.pool.free_page_queue.append(u.other_pool.pages[3]), PageIdError, "another pool"),
    "remove a held page": (lambda u: u.pool.free_page_queue.remove(u.pool.pages[1]), PageIdError, "not in the free queue"),
    "pop too many": (lambda u: u.pool.free_page_queue.popleft_n(13), OutOfPagesError, "13"),
    "read a page outside": (lambda u: u.pool.pages[16], PageIdError, "16"),
    "read a page before the first": (lambda u: u.pool.pages[-17], PageIdError, "allowed: 0 to 15"),
    "a negative ref count": (lambda u: setattr(u.pool.pages[1], "ref_cnt", -1), ArgumentError, "ref_cnt: got -1"),
    "decrement at zero": (lambda u: u.pool.pages[9].decr_ref(), DoubleFreeError, "page 9 "),
    "a second hash": (
        lambda u: setattr(u.pool.pages[1], "page_hash", PageHashWithGroupId(HASH, 0)),
        PageHashError,
        "page 1 has a hash already",
    ),
    "a hash for the null page": (
        lambda u: setattr(u.pool.null_page, "page_hash", PageHashWithGroupId(HASH, 0)),
        PageIdError,
        "null page",
    ),
    "a hash that is none": (lambda u: setattr(u.pool.pages[3], "page_hash", HASH), ArgumentTypeError, "page_hash"),
    "cache a page twice": (
        lambda u: u.pool.cache_full_pages(u.held, u.pool.pages[3:0:-1], [HASH] * 2, 0, 2, 4, 0),
        PageHashError,
        "has a hash already",
    ),
    "cache one page as two": (
        lambda u: u.pool.cache_full_page_ids(u.held, [3, 3], [HASH, PageHash(98, ())], 0, 2, 4, 0),
        PageHashError,
        "page 3 ",
    ),
    "cache without the hashes before": (
        lambda u: u.pool.cache_full_page_ids(u.held, [1, 2], [], 1, 2, 4, 0),
        ArgumentError,
        "^page_hashes: got 0, allowed: at least the 1 of the cached pages$",
    ),
    "cache more pages than there are": (
        lambda u: u.pool.cache_full_page_ids(u.held, [3], [], 0, 2, 4, 0),
        ArgumentError,
        "^num_full_pages: got 2, allowed: at most the number of pages$",
    ),
    "cache more tokens than there are": (
        lambda u: u.pool.cache_full_page_ids(u.held, [3, 5, 6], [], 0, 3, 4, 0),
        ArgumentError,
        "^request 'held': no full page of 4 tokens from 8 on$",
    ),
    "evict an id outside": (lambda u: u.pool.evict_pages([1, 16]), PageIdError, "got 16, allowed: 0 to 15"),
    "evict the null page": (lambda u: u.pool.evict_pages([1, 0]), PageIdError, "^page 0, the null page, is never cached$"),
}

MANAGER_CASES: dict[str, Case] = {
    "no new tokens": (lambda u: u.allocate(0), ArgumentError, "^num_new_tokens must be at least 1, got 0$"),
    "negative lookahead": (
        lambda u: u.allocate(1, num_lookahead_tokens=-1),
        ArgumentError,
        "^num_lookahead_tokens must be at least 0, got -1$",
    ),
    "negative computed": (lambda u: u.allocate(9, -1), ArgumentError, "^num_new_computed_tokens must be at least 0, got -1$"),
    "negative external": (
        lambda u: u.allocate(9, num_external_computed_tokens=-1),
        ArgumentError,
        "^num_external_computed_tokens must be at least 0, got -1$",
    ),
    "negative reserve": (
        lambda u: u.allocate(9, num_reserved_pages=-1),
        ArgumentError,
        "^num_reserved_pages must be at least 0, got -1$",
    ),
    "a fraction of a token": (lambda u: u.allocate(1.5), ArgumentTypeError, "^num_new_tokens must be an integer, got 1.5$"),
    "longer than the model": (lambda u: u.start(65), ArgumentError, "allowed: 64"),
    "longer than the model by external tokens": (
        lambda u: u.start(1, num_external_computed_tokens=64),
        ArgumentError,
        "allowed: 64",
    ),
    "hits for a request that holds pages": (
        lambda u: u.allocate(1, 4, CachePages(([u.pool.pages[4]],))),
        ArgumentError,
        "^new_computed_pages: got pages for request 'held', which holds some already; allowed: none$",
    ),
    "computed tokens for a request that holds pages": (lambda u: u.allocate(1, 1), ArgumentError, "allowed: 0 new ones"),
    "more computed tokens than slots": (
        lambda u: (setattr(u.held, "num_computed_tokens", 13), u.allocate(1)),
        ArgumentError,
        "allowed: 12",
    ),
    "computed tokens without hits": (lambda u: u.start(1, 4), ArgumentError, "num_new_computed_tokens 4, allowed: 0 together"),
    "computed tokens with no hits": (
        lambda u: u.start(1, 1, u.manager.create_empty_page_list()),
        ArgumentError,
        "num_new_computed_tokens 1, allowed: 0 together",
    ),
    "computed tokens from before a preemption": (
        lambda u: (setattr(u.new, "num_computed_tokens", 4), u.start(1)),
        ArgumentError,
        "num_computed_tokens 4 .*allowed: 0 together",
    ),
    "hits that are counted twice": (
        lambda u: (setattr(u.new, "num_computed_tokens", 4), u.start(1, 4, u.manager.get_computed_pages(u.new)[0])),
        ArgumentError,
        "allowed: 4",
    ),
    "more computed tokens than the hits hold": (
        lambda u: u.start(1, 5, u.manager.get_computed_pages(u.new)[0]),
        ArgumentError,
        "allowed: 4",
    ),
    "hits for another number of groups": (
        lambda u: u.start(1, 0, CachePages(([], []))),
        ArgumentError,
        "^new_computed_pages: got 2 groups, allowed: 1$",
    ),
    "hits of another pool": (lambda u: u.start_with(u.other_pool.pages[1]), PageIdError, "^page 1 belongs to another pool$"),
    "hits of another prefix": (
        lambda u: u.start_with(u.pool.pages[4], prompt=8),
        PageHashError,
        r"^page 4 \(at 0 of group 0\) does not hold this prefix: look it up again, right before allocate_slots$",
    ),
    "more hits than the request has pages": (lambda u: u.start_with(*u.pool.pages[4:6]), ArgumentError, "pages"),
    "hits that are not cached": (lambda u: u.start_with(u.pool.pages[9], prompt=8), PageHashError, "page 9 "),
    "the common prefix of a waiting request": (
        lambda u: u.manager.get_num_common_prefix_pages(u.held, 1),
        ArgumentError,
        f"^request 'held': status is {EngineRequestStatus.WAITING}, allowed: RUNNING$",
    ),
    "cache the pages of a request that has none": (
        lambda u: u.manager.cache_pages(u.new, 4),
        ArgumentError,
        "^request 'new' holds no pages$",
    ),
    "cache more than a request holds": (
        lambda u: u.manager.cache_pages(u.held, 13),
        ArgumentError,
        "^num_computed_tokens: got 13, allowed: at most 12$",
    ),
    "a request larger than the pool": (
        lambda u: u.manager.require_capacity(61),
        RequestTooLargeError,
        "^a request of 61 tokens needs 16 pages, the pool has 15$",
    ),
    "fewer tokens than said": (lambda u: (shorten(u), u.allocate(4)), ArgumentError, "all_token_ids ends at 10"),
    "negative tokens": (
        lambda u: (u.held.all_token_ids.append(-1), u.held.append_output_token_ids(5), u.allocate(2)),
        ArgumentError,
        r"^token_ids: got -1 \(at 10\), allowed: at least 0$",
    ),
    "unhashed ids of two groups": (
        lambda u: CachePages(([], [])).get_unhashed_page_ids(),
        ArgumentError,
        "^get_unhashed_page_ids: got 2 groups, allowed: 1$",
    ),
}


def shorten(in_use: InUse) -> None:
    """Let the request report more tokens than it has, like an engine's."""
    held = in_use.held
    in_use.held = SimpleNamespace(  # type: ignore[assignment]
        request_id="held",
        all_token_ids=held.all_token_ids,
        num_tokens=14,
        num_computed_tokens=held.num_computed_tokens,
        sampling_params=None,
        status=4,
    )


def refuse(in_use: InUse, case: Case) -> None:
    """Assert that a call raises what the case says, and changes nothing."""
    call, error, message = case
    before = in_use.state()
    with pytest.raises(error, match=message) as caught:
        call(in_use)
    assert isinstance(caught.value, PagePoolError)
    assert str(caught.value) not in ("", "None")
    assert in_use.state() == before


@pytest.mark.parametrize("name", POOL_CASES)
def test_a_misuse_of_a_pool_raises_and_changes_nothing(name: str) -> None:
    in_use = InUse()
    refuse(in_use, POOL_CASES[name])
    in_use.pool.check()


@pytest.mark.parametrize("hash_algo", ALGORITHMS, ids=str)
@pytest.mark.parametrize("name", MANAGER_CASES)
def test_a_misuse_of_a_manager_raises_and_changes_nothing(name: str, hash_algo: Any) -> None:
    in_use = InUse(hash_algo=hash_algo)
    refuse(in_use, MANAGER_CASES[name])
    in_use.manager.check()


# What somebody else did to pages makes a call fail late, and not halfway.


def enter_by_hand(in_use: InUse) -> None:
    """Another caller gives the request's half-full page its own hash."""
    in_use.held.append_output_token_ids([10, 11, 12, 13])
    page_id = in_use.manager.get_page_ids("held")[0][2]
    in_use.pool.pages[page_id].page_hash = PageHashWithGroupId(PageHash(12345, ()), 0)


def enter_before_caching(in_use: InUse) -> None:
    """Another caller does so while the request's pages wait to be cached."""
    in_use.held.append_output_token_ids([10, 11, 12, 13])
    in_use.allocate(4, delay_cache_pages=True)
    page_id = in_use.manager.get_page_ids("held")[0][2]
    in_use.pool.pages[page_id].page_hash = PageHashWithGroupId(PageHash(12345, ()), 0)


def leave_reference(in_use: InUse) -> None:
    """Another caller adds references to pages at the front of the free queue."""
    in_use.held.append_output_token_ids([10, 11, 12, 13])
    for page in in_use.pool.free_page_queue.get_all_free_pages()[:3]:
        page.ref_cnt = 1


def shorten_before_caching(in_use: InUse) -> None:
    in_use.held.append_output_token_ids([10, 11, 12, 13])
    in_use.allocate(4, delay_cache_pages=True)
    in_use.held.all_token_ids[10:] = []
    shorten(in_use)


SPOILT: dict[str, tuple[Callable[[InUse], Any], Case]] = {
    "a page has another hash": (enter_by_hand, (lambda u: u.allocate(4), PageHashError, "has a hash already")),
    "a free page is held": (leave_reference, (lambda u: u.allocate(4), IntegrityError, "page ")),
    "a free page is held, behind hits": (
        leave_reference,
        (lambda u: u.start(1, *reversed(u.manager.get_computed_pages(u.new))), IntegrityError, "page "),
    ),
    "a page that is to be cached has another hash": (
        enter_before_caching,
        (lambda u: u.manager.cache_pages(u.held, 14), PageHashError, "has a hash already"),
    ),
    "a page of external tokens has another hash": (
        enter_before_caching,
        (lambda u: u.manager.commit_external(u.held, 4), PageHashError, "has a hash already"),
    ),
    "a page of fewer external tokens has another hash": (
        enter_before_caching,
        (lambda u: u.manager.fail_external(u.held, 3), PageHashError, "has a hash already"),
    ),
    "fewer tokens are known than came from elsewhere": (
        shorten_before_caching,
        (lambda u: u.manager.commit_external(u.held, 4), ArgumentError, "all_token_ids ends at 10"),
    ),
}


@pytest.mark.parametrize("hash_algo", ALGORITHMS, ids=str)
@pytest.mark.parametrize("name", SPOILT)
def test_an_allocation_that_fails_late_has_changed_nothing(name: str, hash_algo: Any) -> None:
    in_use, (spoil, case) = InUse(SPEC, WINDOW, num_pages=32, hash_algo=hash_algo), SPOILT[name]
    spoil(in_use)
    refuse(in_use, case)


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("specs", [(SPEC,), (WINDOW,), (SPEC, WINDOW), (STATE,), (SPEC, STATE)])
def test_computed_tokens_without_hits_are_refused_for_all_groups(specs: tuple[Any, ...], enable_caching: bool) -> None:
    """No token of a contradictory call is read."""
    in_use = InUse(*specs, num_pages=32, enable_caching=enable_caching)
    refuse(in_use, MANAGER_CASES["computed tokens without hits"])
    refuse(in_use, MANAGER_CASES["computed tokens with no hits"])
    assert "new" not in in_use.manager.req_to_page_hashes


class Slices:
    """Token ids in an engine's own sequence type."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def __getitem__(self, where: slice) -> tuple[int, ...]:
        return tuple(self.token_ids[where])

    def __len__(self) -> int:
        return len(self.token_ids)


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor", hash], ids=str)
@pytest.mark.parametrize("form", [list, Slices, lambda ids: np.array(ids, dtype=np.int32), np.array])
def test_negative_tokens_are_refused_in_any_form(form: Callable[[list[int]], Any], hash_algo: Any) -> None:
    if hash_algo == "sha256_cbor":
        pytest.importorskip("cbor2")
    in_use = InUse(hash_algo=hash_algo)
    in_use.new.all_token_ids = form([1, 2, 3, 4, 5, -6, 7, 8, 9])
    message = r"^token_ids: got -6 \(at 5\), allowed: at least 0$"
    for call in (lambda u: u.manager.get_computed_pages(u.new), lambda u: u.manager.probe(u.new), lambda u: u.start(9)):
        refuse(in_use, (call, ArgumentError, message))
    assert in_use.manager.stats().queries.num_queried_tokens == 0


def test_an_error_that_an_engine_raises_itself_comes_out() -> None:
    """The request's own tokens raise at any read."""

    class Tokens(list[int]):
        def __getitem__(self, key: Any) -> Any:
            raise LookupError("tokens are elsewhere")

    in_use = InUse()
    in_use.held.all_token_ids = Tokens(range(14))
    before = in_use.state()
    with pytest.raises(LookupError):
        in_use.allocate(4)
    assert in_use.state() == before


# Objects that cannot be made.

UNFIT: dict[str, tuple[Callable[[], Any], type[PagePoolError], str]] = {
    "a pool without pages": (lambda: PagePool(0, True), ArgumentError, "num_pages: got 0, allowed: a positive int"),
    "eagle with chunks": (
        lambda: InUse(CHUNK, use_eagle=True),
        ArgumentError,
        "use_eagle: got True, allowed with chunked local attention and caching: False",
    ),
    "a pool of another size": (
        lambda: InUse(page_pool=PagePool(8, False)),
        ArgumentError,
        "page_pool: got 8 pages, caching False; allowed: 16 pages, caching True",
    ),
    "a spec of unknown kind": (
        lambda: InUse(EngineRequest("no spec", [])),
        ArgumentError,
        "kv_cache_spec: got EngineRequest, allowed: FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec",
    ),
    "a spec for a group": (
        lambda: CacheManager(16, [CacheGroupSpec(SPEC), SPEC], 64),
        ArgumentTypeError,
        "kv_cache_groups: got FullAttentionSpec (at 1), allowed: CacheGroupSpec",
    ),
    "a group for a list": (
        lambda: CacheManager(16, CacheGroupSpec(SPEC), 64, False),
        ArgumentTypeError,
        "kv_cache_groups: got CacheGroupSpec, allowed: a list of CacheGroupSpec",
    ),
    "hits without caching": (
        lambda: (u := InUse(enable_caching=False)).start_with(u.pool.pages[4]),
        ArgumentError,
        "new_computed_pages: got pages, allowed without prefix caching: none",
    ),
    "text for tokens": (
        lambda: EngineRequest("a", "hello"),
        ArgumentTypeError,
        "prompt_token_ids: got str, allowed: a sequence of ints",
    ),
    "a float among tokens": (
        lambda: EngineRequest("a", [1, 2.0]),
        ArgumentTypeError,
        "prompt_token_ids[1] must be an integer, got 2.0",
    ),
    "a negative token": (
        lambda: EngineRequest("a", np.array([1, -6])),
        ArgumentError,
        "prompt_token_ids[1] must be at least 0, got -6",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_made_says_what_was_got_and_what_is_allowed(name: str) -> None:
    make, error, message = UNFIT[name]
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_eagle_may_be_asked_for_with_chunks_that_are_not_cached() -> None:
    assert InUse(CHUNK, use_eagle=True, enable_caching=False).manager.use_eagle


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
def test_errors_are_also_the_builtin_ones_that_engines_catch(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, PagePoolError)


# What is no error, and what `check` finds.


def test_freeing_a_request_again_or_one_that_is_unknown_does_nothing() -> None:
    in_use = InUse()
    in_use.manager.free(in_use.held)
    before = in_use.state()
    in_use.manager.free(in_use.held)
    in_use.manager.free(EngineRequest("unknown", [1]))
    in_use.manager.free_page_hashes(EngineRequest("unknown", [1]))
    assert in_use.state() == before
    in_use.pool.check()


def test_a_request_whose_pages_were_freed_behind_its_back_is_not_freed_twice() -> None:
    in_use = InUse()
    in_use.pool.free_page_ids([2])
    refuse(in_use, (lambda u: u.manager.free(u.held), DoubleFreeError, "page 2"))


def test_hits_are_refused_once_their_pages_were_handed_out_again() -> None:
    in_use = InUse()
    hits, num_hit_tokens = in_use.manager.get_computed_pages(in_use.new)
    assert num_hit_tokens == 4
    assert 4 in in_use.pool.get_new_page_ids(12)
    refuse(in_use, (lambda u: u.start(1, num_hit_tokens, hits), PageHashError, "look it up again"))
    in_use.pool.check()


@pytest.mark.parametrize(("num_new_tokens", "num_computed_tokens"), [(1, 3), (4, 0), (5, 0)])
def test_fewer_computed_tokens_than_the_hits_hold_are_allowed(num_new_tokens: int, num_computed_tokens: int) -> None:
    in_use = InUse()
    assert in_use.start(num_new_tokens, num_computed_tokens, in_use.manager.get_computed_pages(in_use.new)[0]) is not None
    in_use.manager.check()


def test_hits_may_be_counted_by_the_request_instead() -> None:
    in_use = InUse()
    hits, in_use.new.num_computed_tokens = in_use.manager.get_computed_pages(in_use.new)
    assert in_use.start(1, 0, hits).get_page_ids() == ([5],)
    assert in_use.manager.get_page_ids("new") == ([4, 5],)


@pytest.mark.parametrize("max_model_len", [16, 18])
def test_drafts_get_the_slots_that_the_longest_request_leaves(max_model_len: int) -> None:
    """If the length is not a multiple of the page size, the last page has slots that no token may take."""
    manager, request = CacheManager(24, [CacheGroupSpec(SPEC)], max_model_len), EngineRequest("a", list(range(40)))
    assert manager.allocate_slots(request, max_model_len) is not None
    request.num_computed_tokens = max_model_len
    with pytest.raises(ArgumentError, match=f"allowed: {max_model_len}"):
        manager.allocate_slots(request, 1)
    request.num_computed_tokens = max_model_len - 1
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=9) is not None
    assert len(manager.get_page_ids("a")[0]) == -(-max_model_len // 4)


def test_a_page_cannot_stand_in_two_queues() -> None:
    page = CachePage(1)
    FreeCachePageQueue([page])
    with pytest.raises(PageIdError):
        FreeCachePageQueue([page])
    with pytest.raises(PageIdError):
        FreeCachePageQueue(PagePool(4, True).pages[1:])


@pytest.mark.parametrize("page_id", [1, 9])
def test_check_names_a_page_whose_count_was_overwritten(page_id: int) -> None:
    """Page 1 is held and loses its count; page 9 is free and gets one. The pool refuses to hand out the latter."""
    in_use = InUse()
    page = in_use.pool.pages[page_id]
    page.ref_cnt = 1 - page.ref_cnt
    with pytest.raises(IntegrityError, match=f"page {page_id} "):
        in_use.pool.check()
    if page_id == 9:
        refuse(in_use, (lambda u: u.pool.get_new_pages(12), IntegrityError, "page 9 "))


def test_check_names_a_page_that_was_popped_and_never_given_a_holder() -> None:
    in_use = InUse()
    page = in_use.pool.free_page_queue.popleft()
    with pytest.raises(IntegrityError, match=f"page {page.page_id} "):
        in_use.pool.check()
    with pytest.raises(PageIdError, match="not in the free queue"):
        in_use.pool.touch(([page],))
    in_use.pool.free_page_queue.append(page)
    in_use.pool.check()

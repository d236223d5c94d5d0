"""Every misuse: the named error, and an unchanged state. Each case makes one wrong call on a pool or manager in use.

Values of wrong types are in `argument_cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batch_model import package_pool_state
from hybrids import CHUNK, FULL, keep_every, make_manager
from refusing import refused

import pagepool
from pagepool import (
    CachePage,
    CachePages,
    EngineRequest,
    FreeCachePageQueue,
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

WINDOW = SlidingWindowSpec(4, 1, 8, "float16", False, 9)
STATE = keep_every(None)
HASH = PageHash(99, ())
KEY = PageHashWithGroupId(HASH, 0)
ALGORITHMS: list[Any] = ["siphash128", "sha256", hash]


class InUse:
    """A manager of 16 pages: `held` has pages 1 to 3, two of them cached; page 4 is free and cached, a hit of `new`.

    With more groups, each has pages of its own.
    """

    def __init__(self, *specs: Any, num_pages: int = 16, **options: Any) -> None:
        self.manager = make_manager(*specs or (FULL,), num_pages=num_pages, **options)
        self.pool = self.manager.page_pool
        self.held = EngineRequest("held", list(range(10)))
        self.new = EngineRequest("new", [7] * 5)
        gone = EngineRequest("gone", [7] * 5)
        self.manager.allocate_slots(self.held, 10)
        self.held.num_computed_tokens = 10
        self.manager.allocate_slots(gone, 4)
        self.manager.free(gone)
        self.pages, self.queue = self.pool.pages, self.pool.free_page_queue

    def allocate(self, *args: Any, **options: Any) -> Any:
        return self.manager.allocate_slots(self.held, *args, **options)

    def start(self, *args: Any, **options: Any) -> Any:
        return self.manager.allocate_slots(self.new, *args, **options)

    def enter(self, page: CachePage) -> None:
        """Enter a page by hand."""
        page.page_hash = KEY

    def look_up(self) -> CachePages:
        """Return the hit of `new`, whose first four tokens are cached."""
        return self.manager.get_computed_pages(self.new)[0]

    def state(self) -> list[Any]:
        """Return the observable state."""
        thresholds = [
            (pages.num_room_tokens, pages.count_entered_hashes(9), repr(pages)) for pages in self.manager.registry.held.values()
        ]
        held = [self.manager.get_page_ids(request_id) for request_id in ("held", "new")]
        pool = package_pool_state(self.pool, with_hashes=False)
        return [pool.ref_counts, pool.free_page_ids, pool.prefix_entries, held, thresholds, self.manager.stats().queries]


Case = tuple[Callable[[InUse], Any], type[Exception], str]


class LongRequest(EngineRequest):
    """A request that reports more tokens than it has."""

    __slots__ = ()
    num_tokens = 14  # type: ignore[assignment]


def shorten(in_use: InUse) -> None:
    """Let the request report more tokens than it has."""
    in_use.held.__class__ = LongRequest


def refuse(in_use: InUse, case: Case) -> None:
    """Assert that a call raises what the case says, and changes nothing."""
    call, error, message = case
    with refused(in_use.state, error, message) as caught:
        call(in_use)
    assert isinstance(caught.value, PagePoolError)
    assert str(caught.value) not in ("", "None")


# What somebody else did to pages makes a call fail late, and not halfway.


def enter_by_hand(in_use: InUse) -> None:
    """Another caller gives the request's half-full page its own hash."""
    in_use.enter(in_use.pages[in_use.manager.get_page_ids("held")[0][2]])


def enter_before_caching(in_use: InUse) -> None:
    """Another caller does so while the request's pages wait to be cached."""
    in_use.allocate(4, delay_cache_pages=True)
    enter_by_hand(in_use)


def leave_reference(in_use: InUse) -> None:
    """Another caller adds references to pages at the front of the free queue."""
    for page in in_use.queue.get_all_free_pages()[:3]:
        page.ref_cnt = 1


def shorten_before_caching(in_use: InUse) -> None:
    in_use.allocate(4, delay_cache_pages=True)
    in_use.held.all_token_ids[10:] = []
    shorten(in_use)


SPOILT: list[tuple[Callable[[InUse], Any], Case]] = [
    (enter_by_hand, (lambda u: u.allocate(4), PageHashError, "has a hash already")),
    (leave_reference, (lambda u: u.allocate(4), IntegrityError, "page ")),
    (leave_reference, (lambda u: u.start(1, *reversed(u.manager.get_computed_pages(u.new))), IntegrityError, "page ")),
    (enter_before_caching, (lambda u: u.manager.cache_pages(u.held, 14), PageHashError, "has a hash already")),
    (enter_before_caching, (lambda u: u.manager.commit_external(u.held, 4), PageHashError, "has a hash already")),
    (enter_before_caching, (lambda u: u.manager.fail_external(u.held, 3), PageHashError, "has a hash already")),
    (
        shorten_before_caching,
        (
            lambda u: u.manager.commit_external(u.held, 4),
            ArgumentError,
            "got all_token_ids up to 10, allowed: up to at least 12",
        ),
    ),
]


@pytest.mark.parametrize("hash_algo", ALGORITHMS, ids=str)
@pytest.mark.parametrize(("spoil", "case"), SPOILT)
def test_an_allocation_that_fails_late_has_changed_nothing(spoil: Callable[[InUse], None], case: Case, hash_algo: Any) -> None:
    in_use = InUse(FULL, WINDOW, num_pages=32, hash_algo=hash_algo)
    in_use.held.append_output_token_ids([10, 11, 12, 13])
    spoil(in_use)
    refuse(in_use, case)


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW), (STATE,), (FULL, STATE)])
def test_computed_tokens_without_hits_are_refused_for_all_groups(specs: tuple[Any, ...], enable_caching: bool) -> None:
    """No token of a contradictory call is read."""
    in_use = InUse(*specs, num_pages=32, enable_caching=enable_caching)
    for hits in (None, in_use.manager.create_empty_page_list()):
        message = "num_new_computed_tokens 4, allowed: 0 together"
        refuse(in_use, (lambda u, hits=hits: u.start(1, 4, hits), ArgumentError, message))
    assert "new" not in in_use.manager.registry.hashes


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
    with refused(in_use.state, LookupError):
        in_use.allocate(4)


# Objects that cannot be made.


def test_eagle_may_be_asked_for_with_chunks_that_are_not_cached() -> None:
    assert not InUse(CHUNK, use_eagle=True, enable_caching=False).manager.enable_caching


BUILTIN: dict[type[Exception], tuple[type[Exception], ...]] = {
    ValueError: (OutOfPagesError, RequestTooLargeError, ArgumentError, pagepool.errors.RowOverflowError),
    RuntimeError: (DoubleFreeError, IntegrityError, PageHashError),
    IndexError: (PageIdError, pagepool.errors.RowIndexError),
    TypeError: (ArgumentTypeError,),
}


@pytest.mark.parametrize("builtin", BUILTIN)
def test_errors_are_also_the_builtin_ones_that_engines_catch(builtin: type[Exception]) -> None:
    for error in BUILTIN[builtin]:
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


@pytest.mark.parametrize(("num_new_tokens", "num_computed_tokens"), [(1, 3), (4, 0)])
def test_fewer_computed_tokens_than_the_hits_hold_are_allowed(num_new_tokens: int, num_computed_tokens: int) -> None:
    in_use = InUse()
    assert in_use.start(num_new_tokens, num_computed_tokens, in_use.look_up()) is not None
    in_use.manager.check()


def test_hits_may_be_counted_by_the_request_instead() -> None:
    in_use = InUse()
    hits, in_use.new.num_computed_tokens = in_use.manager.get_computed_pages(in_use.new)
    assert in_use.start(1, 0, hits).get_page_ids() == ([5],)
    assert in_use.manager.get_page_ids("new") == ([4, 5],)


@pytest.mark.parametrize("max_model_len", [16, 18])
def test_drafts_get_the_slots_that_the_longest_request_leaves(max_model_len: int) -> None:
    """If the length is not a multiple of the page size, the last page has slots that no token may take."""
    manager, request = make_manager(FULL, max_model_len=max_model_len), EngineRequest("a", list(range(40)))
    assert manager.allocate_slots(request, max_model_len) is not None
    request.num_computed_tokens = max_model_len
    with pytest.raises(ArgumentError, match=f"allowed: {max_model_len}"):
        manager.allocate_slots(request, 1)
    request.num_computed_tokens = max_model_len - 1
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=9) is not None
    assert len(manager.get_page_ids("a")[0]) == -(-max_model_len // 4)


def test_pages_of_a_queue_may_come_from_a_generator() -> None:
    pages = [CachePage(i) for i in range(5)]
    queue = FreeCachePageQueue(page for page in pages[:3])
    queue.append_n(iter(pages[3:]))
    assert queue.get_all_free_pages() == pages


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
    with pytest.raises(PageIdError, match="got ref count 0, allowed for a touch: at least 1"):
        in_use.pool.touch(([page],))
    in_use.pool.free_page_queue.append(page)
    in_use.pool.check()

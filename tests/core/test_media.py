"""Media: pages of encoders' outputs, which rows and requests with one key share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CrossAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    PageHashing,
    PageTable,
    RequestTraits,
    RingSpec,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
)
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    IntegrityError,
    OutOfPagesError,
    RequestTooLargeError,
    RowIndexError,
)
from pagepool.media import Medium

MAX_LEN, MOST = 64, 30
PROMPT = [1, 2, 3, 4, 5, 6]
FULL = CacheGroupSpec(FullAttentionSpec(4, 1, 8, "float32", use_mla=False))


def cross(pool: str = "kv", page_size: int = 4, most: int = MOST) -> CacheGroupSpec:
    spec = CrossAttentionSpec(page_size, 1, 8, "float32", use_mla=False, max_num_encoder_tokens=most)
    return CacheGroupSpec(spec, pool=pool)


def make_manager(pools: int = 1, num_groups: int = 1, num_pages: int = 60, num_media_pages: int = 40, **options: Any) -> Any:
    groups = [cross("media" if pools == 2 else "kv") for _ in range(num_groups)]
    sizes = {"kv": num_pages, "media": num_media_pages} if pools == 2 else num_pages
    return CacheManager(sizes, [FULL, *groups], MAX_LEN, **options)


def make_batch(manager: Any, num_rows: int = 4, **options: Any) -> RunningBatch:
    return RunningBatch(manager, PageTable(num_rows, MAX_LEN // 4, MAX_LEN), **options)


def traits(key: Any, num_tokens: int = MOST, **others: Any) -> RequestTraits:
    return RequestTraits(num_encoder_tokens=num_tokens, cross_key=key, **others)


# --- hits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("options", [{}, {"hashing": PageHashing(hash_algo="sha256")}])
def test_rows_with_one_key_share_pages(pools: int, num_groups: int, options: dict[str, Any]) -> None:
    manager = make_manager(pools, num_groups, 90, 90, **options)
    batch = make_batch(manager)
    assert batch.admit(0, PROMPT, traits=traits("a")) == 0
    first = batch.get_medium(0)
    assert [len(ids) for ids in first.page_ids] == [8] * num_groups
    assert (first.num_tokens, first.num_cached_tokens) == (MOST, 0)
    assert batch.admit(1, PROMPT, traits=traits("b")) == 0  # another medium, so other tokens too
    assert batch.admit(2, PROMPT, traits=traits("a")) == 4
    assert batch.get_medium(2).page_ids == first.page_ids
    assert batch.get_medium(2).num_cached_tokens == MOST
    assert batch.get_medium(1).num_cached_tokens == 0
    batch.check()
    batch.release([0, 1, 2])
    batch.check()
    assert manager.stats().num_held_pages == 0
    assert batch.admit(0, PROMPT, traits=traits("b")) == 4
    assert batch.get_medium(0).num_cached_tokens == MOST


def test_a_medium_hits_as_a_whole_or_not_at_all() -> None:
    manager = make_manager(2)
    batch = make_batch(manager)
    batch.admit(0, PROMPT, traits=traits("a"))
    [ids] = batch.get_medium(0).page_ids
    batch.release([0])
    manager.pools["media"].evict_pages([ids[5]])
    batch.admit(0, PROMPT, traits=traits("a"))
    assert batch.get_medium(0).num_cached_tokens == 0
    batch.admit(1, PROMPT, traits=traits("a", 29))  # another number of tokens is another medium
    assert batch.get_medium(1).num_cached_tokens == 0
    batch.check()


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"lora_id": 3}])
def test_salts_and_adapters_part_media(other: dict[str, Any]) -> None:
    batch = make_batch(make_manager())
    batch.admit(0, PROMPT, traits=traits("a"))
    assert batch.admit(1, PROMPT, traits=traits("a", **other)) == 0
    assert batch.get_medium(1).num_cached_tokens == 0


def test_nothing_of_a_nameless_medium_is_shared() -> None:
    batch = make_batch(make_manager())
    for row in (0, 1):
        assert batch.admit(row, PROMPT, traits=traits(None)) == 0
        assert batch.get_medium(row).num_cached_tokens == 0
    batch.release([0, 1])
    assert batch.admit(0, PROMPT, traits=traits(None)) == 0


def test_requests_without_a_medium_share_their_tokens() -> None:
    batch = make_batch(make_manager())
    assert batch.admit(0, PROMPT) == 0
    assert batch.admit(1, PROMPT, traits=traits("unused", 0)) == 4
    assert batch.get_medium(1) is None
    batch.release([0, 1])
    batch.check()


@pytest.mark.parametrize("caches", ["scheduled", "computed"])
def test_when_a_medium_hits(caches: Any) -> None:
    batch = make_batch(make_manager(caches=caches))
    batch.admit(0, PROMPT, traits=traits("a"))
    batch.admit(1, PROMPT, traits=traits("a"))
    assert (batch.get_medium(1).num_cached_tokens > 0) == (caches == "scheduled")
    batch.step([0, 1], [7, 7])
    batch.admit(2, PROMPT, traits=traits("a"))
    assert batch.get_medium(2).num_cached_tokens == MOST
    batch.check()


def test_without_caching_each_row_has_pages_of_its_own() -> None:
    batch = make_batch(make_manager(enable_caching=False))
    for row in (0, 1):
        assert batch.admit(row, PROMPT, traits=traits("a")) == 0
        assert batch.get_medium(row).num_cached_tokens == 0
    batch.release([0, 1])
    batch.check()


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [1, 2])
def test_requests_of_the_manager(pools: int) -> None:
    manager = make_manager(pools)
    first = EngineRequest("first", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    assert manager.allocate_slots(first, 6).get_page_ids()[0]
    medium = manager.get_medium("first")
    assert len(medium.page_ids[0]) == 8
    second = EngineRequest("second", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    hits, num_hits = manager.get_computed_pages(second)
    assert num_hits == 4
    manager.allocate_slots(second, 2, num_hits, hits)
    assert manager.get_medium("second").page_ids == medium.page_ids
    assert manager.get_medium("second").num_cached_tokens == MOST
    first.num_computed_tokens = 6
    child = EngineRequest("child", PROMPT, num_encoder_tokens=MOST, cross_key="a", num_computed_tokens=6)
    assert manager.fork(first, child) is not None
    manager.take_moves()
    assert manager.get_medium("child").page_ids == medium.page_ids
    manager.check()
    for request in (first, second, child):
        manager.free(request)
        assert manager.get_medium(request.request_id) is None
    manager.check()
    assert manager.stats().num_held_pages == 0


def test_a_request_that_did_not_run_leaves_no_medium() -> None:
    manager = make_manager()
    request = EngineRequest("r", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    manager.allocate_slots(request, 6)
    manager.free(request, num_computed_tokens=0)
    again = EngineRequest("again", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    assert manager.get_computed_pages(again)[1] == 0
    manager.allocate_slots(again, 6)
    assert manager.get_medium("again").num_cached_tokens == 0
    manager.check()


def test_a_late_request_caches_its_medium_late() -> None:
    manager = make_manager(caches="computed")
    request = EngineRequest("r", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    manager.allocate_slots(request, 6)
    other = EngineRequest("other", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    manager.allocate_slots(other, 6)
    assert manager.get_medium("other").num_cached_tokens == 0
    request.num_computed_tokens = 6
    third = EngineRequest("third", PROMPT, num_encoder_tokens=MOST, cross_key="a")
    manager.allocate_slots(third, 6)
    assert manager.get_medium("third").num_cached_tokens == MOST
    manager.check()


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_pages", "num_media_pages"), [(60, 13), (4, 40)])
def test_a_row_and_its_medium_are_admitted_together(num_pages: int, num_media_pages: int) -> None:
    manager = make_manager(2, 1, num_pages, num_media_pages)
    batch = make_batch(manager)
    assert batch.admit(0, PROMPT, traits=traits("a")) == 0
    before = manager.stats().num_held_pages
    assert batch.admit(1, [9] * 9, traits=traits("b")) is None
    assert manager.stats().num_held_pages == before
    batch.check()
    request = EngineRequest("r", [9] * 9, num_encoder_tokens=MOST, cross_key="b")
    assert manager.allocate_slots(request, 9) is None
    assert manager.get_medium("r") is None
    manager.check()
    batch.release([0])
    assert batch.admit(1, [9] * 9, traits=traits("b")) == 0


def test_a_medium_that_never_fits() -> None:
    manager = make_manager(2, 1, 60, 8)
    batch = make_batch(manager)
    with refused(
        lambda: manager.stats().num_held_pages,
        RequestTooLargeError,
        "a medium of 30 tokens needs 8 pages, the pool 'media' has 7",
    ):
        batch.admit(0, PROMPT, traits=traits("a"))
    assert batch.admit(0, PROMPT, traits=traits("a", 28)) == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: traits("a", -1), ArgumentError, "num_encoder_tokens: got -1"),
        (lambda: traits("a", 1.5), ArgumentTypeError, "num_encoder_tokens: got 1.5"),  # type: ignore[arg-type]
        (
            lambda: make_batch(make_manager()).admit(0, PROMPT, traits=traits("a", 31)),
            ArgumentError,
            "num_encoder_tokens: got 31",
        ),
        (lambda: make_batch(make_manager()).admit(0, PROMPT, traits=traits(1.5)), ArgumentTypeError, "cross_key: got float"),
        (lambda: make_batch(make_manager()).get_medium(4), RowIndexError, "row: got 4"),
        (lambda: make_plain().admit(0, PROMPT, traits=traits("a")), ArgumentError, "allowed without cross-attention: 0"),
        (lambda: make_plain().get_medium(0), ArgumentError, "get_medium: got a model without cross-attention"),
        (lambda: CacheManager(60, [cross(), FULL], MAX_LEN), ArgumentError, "cross-attention behind all others"),
        (lambda: CacheManager(60, [cross()], MAX_LEN), ArgumentError, "only groups of cross-attention"),
        (lambda: CacheManager(60, [FULL, cross(), cross(page_size=2)], MAX_LEN), ArgumentError, "page_size: got \\[2, 4\\]"),
        (lambda: cross(most=0), ArgumentError, "max_num_encoder_tokens: got 0"),
        (lambda: make_inputs(make_plain()), ArgumentError, "'cross_page_ids', which no group of the model has"),
    ],
)
def test_wrong_calls(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def make_plain() -> RunningBatch:
    return make_batch(CacheManager(60, [FULL], MAX_LEN))


def make_inputs(batch: RunningBatch) -> StepInputs:
    return StepInputs(batch, num_tokens=32, num_reqs=4, fields=["token_ids", "cross_page_ids", "encoder_lens"])


# --- rows ---------------------------------------------------------------------------------------------------------


def test_inputs_show_the_media_of_rows() -> None:
    batch = make_batch(make_manager(2, 2, 60, 60))
    inputs = make_inputs(batch)
    batch.admit(0, PROMPT, traits=traits("a"))
    batch.admit(2, PROMPT, traits=traits("b", 5))
    batch.admit(3, PROMPT)
    batch.inputs(batch.step([3, 2, 0], [7, 7, 7]), out=inputs)
    for group, ids in enumerate(inputs.cross_page_ids):
        expected = [[], [*batch.get_medium(2).page_ids[group]], [*batch.get_medium(0).page_ids[group]], []]
        assert ids.tolist() == [line + [0] * (8 - len(line)) for line in expected]
    assert inputs.encoder_lens.tolist() == [0, 5, MOST, 0]


def test_forks_moves_and_swaps() -> None:
    manager = make_manager(2)
    batch = make_batch(manager)
    batch.admit(0, PROMPT, traits=traits("a"))
    batch.admit(1, PROMPT, traits=traits("b"))
    a, b = batch.get_medium(0).page_ids, batch.get_medium(1).page_ids
    batch.fork(0, [2])
    batch.take_moves()
    batch.swap_row(0, 1)
    batch.move_row(2, 3)
    assert [batch.get_medium(row) and batch.get_medium(row).page_ids for row in range(4)] == [b, a, None, a]
    batch.check()
    batch.release([1])
    assert batch.get_medium(3).page_ids == a
    batch.check()
    assert manager.pools["media"].get_num_free_pages() == 39 - 16
    batch.release([0, 3])
    batch.check()


# --- tiers --------------------------------------------------------------------------------------------------------


def evict_medium(policy: Any = "write_back", pools: int = 1) -> tuple[CacheManager, RunningBatch]:
    """Return a manager whose host tier has the medium of key "a", of `MOST` tokens, and whose pool has it no longer."""
    sizes: dict[str, int] | int = {"kv": 100, "media": 100} if pools == 2 else 100
    manager = make_manager(pools, 1, 14 if pools == 1 else 60, 14, host_tier=HostTier(sizes, policy=policy))
    batch = make_batch(manager)
    for key in ("a", "b", "c"):
        assert batch.admit(0, PROMPT[:4], traits=traits(key)) is not None
        moves = batch.take_moves()
        batch.release([0])
        if moves.number:
            manager.complete(moves.number)
    return manager, batch


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
@pytest.mark.parametrize("pools", [1, 2])
def test_a_medium_is_hit_once_its_loads_have_come(policy: Any, pools: int) -> None:
    manager, batch = evict_medium(policy, pools)
    assert batch.admit(0, PROMPT, traits=traits("a")) is None
    moves = batch.take_moves()
    assert moves.loads.group.tolist().count(1) == 8
    assert batch.admit(0, PROMPT, traits=traits("a")) is None  # its loads have not come
    assert manager.allocate_slots(make_request("r", key="a"), 6) is None
    assert not len(batch.take_moves().loads)
    manager.complete(moves.number)
    assert batch.admit(0, PROMPT, traits=traits("a")) is not None
    medium = batch.get_medium(0)
    assert medium is not None
    assert medium.num_cached_tokens == MOST
    assert sorted(medium.page_ids[0]) == sorted(moves.loads.dst[moves.loads.group == 1].tolist())
    batch.check()
    manager.check()


def test_a_medium_whose_load_fails_is_encoded_again() -> None:
    manager, batch = evict_medium()
    assert batch.admit(0, PROMPT, traits=traits("a")) is None
    moves = batch.take_moves()
    manager.fail(moves.number, loads=[3])
    assert batch.admit(0, PROMPT, traits=traits("a")) is not None
    medium = batch.get_medium(0)
    assert medium is not None
    assert medium.num_cached_tokens == 0
    manager.check()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_media_that_wait_for_loads_do_not_evict_each_other(order: str) -> None:
    """Each pool has room for one and a half of them."""
    manager = make_manager(2, 1, 60, 4, host_tier=HostTier({"kv": 100, "media": 100}))
    batch = make_batch(manager)

    def move() -> None:
        if number := batch.take_moves().number:
            manager.complete(number)

    for key in "bac":
        assert batch.admit(0, PROMPT[:3], traits=traits(key, 8)) is not None
        move()
        batch.release([0])
        move()
    for _ in range(2):  # steps
        if any(batch.admit(0, PROMPT[:3], traits=traits(key, 8)) is not None for key in order):
            break
        move()
    assert batch.is_admitted[0]
    batch.release([0])
    assert batch.admit(0, PROMPT[:3], traits=traits("abandoned", 8)) is not None


def test_loads_of_a_medium_leave_the_pages_that_rows_are_to_have() -> None:
    manager = CacheManager(21, [FULL, cross(most=40)], MAX_LEN, host_tier=HostTier(200))
    batch = make_batch(manager)
    for key in "abc":
        assert batch.admit(0, PROMPT[:3], traits=traits(key, 40)) is not None
        if number := batch.take_moves().number:
            manager.complete(number)
        batch.release([0])
    batch.admit(0, [5] * 40)
    batch.take_moves()
    assert batch.admit(1, PROMPT[:3], traits=traits("a", 40), num_reserved_pages=5) is None
    assert manager.page_pool.get_num_free_pages() == 10
    assert batch.step([0], [6]).num_grown == 1


def test_a_hit_that_another_thread_evicts_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(1, 1, 14)
    batch, other = make_batch(manager), make_batch(manager)
    batch.admit(0, PROMPT[:4], traits=traits("a"))
    batch.release([0])
    media = manager.registry.media
    find = media._find_hits

    def find_and_lose(*arguments: Any) -> Any:
        hits = find(*arguments)
        other.admit(1, range(52))
        other.release([1])
        return hits

    monkeypatch.setattr(media, "_find_hits", find_and_lose)
    assert batch.admit(0, PROMPT[:4], traits=traits("a")) is None
    monkeypatch.undo()
    assert batch.admit(0, PROMPT[:4], traits=traits("a")) is not None
    batch.check()
    manager.check()


def test_a_medium_of_another_length_is_not_loaded() -> None:
    manager, batch = evict_medium()
    assert batch.admit(0, PROMPT, traits=traits("a", 9)) is not None  # another medium, since it has another length
    assert not len(batch.take_moves().loads)
    manager.check()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_step_that_fails_leaves_no_medium(is_released: bool) -> None:
    batch = make_batch(make_manager(), max_steps_ahead=1)
    step = batch.new_step()
    for row in (0, 1):
        batch.admit(row, PROMPT, traits=traits("a"), step=step)
    assert [batch.get_medium(row).num_cached_tokens for row in (0, 1)] == [0, MOST]
    if is_released:
        batch.release([0])
    batch.settle(step, failed=True)
    assert batch.get_medium(1).num_cached_tokens == 0
    batch.admit(2, PROMPT, traits=traits("a"))
    assert batch.get_medium(2).num_cached_tokens == 0
    batch.check()


# --- the encoder runs, or not -------------------------------------------------------------------------------------


def num_cached(manager: Any, key: Any = "a") -> int:
    """Return how many tokens of a medium a new request hits."""
    request = EngineRequest("asks", [9, 9], num_encoder_tokens=MOST, cross_key=key)
    assert manager.allocate_slots(request, 2) is not None
    medium = manager.get_medium("asks")
    manager.free(request, num_computed_tokens=0)
    return int(medium.num_cached_tokens)


def make_request(name: str, prompt: list[int] = PROMPT, key: Any = "a", **options: Any) -> EngineRequest:
    return EngineRequest(name, prompt, num_encoder_tokens=MOST, cross_key=key, **options)


def test_a_request_with_a_wrong_session_leaves_no_medium() -> None:
    manager = make_manager()
    request: Any = make_request("r")
    request.session_id = 5
    with pytest.raises(ArgumentTypeError, match="session_id: got int"):
        manager.allocate_slots(request, 6)
    assert manager.get_medium("r") is None
    assert manager.stats().num_held_pages == 0


def test_a_medium_does_not_evict_what_its_request_has_hit() -> None:
    manager = make_manager(1, 1, 23)
    first = make_request("first", [*range(20)])
    manager.allocate_slots(first, 20)
    manager.allocate_slots(EngineRequest("others", [7] * 36), 36)  # no other page is free
    [ids] = manager.get_medium("first").page_ids
    first.num_computed_tokens = 20
    manager.free(first)
    manager.page_pool.evict_pages(ids)
    again = make_request("again", [*range(20)])
    hits, num_hits = manager.get_computed_pages(again)
    assert num_hits == 16
    assert manager.allocate_slots(again, 4, num_hits, hits) is not None
    assert manager.get_medium("again").num_cached_tokens == 0
    manager.check()


def test_a_row_that_waits_for_tokens_offers_no_medium() -> None:
    batch = make_batch(make_manager())
    batch.admit(0, PROMPT, num_external_tokens=4, traits=traits("a"))
    batch.admit(1, PROMPT, traits=traits("a"))
    assert batch.get_medium(1).num_cached_tokens == 0
    batch.release([1])
    batch.commit_external(0, 4)
    batch.plan([0])
    batch.admit(1, PROMPT, traits=traits("a"))
    assert batch.get_medium(1).num_cached_tokens == MOST


def test_a_request_that_waits_for_tokens_offers_no_medium() -> None:
    manager = make_manager()
    request = make_request("r")
    manager.allocate_slots(request, 0, num_external_computed_tokens=5, delay_cache_pages=True)
    assert num_cached(manager) == 0
    manager.commit_external(request, 5)
    request.num_computed_tokens = 5
    assert num_cached(manager) == 0
    manager.allocate_slots(request, 1)
    request.num_computed_tokens = 6
    assert num_cached(manager) == MOST


@pytest.mark.parametrize("num_computed", [4, 6])
def test_a_computed_request_with_hits_caches_its_medium_once_it_ran(num_computed: int) -> None:
    manager = make_manager(caches="computed")
    first = make_request("first")
    manager.allocate_slots(first, 6)
    first.num_computed_tokens = 6
    manager.cache_pages(first, 6)
    manager.free(first, num_computed_tokens=6)
    assert num_cached(manager) == MOST
    manager.reset_prefix_cache()
    again = make_request("again")
    manager.allocate_slots(again, 6)
    again.num_computed_tokens = num_computed - 4
    assert (num_cached(manager) > 0) == (num_computed == 6)


def test_a_computed_row_that_never_ran_leaves_no_medium() -> None:
    manager = make_manager(caches="computed")
    batch = make_batch(manager)
    batch.admit(0, PROMPT, traits=traits("a"))
    batch.release([0])
    assert num_cached(manager) == 0


def test_a_request_that_ran_keeps_its_medium() -> None:
    manager = make_manager()
    request = make_request("r")
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    manager.free(request, num_computed_tokens=6)
    assert num_cached(manager) == MOST


def test_a_row_whose_first_step_failed_offers_its_medium_again() -> None:
    manager = make_manager()
    batch = make_batch(manager, max_steps_ahead=1)
    step = batch.new_step()
    batch.admit(0, PROMPT, traits=traits("a"), step=step)
    batch.admit(1, PROMPT, traits=traits("a"), step=step)
    batch.settle(step, failed=True)
    assert num_cached(manager) == 0
    assert batch.get_medium(1).num_cached_tokens == 0
    assert batch.get_medium(1).page_ids == batch.get_medium(0).page_ids
    step = batch.plan([0], [6])
    assert num_cached(manager) == MOST
    batch.settle(step, [1])
    batch.release([0, 1])
    assert num_cached(manager) == MOST


def test_a_row_that_a_failed_step_ends_gives_its_medium_back() -> None:
    state = CacheGroupSpec(MambaSpec(1, ((4, 8),), "float32"), pool="states")
    manager = CacheManager({"kv": 60, "states": 12, "media": 40}, [FULL, state, cross("media")], MAX_LEN)
    tables = MultiGroupPageTable(4, MAX_LEN, MAX_LEN, [4, 1])
    batch = RunningBatch(manager, tables)
    step = batch.new_step()
    batch.admit(0, PROMPT, traits=traits("a"), step=step)
    batch.take_moves()
    batch.settle(step, [1])
    step = batch.plan([0])
    assert batch.settle(step, failed=True).tolist() == [0]
    assert manager.stats().num_held_pages == 0
    assert num_cached(manager) == MOST  # its first step has run


def test_a_request_with_another_medium_is_hashed_again() -> None:
    manager = make_manager()
    first = make_request("first")
    manager.allocate_slots(first, 6)
    waiting = make_request("waiting")
    assert manager.get_computed_pages(waiting)[1] == 4
    waiting.cross_key = "b"
    assert manager.get_computed_pages(waiting)[1] == 0
    waiting.cross_key, waiting.num_encoder_tokens = "a", 5
    assert manager.get_computed_pages(waiting)[1] == 0


def test_media_of_two_managers_over_one_pool() -> None:
    one = make_manager()
    two = CacheManager(60, [FULL, cross()], MAX_LEN, page_pool=one.page_pool)
    request = make_request("r")
    one.allocate_slots(request, 6)
    assert num_cached(two) == 0
    one.free(request, num_computed_tokens=0)
    assert num_cached(two) == 0
    one.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    assert num_cached(one) == num_cached(two) == MOST
    with pytest.raises(ArgumentError, match="type_id: got"):
        CacheManager(60, [FULL, cross(most=MOST + 1)], MAX_LEN, page_pool=one.page_pool)


@pytest.mark.parametrize("wrong", [-1, "x", None])
def test_a_wrong_count_of_one_request_refuses_nobody_else(wrong: Any) -> None:
    manager = make_manager(caches="computed")
    request: Any = make_request("r")
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = wrong
    assert num_cached(manager) == 0


def test_what_get_medium_takes_and_returns() -> None:
    manager = make_manager()
    with pytest.raises(ArgumentTypeError, match="request_id: got list"):
        manager.get_medium([])
    manager.allocate_slots(EngineRequest("r", PROMPT), 6)
    assert manager.get_medium("r") is None
    assert manager.get_medium("nobody") is None


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_row", [False, True])
def test_a_medium_beside_which_its_request_never_fits(is_row: bool) -> None:
    manager = make_manager(1, 1, 10)  # 9 pages: 8 of them for the medium
    message = "a medium of 30 tokens needs 8 pages, and 2 pages of its request at once, the pool has 9: no waiting helps"
    if is_row:
        batch = make_batch(manager)
        with refused(lambda: manager.stats().num_held_pages, RequestTooLargeError, message):
            batch.admit(0, PROMPT, traits=traits("a"))
        assert batch.admit(0, PROMPT, max_num_new_tokens=4, traits=traits("a")) == 0
        return
    with refused(lambda: manager.stats().num_held_pages, RequestTooLargeError, message):
        manager.allocate_slots(make_request("r"), 6)
    with pytest.raises(RequestTooLargeError, match="6 tokens and 30 encoder tokens needs 10 pages, the pool has 9"):
        manager.require_capacity(6, num_encoder_tokens=MOST)
    manager.require_capacity(4, num_encoder_tokens=MOST)
    with pytest.raises(ArgumentError, match="num_encoder_tokens: got 31"):
        manager.require_capacity(4, num_encoder_tokens=31)
    assert manager.allocate_slots(make_request("r"), 4) is not None


def test_sinks_leave_less_room_for_media() -> None:
    full = CacheGroupSpec(FullAttentionSpec(4, 1, 8, "float32", use_mla=False, num_sink_tokens=8))
    manager = CacheManager(12, [full, cross()], MAX_LEN)
    with pytest.raises(RequestTooLargeError, match="the pool has 9"):
        manager.allocate_slots(make_request("r"), 6)


def test_a_manager_that_does_not_raise_for_requests_that_never_fit() -> None:
    class Quiet(CacheManager):
        _on_too_large = staticmethod(lambda *_: None)

    manager = Quiet(9, [FULL, cross()], MAX_LEN)
    assert manager.allocate_slots(make_request("r"), 6) is None
    assert Quiet(7, [FULL, cross()], MAX_LEN).allocate_slots(make_request("r"), 6) is None


@pytest.mark.parametrize("enable_caching", [False, True])
def test_a_fork_names_the_same_medium(enable_caching: bool) -> None:
    manager = make_manager(enable_caching=enable_caching)
    request = make_request("r")
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    for other in ({"key": "b"}, {"key": None}):
        with pytest.raises(ArgumentError, match="cross_key"):
            manager.fork(request, make_request("child", num_computed_tokens=6, **other))
    assert manager.fork(request, make_request("child", num_computed_tokens=6)) is not None
    assert manager.get_medium("child").num_cached_tokens == MOST


@pytest.mark.parametrize("is_external", [False, True])
def test_a_fork_of_a_row_whose_encoder_did_not_run_runs_it(is_external: bool) -> None:
    manager = make_manager()
    batch = make_batch(manager)
    step = batch.new_step()
    batch.admit(0, PROMPT, traits=traits("a"), step=step, num_external_tokens=5 * is_external)
    if is_external:
        batch.commit_external(0, 5)
    else:
        batch.settle(step, failed=True)
    batch.fork(0, [1])
    batch.take_moves()
    assert batch.get_medium(1).num_cached_tokens == 0
    batch.release([0])
    batch.settle(batch.plan([1], 6 - 5 * is_external), [7])
    batch.release([1])
    assert num_cached(manager) == MOST


def test_check_compares_the_rows_of_media() -> None:
    batch = make_batch(make_manager())
    batch.admit(0, PROMPT, traits=traits("a"))
    batch.check()
    batch.cross_tables[0].clear_row(0)
    with pytest.raises(IntegrityError, match=r"row 0: got .* of cross-attention, allowed"):
        batch.check()


def test_a_router_sees_no_media() -> None:
    """Events tell the pages of tokens, whose keys have the medium, and nothing of the media's own pages."""
    manager = make_manager(hashing=PageHashing(hash_algo="sha256"))
    manager.enable_events()
    for name, key in (("a", "a"), ("b", "b")):
        request = make_request(name, key=key)
        manager.allocate_slots(request, 6)
        request.num_computed_tokens = 6
    num_cached(manager)
    events = manager.take_events()
    assert [[*event.token_ids] for event in events] == [[1, 2, 3, 4]] * 2
    manager.take_events()
    assert len(manager.snapshot_events()) == 2


@pytest.mark.parametrize("caches", ["scheduled", "computed"])
def test_threads_swap_rows_and_read_media(caches: Any) -> None:
    manager = make_manager(caches=caches)
    batch = make_batch(manager)
    batch.admit(0, PROMPT, traits=traits("a"))
    batch.admit(1, PROMPT, traits=traits("b"))
    stays = {int(batch.stays[row]): batch.get_medium(row).page_ids for row in (0, 1)}
    stop, wrong = Event(), []

    def read() -> None:
        while not stop.is_set():
            with manager.registry.lock:
                stay, medium = int(batch.stays[0]), batch.get_medium(0)
                wrong.extend([medium] if medium is None or medium.page_ids != stays[stay] else [])

    thread = Thread(target=read)
    thread.start()
    for _ in range(2000):
        batch.swap_row(0, 1)
    stop.set()
    thread.join()
    assert not wrong
    batch.check()


WINDOW = (CacheGroupSpec(SlidingWindowSpec(4, 1, 8, "float32", use_mla=False, sliding_window=9)),)
RING = (CacheGroupSpec(RingSpec(8, 4, (8,), "float32")),)
STATE = (CacheGroupSpec(MambaSpec(1, ((4, 8),), "float32", checkpoint_interval=8), pool="states"),)
OTHER_GROUPS: tuple[tuple[CacheGroupSpec, ...], ...] = ((), WINDOW, RING, STATE)
Access = tuple[Any, list[tuple[int, int]]]


class Device:
    """What lies in the pages of media, by the steps that were launched: the key of the medium that an encoder wrote there."""

    def __init__(self) -> None:
        self.contents: dict[tuple[int, int], Any] = {}
        self.tier: dict[tuple[int, int], Any] = {}
        self.num_loaded = 0
        self.launched: list[tuple[Callable[[], None], list[Access], list[Access], set[Any]]] = []
        self.have_run: set[Any] = set()  # owners whose encoders were launched, and did not fail

    def move(self, manager: Any, moves: Any, rng: Random) -> None:
        """Make the moves of media between pool and tier; some loads fail."""
        first = len(manager.kv_cache_groups)
        for copies, source, target in (
            (moves.saves, self.contents, self.tier),
            (moves.loads, self.tier, self.contents),
        ):
            pages = zip(copies.src.tolist(), copies.dst.tolist(), copies.group.tolist(), strict=True)
            of_media = [(src, dst, group - first) for src, dst, group in pages if group >= first]
            target |= {(group, dst): source.get((group, src)) for src, dst, group in of_media}
        if moves.number:
            wrong = [i for i, group in enumerate(moves.loads.group.tolist()) if group >= first and rng.random() < 0.05]
            self.contents |= {(int(moves.loads.group[i]) - first, int(moves.loads.dst[i])): "garbage" for i in wrong}
            manager.fail(moves.number, loads=wrong)
        self.num_loaded += moves.loads.group.tolist().count(first)

    def launch(self, media: dict[Any, tuple[Any, Medium]], move: Callable[[], None]) -> None:
        """Launch the moves before a step, and the step of owners, each with the key of its medium: encoders run once for an
        owner that did not hit.
        """
        writes, reads, starting = [], [], set()
        for owner, (key, medium) in media.items():
            pages = [(group, page) for group, ids in enumerate(medium.page_ids) for page in ids]
            if medium.num_cached_tokens == 0 and owner not in self.have_run:
                writes.append((key, pages))
                starting.add(owner)
            reads.append((key, pages))
        self.have_run |= starting
        self.launched.append((move, writes, reads, starting))

    def run(self) -> None:
        """Run the first launched step: each owner reads its own medium."""
        move, writes, reads, _ = self.launched.pop(0)
        move()
        for key, pages in writes:
            self.contents |= dict.fromkeys(pages, key)
        for key, pages in reads:
            assert {self.contents.get(page) for page in pages} == {key}

    def fail(self) -> None:
        """Fail all launched steps: what they write is garbage, where it is not what was there."""
        for move, writes, _, starting in self.launched:
            move()
            self.have_run -= starting
            for key, pages in writes:
                self.contents |= {page: "garbage" for page in pages if self.contents.get(page) != key}
        self.launched.clear()


class Rows:
    """An engine of rows, with up to one step ahead."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.depth, caches = rng.choice((0, 1)), rng.choice(("scheduled", "computed"))
        own = rng.choice(OTHER_GROUPS)
        sizes = {"kv": rng.choice((60, 90)), "media": rng.choice((40, 60)), "states": 30}
        groups = [FULL, *own, *[cross(rng.choice(("kv", "media")))] * rng.choice((1, 2))]
        named = {name: size for name, size in sizes.items() if name in {group.pool for group in groups}}
        num_pages, num_host_pages = named, {name: size // 2 for name, size in named.items()}
        if len(named) == 1:
            num_pages, num_host_pages = sizes["kv"], sizes["kv"] // 2
        tier = {"host_tier": HostTier(num_host_pages)} if seed % 2 else {}
        self.manager = CacheManager(num_pages, groups, MAX_LEN, caches=caches, **tier)
        tables = MultiGroupPageTable(6, MAX_LEN, MAX_LEN, [group.kv_cache_spec.page_size for group in (FULL, *own)])
        self.batch = RunningBatch(self.manager, tables, max_steps_ahead=self.depth)
        self.device, self.keys, self.steps = Device(), {}, []
        self.num_hits = self.num_shared = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.launch()
            while len(self.steps) > self.depth:
                self.settle()
            self.change()
            self.batch.check()

    def list_rows(self, *, are_free: bool = False) -> list[int]:
        return [row for row in range(6) if self.batch.is_admitted[row] != are_free]

    def launch(self) -> None:
        batch, rng, step = self.batch, self.rng, self.batch.new_step()
        admitted = [row for row in self.list_rows(are_free=True) if rng.random() < 0.4 and self.admit(row, step)]
        ready = [row for row in self.list_rows() if row not in admitted and not batch.num_external_tokens[row]]
        left = (batch.num_tokens - batch.num_computed_tokens + batch.num_ahead_tokens)[ready]
        batch.plan([row for row, num in zip(ready, left, strict=True) if num > 0], step=step)
        move = partial(self.device.move, self.manager, batch.take_moves(), rng)
        media = {row: batch.get_medium(row) for row in step.rows.tolist() if batch.is_admitted[row]}
        stays = {row: int(batch.stays[row]) for row in media}
        seen = {stays[row]: (self.keys[stays[row]], medium) for row, medium in media.items() if medium is not None}
        self.device.launch(seen, move)
        are_sampled = (batch.num_computed_tokens == batch.num_tokens)[step.rows]
        self.steps.append((step, are_sampled.astype(int)))

    def admit(self, row: int, step: Any) -> bool:
        rng, key = self.rng, self.rng.choice(("a", "b", "c", None))
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        options = {"num_external_tokens": rng.choice((0, 0, 3)), "max_num_new_tokens": rng.choice((None, 2))}
        if self.batch.admit(row, prompt, traits=traits(key, rng.choice((MOST, 9, 0))), step=step, **options) is None:
            return False
        medium, stay = self.batch.get_medium(row), int(self.batch.stays[row])
        if medium is not None:
            self.keys[stay] = key or stay, medium.num_tokens
            self.num_hits += medium.num_cached_tokens > 0
        return True

    def settle(self) -> None:
        (step, counts), rng = self.steps.pop(0), self.rng
        if len(step) and rng.random() < 0.15:
            self.device.fail()
            self.batch.settle(step, failed=True)
            self.steps.clear()
            return
        self.device.run()
        self.batch.settle(step, [rng.randrange(3) for _ in range(counts.sum())], counts)

    def change(self) -> None:
        batch, rng = self.batch, self.rng
        for row in self.list_rows():
            if batch.num_external_tokens[row] and rng.random() < 0.5:
                most = int(batch.num_external_tokens[row])
                end = rng.choice((batch.commit_external, batch.fail_external))
                end(row, most if end == batch.commit_external else rng.randint(0, most))
            elif batch.num_tokens[row] > 50 or rng.random() < 0.2:
                batch.release([row])
        if rng.random() < 0.3:
            batch.swap_row(*rng.sample(range(6), 2))
        free, rows = self.list_rows(are_free=True), self.list_rows()
        if not self.steps and free and rows and rng.random() < 0.4:
            self.fork(rng.choice(rows), free[0])

    def fork(self, row: int, target: int) -> None:
        batch = self.batch
        if batch.num_external_tokens[row] or not batch.num_computed_tokens[row] or batch.get_medium(row) is None:
            return
        if int(batch.stays[row]) not in self.device.have_run and batch.get_medium(row).num_cached_tokens == 0:
            return  # its step has failed
        try:
            batch.fork(row, [target])
        except OutOfPagesError:
            return
        self.device.move(self.manager, batch.take_moves(), self.rng)
        self.keys[int(batch.stays[target])] = self.keys[int(batch.stays[row])]
        assert batch.get_medium(target).page_ids == batch.get_medium(row).page_ids
        self.num_shared += 1


@pytest.mark.parametrize("seed", range(12))
def test_rows_read_their_own_media(seed: int) -> None:
    rows = Rows(seed)
    rows.run(150)
    assert rows.num_hits
    rows.batch.release(rows.list_rows())
    while rows.device.launched:
        rows.device.run()
    rows.device.move(rows.manager, rows.batch.take_moves(), rows.rng)
    assert rows.manager.stats().num_held_pages == 0


class Requests:
    """An engine of requests that waits for its steps, some of which fail."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        own, caches = rng.choice(OTHER_GROUPS), rng.choice(("scheduled", "computed"))
        tier_sizes = {"kv": 60, "media": 30} | ({"states": 20} if own is STATE else {})
        tier = {"host_tier": HostTier(tier_sizes)} if seed % 2 else {}
        groups, sizes = [FULL, *own, cross("media")], {"kv": 50, "media": 24, "states": 30}
        named = {name: size for name, size in sizes.items() if name in {group.pool for group in groups}}
        self.manager = CacheManager(named, groups, MAX_LEN, caches=caches, **tier)
        self.device, self.names = Device(), iter(range(10**6))
        self.running: list[EngineRequest] = []
        self.waiting: list[EngineRequest] = []  # for tokens from elsewhere
        self.num_hits = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            planned = self.plan()
            move = partial(self.device.move, self.manager, self.manager.take_moves(), self.rng)
            media = {
                request.request_id: (self.key_of(request), self.manager.get_medium(request.request_id)) for request in planned
            }
            self.device.launch({name: each for name, each in media.items() if each[1] is not None}, move)
            if self.rng.random() < 0.15:
                self.device.fail()
                for request in planned:
                    self.manager.free(request, num_computed_tokens=request.num_computed_tokens)
                    self.running.remove(request)
                    assert self.manager.get_medium(request.request_id) is None
            else:
                self.device.run()
                for request in planned:
                    request.num_computed_tokens = request.num_tokens
            self.change()
            self.manager.check()

    def key_of(self, request: EngineRequest) -> Any:
        return request.cross_key or request.request_id.partition(" ")[0], request.num_encoder_tokens

    def plan(self) -> list[EngineRequest]:
        rng, manager, planned = self.rng, self.manager, []
        for _ in range(rng.randint(0, 3)):
            options: dict[str, Any] = {"num_encoder_tokens": rng.choice((0, 5, 20)), "cross_key": rng.choice(("a", "b", None))}
            prompt = [rng.randrange(2) for _ in range(rng.randint(2, 20))]
            request = EngineRequest(f"r{next(self.names)}", prompt, **options)
            hits, num_hits = manager.get_computed_pages(request)
            num_left = request.num_tokens - num_hits
            is_external = rng.random() < 0.2 and num_left > 1
            amounts = {"num_external_computed_tokens": num_left - 1, "delay_cache_pages": True} if is_external else {}
            if manager.allocate_slots(request, 0 if is_external else num_left, num_hits, hits, **amounts) is None:
                assert manager.get_medium(request.request_id) is None
                continue
            medium = manager.get_medium(request.request_id)
            assert (medium is None) == (request.num_encoder_tokens == 0)
            self.num_hits += medium is not None and medium.num_cached_tokens > 0
            request.num_computed_tokens = num_hits
            (self.waiting if is_external else planned).append(request)
        self.running += planned
        return planned

    def change(self) -> None:
        rng, manager = self.rng, self.manager
        for request in [*self.waiting]:
            if rng.random() < 0.5:
                self.waiting.remove(request)
                manager.free(request)
        if self.running and rng.random() < 0.5:
            request = rng.choice(self.running)
            name = f"{request.request_id} {next(self.names)}"
            options = {"num_encoder_tokens": request.num_encoder_tokens, "cross_key": request.cross_key}
            child = EngineRequest(name, request.all_token_ids, num_computed_tokens=request.num_computed_tokens, **options)
            if (request.cross_key or not request.num_encoder_tokens) and manager.fork(request, child) is not None:
                self.running.append(child)
                mine, others = manager.get_medium(name), manager.get_medium(request.request_id)
                assert (mine and mine.page_ids) == (others and others.page_ids)
        while self.running and rng.random() < 0.6:
            request = self.running.pop(rng.randrange(len(self.running)))
            manager.free(request, num_computed_tokens=rng.choice((None, request.num_computed_tokens)))


@pytest.mark.parametrize("seed", range(8))
def test_requests_read_their_own_media(seed: int) -> None:
    requests = Requests(seed)
    requests.run(150)
    assert requests.num_hits
    assert (requests.device.num_loaded > 0) == (seed % 2 == 1)
    for request in requests.running + requests.waiting:
        requests.manager.free(request)
    requests.device.move(requests.manager, requests.manager.take_moves(), requests.rng)
    assert requests.manager.stats().num_held_pages == 0

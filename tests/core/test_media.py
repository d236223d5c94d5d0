"""Media: pages of encoders' outputs, which rows and requests with one key share."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
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
    PageHashing,
    PageTable,
    RequestTraits,
    RunningBatch,
    StepInputs,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError, RowIndexError

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
    assert batch.get_medium(1).page_ids == ((),)
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
    with refused(lambda: manager.stats().num_held_pages, RequestTooLargeError, "a medium needs 8 pages, the pool has 7"):
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


def test_media_are_not_saved_in_a_tier() -> None:
    manager = make_manager(1, 1, 14, host_tier=HostTier(100))
    batch = make_batch(manager)
    for key in ("a", "b", "c"):
        batch.admit(0, PROMPT[:4], traits=traits(key))
        batch.release([0])
        if number := batch.take_moves().number:
            manager.complete(number)
    assert manager.stats().host_tier.num_cached_pages <= 3  # pages of tokens alone


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


class Device:
    """What lies in the pages of media: the key of the medium that an encoder wrote there."""

    def __init__(self, batch: RunningBatch) -> None:
        self.batch, self.contents = batch, {}
        self.keys: dict[int, Any] = {}  # by stay

    def run(self, rows: list[int], keys: dict[int, Any], has_failed: bool) -> None:
        """Run the encoders of media that were not hit; then each row reads its medium, unless the step fails."""
        read = []
        for row in rows:
            medium, stay = self.batch.get_medium(row), int(self.batch.stays[row])
            pages = [(group, page) for group, ids in enumerate(medium.page_ids) for page in ids]
            if medium.num_cached_tokens == 0 and stay not in self.keys:
                lost = [page for page in pages if self.contents.get(page) != keys[stay]] if has_failed else []
                self.contents |= dict.fromkeys(lost, "garbage") if has_failed else dict.fromkeys(pages, keys[stay])
            read.append((pages, stay))
        for pages, stay in read if not has_failed else ():
            self.keys[stay] = keys[stay]
            assert {self.contents[page] for page in pages} <= {keys[stay]}


@pytest.mark.parametrize("seed", range(8))
def test_rows_read_their_own_media(seed: int) -> None:
    rng = Random(seed)
    pools, caches = rng.choice((1, 2)), rng.choice(("scheduled", "computed"))
    manager = make_manager(pools, rng.choice((1, 2)), rng.choice((60, 90)), rng.choice((40, 60)), caches=caches)
    batch = make_batch(manager, 6, max_steps_ahead=1)
    device, keys = Device(batch), {}
    num_hits = 0
    for _ in range(150):
        step, admitted = batch.new_step(), []
        for row in [row for row in range(6) if not batch.is_admitted[row] and rng.random() < 0.5]:
            key, prompt = rng.choice("abcd"), [rng.randrange(3) for _ in range(rng.randint(1, 9))]
            if batch.admit(row, prompt, traits=traits(key, rng.choice((MOST, 9))), step=step) is not None:
                medium = batch.get_medium(row)
                keys[int(batch.stays[row])] = key, medium.num_tokens
                num_hits += medium.num_cached_tokens > 0
                admitted.append(row)
        running = [row for row in range(6) if batch.is_admitted[row] and row not in admitted]
        batch.plan(running, (batch.num_tokens - batch.num_computed_tokens)[running].clip(1), step=step)
        batch.take_moves()
        has_failed = rng.random() < 0.15
        rows = [row for row in step.rows.tolist() if batch.is_admitted[row]]
        device.run(rows, keys, has_failed)
        if has_failed:
            batch.settle(step, failed=True)
            for row in rows:
                if batch.is_admitted[row] and row in admitted:
                    assert batch.get_medium(row).num_cached_tokens == 0 or int(batch.stays[row]) not in device.keys
        else:
            batch.settle(step, [rng.randrange(3) for _ in range(len(step))])
        batch.check()
        for row in range(6):
            if batch.is_admitted[row] and (batch.num_tokens[row] > 50 or rng.random() < 0.2):
                batch.release([row])
        if rng.random() < 0.3:
            src, tgt = rng.sample(range(6), 2)
            batch.swap_row(src, tgt)
        batch.check()
    assert num_hits


@pytest.mark.parametrize("seed", range(6))
def test_requests_read_their_own_media(seed: int) -> None:
    """Pages that a medium hits have been written for its key; nothing is held once all requests are free."""
    rng = Random(seed)
    tier = {"host_tier": HostTier(60)} if seed % 2 else {}
    manager = make_manager(1 + seed % 2, 1, 50, 24, caches=rng.choice(("scheduled", "computed")), **tier)
    running: dict[str, EngineRequest] = {}
    contents: dict[int, Any] = {}
    for number in range(200):
        action, name = rng.random(), f"r{number}"
        if action < 0.4:
            options: dict[str, Any] = {"num_encoder_tokens": rng.choice((0, 5, 20)), "cross_key": rng.choice(("a", "b", None))}
            request = EngineRequest(name, [rng.randrange(2) for _ in range(rng.randint(1, 20))], **options)
            hits, num_hits = manager.get_computed_pages(request)
            if manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits) is None:
                assert manager.get_medium(name) is None
                continue
            running[name], medium = request, manager.get_medium(name)
            content = request.cross_key or name, medium.num_tokens
            assert medium.num_cached_tokens == 0 or {contents[page] for page in medium.page_ids[0]} == {content}
            contents |= dict.fromkeys(medium.page_ids[0], content)
            request.num_computed_tokens = request.num_tokens
        elif running and action < 0.6:
            request = running[rng.choice([*running])]
            options = {"num_encoder_tokens": request.num_encoder_tokens, "cross_key": request.cross_key}
            child = EngineRequest(name, request.all_token_ids, num_computed_tokens=request.num_computed_tokens, **options)
            if (request.cross_key or not request.num_encoder_tokens) and manager.fork(request, child) is not None:
                running[name] = child
                assert manager.get_medium(name) is manager.get_medium(request.request_id)
        elif running:
            manager.free(running.pop(rng.choice([*running])))
        if moves := manager.take_moves().number:
            manager.complete(moves)
        manager.check()
    for request in running.values():
        manager.free(request)
    assert manager.stats().num_held_pages == 0

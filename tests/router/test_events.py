"""Events of the device and of a host tier against the oracle on random work, what each field says, and what is refused.

PAGEPOOL_TEST_OPERATIONS: a tenth of so many calls are made in all for each of the two random tests without a tier.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from admissions import admission
from features import Features, run_workload
from hybrids import PROMPT, allocate, make_batch, make_manager, make_request
from pairs import FeaturedTwins, make_managers, run_twins, with_room
from settings import HASHING, NUM_OPERATIONS, SETTINGS, STATE_SETTINGS, Setting
from threads import run_threads
from twin_engine import Feature, Request
from twins import OracleTwin, PackageTwin, Twins
from workload import RandomWorkload

import pagepool
from pagepool.compat.easydel.names import RequestPageHashes
from pagepool.errors import ArgumentError, MovesDueError, PageHashError
from pagepool.page_pool.pages import forget_names

msgspec = pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")

from event_managers import FULL, make_told, run_request  # noqa: E402
from router import Router  # noqa: E402
from wire import decode, decode_batch  # noqa: E402

from pagepool.events import AllBlocksCleared, BlockRemoved, EventBatch, encode_batch  # noqa: E402

MASK = (1 << 64) - 1
CACHING = [setting for setting in SETTINGS if setting.enable_caching]
STATES = [setting for setting in STATE_SETTINGS if setting.enable_caching]
ALGORITHMS = {name: options for name, options in HASHING.items() if "keep_token_ids" not in options}
ALGORITHMS["sha256_cbor"] = {"hash_algo": "sha256_cbor", "hash_seed": 7}
NUM_CALLS = max(NUM_OPERATIONS // (10 * len(CACHING)), 50)
PAIRS = [
    pytest.param(setting, algorithm, id=f"{setting.name}, {algorithm}", marks=() if (i + j) % 5 == 0 else pytest.mark.slow)
    for i, setting in enumerate([*CACHING, *STATES])
    for j, algorithm in enumerate(ALGORITHMS)
]
"""Each setting with each algorithm: all pairs are slow but one of each setting."""


class ToldTwins(FeaturedTwins):
    """Twins whose events begin anew now and then, and whose names are dropped as soon as nobody needs them."""

    def compare_states(self) -> None:
        super().compare_states()
        manager = self.system.manager
        if self.num_calls % 50 == 40:
            manager.event_source.start_over()
        if self.num_calls % 3 == 0:
            forget_names(manager.page_pool.store)


def run_told(setting: Setting, algorithm: str, num_calls: int, **options: bool) -> pagepool.CacheManager:
    """Run requests, with forks where the setting has states, and return the manager."""
    if algorithm == "sha256_cbor":
        pytest.importorskip("cbor2")
    seed = zlib.crc32(f"{setting.name} {algorithm} events".encode())
    features = Features(events=True, states=setting in STATES, forks=setting in STATES, **options)

    def make_twins(setting: Setting, num_pages: int) -> Twins:
        oracle, manager = make_managers(setting, num_pages, features, seed, [ALGORITHMS[algorithm]])
        return ToldTwins(OracleTwin(oracle), PackageTwin(manager), features, seed)

    with_pages = with_room(setting) if features.tier else setting
    return run_workload(RandomWorkload, with_pages, make_twins, seed, num_calls, features).system.manager


@pytest.mark.parametrize(("setting", "algorithm"), PAIRS)
def test_a_router_knows_what_a_manager_has_cached(setting: Setting, algorithm: str) -> None:
    run_told(setting, algorithm, NUM_CALLS // 4 + 25)


@pytest.mark.parametrize(("i", "algorithm"), [*enumerate(name for name in ALGORITHMS if name != "weak")])
def test_a_router_knows_what_is_in_both_places(i: int, algorithm: str) -> None:
    """Each algorithm with a quarter of the settings, or all of them in long runs."""
    every, num_calls = (32, 300) if NUM_OPERATIONS < 100_000 else (8, NUM_CALLS + 500)
    settings = [*CACHING, *STATES][(5 + 8 * i) % every :: every]
    managers = [run_told(setting, algorithm, num_calls, tier=True) for setting in settings]
    assert sum(manager.stats().host_tier.num_saved_pages for manager in managers) > 0


@pytest.mark.parametrize("hashes_as_bytes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=setting.name, marks=pytest.mark.slow if i % 2 else ())
        for i, setting in enumerate([*CACHING, *STATES])
    ],
)
def test_a_router_knows_what_a_batch_has_cached(setting: Setting, hashes_as_bytes: bool) -> None:
    seed = zlib.crc32(f"{setting.name} batch events".encode()) // 8 * 8 + 4 * hashes_as_bytes
    features = Features(events=True, states=setting in STATES, forks=setting in STATES)
    run_twins("rows", setting, features, seed, NUM_CALLS // 2 + 25)


# --- what each field says -------------------------------------------------------------------------------------


def test_a_batch_on_the_wire() -> None:
    """Arrays and maps in vLLM's format, with its order of fields, without default values."""
    manager = make_told(hash_seed=1)
    request = run_request(manager, list(range(9)))
    events = manager.take_events()
    ts, [stored], rank = msgspec.msgpack.decode(encode_batch(EventBatch(1.5, events, 3)))
    assert (ts, rank) == (1.5, 3)
    hashes = [page_hash.hash_value & MASK for page_hash in RequestPageHashes(manager.registry)[request.request_id]]
    assert list(stored.items()) == [
        *[("type", "BlockStored"), ("block_hashes", hashes), ("parent_block_hash", None), ("token_ids", list(range(8)))],
        *[("block_size", 4), ("lora_id", None), ("medium", "GPU"), ("lora_name", None)],
        *[("group_idx", 0), ("kv_cache_spec_kind", "full_attention")],
    ]
    manager.free(request)
    manager.page_pool.evict_pages([2])
    batch = msgspec.msgpack.decode(encode_batch(EventBatch(2.0, manager.take_events())))
    assert batch == [2.0, [{"type": "BlockRemoved", "block_hashes": hashes[1:], "medium": "GPU", "group_idx": 0}], None]
    manager.reset_prefix_cache()
    assert msgspec.msgpack.decode(encode_batch(EventBatch(3.0, manager.take_events())))[1] == [{"type": "AllBlocksCleared"}]


def test_groups_say_what_they_are() -> None:
    specs = [
        FULL,
        pagepool.FullAttentionSpec(4, 1, 8, "float16", True),
        pagepool.SlidingWindowSpec(8, 1, 8, "float16", False, 13),
        pagepool.ChunkedLocalAttentionSpec(4, 1, 8, "float16", False, 8),
        pagepool.MambaSpec(page_size=4096, shapes=((2, 2),), dtype="float16"),
        pagepool.FullAttentionSpec(4, 1, 8, "float16", False, sliding_window=9),
    ]
    manager = make_told(*specs)
    run_request(manager, list(range(24)))
    names = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "block_size")
    stored = decode(manager.take_events())
    said = [(*(getattr(event, name) for name in names), len(event.block_hashes)) for event in stored]
    assert sorted(said) == [
        *[(0, "full_attention", None, 4, 6), (1, "mla_attention", None, 4, 6), (2, "sliding_window", 13, 8, 3)],
        *[(3, "chunked_local_attention", None, 4, 6), (5, "full_attention", None, 4, 6)],
    ]
    manager.page_pool.evict_pages(range(1, 32))
    assert sorted(event.group_idx for event in decode(manager.take_events())) == [0, 1, 2, 3, 5]


FEATURES = (Feature("cat", "image", SimpleNamespace(offset=2, length=3)), Feature("dog", "image", None))


@pytest.mark.parametrize(("is_batch", "hash_algo"), [(False, "siphash128"), (True, "siphash128"), (False, "sha256_cbor")])
def test_extra_keys_page_by_page(is_batch: bool, hash_algo: str) -> None:
    """In vLLM's order: LoRA, in all pages as vLLM hashes them, features with their place in the page, salt."""
    manager = make_told(hash_algo=hash_algo)
    attributes = {"lora_id": "tuned", "cache_salt": "salt", "mm_features": FEATURES}
    if is_batch:
        pagepool.RunningBatch(manager, pagepool.PageTable(1, 16, 64)).admit(0, list(range(12)), **admission(**attributes))
    else:
        run_request(manager, list(range(12)), **attributes)
    [stored] = decode(manager.take_events())
    lora = ("tuned",) if hash_algo == "sha256_cbor" else ()
    assert stored.extra_keys == [("tuned", ["cat", 2], ["dog", 0], "salt"), (*lora, ["cat", -2]), lora or None]
    assert (stored.lora_id, stored.lora_name) == (None, "tuned")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"lora_id": 5}, (5, None, (5,))),
        ({"lora_id": 2**63}, (2**63, None, (2**63,))),
        ({"lora_id": 2**64}, (None, str(2**64), (str(2**64),))),
        ({"lora_id": -(2**63) - 1}, (None, str(-(2**63) - 1), (str(-(2**63) - 1),))),
        ({"lora_id": b"\xffraw"}, (None, "ff726177", (b"\xffraw",))),
        ({"lora_id": ("tuned", "/adapters/tuned")}, (None, "tuned", ("tuned",))),
        ({"cache_salt": "\ud800"}, (None, None, ("\\ud800",))),
        ({"cache_salt": 2**200}, (None, None, (str(2**200),))),
        ({"mm_features": (Feature(2**100, "image", None),)}, (None, None, ([str(2**100), 0],))),
        ({"lora_id": "", "cache_salt": ""}, (None, "", ("", ""))),
    ],
    ids=str,
)
def test_whatever_requests_are_hashed_with_can_be_sent(attributes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """An int that msgpack cannot encode, or a string that is not valid Unicode, would stop all events."""
    manager = make_told()
    run_request(manager, [1, 2, 3, 4], **attributes)
    [stored] = decode(manager.take_events())
    assert (stored.lora_id, stored.lora_name, stored.extra_keys[0]) == expected


def test_a_place_in_numpys_ints_is_the_same_place() -> None:
    manager = make_told()
    for integer in (int, np.int64, np.uint8):
        place = SimpleNamespace(offset=integer(2), length=integer(3))
        run_request(manager, [9] * 8, mm_features=(Feature("cat", "image", place),))
    [stored] = decode(manager.take_events())
    assert stored.extra_keys == [(["cat", 2],), (["cat", -2],)]


def test_events_with_the_classes_of_vllm() -> None:
    """If vLLM can be imported."""
    vllm = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")
    manager = make_told(FULL, pagepool.SlidingWindowSpec(4, 1, 8, "float16", False, 9), hashes_as_bytes=True)
    run_request(manager, list(range(12)), lora_id=1, cache_salt="salt", mm_features=FEATURES, session_id="s")
    manager.page_pool.evict_pages([1])
    events = [*manager.take_events(), BlockRemoved([b"x" * 16], "GPU", 0), AllBlocksCleared()]
    batch = msgspec.msgpack.decode(encode_batch(EventBatch(1.5, events, 3)), type=vllm.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    for theirs, ours in zip(batch.events, decode(events), strict=True):
        assert type(theirs).__name__ == type(ours).__name__
        assert {name: getattr(theirs, name) for name in ours.__struct_fields__} == msgspec.structs.asdict(ours)
    assert decode_batch(msgspec.msgpack.encode(batch)).events == decode(events)


@pytest.mark.parametrize("is_batch", [False, True])
def test_sessions_have_events_of_their_own(is_batch: bool) -> None:
    """The next turn of a session is in its event. A request's `session_id` is read when it gets its first pages."""
    manager = make_told()
    batch = make_batch(manager)
    turns = [(9, "a"), (17, "a"), (25, "b \ud800"), (33, None)]
    for i, (num_tokens, session_id) in enumerate(turns):
        if is_batch:
            batch.admit(i, list(range(num_tokens)), traits=pagepool.RequestTraits(session_id=session_id))
        else:
            run_request(manager, list(range(num_tokens)), session_id=session_id).session_id = "later"
    events = decode(manager.take_events())
    assert [(event.session_id, len(event.block_hashes)) for event in events] == [("a", 4), ("b \\ud800", 2), (None, 2)]
    assert [event.parent_block_hash for event in events[1:]] == [event.block_hashes[-1] for event in events[:-1]]
    assert decode(manager.snapshot_events()) == events


@pytest.mark.parametrize(("is_batch", "session_id"), [(True, None), (False, None), (False, "t")])
def test_a_fork_has_the_session_of_its_request_unless_it_has_its_own(is_batch: bool, session_id: str | None) -> None:
    manager = make_told()
    if is_batch:
        batch = make_batch(manager)
        batch.admit(0, list(range(6)), traits=pagepool.RequestTraits(session_id="s"))
        batch.fork(0, [1])
        batch.take_moves()
        batch.append([1, 1], [6, 7])
        batch.plan([1], 2)
    else:
        request = run_request(manager, list(range(6)), session_id="s")
        fork = Request("fork", list(range(8)), num_computed_tokens=6, session_id=session_id)
        manager.fork(request, fork)
        manager.take_moves()
        manager.allocate_slots(fork, 2)
    said = [(event.session_id, len(event.block_hashes)) for event in decode(manager.take_events())]
    assert said == ([("s", 2)] if session_id is None else [("s", 1), ("t", 1)])


# --- when ---------------------------------------------------------------------------------------------------


def test_requests_that_were_looked_up_before() -> None:
    """Their events have the tokens nevertheless."""
    manager = pagepool.CacheManager(32, [pagepool.CacheGroupSpec(FULL)], 64)
    request = Request("early", list(range(8)))
    manager.get_computed_pages(request)
    manager.enable_events()
    manager.allocate_slots(request, 8)
    [stored] = manager.take_events()
    assert stored.token_ids.tolist() == list(range(8))


def test_pages_cached_without_the_manager_have_parents_too() -> None:
    manager, router = make_told(), Router()
    pool = manager.page_pool
    request, page_hashes = Request("direct", list(range(24))), []
    page_ids = pool.get_new_page_ids(6).tolist()
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        pool.cache_full_page_ids(request, page_ids, page_hashes, start, stop, 4, 0)
    [stored] = manager.take_events()
    assert (len(stored.block_hashes), stored.parent_block_hash, len(stored.token_ids)) == (6, None, 0)
    router.apply([stored])
    pool.evict_pages(page_ids[1:4])
    pool.cache_full_page_ids(request, page_ids, page_hashes, 3, 4, 4, 0)
    pool.cache_full_page_ids(request, page_ids, page_hashes, 1, 3, 4, 0)
    router.apply(manager.take_events())
    assert len(router.pages) == 6
    assert len(manager.snapshot_events()) == 1
    pool.evict_pages(page_ids[:3])
    manager.take_events()
    with pytest.raises(PageHashError):  # the fourth page has its hash already
        pool.cache_full_page_ids(request, page_ids, page_hashes, 0, 4, 4, 0)
    assert manager.take_events() == []
    manager.check()


def test_many_pages_at_once() -> None:
    """More than a call of the core handles with the GIL held, and in as few events as can be."""
    manager, router = pagepool.CacheManager(6000, [pagepool.CacheGroupSpec(FULL)], 12_000), Router()
    manager.enable_events()
    request = run_request(manager, list(range(12_000)))
    [stored] = manager.take_events()
    assert (len(stored.block_hashes), stored.token_ids.tolist()) == (3000, list(range(12_000)))
    router.apply([stored])
    manager.free(request)
    run_request(manager, [*range(6000), *range(100, 6100)])
    assert sorted(len(event.block_hashes) for event in manager.snapshot_events()) == [1500, 3000]
    router.apply(manager.take_events())
    assert len(router.pages) == 4500
    manager.page_pool.evict_pages(range(1, 6000))
    [removed] = manager.take_events()
    assert len(removed.block_hashes) == 4500


def test_groups_that_the_manager_does_not_have_are_not_told() -> None:
    """Another caller entered its own page."""
    manager = make_told()
    page_hash = pagepool.PageHash(7, ())
    for group_id in (0, 5):
        manager.page_pool.pages[group_id + 1].page_hash = pagepool.PageHashWithGroupId(page_hash, group_id)
    [stored] = manager.take_events()
    assert (stored.group_idx, stored.parent_block_hash, len(stored.token_ids)) == (0, None, 0)
    manager.page_pool.evict_pages([1, 6])
    [removed] = manager.take_events()
    assert (removed.group_idx, removed.block_hashes.tolist()) == (0, [7])


def test_extra_keys_are_kept_as_long_as_somebody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has its own salt, and pages or rows outlive many others."""
    manager = make_told(num_pages=64)
    batch = pagepool.RunningBatch(manager, pagepool.PageTable(2, 16, 64))
    values = manager.event_source.contexts._values
    batch.admit(0, [1, 2, 3], traits=pagepool.RequestTraits(cache_salt="row"))
    run_request(manager, [1, 2, 3, 4], cache_salt="page")
    for i in range(500):
        request = run_request(manager, [1, 2, 3, 4], cache_salt=f"salt {i}", session_id=f"session {i}")
        manager.free(request)
        manager.free_page_hashes(request)
        batch.admit(1, [1, 2, 3, 4], traits=pagepool.RequestTraits(cache_salt=f"pepper {i}", session_id=f"session {i}"))
        batch.swap_row(0, 1)
        batch.swap_row(0, 1)
        batch.release([1])
        assert len(values) <= 4 * 64
    manager.take_events()
    batch.append([0], [4])
    batch.plan([0])
    [stored] = decode(manager.take_events())
    assert stored.extra_keys == [("row",)]
    told = {event.extra_keys[0] for event in decode(manager.snapshot_events())}
    assert ("page",) in told
    assert len(told) == len(manager.page_pool.cached_page_hash_to_page)


def test_names_are_kept_as_long_as_somebody_needs_them() -> None:
    """And no longer, even if the events are not taken. Hashes of 32 bytes need them."""
    manager, router = make_told(num_pages=16, hash_algo="sha256", hashes_as_bytes=True), Router()
    names = manager.page_pool.store.names
    for i in range(1500):
        request = run_request(manager, [i, 1, 2, 3, 4, 5, 6, 7])
        manager.free(request)
        manager.free_page_hashes(request)
        if i == 10:
            router.apply(manager.take_events())
    assert len(names) <= 6 * 16 + 1024
    router.apply(manager.take_events())
    assert {stored for _, stored in router.pages} == {
        key.page_hash.hash_value.to_bytes(32, "big") for key in manager.page_pool.cached_page_hash_to_page
    }
    manager.reset_prefix_cache()
    assert len(names) == 0


@pytest.mark.parametrize("seed", range(max(NUM_OPERATIONS // 60_000, 1)))
@pytest.mark.parametrize(("num_pages", "num_host_pages"), [(1500, 0), (24, 16)], ids=["device", "device and host"])
def test_one_thread_is_told_what_the_others_cache(num_pages: int, num_host_pages: int, seed: int) -> None:
    """Extra keys and names stay correct, whatever other threads forget meanwhile."""
    tier = pagepool.HostTier(num_host_pages) if num_host_pages else None
    manager = make_told(num_pages=num_pages, hash_algo="sha256", hashes_as_bytes=True, host_tier=tier)
    router = Router()

    def work(rng: Random, number: int) -> None:
        if number == 0:
            for _ in range(100):
                router.apply(manager.take_events())
                Router().apply(manager.snapshot_events())
            return
        for i in range(150):
            salt = rng.choice((None, f"{number} {i}"))
            request = Request(f"{number} {i}", [rng.randrange(2) for _ in range(rng.randint(1, 60))], cache_salt=salt)
            with contextlib.suppress(PageHashError, MovesDueError):  # another thread took a hit, or has not taken its loads
                allocate(manager, request)
            manager.free(request)
            manager.free_page_hashes(request)
            transfers = manager.take_moves()
            if len(transfers):
                manager.complete(transfers.number)

    run_threads(4, seed, work)
    router.apply(manager.take_events())
    late = Router()
    late.apply(manager.snapshot_events())
    assert (late.pages, late.saved) == (router.pages, router.saved)
    manager.check()
    assert {key for _, key in router.pages} == {
        key.page_hash.hash_value.to_bytes(32, "big") for key in manager.page_pool.cached_page_hash_to_page
    }
    stats = manager.stats().host_tier
    assert len(router.saved) == (stats.num_cached_pages if stats else 0)


# --- the host tier -------------------------------------------------------------------------------------------


def run_once(manager: pagepool.CacheManager, num_tokens: int, **options: Any) -> None:
    """Compute a request and end it."""
    request = run_request(manager, PROMPT[:num_tokens], **options)
    manager.free(request)
    manager.free_page_hashes(request)


def take(manager: pagepool.CacheManager) -> list[tuple[str, str, int]]:
    """Return the name, the medium and the number of pages of each event."""
    events = decode(manager.take_events())
    return [(type(event).__name__, event.medium, len(event.block_hashes)) for event in events]


def test_a_page_that_goes_to_the_host_and_comes_back() -> None:
    manager = make_told(num_pages=6, host_tier=pagepool.HostTier(10), hash_seed=1)
    attributes = {"cache_salt": "salt", "lora_id": "tuned", "session_id": "s"}
    run_once(manager, 12, **attributes)
    [stored] = decode(manager.take_events())
    ids = manager.page_pool.get_new_page_ids(5)
    assert take(manager) == [("BlockRemoved", "GPU", 3)]
    transfers = manager.take_moves()
    assert take(manager) == []
    manager.complete(transfers.number)
    [event] = manager.take_events()
    assert event.token_ids.dtype == "int32"
    [saved] = decode([event])
    assert sorted(saved.block_hashes) == sorted(stored.block_hashes)
    expected = {"type": "BlockStored", "block_hashes": saved.block_hashes, "parent_block_hash": None, "token_ids": []}
    expected |= {"block_size": 4, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    expected |= {"lora_id": None, "medium": "CPU", "lora_name": None}
    assert msgspec.msgpack.decode(encode_batch(EventBatch(0.0, [event])))[1] == [expected]
    manager.page_pool.free_page_ids(ids)
    assert manager.get_computed_pages(make_request("r", 16, **attributes))[1] == 12
    assert decode(manager.take_events()) == [stored]
    manager.complete(manager.take_moves().number)
    assert take(manager) == []
    assert manager.page_pool.evict_pages([1, 2, 3, 4, 5]) == 3
    assert take(manager) == [("BlockRemoved", "GPU", 3), ("BlockRemoved", "CPU", 3)]


def test_pages_that_a_batch_loads_have_their_tokens_and_keys() -> None:
    manager = make_told(num_pages=6, host_tier=pagepool.HostTier(10))
    batch = make_batch(manager)
    batch.admit(0, PROMPT[:13], traits=pagepool.RequestTraits(cache_salt="salt", session_id="s"))
    [stored] = decode(manager.take_events())
    batch.release([0])
    ids = manager.page_pool.get_new_page_ids(5)  # all are evicted from the device and saved
    manager.complete(manager.take_moves().number)
    manager.page_pool.free_page_ids(ids)
    assert take(manager) == [("BlockRemoved", "GPU", 3), ("BlockStored", "CPU", 3)]
    batch.admit(1, PROMPT[:13], traits=pagepool.RequestTraits(cache_salt="salt", session_id="s"))
    assert decode(manager.take_events()) == [stored]


def test_events_begin_with_nothing_in_the_tier() -> None:
    manager = make_manager(FULL, num_pages=6, host_tier=pagepool.HostTier(10))
    run_once(manager, 16)
    ids = manager.page_pool.get_new_page_ids(5)
    manager.page_pool.free_page_ids(ids)
    with pytest.raises(ArgumentError, match=r"^pool: got one with 4 held pages and 0 cached prefixes, allowed: 0 and 0$"):
        manager.enable_events()
    manager.complete(manager.take_moves().number)
    with pytest.raises(ArgumentError, match=r"^pool: got one with 0 held pages and 4 cached prefixes, allowed: 0 and 0$"):
        manager.enable_events()


# --- what is refused ------------------------------------------------------------------------------------------


def test_events_without_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pagepool.CacheManager(8, [pagepool.CacheGroupSpec(FULL)], 64)
    for name in [name for name in sys.modules if name.startswith("pagepool.events")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ImportError, match=r"^events need msgspec: pip install 'pagepool\[events\]'$"):
        manager.enable_events()


def test_events_that_cannot_be_enabled() -> None:
    groups = [pagepool.CacheGroupSpec(FULL)]
    uncached = pagepool.CacheManager(8, groups, 64, enable_caching=False)
    with pytest.raises(
        ArgumentError, match=r"^events: got a manager without prefix caching, which has none, allowed: one with it$"
    ):
        uncached.enable_events()
    late = pagepool.CacheManager(8, groups, 64)
    for call in (late.take_events, late.snapshot_events):
        with pytest.raises(
            ArgumentError, match=r"^events: got a manager without them, allowed: one whose enable_events was called first$"
        ):
            call()
    request = run_request(late, [1, 2, 3, 4, 5])
    with pytest.raises(ArgumentError, match=r"^pool: got one with 2 held pages and 1 cached prefixes, allowed: 0 and 0$"):
        late.enable_events()
    late.free(request)
    late.reset_prefix_cache()
    late.enable_events()
    late.enable_events()
    with pytest.raises(ArgumentError, match=r"^hashes_as_bytes: got True, allowed: False$"):
        late.enable_events(hashes_as_bytes=True)
    with pytest.raises(ArgumentError, match=r"^pool: got one that has a journal already, allowed: one without$"):
        pagepool.CacheManager(8, groups, 64, page_pool=late.page_pool).enable_events()

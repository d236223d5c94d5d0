"""Events of a host tier: what a router knows of both places against the prefix index, and what each event says.

PAGEPOOL_TEST_OPERATIONS: a tenth of so many calls are made in all for the random test.
"""

from __future__ import annotations

import zlib
from random import Random
from typing import Any

import pytest
from hybrids import FULL, PROMPT, STATE, make_batch, make_manager, make_request
from settings import NUM_OPERATIONS

from pagepool import CacheManager, EngineRequest, HostTier, SlidingWindowSpec, Transfers
from pagepool._core import PageIds, PrefixQuery
from pagepool.errors import ArgumentError
from pagepool.hashing import PageHash
from pagepool.hashing.algorithms import CallableHasher
from pagepool.page_pool.prefix_index import forget_names

msgspec = pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")

from event_managers import make_told, run_request  # noqa: E402
from router import Key, Router, Stored  # noqa: E402
from wire import decode  # noqa: E402

from pagepool.events import EventBatch, encode_batch  # noqa: E402

WINDOW = SlidingWindowSpec(4, 1, 8, "float16", False, 9)
MODELS = {"full": (FULL,), "window": (FULL, WINDOW), "states": (FULL, STATE), "windows alone": (WINDOW,)}
ALGORITHMS: dict[str, tuple[Any, bool]] = {
    "siphash128": ("siphash128", False),
    "siphash128, bytes": ("siphash128", True),
    "sha256, bytes": ("sha256", True),
    "callable": (hash, False),
}
POLICIES: dict[str, dict[str, Any]] = {
    "write back": {},
    "write through": {"policy": "write_through"},
    "used twice": {"policy": "write_through", "min_uses": 2, "eviction": "adaptive"},
}
NUM_ROUNDS = max(NUM_OPERATIONS // (10 * len(MODELS) * len(ALGORITHMS) * len(POLICIES)), 200)
NUM_PROMPT_TOKENS = 56
MASK = (1 << 64) - 1


class Told:
    """A manager with a tier and a few prompts, and a router that hears its events."""

    def __init__(self, rng: Random, specs: tuple[Any, ...], hash_algo: Any, is_bytes: bool, **options: Any) -> None:
        self.rng = rng
        tier = HostTier(rng.choice((6, 20, 60)), **options)
        self.manager = make_manager(*specs, num_pages=rng.choice((18, 30)), hash_algo=hash_algo, host_tier=tier)
        self.manager.enable_events(hashes_as_bytes=is_bytes)
        self.is_bytes = is_bytes
        self.prompts = [[rng.randint(0, 9) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(3)]
        self.running: list[EngineRequest] = []
        self.in_flight: list[Transfers] = []
        self.router = Router()
        self.num_requests = 0

    def make_request(self, number: int, num_tokens: int) -> EngineRequest:
        """Make a request with the beginning of a prompt, of which the last has a salt."""
        salt = "salt" if number == 2 else None
        return EngineRequest(f"r{self.num_requests}", self.prompts[number][:num_tokens], cache_salt=salt)

    def start(self) -> None:
        """Compute the beginning of a prompt at once."""
        self.num_requests += 1
        request = self.make_request(self.rng.randrange(3), self.rng.randint(1, NUM_PROMPT_TOKENS))
        hits, num_hits = self.manager.get_computed_pages(request)
        if self.manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits) is not None:
            self.running.append(request)
        self.transfer()
        request.num_computed_tokens = request.num_tokens

    def end(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.manager.free(request)
        self.manager.free_page_hashes(request)

    def transfer(self) -> None:
        transfers = self.manager.take_transfers()
        self.manager.take_copies()
        if len(transfers):
            self.in_flight.append(transfers)

    def complete(self, fails: bool = False) -> None:
        """End the transfers of a list; if it `fails`, some of them, and the requests that hold pages with a wrong content."""
        transfers = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
        if not fails:
            self.manager.complete_transfers(transfers.number)
            return
        saves, loads = (
            [i for i in range(len(ids)) if self.rng.random() < 0.5] for ids in (transfers.save_src, transfers.load_src)
        )
        failed = self.manager.fail_transfers(transfers.number, saves=saves, loads=loads)
        for request in [*self.running]:
            if self.manager.find_wrong_token(request, failed) is not None:
                self.end(request)

    def act(self) -> None:
        rng = self.rng
        if self.running and (len(self.running) > 2 or rng.random() < 0.3):
            self.end(rng.choice(self.running))
        elif self.in_flight and (len(self.in_flight) > 2 or rng.random() < 0.4):
            self.complete(rng.random() < 0.2)
        elif rng.random() < 0.1:
            self.manager.page_pool.evict_pages(rng.sample(range(1, self.manager.num_pages), 3))
        elif rng.random() < 0.05:
            self.manager.reset_prefix_cache()
        else:
            self.start()

    def list_cached(self, reaches_tier: bool) -> dict[Key, Stored]:
        """Return the pages of the prompts that are cached on the device, or, if it `reaches_tier`, in either place."""
        cached = {}
        for number in range(len(self.prompts)):
            request = self.make_request(number, NUM_PROMPT_TOKENS)
            hashes = self.manager._lookups.hash_apart(request, NUM_PROMPT_TOKENS)
            told_hashes = [self.hash_of(page_hash) for page_hash in self.manager.hasher.list_page_hashes(hashes)]
            if isinstance(self.manager.hasher, CallableHasher):
                told_hashes = [hashes.chain[i] & MASK for i in range(len(hashes.chain))]
            query = PrefixQuery(self.manager.page_pool.store, hashes.chain, 0, None, reaches_tier)
            for group, single in enumerate(self.manager.coordinator.single_type_managers):
                stride = single.num_hashes_per_page
                for page in range(len(told_hashes) // stride):
                    if query.find_leading_hits(PageIds([group]), stride, page, page + 1) > page:
                        last = (page + 1) * stride - 1
                        parent, tokens = told_hashes[last - 1] if last else None, self.prompts[number][4 * last : 4 * last + 4]
                        salt = ("salt",) if request.cache_salt and last == 0 else None
                        cached[group, told_hashes[last]] = Stored(parent, tuple(tokens), salt, None)
        return cached

    def hash_of(self, page_hash: PageHash) -> Any:
        """Return a hash as in events."""
        num_bytes = self.manager.hasher.num_digest_bytes
        return page_hash.hash_value.to_bytes(num_bytes, "big") if self.is_bytes else page_hash.hash_value & MASK

    def check(self) -> None:
        """The router knows what is on the device, and what is in either place; so does one that starts now."""
        self.router.apply(decode(self.manager.take_events()))
        assert self.router.pages == self.list_cached(False)
        either = self.list_cached(True)
        assert self.router.pages.keys() | self.router.saved == either.keys()
        assert all(map(self.router.has, either))
        stats = self.manager.stats().host_tier
        assert stats is not None
        assert len(self.router.saved) == stats.num_cached_pages
        late = Router()
        late.apply(decode(self.manager.snapshot_events()))
        assert (late.pages, late.saved) == (self.router.pages, self.router.saved)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_router_knows_what_is_in_both_places(model: str, algorithm: str, policy: str) -> None:
    seed = zlib.crc32(f"{model} {algorithm} {policy}".encode())
    told = Told(Random(seed), MODELS[model], *ALGORITHMS[algorithm], **POLICIES[policy])
    source = told.manager.require_event_source()
    for i in range(NUM_ROUNDS):
        told.act()
        if i % 50 == 40:
            source.start_over()
        if i % 3 == 0:
            forget_names(told.manager.page_pool.store)  # those that nobody needs any more
        if told.rng.random() < 0.3:
            told.check()
    told.check()
    stats = told.manager.stats().host_tier
    assert stats is not None
    assert stats.num_saved_pages > 0
    told.manager.check()
    while told.running:
        told.end(told.running[0])
    while told.in_flight:
        told.complete()
    assert told.manager.reset_prefix_cache()
    told.check()
    assert len(told.manager.page_pool.store.names) == 0


# --- what each event says ---------------------------------------------------------------------------------------


def run_once(manager: CacheManager, num_tokens: int, **options: Any) -> None:
    """Compute a request and end it."""
    request = run_request(manager, PROMPT[:num_tokens], **options)
    manager.free(request)
    manager.free_page_hashes(request)


def evict_to_host(manager: CacheManager) -> None:
    """Have all cached pages evicted from the device and saved."""
    ids = manager.page_pool.get_new_page_ids(manager.num_pages - 1)
    manager.complete_transfers(manager.take_transfers().number)
    manager.page_pool.free_page_ids(ids)


def take(manager: CacheManager) -> list[tuple[str, str, int]]:
    """Return the name, the medium and the number of pages of each event."""
    events = decode(manager.take_events())
    return [(type(event).__name__, event.medium, len(event.block_hashes)) for event in events]


def test_a_page_that_goes_to_the_host_and_comes_back() -> None:
    manager = make_told(num_pages=6, host_tier=HostTier(10), hash_seed=1)
    run_once(manager, 12, cache_salt="salt", lora_id="tuned")
    [stored] = decode(manager.take_events())
    ids = manager.page_pool.get_new_page_ids(5)
    assert take(manager) == [("BlockRemoved", "GPU", 3)]
    transfers = manager.take_transfers()
    assert take(manager) == []
    manager.complete_transfers(transfers.number)
    [event] = manager.take_events()
    assert event.token_ids.dtype == "int32"
    [saved] = decode([event])
    assert sorted(saved.block_hashes) == sorted(stored.block_hashes)
    expected = {"type": "BlockStored", "block_hashes": saved.block_hashes, "parent_block_hash": None, "token_ids": []}
    expected |= {"block_size": 4, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    expected |= {"lora_id": None, "medium": "CPU", "lora_name": None}
    assert msgspec.msgpack.decode(encode_batch(EventBatch(0.0, [event])))[1] == [expected]
    manager.page_pool.free_page_ids(ids)
    assert manager.get_computed_pages(make_request("r", 16, cache_salt="salt", lora_id="tuned"))[1] == 12
    assert decode(manager.take_events()) == [stored]
    manager.complete_transfers(manager.take_transfers().number)
    assert take(manager) == []
    assert manager.page_pool.evict_pages([1, 2, 3, 4, 5]) == 3
    assert take(manager) == [("BlockRemoved", "GPU", 3), ("BlockRemoved", "CPU", 3)]


def test_pages_that_a_batch_loads_have_their_tokens_and_keys() -> None:
    manager = make_told(num_pages=6, host_tier=HostTier(10))
    batch = make_batch(manager)
    batch.admit(0, PROMPT[:13], cache_salt="salt")
    [stored] = decode(manager.take_events())
    batch.release([0])
    evict_to_host(manager)
    assert take(manager) == [("BlockRemoved", "GPU", 3), ("BlockStored", "CPU", 3)]
    batch.admit(1, PROMPT[:13], cache_salt="salt")
    assert decode(manager.take_events()) == [stored]


def test_events_begin_with_nothing_in_the_tier() -> None:
    manager = make_manager(FULL, num_pages=6, host_tier=HostTier(10))
    run_once(manager, 16)
    ids = manager.page_pool.get_new_page_ids(5)
    manager.page_pool.free_page_ids(ids)
    with pytest.raises(ArgumentError, match=r"^4 pages are held and 0 prefixes cached already, allowed: none$"):
        manager.enable_events()
    manager.complete_transfers(manager.take_transfers().number)
    with pytest.raises(ArgumentError, match=r"^0 pages are held and 4 prefixes cached already, allowed: none$"):
        manager.enable_events()

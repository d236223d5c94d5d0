"""Adversarial prompts, salts and keys: pages are shared only for equal content and equal keys.

docs/security.md says what is promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from admissions import admission
from cpu_time import median_seconds
from hybrids import FULL, PAGE_SIZE, WINDOW
from hybrids import make_manager as make_hybrid

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, PagePool, PageTable, RunningBatch, hash_request_tokens
from pagepool._core import PageStore, copy_records
from pagepool.page_pool.integrity import check_store

WEAK: dict[str, Callable[[Any], int]] = {
    "constant": lambda content: 1,
    "one bit": lambda content: hash(content) % 2,
    "builtin": hash,
    "the first token": lambda content: content[1][0],
    "the sum": lambda content: sum(content[1]),
}
"""Hash functions for which colliding prompts are easy to find."""

NEGATIVE: list[tuple[list[int], list[int]]] = [
    ([-1] * 12, [-2] * 12),  # hash(-1) == hash(-2)
    ([-1, 5, 6, 7] * 3, [-2, 5, 6, 7] * 3),
]
"""Prompts that collide under the builtin hash. Managers and batches refuse them; a pool only sees hashes."""

COLLIDING: list[tuple[list[int], list[int]]] = [
    ([1, 4] * 6, [2, 3] * 6),
    ([1, 5, 6, 7] * 3, [5, 1, 6, 7] * 3),
    ([1, 2, 3, 4] * 3, [1, 9, 9, 9] * 3),
    ([7, 7, 7, 7, 1, 1, 1, 1, 2, 2, 2, 2], [8, 8, 8, 8, 1, 1, 1, 1, 2, 2, 2, 2]),  # equal except for the beginning
]

HASH_ALGORITHMS = ["siphash128", "sha256", "sha256_cbor", *WEAK.values()]
HASH_ALGORITHM_IDS = ["siphash128", "sha256", "sha256_cbor", *WEAK]


def make_manager(hash_algo: Any, *specs: Any, num_pages: int = 64) -> CacheManager:
    return make_hybrid(*specs or (FULL,), num_pages=num_pages, max_model_len=256, hash_seed=None, hash_algo=hash_algo)


def unchecked(prompt: list[int]) -> EngineRequest:
    """A request with a prompt that its constructor may refuse."""
    request = EngineRequest("r", [])
    request.all_token_ids = prompt
    return request


def count_hits(manager: CacheManager, prompt: list[int], **keys: Any) -> int:
    """Return the number of cached tokens of a prompt. One more token is appended, which is not cached."""
    return manager.get_computed_pages(EngineRequest("asks", [*prompt, 99], **keys))[1]


def cache(manager: CacheManager, prompt: list[int], **keys: Any) -> None:
    """Compute a prompt and leave it in the prefix index."""
    request = EngineRequest(f"caches {prompt} {keys}", prompt, **keys)
    assert manager.allocate_slots(request, len(prompt)) is not None
    manager.free(request)


# Collisions.


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW)], ids=["full", "window", "both"])
@pytest.mark.parametrize("hash_function", WEAK.values(), ids=WEAK)
@pytest.mark.parametrize(("mine", "theirs"), COLLIDING)
def test_colliding_prompts_share_nothing(
    mine: list[int], theirs: list[int], hash_function: Callable[[Any], int], specs: tuple[Any, ...]
) -> None:
    """Not even where a sliding window leaves the beginning unread."""
    manager = make_manager(hash_function, *specs)
    cache(manager, mine)
    assert count_hits(manager, theirs) == 0
    assert count_hits(manager, mine) == 12
    cache(manager, theirs)
    assert count_hits(manager, theirs) == 12
    manager.check()


@pytest.mark.parametrize("hash_function", WEAK.values(), ids=WEAK)
@pytest.mark.parametrize(("mine", "theirs"), [*NEGATIVE, *COLLIDING[:3]])
def test_colliding_hashes_share_nothing_in_a_pool(
    mine: list[int], theirs: list[int], hash_function: Callable[[Any], int]
) -> None:
    """Hashes that engines compute themselves carry their tokens, and these are compared."""
    pool = PagePool(16, enable_caching=True)
    hashes = [hash_request_tokens(hash_function, PAGE_SIZE, unchecked(prompt)) for prompt in (mine, theirs)]
    if (hash_function is hash and [mine, theirs] in map(list, NEGATIVE)) or hash_function is WEAK["constant"]:
        assert [each.hash_value for each in hashes[0]] == [each.hash_value for each in hashes[1]], "they do collide"
    assert hashes[0] != hashes[1]
    pages = pool.get_new_pages(3)
    pool.cache_full_pages(unchecked(mine), pages, hashes[0], 0, 3, PAGE_SIZE, 0)
    assert [pool.get_cached_page(page_hash, [0]) for page_hash in hashes[1]] == [None] * 3
    assert pool.probe(hashes[1]).num_hit_pages == 0
    assert not any(page_hash in {key.page_hash for key in pool.cached_page_hash_to_page} for page_hash in hashes[1])
    pool.free_pages(pages)
    pool.check()


# Keys that keep tenants apart.


def image(content_hash: str, offset: int = 0) -> SimpleNamespace:
    return SimpleNamespace(mm_hash=content_hash, modality="image", placeholder_range=SimpleNamespace(offset=offset, length=2))


TENANTS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"cache_salt": "A"},
    {"cache_salt": ""},
    {"cache_salt": "1"},
    {"cache_salt": "a\0"},
    {"cache_salt": "a', 'b"},
    {"cache_salt": "a'), ('lora', 1"},
    {"cache_salt": "(('salt', 'a'),)"},
    {"cache_salt": "1, 2, 3, 4"},
    {"cache_salt": "\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0"},  # the prompt's tokens as int32
    {"cache_salt": "\udc80"},  # not text
    {"cache_salt": "é"},
    {"cache_salt": "e\u0301"},  # looks the same
    {"lora_id": 1},
    {"lora_id": "1"},
    {"lora_id": 2},
    {"lora_id": "a"},
    {"lora_id": ("a", "/b")},
    {"lora_id": ("a", "/c")},
    {"lora_id": "('a', '/b')"},
    {"cache_salt": "a", "lora_id": 1},
    {"cache_salt": "a", "lora_id": "1"},
    {"cache_salt": "('lora', 1)", "lora_id": 1},
    {"mm_features": [image("a")]},
    {"mm_features": [image("b")]},
    {"mm_features": [image("a", 1)]},
    {"mm_features": [image("a"), image("b")]},
    {"mm_features": [image("b"), image("a")]},
    {"mm_features": [image("a', 0, 2), ('mm', 'image', 'b")]},
    {"mm_features": [image("a")], "cache_salt": "a"},
]
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("hash_algo", HASH_ALGORITHMS, ids=HASH_ALGORITHM_IDS)
def test_tenants_share_with_themselves_alone(hash_algo: Any) -> None:
    """Salts, adapters and images, among them salts that look like other keys or like tokens; rows of a batch too."""
    manager = make_manager(hash_algo, num_pages=256)
    tenants = [keys for keys in TENANTS if hash_algo != "sha256_cbor" or keys.get("cache_salt") != "\udc80"]
    for keys in tenants:
        assert count_hits(manager, PROMPT, **keys) == 0, keys
        cache(manager, PROMPT, **keys)
    assert [count_hits(manager, PROMPT, **keys) for keys in tenants] == [len(PROMPT)] * len(tenants)
    manager.check()
    if hash_algo == "siphash128":
        assert manager.reset_prefix_cache()
        batch = RunningBatch(manager, PageTable(1, 64, 64))
        for num_hit_tokens, keys in itertools.product((0, len(PROMPT)), tenants):
            assert batch.admit(0, [*PROMPT, 99], **admission(**keys)) == num_hit_tokens, keys
            batch.release([0])


# The index.


def make_store(keys: list[int]) -> PageStore:
    """A store whose pages are cached under the keys."""
    store = PageStore(len(keys) + 1)
    for page_id, key in enumerate(keys, 1):
        store.enter(page_id, key, 0)
    return store


NUM_KEYS = 4000


@pytest.mark.parametrize("shift", [16, 24, 32, 40, 48])
def test_keys_that_are_alike_do_not_crowd_the_index(shift: int) -> None:
    """Digests that agree in their lowest or other bits do not cluster: the index multiplies by a secret.

    In one place all would be probed, two thousand on average: the bound is far from that, and far from noise.
    """
    rng = Random(shift)
    random_store = make_store([rng.getrandbits(128) for _ in range(NUM_KEYS)])
    chosen_store = make_store([i << shift & (1 << 64) - 1 | 1 for i in range(NUM_KEYS)])
    probes = [i << shift & (1 << 64) - 1 | 1 for i in range(NUM_KEYS, NUM_KEYS + 200)]

    def look_up(store: PageStore) -> Callable[[], object]:
        return lambda: [store.find(key, 0) for key in probes]

    assert median_seconds(look_up(chosen_store), 9) < 20 * median_seconds(look_up(random_store), 9)
    check_store(chosen_store)


def test_each_pool_has_a_secret_of_its_own() -> None:
    """The same keys lie in another order in another pool."""
    rng = Random(3)
    keys = [rng.getrandbits(128) for _ in range(100)]
    orders = [[i for i in copy_records(make_store(keys))["slots"]["page_id"].tolist() if i] for _ in range(4)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert len({tuple(order) for order in orders}) == len(orders)


# Timing.


def test_a_miss_costs_the_same_in_a_full_pool_as_in_an_empty_one() -> None:
    """Apart from the hit itself, a look-up reveals nothing of what others have cached."""
    managers = [CacheManager(4000, [CacheGroupSpec(FULL)], 1 << 14) for _ in range(2)]
    for i in range(30):
        cache(managers[1], [i] * 400)
    numbers = itertools.count(1000)

    def miss(manager: CacheManager) -> Callable[[], object]:
        def look_up() -> None:
            number = next(numbers)
            assert manager.get_computed_pages(EngineRequest(f"{number}", [number] * 400))[1] == 0

        return look_up

    empty, full = (median_seconds(miss(manager), 300) for manager in managers)
    print(f"a miss: {empty * 1e6:.1f} us in an empty pool, {full * 1e6:.1f} us in a full one")
    assert full < 4 * empty
    assert empty < 4 * full

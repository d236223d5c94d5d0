"""``hash_algo="sha256_cbor"``: the bytes of vLLM 0.33, by digests from its own function, and by its rules written again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from managing import grouped
from settings import NUM_OPERATIONS

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
from pagepool.compat.easydel.names import RequestPageHashes
from pagepool.errors import ArgumentError, PagePoolError

cbor2 = pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")

DEFAULT_SEED = "vllm-none-hash"
TUNED = ("tuned", "/adapters/tuned")


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def feature(identifier: str, offset: int, length: int, mm_hash: str | None = None) -> Any:
    """An image with vLLM's attributes."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_hash=mm_hash, modality="image", mm_position=position)


def make_manager(page_size: int = 4, **options: Any) -> CacheManager:
    spec = FullAttentionSpec(page_size, 1, 8, "float16", False)
    return CacheManager(256, [CacheGroupSpec(spec)], 4096, **grouped(hash_algo="sha256_cbor", **options))


def digests_of(manager: CacheManager, request_id: str) -> list[bytes]:
    return [page_hash.hash_value.to_bytes(32, "big") for page_hash in RequestPageHashes(manager.registry)[request_id]]


def hash_prompt(token_ids: list[int], page_size: int = 4, hash_seed: Any = None, **keys: Any) -> list[bytes]:
    manager = make_manager(page_size, hash_seed=hash_seed)
    manager.get_computed_pages(EngineRequest("r", [*token_ids, *[0] * page_size], **keys))
    return digests_of(manager, "r")[: len(token_ids) // page_size]


# vLLM's rules, in our own words: a block is its parent, its tokens, and an array of tagged keys, or null for none. The keys are
# the adapter, in every block; the images that overlap the block, by where they begin in it; the salt, in the first block alone.


def reference_keys(start: int, stop: int, cache_salt: Any, lora_id: Any, mm_features: Any) -> Iterator[tuple[Any, ...]]:
    if lora_id is not None:
        name, path = lora_id
        yield "lora", name, path
    for image in mm_features:
        first, last = image.mm_position.offset, image.mm_position.offset + image.mm_position.length
        if first < stop and last > start:
            yield "mm", image.identifier, first - start
    if start == 0 and cache_salt:
        yield "cache_salt", cache_salt


def reference(
    token_ids: list[int],
    page_size: int = 4,
    hash_seed: str = DEFAULT_SEED,
    cache_salt: Any = None,
    lora_id: Any = None,
    mm_features: Any = (),
) -> list[bytes]:
    digests = [hashlib.sha256(cbor2.dumps(hash_seed, canonical=True)).digest()]
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        stop = start + page_size
        keys = list(reference_keys(start, stop, cache_salt, lora_id, mm_features))
        block = [digests[-1], token_ids[start:stop], keys or None]
        digests.append(hashlib.sha256(cbor2.dumps(block, canonical=True)).digest())
    return digests[1:]


IMAGES = [feature("cat", 1, 2), feature("dog", 6, 9, "its hash without an adapter")]
ALL = {"cache_salt": "pepper", "lora_id": TUNED, "mm_features": IMAGES}

# What `get_request_block_hasher(4, sha256_cbor)` of vLLM 0.33.0 returned for the tokens 100, 101, ..., 117.
VLLM_DIGESTS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (
        {},
        """f6660814c0f5fab668e3a3e4cc9d7c843f32e254d6a433791cccfba573d0cf8a
        da25ae2ea37cfe14f808bf230a0ad0c2bca0e7a731e7f54cf20358aa4fbb8879
        eb9079a54ab82dd77ab4341a459f41a0c8cd066252c86652e842ef1712133bd6
        22cb286178bc7b7f7bb2f482b8b267b3d007cda8bee4eb464cb3b9d034695fdd""",
    ),
    "all": (
        ALL,
        """5ddf3a4dd7165f537b6dce27cbfe75a509baca15a710baa5e45679acbbd1bf3c
        329164f02711a8e5d7c7973a61e83e08bb60ffb0c2318cbb9760e48cf600319f
        4986987833541665571eaaa912b40727e0d5a8d2506fbdfbe0765fe303647f73
        30826514ef4fa5fc176360c46a7f6349dfc6cab7d1ef7571d8d3096f374bd350""",
    ),
}


@pytest.mark.parametrize("name", VLLM_DIGESTS)
def test_digests_are_those_that_vllm_gave(name: str) -> None:
    keys, expected = VLLM_DIGESTS[name]
    token_ids = list(range(100, 118))
    assert [digest.hex() for digest in hash_prompt(token_ids, **keys)] == expected.split()
    assert [digest.hex() for digest in reference(token_ids, **keys)] == expected.split()


@pytest.mark.parametrize("value", ["0", "", "random", "17"])
def test_the_seed_of_the_environment_is_that_of_vllm(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is taken whatever it says, unless the manager has a seed."""
    monkeypatch.setenv("PYTHONHASHSEED", value)
    token_ids = list(range(100, 118))
    assert hash_prompt(token_ids) == reference(token_ids, hash_seed=value)
    assert hash_prompt(token_ids, hash_seed="mine") == reference(token_ids, hash_seed="mine")
    first, *_ = hash_prompt(token_ids)
    is_first = first.hex() == "71f40f563a7a259f47b9267c311bf00d383743b642efb532825c8227cad5456f"  # from vLLM with the seed 0
    assert is_first == (value == "0")


@pytest.mark.parametrize("hash_seed", [7, "7", b"7"])
def test_a_seed_is_hashed_as_text(hash_seed: Any) -> None:
    assert hash_prompt([1, 2, 3, 4], hash_seed=hash_seed) == reference([1, 2, 3, 4], hash_seed="7")


def random_keys(rng: Random, num_tokens: int, page_size: int) -> dict[str, Any]:
    """Return salt, adapter and images, each or none. Images are in order and do not overlap, as in vLLM."""
    images, start = [], rng.randint(0, page_size)
    while start < num_tokens and rng.random() < 0.7:
        length = rng.randint(0, 2 * page_size)
        images.append(feature(rng.choice(("cat", "dog")), start, length, rng.choice((None, "without an adapter"))))
        start += length + rng.choice((0, 0, 1, page_size))
    return {
        "cache_salt": rng.choice((None, "pepper", "é")),
        "lora_id": rng.choice((None, TUNED, ("other", "/adapters/tuned"))),
        "mm_features": images,
    }


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_random_prompts_are_hashed_as_by_the_rules(page_size: int) -> None:
    rng = Random(page_size)
    for _ in range(max(NUM_OPERATIONS // 2000, 25)):
        num_tokens = rng.randint(0, 6 * page_size)
        token_ids = [rng.randrange(1 << rng.choice((4, 12, 20, 31))) for _ in range(num_tokens)]
        keys = random_keys(rng, num_tokens, page_size)
        assert hash_prompt(token_ids, page_size, **keys) == reference(token_ids, page_size, **keys), keys


def test_pages_that_get_full_later_are_hashed_the_same() -> None:
    """In chunks, and token by token when decoding."""
    manager = make_manager()
    request = EngineRequest("r", list(range(100, 110)), **ALL)
    for num_tokens in (3, 6, 1):
        manager.allocate_slots(request, num_tokens)
        request.num_computed_tokens += num_tokens
    for token_id in range(110, 118):
        request.append_output_token_ids(token_id)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    assert [digest.hex() for digest in digests_of(manager, "r")] == VLLM_DIGESTS["all"][1].split()


# Intended and unavoidable differences: docs/engines.md has the table.


@pytest.mark.parametrize(
    ("keys", "content"),
    [
        ({"lora_id": 5}, [("lora", 5)]),
        ({"lora_id": "tuned"}, [("lora", "tuned")]),
        ({"cache_salt": ""}, [("cache_salt", "")]),
        ({"cache_salt": b"raw"}, [("cache_salt", b"raw")]),
    ],
)
def test_keys_that_vllm_does_not_have(keys: dict[str, Any], content: list[Any]) -> None:
    """Their form differs from all keys of vLLM, so they share no page with one."""
    root = hashlib.sha256(cbor2.dumps(DEFAULT_SEED, canonical=True)).digest()
    expected = hashlib.sha256(cbor2.dumps([root, [1, 2, 3, 4], content], canonical=True)).digest()
    assert hash_prompt([1, 2, 3, 4], **keys) == [expected] != reference([1, 2, 3, 4])


def test_features_that_overlap_all_enter_a_page() -> None:
    """vLLM uses only the first, until it ends."""
    video, sound = feature("video", 0, 8), feature("sound", 1, 4)
    assert hash_prompt(list(range(8)), mm_features=[video, sound]) != hash_prompt(list(range(8)), mm_features=[video])


@pytest.mark.parametrize("keys", [{"cache_salt": "\udc80"}, {"lora_id": ("\udc80", "path")}])
def test_text_that_is_no_unicode_is_refused(keys: dict[str, Any]) -> None:
    manager = make_manager()
    request = EngineRequest("r", [1, 2, 3, 4, 5], **keys)
    for call in (manager.get_computed_pages, lambda request: manager.allocate_slots(request, 5)):
        with pytest.raises(ArgumentError, match="hash_algo='sha256_cbor': got text that is not valid Unicode"):
            call(request)
    manager.free(request)
    manager.free_page_hashes(request)
    assert manager.page_pool.get_num_free_pages() == 255
    manager.check()


def test_a_seed_that_is_no_text_is_refused() -> None:
    with pytest.raises(PagePoolError, match=r"hash_seed: .*allowed with hash_algo='sha256_cbor': text, as str or UTF-8"):
        make_manager(hash_seed=b"\xff")

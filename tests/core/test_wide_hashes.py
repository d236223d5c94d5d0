"""Rows hashed by SHA-256: their digests are hashlib's over the documented messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from admissions import admission
from hybrids import make_manager

from pagepool import FullAttentionSpec, PageTable, RunningBatch
from pagepool.hashing import RequestExtraKeys, VllmExtraKeys, encode_extra_keys

SIZE = 4  # tokens of a page
MAX_LEN = 160
NUM_ROWS = 6
EDGES = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1]
SPEC = FullAttentionSpec(page_size=SIZE, num_kv_heads=1, head_size=8, dtype="bfloat16", use_mla=False)


class Feature(NamedTuple):
    """A picture."""

    mm_hash: str
    placeholder_range: Any


class Place(NamedTuple):
    offset: int
    length: int


def by_hashlib(parent: bytes, token_ids: list[int], keys: Any, behind: list[int]) -> bytes:
    """Return the digest of a page, with the tokens of its lookahead, as docs/engines.md has it."""
    return hashlib.sha256(parent + np.array(token_ids + behind, "<i4").tobytes() + encode_extra_keys(keys)).digest()


def by_cbor2(parent: bytes, token_ids: list[int], keys: Any, behind: list[int]) -> bytes:
    """Return the digest of a page as vLLM's `hash_block_tokens` makes it with its `sha256_cbor`."""
    cbor2 = pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")
    keys = (keys, *behind) if behind else keys
    return hashlib.sha256(cbor2.dumps((parent, tuple(token_ids), keys), canonical=True)).digest()


HASHES: dict[str, tuple[Callable[[bytes, list[int], Any, list[int]], bytes], type[RequestExtraKeys], str]] = {
    "sha256": (by_hashlib, RequestExtraKeys, "lora_id"),
    "sha256_cbor": (by_cbor2, VllmExtraKeys, "lora_id"),
}


def root_of(hash_algo: str, hash_lookahead: int) -> bytes:
    """Return the parent of first pages without a seed."""
    if hash_algo == "sha256":
        key = encode_extra_keys((("lookahead", hash_lookahead),))
        return hashlib.sha256(b"root" + key).digest() if hash_lookahead else bytes(32)
    cbor2 = pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")
    return hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()


def digests_of(hash_algo: str, token_ids: list[int], keys: dict[str, Any], hash_lookahead: int) -> list[bytes]:
    """Return the digests of all full pages of a request whose lookahead is known."""
    hash_page, kind, _ = HASHES[hash_algo]
    request = type("Request", (), {"cache_salt": None, "lora_id": None, "mm_features": ()} | keys)()
    extra_keys, parent, digests = kind.of(request), root_of(hash_algo, hash_lookahead), []
    for stop in range(SIZE, len(token_ids) - hash_lookahead + 1, SIZE):
        page_keys = extra_keys.of_page(stop - SIZE, stop + hash_lookahead) if extra_keys else None
        parent = hash_page(parent, token_ids[stop - SIZE : stop], page_keys, token_ids[stop : stop + hash_lookahead])
        digests.append(parent)
    return digests


def draw_tokens(rng: Random, num: int) -> list[int]:
    return [rng.choice(EDGES) if rng.random() < 0.3 else rng.randrange(1 << rng.randrange(1, 31)) for _ in range(num)]


def draw_keys(rng: Random) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if rng.random() < 0.4:
        keys["cache_salt"] = rng.choice(["tenant", "x" * 300, "é"])
    if rng.random() < 0.4:
        keys["lora_id"] = rng.choice([7, "adapter", ("adapter", "/models/adapter")])
    if rng.random() < 0.4:
        start = rng.randrange(40)
        keys["mm_features"] = [Feature("ab" * 32, Place(start, 9)), Feature("cd" * 32, Place(start + rng.randrange(9, 30), 5))]
    return keys


@pytest.mark.parametrize("hash_lookahead", range(4))
@pytest.mark.parametrize("hash_algo", HASHES)
def test_rows_have_the_digests_of_hashlib(hash_algo: str, hash_lookahead: int) -> None:
    """Cached pages of prompts and answers. `check` compares rows with the manager's hashes, whatever becomes of them."""
    root_of(hash_algo, hash_lookahead)
    for seed in range(8):
        rng = Random(f"{hash_algo} {seed}")  # the same prompts with each lookahead
        options = {"hash_algo": hash_algo, "use_eagle": hash_lookahead > 0, "hash_lookahead": hash_lookahead}
        manager = make_manager(SPEC, num_pages=400, max_model_len=MAX_LEN, hash_seed=None, **options)
        batch = RunningBatch(manager, PageTable(NUM_ROWS, MAX_LEN // SIZE, 1024))
        requests = [(draw_tokens(rng, rng.randrange(1, 100)), draw_keys(rng)) for _ in range(NUM_ROWS)]
        for row, (token_ids, keys) in enumerate(requests):
            assert batch.admit(row, token_ids, **admission(**keys)) is not None
        for _ in range(50):
            tokens = draw_tokens(rng, NUM_ROWS)
            assert batch.step(range(NUM_ROWS), tokens).num_grown == NUM_ROWS
            for (token_ids, _), token in zip(requests, tokens, strict=True):
                token_ids.append(token)
        batch.check()
        for row, (token_ids, keys) in enumerate(requests):
            digests = digests_of(hash_algo, token_ids, keys, hash_lookahead)
            found = [manager._store.page_hash_of(page_id) for page_id in batch.get_page_ids(row)[0][: len(digests)]]
            assert [page.page_hash.hash_value for page in found] == [int.from_bytes(each, "big") for each in digests]

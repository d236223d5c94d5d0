"""Requests with images but without features: each is hashed with a nonce, and hits only its own pages."""

from __future__ import annotations

from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hybrids import FULL
from hybrids import make_manager as make_hybrid
from sources import run_python
from twin_engine import Request

from pagepool import CacheManager, hash_request_tokens
from pagepool.hashing import RequestExtraKeys

ALGORITHMS: dict[str, dict[str, Any]] = {
    "siphash128": {},
    "a seed": {"hash_seed": "known"},
    "sha256": {"hash_algo": "sha256"},
    "sha256_cbor": {"hash_algo": "sha256_cbor"},
    "hash": {"hash_algo": hash},
    "a weak callable": {"hash_algo": lambda content: 0},
}
TOKENS = [7] * 9
make_manager = partial(make_hybrid, FULL, num_pages=32, hash_seed=None)


@pytest.fixture(params=ALGORITHMS)
def manager(request: pytest.FixtureRequest) -> CacheManager:
    return make_manager(**ALGORITHMS[request.param])


def make_seen(request_id: str = "a", **attributes: Any) -> Request:
    return Request(request_id, list(TOKENS), **{"has_vision": True} | attributes)


def compute(manager: CacheManager, request: Request) -> int:
    """Run a request to its end; return the number of hit tokens."""
    hits, num_hit_tokens = manager.get_computed_pages(request)
    assert manager.allocate_slots(request, 9 - num_hit_tokens, num_hit_tokens, hits) is not None
    manager.free(request)
    return num_hit_tokens


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize("attributes", [{}, {"cache_salt": "s"}, {"lora_id": 1}, {"mm_features": []}, {"mm_features": None}])
def test_it_shares_with_no_other_request(manager: CacheManager, attributes: dict[str, Any], is_forgotten: bool) -> None:
    """Not even a request of the same id, or an equal one, with or without images."""
    first = make_seen(**attributes)
    assert compute(manager, first) == 0
    if is_forgotten:
        manager.free_page_hashes(first)
    image = SimpleNamespace(mm_hash="a", modality="vision", placeholder_range=None)
    others = [
        *[make_seen(**attributes), make_seen("b", **attributes), copy(first), make_seen(has_vision=False)],
        *[make_seen("a", has_vision=False, cache_salt="a"), make_seen("a", mm_features=[image])],
    ]
    for other in others:
        assert manager.probe(other).num_hit_tokens == 0
        assert compute(manager, other) == 0
    manager.check()


def test_pages_that_are_hashed_by_hand_are_shared_with_nobody() -> None:
    first, second = (hash_request_tokens(hash, 4, make_seen()) for _ in range(2))
    assert [len(first), len({*first, *second})] == [2, 4]


def test_nonces_cannot_be_guessed() -> None:
    """128 bits that differ in each process, whatever the seeds."""
    program = (
        "from types import SimpleNamespace\n"
        "from pagepool.hashing import RequestExtraKeys\n"
        "print(RequestExtraKeys.of(SimpleNamespace(request_id='a', has_vision=True)).request_keys)\n"
    )
    told = {run_python("-c", program, PYTHONHASHSEED="0").stdout for _ in range(2)}
    assert len(told) == 2
    nonces = [RequestExtraKeys.of(make_seen()).request_keys[0][1] for _ in range(1000)]
    assert len(set(nonces)) == 1000
    assert {len(bytes.fromhex(nonce)) for nonce in nonces} == {16}


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor"])
@pytest.mark.parametrize("hashes_as_bytes", [False, True])
def test_events_tell_it(hash_algo: str, hashes_as_bytes: bool) -> None:
    pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
    from wire import decode_batch

    from pagepool.events import EventBatch, encode_batch

    manager = make_manager(hash_algo=hash_algo)
    manager.enable_events(hashes_as_bytes=hashes_as_bytes)
    requests = [make_seen(), make_seen()]
    for request in [*requests, requests[1]]:
        compute(manager, request)
    stored = decode_batch(encode_batch(EventBatch(1.5, manager.take_events(), 0))).events
    assert [len(event.block_hashes) for event in stored] == [2, 2]
    keys = [event.extra_keys for event in stored]
    assert [[len(keys[i][0]), keys[i][1]] for i in range(2)] == [[1, None]] * 2
    assert len({keys[0][0][0], keys[1][0][0]}) == 2
    assert all(len(bytes.fromhex(keys[i][0][0])) == 16 for i in range(2))

"""The secret key of the hashes: an empty seed, which anybody can guess, makes none, and no pickle or repr reveals it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hybrids import FULL
from hybrids import make_manager as make_hybrid
from sources import run_python

from pagepool import CacheManager, EngineRequest, PageTable, RequestTraits, RunningBatch
from pagepool._core import HashChain
from pagepool.compat.easydel.names import RequestPageHashes
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.hashing import get_hash_seed, get_siphash_key
from pagepool.page_hashing import PageHasher, RequestHashes, make_page_hasher

ALGORITHMS = ("siphash128", "sha256", "sha256_cbor", hash)


@pytest.fixture(params=ALGORITHMS, ids=str)
def hash_algo(request: pytest.FixtureRequest) -> Any:
    if request.param == "sha256_cbor":
        pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")
    return request.param


make_manager = partial(make_hybrid, FULL, num_pages=64, max_model_len=256, hash_seed=None)


# Seeds.

EMPTY = ["", b"", np.str_(""), np.bytes_(b"")]


@pytest.mark.parametrize("hash_seed", EMPTY, ids=repr)
def test_an_empty_seed_is_refused(hash_algo: Any, hash_seed: Any) -> None:
    for call in (
        lambda: make_manager(hash_algo=hash_algo, hash_seed=hash_seed),
        lambda: make_page_hasher(hash_algo, 4, hash_seed),
        lambda: get_hash_seed(hash_seed),
        lambda: get_siphash_key(hash_seed),
    ):
        with pytest.raises(ArgumentError, match=r"hash_seed: got (''|b''|np\.).*, allowed: .* not empty"):
            call()


def test_an_empty_environment_names_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python. `tests/engines/test_vllm_hashes.py` tests vLLM's rule, which `sha256_cbor` follows."""
    program = (
        "from pagepool.hashing import NONE_HASH, get_siphash_key; import os\n"
        "print(get_siphash_key().hex(), NONE_HASH, hash('a'))"
    )
    for seed, is_secret in (("", True), ("5", False)):
        first, second = (run_python("-c", program, PYTHONHASHSEED=seed).stdout.split() for _ in range(2))
        assert [mine != other for mine, other in zip(first, second, strict=True)] == [is_secret] * 3
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    secret = get_siphash_key()
    monkeypatch.setenv("PYTHONHASHSEED", "")
    assert get_siphash_key() == secret


# Pickles, copies and reprs.


def make_busy(manager: CacheManager) -> list[Any]:
    """Return a manager after some work, and the objects that an engine got from it."""
    pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
    manager.enable_events()
    request = EngineRequest("a", list(range(19)), cache_salt="pepper")
    refused = EngineRequest("b", list(range(300)))
    hits, _ = manager.get_computed_pages(request)
    held = manager.allocate_slots(request, 19, 0, hits)
    hashes = RequestPageHashes(manager.registry)
    objects = [hits, held, manager.page_pool.pages[1], hashes, manager.stats(), manager.take_events()]
    hits, _ = manager.get_computed_pages(refused)
    assert manager.allocate_slots(refused, 252, 0, hits) is None
    if manager.registry.hasher.is_native:
        batch = RunningBatch(manager, PageTable(2, 64, 64))
        batch.admit(0, list(range(9)), traits=RequestTraits(cache_salt="salt"))
        batch.admit(1, list(range(250)))
        objects += [batch, batch.plan([])]
    return [manager, *objects]


def list_reachable(roots: list[Any]) -> Iterator[Any]:
    """Yield all objects of this package's classes reachable from `roots`, each once."""
    seen: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        item = pending.pop()
        if id(item) not in seen and not isinstance(item, type) and type(item).__name__ not in ("module", "function"):
            seen[id(item)] = item
            pending += gc.get_referents(item)
    return (item for item in seen.values() if type(item).__module__.split(".")[0] == "pagepool")


def secrets_of(manager: CacheManager, has_seed: bool = True) -> list[bytes]:
    """Return the key, and the root if a seed makes it, in all forms in which they may be written."""
    hasher = manager.registry.hasher
    secrets = [hasher.chain_key] if has_seed or hasher.chain_algorithm == "siphash128" else []
    return [
        form
        for secret in secrets
        for form in (
            *(secret, secret.hex().encode(), repr(secret)[2:-1].encode()),
            *(str(int.from_bytes(secret, "little")).encode(), str(int.from_bytes(secret, "big")).encode()),
        )
    ]


class Refused(Exception):
    """A pickler raised an error; `args` has the bytes written until then."""


def dump(item: Any, protocol: int, pickler: Any) -> bytes:
    """Return the written bytes. The pickler in Python writes as it proceeds."""
    file = io.BytesIO()
    try:
        pickler(file, protocol).dump(item)
    except (TypeError, pickle.PicklingError) as error:
        raise Refused(file.getvalue()) from error
    return file.getvalue()


@pytest.mark.parametrize("seed", ["a secret that only two engines know", None])
@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler])  # type: ignore[attr-defined]
def test_no_pickle_has_the_key(hash_algo: Any, seed: str | None, pickler: Any) -> None:
    manager = make_manager(hash_algo=hash_algo, hash_seed=seed)
    secrets = secrets_of(manager, seed is not None)
    reachable = list(list_reachable(make_busy(manager)))
    names = {type(item).__name__ for item in reachable}
    assert {"CacheManager", "RequestHashes", "HashChain", "PageStore", "EventSource", "RequestPageHashes"} <= names
    num_pickled = 0
    for item in reachable:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            try:
                written = dump(item, protocol, pickler)
                num_pickled += 1
            except Refused as refusal:
                [written] = refusal.args
            assert not [secret for secret in secrets if secret in written], f"{type(item).__name__}, protocol {protocol}"
    assert num_pickled


def test_no_repr_has_the_key(hash_algo: Any) -> None:
    manager = make_manager(hash_algo=hash_algo, hash_seed="a secret that only two engines know")
    secrets = secrets_of(manager)
    for item in list_reachable(make_busy(manager)):
        shown = f"{item!r} {item}".encode("utf-8", "backslashreplace")
        assert not [secret for secret in secrets if secret in shown], type(item).__name__


WAYS = {
    **{f"pickle {protocol}": lambda item, protocol=protocol: pickle.dumps(item, protocol) for protocol in range(6)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "reduce": lambda item: item.__reduce__(),
    "reduce_ex": lambda item: item.__reduce_ex__(2),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_has_the_key_is_neither_pickled_nor_copied(hash_algo: Any, way: str) -> None:
    """The error names the object itself or one that it holds."""
    manager = make_manager(hash_algo=hash_algo)
    objects = make_busy(manager)
    own = [item for item in list_reachable(objects) if isinstance(item, CacheManager | PageHasher | HashChain | RequestHashes)]
    assert {PageHasher, HashChain, RequestHashes, CacheManager} == {
        kind for kind in (PageHasher, HashChain, RequestHashes, CacheManager) for item in own if isinstance(item, kind)
    }
    for item in [*own, *[item for item in objects if isinstance(item, RunningBatch | RequestPageHashes)]]:
        with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
            WAYS[way](item)
    manager.check()


@pytest.mark.parametrize("way", ["pickle 2", "pickle 5", "deepcopy"])
def test_what_has_a_pool_is_not_pickled_either(way: str) -> None:
    manager = make_manager()
    make_busy(manager)
    for item in (manager.page_pool.store, manager.page_pool, manager.registry.event_source, manager.page_pool.pages[1]):
        with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
            WAYS[way](item)

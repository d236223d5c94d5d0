"""Block hashes of vLLM's requests: the bytes of its own functions where it is installed, and of its rules written again."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from settings import NUM_OPERATIONS

from pagepool.compat.vllm import hasher as native
from pagepool.errors import ArgumentError, ArgumentTypeError, CompatError

EDGES = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, -1, -24, -25, -256, -257, -(2**31)]
LARGE = [2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**200, -(2**31) - 1, -(2**63), -(2**64) - 1]
LAST_NATIVE = 13_000  # tokens in a block


def sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def sha256_cbor(value: Any) -> bytes:
    cbor2 = pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


FUNCTIONS = {"sha256": sha256, "sha256_cbor": sha256_cbor}


def other_function(value: Any) -> bytes:
    return hashlib.sha512(repr(value).encode()).digest()


# SHA-256


@pytest.mark.parametrize("with_instructions", [True, False], ids=["instructions", "portable"])
def test_data_of_all_lengths(with_instructions: bool) -> None:
    try:
        native._sha256(b"", with_instructions)
    except ArgumentError as error:
        pytest.skip(str(error))
    rng = Random(1)
    for size in [*range(400), 1_000_000, *(rng.randrange(1 << 17) for _ in range(40))]:
        data = rng.randbytes(size)
        assert native._sha256(data, with_instructions) == hashlib.sha256(data).digest(), size


# Encoded blocks


@pytest.mark.parametrize("is_cbor", [False, True])
def test_what_is_not_encoded(is_cbor: bool) -> None:
    class Int(int):
        pass

    for token in (*LARGE, True, None, 1.0, "1", np.int32(1), np.int64(1), Int(1), []):
        assert native._hash_block(bytes(32), [1, token, 2], is_cbor) is None  # type: ignore[list-item]
    assert native._hash_block(bytes(256), [1], is_cbor) is None
    assert native._hash_block(bytes(32), [], is_cbor) is None
    assert native._hash_block(bytes(32), [2**31 - 1] * (LAST_NATIVE + 1), is_cbor) is None


# Engines: vLLM where it is installed, and a stand-in


class Engine(NamedTuple):
    utils: Any  # vllm.v1.core.kv_cache_utils
    functions: dict[str, Callable[[Any], bytes]]
    make_request: Callable[..., Any]


class FakeRequest:
    """A request with the attributes of vLLM's that hashers read."""

    def __init__(self, token_ids: list[Any], block_hasher: Any = None, **keys: Any) -> None:
        self._all_token_ids = token_ids
        self.block_hashes: list[bytes] = []
        self.mm_features = keys.get("mm_features", [])
        self.lora_request = keys.get("lora_request")
        self.cache_salt = keys.get("cache_salt")
        self.prompt_embeds = keys.get("prompt_embeds")
        self._block_hasher = block_hasher
        self.append_output_token_ids([])

    def append_output_token_ids(self, token_ids: Any) -> None:
        self._all_token_ids.extend(token_ids if isinstance(token_ids, list) else [token_ids])
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))


def fake_extra_keys(request: Any, start: int, stop: int, feature: int) -> tuple[Any, int]:
    keys = [("lora", request.lora_request)] if request.lora_request else []
    keys += [("cache_salt", request.cache_salt)] if start == 0 and request.cache_salt else []
    return tuple(keys) or None, feature


def make_stand_in(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Modules in vLLM's places, whose own hasher counts its calls in `num_calls`."""
    utils, hashing = ModuleType("vllm.v1.core.kv_cache_utils"), ModuleType("vllm.utils.hashing")

    def hash_block_tokens(function: Any, parent: Any, token_ids: Any, extra_keys: Any = None) -> bytes:
        digest: bytes = function((parent or utils.NONE_HASH, tuple(token_ids), extra_keys))
        return digest

    def get_request_block_hasher(size: int, function: Any, num_hash_lookahead_tokens: int = 0) -> Any:
        def hash_request(request: Any) -> list[bytes]:
            utils.num_calls += 1
            digests: list[bytes] = list(request.block_hashes)
            for start in range(len(digests) * size, len(request._all_token_ids) - size - num_hash_lookahead_tokens + 1, size):
                token_ids = request._all_token_ids[start : start + size]
                keys, _ = fake_extra_keys(request, start, start + size, 0)
                digests.append(hash_block_tokens(function, digests[-1] if digests else None, token_ids, keys))
            return digests[len(request.block_hashes) :]

        return hash_request

    vars(utils).update(
        NONE_HASH=b"none" * 8,
        num_calls=0,
        hash_block_tokens=hash_block_tokens,
        generate_block_hash_extra_keys=fake_extra_keys,
        get_request_block_hasher=get_request_block_hasher,
    )
    vars(hashing).update(FUNCTIONS)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setitem(sys.modules, hashing.__name__, hashing)
    return Engine(utils, FUNCTIONS | {"other": other_function}, FakeRequest)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return make_stand_in(monkeypatch)


def import_vllm() -> Engine:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM and what it imports
        utils, hashing = import_module("vllm.v1.core.kv_cache_utils"), import_module("vllm.utils.hashing")
        request_class = import_module("vllm.v1.request").Request
        params = import_module("vllm.sampling_params").SamplingParams(max_tokens=5)

    def make_request(token_ids: list[Any], block_hasher: Any = None, **keys: Any) -> Any:
        return request_class("r", token_ids, params, None, block_hasher=block_hasher, **keys)

    names = ("sha256", "sha256_cbor", "xxhash")
    return Engine(utils, {name: getattr(hashing, name) for name in names} | {"other": other_function}, make_request)


@pytest.fixture(params=["stand-in", "vLLM"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = make_stand_in(monkeypatch) if request.param == "stand-in" else import_vllm()
    monkeypatch.setattr(made.utils, "NONE_HASH", bytes(range(32)), raising=False)
    return made


def test_plain_requests_are_hashed_here(stand_in: Engine) -> None:
    for name in FUNCTIONS:
        find = native.get_request_block_hasher(4, stand_in.functions[name])
        request = stand_in.make_request(list(range(18)), find, cache_salt="pepper")
        assert len(request.block_hashes) == 4
        request.append_output_token_ids([18, 19])
    assert stand_in.utils.num_calls == 0


@pytest.mark.parametrize(
    "keys",
    [{"mm_features": ["image"]}, {"lora_request": "tuned"}, {"prompt_embeds": "embeddings"}],
    ids=lambda keys: next(iter(keys)),
)
def test_other_requests_are_left_to_vllm_when_a_block_is_full(stand_in: Engine, keys: dict[str, Any]) -> None:
    find = native.get_request_block_hasher(4, sha256)
    request = stand_in.make_request([1, 2, 3], find, **keys)
    assert stand_in.utils.num_calls == 0
    request.append_output_token_ids(4)
    assert stand_in.utils.num_calls == 1
    assert (
        request.block_hashes
        == stand_in.make_request([1, 2, 3, 4], stand_in.utils.get_request_block_hasher(4, sha256), **keys).block_hashes
    )


def test_tokens_that_are_not_encoded_are_left_to_vllm(stand_in: Engine) -> None:
    find = native.get_request_block_hasher(2, sha256)
    own = stand_in.utils.get_request_block_hasher(2, sha256)
    for num_calls, token in enumerate((2**31, True, np.int64(3))):
        request = stand_in.make_request([1, 2, 3, token, 5])
        assert stand_in.utils.num_calls == 2 * num_calls
        assert find(request) == own(request)


def outcome(find: Any, request: Any) -> Any:
    """What a hasher returns, or raises, and what the request has then."""
    try:
        result = find(request)
    except Exception as error:
        return type(error), str(error)
    request.block_hashes.extend(result)
    return result


def random_token(rng: Random, kind: str) -> Any:
    if kind == "odd" and rng.random() < 0.02:
        return rng.choice((*LARGE, True, np.int64(7), None, "text"))
    return rng.choice(EDGES) if kind == "edges" else rng.randrange(1 << rng.randint(1, 18))


def random_keys(rng: Random, num_tokens: int, is_fake: bool) -> dict[str, Any]:
    """Extra keys of a request: mostly none."""
    keys: dict[str, Any] = {}
    if rng.random() < 0.3:
        keys["cache_salt"] = rng.choice(("pepper", "é", ""))
    if rng.random() < 0.1:
        keys["lora_request"] = "tuned" if is_fake else SimpleNamespace(lora_name="tuned", lora_path="/adapters/tuned")
    if rng.random() < 0.1 and not is_fake:
        position = SimpleNamespace(offset=rng.randint(0, num_tokens), length=rng.randint(1, 20))
        keys["mm_features"] = [SimpleNamespace(identifier="cat", mm_position=position)]
    if rng.random() < 0.05 and not is_fake and num_tokens:
        keys["prompt_embeds"] = import_module("torch").zeros(num_tokens, 3)
    return keys


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 16, 23, 24, 64, 255, 256, 300, 1000])
def test_random_requests_are_hashed_as_by_vllm(engine: Engine, name: str, block_size: int) -> None:
    """Appended token by token and in chunks, with all kinds of tokens and extra keys, and another NONE_HASH now and then."""
    rng = Random(block_size)
    function = engine.functions[name]
    own, find = (
        engine.utils.get_request_block_hasher(block_size, function),
        native.get_request_block_hasher(block_size, function),
    )
    for case in range(max(NUM_OPERATIONS // 1300, 20)):
        engine.utils.NONE_HASH = rng.choice((*map(rng.randbytes, (0, 1, 23, 24, 32, 32, 32, 255, 256, 300)), "text"))
        kind = rng.choice(("plain", "plain", "edges", "odd"))
        token_ids = [random_token(rng, kind) for _ in range(rng.randint(0, 4 * block_size))]
        keys = random_keys(rng, len(token_ids), engine.make_request is FakeRequest)
        first, second = (engine.make_request(list(token_ids), **keys) for _ in range(2))
        for _ in range(rng.randint(1, 6)):
            assert outcome(find, first) == outcome(own, second), (case, kind, keys)
            chunk = [random_token(rng, kind) for _ in range(rng.choice((1, 1, rng.randint(0, 2 * block_size))))]
            first.append_output_token_ids(list(chunk))
            second.append_output_token_ids(list(chunk))
        assert first.block_hashes == second.block_hashes


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("block_size", [LAST_NATIVE, LAST_NATIVE + 1])
def test_huge_blocks(engine: Engine, name: str, block_size: int) -> None:
    """Pickle frames of 64 KiB."""
    rng = Random(block_size)
    function = engine.functions[name]
    for bits in (8, 16, 31):
        request = engine.make_request([rng.randrange(1 << bits) for _ in range(2 * block_size + 1)])
        expected = engine.utils.get_request_block_hasher(block_size, function)(request)
        assert native.get_request_block_hasher(block_size, function)(request) == expected
        assert len(expected) == 2


@pytest.mark.parametrize("name", ["other", "sha256", "sha256_cbor"])
def test_other_functions_and_lookahead_are_left_to_vllm(engine: Engine, name: str) -> None:
    function = engine.functions[name]
    lookahead = () if name == "other" else (2,)
    if lookahead and "num_hash_lookahead_tokens" not in signature(engine.utils.get_request_block_hasher).parameters:
        pytest.skip("this vLLM does not hash tokens ahead")
    request = engine.make_request(list(range(40)))
    find = native.get_request_block_hasher(4, function, *lookahead)
    assert not isinstance(getattr(find, "__self__", None), native.RequestBlockHasher)
    assert find(request) == engine.utils.get_request_block_hasher(4, function, *lookahead)(request)


def test_a_function_that_changed_is_left_to_vllm(stand_in: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another protocol of pickle."""
    monkeypatch.setattr(sys.modules["vllm.utils.hashing"], "sha256", other_function)
    find = native.get_request_block_hasher(4, other_function)
    find(stand_in.make_request([1, 2, 3, 4]))
    assert stand_in.utils.num_calls == 1


@pytest.mark.parametrize("library", ["pickle", "cloudpickle"])
def test_pickled_hashers_go_on(engine: Engine, library: str) -> None:
    module = pytest.importorskip(library)
    for name in FUNCTIONS:
        find = native.get_request_block_hasher(4, engine.functions[name])
        request = engine.make_request(list(range(10)), find)
        if library == "pickle" and engine.make_request is not FakeRequest:
            twin = engine.make_request(list(range(10)), pickle.loads(pickle.dumps(find)))
        else:
            twin = module.loads(module.dumps(request))
        assert isinstance(twin._block_hasher.__self__, native.RequestBlockHasher)
        assert twin._block_hasher.__self__.caching_hash_fn is engine.functions[name]
        assert twin._block_hasher.__self__.hash_block_size == 4
        for changed in (request, twin):
            changed.append_output_token_ids(list(range(50, 60)))
        assert twin.block_hashes == request.block_hashes
        assert len(twin.block_hashes) == 5


@pytest.mark.parametrize("size", [0, -1, -(2**70), 2**70, None, 16.0, "16", [16]], ids=repr)
def test_wrong_sizes_are_refused(engine: Engine, size: Any) -> None:
    error, allowed = (ArgumentError, "1 to") if isinstance(size, int) else (ArgumentTypeError, "an int")
    with pytest.raises(error, match=rf"hash_block_size: got .*, allowed: {allowed}"):
        native.get_request_block_hasher(size, engine.functions["sha256"])


def test_the_class_refuses_what_it_does_not_hash(stand_in: Engine) -> None:
    for size, function in ((0, sha256), (LAST_NATIVE + 1, sha256), (16, other_function), (16, None)):
        with pytest.raises(ArgumentError, match="allowed: vLLM's sha256 and sha256_cbor for blocks of 1 to 13000"):
            native.RequestBlockHasher(size, function)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        native.RequestBlockHasher.__new__(native.RequestBlockHasher)  # type: ignore[call-arg]


def test_vllms_function_is_kept_before_it_is_replaced(stand_in: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = stand_in.utils.get_request_block_hasher
    stand_in.utils.get_request_block_hasher = native.get_request_block_hasher
    with pytest.raises(CompatError, match=r"get_request_block_hasher: got pagepool's function, allowed: vLLM's"):
        native.bind()
    stand_in.utils.get_request_block_hasher = own
    native.bind()
    stand_in.utils.get_request_block_hasher = native.get_request_block_hasher
    request = stand_in.make_request([1, 2, 3, 4], native.get_request_block_hasher(2, other_function))
    assert (len(request.block_hashes), stand_in.utils.num_calls) == (2, 1)


class Tokens(list[int]):
    """A list that is not plain."""


def test_attributes_of_other_types_are_left_to_vllm(stand_in: Engine) -> None:
    find = native.get_request_block_hasher(2, sha256)
    own = stand_in.utils.get_request_block_hasher(2, sha256)
    for name, value in (
        ("_all_token_ids", Tokens([1, 2, 3])),
        ("_all_token_ids", (1, 2, 3)),
        ("block_hashes", ()),
        ("block_hashes", ["text"]),
    ):
        request = stand_in.make_request([1, 2, 3, 4])
        setattr(request, name, value)
        num_calls = stand_in.utils.num_calls
        assert find(request) == own(request)
        assert stand_in.utils.num_calls == num_calls + 2
    for request in (None, object(), SimpleNamespace(_all_token_ids=[1, 2]), SimpleNamespace(block_hashes=[])):
        with pytest.raises(AttributeError):
            find(request)


class Mutating(FakeRequest):
    """A request whose salt, when read, changes the lists that were read before."""

    @property
    def cache_salt(self) -> str | None:
        if self.is_armed:
            del self._all_token_ids[self.num_kept :]
            self.block_hashes.clear()
        return None

    @cache_salt.setter
    def cache_salt(self, value: Any) -> None:
        self.is_armed, self.num_kept = False, 0


def test_lists_that_shrink_meanwhile(stand_in: Engine) -> None:
    find = native.get_request_block_hasher(2, sha256)
    for num_kept in range(6):
        request = Mutating([1, 2, 3, 4, 5])
        request.is_armed, request.num_kept = True, num_kept
        assert len(find(request)) == min(num_kept, 5) // 2


def test_no_memory_is_kept(stand_in: Engine) -> None:
    """Neither by hashes, nor by tokens that are left to vLLM, nor by errors."""
    find = native.get_request_block_hasher(2000, sha256)
    plain, odd = stand_in.make_request(list(range(4000))), stand_in.make_request([*range(3999), 2**40])
    broken = stand_in.make_request([*range(3999), lambda: None])
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(2):
            for request in [plain, odd, broken] * 20:
                outcome(find, request)
                request.block_hashes.clear()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 5000  # a buffer has 10 KB

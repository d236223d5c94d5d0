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
LAST_NATIVE = 13_000  # tokens in a block and its lookahead
LOOKAHEADS = (0, 1, 2, 3, 4)  # tokens


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
        assert native._hash_block(bytes(32), [1, 2, token], is_cbor, 1) is None  # type: ignore[list-item]
    assert native._hash_block(bytes(256), [1], is_cbor) is None
    assert native._hash_block(bytes(32), [], is_cbor) is None
    for num_ahead in LOOKAHEADS:
        assert native._hash_block(bytes(32), [2**31 - 1] * (LAST_NATIVE + 1), is_cbor, num_ahead) is None
    for num_ahead in (-1, 2, 2**40):
        assert native._hash_block(bytes(32), [1, 2], is_cbor, num_ahead) is None


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 23, 24, 255, 256, LAST_NATIVE - 300])
def test_lookahead_is_encoded_in_extra_keys(name: str, num_tokens: int) -> None:
    """Extra keys of all lengths around those at which pickle and CBOR write other heads."""
    rng = Random(num_tokens)
    for num_ahead in (*LOOKAHEADS[1:], 22, 23, 24, 254, 255, 256, 300):
        bits = rng.choice((8, 16, 31))
        tokens, ahead = ([random_token(rng, "edges") % (1 << bits) for _ in range(n)] for n in (num_tokens, num_ahead))
        expected = FUNCTIONS[name]((bytes(32), tuple(tokens), (None, *ahead)))
        assert native._hash_block(bytes(32), tokens + ahead, name == "sha256_cbor", num_ahead) == expected, num_ahead


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


def fake_lookahead_keys(request: Any, start: int, stop: int, hash_stop: int, feature: int) -> tuple[Any, int]:
    return fake_extra_keys(request, start, hash_stop, feature)


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
                stop = start + size
                token_ids = request._all_token_ids[start:stop]
                keys, _ = fake_extra_keys(request, start, stop, 0)
                if num_hash_lookahead_tokens:
                    keys = (keys, *request._all_token_ids[stop : stop + num_hash_lookahead_tokens])
                digests.append(hash_block_tokens(function, digests[-1] if digests else None, token_ids, keys))
            return digests[len(request.block_hashes) :]

        return hash_request

    vars(utils).update(
        NONE_HASH=b"none" * 8,
        num_calls=0,
        hash_block_tokens=hash_block_tokens,
        generate_block_hash_extra_keys=fake_extra_keys,
        generate_lookahead_block_hash_extra_keys=fake_lookahead_keys,
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


def lookaheads_of(engine: Engine) -> tuple[int, ...]:
    """Return lookaheads that this vLLM can hash."""
    has_lookahead = "num_hash_lookahead_tokens" in signature(engine.utils.get_request_block_hasher).parameters
    return LOOKAHEADS if has_lookahead else LOOKAHEADS[:1]


def both_hashers(engine: Engine, block_size: int, function: Any, num_ahead: int) -> tuple[Any, Any]:
    """Return vLLM's hasher and ours."""
    ahead = (num_ahead,) if num_ahead else ()
    own = engine.utils.get_request_block_hasher(block_size, function, *ahead)
    return own, native.get_request_block_hasher(block_size, function, *ahead)


@pytest.mark.parametrize("num_ahead", LOOKAHEADS)
def test_plain_requests_are_hashed_here(stand_in: Engine, num_ahead: int) -> None:
    for name in FUNCTIONS:
        find = native.get_request_block_hasher(4, stand_in.functions[name], num_ahead)
        request = stand_in.make_request(list(range(18 + num_ahead)), find, cache_salt="pepper")
        assert len(request.block_hashes) == 4
        request.append_output_token_ids([18, 19])
        assert len(request.block_hashes) == 5
    assert stand_in.utils.num_calls == 0


@pytest.mark.parametrize("num_ahead", LOOKAHEADS)
@pytest.mark.parametrize("keys", [{}, {"cache_salt": "pepper"}], ids=["plain", "salted"])
def test_blocks_are_hashed_once_their_lookahead_is_known(engine: Engine, num_ahead: int, keys: dict[str, Any]) -> None:
    """Token by token. A request that is hashed at once has the same hashes."""
    if num_ahead not in lookaheads_of(engine):
        pytest.skip("this vLLM does not hash tokens ahead")
    for name in FUNCTIONS:
        find = native.get_request_block_hasher(4, engine.functions[name], num_ahead)
        request = engine.make_request([7], find, **keys)
        for num_tokens in range(2, 24):
            request.append_output_token_ids(num_tokens * 1000)
            assert len(request.block_hashes) == max(0, num_tokens - num_ahead) // 4
        tokens = [7, *range(2000, 24_000, 1000)]
        assert engine.make_request(list(tokens), find, **keys).block_hashes == request.block_hashes
        for place in range(4, 4 + num_ahead):  # of the lookahead of the first block
            other = engine.make_request([*tokens[:place], 1, *tokens[place + 1 :]], find, **keys)
            assert other.block_hashes[0] != request.block_hashes[0]
        if num_ahead:
            plain = engine.make_request(list(tokens), native.get_request_block_hasher(4, engine.functions[name]), **keys)
            assert not {*plain.block_hashes} & {*request.block_hashes}


AHEAD_TOKENS = [*range(100, 106), -1, 2**31 - 1, 70000, 300, 24, 255, 256]

# The beginnings of the first hashes that `get_request_block_hasher(4, function, lookahead)` of vLLM 0.33.0 returned for
# `AHEAD_TOKENS`, with bytes from 0 to 31 as NONE_HASH; then the same with the salt "pepper".
VLLM_DIGESTS = {
    ("sha256", 1): ("04e3152e489511a3 00aba232c675d15a 192c6dc3cfe838f1", "e18b3b9b98fb25fc 990558081dba5ed1 1b72eb2faaab2484"),
    ("sha256", 2): ("372327d1aea0eb49 b48cb09e9e85129a", "fdc707fee7e1af5e 0e2558365b6dfcf8"),
    ("sha256", 3): ("ae2b54d6faf8055c b5510e7e5063b19c", "3372556bec2c83f0 8fc2ae9c43bf951a"),
    ("sha256", 4): ("b636813c8947845f 9e263cf1707341e5", "60d34bc56e181cde 210be741a4fdc264"),
    ("sha256_cbor", 1): (
        "81ab39d2c91a1920 923ee8f01f27099f fa5de90b20ea5a97",
        "ea48bc07dfeda1dd c11f427a0af9e5d0 1064693658cc951b",
    ),
    ("sha256_cbor", 2): ("8d761c6957cd8c08 1cf23c1a381dce5a", "376aa4409ad4c7c2 2bbfad5c843a9b2b"),
    ("sha256_cbor", 3): ("d84025741d33ca64 8037d2b0989c7d7a", "1d5d3627759d5496 0aa9d5a7b3aa0109"),
    ("sha256_cbor", 4): ("d400e83b379a8b94 db1e43ba00e7c26a", "4cfe38750094ff70 6eebb719e15b7697"),
}


@pytest.mark.parametrize(("name", "num_ahead"), VLLM_DIGESTS)
def test_digests_are_those_that_vllm_gave(stand_in: Engine, name: str, num_ahead: int) -> None:
    stand_in.utils.NONE_HASH = bytes(range(32))
    find = native.get_request_block_hasher(4, stand_in.functions[name], num_ahead)
    for salt, expected in zip((None, "pepper"), VLLM_DIGESTS[name, num_ahead], strict=True):
        request = stand_in.make_request(list(AHEAD_TOKENS), find, cache_salt=salt)
        assert [digest.hex()[:16] for digest in request.block_hashes] == expected.split()
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
    for num_ahead in LOOKAHEADS:
        find = native.get_request_block_hasher(2, sha256, num_ahead)
        own = stand_in.utils.get_request_block_hasher(2, sha256, num_ahead)
        stand_in.utils.num_calls = 0
        for num_calls, token in enumerate((2**31, True, np.int64(3))):
            request = stand_in.make_request([*range(3 + num_ahead), token])
            assert stand_in.utils.num_calls == 2 * num_calls
            assert find(request) == own(request)
            assert stand_in.utils.num_calls == 2 * num_calls + 2


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
    hashers = [both_hashers(engine, block_size, function, num_ahead) for num_ahead in lookaheads_of(engine)]
    for case in range(max(NUM_OPERATIONS // 1300, 20)):
        own, find = rng.choice(hashers)
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
        for num_ahead in lookaheads_of(engine):
            size = block_size - num_ahead
            request = engine.make_request([rng.randrange(1 << bits) for _ in range(2 * size + num_ahead)])
            own, find = both_hashers(engine, size, function, num_ahead)
            assert isinstance(getattr(find, "__self__", None), native.RequestBlockHasher) == (block_size == LAST_NATIVE)
            expected = own(request)
            assert find(request) == expected
            assert len(expected) == 2


def test_other_functions_are_left_to_vllm(engine: Engine) -> None:
    request = engine.make_request(list(range(40)))
    for num_ahead in lookaheads_of(engine):
        own, find = both_hashers(engine, 4, engine.functions["other"], num_ahead)
        assert not isinstance(getattr(find, "__self__", None), native.RequestBlockHasher)
        assert find(request) == own(request)


@pytest.mark.parametrize("num_ahead", [True, LAST_NATIVE, 2**70, -1, 1.0, "1"], ids=repr)
def test_odd_lookaheads_are_left_to_vllm(stand_in: Engine, num_ahead: Any) -> None:
    find = native.get_request_block_hasher(4, sha256, num_ahead)
    assert not isinstance(getattr(find, "__self__", None), native.RequestBlockHasher)


def test_lookahead_is_left_to_a_vllm_that_has_none(stand_in: Engine) -> None:
    """Before 0.33 its function refuses the argument."""
    own = stand_in.utils.get_request_block_hasher
    stand_in.utils.get_request_block_hasher = lambda size, function: own(size, function)
    del stand_in.utils.generate_lookahead_block_hash_extra_keys
    with pytest.raises(TypeError, match="2 positional arguments but 3 were given"):
        native.get_request_block_hasher(4, sha256, 1)
    with pytest.raises(ArgumentError, match=r"a lookahead of 1, allowed: .*, if this vLLM has it"):
        native.RequestBlockHasher(4, sha256, 1)
    stand_in.make_request([1, 2, 3, 4], native.get_request_block_hasher(4, sha256, 0))
    assert stand_in.utils.num_calls == 0


def without_nested_tuples(value: Any) -> bytes:
    """Hash as `sha256` does, but with lookahead in a list."""
    parent, tokens, keys = value
    return sha256((parent, tokens, keys and list(keys)))


def test_a_function_that_changed_is_left_to_vllm(stand_in: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another protocol of pickle."""
    monkeypatch.setattr(sys.modules["vllm.utils.hashing"], "sha256_cbor", without_nested_tuples)
    find = native.get_request_block_hasher(4, without_nested_tuples)
    assert not isinstance(getattr(find, "__self__", None), native.RequestBlockHasher)
    monkeypatch.setattr(sys.modules["vllm.utils.hashing"], "sha256", other_function)
    find = native.get_request_block_hasher(4, other_function)
    find(stand_in.make_request([1, 2, 3, 4]))
    assert stand_in.utils.num_calls == 1


@pytest.mark.parametrize("library", ["pickle", "cloudpickle"])
def test_pickled_hashers_go_on(engine: Engine, library: str) -> None:
    module = pytest.importorskip(library)
    num_ahead = lookaheads_of(engine)[-1]
    for name in FUNCTIONS:
        find = native.get_request_block_hasher(4, engine.functions[name], num_ahead)
        request = engine.make_request(list(range(10)), find)
        if library == "pickle" and engine.make_request is not FakeRequest:
            twin = engine.make_request(list(range(10)), pickle.loads(pickle.dumps(find)))
        else:
            twin = module.loads(module.dumps(request))
        assert isinstance(twin._block_hasher.__self__, native.RequestBlockHasher)
        assert twin._block_hasher.__self__.caching_hash_fn is engine.functions[name]
        assert twin._block_hasher.__self__.hash_block_size == 4
        assert twin._block_hasher.__self__.num_hash_lookahead_tokens == num_ahead
        for changed in (request, twin):
            changed.append_output_token_ids(list(range(50, 60)))
        assert twin.block_hashes == request.block_hashes
        assert len(twin.block_hashes) == (20 - num_ahead) // 4


@pytest.mark.parametrize("size", [0, -1, -(2**70), 2**70, None, 16.0, "16", [16]], ids=repr)
def test_wrong_sizes_are_refused(engine: Engine, size: Any) -> None:
    error, allowed = (ArgumentError, "1 to") if isinstance(size, int) else (ArgumentTypeError, "an int")
    with pytest.raises(error, match=rf"hash_block_size: got .*, allowed: {allowed}"):
        native.get_request_block_hasher(size, engine.functions["sha256"])


def test_the_class_refuses_what_it_does_not_hash(stand_in: Engine) -> None:
    for refused in (
        (0, sha256),
        (LAST_NATIVE + 1, sha256),
        (LAST_NATIVE, sha256, 1),
        (1, sha256, -1),
        (16, other_function),
        (16, None),
    ):
        with pytest.raises(ArgumentError, match="allowed: vLLM's sha256 and sha256_cbor for blocks of 1 to 13000"):
            native.RequestBlockHasher(*refused)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("num_ahead", LOOKAHEADS)
def test_lists_that_shrink_meanwhile(stand_in: Engine, num_ahead: int) -> None:
    find = native.get_request_block_hasher(2, sha256, num_ahead)
    for num_kept in range(8):
        request = Mutating([1, 2, 3, 4, 5, 6, 7])
        request.is_armed, request.num_kept = True, num_kept
        assert len(find(request)) == max(0, num_kept - num_ahead) // 2


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

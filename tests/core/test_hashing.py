"""Hashes: published vectors, chains, seeds, algorithms, extra keys."""

import hashlib
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hybrids import FULL, allocate
from hybrids import make_manager as make_hybrid
from refusing import refused

import pagepool
from pagepool import EngineRequest, hash_request_tokens, hashing
from pagepool._core import HashChain, siphash128
from pagepool.compat.easydel.names import RequestPageHashes
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.hashing import HashNames, PageHash, RequestExtraKeys, encode_extra_keys, get_siphash_key
from pagepool.page_hashing import sha256_cbor, sha256_page

KEY = bytes(range(16))

# SipHash-2-4 with 128-bit output of 00 01 02 ... under KEY, for 0 to 63 bytes: the vectors published with the algorithm.
SIPHASH_VECTORS = """\
a3817f04ba25a8e66df67214c7550293 da87c1d86b99af44347659119b22fc45 8177228da4a45dc7fca38bdef60affe4
9c70b60c5267a94e5f33b6b02985ed51 f88164c12d9c8faf7d0f6e7c7bcd5579 1368875980776f8854527a07690e9627
14eeca338b208613485ea0308fd7a15e a1f1ebbed8dbc153c0b84aa61ff08239 3b62a9ba6258f5610f83e264f31497b4
264499060ad9baabc47f8b02bb6d71ed 00110dc378146956c95447d3f3d0fbba 0151c568386b6677a2b4dc6f81e5dc18
d626b266905ef35882634df68532c125 9869e247e9c08b10d029934fc4b952f7 31fcefac66d7de9c7ec7485fe4494902
5493e99933b0a8117e08ec0f97cfc3d9 6ee2a4ca67b054bbfd3315bf85230577 473d06e8738db89854c066c47ae47740
a426e5e423bf4885294da481feaef723 78017731cf65fab074d5208952512eb1 9e25fc833f2290733e9344a5e83839eb
568e495abe525a218a2214cd3e071d12 4a29b54552d16b9a469c10528eff0aae c9d184ddd5a9f5e0cf8ce29a9abf691c
2db479ae78bd50d8882a8a178a6132ad 8ece5f042d5e447b5051b9eacb8d8f6f 9c0b53b4b3c307e87eaee08678141f66
abf248af69a6eae4bfd3eb2f129eeb94 0664da1668574b88b935f3027358aef4 aa4b9dc4bf337de90cd4fd3c467c6ab7
ea5c7f471faf6bde2b1ad7d4686d2287 2939b0183223fafc1723de4f52c43d35 7c3956ca5eeafc3e363e9d556546eb68
77c6077146f01c32b6b69d5f4ea9ffcf 37a6986cb8847edf0925f0f1309b54de a705f0e69da9a8f907241a2e923c8cc8
3dc47d1f29c448461e9e76ed904f6711 0d62bf01e6fc0e1a0d3c4751c5d3692b 8c03468bca7c669ee4fd5e084bbee7b5
528a5bb93baf2c9c4473cce5d0d22bd9 df6a301e95c95dad97ae0cc8c6913bd8 801189902c857f39e73591285e70b6db
e617346ac9c231bb3650ae34ccca0c5b 27d93437efb721aa401821dcec5adf89 89237d9ded9c5e78d8b1c9b166cc7342
4a6d8091bf5e7d651189fa94a250b14c 0e33f96055e7ae893ffc0e3dcf492902 e61c432b720b19d18ec8d84bdc63151b
f7e5aef549f782cf379055a608269b16 438d030fd0b7a54fa837f2ad201a6403 a590d3ee4fbf04e3247e0d27f286423f
5fe2c1a172fe93c4b15cd37caef9f538 2c97325cbd06b36eb2133dd08b3a017c 92c814227a6bca949ff0659f002ad39e
dce850110bd8328cfbd50841d6911d87 67f14984c7da791248e32bb5922583da 1938f2cf72d54ee97e94166fa91d2a36
74481e9646ed49fe0f6224301604698e 57fca5de98a9d6d8006438d0583d8a1d 9fecde1cefdc1cbed4763674d9575359
e3040c00eb28f15366ca73cbd872e740 7697009a6a831dfecca91c5993670f7a 5853542321f567a005d547a4f04759bd
5150d1772f50834a503e069a973fbd7c
"""


make_manager = partial(make_hybrid, FULL, num_pages=32, max_model_len=1024, hash_seed=None)


def fill(manager, request):
    """Admit a request and compute all of it; returns the number of hit tokens."""
    num_hit_tokens = manager.get_computed_pages(request)[1]
    assert allocate(manager, request) is not None
    request.num_computed_tokens = request.num_tokens
    return num_hit_tokens


def test_siphash_gives_the_published_vectors():
    vectors = SIPHASH_VECTORS.split()
    assert len(vectors) == 64
    for size, vector in enumerate(vectors):
        assert siphash128(KEY, bytes(range(size))).hex() == vector


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 17])
def test_a_chain_is_the_hash_of_parent_and_tokens(page_size):
    tokens = [7 * i - 3 for i in range(5 * page_size)]
    chain = HashChain(page_size, KEY)
    chain.extend(tokens)
    parent = bytes(16)
    for i in range(5):
        page = np.array(tokens[i * page_size : (i + 1) * page_size], dtype="<i4").tobytes()
        parent = siphash128(KEY, parent + page)
        assert chain[i].to_bytes(16, "little") == parent


@pytest.mark.parametrize("convert", [list, tuple, np.int32, np.int64, np.uint16, lambda ids: np.repeat(np.int32(ids), 2)[::2]])
def test_tokens_may_come_as_any_ints(convert):
    tokens = list(range(5, 5 + 4 * 2000))
    expected = HashChain(4, KEY)
    expected.extend(tokens)
    chain = HashChain(4, KEY)
    chain.extend(convert(tokens))
    assert [chain[i] for i in range(2000)] == [expected[i] for i in range(2000)]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, 2, 3], ArgumentError),
        ([1, 2, 3, 1 << 31], ArgumentError),
        ([1, 2, 3, 1 << 80], ArgumentError),
        ([1, 2, 3, 4.0], ArgumentTypeError),
        ([1, 2, 3, "4"], ArgumentTypeError),
        (np.array([1.0, 2, 3, 4]), ArgumentTypeError),
        (np.zeros((2, 2), dtype=np.int32), ArgumentTypeError),
        (np.array([1, 2, 3, 1 << 40]), ArgumentError),
    ],
)
def test_wrong_tokens_leave_the_chain_as_it_was(tokens, error):
    chain = HashChain(4, KEY)
    chain.extend([1, 2, 3, 4])
    with refused(lambda: (len(chain), chain[0]), error):
        chain.extend(tokens)


@pytest.mark.parametrize("key", [b"", bytes(15), bytes(17)])
def test_a_key_has_sixteen_bytes(key):
    with pytest.raises(ArgumentError, match=f"key: got {len(key)} bytes, allowed: 16"):
        HashChain(4, key)


def test_a_digest_that_there_is_not_yet():
    chain = HashChain(4, KEY)
    chain.extend([1, 2, 3, 4])
    for page in (1, -1):
        with pytest.raises(IndexError, match=f"page: got {page}, allowed: 0 to 0"):
            _ = chain[page]


def test_extra_keys_cannot_be_imitated_by_tokens():
    """Extra keys have a separate key: no tokens lead to the digest of extra keys."""
    plain, keyed = HashChain(4, KEY), HashChain(4, KEY)
    imitation = np.frombuffer(b"16 bytes of keys", dtype="<i4")
    plain.extend(imitation)
    plain.extend([1, 2, 3, 4])
    keyed.extend([1, 2, 3, 4], b"16 bytes of keys")
    assert plain[1] != keyed[0]


def test_sha256_is_parent_then_little_endian_tokens_then_keys():
    tokens = b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    keys = (("salt", "x"),)
    expected = hashlib.sha256(bytes(32) + tokens + encode_extra_keys(keys)).digest()
    assert sha256_page(bytes(32), [1, -2], keys) == expected


@pytest.mark.parametrize(
    ("hash_algo", "expected"),
    [
        ("siphash128", ["1a546eb98c818dece2676d67d3f732b8", "45821a3f89462674556e7d2d40b6c553"]),
        (
            "sha256",
            [
                "13075d31c33e2c3c24e52c9393f38352f54d90bb99d56cc7d6b7b10c0cd6dec2",
                "4b929029b64bfe1aaa36d7d4249f17b0bca3634b53ea685a339e78182731fb57",
            ],
        ),
        (
            "sha256_cbor",
            [
                "2a29156492caaf1c0224e32860714382770bb93f2c02c2dd03e3403fc342873b",
                "d8c643bd8cd302d4a76559c28d6fce16e6dcfb9f011bd7aebb76b82dcdd0614c",
            ],
        ),
    ],
)
def test_digests_with_all_kinds_of_extra_keys_stay_what_they_are(hash_algo, expected):
    """They are in stores and other processes, for which a seed makes them the same."""
    manager = make_manager(hash_algo=hash_algo, hash_seed=7)
    features = [image("x", 1, 2), image("y", 5, 2)]
    fill(manager, EngineRequest("a", list(range(9)), cache_salt="s", lora_id="l", mm_features=features))
    assert [f"{page_hash.hash_value:x}" for page_hash in RequestPageHashes(manager.registry)["a"]] == expected


def test_sha256_takes_what_fits_int32():
    with pytest.raises(ArgumentError, match=r"token ids: .*, allowed: ints that fit int32"):
        sha256_page(bytes(32), [1 << 31], None)


def test_sha256_cbor_says_which_extra_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(ImportError, match=r"needs cbor2: pip install 'pagepool\[events\]'"):
        sha256_cbor([1])


def test_sha256_cbor_encodes_canonically():
    """An array of three: byte string, array of ints, null. The encoding is written out, independently of libraries."""
    encoded = b"\x83" + b"\x58\x20" + bytes(32) + b"\x82\x01\x19\x01\x00" + b"\xf6"
    assert sha256_cbor((bytes(32), (1, 256), None)) == hashlib.sha256(encoded).digest()


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor", hash])
@pytest.mark.parametrize("keep_token_ids", [False, True])
def test_every_algorithm_hits_what_it_cached(hash_algo, keep_token_ids):
    manager = make_manager(hash_algo=hash_algo, keep_token_ids=keep_token_ids)
    assert fill(manager, EngineRequest("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])) == 0
    assert fill(manager, EngineRequest("b", [1, 2, 3, 4, 5, 6, 7, 8, 10])) == 8
    page_hash = manager.page_pool.pages[2].page_hash
    assert page_hash.group_id == 0
    assert page_hash.page_hash == RequestPageHashes(manager.registry)["b"][1]
    assert list(manager.page_pool.cached_page_hash_to_page[page_hash]) == [2]
    kept = keep_token_ids or hash_algo is hash
    assert page_hash.page_hash.token_ids == ((5, 6, 7, 8) if kept else ())
    assert manager.page_pool.get_cached_page(page_hash.page_hash, [0]) == [manager.page_pool.pages[2]]


def test_a_callable_gives_the_hashes_that_the_user_can_compute():
    manager = make_manager(hash_algo=hash)
    fill(manager, EngineRequest("a", list(range(9))))
    first = pagepool.hash_page_tokens(hash, None, [0, 1, 2, 3])
    second = pagepool.hash_page_tokens(hash, first.hash_value, [4, 5, 6, 7])
    assert RequestPageHashes(manager.registry)["a"] == [first, second]
    assert manager.page_pool.pages[2].page_hash.page_hash == second
    assert pagepool.hash_request_tokens(hash, 4, EngineRequest("b", list(range(9)))) == [first, second]


def test_a_page_is_hashed_once():
    contents = []
    manager = make_manager(hash_algo=lambda content: contents.append(content) or len(contents))
    request = EngineRequest("a", list(range(10)))
    fill(manager, request)
    for token_id in range(10):
        request.append_output_token_ids(token_id)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    manager.get_computed_pages(request)
    assert len(contents) == 5


@pytest.mark.parametrize("hash_lookahead", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_pages_hashed_side_by_side_have_the_hashes_of_pages_hashed_alone(page_size: int, hash_lookahead: int) -> None:
    spec = pagepool.FullAttentionSpec(page_size, 1, 8, "float16", use_mla=False)
    rng = np.random.default_rng(page_size)
    for num_rows in range(1, 10):
        hashing = pagepool.PageHashing(hash_seed=7, use_eagle=hash_lookahead > 0, hash_lookahead=hash_lookahead)
        manager = pagepool.CacheManager(100, [pagepool.CacheGroupSpec(spec)], 64, hashing=hashing)
        table = pagepool.PageTable(num_rows + 1, 64, 64)
        batch = pagepool.RunningBatch(manager, table)
        length = 2 * page_size + hash_lookahead
        prompts = rng.integers(0, 1 << 30, (num_rows, length + 1), dtype=np.int32)
        for row in range(num_rows):
            assert batch.admit(row, prompts[row, : length - 1]) == 0
        batch.step(np.arange(num_rows), prompts[:, length - 1])  # each row fills its second page, or makes its key known
        assert [batch.probe(num_rows, prompt) for prompt in prompts] == [2 * page_size] * num_rows


def test_kept_tokens_are_compared_where_a_hash_brings_some():
    manager = make_manager(keep_token_ids=True)
    fill(manager, EngineRequest("a", [1, 2, 3, 4]))
    name = manager.page_pool.pages[1].page_hash.page_hash
    assert name.token_ids == (1, 2, 3, 4)
    assert manager.page_pool.get_cached_page_ids(name, [0]).tolist() == [1]
    assert manager.page_pool.get_cached_page_ids(name._replace(token_ids=()), [0]).tolist() == [1]
    assert manager.page_pool.get_cached_page_ids(name._replace(token_ids=(1, 2, 3, 5)), [0]) is None


def test_readers_never_see_a_hash_without_its_key() -> None:
    """They take no lock: a list of keys is complete as soon as it can be found."""

    class Complete(dict):
        def __setitem__(self, page_hash: PageHash, keys: list[int]) -> None:
            assert keys
            super().__setitem__(page_hash, keys)

        def setdefault(self, *_: object) -> None:
            raise NotImplementedError

    names = HashNames()
    names._keys_of_hash = Complete()
    page_hash = PageHash(1, (2, 3), None)
    names.add(4, page_hash)
    names.add(5, page_hash)
    assert names.keys_of(page_hash) == [4, 5]


def test_names_of_evicted_pages_are_forgotten():
    """Once there are more than two per page and 1,024 more."""
    manager = make_manager(num_pages=8, hash_algo=hash)
    held = EngineRequest("held", [7] * 4)
    fill(manager, held)
    num_names = []
    for i in range(2000):
        request = EngineRequest(str(i), [i] * 5)
        fill(manager, request)
        manager.free(request)
        manager.free_page_hashes(request)
        num_names.append(len(manager.page_pool.store.names))
    assert max(num_names) == 2 * 8 + 1024
    assert num_names[-1] < 1000
    assert manager.page_pool.pages[1].page_hash.page_hash == hash_request_tokens(hash, 4, held)[0]
    manager.page_pool.check()


def image(content_hash, offset, length):
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(mm_hash=content_hash, modality="image", placeholder_range=position)


@pytest.mark.parametrize(
    ("first", "second", "num_shared_tokens"),
    [
        ([image("x", 5, 2)], [image("x", 5, 2)], 12),
        ([image("x", 5, 2)], [image("y", 5, 2)], 4),
        ([image("x", 5, 2)], [], 4),
        ([image("x", 5, 2)], [image("x", 4, 3)], 4),
        ([image("x", 5, 2)], [image("x", 6, 2)], 4),
        ([image("x", 2, 3)], [image("y", 2, 3)], 0),
        ([image("x", 5, 1), image("y", 9, 1)], [image("x", 5, 1), image("z", 9, 1)], 8),
        ([SimpleNamespace(identifier="x")], [SimpleNamespace(identifier="y")], 0),
    ],
)
def test_an_image_enters_the_pages_it_overlaps_and_all_after(first, second, num_shared_tokens):
    manager = make_manager()
    tokens = [1] * 13
    fill(manager, EngineRequest("a", tokens, mm_features=first))
    assert fill(manager, EngineRequest("b", list(tokens), mm_features=second)) == num_shared_tokens


@pytest.mark.parametrize(
    "request_keys",
    [
        {"cache_salt": 1.5},
        {"lora_id": object()},
        {"lora_id": ("a",)},
        {"lora_id": ("a", 1.5)},
        {"lora_id": ["a", "b"]},
        {"mm_features": [SimpleNamespace()]},
    ],
)
def test_extra_keys_of_unclear_identity_are_refused(request_keys):
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        make_manager().get_computed_pages(EngineRequest("a", [1] * 9, **request_keys))


def test_requests_without_extra_keys_cost_nothing():
    assert RequestExtraKeys.of(EngineRequest("a", [1])) is None


def test_none_hash_follows_the_environment(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    hashing.init_none_hash()
    seeded = pagepool.NONE_HASH
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    hashing.init_none_hash()
    assert seeded != pagepool.NONE_HASH
    monkeypatch.delenv("PYTHONHASHSEED")
    hashing.init_none_hash()
    secret = pagepool.NONE_HASH
    hashing.init_none_hash()
    assert secret == pagepool.NONE_HASH


def test_unknown_algorithms_and_seeds_are_refused():
    with pytest.raises(ArgumentError, match="siphash128"):
        make_manager(hash_algo="md5")
    with pytest.raises(ArgumentTypeError):
        make_manager(hash_seed=1.5)
    assert get_siphash_key(b"x") == get_siphash_key("x")


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash])
@pytest.mark.parametrize("kind", ["a token", "a sequence"])
def test_pages_that_are_hashed_while_their_tokens_are_read_are_hashed_once(kind, hash_algo):
    """The call that was reading is refused, and the next one goes on."""
    manager = make_manager(hash_algo=hash_algo)
    tokens = list(range(13))
    request = EngineRequest("a", list(tokens))
    hooks = []

    class Token:
        def __index__(self):
            while hooks:
                hooks.pop()()
            return tokens[3]

    class Sequence:
        def __len__(self):
            return len(tokens)

        def __getitem__(self, index):
            while hooks:
                hooks.pop()()
            return np.array(tokens[index], np.int32)

    if kind == "a token":
        request.all_token_ids[3] = Token()
    else:
        request.all_token_ids = Sequence()
    manager.allocate_slots(request, 4, delay_cache_pages=True)
    request.num_computed_tokens = 4
    hooks.append(lambda: manager.cache_pages(request, 4))
    with pytest.raises(ArgumentError, match="another call hashed"):
        manager.allocate_slots(request, 4)
    for num_new in (4, 5):
        manager.allocate_slots(request, num_new)
        request.num_computed_tokens += num_new
    hits = [manager.probe(EngineRequest("b", [*ids, 99])).num_hit_tokens for ids in (tokens, tokens[:4] * 2)]
    assert hits == [12, 4]
    manager.check()


def test_tokens_behind_a_page_without_tokens_are_not_kept():
    chain = HashChain(4, KEY, True)
    chain.append_key(5)
    chain.append_key(6, [1, 2, 3, 4])
    chain.extend([5, 6, 7, 8])
    assert [chain.page_token_ids(page) for page in range(3)] == [(), (), ()]

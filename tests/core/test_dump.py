"""Dumps of a manager: plain values without secrets, read back as they were; anything else is refused."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from settings import NUM_OPERATIONS

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    PageHashing,
    PageTable,
    RequestTraits,
    RunningBatch,
)
from pagepool import dump as dumps
from pagepool.doctor.pool import describe_pool, diagnose_pool
from pagepool.dump import Dump, read_dump, to_plain
from pagepool.errors import ArgumentError

SPEC = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)


def make_manager(**options: Any) -> CacheManager:
    return CacheManager(40, [CacheGroupSpec(SPEC)], 64, **options)


def fill(manager: CacheManager) -> RunningBatch:
    """Let a request, a row, a lease and the caller hold pages; secrets are easy to find."""
    request = EngineRequest("the id", [777001] * 9, cache_salt="salt-777002", session_id="session-777003", tenant="acme")
    assert manager.allocate_slots(request, 9) is not None
    batch = RunningBatch(manager, PageTable(2, 16, 64))
    batch.admit(1, [777001] * 12, traits=RequestTraits(cache_salt="salt-777002", tenant="acme"))
    manager.page_pool.lease([1])
    manager.page_pool.get_new_pages(1)
    return batch


def make_dump() -> dict[str, Any]:
    manager = make_manager(host_tier=HostTier(100))
    batch = fill(manager)
    values: dict[str, Any] = json.loads(json.dumps(manager.dump()))
    batch.release([1])
    return values


def test_it_is_json_and_comes_back() -> None:
    manager = make_manager(host_tier=HostTier(100))
    manager._store.set_time(1000)
    manager.set_shares({"acme": 0.5})
    batch = fill(manager)
    text = json.dumps(manager.dump(), allow_nan=False)
    dump = read_dump(text.encode())
    assert to_plain(dump) == json.loads(text)
    assert (dump.stats, dump.held.num_pages_by_kind) == (manager.stats(), manager.held().num_pages_by_kind)
    assert [each[:4] for each in dump.held.holders] == [each[:4] for each in manager.held().holders]
    assert dump.settings.pools == {"kv": dumps.PoolSettings(40, "lru")}
    assert dump.settings.groups == (dumps.GroupSettings("FullAttention", 4, "kv"),)
    assert dump.settings.host_tier == dumps.TierSettings({"kv": 100}, "write_back")
    assert "acme" in dump.stats.num_pages_by_tenant
    batch.release([1])


def test_pools() -> None:
    groups = [CacheGroupSpec(SPEC), CacheGroupSpec(MambaSpec(4, ((2,),), "bfloat16"), pool="states")]
    dump = read_dump(json.dumps(CacheManager({"kv": 20, "states": 9}, groups, 64).dump()).encode())
    assert [*dump.settings.pools] == [*dump.stats.pools] == [*dump.held.num_pages_by_kind] == ["kv", "states"]
    assert [group.pool for group in dump.settings.groups] == ["kv", "states"]


def test_it_has_no_secrets() -> None:
    """Ids of requests and names of tenants alone: no tokens, salts, sessions, seeds or keys."""
    manager = make_manager(hashing=PageHashing(hash_seed="seed-777004"))
    batch = fill(manager)
    text = json.dumps(json.loads(json.dumps(manager.dump()), parse_float=lambda _: 0))  # times have any digits
    assert "777" not in text
    assert "the id" in text
    assert not [key for key in ("salt", "seed", "token_ids", "hash", "session_id") if f'"{key}' in text]
    batch.release([1])


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no such signal")
def test_in_a_signal_handler() -> None:
    """A handler interrupts a call of the manager at any point of Python."""
    manager, texts = make_manager(), list[str]()

    class Interrupting(EngineRequest):
        @property
        def num_tokens(self) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return super().num_tokens

    before = signal.signal(signal.SIGUSR1, lambda *_: texts.append(json.dumps(manager.dump())))
    try:
        request = Interrupting("a", [*range(9)])
        assert manager.allocate_slots(request, 9) is not None
        manager.free(request)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert texts
    for text in texts:
        read_dump(text.encode())


# --- files that are none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "dump: got what is no JSON"),
        (b"\xff\xfe", "dump: got what is no JSON"),
        (b"[" * 100_000, "dump: got what is no JSON"),
        (b"1" * 10_000, "dump: got what is no JSON"),
        (b'{"pagepool_dump": NaN}', "dump: got what is no JSON"),
        (b"[]", "dump: got JSON of something else"),
        (b"{}", "dump: got JSON of something else"),
        (b'{"pagepool_dump": 2}', "pagepool_dump: got 2, allowed: 1"),
        (b'{"pagepool_dump": true}', "pagepool_dump: got True, allowed: 1"),
        (b'{"pagepool_dump": 1}', "dump: got no 'version', allowed: an object with it"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_dump(content: bytes, message: str) -> None:
    with pytest.raises(ArgumentError) as info:
        read_dump(content)
    assert str(info.value).startswith(message)


def test_a_dump_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "MAX_BYTES", 100)
    with pytest.raises(ArgumentError, match="dump: got more than 100 bytes, allowed: fewer"):
        read_dump(b" " * 101)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("stats", "num_pages"), -1, "dump.stats.num_pages: got -1, allowed: an integer from 0 to 2**63 - 1"),
        (("stats", "num_pages"), 1 << 63, "dump.stats.num_pages: got 9223372036854775808, allowed"),
        (("stats", "num_pages"), 10**400, "dump.stats.num_pages: got an int of 1329 bits, allowed"),
        (("stats", "num_pages"), True, "dump.stats.num_pages: got True, allowed"),
        (("stats", "usage"), "much", "dump.stats.usage: got 'much', allowed: a number of at least 0"),
        (("stats", "pools", "kv"), [], "dump.stats.pools['kv']: got list of 0, allowed: an object"),
        (("settings", "enable_caching"), 1, "dump.settings.enable_caching: got 1, allowed: true or false"),
        (("held", "holders"), {}, "dump.held.holders: got dict of 0, allowed: a list"),
        (("held", "holders", 0, "name"), None, "dump.held.holders[0].name: got None, allowed: a string"),
        (("held", "holders", 0, "name"), ["x" * 900], "dump.held.holders[0].name: got list of 1, allowed: a string"),
        (("version",), {"x" * 900: 1}, "dump.version: got dict of 1, allowed: a string"),
    ],
)
def test_the_wrong_value_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    values = make_dump()
    owner = values
    for part in path[:-1]:
        owner = owner[part]
    owner[path[-1]] = value
    with pytest.raises(ArgumentError) as info:
        read_dump(json.dumps(values).encode())
    assert str(info.value).startswith(message)
    assert len(str(info.value)) < 300


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places_in(each, (*path, key))


ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 62,
    1.5,
    1e308,
    "",
    "x",
    "\ud800\n\x1b",
    [],
    {},
    [[]],
    {"kv": 1},
    {"": {}},
    "delete",
]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_dump_is_refused_or_read(seed: int) -> None:
    """Nothing else ever happens: what is read can be described."""
    rng, original, num_read = Random(seed), make_dump(), 0
    places = [*places_in(original)][1:]
    for _ in range(NUM_OPERATIONS // 10):
        values = copy.deepcopy(original)
        for *path, last in rng.sample(places, rng.choice((1, 1, 2))):
            owner: Any = values
            try:
                for part in path:
                    owner = owner[part]
                value = rng.choice(ODD_VALUES)
                if value == "delete":
                    del owner[last]
                else:
                    owner[last] = copy.deepcopy(value)
            except (KeyError, IndexError, TypeError):
                continue  # the other change was above this place
        text = json.dumps(values).encode()
        if rng.random() < 0.1:
            text = text[: rng.randrange(len(text))]
        try:
            dump = read_dump(text)
        except ArgumentError:
            continue
        num_read += 1
        assert isinstance(dump, Dump)
        json.dumps(diagnose_pool(dump))
        description = describe_pool(dump)
        assert all(line.isprintable() for line in description.splitlines())
        description.encode()
    assert num_read

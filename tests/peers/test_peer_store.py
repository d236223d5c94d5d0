"""A store that asks a peer's host tier: hits of another engine's pages, and peers that are dead, slow, lying or others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="peers are an extra: pyzmq is not installed")
pytest.importorskip("msgspec", reason="peers are an extra: msgspec is not installed")
pytest.importorskip("xxhash", reason="peers are an extra: xxhash is not installed")

from bad_proxy import BadProxy
from peer_engine import Engine, serve_tier
from peer_links import SECRET, peer_process, wait_for
from peer_stores import ObjectServer

from pagepool import HostTier
from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, IntegrityError, PeerError
from pagepool.peers import PeerStore, RankStores, TierServer
from pagepool.peers import store as peer_store
from pagepool.stores import Done, FileStore, Store
from pagepool.stores.frames import HEADER_BYTES, is_intact
from pagepool.stores.pages import Pages

PROMPT = list(range(100, 121))  # five full pages


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """A function that closes its argument at the end."""
    kept: list[Any] = []

    def keep_one(closed: Any) -> Any:
        kept.append(closed)
        return closed

    yield keep_one
    for each in reversed(kept):
        each.close(**({"drain_seconds": 0} if isinstance(each, Store) else {}))


def serve(engine: Engine, keep: Callable[[Any], Any], **options: Any) -> TierServer:
    return keep(TierServer(engine.manager, engine.rows, engine.namespace, SECRET, **options))  # type: ignore[no-any-return]


def names_of(engine: Engine) -> list[bytes]:
    """Return the keys of a store for the full pages of the prompt."""
    chain = engine.manager.registry.hash_apart(_request(PROMPT), len(PROMPT))
    digests = [chain[i] for i in range(len(chain))]
    halves = [(int(digest) & (2**64 - 1), int(digest) >> 64 & (2**64 - 1)) for digest in digests]
    return Pages(np.array(halves, np.uint64), np.zeros(len(halves), np.int32)).name()


def _request(token_ids: list[int]) -> Any:
    from pagepool import EngineRequest

    return EngineRequest("names", token_ids)


def test_an_engine_hits_what_another_one_computed(keep: Callable[[Any], Any]) -> None:
    first, second = Engine(), Engine()
    server = serve(first, keep)
    first.run(PROMPT)
    second.ask(keep(PeerStore(server.address, SECRET, second.namespace)))
    assert second.run([*PROMPT, 7]) == 20
    assert second.store is not None
    stats = second.store.stats()
    assert (stats.num_loaded_pages, stats.num_damaged_pages, stats.num_errors) == (5, 0, 0)
    first.manager.check()
    second.manager.check()
    assert server.num_refused_messages == 0
    second.store.close()


def test_both_engines_serve_and_ask(keep: Callable[[Any], Any]) -> None:
    engines = [Engine(), Engine()]
    servers = [serve(engine, keep) for engine in engines]
    for engine, other in zip(engines, reversed(servers), strict=True):
        engine.ask(PeerStore(other.address, SECRET, engine.namespace))
    rng = Random(5)
    families = [[rng.randrange(1000) for _ in range(24)] for _ in range(6)]
    num_cached = 0
    for _ in range(40):
        base = rng.choice(families)
        prompt = [*base[: rng.randint(1, 24)], *(rng.randrange(1000) for _ in range(rng.randint(1, 6)))]
        num_cached += rng.choice(engines).run(prompt)
    for engine in engines:
        assert engine.store is not None
        assert engine.store.stats().num_damaged_pages == 0
        engine.manager.check()
        engine.store.close()
    assert num_cached


def test_objects_are_headers_and_rows(keep: Callable[[Any], Any]) -> None:
    engine = Engine()
    server = serve(engine, keep)
    engine.run(PROMPT)
    names, size = names_of(engine), HEADER_BYTES + engine.rows[0].shape[1]
    store = keep(PeerStore(server.address, SECRET, engine.namespace))
    asked = [*names, b"x" * 18, b"short", names[0][:16] + b"\0\1", bytes(64)]
    (found,) = wait_for(store, store.lookup(asked))
    assert found == Done(found.job, b"\1" * len(names) + bytes(4), None)
    rows = [bytearray(size if i else size + 1) for i in range(len(asked))]
    (done,) = wait_for(store, store.load(asked, [memoryview(row) for row in rows]))
    assert done == Done(done.job, bytes([0, *[1] * (len(names) - 1), 0, 0, 0, 0]), None)
    assert all(is_intact(row, engine.namespace, name) for row, name in zip(rows[1 : len(names)], names[1:], strict=True))
    engine.manager.check()


def test_large_objects_and_many_keys_are_asked_for_in_parts(keep: Callable[[Any], Any]) -> None:
    engine = Engine(width=40_000)  # 1.3 MB a page
    server = serve(engine, keep)
    engine.run(PROMPT)
    other = Engine(width=40_000)
    other.ask(keep(PeerStore(server.address, SECRET, other.namespace)))
    assert other.run([*PROMPT, 7]) == 20
    assert other.store is not None
    other.store.close()
    store = keep(PeerStore(server.address, SECRET, engine.namespace))
    keys = [i.to_bytes(18, "big") for i in range(3 * peer_store.MAX_KEYS_PER_QUESTION + 1)] + names_of(engine)
    (done,) = wait_for(store, store.lookup(keys))
    assert done.is_done == bytes(len(keys) - 5) + b"\1" * 5


def test_only_settled_pages_are_served(keep: Callable[[Any], Any]) -> None:
    engine = Engine()
    server = serve(engine, keep)
    engine.batch.admit(0, PROMPT)
    store = keep(PeerStore(server.address, SECRET, engine.namespace))
    num_found = []
    for _ in range(6):
        engine.move_pages()
        (done,) = wait_for(store, store.lookup(names_of(engine)))
        num_found.append(sum(done.is_done))
    assert num_found[0] == 0
    assert num_found[-1] == 5
    assert sum(map(bool, num_found)) < sum(map(bool, _count_arrivals(engine)))


def _count_arrivals(engine: Engine) -> list[int]:
    """Return how many pages the tier of another engine has after each step of the same prompt."""
    other, counts = Engine(), []
    other.batch.admit(0, PROMPT)
    for _ in range(6):
        other.move_pages()
        counts.append(other.manager.host_tier.stats().num_cached_pages)  # type: ignore[union-attr]
    return counts


def test_a_reset_ends_the_service(keep: Callable[[Any], Any]) -> None:
    """New weights come with a new namespace."""
    engine = Engine()
    server = serve(engine, keep)
    engine.run(PROMPT)
    assert engine.manager.reset_prefix_cache()
    engine.run(PROMPT)
    store = keep(PeerStore(server.address, SECRET, engine.namespace))
    assert not any(wait_for(store, store.lookup(names_of(engine)))[0].is_done)
    again = serve(engine, keep)
    engine.move_pages(3)
    store = keep(PeerStore(again.address, SECRET, engine.namespace))
    assert all(wait_for(store, store.lookup(names_of(engine)))[0].is_done)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_loaded_is_what_its_key_says(keep: Callable[[Any], Any], seed: int) -> None:
    """An engine with a small tier evicts and computes all the time, while another thread loads its pages."""
    rng, engine = Random(seed), Engine(num_host_pages=14, width=500)
    server = serve(engine, keep)
    store, size = keep(PeerStore(server.address, SECRET, engine.namespace)), HEADER_BYTES + engine.rows[0].shape[1]
    families = [[1000 * i + at for at in range(17)] for i in range(4)]
    names: dict[bytes, int] = {}
    for family in families:
        chain = engine.manager.registry.hash_apart(_request(family), 17)
        for at in range(4):
            digest = int(chain[at])
            key = np.array([[digest & (2**64 - 1), digest >> 64 & (2**64 - 1)]], np.uint64)
            names[Pages(key, np.zeros(1, np.int32)).name()[0]] = family[4 * at]
    is_over, num_loaded, errors = threading.Event(), 0, []

    def run() -> None:
        try:
            while not is_over.is_set():
                engine.run(rng.choice(families))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(60):
            keys = rng.sample(sorted(names), 6)
            rows = [bytearray(size) for _ in keys]
            (done,) = wait_for(store, store.load(keys, [memoryview(row) for row in rows]))
            assert done.error is None
            for key, row, is_done in zip(keys, rows, done.is_done, strict=True):
                if is_done:
                    num_loaded += 1
                    assert is_intact(row, engine.namespace, key), seed
                    cells = np.frombuffer(row[HEADER_BYTES:], np.int64).reshape(4, -1)
                    assert (cells == np.arange(names[key], names[key] + 4).reshape(4, 1)).all(), seed
    finally:
        is_over.set()
        thread.join()
    assert not errors, seed
    assert num_loaded, seed
    engine.manager.check()


@pytest.mark.parametrize("other", ["secret", "namespace"])
def test_a_stranger_gets_and_gives_nothing(keep: Callable[[Any], Any], other: str) -> None:
    engine = Engine()
    server = serve(engine, keep)
    engine.run(PROMPT)
    stranger = Engine(model=b"others" if other == "namespace" else b"weights")
    secret = SECRET if other == "namespace" else b"another secret of more bytes"
    stranger.ask(PeerStore(server.address, secret, stranger.namespace, answer_seconds=0.1))
    assert stranger.run([*PROMPT, 7]) == 0
    assert stranger.store is not None
    assert stranger.store.stats().num_errors > 0
    assert server.num_refused_messages > 0
    stranger.store.close()


def lie(rng: Random, flags: bytes, parts: list[Any]) -> Any:
    """Change an answer, or give none."""
    kind = rng.randrange(8)
    if kind == 0:
        return None
    if kind == 1:
        return b"\1" * len(flags), parts
    if kind == 2:
        return flags[1:], parts
    if kind == 3:
        return flags, parts[1:]
    if kind == 4:
        return bytes([2]) * len(flags), parts
    if kind == 5:
        return flags, [rng.randbytes(len(part)) for part in parts]
    if kind == 6:
        return flags, [*parts[1:], *parts[:1]]
    return flags, [*parts, b"more"]


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_lies_costs_hits_and_never_tokens(keep: Callable[[Any], Any], seed: int) -> None:
    rng, owner = Random(seed), Engine()
    server = serve(owner, keep)
    prompts = [[1000 * i + at for at in range(21)] for i in range(3)]
    for prompt in prompts:
        owner.run(prompt)
    honest = keep(PeerStore(server.address, SECRET, owner.namespace))
    size = HEADER_BYTES + owner.rows[0].shape[1]
    objects: dict[bytes, bytes] = {}
    for prompt in prompts:
        chain = owner.manager.registry.hash_apart(_request(prompt), 21)
        for at in range(5):
            digest = int(chain[at])
            key = np.array([[digest & (2**64 - 1), digest >> 64 & (2**64 - 1)]], np.uint64)
            (name,) = Pages(key, np.zeros(1, np.int32)).name()
            row = bytearray(size)
            (done,) = wait_for(honest, honest.load([name], [memoryview(row)]))
            assert done.is_done == b"\1"
            objects[name] = bytes(row)
    liar = keep(ObjectServer(objects, SECRET, owner.namespace))
    liar.change = lambda flags, parts: lie(rng, flags, parts) if rng.random() < 0.6 else (flags, parts)
    num_cached = 0
    for _ in range(6):
        engine = Engine()
        engine.ask(PeerStore(liar.answerer.address, SECRET, engine.namespace, answer_seconds=0.05))
        for prompt in prompts:
            num_cached += engine.run(prompt)  # which compares all tokens
        engine.manager.check()
        assert engine.store is not None
        engine.store.close()
    assert num_cached, seed


@pytest.mark.parametrize("seed", range(2))
def test_a_bad_network_costs_hits_and_never_tokens(keep: Callable[[Any], Any], seed: int) -> None:
    owner = Engine()
    server = serve(owner, keep)
    prompts = [[1000 * i + at for at in range(21)] for i in range(3)]
    for prompt in prompts:
        owner.run(prompt)
    proxy = keep(BadProxy(server.address, Random(seed), share=0.2))
    for _ in range(3):
        engine = Engine()
        engine.ask(PeerStore(proxy.address, SECRET, engine.namespace, answer_seconds=0.1))
        for prompt in prompts:
            engine.run(prompt)
        assert engine.store is not None
        assert engine.store.stats().num_damaged_pages == 0, seed
        engine.store.close()
    assert proxy.num_faults, seed


def test_a_slow_peer_is_not_waited_for(keep: Callable[[Any], Any]) -> None:
    slow = keep(ObjectServer({}))
    slow.change = lambda flags, parts: time.sleep(0.3)
    engine = Engine()
    engine.ask(PeerStore(slow.answerer.address, SECRET, "model/v1"), deadline_ms=20)
    start = time.monotonic()
    assert engine.run(PROMPT) == 0
    assert time.monotonic() - start < 0.25
    assert engine.store is not None
    engine.store.close()


def test_a_peer_that_is_killed(keep: Callable[[Any], Any]) -> None:
    """Its jobs fail; a StoreTier computes what it does not get."""
    prompts = [[1000 * i + at for at in range(21)] for i in range(2)]
    engine = Engine(width=20_000)
    with peer_process(serve_tier, SECRET, prompts, 20_000) as (process, _, address):
        store = PeerStore(address, SECRET, engine.namespace, answer_seconds=0.2)
        engine.ask(store)
        assert engine.run(prompts[0]) == 20
        process.kill()
        process.join()
    assert engine.run(prompts[1]) == 0
    assert engine.store is not None
    assert engine.store.stats().num_errors > 0
    engine.store.close()


def test_saves_are_not_done_and_touches_do_nothing(keep: Callable[[Any], Any]) -> None:
    store = keep(PeerStore("tcp://127.0.0.1:1", SECRET, "model/v1"))
    (done,) = wait_for(store, store.save([b"a", b"b"], [memoryview(b"1"), memoryview(b"2")]))
    assert done == Done(done.job, b"\0\0", None)
    store.touch([b"a"])
    assert store.poll() == []


def test_a_dead_address_is_an_error_of_the_answer(keep: Callable[[Any], Any]) -> None:
    for address in ("tcp://127.0.0.1:1", "nonsense"):
        store = keep(PeerStore(address, SECRET, "model/v1", answer_seconds=0.05))
        (found,) = wait_for(store, store.lookup([b"key"]))
        assert found.is_done == b"\0"
        assert isinstance(found.error, PeerError)


def test_close_while_loads_are_under_way(keep: Callable[[Any], Any]) -> None:
    objects = {bytes([i]): bytes([1]) * 300_000 for i in range(100)}
    server = keep(ObjectServer(objects))
    for seconds in (0, 0.002, 0.01):
        store = PeerStore(server.answerer.address, SECRET, "model/v1")
        rows = [bytearray(300_000) for _ in objects]
        store.load(list(objects), [memoryview(row) for row in rows])
        time.sleep(seconds)
        store.close(drain_seconds=0)
        for row in rows:
            row[:] = b"\3" * len(row)
        time.sleep(0.02)
        assert all(row.count(3) == len(row) for row in rows)


def test_a_server_may_be_closed_at_any_time(keep: Callable[[Any], Any]) -> None:
    engine = Engine(width=5000)
    engine.run(PROMPT)
    names, size = names_of(engine), HEADER_BYTES + engine.rows[0].shape[1]
    for seconds in (0, 0.001, 0.003):
        server = TierServer(engine.manager, engine.rows, engine.namespace, SECRET)
        engine.move_pages(3)
        store = keep(PeerStore(server.address, SECRET, engine.namespace, answer_seconds=0.1))
        job = store.load(names, [memoryview(bytearray(size)) for _ in names])
        time.sleep(seconds)
        server.close()
        server.close()
        wait_for(store, job)
        engine.manager.check()
    pool = engine.manager.host_tier
    assert pool is not None
    assert engine.manager.reset_prefix_cache()
    assert pool.stats().num_free_pages == 99  # nothing stays held


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_fork_leaves_both_to_the_parent(keep: Callable[[Any], Any]) -> None:
    engine = Engine()
    server = serve(engine, keep)
    engine.run(PROMPT)
    store = keep(PeerStore(server.address, SECRET, engine.namespace))
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(IntegrityError):
                store.lookup([b"key"])
            store.close(drain_seconds=0)
            server.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert all(wait_for(store, store.lookup(names_of(engine)))[0].is_done)


def test_wrong_arguments_are_refused(keep: Callable[[Any], Any]) -> None:
    engine = Engine()
    before = threading.active_count()
    good = {"manager": engine.manager, "rows": engine.rows, "namespace": engine.namespace, "secret": SECRET}
    for wrong, error in (
        ({"manager": None}, ArgumentTypeError),
        ({"rows": []}, ArgumentError),
        ({"rows": 5}, ArgumentTypeError),
        ({"namespace": None}, ArgumentTypeError),
        ({"secret": b"short"}, ArgumentError),
        ({"address": "nonsense"}, EndpointError),
        ({"address": None}, ArgumentTypeError),
    ):
        with pytest.raises(error):
            TierServer(**(good | wrong))  # type: ignore[arg-type]
    for wrong, error in (
        ({"address": 5}, ArgumentTypeError),
        ({"secret": None}, ArgumentTypeError),
        ({"namespace": 5}, ArgumentTypeError),
        ({"answer_seconds": -1}, ArgumentError),
        ({"max_object_bytes": 1}, ArgumentError),
    ):
        with pytest.raises(error):
            PeerStore(**({"address": "x", "secret": SECRET, "namespace": "n"} | wrong))  # type: ignore[arg-type]
    assert threading.active_count() == before
    assert isinstance(HostTier(4), HostTier)


# --- ranks --------------------------------------------------------------------------------------------------------


def make_ranks(folder: Any, keep: Callable[[Any], Any]) -> tuple[RankStores, list[FileStore]]:
    stores = [FileStore(folder / str(rank), "model/v1") for rank in range(3)]
    return keep(RankStores(stores)), stores


def test_ranks_have_each_a_part_of_an_object(tmp_path: Any, keep: Callable[[Any], Any]) -> None:
    ranks, stores = make_ranks(tmp_path, keep)
    assert isinstance(ranks, Store)
    objects = {b"a": b"12345678", b"b": b"abc", b"c": bytes(100_000)}
    (saved,) = wait_for(ranks, ranks.save(list(objects), [memoryview(row) for row in objects.values()]))
    assert saved == Done(saved.job, b"\1\1\1", None)
    (found,) = wait_for(ranks, ranks.lookup([b"x", *objects]))
    assert found.is_done == b"\0\1\1\1"
    rows = [bytearray(len(row)) for row in objects.values()]
    (done,) = wait_for(ranks, ranks.load(list(objects), [memoryview(row) for row in rows]))
    assert (done.is_done, rows) == (b"\1\1\1", list(objects.values()))
    part = bytearray(3)
    (done,) = wait_for(stores[1], stores[1].load([b"a"], [memoryview(part)]))
    assert (done.is_done, part) == (b"\1", b"345")


def test_a_key_is_done_only_if_all_ranks_have_it(tmp_path: Any, keep: Callable[[Any], Any]) -> None:
    ranks, stores = make_ranks(tmp_path, keep)
    wait_for(ranks, ranks.save([b"a", b"b"], [memoryview(b"123456"), memoryview(b"abcdef")]))
    wait_for(stores[2], stores[2].save([b"a"], [memoryview(b"longer")]))
    row, other = bytearray(6), bytearray(6)
    (done,) = wait_for(ranks, ranks.load([b"a", b"b"], [memoryview(row), memoryview(other)]))
    assert (done.is_done, other) == (b"\0\1", b"abcdef")
    wait_for(stores[0], stores[0].save([b"only"], [memoryview(b"here")]))
    (found,) = wait_for(ranks, ranks.lookup([b"only", b"b"]))
    assert found.is_done == b"\0\1"
    assert wait_for(ranks, ranks.lookup([]))[0].is_done == b""


def test_wrong_rows_of_ranks_are_refused(tmp_path: Any, keep: Callable[[Any], Any]) -> None:
    ranks, _ = make_ranks(tmp_path, keep)
    with pytest.raises(ArgumentError, match="rows: got a row of 2 bytes, allowed: at least 3"):
        ranks.save([b"a"], [memoryview(b"12")])
    for rows, error in (([b"bytes"], ArgumentTypeError), ([], ArgumentError), (5, ArgumentTypeError)):
        with pytest.raises(error, match="rows"):
            ranks.load([b"a"], rows)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="keys"):
        ranks.lookup([5])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="stores: got none"):
        RankStores([])
    assert ranks.poll() == []

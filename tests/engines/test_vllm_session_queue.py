"""vLLM's free queue that listens, without vLLM: vLLM's order until something is said, and bounds on what is said."""

from __future__ import annotations

import logging
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from random_hints import make_fields
from settings import NUM_OPERATIONS

from pagepool.compat.vllm.blocks import Block, FreeQueue, Queue
from pagepool.compat.vllm.listener import MAX_NAMES, OTHERS, Listener
from pagepool.compat.vllm.policy import (
    HINTS_VARIABLE,
    MAX_NUM_SHARES,
    PINS_VARIABLE,
    SHARES_VARIABLE,
    read_hints,
    read_pins,
    read_shares,
)
from pagepool.compat.vllm.session_queue import AdaptiveListeningQueue, ListeningQueue, SessionQueue
from pagepool.errors import CompatError

GROUP = (0).to_bytes(4, "big")


def make_blocks(num_blocks: int, queue_class: Any) -> tuple[FreeQueue, list[Block]]:
    """Make a queue without the null block, and all blocks."""
    pool = SimpleNamespace(enable_caching=True)
    blocks = [Block(i, pool=pool) for i in range(num_blocks)]
    pool.free_block_queue = queue = queue_class(blocks)
    queue.popleft().is_null = True
    return queue, blocks


class Twin:
    """A queue of vLLM's order and one that listens, in step."""

    def __init__(self, num_blocks: int) -> None:
        self.sides = [make_blocks(num_blocks, queue_class) for queue_class in (Queue, ListeningQueue)]
        self.held: list[int] = []

    def take(self, num_blocks: int) -> None:
        for queue, _ in self.sides:
            taken = queue.popleft_n(num_blocks)
            for block in taken:
                block.reset_hash()
                block.ref_cnt = 1
        self.held += [block.block_id for block in taken]

    def cache(self, block_id: int, key: int) -> None:
        for _, blocks in self.sides:
            blocks[block_id].set_block_hash(key.to_bytes(16, "little") + GROUP)

    def reset(self, block_id: int) -> None:
        for _, blocks in self.sides:
            blocks[block_id].reset_hash()

    def give_back(self, ids: list[int], *, first: bool) -> None:
        for queue, blocks in self.sides:
            for block_id in ids:
                blocks[block_id].ref_cnt = 0
            (queue.prepend_n if first else queue.append_n)([blocks[block_id] for block_id in ids])
        self.held = [block_id for block_id in self.held if block_id not in ids]

    def hit(self, block_id: int) -> None:
        for queue, blocks in self.sides:
            queue.remove(blocks[block_id])
            blocks[block_id].ref_cnt = 1
        self.held.append(block_id)

    def ids(self) -> list[list[int]]:
        return [[block.block_id for block in queue.get_all_free_blocks()] for queue, _ in self.sides]


@pytest.mark.parametrize("seed", range(max(NUM_OPERATIONS // 8_000, 4)))
def test_vllms_order_if_nothing_is_said(seed: int) -> None:
    rng = Random(seed)
    twin = Twin(rng.choice((4, 9, 33)))
    keys = [rng.getrandbits(128) for _ in range(rng.choice((4, 40)))]
    for _ in range(400):
        _, blocks = twin.sides[0]
        uncached = [i for i in twin.held if blocks[i].block_hash is None]
        cached = [i for i in twin.held if i not in uncached]
        [free, _] = twin.ids()
        action = rng.choice(("take", "cache", "cache", "give back", "give first", "hit", "reset"))
        if action == "take" and free:
            twin.take(rng.randint(1, min(4, len(free))))
        elif action == "cache" and uncached:
            twin.cache(rng.choice(uncached), rng.choice(keys))
        elif action == "give back" and twin.held:
            twin.give_back(rng.sample(twin.held, rng.randint(1, len(twin.held))), first=False)
        elif action == "give first" and uncached:
            twin.give_back(rng.sample(uncached, rng.randint(1, len(uncached))), first=True)
        elif action == "hit" and free:
            twin.hit(rng.choice(free))
        elif action == "reset" and rng.random() < 0.1 and (cached or free):
            twin.reset(rng.choice(cached or free))
        ours, theirs = twin.ids()
        assert ours == theirs


def test_classes() -> None:
    for queue_class, eviction in ((ListeningQueue, "lru"), (AdaptiveListeningQueue, "adaptive")):
        queue, _ = make_blocks(4, queue_class)
        assert isinstance(queue, SessionQueue)
        assert (queue.store.eviction, queue.listens, queue.num_turns) == (eviction, True, 0)
        queue.check()
        blocks = [Block(0, pool=SimpleNamespace(enable_caching=False))]
        assert type(queue_class(blocks)) is Queue
        assert type(queue_class([Block(0)])) is Queue
    with pytest.raises(CompatError, match=r"append_n of .*ListeningQueue"):
        ListeningQueue.append_n = None  # type: ignore[method-assign, assignment]


# What is heard.


def make_request(session: str | None = None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(session_id=session, **fields)


def with_arguments(session: str | None, salt: str | None = None, **arguments: Any) -> SimpleNamespace:
    return make_request(session, cache_salt=salt, sampling_params=SimpleNamespace(extra_args=arguments))


def test_keys() -> None:
    listener = Listener(reads_times=True)
    salts = (None, "", "a", "1:a", "ab", "b")
    keys = {listener.key_of(salt, session) for salt in salts for session in ("s1", "as1", "bs1", "\udc80", "s" * 10**6)}
    assert len(keys) == len(salts) * 5
    assert {len(key) for key in keys} == {16}
    assert listener.key_of("a", "s1") == listener.key_of("a", "s1") != Listener(reads_times=True).key_of("a", "s1")
    assert listener.key_of(7, "s1") == listener.key_of(None, "s1")


def test_what_is_heard() -> None:
    listener = Listener(reads_times=True)
    key = listener.key_of(None, "s1")
    assert listener.hear(make_request()) is None
    assert listener.hear(make_request("s1")) == (key, None, None, False, (), ())
    assert listener.hear(with_arguments("s1", pagepool_seconds=3)) == (key, None, 3.0, False, (), ())
    assert listener.hear(with_arguments("s1", pagepool_seconds=-1)) == (key, None, inf, False, (), ())
    assert listener.hear(with_arguments("s1", pagepool_close=1)) == (key, None, None, True, (), ())
    assert listener.hear(with_arguments(None, pagepool_seconds=3)) == (None, None, 3.0, False, (), ())
    assert listener.counts == {"sessions": 4, "seconds": 3, "closes": 1}


def test_a_one_shot_is_a_session_of_its_own() -> None:
    """So it cannot end blocks of other requests."""
    listener = Listener(reads_times=True)
    first, second = (listener.hear(with_arguments(None, **said)) for said in ({"pagepool_seconds": -1}, {"pagepool_close": 1}))
    assert first is not None
    assert second is not None
    assert first.session != second.session
    assert first[1:] == second[1:] == (None, None, True, (), ())


def test_other_sessions() -> None:
    listener = Listener(reads_times=True)
    types = [("kv.retain", {"seconds": 60, "session_id": "s2"}), ("kv.demote", {"session_id": "s3"})]
    actions = [{"action_type": name, "action_version": "1.0", "payload": payload} for name, payload in types]
    request = make_request("s1", kv_hints={"protocol_version": "1.0", "actions": actions})
    keys = [listener.key_of(None, session) for session in ("s1", "s2", "s3")]
    assert listener.hear(request) == (keys[0], None, None, False, ((keys[1], 60.0), (keys[2], inf)), ())
    request.num_preemptions = 1
    assert listener.hear(request) == (keys[0], None, None, False, (), ())
    assert listener.counts == {"sessions": 1, "retains": 1, "demotes": 1}


def test_ids_alone() -> None:
    listener = Listener(reads_times=False)
    assert listener.hear(with_arguments("s1", pagepool_seconds=3, pagepool_close=1)) == (
        *(listener.key_of(None, "s1"), None, None, False, (), ()),
    )


def test_shares() -> None:
    """Those of named salts, and of others as long as there is room."""
    listener = Listener(reads_times=True, shares={"a": 0.5, "*": 0.2})
    heard = [listener.hear(make_request(cache_salt=salt)) for salt in ("a", "b", "c", "d", "b", "")]
    tenants = [one and one.tenant for one in heard]
    assert tenants == [listener.key_of("a", ""), listener.key_of("b", ""), listener.key_of("c", ""), None, tenants[1], None]
    assert [*listener.shares.values()] == [0.5, 0.2, 0.2]
    assert listener.hear(make_request(cache_salt=None)) is None
    assert Listener(reads_times=True).hear(make_request(cache_salt="a")) is None
    many = Listener(reads_times=True, shares={"*": 0.001})
    assert sum(many.hear(make_request(cache_salt=str(i))) is not None for i in range(500)) == MAX_NUM_SHARES


def test_shares_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HINTS_VARIABLE, "sessions")
    for value, expected in (("", {}), (" *:0.1", {"*": 0.1}), ("a:b:.5, c:.25", {"a:b": 0.5, "c": 0.25})):
        monkeypatch.setenv(SHARES_VARIABLE, value)
        assert read_shares() == expected
    for value in ("a", "secret:x", ":0.5", "a:0", "a:-1", "a:nan", "a:1", "a:0.5,b:0.5", "a:0.5,"):
        monkeypatch.setenv(SHARES_VARIABLE, value)
        with pytest.raises(CompatError, match=r"PAGEPOOL_VLLM_SHARES: got .* characters, allowed: salt:share, ") as caught:
            read_shares()
        assert "secret" not in str(caught.value)
    monkeypatch.setenv(SHARES_VARIABLE, ",".join(f"{i}:0.001" for i in range(64)))
    with pytest.raises(CompatError, match="got 64 shares, allowed: at most 63 of them"):
        read_shares()
    monkeypatch.setenv(SHARES_VARIABLE, "a:0.5")
    monkeypatch.delenv(HINTS_VARIABLE)
    with pytest.raises(CompatError, match="got 1 shares, allowed: only with PAGEPOOL_VLLM_HINTS"):
        read_shares()


def test_pins_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PINS_VARIABLE, raising=False)
    monkeypatch.setenv(HINTS_VARIABLE, "all")
    assert read_pins() == 0
    monkeypatch.setenv(PINS_VARIABLE, " 0.05")
    assert read_pins() == 0.05
    monkeypatch.setenv(HINTS_VARIABLE, "sessions")
    with pytest.raises(CompatError, match="allowed: only with PAGEPOOL_VLLM_HINTS=all"):
        read_pins()
    for value in ("yes", "-0.1", "0.6", "nan"):
        monkeypatch.setenv(PINS_VARIABLE, value)
        with pytest.raises(CompatError, match=f"PAGEPOOL_VLLM_PINS: got '{value}', allowed: 0 to 0.5"):
            read_pins()


def test_names_are_bounded_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.pagepool")
    listener = Listener(reads_times=True)
    for i in range(200):
        actions = [{"action_type": f"type {i}", "action_version": "1.0", "payload": {}}] * 2
        listener.hear(make_request(kv_hints={"protocol_version": "1.0", "actions": actions}))
    assert len(listener.ignored) == MAX_NAMES + 1
    assert (listener.ignored["type 0 1.0"], listener.ignored[OTHERS]) == (2, 2 * (200 - MAX_NAMES))
    assert [message for message in caplog.messages if "hint" in message] == [
        "a request's hint was ignored, and further ones will be counted: type 0 1.0 is not understood"
    ]


def test_nonsense_is_bounded() -> None:
    listener = Listener(reads_times=True)
    for seed in range(NUM_OPERATIONS // 8):
        heard = listener.hear(SimpleNamespace(**make_fields(Random(seed))))
        if heard is not None:
            assert heard.session is None or len(heard.session) <= 32, seed
            assert len(heard.others) <= 16, seed
    assert len(listener.ignored) <= MAX_NAMES + 1
    assert listener.counts["errors"] == 0


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ""), ("", ""), ("off", ""), ("0", ""), (" Sessions", "sessions"), ("ALL", "all")]
)
def test_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str) -> None:
    monkeypatch.delenv(HINTS_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(HINTS_VARIABLE, value)
    assert read_hints() == expected
    monkeypatch.setenv(HINTS_VARIABLE, "on")
    with pytest.raises(CompatError, match="PAGEPOOL_VLLM_HINTS: got 'on', allowed: sessions, all; 0"):
        read_hints()

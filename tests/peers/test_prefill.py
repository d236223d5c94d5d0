"""Prompts computed by one engine for another: what crosses, what hits, and what faults cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from apart import NAMESPACE, SECRET, FaultyLink, Network, PromptRows, Side
from hybrids import CHUNK, FULL, WINDOW, keep_every

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("xxhash")

from pagepool import FullAttentionSpec, MambaSpec, RequestTraits, SlidingWindowSpec
from pagepool.errors import ArgumentError, ArgumentTypeError, PeerError
from pagepool.peers import PrefillClient, PrefillServer, RowsLink

NO_TRAITS = RequestTraits()
SETTINGS = {
    "full": [FULL],
    "full of two sizes": [FULL, FullAttentionSpec(8, 1, 8, "float16", False)],
    "full and window": [FULL, WINDOW],
    "windows": [WINDOW, SlidingWindowSpec(4, 1, 8, "float16", False, 11)],
    "full and chunks": [FULL, CHUNK],
    "full and state": [FULL, keep_every(8)],
    "full, window and state": [FULL, WINDOW, keep_every(8)],
    "state": [keep_every(8)],
}


def is_state(spec: Any) -> bool:
    return isinstance(spec, MambaSpec)


class Pair:
    """An engine that computes prompts in chunks of `chunk` tokens, and one that asks it."""

    def __init__(self, specs: Sequence[Any], rng: Random, fault_rate: float = 0.0, chunk: int = 8, **links: Any) -> None:
        self.network = Network(rng, fault_rate)
        self.chunk = chunk
        self.prefill, self.decode = Side(specs, hash_seed=1), Side(specs, hash_seed=1)
        self.served, self.pulled = (links.get(name) or FaultyLink(self.network) for name in ("served", "pulled"))
        self.server = PrefillServer(self.prefill.manager, self.served, NAMESPACE, SECRET, lease_seconds=2.0)
        self.client = PrefillClient(self.decode.manager, self.pulled, NAMESPACE, SECRET, self.decode.make_parts, seconds=2.0)
        self.prompts = PromptRows(self.prefill, self.server, chunk)
        self.num_failed = 0

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def run(self, row: int, token_ids: list[int], traits: RequestTraits = NO_TRAITS, answer: Sequence[int] = ()) -> int:
        """Let a row of the decode side get its prompt, and compute the last token and an answer. Return how many tokens of the
        prompt it computed.
        """
        batch, before = self.decode.batch, self.network.num_bytes
        end = self.client.find_end(len(token_ids))
        num_hits = batch.probe(row, token_ids, traits=traits)
        assert batch.admit(row, token_ids, num_external_tokens=max(0, end - num_hits), traits=traits) == num_hits
        writes = self.decode.move()
        num_external = int(batch.num_external_tokens[row])
        if num_external:
            self.client.ask("row", self.server.address, token_ids[:end], num_hits, traits=traits)
        end_at = time.monotonic() + 20
        is_waiting = num_external > 0
        while is_waiting:
            assert time.monotonic() < end_at, "no end"
            self.prompts.step()
            for arrival in self.client.poll():
                if arrival.error is not None:
                    self.num_failed += 1
                    batch.fail_external(row, arrival.num_tokens)
                else:
                    self.decode.scatter(row, arrival.places, arrival.parts, writes)
                    batch.commit_external(row, arrival.num_tokens, is_last=arrival.is_last)
                is_waiting &= not arrival.is_last
        start = int(batch.num_computed_tokens[row])
        self.num_bytes = self.network.num_bytes - before
        while (num_left := len(token_ids) - 1 - int(batch.num_computed_tokens[row])) > 0:
            self.decode.run_to(row, token_ids, min(num_left, self.chunk))
        self.decode.answer(row, token_ids + list(answer))
        batch.release([row])
        self.decode.manager.check()
        self.prefill.manager.check()
        return len(token_ids) - start


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("specs", SETTINGS.values(), ids=SETTINGS)
def test_turns_move_what_is_missing(specs: list[Any], pairs: list[Pair]) -> None:
    pair = Pair(specs, Random(1))
    pairs.append(pair)
    turn, answer = list(range(50)), list(range(100, 120))
    most = 8 if any(map(is_state, specs)) else 1
    assert pair.run(0, turn, answer=answer) <= most
    whole = pair.num_bytes
    assert pair.run(1, turn + answer + list(range(200, 217))) <= most
    assert pair.num_failed == 0
    assert pair.num_bytes < whole or FULL not in specs
    assert pair.prefill.manager.stats().num_held_pages == pair.decode.manager.stats().num_held_pages == 0
    deadline = time.monotonic() + 10
    while pair.network.offers:
        assert time.monotonic() < deadline
        pair.server.poll()


@pytest.mark.parametrize("specs", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_faults_cost_no_tokens(specs: list[Any], seed: int, pairs: list[Pair]) -> None:
    """Prompts that share prefixes, over a link that delays and loses."""
    rng = Random(seed)
    pair = Pair(specs, rng, fault_rate=0.25, chunk=rng.choice((3, 8, 64)))
    pairs.append(pair)
    known = [[rng.randrange(99) for _ in range(60)] for _ in range(2)]
    for i in range(6):
        prefix = rng.choice(known)[: rng.randint(0, 60)]
        token_ids = prefix + [rng.randrange(99) for _ in range(rng.randint(2, 40))]
        traits = RequestTraits(cache_salt=rng.choice((None, "salt", 7, b"x")), lora_id=rng.choice((None, 3, ("a", 1))))
        pair.run(i % 4, token_ids, traits)
    assert pair.decode.manager.stats().num_held_pages == 0


def test_over_tcp(pairs: list[Pair]) -> None:
    links = {name: RowsLink(SECRET, NAMESPACE) for name in ("served", "pulled")}
    pair = Pair([FULL, WINDOW, keep_every(16)], Random(1), **links)
    pairs.append(pair)
    assert [pair.run(0, list(range(90))), pair.run(1, list(range(100)))] == [10, 4]
    assert pair.num_failed == 0
    pair.close()
    for link in links.values():
        link.close()


def test_a_silent_peer_costs_time_alone(pairs: list[Pair]) -> None:
    pair = Pair([FULL], Random(1))
    pairs.append(pair)
    pair.server.close()
    began = time.monotonic()
    assert pair.run(0, list(range(30))) == 30
    assert time.monotonic() - began >= 2
    assert pair.num_failed == 1


def test_a_prompt_that_is_cancelled_is_dropped(pairs: list[Pair]) -> None:
    pair = Pair([FULL], Random(1))
    pairs.append(pair)
    pair.client.ask("a", pair.server.address, list(range(30)), 0)
    prompts: list[Any] = []
    while not prompts:
        prompts = pair.server.take()
    pair.client.cancel("a")
    pair.client.cancel("unknown")
    while pair.server.is_wanted(prompts[0]):
        pair.server.poll()
    lease = pair.prefill.manager.lease([])
    pair.server.offer(prompts[0], 8, [pair.prefill.device[0][:2]], leases=[lease])
    assert not lease.is_held
    assert not pair.network.offers
    assert pair.client.poll() == []


def test_a_dead_client_is_noticed(pairs: list[Pair]) -> None:
    """Its offers end, and leases are released."""
    pair = Pair([FULL], Random(1))
    pairs.append(pair)
    pair.client.ask("a", pair.server.address, list(range(30)), 0)
    prompts: list[Any] = []
    while not prompts:
        prompts = pair.server.take()
    page_ids = pair.prefill.manager.page_pool.get_new_page_ids(2)
    lease = pair.prefill.manager.lease(page_ids, seconds=60)
    pair.prefill.manager.page_pool.free_page_ids(page_ids)
    pair.server.offer(prompts[0], 8, pair.prefill.gather([page_ids]), leases=[lease])
    pair.client.close()
    deadline = time.monotonic() + 10
    while pair.network.offers:
        assert time.monotonic() < deadline
        pair.server.poll()
    assert not lease.is_held
    assert not pair.server.is_wanted(prompts[0])


@pytest.mark.parametrize(
    ("token_ids", "num_hits", "error", "message"),
    [
        ([], 0, ArgumentTypeError, "token_ids: got float64"),
        ([1, -1], 0, ArgumentError, "token_ids: got 2, allowed: 1 to 128"),
        ([1] * 129, 0, ArgumentError, "token_ids: got 129"),
        ([1, 2], 2, ArgumentError, "num_hit_tokens: got 2, allowed: 0 to 1"),
        ([1, 2**31], 0, ArgumentError, "token_ids: got 2"),
        ("ab", 0, ArgumentTypeError, "token_ids: got"),
    ],
)
def test_what_cannot_be_asked(token_ids: Any, num_hits: Any, error: Any, message: str, pairs: list[Pair]) -> None:
    pair = Pair([FULL], Random(1))
    pairs.append(pair)
    with pytest.raises(error, match=f"^{message}"):
        pair.client.ask("a", pair.server.address, token_ids, num_hits)
    pair.client.ask("a", pair.server.address, [1, 2], 0)
    with pytest.raises(ArgumentError, match=r"^name: got 'a', which is on its way"):
        pair.client.ask("a", pair.server.address, [1, 2], 0)
    with pytest.raises(ArgumentError, match=r"^traits: got an int of more than 64 bits"):
        pair.client.ask("b", pair.server.address, [1, 2], 0, traits=RequestTraits(cache_salt=2**70))
    with pytest.raises(ArgumentError, match=r"^traits: got media"):
        pair.client.ask("b", pair.server.address, [1, 2], 0, traits=RequestTraits(num_encoder_tokens=2))


def test_a_prompt_of_many_tokens() -> None:
    side, network = Side([FULL], num_pages=8, max_model_len=400_000, hash_seed=1), Network(Random(1), 0.0)
    server = PrefillServer(side.manager, FaultyLink(network), NAMESPACE, SECRET)
    client = PrefillClient(side.manager, FaultyLink(network), NAMESPACE, SECRET, side.make_parts)
    client.ask("a", server.address, np.arange(400_000), 0)
    prompts: list[Any] = []
    while not prompts:
        prompts = server.take()
    assert prompts[0].token_ids.tolist() == list(range(400_000))
    client.close()
    server.close()


def test_another_namespace_is_refused() -> None:
    side = Side([FULL], hash_seed=1)
    network = Network(Random(1), 0.0)
    server = PrefillServer(side.manager, FaultyLink(network), "another", SECRET)
    client = PrefillClient(side.manager, FaultyLink(network), NAMESPACE, SECRET, side.make_parts, seconds=0.2)
    client.ask("a", server.address, [1, 2, 3], 0)
    arrivals: list[Any] = []
    while not arrivals:
        arrivals = client.poll()
    assert isinstance(arrivals[0].error, PeerError)
    assert not server.take()
    client.close()
    server.close()

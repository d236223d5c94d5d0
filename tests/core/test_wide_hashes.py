"""Rows hashed by SHA-256: their digests are hashlib's over the documented messages, whatever becomes of a row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from admissions import admission
from hybrids import make_manager
from settings import NUM_OPERATIONS

from pagepool import FullAttentionSpec, HostTier, PageTable, RunningBatch
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


def root_of(hash_algo: str, lookahead: int) -> bytes:
    """Return the parent of first pages without a seed."""
    if hash_algo == "sha256":
        key = encode_extra_keys((("lookahead", lookahead),))
        return hashlib.sha256(b"root" + key).digest() if lookahead else bytes(32)
    cbor2 = pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")
    return hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()


def digests_of(hash_algo: str, token_ids: list[int], keys: dict[str, Any], lookahead: int) -> list[bytes]:
    """Return the digests of all full pages of a request whose lookahead is known."""
    hash_page, kind, _ = HASHES[hash_algo]
    request = type("Request", (), {"cache_salt": None, "lora_id": None, "mm_features": ()} | keys)()
    extra_keys, parent, digests = kind.of(request), root_of(hash_algo, lookahead), []
    for stop in range(SIZE, len(token_ids) - lookahead + 1, SIZE):
        page_keys = extra_keys.of_page(stop - SIZE, stop + lookahead) if extra_keys else None
        parent = hash_page(parent, token_ids[stop - SIZE : stop], page_keys, token_ids[stop : stop + lookahead])
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


class Rows:
    """A batch, and the tokens and extra keys of its rows."""

    def __init__(self, hash_algo: str, rng: Random, lookahead: int) -> None:
        self.hash_algo, self.rng, self.lookahead = hash_algo, rng, lookahead
        options = {"hash_algo": hash_algo, "use_eagle": lookahead > 0, "lookahead": lookahead}
        self.manager = make_manager(
            SPEC, num_pages=200, max_model_len=MAX_LEN, hash_seed=None, host_tier=HostTier(300), **options
        )
        self.batch = RunningBatch(self.manager, PageTable(NUM_ROWS, MAX_LEN // SIZE, 1024))
        self.rows: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.past: list[tuple[list[int], dict[str, Any]]] = []
        self.num_places = self.num_cached = 0

    def free_rows(self) -> list[int]:
        return [row for row in range(NUM_ROWS) if row not in self.rows]

    def transfer(self) -> None:
        if number := self.manager.take_moves().number:
            self.manager.complete(number)

    def admit(self) -> None:
        if not self.free_rows():
            return
        row = self.rng.choice(self.free_rows())
        token_ids, keys = draw_tokens(self.rng, self.rng.randrange(1, 100)), draw_keys(self.rng)
        if self.past and self.rng.random() < 0.5:  # begins like an earlier request
            token_ids, keys = self.rng.choice(self.past)
            token_ids = token_ids[: self.rng.randrange(1, len(token_ids) + 1)]
            token_ids = (token_ids + draw_tokens(self.rng, self.rng.randrange(20)))[:100]
        if self.rng.random() < 0.3:
            self.batch.probe(row, token_ids, **admission(**keys))
        num_external = self.rng.choice([0, 0, 0, 13])
        num_hits = self.batch.admit(row, token_ids, num_external_tokens=num_external, **admission(**keys))
        if num_hits is not None:
            assert num_hits % SIZE == 0
            if self.batch.num_external_tokens[row]:
                self.transfer()
                self.batch.commit_external(row, int(self.batch.num_external_tokens[row]))
            self.rows[row] = list(token_ids), keys
            self.past.append((token_ids, keys))

    def step(self) -> None:
        rows = [row for row in self.rows if len(self.rows[row][0]) < MAX_LEN]
        self.transfer()
        rest = [row for row in rows if self.batch.num_computed_tokens[row] < self.batch.num_tokens[row]]
        if rest:  # known tokens behind external ones
            missing = [int(self.batch.num_tokens[row] - self.batch.num_computed_tokens[row]) for row in rest]
            self.batch.plan(rest, missing)
            self.transfer()
        tokens = draw_tokens(self.rng, len(rows))
        step = self.batch.step(rows, tokens) if rows else None
        grown = rows[: step.num_grown] if step else []
        if step and len(grown) == len(rows) and self.rng.random() < 0.3:
            self.transfer()
            assert self.batch.settle(step, failed=True).size == 0
        for row, token in zip(grown, tokens, strict=False):
            self.rows[row][0].append(token)

    def trim(self) -> None:
        if self.rows:
            row = self.rng.choice(list(self.rows))
            self.transfer()
            length = self.rng.randrange(1, len(self.rows[row][0]) + 1)
            self.batch.trim([row], [length])
            del self.rows[row][0][length:]

    def fork(self) -> None:
        self.transfer()
        whole = [row for row in self.rows if self.batch.num_computed_tokens[row] == len(self.rows[row][0])]
        if whole and self.free_rows():
            source, target = self.rng.choice(whole), self.rng.choice(self.free_rows())
            self.batch.fork(source, [target])
            self.rows[target] = list(self.rows[source][0]), self.rows[source][1]
            self.transfer()

    def swap(self) -> None:
        first, second = self.rng.sample(range(NUM_ROWS), 2)
        self.batch.swap_row(first, second)
        pair = {row: self.rows.pop(row) for row in (first, second) if row in self.rows}
        self.rows |= {second if row == first else first: values for row, values in pair.items()}

    def release(self) -> None:
        if self.rows:
            row = self.rng.choice(list(self.rows))
            self.transfer()
            self.batch.release([row])
            self.past.append(self.rows.pop(row))

    def check(self) -> None:
        """Check that the pages of rows are cached under hashlib's digests."""
        self.batch.check()
        store = self.manager._store
        for row, (token_ids, keys) in self.rows.items():
            assert self.batch.num_tokens[row] == len(token_ids)
            digests = digests_of(self.hash_algo, token_ids, keys, self.lookahead)
            num_cacheable = min(int(self.batch.num_computed_tokens[row]), len(token_ids) - self.lookahead)
            for place in range(num_cacheable // SIZE):
                found = store.page_hash_of(self.batch.get_page_ids(row)[0][place])
                assert found is None or found.page_hash.hash_value == int.from_bytes(digests[place], "big"), (row, place)
                self.num_places += 1
                self.num_cached += found is not None


@pytest.mark.parametrize(
    ("lookahead", "seed"), [*((0, seed) for seed in range(max(2, NUM_OPERATIONS // 10_000))), (1, 0), (2, 0), (3, 0)]
)
@pytest.mark.parametrize("hash_algo", HASHES)
def test_rows_have_the_digests_of_hashlib(hash_algo: str, lookahead: int, seed: int) -> None:
    root_of(hash_algo, lookahead)
    rng = Random(f"{hash_algo} {seed}")  # the same prompts with each lookahead
    rows = Rows(hash_algo, rng, lookahead)
    actions = [rows.admit] * 4 + [rows.step] * 8 + [rows.fork, rows.swap, rows.trim] + [rows.release] * 2
    for _ in range(400):
        rng.choice(actions)()
        rows.check()
    assert rows.num_cached > 0.9 * rows.num_places > 1000  # pages that another row cut have no entry
    assert rows.manager.stats().queries.num_hit_tokens > 0

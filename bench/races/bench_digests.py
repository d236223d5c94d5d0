"""Digests of a prompt's pages, and prompts of a running batch, by hash function, and with a lookahead.

Of the digests, hashlib's are made page by page in Python, from the same messages as the core's, and must be the same. A batch
admits a cold prompt, hashes its pages, caches them, and releases the row. With a lookahead it does so, and decodes, beside a
batch for a drafter that drops the last page of each hit.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import pagepool
from bench.races.batch_rivals import Batched
from bench.races.bench_running_batch import (
    CONTEXT_LEN,
    NUM_DECODE_TURNS,
    NUM_STEPS,
    NUM_TURNS,
    PAGES_PER_PROMPT,
    PROMPT_LEN,
    Decode,
    Prompt,
    num_decode_pages,
)
from bench.races.race import DIGESTS, LOOKAHEAD, Counted, Race, Work, count_rounds
from bench.races.rivals import MAX_MODEL_LEN, Rival
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, make_group
from pagepool._core import HashChain
from pagepool.page_hashing import sha256_cbor, sha256_page

ROOTS = {"siphash128": bytes(16), "sha256": bytes(32), "sha256_cbor": bytes(32)}
HAS_CBOR = importlib.util.find_spec("cbor2") is not None


class Digests:
    """The digests of a prompt, made by the core."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm, self.num_prompts = algorithm, 0

    def prepare(self) -> None:
        rng = np.random.default_rng([SEED, self.num_prompts])
        self.tokens = rng.integers(0, VOCABULARY, PROMPT_LEN, dtype=np.int32).tolist()
        self.num_prompts += 1

    def run(self) -> None:
        self.chain = HashChain(PAGE_SIZE, ROOTS[self.algorithm], False, self.algorithm)
        self.chain.extend(self.tokens)

    @property
    def page_ids(self) -> list[int]:
        return [self.chain[i] for i in range(len(self.chain))]


class PythonDigests(Digests):
    """The same by hashlib."""

    def run(self) -> None:
        parent, tokens, digests = ROOTS[self.algorithm], self.tokens, []
        for start in range(0, PROMPT_LEN, PAGE_SIZE):
            page = tokens[start : start + PAGE_SIZE]
            is_cbor = self.algorithm == "sha256_cbor"
            parent = sha256_cbor((parent, tuple(page), None)) if is_cbor else sha256_page(parent, page, None)
            digests.append(parent)
        self.digests = digests

    @property
    def page_ids(self) -> list[int]:
        return [int.from_bytes(digest, "big") for digest in self.digests]


class Hashing(Rival):
    """Pagepool with the hash of that name."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, pagepool, pagepool, pagepool)
        self.hashing = pagepool.PageHashing(hash_algo=name, **options)

    def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
        return pagepool.CacheManager(num_pages, [make_group(pagepool)], max_model_len, hashing=self.hashing)


DRAFTERS = {
    "last page dropped": Hashing(DIGESTS.ours, use_eagle=True),
    LOOKAHEAD.ours: Hashing(DIGESTS.ours, use_eagle=True, hash_lookahead=1),
}


def find_algorithms() -> list[str]:
    """Return the algorithms whose packages are installed, ours last."""
    return ["sha256", *(["sha256_cbor"] if HAS_CBOR else []), DIGESTS.ours]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_digests(race: Race, algorithm: str) -> None:
    if algorithm == "sha256_cbor" and not HAS_CBOR:
        pytest.skip("cbor2 is not installed")
    native, python = Digests(algorithm), PythonDigests(algorithm)
    for contender in (native, python):
        contender.prepare()
        contender.run()
    assert native.page_ids == python.page_ids
    name = "hashlib, cbor2" if algorithm == "sha256_cbor" else "hashlib"
    contenders = {name: python, algorithm: native, DIGESTS.ours: Digests(DIGESTS.ours)}
    work = f"digests of {PROMPT_LEN} tokens in a list, {algorithm}"
    race(
        {each: Counted(contender) for each, contender in contenders.items()},
        Work(work, "page", PAGES_PER_PROMPT, NUM_TURNS, suite=DIGESTS),
    )


def test_prompt(race: Race) -> None:
    num_pages = count_rounds(NUM_TURNS) * PAGES_PER_PROMPT + 1
    contenders = {name: Prompt(Batched(num_pages, 1, Hashing(name)), False) for name in find_algorithms()}
    race(contenders, Work(f"cold prompt of {PROMPT_LEN} tokens in a batch", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=DIGESTS))


def test_prompt_with_lookahead(race: Race) -> None:
    num_pages = count_rounds(NUM_TURNS) * PAGES_PER_PROMPT + 1
    contenders = {name: Prompt(Batched(num_pages, 1, rival), False) for name, rival in DRAFTERS.items()}
    work = f"cold prompt of {PROMPT_LEN} tokens in a batch, with a drafter"
    race(contenders, Work(work, "page", PAGES_PER_PROMPT, NUM_TURNS, suite=LOOKAHEAD))


@pytest.mark.parametrize("num_rows", [256, 1024])
def test_decode_with_lookahead(race: Race, num_rows: int) -> None:
    num_pages = num_decode_pages(num_rows, CONTEXT_LEN, NUM_DECODE_TURNS)
    contenders = {name: Decode(Batched(num_pages, num_rows, rival), num_rows, CONTEXT_LEN) for name, rival in DRAFTERS.items()}
    work = f"decode with a drafter: {num_rows} rows, context {CONTEXT_LEN}"
    race(contenders, Work(work, "row", num_rows * NUM_STEPS, NUM_DECODE_TURNS, suite=LOOKAHEAD))

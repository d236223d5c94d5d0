"""A router's index in plain counters, written to be obviously right, and random batches of events for both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import lcm
from random import Random
from typing import Any

import msgspec

GPU = "GPU"


@dataclass(frozen=True)
class Spec:
    """A cache group as events describe it."""

    block_size: int
    kind: str = "full_attention"
    window: int | None = None


@dataclass
class OracleIndex:
    """Copies of blocks by worker, group and medium."""

    page_size: int
    num_groups: int | None = None
    blocks: dict[tuple[int, int], dict[str, Counter[int]]] = field(default_factory=dict)
    """Of a worker and group, by medium."""
    specs: dict[int, Spec] = field(default_factory=dict)
    lossy: set[int] = field(default_factory=set)
    """Workers of which batches were lost."""
    num_workers: int = 0

    def apply(self, worker: int, events: list[dict[str, Any]]) -> None:
        self.num_workers = max(self.num_workers, worker + 1)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.remove_worker(worker)
                continue
            group = event.get("group_idx") or 0
            blocks = self.blocks.setdefault((worker, group), {}).setdefault(event.get("medium") or GPU, Counter())
            if event["type"] == "BlockStored":
                kind, window = event.get("kv_cache_spec_kind") or "", event.get("kv_cache_spec_sliding_window")
                self.specs[group] = Spec(event["block_size"], kind, window)
                self.num_groups = event.get("num_groups") or self.num_groups
                blocks.update(event["block_hashes"])
            else:
                blocks.subtract(event["block_hashes"])
            for block_hash in event["block_hashes"]:
                if blocks[block_hash] <= 0 or (worker in self.lossy and event["type"] == "BlockRemoved"):
                    del blocks[block_hash]

    def copy(self, worker: int) -> OracleIndex:
        """Return a copy, for changes of a worker."""
        copied = OracleIndex(self.page_size, self.num_groups, dict(self.blocks), dict(self.specs), set(self.lossy))
        copied.num_workers = self.num_workers
        for owner, group in self.blocks:
            if owner == worker:
                media = self.blocks[owner, group].items()
                copied.blocks[owner, group] = {medium: blocks.copy() for medium, blocks in media}
        return copied

    def note_loss(self, worker: int) -> None:
        if worker < self.num_workers:
            self.lossy.add(worker)

    def remove_worker(self, worker: int) -> None:
        self.lossy.discard(worker)
        for owner, group in self.blocks:
            if owner == worker:
                self.blocks[owner, group] = {}

    def count_held(self, worker: int) -> int:
        return sum(len(blocks) for (owner, _), media in self.blocks.items() if owner == worker for blocks in media.values())

    def find(self, hashes: list[int], medium: str | None = None) -> list[int]:
        return [self.find_worker(worker, hashes, medium) for worker in range(self.num_workers)]

    def find_worker(self, worker: int, hashes: list[int], medium: str | None) -> int:
        """Try all lengths, the longest first. Nothing hits while one of the groups that events count is unknown."""
        if len(self.specs) < (self.num_groups or 0):
            return 0
        pages = {group: self.list_pages(worker, group, hashes, medium) for group in self.specs}
        multiple = lcm(*(spec.block_size // self.page_size for spec in self.specs.values()))
        longest = min((self.count_most(self.specs[group], pages[group], len(hashes)) for group in self.specs), default=0)
        for length in range(longest // multiple * multiple, 0, -multiple):
            if all(self.resumes(self.specs[group], pages[group], length) for group in self.specs):
                return length * self.page_size
        return 0

    def count_most(self, spec: Spec, pages: list[bool], num_hashes: int) -> int:
        """Count hashes that a group may resume behind, at most: none without a page, or behind one that it has to have."""
        if True not in pages:
            return 0
        if spec.window or spec.kind == "mamba" or False not in pages:
            return num_hashes
        return pages.index(False) * (spec.block_size // self.page_size)

    def list_pages(self, worker: int, group: int, hashes: list[int], medium: str | None) -> list[bool]:
        """Return whether a worker has each page."""
        stride = self.specs[group].block_size // self.page_size
        media = self.blocks.get((worker, group), {})
        sets = [blocks for name, blocks in media.items() if medium in (None, name) and blocks]
        return [any(block_hash in blocks for blocks in sets) for block_hash in hashes[stride - 1 :: stride]]

    def resumes(self, spec: Spec, pages: list[bool], length: int) -> bool:
        """Whether all pages are there that a request needs which resumes behind so many hashes."""
        stop = length * self.page_size // spec.block_size
        start = 0
        if spec.kind == "mamba":
            start = stop - 1
        elif spec.window:
            start = max(0, stop - max(1, -(-(spec.window - 1) // spec.block_size)))
        return all(pages[start:stop])


STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
    "lookahead_token_ids",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")


def as_array(event: dict[str, Any]) -> list[Any]:
    """Return an event as vLLM's older versions and SGLang send it, without trailing Nones."""
    fields = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": ()}[event["type"]]
    values = [event["type"], *(event.get(name) for name in fields)]
    while values[-1] is None:
        values.pop()
    return values


def encode(events: list[dict[str, Any]], rng: Random) -> bytes:
    """Encode a batch in one of the forms, its hashes as ints with or without a sign, or as bytes."""
    form = rng.choice(("ints", "signed", "bytes"))

    def told(block_hash: int) -> int | bytes:
        if form == "bytes":
            return rng.randbytes(rng.choice((0, 8, 24))) + block_hash.to_bytes(8, "big")
        return block_hash - (1 << 64) if form == "signed" and block_hash >> 63 else block_hash

    told_events: list[Any] = []
    for event in events:
        event = dict(event)
        if "block_hashes" in event:
            event["block_hashes"] = [told(block_hash) for block_hash in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = told(event["parent_block_hash"])
        told_events.append(event if event.get("num_groups") or rng.random() < 0.5 else as_array(event))
    if rng.random() < 0.3:
        return msgspec.msgpack.encode({"ts": 1.5, "events": told_events, "data_parallel_rank": 0})
    return msgspec.msgpack.encode([1.5, told_events, *rng.choice(([], [None], [3]))])


class Prompts:
    """Chains of hashes that share beginnings."""

    def __init__(self, rng: Random, num: int, max_pages: int) -> None:
        self.rng = rng
        self.chains: list[list[int]] = []
        for _ in range(num):
            known = rng.choice(self.chains) if self.chains and rng.random() < 0.8 else []
            kept = known[: rng.randint(0, len(known))]
            self.chains.append(kept + [self.new_hash() for _ in range(rng.randint(1, max_pages))])

    def new_hash(self) -> int:
        """Return one of 64 bits, or a small one, or one that differs in few bits from others."""
        choice = self.rng.random()
        if choice < 0.8:
            return self.rng.getrandbits(64)
        return self.rng.getrandbits(10) << self.rng.choice((0, 27, 54))

    def pick(self) -> list[int]:
        return self.rng.choice(self.chains)


def make_events(
    rng: Random, prompts: Prompts, specs: list[Spec], media: list[str | None], page_size: int
) -> list[dict[str, Any]]:
    """Make a batch: parts of prompts stored, single pages and ends removed, seldom everything cleared."""
    events: list[dict[str, Any]] = []
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        group = rng.randrange(len(specs))
        spec, medium, chain = specs[group], rng.choice(media), prompts.pick()
        pages = chain[spec.block_size // page_size - 1 :: spec.block_size // page_size]
        start = rng.choice((0, 0, rng.randint(0, len(pages))))
        part = pages[start : rng.choice((len(pages), rng.randint(start, len(pages))))]
        choice = rng.random()
        group_idx = None if group == 0 and rng.random() < 0.3 else group
        if choice < 0.55:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": part,
                    "parent_block_hash": pages[start - 1] if start and rng.random() < 0.9 else None,
                    "token_ids": [rng.getrandbits(rng.choice((5, 8, 16, 31))) for _ in range(rng.randint(0, 40))],
                    "block_size": spec.block_size,
                    "lora_id": None,
                    "medium": medium,
                    "lora_name": rng.choice((None, "x")),
                    "extra_keys": rng.choice((None, [["salt", 1, None], None, [{"a": 1.5}, b"x", True]])),
                    "group_idx": group_idx,
                    "kv_cache_spec_kind": spec.kind,
                    "kv_cache_spec_sliding_window": spec.window,
                    "session_id": rng.choice((None, "session")),
                    "num_groups": rng.choice((None, len(specs))),
                    "lookahead_token_ids": rng.choice((None, [[1, 2], []])),
                }
            )
        elif choice < 0.99:
            if rng.random() < 0.5:
                part = rng.sample(part, min(len(part), rng.randint(0, 3)))
            events.append({"type": "BlockRemoved", "block_hashes": part[::-1], "medium": medium, "group_idx": group_idx})
        else:
            events.append({"type": "AllBlocksCleared"})
    return events

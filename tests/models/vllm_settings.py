"""Configurations of vLLM's `KVCacheManager`, and of the random work on it. Imports nothing of vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A cache group: kind, block size, and a window or chunk in tokens.

    Kinds: "full", "sliding", "chunked", "mamba", "reference" (a window after the prompt), "ring" (one block a request, never
    cached), "cross" (blocks for an encoder's tokens, never cached).
    """

    kind: str
    block_size: int
    span: int = 0
    eagle: bool = False


@dataclass(frozen=True)
class Setting:
    """A configuration of the manager and of the workload on it.

    Lengths are in tokens but for `retention`, which is in the scheduler's blocks.
    """

    name: str
    groups: tuple[Group, ...]
    num_blocks: tuple[int, ...] = (10, 16, 40)
    enable_caching: bool = True
    use_eagle: bool = False
    hash_algo: str = "sha256"
    smallest_hash_block: int = 0  # 0: the common divisor of the groups' block sizes
    num_drafts: int = 0
    prefill_lookahead: int = 0
    hash_lookahead: int = 0
    retention: int | None = None
    watermark: float = 0.0
    context_parallel: int = 1
    asynchronous: bool = False
    external: bool = False
    extra_keys: bool = False
    events: bool = True  # in some of the seeds
    metrics: bool = False
    mixed_precision: bool = False

    @property
    def cached_groups(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kind not in ("ring", "cross"))

    @property
    def scheduler_block_size(self) -> int:
        """The least common multiple of the block sizes, over all ranks."""
        return math.lcm(*(group.block_size for group in self.groups)) * self.context_parallel

    @property
    def hash_block_size(self) -> int:
        if not self.enable_caching:
            return self.scheduler_block_size
        sizes = math.gcd(*(group.block_size for group in self.cached_groups))
        return self.smallest_hash_block or sizes * self.context_parallel

    @property
    def largest_block(self) -> int:
        return max(group.block_size for group in self.cached_groups) * self.context_parallel

    @property
    def max_model_len(self) -> int:
        return max(32, 8 * self.largest_block)

    @property
    def has_mamba(self) -> bool:
        return any(group.kind == "mamba" for group in self.groups)


FULL_2, FULL_4, FULL_8, FULL_16, FULL_32 = (Group("full", size) for size in (2, 4, 8, 16, 32))
WINDOW_4, WINDOW_9, WINDOW_13 = (Group("sliding", 4, span) for span in (4, 9, 13))
WIDE_WINDOW = Group("sliding", 8, 20)
CHUNK_8, CHUNK_6 = Group("chunked", 4, 8), Group("chunked", 4, 6)
STATE_4, STATE_8 = Group("mamba", 4), Group("mamba", 8)
RING = Group("ring", 4)
CROSS = Group("cross", 4)
DRAFT_FULL = Group("full", 4, eagle=True)
DRAFT_WINDOW = Group("sliding", 4, 9, eagle=True)
REFERENCE = Group("reference", 4, 6)

PAIR, MANY = (14, 24, 56), (24, 40, 90)

SETTINGS = [
    Setting("full", (FULL_4,), extra_keys=True),
    Setting("full in blocks of 16, sha256 over cbor", (FULL_16,), hash_algo="sha256_cbor", extra_keys=True),
    Setting("full, async", (FULL_4,), asynchronous=True),
    Setting("full, async, drafts", (FULL_4,), asynchronous=True, num_drafts=3),
    Setting("full, external tokens", (FULL_4,), external=True, watermark=0.15),
    Setting("full, eagle", (FULL_4,), use_eagle=True, num_drafts=2),
    Setting("full, multi-token prediction", (FULL_4,), use_eagle=True, num_drafts=3, prefill_lookahead=3),
    Setting("full, lookahead in hashes", (DRAFT_FULL,), num_drafts=2, hash_lookahead=2),
    Setting(
        "full, lookahead in hashes, async",
        (DRAFT_FULL,),
        hash_algo="sha256_cbor",
        num_drafts=2,
        prefill_lookahead=1,
        hash_lookahead=1,
        asynchronous=True,
        extra_keys=True,
    ),
    Setting("full, uncached", (FULL_4,), enable_caching=False, num_drafts=2),
    Setting("full, no events, metrics", (FULL_2,), events=False, metrics=True, asynchronous=True),
    Setting("full, 2 ranks", (FULL_4,), context_parallel=2, asynchronous=True),
    Setting("window", (WINDOW_9,), extra_keys=True),
    Setting("window, eagle", (WINDOW_9,), use_eagle=True, num_drafts=2, asynchronous=True),
    Setting(
        "window, lookahead in hashes", (DRAFT_WINDOW,), num_drafts=2, prefill_lookahead=1, hash_lookahead=1, extra_keys=True
    ),
    Setting("window, uncached", (WINDOW_9,), enable_caching=False, asynchronous=True),
    Setting("chunks", (CHUNK_8,), external=True),
    Setting("reference window", (REFERENCE,), num_drafts=1),
    Setting("mamba", (STATE_4,)),
    Setting("full and window", (FULL_4, WINDOW_9), PAIR, extra_keys=True, watermark=0.1),
    Setting("full and window, async", (FULL_4, WINDOW_9), PAIR, asynchronous=True),
    Setting("full and window, async, drafts", (FULL_4, WINDOW_9), PAIR, asynchronous=True, num_drafts=3),
    Setting("full and window, external tokens", (FULL_4, WINDOW_9), PAIR, external=True),
    Setting("full and window, eagle", (FULL_4, DRAFT_WINDOW), PAIR, use_eagle=True, num_drafts=2),
    Setting(
        "full and window, multi-token prediction",
        (FULL_4, WINDOW_9),
        PAIR,
        use_eagle=True,
        num_drafts=3,
        prefill_lookahead=3,
        asynchronous=True,
    ),
    Setting(
        "full and full of a draft, multi-token prediction",
        (FULL_4, DRAFT_FULL),
        PAIR,
        use_eagle=True,
        num_drafts=2,
        prefill_lookahead=2,
    ),
    Setting(
        "full and window, lookahead in hashes",
        (FULL_4, DRAFT_WINDOW),
        PAIR,
        num_drafts=2,
        prefill_lookahead=1,
        hash_lookahead=1,
        asynchronous=True,
        extra_keys=True,
    ),
    Setting(
        "full and wide window, lookahead in hashes, keep the last",
        (DRAFT_FULL, WIDE_WINDOW),
        PAIR,
        num_drafts=3,
        prefill_lookahead=3,
        hash_lookahead=3,
        retention=0,
    ),
    Setting("full and window, keep the last", (FULL_4, WINDOW_9), PAIR, retention=0, external=True),
    Setting("full and window, keep every third", (FULL_4, WINDOW_4), PAIR, retention=3, asynchronous=True),
    Setting("full and window, uncached", (FULL_4, WINDOW_9), PAIR, enable_caching=False, external=True),
    Setting("full and window, mixed precision", (FULL_4, WINDOW_13), PAIR, mixed_precision=True, external=True),
    Setting("two windows", (WINDOW_4, WINDOW_13), PAIR, num_drafts=2, asynchronous=True),
    Setting("full and chunks", (FULL_4, CHUNK_8), PAIR, external=True),
    Setting("chunks and full, metrics", (CHUNK_6, FULL_4), PAIR, metrics=True, asynchronous=True),
    Setting("full, two windows", (FULL_4, WINDOW_9, WINDOW_13), MANY, asynchronous=True, extra_keys=True),
    Setting("full and windows interleaved", (FULL_4, WINDOW_9, FULL_4, WINDOW_9), MANY, asynchronous=True, num_drafts=1),
    Setting("five groups", (WINDOW_9, WINDOW_9, FULL_4, WINDOW_4, FULL_4), MANY, external=True, watermark=0.05),
    Setting("full 16 and window of 8", (FULL_16, WIDE_WINDOW), PAIR, asynchronous=True),
    Setting("full 8, 16 and 32", (FULL_8, FULL_16, FULL_32), PAIR, external=True),
    Setting("full 4 and 8, eagle", (FULL_4, FULL_8), PAIR, use_eagle=True, num_drafts=2),
    Setting(
        "full 4, windows of 4 and 8, eagle",
        (FULL_4, WINDOW_9, WIDE_WINDOW),
        MANY,
        use_eagle=True,
        num_drafts=3,
        prefill_lookahead=3,
    ),
    Setting("full and mamba", (FULL_4, STATE_4), PAIR, asynchronous=True),
    Setting("full and mamba, hits within blocks", (FULL_8, STATE_8), PAIR, smallest_hash_block=4),
    Setting("full and mamba, hits within blocks, eagle", (FULL_8, STATE_8), PAIR, smallest_hash_block=4, use_eagle=True),
    Setting(
        "full and mamba, hits within blocks, lookahead in hashes",
        (FULL_8, STATE_8),
        PAIR,
        smallest_hash_block=4,
        num_drafts=2,
        prefill_lookahead=1,
        hash_lookahead=1,
    ),
    Setting("full and mamba, drafts", (FULL_4, STATE_4), PAIR, num_drafts=2, retention=0),
    Setting("full and ring", (FULL_4, RING), PAIR, asynchronous=True),
    Setting("full and cross", (FULL_4, CROSS), PAIR, enable_caching=False),
]

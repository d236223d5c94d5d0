"""The group, requests and tokens for the rivals: seeded, and made again for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

SEED = 20_240_607
VOCABULARY = 128_000
WAITING = 1

PAGE_SIZE = 16

Int32Array = npt.NDArray[np.int32]


def make_group(specs: ModuleType, page_size: int = PAGE_SIZE) -> Any:
    """Make a full-attention group with the spec classes of a package."""
    spec = specs.FullAttentionSpec(page_size=page_size, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    return specs.CacheGroupSpec(kv_cache_spec=spec)


def random_tokens(num_tokens: int, stream: int) -> list[int]:
    """Return the tokens of a stream as new objects, so that no rival warms the cache for the next."""
    return np.random.default_rng([SEED, stream]).integers(0, VOCABULARY, num_tokens).tolist()


def random_page_ids(num_ids: int, num_pages: int) -> list[int]:
    """Return distinct page ids without the null page."""
    return (np.random.default_rng(SEED).choice(num_pages - 1, num_ids, replace=False) + 1).tolist()


@dataclass(slots=True)
class BenchRequest:
    """The attributes of a request that the managers read, at the least cost."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    sampling_params: None = None
    status: int = WAITING
    mm_features: tuple[()] = ()
    has_vision: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append_output_token_ids(self, token_id: int) -> None:
        """Append a token, by the name that the engines' requests have for it."""
        self.all_token_ids.append(token_id)

"""Models of the studies: layers of full attention, and others with windows or chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.workload import PAGE_SIZE
from pagepool import CacheGroupSpec, ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec


@dataclass(frozen=True)
class Layout:
    """One group of full attention, and others whose windows or chunks have `size` tokens."""

    name: str
    num_local: int
    size: int
    is_chunked: bool = False

    def make_groups(self) -> list[CacheGroupSpec]:
        shape: dict[str, Any] = {
            "page_size": PAGE_SIZE,
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": "bfloat16",
            "use_mla": False,
        }
        local = (
            ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.size)
            if self.is_chunked
            else SlidingWindowSpec(**shape, sliding_window=self.size)
        )
        return [CacheGroupSpec(spec) for spec in (FullAttentionSpec(**shape), *[local] * self.num_local)]


GEMMA, GPT_OSS, CHUNKS = Layout("Gemma", 5, 1024), Layout("gpt-oss", 1, 128), Layout("chunks", 3, 8192, is_chunked=True)

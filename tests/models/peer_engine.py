"""An engine of NumPy with a host tier: each slot of a page has its token."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    PageHashing,
    PageTable,
    RunningBatch,
)
from pagepool.stores import StoreTier, make_namespace

PAGE_SIZE = 4
SPEC = FullAttentionSpec(PAGE_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)


class Engine:
    """Runs one prompt at a time. `width` is the number of cells of a slot; `model` names its weights."""

    def __init__(self, *, num_pages: int = 12, num_host_pages: int = 100, width: int = 1, model: bytes = b"weights") -> None:
        tier = HostTier(num_host_pages, policy="write_through")
        hashing = PageHashing(hash_algo="sha256")
        self.manager = CacheManager(num_pages, [CacheGroupSpec(SPEC)], max_model_len=64, host_tier=tier, hashing=hashing)
        self.batch = RunningBatch(self.manager, PageTable(2, 16, 64))
        self.device = np.zeros((num_pages, PAGE_SIZE, width), np.int64)
        self.host = np.zeros((num_host_pages, PAGE_SIZE, width), np.int64)
        self.rows = [self.host.reshape(num_host_pages, -1).view(np.uint8)]
        self.namespace = make_namespace(self.manager, layout=f"4 tokens, int64 {width}", model=model)
        self.store: StoreTier | None = None

    def ask(self, store: Any, **options: Any) -> None:
        """Put a store behind the tier."""
        self.store = StoreTier(self.manager, store, self.rows, self.namespace, **({"deadline_ms": 5000} | options))

    def move_pages(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            moves = self.batch.take_moves()
            saved = self.device[moves.saves.src]
            self.device[moves.loads.dst] = self.host[moves.loads.src]
            self.host[moves.saves.dst] = saved
            if moves.number:
                self.manager.complete(moves.number)

    def run(self, token_ids: list[int]) -> int:
        """Compute a prompt. Return the number of tokens that were cached; all tokens have to be in its pages."""
        request = EngineRequest("request", token_ids)
        if self.store is not None:
            self.store.fetch(request)
            while not self.store.is_ready(request):
                time.sleep(0.0005)
        num_cached = self.batch.admit(0, token_ids)
        assert num_cached is not None
        self.move_pages()
        (page_ids,) = self.batch.get_page_ids(0)
        for position in range(num_cached, len(token_ids)):
            self.device[page_ids[position // PAGE_SIZE], position % PAGE_SIZE] = token_ids[position]
        held = [int(self.device[page_ids[at // PAGE_SIZE], at % PAGE_SIZE, -1]) for at in range(len(token_ids))]
        assert held == token_ids, "a wrong token"
        self.batch.release([0])
        self.move_pages(4)
        return num_cached


def serve_tier(connection: Any, secret: bytes, prompts: list[list[int]], width: int) -> None:
    """Compute prompts and serve their pages, in a process of its own."""
    from pagepool.peers import TierServer

    engine = Engine(width=width)
    server = TierServer(engine.manager, engine.rows, engine.namespace, secret)
    for prompt in prompts:
        engine.run(prompt)
    connection.send(server.address)
    connection.recv()
    server.close()

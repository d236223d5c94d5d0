"""A fleet of replicas, and chats for it."""

from __future__ import annotations

import importlib.util
from random import Random
from typing import Any

import pytest

pytest.importorskip("msgspec")
from pagepool.replay import TraceRecord
from pagepool.replay.fleets.fleet import Fleet, LocalReplicas
from pagepool.replay.fleets.replica import HASH_SEED, ReplicaSettings
from pagepool.replay.fleets.router import Router

SETTINGS = ReplicaSettings(num_pages=600, max_num_seqs=8)
HAS_RAY = importlib.util.find_spec("ray") is not None


def make_records(seed: int, num_requests: int = 60, seconds: float = 5.0) -> list[TraceRecord]:
    """Return chats of a few users, each turn of which continues the previous one."""
    rng = Random(seed)
    records, histories = [], [[user] for user in range(6)]
    for i in range(num_requests):
        history = rng.choice(histories)
        history.append(1000 + i)
        input_length = 512 * len(history) - rng.randint(0, 500)
        records.append(TraceRecord(1000 * seconds * i / num_requests, input_length, rng.randint(1, 40), tuple(history)))
        if len(history) > 6:
            del history[1:]
    return records


def make_fleet(records: list[TraceRecord], router: type[Router], num_replicas: int = 3, **options: Any) -> Fleet:
    replicas = LocalReplicas(num_replicas, SETTINGS, records)
    return Fleet(replicas, router(num_replicas, SETTINGS.page_size, HASH_SEED), **options)

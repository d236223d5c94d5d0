"""The example engine that shares pages through a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_workload import WEIGHTS, answer_by_engine, answer_densely, check_rest, make_asks, make_engine

sharing = pytest.importorskip("sharing")


def make_sharing(folder: Path, **options: Any) -> Any:
    return make_engine(WEIGHTS, sharing.SharingEngine, folder, **options)


def check_sharing(engine: Any, num_asks: int = 9) -> list[int]:
    """Run requests, compare their answers, and return the tokens that each hit, in the pool or in files."""
    asks = make_asks(num_asks)
    requests, _ = answer_by_engine(engine, asks)
    assert [request.output for request in requests] == [answer_densely(*ask) for ask in asks]
    assert not engine.manager.leases
    assert not engine.scheduler.batch.num_external_tokens.any()
    check_rest(engine)
    return [request.num_cached_tokens for request in requests]

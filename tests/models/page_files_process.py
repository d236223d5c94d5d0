"""The example engine that shares pages through a folder. As a program, with the folder, and the least number of tokens that its
requests hit there, beside those that they hit in the pool: one of several processes with that folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from engine_workload import WEIGHTS, check_outputs, make_asks, make_engine

sharing = pytest.importorskip("sharing")


def make_sharing(folder: Path, **options: Any) -> Any:
    return make_engine(WEIGHTS, sharing.SharingEngine, folder, **options)


def check_sharing(engine: Any, num_asks: int = 9) -> list[int]:
    """Run requests, compare their answers, and return the tokens that each hit, in the pool or in files."""
    requests, _ = check_outputs(engine, make_asks(num_asks))
    assert not engine.manager.leases
    assert not engine.scheduler.batch.num_external_tokens.any()
    return [request.num_cached_tokens for request in requests]


if __name__ == "__main__":
    folder, least = sys.argv[1:]
    with jax.default_matmul_precision("highest"):
        engine = make_sharing(Path(folder), num_devices=len(jax.devices()))
        num_cached = check_sharing(engine)
    num_found = engine.files.num_loaded * engine.files.page_size
    print(f"{num_cached} tokens were cached, {num_found} came from files")
    assert num_found >= int(least)

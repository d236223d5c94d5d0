"""Program: the example engine on a store, with both models. Arguments: the folder, and what it does at its end: ``"wait"`` lets
it write the file ``saved`` once all its pages are in the store, and wait for its end; ``"close"`` closes the engines.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
from engine_workload import HYBRID_WEIGHTS, WEIGHTS, check_outputs, make_asks, make_engine

NUM_ASKS = 9


def make_stored(folder: Path, weights: Any = WEIGHTS, **options: Any) -> Any:
    """Make an engine whose host has all pages of the requests."""
    return make_engine(weights, store=folder, **{"num_host_pages": 400, **options})


def wait_until_saved(engine: Any) -> None:
    while engine.manager.stats().store.num_queued_pages:
        engine.store.poll()
        time.sleep(0.001)


def main(folder: str, end: str) -> None:
    engines = []
    for weights in (WEIGHTS, HYBRID_WEIGHTS):
        engines.append(make_stored(Path(folder), weights))
        check_outputs(engines[-1], make_asks(NUM_ASKS), weights)
        wait_until_saved(engines[-1])
        print(engines[-1].manager.stats().store)
    if end == "wait":
        (Path(folder) / "saved").touch()
        time.sleep(600)
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main(*sys.argv[1:])

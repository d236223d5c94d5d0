"""A process of an engine for prompts, or for answers, that tests kill: ``apart_process.py prefill`` or ``decode ADDRESS``."""

from __future__ import annotations

import itertools
import sys
from random import Random
from typing import Any

from apart import NAMESPACE, SECRET, PromptRows, Side
from hybrids import FULL, WINDOW, keep_every

from pagepool.peers import PrefillClient, PrefillServer, RowsLink

SPECS: list[Any] = [FULL, WINDOW, keep_every(8)]
SECONDS = 0.5


def draw_prompt(rng: Random) -> list[int]:
    """Return a prompt; many begin alike."""
    return [7] * rng.choice((0, 20, 40)) + [rng.randrange(99) for _ in range(rng.randint(10, 60))]


def compute_prompts() -> None:
    """Compute prompts for others, until the process is killed."""
    side, link = Side(SPECS, hash_seed=1), RowsLink(SECRET, NAMESPACE)
    server = PrefillServer(side.manager, link, NAMESPACE, SECRET, lease_seconds=SECONDS)
    print(server.address, flush=True)
    rows = PromptRows(side, server, 8)
    while True:
        rows.step()


def ask_for_prompts(address: str) -> None:
    """Ask for prompts and pull them, until the process is killed."""
    side, link, rng = Side(SPECS, hash_seed=1), RowsLink(SECRET, NAMESPACE), Random(1)
    client = PrefillClient(side.manager, link, NAMESPACE, SECRET, side.make_parts, seconds=SECONDS)
    for name in itertools.count():
        client.ask(name, address, draw_prompt(rng), 0)
        is_last = False
        while not is_last:
            for arrival in client.poll():
                is_last |= arrival.is_last
        print(name, flush=True)


if __name__ == "__main__":
    compute_prompts() if sys.argv[1] == "prefill" else ask_for_prompts(sys.argv[2])

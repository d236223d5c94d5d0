"""Engines that are killed while pages cross: no wrong token, and nothing stays held."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from settings import NUM_OPERATIONS

for module in ("zmq", "msgspec", "xxhash"):
    pytest.importorskip(module)

from apart import NAMESPACE, SECRET, PromptRows, Side  # noqa: E402
from apart_process import SECONDS, SPECS, draw_prompt  # noqa: E402

from pagepool import Retention  # noqa: E402
from pagepool.peers import PrefillClient, PrefillServer, RowsLink  # noqa: E402

PROGRAM = str(Path(__file__).parents[1] / "models" / "apart_process.py")
NUM_KILLS = max(2, NUM_OPERATIONS // 400 if NUM_OPERATIONS > 20_000 else 2)
"""Of each side: 500 in ``make test-all``."""


@contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is killed at the end."""
    command, env = [sys.executable, PROGRAM, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_engine_for_prompts_is_killed() -> None:
    rng, side, link = Random(1), Side(SPECS, hash_seed=1), RowsLink(SECRET, NAMESPACE, pull_seconds=SECONDS)
    client = PrefillClient(side.manager, link, NAMESPACE, SECRET, side.make_parts, seconds=SECONDS)
    batch, num_failed, num_whole = side.batch, 0, 0
    for kill in range(NUM_KILLS):
        with start("prefill") as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            kill_at = time.monotonic() + rng.uniform(0, 0.05)
            while True:
                token_ids = draw_prompt(rng)
                end, num_hits = client.find_end(len(token_ids)), batch.probe(0, token_ids)
                assert batch.admit(0, token_ids, num_external_tokens=max(0, end - num_hits)) == num_hits
                writes, is_last = side.move(), end <= num_hits
                if not is_last:
                    client.ask(0, address, token_ids[:end], num_hits)
                while not is_last:
                    if time.monotonic() >= kill_at:
                        process.kill()
                    for arrival in client.poll():
                        is_last = arrival.is_last
                        if arrival.error is not None:
                            num_failed += 1
                            batch.fail_external(0, arrival.num_tokens)
                            continue
                        num_whole += is_last
                        side.scatter(0, arrival.places, arrival.parts, writes)
                        batch.commit_external(0, arrival.num_tokens, is_last=is_last)
                while batch.num_computed_tokens[0] < len(token_ids):
                    side.run_to(0, token_ids, 16)
                side.require_right(0, token_ids, len(token_ids))
                batch.release([0])
                if process.poll() is not None:
                    break
        assert side.manager.stats().num_held_pages == 0, kill
    side.manager.check()
    print(num_failed, "prompts failed,", num_whole, "arrived")
    assert num_failed > 0
    client.close()
    link.close()


def test_an_engine_for_answers_is_killed() -> None:
    """Its pages are leased until it is missed."""
    rng, side, link = (
        Random(2),
        Side(SPECS, hash_seed=1, retention=Retention(max_leased_share=1.0)),
        RowsLink(SECRET, NAMESPACE),
    )
    server = PrefillServer(side.manager, link, NAMESPACE, SECRET, lease_seconds=SECONDS)
    rows = PromptRows(side, server, 8, seconds=2 * SECONDS)
    for kill in range(NUM_KILLS):
        with start("decode", server.address) as process:
            while not rows.running:
                rows.step()
            kill_at = time.monotonic() + rng.uniform(0, 0.05)
            while time.monotonic() < kill_at:
                rows.step()
            process.kill()
        end_at = time.monotonic() + 20
        while side.manager.stats().num_held_pages or side.manager.leases:
            rows.step()
            assert time.monotonic() < end_at, kill
    side.manager.check()
    server.close()
    link.close()

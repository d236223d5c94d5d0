"""Links for tests, and processes that offer rows."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagepool.peers import Link, Pulled, RowsLink
from pagepool.stores import Store

SECRET = b"a secret of 32 bytes for tests  "
NAMESPACE = "model/v1"
SECONDS = 30.0


def make_rows(**options: Any) -> RowsLink:
    return RowsLink(SECRET, NAMESPACE, **options)


def wait_for(link: Link | Store, *jobs: int) -> list[Any]:
    """Return the answers of these jobs, which are the only ones under way."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + SECONDS
    while len(answers) < len(jobs):
        assert time.monotonic() < deadline, f"no answer of {set(jobs) - set(answers)}"
        for each in link.poll():
            assert each.job in jobs
            assert each.job not in answers
            answers[each.job] = each
        time.sleep(0.0005)
    return [answers[job] for job in jobs]


def pull(link: Link, address: str, number: int, sizes: list[int]) -> tuple[Pulled, list[Any]]:
    parts = [np.zeros(size, np.uint8) for size in sizes]
    (pulled,) = wait_for(link, link.pull(address, number, parts))
    return pulled, parts


def content(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def offer_rows(connection: Any, sizes: list[int]) -> None:
    """Offer parts of these sizes under number 1 until the other side says something, or this process is killed."""
    link = make_rows()
    link.offer(1, [content(i, size) for i, size in enumerate(sizes)], seconds=60)
    connection.send(link.address)
    connection.recv()
    link.close()


def offer_arrays(connection: Any, size: int) -> None:
    """Offer an array of jax as `offer_rows` does."""
    import jax.numpy as jnp

    from pagepool.peers import JaxLink

    link = JaxLink(SECRET, NAMESPACE)
    link.offer(1, [jnp.zeros(size)], seconds=60)
    connection.send(link.address)
    connection.recv()
    link.close()


@contextmanager
def peer_process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any, str]]:
    """Run a function in another process. Yield the process, the connection to it, and its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends our reads
    try:
        yield process, ours, ours.recv()
    finally:
        process.kill()
        process.join()

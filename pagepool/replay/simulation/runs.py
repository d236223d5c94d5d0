"""Setup of simulated runs for the commands."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import click

from pagepool.errors import PagePoolError, count_of
from pagepool.manager import CacheManager
from pagepool.page_hashing import PageHashing
from pagepool.page_pool.pool import EvictionPolicy
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.models.pools import ModelPools
from pagepool.replay.shared.memory import count_pool_bytes, count_tier_bytes
from pagepool.replay.shared.options import Refusal
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.simulation.allocator import HASH_SEED
from pagepool.replay.simulation.backlog import Order
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.host import HostMemory
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.simulation.sessions import Told
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.retention import Retention, WindowRule


def describe_pool(num_pages: int, model: ModelPages, eviction: str = "lru", host: HostMemory | None = None) -> str:
    """Describe the size of a pool, its eviction policy unless it is LRU, and the host memory behind it.

    >>> describe_pool(1000, ModelPages(1)), describe_pool(1, ModelPages(16), "adaptive")
    ('1,000 pages of 1 token', '1 page of 16 tokens, adaptive eviction')
    """
    policy = "" if eviction == "lru" else f", {eviction} eviction"
    return f"{count_of(num_pages, 'page')} of {model.contents}{policy}{'' if host is None else f', {host}'}"


def count_bytes(num_pages: int, eviction: str = "lru", host: HostMemory | None = None) -> int:
    """Return the bytes of a pool, and of the host tier behind it, with all pages cached."""
    return count_pool_bytes(num_pages, eviction) + (0 if host is None else count_tier_bytes(host.num_pages, num_pages))


def require_one_that_fits(requests: Sequence[SimulatedRequest], num_pages: int, model: ModelPages) -> None:
    """Exit with code 1 and a message if no request fits the pool."""
    smallest = 1 + min(model.count_pages(request.num_slots) for request in requests)
    if num_pages < smallest:
        raise click.ClickException(
            f"no request can run in {describe_pool(num_pages, model)}: "
            f"the smallest of {count_of(len(requests), 'request')} needs {count_of(smallest, 'page')}, including the null page"
        )


def make_scheduler(
    manager: CacheManager,
    requests: Sequence[SimulatedRequest],
    *,
    max_batched_tokens: int,
    max_num_seqs: int,
    batched: bool = True,
    told: Told = "nothing",
    order: Order = "arrival",
) -> Scheduler:
    """Make a scheduler with copies of the requests, since it modifies them. Raise Refusal for a wrong size, or MemoryError."""
    copies = [replace(request) for request in requests]
    num_rows, length = min(max_num_seqs, len(requests)), count_of(manager.max_model_len, "token")
    try:
        return Scheduler(
            manager,
            copies,
            max_num_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
            batched=batched,
            told=told,
            order=order,
        )
    except PagePoolError as error:
        raise Refusal(f"no batch of {count_of(num_rows, 'request')} of up to {length}: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"a batch of {count_of(num_rows, 'request')} of up to {length}: {error}") from error


def make_manager(
    num_pages: int,
    model: ModelPages,
    requests: Sequence[SimulatedRequest],
    interval: int | None = None,
    eviction: str | None = "lru",
    host: HostMemory | None = None,
    windows: WindowRule = "ends",
) -> CacheManager:
    """Make a manager for the longest of the requests, with checkpoints of states after each `interval` tokens, with a tier in
    host memory, and with a rule for pages of windows. Its hashes are the same in every run. `eviction` None disables prefix
    caching.
    """
    max_model_len = max((request.num_final_tokens for request in requests), default=1)
    with making_pool(num_pages, model, eviction or "lru", host):
        return CacheManager(
            num_pages,
            model.make_groups(interval),
            max_model_len,
            enable_caching=eviction is not None,
            hashing=PageHashing(hash_seed=HASH_SEED),
            eviction=cast("EvictionPolicy", eviction or "lru"),
            host_tier=None if host is None else host.make_tier(),
            retention=Retention(windows=windows),
        )


def make_manager_of_pools(
    num_pages: Mapping[str, int], pools: ModelPools, requests: Sequence[SimulatedRequest]
) -> CacheManager:
    """Make a manager of several pools for the longest of the requests, with LRU in each, and states where requests resume.
    Raise Refusal if pools of these sizes are impossible.
    """
    max_model_len = max((request.num_final_tokens for request in requests), default=1)
    try:
        return CacheManager(num_pages, pools.make_groups(), max_model_len, hashing=PageHashing(hash_seed=HASH_SEED))
    except (PagePoolError, OverflowError) as error:
        raise Refusal(f"no pools of {', '.join(f'{size:,} {name}' for name, size in num_pages.items())}: {error}") from error


@contextmanager
def making_pool(num_pages: int, model: ModelPages, eviction: str = "lru", host: HostMemory | None = None) -> Iterator[None]:
    """Raise Refusal if a pool of this size is impossible, and name the pool in a MemoryError."""
    pool = describe_pool(num_pages, model, host=host)
    try:
        yield
    except (PagePoolError, OverflowError) as error:
        raise Refusal(f"no pool of {pool}: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"a pool of {pool} takes {format_bytes(count_bytes(num_pages, eviction, host))}: {error}") from error


def run(scheduler: Scheduler, description: str, progress: Progress, page_bytes: int | None = None) -> Figures:
    """Run to the end, and show progress. Count a host tier's traffic in bytes too, if a page's bytes are known."""
    with progress.follow(description, "request", len(scheduler.waiting)) as update:
        figures = scheduler.run(lambda figures: update(figures.requests))
    if figures.host is not None:
        figures.host = replace(figures.host, page_bytes=page_bytes)
    return figures

"""Setup of simulated runs for the commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import click

from pagepool.errors import PagePoolError, count_of
from pagepool.manager import CacheManager
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.shared.memory import count_pool_bytes
from pagepool.replay.shared.options import Refusal
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.simulation.allocator import HASH_SEED
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.traces.simulated_request import SimulatedRequest

__all__ = ["describe_pool", "make_manager", "make_scheduler", "making_pool", "require_one_that_fits", "run"]


def describe_pool(num_pages: int, model: ModelPages, eviction: str = "lru") -> str:
    """Describe the size of a pool, and its eviction policy unless that is LRU.

    >>> describe_pool(1000, ModelPages(1)), describe_pool(1, ModelPages(16), "arc")
    ('1,000 pages of 1 token', '1 page of 16 tokens, arc eviction')
    """
    policy = "" if eviction == "lru" else f", {eviction} eviction"
    return f"{count_of(num_pages, 'page')} of {model.contents}{policy}"


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
) -> Scheduler:
    """Make a scheduler with copies of the requests, which it modifies. Raises Refusal for an invalid size, and MemoryError."""
    copies = [replace(request) for request in requests]
    num_rows, length = min(max_num_seqs, len(requests)), count_of(manager.max_model_len, "token")
    try:
        return Scheduler(manager, copies, max_num_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs, batched=batched)
    except PagePoolError as error:
        raise Refusal(f"no batch of {count_of(num_rows, 'request')} of up to {length}: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"a batch of {count_of(num_rows, 'request')} of up to {length}: {error}") from error


def make_manager(
    num_pages: int,
    model: ModelPages,
    requests: Sequence[SimulatedRequest],
    interval: int | None = None,
    enable_caching: bool = True,
    eviction: str = "lru",
) -> CacheManager:
    """Make a manager for the longest of the requests, with checkpoints of states after each `interval` tokens. Its hashes are
    the same in every run.
    """
    max_model_len = max((request.num_final_tokens for request in requests), default=1)
    with making_pool(num_pages, model, eviction):
        return CacheManager(
            num_pages,
            model.make_groups(interval),
            max_model_len,
            enable_caching,
            hash_seed=HASH_SEED,
            eviction=eviction,
        )


@contextmanager
def making_pool(num_pages: int, model: ModelPages, eviction: str = "lru") -> Iterator[None]:
    """Raise Refusal if a pool of that size cannot be, and name it in a MemoryError."""
    pool = describe_pool(num_pages, model)
    try:
        yield
    except (PagePoolError, OverflowError) as error:
        raise Refusal(f"no pool of {pool}: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"a pool of {pool} takes {format_bytes(count_pool_bytes(num_pages, eviction))}: {error}") from error


def run(scheduler: Scheduler, description: str, progress: Progress) -> Figures:
    """Run to the end, and show progress."""
    with progress.follow(description, "request", len(scheduler.waiting)) as update:
        return scheduler.run(lambda figures: update(figures.requests))

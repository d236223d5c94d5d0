"""Simulated runs as the commands start them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pagepool.errors import PagePoolError
from pagepool.manager import CacheManager
from pagepool.replay.allocator import make_groups
from pagepool.replay.figures import Figures
from pagepool.replay.options import Refusal
from pagepool.replay.scheduler import Scheduler
from pagepool.replay.simulated_request import SimulatedRequest

__all__ = ["make_scheduler", "run"]


def make_scheduler(
    requests: Sequence[SimulatedRequest],
    *,
    num_pages: int,
    page_size: int,
    max_batched_tokens: int,
    max_num_seqs: int,
    enable_caching: bool = True,
    batched: bool = True,
) -> Scheduler:
    """A scheduler of its own copies of the requests, which it changes as they run, with a manager that takes the longest of
    them. Refusal where one cannot be made.
    """
    manager = make_manager(num_pages, page_size, requests, enable_caching)
    copies = [replace(request) for request in requests]
    try:
        return Scheduler(manager, copies, max_num_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs, batched=batched)
    except (PagePoolError, MemoryError) as error:
        raise Refusal(f"no batch of {max_num_seqs} requests: {error or 'out of memory'}") from error


def make_manager(num_pages: int, page_size: int, requests: Sequence[SimulatedRequest], enable_caching: bool) -> CacheManager:
    """A manager that takes the longest of the requests."""
    max_model_len = max((request.num_final_tokens for request in requests), default=1)
    try:
        return CacheManager(num_pages, make_groups(page_size), max_model_len, enable_caching=enable_caching)
    except (PagePoolError, OverflowError, MemoryError) as error:
        raise Refusal(f"no pool of {num_pages} pages of {page_size} tokens: {error or 'out of memory'}") from error


def run(scheduler: Scheduler, update: Callable[[int], None]) -> Figures:
    """Run to the end; `update` is told how many requests have ended."""
    return scheduler.run(lambda figures: update(figures.requests))

"""Memory estimates and checks. Linux overcommits memory, and kills a process that exceeds it without a message."""

import os
import re
import resource
import sys
from pathlib import Path
from traceback import clear_frames
from typing import NamedTuple

import click

from pagepool.replay.shared.sizes import format_bytes

PAGE_BYTES = 64  # bytes of a cached page
POLICY_BYTES = {"lru": 0, "adaptive": 10}  # bytes of an eviction policy per page, including its memory of evicted pages
TIER_BYTES = 13  # bytes of a tier per page of the pool
DIGEST_BYTES = 16  # bytes of a page's hash
EVENT_BYTES = 64  # bytes of a page's events, without its tokens
TOKEN_BYTES = 4
REQUEST_BYTES, HASH_ID_BYTES = 1_000, 48  # bytes of a simulated request
MAX_NUM_PAGES = 1 << 30  # limit of PagePool
MIN_LEFT_BYTES = 64 << 20
SYSTEM = Path("/proc/meminfo")
PROCESS = Path("/proc/self/status")


class Container(NamedTuple):
    """Files of a Linux control group; `field` in `use` counts unreclaimable memory."""

    limit: Path
    use: Path
    field: str


CONTAINERS = (
    Container(Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat"), "anon"),
    Container(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.stat"), "total_rss"),
)


def count_available_bytes() -> int:
    """Return the number of bytes this process can still allocate, within the machine and its container. If the system does not
    report it, return the machine's total memory.
    """
    system = _read_field(SYSTEM, "MemAvailable:"), _read_field(SYSTEM, "SwapFree:")
    if system[0] is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        available = 1024 * (system[0] + (system[1] or 0))
    for container in CONTAINERS:
        limit, use = _read_field(container.limit), _read_field(container.use, container.field)
        if limit is not None and use is not None:
            available = min(available, max(0, limit - use))
    return available


def _read_field(path: Path, name: str = "") -> int | None:
    """Read the number that follows `name` at the start of a line; None if the file or the number is missing."""
    try:
        match = re.search(rf"^{re.escape(name)}\s*(\d+)\b", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


def count_pool_bytes(num_pages: int, eviction: str = "lru", other_bytes: int = 0) -> int:
    """Return the bytes of a pool with all pages cached, plus `other_bytes` per page; 0 for more pages than a pool accepts."""
    page_bytes = PAGE_BYTES + POLICY_BYTES[eviction] + other_bytes
    return num_pages * page_bytes if num_pages <= MAX_NUM_PAGES else 0


def count_tier_bytes(num_pages: int, num_pool_pages: int) -> int:
    """Return the bytes of a host tier of `num_pages`, all cached, behind a pool of `num_pool_pages`."""
    return count_pool_bytes(num_pages) + count_pool_bytes(num_pool_pages, other_bytes=TIER_BYTES - PAGE_BYTES)


def count_event_pool_bytes(num_pages: int, page_size: int, eviction: str = "lru") -> int:
    """Return the bytes of a pool with events and all pages cached."""
    return count_pool_bytes(num_pages, eviction, EVENT_BYTES + TOKEN_BYTES * page_size)


def count_digest_bytes(num_pages: int) -> int:
    """Return the bytes of the hashes of pages."""
    return num_pages * DIGEST_BYTES


def count_request_bytes(num_requests: int, num_hash_ids: int = 0) -> int:
    """Return the bytes of simulated requests."""
    return num_requests * REQUEST_BYTES + num_hash_ids * HASH_ID_BYTES


def require_memory(what: str, num_bytes: int) -> None:
    """Exit with code 1 and a message if `what` needs more bytes than are available."""
    available = count_available_bytes()
    if num_bytes > available:
        raise click.ClickException(
            f"out of memory: {what} would take {format_bytes(num_bytes)}, {format_bytes(available)} are available"
        )


def require_memory_left() -> None:
    """Raise MemoryError when memory is nearly exhausted, before the kernel kills the process."""
    available = count_available_bytes()
    if available < MIN_LEFT_BYTES:
        raise MemoryError(f"{describe_use()}, {format_bytes(available)} are left")


def describe_use() -> str:
    """Return the peak memory of this process as text."""
    num_kib = _read_field(PROCESS, "VmHWM:")
    if num_kib is None:
        num_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    return f"{format_bytes(num_kib * 1024)} are in use"


def explain(error: MemoryError) -> str:
    """Return the reason as text. First free the locals of the failed calls, so that there is memory to report the error."""
    raised: BaseException | None = error
    while raised is not None:
        clear_frames(raised.__traceback__)
        raised = raised.__context__
    return str(error) or describe_use()

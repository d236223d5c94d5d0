"""Arithmetic of pages: pages for tokens, pages of a pool, and its data-parallel shards."""

from pagepool.arguments import require_int

__all__ = [
    "cdiv",
    "dp_shard_for_page_id",
    "dp_shard_page_bounds",
    "find_shard",
    "find_shard_bounds",
    "pages_per_dp_shard",
    "usable_pages_count",
]


def cdiv(a: int, b: int) -> int:
    """Return the quotient rounded up: the number of pages of `b` tokens for `a` tokens.

    ArgumentError unless `b` is positive, ArgumentTypeError unless both are integers.

    >>> cdiv(16, 16), cdiv(17, 16), cdiv(0, 16)
    (1, 2, 0)
    """
    return -(-require_int("a", a) // require_int("b", b, 1))


def usable_pages_count(num_pages: int) -> int:
    """Return the number of pages without the null page.

    >>> usable_pages_count(1024)
    1023
    """
    return max(0, require_int("num_pages", num_pages) - 1)


def pages_per_dp_shard(num_pages: int, data_parallel_size: int | None) -> int | None:
    """Return the pages of one data-parallel shard; None for one shard, or if `num_pages` does not divide evenly.

    >>> pages_per_dp_shard(1024, 4), pages_per_dp_shard(1023, 4), pages_per_dp_shard(1024, 1)
    (256, None, None)
    """
    num_pages = require_int("num_pages", num_pages)
    num_shards = 1 if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size)
    if num_shards <= 1 or num_pages <= 0 or num_pages % num_shards:
        return None
    return num_pages // num_shards


def dp_shard_for_page_id(page_id: int, pages_per_shard: int, dp_size: int) -> int | None:
    """Return the shard of a page; None for the null page, and for sizes that are not positive.

    >>> dp_shard_for_page_id(256, 256, 4), dp_shard_for_page_id(0, 256, 4)
    (1, None)
    """
    page_id, dp_size = require_int("page_id", page_id), require_int("dp_size", dp_size)
    pages_per_shard = require_int("pages_per_shard", pages_per_shard)
    if page_id <= 0 or pages_per_shard <= 0 or dp_size <= 0:
        return None
    return min(page_id // pages_per_shard, dp_size - 1)


def dp_shard_page_bounds(shard_index: int, pages_per_shard: int) -> tuple[int, int]:
    """Return the half-open range of page ids of a shard. The first shard starts after the null page.

    >>> dp_shard_page_bounds(0, 256), dp_shard_page_bounds(1, 256)
    ((1, 256), (256, 512))
    """
    pages_per_shard = require_int("pages_per_shard", pages_per_shard)
    start = max(0, require_int("shard_index", shard_index)) * pages_per_shard
    return max(1, start), start + pages_per_shard


def find_shard(num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int] | None:
    """Return the hinted shard of a pool, modulo the size, and that size; None if the pool is not divided.

    >>> find_shard(1024, 5, 4), find_shard(1023, 5, 4)
    ((1, 4), None)
    """
    pages_per_shard = pages_per_dp_shard(num_pages, data_parallel_size)
    hint = None if dp_shard_hint is None else require_int("dp_shard_hint", dp_shard_hint)
    if hint is None or pages_per_shard is None:
        return None
    num_shards = num_pages // pages_per_shard
    return hint % num_shards, num_shards


def find_shard_bounds(num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int | None]:
    """Return the half-open range of page ids that may hit with a hint; None: up to the last."""
    shard = find_shard(num_pages, dp_shard_hint, data_parallel_size)
    if shard is None:
        return 0, None
    shard_index, num_shards = shard
    return dp_shard_page_bounds(shard_index, num_pages // num_shards)

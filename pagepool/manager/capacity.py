"""Warns of requests that no pool of this size can hold."""

import logging
from collections.abc import Sequence

from pagepool._core import PageIds

__all__ = ["warn_if_hopeless"]

logger = logging.getLogger(__package__)


def warn_if_hopeless(num_usable_pages: int, held: Sequence[PageIds], num_new_pages: int) -> None:
    """Log a warning if a request needs more pages at once than the pool has."""
    if sum(map(len, held)) + num_new_pages <= num_usable_pages:  # the common case; null pages need not be counted apart
        return
    num_needed_pages = num_new_pages + sum([page_id != 0 for ids in held for page_id in ids.to_list()])
    if num_needed_pages > num_usable_pages:
        logger.warning(
            "a request needs %d pages at once, the pool has %d: no waiting helps, see CacheManager.require_capacity",
            num_needed_pages,
            num_usable_pages,
        )

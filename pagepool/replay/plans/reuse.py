"""Which earlier request a request's pages were last used by: all that hits depend on, whatever the size of the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagepool.replay.traces.reader import TraceRecord
from pagepool.specs import cdiv

__all__ = ["Int64Array", "Reuse", "find_reuse"]

Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The pages of requests that run one after another, and which of them may hit.

    `request_pages[i]` pages of the pool are held while request `i` runs, all of its tokens computed. Each reuse is a run of
    `num_pages` consecutive pages of a prompt, from `first_page` on, that request `user` may hit because `source`, an earlier
    one, was the last to hold them. Reuses are in order of `user`, then of `first_page`; those of a prompt are its beginning,
    without a gap. All arrays are int64: `[num_requests]`, and `[num_reuses]`.
    """

    request_pages: Int64Array
    user: Int64Array
    source: Int64Array
    first_page: Int64Array
    num_pages: Int64Array

    @property
    def num_hit_pages(self) -> int:
        """Pages that hit in a pool that never evicts."""
        return int(self.num_pages.sum())


class PrefixTree:
    """The blocks of all requests so far, each behind its prefix, and who used the pages that end in them last.

    A node is a number; 0 is the root. Most often one request used all pages of a node last; one that ended within a block used
    the first of them, so `_users` has for each node pairs of the page where a request's use ends and the request, in order.
    """

    def __init__(self, block_size: int, page_size: int) -> None:
        """Both in tokens."""
        self._block_size = block_size
        self._page_size = page_size
        self._children: dict[tuple[int, int], int] = {}
        self._users: list[tuple[tuple[int, int], ...]] = [()]

    def use(self, user: int, block_ids: Sequence[int], num_pages: int) -> list[tuple[int, int]]:
        """Let a request use its first `num_pages` pages. Returns who used them last, as pairs of the page where a use ends and
        the request, from the first page on as far as there is one. O(blocks).
        """
        uses: list[tuple[int, int]] = []
        node = first_page = 0
        for i, block_id in enumerate(block_ids, start=1):
            if first_page >= num_pages:
                break
            stop = min(i * self._block_size // self._page_size, num_pages)
            node = self._children.setdefault((node, block_id), len(self._users))
            if node == len(self._users):
                self._users.append(())
            users = self._users[node]
            for use_stop, source in users:
                if first_page < stop:
                    first_page = min(use_stop, stop)
                    if uses and uses[-1][1] == source:
                        uses.pop()
                    uses.append((first_page, source))
            has_longer = users and users[-1][0] > stop
            self._users[node] = ((stop, user), *[use for use in users if use[0] > stop]) if has_longer else ((stop, user),)
            first_page = stop
        return uses


def find_reuse(records: Sequence[TraceRecord], page_size: int, on_request: Callable[[int], object] | None = None) -> Reuse:
    """The reuse among the requests of a trace, in order, with pages of `page_size` tokens. `on_request` is told how many were
    looked at.

    Only full pages hit, only as far as one token of the prompt is left to compute, and only behind pages that hit; the pages of
    answers are there to be hit too, where the trace knows them. Cost: about 3 us and 400 bytes a block.

    >>> chat = [TraceRecord(0, 1024, 1, (7, 8)), TraceRecord(1, 1536, 1, (7, 8, 9)), TraceRecord(2, 1536, 1, (7, 5, 6))]
    >>> reuse = find_reuse(chat, page_size=16)
    >>> reuse.user.tolist(), reuse.source.tolist(), reuse.num_pages.tolist()
    ([1, 2], [0, 1], [64, 32])
    """
    request_pages, reuses = [], []
    tree = PrefixTree(records[0].block_size if records else 1, page_size)
    for user, record in enumerate(records):
        request_pages.append(cdiv(record.num_slots, page_size))
        max_hit_pages = (record.input_length - 1) // page_size
        first_page = 0
        for use_stop, source in tree.use(user, record.block_ids, min(record.num_slots, record.num_known_tokens) // page_size):
            stop = min(use_stop, max_hit_pages)
            if stop > first_page:
                reuses.append((user, source, first_page, stop - first_page))
                first_page = stop
        if on_request is not None:
            on_request(user + 1)
    columns = np.array(reuses, dtype=np.int64).reshape(-1, 4).T
    return Reuse(np.array(request_pages, dtype=np.int64), *columns)

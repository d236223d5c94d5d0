"""Reuse of pages between requests: it determines the hits of pools of any size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagepool.replay.traces.records import TraceRecord
from pagepool.specs import cdiv

Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The pages of requests run one after another, and the pages that may hit.

    Request `i` holds `request_pages[i]` pages when it ends. Each reuse is a run of `num_pages` consecutive pages of a prompt,
    starting at `first_page`: request `user` may hit them, and the earlier request `source` held them last. Reuses are sorted by
    `user`, then `first_page`; the reuses of one prompt cover its beginning without a gap. All arrays are int64,
    `[num_requests]` or `[num_reuses]`.
    """

    request_pages: Int64Array
    user: Int64Array
    source: Int64Array
    first_page: Int64Array
    num_pages: Int64Array

    @property
    def num_hit_pages(self) -> int:
        """Number of page hits in a pool that never evicts."""
        return int(self.num_pages.sum())


class PrefixTree:
    """A trie of the blocks of all requests so far, with the last user of the pages that end in each block.

    Nodes are numbers; 0 is the root. Usually one request was the last user of all pages of a node. A request that ended within
    the block used only its first pages, so `_users` has a list of pairs (end of use, request) for each node, in order.
    """

    def __init__(self, block_size: int, page_size: int) -> None:
        """Start with an empty trie; sizes are in tokens."""
        self._block_size = block_size
        self._page_size = page_size
        self._children: dict[tuple[int, int | str], int] = {}
        self._users: list[tuple[tuple[int, int], ...]] = [()]

    def use(self, user: int, block_ids: Sequence[int | str], num_pages: int) -> list[tuple[int, int]]:
        """Record that a request uses its first `num_pages` pages. Return their previous users, as pairs (end of use, request)
        from the first page on. O(blocks).
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
    """Find the reuse among requests in order, with pages of `page_size` tokens. `on_request` gets the number of requests done.

    A page hits only if it is full, if all pages before it hit, and if a token of the prompt remains to be computed. Pages of
    answers can be hit if the trace has their ids. O(blocks), in time and memory.

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

"""Pages that are copied: states kept as checkpoints, and requests that go on twice."""

from typing import TYPE_CHECKING

from pagepool._core import PageCopies, check_copies_taken, fork_request, take_copies
from pagepool.arguments import id_of, read_count
from pagepool.errors import ArgumentError, shown
from pagepool.manager.cache_pages import CachePages
from pagepool.manager.retention import PrefixRetention

if TYPE_CHECKING:
    from pagepool._core import RequestPages
    from pagepool.request import Request

__all__ = ["CopiedPages"]


class CopiedPages(PrefixRetention):
    """The copies of `CacheManager`, which inherits and sets up everything here."""

    max_model_len: int

    def take_copies(self) -> PageCopies:
        """Return the copies of pages that are due, also those of running batches, and forget them: the caller does them before
        the step that reads their destinations. Empty if none is due; nothing is allocated then.

        Copies are noted where a state becomes a checkpoint, where one is hit, and by `fork`. Until they are taken their sources
        are held, and `allocate_slots` raises CopiesDueError for a request whose pages they read or write. A request that is
        freed drops the copies into its pages. See `pagepool.page_copies.copy_pages`. O(copies).

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> first, second = EngineRequest("first", [1, 2, 3, 4, 5, 6]), EngineRequest("second", [1, 2, 3, 4, 5, 6])
        >>> _ = manager.allocate_slots(first, 6)
        >>> first.num_computed_tokens = second.num_computed_tokens = 6
        >>> manager.fork(first, second).get_page_ids()
        ([1, 3],)
        >>> manager.take_copies()
        PageCopies(src=[2], dst=[3], group=[0])
        """
        return take_copies(self._store)

    @property
    def checkpoint_interval(self) -> int | None:
        """The tokens between checkpoints: the least common multiple of the page sizes and the intervals of all states, since
        only there every group can hit. None for a model without states of which checkpoints are kept.
        """
        return self.coordinator.checkpoint_interval

    def find_next_checkpoint(self, request: "Request") -> int:
        """Return the least number of tokens, above the computed ones, at which states are kept. A chunk that ends there
        leaves a checkpoint, one that goes past it does not. At most ``max_model_len``, and that without checkpoints.
        """
        num_computed_tokens = read_count(request, "num_computed_tokens")
        interval = self.checkpoint_interval or self.max_model_len
        return min(num_computed_tokens - num_computed_tokens % interval + interval, self.max_model_len)

    def fork(self, request: "Request", new_request: "Request") -> CachePages | None:
        """Let a new request go on from the computed tokens of another one, after the step that computed them: for parallel
        samples and beams. It shares the full pages, and gets copies of the open page of each group, and of states.

        Returns all pages of the new request; None, and nothing changed, if too few pages are free. ArgumentError if `request`
        holds no pages, or `new_request` holds some, if their ``num_computed_tokens`` differ, if these tokens or the extra keys
        do, and if `request` went back to fewer tokens than a window has left pages for. CopiesDueError if copies into the pages
        of `request` are due. O(tokens): they are hashed.
        """
        with self._lock:
            held = self.coordinator.requests.get(id_of(request))
            num_tokens = self._check_fork(request, held, new_request)
            target = self.coordinator.hold_nothing()
            self.coordinator.requests[new_request.request_id] = target  # before it holds pages: no interrupt can lose it
            is_forked = False
            try:
                is_forked = held is not None and fork_request(held, target, num_tokens)
            finally:
                if not target:
                    del self.coordinator.requests[new_request.request_id]
                if not is_forked:
                    self._lookups.hashes.pop(new_request.request_id, None)
            return CachePages(target.get_page_ids(), self._store) if is_forked else None

    def _check_fork(self, request: "Request", held: "RequestPages | None", new_request: "Request") -> int:
        """Return the computed tokens of both requests, or raise why the new one cannot go on from there."""
        num_tokens, num_new = (read_count(each, "num_computed_tokens") for each in (request, new_request))
        if held is None:
            raise ArgumentError(f"request {shown(request.request_id)} holds no pages")
        if id_of(new_request) in self.coordinator.requests:
            raise ArgumentError(f"request {shown(new_request.request_id)} holds pages already")
        if not num_new == num_tokens <= held.num_room_tokens:
            raise ArgumentError(
                f"num_computed_tokens: got {shown(num_tokens)} and {shown(num_new)}, allowed: equal, and at most "
                f"{held.num_room_tokens}, for which there are slots"
            )
        check_copies_taken(held, may_be_read=True)
        if self.enable_caching and not self._lookups.share_hashes(request, new_request, num_tokens):
            raise ArgumentError(
                f"request {shown(new_request.request_id)}: its first {num_tokens} tokens, or its extra keys, are not those of "
                f"request {shown(request.request_id)}"
            )
        return num_tokens

"""What the oracle does with states that a step writes to pages of their own: see `Moves`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oracle_checkpoints import New
from oracle_expected import UNKNOWN
from oracle_kinds import is_recurrent
from oracle_tier import note_taken, waits_for_loads
from pool_ranges import Shard

if TYPE_CHECKING:
    from oracle import OracleManager


@dataclass(eq=False)
class Write:
    """A page for the state of a request after some of its tokens."""

    request: Any
    num_tokens: int
    page: int
    group_id: int
    kind: int
    is_taken: bool = False


class OracleWrites:
    """The writes of a manager's requests, or of its rows, in the order in which they were planned."""

    def __init__(self, manager: OracleManager) -> None:
        self.manager = manager
        self.open: list[Write] = []

    @property
    def state_ids(self) -> list[int]:
        """Return the groups whose states are written."""
        return [i for i, kind in enumerate(self.manager.kinds) if is_recurrent(kind) and self.manager.writes_states]

    def plan(
        self,
        request: Any,
        num_planned: int,
        shard: range | Shard | None,
        num_free_rows: int = 0,
        is_transfer: bool = False,
        num_reserved_pages: int = 0,
        num_hashed: int | None = None,
    ) -> None:
        """Plan the writes of a step that computes a request's tokens up to `num_planned`, or of a transfer, which brings the
        state at its end alone. Pages are reserved in the first pool. Tokens are hashed, some of them if a number is given.
        """
        self.nums_reserved = num_free_rows, num_reserved_pages
        self.num_hashed = request.num_tokens if num_hashed is None else num_hashed
        held = self.manager.held[request.request_id]
        for end in self.manager.windows.list_written(request, num_planned) if self.state_ids else ():
            num_seen = held[self.state_ids[0]].num_cached_pages * self.manager.hit_step
            if num_seen < end <= num_planned and (end == num_planned or not is_transfer):
                self._plan_at(request, end, shard)
        self.pass_over(request, num_planned)

    def pass_over(self, request: Any, num_tokens: int) -> None:
        """Let no later step write states among so many tokens."""
        for i in self.state_ids:
            held = self.manager.held[request.request_id][i]
            held.num_cached_pages = max(held.num_cached_pages, num_tokens // self.manager.hit_step)

    def start(self, request: Any, num_tokens: int) -> None:
        """Let later steps write states behind so many tokens alone, and again if the request was set back."""
        for i in self.state_ids:
            self.manager.held[request.request_id][i].num_cached_pages = num_tokens // self.manager.hit_step

    def _plan_at(self, request: Any, num_tokens: int, shard: range | Shard | None) -> None:
        """Take a page for each state that is not cached, if all pools have enough beside those that are reserved."""
        has_room, kind = self._has_room(shard), self.manager.windows.kind_at(request, num_tokens)
        for i in self.state_ids:
            is_known = num_tokens <= self.num_hashed and num_tokens <= self.manager.keys.count_known(request.num_tokens)
            if (is_known and self._is_cached(request, num_tokens, i, shard, kind)) or not has_room:
                continue
            held = self.manager.held[request.request_id][i]
            [page] = self.manager.page_pool.take(1, self.manager.source_of(i, shard), held.holder)
            note_taken(self.manager.page_pool, [held])
            self.open.append(Write(request, num_tokens, page, i, kind))

    def _has_room(self, shard: range | Shard | None) -> bool:
        """Whether all pools have a page for each state beside those that are reserved."""
        num_free_rows, num_reserved_pages = self.nums_reserved
        pools, pool = self.manager.pools, self.manager.page_pool
        for i in self.state_ids:
            states = [j for j in self.state_ids if pools.of_group[j] == pools.of_group[i]]
            free, source = pool.free_in(pools.range_of(i)), pool.free_page_ids(self.manager.source_of(i, shard))
            num_reserved = num_free_rows * len(states) if pools.of_group[i] else num_reserved_pages
            if len(free) < len(states) + num_reserved or len(source) < len(states):
                return False
        return True

    def key_of(self, request: Any, num_tokens: int, group_id: int) -> int:
        return self.manager.keys_of(request, self.manager.kinds[group_id])[num_tokens // self.manager.hit_step - 1]

    def _is_cached(self, request: Any, num_tokens: int, group_id: int, shard: range | Shard | None, kind: int) -> bool:
        """Whether an equal checkpoint is cached, which is then also kept for the reasons `kind`."""
        pool = self.manager.page_pool
        page = pool.first_entered(self.key_of(request, num_tokens, group_id), group_id, shard)
        ranks = None if page is None else pool.checkpoints.ranks_of(page)
        if ranks is not None:
            ranks.add_kind(page, kind)
        return page is not None

    def take(self, requests: Sequence[Any]) -> list[tuple[int, int, int, int]]:
        """Return row, tokens, page id and group of the writes that were not taken."""
        rows = {request.request_id: row for row, request in enumerate(requests) if request is not None}
        due = [write for write in self.open if not write.is_taken]
        for write in due:
            write.is_taken = True
        id_of = self.manager.pools.id_of
        return [
            (rows[write.request.request_id], write.num_tokens, id_of(write.page, write.group_id), write.group_id)
            for write in due
        ]

    def take_all(self) -> list[tuple[str, int, int, int]]:
        """Return request id, number of tokens, page id and group of the writes that were not taken, request by request."""
        requests = {write.request.request_id: write.request for write in self.open if not write.is_taken}
        taken = [write for request_id in requests for write in self.open if write.request.request_id == request_id]
        taken = [write for write in taken if not write.is_taken]
        for write in taken:
            write.is_taken = True
        id_of = self.manager.pools.id_of
        return [
            (write.request.request_id, write.num_tokens, id_of(write.page, write.group_id), write.group_id) for write in taken
        ]

    def require_none_due(self, request: Any) -> None:
        """Refuse a call while writes of the request are due."""
        if self.are_due(request):
            raise RuntimeError("writes are due")

    def are_due(self, request: Any) -> bool:
        return any(write.request is request and not write.is_taken for write in self.open)

    def settle_request(self, request: Any, num_final: int, term: int = UNKNOWN) -> None:
        """Enter the states of a request of the manager after final tokens that were written by now."""
        for page in [write.page for write in self.open if write.request is request]:
            self.settle(request, num_final, self.manager.states.shard_of(page), term, page)

    def settle(
        self, request: Any, num_final: int, shard: range | Shard | None, term: int = UNKNOWN, page: int | None = None
    ) -> list[Write]:
        """Enter the states after final tokens that were written by now, to `page` alone if it is given, and return those that
        were not cached.
        """
        written = [
            write for write in self.open if write.request is request and write.is_taken and write.num_tokens <= num_final
        ]
        groups = self.manager.held[request.request_id]
        written = [write for write in written if not waits_for_loads(self.manager.page_pool, groups[write.group_id])]
        written = [write for write in written if page in (None, write.page)]
        self.open = [write for write in self.open if write not in written]
        return [write for write in written if self._enter(write, shard, term)]

    def _enter(self, write: Write, shard: range | Shard | None, term: int) -> bool:
        held = self.manager.held[write.request.request_id][write.group_id]
        held.num_written = max(held.num_written, write.num_tokens // self.manager.hit_step)
        pool, holder = self.manager.page_pool, held.holder
        is_new = not self._is_cached(write.request, write.num_tokens, write.group_id, shard, write.kind)
        if is_new:
            key = self.key_of(write.request, write.num_tokens, write.group_id)

            def enter(new: New) -> None:
                pool.cache_full_pages([write.page], {0: key}, 0, 1, write.group_id, None, holder.session_id, new)

            pool.checkpoints.make(write.page, key, New(held.lineage, write.num_tokens, write.kind), enter)
            pool.expected.own(write.page, holder)
        pool.free_pages([write.page])
        if is_new and term != UNKNOWN:
            pool.expected.expect(write.page, term)
        return is_new

    def drop(self, request: Any, num_tokens: int) -> None:
        """Drop the writes of a request behind so many tokens, the last first."""
        for write in [each for each in self.open if each.request is request and each.num_tokens > num_tokens][::-1]:
            self.open.remove(write)
            self.manager.page_pool.free_pages([write.page])

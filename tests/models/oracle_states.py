"""What `OracleManager` does with recurrent states and copies: checkpoints, copies that are due, forks.

A request has one page of each state, its working page. What is copied there, or from there, is noted and moved by the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from oracle_kinds import HeldPages, Kind, Mamba
from oracle_pool import NULL_PAGE, OraclePool, PageIds
from oracle_tenants import Holder
from oracle_tier import are_transfers_due, note_taken
from pool_ranges import Shard

if TYPE_CHECKING:
    from oracle import OracleManager

PagesByGroup = tuple[PageIds, ...]


class Copy(NamedTuple):
    """One page to be copied to another, of one group."""

    src: int
    dst: int
    group: int


class OracleCopies:
    """The copies that are due, in the order in which they were noted. The list holds one reference to each source."""

    def __init__(self, pool: OraclePool) -> None:
        self.pool = pool
        self.due: list[Copy] = []
        self.readers: list[HeldPages] = []  # what was forked
        self.is_between = False  # moves are taken next for a fork, or for a call that was refused, and begin no step

    def note(self, src: int, dst: int, group_id: int) -> None:
        """Note a copy. A reference to the source is the list's from now on."""
        self.due.append(Copy(src, dst, group_id))

    def require_none(self, held: Collection[HeldPages], *, into_only: bool = False) -> None:
        """Refuse a call while copies of the pages are due, or transfers may be."""
        if are_transfers_due(self.pool, held):
            raise RuntimeError("transfers are due")
        if self.are_due(held, into_only=into_only):
            raise RuntimeError("copies are due")

    def are_due(self, held: Collection[HeldPages], *, into_only: bool = False) -> bool:
        """Whether one of the pages is a destination of a copy that is due, or its source, if these pages were forked."""
        written = [page for group in held for page in group.pages]
        read = [page for group in held if any(group is reader for reader in self.readers) for page in group.pages]
        return any(copy.dst in written or (copy.src in read and not into_only) for copy in self.due)

    def take(self) -> list[Copy]:
        """Return all copies, which the engine makes now, and give the sources back."""
        taken, self.due, self.readers, self.is_between = self.due, [], [], False
        self._give_back(taken)
        return taken

    def drop(self, pages: Collection[int]) -> None:
        """Drop the copies into these pages, and give the sources back."""
        dropped = [copy for copy in self.due if copy.dst in pages]
        self.due = [copy for copy in self.due if copy not in dropped]
        self._give_back(dropped)

    def _give_back(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.pool.free_pages([copy.src])


class OracleStates:
    """Checkpoints and forks of a manager's requests."""

    def __init__(self, manager: OracleManager) -> None:
        self.manager = manager
        self.pool = manager.page_pool
        self.copies = OracleCopies(manager.page_pool)
        self.num_shards = 0  # while no caller has divided the pool

    def divide(self, shard: range | Shard | None) -> None:
        """Divide the pools into shards of this size, if any."""
        if shard is not None:
            self.num_shards = self.manager.pools.count_shards(shard)

    @property
    def interval(self) -> int | None:
        """The tokens between checkpoints; None if there are none."""
        is_kept = any(isinstance(kind, Mamba) and kind.interval for kind in self.manager.kinds)
        return self.manager.hit_step if is_kept and self.manager.enable_caching else None

    # checkpoints

    def checkpoints_in(self, hits: PagesByGroup) -> dict[int, int]:
        """Return the checkpoint that each state hits, by group."""
        groups = zip(self.manager.kinds, hits, strict=True)
        return {i: pages[-1] for i, (kind, pages) in enumerate(groups) if isinstance(kind, Mamba) and pages}

    def is_checkpoint(self, request: Any, num_tokens: int) -> bool:
        """Whether a state is kept after so many tokens."""
        return self.manager.writes_states and num_tokens in self.manager.windows.list_ends(request)

    def next_checkpoint(self, request: Any) -> int:
        """Return the next number of tokens after which a state is kept; the longest request's if there is none."""
        ends = self.manager.windows.list_ends(request) if self.manager.writes_states else ()
        return next((end for end in ends if end > request.num_computed_tokens), self.manager.max_model_len)

    # shards

    def shard_of(self, page: int) -> range | Shard | None:
        """Return the shard of a page; None while no caller has divided the pools."""
        pools = self.manager.pools
        return pools.shard_of_hint(pools.shard_number(page, self.num_shards), self.num_shards) if self.num_shards else None

    # forks

    def fork(self, request: Any, targets: Sequence[Any], shard: range | Shard | None) -> bool:
        """Let targets hold the full pages of a request, and copies of its open pages and states; False if there is no room."""
        self.copies.require_none(self.manager.held[request.request_id], into_only=True)
        num_computed, held = request.num_computed_tokens, self.manager.held[request.request_id]
        for kind, group in zip(self.manager.kinds, held, strict=True):
            if kind.lacks_page(group, num_computed, num_computed):
                raise ValueError("a page that is needed again was given back")
        groups = list(zip(self.manager.kinds, held, strict=True))
        copies = Counter[range | None]()
        for i, (kind, group) in enumerate(groups):
            copies[self.manager.source_of(i, shard)] += sum(map(bool, self._part(kind, group, num_computed)[1]))
        if any(len(targets) * num > len(self.pool.free_page_ids(source)) for source, num in copies.items()):
            return False
        for target in targets:
            own = self.pool.tenants.holder_of(target)
            holder = held[0].holder if own.session_id is None else own
            forked = [self._fork_group(i, *group, num_computed, shard, holder) for i, group in enumerate(groups)]
            self.manager.held[target.request_id], self.manager.owners[target.request_id] = forked, target
            if self.manager.windows is not None:
                self.manager.windows.fork(request, target)
        return True

    def _part(self, kind: Kind, held: HeldPages, num_computed: int) -> tuple[PageIds, PageIds]:
        """Part pages with tokens into those that a fork shares, and others, which are written next: the open one, and full ones
        whose lookahead is not computed.
        """
        num_shared = kind.num_full_pages(self.manager.keys.count_known(num_computed))
        return held.pages[:num_shared], held.pages[num_shared : kind.num_required_pages(num_computed)]

    def _fork_group(
        self,
        group_id: int,
        kind: Kind,
        held: HeldPages,
        num_computed: int,
        shard: range | Shard | None,
        holder: Holder,
    ) -> HeldPages:
        """Return what a target holds in a group."""
        shared, copied = self._part(kind, held, num_computed)
        num_places = kind.num_places(num_computed) if isinstance(kind, Mamba) else len(shared)
        self._share(shared)
        self.pool.expected.use(shared, holder)
        num_cached = min(held.num_cached_pages, num_places)
        ranking = replace(held.ranking, num_ranked=min(held.ranking.num_ranked, len(shared)))
        num_hits = num_places if isinstance(kind, Mamba) else num_cached  # checkpoints that it passes over are not its own
        forked = HeldPages(shared, num_cached, num_hits, ranking, holder=holder)
        forked.num_prompt_tokens = held.num_prompt_tokens
        forked.load_number, forked.lineage = held.load_number, held.lineage.for_fork()
        for page in copied:
            if page == NULL_PAGE:
                forked.pages.append(NULL_PAGE)
                continue
            self._share([page])
            forked.pages += self.pool.take(1, self.manager.source_of(group_id, shard), holder)
            note_taken(self.pool, [forked])
            self.copies.note(page, forked.pages[-1], group_id)
            self.copies.readers.append(held)
            self.copies.is_between = True
            if self.pool.tier is not None:
                self.pool.tier.note_copied(page, forked.pages[-1])
        return forked

    def _share(self, pages: PageIds) -> None:
        """Add a reference to held pages. They are not hit."""
        for page in pages:
            self.pool.ref_counts[page] += page != NULL_PAGE

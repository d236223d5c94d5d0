"""The plain-Python twin of the tier behind a pool: which pages are saved and loaded, and what hits meanwhile.

The tier is a pool of its own under the same contents. A list has the transfers in the order in which they were noted. Each
holds a reference to the tier's page, and a load one to the page of the device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oracle_kinds import HeldPages, Kind, Mamba
from oracle_pool import NULL_PAGE, OraclePool, PageIds
from oracle_tenants import Holder
from pool_ranges import Pools, Shard

if TYPE_CHECKING:
    pass

Entry = tuple[int, int]  # content and group
Move = tuple[int, int, int]  # source, destination, group


class Taken(NamedTuple):
    """What `take_moves` returns."""

    number: int
    saves: list[Move]
    loads: list[Move]
    copies: list[Move]
    writes: list[tuple[Any, int, int, int]]  # row or request id, number of tokens, page, group


class Failed(NamedTuple):
    """What `fail` returns: the pages that loads of a list have left with a wrong content."""

    number: int
    page_ids: PageIds
    groups: list[int]  # of these pages
    copies: PageIds  # of pages that the list loaded, which may be wrong as well


@dataclass
class Transfer:
    """A page to be saved or loaded. It is due while it has the number 0, and in flight from then on."""

    entry: Entry
    page: int
    tier_page: int
    is_load: bool
    number: int = 0
    is_void: bool = False


class OracleTier:
    """The tier behind the pools of a device. It has pools of the same names."""

    def __init__(
        self,
        device: OraclePool,
        device_pools: Pools,
        pools: Pools,
        writes_through: bool = False,
    ) -> None:
        self.device = device
        self.device_pools = device_pools
        self.pools = pools
        self.pool = OraclePool(pools.num_records, True, None, pools.ranges)
        self.pool.has_blank_first = device.has_blank_first
        self.writes_through = writes_through
        self.transfers: list[Transfer] = []
        self.last_number = 0
        self.loading: dict[int, int] = {}  # the list by which a page of the device, or what it was copied from, is loaded
        self.fresh: dict[int, None] = {}  # pages that were cached since moves were taken
        self.computed: list[int] = []  # fresh ones of the time before, which are to be saved
        self.saved: set[int] = set()  # cached pages that a tier that writes through need not save when they are evicted
        self.counts: Counter[str] = Counter()
        device.tier = self

    def stats(self) -> dict[str, int]:
        """Return the counters under the names of `HostTierStats`."""
        counts = {**self.counts, "evicted": self.pool.counts["evicted"]}
        counts |= {"free": len(self.pool.free_queue), "cached": len(self.pool.entry_of_page)}
        names = "free", "cached", "saved", "loaded", "failed", "evicted", "refused"
        return {"num_in_flight": len(self.transfers)} | {f"num_{name}_pages": counts.get(name, 0) for name in names}

    def find(self, entry: Entry) -> int | None:
        """Return the page of the tier with this entry."""
        return self.pool.first_entered(*entry, None)

    # saving

    def note_cached(self, page: int) -> None:
        """A page of the device got an entry. If it is loaded it need not be saved."""
        self.saved.discard(page)
        if page in self.loading and self.writes_through:
            self.saved.add(page)
        if page not in self.loading:
            self.fresh.pop(page, None)
            self.fresh[page] = None
            self.computed = [other for other in self.computed if other != page]

    def note_evicted(self, page: int) -> None:
        """A page of the device is about to lose its entry since it was taken. It is saved unless another has its content, or it
        was saved before, and the tier has evicted it.
        """
        entry = self.device.entry_of_page[page]
        if len(self.device.index[entry]) == 1 and (page not in self.saved or self.find(entry) is not None):
            self._save(page)

    def _save(self, page: int) -> bool:
        """Note that a page is to be saved, or let the tier's page with its content be as one that was used. Return whether the
        tier has it, or gets it.
        """
        entry = self.device.entry_of_page[page]
        tier_page = self.find(entry)
        if tier_page is not None:
            self.pool.touch([[tier_page]])
            self.pool.free_pages([tier_page])
            return True
        pages = self.pools.range_of(entry[1])
        if not self.pool.free_in(pages):
            self.counts["refused"] += 1
            return False
        [tier_page] = self.pool.take(1, pages)
        self.transfers.append(Transfer(entry, page, tier_page, False))
        return True

    # loading

    def pages_for(self, group_id: int, shard: range | Shard | None) -> range | None:
        """Return the pages of the device from which a group's are taken; None for all."""
        pools = self.device_pools
        return pools.range_of(group_id) if shard is None else pools.part_of(shard, pools.of_group[group_id])

    def has_room(self, entries: Sequence[Entry], shard: range | Shard | None, num_reserved: int) -> bool:
        """Whether enough pages of each pool are free for the entries that only the tier has, beside those of the others, and
        reserved ones of the first.
        """
        for pool in range(len(self.device_pools.ranges)):
            groups = self.device_pools.groups_of(pool)
            found = [self.device.first_entered(*entry, shard) for entry in entries if entry[1] in groups]
            num_needed = sum(page is None or page in self.device.free_queue for page in found)
            pages = self.pages_for(groups[0], shard)
            all_pages = self.device_pools.ranges[pool]
            num_free = len(self.device.free_in(all_pages)) - (0 if pool else num_reserved)
            if num_needed > min(len(self.device.free_in(pages)), num_free) and num_needed:
                return False
        return True

    def load(self, entries: Sequence[Entry], shard: range | Shard | None, num_reserved: int, holder: Holder) -> bool:
        """Note loads of the entries that only the tier has, if there is room, for a holder. Their pages have the entries at
        once, and are held. Returns whether there was room.
        """
        if not self.has_room(entries, shard, num_reserved):
            self.counts["loads without room"] += 1
            return False
        missing = [entry for entry in entries if self.device.first_entered(*entry, shard) is None]
        found = [self.device.first_entered(*entry, shard) for entry in reversed(entries)]
        free_hits = [page for page in found if page in self.device.free_queue]
        sources = [self.pool.first_entered(*entry, None) for entry in missing]
        self.pool.touch([sources])
        loads = [Transfer(entry, NULL_PAGE, page, True) for entry, page in zip(missing, sources, strict=True)]
        self.transfers += loads
        for page in free_hits:  # so that they are not evicted
            self.device.take_out(page)
        new_pages: PageIds = []
        for pages, some in itertools.groupby(missing, lambda entry: self.pages_for(entry[1], shard)):
            new_pages += self.device.take(len(list(some)), pages, holder)
        for page in free_hits:
            self.device.put_to_the_end(page)
        for load, page in zip(loads, new_pages, strict=True):
            load.page = page
            self.loading[page] = self.last_number + 1
        following = {entry: other for entry, other in itertools.pairwise(entries) if entry[1] == other[1]}
        for load in loads:
            session_id = holder.session_id
            self.device.cache_full_pages([load.page], [load.entry[0]], 0, 1, load.entry[1], session=session_id)
            self.device.expected.own(load.page, holder)
            if load.entry in following and self.device.checkpoints.ranks_of(load.page) is None:
                self.device.checkpoints.children[load.page] = following[load.entry][0]
        return True

    def note_copied(self, page: int, copy: int) -> None:
        """A page was copied for a fork: if it is being loaded, the copy is as wrong as it may be."""
        if page in self.loading:
            self.loading[copy] = self.loading[page]

    def is_waited_for(self, load_number: int) -> bool:
        """Whether loads up to this list are in flight, or due: what was computed with their pages may be wrong."""
        return any((load.number or self.last_number + 1) <= load_number for load in self.transfers if load.is_load)

    # what is due

    def is_any_due(self) -> bool:
        return any(transfer.number == 0 for transfer in self.transfers)

    def begin_step(self) -> None:
        """Begin the step whose moves are taken. Pages that were cached before the moves of the last step were taken are saved,
        if the tier writes through. One with an older twin is left to that one, and a held twin that came before it is saved
        with it.
        """
        for page in self.computed if self.writes_through else ():
            entry = self.device.entry_of_page.get(page)
            first = None if entry is None else self.device.first_entered(*entry, None)
            may_save = first == page or (first is not None and self.device.prefers_held)
            if may_save and first not in self.saved and self._save(page):
                self.saved |= {page, first}
        self.computed, self.fresh = [*self.fresh], {}

    def take(self, has_copies: bool) -> tuple[int, list[Move], list[Move]]:
        """Return the transfers that are due, which the engine makes now, and their number, which copies count for, too."""
        due = [transfer for transfer in self.transfers if transfer.number == 0]
        self.last_number += has_copies or bool(due)
        for transfer in due:
            transfer.number = self.last_number
        saves = [(save.page, save.tier_page, save.entry[1]) for save in due if not save.is_load]
        loads = [(load.tier_page, load.page, load.entry[1]) for load in due if load.is_load]
        return self.last_number if due else 0, saves, loads

    def end(self, number: int, failed_saves: Sequence[int] = (), failed_loads: Sequence[int] = ()) -> Failed:
        """End the transfers of a list, of which those at these places failed."""
        ended = [transfer for transfer in self.transfers if transfer.number == number]
        saves = [transfer for transfer in ended if not transfer.is_load]
        loads = [transfer for transfer in ended if transfer.is_load]
        is_known = set(failed_saves) <= set(range(len(saves))) and set(failed_loads) <= set(range(len(loads)))
        if number < 1 or not ended or not is_known:
            raise ValueError("no such transfers are in flight")
        failed = [saves[i] for i in failed_saves] + [loads[i] for i in failed_loads]
        for transfer in reversed(ended):  # so that the last page of a prefix is evicted first
            is_done = not any(transfer is other for other in failed)
            self.counts["failed" if not is_done else "loaded" if transfer.is_load else "saved"] += 1
            if transfer.is_load:
                self._end_load(transfer, is_done)
            else:
                self._end_save(transfer, is_done)
        self.transfers = [transfer for transfer in self.transfers if transfer.number != number]
        copies = [page for page, other in self.loading.items() if other == number]
        for page in copies:
            del self.loading[page]
        bad = [load for i, load in enumerate(loads) if i in failed_loads]
        return Failed(number, [load.page for load in bad], [load.entry[1] for load in bad], copies)

    def _end_save(self, save: Transfer, is_done: bool) -> None:
        """Cache the tier's page, unless its content is not wanted, or another page has it. What failed is saved when it is
        evicted.
        """
        if not is_done and self.device.entry_of_page.get(save.page) == save.entry:
            self.saved.discard(save.page)
        if is_done and not save.is_void and self.find(save.entry) is None:
            self.pool.cache_full_pages([save.tier_page], [save.entry[0]], 0, 1, save.entry[1])
        self.pool.free_pages([save.tier_page])

    def _end_load(self, load: Transfer, is_done: bool) -> None:
        """Let go of both pages, which lose their entries if the load failed."""
        self.loading.pop(load.page)
        if not is_done and self.device.entry_of_page.get(load.page) == load.entry:
            self.device.drop_entries([load.page])
        if not is_done and self.pool.entry_of_page.get(load.tier_page) == load.entry:
            self.pool.drop_entries([load.tier_page])
        self.device.free_pages([load.page])
        self.pool.free_pages([load.tier_page])

    # contents that are not wanted any more

    def drop(self, entry: Entry) -> None:
        """Drop an entry. What is being saved of it gets none."""
        tier_page = self.find(entry)
        if tier_page is not None:
            self.pool.drop_entries([tier_page])
        for transfer in self.transfers:
            transfer.is_void |= transfer.entry == entry

    def drop_all(self) -> None:
        """Drop all entries. What is being saved gets none."""
        self.pool.drop_entries(range(self.pool.num_pages))
        for transfer in self.transfers:
            transfer.is_void = True


# what requests hold


def note_taken(pool: OraclePool, held: Iterable[HeldPages]) -> None:
    """Note that pages were taken: while a transfer is due, one of them may have to be saved before it is written."""
    for group in held if pool.tier is not None and pool.tier.is_any_due() else ():
        group.transfer_number = pool.tier.last_number + 1


def note_loads(pool: OraclePool, held: Sequence[HeldPages], hits: Sequence[PageIds]) -> None:
    """Note which hits that were attached are loaded."""
    if pool.tier is None:
        return
    number = max((pool.tier.loading.get(page, 0) for pages in hits for page in pages), default=0)
    for group in held:
        group.load_number = number
        group.transfer_number = number if number > pool.tier.last_number else 0


def are_transfers_due(pool: OraclePool, held: Iterable[HeldPages]) -> bool:
    """Whether a transfer of these pages may be due."""
    return pool.tier is not None and any(group.transfer_number > pool.tier.last_number for group in held)


def waits_for_loads(pool: OraclePool, held: HeldPages) -> bool:
    """Whether hits, or what was computed with them, may turn out to be wrong. What is wrong must not be entered."""
    return pool.tier is not None and pool.tier.is_waited_for(held.load_number)


def wrong_token(kinds: Sequence[Kind], held: Sequence[HeldPages], failed: Failed) -> int | None:
    """Return the first token in a page that failed to load; None if there is none. A state may have been computed with any page
    that was loaded by then: it is wrong from the start.
    """
    if not failed.page_ids or not held or held[0].load_number < failed.number:
        return None
    if any(isinstance(kind, Mamba) for kind in kinds):
        return 0
    wrong = {*failed.page_ids, *failed.copies}
    groups = zip(kinds, held, strict=True)
    places = [i * kind.page_size for kind, group in groups for i, page in enumerate(group.pages) if page in wrong]
    return min(places, default=None)

"""The host tier of the simulation: what its pages hold, and transfers, which end in any order, and may fail.

The books know each entry of the tier. The pool's choice of pages is not predicted, so a page of the tier loses its entry when
something is saved in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from contents_device import MAX_GROUPS, Cells, Content, Device, require
from contents_request import Job
from pool_ranges import Pools
from settings import NumPages

from pagepool import HostTier
from pagepool._core import copy_records

GROUP_BITS = (1 << 28) - 1  # of the field of a page's record which has flags, too
FAILING_SHARES = 0.1, 0.1, 0.5


def draw_tier(rng: Random, num_pages: NumPages) -> HostTier:
    """Return a tier of any size and policy for one pool, or for several."""
    policy = rng.choice(("write_back", "write_through"))
    if isinstance(num_pages, Mapping):
        sizes = {name: rng.choice((3, size, 4 * size)) for name, size in reversed(num_pages.items())}
        return HostTier(sizes, policy=policy)
    size = rng.choice((3, num_pages, 4 * num_pages))
    return HostTier(size, policy=policy)


class Move(NamedTuple):
    """A transfer of a group's page, given by the records of the device and of the tier."""

    group: int
    page: int
    tier_page: int


@dataclass(eq=False)
class InFlight:
    """Transfers that were taken under a number and have not ended."""

    number: int
    saves: list[Move]
    loads: list[Move]
    contents: list[Content | None]  # of the entries that the saves make
    loaded: list[Content]
    unsure: set[int]  # places of saves of pages with two reasons, of which one may have made no entry
    bad_saves: list[int] = field(default_factory=list)  # those that fail
    bad_loads: list[int] = field(default_factory=list)
    saved: list[Cells] | None = None  # what the saves have read, once they are made


class TierBooks:
    """The tier behind a pool, and what is on the way to it and back."""

    def __init__(self, tier: HostTier, device: Device, rng: Random, counts: Counter[str]) -> None:
        self.tier, self.device, self.rng, self.counts = tier, device, rng, counts
        sizes = tier.num_pages
        if isinstance(sizes, Mapping):
            sizes = {name: sizes[name] for name in device.pools.names}
        of_attention = {group.pool for group in device.groups if not group.is_state}
        # States in pools of their own are not saved once they are left, or as long as they are replaced.
        self.may_be_lost = {i for i, group in enumerate(device.groups) if group.pool not in of_attention}
        self.pools = Pools.of(sizes, [(group.pool, group.is_state) for group in device.groups])
        saved = {group.pool for group in device.groups if not group.is_ring}
        ranges = zip(device.pools.names, self.pools.ranges, device.pools.ranges, strict=True)
        has_room = all(len(own) >= 2 * len(pages) for name, own, pages in ranges if name in saved)
        self.writes_through = tier.policy == "write_through" and has_room
        self.histories = device.histories
        self.host = Device(self.pools, device.groups, device.histories, device.hash_lookahead)
        self.entries: dict[int, Content] = {}
        self.keys: dict[Any, Content] = {}  # contents, by the keys under which pages of the device were cached
        self.in_flight: list[InFlight] = []
        self.noted: dict[int, Content | None] = {}  # pages that may be saved next; None: they make no entry
        self.noted_twice: set[int] = set()
        self.wanted: set[Content] = set()  # to be saved next, as far as the tier has room
        self.fresh: dict[int, Content] = {}  # pages that were cached first with a content, since moves were taken
        self.ready: dict[int, Content] = {}  # before that
        self.saved: set[int] = set()  # pages that need not be saved when they are evicted
        self.due_loads: dict[int, Content] = {}  # by page of the device
        self.loading: dict[int, int] = {}  # lists by which pages, or those of which they are copies, are loaded
        self.failing_share = rng.choice(FAILING_SHARES)  # of the transfers
        self.last_number = 0
        self.num_refused = 0

    def read_entries(self, store: Any) -> dict[int, Content]:
        """Return the contents under whose keys the tier has pages."""
        records, num_records = copy_records(store, "pages uppers", of_tier=True), self.pools.num_records
        columns = [records["pages"][name][:num_records].tolist() for name in ("key_lo", "key_hi", "group")]
        uppers = records["uppers"].tolist() or [0, 0] * num_records
        keys = [
            (words[3] << 192 | words[2] << 128 | words[1] << 64 | words[0], group & GROUP_BITS) if group >= 0 else None
            for *words, group in zip(*columns[:2], uppers[::2], uppers[1::2], columns[2], strict=True)
        ]
        return {page_id: self.keys[key] for page_id, key in enumerate(keys) if key is not None}

    # Entries of the device.

    def note_entry(self, page_id: int, key: Any, content: Content, is_first: bool) -> None:
        """Record the key of a page that was cached; a tier that writes through saves it after its step."""
        known = self.keys.setdefault(key, content)
        require(known == content, "two contents have a key", known, content)
        self.ready.pop(page_id, None)
        self.saved.discard(page_id)
        if self.writes_through and (page_id in self.loading or not is_first):  # the tier may have had an equal page's content
            self.saved.add(page_id)
        if is_first and page_id not in self.loading:
            self.fresh[page_id] = content

    def note_save(self, page_id: int, content: Content) -> None:
        """Record that a page may be saved next."""
        if self.noted.get(page_id, content) != content:
            self.noted_twice.add(page_id)
        self.noted[page_id] = content

    def note_eviction(self, page_id: int, content: Content, is_last: bool) -> None:
        """Record that a page was handed out which had an entry."""
        self.note_save(page_id, content)
        if is_last and content not in self.entries.values() and page_id not in self.saved:
            self.wanted.add(content)

    def forget(self, page_id: int) -> None:
        """Record that a page has no entry any more."""
        self.fresh.pop(page_id, None)
        self.ready.pop(page_id, None)

    def drop(self, content: Content) -> None:
        """Drop an entry. What is being saved of it gets none."""
        for page_id in [page_id for page_id, entry in self.entries.items() if entry == content]:
            del self.entries[page_id]
        for one in self.in_flight:
            one.contents = [None if entry == content else entry for entry in one.contents]
        dropped = {page_id for page_id, entry in self.noted.items() if entry == content}
        self.noted |= dict.fromkeys(dropped)
        if self.writes_through:
            self.noted_twice |= dropped  # another page with the content may keep it, and be saved once more
        self.wanted.discard(content)

    def drop_perhaps(self, content: Content, store: Any) -> None:
        """Drop an entry if the tier did. What is being saved of it may get one."""
        found = self.read_entries(store)
        for page_id in [page_id for page_id, entry in self.entries.items() if entry == content and page_id not in found]:
            del self.entries[page_id]
        for one in self.in_flight:
            one.unsure |= {place for place, entry in enumerate(one.contents) if entry == content}
        self.noted_twice |= {page_id for page_id, entry in self.noted.items() if entry == content}
        self.wanted.discard(content)

    def reset(self) -> None:
        """Drop all entries."""
        for content in self.list_contents():
            self.drop(content)

    def list_contents(self) -> set[Content]:
        """Return all contents that the tier has, or will have."""
        saved = [content for one in self.in_flight for content in one.contents]
        return {content for content in (*self.entries.values(), *self.noted.values(), *saved) if content is not None}

    # Loads.

    def note_load(self, page_id: int, content: Content) -> None:
        """Record that a page was taken into which a load is due."""
        self.due_loads[page_id] = content
        self.loading[page_id] = self.last_number + 1
        if self.writes_through:  # the tier had it
            self.saved.add(page_id)

    def find_load_number(self, page_ids: Iterable[int]) -> int:
        """Return the last list by which one of the pages is loaded, 0 for none."""
        return max([0, *(self.loading.get(page_id, 0) for page_id in page_ids)])

    def waits(self, job: Job) -> bool:
        """Whether hits of a request, or what was computed with them, may turn out to be wrong."""
        numbers = [one.number for one in self.in_flight if one.loaded]
        oldest = min([*numbers, self.last_number + 1 if self.due_loads else math.inf, math.inf])
        return job.load_number >= oldest

    def is_doubtful(self, job: Job) -> bool:
        """Whether a load of what a request hit is about to fail."""
        return any(one.bad_loads and one.number <= job.load_number for one in self.in_flight)

    def is_failing(self, page_id: int) -> bool:
        """Whether a page was loaded in vain, which nobody knows yet."""
        return any(one.bad_loads and one.number == self.loading.get(page_id) for one in self.in_flight)

    # Transfers.

    @property
    def is_any_due(self) -> bool:
        """Whether transfers may be due."""
        return bool(self.noted or self.due_loads)

    def take(self, moves: Any, index: Any, begins_step: bool) -> InFlight | None:
        """Record moves that were taken, and whether they are those of a step; None if there are no loads and saves."""
        saves = self._list_moves(moves.saves.group, moves.saves.src, moves.saves.dst)
        loads = self._list_moves(moves.loads.group, moves.loads.dst, moves.loads.src)
        require(sorted(self.due_loads) == sorted(load.page for load in loads), "other loads", moves, self.due_loads)
        for load in loads:
            content = self.due_loads[load.page]
            require(content[0] == load.group, "a load of another group", moves, content)
            self.host.compare_page(load.tier_page, content)
        kept, contents = set(self.entries.values()), self._note_saves(saves, loads, index)
        self.wanted = {content for content in self.wanted if not index.has(content, None)}  # an equal page is saved later
        if self.writes_through and begins_step:
            self.wanted |= {content for page_id, content in self.ready.items() if page_id in index.entries}
            self.saved |= {*self.ready}
        num_refused = self.tier.stats().num_refused_pages
        if num_refused == self.num_refused:
            saved = {content for one in self.in_flight for content in one.contents}
            lost = {content for content in self.wanted - {*contents, *kept, *saved} if content[0] not in self.may_be_lost}
            require(not lost, "not saved", lost)
        loaded = [self.due_loads[load.page] for load in loads]
        unsure = {place for place, save in enumerate(saves) if save.page in self.noted_twice}
        self.num_refused, self.noted, self.noted_twice = num_refused, {}, set()
        self.wanted, self.due_loads = set(), {}
        if begins_step:
            self.ready, self.fresh = self.fresh, {}
        self.last_number += len(moves.copies) + len(saves) + len(loads) > 0
        require(moves.number == (self.last_number if saves or loads else 0), "another number", moves, self.last_number)
        if not moves.number:
            return None
        one = InFlight(moves.number, saves, loads, contents, loaded, unsure)
        if self.rng.random() < self.failing_share:
            one.bad_saves, one.bad_loads = self._draw_places(len(contents)), self._draw_places(len(loads))
        self.in_flight.append(one)
        self.counts["pages saved"] += len(contents)
        self.counts["pages loaded"] += len(loads)
        return one

    def _list_moves(self, groups: Any, page_ids: Any, tier_ids: Any) -> list[Move]:
        """Return transfers by record. An id outside the pool of its group has none."""
        record_of, tier_record_of = self.device.pools.record_of, self.pools.record_of
        columns = zip(groups.tolist(), page_ids.tolist(), tier_ids.tolist(), strict=True)
        return [Move(group, record_of(page_id, group), tier_record_of(tier_id, group)) for group, page_id, tier_id in columns]

    def _draw_places(self, num: int) -> list[int]:
        return [place for place in range(num) if self.rng.random() < 0.3]

    def _note_saves(self, saves: list[Move], loads: list[Move], index: Any) -> list[Content | None]:
        """Let the pages of the tier in which something is saved lose their entries; return the contents of the saves."""
        contents: list[Content | None] = []
        busy = {move.tier_page for one in self.in_flight for move in (*one.saves, *one.loads)}
        busy.update(load.tier_page for load in loads)
        for group_id, page_id, tier_id in saves:
            cached = index.content_of(page_id)
            is_asked = page_id in self.noted or (cached is not None and self.writes_through)
            require(is_asked, "a save that nobody asked for", saves, page_id)
            content = self.noted.get(page_id, cached)
            require(content is None or content[0] == group_id, "a save of another group", saves, content)
            require(tier_id not in busy, "a page of the tier is taken that is in flight", saves, tier_id)
            busy.add(tier_id)
            self.entries.pop(tier_id, None)
            contents.append(content)
        return contents

    def make(self, one: InFlight) -> None:
        """Make transfers: all saves are read before a load is written. Pages of loads that fail get garbage."""
        one.saved = [self.device.page(save.group, save.page).copy() for save in one.saves]
        loaded = [self.host.page(load.group, load.tier_page).copy() for load in one.loads]
        self._spoil(loaded, one.bad_loads)
        for load, cells in zip(one.loads, loaded, strict=True):
            self.device.page(load.group, load.page)[:] = cells

    def _spoil(self, moved: list[Cells], places: list[int]) -> None:
        garbage = self.histories.make_garbage() * MAX_GROUPS
        for place in places:
            moved[place][:] = garbage

    def draw_ended(self) -> InFlight | None:
        """Return any of the transfers that were made."""
        made = [one for one in self.in_flight if one.saved is not None]
        return self.rng.choice(made) if made else None

    def end(self, one: InFlight, store: Any) -> set[int]:
        """Record that transfers have ended; return the pages of the device that have wrong contents now."""
        found = self.read_entries(store) if one.unsure else {}
        self.in_flight.remove(one)
        assert one.saved is not None
        self._spoil(one.saved, one.bad_saves)
        for save, cells in zip(one.saves, one.saved, strict=True):
            self.host.page(save.group, save.tier_page)[:] = cells
        for place, save in reversed(list(enumerate(one.saves))):
            content = found.get(save.tier_page) if place in one.unsure else one.contents[place]
            if place not in one.bad_saves and content is not None and content not in self.entries.values():
                self.entries[save.tier_page] = content
        for place in one.bad_loads:
            self.entries.pop(one.loads[place].tier_page, None)
        copies = [page_id for page_id, number in self.loading.items() if number == one.number]
        for page_id in copies:
            del self.loading[page_id]
        self.counts["failed transfers"] += len(one.bad_saves) + len(one.bad_loads)
        return {*(one.loads[place].page for place in one.bad_loads), *self._list_copies(one, copies)}

    @staticmethod
    def _list_copies(one: InFlight, copies: list[int]) -> set[int]:
        return set(copies) - {load.page for load in one.loads} if one.bad_loads else set()

    def audit(self, manager: Any) -> None:
        """Compare the tier, when nothing is due, with the books, and its pages with what was computed."""
        entries = self.read_entries(manager._store)
        require(entries == self.entries, "entries of the tier", entries, self.entries)
        for page_id, content in entries.items():
            self.host.compare_page(page_id, content)
        numbers = [taken.number for taken in manager.list_moves_in_flight()]
        require(numbers == [one.number for one in self.in_flight], "transfers in flight", numbers)

"""The host tier of the simulation: what its pages hold, and transfers, which end in any order, and may fail.

The books know each entry of the tier. The pool's choice of pages is not predicted, so a page of the tier loses its entry when
something is saved in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from contents_device import MAX_GROUPS, Cells, Content, Device, require
from contents_request import Job
from pool_ranges import Pools
from settings import Group

from pagepool import HostTier
from pagepool._core import copy_records

GROUP_BITS = (1 << 28) - 1  # of the field of a page's record which has flags, too
FAILING_SHARES = 0.1, 0.1, 0.5


def draw_tier(rng: Random, num_pages: int) -> HostTier:
    """Return a tier of any size and policy for a pool."""
    policy, eviction = rng.choice(("write_back", "write_through")), rng.choice(("lru", "adaptive"))
    sizes = 3, num_pages, 4 * num_pages
    return HostTier(rng.choice(sizes), policy=policy, min_uses=rng.choice((1, 1, 2)), eviction=eviction)


@dataclass(eq=False)
class InFlight:
    """Transfers that were taken under a number and have not ended."""

    taken: Any
    contents: list[Content | None]  # of the entries that the saves make
    loaded: list[Content | None]
    unsure: set[int]  # places of saves of pages with two reasons, of which one may have made no entry
    bad_saves: list[int] = field(default_factory=list)  # those that fail
    bad_loads: list[int] = field(default_factory=list)
    saved: Cells | None = None  # what the saves have read, once they are made

    @property
    def number(self) -> int:
        return int(self.taken.number)


class TierBooks:
    """The tier behind a pool, and what is on the way to it and back."""

    def __init__(self, tier: HostTier, device: Device, rng: Random, counts: Counter[str]) -> None:
        self.tier, self.device, self.rng, self.counts = tier, device, rng, counts
        self.writes_through = tier.policy == "write_through" and tier.num_pages - 1 >= 2 * (len(device.cells) - 1)
        self.histories = device.histories
        self.host = Device(Pools.of(tier.num_pages, [("kv", False)] * len(device.groups)), device.groups)
        self.groups: list[Group] = list(device.groups)
        self.entries: dict[int, Content] = {}
        self.keys: dict[Any, Content] = {}  # contents, by the keys under which pages of the device were cached
        self.in_flight: list[InFlight] = []
        self.noted: dict[int, Content | None] = {}  # pages that may be saved next; None: they make no entry
        self.noted_twice: set[int] = set()
        self.wanted: set[Content] = set()  # to be saved next, as far as the tier has room
        self.fresh: dict[int, Content] = {}  # pages that were cached first with a content, since a step ended
        self.ready: dict[int, Content] = {}  # before that
        self.saved: set[int] = set()  # pages that need not be saved when they are evicted
        self.due_loads: dict[int, Content | None] = {}  # by page of the device; None: of a row that was swapped out
        self.loading: dict[int, int] = {}  # lists by which pages, or those of which they are copies, are loaded
        self.failing_share = rng.choice(FAILING_SHARES)  # of the transfers
        self.last_number = 0
        self.num_refused = 0
        self.unsaved: set[int] = set()  # lists of which a save failed

    def read_entries(self, store: Any) -> dict[int, Content]:
        """Return the contents under whose keys the tier has pages."""
        records = copy_records(store, "pages", of_tier=True)["pages"][: self.tier.num_pages]
        columns = (records[name].tolist() for name in ("key_lo", "key_hi", "group"))
        keys = [
            (high << 64 | low, group & GROUP_BITS) if group >= 0 else None for low, high, group in zip(*columns, strict=True)
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

    def note_save(self, page_id: int, content: Content | None) -> None:
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

    def reset(self) -> None:
        """Drop all entries."""
        for content in self.list_contents():
            self.drop(content)

    def list_contents(self) -> set[Content]:
        """Return all contents that the tier has, or will have."""
        saved = [content for one in self.in_flight for content in one.contents]
        return {content for content in (*self.entries.values(), *self.noted.values(), *saved) if content is not None}

    # Loads.

    def note_load(self, page_id: int, content: Content | None) -> None:
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

    def end_step(self) -> None:
        """Record that what was cached so far is computed."""
        self.ready |= self.fresh
        self.fresh = {}

    def take(self, transfers: Any, index: Any) -> InFlight | None:
        """Record transfers that were taken; None if there are none."""
        loads = list(zip(transfers.load_src.tolist(), transfers.load_dst.tolist(), strict=True))
        require(sorted(self.due_loads) == sorted(page_id for _, page_id in loads), "other loads", transfers, self.due_loads)
        for tier_id, page_id in loads:
            content = self.due_loads[page_id]
            if content is not None:
                self.host.compare_page(content[0], tier_id, self.list_slots(content))
        kept, contents = set(self.entries.values()), self._note_saves(transfers, index)
        self.wanted = {content for content in self.wanted if not index.has(content, None)}  # an equal page is saved later
        if self.writes_through:
            self.wanted |= {content for page_id, content in self.ready.items() if page_id in index.entries}
            self.saved |= {*self.ready}
        num_refused = self.tier.stats().num_refused_pages
        if self.tier.min_uses == 1 and num_refused == self.num_refused:
            saved = {content for one in self.in_flight for content in one.contents}
            require(self.wanted <= {*contents, *kept, *saved}, "not saved", self.wanted)
        loaded = [self.due_loads[page_id] for _, page_id in loads]
        unsure = {place for place, page_id in enumerate(transfers.save_src.tolist()) if page_id in self.noted_twice}
        self.num_refused, self.noted, self.noted_twice = num_refused, {}, set()
        self.wanted, self.ready, self.due_loads = set(), {}, {}
        if not transfers.number:
            return None
        self.last_number = transfers.number
        one = InFlight(transfers, contents, loaded, unsure)
        if self.rng.random() < self.failing_share:
            one.bad_saves, one.bad_loads = self._draw_places(len(contents)), self._draw_places(len(loads))
        self.in_flight.append(one)
        self.counts["pages saved"] += len(contents)
        self.counts["pages loaded"] += len(loads)
        return one

    def _draw_places(self, num: int) -> list[int]:
        return [place for place in range(num) if self.rng.random() < 0.3]

    def _note_saves(self, transfers: Any, index: Any) -> list[Content | None]:
        """Let the pages of the tier in which something is saved lose their entries; return the contents of the saves."""
        contents: list[Content | None] = []
        busy = {page_id for one in self.in_flight for page_id in (*one.taken.save_dst.tolist(), *one.taken.load_src.tolist())}
        busy.update(transfers.load_src.tolist())
        columns = transfers.save_src.tolist(), transfers.save_dst.tolist(), transfers.save_group.tolist()
        for page_id, tier_id, group_id in zip(*columns, strict=True):
            cached = index.content_of(page_id)
            is_asked = page_id in self.noted or (cached is not None and self.writes_through)
            require(is_asked, "a save that nobody asked for", transfers, page_id)
            content = self.noted.get(page_id, cached)
            require(content is None or content[0] == group_id, "a save of another group", transfers, content)
            require(tier_id not in busy, "a page of the tier is taken that is in flight", transfers, tier_id)
            busy.add(tier_id)
            self.entries.pop(tier_id, None)
            contents.append(content)
        return contents

    def make(self, one: InFlight) -> None:
        """Make transfers: all saves are read before a load is written. Pages of loads that fail get garbage."""
        one.saved = self.device.cells[one.taken.save_src].copy()
        loaded = self.host.cells[one.taken.load_src].copy()
        loaded[one.bad_loads] = self.histories.make_garbage() * MAX_GROUPS
        self.device.cells[one.taken.load_dst] = loaded

    def draw_ended(self) -> InFlight | None:
        """Return any of the transfers that were made."""
        made = [one for one in self.in_flight if one.saved is not None]
        return self.rng.choice(made) if made else None

    def end(self, one: InFlight, store: Any) -> set[int]:
        """Record that transfers have ended; return the pages of the device that have wrong contents now."""
        found = self.read_entries(store) if one.unsure else {}
        self.in_flight.remove(one)
        assert one.saved is not None
        one.saved[one.bad_saves] = self.histories.make_garbage() * MAX_GROUPS
        self.host.cells[one.taken.save_dst] = one.saved
        for place, tier_id in reversed(list(enumerate(one.taken.save_dst.tolist()))):
            content = found.get(tier_id) if place in one.unsure else one.contents[place]
            if place not in one.bad_saves and content is not None and content not in self.entries.values():
                self.entries[tier_id] = content
        for place in one.bad_loads:
            self.entries.pop(int(one.taken.load_src[place]), None)
        if one.bad_saves:
            self.unsaved.add(one.number)
        copies = [page_id for page_id, number in self.loading.items() if number == one.number]
        for page_id in copies:
            del self.loading[page_id]
        self.counts["failed transfers"] += len(one.bad_saves) + len(one.bad_loads)
        return {*one.taken.load_dst[one.bad_loads].tolist(), *self._list_copies(one, copies)}

    @staticmethod
    def _list_copies(one: InFlight, copies: list[int]) -> set[int]:
        return set(copies) - set(one.taken.load_dst.tolist()) if one.bad_loads else set()

    def list_slots(self, content: Content) -> list[int]:
        """Return the histories that a page with this content holds."""
        group_id, history = content
        group = self.groups[group_id]
        return self.histories.list_last(history, 1 if group.kind == "mamba" else group.page_size)

    def audit(self, manager: Any) -> None:
        """Compare the tier, when nothing is due, with the books, and its pages with what was computed."""
        entries = self.read_entries(manager.page_pool.store)
        require(entries == self.entries, "entries of the tier", entries, self.entries)
        for page_id, content in entries.items():
            self.host.compare_page(content[0], page_id, self.list_slots(content))
        numbers = [taken.number for taken in manager.list_transfers_in_flight()]
        require(numbers == [one.number for one in self.in_flight], "transfers in flight", numbers)

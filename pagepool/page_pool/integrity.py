"""Checks of a copy of a pool's records. Any number may have been overwritten, so its range is checked before its use."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool._core import CONSTANTS, PageStore, copy_records, find_policy_fault, follow
from pagepool.errors import IntegrityError

NOT_FREE, NO_GROUP, NOT_NEW, NOT_FIRST = CONSTANTS.NOT_FREE, CONSTANTS.NO_GROUP, CONSTANTS.NOT_NEW, CONSTANTS.NOT_FIRST
TWIN, GROUP, MAX_GROUP = CONSTANTS.TWIN, ~CONSTANTS.FLAGS, CONSTANTS.MAX_GROUP
BLANK, PART, NEVER, MAX_REF_CNT = CONSTANTS.BLANK, CONSTANTS.PART, CONSTANTS.NEVER, CONSTANTS.MAX_REF_CNT
SHARED, MAX_TENANTS, NO_TENANT = CONSTANTS.SHARED, CONSTANTS.MAX_TENANTS, CONSTANTS.NO_TENANT
MAX_IDLE = 1 << 31  # largest idle time, in ticks of stamps

Array = npt.NDArray[Any]


def check_store(store: PageStore) -> None:
    """Raise IntegrityError unless the invariants of the core's headers hold, also in the tier. O(num_pages)."""
    Records(store)
    if store.has_tier:
        try:
            Records(store, of_tier=True)
        except IntegrityError as error:
            raise IntegrityError(f"host tier: {error}") from None


class Records(SimpleNamespace):
    """A checked copy of the records of a pool or tier. Each check relies on the checks before it."""

    pages: Array
    page_tokens: Array

    def __init__(self, store: PageStore, *, of_tier: bool = False) -> None:
        """Copy and check the records. Raise IntegrityError if they are damaged. O(num_pages)."""
        super().__init__(store=store, **copy_records(store, of_tier=of_tier))
        self.check_pages()
        self.check_checkpoints()
        if len(self.terms):
            self.check_terms()
        if self.num_parts:
            self.check_parts()
        if len(self.tenants):
            self.check_tenants()
        self.check_slots()
        self.check_entries()
        if self.num_shards:
            self.check_shards()
        if len(self.notes):
            self.check_journal()
        if len(self.owners):
            self.check_sessions()
        fault = find_policy_fault(store, of_tier)
        if fault is not None:
            raise IntegrityError(fault)

    def describe(self, page_id: int) -> str:
        """Describe a page with all its numbers."""
        if page_id >= self.num_pages:
            return f"record {page_id}, the end of a queue or the start of a part"
        low, high, ref_cnt, before, behind, group = self.pages[page_id].tolist()
        entry = "not cached" if group == NO_GROUP else f"cached for group {group & GROUP} under 0x{high:016x}{low:016x}"
        return f"page {page_id} (ref count {ref_cnt}, free-queue links {before} and {behind}, {entry})"

    def refuse(self, is_wrong: Array, ids: Any, text: str, *columns: Any) -> None:
        """Raise IntegrityError for the first true entry of `is_wrong`, with its page in `ids` and its numbers in `columns`."""
        i = is_wrong.tobytes().find(1)  # many times faster than a reduction for few pages
        if i >= 0:
            values = [column if isinstance(column, int) else column[i] for column in columns]
            raise IntegrityError(("" if ids is None else self.describe(ids[i])) + text.format(*values))

    def require_count(self, found: Any, counted: Any, text: str) -> None:
        """Raise IntegrityError unless the pool's count equals the found one."""
        if found != counted:
            raise IntegrityError(f"{found} {text}, the pool counts {counted}")

    def walk(self, name: str, links: Array, first_ids: Any, ends: tuple[str, str] = ("prev", "next")) -> Array:
        """Return the ids in the rings that start at `first_ids`."""
        before, behind = (links[end].copy() for end in ends)
        ids, is_whole = follow(before, behind, first_ids)
        if not is_whole:
            last = ids[len(ids) - 1]
            raise IntegrityError(f"page {behind[last]} follows {self.describe(last)} in {name}, and does not link back")
        return ids.to_array()

    def require_order(self, name: str, links: Array, ids: Array, keys: Array) -> tuple[Array, Array]:
        """Check that the ids of each key form a ring in order. Return them, ring by ring, and which ones are first."""
        order = keys.argsort(kind="stable")
        ids, keys = ids[order], keys[order]
        is_first = np.concatenate((ids[:1] >= 0, keys[1:] != keys[:-1]))
        found = self.walk(name, links, ids[is_first])
        self.require_count(len(found), len(ids), f"ids are in {name}")
        self.refuse(found != ids, found, f" is among {name} in the place of page {{}}", ids)
        return ids, is_first

    def check_pages(self) -> None:
        """Check that each page is held, in the free queue or put away, and that the null page closes the queue."""
        links, num_pages, ids = self.pages, self.num_pages, range(self.num_pages)
        self.pages = pages = links[:num_pages]
        ref_cnt, before, behind, self.group = pages["ref_cnt"], pages["prev_free"], pages["next_free"], pages["group"].copy()
        is_free = (before >= 0) & (before < len(links)) & (behind >= 0) & (behind < len(links))
        is_held = (before == NOT_FREE) & (behind == NOT_FREE) & (ref_cnt >= 1) & (ref_cnt <= MAX_REF_CNT)
        is_retired = np.zeros(num_pages, dtype=bool)
        for _, stop, *_, num_retired in self.banks:
            is_retired[stop - num_retired : stop] = True
        self.is_put_away = is_retired & (ref_cnt == 0)
        is_wrong = ~(is_free | is_held | self.is_put_away) | (self.group < NO_GROUP)
        is_wrong[0] |= is_held[0] | (self.group[0] != NO_GROUP)
        self.refuse(is_free & (ref_cnt != 0), ids, " is in the free queue with ref count {}, allowed: 0", ref_cnt)
        is_used = (before != NOT_FREE) | (behind != NOT_FREE) | (self.group != NO_GROUP)
        self.refuse(self.is_put_away & is_used, ids, " is out of use, allowed: no entry, and links {}", NOT_FREE)
        text = ": allowed: links from 0 to {}, or 1 to {} references and links {}; groups up to {}; the null page is free"
        self.refuse(is_wrong, ids, text, len(links) - 1, MAX_REF_CNT, NOT_FREE, MAX_GROUP)
        queues = [self.walk("the free queue", links, [end], ("prev_free", "next_free"))[1:] for end in self.ends]
        if len(self.banks) > 1:
            self.check_banks(queues)
        self.queue = np.concatenate(queues)
        self.free_ids = self.queue[self.queue < num_pages]
        self.require_count(len(self.free_ids), self.num_free, f"pages are in the free queue, up to page {before[0]}")
        self.require_count(np.count_nonzero(is_free) - 1, self.num_free, "pages have links of the free queue")
        self.require_count(0, self.num_held_free, "free pages have references")

    def check_banks(self, queues: list[Array]) -> None:
        """Check that banks follow one another, that each has its free and its cached pages, and the sums of their counters."""
        starts, stops, num_free, num_entries, num_allocated, num_evicted, *_ = zip(*self.banks, strict=True)
        self.require_count(sum(num_allocated), self.counters["num_allocated_pages"], "pages were handed out in the banks")
        self.require_count(sum(num_evicted), self.counters["num_evicted_pages"], "pages were evicted in the banks")
        self.require_count([1, *stops[:-1], self.num_pages], [*starts, stops[-1]], "are the bounds of banks")
        for queue, start, stop, free, entries in zip(queues, starts, stops, num_free, num_entries, strict=True):
            ids = queue[queue < self.num_pages]
            self.refuse(
                (ids < start) | (ids >= stop), ids, " is in the free queue of the bank of pages {} to {}", start, stop - 1
            )
            self.require_count(len(ids), free, f"pages of {start} to {stop - 1} are free")
            self.require_count(np.count_nonzero(self.group[start:stop] != NO_GROUP), entries, "of them are cached")

    def check_checkpoints(self) -> None:
        """Check that each class has as many cached checkpoints as it counts. Note the class of each page, 0 for most."""
        self.classes = np.zeros(self.num_pages, np.int64)
        for bank, (start, stop, *_) in enumerate(self.banks):
            notes = getattr(self, f"checkpoints_{bank}")
            if not len(notes):
                continue
            self.classes[start:stop] = numbers = notes["number"]
            counts, are_cached = getattr(self, f"classes_{bank}")["num"], self.group[start:stop] != NO_GROUP
            text = " is a checkpoint of class {}, allowed: 0 to {}"
            self.refuse(are_cached & (numbers >= len(counts)), range(start, stop), text, numbers, len(counts) - 1)
            found = np.bincount(numbers[are_cached], minlength=len(counts)).tolist()
            self.require_count(found, counts.tolist(), f"pages of {start} to {stop - 1} are checkpoints of the classes")

    def check_terms(self) -> None:
        """Check that only cached pages have terms, that no free page was released in the future, and that free pages of one
        term are in the order of their release.
        """
        is_wrong = (self.terms > NEVER) | (self.group == NO_GROUP) & (self.terms != 0)
        text = " has term {}, allowed: 0 unless it is cached, else up to {}"
        self.refuse(is_wrong, range(self.num_pages), text, self.terms, NEVER)
        stamps = self.stamps.take(self.free_ids)
        idle = (np.uint32(self.now % (1 << 32)) - stamps).astype(np.int64)
        self.refuse(idle > MAX_IDLE, self.free_ids, " is free since {}, it is {}", stamps, self.now)
        expected = self.terms.take(self.free_ids)
        num_free = np.bincount(expected, minlength=NEVER + 1)
        self.require_count([0, *num_free[1:].tolist()], self.num_free_by_term.tolist(), "free pages have terms")
        in_use = sum(1 << term for term in range(1, NEVER + 1) if num_free[term])
        self.require_count(in_use, self.free_terms, "is the set of terms of free pages")
        is_next = (self.queue[1:] < self.num_pages) & (self.queue[:-1] < self.num_pages)
        before, ids = self.queue[:-1][is_next], self.queue[1:][is_next]
        is_wrong = (self.stamps.take(ids) - self.stamps.take(before)).view(np.int32) < 0
        is_wrong &= (self.terms.take(ids) != 0) & (self.terms.take(ids) == self.terms.take(before))
        text = " is free since {}, and stands behind page {} of the same term, which is free since {}"
        self.refuse(is_wrong, ids, text, self.stamps.take(ids), before, self.stamps.take(before))

    def find_parts(self) -> Array:
        """Return the part of each free page: by its term, its mark, or its class if it is cached."""
        is_cached = self.group.take(self.free_ids) != NO_GROUP
        parts: Array = np.where(is_cached, 1 + self.classes.take(self.free_ids), BLANK)
        is_served = self.free_ids < len(self.marks)
        parts[is_served] = self.marks.take(self.free_ids[is_served]) & PART
        if len(self.terms):
            terms = self.terms.take(self.free_ids).astype(np.int64)
            parts = np.where(terms > 0, self.num_plain_parts + NEVER - terms, parts)
        if len(self.tenants):
            parts += np.where(parts == BLANK, 0, self.tenants.take(self.free_ids).astype(np.int64) * self.num_parts_each)
        return parts

    def check_parts(self) -> None:
        """Check that each part has its pages; pages without an entry belong to the blank part."""
        starts = self.queue[self.queue >= self.num_pages]
        expected = [
            self.num_pages + bank * (1 + self.num_parts) + part
            for bank in range(len(self.banks))
            for part in range(self.num_parts)
        ]
        self.require_count(starts.tolist(), expected, "begin the parts")
        parts = ((self.queue >= self.num_pages).cumsum() - 1)[self.queue < self.num_pages] % self.num_parts
        marked = self.find_parts()
        self.refuse(parts != marked, self.free_ids, " is in part {} of the free queue, and marked for part {}", parts, marked)
        is_wrong = (parts != BLANK) & (self.group.take(self.free_ids) == NO_GROUP)
        self.refuse(is_wrong, self.free_ids, f" is in part {{}} of the free queue, allowed without an entry: {BLANK}", parts)
        if len(self.marks):
            parts = parts[self.free_ids < len(self.marks)] % self.num_parts_each
            num_in_part = np.bincount(parts[parts <= PART], minlength=PART + 1).tolist()
            self.require_count(num_in_part, self.policy_counts[: PART + 1].tolist(), "pages are in the parts")

    def check_tenants(self) -> None:
        """Check that each page outside the blank part is charged to a tenant, and the counts of each tenant."""
        tenants, charged = self.tenants[1:], self.tenants[1:] != NO_TENANT
        is_blank = self.is_put_away.copy()
        is_blank[self.free_ids[self.find_parts() == BLANK]] = True
        is_wrong = np.where(is_blank[1:], charged, tenants >= MAX_TENANTS)
        text = " is charged to tenant {}, allowed: up to {}, or {} in the blank part or out of use"
        self.refuse(is_wrong, range(1, self.num_pages), text, tenants, MAX_TENANTS - 1, NO_TENANT)
        is_free = np.zeros(self.num_pages, dtype=bool)
        is_free[self.free_ids] = True
        for bank, (start, stop, *_) in enumerate(self.banks):
            where = slice(bank * MAX_TENANTS, (bank + 1) * MAX_TENANTS)
            tenants, charged = self.tenants[start:stop], self.tenants[start:stop] != NO_TENANT
            counts = np.bincount(tenants[charged], minlength=MAX_TENANTS).tolist()
            self.require_count(counts, self.num_charged[where].tolist(), f"pages of {start} to {stop - 1} are charged")
            counts = np.bincount(tenants[charged & is_free[start:stop]], minlength=MAX_TENANTS).tolist()
            self.require_count(counts, self.num_free_by_tenant[where].tolist(), "of them are free")

    def words_of(self, low: Array, groups: Array) -> Any:
        """Return the hashes of keys' lower halves with groups; the upper halves of these hashes are the tags of slots."""
        return (low ^ groups.astype(np.uint64) << np.uint64(40)) * np.uint64(self.multiplier)

    def has_key(self, page_ids: Array, low: Array, high: Array, groups: Array) -> Any:
        """Return whether cached pages have keys with these lower and upper halves, and these groups."""
        pages = self.pages.take(page_ids)
        is_same = (pages["group"] != NO_GROUP) & (pages["group"] & GROUP == groups & GROUP)
        return is_same & (pages["key_lo"] == low) & (pages["key_hi"] == high)

    def is_twin(self, page_ids: Array, others: Array) -> Any:
        """Return whether cached pages have the keys and groups of others."""
        pages = self.pages.take(others)
        return self.has_key(page_ids, pages["key_lo"], pages["key_hi"], pages["group"])

    def check_slots(self) -> None:
        """Check that each slot names a cached page whose key leads to the slot, and that keys are distinct."""
        slots, mask = self.slots["page_id"], len(self.slots) - 1
        places = slots.nonzero()[0]
        self.first_ids = ids = slots.take(places)
        text = "slot {} of the prefix index names page {}, allowed: 1 to {}, or 0"
        self.refuse((ids < 0) | (ids >= self.num_pages), None, text, places, ids, self.num_pages - 1)
        pages = self.pages.take(ids)
        pages["group"] &= GROUP
        words = self.words_of(pages["key_lo"], pages["group"])
        tags = (words >> np.uint64(32)).astype(np.int64)
        text = " is named by slot {} of the prefix index, "
        is_wrong = (self.group.take(ids) == NO_GROUP) | (self.slots["tag"].take(places) != tags)
        self.refuse(is_wrong, ids, text + "which is not its own", places)
        self.words = words ^ pages["key_hi"]
        ordered = np.sort(self.words)
        if True in (ordered[1:] == ordered[:-1]):
            is_again = np.ones(len(ids), dtype=bool)
            keys = np.column_stack((pages["key_lo"], pages["key_hi"], pages["group"].astype(np.uint64)))
            is_again[np.unique(keys, axis=0, return_index=True)[1]] = False
            self.refuse(is_again, ids, text + "and another slot has its hash", places)
        empties = (slots == 0).nonzero()[0]
        room = (places - empties.take(empties.searchsorted(places) - 1) if len(ids) else places) & mask
        self.refuse((places - (tags >> self.home_shift)) & mask >= room, ids, text + "where no look-up comes to", places)
        self.require_count(len(ids), self.num_keys, "keys are in the prefix index")

    def check_entries(self) -> None:
        """Check that each cached page is found under its key: first, or in the ring of the first page."""
        twins, is_alone = self.twins, self.group < TWIN
        if len(twins):
            twins["prev"][is_alone] = twins["next"][is_alone] = is_alone.nonzero()[0]
        self.cached_ids = ids = self.walk("the ring of equal content", twins, self.first_ids)
        self.cached = self.pages.take(ids)
        self.rings = np.bincount(self.first_ids, minlength=self.num_pages).take(ids).cumsum() - 1
        firsts = self.first_ids.take(self.rings)
        is_wrong = ~self.is_twin(ids, firsts) | ((twins["next"].take(ids) == ids) != is_alone.take(ids))
        self.refuse(is_wrong, ids, " is among the pages of equal content of page {}", firsts)
        is_lost = (self.group != NO_GROUP) & (np.bincount(ids, minlength=self.num_pages) == 0)
        for lost_id in is_lost.nonzero()[0][:1]:
            found = ids[self.is_twin(ids, lost_id)].tolist()
            raise IntegrityError(f"{self.describe(lost_id)}: look-ups of its hash find pages {found}, allowed: this one too")
        self.require_count(len(ids), self.num_entries, "pages are cached")
        self.page_tokens = self.page_tokens.reshape(self.num_pages, -1)
        if self.tokens_width:
            num_tokens, width = self.page_tokens[:, 0].take(ids), self.tokens_width
            text = " has {} token ids, allowed: 0 to {}"
            self.refuse((num_tokens < 0) | (num_tokens >= width), ids, text, num_tokens, width - 1)

    def check_shards(self) -> None:
        """Check that each shard has its free pages and its twins, in the pool's order, and the rings of first twins."""
        num_pages, n, links = self.num_pages, self.num_shards * len(self.banks), self.shard_links
        num_records = 1 + self.num_parts  # null page and starts of parts, per shard
        queues = self.find_shard_queues(np.arange(num_pages))
        records, counts = self.queue, np.where(self.queue < num_pages, 1, self.num_shards)
        records, copies = records.repeat(counts), np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        banks, parts = np.divmod(records - num_pages, num_records)  # only used for starts of parts
        copies += banks * self.num_shards
        shards = np.where(records < num_pages, queues.take(records, mode="clip"), copies)
        ids = np.where(records < num_pages, records, shards * num_records + parts + num_pages + 1).astype(np.int32)
        ends = np.arange(n, dtype=np.int32)
        shards, ids = np.concatenate((ends, shards)), np.concatenate((num_pages + ends * num_records, ids)).astype(np.int32)
        self.require_order("the free pages of its shard", links, ids, shards)
        counts, counted = np.bincount(shards) - num_records, self.shard_num_free
        self.refuse(counts != counted, None, "shard {} has {} free pages, the pool counts {}", range(n), counts, counted)
        is_twin = self.group.take(self.cached_ids) >= TWIN
        if not is_twin.any():
            return
        twins, firsts = self.shard_twins, self.shard_firsts
        keys = self.rings * n + queues.take(self.cached_ids)
        ids, is_first = self.require_order("the twins of its shard", twins, self.cached_ids[is_twin], keys[is_twin])
        first_ids = self.first_ids[self.group.take(self.first_ids) >= TWIN]
        heads = self.walk("the ring of the first in each shard", firsts, first_ids)
        rings = np.bincount(first_ids, minlength=num_pages).take(heads).cumsum() - 1
        is_wrong = ~self.is_twin(heads, first_ids.take(rings))
        self.refuse(is_wrong, heads, " is in the ring of the first in each shard of others")
        is_head, found = np.bincount(heads, minlength=num_pages).take(ids), firsts.take(ids)
        is_wrong = np.where(is_first, is_head == 0, (found["prev"] != NOT_FIRST) | (found["next"] != NOT_FIRST))
        text = " is linked to {} and {}, allowed: the ring of pages of equal content that are first in their shard, or {}"
        self.refuse(is_wrong, ids, text, found["prev"], found["next"], NOT_FIRST)

    def find_shard_queues(self, ids: Array) -> Array:
        """Return the number of the queue of each page's shard."""
        starts, stops = (np.array([bank[end] for bank in self.banks]) for end in (0, 1))
        banks = np.maximum(starts.searchsorted(ids, side="right") - 1, 0)
        sizes = (stops - starts + 1) // self.num_shards
        queues: Array = banks * self.num_shards + (ids - starts.take(banks) + 1) // sizes.take(banks)
        return queues

    def check_sessions(self) -> None:
        """Check that each session has the ring of its pages, that these are cached, and that shared pages are in no ring."""
        owners, sessions, numbers = self.owners, self.sessions, np.arange(len(self.sessions))
        least = SHARED - len(sessions) + 1
        is_wrong = (owners < least) | (owners >= len(sessions)) | (owners != 0) & (self.group == NO_GROUP)
        text = " has owner {}, allowed: 0 unless it is cached, else {} to {}"
        self.refuse(is_wrong, range(self.num_pages), text, owners, least, len(sessions) - 1)
        closed = np.bincount(SHARED - owners[owners < SHARED], minlength=len(sessions))
        counts, firsts, mains = np.bincount(owners[owners > 0], minlength=len(sessions)), sessions["first"], sessions["main"]
        is_wrong = (mains != numbers) & (mains != 0) & (mains.take(mains, mode="clip") != mains)
        is_wrong |= (closed != sessions["num_closed"]) | (mains != numbers) & (counts + closed > 0)
        text = "session {} leads to {}, and {} pages were its own, {} say so"
        self.refuse(is_wrong, None, text, numbers, mains, sessions["num_closed"], closed)
        is_wrong = (counts != sessions["num_pages"]) | (sessions["num_holders"] < 0) | ((firsts == 0) != (counts == 0))
        text = "session {} has {} pages, the first {}, and {} holders, {} pages say that they are its own"
        columns = range(len(sessions)), sessions["num_pages"], firsts, sessions["num_holders"], counts
        self.refuse(is_wrong, None, text, *columns)
        ids = self.walk("the pages of a session", self.owner_links, firsts[firsts > 0])
        found = owners.take(ids)
        expected = np.repeat(np.arange(len(sessions)), counts)
        self.require_count(len(ids), len(expected), "pages are in the rings of sessions")
        self.refuse(found != expected, ids, " is in the ring of session {}, its owner is {}", expected, found)
        num_live = np.count_nonzero((counts + sessions["num_holders"])[mains == numbers][1:])
        self.require_count(num_live, self.num_live, "sessions have pages or holders")

    def check_journal(self) -> None:
        """Check that each cached page has a place and a context in use, that new keys are in the index, and removed keys are
        not.
        """
        origins, links, ids = self.notes["origin"], self.notes["new"], self.cached_ids
        users, holders = self.contexts["num_users"], self.contexts["num_holders"]
        text = "context {} has {} users and {} holders, allowed: at least 0"
        self.refuse((users < 0) | (holders < 0), None, text, range(len(users)), users, holders)
        if users.sum(dtype=np.int64) < len(ids):
            raise IntegrityError(f"the contexts have {users.sum()} users, {len(ids)} pages are cached")
        places, contexts = origins["place"].take(ids), origins["context"].take(ids)
        text = " has place {} and context {}, allowed: at least 0, and 0 to {}"
        is_wrong = (places < 0) | (contexts < 0) | (contexts >= len(users))
        self.refuse(is_wrong, ids, text, places, contexts, len(users) - 1)
        ids = self.walk("the journal", links, [0])[1:]
        is_lost = np.bincount(self.first_ids, minlength=self.num_pages).take(ids) == 0
        self.refuse(is_lost, ids, " is in the journal, and no look-up finds it")
        self.require_count(len(ids), self.num_new, f"keys are in the journal, up to page {links['prev'][0]}")
        num_linked = np.count_nonzero((links["next"] != NOT_NEW) | (links["prev"] != NOT_NEW)) - 1
        self.require_count(num_linked, self.num_new, "pages have links of the journal")
        if not 0 <= self.num_removed <= (0 if self.is_cleared else self.num_pages - 1):
            raise IntegrityError(f"the journal counts {self.num_removed} keys that went, allowed: fewer than pages, or none")
        num_new = self.num_new if self.is_cleared else self.num_keys
        self.require_count(num_new, self.num_keys, "keys of the prefix index are new since all went")
        if len(self.words) and self.num_removed:
            removed, order = self.removed[: self.num_removed], self.words.argsort()
            low, high, groups = removed["key"]["lo"], removed["key"]["hi"], removed["group"]
            words = self.words_of(low, groups) ^ high
            found = self.first_ids.take(order.take(self.words.searchsorted(words, sorter=order), mode="clip"))
            is_wrong = self.has_key(found, low, high, groups) & (links["next"].take(found) == NOT_NEW)
            self.refuse(is_wrong, found, " is in the journal as gone")

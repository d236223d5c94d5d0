"""The simulation's own books: the holders of each page, the contents of the cached pages, and the prefix that must hit.

A page is known by its tokens, not by a hash. Which free page comes next is not predicted: a page that is handed out loses its
entry, whichever it is.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from contents_device import NOTHING, Content, find_first_read, find_unread_pages, require
from contents_request import Job, Write
from contents_tier import TierBooks
from pool_ranges import Shard
from ring_model import Rings
from settings import Group, NumPages, Setting

from pagepool._core import copy_records

NULL_PAGE = 0
LEADING = "full", "reference"  # kinds of which any leading pages hit
KEPT = 1 << 28  # flag of a page that stays when it leaves a window
STATE_STEP = 64  # tokens between those behind which a kernel has states, and before the end of a prompt where one is kept
STAYS = itertools.count(1)

FindKey = Callable[[Job, int], int]
"""Computes the key of a request's page that ends after a number of tokens."""


@dataclass
class Entry:
    """The content of a cached page, and the admission of the request that cached it."""

    content: Content
    stay: int


@dataclass
class Index:
    """Contents of the cached pages, and the pages of each content, the first to be cached first."""

    entries: dict[int, Entry] = field(default_factory=dict)
    pages: defaultdict[Content, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))

    def enter(self, page_id: int, content: Content, stay: int) -> None:
        self.entries[page_id] = Entry(content, stay)
        self.pages[content][page_id] = None

    def drop(self, page_id: int) -> None:
        entry = self.entries.pop(page_id, None)
        if entry is not None:
            del self.pages[entry.content][page_id]
            if not self.pages[entry.content]:
                del self.pages[entry.content]

    def find(self, content: Content, shard: range | Shard | None) -> int:
        """Return the page that was cached first with a content, the null page if there is none."""
        pages = self.pages.get(content, ())
        return next((page_id for page_id in pages if shard is None or page_id in shard), NULL_PAGE)

    def has(self, content: Content, shard: range | Shard | None) -> bool:
        return self.find(content, shard) != NULL_PAGE

    def content_of(self, page_id: int) -> Content | None:
        entry = self.entries.get(page_id)
        return entry and entry.content

    def copy(self) -> Index:
        copied = Index()
        for page_id, entry in self.entries.items():
            copied.enter(page_id, entry.content, entry.stay)
        return copied


class Books:
    """The pages of a pool, their holders and their contents, derived from returned ids and computed tokens."""

    def __init__(self, setting: Setting, num_pages: NumPages, store: Any = None, tier: TierBooks | None = None) -> None:
        self.setting = setting
        self.store = store  # asked where what the pool has dropped depends on the order of calls
        self.tier = tier
        self.groups: Sequence[Group] = setting.groups
        self.pools = setting.pools(num_pages)
        self.num_pages = self.pools.num_records
        self.holders: Counter[int] = Counter()
        self.leased: Counter[int] = Counter()
        self.retired: set[int] = set()  # pages at and above the sizes of pools
        self.own: set[int] = set()  # those to which the pool has a reference, besides holders
        self.index = Index()
        self.kept: set[int] = set()  # cached pages that must stay when they leave a window, at least
        self.prefers_held = False  # of pages with one content, a held one hits
        self.skipped: set[int] = set()  # pages that rows gave back in the call that is recorded
        self.reached: Collection[Content] = ()  # contents of the tier, while these hit too
        cached = [group for group in self.groups if not group.is_state]
        self.has_state = len(cached) < len(self.groups)  # rings are states, but for hits and where requests may go back
        self.hash_lookahead = setting.hash_lookahead
        self.may_hit = setting.enable_caching and (setting.writes_states or not setting.has_state)
        intervals = [group.interval for group in self.groups if group.interval and setting.writes_states]
        self.hit_step = math.lcm(*(group.page_size for group in cached), *(math.gcd(STATE_STEP, each) for each in intervals))
        self.state_ids = [i for i, group in enumerate(self.groups) if group.interval and self.may_hit]  # states that are kept
        self.windows = setting.windows
        if setting.enable_caching and setting.writes_states:
            self.windows = 0, min(intervals)
        self.due_writes: list[Write] = []  # planned, and not taken
        self.copies: dict[int, int] = {}  # pages of forks, and those that are copied there, until the copies are taken
        self.are_copies_due = False  # perhaps
        self.is_between = False  # moves are taken next for a fork, or for a call that was refused, and begin no step
        self.num_taken = 1  # lists of copies, and the one that is due
        kinds = dict.fromkeys(self._kind_of(group) for group in [*cached, *(self.groups[i] for i in self.state_ids)])
        self.kinds = sorted(kinds, key=lambda group: group.kind != "full")
        self.groups_of_kind = {
            kind: [i for i, group in enumerate(self.groups) if self._kind_of(group) == kind] for kind in kinds
        }

    @staticmethod
    def _kind_of(group: Group) -> Group:
        """Return a group that hits as this one does."""
        return Group("full", group.page_size) if group.kind in LEADING else group

    # Shards.

    def find_shard(self, hint: int | None) -> range | Shard | None:
        """Return the page ids that a hint allows; None means all."""
        return self.pools.shard_of_hint(hint, self.setting.data_parallel_size)

    @property
    def is_sharded(self) -> bool:
        return self.find_shard(0) is not None

    def find_shard_of(self, page_ids: Iterable[int], hint: int | None) -> range | Shard | None:
        """Return the shard of all the pages, otherwise the hinted one."""
        if not self.is_sharded:
            return None
        size = self.setting.data_parallel_size
        shards = {self.pools.shard_number(page_id, size) for page_id in page_ids if page_id != NULL_PAGE}
        return self.find_shard(shards.pop() if len(shards) == 1 else hint)

    # What must hit.

    def name(self, group_id: int, histories: Sequence[int], num_tokens: int) -> Content:
        """Return the content of a page, or state, that ends after so many tokens; one that is nowhere, if the lookahead is not
        among the histories.
        """
        return group_id, (*histories[num_tokens + self.hash_lookahead - 1 : num_tokens + self.hash_lookahead], NOTHING)[0]

    def list_known(self, job: Job, num_tokens: int) -> list[int]:
        """Return the histories of the first tokens of a job, and of their lookahead, as far as it is known."""
        return job.list_histories(min(num_tokens + self.hash_lookahead, job.num_tokens) if self.hash_lookahead else num_tokens)

    def find_hit_length(self, job: Job, shard: range | Shard | None, reached: Collection[Content] = ()) -> int:
        """Return the longest prefix, in tokens, from which a request can go on, one token being left to compute: all that
        the next token attends to is cached, or `reached` in the tier. With a reference window it ends with the prompt.
        """
        if not self.may_hit:
            return 0
        self.reached = reached
        num_tokens = min(job.prompt_end, job.num_tokens - max(1, self.hash_lookahead))
        length = max(0, self._floor(num_tokens))
        histories = self.list_known(job, length)
        if self.setting.drops_pages:
            for kind in self._list_attention():
                length = self._floor(self._find_eagle_length(kind, histories, length, shard))
        while length and not all(self._hits(kind, histories, length, shard) for kind in self.kinds):
            length -= self.hit_step
        return length

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self.hit_step * self.hit_step

    def _find_eagle_length(self, kind: Group, histories: Sequence[int], max_length: int, shard: range | Shard | None) -> int:
        """Return the longest hit followed by one more hit page, which the drafter has recomputed."""
        size = kind.page_size
        for length in range((max_length // size - 1) * size, 0, -size):
            behind = [self.name(group_id, histories, length + size) for group_id in self.groups_of_kind[kind]]
            if self._have(behind, shard) and self._hits(kind, histories, length, shard):
                return length
        return 0

    def _hits(self, kind: Group, histories: Sequence[int], length: int, shard: range | Shard | None) -> bool:
        """Whether everything that the token at `length` attends to is cached."""
        return self._have(self._list_read(kind, histories, length), shard)

    def _have(self, contents: Iterable[Content], shard: range | Shard | None) -> bool:
        return all(self.index.has(content, shard) or content in self.reached for content in contents)

    def _list_read(self, kind: Group, histories: Sequence[int], length: int) -> list[Content]:
        """Return the contents to which the token at `length` attends."""
        if kind.kind == "mamba":
            return [self.name(group_id, histories, length) for group_id in self.groups_of_kind[kind]]
        ends = range((self._find_first(kind, length) + 1) * kind.page_size, length + 1, kind.page_size)
        return [self.name(group_id, histories, end) for end in ends for group_id in self.groups_of_kind[kind]]

    def list_needed(self, job: Job, stop: int) -> list[Content]:
        """Return the contents of pages that a request needs which resumes at the last place up to `stop`. With eagle each kind
        also reads what it and the kinds after it drop behind that place.
        """
        length = self._find_boundary(min(stop, job.num_tokens)) if self.may_hit else 0
        histories, needed = self.list_known(job, min(stop, job.num_tokens)), []
        kinds = self._list_attention() if self.setting.drops_pages else []
        for kind in self.kinds if length > 0 else ():
            needed += self._list_read(kind, histories, length)
            behind = (len(kinds) - 1 - kinds.index(kind)) * self.hit_step + kind.page_size if kind in kinds else 0
            ends = range(length + kind.page_size, length + behind + 1, kind.page_size) if behind else ()
            needed += [self.name(group_id, histories, end) for end in ends for group_id in self.groups_of_kind[kind]]
        return needed

    def _list_attention(self) -> list[Group]:
        return [kind for kind in self.kinds if kind.kind != "mamba"]

    def _find_resumption(self, num_tokens: int) -> int:
        """Return where a request resumes that has so many first tokens of another, all of whose pages are cached."""
        for kind in self._list_attention() if self.setting.drops_pages else ():
            num_tokens = self._floor(max(0, num_tokens // kind.page_size - 1) * kind.page_size)
        return self._floor(max(0, num_tokens - self.hash_lookahead))

    def list_hits(self, job: Job, length: int) -> list[Content]:
        """Return the contents of all pages of a hit."""
        histories = self.list_known(job, length)
        return [content for kind in self.kinds if length for content in self._list_read(kind, histories, length)]

    def may_load(self, job: Job, length: int, shard: range | Shard | None, num_reserved: int) -> bool:
        """Whether enough pages are free to load what the pool lacks of a hit, and to take what it has."""
        banks = range(len(self.pools.ranges))
        ref_counts = [0, *(count for bank in banks for count in self.store.ref_counts(bank).tolist()[1:])]
        contents = self.list_hits(job, length)
        for pool, pages in enumerate(self.pools.ranges):
            unheld = [page_id for page_id in pages if ref_counts[page_id] == 0 and page_id not in self.retired]
            groups = self.pools.groups_of(pool)
            hits = [self._list_hit(content, shard) for content in contents if content[0] in groups]
            num_needed = sum(all(ref_counts[page_id] == 0 for page_id in page_ids) for page_ids in hits)
            num_here = sum(shard is None or page_id in shard for page_id in unheld)
            if num_needed and num_needed > min(len(unheld) - (0 if pool else num_reserved), num_here):
                return False
        return True

    def _list_hit(self, content: Content, shard: range | Shard | None) -> list[int]:
        """Return the pages that may hit: all with the content if the pool prefers held ones, else the first. The null page
        stands for one that is loaded.
        """
        pages = [page_id for page_id in self.index.pages.get(content, ()) if shard is None or page_id in shard]
        return (pages if self.prefers_held else pages[:1]) or [NULL_PAGE]

    # Allocation and release.

    def attach(self, job: Job, hits: Sequence[Sequence[int]], num_hit_tokens: int, shard: range | Shard | None) -> None:
        """Make hits the first pages of a request; they must be cached with its tokens."""
        histories = self.list_known(job, num_hit_tokens)
        job.stay, job.num_hit_tokens, job.num_drafted_tokens = next(STAYS), num_hit_tokens, num_hit_tokens
        job.boundaries = self.list_boundaries(job)
        job.rings = Rings((group.page_size, group.span) for group in self.groups if group.is_ring)
        job.rings.begin(num_hit_tokens)
        for group_id, (group, page_ids) in enumerate(zip(self.groups, hits, strict=True)):
            if group.is_state:
                require(not group.is_ring or num_hit_tokens % group.span == 0, "a hit needs a ring", job, num_hit_tokens)
                job.pages.append([])
                job.num_cached_pages.append(num_hit_tokens // self.hit_step)
                continue
            num_pages = num_hit_tokens // group.page_size
            require(len(page_ids) == num_pages, "hits of another length", job, group, list(page_ids), num_hit_tokens)
            first_read = find_first_read(group, num_hit_tokens)
            for page, page_id in enumerate(page_ids):
                if page_id == NULL_PAGE:
                    require((page + 1) * group.page_size <= first_read, "a hit lacks a page", job, group, page)
                    continue
                found, content = self.index.content_of(page_id), self.name(group_id, histories, (page + 1) * group.page_size)
                require(found == content, "a wrong hit", job, group, page, page_id, found)
                require(shard is None or page_id in shard, "a hit in another shard", job, page_id, shard)
                if self.prefers_held and not self.count_references(page_id):
                    others = [other for other in self.index.pages[content] if shard is None or other in shard]
                    held = [other for other in others if self.count_references(other)]
                    require(not held, "a free page hits beside a held one", job, page_id, held)
                self.holders[page_id] += 1
                if self.windows is not None and group.has_window:
                    self.kept.add(page_id)
            job.pages.append(list(page_ids))
            job.num_cached_pages.append(num_pages)
        if self.tier is not None:
            job.load_number = self.tier.find_load_number(chain(*hits))  # with states see `note_state_hits`

    def list_boundaries(self, job: Job) -> list[range]:
        """Return where others may resume a request that is admitted, at least; with states they do so at checkpoints."""
        if self.windows is None:
            return []
        slack, interval = self.windows
        uncertain = self.setting.drops_pages * self.hit_step  # with hardly more tokens the first kind drops a whole step
        uncertain *= any(kind.page_size < self.hit_step for kind in self._list_attention()[:1])
        slack = -(-slack // self.hit_step) * self.hit_step + uncertain
        num_prompt = max(0, job.num_tokens - STATE_STEP * bool(self.state_ids))
        ends = [self._find_boundary(num_tokens) for num_tokens in (num_prompt, *job.resume_at)]
        parts = [self._find_boundary(part) for part in (range(interval, job.num_tokens + 1, interval) if interval else ())]
        places = [range(max(0, end - slack), end + 1) for end in ends]
        job.ends, job.num_admitted_tokens = {*ends, *parts}, job.num_tokens
        return [*places, *(range(max(0, end - uncertain), end + 1) for end in parts)]

    def _find_boundary(self, num_tokens: int) -> int:
        """Return where a request resumes that shares so many tokens. The lookahead of a state comes with it."""
        return self._find_resumption(num_tokens + self.hash_lookahead * bool(self.state_ids))

    def take(self, job: Job, new_ids: Sequence[Sequence[int]], shard: range | Shard | None) -> None:
        """Give a request new pages, which must be free."""
        for pages, page_ids in zip(job.pages, new_ids, strict=True):
            for page_id in page_ids:
                self._claim(page_id, shard, job)
                job.last_taken = self.num_taken
            pages.extend(page_ids)

    def _claim(self, page_id: int, shard: range | Shard | None, job: Job | None) -> None:
        """Record that a page was handed out."""
        require(0 < page_id < self.num_pages, "no page", job, page_id)
        require(not self.holders[page_id], "a page is handed out that is held", job, page_id)
        require(page_id not in self.retired, "a page above the size is handed out", job, page_id)
        require(shard is None or page_id in shard, "a page of another shard", job, page_id, shard)
        content = self.index.content_of(page_id)
        self.drop(page_id)
        self.holders[page_id] = 1
        if content is not None and self.tier is not None:
            self.tier.note_eviction(page_id, content, not self.index.has(content, None))
        elif content is not None and not self.index.has(content, None):
            self._forget_checkpoints(content)

    def _forget_checkpoints(self, content: Content) -> None:
        """Drop the checkpoints in later pools that ended with an evicted page of full attention, if the pool did. Only a policy
        drops them.
        """
        groups = list(enumerate(zip(self.groups, self.pools.of_group, strict=True)))
        full = [i for i, (group, pool) in groups if group.kind in LEADING and pool == 0]
        if self.store.eviction == "adaptive" and full[:1] == [content[0]]:
            for state_group in [i for i, (group, pool) in groups if group.kind == "mamba" and pool > 0]:
                self._forget_equal((state_group, content[1]), False)

    def find_loads(self, job: Job, length: int, shard: range | Shard | None, own_ids: Collection[int]) -> None:
        """Record the pages that a look-up has taken to load a hit: those with new keys, except for a row's own."""
        assert self.tier is not None
        contents = set(self.list_hits(job, length))
        for page_id in range(1, self.num_pages):
            key = self.store.key_of(page_id)
            content = self.tier.keys.get(key)
            if key is None or page_id in own_ids or (content is not None and self.index.content_of(page_id) == content):
                continue
            require(content in contents and not self.index.has(content, shard), "a load of no use", job, page_id, content)
            self._claim(page_id, shard, job)
            self.index.enter(page_id, content, 0)
            self.tier.note_load(page_id, content)

    def require_shortage(self, job: Job, num_tokens: int, num_reserved: int, hint: int | None) -> None:
        """Raise if a request was refused although all of its pages, even if all were new, would fit."""
        shard = self.find_shard(hint)
        if shard is None and self.is_sharded:
            return  # the hits choose the shard
        if self.are_copies_due:
            return  # their sources are held
        most_held = max(0, len(self.state_ids) - 1)  # some checkpoints are held, some not
        rooms = []
        for pool, pages in enumerate(self.pools.ranges):
            ids, kept = self.pools.groups_of(pool), 0 if pool else num_reserved
            groups = [self.groups[i] for i in ids]
            num_pages = sum(1 if group.is_state else -(-num_tokens // group.page_size) for group in groups)
            num_pages += min(most_held, sum(i in self.state_ids for i in ids))
            free = [page_id for page_id in pages if not self.holders[page_id] and page_id not in self.retired]
            num_there = sum(shard is None or page_id in shard for page_id in free)
            rooms.append(
                (f"{num_pages} pages, {num_there} there, {kept} reserved", num_pages > num_there, num_pages + kept > len(free))
            )
        require(any(is_short or is_kept for _, is_short, is_kept in rooms), "refused, and there is room", job, rooms)

    def require_room(self, job: Job, num_tokens: int) -> None:
        """Raise unless the pages have a slot for each token."""
        for group, pages in zip(self.groups, job.pages, strict=True):
            room = len(pages) * group.page_size
            require(room >= num_tokens or (group.is_state and len(pages) == 1), "no slot", job, group, num_tokens)

    def skip(self, job: Job, held: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """Record which pages of a request the pool released; no coming token may need them."""
        for group_id, (group, pages, held_ids) in enumerate(zip(self.groups, job.pages, held, strict=True)):
            if pages == held_ids or group.is_state:
                continue
            require(len(pages) == len(held_ids), "a row of another length", job, group, pages, held_ids)
            unread = find_unread_pages(group, num_computed_tokens, job.prompt_end)
            for page, (page_id, held_id) in enumerate(zip(pages, held_ids, strict=True)):
                if page_id == held_id:
                    continue
                require(held_id == NULL_PAGE, "a row of other pages", job, group, pages, held_ids)
                require(page in unread, "a page was skipped too early", job, group, page)
                self._keep(job, group_id, page)
                self.let_go(page_id)
                self.skipped.add(page_id)  # it left the window of a fork, perhaps right after this call cached it
                pages[page] = NULL_PAGE

    def list_computed(self, job: Job) -> list[int]:
        """Return the pages of a request with computed tokens, other than states."""
        groups = [(group, pages) for group, pages in zip(self.groups, job.pages, strict=False) if not group.is_state]
        return [page_id for group, pages in groups for page_id in pages[: -(-job.num_computed_tokens // group.page_size)]]

    def count_references(self, page_id: int) -> int:
        """Count the references to a page, with the pool's own."""
        return self.holders[page_id] + (page_id in self.own)

    def let_go(self, page_id: int) -> None:
        if page_id != NULL_PAGE:
            require(self.holders[page_id] > 0, "a page is given back that is not held", page_id)
            self.holders[page_id] -= 1
            if self.windows is not None and not self.count_references(page_id):
                self._let_leave(page_id)

    def _let_leave(self, page_id: int) -> None:
        """Drop the entry of a page without holders, if the pool did: no request may resume with it. If the page was taken by
        the same call, it may have been evicted, and saved, before.
        """
        key, content = self.store.key_of(page_id), self.index.content_of(page_id)
        if content is not None and key is None and self.store.page(page_id).ref_cnt == 0:
            require(page_id not in self.kept, "a page is dropped with which a request may resume", page_id, content)
        if content is not None and (key is None or (self.tier is not None and self.tier.keys.get(key) != content)):
            self.drop(page_id)
            if self.tier is not None:
                self.tier.note_save(page_id, content)

    def drop(self, page_id: int) -> None:
        """Drop an entry."""
        self.index.drop(page_id)
        self.kept.discard(page_id)
        if self.tier is not None:
            self.tier.forget(page_id)

    def _keep(self, job: Job, group_id: int, page: int) -> None:
        """Record that a page must stay cached, if a request needs it which resumes at a boundary of a job, or up to the slack
        before. Junctions, ends of answers and leases may keep more.
        """
        group, page_id = self.groups[group_id], job.pages[group_id][page]
        if self.windows is None or not group.has_window or group.kind in LEADING or page_id not in self.index.entries:
            return
        eagle, kinds = self.setting.drops_pages, self._list_attention()
        num_behind = eagle * (len(kinds) - 1 - kinds.index(group)) * self.hit_step  # what kinds drop that are looked up later
        for ends in job.boundaries:
            stop = (ends[-1] + num_behind) // group.page_size + eagle
            if ends[-1] and self._find_first(group, ends[0]) <= page < stop:
                self.kept.add(page_id)

    def _find_first(self, group: Group, length: int) -> int:
        """Return the first page to which the token at `length` attends. Without eagle a window counts at least one page."""
        first = find_first_read(group, length) // group.page_size
        return min(first, length // group.page_size - 1) if group.kind == "sliding" and not self.setting.drops_pages else first

    def drop_everywhere(self, page_id: int) -> None:
        """Drop the entry of a page whose content is wrong, in the tier too."""
        content = self.index.content_of(page_id)
        self.drop(page_id)
        if content is not None and self.tier is not None:
            self.tier.drop(content)

    def is_cached(self, page_id: int) -> bool:
        """Whether the pool has an entry for a page."""
        return self.store.key_of(page_id) is not None

    def waits(self, job: Job) -> bool:
        """Whether hits of a request are loaded, so that nothing is cached behind them."""
        return self.tier is not None and self.tier.waits(job)

    def release(self, job: Job) -> None:
        """Give back all pages of a request."""
        for group_id, pages in enumerate(job.pages):
            for page in range(len(pages)):
                self._keep(job, group_id, page)
        for page_id in chain(*job.pages):
            self.copies.pop(page_id, None)
            self.let_go(page_id)
        job.pages, job.num_cached_pages = [], []

    # What is cached.

    def enter(
        self, job: Job, histories: Sequence[int], num_known_tokens: int | None = None, find_key: FindKey | None = None
    ) -> list[int]:
        """Cache the pages that tokens fill and whose lookahead is known, except those passed before, and of answers with a
        reference window; return those that were not cached.
        """
        entered: list[int] = []
        if self.hash_lookahead:
            histories = self.list_known(job, len(histories))[:num_known_tokens]
        num_tokens = min(len(histories) - self.hash_lookahead, job.prompt_end)
        if not self.setting.enable_caching or self.waits(job):
            return entered
        for group_id, (group, pages) in enumerate(zip(self.groups, job.pages, strict=True)):
            is_copied = self.hash_lookahead and job.forked_lists.get(group_id) == self.num_taken
            if group.is_state or is_copied:
                continue
            for page in range(job.num_cached_pages[group_id], min(num_tokens // group.page_size, len(pages))):
                content = self.name(group_id, histories, (page + 1) * group.page_size)
                found = self.index.content_of(pages[page])
                require(found in (None, content), "a page is cached with something else", job, pages[page])
                if pages[page] != NULL_PAGE and found is None:
                    key = find_key and (find_key(job, (page + 1) * group.page_size), group_id)
                    self.note_entry(pages[page], content, job, key)
                    entered.append(pages[page])
                job.num_cached_pages[group_id] = page + 1
        return entered

    def enter_first(
        self, job: Job, histories: Sequence[int], find_key: FindKey, num_known_tokens: int | None = None
    ) -> list[int]:
        """Cache pages as `enter` does, in a call in which some may leave a window, and be taken after it."""
        skipped, self.skipped = self.skipped, {page_id for pages in job.pages for page_id in pages}
        entered = self.enter(job, histories, num_known_tokens, find_key if self.tier is not None else None)
        self.skipped = skipped
        return entered

    def note_entry(self, page_id: int, content: Content, job: Job, entered_key: tuple[int, int] | None = None) -> None:
        """Record that a request has cached a page."""
        key = self.store.key_of(page_id) if self.tier is not None else None
        if entered_key is not None and key != entered_key:  # the page has left the request, and was evicted
            self.tier.keys.setdefault(entered_key, content)
            key = None
        if key is not None:
            self.tier.note_entry(page_id, key, content, not self.index.has(content, None))
        self.index.enter(page_id, content, job.stay)
        if self.windows is not None and self.groups[content[0]].has_window:
            group = copy_records(self.store, "pages")["pages"]["group"][page_id]
            require(not group & KEPT or page_id in self.skipped, "a page stays that left no window", job, page_id, content)

    def rewind(self, job: Job, num_computed_tokens: int) -> None:
        """Let pages be cached again whose tokens are computed again, including hits."""
        job.num_hit_tokens = min(job.num_hit_tokens, num_computed_tokens)
        self._lower_cached_pages(job, num_computed_tokens)

    def _lower_cached_pages(self, job: Job, num_computed_tokens: int, num_hit_tokens: int = 0) -> None:
        """Let pages of tokens be cached again, other than states that were hit, or are those of the job that was forked."""
        for group_id, group in enumerate(self.groups):
            is_state = group.is_state
            num_tokens = max(num_computed_tokens, num_hit_tokens) if is_state else num_computed_tokens
            num_pages = num_tokens // (self.hit_step if is_state else group.page_size)
            job.num_cached_pages[group_id] = min(job.num_cached_pages[group_id], num_pages)

    def forget(self, job: Job, num_computed_tokens: int) -> None:
        """Drop what the request cached, since it came, of tokens that were not computed. What others cached in its pages may be
        dropped too, as may its hits, and pages equal to one that fell out of a window: the pool tells.
        """
        for group_id, (group, pages, num_cached) in enumerate(zip(self.groups, job.pages, job.num_cached_pages, strict=True)):
            if group.is_ring:
                continue
            size = self.hit_step if group.kind == "mamba" else group.page_size
            own = range(max(num_computed_tokens, job.num_hit_tokens) // size, num_cached)
            for page in own if group.kind == "mamba" else range(num_computed_tokens // size, len(pages)):
                page_id = NULL_PAGE if group.kind == "mamba" else pages[page]
                entry = self.index.entries.get(page_id)
                if entry is not None and ((page in own and entry.stay == job.stay) or not self.is_cached(page_id)):
                    self.drop_everywhere(page_id)
                elif page_id == NULL_PAGE and (end := (page + 1) * size) + self.hash_lookahead <= job.num_tokens:
                    content = self.name(group_id, self.list_known(job, end), end)
                    self._forget_equal(content, page in own and group.kind != "mamba")
                    if self.tier is not None and group.kind == "mamba":  # whether it was hashed, the tier tells
                        self.tier.drop_perhaps(content, self.store)

    def _forget_equal(self, content: Content, is_own: bool) -> None:
        """Drop the pages of a content that the pool has dropped, whoever cached them."""
        for page_id in [page_id for page_id in self.index.pages.get(content, ()) if not self.is_cached(page_id)]:
            self.drop(page_id)
        if is_own and self.tier is not None:
            self.tier.drop(content)

    def cut(self, job: Job, num_tokens: int, num_computed_tokens: int, changed: int | None = None) -> int:
        """Cut a request's pages, and return the number of tokens that stay computed: pages held by others are left to them.
        Slots change from `changed` on.
        """
        changed = num_computed_tokens if changed is None else changed
        restart = self.find_restart(job, num_computed_tokens, changed)
        changed = min(changed, restart)
        job.num_hit_tokens = min(job.num_hit_tokens, restart)
        for group, pages in zip(self.groups, job.pages, strict=True):
            keep = self._count_kept(group, pages, changed, num_tokens)
            for page_id in pages[changed // self.find_size(group) :]:
                if self.count_references(page_id) == 1:
                    self.drop(page_id)
            for page_id in pages[keep:]:
                self.let_go(page_id)
            del pages[keep:]
        self.drop_writes(job, restart)
        self._lower_cached_pages(job, changed, restart)
        return restart

    def find_restart(self, job: Job, num_tokens: int, changed: int | None = None) -> int:
        """Return how many tokens, at most `num_tokens`, can stay computed: in each group up to the start of a page, or within
        one that nobody else holds.
        """
        before, restart = -1, num_tokens
        while before != restart:
            before = restart
            for group, pages in zip(self.groups, job.pages, strict=True):
                kept = self._count_kept(group, pages, restart if changed is None else min(changed, restart), restart)
                if kept < self.count_pages(group, restart):
                    restart = kept * self.find_size(group)
        return restart

    def _count_kept(self, group: Group, pages: Sequence[int], num_computed_tokens: int, num_tokens: int) -> int:
        """Return how many leading pages a request goes on with: none to which it writes and which others hold, or behind it."""
        num_pages = self.count_pages(group, num_tokens)
        written = range(num_computed_tokens // self.find_size(group), min(num_pages, len(pages)))
        return next((page for page in written if self.count_references(pages[page]) > 1), num_pages)

    def drop_writes(self, job: Job, num_tokens: int) -> None:
        """Record that a job writes no states behind some tokens."""
        due = [write for write in self.due_writes if write.job is job]
        self.due_writes = [write for write in self.due_writes if write not in due]
        dropped = [write for write in job.writes if write.num_tokens > num_tokens]
        job.writes = [write for write in job.writes if write not in dropped]
        for write in due + dropped:
            self.let_go(write.page)

    # A step fails.

    def list_behind(self, job: Job, num_tokens: int) -> list[int]:
        """Return the pages of a request that its tokens from `num_tokens` on were to fill, other than states and hits."""
        pages = []
        for group, page_ids in zip(self.groups, job.pages, strict=True):
            first = max(num_tokens, 0) // group.page_size if not group.is_state else len(page_ids)
            pages += [page_id for page_id in page_ids[first:] if page_id != NULL_PAGE]
        return pages

    def find_first(self, job: Job, lost: Collection[int], start: int | None) -> int:
        """Return the first token of a page that was lost before a request's own step; the greatest number if there is none."""
        firsts = [sys.maxsize]
        for group, pages in zip(self.groups, job.pages, strict=True):
            stop = len(pages) if start is None else start // group.page_size
            firsts += [i * group.page_size for i, page_id in enumerate(pages[:stop]) if not group.is_state and page_id in lost]
        return min(firsts)

    def list_lost(self, works: Iterable[Any]) -> list[tuple[int, Content]]:
        """Return pages and contents of states that steps were to write and that were cached meanwhile."""
        writes = [(work.job, write) for work in works for write in work.writes if write.is_entered]
        return [
            (write.page, self.name(write.group, self.list_known(job, write.num_tokens), write.num_tokens))
            for job, write in writes
        ]

    def has_hit_state(self, job: Job, contents: Collection[Content]) -> bool:
        """Whether the state of a job came from a checkpoint with one of the contents."""
        num_hits = job.num_hit_tokens
        histories = self.list_known(job, num_hits)
        return num_hits > 0 and any(self.name(group_id, histories, num_hits) in contents for group_id in self.state_ids)

    def lose(self, lost: Collection[int], states: Collection[Content]) -> None:
        """Drop the entries of pages that a failed step was to fill; the states among them may be in the tier by now."""
        for content in states if self.tier is not None else ():
            self.tier.drop(content)
        for page_id in lost:
            require(
                page_id not in self.index.entries or not self.is_cached(page_id),
                "a page that was not filled is cached",
                page_id,
            )
            self.drop_everywhere(page_id)

    def set_back(self, job: Job, held: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """Record that a request goes back after a failed step, with the pages that it holds still."""
        for group_id, (group, pages, held_ids) in enumerate(zip(self.groups, job.pages, held, strict=True)):
            require(pages[: len(held_ids)] == list(held_ids), "a row that went back holds other pages", job, pages, held_ids)
            for page_id in pages[num_computed_tokens // self.find_size(group) :]:
                if page_id in self.index.entries and not self.is_cached(page_id):
                    self.drop(page_id)
            for page_id in pages[len(held_ids) :]:
                self.let_go(page_id)
            job.pages[group_id] = list(held_ids)
        self.drop_writes(job, num_computed_tokens)
        job.num_hit_tokens = min(job.num_hit_tokens, num_computed_tokens)
        self._lower_cached_pages(job, num_computed_tokens)

    @staticmethod
    def find_size(group: Group) -> int:
        """Return the number of tokens of a page; a state is one of all tokens."""
        return sys.maxsize if group.is_state else group.page_size

    def count_pages(self, group: Group, num_tokens: int) -> int:
        """Return the number of pages that tokens need."""
        return -(-num_tokens // self.find_size(group))

    def _give_back(self, job: Job, nums_kept: Sequence[int]) -> None:
        """Give back the last pages of each group."""
        for pages, num_kept in zip(job.pages, nums_kept, strict=True):
            for page_id in pages[num_kept:]:
                self.let_go(page_id)
            del pages[num_kept:]

    # Tokens from elsewhere.

    def commit(self, job: Job, num_computed_tokens: int) -> None:
        """Record that tokens came: pages that no later token attends to go without an entry, the others get one."""
        for group_id, (group, pages) in enumerate(zip(self.groups, job.pages, strict=True)):
            unread = range(0) if group.is_state else find_unread_pages(group, num_computed_tokens, job.prompt_end)
            for page in unread[: max(0, len(pages) - unread.start)]:
                self.let_go(pages[page])
                pages[page] = NULL_PAGE
            if unread.start == 0:
                job.num_cached_pages[group_id] = max(job.num_cached_pages[group_id], min(unread.stop, len(pages)))
        self.enter(job, job.list_histories(num_computed_tokens))

    def fail(self, job: Job, num_computed_tokens: int) -> None:
        """Record that no more than some tokens came."""
        self.drop_writes(job, num_computed_tokens)
        self.commit(job, num_computed_tokens)
        self._give_back(job, [self.count_pages(group, num_computed_tokens) for group in self.groups])
        self.rewind(job, num_computed_tokens)

    def reset(self) -> None:
        """Drop all that is cached."""
        self.index, self.kept = Index(), set()
        if self.tier is not None:
            self.tier.reset()

    @property
    def is_held(self) -> bool:
        return any(self.holders.values())

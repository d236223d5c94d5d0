"""The simulation's own books: the holders of each page, the contents of the cached pages, and the prefix that must hit.

A page is known by its tokens, not by a hash. Which free page comes next is not predicted: a page that is handed out loses its
entry, whichever it is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from contents_device import find_first_read, require
from contents_request import Job
from settings import Group, Setting

NULL_PAGE = 0
STAYS = itertools.count(1)

Content = tuple[int, int]
"""Group, and the history of a page's last token, which covers all tokens before it."""


@dataclass
class Entry:
    """The content of a cached page, and the admission of the request that cached it."""

    content: Content
    stay: int


@dataclass
class Index:
    """Contents of the cached pages, and the pages of each content."""

    entries: dict[int, Entry] = field(default_factory=dict)
    pages: defaultdict[Content, set[int]] = field(default_factory=lambda: defaultdict(set))

    def enter(self, page_id: int, content: Content, stay: int) -> None:
        self.entries[page_id] = Entry(content, stay)
        self.pages[content].add(page_id)

    def drop(self, page_id: int) -> None:
        entry = self.entries.pop(page_id, None)
        if entry is not None:
            self.pages[entry.content].remove(page_id)
            if not self.pages[entry.content]:
                del self.pages[entry.content]

    def has(self, content: Content, shard: range | None) -> bool:
        pages = self.pages.get(content, ())
        return bool(pages) if shard is None else any(page_id in shard for page_id in pages)

    def copy(self) -> Index:
        copied = Index()
        for page_id, entry in self.entries.items():
            copied.enter(page_id, entry.content, entry.stay)
        return copied


class Books:
    """The pages of a pool, their holders and their contents, derived from returned ids and computed tokens."""

    def __init__(self, setting: Setting, num_pages: int) -> None:
        self.setting = setting
        self.groups: Sequence[Group] = setting.groups
        self.num_pages = num_pages
        self.holders: Counter[int] = Counter()
        self.index = Index()
        cached = [group for group in self.groups if group.kind != "mamba"]
        self.has_state = len(cached) < len(self.groups)
        self.may_hit = setting.enable_caching and all(group.kind != "mamba" or group.interval for group in self.groups)
        intervals = [group.interval for group in self.groups if group.interval]
        self.hit_step = math.lcm(*(group.page_size for group in cached), *intervals)
        self.are_copies_due = False  # perhaps
        self.num_taken = 1  # lists of copies, and the one that is due
        kinds = dict.fromkeys([*cached, *(group for group in self.groups if group.interval)])
        self.kinds = sorted(kinds, key=lambda group: group.kind != "full")
        self.groups_of_kind = {kind: [i for i, group in enumerate(self.groups) if group == kind] for kind in kinds}

    # Shards.

    def find_shard(self, hint: int | None) -> range | None:
        """Return the page ids that a hint allows; None means all."""
        size = self.setting.data_parallel_size
        if hint is None or not size or size < 2 or self.num_pages % size:
            return None
        num_pages = self.num_pages // size
        shard = hint % size
        return range(shard * num_pages, (shard + 1) * num_pages)

    @property
    def is_sharded(self) -> bool:
        return self.find_shard(0) is not None

    def find_shard_of(self, page_ids: Iterable[int], hint: int | None) -> range | None:
        """Return the shard of all the pages, otherwise the hinted one."""
        if not self.is_sharded:
            return None
        num_pages = len(self.find_shard(0) or ())
        shards = {page_id // num_pages for page_id in page_ids if page_id != NULL_PAGE}
        return self.find_shard(shards.pop() if len(shards) == 1 else hint)

    # What must hit.

    def find_hit_length(self, job: Job, shard: range | None) -> int:
        """Return the longest prefix, in tokens, from which a request can go on, one token being left to compute: all that
        the next token attends to is cached.
        """
        if not self.may_hit:
            return 0
        length = self._floor(job.num_tokens - 1)
        histories = job.list_histories(length)
        if self.setting.use_eagle:
            for kind in [kind for kind in self.kinds if kind.kind != "mamba"]:
                length = self._floor(self._find_eagle_length(kind, histories, length, shard))
        while length and not all(self._hits(kind, histories, length, shard) for kind in self.kinds):
            length -= self.hit_step
        return length

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self.hit_step * self.hit_step

    def _find_eagle_length(self, kind: Group, histories: Sequence[int], max_length: int, shard: range | None) -> int:
        """Return the longest hit followed by one more hit page, which the drafter has recomputed."""
        size = kind.page_size
        for length in range((max_length // size - 1) * size, 0, -size):
            behind = self._is_cached(kind, histories, length // size, shard)
            if behind and self._hits(kind, histories, length, shard):
                return length
        return 0

    def _hits(self, kind: Group, histories: Sequence[int], length: int, shard: range | None) -> bool:
        """Whether everything that the token at `length` attends to is cached. Without eagle a window counts at least one
        page.
        """
        if kind.kind == "mamba":
            return all(self.index.has((group_id, histories[length - 1]), shard) for group_id in self.groups_of_kind[kind])
        first = find_first_read(kind, length) // kind.page_size
        if kind.kind == "sliding" and not self.setting.use_eagle:
            first = min(first, length // kind.page_size - 1)
        pages = range(first, length // kind.page_size)
        return all(self._is_cached(kind, histories, page, shard) for page in pages)

    def _is_cached(self, kind: Group, histories: Sequence[int], page: int, shard: range | None) -> bool:
        history = histories[(page + 1) * kind.page_size - 1]
        return all(self.index.has((group_id, history), shard) for group_id in self.groups_of_kind[kind])

    # Allocation and release.

    def attach(self, job: Job, hits: Sequence[Sequence[int]], num_hit_tokens: int, shard: range | None) -> None:
        """Make hits the first pages of a request; they must be cached with its tokens."""
        histories = job.list_histories(num_hit_tokens)
        job.stay, job.num_hit_tokens = next(STAYS), num_hit_tokens
        for group_id, (group, page_ids) in enumerate(zip(self.groups, hits, strict=True)):
            if group.kind == "mamba":
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
                entry = self.index.entries.get(page_id)
                content = group_id, histories[(page + 1) * group.page_size - 1]
                require(entry is not None and entry.content == content, "a wrong hit", job, group, page, page_id, entry)
                require(shard is None or page_id in shard, "a hit in another shard", job, page_id, shard)
                self.holders[page_id] += 1
            job.pages.append(list(page_ids))
            job.num_cached_pages.append(num_pages)

    def take(self, job: Job, new_ids: Sequence[Sequence[int]], shard: range | None) -> None:
        """Give a request new pages, which must be free."""
        for pages, page_ids in zip(job.pages, new_ids, strict=True):
            for page_id in page_ids:
                require(0 < page_id < self.num_pages, "no page", job, page_id)
                require(not self.holders[page_id], "a page is handed out that is held", job, page_id)
                require(shard is None or page_id in shard, "a page of another shard", job, page_id, shard)
                self.index.drop(page_id)
                self.holders[page_id] = 1
            pages.extend(page_ids)

    def require_shortage(self, job: Job, num_tokens: int, num_reserved: int, hint: int | None) -> None:
        """Raise if a request was refused although all of its pages, even if all were new, would fit."""
        shard = self.find_shard(hint)
        if shard is None and self.is_sharded:
            return  # the hits choose the shard
        if self.are_copies_due:
            return  # their sources are held
        num_pages = sum(1 if group.kind == "mamba" else -(-num_tokens // group.page_size) for group in self.groups)
        num_pages += max(0, sum(bool(group.interval) for group in self.groups) - 1)  # some checkpoints are held, some not
        free = [page_id for page_id in range(1, self.num_pages) if not self.holders[page_id]]
        num_there = sum(shard is None or page_id in shard for page_id in free)
        is_short = num_pages > num_there or num_pages + num_reserved > len(free)
        require(is_short, "refused, and there is room", job, f"{num_pages} pages, {num_there} there, {num_reserved} reserved")

    def require_room(self, job: Job, num_tokens: int) -> None:
        """Raise unless the pages have a slot for each token."""
        for group, pages in zip(self.groups, job.pages, strict=True):
            room = len(pages) * group.page_size
            require(room >= num_tokens or (group.kind == "mamba" and len(pages) == 1), "no slot", job, group, num_tokens)

    def skip(self, job: Job, held: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """Record which pages of a request the pool released; no coming token may need them."""
        for group, pages, held_ids in zip(self.groups, job.pages, held, strict=True):
            if pages == held_ids or group.kind == "mamba":
                continue
            require(len(pages) == len(held_ids), "a row of another length", job, group, pages, held_ids)
            first_read = find_first_read(group, num_computed_tokens)
            for page, (page_id, held_id) in enumerate(zip(pages, held_ids, strict=True)):
                if page_id == held_id:
                    continue
                require(held_id == NULL_PAGE, "a row of other pages", job, group, pages, held_ids)
                require((page + 1) * group.page_size <= first_read, "a page was skipped too early", job, group, page)
                self._let_go(page_id)
                pages[page] = NULL_PAGE

    def _let_go(self, page_id: int) -> None:
        if page_id != NULL_PAGE:
            require(self.holders[page_id] > 0, "a page is given back that is not held", page_id)
            self.holders[page_id] -= 1

    def release(self, job: Job) -> None:
        """Give back all pages of a request."""
        for pages in job.pages:
            for page_id in pages:
                self._let_go(page_id)
        job.pages, job.num_cached_pages = [], []

    # What is cached.

    def enter(self, job: Job, histories: Sequence[int]) -> list[int]:
        """Cache the pages that tokens fill, except those passed before; return those that were not cached."""
        entered: list[int] = []
        if not self.setting.enable_caching:
            return entered
        for group_id, (group, pages) in enumerate(zip(self.groups, job.pages, strict=True)):
            if group.kind == "mamba":
                continue
            for page in range(job.num_cached_pages[group_id], len(histories) // group.page_size):
                content = group_id, histories[(page + 1) * group.page_size - 1]
                entry = self.index.entries.get(pages[page])
                require(entry is None or entry.content == content, "a page is cached with something else", job, pages[page])
                if pages[page] != NULL_PAGE and entry is None:
                    self.index.enter(pages[page], content, job.stay)
                    entered.append(pages[page])
                job.num_cached_pages[group_id] = page + 1
        return entered

    def rewind(self, job: Job, num_computed_tokens: int) -> None:
        """Let pages be cached again whose tokens are computed again, including hits."""
        job.num_hit_tokens = min(job.num_hit_tokens, num_computed_tokens)
        self._lower_cached_pages(job, num_computed_tokens)

    def _lower_cached_pages(self, job: Job, num_computed_tokens: int) -> None:
        for group_id, group in enumerate(self.groups):
            num_pages = num_computed_tokens // (self.hit_step if group.kind == "mamba" else group.page_size)
            job.num_cached_pages[group_id] = min(job.num_cached_pages[group_id], num_pages)

    def forget(self, job: Job, num_computed_tokens: int, is_cached: Callable[[int], bool]) -> None:
        """Drop what the request cached, since it came, of tokens that were not computed. What others cached in its pages may be
        dropped too, as may its hits, and pages equal to one that fell out of a window: `is_cached` tells.
        """
        for group_id, (group, pages, num_cached) in enumerate(zip(self.groups, job.pages, job.num_cached_pages, strict=True)):
            if group.kind == "mamba":
                self._forget_states(job, group_id, num_computed_tokens, is_cached)
                continue
            for page in range(num_computed_tokens // group.page_size, len(pages)):
                entry = self.index.entries.get(pages[page])
                end = (page + 1) * group.page_size
                is_own = entry is not None and entry.stay == job.stay
                is_own = is_own and job.num_hit_tokens // group.page_size <= page < num_cached
                if entry is not None and (is_own or not is_cached(pages[page])):
                    self.index.drop(pages[page])
                elif pages[page] == NULL_PAGE and end <= job.num_tokens:
                    equal = self.index.pages.get((group_id, job.list_histories(end)[-1]), set())
                    for page_id in [page_id for page_id in equal if not is_cached(page_id)]:
                        self.index.drop(page_id)

    def _forget_states(self, job: Job, group_id: int, num_computed_tokens: int, is_cached: Callable[[int], bool]) -> None:
        """Drop the checkpoints after tokens that were not computed, of whoever made them."""
        first = max(num_computed_tokens, job.num_hit_tokens) // self.hit_step
        for end in range(first + 1, job.num_cached_pages[group_id] + 1):
            equal = self.index.pages.get((group_id, job.list_histories(end * self.hit_step)[-1]), set())
            for page_id in [page_id for page_id in equal if not is_cached(page_id)]:
                self.index.drop(page_id)

    def cut(self, job: Job, num_tokens: int) -> int:
        """Cut a request's pages, and return the number of tokens that stay computed: a page held by others is left to them."""
        cuts = [
            num_tokens // group.page_size * group.page_size
            for group, pages in zip(self.groups, job.pages, strict=True)
            if self._is_shared(pages[num_tokens // group.page_size : -(-num_tokens // group.page_size)])
        ]
        restart = min(job.num_computed_tokens, num_tokens, *cuts)
        job.num_hit_tokens = min(job.num_hit_tokens, num_tokens)
        for group_id, (group, pages) in enumerate(zip(self.groups, job.pages, strict=True)):
            first, stop = num_tokens // group.page_size, -(-num_tokens // group.page_size)
            if group.kind == "mamba":
                first = stop = min(1, num_tokens)
            keep = first if self._is_shared(pages[first:stop]) else stop
            for page_id in pages[first:]:
                if self.holders[page_id] == 1:
                    self.index.drop(page_id)
            for page_id in pages[keep:]:
                self._let_go(page_id)
            del pages[keep:]
            size = self.hit_step if group.kind == "mamba" else group.page_size
            job.num_cached_pages[group_id] = min(job.num_cached_pages[group_id], restart // size)
        return restart

    def _is_shared(self, page_ids: Sequence[int]) -> bool:
        return any(page_id != NULL_PAGE and self.holders[page_id] > 1 for page_id in page_ids)

    def undo(self, job: Job, num_computed_tokens: int, num_pages: Sequence[int], is_cached: Callable[[int], bool]) -> None:
        """Undo a step of a request: the entries that it made, and the pages that it took."""
        self.forget(job, num_computed_tokens, is_cached)
        self._lower_cached_pages(job, num_computed_tokens)
        for pages, num_kept in zip(job.pages, num_pages, strict=True):
            for page_id in pages[num_kept:]:
                self._let_go(page_id)
            del pages[num_kept:]

    def reset(self) -> None:
        """Drop all that is cached."""
        self.index = Index()

    @property
    def is_held(self) -> bool:
        return any(self.holders.values())

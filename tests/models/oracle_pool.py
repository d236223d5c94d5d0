"""The plain-Python twin of the pool, which the oracle's manager allocates from.

Errors are the builtin ones that the package's own exceptions derive from.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oracle_checkpoints import ANSWER_END, LEFT, New, OracleCheckpoints
from oracle_expected import NEVER, UNKNOWN, Expectations
from oracle_sizes import Sizes
from oracle_tenants import NOBODY, Holder, Supply, Tenants

if TYPE_CHECKING:
    from eviction_oracle import Adaptive
    from oracle_tier import OracleTier

NULL_PAGE = 0

PageIds = list[int]


def shard_of_hint(num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> range | None:
    """Return the page ids of the hinted shard, or None if the pool is not sharded."""
    if dp_shard_hint is None or not is_sharded(num_pages, data_parallel_size):
        return None
    size = num_pages // data_parallel_size
    shard = dp_shard_hint % data_parallel_size
    return range(shard * size, (shard + 1) * size)


def is_sharded(num_pages: int, data_parallel_size: int | None) -> bool:
    """Whether the pages divide evenly among more than one shard."""
    return data_parallel_size is not None and data_parallel_size > 1 and num_pages % data_parallel_size == 0


@dataclass
class Ranking:
    """How far a policy knows the pages that a request computes in a group, and the keys since then that it does not know."""

    num_ranked: int = 0
    num_unseen: int = 0


class OraclePool:
    """Ref counts in a list, the free queue in an OrderedDict, the prefix index in a dict of dicts.

    With a `policy`, which serves the first pool by kind, the free queue is in the order in which pages were put there, and
    `free_page_ids` is part by part.
    """

    def __init__(
        self, num_pages: int, enable_caching: bool, policy: Adaptive | None = None, ranges: Sequence[range] = ()
    ) -> None:
        self.num_pages = num_pages
        self.ranges = ranges or (range(1, num_pages),)  # pages of each pool by kind
        self.enable_caching = enable_caching
        self.ref_counts = [0] * num_pages
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self.index: dict[tuple[int, int], dict[int, str | None]] = {}  # pages, and the session that entered each
        self.prefers_held = False  # whether of pages with one content held ones come before free ones
        self.entry_of_page: dict[int, tuple[int, int]] = {}
        self.expected = Expectations(self)
        self.tenants = Tenants(self)
        self.sizes = Sizes(self)
        self.kept: set[int] = set()  # cached pages that stay when they leave a window
        self.counts: Counter[str] = Counter()
        self.taken: Counter[int] = Counter()  # by page, how often it was handed out
        self.evicted: Counter[int] = Counter()
        self.carrier = -1  # group of full attention without whose last page checkpoints lose their entries
        self.state_groups: Sequence[int] = ()  # groups of these checkpoints
        self.has_blank_first = False  # whether pages without an entry go first, also without a policy and expectations
        self.checkpoints = OracleCheckpoints(self)
        self.key_of: Callable[[int], int] = int  # the 128 bits of a content
        self.policy = policy if enable_caching else None
        self.tier: OracleTier | None = None
        if self.policy is not None:
            self.policy.start(self)

    @property
    def usage(self) -> float:
        return 1.0 - len(self.free_queue) / (self.num_pages - len(self.sizes.retired))

    def free_page_ids(self, shard: range | None = None) -> PageIds:
        """List the free pages (of a shard) in the order of allocation; with a policy part by part."""
        return sorted(self.free_in(shard), key=self.part_of)

    def free_in(self, shard: range | None) -> PageIds:
        """List the free pages (of a shard), the one that came to the queue first before the others."""
        return [page for page in self.free_queue if shard is None or page in shard]

    def range_around(self, shard: range | None) -> range:
        """Return the pages of the pool by kind that has the pages of a shard: of the only one, if there are shards."""
        return next((pages for pages in self.ranges if shard and shard[-1] in pages), self.ranges[0])

    def part_of(self, page: int) -> tuple[int, int, int]:
        """The part of the queue that a free page is in: for each tenant those of the policy, and then those of terms, the
        longest first; for blank pages the first of all.
        """
        tenant = 0 if self.is_blank(page) else self.tenants.numbers[self.tenants.of_page.get(page)]
        if page in self.expected.terms:
            return tenant, 1, -self.expected.terms[page]
        if self.is_served(page):
            return tenant, 0, self.policy.marks[page].part
        if self.is_blank(page):
            return tenant, 0, 0
        return tenant, 0, 1 + self.checkpoints.class_of(page) if self.is_divided else 0

    def is_served(self, page: int) -> bool:
        """Whether a policy ranks a page."""
        return self.policy is not None and page < self.ranges[0].stop

    @property
    def num_free_for_policy(self) -> int:
        """The number of free pages that a policy ranks."""
        return len(self.free_in(self.ranges[0]))

    @property
    def is_divided(self) -> bool:
        """Whether blank pages are apart."""
        return self.has_blank_first or self.expected.are_used or self.policy is not None

    def is_blank(self, page: int) -> bool:
        """Whether a page is evicted before others, unless it is held."""
        if page in self.expected.terms:
            return False
        return self.policy.is_blank(page) if self.is_served(page) else page not in self.entry_of_page

    def get_new_pages(
        self, num_pages: int, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> PageIds:
        """Take pages from the front of the queue (of the hinted shard) and evict their prefix entries."""
        pages = self.take(num_pages, shard_of_hint(self.num_pages, dp_shard_hint, data_parallel_size))
        self.note_request()
        return pages

    def note_request(self) -> None:
        """Tell the policy that a request has taken its first pages."""
        if self.policy is not None:
            self.policy.num_requests += 1

    def take(self, num_pages: int, shard: range | None, holder: Holder = NOBODY) -> PageIds:
        """Take pages from the front of the queue (of the shard) for a holder and evict their prefix entries."""
        pages = self._pop(num_pages, shard, holder)
        for page in pages:
            self._claim(page)
        return pages

    def take_page(self, page: int, holder: Holder) -> None:
        """Take a free page, whichever it is, and evict its prefix entry."""
        self.remove(page)
        self.tenants.charge(page, self.tenants.tenant_of(holder))
        self._claim(page)

    def _claim(self, page: int) -> None:
        """Evict the prefix entry of a page that was taken out of the queue."""
        self.ref_counts[page] = 1
        if self.is_served(page):
            self.policy.note_taken(page)
            self._drop_checkpoints_behind(page)
        ranks = self.checkpoints.ranks_of(page) if page in self.entry_of_page else None
        is_left = ranks is not None and ranks.notes[page].number == LEFT
        if self.tier is not None and page in self.entry_of_page and self.expected.terms.get(page) != NEVER and not is_left:
            self.tier.note_evicted(page)
        if page in self.entry_of_page:
            self.evict(page)
        self.counts["allocated"] += 1
        self.taken[page] += 1

    def evict(self, page: int) -> None:
        """Drop the prefix entry of a page that is evicted."""
        ranks = self.checkpoints.ranks_of(page)
        if ranks is not None:
            ranks.note_evicted(page)
        self.drop_entries([page])
        self.counts["evicted"] += 1
        self.evicted[page] += 1

    def _drop_checkpoints_behind(self, page: int) -> None:
        """Drop the entries of checkpoints that nobody holds, if a page is the last one with the keys and values before them."""
        content, group_id = self.entry_of_page.get(page, (-1, -2))
        if group_id != self.carrier or len(self.index[content, group_id]) > 1 or self.tier is not None:
            return
        for state_group in self.state_groups:
            for state in list(self.index.get((content, state_group), {})):
                if state not in self.free_queue:
                    break
                ranks = self.checkpoints.ranks_of(state)
                if ranks is not None:
                    ranks.note_dropped(state)
                self.drop_entries([state])
                self.counts["checkpoints without keys and values"] += 1

    def _pop(self, num_pages: int, shard: range | None, holder: Holder | None = None) -> PageIds:
        """Take pages out of the queue (of the shard): the first, or those that the policy picks one by one. They are charged to
        the holder, if there is one.
        """
        supply = Supply(self.tenants.tenant_of(holder or NOBODY), 0)
        pages = self.free_page_ids(shard)[:num_pages]
        if len(pages) < num_pages:
            raise ValueError(f"{num_pages} pages wanted, {len(pages)} are free")
        for i in range(num_pages):
            if self.policy is not None or self.expected.are_used or self.checkpoints.ranks:
                supply.num_left = num_pages - i if holder is not None else 0
                pages[i] = self.expected.pick(shard, supply)
            del self.free_queue[pages[i]]
            if holder is not None:
                self.tenants.charge(pages[i], supply.taker)
        return pages

    def popleft_n(self, num_pages: int) -> PageIds:
        """Take pages out of the queue as they are."""
        return self._pop(num_pages, None)

    def remove(self, page: int) -> None:
        """Take any page out of the queue as it is."""
        if page not in self.free_queue:
            raise IndexError(f"page {page} is not in the free queue")
        del self.free_queue[page]

    def append_n(self, pages: Sequence[int]) -> None:
        """Put pages that were taken out of the queue as they are to its back."""
        if len(set(pages)) < len(pages) or any(
            page == NULL_PAGE or page in self.free_queue or self.ref_counts[page] for page in pages
        ):
            raise IndexError(f"one of {pages} is free, held, the null page, or there twice")
        for page in pages:
            self._push(page)

    def _push(self, page: int) -> None:
        self.free_queue[page] = None
        self.expected.note_queued(page)
        if self.is_served(page):
            self.policy.note_queued(page)
        self.tenants.note_queued(page)

    def touch(self, pages_by_group: Iterable[PageIds], is_use: bool = True) -> None:
        """Add a reference to each page; a free one leaves the queue. A use ends what was said of it."""
        touched = [page for pages in pages_by_group for page in pages if page != NULL_PAGE]
        if any(self.ref_counts[page] == 0 and page not in self.free_queue for page in touched):
            raise IndexError(f"one of {touched} is not held, and not in the free queue")
        for page in touched:
            is_free = page in self.free_queue
            self.free_queue.pop(page, None)
            if is_free:
                self._come_forward(page)
            if self.is_served(page):
                self.policy.note_hit(page, is_free)
            if is_use:
                self.expected.end(page, is_used=True)
            self.ref_counts[page] += 1

    def free_pages(self, pages: Sequence[int], is_counted: bool = True, terms: Sequence[int] = ()) -> None:
        """Drop a reference of each page but the null page; pages without references go to the queue's back, in this order, with
        the terms at the same places.
        """
        held = [page for page in pages if page != NULL_PAGE]
        if any(self.ref_counts[page] < held.count(page) for page in held):
            raise RuntimeError(f"a page of {pages} is freed more often than it is held")
        freed = {}
        for page, term in zip(pages, terms or [UNKNOWN] * len(pages), strict=True):
            self.ref_counts[page] -= page != NULL_PAGE
            if page != NULL_PAGE and self.ref_counts[page] == 0:
                freed[page] = term
                self._go_back(page)
        if is_counted:
            self._count(list(freed), self.num_free_for_policy)
        for page, term in freed.items():
            if term != UNKNOWN:
                self.expected.expect(page, term)
            self._push(page)
        self.counts["freed"] += len(freed)

    def _come_forward(self, page: int) -> None:
        """Let a held page come before free ones with its content: behind the first, unless that is free."""
        pages = self.index.get(self.entry_of_page.get(page, (-1, -1)), {})
        others = [other for other in pages if other != page]
        if self.prefers_held and others and next(iter(pages)) != page and page not in self.free_queue:
            place = 0 if others[0] in self.free_queue else 1
            self.index[self.entry_of_page[page]] = {each: pages[each] for each in (*others[:place], page, *others[place:])}

    def _go_back(self, page: int) -> None:
        """Let a page that was given back go behind the others with its content."""
        entry = self.entry_of_page.get(page)
        if self.prefers_held and entry is not None:
            self.index[entry][page] = self.index[entry].pop(page)

    def _count(self, pages: Sequence[int], num_free: int) -> None:
        """Tell a policy of a call that puts pages into the queue beside others; blank ones do not count."""
        if self.policy is not None:
            num_pages = sum(self.is_served(page) and not self.policy.is_blank(page) for page in pages)
            if num_pages:
                self.policy.note_release(num_pages, num_free)

    def count_left(self, pages: Sequence[int]) -> None:
        """Tell a policy of pages that have left a window; those without holders are in the queue by now."""
        queued = [page for page in pages if page in self.free_queue]
        if self.policy is not None:
            num_counted = sum(self.is_served(page) and not self.policy.is_blank(page) for page in queued)
            self._count(queued, self.num_free_for_policy - num_counted)

    def keep(self, page: int) -> None:
        """Let a page stay cached when it leaves a window."""
        if page in self.entry_of_page:
            self.kept.add(page)

    def is_worthless(self, page: int) -> bool:
        """Whether a page that leaves a window is not to stay cached without holders."""
        return page not in self.kept

    def give_back(self, pages: Sequence[int], worthless: Sequence[int], terms: Sequence[int] = ()) -> None:
        """Free pages, and others that lose their entry with their last reference, and are taken first then; not one whose last
        reference is that of a row which has not computed it.
        """
        worthless = [page for page in worthless if page != NULL_PAGE]
        if any(self.ref_counts[page] < worthless.count(page) for page in worthless):
            raise RuntimeError(f"a page of {worthless} is freed more often than it is held")
        for page in worthless:
            self.ref_counts[page] -= 1
        self.free_pages(pages, terms=terms)
        for page in dict.fromkeys(worthless):
            if self.ref_counts[page] == 0 and page not in self.free_queue:
                self.drop_entries([page])
                self._push(page)
                self.free_queue.move_to_end(page, last=False)
                self.counts["freed"] += 1
                self.counts["discarded"] += 1

    def take_out(self, page: int) -> None:
        """Take any page out of the queue for a while."""
        if self.is_served(page):
            self.policy.note_left(page)
        self.remove(page)

    def put_to_the_end(self, page: int) -> None:
        """Put a page that was taken out of the queue as it is to its back, as one that was just given back."""
        self._count([page], self.num_free_for_policy)
        self._push(page)

    def skip_page(self, page: int, is_needed: bool) -> None:
        """Free a page that has left an attention window. Where no hit needs it, a policy evicts it as if it had no entry."""
        if self.is_served(page) and not is_needed:
            self.policy.note_useless(page)
        self.free_pages([page], is_counted=False)

    def get_cached_page(
        self,
        key: int,
        group_ids: Sequence[int],
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> PageIds | None:
        """Return one page for each group, the one entered first (in the shard); None if a group has none."""
        shard = shard_of_hint(self.num_pages, dp_shard_hint, data_parallel_size)
        pages = [self.first_entered(key, group_id, shard) for group_id in group_ids]
        return None if None in pages else pages

    def first_entered(self, key: int, group_id: int, shard: range | None) -> int | None:
        """Return the first page with this content, or None."""
        pages = self.index.get((key, group_id), {})
        return next((page for page in pages if shard is None or page in shard), None)

    def cache_full_pages(
        self,
        pages: PageIds,
        keys: Sequence[int] | dict[int, int],
        num_cached_pages: int,
        num_full_pages: int,
        group_id: int,
        ranking: Ranking | None = None,
        session: str | None = None,
        checkpoint: New | None = None,
    ) -> None:
        """Enter pages [num_cached_pages, num_full_pages) under their contents, except null pages."""
        new = [i for i in range(num_cached_pages, num_full_pages) if pages[i] != NULL_PAGE]
        if any(pages[i] in self.entry_of_page for i in new) or len({pages[i] for i in new}) < len(new):
            raise RuntimeError("a page has an entry already")
        ranking = ranking or Ranking(num_cached_pages)
        for i in new:
            is_missed = (keys[i], group_id) not in self.index
            self.index.setdefault((keys[i], group_id), {})[pages[i]] = session
            self.entry_of_page[pages[i]] = (keys[i], group_id)
            if any(page in self.free_queue for page in self.index[keys[i], group_id]):
                self._come_forward(pages[i])
            self.checkpoints.note_entered(pages[i], pages[i - 1] if i else NULL_PAGE, keys[i], checkpoint)
            if self.tier is not None and not (checkpoint is not None and checkpoint.kind == ANSWER_END):
                self.tier.note_cached(pages[i])
            if not self.is_served(pages[i]) and self.is_divided and pages[i] in self.free_queue:
                self.take_out(pages[i])
                self._push(pages[i])
            if self.is_served(pages[i]):
                self.policy.note_entered(pages[i])
                if is_missed:
                    self.policy.rank(ranking, pages, i)
        self.counts["cached"] += len(new)

    def evict_pages(self, pages: Iterable[int]) -> int:
        """Drop the prefix entries of pages with a wrong content, in order, in the tier too, and return how many had one."""
        num_dropped = 0
        for page in pages:
            entry = self.entry_of_page.get(page)
            num_dropped += self.drop_entries([page])
            if self.tier is not None and entry is not None:
                self.tier.drop(entry)
        return num_dropped

    def drop_entries(self, pages: Iterable[int]) -> int:
        """Drop the prefix entries of the pages, in order, and return how many had one."""
        num_dropped = 0
        for page in pages:
            entry = self.entry_of_page.pop(page, None)
            if entry is None:
                continue
            num_dropped += 1
            self.kept.discard(page)
            ranks = self.checkpoints.ranks_of(page)
            if ranks is not None:
                ranks.end(page)
            del self.index[entry][page]
            if not self.index[entry]:
                del self.index[entry]
            if page in self.free_queue and self.is_divided and (not self.is_served(page) or page in self.expected.terms):
                self.free_queue.move_to_end(page)
                self.expected.stamps[page] = self.expected.now
            self.expected.end(page, is_used=False)
            self.expected.leave(page)
            if self.is_served(page):
                self.policy.note_dropped(page)
            if page in self.free_queue:
                self.tenants.note_queued(page)
        return num_dropped

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, unless a page is held. The queue keeps its order."""
        if any(page not in self.free_queue and page not in self.sizes.retired for page in range(1, self.num_pages)):
            return False
        if any(map(self.sizes.is_held, self.sizes.retired)):
            return False
        self.free_queue = OrderedDict.fromkeys(self.free_page_ids())
        self.drop_entries([*self.free_queue, *sorted(self.entry_of_page)])
        for ranks in self.checkpoints.ranks:
            ranks.forget_evicted()
        if self.tier is not None:
            self.tier.drop_all()
        return True

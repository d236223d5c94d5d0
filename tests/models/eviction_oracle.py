"""The plain-Python twin of adaptive eviction, for an `OraclePool`, written only to be obviously correct.

The pool's free queue is in the order in which pages were put there. The policy divides it into parts by a mark that it keeps of
each page; a part has its pages in the order of the queue. It counts what happened, so that tests know what they have reached.
Sums of floats are in the order of the core, so that they are equal to the last bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pool_ranges import NULL_PAGE

if TYPE_CHECKING:
    from oracle_pool import OraclePool, PageIds, Ranking

BLANK, NEW, AGAIN, LATE = range(4)
MAX_UNSEEN = 4
SET_SIZE = SAMPLE_INTERVAL = 8
WORD = (1 << 64) - 1
PRIMES = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93


class Mark(NamedTuple):
    """The part of a free page and when it was put there, or the part that a held page will be put into."""

    part: int
    epoch: int = 0
    call: int = 0  # of its epoch


class Memory(NamedTuple):
    """A page that was evicted."""

    tag: int
    mark: Mark


def hash_key(key: int, group_id: int) -> int:
    """Return the hash of 64 bits that the policy knows a key of 128 bits by."""
    word = key & WORD ^ (key >> 64) * PRIMES[0] & WORD ^ (group_id + 1) * PRIMES[1] & WORD
    for _ in range(2):
        word = (word ^ word >> 32) * PRIMES[2] & WORD
    return word ^ word >> 32


class Ghost:
    """What is remembered of evicted pages, an eighth of six pools' pages, in sets of eight that each lose the first that came.
    Forgotten ones leave gaps.
    """

    def __init__(self, num_pages: int) -> None:
        num_sets = 1 + int(6 * num_pages / SAMPLE_INTERVAL / SET_SIZE)
        self.sets: list[list[Memory | None]] = [[None] * SET_SIZE for _ in range(num_sets)]

    def is_sampled(self, word: int) -> bool:
        return word % SAMPLE_INTERVAL == 0

    def _place(self, word: int) -> tuple[int, list[Memory | None]]:
        tag = word >> 32 or 1
        return tag, self.sets[tag * len(self.sets) >> 32]

    def add(self, word: int, mark: Mark) -> None:
        """Remember a page, once; else the first gap of its set closes, or the page that was remembered first is lost."""
        tag, memories = self._place(word)
        tags = [0 if memory is None else memory.tag for memory in memories]
        memories.pop(next((tags.index(each) for each in (tag, 0) if each in tags), -1))
        memories.insert(0, Memory(tag, mark))

    def pop(self, word: int) -> Mark | None:
        """Forget the page with a hash; None if it is not remembered."""
        tag, memories = self._place(word)
        for i, memory in enumerate(memories):
            if memory is not None and memory.tag == tag:
                memories[i] = None
                return memory.mark
        return None


EDGES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]  # epochs
HORIZON = EDGES[-1]
AGES = range(len(EDGES) - 1)
CLASSES = NEW, AGAIN, LATE


class Decision(NamedTuple):
    """Which pages are evicted: those with a mark, the oldest of their part, or the first of the newest call."""

    shard: range | None
    is_newest: bool
    mark: Mark


class Adaptive:
    """Learns at which ages pages are used again, and evicts from the ends of the parts what is worth least. Pages without an
    entry are in the blank part, others in that which their mark names.
    """

    pool: OraclePool

    def __init__(self, num_pages: int) -> None:
        self.ghost = Ghost(num_pages)
        self.key_of: Callable[[int], int] = int  # the 128 bits of a content
        self.marks = [Mark(BLANK)] * num_pages
        self.num_requests = 0
        self.num_shared_hits = self.num_free_hits = self.num_lru_hits = 0
        self.counts: Counter[str] = Counter()
        self.num_pages = num_pages
        self.epoch_pages = max(16, num_pages // 16)
        self.num_released = self.epoch = self.call = 0
        self.num_requests_then = 0  # at the last tick
        self.alive: Mapping[int, defaultdict[int, int]] = {c: defaultdict(int) for c in CLASSES}  # by epoch
        self.exposed = {c: [0.0 for _ in AGES] for c in CLASSES}
        self.reused = {c: [0.0 for _ in AGES] for c in CLASSES}
        self.lru_age = HORIZON
        self.regret = self.pause = self.paused_until = 0
        self.decision: Decision | None = None
        self.tenant: str | None = None  # of whom the next page is
        self.values = self._rate()

    def start(self, pool: OraclePool) -> None:
        """Begin with a pool whose pages are all free."""
        self.pool = pool

    # the queue

    def pages_in(self, part: int, shard: range | None = None) -> PageIds:
        """List the free pages without a term in a part, of the tenant that was chosen (and of a shard)."""
        terms, of_page = self.pool.expected.terms, self.pool.tenants.of_page
        free = [page for page in self.pool.free_in(shard) if self.pool.is_served(page)]
        pages = [page for page in free if self.marks[page].part == part and page not in terms]
        return [page for page in pages if of_page.get(page) == self.tenant]

    def order(self) -> PageIds:
        return [page for part in (BLANK, NEW, AGAIN, LATE) for page in self.pages_in(part)]

    def note_queued(self, page: int) -> None:
        """A page has come to the end of the queue."""
        part = self.marks[page].part if page in self.pool.entry_of_page else BLANK
        self.marks[page] = Mark(BLANK) if part == BLANK else self.stamp(part)

    def note_entered(self, page: int) -> None:
        """A page has got an entry; one that is free, or was when it was taken out of the queue, becomes a new one."""
        if self.marks[page].part == BLANK:
            self.marks[page] = Mark(NEW)
            if page in self.pool.free_queue:
                self._queue_again(page)

    def note_dropped(self, page: int) -> None:
        """A page has lost its entry; a free one is blank from now on."""
        if page in self.pool.free_queue and self.marks[page].part != BLANK:
            self.note_loss(self.marks[page])
            self._queue_again(page)

    def note_left(self, page: int) -> None:
        """A free page is about to leave the queue for a while."""
        if self.marks[page].part != BLANK:
            self.note_loss(self.marks[page])

    def _queue_again(self, page: int) -> None:
        self.pool.free_queue.move_to_end(page)
        self.pool.expected.stamps[page] = self.pool.expected.now
        self.note_queued(page)

    def is_blank(self, page: int) -> bool:
        """Whether a page that comes to the queue comes to the blank part."""
        return page not in self.pool.entry_of_page or self.marks[page].part == BLANK

    def pass_part(self, pages: Iterable[int], part: int | None) -> None:
        """Let new pages of a request that goes on with a known one go where those go."""
        for page in pages if part not in (None, BLANK) else ():
            if page != NULL_PAGE and self.pool.is_served(page) and self.marks[page].part == NEW:
                self.marks[page] = Mark(part)
                self.counts["pages of known requests"] += part != NEW

    def note_useless(self, page: int) -> None:
        """A page is about to be freed that no hit can need."""
        if self.pool.ref_counts[page] == 1:
            self.counts["useless pages"] += 1
            self.marks[page] = Mark(BLANK)

    def note_taken(self, page: int) -> None:
        """A page that was picked loses its entry, if it has one, and is new."""
        entry = self.pool.entry_of_page.get(page)
        if entry is not None and self.marks[page].part != BLANK:
            content, group_id = entry
            word = hash_key(self.key_of(content), group_id)
            has_twins = len(self.pool.index[entry]) > 1
            self.counts["twins evicted"] += has_twins
            if self.ghost.is_sampled(word) and not has_twins:
                self.ghost.add(word, self.marks[page])
                self.counts["remembered"] += 1
        self.marks[page] = Mark(NEW)

    def rank(self, ranking: Ranking, pages: PageIds, place: int) -> None:
        """A request has computed the page at `place` of its pages, whose key was not cached. If the policy knows the key, the
        pages since the last that it knew go where this one goes. After a few keys that it does not know the rest is new.
        """
        content, group_id = self.pool.entry_of_page[pages[place]]
        word = hash_key(self.key_of(content), group_id)
        if ranking.num_unseen == MAX_UNSEEN or not self.ghost.is_sampled(word):
            return
        part = self.note_miss(word)
        if part is None:
            ranking.num_unseen += 1
            self.counts["rests of requests that are new"] += ranking.num_unseen == MAX_UNSEEN
            return
        for page in pages[ranking.num_ranked : place + 1]:
            if page != NULL_PAGE and page not in self.pool.free_queue:
                self.marks[page] = Mark(part)
        ranking.num_ranked, ranking.num_unseen = place + 1, 0

    # learning

    def note_release(self, num_pages: int, num_free: int) -> None:
        """A call puts pages into the queue that are not blank, beside others."""
        self.num_released += num_pages
        self.call += 1
        num_epochs = self.num_released // self.epoch_pages - self.epoch
        if num_epochs:
            self._tick(num_epochs, num_free + num_pages)

    def _tick(self, num_epochs: int, num_free: int) -> None:
        self.call, self.decision = 0, None
        for _ in range(num_epochs):
            self.epoch += 1
            for c in CLASSES:
                for age in AGES[1:]:
                    self.exposed[c][age] += max(0, self.alive[c][self.epoch - EDGES[age]])
        self._decay(num_epochs)
        self.values = self._rate()
        self.lru_age = self._find_lru_age(num_free)
        if 12 * self.regret > self.num_pages:
            self.pause = min(max(2, 2 * self.pause), 64)
            self.paused_until = self.num_released + self.pause * self.num_pages
            self.regret = 0
            self.counts["pauses"] += 1

    def _decay(self, num_epochs: int) -> None:
        num_requests = self.num_requests - self.num_requests_then
        share = 2.0 ** -min(num_epochs / 64, num_requests / 512)
        for counts in (*self.exposed.values(), *self.reused.values()):
            counts[:] = [count * share for count in counts]
        self.num_requests_then = self.num_requests

    def _rate(self) -> dict[int, list[float]]:
        """Return the value of each age of each class: the best hits for each page and time that waiting from there on gives."""
        weight = 4 * self.num_released / max(1, self.num_requests) if self.num_released else 1.0
        prior: list[float] = []
        for age in AGES:
            num_reused, num_exposed = (self._sum(counts, age) for counts in (self.reused, self.exposed))
            before = prior[-1] if prior else 6 / 100
            prior.append(min(1.0, (num_reused + weight * before) / (num_exposed + weight)))
        hazards = {
            c: [min(1.0, (self.reused[c][age] + weight * prior[age]) / (self.exposed[c][age] + weight)) for age in AGES]
            for c in CLASSES
        }
        return {c: [self._best_rate(hazards[c], age) for age in AGES] for c in CLASSES}

    def _sum(self, counts: dict[int, list[float]], age: int) -> float:
        total = 0.0
        for c in CLASSES:
            total += counts[c][age]
        return total

    def _best_rate(self, hazards: list[float], start: int) -> float:
        hits, time, surviving = 0.0, 0.0, 1.0
        rates = []
        for age in AGES[start:]:
            hits += surviving * hazards[age]
            time += surviving * (EDGES[age + 1] - EDGES[age]) * (1 - hazards[age] / 2)
            surviving *= 1 - hazards[age]
            rates.append(hits / time)
        return max(rates)

    def _find_lru_age(self, num_free: int) -> int:
        """Return the age in epochs at which LRU would have lost a page: so many were released since, and not used."""
        count = 0
        for age in range(min(HORIZON, self.epoch + 1)):
            count += sum(self.alive[c][self.epoch - age] for c in CLASSES)
            if count > num_free:
                return age
        return min(HORIZON, self.epoch + 1)

    def stamp(self, part: int) -> Mark:
        """Return the mark of a page that comes to a part now."""
        self.exposed[part][0] += 1
        self.alive[part][self.epoch] += 1
        return Mark(part, self.epoch, self.call)

    def note_loss(self, mark: Mark) -> None:
        """A free page with this mark has lost its entry, and was not evicted."""
        if self.epoch - mark.epoch < HORIZON:
            self.alive[mark.part][mark.epoch] -= 1

    def _use(self, mark: Mark, weight: int, is_hit: bool) -> int:
        """Count that a page with this mark was used again, and return the part that it belongs to now."""
        age = self.epoch - mark.epoch
        is_in_time = age < self.lru_age
        self.num_lru_hits += weight * is_in_time
        self.regret = max(0, self.regret + weight * (is_in_time - is_hit))
        if age < HORIZON:
            self.reused[mark.part][self._bucket(age)] += weight
            self.alive[mark.part][mark.epoch] -= weight
        self.counts[f"{'hits' if is_hit else 'misses'} {'in time' if is_in_time else 'late'}"] += 1
        self.counts["used again beyond the horizon"] += age >= HORIZON
        return AGAIN if is_in_time else LATE

    def note_hit(self, page: int, was_free: bool) -> None:
        """A page that was hit has one more holder."""
        mark = self.marks[page]
        self.num_shared_hits += not was_free
        self.num_free_hits += was_free
        self.marks[page] = Mark(AGAIN)
        if was_free:
            self.decision = None
            if mark.part != BLANK:
                self.marks[page] = Mark(self._use(mark, 1, True))

    def note_miss(self, word: int) -> int | None:
        """A sampled key was computed. Return the part for its page, or None if the policy does not know the key."""
        mark = self.ghost.pop(word)
        return None if mark is None else self._use(mark, SAMPLE_INTERVAL, False)

    # choosing

    def _bucket(self, age: int) -> int:
        return min(bisect_right(EDGES, age), len(AGES)) - 1

    def _value(self, page: int) -> float:
        mark = self.marks[page]
        return self.values[mark.part][self._bucket(self.epoch - mark.epoch)]

    def _candidate(self, decision: Decision, shard: range | None) -> int | None:
        pages = self.pages_in(decision.mark.part, shard)
        if not pages:
            return None
        if not decision.is_newest:
            return pages[0]
        return next(page for page in pages if self.marks[page] == self.marks[pages[-1]])

    def _decide(self, shard: range | None) -> Decision:
        """Choose the oldest page, as LRU does, or of the ends of all parts the first that is worth least, if clearly less."""
        parts = [pages for c in CLASSES if (pages := self.pages_in(c, shard))]
        oldest = min((pages[0] for pages in parts), key=lambda page: self.marks[page][1:])
        choice, is_newest, least = oldest, False, self._value(oldest) * 70 / 100
        is_paused = self.num_released < self.paused_until
        self.counts["decisions in a pause"] += is_paused
        for pages in () if is_paused else parts:
            for end in (0, -1):
                if self._value(pages[end]) < least:
                    choice, is_newest, least = pages[end], end == -1, self._value(pages[end])
        return Decision(shard, is_newest, self.marks[choice])

    def pick(self, shard: range | None, tenant: str | None) -> int:
        """Return the next page of a tenant to evict (from a shard), which has pages that are not blank."""
        self.decision = self.decision if tenant == self.tenant else None
        self.tenant = tenant
        page = None
        if self.decision is not None and self.decision.shard == shard:
            page = self._candidate(self.decision, shard)
        if page is None or self.decision is None or self.marks[page] != self.decision.mark:
            self.decision = self._decide(shard)
            page = self._candidate(self.decision, shard)
        assert page is not None
        oldest = min(self.order()[::-1], key=lambda page: self.marks[page][1:])
        self.counts["evicted from a newest end"] += self.decision.is_newest
        self.counts["evicted before older pages"] += self.marks[page][1:] != self.marks[oldest][1:]
        return page


def make_policy(name: str, num_pages: int) -> Adaptive | None:
    """Return the twin of the policy that `PagePool` knows by this name; None for the order of release."""
    return Adaptive(num_pages) if name == "adaptive" else None

"""The oracle's checkpoints of states in pools of their own: their classes, and how runs go on from cached pages.

Which checkpoint is evicted first, and whether answers get one, is written here once more, only to be obviously correct. Sums
of floats are the core's to the last bit as long as no count is longer than 53 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from eviction_oracle import SET_SIZE, hash_key

if TYPE_CHECKING:
    from oracle_pool import OraclePool, PageIds

NULL_PAGE = 0
RECENT, LEFT, LONE, OF_ANSWER, OUTDONE = CLASSES = range(5)
COUNTED = -1  # class of an evicted checkpoint whose loss was counted
PROMPT_END, JUNCTION, ANSWER_END, LONE_PLACE = 1, 2, 4, 8  # kinds are sets of these
MAX_CONTINUED = 2
MAX_STEPS = 64  # along a run


@dataclass
class Note:
    """A cached checkpoint; `before` is the page and content of the one before it in its run."""

    number: int  # its class
    kind: int
    num_tokens: int
    stamp: int
    before: tuple[int, int] | None = None
    tokens_before: int = 0
    num_continued: int = 0


@dataclass
class Lineage:
    """The checkpoint from which a run continues, or the last that it made: page, content and tokens."""

    last: tuple[int, int] | None = None
    num_tokens: int = 0
    is_source: bool = False

    def for_fork(self) -> Lineage:
        return Lineage(self.last, self.num_tokens, True)


class New(NamedTuple):
    """A checkpoint that a run makes."""

    lineage: Lineage
    num_tokens: int
    kind: int
    is_replacing: bool = False


class PrefixEnd(NamedTuple):
    """What is behind the hit of a look-up."""

    junction: int = 0
    has_parted: bool = False
    is_run_end: bool = False
    num_lost: int = 0
    lost_content: int = -1


@dataclass
class Counts:
    """Counts of a class."""

    num: int = 0
    since: int = 0
    residency: float = 0
    num_hit_tokens: float = 0


@dataclass
class Memory:
    """An evicted checkpoint; one that went with its keys and values has no class."""

    tag: int
    number: int | None
    is_prompt_end: bool
    eviction: int


class Ranks:
    """The checkpoints in one pool."""

    def __init__(self, pool: OraclePool, pages: range) -> None:
        self.pool, self.pages = pool, pages
        self.notes: dict[int, Note] = {}
        self.counts = [Counts() for _ in CLASSES]
        self.now = self.halved_at = self.num_evicted = self.num_requests = 0
        self.gained = self.spared = 0.0
        self.sets: list[list[Memory | None]] = [[None] * SET_SIZE for _ in range(1 + 2 * len(pages) // SET_SIZE)]

    @property
    def num(self) -> int:
        return sum(counts.num for counts in self.counts)

    def _update(self, number: int) -> Counts:
        counts = self.counts[number]
        counts.residency += counts.num * (self.now - counts.since)
        counts.since = self.now
        return counts

    def _tick(self) -> int:
        self.now += 1
        if self.now - self.halved_at >= 16 * max(1, self.num):
            self.halved_at = self.now
            for number in CLASSES:
                counts = self._update(number)
                counts.residency /= 2
                counts.num_hit_tokens /= 2
        return self.now

    def begin(self, page: int, new: New | None) -> None:
        """A page gets an entry."""
        stamp = self.now if new is not None and new.is_replacing else self._tick()
        note = Note(RECENT, 0, 0, stamp)
        if new is not None:
            number = {LONE_PLACE: LONE, ANSWER_END: OF_ANSWER}.get(new.kind, RECENT)
            note = Note(number, new.kind, new.num_tokens, stamp)
            if new.lineage.num_tokens < new.num_tokens:
                note.before, note.tokens_before = new.lineage.last, new.lineage.num_tokens
        self.notes[page] = note
        self._update(note.number).num += 1

    def end(self, page: int) -> None:
        """A page loses its entry."""
        self._update(self.notes.pop(page).number).num -= 1

    def _move(self, page: int, number: int) -> None:
        """Move a checkpoint to the back of a class."""
        is_free = page in self.pool.free_queue
        if is_free:
            self.pool.take_out(page)
        self._update(self.notes[page].number).num -= 1
        self.notes[page].number = number
        self._update(number).num += 1
        if is_free:
            self.pool._push(page)

    # victims

    def _density(self, number: int) -> float:
        weight, prior = max(1.0, self.num * self.num / 100), 0.0
        if number in (RECENT, OF_ANSWER):
            others = [self._update(other) for other in CLASSES if other != LEFT]
            num_hit_tokens, residency = (
                sum(getattr(counts, name) for counts in others) for name in ("num_hit_tokens", "residency")
            )
            prior = (num_hit_tokens + 1e-9) / (residency + 1e-9)
        counts = self._update(number)
        return (counts.num_hit_tokens + weight * prior) / (counts.residency + weight)

    def _waiting(self, page: int) -> float:
        note = self.notes[page]
        return (self.now - note.stamp + 0.5) / (self._density(note.number) + 1e-12)

    def pick(self, pages: PageIds) -> int:
        """Return which of some free checkpoints is evicted first."""
        oldest = {self.notes[page].number: page for page in reversed(pages)}
        return max((oldest[number] for number in CLASSES if number in oldest), key=self._waiting)

    # ghosts

    def _find(self, content: int, group_id: int) -> Memory | None:
        word = hash_key(self.pool.key_of(content), group_id)
        tag = word >> 32 or 1
        return next((each for each in self.sets[tag * len(self.sets) >> 32] if each is not None and each.tag == tag), None)

    def _remember(self, content: int, group_id: int, note: Note | None) -> None:
        tag = hash_key(self.pool.key_of(content), group_id) >> 32 or 1
        memories = self.sets[tag * len(self.sets) >> 32]
        tags = [0 if memory is None else memory.tag for memory in memories]
        memories.pop(next((tags.index(each) for each in (tag, 0) if each in tags), -1))
        is_prompt_end = note is not None and bool(note.kind & PROMPT_END)
        memories.insert(0, Memory(tag, note and note.number, is_prompt_end, self.num_evicted))

    def note_evicted(self, page: int) -> None:
        """A checkpoint is about to be evicted."""
        content, group_id = self.pool.entry_of_page[page]
        self.num_evicted += 1
        self.pool.counts[f"evicted of class {self.notes[page].number}"] += 1
        if len(self.pool.index[content, group_id]) == 1:
            self._remember(content, group_id, self.notes[page])

    def note_dropped(self, page: int) -> None:
        """A checkpoint is about to lose its entry, since its keys and values did."""
        self._remember(*self.pool.entry_of_page[page], None)

    def has_evicted(self, content: int, group_id: int) -> bool:
        """Whether a checkpoint was evicted a while ago."""
        memory = self._find(content, group_id)
        return memory is not None and memory.number is not None

    def forget_evicted(self) -> None:
        self.sets = [[None] * SET_SIZE for _ in self.sets]

    # learning

    def learn(self, end: PrefixEnd, group_id: int, page: int, num_tokens: int, is_first: bool) -> None:
        """Learn from a request that is admitted, and hits the checkpoint of a page, if that is not the null page."""
        memory = self._find(end.lost_content, group_id) if end.num_lost else None
        memory = memory if memory is not None and memory.number is not None else None
        note = self.notes.get(page)
        if is_first:
            self._compare(end, note, num_tokens, memory)
        if memory is not None:
            if memory.number not in (RECENT, COUNTED) and self.num_evicted - memory.eviction <= self.num:
                self._update(memory.number).num_hit_tokens += end.num_lost
                self.pool.counts[f"lost of class {memory.number}"] += 1
            memory.number = COUNTED

    def _compare(self, end: PrefixEnd, note: Note | None, num_tokens: int, memory: Memory | None) -> None:
        gained = spared = 0
        if note is not None and note.kind == ANSWER_END:
            gained = num_tokens - note.tokens_before
        elif note is not None and note.kind & PROMPT_END:
            gained, spared = (end.junction - num_tokens, 0) if end.is_run_end else (0, num_tokens)
        if memory is not None and memory.is_prompt_end:
            spared += 0 if end.is_run_end and end.junction > num_tokens + end.num_lost else end.num_lost
        self.num_requests += 1
        if self.num_requests >= 4 * max(1, self.num):
            self.num_requests, self.gained, self.spared = 0, self.gained / 2, self.spared / 2
        self.gained += max(0, gained)
        self.spared += spared

    @property
    def writes_answers(self) -> bool:
        return self.gained > self.spared + 1

    # runs

    def _valid(self, place: tuple[int, int] | None) -> int | None:
        """Return the page of a checkpoint, if it still has it."""
        if place is None or self.pool.entry_of_page.get(place[0], (-1, -1))[0] != place[1]:
            return None
        return place[0]

    def _list_before(self, page: int) -> list[int]:
        """List the checkpoints before one in its run, the last first."""
        pages = []
        for _ in range(MAX_STEPS):
            page = self._valid(self.notes[page].before)
            if page is None:
                break
            pages.append(page)
        return pages

    def continue_from(self, lineage: Lineage, page: int, num_tokens: int) -> None:
        """A run hits a checkpoint."""
        note = self.notes[page]
        note.num_tokens = num_tokens
        staying = [
            self.notes[each].num_tokens for each in self._list_before(page) if self.notes[each].number not in (LEFT, OUTDONE)
        ]
        self._update(note.number).num_hit_tokens += max(0, num_tokens - staying[0]) if staying else num_tokens
        self.pool.counts[f"hits of class {note.number}"] += 1
        note.stamp, note.num_continued = self._tick(), min(note.num_continued + 1, MAX_CONTINUED)
        self._move(page, RECENT)
        if note.num_continued == 1:
            for each in self._list_before(page):
                if self.notes[each].num_continued:
                    break
                self._leave(each)

    def _leave(self, page: int) -> None:
        note = self.notes[page]
        if not note.kind & JUNCTION and note.num_continued < MAX_CONTINUED and note.number != LEFT:
            note.num_continued, note.stamp = 1, self.now
            self._move(page, LEFT)

    def find_outrun(self, lineage: Lineage) -> int | None:
        """Return the checkpoint whose place the next one at the end of the answer takes."""
        page = self._valid(lineage.last)
        if page is None or lineage.is_source or self.notes[page].number != OF_ANSWER or self.pool.ref_counts[page]:
            return None
        return page

    def add_kind(self, page: int, kind: int) -> None:
        """A run would have made a checkpoint that is cached already."""
        note = self.notes[page]
        note.kind |= kind
        if kind not in (ANSWER_END, LONE_PLACE) and note.number in (OF_ANSWER, LONE):
            self._move(page, RECENT)

    def go_on(self, new: New) -> None:
        """A run has made a checkpoint."""
        page, is_source = self._valid(new.lineage.last), new.lineage.is_source
        note = self.notes.get(page) if page is not None else None
        if note is None or new.kind == LONE_PLACE:
            return
        if new.kind == ANSWER_END:
            if not is_source and note.kind & PROMPT_END and note.num_continued == 0 and note.number == RECENT:
                self._move(page, OUTDONE)
        elif is_source and note.num_continued == 1:
            self._leave(page)


class OracleCheckpoints:
    """How runs go on from the pages of a pool, and the ranks of the checkpoints of each pool of states."""

    def __init__(self, pool: OraclePool) -> None:
        self.pool = pool
        self.are_kept = False
        self.ranks: list[Ranks] = []
        self.children: dict[int, int] = {}  # content that was entered last behind a page
        self.ends: set[int] = set()  # pages with which a run ended

    def begin(self, ranges: Sequence[range], key_of: Callable[[int], int]) -> None:
        """Keep the lineage of pages, and rank the checkpoints in some ranges of pages."""
        self.are_kept, self.pool.key_of = True, key_of
        self.ranks = [Ranks(self.pool, pages) for pages in ranges]

    def ranks_of(self, page: int) -> Ranks | None:
        return next((ranks for ranks in self.ranks if page in ranks.pages), None)

    def class_of(self, page: int) -> int:
        ranks = self.ranks_of(page)
        return RECENT if ranks is None else ranks.notes[page].number

    def note_entered(self, page: int, before: int, content: int, new: New | None) -> None:
        """A page, which is not free, gets an entry; `before` is the page before it."""
        ranks = self.ranks_of(page)
        if ranks is not None:
            ranks.begin(page, new)
            return
        self.children.pop(page, None)
        self.ends.discard(page)
        if before != NULL_PAGE and before in self.pool.entry_of_page:
            self.children[before] = content

    def note_end(self, page: int) -> None:
        """A run has ended with a page."""
        if page in self.pool.entry_of_page:
            self.ends.add(page)

    def make(self, page: int, content: int, new: New, enter: Callable[[New], None]) -> None:
        """Enter a checkpoint that a run makes."""
        ranks, lineage = self.ranks_of(page), new.lineage
        outrun = ranks.find_outrun(lineage) if ranks is not None and new.kind == ANSWER_END else None
        if outrun is not None:
            note = ranks.notes[outrun]
            lineage.last, lineage.num_tokens = note.before, note.tokens_before
            self.pool.drop_entries([outrun])
            self.pool.counts["checkpoints of answers outrun"] += 1
            new = new._replace(is_replacing=True)
        enter(new)
        if ranks is not None:
            ranks.go_on(new)
        if new.kind != LONE_PLACE:
            lineage.last, lineage.num_tokens, lineage.is_source = (page, content), new.num_tokens, False

    def continue_from(self, lineage: Lineage, page: int, num_tokens: int) -> None:
        """A run hits a checkpoint."""
        if page in self.pool.entry_of_page:
            lineage.last, lineage.num_tokens = (page, self.pool.entry_of_page[page][0]), num_tokens
            lineage.is_source = True
            ranks = self.ranks_of(page)
            if ranks is not None:
                ranks.continue_from(lineage, page, num_tokens)

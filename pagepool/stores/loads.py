"""Pages of queued requests on their way from a store to the host tier."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

import numpy as np
import numpy.typing as npt

from pagepool._core import CacheGroups, HashChain, begin_fills, end_fills, list_absent
from pagepool.stores.frames import HEADER_BYTES, make_header
from pagepool.stores.pages import Pages, Tier
from pagepool.stores.pending import Buffers, Flags, Job, Jobs, Object
from pagepool.stores.rates import WINDOW_SECONDS, AnswerRate, Rate
from pagepool.stores.saves import Saves

MAX_BYTES_PER_JOB = 8 << 20
MAX_LOOKUPS = 1024
"""Look-ups that a store leaves unanswered before it gets no more."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The tokens or the medium of a queued request, whose pages may be in the store."""

    groups: CacheGroups
    chain: HashChain
    num_tokens: int
    queued_at: float
    num_least_tokens: int = 0  # a shorter hit is worth nothing
    num_on_the_way: int = 0  # look-ups, and pages to be loaded, that have not ended
    asked_at: float = inf  # time of the first question whether it is ready
    num_bytes: int = 0  # bytes of the pages that are looked up or loaded
    num_page_tokens: int = 0  # tokens in these pages
    num_queued_tokens: int = 0  # tokens to be computed once it is the request's turn
    began_at: float | None = None  # time when the look-up was answered
    load_seconds: float | None = None  # expected time of the loads from `began_at` on; None: no rate
    is_over: bool = False  # the request no longer waits for pages
    is_late: bool = False  # it did not wait for pages on their way
    is_slower: bool = False  # its pages were not loaded, since that would take too long
    has_failed: bool = False  # the store failed to answer, or to give pages


class Loads:
    """Look-ups of requests' pages, and loads of those that a hit needs.

    A page that several requests need is read once. Each object is checked in the row of the tier, which the store cannot reach.
    """

    def __init__(self, tier: Tier, jobs: Jobs, saves: Saves, namespace: str, max_bytes: int) -> None:
        """`max_bytes` of objects are loaded at a time."""
        self._tier, self._jobs, self._saves, self._namespace = tier, jobs, saves, namespace
        self._sizes = np.array([rows.shape[1] + HEADER_BYTES for rows in tier.rows], dtype=np.int64)  # bytes, by group
        self._buffers = Buffers(max_bytes, self._sizes.tolist())
        self._waiting: deque[tuple[Fetch, Pages]] = deque()  # pages to be loaded, and a request that waits for them
        self._waiters: dict[bytes, list[Fetch]] = {}  # the requests that wait for each page on its way
        self._wrong: set[bytes] = set()  # pages on their way that were found to be wrong since
        saves.heed_wrong = self._heed_wrong
        self._num_waiting_bytes = 0
        self._load_rate, self._step_rate = AnswerRate(), Rate()
        self._queue_seconds = Rate()  # mean seconds from the queueing of a request to its turn
        self._num_queued_tokens = 0
        self._num_lookups = 0
        self._asks_at = -inf
        self.num_looked_up = self.num_found = self.num_recomputed = 0
        self.num_loading = self.num_loaded = self.num_missing = self.num_damaged = 0

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step, unless it computed no tokens of prompts."""
        if num_tokens:
            self._step_rate.add(time.monotonic(), num_tokens, seconds)

    def look_up(self, fetch: Fetch) -> bool:
        """Start to look up the pages of a request. Return whether there are any to be looked up."""
        keys, groups, num_now, _ = list_absent(self._tier.store, fetch.groups, fetch.chain, fetch.num_tokens)
        pages = Pages(keys, groups)
        pages = pages.choose(self._saves.are_right(pages))
        if not len(pages.groups) or self._num_lookups >= MAX_LOOKUPS or not self._may_ask():
            return False
        fetch.num_bytes, fetch.num_page_tokens = int(self._sizes[pages.groups].sum()), fetch.num_tokens - num_now
        self._queue(fetch, fetch.num_page_tokens)
        fetch.num_on_the_way += 1
        self._num_lookups += 1
        self._jobs.lookup(Job(pages, pages.name(), self._end_lookup, context=fetch))
        return True

    def _may_ask(self) -> bool:
        """Whether to ask the store: once in `WINDOW_SECONDS` while it does not answer, since it may keep all questions."""
        now = time.monotonic()
        is_due = not self._jobs.is_silent or now >= self._asks_at
        self._asks_at = now + WINDOW_SECONDS if is_due else self._asks_at
        return is_due

    def begin_turn(self, fetch: Fetch, now: float) -> None:
        """Note that it is a request's turn, unless that was noted before."""
        if fetch.asked_at == inf:
            fetch.asked_at = now
            self._queue_seconds.add(now, now - fetch.queued_at, 1.0)

    def find_patience(self, fetch: Fetch, now: float, deadline: float) -> float:
        """Return the time until which a request waits for its pages at its turn: `deadline` seconds without rates."""
        compute_seconds = self._find_compute_seconds(now, fetch.num_page_tokens)
        load_seconds, began_at = fetch.load_seconds, fetch.began_at
        if began_at is None:  # the store may have all of its pages
            load_seconds, began_at = self._find_load_seconds(now, fetch.num_bytes), now
        if load_seconds is None:
            return fetch.asked_at + deadline
        if began_at + load_seconds > fetch.asked_at + compute_seconds:
            return fetch.asked_at
        if fetch.began_at is not None:
            deadline = max(deadline, began_at + 2 * load_seconds - fetch.asked_at)
        return fetch.asked_at + min(deadline, compute_seconds)

    def end_poll(self) -> None:
        """Measure the loads that were answered."""
        self._load_rate.end_question(time.monotonic())

    def forget(self, fetch: Fetch) -> None:
        """Note that a request is no longer queued."""
        self._queue(fetch, 0)

    def leave(self, fetch: Fetch) -> None:
        """Begin no more loads for a request that computes its pages."""
        self.forget(fetch)
        fetch.is_over = True
        if not fetch.num_on_the_way or all(first is not fetch for first, _ in self._waiting):
            return
        left: deque[tuple[Fetch, Pages]] = deque()
        for first, pages in self._waiting:
            left.extend(self._hand_over(pages) if first is fetch else [(first, pages)])
        self._waiting = left
        self._num_waiting_bytes = sum(int(self._sizes[pages.groups].sum()) for _, pages in left)

    def start(self) -> None:
        """Load waiting pages, while there is room."""
        while self._waiting:
            fetch, pages = self._waiting[0]
            sizes = self._sizes[pages.groups]
            num = max(1, int(np.searchsorted(np.cumsum(sizes), MAX_BYTES_PER_JOB)))
            objects, places = self._take_objects(sizes[:num].tolist())
            if not objects:
                return
            self._waiting.popleft()
            num = len(objects)
            if num < len(sizes):
                self._waiting.appendleft((fetch, pages.choose(slice(num, None))))
            self._num_waiting_bytes -= int(sizes[:num].sum())
            chosen = pages.choose(slice(num))
            self.num_loading += num
            self._load_rate.start(time.monotonic())
            self._jobs.load(Job(chosen, chosen.name(), self._end_load, objects, places, fetch, self._release))

    def clear(self) -> None:
        """Forget the pages that wait for a load."""
        for _, pages in self._waiting:
            self._end_waits(pages.name())
        self._waiting.clear()
        self._num_waiting_bytes = 0

    def _take_objects(self, sizes: Sequence[int]) -> tuple[list[Object], list[int]]:
        objects: list[Object] = []
        places: list[int] = []
        for size, equal in groupby(sizes):
            num, array = len(list(equal)), self._buffers.arrays[size]
            taken = self._buffers.take(num, size)
            places += taken
            objects += [array[place] for place in taken]
            if len(taken) < num:
                break
        return objects, places

    def _end_lookup(self, job: Job, are_stored: Flags) -> None:
        fetch: Fetch = job.context
        fetch.num_on_the_way -= 1
        fetch.has_failed |= job.has_failed
        self._num_lookups -= 1
        self.num_looked_up += len(are_stored)
        self.num_found += int(are_stored.sum())
        are_stored &= self._saves.are_right(job.pages)  # pages may have been found to be wrong meanwhile
        self._saves.note_stored(job.pages, are_stored)
        tier, found = self._tier, job.pages.choose(are_stored).sort()
        keys, groups, num_now, num_then = list_absent(tier.store, fetch.groups, fetch.chain, fetch.num_tokens, *found)
        is_longer = len(groups) > 0 and num_then >= fetch.num_least_tokens
        if fetch.is_over or not is_longer:  # nobody waits, or the store's pages do not lengthen the hit
            return
        needed = Pages(keys, groups)
        names = needed.name()
        due = needed.choose(np.array([name not in self._waiters for name in names], dtype=bool))  # others are on their way
        fetch.num_bytes, fetch.num_page_tokens = int(self._sizes[due.groups].sum()), num_then - num_now
        if not self._fits(needed) or not self._pays(fetch):
            self.num_recomputed += len(due.groups)
            fetch.is_slower = True
            return
        if fetch.num_queued_tokens:
            self._queue(fetch, fetch.num_tokens - num_then)
        fetch.num_on_the_way += len(names)
        for name in names:
            self._waiters.setdefault(name, []).append(fetch)
        if len(due.groups):
            self._waiting.append((fetch, due))
            self._num_waiting_bytes += fetch.num_bytes

    def _hand_over(self, pages: Pages) -> list[tuple[Fetch, Pages]]:
        """Return pages to be loaded, each with a request that still waits for it. Forget pages that no request waits for."""
        places: dict[Fetch, list[int]] = {}
        for place, name in enumerate(pages.name()):
            heir = next((fetch for fetch in self._waiters[name] if not fetch.is_over), None)
            if heir is None:
                self._end_waits([name])
            else:
                places.setdefault(heir, []).append(place)
        return [(heir, pages.choose(own)) for heir, own in places.items()]

    def _end_waits(self, names: list[bytes]) -> None:
        """Let requests wait for pages no longer."""
        for name in names:
            for fetch in self._waiters.pop(name, ()):
                fetch.num_on_the_way -= 1
        if self._wrong:
            self._wrong.difference_update(names)

    def _heed_wrong(self, names: list[bytes]) -> None:
        """Note that the store's content of pages is wrong, so that loads on their way do not use it."""
        self._wrong.update(name for name in names if name in self._waiters)

    def _fits(self, pages: Pages) -> bool:
        """Whether pages take no more than half of the tier, so that the first are still there when the last one comes."""
        counts = np.bincount(pages.groups, minlength=len(self._tier.rows))
        return all(2 * count <= len(rows) for count, rows in zip(counts, self._tier.rows, strict=True))

    def _pays(self, fetch: Fetch) -> bool:
        """Whether to load pages: whether, by the rates of the last seconds, that takes no longer than the request waits for its
        turn and then computes their tokens. True without rates.
        """
        now = time.monotonic()
        fetch.began_at, fetch.load_seconds = now, self._find_load_seconds(now, fetch.num_bytes)
        if fetch.load_seconds is None or self._load_rate.is_old(now):
            return True
        compute_seconds = self._find_compute_seconds(now, fetch.num_page_tokens)
        return fetch.load_seconds < inf and fetch.load_seconds <= self._find_queue_seconds(now, fetch) + compute_seconds

    def _queue(self, fetch: Fetch, num_tokens: int) -> None:
        self._num_queued_tokens += num_tokens - fetch.num_queued_tokens
        fetch.num_queued_tokens = num_tokens

    def _find_queue_seconds(self, now: float, fetch: Fetch) -> float:
        """Return the time until a request's turn: the mean wait of others, or the compute time of others queued if longer."""
        mean = 0.0 if self._queue_seconds.is_old(now) else self._queue_seconds.per_second(now) or 0.0
        return max(mean, self._find_compute_seconds(now, self._num_queued_tokens - fetch.num_queued_tokens))

    def _find_compute_seconds(self, now: float, num_tokens: int) -> float:
        """Return how long it takes to compute tokens; infinite without a rate."""
        tokens_rate = self._step_rate.per_second(now)
        return num_tokens / tokens_rate if tokens_rate else inf

    def _find_load_seconds(self, now: float, num_bytes: int) -> float | None:
        """Return how long it takes to load pages after all those before them, or None without a rate."""
        bytes_rate = self._load_rate.per_second(now)
        if bytes_rate is None:
            return None
        num_bytes += self._buffers.num_bytes + self._num_waiting_bytes
        return num_bytes / bytes_rate if bytes_rate else inf  # all loads failed

    def _end_load(self, job: Job, is_done: Flags) -> None:
        self._load_rate.end(int(self._sizes[job.pages.groups][is_done].sum()), job.started_at, job.has_failed)
        self.num_loading -= len(job.names)
        self.num_missing += int((~is_done).sum())
        self._saves.note_stored(job.pages, is_done)
        self._note_failed(job.names, is_done)
        try:
            self._fill(job, np.flatnonzero(is_done))
        finally:
            self._end_waits(job.names)

    def _note_failed(self, names: list[bytes], are_right: Flags) -> None:
        """Record which requests wait for pages that the store failed to give."""
        for at in np.flatnonzero(~are_right).tolist():
            for fetch in self._waiters.get(names[at], ()):
                fetch.has_failed = True

    def _release(self, job: Job) -> None:
        """Give back a job's memory with its headers zeroed, so a later load that ends early finds no old page there."""
        left = np.array(job.places)
        for size, equal in groupby(map(len, job.objects)):
            headers, (places, left) = self._buffers.arrays[size][:, :HEADER_BYTES], np.split(left, [len(list(equal))])
            headers[places[headers[places].any(axis=1)]] = 0  # memory that was never written stays so
        self._buffers.give_back(job.objects, job.places)

    def _fill(self, job: Job, places: npt.NDArray[np.intp]) -> None:
        """Copy loaded objects into pages of the tier, and let the pages that are intact there hit."""
        tier, loaded = self._tier, job.pages.choose(places)
        number, page_ids = begin_fills(tier.store, tier.banks, loaded.keys, loaded.groups, job.context.chain)
        if not number:
            return
        taken = np.flatnonzero(page_ids)
        are_intact = np.zeros(len(taken), dtype=bool)
        try:
            self._saves.collect()  # before the pages that were evicted for these are overwritten
            for i, at in enumerate(taken.tolist()):
                are_intact[i] = self._copy(job, int(places[at]), int(page_ids[at]))
            for group in sorted({*loaded.groups[taken].tolist()}):
                ids = page_ids[taken[loaded.groups[taken] == group]].tolist()
                tier.mark_saved(ids, group=group if tier.has_groups else None)
        finally:
            end_fills(tier.store, number, np.flatnonzero(~are_intact).tolist())
        self._saves.note_stored(loaded.choose(taken), are_intact)
        self._note_failed([job.names[places[at]] for at in taken], are_intact)
        self.num_loaded += int(are_intact.sum())
        self.num_damaged += int((~are_intact).sum())

    def _copy(self, job: Job, place: int, page_id: int) -> bool:
        """Copy an object into a row, and check it there. Return whether it is intact, and not known to be wrong."""
        row, item = self._tier.rows[job.pages.groups[place]][page_id], job.objects[place]
        header = item[:HEADER_BYTES].tobytes()
        row[:] = item[HEADER_BYTES:]
        name = job.names[place]
        return header == make_header(self._namespace, name, row.data) and name not in self._wrong

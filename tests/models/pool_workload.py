"""Random work on a pool and its twin: requests that come again, and calls in any order beside them, right and wrong ones.

Pools are tiny, and keys come from a few families whose popularity changes, so that pages are evicted, remembered and used
again at all ages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple

import numpy as np
from eviction_oracle import NULL_PAGE, Adaptive, hash_key, make_policy
from features import Driver, draw_placement
from oracle_pool import OraclePool, PageIds, shard_of_hint
from twins import Twins, stats_of_twin

import pagepool
from pagepool._core import copy_records

NUM_FAMILIES = 8
GROUPS = 0, 1
PAGE_SIZE = 1
NOWHERE: dict[str, Any] = {}


class PoolState(NamedTuple):
    """Everything that can be seen of a pool, and what its policy keeps."""

    ref_counts: list[int]
    free_page_ids: list[int]
    entries: dict[int, tuple[int, int]]  # key and group, by page
    stats: pagepool.PagePoolStats
    policy: dict[str, Any]


AGES = "f8", (3, 14)
COUNTED = np.dtype(
    [
        *((name, "i8") for name in ("num_released", "epoch", "call", "num_requests_then")),
        ("alive", "i8", (3, 256)),
        *((name, *AGES) for name in ("exposed", "reused", "values")),
        *((name, "i8") for name in ("lru_age", "regret", "pause", "paused_until")),
        ("decision", "i4", 4),
    ]
)
LEARNED = set(COUNTED.names) - {"alive", "decision"}  # told otherwise by the twin


def describe_twin(policy: Adaptive | None) -> dict[str, Any]:
    """Return what a twin keeps, in the form of the core."""
    if policy is None:
        return {}
    marks = [mark.epoch << 18 | mark.call << 2 | mark.part for mark in policy.marks]
    ghosts = [
        (memory.tag, memory.mark.epoch << 18 | memory.mark.call << 2 | memory.mark.part) if memory else (0, 0)
        for memories in policy.ghost.sets
        for memory in memories
    ]
    counts = [policy.num_requests, policy.num_shared_hits, policy.num_free_hits, policy.num_lru_hits]
    learned = {name: getattr(policy, name) for name in LEARNED}
    by_class = {name: list(values.values()) for name, values in learned.items() if isinstance(values, dict)}
    return {"marks": marks, "ghosts": ghosts, "counts": counts, **learned, **by_class}


def describe_policy(store: Any) -> dict[str, Any]:
    """Return what the policy of a store keeps."""
    records = copy_records(store, "marks ghosts policy_counts learned")
    if not records["num_parts"] or store.eviction == "lru":
        return {}
    ghosts = [(tag, mark if tag else 0) for tag, mark in records["ghosts"].tolist()]
    learned = records["learned"].view(COUNTED)[0]
    values = {name: learned[name].tolist() for name in LEARNED}
    return {"marks": records["marks"].tolist(), "ghosts": ghosts, "counts": records["policy_counts"].tolist()[4:], **values}


class OracleSide:
    """The oracle's pool, whose contents are keys. What is not defined here is a call of the pool as it is."""

    def __init__(self, num_pages: int, policy: Adaptive | None) -> None:
        self.pool = OraclePool(num_pages, True, policy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def check_owners(self, args: Any) -> None:
        """Refuse nothing: a pool knows no requests."""

    def take(self, num_pages: int, placement: dict[str, Any] = NOWHERE) -> PageIds:
        return self.pool.get_new_pages(num_pages, **placement)

    def free(self, page_ids: PageIds) -> None:
        self.pool.free_pages(page_ids)

    def touch(self, page_ids: PageIds) -> None:
        self.pool.touch([page_ids])

    def cache(self, page_ids: PageIds, keys: list[int], num_cached_pages: int, group_id: int) -> None:
        self.pool.cache_full_pages(page_ids, keys, num_cached_pages, len(page_ids), group_id)

    def find(self, key: int, placement: dict[str, Any]) -> PageIds | None:
        return self.pool.get_cached_page(key, GROUPS, **placement)

    def state(self, _request_ids: Iterable[str]) -> PoolState:
        pool = self.pool
        entries = dict(sorted(pool.entry_of_page.items()))
        return PoolState(pool.ref_counts[1:], pool.free_page_ids(), entries, stats_of_twin(pool), describe_twin(pool.policy))


class PackageSide:
    """The package's pool, called in the same way, alternately by page object and by id."""

    def __init__(self, num_pages: int, eviction: str) -> None:
        self.pool = pagepool.PagePool(num_pages, True, eviction=eviction)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def pages(self, page_ids: PageIds) -> list[Any]:
        return [self.pool.pages[page_id] for page_id in page_ids]

    def take(self, num_pages: int, placement: dict[str, Any] = NOWHERE) -> PageIds:
        if num_pages % 2:
            return [page.page_id for page in self.pool.get_new_pages(num_pages, **placement)]
        return self.pool.get_new_page_ids(num_pages, **placement).tolist()

    def free(self, page_ids: PageIds) -> None:
        if len(page_ids) % 2:
            self.pool.free_pages(self.pages(page_ids))
        else:
            self.pool.free_page_ids(np.array(page_ids, dtype=np.int32))

    def touch(self, page_ids: PageIds) -> None:
        if len(page_ids) % 2:
            self.pool.touch([self.pages(page_ids)])
        else:
            self.pool.touch_page_ids(page_ids)

    def cache(self, page_ids: PageIds, keys: list[int], num_cached_pages: int, group_id: int) -> None:
        hashes = [pagepool.PageHash(key, ()) for key in keys]
        places = num_cached_pages, len(page_ids), PAGE_SIZE, group_id
        if len(page_ids) % 2:
            self.pool.cache_full_pages(None, self.pages(page_ids), hashes, *places)
        else:
            self.pool.cache_full_page_ids(None, page_ids, hashes, *places)

    def find(self, key: int, placement: dict[str, Any]) -> PageIds | None:
        page_hash = pagepool.PageHash(key, ())
        if key % 2:
            found = self.pool.get_cached_page(page_hash, list(GROUPS), **placement)
            return found and [page.page_id for page in found]
        found = self.pool.get_cached_page_ids(page_hash, GROUPS, **placement)
        return None if found is None else found.tolist()

    def popleft_n(self, num_pages: int) -> PageIds:
        return [page.page_id for page in self.pool.free_page_queue.popleft_n(num_pages)]

    def remove(self, page_id: int) -> None:
        self.pool.free_page_queue.remove(self.pool.pages[page_id])

    def append_n(self, page_ids: PageIds) -> None:
        self.pool.free_page_queue.append_n([self.pool.pages[page_id] for page_id in page_ids])

    def state(self, _request_ids: Iterable[str]) -> PoolState:
        store = self.pool.store
        keys = {page_id: store.key_of(page_id) for page_id in range(1, self.pool.num_pages)}
        entries = {page_id: key for page_id, key in keys.items() if key is not None}
        assert len(entries) == store.num_cached_pages
        free_ids = self.pool.free_page_ids_in_order().tolist()
        self._check()
        return PoolState(self.pool.ref_counts().tolist()[1:], free_ids, entries, self.pool.stats, describe_policy(store))

    def _check(self) -> None:
        """Check the pool, unless there are pages in nobody's hands, which only a queue can have."""
        if np.count_nonzero(self.pool.ref_counts()[1:]) + self.pool.get_num_free_pages() == self.pool.num_pages - 1:
            self.pool.check()


class PoolWorkload(Driver):
    """Drives both pools at random. It reads their state from the oracle."""

    def __init__(self, twins: Twins, rng: Random) -> None:
        super().__init__(twins, rng)
        self.pool: OraclePool = twins.oracle.pool
        self.num_shards = rng.choice((None, None, 1, 2, 4))
        self.max_length = max(2, self.pool.num_pages // 4)
        self.families = [self._keys(self.max_length) for _ in range(NUM_FAMILIES)]
        self.first_family = 0  # the most popular
        self.held: list[PageIds] = []
        self.outside: PageIds = []  # neither held nor in the queue
        self.actions = {
            self.start: 10,
            self.end: 9,
            self.end_several: 1,
            self.share: 1,
            self.cache_any: 0.6,
            self.touch_any: 0.4,
            self.evict: 0.5,
            self.take_out: 0.4,
            self.put_in: 0.6,
            self.misuse: 1,
            self.change: 0.1,
            self.put_back: 0.1,
            self.drain: 0.05,
        }

    def _keys(self, num_keys: int) -> list[int]:
        """Return random keys, half of which an adaptive policy samples for some group."""
        keys: list[int] = []
        while len(keys) < num_keys:
            key = self.rng.getrandbits(128)
            if len(keys) % 2 or hash_key(key, self.rng.choice(GROUPS)) % 8 == 0:
                keys.append(key)
        return keys

    # requests

    def start(self) -> None:
        """Take the pages of a request, with the leading ones that are cached, unless too few are free."""
        rng, group_id, placement = self.rng, self.rng.choice((0, 0, 0, 1)), draw_placement(self.rng, self.num_shards)
        family = self.families[(self.first_family + min(int(rng.expovariate(0.5)), NUM_FAMILIES - 1)) % NUM_FAMILIES]
        keys = family[: rng.randint(1, self.max_length)] + self._keys(rng.choice((0, 0, 1, 3)))
        shard = shard_of_hint(self.pool.num_pages, **placement) if placement else None
        self.twins.call("find", rng.choice(keys), placement)
        found = [self.pool.first_entered(key, group_id, shard) for key in keys]
        hits = list(itertools.takewhile(lambda page: page not in (None, *self.outside), found)) if rng.random() < 0.95 else []
        self.twins.call("touch", hits)
        new = self.twins.call("take", len(keys) - len(hits), placement)
        if new is None:
            self.twins.call("free", hits[::-1])
            return
        pages = hits + new
        if rng.random() < 0.3:
            middle = rng.randint(len(hits), len(pages))
            self.twins.call("cache", pages[:middle], keys, len(hits), group_id)
            self.twins.call("cache", pages, keys, middle, group_id)
        elif rng.random() < 0.95:
            self.twins.call("cache", pages, keys, len(hits), group_id)
        self.held.append(pages)

    def _pop(self) -> PageIds:
        return self.held.pop(self.rng.randrange(len(self.held)))

    def end(self) -> None:
        """Free a request, mostly the last page first, so that many pages are free."""
        num_held = len(self.pool.ref_counts) - len(self.pool.free_queue)
        if self.held and (num_held > self.pool.num_pages // 2 or self.rng.random() < 0.7):
            pages = self._pop()
            if self.rng.random() < 0.1:
                self.rng.shuffle(pages)
                middle = self.rng.randint(0, len(pages))
                self.twins.call("free", [*pages[:middle], NULL_PAGE])
                self.twins.call("free", pages[middle:])
            else:
                self.twins.call("free", pages[::-1])

    def end_several(self) -> None:
        """Free requests in one call, in which shared pages stand several times."""
        pages = [page for _ in range(min(3, len(self.held))) for page in self._pop()[::-1]]
        if self.rng.random() < 0.3:
            self.rng.shuffle(pages)
        self.twins.call("free", pages)

    def share(self) -> None:
        """Let another request hold the beginning of one, perhaps with a page twice."""
        if self.held:
            pages = self.rng.choice(self.held)
            pages = pages[: self.rng.randint(0, len(pages))]
            pages = pages + pages[:1] if self.rng.random() < 0.2 else list(pages)
            self.twins.call("touch", pages)
            self.held.append(pages)

    # single calls

    def _some_pages(self) -> PageIds:
        return self.rng.sample(range(1, self.pool.num_pages), min(self.pool.num_pages - 1, self.rng.randint(1, 3)))

    def cache_any(self) -> None:
        """Enter pages anywhere, free ones too; refused if one of them has an entry."""
        pages = [*self._some_pages(), NULL_PAGE]
        if self.rng.random() < 0.7:
            pages = [page for page in pages if page not in self.pool.entry_of_page]
        self.rng.shuffle(pages)
        keys = self.rng.choice(self.families)[: len(pages)] + self._keys(len(pages))
        self.twins.call("cache", pages, keys, self.rng.randint(0, len(pages)), self.rng.choice(GROUPS))

    def touch_any(self) -> None:
        """Hold any pages, free ones too."""
        pages = [page for page in self._some_pages() if page not in self.outside]
        self.twins.call("touch", [*pages, NULL_PAGE])
        self.held.append(pages)

    def evict(self) -> None:
        pages = self._some_pages()
        self.twins.call("evict_pages", pages + pages[:1])

    def take_out(self) -> None:
        """Take pages out of the queue as they are, at its front or anywhere."""
        if not self.pool.free_queue or len(self.outside) > self.pool.num_pages // 8:
            return
        if self.rng.random() < 0.5:
            num_pages = self.rng.randint(0, min(2, len(self.pool.free_queue)))
            self.outside += self.twins.call("popleft_n", num_pages)
        else:
            page = self.rng.choice(list(self.pool.free_queue))
            self.twins.call("remove", page)
            self.outside.append(page)

    def put_in(self) -> None:
        """Put pages back that were taken out of the queue."""
        self.rng.shuffle(self.outside)
        middle = self.rng.randint(0, len(self.outside))
        self.twins.call("append_n", self.outside[:middle])
        del self.outside[:middle]

    def misuse(self) -> None:
        """Do what must be refused, after work that must be undone."""
        rng, pages = self.rng, self._some_pages()
        held = rng.choice(self.held) if self.held else []
        free = list(self.pool.free_queue)
        cached, uncached = (
            [page for page in range(1, self.pool.num_pages) if (page in self.pool.entry_of_page) is is_cached]
            for is_cached in (True, False)
        )
        wrong: list[Callable[[], object]] = [
            lambda: self.twins.call("free", [*held, *(page for page in held[:1] for _ in range(self.pool.ref_counts[page]))]),
            lambda: self.twins.call("free", [*held[:-1], *(free or pages)[:1], *held[-1:]]) if free else None,
            lambda: self.twins.call("append_n", [*self.outside, *free[:1], *self.outside]),
            lambda: self.twins.call("append_n", [*self.outside, *self.outside[:1], NULL_PAGE]),
            lambda: self.twins.call("take", len(free) + 1, {}),
            lambda: self.twins.call("popleft_n", len(free) + 1),
            lambda: self.twins.call("touch", [*held, *free[:2], *self.outside]) if self.outside else None,
            lambda: self._cache_wrongly(uncached, cached[:1]),
            lambda: self._cache_wrongly(uncached, uncached[-1:]),
        ]
        rng.choice(wrong)()

    def _cache_wrongly(self, pages: PageIds, wrong: PageIds) -> None:
        """Enter pages without an entry, and one that has one, or would get two."""
        if pages and wrong:
            pages = [*pages, *wrong]
            keys = (self.families[0] + self._keys(len(pages)))[: len(pages)]
            self.twins.call("cache", pages, keys, 0, 0)

    # all at once

    def change(self) -> None:
        """Let another family be the most popular, and new prompts take the place of one; rarely, divide the pool otherwise."""
        self.first_family += 1
        self.families[self.rng.randrange(NUM_FAMILIES)] = self._keys(self.max_length)
        if self.num_shards is not None and self.rng.random() < 0.2:
            self.num_shards = self.rng.choice((1, 2, 4))

    def put_back(self) -> None:
        """Put back what is outside, since only a whole pool is checked."""
        self.twins.call("append_n", self.outside)
        self.outside = []

    def drain(self) -> None:
        """Be refused a reset, free all, and reset."""
        self.twins.call("reset_prefix_cache")
        while self.held:
            self.twins.call("free", self._pop()[::-1])
        self.twins.call("append_n", self.outside)
        self.outside = []
        assert self.twins.call("reset_prefix_cache") is True


def run_pool_workload(eviction: str, seed: int, num_calls: int) -> Adaptive | None:
    """Run a seed's workload to its end and return the oracle's policy."""
    rng = Random(seed)
    num_pages = rng.choice((1, 2, 4, 8, 8, 17, 17, 24, 24, 64, 64, 128, 128))
    oracle = OracleSide(num_pages, make_policy(eviction, num_pages))
    workload = PoolWorkload(Twins(oracle, PackageSide(num_pages, eviction)), rng)
    workload.run(num_calls, f"{eviction!r}, seed {seed}, {num_pages} pages")
    return oracle.pool.policy

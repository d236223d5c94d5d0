"""The faults of a soak: each affects all engines alike, and a refused call must change nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from soak_engine import BatchSide, Engine, SoakError, held_page_ids, pool_state, require_equal

import pagepool
from pagepool.errors import (
    ArgumentError,
    DoubleFreeError,
    OutOfPagesError,
    PageIdError,
    PagePoolError,
    RowIndexError,
    RowOverflowError,
)

MAX_EXHAUSTED_STEPS = 3
MAX_EVICTED_PAGES = 8
NUM_PROBED = 32


Misuse = tuple[Callable[[], Any], type[PagePoolError]]
"""A wrong call and the error it must raise."""


def probe_waiting(engine: Engine) -> list[int]:
    """Return the number of tokens that the first waiting requests would hit."""
    return [engine.manager.probe(request).num_hit_tokens for request in itertools.islice(engine.waiting, NUM_PROBED)]


class Faults:
    """Chooses faults by a seed, and counts them by kind."""

    def __init__(self, engines: list[Engine], rng: Random) -> None:
        self.engines = engines
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.foreign_pool = pagepool.PagePool(4, enable_caching=True)
        self.faults: dict[Callable[[], None], float] = {
            self.abort_prefill: 2,
            self.abort: 2,
            self.abort_waiting: 1,
            self.preempt: 2,
            self.misuse: 6,
            self.exhaust: 1,
            self.evict: 2,
            self.refuse_reset: 1,
            self.reset: 0.1,
            self.restart: 0.5,
        }

    @property
    def first(self) -> Engine:
        """Return the engine by which decisions are taken; the others are equal."""
        return self.engines[0]

    def inject(self) -> None:
        """Inject one fault, if its conditions are met."""
        self.rng.choices(list(self.faults), list(self.faults.values()))[0]()

    def step(self) -> None:
        """One step of all engines. A request whose next chunk does not fit even the empty pool, in groups with windows, is
        aborted.
        """
        if not self._ask("a step", try_step):
            for engine in self.engines:
                if held_page_ids(engine.pool).size:
                    raise SoakError("no request got room, though none runs: pages were lost")
                engine.abort_waiting(0)
            self._count("chunks larger than the pool")

    def _count(self, name: str) -> None:
        self.counts[name] += 1

    def _ask(self, what: str, ask: Callable[[Engine], Any]) -> Any:
        """Do the same with all engines and return their common result."""
        answers = [ask(engine) for engine in self.engines]
        require_equal(what, answers)
        return answers[0]

    # ending requests

    def abort_prefill(self) -> None:
        self._abort(self.first.find_prefilling_rows(), "aborts in prefill")

    def abort(self) -> None:
        self._abort(self.first.running, "aborts")

    def _abort(self, rows: Any, name: str) -> None:
        if rows.size:
            row = int(self.rng.choice(rows))
            self._ask("abort", lambda engine: engine.abort(row))
            self._count(name)

    def abort_waiting(self) -> None:
        if self.first.waiting:
            position = self.rng.randrange(len(self.first.waiting))
            self._ask("abort", lambda engine: engine.abort_waiting(position))
            self._count("aborts while waiting")

    def preempt(self) -> None:
        if self.first.running.size:
            self._ask("preempt", Engine.preempt_newest)
            self._count("preemptions by hand")

    # wrong calls

    def misuse(self) -> None:
        """Make a wrong call of one kind on each engine, which must be refused and change nothing of the pool."""
        kind = self.rng.random()
        for engine in self.engines:
            misuses = [*self._pool_misuses(engine.pool), *self._side_misuses(engine)]
            call, expected = misuses[int(kind * len(misuses))]
            before = pool_state(engine.pool)
            try:
                call()
            except expected:
                self._count("wrong calls refused")
            else:
                raise SoakError(f"a wrong call was not refused with {expected.__name__}")
            if pool_state(engine.pool) != before:
                raise SoakError(f"a wrong call was refused with {expected.__name__}, but it changed the pool")

    def _pool_misuses(self, pool: pagepool.PagePool) -> Iterator[Misuse]:
        """Yield wrong lists of pages: of another pool, too many, free ones, held ones too often, and both."""
        held, free = held_page_ids(pool), pool.free_page_ids_in_order()
        yield lambda: pool.touch([[self.foreign_pool.pages[1]]]), PageIdError
        yield lambda: pool.evict_pages([1, pool.num_pages]), PageIdError
        yield lambda: pool.get_new_page_ids(free.size + 1), OutOfPagesError
        if free.size:
            yield lambda: pool.free_page_ids([*held.tolist(), int(free[-1])]), DoubleFreeError
        if held.size:
            twice = [int(held[0])] * (int(pool.ref_counts()[held[0]]) + 1)
            yield lambda: pool.free_page_ids(twice), DoubleFreeError

    def _side_misuses(self, engine: Engine) -> Iterator[Misuse]:
        """Yield wrong calls for the newest request."""
        if not engine.running.size:
            return
        row = int(engine.running[-1])
        if isinstance(engine.side, BatchSide):
            batch, known = engine.side.batch, int(engine.side.batch.num_tokens[row])
            too_many = batch.max_num_tokens - known + 1
            yield lambda: batch.step([engine.num_rows, row], [1, 1]), RowIndexError
            yield lambda: batch.release([row, row]), ArgumentError
            yield lambda: batch.trim([row], known + 1), ArgumentError
            yield lambda: batch.append([row] * too_many, [1] * too_many), RowOverflowError
        else:
            manager, request = engine.manager, engine.request_of(row)
            foreign = pagepool.CachePages(tuple([self.foreign_pool.pages[1]] for _ in manager.kv_cache_groups))
            yield lambda: manager.allocate_slots(request, 1, -1), ArgumentError
            yield lambda: manager.allocate_slots(request, 1, 0, foreign), PageIdError

    def exhaust(self) -> None:
        """Hold nearly all free pages for some steps, in which rows are preempted and possibly none runs."""
        num_pages = max(0, self.first.pool.get_num_free_pages() - self.rng.randint(0, 2))
        taken = self._ask("pages", lambda engine: engine.pool.get_new_page_ids(num_pages).tolist())
        for _ in range(self.rng.randint(1, MAX_EXHAUSTED_STEPS)):
            self._ask("a step without pages", try_step)
        self._ask("pages", lambda engine: engine.pool.free_page_ids(taken))
        self._count("pools exhausted")

    # the pool and its prefix cache

    def evict(self) -> None:
        last = self.first.pool.num_pages - 1
        page_ids = [self.rng.randint(1, last) for _ in range(self.rng.randint(1, MAX_EVICTED_PAGES))]
        self._ask("evicted entries", lambda engine: engine.pool.evict_pages(page_ids))
        self._count("evictions")

    def refuse_reset(self) -> None:
        """Reset a cache in use, which does nothing and returns False."""
        if held_page_ids(self.first.pool).size:
            before = [pool_state(engine.pool) for engine in self.engines]
            if self._ask("reset", lambda engine: engine.manager.reset_prefix_cache()):
                raise SoakError("a prefix cache in use was reset")
            require_equal("reset", [before, [pool_state(engine.pool) for engine in self.engines]])
            self._count("resets refused")

    def reset(self) -> None:
        self._ask("preempt", Engine.preempt_all)
        if not self._ask("reset", lambda engine: engine.manager.reset_prefix_cache()):
            raise SoakError("a prefix cache that nobody uses was not reset")
        self._count("resets")

    # restarts

    def restart(self) -> None:
        """Lose each engine, whose pool goes on under a new one: what was cached hits as before."""
        for engine in self.engines:
            engine.preempt_all()
            expected = probe_waiting(engine)
            engine.restart(engine.pool)
            engine.pool.check()
            require_equal("hits after a restart", [expected, probe_waiting(engine)])
        self._count("restarts")


def try_step(engine: Engine) -> bool:
    """Run one step; False if no request got slots."""
    try:
        engine.step()
    except PagePoolError as error:
        if type(error) is not PagePoolError:
            raise
        return False
    return True

"""Two systems under the same calls: whatever one returns or holds, the other must return and hold too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
from oracle import OracleLease, OracleManager, OraclePool, TooLargeError
from oracle_expected import SECOND, SHARED
from oracle_tier import Taken
from pool_ranges import Pools

from pagepool import PagePool, PagePoolStats, PoolStats
from pagepool._core import copy_records, list_sizes
from pagepool.errors import MovesDueError
from pagepool.hashing import MAX_KEY
from pagepool.page_pool.integrity import NO_GROUP, NO_TENANT

EXPECTED_ERRORS = (ValueError, RuntimeError, IndexError)
NUM_REMEMBERED_CALLS = 20
INT32 = np.dtype(np.int32)


class Mismatch(AssertionError):
    """The twins differ; the message tells in what, and the last calls."""


class State(NamedTuple):
    """Everything that can be seen of a manager and its pool."""

    ref_counts: list[int]  # of all pages but the null page, whose count is not kept, one pool behind another
    free_page_ids: list[list[int]]  # by pool: front of the queue first
    num_prefix_entries: int  # distinct (content, group)
    usage: float
    pools: dict[str, tuple[int, ...]]  # by name: pages, free, held, cached, leased ones; those ever handed out and evicted
    page_ids: list[tuple[list[int], ...]]  # by request asked about, by group
    terms: dict[int, int]  # of pages with any
    outcomes: tuple[int, ...]  # of expectations
    owners: dict[int, int]  # by page with an owner: the first of its pages, or 0 for a shared one
    tenants: dict[int, int]  # by page that is charged to one
    lineage: Lineages


class Lineages(NamedTuple):
    """How runs went on from cached pages, and the checkpoints of each pool of states."""

    parents: set[int]  # pages behind which another one was cached
    ends: set[int]  # pages with which runs ended
    checkpoints: list[dict[int, tuple[int, ...]]]  # by page: class, kind, tokens, stamp, and how often runs continued
    num_hit_tokens: list[list[float]]  # by class
    answers: list[tuple[float, float, int]]  # tokens gained and spared, and the requests since these were halved


def lineages_of(store: Any) -> Lineages:
    """Return the lineages of the package's pool."""
    banks = range(4)
    names = " ".join(f"checkpoints_{bank} classes_{bank} answers_{bank}" for bank in banks)
    records = copy_records(store, f"children pages {names}")
    is_cached, children, checkpoints = records["pages"]["group"] != NO_GROUP, records["children"], []
    kept = [bank for bank in banks if len(records[f"checkpoints_{bank}"])]
    if not len(children):
        return Lineages(set(), set(), [], [], [])
    are_states = {page for bank in kept for page in range(*records["banks"][bank][:2])}
    pages = [page for page in is_cached[: len(children)].nonzero()[0].tolist() if page not in are_states]
    for bank in kept:
        start, notes = records["banks"][bank][0], records[f"checkpoints_{bank}"]
        values = zip(
            *(notes[name].tolist() for name in ("number", "kind", "num_tokens", "stamp", "num_continued")), strict=True
        )
        checkpoints.append({page: value for page, value in enumerate(values, start) if is_cached[page]})
    return Lineages(
        {page for page in pages if children[page] > 1},
        {page for page in pages if children[page] & 1},
        checkpoints,
        [records[f"classes_{bank}"]["num_hit_tokens"].tolist() for bank in kept],
        [tuple(records[f"answers_{bank}"].tolist()[0]) for bank in kept],
    )


def lineages_of_twin(pool: OraclePool) -> Lineages:
    """Return the same of the oracle's pool."""
    kept, ranks = pool.checkpoints, pool.checkpoints.ranks
    cached = [page for page in pool.entry_of_page if kept.are_kept and kept.ranks_of(page) is None]
    return Lineages(
        {page for page in cached if page in kept.children},
        {page for page in cached if page in kept.ends},
        [
            {
                page: (note.number, note.kind, note.num_tokens, note.stamp, note.num_continued)
                for page, note in sorted(each.notes.items())
            }
            for each in ranks
        ],
        [[counts.num_hit_tokens for counts in each.counts] for each in ranks],
        [(each.gained, each.spared, each.num_requests) for each in ranks],
    )


def name_differences(mine: Any, theirs: Any) -> list[str]:
    """Name the fields in which two states differ, with both values."""
    differences = []
    for name, value, other in zip(mine._fields, mine, theirs, strict=True):
        if hasattr(value, "_fields"):
            differences += name_differences(value, other)
        elif value != other:
            differences.append(f"{name}: {value} against {other}")
    return differences


def share_hashes(oracle: OracleManager, manager: Any) -> None:
    """Let the oracle's policy know the keys that a manager of the package makes."""
    registry = manager.registry

    def hash_page(request: Any, page: int) -> int:
        held = registry.held.get(request.request_id)
        is_own = held is None or held.owner is request  # else both have a request of that id
        hashes = registry.hasher.start(request, registry.extend_hashes(request, 0) if is_own else None)
        registry.hasher.extend(hashes, request, page + 1)
        return hashes.chain[page] & MAX_KEY

    oracle.keys.hash_page = hash_page


def terms_of(store: Any) -> dict[int, int]:
    """Return the term of each page of the package's pool that has any."""
    return of_some(copy_records(store, "terms")["terms"])


def of_some(values: Any) -> dict[int, int]:
    """Return the values that are not 0, by page."""
    [page_ids] = values.nonzero()
    return dict(zip(page_ids.tolist(), values[page_ids].tolist(), strict=True))


def terms_of_twin(pool: OraclePool) -> dict[int, int]:
    """Return the same of the oracle's pool."""
    return dict(sorted(pool.expected.terms.items()))


def owners_of(store: Any) -> dict[int, int]:
    """Return by page of the package's pool that belongs to a session which of its pages is the first, 0 for shared ones."""
    return firsts_of(of_some(copy_records(store, "owners")["owners"]), -1)


def firsts_of(owners: dict[int, Any], shared: Any) -> dict[int, int]:
    """Return owners, by page, as the first page of each; those of `shared` as 0."""
    firsts: dict[Any, int] = {shared: 0}
    return {page: firsts.setdefault(owner, page) for page, owner in sorted(owners.items())}


def tenants_of(store: Any) -> dict[int, int]:
    """Return the tenant of each page of the package's pool that is charged to one, without the common one."""
    return {page: tenant for page, tenant in of_some(copy_records(store, "tenants")["tenants"]).items() if tenant != NO_TENANT}


def tenants_of_twin(pool: OraclePool) -> dict[int, int]:
    """Return the same of the oracle's pool."""
    return {page: pool.tenants.numbers[tenant] for page, tenant in sorted(pool.tenants.of_page.items())}


def outcomes_of_twin(pool: OraclePool) -> tuple[int, ...]:
    """Return how many expectations of the oracle's pool came true, or late, or not."""
    return tuple(pool.expected.counts[name] for name in ("in time", "late", "unused"))


def stats_of_twin(pool: OraclePool) -> PagePoolStats:
    """Return the counters of the oracle's pool."""
    stats = {f"num_{name}_pages": pool.counts[name] for name in ("allocated", "freed", "evicted", "cached")}
    return PagePoolStats(**stats, num_queried_tokens=pool.counts["queried"], num_hit_tokens=pool.counts["hit"])


def pools_of_twin(pool: OraclePool, pools: Pools, leases: Sequence[OracleLease] = ()) -> dict[str, tuple[int, ...]]:
    """Return the state and counters of each pool of the oracle, or of its tier."""
    return {
        name: (
            pool.sizes.count_in_use(pages),
            len(pool.free_in(pages)),
            pool.sizes.count_in_use(pages) - len(pool.free_in(pages)),
            sum(page in pool.entry_of_page for page in pages),
            sum(page in pages for lease in leases if lease.end is not None for page in lease.page_ids),
            sum(pool.taken[page] for page in pages),
            sum(pool.evicted[page] for page in pages),
        )
        for name, pages in pools.items()
    }


def free_ids_of_twin(manager: OracleManager) -> list[list[int]]:
    """Return the free queue of each pool of the oracle, as ids."""
    ranges = manager.pools.ranges
    return [[page - pages.start + 1 for page in manager.page_pool.free_page_ids(pages)] for pages in ranges]


def pools_of(pools: Mapping[str, PagePool]) -> dict[str, tuple[int, ...]]:
    """Return the same of the package's pools, as `CacheManager.stats` does."""
    return {name: figures_of(pool.count()) for name, pool in pools.items()}


def figures_of(stats: PoolStats) -> tuple[int, ...]:
    """Return the numbers of a pool without lost hits, refusals, and those of tenants."""
    return astuple(stats)[:7]


def charged_of_twin(pool: OraclePool, pools: Pools) -> dict[str, dict[str, int]]:
    """Return the pages of each pool of the oracle that are charged to each tenant with a share."""
    names = [name for name in pool.tenants.numbers if name is not None]
    return {pool_name: {name: pool.tenants.num_charged(name, pages) for name in names} for pool_name, pages in pools.items()}


def free_ids_of(pools: Mapping[str, PagePool]) -> list[list[int]]:
    """Return the same of the package's pools."""
    return [pool.free_page_ids_in_order().tolist() for pool in pools.values()]


def ref_counts_of(pools: Mapping[str, PagePool]) -> list[int]:
    """Return the ref counts of the pages of all pools."""
    return [count for pool in pools.values() for count in pool.ref_counts().tolist()[1:]]


def copies_of(copies: Any) -> list[tuple[int, int, int]]:
    """Return copies that are due as (source, destination, group); those of the oracle are that already."""
    if isinstance(copies, list):
        return copies
    assert len(copies) == len(copies.src)
    assert bool(copies) == (len(copies) > 0)
    return moves_of(copies.src, copies.dst, copies.group)


def taken_of(moves: Any) -> Taken:
    """Return moves that are due in the form of the oracle."""
    if isinstance(moves, Taken):
        return moves
    saves, loads, copies = map(copies_of, (moves.saves, moves.loads, moves.copies))
    writes = moves.writes
    holders = writes.rows.tolist() if writes.request_ids is None else writes.request_ids
    columns = [holders, *(column.tolist() for column in (writes.num_tokens, writes.page_ids, writes.group))]
    assert {len(writes)} == {len(column) for column in columns}
    assert len(moves) == len(saves) + len(loads) + len(copies) + len(writes)
    assert (moves.number > 0) == bool(saves or loads)
    return Taken(moves.number, saves, loads, copies, list(zip(*columns, strict=True)))


def moves_of(*arrays: Any) -> list[Any]:
    """Return what arrays of the package say, as (source, destination, group)."""
    assert not any(array.flags.writeable or array.dtype != INT32 for array in arrays)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


class Side:
    """A manager, called for requests and rows alike. What is not defined here is a call of the manager as it is. Failed loads
    stay inside, in the manager's own form.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.failed: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def check_owners(self, args: Iterable[Any]) -> None:
        """Refuse a call for a request with the id of another one that holds pages."""

    def evict_pages(self, records: list[int]) -> int:
        """Drop the entries of pages, given by record."""
        if isinstance(self.manager, OracleManager):
            return self.manager.page_pool.evict_pages(records)
        return sum(self.manager.pools[name].evict_pages(page_ids) for name, page_ids in self.part(records).items())

    def part(self, records: list[int]) -> dict[str, list[int]]:
        """Return the ids of pages in each pool that has any of them."""
        sizes = {name: pool.num_pages for name, pool in self.manager.pools.items()}
        return Pools.of(sizes, [(name, False) for name in sizes]).part(records)

    def set_time(self, time: int) -> int:
        """Let the clock go to a time, in units of terms; leases that are over end. Returns how many are left."""
        if isinstance(self.manager, OracleManager):
            self.manager.set_time(time)
        else:
            self.manager._store.set_time(time / SECOND)
        return len(self.manager.leases)

    def resize(self, sizes: list[int]) -> dict[str, list[int]]:
        """Let the pools have other sizes. Return the ids of held pages above, by pool."""
        if isinstance(self.manager, OracleManager):
            return self.manager.pools.part(self.manager.resize(sizes))
        names = [*self.manager.pools]
        num_pages = dict(zip(names, sizes, strict=True)) if len(names) > 1 else sizes[0]
        held = self.manager.resize(num_pages)
        assert all(owners for pages in held.values() for owners in pages.values())
        return {name: sorted(held[name]) for name in names if name in held}

    def vacate(self, preempt: bool) -> bool:
        """Empty the pools. Return whether requests or rows hold pages, so that nothing changed."""
        held = self.manager.vacate(preempt=preempt)
        return held if isinstance(self.manager, OracleManager) else bool(held.rows or held.request_ids)

    def extend_lease(self, i: int, seconds: float) -> None:
        self.manager.leases[i].extend(seconds)

    def lease(self, records: list[int], seconds: float | None) -> None:
        """Lease pages of one pool, given by record."""
        if isinstance(self.manager, OracleManager):
            self.manager.lease(records, seconds)
        elif len(self.manager.pools) == 1:
            self.manager.lease(self._formed(records), seconds=seconds)
        else:
            [(name, page_ids)] = (self.part(records) or {next(iter(self.manager.pools)): []}).items()
            self.manager.pools[name].lease(self._formed(page_ids), seconds=seconds)

    def _formed(self, page_ids: list[int]) -> Any:
        """Return page ids in a form that the manager takes."""
        return page_ids

    def leased_by(self, lease: Any) -> dict[str, list[int]]:
        """Return the ids in each pool that has pages of a lease, which the oracle lists by record."""
        if isinstance(lease, list):
            return self.manager.pools.part(lease)
        by_pool = {name: page_ids for name, page_ids in lease.page_ids_by_pool.items() if page_ids}
        assert sorted(lease.page_ids) == sorted(page_id for page_ids in by_pool.values() for page_id in page_ids)
        return by_pool

    def end_lease(self, i: int) -> None:
        self.manager.leases[i].release()

    def count_leases(self) -> int:
        return len(self.manager.leases)

    def take_moves(self) -> Taken:
        return self.as_package(taken_of(self.manager.take_moves()))

    def as_package(self, taken: Taken) -> Taken:
        """Return moves with the ids that the package has in its pools."""
        if not isinstance(self.manager, OracleManager):
            return taken
        id_of = self.manager.pools.id_of
        tier_id_of = self.manager.page_pool.tier.pools.id_of if taken.number else id_of
        return taken._replace(
            saves=[(id_of(src, group), tier_id_of(dst, group), group) for src, dst, group in taken.saves],
            loads=[(tier_id_of(src, group), id_of(dst, group), group) for src, dst, group in taken.loads],
            copies=[(id_of(src, group), id_of(dst, group), group) for src, dst, group in taken.copies],
        )

    def fail(self, number: int, saves: list[int], loads: list[int]) -> list[tuple[int, int]]:
        """Let transfers fail, and return the pages, with their groups, that loads have left with a wrong content."""
        self.failed = self.manager.fail(number, saves=saves, loads=loads)
        failed = zip(self.failed.page_ids, self.failed.groups, strict=True)
        if not isinstance(self.manager, OracleManager):
            return list(failed)
        return [(self.manager.pools.id_of(page, group), group) for page, group in failed]

    def find_wrong_token(self, request: Any) -> int | None:
        """Find the first wrong token of a request after the last transfers that failed."""
        return self.manager.find_wrong_token(request, self.failed)


class Twin(Side, ABC):
    """A manager, called and seen as all the others are. Hits stay inside, in the manager's own form."""

    hits: Any = None

    @abstractmethod
    def to_page_ids(self, pages: Any) -> tuple[list[int], ...]:
        """Turn what the manager returns for pages into page ids by group."""

    @abstractmethod
    def state(self, request_ids: Iterable[str]) -> State:
        """Return all that can be seen, with what these requests hold."""

    def look_up(self, request: Any, **options: Any) -> tuple[tuple[list[int], ...], int]:
        self.hits, num_tokens = self.manager.get_computed_pages(request, **options)
        return self.to_page_ids(self.hits), num_tokens

    def allocate(self, request: Any, num_new_tokens: int, num_hit_tokens: int | None = None, **options: Any) -> Any:
        """Allocate, with the hits of the last look-up where `num_hit_tokens` is given."""
        hits = None if num_hit_tokens is None else self.hits
        pages = self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens or 0, hits, **options)
        return None if pages is None else self.to_page_ids(pages)

    def fork(self, request: Any, new_request: Any) -> tuple[list[int], ...] | None:
        pages = self.manager.fork(request, new_request)
        return None if pages is None else self.to_page_ids(pages)

    def get_num_common_prefix_pages(self, request: Any, num_scheduled_requests: int) -> list[int]:
        return list(self.manager.get_num_common_prefix_pages(request, num_scheduled_requests))

    def lease_span(self, request: Any, *span: int | None, seconds: float) -> dict[str, list[int]]:
        lease = self.manager.lease_span if isinstance(self.manager, OracleManager) else self.manager.lease
        return self.leased_by(lease(request, *span, seconds=seconds))

    def commit_external(self, request: Any, num_tokens: int, is_last: bool = True) -> int:
        """Commit, and return the number of tokens that are computed then."""
        self.manager.commit_external(request, num_tokens, is_last=is_last)
        return request.num_computed_tokens + (num_tokens if is_last else 0)


class OracleTwin(Twin):
    """The oracle."""

    manager: OracleManager

    def check_owners(self, args: Iterable[Any]) -> None:
        for request in args:
            if hasattr(request, "request_id"):
                self.manager.require_own(request)

    def to_page_ids(self, pages: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return self.manager.pools.ids_by_group(pages)

    def state(self, request_ids: Iterable[str]) -> State:
        pool = self.manager.page_pool
        held = [self.to_page_ids(self.manager.get_page_ids(request_id)) for request_id in request_ids]
        outcomes = outcomes_of_twin(pool)
        return State(
            pool.ref_counts[1:],
            free_ids_of_twin(self.manager),
            len(pool.index),
            pool.usage,
            pools_of_twin(pool, self.manager.pools, self.manager.leases),
            held,
            terms_of_twin(pool),
            outcomes,
            firsts_of(pool.expected.owner, SHARED),
            tenants_of_twin(pool),
            lineages_of_twin(pool),
        )


class PackageTwin(Twin):
    """The package's manager, whose pool is checked whenever its state is read."""

    def to_page_ids(self, pages: Any) -> tuple[list[int], ...]:
        return pages.get_page_ids()

    def look_up(self, request: Any, **options: Any) -> tuple[tuple[list[int], ...], int]:
        """Look up, and probe first where a probe can tell the result of the look-up, which has room for what it loads."""
        is_shrunk = sum(list_sizes(self.manager._store)) < self.manager.num_pages  # perhaps it is too small for the hit
        probe = None if is_shrunk or options.get("dp_shard_hint") is not None else self.manager.probe(request)
        pages, num_tokens = super().look_up(request, **options)
        hashes = self.manager.registry.hashes.get(request.request_id)
        if probe is not None and probe.num_hit_tokens != num_tokens and not (hashes and hashes.query and hashes.query.is_short):
            raise Mismatch(f"{probe} before a look-up that hit {num_tokens} tokens")
        return pages, num_tokens

    def state(self, request_ids: Iterable[str]) -> State:
        manager, store = self.manager, self.manager._store
        next(iter(manager.pools.values())).check()
        return State(
            ref_counts_of(manager.pools),
            free_ids_of(manager.pools),
            store.num_keys,
            manager.usage,
            pools_of(manager.pools),
            [self.manager.get_page_ids(request_id) for request_id in request_ids],
            terms_of(store),
            tuple(store.expectations[1].values()),
            owners_of(store),
            tenants_of(store),
            lineages_of(store),
        )


class Twins:
    """Calls both, the oracle first, and compares results and states after every call."""

    def __init__(self, oracle: Twin, system: Twin) -> None:
        self.oracle = oracle
        self.system = system
        self.num_calls = 0
        self.live_request_ids: dict[str, None] = {}
        self._last_calls: deque[tuple[Any, ...]] = deque(maxlen=NUM_REMEMBERED_CALLS)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Do the operation on both and return its result, or None where both refuse it with one error."""
        self.num_calls += 1
        self._last_calls.append((name, args, options))
        try:
            self.oracle.check_owners(args)
            expected = getattr(self.oracle, name)(*args, **options)
        except EXPECTED_ERRORS as error:
            expected = error
        result = self._system_result(expected, name, args, options)
        if result != expected:
            raise Mismatch(self._report([f"result: {expected!r} against {result!r}"]))
        self.compare_states()
        return None if isinstance(expected, Exception) else expected

    def _system_result(self, expected: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the system returns, or the expected error where it raises one of that kind."""
        try:
            return getattr(self.system, name)(*args, **options)
        except Exception as error:
            if isinstance(error, MovesDueError):
                self.oracle.manager.states.copies.is_between = True
            kind = ValueError if isinstance(expected, TooLargeError) else type(expected)
            if isinstance(expected, Exception) and isinstance(error, kind) and self._names_pool(error, expected):
                return expected
            raise Mismatch(self._report([f"result: {expected!r} against {error!r}"])) from error

    @staticmethod
    def _names_pool(error: Exception, expected: Exception) -> bool:
        """Whether an error names the pool that is too small, if one of several is."""
        pool = expected.pool if isinstance(expected, TooLargeError) else None
        return pool is None or f"the pool {pool!r} has" in str(error)

    def compare_states(self) -> None:
        """Mismatch unless both show the same."""
        expected = self.oracle.state(self.live_request_ids)
        state = self.system.state(self.live_request_ids)
        if state != expected:
            raise Mismatch(self._report(name_differences(expected, state)))

    def require_equal(self, name: str, expected: Any, value: Any) -> None:
        """Mismatch unless two values are the same."""
        if value != expected:
            raise Mismatch(self._report([f"{name}: {expected} against {value}"]))

    def require_same_figures(self) -> None:
        """Mismatch unless what is compared in the end alone is the same, too: nothing here."""

    def _report(self, differences: list[str]) -> str:
        first = self.num_calls - len(self._last_calls)
        calls = [f"  call {first + i}: {call}" for i, call in enumerate(self._last_calls)]
        return "\n".join(["oracle against system:", *differences, "the last calls:", *calls])

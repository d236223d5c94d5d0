"""Replicas behind a router: figures against a single scheduler, the router's knowledge against the caches, and deaths."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("msgspec")

from fleets import HAS_RAY, SETTINGS, make_fleet, make_records
from replays import make_manager
from settings import scale
from sources import MODELS, run_python

from pagepool.errors import PagePoolError
from pagepool.replay import Scheduler, TraceRecord, make_requests
from pagepool.replay.fleets.fleet import Fleet, FleetFigures, LocalReplicas, add_round, skip_rounds
from pagepool.replay.fleets.replica import HASH_SEED, ReplicaSettings
from pagepool.replay.fleets.router import ROUTERS, CachedPrefixRouter, LeastLoadedRouter, RoundRobinRouter, Router


def test_one_replica_does_what_a_scheduler_does() -> None:
    records = [TraceRecord(0, each.input_length, each.output_length, each.hash_ids) for each in make_records(1)]
    figures = make_fleet(records, RoundRobinRouter, num_replicas=1).run()
    requests = make_requests(records)
    alone = Scheduler(make_manager(600), requests, max_num_seqs=8).run()
    assert figures.num_requests == alone.requests == len(figures.wait_seconds) == 60
    for name in ("prompt_tokens", "hit_tokens", "generated_tokens", "preemptions"):
        assert getattr(figures, name) == getattr(alone, name), name
    assert alone.hit_tokens
    assert figures.wait_percentile(100) > figures.wait_percentile(50) > 0


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("seed", range(scale(3)))
def test_every_request_ends(router: type[Router], seed: int) -> None:
    records = make_records(seed)
    fleet = make_fleet(records, router, deaths=[(2.0, 1), (4.0, 0), (4.0, 2)])
    figures = fleet.run()
    assert figures.num_requests == len(records), f"seed {seed}"
    assert figures.num_deaths == 3
    assert figures.num_rerouted > 0
    assert sum(figures.computed_tokens) >= sum(record.input_length for record in records) - figures.hit_tokens
    assert figures.imbalance >= 1
    assert 0 < figures.hit_rate < 1
    assert figures.as_dict()["wait_seconds"]["p99"] >= figures.as_dict()["wait_seconds"]["p50"]


def test_the_prefix_router_knows_what_is_cached() -> None:
    """After each round, for each replica, from its events alone; also after a death."""
    records = make_records(3)
    fleet = make_fleet(records, CachedPrefixRouter, deaths=[(3.0, 1)])
    router: Any = fleet._router

    def compare(_: FleetFigures) -> None:
        for i, replica in enumerate(fleet._replicas._replicas):
            told = set(router.index.list_blocks(i).tolist())
            cached = {h for event in replica._manager.snapshot_events() for h in event.block_hashes.tolist()}
            assert told == cached

    fleet.run(compare)
    assert sum(replica._manager.stats().num_evicted_pages for replica in fleet._replicas._replicas)


def test_a_request_larger_than_the_pool_is_skipped() -> None:
    records = [*make_records(0, 5), TraceRecord(30_000, 600 * 16, 1, tuple(range(5000, 5019)))]
    figures = make_fleet(records, LeastLoadedRouter).run()
    assert (figures.num_requests, figures.num_skipped) == (5, 1)


MONTH = 30 * 86_400


class WalkingFleet(Fleet):
    """Runs every round, including those without an event."""

    def _find_next_event(self) -> float:
        return -math.inf


@pytest.mark.parametrize("report_seconds", [0.1, 1e-6, 1e5])
@pytest.mark.parametrize("months", [(0, 1, 2), (-3e6, 0, 3e6)], ids=str)
def test_months_without_requests_are_jumped_over(months: tuple[float, ...], report_seconds: float) -> None:
    """Few rounds are run."""
    records = [TraceRecord(1000 * MONTH * month, 700 + 40 * i, 5, (7, 100 + i)) for i, month in enumerate(months)]
    speeds = {"decode_step_seconds": 1e-6, "prefill_tokens_per_second": 1e9} if report_seconds < 1e-3 else {}
    replicas = LocalReplicas(3, ReplicaSettings(num_pages=600, **speeds), records)
    fleet = Fleet(replicas, RoundRobinRouter(3, 16, HASH_SEED), report_seconds=report_seconds, deaths=[(0.9 * MONTH, 1)])
    num_rounds = itertools.count(1)

    def count(_: FleetFigures) -> None:
        assert next(num_rounds) <= 2_000

    figures = fleet.run(count)
    assert (figures.num_requests, figures.num_deaths) == (3, 1)
    assert figures.end_seconds >= MONTH * (months[-1] - months[0])
    assert max(figures.wait_seconds) <= 1


@pytest.mark.parametrize("seed", range(scale(9)))
def test_jumping_changes_no_figure(seed: int) -> None:
    """Neither gaps between requests, nor steps longer than a round, nor deaths in the middle of either."""
    rng = Random(seed)
    router, report_seconds = [*ROUTERS.values()][seed % len(ROUTERS)], (0.1, 0.7, 1.0)[seed % 4 % 3]
    records, offset = [], 0.0
    for record in make_records(seed, num_requests=40):
        offset += rng.choice([0, 0, 0, 1000 * rng.uniform(0, 60)])
        records.append(TraceRecord(record.timestamp + offset, record.input_length, record.output_length, record.hash_ids))
    settings = ReplicaSettings(600, max_num_seqs=8, decode_step_seconds=rng.choice([0.025, 0.3, 2.5]))
    deaths = [(rng.uniform(0, 1 + offset / 1000), rng.randrange(3)) for _ in range(6)]
    walked, jumped = (
        kind(LocalReplicas(3, settings, records), router(3, 16, HASH_SEED), report_seconds=report_seconds, deaths=deaths)
        for kind in (WalkingFleet, Fleet)
    )
    assert jumped.run() == walked.run(), f"seed {seed}"
    assert jumped.figures.num_deaths == 6


def test_rounds_that_are_skipped_end_when_those_that_are_walked_do() -> None:
    """Exactly equal: for seconds that are binary fractions, and seconds smaller than the resolution of the time."""
    rng = Random(5)
    for case in range(scale(2_000)):
        start = rng.choice([0.0, 2.0 ** rng.randint(0, 20), 10 ** rng.uniform(-3, 6)])
        ulp = math.ulp(start)
        seconds = rng.choice([0.1, 1.0, 10 ** rng.uniform(-3, 3), 2.0 ** -rng.randint(0, 60), 0.4 * ulp, 0.5 * ulp, 2.5 * ulp])
        before, end = start, start
        for _ in range(rng.randint(1, 500)):
            before, end = end, add_round(end, seconds)
        assert skip_rounds(start, seconds, end) == end, f"case {case}"
        assert skip_rounds(start, seconds, math.nextafter(end, 0)) == before, f"case {case}"


class DyingReplicas(LocalReplicas):
    """One replica dies in every round."""

    def advance(self, until: float, arrivals: Any) -> list[Any]:
        return [OSError("no memory"), *super().advance(until, arrivals)[1:]]


def test_a_replica_that_dies_at_each_start_ends_the_run() -> None:
    replicas = DyingReplicas(3, SETTINGS, make_records(0))
    with pytest.raises(PagePoolError, match="replica 0 died 3 times in a row: no memory"):
        Fleet(replicas, RoundRobinRouter(3, SETTINGS.page_size, HASH_SEED)).run()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.parametrize("check", ["compare_with_one_process", "kill_an_actor"])
def test_on_ray(check: str, tmp_path: Path) -> None:
    """In a process of its own: Ray forks, and other tests have started the threads of jax. Its actors import from the folder in
    which it starts, so not among the sources.
    """
    process = run_python(MODELS / "ray_fleet.py", check, timeout=300, cwd=tmp_path)
    assert (process.returncode, process.stdout.splitlines()[-1:]) == (0, ["done"]), process.stderr

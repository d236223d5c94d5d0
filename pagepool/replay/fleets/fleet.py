"""Replicas behind a router, on one simulated clock, in one process or on Ray."""

import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagepool.errors import PagePoolError
from pagepool.replay.fleets.replica import HASH_SEED, Replica, ReplicaReport, ReplicaSettings
from pagepool.replay.fleets.router import ROUTERS, Router
from pagepool.replay.simulation.figures import Figures, find_hit_rate
from pagepool.replay.traces.reader import make_requests
from pagepool.replay.traces.records import TraceRecord

Arrivals = list[tuple[float, int]]
CONNECT_SECONDS = 10.0
MAX_PORT = 65535
MAX_DEATHS_IN_A_ROW = 3


class Replicas(ABC):
    """The replicas of a fleet, wherever they run."""

    def __init__(self, num_replicas: int, settings: ReplicaSettings, records: Sequence[TraceRecord]) -> None:
        """Start all replicas."""
        self.settings = settings
        self.num_replicas = num_replicas
        self.records = records
        self._replicas = [self._start(0.0) for _ in range(num_replicas)]

    @abstractmethod
    def _start(self, now: float) -> Any: ...

    @abstractmethod
    def advance(self, until: float, arrivals: Sequence[Arrivals]) -> list[ReplicaReport | Exception]:
        """Run each replica until a time, with its arrivals. Return the report of each, or the exception by which it died."""

    def restart(self, i: int, now: float) -> None:
        """Replace a replica."""
        self._replicas[i] = self._start(now)

    def close(self) -> None:  # noqa: B027  optional
        """Stop all replicas."""


class LocalReplicas(Replicas):
    """Replicas in this process, run one after another."""

    def _start(self, now: float) -> Replica:
        return Replica(self.settings, self.records, now)

    def advance(self, until: float, arrivals: Sequence[Arrivals]) -> list[ReplicaReport | Exception]:
        """Run each in turn."""
        return [replica.advance(until, each) for replica, each in zip(self._replicas, arrivals, strict=True)]


class RayReplicas(Replicas):
    """Replicas as Ray actors, run in parallel."""

    def __init__(self, num_replicas: int, settings: ReplicaSettings, records: Sequence[TraceRecord], address: str) -> None:
        """`address` is the cluster's address, ``"auto"`` for the cluster of this machine, or ``"local"`` to start a temporary
        one. Raise ConnectionError if it cannot be reached.
        """
        import ray

        self._ray = ray
        _require_listener(address)
        ray.init(None if address == "local" else address, log_to_driver=False, include_dashboard=False)
        self._actor = ray.remote(num_cpus=0, max_restarts=0)(Replica)
        self._shared_records = ray.put(list(records))
        super().__init__(num_replicas, settings, records)

    def _start(self, now: float) -> Any:
        return self._actor.remote(self.settings, self._shared_records, now)

    def advance(self, until: float, arrivals: Sequence[Arrivals]) -> list[ReplicaReport | Exception]:
        """Run all in parallel."""
        futures = [actor.advance.remote(until, each) for actor, each in zip(self._replicas, arrivals, strict=True)]
        return [self._get(future) for future in futures]

    def _get(self, future: Any) -> ReplicaReport | Exception:
        try:
            report: ReplicaReport | Exception = self._ray.get(future)
        except self._ray.exceptions.RayActorError as error:
            report = error
        return report

    def restart(self, i: int, now: float) -> None:
        """Replace an actor, killing the old one first."""
        self._ray.kill(self._replicas[i])
        super().restart(i, now)

    def close(self) -> None:
        """Disconnect from Ray, and stop a local cluster."""
        self._ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise ConnectionError if nothing listens at a host and port; Ray itself would wait for minutes. Raise ValueError for an
    invalid port.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        if not 0 < int(port) <= MAX_PORT:
            raise ValueError(f"{port} is no port from 1 to {MAX_PORT}")
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


@dataclass
class FleetFigures:
    """Figures of a fleet; times are on the simulated clock. Prompts of rerouted requests count at each replica that admits
    them. Preempted requests count as in `Figures`.
    """

    num_requests: int = 0
    num_skipped: int = 0
    num_rerouted: int = 0
    num_deaths: int = 0
    prompt_tokens: int = 0
    skipped_prompt_tokens: int = 0
    hit_tokens: int = 0
    returned_tokens: int = 0
    rehit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    wait_seconds: list[float] = field(default_factory=list, repr=False)
    computed_tokens: list[int] = field(default_factory=list)
    """Computed tokens by replica, including tokens recomputed after a preemption."""
    end_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of hit tokens among the prompt tokens that ran."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest replica, divided by the mean; 1.0 is perfect balance."""
        mean = sum(self.computed_tokens) / max(1, len(self.computed_tokens))
        return max(self.computed_tokens) / mean if mean else 1.0

    def wait_percentile(self, percent: float) -> float:
        """Return the percentile of the waiting times in seconds."""
        return float(np.percentile(self.wait_seconds, percent)) if self.wait_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""
        return {
            "requests": self.num_requests,
            "skipped": self.num_skipped,
            "rerouted": self.num_rerouted,
            "deaths": self.num_deaths,
            "prompt_tokens": self.prompt_tokens,
            "skipped_prompt_tokens": self.skipped_prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
            "returned_tokens": self.returned_tokens,
            "rehit_tokens": self.rehit_tokens,
            "generated_tokens": self.generated_tokens,
            "preemptions": self.preemptions,
            "imbalance": self.imbalance,
            "computed_tokens": self.computed_tokens,
            "wait_seconds": {name: self.wait_percentile(percent) for name, percent in WAIT_PERCENTILES.items()},
            "end_seconds": self.end_seconds,
        }


WAIT_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


class Fleet:
    """A fleet: routes the requests of a trace to replicas and runs them. Raises PagePoolError for a replica that dies three
    times in a row.

    Time advances in rounds of `report_seconds`. The arrivals of a round are routed by the reports from the end of the previous
    round; then all replicas run. The router's knowledge is therefore as old as in a cluster, and the figures do not depend on
    where the replicas run. Each of `deaths`, ``(seconds, replica)``, removes a replica and its cache at the start of a
    round; its requests are rerouted, and an empty replica replaces it. Rounds without an event are run as one.
    """

    def __init__(
        self,
        replicas: Replicas,
        router: Router,
        *,
        report_seconds: float = 1.0,
        deaths: Sequence[tuple[float, int]] = (),
    ) -> None:
        """Use a new router and new replicas. The first request arrives at 0 s."""
        self.figures = FleetFigures()
        self._replicas = replicas
        self._router = router
        records = replicas.records
        self._requests = make_requests(records, seed=replicas.settings.seed)
        start = records[0].timestamp if records else 0.0
        self._waiting = [((record.timestamp - start) / 1000, i) for i, record in enumerate(records)][::-1]
        self._running: list[dict[int, float]] = [{} for _ in range(replicas.num_replicas)]
        self._reported = [Figures() for _ in range(replicas.num_replicas)]
        self._next_step_seconds = [math.inf] * replicas.num_replicas
        self._deaths = sorted(deaths, reverse=True)
        self._num_deaths_in_a_row = [0] * replicas.num_replicas
        self._report_seconds = report_seconds

    def run(self, on_round: Callable[[FleetFigures], object] | None = None) -> FleetFigures:
        """Run until all requests have ended; `on_round` gets the figures after each round."""
        now = 0.0
        self.figures.computed_tokens = [0] * self._replicas.num_replicas
        while self._waiting or any(self._running):
            until = skip_rounds(add_round(now, self._report_seconds), self._report_seconds, self._find_next_event())
            reports = self._replicas.advance(until, self._route(now, until))
            for i, report in enumerate(reports):
                if isinstance(report, ReplicaReport):
                    self._count(i, report)
                else:
                    self._require_life(i, report)
                    self._bury(i, until)
            now = until
            if on_round is not None:
                on_round(self.figures)
        self.figures.end_seconds = now
        return self.figures

    def _find_next_event(self) -> float:
        """Return the time of the next arrival, death or step."""
        next_arrival = self._waiting[-1][0] if self._waiting else math.inf
        next_death = self._deaths[-1][0] if self._deaths else math.inf
        return min(next_arrival, next_death, *self._next_step_seconds)

    def _require_life(self, i: int, error: Exception) -> None:
        """Raise PagePoolError for a replica that dies repeatedly, since its replacement would die too."""
        self._num_deaths_in_a_row[i] += 1
        if self._num_deaths_in_a_row[i] == MAX_DEATHS_IN_A_ROW:
            raise PagePoolError(f"replica {i} died {MAX_DEATHS_IN_A_ROW} times in a row: {error}") from error

    def _route(self, now: float, until: float) -> list[Arrivals]:
        """Route the arrivals of a round. Return them by replica."""
        while self._deaths and self._deaths[-1][0] <= now:
            self._bury(self._deaths.pop()[1], now)
        arrivals: list[Arrivals] = [[] for _ in range(self._replicas.num_replicas)]
        while self._waiting and self._waiting[-1][0] < until:
            seconds, i = self._waiting.pop()
            request = self._requests[i]
            chosen = self._router.choose(i, request.all_token_ids)
            request.drop_token_ids()
            self._running[chosen][i] = seconds
            arrivals[chosen].append((seconds, i))
        return arrivals

    def _bury(self, i: int, now: float) -> None:
        """Replace a dead replica, and requeue its requests first."""
        self._replicas.restart(i, now)
        self._router.forget(i)
        lost = sorted(((seconds, request) for request, seconds in self._running[i].items()), reverse=True)
        for _, request in lost:
            self._router.end(request)
        self._waiting += lost
        self._running[i] = {}
        self._reported[i] = Figures()
        self._next_step_seconds[i] = math.inf
        self.figures.num_deaths += 1
        self.figures.num_rerouted += len(lost)

    def _count(self, i: int, report: ReplicaReport) -> None:
        self._num_deaths_in_a_row[i] = 0
        self._next_step_seconds[i] = report.next_step_seconds
        self._router.hear(i, report.events)
        for request in (*report.ended, *report.skipped):
            del self._running[i][request]
            self._router.end(request)
        figures, before, new = self.figures, self._reported[i], report.figures
        figures.num_requests += len(report.ended)
        figures.num_skipped += len(report.skipped)
        figures.wait_seconds += report.wait_seconds
        figures.prompt_tokens += new.prompt_tokens - before.prompt_tokens
        figures.skipped_prompt_tokens += new.skipped_prompt_tokens - before.skipped_prompt_tokens
        figures.hit_tokens += new.hit_tokens - before.hit_tokens
        figures.returned_tokens += new.returned_tokens - before.returned_tokens
        figures.rehit_tokens += new.rehit_tokens - before.rehit_tokens
        figures.generated_tokens += new.generated_tokens - before.generated_tokens
        figures.preemptions += new.preemptions - before.preemptions
        figures.computed_tokens[i] += _count_computed(new) - _count_computed(before)
        self._reported[i] = new


def add_round(time: float, seconds: float) -> float:
    """Return the end of a round; it is later than its start even if floats are coarser than `seconds` there."""
    return max(time + seconds, math.nextafter(time, math.inf))


def skip_rounds(time: float, seconds: float, until: float) -> float:
    """Return the end of the last round that ends by `until`, of consecutive rounds from `time`; `time` if none does.

    The result is the float that repeated calls of `add_round` give, in O(powers of two passed).
    """
    while (after := add_round(time, seconds)) <= until:
        is_settled = math.frexp(time)[1] == math.frexp(after)[1]  # then further steps are equal: a tie has rounded to even
        time = after
        if is_settled:
            step = add_round(time, seconds) - time
            num_rounds = int((min(until, math.ldexp(1.0, math.frexp(time)[1])) - time) / step) - 1  # rounds of one length
            time += max(0, num_rounds) * step
    return time


def _count_computed(figures: Figures) -> int:
    num_looked_up, num_hits = figures.prompt_tokens + figures.returned_tokens, figures.hit_tokens + figures.rehit_tokens
    return num_looked_up - num_hits + figures.generated_tokens


def make_replicas(
    num_replicas: int, settings: ReplicaSettings, records: Sequence[TraceRecord], ray: str | None = None
) -> Replicas:
    """Make replicas for a trace, in this process or on Ray at an address."""
    if ray is None:
        return LocalReplicas(num_replicas, settings, records)
    return RayReplicas(num_replicas, settings, records, ray)


def run_fleet(
    router: str,
    replicas: Replicas,
    settings: ReplicaSettings,
    *,
    report_seconds: float = 1.0,
    deaths: Sequence[tuple[float, int]] = (),
    on_progress: Callable[[int], object] = int,
) -> FleetFigures:
    """Run the trace of replicas behind a router of `ROUTERS`, and close the replicas. `on_progress` gets the number of ended or
    skipped requests.
    """
    try:
        chosen = ROUTERS[router](replicas.num_replicas, settings.page_size, HASH_SEED)
        fleet = Fleet(replicas, chosen, report_seconds=report_seconds, deaths=deaths)
        return fleet.run(lambda figures: on_progress(figures.num_requests + figures.num_skipped))
    finally:
        replicas.close()

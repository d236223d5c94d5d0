"""Replicas behind a router, on one clock: the same figures in one process and on Ray."""

import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagepool.errors import PagePoolError
from pagepool.hashing import get_siphash_key
from pagepool.replay.fleets.replica import HASH_SEED, Replica, ReplicaReport, ReplicaSettings
from pagepool.replay.fleets.router import ROUTERS, Router
from pagepool.replay.simulation.figures import Figures, find_hit_rate
from pagepool.replay.traces.reader import TraceRecord, make_requests

__all__ = ["Fleet", "FleetFigures", "LocalReplicas", "RayReplicas", "Replicas", "run_fleet"]

Arrivals = list[tuple[float, int]]
CONNECT_SECONDS = 10.0
MAX_DEATHS_IN_A_ROW = 3


class Replicas(ABC):
    """Where the replicas run."""

    def __init__(self, num_replicas: int, settings: ReplicaSettings, records: Sequence[TraceRecord]) -> None:
        """Start them all."""
        self.settings = settings
        self.num_replicas = num_replicas
        self.records = records
        self._replicas = [self._start(0.0) for _ in range(num_replicas)]

    @abstractmethod
    def _start(self, now: float) -> Any: ...

    @abstractmethod
    def advance(self, until: float, arrivals: Sequence[Arrivals]) -> list[ReplicaReport | Exception]:
        """Let each go on to a time with its arrivals; for one that died, why."""

    def restart(self, i: int, now: float) -> None:
        """Put a new one in the place of one that died, or is to die."""
        self._replicas[i] = self._start(now)

    def close(self) -> None:  # noqa: B027  there may be nothing to do
        """End them."""


class LocalReplicas(Replicas):
    """In this process, one after another."""

    def _start(self, now: float) -> Replica:
        return Replica(self.settings, self.records, now)

    def advance(self, until: float, arrivals: Sequence[Arrivals]) -> list[ReplicaReport | Exception]:
        """O(their steps)."""
        return [replica.advance(until, each) for replica, each in zip(self._replicas, arrivals, strict=True)]


class RayReplicas(Replicas):
    """As actors on Ray, side by side."""

    def __init__(self, num_replicas: int, settings: ReplicaSettings, records: Sequence[TraceRecord], address: str) -> None:
        """`address` of a cluster, ``"auto"`` for the one that this machine belongs to, or ``"local"`` to start one here for the
        time being. ConnectionError where there is none.
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
        """As long as the slowest takes."""
        futures = [actor.advance.remote(until, each) for actor, each in zip(self._replicas, arrivals, strict=True)]
        return [self._get(future) for future in futures]

    def _get(self, future: Any) -> ReplicaReport | Exception:
        try:
            report: ReplicaReport | Exception = self._ray.get(future)
        except self._ray.exceptions.RayActorError as error:
            report = error
        return report

    def restart(self, i: int, now: float) -> None:
        """Kill what is left of the old one."""
        self._ray.kill(self._replicas[i])
        super().restart(i, now)

    def close(self) -> None:
        """Leave Ray; one that was started here ends."""
        self._ray.shutdown()


def _require_listener(address: str) -> None:
    """ConnectionError if nobody listens at a host and port: Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


@dataclass
class FleetFigures:
    """What a fleet did. Tokens are tokens, times seconds on the replicas' clock. Prompts of requests that are routed anew count
    each time that a replica admits them. Requests that come back after a preemption count as in `Figures`.
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
    """By replica, those computed again after a preemption included."""
    end_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that ran: see `find_hit_rate`."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Tokens that the busiest replica computed, per token of the average one; 1.0: all did the same."""
        mean = sum(self.computed_tokens) / max(1, len(self.computed_tokens))
        return max(self.computed_tokens) / mean if mean else 1.0

    def wait_percentile(self, percent: float) -> float:
        """Seconds that so many percent of the requests waited at most."""
        return float(np.percentile(self.wait_seconds, percent)) if self.wait_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """Routes a trace's requests to replicas and runs them to the end. PagePoolError for a replica that dies at each start.

    Time goes on by `report_seconds`. In each such round the requests that arrive in it are routed by what the replicas
    reported at the end of the round before; then all replicas go on. So a router's knowledge is as old as in a cluster, and
    the figures do not depend on where the replicas run. At `deaths`, ``(seconds, replica)``, a replica is lost at the
    beginning of a round with its cache and its requests, which are routed anew; an empty one takes its place. Rounds in which
    nothing arrives, no step begins and no replica is lost are run as one.
    """

    def __init__(
        self,
        replicas: Replicas,
        router: Router,
        *,
        report_seconds: float = 1.0,
        deaths: Sequence[tuple[float, int]] = (),
    ) -> None:
        """The parts, all new. Requests come at their timestamps, the first at 0 s."""
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
        """Go on until every request has ended; `on_round` sees the figures so far after each round."""
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
        """The time before which nothing happens anywhere."""
        next_arrival = self._waiting[-1][0] if self._waiting else math.inf
        next_death = self._deaths[-1][0] if self._deaths else math.inf
        return min(next_arrival, next_death, *self._next_step_seconds)

    def _require_life(self, i: int, error: Exception) -> None:
        """PagePoolError for a replica that dies again and again: another one in its place would too."""
        self._num_deaths_in_a_row[i] += 1
        if self._num_deaths_in_a_row[i] == MAX_DEATHS_IN_A_ROW:
            raise PagePoolError(f"replica {i} died {MAX_DEATHS_IN_A_ROW} times in a row: {error}") from error

    def _route(self, now: float, until: float) -> list[Arrivals]:
        """The arrivals of a round, by replica."""
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
        """Replace a replica that died, and have its requests routed anew before all others."""
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
    """When a round of so many seconds ends that begins at `time`: later, even where a float cannot tell so few apart."""
    return max(time + seconds, math.nextafter(time, math.inf))


def skip_rounds(time: float, seconds: float, until: float) -> float:
    """The last end of a round at or before `until`, of rounds that follow one another from `time`; `time` if there is none.

    The same float as `add_round` gives, called for one round after another, in O(powers of two passed).
    """
    while (after := add_round(time, seconds)) <= until:
        is_settled = math.frexp(time)[1] == math.frexp(after)[1]  # a tie is rounded to an even float: from there it is constant
        time = after
        if is_settled:
            step = add_round(time, seconds) - time
            num_rounds = int((min(until, math.ldexp(1.0, math.frexp(time)[1])) - time) / step) - 1  # in this power of two
            time += max(0, num_rounds) * step
    return time


def _count_computed(figures: Figures) -> int:
    num_looked_up, num_hits = figures.prompt_tokens + figures.returned_tokens, figures.hit_tokens + figures.rehit_tokens
    return num_looked_up - num_hits + figures.generated_tokens


def run_fleet(
    router: str,
    num_replicas: int,
    settings: ReplicaSettings,
    records: Sequence[TraceRecord],
    ray: str | None = None,
    *,
    report_seconds: float = 1.0,
    deaths: Sequence[tuple[float, int]] = (),
    on_progress: Callable[[int], object] = int,
) -> FleetFigures:
    """Run a trace through replicas behind a router of `ROUTERS`, in this process or on Ray at an address; `on_progress` sees
    how many requests have ended or were skipped.
    """
    replicas: Replicas
    if ray is None:
        replicas = LocalReplicas(num_replicas, settings, records)
    else:
        replicas = RayReplicas(num_replicas, settings, records, ray)
    try:
        chosen = ROUTERS[router](num_replicas, settings.page_size, get_siphash_key(HASH_SEED))
        fleet = Fleet(replicas, chosen, report_seconds=report_seconds, deaths=deaths)
        return fleet.run(lambda figures: on_progress(figures.num_requests + figures.num_skipped))
    finally:
        replicas.close()

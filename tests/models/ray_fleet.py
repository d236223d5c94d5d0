"""Program: a fleet on Ray, compared with one in this process, or with an actor that is killed. Prints ``done``."""

from __future__ import annotations

import sys

import ray
from fleets import SETTINGS, make_fleet, make_records

from pagepool.replay.fleets.fleet import Fleet, FleetFigures, RayReplicas
from pagepool.replay.fleets.replica import HASH_SEED
from pagepool.replay.fleets.router import CachedPrefixRouter


def compare_with_one_process(replicas: RayReplicas) -> None:
    deaths = [(3.0, 2)]
    apart = Fleet(replicas, CachedPrefixRouter(3, SETTINGS.page_size, HASH_SEED), deaths=deaths).run()
    together = make_fleet(list(replicas.records), CachedPrefixRouter, deaths=deaths).run()
    if apart != together:
        sys.exit(f"on Ray {apart}, in one process {together}")


def kill_an_actor(replicas: RayReplicas) -> None:
    """To the fleet the actor dies by itself: its cache is lost, but not the run."""
    killed: list[int] = []

    def kill(figures: FleetFigures) -> None:
        if figures.num_requests > 20 and not killed:
            ray.kill(replicas._replicas[1])
            killed.append(1)

    figures = Fleet(replicas, CachedPrefixRouter(3, SETTINGS.page_size, HASH_SEED)).run(kill)
    if (figures.num_requests, figures.num_deaths) != (len(replicas.records), 1):
        sys.exit(f"{figures} of {len(replicas.records)} requests")


if __name__ == "__main__":
    running = RayReplicas(3, SETTINGS, make_records(4), "local")
    try:
        {"compare_with_one_process": compare_with_one_process, "kill_an_actor": kill_an_actor}[sys.argv[1]](running)
    finally:
        running.close()
    print("done")

"""What the order of a waiting queue costs and gains: hits and waiting times of a fleet, by load.

``python -m bench.studies.waiting`` runs parts of the conversation trace on four replicas, in order of arrival and with the
least to compute first, as `WaitingQueue` does. The times of the trace are stretched so that the prompts, without hits, are a
given part of what the replicas can compute. ``--num N`` takes N requests of each part, ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from pagepool.replay.fleets.fleet import make_replicas, run_fleet
from pagepool.replay.fleets.replica import ReplicaSettings
from pagepool.replay.traces.reader import read_trace
from pagepool.replay.traces.records import TraceRecord

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl"
LOADS = (0.5, 0.8, 1.0, 1.3)
PARTS = (0, 6000)
"""First requests of the parts. The rule was chosen on the first part."""
NUM_REPLICAS = 4
ORDERS = ("arrival", "work")


def stretch(records: Sequence[TraceRecord], load: float, settings: ReplicaSettings) -> list[TraceRecord]:
    """Return records whose times give the replicas this load."""
    num_tokens = sum(record.input_length for record in records)
    start = records[0].timestamp
    seconds = num_tokens / (load * NUM_REPLICAS * settings.prefill_tokens_per_second)
    factor = 1000 * seconds / (records[-1].timestamp - start)
    return [replace(record, timestamp=(record.timestamp - start) * factor) for record in records]


def measure(records: Sequence[TraceRecord], settings: ReplicaSettings) -> dict[str, float]:
    """Return the hit rate and the waiting times of a fleet."""
    figures = run_fleet("prefix", make_replicas(NUM_REPLICAS, settings, records), settings)
    waits = figures.wait_seconds
    mean = sum(waits) / len(waits)
    return {"hits": figures.hit_rate, "mean": mean, "p99": figures.wait_percentile(99), "longest": max(waits)}


def main() -> None:
    parser = ArgumentParser("bench.studies.waiting", description=__doc__)
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--parts", type=int, nargs="+", default=PARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not TRACE.exists():
        sys.exit(f"bench.studies.waiting: {TRACE} is not there")
    measured = []
    for first in args.parts:
        records = list(islice(read_trace(str(TRACE)), first, first + args.num))
        for load in args.loads:
            settings = ReplicaSettings(num_pages=65536)
            timed = stretch(records, load, settings)
            arrival, work = (measure(timed, replace(settings, order=order)) for order in ORDERS)
            measured.append({"first": first, "load": load, "arrival": arrival, "work": work})
            ratios = ", ".join(f"{name} {work[name] / arrival[name]:.2f}" for name in ("mean", "p99", "longest"))
            hits = f"hits {arrival['hits']:.1%} and {work['hits']:.1%}"
            means = f"mean wait {arrival['mean']:.2f} and {work['mean']:.2f} s"
            print(f"from {first:,}, load {load}: {hits}, {means}; {ratios}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()

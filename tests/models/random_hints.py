"""Random requests with fields of vLLM's, mostly nonsense: sessions, extra arguments and envelopes of actions."""

from __future__ import annotations

from math import inf, nan
from random import Random
from types import SimpleNamespace
from typing import Any

IDS = ("s1", "s2", "s3", "", "\x00\n", "s" * 5000, "日本")
NONSENSE = (None, True, -1, 0, 1, 3, 10**400, -(10**400), 2.5, -0.5, nan, inf, -inf, "", "3", b"1", [], [1], {}, (), object())
NUMBERS = (-1, 0, 1, 3, 0.5, 300, 86_400, 90_000, 1e300)
TYPES = ("kv.retain", "session.end", "kv.demote", "kv.pin", "kv.fetch", "kv.prefetch", "KV.RETAIN", "kv.retain ", "x\ny")
VERSIONS = ("1.0", "1", "1.7", "2.0", "0.9", "", "one")


def pick(rng: Random, values: Any) -> Any:
    """Return one of the values, or now and then nonsense."""
    return rng.choice(NONSENSE) if rng.random() < 0.15 else rng.choice(values)


def make_payload(rng: Random) -> Any:
    fields = {"seconds": NUMBERS, "session_id": IDS, "tokens": (1, 16, 100, 10**9), "more": (1,)}
    return pick(rng, [{name: pick(rng, values) for name, values in fields.items() if rng.random() < 0.6}])


def make_action(rng: Random, number: int) -> Any:
    name = f"gateway.{rng.randrange(10**6)}" if rng.random() < 0.1 else pick(rng, TYPES)
    action = {"action_type": name, "action_version": pick(rng, VERSIONS), "payload": make_payload(rng)}
    return pick(rng, [{"action_id": str(number), **action}, SimpleNamespace(**action)])


def make_envelope(rng: Random) -> Any:
    actions = [make_action(rng, i) for i in range(rng.choice((0, 1, 1, 2, 5, 30)))]
    envelope = {"protocol_version": pick(rng, VERSIONS), "message_id": "m", "actions": pick(rng, [actions])}
    return pick(rng, [None, envelope, SimpleNamespace(**envelope)])


def make_fields(rng: Random) -> dict[str, Any]:
    """Return the fields of a request that hints are read from."""
    arguments = {"pagepool_seconds": pick(rng, NUMBERS), "pagepool_close": pick(rng, (0, 1)), "other": "x"}
    kept = {name: value for name, value in arguments.items() if rng.random() < 0.5}
    return {
        "session_id": pick(rng, (None, *IDS)),
        "cache_salt": pick(rng, (None, "a", "b")),
        "sampling_params": pick(rng, [None, SimpleNamespace(extra_args=pick(rng, [None, kept]))]),
        "kv_hints": make_envelope(rng),
    }

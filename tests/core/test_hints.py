"""What is read of a request's hints: sessions, arguments, envelopes, and nonsense, which is ignored and named."""

from __future__ import annotations

from math import inf, nan
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from random_hints import make_fields
from settings import NUM_OPERATIONS

from pagepool.hints import ACTIONS, MAX_ACTIONS, MAX_PIN_SECONDS, MAX_SECONDS, Hints, read

Payload = dict[str, Any]


def with_arguments(**arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(session_id="s1", sampling_params=SimpleNamespace(extra_args=arguments), kv_hints=None)


def with_actions(*actions: tuple[str, Payload], version: str = "1.0", protocol: str = "1.0", **fields: Any) -> SimpleNamespace:
    """Make a request of session s1 with an envelope, as vLLM's structs are."""
    listed = [
        SimpleNamespace(action_id="a", action_type=name, action_version=version, payload=payload) for name, payload in actions
    ]
    return SimpleNamespace(
        session_id="s1", kv_hints=SimpleNamespace(protocol_version=protocol, message_id="m", actions=listed), **fields
    )


def test_a_request_that_says_nothing() -> None:
    assert read(object()) == read(SimpleNamespace(session_id=None, sampling_params=None, kv_hints=None)) == Hints()
    assert read(SimpleNamespace(session_id="")) == Hints()


def test_a_session_alone() -> None:
    assert read(SimpleNamespace(session_id="s1")) == Hints("s1")
    assert read(SimpleNamespace(session_id=7)) == Hints(ignored=("session_id",))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(3, 3.0), (0, 0.0), (2.5, 2.5), (-1, inf), (-inf, inf), (86_401, MAX_SECONDS), (inf, MAX_SECONDS), (10**400, MAX_SECONDS)],
)
def test_seconds(value: float, seconds: float) -> None:
    assert read(with_arguments(pagepool_seconds=value)) == Hints("s1", seconds)


@pytest.mark.parametrize("value", ["3", None, nan, True, [3], {}])
def test_wrong_seconds(value: object) -> None:
    assert read(with_arguments(pagepool_seconds=value)) == Hints("s1", ignored=("pagepool_seconds",))


@pytest.mark.parametrize("value", [1, True, 1.0])
def test_close(value: object) -> None:
    assert read(with_arguments(pagepool_close=value)) == Hints("s1", closes=True)
    assert read(with_arguments(pagepool_close=0)) == Hints("s1")


@pytest.mark.parametrize("value", ["1", 2, -1, nan, [1], None])
def test_wrong_close(value: object) -> None:
    assert read(with_arguments(pagepool_close=value)) == Hints("s1", ignored=("pagepool_close",))


def test_sessions_alone_are_read() -> None:
    request = with_actions(("session.end", {}), sampling_params=SimpleNamespace(extra_args={"pagepool_seconds": 1}))
    assert read(request, reads_times=False) == Hints("s1")
    assert read(request) == Hints("s1", 1.0, closes=True)


@pytest.mark.parametrize(
    ("name", "payload", "hints"),
    [
        ("kv.retain", {"seconds": 30}, Hints("s1", 30.0)),
        ("kv.retain", {"seconds": -1, "more": 1}, Hints("s1", inf)),
        ("kv.retain", {"seconds": 30, "session_id": "s1"}, Hints("s1", 30.0)),
        ("kv.retain", {"seconds": 1e9, "session_id": "s2"}, Hints("s1", retains=(("s2", MAX_SECONDS),))),
        ("session.end", {}, Hints("s1", closes=True)),
        ("session.end", {"session_id": "s1"}, Hints("s1", closes=True)),
        ("session.end", {"session_id": "s2"}, Hints("s1", demotes=("s2",))),
        ("kv.demote", {}, Hints("s1", inf)),
        ("kv.demote", {"session_id": "s2"}, Hints("s1", demotes=("s2",))),
        ("kv.pin", {"seconds": 300, "tokens": 128}, Hints("s1", pins=((128, 300.0),))),
        ("kv.pin", {"seconds": 9999, "tokens": 128}, Hints("s1", pins=((128, MAX_PIN_SECONDS),))),
    ],
)
def test_actions(name: str, payload: Payload, hints: Hints) -> None:
    assert read(with_actions((name, payload))) == read(with_actions((name, payload), version="1.9", protocol="1")) == hints
    as_dicts = {"protocol_version": "1.0", "actions": [{"action_type": name, "action_version": "1.0", "payload": payload}]}
    assert read(SimpleNamespace(session_id="s1", kv_hints=as_dicts)) == hints
    assert name in ACTIONS


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("kv.retain", {}),
        ("kv.retain", {"seconds": "3"}),
        ("kv.retain", {"seconds": 3, "session_id": 7}),
        ("kv.retain", {"seconds": 3, "session_id": ""}),
        ("kv.retain", None),
        ("kv.retain", [3]),
        ("session.end", 1),
        ("kv.demote", {"session_id": ["s2"]}),
        ("kv.pin", {"seconds": 3}),
        ("kv.pin", {"seconds": -1, "tokens": 16}),
        ("kv.pin", {"seconds": 3, "tokens": 0}),
        ("kv.pin", {"seconds": 3, "tokens": 16.0}),
    ],
)
def test_wrong_payloads(name: str, payload: Any) -> None:
    assert read(with_actions((name, payload))) == Hints("s1", ignored=(f"payload of {name}",))


def test_unknown_types_and_versions() -> None:
    assert read(with_actions(("kv.fetch", {}))).ignored == ("kv.fetch 1.0",)
    assert read(with_actions(("kv.retain", {"seconds": 3}), version="2.0")) == Hints("s1", ignored=("kv.retain 2.0",))
    assert read(with_actions(("kv.retain", {"seconds": 3}), protocol="2.0")) == Hints("s1", ignored=("kv_hints 2.0",))
    assert read(with_actions((f"a\nb{'c' * 100}", {}))).ignored == (f"a?b{'c' * 61} 1.0",)
    assert read(SimpleNamespace(kv_hints=7)).ignored == ("kv_hints (NoneType)",)
    assert read(SimpleNamespace(kv_hints={"protocol_version": "1", "actions": 7})).ignored == ("kv_hints",)


def test_the_first_actions_are_read() -> None:
    hints = read(with_actions(*[("kv.demote", {"session_id": f"s{i}"}) for i in range(2, 40)]))
    assert len(hints.demotes) == MAX_ACTIONS
    assert hints.ignored == ("actions above 16",)


def test_actions_override_arguments() -> None:
    request = with_actions(("kv.retain", {"seconds": 60}))
    request.sampling_params = SimpleNamespace(extra_args={"pagepool_seconds": 1})
    assert read(request) == Hints("s1", 60.0)


def test_nonsense() -> None:
    """Whatever the fields are, the hints are within their bounds."""
    for seed in range(NUM_OPERATIONS // 4):
        hints = read(SimpleNamespace(**make_fields(Random(seed))))
        times = [seconds for seconds in (hints.seconds, *(seconds for _, seconds in hints.retains)) if seconds is not None]
        assert all(0 <= seconds <= MAX_SECONDS or seconds == inf for seconds in times), seed
        assert all(num_tokens > 0 and 0 <= seconds <= MAX_PIN_SECONDS for num_tokens, seconds in hints.pins), seed
        assert len(hints.retains) + len(hints.demotes) + len(hints.pins) <= MAX_ACTIONS, seed
        assert len(hints.ignored) <= MAX_ACTIONS + 4, seed
        assert all(len(name) < 200 and name.isprintable() for name in hints.ignored), seed
        assert all(type(session) is str and session for session in (*hints.demotes, *(name for name, _ in hints.retains))), seed

"""Why a prompt does not hit behind a store: not asked, on its way, late, slower than computing, failed, or not there."""

from __future__ import annotations

import pytest
from test_store_tier import Clock, Host, Slow, clock, finish_loads, make_slow_host, make_store, tokens, wait

from pagepool import EngineRequest, MissCause

__all__ = ["clock"]


def make_host(objects: dict[bytes, bytes], **options: float) -> Host:
    host = Host(make_store(objects, **options), write="through")  # type: ignore[arg-type]
    host.manager.enable_explanations()
    return host


@pytest.fixture
def objects() -> dict[bytes, bytes]:
    """Return the objects of a store with four pages of a prompt."""
    objects: dict[bytes, bytes] = {}
    host = make_host(objects)
    host.run(tokens(1))
    host.stored.close()
    return objects


def cause(host: Host, request: EngineRequest) -> MissCause:
    return host.manager.explain(request).cause


def test_a_store_is_asked_and_loads(objects: dict[bytes, bytes]) -> None:
    host = make_host(objects)
    request = EngineRequest("request", tokens(1))
    assert cause(host, request) is MissCause.STORE_NOT_ASKED
    host.stored.fetch(request)
    assert cause(host, request) is MissCause.STORE_LOADING
    for _ in range(8):
        host.stored.poll()
    assert host.stored.is_ready(request)
    report = host.manager.explain(request)
    assert (report.cause, report.num_hit_tokens, report.num_tier_tokens) == (MissCause.COMPLETE, 16, 16)
    assert host.compute(request) == 16


def test_what_the_store_lacks_was_never_computed() -> None:
    host = make_host({})
    request = host.fetch(tokens(1))
    for _ in range(8):
        host.stored.poll()
    assert host.stored.is_ready(request)
    assert cause(host, request) is MissCause.NEVER_COMPUTED


def test_a_store_fails(objects: dict[bytes, bytes]) -> None:
    host = make_host(objects, share=1.0)
    assert cause(host, host.fetch(tokens(1))) is MissCause.STORE_FAILED


def test_a_store_damages_objects(objects: dict[bytes, bytes]) -> None:
    host = make_host({key: bytes(len(value)) for key, value in objects.items()})
    request = host.fetch(tokens(1))
    for _ in range(8):
        host.stored.poll()
    assert cause(host, request) is MissCause.STORE_FAILED


def test_a_request_does_not_wait_for_a_late_store(objects: dict[bytes, bytes], clock: Clock) -> None:
    host = make_host(objects, delay=100)
    request = host.fetch(tokens(1))
    assert not host.stored.is_ready(request)
    clock.now += 1.0
    assert host.stored.is_ready(request)
    assert cause(host, request) is MissCause.STORE_LATE


def test_loading_would_be_slower(clock: Clock) -> None:
    host = make_slow_host(clock, 0.01, 1000)
    host.manager.enable_explanations()
    request = host.fetch(tokens(2, 8))
    host.stored.poll()
    assert cause(host, request) is MissCause.STORE_SLOWER
    assert isinstance(host.store, Slow)
    wait(host, request, clock)
    finish_loads(host, clock)


def test_without_explanations_no_fetch_is_known(objects: dict[bytes, bytes]) -> None:
    host = Host(make_store(objects))
    assert cause(host, host.fetch(tokens(1))) is MissCause.STORE_NOT_ASKED

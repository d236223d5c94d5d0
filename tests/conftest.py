"""Fixtures of several files. Helpers that import EasyDeL, Ray or vLLM are excluded from doctest collection, since these are not
always installed.
"""

import gc
import sys
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import hybrids
import pytest

from pagepool.hashing import extra_keys

ENGINES_NEEDED = ["easydel_scheduler", "ray_fleet", "tiny_engine"]
ENGINES_NEEDED += ["vllm_core", "vllm_planted", "vllm_side", "vllm_state", "vllm_workload"]
collect_ignore = ["typing", *(f"models/{name}.py" for name in ENGINES_NEEDED)]


@pytest.fixture
def same_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the keys of unnamed images be the same when a seed is repeated: policies go by keys."""
    monkeypatch.setattr(extra_keys, "os", SimpleNamespace(urandom=Random(0).randbytes))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drafter" in metafunc.fixturenames:
        parts_at_a_page = metafunc.definition.get_closest_marker("parts_at_a_page") is not None
        metafunc.parametrize("drafter", [None] if parts_at_a_page else [None, "drafter"], indirect=True)


@pytest.fixture
def drafter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `hybrids.make_manager` make managers without a drafter, and in another run of the test for one with a lookahead."""
    monkeypatch.setattr(hybrids, "DRAFTER", {"use_eagle": True, "hash_lookahead": 1} if request.param else {})


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Let threads switch as often as CPython permits."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Leave the objects of other modules out of what a test or its children collect."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()

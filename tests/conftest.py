"""Fixtures of several files. Helpers that import EasyDeL, Ray or vLLM are excluded from doctest collection, since these are not
always installed.
"""

import sys
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import pytest

from pagepool.hashing import extra_keys

ENGINES_NEEDED = ["easydel_scheduler", "ray_fleet", "tiny_engine"]
ENGINES_NEEDED += ["vllm_core", "vllm_planted", "vllm_side", "vllm_state", "vllm_workload"]
collect_ignore = ["typing", *(f"models/{name}.py" for name in ENGINES_NEEDED)]


@pytest.fixture
def same_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the keys of unnamed images be the same when a seed is repeated: policies go by keys."""
    monkeypatch.setattr(extra_keys, "os", SimpleNamespace(urandom=Random(0).randbytes))


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Let threads switch as often as CPython permits."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)

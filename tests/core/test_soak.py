"""Short rounds of each kind of a soak, and a soak's detection of errors."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import soak
from pairs import KINDS as WORKS
from settings import scale
from soak import KINDS, LONG, Soak, SoakError, replay, take_turns

import pagepool
from pagepool.replay.simulation.allocator import BatchAllocator

SEED = 4
FULL_512 = next(setting for setting in LONG if setting.name == "300 pages of 512")


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "NUM_CALLS", 200)
    monkeypatch.setattr(soak, "load_trace", list)


@pytest.mark.parametrize("kind", ["contents", *WORKS])
def test_a_short_round(kind: str) -> None:
    for seed in range(scale(3)):
        assert KINDS[kind](seed).total() > 100


@pytest.mark.parametrize("seed", range(4))
def test_replays_are_the_same(seed: int) -> None:
    for setting in LONG:
        counts = replay(setting, seed, 6)
        assert counts["replayed requests"] == 6
        assert counts["replayed steps"] > 6


def test_each_kind_has_its_turn() -> None:
    assert {*take_turns()} == {*KINDS}


def test_a_seed_is_a_round() -> None:
    first, again, other = (KINDS["contents"](seed) for seed in (1, 1, 2))
    assert first == again != other


# --- detection of errors --------------------------------------------------------------------------------------


def drop_one_more(allocator: BatchAllocator, rows: Any, seconds: Any = None) -> None:
    """Release rows, and drop an entry beside them."""
    allocator._manager.page_pool.evict_pages(range(1, 10))
    allocator._batch.release(rows, seconds=seconds)


def free_nothing(manager: pagepool.CacheManager, *_: Any, **__: Any) -> None:
    """Leave the pages of a request held."""


BROKEN = {
    "a leak": (pagepool.CacheManager, "free", free_nothing, "left at the end: .'pages held': [1-9]"),
    "hashes that stay": (pagepool.CacheManager, "free_page_hashes", free_nothing, "'requests with hashes': [1-9]"),
    "entries that one replay drops": (BatchAllocator, "finish", drop_one_more, "replays differ: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, broken, message = BROKEN[name]
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(SoakError, match=message):
        replay(FULL_512, SEED, 6)


def test_a_failing_round_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(KINDS, "contents", lambda seed: [][seed])
    with pytest.raises(IndexError):
        Soak(41).run_round("contents")
    assert "python tests/models/soak.py --kind 'contents' --seed 41 --rounds 1" in capsys.readouterr().out


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(KINDS, "rows", lambda seed: Counter(rows=seed))
    monkeypatch.setattr(sys, "argv", ["soak.py", "--kind", "rows", "--rounds", "2", "--seed", "3"])
    soak.main()
    said = capsys.readouterr().out
    assert "seed 4  rows" in said
    assert "3 to 4" in said


def test_memory_that_grows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(0, 10_000, 20))
    monkeypatch.setattr(soak, "read_resident_mib", lambda: float(next(sizes)))
    monkeypatch.setitem(KINDS, "rows", lambda seed: Counter(rows=seed))
    work = Soak(0)
    for _ in range(soak.MIN_SAMPLES + 1):
        work.run_round("rows")
    with pytest.raises(SoakError, match="resident memory has grown"):
        work.require_flat()

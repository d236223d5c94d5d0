"""A short soak of each kind, and a soak's detection of errors."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import soak
from settings import NUM_OPERATIONS
from soak import SHORT, Kind, Round, Soak, take_turns
from soak_engine import BatchSide, CountingAllocator, Engine, ManagerSide, SoakError
from soak_faults import Faults

import pagepool

SEED = 4
NUM_STEPS = min(20 + max(NUM_OPERATIONS, 20_000) // 2000, 60)
FULL_4 = next(kind for kind in SHORT if kind.name == "full 4")


def shorten(kind: Kind, num_steps: int) -> Kind:
    return replace(kind, num_steps=num_steps, num_requests=2 * num_steps)


def run_round(kind: Kind, seed: int = SEED) -> Round:
    work = Round(kind, seed, [])
    work.run()
    return work


@pytest.mark.parametrize(("seed", "kind"), [*enumerate(take_turns(), SEED)], ids=lambda value: getattr(value, "name", value))
def test_a_short_round(seed: int, kind: Kind) -> None:
    work = run_round(shorten(kind, NUM_STEPS), seed)
    assert work.counts["operations"] > NUM_STEPS
    assert work.faults.counts.total() > NUM_STEPS // 12


def test_every_fault_is_injected() -> None:
    """Each in turn, in the middle of a round."""
    work = Round(replace(FULL_4, fault_rate=0.0), SEED, [])
    for fault in [each.__name__ for each in work.faults.faults]:
        counts = work.faults.counts.copy()
        for _ in range(200):
            work.faults.step()
            getattr(work.faults, fault)()
            if work.faults.counts != counts:
                break
        assert work.faults.counts != counts, fault
    work.end()


def test_a_seed_is_a_round() -> None:
    first, again, other = (run_round(shorten(FULL_4, NUM_STEPS), seed) for seed in (1, 1, 2))
    assert first.counts == again.counts
    assert first.faults.counts == again.faults.counts
    assert first.faults.counts != other.faults.counts


def test_contents_have_their_share_of_the_time() -> None:
    work = Soak(0, [])
    work.start -= 2
    work.run_contents()
    assert work.contents["slots compared"] > work.contents["slots written"] > 0
    assert work.contents_seconds >= 0.5
    work.run_round(shorten(FULL_4, 5))
    assert dict(work.lines())["contents: rounds"] == f"{work.contents['rounds']:,}"


# --- detection of errors --------------------------------------------------------------------------------------


def abort_nothing(engine: Engine, row: int) -> None:
    """End a request without freeing its pages."""
    engine.running = engine.running[engine.running != row]
    engine._requests.pop(row)
    engine._free_rows.append(row)


def drop_one_more(side: ManagerSide, row: int) -> None:
    """Preempt a request, and drop another entry on this side alone."""
    side.manager.page_pool.evict_pages([1])
    CountingAllocator.preempt(side, row)


def free_wrongly(pool: pagepool.PagePool, page_ids: Any) -> None:
    """Ignore the release of pages without holders."""


BROKEN = {
    "a leak": (Engine, "abort", abort_nothing, "."),
    "another entry dropped": (ManagerSide, "preempt", drop_one_more, "against|differ"),
    "a double free that passes": (pagepool.PagePool, "free_page_ids", free_wrongly, "not refused"),
    "a reset in use": (pagepool.PagePool, "_reset_prefix_cache", lambda pool: True, "was reset"),
    "a room that is not there": (BatchSide, "grow", lambda side, rows, nums: len(rows), "against|got"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, broken, message = BROKEN[name]
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises((SoakError, pagepool.errors.PagePoolError), match=message):
        run_round(FULL_4)


def test_a_failing_round_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Faults, "inject", lambda faults: faults.rng.choices([]))
    with pytest.raises(IndexError):
        Soak(41, []).run_round(FULL_4)
    assert "python tests/models/soak.py --kind 'full 4' --seed 41 --rounds 1" in capsys.readouterr().out


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "load_trace", list)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--kind", "window 9", "--rounds", "2", "--seed", "3"])
    soak.main()
    said = capsys.readouterr().out
    assert "seed 4  window 9" in said
    assert "3 to 4" in said
    monkeypatch.setattr(sys, "argv", ["soak.py", "--kind", "unheard of"])
    with pytest.raises(SystemExit, match="got 'unheard of', allowed: full 1, "):
        soak.main()


# --- memory -------------------------------------------------------------------------------------------------


def test_memory_that_grows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(0, 10_000, 20))
    monkeypatch.setattr(soak, "read_resident_mib", lambda: float(next(sizes)))
    work = Soak(0, [])
    for _ in range(soak.MIN_SAMPLES + 1):
        work.run_round(shorten(FULL_4, 5))
    with pytest.raises(SoakError, match="resident memory has grown"):
        work.require_flat()

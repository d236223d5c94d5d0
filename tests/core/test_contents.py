"""Cached pages are computed pages: short rounds of the simulation of contents, and its detection of errors."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from contents import CONTENTS_SETTINGS, FEATURES, Simulation, run_round
from contents_device import ContentsError, Device, Histories, find_first_read
from contents_index import Books
from contents_request import Job
from planted_bugs import BUGS, Bug, plant_all, plant_in, read_texts
from pool_ranges import Pools
from settings import NUM_OPERATIONS, Group, Setting
from sources import ROOT

from pagepool import CacheManager
from pagepool.hashing import RequestExtraKeys

NUM_CALLS = NUM_OPERATIONS // 2  # each is followed on the device
NUM_STEPS = 60
EVENTS = """look-ups, hits, aborted steps, failed loads, preemptions, refused claims, transfers, copies,
forks, refused seconds, copies taken late, steps in flight, hits of the tier, pages saved, pages loaded, failed transfers,
failed transfers from elsewhere, leases, pages leased, pages expected, pages of sessions, leases that are
over, tokens read by lists, tokens read by levels, tokens read by lines, pages that need not be read again,
rows ended in flight, pages held in the tier"""


def find_setting(name: str) -> Setting:
    return next(setting for setting in CONTENTS_SETTINGS if setting.name == name)


FULL_4 = find_setting("full 4")


@pytest.mark.parametrize("setting", CONTENTS_SETTINGS, ids=lambda setting: setting.name)
def test_what_is_read_was_computed(setting: Setting) -> None:
    """With features that each seed chooses, and before that with those of the tier."""
    seed = zlib.crc32(f"contents {setting.name}".encode())
    num_calls = max(-(-NUM_CALLS // len(CONTENTS_SETTINGS)), 150)
    counts = run_round(setting, seed, NUM_STEPS, num_calls // 2, features=FEATURES)
    while counts["calls"] < num_calls:
        counts += run_round(setting, seed + counts["rounds"], NUM_STEPS, num_calls - counts["calls"])
    assert counts["slots written"] > 0
    assert counts["slots compared"] > 0


@pytest.mark.parametrize(("name", "first_seed"), [("full 4", 0), ("full 2, state every 8", 8)])
def test_everything_happens(name: str, first_seed: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 6):
        counts += run_round(find_setting(name), seed, features=FEATURES)
    missing = [event for event in EVENTS.replace("\n", " ").split(", ") if not counts[event]]
    assert not missing
    assert (counts["states written"] > 0) == ("state" in name)


def test_a_round_without_features_has_none() -> None:
    counts = run_round(FULL_4, 0, features=[])
    assert not [name for name in ("pages saved", "forks", "leases", "pages expected") if counts[name]]


def test_a_seed_is_a_round() -> None:
    first, again, other = (run_round(FULL_4, seed, NUM_STEPS) for seed in (1, 1, 2))
    assert first == again != other


# --- detection of errors ------------------------------------------------------------------------------------------


def run_rounds(num_rounds: int = 30) -> None:
    for seed in range(num_rounds):
        run_round(FULL_4, seed)


def test_embeddings_that_are_left_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestExtraKeys, "_embedded_keys", lambda self, start, end: ())
    with pytest.raises(ContentsError, match="to repeat"):
        run_rounds()


def test_caching_of_what_was_not_computed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager whose `free` does not know how much was computed."""
    free: Callable[..., None] = CacheManager.free
    monkeypatch.setattr(CacheManager, "free", lambda self, request, **_: free(self, request))
    with pytest.raises(ContentsError, match="to repeat"):
        run_rounds()


def test_bugs_can_be_planted() -> None:
    """`make planted` builds and catches them."""
    texts = read_texts(ROOT)
    assert all(text != texts[file] for file, text in plant_all(texts).items())
    assert all(plant_in(texts, bug) for bug in BUGS)


@pytest.mark.parametrize("texts", [{"a.py": "x = 1; x = 1"}, {"a.pyx": "x = 1", "b.pxd": "x = 1"}], ids=str)
def test_a_bug_that_does_not_fit_is_reported(texts: dict[str, str]) -> None:
    with pytest.raises(LookupError, match="late: its text is 2 times"):
        plant_in({Path(name): text for name, text in texts.items()}, Bug("late", ["x = [-1-]{+2+}"]))


# --- the parts ----------------------------------------------------------------------------------------------------


def test_histories_are_equal_where_all_before_is_equal() -> None:
    histories = Histories()
    jobs = [Job(str(i), tokens, 8, histories) for i, tokens in enumerate(([1, 2, 3], [1, 2, 4], [2, 2, 3]))]
    first, second, third = (job.list_histories(3) for job in jobs)
    assert first[:2] == second[:2]
    assert len({first[2], second[2], *third}) == 5
    assert histories.list_last(second[2], 2) == second[1:]
    assert jobs[0].list_draft_histories([5]) == jobs[0].list_draft_histories([5])
    salted = Job("salted", [1, 2, 3], 8, histories, cache_salt="salt")
    assert not set(salted.list_histories(3)) & set(first)


def test_the_device_tells_what_it_read() -> None:
    groups = [Group("full", 4), Group("full", 2)]
    device = Device(Pools.of(4, [("kv", False)] * 2), groups)
    slots = np.array([4, 5, 6], dtype=np.int32)
    device.write(0, slots, [7, 8, 9])
    device.compare(0, slots, [7, 8, 9], "read")
    with pytest.raises(ContentsError, match="read: group 0, number 1 of 3 tokens, page 1, slot 1: read history 8 of group 0"):
        device.compare(0, slots, [7, 0, 9], "read")
    device.write(1, np.array([3], dtype=np.int32), [7])  # another group's page 1
    with pytest.raises(ContentsError, match="history 7 of group 1, computed was 8"):
        device.compare(0, slots, [7, 8, 9], "read")
    with pytest.raises(ContentsError, match="null page"):
        device.write(0, np.array([3], dtype=np.int32), [7])
    assert (device.num_written, device.num_compared) == (4, 9)


@pytest.mark.parametrize(
    ("group", "firsts"),
    [
        (Group("full", 4), [0, 0, 0, 0, 0]),
        (Group("sliding", 4, 3), [0, 0, 0, 1, 2]),
        (Group("chunked", 4, 3), [0, 0, 0, 3, 3]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_what_a_token_attends_to(group: Group, firsts: list[int]) -> None:
    assert [find_first_read(group, position) for position in range(5)] == firsts


def test_hits_are_worked_out_from_tokens() -> None:
    books = Books(Setting("", (Group("full", 2),), (8,)), 8)
    histories = Histories()
    job, other = Job("a", [1, 2, 3, 4, 5], 8, histories), Job("b", [1, 2, 3, 4], 8, histories)
    books.attach(job, [[]], 0, None)
    books.take(job, [[3, 4, 5]], None)
    assert books.enter(job, job.list_histories(5)) == [3, 4]
    assert (books.find_hit_length(job, None), books.find_hit_length(other, None)) == (4, 2)  # one token is left to compute
    books.index.drop(3)
    assert books.find_hit_length(job, None) == 0


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Simulation) -> None:
        raise ContentsError("wrong")

    monkeypatch.setattr(Simulation, "audit", fail)
    with pytest.raises(ContentsError, match="--setting 'full 4' --seed 3 --rounds 1\nContentsError: wrong"):
        run_round(FULL_4, 3)

"""`pagepool doctor --pool`: what stands out in a dump, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, HostTier, StoreStats
from pagepool.doctor.command import main

SPEC = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
Values = dict[str, Any]


@pytest.fixture
def values() -> Values:
    dump: Values = json.loads(json.dumps(CacheManager(41, [CacheGroupSpec(SPEC)], 64, host_tier=HostTier(100)).dump()))
    return dump


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "dump.json"


def diagnose(values: Values, path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what stands out, by JSON; the text says the same."""
    path.write_text(json.dumps(values))
    code = main(["--pool", str(path), "--json"])
    diagnosis = json.loads(capsys.readouterr().out)
    problems = diagnosis.pop("problems")
    assert diagnosis == values
    assert code == bool(problems)
    assert main(["--pool", str(path)]) == code
    text = capsys.readouterr().out
    for problem in problems:
        assert f"- {problem['what']}\n  {problem['remedy']}" in text
    assert problems or text.endswith("\n\nNothing stands out.\n")
    return [problem["what"] for problem in problems]


def make_holder(name: str, seconds: float | None = 1.0, num_pages: int = 1, **changes: Any) -> Values:
    counts = {"num_pages": {"kv": num_pages}, "num_own_pages": {"kv": num_pages}}
    return {"kind": "request", "name": name, **counts, "seconds": seconds, "seconds_left": None} | changes


def test_nothing(values: Values, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values["held"]["holders"] = [make_holder("a"), make_holder("b", 20.0), make_holder("c", 500.0)]
    assert diagnose(values, path, capsys) == []


HELD: dict[str, tuple[list[Values], list[str]]] = {
    "old": (
        [*(make_holder(f"r{i}", 70.0) for i in range(5)), make_holder("lost\n", 9000.0, 7)],
        ["held for much longer than by others: lost\\n (7 pages, 9,000 s)"],
    ),
    "many old": (
        [*(make_holder(f"r{i}", 2.0) for i in range(9)), *(make_holder(f"o{i}", 700.0 + i) for i in range(5))],
        ["held for much longer than by others: o4 (1 page, 704 s), o3 (1 page, 703 s), o2 (1 page, 702 s) and 2 more"],
    ),
    "all are old": ([make_holder(f"r{i}", 9000.0 + i) for i in range(5)], []),
    "alone": ([make_holder("a", 3601.0)], ["held for much longer than by others: a (1 page, 3,601 s)"]),
    "alone, young": ([make_holder("a", 3599.0)], []),
    "caller": ([make_holder("", None, 3, kind="caller")], ["the caller itself holds 3 pages"]),
    "leases": (
        [make_holder("0", 5.0, kind="lease"), make_holder("1", 5.0, kind="lease", seconds_left=3.0)],
        ["1 lease without an end: 0 (1 page, 5 s)"],
    ),
}


@pytest.mark.parametrize(("holders", "expected"), HELD.values(), ids=HELD)
def test_holders(
    holders: list[Values], expected: list[str], values: Values, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["held"]["holders"] = holders
    assert diagnose(values, path, capsys) == expected


def change(owner: str, **fields: Any) -> Callable[[Values], None]:
    def apply(values: Values) -> None:
        found: Any = values
        for part in owner.split("."):
            found = found[part]
        found |= fields

    return apply


STORE = dict.fromkeys(StoreStats._fields, 0)
STATS: dict[str, tuple[Callable[[Values], None], list[str]]] = {
    "full": (change("stats.pools.kv", num_free_pages=0), ["pool kv has no free page"]),
    "refused": (change("stats.pools.kv", num_refusals=5), ["pool kv had too few pages for 5 calls, with 0 requests"]),
    "preempted": (
        change("stats.preempted_queries", num_requests=1),
        ["1 request came back after a preemption, 0 were new"],
    ),
    "no hits": (
        change("stats.queries", num_requests=20, num_queried_tokens=2000),
        ["no prompt of 20 requests hit a token"],
    ),
    "few requests": (change("stats.queries", num_requests=19, num_queried_tokens=2000), []),
    "lost hits": (
        change("stats.pools.kv", num_lost_hit_tokens=11),
        ["pool kv lost hits of 11 tokens, of 0 looked up"],
    ),
    "no caching": (change("settings", enable_caching=False), ["prefix caching is off"]),
    "small tier": (
        change("stats.host_tier", num_pages=39),
        ["the host tier has 39 pages, fewer than the 40 of the pool"],
    ),
    "refusing tier": (
        change("stats.host_tier", num_refused_pages=11, num_saved_pages=100),
        ["11 pages found no room in the host tier, 100 were saved"],
    ),
    "failing tier": (change("stats.host_tier", num_failed_pages=1), ["1 transfer of the host tier failed"]),
    "failing store": (
        change("stats", store=STORE | {"num_errors": 2, "num_damaged_pages": 1}),
        ["the store had 2 faults and 1 damaged page"],
    ),
    "slow store": (
        change("stats", store=STORE | {"num_dropped_pages": 11, "num_saved_pages": 100}),
        ["the store had no room in its queue for 11 pages, 100 were saved"],
    ),
}


@pytest.mark.parametrize(("apply", "expected"), STATS.values(), ids=STATS)
def test_statistics(
    apply: Callable[[Values], None],
    expected: list[str],
    values: Values,
    path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    apply(values)
    assert diagnose(values, path, capsys) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("", "dump: got what is no JSON"),
        ('{"pagepool_dump": 1}', "dump: got no 'version'"),
    ],
)
def test_files_that_are_none(content: str | None, message: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as info:
        main(["--pool", str(path)])
    assert info.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"error: {path}: {message}" in output.err


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["--pool", str(tmp_path)])
    assert info.value.code == 2
    assert "Is a directory" in capsys.readouterr().err


def test_engines_are_another_question(path: Path) -> None:
    with pytest.raises(SystemExit) as info:
        main(["--pool", str(path), "--engines"])
    assert info.value.code == 2

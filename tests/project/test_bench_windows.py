"""The benchmarks of windows: hits beside those of the pure-Python twin, other uses of a pool, chats, and the file of hits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest
from oracle import OracleManager
from small_traces import BLOCK_SIZE, make_records
from sources import ROOT

from pagepool.group_rules import find_interval
from pagepool.replay import SimulatedRequest, TraceRecord

sys.path.append(str(ROOT))  # last: the installed package stays the one that is imported
windows = pytest.importorskip("bench.windows", reason="bench/ is not here")
from bench import hits, windows_cases  # noqa: E402  where it is here
from bench.chats import LEAST_QUESTION_LEN, make_chats, make_chats_in_turn  # noqa: E402
from bench.workload import PAGE_SIZE, BenchRequest  # noqa: E402

CHUNK_LEN = 96
LAYOUTS = [
    windows.Layout("full", 0, 1),
    windows.Layout("windows", 2, 64),
    windows.Layout("uneven windows", 1, 50),
    windows.Layout("chunks", 2, 128, is_chunked=True),
]


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CHUNK_LEN", CHUNK_LEN)
    monkeypatch.setattr(windows_cases, "CHUNK_LEN", CHUNK_LEN)


class Twin:
    """The pure-Python twin, under the same steps."""

    def __init__(self, layout: windows.Layout, num_pages: int, keeps: str) -> None:
        groups = layout.make_groups()
        interval = 0 if keeps == "all" else find_interval([group.kv_cache_spec for group in groups])
        options = {"windows": keeps, "window_slack": 64, "window_interval": interval}
        self.manager = OracleManager(num_pages, groups, windows.MAX_MODEL_LEN, **options)
        self.num_requests = 0

    def run(self, simulated: SimulatedRequest) -> int:
        self.num_requests += 1
        token_ids, num_prompt_tokens = simulated.make_token_ids().tolist(), simulated.num_prompt_tokens
        request = BenchRequest(f"request {self.num_requests}", token_ids[:num_prompt_tokens])
        hits, num_hits = self.manager.get_computed_pages(request)
        while request.num_computed_tokens < simulated.num_slots:
            start = request.num_computed_tokens or num_hits
            if start == request.num_tokens:
                stop = min(simulated.num_slots, start + PAGE_SIZE - start % PAGE_SIZE)
                request.all_token_ids += token_ids[start:stop]
            num_new_tokens = min(CHUNK_LEN, request.num_tokens - start)
            placement = (num_hits, hits) if request.num_computed_tokens == 0 else ()
            assert self.manager.allocate_slots(request, num_new_tokens, *placement) is not None
            request.num_computed_tokens = start + num_new_tokens
        self.manager.free(request)
        return num_hits


def count_shared(requests: list[SimulatedRequest]) -> list[int]:
    """Count the tokens of each prompt's longest prefix of whole pages that an earlier request computed."""
    numbers: dict[tuple[int, bytes], int] = {}  # of prefixes, by the number of the prefix a page shorter and the last page
    nums_shared = []
    for request in requests:
        token_ids = request.make_token_ids()
        prefix, is_shared, num_shared = 0, True, 0
        for start in range(0, request.num_slots - PAGE_SIZE + 1, PAGE_SIZE):
            last = prefix, token_ids[start : start + PAGE_SIZE].tobytes()
            is_shared = is_shared and last in numbers and start + PAGE_SIZE < request.num_prompt_tokens
            num_shared += PAGE_SIZE * is_shared
            prefix = numbers.setdefault(last, len(numbers) + 1)
        nums_shared.append(num_shared)
    return nums_shared


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_pages", [140, 300])
@pytest.mark.parametrize("keeps", ["all", "ends"])
def test_hits_are_those_of_the_twin(layout: windows.Layout, num_pages: int, keeps: Literal["all", "ends"]) -> None:
    requests = make_chats(make_records(80, seed=num_pages))
    batch, twin = windows.Batched(layout, num_pages, "lru", keeps), Twin(layout, num_pages, keeps)
    nums_hits = [batch.run(request) for request in requests]
    assert nums_hits == [twin.run(request) for request in requests]
    assert sum(nums_hits) > 0
    batch.batch.check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_large_pool_hits_all_that_is_shared(layout: windows.Layout) -> None:
    requests = make_chats(make_records(80, seed=1))
    batch = windows.Batched(layout, 20_000, "lru", "all")
    nums_shared = count_shared(requests)
    assert [batch.run(request) for request in requests] == nums_shared
    percent = 100 * sum(nums_shared) / sum(request.num_prompt_tokens for request in requests)
    assert windows.measure(windows.Batched(layout, 20_000, "lru", "all"), requests) == percent


@pytest.mark.parametrize("case", windows_cases.CASES, ids=lambda case: case.name)
def test_ends_hit_at_most_what_all_hits(case: windows_cases.Case) -> None:
    """In pools that evict nothing."""
    is_chats = case.make_requests is windows_cases.make_chats
    requests = make_chats(make_records(80, seed=2)) if is_chats else case.make_requests()[:80]
    everything, ends = (case.measure(LAYOUTS[1], 40_000, "lru", keeps, requests) for keeps in ("all", "ends"))
    assert 0 < ends[""] <= everything[""] < 100


def test_ends_save_less() -> None:
    case = next(case for case in windows_cases.CASES if case.name == "host tier")
    requests = make_chats(make_records(80, seed=2))
    everything, ends = (case.measure(LAYOUTS[1], 140, "lru", keeps, requests) for keeps in ("all", "ends"))
    name = ": pages saved, a request"
    assert 0 < ends[name] < everything[name]


class TestTheFile:
    def test_a_run_replaces_its_cells(self, tmp_path: Path) -> None:
        path = tmp_path / "hits.json"
        hits.merge(path, "windows", {"first": {"LRU, all": 1, "vLLM": 2}, "second": {"LRU, all": 3}})
        hits.merge(path, "other", {"third": {"vLLM": 4}})
        merged = hits.merge(path, "windows", {"first": {"vLLM": 5, "LRU, ends": 6}})
        assert merged == {"first": {"LRU, all": 1, "vLLM": 5, "LRU, ends": 6}, "second": {"LRU, all": 3}}
        assert hits.read(path) == {"windows": merged, "other": {"third": {"vLLM": 4}}}
        assert hits.show("hits", merged).splitlines() == [
            "| hits | LRU, all | LRU, ends | vLLM |",
            "| --- | ---: | ---: | ---: |",
            "| first | 1.0 | 6.0 | 5.0 |",
            "| second | 3.0 | - | - |",
        ]

    def test_words_choose_columns_and_lines(self) -> None:
        chosen = windows.Chosen(["LRU, ends", "gpt-oss", "raw"])
        assert [column for column in hits.COLUMNS if chosen.has_column(column)] == ["LRU, ends"]
        assert [name for name in ("gpt-oss, chat", "Gemma, chat", "Gemma, raw") if chosen.has_line(name)] == [
            "gpt-oss, chat",
            "Gemma, raw",
        ]
        assert windows.Chosen([]).has_column("vLLM")
        assert windows.Chosen(["vLLM"]).has_line("Gemma, chat")


class TestChats:
    def test_a_prompt_goes_on_behind_an_answer(self) -> None:
        """Where the last, part-filled block of the earlier prompt was."""
        first, second, third = make_chats(
            [
                TraceRecord(0, 70, 30, (1, 2, 3), block_size=BLOCK_SIZE),
                TraceRecord(1, 150, 1, (1, 2, 4, 5, 6), block_size=BLOCK_SIZE),
                TraceRecord(2, 96, 1, (1, 2, 4), block_size=BLOCK_SIZE),
            ]
        )
        known = first.make_token_ids()[: first.num_slots].tolist()
        tokens = second.make_token_ids().tolist()
        assert len(known) == 99
        assert tokens[:99] == known
        assert len({*known, *tokens}) == 151
        assert third.make_token_ids().tolist()[:96] == tokens[:96]

    @pytest.mark.parametrize(("num_tokens", "num_shared"), [(99 + LEAST_QUESTION_LEN, 70), (100 + LEAST_QUESTION_LEN, 99)])
    def test_a_short_prompt_goes_on_without_the_answer(self, num_tokens: int, num_shared: int) -> None:
        records = [
            TraceRecord(0, 70, 30, (1, 2, 3), block_size=BLOCK_SIZE),
            TraceRecord(1, num_tokens, 1, (1, 2, 4, 5), block_size=BLOCK_SIZE),
        ]
        known, tokens = (request.make_token_ids() for request in make_chats(records))
        assert (tokens[:num_shared] == known[:num_shared]).all()
        assert tokens[num_shared] != known[num_shared]

    def test_a_prompt_that_parts_before_shares_blocks_alone(self) -> None:
        records = [
            TraceRecord(0, 70, 30, (1, 2, 3), block_size=BLOCK_SIZE),
            TraceRecord(1, 70, 1, (1, 4, 5), block_size=BLOCK_SIZE),
        ]
        known, tokens = (set(request.make_token_ids().tolist()) for request in make_chats(records))
        assert len(known & tokens) == BLOCK_SIZE

    def test_chats_in_turn(self) -> None:
        nums_shared = count_shared(make_chats_in_turn())
        assert nums_shared == [*[0] * 8, *[20_096] * 8, *[20_288] * 8]

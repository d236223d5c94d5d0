"""vLLM as a rival of the benchmark of windows: it hits what pagepool hits, or less where it drops windows."""

from __future__ import annotations

import sys

import pytest
from small_traces import make_records
from sources import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed")

sys.path.append(str(ROOT))  # last: the installed package stays the one that is imported
windows = pytest.importorskip("bench.studies.windows", reason="bench/ is not here")
from bench.studies.chats import make_chats  # noqa: E402  where it is here
from bench.studies.layouts import Layout  # noqa: E402


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CHUNK_LEN", 96)


def run_all(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the hits of vLLM and of a running batch in pools that evict nothing."""
    requests = make_chats(make_records(80, seed=1))
    vllm, batch = windows.make_vllm(layout, 20_000), windows.Batched(layout, 20_000, "lru", "all")
    return [vllm.run(request) for request in requests], [batch.run(request) for request in requests]


@pytest.mark.parametrize("layout", [Layout("full", 0, 1), Layout("chunks", 2, 128, is_chunked=True)])
def test_vllm_keeps_all_pages_but_those_of_windows(layout: Layout) -> None:
    of_vllm, of_batch = run_all(layout)
    assert of_vllm == of_batch


def test_vllm_keeps_some_windows() -> None:
    of_vllm, of_batch = run_all(Layout("windows", 2, 64))
    assert all(few <= many for few, many in zip(of_vllm, of_batch, strict=True))
    assert 0.5 < sum(of_vllm) / sum(of_batch) < 1

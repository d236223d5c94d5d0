"""`pagepool plan`, and the errors of all commands for invalid traces and unwritable results."""

import gzip
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA, MODELS
from privileges import read_only_folder, without_privileges
from replays import plan_of

from pagepool.replay import Knee, Planner, PoolFigures, TraceRecord, make_requests

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import COMMANDS, Page, figures_of, invoke, line_of, refuse, write_config

from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.command import choose_replays, choose_sizes
from pagepool.replay.plans.report import describe, headline


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Chats with several turns: 12 requests of 38 to 75 pages."""
    path = tmp_path / "trace <b>&$x$.jsonl"
    lines = [line_of(timestamp=20_000 * i, hash_ids=[i % 4, 10 + i % 4]) for i in range(8)]
    lines += [line_of(timestamp=160_000, input_length=1200, hash_ids=[i, 10 + i, 20 + i]) for i in range(4)]
    path.write_text("".join(lines))
    return path


def plan(*args: object) -> dict[str, Any]:
    return figures_of("plan", *args)


def sizes_of(figures: dict[str, Any]) -> list[int]:
    return [pool["num_pages"] for pool in figures["pools"]]


class TestTitle:
    """The title of a page names the figures at the size that was asked for."""

    @pytest.mark.parametrize(("name", "num_pages"), [("Llama", 100), ("gpt-oss-20b", 250), ("Qwen3-Next-80B-A3B", 60)])
    def test_one_size(self, name: str, num_pages: int, trace: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        config, page = write_config(tmp_path, {"Llama": LLAMA, **MODELS}[name]), tmp_path / "plan.html"
        options = ["--model-config", config, "--num-pages", num_pages, "--eviction", "lru", "--replays", 0]
        figures = figures_of("plan", trace, *options)
        assert invoke("plan", trace, *options, "--html", page).exit_code == 0
        [pool] = [pool for pool in figures["pools"] if pool["num_pages"] == num_pages]
        simulated = [*pool["checkpoints"], *pool["windows"]]
        rate = max((each["hit_rate"] for each in simulated), default=pool["lru_hit_rate"])
        [title] = Page(page.read_text()).texts["h1"]
        assert f" {num_pages} pages (" in title
        assert f"{rate:.1%} of prompt tokens" in title
        assert "up to" not in title


class TestPlan:
    def test_figures(self, trace: Path) -> None:
        figures = plan(trace, "--num-pages", "100:1k", "--replays", 2)
        assert sizes_of(figures) == [100, 150, 200, 300, 500, 700, 1000]
        last = figures["pools"][-1]
        assert figures["requests"] == last["requests"] == 12
        assert figures["prompt_tokens"] == 8 * 600 + 4 * 1200
        assert last["lru_hit_tokens"] == last["best_hit_tokens"] == figures["most_hit_tokens"] == 8 * 592
        assert [pool["replay"] is not None for pool in figures["pools"]] == [True, *[False] * 5, True]
        assert last["replay"]["hit_tokens"] == 8 * 592
        assert figures["knees"][2]["share"] == 0.95

    def test_no_size_or_one_is_seen_among_all_that_matter(self, trace: Path) -> None:
        sizes = sizes_of(plan(trace))
        assert sizes[0] == 77
        assert sizes_of(plan(trace, "--num-pages", 90)) == sorted([*sizes, 90])
        assert sizes_of(plan(trace, "--num-pages", "90,80")) == [80, 90]

    def test_pools_in_bytes(self, trace: Path, tmp_path: Path) -> None:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(LLAMA))
        figures = plan(trace, "--memory", "200MiB:1GiB", "--model-config", config)
        assert figures["page_bytes"] == 16 * 128 * 1024
        assert sizes_of(figures) == [100, 150, 200, 300, 500, 512]
        assert sizes_of(plan(trace, "--memory", "0.25GiB,1GiB", "--bytes-per-token", 128 * 1024)) == [128, 512]
        assert plan(trace, "--model-config", config, "--kv-dtype", "float8_e4m3fn")["page_bytes"] == 16 * 64 * 1024
        result = invoke("plan", trace, "--num-pages", 512, "--bytes-per-token", 128 * 1024)
        assert re.search(r"512 +1\.0 ", result.output)
        assert "pages of 16 tokens and 2.0 MiB" in result.output

    def test_options_reach_the_plan(self, trace: Path) -> None:
        assert plan(trace, "--limit", 3)["requests"] == 3
        assert plan(trace, "--page-size", 100)["min_num_pages"] == 14
        assert all(pool["replay"] is None for pool in plan(trace, "--replays", 0)["pools"])
        alone = plan(trace, "--num-pages", "500,600", "--max-num-seqs", 1)["pools"][0]
        assert alone["replay"]["steps"] == 12 * 3
        assert plan(trace, "--num-pages", "500,600", "--max-batched-tokens", 100)["pools"][0]["replay"]["steps"] > 36

    def test_blocks_of_another_size(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(line_of(input_length=32) * 2)
        assert plan(path, "--block-size", 16)["most_hit_tokens"] == 16
        path.write_text(line_of(input_length=32, block_size=16) * 2)
        assert plan(path)["most_hit_tokens"] == 16
        path.write_text(line_of(block_size=2**31 - 1, hash_ids=[0]) * 2)  # takes no memory for a block
        assert plan(path)["most_hit_tokens"] == 592

    def test_replays_are_spread_over_the_sizes_in_which_requests_run_together(self) -> None:
        requests = make_requests([TraceRecord(0, 1600, 1_000_000, (0, 1, 2, 3))] * 10)
        sizes = [*range(1_000_000, 12_000_000, 1_000_000)]
        in_seconds = [4_000_000, 6_000_000, 8_000_000, 10_000_000]
        assert choose_replays(sizes, None, requests, ModelPages(16), 1_000) == in_seconds
        assert choose_replays(sizes[:5], None, requests, ModelPages(16), 1_000) == [4_000_000, 5_000_000]
        assert choose_replays(sizes, None, requests, ModelPages(16), 1) == []
        assert choose_replays(sizes, 3, requests, ModelPages(16), 1) == [1_000_000, 6_000_000, 11_000_000]
        assert choose_replays(sizes, 99, requests, ModelPages(16), 1) == sizes
        assert choose_replays(sizes, 0, requests, ModelPages(16), 1_000) == []

    def test_a_trace_without_hits(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(line_of())
        result = invoke("plan", path)
        assert (result.exit_code, "no pool hits anything" in result.output) == (0, True)
        planner = Planner([TraceRecord(0, 1, 1, (0,))], 16)
        assert headline(planner.make_plan([3]), "chat") == "chat: no pool hits anything"
        assert choose_sizes(None, planner, ModelPages(16), 0) == [2, 3]


BAD_OPTIONS: dict[str, list[tuple[list[str], str]]] = {
    "fleet": [
        (["--kill", "3"], "'3' is not REPLICA@SECONDS, such as 3@600"),
        (["--kill", "x@1"], "'x@1' is not REPLICA@SECONDS"),
        (["--kill", "16@1"], "--kill: replicas are 0 to 15"),
        (["--router", "random"], "'random' is not one of"),
        (["--decode-seconds", "0"], "0.0 is not in the range x>0"),
        (["--decode-seconds", "1e308"], "1e308' is more than 1,000,000,000 seconds."),
        (["--report-seconds", "1000000001"], "'1000000001' is more than 1,000,000,000 seconds."),
        (["--num-pages", str(2**40)], f"num_pages: got {2**40}, allowed: 1 to {2**30}"),
    ],
    "plan": [
        (["--num-pages", "1k:"], "'' is not a number with a unit"),
        (["--num-pages", "1k:1k"], "got '1k:1k', allowed: an ascending range"),
        (["--num-pages", "1,"], "'' is not a number with a unit"),
        (["--memory", "40GiB"], "--memory needs --bytes-per-token or --model-config"),
        (["--memory", "1kB", "--bytes-per-token", "1000"], "1,000 bytes are less than one page of 16,000 bytes"),
        (["--memory", "1GB", "--bytes-per-token", "1", "--num-pages", "9"], "--num-pages and --memory exclude each other"),
        (["--bytes-per-token", "1", "--model-config", __file__], "--bytes-per-token and --model-config exclude each other"),
        (["--model-config", __file__], ": not valid JSON"),
        (["--model-config", "no-such-file.json"], "File 'no-such-file.json' does not exist"),
        (["--bytes-per-token", str(10**18)], ": a page would take "),
        (["--plot", "plot.gif"], "'plot.gif' must end in .png or .svg"),
        (["--replays", "-1"], "-1 is not in the range x>=0"),
        (["--eviction", "fifo"], "'fifo' is not one of 'lru', 'adaptive'"),
        (["--eviction", "adaptive", "--num-pages", str(2**40)], f"num_pages: got {2**40}, allowed: 1 to {2**30}"),
        (["--host-pages", "2G"], " pages of 16 tokens, 2,000,000,000 host pages: "),
        (["--host-bandwidth", "25GB"], "--host-bandwidth needs --prefill-rate"),
        (
            ["--host-pages", "1k", "--prefill-rate", "10k"],
            "--prefill-rate needs --host-bandwidth, --store-bandwidth or --link-",
        ),
        (["--link-bandwidth", "2GB"], "--link-bandwidth needs --prefill-rate"),
        (["--link-bandwidth", "2GB", "--prefill-rate", "1"], "--link-bandwidth needs --bytes-per-token or --model-config"),
        (["--link-bandwidth", "2", "--prefill-rate", "1"], "'2' has no unit, units allowed: B, kB, "),
        (["--store-pages", "1k"], "--store-pages needs --host-pages"),
        (["--store-bandwidth", "2GB"], "--store-bandwidth needs --prefill-rate"),
        (["--store-bandwidth", "2GB", "--prefill-rate", "1"], "--store-bandwidth needs --bytes-per-token or --model-config"),
        (["--host-pages", "9", "--store-pages", "9", "--prefill-rate", "1"], "--prefill-rate needs --host-bandwidth, "),
        (["--store-bandwidth", "2", "--prefill-rate", "1"], "'2' has no unit, units allowed: B, kB, "),
        (["--host-bandwidth", "25GB", "--prefill-rate", "1"], "--host-bandwidth needs --host-pages"),
        (["--host-pages", "9", "--host-bandwidth", "25GB", "--prefill-rate", "1"], "--host-bandwidth needs --bytes-per-token"),
        (["--host-bandwidth", "25", "--prefill-rate", "1"], "'25' has no unit, units allowed: B, kB, "),
        (["--host-pages", "9", "--checkpoint-interval", "256"], "--host-pages: a model with states is planned without a tier"),
    ],
    "replay": [
        (["--num-pages", str(1 << 62)], f"{1 << 62} is not in the range x<={10**18}"),
        (["--page-size", str(1 << 40)], f"page_size: got {1 << 40}, allowed: 1 to {1 << 30}"),
        (["--seed", "-1"], "-1 is not in the range x>=0"),
        (["--workload", "lru"], "'lru' is not one of 'chats', "),
        (["--workload", "chats"], "TRACE and --workload exclude each other"),
        (["--eviction", "fifo"], "'fifo' is not one of 'lru', 'adaptive'"),
        (["--eviction", "adaptive", "--compare-eviction"], "--compare-eviction and --eviction exclude each other"),
        (["--compare", "--compare-eviction"], "--compare-eviction and --compare exclude each other"),
        (["--host-pages", "1"], "Invalid value for '--host-pages': 1 is not in the range x>=2."),
        (["--host-pages", "40GiB"], "'40GiB' is in bytes, units allowed: none, k, M, G."),
        (["--num-pages", "600", "--host-pages", "2G"], "no pool of 600 pages of 16 tokens, 2,000,000,000 host pages: "),
        (["--host-pages", "1k", "--no-caching"], "--host-pages and --no-caching exclude each other"),
        (["--host-policy", "write_back"], "--host-policy needs --host-pages"),
        (["--host-pages", "1k", "--host-policy", "none"], "'none' is not one of 'write_back', 'write_through'"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_that_make_no_sense(command: str, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagepool.replay.shared.memory.count_available_bytes", lambda: 1 << 60)
    if command == "fleet":
        pytest.importorskip("msgspec")
    for options, message in BAD_OPTIONS[command]:
        refuse(2, message, command, trace, *options)


def test_the_knee_in_words() -> None:
    pools = (PoolFigures(10_000, 5, 0, 1_000, 250, 500),)
    plan = plan_of(most_hit_tokens=600, knees=(Knee(0.95, 12_800, 6_400),), pools=pools)
    knee, unlimited, largest = describe(plan)
    assert knee.startswith("12,800 pages give 95% of all possible hits if ")
    assert knee.endswith("the best eviction policy needs 6,400 pages.")
    assert unlimited == "A pool that never evicts hits 600 of 1,000 prompt tokens (60.0%)."
    assert largest == "The largest request needs a pool of 9 pages; smaller pools skip it."
    assert describe(replace(plan, page_bytes=1 << 20))[0].startswith("12,800 pages (12.5 GiB) give 95% of all possible hits")


class TestPictures:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self) -> None:
        pytest.importorskip("matplotlib")

    @pytest.mark.parametrize(
        ("name", "options"),
        [("plot.png", ["--replays", 0]), ("plot.SVG", ["--bytes-per-token", 100_000, "--num-pages", "60,500"])],
    )
    def test_the_same_plan_gives_the_same_bytes(self, name: str, options: list[object], trace: Path, tmp_path: Path) -> None:
        contents = set()
        for _ in range(2):
            assert invoke("plan", trace, "--plot", tmp_path / name, "--html", tmp_path / "page", *options).exit_code == 0
            contents.add(((tmp_path / name).read_bytes(), (tmp_path / "page").read_bytes()))
        [(content, _)] = contents
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG")
        else:
            text = "".join(ET.fromstring(content.decode()).itertext())
            for part in ("hit rate: share of all prompt tokens", "memory of the pool (GiB)", "preemptions"):
                assert part in text


class TestBadTraces:
    """A message with the line number, and exit code 2."""

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("cut.jsonl", (line_of() * 3)[:-20].encode(), ":3: not valid JSON"),
            ("cut.jsonl.gz", gzip.compress(line_of().encode() * 3, mtime=0)[:-12], ": Compressed file ended before"),
            ("tail.jsonl.gz", gzip.compress(line_of().encode() * 3, mtime=0) + b"garbage", ":4: Not a gzipped file"),
            ("packed.jsonl", gzip.compress(line_of().encode(), mtime=0), ":1: not valid JSON"),
            ("mix.jsonl", (line_of() + line_of(block_size=300)).encode(), ":2: block_size is 300, but 512 in the lines before"),
            ("order.jsonl", (line_of(timestamp=5) + line_of(timestamp=4)).encode(), ":2: timestamp 4 is below 5"),
            ("answer.jsonl", line_of(output_hash_ids=[7]).encode(), ":1: got 3 ids for 1 full block of 512 in 603 tokens"),
            (
                "answer.jsonl",
                line_of(output_hash_ids="7").encode(),
                ":1: output_hash_ids: got '7', allowed: a list of integers",
            ),
            ("zero.jsonl", line_of(block_size=0).encode(), ":1: block_size: got 0, allowed: 1 to 2147483647"),
        ],
    )
    def test_a_sentence(self, name: str, content: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        result = refuse(2, f"Error: {tmp_path / name}:", "replay", tmp_path / name)
        assert message in result.output
        assert "Traceback" not in result.output

    def test_lines_without_an_end_are_not_read_into_memory(self, tmp_path: Path) -> None:
        path = tmp_path / "huge.jsonl"
        with path.open("wb") as file:
            file.write(line_of().encode())
            file.truncate(1 << 33)
        refuse(2, f"{path}:2: got a line of more than 67108864 bytes, allowed: 67108864", "replay", path)

    def test_more_than_there_is_memory_for(self, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr("pagepool.replay.traces.options.load_records", fail)
        result = invoke("plan", trace)
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: out of memory: {trace} (1019 B) is too large for the memory: ")
        assert "--limit takes the first N requests; " in result.output
        assert re.search(r" [MG]iB are in use\n\Z", result.output)


class TestBadResults:
    """A message and exit code 1, before the work, and no partial file."""

    @pytest.mark.parametrize("option", ["--json", "--html", "--plot"])
    def test_a_folder_that_is_read_only(self, option: str, trace: Path) -> None:
        pytest.importorskip("matplotlib")
        with read_only_folder(trace=trace.read_bytes()) as folder, without_privileges():
            path = folder / "plot.png"
            result = invoke("plan", folder / "trace", option, path)
            assert (result.exit_code, result.output) == (1, f"Error: {path} cannot be written: Permission denied\n")
            assert [path.name for path in folder.iterdir()] == ["trace"]

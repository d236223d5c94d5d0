"""What requests of a length take, and how many fit at once, without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, refuse, write_config
from model_configs import LLAMA, MODELS
from model_families import KEPT

from pagepool import CacheManager
from pagepool.replay.models.pages import read_model
from pagepool.replay.plans.capacity import Capacity

GIB = 1 << 30


def plan(folder: Path, config: dict[str, Any], *options: object) -> dict[str, Any]:
    return figures_of("plan", "--mean-tokens", 12_000, "--model-config", write_config(folder, config), *options)


def test_full_attention(tmp_path: Path) -> None:
    figures = plan(tmp_path, LLAMA, "--memory", "40GiB,80GiB")
    assert figures == {
        "mean_tokens": 12_000,
        "token_bytes": 131_072.0,
        "num_request_pages": 750,
        "num_peak_pages": 750,
        "arrays": None,
        "page_size": 16,
        "page_bytes": 2 << 20,
        "link": None,
        "pools": [{"num_pages": 20_480, "requests": 27}, {"num_pages": 40_960, "requests": 54}],
    }
    text = invoke("plan", "--mean-tokens", "12k", "--memory", "40GiB", "--model-config", tmp_path / "config.json").output
    assert "A page of 16 tokens takes 2.0 MiB, a token 128.0 KiB.\n" in text
    assert "A request of 12,000 tokens takes 750 pages (1.5 GiB).\n" in text
    assert "first subtract weights, activations and what the engine reserves" in text
    assert text.splitlines()[5].split() == ["20,480", "40.0", "GiB", "27", "324,000"]


def test_without_a_model() -> None:
    figures = figures_of("plan", "--mean-tokens", 12_000, "--memory", "80GiB", "--bytes-per-token", 131_072)
    assert figures["pools"] == [{"num_pages": 40_960, "requests": 54}]
    figures = figures_of("plan", "--mean-tokens", 100, "--num-pages", "8,15,16", "--page-size", 16)
    assert (figures["page_bytes"], figures["token_bytes"]) == (None, None)
    assert figures["pools"] == [{"num_pages": size, "requests": num} for size, num in ((8, 1), (15, 2), (16, 2))]
    figures = figures_of("plan", "--mean-tokens", 100)
    assert (figures["num_request_pages"], figures["pools"]) == (7, [])
    assert "A page has 16 tokens.\nA request of 100 tokens takes 7 pages.\n" in invoke("plan", "--mean-tokens", 100).output


@pytest.mark.parametrize("name", [*MODELS, *KEPT])
def test_every_model(name: str, tmp_path: Path) -> None:
    """One memory is divided for models with states and attention; otherwise as many requests fit as the report says."""
    config = MODELS[name] if name in MODELS else KEPT[name][0]
    figures = plan(tmp_path, config, "--memory", "80GiB,90GiB")
    if figures["arrays"] and figures["token_bytes"]:
        assert plan(tmp_path, config, "--memory", "80GiB", "--max-num-seqs", 8)["requests"] > 0
    [pool, *_] = figures["pools"]
    assert pool["num_pages"] == 80 * GIB // figures["page_bytes"]
    assert 0 < pool["requests"] * figures["num_request_pages"] < pool["num_pages"]
    assert figures["num_request_pages"] <= figures["num_peak_pages"]


@pytest.mark.parametrize("name", ["Gemma 3 27B", "gpt-oss-20b", "Llama 4 Scout"])
def test_so_many_fit_in_a_pool(name: str, tmp_path: Path) -> None:
    """So many requests are admitted one after another, in steps of the prompt; the next one is not."""
    model = read_model(str(write_config(tmp_path, MODELS[name])))
    mean, capacity = 2000, Capacity(model, 2000)
    num_pages = 4 * capacity.num_request_pages + capacity.num_peak_pages + 1
    num = capacity.count_requests(num_pages)
    assert num >= 5
    manager = CacheManager(num_pages, model.make_groups(), max_model_len=4096, enable_caching=False)
    for place in range(num):
        request = make_request(str(place), mean)
        assert manager.allocate_slots(request, mean) is not None
        request.num_computed_tokens = mean - 1
        assert manager.allocate_slots(request, 1) is not None
    assert manager.allocate_slots(make_request("more", 2 * mean), 2 * mean) is None


def test_states_in_one_pool(tmp_path: Path) -> None:
    options = ["--memory", "200GiB,300GiB"]
    shared = plan(tmp_path, MODELS["Qwen3-Next-80B-A3B"], *options)
    assert (shared["arrays"], shared["num_request_pages"], shared["page_size"]) == ("shared", 23 + 3, 544)
    separate = plan(tmp_path, MODELS["Qwen3-Next-80B-A3B"], *options, "--arrays", "separate")
    assert (separate["arrays"], separate["page_bytes"]) == ("separate", 4 * shared["page_bytes"])
    options = ["plan", "--mean-tokens", 12_000, "--model-config", tmp_path / "config.json", "--memory"]
    assert (
        "States and tokens are in one pool (--arrays shared).\nIts states take 3 of these"
        in invoke(*options, "1GiB,2GiB").output
    )
    message = "--memory 8.0 GiB is too little for states: 256 requests at once (the default of --max-num-seqs) need 9.5 GiB of"
    refuse(2, message, *options, "8GiB")
    refuse(2, "300 requests at once (--max-num-seqs) need 11.1 GiB of 8.0 GiB", *options, "8GiB", "--max-num-seqs", 300)
    condition = "has no meaning with --mean-tokens unless --arrays apart divides the memory"
    for option, value in (("--max-num-seqs", 256), ("--checkpoint-interval", 2176)):
        refuse(2, f"{option} {condition}", *options, "80GiB", option, value, "--arrays", "shared")
        invoke(*options, "80GiB", option, value)
    refuse(
        2,
        "--max-batched-tokens has no meaning with --arrays",
        *options,
        "80GiB",
        "--arrays",
        "apart",
        "--max-batched-tokens",
        9,
    )
    invoke(*options, "80GiB", "--max-batched-tokens", 99)


def make_request(name: str, num_tokens: int) -> Any:
    from pagepool import EngineRequest

    return EngineRequest(name, list(range(num_tokens)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eviction", "lru"], "--eviction has no meaning with --mean-tokens"),
        (["--host-pages", "9"], "--host-pages has no meaning with --mean-tokens"),
        (["--replays", "0"], "--replays has no meaning with --mean-tokens"),
        (["--limit", "5"], "--limit has no meaning with --mean-tokens"),
        (["--block-size", "5"], "--block-size has no meaning with --mean-tokens"),
        (["--host-policy", "write_back"], "--host-policy has no meaning with --mean-tokens"),
        (["--seed", "0"], "--seed has no meaning with --mean-tokens"),
        (["--max-num-seqs", "256"], "--max-num-seqs has no meaning with --mean-tokens unless"),
        (["--memory", "1GiB"], "--memory needs --bytes-per-token or --model-config"),
        (["--memory", "1KiB", "--bytes-per-token", "1MiB"], "are less than one page of"),
        (["--state-share", "0.5"], "--arrays apart needs --model-config, one --memory"),
    ],
)
def test_what_it_cannot_say_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    refuse(2, message, "plan", "--mean-tokens", 100, *options)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"input_length": 5}) + "\n")
    refuse(2, "--mean-tokens and TRACE exclude each other", "plan", trace, "--mean-tokens", 100)
    refuse(2, "Missing argument 'TRACE'. Without one, --mean-tokens says how many requests fit.", "plan")

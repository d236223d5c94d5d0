"""At which lengths moving a prompt from another engine pays, and what moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("zmq")
pytest.importorskip("msgspec")
from command_line import figures_of, invoke, refuse, write_config, write_trace
from model_configs import GEMMA3, LLAMA, MODELS, QWEN
from model_families import KEPT, WHISPER
from replays import make_loop

from pagepool import CacheManager
from pagepool.errors import ArgumentError
from pagepool.peers.crossing import Crossing
from pagepool.replay.models.pages import ModelPages, read_model
from pagepool.replay.models.pools import ModelPools, read_pools
from pagepool.replay.plans.link import LONGEST, PROMPTS, PlannedLink
from pagepool.replay.plans.link_report import describe_link

CONFIGS = MODELS | {name: config for name, (config, _) in KEPT.items()}
RATE = 10_000
LLAMA_BYTES = 131_072  # of a token


def read_both(folder: Path, config: dict[str, Any]) -> list[ModelPages | ModelPools]:
    """Return the pages of a model in one pool and, if it has states beside full attention, in two."""
    path = str(write_config(folder, config))
    try:
        return [read_model(path), read_pools(path)]
    except ArgumentError:
        return [read_model(path)]


@pytest.mark.parametrize("name", CONFIGS)
def test_it_pays_from_a_length_on(name: str, tmp_path: Path) -> None:
    """Links are as fast as needed for some length, slower or faster: all shorter prompts lose time, all others win."""
    for model in read_both(tmp_path, CONFIGS[name]):
        lengths = [num * model.hit_size for num in range(1, min(300, 2 + 40_000 // model.hit_size))]
        exact = PlannedLink(model, 1, RATE)
        for length in (lengths[0], lengths[len(lengths) // 3], lengths[-1]):
            for factor in (0.7, 1, 1.3):
                link = PlannedLink(model, max(1, int(factor * exact.find_least_bandwidth(length))), RATE)
                least = link.find_least_tokens() or LONGEST
                assert [link.pays(each) for each in lengths] == [each >= least for each in lengths]
                for each in lengths[:: len(lengths) // 3]:
                    move, compute = link.find_seconds(each)
                    assert link.pays(each) == (move <= compute) == (link.bandwidth >= link.find_least_bandwidth(each))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_more_pages_cross_than_are_counted(name: str, tmp_path: Path) -> None:
    """A window may take a page less than at most, and a chunk up to all of its pages."""
    model = read_model(str(write_config(tmp_path, CONFIGS[name])))
    groups = model.make_groups(model.hit_size if model.num_state_groups else None)
    crossing = Crossing(CacheManager(64, groups, max_model_len=1 << 20))
    slack = sum(
        each.num_groups * (1 + each.reach.size // each.page_size if each.reach.is_chunked else 1) for each in model.windows
    )
    for num_tokens in (1, 100, 1_000, *PROMPTS, 8_192, 8_193):
        num_crossing = sum(len(places) for places in crossing.list_places(0, 0, num_tokens, num_tokens))
        assert num_crossing <= model.count_prompt_pages(num_tokens) <= num_crossing + slack


def test_full_attention_takes_the_same_rate_at_all_lengths(tmp_path: Path) -> None:
    for bandwidth, least in ((RATE * LLAMA_BYTES, 16), (RATE * LLAMA_BYTES - 1, None)):
        options = ("--model-config", write_config(tmp_path, LLAMA), "--link-bandwidth", f"{bandwidth}B", "--prefill-rate", RATE)
        link = figures_of("plan", "--mean-tokens", 100, *options)["link"]
        assert (link["token_bytes"], link["end_bytes"], link["least_tokens"]) == (LLAMA_BYTES, 0, least)
        assert [each["tokens"] for each in link["prompts"]] == [*PROMPTS]
        for each in link["prompts"]:
            assert each["bytes"] == each["tokens"] * LLAMA_BYTES
            assert each["least_bandwidth"] == RATE * LLAMA_BYTES
            assert each["compute_seconds"] == each["tokens"] / RATE
            assert each["move_seconds"] == each["bytes"] / bandwidth


def test_what_the_end_of_a_prompt_takes(tmp_path: Path) -> None:
    """Windows take a page more than their size, states all of theirs; a model of states alone has bytes only there."""
    gemma = read_model(str(write_config(tmp_path, GEMMA3)))
    assert PlannedLink(gemma, 1, 1).end_bytes == 6 * (1024 // 16 + 1) * gemma.page_bytes
    pools = read_pools(str(write_config(tmp_path, QWEN)))
    assert PlannedLink(pools, 1, 1).end_bytes == pools.state_bytes
    shared = read_model(str(write_config(tmp_path, QWEN)))
    assert PlannedLink(shared, 1, 1).end_bytes == 3 * shared.page_bytes
    states = ModelPages(1, 1_000_000, num_attention_groups=0, num_state_groups=2)
    assert describe_link(PlannedLink(states, 1_000_000, 10))[0] == (
        "A prompt takes 1.9 MiB at its end: at 10 tokens/s a link of 976.6 KiB/s from another engine pays from 20 tokens on."
    )


def test_its_words() -> None:
    assert describe_link(None) == []
    sentences = describe_link(PlannedLink(ModelPages(16, 1 << 20), 1 << 30, RATE))
    assert sentences == [
        "A prompt takes 64.0 KiB a token: at 10,000 tokens/s a link of 1.0 GiB/s from another engine pays from 16 tokens on.",
        "8,000 tokens: 0.49 s to move 500.0 MiB, 0.80 s to compute; a link pays from 625.0 MiB/s on.",
        "32,000 tokens: 1.95 s to move 2.0 GiB, 3.20 s to compute; a link pays from 625.0 MiB/s on.",
        "100,000 tokens: 6.10 s to move 6.1 GiB, 10.00 s to compute; a link pays from 625.0 MiB/s on.",
    ]
    slow = describe_link(PlannedLink(ModelPages(16, 1 << 20), 1 << 28, RATE))
    assert slow[0].endswith(" a link of 256.0 MiB/s from another engine pays at no length.")


@pytest.mark.parametrize("arrays", ["apart", "shared", "separate"])
def test_every_plan_has_it(arrays: str, tmp_path: Path) -> None:
    """With a trace or without one; arrays with unused rows move no more than others."""
    path = write_config(tmp_path, QWEN)
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, make_loop())
    options = ("--model-config", path, "--memory", "20GiB", "--link-bandwidth", "500MB", "--prefill-rate", RATE)
    model: ModelPages | ModelPools = read_pools(str(path)) if arrays == "apart" else read_model(str(path))
    link = PlannedLink(model, 500_000_000, RATE)
    for source in (("--mean-tokens", 12_000), (trace, "--limit", 4)):
        figures = figures_of("plan", *source, *options, "--arrays", arrays)
        assert figures["link"] == link.as_dict()
        output = invoke("plan", *source, *options, "--arrays", arrays).output
        assert all(sentence in output for sentence in describe_link(link))
    assert figures_of("plan", "--mean-tokens", 12_000, *options)["arrays"] == "apart"


def test_keys_of_an_encoder_do_not_move(tmp_path: Path) -> None:
    options = ("--model-config", write_config(tmp_path, WHISPER), "--link-bandwidth", "1GB", "--prefill-rate", 1)
    refuse(2, "Error: --link-bandwidth: keys and values of an encoder do not move", "plan", "--mean-tokens", 100, *options)

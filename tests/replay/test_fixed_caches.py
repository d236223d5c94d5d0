"""Caches that do not grow with a request: rings, keys of an encoder's output, sinks; and windows of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, write_config, write_trace
from model_families import (
    COHERE_ASR,
    DEEPSEEK_V41,
    GLM5_NEXT,
    KEPT,
    MLLAMA,
    PANGU,
    QWEN4,
    STEP5,
    UNLIMITED_OCR,
    WHISPER,
)

from pagepool.errors import ArgumentError
from pagepool.replay import TraceRecord
from pagepool.replay.models.fixed import Fixed, FixedCaches
from pagepool.replay.models.pages import read_model
from pagepool.replay.models.pools import read_pools

QWEN4_AXES = QWEN4 | {"rope_parameters": {"mrope_section": [11, 11, 10]}}
# Bytes of vLLM's specs: CircularBufferSpec, CrossAttentionSpec for pages of 16 tokens, SinkFullAttentionSpec.
FIXED: dict[str, tuple[dict[str, Any], FixedCaches]] = {
    "Qwen4": (QWEN4, FixedCaches(ring=Fixed(10 * 16 * 128 * 2, 16, 10))),
    "Qwen4, text alone": (QWEN4_AXES, FixedCaches(ring=Fixed(10 * 16 * 128 * 2, 16, 10))),
    "Qwen4, with pictures": (
        {"text_config": QWEN4_AXES, "vision_config": {"depth": 27}},
        FixedCaches(ring=Fixed(10 * 16 * (128 + 3 * 4) * 2, 16, 10)),
    ),
    "GLM 5 Next": (GLM5_NEXT, FixedCaches(ring=Fixed(2 * 16 * 2 * 128 * 2, 16, 2))),
    "Step 5": (STEP5, FixedCaches(ring=Fixed(2 * 16 * 2 * 8 * 128 * 2, 64, 2))),
    "DeepSeek V4.1": (DEEPSEEK_V41, FixedCaches(ring=Fixed(2 * 8 * 2 * 512 * 4, 8, 2))),
    "Whisper turbo": (WHISPER, FixedCaches(encoder=Fixed(4 * 94 * 16 * 2 * 20 * 64 * 2, 1504, 4))),
    "Cohere Transcribe": (COHERE_ASR, FixedCaches(encoder=Fixed(8 * 28 * 16 * 2 * 8 * 128 * 2, 448, 8))),
    "Llama 3.2 Vision": (MLLAMA, FixedCaches(encoder=Fixed(8 * 401 * 16 * 2 * 8 * 128 * 2, 6416, 8))),
    "openPangu": (PANGU, FixedCaches(sinks=Fixed(50 * 128 * 4 * (192 + 128) * 2, 128, 50))),
    "Unlimited OCR": (UNLIMITED_OCR, FixedCaches(answer_window=128)),
    "Unlimited OCR, first file": (
        {"model_type": "unlimited-ocr", "sliding_window": 256, "language_config": KEPT["DeepSeek OCR"][0]["language_config"]},
        FixedCaches(answer_window=256),
    ),
    "Unlimited OCR, of its own window": (
        {"rswa_window": 64, "language_config": UNLIMITED_OCR["text_config"]},
        FixedCaches(answer_window=64),
    ),
    "Llama 3.1": (KEPT["Llama 3.1"][0], FixedCaches()),
}


@pytest.mark.parametrize("name", FIXED)
def test_bytes(name: str, tmp_path: Path) -> None:
    config, fixed = FIXED[name]
    assert read_model(str(write_config(tmp_path, config)), 16 if name == "Qwen4" else None).fixed == fixed


def test_what_a_plan_tells(tmp_path: Path) -> None:
    for config, key, sentence in (
        (GLM5_NEXT, "ring", "Rings of 16 tokens in 2 layers take 16.0 KiB a request, beside its pages."),
        (WHISPER, "encoder", "An encoder's keys and values of 1,504 tokens in 4 layers take 29.4 MiB a request, beside "),
        (PANGU, "sinks", "Sinks of 128 tokens in 50 layers take 15.6 MiB once, for all requests."),
        (UNLIMITED_OCR, "answer_window", "A request keeps its prompt, and of its answer the last 128 tokens;"),
    ):
        options = ["plan", "--mean-tokens", 400, "--memory", "40GiB", "--model-config", write_config(tmp_path, config)]
        assert sentence in invoke(*options).output
        assert key in figures_of(*options)


def test_what_a_plan_of_a_trace_tells(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [TraceRecord(i, 64, 8, (1, 2, 3, 4)) for i in range(3)])
    options = ["plan", trace, "--block-size", 16, "--replays", 0, "--model-config", write_config(tmp_path, WHISPER)]
    assert "An encoder's keys and values of 1,504 tokens in 4 layers take 29.4 MiB a request" in invoke(*options).output
    assert figures_of(*options)["encoder"] == {"num_bytes": 30_801_920, "num_tokens": 1504, "num_layers": 4}


def test_requests_that_fit(tmp_path: Path) -> None:
    """An encoder's keys take room of requests, sinks take it once."""
    options = ["plan", "--mean-tokens", 400, "--num-pages", "1000", "--model-config"]
    figures = figures_of(*options, write_config(tmp_path, WHISPER))
    num_fixed = figures["encoder"]["num_bytes"] // figures["page_bytes"]
    assert (num_fixed, figures["pools"][0]["requests"]) == (94, 999 // (25 + 94))
    figures = figures_of(*options, write_config(tmp_path, PANGU))
    assert figures["pools"][0]["requests"] == (999 - 8) // 25


def test_pages_hold_whole_groups_of_an_indexer(tmp_path: Path) -> None:
    path = str(write_config(tmp_path, QWEN4 | {"indexer_compress_ratio": 48}))
    assert read_model(path).page_size % 48 == 0
    assert read_pools(path).page_size == 48
    with pytest.raises(ArgumentError, match="page size: got 16 tokens, allowed: multiples of 48"):
        read_model(path, 16)


def test_states_beside_states(tmp_path: Path) -> None:
    """A layer with an embedding of n-grams keeps past inputs of its convolution, in a page of states or, apart, as they are."""
    path = str(write_config(tmp_path, QWEN4))
    gdn, embedding = 3 * 8192 * 2 + 32 * 128 * 128 * 2, 9 * 4 * 2048 * 2
    assert read_pools(path).state_bytes == 30 * gdn + 2 * embedding
    model = read_model(path)
    assert (model.num_state_groups, model.state_bytes) == (4, 8 * gdn)

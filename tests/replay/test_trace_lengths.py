"""Lengths of prompts as services log them: cached tokens are added if they are counted apart, and refused if nobody says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from pagepool.errors import ArgumentError
from pagepool.replay.traces.fields import find_reader, read_object
from pagepool.replay.traces.lengths import UNCLEAR, read_lengths
from pagepool.replay.traces.reader import read_trace

ANTHROPIC = {"input_tokens": 50, "cache_read_input_tokens": 1000, "output_tokens": 7}
OPENAI = {"prompt_tokens": 1050, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1000}}
RESPONSES = {"input_tokens": 1050, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 1000}, "total_tokens": 1057}
GEMINI = {"promptTokenCount": 1050, "cachedContentTokenCount": 1000, "candidatesTokenCount": 5, "thoughtsTokenCount": 2}
BEDROCK = {"inputTokens": 50, "cacheReadInputTokens": 1000, "outputTokens": 7, "totalTokens": 1057}
DEEPSEEK = {"prompt_tokens": 1050, "prompt_cache_hit_tokens": 1000, "prompt_cache_miss_tokens": 50, "completion_tokens": 7}

SAME = {
    "Anthropic": ANTHROPIC,
    "Anthropic, nothing cached": {"input_tokens": 1050, "output_tokens": 7, "cache_read_input_tokens": 0},
    "Anthropic, written": {"input_tokens": 20, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 30}
    | {"cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}, "output_tokens": 7},
    "Anthropic, parts of what is written": {"input_tokens": 20, "cache_read_input_tokens": 1000, "output_tokens": 7}
    | {"cache_creation": {"ephemeral_5m_input_tokens": 30}},
    "Anthropic, in pandas' numbers": {"input_tokens": 50.0, "cache_read_input_tokens": 1000.0, "output_tokens": 7.0},
    "Anthropic, with a total": ANTHROPIC | {"total_tokens": 1057},
    "Anthropic, with a total of uncached tokens": ANTHROPIC | {"total_tokens": 57},
    "Anthropic, and the whole": ANTHROPIC | {"input_length": 1050},
    "OpenAI": OPENAI,
    "OpenAI, with a total": OPENAI | {"total_tokens": 1057},
    "OpenAI, no details": OPENAI | {"prompt_tokens_details": None},
    "OpenAI, a batch": {"response": {"status_code": 200, "body": {"usage": OPENAI}}},
    "OpenAI's responses": RESPONSES,
    "OpenAI's export": {"input_tokens": 1050, "output_tokens": 7, "input_cached_tokens": 1000, "num_model_requests": 1},
    "Gemini": {"usageMetadata": GEMINI},
    "Gemini, with a total": {"usageMetadata": GEMINI | {"totalTokenCount": 1057}},
    "Gemini, with tools": {"usageMetadata": GEMINI | {"promptTokenCount": 1000, "toolUsePromptTokenCount": 50}},
    "Bedrock": {"usage": BEDROCK},
    "Bedrock, written": {"usage": BEDROCK | {"inputTokens": 40, "cacheWriteInputTokens": 10}},
    "DeepSeek": {"usage": DEEPSEEK},
    "DeepSeek, parts alone": {"prompt_cache_hit_tokens": 1000, "prompt_cache_miss_tokens": 50, "completion_tokens": 7},
    "SGLang": {"prompt_tokens": 1050, "cached_tokens": 1000, "completion_tokens": 7},
    "vLLM": {"num_prompt_tokens": 1050, "num_cached_tokens": 1000, "num_output_tokens": 7},
    "LangChain": {"usage_metadata": {"input_tokens": 1050, "output_tokens": 7, "input_token_details": {"cache_read": 1000}}},
    "LiteLLM": OPENAI | {"cache_read_input_tokens": 1000},
    "Cohere": {"usage": {"billed_units": {"input_tokens": 9}, "tokens": {"input_tokens": 1050, "output_tokens": 7}}},
    "an assistant's log": {"type": "assistant", "sessionId": "a", "message": {"role": "assistant", "usage": ANTHROPIC}},
    "a total that counts what was read": {"inputTokens": 50, "cacheReadTokens": 1000, "outputTokens": 7, "totalTokens": 1057},
    "fewer than were read": {"prompt_tokens": 50, "cache_read_input_tokens": 1000, "completion_tokens": 7},
    "reasoning apart": {"prompt_tokens": 1050, "completion_tokens": 5, "total_tokens": 1057}
    | {"completion_tokens_details": {"reasoning_tokens": 2}},
    "columns": {"usage.input_tokens": 50, "usage.cache_read_input_tokens": 1000, "usage.output_tokens": 7},
    "columns of details": {"prompt_tokens": 1050, "prompt_tokens_details.cached_tokens": 1000, "completion_tokens": 7},
    "a total alone": {"prompt_tokens": 1050, "total_tokens": 1057},
    "Gemini Live": {"usageMetadata": {"promptTokenCount": 1050, "cachedContentTokenCount": 1000, "responseTokenCount": 5}
        | {"thoughtsTokenCount": 2, "totalTokenCount": 1057, "cacheTokensDetails": [{"modality": "TEXT", "tokenCount": 1000}]}},
    "Gemini, both names of an answer": {"usageMetadata": GEMINI | {"responseTokenCount": 5}},
    "Anthropic, one request": {"usage": ANTHROPIC | {"iterations": [{"type": "message"} | ANTHROPIC]}},
    "Anthropic, what it costs": {"usage": ANTHROPIC | {"cost": {"cache_read": 0.003}, "info": {"cached_tokens": 1000}}},
    "own name, and cached tokens of an unknown name": {"input_length": 1050, "output_length": 7, "tokens_from_cache": 9},
    "own name": {"input_length": 1050, "output_length": 7, "cache_read_input_tokens": 1000},
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cached in a prompt or not": (
        {"prompt_tokens": 2000, "cache_read_input_tokens": 1000, "completion_tokens": 7},
        f"has prompt_tokens 2000 and cache_read_input_tokens 1000: {UNCLEAR}",
    ),
    "read and written in a prompt or not": (
        {"input_tokens": 5000, "cache_read_tokens": 1000, "cache_creation_tokens": 5},
        "has input_tokens 5000 and cache_read_tokens 1000 and cache_creation_tokens 5: whether",
    ),
    "two meanings": (RESPONSES | {"cache_read_input_tokens": 1000}, "has input_tokens 1050 and cache_read_input_tokens 1000"),
    "an unknown name": ({"input_tokens": 5, "tokens_from_cache": 9}, "has tokens_from_cache 9: whether cached tokens are"),
    "an unknown name inside": ({"usage": {"input_tokens": 5, "tokensCached": 9}}, "has usage.tokensCached 9: whether"),
    "an unknown object": (
        {"usage": {"input_tokens": 5, "input_info": {"cached_tokens": 9}}},
        "has usage.input_info.cached_tokens 9: whether cached tokens are",
    ),
    "an unknown object of columns": ({"input_tokens": 5, "input_info.cached_tokens": 9}, "has input_info.cached_tokens 9: whe"),
    "an object for the cache": ({"input_tokens": 5, "usage": {"cache": {"read": 9}}}, "has usage.cache.read 9: whether cached"),
    "other cached tokens": (ANTHROPIC | {"info": {"cached_tokens": 9}}, "has info.cached_tokens 9: whether cached tokens are"),
    "a new part of what is written": (
        {"input_tokens": 5, "cache_creation": {"ephemeral_2h_input_tokens": 9}},
        "has cache_creation.ephemeral_2h_input_tokens 9: whether",
    ),
    "a total below the prompt": (
        {"prompt_tokens": 50, "total_tokens": 40},
        "total_tokens: got 40, allowed: at least 50, the tokens of the prompt",
    ),
    "a total of a prompt or of its rest": (
        {"input_tokens": 50, "cache_read_input_tokens": 1000, "total_tokens": 1057},
        "has total_tokens 1057 and no output_length: whether",
    ),
    "requests behind one answer": (
        {"usage": ANTHROPIC | {"iterations": [ANTHROPIC, ANTHROPIC]}},
        "usage.iterations: got 2 items, allowed: 1, since a line is one request",
    ),
    "more cached than there are": ({"prompt_tokens": 5, "cached_tokens": 9}, "cached_tokens: got 9, allowed: at most 5"),
    "more cached than the whole": ({"input_length": 5, "cache_read_input_tokens": 9}, "got 9, allowed: at most 5"),
    "more in the details": (
        OPENAI | {"prompt_tokens": 50},
        "prompt_tokens_details.cached_tokens: got 1000, allowed: at most 50, the tokens of the prompt",
    ),
    "another whole": (ANTHROPIC | {"input_length": 1049}, "has input_length 1049 and input_tokens 50 and cache_read_in"),
    "another total": (
        OPENAI | {"total_tokens": 2057},
        "total_tokens: got 2057, allowed: 1057, the sum of 1050 tokens of the prompt and 7 of the answer",
    ),
    "another total without a cache": ({"input_tokens": 5, "output_tokens": 6, "total_tokens": 12}, "got 12, allowed: 11"),
    "parts that differ": (DEEPSEEK | {"prompt_cache_hit_tokens": 900}, "has prompt_tokens 1050, but prompt_cache_hit_tokens 9"),
    "two of one kind": (
        {"input_tokens": 5, "cache_read_input_tokens": 9, "cacheReadInputTokenCount": 8},
        "has cache_read_input_tokens 9 and cacheReadInputTokenCount 8, which contradict",
    ),
    "two places": (
        {"input_tokens": 5, "usage": {"input_tokens": 6}},
        "has input_tokens 5 and usage.input_tokens 6, which contradict",
    ),
    "many requests": (
        {"input_tokens": 500, "output_tokens": 9, "num_model_requests": 6},
        "num_model_requests: got 6, allowed: 1, since a line is one request",
    ),
    "no number": (ANTHROPIC | {"cache_read_input_tokens": "many"}, "got 'many', allowed: an integer from 0"),
    "below 0": (ANTHROPIC | {"cache_read_input_tokens": -1}, "cache_read_input_tokens: got -1, allowed: an integer from 0"),
    "a flag": (ANTHROPIC | {"cache_read_input_tokens": True}, "got True, allowed: an integer from 0"),
    "a length of no number beside cached ones": (
        ANTHROPIC | {"input_tokens": "50"},
        "input_tokens: got '50', allowed: an integ",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_whole_prompt_counts(name: str) -> None:
    """Each line is of a prompt of 1,050 tokens, of which 1,000 were cached, and an answer of 7."""
    assert read_lengths(SAME[name]) == {"input_length": 1050, "output_length": 7}
    fields = read_object(json.dumps(SAME[name] | {"timestamp": 3, "hash_ids": [1]}).encode())
    assert (fields["input_length"], fields["output_length"], fields["timestamp"]) == (1050, 7, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ArgumentError) as error:
        read_lengths(fields)
    assert message in str(error.value)


def test_columns_of_a_table() -> None:
    read = find_reader(b"timestamp,usage.input_tokens,usage.cache_read_input_tokens,usage.output_tokens\n")
    assert read is not None
    assert read(b"5,50,1000,7\n") == {"timestamp": 5, "input_length": 1050, "output_length": 7, "is_whole": True}
    assert read(b"5,50,,7\n")["input_length"] == 50
    read = find_reader(b"timestamp,usage\n")
    assert read is not None
    assert read(b'5,"{""prompt_tokens"": 50}"\n') == {"timestamp": 5, "input_length": 50}


def test_turns_that_count_cached_tokens_are_whole_prompts(tmp_path: Path) -> None:
    usages = [
        {"prompt_tokens": 1050, "completion_tokens": 7},
        {"prompt_tokens": 1100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1024}},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"session_id": "s", "turns": [{"usage": usage} for usage in usages]}))
    assert [record.input_length for record in read_trace(path)] == [1050, 1100]

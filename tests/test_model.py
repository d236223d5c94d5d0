"""Bytes of a page, from configurations of real models."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagepool.errors import ArgumentError
from pagepool.replay.plans.model import read_page_bytes

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def page_bytes_of(folder: Path, config: object, kv_dtype: str | None = None) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return read_page_bytes(str(path), 16, kv_dtype)


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (LLAMA, 16 * 32 * 8 * 128 * 2 * 2),
        ({**LLAMA, "head_dim": 64}, 16 * 32 * 8 * 64 * 2 * 2),
        ({**LLAMA, "num_key_value_heads": None}, 16 * 32 * 32 * 128 * 2 * 2),
        ({**LLAMA, "num_key_value_heads": [2] * 16 + [4] * 16}, 16 * (16 * 2 + 16 * 4) * 128 * 2 * 2),
        ({**LLAMA, "torch_dtype": None, "dtype": "torch.float32"}, 16 * 32 * 8 * 128 * 2 * 4),
        ({**LLAMA, "torch_dtype": None}, 16 * 32 * 8 * 128 * 2 * 2),
        ({**LLAMA, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16 * 32 * 8 * 128 * 2 * 2),
        ({**LLAMA, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 16 * 8 * 8 * 128 * 2 * 2),
        ({"text_config": LLAMA, "vision_config": {}}, 16 * 32 * 8 * 128 * 2 * 2),
        (LATENT, 16 * 61 * 576 * 2),
    ],
)
def test_bytes_of_a_page(config: object, num_bytes: int, tmp_path: Path) -> None:
    assert page_bytes_of(tmp_path, config) == num_bytes


def test_the_cache_may_have_a_dtype_of_its_own(tmp_path: Path) -> None:
    assert page_bytes_of(tmp_path, LLAMA, "float8_e4m3fn") == 16 * 32 * 8 * 128 * 2


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ([1], "a JSON object is expected, not list"),
        (without("num_hidden_layers"), "lacks num_hidden_layers: give --bytes-per-token instead"),
        (without("num_attention_heads"), "lacks num_attention_heads"),
        (without("hidden_size"), "lacks hidden_size"),
        ({**LATENT, "qk_rope_head_dim": None}, "lacks qk_rope_head_dim"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers must be an integer, got '32'"),
        ({**LLAMA, "hidden_size": 16}, "head_size must be at least 1, got 0"),
        ({**LLAMA, "torch_dtype": "auto"}, "dtype 'auto' is not one that NumPy or JAX knows"),
        ({**LLAMA, "layer_types": ["mamba"] * 4}, "no layer has attention"),
        ({**LLAMA, "layer_types": 5}, "not iterable"),
        ({**LLAMA, "get_mask_details": 5}, "get_mask_details"),
    ],
)
def test_what_makes_no_sense(config: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=reason) as error:
        page_bytes_of(tmp_path, config)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_what_is_no_json(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ArgumentError, match="not valid JSON"):
            read_page_bytes(str(tmp_path / "config.json"), 16)

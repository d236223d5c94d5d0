"""Bytes of pages and states, from configurations of real models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import write_config
from model_configs import (
    ATTENTION,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    FULL,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    LLAMA,
    LLAMA4,
    MODELS,
    NEMOTRON,
    QWEN,
    REQUEST_TOKENS,
    SLIDING,
    STEP_TOKENS,
    VLLM_BYTES,
)

from pagepool.errors import ArgumentError
from pagepool.replay.models.caches import Reach
from pagepool.replay.models.pages import ModelPages, list_intervals, read_model

LATENT = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


MAMBA2 = {
    "hidden_size": 4096,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
JAMBA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
ZAMBA = {
    "num_hidden_layers": 54,
    "hidden_size": 2560,
    "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51],
    "attention_head_dim": 160,
    "num_attention_heads": 32,
    "n_mamba_heads": 80,
    "mamba_ngroups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
KIMI = {
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
MINIMAX = {**ATTENTION, "num_attention_heads": 64, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10}
QWEN2 = {**LLAMA, "sliding_window": 4096, "max_window_layers": 24}
GEMMA3_4B = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
LFM2 = {**ATTENTION, "hidden_size": 2048, "head_dim": 64, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}


def model_of(folder: Path, config: object, page_size: int | None = None, **dtypes: str) -> ModelPages:
    return read_model(str(write_config(folder, config)), page_size, **dtypes)


def page_bytes_of(folder: Path, config: object, kv_dtype: str | None = None) -> int:
    model = model_of(folder, config, 16, **({} if kv_dtype is None else {"kv_dtype": kv_dtype}))
    assert (model.num_attention_groups, model.num_state_groups, model.page_size) == (1, 0, 16)
    assert model.page_bytes is not None
    return model.page_bytes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ([1], "got a JSON list, allowed: an object"),
        (without("num_hidden_layers"), "lacks num_hidden_layers"),
        ({**LATENT, "qk_rope_head_dim": None}, "lacks qk_rope_head_dim"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads: got 0, allowed: at least 1"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers: got '32', allowed: an int"),
        ({**LLAMA, "num_hidden_layers": 10**12}, "num_hidden_layers: got 1000000000000, allowed: at most 100000"),
        ({**LLAMA, "head_dim": 10**400}, "head_dim: got 1000.*, allowed: at most 1000000000"),
        ({**LLAMA, "head_dim": 1e400}, "head_dim: got inf, allowed: an int"),
        ({**LLAMA, "hidden_size": 16}, "lacks head_dim, and hidden_size 16 is no multiple of num_attention_heads 32"),
        ({**LLAMA, "torch_dtype": "auto"}, "dtype: got 'auto', allowed: one that NumPy, JAX or PyTorch knows"),
        ({**LLAMA, "layer_types": ["mlp"] * 32}, "no layer has attention"),
        ({**LLAMA, "layer_types": ["mlp"] * 4}, "layer_types: got 4 items, allowed: num_hidden_layers, 32"),
        ({**LLAMA, "layer_types": 5}, "layer_types: got 5, allowed: a list"),
        ({**LLAMA, "layer_types": ["full_attention"] * 100_001}, "layer_types: got 100001 items, allowed: at most 100000"),
        ({**LLAMA, "layer_types": ["full_attention", "recurrent"] * 16}, "layers of type 'recurrent' are not understood"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "has layers with a state, but none of linear_num_key_heads, "),
        ({**LLAMA, "block_types": ["recurrent", "attention"]}, "has block_types, which is not understood"),
        ({**LLAMA, "layer_group_size": 8}, "has layer_group_size, which is not understood"),
        ({**QWEN, "full_attention_interval": 0}, "full_attention_interval: got .*, allowed: (at least )?1"),
        ({**QWEN, "mamba_ssm_dtype": "half-size"}, "dtype: got 'half-size', allowed: one that NumPy, JAX or PyTorch knows"),
        ({**QWEN, "num_key_value_heads": [2] * 24 + [4] * 24}, "attention layers of 2 sizes beside states are not understood"),
        ({**ATTENTION, **NEMOTRON, "hybrid_override_pattern": "M*X"}, "layers of type 'X' are not understood"),
        ({**ATTENTION, **JAMBA, "attn_layer_offset": "4"}, "attn_layer_offset: got .*, allowed: an int"),
        ({**KIMI, "linear_attn_config": {"kda_layers": 3}}, "kda_layers: got 3, allowed: a list"),
        ({**LFM2, "num_hidden_layers": 16, "conv_L_cache": 1}, "the states of its layers are empty"),
        ({**LLAMA, "layer_types": [SLIDING, FULL] * 16}, "lacks sliding_window"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 32}, "lacks attention_chunk_size"),
        ({**LLAMA, "sliding_window": 4096}, "has sliding_window, but no layer_types: which layers have windows is not unders"),
        ({**LLAMA, "swa_num_key_value_heads": 4}, "has swa_num_key_value_heads, which is not understood"),
        ({**LLAMA, "num_kv_shared_layers": 33}, "num_kv_shared_layers: got 33, allowed: 0 to 32"),
        ({**LLAMA, "num_kv_shared_layers": 32}, "no layer has attention"),
        ({**GEMMA3, "sliding_window_pattern": "LLXG"}, "sliding_window_pattern: got 'LLXG', allowed: a number, or letters L "),
        ({**LLAMA, "mamba_d_state": 16}, "has mamba_d_state, but no layer_types: which layers have states is not understood"),
        ({**LLAMA4, "no_rope_layers": [1, 0, 2] * 16}, "layers of type '2' are not understood"),
        ({**QWEN, "sliding_window": 4096}, "has layers with states, but no layer_types: sliding_window beside them is not und"),
        ({**LLAMA, "index_topk": 4}, "index_topk without kv_lora_rank is not understood"),
        ({**LLAMA, "index_topk_freq": 4}, "has index_topk_freq, which is not understood"),
        ({**DEEPSEEK_V32, "index_topk_freq": 0}, "index_topk_freq: got 0, allowed: at least 1"),
        ({**DEEPSEEK_V32, "layer_types": [SLIDING] * 61, "sliding_window": 9}, "windows or chunks with kv_lora_rank are not "),
        ({**DEEPSEEK_V4, "compress_ratios": [0, 4, 16] + [4] * 40}, "compress_ratios: got 16, allowed: 0, 4, 128"),
        ({**DEEPSEEK_V4, "compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates .* are not understood"),
        (DEEPSEEK_V4, "the kernels of layers with compressed entries fix the page sizes, so none can be asked for"),
        (
            {
                **LLAMA,
                "layer_types": [FULL, FULL, SLIDING, SLIDING] * 8,
                "num_key_value_heads": [2, 4, 8, 8] * 8,
                "sliding_window": 64,
            },
            "layers of full attention with pages of \\[32, 64\\] tokens are not understood",
        ),
    ],
)
def test_what_makes_no_sense(config: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=reason) as error:
        page_bytes_of(tmp_path, config)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_names_and_depths_of_fields(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has 'a\\x1b layer', which is not understood"):
        page_bytes_of(tmp_path, {**LLAMA, "a\x1b layer": 1})
    deep: dict[str, Any] = {"a_layer": 1}
    for _ in range(900):
        deep = {"a": deep}
    with pytest.raises(ArgumentError):
        page_bytes_of(tmp_path, {**LLAMA, "b": deep})


def test_what_is_no_json(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff", b"[" * 100_000, b'{"head_dim": 64, "head_dim": 128}'):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ArgumentError, match="not valid JSON"):
            read_model(str(tmp_path / "config.json"), 16)


class TestStates:
    """Bytes of a state: the convolution's past inputs in the model's dtype, and the recurrent state."""

    @pytest.mark.parametrize(
        ("config", "num_layers", "num_groups", "state_bytes", "page_size"),
        [
            ({**QWEN, "mamba_ssm_dtype": "float32"}, 12, 3, 3 * 8192 * 2 + 32 * 128 * 128 * 4, 1056),
            ({**ATTENTION, **JAMBA}, 4, 7, (3 + 16) * 8192 * 2, 80),
            ({**ATTENTION, **MAMBA2, "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}, 3, 10,
             3 * (8192 + 2 * 256) * 2 + 8192 * 256 * 2, 1040),
            ({**ATTENTION, **MAMBA2, "layer_types": (["mamba"] * 9 + ["attention"]) * 4}, 4, 9,
             3 * (8192 + 2 * 256) * 2 + 8192 * 256 * 2, 1040),
            ({**ATTENTION, **MAMBA2, "num_hidden_layers": 36, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128},
             36, 1, 3 * (3072 + 2 * 256) * 2 + 3072 * 256 * 2, 400),
            (ZAMBA, 9, 6, 3 * (5120 + 2 * 64) * 2 + 5120 * 64 * 2, 48),
            (MINIMAX, 10, 7, 64 * 128 * 128 * 2, 512),
            ({**ATTENTION, "layer_types": ["full_attention", "linear_attention"] * 4, "linear_attn_alpha_factor": 1},
             4, 1, 32 * 128 * 128 * 2, 256),
            (KIMI, 7, 3, 3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4, 1888),
            ({**KIMI, "num_hidden_layers": 4, "linear_attn_config": None,
              "layer_types": ["linear_attention"] * 3 + ["full_attention"],
              "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
             1, 3, 3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4, 1888),
            ({**LFM2, "num_hidden_layers": 16}, 5, 2, 2 * 2048 * 2, 16),
            ({**ATTENTION, "layer_types": ["hybrid"] * 8, "cca_time0": 2, "cca_time1": 2}, 8, 1, (40 * 2 + 4) * 128 * 2, 16),
            ({**ATTENTION, "layer_types": ["linear_attention", "full_attention"] * 4, "linear_num_key_heads": 16,
              "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
              "linear_conv_kernel_dim": 4, "kda_allow_negative_eigenvalues": False}, 4, 1,
             3 * 3 * 2048 * 2 + 16 * 128 * 128 * 4, 272),
            ({**ATTENTION, "num_hidden_layers": 12, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_group_size": 3,
              "short_conv_kernel_size": 4}, 4, 2, 3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4, 1888),
            ({**ATTENTION, "num_hidden_layers": 9, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_group_size": 3},
             3, 2, 32 * 128 * 128 * 2, 912),
        ],
    )  # fmt: skip
    def test_hybrids(
        self, config: dict[str, Any], num_layers: int, num_groups: int, state_bytes: int, page_size: int, tmp_path: Path
    ) -> None:
        model = model_of(tmp_path, config)
        assert (model.page_size, model.num_attention_groups, model.num_state_groups) == (page_size, 1, num_groups)
        assert model.state_bytes == num_layers * state_bytes
        assert model.page_bytes == model.attention_bytes
        assert model.page_bytes >= model.state_bytes
        if page_size > 16:  # a smaller page would not hold a state
            assert model.attention_bytes // page_size * (page_size - 16) < model.state_bytes

    @pytest.mark.parametrize(
        ("config", "state_bytes"),
        [
            ({"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2}, (3 + 16) * 8192 * 2),
            ({"model_type": "mamba2", "state_size": 128, "conv_kernel": 4, "num_heads": 128, "head_dim": 64, "n_groups": 8},
             3 * (8192 + 2 * 8 * 128) * 2 + 8192 * 128 * 2),
        ],
    )  # fmt: skip
    def test_without_attention(self, config: dict[str, Any], state_bytes: int, tmp_path: Path) -> None:
        model = model_of(tmp_path, {"num_hidden_layers": 64, "hidden_size": 4096, **config})
        assert (model.page_bytes, model.num_attention_groups, model.num_state_groups) == (64 * state_bytes, 0, 1)
        assert model.count_pages(100_000) == 1

    def test_a_page_size_that_was_asked_for_is_padded(self, tmp_path: Path) -> None:
        model = model_of(tmp_path, QWEN, 256)
        assert model.attention_bytes == 12 * 256 * 2048
        assert model.page_bytes == model.state_bytes == 12 * (3 * 8192 * 2 + 32 * 128 * 128 * 2)
        model = model_of(tmp_path, QWEN, 1024)
        assert model.page_bytes == model.attention_bytes == 12 * 1024 * 2048

    def test_dtypes_of_their_own(self, tmp_path: Path) -> None:
        model = model_of(tmp_path, QWEN, kv_dtype="float8_e4m3fn", state_dtype="float32")
        assert model.state_bytes == 12 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
        assert model.page_size == 2096  # a page of tokens is half as large, a state twice
        assert model_of(tmp_path, {**ATTENTION, **NEMOTRON}, state_dtype="bfloat16").page_size == 528

    def test_intervals(self) -> None:
        assert list_intervals(48) == [240, 528, 1008, 2064, 4080]
        assert list_intervals(10_000) == [10_000]
        model = ModelPages(48, num_state_groups=1)
        model.require_interval(480)
        with pytest.raises(ArgumentError, match="1,000 is not a multiple of the page size, 48 tokens"):
            model.require_interval(1000)


class TestWindows:
    """Groups of layers with windows or chunks, in pages of equal bytes."""

    @pytest.mark.parametrize("name", MODELS)
    def test_bytes_are_those_of_vllm(self, name: str, tmp_path: Path) -> None:
        model = replace(model_of(tmp_path, MODELS[name]), step_tokens=STEP_TOKENS)
        assert model.page_bytes is not None
        token_bytes = model.page_bytes * model.num_attention_groups / model.page_size
        request_bytes = model.page_bytes * model.count_pages(REQUEST_TOKENS)
        assert token_bytes == pytest.approx(VLLM_BYTES[name][0], rel=0.01)
        # With pages of several sizes, windows keep what another request resumes with, up to a page of the largest size.
        num_kept = {"DeepSeek V4 Flash": 0.03}.get(name, 0.02)  # vLLM adds the most of each group, in whatever step
        assert request_bytes == pytest.approx(VLLM_BYTES[name][1], rel=num_kept)

    @pytest.mark.parametrize(
        ("config", "page_size", "windows"),
        [
            ({**LLAMA4, "no_rope_layers": []}, 16, [(Reach(8192, is_chunked=True), 16, 3, 36)]),
            (DEEPSEEK_V4, 256, [(Reach(128), 64, 2, 43), (Reach(8), 4, 1, 21), (Reach(128), 8, 1, 20)]),
            ({**LLAMA, "model_type": "gemma2", "sliding_window": 4096}, 16, [(Reach(4096), 16, 1, 16)]),
            (QWEN2 | {"use_sliding_window": True}, 16, [(Reach(4096), 16, 1, 8)]),
            (QWEN2, 16, []),
        ],
    )  # fmt: skip
    def test_groups(
        self, config: dict[str, Any], page_size: int, windows: list[tuple[Reach, int, int, int]], tmp_path: Path
    ) -> None:
        model = model_of(tmp_path, config)
        found = [(each.reach, each.page_size, each.num_groups, len(each.layers)) for each in model.windows]
        assert (model.page_size, found, model.num_state_groups) == (page_size, windows, 0)
        assert max([model.attention_bytes or 0, *(each.num_bytes or 0 for each in model.windows)]) == model.page_bytes

    def test_numbers_that_a_config_leaves_out(self, tmp_path: Path) -> None:
        """The model's own defaults count: 4 KV heads of 256 elements, in the 5 layers of a group."""
        assert model_of(tmp_path, GEMMA3_4B).page_bytes == 5 * 16 * 2 * 4 * 256 * 2

    def test_layers(self, tmp_path: Path) -> None:
        assert model_of(tmp_path, GEMMA3N).describe_windows() == [
            "Layers 0-3, 5-8, 10-13, 15-18 (16) have a window of 512 tokens, in 4 groups with pages of 16 tokens."
        ]
        [chunks] = model_of(tmp_path, LLAMA4).describe_windows()
        assert chunks.endswith("44-46 (36) have chunks of 8,192 tokens, in 3 groups with pages of 16 tokens.")
        assert model_of(tmp_path, GEMMA3).windows[0].layers == tuple(i for i in range(62) if (i + 1) % 6)

    def test_little_is_padding(self, tmp_path: Path) -> None:
        """Gemma 4's window layers keep twice as many bytes a token as its others."""
        model = model_of(tmp_path, GEMMA4, 64)
        assert (model.page_size, model.windows[0].page_size) == (128, 64)
        assert model.attention_bytes == model.windows[0].num_bytes == model.page_bytes == 10 * 128 * 2 * 4 * 512 * 2

    def test_entries_of_other_dtypes(self, tmp_path: Path) -> None:
        model = model_of(tmp_path, DEEPSEEK_V32, kv_dtype="float8_e4m3fn")
        assert model.page_bytes == 16 * 61 * (656 + 132)
        model = model_of(tmp_path, DEEPSEEK_V4, kv_dtype="bfloat16")
        assert model.attention_bytes == 21 * (64 * 1024 + 8704) + 20 * 2048

    def test_windows_in_layers_with_a_state(self, tmp_path: Path) -> None:
        types = ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid_sliding"] * 2
        config = {**ATTENTION, "layer_types": types, "sliding_window": 512, "cca_time0": 2, "cca_time1": 2}
        model = model_of(tmp_path, config)
        assert [(each.reach, each.layers) for each in model.windows] == [(Reach(512), (1, 2, 3, 5, 6, 7))]
        assert (model.num_attention_groups, model.num_state_groups) == (1, 4)

    def test_a_request_without_full_attention(self, tmp_path: Path) -> None:
        model = model_of(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 4096})
        assert (model.num_attention_groups, model.page_size, model.contents) == (0, 16, "16 tokens")
        assert model.count_pages(1_000_000) == (4095 + 8192) // 16 + 2

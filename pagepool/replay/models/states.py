"""A recurrent layer's state of a request: the last inputs of its convolution, and its recurrent state."""

from collections.abc import Callable
from typing import NamedTuple

from pagepool.errors import ArgumentError
from pagepool.replay.models.values import MAX_LAYERS, Config, find_dtype, read_int, read_layers
from pagepool.specs import cdiv, dtype_bits


class State(NamedTuple):
    """Numbers of elements of the two parts in one layer, and the dtype of the recurrent part if it is not the model's."""

    num_conv: int
    num_recurrent: int
    dtype: str | None = None


def count_state_bytes(config: Config, state_dtype: str | None = None) -> int:
    """Return the bytes of one layer's state. The convolution has the model's dtype. The dtype of the recurrent part is
    `state_dtype`, or the config's, or the default of its kind, or the model's. Raise ArgumentError or ArgumentTypeError for
    fields that are not understood.
    """
    for name, read in READERS.items():
        if config.get(name) is not None:
            state = read(config)
            break
    else:
        raise ArgumentError(f"has layers with a state, but none of {', '.join(READERS)}: the size of a state is not understood")
    own_dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or state.dtype
    recurrent_dtype = state_dtype or own_dtype or find_dtype(config)
    return _count_bytes(state.num_conv, find_dtype(config)) + _count_bytes(state.num_recurrent, str(recurrent_dtype))


def _count_bytes(num_elements: int, dtype: str) -> int:
    return cdiv(num_elements * dtype_bits(dtype), 8)


def _read_past(config: Config, name: str) -> int:
    """Return the number of inputs that a convolution keeps: the size of its kernel, less the newest input."""
    return read_int(config, name) - 1


def _read_delta_net(config: Config) -> State:
    """Read a gated delta net: Qwen3-Next, Qwen3.5; or Kimi delta attention with its fields: Alice AI."""
    key_size, value_size = read_int(config, "linear_key_head_dim"), read_int(config, "linear_value_head_dim")
    num_keys, num_values = read_int(config, "linear_num_key_heads"), read_int(config, "linear_num_value_heads")
    width = 2 * num_keys * key_size + num_values * value_size
    dtype = "float32" if "kda_allow_negative_eigenvalues" in config else None
    return State(width * _read_past(config, "linear_conv_kernel_dim"), num_values * value_size * key_size, dtype)


def _read_kimi(config: Config) -> State:
    """Read Kimi delta attention: from a separate dict, or from fields of the config, as Transformers writes it."""
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict):
        linear, names = config, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    num_heads, size = read_int(linear, names[0]), read_int(linear, names[1])
    return State(3 * num_heads * size * _read_past(linear, names[2]), num_heads * size * size, "float32")


def _read_lightning(config: Config) -> State:
    """Read lightning attention of MiniMax and Ling 2.5, which has as many heads as attention, and no convolution."""
    num_heads = read_int(config, "num_attention_heads")
    has_head_size = config.get("head_dim") is not None
    size = read_int(config, "head_dim") if has_head_size else read_int(config, "hidden_size") // num_heads
    return State(0, num_heads * size * size)


def _make_mamba2(num_heads: int, head_size: int, num_groups: int, state_size: int, num_past: int) -> State:
    width = num_heads * head_size + 2 * num_groups * state_size
    return State(width * num_past, num_heads * head_size * state_size)


def _read_bamba(config: Config) -> State:
    """Read Mamba-2 of Bamba, Granite 4 and Falcon-H1."""
    num_heads, is_auto = read_int(config, "mamba_n_heads"), config.get("mamba_d_head") in (None, "auto")
    head_size = _count_inner(config) // num_heads if is_auto else read_int(config, "mamba_d_head")
    sizes = read_int(config, "mamba_n_groups"), read_int(config, "mamba_d_state"), _read_past(config, "mamba_d_conv")
    return _make_mamba2(num_heads, head_size, *sizes)


def _count_inner(config: Config) -> int:
    if config.get("mamba_d_ssm") is not None:
        return read_int(config, "mamba_d_ssm")
    return read_int(config, "mamba_expand") * read_int(config, "hidden_size")


def _read_zamba(config: Config) -> State:
    num_heads = read_int(config, "n_mamba_heads")
    sizes = read_int(config, "mamba_ngroups"), read_int(config, "mamba_d_state"), _read_past(config, "mamba_d_conv")
    return _make_mamba2(num_heads, _count_inner(config) // num_heads, *sizes)


def _read_nemotron(config: Config) -> State:
    """Read Mamba-2 of Nemotron-H, whose recurrent state is in float32."""
    num_heads, head_size = read_int(config, "mamba_num_heads"), read_int(config, "mamba_head_dim")
    sizes = read_int(config, "n_groups"), read_int(config, "ssm_state_size"), _read_past(config, "conv_kernel")
    return _make_mamba2(num_heads, head_size, *sizes)._replace(dtype="float32")


def _read_jamba(config: Config) -> State:
    width = _count_inner(config)
    return State(width * _read_past(config, "mamba_d_conv"), width * read_int(config, "mamba_d_state"))


def _read_mamba(config: Config) -> State:
    """Read Mamba, or Mamba-2 if there are heads, of models without attention."""
    state_size, num_past = read_int(config, "state_size"), _read_past(config, "conv_kernel")
    if config.get("num_heads") is not None:
        num_heads, head_size = read_int(config, "num_heads"), read_int(config, "head_dim")
        return _make_mamba2(num_heads, head_size, read_int(config, "n_groups"), state_size, num_past)
    width = read_int(config, "expand") * read_int(config, "hidden_size")
    return State(width * num_past, width * state_size)


def _read_short_conv(config: Config) -> State:
    """Read LFM2, which has a convolution only."""
    width = "hidden_size" if config.get("conv_dim") is None else "conv_dim"
    return State(read_int(config, width) * _read_past(config, "conv_L_cache"), 0)


def _read_bailing(config: Config) -> State:
    """Read Ling 3: Kimi delta attention with as many heads as attention."""
    num_heads, size = read_int(config, "num_attention_heads"), read_int(config, "head_dim")
    return State(3 * num_heads * size * _read_past(config, "short_conv_kernel_size"), num_heads * size * size, "float32")


def _read_zaya(config: Config) -> State:
    """Read Zaya, whose queries and keys pass through two convolutions, and whose values have a half of the token before."""
    num_heads, num_kv_heads = read_int(config, "num_attention_heads"), read_int(config, "num_key_value_heads")
    size, num_past = read_int(config, "head_dim"), _read_past(config, "cca_time0") + _read_past(config, "cca_time1")
    return State((num_heads + num_kv_heads) * size * num_past, num_kv_heads * size // 2)


def count_side_states(config: Config) -> tuple[int, int]:
    """Return the number of layers of Qwen4 with an embedding of n-grams, and the bytes of the past inputs that each keeps for
    its convolution, which skips tokens.
    """
    layers = config.get("ple_layer_ids")
    if not layers:
        return 0, 0
    num_layers = len(read_layers(layers, "ple_layer_ids", read_int(config, "num_hidden_layers", MAX_LAYERS), first=1))
    width = read_int(config, "hidden_size") * read_int(config, "hc_count")
    num_past = _read_past(config, "ple_conv_kernel_size") * read_int(config, "ngram_size")
    return num_layers, _count_bytes(width * num_past, find_dtype(config))


READERS: dict[str, Callable[[Config], State]] = {
    "linear_num_key_heads": _read_delta_net,
    "linear_attn_config": _read_kimi,
    "linear_num_heads": _read_kimi,
    "short_conv_kernel_size": _read_bailing,
    "layer_group_size": _read_lightning,
    "attn_type_list": _read_lightning,
    "linear_attn_alpha_factor": _read_lightning,  # written by Transformers
    "mamba_n_heads": _read_bamba,
    "n_mamba_heads": _read_zamba,
    "mamba_num_heads": _read_nemotron,
    "mamba_d_state": _read_jamba,
    "state_size": _read_mamba,
    "conv_L_cache": _read_short_conv,
    "cca_time0": _read_zaya,
}
"""Reader of a state, by a field found only in models of its kind."""

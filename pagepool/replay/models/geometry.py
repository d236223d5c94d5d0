"""The keys and values of one layer: fields of its own, and the number of elements that it keeps for a token."""

from pagepool.errors import ArgumentError
from pagepool.replay.models.layers import SLIDING, WINDOWED
from pagepool.replay.models.values import Config, read_int
from pagepool.specs import dtype_bits

SCALED = 128  # elements per 4-byte scale of an indexer key or of a packed latent vector
PACKED_BITS = 8
OWN_HEAD_SIZES = ("gemma", "vaultgemma", "qwen3", "glm", "gpt_oss", "seed_oss", "ernie4_5", "helium")  # model types
FULL_NAMES = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "head_dim_full_attention": "head_dim",
    "num_attention_groups_full_attention": "num_key_value_heads",
}
"""Fields of layers with full attention, and the fields of the model that they replace."""

SLIDING_NAMES = {
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_kv_lora_rank": "kv_lora_rank",
    "swa_qk_rope_head_dim": "qk_rope_head_dim",
    "head_dim_sliding_attention": "head_dim",
    "num_attention_groups_sliding_attention": "num_key_value_heads",
}
"""Fields of layers with windows, and the fields of the model that they replace."""

OTHER_NAMES = {"num_attention_groups": "num_key_value_heads", "head_dim": "head_dim"}
"""Fields in `attention_other_setting`, which are for the layers of one type, and the fields of the model that they replace."""

LAYER_LISTS = {"num_key_value_heads": "num_key_value_heads", "sliding_windows": "sliding_window"}
"""Lists by layer, and the fields that they are for."""


def read_layer(config: Config, name: str, layer: int) -> Config:
    """Return the fields of a layer of type `name`: those of its type, and of itself, replace those of the model."""
    own: Config = {}
    if name in WINDOWED:
        own = _pick(config, SLIDING_NAMES)
        if "head_dim" in own:
            own.setdefault("v_head_dim", None)
    elif name == "full_attention":
        own = _pick(config, FULL_NAMES)
        if config.get("attention_k_eq_v") is False:
            own.pop("num_key_value_heads", None)
    other = config.get("attention_other_setting")
    if isinstance(other, dict) and other.get("attention_type", SLIDING) == name:
        own |= _pick(other, OTHER_NAMES)
    for items, field in LAYER_LISTS.items():
        if isinstance(config.get(items), list):
            if layer >= len(config[items]):
                raise ArgumentError(f"{items}: got {len(config[items])} items, fewer than there are layers")
            own[field] = config[items][layer]
    if config.get("per_layer_config"):
        own |= config["per_layer_config"][layer]
    return config | own if own else config


def _pick(fields: Config, names: dict[str, str]) -> Config:
    return {name: fields[other] for other, name in names.items() if fields.get(other) is not None}


def count_scaled(size: int) -> int:
    """Count the bytes of 8-bit elements with their scales."""
    return size + size // SCALED * 4


def is_latent(config: Config) -> bool:
    """Whether layers keep a latent vector instead of keys and values."""
    return config.get("kv_lora_rank") is not None and may_be_latent(config)


def may_be_latent(config: Config) -> bool:
    """Whether the model does not say that it keeps keys and values."""
    return config.get("use_mla") is None or bool(config["use_mla"])


def count_latent(config: Config, dtype: str) -> int:
    """Count the elements of a token's vector: compressed keys and values, and the rotated part of the key. With an indexer and
    8 bits, the rotated part stays in 16 bits, and the compressed part has a scale for each 128 elements.
    """
    rank = read_int(config, "kv_lora_rank")
    rotated = 0 if config.get("qk_rope_head_dim") == 0 else read_int(config, "qk_rope_head_dim")
    if config.get("index_topk") is not None and dtype_bits(dtype) == PACKED_BITS:
        return count_scaled(rank) + 2 * rotated
    return rank + rotated


def count_heads(config: Config) -> int:
    """Return the number of KV heads."""
    return read_int(config, "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads")


def count_keys_and_values(config: Config) -> int:
    """Count the elements of a token's keys and values. Values may have a size of their own."""
    for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
        if config.get(name) and may_be_latent(config):
            raise ArgumentError(f"has {name}, but lacks kv_lora_rank")
    head_size = find_head_size(config)
    value_size = read_int(config, "v_head_dim") if config.get("v_head_dim") else head_size
    return count_heads(config) * (head_size + value_size)


def find_head_size(config: Config) -> int:
    """Return the size of a key."""
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if config.get(name) is not None:
            return read_int(config, name)
    kind = str(config.get("model_type"))
    if kind.startswith(OWN_HEAD_SIZES) and not kind.endswith("_moe"):
        raise ArgumentError("lacks head_dim, which is not hidden_size / num_attention_heads in its model")
    size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    if size % num_heads:
        raise ArgumentError(f"lacks head_dim, and hidden_size {size} is no multiple of num_attention_heads {num_heads}")
    return size // num_heads

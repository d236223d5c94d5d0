"""How the layers of a model share the pages of a pool.

Engines give all groups of layers pages of one size, so that any page can hold the tokens of an attention group or the states
of a state group. Each group has the same number of layers. The larger of the two, a page of tokens or a state, decides the
bytes of a page in a layer, and the other is padded.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from pagepool.compat.easydel import create_kv_cache_specs_from_config
from pagepool.errors import ArgumentError, count_of
from pagepool.replay.models.config import Config, find_dtype, read_config, read_int
from pagepool.replay.models.layers import list_attention_layers, list_state_layers, list_types
from pagepool.replay.models.states import count_state_bytes
from pagepool.specs import CacheGroupSpec, CacheSpec, FullAttentionSpec, MambaSpec, cdiv

__all__ = ["PAGE_SIZE", "ModelPages", "list_intervals", "read_model"]

PAGE_SIZE = 16  # tokens, unless a state is larger
INTERVALS = (256, 512, 1024, 2048, 4096)  # tokens


@dataclass(frozen=True, slots=True)
class ModelPages:
    """The groups of a model, and the bytes of their pages.

    A page id is one page of `page_size` tokens, or one state, in each layer of its group. `page_bytes` are those of all layers
    of a group, None if unknown. `state_bytes` and `attention_bytes` are what of them is used at most, by a page of each kind.
    Without attention `page_size` is 1.
    """

    page_size: int = PAGE_SIZE
    page_bytes: int | None = None
    num_attention_groups: int = 1
    num_state_groups: int = 0
    attention_bytes: int | None = None
    state_bytes: int | None = None

    @property
    def contents(self) -> str:
        """What a page holds, as text.

        >>> ModelPages(1).contents, ModelPages(1, num_attention_groups=0, num_state_groups=1).contents
        ('1 token', '1 state')
        """
        return count_of(self.page_size, "token") if self.num_attention_groups else "1 state"

    def count_pages(self, num_tokens: int) -> int:
        """Count the pages that a request of `num_tokens` holds, without checkpoints."""
        return self.num_attention_groups * cdiv(num_tokens, self.page_size) + self.num_state_groups

    def make_groups(self, checkpoint_interval: int | None = None) -> list[CacheGroupSpec]:
        """Make the groups for a simulation, in which their bytes do not matter."""
        attention = FullAttentionSpec(self.page_size, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
        state = MambaSpec(checkpoint_interval or self.page_size, ((1,),), "bfloat16", checkpoint_interval=checkpoint_interval)
        specs: list[CacheSpec] = [attention] * self.num_attention_groups
        return [CacheGroupSpec(spec) for spec in [*specs, *[state] * self.num_state_groups]]

    def require_interval(self, interval: int) -> None:
        """Raise ArgumentError for an interval of checkpoints that is not a multiple of the page size."""
        if interval % self.page_size:
            raise ArgumentError(f"{interval:,} is not a multiple of the page size, {count_of(self.page_size, 'token')}")


def list_intervals(page_size: int) -> list[int]:
    """List intervals to choose from: multiples of the page size near powers of two.

    >>> list_intervals(16), list_intervals(544)
    ([256, 512, 1024, 2048, 4096], [544, 1088, 2176, 4352])
    """
    return sorted({max(1, round(interval / page_size)) * page_size for interval in INTERVALS})


def read_model(
    path: str, page_size: int | None = None, kv_dtype: str | None = None, state_dtype: str | None = None
) -> ModelPages:
    """Return the pages of the model whose Hugging Face `config.json` is at `path`.

    Without states there is one group of all layers; a page is layers x KV heads x head size x 2 x bytes of the dtype for each
    token, or the latent vectors of multi-head latent attention. Layers with a window count as full attention. With states,
    `page_size` None chooses the smallest multiple of 16 whose pages are as large as a state. `kv_dtype` is that of attention,
    `state_dtype` that of recurrent states; both are by default the model's.

    Raises ArgumentError if a field is missing, invalid or not understood, OSError if the file cannot be read.
    """
    config = read_config(path)
    try:
        types = list_types(config)
        num_states = len(list_state_layers(types))
        attention = _list_attention(config, list_attention_layers(types), page_size or PAGE_SIZE, kv_dtype)
        if num_states == 0:
            return _make_attention_pages(attention, page_size or PAGE_SIZE)
        state_bytes = count_state_bytes(config, state_dtype)
        if state_bytes == 0:
            raise ArgumentError("the states of its layers are empty")
        return _make_pages(attention, num_states, state_bytes, page_size)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{path}: {error}") from error


def _list_attention(config: Config, layers: list[int], page_size: int, kv_dtype: str | None) -> list[CacheGroupSpec]:
    """List the groups of layers with equal attention; all count as full attention."""
    if not layers:
        return []
    is_latent = config.get("kv_lora_rank") is not None
    num_kv_heads, head_size = _latent_geometry(config) if is_latent else _head_geometry(config)
    by_layer = config | {"num_key_value_heads": num_kv_heads} if is_latent else config
    full = SimpleNamespace(mask_type="FULL", size=None, chunks=None)
    return create_kv_cache_specs_from_config(
        SimpleNamespace(**by_layer, get_mask_details=lambda: dict.fromkeys(layers, full)),
        page_size,
        num_kv_heads,
        head_size,
        kv_dtype or find_dtype(config),
        use_mla=is_latent,
    )


def _latent_geometry(config: Config) -> tuple[int, int]:
    """Return 1 and the size of a token's vector: compressed keys and values, and the rotated part of the key."""
    return 1, read_int(config, "kv_lora_rank") + read_int(config, "qk_rope_head_dim")


def _head_geometry(config: Config) -> tuple[int, int]:
    """Return KV heads and head size. If KV heads are a list by layer, they are read with the layers."""
    num_heads = read_int(config, "num_attention_heads")
    names = [name for name in ("head_dim", "attention_head_dim") if config.get(name) is not None]
    head_size = read_int(config, names[0]) if names else read_int(config, "hidden_size") // num_heads
    is_same_in_all = isinstance(config.get("num_key_value_heads"), int)
    return read_int(config, "num_key_value_heads") if is_same_in_all else num_heads, head_size


def _make_attention_pages(groups: list[CacheGroupSpec], page_size: int) -> ModelPages:
    """Make pages that hold the tokens of all layers."""
    num_bytes = sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names or ()) for group in groups)
    if num_bytes == 0:
        raise ArgumentError("no layer has attention")
    return ModelPages(page_size, num_bytes, attention_bytes=num_bytes)


def _make_pages(attention: list[CacheGroupSpec], num_states: int, state_bytes: int, page_size: int | None) -> ModelPages:
    """Make pages that hold tokens or states; `attention` has the pages of `page_size` tokens, or of 16."""
    if not attention:
        return ModelPages(1, num_states * state_bytes, 0, 1, state_bytes=num_states * state_bytes)
    if len(attention) > 1:
        raise ArgumentError(f"attention layers of {len(attention)} sizes beside states are not understood")
    [group] = attention
    num_attention, layer_bytes = len(group.layer_names or ()), group.kv_cache_spec.page_size_bytes
    if page_size is None:
        num_times = cdiv(state_bytes, layer_bytes)
        page_size, layer_bytes = PAGE_SIZE * num_times, layer_bytes * num_times
    size = _choose_group_size(num_attention, num_states)
    return ModelPages(
        page_size,
        size * max(layer_bytes, state_bytes),
        cdiv(num_attention, size),
        cdiv(num_states, size),
        attention_bytes=size * layer_bytes,
        state_bytes=size * state_bytes,
    )


def _choose_group_size(num_attention: int, num_states: int) -> int:
    """Choose the layers of a group: the number of one of the kinds, so that the fewest places for layers stay empty.

    >>> _choose_group_size(12, 36), _choose_group_size(6, 10), _choose_group_size(10, 12)
    (12, 6, 12)
    """
    sizes = sorted((num_attention, num_states))
    return min(sizes, key=lambda size: -num_attention % size + -num_states % size)

"""What the layers of published models keep: the right bytes, or an error that names the field, and never other bytes."""

from pathlib import Path
from typing import Any

import pytest
from command_line import write_config
from model_families import KEPT, REFUSED, Kept

from pagepool.errors import ArgumentError
from pagepool.replay.models.caches import FULL, list_attention
from pagepool.replay.models.config import read_config
from pagepool.replay.models.layers import list_state_layers, list_types
from pagepool.replay.models.pages import read_model


def count_kept(folder: Path, fields: dict[str, Any]) -> Kept:
    """Return bytes a token of full attention and of others, and the number of layers with a state."""
    config = read_config(str(write_config(folder, fields)))
    types = list_types(config)
    kinds = list_attention(config, types, 16, None)
    full, local = (
        sum(kind.num_bytes // kind.page_size * len(kind.layers) for kind in kinds if (kind.reach == FULL) == is_full)
        for is_full in (True, False)
    )
    return full, local, len(list_state_layers(types))


@pytest.mark.parametrize("name", KEPT)
def test_bytes_a_token(name: str, tmp_path: Path) -> None:
    fields, kept = KEPT[name]
    assert count_kept(tmp_path, fields) == kept
    read_model(str(tmp_path / "config.json"))  # groups and states are found too


@pytest.mark.parametrize("name", REFUSED)
def test_the_field_is_named(name: str, tmp_path: Path) -> None:
    fields, field = REFUSED[name]
    with pytest.raises(ArgumentError, match=field):
        read_model(str(write_config(tmp_path, fields)))


@pytest.mark.parametrize(
    "field",
    ["kv_groups", "num_heads_kv", "n_kv_head", "head_groups", "share_layers", "block_pattern", "indexer_dim", "cross_every",
     "window_len", "sparse_topk", "latent_dim", "num_memory_slots", "kv_bits", "attn_types", "cache_every", "local_span",
     "global_every", "mla_rank", "loop_count", "recurrent_depth", "hybrid_ratio"],
)  # fmt: skip
@pytest.mark.parametrize("value", [2, "some", [1, 2], {"a": 1}, True])
def test_names_that_nobody_reads(field: str, value: object, tmp_path: Path) -> None:
    fields, kept = KEPT["Llama 3.1"]
    with pytest.raises(
        ArgumentError, match=f"has {field}, which is not understood: pagepool plan takes the bytes by --bytes-p"
    ):
        read_model(str(write_config(tmp_path, fields | {field: value})))
    assert count_kept(tmp_path, fields | {field: None}) == kept

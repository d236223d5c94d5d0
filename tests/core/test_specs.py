"""Specs: sizes, identities, merging, budgets, and reading a model's config; equal to the engine's where it is
installed."""

import importlib.util
from dataclasses import FrozenInstanceError
from enum import Enum, StrEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sources import run_python

from pagepool.compat.easydel import (
    CacheGroupsConfig,
    RuntimePageBudgetEstimate,
    create_kv_cache_specs_from_config,
    dp_shard_for_page_id,
    estimate_runtime_page_budget,
)
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.specs import (
    CacheGroupSpec,
    CacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
    dp_shard_page_bounds,
    dtype_bits,
    pages_per_dp_shard,
    usable_pages_count,
)

GEOMETRY: dict[str, Any] = {"page_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": np.float16}
HAS_ENGINE = importlib.util.find_spec("easydel") is not None


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**GEOMETRY, "use_mla": False, **changes})


def sliding(window: int = 1024, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{**GEOMETRY, "use_mla": False, "sliding_window": window, **changes})


def chunked(chunk: int = 512, **changes: Any) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**{**GEOMETRY, "use_mla": False, "attention_chunk_size": chunk, **changes})


def mamba(**changes: Any) -> MambaSpec:
    return MambaSpec(**{"page_size": 16, "shapes": ((16, 64), (3, 32)), "dtype": np.float16, **changes})


class TestDtypes:
    @pytest.mark.parametrize(
        ("dtype", "bits"),
        [
            (np.float16, 16),
            (np.dtype("float32"), 32),
            ("float64", 64),
            ("<f2", 16),
            (float, 64),
            (np.int8, 8),
            ("bfloat16", 16),
            ("float8_e4m3fn", 8),
            ("float8_e5m2", 8),
            ("float4_e2m1fn", 4),
            ("int4", 4),
            (SimpleNamespace(name="bfloat16"), 16),
            (type("bfloat16", (), {}), 16),
            ("bf16", 16),
            ("BF16", 16),
            ("half", 16),
            ("fp16", 16),
            (np.dtype("f8"), 64),
            ("f16", 16),  # NumPy has a float of 16 bytes by this name
            ("float", 32),
            ("fp32", 32),
            ("double", 64),
            ("fp8", 8),
            ("fp8_e4m3", 8),
            ("fp8_e5m2", 8),
            ("torch.bfloat16", 16),
            ("torch.float8_e4m3fn", 8),
            (type("dtype", (), {"__module__": "torch", "__str__": lambda _: "torch.bfloat16"})(), 16),
            (type("dtype", (), {"__module__": "torch", "__str__": lambda _: "torch.float32"})(), 32),
        ],
    )
    def test_size(self, dtype: object, bits: int) -> None:
        assert dtype_bits(dtype) == bits

    @pytest.mark.parametrize(
        "dtype",
        ["float17", "bf17", "torch.half4", "auto", "", None, object, str, np.dtype("V8"), "datetime64[s]", 3, object(),
         "f8", "F8", "i8", "u8", "f4", "i4", "u4"],
    )  # fmt: skip
    def test_what_is_no_number_type_is_refused(self, dtype: object) -> None:
        with pytest.raises(ArgumentTypeError, match="dtype"):
            full(dtype=dtype)

    def test_types_of_ml_dtypes(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        assert dtype_bits(ml_dtypes.bfloat16) == dtype_bits(np.dtype(ml_dtypes.bfloat16)) == 16
        assert dtype_bits(ml_dtypes.int4) == 4

    def test_types_of_jax(self) -> None:
        jnp = pytest.importorskip("jax.numpy")
        assert dtype_bits(jnp.bfloat16) == dtype_bits(jnp.dtype("bfloat16")) == 16
        assert dtype_bits(jnp.float8_e4m3fn) == 8

    def test_jax_and_ml_dtypes_are_never_imported(self) -> None:
        code = (
            "import sys; sys.modules['jax'] = sys.modules['ml_dtypes'] = None\n"
            "from pagepool.specs import FullAttentionSpec\n"
            "assert FullAttentionSpec(16, 8, 64, 'bfloat16', False).page_size_bytes == 32768"
        )
        assert run_python("-c", code).returncode == 0


class TestSizes:
    def test_keys_and_values_count_twice_latent_vectors_once(self) -> None:
        assert full().page_size_bytes == 2 * 16 * 8 * 64 * 2
        assert full(use_mla=True).page_size_bytes == 16 * 8 * 64 * 2

    def test_packed_types_round_up_to_bytes(self) -> None:
        assert full(page_size=1, num_kv_heads=1, head_size=3, dtype="int4").page_size_bytes == 3
        assert full(page_size=1, num_kv_heads=1, head_size=3, dtype="int4", use_mla=True).page_size_bytes == 2

    def test_mamba_state_and_padding(self) -> None:
        assert mamba().num_elements == 16 * 64 + 3 * 32
        assert mamba().page_size_bytes == 2 * (16 * 64 + 3 * 32)
        assert mamba(page_size_padded=4096).page_size_bytes == 4096

    @pytest.mark.parametrize(
        ("spec", "num_pages"),
        [
            (full(), 63),
            (sliding(100), cdiv(99 + 64, 16) + 1),
            (sliding(100_000), 63 + 1),
            (chunked(128), cdiv(128 + 64, 16)),
            (chunked(100_000), 63),
            (mamba(), 1),
        ],
    )
    def test_most_pages_of_a_request(self, spec: CacheSpec, num_pages: int) -> None:
        most = spec.max_memory_usage_bytes(max_model_len=1000, max_num_batched_tokens=64)
        assert most == num_pages * spec.page_size_bytes

    def test_type_ids_tell_kinds_and_geometries_apart(self) -> None:
        distinct = [full(), full(page_size=32), full(head_size=128), sliding(), sliding(8), chunked(), mamba()]
        assert len({spec.type_id for spec in distinct}) == len(distinct)
        assert full().type_id == full(num_kv_heads=4, head_size=128).type_id

    @pytest.mark.parametrize("name", ["page_size_bytes", "type_id", "max_memory_usage_bytes"])
    def test_the_base_has_no_size(self, name: str) -> None:
        with pytest.raises(NotImplementedError, match="CacheSpec"):
            getattr(CacheSpec(16), name)()


class TestFields:
    def test_positional_order(self) -> None:
        assert FullAttentionSpec(16, 8, 64, np.float16, False, 32) == full(sliding_window=32)
        assert SlidingWindowSpec(16, 8, 64, np.float16, False, 1024) == sliding()
        assert ChunkedLocalAttentionSpec(16, 8, 64, np.float16, False, 512) == chunked()
        assert MambaSpec(16, ((16, 64), (3, 32)), np.float16, None) == mamba()

    def test_specs_are_frozen_and_equal_ones_hash_alike(self) -> None:
        with pytest.raises(FrozenInstanceError):
            full().page_size = 32
        assert full(dtype=np.float16) == full(dtype=np.dtype("float16"))
        assert hash(full(dtype=np.float16)) == hash(full(dtype=np.dtype("float16")))
        assert len({full(), full(), sliding(), mamba(), mamba()}) == 3


class TestMerge:
    @pytest.mark.parametrize("spec", [full(), sliding(), chunked(), mamba()])
    def test_equal_specs(self, spec: CacheSpec) -> None:
        assert type(spec).merge([spec, spec]) == spec

    def test_windows_of_full_attention_layers(self) -> None:
        windowed, chunky = full(sliding_window=32), full(attention_chunk_size=32)
        assert FullAttentionSpec.merge([full(), windowed, windowed]) == windowed
        assert FullAttentionSpec.merge([full(), chunky]) == chunky


class TestShards:
    def test_shards_cover_the_pool_but_for_the_null_page(self) -> None:
        size = pages_per_dp_shard(64, 4)
        assert size == 16
        ids = [i for shard in range(4) for i in range(*dp_shard_page_bounds(shard, size))]
        assert ids == list(range(1, 64))
        assert len(ids) == usable_pages_count(64)
        for shard in range(4):
            owners = {dp_shard_for_page_id(i, size, 4) for i in range(*dp_shard_page_bounds(shard, size))}
            assert owners == {shard}

    def test_what_cannot_be_sharded(self) -> None:
        assert [pages_per_dp_shard(64, size) for size in (None, 0, 1, 3, 65)] == [None] * 5
        assert pages_per_dp_shard(0, 2) is None
        assert dp_shard_for_page_id(0, 16, 4) is None
        assert dp_shard_for_page_id(5, 0, 4) is None
        assert dp_shard_for_page_id(5, 16, 0) is None
        assert dp_shard_for_page_id(999, 16, 4) == 3
        assert usable_pages_count(0) == 0


class TestBudget:
    def estimate(self, *spec: CacheSpec, num_pages: int = 1024, **options: Any) -> RuntimePageBudgetEstimate:
        options = {"max_model_len": 1000, "max_num_batched_tokens": 64, **options}
        groups = [CacheGroupSpec(one) for one in spec]
        return estimate_runtime_page_budget(num_pages=num_pages, kv_cache_groups=groups, **options)

    def test_groups_add_up(self) -> None:
        estimate = self.estimate(full(), sliding(100), mamba())
        assert estimate.per_group_pages == (63, 12, 1)
        assert estimate.pages_per_request == 76
        assert estimate.usable_pages == 1023
        assert estimate.max_num_seqs == 1023 // 76

    def test_a_request_lives_in_one_shard(self) -> None:
        assert self.estimate(full(), num_pages=128).max_num_seqs == 2
        assert self.estimate(full(), num_pages=128, data_parallel_size=2).max_num_seqs == 2
        assert self.estimate(full(), num_pages=252, data_parallel_size=2).max_num_seqs == 1 + 2
        assert self.estimate(full(), num_pages=253, data_parallel_size=2).max_num_seqs == 4

    def test_at_least_one(self) -> None:
        assert self.estimate(full(), num_pages=2).max_num_seqs == 1
        assert self.estimate(full(), num_pages=1).max_num_seqs == 1
        assert self.estimate(full(), max_model_len=0, max_num_batched_tokens=0).pages_per_request == 1

    def test_no_groups(self) -> None:
        assert self.estimate() == RuntimePageBudgetEstimate(0, 1023, 1023, ())

    def test_pages_without_bytes(self) -> None:
        class Empty(FullAttentionSpec):
            page_size_bytes = 0

        with pytest.raises(ArgumentError, match=r"Empty\.page_size_bytes: got 0, allowed: at least 1"):
            self.estimate(Empty(**GEOMETRY, use_mla=False))


class MaskName(StrEnum):
    FULL = "ATTN_MASK_FULL"
    SLIDING = "ATTN_MASK_SLIDING"
    CHUNK = "ATTN_MASK_CHUNK"
    LINEAR = "ATTN_MASK_LINEAR"


NumberedMask = Enum("NumberedMask", ["FULL", "SLIDING", "CHUNK"])


def config_of(*masks: object, size: int | None = 128, chunks: int | None = 64, **attributes: Any) -> Any:
    details = {i: SimpleNamespace(mask_type=mask, size=size, chunks=chunks) for i, mask in enumerate(masks)}
    return SimpleNamespace(get_mask_details=lambda: details, **attributes)


def groups_of(config: object, **changes: Any) -> list[CacheGroupSpec]:
    return create_kv_cache_specs_from_config(config, **{**GEOMETRY, **changes})


class TestModelConfig:
    @pytest.mark.parametrize("config", [object(), SimpleNamespace(get_mask_details=dict), config_of()])
    def test_without_details_all_is_full_attention(self, config: object) -> None:
        assert groups_of(config) == [CacheGroupSpec(full())]

    @pytest.mark.parametrize("masks", [MaskName, NumberedMask])
    def test_one_group_a_kind(self, masks: Any) -> None:
        groups = groups_of(config_of(masks.SLIDING, masks.FULL, masks.SLIDING, masks.CHUNK))
        assert [group.kv_cache_spec for group in groups] == [sliding(128), full(), chunked(64)]
        assert [group.layer_names for group in groups] == [["layer.0", "layer.2"], ["layer.1"], ["layer.3"]]

    def test_pages_of_equal_bytes(self) -> None:
        """A token of the others has two thirds, and a third, of the bytes."""
        config = config_of("SLIDING", "FULL", "CHUNK", num_kv_heads=[6, 4, 2])
        sizes = [(group.kv_cache_spec.page_size, group.kv_cache_spec) for group in groups_of(config, equal_bytes=True)]
        size, page_bytes = GEOMETRY["page_size"], full(num_kv_heads=6).page_size_bytes
        assert [size for size, _ in sizes] == [size, size, 3 * size]
        assert [spec.page_size_bytes for _, spec in sizes] == [page_bytes, page_bytes * 2 // 3, page_bytes]
        assert [group.kv_cache_spec.page_size for group in groups_of(config)] == [size] * 3
        assert groups_of(object(), equal_bytes=True) == [CacheGroupSpec(full())]
        with pytest.raises(ArgumentTypeError, match="equal_bytes"):
            groups_of(config, equal_bytes=np.zeros(2))

    def test_masks_by_string(self) -> None:
        assert groups_of(config_of("ATTN_MASK_CHUNK")) == groups_of(config_of("CHUNK"))

    def test_details_without_chunks(self) -> None:
        detail = SimpleNamespace(mask_type="ATTN_MASK_FULL", size=None)
        groups = groups_of(SimpleNamespace(get_mask_details=lambda: {3: detail}))
        assert groups == [CacheGroupSpec(full(), ["layer.3"])]

    def test_window_layers_have_no_latent_vectors(self) -> None:
        groups = groups_of(config_of("ATTN_MASK_FULL", "ATTN_MASK_SLIDING"), use_mla=True)
        assert [group.kv_cache_spec for group in groups] == [full(use_mla=True), sliding(128)]

    def test_heads_by_layer(self) -> None:
        masks = [MaskName.FULL] * 3
        groups = groups_of(config_of(*masks, num_key_value_heads=[2, 4]))
        assert [group.kv_cache_spec.num_kv_heads for group in groups] == [2, 4, 8]
        [group] = groups_of(config_of(*masks, num_kv_heads=0, num_key_value_heads="x"))
        assert group.kv_cache_spec == full()

    def test_full_attention_layers_with_their_own_geometry(self) -> None:
        config = config_of(
            MaskName.FULL,
            MaskName.SLIDING,
            MaskName.FULL,
            num_key_value_heads=4,
            layer_types=["full_attention", "sliding_attention"],
            global_head_dim=256,
            attention_k_eq_v=True,
            num_global_key_value_heads=2,
        )
        assert [group.kv_cache_spec for group in groups_of(config)] == [
            full(num_kv_heads=2, head_size=256),
            sliding(128, num_kv_heads=4),
            full(num_kv_heads=4),
        ]
        config.attention_k_eq_v = False
        assert groups_of(config)[0].kv_cache_spec == full(num_kv_heads=4, head_size=256)


@pytest.fixture(scope="module")
def engine() -> Any:
    from easydel.inference.esurge.core import interface

    return interface


def engine_twin(engine: Any, spec: CacheSpec) -> Any:
    """Return the engine's spec with the same values. It keeps no states."""
    values = {name: value for name, value in vars(spec).items() if not name.startswith("checkpoint")}
    return getattr(engine, type(spec).__name__)(**values)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not HAS_ENGINE, reason="the engine is not installed")
class TestEqualToTheEngine:
    def all_specs(self) -> list[CacheSpec]:
        import jax.numpy as jnp

        return [
            spec
            for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16", np.float32, jnp.float8_e4m3fn, jnp.int8)
            for spec in (
                full(dtype=dtype),
                full(dtype=dtype, use_mla=True, page_size=128),
                full(dtype=dtype, sliding_window=64),
                sliding(100, dtype=dtype),
                chunked(96, dtype=dtype, num_kv_heads=3),
                mamba(dtype=dtype),
                mamba(dtype=dtype, page_size_padded=8192),
            )
        ]

    def test_identities_and_sizes(self, engine: Any) -> None:
        limits = {"max_model_len": 1000, "max_num_batched_tokens": 48}
        for spec in self.all_specs():
            twin = engine_twin(engine, spec)
            assert spec.type_id == twin.type_id
            assert spec.page_size_bytes == twin.page_size_bytes
            assert spec.max_memory_usage_bytes(**limits) == twin.max_memory_usage_bytes(**limits)

    def test_merging(self, engine: Any) -> None:
        for group in ([full(), full(sliding_window=8)], [full(attention_chunk_size=4)] * 2, [sliding()] * 2):
            twins = [engine_twin(engine, spec) for spec in group]
            assert vars(type(group[0]).merge(group)) == vars(type(twins[0]).merge(twins))

    def test_budgets(self, engine: Any) -> None:
        group_specs = [full(), sliding(100), chunked(96), mamba()]
        for num_pages in (1, 2, 63, 64, 1000, 4096):
            for shards in (1, 2, 3, 8):
                options = {"max_model_len": 777, "max_num_batched_tokens": 64, "data_parallel_size": shards}
                for count in range(len(group_specs) + 1):
                    ours = [CacheGroupSpec(spec) for spec in group_specs[:count]]
                    theirs = [engine.CacheGroupSpec(engine_twin(engine, spec)) for spec in group_specs[:count]]
                    assert vars(estimate_runtime_page_budget(num_pages=num_pages, kv_cache_groups=ours, **options)) == vars(
                        engine.estimate_runtime_page_budget(num_pages=num_pages, kv_cache_groups=theirs, **options)
                    )

    def test_groups_of_a_config(self, engine: Any) -> None:
        from easydel.infra.utils import AttnMaskType

        kinds = (AttnMaskType.SLIDING, AttnMaskType.FULL, AttnMaskType.SLIDING, AttnMaskType.CHUNK)
        configs = [
            object(),
            config_of(*kinds),
            config_of(*kinds, num_key_value_heads=[1, 2, 1], layer_types=["full_attention"] * 4),
            config_of(
                *kinds,
                layer_types=("sliding_attention", "Full_Attention"),
                global_head_dim=512,
                attention_k_eq_v=True,
                num_global_key_value_heads=1,
            ),
        ]
        for config in configs:
            for use_mla in (False, True):
                ours = groups_of(config, use_mla=use_mla)
                theirs = engine.create_kv_cache_specs_from_config(config, **GEOMETRY, use_mla=use_mla)
                assert len(ours) == len(theirs)
                for our, their in zip(ours, theirs, strict=True):
                    assert our.layer_names == their.layer_names
                    assert type(our.kv_cache_spec).__name__ == type(their.kv_cache_spec).__name__
                    assert vars(our.kv_cache_spec) == vars(their.kv_cache_spec)


def test_a_groups_config_holds_what_it_was_given() -> None:
    groups = [CacheGroupSpec(full(), ["layer.0"])]
    config = CacheGroupsConfig(64, groups)
    assert config.num_pages == 64
    assert config.kv_cache_groups is groups

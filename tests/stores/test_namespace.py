"""`make_namespace`: everything that decides what the bytes of a page mean has a name of its own."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import pytest
from lying_store import LyingStore
from managing import grouped

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    ReferenceWindowSpec,
    RingSpec,
    SlidingWindowSpec,
    specs,
)
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.stores import StoreTier, make_namespace
from pagepool.stores.namespace import describe

FULL = FullAttentionSpec(4, num_kv_heads=8, head_size=16, dtype="float8_e4m3fn", use_mla=False)
SPECS = (
    FULL,
    ChunkedLocalAttentionSpec(4, 8, 16, "float16", use_mla=False, attention_chunk_size=16),
    SlidingWindowSpec(4, 8, 16, "float16", use_mla=False, sliding_window=9),
    MambaSpec(4, shapes=((4, 2), (3,)), dtype="float32", checkpoint_interval=8),
    CrossAttentionSpec(4, 8, 16, "float16", use_mla=False, max_num_encoder_tokens=30),
    ReferenceWindowSpec(4, 8, 16, "float16", use_mla=False, sliding_window=9),
    RingSpec(4, period=2, shape=(4, 2), dtype="float16"),
)
CHANGES: dict[str, tuple[Any, ...]] = {
    "page_size": (8,),
    "num_kv_heads": (4,),
    "head_size": (8,),
    "dtype": ("float8_e5m2", "int8", "uint8", np.dtype(">f2"), np.dtype(">f4")),
    "use_mla": (True,),
    "sliding_window": (8,),
    "attention_chunk_size": (8,),
    "period": (1,),
    "shape": ((2, 4), (8,)),
    "shapes": (((2, 4), (3,)), ((4, 2, 3),), ((4, 2),), ((3,), (4, 2)), ((11,),)),
    "page_size_padded": (44, 64),
    "checkpoint_interval": (16,),
    "checkpoints": ("ends",),
    "num_sink_tokens": (8,),
    "max_num_encoder_tokens": (8,),
}


def make_manager(*groups: CacheGroupSpec, **options: Any) -> CacheManager:
    num_pages: Any = {group.pool: 16 for group in groups}
    return CacheManager(num_pages, list(groups), 64, **grouped(**{"hash_algo": "sha256", **options}))


def name_of(*kv_cache_specs: Any, **options: Any) -> str:
    groups = [spec if isinstance(spec, CacheGroupSpec) else CacheGroupSpec(spec) for spec in kv_cache_specs]
    return make_namespace(make_manager(*groups, **options), "layout", b"weights")


def list_changes(spec: Any) -> Iterator[Any]:
    """Yield specs that differ from this one in one field. A field without a change here is a KeyError."""
    for each in fields(spec):
        changes = CHANGES[each.name]
        assert any(getattr(spec, each.name) != value for value in changes)
        for value in changes:
            if (each.name, type(spec)) != ("use_mla", SlidingWindowSpec):  # which is refused
                yield replace(spec, **{each.name: value})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_each_field_of_each_spec_is_in_the_name(spec: Any) -> None:
    """Beside another group too, at its place and behind it."""
    changed = [spec, *list_changes(spec)]
    if not isinstance(spec, CrossAttentionSpec):  # which stands behind all others
        assert len({name_of(each, FULL) for each in changed}) == len(changed)
    assert len({name_of(FULL, each) for each in changed}) == len(changed)
    assert name_of(FULL, spec) == name_of(FULL, replace(spec))


def test_all_kinds_of_specs_are_tested() -> None:
    kinds = [value for value in vars(specs).values() if isinstance(value, type) and issubclass(value, specs.CacheSpec)]
    assert {type(spec) for spec in SPECS} == {kind for kind in kinds if "type_id" in vars(kind)} - {specs.CacheSpec}


def test_each_field_of_a_group_is_in_the_name() -> None:
    groups = [
        CacheGroupSpec(FULL),
        CacheGroupSpec(FULL, ["a"]),
        CacheGroupSpec(FULL, ["b"]),
        CacheGroupSpec(FULL, ["a", "b"]),
        CacheGroupSpec(FULL, ["b", "a"]),
        CacheGroupSpec(FULL, pool="other"),
    ]
    assert {each.name for each in fields(CacheGroupSpec)} == {"kv_cache_spec", "layer_names", "pool"}
    assert len({name_of(group) for group in groups}) == len(groups)
    names = {
        name_of(FULL),
        name_of(FULL, FULL),
        name_of(FULL, SPECS[2]),
        name_of(SPECS[2], FULL),
        name_of(CacheGroupSpec(FULL, pool="a"), CacheGroupSpec(FULL, pool="b")),
    }
    assert len(names) == 5


class Quantization(Enum):
    NONE, BLOCKS = 0, 1


@dataclass(frozen=True)
class QuantizedSpec(FullAttentionSpec):
    """A spec with fields of its own, one of which equality leaves out."""

    scale: Any = field(default=None, compare=False)
    extra: Any = ()


def test_a_new_field_of_a_spec_is_in_the_name_by_itself() -> None:
    values: list[Any] = [
        None,
        True,
        1,
        2,
        1.0,
        float("nan"),
        "1",
        b"1",
        10**6000,
        10**6000 + 1,
        Quantization.NONE,
        Quantization.BLOCKS,
        "Quantization.NONE",
        np.dtype("int8"),
        np.float16,
        np.dtype(">f2"),
        np.arange(3),
        np.arange(3).astype(np.int8),
        np.arange(2000),
        np.delete(np.arange(2001), 1000),
        (1, 2),
        (2, 1),
        ((1,), 2),
        {"a": 1},
        {"a": 2},
        {"b": 1},
        {1, 2},
        frozenset((1, 3)),
        Quantization,
        CacheGroupSpec,
        FULL,
        replace(FULL, head_size=32),
        [FULL],
    ]
    for name in ("scale", "extra"):
        texts = [repr(name_of(QuantizedSpec(4, 8, 16, "int8", False, **{name: value}))) for value in values]
        assert len({*texts, name_of(FULL), name_of(QuantizedSpec(4, 8, 16, "int8", False))}) >= len(values) + 1
        assert len({*texts}) == len(values)


def test_a_spec_of_an_engine_needs_no_dataclass() -> None:
    class FullAttentionSpec:
        __slots__ = ("__dict__", "dtype")
        page_size, num_kv_heads, head_size, use_mla = 4, 8, 16, False
        page_size_bytes = 1024

        def __init__(self, dtype: Any, **more: Any) -> None:
            self.dtype = dtype
            vars(self).update(more)

        @cached_property
        def computed(self) -> int:
            return 5

    names = {name_of(FullAttentionSpec("int8")), name_of(FullAttentionSpec("uint8")), name_of(FullAttentionSpec("int8", k=1))}
    assert len(names) == 3
    spec = FullAttentionSpec("int8")
    assert spec.computed == 5
    assert name_of(spec) in names


def test_equal_fields_have_equal_names() -> None:
    for dtype in (np.float16, np.dtype("float16"), np.dtype("f2")):
        assert name_of(replace(FULL, dtype=dtype)) == name_of(replace(FULL, dtype="float16"))
    with_ints = QuantizedSpec(np.int64(4), np.int32(8), 16, "int8", np.bool_(False), extra=(np.int8(1), np.float64(2)))  # type: ignore[arg-type]
    assert name_of(with_ints) == name_of(QuantizedSpec(4, 8, 16, "int8", False, extra=[1, 2.0]))
    pair = namedtuple("pair", "a b")(1, 2)
    assert describe("x", {"a": {2, 1}, "b": pair}) == describe("x", {"b": (1, 2), "a": frozenset((1, 2))})


class TorchDtype:
    """What `torch.bfloat16` is, as far as it is looked at."""

    def __str__(self) -> str:
        return "torch.bfloat16"


TorchDtype.__module__, TorchDtype.__name__ = "torch", "dtype"


def test_equal_dtypes_have_equal_names() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for dtype in ("bf16", "BF16", "torch.bfloat16", TorchDtype(), jnp.bfloat16, jnp.dtype("bfloat16")):
        assert name_of(replace(FULL, dtype=dtype)) == name_of(replace(FULL, dtype="bfloat16"))
    for dtype in ("half", "fp16", "<f2", np.dtype("<f2"), jnp.float16):
        assert name_of(replace(FULL, dtype=dtype)) == name_of(replace(FULL, dtype="float16"))
    others = ("fp8", "fp8_e4m3", "float8_e4m3", "fp8_e4m3fn", "fp8_e5m2", ">f2", "<f2", "float", "double", "bf16", "int8")
    assert len({name_of(replace(FULL, dtype=dtype)) for dtype in others}) == len(others)
    specs = [QuantizedSpec(4, 8, 16, "int8", False, extra=extra) for extra in ("bf16", "bfloat16")]
    assert name_of(specs[0]) != name_of(specs[1])  # any text, in a field of another kind


@pytest.mark.parametrize("value", [object(), len, lambda: 1, sys, iter(()), 1j, [[object()]], {"a": print}])
def test_fields_without_a_value_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^kv_cache_groups\[1\]\.kv_cache_spec\.extra\S*: got \w+, allowed: numbers"):
        name_of(FULL, QuantizedSpec(4, 8, 16, "int8", False, extra=value))


def test_fields_that_contain_themselves_are_refused() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(ArgumentTypeError, match=r"extra\[0\]\[0\].*: got more than 32 objects, one inside the other"):
        name_of(QuantizedSpec(4, 8, 16, "int8", False, extra=around))


@pytest.mark.parametrize(
    ("options", "environment", "warning"),
    [
        ({"hash_algo": "sha256"}, None, None),
        ({"hash_algo": "sha256"}, "5", None),
        ({"hash_algo": "sha256", "hash_seed": 1}, "5", None),
        ({"hash_algo": "sha256_cbor"}, None, None),
        ({"hash_algo": "sha256_cbor"}, "5", "PYTHONHASHSEED, which other processes may lack"),
        ({"hash_algo": "sha256_cbor"}, "random", "PYTHONHASHSEED, which other processes may lack"),
        ({"hash_algo": "sha256_cbor"}, "", "PYTHONHASHSEED, which other processes may lack"),
        ({"hash_algo": "sha256_cbor", "hash_seed": "secret"}, "5", None),
        ({"hash_algo": "siphash128"}, "5", "PYTHONHASHSEED, which other processes may lack"),
        ({"hash_algo": "siphash128", "hash_seed": 0}, "5", None),
        ({"hash_algo": hash}, "5", "PYTHONHASHSEED, which other processes may lack"),
        ({"hash_algo": "siphash128"}, None, "none, so keys are secret to the process"),
        ({"hash_algo": "siphash128"}, "random", "none, so keys are secret to the process"),
        ({"hash_algo": hash}, None, "none, so keys are secret to the process"),
    ],
)
def test_a_seed_that_others_may_not_have_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    environment: str | None,
    warning: str | None,
) -> None:
    """By the first that sees the manager: the function that names its pages, or what is put behind its tier."""
    pytest.importorskip("cbor2")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if environment is not None:
        monkeypatch.setenv("PYTHONHASHSEED", environment)
    for is_named in (True, False):
        manager = make_manager(CacheGroupSpec(FULL), host_tier=HostTier(8), **options)
        caplog.clear()
        for _ in range(2):
            if warning is not None and warning.startswith("none"):
                with pytest.raises(ArgumentError, match="secret to the process"):
                    make_namespace(manager, "layout", b"weights")
            elif is_named:
                make_namespace(manager, "layout", b"weights")
        StoreTier(manager, LyingStore({}, Random(0)), [np.zeros((8, 16), dtype=np.uint8)], "namespace").close()
        expected = f"hash_seed: got {warning}, allowed for pages that processes share: the same hash_seed in all of them"
        assert [record.getMessage() for record in caplog.records] == ([] if warning is None else [expected])


CODE = """
from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageHashing
from pagepool.stores import make_namespace
group = CacheGroupSpec(FullAttentionSpec(4, 8, 16, "float16", False), ["a", "b"])
for options in ({}, {"hash_seed": "secret"}, {"hash_algo": "sha256"}):
    hashing = PageHashing(**{"hash_algo": "sha256_cbor"} | options)
    print(make_namespace(CacheManager(16, [group], 64, hashing=hashing), "layout", b"weights"))
"""


def test_which_names_are_the_same_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documents say: without a seed `sha256_cbor` has that of the environment, and vLLM's public one without any."""
    pytest.importorskip("cbor2")
    names: list[list[str]] = []
    for environment in (None, "1", "2"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if environment is not None:
            monkeypatch.setenv("PYTHONHASHSEED", environment)
        names.append(subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.split())
    assert [len({*each}) for each in zip(*names, strict=True)] == [3, 1, 1]
    assert names[0][2] == name_of(CacheGroupSpec(replace(FULL, dtype="float16"), ["a", "b"]))


def test_the_order_of_bytes_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_of(FULL)
    monkeypatch.setattr(sys, "byteorder", "middle")
    assert name_of(FULL) != name

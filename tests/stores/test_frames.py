"""The header of stored pages."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.stores.frames import HEADER_BYTES, is_intact, write_header

xxhash = pytest.importorskip("xxhash")


def make_object(num_bytes: int, namespace: str = "model/v1", key: bytes = b"\1\2") -> bytearray:
    stored = bytearray(HEADER_BYTES) + bytearray(random.Random(num_bytes).randbytes(num_bytes))
    write_header(stored, namespace, key, memoryview(stored)[HEADER_BYTES:])
    return stored


def test_the_format_is_the_documented_one() -> None:
    stored = make_object(1000)
    assert stored[:8] == b"pagepool"
    assert int.from_bytes(stored[8:12], "little") == 2
    assert stored[12:24] == hashlib.sha256(b"model/v1").digest()[:12]
    assert stored[24:48] == hashlib.sha256(b"\1\2").digest()[:24]
    assert int.from_bytes(stored[48:56], "little") == 1000
    seeds = [int.from_bytes(hashlib.sha256(text).digest()[24:], "little") for text in (b"model/v1", b"\1\2")]
    assert int.from_bytes(stored[56:64], "little") == xxhash.xxh3_64_intdigest(bytes(stored[64:]), seeds[0] ^ seeds[1])


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 5000])
def test_every_changed_bit_and_every_other_length_is_found(num_bytes: int) -> None:
    stored = make_object(num_bytes)
    assert is_intact(stored, "model/v1", b"\1\2")
    for place in range(min(len(stored), 200)):
        for bit in range(8):
            stored[place] ^= 1 << bit
            assert not is_intact(stored, "model/v1", b"\1\2"), (place, bit)
            stored[place] ^= 1 << bit
    assert is_intact(stored, "model/v1", b"\1\2")
    assert not is_intact(stored + b"\0", "model/v1", b"\1\2")
    for stop in {*range(min(len(stored), 70)), len(stored) - 1}:
        assert not is_intact(stored[:stop], "model/v1", b"\1\2")


def test_another_namespace_or_key_is_not_intact() -> None:
    stored = make_object(100)
    assert not is_intact(stored, "model/v2", b"\1\2")
    assert not is_intact(stored, "model/v1", b"\1\3")
    assert not is_intact(bytes(len(stored)), "model/v1", b"\1\2")


def test_any_contiguous_buffer_does() -> None:
    row = np.arange(64, dtype=np.float32).reshape(8, 8)
    page = np.zeros(HEADER_BYTES + row.nbytes, np.uint8)
    page[HEADER_BYTES:] = row.view(np.uint8).ravel()
    write_header(page[:HEADER_BYTES], "n", b"k", row)
    assert is_intact(page, "n", b"k")
    assert is_intact(memoryview(page).toreadonly(), "n", b"k")


def test_other_arguments_are_refused() -> None:
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ArgumentError, "buffer: got 63 bytes, allowed: at least 64", (bytearray(63), "n", b"k", b"row")),
        (ArgumentTypeError, "buffer: got read-only memory", (bytes(64), "n", b"k", b"row")),
        (ArgumentTypeError, "row: got str", (bytearray(64), "n", b"k", "row")),
        (ArgumentTypeError, "key: got str", (bytearray(64), "n", "k", b"row")),
        (ArgumentTypeError, "namespace: got bytes", (bytearray(64), b"n", b"k", b"row")),
        (ArgumentError, r"namespace: got '\\ud800', allowed: valid Unicode", (bytearray(64), "\ud800", b"k", b"row")),
    ]
    for error, message, arguments in wrong:
        with pytest.raises(error, match=message):
            write_header(*arguments)
    with pytest.raises(ArgumentTypeError, match="stored: got ndarray"):
        is_intact(np.zeros((8, 8))[:, :4], "n", b"k")


def test_without_xxhash_the_error_names_the_extra() -> None:
    code = """if True:
        import sys
        sys.modules["xxhash"] = None
        import pagepool.stores
        from pagepool.stores import frames
        try:
            frames.is_intact(b"pagepool" + bytes(60), "n", b"k")
        except ImportError as error:
            print(error)
    """
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "checksums of stored pages need xxhash: pip install 'pagepool[store]'\n"

"""The format of a saved pool: names and types of its arrays, hash names and configuration as text, and a checksum.

A snapshot is a dict of NumPy arrays without Python objects, as `numpy.savez` writes and `numpy.load` reads them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool._core import PageStore, load_store
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, SnapshotError
from pagepool.hashing import PageHash
from pagepool.page_pool.integrity import check_store, save_store

__all__ = ["Configuration", "Snapshot", "load", "save", "seal"]

Snapshot = dict[str, npt.NDArray[Any]]

Configuration = dict[str, int | str | None]
"""The settings, by name, that must agree for two managers to share cached pages."""

FORMAT = b"pagepool.PagePool"
VERSION = 4

FIELDS: dict[str, tuple[type[np.generic], tuple[int | None, ...]]] = {
    "format": (np.uint8, (None,)),
    "version": (np.int64, (1,)),
    "enable_caching": (np.bool_, (1,)),
    "ref_counts": (np.int32, (None,)),
    "free_page_ids": (np.int32, (None,)),
    "cached_page_ids": (np.int32, (None,)),
    "cached_group_ids": (np.int32, (None,)),
    "cached_keys": (np.uint64, (None, 2)),
    "cached_pins": (np.int32, (None,)),
    "cached_token_ids": (np.int32, (None, None)),
    "names": (np.uint8, (None,)),
    "counters": (np.int64, (6,)),
    "num_shards": (np.int64, (1,)),
    "configuration": (np.uint8, (None,)),
    "eviction": (np.uint8, (None,)),
    "policy_marks": (np.uint32, (None,)),
    "policy_ghosts": (np.uint32, (None, 2)),
    "policy_counts": (np.int64, (None,)),
    "policy_learned": (np.uint8, (None,)),
    "checksum": (np.uint8, (32,)),
}
"""Type and shape of each array. None is any length."""


def save(store: PageStore, configuration: Configuration | None) -> Snapshot:
    """Return the snapshot of a pool. O(pages)."""
    arrays = save_store(store)
    arrays["enable_caching"] = np.array([store.enable_caching])
    arrays["names"] = _encode([[key, *map(_to_json, page_hash)] for key, page_hash in store.names.items()])
    arrays["configuration"] = _encode(configuration)
    arrays["eviction"] = _as_bytes(store.eviction.encode())
    return seal(arrays)


def load(snapshot: Mapping[str, Any]) -> tuple[PageStore, Configuration | None]:
    """Return the pool of a snapshot, and its configuration. SnapshotError if the snapshot is damaged. O(pages)."""
    arrays = unseal(snapshot)
    del arrays["format"], arrays["version"]
    names, counters = arrays.pop("names"), arrays.pop("counters").tolist()
    configuration = decode_configuration(arrays.pop("configuration"))
    eviction = arrays.pop("eviction").tobytes().decode(errors="replace")
    policy = tuple(arrays.pop(f"policy_{name}") for name in ("marks", "ghosts", "counts", "learned"))
    if min(counters) < 0:
        raise SnapshotError(f"counters: got {counters}, allowed: at least 0")
    enable_caching, num_shards = bool(arrays.pop("enable_caching")[0]), int(arrays.pop("num_shards")[0])
    try:
        cached = tuple(arrays.pop(f"cached_{name}") for name in ("page_ids", "group_ids", "keys", "token_ids", "pins"))
        store = load_store((enable_caching, eviction), **arrays, cached=cached, policy=policy, totals=(counters, num_shards))
        check_store(store)
    except (ArgumentError, IntegrityError) as error:
        raise SnapshotError(f"snapshot: {error}") from None
    for key, page_hash in decode_names(names):
        store.names.add(key, page_hash)
    return store, configuration


def seal(arrays: Snapshot) -> Snapshot:
    """Return the arrays of a pool with format, version and checksum. O(bytes)."""
    snapshot: Snapshot = {"format": _as_bytes(FORMAT), "version": np.array([VERSION], dtype=np.int64), **arrays}
    return {**snapshot, "checksum": _as_bytes(_checksum(snapshot))}


def unseal(snapshot: Mapping[str, Any]) -> Snapshot:
    """Return the arrays of a snapshot after checks of format, version, types, shapes and checksum. O(bytes).

    ArgumentTypeError unless it is a mapping, SnapshotError if `seal` did not make it or it has changed.
    """
    if not isinstance(snapshot, Mapping):
        raise ArgumentTypeError(
            f"snapshot: got {type(snapshot).__name__}, allowed: a dict of arrays, or what numpy.load returns"
        )
    found_format = _read(snapshot, "format").tobytes()
    if found_format != FORMAT:
        raise SnapshotError(f"snapshot: format is {found_format!r}, allowed: {FORMAT!r}")
    version = int(_read(snapshot, "version")[0])
    if version != VERSION:
        raise SnapshotError(f"snapshot: version is {version}, allowed: {VERSION}")
    arrays = {name: _read(snapshot, name) for name in FIELDS}
    if arrays.pop("checksum").tobytes() != _checksum(arrays):
        raise SnapshotError("snapshot: the checksum does not match the arrays; one of them was changed")
    return arrays


def _read(snapshot: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
    """Return one array after checks of type and shape."""
    try:
        array = snapshot[name]
    except KeyError:
        raise SnapshotError(f"snapshot: has no {name!r}") from None
    except Exception as error:  # a file is read only here, and may be damaged in many ways
        raise SnapshotError(f"snapshot: {name!r} cannot be read: {error}") from error
    dtype, shape = FIELDS[name]
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise SnapshotError(f"snapshot: {name!r} is of {got}, allowed: an array of {np.dtype(dtype)}")
    if len(array.shape) != len(shape) or any(n not in (None, got) for n, got in zip(shape, array.shape, strict=True)):
        allowed = str(shape).replace("None", "any")
        raise SnapshotError(f"snapshot: {name!r} has the shape {array.shape}, allowed: {allowed}")
    return np.ascontiguousarray(array)


def _checksum(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return SHA-256 of names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} ".encode())
        digest.update(arrays[name].data if arrays[name].size else b"")
    return digest.digest()


def _as_bytes(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8).copy()


def _encode(value: Any) -> npt.NDArray[np.uint8]:
    return _as_bytes(json.dumps(value).encode())


def _to_json(value: Any) -> Any:
    """Return tuples as lists, and bytes as an object. ArgumentError for other types than a page hash may have in a snapshot."""
    if type(value) is tuple:
        return [_to_json(item) for item in value]
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, np.integer):
        return int(value)
    if value is None or type(value) in (int, bool, str):
        return value
    raise ArgumentError(
        f"page hash: got {type(value).__name__} in one, allowed in a snapshot: ints, strings, bytes, None and tuples"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple([_from_json(item) for item in value])
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def decode_names(text: npt.NDArray[np.uint8]) -> Iterator[tuple[int, PageHash]]:
    """Yield keys and their names from JSON. SnapshotError for other text."""
    try:
        for key, hash_value, token_ids, extra_keys in _from_json(json.loads(text.tobytes())):
            if not (isinstance(key, int) and isinstance(hash_value, int) and isinstance(token_ids, tuple)):
                raise ValueError(f"got key {key!r}, hash {hash_value!r} and token ids {token_ids!r}")
            yield key, PageHash(hash_value, token_ids, extra_keys)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SnapshotError(f"snapshot: 'names' are not page hashes: {error}") from None


def decode_configuration(text: npt.NDArray[np.uint8]) -> Configuration | None:
    """Return a configuration from JSON; null means unknown. SnapshotError for other text."""
    try:
        configuration = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"snapshot: 'configuration' is invalid: {error}") from None
    if configuration is None:
        return None
    if not isinstance(configuration, dict) or {type(value) for value in configuration.values()} - {int, str, type(None)}:
        raise SnapshotError("snapshot: 'configuration' is invalid, allowed: an object of ints, strings and nulls, or null")
    return configuration

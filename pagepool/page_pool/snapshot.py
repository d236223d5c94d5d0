"""The format of a saved pool: names and types of its arrays, hash names and configuration as text, and a checksum.

A snapshot is a dict of NumPy arrays without Python objects, for `numpy.savez` and `numpy.load`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pagepool._core import COUNTERS, PageStore, load_store
from pagepool.errors import ArgumentError, ArgumentTypeError, DoubleFreeError, IntegrityError, SnapshotError
from pagepool.hashing import PageHash
from pagepool.page_pool.integrity import GROUP, KEPT, PART, Records, check_store

__all__ = ["Configuration", "Snapshot", "load", "save", "seal"]

Snapshot = dict[str, npt.NDArray[Any]]

Configuration = dict[str, int | str | None]
"""Settings by name. Managers that share cached pages must agree in all of them."""

FORMAT = b"pagepool.PagePool"
VERSION = 8


def _count_parts(records: Records) -> Any:
    """Return the counts of the eviction policy, with parts counted as if no page were expected back."""
    if len(records.marks):
        ids = records.free_ids[records.free_ids < len(records.marks)]
        records.policy_counts[: PART + 1] = np.bincount(records.marks.take(ids) & PART, minlength=PART + 1)
    return records.policy_counts


def _list_free_ids(records: Records) -> Any:
    """Return the free queue as if all pages were of one tenant: each part in the order of release."""
    if not len(records.tenants):
        return records.free_ids
    idle = np.uint32(records.now % (1 << 32)) - records.stamps.take(records.free_ids)
    return records.free_ids[np.lexsort((-idle.astype(np.int64), records.find_parts() % records.num_parts_each))]


def _list_uppers(records: Records) -> Any:
    """Return the upper halves of cached digests; none if the digests are keys."""
    uppers = records.uppers.reshape(-1, 2)
    return uppers.take(records.cached_ids, axis=0) if len(uppers) else uppers


FIELDS: dict[str, tuple[type[np.generic], tuple[int | None, ...], Callable[[Records], Any] | None]] = {
    "format": (np.uint8, (None,), None),
    "version": (np.int64, (1,), None),
    "enable_caching": (np.bool_, (1,), lambda records: [records.store.enable_caching]),
    "pool_names": (np.uint8, (None,), lambda records: _encode(records.store.bank_names)),
    "pool_sizes": (np.int64, (None,), lambda records: [stop - start + 1 for start, stop, *_ in records.banks]),
    "pool_counters": (np.int64, (None, 5), lambda records: [bank[-5:] for bank in records.banks]),
    "ref_counts": (np.int32, (None,), lambda records: records.pages["ref_cnt"]),
    "free_page_ids": (np.int32, (None,), _list_free_ids),
    "cached_page_ids": (np.int32, (None,), lambda records: records.cached_ids),
    "cached_group_ids": (np.int32, (None,), lambda records: records.cached["group"] & GROUP),
    "cached_keys": (
        np.uint64,
        (None, 2),
        lambda records: np.column_stack([records.cached[half] for half in ("key_lo", "key_hi")]),
    ),
    "cached_uppers": (np.uint64, (None, 2), _list_uppers),
    "cached_kept": (np.uint8, (None,), lambda records: records.cached["group"] & KEPT != 0),
    "cached_token_ids": (np.int32, (None, None), lambda records: records.page_tokens.take(records.cached_ids, axis=0)),
    "names": (np.uint8, (None,), None),
    "counters": (np.int64, (len(COUNTERS),), lambda records: [*records.counters.values()]),
    "num_shards": (np.int64, (1,), lambda records: [records.num_shards]),
    "configuration": (np.uint8, (None,), None),
    "eviction": (np.uint8, (None,), lambda records: _as_bytes(records.store.eviction.encode())),
    "policy_marks": (np.uint32, (None,), lambda records: records.marks),
    "policy_ghosts": (np.uint32, (None, 2), lambda records: records.ghosts.view(np.uint32).reshape(-1, 2)),
    "policy_counts": (np.int64, (None,), _count_parts),
    "policy_learned": (np.uint8, (None,), lambda records: records.learned.view(np.uint8)),
    "checksum": (np.uint8, (32,), None),
}
"""Type and shape of each array, None for any length, and a function for values that come from checked records alone."""


def save(store: PageStore, configuration: Configuration | None) -> Snapshot:
    """Return the snapshot of a store, with all of its pools. Raise IntegrityError for a damaged one. O(num_pages)."""
    records = Records(store)
    arrays = {name: np.array(read(records), dtype) for name, (dtype, _, read) in FIELDS.items() if read is not None}
    names = [_to_json((key, *name)) for key, name in store.names.items()]
    return seal(arrays | {"names": _encode(names), "configuration": _encode(configuration)})


def load(snapshot: Mapping[str, Any]) -> tuple[PageStore, Configuration | None]:
    """Return the store of a snapshot, and its configuration. Raise SnapshotError if the snapshot is damaged. O(num_pages)."""
    arrays = unseal(snapshot)
    names, configuration = decode_names(arrays["names"]), decode_configuration(arrays["configuration"])
    try:
        store = load_store(
            (bool(arrays["enable_caching"][0]), arrays["eviction"].tobytes().decode(errors="replace")),
            (decode_pool_names(arrays["pool_names"]), arrays["pool_sizes"].tolist(), arrays["pool_counters"]),
            arrays["ref_counts"],
            arrays["free_page_ids"],
            tuple(arrays[f"cached_{name}"] for name in ("page_ids", "group_ids", "keys", "uppers", "token_ids", "kept")),
            tuple(arrays[f"policy_{name}"] for name in ("marks", "ghosts", "counts", "learned")),
            (arrays["counters"].tolist(), int(arrays["num_shards"][0])),
        )
        check_store(store)
    except (ArgumentError, DoubleFreeError, IntegrityError) as error:
        raise SnapshotError(f"snapshot: {error}") from None
    for key, page_hash in names:
        store.names.add(key, page_hash)
    return store, configuration


def seal(arrays: Snapshot) -> Snapshot:
    """Add format, version and checksum to the arrays of a pool. O(bytes)."""
    snapshot: Snapshot = {"format": _as_bytes(FORMAT), "version": np.array([VERSION], dtype=np.int64)}
    snapshot |= arrays
    return snapshot | {"checksum": _as_bytes(_checksum(snapshot))}


def unseal(snapshot: Mapping[str, Any]) -> Snapshot:
    """Return the arrays of a snapshot after checks of format, version, types, shapes and checksum. O(bytes). ArgumentTypeError
    unless it is a mapping, SnapshotError if `seal` did not make it or it has changed.
    """
    if not isinstance(snapshot, Mapping):
        raise ArgumentTypeError(f"snapshot: got {type(snapshot).__name__}, allowed: a dict of arrays, or a file of numpy.load")
    found_format = _read(snapshot, "format").tobytes()
    if found_format != FORMAT:
        raise SnapshotError(f"snapshot: got the format {found_format!r}, allowed: {FORMAT!r}")
    version = int(_read(snapshot, "version")[0])
    if version != VERSION:
        raise SnapshotError(f"snapshot: got version {version}, allowed: {VERSION}")
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
    except Exception as error:  # reads the file, which may be damaged in many ways
        raise SnapshotError(f"snapshot: {name!r} cannot be read: {error}") from error
    dtype, shape, _ = FIELDS[name]
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise SnapshotError(f"snapshot: got {name!r} of {got}, allowed: an array of {np.dtype(dtype)}")
    if len(array.shape) != len(shape) or any(n not in (None, got) for n, got in zip(shape, array.shape, strict=True)):
        allowed = str(shape).replace("None", "any")
        raise SnapshotError(f"snapshot: got {name!r} of shape {array.shape}, allowed: {allowed}")
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
    """Return tuples as lists, and bytes as an object. Raise ArgumentError for types that a snapshot does not support in a page
    hash.
    """
    if type(value) is tuple:
        return [_to_json(item) for item in value]
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, np.integer):
        return int(value)
    if value is None or type(value) in (int, bool, str):
        return value
    allowed = "ints, strings, bytes, None and tuples"
    raise ArgumentError(f"page hash: got {type(value).__name__} in one, allowed in a snapshot: {allowed}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple([_from_json(item) for item in value])
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def decode_pool_names(text: npt.NDArray[np.uint8]) -> list[str]:
    """Return the names of pools from JSON. Raise SnapshotError for other text, and for equal names."""
    try:
        names = json.loads(text.tobytes())
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names) and len({*names}) == len(names)):
            raise ValueError("allowed: a list of different strings")
        return names
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"snapshot: 'pool_names' are invalid: {error}") from None


def decode_names(text: npt.NDArray[np.uint8]) -> list[tuple[int, PageHash]]:
    """Return keys and their names from JSON. Raise SnapshotError for other text."""
    try:
        names = _from_json(json.loads(text.tobytes()))
        for key, hash_value, token_ids, _ in names:
            if not (isinstance(key, int) and isinstance(hash_value, int) and isinstance(token_ids, tuple)):
                raise ValueError(f"got key {key!r}, hash {hash_value!r} and token ids {token_ids!r}")
        return [(key, PageHash(*page_hash)) for key, *page_hash in names]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SnapshotError(f"snapshot: 'names' are not page hashes: {error}") from None


def decode_configuration(text: npt.NDArray[np.uint8]) -> Configuration | None:
    """Return a configuration from JSON; null means unknown. Raise SnapshotError for other text."""
    try:
        configuration = json.loads(text.tobytes())
        is_object = isinstance(configuration, dict) and {*map(type, configuration.values())} <= {int, str, type(None)}
        if configuration is not None and not is_object:
            raise ValueError("allowed: an object of ints, strings and nulls, or null")
        return cast("Configuration | None", configuration)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"snapshot: 'configuration' is invalid: {error}") from None

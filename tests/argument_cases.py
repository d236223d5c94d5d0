"""Calls of all public functions with one argument left open, values of any kind for it, and the permitted outcomes."""

from __future__ import annotations

import contextlib
import operator
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from settings import NUM_OPERATIONS

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CachePage,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    EngineRequestStatus,
    FreeCachePageQueue,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageHash,
    PageHashWithGroupId,
    PagePool,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
    cdiv,
    create_kv_cache_specs_from_config,
    dp_shard_for_page_id,
    dp_shard_page_bounds,
    estimate_runtime_page_budget,
    hash_page_tokens,
    hash_request_tokens,
    pages_per_dp_shard,
    usable_pages_count,
)
from pagepool.errors import PagePoolError, shown
from pagepool.replay import Recorder, TraceRecord

HUGE = 10**5000
SPEC = FullAttentionSpec(4, 1, 8, "float16", False)
HASH = PageHash(5, ())


class UsersOwn(Exception):
    """The error that a hostile argument raises."""


class RaisingIndex:
    def __index__(self) -> int:
        raise UsersOwn


class HugeIndex:
    def __index__(self) -> int:
        return HUGE


class TextIndex:
    def __index__(self) -> Any:
        return "1"


class ChangingIndex:
    """An int that differs at each read."""

    def __init__(self) -> None:
        self.next = -1

    def __index__(self) -> int:
        self.next += 1
        return self.next


class IntOfItsOwn(int):
    pass


MAKERS: tuple[Callable[[], Any], ...] = (RaisingIndex, HugeIndex, TextIndex, ChangingIndex, lambda: IntOfItsOwn(3))
NUMBERS = (-1, 0, 2**31, 2**63, 2**64, 2**127, -(2**63), HUGE, -HUGE, 3.0, 1.9, 3j, float("inf"), float("nan"))
SCALARS = tuple(
    scalar(number)
    for scalar in (np.uint8, np.int8, np.int32, np.int64, np.uint64)
    for number in (0, 1, 5, np.iinfo(scalar).min, np.iinfo(scalar).max)
)
OTHERS: tuple[Any, ...] = (
    *(True, np.True_, np.False_, np.float64(3), Decimal(3), Decimal("nan"), Fraction(3)),
    *(np.array(3), np.array(0, dtype=np.uint64), np.array(3.0), np.array([30]), np.array([1, 2])),
    *(np.array([1.0]), np.array([[1]]), np.array([True]), np.array(["0"]), np.array([0], dtype=object)),
    *("1", "\ud800", "a\0b", b"1", None, int, (), [], {}, [1], (HUGE, HUGE), [HUGE]),
)
VALUES: tuple[Callable[[], Any], ...] = (
    *MAKERS,
    *[lambda value=value: value for value in (*NUMBERS, *OTHERS)],  # type: ignore[misc]
)
NUMPY_VALUES: tuple[Callable[[], Any], ...] = tuple([lambda value=value: value for value in SCALARS])  # type: ignore[misc]


class AnyRequest:
    """A request with attributes of any kind."""

    def __init__(self, request_id: Any = "new", token_ids: Any = (7,) * 9, **attributes: Any) -> None:
        self.request_id = request_id
        self.all_token_ids = list(token_ids)
        self.num_tokens: Any = len(self.all_token_ids)
        self.num_computed_tokens: Any = 0
        self.sampling_params: Any = None
        self.status: Any = EngineRequestStatus.RUNNING
        vars(self).update(attributes)


class InUse:
    """A manager, a batch and tables in use: `held` has pages 1 to 3, `new` would hit two free pages."""

    def __init__(self, **options: Any) -> None:
        self.manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, **({"hash_seed": 1} | options))
        self.pool = self.manager.page_pool
        self.held: Any = AnyRequest("held", range(10))
        self.manager.allocate_slots(self.held, 10)
        self.held.num_computed_tokens = 10
        gone: Any = AnyRequest("gone")
        self.manager.allocate_slots(gone, 8)
        self.manager.free(gone)
        self.new: Any = AnyRequest()
        self.table = PageTable(4, 8, 64)
        self.table.append_row([1, 2], 0)
        self.tables = MultiGroupPageTable(4, 64, 64, [4, 8])
        self.tables.append_row([[1, 2], [3]], 0)
        self.batch_table = PageTable(4, 16, 64)
        self.batch: Any = None

    def with_batch(self) -> RunningBatch:
        if self.batch is None:
            self.batch = RunningBatch(self.manager, self.batch_table, data_parallel_size=2)
            self.batch.admit(0, [1, 2, 3, 4, 5, 6])
        return self.batch

    def state(self) -> tuple[Any, ...]:
        return (
            self.pool.ref_counts().tolist(),
            self.pool.free_page_ids_in_order().tolist(),
            {key: list(pages) for key, pages in self.pool.cached_page_hash_to_page.items()},
            {request_id: self.manager.get_page_ids(request_id) for request_id in self.manager._requests},
            [table.page_table_cpu.tolist() for table in (self.table, *self.tables, self.batch_table)],
            self.table.num_pages_per_row.tolist(),
            self.batch and (self.batch.num_tokens.tolist(), self.batch.num_computed_tokens.tolist()),
        )


Call = Callable[[InUse, Any], Any]
RESTORED = ("counters", "num_shards", "ref_counts", "free_page_ids", "enable_caching", "names", "version", "format")
CASES: dict[str, tuple[Call, str]] = {}
"""The calls, and the kinds of values they accept besides ints, in words of `KINDS`."""

KINDS: dict[str, Callable[[Any], bool]] = {
    "spoils": lambda _: False,  # unheld pages are out of the queue
    "any": lambda _: True,
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes),
    "float": lambda value: isinstance(value, float | np.floating),
    "fraction": lambda value: isinstance(value, Fraction),
    "list": lambda value: isinstance(value, list | tuple | dict | np.ndarray | bytes),
    "hashable": lambda value: not isinstance(value, list | dict | np.ndarray),
    "type": lambda value: isinstance(value, type),
    "dtype": lambda value: isinstance(value, np.generic),
}


NAMED: dict[str, str] = {}
"""The parameter that the errors of a call name."""

OTHER_NAMES = {"cache_salt": "salt", "kv_cache_group_id": "group", "group_id": "group", "data_parallel_rank": "rank"}
JUDGED_BY_VALUE = {
    "feature",
    "mask details mask_type",
    "mask details size",
    "restore",
    *(f"restore {name}" for name in RESTORED),
}
JUDGED_BY_VALUE |= {"PagePool num_pages", "CacheManager num_pages", "CacheManager spec", "MambaSpec shapes"}
JUDGED_BY_VALUE |= {f"PagePool {eviction} eviction" for eviction in ("lru", "arc", "adaptive")}
"""The calls that refuse objects of another type as they refuse a wrong value."""


def add(name: str, call: Call, kinds: str = "") -> None:
    CASES[name] = call, kinds


def add_parameters(name: str, function: Callable[..., Any], kinds: dict[str, str], **arguments: Any) -> None:
    """Add a case for each parameter that `kinds` names. A function takes the objects in use, and the arguments by name."""
    for parameter, kind in kinds.items():
        call = lambda use, value, parameter=parameter: function(use, **{**arguments, parameter: value})  # noqa: E731
        add(f"{name} {parameter}", call, kind)
        NAMED[f"{name} {parameter}"] = OTHER_NAMES.get(parameter, parameter)


def find_errors(name: str) -> Iterator[str]:
    """Yield what is wrong with the outcomes of a call with each value, of NumPy's with a share that PAGEPOOL_TEST_OPERATIONS
    makes whole.
    """
    call, _ = CASES[name]
    share = max(1, 100_000 // NUM_OPERATIONS)
    use = in_use_for(name)
    before = use.state()
    for make_value in (*VALUES, *NUMPY_VALUES[zlib.crc32(name.encode()) % share :: share]):
        value = make_value()
        try:
            result = call(use, value)
        except (PagePoolError, UsersOwn, MemoryError) as error:
            is_unchanged = use.state() == before
            found = judge_refusal(name, make_value(), error) if is_unchanged else f"changed something and raised {error!r}"
        except Exception as error:
            found, is_unchanged = f"raised {type(error).__name__}: {error}", False
        else:
            found, is_unchanged = judge_result(name, use, result, make_value), False
        if found:
            yield f"{shown(value)}: {found}"
        if not is_unchanged:
            use = in_use_for(name)


def in_use_for(name: str) -> InUse:
    """Return objects for a call, with the batch if it is one of a batch."""
    use = InUse()
    if name.startswith(("admit ", "batch.")):
        use.with_batch()
    return use


def judge_refusal(name: str, value: Any, error: Exception) -> str | None:
    """Return what is wrong with the error for a value that is no int: its type, or that it does not name the parameter."""
    if not isinstance(error, PagePoolError) or isinstance(value, RaisingIndex) or index_of(value) is not None:
        return None
    kinds = CASES[name][1]
    if not kinds and not isinstance(error, TypeError) and name not in JUDGED_BY_VALUE:
        return f"is of a wrong type and raised {error!r}"
    is_named = NAMED.get(name, "") in str(error)
    return None if is_named or "list" in kinds or not isinstance(error, TypeError) else f"is not named: {error!r}"


def judge_result(name: str, use: InUse, result: Any, make_value: Callable[[], Any]) -> str | None:
    """Return why a value must not have been taken, or how the outcome differs from that of the equal Python int."""
    kinds, value, number = CASES[name][1], make_value(), index_of(make_value())
    if "spoils" not in kinds:
        use.pool.check()
    if isinstance(value, ChangingIndex):
        return None
    if number is None:
        allowed = any(KINDS[kind](value) for kind in kinds.split())
        return None if allowed else f"took it and returned {type(result)}"
    if "any" in kinds or "dtype" in kinds:
        return None
    other = in_use_for(name)
    try:
        expected = CASES[name][0](other, number)
    except PagePoolError as error:
        return f"took it as a number, and {shown(number)} raises {error!r}"
    if plain(result) != plain(expected) or use.state() != other.state():
        return f"is not {shown(number)}: {plain(result)}, {plain(expected)}"
    return None


def plain(result: Any) -> str:
    """Return a result as text without addresses."""
    return re.sub(r"0x\w+", "", shown(result))


def index_of(value: Any) -> int | None:
    with contextlib.suppress(TypeError, UsersOwn):
        return int(operator.index(value))
    return None


# CacheManager.


def allocate(use: InUse, request: Any = None, **options: Any) -> Any:
    return use.manager.allocate_slots(request or use.new, **({"num_new_tokens": 1} | options))


def allocate_with_hits(use: InUse, **options: Any) -> Any:
    return allocate(use, new_computed_pages=use.manager.get_computed_pages(use.new)[0], **options)


SHARDED = {"dp_shard_hint": 1, "data_parallel_size": 2}
SHARD_KINDS = {"dp_shard_hint": "None", "data_parallel_size": "None"}
add("allocate_slots num_new_tokens", lambda use, value: use.manager.allocate_slots(use.held, value))
add("allocate_slots num_new_computed_tokens", lambda use, value: allocate_with_hits(use, num_new_computed_tokens=value))
add("allocate_slots num_lookahead_tokens", lambda use, value: allocate(use, use.held, num_lookahead_tokens=value))
for count in ("num_external_computed_tokens", "num_reserved_pages"):
    add(f"allocate_slots {count}", lambda use, value, count=count: allocate(use, **{count: value}))  # type: ignore[misc]
add("allocate_slots new_computed_pages", lambda use, value: allocate(use, new_computed_pages=value), "None")
add_parameters("allocate_slots", allocate, SHARD_KINDS, **SHARDED)
add_parameters(
    "get_computed_pages", lambda use, **options: use.manager.get_computed_pages(use.new, **options), SHARD_KINDS, **SHARDED
)
add("cache_pages num_computed_tokens", lambda use, value: use.manager.cache_pages(use.held, value))
add("get_num_common_prefix_pages", lambda use, value: use.manager.get_num_common_prefix_pages(use.held, value))
add("require_capacity", lambda use, value: use.manager.require_capacity(value))
for method in ("pin", "unpin"):
    add_parameters(
        method,
        lambda use, method, **span: getattr(use.manager, method)(use.held, **span),
        {"start": "", "stop": "None"},
        method=method,
    )
add_parameters(
    "retain",
    lambda use, **options: use.manager.retain(use.held, **options),
    {"start": "", "stop": "None", "priority": "", "seconds": "None float fraction"},
)
add("protect", lambda use, value: use.manager.protect(value), "list")
add("get_page_ids", lambda use, value: use.manager.get_page_ids(value), "hashable")

REQUEST_METHODS: dict[str, Callable[[CacheManager, Any], Any]] = {
    "get_computed_pages": lambda manager, request: manager.get_computed_pages(request),
    "probe": lambda manager, request: manager.probe(request),
    "allocate_slots": lambda manager, request: manager.allocate_slots(request, 8),
    "cache_pages": lambda manager, request: manager.cache_pages(request, 8),
    "pin": lambda manager, request: manager.pin(request),
    "unpin": lambda manager, request: manager.unpin(request),
    "retain": lambda manager, request: manager.retain(request, 0, 0),
    "protect": lambda manager, request: manager.protect([request]),
    "free": lambda manager, request: manager.free(request),
    "free_page_hashes": lambda manager, request: manager.free_page_hashes(request),
    "get_num_common_prefix_pages": lambda manager, request: manager.get_num_common_prefix_pages(request, 1),
}
READ_BY = {  # attributes of a new request, the methods that read them, and the values they may have besides ints
    "request_id": ([*REQUEST_METHODS], "hashable any"),
    "num_tokens": (["get_computed_pages", "probe", "allocate_slots", "pin", "unpin", "retain", "protect"], ""),
    "num_computed_tokens": (["allocate_slots"], ""),
    "all_token_ids": (["get_computed_pages", "probe", "allocate_slots", "pin", "unpin", "retain", "protect"], "list"),
    "status": (["get_computed_pages", "get_num_common_prefix_pages"], "any"),
    "lora_id": (["get_computed_pages", "probe", "allocate_slots"], "str bytes None"),
    "cache_salt": (["get_computed_pages", "probe", "allocate_slots", "pin", "unpin", "retain", "protect"], "str bytes None"),
    "mm_features": (["get_computed_pages", "probe", "allocate_slots"], "list None"),
}


def add_request_cases() -> None:
    for method, read in REQUEST_METHODS.items():
        add(f"{method} request", lambda use, value, read=read: read(use.manager, value))  # type: ignore[misc]
        for attribute, (methods, kinds) in READ_BY.items():
            if method in methods:
                call = lambda use, value, read=read, name=attribute: read(use.manager, AnyRequest(**{name: value}))  # noqa: E731
                add(f"{method} request.{attribute}", call, kinds)
    for method in ("allocate_slots", "cache_pages"):  # attributes of a request that holds pages
        call = lambda use, value, read=REQUEST_METHODS[method]: read(  # noqa: E731
            use.manager, AnyRequest("held", range(10), num_computed_tokens=value)
        )
        add(f"{method} held.num_computed_tokens", call)


add_request_cases()


def hash_with(algorithm: Any, **attributes: Any) -> Any:
    manager = CacheManager(8, [CacheGroupSpec(SPEC)], 64, hash_algo=algorithm, hash_seed=1)
    return manager.allocate_slots(AnyRequest(**attributes), 8)


def hash_feature(**attributes: Any) -> Any:
    return hash_with("siphash128", mm_features=[SimpleNamespace(**({"mm_hash": "h"} | attributes))])


for algorithm in ("siphash128", "sha256", *(["sha256_cbor"] if find_spec("cbor2") else [])):
    add_parameters(
        f"hash {algorithm}",
        lambda _, algorithm, **attributes: hash_with(algorithm, **attributes),
        {"lora_id": "str bytes None", "cache_salt": "str bytes None"},
        algorithm=algorithm,
    )
    add(
        f"hash_seed {algorithm}",
        lambda _, value, algorithm=algorithm: CacheManager(  # type: ignore[misc]
            8, [CacheGroupSpec(SPEC)], 64, hash_algo=algorithm, hash_seed=value
        ),
        "str bytes None",
    )
    add(f"tokens {algorithm}", lambda _, value, algorithm=algorithm: hash_with(algorithm, token_ids=[7, value] * 6))  # type: ignore[misc]
add("tokens of a callable", lambda _, value: hash_with(hash, token_ids=[7, value] * 6))
add("lora_id of a pair", lambda _, value: hash_with("siphash128", lora_id=("name", value)), "str bytes")
add("lora_id nested", lambda _, value: hash_with("siphash128", lora_id=("name", ("path", value))))
add("feature", lambda _, value: hash_with("siphash128", mm_features=[value]))
add("feature mm_hash", lambda _, value: hash_feature(mm_hash=value), "str bytes")
add("feature modality", lambda _, value: hash_feature(modality=value), "any")
add("feature position", lambda _, value: hash_feature(placeholder_range=value), "None")
for part in ("offset", "length"):
    position = {"offset": 1, "length": 2}
    add(
        f"feature {part}",
        lambda _, value, part=part, position=position: hash_feature(  # type: ignore[misc]
            placeholder_range=SimpleNamespace(**{**position, part: value})
        ),
    )
add_parameters(
    "CacheManager",
    lambda _, **options: CacheManager(**options),
    {
        "num_pages": "",
        "kv_cache_groups": "list str",
        "max_model_len": "",
        "hash_algo": "type",
        "page_pool": "None",
        "max_pinned_share": "float",
    },
    num_pages=8,
    kv_cache_groups=[CacheGroupSpec(SPEC)],
    max_model_len=64,
)
add_parameters(
    "CacheManager arc",
    lambda _, **options: CacheManager(8, [CacheGroupSpec(SPEC)], 64, **options),
    {"eviction": "None", "ghost_size": "None float fraction"},
    eviction="arc",
)
add_parameters(
    "CacheManager page_pool",
    lambda _, **options: CacheManager(8, [CacheGroupSpec(SPEC)], 64, page_pool=PagePool(8, True, eviction="arc"), **options),
    {"eviction": "None", "ghost_size": "None"},
)
add("CacheManager group", lambda _, value: CacheManager(8, [value], 64))
add("CacheManager spec", lambda _, value: CacheManager(8, [CacheGroupSpec(value)], 64))
add("EngineRequest", lambda _, value: EngineRequest("a", value).all_token_ids, "list")
add("EngineRequest token", lambda _, value: EngineRequest("a", [value]).all_token_ids)
add("EngineRequest append", lambda _, value: EngineRequest("a", [1]).append_output_token_ids(value), "list")

# PagePool.

add("PagePool num_pages", lambda _, value: PagePool(value, True))
for eviction, kinds in {"lru": "None", "arc": "None float fraction", "adaptive": "None"}.items():
    add_parameters(
        f"PagePool {eviction}",
        lambda _, **options: PagePool(8, True, **options),
        {"eviction": "", "ghost_size": kinds},
        eviction=eviction,
    )
for take in ("get_new_pages", "get_new_page_ids"):
    add_parameters(
        take,
        lambda use, take, **options: getattr(use.pool, take)(**options),
        {"num_pages": "", **SHARD_KINDS},
        take=take,
        num_pages=1,
        **SHARDED,
    )
for method, kinds in {"free_page_ids": "", "touch_page_ids": "", "evict_pages": ""}.items():
    add(method, lambda use, value, method=method: getattr(use.pool, method)(value), "list")  # type: ignore[misc]
    add(f"{method} id", lambda use, value, method=method: getattr(use.pool, method)([value]), kinds)  # type: ignore[misc]
for method in ("free_pages", "touch", "probe"):
    add(method, lambda use, value, method=method: getattr(use.pool, method)(value), "list str")  # type: ignore[misc]
    add(f"{method} item", lambda use, value, method=method: getattr(use.pool, method)([value]), "list str")  # type: ignore[misc]
add("probe group", lambda use, value: use.pool.probe([HASH], [value]))
add("probe groups", lambda use, value: use.pool.probe([HASH], value), "list")
add("pages item", lambda use, value: use.pool.pages[value])
add("pages slice", lambda use, value: use.pool.pages[:value], "None")
add("popleft_n", lambda use, value: use.pool.free_page_queue.popleft_n(value), "spoils")
for method in ("remove", "append", "append_n"):
    add(method, lambda use, value, method=method: getattr(use.pool.free_page_queue, method)(value), "list str")  # type: ignore[misc]
add("FreeCachePageQueue", lambda _, value: FreeCachePageQueue(value), "list str")
for get in ("get_cached_page", "get_cached_page_ids"):
    add_parameters(
        get,
        lambda use, get, **options: getattr(use.pool, get)(**options),
        {"page_hash": "", "kv_cache_group_ids": "list", **SHARD_KINDS},
        get=get,
        page_hash=HASH,
        kv_cache_group_ids=[0],
        **SHARDED,
    )
    add(f"{get} hash_value", lambda use, value, get=get: getattr(use.pool, get)(PageHash(value, ()), [0]))  # type: ignore[misc]
    add(f"{get} token_ids", lambda use, value, get=get: getattr(use.pool, get)(PageHash(5, value), [0]), "list")  # type: ignore[misc]
    add(f"{get} group", lambda use, value, get=get: getattr(use.pool, get)(HASH, [value]))  # type: ignore[misc]
add_parameters(
    "find_page_id",
    lambda use, **options: use.pool.find_page_id(HASH, **options),
    {"group_id": "", "start": "", "stop": "None"},
    group_id=0,
)
for find in ("find_shard", "find_shard_bounds"):
    add_parameters(find, lambda use, find, **options: getattr(use.pool, find)(**options), SHARD_KINDS, find=find, **SHARDED)
CACHED: dict[str, Any] = {"num_cached_pages": 0, "num_full_pages": 1, "page_size": 4, "kv_cache_group_id": 0}
for hashes in ([PageHash(91, ()), PageHash(92, ())], []):
    add_parameters(
        f"cache_full_pages with {len(hashes)} hashes",
        lambda use, hashes, **options: use.pool.cache_full_pages(
            **({"request": use.held, "pages": use.pool.pages[3:], "page_hashes": [*hashes]} | options)
        ),
        dict.fromkeys(CACHED, "") | {"pages": "list", "page_hashes": "list", "request": "any" if hashes else ""},
        hashes=hashes,
        **CACHED,
    )
    add_parameters(
        f"cache_full_page_ids with {len(hashes)} hashes",
        lambda use, hashes, **options: use.pool.cache_full_page_ids(
            **({"request": use.held, "page_ids": [3, 9], "page_hashes": [*hashes]} | options)
        ),
        dict.fromkeys(CACHED, "") | {"page_ids": "list"},
        hashes=hashes,
        **CACHED,
    )
add("restore", lambda _, value: PagePool.restore(value))
for array in RESTORED:
    call = lambda use, value, array=array: PagePool.restore(use.pool.snapshot() | {array: value})  # noqa: E731
    add(f"restore {array}", call, "list" if array == "enable_caching" else "")
add("CachePage", lambda _, value: CachePage(value))
add("CachePage ref_cnt", lambda _, value: CachePage(1, value))
add("ref_cnt", lambda use, value: setattr(use.pool.pages[9], "ref_cnt", value) or setattr(use.pool.pages[9], "ref_cnt", 0))
add("page_hash", lambda use, value: setattr(use.pool.pages[3], "page_hash", value), "None")
for name, make_hash in {
    "hash_value": lambda value: PageHashWithGroupId(PageHash(value, ()), 0),
    "group_id": lambda value: PageHashWithGroupId(HASH, value),
}.items():
    add(f"page_hash {name}", lambda use, value, make=make_hash: setattr(use.pool.pages[3], "page_hash", make(value)))  # type: ignore[misc]

# Page tables and batches.

add_parameters(
    "PageTable",
    lambda _, **options: PageTable(**options),
    {"max_num_reqs": "", "max_num_pages_per_req": "", "max_num_batched_tokens": "", "sharding": "None"},
    max_num_reqs=4,
    max_num_pages_per_req=4,
    max_num_batched_tokens=4,
)
add_parameters(
    "MultiGroupPageTable",
    lambda _, **options: MultiGroupPageTable(**options),
    {"max_num_reqs": "", "max_model_len": "", "max_num_batched_tokens": "", "page_sizes": "list"},
    max_num_reqs=4,
    max_model_len=64,
    max_num_batched_tokens=4,
    page_sizes=[4],
)
add("MultiGroupPageTable page size", lambda _, value: MultiGroupPageTable(4, 64, 4, [value]))
for name, ids in {"table": [3], "tables": [[3], [6]]}.items():
    for method in ("append_row", "add_row"):
        add(
            f"{name}.{method} row",
            lambda use, value, name=name, ids=ids, method=method: getattr(getattr(use, name), method)(ids, value),  # type: ignore[misc]
        )
    add(f"{name}.append_row ids", lambda use, value, name=name: getattr(use, name).append_row(value, 1), "list")  # type: ignore[misc]
    add(f"{name}.clear_row", lambda use, value, name=name: getattr(use, name).clear_row(value))  # type: ignore[misc]
    for method in ("move_row", "swap_row"):
        add(f"{name}.{method} src", lambda use, value, name=name, method=method: getattr(getattr(use, name), method)(value, 2))  # type: ignore[misc]
        add(f"{name}.{method} tgt", lambda use, value, name=name, method=method: getattr(getattr(use, name), method)(0, value))  # type: ignore[misc]
add("append_row id", lambda use, value: use.table.append_row([value], 1))
add("append_rows_batch row", lambda use, value: use.tables.append_rows_batch([[[3], [6]]], [value]))
for part, listed in {"rows": True, "positions": True, "page_size": False}.items():
    call = lambda use, value, part=part, listed=listed: use.table.slot_mapping(  # noqa: E731
        **({"rows": [0], "positions": [1], "page_size": 4} | {part: [value] if listed else value})
    )
    add(f"slot_mapping {part}", call, "" if listed else "None")
add_parameters(
    "admit",
    lambda use, **options: use.with_batch().admit(**options),
    {
        **dict.fromkeys(("num_tokens", "max_num_new_tokens", "dp_shard"), "None"),
        "row": "",
        "num_reserved_pages": "",
        "token_ids": "list",
        "mm_features": "list None",
        "cache_salt": "str bytes None",
        "lora_id": "str bytes None",
    },
    row=1,
    token_ids=[1, 2, 3, 4, 5],
)
add("admit token", lambda use, value: use.with_batch().admit(1, [1, 2, value]))
for method, arguments in {
    "step": {"rows": [0], "token_ids": [9]},
    "grow": {"rows": [0], "num_new_tokens": [1], "num_lookahead_tokens": [0]},
    "append": {"rows": [0], "token_ids": [9]},
    "trim": {"rows": [0], "num_tokens": [6]},
    "release": {"rows": [0]},
}.items():
    for parameter in arguments:
        call = lambda use, value, method=method, one=parameter, whole=arguments: getattr(  # noqa: E731
            use.with_batch(), method
        )(**whole | {one: [value]})
        add(f"batch.{method} {parameter}", call)
    add_parameters(
        f"batch.{method} all",
        lambda use, method, **options: getattr(use.with_batch(), method)(**options),
        dict.fromkeys(arguments, "list"),
        method=method,
        **arguments,
    )
for method in ("pin", "unpin"):
    add_parameters(
        f"batch.{method}",
        lambda use, method, **options: getattr(use.with_batch(), method)(**options),
        {"row": "", "start": "", "stop": "None"},
        method=method,
        row=0,
    )
add_parameters(
    "batch.retain",
    lambda use, **options: use.with_batch().retain(**{"row": 0} | options),
    {"row": "", "start": "", "stop": "None", "priority": "", "seconds": "None float fraction"},
)
add("RunningBatch manager", lambda use, value: RunningBatch(value, use.batch_table))
add("RunningBatch page_table", lambda use, value: RunningBatch(use.manager, value))
add_parameters(
    "RunningBatch", lambda use, **options: RunningBatch(use.manager, use.batch_table, **options), {"data_parallel_size": "None"}
)

# Specs.

SIZES: dict[str, Any] = {"page_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
WINDOW, CHUNK = {"sliding_window": 5}, {"attention_chunk_size": 5}
LIMITS = {"max_model_len": 100, "max_num_batched_tokens": 10}
for spec, sizes in ((FullAttentionSpec, {}), (SlidingWindowSpec, WINDOW), (ChunkedLocalAttentionSpec, CHUNK)):
    add_parameters(
        spec.__name__,
        lambda _, spec, **options: (made := spec(**options)).max_memory_usage_bytes(**LIMITS) and (made, made.type_id),
        dict.fromkeys(("page_size", "num_kv_heads", "head_size", *sizes), ""),
        spec=spec,
        **SIZES,
        **sizes,
    )
    add_parameters(
        f"{spec.__name__}.max_memory_usage_bytes",
        lambda _, made, **options: made.max_memory_usage_bytes(**options),
        {"max_model_len": ""} | ({"max_num_batched_tokens": ""} if sizes else {}),
        made=spec(**SIZES, **sizes),
        **LIMITS,
    )
del NAMED["FullAttentionSpec.max_memory_usage_bytes max_model_len"]  # `cdiv` refuses it, and names its own parameter
add("FullAttentionSpec dtype", lambda _, value: FullAttentionSpec(**SIZES | {"dtype": value}), "type dtype")
for limit in ("sliding_window", "attention_chunk_size"):
    add(f"FullAttentionSpec {limit}", lambda _, value, limit=limit: FullAttentionSpec(**SIZES, **{limit: value}), "None")  # type: ignore[misc]
add("MambaSpec shapes", lambda _, value: MambaSpec(4, value, "float16"), "list")
add("MambaSpec shape", lambda _, value: MambaSpec(4, (value,), "float16"), "list")
add("MambaSpec dimension", lambda _, value: (made := MambaSpec(4, ((value,),), "float16")).page_size_bytes and made.type_id)
add("MambaSpec page_size_padded", lambda _, value: MambaSpec(4, ((1,),), "float16", value), "None")
for function, numbers in {
    cdiv: (5, 4),
    usable_pages_count: (5,),
    dp_shard_for_page_id: (5, 4, 4),
    dp_shard_page_bounds: (1, 4),
    pages_per_dp_shard: (16, 2),
}.items():
    for i in range(len(numbers)):
        call = lambda _, value, i=i, f=function, numbers=numbers: f(*numbers[:i], value, *numbers[i + 1 :])  # type: ignore[operator]  # noqa: E731
        add(f"{function.__name__} {i}", call, "None" if (function, i) == (pages_per_dp_shard, 1) else "")
add_parameters(
    "estimate_runtime_page_budget",
    lambda _, **options: estimate_runtime_page_budget(**options),
    {
        **dict.fromkeys(("num_pages", "max_model_len", "max_num_batched_tokens"), ""),
        "data_parallel_size": "",
        "kv_cache_groups": "list",
    },
    num_pages=16,
    kv_cache_groups=[CacheGroupSpec(SPEC)],
    **LIMITS,
)


def specs_of(**detail: Any) -> Any:
    layer = detail.pop("layer", 0)
    whole = SimpleNamespace(**({"mask_type": "SLIDING", "size": 4} | detail))
    config = SimpleNamespace(get_mask_details=lambda: SimpleNamespace(items=lambda: [(layer, whole)]))
    return create_kv_cache_specs_from_config(config, 4, 1, 8, "float16")


add_parameters(
    "create_kv_cache_specs_from_config",
    lambda _, **sizes: create_kv_cache_specs_from_config(object(), **sizes),
    {"page_size": "", "num_kv_heads": "", "head_size": ""},
    **{name: SIZES[name] for name in ("page_size", "num_kv_heads", "head_size", "dtype")},
)
add_parameters("mask details", lambda _, **detail: specs_of(**detail), {"size": "", "mask_type": "", "layer": "any"})
add("hash_page_tokens", lambda _, value: hash_page_tokens(lambda _: 1, None, value), "list str")
add("hash_request_tokens page_size", lambda use, value: hash_request_tokens(lambda _: 1, value, use.held))
add("hash_request_tokens request", lambda _, value: hash_request_tokens(lambda _: 1, 4, value))

# Traces and recordings.


def record(use: InUse, value: Any, part: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"manager": use.manager, "path": Path(folder) / "trace", "block_size": None}
        with Recorder(**{**arguments, part: value} if part in arguments else arguments) as recorder:
            if part not in arguments:
                request = value if part in ("start", "finish") else AnyRequest(**{part: value})
                if part != "finish":
                    recorder.start(request)
                recorder.finish(request)


for part, kinds in {"block_size": "None", "manager": "", "start": "", "finish": ""}.items():
    add(f"Recorder {part}", lambda use, value, part=part: record(use, value, part), kinds)  # type: ignore[misc]
for part in ("request_id", "num_tokens", "all_token_ids", "lora_id", "cache_salt", "mm_features"):
    add(f"Recorder request.{part}", lambda use, value, part=part: record(use, value, part), READ_BY[part][1])  # type: ignore[misc]
add("Recorder path", lambda use, value: None if isinstance(value, str) else record(use, value, "path"), "str")
add_parameters(
    "TraceRecord",
    lambda _, **fields: TraceRecord(**fields),
    {"timestamp": "float", "input_length": "", "output_length": "", "block_size": ""},
    timestamp=0,
    input_length=1,
    output_length=1,
    hash_ids=(1,),
)

# Events.

if find_spec("msgspec") and find_spec("zmq"):
    from pagepool.event_publisher import EventPublisher
    from pagepool.events import BlockRemoved, EventBatch, encode_batch

    def publish(use: InUse, events: Any = (), **options: Any) -> None:
        with EventPublisher(**({"endpoint": "inproc://argument-edges"} | options)) as publisher:
            publisher.publish(events)

    def tell(**attributes: Any) -> None:
        manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, hash_seed=1)
        manager.enable_events()
        manager.allocate_slots(AnyRequest(**attributes), 8)
        encode_batch(EventBatch(0.0, manager.take_events()))

    add_parameters(
        "EventPublisher",
        publish,
        {
            **dict.fromkeys(("buffer_steps", "hwm", "data_parallel_rank"), ""),
            "interval": "float",
            "manager": "None",
            "endpoint": "",
            "replay_endpoint": "None",
            "topic": "str",
            "curve_secretkey": "None",
            "curve_client_keys": "None",
            "events": "list str",
        },
    )
    add("EventPublisher event", lambda use, value: publish(use, [value]))
    add("EventPublisher block_hash", lambda use, value: publish(use, [BlockRemoved([value], None)]), "any")
    add("EventBatch ts", lambda _, value: encode_batch(EventBatch(value, [])), "float")
    add("EventBatch data_parallel_rank", lambda _, value: encode_batch(EventBatch(0.0, [], value)), "None")
    add("EventBatch events", lambda _, value: encode_batch(EventBatch(0.0, value)), "list str")
    for key in ("lora_id", "cache_salt"):
        add(f"events {key}", lambda _, value, key=key: tell(**{key: value}), "str bytes None")  # type: ignore[misc]

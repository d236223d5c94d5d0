"""Calls of all public functions with one argument left open, values of any kind for it, and the permitted outcomes."""

from __future__ import annotations

import contextlib
import operator
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from managing import grouped
from pool_arrays import pool_lists
from settings import NUM_OPERATIONS

import pagepool
from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CachePage,
    EngineRequestStatus,
    FailedLoads,
    FullAttentionSpec,
    HostTier,
    MultiGroupPageTable,
    PageHash,
    PageHashing,
    PagePool,
    PageTable,
    RunningBatch,
    specs,
)
from pagepool.compat import easydel
from pagepool.errors import PagePoolError, shown
from pagepool.replay import Recorder

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
    """A manager, a batch and tables in use: `held` has pages 1 to 3, `new` would hit two free pages, row 2 waits for tokens,
    and row 3 has computed 2 of its 6.
    """

    def __init__(self, **options: Any) -> None:
        self.manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, **grouped(**{"hash_seed": 1} | options))
        self.pool = self.manager.page_pool
        self.held: Any = AnyRequest("held", range(10))
        self.manager.allocate_slots(self.held, 10)
        self.held.num_computed_tokens = 10
        self.held_before = {**vars(self.held)}
        gone: Any = AnyRequest("gone")
        self.manager.allocate_slots(gone, 8)
        self.manager.free(gone)
        self.new: Any = AnyRequest()
        self.queue = self.pool.free_page_queue
        self.table = PageTable(4, 8, 64)
        self.table.append_row([1, 2], 0)
        self.tables = MultiGroupPageTable(4, 64, 64, [4, 8])
        self.tables.append_row([[1, 2], [3]], 0)
        self.batch_table = PageTable(4, 16, 64)
        self.batch: Any = None
        self.ahead: Any = None
        self.two: Any = None

    def held_with(self, **attributes: Any) -> Any:
        """Return `held`, with other values of some attributes: another object with its id is refused."""
        vars(self.held).update(self.held_before | attributes)
        return self.held

    def with_batch(self) -> RunningBatch:
        if self.batch is None:
            self.batch = RunningBatch(self.manager, self.batch_table, data_parallel_size=2)
            self.step = self.batch.new_step()
            self.batch.admit(0, [1, 2, 3, 4, 5, 6], step=self.step)
            self.batch.admit(2, [9] * 6, num_external_tokens=5)
            self.batch.admit(3, [8] * 6, num_tokens=2)
        return self.batch

    def with_ahead(self) -> None:
        """Make rows that plan a step ahead: in `first` row 0 has a draft and row 1 a chunk; row 2 waits for tokens, row 3 has
        no step in flight, row 4 has two, row 5 is full, and row 6 is free.
        """
        manager = CacheManager(60, GROUPS, 64, hashing=PageHashing(hash_seed=1))
        batch = self.ahead = RunningBatch(manager, PageTable(7, 16, 64), max_steps_ahead=1)
        self.done, self.failed, self.before, self.first, self.full = (batch.new_step() for _ in range(5))
        batch.admit(3, [7] * 4, step=self.done)
        batch.settle(self.done)
        batch.admit(6, [5] * 4, step=self.failed)
        batch.settle(self.failed, failed=True)
        batch.release([6])
        batch.admit(4, [6] * 4, step=self.before)
        self.second = batch.plan([4])
        batch.admit(0, [1, 2, 3, 4, 5, 6], step=self.first, num_drafts=1)
        batch.admit(1, [2] * 10, step=self.first, max_num_new_tokens=4)
        batch.admit(2, [9] * 6, num_external_tokens=5)
        batch.admit(5, [8] * 64, step=self.full)

    def look_up(self) -> Any:
        """Return the pages that `new` hits."""
        return self.manager.get_computed_pages(self.new)[0]

    def save(self) -> dict[str, Any]:
        """Return all that a pool keeps, but for what look-ups leave: shards, and names of hashes."""
        stats = self.manager.stats()
        kept = {name: values for name, values in pool_lists(self.pool).items() if name not in ("num_shards", "names")}
        return kept | {"stats": (stats.expectations, stats.num_sessions, dict(stats.num_pages_by_tenant))}

    def go_on(self) -> tuple[Any, ...]:
        """Fill more pages of the rows, whose hashes depend on all tokens, and return the state."""
        if self.batch is not None:
            self.batch.commit_external(2, 5)
            self.batch.plan([2, 3], [1, 4])
            for token_id in range(8):
                self.batch.step([0, 2], [token_id, token_id])
        if self.ahead is not None:
            self.ahead.settle(self.first, [1, 2], [2, 0])
            self.ahead.settle(self.before, [3])
            self.ahead.plan([1, 0, 4], [6, 1, 1])
        return self.state()

    def state(self) -> tuple[Any, ...]:
        return (
            self.pool.ref_counts().tolist(),
            self.pool.free_page_ids_in_order().tolist(),
            {key: list(pages) for key, pages in self.pool.cached_page_hash_to_page.items()},
            {request_id: self.manager.get_page_ids(request_id) for request_id in self.manager.registry.held},
            [
                (table.page_table_cpu.tolist(), table.cpu_version, table.count_dirty_segments(0, 4))
                for table in (self.table, *self.tables, self.batch_table)
            ],
            self.table.num_pages_per_row.tolist(),
            [counts_of(batch) for batch in (self.batch, self.ahead) if batch is not None],
            self.two and [pool.free_page_ids_in_order().tolist() for pool in self.two.pools.values()],
        )


def counts_of(batch: RunningBatch) -> tuple[Any, ...]:
    arrays = batch.num_tokens, batch.num_computed_tokens, batch.num_ahead_tokens, batch.stays
    return [array.tolist() for array in arrays], [batch.get_page_ids(row) for row in range(len(batch.stays))]


Call = Callable[[InUse, Any], Any]
CASES: dict[str, tuple[Call, str]] = {}
"""The calls, and the kinds of values they accept besides ints, in words of `KINDS`."""

KINDS: dict[str, Callable[[Any], bool]] = {
    "spoils": lambda _: False,  # unheld pages are out of the queue
    "by_value": lambda _: False,  # refused by their values, whatever their type
    "typed": lambda _: False,  # others are refused by their types
    "any": lambda _: True,
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes),
    "float": lambda value: isinstance(value, float | np.floating),
    "fraction": lambda value: isinstance(value, Fraction),
    "list": lambda value: isinstance(value, list | tuple | np.ndarray),
    "mapping": lambda value: isinstance(value, dict),
    "hashable": lambda value: not isinstance(value, list | dict | np.ndarray),
    "type": lambda value: isinstance(value, type),
    "dtype": lambda value: isinstance(value, np.generic),
    "flag": lambda value: isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)),
}


NAMED: dict[str, str] = {}
"""The parameter that the errors of a call name."""

CODES: dict[str, str] = {}
"""The calls as text, with a question mark for what is open."""

WRONG: dict[str, Call] = {}
"""Calls that are refused, and leave nothing open, by their text."""

NAMES: dict[str, Any] = {}
"""What expressions may use."""

OTHER_NAMES = {"cache_salt": "salt", "kv_cache_group_id": "group", "group_id": "group", "data_parallel_rank": "rank"}
OTHER_NAMES |= {"src": "row", "tgt": "row", "row_idx": "row", "placeholder_range": "position"}


def add(name: str, call: Call, kinds: str = "") -> None:
    CASES[name] = call, kinds


def add_calls(templates: str) -> None:
    """Add a case for each `<argument|kinds>` of expressions in lines: it is left open, and the others stand as they are. An
    expression without any is refused as it stands.
    """
    for template in templates.strip().replace("\n    ", " ").split("\n"):
        holes = [*re.finditer(r"(?:(\w+)=)?<([^<>|]*)\|?([^<>]*)>", template)]
        if not holes:
            WRONG[template] = make_call(template)
        for hole in holes:
            code, start = "", 0
            for other in holes:
                prefix = f"{other[1]}=" if other[1] else ""
                code += template[start : other.start()] + prefix + ("value" if other is hole else other[2])
                start = other.end()
            name = f"{template.partition('(')[0]} {hole[1] or ''} {len(CASES)}"
            add(name, make_call(code + template[start:]), hole[3])
            CODES[name] = re.sub(r"\bvalue\b", "?", code + template[start:])
            if hole[1]:
                NAMED[name] = OTHER_NAMES.get(hole[1], hole[1])


def make_call(code: str) -> Call:
    """Return the function of an expression."""
    compiled = compile(code, code, "eval")
    return lambda use, value: eval(compiled, NAMES, {"use": use, "value": value})


def find_errors(name: str) -> Iterator[str]:
    """Yield what is wrong with a call's outcomes for each value, and for a share of NumPy's numbers, or all in long runs."""
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


TABLE = Path(__file__).with_name("argument_errors.txt")
"""The errors of calls for values that fit the type, below all calls that have them: ``python tests/models/argument_cases.py``
writes it.
"""
IN_TABLE = (-1, 0, 1, 4, 99, 2**31, [], [0, 0], [0, 99], [[1]])


def describe_errors(name: str, **options: Any) -> str:
    """Return what a call raises for the values of the table, but for a wrong type. A refusal changes nothing, not even what
    shows only later.
    """
    call = WRONG[name] if name in WRONG else CASES[name][0]
    lines, refused = [""], []
    use = in_use_for(name, **options)
    before = use.state()
    for value in map(deepcopy, [None] if name in WRONG else IN_TABLE):
        try:
            call(use, value)
        except Exception as error:
            text = re.sub(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", "?", f"{type(error).__name__}: {error}")
            if name in WRONG:
                lines.append(f"    {type(error).__name__}: {error}")
            elif not isinstance(error, TypeError) and text != lines[-1].partition(": ")[2]:
                lines.append(f"    {value!r}: {text}")
            if before != use.state():
                raise AssertionError(f"{name} of {value!r} changed something") from error
            refused.append(value)
        else:
            use = in_use_for(name, **options)
    if refused:
        use, other = (in_use_for(name, **options) for _ in range(2))
        kept = use.save()
        for value in refused:
            with contextlib.suppress(Exception):
                call(use, value)
        if kept != use.save() or use.go_on() != other.go_on():
            raise AssertionError(f"{name} of {refused} changed something that shows later")
    return "\n".join([*lines[1:], ""])


def write_table() -> None:
    calls: dict[str, dict[str, None]] = {}
    for name in [*CASES, *WRONG]:
        calls.setdefault(describe_errors(name), {})[CODES.get(name, name)] = None
    calls.pop("")  # of calls that raise nothing
    TABLE.write_text("".join("\n".join([*names, errors]) for errors, names in calls.items()), "utf-8")


def in_use_for(name: str, **options: Any) -> InUse:
    """Return objects for a call, with the batch if it is one of a batch."""
    use = InUse(**options)
    if "use.batch." in name or name.startswith("inputs_of"):
        use.with_batch()
    if "use.ahead." in name:
        use.with_ahead()
    if "use.two" in name:
        use.two = CacheManager(TWO_SIZES, TWO, 64)
    return use


def judge_refusal(name: str, value: Any, error: Exception) -> str | None:
    """Return what is wrong with the error for a value that is no int: its type, or that it does not name the parameter."""
    if not isinstance(error, PagePoolError) or isinstance(value, RaisingIndex) or index_of(value) is not None:
        return None
    kinds = CASES[name][1]
    is_typed = not kinds or ("typed" in kinds and not any(KINDS[kind](value) for kind in kinds.split()))
    if is_typed and not isinstance(error, TypeError):
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


REQUEST_METHODS: dict[str, Callable[[CacheManager, Any], Any]] = {
    "get_computed_pages": lambda manager, request: manager.get_computed_pages(request),
    "probe": lambda manager, request: manager.probe(request),
    "allocate_slots": lambda manager, request: manager.allocate_slots(request, 8),
    "cache_pages": lambda manager, request: manager.cache_pages(request, 8),
    "expect": lambda manager, request: manager.expect(request, seconds=1),
    "lease": lambda manager, request: manager.lease(request, seconds=1),
    "free": lambda manager, request: manager.free(request),
    "free_page_hashes": lambda manager, request: manager.free_page_hashes(request),
    "get_num_common_prefix_pages": lambda manager, request: manager.get_num_common_prefix_pages(request, 1),
}
READ_BY = {  # attributes of a new request, the methods that read them, and the values they may have besides ints
    "request_id": ([*REQUEST_METHODS], "hashable any"),
    "num_tokens": (["get_computed_pages", "probe", "allocate_slots", "expect", "lease"], ""),
    "num_computed_tokens": (["allocate_slots"], ""),
    "all_token_ids": (["get_computed_pages", "probe", "allocate_slots", "expect", "lease"], "list"),
    "status": (["get_computed_pages", "get_num_common_prefix_pages"], "any"),
    "lora_id": (["get_computed_pages", "probe", "allocate_slots"], "str bytes None"),
    "cache_salt": (["get_computed_pages", "probe", "allocate_slots", "expect", "lease"], "str bytes None"),
    "mm_features": (["get_computed_pages", "probe", "allocate_slots"], "list None"),
}


def add_request_cases() -> None:
    for method, read in REQUEST_METHODS.items():
        kinds = "list" if method == "lease" else ""  # of page ids
        add(f"{method} request", lambda use, value, read=read: read(use.manager, value), kinds)  # type: ignore[misc]
        for attribute, (methods, kinds) in READ_BY.items():
            if method in methods:
                call = lambda use, value, read=read, name=attribute: read(use.manager, AnyRequest(**{name: value}))  # noqa: E731
                add(f"{method} request.{attribute}", call, kinds)
    for method in ("allocate_slots", "cache_pages"):  # attributes of a request that holds pages
        call = lambda use, value, read=REQUEST_METHODS[method]: read(  # noqa: E731
            use.manager, use.held_with(num_computed_tokens=value)
        )
        add(f"{method} held.num_computed_tokens", call)


add_request_cases()


def inputs_of(use: InUse, **options: Any) -> Any:
    """Return the fields of a batch's inputs."""
    sizes: dict[str, Any] = {"num_tokens": 8, "num_reqs": 2, "fields": ["token_ids"]}
    return repr(pagepool.StepInputs(use.with_batch(), **(sizes | options)))


def hash_with(algorithm: Any, **attributes: Any) -> Any:
    manager = CacheManager(8, GROUPS, 64, hashing=PageHashing(hash_algo=algorithm, hash_seed=1))
    return manager.allocate_slots(AnyRequest(**attributes), 8)


def hash_feature(**attributes: Any) -> Any:
    return hash_with("siphash128", mm_features=[SimpleNamespace(**({"mm_hash": "h"} | attributes))])


def set_ref_count(page: CachePage, ref_cnt: Any) -> None:
    page.ref_cnt = ref_cnt
    page.ref_cnt = 0


def fail_a_load() -> FailedLoads:
    """Return the loads of another manager, of which one failed."""
    manager = CacheManager(3, [CacheGroupSpec(SPEC)], 64, host_tier=HostTier(3))
    for request in (AnyRequest("first", [7] * 5), AnyRequest("other", [8] * 8)):
        manager.allocate_slots(request, 5)
        manager.free(request)
    manager.complete(manager.take_moves().number)
    manager.get_computed_pages(AnyRequest("again", [7] * 5))
    return manager.fail(manager.take_moves().number, loads=[0])


def use_of(spec: Any) -> Any:
    """Return what a spec says of itself."""
    return spec.page_size_bytes, spec.type_id, spec


def max_memory(spec: Any, max_model_len: Any) -> Any:
    """Return the most memory that a spec needs; errors are those of `cdiv`, and name its parameter."""
    return spec.max_memory_usage_bytes(max_model_len=max_model_len)


def specs_of(layer: Any = 0, **detail: Any) -> Any:
    details = [(layer, SimpleNamespace(**detail))]
    config = SimpleNamespace(get_mask_details=lambda: SimpleNamespace(items=lambda: details))
    return easydel.create_kv_cache_specs_from_config(config, 4, 1, 8, "float16")


def record(use: InUse, *requests: Any, **options: Any) -> Any:
    """Record a request, or start one and finish another."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"manager": use.manager, "path": Path(folder) / "trace", "block_size": None} | options
        if isinstance(arguments["path"], str):
            return
        with Recorder(**arguments) as recorder:
            for call, request in zip((recorder.start, recorder.finish), requests, strict=False):
                call(request)


FAILED_LOADS = fail_a_load()
GROUPS = [CacheGroupSpec(SPEC)]
TWO_SIZES = {"kv": 16, "states": 12}
TWO = [*GROUPS, CacheGroupSpec(pagepool.MambaSpec(4, ((1, 1),), "float16", checkpoint_interval=8), pool="states")]
OTHER_BATCH = RunningBatch(CacheManager(8, GROUPS, 64), PageTable(1, 16, 64))


def rows_of(manager: CacheManager, num_rows: int = 4, **options: Any) -> RunningBatch:
    return RunningBatch(manager, MultiGroupPageTable(num_rows, 64, 64, [4, 4]), **options)


SIZES: dict[str, Any] = {"page_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
HASHES = [PageHash(91, ()), PageHash(92, ())]
OTHER_POOL = PagePool(16, True)
WINDOW = pagepool.SlidingWindowSpec(**SIZES, sliding_window=5)
CHUNK = pagepool.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=5)

MANAGER_CALLS = """
use.manager.allocate_slots(use.held, num_new_tokens=<1>, num_lookahead_tokens=<0>)
use.manager.allocate_slots(use.new, 1, num_new_computed_tokens=<8>, new_computed_pages=<use.look_up()|None>)
use.manager.allocate_slots(use.new, 1, num_external_computed_tokens=<0>, num_reserved_pages=<0>)
use.manager.allocate_slots(use.new, 1, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
use.manager.get_computed_pages(use.new, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
use.manager.allocate_slots(use.held, 8, delay_cache_pages=<True|flag typed>)
use.manager.cache_pages(use.held, num_computed_tokens=<8>)
use.manager.get_num_common_prefix_pages(use.held, num_scheduled_requests=<1>)
use.manager.require_capacity(num_tokens=<8>)
use.manager.free(use.held, num_computed_tokens=<8|None typed>)
use.manager.free(use.held, seconds=<1.0|None float fraction>)
use.manager.lease(pages=<[1, 2]|list typed>, seconds=<1.0|None float fraction>)
use.manager.lease([<1>])
use.manager.commit_external(use.held, num_tokens=<0>)
use.manager.commit_external(use.held, 0, is_last=<True|flag typed>)
use.manager.fail_external(use.held, num_valid_tokens=<0>)
use.manager.fork(<use.held>, AnyRequest("fork", range(10), num_computed_tokens=<10>))
use.manager.fork(use.held, <AnyRequest("fork", range(10), num_computed_tokens=10)>)
use.manager.lease(use.held, start=<0>, stop=<None|None>, seconds=<1.0|float fraction>)
use.manager.expect(use.held, start=<0>, stop=<None|None>, seconds=<1.0|None float fraction>)
use.manager.expect_session(session_id=<"s"|str>, seconds=<1.0|None float fraction>)
use.manager.close_session(session_id=<"s"|str>)
use.manager.set_shares(shares=<{"x": 0.5}|mapping>)
use.manager.set_shares({"x": <0.5|float fraction>})
use.manager.resize(num_pages=<8|mapping>)
use.manager.vacate(preempt=<True|flag typed>)
use.manager.complete(number=<1>)
use.manager.fail(number=<1>, saves=<[0]|list>, loads=<[0]|list>)
use.manager.find_wrong_token(<use.held>, FAILED_LOADS)
use.manager.find_wrong_token(use.held, failed=<FAILED_LOADS>)
use.manager.find_wrong_token(use.new, failed=<FAILED_LOADS>)
use.manager.get_page_ids(request_id=<"held"|hashable>)
CacheManager(num_pages=<8|by_value>, kv_cache_groups=<GROUPS|list str>, max_model_len=<64>, hashing=<None|None>,
    page_pool=<None|None>, retention=<None|None>, caches=<"computed"|by_value>)
CacheManager(8, GROUPS, 64, hashing=PageHashing(hash_algo=<hash|type>))
pagepool.Retention(max_leased_share=<0.5|float>, windows=<"all"|by_value>)
pagepool.Retention(window_slack=<8|None>, window_interval=<8|None>)
CacheManager(8, GROUPS, 64, eviction=<"adaptive"|None>)
CacheManager(8, GROUPS, 64, page_pool=PagePool(8, True, eviction="adaptive"), eviction=<None|None>)
CacheManager(8, GROUPS, 64, enable_caching=<True|flag typed>)
easydel.CacheManager(8, GROUPS, 64, enable_caching=<True|flag typed>, use_eagle=<False|flag typed>)
CacheManager(8, GROUPS, 64, hashing=PageHashing(use_eagle=<False|flag typed>))
CacheManager(8, GROUPS, 64, hashing=PageHashing(use_eagle=True, hash_lookahead=<1>))
CacheManager(8, GROUPS, 64, hashing=PageHashing(hash_lookahead=<0>))
CacheManager(8, GROUPS, 64, host_tier=<None|None>)
HostTier(num_pages=<8>, policy=<"write_back"|by_value>)
CacheManager(8, [<GROUPS[0]>], 64)
CacheManager(8, [CacheGroupSpec(<SPEC|by_value>)], 64)
EngineRequest("a", prompt_token_ids=<[1]|list>).all_token_ids
EngineRequest("a", [<1>]).all_token_ids
EngineRequest("a", [1]).append_output_token_ids(token_ids=<1|list>)
"""
HASH_CALLS = """
hash_with(ALGORITHM, lora_id=<1|str bytes None>, cache_salt=<None|str bytes None>)
hash_with(ALGORITHM, token_ids=[7, <1>] * 6)
CacheManager(8, GROUPS, 64, hashing=PageHashing(hash_algo=ALGORITHM, hash_seed=<1|str bytes None>))
"""
FEATURE_CALLS = """
hash_with(hash, token_ids=[7, <1>] * 6)
hash_with("siphash128", lora_id=("name", <1|str bytes>))
hash_with("siphash128", lora_id=("name", ("path", <1>)))
hash_with("siphash128", mm_features=[<SimpleNamespace(mm_hash=1)|by_value>])
hash_feature(mm_hash=<"h"|str bytes>, modality=<None|any>)
hash_feature(placeholder_range=<None|None>)
hash_feature(placeholder_range=SimpleNamespace(offset=<1>, length=<2>))
hash_page_tokens(lambda _: 1, None, curr_page_token_ids=<[1]|list str>)
hash_request_tokens(lambda _: 1, page_size=<4>, request=<use.held>)
"""
POOL_CALLS = """
PagePool(num_pages=<8|by_value>, enable_caching=<True|flag typed>)
PagePool(8, True, eviction=<"lru"|by_value>)
PagePool(8, True, eviction=<"adaptive"|by_value>)
use.pool.get_new_pages(num_pages=<1>, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
use.pool.get_new_page_ids(num_pages=<1>, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
use.pool.free_page_ids(<[]|list>)
use.pool.free_page_ids([<1>])
use.pool.touch_page_ids(<[]|list>)
use.pool.touch_page_ids([<1>])
use.pool.evict_pages(<[]|list>)
use.pool.evict_pages([<1>])
use.pool.free_pages(<[]|list str>)
use.pool.free_pages([<use.pool.pages[1]>])
use.pool.touch(pages=<[]|list str>)
use.pool.touch([<[]|list str>])
use.pool.probe(page_hashes=<[]|list str>)
use.pool.probe([<HASH>])
use.pool.probe([HASH], kv_cache_group_ids=<[0]|list>)
use.pool.probe([HASH], [<0>])
use.pool.pages[<1>]
use.pool.pages[:<1|None>]
use.queue.popleft_n(n=<1|spoils>)
use.queue.remove(page=<use.pool.pages[9]|list str>)
use.queue.append(page=<use.pool.pages[9]|list str>)
use.queue.append_n(pages=<[]|list str>)
FreeCachePageQueue(pages=<[]|list str>)
use.pool.get_cached_page(page_hash=<HASH>, kv_cache_group_ids=<[0]|list>, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
use.pool.get_cached_page_ids(page_hash=<HASH>, kv_cache_group_ids=<[0]|list>, dp_shard_hint=<1|None>,
    data_parallel_size=<2|None>)
use.pool.get_cached_page(PageHash(<5>, <()|list>), [<0>])
use.pool.get_cached_page_ids(PageHash(<5>, <()|list>), [<0>])
use.pool.find_page_id(HASH, group_id=<0>, start=<0>, stop=<None|None>)
find_shard(16, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
find_shard_bounds(16, dp_shard_hint=<1|None>, data_parallel_size=<2|None>)
use.pool.cache_full_pages(<use.held|any>, pages=<use.pool.pages[3:]|list>, page_hashes=<[*HASHES]|list>, num_cached_pages=<0>,
    num_full_pages=<1>, page_size=<4>, kv_cache_group_id=<0>)
use.pool.cache_full_pages(<use.held>, pages=<use.pool.pages[3:]|list>, page_hashes=<[]|list>, num_cached_pages=<0>,
    num_full_pages=<1>, page_size=<4>, kv_cache_group_id=<0>)
use.pool.cache_full_page_ids(use.held, page_ids=<[3, 9]|list>, page_hashes=[*HASHES], num_cached_pages=<0>,
    num_full_pages=<1>, page_size=<4>, kv_cache_group_id=<0>)
use.pool.cache_full_page_ids(use.held, page_ids=<[3, 9]|list>, page_hashes=[], num_cached_pages=<0>,
    num_full_pages=<1>, page_size=<4>, kv_cache_group_id=<0>)
CachePage(page_id=<1>, ref_cnt=<0>, is_null=<False|flag typed>)
set_ref_count(use.pool.pages[9], ref_cnt=<0>)
setattr(use.pool.pages[3], "page_hash", <None|None>)
setattr(use.pool.pages[3], "page_hash", PageHashWithGroupId(PageHash(<5>, ()), 0))
setattr(use.pool.pages[3], "page_hash", PageHashWithGroupId(HASH, group_id=<0>))
"""
TABLE_CALLS = """
PageTable(max_num_reqs=<4>, max_num_pages_per_req=<4>, max_num_batched_tokens=<4>, sharding=<None|None>,
    donate=<True|flag typed>)
MultiGroupPageTable(max_num_reqs=<4>, max_model_len=<64>, max_num_batched_tokens=<4>, page_sizes=<[4]|list>,
    donate=<True|flag typed>)
MultiGroupPageTable(4, 64, 4, [<4>])
use.table.append_row(page_ids=<[3]|list typed>, row_idx=<1>)
use.table.add_row(page_ids=<[3]|list typed>, row_idx=<1>)
use.table.append_row([<3>], 1)
use.table.append_rows_batch([<[3]|list typed>], [<1>])
use.table.clear_row(row_idx=<0>)
use.table.move_row(src=<0>, tgt=<2>)
use.table.swap_row(src=<0>, tgt=<2>)
use.table.mark_dirty(<[0]|list mapping None typed>)
use.table.mark_dirty([<0>])
use.tables.mark_dirty(<[0]|list mapping None typed>)
use.tables.mark_dirty([<0>])
use.table.slot_mapping(rows=[<0>], positions=[<1>], page_size=<4|None typed>)
use.tables.append_row(page_ids=<[[3], [6]]|list>, row_idx=<1>)
use.tables.append_row([[3], <[6]|list typed>], 1)
use.tables.add_row([[3], [6]], row_idx=<1>)
use.tables.clear_row(row_idx=<0>)
use.tables.move_row(src=<0>, tgt=<2>)
use.tables.swap_row(src=<0>, tgt=<2>)
use.tables.append_rows_batch([[[3], <[6]|list typed>]], [<1>])
RunningBatch(manager=<use.manager>, page_table=<use.batch_table>, data_parallel_size=<1|None>)
RunningBatch(use.manager, use.batch_table, data_parallel_size=1, local_ids=<False|flag typed>)
use.batch.admit(row=<1>, token_ids=<[1, 2, 3, 4, 5]|list>, num_tokens=<None|None>, max_num_new_tokens=<None|None>,
    num_reserved_pages=<0>, num_external_tokens=<0>, num_drafts=<0>, traits=<None|None>)
use.batch.admit(1, [1, 2, 3, 4, 5], num_tokens=<3|None>, num_drafts=<0>, reserve=<"prompt"|str None>)
use.batch.admit(1, [1, 2, 3, 4, 5], traits=RequestTraits(dp_shard=<None|None>, mm_features=<None|list None>,
    cache_salt=<None|str bytes None>, lora_id=<None|str bytes None>, look_up=<True|flag typed>,
    is_preempted=<False|flag typed>))
use.batch.admit(1, [1, 2, 3, 4, 5], traits=RequestTraits(session_id=<"s"|str None>, tenant=<"x"|str None>,
    resume_at=<[4]|list mapping>))
use.batch.probe(row=<1>, token_ids=<[1, 2, 3, 4, 5]|list>, traits=<None|None>)
use.batch.probe(1, [1, 2, 3, 4, 5], traits=RequestTraits(dp_shard=<None|None>, mm_features=<None|list None>,
    cache_salt=<None|str bytes None>, lora_id=<None|str bytes None>))
use.batch.probe(1, [1, 2, <3>])
use.batch.admit(1, [1, 2, <3>])
use.batch.settle(step=<None>)
use.batch.settle(use.step, token_ids=<[9]|list None>, counts=<None|list None typed>)
use.batch.settle(use.step, [<9>], [<1>])
use.batch.settle(use.step, failed=<True|flag typed>)
inputs_of(use, num_tokens=<8>, num_reqs=<2>, depth=<2>, pad_slot=<-1>, pad_last=<-1>, packed=<False|flag typed>)
inputs_of(use, fields=<["positions"]|list>, dtypes=<None|None mapping>, order=<"given"|str>, arrays=<None|None mapping>)
use.batch.rewind(failed=<FAILED_LOADS>)
use.batch.step(rows=<[0]|list>, token_ids=<[9]|list>)
use.batch.step(rows=[<0>], token_ids=[<9>])
use.batch.plan(rows=<[3]|list typed>, num_tokens=<[1]|list typed>, num_drafts=<[0]|list typed>, step=<None|None typed>)
use.batch.plan(rows=[<3>], num_tokens=[<1>], num_drafts=[<0>])
use.batch.step([0], [9], step=<None|None typed>)
use.batch.append(rows=<[0]|list>, token_ids=<[9]|list>)
use.batch.append(rows=[<0>], token_ids=[<9>])
use.batch.step(rows=[0, <2>], token_ids=[9, <9>])
use.batch.append(rows=[0, <2>], token_ids=[9, <9>])
use.batch.trim(rows=[0, <2>], num_tokens=[6, <1>])
use.batch.release(rows=[0, <2>], seconds=[1.0, <1.0|None float fraction>])
use.batch.move_row(src=<0>, tgt=<1>)
use.batch.swap_row(src=<0>, tgt=<1>)
use.batch.get_page_ids(row=<0>)
use.batch.admit(1, [1], max_num_new_tokens=<1|None>, num_tokens=<1|None>)
use.table.append_rows_batch([[3], <[3]|list typed>], [1, <2>])
use.table.slot_mapping(rows=<[0]|list typed>, positions=<[1]|list typed>, page_size=4)
use.batch.trim(rows=<[0]|list typed>, num_tokens=<[6]|list typed>)
use.batch.trim(rows=[<0>], num_tokens=[<6>])
use.batch.release(rows=<[0]|list>)
use.batch.release(rows=[<0>])
use.batch.commit_external(row=<2>, num_tokens=<5>)
use.batch.fail_external(row=<2>, num_valid_tokens=<5>)
use.batch.fork(row=<0>, targets=<[1]|list typed>)
use.batch.fork(0, [<1>])
use.batch.expect(row=<0>, start=<0>, stop=<None|None>, seconds=<1.0|None float fraction>)
use.batch.lease(row=<0>, start=<0>, stop=<None|None>, seconds=<1.0|float fraction>)
use.batch.release([0], seconds=[<1.0|None float fraction>])
"""
SPEC_CALLS = """
use_of(FullAttentionSpec(page_size=<4>, num_kv_heads=<1>, head_size=<8>, dtype=<"float16"|type dtype>,
    use_mla=<False|flag typed>))
use_of(FullAttentionSpec(**SIZES, sliding_window=<None|None>, attention_chunk_size=<None|None>))
use_of(SlidingWindowSpec(page_size=<4>, num_kv_heads=<1>, head_size=<8>, dtype="float16", use_mla=False, sliding_window=<5>))
use_of(ChunkedLocalAttentionSpec(page_size=<4>, num_kv_heads=<1>, head_size=<8>, dtype="float16", use_mla=False,
    attention_chunk_size=<5>))
use_of(MambaSpec(4, shapes=<((1,),)|list>, dtype="float16", page_size_padded=<None|None>))
use_of(MambaSpec(4, (<(1,)|list>,), "float16"))
use_of(MambaSpec(4, ((<1>,),), "float16"))
use_of(MambaSpec(4, ((1,),), "float16", checkpoint_interval=<8|None typed>))
WINDOW.max_memory_usage_bytes(max_model_len=<100>, max_num_batched_tokens=<10>)
CHUNK.max_memory_usage_bytes(max_model_len=<100>, max_num_batched_tokens=<10>)
max_memory(SPEC, <100>)
cdiv(a=<5>, b=<4>)
usable_pages_count(num_pages=<5>)
dp_shard_for_page_id(page_id=<5>, pages_per_shard=<4>, dp_size=<4>)
dp_shard_page_bounds(shard_index=<1>, pages_per_shard=<4>)
pages_per_dp_shard(num_pages=<16>, data_parallel_size=<2|None>)
estimate_runtime_page_budget(num_pages=<16>, kv_cache_groups=<GROUPS|list>, max_model_len=<100>, max_num_batched_tokens=<10>,
    data_parallel_size=<1>)
get_kv_cache_coordinator(16, GROUPS, 64, False, True).find_longest_cache_hit(chain=<None>, max_cache_hit_length=8)
get_kv_cache_coordinator(16, GROUPS, 64, False, True).count_cached_tokens(chain=<None>, max_cache_hit_length=8)
get_kv_cache_coordinator(16, GROUPS, 64, use_eagle=<False|flag typed>, enable_caching=<True|flag typed>)
create_kv_cache_specs_from_config(object(), page_size=<4>, num_kv_heads=<1>, head_size=<8>, dtype="float16",
    use_mla=<False|flag typed>, equal_bytes=<True|flag typed>)
specs_of(mask_type=<"SLIDING"|by_value>, size=<4|by_value>, layer=<0|any>)
"""
TRACE_CALLS = """
record(use, block_size=<None|None>, manager=<use.manager>)
record(use, path=<"trace"|str>)
record(use, <use.new>)
record(use, use.new, <use.new>)
record(use, AnyRequest(request_id=<"a"|any>, num_tokens=<9>))
record(use, AnyRequest(all_token_ids=<[7] * 9|list>))
record(use, AnyRequest(lora_id=<1|str bytes None>, cache_salt=<1|str bytes None>, mm_features=<None|list None>))
replay.Scheduler(use.manager, [], batched=<True|flag typed>)
replay.TraceRecord(timestamp=<0|float>, input_length=<1>, output_length=<1>, block_size=<4>, hash_ids=(1,))
"""
EVENT_CALLS = """
publish(use, buffer_steps=<9>, hwm=<9>, data_parallel_rank=<0>,
    heartbeat=<1.0|float None typed>, topic=<""|str typed>)
publish(use, manager=<None|None>)
CacheManager(16, GROUPS, 64).enable_events(hashes_as_bytes=<False|flag typed>)
publish(use, endpoint=<"inproc://argument-edges"|by_value>)
publish(use, replay_endpoint=<None|None>, curve_secretkey=<None|None>, curve_client_keys=<None|None>)
publish(use, events=<()|list str>)
publish(use, events=[<events.BlockRemoved([1], None)>])
publish(use, events=[events.BlockRemoved([<1|any>], None)])
events.encode_batch(events.EventBatch(<0.0|float>, <[]|list str>, data_parallel_rank=<None|None>))
tell(lora_id=<None|str bytes None>, cache_salt=<None|str bytes None>)
"""

WRONG_CALLS = """
use.pool.free_pages([use.pool.pages[1]] * 2)
use.pool.free_page_ids([2, 3, 2])
use.pool.free_pages([use.pool.pages[1], use.pool.pages[4]])
use.pool.free_page_ids(np.array([3, 9], dtype=np.int32))
use.pool.free_pages([use.pool.pages[1], use.pool.null_page, use.pool.pages[1]])
use.pool.free_pages([use.pool.pages[1], OTHER_POOL.pages[1]])
use.pool.touch(([use.pool.pages[1], OTHER_POOL.pages[1]],))
use.pool.get_new_pages(13)
use.queue.remove(use.pool.null_page)
use.queue.remove(use.pool.pages[1])
use.queue.append(use.pool.null_page)
use.queue.append(use.pool.pages[9])
use.queue.append(use.pool.pages[1])
use.queue.append(CachePage(3))
use.queue.popleft_n(13)
use.pool.pages[9].decr_ref()
setattr(use.pool.pages[1], "page_hash", PageHashWithGroupId(HASH, 0))
setattr(use.pool.null_page, "page_hash", PageHashWithGroupId(HASH, 0))
setattr(use.pool.pages[3], "page_hash", HASH)
use.pool.cache_full_pages(use.held, use.pool.pages[3:0:-1], [HASH] * 2, 0, 2, 4, 0)
use.pool.cache_full_page_ids(use.held, [3, 3], [HASH, PageHash(98, ())], 0, 2, 4, 0)
use.pool.cache_full_page_ids(use.held, [1, 2], [], 1, 2, 4, 0)
use.pool.cache_full_page_ids(use.held, [3, 9, 10], [], 0, 3, 4, 0)
use.manager.allocate_slots(use.held, 1, 4, use.look_up())
use.manager.allocate_slots(use.held, 1, 1)
use.manager.allocate_slots(use.held_with(all_token_ids=[*range(14)], num_tokens=14, num_computed_tokens=13), 1)
use.manager.allocate_slots(AnyRequest(num_computed_tokens=8), 1, 4, use.look_up())
use.manager.allocate_slots(use.new, 1, 9, use.look_up())
use.manager.allocate_slots(use.new, 65)
use.manager.allocate_slots(use.new, 1, 0, CachePages(([], [])))
use.manager.allocate_slots(use.new, 1, 4, CachePages(([OTHER_POOL.pages[1]],)))
use.manager.allocate_slots(use.new, 1, 8, CachePages((use.pool.pages[4:7],)))
use.manager.allocate_slots(AnyRequest(token_ids=[8] * 9), 1, 4, CachePages(([use.pool.pages[4]],)))
use.manager.allocate_slots(AnyRequest(token_ids=[8] * 9), 1, 4, CachePages(([use.pool.pages[9]],)))
use.manager.allocate_slots(use.held_with(num_tokens=14), 4)
use.manager.allocate_slots(use.held_with(all_token_ids=[*range(10), -1, 5], num_tokens=12), 2)
use.manager.get_num_common_prefix_pages(use.held_with(status=EngineRequestStatus.WAITING), 1)
use.manager.cache_pages(use.new, 4)
use.manager.commit_external(use.new, 1)
use.manager.fail_external(use.new, 1)
use.manager.lease([1, 9])
use.manager.fork(use.new, AnyRequest("fork"))
use.manager.fork(use.held, use.held)
use.manager.fork(use.held, AnyRequest("fork", [9] * 10, num_computed_tokens=10))
use.manager.fork(use.held, AnyRequest("fork", range(10), num_computed_tokens=10, cache_salt="salt"))
use.manager.fork(use.held, AnyRequest("fork", range(10), num_computed_tokens=9))
use.manager.fork(AnyRequest("held", range(14), num_computed_tokens=13), AnyRequest("fork", range(14), num_computed_tokens=13))
use.manager.fork(use.held, AnyRequest("held", range(10), num_computed_tokens=10))
use.manager.set_shares(None)
use.manager.set_shares({1: 0.1})
use.manager.set_shares({"x": "1"})
use.manager.set_shares({"x": True})
use.manager.set_shares({"x": float("nan")})
use.manager.set_shares({"x": 0.5, "y": 0.46})
use.manager.set_shares({"x": float("inf")})
use.manager.set_shares({str(i): 0.01 for i in range(64)})
use.manager.resize(0)
use.manager.resize(10**6)
use.manager.resize({"other": 4})
use.manager.vacate()
use.two.resize(4)
use.two.resize({"kv": 4})
use.two.resize({"kv": 4, "states": 0})
HostTier(1)
HostTier(9, policy="write")
CachePages(([], [])).get_unhashed_page_ids()
CacheManager(16, [CacheGroupSpec(CHUNK)], 64, hashing=PageHashing(use_eagle=True))
CacheManager(16, GROUPS, 64, page_pool=PagePool(8, False))
CacheManager(16, [GROUPS[0], SPEC], 64)
CacheManager(16, GROUPS[0], 64, False)
(lambda m: m.allocate_slots(AnyRequest(), 1, 4, CachePages((m.page_pool.pages[4:5],))))(CacheManager(16, GROUPS, 64, False))
CacheManager(16, [CacheGroupSpec(use.held)], 64)
EngineRequest("a", "hello")
use.batch.admit(1, [1] * 65)
use.batch.admit(1, [])
use.batch.probe(1, [])
use.batch.probe(0, [1])
use.batch.probe(1, [1] * 65)
use.batch.append([0] * 59, [1] * 59)
use.batch.append([0, 2], [1])
use.batch.step([0], [1, 2])
use.batch.step([0], np.array([2**40]))
use.batch.step([0], np.array([-(2**31) - 1]))
use.batch.step([0], np.array([-6], dtype=np.int32))
use.batch.step(np.array([0, 2**40]), [1, 2])
use.batch.step(np.array([0.0]), [1])
use.batch.step(np.array([[0]]), [1])
use.batch.step([0, RaisingIndex()], [1, 2])
use.batch.append([0], [RaisingIndex()])
use.batch.plan([3], RaisingIndex())
use.batch.plan([0])
use.batch.plan([3], 5)
use.batch.plan([3], 4, step=use.step, num_drafts=-1)
use.batch.settle(use.step, [1, 2])
use.batch.settle(use.step, [9], failed=True)
use.batch.settle(use.step, None, [-1])
use.batch.admit(RaisingIndex(), [1])
use.batch.admit(1, [RaisingIndex()])
use.batch.admit(1, [1], traits=RequestTraits(session_id=7))
use.batch.admit(1, [1], traits=RequestTraits(mm_features=[SimpleNamespace(offset=0, length=2)]))
RunningBatch(use.manager, use.batch_table).admit(0, [1], traits=RequestTraits(dp_shard=0))
use.batch.fork(2, [1])
use.batch.fork(0, [1, 1])
use.batch.fork(0, [1, 2])
use.batch.fork(0, [1, 4])
use.batch.fork(0, np.array([-1], dtype=np.int32))
use.batch.fork(0, [1 << 40])
use.batch.release([0], seconds=[1, 2])
use.batch.release([0, 2], seconds=[3, "x"])
use.batch.release([0, 2], seconds=[3, -1])
use.batch.release([0, 2, 0], seconds=[1, 2, 3])
use.batch.release([0, 1], seconds=3)
use.batch.release([0, 9], seconds=3)
use.batch.release([0, 2, 2], seconds=[3, 4])
use.batch.admit(1, [1, 2], traits=RequestTraits(session_id=7, tenant="x"))
use.batch.admit(1, [1, 2], traits=RequestTraits(session_id="u", tenant=7))
use.batch.trim([3, 0], [2, 99])
use.batch.plan([3, 1])
use.batch.append([0, 1], [1, 1])
np.copyto(use.batch.num_tokens, 0)
use.batch.is_admitted.fill(True)
use.ahead.plan([6])
use.ahead.plan([0, 9], 8, 2)
use.ahead.plan([0, 0])
use.ahead.plan([0, 1], 8, 2)
use.ahead.plan([0, 6], 8, 2)
use.ahead.plan([1], 0)
use.ahead.plan([1], 7)
use.ahead.plan([2])
use.ahead.plan([3])
use.ahead.plan([4])
use.ahead.plan([5])
use.ahead.plan([0], 1, -1)
use.ahead.plan([0], 1, [-1])
use.ahead.plan([0], 1, "a")
use.ahead.plan(0)
use.ahead.plan([0], step=3)
use.ahead.plan([0], step=OTHER_BATCH.new_step())
use.ahead.plan([0], step=use.done)
use.ahead.plan([0], step=use.failed)
use.ahead.plan([1], 6, step=use.first)
use.ahead.plan([1], 2, 1, step=use.first)
use.ahead.step([4], [50])
use.ahead.append([4], [50])
use.ahead.fork(4, [6])
use.ahead.fork(0, [6])
use.ahead.trim([4], 3)
use.ahead.trim([0], 6)
use.ahead.trim([0], 0)
use.ahead.settle(use.first, [1], [1, 1])
use.ahead.settle(use.first, [1, 2, 3], [1, 1])
use.ahead.settle(use.first, [1], [1])
use.ahead.settle(use.first, [1, 2], [1, 1, 0])
use.ahead.settle(use.first, [1, 2, 3, 4], [3, 1])
use.ahead.settle(use.first, [1, 2, 3], [3, 0])
use.ahead.settle(use.first, [1, 2], [1, 1])
use.ahead.settle(use.first, [1, 2])
use.ahead.settle(use.first, [1], [2, -1])
use.ahead.settle(use.first, [-1], [1, 0])
use.ahead.settle(use.first, None, [1, 0])
use.ahead.settle(use.first, 1, [1, 0])
use.ahead.settle(use.first, [1], "a")
use.ahead.settle(use.first, [1, 2], 1)
use.ahead.settle(use.first, [1], failed=True)
use.ahead.settle(use.first, None, 0, failed=True)
use.ahead.settle(use.first, failed="yes")
use.ahead.settle(use.second, [1])
use.ahead.settle(use.full, [1])
use.ahead.settle(use.done, [1])
use.ahead.settle(use.done, failed=True)
use.ahead.settle(use.failed, [1])
use.ahead.settle(3)
use.ahead.settle(None, failed=True)
use.ahead.settle(OTHER_BATCH.new_step())
use.ahead.settle(OTHER_BATCH.new_step(), failed=True)
RunningBatch(use.manager, use.batch_table, max_steps_ahead=255)
RunningBatch(CacheManager(24, [], 32), PageTable(4, 8, 64))
RunningBatch(CacheManager(24, [], 32), MultiGroupPageTable(4, 32, 64, []))
RunningBatch(CacheManager(24, [*GROUPS, CacheGroupSpec(WINDOW)], 32), PageTable(4, 8, 64))
RunningBatch(use.manager, MultiGroupPageTable(4, 64, 64, [4, 4]))
RunningBatch(use.manager, MultiGroupPageTable(4, 64, 64, [8]))
RunningBatch(CacheManager(24, GROUPS, 32, hashing=PageHashing(hash_algo=hash)), PageTable(4, 8, 64))
RunningBatch(CacheManager(24, GROUPS, 32, False), PageTable(2, 8, 64)).admit(0, [1], traits=RequestTraits(mm_features=7))
use.batch.admit(1, [1], reserve="answer")
use.batch.admit(1, [1], reserve=np.array(["prompt", "prompt"]))
use.batch.admit(1, [1], num_drafts=-1)
use.batch.admit(1, [1], traits=RequestTraits(resume_at=[1, 2, 3, 4, 5]))
use.batch.admit(1, [1], traits=RequestTraits(resume_at=[-1]))
use.batch.admit(1, [1], traits=RequestTraits(resume_at=["1"]))
use.manager.allocate_slots(AnyRequest(tenant=7), 8)
RunningBatch(use.manager, use.batch_table).probe(0, [1], traits=RequestTraits(dp_shard=0))
use.batch.step([0, 3], [1, 2])
use.batch.lease(0, 0, 2**63 - 1, seconds=60)
use.batch.lease(0, 14, 16, seconds=60)
use.batch.lease(0, 0, 16, seconds=60)
use.manager.allocate_slots(use.new, 9, 8, use.look_up())
use.manager.allocate_slots(use.new, 50, 8, use.look_up())
CacheManager({"kv": 2**40}, GROUPS, 64)
use.two.page_pool
use.two.lease([1])
use.two.pools["kv"].find_page_id(1, 0)
use.two.pools["kv"].free_page_queue
use.two.pools["kv"].stats
use.two.pools["kv"].reset_prefix_cache()
use.two.pools["states"].free_page_ids([12])
use.two.pools["states"].evict_pages(np.array([-1]))
use.two.pools["states"].get_new_page_ids(12)
use.two.pools["states"].get_new_page_ids(1, data_parallel_size=3)
use.two.pools["states"].lease([12])
use.two.pools["states"].lease([1])
use.two.pools["states"].pages[12]
use.two.allocate_slots(use.new, 8, data_parallel_size=3)
use.two.get_computed_pages(use.new, data_parallel_size=3)
use.two.require_capacity(16, data_parallel_size=3)
rows_of(use.two, data_parallel_size=3)
use.two.require_capacity(61)
use.two.require_capacity(32, data_parallel_size=2)
use.two.allocate_slots(AnyRequest("large", range(64)), 64)
use.two.allocate_slots(AnyRequest("large", range(64)), 32, dp_shard_hint=0, data_parallel_size=2)
rows_of(use.two).admit(0, [1] * 64)
rows_of(use.two, data_parallel_size=2).admit(0, [1] * 32, traits=RequestTraits(dp_shard=0))
rows_of(use.two, 11)
CacheManager(32, TWO, 64)
CacheManager({"kv": 32}, TWO, 64)
CacheManager({"kv": 32, "state": 12}, TWO, 64)
CacheManager({"kv": 32, "states": 1}, TWO, 64)
CacheManager({"kv": 12, "states": True}, TWO, 64)
CacheManager(TWO_SIZES, TWO, 64, eviction="mru")
CacheManager(dict.fromkeys("abcde", 8), [CacheGroupSpec(SPEC, pool=name) for name in "abcde"], 64)
use.table.append_row(5, 1)
use.table.append_row(np.array(1), 1)
use.table.append_row(np.array([1.0]), 1)
use.table.append_row(np.array([True]), 1)
use.table.append_row(np.array([1], dtype=object), 1)
use.table.append_row([1] * 9, 1)
use.table.append_row(np.array([2**31]), 1)
use.table.append_row(np.array([3, -1], dtype=np.int32), 1)
use.table.append_row(np.array([-1], dtype=np.int8), 1)
use.tables.append_row([[1]], 0)
use.tables.append_row([[1], [2], [3]], 0)
use.tables.append_rows_batch([[[1], [2]], [[1]]], [0, 1])
use.tables.append_rows_batch([[[1], [2]]], [0, 1])
use.tables.append_rows_batch([[[1], [2]]], 0)
use.tables.append_rows_batch([5], [0])
use.tables.append_rows_batch(None, [0])
use.tables.append_row(None, 0)
SlidingWindowSpec(**SIZES | {"use_mla": True}, sliding_window=5)
FullAttentionSpec(**SIZES, sliding_window=8, attention_chunk_size=8)
specs.CacheSpec.merge([])
WINDOW.merge([SPEC, WINDOW])
WINDOW.merge([WINDOW, SlidingWindowSpec(**SIZES, sliding_window=16)])
SPEC.merge([FullAttentionSpec(**SIZES, sliding_window=32), FullAttentionSpec(**SIZES, sliding_window=64)])
SPEC.merge([FullAttentionSpec(**SIZES, sliding_window=32), FullAttentionSpec(**SIZES, attention_chunk_size=32)])
specs_of(mask_type="LINEAR", size=None, chunks=None)
specs_of(mask_type="SLIDING", size=None, chunks=None)
specs_of(mask_type="CHUNK", size=None, chunks=None)
CacheManager({"kv": 16, "states": 8}, [*TWO, CacheGroupSpec(WINDOW)], 64, retention=Retention(windows="all"))
MambaSpec(4, ((1,),), "float16", checkpoint_interval=0)
MambaSpec(4, ((1,),), "float16", checkpoint_interval="odd")
MambaSpec(4, (), "float16")
MambaSpec(4, ((16, 64), (3, 32)), "float16", page_size_padded=2239)
replay.TraceRecord(float("nan"), 1, 1, (1,))
"""

for calls in (MANAGER_CALLS, FEATURE_CALLS, POOL_CALLS, TABLE_CALLS, SPEC_CALLS, TRACE_CALLS, WRONG_CALLS):
    add_calls(calls)
for algorithm in ("siphash128", "sha256", *(["sha256_cbor"] if find_spec("cbor2") else [])):
    add_calls(HASH_CALLS.replace("ALGORITHM", repr(algorithm)))
if find_spec("msgspec") and find_spec("zmq"):
    from pagepool import events
    from pagepool.events.publisher import EventPublisher

    def publish(use: InUse, events: Any = (), **options: Any) -> None:
        with EventPublisher(**({"endpoint": "inproc://argument-edges"} | options)) as publisher:
            publisher.publish(events)

    def tell(**attributes: Any) -> None:
        manager = CacheManager(16, GROUPS, 64, hashing=PageHashing(hash_seed=1))
        manager.enable_events()
        manager.allocate_slots(AnyRequest(**attributes), 8)
        events.encode_batch(events.EventBatch(0.0, manager.take_events()))

    add_calls(EVENT_CALLS)
NAMES.update(vars(easydel) | vars(specs) | vars(pagepool) | globals())

if __name__ == "__main__":
    write_table()

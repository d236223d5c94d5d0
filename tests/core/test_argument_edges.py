"""Arguments of any kind: a typed error and an unchanged state, or the result of the equal Python int. See `argument_cases`."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from admissions import admission
from argument_cases import (
    CASES,
    CODES,
    HUGE,
    REQUEST_METHODS,
    SPEC,
    TABLE,
    WRONG,
    AnyRequest,
    InUse,
    UsersOwn,
    describe_errors,
    find_errors,
)
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequestStatus,
    FullAttentionSpec,
    MambaSpec,
    PageHashing,
    PagePool,
    PageTable,
    RequestTraits,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
)
from pagepool.arguments import ATTRIBUTES
from pagepool.compat.easydel import estimate_runtime_page_budget
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.router import PrefixIndex, PrefixRouter
from pagepool.specs import cdiv

SCALARS = (np.uint8, np.int8, np.uint64, np.int64)


@pytest.mark.parametrize("name", CASES)
def test_any_value(name: str) -> None:
    found = list(find_errors(name))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash], ids=str)
def test_the_table_of_errors(hash_algo: Any) -> None:
    """A manager's are the same however it hashes."""
    table = {
        call: errors
        for calls, errors in re.findall(r"((?:\S.*\n)+)((?: .*\n)+)", TABLE.read_text("utf-8"))
        for call in calls.splitlines()
    }
    for name in [*CASES, *WRONG]:
        if hash_algo == "siphash128" or name.startswith("use.manager."):
            found = describe_errors(name, hash_algo=hash_algo)
            assert found == table.get(CODES.get(name, name), ""), "python tests/models/argument_cases.py"
            assert found or name in CASES, f"{name} is not refused"


# Eviction policies.


class EqualToAny(str):
    """A name that compares equal to each policy."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __str__(self) -> str:
        return "adaptive"


@pytest.mark.parametrize("name", ["lru", "adaptive"])
@pytest.mark.parametrize("kind", [str, np.str_, EqualToAny], ids=lambda kind: kind.__name__)
def test_a_policys_name_may_be_of_a_subclass(name: str, kind: type[str]) -> None:
    pool = PagePool(8, True, eviction=kind(name))
    manager = CacheManager(8, [CacheGroupSpec(SPEC)], 64, page_pool=pool, eviction=name)
    assert (type(pool.eviction), pool.eviction, manager.page_pool.eviction) == (str, name, name)


@pytest.mark.parametrize("name", ["", "LRU", "lru ", "fifo", EqualToAny("fifo"), "\ud800", "a\0b"], ids=ascii)
@pytest.mark.parametrize("enable_caching", [True, False])
def test_an_unknown_policy_is_refused(name: str, enable_caching: bool) -> None:
    message = r"^eviction: got '.*', allowed: 'lru', 'adaptive'$"
    with pytest.raises(ArgumentError, match=message):
        PagePool(8, enable_caching, eviction=name)
    with pytest.raises(ArgumentError, match=message):
        CacheManager(8, [CacheGroupSpec(SPEC)], 64, enable_caching, eviction=name)


@pytest.mark.parametrize("own", ["lru", "adaptive"])
def test_a_manager_of_a_pool_has_its_policy(own: str) -> None:
    pool, groups = PagePool(8, True, eviction=own), [CacheGroupSpec(SPEC)]
    for eviction in (None, own):
        manager = CacheManager(8, groups, 64, page_pool=pool, eviction=eviction)
        assert manager.page_pool is pool
        assert f"eviction='{own}'" in repr(pool)
        assert f"eviction='{own}'" in repr(manager)
    for other in ("adaptive" if own == "lru" else "lru", "fifo"):
        expected = f"eviction: got {other!r}, allowed with page_pool: None, or its own, {own!r}"
        with pytest.raises(ArgumentError) as caught:
            CacheManager(8, groups, 64, page_pool=pool, eviction=other)
        assert str(caught.value) == expected


# Counts.


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("warns", [True, False], ids=["warnings are errors", "numpy wraps around silently"])
def test_sums_of_small_counts_do_not_wrap_around(scalar: Any, warns: bool) -> None:
    """A prompt of 360 tokens in chunks of 120, and drafts: sums leave int8 and uint8."""
    decisions: list[list[Any]] = []
    for number in (int, scalar):
        manager = CacheManager(200, [CacheGroupSpec(SPEC)], 1000, hashing=PageHashing(hash_seed=1))
        request: Any = AnyRequest("long", range(360))
        decided = []
        for start in range(0, 360, 120):
            request.num_computed_tokens = np.int64(start) if number is not int and start > 120 else number(start)
            with np.errstate(over="warn" if warns else "ignore"):
                pages = manager.allocate_slots(request, number(120), number(0), None, number(100))
            decided.append(pages.get_page_ids())
        manager.check()
        decisions.append([decided, manager.get_page_ids("long"), len(manager.page_pool.cached_page_hash_to_page)])
    assert decisions[0] == decisions[1]
    assert decisions[0][2] == 360 / 4


@pytest.mark.parametrize("scalar", [np.uint8, np.int8, np.int64])
def test_a_windowed_request_counts_in_numpy(scalar: Any) -> None:
    """Positions outside the window are computed by differences, which wrap around for unsigned numbers."""
    spec = SlidingWindowSpec(4, 1, 8, "float16", False, sliding_window=8)
    held = []
    for number in (int, scalar):
        manager = CacheManager(64, [CacheGroupSpec(spec)], 1000, hashing=PageHashing(hash_seed=1))
        request: Any = AnyRequest("long", range(100))
        for start in range(0, 100, 10):
            request.num_computed_tokens, request.num_tokens = number(start), number(100)
            manager.allocate_slots(request, number(10))
        held.append(manager.get_page_ids("long"))
    assert held[0] == held[1]
    assert 0 in held[0][0]


@pytest.mark.parametrize("status", [np.int64(4), np.uint8(4), 4, EngineRequestStatus.RUNNING], ids=repr)
def test_a_status_may_be_numpys(status: Any) -> None:
    use = InUse()
    use.held.status = status
    assert use.manager.get_num_common_prefix_pages(use.held, np.int8(1)) == [3]
    use.new.status = type(status)(5)
    pages, num_hit_tokens = use.manager.get_computed_pages(use.new)
    use.manager.allocate_slots(use.new, 1, num_hit_tokens, pages)
    assert use.manager.stats().preempted_queries.num_requests == 1


def test_a_status_that_is_an_array_is_none() -> None:
    use = InUse()
    use.new.status = np.array([4, 5])
    with pytest.raises(ArgumentTypeError, match=r"status: got array\(\[4, 5\]\), allowed: an EngineRequestStatus"):
        use.manager.get_computed_pages(use.new)


# Ints that are too large to convert to text.


@pytest.fixture(params=[640, 4300, 0])
def max_digits(request: pytest.FixtureRequest) -> Iterator[int]:
    """Python's lowest limit, the default one, and none."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(request.param)
    yield request.param
    sys.set_int_max_str_digits(before)


def test_batches_and_seeds_have_that_limit_too(max_digits: int) -> None:
    batch = RunningBatch(CacheManager(16, [CacheGroupSpec(SPEC)], 64), PageTable(2, 16, 64))
    for options in ({"lora_id": HUGE}, {"lora_id": ("name", HUGE)}, {"cache_salt": HUGE}):
        with pytest.raises(ArgumentError, match="an int of 16610 bits"):
            batch.admit(0, [1, 2, 3], **admission(**options))
    assert not batch.is_admitted.any()
    for seed, message in ((HUGE, "an int of 16610 bits"), ("\ud800", "text that is not valid Unicode")):
        with pytest.raises(ArgumentError, match=f"hash_seed: got {message}"):
            CacheManager(16, [CacheGroupSpec(SPEC)], 64, hashing=PageHashing(hash_seed=seed))


def test_numbers_in_messages_have_that_limit(max_digits: int) -> None:
    batch = RunningBatch(CacheManager(16, [CacheGroupSpec(SPEC)], 64), PageTable(2, 16, 64))
    huge = "got an int of 16610 bits, allowed"
    with pytest.raises(ArgumentError, match=f"dp_shard: {huge} without data_parallel_size: None"):
        batch.admit(0, [1, 2, 3], traits=RequestTraits(dp_shard=HUGE))
    with pytest.raises(ArgumentError, match=f"max_age: {huge}: at least 0.0"):
        PrefixRouter(PrefixIndex(4), [0], max_age=-HUGE)
    assert PrefixRouter(PrefixIndex(4), [0], max_age=HUGE).choose("a", [1, 2, 3, 4, 5]).worker == 0
    with pytest.raises(ArgumentError, match="pad_slot: got an int beyond 64 bits, allowed: ints that fit int32"):
        StepInputs(batch, num_tokens=8, num_reqs=2, fields=["token_ids"], pad_slot=HUGE)


@pytest.mark.parametrize("value", [np.array([]), np.array([True]), [], "no", 2])
def test_vision_is_a_flag(value: Any) -> None:
    use = InUse()
    use.new.has_vision = value
    with refused(use.state, ArgumentTypeError, "has_vision: got .*, allowed: True or False"):
        use.manager.get_computed_pages(use.new)


# Requests whose attributes call back.


class Busy(AnyRequest):
    """A request of which reading the number of tokens, or the salt, does something with its own pages, once."""

    act: Any = None

    @property
    def cache_salt(self) -> None:
        act, self.act = self.act, None
        if act is not None:
            act(self)

    @property
    def num_tokens(self) -> int:
        _ = self.cache_salt
        return len(self.all_token_ids)

    @num_tokens.setter
    def num_tokens(self, _: int) -> None:
        """Ignore what is set."""


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_request_that_allocates_while_it_is_read_is_refused(enable_caching: bool) -> None:
    manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, enable_caching=enable_caching, hashing=PageHashing(hash_seed=1))
    request: Any = Busy("new")
    request.act = lambda each: manager.allocate_slots(each, 5)
    if enable_caching:
        with pytest.raises(ArgumentError, match="request 'new': got attributes that allocate or free its pages"):
            manager.allocate_slots(request, 9)
        assert manager.get_page_ids("new") == ([1, 2],)
    else:  # nothing is read after the check
        assert manager.allocate_slots(request, 9) is not None
    manager.check()
    manager.free(request)
    assert manager.page_pool.get_num_free_pages() == 15


def test_a_request_that_frees_while_it_is_read_is_refused() -> None:
    manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, hashing=PageHashing(hash_seed=1))
    request: Any = Busy("new")
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    request.act = manager.free
    with pytest.raises(ArgumentError, match="request 'new': got attributes that allocate or free its pages"):
        manager.allocate_slots(request, 5)
    manager.check()
    assert manager.page_pool.get_num_free_pages() == 15


@pytest.mark.parametrize(
    ("call", "act"),
    [
        (lambda manager, request: manager.cache_pages(request, 8), lambda manager, request: manager.free(request)),
        (lambda manager, request: manager.commit_external(request, 4), lambda manager, request: manager.free(request)),
        (
            lambda manager, request: manager.free(request, num_computed_tokens=4),
            lambda manager, request: (manager.free(request), manager.allocate_slots(request, 4)),
        ),
    ],
    ids=["cache_pages", "commit_external", "free"],
)
def test_pages_are_those_from_before_attributes_were_read(call: Any, act: Any) -> None:
    manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, hashing=PageHashing(hash_seed=1))
    request: Any = Busy("new")
    manager.allocate_slots(request, 8, delay_cache_pages=True)
    request.num_computed_tokens = 4
    request.act = lambda each: act(manager, each)
    with contextlib.suppress(ArgumentError):
        call(manager, request)
    manager.check()
    request.act = None
    manager.free(request)
    assert manager.page_pool.get_num_free_pages() == 15
    manager.check()


def test_a_fork_is_not_begun_by_its_own_attributes() -> None:
    manager = CacheManager(16, [CacheGroupSpec(SPEC)], 64, hashing=PageHashing(hash_seed=1))
    request: Any = AnyRequest("source")
    copy: Any = Busy("copy", num_computed_tokens=4)
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 4
    copy.act = lambda each: manager.fork(request, each)
    with pytest.raises(ArgumentError, match="request 'copy': got attributes that allocate or free its pages"):
        manager.fork(request, copy)
    manager.check()
    manager.free(copy)
    manager.free(request)
    assert manager.page_pool.get_num_free_pages() == 15


# Requests with missing attributes.

LOOK_UP = {"request_id", "all_token_ids", "num_tokens", "sampling_params", "status"}
READ_BY = {
    "get_computed_pages": LOOK_UP,
    "probe": LOOK_UP,
    "allocate_slots": {"request_id", "all_token_ids", "num_tokens", "num_computed_tokens"},
    "cache_pages": {"request_id", "num_computed_tokens"},
    "expect": {"request_id", "all_token_ids", "num_tokens"},
    "lease": {"request_id", "all_token_ids", "num_tokens"},
    "free": {"request_id"},
    "free_page_hashes": {"request_id"},
    "get_num_common_prefix_pages": {"request_id", "status"},
}


@pytest.mark.parametrize("method", REQUEST_METHODS)
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_a_request_without_an_attribute(method: str, attribute: str) -> None:
    """The error names the attribute if the method reads it; otherwise there is no error."""
    use, whole = InUse(), InUse()
    before = use.state()
    is_new = method in ("get_computed_pages", "probe", "allocate_slots")
    request, other = (use.new, whole.new) if is_new else (use.held, whole.held)
    delattr(request, attribute)
    if attribute in READ_BY[method]:
        message = f"request: got AnyRequest without {attribute}, allowed: one with request_id, all_token_ids"
        with pytest.raises(ArgumentTypeError, match=message):
            REQUEST_METHODS[method](use.manager, request)
        assert use.state() == before
    else:
        result = REQUEST_METHODS[method](use.manager, request)
        assert str(result) == str(REQUEST_METHODS[method](whole.manager, other))


@pytest.mark.parametrize("error", [UsersOwn("own"), TypeError("own"), KeyError("own"), IndexError("own")], ids=repr)
@pytest.mark.parametrize("name", ["request_id", "all_token_ids", "num_tokens"])
@pytest.mark.parametrize("method", REQUEST_METHODS)
def test_what_a_property_raises_comes_out(method: str, name: str, error: Exception) -> None:
    def fail(_: object) -> Any:
        raise error

    if name in READ_BY[method]:
        whole = vars(AnyRequest())
        members = {key: value for key, value in whole.items() if key != name} | {name: property(fail)}
        use = InUse()
        with refused(use.state, type(error), "own"):
            REQUEST_METHODS[method](use.manager, type("Request", (), members)())


def test_an_attribute_that_a_property_misses_is_not_the_requests() -> None:
    members = vars(AnyRequest()) | {"sampling_params": property(lambda request: request.own_params)}
    with pytest.raises(AttributeError, match="own_params") as caught:
        InUse().manager.get_computed_pages(type("Request", (), members)())
    assert not isinstance(caught.value, ArgumentTypeError)


# Sizes.


@pytest.mark.parametrize("scalar", SCALARS)
def test_sizes_of_specs_are_pythons(scalar: Any) -> None:
    """Products of small types would wrap around, and match another pool's."""
    spec = FullAttentionSpec(scalar(100), scalar(100), scalar(100), "float16", False)
    assert spec.page_size_bytes == 4_000_000
    assert spec == FullAttentionSpec(100, 100, 100, "float16", False)
    assert all(type(size) is int for size in (spec.page_size, spec.num_kv_heads, spec.head_size))
    assert spec.max_memory_usage_bytes(max_model_len=scalar(101)) == 8_000_000
    assert MambaSpec(scalar(1), ((scalar(100), scalar(100)),), "float16").page_size_bytes == 20_000
    assert cdiv(scalar(100), scalar(3)) == 34


def test_shards_of_a_pool_are_not_counted_one_by_one() -> None:
    estimate = estimate_runtime_page_budget(
        num_pages=2**60,
        kv_cache_groups=[CacheGroupSpec(SPEC)],
        max_model_len=8,
        max_num_batched_tokens=8,
        data_parallel_size=2**58,
    )
    assert estimate.max_num_seqs == 2**59 - 1  # shards of 4 pages hold two requests of 2, the first, with the null page, one

"""The core after ctypes overwrote its memory: check() finds the errors, and wrapping counters do no harm."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from argument_cases import SPEC
from hybrids import WINDOW, make_manager
from overwriting import overwrite
from settings import NUM_OPERATIONS

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    PageHash,
    PageHashWithGroupId,
    PagePool,
    PageTable,
    RunningBatch,
)
from pagepool._core import (
    CONSTANTS,
    CacheGroups,
    EntryJournal,
    HashChain,
    PageIds,
    PageRules,
    PageStore,
    TokenSpan,
    keep_token_ids,
    locate_numbers,
    locate_records,
)
from pagepool.errors import ArgumentError, IntegrityError

NO_GROUP, NOT_FREE, TWIN, NEVER = CONSTANTS.NO_GROUP, CONSTANTS.NOT_FREE, CONSTANTS.TWIN, CONSTANTS.NEVER
PART, SET_SIZE = CONSTANTS.PART, CONSTANTS.SET_SIZE
NUM_PAGES, NUM_SHARDS = 16, 4
EQUAL_PAGES = (1, 2, 3, 8)
FIRST_PAGES = (1, 8)
"""The pages cached first in their shards."""


class Memory:
    """The memory of a pool, or of a holder: arrays by name, with fields as attributes, and numbers."""

    arrays: dict[str, Any]

    def __init__(self, owner: Any) -> None:
        places = locate_records(owner) if isinstance(owner, PageStore) else locate_numbers(owner)
        self.__dict__["arrays"] = {name: array_at(*place) for name, place in places.items()}

    def __getattr__(self, name: str) -> Any:
        return self.arrays[name] if self.arrays[name].ndim else self.arrays[name].item()

    def __setattr__(self, name: str, value: int) -> None:
        self.arrays[name][()] = value


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array of this memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(address) if num_bytes else b""
    return np.frombuffer(memory, dtype).reshape(shape).view(np.recarray if dtype.names else np.ndarray)


def make_pool(eviction: str = "lru") -> tuple[PagePool, Any]:
    """Return a pool with held and free pages, cached alone, with equals, with a term, not at all, in shards, and its memory. A
    policy that remembers pages remembers some.
    """
    pool = PagePool(NUM_PAGES, True, eviction=eviction)
    for page_id in pool.get_new_page_ids(NUM_PAGES - 1).tolist():
        pool.pages[page_id].page_hash = PageHashWithGroupId(PageHash(1000 + page_id, ()), 0)
        pool.free_page_ids([page_id])
    pool.free_page_ids(sorted(pool.get_new_page_ids(NUM_PAGES - 1)))
    keep_token_ids(pool.store, 2)
    pool.get_new_page_ids(0, dp_shard_hint=0, data_parallel_size=NUM_SHARDS)
    pool.get_new_page_ids(7)
    pool.touch_page_ids([6])
    for page_id, value in (*((page_id, 5) for page_id in EQUAL_PAGES), (4, 6), (5, 7), (9, 8)):
        pool.pages[page_id].page_hash = PageHashWithGroupId(PageHash(value, ()), value % 2)
    pool.free_page_ids([3, 4])
    chain = HashChain(1, bytes(16))
    chain.append_key(7)
    assert TokenSpan().of_request(pool.store, CacheGroups([(PageRules(1), 1, 1)]), chain, 2).expect(3.0) == 1
    memory = Memory(pool.store)
    assert (memory.num_pages, memory.num_free, memory.num_shards) == (NUM_PAGES, pool.get_num_free_pages(), NUM_SHARDS)
    assert memory.pages.ref_cnt[:NUM_PAGES].tolist() == pool.ref_counts().tolist()
    pool.check()
    return pool, memory


Number = tuple[Any, Any]
"""An array, and an index."""


def numbers_in(array: Any, names: str, is_chosen: Any) -> Iterator[Number]:
    """Yield the numbers of chosen items."""
    yield from ((array[name], i) for i in np.flatnonzero(is_chosen).tolist() for name in names.split())


def numbers_that_matter(memory: Memory) -> Iterator[Number]:
    """Yield the numbers of a pool that others contradict."""
    pages = memory.pages[:NUM_PAGES]
    is_cached, is_free = pages.group != NO_GROUP, (pages.next_free != NOT_FREE) & (np.arange(NUM_PAGES) > 0)
    is_twin = is_cached & (pages.group & TWIN != 0)
    yield from numbers_in(pages, "key_lo", is_cached)
    yield from numbers_in(pages, "key_hi", is_twin)  # the upper half of a key stands only in its page, unless others are equal
    yield from numbers_in(pages, "ref_cnt group", [True] * NUM_PAGES)
    yield from numbers_in(memory.pages, "prev_free next_free", [True] * len(memory.pages))
    for links in (memory.twins, memory.shard_twins, memory.shard_firsts):
        yield from numbers_in(links, "prev next", is_twin)
    yield from numbers_in(memory.shard_links, "prev next", [*is_free, *[True] * (len(memory.shard_links) - NUM_PAGES)])
    yield from numbers_in(memory.slots, "tag", memory.slots.page_id > 0)
    yield from numbers_in(memory.slots, "page_id", [True] * len(memory.slots))
    yield from ((memory.shard_num_free, shard) for shard in range(NUM_SHARDS))
    yield from ((memory.num_free_by_term, term) for term in range(1, NEVER + 1))
    yield from ((memory.arrays[f"num_{name}"], ()) for name in ("free", "keys", "entries", "held_free"))
    yield memory.arrays["free_terms"], ()


def write(number: Number, value: float) -> None:
    array, i = number
    array[i] = np.array(value).astype(array.dtype)


def assert_found(pool: PagePool, number: Number, value: float) -> None:
    """Assert that a wrong value is found, and that all is right again without it."""
    old = number[0][number[1]].item()
    write(number, value)
    with pytest.raises(IntegrityError) as caught:
        pool.check()
    assert "None" not in str(caught.value)
    write(number, old)
    pool.check()


def share_of(values: Iterable[Any]) -> Iterator[Any]:
    """Yield every fifth of the values, or all of them in long runs (PAGEPOOL_TEST_OPERATIONS)."""
    return itertools.islice(values, 0, None, max(1, 100_000 // NUM_OPERATIONS))


def can_be(memory: Memory, number: Number, value: int) -> bool:
    """Whether nothing contradicts that value: the number of holders is known to them alone, and any page that is first in its
    shard may be first of all.
    """
    array, i = number
    old = array[i].item()
    if np.array(value).astype(array.dtype) == old:
        return True
    if np.shares_memory(array, memory.pages.ref_cnt):
        return old > 0 and 0 < value < (1 << 31) - 1
    return np.shares_memory(array, memory.slots.page_id) and {old, value} <= set(FIRST_PAGES)


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_each_number_that_is_overwritten_is_found(eviction: str) -> None:
    pool, memory = make_pool(eviction)
    values = [-(1 << 31), -2, -1, 0, 1, 2, 3, 7, 8, 9, NUM_PAGES - 1, NUM_PAGES, NUM_PAGES + 1, TWIN, TWIN + 1, (1 << 31) - 1]
    for number, value in share_of(itertools.product(numbers_that_matter(memory), values)):
        if not can_be(memory, number, value):
            assert_found(pool, number, value)


def test_each_number_of_tenants_that_is_overwritten_is_found() -> None:
    manager = CacheManager(8, [CacheGroupSpec(SPEC)], 64)
    manager.set_shares({"x": 0.2, "y": 0.2})
    for i, tenant in enumerate(("x", "y", None, "x")):
        request = EngineRequest(f"{i}", [i] * SPEC.page_size, tenant=tenant)
        assert manager.allocate_slots(request, SPEC.page_size) is not None
        if i != 1:
            manager.free(request)
    pool, memory = manager.page_pool, Memory(manager.page_pool.store)
    charged = memory.tenants[1:].tolist()
    assert sorted(charged) == [0, 1, 1, 2, 255, 255, 255]
    for page_id, value in itertools.product(range(1, 8), (0, 1, 2, 3, 63, 64, 254, 255)):
        if charged[page_id - 1] != value:
            assert_found(pool, (memory.tenants, page_id), value)
    for counts, tenant in itertools.product((memory.num_charged, memory.num_free_by_tenant), (0, 1, 2, 3, 63)):
        for value in (-1, counts[tenant] + 1, counts[tenant] - 1):
            assert_found(pool, (counts, tenant), value)


def numbers_of_policy(memory: Memory) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the numbers of a policy that others contradict, and whether a value cannot be.

    Marks are parts, and times above them; those of held pages are the parts to come.
    """
    for page_id in range(NUM_PAGES):
        is_free, part = page_id and memory.pages.next_free[page_id] != NOT_FREE, memory.marks[page_id] & PART
        allowed = [part] if is_free else range(memory.num_parts)
        yield memory.marks, page_id, lambda mark, allowed=allowed: mark & PART not in allowed or mark & PART == 0 != mark
    num_sets = len(memory.ghosts) // SET_SIZE
    for i in np.flatnonzero(memory.ghosts.tag).tolist():
        yield memory.ghosts.tag, i, lambda tag, home=i // SET_SIZE: tag and tag * num_sets >> 32 != home
        yield memory.ghosts.mark, i, lambda mark: mark & PART == 0
    for i in range(PART + 1):
        yield memory.policy_counts, i, lambda count: True
    at_least = [memory.learned.num_requests_then.item(), 0, 0, 0]
    for i, least in enumerate(at_least, PART + 1):
        yield memory.policy_counts, i, lambda count, least=least: not least <= count < 1 << 60


def test_each_number_of_a_policy_that_is_overwritten_is_found() -> None:
    pool, memory = make_pool("adaptive")
    assert memory.ghosts.tag.any()
    values = [0, 1, 2, 3, 4, 5, 7, 1 << 18, (1 << 18) + 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]
    for array, i, is_wrong in numbers_of_policy(memory):
        old = array[i].item()
        for value in values if array.dtype.itemsize == 8 else values[:-2]:
            if value != old and is_wrong(value):
                assert_found(pool, (array, i), value)
                continue
            write((array, i), value)
            pool.check()
            write((array, i), old)


LEARNED: dict[str, list[float]] = {
    "num_released epoch call num_requests_then": [-1, (1 << 63) - 1],
    "alive": [-(1 << 63), (1 << 63) - 1],
    "exposed reused values": [-1.0, 1e30, math.inf, math.nan],
}
"""What cannot have been learned: values of fields."""


def test_what_a_policy_cannot_have_learned_is_found() -> None:
    pool, memory = make_pool("adaptive")
    for names, values in LEARNED.items():
        places = [(memory.learned[name].reshape(-1), i) for name in names.split() for i in range(memory.learned[name].size)]
        for (learned, i), value in share_of(itertools.product(places, values)):
            old, learned[i] = learned[i].item(), value
            with pytest.raises(IntegrityError, match=r"^what the eviction policy 'adaptive' has counted cannot be$"):
                pool.check()
            learned[i] = old
    pool.check()


DAMAGES = {
    "pool.pages[9].ref_cnt = 4": (
        rf"^page 9 \(ref count 4, free-queue links 8 and 3, cached for group 0 under {8:#034x}\) is in"
    ),
    "pool.pages[9].key_lo, pool.pages[9].group = 6, 0": "prefix index, which is not its own|a look-up of its hash finds page 4",
    "pool.page_tokens[4 * pool.tokens_width] = 3": "^page 4 .* has 3 token ids, allowed: 0 to 2$",
    "one, two, three, other = [pool.twins[page_id] for page_id in (1, 2, 3, 8)];"
    "one.prev = one.next = 2; two.prev = two.next = 1; three.prev = three.next = 8; other.prev = other.next = 3": (
        r"^page 3 .*: look-ups of its hash find pages \[1, 2\], allowed: this one too$"
    ),
    "one, other = pool.shard_firsts[1], pool.shard_firsts[8]; one.prev = one.next = 1; other.prev = other.next = 8": (
        "^page 8 .* is linked to 8 and 8, allowed: the ring of pages of equal content that are first in their shard, or -1$"
    ),
    "one, two, three = [pool.shard_twins[page_id] for page_id in (1, 2, 3)];"
    "one.next, three.next, two.next = 3, 2, 1; one.prev, three.prev, two.prev = 2, 1, 3": (
        "^page 3 .* is among the twins of its shard in the place of page 2$"
    ),
    "pool.pages[8].next_free, pool.pages[0].prev_free = 0, 8": (
        "^7 pages are in the free queue, up to page 8, the pool counts 10$"
    ),
    "journal.notes[3].origin.place = -1": "^page 3 .* has place -1 and context 1, allowed: at least 0, and 0",
    "journal.notes[3].origin.context = 2": "^page 3 .* has place 2 and context 2, .* 0 to 1$",
    "journal.contexts[1].num_holders = -1": "^context 1 has 6 users and -1 holders",
    "journal.contexts[1].num_users = 5": "^the contexts have 5 users, 6 pages are cached$",
    "journal.notes[8].new.prev = 9": "^page 8 follows page 7 .* in the journal, and does not link back$",
    "journal.notes[7].new.next = 6": "^page 6 follows page 7 .* in the journal, and does not link back$",
    "first, last, new = [journal.notes[page_id].new for page_id in (0, 9, 6)]; last.next = first.prev = 6; "
    "new.prev, new.next = 9, 0": "^page 6 .* is in the journal, and no look-up finds it$",
    "journal.num_new = 2": "^3 keys are in the journal, up to page 9, the pool counts 2$",
    "journal.num_removed = -1": "^the journal counts -1 keys that went, allowed: fewer than pages, or none$",
    "journal.is_cleared = 1": "^the journal counts 2 keys that went",
    "journal.is_cleared, journal.num_removed = 1, 0": "^3 keys of the prefix index are new since all went, the pool counts 6$",
}
"""Assignments to fields, and what `check` says of them."""


@pytest.mark.parametrize("assignments", DAMAGES)
def test_what_is_wrong_is_named(assignments: str) -> None:
    pool, memory = make_journal() if "journal" in assignments else make_pool()
    exec(assignments, {"pool": memory, "journal": memory})
    with pytest.raises(IntegrityError, match=DAMAGES[assignments]):
        pool.check()


def test_a_slot_that_no_lookup_comes_to_is_found() -> None:
    """Its home slot is empty, and it replaces the slot before that one, which ends the longest probe sequence."""
    pool, memory = make_pool()
    slots = list(memory.slots)
    taken = next(slot for slot in slots if slot.page_id == 9)
    home = int(taken.tag) >> memory.home_shift
    place = next(i % len(slots) for i in range(home - 1, home - len(slots), -1) if not slots[i].page_id)
    slots[place].tag, slots[place].page_id, taken.page_id = taken.tag, 9, 0
    with pytest.raises(
        IntegrityError, match=r"^page 9 .* is named by slot \d+ of the prefix index, where no look-up comes to$"
    ):
        pool.check()


def test_a_page_cached_without_prefix_caching_is_found() -> None:
    pool = PagePool(8, False)
    Memory(pool.store).pages.group[3] = 0
    with pytest.raises(IntegrityError, match=r"^page 3 .*: look-ups of its hash find pages \[\], allowed: this one too$"):
        pool.check()


# The journal.


def make_journal() -> tuple[PagePool, Any]:
    """Return a pool with reported and unreported changes, and the memory of its journal."""
    pool = PagePool(NUM_PAGES, True)
    EntryJournal(pool.store).start()
    chain = HashChain(2, bytes(16))
    chain.extend(list(range(16)))
    context = EntryJournal(pool.store).add_context()
    pool.store.enter_pages(PageIds([1, 2, 3, 4, 5]), chain, 0, 0, context)
    EntryJournal(pool.store).take_changes()
    pool.store.drop([2, 5])
    pool.store.enter_pages(PageIds([0, 7, 0, 0, 0, 8, 9]), chain, 1, 0, context)
    memory = Memory(pool.store)
    assert (memory.num_contexts, memory.num_new, memory.num_removed, memory.is_cleared) == (2, 3, 2, 0)
    assert (memory.contexts[context].num_users, memory.notes[8].origin.place, memory.notes[0].new.next) == (6, 5, 7)
    pool.check()
    return pool, memory


def test_each_number_of_a_journal_that_is_overwritten_is_found() -> None:
    pool, memory = make_journal()
    numbers = list(numbers_in(memory.notes.new, "prev next", np.isin(np.arange(NUM_PAGES), (0, 6, 7, 8, 9))))
    counts = [(memory.arrays["num_contexts"], ()), (memory.contexts.num_users, 1)]
    values = [-(1 << 31), -2, -1, 0, 1, 2, 3, 7, 8, 9, NUM_PAGES - 1, NUM_PAGES, (1 << 31) - 1]
    for (array, i), value in itertools.product([*numbers, (memory.arrays["num_new"], ()), *counts], values):
        old = array[i].item()
        if value == old or (value > old and any(array is count for count, _ in counts)):
            continue  # rows may have a context too, and what is behind the end of an array is no context
        assert_found(pool, (array, i), value)


def test_a_key_that_is_told_as_gone_and_is_there_is_found() -> None:
    pool, memory = make_journal()
    key, _ = pool.store.key_of(3)
    memory.removed[0].key.lo, memory.removed[0].key.hi = key & ((1 << 64) - 1), key >> 64
    with pytest.raises(IntegrityError, match=r"^page 3 .* is in the journal as gone$"):
        pool.check()


# The running batch.


def make_batch() -> tuple[RunningBatch, Any]:
    """Return a batch with a row of full attention and a window that has left pages, and what it holds in its first group."""
    batch = RunningBatch(make_manager(WINDOW, num_pages=32), PageTable(2, 16, 64))
    batch.admit(0, list(range(20)))
    batch.step([0], [1])
    batch.check()
    return batch, Memory(batch)


TOKEN_COUNTS = [(65, 20), (20, 21), (20, -1), (-1, -1)]
PAGE_COUNTS = {"num_pages": (-1, 4, 17), "num_cached": (-1, 7, 3), "num_skipped": (-1, 7, 5)}
ROW_DAMAGES = {
    **{
        f"overwrite(batch.num_tokens, {known}); overwrite(batch.num_computed_tokens, {computed})": (
            f"^row 0 has {known} tokens, {computed} of them computed, allowed: at most 64$"
        )
        for known, computed in TOKEN_COUNTS
    },
    **{f"held.{field} = {value}": "^row 0" for field, values in PAGE_COUNTS.items() for value in values},
    "held.records.next_plan[0] = 25": "^row 0: the next event is at 25 tokens, allowed: 1 to 24$",
    "held.ids[held.num_pages - 1] = 32": r"^row 0, group 0: page 32 \(at 5\), allowed: 0 to 31$",
    "held.ids[held.num_pages - 1] = 0": r"^row 0, group 0: the null page stands behind page \d+ \(at 5\)$",
}


@pytest.mark.parametrize("assignments", ROW_DAMAGES)
def test_what_cannot_be_in_a_row_is_found(assignments: str) -> None:
    batch, held = make_batch()
    exec(assignments, {"batch": batch, "held": held, "overwrite": overwrite})
    with pytest.raises(IntegrityError, match=ROW_DAMAGES[assignments]):
        batch.check()


# Requests and tables.


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_cached", -1, "a request, group 0: 3 pages, 1 skipped, -1 cached"),
        ("num_cached", 4, "a request, group 0: 3 pages, 1 skipped, 4 cached"),
        ("num_skipped", 4, "a request, group 0: 3 pages, 4 skipped, 3 cached"),
        ("num_skipped", 2, "a request, group 0: page 2 (at 1), 2 are skipped"),
    ],
)
def test_what_a_request_cannot_hold_is_found(field: str, value: int, message: str) -> None:
    manager = make_manager(WINDOW, num_pages=32)
    request = EngineRequest("a", list(range(12)))
    for num_computed_tokens in (0, 8):
        request.num_computed_tokens = num_computed_tokens
        manager.allocate_slots(request, 8 - num_computed_tokens // 2)
    manager.check()
    memory = Memory(manager.registry.held["a"])
    assert (memory.num_pages, memory.num_cached, memory.num_skipped, memory.ids[1]) == (3, 3, 1, 2)
    setattr(memory, field, value)
    with pytest.raises(IntegrityError) as caught:
        manager.check()
    assert str(caught.value) == message
    memory.num_cached, memory.num_skipped, memory.ids[2] = 3, 1, 32
    with pytest.raises(IntegrityError, match=r"^a request, group 0: page 32 \(at 2\), allowed: 0 to 31$"):
        manager.check()
    memory.ids[2] = 3
    manager.check()


def test_a_row_that_is_not_marked_is_found() -> None:
    table = PageTable(4, 200, 64)
    table.append_row([1, 2], 3)
    Memory(table).is_row_dirty[3] = 0
    with pytest.raises(IntegrityError, match=r"^row 3 has 1 segments to be sent, and is not dirty$"):
        table.check()


# States that take years to reach.


def test_the_stamps_of_calls_start_anew() -> None:
    """A row that a call names twice is told by the number of the call, which has 32 bits. Rows that ascend need none."""
    batch, _ = make_batch()
    batch.admit(1, [7] * 5)
    memory = Memory(batch)
    memory.stamp = (1 << 32) - 2
    for _ in range(4):
        batch.step([0, 1], [2, 3])
        with pytest.raises(ArgumentError, match="got 1 twice"):
            batch.step([1, 1], [4, 5])
    assert memory.stamp == 3  # after 2**32 - 1 comes 1: 0 is the stamp of rows that no call has named
    batch.check()

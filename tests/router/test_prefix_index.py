"""The index of a router against plain sets, its limits, and what threads and forks do to it."""

from __future__ import annotations

from random import Random
from time import process_time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_oracle import OracleIndex, Prompts, Spec, as_array, encode, make_events
from settings import NUM_OPERATIONS, scale

from pagepool.errors import ArgumentError, ArgumentTypeError, EventBatchError
from pagepool.router import PrefixIndex

SPECS = {
    "one group": [Spec(16)],
    "long blocks": [Spec(48)],
    "a window": [Spec(16), Spec(16, "sliding_window", 40)],
    "a state": [Spec(32), Spec(16, "mamba")],
    "windows of two sizes": [Spec(16, "sliding_window", 1), Spec(32, "sliding_window", 100), Spec(16)],
}
MEDIA: list[list[str | None]] = [[None], ["GPU", "CPU"], ["GPU", None, "DISK"]]


def compare(index: PrefixIndex, oracle: OracleIndex, hashes: list[int], medium: str | None, case: str) -> None:
    assert index.find(np.array(hashes, np.uint64), medium).tolist() == oracle.find(hashes, medium), case


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_workers", [3, 70])
def test_answers_are_those_of_plain_counters(name: str, num_workers: int) -> None:
    """With holes, copies, lost batches, workers that are replaced, two media, and a worker that is often full."""
    num_events = NUM_OPERATIONS // (2 * len(SPECS))
    for seed in range(max(1, num_events // 20_000)):
        rng = Random(f"{name} {seed}")
        prompts = Prompts(rng, 40, rng.choice((4, 40)))
        most = rng.choice((1 << 24, 60, 300))
        index, oracle = PrefixIndex(16, max_worker_blocks=most), OracleIndex(16)
        media = rng.choice(MEDIA)
        done, last = 0, (0, list[dict[str, Any]]())
        while done < min(num_events, 20_000):
            worker = rng.randrange(num_workers)
            events = make_events(rng, prompts, SPECS[name], media, 16)
            choice = rng.random()
            if choice < 0.02:
                worker, events = last  # the same again: more copies
            elif choice < 0.03:
                index.remove_worker(worker)
                oracle.remove_worker(worker)
            elif choice < 0.04:
                index.note_loss(worker)
                oracle.note_loss(worker)
            last = worker, events
            done += max(1, len(events))
            before = oracle.copy(worker)
            oracle.apply(worker, events)
            if oracle.count_held(worker) > most:
                oracle = before
                with pytest.raises(EventBatchError, match="more blocks than a worker may have"):
                    index.apply(worker, encode(events, rng))
            else:
                index.apply(worker, encode(events, rng))
            for _ in range(rng.choice((0, 1))):
                compare(index, oracle, prompts.pick(), rng.choice((None, None, "GPU", "CPU")), f"{name} {seed} {done}")
            if rng.random() < 0.01:
                index.check()
                assert index.stats()["held"] == [oracle.count_held(worker) for worker in range(oracle.num_workers)]
        index.check()
        for (worker, group), held in oracle.blocks.items():
            for medium, blocks in held.items():
                assert set(index.list_blocks(worker, medium, group).tolist()) == blocks.keys()


def stored(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": hashes, "block_size": 16, **fields}


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, **fields}


def batch_of(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, events])


def deep(num: int) -> bytes:
    """Arrays within arrays."""
    return b"\x93\xcb" + bytes(8) + b"\x91" * num


BAD = {
    "empty": b"",
    "an int": b"\x01",
    "no events": msgspec.msgpack.encode([1.0]),
    "events are an int": msgspec.msgpack.encode([1.0, 5]),
    "bytes behind": batch_of() + b"\x00",
    "a long array": b"\x92\x00\xdd\xff\xff\xff\xff",
    "a long array of hashes": b"\x92\x00\x91\x92\xacBlockRemoved\xdd\xff\xff\xff\xff\x01",
    "a long map": b"\x92\x00\x91\xdf\xff\xff\xff\xff",
    "long text": b"\x92\xdb\xff\xff\xff\xff",
    "a reserved byte": b"\x92\xc1\x90",
    "too many blocks": batch_of(stored(list(range(100)))),
    "deep": deep(100_000),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_change_nothing(name: str) -> None:
    index = PrefixIndex(16, max_worker_blocks=50)
    index.apply(0, batch_of(stored([100, 101]), ["BlockMoved"]))
    before = index.stats(), index.media
    with pytest.raises(EventBatchError):
        index.apply(0, BAD[name])
    assert (index.stats(), index.media) == before
    assert index.find([100, 101]).tolist() == [32]
    index.check()


GROUP = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
MISFITS: dict[str, Any] = {
    "an unknown event": ["BlockMoved", [102]],
    "an unknown event with names": {"type": "BlockMoved", "block_hashes": [102]},
    "no type": {"block_hashes": [102]},
    "an empty event": [],
    "an empty map": {},
    "an int as event": 5,
    "text as event": "BlockStored",
    "None as event": None,
    "events within": [[["BlockStored"]]],
    "an int as type": [7, [102]],
    "names that are ints": {5: 6},
    "no hashes": ["BlockRemoved"],
    "None as hashes": stored(None),  # type: ignore[arg-type]
    "a map as hashes": stored({}),  # type: ignore[arg-type]
    "text as hash": stored(["abc"]),
    "a float as hash": stored([1.5]),
    "bytes of a short hash": stored([102, b"1234567"]),
    "None as hash": stored([102, None]),
    "no block size": {"type": "BlockStored", "block_hashes": [102]},
    "block size 0": stored([102], block_size=0),
    "block size 0 in another medium": stored([102], block_size=0, medium="CPU"),
    "a negative block size": stored([102], block_size=-16),
    "a huge block size": stored([102], block_size=1 << 62),
    "a float as block size": stored([102], block_size=16.0),
    "less than a page": stored([102], block_size=8),
    "no multiple of a page": stored([102], block_size=24),
    "a larger block": stored([102], block_size=32, **GROUP),
    "larger blocks": stored([102, 103], block_size=64, **GROUP),
    "a chunk of another cache": stored([102], block_size=256, medium="cpu"),
    "chunks without a medium": stored([102, 103], block_size=256, medium=None),
    "a window": stored([102], **GROUP | {"kv_cache_spec_kind": "sliding_window"}, kv_cache_spec_sliding_window=40),
    "a state": stored([102], **GROUP | {"kv_cache_spec_kind": "mamba"}),
    "an unknown kind": stored([102], **GROUP | {"kv_cache_spec_kind": "quantum"}),
    "an unknown kind of another group": stored([102], group_idx=1, kv_cache_spec_kind="cross_attention"),
    "a kind that is an int": stored([102], kv_cache_spec_kind=3),
    "a group out of range": stored([102], group_idx=64),
    "a negative group": stored([102], group_idx=-1),
    "text as group": stored([102], group_idx="0"),
    "a group beyond the number of groups": stored([102], group_idx=1, num_groups=1),
    "too many groups": stored([102], num_groups=65),
    "text as number of groups": stored([102], num_groups="2"),
    "hits of half pages": stored([102], hit_tokens=24),
    "a long medium": stored([102], medium="x" * 33),
    "a medium that is an int": stored([102], medium=7),
    "a medium that is a list": stored([102], medium=["GPU"]),
}


@pytest.mark.parametrize("form", ["alone", "between others", "in a map"])
@pytest.mark.parametrize("name", MISFITS)
def test_an_event_without_a_place_is_left_out_and_its_removal_too(name: str, form: str) -> None:
    """Whatever else the worker has stays known, in the same batch and after it."""
    event, index = MISFITS[name], PrefixIndex(16)
    chain = list(range(101, 133))
    index.apply(0, batch_of(stored(chain, medium="GPU", **GROUP)))
    events = [stored([133], parent_block_hash=132, **GROUP), event] if form == "between others" else [event]
    chain += [133] if form == "between others" else []
    payload = batch_of(*events, stored([999], **GROUP))
    index.apply(
        0, msgspec.msgpack.encode({"ts": 0.0, "events": [*events, stored([999], **GROUP)]}) if form == "in a map" else payload
    )
    assert index.find(chain, "GPU").tolist() == index.find(chain).tolist() == [16 * len(chain)]
    assert index.num_skipped == index.count_skipped(0) == index.stats()["num_skipped"] == 1
    assert index.media == ("GPU",)
    assert index.stats()["held"] == [len(chain) + 1]
    if isinstance(event, dict) and event.get("type") == "BlockStored" and event.get("block_hashes"):
        place = {key: event[key] for key in ("medium", "group_idx") if key in event}
        index.apply(0, batch_of(removed(event["block_hashes"], **place)))
        assert index.find(chain).tolist() == [16 * len(chain)]
        assert index.count_skipped(0) == 2
    index.apply(0, batch_of(removed([102], medium="GPU", group_idx=0)))
    assert index.find(chain).tolist() == [16]
    assert index.count_skipped(1) == index.count_skipped(65_535) == 0
    index.check()


def test_media_beyond_the_eighth_are_left_out() -> None:
    index = PrefixIndex(16)
    index.apply(0, batch_of(*(stored([1], medium=f"m{i}") for i in range(9)), stored([1, 2])))
    assert (len(index.media), index.num_skipped) == (8, 2)
    assert index.find([1, 2]).tolist() == index.find([1, 2], "GPU").tolist() == [32]
    index.apply(0, batch_of(removed([1], medium="m8"), removed([1], medium="GPU")))
    assert index.find([1, 2], "GPU").tolist() == [0]
    assert index.find([1, 2], "m3").tolist() == [16]


def test_removals_of_blocks_left_out() -> None:
    """As many as were left out, before or after the block of that hash that has a place; none where batches were lost."""
    chunk, block = stored([1], block_size=256), stored([1], **GROUP)
    orders = [[block, chunk, chunk], [chunk, block, chunk], [chunk, chunk, block]]
    for order in [*orders, [*orders[2], {"type": "AllBlocksCleared"}, *orders[0]]]:
        index = PrefixIndex(16, max_worker_blocks=2)
        index.apply(0, batch_of(stored([2], **GROUP)))
        for event in order:
            index.apply(0, batch_of(event))
        for expected in (16, 16, 0):
            assert index.find([1]).tolist() == [16]
            index.apply(0, batch_of(removed([1], group_idx=0)))
            assert index.find([1]).tolist() == [expected]
        index.apply(0, batch_of(*order, removed([1])))
        index.note_loss(0)
        index.apply(0, batch_of(removed([1])))
        assert index.find([1]).tolist() == [0]
        index.apply(0, batch_of(chunk, block, removed([1])))
        assert index.find([1]).tolist() == [0]
        index.remove_worker(0)
        index.apply(0, batch_of(chunk))
        index.clear()
        index.apply(0, batch_of(block, removed([1])))
        assert index.find([1]).tolist() == [0]
        index.check()


def test_a_removal_concerns_its_worker_medium_and_group() -> None:
    index = PrefixIndex(16)
    places = [{"medium": medium, "group_idx": group} for medium in ("GPU", "CPU") for group in (0, 1)]
    index.apply(0, batch_of(*(stored([1], **place) for place in places)))
    index.apply(0, batch_of(*(stored([1], block_size=0, **place) for place in places)))
    index.apply(1, batch_of(stored([1], block_size=0, group_idx=1)))
    index.apply(1, batch_of(removed([1], group_idx=1)))
    for place in places:
        index.apply(0, batch_of(removed([1], **place)))
        index.apply(0, batch_of(removed([1], medium="DISK"), removed([1], group_idx=5)))
        assert index.stats()["held"][0] == 4
    for i, place in enumerate(places):
        index.apply(0, batch_of(removed([1], **place)))
        assert index.stats()["held"][0] == 3 - i


def test_blocks_left_out_take_little_memory() -> None:
    """And none once they are removed, or the worker is."""
    index = PrefixIndex(16)
    index.apply(0, batch_of(stored([1], **GROUP)))
    before = index.stats()["bytes"]
    for first in range(0, 300_000, 30_000):
        index.apply(0, batch_of(stored(list(range(first, first + 30_000)), block_size=0)))
        assert index.stats()["bytes"] < before + 4_000_000
    index.remove_worker(0)
    assert index.stats()["bytes"] <= before
    index.apply(0, batch_of(stored(list(range(30_000)), block_size=0), stored([1], **GROUP)))
    index.apply(0, batch_of(removed(list(range(30_000)))))
    assert index.stats()["bytes"] <= before + 8192
    index.check()


FIRST = {
    "placeholders": stored([900], block_size=0),
    "chunks": stored([900], block_size=256),
    "several chunks": stored([900, 901], block_size=256, medium=None),
    "chunks in another medium": stored([900, 901], block_size=256, medium="cpu", group_idx=0),
    "an offloaded part": stored([900, 901], block_size=32, medium="CPU", **GROUP),
    "a larger block": stored([900], block_size=256, **GROUP),
    "another kind": stored([900], kv_cache_spec_kind="mamba", group_idx=0, medium="CPU"),
}


@pytest.mark.parametrize("name", FIRST)
def test_other_caches_may_report_first(name: str) -> None:
    """The pool's own events decide what a block is."""
    index, chain = PrefixIndex(16), list(range(101, 109))
    index.apply(0, batch_of(FIRST[name]))
    for _ in range(2):
        index.apply(0, batch_of(stored(chain, medium="GPU", **GROUP)))
        assert index.find(chain).tolist() == [128]
        index.apply(0, batch_of(FIRST[name]))
        assert index.find(chain).tolist() == [128]
    index.check()


def test_a_group_without_kinds_gets_its_kind_later() -> None:
    index = PrefixIndex(16)
    index.apply(0, batch_of(stored([2], group_idx=1), stored([1, 2])))
    assert index.find([1, 2]).tolist() == [0]
    index.apply(0, batch_of(stored([2], group_idx=1, kv_cache_spec_kind="mamba")))
    assert index.find([1, 2]).tolist() == [32]


def test_a_worker_of_another_model_is_left_out() -> None:
    index = PrefixIndex(16)
    index.apply(0, batch_of(stored([1, 2], **GROUP)))
    index.apply(1, batch_of(stored([1, 2], block_size=32, **GROUP)))
    assert index.find([1, 2]).tolist() == [32, 0]
    assert (index.count_skipped(0), index.count_skipped(1)) == (0, 1)


def test_cut_and_garbled_batches_do_no_harm() -> None:
    """Each either raises or is a batch; the records agree in any case."""
    rng = Random(7)
    prompts = Prompts(rng, 20, 10)
    index = PrefixIndex(16, max_worker_blocks=10_000)
    num_bad = 0
    for _ in range(scale(30_000)):
        payload = bytearray(encode(make_events(rng, prompts, SPECS["one group"], ["GPU", None], 16), rng))
        if rng.random() < 0.5:
            del payload[rng.randrange(len(payload)) :]
        for _ in range(rng.randint(0, 3)):
            if payload:
                payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            index.apply(rng.randrange(5), payload)
        except EventBatchError:
            num_bad += 1
        if rng.random() < 0.01:
            index.check()
    assert num_bad


HASHES = st.lists(st.integers(0, 40), max_size=12)
EVENTS = st.one_of(
    st.builds(
        lambda hashes, medium, group: stored(hashes, medium=medium, group_idx=group),
        HASHES,
        st.sampled_from([None, "CPU"]),
        st.sampled_from([None, 0, 1]),
    ),
    st.builds(
        lambda hashes, medium, group: {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group},
        HASHES,
        st.sampled_from([None, "CPU"]),
        st.sampled_from([None, 0, 1]),
    ),
    st.just({"type": "AllBlocksCleared"}),
)


@settings(max_examples=scale(900), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 64]), st.lists(EVENTS, max_size=4)), max_size=12), HASHES)
def test_hypothesis_finds_no_other_answer(batches: list[tuple[int, list[dict[str, Any]]]], hashes: list[int]) -> None:
    index, oracle = PrefixIndex(16), OracleIndex(16)
    for worker, events in batches:
        index.apply(worker, batch_of(*events))
        oracle.apply(worker, events)
        for medium in (None, "GPU", "CPU"):
            compare(index, oracle, hashes, medium, f"{medium}")
    index.check()


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.binary(max_size=40),
        st.text(max_size=20),
        st.sampled_from(["type", "BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "events", "block_size"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=12), inner, max_size=5)),
    max_leaves=20,
)


@settings(max_examples=scale(900), deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200), VALUES.map(msgspec.msgpack.encode), st.lists(VALUES).map(lambda events: batch_of(*events))
    )
)
def test_hypothesis_finds_no_payload_that_does_harm(payload: bytes) -> None:
    index = PrefixIndex(16)
    index.apply(0, batch_of(stored([1, 2])))
    before = index.stats()
    try:
        index.apply(0, payload)
    except EventBatchError:
        assert index.stats() == before
    index.check()


FORMS: dict[str, Any] = {"maps": lambda event: event, "arrays": as_array}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [{}, {"medium": "CPU"}, {"group_idx": 1}], ids=str)
def test_a_block_is_there_until_each_copy_is_removed(form: str, place: dict[str, Any]) -> None:
    """As vLLM tells them: in one batch or several, by other workers in between."""
    index = PrefixIndex(16, num_groups=2)

    def apply(worker: int, *events: dict[str, Any]) -> list[int]:
        index.apply(worker, batch_of(*map(FORMS[form], events)))
        index.check()
        assert index.stats()["held"] == [len(index.list_blocks(i, medium, group)) for i in range(index.num_workers)]
        return [int(page in index.list_blocks(worker, medium, group)) for page in (1, 2, 3)]

    medium, group = place.get("medium", "GPU"), place.get("group_idx", 0)
    assert apply(0, stored([1, 2, 3], **place), stored([1, 2], **place)) == [1, 1, 1]
    assert apply(0, stored([1], **place)) == [1, 1, 1]
    assert apply(1, stored([1, 2, 3], **place), removed([1], **place)) == [0, 1, 1]
    assert apply(0, removed([3, 2, 1], **place)) == [1, 1, 0]
    assert apply(0, removed([2, 1], **place), removed([9], **place)) == [1, 0, 0]
    assert apply(0, stored([2], **place), removed([1, 1, 1, 2], **place)) == [0, 0, 0]
    assert apply(1) == [0, 1, 1]
    assert apply(0, *[stored([1, 2], **place)] * 5, removed([1], **place)) == [1, 1, 0]
    assert apply(0, {"type": "AllBlocksCleared"}, stored([1], **place)) == [1, 0, 0]
    assert apply(0, removed([1], **place)) == [0, 0, 0]
    apply(0, *[stored([1, 2], **place)] * 3)
    index.remove_worker(0)
    assert apply(0, stored([2], **place), removed([2], **place)) == [0, 0, 0]


def test_after_a_loss_a_block_goes_with_its_first_copy() -> None:
    """Until everything is cleared: the removal of another copy may be lost."""
    index = PrefixIndex(16)
    index.note_loss(5)  # told nothing yet
    index.apply(0, batch_of(stored([1]), stored([1]), stored([2])))
    index.note_loss(0)
    index.apply(0, batch_of(stored([2]), stored([3]), stored([3]), removed([1])))
    assert sorted(index.list_blocks(0).tolist()) == [2, 3]
    index.apply(0, batch_of(removed([2, 3])))
    assert not len(index.list_blocks(0))
    index.check()
    index.apply(0, batch_of({"type": "AllBlocksCleared"}, stored([1]), stored([1]), removed([1])))
    assert index.find([1]).tolist() == [16]
    index.note_loss(0)
    index.remove_worker(0)
    index.apply(0, batch_of(stored([1]), stored([1]), removed([1])))
    assert index.find([1]).tolist() == [16]
    for worker in (-1, 1 << 16):
        with pytest.raises(ArgumentError):
            index.note_loss(worker)


KNOWN = list(range(1, 51))
CLEARED = {"type": "AllBlocksCleared"}
AT_THE_BOUND: dict[str, tuple[list[dict[str, Any]], int]] = {
    "what is known": ([stored(KNOWN)], 50),
    "twice what is known": ([stored(KNOWN), stored(KNOWN[::-1])], 50),
    "one more": ([stored([99])], 51),
    "one more, and known ones": ([stored([*KNOWN, 99])], 51),
    "one for another": ([removed([1]), stored([99])], 50),
    "one for another, stored first": ([stored([99]), removed([1])], 50),
    "all for others": ([stored(list(range(100, 150))), removed(KNOWN)], 50),
    "one that comes and goes": ([stored([99]), removed([99])], 50),
    "one that comes, goes and comes": ([stored([99]), removed([99]), stored([99])], 51),
    "one that goes and comes": ([removed([1]), stored([1])], 50),
    "one that is removed twice": ([removed([1]), removed([1]), stored([98, 99])], 51),
    "a copy that goes": ([stored([1]), removed([1]), stored([99])], 51),
    "two copies of one": ([removed([1]), stored([99, 99])], 50),
    "an unknown one that goes": ([removed([98]), stored([99])], 51),
    "another medium": ([stored([1], medium="CPU")], 51),
    "a removal in another medium": ([stored([99]), removed([1], medium="CPU")], 51),
    "another medium for one": ([removed([1]), stored([1], medium="CPU")], 50),
    "another group": ([stored([1], group_idx=1)], 51),
    "another group for one": ([removed([1]), stored([1], group_idx=1)], 50),
    "cleared": ([CLEARED, stored(list(range(100, 150)))], 50),
    "cleared, and one more": ([CLEARED, stored(list(range(100, 151)))], 51),
    "cleared, and one that goes": ([CLEARED, stored(list(range(100, 151))), removed([120])], 50),
    "cleared behind": ([stored(list(range(100, 200))), CLEARED], 0),
}


@pytest.mark.parametrize("name", AT_THE_BOUND)
@pytest.mark.parametrize("has_copies", [False, True])
def test_the_bound_is_on_what_a_worker_has_after_a_batch(name: str, has_copies: bool) -> None:
    events, num = AT_THE_BOUND[name]
    index, oracle, other = PrefixIndex(16, max_worker_blocks=50), OracleIndex(16), PrefixIndex(16)
    before = [stored(KNOWN), *([stored(KNOWN[10:20])] if has_copies else [])]
    for each in (index, other):
        each.apply(1, batch_of(stored(list(range(90, 140)))))
        each.apply(0, batch_of(*before))
    oracle.apply(0, before)
    oracle.apply(0, events)
    other.apply(0, batch_of(*events))
    num = oracle.count_held(0) if has_copies else num
    assert other.stats()["held"][0] == oracle.count_held(0) == num
    held = index.stats()["held"], index.list_blocks(0).tolist(), index.media
    if num > 50:
        with pytest.raises(EventBatchError, match="more blocks than a worker may have"):
            index.apply(0, batch_of(*events))
        assert (index.stats()["held"], index.list_blocks(0).tolist(), index.media) == held
    else:
        index.apply(0, batch_of(*events))
        for group in (0, 1):
            for medium in ("GPU", "CPU"):
                assert set(index.list_blocks(0, medium, group).tolist()) == set(other.list_blocks(0, medium, group).tolist())
        index.apply(0, batch_of(removed([*KNOWN[:25], *range(100, 125)])))
        oracle.apply(0, [removed([*KNOWN[:25], *range(100, 125)])])
        assert set(index.list_blocks(0).tolist()) == oracle.blocks[0, 0].get("GPU", {}).keys()
    assert index.list_blocks(1).tolist() == other.list_blocks(1).tolist() == list(range(90, 140))
    index.check()


def test_blocks_that_come_and_go_in_a_batch_of_a_full_worker_take_no_memory() -> None:
    index = PrefixIndex(16, max_worker_blocks=100)
    index.apply(0, batch_of(stored(list(range(100)))))
    before = index.stats()
    index.apply(0, batch_of(stored(list(range(1000, 101_000))), removed(list(range(1000, 101_000)))))
    assert index.stats() == before


def test_nothing_hits_while_a_counted_group_is_unknown() -> None:
    """pagepool's events count the groups. A group that was never counted, and tells nothing, is never cached."""
    full, window = stored([1, 2]), stored([1, 2], group_idx=1, kv_cache_spec_sliding_window=20)
    for index, told in ((PrefixIndex(16), {"num_groups": 2}), (PrefixIndex(16, num_groups=2), {"num_groups": 2})):
        for first, second in ((full, window), (window, full)):
            index.apply(0, batch_of(first | told))
            assert not index.find([1, 2]).any()
            index.apply(3, batch_of(second | told))
            assert index.find([1, 2]).tolist() == [0, 0, 0, 0]
            index.apply(0, batch_of(second))
            assert index.find([1, 2]).tolist() == [32, 0, 0, 0]
            index.clear()
            assert index.find([1, 2]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("num_groups", [None, 3])
def test_a_group_that_is_never_cached_changes_no_answer(num_groups: int | None) -> None:
    """One that sends its first event later counts from then on, for every worker."""
    for silent in range(3):
        index = PrefixIndex(16, num_groups=num_groups)
        chain, others = [1, 2, 3, 4], [group for group in range(3) if group != silent]
        kinds = {0: "full_attention", 1: "mamba", 2: "mla_attention"}
        for worker in (0, 2):
            index.apply(
                worker, batch_of(*(stored(chain, group_idx=group, kv_cache_spec_kind=kinds[group]) for group in others))
            )
        assert index.find(chain).tolist() == [64, 0, 64]
        index.apply(0, batch_of(removed([4], group_idx=silent)))
        index.apply(0, batch_of(stored([1], group_idx=silent, block_size=0)))
        assert index.find(chain).tolist() == [64, 0, 64]
        index.apply(2, batch_of(stored([1, 2], group_idx=silent, kv_cache_spec_kind=kinds[silent])))
        assert index.find(chain).tolist() == [0, 0, 32]
        index.apply(2, batch_of(removed([1, 2], group_idx=silent)))
        assert index.find(chain).tolist() == [0, 0, 0]


def test_the_number_of_groups_may_change_while_nobody_has_blocks() -> None:
    index = PrefixIndex(16)
    index.apply(0, batch_of(stored([1], num_groups=3)))
    for bad in (stored([2], num_groups=2), stored([2], group_idx=3), stored([2], group_idx=3, num_groups=4)):
        index.apply(1, batch_of(bad))
        assert index.stats()["held"] == [1, 0]
    index.apply(0, batch_of(removed([1])))
    index.apply(0, batch_of(stored([1])))
    assert index.find([1]).tolist() == [0, 0]  # still one of three
    index.remove_worker(0)
    index.apply(1, batch_of(stored([1], num_groups=1), stored([2], num_groups=2)))
    assert index.find([1, 2]).tolist() == [0, 16]
    assert (index.count_skipped(0), index.count_skipped(1)) == (0, 4)
    index = PrefixIndex(16, num_groups=1)
    index.apply(0, batch_of(stored([1], num_groups=2), stored([1], group_idx=1)))
    assert index.stats()["held"] == [0]
    for num_groups in (0, 65, -1):
        with pytest.raises(ArgumentError, match="num_groups"):
            PrefixIndex(16, num_groups=num_groups)
    with pytest.raises(ArgumentTypeError):
        PrefixIndex(16, num_groups="2")  # type: ignore[arg-type]


def test_memory_of_copies() -> None:
    """That of few is small beside the blocks, and comes back when they go."""
    index, rng = PrefixIndex(16), Random(3)
    hashes = [rng.getrandbits(64) for _ in range(20_000)]
    index.apply(0, batch_of(stored(hashes)))
    before = index.stats()["bytes"]
    assert before <= 40 * len(hashes)
    index.apply(0, batch_of(stored(hashes[:200])))
    assert index.stats()["bytes"] <= before + 20_000
    index.apply(0, batch_of(stored(hashes)))
    assert index.stats()["bytes"] <= before + 100 * len(hashes)
    index.check()
    index.apply(0, batch_of(removed(hashes), removed(hashes[:200])))
    assert index.stats()["held"] == [20_000]
    assert index.stats()["bytes"] <= before + 40_000
    index.apply(0, batch_of(removed(hashes)))
    assert index.stats()["blocks"] == 0
    index.check()


def test_memory_of_a_block() -> None:
    """At most 40 bytes, at any number of blocks, and 8 for each further 64 workers."""
    index, rng = PrefixIndex(16), Random(1)
    for num in range(1, 120):
        index.apply(num % 64, batch_of(stored([rng.getrandbits(64) for _ in range(997)])))
        stats = index.stats()
        assert num < 5 or stats["bytes"] <= 40 * stats["blocks"]
    index.apply(64, batch_of(stored([1])))
    stats = index.stats()
    assert stats["bytes"] <= 48 * stats["blocks"]
    index.apply(500, batch_of(stored([1])))
    stats = index.stats()
    assert stats["bytes"] <= (40 + 7 * 8 * 1.125) * stats["blocks"]
    index.clear()
    assert index.stats()["blocks"] == 0
    assert index.stats()["bytes"] < 40_000
    assert index.find([1]).tolist() == [0] * 501


def test_clearing_again_and_again_costs_what_was_stored() -> None:
    """Not what all workers have, whatever a worker sends between."""
    hashes = [Random(1).getrandbits(64) for _ in range(1)] + list(range(1, 200_000))
    cleared = [["AllBlocksCleared"], stored([hashes[0], 199_999, 7])]

    def flood(index: PrefixIndex) -> float:
        started = process_time()
        for _ in range(5000):
            index.apply(0, batch_of(*cleared))
        return process_time() - started

    small, large = PrefixIndex(16), PrefixIndex(16)
    large.apply(1, batch_of(stored(hashes)))
    assert flood(large) < 10 * flood(small) + 0.1  # 5000 walks over all blocks take more than a second
    assert large.find(hashes[:1]).tolist() == [16, 16]
    large.remove_worker(1)
    assert large.stats()["held"] == [3, 0]
    large.check()


def test_a_worker_is_cleared_that_got_more_than_is_marked() -> None:
    rng = Random(2)
    index, oracle = PrefixIndex(16), OracleIndex(16)
    for _ in range(200):
        hashes = [rng.getrandbits(12) for _ in range(rng.choice((1, 30, 300)))]
        events = [{"type": "AllBlocksCleared"}] if rng.random() < 0.2 else [stored(hashes)]
        worker = rng.randrange(3)
        index.apply(worker, batch_of(*events))
        oracle.apply(worker, events)
        index.check()
        assert index.stats()["held"] == [oracle.count_held(worker) for worker in range(oracle.num_workers)]


def test_a_worker_that_told_nothing_has_no_blocks() -> None:
    """Also one whose number lies behind the words of all entries."""
    index = PrefixIndex(16)
    for worker in range(64):
        index.apply(worker, batch_of(stored(list(range(100 * worker, 100 * worker + 100)))))
    for worker in (64, 65, 128, 65_535):
        assert index.list_blocks(worker).tolist() == []
        index.remove_worker(worker)
    index.check()


def test_arguments() -> None:
    index = PrefixIndex(16)
    index.apply(0, memoryview(batch_of(stored([1, (1 << 64) - 2, 3]))))
    assert index.find(np.array([1, -2, 3], np.int64)).tolist() == [48]
    assert index.find(np.array([1, 7, 7, 7], np.uint64)[::2]).tolist() == [16]
    assert index.find([b"12345678" + bytes(7) + b"\x01", (-2).to_bytes(8, "big", signed=True)]).tolist() == [32]
    assert index.find(np.array([1], np.uint8)).tolist() == [16]
    assert index.find([]).tolist() == [0]
    assert index.find([1], "DISK").tolist() == [0]
    wrong: list[tuple[type[Exception], tuple[Any, ...]]] = [
        *((ArgumentTypeError, arguments) for arguments in ((5,), (np.zeros(3),), (["a"],), ([1], 5))),
        *((ArgumentError, arguments) for arguments in (([b"1"],), ([1], "\ud800"))),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            index.find(*arguments)
    with pytest.raises(ArgumentTypeError):
        index.apply(0, "text")  # type: ignore[arg-type]
    for worker in (-1, 1 << 16):
        with pytest.raises(ArgumentError):
            index.apply(worker, batch_of())
    with pytest.raises(ArgumentError):
        PrefixIndex(0)
    for hash_algo in ("md5", ["sha256"], np.array([["sha256"]])):
        with pytest.raises(ArgumentError, match="hash_algo"):
            PrefixIndex(16, hash_algo=hash_algo)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"adapter": 1.5}, ArgumentTypeError, "^adapter: got float, allowed: int, str or bytes, or a pair of these$"),
        ({"adapter": ("name",)}, ArgumentError, "^adapter: got a tuple of 1, allowed: a pair of name and path$"),
        ({"salt": 2.5}, ArgumentTypeError, "^salt: got float"),
        ({"images": 5}, ArgumentTypeError, "^images: got int, allowed: a sequence, or None$"),
        ({"images": [5]}, ArgumentError, "^images: got 5, allowed: features with mm_hash or identifier$"),
    ],
)
def test_wrong_keys_are_refused_by_the_name_of_the_argument(keys: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        PrefixIndex(16).find_tokens(range(40), **keys)


@pytest.mark.parametrize("place", [0, 3, 4, 8, 9])
@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (-7, ArgumentError, r"^token_ids: got -7 \(at {place}\), allowed: at least 0$"),
        (2**40, ArgumentError, "^token_ids: got 1099511627776, allowed: ints that fit int32$"),
        ("a", ArgumentTypeError, "^token_ids: got str, allowed: "),
    ],
)
def test_tokens_behind_the_last_page_are_checked_too(place: int, item: object, error: type, message: str) -> None:
    """Of pages of 4 tokens, two of 10 tokens are hashed."""
    token_ids: list[Any] = list(range(10))
    token_ids[place] = item
    with pytest.raises(error, match=message.format(place=place)):
        PrefixIndex(4).find_tokens(token_ids)

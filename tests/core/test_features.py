"""Images and other features: the extra keys of each page against a plain search, and the cost of many features."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
from admissions import admission
from hybrids import FULL, PAGE_SIZE, WINDOW
from hybrids import make_manager as make_hybrid

from pagepool import EngineRequest, PageTable, RequestTraits, RunningBatch, hash_request_tokens
from pagepool.hashing import RequestExtraKeys, VllmExtraKeys, extra_keys


class Place:
    """The range of a feature."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


class Image:
    """A feature that counts its reads."""

    num_reads = 0

    def __init__(self, mm_hash: str, offset: int, length: int) -> None:
        self._mm_hash = mm_hash
        self.modality = "image"
        self.placeholder_range = Place(offset, length)

    @property
    def mm_hash(self) -> str:
        Image.num_reads += 1
        return self._mm_hash


def count_reads(call: Callable[[], Any]) -> int:
    before = Image.num_reads
    call()
    return Image.num_reads - before


# The keys of each page, found by a search through all features for every page.


def expected_keys(images: list[Image], salt: str | None, lora_id: Any, start: int, stop: int) -> tuple[Any, ...] | None:
    own = [("lora", lora_id)] if lora_id is not None and start == 0 else []
    own += [("salt", salt)] if salt is not None and start == 0 else []
    places = [(image, image.placeholder_range.offset, image.placeholder_range.length) for image in images]
    return (
        *own,
        *[("mm", "image", image._mm_hash, at - start, n) for image, at, n in places if at < stop and start < at + n],
    ) or None


def expected_vllm_keys(images: list[Image], salt: str | None, lora_id: Any, start: int, stop: int) -> tuple[Any, ...] | None:
    places = [(image, image.placeholder_range.offset, image.placeholder_range.length) for image in images]
    return (
        *([] if lora_id is None else [("lora", lora_id)]),
        *[("mm", image._mm_hash, at - start) for image, at, n in places if at < stop and start < at + n],
        *([("cache_salt", salt)] if salt is not None and start == 0 else []),
    ) or None


REFERENCES = [(RequestExtraKeys, expected_keys), (VllmExtraKeys, expected_vllm_keys)]


def random_images(rng: Random, num_tokens: int) -> list[Image]:
    """Return features in any order, overlapping, at the ends of pages and beyond the tokens, some without tokens."""
    longest = rng.choice((0, 1, 5, num_tokens, 3 * num_tokens))
    return [
        Image(rng.choice("abc"), rng.randint(0, num_tokens + 8), rng.choice((0, rng.randint(0, longest))))
        for _ in range(rng.choice((0, 1, 2, 3, 7, 8, 9, 40)))
    ]


def walk(keys: RequestExtraKeys, page_size: int, num_pages: int) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
    page, page_keys = keys.find_keyed_page(0, page_size)
    while page is not None and page < num_pages:
        yield page, page_keys
        page, page_keys = keys.find_keyed_page(page + 1, page_size)


@pytest.mark.parametrize(("kind", "reference"), REFERENCES)
def test_pages_have_the_keys_that_a_search_finds(kind: type[RequestExtraKeys], reference: Callable[..., Any]) -> None:
    for seed in range(400):
        rng = Random(seed)
        page_size, num_pages = rng.choice((1, 2, 4, 16)), rng.randint(1, 12)
        images = random_images(rng, page_size * num_pages)
        salt, lora_id = rng.choice((None, None, "salt")), rng.choice((None, None, "tuned"))
        request = EngineRequest("r", [1], mm_features=images, cache_salt=salt, lora_id=lora_id)
        keys = kind.of(request)
        starts = range(0, page_size * num_pages, page_size)
        expected = [reference(images, salt, lora_id, start, start + page_size) for start in starts]
        if keys is None:
            assert not any(expected)
            continue
        assert [keys.of_page(start, start + page_size) for start in starts] == expected, seed
        walked = dict(walk(keys, page_size, num_pages))
        assert [walked.get(page) for page in range(num_pages)] == expected, seed
        for page in range(num_pages):  # from anywhere, like a decoding request or an event
            found, page_keys = keys.find_keyed_page(page, page_size)
            assert not any(expected[page : num_pages if found is None else found]), seed
            assert found is None or found >= num_pages or page_keys == expected[found], seed


def test_equal_features_make_equal_keys() -> None:
    """Events have one context for all requests with the same extra keys."""
    first, second, other = (
        RequestExtraKeys.of(EngineRequest("r", [1], mm_features=[Image("a", 3, 2), Image(name, 1, 9)])) for name in "bbc"
    )
    assert first == second != other
    assert hash(first) == hash(second)


# The cost of many features.


make_manager = partial(make_hybrid, default=(FULL,), num_pages=64, max_model_len=1 << 16)


class CountingInt(int):
    """A number that counts its comparisons."""

    num_comparisons = 0

    def __add__(self, other: int) -> CountingInt:
        return CountingInt(int(self) + int(other))

    def __lt__(self, other: object) -> bool:
        CountingInt.num_comparisons += 1
        return int(self) < other  # type: ignore[operator]

    def __gt__(self, other: object) -> bool:
        CountingInt.num_comparisons += 1
        return int(self) > other  # type: ignore[operator]


def make_images(num_images: int, shape: str) -> list[Image]:
    """Return an image in each page; one of them may overlap all others, or the order is random."""
    images = [Image(str(i), i * PAGE_SIZE + 1, 2) for i in range(num_images)]
    if shape == "over one another":
        images[0] = Image("background", 0, num_images * PAGE_SIZE)
    if shape == "out of order":
        Random(num_images).shuffle(images)
    return images


def count_comparisons(monkeypatch: pytest.MonkeyPatch, num_images: int, shape: str, call: Callable[[Any], object]) -> int:
    """Count the comparisons of feature positions while `call` hashes a request with an image in each page."""
    monkeypatch.setattr(extra_keys, "require_int", lambda name, value, *_: CountingInt(value))
    tokens = [7] * (num_images * PAGE_SIZE + 1)
    request = EngineRequest("r", tokens, mm_features=make_images(num_images, shape))
    before = CountingInt.num_comparisons
    call(request)
    return CountingInt.num_comparisons - before


def hash_with_manager(request: EngineRequest) -> None:
    make_manager().get_computed_pages(request)


def hash_while_decoding(request: EngineRequest) -> None:
    """Hash page by page."""
    manager = make_manager(num_pages=request.num_tokens // PAGE_SIZE + 2)
    while request.num_computed_tokens < request.num_tokens - 1:
        manager.allocate_slots(request, PAGE_SIZE)
        request.num_computed_tokens += PAGE_SIZE


def hash_with_events(request: EngineRequest) -> None:
    pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
    manager = make_manager(num_pages=request.num_tokens // PAGE_SIZE + 2)
    manager.enable_events()
    while request.num_computed_tokens < request.num_tokens - 1:
        manager.allocate_slots(request, 8 * PAGE_SIZE)
        request.num_computed_tokens += 8 * PAGE_SIZE
        manager.take_events()


def hash_in_batch(request: EngineRequest) -> None:
    batch = RunningBatch(make_manager(), PageTable(1, 1 << 14, 64))
    batch.admit(0, request.all_token_ids, num_tokens=1, traits=RequestTraits(mm_features=request.mm_features))


def hash_by_hand(request: EngineRequest) -> None:
    hash_request_tokens(hash, PAGE_SIZE, request)


@pytest.mark.parametrize("shape", ["in order", "out of order", "over one another"])
@pytest.mark.parametrize(
    "call",
    [hash_with_manager, hash_while_decoding, hash_with_events, hash_in_batch, hash_by_hand],
    ids=lambda call: call.__name__,
)
def test_a_feature_costs_as_much_beside_many(
    monkeypatch: pytest.MonkeyPatch, shape: str, call: Callable[[EngineRequest], None]
) -> None:
    """Eight times as many features take about eight times as many comparisons, not 64 times."""
    few, many = (count_comparisons(monkeypatch, num_images, shape, call) for num_images in (64, 512))
    print(f"{few} comparisons for 64 images, {many} for 512")
    assert many < 3 * 8 * few


# Returning requests and rows.


def test_a_request_that_comes_back_reads_no_feature() -> None:
    """Neither at a look-up or another refusal, nor after a preemption, nor at a probe."""
    manager = make_manager(num_pages=16)
    manager.page_pool.get_new_page_ids(8)  # so that pages are short
    request = EngineRequest("r", [7] * 41, mm_features=make_images(10, "in order"))
    assert count_reads(lambda: manager.get_computed_pages(request)) == 10

    def come_back() -> None:
        hits, num_hit_tokens = manager.get_computed_pages(request)
        assert manager.allocate_slots(request, 41 - num_hit_tokens, num_hit_tokens, hits) is None
        assert manager.allocate_slots(request, 4, num_hit_tokens, hits) is not None
        manager.free(request)
        manager.probe(request)

    assert count_reads(lambda: [come_back() for _ in range(5)]) == 0


class Rows:
    """A batch whose rows are admitted with ten images each. With a window, each retry looks the prefix up again."""

    def __init__(self, *specs: Any, num_pages: int = 64) -> None:
        self.manager = make_manager(*specs, num_pages=num_pages)
        self.batch = RunningBatch(self.manager, PageTable(4, 64, 64))
        self.images = make_images(10, "in order")
        self.token_ids = [7] * 41

    def admit(self, row: int = 1, **options: Any) -> int | None:
        return self.batch.admit(row, self.token_ids, **admission(**{"mm_features": self.images} | options))


@pytest.mark.parametrize("spec", [FULL, WINDOW])
def test_a_row_that_is_tried_again_reads_no_feature(spec: Any) -> None:
    rows = Rows(spec, num_pages=14)
    rows.batch.admit(0, [5] * 40)
    assert count_reads(rows.admit) == 10
    for i in range(20):  # something is cached and evicted all the time
        rows.batch.release([0])
        rows.batch.admit(0, [i] * 40)
        assert count_reads(lambda: rows.admit()) == 0
    assert not rows.batch.is_admitted[1]
    rows.batch.release([0])
    assert count_reads(rows.admit) == 0
    assert rows.batch.is_admitted[1]
    rows.batch.check()


def test_a_row_that_comes_back_reads_no_feature() -> None:
    rows = Rows()
    assert [rows.admit(), count_reads(lambda: rows.batch.release([1]))] == [0, 0]
    for features in (rows.images, tuple(rows.images), list(rows.images)):
        assert count_reads(lambda features=features: rows.admit(mm_features=features)) == 0
        assert rows.batch.num_cached_tokens[1] == 40
        rows.batch.release([1])
    rows.batch.check()


@pytest.mark.parametrize("salt", [None, "pepper"])
def test_other_features_in_the_same_list_are_read(salt: str | None) -> None:
    """Features in another list, or with other keys, are read: a row that took them for its last ones would hit wrong pages."""
    rows, manager = Rows(), Rows().manager
    rng = Random(5)
    for _ in range(200):
        if rng.random() < 0.5:
            rows.images[rng.randrange(10)] = Image(rng.choice("xy"), rng.randrange(36), 3)
        if rng.random() < 0.2:
            rng.shuffle(rows.images)
        features: list[Image] | None = rng.choice((rows.images, rows.images, rows.images[:5], list(rows.images), [], None))
        keys = {"mm_features": features, "cache_salt": rng.choice((None, salt)), "lora_id": rng.choice((None, 1))}
        fresh = RunningBatch(manager, PageTable(4, 64, 64))
        assert rows.admit(2, **keys) == fresh.admit(2, rows.token_ids, **admission(**keys))
        rows.batch.check()
        rows.batch.release([2])
        fresh.release([2])


def test_features_of_rows_that_left_are_not_kept() -> None:
    """Features may hold pixels."""
    rows = Rows()
    first = weakref.ref(rows.images[0])
    rows.admit()
    rows.batch.release([1])
    rows.images = []
    gc.collect()
    assert first() is None


def test_features_without_weak_references_are_read_each_time() -> None:
    class Plain:
        __slots__ = ("mm_hash",)

    rows = Rows()
    plain = Plain()
    plain.mm_hash = "x"
    for num_hit_tokens in (0, 40):
        assert rows.admit(mm_features=[plain]) == num_hit_tokens
        rows.batch.release([1])
    assert rows.admit(mm_features=rows.images) == 0


@pytest.mark.parametrize("lora_id", [True, 1.0])
def test_a_row_that_comes_back_with_a_wrong_adapter_is_refused(lora_id: Any) -> None:
    rows = Rows()
    rows.admit(lora_id=1)
    rows.batch.release([1])
    with pytest.raises(TypeError, match="lora_id: got"):
        rows.admit(lora_id=lora_id)
    assert rows.admit(lora_id=1) == 40

"""Prompts of embeddings and other contents that token ids do not show: they hit exactly what is equal, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hybrids import FULL, PAGE_SIZE
from hybrids import make_manager as make_hybrid
from test_nonce import ALGORITHMS

from pagepool import CacheManager, EngineRequest, hash_request_tokens
from pagepool.hashing import RequestExtraKeys, VllmExtraKeys
from pagepool.hashing.contents import EMBEDDINGS, MEDIA, may_have_contents

NUM_TOKENS = 3 * PAGE_SIZE + 1
make_manager = partial(make_hybrid, FULL, num_pages=64)


class Own:
    """A request of an engine, whose token ids are placeholders."""

    def __init__(self, request_id: str = "a", num_tokens: int = NUM_TOKENS, **attributes: Any) -> None:
        self.request_id, self.all_token_ids, self.num_tokens = request_id, [0] * num_tokens, num_tokens
        self.num_computed_tokens, self.sampling_params, self.status = 0, None, 1
        self.__dict__.update(attributes)


@pytest.fixture(params=ALGORITHMS)
def manager(request: pytest.FixtureRequest) -> CacheManager:
    return make_manager(**ALGORITHMS[request.param])


def compute(manager: CacheManager, request: Any) -> int:
    """Run a request to its end; return the number of hit tokens."""
    hits, num_hit_tokens = manager.get_computed_pages(request)
    num_left = request.num_tokens - num_hit_tokens
    assert manager.allocate_slots(request, num_left, num_hit_tokens, hits) is not None
    manager.check()
    manager.free(request)
    return num_hit_tokens


def hit(first: Any, second: Any, name: str = "prompt_embeds", **options: Any) -> int:
    """Return the number of tokens that a prompt hits of another one."""
    manager = make_manager(**options)
    assert compute(manager, Own("a", **{name: first})) == 0
    return compute(manager, Own("b", **{name: second}))


def rows(num: int = NUM_TOKENS, start: int = 0, dtype: Any = np.float32) -> Any:
    return (np.arange(num * 8).reshape(num, 8) + start).astype(dtype)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_pages_are_shared_up_to_the_first_other_row(manager: CacheManager, name: str) -> None:
    first, other, late = rows(), rows(start=1), rows()
    late[2 * PAGE_SIZE] += 1
    assert compute(manager, Own("plain")) == 0
    assert compute(manager, Own("a", **{name: first})) == 0
    assert compute(manager, Own("b", **{name: other})) == 0
    assert compute(manager, Own("c", **{name: late})) == 2 * PAGE_SIZE
    assert compute(manager, Own("d", **{name: first.copy()})) == NUM_TOKENS - 1
    assert compute(manager, Own("e", **{name: first[: PAGE_SIZE + 1]})) == PAGE_SIZE  # tokens follow
    assert compute(manager, Own("f")) == NUM_TOKENS - 1


def make_jax(values: Any) -> Any:
    return pytest.importorskip("jax.numpy").asarray(values)


def make_bfloat16(values: Any) -> Any:
    return make_jax(values).astype("bfloat16")


def make_torch(values: Any) -> Any:
    return pytest.importorskip("torch").tensor(values.tolist(), dtype=pytest.importorskip("torch").bfloat16)


FORMS: list[Callable[[Any], Any]] = [
    np.array,
    np.asfortranarray,
    lambda values: np.repeat(values, 2, axis=1)[:, ::2],
    lambda values: values.astype(np.float16),
    lambda values: values[None],
    lambda values: values.tolist(),
    lambda values: tuple(map(tuple, values.tolist())),
    lambda values: values.astype(int).tolist(),
    lambda values: list(values),
    make_jax,
    make_bfloat16,
    make_torch,
]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_compared(form: Callable[[Any], Any]) -> None:
    late = rows()
    late[PAGE_SIZE + 1, 3] += 32
    assert hit(form(rows()), form(rows())) == NUM_TOKENS - 1
    assert hit(form(rows()), form(late)) == PAGE_SIZE
    assert hit(form(rows()), form(rows(start=32))) == 0


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor"])
def test_equal_bytes_of_another_type_or_shape_are_other_contents(hash_algo: str) -> None:
    values = rows()
    others = [
        values.view(np.int32),
        values.view(np.uint8),
        values.view(">f4"),
        values.reshape(-1, 4),
        values.reshape(NUM_TOKENS, 2, 4),
        values.reshape(-1),
        values.tobytes(),
        values.tolist(),
    ]
    for other in others:
        assert hit(values, other, hash_algo=hash_algo) == hit(other, values, hash_algo=hash_algo) == 0


@pytest.mark.parametrize(
    "form",
    [lambda values: values.tobytes(), lambda values: values.reshape(-1), lambda values: np.stack([values, values]), np.vstack],
    ids=["bytes", "flat", "batch", "more rows than tokens"],
)
def test_contents_without_a_row_for_each_token_are_compared_as_a_whole(form: Callable[[Any], Any]) -> None:
    def make(values: Any) -> Any:
        return form((values, values)) if form is np.vstack else form(values)

    late = rows()
    late[-1] += 1
    assert hit(make(rows()), make(rows())) == NUM_TOKENS - 1
    assert hit(make(rows()), make(late)) == 0


def test_two_kinds_of_embeddings_are_compared_as_a_whole() -> None:
    manager = make_manager()
    for i, (first, second) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        made = Own(str(i), prompt_embeds=rows(start=first), inputs_embeds=rows(start=second))
        assert compute(manager, made) == 0
    assert compute(manager, Own("again", prompt_embeds=rows(), inputs_embeds=rows())) == NUM_TOKENS - 1
    assert compute(manager, Own("alone", prompt_embeds=rows())) == 0
    assert compute(manager, Own("renamed", inputs_embeds=rows())) == 0


class Foreign:
    """An array of another library, or on a device."""

    def __array__(self, *_: Any) -> Any:
        raise TypeError("copies are not permitted")


UNREADABLE: list[Callable[[], Any]] = [
    Foreign,
    object,
    lambda: np.array([object()] * NUM_TOKENS),
    lambda: [[1.0, 2.0], [3.0]],
    lambda: [[float("nan")] * 2] * NUM_TOKENS,
    lambda: [[2**53 + 1, 0.5]] * NUM_TOKENS,
    lambda: ["text"] * NUM_TOKENS,
    lambda: [Foreign()] * NUM_TOKENS,
    lambda: np.ma.masked_array(rows(), mask=rows() > 3),
    lambda: (row for row in rows()),
    lambda: {"values": rows()},
]


@pytest.mark.parametrize("make", UNREADABLE)
def test_contents_that_cannot_be_compared_hit_nothing_but_their_own(manager: CacheManager, make: Callable[[], Any]) -> None:
    value = make()
    first, second = Own("a", prompt_embeds=value), Own("b", prompt_embeds=value)
    assert [compute(manager, request) for request in (first, second, Own("c"))] == [0, 0, 0]
    assert [compute(manager, request) for request in (first, second)] == [NUM_TOKENS - 1] * 2
    manager.free_page_hashes(second)
    assert compute(manager, second) == 0


@pytest.mark.parametrize("name", MEDIA)
def test_media_without_features_hit_nothing_but_their_own(manager: CacheManager, name: str) -> None:
    first, second = (Own(i, **{name: rows()}) for i in "ab")
    assert [compute(manager, request) for request in (first, second, second)] == [0, 0, NUM_TOKENS - 1]
    image = SimpleNamespace(mm_hash="a", modality="image", placeholder_range=SimpleNamespace(offset=1, length=2))
    named = [Own(i, mm_features=[image], **{name: rows()}) for i in "cd"]
    assert [compute(manager, request) for request in named] == [0, NUM_TOKENS - 1]


@pytest.mark.parametrize("value", [None, [], (), {}, b"", False])
@pytest.mark.parametrize("name", ["prompt_embeds", "pixel_values"])
def test_requests_without_contents_share(name: str, value: Any) -> None:
    assert RequestExtraKeys.of(Own(**{name: value})) is None
    assert hit(None, value, name) == NUM_TOKENS - 1


def test_contents_are_read_once_at_the_first_look_up() -> None:
    """An engine may use the memory again."""
    manager, values = make_manager(), rows()
    first = Own("a", prompt_embeds=values)
    assert manager.get_computed_pages(first)[1] == 0
    values += 1
    assert compute(manager, first) == 0
    assert compute(manager, Own("b", prompt_embeds=values)) == 0
    assert compute(manager, Own("c", prompt_embeds=rows())) == NUM_TOKENS - 1


def test_contents_and_other_keys_are_kept_apart(manager: CacheManager) -> None:
    keys: list[dict[str, Any]] = [{}, {"cache_salt": "s"}, {"lora_id": 1}, {"has_vision": True}]
    for own in keys:
        assert compute(manager, Own(repr(own), prompt_embeds=rows(), **own)) == 0
    assert [compute(manager, Own(f"again {own}", prompt_embeds=rows(), **own)) for own in keys] == [NUM_TOKENS - 1] * 3 + [0]


@pytest.mark.parametrize("kind", [RequestExtraKeys, VllmExtraKeys])
@pytest.mark.parametrize("hash_lookahead", [0, 1])
@pytest.mark.parametrize("num_rows", [1, PAGE_SIZE, PAGE_SIZE + 1, NUM_TOKENS])
def test_pages_with_rows_have_keys(kind: type[RequestExtraKeys], hash_lookahead: int, num_rows: int) -> None:
    """A page's key covers the rows of its tokens, and of the lookahead behind them."""

    def keys_of(values: Any) -> Iterator[Any]:
        keys = kind.of(Own(prompt_embeds=values))
        assert keys is not None
        listed = dict(keys.list_keyed_pages(PAGE_SIZE, 3, hash_lookahead))
        for page in range(3):
            found, own = keys.find_keyed_page(page, PAGE_SIZE, hash_lookahead)
            assert (own if found == page else None) == listed.get(page)
            yield listed.get(page)

    plain = list(keys_of(rows(num_rows)))
    for row in range(num_rows):
        other = rows(num_rows)
        other[row] += 1
        changed = [page for page, (a, b) in enumerate(zip(plain, keys_of(other), strict=True)) if a != b]
        assert changed == [page for page in range(3) if page * PAGE_SIZE <= row < (page + 1) * PAGE_SIZE + hash_lookahead]


def test_events_have_the_digests() -> None:
    pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
    manager = make_manager()
    manager.enable_events()
    compute(manager, Own(prompt_embeds=rows(PAGE_SIZE + 1)))
    [event] = manager.take_events()
    assert [keys and [type(key) for key in keys] for keys in event.extra_keys] == [[bytes], [bytes], None]


def test_pages_hashed_by_hand_depend_on_contents() -> None:
    first, equal, other = (hash_request_tokens(hash, PAGE_SIZE, Own(prompt_embeds=rows(start=i))) for i in (0, 0, 1))
    assert first == equal != other


def test_requests_without_such_attributes_are_not_searched() -> None:
    assert not may_have_contents(EngineRequest)
    assert may_have_contents(Own)

    class Slotted:
        __slots__ = ("prompt_embeds",)

    class Asked:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    assert may_have_contents(Slotted)
    assert may_have_contents(Asked)


@pytest.mark.parametrize(
    ("name", "shares"),
    [("images", False), ("prompt_embedding_table", True), ("lora_request", False), ("encoder_input_ids", False)],
)
def test_contents_of_other_names_and_behind_proxies(name: str, shares: bool) -> None:
    """Those of equal embeddings share pages; media and adapters without a name share none."""
    manager = make_hybrid(FULL, num_pages=64)

    class Proxy:
        __slots__ = ("other",)

        def __init__(self, other: Any) -> None:
            object.__setattr__(self, "other", other)

        def __getattribute__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "other"), name)

    def make(request_id: str, value: Any) -> Any:
        request = EngineRequest(request_id, [0] * 13)
        values = {attribute: getattr(request, attribute) for attribute in ("request_id", "all_token_ids", "num_tokens")}
        others = {"num_computed_tokens": 0, "sampling_params": None, "status": 1, name: value}
        return Proxy(type("Own", (), values | others)())

    contents = np.arange(26, dtype=np.float32).reshape(13, 2)
    manager.allocate_slots(make("a", contents), 13)
    assert manager.get_computed_pages(make("b", contents + 1))[1] == 0
    assert manager.get_computed_pages(make("c", contents.copy()))[1] == (12 if shares else 0)
    assert manager.get_computed_pages(make("d", None))[1] == 0

"""Reference windows: the prompt is always visible, and of the answer only the last tokens."""

from __future__ import annotations

from typing import Any

import pytest
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageHashing,
    ReferenceWindowSpec,
    RequestTraits,
    RunningBatch,
)
from pagepool.errors import ArgumentError, ArgumentTypeError

MAX_LEN, WINDOW, PAGE_SIZE = 256, 6, 4
PROMPT = list(range(30))  # seven pages, and half of the eighth
ANSWER = list(range(100, 160))
REFERENCE = ReferenceWindowSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False, sliding_window=WINDOW)
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False)


def make_batch(*specs: Any, pools: int = 1, **options: Any) -> RunningBatch:
    names = ["kv", *(f"pool{i}" if pools > 1 else "kv" for i in range(1, len(specs)))]
    groups = [CacheGroupSpec(spec, pool=name) for spec, name in zip(specs, names, strict=True)]
    manager = CacheManager(dict.fromkeys(names, 200) if pools > 1 else 200, groups, MAX_LEN, **options)
    return RunningBatch(manager, MultiGroupPageTable(4, MAX_LEN, MAX_LEN, page_sizes=[PAGE_SIZE] * len(specs)))


def run_row(batch: RunningBatch, row: int, prompt: list[int], answer: list[int], **traits: Any) -> int | None:
    """Admit a prompt, and append an answer token by token. Return the hit tokens."""
    num_hits = batch.admit(row, prompt, traits=RequestTraits(**traits) if traits else None)
    for token in answer:
        assert batch.step([row], [token]) is not None
    batch.check()
    return num_hits


def held_pages(batch: RunningBatch, row: int, group: int = 0) -> list[bool]:
    """Return for each page of a row whether it is held."""
    table = batch.group_tables[group]
    return [page > 0 for page in table.page_table_cpu[row, : table.num_pages_per_row[row]].tolist()]


# --- pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(REFERENCE,), (FULL, REFERENCE)])
@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("num_tokens", [35, 40])
def test_pages_between_prompt_and_window_are_given_back(specs: tuple[Any, ...], pools: int, num_tokens: int) -> None:
    batch = make_batch(*specs, pools=pools)
    run_row(batch, 0, PROMPT, ANSWER[:num_tokens])
    last = len(PROMPT) + num_tokens - 1  # the position of the last token, whose own slot is written by the last step
    expected = [page < 8 or (page + 1) * PAGE_SIZE > last - WINDOW + 1 for page in range(last // PAGE_SIZE + 1)]
    assert held_pages(batch, 0, len(specs) - 1) == expected
    assert sum(expected) == 8 + (3 if num_tokens == 35 else 2)
    batch.release([0])
    batch.check()


def test_a_long_answer_takes_few_pages() -> None:
    manager = CacheManager(13, [CacheGroupSpec(REFERENCE)], MAX_LEN)
    batch = RunningBatch(manager, MultiGroupPageTable(1, MAX_LEN, MAX_LEN, page_sizes=[PAGE_SIZE]))
    run_row(batch, 0, PROMPT, [1] * 200)
    assert sum(held_pages(batch, 0)) <= 11


def test_a_request_of_the_manager() -> None:
    manager = CacheManager(60, [CacheGroupSpec(REFERENCE)], MAX_LEN)
    request = EngineRequest("r", PROMPT)
    assert manager.allocate_slots(request, len(PROMPT)) is not None
    request.num_computed_tokens = len(PROMPT)
    for token in ANSWER[:40]:
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    [ids] = manager.get_page_ids("r")
    assert [page > 0 for page in ids] == [page < 8 or page >= 16 for page in range(18)]
    manager.free(request)
    manager.check()
    again = EngineRequest("again", [*PROMPT, *ANSWER[:40]])
    assert manager.get_computed_pages(again)[1] == 28


# --- hits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(REFERENCE,), (FULL, REFERENCE)])
def test_answers_are_not_cached(specs: tuple[Any, ...]) -> None:
    batch = make_batch(*specs)
    run_row(batch, 0, PROMPT, ANSWER)
    batch.release([0])
    assert batch.probe(1, [*PROMPT, *ANSWER]) == 28
    assert run_row(batch, 1, [*PROMPT, *ANSWER], []) == 28  # the answer is part of a longer prompt
    batch.release([1])
    assert batch.probe(1, [*PROMPT, *ANSWER]) == 88


def test_a_preempted_request_hits_its_prompt_alone() -> None:
    batch = make_batch(REFERENCE)
    run_row(batch, 0, [*PROMPT, *ANSWER], [])  # all of it is a prompt
    batch.release([0])
    known = [*PROMPT, *ANSWER[:20]]
    assert batch.probe(1, known) == 48
    assert batch.probe(1, known, traits=RequestTraits(num_prompt_tokens=len(PROMPT))) == 28
    assert run_row(batch, 1, known, ANSWER[20:40], num_prompt_tokens=len(PROMPT)) == 28
    assert held_pages(batch, 1)[:9] == [True] * 8 + [False]
    manager = CacheManager(60, [CacheGroupSpec(REFERENCE)], MAX_LEN)
    first = EngineRequest("first", [*PROMPT, *ANSWER])
    manager.allocate_slots(first, 90)
    manager.free(first)
    second = EngineRequest("second", PROMPT)
    second.append_output_token_ids(ANSWER)
    assert manager.get_computed_pages(second)[1] == manager.probe(second).num_hit_tokens == 28


def test_a_prompt_of_whole_pages_hits_whole_where_an_answer_follows() -> None:
    batch = make_batch(REFERENCE)
    run_row(batch, 0, PROMPT[:28], ANSWER[:9])
    batch.release([0])
    assert batch.probe(1, PROMPT[:28]) == 24  # one token is left to compute
    assert batch.probe(1, [*PROMPT[:28], 7], traits=RequestTraits(num_prompt_tokens=28)) == 28


@pytest.mark.parametrize("specs", [(REFERENCE,), (FULL, REFERENCE)])
@pytest.mark.parametrize("caches", ["scheduled", "computed"])
@pytest.mark.parametrize("is_back", [False, True])
def test_no_group_hits_an_answer(specs: tuple[Any, ...], caches: str, is_back: bool) -> None:
    """What full attention computes in an answer comes of layers that saw less than they do in a prompt."""
    batch = make_batch(*specs, caches=caches)
    whole = [*PROMPT, *ANSWER[:30]]
    if is_back:  # it was preempted
        run_row(batch, 0, whole, [1], num_prompt_tokens=len(PROMPT))
    else:
        run_row(batch, 0, PROMPT, ANSWER[:30])
    batch.release([0])
    assert run_row(batch, 1, whole, [1]) == 28
    pages = [ids[:15] for ids in batch.get_page_ids(1)]
    batch.release([1])
    assert run_row(batch, 2, [*whole, 1], []) == 60
    assert [ids[:15] for ids in batch.get_page_ids(2)] == pages
    batch.check()


def test_no_state_of_an_answer_is_kept() -> None:
    state = MambaSpec(PAGE_SIZE, ((2, 2),), "float32", checkpoint_interval=8)
    batch = make_batch(REFERENCE, state)
    whole = list(range(100))
    traits = RequestTraits(num_prompt_tokens=30, resume_at=(24, 48))
    assert batch.admit(0, whole, num_tokens=1, traits=traits) == 0
    written: list[int] = []
    for num_tokens in (30, 69):
        batch.plan([0], num_tokens)
        written += batch.take_moves().writes.num_tokens.tolist()
    assert written == [8, 16, 24]
    batch.release([0])
    assert batch.probe(0, whole) == 24


def test_chunks_of_an_answer_are_given_back() -> None:
    chunks = ChunkedLocalAttentionSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False, attention_chunk_size=8)
    batch = make_batch(REFERENCE, chunks)
    run_row(batch, 0, PROMPT, [1] * 100)
    assert sum(held_pages(batch, 0, 1)) <= 3


@pytest.mark.parametrize("specs", [(REFERENCE,), (FULL, REFERENCE), (REFERENCE, FULL, REFERENCE)])
def test_a_drafter_drops_one_page(specs: tuple[Any, ...]) -> None:
    """Groups that hit leading pages are looked up together."""
    batch = make_batch(*specs, hashing=PageHashing(use_eagle=True))
    run_row(batch, 0, PROMPT, ANSWER[:5])
    batch.release([0])
    assert run_row(batch, 0, PROMPT, ANSWER[:5]) == 24


# --- forks and cuts -----------------------------------------------------------------------------------------------


def test_a_fork_has_the_prompt_of_its_source() -> None:
    batch = make_batch(REFERENCE)
    run_row(batch, 0, PROMPT, ANSWER[:5])
    batch.fork(0, [1])
    batch.take_moves()
    for token in ANSWER[5:40]:
        assert batch.step([0, 1], [token, token + 1]) is not None
    batch.check()
    assert held_pages(batch, 0) == held_pages(batch, 1) == [page < 8 or page >= 16 for page in range(18)]
    batch.release([0, 1])
    assert batch.probe(0, [*PROMPT, *ANSWER[:40]]) == 28


def test_a_row_goes_back_within_its_window() -> None:
    batch = make_batch(REFERENCE)
    run_row(batch, 0, PROMPT, ANSWER[:40])
    batch.trim([0], 69)
    with pytest.raises(ArgumentError, match="given back"):
        batch.trim([0], 60)
    batch.trim([0], 20)  # into the prompt, which then ends there
    run = ANSWER[:30]
    for token in run:
        assert batch.step([0], [token]) is not None
    batch.check()
    assert held_pages(batch, 0) == [page < 5 or page >= 11 for page in range(13)]
    batch.release([0])
    assert batch.probe(0, [*PROMPT[:20], *run]) == 20


def test_pages_behind_a_cut_prompt_are_given_back() -> None:
    batch = make_batch(REFERENCE)
    batch.admit(0, PROMPT, num_tokens=12, reserve="prompt")
    assert batch.plan([0], 4) is not None
    batch.trim([0], 16)
    for token in ANSWER[:20]:
        assert batch.step([0], [token]) is not None
    batch.check()
    assert held_pages(batch, 0) == [page < 4 or page >= 7 for page in range(9)]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, 1.5, "3", -1, 1 << 70])
def test_wrong_prompts(value: Any) -> None:
    error = ArgumentError if isinstance(value, int) and not isinstance(value, bool) else ArgumentTypeError
    with pytest.raises(error, match="num_prompt_tokens"):
        RequestTraits(num_prompt_tokens=value)
    manager = CacheManager(60, [CacheGroupSpec(REFERENCE)], MAX_LEN)
    request: Any = EngineRequestWithPrompt("r", PROMPT, value)
    if error is ArgumentTypeError or value < 0:
        with refused(manager.stats, error, "num_prompt_tokens"):
            manager.get_computed_pages(request)
        with refused(manager.stats, error, "num_prompt_tokens"):
            manager.allocate_slots(request, 30)


class EngineRequestWithPrompt:
    """A request that says how long its prompt is."""

    sampling_params, status, num_computed_tokens = None, 0, 0

    def __init__(self, request_id: str, token_ids: list[int], num_prompt_tokens: Any) -> None:
        self.request_id, self.all_token_ids, self.num_prompt_tokens = request_id, token_ids, num_prompt_tokens
        self.num_tokens = len(token_ids)


def test_a_prompt_of_unknown_length_is_all_that_is_known() -> None:
    manager = CacheManager(60, [CacheGroupSpec(REFERENCE)], MAX_LEN)
    request: Any = EngineRequestWithPrompt("r", PROMPT, None)
    manager.allocate_slots(request, 30)
    manager.free(request)
    assert manager.get_computed_pages(EngineRequest("s", [*PROMPT, 1]))[1] == 28


def test_wrong_specs() -> None:
    with pytest.raises(ArgumentError, match="sliding_window: got 0"):
        ReferenceWindowSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False, sliding_window=0)

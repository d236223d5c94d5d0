"""The engine of examples/: its answers are those of a dense model, on one device and on several; its command line."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")

import numpy as np  # noqa: E402
from devices import Program, await_programs  # noqa: E402
from engine_workload import (  # noqa: E402
    AHEAD,
    HYBRID_WEIGHTS,
    KINDS,
    LIMITS,
    RING_WEIGHTS,
    RUNNERS,
    SEED,
    VOCAB,
    WEIGHTS,
    Engine,
    SamplingParams,
    Weights,
    answer_by_engine,
    answer_densely,
    check_answers,
    check_beams,
    check_drafts,
    check_outputs,
    check_rest,
    draft_well,
    exact_float32,  # noqa: F401
    make_asks,
    make_engine,
    run_command,
)

from pagepool.errors import RequestTooLargeError  # noqa: E402

command = pytest.importorskip("command")
from drafting import propose  # noqa: E402
from model import MIXERS  # noqa: E402
from ring_attention import RING  # noqa: E402
from stopwatch import Stopwatch  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def compile_anew() -> None:
    """Take no programs from tests in other files."""
    RUNNERS.clear()


@pytest.fixture
def engine() -> Engine:
    return make_engine()


# Answers.


@AHEAD
@KINDS
def test_answers_are_those_of_the_dense_model(weights: Weights, num_ahead: int) -> None:
    """Nothing is compiled after the warmup, which is the first one with these weights."""
    engine = make_engine(weights, max_num_batched_tokens=24 if weights is WEIGHTS else 16, max_steps_ahead=num_ahead)
    assert len(engine.padded_sizes) == (2 if weights is WEIGHTS else 1)
    check_answers(engine, make_asks(18), weights)
    assert weights is not HYBRID_WEIGHTS or engine.num_copied_pages > 18


@KINDS
def test_rows_that_wait_keep_their_sampled_tokens(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps ahead, a row that is not in the next step is in the one after."""
    engine, asks, rng = make_engine(weights, max_steps_ahead=3), make_asks(9), Random(SEED)
    is_ahead = engine.scheduler.is_ahead
    monkeypatch.setattr(engine.scheduler, "is_ahead", lambda request: rng.random() < 0.6 and is_ahead(request))
    requests, _ = answer_by_engine(engine, asks)
    assert [request.output for request in requests] == [answer_densely(*ask, weights) for ask in asks]
    check_rest(engine)


@AHEAD
@pytest.mark.parametrize("weights", [WEIGHTS, RING_WEIGHTS], ids=["attention", "ring"])
def test_answers_with_drafts(weights: Weights, num_ahead: int) -> None:
    """A step ahead begins where the drafts of the step before end that were accepted: the device knows it first."""
    engine, asks = make_engine(weights, num_drafts=2, max_steps_ahead=num_ahead), make_asks(18)
    batch = draft_well(engine, asks, weights)
    _, preempted = check_outputs(engine, asks, weights)
    assert preempted
    check_drafts(batch)


@pytest.mark.slow
def test_answers_with_all_drafts_that_a_ring_takes_back() -> None:
    """Of five drafts, three of which are rejected on average. Two entries lie in a page."""
    options = {"num_drafts": 5, "page_size": 8, "num_pages": 24}
    engine, asks = make_engine(RING_WEIGHTS, **options), make_asks(9)
    batch = draft_well(engine, asks, RING_WEIGHTS)
    check_outputs(engine, asks, RING_WEIGHTS)
    check_drafts(batch)


def test_a_stop_token_among_drafts_ends_the_answer() -> None:
    prompt, params = make_asks(2)[1]
    answer = answer_densely(prompt, params)
    engine = make_engine(num_drafts=2)
    engine.scheduler.propose = lambda token_ids, num_drafts: answer[len(token_ids) - len(prompt) :][:num_drafts]
    engine.add(prompt, replace(params, stop_token_id=answer[4]))
    streamed = [token_id for _, token_ids in engine.stream() for token_id in token_ids]
    assert streamed == answer[: answer.index(answer[4]) + 1]
    check_rest(engine)


def test_drafts_are_what_followed_the_same_tokens() -> None:
    assert propose([1, 2, 3, 4, 9, 2, 3, 4], 2) == [9, 2]
    assert propose([3, 5, 2, 3, 7, 3], 2) == [7, 3]
    assert propose([1, 2, 3], 2) == propose([1], 2) == propose([1, 1], 0) == []


@pytest.mark.slow
def test_rings_share_a_pool_with_pages_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "ring", RING._replace(pool="kv"))
    engine = make_engine(RING_WEIGHTS, num_pages=46, num_state_pages=46)
    assert [pool.num_pages for pool in engine.manager.pools.values()] == [46]
    check_answers(engine, make_asks(18), RING_WEIGHTS)


def test_each_turn_of_a_chat_hits_the_last_checkpoint_in_the_prompt_before() -> None:
    engine, prompt, params = make_engine(HYBRID_WEIGHTS), list(range(11)), SamplingParams(15)
    num_cached_tokens = []
    for turn in range(4):
        request = engine.add([*prompt, turn, turn + 1], params)
        list(engine.stream())
        assert request.output == answer_densely([*prompt, turn, turn + 1], params, HYBRID_WEIGHTS)
        prompt = request.token_ids
        num_cached_tokens.append(request.num_cached_tokens)
    assert num_cached_tokens == [0, 8, 24, 40]  # of prompts of 13, 30 and 47 tokens
    assert engine.manager.stats().queries.num_hit_tokens == sum(num_cached_tokens)
    check_rest(engine)


def test_checkpoints_are_written_inside_chunks() -> None:
    """Of up to 16 tokens: the prompt's last checkpoint is hit, though no chunk ends there."""
    engine, prompt, params = make_engine(HYBRID_WEIGHTS), list(range(45)), SamplingParams(3)
    first = engine.add(prompt, params)
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]  # 16, 32 and 45 tokens
    second = engine.add([*prompt, 90], params)
    list(engine.stream())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert [request.output for request in (first, second)] == [
        answer_densely(known, params, HYBRID_WEIGHTS) for known in (prompt, [*prompt, 90])
    ]
    check_rest(engine)


def test_arrays_are_exactly_as_long_as_their_pools() -> None:
    engine = make_engine(HYBRID_WEIGHTS, num_state_pages=17)
    assert {name: pool.num_pages for name, pool in engine.manager.pools.items()} == {"kv": 40, "states": 17}
    assert {keys.shape[1] for layer in engine.runner.cache.keys_and_values for keys in layer} == {40}
    assert {states.shape[1] for [states] in engine.runner.cache.row_pages} == {17}
    check_answers(engine, make_asks(18), HYBRID_WEIGHTS)
    assert engine.manager.stats().pools["states"].num_evicted_pages > 0


def test_an_id_outside_its_array_is_found() -> None:
    """JAX would read the last page."""
    engine = make_engine(HYBRID_WEIGHTS, num_state_pages=17)
    engine.runner.lengths = 40, 2
    engine.add([1, 2, 3], SamplingParams(2))
    engine.add([4, 5, 6], SamplingParams(2))
    with pytest.raises(AssertionError, match=r"^page ids from 0 to 2 of 2$"):
        engine.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "kind", "num_devices"),
    [("pallas", "linear", 2), ("gather", "linear", 8), ("pallas", "linear", 8), ("gather", "ring", 2)],
)
def test_answers_on_several_devices(attention: str, kind: str, num_devices: int) -> None:
    await_programs([Program("engine_workload.py", attention, kind, num_devices=num_devices)], timeout=300)


def test_a_prompt_hits_pages_that_are_computed_in_the_same_step(engine: Engine) -> None:
    num_hit_tokens = engine.manager.page_pool.stats.num_hit_tokens
    prompt = list(range(12))
    asks = [([*prompt, last], SamplingParams(4)) for last in (90, 91)]
    requests = [engine.add(*ask) for ask in asks]
    assert [request for request, _ in engine.step()] == requests
    assert engine.manager.page_pool.stats.num_hit_tokens == num_hit_tokens + len(prompt)
    list(engine.stream())
    assert [request.output for request in requests] == [answer_densely(*ask) for ask in asks]


def test_a_long_prompt_is_computed_in_chunks(engine: Engine) -> None:
    prompt, params = make_asks(30)[-1]
    prompt = [*prompt[::-1], *range(70 - len(prompt))]
    request = engine.add(prompt, params := replace(params, max_tokens=3))
    streamed = [engine.step() for _ in range(7)]
    assert streamed == [[], [], [], [], *([(request, [token_id])] for token_id in answer_densely(prompt, params))]
    check_rest(engine)


def test_an_answer_fills_its_row(engine: Engine) -> None:
    asks = [(list(range(first, first + 60)), SamplingParams(40)) for first in (0, 30)]
    check_outputs(engine, asks)
    search = engine.add_beams(*asks[0], 1)
    list(engine.stream())
    check_beams(search, asks[0], WEIGHTS)
    check_rest(engine)


def test_a_stop_token_ends_the_answer(engine: Engine) -> None:
    prompt, params = make_asks(2)[1]
    answer = answer_densely(prompt, params)
    stopped = engine.add(prompt, replace(params, stop_token_id=answer[4]))
    unseen = engine.add(prompt, stopped.params, streams=False)
    streamed = [token_id for request, token_ids in engine.stream() for token_id in token_ids if request is stopped]
    assert streamed == answer[: answer.index(answer[4]) + 1] == stopped.output == unseen.output
    check_rest(engine)


@AHEAD
def test_tokens_of_requests_that_do_not_stream_are_read_at_their_end(num_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asks, reads = make_engine(num_pages=200, max_steps_ahead=num_ahead), make_asks(9), []
    read = engine.scheduler.read

    def note_read(request: Any) -> list[int]:
        reads.append(request)
        return read(request)

    monkeypatch.setattr(engine.scheduler, "read", note_read)
    requests = [engine.add(*ask, streams=False) for ask in asks]
    assert list(engine.stream()) == []
    assert [request.output for request in requests] == [answer_densely(*ask) for ask in asks]
    assert sorted(map(id, reads)) == sorted(map(id, requests))
    check_rest(engine)


@AHEAD
def test_an_aborted_request_has_the_tokens_so_far(num_ahead: int) -> None:
    engine, (prompt, params) = make_engine(max_steps_ahead=num_ahead), make_asks(1)[0]
    requests = [engine.add(prompt, params, streams) for streams in (True, False)]
    num_streamed = 0
    while num_streamed < 5:
        num_streamed += sum(len(token_ids) for _, token_ids in engine.step())
    assert [len(request.output) for request in requests] == [5, 0]
    for request in requests:
        engine.abort(request)
        assert request.output == answer_densely(prompt, params)[:5]
    while engine.in_flight:
        engine.end_step()
    check_rest(engine)


# What cannot work.


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        ([], 1, ValueError, "prompt: got no tokens, allowed: at least 1"),
        ([1, VOCAB], 1, ValueError, "prompt: got token id 96, allowed: 0 to 95"),
        ([-1], 1, ValueError, "prompt: got token id -1, allowed: 0 to 95"),
        ([1.0], 1, TypeError, "'float' object cannot be interpreted as an integer"),
        ([1] * 60, 41, ValueError, "request: got 101 tokens with its answer, allowed: 100"),
    ],
)
def test_requests_that_cannot_run_are_refused(
    engine: Engine, prompt: list[int], max_tokens: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        engine.add(prompt, SamplingParams(max_tokens))
    assert not engine.scheduler.waiting
    check_rest(engine)


def test_requests_larger_than_the_pool_are_refused() -> None:
    engine = Engine(WEIGHTS, **{**LIMITS, "num_pages": 5})
    engine.add([1] * 10, SamplingParams(7))
    with pytest.raises(
        RequestTooLargeError, match=r"^a request of 17 tokens in steps of up to 16 needs 5 pages, the pool has 4$"
    ):
        engine.add([1] * 10, SamplingParams(8))
    assert len(engine.scheduler.waiting) == 1


def test_an_engine_whose_pages_are_held_by_others_does_not_spin(engine: Engine) -> None:
    pages = engine.manager.page_pool.get_new_pages(LIMITS["num_pages"] - 1)
    request = engine.add([1, 2, 3], SamplingParams(1))
    with pytest.raises(RuntimeError, match=r"^nothing can run: 1 requests wait, 0 have rows$"):
        engine.step()
    engine.manager.page_pool.free_pages(pages)
    assert [streamed for streamed, _ in engine.stream()] == [request]
    check_rest(engine)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -0.1}, {"temperature": math.nan}, {"top_k": -1}, {"seed": 2**31}], ids=str
)
def test_sampling_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: got "):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"max_num_reqs": 0}, {"max_num_batched_tokens": 0}, {"num_pages": 0}, {"page_size": 0}, {"num_devices": 99}],
    ids=str,
)
def test_engines_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"got .*allowed"):
        Engine(WEIGHTS, **{**LIMITS, **wrong})


@pytest.mark.parametrize(
    ("name", "shape"),
    [("key", None), ("more", (1,)), ("key", (2, 32, 4)), ("up", (2, 32, 63)), ("final_norm", (33,))],
    ids=str,
)
def test_weights_that_are_no_model_are_refused(name: str, shape: tuple[int, ...] | None) -> None:
    weights = {key: array for key, array in WEIGHTS.items() if key != name}
    if shape is not None:
        weights[name] = np.zeros(shape, dtype=np.float32)
    with pytest.raises(ValueError, match=r"^weights: got "):
        Engine(weights, **LIMITS)


# The command line.


def test_the_command_streams_and_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["Who owns page 7?", "Who else?"]
    run_command(WEIGHTS, tmp_path, "--max-tokens", "4", "--profile", *prompts)
    text = capsys.readouterr().out
    for part in ("allocator", "commit", "model", "step"):
        assert f"\n{part} " in text
    for prompt in prompts:
        answer = answer_densely(command.encode(prompt), SamplingParams(4))
        assert f"\n{prompt!r} -> {command.decode(answer)!r} (" in text


def test_the_profile_of_a_part_waits_for_its_result() -> None:
    """Otherwise the time of the model would be charged to the engine's own Python, which reads the tokens."""
    waited: list[object] = []

    def wait(result: object) -> object:
        time.sleep(0.001)
        waited.append(result)
        return result

    watch = Stopwatch([1, 2, 2], wait)
    assert watch.count(2) == 2
    watch.end_lap()
    assert waited == [2]
    assert watch.laps[0] >= 0.001


@pytest.mark.parametrize("options", [["--beams", "4"], ["--beams", "6", "--turns", "3"], ["--beams", "4", "--kind", "linear"]])
def test_the_default_pool_has_pages_for_beams(options: list[str]) -> None:
    args = command.make_parser().parse_args(options)
    engine = command.make_engine(args)
    last_turn = (args.turns - 1) * ("x" * args.max_tokens + command.FOLLOW_UP)
    prompts = [prompt + last_turn for prompt in command.PROMPTS]
    assert len(command.add_prompts(engine, args, prompts)) == len(prompts)
    assert engine.manager.pools["kv"].num_pages > 48


@pytest.mark.slow
def test_the_program_answers_as_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices, and with another kernel."""
    options = ["--max-tokens", "4", "--max-num-batched-tokens", "16", "Who owns page 7?", "Who else?"]
    command.main(options)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # the example finds its files beside it
    program = Program("../../examples/engine.py", *options, "--attention", "pallas", "--num-devices", "8", num_devices=8)
    code = program.process.wait(timeout=300)
    assert (code, capsys.readouterr().out in program.end()) == (0, True)


@pytest.mark.parametrize(("option", "num_hits", "num_scores"), [("--samples", [32, 48], 0), ("--beams", [32], 4)])
def test_the_command_chats_with_a_hybrid(
    option: str, num_hits: list[int], num_scores: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second turn of a chat hits the last checkpoint in the first prompt; an equal chat hits one in the second prompt.
    Samples compute the last token of a prompt themselves.
    """
    prompt = "Who owns page 7, and who did before?"
    run_command(HYBRID_WEIGHTS, tmp_path, option, "2", "--turns", "2", "--max-tokens", "6", prompt)
    text = capsys.readouterr().out
    assert text.count(", score -") == num_scores
    assert "None" not in text
    num_tokens = 36 + len(num_hits) * (36 + 6 + 9) - (option == "--samples") * (1 + len(num_hits))
    assert f"Cached prompt tokens: {sum(num_hits)} of {num_tokens} " in text
    page_bytes, state_bytes = 2 * 2 * 4 * 2 * 8 * 4, 2 * 4 * 8 * 8 * 4  # layers, keys and values, tokens, heads
    num_bytes, one_range = 40 * page_bytes + 36 * state_bytes, (40 + 36 - 1) * (page_bytes + state_bytes)
    assert f"Memory of the cache: {num_bytes:,} bytes. With one range of page ids: {one_range:,} bytes." in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([""], "prompt: got no tokens"),
        (["Große Seiten"], "text: got 'ß'"),
        (["page " * 60], "request: got 332 tokens with its answer, allowed: 256"),
        (["--num-pages", "4", "page " * 10], "a request of 81 tokens in steps of up to 64 needs 11 pages, the pool has 3"),
        (["--stop", "ab"], "--stop: got 'ab'"),
        (["--stop", "é"], "text: got 'é'"),
        (["--max-tokens", "0"], "max_tokens: got 0"),
        (["--weights", "nowhere.npz"], "No such file"),
        (["--weights", __file__], "was not saved by numpy.savez"),
        (["--num-devices", "99"], "devices: got 99"),
        (["--samples", "0"], "num_samples: got 0"),
        (["--samples", "99999999999999999999"], "num_samples: got 99999999999999999999, allowed: 1 to 1024"),
        (["--samples", "2", "--beams", "2"], "--samples: got 2 with --beams 2, allowed: one of both"),
        (["--num-pages", "-1"], "num_pages: got -1, allowed: 2 to 1073741824"),
        (["--page-size", "-1"], "page_size: got -1"),
        (["--num-pages", "1000000000"], "the cache: RESOURCE_EXHAUSTED"),
        (["--store", "/dev/null"], "File exists: '/dev/null'"),
        (["--turns", "0"], "--turns: got 0, allowed: at least 1"),
        (["--seed", "-1"], "--seed: got -1, allowed: 0 to 2**31 - 1"),
        (["--beams", "9"], "num_beams: got 9"),
        (["--kind", "linear", "--drafts", "1"], "num_drafts: got 1, allowed with 0 steps ahead: up to 0"),
        (["--kind", "ring", "--drafts", "2", "--steps-ahead", "1"], "num_drafts: got 2, allowed with 1 steps ahead: up to 1"),
        (["--kind", "ring", "--ring-size", "3"], "period: got 4, allowed: 1 to 3"),
        (["--kind", "ring", "--page-size", "6"], "period: got 4, allowed with enable_caching: a divisor of 6"),
        (["--kind", "linear", "--num-state-pages", "8"], "num_pages['states']: got 8, allowed for 7 rows: at least 9"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_the_command_says_what_is_wrong(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(options)
    said = capsys.readouterr()
    assert exit_info.value.code == 2
    assert message in said.err
    assert not said.out

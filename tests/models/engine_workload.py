"""Requests for the engine of examples/, and the answers of the dense model. As a program: compares both on all devices."""

from __future__ import annotations

import copy
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import dense_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import count_compilations

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
pytest.importorskip("engine", reason="examples/ is not here")

import command  # noqa: E402
import runner  # noqa: E402
from engine import Engine  # noqa: E402
from layers import Weights  # noqa: E402
from model import Attention, make_weights  # noqa: E402
from request import Request, SamplingParams  # noqa: E402

from pagepool.host_pages import Pack  # noqa: E402

SEED = 5
VOCAB = 96
MIN_MARGIN = 1e-4
"""A hundred times the error of float32."""

LIMITS: dict[str, Any] = {
    "num_pages": 40,
    "page_size": 4,
    "ring_size": 9,
    "checkpoint_interval": 8,
    "max_num_reqs": 9,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
}
SIZES = {"vocab": VOCAB, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "hidden": 64, "period": 4}
WEIGHTS = make_weights(SEED, SIZES)
HYBRID_WEIGHTS = make_weights(SEED, SIZES, "linear")
RING_WEIGHTS = make_weights(SEED + 5, SIZES, "ring")  # with the seed itself a choice is too close
MODELS = pytest.mark.parametrize("weights", [WEIGHTS, HYBRID_WEIGHTS], ids=["attention", "linear"])
KINDS = pytest.mark.parametrize("weights", [WEIGHTS, HYBRID_WEIGHTS, RING_WEIGHTS], ids=["attention", "linear", "ring"])
AHEAD = pytest.mark.parametrize("num_ahead", [0, 1], ids=["at once", "one step ahead"])
Ask = tuple[list[int], SamplingParams]
RUNNERS: dict[Any, runner.ModelRunner] = {}
LOGITS: dict[Any, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def exact_float32() -> Iterator[None]:
    """CPUs use it anyway; other devices need the option. For the tests of files that import it."""
    with jax.default_matmul_precision("highest"):
        yield


class CheckingRunner(runner.ModelRunner):
    """A runner that checks each page id against the length of its group's arrays: JAX clips ids outside them."""

    lengths: tuple[int, int]

    def run(self, page_tables: Any, tokens: Any, params: Any, shared: Any = None) -> Any:
        check_ids(np.asarray(tokens.checkpoint_ids), self.lengths[1])
        for page_table, length in zip(page_tables, self.lengths, strict=False):
            check_ids(np.asarray(page_table), length)
        if shared is not None:
            check_ids(shared.page_ids, self.lengths[0])
        return super().run(page_tables, tokens, params, shared)

    def copy_pages(self, copies: Any) -> None:
        for group, length in enumerate(self.lengths):
            check_ids(copies.src[copies.group == group], length)
            check_ids(copies.dst[copies.group == group], length)
        super().copy_pages(copies)


def check_ids(page_ids: Any, length: int) -> None:
    assert ((page_ids >= 0) & (page_ids < length)).all(), f"page ids from {page_ids.min()} to {page_ids.max()} of {length}"


def make_runner(
    weights: Weights,
    num_pages: int,
    num_row_pages: int,
    page_size: int,
    ring_size: int,
    attend: Attention,
    num_devices: int,
    num_host_pages: Sequence[int] = (),
    num_drafts: int = 0,
) -> runner.ModelRunner:
    """Make a runner. It shares its program with others of the same shapes: what one of them has compiled is there for all."""
    lengths = num_pages, num_row_pages
    if num_pages == num_row_pages:  # one pool: smaller ones use the arrays of a large one
        num_pages = num_row_pages = max(num_pages, LIMITS["num_pages"])
    shapes = tuple((name, array.shape) for name, array in weights.items())
    sizes = num_pages, num_row_pages, page_size, ring_size, attend, num_devices
    key = shapes, sizes, num_drafts
    if key not in RUNNERS:
        RUNNERS[key] = CheckingRunner(weights, *sizes, num_drafts=num_drafts)
    made = copy.copy(RUNNERS[key])
    made.lengths = lengths
    made.weights = {name: jax.device_put(weights[name], array.sharding) for name, array in made.weights.items()}
    made.cache = jax.tree.map(jnp.copy, made.cache)
    if num_host_pages:
        made.host_pages = runner.HostPages(made.cache, num_host_pages, groups=(0, 1), page_axis=1)
    return made


def make_engine(weights: Weights = WEIGHTS, kind: type[Engine] = Engine, *args: Any, **options: Any) -> Any:
    """Return an engine that has compiled all its programs: those that share pages only where `options` say so."""
    with patch("engine.ModelRunner", make_runner):
        engine = kind(weights, *args, **{**LIMITS, "shares_prefixes": False, **options})
    engine.warmup()
    return engine


def run_command(weights: Weights, folder: Path, *options: str, shares_prefixes: bool = False) -> None:
    """Run the command of examples/ in this process, with saved weights; few tests compile the programs that share pages."""
    np.savez(path := folder / "weights.npz", **weights)
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with patch("engine.ModelRunner", make_runner):
        command.main([f"--weights={path}", *limits, *([] if shares_prefixes else ["--no-sharing"]), *options])


def make_asks(num_asks: int) -> list[Ask]:
    """Return prompts with common beginnings, some longer than a step's budget, a third of them greedy."""
    rng = np.random.default_rng(SEED)
    beginnings = [rng.integers(0, VOCAB, length).tolist() for length in (13, 26, 40)]
    asks = []
    for i in range(num_asks):
        prompt = beginnings[i % 3] + rng.integers(0, VOCAB, int(rng.integers(1, 24))).tolist()
        temperature, top_k = [(0.0, 0), (1.0, 0), (0.7, 8), (2.0, 3)][i % 4]
        asks.append((prompt, SamplingParams(int(rng.integers(8, 28)), temperature, top_k, seed=i)))
    return asks


@jax.jit
def make_noise(seed: Any, position: Any) -> Any:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (VOCAB,))


def compute_logits(weights: Weights, token_ids: list[int]) -> Any:
    """Return the dense model's logits of the next token. They are kept, since tests ask for the same ones."""
    key = id(weights), tuple(token_ids)
    if key not in LOGITS:
        LOGITS[key] = dense_model.compute_logits(weights, token_ids)
    return LOGITS[key]


def answer_densely(prompt: list[int], params: SamplingParams, weights: Weights = WEIGHTS) -> list[int]:
    """Return the answer of the dense model. Refuses choices so close that another summation order could change them."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + params.max_tokens and token_ids[len(prompt) :][-1:] != [params.stop_token_id]:
        logits = compute_logits(weights, token_ids)
        noisy = logits + params.temperature * np.asarray(make_noise(params.seed, len(token_ids) - 1))
        by_logit = np.argsort(-logits)
        allowed = by_logit[: params.top_k or VOCAB]
        first, second = (*np.sort(noisy[allowed])[::-1], -np.inf)[:2]
        least, next_one = (*logits[by_logit], -np.inf)[len(allowed) - 1 : len(allowed) + 1]
        assert min(first - second, least - next_one) > MIN_MARGIN, f"seed {SEED}: a choice is too close, take another seed"
        token_ids.append(int(allowed[noisy[allowed].argmax()]))
    return token_ids[len(prompt) :]


def search_densely(
    prompt: list[int], params: SamplingParams, num_beams: int, weights: Weights = WEIGHTS
) -> list[tuple[float, list[int]]]:
    """Return the scores and answers of a beam search with the dense model, the best first. Refuses close choices as above."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    is_finished = False
    while not is_finished:
        options = []
        for score, answer in beams:
            if len(answer) == params.max_tokens or answer[-1:] == [params.stop_token_id]:
                options.append((score, answer))
            else:
                logits = compute_logits(weights, prompt + answer)
                log_probabilities = logits - np.log(np.exp(logits).sum())
                options += [(score + float(log_probabilities[token]), [*answer, token]) for token in range(VOCAB)]
        options.sort(reverse=True)
        is_finished = options[:num_beams] == beams
        beams, following = options[:num_beams], options[1 : num_beams + 1]
        close = [one for one, (score, _) in zip(beams, following, strict=False) if one[0] - score < MIN_MARGIN]
        assert not close, f"seed {SEED}: a choice is too close, take another seed"
    return beams


def run_to_end(engine: Engine, arrivals: Sequence[Callable[[], Any]] = ()) -> set[Request]:
    """Run until nothing is left; one arrives before each second step. Returns the requests that were preempted."""
    streamed: dict[Request, list[int]] = {}
    preempted: set[Request] = set()
    todo, num_steps = deque(arrivals), 0
    while todo or not engine.is_idle:
        if todo and (num_steps % 2 == 0 or engine.is_idle):
            todo.popleft()()
        for request, token_ids in engine.step():
            streamed.setdefault(request, []).extend(token_ids)
        preempted |= {request for request in engine.scheduler.waiting if request.output}
        num_steps += 1
        if num_steps % 8 == 0:
            engine.scheduler.batch.check()
    assert all(request.streams and request.output == token_ids for request, token_ids in streamed.items())
    return preempted


def answer_by_engine(engine: Engine, asks: list[Ask]) -> tuple[list[Request], set[Request]]:
    """Return the finished requests, half of which arrive while others run, and those that were preempted. Two thirds stream."""
    requests: list[Request] = []

    def add(ask: Ask) -> None:
        requests.append(engine.add(*ask, streams=len(requests) % 3 > 0))

    for ask in asks[: len(asks) // 2]:
        add(ask)
    preempted = run_to_end(engine, [lambda ask=ask: add(ask) for ask in asks[len(asks) // 2 :]])
    return requests, preempted


def check_outputs(engine: Engine, asks: list[Ask], weights: Weights = WEIGHTS) -> tuple[list[Request], set[Request]]:
    """The engine's answers are the dense model's. Returns what `answer_by_engine` does."""
    requests, preempted = answer_by_engine(engine, asks)
    assert [request.output for request in requests] == [answer_densely(*ask, weights) for ask in asks]
    check_rest(engine)
    return requests, preempted


def check_answers(engine: Engine, asks: list[Ask], weights: Weights = WEIGHTS) -> None:
    """The engine's answers are the dense model's, with hits, evictions, preemptions and chunks on the way. Nothing is left."""
    print(f"seed {SEED}")
    with count_compilations() as compilations:
        requests, preempted = answer_by_engine(engine, asks)
    assert not compilations
    expected = [answer_densely(*ask, weights) for ask in asks]
    assert [request.output for request in requests] == expected
    stats = engine.manager.stats()
    assert stats.queries.num_hit_tokens > 0
    assert stats.preempted_queries.num_requests >= len(preempted)
    assert stats.num_evicted_pages > 0
    assert {request.params.temperature > 0 for request in preempted} == {False, True}
    check_rest(engine)
    check_variety(expected)


class BatchInBetween:
    """A batch whose methods a test replaces in a subclass."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)


class DraftingBatch(BatchInBetween):
    """A batch that counts drafts."""

    num_drafts = num_accepted = 0

    def plan(self, rows: Any, num_tokens: Any, num_drafts: Any, step: Any) -> Any:
        self.num_drafts += num_drafts.sum()
        return self.batch.plan(rows, num_tokens, num_drafts, step)

    def settle(self, step: Any, token_ids: Any = None, counts: Any = None, **options: Any) -> Any:
        if counts is not None:
            self.num_accepted += (counts[counts > 0] - 1).sum()
        return self.batch.settle(step, token_ids, counts, **options)


def draft_well(engine: Any, asks: list[Ask], weights: Weights, num_samples: int = 1) -> DraftingBatch:
    """Let an engine have drafts four fifths of which are right, and return its batch."""
    rng = Random(SEED)
    texts = [
        prompt + answer_densely(prompt, replace(params, seed=params.seed + i), weights)
        for prompt, params in asks
        for i in range(num_samples)
    ]

    def propose(token_ids: list[int], num_drafts: int) -> list[int]:
        text = next((text for text in texts if text[: len(token_ids)] == token_ids), token_ids)
        return [token_id if rng.random() < 0.8 else VOCAB - 1 for token_id in text[len(token_ids) :][:num_drafts]]

    engine.scheduler.propose = propose
    engine.scheduler.batch = batch = DraftingBatch(engine.scheduler.batch)
    return batch


def check_drafts(batch: DraftingBatch) -> None:
    """Assert that many drafts were accepted, and many rejected."""
    print(batch.num_drafts, batch.num_accepted)
    assert batch.num_accepted > 50
    assert batch.num_drafts - batch.num_accepted > 50


def let_steps_fail(engine: Any, rng: Random, share: float) -> list[str]:
    """Let the model fail with that probability before it runs, and as often afterwards, and repeat steps that fail. Returns the
    list of the failures.
    """
    step, run, failures = engine.step, engine.runner.run, []

    def fail_at_times(message: str) -> None:
        if rng.random() < share:
            failures.append(message)
            raise FloatingPointError(message)

    def run_at_times(*args: Any) -> Any:
        fail_at_times("before the model ran")
        next_tokens = run(*args)
        fail_at_times("while the model ran")
        return next_tokens

    def step_again() -> Any:
        while True:
            with suppress(FloatingPointError):
                return step()

    engine.runner.run, engine.step = run_at_times, step_again
    return failures


def fail_at_random(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let a tenth of the calls that save pages fail, and two fifths of those that load some. Returns how many of each did."""
    rng, num_failed = Random(SEED), Counter[str]()

    def make_failing(name: str) -> Callable[..., Any]:
        call, share = getattr(Pack, name), 0.1 if name == "save" else 0.4

        def run_at_times(*args: Any) -> Any:
            if rng.random() < share:
                num_failed[name] += 1
                raise MemoryError("at random")
            return call(*args)

        return run_at_times

    for name in ("save", "load"):
        monkeypatch.setattr(Pack, name, make_failing(name))
    return num_failed


def check_beams(search: Any, ask: Ask, weights: Weights) -> None:
    """Tokens and scores are those of the dense model."""
    expected = search_densely(*ask, search.num_beams, weights)
    assert [beam.output for beam in search.beams] == [answer for _, answer in expected]
    assert [beam.score for beam in search.beams] == pytest.approx([score for score, _ in expected], abs=1e-3)


def check_samples(requests: Sequence[Any], ask: Ask, weights: Weights) -> None:
    prompt, params = ask
    seeds = range(params.seed, params.seed + len(requests))
    assert [request.output for request in requests] == [
        answer_densely(prompt, replace(params, seed=seed), weights) for seed in seeds
    ]


def run_all(engine: Engine, asks: list[Ask], weights: Weights) -> None:
    """Samples, beams and single requests side by side: half of them arrive while others run."""
    samples: list[tuple[list[Any], Ask]] = []
    searches: list[tuple[Any, Ask]] = []

    def add(i: int, ask: Ask) -> None:
        if i % 3 == 0:
            searches.append((engine.add_beams(*ask, 2 + i % 2), ask))
        else:
            samples.append((engine.add_samples(*ask, (1, 3)[i % 2], streams=i % 4 < 2), ask))

    for i, ask in enumerate(asks[: len(asks) // 2]):
        add(i, ask)
    with count_compilations() as compilations:
        run_to_end(engine, [lambda i=i: add(i, asks[i]) for i in range(len(asks) // 2, len(asks))])
    assert not compilations
    for search, ask in searches:
        check_beams(search, ask, weights)
    for requests, ask in samples:
        check_samples(requests, ask, weights)
    check_rest(engine)


def check_rest(engine: Engine) -> None:
    """Assert that no row and no page is taken."""
    engine.scheduler.batch.check()
    assert not engine.scheduler.batch.is_admitted.any()
    for pool in engine.manager.pools.values():
        assert pool.get_num_free_pages() == pool.num_pages - 1
    assert sorted(engine.scheduler.free_rows) == list(range(engine.num_rows - 1))


def check_variety(answers: list[list[int]]) -> None:
    """Assert that the answers vary: a model that repeats itself would hide what it reads."""
    assert len({tuple(answer[:8]) for answer in answers}) == len(answers)
    assert min(len(set(answer)) / len(answer) for answer in answers) > 0.3
    assert len({token_id for answer in answers for token_id in answer}) > VOCAB // 2


def main(attention: str, kind: str) -> None:
    """Check a model whose heads are divided between all devices; unless its kernel is interpreted, it has a host tier."""
    num_devices = len(jax.devices())
    weights = make_weights(SEED, SIZES | {"heads": 2 * num_devices, "kv_heads": num_devices}, kind)
    num_host_pages = 300 if attention == "gather" else 0
    attend = command.ATTENTIONS[attention]
    engine = make_engine(weights, attend=attend, num_devices=num_devices, num_host_pages=num_host_pages)
    check_answers(engine, make_asks(18), weights)


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main(*sys.argv[1:])

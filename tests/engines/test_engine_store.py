"""The engine of examples/ on a store in files: what a killed engine leaves, engines that share, and a store that fails."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")
pytest.importorskip("xxhash")

from contents_store import STORE_MODULES  # noqa: E402
from devices import Program, await_programs  # noqa: E402
from engine_workload import (  # noqa: E402
    AHEAD,
    HYBRID_WEIGHTS,
    KINDS,
    LIMITS,
    MODELS,
    SEED,
    SIZES,
    WEIGHTS,
    Weights,
    answer_by_engine,
    answer_densely,
    check_outputs,
    check_rest,
    exact_float32,  # noqa: F401
    fail_at_random,
    let_steps_fail,
    make_asks,
    make_weights,
    run_all,
    run_command,
)
from privileges import without_privileges  # noqa: E402
from store_process import NUM_ASKS, make_stored, wait_until_saved  # noqa: E402

ASKS = make_asks(NUM_ASKS)


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait until the store has answered, on slow machines too."""
    if "impatient" not in request.fixturenames:
        for module in STORE_MODULES:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def impatient() -> None:
    """Keep the clock."""


def fill(folder: Path, weights: Weights = WEIGHTS, asks: Any = ASKS) -> None:
    """Let an engine that closes save the pages of its requests."""
    engine = make_stored(folder, weights)
    check_outputs(engine, asks, weights)
    engine.close()


def check_hits(engine: Any, weights: Weights, requests: Any) -> None:
    """At least 95 % of the full pages of the prompts were hit, of a hybrid up to the last checkpoint."""
    size = LIMITS["checkpoint_interval" if weights is HYBRID_WEIGHTS else "page_size"]
    most = sum((request.num_prompt_tokens - 1) // size * size for request in requests)
    num_hits = engine.manager.stats().queries.num_hit_tokens
    print(f"{num_hits} of {most} tokens were hit; {engine.manager.stats().store}")
    assert num_hits >= 0.95 * most


# What a killed engine leaves.


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an engine that was killed after its saves."""
    folder = tmp_path_factory.mktemp("killed")
    program = Program("store_process.py", str(folder), "wait", num_devices=1)
    while not (folder / "saved").exists() and program.process.poll() is None:
        time.sleep(0.01)
    text = program.end()
    assert program.process.returncode == -signal.SIGKILL, text
    return folder


@AHEAD
@MODELS
def test_an_engine_that_starts_again_hits_its_prompts(weights: Weights, num_ahead: int, killed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(killed, tmp_path / "folder")
    engine = make_stored(folder, weights, max_steps_ahead=num_ahead)
    requests, _ = check_outputs(engine, ASKS, weights)
    check_hits(engine, weights, requests)
    assert engine.manager.stats().store.num_loaded_pages > 30
    engine.close()


def test_engines_with_other_weights_share_nothing(killed: Path) -> None:
    weights = make_weights(SEED + 1, SIZES)
    engine = make_stored(killed, weights)
    check_outputs(engine, ASKS[:3], weights)
    stats = engine.manager.stats().store
    assert (stats.num_looked_up_pages > 10, stats.num_found_pages) == (True, 0)
    engine.close()


def test_samples_fork_where_the_store_has_the_whole_prompt(tmp_path: Path) -> None:
    prompt, params = make_asks(6)[5]
    prompt = prompt[: len(prompt) // 4 * 4 + 1]
    for is_filled in (False, True):
        engine = make_stored(tmp_path)
        requests = engine.add_samples(prompt, params, 3)
        list(engine.stream())
        assert [request.output for request in requests] == [answer_densely(prompt, request.params) for request in requests]
        assert (engine.manager.stats().store.num_loaded_pages > 0) == is_filled
        check_rest(engine)
        engine.close()


@pytest.mark.slow
@MODELS
def test_an_engine_short_of_pages(weights: Weights, tmp_path: Path) -> None:
    """Neither the pool nor the host has all pages: they come back from the store."""
    engine, asks = make_stored(tmp_path, weights, num_pages=24, num_host_pages=48), make_asks(18)
    for _ in range(2):
        check_outputs(engine, asks, weights)
    assert engine.manager.stats().num_evicted_pages > 0
    assert engine.manager.stats().store.num_loaded_pages > 20
    engine.close()


# Engines that share.


@KINDS
def test_two_engines_with_one_folder(weights: Weights, tmp_path: Path) -> None:
    engines = [make_stored(tmp_path, weights) for _ in range(2)]
    check_outputs(engines[0], ASKS, weights)
    wait_until_saved(engines[0])
    requests, _ = check_outputs(engines[1], ASKS, weights)
    check_hits(engines[1], weights, requests)
    asks = [([1, *prompt], params) for prompt, params in ASKS]
    added = [engine.add(*ask) for ask in asks for engine in engines]
    while not all(engine.is_idle for engine in engines):
        for engine in engines:
            if not engine.is_idle:
                engine.step()
    assert [request.output for request in added] == [answer_densely(*ask, weights) for ask in asks for _ in engines]
    for engine in engines:
        engine.close()


def test_a_request_is_looked_up_before_a_step_of_another_thread_can_admit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, num_waiting = make_stored(tmp_path), []
    monkeypatch.setattr(engine.store, "fetch", lambda request: num_waiting.append(len(engine.scheduler.waiting)))
    engine.add(*ASKS[0])
    engine.add_beams(*ASKS[1], 2)
    assert num_waiting == [0, 1]


@pytest.mark.slow
def test_replicas_of_a_service_share_a_folder(tmp_path: Path) -> None:
    """Requests arrive while another thread steps."""
    pytest.importorskip("zmq")
    serving = pytest.importorskip("serving")
    rng = Random(SEED)
    prompts = [serving.Prompt("".join(rng.choices(serving.ALPHABET, k=rng.randint(100, 300)))) for _ in range(10)]
    replies = []
    for is_first in (True, False):
        replica = serving.Replica(store=tmp_path)

        async def generate_all(replica: Any = replica) -> list[Any]:
            return await asyncio.gather(*(replica.generate(prompt) for prompt in prompts))

        replies.append(asyncio.run(generate_all()))
        stats = replica.engine.store.stats()
        assert (stats.num_waiting_requests, stats.num_late_requests, stats.num_loaded_pages > 0) == (0, 0, not is_first)
        replica.publisher.close()
        replica.engine.close()
    assert [reply["answer"] for reply in replies[0]] == [reply["answer"] for reply in replies[1]]
    num_most = sum((reply["tokens"] - 1) // serving.PAGE_SIZE * serving.PAGE_SIZE for reply in replies[1])
    assert sum(reply["cached"] for reply in replies[1]) >= 0.95 * num_most


@pytest.mark.slow
def test_two_processes_with_one_folder_at_once(tmp_path: Path) -> None:
    await_programs([Program("store_process.py", str(tmp_path), "close", num_devices=i) for i in (1, 1, 2)], timeout=500)


# A store that fails.


def put_garbage(folder: Path) -> None:
    """Damage all files, in one of several ways each; files that are being written get their names meanwhile."""
    rng = Random(SEED)
    for path in [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp"]:
        data = bytearray(path.read_bytes())
        match rng.randrange(5):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                data = bytearray(rng.randbytes(len(data)))
            case 2:
                del data[rng.randrange(len(data)) :]
            case 3:
                data += b"more"
            case 4:
                path.unlink()
                path.mkdir()
                continue
        path.write_bytes(data)


def forbid_writes(folder: Path) -> None:
    """Forbid writes, while a writer renames its files."""
    for path in [folder, *folder.rglob("*")]:
        with suppress(FileNotFoundError):
            path.chmod(0o555 if path.is_dir() else 0o444)


def allow_writes(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


def remove(folder: Path) -> None:
    """Remove all at once: a writer would make new files while they are removed one by one."""
    folder.rename(folder.with_name("removed"))


FAULTS: dict[str, tuple[Callable[[Path], None], Callable[[], AbstractContextManager[None]]]] = {
    "deleted": (remove, nullcontext),
    "garbage": (put_garbage, nullcontext),
    "read-only": (forbid_writes, without_privileges),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@MODELS
def test_a_folder_that_breaks_meanwhile(weights: Weights, fault: str, tmp_path: Path) -> None:
    """It costs hits. Tokens are those of the dense model, before and afterwards."""
    folder, (break_folder, limit) = tmp_path / "folder", FAULTS[fault]
    fill(folder, weights)
    engine = make_stored(folder, weights)
    requests, _ = answer_by_engine(engine, ASKS[:4])
    num_loaded = engine.manager.stats().store.num_loaded_pages
    assert num_loaded > 0
    engine.add(*ASKS[4], streams=False)  # its first token may come now
    engine.step()
    break_folder(folder)
    with limit():
        requests += answer_by_engine(engine, ASKS[5:])[0]
    assert [request.output for request in requests] == [answer_densely(*ask, weights) for ask in ASKS[:4] + ASKS[5:]]
    engine.close()
    stats = engine.store.stats()
    print(stats)
    if fault == "read-only":
        allow_writes(folder)
        assert stats.num_unsaved_pages > 0
    if fault == "garbage":
        assert stats.num_damaged_pages > 0
        assert stats.num_missing_pages > 0
    again = make_stored(folder, weights)
    check_outputs(again, ASKS, weights)
    again.close()


@MODELS
def test_steps_and_transfers_that_fail_store_nothing_wrong(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine, without failures, answers as the dense model with the pages of the first."""
    engine, asks = make_stored(tmp_path, weights, max_steps_ahead=1), make_asks(18)
    with monkeypatch.context() as patch:
        num_failed = fail_at_random(patch)
        failures = let_steps_fail(engine, Random(SEED), 0.05)
        run_all(engine, asks, weights)
    assert min(len(failures), num_failed["save"]) > 2
    engine.close()
    engine = make_stored(tmp_path, weights)
    check_outputs(engine, asks, weights)
    assert engine.manager.stats().store.num_loaded_pages > 30
    engine.close()


def let_answers_wait(engine: Any) -> Callable[[], None]:
    """Let the store answer nothing until the result is called."""
    store, answers = engine.store._store, []
    poll = store.poll

    def keep_answers() -> list[Any]:
        answers.extend(poll())
        return []

    def answer() -> None:
        answers.extend(poll())
        store.poll = lambda: [answers.pop(0) for _ in list(answers)] + poll()

    store.poll = keep_answers
    return answer


def test_requests_go_first_while_others_wait_for_the_store(tmp_path: Path) -> None:
    fill(tmp_path)
    engine = make_stored(tmp_path)
    answer = let_answers_wait(engine)
    waiting = [engine.add(*ask) for ask in ASKS[:2]]
    assert [engine.step() for _ in range(5)] == [[]] * 5  # nothing else can run
    others = [engine.add(prompt[:3], params) for prompt, params in ASKS[2:4]]  # no full page
    while not all(request.is_finished for request in others):
        engine.step()
    assert [request.row for request in waiting] == [-1, -1]
    assert engine.manager.stats().store.num_waiting_requests == 2
    answer()
    list(engine.stream())
    assert [request.output for request in waiting] == [answer_densely(*ask) for ask in ASKS[:2]]
    assert waiting[0].num_cached_tokens >= (len(ASKS[0][0]) - 1) // 4 * 4 * 0.95
    assert [request.output for request in others] == [answer_densely(prompt[:3], params) for prompt, params in ASKS[2:4]]
    check_rest(engine)
    engine.close()


def test_a_store_without_answers_costs_the_deadline(tmp_path: Path, impatient: None) -> None:
    fill(tmp_path)
    engine = make_stored(tmp_path)
    let_answers_wait(engine)
    check_outputs(engine, ASKS)
    stats = engine.manager.stats().store
    assert (stats.num_late_requests, stats.num_loaded_pages, stats.num_waiting_requests) == (NUM_ASKS, 0, 0)
    engine.close()


@AHEAD
@MODELS
def test_requests_that_are_aborted(weights: Weights, num_ahead: int, tmp_path: Path) -> None:
    """Those that wait for the store, that compute, and that were preempted."""
    engine = make_stored(tmp_path, weights, num_pages=24, num_host_pages=100, max_steps_ahead=num_ahead)
    answer, rng = let_answers_wait(engine), Random(SEED)
    requests = [engine.add(*ask) for ask in ASKS]
    for request in requests[:2]:
        engine.abort(request)
    assert engine.manager.stats().store.num_waiting_requests == NUM_ASKS - 2
    answer()
    kept = requests[2:]
    while not engine.is_idle:
        engine.step()
        going = [request for request in kept if not request.is_finished]
        if len(going) > 3 and rng.random() < 0.2:
            kept.remove(gone := rng.choice(going))
            engine.abort(gone)
        engine.scheduler.batch.check()
    answers = {request: answer_densely(*ask, weights) for ask, request in zip(ASKS, requests, strict=True)}
    assert [request.output for request in kept] == [answers[request] for request in kept]
    assert len(kept) < NUM_ASKS - 2
    check_rest(engine)
    assert engine.manager.stats().store.num_waiting_requests == 0
    engine.close()


# The command.


def test_the_command_hits_what_it_computed_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        run_command(WEIGHTS, tmp_path, "--max-tokens=8", "--max-model-len=120", f"--store={tmp_path / 'pages'}")
        texts.append(capsys.readouterr().out)
    first, second = ([line.rpartition(" (")[0] for line in text.splitlines() if " -> '" in line] for text in texts)
    assert first == second
    assert " 0 loaded." in texts[0]
    assert " 0 loaded." not in texts[1]

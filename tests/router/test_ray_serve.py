"""The request router of Ray Serve: with replicas of this process, and by the example with two replicas of its engine."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from sources import ROOT, run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("ray", "jax", "fastapi", "zmq", "xxhash")), reason="ray[serve] is not there"
    ),
    pytest.mark.filterwarnings("default"),  # of Ray
]
PATIENCE = {  # of Serve with slow machines, in seconds
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "90",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "20",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "20",
}
LINE = re.compile(r"pagepool: (\d+) requests, (\d+) lost, (\d+) of (\d+) prompt.*, (\d+) bytes pulled")
MAX_ONGOING = 2


def tokenize(prompt: list[int]) -> list[int]:
    return prompt


class Replica:
    """What a router sees of a replica, and the requests that it has."""

    def __init__(self, replica_id: Any, rng: Random) -> None:
        self.replica_id, self.rng = replica_id, rng
        self.max_ongoing_requests = MAX_ONGOING
        self.routing_stats: dict[str, Any] = {}
        self.num_ongoing = 0
        self.is_dead = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        from ray.exceptions import ActorDiedError

        await asyncio.sleep(self.rng.choice((0, 0.001, 0.01)))
        if self.is_dead:
            raise ActorDiedError
        return self.num_ongoing


class Result:
    """The result of a request that a replica has taken."""

    def __init__(self) -> None:
        self.end: Any = lambda _: None

    def add_done_callback(self, callback: Any) -> None:
        self.end = callback


async def send(router: Any, replicas: list[Replica], request: Any, rng: Random) -> None:
    """Route a request as Serve does: a replica that is full or dead makes it route anew."""
    from ray.serve._private.common import ReplicaQueueLengthInfo

    from pagepool.router.ray_serve import IS_OLD as is_old

    is_retry = False
    while True:
        replica = await router._choose_replica_for_request(request, is_retry=is_retry)
        router.on_send_request(replica.replica_id)
        await asyncio.sleep(rng.choice((0, 0.001)))
        if replica.is_dead:
            router.on_replica_actor_died(replica.replica_id)
        else:
            is_accepted = replica.num_ongoing < MAX_ONGOING
            replica.num_ongoing += is_accepted
            queue = ReplicaQueueLengthInfo(is_accepted, replica.num_ongoing) if is_old else replica.num_ongoing
            router.on_new_queue_len_info(replica.replica_id, queue)
            if is_accepted:
                result = Result()
                router.on_request_routed(request, replica.replica_id, result)
                await asyncio.sleep(rng.choice((0, 0.001, 0.005)))
                replica.num_ongoing -= 1
                result.end(None)
                return
        is_retry = True


@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_routed(seed: int) -> None:
    """Requests are cancelled while they wait, replicas are full, die, come and go: no other request waits for ever, and none is
    counted when all have ended.
    """
    ray_serve = pytest.importorskip("pagepool.router.ray_serve", exc_type=Exception)
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    rng = Random(seed)
    deployment = DeploymentID("engines", "app")
    router = ray_serve.PrefixRequestRouter(deployment, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state(page_size=8, tokenize=f"{__name__}:tokenize")

    async def run() -> None:
        router.backoff_multiplier, router.max_backoff_s = 1, 0.001
        replicas: list[Replica] = []
        tasks: list[asyncio.Task[None]] = []
        cancelled = set()
        for i in range(1500):
            if i % 100 == 0 or rng.random() < 0.02:
                alive = [each for each in replicas if rng.random() < 0.7]
                for each in replicas:
                    each.is_dead = each not in alive
                replicas = [*alive, Replica(ReplicaID(f"replica{i}", deployment), rng)]
                if rng.random() < 0.8:
                    router.update_replicas(replicas)
            metadata = SimpleNamespace(internal_request_id=str(i), request_id=str(i), multiplexed_model_id="")
            prompt = [rng.randrange(4)] * rng.randrange(40)
            tasks.append(asyncio.create_task(send(router, replicas, ray_serve.PendingRequest([prompt], {}, metadata), rng)))
            if rng.random() < 0.1:
                cancelled.add(rng.choice(tasks))
                asyncio.get_running_loop().call_later(rng.choice((0, 0.001, 0.01)), rng.choice(list(cancelled)).cancel)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0, 0.001, 0.01)))
        router.update_replicas([Replica(ReplicaID("last", deployment), rng)])
        _, waiting = await asyncio.wait(tasks, timeout=60)
        assert not waiting, f"{len(waiting)} requests are not routed"
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert all(task in cancelled for task in tasks if task.cancelled())
        tasks.clear(), cancelled.clear()
        await asyncio.sleep(0.05)
        assert set(router._choice.loads.values()) <= {0}

    asyncio.run(run())


class Lender:
    """A handle of engines that lend prompts, and its only call."""

    def __init__(self, address: str | None) -> None:
        self.address, self.num_cancelled, self.prompts = address, 0, list[Any]()

    def options(self, *, stream: bool) -> Any:
        assert stream
        return SimpleNamespace(lend=SimpleNamespace(remote=self.lend))

    def lend(self, prompt: Any) -> Lender:
        self.prompts.append(prompt)
        return self

    async def __anext__(self) -> str:
        from ray.exceptions import ActorDiedError

        if self.address is None:
            raise ActorDiedError
        return self.address

    def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557#1", None])
@pytest.mark.parametrize("fails", [False, True])
def test_the_ingress_ends_the_loan(address: str | None, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead lender has no address; a loan ends after its answer or its failure, and not before."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from serving import ApartIngress, Prompt, tokenize

    lender, prompt = Lender(address), Prompt("What?")

    async def generate(*args: Any) -> dict[str, int]:
        assert lender.num_cancelled == 0
        assert args == (prompt, address)
        assert tokenize(*args) == tokenize(*lender.prompts)
        if fails:
            raise OSError("no engine")
        return {"cached": 8}

    ingress = ApartIngress(SimpleNamespace(generate=SimpleNamespace(remote=generate)), lender)
    if fails:
        with pytest.raises(OSError, match="no engine"):
            asyncio.run(ingress.answer(prompt))
    else:
        assert asyncio.run(ingress.answer(prompt)) == {"cached": 8}
    assert (lender.prompts, lender.num_cancelled) == ([prompt], 1)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.53.1", "CompatError: ray: got 2.53.1, allowed: 2.54, or 2.60 and later, with Serve"),
        ("2.59.0", "CompatError: ray: got 2.59.0, allowed: 2.54, or 2.60 and later, with Serve"),
        ("nightly", "CompatError: ray: got nightly, allowed: 2.54, or 2.60 and later, with Serve"),
        ("2.54.9", ""),
        ("2.60.7", ""),
        ("2.61.0rc1", "UserWarning: ray: got 2.61.0rc1, tested: 2.54 and 2.60"),
        ("3.0.0.dev0", "UserWarning: ray: got 3.0.0.dev0, tested: 2.54 and 2.60"),
    ],
)
def test_other_versions_are_refused_or_warned_of(version: str, said: str) -> None:
    code = f"import ray; ray.__version__ = {version!r}; import pagepool.router.ray_serve"
    process = run_python("-W", "default", "-c", code)
    assert ("CompatError" in said) == bool(process.returncode)
    assert said in process.stderr
    assert ("tested:" in process.stderr) == ("tested:" in said)


def test_a_version_without_what_is_used_is_refused() -> None:
    code = "import ray; ray.__version__ = '2.70.0'; from ray.serve.request_router import RequestRouter as it; "
    process = run_python("-c", code + "del it.on_request_routed, it.curr_replicas; import pagepool.router.ray_serve")
    assert "CompatError: ray: got 2.70.0" in process.stderr
    assert "its RequestRouter has no curr_replicas, on_request_routed" in process.stderr


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("is_apart", [False, True])
def test_chats_hit_what_their_last_turn_left(is_apart: bool, is_killed: bool, tmp_path: Path) -> None:
    """A replica that dies loses at most what it was sent, four requests at a time; the others are answered. One that lends
    prompts loses none. Ray's workers import from the folder in which it starts, so that is no source tree.
    """
    pytest.importorskip("pagepool.router.ray_serve", exc_type=Exception)
    example = ROOT / "examples" / "serving.py"
    arguments = ["--routers", "pagepool", "--chats", "6", "--turns", "4", *["--kill"] * is_killed, *["--apart"] * is_apart]
    process = run_python(example, *arguments, timeout=900, cwd=tmp_path, PYTHONSAFEPATH="", **PATIENCE)
    found = LINE.search(process.stdout)
    assert found is not None, (process.stdout, process.stderr, sys.executable)
    num_requests, num_lost, num_cached, num_tokens, num_pulled_bytes = map(int, found.groups())
    assert num_requests == 24
    assert num_lost <= (4 if is_killed and not is_apart else 0)
    assert num_cached > (0.2 if is_killed else 0.5) * num_tokens
    assert (num_pulled_bytes > 0) is is_apart

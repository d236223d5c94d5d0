"""The plug for Ray Serve: requests go where their prefixes are cached.

Tested with Ray 2.54 and 2.60; their interface for request routers is alpha. With a newer Ray the import warns, and raises
CompatError if a needed part is gone. With other versions it raises CompatError, and ImportError if
Serve is missing.
"""

import asyncio
import importlib
import itertools
import math
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import ray

from pagepool.errors import ArgumentError, CompatError, shown
from pagepool.router.choice import PrefixRouter
from pagepool.router.index import PrefixIndex
from pagepool.router.subscriber import EventSubscriber

ALLOWED = "2.54, or 2.60 and later, with Serve (ray[serve])"
try:
    import ray.serve
except ImportError as error:
    raise ImportError(f"the request router needs Ray Serve: pip install 'pagepool[serve]' ({error})") from None
try:
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise CompatError(f"ray: got {ray.__version__}, allowed: {ALLOWED}: {error}") from error

__all__ = ["PrefixRequestRouter", "announce"]

OLD, NEWEST = (2, 54), (2, 60)
"""The tested versions. In versions between them a request may be left without a replica: see `_choose_replica_for_request`."""

USED = ("choose_replicas", "curr_replicas", "on_replica_actor_died", "on_request_routed", "select_available_replicas")
"""The needed members of Serve's class, besides the essential `initialize_state` and `update_replicas`."""

ANNOUNCED = "pagepool_events"


def require_version(version: str) -> bool:
    """Return whether a version of Ray is the old one. Raise CompatError for unusable versions, and warn about untested ones."""
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    missing = [name for name in USED if not hasattr(RequestRouter, name)]
    if missing or (numbers != OLD and numbers < NEWEST):
        reason = f": its RequestRouter has no {', '.join(missing)}" if missing else ""
        raise CompatError(f"ray: got {version}, allowed: {ALLOWED}{reason}")
    if numbers > NEWEST:
        warnings.warn(f"ray: got {version}, tested: 2.54 and 2.60; Serve's request routers are alpha", stacklevel=2)
    return numbers == OLD


IS_OLD = require_version(ray.__version__)


def announce(endpoint: str, replay_endpoint: str | None = None) -> dict[str, Any]:
    """Return the addresses of a replica's publisher, to return from `record_routing_stats`, alone or with other keys."""
    return {ANNOUNCED: [endpoint, replay_endpoint]}


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]
    """Request router that sends a request to the replica with the least to compute, by `PrefixRouter`. Other replicas follow in
    the order of their work, in case the first one is full or dead.

    Set it as ``request_router_class`` of a deployment's ``RequestRouterConfig``. Its replicas announce their events:
    ``record_routing_stats`` returns `announce(publisher.endpoint, publisher.replay_endpoint)`. Serve calls it every
    ``request_routing_stats_period_s``; before the first call a replica counts as empty. Each handle and each proxy has its own
    router and index, and knows only the load of its own requests. Locality and multiplexed models are not considered.
    """

    def initialize_state(
        self,
        *,
        page_size: int,
        tokenize: str,
        hash_algo: str = "siphash128",
        hash_seed: int | str | None = None,
        num_groups: int | None = None,
        use_eagle: bool = False,
        hash_lookahead: int = 0,
        max_imbalance: float | None = None,
        max_age: float | None = None,
    ) -> None:
        """Take Serve's ``request_router_kwargs``.

        `tokenize` is ``"module:function"``; the function gets the arguments of a request and returns the token ids of its
        prompt. If it raises, the request counts as empty. Other arguments are as in `PrefixIndex` and `PrefixRouter`; None
        means no limit.
        """
        module, _, name = tokenize.partition(":")
        try:
            self._tokenize: Callable[..., Sequence[int]] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ArgumentError(f"tokenize: got {shown(tokenize)}, allowed: 'module:function': {error}") from error
        self._index = PrefixIndex(
            page_size,
            hash_algo=hash_algo,
            hash_seed=hash_seed,
            num_groups=num_groups,
            use_eagle=use_eagle,
            hash_lookahead=hash_lookahead,
        )
        self._choice = PrefixRouter(
            self._index,
            (),
            max_imbalance=math.inf if max_imbalance is None else max_imbalance,
            max_age=math.inf if max_age is None else max_age,
        )
        self._subscriber = EventSubscriber(self._index, on_report=self._choice.note_report)
        weakref.finalize(self, self._subscriber.close)
        self._turns = asyncio.Semaphore(self.max_num_routing_tasks_cap)
        self._workers: dict[ReplicaID, int] = {}
        self._endpoints: dict[int, tuple[str, str | None]] = {}
        self._sent: dict[str, int] = {}  # worker of each request under way
        self._pending: dict[str, Callable[[], object]] = {}  # requests not routed yet; the call cancels their finalizer

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Number new replicas, forget removed ones, and follow the events of replicas that announced them."""
        super().update_replicas(replicas)
        for replica_id in self._workers.keys() - self.curr_replicas.keys():
            self._drop(replica_id)
        for replica_id, replica in self.curr_replicas.items():
            if replica_id not in self._workers:
                taken = set(self._workers.values())
                self._workers[replica_id] = next(i for i in itertools.count() if i not in taken)
                self._choice.add_worker(self._workers[replica_id])
            announced = replica.routing_stats.get(ANNOUNCED)
            if announced is not None:
                self._follow(self._workers[replica_id], *announced)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica before the controller does."""
        super().on_replica_actor_died(replica_id)
        self._drop(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica with the least to compute, then the others. If all are full, Serve waits before it calls again."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if not IS_OLD:
            await asyncio.sleep(0)  # first let the task's previous request be sent, and counted at its replica
            candidate_replicas = [each for each in candidate_replicas if each.replica_id in self._workers]
        if not candidate_replicas:
            return []
        workers = {self._workers[each.replica_id]: each for each in candidate_replicas}
        free = [self._workers[each.replica_id] for each in self.select_available_replicas(candidate_replicas)]
        request = pending_request.metadata.internal_request_id
        self._end(request)
        worker = self._send(request, pending_request, free or list(workers))
        self._pending[request] = weakref.finalize(pending_request, self._end_later, asyncio.get_running_loop(), request).detach
        loads = self._choice.loads
        others = sorted(workers.keys() - {worker}, key=lambda other: (loads[other], other))
        return [[workers[each]] for each in (worker, *others)]

    if IS_OLD:

        async def _choose_replica_for_request(
            self, pending_request: PendingRequest, *, is_retry: bool = False
        ) -> RunningReplica:
            """Choose a replica for a request in the task that sends it, at most `max_num_routing_tasks_cap` requests at a time.

            In Ray 2.54 several tasks take requests from a queue, and a surplus task ends even if its request has no replica
            yet. With routers that send requests in the order of their arrival, another task sends the request; a router that
            chooses by request would lose it. In Ray 2.60 the task continues until the request has a replica.
            """
            async with self._turns, aclosing(self._choose_replicas_with_backoff(pending_request)) as rounds:
                attempt = 0
                async for candidates in rounds:
                    replica = await self._select_from_candidate_replicas(candidates, attempt)
                    if replica is not None:
                        break
                    attempt += 1
            self._record_queue_wait_time(pending_request)
            return replica

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request in its replica's load until it ends."""
        super().on_request_routed(pending_request, replica_id, result)
        request, worker = pending_request.metadata.internal_request_id, self._workers.get(replica_id)
        if worker is None:
            self._end(request)
            return
        if self._sent.get(request) != worker:  # another replica than the chosen one took it
            self._end(request)
            self._send(request, pending_request, [worker])
        self._pending.pop(request, lambda: None)()
        result.add_done_callback(partial(self._end_later, asyncio.get_running_loop(), request))

    def _send(self, request: str, pending_request: PendingRequest, among: list[int]) -> int:
        """Choose a worker for a request, and count it there."""
        try:
            token_ids = self._tokenize(*pending_request.args, **pending_request.kwargs)
        except Exception:
            token_ids = []
        self._sent[request] = self._choice.choose(request, token_ids, among=among).worker
        return self._sent[request]

    def _end(self, request: str) -> None:
        self._pending.pop(request, lambda: None)()
        if self._sent.pop(request, None) is not None:
            self._choice.end(request)

    def _end_later(self, loop: asyncio.AbstractEventLoop, request: str, *_: object) -> None:
        """End a request, from any thread."""
        with suppress(RuntimeError):  # raised if the loop is closed
            loop.call_soon_threadsafe(self._end, request)

    def _follow(self, worker: int, endpoint: str, replay_endpoint: str | None) -> None:
        if self._endpoints.get(worker) != (endpoint, replay_endpoint):
            self._subscriber.disconnect(worker)
            self._subscriber.connect(worker, endpoint, replay_endpoint)
            self._endpoints[worker] = endpoint, replay_endpoint

    def _drop(self, replica_id: ReplicaID) -> None:
        worker = self._workers.pop(replica_id, None)
        if worker is not None:
            self._subscriber.disconnect(worker)
            self._endpoints.pop(worker, None)
            for request in self._choice.remove_worker(worker):
                self._sent.pop(str(request), None)

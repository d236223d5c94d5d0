"""Two engines on Ray Serve, chats over HTTP, and the hit rate behind three request routers.

In a clone ``pip install --editable '.[jax,serve,store,peers]'`` installs the dependencies.

``python examples/serving.py`` starts a local Ray. ``--routers`` selects from ``ray`` (Ray's default), ``ray-prefix`` (its own
prefix router, which needs boto3) and ``pagepool``. ``--kill`` lets an engine die after half of the turns. With ``--store`` the
engines share their pages through files of a folder, and hit what earlier runs left there. With ``--apart`` two more engines
compute the prompts, whose pages the others pull; ``--kill`` ends one of those two.
"""

import asyncio
import importlib
import json
import os
import random
import secrets
import socket
import sys
import threading
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text import ALPHABET, FOLLOW_UP, decode, encode

PAGE_SIZE, HASH_SEED, SEND_SECONDS, IDLE_SECONDS = 8, "serving", 120, 0.001
RAY_PREFIX_ROUTER = (  # also in ray.serve.llm, which needs vLLM
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
)


@dataclass
class Prompt:
    """A request to an engine; Ray's prefix router reads the attribute."""

    prompt: str


def tokenize(prompt: Prompt, _address: str | None = None) -> list[int]:
    """Return a prompt's token ids, for the look-up of `PrefixRequestRouter`."""
    return encode(prompt.prompt)


class Replica:
    """An example engine, and the publisher of its events."""

    module, name = "engine", "Engine"

    def __init__(self, **options: Any) -> None:
        """Make the same weights in each replica. `options` are those of the engine."""
        from model import make_weights

        from pagepool.events.publisher import EventPublisher

        sizes = {"num_pages": 256, "page_size": PAGE_SIZE, "max_model_len": 1024}
        engine = getattr(importlib.import_module(self.module), self.name)
        self.engine = engine(make_weights(0), **sizes, hash_seed=HASH_SEED, **options)
        self.engine.manager.enable_events()
        self.publisher = EventPublisher(self.engine.manager, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self.lock = asyncio.Lock()
        self.engine.warmup()

    def record_routing_stats(self) -> dict[str, Any]:
        """Announce the publisher to `PrefixRequestRouter`."""
        from pagepool.router.ray_serve import announce

        return announce(self.publisher.endpoint, self.publisher.replay_endpoint)

    def add(self, token_ids: list[int], params: Any, _address: str | None) -> Any:
        """Queue a request."""
        return self.engine.add(token_ids, params, streams=False)

    async def generate(self, prompt: Prompt, address: str | None = None) -> dict[str, Any]:
        """Return the answer, and how many tokens of the prompt were cached. `DecodeReplica` pulls it from an address."""
        from request import SamplingParams

        request = self.add(encode(prompt.prompt), SamplingParams(max_tokens=8), address)
        while not request.is_finished:
            async with self.lock:  # requests waiting here share the same steps
                if not request.is_finished:
                    await asyncio.to_thread(self.engine.step)
        self.publisher.flush()
        return {"answer": decode(request.output), "cached": request.num_cached_tokens, "tokens": request.num_prompt_tokens}

    async def die(self) -> None:
        """End the process soon, as a crash does. If it ended at once, Serve would take the call for refused and kill the other
        one too.
        """
        asyncio.get_running_loop().call_later(0.1, os._exit, 1)


class PrefillReplica(Replica):
    """An engine that computes prompts for those of `DecodeReplica`."""

    module, name = "apart_engines", "PrefillEngine"

    def __init__(self, **options: Any) -> None:
        """Start the thread of the engine."""
        super().__init__(**options)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Do steps for ever."""
        while True:
            self.engine.step()
            if self.engine.is_idle:
                time.sleep(IDLE_SECONDS)

    async def lend(self, _prompt: Prompt) -> AsyncIterator[str]:
        """Yield the address that computes the prompt. The router counts the prompt here until the caller cancels the call."""
        yield self.engine.server.address
        await asyncio.sleep(SEND_SECONDS)


class DecodeReplica(Replica):
    """An engine that pulls the pages of prompts which those of `PrefillReplica` compute."""

    module, name = "apart_engines", "DecodeEngine"
    num_reported_bytes = 0

    def add(self, token_ids: list[int], params: Any, address: str | None) -> Any:
        """Queue a request. Without an address its prompt is computed here."""
        return self.engine.add_remote(token_ids, params, address) if address else super().add(token_ids, params, None)

    async def generate(self, prompt: Prompt, address: str | None = None) -> dict[str, Any]:
        """Add the bytes that this engine has pulled since its last answer."""
        answered = await super().generate(prompt, address)
        num_bytes = self.engine.num_pulled_bytes - self.num_reported_bytes
        self.num_reported_bytes += num_bytes
        return answered | {"pulled": num_bytes}


class Ingress:
    """HTTP entry for chats. It passes them on through a handle, whose router sees the prompts."""

    def __init__(self, engines: Any) -> None:
        """Keep the handle of the engines."""
        self.engines = engines

    async def __call__(self, request: Any) -> Any:
        """Answer ``{"prompt": text}``."""
        return await self.answer(Prompt((await request.json())["prompt"]))

    async def answer(self, prompt: Prompt) -> Any:
        """Return an engine's reply."""
        return await self.engines.generate.remote(prompt)


class ApartIngress(Ingress):
    """Entry for engines apart: one lends a prompt, and another one pulls it and answers. Each is chosen by a router."""

    def __init__(self, engines: Any, lenders: Any) -> None:
        """Keep the handles of both."""
        super().__init__(engines)
        self.lenders = lenders.options(stream=True)

    async def answer(self, prompt: Prompt) -> Any:
        """Return an engine's reply. It computes the prompt itself if the lender has died."""
        from ray.exceptions import RayError

        lent = self.lenders.lend.remote(prompt)
        try:
            address = await anext(lent)
        except RayError:
            address = None
        try:
            return await self.engines.generate.remote(prompt, address)
        finally:
            lent.cancel()


def make_router_config(name: str) -> Any:
    """Return the configuration of a request router by name."""
    from ray.serve.config import RequestRouterConfig

    if name == "ray":
        return RequestRouterConfig()
    if name == "ray-prefix":
        return RequestRouterConfig(request_router_class=RAY_PREFIX_ROUTER)
    return RequestRouterConfig(
        request_router_class="pagepool.router.ray_serve.PrefixRequestRouter",
        request_router_kwargs={"page_size": PAGE_SIZE, "hash_seed": HASH_SEED, "tokenize": "serving:tokenize"},
        request_routing_stats_period_s=0.5,
    )


def send(url: str, prompt: str) -> dict[str, Any] | None:
    """Return the reply, or None if the request was lost or got no answer in `SEND_SECONDS`."""
    body = json.dumps({"prompt": prompt}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=SEND_SECONDS) as reply:
            answered: dict[str, Any] = json.load(reply)
            return answered
    except OSError:
        return None


def chat(url: str, num_chats: int, num_turns: int, kill: Any) -> dict[str, int]:
    """Hold chats, one turn at a time in random order, and return their hits. Call `kill` after half of the turns, with the next
    turn under way. Stop early if as many requests are lost as there are chats: the router is stuck.
    """
    rng = random.Random(1)
    prompts = ["".join(rng.choices(ALPHABET[:-1], k=rng.randint(100, 300))) for _ in range(num_chats)]
    counts = {"requests": 0, "lost": 0, "cached": 0, "tokens": 0, "pulled": 0}
    with ThreadPoolExecutor(4) as pool:
        for turn in range(num_turns):
            order = rng.sample(range(num_chats), num_chats)
            replies = [pool.submit(send, url, prompts[i]) for i in order]
            if turn == num_turns // 2:
                kill()
            for i, reply in zip(order, replies, strict=True):
                answered = reply.result()
                counts["requests"] += 1
                counts["lost"] += answered is None
                if answered is not None:
                    counts["cached"] += answered["cached"]
                    counts["tokens"] += answered["tokens"]
                    counts["pulled"] += answered.get("pulled", 0)
                    prompts[i] += answered["answer"] + FOLLOW_UP
            if counts["lost"] >= num_chats:
                break
    return counts


def start(port: int) -> None:
    """Start Serve; on a slow machine its proxy takes longer than Serve waits."""
    from ray import serve

    for attempt in range(5):
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            return
        except TimeoutError:
            if attempt == 4:
                raise


def deploy(name: str, args: Namespace) -> Any:
    """Return the application: two engines behind a router, and two more if they are apart."""
    from ray import serve

    def make(kind: type, label: str, **options: Any) -> Any:
        return serve.deployment(kind, name=label).options(ray_actor_options={"num_cpus": 0}, **options)

    options = {"num_replicas": 2, "request_router_config": make_router_config(name), "max_ongoing_requests": 8}
    if not args.apart:
        return make(Ingress, "ingress").bind(make(Replica, "engines", **options).bind(store=args.store))
    secret = secrets.token_bytes(32)
    lenders = make(PrefillReplica, "lenders", **options).bind(secret=secret)
    engines = make(DecodeReplica, "engines", **options).bind(secret=secret)
    return make(ApartIngress, "ingress").bind(engines, lenders)


def run(name: str, port: int, args: Namespace) -> dict[str, int]:
    """Deploy engines, and hold chats."""
    from ray import serve

    serve.run(deploy(name, args), name=name, route_prefix=f"/{name}")
    url = f"http://127.0.0.1:{port}/{name}"
    send(url, "warm up")
    handle = serve.get_deployment_handle("lenders" if args.apart else "engines", name)
    try:
        return chat(url, args.chats, args.turns, handle.die.remote if args.kill else lambda: None)
    finally:
        serve.delete(name)


def main() -> None:
    """Print the hit rate behind each router."""
    parser = ArgumentParser("serving.py", description=__doc__)
    parser.add_argument("--routers", nargs="+", default=["ray", "pagepool"], choices=["ray", "ray-prefix", "pagepool"])
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--store", type=lambda folder: Path(folder).absolute(), metavar="FOLDER")
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args()
    if args.apart and args.store:
        parser.error("--apart and --store exclude each other")
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))  # Ray's processes use it
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=4, object_store_memory=100 << 20)
    try:
        start(port)
        for name in args.routers:
            counts = run(name, port, args)
            rate = counts["cached"] / max(1, counts["tokens"])
            print(
                f"{name}: {counts['requests']} requests, {counts['lost']} lost, {counts['cached']} of {counts['tokens']} prompt"
                f" tokens cached ({rate:.1%}), {counts['pulled']} bytes pulled",
                flush=True,
            )
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())

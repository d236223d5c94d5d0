"""Prefill and decode apart: a router, engines for prompts, and engines for answers, which pull the prompts' pages.

In a clone ``make disaggregated`` installs the dependencies, ``pip install --editable '.[jax,events,peers]'``, and runs it.

Each engine is a process on this machine. The router knows from events what each of them has cached: it chooses two engines for
a chat's turn, the one for the prompt and the one for the answer, by their hits. Then one engine does the same alone, and the
answers have to be equal.
"""

import multiprocessing
import secrets
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from text import FOLLOW_UP, PROMPTS, encode

PAGE_SIZE, HASH_SEED, MAX_MODEL_LEN = 8, "disaggregated", 512
IDLE_SECONDS, KILL_SECONDS = 0.001, 0.05
START_SECONDS, TURN_SECONDS = 120, 120

ENGINE_OPTIONS = {"num_pages": 256, "page_size": PAGE_SIZE, "max_model_len": MAX_MODEL_LEN, "hash_seed": HASH_SEED}


def serve(role: str, connection: Connection, secret: bytes, args: Namespace) -> None:
    """Run an engine: send its addresses, take requests, and send their answers. End with the connection."""
    from apart_engines import DecodeEngine, PrefillEngine
    from model import make_weights
    from request import Request, SamplingParams

    from pagepool.events.publisher import EventPublisher

    options: dict[str, Any] = ENGINE_OPTIONS | {"max_steps_ahead": args.steps_ahead, "max_num_batched_tokens": args.chunk}
    weights = make_weights(args.seed, kind=args.kind)
    seconds = {"lease_seconds" if role == "prefill" else "seconds": args.seconds}
    engine = (PrefillEngine if role == "prefill" else DecodeEngine)(weights, secret, **seconds, **options)
    engine.warmup()
    engine.manager.enable_events()
    publisher = EventPublisher(engine.manager, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    address = engine.server.address if isinstance(engine, PrefillEngine) else ""
    connection.send((address, publisher.endpoint, publisher.replay_endpoint))
    running: dict[Request, int] = {}
    try:
        while True:
            while connection.poll(IDLE_SECONDS if engine.is_idle else 0):
                number, token_ids, address = connection.recv()
                if token_ids is None:  # a question for figures
                    connection.send((engine.num_pulled_bytes, engine.num_failed))  # type: ignore[union-attr]
                    continue
                request = engine.add_remote(token_ids, SamplingParams(args.max_tokens), address)  # type: ignore[union-attr]
                running[request] = number
            if not engine.is_idle or isinstance(engine, PrefillEngine):
                engine.step()
            for request in [request for request in running if request.is_finished]:
                publisher.flush()
                connection.send((running.pop(request), request.output, request.num_cached_tokens))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        publisher.close()
        engine.close()


class Peers:
    """The engines of one role, each a process, and a router that knows what they have cached."""

    def __init__(self, role: str, num_engines: int, args: Namespace, secret: bytes) -> None:
        """Start the processes, and follow their events."""
        from pagepool.router import PrefixIndex, PrefixRouter
        from pagepool.router.subscriber import EventSubscriber

        self.role, self.args, self.secret = role, args, secret
        self.index = PrefixIndex(page_size=PAGE_SIZE, hash_seed=HASH_SEED)
        self.router = PrefixRouter(self.index, range(num_engines))
        self.subscriber = EventSubscriber(self.index)
        self.connections: list[Connection] = [None] * num_engines  # type: ignore[list-item]
        self.processes: list[Any] = [None] * num_engines
        self.addresses = [""] * num_engines
        self.routed: set[int] = set()  # prompts that an engine has
        for i in range(num_engines):
            self.start(i)
        for i in range(num_engines):
            self.greet(i)

    def start(self, i: int) -> None:
        """Start an engine's process."""
        context = multiprocessing.get_context("spawn")
        self.connections[i], theirs = context.Pipe()
        self.processes[i] = context.Process(target=serve, args=(self.role, theirs, self.secret, self.args), daemon=True)
        self.processes[i].start()
        theirs.close()

    def greet(self, i: int) -> None:
        """Wait until an engine is ready."""
        if not self.connections[i].poll(START_SECONDS):
            raise RuntimeError(f"the {self.role} engine {i} did not start")
        self.addresses[i], *endpoints = self.connections[i].recv()
        self.subscriber.connect(i, *endpoints)

    def choose(self, number: int, token_ids: list[int]) -> int:
        """Return the engine that hits most of a prompt, or has less to do."""
        self.routed.add(number)
        return self.router.choose(number, token_ids).worker

    def end(self, number: int) -> None:
        """Count a prompt no longer as work of its engine."""
        if number in self.routed:
            self.routed.remove(number)
            self.router.end(number)

    def kill(self, i: int) -> None:
        """Kill an engine as a crash does, and start another one in its place."""
        self.processes[i].kill()
        self.processes[i].join()
        self.subscriber.disconnect(i)
        self.routed.difference_update(map(int, map(str, self.router.remove_worker(i))))
        self.router.add_worker(i)
        self.connections[i].close()
        self.start(i)
        self.greet(i)

    def report(self) -> dict[str, int]:
        """Return the pulled bytes, and the number of prompts computed by the engines themselves."""
        for connection in self.connections:
            connection.send((0, None, ""))
        counts = [connection.recv() for connection in self.connections]
        return {"pulled_bytes": sum(count for count, _ in counts), "failed": sum(count for _, count in counts)}

    def close(self) -> None:
        """End all processes."""
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.join(5)
            process.kill()
        self.subscriber.close()


def run_turn(prefill: Peers, decoding: Peers, prompts: Sequence[list[int]], killed: str | None) -> tuple[list[list[int]], int]:
    """Let the engines answer all prompts; if a role is `killed`, kill its first engine meanwhile. Return the answers, and how
    many tokens of the prompts were cached where they are answered.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    pending: dict[int, int] = {}  # the engine of each prompt without an answer
    num_hits = 0

    def send(i: int) -> None:
        first, pending[i] = prefill.choose(i, prompts[i]), decoding.choose(i, prompts[i])
        decoding.connections[pending[i]].send((i, prompts[i], prefill.addresses[first]))

    for i in range(len(prompts)):
        send(i)
    if killed is not None:
        time.sleep(KILL_SECONDS)
        (prefill if killed == "prefill" else decoding).kill(0)
        for i in [i for i, worker in pending.items() if killed == "decode" and worker == 0]:
            prefill.end(i)
            send(i)
    end_at = time.monotonic() + TURN_SECONDS
    while pending:
        if time.monotonic() > end_at:
            raise RuntimeError(f"{len(pending)} answers are missing")
        for connection in wait(decoding.connections, IDLE_SECONDS):
            i, answers_i, hits = connection.recv()  # type: ignore[union-attr]
            answers[i] = answers_i
            num_hits += hits
            del pending[i]
            for peers in (prefill, decoding):
                peers.end(i)
    return answers, num_hits


def answer_alone(prompts: Sequence[list[int]], args: Namespace) -> list[list[int]]:
    """Return the answers of one engine without peers."""
    from engine import Engine
    from model import make_weights
    from request import SamplingParams

    engine = Engine(make_weights(args.seed, kind=args.kind), **ENGINE_OPTIONS)
    requests = [engine.add(token_ids, SamplingParams(args.max_tokens), streams=False) for token_ids in prompts]
    while not engine.is_idle:
        engine.step()
    return [request.output for request in requests]


def main() -> int:
    """Hold chats, and print what each turn moved. Return 1 if an answer is another than that of one engine."""
    parser = ArgumentParser("disaggregated.py", description="Prefill and decode apart, on this machine.")
    parser.add_argument("--kind", default="attention", choices=["attention", "linear"], help="layers: see engine.py")
    parser.add_argument("--prefill", type=int, default=2, help="engines that compute prompts")
    parser.add_argument("--decode", type=int, default=2, help="engines that answer")
    parser.add_argument("--turns", type=int, default=2, help="questions of each chat")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a step")
    parser.add_argument(
        "--steps-ahead", type=int, default=1, help="steps planned before the tokens of the one that runs are known"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time without a sign of life after which a peer counts as dead"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--kill", choices=["prefill", "decode"], help="kill an engine of this role in the first turn")
    args = parser.parse_args()
    secret = secrets.token_bytes(32)
    prefill, decoding = Peers("prefill", args.prefill, args, secret), Peers("decode", args.decode, args, secret)
    prompts, is_equal = [encode(prompt) for prompt in PROMPTS], True
    try:
        for turn in range(args.turns):
            answers, num_hits = run_turn(prefill, decoding, prompts, None if turn else args.kill)
            is_equal &= answers == answer_alone(prompts, args)
            pulled = decoding.report()
            num_tokens = sum(map(len, prompts))
            print(
                f"turn {turn + 1}: {num_tokens:,} prompt tokens, {num_hits:,} hit where they are answered, "
                f"{pulled['pulled_bytes']:,} bytes pulled, {pulled['failed']} prompts not computed elsewhere",
                flush=True,
            )
            prompts = [token_ids + answer + encode(FOLLOW_UP) for token_ids, answer in zip(prompts, answers, strict=True)]
    finally:
        prefill.close()
        decoding.close()
    print("the answers are those of one engine" if is_equal else "an answer differs from that of one engine")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())

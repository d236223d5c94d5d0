"""The thread that follows workers, over real sockets: our publishers, and workers that lose, repeat and garble batches."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

from lossy import wait_for  # noqa: E402
from msgspec.msgpack import encode as encode_msgpack  # noqa: E402
from settings import scale  # noqa: E402

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, PageHashing  # noqa: E402
from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, IntegrityError  # noqa: E402
from pagepool.events.publisher import EventPublisher  # noqa: E402
from pagepool.router import PrefixIndex  # noqa: E402
from pagepool.router.streams import WorkerStream  # noqa: E402
from pagepool.router.subscriber import EventSubscriber  # noqa: E402

ANY_PORT = "tcp://127.0.0.1:*"


def make_manager() -> CacheManager:
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype="bfloat16", use_mla=False)
    manager = CacheManager(64, [CacheGroupSpec(spec)], 4096, hashing=PageHashing(hash_seed="s"))
    manager.enable_events()
    return manager


def run(manager: CacheManager, name: str, rng: Random) -> None:
    """Compute a prompt, which may evict others."""
    request = EngineRequest(name, [rng.randrange(5), *range(1, rng.choice((40, 200, 600)))])
    manager.allocate_slots(request, request.num_tokens)
    manager.free(request)


def cached(manager: CacheManager) -> set[int]:
    return {int(block_hash) for event in manager.snapshot_events() for block_hash in event.block_hashes}


def knows(index: PrefixIndex, worker: int, manager: CacheManager) -> bool:
    return set(index.list_blocks(worker).tolist()) == cached(manager)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(16, hash_seed="s")


@pytest.fixture
def subscriber(index: PrefixIndex) -> Iterator[EventSubscriber]:
    with EventSubscriber(index, replay_seconds=2.0) as subscriber:
        yield subscriber


def test_the_index_follows_workers_that_come_late_and_are_replaced(index: PrefixIndex, subscriber: EventSubscriber) -> None:
    rng = Random(1)
    managers = [make_manager() for _ in range(3)]
    publishers = [EventPublisher(manager, ANY_PORT, ANY_PORT) for manager in managers]
    try:
        for i, publisher in enumerate(publishers[:2]):
            subscriber.connect(i, publisher.endpoint, publisher.replay_endpoint)
        for step in range(100):
            for i, manager in enumerate(managers):
                run(manager, f"{i} {step}", rng)
            if step == 50:
                subscriber.connect(2, publishers[2].endpoint, publishers[2].replay_endpoint)
        for i, manager in enumerate(managers):
            publishers[i].flush()
            wait_for(lambda i=i, manager=manager: knows(index, i, manager))
        assert all(stats.is_complete for stats in subscriber.stats().values())
        expected = managers[0].get_computed_pages(EngineRequest("x", [0, *range(1, 600)]))[1]
        assert index.find_tokens([0, *range(1, 600)])[0] == expected

        endpoints = publishers[1].endpoint, publishers[1].replay_endpoint
        publishers[1].close()
        managers[1] = make_manager()
        publishers[1] = EventPublisher(managers[1], *endpoints, heartbeat=0.05)
        run(managers[1], "new", rng)
        publishers[1].flush()
        wait_for(lambda: knows(index, 1, managers[1]))
        wait_for(lambda: subscriber.stats()[1].is_complete)
        assert subscriber.stats()[1].is_complete
        subscriber.disconnect(0)
        assert not len(index.list_blocks(0))
        assert sorted(subscriber.stats()) == [1, 2]
    finally:
        for publisher in publishers:
            publisher.close()


def is_closed(subscriber: EventSubscriber) -> bool:
    try:
        subscriber.stats()
    except ArgumentError:
        return True
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_is_logged_and_one_that_exits_closes(
    index: PrefixIndex, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """No call waits for a thread that has ended."""

    def fail(worker: int) -> None:
        raise error(f"worker {worker}")

    manager = make_manager()
    publisher = EventPublisher(manager, ANY_PORT, ANY_PORT)
    subscriber = EventSubscriber(index, on_report=fail)
    try:
        subscriber.connect(0, publisher.endpoint, publisher.replay_endpoint)
        for step in range(10):
            run(manager, str(step), Random(step))
            publisher.flush()
            time.sleep(0.02)
        if error is SystemExit:
            wait_for(lambda: is_closed(subscriber))
        else:
            manager.allocate_slots(EngineRequest("last", list(range(100, 164))), 64)
            publisher.flush()
            wait_for(lambda: index.find_tokens(list(range(100, 165))).tolist() == [64])
            assert "on_report failed for worker 0" in caplog.text
    finally:
        publisher.close()
        subscriber.close()


class Worker:
    """A worker by hand: it publishes what it is told, and replays what it kept."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.published, self.replayed = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.endpoints = []
        for each in (self.published, self.replayed):
            each.linger = 0
            each.bind(ANY_PORT)
            self.endpoints.append(each.last_endpoint.decode())
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []

    def keep(self, number: int, seconds: float, *events: Any) -> None:
        self.kept[number] = encode_msgpack([seconds, events])

    def publish(self, number: int) -> None:
        self.published.send_multipart([b"", number.to_bytes(8, "big"), self.kept[number]])

    def answer(self) -> None:
        """Answer what was asked, as vLLM does."""
        while self.replayed.poll(0):
            client, _, first = self.replayed.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, payload in sorted(self.kept.items()):
                if number >= self.asked[-1]:
                    self.replayed.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            self.replayed.send_multipart([client, b"", b"\xff" * 8, b""])


@pytest.fixture
def worker() -> Iterator[Worker]:
    context = zmq.Context()
    yield Worker(context)
    context.destroy(linger=0)


def stored(*hashes: int) -> list[Any]:
    return ["BlockStored", hashes, None, [], 16, None]


def test_gaps_repetitions_garbage_and_replacements(index: PrefixIndex, subscriber: EventSubscriber, worker: Worker) -> None:
    """With a worker that replays as vLLM does."""

    def has(*hashes: int) -> None:
        def check() -> bool:
            worker.answer()
            return set(index.list_blocks(0).tolist()) == set(hashes)

        wait_for(check)

    worker.keep(0, 1.0, stored(1))
    worker.keep(1, 2.0, stored(2))
    subscriber.connect(0, *worker.endpoints)
    has(1, 2)
    assert worker.asked == [0]
    time.sleep(0.2)  # until the subscription has arrived
    worker.keep(2, 3.0, stored(3))
    worker.publish(2)
    worker.publish(2)
    worker.publish(1)
    has(1, 2, 3)
    worker.keep(3, 4.0, ["BlockRemoved", [2]])
    worker.keep(4, 5.0, stored(5))
    worker.publish(4)  # 3 is lost on its way
    has(1, 3, 5)
    wait_for(lambda: subscriber.stats()[0].is_complete)
    assert (worker.asked, subscriber.stats()[0].num_lost) == ([0, 2], 0)
    for number in range(5, 9):
        worker.keep(number, 1.0 + number, stored(number + 1))
    for number in range(7):
        del worker.kept[number]  # the worker no longer has them
    worker.publish(8)
    has(1, 3, 5, 8, 9)
    stats = subscriber.stats()[0]
    assert (stats.is_complete, stats.num_lost, stats.num_restarts, stats.num_bad) == (False, 2, 0, 0)
    worker.published.send_multipart([b"", bytes(3), b"x"])  # a number of three bytes
    worker.published.send_multipart([b"", (9).to_bytes(8, "big"), b"\x93garbage"])
    has()
    assert subscriber.stats()[0].num_bad == 1
    worker.kept.clear()
    worker.keep(0, 20.0, stored(50))
    num_asked = len(worker.asked)
    worker.publish(0)
    has(50)
    stats = subscriber.stats()[0]
    assert (stats.is_complete, stats.num_restarts, len(worker.asked)) == (True, 1, num_asked)
    for number in range(1, 3):
        worker.keep(number, 20.0 + number, stored(50 + number))
        worker.publish(number)
    has(50, 51, 52)
    worker.kept.clear()  # another one takes its place, and the subscriber misses its first batches
    for number in range(5):
        worker.keep(number, 30.0 + number, stored(60 + number))
    worker.publish(4)
    has(60, 61, 62, 63, 64)
    assert subscriber.stats()[0].num_restarts == 2


def test_a_worker_that_is_replaced_twice_before_the_next_connection(
    index: PrefixIndex, subscriber: EventSubscriber, worker: Worker
) -> None:
    """The first of the two answers the replay, and the batches of the second continue its numbers."""

    def has(*hashes: int) -> None:
        def check() -> bool:
            worker.answer()
            return set(index.list_blocks(0).tolist()) == set(hashes) and subscriber.stats()[0].is_complete

        wait_for(check)

    worker.keep(0, 1.0, stored(1))
    subscriber.connect(0, *worker.endpoints)
    has(1)
    time.sleep(0.2)  # until the subscription has arrived
    worker.published.unbind(worker.endpoints[0])
    worker.published.close()
    worker.keep(0, 2.0, stored(2))
    has(2)
    worker.keep(0, 3.0, stored(3))
    worker.keep(1, 4.0, stored(4))
    worker.published = worker.context.socket(zmq.XPUB)
    worker.published.bind(worker.endpoints[0])
    assert worker.published.recv() == b"\1"
    worker.publish(1)
    has(3, 4)


def test_a_worker_that_does_not_answer(index: PrefixIndex, worker: Worker) -> None:
    """Its batches wait, and the subscriber asks again."""
    with EventSubscriber(index, replay_seconds=0.1) as subscriber:
        subscriber.connect(0, *worker.endpoints)
        time.sleep(1.5)
        assert not subscriber.stats()[0].is_complete
        worker.keep(0, 1.0, stored(1))

        def check() -> bool:
            worker.answer()
            return bool(len(index.list_blocks(0)))

        wait_for(check)
        assert len(worker.asked) >= 2


class Replaced:
    """A worker whose batches are lost now and then, beside late ones of the worker that it replaced."""

    def __init__(self, rng: Random, sends_snapshots: bool) -> None:
        self.rng = rng
        self.sends_snapshots = sends_snapshots
        self.has: set[int] = set()
        self.batches: list[bytes] = []
        self.index = PrefixIndex(16)
        self.stream = WorkerStream(self.index, 0, has_replay=True)
        self.seconds = 1000.0

    def make(self) -> int:
        """Make the next batch: a block stored or removed."""
        block = self.rng.randrange(1, 30)
        self.seconds += 1.0
        event = ["BlockRemoved", [block]] if block in self.has else stored(block)
        self.has ^= {block}
        self.batches.append(encode_msgpack([self.seconds, [event]]))
        return len(self.batches) - 1

    def publish(self, number: int) -> None:
        self.receive(number, self.batches[number])

    def receive(self, number: int, payload: bytes) -> None:
        self.stream.receive(number, payload)
        self.replay()

    def replay(self) -> None:
        num_replays = 0
        while self.stream.wanted is not None:
            first, kept = self.stream.wanted, max(0, len(self.batches) - 8)
            if first < kept and self.sends_snapshots:
                snapshot = [["AllBlocksCleared"], stored(*sorted(self.has))]
                self.stream.replay(len(self.batches) - 1, encode_msgpack([self.seconds + 0.5, snapshot]))
            for number in range(first, 0 if first < kept and self.sends_snapshots else len(self.batches)):
                self.stream.replay(number, self.batches[number])
            self.stream.end_replay()
            num_replays += 1
            assert num_replays < 4


@pytest.mark.parametrize("sends_snapshots", [False, True])
def test_losses_are_noticed_after_late_batches_of_a_replaced_worker(sends_snapshots: bool) -> None:
    """Whatever their numbers are, and whether their times are older, or newer because of another clock."""
    for seed in range(scale(300)):
        rng = Random(seed)
        worker = Replaced(rng, sends_snapshots)
        for _ in range(rng.choice((1, 3))):
            worker.publish(worker.make())
        worker.replay()
        for _ in range(40):
            if rng.random() < 0.25:
                number = len(worker.batches) + rng.choice((-3, -2, -1, 0, 0, 1, 2, 8, 50))
                late = encode_msgpack([rng.choice((500.0, 1e6)), [stored(99)]])
                for i in range(rng.choice((1, 1, 2))):
                    worker.receive(max(0, number + i), late)
            for _ in range(rng.choice((0, 0, 1, 2, 5))):
                worker.make()  # lost on its way
            worker.publish(worker.make())
        for _ in range(2):
            worker.publish(worker.make())
        assert set(worker.index.list_blocks(0).tolist()) == worker.has, seed
        assert worker.stream.stats.is_complete, seed


def test_a_late_first_batch_of_a_replaced_worker_changes_nothing() -> None:
    """Its number is that of the last batch, and its time is older."""
    worker = Replaced(Random(0), sends_snapshots=True)
    worker.publish(worker.make())
    worker.receive(0, encode_msgpack([500.0, [stored(99)]]))
    for _ in range(3):
        worker.publish(worker.make())
    assert set(worker.index.list_blocks(0).tolist()) == worker.has
    assert worker.stream.stats.num_restarts == 0


def test_a_worker_that_replays_nothing_is_followed(index: PrefixIndex) -> None:
    stream = WorkerStream(index, 0, has_replay=True)
    stream.end_replay()
    for number in (0, 1, 4, 5, 6, 9, 10):
        stream.receive(number, encode_msgpack([1.0 + number, [stored(number)]]))
        while stream.wanted is not None:
            stream.end_replay()
    assert set(index.list_blocks(0).tolist()) == {0, 1, 5, 6, 10}
    assert (stream.stats.is_complete, stream.stats.num_lost) == (False, 6)


def test_a_callback_may_call_the_subscriber(index: PrefixIndex) -> None:
    seen: list[Any] = []
    manager = make_manager()
    publishers = [EventPublisher(manager if not i else make_manager(), ANY_PORT, ANY_PORT) for i in range(3)]

    def report(worker: int) -> None:
        seen.append(subscriber.stats()[worker].is_complete)
        if len(seen) == 1:
            subscriber.connect(1, publishers[1].endpoint, publishers[1].replay_endpoint)
            with pytest.raises(ArgumentError, match="worker: got 0"):
                subscriber.connect(0, publishers[0].endpoint)
        elif worker == 1:
            subscriber.disconnect(1)
            subscriber.disconnect(0)
            subscriber.connect(2, publishers[2].endpoint, publishers[2].replay_endpoint)
        elif worker == 2:
            seen.append(sorted(subscriber.stats()))
            subscriber.close()

    with EventSubscriber(index, on_report=report) as subscriber:
        subscriber.connect(0, publishers[0].endpoint, publishers[0].replay_endpoint)
        for publisher in publishers:
            publisher.publish([])

        def is_done() -> bool:
            for publisher in publishers:
                publisher.publish([])
            time.sleep(0.02)
            return is_closed(subscriber)

        wait_for(is_done)
    for publisher in publishers:
        publisher.close()
    assert seen[-1] == [2]
    assert all(seen[:-1])


def test_without_a_replay_endpoint_lost_batches_stay_lost(index: PrefixIndex) -> None:
    stream = WorkerStream(index, 0, has_replay=False)
    for number in (0, 1, 4):
        stream.receive(number, encode_msgpack([1.0 + number, [stored(number)]]))
    assert (stream.stats.is_complete, stream.stats.num_lost, stream.wanted) == (False, 2, None)
    assert index.find([0]).tolist() == [16]
    stream.receive(5, encode_msgpack([9.0, [["AllBlocksCleared"], stored(7)]]))
    assert (stream.stats.is_complete, index.find([7]).tolist(), index.find([0]).tolist()) == (True, [16], [0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork")  # CPython and JAX warn about the parent's threads
def test_a_child_has_neither_index_nor_subscriber(index: PrefixIndex, subscriber: EventSubscriber, worker: Worker) -> None:
    worker.keep(0, 1.0, stored(1))
    subscriber.connect(0, *worker.endpoints)

    def check() -> bool:
        worker.answer()
        return index.find([1]).tolist() == [16]

    wait_for(check)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        failed = False
        for call in (subscriber.stats, lambda: subscriber.disconnect(0), lambda: subscriber.connect(1, *worker.endpoints)):
            try:
                call()
                failed = True
            except ArgumentError as error:
                failed |= "belongs to another process" not in str(error)
        subscriber.close()
        try:
            index.find([1])
            failed = True
        except IntegrityError:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.keep(1, 2.0, stored(2))
    worker.publish(1)
    wait_for(lambda: index.find([1, 2]).tolist() == [32])


def test_misuse(index: PrefixIndex, subscriber: EventSubscriber, worker: Worker) -> None:
    subscriber.connect(0, *worker.endpoints)
    address = "tcp://127.0.0.1:1"
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ArgumentError, "worker: got 0", (0, *worker.endpoints), {}),
        (ArgumentTypeError, "worker", ("a", address), {}),
        (ArgumentError, "worker", (1 << 16, address), {}),
        (ArgumentError, "worker", (-1, address), {}),
        (ArgumentTypeError, "endpoint", (1, None), {}),
        (EndpointError, "endpoint", (1, "nonsense"), {}),
        (ArgumentTypeError, "replay_endpoint", (1, address, 5), {}),
        (EndpointError, "endpoint", (1, address, "nonsense"), {}),  # it is used only later, by the thread
        (ArgumentTypeError, "topic", (1, address), {"topic": None}),
        *((ArgumentTypeError, "curve", (1, address), {"curve": curve}) for curve in (5, ("a", "b"))),
        (ArgumentError, "curve", (1, address), {"curve": ("a", "b", "c")}),
    ]
    for port in ("99999999", "65536", "-5", "80x", ""):
        none = f"tcp://127.0.0.1:{port}"
        wrong.append((EndpointError, f"^endpoint: got '{none}': '{port}' is no port up to 65535, allowed: ", (1, none), {}))
        wrong.append((EndpointError, f"^replay_endpoint: got '{none}': ", (1, address, none), {}))
    for error, message, arguments, keywords in wrong:
        with pytest.raises(error, match=message):
            subscriber.connect(*arguments, **keywords)
    with pytest.raises(ArgumentTypeError):
        subscriber.disconnect("a")  # type: ignore[arg-type]
    make_any: Any = EventSubscriber
    for options in ({"on_report": 5}, {"index": None}, {"replay_seconds": 0}):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=next(iter(options))):
            make_any(**{"index": index} | options)
    subscriber.disconnect(5)
    subscriber.close()
    subscriber.close()
    with pytest.raises(ArgumentError, match="closed"):
        subscriber.stats()

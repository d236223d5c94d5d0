"""Sealed questions and answers: what is refused, what ends a question, restarts, and hostile bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="peers are an extra: pyzmq is not installed")
msgspec = pytest.importorskip("msgspec", reason="peers are an extra: msgspec is not installed")
pytest.importorskip("xxhash", reason="peers are an extra: xxhash is not installed")

from bad_proxy import BadProxy  # noqa: E402
from peer_links import NAMESPACE, SECONDS, SECRET  # noqa: E402
from store_jobs import wait_until  # noqa: E402

from pagepool.errors import ArgumentError, ArgumentTypeError, PeerError  # noqa: E402
from pagepool.peers import answerer as answering  # noqa: E402
from pagepool.peers.answerer import Answerer, Asked  # noqa: E402
from pagepool.peers.asker import Answered, Asker  # noqa: E402
from pagepool.peers.messages import VERSION, Answer, Question, RefusedMessageError, Seals, Stranger  # noqa: E402

LOOPBACK = "tcp://127.0.0.1:*"


class Echo:
    """Answers with what it was asked. ``fail`` raises, and ``later`` is kept for the test to answer."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self.kept: list[Asked] = []
        self.seen: list[bytes] = []
        self.answerer = Answerer(SECRET, NAMESPACE, address, self.handle)

    def handle(self, asked: Asked) -> None:
        self.seen.append(asked.body)
        if asked.body == b"fail":
            raise ZeroDivisionError
        if asked.body == b"later":
            return self.kept.append(asked)
        if asked.body == b"refuse":
            return asked.refuse("no " + "\N{SNOWMAN}" * 1000)
        return asked.answer(asked.body[::-1], [bytes(part) for part in asked.parts])


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.answerer.close()


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker(SECRET, NAMESPACE)
    yield asker
    asker.close()


def wait(asker: Asker, *numbers: int) -> list[Answered]:
    ended: dict[int, Answered] = {}
    deadline = time.monotonic() + SECONDS
    while len(ended) < len(numbers):
        assert time.monotonic() < deadline
        for each in asker.poll():
            assert each.number in numbers
            assert each.number not in ended
            ended[each.number] = each
        time.sleep(0.0005)
    return [ended[number] for number in numbers]


def ask(asker: Asker, address: str, body: bytes, seconds: float = SECONDS) -> Answered:
    return wait(asker, asker.ask(address, body, seconds=seconds))[0]


def test_questions_are_answered_with_parts(echo: Echo, asker: Asker) -> None:
    number = asker.ask(echo.answerer.address, b"abc", [b"", bytes(100_000)], seconds=SECONDS)
    (ended,) = wait(asker, number)
    assert (ended.body, ended.error) == (b"cba", None)
    assert [bytes(part) for part in ended.parts] == [b"", bytes(100_000)]


def test_an_answer_may_come_later_from_any_thread(echo: Echo, asker: Asker) -> None:
    number = asker.ask(echo.answerer.address, b"later", seconds=SECONDS)
    assert ask(asker, echo.answerer.address, b"ab").body == b"ba"
    (asked,) = echo.kept
    threading.Thread(target=asked.answer, args=(b"now",)).start()
    assert wait(asker, number)[0].body == b"now"


def test_errors_of_the_peer_are_errors_of_the_question(echo: Echo, asker: Asker) -> None:
    assert str(ask(asker, echo.answerer.address, b"fail").error).endswith("ZeroDivisionError")
    assert "no ????" in str(ask(asker, echo.answerer.address, b"refuse").error)
    assert ask(asker, echo.answerer.address, b"ab").error is None


def test_what_is_not_answered_ends_in_time(echo: Echo, asker: Asker) -> None:
    ended = ask(asker, echo.answerer.address, b"later", seconds=0.05)
    assert isinstance(ended.error, PeerError)
    echo.kept[0].answer(b"late")
    assert ask(asker, echo.answerer.address, b"ab").body == b"ba"
    assert asker.poll() == []


def test_functions_that_raise_end_nothing(echo: Echo, asker: Asker) -> None:
    asker.ask(echo.answerer.address, b"ab", seconds=SECONDS, then=lambda _: 1 // 0)  # type: ignore[arg-type,return-value]
    assert ask(asker, echo.answerer.address, b"cd").body == b"dc"


def test_without_its_name_a_restarted_server_is_asked(asker: Asker) -> None:
    first = Echo()
    pinned, endpoint = first.answerer.address, first.answerer.address.partition("#")[0]
    assert ask(asker, endpoint, b"ab").body == b"ba"
    numbers = [asker.ask(endpoint, b"later", seconds=SECONDS) for _ in range(3)]
    while len(first.kept) < 3:
        time.sleep(0.001)
    first.answerer.close()
    second = Echo(endpoint)
    try:
        assert ask(asker, endpoint, b"cd").body == b"dc"
        assert "restarted" in str(ask(asker, pinned, b"ab").error)
        while len(second.kept) < 3:  # what the first one has not answered is asked again
            time.sleep(0.001)
        for kept in second.kept:
            kept.answer(b"found")
        assert [each.body for each in wait(asker, *numbers)] == [b"found"] * 3
    finally:
        second.answerer.close()


def test_questions_before_the_name_is_known_are_asked_once(echo: Echo, asker: Asker) -> None:
    endpoint = echo.answerer.address.partition("#")[0]
    bodies = [i.to_bytes(2, "big") for i in range(3000)]
    numbers = [asker.ask(endpoint, body, seconds=SECONDS) for body in bodies]
    assert [each.body for each in wait(asker, *numbers)] == [body[::-1] for body in bodies]
    assert echo.seen == bodies


class Wire:
    """A DEALER that speaks for itself, with the secret or without it."""

    def __init__(self, address: str) -> None:
        endpoint, _, name = address.partition("#")
        self.name, self.context = bytes.fromhex(name), zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.seals = Seals(SECRET, NAMESPACE, is_server=False)

    def make(self, number: int, body: bytes = b"ab", session: bytes = b"session") -> list[Any]:
        return self.seals.seal(Question(VERSION, self.name, session, number), body)

    def hear(self, milliseconds: int = 2000) -> list[bytes] | None:
        return self.socket.recv_multipart() if self.socket.poll(milliseconds) else None

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def wire(echo: Echo) -> Iterator[Wire]:
    wire = Wire(echo.answerer.address)
    yield wire
    wire.close()


def test_a_repeated_question_is_refused(echo: Echo, wire: Wire) -> None:
    message = wire.make(5)
    for frames in (message, message, wire.make(4), wire.make(6), wire.make(5, session=b"other")):
        wire.socket.send_multipart(frames)
    heads = []
    for _ in range(3):
        frames = wire.hear()
        assert frames is not None
        heads.append(msgspec.msgpack.decode(frames[1], type=Answer | Stranger).number)
    assert heads == [5, 6, 5]
    assert wire.hear(50) is None
    assert echo.answerer.refusals.num == 2


def test_an_old_answer_is_none_to_a_new_question(asker: Asker) -> None:
    """A server without the secret that knows an answer to an earlier question of the same client."""
    echo = Echo()
    proxy = BadProxy(echo.answerer.address, Random(0), share=1.0, faults=("repeat",))
    try:
        bodies = [bytes([i]) * 2 for i in range(100)]
        assert [ask(asker, proxy.address, body).body for body in bodies] == bodies
        assert echo.seen == bodies
    finally:
        proxy.close()
        echo.answerer.close()


@pytest.mark.parametrize("seed", range(4))
def test_hostile_bytes_are_refused(echo: Echo, asker: Asker, wire: Wire, seed: int) -> None:
    """Frames of any number and length, and real ones that were changed, also with right seals and wrong heads."""
    rng = Random(seed)
    for number in range(1, 150):
        frames = [rng.randbytes(rng.choice((0, 1, 32, 40, 300))) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.6:
            frames = [bytes(frame) for frame in wire.make(number)]
            at = rng.randrange(len(frames))
            changed = bytearray(frames[at] or b"x")
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            frames[at] = bytes(changed)[: rng.choice((None, rng.randint(0, len(changed))))]
        wire.socket.send_multipart(frames)
    for head in ([], {}, "question", ["question", 1], ["question", 2, wire.name, b"s", 1], ["answer", 1, b"s", 1, None], 2**70):
        try:
            encoded = msgspec.msgpack.encode(head)
        except OverflowError:
            encoded = b"\xdd\xff\xff\xff\xff"  # an array of 2**32 - 1 items
        sealed = wire.seals.seal(Question(VERSION, wire.name, b"s", 1), b"")
        wire.socket.send_multipart([sealed[0], encoded, b""])
    assert ask(asker, echo.answerer.address, b"ab").body == b"ba"
    assert echo.seen == [b"ab"], seed
    wait_until(lambda: echo.answerer.refusals.num >= 150)


def test_bytes_that_are_no_messages_cost_a_connection(echo: Echo, asker: Asker) -> None:
    port = int(echo.answerer.address.partition("#")[0].rpartition(":")[2])
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\xff" * 10 + b"\x7f" + bytes(53) + b"\2" + b"\xff" * 8):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
            time.sleep(0.01)
    assert ask(asker, echo.answerer.address, b"ab").body == b"ba"


def test_too_long_a_question_gets_no_answer(echo: Echo, asker: Asker) -> None:
    address = echo.answerer.address
    assert ask(asker, address, bytes(answering.MAX_QUESTION_BYTES + 1), seconds=0.2).error is not None
    assert ask(asker, address, b"ab").body == b"ba"


def test_too_long_an_answer_is_none(echo: Echo) -> None:
    asker = Asker(SECRET, NAMESPACE, max_message_bytes=1000)
    try:
        number = asker.ask(echo.answerer.address, b"ab", [bytes(2000)], seconds=0.2)
        assert wait(asker, number)[0].error is not None
        assert ask(asker, echo.answerer.address, b"ab").body == b"ba"
    finally:
        asker.close()


def test_connections_are_bounded(echo: Echo, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagepool.peers.asker.MAX_SERVERS", 2)
    others = [Echo() for _ in range(4)]
    try:
        late = asker.ask(echo.answerer.address, b"later", seconds=SECONDS)
        for other in others:
            assert ask(asker, other.answerer.address, b"ab").body == b"ba" if other is others[0] else True
        numbers = [asker.ask(other.answerer.address, b"ab", seconds=SECONDS) for other in others[1:2]]
        ended = wait(asker, late, *numbers)
        assert "more than 2 peers" in str(ended[0].error)
        assert ended[1].body == b"ba"
    finally:
        for other in others:
            other.answerer.close()


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_ask_get_their_answers(echo: Echo, asker: Asker, seed: int) -> None:
    """Numbers reach the server in their order, so none is refused."""
    ended: list[Answered] = []

    def ask_some() -> None:
        for i in range(60):
            asker.ask(echo.answerer.address, i.to_bytes(2, "big"), seconds=SECONDS, then=ended.append)

    threads = [threading.Thread(target=ask_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + SECONDS
    while len(ended) < 240 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len({each.number for each in ended}) == 240
    assert not any(each.error for each in ended)
    assert echo.answerer.refusals.num == 0


def test_after_close_every_call_but_close_raises(asker: Asker) -> None:
    asker.ask("tcp://127.0.0.1:1", b"", seconds=1)
    asker.close()
    asker.close()
    for call in (lambda: asker.ask("tcp://127.0.0.1:1", b"", seconds=1), asker.poll):
        with pytest.raises(ArgumentError, match="closed"):
            call()


def test_wrong_arguments_are_refused(asker: Asker) -> None:
    for address, seconds, error in ((5, 1, ArgumentTypeError), ("x", "1", ArgumentTypeError), ("x", -1, ArgumentError)):
        with pytest.raises(error):
            asker.ask(address, b"", seconds=seconds)  # type: ignore[arg-type]
    assert asker.poll() == []


# --- seals --------------------------------------------------------------------------------------------------------


def test_a_seal_is_of_a_secret_a_namespace_and_a_direction() -> None:
    client, server = (Seals(SECRET, NAMESPACE, is_server=is_server) for is_server in (False, True))
    frames = client.seal(Question(VERSION, b"", b"s", 1), b"body", [b"part"])
    assert server.open_head(frames) == Question(VERSION, b"", b"s", 1)
    server.check(frames)
    others = [client, Seals(SECRET, "other", is_server=True), Seals(b"x" * 16, NAMESPACE, is_server=True)]
    for other in others:
        with pytest.raises(RefusedMessageError, match="seal"):
            other.check(frames)
    for changed in ([*frames[:3], b"par", b"t"], [*frames[:2], b"bod", b"ypart"], frames[:3], [*frames, b""]):
        with pytest.raises(RefusedMessageError, match="seal"):
            server.check(changed)
    with pytest.raises(RefusedMessageError, match="version 2"):
        server.open_head(client.seal(Question(2, b"", b"s", 1), b""))


def test_short_secrets_are_refused() -> None:
    for secret, error in ((bytes(15), ArgumentError), ("text" * 8, ArgumentTypeError), (None, ArgumentTypeError)):
        with pytest.raises(error, match="secret"):
            Seals(secret, NAMESPACE, is_server=True)  # type: ignore[arg-type]

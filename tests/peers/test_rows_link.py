"""Rows of host memory, pulled by other processes that may be dead, slow, lying, or of another model."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="peers are an extra: pyzmq is not installed")
pytest.importorskip("msgspec", reason="peers are an extra: msgspec is not installed")
pytest.importorskip("xxhash", reason="peers are an extra: xxhash is not installed")

from bad_proxy import BadProxy
from peer_links import NAMESPACE, SECRET, content, make_rows, offer_rows, peer_process, pull, wait_for

from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, IntegrityError, PeerError
from pagepool.peers import Link, RankLinks, RowsLink
from pagepool.peers.rows_link import Parts, view_part


@pytest.fixture
def make() -> Iterator[Callable[..., RowsLink]]:
    """A function that makes links, which are closed at the end."""
    links: list[RowsLink] = []

    def make_one(secret: bytes = SECRET, namespace: str = NAMESPACE, **options: Any) -> RowsLink:
        links.append(RowsLink(secret, namespace, **options))
        return links[-1]

    yield make_one
    for link in links:
        link.close()


def test_what_is_offered_is_pulled_by_many(make: Callable[..., RowsLink]) -> None:
    owner, sizes = make(), [1, 5_000, 0, 3_000_000, 7]
    assert isinstance(owner, Link)
    offered = [content(i, size) for i, size in enumerate(sizes)]
    owner.offer(7, offered, seconds=60)
    for chunk in (4096, 1 << 20, 1 << 22):
        pulled, parts = pull(make(max_message_bytes=chunk), owner.address, 7, sizes)
        assert pulled.error is None
        assert pulled.parts is not None
        assert all(np.array_equal(part, other) for part, other in zip(parts, offered, strict=True))
    pulled, parts = pull(owner, owner.address, 7, sizes)  # from itself
    assert pulled.error is None
    assert np.array_equal(parts[3], offered[3])


def test_parts_of_any_kind_come_back_as_given(make: Callable[..., RowsLink]) -> None:
    owner, other = make(), make()
    rows = np.arange(48, dtype=np.float32).reshape(4, 12)
    owner.offer(1, [rows, bytes(range(10)), memoryview(bytearray(b"memory")), rows[2:3]], seconds=60)
    given = [np.zeros((4, 12), np.float32), bytearray(10), memoryview(bytearray(6)), np.zeros(12, np.float32)]
    (pulled,) = wait_for(other, other.pull(owner.address, 1, given))
    assert pulled.parts is given
    assert np.array_equal(given[0], rows)
    assert given[1] == bytes(range(10))
    assert bytes(given[2]) == b"memory"  # type: ignore[arg-type]
    assert np.array_equal(given[3], rows[2])


def test_tensors_are_parts(make: Callable[..., RowsLink]) -> None:
    torch = pytest.importorskip("torch")
    owner, given = make(), torch.zeros(3, 5, dtype=torch.bfloat16)
    owner.offer(1, [torch.arange(15, dtype=torch.bfloat16).reshape(3, 5)], seconds=60)
    (pulled,) = wait_for(owner, owner.pull(owner.address, 1, [given]))
    assert pulled.error is None
    assert given.flatten().tolist() == [*range(15)]
    with pytest.raises(ArgumentTypeError, match="parts"):
        owner.offer(2, [torch.zeros(4, 4).T], seconds=1)


def test_no_parts_are_an_offer_too(make: Callable[..., RowsLink]) -> None:
    owner = make()
    owner.offer(1, [], seconds=60)
    assert pull(owner, owner.address, 1, [])[0].error is None
    assert "nothing is offered" in str(pull(owner, owner.address, 2, [])[0].error)


@pytest.mark.parametrize("sizes", [[10, 19], [20, 10], [10, 20, 0], [10], []])
def test_other_lengths_fail(make: Callable[..., RowsLink], sizes: list[int]) -> None:
    owner = make()
    owner.offer(1, [content(0, 10), content(1, 20)], seconds=60)
    pulled, parts = pull(owner, owner.address, 1, sizes)
    assert isinstance(pulled.error, PeerError)
    assert pulled.parts is None
    assert not any(part.any() for part in parts)


def test_an_offer_ends_by_itself_and_by_withdrawal(make: Callable[..., RowsLink]) -> None:
    owner = make()
    owner.offer(1, [content(0, 10)], seconds=0.05)
    owner.offer(2, [content(0, 10)], seconds=60)
    owner.withdraw(2)
    owner.withdraw(2)
    owner.withdraw(99)
    time.sleep(0.06)
    for number in (1, 2):
        pulled, _ = pull(owner, owner.address, number, [10])
        assert "ended" in str(pulled.error) or "nothing is offered" in str(pulled.error)
    owner.offer(3, [content(0, 10)], seconds=60)  # forgets ended ones
    assert pull(owner, owner.address, 3, [10])[0].error is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_time", [False, True])
def test_memory_is_free_once_an_offer_has_ended(make: Callable[..., RowsLink], seed: int, by_time: bool) -> None:
    """Others pull while the offer ends at any time and its memory gets other bytes: no pull that succeeds has one of them."""
    rng, owner, size = Random(seed), make(), 1_500_000
    peers = [make(max_message_bytes=1 << 16) for _ in range(2)]
    for number in range(8):
        memory, seconds = np.full(size, 1, np.uint8), rng.random() * 0.02
        parts = [np.zeros(size, np.uint8) for _ in peers]
        end_at = time.monotonic() + seconds
        owner.offer(number, [memory], seconds=seconds if by_time else 60)
        jobs = [peer.pull(owner.address, number, [part]) for peer, part in zip(peers, parts, strict=True)]
        time.sleep(max(0.0, end_at - time.monotonic()))
        if by_time:
            time.sleep(0.0005)  # the offer began a little after the clock was read
        else:
            owner.withdraw(number)
        memory[:] = 2
        for peer, job, part in zip(peers, jobs, parts, strict=True):
            (pulled,) = wait_for(peer, job)
            assert 2 not in part, f"seed {seed}: {pulled}"
            assert (pulled.error is None) == bool((part == 1).all()), seed


def test_nothing_is_written_after_a_job_is_over(make: Callable[..., RowsLink]) -> None:
    owner, peer = make(), make(pull_seconds=0.02, max_message_bytes=4096)
    owner.offer(1, [content(0, 30_000_000)], seconds=60)
    pulled, parts = pull(peer, owner.address, 1, [30_000_000])
    assert "no answer in time" in str(pulled.error)
    parts[0][:] = 7
    closed, rows = make(max_message_bytes=4096), np.zeros(30_000_000, np.uint8)
    closed.pull(owner.address, 1, [rows])
    time.sleep(0.01)
    closed.close()
    rows[:] = 7
    time.sleep(0.05)
    assert (parts[0] == 7).all()
    assert (rows == 7).all()


@pytest.mark.parametrize("other", [{"secret": b"another secret of 32 bytes      "}, {"namespace": "model/v2"}])
def test_others_get_nothing(make: Callable[..., RowsLink], other: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    owner, stranger = make(), make(pull_seconds=0.1, **other)
    owner.offer(1, [content(0, 10)], seconds=60)
    pulled, parts = pull(stranger, owner.address, 1, [10])
    assert "no answer in time" in str(pulled.error)
    assert not parts[0].any()
    assert owner.num_refused_messages == 1
    assert "seal is wrong" in caplog.text
    assert pull(owner, owner.address, 1, [10])[0].error is None


@pytest.mark.parametrize(
    "address",
    ["x", "tcp://127.0.0.1", "tcp://127.0.0.1:x#" + "0" * 32, "inproc://x", "tcp://127.0.0.1:5#12", "tcp://127.0.0.1:5#xy"],
)
def test_a_malformed_address_fails_the_job(make: Callable[..., RowsLink], address: str) -> None:
    pulled, _ = pull(make(), address, 1, [10])
    assert isinstance(pulled.error, PeerError)


def test_a_restarted_process_is_another_link(make: Callable[..., RowsLink]) -> None:
    first, peer = make(), make()
    endpoint = first.address.partition("#")[0]
    first.offer(1, [content(0, 10)], seconds=60)
    assert pull(peer, first.address, 1, [10])[0].error is None
    first.close()
    second = make(address=endpoint)
    second.offer(1, [content(1, 10)], seconds=60)
    assert second.address != first.address
    assert "restarted" in str(pull(peer, first.address, 1, [10])[0].error)
    assert pull(peer, second.address, 1, [10])[0].error is None


def test_a_peer_that_is_killed_in_mid_transfer(make: Callable[..., RowsLink]) -> None:
    """The job fails by its deadline, and the link serves others."""
    peer = make(pull_seconds=0.5, max_message_bytes=1 << 16)
    own = make()
    own.offer(1, [content(0, 10)], seconds=60)
    with peer_process(offer_rows, [200_000_000]) as (process, _, address):
        part = np.zeros(200_000_000, np.uint8)
        job = peer.pull(address, 1, [part])
        while not part[0]:
            time.sleep(0.0005)
        os.kill(process.pid, signal.SIGKILL)
        other = peer.pull(own.address, 1, [np.zeros(10, np.uint8)])
        failed, good = wait_for(peer, job, other)
    assert "no answer in time" in str(failed.error)
    assert good.error is None


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_network_costs_pulls_and_never_bytes(make: Callable[..., RowsLink], seed: int) -> None:
    rng = Random(seed)
    owner, peer = make(), make(pull_seconds=0.25, max_message_bytes=4096)
    proxy = BadProxy(owner.address, rng, share=0.04)
    try:
        num_right = 0
        for number in range(12):
            sizes = [rng.choice((0, 1, 5000, 40_000)) for _ in range(rng.randint(1, 3))]
            offered = [content(100 * number + i, size) for i, size in enumerate(sizes)]
            owner.offer(number, offered, seconds=60)
            jobs = [[np.zeros(size, np.uint8) for size in sizes] for _ in range(2)]
            numbers = [peer.pull(proxy.address, number, parts) for parts in jobs]
            for pulled, parts in zip(wait_for(peer, *numbers), jobs, strict=True):
                is_same = all(np.array_equal(part, other) for part, other in zip(parts, offered, strict=True))
                assert is_same or pulled.error is not None, seed
                num_right += pulled.error is None
    finally:
        proxy.close()
    assert num_right, seed
    assert proxy.num_faults, seed


def test_a_pull_of_much_does_not_block_others(make: Callable[..., RowsLink]) -> None:
    owner, peer = make(), make()
    owner.offer(1, [content(0, 100_000_000)], seconds=60)
    owner.offer(2, [content(1, 1000)], seconds=60)
    large = peer.pull(owner.address, 1, [np.zeros(100_000_000, np.uint8)])
    small = peer.pull(owner.address, 2, [np.zeros(1000, np.uint8)])
    answers = []
    while len(answers) < 2:
        answers += [each.job for each in peer.poll()]
    assert answers == [small, large]


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_fork_leaves_the_link_to_its_parent(make: Callable[..., RowsLink]) -> None:
    owner = make()
    owner.offer(1, [content(0, 10)], seconds=60)
    child = os.fork()
    if not child:
        code = 1
        try:
            for call in (
                lambda: owner.offer(2, [], seconds=1),
                lambda: owner.withdraw(1),
                lambda: owner.pull(owner.address, 1, []),
                owner.poll,
            ):
                with pytest.raises(IntegrityError, match="forked"):
                    call()
            owner.close()
            with RowsLinkOf() as own:
                own.offer(1, [content(1, 10)], seconds=60)
                assert pull(own, own.address, 1, [10])[0].error is None
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pull(owner, owner.address, 1, [10])[0].error is None


class RowsLinkOf:
    """A link for a block."""

    def __enter__(self) -> RowsLink:
        self.link = make_rows()
        return self.link

    def __exit__(self, *_: object) -> None:
        self.link.close()


def test_after_close_calls_raise_and_nothing_is_left(make: Callable[..., RowsLink]) -> None:
    before = threading.active_count()
    owner = RowsLink(SECRET, NAMESPACE)
    owner.offer(1, [content(0, 10)], seconds=60)
    owner.pull(owner.address, 1, [np.zeros(10, np.uint8)])
    owner.close()
    owner.close()
    for call in (
        lambda: owner.offer(2, [], seconds=1),
        lambda: owner.withdraw(1),
        lambda: owner.pull("tcp://127.0.0.1:1", 1, []),
        owner.poll,
    ):
        with pytest.raises(ArgumentError, match="closed"):
            call()
    assert threading.active_count() == before
    forgotten = RowsLink(SECRET, NAMESPACE)
    del forgotten
    gc.collect()
    assert threading.active_count() == before


def test_wrong_arguments_change_nothing(make: Callable[..., RowsLink]) -> None:
    link = make()
    read_only, strided = np.zeros(4, np.uint8), np.zeros((4, 4), np.uint8)[:, :2]
    read_only.flags.writeable = False
    for number, parts, seconds, error in (
        ("1", [], 1, ArgumentTypeError),
        (-1, [], 1, ArgumentError),
        (1 << 63, [], 1, ArgumentError),
        (1, 5, 1, ArgumentTypeError),
        (1, ["text"], 1, ArgumentTypeError),
        (1, [strided], 1, ArgumentTypeError),
        (1, [np.array([None])], 1, ArgumentTypeError),
        (1, [], "1", ArgumentTypeError),
        (1, [], -1, ArgumentError),
        (1, [], float("nan"), ArgumentError),
    ):
        with pytest.raises(error):
            link.offer(number, parts, seconds=seconds)  # type: ignore[arg-type]
    link.offer(1, [], seconds=60)
    with pytest.raises(ArgumentError, match="number: got 1, which is offered"):
        link.offer(1, [], seconds=60)
    for address, number, parts, error in (
        (5, 1, [], ArgumentTypeError),
        ("x", None, [], ArgumentTypeError),
        ("x", 1, [read_only], ArgumentTypeError),
        ("x", 1, [b"read-only"], ArgumentTypeError),
        ("x", 1, [strided], ArgumentTypeError),
    ):
        with pytest.raises(error):
            link.pull(address, number, parts)  # type: ignore[arg-type]
    assert link.poll() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"secret": "text"}, ArgumentTypeError),
        ({"secret": bytes(15)}, ArgumentError),
        ({"namespace": b"bytes"}, ArgumentTypeError),
        ({"address": 5}, ArgumentTypeError),
        ({"address": "nonsense"}, EndpointError),
        ({"address": "tcp://127.0.0.1:99999"}, EndpointError),
        ({"pull_seconds": -1}, ArgumentError),
        ({"max_message_bytes": 100}, ArgumentError),
        ({"max_message_bytes": 1.5}, ArgumentTypeError),
    ],
)
def test_wrong_arguments_of_a_link_leave_no_thread(options: dict[str, Any], error: type[Exception]) -> None:
    before = threading.active_count()
    with pytest.raises(error):
        RowsLink(**({"secret": SECRET, "namespace": NAMESPACE} | options))
    assert threading.active_count() == before


@pytest.mark.parametrize("seed", range(3))
def test_joined_parts_are_read_and_written_anywhere(seed: int) -> None:
    rng = Random(seed)
    joined = bytearray()
    parts = [content(i, rng.choice((0, 1, 3, 10))) for i in range(rng.randint(1, 8))]
    for part in parts:
        joined += part.tobytes()
    own = Parts([view_part(part) for part in parts])
    for _ in range(50):
        start = rng.randint(0, len(joined))
        other = np.frombuffer(rng.randbytes(rng.randint(0, len(joined) - start)), np.uint8).copy()
        if rng.random() < 0.5:
            own.copy(start, other, is_read=False)
            joined[start : start + len(other)] = other.tobytes()
        own.copy(start, other, is_read=True)
        assert other.tobytes() == joined[start : start + len(other)], seed
    assert b"".join(part.tobytes() for part in parts) == joined


# --- ranks --------------------------------------------------------------------------------------------------------


def test_ranks_pull_each_their_own_parts(make: Callable[..., RowsLink]) -> None:
    owner, peer = (RankLinks([make(), make()]) for _ in range(2))
    assert isinstance(owner, Link)
    offered = [[content(0, 10), content(1, 20)], [content(2, 30)]]
    owner.offer(1, offered, seconds=60)
    parts = [[np.zeros(len(part), np.uint8) for part in rank] for rank in offered]
    (pulled,) = wait_for(peer, peer.pull(owner.address, 1, parts))
    assert pulled.error is None
    for given, other in zip(
        [part for rank in parts for part in rank], [part for rank in offered for part in rank], strict=True
    ):
        assert np.array_equal(given, other)
    owner.withdraw(1)
    (pulled,) = wait_for(peer, peer.pull(owner.address, 1, parts))
    assert pulled.error is not None


def test_a_rank_that_fails_fails_the_job_once_all_have_ended(make: Callable[..., RowsLink]) -> None:
    links = [make(), make()]
    owner, peer = RankLinks(links), RankLinks([make(), make()])
    owner.offer(1, [[content(0, 10)], [content(1, 10)]], seconds=60)
    links[1].withdraw(1)
    first, second = [np.zeros(10, np.uint8)], [np.zeros(10, np.uint8)]
    (pulled,) = wait_for(peer, peer.pull(owner.address, 1, [first, second]))
    assert pulled.parts is None
    assert "nothing is offered" in str(pulled.error)
    assert np.array_equal(first[0], content(0, 10))
    (pulled,) = wait_for(peer, peer.pull(owner.address, 1, [first, ["no buffer"]]))
    assert isinstance(pulled.error, ArgumentTypeError)


def test_ranks_of_another_number_are_refused(make: Callable[..., RowsLink]) -> None:
    one, two = RankLinks([make()]), RankLinks([make(), make()])
    with pytest.raises(ArgumentError, match="address: got one of 1 ranks"):
        two.pull(one.address, 1, [[], []])
    with pytest.raises(ArgumentError, match="parts: got 1 sequences"):
        two.offer(1, [[]], seconds=1)
    with pytest.raises(ArgumentTypeError):
        two.offer(1, [[], ["text"]], seconds=1)
    two.offer(1, [[], []], seconds=1)  # the refused call left nothing
    with pytest.raises(ArgumentError, match="links: got none"):
        RankLinks([])
    with pytest.raises(ArgumentTypeError, match="links: got int"):
        RankLinks([5])  # type: ignore[list-item]
    two.close()

"""Arrays of jax that cross between processes, and peers that are gone, silent or of another model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="peers are an extra: pyzmq is not installed")
pytest.importorskip("msgspec", reason="peers are an extra: msgspec is not installed")
pytest.importorskip("xxhash", reason="peers are an extra: xxhash is not installed")
jax = pytest.importorskip("jax", reason="jax is an extra")
pytest.importorskip("jax.experimental.transfer", reason="this jax has no transfer server")

import jax.numpy as jnp  # noqa: E402
from peer_links import NAMESPACE, SECRET, offer_arrays, peer_process, wait_for  # noqa: E402
from sources import run_python  # noqa: E402
from store_jobs import wait_until  # noqa: E402

from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, PeerError  # noqa: E402
from pagepool.peers import JaxLink, Link, RankLinks  # noqa: E402
from pagepool.peers import jax_link as module  # noqa: E402

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the CPU")


@pytest.fixture
def make() -> Iterator[Callable[..., JaxLink]]:
    links: list[JaxLink] = []

    def make_one(secret: bytes = SECRET, **options: Any) -> JaxLink:
        links.append(JaxLink(secret, NAMESPACE, **options))
        return links[-1]

    yield make_one
    for link in links:
        link.close()


def spec(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def pull(link: Any, address: str, number: int, *specs: Any) -> Any:
    (pulled,) = wait_for(link, link.pull(address, number, specs))
    return pulled


def test_arrays_are_pulled_by_many(make: Callable[..., JaxLink]) -> None:
    owner, others = make(), [make(), make()]
    assert isinstance(owner, Link)
    pages = jnp.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4)
    owner.offer(3, [pages, jnp.ones(5)], seconds=60)
    for other in [*others, owner]:
        for _ in range(2):
            pulled = pull(other, owner.address, 3, spec(2, 3, 4, dtype=jnp.bfloat16), spec(5))
            assert pulled.error is None
            assert (pulled.parts[0] == pages).all()
            assert pulled.parts[1].tolist() == [1.0] * 5
    owner.withdraw(3)
    assert "nothing is offered" in str(pull(others[0], owner.address, 3, spec(2, 3, 4), spec(5)).error)


def test_other_shapes_and_dtypes_fail(make: Callable[..., JaxLink]) -> None:
    owner = make()
    owner.offer(1, [jnp.zeros((2, 3))], seconds=60)
    for specs in ([spec(3, 2)], [spec(2, 3, dtype=jnp.int32)], [spec(2, 3)] * 2, []):
        assert "other shapes" in str(pull(owner, owner.address, 1, *specs).error)
    assert pull(owner, owner.address, 1, spec(2, 3)).error is None


def test_what_arrives_after_the_end_is_refused(make: Callable[..., JaxLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """The offer ends between the transfer and the question whether it is right."""
    owner, other = make(), make()
    owner.offer(1, [jnp.zeros(4)], seconds=60)
    look = JaxLink.look

    def withdraw_and_look(link: JaxLink) -> bool:
        owner.withdraw(1)
        return look(link)

    monkeypatch.setattr(JaxLink, "look", withdraw_and_look)
    pulled = pull(other, owner.address, 1, spec(4))
    assert "ended" in str(pulled.error) or "nothing is offered" in str(pulled.error)
    assert pulled.parts is None


def test_a_killed_peer_costs_the_deadline(make: Callable[..., JaxLink]) -> None:
    other = make(pull_seconds=0.3)
    with peer_process(offer_arrays, 4_000_000) as (process, _, address):
        assert pull(make(), address, 1, spec(4_000_000)).error is None
        job = other.pull(address, 1, [spec(4_000_000)])
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        (killed,) = wait_for(other, job)
        start = time.monotonic()
        later = pull(other, address, 1, spec(4_000_000))
    assert killed.error is None or isinstance(killed.error, PeerError)
    assert isinstance(later.error, PeerError)
    assert time.monotonic() - start < 5
    own = make()
    own.offer(1, [jnp.zeros(3)], seconds=60)
    assert pull(other, own.address, 1, spec(3)).error is None


def test_what_nobody_pulls_is_given_back(make: Callable[..., JaxLink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_OF_GRACE", 0.05)
    owner, other = make(), make(pull_seconds=0.05)
    owner.offer(1, [jnp.zeros(4)], seconds=60)
    monkeypatch.setattr(other._transfers, "connect", lambda _: None)
    assert pull(other, owner.address, 1, spec(4)).error is not None
    assert len(owner._transfers._awaited) == 1
    wait_until(lambda: not owner._transfers._awaited)
    assert pull(make(), owner.address, 1, spec(4)).error is None


def test_strangers_get_nothing(make: Callable[..., JaxLink]) -> None:
    owner = make()
    owner.offer(1, [jnp.zeros(4)], seconds=60)
    assert "no answer in time" in str(pull(make(b"x" * 16, pull_seconds=0.1), owner.address, 1, spec(4)).error)
    assert owner.num_refused_messages == 1


def test_ranks_have_each_their_own_arrays(make: Callable[..., JaxLink]) -> None:
    owner, other = RankLinks([make(), make()]), RankLinks([make(), make()])
    owner.offer(1, [[jnp.zeros(2)], [jnp.ones(3)]], seconds=60)
    pulled = pull(other, owner.address, 1, [spec(2)], [spec(3)])
    assert [[array.tolist() for array in rank] for rank in pulled.parts] == [[[0.0, 0.0]], [[1.0, 1.0, 1.0]]]


def test_wrong_arguments_are_refused(make: Callable[..., JaxLink]) -> None:
    link, deleted = make(), jnp.zeros(3)
    deleted.delete()
    for parts, error in (([b"bytes"], ArgumentTypeError), (5, ArgumentTypeError), ([deleted], ArgumentError)):
        with pytest.raises(error, match="parts"):
            link.offer(1, parts, seconds=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="parts"):
        link.pull("tcp://127.0.0.1:1", 1, [jnp.zeros(3)])
    for wrong, error in (
        ({"device": 5}, ArgumentTypeError),
        ({"transfer_address": 5}, ArgumentTypeError),
        ({"transfer_address": "nonsense"}, EndpointError),
        ({"address": "nonsense"}, EndpointError),
        ({"pull_seconds": -1}, ArgumentError),
        ({"secret": b"short"}, ArgumentError),
    ):
        with pytest.raises(error):
            JaxLink(**({"secret": SECRET, "namespace": NAMESPACE} | wrong))
    link.close()
    with pytest.raises(ArgumentError, match="closed"):
        link.poll()


def test_the_end_of_a_process_waits_for_nothing() -> None:
    """Also with an open link, offers, and a pull from a silent peer."""
    code = """
import jax, jax.numpy as jnp
from pagepool.peers import JaxLink
link = JaxLink(bytes(32), "model")
link.offer(1, [jnp.zeros(4)], seconds=60)
link.pull(link.address, 1, [jax.ShapeDtypeStruct((4,), jnp.float32)])
link.pull("tcp://127.0.0.1:1", 1, [jax.ShapeDtypeStruct((4,), jnp.float32)])
print("end")
"""
    process = run_python("-c", code, timeout=30)
    assert (process.returncode, process.stdout) == (0, "end\n"), process.stderr

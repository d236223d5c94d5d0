"""`JaxLink`: a link for arrays of jax, from device to device. Needs the extras ``pagepool[jax]`` and ``pagepool[peers]``.

The bytes move by ``jax.experimental.transfer``, whose offers serve one pull each, cannot be withdrawn, and wait for ever. So a
puller first asks the link's `Answerer`, which lets jax await that one pull under a random number. It asks again once the arrays
have arrived, and the owner confirms them unless the offer has ended. Arrays that nobody pulled in time are pulled by the owner
itself, to give the memory back.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pagepool.arguments import as_list, require_int, require_number, require_text
from pagepool.device import import_jax
from pagepool.errors import ArgumentError, ArgumentTypeError, CompatError, EndpointError, PeerError
from pagepool.peers.answerer import DEFAULT_ADDRESS, Answerer, Asked
from pagepool.peers.asker import MAX_SECONDS, Answered, Asker
from pagepool.peers.link import Pulled
from pagepool.peers.rows_link import MAX_NUMBER

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.001
SECONDS_BETWEEN_RECLAIMS = 0.1
SECONDS_OF_GRACE = 1.0
"""Time after a pull's deadline until its owner takes the arrays back: answers may be on their way."""
NUMBER_BITS = 62


class Begin(msgspec.Struct, array_like=True, frozen=True, tag="begin", forbid_unknown_fields=True):
    """A question for a pull of an offer of these arrays, which lasts for some seconds. The answer is a `Begun`."""

    number: int
    specs: bytes
    seconds: float


class End(msgspec.Struct, array_like=True, frozen=True, tag="end", forbid_unknown_fields=True):
    """A question whether what was pulled under jax's number is right: whether the offer has not ended. The answer is empty."""

    jax_number: int


class Begun(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where to pull: the number and the address of jax's transfer server."""

    jax_number: int
    address: str


_decode: Any = msgspec.msgpack.Decoder(Begin | End).decode
_decode_begun = msgspec.msgpack.Decoder(Begun).decode


@dataclass(slots=True, eq=False)
class Offer:
    """Arrays that peers may pull."""

    arrays: list[Any]
    specs: bytes
    end_at: float


@dataclass(slots=True, eq=False)
class Pull:
    """A job, and its arrays once jax pulls them."""

    job: int
    address: str
    number: int
    specs: list[Any]
    end_at: float
    jax_number: int = 0
    arrays: list[Any] | None = None


class JaxLink:
    """A `Link` whose parts are arrays of jax. `offer` gets copies of pages, gathered for it, which must not be donated to a
    program or deleted. `pull` gets a ``jax.ShapeDtypeStruct`` for each, with the sharding of the new array, and `poll`
    returns the arrays.

    A job that is not over after `pull_seconds` fails. jax cannot cancel a pull, so one from a silent peer stays until the
    process ends, though without memory of the size of its arrays. Nothing is pulled from an offer that has ended, and late
    arrays are refused. If a peer was about to pull, jax keeps the arrays until its deadline and a second more; nothing else is
    written into their memory before.

    The secret authenticates who pulls; jax itself encrypts nothing, and asks for no secret but a random number of 62 bits. See
    "Who may pull" in docs/security.md.
    """

    def __init__(
        self,
        secret: bytes,
        namespace: str,
        *,
        device: "jax.Device | None" = None,
        address: str = DEFAULT_ADDRESS,
        transfer_address: str = "127.0.0.1:0",
        pull_seconds: float = 10.0,
    ) -> None:
        """Listen at `address` for questions, and at `transfer_address`, an IP address with a port, for jax's transfers. Arrays
        without a sharding in their specs arrive on `device`, by default the first one of the process.

        Raise CompatError if this jax is too old or has no transfer server, EndpointError for an unusable address,
        ArgumentTypeError or ArgumentError for other values, ImportError without jax.
        """
        jax = import_jax()
        self._seconds = require_number("pull_seconds", pull_seconds, 0.0, MAX_SECONDS)
        transfer_address = require_text("transfer_address", transfer_address)
        if device is not None and not isinstance(device, jax.Device):
            raise ArgumentTypeError(f"device: got {type(device).__name__}, allowed: a device of jax, or None")
        self._device = jax.local_devices()[0] if device is None else device
        self._transfers = _Transfers(start_server(self._device, transfer_address))
        self._pulls: dict[int, Pull] = {}
        self._jobs = itertools.count(1)
        self._ended: deque[Pulled] = deque()
        self._answerer = Answerer(secret, namespace, address, self._transfers.handle, name="jax-answers")
        try:
            self._asker = Asker(secret, namespace, name="jax-asks")
        except BaseException:
            self._answerer.close()
            raise
        self._close = weakref.finalize(self, _close, self._answerer, self._asker, self._transfers, self._pulls)
        watch = partial(_watch, weakref.ref(self), self._transfers)
        threading.Thread(target=watch, name="pagepool-jax-pulls", daemon=True).start()

    @property
    def address(self) -> str:
        """The address from which others pull, with a random name of this link."""
        return self._answerer.address

    @property
    def num_refused_messages(self) -> int:
        """The number of refused messages: with a wrong seal, malformed, or repeated."""
        return self._answerer.refusals.num + self._asker.refusals.num

    def offer(self, number: int, parts: Sequence[Any], *, seconds: float) -> None:
        """Let peers pull arrays until `seconds` have passed, or `withdraw`. Nothing is copied. O(parts + offers).

        Raise ArgumentTypeError for other parts than arrays of jax, ArgumentError for deleted ones, for a number that is offered
        already, and other values.
        """
        jax = import_jax()
        now = time.monotonic()
        number, seconds = require_int("number", number, 0, MAX_NUMBER), require_number("seconds", seconds, 0.0, MAX_SECONDS)
        arrays = as_list("parts", parts, "a sequence of arrays")
        for array in arrays:
            if not isinstance(array, jax.Array):
                raise ArgumentTypeError(f"parts: got {type(array).__name__}, allowed: arrays of jax")
            if array.is_deleted():
                raise ArgumentError("parts: got an array that was deleted or donated, allowed: others")
        self._answerer.require_open()
        self._transfers.add(number, Offer(arrays, digest_specs(arrays), now + seconds), now)

    def withdraw(self, number: int) -> None:
        """End an offer: nothing pulled from it is right any more. Arrays that a peer was about to pull are kept for a while."""
        number = require_int("number", number, 0, MAX_NUMBER)
        self._answerer.require_open()
        self._transfers.offers.pop(number, None)

    def pull(self, address: str, number: int, parts: Sequence[Any]) -> int:
        """Start to pull an offer of the link at an address, into a new array for each ``jax.ShapeDtypeStruct``. Return the
        number of the job. Raise ArgumentTypeError for other parts, ArgumentError for other values.
        """
        jax = import_jax()
        address, number = require_text("address", address), require_int("number", number, 0, MAX_NUMBER)
        specs = as_list("parts", parts, "a sequence of jax.ShapeDtypeStruct")
        for spec in specs:
            if not isinstance(spec, jax.ShapeDtypeStruct):
                raise ArgumentTypeError(f"parts: got {type(spec).__name__}, allowed: jax.ShapeDtypeStruct")
        here = jax.sharding.SingleDeviceSharding(self._device)
        placed = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding or here) for each in specs]
        self._asker.require_open()
        pull = Pull(next(self._jobs), address, number, placed, time.monotonic() + self._seconds)
        self._pulls[pull.job] = pull
        question = Begin(number, digest_specs(placed), self._seconds)
        self._ask(pull, question, self._begin)
        return pull.job

    def poll(self) -> list[Pulled]:
        """Return the jobs that have ended since the last call. Raise ArgumentError after `close`."""
        self._asker.require_open()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """End all offers and jobs. No job is answered afterwards. No effect for a closed link."""
        self._close()

    def _ask(self, pull: Pull, question: Begin | End, then: Any) -> None:
        seconds = max(0.0, pull.end_at - time.monotonic())
        self._asker.ask(pull.address, msgspec.msgpack.encode(question), seconds=seconds, then=partial(then, pull))

    def _begin(self, pull: Pull, ended: Answered) -> None:
        """Let jax pull. This runs in the asker's thread."""
        if ended.error is not None:
            return self._end(pull, ended.error)
        try:
            begun = _decode_begun(ended.body)
            arrays = self._transfers.connect(begun.address).pull(begun.jax_number, pull.specs)
        except Exception as error:
            return self._end(pull, PeerError(f"peer {pull.address}: {error}"))
        pull.jax_number, pull.arrays = begun.jax_number, list(arrays)
        self._transfers.has_work.set()
        return None

    def look(self) -> bool:
        """Ask to confirm the arrays of jobs that have arrived, and end late jobs. Return whether any job waits for arrays."""
        waiting = [pull for pull in [*self._pulls.values()] if pull.arrays is not None and pull.jax_number]
        for pull in waiting:
            try:
                if all(array.is_ready() for array in pull.arrays or ()):
                    for array in pull.arrays or ():
                        array.block_until_ready()  # raises the error of the transfer
                    question, pull.jax_number = End(pull.jax_number), 0
                    self._ask(pull, question, self._confirm)
                elif time.monotonic() >= pull.end_at:
                    self._end(pull, PeerError(f"peer {pull.address}: no arrays in time"))
            except Exception as error:
                self._end(pull, PeerError(f"peer {pull.address}: {error}"))
        return bool(waiting)

    def _confirm(self, pull: Pull, ended: Answered) -> None:
        self._end(pull, ended.error)

    def _end(self, pull: Pull, error: Exception | None) -> None:
        if self._pulls.pop(pull.job, None) is not None:
            self._ended.append(Pulled(pull.job, pull.arrays if error is None else None, error))


class _Transfers:
    """The offers of a link, and the pulls that jax awaits."""

    def __init__(self, server: Any) -> None:
        self._server, self._connections = server, dict[str, Any]()
        self.offers: dict[int, Offer] = {}
        self._awaited: dict[int, tuple[int, Offer, float]] = {}  # by jax's number: the offer's number, and when to take it back
        self.has_work, self.is_closed = threading.Event(), False

    def add(self, number: int, offer: Offer, now: float) -> None:
        """Add an offer, and forget those that have ended."""
        for each, other in [*self.offers.items()]:
            if other.end_at <= now:
                self.offers.pop(each, None)
        if number in self.offers:
            raise ArgumentError(f"number: got {number}, which is offered, allowed: a number that was never used")
        self.offers[number] = offer

    def connect(self, address: str) -> Any:
        """Return a connection to a transfer server."""
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        return self._connections[address]

    def handle(self, asked: Asked) -> None:
        """Let jax await a pull, or confirm one."""
        try:
            question = _decode(asked.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return asked.refuse("its question is malformed")
        now = time.monotonic()
        if isinstance(question, End):
            awaited = self._awaited.pop(question.jax_number, None)
            if awaited is None or self.offers.get(awaited[0]) is not awaited[1] or now >= awaited[1].end_at:
                return asked.refuse("the offer has ended")
            return asked.answer(b"")
        offer = self.offers.get(question.number)
        if offer is None or now >= offer.end_at:
            return asked.refuse("nothing is offered under this number")
        if question.specs != offer.specs:
            return asked.refuse("the offered arrays have other shapes or dtypes")
        jax_number = secrets.randbits(NUMBER_BITS)
        seconds = (min(question.seconds, MAX_SECONDS) if question.seconds > 0 else 0.0) + SECONDS_OF_GRACE
        self._server.await_pull(jax_number, offer.arrays)
        self._awaited[jax_number] = question.number, offer, now + seconds
        self.has_work.set()
        asked.answer(msgspec.msgpack.encode(Begun(jax_number, self._server.address())))
        return None

    def reclaim(self) -> bool:
        """Pull what peers did not pull in time. Return whether jax awaits more."""
        now = time.monotonic()
        for jax_number, (_, offer, end_at) in [*self._awaited.items()]:
            if now >= end_at:
                self._awaited.pop(jax_number, None)
                with contextlib.suppress(Exception):
                    self.connect(self._server.address()).pull(jax_number, [_spec_of(array) for array in offer.arrays])
        return bool(self._awaited)

    def close(self) -> None:
        """Drop all arrays."""
        self.is_closed = True
        self.has_work.set()
        self.offers.clear()
        self._awaited.clear()
        self._connections.clear()
        self._server = None


def _watch(link: "weakref.ref[JaxLink]", transfers: _Transfers) -> None:
    """Look at the pulls of a link until it is closed or forgotten."""
    while not transfers.is_closed:
        owner = link()
        try:
            is_waiting = owner is not None and owner.look()
            has_more = transfers.reclaim()
        except Exception:
            logger.exception("pulls of jax were not looked at")
            is_waiting = has_more = True
        del owner
        if not is_waiting:
            transfers.has_work.wait(SECONDS_BETWEEN_RECLAIMS if has_more else None)
            transfers.has_work.clear()
        else:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _close(answerer: Answerer, asker: Asker, transfers: _Transfers, pulls: dict[int, Pull]) -> None:
    if answerer.is_open:
        pulls.clear()
        answerer.close()
        asker.close()
        transfers.close()


def start_server(device: Any, transfer_address: str) -> Any:
    """Start jax's transfer server. Raise CompatError without one, EndpointError for an unusable address."""
    try:
        from jax.experimental.transfer import start_transfer_server
    except ImportError as error:
        raise CompatError("jax: got a version without jax.experimental.transfer, allowed: one that has it") from error
    try:
        return start_transfer_server(device.client, transfer_address, [transfer_address])
    except (RuntimeError, ValueError, TypeError) as error:
        allowed = "an IP address of this machine with a free port, on a platform with a transfer server"
        raise EndpointError(f"transfer_address: got {transfer_address!r}: {error}, allowed: {allowed}") from None


def digest_specs(arrays: Sequence[Any]) -> bytes:
    """Return the SHA-256 of the shapes and dtypes of arrays."""
    specs = [[list(array.shape), str(array.dtype)] for array in arrays]
    return hashlib.sha256(json.dumps(specs).encode()).digest()


def _spec_of(array: Any) -> Any:
    return import_jax().ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

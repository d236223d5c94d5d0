"""Limits on the connections of a socket that listens. Needs the extra ``pagepool[events]``.

libzmq limits neither the connections of a socket, nor the topics of a subscriber, nor the frames of an endless message. `Guard`
closes connections beyond the limits by their descriptors. It has its own thread, because libzmq accepts connections
independently of the thread of its sockets.
"""

import contextlib
import ctypes
import logging
import math
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from pagepool.errors import EndpointError, shown

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
MAX_PORT = 65535
ZAP_DOMAIN = "pagepool"
MAX_UNREAD_BYTES = 1 << 16  # limit of an unfinished message; in libzmq small frames take up to 32 times as much
NUM_FRAME_BYTES = 64  # largest overhead of a frame on the wire
NUM_SUBSCRIPTION_BYTES = 64  # overhead of each topic
MAX_SUBSCRIPTION_BYTES = 8192  # limit of the topics of a subscriber
MAX_SUBSCRIPTIONS_READ = 256  # limit of one call
MILLISECONDS_BETWEEN_LOOKS = 50
SHARE_OF_DESCRIPTORS = 8  # an endpoint may use 1/8 of the process's descriptors
SECONDS_BETWEEN_WARNINGS = 60.0
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # Linux's socket options
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # packet filter that keeps 0 bytes
BYTES_RECEIVED_AT = 128  # offset in Linux's tcp_info

SOCKET_OPTIONS: dict[int, int | bytes] = {
    zmq.MAXMSGSIZE: 1024,  # largest message from a router, in bytes: handshakes, sequence numbers, topics
    zmq.HANDSHAKE_IVL: 5000,  # milliseconds for a handshake
    zmq.BACKLOG: 32,  # connections waiting to be accepted by libzmq
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,  # seconds before the first probe of a silent router
    zmq.TCP_KEEPALIVE_INTVL: 10,  # seconds between probes
    zmq.TCP_KEEPALIVE_CNT: 6,  # unanswered probes before the connection is closed
    # A ZAP domain refuses ZMTP 1 and 2, whose messages do not identify their connection. ZMTP 3 passes: without keys there is
    # no handler.
    zmq.ZAP_DOMAIN: ZAP_DOMAIN.encode(),
}


class Peer:
    """One connection to a router."""

    def __init__(self, is_refused: bool = False) -> None:
        """Start without topics and messages."""
        self.is_refused = is_refused
        self.client = b""  # routing id of its requests; distinguishes it from a later connection with the same descriptor
        self.num_topic_bytes = 0
        self._topics: set[bytes] = set()
        self._num_bytes_read = self._num_bytes_unread = self._last_difference = 0

    def note_read(self, frames: Sequence["zmq.Frame"]) -> None:
        """Count a message just read."""
        self._num_bytes_read += sum(len(frame) + NUM_FRAME_BYTES for frame in frames)

    def count_unread(self, num_bytes_received: int) -> int:
        """Return the number of received bytes not yet read as messages. An excess of `note_read` is never deducted later."""
        difference = num_bytes_received - self._num_bytes_read
        self._num_bytes_unread = max(0, self._num_bytes_unread + difference - self._last_difference)
        self._last_difference = difference
        return self._num_bytes_unread

    def note_subscription(self, message: bytes) -> None:
        """Add or remove a topic. Ignore other messages of a subscriber."""
        kind, topic = message[:1], message[1:]
        if kind in (b"\0", b"\1") and (topic in self._topics) == (kind == b"\0"):
            self._topics ^= {topic}
            self.num_topic_bytes += (1 if kind == b"\1" else -1) * (len(topic) + NUM_SUBSCRIPTION_BYTES)


class Peers:
    """The connections of one socket, by their descriptors."""

    def __init__(self, watched: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Watch a socket first, then let it listen, so that no connection is missed."""
        self.watched = watched
        self.by_descriptor: dict[int, Peer] = {}
        self.listening = -1  # listening descriptor, until the socket is closed
        self._is_open = True
        begun = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED
        self.monitor = watched.get_monitor_socket(begun | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        watched.bind(endpoint)
        self.endpoint = watched.getsockopt_string(zmq.LAST_ENDPOINT)
        if not self.endpoint.startswith("inproc:"):  # inproc has no connections
            self.listening = recv_monitor_message(self.monitor, zmq.DONTWAIT)["value"]

    def set_open(self, is_open: bool) -> bool:
        """Accept connections to a TCP port, or let Linux drop their packets: they then take no descriptor and retry.

        Return whether the state has changed.
        """
        if is_open == self._is_open:
            return False
        self._is_open = is_open
        with contextlib.suppress(OSError, ValueError), _borrowed(self.listening) as listener:
            if sys.platform == "linux" and listener.family in (socket.AF_INET, socket.AF_INET6):
                option = SO_DETACH_FILTER if is_open else SO_ATTACH_FILTER
                listener.setsockopt(socket.SOL_SOCKET, option, struct.pack("HP", 1, ctypes.addressof(DROP_ALL)))
        return True

    def find(self, frame: "zmq.Frame") -> tuple[int, Peer]:
        """Return the descriptor and connection of a frame; a new `Peer` if none is recorded, refused if it is closed."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return -1, Peer()
        return descriptor, self.by_descriptor.get(descriptor) or Peer(is_refused=not self.has(descriptor))

    def has(self, descriptor: int) -> bool:
        """Whether a descriptor belongs to one of the connections or to their listener, by its address."""
        try:
            with _borrowed(descriptor) as connection:
                address = connection.getsockname()
        except (OSError, ValueError):
            return False
        if isinstance(address, tuple):
            return self.endpoint.startswith("tcp:") and self.endpoint.endswith(f":{address[1]}")
        return self.endpoint == "ipc://" + os.fsdecode(address).replace("\0", "@", 1)


class Guard:
    """Limits of the connections of a publisher's sockets, enforced in a thread started once all sockets are watched."""

    def __init__(self, max_connections: int, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        """Allow each socket `max_connections`, and at most an eighth of the process's descriptors; and each connection
        `max_unread_bytes` of an unfinished message.
        """
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft_limit != resource.RLIM_INFINITY:
            max_connections = min(max_connections, max(1, soft_limit // SHARE_OF_DESCRIPTORS))
        self._max_connections, self._max_unread_bytes = max_connections, max_unread_bytes
        self._all_peers: list[Peers] = []
        self._lock = threading.Lock()
        self._spare, self._nothing = socket.socketpair()
        self._warn_at = -math.inf
        self.thread = threading.Thread(target=self._run, name="pagepool-connections", daemon=True)

    def watch(self, watched: "zmq.Socket[bytes]", name: str, endpoint: str) -> Peers:
        """Let a socket listen at an address, and return its connections. Raise EndpointError for an unusable address; `name` is
        that of the argument.
        """
        require_ports(name, endpoint)
        try:
            self._all_peers.append(Peers(watched, endpoint))
        except (zmq.ZMQError, UnicodeError) as error:
            is_in_use = isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE
            got = f"{endpoint!r}: {'the port is in use' if is_in_use else error}"
            raise EndpointError(f"{name}: got {got}, allowed: a free one, such as {DEFAULT_ENDPOINT!r}") from None
        return self._all_peers[-1]

    def stop(self) -> None:
        """Stop the thread. Call this in the thread that uses the sockets, before they are closed."""
        if self.thread.is_alive():  # the thread must read to the end: libzmq blocks on a full monitor
            for peers in self._all_peers:
                peers.watched.disable_monitor()
            self.thread.join()
        self._spare.close()
        self._nothing.close()

    def forget(self) -> None:
        """Close a forked process's copies of the connections, which would stay open there."""
        for peers in self._all_peers:
            for descriptor in filter(peers.has, [peers.listening, *peers.by_descriptor]):
                os.close(descriptor)
        self._spare.close()
        self._nothing.close()

    def close(self, peers: Peers, descriptor: int) -> None:
        """Refuse a connection, and let libzmq close it. No effect if the descriptor has been reused."""
        peer = peers.by_descriptor.get(descriptor)
        if peer is not None:
            peer.is_refused = True
        spare = self._spare.fileno()
        with self._lock, contextlib.suppress(OSError):
            os.dup2(descriptor, spare, inheritable=False)  # this works even if no descriptor is free
            try:
                if peers.has(spare):  # spare now refers to the connection
                    self._spare.shutdown(socket.SHUT_RDWR)
            finally:
                os.dup2(self._nothing.fileno(), spare, inheritable=False)

    def read_subscriptions(self, peers: Peers) -> None:
        """Read the messages of subscribers to an XPUB socket, in its thread, and close subscribers with too many topics."""
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_SUBSCRIPTIONS_READ):
                frame = peers.watched.recv(zmq.DONTWAIT, copy=False)
                descriptor, peer = peers.find(frame)
                if not peer.is_refused:
                    peer.note_read([frame])
                    peer.note_subscription(frame.bytes)
                    if peer.num_topic_bytes > MAX_SUBSCRIPTION_BYTES:
                        self.close(peers, descriptor)

    # Methods that run in the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        followed = {peers.monitor: peers for peers in self._all_peers}
        look_at = -math.inf
        for monitor in followed:
            poller.register(monitor, zmq.POLLIN)
        while followed:
            try:
                has_any = any(peers.by_descriptor for peers in followed.values())
                for monitor, _ in poller.poll(MILLISECONDS_BETWEEN_LOOKS if has_any else None):
                    if not self._follow(followed[monitor]):
                        poller.unregister(monitor)
                        del followed[monitor]
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + MILLISECONDS_BETWEEN_LOOKS / 1000
                    self._look()
            except Exception:
                logger.exception("connections were not checked")
                time.sleep(0.1)

    def _follow(self, peers: Peers) -> bool:
        """Record new and closed connections, and close excess ones. Return whether the monitor continues."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = recv_monitor_message(peers.monitor, zmq.DONTWAIT)
                event, descriptor = message["event"], message["value"]
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return False
                if event == zmq.EVENT_DISCONNECTED:
                    peers.by_descriptor.pop(descriptor, None)
                else:
                    peers.by_descriptor[descriptor] = Peer()
                    if len(peers.by_descriptor) > self._max_connections:
                        self.close(peers, descriptor)
                has_room = len(peers.by_descriptor) < self._max_connections
                if peers.set_open(has_room) and not has_room and time.monotonic() >= self._warn_at:
                    self._warn_at = time.monotonic() + SECONDS_BETWEEN_WARNINGS
                    logger.warning("%s has %d connections, the maximum; others wait", peers.endpoint, self._max_connections)
        return True

    def _look(self) -> None:
        """Close connections with more unread bytes than an unfinished message may have."""
        for peers in self._all_peers:
            for descriptor, peer in peers.by_descriptor.items():
                if peer.count_unread(_count_received(descriptor)) > self._max_unread_bytes:
                    self.close(peers, descriptor)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Wrap a descriptor in a socket without closing it at the end."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _count_received(descriptor: int) -> int:
    """Return the number of bytes received over a TCP connection, including buffered ones; 0 if it is unknown."""
    if sys.platform != "linux":
        return 0
    try:
        with _borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
    except OSError:  # closed, or not a TCP connection
        return 0
    return int.from_bytes(info[BYTES_RECEIVED_AT:], sys.byteorder)


def set_options(listening: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Set the options of a socket that will listen at an address."""
    for option, value in SOCKET_OPTIONS.items():
        listening.setsockopt(option, value)
    listening.setsockopt(zmq.IPV6, "[" in endpoint)


def require_ports(name: str, endpoint: str) -> None:
    """Raise EndpointError for a TCP address with a wrong port: libzmq would take the port modulo 2**16, or read only its
    first digits.
    """
    for part in endpoint.removeprefix("tcp://").split(";") if endpoint.startswith("tcp://") else ():
        port = part.rpartition(":")[2]
        is_number = port.isascii() and port.isdecimal() and int(port.lstrip("0")[:6] or 0) <= MAX_PORT
        if not is_number and port != "*":
            wanted = f"a free one, such as {DEFAULT_ENDPOINT!r}"
            raise EndpointError(f"{name}: got {endpoint!r}: {shown(port)} is no port up to {MAX_PORT}, allowed: {wanted}")

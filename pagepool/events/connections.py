"""Limits on the connections of a publisher. Needs the extra ``pagepool[events]``.

libzmq limits neither the connections of a socket, nor the topics of a subscriber, nor the frames of an endless message. `Guard`
closes connections beyond the limits by their descriptors. It has its own thread, because libzmq accepts connections
independently of the publisher's thread.
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

__all__ = ["Guard", "Peer", "Peers"]

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 1 << 16  # of an unfinished message; small frames take up to 32 times as much in libzmq
NUM_FRAME_BYTES = 64  # largest overhead of a frame on the wire
NUM_SUBSCRIPTION_BYTES = 64  # added to the length of each topic
MAX_SUBSCRIPTIONS_READ = 256  # at once
MILLISECONDS_BETWEEN_LOOKS = 50
SHARE_OF_DESCRIPTORS = 8  # one in this number may be a connection of one endpoint
SECONDS_BETWEEN_WARNINGS = 60.0
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # on Linux
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # the packet filter's program that keeps 0 bytes
BYTES_RECEIVED_AT = 128  # in Linux's tcp_info


class Peer:
    """One connection."""

    def __init__(self) -> None:
        """Start without topics and messages."""
        self.is_refused = False
        self.num_topic_bytes = 0
        self._topics: set[bytes] = set()
        self._num_bytes_read = 0
        self._num_bytes_seen = (0, 0)
        self._num_bytes_unread = 0

    def note_read(self, frames: Sequence["zmq.Frame"]) -> None:
        """Count a message that was read."""
        self._num_bytes_read += sum(len(frame) + NUM_FRAME_BYTES for frame in frames)

    def count_unread(self, num_bytes_received: int) -> int:
        """Return the received bytes that no read message accounts for. Overestimates give no credit."""
        received, read = self._num_bytes_seen
        self._num_bytes_seen = num_bytes_received, self._num_bytes_read
        self._num_bytes_unread += num_bytes_received - received - (self._num_bytes_read - read)
        self._num_bytes_unread = max(0, self._num_bytes_unread)
        return self._num_bytes_unread

    def note_subscription(self, message: bytes) -> None:
        """Add or remove a topic. Other messages of a subscriber are ignored."""
        topic = message[1:]
        if message[:1] == b"\1" and topic not in self._topics:
            self._topics.add(topic)
            self.num_topic_bytes += len(topic) + NUM_SUBSCRIPTION_BYTES
        elif message[:1] == b"\0" and topic in self._topics:
            self._topics.remove(topic)
            self.num_topic_bytes -= len(topic) + NUM_SUBSCRIPTION_BYTES


GONE = Peer()
GONE.is_refused = True


class Peers:
    """The connections of one socket, by their descriptors."""

    def __init__(self, watched: "zmq.Socket[bytes]", is_connecting: bool) -> None:
        """Watch a socket before it listens or connects, so that no connection is missed."""
        self.watched = watched
        self.by_descriptor: dict[int, Peer] = {}
        self.listening = -1  # the descriptor at which libzmq listens until the socket is closed
        self._is_open = True
        self._is_connecting = is_connecting
        self.monitor: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        address = f"inproc://connections-{id(watched)}"
        begun = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
        watched.monitor(address, begun | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self.monitor.connect(address)
        self.endpoint = ""

    def note_endpoint(self) -> None:
        """Record the address, once the socket listens or connects."""
        self.endpoint = self.watched.getsockopt_string(zmq.LAST_ENDPOINT)
        if not self._is_connecting and not self.endpoint.startswith("inproc:"):  # within the process nothing is connected
            event, value = parse_event(self.monitor)
            if event == zmq.EVENT_LISTENING:
                self.listening = value

    def set_open(self, is_open: bool) -> bool:
        """Accept connections to a TCP port, or let Linux drop their packets, so that they take no descriptor and are retried.

        Returns whether the state has changed.
        """
        if is_open == self._is_open:
            return False
        self._is_open = is_open
        with contextlib.suppress(OSError, ValueError), _borrowed(self.listening) as listener:
            if sys.platform == "linux" and listener.family in (socket.AF_INET, socket.AF_INET6):
                option = SO_DETACH_FILTER if is_open else SO_ATTACH_FILTER
                listener.setsockopt(socket.SOL_SOCKET, option, struct.pack("HP", 1, ctypes.addressof(DROP_ALL)))
        return True

    def find(self, frame: "zmq.Frame") -> tuple[int, Peer | None]:
        """Return the descriptor and the connection of a frame.

        The connection is refused if it is gone, and None if it is not recorded yet or within this process.
        """
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return -1, None
        peer = self.by_descriptor.get(descriptor)
        if peer is None:
            try:
                with _borrowed(descriptor) as connection:
                    peer = None if self.has(connection) else GONE
            except OSError:
                peer = GONE
        return descriptor, peer

    def has(self, connection: socket.socket) -> bool:
        """Whether a socket is one of the connections or their listener, by its address."""
        address = connection.getpeername() if self._is_connecting else connection.getsockname()
        if isinstance(address, tuple):
            return self.endpoint.startswith("tcp:") and self.endpoint.endswith(f":{address[1]}")
        return self.endpoint == "ipc://" + os.fsdecode(address).replace("\0", "@", 1)


class Guard:
    """Enforces the limits on the connections of a publisher's sockets, in its own thread."""

    def __init__(self, max_connections: int) -> None:
        """Each socket has at most `max_connections`, or an eighth of the descriptors that the process may open."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft_limit != resource.RLIM_INFINITY:
            max_connections = min(max_connections, max(1, soft_limit // SHARE_OF_DESCRIPTORS))
        self._max_connections = max_connections
        self._all_peers: list[Peers] = []
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._nothing)
        self._look_at = -math.inf
        self._warn_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="pagepool-connections", daemon=True)

    def watch(self, watched: "zmq.Socket[bytes]", is_connecting: bool = False) -> Peers:
        """Watch a socket that neither listens nor connects yet, and return its connections."""
        self._all_peers.append(Peers(watched, is_connecting))
        return self._all_peers[-1]

    def start(self) -> None:
        """Start the thread, once the sockets have their addresses."""
        for peers in self._all_peers:
            peers.note_endpoint()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, before the sockets are closed, in the thread that uses them."""
        if self._thread.is_alive():  # it must read to the end: libzmq blocks on a full monitor
            for peers in self._all_peers:
                peers.watched.disable_monitor()
            self._thread.join()
        self._let_go()

    def forget(self) -> None:
        """Close the copies of the connections in a forked process, where they would stay open."""
        for peers in self._all_peers:
            for descriptor in [peers.listening, *peers.by_descriptor]:
                with contextlib.suppress(OSError, ValueError):
                    with _borrowed(descriptor) as connection:
                        is_ours = peers.has(connection)
                    if is_ours:
                        os.close(descriptor)
        self._let_go()

    def close(self, peers: Peers, descriptor: int) -> None:
        """Refuse a connection, and let libzmq close it. Has no effect if the descriptor has been reused."""
        peer = peers.by_descriptor.get(descriptor)
        if peer is not None:
            peer.is_refused = True
        with self._lock, contextlib.suppress(OSError):
            os.dup2(descriptor, self._spare, inheritable=False)  # which works where no descriptor is free
            try:
                with _borrowed(self._spare) as connection:
                    if peers.has(connection):
                        connection.shutdown(socket.SHUT_RDWR)
            finally:
                os.dup2(self._nothing, self._spare, inheritable=False)

    def read_subscriptions(self, peers: Peers, max_bytes: int) -> None:
        """Read the messages of subscribers to an XPUB socket, in its thread, and close subscribers with too many topics."""
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_SUBSCRIPTIONS_READ):
                frame = peers.watched.recv(zmq.DONTWAIT, copy=False)
                descriptor, peer = peers.find(frame)
                if peer is not None and not peer.is_refused:
                    peer.note_read([frame])
                    peer.note_subscription(frame.bytes)
                    if peer.num_topic_bytes > max_bytes:
                        self.close(peers, descriptor)

    def _let_go(self) -> None:
        descriptors, self._spare, self._nothing = (self._spare, self._nothing), -1, -1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # In the thread.

    def _run(self) -> None:
        """Run until the last monitor has stopped."""
        poller = zmq.Poller()
        followed = {peers.monitor: peers for peers in self._all_peers}
        for monitor in followed:
            poller.register(monitor, zmq.POLLIN)
        while followed:
            try:
                has_any = any(peers.by_descriptor for peers in followed.values())
                for monitor, _ in poller.poll(MILLISECONDS_BETWEEN_LOOKS if has_any else None):
                    if not self._follow(followed[monitor]):
                        poller.unregister(monitor)
                        del followed[monitor]
                if time.monotonic() >= self._look_at:
                    self._look()
            except Exception:
                logger.exception("connections were not checked")
                time.sleep(0.1)

    def _follow(self, peers: Peers) -> bool:
        """Record new and closed connections, and close excess ones. Returns whether the monitor goes on."""
        with contextlib.suppress(zmq.Again):
            while True:
                event, value = parse_event(peers.monitor)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return False
                if event == zmq.EVENT_DISCONNECTED:
                    peers.by_descriptor.pop(value, None)
                else:
                    peers.by_descriptor[value] = Peer()
                    if len(peers.by_descriptor) > self._max_connections:
                        self.close(peers, value)
                self._limit(peers)
        return True

    def _limit(self, peers: Peers) -> None:
        has_room = len(peers.by_descriptor) < self._max_connections
        if peers.set_open(has_room) and not has_room and time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + SECONDS_BETWEEN_WARNINGS
            logger.warning("%s has %d connections, the maximum; others wait", peers.endpoint, self._max_connections)

    def _look(self) -> None:
        """Close connections with endless messages."""
        self._look_at = time.monotonic() + MILLISECONDS_BETWEEN_LOOKS / 1000
        for peers in self._all_peers:
            for descriptor, peer in peers.by_descriptor.items():
                if peer.count_unread(_count_received(descriptor)) > MAX_UNREAD_BYTES:
                    self.close(peers, descriptor)


def parse_event(monitor: "zmq.Socket[bytes]") -> tuple[int, int]:
    """Return the next event of a monitor, and its value: a descriptor. zmq.Again if there is none."""
    event, value = struct.unpack_from("=Hi", monitor.recv_multipart(zmq.DONTWAIT)[0])
    return event, value


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Wrap a descriptor in a socket without closing it at the end."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _count_received(descriptor: int) -> int:
    """Return the bytes received over a TCP connection, buffered ones included; 0 if the system does not report it."""
    if sys.platform != "linux":
        return 0
    try:
        with _borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
    except OSError:  # closed, or of another kind
        return 0
    return int.from_bytes(info[BYTES_RECEIVED_AT:], sys.byteorder)

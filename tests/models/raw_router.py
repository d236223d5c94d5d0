"""A router that speaks just enough of ZMTP 3.0 to misbehave, on a plain socket."""

from __future__ import annotations

import socket
from collections.abc import Iterable

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def connect(endpoint: str, seconds: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout=seconds)


def shake_hands(endpoint: str, socket_type: str, seconds: float = 20.0) -> socket.socket:
    """A connection over which messages may be sent: of a SUB or DEALER."""
    raw = connect(endpoint, seconds)
    raw.sendall(GREETING)
    read(raw, len(GREETING))
    properties = {"Socket-Type": socket_type, "Identity": ""}
    ready = b"\5READY"
    for name, value in properties.items():
        ready += bytes([len(name)]) + name.encode() + len(value).to_bytes(4, "big") + value.encode()
    raw.sendall(bytes([4, len(ready)]) + ready)
    _, size = read(raw, 2)
    read(raw, size)
    return raw


def read(raw: socket.socket, size: int) -> bytes:
    """Return that many bytes; OSError if the other side closes first."""
    data = b""
    while len(data) < size:
        more = raw.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed by the publisher")
        data += more
    return data


def message(*frames: bytes, ends: bool = True) -> bytes:
    """Return frames below 256 bytes; the last one has the flag for more unless it `ends`."""
    flags = [1] * (len(frames) - 1) + [0 if ends else 1]
    return b"".join(bytes([flag, len(frame)]) + frame for flag, frame in zip(flags, frames, strict=True))


def send_until_closed(raw: socket.socket, chunks: Iterable[bytes]) -> int:
    """Return the number of bytes sent before the connection was closed, or all of them."""
    num_sent = 0
    try:
        for chunk in chunks:
            raw.sendall(chunk)
            num_sent += len(chunk)
    except OSError:
        pass
    return num_sent


def is_closed(raw: socket.socket, seconds: float) -> bool:
    """Whether the publisher closes the connection within that many seconds."""
    raw.settimeout(seconds)
    try:
        while raw.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True

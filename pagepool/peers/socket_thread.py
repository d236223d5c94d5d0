"""The thread that owns sockets of ZeroMQ: woken by other threads, closed, and forgotten in forked processes."""

import contextlib
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod

import zmq

from pagepool.errors import ArgumentError, of_other_process

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
SECONDS_TO_CLOSE = 2.0
SECONDS_AFTER_ERROR = 0.1


class SocketThread(ABC):
    """A thread with sockets that no other thread uses. A subclass opens its sockets, and then calls `start`."""

    def __init__(self, name: str) -> None:
        """Make the sockets that wake the thread."""
        self.name = name
        self._pid = os.getpid()
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self._context: zmq.Context[Socket] = zmq.Context()
        self._waking, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waking.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, name=f"pagepool-{name}", daemon=True)
        self.poller = zmq.Poller()
        self.poller.register(self._woken, zmq.POLLIN)

    def start(self) -> None:
        """Start the thread."""
        OPEN.add(self)
        self._thread.start()

    def make_socket(self, kind: int) -> Socket:
        """Return a new socket, which is dropped with its messages at the end."""
        made = self._context.socket(kind)
        made.linger = 0
        return made

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a forked process, since it lacks the thread."""
        return not self._is_closing and self._pid == os.getpid()

    def require_open(self) -> None:
        """Raise IntegrityError in a forked process, ArgumentError after `close`."""
        if self._pid != os.getpid():
            raise of_other_process(self.name)
        if self._is_closing:
            raise ArgumentError(f"{self.name}: got a closed one, allowed: an open one")

    def wake(self) -> None:
        """Let the thread look for work."""
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):  # a wake-up is pending, or the thread has ended
            self._waking.send(b"", zmq.DONTWAIT)

    def close(self) -> None:
        """End the thread. No effect in a forked process, or if it is closed already."""
        if not self.is_open:
            return
        self._is_closing = True
        if not self._thread.ident:  # it was never started
            self.close_sockets()
        elif threading.current_thread() is not self._thread:
            self.wake()
            self._thread.join(SECONDS_TO_CLOSE)

    def close_sockets(self) -> None:
        """Close all sockets."""
        with self._wake_lock:
            self._context.destroy(linger=0)

    def forget(self) -> None:
        """Close a forked process's copies of connections, if the thread knows them. Nothing else may be used there."""
        return

    # Methods that run in the thread.

    @abstractmethod
    def find_wait(self) -> float:
        """Return the seconds until work is due."""

    @abstractmethod
    def work(self, ready: list[Socket]) -> None:
        """Do all that is due; some sockets have messages."""

    def _run(self) -> None:
        while not self._is_closing:
            try:
                ready = dict(self.poller.poll(max(0, 1 + int(1000 * self.find_wait()))))
                if ready.pop(self._woken, None):
                    with contextlib.suppress(zmq.Again):
                        while True:
                            self._woken.recv(zmq.DONTWAIT)
                self.work(list(ready))
            except Exception:
                logger.exception("the thread %s goes on", self.name)
                time.sleep(SECONDS_AFTER_ERROR)
        self.close_sockets()


OPEN: "weakref.WeakSet[SocketThread]" = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(OPEN):
        each.forget()
    OPEN.clear()


os.register_at_fork(after_in_child=_forget_all)

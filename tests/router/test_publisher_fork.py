"""A process that forks while a publisher runs: the child's calls raise, nothing hangs, and the parent continues."""

from __future__ import annotations

import os
from textwrap import indent

import pytest
from sources import run_python

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
pytest.importorskip("zmq", reason="events are an extra: pyzmq is not installed")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

PROGRAM = """
import gc, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
from pagepool.errors import ArgumentError, IntegrityError
from pagepool.events.publisher import EventPublisher
from pagepool.events import EventSource
from subscribers import ALLOWED, CURVE, LOOPBACK, Subscriber, subscribed
from event_managers import make_told, run_request

options, keys = {options}
manager = make_told(num_pages=32)
publisher = EventPublisher(manager, LOOPBACK, LOOPBACK, **options)

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        work()
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def end():
    with subscribed(publisher, keys=keys) as subscriber:
        run_request(manager, list(range(9)))
        publisher.flush()
        subscriber.follow(manager)
    publisher.close()
"""

PROGRAMS = {
    "children use it": """
def refuse(error, message, *calls):
    for call in calls:
        try:
            call()
        except error as caught:
            assert str(caught).startswith(message), caught
        else:
            sys.exit(5)
def call_each():
    calls = publisher.flush, lambda: publisher.publish([])
    refuse(ArgumentError, "publisher: got one that is closed, or belongs to another process", *calls)
    publisher.close()
    with publisher:
        pass
    refuse(IntegrityError, "CacheManager: got a call in a forked process", lambda: run_request(manager, list(range(20, 29))))
    refuse(IntegrityError, "EventSource: got a call in a forked process", manager.snapshot_events, manager.take_events)
def publish():
    manager = make_told(num_pages=32)
    with EventPublisher(manager, LOOPBACK, LOOPBACK, **options) as own, subscribed(own, keys=keys) as subscriber:
        run_request(manager, list(range(20, 29)))
        own.flush()
        subscriber.follow(manager)
def collect():
    global publisher, manager
    del publisher, manager
    gc.collect()
for work in (call_each, publish, collect, collect):
    in_child(work)
""",
    "the child lives longer": """
import zmq
with Subscriber(publisher, keys=keys) as subscriber:
    monitor = subscriber.live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    subscriber.wait_until_subscribed()
    child = os.fork()
    if child == 0:
        time.sleep(60)
    publisher.close()
    assert monitor.poll(20_000)  # the router hears that the publisher is gone
    subscriber.live.disable_monitor()
publisher = EventPublisher(manager, publisher.endpoint, publisher.replay_endpoint, **options)
""",
    "its thread is taking events": """
take, taking, go_on = EventSource._list_entries, threading.Event(), threading.Event()
def wait(*args):
    taking.set()
    go_on.wait()
    return take(*args)
with subscribed(publisher, keys=keys):
    pass
EventSource._list_entries = wait
publisher.flush()
taking.wait()
EventSource._list_entries = take
def work():  # the fork has not waited for it
    try:
        manager.take_events()
    except IntegrityError:
        return
    sys.exit(5)
in_child(work)
go_on.set()
""",
}
KILL = """
    if "child" in globals():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


OPEN, WITH_KEYS = "({}, None)", "(CURVE, ALLOWED)"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("children use it", OPEN),
        ("children use it", WITH_KEYS),
        ("the child lives longer", WITH_KEYS),
        ("its thread is taking events", OPEN),
        pytest.param("the child lives longer", OPEN, marks=pytest.mark.slow),
        pytest.param("its thread is taking events", WITH_KEYS, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_forks(name: str, options: str) -> None:
    body = indent(PROGRAMS[name] + "end()\n", "    ")
    code = PROGRAM.replace("{options}", options) + "try:\n" + body + "finally:\n" + KILL
    process = run_python("-c", code)
    assert (process.returncode, process.stderr) == (0, "")

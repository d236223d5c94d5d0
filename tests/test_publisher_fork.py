"""A process that forks while a publisher runs: the child's calls succeed or raise, nothing hangs, and the parent continues."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import indent

import pytest

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
pytest.importorskip("zmq", reason="events are an extra: pyzmq is not installed")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

PROGRAM = """
import gc, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
from pagepool.errors import ArgumentError
from pagepool.event_publisher import EventPublisher
from pagepool.events import EventSource
from subscribers import ALLOWED, CURVE, LOOPBACK, Subscriber, assert_serves, cached
from event_managers import make_told, run_request
from router import Router

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
    with Subscriber(publisher, keys=keys) as subscriber:
        subscriber.wait_until_subscribed()
        run_request(manager, list(range(9)))
        publisher.flush()
        subscriber.follow(manager)
    publisher.close()
"""

PROGRAMS = {
    "each call works or raises": """
def work():
    for call in (publisher.flush, lambda: publisher.publish([])):
        try:
            call()
        except ArgumentError as error:
            assert str(error) == "the publisher is closed, or belongs to another process"
        else:
            sys.exit(5)
    publisher.close()
    with publisher:
        pass
    run_request(manager, list(range(20, 29)))
    router = Router()
    router.apply(manager.snapshot_events())
    assert router.pages.keys() == cached(manager)
in_child(work)
""",
    "the child publishes for itself": """
def work():
    with EventPublisher(manager, LOOPBACK, LOOPBACK, **options) as own, Subscriber(own, keys=keys) as subscriber:
        subscriber.wait_until_subscribed()
        run_request(manager, list(range(20, 29)))
        own.flush()
        subscriber.follow(manager)
in_child(work)
""",
    "what the child has is collected": """
def work():
    global publisher, manager
    del publisher, manager
    gc.collect()
for _ in range(10):
    in_child(work)
""",
    "the child lives longer": """
child = os.fork()
if child == 0:
    time.sleep(60)
publisher.close()
publisher = EventPublisher(manager, publisher.endpoint, publisher.replay_endpoint, **options)
""",
    "a router hears that the publisher is gone": """
import zmq
with Subscriber(publisher, keys=keys) as subscriber:
    monitor = subscriber.live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    subscriber.wait_until_subscribed()
    child = os.fork()
    if child == 0:
        time.sleep(60)
    publisher.close()
    assert monitor.poll(20_000)
    subscriber.live.disable_monitor()
publisher = EventPublisher(manager, LOOPBACK, LOOPBACK, **options)
""",
    "its thread is taking events": """
take, taking, go_on = EventSource._list_changes, threading.Event(), threading.Event()
def wait(*args):
    taking.set()
    go_on.wait()
    return take(*args)
with Subscriber(publisher, keys=keys) as subscriber:
    subscriber.wait_until_subscribed()
EventSource._list_changes = wait
publisher.flush()
taking.wait()
EventSource._list_changes = take
threading.Timer(0.5, go_on.set).start()  # the fork waits for it
def work():
    manager.take_events()
    run_request(manager, list(range(20, 29)))
    router = Router()
    router.apply(manager.take_events())
    router.apply(manager.take_events())
in_child(work)
""",
}
KILL = """
    if "child" in globals():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


@pytest.mark.parametrize("options", ["({}, None)", "(CURVE, ALLOWED)"], ids=["open", "with keys"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_process_that_forks(program: str, options: str) -> None:
    code = PROGRAM.replace("{options}", options) + "try:\n" + indent(program + "end()\n", "    ") + "finally:\n" + KILL
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")

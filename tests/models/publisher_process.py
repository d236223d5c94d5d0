"""A publisher in a separate process with its own memory and descriptors. Evaluates the expressions it receives."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

MEBIBYTE = 1 << 20


class PublisherProcess:
    """Runs the publisher, with keyword arguments of `EventPublisher`, until the end of the `with` block."""

    def __init__(self, num_descriptors: int = 1024, **options: Any) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(num_descriptors), json.dumps(options)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = self.call("publisher.endpoint")
        self.replay_endpoint = self.call("publisher.replay_endpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def call(self, expression: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def publish(self, events: list[Any]) -> None:
        """Publish a batch without events, like `EventPublisher.publish`."""
        assert not events
        self.call("publisher.publish([])")

    def peak_bytes(self) -> int:
        """Return its peak memory."""
        return int(self.call("peak_bytes()"))

    def num_descriptors(self) -> int:
        return int(self.call("len(os.listdir('/proc/self/fd'))"))


def peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def open_files(num_files: int) -> int:
    """Return the number of files that the engine can open."""
    opened = []
    try:
        for _ in range(num_files):
            opened.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401
    except OSError:
        pass
    for descriptor in opened:
        os.close(descriptor)
    return len(opened)


def main() -> None:
    from pagepool.events import BlockRemoved
    from pagepool.events.publisher import EventPublisher

    num_descriptors, options = int(sys.argv[1]), json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))
    with EventPublisher(None, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", **options) as publisher:
        names = globals() | {"publisher": publisher, "BlockRemoved": BlockRemoved}
        for line in sys.stdin:
            print(json.dumps(eval(line, names)), flush=True)


if __name__ == "__main__":
    main()

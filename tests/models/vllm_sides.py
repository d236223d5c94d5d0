"""Runs the same workloads in several processes, one with pagepool under vLLM and one without, and compares what they show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from twins import NUM_REMEMBERED_CALLS, Mismatch

TESTS = Path(__file__).parent
START_SECONDS, CALL_SECONDS = 120.0, 0.02  # far more than either takes
FIXED = {"PYTHONHASHSEED": "0", "VLLM_TARGET_DEVICE": "cpu"}


class Side:
    """A process that runs workloads. It starts with the first job, and again once it has ended."""

    def __init__(self, *args: str) -> None:
        self.args = args
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: dict[str, Any]) -> None:
        """Give a job; its answer must be taken."""
        if self._process is None or self._process.poll() is not None:
            path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [sys.executable, str(TESTS / "vllm_side.py"), *self.args]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(command, env=os.environ | FIXED | {"PYTHONPATH": path}, **pipes)
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def answer(self, num_calls: int) -> dict[str, Any]:
        """Return the answer to the oldest job that has none; it is an error if the process ends or takes too long."""
        watchdog = threading.Timer(START_SECONDS + CALL_SECONDS * num_calls, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise Mismatch(f"side {self.args} ended with status {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(START_SECONDS)
            self._process.stdout.close()


class Comparison:
    """Compares two sides, or a side with itself when a bug is planted for the second run."""

    def __init__(self, one: Side, other: Side, bug: str | None = None) -> None:
        self.one = one
        self.other = other
        self.bug = bug

    def compare(self, setting: str, seeds: Iterable[int], num_calls: int) -> None:
        """Mismatch unless both show the same after every call of every seed's workload."""
        for seed in seeds:
            job = {"setting": setting, "seed": seed, "num_calls": num_calls}
            one, other = self._run(job)
            shown = enumerate(zip_longest(one["shown"], other["shown"]))
            first = next((number for number, (mine, theirs) in shown if mine != theirs), None)
            broken = [side["broken"] for side in (one, other) if side["broken"]]
            if first is not None:
                raise Mismatch("\n".join([self._report(job, first), *broken]))
            if broken:
                raise Mismatch("\n".join([f"{job} broke off in one side or both", *broken]))

    def _run(self, job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        self.one.ask(job)
        self.other.ask(job | {"bug": self.bug})
        return self.one.answer(job["num_calls"]), self.other.answer(job["num_calls"])

    def _report(self, job: dict[str, Any], first: int) -> str:
        """Run both once more and describe the first difference, with the calls before it."""
        start = max(0, first - NUM_REMEMBERED_CALLS)
        one, other = (answer["shown"] for answer in self._run(job | {"calls": [start, first]}))
        where = f"setting {job['setting']!r}, seed {job['seed']}, call {first}"
        lines = [where, f"{self.one.args} against {self.other.args}, bug {self.bug}:"]
        if len(one) != len(other) or not one:
            return "\n".join([*lines, f"{len(one)} calls against {len(other)}"])
        keys = dict.fromkeys([*one[-1], *other[-1]])
        differing = [key for key in keys if one[-1].get(key) != other[-1].get(key)]
        lines += [f"{key}: {one[-1].get(key)} against {other[-1].get(key)}" for key in differing]
        return "\n".join([*lines, "the last calls:", *(f"  call {start + i}: {call['call']}" for i, call in enumerate(one))])

"""One side of the differential test of vLLM: a process that runs workloads and yields what can be seen after each call.

It reads a job a line, in JSON, from its standard input, and answers each with a line on what was its standard output when it
started (vLLM logs to the other one). Started with "pagepool" it installs `pagepool.compat.vllm` first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TextIO

from vllm_settings import SETTINGS

DIGEST_BYTES = 8
BY_NAME = {setting.name: setting for setting in SETTINGS}


class EnoughError(Exception):
    """Raised to end a workload once the call is reached that was asked for."""


class Digests:
    """Observes calls and keeps a digest of each."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, name: str, described: Any, outcome: Any, state: dict[str, Any]) -> None:
        self.shown.append(blake2b(repr((name, described, outcome, state)).encode(), digest_size=DIGEST_BYTES).hexdigest())


class Dump:
    """Observes calls and keeps the last ones, up to a number of calls, and the state after the last."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.num_calls = 0
        self.shown: list[dict[str, str]] = []

    def __call__(self, name: str, described: Any, outcome: Any, state: dict[str, Any]) -> None:
        number = self.num_calls
        self.num_calls += 1
        if number < self.first:
            return
        args, options = described
        texts = [*map(repr, args), *(f"{key}={option!r}" for key, option in options.items())]
        self.shown.append({"call": f"{name}({', '.join(texts)})", "result": repr(outcome)})
        if number == self.last:
            self.shown[-1] |= {key: repr(value) for key, value in state.items()}
            raise EnoughError


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a bug for the length of the context."""
    if name is None:
        yield
        return
    from vllm_planted import BUGS

    with BUGS[name].planted():
        yield


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job's workload and return what an observer kept, and how the workload ended if it broke off."""
    from vllm_workload import Workload, kv_cache_utils

    observer: Any = Dump(*job["calls"]) if "calls" in job else Digests()
    broken = None
    with planted(job.get("bug")):
        try:
            Workload(BY_NAME[job["setting"]], job["seed"], observer).run(job["num_calls"])
        except EnoughError:
            pass
        except Exception:
            broken = traceback.format_exc()
    return {"shown": observer.shown, "broken": broken, "blocks": kv_cache_utils.KVCacheBlock.__module__}


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Answer jobs until there are no more."""
    for line in jobs:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    """Serve, with or without pagepool."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable()
    if "pagepool" in sys.argv[1:]:
        import pagepool.compat.vllm

        pagepool.compat.vllm.install()
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()

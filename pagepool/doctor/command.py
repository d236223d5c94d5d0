"""The command `pagepool doctor`, without click."""

import json
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from pagepool.doctor.engines import inspect_engines, inspect_jax
from pagepool.doctor.environment import Problem, inspect_core, inspect_extras, inspect_versions
from pagepool.doctor.report import describe
from pagepool.doctor.self_test import run_self_test

__all__ = ["diagnose", "main"]


def diagnose(tries_all_engines: bool = False) -> dict[str, Any]:
    """Return what `pagepool doctor --json` prints. jax and engines start in other processes, the packages of extras are
    imported here. With `tries_all_engines` every installed engine is tried, also one whose variable is off.
    """
    problems: list[Problem] = []
    diagnosis = {
        "versions": inspect_versions(problems),
        "core": inspect_core(problems),
        "self_test": _test(problems),
        "extras": inspect_extras(problems),
        "jax": inspect_jax(problems),
        "engines": inspect_engines(problems, tries_all_engines),
    }
    return diagnosis | {"problems": [problem._asdict() for problem in problems]}


def _test(problems: list[Problem]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        run_self_test()
        passed = True
    except Exception as error:  # a broken build may raise anything
        passed = False
        remedy = "install pagepool again; if it stays, report it with this output"
        problems.append(Problem(f"the self-test failed: {error!r}", remedy))
    return {"passed": passed, "seconds": time.perf_counter() - start}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 if all is well, 1 for problems. Wrong arguments exit with 2."""
    parser = ArgumentParser(
        prog="pagepool doctor",
        description="Check the installation: versions, the compiled core, extras, jax and its devices, and engines. "
        "Exit codes: 0 all is well; 1 something is wrong, with what to do; 2 invalid arguments.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="import every installed engine and try whether pagepool takes its allocator's place",
    )
    options = parser.parse_args(arguments)
    diagnosis = diagnose(options.engines)
    print(json.dumps(diagnosis, indent=2) if options.json else describe(diagnosis))
    return int(bool(diagnosis["problems"]))

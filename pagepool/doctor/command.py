"""The command `pagepool doctor`, without click: diagnoses the installation, and prints it as text or JSON."""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from pagepool.doctor import environment
from pagepool.doctor.environment import Problem
from pagepool.doctor.pool import describe_pool, diagnose_pool, load_dump
from pagepool.doctor.self_test import run_self_test
from pagepool.errors import ArgumentError, count_of


def diagnose(tries_all_engines: bool = False) -> dict[str, Any]:
    """Return the output of `pagepool doctor --json`. jax and engines are started in other processes; the packages of extras are
    imported here. With `tries_all_engines` every installed engine is tried, even if its variable is off.
    """
    problems: list[Problem] = []
    diagnosis = {
        "versions": environment.inspect_versions(problems),
        "core": environment.inspect_core(problems),
        "self_test": _test(problems),
        "extras": environment.inspect_extras(problems),
        "jax": environment.inspect_jax(problems),
        "engines": environment.inspect_engines(problems, tries_all_engines),
    }
    return diagnosis | {"problems": [problem._asdict() for problem in problems]}


def _test(problems: list[Problem]) -> dict[str, Any]:
    start, num_problems = time.perf_counter(), len(problems)
    try:
        run_self_test()
    except Exception as error:  # a broken build may raise anything
        remedy = "install pagepool again; if it stays, report it with this output"
        problems.append(Problem(f"the self-test failed: {error!r}", remedy))
    return {"passed": len(problems) == num_problems, "seconds": time.perf_counter() - start}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 if all is well, 1 for problems. Wrong arguments exit with code 2."""
    parser = ArgumentParser(
        prog="pagepool doctor",
        description="Check the installation: versions, the compiled core, extras, jax and its devices, and engines. "
        "Or look at a dump of a manager. Exit codes: 0 all is well; 1 something is wrong, with what to do; 2 invalid "
        "arguments, or a file that is no dump.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    engines_help = "import every installed engine and try whether pagepool takes its allocator's place"
    parser.add_argument("--engines", action="store_true", help=engines_help)
    pool_help = "say what stands out in a file that json.dump wrote of CacheManager.dump, in place of the installation"
    parser.add_argument("--pool", metavar="FILE", help=pool_help)
    options = parser.parse_args(arguments)
    if options.pool is not None:
        return _diagnose_pool(parser, options)
    diagnosis = diagnose(options.engines)
    print(json.dumps(diagnosis, indent=2) if options.json else describe(diagnosis))
    return int(bool(diagnosis["problems"]))


def _diagnose_pool(parser: ArgumentParser, options: Namespace) -> int:
    if options.engines:
        parser.error("--engines and --pool exclude each other")
    try:
        dump = load_dump(options.pool)
    except ArgumentError as error:
        parser.error(str(error))
    diagnosis = diagnose_pool(dump)
    print(json.dumps(diagnosis, indent=2) if options.json else describe_pool(dump))
    return int(bool(diagnosis["problems"]))


def describe(diagnosis: dict[str, Any]) -> str:
    """Return a diagnosis as lines of text: first the findings, then the problems."""
    problems = diagnosis["problems"]
    sections = [
        _describe_pagepool(diagnosis["versions"], diagnosis["core"], diagnosis["self_test"]),
        _describe_extras(diagnosis["extras"]),
        _describe_jax(diagnosis["jax"]),
        map(_describe_engine, diagnosis["engines"].values()),
        [f"{count_of(len(problems), 'problem')}:" if problems else "All is well."]
        + [f"- {problem['what']}\n  {problem['remedy']}" for problem in problems],
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _row(name: str, text: str) -> str:
    return f"{name:11}{text}"


def _describe_pagepool(versions: dict[str, Any], flags: dict[str, Any], self_test: dict[str, Any]) -> Iterator[str]:
    yield _row("pagepool", f"{versions['pagepool']}, in {versions['folder']}")
    yield _row("Python", f"{versions['python']}, {'with' if versions['gil'] else 'without'} the GIL")
    yield _row("NumPy", versions["numpy"])
    yield _row("platform", versions["platform"])
    yield ""
    kinds = [
        "debug build with asserts and bounds checks" if flags["debug"] else "release build",
        "guards" if flags["guards"] else "no guards",
        flags["sanitizer"] and f"{flags['sanitizer']} sanitizer",
        flags["traced"] and "traced lines",
        flags["free_threaded"] and "free-threaded",
        flags["compiler"],
    ]
    yield _row("core", ", ".join(filter(None, kinds)))
    yield _row("self-test", f"{'passed' if self_test['passed'] else 'failed'} in {self_test['seconds']:.1f} s")


def _describe_extras(extras: dict[str, dict[str, str | None]]) -> Iterator[str]:
    if not extras:
        yield "extras unknown: pagepool is not installed as a distribution"
    for extra, packages in extras.items():
        found = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        missing = ", ".join(name for name, version in packages.items() if version is None)
        hint = missing and f"{missing} not installed: pip install 'pagepool[{extra}]'"
        yield _row(f"[{extra}]", "; ".join(filter(None, (found, hint))))


def _describe_jax(figures: dict[str, Any] | None) -> Iterator[str]:
    if figures is None:
        yield _row("jax", "not installed")
    elif "devices" not in figures:
        yield _row("jax", f"{figures['version']}, does not start")
    else:
        yield _row("jax", f"{figures['version']}, backend {figures['backend']}")
        for device in figures["devices"]:
            default = device["default_memory_kind"]
            kinds = (f"{kind} (default)" if kind == default else kind for kind in device["memory_kinds"])
            yield _row("", f"{device['name']} ({device['kind']}), memory: {', '.join(kinds)}")


def _describe_engine(engine: dict[str, Any]) -> str:
    if engine["version"] is None:
        return _row(engine["name"], f"not installed; supported: {engine['supported_versions']}")
    refusal = "not tested" if engine["is_replaced"] else "not supported"
    support = "supported" if engine["is_supported"] else f"{refusal}; supported: {engine['supported_versions']}"
    switch = f"{engine['variable']} is {'on' if engine['is_on'] else 'off'}"
    takes = f"; pagepool {'takes' if engine['is_on'] else 'could take'} its allocator's place"
    result = {None: "", True: takes, False: "; refuses pagepool"}[engine["is_replaced"]]
    models = engine["without_prefix_caching"]
    exception = f"; prefix caching is off for {models}" if models and engine["is_on"] else ""
    hints = f"; hints of requests are heard: {engine['hints']}" if engine["hints"] and engine["is_on"] else ""
    return _row(engine["name"], f"{engine['version']}, {support}; {switch}{result}{exception}{hints}")

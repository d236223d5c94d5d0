"""The text of a diagnosis."""

from collections.abc import Iterator
from typing import Any

from pagepool.errors import count_of

__all__ = ["describe"]

COLUMN = 11


def describe(diagnosis: dict[str, Any]) -> str:
    """Return a diagnosis as lines of text: what was found, and then the problems."""
    sections = [
        _describe_versions(diagnosis["versions"]),
        _describe_core(diagnosis["core"], diagnosis["self_test"]),
        _describe_extras(diagnosis["extras"]),
        _describe_jax(diagnosis["jax"]),
        map(_describe_engine, diagnosis["engines"].values()),
        _describe_problems(diagnosis["problems"]),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _row(name: str, text: str) -> str:
    return f"{name:{COLUMN}}{text}"


def _describe_versions(versions: dict[str, Any]) -> Iterator[str]:
    yield _row("pagepool", f"{versions['pagepool']}, in {versions['folder']}")
    yield _row("Python", f"{versions['python']}, {'with' if versions['gil'] else 'without'} the GIL")
    yield _row("NumPy", versions["numpy"])
    yield _row("platform", versions["platform"])


def _describe_core(flags: dict[str, Any], self_test: dict[str, Any]) -> Iterator[str]:
    kinds = [
        "debug build with asserts and bounds checks" if flags["debug"] else "release build",
        *(["guards"] if flags["guards"] else ["no guards"]),
        *([f"{flags['sanitizer']} sanitizer"] if flags["sanitizer"] else []),
        *(["traced lines"] if flags["traced"] else []),
        *(["free-threaded"] if flags["free_threaded"] else []),
        flags["compiler"],
    ]
    yield _row("core", ", ".join(kinds))
    yield _row("self-test", f"{'passed' if self_test['passed'] else 'failed'} in {self_test['seconds']:.1f} s")


def _describe_extras(extras: dict[str, dict[str, str | None]]) -> Iterator[str]:
    if not extras:
        yield "extras unknown: pagepool is not installed as a distribution"
    for extra, packages in extras.items():
        found = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        missing = ", ".join(name for name, version in packages.items() if version is None)
        hint = f"{missing} not installed: pip install 'pagepool[{extra}]'" if missing else ""
        yield _row(f"[{extra}]", "; ".join(filter(None, (found, hint))))


def _describe_jax(figures: dict[str, Any] | None) -> Iterator[str]:
    if figures is None:
        yield _row("jax", "not installed")
    elif "devices" not in figures:
        yield _row("jax", f"{figures['version']}, does not start")
    else:
        yield _row("jax", f"{figures['version']}, backend {figures['backend']}")
        for device in figures["devices"]:
            kinds = (
                f"{kind}{' (default)' if kind == device['default_memory_kind'] else ''}" for kind in device["memory_kinds"]
            )
            yield _row("", f"{device['name']} ({device['kind']}), memory: {', '.join(kinds)}")


def _describe_engine(engine: dict[str, Any]) -> str:
    if engine["version"] is None:
        return _row(engine["name"], f"not installed; supported: {engine['supported_versions']}")
    support = "supported" if engine["is_supported"] else f"not supported: {engine['supported_versions']} is"
    switch = f"{engine['variable']} is {'on' if engine['is_on'] else 'off'}"
    takes = f"; pagepool {'takes' if engine['is_on'] else 'could take'} its allocator's place"
    result = {None: "", True: takes, False: "; refuses pagepool"}[engine["is_replaced"]]
    return _row(engine["name"], f"{engine['version']}, {support}; {switch}{result}")


def _describe_problems(problems: list[dict[str, str]]) -> Iterator[str]:
    yield f"{count_of(len(problems), 'problem')}:" if problems else "All is well."
    for problem in problems:
        yield f"- {problem['what']}\n  {problem['remedy']}"

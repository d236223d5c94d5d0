"""Builds the compiled core. Environment switches:

PAGEPOOL_DEBUG=1      bounds checks and asserts on
PAGEPOOL_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer (implies debug; run Python with libasan preloaded)
PAGEPOOL_FUZZ=1       the same, and coverage for libFuzzer, which is in atheris (needs clang; see `make fuzz`)
PAGEPOOL_TSAN=1       ThreadSanitizer (implies debug; for a Python that was built with it, by the same clang)
PAGEPOOL_UNGUARDED=1  no checks in the hot loops: only to measure what they cost, see bench/guards.py
PAGEPOOL_COVERAGE=1   the core calls coverage.py's line tracer; the C files, which Cython's plugin reads, beside the sources
PAGEPOOL_ANNOTATE=1   also write the annotated sources, such as store.html, beside the C files under build/
"""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


def is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


FUZZ = is_set("PAGEPOOL_FUZZ")
TSAN = is_set("PAGEPOOL_TSAN")
COVERAGE = is_set("PAGEPOOL_COVERAGE")
SANITIZE = FUZZ or is_set("PAGEPOOL_SANITIZE")
DEBUG = SANITIZE or TSAN or is_set("PAGEPOOL_DEBUG")
# Python compiles with -fwrapv, under which signed overflow is defined and so would not be reported.
SANITIZER_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-wrapv"] if SANITIZE else []
SANITIZER_FLAGS += ["-fsanitize=thread"] if TSAN else []
if FUZZ:
    # An offset of zero from a null pointer, which clang alone reports, is what an empty list of ids has.
    SANITIZER_FLAGS += ["-fsanitize=fuzzer-no-link", "-fno-sanitize=pointer-overflow"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "nonecheck": True,
    "freethreading_compatible": True,
    "autotestdict": False,
    "warn.undeclared": False,
}
DEBUG_DIRECTIVES = {"boundscheck": True, "initializedcheck": True} if DEBUG else {}


class BuildCore(build_ext):
    """Translates and compiles the modules side by side, always anew: neither step sees that a switch changed. Warnings
    of Cython are errors.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        self.force = True

    def build_extension(self, ext: Extension) -> None:
        [source] = ext.sources
        target = Path(source if COVERAGE else Path(self.build_temp, source)).with_suffix(".c")
        target.parent.mkdir(parents=True, exist_ok=True)
        directives = DIRECTIVES | DEBUG_DIRECTIVES | {"linetrace": COVERAGE}
        command = [sys.executable, "-m", "cython", "-X", ",".join(f"{name}={value}" for name, value in directives.items())]
        command += ["--annotate"] if is_set("PAGEPOOL_ANNOTATE") else []
        result = subprocess.run([*command, "-o", str(target), source], stderr=subprocess.PIPE, text=True)
        sys.stderr.write(result.stderr)
        if result.returncode or re.search(r"^(warning|performance hint): ", result.stderr, re.MULTILINE):
            raise CompileError(f"{source}: an error, a warning or a performance hint of Cython")
        ext.sources = [str(target)]
        super().build_extension(ext)


PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]
VERSION = runpy.run_path("pagepool/_version.py")["__version__"]
IMAGE_OR_LINK = re.compile(r'(!\[[^]]*\]\(|\bsrc(?:set)?=")(?!\w+:)|(?:\]\(|\bhref=")(?!\w+:)')


def make_links_absolute(markdown: str) -> str:
    """What is relative leads to the repository at this version's tag. Blocks of code stay as they are."""

    def extend(match: re.Match[str]) -> str:
        return f"{match[0]}{PROJECT['urls']['Repository']}/{'raw' if match[1] else 'blob'}/v{VERSION}/"

    text_and_code = markdown.replace("](#", "](README.md#").split("```")
    return "```".join([IMAGE_OR_LINK.sub(extend, part) if i % 2 == 0 else part for i, part in enumerate(text_and_code)])


MACROS = {
    ("CYTHON_WITHOUT_ASSERTIONS", "1"): not DEBUG,
    ("CYTHON_TRACE_NOGIL", "1"): COVERAGE,
    ("PAGEPOOL_GUARDS", "0"): is_set("PAGEPOOL_UNGUARDED"),
}

SOURCES = sorted(str(path) for path in Path("pagepool").rglob("*.pyx"))
modules = [
    Extension(
        source.removesuffix(".pyx").replace("/", "."),
        [source],
        define_macros=[macro for macro, is_wanted in MACROS.items() if is_wanted],
        extra_compile_args=(["-O1", "-g", "-fno-omit-frame-pointer", "-UNDEBUG"] if DEBUG else ["-O3", "-g0"])
        + ["-ffp-contract=off", *SANITIZER_FLAGS],  # an eviction policy decides the same on every machine
        extra_link_args=SANITIZER_FLAGS,
    )
    for source in SOURCES
]

setup(
    ext_modules=modules,
    cmdclass={"build_ext": BuildCore},
    long_description=make_links_absolute(Path("README.md").read_text()),
    long_description_content_type="text/markdown",
)

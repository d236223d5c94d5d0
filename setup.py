"""Builds the compiled core. Environment switches:

PAGEPOOL_DEBUG=1      bounds checks and asserts on
PAGEPOOL_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer (implies debug; run Python with libasan preloaded)
PAGEPOOL_FUZZ=1       the same, and coverage for libFuzzer, which is in atheris (needs clang; see `make fuzz`)
PAGEPOOL_TSAN=1       ThreadSanitizer (implies debug; for a Python that was built with it, by the same clang)
PAGEPOOL_UNGUARDED=1  no checks in the hot loops: only to measure what they cost, see bench/guards.py
PAGEPOOL_COVERAGE=1   the core calls coverage.py's line tracer; the C file, which Cython's plugin reads, beside the source
PAGEPOOL_ANNOTATE=1   also write the annotated source, _core.html, beside the C file under build/
"""

import io
import os
import re
import sys
from contextlib import redirect_stderr

from Cython.Build import cythonize
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
    """Translates and compiles, always anew: neither step sees that a switch changed. What Cython warns of is an error."""

    def build_extension(self, ext: Extension) -> None:
        messages = io.StringIO()
        try:
            with redirect_stderr(messages):
                [translated] = cythonize(
                    ext,
                    force=True,
                    build_dir=None if COVERAGE else self.build_temp,
                    annotate=is_set("PAGEPOOL_ANNOTATE"),
                    compiler_directives=DIRECTIVES | DEBUG_DIRECTIVES | {"linetrace": COVERAGE},
                )
        finally:
            sys.stderr.write(messages.getvalue())
        if re.search(r"^(warning|performance hint): ", messages.getvalue(), re.MULTILINE):
            raise CompileError("Cython's warnings and performance hints fail the build")
        ext.sources = translated.sources
        self.force = True
        super().build_extension(ext)


MACROS = {
    ("CYTHON_WITHOUT_ASSERTIONS", "1"): not DEBUG,
    ("CYTHON_TRACE_NOGIL", "1"): COVERAGE,
    ("PAGEPOOL_GUARDS", "0"): is_set("PAGEPOOL_UNGUARDED"),
}

core = Extension(
    "pagepool._core",
    ["pagepool/_core.pyx"],
    define_macros=[macro for macro, is_wanted in MACROS.items() if is_wanted],
    extra_compile_args=(["-O1", "-g", "-fno-omit-frame-pointer", "-UNDEBUG"] if DEBUG else ["-O3", "-g0"]) + SANITIZER_FLAGS,
    extra_link_args=SANITIZER_FLAGS,
)

setup(ext_modules=[core], cmdclass={"build_ext": BuildCore})

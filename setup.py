"""Builds the compiled core. Environment switches:

PAGEPOOL_DEBUG=1      bounds checks, overflow checks and C asserts on
PAGEPOOL_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer (implies debug; run Python with libasan preloaded)
PAGEPOOL_ANNOTATE=1   also write pagepool/_core.html, the annotated source
"""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup


def is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


SANITIZE = is_set("PAGEPOOL_SANITIZE")
DEBUG = SANITIZE or is_set("PAGEPOOL_DEBUG")
SANITIZER_FLAGS = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"] if SANITIZE else []

core = Extension(
    "pagepool._core",
    ["pagepool/_core.pyx"],
    extra_compile_args=(["-O1", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]) + SANITIZER_FLAGS,
    extra_link_args=SANITIZER_FLAGS,
)

setup(
    ext_modules=cythonize(
        [core],
        annotate=is_set("PAGEPOOL_ANNOTATE"),
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "overflowcheck": DEBUG,
            "cdivision": True,
            "freethreading_compatible": True,
            "warn.undeclared": False,
        },
    )
)

"""Builds the compiled core. Environment switches:

PAGEPOOL_DEBUG=1      bounds checks and asserts on
PAGEPOOL_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer (implies debug; run Python with libasan preloaded)
PAGEPOOL_FUZZ=1       the same, and coverage for libFuzzer, which is in atheris (needs clang; see `make fuzz`)
PAGEPOOL_TSAN=1       ThreadSanitizer (implies debug; for a Python that was built with it, by the same clang)
PAGEPOOL_UNGUARDED=1  no checks in the hot loops: only to measure what they cost, see bench/races/guards.py
PAGEPOOL_COVERAGE=1   the core calls coverage.py's line tracer; the C files, which Cython's plugin reads, beside the sources
PAGEPOOL_ANNOTATE=1   also write the annotated sources, such as store.html, beside the C files under build/
"""

import gc
import hashlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr
from io import StringIO
from multiprocessing import get_context
from pathlib import Path

from Cython import __version__ as CYTHON_VERSION
from Cython.Build.Dependencies import create_dependency_tree
from Cython.Compiler.Main import main as cython
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


def is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def count_processors() -> int:
    """Count the processors that this process may use: a container or `taskset` may allow it fewer than the machine has."""
    if hasattr(os, "process_cpu_count"):  # since Python 3.13
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


FUZZ = is_set("PAGEPOOL_FUZZ")
TSAN = is_set("PAGEPOOL_TSAN")
COVERAGE = is_set("PAGEPOOL_COVERAGE")
SANITIZE = FUZZ or is_set("PAGEPOOL_SANITIZE")
DEBUG = SANITIZE or TSAN or is_set("PAGEPOOL_DEBUG")
# Python compiles with -fwrapv, which makes signed overflow defined; it would not be reported.
SANITIZER_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-wrapv"] if SANITIZE else []
SANITIZER_FLAGS += ["-fsanitize=thread"] if TSAN else []
DEBUG_FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-UNDEBUG"]
if FUZZ:
    # An empty list of ids has an offset of zero from a null pointer; only clang reports it.
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


REMEDY = (
    f"Debian, Ubuntu: apt install gcc python3-dev (or python{sys.version_info.major}.{sys.version_info.minor}-dev); "
    "Fedora: dnf install gcc python3-devel; macOS: xcode-select --install. CC names another compiler."
)

SHARED = "pagepool.core._memoryviews"
"""The module with Cython's own code for memoryviews. Without it each module with a memoryview would compile this code again."""


class Step:
    """One step of the build: its output, and a stamp of the contents of its inputs."""

    def __init__(self, output: Path, stamp: Path, *inputs: object) -> None:
        self.output = output
        self.stamp = stamp
        self.inputs = inputs

    def digest(self) -> str:
        return hashlib.sha256(repr((self.output.read_bytes(), self.inputs)).encode()).hexdigest()

    def is_done(self) -> bool:
        return self.output.exists() and self.stamp.exists() and self.stamp.read_text() == self.digest()

    def finish(self) -> None:
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(self.digest())


ASSERTION = re.compile(rb"#ifndef CYTHON_WITHOUT_ASSERTIONS\n.*?#endif\n", re.DOTALL)
"""Assertions in the C text. They contain line numbers, so in a release a comment in a header would recompile modules."""


class BuildCore(build_ext):
    """Build step that translates and compiles the modules in parallel, each only if its inputs changed. After a change of a
    header the modules that use it are translated, and compiled if their C text has changed. Warnings of Cython are errors.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or count_processors()
        self.force = True  # setuptools compares times, which do not show a changed switch
        if self.editable_mode:  # pip builds in a new folder each time
            build = self.distribution.get_command_class("build")(self.distribution)
            build.ensure_finalized()
            self.build_lib, self.build_temp = build.build_lib, build.build_temp

    def build_extensions(self) -> None:
        self.require_compiler()
        # Pythons of pyenv and conda add their own folder, where other machines would search for libraries.
        self.compiler.linker_so = [
            flag for flag in self.compiler.linker_so if not flag.startswith(("-Wl,-rpath,", "-Wl,-rpath="))
        ]
        tree = create_dependency_tree(quiet=True)
        commands = []
        for ext in self.extensions:
            target = self.place_c_file(ext)
            arguments = make_command(ext, target)
            headers = sorted(path for source in ext.sources for path in tree.all_dependencies(source))
            texts = [Path(path).read_bytes() for path in headers]
            step = Step(target, self.place_stamp(ext, "translated"), CYTHON_VERSION, arguments, texts)
            if not step.is_done():
                commands.append((arguments, step))
            ext.sources = [str(target)]
        fork = get_context("fork")
        processes = [fork.Process(target=translate, args=(commands[i :: self.parallel],)) for i in range(self.parallel)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise CompileError("an error, a warning or a performance hint of Cython: see above")
        super().build_extensions()

    def require_compiler(self) -> None:
        """Exit with one line if no module could be compiled, before they are translated, which takes a minute."""
        probe = Path(self.build_temp, "probe.c")
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("#include <Python.h>\n")
        compiler, folders = self.compiler.compiler_so, self.compiler.include_dirs
        command = [*compiler, *(f"-I{folder}" for folder in folders), "-E", str(probe), "-o", str(probe.with_suffix(".i"))]
        try:
            process = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            sys.exit(f"pagepool needs a C compiler: {compiler[0]!r} cannot be run ({error.strerror}). {REMEDY}")
        if process.returncode == 0:
            return
        if not any(Path(folder, "Python.h").exists() for folder in folders):
            sys.exit(f"pagepool needs the headers of Python: no Python.h in {', '.join(folders)}. {REMEDY}")
        lines = process.stderr.splitlines() or [f"status {process.returncode}"]
        found = next((line for line in lines if "error" in line), lines[0])
        sys.exit(f"pagepool needs a C compiler: {compiler[0]!r} fails: {found}. {REMEDY}")

    def build_extension(self, ext: Extension) -> None:
        text = Path(ext.sources[0]).read_bytes()
        text = text if DEBUG else ASSERTION.sub(b"", text)
        tools = [self.compiler.compiler_so, self.compiler.linker_so, self.compiler.include_dirs]
        switches = [ext.define_macros, ext.extra_compile_args, ext.extra_link_args]
        step = Step(Path(self.get_ext_fullpath(ext.name)), self.place_stamp(ext, "compiled"), text, tools, switches)
        if not step.is_done():
            super().build_extension(ext)
            step.finish()

    def place_c_file(self, ext: Extension) -> Path:
        source = Path(*ext.name.split(".")).with_suffix(".c")
        target = source if COVERAGE else Path(self.build_temp, source)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def place_stamp(self, ext: Extension, step: str) -> Path:
        return Path(self.build_temp, f"{ext.name}.{step}")


def make_command(ext: Extension, target: Path) -> list[str]:
    """Return the arguments of Cython for a module."""
    directives = DIRECTIVES | DEBUG_DIRECTIVES | {"linetrace": COVERAGE, "emit_code_comments": COVERAGE}
    switches = ["-X", ",".join(f"{name}={value}" for name, value in directives.items())]
    if ext.name == SHARED:
        return [*switches, f"--generate-shared={target}"]
    switches += ["--annotate"] if is_set("PAGEPOOL_ANNOTATE") else []
    return [*switches, "--shared", SHARED, "-o", str(target), *ext.sources]


def translate(commands: list[tuple[list[str], Step]]) -> None:
    """Run Cython for many modules in this process, since starting it takes longer than most of them, and exit with status 1 if
    it complains. Garbage collection is off: searching Cython's cyclic trees would take a third of the time.
    """
    gc.disable()
    has_flaws = False
    for arguments, step in commands:
        sys.argv = ["cython", *arguments]
        is_flawed = False
        with redirect_stderr(StringIO()) as messages:
            try:
                cython(command_line=1)
            except SystemExit:
                is_flawed = True
        sys.stderr.write(messages.getvalue())
        is_flawed |= re.search(r"^(warning|performance hint): ", messages.getvalue(), re.MULTILINE) is not None
        if not is_flawed:
            step.finish()
        has_flaws |= is_flawed
    sys.exit(has_flaws)


HOT = {
    f"pagepool.{name}"
    for name in (
        "compat.vllm.hasher",
        "core.base.page_hash",
        "core.pool.removal",
        "core.values.chain",
        "core.values.ids",
        "core.holding.lookups",
        "core.router.prefixes",
        "core.holding.request_pages",
        "core.rows.inputs",
        "core.rows.release",
        "core.rows.step_end",
        "core.rows.row_request",
        "core.rows.running",
        "core.holding.slots",
        "core.pool.pages",
        "core.pool.store",
    )
}
"""Modules that -O3 makes 3 to 25 % faster than -O1. Others run as fast with -O1, and compile in half the time."""

ALIGNED = {"pagepool.core.rows.running", "pagepool.core.rows.step_end"}
"""Modules with loops of 20 instructions a row. Where these happen to begin at any address, a step takes up to 3 % longer. GCC
stops inlining once a module has grown by a share, by default 40 %: then the last functions cost a step up to 4 %. clang ignores
this share.
"""

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]
VERSION = runpy.run_path("pagepool/_version.py")["__version__"]
IMAGE_OR_LINK = re.compile(r'(!\[[^]]*\]\(|\bsrc(?:set)?=")(?!\w+:)|(?:\]\(|\bhref=")(?!\w+:)')


def make_links_absolute(markdown: str) -> str:
    """Point relative links to the repository at this version's tag. Blocks of code stay as they are."""

    def extend(match: re.Match[str]) -> str:
        return f"{match[0]}{PROJECT['urls']['Repository']}/{'raw' if match[1] else 'blob'}/v{VERSION}/"

    text_and_code = markdown.replace("](#", "](README.md#").split("```")
    return "```".join([IMAGE_OR_LINK.sub(extend, part) if i % 2 == 0 else part for i, part in enumerate(text_and_code)])


MACROS = {
    ("CYTHON_WITHOUT_ASSERTIONS", "1"): not DEBUG,
    ("CYTHON_TRACE_NOGIL", "1"): COVERAGE,
    ("PAGEPOOL_GUARDS", "0"): is_set("PAGEPOOL_UNGUARDED"),
}

SOURCES = {".".join(path.with_suffix("").parts): str(path) for path in sorted(Path("pagepool").rglob("*.pyx"))}
modules = [
    Extension(
        name,
        sources,
        define_macros=[macro for macro, is_wanted in MACROS.items() if is_wanted],
        # C warnings (-w) are off: they are about Cython's code, and take time.
        extra_compile_args=(DEBUG_FLAGS if DEBUG else ["-O3" if name in HOT else "-O1", "-g0", "-w"])
        + ["-ffp-contract=off", *SANITIZER_FLAGS]  # an eviction policy must decide alike on every machine
        + ["-falign-loops=32", "--param=inline-unit-growth=60"] * (name in ALIGNED),
        extra_link_args=SANITIZER_FLAGS,
    )
    for name, sources in [(SHARED, []), *((name, [source]) for name, source in SOURCES.items())]
]

setup(
    ext_modules=modules,
    cmdclass={"build_ext": BuildCore},
    long_description=make_links_absolute(Path("README.md").read_text()),
    long_description_content_type="text/markdown",
)

"""Fuzzes the boundary of the compiled core: everything public, with arguments of any kind; see `fuzz_world`.

With atheris, and a core that was built for it (PAGEPOOL_FUZZ=1), coverage leads to new inputs; otherwise a seed makes them.
Ends with status 1 on a finding. After a finding, a crash or a hang the last input stands in the file that is named at the
start; otherwise the file is removed.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

try:
    import atheris  # first, since it contains libFuzzer
except ImportError:
    atheris = None

from fuzz_entries import ENTRIES, Entry
from fuzz_world import Finding, World

from pagepool import _core

MAX_INPUT_BYTES = 400
MAX_INPUT_SECONDS = 20
MAX_MEMORY_BYTES = 4 << 30
NEVER_SUCCEED = {
    f"{name}.{call}"
    for name in (
        "FailedLoads",
        "FoundPrefix",
        "Lease",
        "Moves",
        "PageClaim",
        "PageCopies",
        "RefusedRequest",
        "StateWrites",
        "StepResult",
        "TierHold",
    )
    for call in ("__construct__", "__init__")
} | {"PageRecords.remove_page"}  # it has no pages: its subclasses do


class Fuzzer:
    """Runs inputs and counts calls. `note` is a file for the running input, in case it is the last."""

    def __init__(self, note: Path, seconds: float) -> None:
        self.path = note
        self.note = os.open(note, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        self.start = time.monotonic()
        self.deadline = self.start + seconds
        self.num_inputs = 0
        self.counts: Counter[Entry] = Counter()
        self.successes: Counter[Entry] = Counter()

    def run(self, data: bytes) -> None:
        """Run one input. Raises Finding."""
        os.ftruncate(self.note, 0)
        os.pwrite(self.note, data, 0)
        self.num_inputs += 1
        World(data, self.counts, self.successes).run()

    def run_seeds(self, first_seed: int, num_inputs: int | None, require_all: bool) -> None:
        """Run inputs made by seeds, one seed each; more of them if everything is required and something was missed."""
        for seed in itertools.count(first_seed):
            is_enough = num_inputs is not None and self.num_inputs >= num_inputs
            if (is_enough and not (require_all and self.missed())) or time.monotonic() > self.deadline:
                return
            faulthandler.dump_traceback_later(MAX_INPUT_SECONDS, exit=True)
            try:
                self.run(Random(seed).randbytes(MAX_INPUT_BYTES))
            except Finding as finding:
                raise Finding(f"seed {seed}: {finding}") from None
            finally:
                faulthandler.cancel_dump_traceback_later()

    def run_until_deadline(self, data: bytes) -> None:
        """Run an input from atheris, whose own end would leave no time for a report."""
        if time.monotonic() > self.deadline:
            self.report()
            self.end()
            sys.stdout.flush()
            os._exit(0)
        self.run(data)

    def end(self) -> None:
        """Remove the file, after inputs without a finding."""
        self.path.unlink(missing_ok=True)

    def report(self) -> None:
        seconds = time.monotonic() - self.start
        calls = self.counts.total()
        print(f"{calls:,} boundary calls in {self.num_inputs:,} inputs, {seconds:.0f} s, {calls / seconds:,.0f} a second")
        print(f"{len(self.counts)} of {len(ENTRIES)} entries called, {len(self.successes)} with success")

    def missed(self) -> list[str]:
        """Return entries that were never called, or that never succeeded although they can."""
        return [f"{entry} ({entry.kind})" for entry in ENTRIES if not self.counts[entry] or self.never_succeeded(entry)]

    def never_succeeded(self, entry: Entry) -> bool:
        """Whether a call should have succeeded by now. Most attributes are read-only, most objects are made once."""
        may_fail = entry.kind in ("set", "delete", "init") or entry.name == "__reduce__" or str(entry) in NEVER_SUCCEED
        return not may_fail and not self.successes[entry]


def limit_memory() -> None:
    """Let huge allocations fail. Sanitizers reserve terabytes, and have their own option for that."""
    if "san" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def is_instrumented() -> bool:
    """Whether the core reports its coverage."""
    return atheris is not None and b"__sanitizer_cov_8bit_counters_init" in Path(_core.__file__).read_bytes()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="*", type=Path, help="files to run as inputs, instead of new ones")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--num-inputs", type=int, help="of seeds, or more with --require-all")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--corpus", type=Path, help="folder of inputs that coverage found worth keeping")
    parser.add_argument("--verbose", action="store_true", help="let libFuzzer tell the coverage that it finds")
    parser.add_argument("--note", type=Path, help="file for the input that runs")
    parser.add_argument("--require-all", action="store_true", help="go on until everything was called with success, or fail")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    note = options.note or Path(tempfile.gettempdir()) / f"pagepool-fuzz-{os.getpid()}"
    print(f"the last input stands in {note}", flush=True)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    limit_memory()
    fuzzer = Fuzzer(note, options.seconds)
    try:
        run(fuzzer, options)
    finally:
        fuzzer.report()
    fuzzer.end()
    if options.require_all and fuzzer.missed():
        sys.exit(f"never called, or never with success: {', '.join(fuzzer.missed())}")


def run(fuzzer: Fuzzer, options: argparse.Namespace) -> None:
    """Run files, or new inputs."""
    if options.inputs:
        for path in options.inputs:
            fuzzer.run(path.read_bytes())
    elif is_instrumented():
        fuzz_with_coverage(fuzzer, options)
    else:
        fuzzer.run_seeds(options.seed, options.num_inputs, options.require_all)


def fuzz_with_coverage(fuzzer: Fuzzer, options: argparse.Namespace) -> None:
    """Let libFuzzer make the inputs. It does not return."""
    flags = [f"-max_len={MAX_INPUT_BYTES}", f"-timeout={MAX_INPUT_SECONDS}", f"-seed={options.seed + 1}", "-len_control=0"]
    flags += ["-rss_limit_mb=0", "-malloc_limit_mb=0", "-detect_leaks=0", f"-verbosity={int(options.verbose)}"]
    if options.corpus:
        options.corpus.mkdir(parents=True, exist_ok=True)
        flags += [str(options.corpus), f"-artifact_prefix={options.corpus.parent}/"]
    atheris.Setup([sys.argv[0], *flags], fuzzer.run_until_deadline)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

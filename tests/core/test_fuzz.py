"""A few thousand inputs of the fuzzer, in a separate process, that reach everything public in the compiled core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from settings import NUM_OPERATIONS

ASAN_OPTIONS = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024"


def run_fuzz(*options: str) -> str:
    """Run the fuzzer and return its output; a finding, a crash or a hang fails the test and names the seed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ASAN_OPTIONS": ASAN_OPTIONS}
    process = subprocess.run([sys.executable, "-m", "fuzz", *options], env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_nothing_public_breaks_whatever_is_passed() -> None:
    """From this seed on, few inputs reach everything; more are made as long as something is missing."""
    print(run_fuzz("--seed", "603279", "--num-inputs", str(NUM_OPERATIONS // 40), "--require-all", "--seconds", "100"))


def test_a_seed_makes_the_same_calls_again(tmp_path: Path) -> None:
    """And no file is left of inputs without a finding."""
    first, second = (run_fuzz("--num-inputs", "5", "--seed", "7", "--note", str(tmp_path / "note")) for _ in range(2))
    assert not list(tmp_path.iterdir())
    assert first.split(" boundary calls")[0].split()[-1] == second.split(" boundary calls")[0].split()[-1]

"""Run all benchmarks and print the table: ``python -m bench``. Further arguments go to pytest: ``-k decode``.

``--engine NAME`` before them runs only the benchmarks that have the engine's allocator as a rival, easydel or vllm, whether or
not it is installed; ``--engine none`` those that have neither. ``--results=FILE`` puts the results into a file.
"""

import argparse
import sys
from pathlib import Path

import pytest

RACES = Path(__file__).parent / "races"
CPU_TIME = "--benchmark-timer=time.thread_time"
"""Of the thread that works, so that other load on the machine counts little. Where jax works, benchmarks have another clock."""
ENGINES = {
    "drop_in": ("easydel", "vllm"),
    "core": ("easydel", "vllm"),
    "running_batch": ("easydel", "vllm"),
    "refusals": ("easydel", "vllm"),
    "hashes": ("vllm",),
    "digests": ("none",),
    "page_table": ("easydel",),
    "torch_table": ("easydel",),  # its environment has torch
    "page_copies": ("none",),
    "host_tier": ("none",),
    "host_pages": ("none",),
    "stores": ("none",),
    "forks": ("easydel",),
    "events": ("none",),
    "trace": ("none",),
    "eviction": ("none",),
    "router": ("none",),
    "windows": ("none",),
    "keeping": ("none",),
    "late": ("none",),
    "step": ("none",),
    "ahead": ("none",),
    "waiting": ("none",),
    "pools": ("none",),
    "explain": ("none",),
}
"""The engines whose allocators are rivals, by the name of the benchmark."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", add_help=False)
    parser.add_argument("--engine", choices=("easydel", "vllm", "none"))
    options, arguments = parser.parse_known_args()
    benches = [
        str(RACES / f"bench_{name}.py") for name, engines in ENGINES.items() if options.engine in (None, *engines)
    ]  # fmt: skip
    code = pytest.main(["-q", *benches, "--benchmark-enable", "--benchmark-quiet", CPU_TIME, *arguments])
    is_part = options.engine is not None and code == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if is_part else int(code)


if __name__ == "__main__":
    sys.exit(main())

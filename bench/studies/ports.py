"""CPU time of schedulers, inputs and ends of public engines, and of their ports in examples/ports/: the figures of docs/ports/.

Engine and port run in one process, in turn, with a model that takes no time. Copies to the device take none either, since there
is no device: a tensor is its own copy. `NANO_VLLM` and `MINI_SGLANG` name the folders of the engines' sources, which need torch
and xxhash.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from bench.studies.port_stubs import Runs, stub_device

PORTS = Path(__file__).parents[2] / "examples" / "ports"
ENGINES = {"nano-vllm": ("NANO_VLLM", (16, 256)), "mini-sglang": ("MINI_SGLANG", (1, 16))}
"""The variable that names the folder of each engine, and the page sizes."""


def load_port(name: str) -> dict[str, Any]:
    """Return the names of a port."""
    port = {"__name__": "port"}
    for part in ("scheduler", "model"):
        path = PORTS / f"{name.replace('-', '_')}_{part}.py"
        exec(compile(path.read_text(), str(path), "exec"), port)
    return port


def measure(runs: Runs, page_size: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, make in runs.items():
            run = make(page_size)
            start = process_time()
            run()
            seconds[name].append(process_time() - start)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the seconds of each, and how many times less a port takes."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.ports", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="default: 7")
    args = parser.parse_args(arguments)
    has_modules = all(importlib.util.find_spec(name) for name in ("torch", "xxhash"))
    if not has_modules or not any(variable in os.environ for variable, _ in ENGINES.values()):
        parser.exit(0, "Skipped: neither NANO_VLLM nor MINI_SGLANG is set, or torch or xxhash is not installed.\n")
    stub_device()
    for name, (variable, page_sizes) in ENGINES.items():
        if variable in os.environ:
            rival: Any = importlib.import_module(f"bench.studies.port_of_{name.replace('-', '_')}")
            rival.stub_modules(Path(os.environ[variable]))
            runs = rival.make_runs(load_port(name))
            print(f"{name}: seconds (from, to), and how many times less")
            for page_size in page_sizes:
                seconds = measure(runs, page_size, args.repeats)
                own = median(seconds["own"])
                for run, each in seconds.items():
                    times = f"{median(each):.3f} ({min(each):.3f}, {max(each):.3f})"
                    print(f"pages of {page_size}, {run}: {times}, {own / median(each):.1f}")


if __name__ == "__main__":
    main()

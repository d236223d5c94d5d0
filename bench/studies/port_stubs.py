"""What the ports of `bench.studies.ports` share: their requests, and stubs of a device and of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

NUM_REQUESTS, SHORTEST, LONGEST, MAX_MODEL_LEN, MAX_NUM_REQS = 400, 100, 1024, 4096, 512

Runs = dict[str, Callable[[int], Callable[[], None]]]
"""What makes a run with pages of a size, by name."""


class Absent(ModuleType):
    """A module whose names are all the same class."""

    def __getattr__(self, name: str) -> Any:
        return object


class Stream:
    """A stream whose work is done at once. Its events are itself."""

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


def stub_device() -> None:
    """Let tensors of the device be those of the host."""
    import torch

    torch.set_num_threads(1)
    for name in ("tensor", "empty", "ones", "arange"):
        setattr(torch, name, without_pin(getattr(torch, name)))
    torch.Tensor.cuda, torch.Tensor.pin_memory = (lambda self, **_: self), torch.Tensor.clone  # type: ignore[method-assign]
    torch.cuda.current_stream = Stream


def without_pin(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ignores `pin_memory`."""
    return lambda *args, pin_memory=False, **options: function(*args, **options)


def stub_package(name: str, folder: Path) -> ModuleType:
    """Let the modules of a package be imported without its own imports, which are the whole engine."""
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(folder)]
    return package


def stub_absent(names: Iterable[str]) -> None:
    """Let modules be there that are imported, and not used."""
    sys.modules |= {name: Absent(name) for name in names}


def draw_requests() -> list[tuple[list[int], int]]:
    """Draw prompts, and the lengths of their answers, as nano-vllm's own benchmark does."""
    rng = Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(SHORTEST, LONGEST))] for _ in range(NUM_REQUESTS)]
    return [(prompt, rng.randint(SHORTEST, LONGEST)) for prompt in prompts]


def count_pages(page_size: int) -> int:
    """Return how many pages all requests may need."""
    return NUM_REQUESTS * (2 * LONGEST // page_size + 1) + 1

"""Arguments of `RunningBatch.admit` in one mapping, as workloads draw them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pagepool import RequestTraits

TRAITS = {field.name for field in fields(RequestTraits)}


def admission(**options: Any) -> dict[str, Any]:
    """Return the arguments of `RunningBatch.admit` or `probe`: those that say who the request is become its `traits`."""
    traits = {name: options.pop(name) for name in TRAITS & options.keys()}
    return options | {"traits": RequestTraits(**traits)} if traits else options

"""Writes into memory that is read-only to Python."""

from __future__ import annotations

from ctypes import c_int32
from typing import Any


def overwrite(array: Any, value: int) -> None:
    """Overwrite the first value of a read-only array."""
    c_int32.from_address(array.__array_interface__["data"][0]).value = value

"""Calls that raise, and leave a state as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(
    state: Callable[[], Any], error: type[BaseException], message: str | None = None
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Assert that the block raises this error, and that the state is the same before and after it."""
    before = state()
    with pytest.raises(error, match=message) as caught:
        yield caught
    assert state() == before

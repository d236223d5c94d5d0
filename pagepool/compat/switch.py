"""Environment variables that turn an adapter on or off."""

import os

from pagepool.errors import CompatError

__all__ = ["OFF", "ON", "read_switch"]

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")
"""The values of a switch, in any case, with or without whitespace around them."""


def read_switch(variable: str, others: tuple[str, ...] = ()) -> str:
    """Return the value of an environment variable in lower case and without whitespace around it; "" if it is not set.

    CompatError for a value that is neither in `ON` nor in `OFF` nor in `others`.
    """
    value = os.environ.get(variable, "")
    word = value.strip().lower()
    if word not in ON + others + OFF:
        raise CompatError(f"{variable}: got {value!r}, allowed: {', '.join(ON + others)}; {', '.join(OFF[:-1])} or nothing")
    return word

"""Environment variables that turn an adapter on or off, or set its options."""

import os

from pagepool.errors import CompatError

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")
"""The values of a switch, in any case, with or without whitespace around them."""


def read_switch(variable: str, others: tuple[str, ...] = ()) -> str:
    """Return the value of a variable as `read_word` does. Raise CompatError unless it is in `ON`, `OFF` or `others`."""
    return read_word(variable, ON + others, OFF[:-1])


def read_word(variable: str, words: tuple[str, ...], defaults: tuple[str, ...]) -> str:
    """Return the value of an environment variable in lower case, without whitespace around it; "" if it is not set.

    Values in `defaults` mean the same as "". Raise CompatError for any other value that is not in `words`.
    """
    value = os.environ.get(variable, "")
    word = value.strip().lower()
    if word not in (*words, *defaults, ""):
        raise CompatError(f"{variable}: got {value!r}, allowed: {', '.join(words)}; {', '.join(defaults)} or nothing")
    return word

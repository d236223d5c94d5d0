"""Parsing and formatting of sizes: pages, tokens, requests or bytes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from pagepool.errors import ArgumentError

COUNT_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
DECIMAL_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTE_UNITS = DECIMAL_UNITS | {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
ROUND_NUMBERS = (10, 15, 20, 30, 50, 70)  # round numbers of a decade, about evenly spaced on a logarithmic axis
MAX_SIZE = 10**18
NUMBER = re.compile(r"\s*(-?\d{1,400}(?:\.\d{1,400})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in ascending order, or the two ends of a range."""

    numbers: tuple[int, ...]
    is_range: bool = False

    @classmethod
    def parse(cls, text: str, units: Mapping[str, int], minimum: int = 1) -> "Sizes":
        """Parse a range `A:B` or numbers separated by commas, each as in `parse_number`. Raise ArgumentError for other text.

        >>> Sizes.parse("1k:1M", COUNT_UNITS), Sizes.parse("40GiB", BYTE_UNITS)
        (Sizes(numbers=(1000, 1000000), is_range=True), Sizes(numbers=(42949672960,), is_range=False))
        """
        parts = text.split(":")
        is_range = len(parts) == 2
        numbers = [parse_number(part, units, minimum) for part in (parts if is_range else text.split(","))]
        if is_range and numbers[0] >= numbers[1]:
            raise ArgumentError(f"got {text!r}, allowed: an ascending range")
        return cls(tuple(sorted(set(numbers))), is_range)

    def divided_by(self, divisor: int) -> "Sizes":
        """Convert to another unit, rounding down. Raise ArgumentError if a result is 0."""
        numbers = tuple(sorted({number // divisor for number in self.numbers}))
        if numbers[0] == 0:
            raise ArgumentError(f"{self.numbers[0]:,} bytes are less than one page of {divisor:,} bytes")
        return Sizes(numbers, self.is_range and len(numbers) > 1)

    def list(self) -> list[int]:
        """List all sizes; for a range its ends and the round numbers between them.

        >>> Sizes((700, 4000), is_range=True).list()
        [700, 1000, 1500, 2000, 3000, 4000]
        """
        if not self.is_range:
            return [*self.numbers]
        start, stop = self.numbers
        return [start, *(number for number in _round_numbers(stop) if number > start), stop]


def parse_number(text: str, units: Mapping[str, int], minimum: int = 1) -> int:
    """Parse a whole number with a unit, ignoring case; 0 needs no unit. Raise ArgumentError for other text.

    >>> parse_number("1.5k", COUNT_UNITS), parse_number("40gib", BYTE_UNITS), parse_number("0", BYTE_UNITS, minimum=0)
    (1500, 42949672960, 0)
    """
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ArgumentError(f"{text!r} is not a number with a unit of these: {_list_units(units)}")
    number = Fraction(match[1])
    if number:
        number *= _find_factor(text, match[2], units)
    if number < minimum:
        raise ArgumentError(f"{text} is not in the range x>={minimum}")
    if number > MAX_SIZE:
        raise ArgumentError(f"{text} is not in the range x<={MAX_SIZE}")
    if number.denominator != 1:
        raise ArgumentError(f"{text} is not a whole number")
    return int(number)


def _find_factor(text: str, unit: str, units: Mapping[str, int]) -> int:
    factors = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() in factors:
        return factors[unit.lower()]
    is_bytes = unit.lower() in map(str.lower, BYTE_UNITS)
    problem = "is in bytes" if is_bytes else f"has the unit {unit!r}" if unit else "has no unit"
    raise ArgumentError(f"{text!r} {problem}, units allowed: {_list_units(units)}")


def _list_units(units: Mapping[str, int]) -> str:
    return ", ".join(unit or "none" for unit in units)


def _round_numbers(stop: int) -> Iterator[int]:
    """Yield 1, 2, 3, 5, 7, 10, 15, 20, 30, ... below `stop`."""
    power = 1
    while power < stop:
        for number in ROUND_NUMBERS:
            if number * power % 10 == 0 and number * power // 10 < stop:
                yield number * power // 10
        power *= 10


def format_bytes(num_bytes: float) -> str:
    """Format bytes with the binary unit that leaves a number from 1 to 1024.

    >>> format_bytes(2**21), format_bytes(1.5 * 2**40), format_bytes(700)
    ('2.0 MiB', '1.5 TiB', '700 B')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << exponent:
            return f"{num_bytes / (1 << exponent):,.1f} {unit}"
    return f"{num_bytes:g} B"

"""JSON objects without duplicate names."""

from typing import Any

from pagepool.errors import shown


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with these names and values, as an `object_pairs_hook` for `json`. Raise ValueError if a name occurs
    twice, where `json` by itself would keep the last value.

    >>> make_object([("a", 1), ("a", 2)])
    Traceback (most recent call last):
    ValueError: an object has the name 'a' more than once
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {shown(twice)} more than once")
    return made

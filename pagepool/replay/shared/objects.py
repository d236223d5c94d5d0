"""JSON objects without doubled names."""

from typing import Any

from pagepool.errors import shown


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these names and values, for `object_pairs_hook` of `json`, which alone would keep the last of two
    equal names. Raise ValueError for such names.

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

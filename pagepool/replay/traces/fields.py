"""The fields of a line of a trace by their usual names, from the JSON or CSV of various tools."""

import csv
import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from reprlib import repr as shorten
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from pagepool.errors import ArgumentError, shown

__all__ = [
    "Fields",
    "LineReader",
    "as_milliseconds",
    "checked_milliseconds",
    "find_reader",
    "read_ids",
    "read_length",
    "read_object",
    "read_session",
]

Fields: TypeAlias = dict[str, Any]
LineReader: TypeAlias = Callable[[bytes], Fields]

MAX_SHOWN = 200  # characters of a header
MAX_MILLISECONDS = 2**53  # beyond this floats skip integers
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COLUMN = re.compile(r"(?:[A-Za-z_][\w .()/-]*)?")

NAMES = {
    "timestamp": ("timestamp", "created_time", "arrived_at", "arrival_time"),
    "input_length": (
        "input_length",
        "input_tokens",
        "prompt_tokens",
        "num_prompt_tokens",
        "num_prefill_tokens",
        "input_len",
        "prompt_len",
        "contexttokens",  # Azure's name
        "request_tokens",  # BurstGPT's name
    ),
    "output_length": (
        "output_length",
        "output_tokens",
        "completion_tokens",
        "num_output_tokens",
        "num_decode_tokens",
        "output_len",
        "generatedtokens",
        "response_tokens",
    ),
    "session_id": ("session_id", "conversation_id"),
    **{name: (name,) for name in ("hash_ids", "output_hash_ids", "block_size", "pause", "delay")},
}
"""Names of each field; of several in a line, the first counts."""

ALL_NAMES = frozenset(name for names in NAMES.values() for name in names)

IN_SECONDS = frozenset({"arrived_at", "request_tokens"})
"""Names of times in seconds: Vidur, BurstGPT."""


def read_object(text: bytes) -> Fields:
    """Read a line of JSON. Raise ArgumentError if it is not an object, or if two names of a length contradict."""
    try:
        fields = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ArgumentError(f"the line: got {type(fields).__name__}, allowed: a JSON object")
    return _use_usual_names(fields)


def find_reader(header: bytes) -> LineReader | None:
    """Return the reader of the rows below a CSV header, or None if the line is not a header. Raise ArgumentError for a header
    without a length.
    """
    if header.lstrip()[:1] in (b"{", b"["):
        return None
    try:
        text = header.decode().strip()
        delimiter = max(",;\t", key=text.count)
        [columns] = csv.reader([text], delimiter=delimiter)
    except (ValueError, csv.Error):
        return None
    columns = [column.strip() for column in columns]
    if len(columns) < 2 or not all(COLUMN.fullmatch(column) for column in columns):
        return None
    if {*map(_as_name, columns)}.isdisjoint(NAMES["input_length"]):
        raise ArgumentError(f"lacks input_length: as CSV it has the columns {', '.join(columns)[:MAX_SHOWN]}")
    _require_once(columns)

    def read_row(text: bytes) -> Fields:
        try:
            [row] = csv.reader([text.decode().rstrip("\r\n")], delimiter=delimiter, strict=True)
        except (ValueError, csv.Error) as error:
            raise ArgumentError(f"not valid CSV: {error}") from error
        if len(row) != len(columns):
            raise ArgumentError(f"has {len(row)} columns, but the header {len(columns)}")
        return _use_usual_names({name: _load_cell(cell) for name, cell in zip(columns, row, strict=True)})

    return read_row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _load_cell(cell: str) -> Any:
    """Return the number or list in a cell, None for an empty one, or its text."""
    try:
        return json.loads(cell, parse_constant=_refuse_constant) if cell.strip() else None
    except (ValueError, RecursionError):
        return cell.strip()


def _as_name(name: str) -> str:
    """Return a name as in `NAMES`.

    >>> _as_name("Request tokens"), _as_name("ContextTokens")
    ('request_tokens', 'contexttokens')
    """
    return name.strip().lower().replace(" ", "_")


def _require_once(names: Iterable[str]) -> None:
    """Raise ArgumentError if two names are the same name of a field."""
    seen: dict[str, str] = {}
    for name in names:
        usual = _as_name(name)
        if usual in seen and usual in ALL_NAMES:
            raise ArgumentError(f"has {shown(seen[usual])} and {shown(name)}: which of them is {usual}")
        seen[usual] = name


def _use_usual_names(fields: Fields) -> Fields:
    """Return the fields of a record, and `is_in_seconds`. None counts as missing, since pandas writes it."""
    by_name = {_as_name(name): value for name, value in fields.items()}
    if len(by_name) < len(fields):
        _require_once(fields)
    usual: Fields = {}
    for name, others in NAMES.items():
        found = [other for other in others if by_name.get(other) is not None]
        for other in found:
            if name.endswith("_length") and by_name[other] != by_name[found[0]]:
                raise ArgumentError(f"has {found[0]} {shown(by_name[found[0]])} and {other} {shown(by_name[other])}")
        if found:
            usual[name] = by_name[found[0]]
    if not IN_SECONDS.isdisjoint(by_name):
        usual["is_in_seconds"] = True
    return usual


def as_milliseconds(name: str, value: object, factor: int) -> float:
    """Return a time in ms: a number times the ms of its unit, or a date. Raise ArgumentError for other values."""
    if isinstance(value, str):
        try:
            date = datetime.fromisoformat(value.strip())
        except ValueError as error:
            raise ArgumentError(f"{name}: got {shown(value)}, allowed: a number or a date") from error
        return ((date if date.tzinfo else date.replace(tzinfo=UTC)) - EPOCH) / timedelta(milliseconds=1)
    return checked_milliseconds(name, value) * factor


def checked_milliseconds(name: str, value: object) -> float:
    """Return a number of ms. Raise ArgumentError for other values, and for 2**53 and more."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: a number")
    if not -MAX_MILLISECONDS < value < MAX_MILLISECONDS:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: below 2**53 ms")
    return cast(float, value.item()) if isinstance(value, np.generic) else value


def read_length(value: object) -> object:
    """Return a whole number written as a float as an int; return anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_session(value: object) -> object:
    """Return a session's number as text; return anything else unchanged."""
    return str(value) if type(value) is int else value


def read_ids(fields: Fields, name: str) -> tuple[int | str, ...]:
    """Return the ids of blocks. Raise ArgumentError unless they are a list of integers or texts."""
    ids = fields[name]
    if not isinstance(ids, list) or any(type(hash_id) not in (int, str) for hash_id in ids):
        raise ArgumentError(f"{name}: got {shorten(ids)}, allowed: a list of ints or texts")
    return tuple(ids)

"""The fields of a line of a trace by their usual names, from the JSON or CSV of various tools."""

import csv
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, cast

import numpy as np

from pagepool.errors import ArgumentError, shown
from pagepool.replay.traces.documents import read_json
from pagepool.replay.traces.lengths import (
    INPUT_NAMES,
    LENGTH_NAMES,
    TEXTS,
    WRAPPERS,
    has_cached_count,
    plain_name,
    read_lengths,
)

Fields: TypeAlias = dict[str, Any]
LineReader: TypeAlias = Callable[[bytes], Fields]

MAX_SHOWN = 200  # characters of a header
MAX_MILLISECONDS = 2**53  # beyond this floats skip integers
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COLUMN = re.compile(r"(?:[A-Za-z_][\w .()/-]*)?")

NAMES = {
    "timestamp": ("timestamp", "createdtime", "arrivedat", "arrivaltime"),
    "session_id": ("sessionid", "conversationid"),
    **{
        name: (plain_name(name),)
        for name in ("hash_ids", "output_hash_ids", "block_size", "pause", "delay", "hash_id_scope", "context_mode")
    },
}
"""Plain names of each field; of several in a line, the first counts. The module `lengths` has the names of lengths."""

FIELDS = {plain: field for field, names in (NAMES | LENGTH_NAMES).items() for plain in names}

IN_SECONDS = frozenset({"arrivedat", "requesttokens"})
"""Names of times in seconds: Vidur, BurstGPT."""


def read_object(text: bytes) -> Fields:
    """Read a line of JSON. Raise ArgumentError if it is not an object, or if two names of a length contradict."""
    return use_usual_names(require_object(read_json(text)))


def require_object(value: Any) -> Fields:
    """Return a JSON object. Raise ArgumentError for another value."""
    if not isinstance(value, dict):
        raise ArgumentError(f"got a JSON {type(value).__name__}, allowed: an object")
    return value


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
    if not any(plain_name(column.split(".")[-1]) in (*INPUT_NAMES, *WRAPPERS) for column in columns):
        raise ArgumentError(f"lacks input_length: as CSV it has the columns {', '.join(columns)[:MAX_SHOWN]}")
    _require_once(columns)

    def read_row(text: bytes) -> Fields:
        try:
            [row] = csv.reader([text.decode().rstrip("\r\n")], delimiter=delimiter, strict=True)
        except (ValueError, csv.Error) as error:
            raise ArgumentError(f"not valid CSV: {error}") from error
        if len(row) != len(columns):
            raise ArgumentError(f"got {len(row)} columns, allowed: {len(columns)}, as in the header")
        return use_usual_names({name: _load_cell(cell) for name, cell in zip(columns, row, strict=True)})

    return read_row


def _load_cell(cell: str) -> Any:
    """Return the number or list in a cell, None for an empty one, or its text."""
    try:
        return read_json(cell.encode()) if cell.strip() else None
    except ArgumentError:
        return cell.strip()


def _require_once(names: Iterable[str]) -> None:
    """Raise ArgumentError if two names have the same plain name, that of a known field."""
    seen: dict[str, str] = {}
    for name in names:
        plain = plain_name(name)
        if plain in seen and plain in FIELDS:
            raise ArgumentError(f"has {shown(seen[plain])} and {shown(name)}: which of them is {FIELDS[plain]}")
        seen[plain] = name


def use_usual_names(fields: Fields) -> Fields:
    """Return the fields of a record by their usual names, with `is_in_seconds` if times are in seconds, `is_whole` if its
    length is that of a whole prompt, and an error as `missing` if it has no length. None counts as no value: pandas writes it.
    """
    by_name = {plain_name(name): value for name, value in fields.items()}
    if len(by_name) < len(fields):
        _require_once(fields)
    usual: Fields = read_lengths(fields)
    for name, others in NAMES.items():
        found = next((other for other in others if by_name.get(other) is not None), None)
        if found is not None:
            usual[name] = by_name[found]
    if not IN_SECONDS.isdisjoint(by_name):
        usual["is_in_seconds"] = True
    if any("cache" in name or isinstance(value, dict) for name, value in by_name.items()) and has_cached_count(fields):
        usual["is_whole"] = True
    if "input_length" not in usual:
        usual["missing"] = _describe_missing(fields, by_name)
    return usual


def _describe_missing(fields: Fields, by_name: Fields) -> str:
    if not TEXTS.isdisjoint(by_name):
        return "lacks input_length: only the model's tokenizer counts the tokens of its text"
    names = ", ".join(name if name.isprintable() else shown(name) for name in fields)
    return f"lacks input_length: it has {names or 'no fields'}"[:MAX_SHOWN]


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


def read_session(value: object) -> object:
    """Return a session's number as text; return anything else unchanged."""
    return str(value) if type(value) is int else value

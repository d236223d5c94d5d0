"""The JSON values of a file: one in each line, or in an array, or one after another over several lines."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, NoReturn

from pagepool.errors import ArgumentError
from pagepool.replay.shared.objects import make_object

MAX_LINE_BYTES = 1 << 26  # three million hash ids; without a limit a file without newlines would be read into memory at once
MAX_DOCUMENT_BYTES = 1 << 28
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACES = re.compile(r"[ \t\r\n]*")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=make_object)


class Lines:
    """The lines of a file that are not blank. Byte order marks are left out, also where a joined file begins. `number` is the
    number of the last line read, from 1.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read nothing yet."""
        self.number = 0
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the lines that are left."""
        return self

    def __next__(self) -> bytes:
        """Return the next line. Raise ArgumentError for a very long one."""
        while text := self._read():
            if text.strip():
                return text
        raise StopIteration

    def read_with(self, first: bytes) -> str:
        """Return the text from the line `first` to the end. Raise ArgumentError if it is too long or not UTF-8."""
        parts, size, number = [first], len(first), self.number
        while text := self._read():
            parts.append(text)
            size += len(text)
            if size > MAX_DOCUMENT_BYTES:
                raise ArgumentError(
                    f"got a text of more than {MAX_DOCUMENT_BYTES} bytes, allowed: one object a line, as jq -c '.[]' writes"
                )
        self.number = number
        return _decode(b"".join(parts))

    def _read(self) -> bytes:
        self.number += 1
        text = self._file.readline(MAX_LINE_BYTES + 1)
        if len(text) > MAX_LINE_BYTES:
            raise ArgumentError(f"got a line of more than {MAX_LINE_BYTES} bytes, allowed: {MAX_LINE_BYTES}")
        return text.removeprefix(BYTE_ORDER_MARK)


def _decode(text: bytes) -> str:
    try:
        return text.decode()
    except ValueError as error:
        raise ArgumentError(f"not valid JSON: {error}") from error


def read_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raise ArgumentError if it is not valid."""
    try:
        return DECODER.decode(_decode(text))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ArgumentError) else ArgumentError(f"not valid JSON: {error}") from error


def read_values(first: bytes, lines: Lines) -> Iterator[Any]:
    """Yield the JSON values from the line `first` on, and the items of arrays; `lines.number` is the line of the last
    value. Lines with one value each are read one by one; from the first other line on, the whole rest is read at once. Raise
    ArgumentError if a text is not valid.
    """
    for text in chain([first], lines):
        if text.lstrip()[:1] == b"[":
            yield from _read_document(lines.read_with(text), lines)
            return
        try:
            value = DECODER.decode(_decode(text))
        except (ValueError, RecursionError) as error:
            if not _is_part(text, error):
                raise error if isinstance(error, ArgumentError) else ArgumentError(f"not valid JSON: {error}") from error
            yield from _read_document(lines.read_with(text), lines)
            return
        yield value


def _is_part(text: bytes, error: Exception) -> bool:
    """Whether a line with this error has several objects, or an object that ends in a later line."""
    is_cut = isinstance(error, json.JSONDecodeError) and (error.msg == "Extra data" or error.pos >= len(error.doc.rstrip()))
    return is_cut and text.lstrip()[:1] == b"{"


def _read_document(text: str, lines: Lines) -> Iterator[Any]:
    """Yield the values of a text that begins in line `lines.number`."""
    place, counted, is_in_array = _skip(text, 0), 0, False
    while place < len(text):
        lines.number += text.count("\n", counted, place)
        counted = place
        if not is_in_array and text[place] == "[":
            place, is_in_array = _skip(text, place + 1), True
            if text[place : place + 1] != "]":
                continue
        if text[place] != "]" or not is_in_array:
            try:
                value, place = DECODER.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                raise ArgumentError(f"not valid JSON: {error}") from error
            yield value
            place = _skip(text, place)
        if not is_in_array:
            continue
        mark = text[place : place + 1]
        if mark not in tuple(",]"):
            raise ArgumentError(f"not valid JSON: got {text[place : place + 20]!r} behind an item, allowed: a comma or ]")
        place, is_in_array = _skip(text, place + 1), mark == ","
    if is_in_array:
        raise ArgumentError("not valid JSON: the array has no end")


def _skip(text: str, place: int) -> int:
    match = SPACES.match(text, place)
    return match.end() if match else place

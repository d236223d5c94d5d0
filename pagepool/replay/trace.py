"""Traces: lines of JSON that say how long requests were and which prefixes they shared, but not their text.

A line has `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`: one id for each 512
tokens of input, begun ones included, where equal ids mean equal prefixes. Other fields are ignored.
"""

import gzip
import json
import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from pagepool.errors import ArgumentError, PagePoolError
from pagepool.replay.simulated_request import Int32Array, SimulatedRequest
from pagepool.specs import cdiv, require_int

__all__ = ["TOKENS_PER_ID", "TraceError", "TraceRecord", "make_requests", "parse_record", "read_trace"]

TOKENS_PER_ID = 512
MAX_IDS = 2**31 // TOKENS_PER_ID  # each has token ids of its own, which are int32
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(PagePoolError, ValueError):
    """A line of a trace is not what a trace holds; the message has file name, line number and reason."""

    def __init__(self, source: str, line: int, reason: str) -> None:
        """Lines count from 1."""
        super().__init__(f"{source}:{line}: {reason}")


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request of a trace: arrival in ms, lengths in tokens, one id for each 512 tokens of input."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _load_object(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ArgumentError(f"a JSON object is expected, not {type(fields).__name__}")
    return fields


def _read_length(fields: dict[str, Any], name: str, minimum: int) -> int:
    length = require_int(name, fields[name], minimum)
    if length >= 2**31:
        raise ArgumentError(f"{name} must be below 2**31, got {length}")
    return length


def parse_record(text: bytes) -> TraceRecord:
    """One line as a record. An answer may be empty, a prompt may not. O(length of the line).

    Raises `ArgumentError` or `ArgumentTypeError` with the reason if the line is no JSON object, lacks a
    field, or has a field of a wrong type or length.

    >>> parse_record(b'{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [4, 7]}')
    TraceRecord(timestamp=0, input_length=600, output_length=9, hash_ids=(4, 7))
    """
    fields = _load_object(text)
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise ArgumentError(f"lacks {', '.join(missing)}")
    timestamp, hash_ids = fields["timestamp"], fields["hash_ids"]
    if type(timestamp) not in (int, float) or not math.isfinite(timestamp):
        raise ArgumentError(f"timestamp must be a number, got {timestamp!r}")
    input_length = _read_length(fields, "input_length", minimum=1)
    output_length = _read_length(fields, "output_length", minimum=0)
    if not isinstance(hash_ids, list) or any(type(hash_id) is not int for hash_id in hash_ids):
        raise ArgumentError("hash_ids must be a list of integers")
    num_ids = cdiv(input_length, TOKENS_PER_ID)
    if len(hash_ids) != num_ids:
        raise ArgumentError(f"input_length {input_length} needs {num_ids} hash_ids, got {len(hash_ids)}")
    return TraceRecord(timestamp, input_length, output_length, tuple(hash_ids))


def source_name(path: str) -> str:
    """What messages call the trace."""
    return "<stdin>" if path == "-" else path


def _open_lines(path: str) -> AbstractContextManager[Iterable[bytes]]:
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    if path.endswith(".gz"):
        return gzip.open(path)
    return open(path, "rb")


def read_trace(path: str, limit: int | None = None) -> list[TraceRecord]:
    """All lines of a trace, or the first `limit`. A path that ends in `.gz` is unpacked, `-` is standard input.

    Raises `TraceError` on the first line that is not a record (lines after `limit` are not read), `OSError`
    if the file cannot be read. Cost: about 20 us and a kilobyte a line.
    """
    records: list[TraceRecord] = []
    try:
        with _open_lines(path) as lines:
            for text in islice(lines, limit):
                records.append(parse_record(text))  # noqa: PERF401  a comprehension would lose the line number
    except (PagePoolError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(source_name(path), len(records) + 1, str(error)) from error
    return records


def _make_token_ids(record: TraceRecord, id_numbers: Sequence[int], seed: Sequence[int]) -> Int32Array:
    """Prompt and answer, `[input_length + output_length]`: 512 ids in a row for each hash id, then random ones."""
    starts = np.array(id_numbers, dtype=np.int32) * np.int32(TOKENS_PER_ID)
    prompt = starts[:, None] + np.arange(TOKENS_PER_ID, dtype=np.int32)
    answer = np.random.default_rng(seed).integers(2**31, size=record.output_length, dtype=np.int32)
    return np.concatenate((prompt.reshape(-1)[: record.input_length], answer))


def make_requests(records: Sequence[TraceRecord], source: str = "trace", seed: int = 0) -> list[SimulatedRequest]:
    """One request for each record, in order, called by source and line number.

    Equal hash ids give equal tokens and different ones different tokens. Answers follow from `seed` (at least
    0), line and position alone. Raises `TraceError` if the trace has more than 4,194,304 distinct hash ids.
    Cost: O(hash ids); the tokens are made when a request is about to run.

    >>> record = TraceRecord(timestamp=0, input_length=513, output_length=1, hash_ids=(90, 17))
    >>> [first, again] = make_requests([record, record])
    >>> first.request_id, first.all_token_ids[-2:].tolist(), again.all_token_ids[-2:].tolist()
    ('trace:1', [511, 512], [511, 512])
    """
    numbers: dict[int, int] = {}
    requests = []
    for line, record in enumerate(records, start=1):
        id_numbers = [numbers.setdefault(hash_id, len(numbers)) for hash_id in record.hash_ids]
        if len(numbers) > MAX_IDS:
            raise TraceError(source, line, f"more than {MAX_IDS} distinct hash_ids")
        make_token_ids = partial(_make_token_ids, record, id_numbers, (seed, line))
        requests.append(SimulatedRequest(f"{source}:{line}", record.input_length, record.output_length, make_token_ids))
    return requests

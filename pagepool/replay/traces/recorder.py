"""Recording of a trace from a live engine, without text."""

import gzip
import hashlib
import json
import os
import secrets
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

from pagepool.arguments import MAX_SIZE, id_of, read_count, require_int, require_name
from pagepool.errors import ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.page_hashing import make_page_hasher
from pagepool.replay.shared.output import open_output
from pagepool.request import Request
from pagepool.specs import cdiv

ID_BITS = 63  # fits an int64; with a billion blocks 5 % of recordings have a collision


@dataclass(slots=True)
class Entry:
    """A started request; `line` is set when it ends. `session` has the fields of its session, if any."""

    request: Request | None
    timestamp: int
    input_length: int
    session: dict[str, str | int]
    line: bytes | None = None


class Recorder:
    """Recorder of an engine's requests as a trace, in the format of `pagepool.replay.traces.reader`.

    The engine calls `start` when it looks up a request for the first time, and `finish` when the request has ended. It may
    allocate with `CacheManager` or `RunningBatch`; the recorder only reads the requests' tokens and extra keys. Lines are in
    order of the starts, so the line of a request is held back until all earlier requests have ended.

    The trace has one id for each `block_size` tokens, by default a page: 63 bits of a digest under a random key, which is not
    stored. Equal prompts have equal ids within one recording, and different ids in different recordings. A request's
    `session_id` is recorded as a digest under the same key, with the pause since the session's last request ended, if any.
    Lengths and times (ms since the recorder was created) are recorded as they are.

    The file appears at `path` when the recorder is closed. A killed process leaves a `.part` file next to it; an exception
    within `with` leaves the trace recorded so far. A path ending in `.gz` is compressed.

    A replay one request at a time (`--max-num-seqs 1`), with as many pages of `block_size` tokens, has exactly the engine's
    hits, including pages of answers, if the requests ran one at a time. With concurrent requests this holds unless pages were
    evicted, requests preempted, or tokens shared before they were computed. The trace does not show whether a request took no
    hits because of ``prompt_logprobs``, or ended before its prompt was computed.

    Raises `OSError` if the file cannot be written; the recorder is then closed, and no file remains.

    >>> import tempfile
    >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
    >>> from pagepool.replay import Recorder, read_trace
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> request = EngineRequest("a", [1, 2, 3, 4, 5, 6])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(manager, f"{folder}/trace.jsonl.gz") as recorder:
    ...         recorder.start(request)
    ...         request.append_output_token_ids([7, 8, 9])
    ...         recorder.finish(request)
    ...     [record] = read_trace(f"{folder}/trace.jsonl.gz")
    >>> record.input_length, record.output_length, len(record.hash_ids), record.block_size
    (6, 3, 2, 4)
    """

    def __init__(self, manager: CacheManager, path: str | os.PathLike[str], *, block_size: int | None = None) -> None:
        """`block_size` is in tokens; by default the manager's hash page size, which is the page size unless groups differ. A
        larger one, such as 512, makes the file smaller and the replay inexact. Raise ArgumentError if it is not positive.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path: got {type(path).__name__}, allowed: a string or os.PathLike")
        size = manager.hash_page_size if block_size is None else block_size
        self._block_size = require_int("block_size", size, 1, MAX_SIZE)
        self._key = secrets.token_bytes(16)
        self._hasher = make_page_hasher("siphash128", self._block_size, self._key)
        self._running: dict[str, Entry] = {}
        self._entries: deque[Entry] = deque()
        self._ends: dict[str, int] = {}
        self._exit = ExitStack()
        self._file: BinaryIO | gzip.GzipFile = self._exit.enter_context(open_output(path))
        if os.fspath(path).endswith(".gz"):
            self._file = self._exit.enter_context(gzip.GzipFile("", "wb", fileobj=self._file, mtime=0))
        self._is_open = True
        self._start_time = time.monotonic()

    def start(self, request: Request) -> None:
        """Record arrival and prompt length. Do nothing for a running request, so that a preempted one may be started again, and
        nothing after `close`. Raise ArgumentError for an empty prompt, ArgumentTypeError unless `session_id` is a string. O(1);
        sessions are remembered until `close`.
        """
        request_id = id_of(request)
        if not self._is_open or request_id in self._running:
            return
        input_length = require_int("num_tokens", read_count(request, "num_tokens"), minimum=1)
        now = self._now()
        entry = Entry(request, now, input_length, self._describe_session(request, now))
        self._running[request_id] = entry
        self._entries.append(entry)

    def finish(self, request: Request) -> None:
        """Record the end: the request's tokens are now prompt and answer. `request` may be another object than at the start. Do
        nothing for a request that was not started. Raise ArgumentError if tokens were removed. O(tokens).
        """
        request_id = id_of(request)
        entry = self._running.get(request_id)
        if entry is None:
            return
        entry.line = self._make_line(entry, request)
        entry.request = None
        if entry.session:
            self._ends[str(entry.session["session_id"])] = self._now()
        del self._running[request_id]
        self._write_lines()

    def close(self) -> None:
        """Write running requests as they are, and move the file to its path. Idempotent. Raise the errors of `finish` for a
        running request whose tokens cannot be read: the file then lacks it and the running requests that started after it.
        """
        if not self._is_open:
            return
        try:
            for entry in self._running.values():
                entry.line = self._make_line(entry, cast(Request, entry.request))
        finally:
            self._entries = deque(entry for entry in self._entries if entry.line is not None)
            self._write_lines()
            self._close()

    def __enter__(self) -> Self:
        """Return the recorder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close, and keep the trace even if the block raised."""
        self.close()

    def _now(self) -> int:
        """Return the ms since the recorder was created."""
        return int((time.monotonic() - self._start_time) * 1000)

    def _describe_session(self, request: Request, now: int) -> dict[str, str | int]:
        session_id = require_name("session_id", getattr(request, "session_id", None))
        if session_id is None:
            return {}
        digest = hashlib.blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).hexdigest()
        end = self._ends.get(digest)
        return {"session_id": digest, **({} if end is None else {"pause": now - end})}

    def _make_line(self, entry: Entry, request: Request) -> bytes:
        num_tokens = require_int("num_tokens", read_count(request, "num_tokens"), minimum=entry.input_length)
        hashes = self._hasher.start(request)
        self._hasher.extend(hashes, request, num_tokens // self._block_size)
        ids = [hashes.chain[i] >> (128 - ID_BITS) for i in range(len(hashes.chain))]
        num_prompt_ids = cdiv(entry.input_length, self._block_size)
        if len(ids) < num_prompt_ids:
            ids.append(secrets.randbits(ID_BITS))  # partial block, not filled by an answer
        fields = {
            "timestamp": entry.timestamp,
            "input_length": entry.input_length,
            "output_length": num_tokens - entry.input_length,
            "hash_ids": ids[:num_prompt_ids],
            "output_hash_ids": ids[num_prompt_ids:],
            "block_size": self._block_size,
            **entry.session,
        }
        return json.dumps(fields).encode() + b"\n"

    def _write_lines(self) -> None:
        """Write the leading complete lines; discard the file if that fails."""
        try:
            while self._entries and self._entries[0].line is not None:
                self._file.write(self._entries[0].line)
                self._entries.popleft()
        except BaseException:
            self._close(*sys.exc_info())
            raise

    def _close(self, *error: Any) -> None:
        self._is_open = False
        self._running.clear()
        self._entries.clear()
        self._ends.clear()
        self._exit.__exit__(*(error or (None, None, None)))

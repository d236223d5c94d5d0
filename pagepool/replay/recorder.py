"""A trace of what a live engine is asked, without what was said."""

import gzip
import json
import os
import secrets
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

from pagepool.errors import ArgumentTypeError
from pagepool.hashing.algorithms import make_page_hasher
from pagepool.manager import CacheManager
from pagepool.replay.output import open_output
from pagepool.request import Request, id_of, read_count
from pagepool.specs import MAX_SIZE, cdiv, require_int

__all__ = ["Recorder"]

ID_BITS = 63  # an id fits what others read it into, and two blocks of a billion share one in 5 % of recordings


@dataclass(slots=True)
class Entry:
    """A request that has started; `line` once it has ended."""

    request: Request | None
    timestamp: int
    input_length: int
    line: bytes | None = None


class Recorder:
    """Writes a trace, as `pagepool.replay.trace` describes it, of the requests that an engine runs.

    The engine calls `start` when it looks a request up for the first time, and `finish` when the request has ended. It does not
    matter whether it allocates by `CacheManager` or `RunningBatch`: only tokens and extra keys of the requests are read. Lines
    are in the order of the starts, so that of a request is held back until all before it have ended.

    Of tokens the trace has nothing but one id for each block of `block_size`, by default the tokens of a page: 63 bits of a
    digest under a key that is random for each recording and kept nowhere. Equal prompts have equal ids within one recording,
    and unlike ids in two. Lengths and times (ms since the recorder was made) are as they are.

    The file is at `path` once the recorder is closed, and not before: a process that is killed leaves a `.part` beside it, one
    that raises within `with` a trace of what it had run. A path that ends in `.gz` is packed.

    Replayed one after another (`--max-num-seqs 1`) into as many pages of `block_size` tokens, requests that ran one after
    another hit exactly what they hit in the engine, answers' pages included. That holds as well for requests that ran together,
    as long as nothing was evicted or preempted, and none went on where another's tokens were not computed yet. Not told apart:
    a request that took no hits since it wanted ``prompt_logprobs``, and one that ended before its prompt was computed.

    `OSError` if the file cannot be written; the recorder is closed then, and there is no file.

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
        """`block_size` in tokens; None: as many as the manager hashes together, which is a page unless page sizes differ. With
        more, 512 for instance, the file is smaller, and a replay hits less or more. ArgumentError if it is not positive.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path: got {type(path).__name__}, allowed: a string or os.PathLike")
        size = manager.coordinator.hash_page_size if block_size is None else block_size
        self._block_size = require_int("block_size", size, 1, MAX_SIZE)
        self._hasher = make_page_hasher("siphash128", self._block_size, secrets.token_bytes(16))
        self._running: dict[str, Entry] = {}
        self._entries: deque[Entry] = deque()
        self._exit = ExitStack()
        self._file: BinaryIO | gzip.GzipFile = self._exit.enter_context(open_output(path))
        if os.fspath(path).endswith(".gz"):
            self._file = self._exit.enter_context(gzip.GzipFile("", "wb", fileobj=self._file, mtime=0))
        self._is_open = True
        self._start_time = time.monotonic()

    def start(self, request: Request) -> None:
        """Note a request's arrival and how long its prompt is. Nothing if it is running, so that one that was preempted may be
        started again, or after `close`. ArgumentError without tokens. O(1).
        """
        request_id = id_of(request)
        if not self._is_open or request_id in self._running:
            return
        input_length = require_int("num_tokens", read_count(request, "num_tokens"), minimum=1)
        entry = Entry(request, int((time.monotonic() - self._start_time) * 1000), input_length)
        self._running[request_id] = entry
        self._entries.append(entry)

    def finish(self, request: Request) -> None:
        """Note a request's end: its tokens now are prompt and answer. It need not be the same object as when it started.
        Nothing for one that was not started. ArgumentError for fewer tokens than it started with. About 0.5 us a block.
        """
        request_id = id_of(request)
        entry = self._running.get(request_id)
        if entry is None:
            return
        entry.line = self._make_line(entry, request)
        entry.request = None
        del self._running[request_id]
        self._write_lines()

    def close(self) -> None:
        """Write what still runs as it stands, and put the file at its path. Nothing the second time."""
        if not self._is_open:
            return
        for entry in self._running.values():
            entry.line = self._make_line(entry, cast(Request, entry.request))
        self._write_lines()
        self._close()

    def __enter__(self) -> Self:
        """The recorder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close, whatever was raised: what was recorded until then is kept."""
        self.close()

    def _make_line(self, entry: Entry, request: Request) -> bytes:
        num_tokens = require_int("num_tokens", read_count(request, "num_tokens"), minimum=entry.input_length)
        hashes = self._hasher.start(request)
        self._hasher.extend(hashes, request, num_tokens // self._block_size)
        ids = [hashes.chain[i] >> (128 - ID_BITS) for i in range(len(hashes.chain))]
        num_prompt_ids = cdiv(entry.input_length, self._block_size)
        if len(ids) < num_prompt_ids:
            ids.append(secrets.randbits(ID_BITS))  # of a block that the prompt has begun and no answer filled
        fields = {
            "timestamp": entry.timestamp,
            "input_length": entry.input_length,
            "output_length": num_tokens - entry.input_length,
            "hash_ids": ids[:num_prompt_ids],
            "output_hash_ids": ids[num_prompt_ids:],
            "block_size": self._block_size,
        }
        return json.dumps(fields).encode() + b"\n"

    def _write_lines(self) -> None:
        """Write the lines before which none is missing. Whatever is raised in the middle of it, the file is not to be kept."""
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
        self._exit.__exit__(*(error or (None, None, None)))

"""`Recorder`: what the calls of a manager and of its running batches did, recorded as they return."""

import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import wraps
from time import monotonic_ns
from typing import Any, Self

import numpy as np

from pagepool._core import Moves, StepResult
from pagepool.arguments import MAX_SIZE, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.request import Request
from pagepool.running_batch import RunningBatch
from pagepool.trace.timeline import BatchTracks, Process, Stay, show
from pagepool.trace.writer import MAX_RECORDS, TraceWriter

__all__ = ["Recorder"]

MIN_BYTES = 1 << 16
MIN_PAUSE = 5_000_000  # ns between two readings of the counters

Call = Callable[..., Any]


class Recorder:
    """Recorder of a manager's steps, requests and moves, as a trace for https://ui.perfetto.dev.

    While it is open, the recorder replaces methods of the manager and of its running batches, also of later ones, by recording
    methods; nothing else of these objects changes. Calls of a bound method read before are not recorded. A recording method
    only adds to a list: a thread makes the events and writes them.

    The trace has a process for the manager and one for each batch:

    - ``steps``: a slice for each step, from its plan until it was settled or failed, or until the next plan, which implies that
      it ran. Steps ahead have tracks side by side. ``plan_ns`` and ``settle_ns`` are the nanoseconds of these calls.
    - ``row 0`` and so on: a slice for each stay, with its tokens and cached tokens, and at its end the tokens of the row.
      ``request 0`` and so on: the same for requests without rows, by request id, each on the first free track.
    - a mark for each refusal: the pages needed and free, and the pool. `CacheManager.allocate_slots` says only what
      was free. Also for errors, by their type, for external tokens, and when the cache was reset.
    - ``moves``: a slice from `take_moves` until `complete` or `fail`, with the numbers of loads and saves.
    - counters by pool, at most once in 5 ms: free, held and cached pages, and pages taken and evicted since the recorder was
      made. A cached page is free or held.

    Times are those of the monotonic clock. The file has request ids, rows and numbers, and no tokens, salts, keys or sessions.

    The file is complete JSON at any time, so a killed process leaves a trace too, and a running one can be looked at. It has at
    most `max_bytes`; then nothing more is written. If the thread cannot keep up, records are dropped: ``num_dropped`` counts
    them and events that found no room in the file, and a mark ``dropped`` says how many are missing. An `OSError` of the thread
    ends the writing with a warning in the log; the engine goes on, and `close` raises the error. The recorder closes at exit.
    In a forked process it does nothing.

    >>> import json, tempfile
    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
    >>> from pagepool.trace import Recorder
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
    >>> batch = RunningBatch(manager, table)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(manager, f"{folder}/trace.json"):
    ...         _ = batch.admit(0, [1, 2, 3, 4, 5])
    ...         _ = batch.step([0], [6])
    ...         batch.release([0])
    ...     with open(f"{folder}/trace.json") as file:
    ...         events = json.load(file)
    >>> [(event["name"], event["ph"]) for event in events if event["ph"] in "BX"]
    [('request', 'B'), ('step', 'X')]
    """

    def __init__(self, manager: CacheManager, path: str | os.PathLike[str], *, max_bytes: int = 1 << 29) -> None:
        """Create the file at `path`, or empty it, and begin. Raise ArgumentError for fewer than 65,536 bytes, and for a manager
        that another recorder traces; OSError if the file cannot be written.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path: got {type(path).__name__}, allowed: a string or os.PathLike")
        max_bytes = require_int("max_bytes", max_bytes, MIN_BYTES, MAX_SIZE)
        registry, self._manager = manager.registry, weakref.ref(manager)
        self._pools, self._tier, self._held = manager.pools, manager.host_tier, registry.held
        self._replaced: list[tuple[weakref.ref[Any], str, Call]] = []
        self._num_batches, self._next_reading, self._process = 0, 0, os.getpid()
        self._before = {name: pool.count() for name, pool in self._pools.items()}
        self._known = set(self._held)  # ids of requests with a stay in the trace
        with registry.lock:
            if registry.watcher is not None:
                raise ArgumentError("manager: got one that another recorder traces, allowed: one that none does")
            self._writer = TraceWriter(path, max_bytes)
            self._finalizer = weakref.finalize(self, self._writer.close)
            self._tracks, self._records = self._writer.timeline.manager, self._writer.records
            self._read_counters(monotonic_ns())
            self._trace_manager(manager)
            registry.watch_batches(self._trace_batch)
        self._is_open = True

    @property
    def num_dropped(self) -> int:
        """Records and events that are not in the file."""
        return self._writer.num_dropped

    def close(self) -> None:
        """Give manager and batches their own calls back, and end the file. Do nothing when closed, and in a forked process.
        Raise the error that ended the writing, if there was one.
        """
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        manager = self._manager()
        if manager is not None:
            manager.registry.watch_batches(None)
        for reference, name, recorded in self._replaced:
            owner = reference()
            if owner is not None and vars(owner).get(name) is recorded:
                delattr(owner, name)
        self._read_counters(monotonic_ns())
        self._writer.close()
        self._finalizer.detach()
        if self._writer.error is not None:
            raise self._writer.error

    def __enter__(self) -> Self:
        """Return the recorder."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Close. An error of the block is raised rather than one of the writing, which is in the log."""
        with suppress(Exception) if error_type is not None else nullcontext():
            self.close()

    def _put(self, time: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Add a record, and from time to time the counters."""
        self._add(function, args)
        if time >= self._next_reading:
            self._read_counters(time)

    def _add(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Add a record, or drop it if too many wait."""
        if len(self._records) < MAX_RECORDS:
            self._records.append((function, *args))
        else:
            self._writer.drop(1)

    def _read_counters(self, time: int) -> None:
        """Record the pages of each pool. O(pools)."""
        self._next_reading = time + MIN_PAUSE
        counts: dict[str, dict[str, int]] = {}
        for name, pool in self._pools.items():
            now, before = pool.count(), self._before[name]
            states = {"free": now.num_free_pages, "held": now.num_held_pages, "cached": now.num_cached_pages}
            changes = {
                "taken": now.num_allocated_pages - before.num_allocated_pages,
                "evicted": now.num_evicted_pages - before.num_evicted_pages,
            }
            counts |= {f"pages of {name}": states, f"changes of {name}": changes}
        if self._tier is not None:
            tier = self._tier.stats()
            counts["pages of the host"] = {"free": tier.num_free_pages, "cached": tier.num_cached_pages}
        self._add(self._tracks.count, (time, counts))

    # Calls that are recorded.

    def _replace(self, owner: Any, tracks: Process, name: str, note: Callable[..., None]) -> None:
        """Let a call of `owner` also call `note`, with the time of its beginning, its result and its arguments."""
        function, reference = getattr(type(owner), name), weakref.ref(owner)

        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            begin = monotonic_ns()
            try:
                result = function(reference(), *args, **kwargs)
            except Exception as error:
                self._note_error(tracks, name, error)
                raise
            note(begin, result, *args, **kwargs)
            return result

        self._install(owner, name, recorded)

    def _install(self, owner: Any, name: str, recorded: Call) -> None:
        setattr(owner, name, recorded)
        self._replaced.append((weakref.ref(owner), name, recorded))

    def _note_error(self, tracks: Process, name: str, error: Exception) -> None:
        """Mark an error of a call, by its type: its text may name more than numbers."""
        if os.getpid() == self._process:
            time = monotonic_ns()
            self._put(time, tracks.mark, (time, "error", {"call": name, "error": type(error).__name__}))

    def _trace_manager(self, manager: CacheManager) -> None:
        tracks, put = self._tracks, self._put
        for request_id, held in self._held.items():
            stay = Stay(None, held.num_room_tokens, 0, began_before=True)
            put(monotonic_ns(), tracks.admit, (monotonic_ns(), request_id, stay))

        def note_fork(begin: int, pages: object, request: Request, new_request: Request) -> None:
            if pages is not None:
                self._known.add(new_request.request_id)
                stay = Stay(None, new_request.num_tokens, 0, forked_from=show(request.request_id))
                put(begin, tracks.admit, (begin, new_request.request_id, stay))

        def note_free(begin: int, _: None, request: Request, **__: object) -> None:
            self._end_stay(begin, request, "freed")

        def note_loss(begin: int, _: object, request: Request, *__: object, **___: object) -> None:
            if request.request_id not in self._held:
                self._end_stay(begin, request, "lost")

        def note_reset(begin: int, is_reset: bool) -> None:
            if is_reset:
                put(begin, tracks.mark, (begin, "reset", {}))

        def note_complete(begin: int, _: None, number: int) -> None:
            put(begin, tracks.end_moves, (begin, number, {"end": "completed"}))

        def note_fail(begin: int, _: object, number: int, *, saves: Any = (), loads: Any = ()) -> None:
            args = {"end": "failed", "failed_saves": len(saves), "failed_loads": len(loads)}
            put(begin, tracks.end_moves, (begin, number, args))

        self._trace_slots(manager)
        notes: dict[str, Call] = {
            "fork": note_fork,
            "free": note_free,
            "fail_external": note_loss,
            "find_wrong_token": note_loss,
        }
        notes |= {"reset_prefix_cache": note_reset}
        if self._tier is not None:
            notes |= {"take_moves": self._note_moves, "complete": note_complete, "fail": note_fail}
        for name, note in notes.items():
            self._replace(manager, tracks, name, note)

    def _note_moves(self, begin: int, moves: Moves) -> None:
        if moves.number:
            args = begin, moves.number, len(moves.loads), len(moves.saves)
            self._put(begin, self._tracks.take_moves, args)

    def _end_stay(self, time: int, request: Request, end: str) -> None:
        """Record that a request holds no pages any more."""
        if request.request_id in self._known:
            self._known.discard(request.request_id)
            args = {"end": end, "tokens": request.num_tokens}
            self._put(time, self._tracks.free, (time, request.request_id, args))

    def _trace_slots(self, manager: CacheManager) -> None:
        """Record `allocate_slots`. An engine calls it for each request in each step, and most calls add no record."""
        function: Call = type(manager).allocate_slots
        reference = weakref.ref(manager)
        tracks, known, held = self._tracks, self._known, self._held

        def note(time: int, pages: object, request: Request, num_new_tokens: int, num_hit_tokens: int, options: Any) -> None:
            if pages is None:
                free = {name: pool.get_num_free_pages() for name, pool in self._pools.items()}
                self._put(time, tracks.refuse_request, (time, request.request_id, free, int(num_new_tokens)))
            elif request.request_id in held:
                known.add(request.request_id)
                num_external = int(options.get("num_external_computed_tokens", 0))
                stay = Stay(None, request.num_tokens, int(num_hit_tokens), num_external)
                self._put(time, tracks.admit, (time, request.request_id, stay))

        @wraps(function)
        def recorded(request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, *args: Any, **kwargs: Any) -> Any:
            try:
                pages = function(reference(), request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)
            except Exception as error:
                self._note_error(tracks, "allocate_slots", error)
                raise
            time = monotonic_ns()
            if pages is None or request.request_id not in known:
                note(time, pages, request, num_new_tokens, num_new_computed_tokens, kwargs)
            elif time >= self._next_reading:
                self._read_counters(time)
            return pages

        self._install(manager, "allocate_slots", recorded)

    def _trace_batch(self, batch: RunningBatch) -> None:
        """Record the calls of a running batch."""
        tracks = BatchTracks(self._writer.timeline, self._num_batches, batch.max_steps_ahead)
        self._num_batches += 1
        reference, put = weakref.ref(batch), self._put

        def stay_of(row: int, **options: Any) -> Stay:
            rows: Any = reference()
            num_tokens, num_external = int(rows.num_tokens[row]), int(rows.num_external_tokens[row])
            return Stay(int(rows.stays[row]), num_tokens, int(rows.num_cached_tokens[row]), num_external, **options)

        def note_admit(begin: int, num_hits: int | None, row: int, *_: object, **options: Any) -> None:
            end = monotonic_ns()
            if num_hits is None:
                rows: Any = reference()
                refusal = rows.refusal
                if refusal is not None:
                    put(end, tracks.refuse, (end, int(row), refusal))
                return
            stay = stay_of(row)
            put(end, tracks.admit, (end, int(row), stay))
            step = options.get("step")
            if step is not None and not stay.num_external_tokens:
                put(end, tracks.launch, (begin, end, step.number, 1))

        def note_fork(begin: int, _: None, row: int, targets: Any) -> None:
            for target in targets:
                put(begin, tracks.admit, (begin, int(target), stay_of(target, forked_from=int(row))))

        def note_exchange(begin: int, _: None, src: int, tgt: int) -> None:
            if src != tgt:
                put(begin, tracks.exchange, (begin, int(src), int(tgt)))

        def note_arrival(begin: int, _: object, row: int, num_tokens: int) -> None:
            put(begin, tracks.mark_row, (begin, int(row), "arrived", {"tokens": int(num_tokens)}))

        def note_rewind(begin: int, result: tuple[list[int], list[int]], _: object) -> None:
            rewound, lost = result
            for row in rewound:
                put(begin, tracks.mark_row, (begin, row, "rewound", {}))
            put(begin, tracks.lose, (begin, lost))

        for row in np.flatnonzero(batch.is_admitted).tolist():
            put(monotonic_ns(), tracks.admit, (monotonic_ns(), row, stay_of(row, began_before=True)))
        self._trace_plans(batch, tracks)
        self._trace_settle(batch, tracks)
        self._trace_release(batch, tracks)
        notes: dict[str, Call] = {"admit": note_admit, "fork": note_fork, "move_row": note_exchange, "swap_row": note_exchange}
        notes |= {"commit_external": note_arrival, "fail_external": note_arrival, "rewind": note_rewind}
        if self._tier is not None:
            notes["take_moves"] = self._note_moves
        for name, note in notes.items():
            self._replace(batch, tracks, name, note)

    def _trace_plans(self, batch: RunningBatch, tracks: BatchTracks) -> None:
        """Record `plan` and `step`. Each step calls one of them, and `settle`, so they add the usual record themselves."""
        reference, records, launch = weakref.ref(batch), self._records, tracks.launch
        plan_rows: Call = type(batch).plan
        step_rows: Call = type(batch).step

        def note(begin: int, end: int, step: StepResult, rows: Any) -> None:
            refusal = step.refusal
            if step.num_grown:
                self._put(end, launch, (begin, end, step.number, step.num_grown))
            if refusal is not None:
                row = int(rows[step.num_grown]) if hasattr(rows, "__getitem__") else None
                self._put(end, tracks.refuse, (end, row, refusal))

        @wraps(plan_rows)
        def plan(rows: Any, num_tokens: Any = 1, num_drafts: Any = 0, step: StepResult | None = None) -> StepResult:
            begin = monotonic_ns()
            try:
                result: StepResult = plan_rows(reference(), rows, num_tokens, num_drafts, step)
            except Exception as error:
                self._note_error(tracks, "plan", error)
                raise
            end, num_rows = monotonic_ns(), result.num_grown
            if num_rows and result.refusal is None and end < self._next_reading and len(records) < MAX_RECORDS:
                records.append((launch, begin, end, result.number, num_rows))
            else:
                note(begin, end, result, rows)
            return result

        @wraps(step_rows)
        def step(rows: Any, token_ids: Any, step: StepResult | None = None) -> StepResult:
            begin = monotonic_ns()
            try:
                result: StepResult = step_rows(reference(), rows, token_ids, step)
            except Exception as error:
                self._note_error(tracks, "step", error)
                raise
            end, num_rows = monotonic_ns(), result.num_grown
            if num_rows and result.refusal is None and end < self._next_reading and len(records) < MAX_RECORDS:
                records.append((launch, begin, end, result.number, num_rows))
            else:
                note(begin, end, result, rows)
            return result

        self._install(batch, "plan", plan)
        self._install(batch, "step", step)

    def _trace_settle(self, batch: RunningBatch, tracks: BatchTracks) -> None:
        function: Call = type(batch).settle
        reference, records, settle = weakref.ref(batch), self._records, tracks.settle

        @wraps(function)
        def recorded(step: StepResult, token_ids: Any = None, counts: Any = None, **options: Any) -> Any:
            begin = monotonic_ns()
            try:
                rows = function(reference(), step, token_ids, counts, **options)
            except Exception as error:
                self._note_error(tracks, "settle", error)
                raise
            end, number = monotonic_ns(), step.number
            if number and not options and end < self._next_reading and len(records) < MAX_RECORDS:
                records.append((settle, begin, end, number, None))
            elif number:
                self._put(end, settle, (begin, end, number, rows.tolist() if options.get("failed") else None))
            return rows

        self._install(batch, "settle", recorded)

    def _trace_release(self, batch: RunningBatch, tracks: BatchTracks) -> None:
        function: Call = type(batch).release
        reference, num_tokens = weakref.ref(batch), batch.num_tokens

        @wraps(function)
        def recorded(rows: Any, *args: Any, **kwargs: Any) -> None:
            rows = list(rows) if hasattr(rows, "__next__") else rows
            lengths: list[int] = []
            with suppress(Exception):  # the call says what is wrong with the rows
                lengths = num_tokens[np.asarray(rows, np.int32)].tolist()
            try:
                function(reference(), rows, *args, **kwargs)
            except Exception as error:
                self._note_error(tracks, "release", error)
                raise
            time = monotonic_ns()
            self._put(time, tracks.release, (time, [int(row) for row in rows], lengths))

        self._install(batch, "release", recorded)

"""The batches of one worker in order: which are applied, which were lost, and when a worker was replaced."""

from dataclasses import dataclass, replace

from pagepool._core import time_of_batch
from pagepool.errors import EventBatchError
from pagepool.router.index import PrefixIndex


@dataclass
class StreamStats:
    """Counts of a worker's batches.

    ``is_complete``: whether, according to its batches, the index has everything the worker has cached. ``num_lost``: batches
    neither received nor replayed. ``num_bad``: refused batches. ``num_restarts``: replacements of the worker. ``num_replays``:
    requests for batches. ``num_skipped``: events in applied batches that the index left out, wholly or in part.
    """

    is_complete: bool = False
    num_batches: int = 0
    num_lost: int = 0
    num_bad: int = 0
    num_restarts: int = 0
    num_replays: int = 0
    num_skipped: int = 0


class WorkerStream:
    """The stream of a worker's batches, each applied to an index once and in order.

    Batches are numbered from 0 on. A batch whose number is not above the last one is a repetition if its time is not newer;
    otherwise it comes from a new worker. Unless ``wanted`` is None, the owner asks the worker for all batches from this number
    on, and passes them to `replay` and `end_replay`. They begin with the last known batch, which shows whether the
    worker is a new one.

    With a replay endpoint, a published batch is applied only if it is the next one: any other may be a late one from a replaced
    worker, so a replay is requested first.
    """

    def __init__(self, index: PrefixIndex, worker: int, has_replay: bool) -> None:
        """Start without batches. Without a replay endpoint lost batches stay lost."""
        self._index = index
        self._worker = worker
        self._has_replay = has_replay
        self._last: int | None = None
        self._seconds = 0.0
        self._trigger = -1  # number of the last batch that caused a replay
        self._expected: int | None = None  # number after `_trigger`, once a replay was empty
        self._is_doubted = self._is_late = self._is_whole = self._has_replayed = False
        self._stats = StreamStats()
        self._num_skipped_before = index.count_skipped(worker)
        self.wanted: int | None = 0 if has_replay else None

    @property
    def stats(self) -> StreamStats:
        """A copy of the counts."""
        num_skipped = self._index.count_skipped(self._worker) - self._num_skipped_before
        return replace(self._stats, is_complete=self._is_whole and self.wanted is None, num_skipped=num_skipped)

    def receive(self, number: int, payload: bytes) -> None:
        """Process a published batch. With a replay endpoint, one that does not follow the last is not applied but replayed."""
        seconds = time_of_batch(payload)
        if self._last is not None and number <= self._last:
            is_newer = seconds > self._seconds
            if not is_newer and (number < self._last or seconds == self._seconds or not self._has_replay):
                return
            if is_newer and (number == 0 or number == self._expected or not self._has_replay):
                self._restart()
        is_next = number == (0 if self._last is None else self._last + 1) and (seconds >= self._seconds or not seconds)
        if is_next or not self._has_replay:
            self._apply(number, payload)
        elif number == self._expected:
            self._apply(number, payload)
            self._seconds = 0.0  # any batch now counts as newer
        else:
            self.wanted, self._trigger = self._last or 0, number

    def replay(self, number: int, payload: bytes) -> None:
        """Process a replayed batch."""
        self._has_replayed = True
        seconds = time_of_batch(payload)
        if self._last is not None and number <= self._last:
            if seconds == self._seconds if number == self._last else seconds <= self._seconds:
                return
            self._restart()
            self._is_late = number > 0  # ask a new worker for its first batches too
        if not self._is_late:
            self._apply(number, payload)

    def end_replay(self) -> None:
        """Note that a replay has ended. If even one from the first batch on was empty, the worker keeps no batches: the batch
        after the one that showed the gap is then applied without another replay, and missing batches count as lost.
        """
        self._stats.num_replays += 1
        has_replayed, self._has_replayed = self._has_replayed, False
        if not has_replayed and self.wanted:  # a new worker may not have reached this number yet
            self.wanted = 0
            return
        self._expected = None if has_replayed else self._trigger + 1
        self.wanted = (self._last or 0) if self._is_doubted or self._is_late else None
        self._is_doubted = self._is_late = False

    def doubt(self) -> None:
        """Note that the connection was lost. The next connection may lead to a new worker whose numbers happen to continue."""
        if self.wanted is not None:
            self._is_doubted = True
        elif self._has_replay:
            self.wanted = self._last or 0

    def forget(self) -> None:
        """Drop the worker's entries, and forget its batches."""
        self._index.remove_worker(self._worker)
        self._last, self._seconds, self._trigger = None, 0.0, -1
        self._is_whole = False

    def _restart(self) -> None:
        self.forget()
        self._stats.num_restarts += 1

    def _apply(self, number: int, payload: bytes) -> None:
        """Apply a batch. If it is refused, its contents are unknown, so drop the worker's entries."""
        self._stats.num_batches += 1
        first = 0 if self._last is None else self._last + 1
        num_lost = number - first
        if num_lost and self._last is not None:
            self._index.note_loss(self._worker)
        try:
            is_start = self._index.apply(self._worker, payload)
        except EventBatchError:
            self.forget()
            self._stats.num_bad += 1
        else:
            self._stats.num_lost += 0 if is_start else num_lost
            self._is_whole = is_start or number == 0 or (self._is_whole and not num_lost)
        self._last, self._seconds, self._expected = number, time_of_batch(payload), None

"""The batches of one worker in their order: what is applied, what was lost, and when a worker was replaced."""

from dataclasses import dataclass, replace

from pagepool._core import time_of_batch
from pagepool.errors import EventBatchError
from pagepool.router.index import PrefixIndex

__all__ = ["StreamStats", "WorkerStream"]


@dataclass
class StreamStats:
    """What became of the batches of a worker.

    ``is_complete``: whether the index has all that the worker has cached, as far as its batches tell. ``num_lost``: batches
    that neither came nor were replayed. ``num_bad``: batches that were refused. ``num_restarts``: times that the worker was
    replaced. ``num_replays``: times that batches were asked for.
    """

    is_complete: bool = False
    num_batches: int = 0
    num_lost: int = 0
    num_bad: int = 0
    num_restarts: int = 0
    num_replays: int = 0


class WorkerStream:
    """Applies the batches of a worker to an index, each once and in order.

    Batches are numbered from 0 on. One with a number that is not above the last is a repetition if it is not newer, and comes
    from a new worker otherwise. The owner asks the worker for all batches from ``wanted`` on unless that is None, and passes
    them to `replay` and `end_replay`; from the last known batch on, so that a new worker shows here too.

    With a replay nothing but the next batch is applied when it is published: what does not follow may come late, from a worker
    that was replaced. What the worker itself replays decides.
    """

    def __init__(self, index: PrefixIndex, worker: int, has_replay: bool) -> None:
        """Without a replay lost batches stay lost."""
        self._index = index
        self._worker = worker
        self._has_replay = has_replay
        self._last: int | None = None
        self._seconds = 0.0
        self._trigger = -1  # the last batch that asked for a replay
        self._expected: int | None = None  # the batch behind it, once the worker has replayed nothing
        self._is_doubted = self._is_late = self._is_whole = self._has_replayed = False
        self._stats = StreamStats()
        self.wanted: int | None = 0 if has_replay else None

    @property
    def stats(self) -> StreamStats:
        """A copy."""
        return replace(self._stats, is_complete=self._is_whole and self.wanted is None)

    def receive(self, number: int, payload: bytes) -> None:
        """Process a published batch. One that does not follow the last is not applied: it will be replayed."""
        seconds = time_of_batch(payload)
        if self._last is not None and number <= self._last:
            if seconds <= self._seconds and (number < self._last or seconds == self._seconds or not self._has_replay):
                return
            if number == 0 or number == self._expected or not self._has_replay:
                self._restart()
        is_next = number == (0 if self._last is None else self._last + 1) and (seconds >= self._seconds or not seconds)
        if is_next or not self._has_replay:
            self._apply(number, payload)
        elif number == self._expected:
            self._apply(number, payload)
            self._seconds = 0.0  # whatever the worker says next is newer
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
            self._is_late = number > 0  # a new worker has to be asked for its first batches too
        if not self._is_late:
            self._apply(number, payload)

    def end_replay(self) -> None:
        """Note that a replay has ended. If it had no batch, not even from the first one on, the worker keeps none: the batch
        behind the one that showed the gap is applied then without a further replay, and what is missing counts as lost.
        """
        self._stats.num_replays += 1
        has_replayed, self._has_replayed = self._has_replayed, False
        if not has_replayed and self.wanted:  # a new worker has no batch of such a number yet
            self.wanted = 0
            return
        self._expected = None if has_replayed else self._trigger + 1
        self.wanted = (self._last or 0) if self._is_doubted or self._is_late else None
        self._is_doubted = self._is_late = False

    def doubt(self) -> None:
        """Note that the connection was lost. A new worker may be behind the next one, with numbers that happen to go on."""
        if self.wanted is not None:
            self._is_doubted = True
        elif self._has_replay:
            self.wanted = self._last or 0

    def forget(self) -> None:
        """Forget what the worker has."""
        self._index.remove_worker(self._worker)
        self._last, self._seconds, self._trigger = None, 0.0, -1
        self._is_whole = False

    def _restart(self) -> None:
        self.forget()
        self._stats.num_restarts += 1

    def _apply(self, number: int, payload: bytes) -> None:
        """Apply a batch. Of one that is refused nothing is known, so the worker's entries are dropped."""
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

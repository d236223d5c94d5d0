"""Small ints for the extra keys of requests."""

from pagepool._core import EntryJournal
from pagepool.hashing import RequestExtraKeys

__all__ = ["Contexts"]

MIN_CONTEXTS = 64


class Contexts:
    """Maps small ints to the extra keys of requests. Ints without pages and rows are reused."""

    def __init__(self, journal: EntryJournal) -> None:
        """`journal` counts the pages and rows of each int."""
        self._journal = journal
        self._values: dict[int, RequestExtraKeys] = {}
        self._contexts: dict[RequestExtraKeys, int] = {}
        self._unused: list[int] = []
        self._num_at_sweep = MIN_CONTEXTS

    def hold(self, value: RequestExtraKeys) -> int:
        """Return the int for `value`, valid until `release`. Not thread-safe. Amortised O(1)."""
        context = self._contexts.get(value)
        if context is None:
            return self._add(value)
        self._journal.hold_context(context)
        return context

    def release(self, context: int) -> None:
        """Release an int. It is reused when no page or row has it any more."""
        self._journal.release_context(context)

    def _add(self, value: RequestExtraKeys) -> int:
        """Add a value. An interrupt may lose an int, and cannot give one to two values."""
        self._sweep()
        if self._unused:
            context = self._unused.pop()
            self._journal.hold_context(context)
        else:
            context = self._journal.add_context()
        self._values[context] = value
        self._contexts[value] = context
        return context

    def _sweep(self) -> None:
        """Drop unused values once their number has doubled since the last sweep."""
        kept = self._journal.kept_contexts() if len(self._values) >= self._num_at_sweep else None
        if kept is not None:
            unused = [context for context in self._values if context not in kept]
            for context in unused:
                self._contexts.pop(self._values.pop(context), None)
            self._unused += unused
            self._num_at_sweep = max(MIN_CONTEXTS, 2 * len(self._values))

    def __getitem__(self, context: int) -> RequestExtraKeys:
        """Return the value of an int."""
        return self._values[context]

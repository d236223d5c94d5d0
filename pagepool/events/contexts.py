"""Small ints that stand for the extra keys of requests."""

from pagepool._core import PageStore
from pagepool.hashing import RequestExtraKeys

__all__ = ["Contexts"]

MIN_CONTEXTS = 64


class Contexts:
    """Small ints that stand for the extra keys of requests. Those that no page and no row has any more are used again."""

    def __init__(self, store: PageStore) -> None:
        """`store` counts who has which."""
        self._store = store
        self._values: dict[int, RequestExtraKeys] = {}
        self._contexts: dict[RequestExtraKeys, int] = {}
        self._unused: list[int] = []
        self._num_at_sweep = MIN_CONTEXTS

    def hold(self, value: RequestExtraKeys) -> int:
        """The int for `value`, kept until `PageStore.release_context`. Not for two threads at once. Amortised O(1)."""
        context = self._contexts.get(value)
        if context is None:
            return self._add(value)
        self._store.hold_context(context)
        return context

    def _add(self, value: RequestExtraKeys) -> int:
        """An interrupt may lose an int, but cannot give one to two values."""
        self._sweep()
        if self._unused:
            context = self._unused.pop()
            self._store.hold_context(context)
        else:
            context = self._store.add_context()
        self._values[context] = value
        self._contexts[value] = context
        return context

    def _sweep(self) -> None:
        """Forget what nobody has, once there is twice as much as was left the last time."""
        kept = self._store.kept_contexts() if len(self._values) >= self._num_at_sweep else None
        if kept is not None:
            unused = [context for context in self._values if context not in kept]
            for context in unused:
                self._contexts.pop(self._values.pop(context), None)
            self._unused += unused
            self._num_at_sweep = max(MIN_CONTEXTS, 2 * len(self._values))

    def __getitem__(self, context: int) -> RequestExtraKeys:
        """What an int stands for."""
        return self._values[context]

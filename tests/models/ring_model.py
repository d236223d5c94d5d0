"""The rings of a row, as a device keeps them."""

from __future__ import annotations

from collections.abc import Iterable


class Rings:
    """The token in each slot of the rings of a row, each of a capacity and a period in tokens."""

    def __init__(self, sizes: Iterable[tuple[int, int]] = ()) -> None:
        self.rings: list[tuple[int, int, dict[int, int]]] = [(capacity, period, {}) for capacity, period in sizes]
        self.num_written = 0

    def begin(self, num_tokens: int) -> None:
        """Begin behind some tokens, with nothing in the slots."""
        self.num_written = num_tokens
        for _, _, tokens in self.rings:
            tokens.clear()

    def write(self, num_planned: int) -> None:
        """Write the tokens up to the planned ones. Where a row went back, it writes again from there."""
        for capacity, _, tokens in self.rings:
            tokens.update({token % capacity: token for token in range(self.num_written, num_planned)})
        self.num_written = num_planned

    def have(self, num_tokens: int) -> bool:
        """Whether each ring has all that the token behind some needs: those since the last multiple of its period."""
        return all(
            tokens.get(token % capacity) == token
            for capacity, period, tokens in self.rings
            for token in range(num_tokens // period * period, num_tokens)
        )

"""Drafts by prompt lookup: what followed the last tokens of a request where they were before."""

from collections.abc import Sequence

__all__ = ["propose"]

MAX_LENGTH = 3


def propose(token_ids: Sequence[int], num_drafts: int) -> list[int]:
    """Return up to `num_drafts` tokens that followed the last earlier place of the request's last tokens, three of them if
    these were there before, else two or one.
    """
    known = list(token_ids)
    for length in range(min(MAX_LENGTH, len(known) - 1), 0, -1):
        for start in range(len(known) - length - 1, -1, -1):
            if known[start : start + length] == known[-length:]:
                return known[start + length :][:num_drafts]
    return []

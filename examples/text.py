"""Characters as tokens, and default questions."""

import string
from collections.abc import Sequence

__all__ = ["ALPHABET", "FOLLOW_UP", "PROMPTS", "decode", "encode"]

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Each character is a token."""

SYSTEM_PROMPT = "You keep the pages of a cache. Answer briefly. "
QUESTIONS = (
    "Who owns page 7?",
    "Who owns page 7, and who did before?",
    "Which prefix is the longest that is cached?",
    "How many pages does a prompt of 8,192 tokens need?",
    "What is evicted first?",
    "Who gives way when pages are short, the oldest or the newest?",
    "Is page 0 ever handed out?",
    "What does a step cost?",
)
PROMPTS = [SYSTEM_PROMPT + question for question in QUESTIONS]
FOLLOW_UP = " And why?"
"""The question of the next turn of a chat."""


def encode(text: str) -> list[int]:
    """Return the token ids of a text. Raise ValueError for a character outside the alphabet."""
    wrong = [character for character in text if character not in ALPHABET]
    if wrong:
        raise ValueError(f"text: got {wrong[0]!r}, allowed: printable ASCII and newline")
    return [ALPHABET.index(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of token ids."""
    return "".join(ALPHABET[token_id] for token_id in token_ids)

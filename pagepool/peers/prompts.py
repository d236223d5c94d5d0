"""Messages about prompts that one engine computes for another one. Needs the extra ``pagepool[peers]``."""

from typing import Any

import msgspec

from pagepool.request import LoraId, Salt

VERSION = 1
NUM_NAME_BYTES = 16
MAX_TOKENS = 1 << 20
"""Most tokens of a prompt."""
TOKEN_BYTES = 4
MAX_QUESTION_BYTES = TOKEN_BYTES * MAX_TOKENS + (1 << 16)
NUM_IN_PAIR = 2


class Wanted(msgspec.Struct, array_like=True, frozen=True, tag="wanted", forbid_unknown_fields=True):
    """A prompt to be computed."""

    version: int
    prompt: bytes  # a random name
    token_ids: bytes  # int32, little-endian
    num_hit_tokens: int  # tokens whose pages the asking engine has
    cache_salt: Any  # `read_salt` checks it
    lora_id: Any  # `read_lora_id` checks it
    session_id: str | None
    tenant: str | None


class More(msgspec.Struct, array_like=True, frozen=True, tag="more", forbid_unknown_fields=True):
    """The question for the next chunk of a prompt, once the first ones have arrived."""

    prompt: bytes
    num_chunks: int


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="ended", forbid_unknown_fields=True):
    """The asking engine needs no more of a prompt."""

    prompt: bytes


class Chunk(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Pages that can be pulled."""

    address: str  # the link's
    number: int  # the offer's
    num_tokens: int  # tokens of the prompt that are computed by now


class News(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to all questions. Without a chunk it is a sign of life."""

    chunk: Chunk | None = None


Question = Wanted | More | Ended
encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_news = msgspec.msgpack.Decoder(News).decode


def read_salt(value: object) -> Salt | None:
    """Return a salt as it was sent. Raise ValueError for other types."""
    if value is None or (isinstance(value, int | str | bytes) and not isinstance(value, bool)):
        return value
    raise ValueError(f"got a salt or adapter of {type(value).__name__}")


def read_lora_id(value: object) -> LoraId | None:
    """Return the id of an adapter as it was sent: a salt, or a pair of salts. Raise ValueError for other types."""
    if not isinstance(value, list):
        return read_salt(value)
    pair = [read_salt(each) for each in value]
    if len(pair) != NUM_IN_PAIR or None in pair:
        raise ValueError(f"got an adapter of {len(pair)} parts")
    return pair[0], pair[1]  # type: ignore[return-value] # neither is None

"""The lengths of a line, from its fields: under other names, inside a `usage`, or with cached tokens counted apart.

Some services count the cached tokens of a prompt in its length (OpenAI, Gemini, DeepSeek, vLLM, SGLang), others apart from it
(Anthropic, Bedrock). A length that can be read in two ways is refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from pagepool.errors import ArgumentError, shown

SEPARATORS = re.compile(r"[\W_]+")
MAX_DEPTH = 5


@lru_cache(maxsize=10_000)
def plain_name(name: str) -> str:
    """Return a name in lower case, without separators.

    >>> plain_name("Request tokens"), plain_name("promptTokenCount"), plain_name("input_length")
    ('requesttokens', 'prompttokencount', 'inputlength')
    """
    return SEPARATORS.sub("", name).lower()


def _plain(text: str) -> tuple[str, ...]:
    return tuple(plain_name(name) for name in text.split())


INPUT_NAMES = _plain(
    """
    input_length input_tokens prompt_tokens num_prompt_tokens num_input_tokens num_prefill_tokens input_len prompt_len
    ContextTokens request_tokens promptTokenCount inputTokenCount
    """
)
OUTPUT_NAMES = _plain(
    """
    output_length output_tokens completion_tokens num_output_tokens num_decode_tokens output_len GeneratedTokens response_tokens
    outputTokenCount generated_token_count num_generated_tokens num_generation_tokens generation_tokens
    """
)
LENGTH_NAMES = {"input_length": INPUT_NAMES, "output_length": OUTPUT_NAMES}
"""Names of the two lengths: ContextTokens and GeneratedTokens are Azure's, request_tokens and response_tokens BurstGPT's."""

WHOLE = "inputlength"  # always the whole prompt
APART_BASES = _plain("input_tokens inputTokenCount")
"""Names of lengths that do not include cached tokens: Anthropic and Bedrock count these apart."""

READ = _plain("cache_read_input_tokens cacheReadInputTokenCount")
WRITTEN = _plain("cache_creation_input_tokens cacheWriteInputTokens cacheWriteInputTokenCount")
EPHEMERAL = _plain("ephemeral_5m_input_tokens ephemeral_1h_input_tokens")  # parts of the written tokens
APART = (*READ, *WRITTEN, *EPHEMERAL)
UNCLEAR_READ = _plain("cache_read_tokens")
UNCLEAR_WRITTEN = _plain("cache_write_tokens cache_creation_tokens")
UNCLEAR_NAMES = (*UNCLEAR_READ, *UNCLEAR_WRITTEN)
UNCLEAR = (
    "whether cached tokens are in the length is not understood: write input_length instead, the tokens of the whole prompt"
)
WITHIN = _plain("cached_tokens num_cached_tokens cached_input_tokens input_cached_tokens cachedContentTokenCount")
PARTS = _plain("prompt_cache_hit_tokens prompt_cache_miss_tokens")  # DeepSeek's parts of a prompt
IN_DETAILS = frozenset(
    _plain("cached_tokens cache_read cache_creation cache_read_tokens cache_write_tokens cache_creation_tokens")
)
CACHED = (*APART, *UNCLEAR_NAMES, *WITHIN, *PARTS)
[TOOL_PROMPT] = _plain("toolUsePromptTokenCount")  # Gemini counts it apart from the prompt
GEMINI_ANSWER = _plain("candidatesTokenCount responseTokenCount")
GEMINI_THOUGHTS = _plain("thoughtsTokenCount")  # counted apart from the answer
REASONING = _plain("reasoning_tokens")
TOTALS = _plain("total_tokens totalTokenCount")
COUNTS = frozenset((*INPUT_NAMES, *OUTPUT_NAMES, *REASONING, *TOTALS, *CACHED, TOOL_PROMPT, *GEMINI_ANSWER, *GEMINI_THOUGHTS))
ALONE = frozenset((*INPUT_NAMES, *OUTPUT_NAMES, *REASONING, *TOTALS))  # in a line with no other counts, the first length counts
REQUEST_COUNTS = frozenset(_plain("num_model_requests num_requests request_count"))
[ITERATIONS] = _plain("iterations")  # Anthropic's requests to the model behind one answer
WRAPPERS = frozenset(_plain("usage usageMetadata token_usage tokens response body message meta cache_creation"))
"""Objects with the lengths of a line."""

INPUT_DETAILS = frozenset(_plain("prompt_tokens_details input_tokens_details input_token_details"))
OUTPUT_DETAILS = frozenset(_plain("completion_tokens_details output_tokens_details output_token_details"))
TEXTS = frozenset(_plain("text texts text_input messages prompt input_text payload"))
"""Fields with a prompt itself."""

DETAIL, UNKNOWN = "a detail", "unknown"  # no plain names


class Count(NamedTuple):
    """A field with a number of tokens, by the name that it has in the line."""

    name: str
    value: Any

    def __str__(self) -> str:
        """Return name and value, for messages."""
        return f"{self.name} {shown(self.value)}"

    @property
    def number(self) -> int:
        """The value. Raise ArgumentError unless it is an integer from 0."""
        number = read_length(self.value)
        if type(number) is not int or number < 0:
            raise ArgumentError(f"{self.name}: got {shown(self.value)}, allowed: an integer from 0")
        return number


class Counts(NamedTuple):
    """The token counts of a line. The cached tokens in `details` are part of a length; those in `unknown` are in fields that
    no format names.
    """

    by_name: dict[str, Count]
    details: list[Count]
    unknown: list[Count]

    def find(self, names: Iterable[str]) -> Count | None:
        """Return the first field with one of these names. Raise ArgumentError if another field with one differs."""
        found = [self.by_name[name] for name in names if name in self.by_name]
        for count in found[1:]:
            if read_length(count.value) != read_length(found[0].value):
                raise ArgumentError(f"has {found[0]} and {count}, which contradict")
        return found[0] if found else None

    def count(self, names: Iterable[str]) -> int:
        """Return the number of tokens in the first field with one of these names; 0 without such a field."""
        found = self.find(names)
        return found.number if found else 0

    def sum(self, names: Iterable[str]) -> int:
        """Return the sum of the fields with these names."""
        return sum(self.by_name[name].number for name in names if name in self.by_name)


def read_length(value: object) -> object:
    """Return a whole number written as a float as an int; return anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_lengths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `input_length` and `output_length` of a line, unless they are missing. Raise ArgumentError for contradictory
    lengths, and for cached tokens that may be in the length or apart from it.

    >>> read_lengths({"usage": {"input_tokens": 50, "cache_read_input_tokens": 1000, "output_tokens": 7}})
    {'input_length': 1050, 'output_length': 7}
    >>> read_lengths({"prompt_tokens": 1050, "prompt_tokens_details": {"cached_tokens": 1000}})
    {'input_length': 1050}
    """
    counts = Counts({}, [], [])
    others = {DETAIL: counts.details, UNKNOWN: counts.unknown}
    for name, count in _list_counts(fields):
        if name in others:
            others[name].append(count)
            continue
        known = counts.by_name.setdefault(name, count)
        if known is not count and read_length(known.value) != read_length(count.value):
            raise ArgumentError(f"has {known} and {count}, which contradict")
    _check_unknown(counts)
    output_length = _find_output(counts)
    input_length = _find_input(counts, output_length)
    if input_length is not None:
        output_length = _check_total(counts, input_length, output_length)
    lengths = {"input_length": input_length, "output_length": output_length}
    return {name: length for name, length in lengths.items() if length is not None}


def has_cached_count(fields: Mapping[str, Any]) -> bool:
    """Whether a line says how many of its tokens were cached: then its length is that of a whole prompt.

    >>> has_cached_count({"usage": {"prompt_tokens": 1100, "prompt_tokens_details": {"cached_tokens": 1024}}})
    True
    """
    names = {*CACHED, DETAIL}
    return any(name in names for name, _ in _list_counts(fields))


def _list_counts(fields: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Count]]:
    """Yield the fields with tokens by their plain names, also in wrappers and in columns such as `usage.input_tokens`. Fields
    in the details of a length are named DETAIL, cached tokens in other places UNKNOWN. Raise ArgumentError for a line of
    several requests.
    """
    for name, value in fields.items():
        if value is None or not (isinstance(value, dict) or _may_count(name)):
            continue
        steps = (*path, *name.split("."))
        *outer, plain = map(plain_name, steps)
        if isinstance(value, dict):
            if len(steps) <= MAX_DEPTH:
                yield from _list_counts(value, steps)
            continue
        is_detail = bool(outer) and outer[-1] in INPUT_DETAILS
        is_known_place = all(step in WRAPPERS | OUTPUT_DETAILS for step in outer[: len(outer) - is_detail])
        path_name = ".".join(steps)
        count = Count(path_name if path_name.isprintable() else shown(path_name), value)
        if is_known_place and is_detail and plain in IN_DETAILS:
            yield DETAIL, count
        elif is_known_place and not is_detail and plain in COUNTS:
            yield plain, count
        elif is_known_place and plain in REQUEST_COUNTS and count.number > 1:
            raise ArgumentError(f"{count.name}: got {shown(value)}, allowed: 1, since a line is one request")
        elif is_known_place and outer and plain == ITERATIONS and isinstance(value, list) and len(value) > 1:
            raise ArgumentError(f"{count.name}: got {len(value)} items, allowed: 1, since a line is one request")
        elif type(read_length(value)) is int and value and _is_cached([*outer[-1:], plain]):
            yield UNKNOWN, count


def _is_cached(words: list[str]) -> bool:
    """Whether a field counts cached tokens, by its own plain name and the plain name of the object around it."""
    joined = "".join(words).replace("tokeniz", "")
    return ("cach" in joined and "token" in joined) or not IN_DETAILS.isdisjoint((joined, words[-1]))


def _check_unknown(counts: Counts) -> None:
    """Raise ArgumentError for cached tokens in unknown places, unless a known one has their number, or the whole prompt."""
    if WHOLE in counts.by_name:
        return
    known = [count.number for count in (*counts.details, *(counts.by_name[name] for name in CACHED if name in counts.by_name))]
    for count in counts.unknown:
        if read_length(count.value) not in (*known, sum(known)):
            raise ArgumentError(f"has {count}: {UNCLEAR}")


@lru_cache(maxsize=10_000)
def _may_count(name: str) -> bool:
    """Whether a field of this name may have tokens, or say that a line has several requests."""
    plain = plain_name(name)
    is_cached = "cach" in plain or "token" in plain or plain in ("read", "write", "creation")
    return is_cached or "." in name or plain in COUNTS | REQUEST_COUNTS | {ITERATIONS}


def _find_output(counts: Counts) -> Any:
    """Return the length of the answer, with the thoughts that Gemini counts beside it."""
    found = counts.find(OUTPUT_NAMES)
    if found is None and not counts.by_name.keys().isdisjoint((*GEMINI_ANSWER, *GEMINI_THOUGHTS)):
        return counts.count(GEMINI_ANSWER) + counts.count(GEMINI_THOUGHTS)
    return found.value if found else None


def _find_input(counts: Counts, output_length: Any) -> Any:
    """Return the length of the whole prompt."""
    if not counts.details and counts.by_name.keys() <= ALONE:
        found = counts.find(INPUT_NAMES)
        return found.value if found else None
    bases = {name: counts.by_name[name] for name in INPUT_NAMES if name in counts.by_name}
    apart = counts.count(READ) + (counts.count(WRITTEN) or counts.sum(EPHEMERAL))
    unclear = 0 if apart else counts.count(UNCLEAR_READ) + counts.count(UNCLEAR_WRITTEN)
    parts = [*counts.details, *(counts.by_name[name] for name in (*WITHIN, *PARTS) if name in counts.by_name)]
    if not bases:
        return counts.sum(PARTS) if all(name in counts.by_name for name in PARTS) else None
    first = next(iter(bases.values()))
    choices = set.intersection(*(_list_choices(name, base.number, apart, unclear, counts) for name, base in bases.items()))
    total = counts.find(TOTALS)
    if len(choices) > 1 and total is not None and total.number == max(choices) + Count("output", output_length or 0).number:
        choices = {max(choices)}  # the total says that cached tokens are not in the length
    cached = [counts.by_name[name] for name in (*APART, *UNCLEAR_NAMES) if name in counts.by_name]
    if len(choices) > 1:
        raise ArgumentError(f"has {' and '.join(map(str, [first, *cached]))}: {UNCLEAR}")
    if not choices:
        raise ArgumentError(f"has {' and '.join(map(str, [*bases.values(), *cached]))}, which contradict")
    [length] = choices
    parts += [counts.by_name[name] for name in APART if name in counts.by_name]
    for part in parts:
        if part.number > length:
            raise ArgumentError(f"{part.name}: got {shown(part.value)}, allowed: at most {length}, the tokens of the prompt")
    if all(name in counts.by_name for name in PARTS) and counts.sum(PARTS) != length:
        raise ArgumentError(f"has {first}, but {' and '.join(str(counts.by_name[name]) for name in PARTS)}")
    return length


def _list_choices(name: str, number: int, apart: int, unclear: int, counts: Counts) -> set[int]:
    """Return the possible lengths of the prompt if the field of this name has this number."""
    number += counts.count([TOOL_PROMPT])
    cached = apart or unclear
    if not cached or name == WHOLE or (counts.details and name not in APART_BASES):
        return {number}
    if number < cached or (apart and name in APART_BASES and not counts.details):
        return {number + cached}
    return {number, number + cached}


def _check_total(counts: Counts, input_length: Any, output_length: Any) -> Any:
    """Return the length of the answer, with the reasoning that some services count apart from it; if it is missing, the total
    less the prompt. Raise ArgumentError if the sum of the lengths is not the total.
    """
    total = counts.find(TOTALS)
    if total is None or not total.number:
        return output_length
    prompt = Count("input_length", input_length).number
    prompts = {prompt, *(counts.by_name[name].number for name in APART_BASES if name in counts.by_name)}
    if output_length is None:
        if len(prompts) > 1:
            raise ArgumentError(f"has {total} and no output_length: {UNCLEAR}")
        if total.number < prompt:
            raise ArgumentError(f"{total.name}: got {shown(total.value)}, allowed: at least {prompt}, the tokens of the prompt")
        return total.number - prompt
    answer = Count("output_length", output_length).number
    if total.number in {length + answer for length in prompts}:
        return output_length
    if total.number == prompt + answer + counts.count(REASONING):
        return answer + counts.count(REASONING)
    raise ArgumentError(
        f"{total.name}: got {shown(total.value)}, allowed: {prompt + answer}, the sum of {prompt} tokens of the prompt and "
        f"{answer} of the answer"
    )

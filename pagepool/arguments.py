"""Checks of arguments, and of the attributes that are read from a request.

Each check returns the value in its canonical form, or raises an error naming the argument.
"""

import math
import operator
from collections.abc import Iterable, Mapping, MappingView, Sequence, Set
from numbers import Real
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from pagepool.errors import MAX_SHOWN_BITS, ArgumentError, ArgumentTypeError, shown

T = TypeVar("T")

MAX_TOKEN_COUNTS = 4
MAX_SIZE = 1 << 62
"""Largest size: any two sizes can be added and shown as plain numbers."""

ATTRIBUTES = ("request_id", "all_token_ids", "num_tokens", "num_computed_tokens", "sampling_params", "status")
"""Attributes of every request."""


def require_int(name: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` as an int.

    Raise `ArgumentTypeError` if it is not an integer (NumPy integers are accepted, bools are not), `ArgumentError` if it is
    below `minimum` or above `maximum`.

    >>> require_int("page_size", 16, minimum=1)
    16
    """
    number = value if type(value) is int else _index_of(name, value)
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ArgumentError(f"{name}: got {shown(number)}, allowed: {_range_of(minimum, maximum)}")
    return number


def _range_of(minimum: int | None, maximum: int | None) -> str:
    """Return a range for messages.

    >>> _range_of(1, None), _range_of(None, 8), _range_of(1, 8)
    ('at least 1', 'at most 8', '1 to 8')
    """
    if minimum is None or maximum is None:
        return f"at most {maximum}" if minimum is None else f"at least {minimum}"
    return f"{minimum} to {'2**62' if maximum == MAX_SIZE else maximum}"


def _index_of(name: str, value: object) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return int(operator.index(cast(Any, value)))  # an array's method raises
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {shown(value)}, allowed: an int") from None


def require_flag(name: str, value: object) -> bool:
    """Return a flag as a bool. Raise ArgumentTypeError unless it is a bool of Python or NumPy, or the int 0 or 1: text such as
    "no" would count as true.

    >>> require_flag("enable_caching", 1)
    True
    """
    if type(value) is bool:
        return value
    if isinstance(value, np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise ArgumentTypeError(f"{name}: got {shown(value)}, allowed: True or False")


def require_name(what: str, name: object) -> str | None:
    """Return the id of a session, or the name of a tenant, as a str or None. Raise ArgumentTypeError for anything else."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{what}: got {type(name).__name__}, allowed: a string, or None")
    return str.__str__(name)  # a subclass may compare equal to anything


def require_share(name: str, value: Any) -> float:
    """Return `value` as a float. Raise ArgumentTypeError unless it is a number (no bool), ArgumentError unless it is from 0 to
    1.

    >>> require_share("max_leased_share", 1)
    1.0
    """
    _require_real(name, value, "a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: 0 to 1")
    return float(value)


def require_number(name: str, value: Any, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """Return `value`, or infinity with its sign for an int that no float can hold. Raise ArgumentTypeError unless it is a
    number (no bool), ArgumentError outside the range and for NaN.

    >>> require_number("max_age", 2)
    2
    """
    _require_real(name, value, f"a number of at least {minimum}")
    if not minimum <= value <= maximum:
        allowed = f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum}"
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: {allowed}")
    try:
        float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value > 0 else -1)
    return value  # type: ignore[no-any-return]


def _require_real(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool | np.timedelta64) or not isinstance(value, Real):  # a timedelta64 is a Real too
        raise ArgumentTypeError(f"{name}: got {shown(value)}, allowed: {allowed}")


def require_callable(name: str, value: T) -> T:
    """Return `value`. Raise ArgumentTypeError unless it is callable."""
    if not callable(value):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: a callable")
    return value


def require_choice(name: str, value: Any, *words: str) -> str:
    """Return `value`. Raise ArgumentError unless it is one of the words."""
    if not isinstance(value, str) or value not in words:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: {', '.join(words[:-1])} or {words[-1]}")
    return value


def require_text(name: str, value: object) -> str:
    """Return `value`. Raise ArgumentTypeError unless it is a string, ArgumentError unless it is valid Unicode.

    >>> require_text("namespace", "llama-8b")
    'llama-8b'
    """
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: valid Unicode") from error
    return value


def require_short(name: str, value: Any) -> Any:
    """Return `value`. Raise ArgumentError if it is an int that Python may refuse to convert to text."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: ints of at most {MAX_SHOWN_BITS} bits")
    return value


def require_token_counts(name: str, values: Iterable[int], most: int) -> list[int]:
    """Return numbers of tokens as a list of ints, each at most `most`. Raise ArgumentError for more than four numbers or a
    negative one, ArgumentTypeError for other types.

    >>> require_token_counts("resume_at", [24, 1 << 40], 4096)
    [24, 4096]
    """
    counts = [min(require_int(name, num, 0), most) for num in as_list(name, values, "ints", is_ordered=False)]
    if len(counts) > MAX_TOKEN_COUNTS:
        raise ArgumentError(f"{name}: got {len(counts)} numbers of tokens, allowed: at most {MAX_TOKEN_COUNTS}")
    return counts


def as_list(name: str, values: Iterable[T], allowed: str, *, is_ordered: bool = True) -> list[T]:
    """Return `values` as a list. Raise ArgumentTypeError for text, bytes, views of bytes and objects that are not iterable;
    with `is_ordered` also for a set, a mapping or a view of a mapping.

    >>> as_list("rows", (2, 0), "ints")
    [2, 0]
    """
    if type(values) is list or type(values) is tuple:
        return list(values)
    try:
        if isinstance(values, str | bytes | bytearray) or (is_ordered and isinstance(values, Set | Mapping | MappingView)):
            raise TypeError
        if isinstance(values, memoryview) and (values.ndim != 1 or values.itemsize == 1):  # Python iterates over 1 dimension
            raise TypeError
        iterator = iter(values)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, allowed: {allowed}") from None
    return list(iterator)  # outside of `try`: errors that the items raise pass through


def require_mapping(name: str, values: Any) -> Mapping[Any, Any]:
    """Return `values`. Raise ArgumentTypeError unless they are a mapping."""
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, allowed: a mapping")
    return values


def require_list(name: str, values: Iterable[T], item_class: type[T]) -> list[T]:
    """Return `values` as a list. Raise ArgumentTypeError unless it is iterable and every item is an `item_class`."""
    listed = as_list(name, values, f"a list of {item_class.__name__}")
    for value in listed:
        if not isinstance(value, item_class):
            raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: {item_class.__name__}")
    return listed


def require_group_ids(group_ids: Sequence[int]) -> list[int]:
    """Return ids of cache groups as ints."""
    listed = as_list("kv_cache_group_ids", group_ids, "a sequence of ints")
    return [require_int("kv_cache_group_ids", group_id, 0) for group_id in listed]


def require_unmasked(name: str, values: T) -> T:
    """Return an array. Raise ArgumentTypeError if items are masked: their meaningless values would be read."""
    if isinstance(values, np.ma.MaskedArray) and values.dtype.names is None and np.ma.is_masked(values):
        raise ArgumentTypeError(f"{name}: got an array with masked items, allowed: one without")
    return values


def require_slice(name: str, values: Any, start: int, stop: int) -> Any:
    """Return ``values[start:stop]``. Raise ArgumentTypeError if `values` cannot be sliced."""
    try:
        return values[start:stop]
    except (TypeError, IndexError, KeyError):
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, allowed: a list or an array") from None


def refuse_incomplete(request: object, error: AttributeError) -> NoReturn:
    """Raise ArgumentTypeError if `request` lacks one of `ATTRIBUTES`, which caused `error`; otherwise raise `error`."""
    for name in ATTRIBUTES if error.obj is not request or error.name in ATTRIBUTES else ():
        if not hasattr(request, name):
            allowed = f"one with {', '.join(ATTRIBUTES)}"
            raise ArgumentTypeError(f"request: got {type(request).__name__} without {name}, allowed: {allowed}") from error
    raise error


def read(request: Any, name: str) -> Any:
    """Return an attribute of a request. Raise ArgumentTypeError if it is missing."""
    try:
        return getattr(request, name)
    except AttributeError as error:
        refuse_incomplete(request, error)


def id_of(request: Any) -> str:
    """Return the id of a request. Raise ArgumentTypeError if it is missing or unhashable."""
    try:
        request_id: str = request.request_id
    except AttributeError as error:
        refuse_incomplete(request, error)
    try:
        hash(request_id)
    except TypeError as error:
        raise ArgumentTypeError(f"request_id: got {type(request_id).__name__}, allowed: a string") from error
    return request_id


def read_count(request: Any, name: str) -> int:
    """Return a token count of a request as an int. Raise ArgumentTypeError if missing, ArgumentError if negative."""
    count = read(request, name)
    return count if type(count) is int and count >= 0 else require_int(name, count, 0)


def has_status(request: Any, status: int) -> bool:
    """Whether a request has this status."""
    try:
        return bool(read(request, "status") == status)
    except ValueError:  # an array as status
        raise ArgumentTypeError(f"status: got {shown(request.status)}, allowed: an EngineRequestStatus") from None

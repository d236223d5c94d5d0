"""The exceptions that pagepool raises. A call that raises one of them has changed nothing.

Every class derives from `PagePoolError` and from the builtin exception that engines catch today, so existing
`except ValueError` clauses keep working. Messages say what was asked, what was got and what is allowed.
"""


class PagePoolError(Exception):
    """Base of every exception of this package."""


class ArgumentError(PagePoolError, ValueError):
    """A value is of the right type but outside what the call allows."""


class ArgumentTypeError(PagePoolError, TypeError):
    """A value is of a type, dtype or layout that the call does not take."""


class OutOfPagesError(PagePoolError, ValueError):
    """More pages were asked for than are free (in the pool, or in the data-parallel shard)."""


class RequestTooLargeError(OutOfPagesError):
    """A request needs more pages than the whole pool has, so waiting for free pages would never end."""


class DoubleFreeError(PagePoolError, RuntimeError):
    """A page's reference count would go below zero."""


class IntegrityError(PagePoolError, RuntimeError):
    """The pool's records contradict one another; the message names the first page, row or entry that is wrong."""


class SnapshotError(PagePoolError, ValueError):
    """What should be a saved pool is damaged, of another version, or something else; the message says in what."""


class EndpointError(PagePoolError, OSError):
    """An address cannot be listened at, or connected to: it is none, the port is in use, or there is no such host."""


class PageIdError(PagePoolError, IndexError):
    """A page id is out of range, a page belongs to another pool, or it is not in the state the call needs."""


class PageHashError(PagePoolError, RuntimeError):
    """A page would be given a hash while it has one."""


class RowIndexError(PagePoolError, IndexError):
    """A page-table row is out of range."""


class RowOverflowError(PagePoolError, ValueError):
    """A page-table row would get more pages than it has columns."""


class CompatError(PagePoolError, RuntimeError):
    """An engine is not what its adapter in `pagepool.compat` was made for, or was built before its allocator was replaced."""


MAX_SHOWN_BITS = 256  # Python converts ints of 640 digits at least, and more only where nobody has forbidden it


def shown(value: object) -> str:
    """A value as messages have it: its repr, but for ints that are too large to be read, or converted.

    >>> shown(7), shown("a"), shown(10**5000)
    ('7', "'a'", 'an int of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an int of {value.bit_length()} bits"
    try:
        return repr(value)
    except ValueError:  # a tuple or list that has such an int somewhere
        return f"a {type(value).__name__}"


def count_of(number: int, noun: str) -> str:
    """A number with what it counts, for messages.

    >>> count_of(1, "page"), count_of(1200, "page")
    ('1 page', '1,200 pages')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

"""The exceptions of pagepool. A call that raises one of them leaves the state unchanged.

Every class derives from `PagePoolError` and from the builtin exception that engines already catch, so existing `except
ValueError` clauses keep working. Refusals have the form ``name: got X, allowed: Y``, for arguments and for states alike.
"""


class PagePoolError(Exception):
    """Base of every exception of this package."""


class ArgumentError(PagePoolError, ValueError):
    """A value of the right type is out of range."""


class ArgumentTypeError(PagePoolError, TypeError):
    """A value has a type, dtype or layout that the call does not accept."""


class OutOfPagesError(PagePoolError, ValueError):
    """More pages were requested than are free (in the pool, or in the data-parallel shard)."""


class RequestTooLargeError(OutOfPagesError):
    """A request needs more pages than the whole pool has, or more tokens than the model allows, so it can never run."""


class LeaseBudgetError(PagePoolError, ValueError):
    """More pages would be leased than `max_leased_share` of the manager's `Retention` allows."""


class PagesHeldError(PagePoolError, RuntimeError):
    """Pages are held that have to be given back first; the message names their holders."""


class DoubleFreeError(PagePoolError, RuntimeError):
    """A page's reference count would go below zero."""


class IntegrityError(PagePoolError, RuntimeError):
    """The pool's records contradict one another; the message names the first page, row or entry that is wrong. Or a forked
    process uses an object that another process made.
    """


class EventBatchError(PagePoolError, ValueError):
    """A batch of cache events is malformed, contradicts earlier ones, or exceeds a limit; the message names the byte."""


class EndpointError(PagePoolError, OSError):
    """An address is malformed, its port is taken, or the host is unknown."""


class PeerError(PagePoolError, OSError):
    """A peer is gone, gives no answer in time, or refuses a question; or what it offered has ended or is of another size."""


class PageIdError(PagePoolError, IndexError):
    """A page id is out of range, or a page belongs to another pool or is in the wrong state for the call."""


class PageHashError(PagePoolError, RuntimeError):
    """A page that has a hash would get another hash."""


class MovesDueError(PagePoolError, RuntimeError):
    """Tokens would be written to pages whose moves are due (see `take_moves`)."""


class RowIndexError(PagePoolError, IndexError):
    """A page-table row is out of range."""


class RowOverflowError(PagePoolError, ValueError):
    """A page-table row would get more pages than it has columns."""


class CompatError(PagePoolError, RuntimeError):
    """An engine differs from the expectations of its adapter in `pagepool.compat`, or was built before its allocator was
    replaced; or jax is too old.
    """


MAX_SHOWN_BITS = 256  # Python may be limited to converting ints of 640 digits


def shown(value: object) -> str:
    """Return the repr of a value for messages, or a description if it has none or is an int too large to convert.

    >>> shown(7), shown("a"), shown(10**5000)
    ('7', "'a'", 'an int of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an int of {value.bit_length()} bits"
    try:
        return repr(value)
    except Exception:  # from a tuple or list with such an int, or from the value's own class
        return f"a {type(value).__name__}"


def not_made(what: str) -> ArgumentError:
    """Return the error for an object whose constructor did not run, or failed."""
    return ArgumentError(f"{what}: got one whose constructor did not run, or failed, allowed: one that was made")


def made_twice(what: str) -> ArgumentError:
    """Return the error for a second call of a constructor."""
    return ArgumentError(f"{what}: got a second call of the constructor, allowed: one call")


def of_other_process(what: str) -> IntegrityError:
    """Return the error for a call of an object that another process made."""
    return IntegrityError(f"{what}: got a call in a forked process, allowed: calls in the process that made it")


def not_unicode(what: str, error: UnicodeError) -> ArgumentError:
    """Return the error for text that cannot be encoded or decoded."""
    return ArgumentError(f"{what}: got text that is not valid Unicode ({error}), allowed: text that UTF-8 can encode")


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun for messages.

    >>> count_of(1, "page"), count_of(1200, "page")
    ('1 page', '1,200 pages')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

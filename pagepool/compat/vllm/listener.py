"""Hints of vLLM's requests, bounded and counted: sessions under keys of this process, times, ends, and ignored hints."""

import logging
import os
from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from pagepool._core import siphash128
from pagepool.compat.vllm.policy import MAX_NUM_SHARES, MAX_SHARES
from pagepool.hints import Hints, read

logger = logging.getLogger("vllm.pagepool")

MAX_NAMES = 64
"""Number of names of ignored hints that are counted one by one."""

EACH = "*"
"""In shares, the salt that stands for each salt not named."""

ROUNDING = 1e-9

OTHERS = "others"
"""Name under which further ignored hints are counted."""


class Heard(NamedTuple):
    """The hints of a request, with keys in place of ids."""

    session: str | None
    tenant: str | None
    """Key of the request's salt, if the salt has a share."""
    seconds: float | None
    closes: bool
    others: tuple[tuple[str, float], ...]
    """Keys of other sessions, each with the seconds until the session comes back."""
    pins: tuple[tuple[int, float], ...]
    """Numbers of leading tokens whose blocks are to be held, each with the seconds for which to hold them."""


class Listener:
    """Reads the hints of requests, and counts them. Never raises an error."""

    def __init__(self, *, reads_times: bool, shares: Mapping[str, float] | None = None, max_pinned: float = 0.0) -> None:
        """Make a listener with a new secret. Without `reads_times` it reads only ids of sessions. `shares` maps salts to their
        shares. Other salts get the share of ``*``, if it is named, at their first request, until the limits of shares are met.
        `max_pinned` is the share of a pool's blocks that may be pinned.
        """
        self.reads_times, self.max_pinned = reads_times, max_pinned
        self.shares: dict[str, float] = {}
        """Shares by key of the salt: salts that are named, and other salts whose requests were heard."""
        self.counts: Counter[str] = Counter()
        """Counts of hints by kind, of refused pins, and of errors."""
        self.ignored: Counter[str] = Counter()
        """Counts of ignored hints by name: up to `MAX_NAMES` names, and `OTHERS`."""
        self._secret = os.urandom(16)
        named = dict(shares or {})
        self._share_of_others = named.pop(EACH, 0.0)
        self.shares.update((self.key_of(salt, ""), share) for salt, share in named.items())
        self._num_one_shots = 0

    def hear(self, request: Any, was_heard: bool = False) -> Heard | None:
        """Return a request's hints; None if it has neither hints nor a share. Hints are counted, and hints on other sessions
        returned, only the first time: not if the request `was_heard`, or returns after a preemption. O(actions).
        """
        hints = read(request, reads_times=self.reads_times)
        salt = getattr(request, "cache_salt", None)
        tenant = self._tenant_of(salt) if self.shares or self._share_of_others else None
        if hints == _NOTHING and tenant is None:
            return None
        is_first = not was_heard and getattr(request, "num_preemptions", 0) == 0
        if is_first:
            self._count(hints)
        session, seconds, closes = None, hints.seconds, hints.closes
        if hints.session is not None:
            session = self.key_of(salt, hints.session)
        elif closes or seconds == inf:  # a session of its own, so that it cannot end what others use
            self._num_one_shots += 1
            session, seconds, closes = f"one-shot {self._num_one_shots}", None, True
        told = [*hints.retains, *((name, inf) for name in hints.demotes)] if is_first else []
        others = tuple((self.key_of(salt, name), time) for name, time in told)
        return Heard(session, tenant, seconds, closes, others, hints.pins if self.max_pinned else ())

    def _tenant_of(self, salt: Any) -> str | None:
        """Return the key of a salt that has a share, or gets the share of ``*``; None for other salts."""
        if type(salt) is not str:
            return None
        key = self.key_of(salt, "")
        if key not in self.shares:
            total = sum(self.shares.values()) + self._share_of_others
            if not self._share_of_others or len(self.shares) >= MAX_NUM_SHARES or total > MAX_SHARES + ROUNDING:
                return None
            self.shares[key] = self._share_of_others
        return key

    def key_of(self, salt: Any, session: str) -> str:
        """Return a session's key: 64 bits under this listener's secret. Sessions of different salts have different keys."""
        prefix = f"{len(salt)}:{salt}" if type(salt) is str else "-"
        return siphash128(self._secret, (prefix + session).encode(errors="surrogatepass"))[:8].hex()

    def count_pin(self, is_held: bool) -> None:
        """Count a pin, or one that was refused."""
        self.counts["pins" if is_held else "refused pins"] += 1

    def count_error(self, error: Exception) -> None:
        """Count an error that a request would have raised."""
        self.counts["errors"] += 1
        self._warn(f"{type(error).__name__}: {error}", self.counts["errors"])

    def _count(self, hints: Hints) -> None:
        counted = {
            "sessions": hints.session is not None,
            "seconds": hints.seconds is not None,
            "closes": hints.closes,
            "retains": len(hints.retains),
            "demotes": len(hints.demotes),
            "refused pins": 0 if self.max_pinned else len(hints.pins),
        }
        for name, number in counted.items():
            if number:
                self.counts[name] += number
        for name in hints.ignored:
            is_counted = name in self.ignored or len(self.ignored) < MAX_NAMES
            self.ignored[name if is_counted else OTHERS] += 1
            self._warn(f"{name} is not understood", self.ignored.total())

    def _warn(self, what: str, number: int) -> None:
        """Log the first of a kind; the rest is only counted."""
        if number == 1:
            logger.warning("a request's hint was ignored, and further ones will be counted: %s", what)


_NOTHING = Hints()
_current = Listener(reads_times=True)


def get_listener() -> Listener:
    """Return the listener of new pools."""
    return _current


def set_listener(listener: Listener) -> None:
    """Set the listener of new pools."""
    global _current
    _current = listener

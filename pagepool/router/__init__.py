"""For routers: an index of the prefixes cached by workers, fed by their events, and the choice of a worker.

`pagepool.router.subscriber.EventSubscriber` follows workers over ZeroMQ (extra ``pagepool[events]``).
"""

from pagepool.router.choice import PrefixRouter, Route
from pagepool.router.index import PrefixIndex

__all__ = ["PrefixIndex", "PrefixRouter", "Route"]

"""Pages that cross between processes: links that move their bytes, and a store that asks a peer. Needs the extra
``pagepool[peers]``.

A `Link` moves parts of pages: `RowsLink` rows of host memory over TCP, `JaxLink` arrays of jax between devices. `PeerStore` is
a store (see `pagepool.stores`) that asks a peer's host tier, and `TierServer` its other side. Every message is authenticated by
a secret that all peers share.
"""

try:
    import msgspec  # noqa: F401
    import xxhash  # noqa: F401
    import zmq  # noqa: F401
except ImportError as error:
    raise ImportError("peers need msgspec, pyzmq and xxhash: pip install 'pagepool[peers]'") from error

from pagepool.peers.jax_link import JaxLink
from pagepool.peers.link import Link, Pulled
from pagepool.peers.ranks import RankLinks, RankStores
from pagepool.peers.rows_link import RowsLink
from pagepool.peers.store import PeerStore
from pagepool.peers.tier_server import TierServer

__all__ = ["JaxLink", "Link", "PeerStore", "Pulled", "RankLinks", "RankStores", "RowsLink", "TierServer"]

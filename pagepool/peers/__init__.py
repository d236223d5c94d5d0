"""Pages that cross between processes: links for their bytes, and a store behind which a peer is asked. Needs the extra
``pagepool[peers]``.

A `Link` moves parts of pages: `RowsLink` rows of host memory over TCP, `JaxLink` arrays of jax between devices. `PeerStore` is
a store (see `pagepool.stores`) with the pages of a peer's host tier, and `TierServer` its other side. Every message is
authenticated by a secret of all peers. A `PrefillServer` computes prompts for engines with a `PrefillClient`.
"""

from importlib.util import find_spec

if not all(map(find_spec, ("msgspec", "xxhash", "zmq"))):
    raise ImportError("peers need msgspec, pyzmq and xxhash: pip install 'pagepool[peers]'")

from pagepool.peers.jax_link import JaxLink
from pagepool.peers.link import Link, Pulled
from pagepool.peers.prefill_client import Arrival, PrefillClient
from pagepool.peers.prefill_server import PrefillServer, RemotePrompt
from pagepool.peers.ranks import RankLinks, RankStores
from pagepool.peers.rows_link import RowsLink
from pagepool.peers.store import PeerStore
from pagepool.peers.tier_server import TierServer

__all__ = [
    "Arrival",
    "JaxLink",
    "Link",
    "PeerStore",
    "PrefillClient",
    "PrefillServer",
    "Pulled",
    "RankLinks",
    "RankStores",
    "RemotePrompt",
    "RowsLink",
    "TierServer",
]

"""Stores behind the host tier: pages that survive a restart and are shared by processes.

`StoreTier` puts a store behind a manager's host tier. A `Store` is anything with the six methods of the protocol.
`pagepool.stores.frames` makes and checks the headers of stored pages.
"""

from pagepool.stores.files import FileStore
from pagepool.stores.folders import StoredNamespace
from pagepool.stores.namespace import make_namespace
from pagepool.stores.object_storage import ObjectStore
from pagepool.stores.protocol import Done, Store
from pagepool.stores.tier import HostRows, StoreTier

__all__ = ["Done", "FileStore", "HostRows", "ObjectStore", "Store", "StoreTier", "StoredNamespace", "make_namespace"]

"""Stores behind the host tier: pages that survive a restart and are shared by processes.

A `Store` is anything with the six methods of the protocol. `pagepool.stores.frames` makes and checks the headers of stored
pages.
"""

from pagepool.stores.files import FileStore
from pagepool.stores.object_storage import ObjectStore
from pagepool.stores.protocol import Done, Store

__all__ = ["Done", "FileStore", "ObjectStore", "Store"]

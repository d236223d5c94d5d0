"""`ObjectStore`: objects in S3, GCS, Azure or anything else behind obstore. Needs the extra ``pagepool[store]``.

Each request to the store is made by a thread, without the GIL. A row is copied to or from obstore's memory under a lock, in
microseconds, so `close` need not wait for requests.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagepool.arguments import require_int
from pagepool.errors import ArgumentTypeError
from pagepool.stores.jobs import (
    Finish,
    JobStore,
    refuse_size,
    require_drain_seconds,
    require_keys,
    require_namespace,
    split_key,
)

if TYPE_CHECKING:
    import obstore.store

MAX_CONCURRENCY = 1024

SECONDS_OF_BUCKET = 10.0
"""Time for which a bucket that was found is assumed to exist."""

NO_BUCKET = re.compile("<Code>(NoSuchBucket|ContainerNotFound)</Code>")
NOT_FOUND = "404 Not Found"
"""Text in the error of a listing if there is no bucket."""


class Bucket:
    """Objects by key in a store of obstore."""

    def __init__(self, obstore: Any, store: Any, namespace: str) -> None:
        """`obstore` is the package."""
        self._obstore, self._store, self._namespace = obstore, store, namespace
        self._lock, self._is_closed = threading.Lock(), False
        of_buckets = obstore.store.S3Store, obstore.store.GCSStore, obstore.store.AzureStore
        self._has_bucket = isinstance(store, of_buckets)
        self._bucket_lock, self._is_sure_until = threading.Lock(), 0.0

    def find(self, key: bytes) -> None:
        """Raise FileNotFoundError unless the object is there, OSError if there is no bucket."""
        self._request(self._obstore.head, f"{self._namespace}/{split_key(key)}")

    def load(self, key: bytes, row: memoryview) -> None:
        """Read the object into a row. An object of another length is not transferred."""
        name = f"{self._namespace}/{split_key(key)}"
        found = self._request(self._obstore.get, name)
        size = found.meta["size"]
        data = np.frombuffer(found.bytes() if size == len(row) else b"", np.uint8)
        if len(data) != len(row):
            raise refuse_size(name, size, row)
        with self._lock:
            if not self._is_closed:
                np.copyto(np.frombuffer(row, np.uint8), data)

    def save(self, key: bytes, row: memoryview, finish: Finish | None) -> bool:
        """Write a copy of a row, since obstore may read its argument after the call, or even keep it."""
        with self._lock:
            if self._is_closed:
                return False
            if finish:
                finish(key, row)
            data = np.frombuffer(row, np.uint8).copy()
        self._obstore.put(self._store, f"{self._namespace}/{split_key(key)}", data, use_multipart=False)
        return True

    def touch(self, key: bytes) -> None:
        """Do nothing."""

    def _request(self, call: Callable[[Any, str], Any], name: str) -> Any:
        """Return what a call finds under a name."""
        try:
            return call(self._store, name)
        except FileNotFoundError as error:
            if self._has_bucket and self._is_bucket_missing(name, str(error)):
                allowed = "one whose bucket exists"
                raise OSError(f"store: got {self._store!r}, whose bucket is missing, allowed: {allowed}") from None
            raise

    def _is_bucket_missing(self, name: str, error: str) -> bool:
        """Whether an object is missing because the bucket is. An error without a text leaves this open, so the bucket is
        listed, every ten seconds at most. If that is forbidden, the bucket is assumed to exist.
        """
        if NO_BUCKET.search(error):
            return True
        with self._bucket_lock:
            if time.monotonic() < self._is_sure_until:
                return False
            try:
                self._obstore.list_with_delimiter(self._store, prefix=name)
            except Exception as listed:
                if NO_BUCKET.search(str(listed)) or NOT_FOUND in str(listed):
                    return True
            self._is_sure_until = time.monotonic() + SECONDS_OF_BUCKET
            return False

    def close(self) -> None:
        """Read and write no row from now on."""
        with self._lock:
            self._is_closed = True


class ObjectStore(JobStore):
    """A `Store` in a bucket of S3, GCS or Azure, or in any other store of obstore.

    >>> import time
    >>> import obstore.store  # S3Store("bucket", region="eu-west-1", client_options={"timeout": "5s"}) in place of MemoryStore
    >>> store = ObjectStore(obstore.store.MemoryStore(), "llama-8b/bf16")
    >>> job = store.save([b"key"], [memoryview(b"page")])
    >>> while not (answers := store.poll()):
    ...     time.sleep(0.001)
    >>> answers
    [Done(job=1, is_done=b'\\x01', error=None)]
    >>> store.close(drain_seconds=1)

    The object of a key is ``namespace/first two digits/digits of the key`` below the store's prefix. Each is written by one
    request, and read by one. The store's options set credentials, timeouts and retries. By default a request is tried again
    for three minutes; set a few seconds, since until then it occupies one of the `max_concurrency` places.

    A missing bucket is the error of an answer. Where a server says only that an object is missing, the store lists the bucket,
    every ten seconds at most. Without the permission to list, objects of a missing bucket count as missing, without an error.

    Nothing is ever removed: give the bucket a rule that expires objects, by the time since they were written. The calling
    thread waits for no request. In a forked process every call but `close` raises; make a store there.
    """

    def __init__(self, store: "obstore.store.ObjectStore", namespace: str, *, max_concurrency: int = 32) -> None:
        """`store` is a store of obstore. `namespace` says what the objects mean: parts of letters, digits, "-", "_" and ".",
        divided by "/". Up to `max_concurrency` requests run at once, each in a thread; look-ups come before loads, and loads
        before saves.

        Raise ArgumentTypeError or ArgumentError for other types and values, ImportError without the extra ``pagepool[store]``.
        Nothing is requested.
        """
        obstore = import_obstore()
        if not isinstance(store, obstore.store.ObjectStore):
            raise ArgumentTypeError(f"store: got {type(store).__name__}, allowed: a store of obstore.store")
        namespace = require_namespace(namespace)
        num_threads = require_int("max_concurrency", max_concurrency, 1, MAX_CONCURRENCY)
        self._bucket = Bucket(obstore, store, namespace)
        super().__init__("pagepool-objects", self._bucket, num_threads)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the bucket's own rule removes objects. Raise as `lookup`."""
        self._jobs.require_open()
        require_keys(keys)

    def close(self, *, drain_seconds: float) -> None:
        """Wait up to `drain_seconds` for saves, and cancel all other jobs. No job is answered afterwards, and no row is read or
        written.

        Requests that are running by then are not waited for. Their threads end with them: a save may still write its object,
        as a whole. A second call has no effect, and neither has one in a forked process or while the interpreter ends. Raise
        ArgumentTypeError unless `drain_seconds` is a number, ArgumentError if it is negative.
        """
        seconds = require_drain_seconds(drain_seconds)
        if not self._jobs.are_gone():
            self._jobs.drain(seconds)
            self._bucket.close()


def import_obstore() -> Any:
    """Return the package obstore. Raise ImportError naming the extra."""
    try:
        import obstore.store
    except ImportError as error:
        raise ImportError("object storage needs obstore: pip install 'pagepool[store]'") from error
    return obstore

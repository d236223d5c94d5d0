"""Object stores for tests: local, in memory, and in an S3 server started here if moto is installed."""

from __future__ import annotations

import functools
import logging
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import obstore.store

from pagepool.stores import ObjectStore, Store


def make_local(folder: Path) -> Store:
    return ObjectStore(obstore.store.LocalStore(folder, mkdir=True), "model/v1")


@functools.lru_cache(maxsize=4)
def find_memory(folder: Path) -> obstore.store.MemoryStore:
    return obstore.store.MemoryStore()


def make_memory(folder: Path) -> Store:
    return ObjectStore(find_memory(folder), "model/v1")


@functools.cache
def start_server() -> str:
    """Start an S3 server in a thread, and return its URL."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


def make_bucket(name: str) -> obstore.store.S3Store:
    """Return a bucket of the server, made if it is new."""
    request = urllib.request.Request(f"{start_server()}/{name}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request):
        return open_bucket(name)


def open_bucket(name: str) -> obstore.store.S3Store:
    """Return a bucket of the server."""
    return obstore.store.S3Store(
        name,
        endpoint=start_server(),
        access_key_id="id",
        secret_access_key="secret",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "30s"},
        retry_config={"max_retries": 0},
    )


def make_s3(folder: Path) -> Store:
    return ObjectStore(make_bucket(f"bucket-{crc32(str(folder).encode()):08x}"), "model/v1", max_concurrency=8)


MAKERS: dict[str, Callable[[Path], Store]] = {"objects-local": make_local, "objects-memory": make_memory}
if find_spec("moto") and find_spec("flask"):
    MAKERS["objects-s3"] = make_s3

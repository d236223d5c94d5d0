"""`ObjectStore` beyond the protocol: names, errors of the store, requests that hang."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_jobs import SECONDS, load, save, wait_for, wait_until

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.stores import Done, ObjectStore, object_storage

obstore = pytest.importorskip("obstore")
from object_stores import MAKERS, make_bucket, open_bucket  # noqa: E402
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store  # noqa: E402


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(memory: MemoryStore) -> Iterator[ObjectStore]:
    made = ObjectStore(memory, "model/v1", max_concurrency=2)
    yield made
    made.close(drain_seconds=0)


class Gate:
    """A function of obstore that waits until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.has_begun, self.may_go_on, self.num_done = threading.Event(), threading.Event(), 0
        self.function: Callable[..., Any] = getattr(obstore, name)
        monkeypatch.setattr(obstore, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.has_begun.set()
        self.may_go_on.wait(SECONDS)
        try:
            return self.function(*arguments, **options)
        finally:
            self.num_done += 1


def test_an_object_has_the_documented_name(store: ObjectStore, memory: MemoryStore) -> None:
    save(store, {b"\xab\x05": b"1234"})
    assert [(meta["path"], meta["size"]) for batch in obstore.list(memory) for meta in batch] == [("model/v1/ab/ab05", 4)]


def test_rows_are_finished_before_they_are_copied_and_not_after_close(store: ObjectStore) -> None:
    row = bytearray(b"...4")

    def finish(key: bytes, row: memoryview) -> None:
        row[:3] = key

    wait_for(store, store.save([b"123"], [memoryview(row)], finish=finish))
    assert load(store, [b"123"], [4])[1] == [b"1234"]
    store.close(drain_seconds=0)
    assert not store._bucket.save(b"567", memoryview(row), finish)
    assert row == b"1234"


def test_a_saved_row_may_change(store: ObjectStore) -> None:
    """MemoryStore keeps what it is given, so it has to be given a copy."""
    row = bytearray(b"1234" * 100_000)
    wait_for(store, store.save([b"key"], [memoryview(row)]))
    row[:] = bytes(len(row))
    done, rows = load(store, [b"key"], [len(row)])
    assert (done.is_done, rows) == (b"\1", [b"1234" * 100_000])


def test_an_object_of_another_length_is_not_transferred(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Found:
        meta = {"size": 1 << 40}  # noqa: RUF012

    save(store, {b"key": b"1234"})
    monkeypatch.setattr(obstore, "get", lambda *_: Found())
    done, _ = load(store, [b"key"], [4])
    assert done == Done(done.job, b"\0", None)
    assert f"model/v1/6b/6b6579: got {1 << 40} bytes, allowed: 4, the length of the row" in caplog.text


def test_an_object_shorter_than_announced_is_not_done(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        meta = {"size": 4}  # noqa: RUF012

        def bytes(self) -> bytes:
            return b"123"

    monkeypatch.setattr(obstore, "get", lambda *_: Found())
    done, rows = load(store, [b"key"], [4])
    assert (done, rows) == (Done(done.job, b"\0", None), [bytes(4)])


def test_errors_of_the_store_are_answers() -> None:
    """Nothing listens at this address."""
    bucket = S3Store(
        "bucket",
        endpoint="http://127.0.0.1:1",
        access_key_id="id",
        secret_access_key="secret",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "1s"},
        retry_config={"max_retries": 0},
    )
    store = ObjectStore(bucket, "n")
    row = bytearray(4)
    jobs = [store.lookup([b"a", b"b"]), store.load([b"a"], [memoryview(row)]), store.save([b"a"], [memoryview(row)])]
    answers = wait_for(store, *jobs)
    assert [done.is_done for done in answers] == [b"\0\0", b"\0", b"\0"]
    assert all("S3 error" in str(done.error) for done in answers)
    store.close(drain_seconds=0)


def test_a_bucket_without_permission_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("not a folder")
    store = ObjectStore(LocalStore(tmp_path), "n")
    (done,) = wait_for(store, store.save([b"key"], [memoryview(b"1")]))
    assert done.is_done == b"\0"
    assert done.error is not None
    store.close(drain_seconds=0)


@pytest.mark.skipif("objects-s3" not in MAKERS, reason="the server needs moto and flask")
def test_a_missing_bucket_is_an_error_of_each_answer() -> None:
    store = ObjectStore(open_bucket("missing"), "n")
    jobs = [store.lookup([b"key"]), store.load([b"key"], [memoryview(bytearray(1))]), store.save([b"key"], [memoryview(b"1")])]
    for done in wait_for(store, *jobs):
        assert done.is_done == b"\0"
        assert isinstance(done.error, Exception)
    make_bucket("missing")
    jobs = [store.lookup([b"key"]), store.load([b"key"], [memoryview(bytearray(1))])]
    assert wait_for(store, *jobs) == [Done(job, b"\0", None) for job in jobs]
    save(store, {b"key": b"1"})
    store.close(drain_seconds=0)


class Answers:
    """Functions of obstore that raise what a server says of missing objects, and of lists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, missing: str, listed: Exception | None) -> None:
        self.missing, self.listed, self.num_lists = missing, listed, 0
        for name in ("head", "get"):
            monkeypatch.setattr(obstore, name, self.find)
        monkeypatch.setattr(obstore, "list_with_delimiter", self.list_objects)

    def find(self, store: Any, path: str) -> None:
        raise FileNotFoundError(f"Object at location {path} not found: {self.missing}")

    def list_objects(self, store: Any, prefix: str) -> dict[str, list[Any]]:
        self.num_lists += 1
        if self.listed is not None:
            raise self.listed
        return {"common_prefixes": [], "objects": []}


HEAD = "status code: 404 Not Found: "
KEY = f"{HEAD}<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"
BUCKET = f"{HEAD}<Error><Code>NoSuchBucket</Code></Error>"
CONTAINER = f"{HEAD}<?xml version='1.0'?><Error><Code>ContainerNotFound</Code></Error>"
DENIED = RuntimeError("status code: 403 Forbidden: <Error><Code>AccessDenied</Code></Error>")


@pytest.mark.parametrize(
    ("missing", "listed", "is_error"),
    [
        (HEAD, None, False),
        (KEY, None, False),
        (HEAD, RuntimeError(BUCKET), True),
        (HEAD, RuntimeError(HEAD), True),
        (KEY, RuntimeError(CONTAINER), True),
        (BUCKET, DENIED, True),
        (CONTAINER, DENIED, True),
        (HEAD, DENIED, False),
        (KEY, TimeoutError("timed out"), False),
    ],
)
@pytest.mark.parametrize("kind", [S3Store, GCSStore, AzureStore])
def test_a_missing_bucket_is_told_from_a_missing_object(
    monkeypatch: pytest.MonkeyPatch, kind: Any, missing: str, listed: Exception | None, is_error: bool
) -> None:
    options = {"account_name": "account"} if kind is AzureStore else {}
    store = ObjectStore(kind("bucket-404", **options), "NoSuchBucket/404", max_concurrency=4)
    answers = Answers(monkeypatch, missing, listed)
    for done in wait_for(store, store.lookup([b"a", b"b"]), store.load([b"a"], [memoryview(bytearray(1))])):
        assert not any(done.is_done)
        assert (done.error is not None) == is_error
        if is_error:
            expected = r"store: got \w+Store\(.*\), whose bucket is missing, allowed: one whose bucket exists"
            assert re.fullmatch(expected, str(done.error))
    assert is_error or answers.num_lists == 1
    store.close(drain_seconds=0)


def test_a_bucket_may_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "SECONDS_OF_BUCKET", 0.0)
    store, answers = ObjectStore(S3Store("bucket"), "n"), Answers(monkeypatch, HEAD, None)
    for listed in (None, RuntimeError(HEAD), None):
        answers.listed = listed
        (done,) = wait_for(store, store.lookup([b"a"]))
        assert (done.error is None) == (listed is None)
    store.close(drain_seconds=0)


def test_a_store_without_buckets_lists_nothing(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, HEAD, RuntimeError(HEAD))
    (done,) = wait_for(store, store.lookup([b"a"]))
    assert done == Done(done.job, b"\0", None)
    assert answers.num_lists == 0


def test_close_does_not_wait_for_a_load_and_its_row_stays(
    store: ObjectStore, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, {b"key": b"1234"})
    gate, row = Gate(monkeypatch, "get"), bytearray(4)
    store.load([b"key"], [memoryview(row)])
    assert gate.has_begun.wait(SECONDS)
    store.close(drain_seconds=0)
    gate.may_go_on.set()
    wait_until(lambda: gate.num_done == 1)
    time.sleep(0.02)
    assert row == bytes(4)


def test_a_save_under_way_at_close_becomes_a_whole_object(
    store: ObjectStore, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, row = Gate(monkeypatch, "put"), bytearray(b"1234")
    store.save([bytes([i]) for i in range(10)], [memoryview(row)] * 10)
    assert gate.has_begun.wait(SECONDS)
    time.sleep(0.02)
    store.close(drain_seconds=0.01)
    row[:] = b"5678"
    gate.may_go_on.set()
    wait_until(lambda: gate.num_done == 2)  # one for each thread
    later = ObjectStore(memory, "model/v1")
    done, rows = load(later, [bytes([i]) for i in range(10)], [4] * 10)
    assert (done.is_done, rows[:2]) == (b"\1\1" + bytes(8), [b"1234"] * 2)
    later.close(drain_seconds=0)


def test_no_call_waits_for_a_request(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "head")
    jobs = [store.lookup([b"key"] * 10), store.lookup([b"key"])]
    assert store.poll() == []
    store.touch([b"key"])
    gate.may_go_on.set()
    assert [done.is_done for done in wait_for(store, *jobs)] == [bytes(10), bytes(1)]


def test_a_store_that_is_dropped_ends_its_threads(memory: MemoryStore) -> None:
    def count_threads() -> int:
        return sum(thread.name.startswith("pagepool-objects") for thread in threading.enumerate())

    wait_until(lambda: count_threads() == 0)
    store = ObjectStore(memory, "n", max_concurrency=5)
    assert count_threads() == 5
    del store
    gc.collect()
    wait_until(lambda: count_threads() == 0)


@pytest.mark.parametrize("bucket", [None, "s3://bucket", object()])
def test_other_stores_are_refused(bucket: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^store: got \w+, allowed: a store of obstore.store"):
        ObjectStore(bucket, "n")


def test_other_options_are_refused(memory: MemoryStore) -> None:
    with pytest.raises(ArgumentError, match=r"^namespace: got '\.\./n'"):
        ObjectStore(memory, "../n")
    with pytest.raises(ArgumentError, match=r"^max_concurrency: got .*, allowed: (at least )?1"):
        ObjectStore(memory, "n", max_concurrency=0)
    with pytest.raises(ArgumentTypeError, match=r"^max_concurrency: got .*, allowed: an int"):
        ObjectStore(memory, "n", max_concurrency="8")  # type: ignore[arg-type]


def test_without_obstore_the_error_names_the_extra() -> None:
    code = """if True:
        import sys
        sys.modules["obstore"] = None
        from pagepool.stores import Done, ObjectStore, object_storage
        try:
            ObjectStore(None, "n")
        except ImportError as error:
            print(error)
    """
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "object storage needs obstore: pip install 'pagepool[store]'\n"

"""`FileStore` beyond the protocol: its files, faults of the file system, several processes, limits of size."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from settings import NUM_OPERATIONS
from store_jobs import SECONDS, load, save, wait_for, wait_until

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.stores import Done, FileStore, files

NAMESPACE = "model/v1"
HOUR = 3600
MakeStore = Callable[..., FileStore]


class FaultyOs:
    """The module `os`, with some functions replaced."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    stores: list[FileStore] = []

    def make(folder: Path = tmp_path, **options: Any) -> FileStore:
        stores.append(FileStore(folder, NAMESPACE, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close(drain_seconds=0)


def list_files(folder: Path) -> list[Path]:
    """Return all files below a folder, also temporary ones."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files. Some may be removed meanwhile."""
    sizes = []
    for path in list_files(folder):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def save_one(store: FileStore, key: bytes, row: bytes) -> Done:
    (done,) = wait_for(store, store.save([key], [memoryview(row)]))
    return done


def path_of(folder: Path, key: bytes) -> Path:
    return folder / NAMESPACE / key.hex()[:2] / key.hex()


def test_a_file_has_the_documented_name_and_is_private(make_store: MakeStore, tmp_path: Path) -> None:
    save(make_store(), {b"\xab\x05": b"1234", b"\xff" * 64: b"5"})
    assert list_files(tmp_path) == [tmp_path / NAMESPACE / "ab" / "ab05", tmp_path / NAMESPACE / "ff" / ("ff" * 64)]
    status = path_of(tmp_path, b"\xab\x05").stat()
    assert status.st_size == 4
    assert stat.S_IMODE(status.st_mode) == 0o600
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_rows_are_finished_in_the_threads_of_the_store(make_store: MakeStore) -> None:
    store, threads = make_store(), set()

    def finish(key: bytes, row: memoryview) -> None:
        threads.add(threading.current_thread())
        if key == b"bad":
            raise ValueError("no checksum")
        row[:3] = key

    rows = [memoryview(bytearray(4)) for _ in range(2)]
    (done,) = wait_for(store, store.save([b"bad", b"one"], rows, finish=finish))
    assert (done.is_done, str(done.error)) == (b"\0\1", "no checksum")
    assert threading.main_thread() not in threads
    done, loaded = load(store, [b"bad", b"one"], [4, 4])
    assert (done.is_done, loaded[1]) == (b"\0\1", b"one\0")
    with pytest.raises(ArgumentTypeError, match="read-only memory"):
        store.save([b"one"], [memoryview(b"1234")], finish=finish)


def test_the_folder_does_not_follow_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore("objects", "n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save(store, {b"k": b"1"})
    store.close(drain_seconds=1)
    assert list_files(tmp_path) == [tmp_path / "objects/n/6b/6b"]


def test_namespaces_are_apart(tmp_path: Path) -> None:
    """Also one that looks like a folder of another's keys."""
    stores = [FileStore(tmp_path, name, max_bytes=1 << 20) for name in ("a", "a/6b", "b.c-d_e/1")]
    for i, store in enumerate(stores):
        save(store, {b"key": bytes([i])})
    for i, store in enumerate(stores):
        done, rows = load(store, [b"key"], [1])
        assert (done.is_done, rows) == (b"\1", [bytes([i])])
        store.close(drain_seconds=0)


class Disk:
    """The names that a power loss leaves: those of folders that were synced after the names were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, set[str]] = {}  # by folder
        self.synced_files: set[int] = set()
        self.num_synced = 0
        functions = {name: getattr(self, name) for name in ("mkdir", "fsync", "replace")}
        monkeypatch.setattr(files, "os", FaultyOs(**functions))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self.names.setdefault(path, set()).update(os.listdir(path))
        else:
            self.synced_files.add(os.fstat(descriptor).st_ino)
        self.num_synced += 1
        os.fsync(descriptor)

    def replace(self, source: str, target: str) -> None:
        assert os.stat(source).st_ino in self.synced_files
        os.replace(source, target)

    def has(self, path: Path) -> bool:
        """Whether a file and all folders above it are still there."""
        return all(each.name in self.names.get(str(each.parent), ()) for each in (path, *path.parents) if each.name)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the paths of descriptors")
class TestSync:
    def test_saved_files_outlive_a_power_loss(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With their names, and those of all folders above them, also of folders that were there."""
        disk, folder = Disk(monkeypatch), tmp_path / "new" / "store"
        store, other = make_store(folder, fsync=True), make_store(folder, fsync=True)
        keys = [bytes([i // 8, i]) for i in range(24)]
        jobs = {store.save([key], [memoryview(b"1")]): key for key in keys}
        saved: list[bytes] = []
        deadline = time.monotonic() + SECONDS
        while len(saved) < len(keys):
            assert time.monotonic() < deadline
            for done in store.poll():
                assert done == Done(done.job, b"\1", None)
                saved.append(jobs[done.job])
                assert disk.has(path_of(folder, saved[-1]))
        disk.names.clear()
        save(other, {b"\0key": b"1"})
        assert disk.has(path_of(folder, b"\0key"))

    def test_folders_are_synced_once(self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store, disk = make_store(fsync=True), Disk(monkeypatch)
        save(store, {b"a": b"1"})
        num_synced = disk.num_synced
        save(store, {b"a": b"2", b"aa": b"3"})
        assert disk.num_synced == num_synced + 4  # each file, and its folder
        save(store, {b"b": b"1"})
        assert disk.num_synced == num_synced + 4 + 3

    def test_folders_that_were_removed_are_synced_again(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, disk = make_store(tmp_path / "store", fsync=True), Disk(monkeypatch)
        save(store, {b"a": b"1", b"b": b"1"})
        subprocess.run(["rm", "-r", str(tmp_path / "store")], check=True)
        disk.names.clear()
        save(store, {b"b": b"1"})
        assert disk.has(path_of(tmp_path / "store", b"b"))

    def test_without_fsync_nothing_is_synced(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk(monkeypatch)
        monkeypatch.setattr(disk, "synced_files", range(1 << 62))
        monkeypatch.setattr(files, "os", FaultyOs(fsync=disk.fsync))
        save(make_store(), {b"a": b"1"})
        assert disk.num_synced == 0

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
    @pytest.mark.parametrize("name", ["6b", "v1", "model", "store", "file"])
    def test_a_name_that_may_be_lost_is_no_save(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
    ) -> None:
        """Nor does it make a later one believe that it is on the disk."""
        disk, folder, is_faulty = Disk(monkeypatch), tmp_path / "store", True
        path = path_of(folder, b"k")
        failing = next((each.parent for each in path.parents if each.name == name), path.parent)

        def fsync(descriptor: int) -> None:
            if is_faulty and os.readlink(f"/proc/self/fd/{descriptor}") == str(failing):
                raise OSError(number, "failed")
            disk.fsync(descriptor)

        monkeypatch.setattr(files, "os", FaultyOs(mkdir=disk.mkdir, replace=disk.replace, fsync=fsync))
        store = make_store(folder, fsync=True)
        for _ in range(2):
            done = save_one(store, b"k", b"1")
            assert (done.is_done, type(done.error)) == (b"\0", type(OSError(number, "")))
            assert list_files(tmp_path) == []
        is_faulty = False
        save(store, {b"k": b"1"})
        assert disk.has(path_of(folder, b"k"))

    def test_folders_above_may_be_unreadable(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process did not make them. Nor do all file systems sync folders."""

        def open_file(path: str, *arguments: Any) -> int:
            if path in map(str, tmp_path.parents):
                raise PermissionError(errno.EACCES, "unreadable")
            return os.open(path, *arguments)

        def fsync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not for folders")
            os.fsync(descriptor)

        monkeypatch.setattr(files, "os", FaultyOs(open=open_file, fsync=fsync))
        save(make_store(fsync=True), {b"a": b"1"})


class TestFaults:
    @pytest.mark.parametrize("function", ["open", "write", "close", "replace", "fsync"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT])
    def test_a_failed_save_is_an_answer_and_leaves_nothing(
        self,
        make_store: MakeStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        function: str,
        number: int,
    ) -> None:
        store = make_store(fsync=True)
        save(store, {b"old": b"old"})

        def fail(*arguments: Any) -> Any:
            if function == "close":
                os.close(*arguments)
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(files, "os", FaultyOs(**{function: fail}))
            for key in (b"old", b"new"):
                done = save_one(store, key, b"new bytes")
                assert done.is_done == b"\0"
                assert isinstance(done.error, OSError)
                assert done.error.errno == number
        assert list_files(tmp_path) == [path_of(tmp_path, b"old")]
        done, rows = load(store, [b"old", b"new"], [3, 9])
        assert (done.is_done, rows[0]) == (b"\1\0", b"old")
        assert save_one(store, b"new", b"new bytes").is_done == b"\1"

    def test_short_reads_and_writes_go_on(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def write(descriptor: int, row: memoryview) -> int:
            return os.write(descriptor, row[:7])

        def readv(descriptor: int, buffers: list[Any]) -> int:
            return os.readv(descriptor, [buffers[0][:11]])

        monkeypatch.setattr(files, "os", FaultyOs(write=write, readv=readv))
        store, row = make_store(), bytes(range(200))
        save(store, {b"key": row})
        done, rows = load(store, [b"key"], [200])
        assert (done.is_done, rows) == (b"\1", [row])
        done, _ = load(store, [b"key"], [201])
        assert done.is_done == b"\0"

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
    def test_failed_loads_and_lookups_are_answers(
        self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        store = make_store()
        save(store, {b"key": b"1234"})

        def fail(*_: Any) -> Any:
            raise OSError(number, "failed")

        monkeypatch.setattr(files, "os", FaultyOs(lstat=fail, readv=fail))
        (done,) = wait_for(store, store.lookup([b"key"]))
        assert done.is_done == b"\0"
        assert isinstance(done.error, OSError)
        done, _ = load(store, [b"key"], [4])
        assert done.is_done == b"\0"
        assert isinstance(done.error, OSError)

    def test_errors_hold_no_rows(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A log may keep an error, and the engine has to be able to release its memory."""

        def fail(*_: Any) -> Any:
            raise OSError(errno.EIO, "failed")

        store = make_store()
        save(store, {b"key": b"1234"})
        monkeypatch.setattr(files, "os", FaultyOs(readv=fail, write=fail))
        row = np.zeros(4, np.uint8)
        is_alive = weakref.ref(row)
        jobs = [store.load([b"key"], [memoryview(row)]), store.save([b"key"], [memoryview(row)])]
        answers = wait_for(store, *jobs)
        del row
        wait_until(lambda: is_alive() is None)
        assert [done.is_done for done in answers] == [b"\0", b"\0"]

    def test_a_file_in_place_of_a_folder_is_an_error_of_each_job(self, make_store: MakeStore, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        store = make_store(tmp_path / "file", max_bytes=1 << 20)
        assert isinstance(save_one(store, b"key", b"1").error, OSError)
        (done,) = wait_for(store, store.lookup([b"key"]))
        assert (done.is_done, type(done.error)) == (b"\0", NotADirectoryError)
        assert list_files(tmp_path) == [tmp_path / "file"]

    def test_a_missing_folder_is_a_miss_and_is_made_by_a_save(self, make_store: MakeStore, tmp_path: Path) -> None:
        store = make_store(tmp_path / "missing" / "deep", max_bytes=1 << 20)
        done, _ = load(store, [b"key"], [1])
        assert done == Done(done.job, b"\0", None)
        assert list(tmp_path.iterdir()) == []
        save(store, {b"key": b"1"})
        subprocess.run(["rm", "-r", str(tmp_path / "missing")], check=True)
        (done,) = wait_for(store, store.lookup([b"key"]))
        assert done == Done(done.job, b"\0", None)
        save(store, {b"key": b"2"})
        done, rows = load(store, [b"key"], [1])
        assert (done.is_done, rows) == (b"\1", [b"2"])

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_read_only_folder_can_be_read(self, make_store: MakeStore, tmp_path: Path) -> None:
        store = make_store()
        save(store, {b"key": b"1"})
        folder = path_of(tmp_path, b"key").parent
        folder.chmod(0o500)
        try:
            assert isinstance(save_one(store, b"key", b"2").error, PermissionError)
            done, rows = load(store, [b"key"], [1])
            assert (done.is_done, rows) == (b"\1", [b"1"])
        finally:
            folder.chmod(0o700)

    @pytest.mark.parametrize("size", [0, 1, 3, 5, 1000])
    def test_a_file_of_another_length_is_not_done_until_it_is_saved_again(
        self, make_store: MakeStore, tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The store works, so that is no error of it."""
        store = make_store()
        save(store, {b"key": b"1234"})
        path_of(tmp_path, b"key").write_bytes(bytes(size))
        done, _ = load(store, [b"key"], [4])
        assert done == Done(done.job, b"\0", None)
        assert re.search(r"/6b6579: got .*\d+ bytes, allowed: 4, the length of the row", caplog.text)
        save(store, {b"key": b"1234"})
        done, rows = load(store, [b"key"], [4])
        assert (done.is_done, rows) == (b"\1", [b"1234"])

    @pytest.mark.parametrize("seed", range(3))
    def test_random_faults(self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        """Calls fail, are short, and files vanish. A done load brings the last saved bytes, and nothing is left over."""
        rng, lock, probability = random.Random(seed), threading.Lock(), 0.05

        def has_fault() -> bool:
            with lock:
                return rng.random() < probability

        def make_faulty(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if name == "close":
                    os.close(*arguments)
                if has_fault():
                    raise OSError(rng.choice([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR]), name)
                return None if name == "close" else getattr(os, name)(*arguments, **options)

            return call

        def write(descriptor: int, row: memoryview) -> int:
            return os.write(descriptor, row[: max(1, len(row) // 3)] if has_fault() else row)

        def readv(descriptor: int, buffers: list[Any]) -> int:
            return os.readv(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]] if has_fault() else buffers)

        names = ("open", "close", "replace", "stat", "lstat", "fstat", "utime", "mkdir", "fsync", "scandir")
        faulty = FaultyOs(write=write, readv=readv, **{name: make_faulty(name) for name in names})
        monkeypatch.setattr(files, "os", faulty)
        store = make_store(fsync=True, max_bytes=1 << 30)
        keys = [bytes([i]) for i in range(20)]
        stored: dict[bytes, bytes] = {}
        for _ in range(max(50, NUM_OPERATIONS // 100)):
            chosen = rng.sample(keys, rng.randint(1, 8))
            kind = rng.choice(["save", "load", "lookup", "vanish", "touch"])
            if kind == "save":
                rows = [rng.randbytes(5000) for _ in chosen]
                (done,) = wait_for(store, store.save(chosen, [memoryview(row) for row in rows]))
                stored |= {key: row for key, row, is_done in zip(chosen, rows, done.is_done, strict=True) if is_done}
                assert (done.error is None) == all(done.is_done), seed
                stored = {key: row for key, row in stored.items() if path_of(tmp_path, key).exists()}  # a failure may remove it
            elif kind == "load":
                done, loaded = load(store, chosen, [5000] * len(chosen))
                for key, row, is_done in zip(chosen, loaded, done.is_done, strict=True):
                    assert not is_done or row == stored.get(key), seed
                    assert is_done or done.error or key not in stored, seed
            elif kind == "lookup":
                (done,) = wait_for(store, store.lookup(chosen))
                for key, is_done in zip(chosen, done.is_done, strict=True):
                    assert not is_done or key in stored, seed
                    assert is_done or done.error or key not in stored, seed
            elif kind == "vanish":
                stored.pop(chosen[0], None)
                path_of(tmp_path, chosen[0]).unlink(missing_ok=True)
            else:
                store.touch(chosen)
        monkeypatch.undo()
        done, loaded = load(store, keys, [5000] * len(keys))
        assert {key: row for key, row, is_done in zip(keys, loaded, done.is_done, strict=True) if is_done} == stored, seed
        assert list_files(tmp_path) == sorted(path_of(tmp_path, key) for key in stored), seed


def make_socket(path: Path, target: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # paths of sockets are short
        made.bind(path.name)


OTHER_KINDS: dict[str, Callable[[Path, Path], object]] = {
    "fifo": lambda path, target: os.mkfifo(path),
    "socket": make_socket,
    "folder": lambda path, target: path.mkdir(),
    "link": lambda path, target: path.symlink_to(target),
    "link to itself": lambda path, target: path.symlink_to(path),
    "link to nothing": lambda path, target: path.symlink_to(target / "nothing"),
    "link to a folder": lambda path, target: path.symlink_to(target.parent),
    "device": lambda path, target: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),  # endless zeros
    "link to a device": lambda path, target: path.symlink_to("/dev/zero"),
    "block device": lambda path, target: os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(240, 0)),
}


class TestOtherKinds:
    """Something else has the name of a file. Nothing waits for it, and nothing is read through it."""

    @pytest.fixture(params=OTHER_KINDS)
    def other(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        """A path that is no file, in the place of one with the key b"key"."""
        target = tmp_path / "target"
        target.write_bytes(b"1234")
        os.utime(target, (5, 5))
        path = path_of(tmp_path, b"key")
        path.parent.mkdir(parents=True, mode=0o700)
        try:
            OTHER_KINDS[request.param](path, target)
        except PermissionError:
            pytest.skip("only root makes devices")
        return path

    def test_it_is_not_done(self, make_store: MakeStore, other: Path, caplog: pytest.LogCaptureFixture) -> None:
        store = make_store(num_threads=1)
        save(store, {b"next": b"5678"})
        (done,) = wait_for(store, store.lookup([b"key", b"next"]))
        assert done == Done(done.job, b"\0\1", None)
        done, rows = load(store, [b"key", b"next"], [4, 4])
        assert (done, rows) == (Done(done.job, b"\0\1", None), [bytes(4), b"5678"])
        assert re.search(r"damaged objects, 1 by now: .*/6b6579: got mode [pslcdb]\S+, allowed: a file", caplog.text)

    def test_a_save_takes_its_place(self, make_store: MakeStore, tmp_path: Path, other: Path) -> None:
        """Behind a link the other file stays."""
        store, is_folder = make_store(), other.is_dir() and not other.is_symlink()
        store.touch([b"key"])
        done = save_one(store, b"key", b"new")
        assert done.is_done == (b"\0" if is_folder else b"\1")
        assert isinstance(done.error, OSError) == is_folder
        done, rows = load(store, [b"key"], [3])
        assert (done.is_done, rows[0]) == ((b"\0", bytes(3)) if is_folder else (b"\1", b"new"))
        target = tmp_path / "target"
        assert (target.read_bytes(), target.stat().st_mtime) == (b"1234", 5)

    def test_it_is_neither_counted_nor_removed(self, make_store: MakeStore, tmp_path: Path, other: Path) -> None:
        temporary = other.parent / f".{'0' * 16}-1.tmp"
        other.rename(temporary)
        other.symlink_to(tmp_path / "target")
        os.utime(temporary, (5, 5), follow_symlinks=False)
        save(make_store(), {bytes([i]): b"1" * 5 for i in range(3)})
        os.utime(path_of(tmp_path, b"\0"), (5, 5))
        make_store(max_bytes=10)
        wait_until(lambda: not path_of(tmp_path, b"\0").exists())
        assert path_of(tmp_path, b"\2").exists()
        assert (temporary.lstat().st_mtime, other.is_symlink()) == (5, True)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "link to a device"])
def test_no_folder_is_waited_for(make_store: MakeStore, tmp_path: Path, kind: str) -> None:
    """Something else has the name of a folder."""
    path = path_of(tmp_path, b"key").parent
    path.parent.mkdir(parents=True)
    try:
        OTHER_KINDS[kind](path, tmp_path)
    except PermissionError:
        pytest.skip("only root makes devices")
    store = make_store(max_bytes=1 << 20)
    assert isinstance(save_one(store, b"key", b"1").error, OSError)
    done, _ = load(store, [b"key"], [1])
    assert isinstance(done.error, OSError)
    (done,) = wait_for(store, store.lookup([b"key"]))
    assert isinstance(done.error, OSError)


def test_many_damaged_objects_are_logged_seldom(
    make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, keys = make_store(), [bytes([i]) for i in range(100)]
    save(store, dict.fromkeys(keys, b"1234"))
    load(store, keys, [5] * 100)
    assert sorted(record.args[0] for record in caplog.records) == [1, 2, 4, 8, 16, 32, 64]  # type: ignore[index]


class TestThreads:
    def test_no_call_waits_for_a_file(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """All threads hang in the file system; calls return, and nothing is answered until it goes on."""
        may_go_on = threading.Event()
        store = make_store(num_threads=2)
        save(store, {b"key": b"1234"})

        def hang(path: str, *arguments: Any) -> int:
            may_go_on.wait(SECONDS)
            return os.open(path, *arguments)

        monkeypatch.setattr(files, "os", FaultyOs(open=hang))
        row = bytearray(4)
        jobs = [store.load([b"key"] * 100, [memoryview(row)] * 100), store.save([b"other"], [memoryview(b"5678")])]
        jobs.append(store.lookup([b"key"]))
        store.touch([b"key"])
        assert store.poll() == []
        may_go_on.set()
        assert [set(done.is_done) for done in wait_for(store, *jobs)] == [{1}, {1}, {1}]

    def test_lookups_come_first_and_saves_last(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        may_go_on, has_begun = threading.Event(), threading.Event()
        store = make_store(num_threads=1)

        def replace(source: str, target: str) -> None:
            has_begun.set()
            may_go_on.wait(SECONDS)
            os.replace(source, target)

        monkeypatch.setattr(files, "os", FaultyOs(replace=replace))
        jobs = {store.save([b"a", b"b"], [memoryview(b"1")] * 2): "save"}
        assert has_begun.wait(SECONDS)
        jobs[store.save([b"c"], [memoryview(b"1")])] = "save"
        jobs[store.load([b"a"], [memoryview(bytearray(1))])] = "load"
        jobs[store.lookup([b"a"])] = "lookup"
        may_go_on.set()
        answered: list[Done] = []
        wait_until(lambda: collect(store, answered) == 4)
        assert [jobs[done.job] for done in answered] == ["lookup", "load", "save", "save"]

    def test_close_waits_for_a_load_that_is_under_way(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        may_go_on, has_begun = threading.Event(), threading.Event()
        store = make_store()
        save(store, {b"key": b"1234"})

        def readv(descriptor: int, buffers: list[Any]) -> int:
            has_begun.set()
            may_go_on.wait(SECONDS)
            return os.readv(descriptor, buffers)

        monkeypatch.setattr(files, "os", FaultyOs(readv=readv))
        row = bytearray(4)
        store.load([b"key"], [memoryview(row)])
        assert has_begun.wait(SECONDS)
        closing = threading.Thread(target=store.close, kwargs={"drain_seconds": 0})
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        may_go_on.set()
        closing.join(SECONDS)
        assert not closing.is_alive()
        assert row == b"1234"

    @pytest.mark.parametrize("name", ["finish", "touch", "remove"])
    def test_a_thread_of_the_store_may_close_it(
        self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """As the garbage collector does that deletes an engine there."""
        store, errors, is_closed = make_store(max_bytes=1 << 20), list[BaseException](), threading.Event()

        def close(*_: Any, **__: Any) -> None:
            try:
                store.close(drain_seconds=0.01)
            except BaseException as error:
                errors.append(error)
            is_closed.set()

        if name == "finish":
            store.save([b"key"], [memoryview(bytearray(4))], finish=close)
        elif name == "remove":
            monkeypatch.setattr(files, "os", FaultyOs(unlink=close))
            num_saved = 0
            with contextlib.suppress(ArgumentError):  # closed between the question and the save
                while not is_closed.wait(0.05) and num_saved < SECONDS * 20:  # each save lets it look again
                    store.save([bytes([num_saved % 256])], [memoryview(bytes(600_000))])
                    num_saved += 1
        else:
            monkeypatch.setattr(files, "os", FaultyOs(utime=close))
            store.touch([b"key"])
        assert is_closed.wait(SECONDS)
        assert errors == []
        with pytest.raises(ArgumentError, match="closed store"):
            store.poll()

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts calls")
    def test_a_signal_may_close_it(self, tmp_path: Path) -> None:
        """In the middle of another call, whose thread holds the lock."""
        code = f"""if True:
            import signal
            from pagepool.stores import FileStore
            def close(*_):
                store.close(drain_seconds=0.01)
            signal.signal(signal.SIGALRM, close)
            for i in range(8):
                store = FileStore({str(tmp_path)!r}, "n", max_bytes=1 << 20)
                signal.setitimer(signal.ITIMER_REAL, 0.002 + i * 0.0004)
                try:
                    while True:
                        store.lookup([b"key"])
                        store.poll()
                except ValueError:
                    pass
            print("end")
        """
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True)
        assert output.stdout == "end\n"

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
    def test_no_error_ends_a_thread(self, make_store: MakeStore, error: type[BaseException]) -> None:
        """A library in Rust panics with an error that is no `Exception`."""

        def finish(key: bytes, row: memoryview) -> None:
            if key == b"bad":
                raise error("panic")

        store, row = make_store(num_threads=1), memoryview(bytearray(4))
        (done,) = wait_for(store, store.save([b"bad", b"good"], [row, row], finish=finish))
        assert (done.is_done, str(done.error)) == (b"\0\1", f"{error.__name__}: panic")

    def test_close_cancels_loads_that_have_not_begun(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        may_go_on, has_begun = threading.Event(), threading.Event()
        store = make_store(num_threads=1)
        save(store, {b"key": b"1234"})

        def replace(source: str, target: str) -> None:
            has_begun.set()
            may_go_on.wait(SECONDS)
            os.replace(source, target)

        monkeypatch.setattr(files, "os", FaultyOs(replace=replace))
        row = bytearray(4)
        store.save([b"a", b"b"], [memoryview(b"1")] * 2)
        assert has_begun.wait(SECONDS)
        store.load([b"key"], [memoryview(row)])
        closing = threading.Thread(target=store.close, kwargs={"drain_seconds": SECONDS})
        closing.start()
        wait_until(lambda: store._jobs._is_closed)
        may_go_on.set()
        closing.join(SECONDS)
        assert row == bytes(4)
        (done,) = wait_for(later := make_store(), later.lookup([b"a", b"b"]))
        assert done.is_done == b"\1\1"

    def test_close_cancels_saves_that_are_late(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write(descriptor: int, row: memoryview) -> int:
            time.sleep(0.02)
            return os.write(descriptor, row)

        monkeypatch.setattr(files, "os", FaultyOs(write=write))
        store = make_store()
        store.save([i.to_bytes(2, "big") for i in range(5000)], [memoryview(b"1")] * 5000)
        store.close(drain_seconds=0.1)
        saved = list_files(tmp_path)
        assert 0 < len(saved) < 5000
        assert all(path.read_bytes() == b"1" for path in saved)

    def test_a_store_that_is_dropped_ends_its_threads(self, tmp_path: Path) -> None:
        def count_threads() -> int:
            return sum(thread.name.startswith("pagepool-files") for thread in threading.enumerate())

        before = count_threads()
        store = FileStore(tmp_path, "n", max_bytes=1 << 20, num_threads=3)
        save(store, {b"key": b"1"})
        assert count_threads() == before + 4
        del store
        gc.collect()
        wait_until(lambda: count_threads() == before)

    @pytest.mark.parametrize("is_busy", [False, True])
    def test_the_interpreter_ends_without_close(self, tmp_path: Path, is_busy: bool) -> None:
        code = f"""if True:
            from pagepool.stores import FileStore
            store = FileStore({str(tmp_path)!r}, "n", max_bytes=1 << 20)
            rows = [memoryview(bytes(1000))] * 2000
            store.save([i.to_bytes(2, "big") for i in range(2000)], rows) if {is_busy} else None
            print("end")
        """
        command = [sys.executable, "-W", "error", "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")

    @pytest.mark.parametrize("at", ["exit", "end"])
    def test_the_interpreter_ends_with_close(self, tmp_path: Path, at: str) -> None:
        """The end of its threads leaves locks held. Functions at exit run before."""
        code = f"""if True:
            import atexit, threading
            from pagepool.stores import FileStore
            class Engine:
                def __init__(self):
                    self.store = FileStore({str(tmp_path)!r}, "n", max_bytes=1 << 20)
                def __del__(self):
                    print("close")
                    self.store.close(drain_seconds=60)
            engine = Engine()
            engine.store.save([i.to_bytes(2, "big") for i in range(200)], [memoryview(bytes(1000))] * 200)
            if {at!r} == "exit":
                atexit.register(engine.store.close, drain_seconds=60)
            else:
                thread = threading.Thread(target=engine.store._jobs._lock.acquire)
                thread.start()
                thread.join()
                del thread
        """
        command = [sys.executable, "-W", "error", "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "close\n", "")
        assert at != "exit" or len(list_files(tmp_path)) == 200

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_process_needs_a_store_of_its_own(self, tmp_path: Path) -> None:
        code = f"""if True:
            import os, sys, time
            from pagepool.stores import FileStore
            store = FileStore({str(tmp_path)!r}, "n", max_bytes=1 << 20)
            job = store.save([i.to_bytes(2, "big") for i in range(200)], [memoryview(bytes(1000))] * 200)
            def wait_for(store, job):
                while not (answers := store.poll()):
                    time.sleep(0.001)
                return answers[0].is_done == b"\\1" * 200
            if (child := os.fork()) == 0:
                refused = 0
                calls = [store.poll, lambda: store.lookup([b"k"]), lambda: store.touch([b"k"]),
                         lambda: store.save([b"k"], [memoryview(b"1")])]
                for call in calls:
                    try:
                        call()
                    except ValueError:
                        refused += 1
                store.close(drain_seconds=100)
                other = FileStore({str(tmp_path)!r}, "n")
                del store
                is_saved = wait_for(other, other.save([bytes([1, i]) for i in range(200)], [memoryview(bytes(9))] * 200))
                os._exit(refused + 10 * is_saved)
            is_saved = wait_for(store, job)
            print(is_saved, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
        output = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        assert output == "True 14\n"


def collect(store: FileStore, answers: list[Done]) -> int:
    """Add the next answers, and return the number of all."""
    answers.extend(store.poll())
    return len(answers)


class TestRoom:
    def test_files_unused_for_longest_are_removed(self, make_store: MakeStore, tmp_path: Path) -> None:
        keys = [bytes([i]) for i in range(100)]
        store = make_store()
        save(store, {key: bytes(1000) for key in keys})
        for i, key in enumerate(keys):
            os.utime(path_of(tmp_path, key), (0, i))
        store.touch([keys[0], keys[7]])
        wait_until(lambda: path_of(tmp_path, keys[7]).stat().st_mtime > 100)
        limited = make_store(max_bytes=50_000)
        wait_until(lambda: limited._room._num_bytes == 49_000)
        assert [path.name for path in list_files(tmp_path)] == [key.hex() for key in (keys[0], keys[7], *keys[-47:])]
        save(limited, {b"\xf0": bytes(1000)})
        assert len(list_files(tmp_path)) == 50
        save(limited, {b"\xf1": bytes(1000)})
        wait_until(lambda: count_bytes(tmp_path) <= 49_500)
        names = {path.name for path in list_files(tmp_path)}
        assert {"f0", "f1", keys[0].hex(), keys[7].hex()} <= names
        assert keys[-47].hex() not in names

    def test_a_file_used_after_the_listing_stays(self, make_store: MakeStore, tmp_path: Path) -> None:
        """Another process may use it, too: its time is read again before it is removed."""
        keys = [bytes([i]) for i in range(40)]
        save(make_store(), {key: bytes(1000) for key in keys})
        for i, key in enumerate(keys):
            os.utime(path_of(tmp_path, key), (0, i))
        limited = make_store(max_bytes=40_000)
        wait_until(lambda: len(limited._room._oldest) > 0)
        os.utime(path_of(tmp_path, keys[0]))
        path_of(tmp_path, keys[1]).unlink()
        save(limited, {b"\xf0": bytes(1000), b"\xf1": bytes(1000)})
        wait_until(lambda: not path_of(tmp_path, keys[2]).exists())
        assert path_of(tmp_path, keys[0]).exists()

    def test_a_time_beyond_now_is_the_oldest(self, make_store: MakeStore, tmp_path: Path) -> None:
        """A clock was ahead, and was put back: the files of then are removed before others, in their order."""
        keys = [bytes([i]) for i in range(100)]
        save(make_store(), {key: bytes(1000) for key in keys})
        for i, key in enumerate(keys):
            os.utime(path_of(tmp_path, key), (0, time.time() + HOUR + i if i < 60 else i))
        limited = make_store(max_bytes=50_000)
        wait_until(lambda: limited._room._num_bytes == 49_000)
        assert [path.name for path in list_files(tmp_path)] == [key.hex() for key in keys[-49:]]
        for key in keys[-20:]:
            os.utime(path_of(tmp_path, key), (0, time.time() + 30))
        more = [bytes([200, i]) for i in range(30)]
        for key in more:
            wait_until(lambda key=key: save_one(limited, key, bytes(1000)).is_done == b"\1")
        wait_until(lambda: count_bytes(tmp_path) <= 50_000)
        names = {path.name for path in list_files(tmp_path)}
        assert names >= {key.hex() for key in more}
        assert not names & {key.hex() for key in keys[-20:]}

    def test_times_are_those_of_the_file_system(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server's clock is ahead of this machine's."""
        monkeypatch.setattr(files, "time", FaultyTime(time.monotonic, behind=10 * HOUR))
        old = [bytes([i]) for i in range(45)]
        save(make_store(), {key: bytes(1000) for key in old})
        for key in old:
            os.utime(path_of(tmp_path, key), (0, time.time() - 11 * HOUR))
        store = make_store(max_bytes=50_000)
        new = [bytes([200, i]) for i in range(40)]
        for key in new:
            wait_until(lambda key=key: save_one(store, key, bytes(1000)).is_done == b"\1")
        wait_until(lambda: count_bytes(tmp_path) <= 50_000)
        assert {path.name for path in list_files(tmp_path)} >= {key.hex() for key in new}

    @pytest.mark.parametrize("nanoseconds", [-(1 << 62), 1 << 62, 1 << 63, 10**24])
    def test_any_time_is_ordered(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nanoseconds: int
    ) -> None:
        """Also where a file system has times of more than 64 bits."""
        keys = [bytes([i]) for i in range(20)]
        save(make_store(), {key: bytes(1000) for key in keys})
        os.utime(path_of(tmp_path, keys[7]), ns=(0, 12345))
        get_time = files.time_of
        monkeypatch.setattr(files, "time_of", lambda status: get_time(FarStatus(status, nanoseconds)))  # type: ignore[arg-type]
        make_store(max_bytes=19_500)
        wait_until(lambda: count_bytes(tmp_path) <= 19_500)
        assert not path_of(tmp_path, keys[7]).exists()

    def test_temporary_files_of_another_time_are_removed(self, make_store: MakeStore, tmp_path: Path) -> None:
        folder = path_of(tmp_path, b"key").parent
        folder.mkdir(parents=True)
        ages = {-1000 * HOUR: False, -2 * HOUR: False, -HOUR // 2: True, 0: True, HOUR // 2: True, 2 * HOUR: False}
        paths = {age: folder / f".{'0' * 16}-{i}.tmp" for i, age in enumerate(ages)}
        for age, path in paths.items():
            path.write_bytes(b"left over")
            os.utime(path, (time.time() - age,) * 2)
        make_store()
        wait_until(lambda: not any(paths[age].exists() for age, is_kept in ages.items() if not is_kept))
        time.sleep(0.02)
        assert all(paths[age].exists() for age, is_kept in ages.items() if is_kept)

    def test_files_of_other_processes_are_found(self, make_store: MakeStore, tmp_path: Path) -> None:
        limited, other = make_store(max_bytes=100_000), make_store()
        save(limited, {b"\1": bytes(1000)})
        save(other, {bytes([2, i]): bytes(1000) for i in range(150)})
        for i in range(7):
            save_one(limited, bytes([3, i]), bytes(1000))  # not done while the others' files are removed
        wait_until(lambda: count_bytes(tmp_path) <= 100_000)
        assert not path_of(tmp_path, b"\1").exists()

    def test_a_file_that_vanishes_while_files_are_listed(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process removed it."""
        save(make_store(), {bytes([i]): bytes(1000) for i in range(50)})

        def scandir(path: str) -> Any:
            listed = [*os.scandir(path)]
            if path.endswith("05"):
                Path(path, "05").unlink(missing_ok=True)
            return contextlib.nullcontext(listed)

        monkeypatch.setattr(files, "os", FaultyOs(scandir=scandir))
        make_store(max_bytes=20_000)
        wait_until(lambda: count_bytes(tmp_path) <= 20_000)

    def test_a_store_answers_while_files_are_listed(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(make_store(), {bytes([i]): bytes(1000) for i in range(50)})
        may_go_on = threading.Event()

        def scandir(path: str) -> Any:
            may_go_on.wait(SECONDS)
            return os.scandir(path)

        monkeypatch.setattr(files, "os", FaultyOs(scandir=scandir))
        store = make_store(max_bytes=20_000)
        save(store, {b"\xf0": b"1234"})
        done, _ = load(store, [b"\xf0", b"\1"], [4, 1000])
        assert done.is_done == b"\1\1"
        assert len(list_files(tmp_path)) == 51
        may_go_on.set()
        wait_until(lambda: count_bytes(tmp_path) <= 20_000)

    def test_files_that_cannot_be_removed_are_not_listed_for_every_save(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(make_store(), {bytes([i]): bytes(1000) for i in range(100)})
        num_listed = 0

        def scandir(path: str) -> Any:
            nonlocal num_listed
            num_listed += 1
            return os.scandir(path)

        def unlink(path: str) -> None:
            raise PermissionError(errno.EACCES, path)

        monkeypatch.setattr(files, "os", FaultyOs(scandir=scandir, unlink=unlink))
        now = 1000.0
        monkeypatch.setattr(files, "time", FaultyTime(lambda: now))
        store = make_store(max_bytes=64_000)
        wait_until(lambda: store._room._rests_until > now)
        num_listed = 0
        for i in range(100):
            assert save_one(store, bytes([i]), bytes(1000)) == Done(i + 1, b"\0", None)
        time.sleep(0.02)
        assert num_listed == 0
        monkeypatch.undo()
        wait_until(lambda: save_one(store, b"\1", bytes(1000)).is_done == b"\1")
        wait_until(lambda: count_bytes(tmp_path) <= 64_000)

    def test_saves_are_not_done_while_files_are_removed_too_slowly(
        self, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_go_on = threading.Event()

        def unlink(path: str) -> None:
            may_go_on.wait(SECONDS)
            os.unlink(path)

        monkeypatch.setattr(files, "os", FaultyOs(unlink=unlink))
        store = make_store(max_bytes=80_000)
        keys = [bytes([i]) for i in range(150)]
        (done,) = wait_for(store, store.save(keys, [memoryview(bytes(1000))] * 150))
        assert 40 < sum(done.is_done) <= 91  # what is written while files are listed may be counted twice
        assert done.error is None
        may_go_on.set()
        wait_until(lambda: count_bytes(tmp_path) <= 80_000)
        wait_until(lambda: save_one(store, b"\xf0", bytes(1000)).is_done == b"\1")
        done = save_one(store, b"\xf1", bytes(80_001))
        assert done.is_done == b"\0"
        assert str(done.error).endswith("got 80001 bytes to save, allowed: 80000, which is max_bytes")

    def test_a_file_that_was_not_written_does_not_count(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            raise OSError(errno.EIO, "failed")

        save(make_store(), {b"key": bytes(1000)})
        store = make_store(max_bytes=100_000)
        wait_until(lambda: store._room._num_bytes == 1000)  # the files are listed: a listing counts what is written meanwhile
        monkeypatch.setattr(files, "os", FaultyOs(write=fail))
        assert save_one(store, b"other", bytes(1000)).is_done == b"\0"
        assert store._room._num_bytes == 1000

    def test_a_key_is_touched_once_a_minute(self, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        touched: list[str] = []
        now = 1000.0
        monkeypatch.setattr(files, "os", FaultyOs(utime=lambda path, **_: touched.append(path[-2:])))
        monkeypatch.setattr(files, "time", FaultyTime(lambda: now))
        store = make_store(num_threads=1)
        store.touch([b"\1", b"\2"])
        store.touch([b"\1", b"\2", b"\3", b"\3"])
        now += 59
        store.touch([b"\1", b"\4"])
        now += 2
        store.touch([b"\1", b"\3", b"\4"])
        save(store, {b"key": b"1"})
        wait_until(lambda: len(touched) >= 6)
        assert touched == ["01", "02", "03", "04", "01", "03"]
        assert len(store._touched) == 3

    def test_foreign_files_are_left_alone(self, make_store: MakeStore, tmp_path: Path) -> None:
        folder = path_of(tmp_path, b"\1").parent
        folder.mkdir(parents=True)
        (folder / "README").write_bytes(bytes(1000))
        (folder / "ABCD").write_bytes(bytes(1000))
        (folder / "01ff").mkdir()
        (folder / "0123").symlink_to(folder / "README")
        save(make_store(max_bytes=3000), {b"\1": bytes(1000)})
        time.sleep(0.02)
        assert path_of(tmp_path, b"\1").exists()
        make_store(max_bytes=500)
        wait_until(lambda: not path_of(tmp_path, b"\1").exists())
        assert sorted(path.name for path in folder.iterdir()) == ["0123", "01ff", "ABCD", "README"]


class FarStatus:
    """The status of a file, whose time is another one unless the test has set it."""

    def __init__(self, status: os.stat_result, nanoseconds: int) -> None:
        self.st_mtime_ns = status.st_mtime_ns if status.st_mtime_ns == 12345 else nanoseconds


class FaultyTime:
    def __init__(self, monotonic: Callable[[], float], behind: float = 0.0) -> None:
        self.monotonic, self.behind = monotonic, behind

    def time(self) -> float:
        return time.time() - self.behind

    def time_ns(self) -> int:
        return time.time_ns() - int(self.behind * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class TestArguments:
    @pytest.mark.parametrize("folder", [None, 5, b"folder", ["folder"]])
    def test_other_folders_are_refused(self, folder: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^folder: got \w+, allowed: a path as a string"):
            FileStore(folder, "n")

    def test_a_deep_folder(self, tmp_path: Path) -> None:
        """Deeper than Python's stack."""
        folder = tmp_path / "/".join(["a"] * 1100)
        for fsync in (True, False):
            store = FileStore(folder, "n", fsync=fsync)
            save(store, {b"k": b"1"})
            store.close(drain_seconds=0)
            assert [each.namespace for each in FileStore.list_namespaces(folder)] == ["n"]
            subprocess.run(["rm", "-r", str(tmp_path / "a")], check=True)

    @pytest.mark.parametrize("folder", ["", "a\0b", "\ud800"])
    def test_impossible_folders_are_refused(self, folder: str) -> None:
        with pytest.raises(ArgumentError, match=r"^folder: got"):
            FileStore(folder, "n")

    @pytest.mark.parametrize("namespace", ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "a/.", "ä", "a b", "a\n", "a\\b"])
    def test_other_namespaces_are_refused(self, tmp_path: Path, namespace: str) -> None:
        with pytest.raises(ArgumentError, match=r"^namespace: got"):
            FileStore(tmp_path, namespace)
        with pytest.raises(ArgumentTypeError, match=r"^namespace: got"):
            FileStore(tmp_path, namespace.encode())  # type: ignore[arg-type]

    @pytest.mark.parametrize("namespace", ["a", "...", "a..b/.c/-", "A_1/b"])
    def test_namespaces_may_have_dots(self, tmp_path: Path, namespace: str) -> None:
        store = FileStore(tmp_path, namespace)
        save(store, {b"k": b"1"})
        store.close(drain_seconds=0)
        assert (tmp_path / namespace / "6b/6b").exists()

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"max_bytes": 0}, ArgumentError),
            ({"max_bytes": 1.5}, ArgumentTypeError),
            ({"num_threads": 0}, ArgumentError),
            ({"num_threads": 257}, ArgumentError),
            ({"num_threads": None}, ArgumentTypeError),
            ({"fsync": np.zeros(2)}, ArgumentTypeError),
        ],
    )
    def test_other_options_are_refused(self, tmp_path: Path, options: dict[str, Any], error: type[Exception]) -> None:
        before = threading.active_count()
        with pytest.raises(error, match=f"^{next(iter(options))}"):
            FileStore(tmp_path, "n", **options)
        assert threading.active_count() == before

    def test_without_threads_none_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The system refuses a thread after some."""
        before, start = threading.active_count(), threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.endswith(("-2", "room")):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for num_threads in (4, 1):
            with contextlib.suppress(RuntimeError):
                FileStore(tmp_path, "n", num_threads=num_threads)
                pytest.fail("a store without its threads")
        gc.collect()
        wait_until(lambda: threading.active_count() == before)

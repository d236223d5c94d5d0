"""Folders of a `FileStore`: namespaces that are listed and removed, and others who may write there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from privileges import without_privileges
from store_jobs import load, save, wait_for, wait_until

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.stores import FileStore, StoredNamespace, folders
from pagepool.stores.folders import find_writer, remove_namespace

DAY = 86400


def fill(folder: Path, namespace: str, objects: dict[bytes, bytes], age: float | None = None) -> None:
    """Save objects into a namespace, and set the time of their last use."""
    store = FileStore(folder, namespace)
    save(store, objects)
    store.close(drain_seconds=0)
    for key in objects if age is not None else ():
        digits = key.hex()
        os.utime(folder / namespace / digits[:2] / digits, (0, int(time.time() - (age or 0))))


def list_paths(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


class TestList:
    def test_namespaces_are_listed_with_files_bytes_and_last_use(self, tmp_path: Path) -> None:
        fill(tmp_path, "new/0-of-2", {b"a": bytes(10), b"b": bytes(5)}, age=10)
        fill(tmp_path, "new/1-of-2", {b"a": bytes(7)}, age=3 * DAY)
        fill(tmp_path, "old", {b"c": bytes(100)}, age=9 * DAY)
        os.utime(tmp_path / "new/0-of-2/61/61", (0, 5))
        assert [(*each[:3], round((time.time() - each.last_used) / DAY)) for each in FileStore.list_namespaces(tmp_path)] == [
            ("old", 1, 100, 9),
            ("new/1-of-2", 1, 7, 3),
            ("new/0-of-2", 2, 15, 0),
        ]

    def test_names_that_look_like_folders_of_keys(self, tmp_path: Path) -> None:
        names = ["a", "a/6b", "6b", "6b/6b/6b", "...", "-/_.b/C"]
        for i, name in enumerate(names):
            fill(tmp_path, name, {b"key": bytes(i + 1), b"j": bytes(1)})
        listed = FileStore.list_namespaces(str(tmp_path))
        assert {each.namespace: each[1:3] for each in listed} == {name: (2, i + 2) for i, name in enumerate(names)}

    def test_times_beyond_now_do_not_count(self, tmp_path: Path) -> None:
        fill(tmp_path, "a", {b"a": b"1", b"b": b"1"}, age=DAY)
        fill(tmp_path, "b", {b"a": b"1"}, age=-DAY)
        os.utime(tmp_path / "a/61/61", (0, time.time() + DAY))
        first, second = FileStore.list_namespaces(tmp_path)
        assert first == StoredNamespace("b", 1, 1, 0.0)
        assert (second.namespace, round((time.time() - second.last_used) / DAY)) == ("a", 1)

    def test_other_files_are_no_namespaces(self, tmp_path: Path) -> None:
        fill(tmp_path / "elsewhere", "a", {b"key": b"1"})
        folder = tmp_path / "folder"
        fill(folder, "a", {b"key": b"1"})
        (folder / "6b").mkdir()
        (folder / "6b/6b").write_bytes(b"1")  # a namespace has a name
        (folder / "b/6b/6b").mkdir(parents=True)  # a folder, and empty
        (folder / "c/zz").mkdir(parents=True)
        (folder / "c/zz/6b").write_bytes(b"1")
        (folder / "d/6b").mkdir(parents=True)
        (folder / "d/6b/61").write_bytes(b"1")
        (folder / "d/6b/6B").write_bytes(b"1")
        (folder / "d/6b/README").write_bytes(b"1")
        os.mkfifo(folder / "d/6b/6b")
        (folder / "d/6b/6b00").symlink_to(folder / "a/6b/6b6579")
        (folder / "ä b/6b").mkdir(parents=True)
        (folder / "ä b/6b/6b").write_bytes(b"1")
        (folder / os.fsdecode(b"\xff") / "6b").mkdir(parents=True)
        (folder / os.fsdecode(b"\xff") / "6b/6b").write_bytes(b"1")
        (folder / "link").symlink_to(tmp_path / "elsewhere/a")
        (folder / "loop").symlink_to(folder)
        (folder / "file").write_bytes(b"1")
        assert [each.namespace for each in FileStore.list_namespaces(folder)] == ["a"]
        link = tmp_path / "link to folder"
        link.symlink_to(folder)
        assert [each.namespace for each in FileStore.list_namespaces(link)] == ["a"]

    def test_leftovers_are_files(self, tmp_path: Path) -> None:
        (tmp_path / "a/6b").mkdir(parents=True)
        (tmp_path / f"a/6b/.{'0' * 16}-1.tmp").write_bytes(bytes(3))
        assert [each[:3] for each in FileStore.list_namespaces(tmp_path)] == [("a", 1, 3)]
        assert FileStore.remove_namespace(tmp_path, "a") == 1
        assert list_paths(tmp_path) == set()

    def test_folders_that_cannot_be_read(self, tmp_path: Path) -> None:
        assert FileStore.list_namespaces(tmp_path / "missing") == []
        (tmp_path / "file").write_bytes(b"1")
        with pytest.raises(NotADirectoryError):
            FileStore.list_namespaces(tmp_path / "file")

    @pytest.mark.parametrize("place", ["", "a", "a/6b"])
    @pytest.mark.parametrize("mode", [0o000, 0o666])  # neither listed nor looked into
    def test_folders_without_permission_are_no_empty_ones(self, place: str, mode: int) -> None:
        with without_privileges(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            fill(folder, "a", {b"key": b"1"})
            (folder / place).chmod(mode)
            try:
                with pytest.raises(PermissionError):
                    FileStore.list_namespaces(folder)
            finally:
                (folder / place).chmod(0o700)

    def test_deep_folders_end(self, tmp_path: Path) -> None:
        """Their paths are longer than the system allows."""
        descriptor = os.open(tmp_path, os.O_RDONLY)
        for _ in range(60):
            os.mkdir("d" * 200, dir_fd=descriptor)
            inner = os.open("d" * 200, os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        os.close(descriptor)
        fill(tmp_path, "a", {b"key": b"1"})
        try:
            assert [each.namespace for each in FileStore.list_namespaces(tmp_path)] == ["a"]
        finally:
            subprocess.run(["rm", "-r", str(tmp_path / ("d" * 200))], check=True)


class TestRemove:
    def test_only_the_files_of_the_namespace_are_removed(self, tmp_path: Path) -> None:
        for name in ("a", "a/6b", "b"):
            fill(tmp_path, name, {b"key": b"1", b"kez": b"1", b"j": b"1"})
        (tmp_path / f"a/6a/.{'0' * 16}-1.tmp").write_bytes(bytes(3))
        (tmp_path / "a/6a/README").write_bytes(b"1")
        (tmp_path / "a/6a/0102").write_bytes(b"1")
        before = list_paths(tmp_path)
        assert FileStore.remove_namespace(tmp_path, "a") == 4
        gone = {"a/6b/6b6579", "a/6b/6b657a", "a/6a/6a", f"a/6a/.{'0' * 16}-1.tmp"}
        assert list_paths(tmp_path) == before - gone
        assert FileStore.remove_namespace(str(tmp_path), "a/6b") == 3
        assert FileStore.remove_namespace(tmp_path, "a/6b") == 0
        assert FileStore.remove_namespace(tmp_path, "b") == 3
        assert list_paths(tmp_path) == {"a", "a/6a", "a/6a/README", "a/6a/0102"}

    def test_what_is_missing_is_no_error(self, tmp_path: Path) -> None:
        assert FileStore.remove_namespace(tmp_path / "missing", "a/b") == 0
        assert FileStore.remove_namespace(tmp_path, "a/b") == 0
        (tmp_path / "a/b/6b").mkdir(parents=True)
        assert FileStore.remove_namespace(tmp_path, "a/b") == 0
        assert list_paths(tmp_path) == set()
        assert tmp_path.exists()

    @pytest.mark.parametrize("place", ["a", "a/b", "a/b/6b", "a/b/6b/6b6579"])
    def test_links_are_not_followed(self, tmp_path: Path, place: str) -> None:
        folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
        for each in (folder, elsewhere):
            fill(each, "a/b", {b"key": b"1"})
        (folder / place).rename(tmp_path / "moved")
        (folder / place).symlink_to(elsewhere / place)
        before = list_paths(elsewhere)
        with contextlib.suppress(OSError):
            assert FileStore.remove_namespace(folder, "a/b") == 0
        assert list_paths(elsewhere) == before
        assert (folder / place).is_symlink()

    @pytest.mark.parametrize(
        "namespace", ["..", "../a", "a/..", "/", "", ".", "a/../../b", "a//b", "~", "a\0", "ä", "a\n", "*"]
    )
    def test_paths_are_no_namespaces(self, tmp_path: Path, namespace: str) -> None:
        fill(tmp_path / "a", "a", {b"key": b"1"})
        before = list_paths(tmp_path)
        with pytest.raises(ArgumentError, match=r"^namespace: got"):
            FileStore.remove_namespace(tmp_path / "a", namespace)
        assert list_paths(tmp_path) == before

    @pytest.mark.parametrize("folder", [None, 5, b"folder", "", "a\0b"])
    def test_other_arguments_are_refused(self, folder: Any, tmp_path: Path) -> None:
        with pytest.raises((ArgumentTypeError, ArgumentError), match=r"^folder: got"):
            FileStore.list_namespaces(folder)
        with pytest.raises((ArgumentTypeError, ArgumentError), match=r"^folder: got"):
            FileStore.remove_namespace(folder, "a")
        with pytest.raises(ArgumentTypeError, match=r"^namespace: got int"):
            FileStore.remove_namespace(tmp_path, 5)  # type: ignore[arg-type]

    def test_a_namespace_in_use_stays(self, tmp_path: Path) -> None:
        """By any path to it."""
        folder, link = tmp_path / "folder", tmp_path / "link"
        link.symlink_to(folder)
        stores = [FileStore(folder, "a"), FileStore(folder, "a")]
        save(stores[0], {b"key": b"1"})
        for i in range(2):
            for path in (folder, link, tmp_path / "." / "link"):
                with pytest.raises(
                    ArgumentError, match=r"^namespace: got 'a', which is in use, allowed: one that no open store"
                ):
                    FileStore.remove_namespace(path, "a")
            assert FileStore.remove_namespace(folder, "a/6b") == 0
            stores[i].close(drain_seconds=0)
        assert FileStore.remove_namespace(folder, "a") == 1

    def test_a_store_that_was_dropped_does_not_use_it(self, tmp_path: Path) -> None:
        store = FileStore(tmp_path, "a")
        save(store, {b"key": b"1"})
        del store
        assert FileStore.remove_namespace(tmp_path, "a") == 1

    def test_removal_beside_a_store_that_writes(self, tmp_path: Path) -> None:
        """Folders vanish under it, as by another process: a save is done, or an error that says so."""
        store, is_over = FileStore(tmp_path, "a/b", num_threads=2), threading.Event()

        def remove() -> None:
            while not is_over.is_set():
                remove_namespace(str(tmp_path), "a/b")

        thread = threading.Thread(target=remove)
        thread.start()
        try:
            for i in range(100):
                keys = [bytes([j, i]) for j in range(8)]
                (done,) = wait_for(store, store.save(keys, [memoryview(b"1")] * 8))
                assert all(done.is_done) == (done.error is None)
                assert done.error is None or isinstance(done.error, FileNotFoundError)
        finally:
            is_over.set()
            thread.join()
        store.close(drain_seconds=0)
        assert not any(path.endswith(".tmp") for path in list_paths(tmp_path))


class TestWriters:
    def test_folders_of_the_store_are_private(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = tmp_path / "new" / "store"
        for _ in range(2):
            fill(folder, "a/b", {b"key": b"1"})
            assert find_writer(str(folder), "a/b") is None
        assert caplog.text == ""

    @pytest.mark.parametrize("place", ["", "a", "a/b", "a/b/6b"])
    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o770, 0o1777])
    def test_a_folder_that_others_can_write_to_is_warned_of_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, mode: int
    ) -> None:
        folder = tmp_path / "store"
        fill(folder, "a/b", {b"key": b"1"})
        for each in ("", "a", "a/b", "a/b/6b"):
            (folder / each).chmod(0o755)
        (folder / place).chmod(mode)
        store = FileStore(folder, "a/b", max_bytes=1 << 20)
        wait_until(lambda: len(caplog.records) > 0)
        save(store, {bytes([i]): bytes(5000) for i in range(100)})
        done, _ = load(store, [b"key"], [1])
        assert done.is_done == b"\1"
        store.close(drain_seconds=0)
        (record,) = caplog.records
        path = re.escape(str(folder / place))
        expected = rf"folder: got {path} with mode {mode:o}, allowed: folders that only user \d+ may write to, since .*"
        assert re.fullmatch(expected, record.getMessage())

    @pytest.mark.parametrize("place", ["", "a", "a/6b"])
    def test_folders_of_other_users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        """Root owns what it likes."""
        fill(tmp_path / "store", "a", {b"key": b"1"})
        for each in ("", "a", "a/6b"):
            (tmp_path / "store" / each).chmod(0o755)
        path, get_status = tmp_path / "store" / place, os.stat
        monkeypatch.setattr(folders, "os", FaultyOs(stat=lambda each: Owned(get_status(each), 5 if each == str(path) else 0)))
        assert find_writer(str(tmp_path / "store"), "a") == f"{path} of user 5"
        monkeypatch.setattr(folders, "os", FaultyOs(stat=lambda each: Owned(get_status(each), 0), geteuid=lambda: 7))
        assert find_writer(str(tmp_path / "store"), "a") is None

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        fill(tmp_path / "store", "a", {b"key": b"1"})
        (tmp_path / "store").chmod(0o777)
        (tmp_path / "link").symlink_to(tmp_path / "store")
        assert find_writer(str(tmp_path / "link"), "a") == f"{tmp_path}/link with mode 777"


class Owned:
    """The status of a folder that belongs to a user."""

    def __init__(self, status: os.stat_result, user: int) -> None:
        self.st_mode, self.st_uid = status.st_mode, user


class FaultyOs:
    """The module `os`, with some functions replaced."""

    def __init__(self, **functions: Any) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

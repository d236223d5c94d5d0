"""`FileStore`: objects in files below a folder, one for each key.

A file is written under a temporary name and renamed, so a reader, or a process after a crash, finds it whole or not at all.
Several processes may share the folder: a file that another process removed is a miss.
"""

import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import numpy as np

from pagepool.arguments import require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.stores.folders import TEMPORARY, StoredNamespace, find_writer, list_namespaces, parse_name, remove_namespace
from pagepool.stores.jobs import (
    DamagedObjectError,
    Finish,
    JobStore,
    Kind,
    refuse_size,
    require_drain_seconds,
    require_keys,
    require_namespace,
    split_key,
)

logger = logging.getLogger(__name__)

MAX_THREADS = 256
SECONDS_OF_LEFTOVERS = 3600
"""Age at which a temporary file belongs to no living writer."""

READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
"""Flags for reading a file. Anything else under its name, such as a FIFO or link, is opened without waiting, or not at all."""

MAX_TIME = (1 << 63) - 1

SECONDS_BETWEEN_TOUCHES = 60.0
PARTS_REMOVED = 100
"""`max_bytes` divided by this is removed at a time."""

PARTS_LISTED = 16
"""Files are listed again once this process has written `max_bytes` divided by this."""

PARTS_OVER = 8
"""Files may exceed `max_bytes` by `max_bytes` divided by this while the oldest are being removed."""

SECONDS_OF_REST = 1.0
"""Time until files are listed again if none could be removed."""


class Files:
    """Files by key."""

    def __init__(self, root: str, fsync: bool, room: "Room") -> None:
        """Keep files below `root`, and count them in `room`."""
        self._root, self._room = root, room
        self._folders = Folders() if fsync else None
        self._writer, self._numbers = secrets.token_hex(8), itertools.count()

    def find(self, key: bytes) -> None:
        """Raise FileNotFoundError unless something is there, DamagedObjectError unless it is a file."""
        path = f"{self._root}/{split_key(key)}"
        require_file(path, os.lstat(path))

    def load(self, key: bytes, row: memoryview) -> None:
        """Read the file into a row."""
        path = f"{self._root}/{split_key(key)}"
        try:
            descriptor = os.open(path, READ)
        except OSError:
            require_file(path, os.lstat(path))
            raise
        try:
            require_file(path, os.fstat(descriptor))
            size = read(descriptor, row)
        finally:
            os.close(descriptor)
        if size != len(row):
            raise refuse_size(path, size if size < len(row) else f"over {len(row)}", row)

    def save(self, key: bytes, row: memoryview, finish: Finish | None) -> bool:
        """Write a row to the file. Return False if there is no room yet."""
        if finish:
            finish(key, row)
        if not self._room.take(len(row)):
            return False
        path = f"{self._root}/{split_key(key)}"
        folder = os.path.dirname(path)
        temporary = written = f"{folder}/.{self._writer}-{next(self._numbers)}.tmp"
        try:
            if self._folders:
                self._folders.make(folder)
            try:
                descriptor = create(temporary)
            except FileNotFoundError:
                if self._folders:
                    self._folders.make_again(folder)
                else:
                    make_folder(folder)
                descriptor = create(temporary)
            try:
                write(descriptor, row)
                if self._folders:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            if self._folders:
                written = path
                sync_folder(folder)
        except BaseException:
            self._room.finish(len(row), False)
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise
        self._room.finish(len(row), True)
        return True

    def touch(self, key: bytes) -> None:
        """Set the time of the file's last use."""
        with contextlib.suppress(OSError):
            os.utime(f"{self._root}/{split_key(key)}", follow_symlinks=False)


class Folders:
    """Folders whose names are on the disk, so that they survive a power loss."""

    def __init__(self) -> None:
        """Know no folder yet."""
        self._lock, self._synced = threading.Lock(), set[str]()

    def make(self, path: str) -> None:
        """Make a folder, and those above it, and write their names to the disk."""
        if path not in self._synced:
            with self._lock:  # no other thread may take a folder as written before it is
                make_folder(path, self._synced)

    def make_again(self, path: str) -> None:
        """Make a folder that was removed."""
        with self._lock:
            self._synced.clear()
            make_folder(path, self._synced)


def make_folder(path: str, synced: set[str] | None = None) -> None:
    """Make a folder, and missing ones above it, which only their owner may read: names of files are digests of prompts.
    `synced` is a set of folders whose names are on the disk: write the other names too, and add their folders to it.
    """
    missing = []
    while path != os.path.dirname(path) and not (os.path.isdir(path) if synced is None else path in synced):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        make_inner_folder(each, synced)


def make_inner_folder(path: str, synced: set[str] | None) -> None:
    """Make a folder inside one that is there. See `make_folder`."""
    is_new, parent = not os.path.isdir(path), os.path.dirname(path)
    if is_new:
        with contextlib.suppress(FileExistsError):  # another thread or process made it meanwhile
            os.mkdir(path, 0o700)
    if synced is not None:
        try:
            sync_folder(parent)
        except OSError as error:
            if is_new:
                with contextlib.suppress(OSError):  # else the next save would find it, though its name may be lost
                    os.rmdir(path)
                raise
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):  # an older folder above may be unreadable
                raise
        synced.add(path)


def sync_folder(path: str) -> None:
    """Write the names in a folder to the disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def require_file(path: str, status: os.stat_result) -> None:
    """Raise DamagedObjectError for anything but a file, such as a FIFO, whose reader would wait for a writer."""
    if not stat.S_ISREG(status.st_mode):
        raise DamagedObjectError(f"{path}: got mode {stat.filemode(status.st_mode)}, allowed: a file")


def create(path: str) -> int:
    """Create a file that only its owner may read, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def read(descriptor: int, row: memoryview) -> int:
    """Read a file from its start into a row. Return the number of bytes; one more than the row's if the file is longer."""
    more = bytearray(1)
    num_bytes = last = os.readv(descriptor, [row, more])
    while last and num_bytes < len(row):
        last = os.readv(descriptor, [row[num_bytes:], more])
        num_bytes += last
    return num_bytes


def write(descriptor: int, row: memoryview) -> None:
    """Write a whole row."""
    num_bytes = os.write(descriptor, row)
    while num_bytes < len(row):
        num_bytes += os.write(descriptor, row[num_bytes:])


class Room:
    """The bytes of a folder's files, and the thread that removes the oldest of them.

    The thread lists all files at the start, and again whenever this process has written a sixteenth of `max_bytes`, since other
    processes write and remove files too. In between it adds up what this process writes.
    """

    def __init__(self, folder: str, namespace: str, max_bytes: int | None) -> None:
        """Begin without a limit if `max_bytes` is None."""
        self._folder, self._namespace, self._root = folder, namespace, os.path.join(folder, namespace)
        self._max_bytes, self._process_id = max_bytes, os.getpid()
        self._lock, self._is_stopped = threading.Lock(), False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # finalizers may put into it at any point, but may not set an event
        self._num_bytes = self._num_written = self._num_begun = 0
        self._rests_until = 0.0
        self._oldest: deque[tuple[int, int, bytes]] = deque()  # time, size and key of files, for removal
        self._thread = threading.Thread(target=self._run, name="pagepool-files-room", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, num_bytes: int) -> bool:
        """Count a file that is about to be written, or return False if there is no room until others are removed. A file that
        is replaced is counted too until the next listing. Raise OSError if there can never be room.
        """
        if self._max_bytes is None:
            return True
        if num_bytes > self._max_bytes:
            raise OSError(f"{self._root}: got {num_bytes} bytes to save, allowed: {self._max_bytes}, which is max_bytes")
        with self._lock:
            has_room = self._num_bytes <= self._max_bytes + self._max_bytes // PARTS_OVER
            if has_room:
                self._num_bytes += num_bytes
                self._num_written += num_bytes
                self._num_begun += num_bytes
            is_due = self._num_bytes > self._max_bytes or self._num_written > self._max_bytes // PARTS_LISTED
        if is_due and self._wakes.empty():
            self._wakes.put(None)
        return has_room

    def finish(self, num_bytes: int, is_written: bool) -> None:
        """Count a file whose writing has ended, well or not."""
        if self._max_bytes is not None:
            with self._lock:
                self._num_begun -= num_bytes
                self._num_bytes -= 0 if is_written else num_bytes

    def stop(self) -> None:
        """Let the thread end. Do nothing in a forked process, which lacks it and must not take its locks."""
        if os.getpid() == self._process_id:
            self._is_stopped = True
            self._wakes.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, unless it is the caller."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        writer = find_writer(self._folder, self._namespace)
        if writer is not None:
            allowed = f"folders that only user {os.geteuid()} may write to, since a store's writer decides what the model reads"
            logger.warning("folder: got %s, allowed: %s", writer, allowed)
        self._list_files()
        while self._max_bytes is not None and not self._is_stopped:
            self._remove_oldest(self._max_bytes)
            self._wakes.get()
            if self._num_written > self._max_bytes // PARTS_LISTED:
                self._list_files()

    def _list_files(self) -> None:
        """Count the files, and find the oldest. Remove temporary files whose writer is gone."""
        with self._lock:
            self._num_written = self._num_begun
        times, sizes, keys, temporaries = array("q"), array("q"), [], []
        for folder, entry in self._scan():
            with contextlib.suppress(OSError):  # another process may have removed it
                if TEMPORARY.fullmatch(entry.name):
                    temporaries.append((time_of(entry.stat(follow_symlinks=False)), entry.path))
                elif self._max_bytes is not None:
                    key, status = parse_name(entry.name, folder), entry.stat(follow_symlinks=False)
                    if key is not None:
                        times.append(time_of(status))
                        sizes.append(status.st_size)
                        keys.append(key)
        now = read_clock(self._root) if times or temporaries else 0
        for last_use, path in temporaries:
            if abs(now - last_use) > SECONDS_OF_LEFTOVERS * 10**9:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if self._max_bytes is None:
            return
        num_bytes = sum(sizes)
        with self._lock:
            self._num_bytes = num_bytes + self._num_written  # files written meanwhile may be counted twice
        wanted = max(0, num_bytes - self._max_bytes) + self._max_bytes // PARTS_OVER
        last_uses = np.asarray(times)
        order = np.lexsort((last_uses, last_uses <= now))  # times beyond now come first: a clock was ahead
        totals = np.cumsum(np.asarray(sizes)[order], dtype=np.float64)
        stop = int(np.searchsorted(totals, float(wanted))) + 1
        self._oldest = deque((times[i], sizes[i], keys[i]) for i in order[:stop].tolist())

    def _scan(self) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
        """Yield the files of all folders, each behind the name of its folder, until the thread is stopped. A folder that cannot
        be read has none.
        """
        for folder in (f"{number:02x}" for number in range(256)):
            with contextlib.suppress(OSError), os.scandir(f"{self._root}/{folder}") as entries:
                for entry in entries:
                    if self._is_stopped:
                        return
                    if entry.is_file(follow_symlinks=False):
                        yield folder, entry

    def _remove_oldest(self, max_bytes: int) -> None:
        """Remove the files unused for longest if there are too many bytes, until a hundredth of `max_bytes` is free."""
        goal = max_bytes - max_bytes // PARTS_REMOVED if self._num_bytes > max_bytes else max_bytes
        has_removed = True
        while self._num_bytes > goal and not self._is_stopped:
            if not self._oldest:
                if time.monotonic() < self._rests_until:
                    break
                if not has_removed:
                    self._rests_until = time.monotonic() + SECONDS_OF_REST
                    break
                self._list_files()
                if not self._oldest or self._num_bytes <= max_bytes:
                    break
                has_removed = False
            removed = self._remove(*self._oldest.popleft())
            has_removed = has_removed or removed > 0
            with self._lock:
                self._num_bytes -= removed

    def _remove(self, last_use: int, size: int, key: bytes) -> int:
        """Remove a file unless it was used since it was listed. Return the bytes that are gone."""
        path = f"{self._root}/{split_key(key)}"
        try:
            if time_of(os.lstat(path)) != last_use:
                return 0
            os.unlink(path)
        except FileNotFoundError:  # removed by another process
            return size
        except OSError:
            return 0
        return size


def time_of(status: os.stat_result) -> int:
    """Return the time of a file's last use in ns, limited to 64 bits."""
    return min(max(status.st_mtime_ns, -MAX_TIME), MAX_TIME)


def read_clock(folder: str) -> int:
    """Return the time in ns by the clock of a folder's files, which may be a server's; by this machine's if the folder cannot
    be changed.
    """
    with contextlib.suppress(OSError):
        os.utime(folder)
        return time_of(os.stat(folder))
    return time.time_ns()


def require_folder(folder: object) -> str:
    """Return the absolute path of a folder. Raise ArgumentTypeError for other objects than paths, ArgumentError for paths that
    no folder can have.
    """
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str):
        raise ArgumentTypeError(f"folder: got {type(folder).__name__}, allowed: a path as a string")
    if not path or "\0" in path:
        raise ArgumentError(f"folder: got {shown(path)}, allowed: a path that is not empty, without null characters")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"folder: got {shown(path)}, allowed: a path that the file system can encode") from error
    return os.path.abspath(path)


class FileStore(JobStore):
    """A `Store` in a folder, for this process or for several on one machine: a file for each key.

    >>> import tempfile, time
    >>> store = FileStore(tempfile.mkdtemp(), "llama-8b/bf16", max_bytes=1 << 30)
    >>> job = store.save([b"first", b"second"], [memoryview(b"page 1"), memoryview(b"page 2")])
    >>> while not (answers := store.poll()):
    ...     time.sleep(0.001)
    >>> answers
    [Done(job=1, is_done=b'\\x01\\x01', error=None)]
    >>> store.close(drain_seconds=1)

    The object of a key is the file ``folder/namespace/first two digits/digits of the key``. Only its owner may read it and
    the folders made for it. It is written under another name in the same folder and renamed, so it is whole or not there. After
    a crash of the process every file that was answered as saved is there. After a power loss, without `fsync`, a recent one may
    be missing, shorter, or contain other bytes: check each object by `pagepool.stores.frames`.

    The calling thread waits for no file. Threads do one key at a time, look-ups before loads, and loads before saves; they
    read into rows and write from them without a copy. A full disk, a missing folder or a missing permission is the error of an
    answer, and leaves no file behind. Exiting without `close` is safe: it loses queued saves, and leaves temporary files, which
    a store removes at its start once they are an hour old. In a forked process every call but `close` raises; make a store
    there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        namespace: str,
        *,
        max_bytes: int | None = None,
        num_threads: int = 4,
        fsync: bool = False,
    ) -> None:
        """`folder` is made by the first save. `namespace` says what the objects mean, and is a path below the folder: parts of
        letters, digits, "-", "_" and ".", divided by "/".

        `max_bytes` limits the files of the namespace: beyond it, another thread removes the files unused for longest, a
        hundredth of the bytes at a time. A use is a save or a `touch`, at most one a minute, not a load; a time beyond now
        counts as the oldest. If files exceed the limit by an eighth, since they are written faster than removed, saves are
        not done, without an error. Temporary files, and files of other namespaces, do not count. The files are listed at the
        start, while the store answers already, and again after each sixteenth of `max_bytes` written: about 8 us a file, and
        250 bytes of memory meanwhile. Each process that shares the folder counts what it writes, and other processes' files
        when it lists them. So several processes may exceed the limit by more, usually by a sixteenth each; give all of them the
        same limit.

        With `fsync` a file, its name and the folders above it reach the disk before the save is answered, which costs several
        times the time of a save.

        Raise ArgumentTypeError or ArgumentError for other types and values. The folder is not looked at.
        """
        folder, namespace = require_folder(folder), require_namespace(namespace)
        if max_bytes is not None:
            max_bytes = require_int("max_bytes", max_bytes, 1)
        num_threads = require_int("num_threads", num_threads, 1, MAX_THREADS)
        self._root = os.path.join(folder, namespace)
        self._room = Room(folder, namespace, max_bytes)
        self._touched: dict[bytes, float] = {}
        super().__init__("pagepool-files", Files(self._root, require_flag("fsync", fsync), self._room), num_threads)
        weakref.finalize(self, self._room.stop).atexit = False
        self._room.start()
        STORES[id(self)] = self

    @staticmethod
    def list_namespaces(folder: str | os.PathLike[str]) -> list[StoredNamespace]:
        """Return the namespaces that have files in a folder, those unused for longest first, with their numbers of files and
        bytes, and times of last use. An engine with new weights, groups or seeds leaves its earlier namespaces behind.

        >>> import tempfile
        >>> FileStore.list_namespaces(tempfile.mkdtemp())
        []

        No link is followed, and no file opened. A missing folder has none. Raise ArgumentTypeError or ArgumentError for what is
        no path, OSError for a folder that cannot be read, or one inside that may have a namespace. O(files), about 8 us each.
        """
        return list_namespaces(require_folder(folder))

    @staticmethod
    def remove_namespace(folder: str | os.PathLike[str], namespace: str) -> int:
        """Remove the files of a namespace, also temporary ones, and its folders if they are empty then. Return the number of
        files, 0 if there is no such namespace.

        Nothing else is removed: neither other files, nor namespaces inside this one, and no link is followed. Other processes
        that use the namespace miss its files. Raise ArgumentError if a store of this process uses it, ArgumentTypeError or
        ArgumentError for other folders and namespaces, and OSError, with some files left, if the system does not remove them.
        O(files).
        """
        folder, namespace = require_folder(folder), require_namespace(namespace)
        root = os.path.realpath(os.path.join(folder, namespace))
        stores = [store for reference in STORES.valuerefs() if (store := reference()) is not None]
        if any(store._jobs.is_open() and os.path.realpath(store._root) == root for store in stores):
            allowed = "one that no open store of this process uses"
            raise ArgumentError(f"namespace: got {shown(namespace)}, which is in use, allowed: {allowed}")
        return remove_namespace(folder, namespace)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Set the time of last use of files, at most once a minute each, in the threads. Raise as `lookup`."""
        now, touched = time.monotonic(), self._touched
        while touched and now - touched[next(iter(touched))] >= SECONDS_BETWEEN_TOUCHES:
            del touched[next(iter(touched))]
        due = [key for key in dict.fromkeys(require_keys(keys)) if key not in touched]
        self._jobs.start(Kind.TOUCH, due, [])
        touched.update(dict.fromkeys(due, now))

    def close(self, *, drain_seconds: float) -> None:
        """Wait up to `drain_seconds` for saves, cancel all other jobs, and end the threads. No job is answered afterwards, and
        no row is read or written.

        After that it waits, without a limit, for files being read or written by threads, since these calls cannot be
        interrupted and a load would change its row later. So a network folder without an answer delays it. A second call has no
        effect, and neither has one in a forked process or while the interpreter ends. Raise ArgumentTypeError unless
        `drain_seconds` is a number, ArgumentError if it is negative.
        """
        seconds = require_drain_seconds(drain_seconds)
        if not self._jobs.are_gone():
            self._jobs.drain(seconds)
            self._room.stop()
            self._jobs.join()
            self._room.join()


STORES: weakref.WeakValueDictionary[int, FileStore] = weakref.WeakValueDictionary()
"""The stores of this process by their ids."""

"""Folders of a `FileStore`: the names of its files, the namespaces that a folder has, and who else may write there."""

import contextlib
import errno
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from pagepool.stores.jobs import NAMESPACE, split_key

TEMPORARY = re.compile(r"\.[0-9a-f]{16}-\d+\.tmp", re.ASCII)
"""Temporary names. They begin with a dot, so they are no keys."""

DIGITS = re.compile("[0-9a-f]{2}")
"""Names of the folders with files."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY


class StoredNamespace(NamedTuple):
    """The files of a namespace in a folder."""

    namespace: str
    num_files: int
    """Objects, and temporary files that are being written or were left over."""
    num_bytes: int
    last_used: float
    """Time of the last save or touch of any file, in seconds since 1970. Times beyond now do not count; 0.0 if all are beyond
    now.
    """


def parse_name(name: str, folder: str) -> bytes | None:
    """Return the key in the name of a file; None if no file in a folder of this name has that name.

    >>> parse_name("ab05", "ab"), parse_name("ab05", "05"), parse_name("README", "ab")
    (b'\\xab\\x05', None, None)
    """
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key and split_key(key) == f"{folder}/{name}" else None


def is_of_store(name: str, folder: str) -> bool:
    """Whether a file of this name in a folder of this name belongs to a store."""
    has_digits = DIGITS.fullmatch(folder) is not None
    return has_digits and (parse_name(name, folder) is not None or TEMPORARY.fullmatch(name) is not None)


def list_namespaces(folder: str) -> list[StoredNamespace]:
    """Return the namespaces with files below a folder, those unused for longest first. See `FileStore.list_namespaces`."""
    found: dict[str, StoredNamespace] = {}
    waiting = [""]
    while waiting:
        parts = waiting.pop()
        namespace, _, digits = parts.rpartition("/")
        for entry in scan(folder, parts):
            with contextlib.suppress(FileNotFoundError):  # the entry was removed
                inner = f"{parts}/{entry.name}" if parts else entry.name
                if entry.is_dir(follow_symlinks=False) and NAMESPACE.fullmatch(inner):
                    waiting.append(inner)
                elif namespace and is_of_store(entry.name, digits) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    last_used = status.st_mtime if status.st_mtime <= time.time() else 0.0
                    _, num_files, num_bytes, latest = found.get(namespace, (namespace, 0, 0, 0.0))
                    found[namespace] = StoredNamespace(
                        namespace, num_files + 1, num_bytes + status.st_size, max(last_used, latest)
                    )
    return sorted(found.values(), key=lambda each: (each.last_used, each.namespace))


def scan(folder: str, parts: str) -> Iterator["os.DirEntry[str]"]:
    """Yield the entries of a folder, or of the folder at path `parts` below it: none if it is missing, or its path longer than
    any namespace has. Raise OSError if it cannot be read.
    """
    try:
        with os.scandir(os.path.join(folder, parts)) as entries:
            yield from entries
    except OSError as error:
        if error.errno != errno.ENOENT and not (parts and error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR)):
            raise


def remove_namespace(folder: str, namespace: str) -> int:
    """Remove the files of a namespace, and its folders if they are empty. Return the number of files. Links are not followed
    below the folder. See `FileStore.remove_namespace`.
    """
    with contextlib.ExitStack() as stack:
        folders: list[tuple[int, str]] = []  # each folder above the files: its parent, and its name there
        try:
            inner = open_folder(stack, folder)
            for part in namespace.split("/"):
                folders.append((inner, part))
                inner = open_folder(stack, part, inner)
        except FileNotFoundError:
            return 0
        num_removed = 0
        with os.scandir(inner) as entries:
            inner_folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for digits in filter(DIGITS.fullmatch, inner_folders):
            with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as files:
                num_removed += remove_files(open_folder(files, digits, inner), digits)
            folders.append((inner, digits))
        for parent, name in reversed(folders):
            with contextlib.suppress(OSError):  # it has files of others
                os.rmdir(name, dir_fd=parent)
    return num_removed


def remove_files(folder: int, digits: str) -> int:
    """Remove the files of a store from an open folder of this name. Return their number."""
    num_removed = 0
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if is_of_store(entry.name, digits) and entry.is_file(follow_symlinks=False)]
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            os.unlink(name, dir_fd=folder)
            num_removed += 1
    return num_removed


def open_folder(stack: contextlib.ExitStack, path: str, parent: int | None = None) -> int:
    """Open a folder until the end of the stack. Inside a parent it may not be a link."""
    descriptor = os.open(path, FOLDER | (0 if parent is None else os.O_NOFOLLOW), dir_fd=parent)
    stack.callback(os.close, descriptor)
    return descriptor


def find_writer(folder: str, namespace: str) -> str | None:
    """Return the first folder of a namespace that another user can write to, from `folder` on, and why; None without one. Root
    is not counted.
    """
    paths = list(itertools.accumulate(namespace.split("/"), os.path.join, initial=folder))
    paths += [os.path.join(paths[-1], f"{number:02x}") for number in range(256)]
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid not in (0, os.geteuid()):
                return f"{path} of user {status.st_uid}"
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"{path} with mode {stat.S_IMODE(status.st_mode):o}"
    return None

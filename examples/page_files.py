"""Pages of a KV cache in files of a folder, for several engines with one model."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

__all__ = ["PageFiles", "digest_model"]


def digest_model(weights: Mapping[str, Any]) -> bytes:
    """Return a digest of all weights. An engine with a real checkpoint uses the checkpoint's digest instead."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        array = np.ascontiguousarray(weight)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.digest()


class PageFiles:
    """Pages in ``.npz`` files, one each, named by the digest of the model and of all tokens up to the page's end.

    `load` returns None for a file that is missing, truncated, damaged, or of another model or shape; the page is then computed
    again. Anyone who can write to the folder decides what the model reads, so share it only between engines that trust each
    other.
    """

    def __init__(self, folder: Path, model: bytes, page_size: int, shape: Sequence[int], dtype: str = "float32") -> None:
        """Make the folder for pages of `page_size` tokens, arrays of `shape` and `dtype`. Raise OSError if that fails."""
        self.folder, self.page_size = folder, page_size
        self.blank = np.zeros(shape, dtype)
        self._root = hashlib.sha256(repr((model, page_size, self.blank.shape, self.blank.dtype.str)).encode()).digest()
        self._num_bytes = len(_encode("0" * 64, self.blank))
        self._broken: set[str] = set()
        self.num_loaded = self.num_saved = self.num_broken = 0
        folder.mkdir(parents=True, exist_ok=True)

    def list_digests(self, token_ids: Sequence[int]) -> list[str]:
        """Return the digest of each full page, the same in every process."""
        tokens = np.asarray(token_ids, dtype="<i4")
        parent, digests = self._root, []
        for stop in range(self.page_size, len(tokens) + 1, self.page_size):
            parent = hashlib.sha256(parent + tokens[stop - self.page_size : stop].tobytes()).digest()
            digests.append(parent.hex())
        return digests

    def count_leading(self, digests: Sequence[str]) -> int:
        """Return how many leading pages have a file."""
        missing = (i for i, digest in enumerate(digests) if not self._has(digest))
        return next(missing, len(digests))

    def load(self, digest: str) -> np.ndarray | None:
        """Return a page, or None without a valid file; `save` then replaces the file."""
        page = self._read(digest)
        if page is None:
            self._broken.add(digest)
            self.num_broken += 1
        else:
            self.num_loaded += 1
        return page

    def _has(self, digest: str) -> bool:
        """Whether a file of the right size exists that was not found to be broken."""
        try:
            return self._path_of(digest).stat().st_size == self._num_bytes and digest not in self._broken
        except OSError:
            return False

    def _read(self, digest: str) -> np.ndarray | None:
        if not self._has(digest):
            return None
        try:
            with self._path_of(digest).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                page, name = arrays["page"], arrays["digest"]
        except Exception:  # a foreign file may contain anything; a zip file checks its contents
            return None
        is_right = page.shape == self.blank.shape and page.dtype == self.blank.dtype and name.tolist() == digest
        return page if is_right else None

    def save(self, digest: str, page: np.ndarray) -> None:
        """Write a page unless it has a file. Write a temporary file and rename it, so that readers find all of it or nothing.
        If writing fails, for example on a full disk, no file is left behind.
        """
        if self._has(digest):
            return
        with suppress(OSError):
            self._replace(digest, _encode(digest, page))
            self._broken.discard(digest)
            self.num_saved += 1

    def _replace(self, digest: str, contents: bytes) -> None:
        with NamedTemporaryFile(dir=self.folder, prefix=digest, suffix=".tmp", delete=False) as file:
            try:
                file.write(contents)
                file.flush()
                os.replace(file.name, self._path_of(digest))
            except BaseException:
                os.unlink(file.name)
                raise

    def _path_of(self, digest: str) -> Path:
        return self.folder / f"{digest}.npz"


def _encode(digest: str, page: np.ndarray) -> bytes:
    """Return the contents of a file. Pages of one shape give files of one size."""
    file = BytesIO()
    np.savez(file, digest=digest, page=page)
    return file.getvalue()

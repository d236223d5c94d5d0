"""Pages by their keys, and the host tier that has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import PageStore

Keys = npt.NDArray[np.uint64]
GroupIds = npt.NDArray[np.int32]

ODD = np.uint64(0x9E3779B97F4A7C15)


class Pages(NamedTuple):
    """Keys ``[n, 2]``, lower half first, and cache groups ``[n]`` of pages."""

    keys: Keys
    groups: GroupIds

    def choose(self, places: Any) -> "Pages":
        """Return the pages at some places."""
        return Pages(self.keys[places], self.groups[places])

    def sort(self) -> "Pages":
        """Return the pages ascending by the lower half of their keys."""
        return self.choose(np.argsort(self.keys[:, 0]))

    def name(self) -> list[bytes]:
        """Return the keys of the pages in a store: 16 bytes of the digest and two of the group."""
        return [key.tobytes() + group.to_bytes(2, "big") for key, group in zip(self.keys, self.groups.tolist(), strict=True)]

    def find_tags(self) -> Keys:
        """Return a tag of 64 bits for each page, never 0."""
        return (self.keys[:, 0] ^ (self.groups.astype(np.uint64) * ODD)) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class Tier:
    """A host tier: the store of its pool, and for each group its bank there and the rows, ``[num_host_pages, row_bytes]``."""

    store: PageStore
    banks: Sequence[int]
    rows: Sequence[npt.NDArray[np.uint8]]
    has_groups: bool  # the owner of the rows distinguishes groups
    mark_saved: Callable[..., None]
    count_steps_ahead: Callable[[], int]  # steps that may be planned before one is known to have failed

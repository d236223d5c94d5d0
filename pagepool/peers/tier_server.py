"""`TierServer`: serves the pages of a host tier to the `PeerStore` of other engines. Needs the extra ``pagepool[peers]``."""

import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagepool._core import TierHold, hold_stored
from pagepool.errors import ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.peers.answerer import DEFAULT_ADDRESS, Answerer, Asked
from pagepool.peers.store import MAX_KEYS_PER_QUESTION, MAX_OBJECT_BYTES, Find, Load
from pagepool.stores.frames import HEADER_BYTES, import_xxhash, write_header
from pagepool.stores.namespace import warn_of_seed
from pagepool.stores.pages import Pages, Tier
from pagepool.stores.tier import HostRows, Rows, read_tier

_decode: Any = msgspec.msgpack.Decoder(Find | Load).decode
MAX_BYTES_PER_ANSWER = 2 * MAX_OBJECT_BYTES


class TierServer:
    """Serves the pages of a manager's host tier. Its thread answers each question; the engine calls nothing.

    A page is served once the steps that may be planned behind its own have begun: a failure is found before. It is held while
    its row is copied, and sent only if pool and tier still have its key. After `reset_prefix_cache` nothing is served: make
    another one with the namespace of the new weights. The manager may have a `StoreTier` too.
    """

    def __init__(
        self,
        manager: CacheManager,
        rows: HostRows | Sequence[Rows],
        namespace: str,
        secret: bytes,
        *,
        address: str = DEFAULT_ADDRESS,
    ) -> None:
        """Listen at an address, and start the thread. `rows` and `namespace` are those of a `StoreTier`; `secret` has at least
        16 random bytes, the same for all peers. Pages of the tier from before are served after as many steps as may be planned
        ahead. O(pages of the tier).

        Raise ArgumentError for a manager without a host tier, for rows that do not fit it, and for other values;
        ArgumentTypeError for other types, EndpointError for an unusable address.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        import_xxhash()
        pages = _Pages(read_tier(manager, rows), namespace)
        self._answerer = Answerer(secret, namespace, address, pages.handle, name="tier-answers")
        warn_of_seed(manager)
        self._close = weakref.finalize(self, self._answerer.close)

    @property
    def address(self) -> str:
        """The address for `PeerStore`: the endpoint, and behind ``#`` the random name of this server."""
        return self._answerer.address

    @property
    def num_refused_messages(self) -> int:
        """The number of refused messages: with a wrong seal, malformed, or repeated."""
        return self._answerer.refusals.num

    def close(self) -> None:
        """End the thread. No row is read afterwards. A second call has no effect, and neither has one in a forked process."""
        self._close()


class _Pages:
    """Answers questions for the pages of a tier."""

    def __init__(self, tier: Tier, namespace: str) -> None:
        self._tier, self._namespace = tier, namespace
        self._num_clears = self._hold(Pages(np.empty((0, 2), np.uint64), np.empty(0, np.int32))).num_clears

    def _hold(self, pages: Pages) -> TierHold:
        return hold_stored(self._tier.store, pages.keys, pages.groups, self._tier.count_steps_ahead())

    def handle(self, asked: Asked) -> None:
        """Answer which pages are there, or with their objects."""
        try:
            question = _decode(asked.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return asked.refuse("its question is malformed")
        names = question.keys
        sizes = question.sizes if isinstance(question, Load) else [0] * len(names)
        if len(names) > MAX_KEYS_PER_QUESTION or len(sizes) != len(names):
            return asked.refuse(f"it asks for more than {MAX_KEYS_PER_QUESTION} keys, or has too few sizes")
        places = [i for i, name in enumerate(names) if self._may_have(name, sizes[i] if isinstance(question, Load) else None)]
        if sum(sizes[i] for i in places) > MAX_BYTES_PER_ANSWER:
            return asked.refuse(f"it asks for more than {MAX_BYTES_PER_ANSWER} bytes")
        pages = _read_names([names[i] for i in places])
        is_load = isinstance(question, Load)
        objects: list[npt.NDArray[np.uint8] | None] = [None] * len(places)
        hold = self._hold(pages)
        try:
            if is_load and hold.num_clears == self._num_clears:
                objects = [self._copy(*each) for each in zip(pages.groups, hold.page_ids, strict=True)]
        finally:
            are_right = hold.release() & (hold.num_clears == self._num_clears)
        flags = bytearray(len(names))
        parts = []
        for i, item, is_right in zip(places, objects, are_right.tolist(), strict=True):
            flags[i] = is_right
            if is_right and item is not None:
                write_header(item, self._namespace, names[i], item[HEADER_BYTES:])
                parts.append(item)
        asked.answer(bytes(flags), parts)
        return None

    def _may_have(self, name: bytes, size: int | None) -> bool:
        """Whether a key names a page of a group, of this size with its header."""
        group = int.from_bytes(name[16:], "big")
        is_name = len(name) == 18 and group < len(self._tier.rows)
        return is_name and size in (None, HEADER_BYTES + self._tier.rows[group].shape[1])

    def _copy(self, group: np.int32, page_id: np.int32) -> npt.NDArray[np.uint8] | None:
        """Copy the row of a held page behind room for its header."""
        if not page_id:
            return None
        row = self._tier.rows[int(group)][page_id]
        item = np.empty(HEADER_BYTES + len(row), np.uint8)
        np.copyto(item[HEADER_BYTES:], row)
        return item


def _read_names(names: Sequence[bytes]) -> Pages:
    """Return the pages with these names: the opposite of `Pages.name`."""
    raw = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 18)
    keys = np.ascontiguousarray(raw[:, :16]).view(np.uint64)
    return Pages(keys.reshape(-1, 2), raw[:, 16].astype(np.int32) * 256 + raw[:, 17])

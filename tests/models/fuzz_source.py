"""Choices read from bytes, so that a fuzzer that changes a byte changes a choice; and arguments of every kind.

Each maker of an argument takes the world, and makes one out of its choices.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from fuzz_world import World

T = TypeVar("T")

INTERESTING = (
    *(-1, -2, 255, 256, 1023, 1024, 1025, 4096),
    *(sign * 2**power + more for power in (30, 31, 32, 62, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)),
    *(2**128 - 1, 2**128, -(2**127), 10**30),
)
DTYPES = (
    *("i4", "i8", "i2", "i1", "u4", "u8", "u2", "u1", ">i4", ">i8"),
    *("f4", "f8", "f2", "?", "O", "U1", "S4", "c16", "M8[s]", "m8[s]", "V4", "i4,i4"),
)
SHAPES = ((0,), (1,), (2,), (3,), (5,), (), (0, 3), (2, 2), (1, 1, 1))


class Source:
    """The choices. After the end of the bytes, every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def has_more(self) -> bool:
        return self.at < len(self.data)

    def below(self, n: int) -> int:
        """Return a number in ``[0, n)`` from one byte or two."""
        if n > 256:
            return int.from_bytes(self.take(2), "little") % n
        self.at += 1
        return self.data[self.at - 1] % n if self.at <= len(self.data) else 0

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes, with zeros after the end."""
        self.at += n
        return self.data[self.at - n : self.at].ljust(n, b"\0")


class Raised(Exception):
    """The error of hostile arguments, which any call may raise."""


# --- hostile arguments: their hooks raise, change what is being read, call back into the same objects, or lie ---------------


class Hostile:
    """An object whose hooks interfere."""

    world: World

    def hook(self, *_: Any, **__: Any) -> Any:
        return self.world.interfere()


class Index(Hostile):
    """An object with ``__index__`` that interferes at each read."""

    def __init__(self, world: World) -> None:
        self.world = world

    __index__ = __int__ = __bool__ = __float__ = Hostile.hook


class Container(Index):
    """A sequence, iterator, mapping, array and callable that differs at each use."""

    __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = Index.hook
    __array__ = __call__ = __getattr__ = __reversed__ = Index.hook

    def __next__(self) -> Any:
        if not self.world.source.has_more():  # not endless
            raise StopIteration
        return self.hook()

    def __hash__(self) -> int:
        return self.world.interfere()


class Lazy(Index):
    """Yields small ints, interfering in between."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.world.source.below(4)):
            self.world.interfere()
            yield small(self.world)


class HostileList(Hostile, list[Any]):
    """A list whose length and items come from its hooks, with other items at each iteration."""

    def __iter__(self) -> Iterator[Any]:
        for item in list.__iter__(self):
            self.world.interfere()
            yield item

    __len__ = __getitem__ = __eq__ = Hostile.hook
    __hash__ = None  # type: ignore[assignment]


class HostileInt(Hostile, int):
    """An int whose comparison and arithmetic interfere."""

    __index__ = __int__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __rshift__ = __add__ = __mul__ = Hostile.hook
    __hash__ = Hostile.hook


class HostileArray(np.ndarray[Any, Any]):
    """An array that misreports itself."""

    world: Any = None

    def lie(self) -> Any:
        return self.world.interfere() if self.world is not None else 1

    ndim = dtype = size = property(lie)

    def lie_about_items(self, *_: Any, **__: Any) -> Any:
        return self.lie()

    min = max = tolist = lie_about_items


class Finalizer:
    """Garbage that interferes when it is collected, possibly during any call."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cycle = self

    def __del__(self) -> None:
        self.world.interfere()


def leave_garbage(world: World) -> int:
    """Let the collector run soon, and find an object that interferes."""
    Finalizer(world)
    gc.set_threshold(1 + world.source.below(8))
    return 0


# --- arguments ------------------------------------------------------------------------------------------------


def small(world: World) -> int:
    return world.source.below(9)


def middle(world: World) -> int:
    return world.source.below(20)


def interesting(world: World) -> int:
    return world.source.pick(INTERESTING)


def ints(world: World) -> list[int]:
    return [small(world) for _ in range(world.source.below(6))]


def key(world: World) -> int:
    """Return a digest out of few, so that pages have equal content."""
    return world.source.below(5) << world.source.pick((0, 0, 64))


def key_bytes(world: World) -> bytes:
    return bytes([world.source.below(2)] * world.source.pick((16, 16, 16, 32)))


def array(world: World) -> Any:
    """Return an array of any type, shape, stride and alignment."""
    source = world.source
    dtype, shape = np.dtype(source.pick(DTYPES)), source.pick(SHAPES)
    num_items = int(np.prod(shape))
    if dtype.kind in "OU":  # in which not all bytes are valid values
        return np.full(shape, source.pick((1, None, -1)), dtype=dtype)
    memory = source.take(min(8 * num_items, 16)).ljust(num_items * dtype.itemsize + 1, b"\1")
    values = np.frombuffer(memory, dtype, num_items, offset=source.below(2)).reshape(shape)
    return source.pick(LAYOUTS)(values)


LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    lambda values: values,
    lambda values: values.copy(),
    lambda values: values[::-1] if values.ndim else values,
    lambda values: np.repeat(values, 2)[::2],
    lambda values: np.broadcast_to(values[:1], (3, *values.shape[1:])) if values.shape[:1] > (0,) else values,
    lambda values: values.view(np.matrix) if values.ndim == 2 else values,
    lambda values: np.ma.masked_array(values),
)


def int32_array(world: World) -> Any:
    return np.array(ints(world), dtype=np.int32)


def hostile(cls: type[T], *args: Any) -> Callable[[World], T]:
    """Return a maker of one of the hostile builtins."""

    def make(world: World) -> T:
        value = cls(*args) if cls is not HostileArray else np.array([1, 2], dtype=world.source.pick(DTYPES[:8])).view(cls)
        value.world = world  # type: ignore[attr-defined]
        return value

    return make


def changing_list(world: World) -> list[Any]:
    """Return a list that hostile items can change while it is read."""
    items = [
        world.source.pick((Index, Container, Lazy))(world) if world.source.below(3) == 0 else small(world) for _ in range(4)
    ]
    world.lists.append(items)
    return items


def nested(world: World) -> Any:
    """Return lists, tuples and pairs of anything."""
    items = [world.source.pick((ints, wild, pair))(world) for _ in range(world.source.below(4))]
    return world.source.pick((list, tuple))(items)


def pair(world: World) -> tuple[Any, Any]:
    return (small(world), world.source.pick((b"extra", b"", "text", None, 7)))


def buffer(world: World) -> Any:
    memory = world.source.take(world.source.below(20))
    return world.source.pick((bytes, bytearray, memoryview, ctypes.create_string_buffer))(memory)


def plain(world: World) -> Any:
    """Return an object that fits no parameter."""
    return world.source.pick(PLAIN)


PLAIN = (
    *(None, True, False, 0.0, 1.5, float("nan"), float("inf"), 1j, "", "1", "\ud800", {}, {1: 2}, {3, 4}, ..., object()),
    *(int, list, range(3), range(2**40), np.int32(3), np.int64(-1), np.uint8(7), np.float64(1), np.bool_(1)),
)


WILD: tuple[Callable[[Any], Any], ...] = (
    *(plain, plain, interesting, interesting, small, array, array, int32_array, ints, nested, changing_list, buffer),
    *(Index, Container, Lazy, hostile(HostileList, [1, 2]), hostile(HostileInt, 3), hostile(HostileArray)),
    *(lambda world: world.any_live(), lambda world: world.any_live(), lambda world: type(world.any_live()), leave_garbage),
)


def wild(world: World) -> Any:
    return world.source.pick(WILD)(world)

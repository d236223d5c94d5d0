"""The inputs of a step: the arrays that a model reads, made once and filled by one native call.

Native methods of `StepInputs`:

- ``core/rows/inputs.pyx``: `fill`
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool._core import INPUT_FIELDS, InputArrays
from pagepool.arguments import MAX_SIZE, as_list, require_choice, require_flag, require_int, require_mapping
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.group_rules import kind_of
from pagepool.host_table import HostTables
from pagepool.running_batch import RunningBatch

__all__ = ["SharedPrefixes", "StepInputs"]

Array = npt.NDArray[Any]

LISTS = ("page_starts", "page_indices", "last_page_lens", "page_offsets")
WRITES = ("write_pages", "write_starts", "write_indices", "write_tokens")
OF_PREFIXES = ("level_page_starts", "level_page_indices", "level_last_page_lens", "prefix_page_ids")
BY_GROUP = ("slots", "page_ids", "state_pages", "cross_page_ids", "rank_slots", *LISTS, *WRITES, *OF_PREFIXES)
MAX_DEPTH = 1024
MAX_NUM_TOKENS, MAX_NUM_REQS = 2**31 - 2, 2**30


@dataclass(frozen=True)
class SharedPrefixes:
    """Sizes of the groups of rows that share a prefix, for ``StepInputs(order="prefixes")``.

    Shared pages lie in up to `num_levels` levels, 1 to 4. There are at most `num_groups` groups (None: as many as rows), each
    of at most `num_pages` pages in each cache group and `num_rows` rows (None: those of the longest row, and all rows); longer
    prefixes are shared in part, and more rows are several groups. A group saves at least `min_saved_pages` pages.
    """

    num_levels: int = 1
    num_groups: int | None = None
    num_pages: int | None = None
    num_rows: int | None = None
    min_saved_pages: int = 8

    def __post_init__(self) -> None:
        """Raise ArgumentError for sizes out of range."""
        object.__setattr__(self, "num_levels", require_int("num_levels", self.num_levels, 1, 4))
        object.__setattr__(self, "min_saved_pages", require_int("min_saved_pages", self.min_saved_pages, 0, MAX_SIZE))
        for name in ("num_groups", "num_pages", "num_rows"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, require_int(name, value, 1, MAX_NUM_REQS))

    def list_sizes(self, num_reqs: int, width: int) -> list[int]:
        """Return levels, groups, pages and rows of a group, and the fewest pages saved, for tables of `width` pages."""
        num_groups = min(self.num_groups or num_reqs, num_reqs)
        num_pages, num_rows = self.num_pages or width, min(self.num_rows or num_reqs, num_reqs)
        return [self.num_levels, num_groups, min(num_pages, width), num_rows, self.min_saved_pages]


class StepInputs(InputArrays):
    """The arrays of a step's inputs, in a ring of sets: each call fills the next one. Attributes show the set filled last.

    For T tokens in n rows, in batch order, the fields are

    ===================  ==========  =================================================  ==================
    field                shape       value                                              padding
    ===================  ==========  =================================================  ==================
    ``token_ids``        [T]         ids; those of unknown tokens are drafts, or -1     0
    ``positions``        [T]         positions                                          0
    ``rows``             [T]         the row of each token                              0
    ``slots``            [T]         slots, by group; see below for rings               `pad_slot`
    ``query_start_loc``  [n + 1]     where the tokens of each row begin                 the last value
    ``kv_start_loc``     [n + 1]     sums of the lengths before                         the last value
    ``seq_lens``         [n]         lengths, the step's tokens included                0
    ``last_tokens``      [n]         index of each row's last token                     `pad_last`
    ``starts``           [n]         position of each row's first token                 0
    ``page_ids``         [n, pages]  the row of the page table, by group                0
    ``page_indices``     [pages]     pages that the rows read, one row after another,
                                     by group                                           0
    ``page_starts``      [n + 1]     where the pages of each row begin there            the last value
    ``last_page_lens``   [n]         tokens in the last page of each row                0
    ``page_offsets``     [n]         position of the first token in the first page      0
    ``rank_slots``       [T]         slots of the tokens of a rank, by group            `pad_slot`
    ``own_starts``       [n]         position of the first token that a row reads
                                     alone                                              0
    ``prefix_page_ids``  [g, pages]  pages that the rows of a group share, by group     0
    ``prefix_rows``      [g, rows]   indices of these rows in the arrays by row         -1
    ``state_pages``      [n]         working pages of states and rings, by group        0
    ``write_pages``      [T]         pages to which the step writes the state after
                                     a token (see `take_moves`), by group               0
    ``write_indices``    [T]         these pages, one row after another, by group       0
    ``write_tokens``     [T]         the indices of their tokens                        0
    ``write_starts``     [n + 1]     where the writes of each row begin there           the last value
    ``cross_page_ids``   [n, pages]  pages of the medium, by group of cross-attention   0
    ``encoder_lens``     [n]         tokens of the medium                               0
    ``order``            [n]         index of each row in ``step.rows``                 0
    ``distribution``     [3]         rows with one token, the same again, and all rows
    ``sources``          [n]         place of the row in the step before, if that
                                     samples the row's first token                      -1
    ===================  ==========  =================================================  ==================

    Fields by group are tuples with an array for each group; None for groups of another kind. Of a window or chunk the lists
    have the pages that the step's tokens attend to. Sinks come first, at positions below 0, and a reference window has page 0
    for each page between the prompt and the window.
    ``distribution`` needs ``order="decodes"``. With ``order="prefixes"`` rows that share pages are neighbours, and these pages
    can be read once. ``own_starts``, ``prefix_page_ids`` and ``prefix_rows`` say which, and so do lists by level, as cascades
    of FlashInfer take them: ``level_query_starts`` ``[levels + 1, n + 1]``, ``level_page_starts`` of the same shape,
    ``level_page_indices`` ``[levels + 1, pages]`` and ``level_last_page_lens`` ``[levels + 1, n]``. Each level covers all
    tokens in runs: a run has the shared pages of its rows, or none, and in the last level each row is a run with its own pages.
    ``num_saved_pages`` counts the pages that need not be read again. Groups are searched again only where rows come, go or
    are cut. A batch may have several of these objects, such as one for each bucket of sizes:
    for ``sources`` the step before is the one whose inputs were filled last in any of them, also in those without the field.

    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch, StepInputs
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> batch = RunningBatch(manager, PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64))
    >>> inputs = StepInputs(batch, num_tokens=8, num_reqs=2, fields=["token_ids", "positions", "slots", "seq_lens"])
    >>> batch.admit(0, [11, 12, 13, 14, 15]), batch.admit(1, [11, 12, 13, 14, 16])
    (0, 4)
    >>> batch.inputs(rows=[0, 1], starts=[0, 4], stops=[5, 5], out=inputs)
    6
    >>> inputs.token_ids.tolist(), inputs.slots[0].tolist()
    ([11, 12, 13, 14, 15, 16, 0, 0], [4, 5, 6, 7, 8, 12, -1, -1])
    >>> batch.inputs(batch.step([1, 0], [17, 18]), out=inputs, num_tokens=4)
    2
    >>> inputs.token_ids[:4].tolist(), inputs.positions[:4].tolist(), inputs.seq_lens.tolist()
    ([17, 18, 0, 0], [5, 5, 0, 0], [6, 6])
    >>> batch.release([0, 1])
    """

    def __init__(
        self,
        source: RunningBatch | HostTables,
        *,
        num_tokens: int,
        num_reqs: int,
        fields: Iterable[str],
        dtypes: Mapping[str, Any] | None = None,
        pad_slot: int = -1,
        pad_last: int = -1,
        depth: int = 2,
        packed: bool = False,
        order: str = "given",
        arrays: Mapping[str, Any] | None = None,
        token_ids: Array | None = None,
        num_pages: int | Sequence[int] | None = None,
        slot_strides: int | Sequence[int] | None = None,
        ranks: tuple[int, int] | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """Make the arrays of `fields` for up to `num_tokens` tokens and `num_reqs` rows, in `depth` sets of zeros.

        `source` is the batch. An engine that uses `CacheManager` passes its tables, and as `token_ids` its int32 matrix with a
        line for each row. `dtypes` gives fields int64 in place of int32. Slots of padding are `pad_slot`: most kernels skip -1,
        but jax indexes the last slot with it; slot 0, of the null page, is right there. With ``order="decodes"`` rows with one
        token come first, with ``"prefixes"`` rows that share pages are neighbours, in groups of the sizes in `prefixes`, and
        otherwise rows are in the order of the call.

        Lists have room for `num_pages` pages, a number for each group or one for all; None: for the longest rows. A page has
        `slot_strides` slots in the engine's arrays, for each group or for all; None: as many as it has tokens. For
        ``rank_slots`` a page has the tokens of several context-parallel ranks in turn: with ``ranks=(rank, size)`` token t is
        on rank ``t % size``, whose arrays have ``page_size // size`` slots for each page.

        A device may read a set until its step has run, so a ring of `depth` sets serves ``depth - 1`` steps in flight.

        With `packed` all int32 fields lie in one array, ``packed``, for one transfer: ``offsets`` has the start of each field,
        a tuple for fields by group. The array has all fields in full, so make inputs for each bucket of sizes.

        `arrays` are used instead of new ones: for a field, or ``"packed"``, a sequence with an array for each set, or one array
        with a first axis of `depth`; for fields by group a sequence of these. They are contiguous, writable arrays of the
        field's type and shape: NumPy's, or ``torch.empty(..., pin_memory=True).numpy()``, which is the same memory. They are
        cleared, and must not overlap.

        Raise ArgumentError for unknown or repeated fields, for fields that no group has, and for arrays of other shapes or that
        overlap; ArgumentTypeError for other types.
        """
        if not isinstance(source, RunningBatch | HostTables):
            raise ArgumentTypeError(f"source: got {type(source).__name__}, allowed: RunningBatch or MultiGroupPageTable")
        require_choice("order", order, "given", "decodes", "prefixes")
        if prefixes is not None and (order != "prefixes" or not isinstance(prefixes, SharedPrefixes)):
            raise ArgumentError(f"prefixes: got {shown(prefixes)}, allowed: SharedPrefixes with order='prefixes', or None")
        num_tokens, num_reqs = (
            require_int("num_tokens", num_tokens, 1, MAX_NUM_TOKENS),
            require_int("num_reqs", num_reqs, 1, MAX_NUM_REQS),
        )
        depth = require_int("depth", depth, 1, MAX_DEPTH)
        tables, kinds = _groups_of(source)
        rank, num_ranks = _read_ranks(ranks, fields := _names_in(fields))
        if isinstance(source, RunningBatch) and token_ids is not None:
            raise ArgumentError("token_ids: got an array, allowed with a batch, which has its own: None")
        crossed = [table.max_num_pages_per_req for table in source.cross_tables] if isinstance(source, RunningBatch) else []
        widths = [table.max_num_pages_per_req for table in tables]
        sizes = None
        if order == "prefixes":
            sizes = (prefixes or SharedPrefixes()).list_sizes(num_reqs, _width_of_full(tables, kinds))
        by_name = _shapes_of(fields, widths, kinds, crossed, num_tokens, num_reqs, sizes)
        lists = [name for name in ("page_indices", "level_page_indices") if name in by_name]
        capacities = [num_reqs * width for width in widths] if num_pages is None else num_pages
        for listed in lists:
            most = _read_by_group("num_pages", capacities, len(tables), MAX_NUM_TOKENS)
            by_name[listed] = {g: (*shape[:-1], most[g]) for g, shape in by_name[listed].items()}
        if num_pages is not None and not lists:
            raise ArgumentError(f"num_pages: got {shown(num_pages)}, allowed without the field page_indices: None")
        strides = None if slot_strides is None else _read_by_group("slot_strides", slot_strides, len(tables), MAX_SIZE)
        types = _types_of(by_name, {} if dtypes is None else require_mapping("dtypes", dtypes))
        is_packed = require_flag("packed", packed)
        layout, size = _offsets_of(by_name, types) if is_packed else ({}, 0)
        shapes = {name: by_group for name, by_group in by_name.items() if name not in layout}
        if layout:
            shapes["packed"], types["packed"] = {0: (size,)}, np.dtype(np.int32)
        given = {} if arrays is None else require_mapping("arrays", arrays)
        made = _make_arrays(shapes, types, depth, given, len(tables))
        for name, by_group in layout.items():
            made[name] = {
                group: [_part_of(whole, start, by_name[name][group]) for whole in made["packed"][0]]
                for group, start in by_group.items()
            }
        described = [(name, group, made[name][group]) for name in by_name for group in made[name]]
        super().__init__(
            source if isinstance(source, RunningBatch) else None,
            tables,
            source.page_sizes if isinstance(source, HostTables) else None,
            token_ids,
            num_tokens,
            num_reqs,
            depth,
            described,
            pad_slot,
            pad_last,
            order == "decodes",
            strides,
            rank,
            num_ranks,
            sizes,
        )
        self.offsets = {name: _by_group(name, by_group, len(tables)) for name, by_group in layout.items()}
        self._sets = [
            {
                name: _by_group(name, {group: sets[i] for group, sets in by_group.items()}, len(tables))
                for name, by_group in made.items()
            }
            for i in range(depth)
        ]

    def __repr__(self) -> str:
        """Return the fields."""
        return f"StepInputs({', '.join(self._sets[0])})"

    def _array(self, name: str) -> Any:
        try:
            return self._sets[self.current][name]
        except KeyError:
            raise ArgumentError(f"{name}: got a field that was not chosen, allowed: {', '.join(self._sets[0])}") from None

    @property
    def token_ids(self) -> Array:
        """Ids of the tokens ``[num_tokens]``."""
        return self._array("token_ids")  # type: ignore[no-any-return]

    @property
    def positions(self) -> Array:
        """Positions of the tokens ``[num_tokens]``."""
        return self._array("positions")  # type: ignore[no-any-return]

    @property
    def rows(self) -> Array:
        """The row of each token ``[num_tokens]``."""
        return self._array("rows")  # type: ignore[no-any-return]

    @property
    def slots(self) -> tuple[Array | None, ...]:
        """Slots of the tokens, by group ``[num_tokens]``."""
        return self._array("slots")  # type: ignore[no-any-return]

    @property
    def query_start_loc(self) -> Array:
        """Where the tokens of each row begin ``[num_reqs + 1]``."""
        return self._array("query_start_loc")  # type: ignore[no-any-return]

    @property
    def kv_start_loc(self) -> Array:
        """Where the keys of each row would begin if those of all rows were one array ``[num_reqs + 1]``."""
        return self._array("kv_start_loc")  # type: ignore[no-any-return]

    @property
    def seq_lens(self) -> Array:
        """Lengths of the rows ``[num_reqs]``."""
        return self._array("seq_lens")  # type: ignore[no-any-return]

    @property
    def last_tokens(self) -> Array:
        """Index of the last token of each row ``[num_reqs]``."""
        return self._array("last_tokens")  # type: ignore[no-any-return]

    @property
    def starts(self) -> Array:
        """Position of the first token of each row ``[num_reqs]``."""
        return self._array("starts")  # type: ignore[no-any-return]

    @property
    def page_ids(self) -> tuple[Array | None, ...]:
        """Pages of each row, by group ``[num_reqs, pages]``."""
        return self._array("page_ids")  # type: ignore[no-any-return]

    @property
    def page_indices(self) -> tuple[Array | None, ...]:
        """Pages that the rows read, one row after another, by group ``[num_pages]``."""
        return self._array("page_indices")  # type: ignore[no-any-return]

    @property
    def page_starts(self) -> tuple[Array | None, ...]:
        """Where the pages of each row begin in ``page_indices``, by group ``[num_reqs + 1]``."""
        return self._array("page_starts")  # type: ignore[no-any-return]

    @property
    def last_page_lens(self) -> tuple[Array | None, ...]:
        """Tokens in the last page of each row, by group ``[num_reqs]``."""
        return self._array("last_page_lens")  # type: ignore[no-any-return]

    @property
    def page_offsets(self) -> tuple[Array | None, ...]:
        """Position of the first token in the first listed page of each row, by group ``[num_reqs]``."""
        return self._array("page_offsets")  # type: ignore[no-any-return]

    @property
    def rank_slots(self) -> tuple[Array | None, ...]:
        """Slots of the tokens of a context-parallel rank, by group ``[num_tokens]``."""
        return self._array("rank_slots")  # type: ignore[no-any-return]

    @property
    def own_starts(self) -> Array:
        """Position of the first token that each row reads alone ``[num_reqs]``."""
        return self._array("own_starts")  # type: ignore[no-any-return]

    @property
    def prefix_page_ids(self) -> tuple[Array | None, ...]:
        """Pages that the rows of a group share, by cache group ``[num_groups, num_pages]``."""
        return self._array("prefix_page_ids")  # type: ignore[no-any-return]

    @property
    def prefix_rows(self) -> Array:
        """Indices of the rows of each group ``[num_groups, num_rows]``."""
        return self._array("prefix_rows")  # type: ignore[no-any-return]

    @property
    def level_query_starts(self) -> Array:
        """Where the tokens of each run begin, by level ``[levels + 1, num_reqs + 1]``."""
        return self._array("level_query_starts")  # type: ignore[no-any-return]

    @property
    def level_page_starts(self) -> tuple[Array | None, ...]:
        """Where the pages of each run begin, by cache group and level ``[levels + 1, num_reqs + 1]``."""
        return self._array("level_page_starts")  # type: ignore[no-any-return]

    @property
    def level_page_indices(self) -> tuple[Array | None, ...]:
        """Pages of the runs, one after another, by cache group and level ``[levels + 1, num_pages]``."""
        return self._array("level_page_indices")  # type: ignore[no-any-return]

    @property
    def level_last_page_lens(self) -> tuple[Array | None, ...]:
        """Tokens in the last page of each run, by cache group and level ``[levels + 1, num_reqs]``."""
        return self._array("level_last_page_lens")  # type: ignore[no-any-return]

    @property
    def state_pages(self) -> tuple[Array | None, ...]:
        """Working pages of the rows, by group ``[num_reqs]``."""
        return self._array("state_pages")  # type: ignore[no-any-return]

    @property
    def write_pages(self) -> tuple[Array | None, ...]:
        """Pages to which the step writes the state after each token, by group ``[num_tokens]``."""
        return self._array("write_pages")  # type: ignore[no-any-return]

    @property
    def write_starts(self) -> tuple[Array | None, ...]:
        """Where the writes of each row begin in the list of written states, by group ``[num_reqs + 1]``."""
        return self._array("write_starts")  # type: ignore[no-any-return]

    @property
    def write_indices(self) -> tuple[Array | None, ...]:
        """Pages to which the step writes states, one row after another, by group ``[num_tokens]``."""
        return self._array("write_indices")  # type: ignore[no-any-return]

    @property
    def write_tokens(self) -> tuple[Array | None, ...]:
        """Index of the token after which each of these states is written, by group ``[num_tokens]``."""
        return self._array("write_tokens")  # type: ignore[no-any-return]

    @property
    def cross_page_ids(self) -> tuple[Array, ...]:
        """Pages of each row's medium, by group of cross-attention ``[num_reqs, pages]``."""
        return self._array("cross_page_ids")  # type: ignore[no-any-return]

    @property
    def encoder_lens(self) -> Array:
        """Tokens of each row's medium ``[num_reqs]``."""
        return self._array("encoder_lens")  # type: ignore[no-any-return]

    @property
    def order(self) -> Array:
        """Index of each row in ``step.rows``, or in the rows of the call ``[num_reqs]``."""
        return self._array("order")  # type: ignore[no-any-return]

    @property
    def distribution(self) -> Array:
        """Rows with one token, the same again, and all rows ``[3]``."""
        return self._array("distribution")  # type: ignore[no-any-return]

    @property
    def sources(self) -> Array:
        """Place of each row in the inputs that this or another `StepInputs` of the batch filled before, if their step samples
        the row's first token; -1 if the token is known ``[num_reqs]``.
        """
        return self._array("sources")  # type: ignore[no-any-return]

    @property
    def packed(self) -> Array:
        """All int32 fields, each from its index in ``offsets`` on."""
        return self._array("packed")  # type: ignore[no-any-return]


Shape = tuple[int, ...]
Shapes = dict[str, dict[int, Shape]]
"""The shape of each field's arrays, by group; group 0 alone for fields that are not by group."""


FIELDS_OF_KINDS = {"Mamba": ("state_pages", *WRITES), "Ring": ("state_pages", "slots")}
"""Fields by group that groups of one page have."""

FIELDS_OF_ATTENTION = ("slots", "page_ids", "rank_slots", *LISTS)
"""Fields by group that all other groups have."""


def _groups_of(source: RunningBatch | HostTables) -> tuple[Sequence[Any], list[str]]:
    """Return the table of each group, and its kind."""
    if isinstance(source, RunningBatch):
        return source.group_tables, [kind_of(spec) for spec in source.group_specs]
    return source.page_tables, ["FullAttention" for _ in source.page_tables]


def _read_ranks(ranks: tuple[int, int] | None, names: Sequence[str]) -> tuple[int, int]:
    """Return the number of a rank, and how many there are."""
    if (ranks is None) == ("rank_slots" in names):
        raise ArgumentError(f"ranks: got {shown(ranks)}, allowed: (rank, size) with the field rank_slots, and None without it")
    if ranks is None:
        return 0, 1
    listed = as_list("ranks", ranks, "a pair of ints")
    if len(listed) != 2:
        raise ArgumentError(f"ranks: got {shown(ranks)}, allowed: (rank, size)")
    size = require_int("ranks", listed[1], 1, MAX_SIZE)
    return require_int("ranks", listed[0], 0, size - 1), size


def _read_by_group(name: str, values: int | Sequence[int], num_groups: int, most: int) -> list[int]:
    """Return a number for each group: one for all, or a sequence of them."""
    listed: list[Any] = [values] * num_groups
    if isinstance(values, Sequence | np.ndarray):
        listed = as_list(name, values, "an int, or a list of ints")
    if len(listed) != num_groups:
        raise ArgumentError(f"{name}: got {len(listed)}, allowed: one for each of {num_groups} groups")
    return [require_int(name, value, 1, most) for value in listed]


def _names_in(fields: Iterable[str]) -> list[str]:
    names = as_list("fields", fields, "a list of names")
    for i, name in enumerate(names):
        if not isinstance(name, str) or name not in INPUT_FIELDS:
            raise ArgumentError(f"fields: got {shown(name)}, allowed: {', '.join(INPUT_FIELDS)}")
        if name in names[:i]:
            raise ArgumentError(f"fields: got {name!r} twice, allowed: each once")
    return names


def _width_of_full(tables: Sequence[Any], kinds: Sequence[str]) -> int:
    """Return the most columns of a table of a group with full attention."""
    full = [table for table, kind in zip(tables, kinds, strict=True) if kind == "FullAttention" and not table.sink_page_ids]
    if not full:
        raise ArgumentError("order: got 'prefixes', allowed for a model with full attention, and without sinks")
    return max(int(table.max_num_pages_per_req) for table in full)


def _shapes_of_prefixes(sizes: Sequence[int] | None, num_reqs: int) -> dict[str, Shape]:
    """Return the shapes of the fields that ``order="prefixes"`` has."""
    if sizes is None:
        return {}
    num_levels, num_groups, num_pages, num_rows, _ = sizes
    return {
        "level_query_starts": (num_levels + 1, num_reqs + 1),
        "level_page_starts": (num_levels + 1, num_reqs + 1),
        "level_page_indices": (num_levels + 1, 0),
        "level_last_page_lens": (num_levels + 1, num_reqs),
        "prefix_page_ids": (num_groups, num_pages),
        "prefix_rows": (num_groups, num_rows),
        "own_starts": (num_reqs,),
    }


def _shapes_of(
    names: list[str],
    widths: list[int],
    kinds: list[str],
    crossed: list[int],
    num_tokens: int,
    num_reqs: int,
    sizes: Sequence[int] | None,
) -> Shapes:
    """Return the shape of each field's arrays. `widths` are the columns of each group's table, `crossed` those of the groups of
    cross-attention, and `sizes` those of groups that share a prefix.
    """
    of_prefixes = _shapes_of_prefixes(sizes, num_reqs)
    shapes: Shapes = {}
    for name in names:
        wanted, columns = [0], widths
        if name in ("cross_page_ids", "encoder_lens"):
            wanted, columns = [*range(len(crossed))][: None if name in BY_GROUP else 1], crossed
        elif name in BY_GROUP:
            wanted = [g for g, kind in enumerate(kinds) if name in FIELDS_OF_KINDS.get(kind, FIELDS_OF_ATTENTION)]
        if name in OF_PREFIXES:
            wanted = [g for g, kind in enumerate(kinds) if kind == "FullAttention"]
        if not wanted:
            raise ArgumentError(f"fields: got {name!r}, which no group of the model has, allowed: those of its groups")
        shape: Shape = (num_reqs,)
        if name in ("token_ids", "positions", "rows", "slots", "rank_slots", "write_pages", "write_indices", "write_tokens"):
            shape = (num_tokens,)
        elif name in ("query_start_loc", "kv_start_loc", "page_starts", "write_starts"):
            shape = (num_reqs + 1,)
        elif name == "distribution":
            shape = (3,)
        elif name in of_prefixes:
            shape = of_prefixes[name]
        has_pages = name in ("page_ids", "cross_page_ids")
        shapes[name] = {g: (num_reqs, columns[g]) if has_pages else shape for g in wanted}
    return shapes


def _types_of(shapes: Shapes, dtypes: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
    types: dict[str, np.dtype[Any]] = dict.fromkeys(shapes, np.dtype(np.int32))
    for name, dtype in dtypes.items():
        if name not in types:
            raise ArgumentError(f"dtypes: got {shown(name)}, allowed: the chosen fields, {', '.join(types)}")
        try:
            types[name] = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):  # NumPy reads text such as "4,,i" as a list of types
            types[name] = np.dtype(object)
        if types[name] not in (np.int32, np.int64) or not types[name].isnative:
            raise ArgumentTypeError(f"dtypes: got {shown(dtype)} for {name}, allowed: int32 or int64")
    return types


def _offsets_of(shapes: Shapes, types: dict[str, np.dtype[Any]]) -> tuple[dict[str, dict[int, int]], int]:
    """Return where the arrays of each int32 field begin in the packed array, and its size."""
    offsets: dict[str, dict[int, int]] = {}
    size = 0
    for name, by_group in shapes.items():
        if types[name] == np.int32:
            offsets[name] = {}
            for group, shape in by_group.items():
                offsets[name][group] = size
                size += int(np.prod(shape))
    if not offsets:
        raise ArgumentError("packed: got True, allowed with an int32 field only")
    return offsets, size


def _make_arrays(
    shapes: Shapes, types: dict[str, np.dtype[Any]], depth: int, given: Mapping[str, Any], num_groups: int
) -> dict[str, dict[int, list[Array]]]:
    """Return the arrays of each set, by field and group: those that were given, or zeros."""
    for name in given:
        if name not in shapes:
            raise ArgumentError(f"arrays: got {shown(name)}, allowed: {', '.join(shapes)}")
    made: dict[str, dict[int, list[Array]]] = {}
    for name, by_group in shapes.items():
        listed = as_list(name, given[name], "a sequence of arrays") if name in given else None
        num_listed = len(by_group) if name == "cross_page_ids" else num_groups
        if listed is not None and name in BY_GROUP and len(listed) != num_listed:
            raise ArgumentError(f"{name}: got arrays of {len(listed)} groups, allowed: {num_listed}")
        made[name] = {}
        for group, shape in by_group.items():
            if listed is None:
                made[name][group] = [np.zeros(shape, types[name]) for _ in range(depth)]
                continue
            sets = as_list(name, listed[group], "a sequence of arrays") if name in BY_GROUP else listed
            if len(sets) != depth:
                raise ArgumentError(f"{name}: got {len(sets)} arrays, allowed: one for each of {depth} sets")
            made[name][group] = [_require_array(name, array, shape, types[name]) for array in sets]
    _refuse_overlap([array for by_group in made.values() for sets in by_group.values() for array in sets])
    return made


def _part_of(whole: Array, start: int, shape: Shape) -> Array:
    return whole[start : start + int(np.prod(shape))].reshape(shape)


def _require_array(name: str, array: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return an array as a plain one of this shape and type, over the same memory."""
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"{name}: got {type(array).__name__}, allowed: a NumPy array of {dtype}")
    plain = np.asarray(array)
    if plain.dtype != dtype or not plain.flags.c_contiguous or not plain.flags.writeable or not plain.flags.aligned:
        raise ArgumentTypeError(
            f"{name}: got an array of {plain.dtype}, {'' if plain.flags.writeable else 'not '}writable, "
            f"{'' if plain.flags.c_contiguous else 'not '}contiguous, allowed: {dtype}, writable and contiguous"
        )
    if plain.shape != shape:
        raise ArgumentError(f"{name}: got an array of {plain.shape}, allowed: {shape}")
    return plain


def _refuse_overlap(arrays: list[Array]) -> None:
    spans = sorted((int(array.ctypes.data), array.nbytes) for array in arrays)
    for (start, size), (next_start, _) in pairwise(spans):
        if start + size > next_start:
            raise ArgumentError("arrays: got two that overlap, allowed: memory of its own for each")


def _by_group(name: str, values: dict[int, Any], num_groups: int) -> Any:
    """Return the only value of a field; of a field by group a tuple of its values, with None for groups without one."""
    num_groups = len(values) if name == "cross_page_ids" else num_groups
    return tuple(values.get(group) for group in range(num_groups)) if name in BY_GROUP else values[0]

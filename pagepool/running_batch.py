"""A running batch: one native call for a whole step of an engine's requests.

Native methods of `RunningBatch`, and the native work of others:

- ``core/rows/running.pyx``: `new_step`, `plan`, `step`, `settle`, `append`, `trim`, `release`, `fork`, `move_row`, `swap_row`,
  `commit_external`, `fail_external`, `rewind`, `take_moves`, `get_page_ids`, `get_token_ids`, `get_medium`,
  `show_media`
- ``core/rows/inputs.pyx``: `inputs`
- ``core/rows/row_request.pyx``: `admit`, `probe`
- ``core/rows/spans.pyx``: `expect`, `lease`
- ``core/checks/holders.pyx``: `check`
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple
from uuid import uuid4
from weakref import ref

import numpy as np
import numpy.typing as npt

from pagepool._core import (
    FailedLoads,
    InputArrays,
    Lease,
    Moves,
    PageCopies,
    PageIds,
    RowRequest,
    RunningRows,
    StateWrites,
    StepResult,
    TokenSpan,
    WaitingRequest,
    check_holders,
    require_token_ids,
)
from pagepool.arguments import MAX_SIZE, require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, RowOverflowError, shown
from pagepool.hashing import RequestExtraKeys, list_features
from pagepool.hit_report import HitReport, explain_hit
from pagepool.host_table import HostTable, HostTables
from pagepool.manager import CacheManager
from pagepool.media import RowMedia
from pagepool.page_hashing import KeyedPages
from pagepool.pools import require_states
from pagepool.request import EngineRequestStatus, LoraId, RequestTraits, Salt, TokenIds
from pagepool.specs import find_shard, find_shard_bounds
from pagepool.waiting_queue import Admission, WaitingQueue

__all__ = ["FailedLoads", "Moves", "PageCopies", "RunningBatch", "StateWrites", "StepResult"]

BINDING = Lock()
"""Held while a batch takes its tables."""

RowNumbers = Sequence[int] | npt.NDArray[Any]

NO_TRAITS = RequestTraits()


class RunningBatch(RunningRows):
    """The running requests of an engine, one in each row of its page table, whose steps are planned together.

    Live, read-only arrays by row: ``is_admitted``; ``num_tokens``, the known tokens of prompt and answer;
    ``num_computed_tokens``, those that planned steps write; ``num_cached_tokens``, those hit on admission and not cut off by
    `trim`; ``num_external_tokens``, those awaited by a pending row; ``num_ahead_tokens``, the planned positions behind the
    known tokens: drafts, and tokens that steps in flight sample. With cross-attention `get_medium` has the pages of a row's
    medium, and how many of its encoder's tokens were hit. ``stays``, int64, has the number of each row's stay, which an
    admission or fork begins and `release` ends; it moves with the row. ``max_steps_ahead`` is the argument. Pools and prefix
    index are the manager's, so batch and manager hit each other's pages. Release all rows before dropping a batch: dropping it
    frees no pages.

    With several pools tables, `get_page_ids`, new pages and copies name ids in the pool of their group, and each row has room
    in the pools of states: a checkpoint is kept only if a free page stays for each free row.

    One owner at a time, as with the manager; calls are serialised. Each call is all or nothing, with one exception: rows before
    the first that does not fit are planned. Only the batch may fill the rows of the table.

    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
    >>> batch = RunningBatch(manager, table)
    >>> batch.admit(0, [1, 2, 3, 4, 5, 6, 7]), batch.admit(1, [1, 2, 3, 4, 9])
    (0, 4)
    >>> result = batch.step(rows=[0, 1], token_ids=[8, 10])
    >>> result.num_grown, result.new_page_ids.tolist(), batch.num_computed_tokens.tolist()
    (2, [], [8, 6])
    >>> batch.step([0, 1], [11, 12]).new_page_rows.tolist(), table.page_table_cpu[:, :3].tolist()
    ([0], [[1, 2, 4], [1, 3, 0]])
    >>> batch.release([0, 1])
    """

    number: int
    """Number of the batch among those of its manager, from 0."""

    def __init__(
        self,
        manager: CacheManager,
        page_table: HostTable | HostTables,
        *,
        data_parallel_size: int | None = None,
        max_steps_ahead: int = 0,
        local_ids: bool = False,
    ) -> None:
        """`page_table`, a table of pagepool or of `pagepool.torch`, has a table for each group of the manager; a `PageTable`
        serves one group. A table serves one batch at a time; while another batch fills it, ArgumentError is raised.

        `data_parallel_size` divides the pool into shards for ``RequestTraits.dp_shard``. With `local_ids` tables and inputs
        have the ids of a rank's own array, of one page more than the shard: 0 is its null page, and the shard's pages count
        from 1. Each request then names its `dp_shard`. `get_page_ids`, new pages and moves keep the pool's ids: see
        `local_page_ids`.

        With `max_steps_ahead`, at most 254, an engine plans up to this many steps before it knows the tokens of the running
        step (see docs/one_step_ahead.md).

        `caches` of the manager says when full pages of rows can be hit: ``"scheduled"``, as soon as their tokens have slots,
        since steps run in order, or ``"computed"``, once `settle` has ended the step that computes them, or, without steps
        ahead, once the row's next step is planned. ``"computed"`` is for engines whose pages others read, or whose layers read
        before all keys are written; equal prompts in one step are then computed twice.

        Raise ArgumentError if the arguments do not fit together, if a pool of states lacks pages (for each of its groups one
        for each row and one more, and the null page), or if the manager caches with a callable as `hash_algo`, since a step
        hashes natively. A row's memory is touched as the row gets longer: 4 bytes per token, 16 per hashed page (32 with
        SHA-256), 4 per page.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        max_steps_ahead = require_int("max_steps_ahead", max_steps_ahead, 0, MAX_SIZE)
        size = 0 if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size, 1)
        registry = manager.registry
        registry.store.require_even(size or None)
        is_divided = size > 0 and find_shard(registry.page_pool.num_pages, 0, size) is not None
        hash_page_size = manager.hash_page_size if manager.enable_caching else 0
        self._has_local_ids = require_flag("local_ids", local_ids)
        if self._has_local_ids and (not is_divided or registry.media is not None):
            got = "a model with cross-attention" if is_divided else "a pool that is not divided"
            raise ArgumentError(f"local_ids: got True for {got}, allowed: False")
        tables = _tables_of(page_table, manager)
        require_states(manager.pools, manager.kv_cache_groups, tables[0].page_table_cpu.shape[0])
        hasher = registry.hasher
        if manager.enable_caching:
            registry.require_native_hashes()
        super().__init__(
            registry.store,
            tables,
            registry.rules.groups,
            manager.max_model_len,
            hash_page_size,
            hasher.chain_key,
            size if is_divided else 0,
            max_steps_ahead,
            manager.caches == "computed",
            hasher.chain_algorithm,
            hasher.hash_lookahead,
            self._has_local_ids,
        )
        self._manager, self.max_steps_ahead = manager, max_steps_ahead
        self._hasher = hasher
        self.group_tables, self.group_specs = tables, [group.kv_cache_spec for group in manager.kv_cache_groups]
        self._registry = registry
        self._data_parallel_size = size or None
        self._hash_page_size = hash_page_size
        self._media: RowMedia | None = None
        self.cross_tables: tuple[HostTable, ...] = ()
        if registry.media is not None:
            self._media = RowMedia(registry.media, registry.lock, self.stays, self.num_computed_tokens)
            self.cross_tables = self._media.tables
            self.show_media(self._media.tables, self._media.num_encoder_tokens, self._media)
        self._counters = registry.query_counters if manager.enable_caching else (None, None)
        self._last_features: list[_ReadFeatures | None] = [None] * self.num_tokens.size  # one per row
        registry.add_batch(self, max_steps_ahead)
        _bind(tables, self)

    def __repr__(self) -> str:
        """Return the size of the batch, and its numbers of known and computed tokens."""
        return (
            f"RunningBatch(num_rows={self.num_tokens.size}, num_admitted={self.is_admitted.sum()}, "
            f"max_num_tokens={self.max_num_tokens}, num_tokens={self.num_tokens.sum()}, "
            f"num_computed_tokens={self.num_computed_tokens.sum()})"
        )

    def admit(
        self,
        row: int,
        token_ids: TokenIds | WaitingRequest,
        *,
        num_tokens: int | None = None,
        max_num_new_tokens: int | None = None,
        num_reserved_pages: int = 0,
        num_external_tokens: int = 0,
        num_drafts: int = 0,
        reserve: Literal["prompt"] | None = None,
        traits: RequestTraits | None = None,
        step: StepResult | None = None,
    ) -> int | None:
        """Start a request in a free row: take its longest cached prefix, allocate slots, and fill the table's row.

        `token_ids`, a list or an int32 array, are the row's known tokens. The first `num_tokens` of them, including cached
        ones, get slots (None: all). `max_num_new_tokens`, a step's budget, limits the slots after the cached tokens. `traits`
        say who the request is: its salt, session, tenant and the like. Return the number of cached tokens, at most one less
        than all; None, without a change, if too few pages are free now. With a host tier, cached pages found only in the tier
        are queued for loading, even if the request then does not fit, or is refused with an error. `num_reserved_pages` stay
        free for running rows.

        `num_drafts` slots, for drafts, follow those tokens, as in `plan`, up to ``max_num_tokens``. With `reserve` ``"prompt"``
        the row takes the pages of all known tokens now, and slots for drafts behind these, so that no later chunk of the prompt
        lacks pages. Groups with windows and chunks hold all these pages too, and give them back as they move on. Forks do not
        get the reserved pages, and `fail_external` gives them back.

        With `num_external_tokens`, up to this many known tokens after the cached ones come from elsewhere, but never the last
        known token. Only the external tokens get slots, and the row is pending until `commit_external`. The array
        ``num_external_tokens`` has their number; if it is 0, since all others are cached, the row runs at once.

        With `step` an admitted row becomes part of this step, unless it waits for tokens from elsewhere: see `settle`.

        `CacheManager.stats` counts a request when it is admitted, not when it is refused. Refusing the same request again in
        the same row costs O(1) while too few pages are free, no hit page gets another holder and no further page of the request
        is cached; with windows, chunks or eagle, while nothing is cached or evicted. For this, pass the same list, or an array
        over the same memory, and the same `traits`: tokens in a new object are compared one by one, and features in a new list
        are looked up again. Do not change these objects or a feature in place: a row reads the features of its last request
        again only if their class does not support weak references.

        Raise RequestTooLargeError for a request that would hold more pages than the whole pool, or its shard, has. Waiting does
        not help, but fewer tokens per step may (see `CacheManager.require_capacity`). Reserved pages do not count, since the
        next call may reserve fewer.

        Raise RowIndexError outside the table, RowOverflowError for more than `max_num_tokens` tokens, ArgumentError if the row
        is already admitted, for no tokens and for values out of range, ArgumentTypeError for other types; PageHashError for a
        hit that is neither free nor held, IntegrityError for a free page with a reference. O(tokens), and with features
        O(features x log features). A row keeps its last request's hashes, so a request that is retried or returns in the same
        row is not hashed again.
        """
        try:
            num_external = num_external_tokens
            if type(num_external) is not int or num_external:
                num_external = min(require_int("num_external_tokens", num_external, 0), self.max_num_tokens)
            if type(num_drafts) is not int or num_drafts:
                num_drafts = min(require_int("num_drafts", num_drafts, 0, MAX_SIZE), self.max_num_tokens)
                self._require_drafts(num_drafts)
            named = NO_TRAITS if traits is None else _checked(traits)
            rules, look_up, resume_at = self._registry.rules, named.look_up, named.resume_at
            counts = rules.require_resume_at(resume_at, self.max_num_tokens) if resume_at else None
            options = (
                named.cache_salt,
                named.lora_id,
                named.mm_features,
                named.dp_shard,
                look_up,
                num_external,
                named.num_prompt_tokens,
                named.num_encoder_tokens and (named.num_encoder_tokens, named.cross_key),
            )
            reserves_prompt = reserve is not None
            if reserves_prompt and not (type(reserve) is str and reserve == "prompt"):
                raise ArgumentError(f"reserve: got {shown(reserve)}, allowed: None or 'prompt'")
            if self._is_refused_still(
                row,
                token_ids,
                num_tokens,
                max_num_new_tokens,
                num_reserved_pages,
                options,
                num_drafts,
                reserves_prompt,
            ):
                return None
            request = RowRequest(
                self,
                row,
                token_ids,
                num_tokens,
                max_num_new_tokens,
                num_reserved_pages,
                options,
                num_external,
                counts,
                num_drafts,
                reserves_prompt,
                named.num_prompt_tokens,
            )
            shard = None if named.dp_shard is None else self._find_shard(named.dp_shard)
            if shard is None and self._has_local_ids:
                raise ArgumentError("dp_shard: got None, allowed with local_ids: a shard")
            keys, keyed = self._find_extra_keys(row, named)
            if keys is not None and self._registry.recent_keys is not None:
                with self._registry.lock:
                    self._registry.recent_keys.keep(keys)
            counter = self._counters[named.is_preempted] if look_up else None
            session_id, tenant = named.session_id, named.tenant
            session = context = 0
            try:
                session = 0 if session_id is tenant is None else self._registry.hold_session(session_id, tenant)
                context = self._registry.hold_context(keys, session_id)
                if not named.num_encoder_tokens:
                    return request.admit(keyed, look_up, shard, context, counter, session, step)
                admit = partial(request.admit, keyed, look_up, shard, context, counter, session, step)
                return self._admit_with_medium(row, named, admit, request.count_least_tokens(), step, num_reserved_pages)
            finally:
                if context:
                    self._registry.release_context(context)
                self._registry.release_session(session)
        except BaseException:
            self._forget_refusal()
            raise

    def admit_next(
        self,
        row: int,
        queue: WaitingQueue,
        *,
        max_num_new_tokens: int | None = None,
        num_reserved_pages: int = 0,
        num_drafts: int = 0,
        reserve: Literal["prompt"] | None = None,
        step: StepResult | None = None,
        skips_misfits: bool = False,
        is_ready: Callable[[Hashable], bool] | None = None,
    ) -> Admission | None:
        """Admit the request that is next in `queue` to a free row, and return its name and the number of its cached tokens.
        Return None if nothing waits, or if too few pages are free for the request: then `refusal` says how many it needs.

        The other arguments are those of `admit`, with its errors; after an error the request stays in the queue. A refused
        request keeps its place, and costs O(1) when it is tried again in the same row. With `skips_misfits` the next ones are
        tried instead, each charged to the requests that it overtakes. `is_ready` is asked for the name of a request before it
        is admitted, for example about its pages in a store; with False others are tried, which are not charged to it.

        The row copies the hashes made when the request was added. If some of the hits that the queue counts are gone, the
        request is looked up again, and another one may be next. O(tokens + waiting requests).
        """
        if not isinstance(queue, WaitingQueue):
            raise ArgumentTypeError(f"queue: got {type(queue).__name__}, allowed: WaitingQueue")
        if queue.manager is not self._manager:
            raise ArgumentError("queue: got one of another manager, allowed: one of the batch's")

        has_tried = False

        def admit(request: WaitingRequest) -> int | None:
            nonlocal has_tried
            has_tried = True
            return self.admit(
                row,
                request,
                max_num_new_tokens=max_num_new_tokens,
                num_reserved_pages=num_reserved_pages,
                num_drafts=num_drafts,
                reserve=reserve,
                traits=request.traits,
                step=step,
            )

        is_idle = self.num_admitted == 0
        admission = queue.admit_by(admit, self.num_steps, is_idle=is_idle, skips_misfits=skips_misfits, is_ready=is_ready)
        if not has_tried:
            self._forget_refusal()
        return admission

    def probe(self, row: int, token_ids: TokenIds, *, traits: RequestTraits | None = None) -> int:
        """Return the number of tokens that `admit` would hit in a free row now, in a host tier too.

        The row keeps the hashes, as after `admit`: a later `admit` or `probe` there, of the same or longer tokens, hashes only
        what is new. Nothing else changes, and `CacheManager.stats` counts no request.

        Raise ArgumentError if the row is admitted, and the errors of `admit` for wrong arguments. O(tokens), and with windows
        or states O(pages x groups).
        """
        named = NO_TRAITS if traits is None else _checked(traits)
        if named.num_encoder_tokens:
            self._require_media(named).read(named)
        request = RowRequest(self, row, token_ids, num_prompt_tokens=named.num_prompt_tokens)
        shard = None if named.dp_shard is None else self._find_shard(named.dp_shard)
        _, keyed = self._find_extra_keys(row, named)
        return request.probe(keyed, shard)

    def explain(self, tokens: int | TokenIds, *, traits: RequestTraits | None = None) -> HitReport:
        """Return why a request would not hit more if it were admitted now: see `CacheManager.explain`.

        `tokens` are its token ids, or the number of an admitted row, for that row's known tokens; `traits` are those of its
        admission. The pages of an admitted row hit as well, so explain a request before `admit` to learn why it misses. No row
        changes, and `CacheManager.stats` counts no request. Raise RowIndexError outside the table, ArgumentError for a row that
        is not admitted, and the errors of `probe`. O(tokens), to hash them, and O(pages x groups).
        """
        named = NO_TRAITS if traits is None else _checked(traits)
        if named.num_encoder_tokens:
            self._require_media(named).read(named)
        if self._has_local_ids and named.dp_shard is None:
            raise ArgumentError("dp_shard: got None, allowed with local_ids: a shard")
        if named.dp_shard is not None:
            self._find_shard(named.dp_shard)
        if isinstance(tokens, int | np.integer):
            row = require_int("tokens", tokens, 0, MAX_SIZE)
            tokens = self.get_token_ids(row)
        prompt = _Prompt.of(tokens, named, self.max_num_tokens)
        ids = find_shard_bounds(self._registry.page_pool.num_pages, named.dp_shard, self._data_parallel_size)
        reason = "" if named.look_up or not self._hash_page_size else "look_up is False"
        return explain_hit(self._registry, prompt, ids, reason)

    def _find_shard(self, dp_shard: int) -> int | None:
        """Return the number of the shard that `dp_shard` names; None if the pool is not divided."""
        return self._registry.find_shard(dp_shard, self._data_parallel_size)

    def _require_media(self, traits: RequestTraits) -> RowMedia:
        """Return the media of the rows. Raise ArgumentError for a model without cross-attention."""
        if self._media is None:
            raise ArgumentError(f"num_encoder_tokens: got {traits.num_encoder_tokens}, allowed without cross-attention: 0")
        return self._media

    def _admit_with_medium(
        self,
        row: int,
        traits: RequestTraits,
        admit: Callable[[], int | None],
        num_least_tokens: int,
        step: StepResult | None,
        num_reserved_pages: int,
    ) -> int | None:
        """Hold a request's medium, and admit the request, with slots for at least `num_least_tokens`: both, or nothing."""
        media, num_hit_tokens = self._require_media(traits), None
        with media.lock:
            try:
                medium = media.take(traits, self._data_parallel_size, num_reserved_pages, num_least_tokens)
                if medium is None:
                    self._forget_refusal()
                else:
                    num_hit_tokens = admit()
                if medium is not None and num_hit_tokens is not None:
                    media.place(row, medium, num_hit_tokens + int(self.num_external_tokens[row]), step)
            finally:
                media.give_back_taken()
        if num_hit_tokens is None:
            media.require_fit(traits, self._data_parallel_size, num_least_tokens)
        return num_hit_tokens

    def _find_extra_keys(self, row: int, traits: RequestTraits) -> tuple[RequestExtraKeys | None, KeyedPages]:
        """Return the extra keys of a request and its keyed pages. Features of the row's last request are not read again."""
        cache_salt, lora_id, features = traits.cache_salt, traits.lora_id, list_features(traits.mm_features)
        if cache_salt is None and lora_id is None and not features and not traits.num_encoder_tokens:
            return None, []
        medium = traits.num_encoder_tokens, traits.cross_key
        keys = self._hasher.extra_keys.of(_Keyed(cache_salt, lora_id, (), *medium))
        if not features:
            return keys, self._list_keyed(keys)
        known = self._last_features[row]
        if known is None or not known.are_same(features, keys):
            keys = self._hasher.extra_keys.of(_Keyed(cache_salt, lora_id, features, *medium))
            try:
                references = [ref(feature) for feature in features]
            except TypeError:  # features without weak references are read each time
                references = []
            known = self._last_features[row] = _ReadFeatures(references, keys, self._list_keyed(keys))
        return known.keys, known.keyed

    def _list_keyed(self, keys: RequestExtraKeys | None) -> KeyedPages:
        return self._hasher.list_keyed(keys, self.max_num_tokens) if self._hash_page_size else []

    def inputs(
        self,
        step: StepResult | None = None,
        *,
        out: InputArrays,
        rows: RowNumbers | None = None,
        starts: RowNumbers | None = None,
        stops: RowNumbers | None = None,
        num_tokens: int | None = None,
        num_reqs: int | None = None,
        draft_token_ids: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Fill the next set of `out`, a `StepInputs` of this batch, with what the model reads in a step, and return the number
        of tokens.

        With `step`, a step in flight, the inputs are its rows and the tokens planned for each, with drafts behind the known
        tokens. Without it `rows` names rows, each once: row ``rows[i]`` computes its tokens ``starts[i]`` to ``stops[i] - 1``.
        The arrays are padded to `num_tokens` and `num_reqs` (None: whole); items behind the padding stay as they were. A token
        that a step in flight samples has the id -1. Drafts behind it, or behind the known tokens, have the ids of their row in
        `draft_token_ids`, int32 ``[rows, drafts]`` in the order of the step, or -1.

        Raise ArgumentError for inputs or a step of another batch, for a settled step, or one whose rows were planned again,
        cut, moved or released since, for a set whose step is not settled, for rows that are not admitted, pending or repeated,
        for a row without tokens or with a token without a page, for more tokens or rows than there is room for, for too few
        drafts, and with the field ``sources`` for a row whose token is sampled by another step than the one filled before, in
        any `StepInputs` of the batch; RowIndexError outside the table; ArgumentTypeError for other types. Nothing has been
        written then. O(tokens + rows), and with ``page_ids`` O(pages), native; it allocates nothing.
        """
        if not isinstance(out, InputArrays):
            raise ArgumentTypeError(f"out: got {type(out).__name__}, allowed: StepInputs")
        if out.batch is not self:
            raise ArgumentError("out: got inputs of other rows, allowed: those made with this batch")
        return out.fill(step, rows, starts, stops, num_tokens, num_reqs, draft_token_ids)

    def take_moves(self) -> Moves:
        """Return the moves due before the next step: the writes of this batch's states, and as in `CacheManager.take_moves` the
        copies, loads and saves of manager and batches, which share one list. Call it once a step, after the calls that plan the
        step, when the step before has been given to the device.

        Until then `step`, `plan`, `trim`, `fork` and `commit_external` raise MovesDueError for rows with pages in due moves.
        Releasing a row drops the copies into its pages. Moves may also be taken, and made, after `fork`, and before repeating a
        refused call: taking them then begins no step. If several batches of a manager take their moves one after another, they
        run in one step. A page to which a state is written can be hit once its row grows by further tokens, or is released. For
        a pending row only the state at the end of its awaited tokens is listed, if a request can resume there: whoever fills
        the row's pages writes it. O(moves), and O(1) without any; then nothing is allocated.
        """
        moves = super().take_moves()
        self._manager.poll_storage()
        return moves

    def expect(self, row: int, start: int = 0, stop: int | None = None, *, seconds: float | None) -> int:
        """Expect the cached pages of tokens ``[start, stop)`` of an admitted row to be used again in `seconds`: see
        `CacheManager.expect`. Return the number of these pages. Raise RowIndexError outside the table, ArgumentError if the row
        is not admitted, and the errors of that method. O(pages).
        """
        return TokenSpan(start, stop).of_row(self, row).expect(seconds)

    def lease(self, row: int, start: int = 0, stop: int | None = None, *, seconds: float) -> Lease:
        """Lease the cached pages of tokens ``[start, stop)`` of an admitted row for some time: see `CacheManager.lease`. Raise
        RowIndexError outside the table, ArgumentError if the row is not admitted, and the errors of that method. O(pages).
        """
        return TokenSpan(start, stop).of_row(self, row).lease(seconds)

    def check(self) -> None:
        """Check rows, table and pool. O(pages + table).

        Raise IntegrityError unless rows hold their pages, each page is in at most as many rows and requests of the manager as
        its ref count, the table shows the rows' pages, and `PagePool.check` passes.
        """
        check_holders(self._registry.store, self._registry.list_held(), self)
        if self._media is not None:
            with self._media.lock:
                self._media.check()
        self._registry.page_pool.check()


class _Keyed(NamedTuple):
    """The attributes of a request from which extra keys are made."""

    cache_salt: Salt | None
    lora_id: LoraId | None
    mm_features: tuple[Any, ...] = ()
    num_encoder_tokens: int = 0
    cross_key: int | str | bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt for a row, as a request."""

    all_token_ids: TokenIds
    num_tokens: int
    num_prompt_tokens: int
    cache_salt: Salt | None
    lora_id: LoraId | None
    mm_features: Sequence[Any] | None
    num_encoder_tokens: int
    cross_key: int | str | bytes | None
    request_id: str = field(default_factory=lambda: f"row {uuid4()}")  # no other request has this name
    num_computed_tokens: int = 0
    sampling_params: None = None
    status: EngineRequestStatus = EngineRequestStatus.WAITING

    @classmethod
    def of(cls, tokens: TokenIds, traits: RequestTraits, max_num_tokens: int) -> "_Prompt":
        """Return the prompt of a request for a row. Raise the errors of wrong token ids."""
        ids = PageIds(tokens)
        require_token_ids(ids, 0)
        if not 0 < len(ids) <= max_num_tokens:
            if not len(ids):
                raise ArgumentError("token_ids: got none, allowed: at least 1")
            raise RowOverflowError(f"token_ids: got {len(ids):,}, allowed: max_num_tokens, {max_num_tokens:,}")
        num_prompt = len(ids) if traits.num_prompt_tokens is None else min(traits.num_prompt_tokens, len(ids))
        return cls(
            ids.to_list(),
            len(ids),
            num_prompt,
            traits.cache_salt,
            traits.lora_id,
            traits.mm_features,
            traits.num_encoder_tokens,
            traits.cross_key,
        )


class _ReadFeatures(NamedTuple):
    """The features last read by a row, the keys of their request, and its pages with keys. References are weak, since features
    may hold pixels.
    """

    references: list[ref[Any]]
    keys: RequestExtraKeys | None
    keyed: KeyedPages

    def are_same(self, features: tuple[Any, ...], other_keys: RequestExtraKeys | None) -> bool:
        """Whether the features are the same objects, and the other keys of their request are those in `other_keys`."""
        mine, others = (keys.request_keys if keys else () for keys in (self.keys, other_keys))
        return (
            len(self.references) == len(features)
            and mine == others
            and all(reference() is feature for reference, feature in zip(self.references, features, strict=True))
        )


def _checked(traits: RequestTraits) -> RequestTraits:
    if not isinstance(traits, RequestTraits):
        raise ArgumentTypeError(f"traits: got {type(traits).__name__}, allowed: RequestTraits, or None")
    return traits


def _tables_of(page_table: HostTable | HostTables, manager: CacheManager) -> tuple[HostTable, ...]:
    page_sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
    if isinstance(page_table, HostTables):
        if page_table.page_sizes != page_sizes:
            raise ArgumentError(f"page_table: got page sizes {page_table.page_sizes}, allowed: the groups' {page_sizes}")
        tables = page_table.page_tables
    elif isinstance(page_table, HostTable):
        tables = (page_table,)
    else:
        raise ArgumentTypeError(f"page_table: got {type(page_table).__name__}, allowed: PageTable or MultiGroupPageTable")
    if not page_sizes or len(tables) != len(page_sizes):
        raise ArgumentError(f"page_table: got {len(tables)} tables for {len(page_sizes)} groups, allowed: one each, at least 1")
    for i, (table, sinks) in enumerate(zip(tables, manager.sink_page_ids, strict=True)):
        if table.sink_page_ids != sinks:
            raise ArgumentError(
                f"page_table: got sink_page_ids {table.sink_page_ids} for group {i}, allowed: the manager's, {sinks}"
            )
    _require_unbound(tables)
    return tables


def _require_unbound(tables: tuple[HostTable, ...]) -> None:
    """Raise ArgumentError if a batch fills one of the tables, or if a row is not empty."""
    if any(table.batch is not None and table.batch() is not None for table in tables):
        raise ArgumentError("page_table: got one that another batch fills, allowed: one of its own, or of a batch that is gone")
    filled = [row for table in tables for row in table.num_pages_per_row.nonzero()[0][:1].tolist()]
    if filled:
        raise ArgumentError(f"page_table: got one with pages in row {filled[0]}, allowed: empty rows; clear_row empties one")


def _bind(tables: tuple[HostTable, ...], batch: "RunningBatch") -> None:
    """Let a batch fill the tables, unless another one was faster."""
    with BINDING:
        _require_unbound(tables)
        for table in tables:
            table.batch = ref(batch)

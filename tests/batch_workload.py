"""Random work for a batch of rows and its model: a small engine whose decisions depend on a seed.

Prompts come from a few families over a tiny vocabulary, and pools are tiny, so that hits, duplicates, evictions and shortage
are all frequent. Rows that are preempted come back with all their tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from batch_model import Grown
from oracle import NULL_PAGE
from settings import Setting
from twins import Mismatch, Twins
from workload import NUM_FAMILIES, VOCABULARY, Feature

NUM_ROWS = 5
MAX_NEIGHBOURS = 2


class BatchWorkload:
    """Drives rows at random. It reads their state from the model."""

    def __init__(self, setting: Setting, twins: Twins, num_pages: int, rng: Random, trims: bool) -> None:
        self.setting = setting
        self.num_pages = num_pages
        self.rng = rng
        self.twins = twins
        self.model: Any = twins.oracle  # ModelRows
        self.max_tokens = setting.max_model_len
        self.families = [self._tokens(self.max_tokens) for _ in range(NUM_FAMILIES)]
        self.attributes: dict[int, dict[str, Any]] = {}  # by row
        self.preempted: deque[tuple[list[int], dict[str, Any]]] = deque(maxlen=4)
        self.refused: dict[int, tuple[list[int], dict[str, Any], bool]] = {}  # by row
        self._names = (f"neighbour{number}" for number in itertools.count())
        self._actions = self._weighted_actions(trims)

    def run(self, num_calls: int) -> None:
        """Act until the number of calls is reached, then empty the pool and reset it."""
        actions, weights = zip(*self._actions.items(), strict=True)
        cumulated = list(itertools.accumulate(weights))
        while self.twins.num_calls < num_calls:
            self.rng.choices(actions, cum_weights=cumulated)[0]()
        self.drain()

    def _weighted_actions(self, trims: bool) -> dict[Callable[[], None], float]:
        actions: dict[Callable[[], None], float] = {
            self.admit: 6,
            self.grow: 6,
            self.step: 9,
            self.append: 1,
            self.release: 2,
            self.move: 1,
            self.swap: 1,
            self.start_neighbour: 1.5,
            self.finish_neighbour: 1.5,
            self.evict: 0.4,
            self.reset: 0.2,
            self.drain: 0.1,
        }
        return actions | {self.trim: 2, self.draft: 3, self.fail_load: 1, self.undo: 3} if trims else actions

    # selection of rows

    def rows(self) -> list[int]:
        return [row for row, request in enumerate(self.model.requests) if request is not None]

    def free_rows(self) -> list[int]:
        return [row for row, request in enumerate(self.model.requests) if request is None]

    def some(self, rows: list[int]) -> list[int]:
        """Return some of the rows in any order, mostly all."""
        return self.rng.sample(rows, len(rows) if self.rng.random() < 0.6 else self.rng.randint(0, len(rows)))

    def num_tokens(self, row: int) -> int:
        return self.model.requests[row].num_tokens

    def num_uncomputed(self, row: int) -> int:
        return self.num_tokens(row) - self.model.requests[row].num_computed_tokens

    def num_appendable(self, row: int) -> int:
        return self.max_tokens - self.num_tokens(row)

    # admission

    def admit(self) -> None:
        """Start a new request or one that was preempted, with all of its tokens or some; make room if there is none."""
        if not self.free_rows():
            return
        rng = self.rng
        row = rng.choice(self.free_rows())
        if self.refused.get(row) and rng.random() < 0.7:
            token_ids, attributes, is_preempted = self.refused.pop(row)
        elif self.preempted and rng.random() < 0.5:
            (token_ids, attributes), is_preempted = self.preempted.popleft(), True
        else:
            (token_ids, attributes), is_preempted = self._new_request(), False
        if not self.try_to_admit(row, token_ids, attributes, is_preempted) and rng.random() < 0.5 and self.rows():
            self.preempt(rng.choice(self.rows()))

    def try_to_admit(self, row: int, token_ids: list[int], attributes: dict[str, Any], is_preempted: bool) -> bool:
        """Admit, or keep a refused request: the same objects in the same row are recognised at the next try."""
        options = self._admission_options(len(token_ids))
        if self.twins.call("admit", row, token_ids, **attributes, **options, is_preempted=is_preempted) is None:
            self.refused[row] = token_ids, attributes, is_preempted
            return False
        self.attributes[row] = attributes
        return True

    def _admission_options(self, num_tokens: int) -> dict[str, Any]:
        rng, options = self.rng, {}
        if rng.random() < 0.5:
            options["num_tokens"] = rng.randint(1, num_tokens)
        if rng.random() < 0.3:
            options["max_num_new_tokens"] = rng.randint(1, num_tokens)
        if rng.random() < 0.1:
            options["num_reserved_pages"] = rng.randint(1, self.num_pages // 2)
        if rng.random() < 0.1:
            options["look_up"] = False
        if self.setting.data_parallel_size is not None:
            options["dp_shard"] = rng.choice((None, *range(2 * self.setting.data_parallel_size)))
        return options

    def _new_request(self) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt of a family, or one that begins like a running row."""
        row = self.rng.choice(self.rows() or [None])
        if row is not None and self.rng.random() < 0.5:
            return self._prompt(self.model.requests[row].all_token_ids), self.attributes[row]
        return self._prompt(self.rng.choice(self.families)), self._attributes() if self.rng.random() < 0.4 else {}

    def _prompt(self, base: list[int]) -> list[int]:
        """Return the beginning of other tokens and some more; sometimes a tiny prompt, or the longest possible."""
        rng, page_size = self.rng, self.setting.page_size
        num_shared = rng.choice((len(base), rng.randint(0, len(base) // page_size) * page_size + rng.randint(0, 2)))
        tokens = base[:num_shared] + self._tokens(rng.randint(1, 2 * page_size))
        most = rng.choice(
            (self.max_tokens, self.max_tokens // 2, self.max_tokens // 2, 3 * page_size, 2 * page_size, page_size - 1)
        )
        return tokens[: max(1, most)]

    def _attributes(self) -> dict[str, Any]:
        """Return the extra keys of a request."""
        if self.rng.random() < 0.5:
            return {"cache_salt": self.rng.choice((None, "salt", "pepper")), "lora_id": self.rng.choice((None, 1, "tuned"))}
        return {"mm_features": self._features()}

    def _features(self) -> tuple[Feature, ...]:
        """Return features at a few fixed places, the last of which most requests reach only late."""
        page_size = self.setting.page_size
        places = ((0, 2), (1, page_size), (page_size, 1), (2 * page_size - 1, page_size + 1), (self.max_tokens - 3, 9))
        chosen = sorted(self.rng.sample(places, self.rng.randint(0, 2)))
        features = [Feature(self.rng.choice(("cat", "dog")), "image", SimpleNamespace(offset=o, length=n)) for o, n in chosen]
        return (*features, Feature("cat", "image", None)) if self.rng.random() < 0.2 else tuple(features)

    def _tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    # growth

    def grow(self) -> None:
        """Compute more of some rows, with or without lookahead."""
        rng, rows = self.rng, self.some(self.rows())
        if rng.random() < 0.2:  # one number for all rows
            most = min(map(self.num_uncomputed, rows), default=0)
            self.grow_all(rows, rng.randint(0, most), rng.choice((0, 1, 5)))
            return
        nums_new = [rng.choice((self.num_uncomputed(row), rng.randint(0, self.num_uncomputed(row)))) for row in rows]
        self.grow_all(rows, nums_new, [rng.choice((0, 0, 1, 3, self.max_tokens)) for _ in rows])

    def grow_all(self, rows: list[int], num_new: Any, num_ahead: Any) -> None:
        """Grow, and continue with the rest after a preemption."""

        def of(values: Any, rows: list[int]) -> Any:
            return values if isinstance(values, int) else [values[row] for row in rows]

        new, ahead = (
            values if isinstance(values, int) else dict(zip(rows, values, strict=True)) for values in (num_new, num_ahead)
        )
        self._persist(rows, lambda rows: self.twins.call("grow", rows, of(new, rows), of(ahead, rows)))

    def step(self) -> None:
        """Decode a token of some rows."""
        rows = self.some([row for row in self.rows() if self.num_appendable(row)])
        token_ids = dict(zip(rows, self._tokens(len(rows)), strict=True))
        self._persist(rows, lambda rows: self.twins.call("step", rows, [token_ids[row] for row in rows]))

    def _persist(self, rows: list[int], call: Callable[[list[int]], Grown]) -> None:
        """Call for the rows; if one does not fit, preempt any row and call again for the rest, or give up."""
        while True:
            num_grown = call(rows).num_grown
            if num_grown == len(rows) or self.rng.random() < 0.2:
                return
            victim = self.rng.choice(self.rows())
            rows = [row for row in rows[num_grown:] if row != victim]
            self.preempt(victim)

    def append(self) -> None:
        """Let rows know tokens that are not yet computed."""
        rows = [row for row in self.rows() for _ in range(self.rng.randint(0, min(3, self.num_appendable(row))))]
        self.rng.shuffle(rows)
        self.twins.call("append", rows, self._tokens(len(rows)))

    def undo(self) -> None:
        """Undo the last calls that grew rows; refused if a row has changed since."""
        for _ in range(min(self.rng.choice((1, 1, 2)), len(self.model.growths))):
            self.twins.call("undo")

    def draft(self) -> None:
        """Append drafts, compute them with the rest, and remove the rejected ones."""
        rng, rows = self.rng, self.some(self.rows())
        nums_drafts = {row: min(rng.randint(0, 4), self.num_appendable(row)) for row in rows}
        repeated = [row for row in rows for _ in range(nums_drafts[row])]
        self.twins.call("append", repeated, self._tokens(len(repeated)))
        self.grow_all(rows, [self.num_uncomputed(row) for row in rows], rng.choice((0, 2)))
        rows = [row for row in rows if self.model.requests[row] is not None]
        self.twins.call("trim", rows, [self.num_tokens(row) - rng.randint(0, nums_drafts[row]) for row in rows])

    def trim(self) -> None:
        """Cut rows anywhere, mostly near the end or in shared pages; refused if a window has moved on."""
        rng, rows = self.rng, self.some(self.rows())
        if rng.random() < 0.2:
            self.twins.call("trim", rows, rng.randint(0, min(map(self.num_tokens, rows), default=0)))
            return
        self.twins.call("trim", rows, [self._cut(row) for row in rows])

    def fail_load(self) -> None:
        """Drop the entries of a row's pages from a token on, and compute the tokens again."""
        if not self.rows():
            return
        row = self.rng.choice(self.rows())
        request = self.model.requests[row]
        cut = self.rng.randint(0, request.num_computed_tokens)
        token_ids = list(request.all_token_ids[cut:])
        groups = zip(self.setting.groups, self.model.get_page_ids(row), strict=True)
        bad = [page_id for group, page_ids in groups for page_id in page_ids[cut // group.page_size :] if page_id != NULL_PAGE]
        self.twins.call("evict_pages", bad if self.rng.random() < 0.6 else self.rng.sample(bad, len(bad) // 2))
        self.twins.call("trim", [row], cut)
        if self.num_tokens(row) == cut:  # nothing prevented it
            self.twins.call("append", [row] * len(token_ids), token_ids)
            self.grow_all([row], [self.num_uncomputed(row)], 0)

    def _cut(self, row: int) -> int:
        num_shared = self._num_shared_tokens(row)
        if num_shared and self.rng.random() < 0.5:
            return self.rng.randint(max(0, num_shared - self.setting.page_size), num_shared)
        depth = self.rng.choice((0, 1, self.setting.page_size, self.max_tokens))
        return max(0, self.num_tokens(row) - self.rng.randint(0, depth))

    def _num_shared_tokens(self, row: int) -> int:
        """Return the end of the last page that others hold too; 0 if there is none."""
        ref_counts = self.model.manager.page_pool.ref_counts
        groups = zip(self.setting.groups, self.model.get_page_ids(row), strict=True)
        ends = [(i + 1) * group.page_size for group, pages in groups for i, page in enumerate(pages) if ref_counts[page] > 1]
        return min(max(ends, default=0), self.num_tokens(row))

    # release and moves

    def release(self) -> None:
        """Release some rows, sometimes before all of their tokens are computed."""
        rows = self.rng.sample(self.rows(), min(len(self.rows()), self.rng.randint(0, 2)))
        nums_computed = [self.model.requests[row].num_computed_tokens for row in rows]
        if self.rng.random() < 0.4:
            self.twins.call("release", rows, [self.rng.randint(max(0, num - 9), num) for num in nums_computed])
        else:
            self.twins.call("release", rows)

    def preempt(self, row: int) -> None:
        """Release a row whose request returns with all its tokens."""
        token_ids = list(self.model.requests[row].all_token_ids)
        if token_ids:
            self.preempted.append((token_ids, self.attributes[row]))
        self.twins.call("release", [row])

    def move(self) -> None:
        if self.rows() and self.free_rows():
            src, tgt = self.rng.choice(self.rows()), self.rng.choice(self.free_rows())
            self.twins.call("move_row", src, tgt)
            self.attributes[tgt] = self.attributes.pop(src)

    def swap(self) -> None:
        """Exchange any two rows, even one with itself."""
        src, tgt = (self.rng.randrange(len(self.model.requests)) for _ in range(2))
        self.twins.call("swap_row", src, tgt)
        mine, theirs = self.attributes.get(src, {}), self.attributes.get(tgt, {})
        self.attributes |= {tgt: mine, src: theirs}

    # other users of the pool

    def start_neighbour(self) -> None:
        """Run a request through the manager, which caches for rows and hits their pages."""
        if len(self.twins.live_request_ids) < MAX_NEIGHBOURS:
            name, (token_ids, attributes) = next(self._names), self._new_request()
            if self.twins.call("start_neighbour", name, token_ids, **attributes) is not None:
                self.twins.live_request_ids[name] = None

    def finish_neighbour(self) -> None:
        if self.twins.live_request_ids:
            name = self.rng.choice(list(self.twins.live_request_ids))
            del self.twins.live_request_ids[name]
            self.twins.call("finish_neighbour", name)

    def evict(self) -> None:
        """Drop the prefix entries of some pages, held ones too."""
        self.twins.call("evict_pages", self.rng.sample(range(1, self.num_pages), self.rng.randint(1, 3)))

    def reset(self) -> None:
        """Reset the prefix cache, or be refused while it is in use."""
        self.twins.call("reset_prefix_cache")

    def drain(self) -> None:
        """Release all rows and end all requests, so that a reset succeeds."""
        self.twins.call("release", self.some(self.rows()))
        self.twins.call("release", self.rows())
        while self.twins.live_request_ids:
            self.finish_neighbour()
        self.reset()


def run_batch_workload(
    setting: Setting,
    make_twins: Callable[..., Twins],
    seed: int,
    num_calls: int,
    trims: bool,
    workload_class: type[BatchWorkload] = BatchWorkload,
) -> None:
    """Run a seed's workload to its end; on a mismatch, print the command that repeats it."""
    rng = Random(seed)
    num_pages = rng.choice(setting.num_pages)
    workload = workload_class(setting, make_twins(setting, num_pages, NUM_ROWS), num_pages, rng, trims)
    try:
        workload.run(num_calls)
    except Exception as error:
        where = f"setting {setting.name!r}, seed {seed}, {num_pages} pages, operation {workload.twins.num_calls - 1}"
        raise Mismatch(f"{where}\n{error}") from error

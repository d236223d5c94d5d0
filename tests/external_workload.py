"""The random work of `batch_workload`, with rows that wait for tokens from elsewhere, and leases of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from batch_model import BatchRows, BatchState, ManagerRows, ModelRows, OracleRows, Rows
from batch_workload import BatchWorkload
from oracle import NULL_PAGE
from oracle_kinds import Mamba
from states_workload import StatesBatchWorkload

Actions = dict[Callable[[], None], float]


class Leasing(Rows):
    """Leases, the oldest first."""

    leases: list[Any]

    def end_lease(self, i: int) -> None:
        self.leases.pop(i).release()

    def count_leases(self) -> int:
        return len(self.leases)


class ExternalRows(ModelRows):
    """Rows that may be pending. Calls that grow, cut or fork these are refused."""

    def list_external(self) -> list[int]:
        return list(self.nums_external)

    def grow(self, rows: list[int], *args: Any) -> Any:
        self.require_running(rows)
        return super().grow(rows, *args)

    def step(self, rows: list[int], token_ids: list[int]) -> Any:
        self.require_running(rows)
        return super().step(rows, token_ids)

    def require_running(self, rows: list[int]) -> None:
        if any(self.nums_external[row] for row in rows):
            raise ValueError("the row waits for tokens from elsewhere")

    def require_waiting(self, row: int, num_tokens: int, needs_all: bool) -> None:
        num_external = self.nums_external[row]
        if num_external:
            self.require_no_copies([row])
        if not num_external or num_tokens > num_external or (needs_all and num_tokens < num_external):
            raise ValueError("the row waits for none, or for others")

    @property
    def has_state(self) -> bool:
        return any(group.kind == "mamba" for group in self.setting.groups)

    def commit_external(self, row: int, num_tokens: int) -> None:
        self.require_waiting(row, num_tokens, self.has_state)
        self.commit(self.requests[row], num_tokens)
        self.requests[row].num_computed_tokens += num_tokens
        self.nums_external[row] = 0
        self._show(row)

    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        self.require_waiting(row, num_valid_tokens, False)
        num_computed = self.requests[row].num_computed_tokens = self.fail(self.requests[row], num_valid_tokens)
        self.num_hits[row] = min(self.num_hits[row], num_computed)
        self.nums_external[row] = 0
        self._show(row)
        return num_computed

    def commit(self, request: Any, num_tokens: int) -> None:
        raise NotImplementedError

    def fail(self, request: Any, num_tokens: int) -> int:
        raise NotImplementedError


class ExternalManagerRows(ExternalRows, Leasing, ManagerRows):
    """Over the package's manager."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leases: list[Any] = []

    def commit(self, request: Any, num_tokens: int) -> None:
        self.manager.commit_external(request, num_tokens)

    def fail(self, request: Any, num_tokens: int) -> int:
        return self.manager.fail_external(request, num_tokens)

    def lease(self, page_ids: list[int]) -> None:
        self.leases.append(self.manager.lease(page_ids))


class OracleLease:
    """References to pages of an oracle."""

    def __init__(self, pool: Any, page_ids: list[int]) -> None:
        if any(page == NULL_PAGE or (page in pool.free_queue and page not in pool.entry_of_page) for page in page_ids):
            raise IndexError("a page is neither held nor cached")
        self.pool, self.page_ids = pool, page_ids
        for page in page_ids:
            if page in pool.free_queue:
                pool.touch([[page]])
            else:
                pool.ref_counts[page] += 1

    def release(self) -> None:
        self.pool.free_pages(self.page_ids[::-1])


class ExternalOracleRows(ExternalRows, Leasing, OracleRows):
    """Over the oracle, in plain Python."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leases: list[Any] = []

    def lease(self, page_ids: list[int]) -> None:
        self.leases.append(OracleLease(self.manager.page_pool, page_ids))

    def commit(self, request: Any, num_tokens: int) -> None:
        num_computed = request.num_computed_tokens + num_tokens
        for kind, held in zip(self.manager.kinds, self.manager.held[request.request_id], strict=True):
            stop = 0 if isinstance(kind, Mamba) else min(kind.first_useful_page(num_computed, 0), len(held.pages))
            for place in range(stop - 1, -1, -1):
                if held.pages[place] != NULL_PAGE:
                    self.manager.page_pool.skip_page(held.pages[place], self.manager._is_needed_by_hits(kind, place))
                held.pages[place] = NULL_PAGE
            held.num_cached_pages = max(held.num_cached_pages, stop)
        self.manager._enter_full_pages(request, num_computed)

    def fail(self, request: Any, num_tokens: int) -> int:
        num_computed = 0
        if not self.has_state:
            self.commit(request, num_tokens)
            num_computed = request.num_computed_tokens + num_tokens
        for kind, held in zip(self.manager.kinds, self.manager.held[request.request_id], strict=True):
            while len(held.pages) > kind.num_required_pages(num_computed):
                self.manager.page_pool.free_pages([held.pages.pop()])
            held.go_back(kind.num_places(num_computed))
        return num_computed

    def fork(self, row: int, targets: list[int]) -> None:
        self.require_running([row])
        super().fork(row, targets)

    def trim(self, rows: list[int], num_tokens: Any) -> None:
        self.require_running(rows)
        super().trim(rows, num_tokens)


class ExternalBatchRows(Leasing, BatchRows):
    """A `RunningBatch`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leases: list[Any] = []

    def list_external(self) -> list[int]:
        return self.batch.num_external_tokens.tolist()

    def commit_external(self, row: int, num_tokens: int) -> None:
        self.named = {row}
        self.batch.commit_external(row, num_tokens)

    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        self.named = {row}
        return self.batch.fail_external(row, num_valid_tokens)

    def lease(self, page_ids: list[int]) -> None:
        self.leases.append(self.manager.lease(self._formed(page_ids)))

    def count_leases(self) -> int:
        return len(self.manager.leases)

    def state(self, request_ids: Iterable[str]) -> BatchState:
        self.manager.check()
        return super().state(request_ids)


class External(BatchWorkload):
    """Rows that are admitted with tokens from elsewhere. `rows` are those that are not pending."""

    def _weighted_actions(self, trims: bool) -> Actions:
        more = {self.commit: 3, self.fail: 2, self.cancel: 0.5, self.misuse_pending: 0.5, self.lease: 1, self.end_lease: 1}
        return super()._weighted_actions(trims) | more

    def rows(self) -> list[int]:
        return [row for row in super().rows() if not self.model.nums_external[row]]

    def pending(self) -> list[int]:
        return [row for row, num_external in enumerate(self.model.nums_external) if num_external]

    def _admission_options(self, num_tokens: int) -> dict[str, Any]:
        options = super()._admission_options(num_tokens)
        if self.rng.random() < 0.4:
            options["num_external_tokens"] = self.rng.choice((self.rng.randint(1, num_tokens), num_tokens, 1, 2**40))
        return options

    def admit(self) -> None:
        super().admit()
        self.twins.call("list_external")

    def draw_arrived(self, row: int) -> int:
        """Draw a number of tokens for which a row waits, all of them mostly."""
        num_external = self.model.nums_external[row]
        return self.rng.choice((num_external, num_external, self.rng.randint(0, num_external)))

    def commit(self) -> None:
        """End a transfer; where fewer tokens came than a state needs, or copies are due, it cannot."""
        for row in self.pending()[: self.rng.randint(1, 2)]:
            self.twins.call("commit_external", row, self.draw_arrived(row))

    def fail(self) -> None:
        if self.pending():
            row = self.rng.choice(self.pending())
            self.twins.call("fail_external", row, self.draw_arrived(row))

    def cancel(self) -> None:
        if self.pending():
            self.twins.call("release", [self.rng.choice(self.pending())])

    def misuse_pending(self) -> None:
        """Make calls for a row that waits, or end what no row waits for."""
        for row in self.pending()[:1]:
            self.twins.call("grow", [row], self.rng.randint(0, 1), 0)
            if self.num_appendable(row):
                self.twins.call("step", [row], [1])
            self.twins.call("commit_external", row, self.model.nums_external[row] + 1)
            if self.is_whole and self.num_tokens(row):
                self.twins.call("trim", [row], self.num_tokens(row) - 1)
        for row in self.rows()[:1]:
            self.twins.call(self.rng.choice(("commit_external", "fail_external")), row, self.rng.randint(0, 1))

    def lease(self) -> None:
        """Lease some pages of a row, or any."""
        row = self.rng.randrange(len(self.model.requests))
        held = [page for pages in self.model.get_page_ids(row) for page in pages if page != NULL_PAGE]
        page_ids = held if self.rng.random() < 0.7 else self.rng.choices(range(self.num_pages), k=2)
        self.twins.call("lease", self.rng.sample(page_ids, self.rng.randint(0, len(page_ids))))
        self.twins.call("count_leases")

    def end_lease(self) -> None:
        num_leases = self.twins.call("count_leases")
        if num_leases:
            self.twins.call("end_lease", self.rng.randrange(num_leases))

    def drain(self) -> None:
        while self.twins.call("count_leases") and self.rng.random() < 0.95:
            self.end_lease()
        self.twins.call("release", self.pending())
        super().drain()


class ExternalWorkload(External):
    """Without states."""

    def __init__(self, setting: Any, twins: Any, num_pages: int, rng: Any, trims: bool) -> None:
        self.is_whole = trims
        super().__init__(setting, twins, num_pages, rng, trims)


class ExternalStatesWorkload(External, StatesBatchWorkload):
    """With states, copies, and forks."""

    def commit(self) -> None:
        self.take_in_time()
        super().commit()

    def fail(self) -> None:
        self.take_in_time()
        super().fail()

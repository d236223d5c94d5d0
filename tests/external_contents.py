"""A simulation of what pages hold, with rows that wait for tokens from elsewhere, leases, forks and a host tier.

In the place of keys and values each slot holds the tokens up to its own, and a state all tokens that it has seen. Each step
compares all that it reads. A transfer from elsewhere writes only what has to come, and garbage elsewhere.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hybrids import FULL, MAX_MODEL_LEN, NUM_ROWS, PAGE_SIZE, STATE, make_batch, make_manager

from pagepool import ChunkedLocalAttentionSpec, HostTier, SlidingWindowSpec
from pagepool.errors import ArgumentError, CopiesDueError, OutOfPagesError

WINDOW = SlidingWindowSpec(PAGE_SIZE, 1, 8, "float16", False, 9)
CHUNK = ChunkedLocalAttentionSpec(PAGE_SIZE, 1, 8, "float16", False, 8)
MODELS: tuple[tuple[Any, ...], ...] = ((FULL,), (FULL, WINDOW), (WINDOW,), (FULL, CHUNK), (CHUNK,), (FULL, STATE), (STATE,))
Page = dict[int, tuple[int, ...]]
"""What its slots hold; a state is in slot 0."""


def first_read(spec: Any, start: int) -> int:
    """Return the first token to which tokens from `start` on attend."""
    if spec is WINDOW:
        return max(0, start - 8)
    return start // 8 * 8 if spec is CHUNK else 0


class Simulation:
    """One model with one pool, by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.specs = rng.choice(MODELS)
        num_pages, num_host_pages = rng.choice((12, 20, 40)), rng.choice((0, 0, 8, 60))
        tier = HostTier(num_host_pages, policy=rng.choice(("write_back", "write_through"))) if num_host_pages else None
        self.manager = make_manager(*self.specs, num_pages=num_pages, host_tier=tier, eviction=rng.choice(("lru", "adaptive")))
        self.batch = make_batch(self.manager, dedupe=rng.random() < 0.3)
        self.device: list[Page] = [{} for _ in range(num_pages)]
        self.host: list[Page] = [{} for _ in range(num_host_pages)]
        self.families = [rng.choices(range(3), k=MAX_MODEL_LEN) for _ in range(2)]
        self.tokens: dict[int, list[int]] = {}  # of each row
        self.leases: list[tuple[Any, list[Page]]] = []
        self.in_flight: list[tuple[Any, list[Page]]] = []
        self.counts: Counter[str] = Counter()

    def run(self, num_steps: int) -> Counter[str]:
        for _ in range(num_steps):
            self.receive()
            self.rng.choice((self.trim, list, list))()
            chunks = self.grow() + [chunk for chunk in (self.admit(), self.admit()) if chunk is not None]
            self.move_pages()
            self.compute(chunks)
            self.move_pages()
            self.rng.choice((self.release, self.fork, self.trim, self.lease, self.end_lease, self.swap))()
            self.batch.check()
            self.manager.check()
        self.drain()
        return self.counts

    def is_pending(self, row: int) -> bool:
        return bool(self.batch.num_external_tokens[row])

    def running(self) -> list[int]:
        return [row for row in self.tokens if not self.is_pending(row)]

    # The model.

    def compute(self, chunks: list[tuple[int, int, int]]) -> None:
        """Compute tokens ``[start, stop)`` of rows: all are written before any is read."""
        for row, start, stop in chunks:
            self.check_states(row, start)
            self.write(row, start, stop, start)
        for row, start, stop in chunks:
            self.check_read(row, start, stop)

    def check_states(self, row: int, num_tokens: int) -> None:
        for spec, ids in zip(self.specs, self.batch.get_page_ids(row), strict=True):
            if spec is STATE and num_tokens:
                assert self.device[ids[0]].get(0) == tuple(self.tokens[row][:num_tokens]), (row, num_tokens, ids)

    def write(self, row: int, start: int, stop: int, least: int) -> None:
        """Write tokens ``[start, stop)``, in the pages to which tokens from `least` on attend."""
        tokens = self.tokens[row]
        for spec, ids in zip(self.specs, self.batch.get_page_ids(row), strict=True):
            if spec is STATE:
                self.device[ids[0]] = {0: tuple(tokens[:stop])}
            first = first_read(spec, least) // PAGE_SIZE * PAGE_SIZE
            for place in range(max(start, first), 0 if spec is STATE else stop):
                self.device[ids[place // PAGE_SIZE]][place % PAGE_SIZE] = tuple(tokens[: place + 1])

    def check_read(self, row: int, start: int, stop: int) -> None:
        tokens = self.tokens[row]
        for spec, ids in zip(self.specs, self.batch.get_page_ids(row), strict=True):
            for place in range(first_read(spec, start), 0 if spec is STATE else stop):
                found = self.device[ids[place // PAGE_SIZE]].get(place % PAGE_SIZE)
                assert ids[place // PAGE_SIZE], (row, place, ids)
                assert found == tuple(tokens[: place + 1]), (row, place, ids, found)
                self.counts["slots compared"] += 1

    # Transfers of the tier, and copies.

    def move_pages(self) -> None:
        due = self.batch.take_transfers()
        if due.number:
            saved = [dict(self.device[page]) for page in due.save_src]
            loaded = [dict(self.host[page]) for page in due.load_src]
            for page, contents in zip(due.load_dst, loaded, strict=True):
                self.device[page] = contents
            self.in_flight.append((due, saved))
        copies = self.batch.take_copies()
        copied = [dict(self.device[page]) for page in copies.src]
        for page, contents in zip(copies.dst, copied, strict=True):
            self.device[page] = contents
        while self.in_flight and self.rng.random() < 0.6:
            done, saved = self.in_flight.pop(0)
            for page, contents in zip(done.save_dst, saved, strict=True):
                self.host[page] = contents
            self.manager.complete_transfers(done.number)
        self.counts["copies"] += len(copies)

    # Rows.

    def admit(self) -> tuple[int, int, int] | None:
        free = [row for row in range(NUM_ROWS) if row not in self.tokens]
        if not free or self.rng.random() < 0.4:
            return None
        rng, row = self.rng, self.rng.choice(free)
        tokens = rng.choice(self.families)[: rng.randint(1, 40)] + rng.choices(range(3), k=rng.randint(1, 4))
        num_external = rng.choice((0, rng.randint(1, len(tokens)), 99))
        num_new = rng.choice((None, rng.randint(1, 20)))
        num_cached = self.batch.admit(row, tokens, max_num_new_tokens=num_new, num_external_tokens=num_external)
        if num_cached is None:
            return None
        self.tokens[row] = tokens
        self.counts["cached tokens"] += num_cached
        if self.is_pending(row):
            for ids in self.batch.get_page_ids(row):
                for page in set(ids) - {0}:
                    assert self.manager.page_pool.ref_counts()[page] >= 1
            return None
        return row, num_cached, int(self.batch.num_computed_tokens[row])

    def grow(self) -> list[tuple[int, int, int]]:
        """Compute some known tokens of rows, or a new one; a row that does not fit goes."""
        chunks: list[tuple[int, int, int]] = []
        for row in self.running():
            start = int(self.batch.num_computed_tokens[row])
            if start == len(self.tokens[row]) and start == MAX_MODEL_LEN:
                self.end(row)
                continue
            if start == len(self.tokens[row]):
                self.tokens[row].append(self.rng.randint(0, 2))
                self.batch.append([row], self.tokens[row][-1:])
            num_new = self.rng.choice((len(self.tokens[row]) - start, self.rng.randint(1, len(self.tokens[row]) - start)))
            if self.grow_row(row, num_new):
                chunks.append((row, start, start + num_new))
        return chunks

    def grow_row(self, row: int, num_new: int) -> bool:
        try:
            is_grown = self.batch.grow([row], num_new).num_grown == 1
        except CopiesDueError:
            return False
        if not is_grown:
            self.end(row)
        return is_grown

    def end(self, row: int) -> None:
        self.batch.release([row])
        del self.tokens[row]

    def release(self) -> None:
        for row in self.rng.sample(list(self.tokens), min(1, len(self.tokens))):
            self.end(row)

    def swap(self) -> None:
        first, second = self.rng.sample(range(NUM_ROWS), 2)
        self.batch.swap_row(first, second)
        moved = {second: first, first: second}
        self.tokens = {moved.get(row, row): tokens for row, tokens in self.tokens.items()}

    def fork(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.tokens]
        for row in self.running()[:1] if free else ():
            try:
                self.batch.fork(row, free[:1])
                self.tokens[free[0]] = list(self.tokens[row])
            except OutOfPagesError:
                self.counts["forks that did not fit"] += 1

    def trim(self) -> None:
        for row in self.rng.sample(self.running(), min(1, len(self.running()))):
            num_tokens = self.rng.randint(1, len(self.tokens[row]))
            try:
                self.batch.trim([row], num_tokens)
                del self.tokens[row][num_tokens:]
            except (ArgumentError, CopiesDueError):
                self.counts["cuts refused"] += 1

    # Tokens from elsewhere. Pages that are taken for them are written only once all that is due was moved.

    def receive(self) -> None:
        for row in [row for row in self.tokens if self.is_pending(row) and self.rng.random() < 0.6]:
            num_external, start = int(self.batch.num_external_tokens[row]), int(self.batch.num_computed_tokens[row])
            num_came = self.rng.choice((num_external, self.rng.randint(0, num_external)))
            self.spoil(row, start, start + num_external)
            self.write(row, start, start + num_came, start + num_came)
            self.counts["tokens that came"] += num_came
            if num_came == num_external or (STATE not in self.specs and self.rng.random() < 0.5):
                self.batch.commit_external(row, num_came)
            else:
                num_computed = self.batch.fail_external(row, num_came)
                assert num_computed == (0 if STATE in self.specs else start + num_came)
                self.counts["failures"] += 1

    def spoil(self, row: int, start: int, stop: int) -> None:
        """Write garbage where tokens ``[start, stop)`` were to come."""
        for spec, ids in zip(self.specs, self.batch.get_page_ids(row), strict=True):
            for place in range(start, stop):
                page, slot = (ids[0], 0) if spec is STATE else (ids[place // PAGE_SIZE], place % PAGE_SIZE)
                self.device[page][slot] = (-1,)

    # Leases.

    def lease(self) -> None:
        """Lease the pages of a row, but no working page of a state."""
        for row in self.running()[:1]:
            groups = zip(self.specs, self.batch.get_page_ids(row), strict=True)
            places = [(i, page) for spec, ids in groups if spec is not STATE for i, page in enumerate(ids) if page]
            num_computed = int(self.batch.num_computed_tokens[row])
            computed = [{s: v for s, v in self.device[page].items() if i * PAGE_SIZE + s < num_computed} for i, page in places]
            self.leases.append((self.manager.lease([page for _, page in places]), computed))
            if self.rng.random() < 0.7:
                self.end(row)

    def end_lease(self) -> None:
        """What a lease has found in computed slots is there still; the row may have gone on behind."""
        for lease, contents in self.leases[:1]:
            for page, known in zip(lease.page_ids, contents, strict=True):
                assert known.items() <= self.device[page].items(), (page, known, self.device[page])
            lease.release()
            self.leases.pop(0)
            self.counts["leases"] += 1

    def drain(self) -> None:
        for row in list(self.tokens):
            self.end(row)
        while self.leases:
            self.end_lease()
        while self.in_flight:
            self.move_pages()
        self.manager.check()
        assert self.manager.reset_prefix_cache() or self.manager.host_tier is not None


def run(seeds: range, num_steps: int) -> Counter[str]:
    """Run the simulation of each seed, and return what happened."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += Simulation(seed).run(num_steps)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return counts

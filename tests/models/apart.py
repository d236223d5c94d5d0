"""Two engines, one for prompts and one for answers, whose devices remember what was computed into each slot.

`Side` has a manager and a batch, and arrays of NumPy as its device: a digest of all tokens up to a position, for each slot of
attention, and of all tokens for a state. `FaultyLink` is a link in the process that delays, loses, ends and spoils pulls.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from managing import grouped

from pagepool import CacheGroupSpec, CacheManager, MambaSpec, MultiGroupPageTable, RunningBatch
from pagepool.errors import PeerError
from pagepool.group_rules import kind_of, window_of
from pagepool.peers import PrefillServer, Pulled

PRIME = (1 << 61) - 1
NUM_ROWS = 4
NAMESPACE, SECRET = "apart", b"sixteen bytes or more"

Array = npt.NDArray[np.int64]


def digest_all(token_ids: Sequence[int]) -> list[int]:
    """Return the digest of the tokens up to each position."""
    digests, digest = [], 0
    for token_id in token_ids:
        digest = (digest * 1_000_003 + token_id + 1) % PRIME
        digests.append(digest)
    return digests


class Side:
    """An engine with one step at a time."""

    def __init__(self, specs: Sequence[Any], num_pages: int = 64, max_model_len: int = 128, **options: Any) -> None:
        names = self.names = ["states" if isinstance(spec, MambaSpec) else "kv" for spec in specs]
        pools = {name: {"kv": num_pages, "states": 24}[name] for name in dict.fromkeys(names)}
        groups = [CacheGroupSpec(spec, pool=name) for spec, name in zip(specs, names, strict=True)]
        self.manager = CacheManager(pools, groups, max_model_len, **grouped(**options))
        self.specs, self.kinds = list(specs), [kind_of(spec) for spec in specs]
        sizes = [1 if kind == "Mamba" else spec.page_size for spec, kind in zip(specs, self.kinds, strict=True)]
        self.sizes = sizes
        table = MultiGroupPageTable(NUM_ROWS, max_model_len, 1024, [spec.page_size for spec in specs])
        self.batch = RunningBatch(self.manager, table)
        nums = [24 if kind == "Mamba" else num_pages for kind in self.kinds]
        self.device: list[Array] = [np.zeros(shape, np.int64) for shape in zip(nums, sizes, strict=True)]

    def move(self) -> Any:
        """Copy the pages that are due, and return the writes of states."""
        moves = self.batch.take_moves()
        for group, pages in enumerate(self.device):
            due = moves.copies.group == group
            pages[moves.copies.dst[due]] = pages[moves.copies.src[due]]
        if moves.number:
            self.manager.complete(moves.number)
        return moves.writes

    def compute(self, row: int, token_ids: Sequence[int], start: int, writes: Any) -> None:
        """Compute the planned tokens of a row from `start` on. All that these read must be right."""
        self.require_right(row, token_ids, start)
        stop, digests = int(self.batch.num_computed_tokens[row]), digest_all(token_ids)
        page_ids = self.batch.get_page_ids(row)
        for group, kind in enumerate(self.kinds):
            for position in range(start, stop):
                if kind == "Mamba":
                    is_written = (writes.rows == row) & (writes.num_tokens == position + 1)
                    self.device[group][writes.page_ids[is_written], 0] = digests[position]
                    self.device[group][page_ids[group][0], 0] = digests[position]
                else:
                    at, offset = divmod(position, self.sizes[group])
                    self.device[group][page_ids[group][at], offset] = digests[position]

    def require_right(self, row: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """Raise unless the pages of a row have all that the token behind the first `num_tokens` reads."""
        digests, page_ids = digest_all(token_ids), self.batch.get_page_ids(row)
        for group, (kind, spec) in enumerate(zip(self.kinds, self.specs, strict=True)):
            window, first = window_of(spec), 0
            if kind == "Mamba":
                first = max(0, num_tokens - 1)
            elif kind == "ChunkedLocalAttention":
                first = num_tokens // window * window
            elif window:
                first = max(0, num_tokens + 1 - window)
            for position in range(first, num_tokens):
                at, offset = (0, 0) if kind == "Mamba" else divmod(position, self.sizes[group])
                page_id = page_ids[group][at]
                assert page_id != 0, (kind, position, num_tokens)
                found = self.device[group][page_id, offset]
                assert found == digests[position], f"{kind}: token {position} of {num_tokens} was read, and is wrong"

    def answer(self, row: int, token_ids: list[int]) -> None:
        """Compute the last token of a prompt and an answer behind it, token by token; `token_ids` has both."""
        for num_tokens in range(int(self.batch.num_tokens[row]) + 1, len(token_ids) + 1):
            self.run_to(row, token_ids, 1)
            self.batch.append([row], token_ids[num_tokens - 1 : num_tokens])

    def run_to(self, row: int, token_ids: Sequence[int], most: int) -> None:
        """Compute up to `most` further tokens of a row, in one step."""
        start = int(self.batch.num_computed_tokens[row])
        num_tokens = min(most, int(self.batch.num_tokens[row]) - start)
        step = self.batch.plan([row], num_tokens)
        assert step.num_grown == 1
        self.compute(row, token_ids, start, self.move())
        self.batch.settle(step)

    def gather(self, page_ids: Sequence[Sequence[int]]) -> list[Array]:
        """Return copies of pages, by group."""
        return [pages[ids] for pages, ids in zip(self.device, page_ids, strict=True)]

    def scatter(self, row: int, places: Sequence[range], parts: Sequence[Array], writes: Any) -> None:
        """Write pages to places of a row, and a state to its checkpoint too, if the moves of its admission named one."""
        page_ids = self.batch.get_page_ids(row)
        for group, (ids, chosen, part) in enumerate(zip(page_ids, places, parts, strict=True)):
            if len(chosen):
                self.device[group][[ids[place] for place in chosen]] = part
            if len(chosen) and self.kinds[group] == "Mamba":
                self.device[group][writes.page_ids[writes.rows == row]] = part

    def make_parts(self, nums_pages: list[int]) -> list[Array]:
        """Return memory for numbers of pages, by group."""
        return [np.full((num, size), -1, np.int64) for num, size in zip(nums_pages, self.sizes, strict=True)]


class PromptRows:
    """The rows of a side that computes prompts for others, in chunks of `chunk` tokens. With `seconds` pages are leased."""

    def __init__(self, side: Side, server: PrefillServer, chunk: int, seconds: float | None = None) -> None:
        self.side, self.server, self.chunk, self.seconds = side, server, chunk, seconds
        self.running: dict[int, Any] = {}  # prompts by row
        self.waiting: list[Any] = []

    def step(self) -> None:
        """Admit prompts, compute a chunk of each, and offer it."""
        side, server, batch = self.side, self.server, self.side.batch
        self.waiting += server.take()
        for row in range(NUM_ROWS):
            if row in self.running:
                side.run_to(row, self.running[row].token_ids.tolist(), self.chunk)
            elif self.waiting:
                prompt = self.running[row] = self.waiting.pop(0)
                token_ids = prompt.token_ids.tolist()
                num_hits = batch.admit(row, token_ids, max_num_new_tokens=self.chunk, traits=prompt.traits)
                assert num_hits is not None
                side.compute(row, token_ids, num_hits, side.move())
            else:
                continue
            self.offer(row, self.running[row])
        server.poll()

    def offer(self, row: int, prompt: Any) -> None:
        """Offer what a row has computed, and release the row at the prompt's end."""
        side, server, batch = self.side, self.server, self.side.batch
        num_tokens = int(batch.num_computed_tokens[row])
        pages = server.list_pages(prompt, batch.get_page_ids(row), num_tokens)
        if any(pages):
            names = side.names if self.seconds else []
            pools = side.manager.pools
            leases = [pools[name].lease(ids, seconds=self.seconds) for name, ids in zip(names, pages, strict=False) if ids]
            server.offer(prompt, num_tokens, side.gather(pages), leases=leases)
        if num_tokens == len(prompt.token_ids) or not server.is_wanted(prompt):
            batch.release([row])
            del self.running[row]


class Network:
    """The offers of all links, by address and number."""

    def __init__(self, rng: Random, fault_rate: float) -> None:
        self.rng, self.fault_rate = rng, fault_rate
        self.offers: dict[tuple[str, int], Sequence[Array]] = {}
        self.num_bytes = 0
        self.num_links = 0


class FaultyLink:
    """A link in the process. With its network's rate of faults a pull fails at once or late, or ends after others."""

    def __init__(self, network: Network) -> None:
        self._network = network
        network.num_links += 1
        self._address = f"link {network.num_links}"
        self._jobs: list[tuple[int, str, int, Sequence[Array], int]] = []  # the last is how often it is still asked for
        self._num_jobs = 0

    @property
    def address(self) -> str:
        """The name in the network."""
        return self._address

    def offer(self, number: int, parts: Sequence[Any], *, seconds: float) -> None:
        """Copy nothing: what is written to the parts before they are pulled is seen."""
        assert seconds > 0
        assert (self._address, number) not in self._network.offers
        self._network.offers[self._address, number] = parts

    def withdraw(self, number: int) -> None:
        """End an offer."""
        self._network.offers.pop((self._address, number), None)

    def pull(self, address: str, number: int, parts: Sequence[Any]) -> int:
        """Start a job."""
        self._num_jobs += 1
        delay = self._network.rng.choice((0, 0, 1, 5)) if self._network.fault_rate else 0
        self._jobs.append((self._num_jobs, address, number, parts, delay))
        return self._num_jobs

    def poll(self) -> list[Pulled]:
        """End the jobs that are not delayed any more, in any order."""
        network, pulled = self._network, []
        due = [job for job in self._jobs if not job[4]]
        self._jobs = [(*job[:4], job[4] - 1) for job in self._jobs if job[4]]
        for job, address, number, parts, _ in network.rng.sample(due, len(due)):
            offered = network.offers.get((address, number))
            sizes = [part.shape for part in parts]
            if network.rng.random() < network.fault_rate or offered is None or [part.shape for part in offered] != sizes:
                pulled.append(Pulled(job, None, PeerError(f"{address}: lost, gone, or of other lengths")))
                continue
            for part, own in zip(parts, offered, strict=True):
                part[:] = own
                network.num_bytes += own.nbytes
            pulled.append(Pulled(job, parts, None))
        return pulled

    def close(self) -> None:
        """End all jobs."""
        self._jobs.clear()

"""Schedulers that cache late: nano-vllm's own, and one over pages in plain Python or over `CacheManager`.

nano-vllm prefills before it decodes, takes the pages of a whole prompt for its first chunk, names full pages once their step is
done, and preempts the newest. The scheduler here decides as it does. nano-vllm's own is a rival if `NANO_VLLM` names the folder
of its sources, or if it is installed. It needs xxhash, and none of its other packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bench.workload import WAITING, make_group
from pagepool import CacheManager, EngineRequestStatus, specs

try:
    from xxhash import xxh64_intdigest
except ImportError:  # a keyed hash that is no slower
    xxh64_intdigest = hash

RUNNING, PREEMPTED = EngineRequestStatus.RUNNING, EngineRequestStatus.PREEMPTED


class Settings(NamedTuple):
    """Pages of an engine, and the limits of its steps."""

    page_size: int
    num_pages: int
    max_num_reqs: int = 512
    max_num_new_tokens: int = 16_384


class Sequence:
    """A request of the engine, with the attributes that a manager reads."""

    sampling_params = None
    mm_features: tuple[()] = ()
    has_vision = False

    def __init__(self, request_id: str, token_ids: list[int], num_output_tokens: int) -> None:
        self.request_id = request_id
        self.all_token_ids = token_ids.copy()
        self.num_tokens = len(token_ids)
        self.num_final_tokens = self.num_tokens + num_output_tokens
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.is_admitted = False
        self.status: int = WAITING

    def append(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.num_tokens += 1


class PlainPages:
    """Pages in plain Python, with the calls of a manager: a deque of free ones, a dict of those with a name, and the tokens of
    each to tell equal names apart.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_holders = [0] * num_pages
        self.names: list[int | None] = [None] * num_pages
        self.contents: list[list[int]] = [[] for _ in range(num_pages)]
        self.named: dict[int, int] = {}
        self.free_pages = deque(range(num_pages))
        self.held: dict[str, list[int]] = {}

    def name_of(self, parent: int | None, tokens: list[int]) -> int:
        """Return the name of a page behind its parent."""
        content = np.array(tokens).tobytes()
        return xxh64_intdigest(content if parent is None else parent.to_bytes(8, "little", signed=parent < 0) + content)

    def get_computed_pages(self, sequence: Sequence) -> tuple[list[int], int]:
        size, found, name = self.page_size, [], None
        for start in range(0, sequence.num_tokens - size, size):
            tokens = sequence.all_token_ids[start : start + size]
            name = self.name_of(name, tokens)
            page = self.named.get(name)
            if page is None or self.contents[page] != tokens:
                break
            found.append(page)
        return found, len(found) * size

    def allocate_slots(
        self,
        sequence: Sequence,
        num_new: int,
        num_hit_tokens: int = 0,
        hits: list[int] | None = None,
        num_ahead: int = 0,
        is_delayed: bool = True,
    ) -> list[int] | None:
        pages = self.held.get(sequence.request_id, hits or [])
        num_slots = sequence.num_computed_tokens + num_hit_tokens + num_new + num_ahead
        num_missing = (num_slots + self.page_size - 1) // self.page_size - len(pages)
        if num_missing <= 0 and not hits:
            return pages
        free_hits = [page for page in hits or () if not self.num_holders[page]]
        if num_missing + len(free_hits) > len(self.free_pages):
            return None
        for page in free_hits:
            self.free_pages.remove(page)
        for page in hits or ():
            self.num_holders[page] += 1
        for _ in range(num_missing):
            pages.append(self.take())
        self.held[sequence.request_id] = pages
        return pages

    def take(self) -> int:
        page = self.free_pages.popleft()
        name = self.names[page]
        if name is not None and self.named.get(name) == page:
            del self.named[name]
        self.names[page], self.num_holders[page] = None, 1
        return page

    def cache_pages(self, sequence: Sequence, num_computed_tokens: int) -> None:
        first, stop = sequence.num_computed_tokens // self.page_size, num_computed_tokens // self.page_size
        if first == stop:
            return
        pages = self.held[sequence.request_id]
        name = self.names[pages[first - 1]] if first else None
        for i in range(first, stop):
            tokens = sequence.all_token_ids[i * self.page_size : (i + 1) * self.page_size]
            self.names[pages[i]] = name = self.name_of(name, tokens)
            self.contents[pages[i]], self.named[name] = tokens, pages[i]

    def free(self, sequence: Sequence) -> None:
        for page in reversed(self.held.pop(sequence.request_id)):
            self.num_holders[page] -= 1
            if not self.num_holders[page]:
                self.free_pages.append(page)

    def free_page_hashes(self, sequence: Sequence) -> None:
        pass


class Scheduler:
    """The scheduler over any pages. With "plain" and "cache_pages" it caches those of each step before it counts the step's
    tokens; with "computed", after that, only those of prompts, so that the prompts of the next step hit them; with "scheduled"
    none, since the manager has.
    """

    def __init__(self, settings: Settings, pages: Any, way: str) -> None:
        self.settings, self.pages = settings, pages
        self.caches_each_step, self.caches_prompts = way in ("plain", "cache_pages"), way == "computed"
        self.num_preempted = 0
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def schedule(self) -> tuple[list[Sequence], bool]:
        """Return the sequences of the next step, and whether it computes prompts."""
        scheduled: list[Sequence] = []
        num_left = self.settings.max_num_new_tokens
        while self.waiting and num_left and len(scheduled) < self.settings.max_num_reqs:
            sequence = self.waiting[0]
            hits, num_hit_tokens = None, 0
            if not sequence.is_admitted:
                hits, num_hit_tokens = self.pages.get_computed_pages(sequence)
            num_new = sequence.num_tokens - sequence.num_computed_tokens - num_hit_tokens
            num_ahead = max(0, num_new - num_left)
            if num_ahead and scheduled:
                break
            num_new -= num_ahead
            added = self.pages.allocate_slots(sequence, num_new, num_hit_tokens, hits, num_ahead, self.caches_each_step)
            if added is None:
                break
            sequence.is_admitted = True
            sequence.num_computed_tokens += num_hit_tokens
            sequence.num_scheduled_tokens = num_new
            num_left -= num_new
            scheduled.append(sequence)
            if not num_ahead:
                sequence.status = RUNNING
                self.running.append(self.waiting.popleft())
        if scheduled:
            return scheduled, True
        allocate_slots, is_delayed = self.pages.allocate_slots, self.caches_each_step
        while self.running and len(scheduled) < self.settings.max_num_reqs:
            sequence = self.running.popleft()
            while allocate_slots(sequence, 1, 0, None, 0, is_delayed) is None:
                if not self.running:
                    self.preempt(sequence)
                    break
                self.preempt(self.running.pop())
            else:
                sequence.num_scheduled_tokens = 1
                scheduled.append(sequence)
        self.running.extendleft(reversed(scheduled))
        return scheduled, False

    def preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self.pages.free(sequence)
        sequence.status, sequence.is_admitted, sequence.num_computed_tokens = PREEMPTED, False, 0
        self.waiting.appendleft(sequence)

    def end_step(self, scheduled: list[Sequence], token_ids: Iterable[int], is_prefill: bool) -> None:
        """Count the tokens of a step that has run, and append the sampled ones."""
        cache_pages, caches_each_step = self.pages.cache_pages, self.caches_each_step
        for sequence, token_id in zip(scheduled, token_ids, strict=False):
            if caches_each_step:
                cache_pages(sequence, sequence.num_computed_tokens + sequence.num_scheduled_tokens)
            sequence.num_computed_tokens += sequence.num_scheduled_tokens
            sequence.num_scheduled_tokens = 0
            if is_prefill:
                if self.caches_prompts:
                    cache_pages(sequence, sequence.num_computed_tokens)
                if sequence.num_computed_tokens < sequence.num_tokens:
                    continue
            sequence.append(token_id)
            if sequence.num_tokens == sequence.num_final_tokens:
                self.pages.free(sequence)
                self.pages.free_page_hashes(sequence)
                self.running.remove(sequence)


class Late:
    """A scheduler of the name of a contender, which serves all prompts in each round."""

    def __init__(self, name: str, settings: Settings, prompts: list[tuple[list[int], int]]) -> None:
        self.name, self.settings, self.prompts = name, settings, prompts
        self.scheduler: Scheduler | None = None
        self.num_computed_tokens = 0

    def prepare(self) -> None:
        page_size, num_pages = self.settings[:2]
        caches = "computed" if self.name == "computed" else "scheduled"
        pages: Any
        if self.name == "plain":
            pages = PlainPages(num_pages, page_size)
        else:
            pages = CacheManager(num_pages + 1, [make_group(specs, page_size)], 1 << 20, caches=caches)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.settings, pages, self.name)
        self.sequences = [Sequence(f"{i}", *prompt) for i, prompt in enumerate(self.prompts)]
        self.scheduler.waiting.extend(self.sequences)

    def run(self) -> None:
        scheduler, self.num_computed_tokens = self.scheduler, 0
        assert scheduler is not None
        while scheduler.waiting or scheduler.running:
            scheduled, is_prefill = scheduler.schedule()
            if is_prefill:
                self.num_computed_tokens += sum([sequence.num_scheduled_tokens for sequence in scheduled])
            scheduler.end_step(scheduled, [7] * len(scheduled), is_prefill)

    @property
    def num_preempted(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.num_preempted

    @property
    def page_ids(self) -> list[int]:
        """The length of each answer, in place of pages: contenders may hit others of equal ones."""
        return [sequence.num_tokens for sequence in self.sequences]


class Nano(Late):
    """nano-vllm's own scheduler."""

    def prepare(self) -> None:
        scheduling, sequences, parameters = find_nano_vllm()
        page_size, num_pages, max_num_reqs, max_num_new_tokens = self.settings
        sequences.Sequence.block_size = page_size
        config = SimpleNamespace(
            max_num_seqs=max_num_reqs,
            max_num_batched_tokens=max_num_new_tokens,
            eos=-1,
            kvcache_block_size=page_size,
            num_kvcache_blocks=num_pages,
        )
        self.nano = scheduling.Scheduler(config)
        self.sequences = []
        for token_ids, num_output_tokens in self.prompts:
            params = parameters.SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
            self.sequences.append(sequences.Sequence(token_ids, params))
            self.nano.add(self.sequences[-1])

    def run(self) -> None:
        scheduler, self.num_computed_tokens = self.nano, 0
        while not scheduler.is_finished():
            scheduled, is_prefill = scheduler.schedule()
            if is_prefill:
                self.num_computed_tokens += sum([sequence.num_scheduled_tokens for sequence in scheduled])
            scheduler.postprocess(scheduled, [7] * len(scheduled), is_prefill)


def find_nano_vllm() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Import nano-vllm's scheduler, sequences and sampling parameters, without its model. Raise ImportError without them."""
    if "nanovllm" not in sys.modules:
        folder = os.environ.get("NANO_VLLM")
        spec = importlib.util.find_spec("nanovllm") if folder is None else None
        places = list(spec.submodule_search_locations or ()) if spec else [str(Path(folder) / "nanovllm")] if folder else []
        if not places:
            raise ImportError("NANO_VLLM is not set, and nano-vllm is not installed")
        package, config = ModuleType("nanovllm"), ModuleType("nanovllm.config")
        package.__path__ = places
        config.Config = SimpleNamespace  # type: ignore[attr-defined]  # its own reads a model's files
        sys.modules |= {"nanovllm": package, "nanovllm.config": config}
    names = "engine.scheduler", "engine.sequence", "sampling_params"
    scheduling, sequences, parameters = (importlib.import_module(f"nanovllm.{name}") for name in names)
    return scheduling, sequences, parameters


def has_nano_vllm() -> bool:
    with suppress(ImportError):
        return bool(find_nano_vllm())
    return False

"""A common interface to the rivals: pagepool, the oracle of the tests, and easydel and vllm where they are installed.

One full-attention group with pages of 16 tokens, prefix caching on. All calls return page ids as lists of Python ints, as an
engine writes them into its page table, unless a name says array. vllm hashes the pages of a request when it is made and when
tokens are appended, the others in the manager, so both belong to the work that is timed.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from oracle import OracleManager, OraclePool

import pagepool
from bench.workload import BenchRequest, make_group
from pagepool.compat.easydel.names import RequestPageHashes

MAX_MODEL_LEN = 1 << 20


class Rival:
    """A package with the engines' API: managers, pools, pages and hashes as objects."""

    def __init__(self, name: str, managers: ModuleType, pools: ModuleType, specs: ModuleType) -> None:
        self.name = name
        self._managers, self._pools, self._specs = managers, pools, specs

    def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
        return self._managers.CacheManager(num_pages, [make_group(self._specs)], max_model_len)

    def make_pool(self, num_pages: int) -> Any:
        return self._pools.PagePool(num_pages, enable_caching=True)

    def get_pool(self, manager: Any) -> Any:
        return manager.page_pool

    def make_request(self, name: str, tokens: list[int]) -> Any:
        """Make a request, which keeps the list of its tokens."""
        return BenchRequest(name, tokens)

    def copy_into_request(self, name: str, tokens: list[int]) -> Any:
        """Make a request of the package's own class, which copies the tokens."""
        return pagepool.EngineRequest(name, tokens)

    def find_prefix(self, manager: Any, request: Any) -> tuple[Any, int]:
        """Return the cached pages of a request, in the form that `allocate_slots` takes, and the number of their tokens."""
        return manager.get_computed_pages(request)

    def get_row(self, manager: Any, request: Any) -> list[int]:
        """Return the ids of all pages of a request."""
        return manager.get_page_ids(request.request_id)[0]

    def release(self, manager: Any, request: Any) -> None:
        """Free the pages of a request that has ended, and forget it."""
        manager.free(request)
        manager.free_page_hashes(request)

    def read_ids(self, pages: Any) -> tuple[list[int], ...]:
        """Return the ids in a result of `allocate_slots` or `get_computed_pages`."""
        return pages.get_page_ids()

    def take_and_give_back(self, pool: Any, num_pages: int, **hint: int) -> list[int]:
        """Take pages, read their ids, and free them tail first."""
        pages = pool.get_new_pages(num_pages, **hint)
        page_ids = [page.page_id for page in pages]
        pool.free_pages(reversed(pages))
        return page_ids

    def get_pages(self, pool: Any, page_ids: Sequence[int]) -> Sequence[Any]:
        """Return pages in the form that `remove_and_append` takes."""
        return [pool.pages[page_id] for page_id in page_ids]

    def remove_and_append(self, pool: Any, pages: Sequence[Any]) -> None:
        """Remove each page from its place in the free queue, and append it."""
        queue = pool.free_page_queue
        for page in pages:
            queue.remove(page)
            queue.append(page)

    def get_hashes(self, manager: Any, request: Any) -> Sequence[Any]:
        """Return the hashes of a request after its look-up."""
        return RequestPageHashes(manager.registry)[request.request_id]

    def look_up(self, pool: Any, hashes: Sequence[Any]) -> list[int]:
        """Find the page of each hash, one call per page."""
        return [pool.get_cached_page(page_hash, [0])[0].page_id for page_hash in hashes]


class ArrayRival(Rival):
    """Pagepool's calls with page ids in int32 arrays instead of page objects."""

    def take_and_give_back(self, pool: Any, num_pages: int, **hint: int) -> Any:
        page_ids = pool.get_new_page_ids(num_pages, **hint)
        pool.free_page_ids(page_ids[::-1])
        return page_ids


class EasydelRival(Rival):
    """EasyDeL's manager, and its engine's requests."""

    def __init__(self, managers: ModuleType, pools: ModuleType, specs: ModuleType, requests: ModuleType) -> None:
        super().__init__("easydel", managers, pools, specs)
        self._requests = requests

    def copy_into_request(self, name: str, tokens: list[int]) -> Any:
        return self._requests.EngineRequest(name, tokens, sampling_params=None, eos_token_id=None)

    def get_hashes(self, manager: Any, request: Any) -> Sequence[Any]:
        return manager.req_to_page_hashes[request.request_id]


class OracleRival(Rival):
    """The pure-Python twin: pages are ints."""

    def __init__(self) -> None:
        self.name = "oracle"

    def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> OracleManager:
        return OracleManager(num_pages, [make_group(pagepool)], max_model_len)

    def make_pool(self, num_pages: int) -> OraclePool:
        return OraclePool(num_pages, enable_caching=True)

    def copy_into_request(self, name: str, tokens: list[int]) -> BenchRequest:
        return BenchRequest(name, tokens.copy())

    def read_ids(self, pages: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return pages

    def take_and_give_back(self, pool: OraclePool, num_pages: int, **hint: int) -> list[int]:
        page_ids = pool.get_new_pages(num_pages, **hint)
        pool.free_pages(page_ids[::-1])
        return page_ids

    def get_pages(self, pool: OraclePool, page_ids: Sequence[int]) -> Sequence[int]:
        return page_ids

    def remove_and_append(self, pool: OraclePool, pages: Sequence[int]) -> None:
        queue = pool.free_queue
        for page_id in pages:
            del queue[page_id]
            queue[page_id] = None

    def get_hashes(self, manager: OracleManager, request: Any) -> Sequence[int]:
        return manager.keys.chain(request)

    def look_up(self, pool: OraclePool, hashes: Sequence[int]) -> list[int]:
        return [pool.get_cached_page(key, [0])[0] for key in hashes]


class VllmRival(Rival):
    """vLLM's v1 manager and requests, made by `vllm_engine` of the tests. `hash_algo` is one of vLLM's names.

    Every new hasher changes the parent of first pages, which all hashers share: make no rival while others hold prompts.
    """

    def __init__(self, engine: ModuleType, name: str = "vllm", hash_algo: str = "sha256") -> None:
        self.name = name
        self._engine = engine
        self._hasher, self._sampling = engine.make_hasher(hash_algo), engine.make_sampling(MAX_MODEL_LEN)

    def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
        return self._engine.make_manager(num_pages, max_model_len)

    def make_pool(self, num_pages: int) -> Any:
        return self.get_pool(self.make_manager(num_pages))

    def get_pool(self, manager: Any) -> Any:
        return manager.block_pool

    def make_request(self, name: str, tokens: list[int]) -> Any:
        return self._engine.make_request(name, tokens, self._hasher, self._sampling)

    def find_prefix(self, manager: Any, request: Any) -> tuple[Any, int]:
        return manager.get_computed_blocks(request)[:2]

    def get_row(self, manager: Any, request: Any) -> list[int]:
        return manager.get_block_ids(request.request_id)[0]

    def release(self, manager: Any, request: Any) -> None:
        manager.free(request)

    def read_ids(self, pages: Any) -> tuple[list[int], ...]:
        return pages.get_block_ids()

    def take_and_give_back(self, pool: Any, num_pages: int, **hint: int) -> list[int]:
        blocks = pool.get_new_blocks(num_pages)
        block_ids = [block.block_id for block in blocks]
        pool.free_blocks(reversed(blocks))
        return block_ids

    def get_pages(self, pool: Any, page_ids: Sequence[int]) -> Sequence[Any]:
        return [pool.blocks[page_id] for page_id in page_ids]

    def remove_and_append(self, pool: Any, pages: Sequence[Any]) -> None:
        queue = pool.free_block_queue
        for block in pages:
            queue.remove(block)
            queue.append(block)

    def get_hashes(self, manager: Any, request: Any) -> Sequence[Any]:
        return request.block_hashes

    def look_up(self, pool: Any, hashes: Sequence[Any]) -> list[int]:
        return [pool.get_cached_block(block_hash, [0])[0].block_id for block_hash in hashes]


def find_easydel() -> list[Rival]:
    """Return easydel's manager as a rival, or an empty list if it is not installed."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # pages are managed on the host, without an accelerator
    engine = "easydel.inference.esurge"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = "core.manager", "core.page_pool", "core.interface", "request"
            return [EasydelRival(*(importlib.import_module(f"{engine}.{name}") for name in names))]
    except ImportError:
        return []


def import_vllm() -> ModuleType | None:
    """Return what builds vllm's managers and requests, or None if vllm is not installed."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # vllm warns that there is no accelerator
    try:
        return importlib.import_module("vllm_engine")
    except ImportError:
        return None
    finally:
        logging.disable(disabled)


PAGEPOOL = Rival("pagepool", pagepool, pagepool, pagepool)
PAGEPOOL_ARRAYS = ArrayRival("pagepool", pagepool, pagepool, pagepool)
VLLM = import_vllm()
OTHERS = [OracleRival(), *find_easydel(), *([VllmRival(VLLM)] if VLLM else [])]
RIVALS = [PAGEPOOL, *OTHERS]

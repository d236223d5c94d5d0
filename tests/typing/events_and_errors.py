"""Events for a router, statistics for Prometheus, and errors."""

from typing import assert_never, assert_type

from pagepool import CacheManager, PagePool, errors
from pagepool.compat import easydel, vllm
from pagepool.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from pagepool.events.publisher import EventPublisher
from pagepool.page_copies import copy_pages
from pagepool.replay import Recorder, Scheduler, generate_chats
from pagepool.stats.prometheus import CacheCollector


def publish(manager: CacheManager) -> bytes:
    manager.enable_events()
    with EventPublisher(manager, "tcp://127.0.0.1:0", topic="kv-events") as publisher:
        publisher.publish(manager.take_events())
        publisher.flush()
        assert_type(publisher.endpoint, str)
    return bytes(encode_batch(EventBatch(ts=0.0, events=manager.take_events())))


def count(events: list[Event]) -> int:
    total = 0
    for event in events:
        match event:
            case BlockStored():
                total += len(event.block_hashes) * event.block_size
            case BlockRemoved(block_hashes=hashes):
                total -= len(hashes)
            case AllBlocksCleared():
                return 0
            case _:
                pass
    return total


def free(pool: PagePool, page_ids: list[int]) -> str | None:
    try:
        pool.free_page_ids(page_ids)
    except errors.DoubleFreeError as error:
        assert_type(error, errors.DoubleFreeError)
        builtin: RuntimeError = error
        return str(builtin)
    except errors.PagePoolError:
        raise
    return None


def name(error: errors.ArgumentError | errors.ArgumentTypeError) -> str:
    match error:
        case ValueError():
            return "value"
        case TypeError():
            return "type"
        case _:
            assert_never(error)


def adapt() -> bool:
    easydel.install()
    with vllm.installed():
        assert_type(vllm.report().replaced, tuple[tuple[str, str], ...])
    return easydel.is_installed()


def simulate(manager: CacheManager, path: str) -> float:
    figures = Scheduler(manager, generate_chats(num_requests=20, seed=1)).run()
    CacheCollector(manager)
    with Recorder(manager, path) as recorder:
        assert_type(recorder, Recorder)
    return figures.hit_rate


def copy(manager: CacheManager, arrays: dict[str, object]) -> object:
    return copy_pages(arrays, manager.take_moves().copies, page_axis=1)

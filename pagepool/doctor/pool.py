"""What stands out in a dump of a manager, each with a remedy: `pagepool doctor --pool`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pagepool.doctor.environment import Problem
from pagepool.dump import MAX_BYTES, Dump, read_dump, to_plain
from pagepool.errors import ArgumentError, count_of
from pagepool.holders import HeldPages, PageHolder, count_pages, make_table, show_name

OLD_SECONDS = 600.0  # requests and rows that are younger are never old
OLD_ALONE_SECONDS = 3600.0  # without others to compare with
OLD_FACTOR = 10  # times the median age of the others
MIN_REQUESTS = 20  # with prompts long enough, before a hit rate of zero stands out
LOST_SHARE = 0.01  # a share of the prompt tokens
FAILED_SHARE = 0.1  # a share of the requests or pages
MAX_NAMED = 3  # holders in a sentence


def load_dump(path: str) -> Dump:
    """Return the dump in a file. Raise ArgumentError, with the name of the file, for files without one."""
    try:
        with Path(path).open("rb") as file:
            return read_dump(file.read(MAX_BYTES + 1))
    except OSError as error:
        fault = error.strerror or error
        raise ArgumentError(f"{path}: {fault}") from None
    except ArgumentError as fault:
        raise ArgumentError(f"{path}: {fault}") from None


def diagnose_pool(dump: Dump) -> dict[str, Any]:
    """Return the output of `pagepool doctor --pool FILE --json`: what the dump has, and what stands out in it."""
    return {**to_plain(dump), "problems": [problem._asdict() for problem in find_problems(dump)]}


def describe_pool(dump: Dump) -> str:
    """Return a dump as lines of text: pools, look-ups, holders, and problems."""
    problems = [*find_problems(dump)]
    holders = dump.held.holders
    lines = [
        "\n".join(_describe_pools(dump)),
        make_table(holders, [*dump.held.num_pages_by_kind]),
        "\n".join(
            [f"{count_of(len(problems), 'problem')}:", *(f"- {what}\n  {remedy}" for what, remedy in problems)]
            if problems
            else ["Nothing stands out."]
        ),
    ]
    return "\n\n".join(lines)


def _describe_pools(dump: Dump) -> Iterator[str]:
    stats = dump.stats
    for name, pool in stats.pools.items():
        held = describe_kinds(dump.held.num_pages_by_kind.get(name, {}))
        yield (
            f"pool {show_name(name)}: {count_of(pool.num_pages, 'page')}, {pool.num_free_pages:,} free, "
            f"{pool.num_cached_pages:,} cached, {pool.num_held_pages:,} held{f' ({held})' if held else ''}; "
            f"{pool.num_evicted_pages:,} evicted"
        )
    queries = stats.queries
    yield (
        f"{count_of(queries.num_requests, 'request')}: {queries.num_hit_tokens:,} of "
        f"{count_of(queries.num_queried_tokens, 'prompt token')} hit ({queries.hit_rate:.1%})"
    )
    if stats.host_tier is not None:
        tier = stats.host_tier
        yield (
            f"host tier: {count_of(tier.num_pages, 'page')}, {tier.num_free_pages:,} free, {tier.num_cached_pages:,} cached; "
            f"{tier.num_saved_pages:,} saved, {tier.num_loaded_pages:,} loaded, {tier.num_evicted_pages:,} evicted"
        )


def describe_kinds(counts: Mapping[str, int]) -> str:
    """Return numbers of pages by kind of holder as a phrase."""
    return ", ".join(f"{show_name(kind)} {num:,}" for kind, num in counts.items())


def find_problems(dump: Dump) -> Iterator[Problem]:
    """Yield what stands out."""
    yield from _find_held(dump.held)
    yield from _find_short(dump)
    yield from _find_misses(dump)
    yield from _find_host(dump)


def find_old(holders: tuple[PageHolder, ...]) -> list[PageHolder]:
    """Return the requests and rows that are much older than the others, the oldest first. O(holders)."""
    running = [holder for holder in holders if holder.kind in ("request", "row") and holder.seconds is not None]
    ages = [holder.seconds or 0.0 for holder in running]
    least = max(OLD_SECONDS, OLD_FACTOR * median(ages)) if len(ages) > 2 else OLD_ALONE_SECONDS
    return sorted((each for each in running if (each.seconds or 0) > least), key=lambda each: -(each.seconds or 0))


def _name(holders: list[PageHolder]) -> str:
    named = [f"{show_name(each.name)} ({count_of(count_pages(each), 'page')}, {each.seconds or 0:,.0f} s)" for each in holders]
    return ", ".join(named[:MAX_NAMED]) + (f" and {len(named) - MAX_NAMED:,} more" if len(named) > MAX_NAMED else "")


def _find_held(held: HeldPages) -> Iterator[Problem]:
    old = find_old(held.holders)
    if old:
        yield Problem(
            f"held for much longer than by others: {_name(old)}",
            "if these requests have ended, the engine forgot to free them: manager.free(request) or batch.release(rows)",
        )
    num_own = sum(count_pages(each) for each in held.holders if each.kind == "caller")
    if num_own:
        yield Problem(
            f"the caller itself holds {count_of(num_own, 'page')}",
            "free what PagePool.get_new_pages and touch gave; release a batch's rows before it is dropped; another manager of "
            "the same pool has a dump of its own",
        )
    endless = [each for each in held.holders if each.kind == "lease" and each.seconds_left is None]
    if endless:
        yield Problem(
            f"{count_of(len(endless), 'lease')} without an end: {_name(endless)}",
            "release them once the transfer has ended, or lease with seconds=",
        )


def _find_short(dump: Dump) -> Iterator[Problem]:
    for name, pool in dump.stats.pools.items():
        shown = show_name(name)
        if pool.num_pages and not pool.num_free_pages:
            yield Problem(
                f"pool {shown} has no free page",
                "running requests are preempted or wait: more pages, or fewer requests at once; see who holds most",
            )
        num_requests, num_calls = dump.stats.queries.num_requests, count_of(pool.num_refusals, "call")
        if pool.num_refusals > FAILED_SHARE * max(1, num_requests):
            yield Problem(
                f"pool {shown} had too few pages for {num_calls}, with {count_of(num_requests, 'request')}",
                "more pages in this pool, or fewer requests at once",
            )
    new, preempted = dump.stats.queries.num_requests, dump.stats.preempted_queries.num_requests
    if preempted > FAILED_SHARE * max(1, new):
        yield Problem(
            f"{count_of(preempted, 'request')} came back after a preemption, {new:,} were new",
            "more pages, fewer requests at once, or admission with num_reserved_pages",
        )


def _find_misses(dump: Dump) -> Iterator[Problem]:
    stats = dump.stats
    if not dump.settings.enable_caching:
        yield Problem("prefix caching is off", "make the manager with enable_caching=True, and cache groups")
    elif stats.queries.num_requests >= MIN_REQUESTS and not stats.queries.num_hit_tokens:
        page_size = max((group.page_size for group in dump.settings.groups), default=0)
        yield Problem(
            f"no prompt of {count_of(stats.queries.num_requests, 'request')} hit a token",
            f"prompts share whole pages only ({page_size:,} tokens), and with one salt, adapter and first token alone: "
            "compare two prompts that should hit",
        )
    num_tokens = stats.queries.num_queried_tokens + stats.preempted_queries.num_queried_tokens
    for name, pool in stats.pools.items():
        if pool.num_lost_hit_tokens > LOST_SHARE * max(1, num_tokens):
            lost = count_of(pool.num_lost_hit_tokens, "token")
            yield Problem(
                f"pool {show_name(name)} lost hits of {lost}, of {num_tokens:,} looked up",
                "give it more of the memory: pagepool plan --arrays apart",
            )


def _find_host(dump: Dump) -> Iterator[Problem]:
    tier, store = dump.stats.host_tier, dump.stats.store
    if tier is not None:
        if tier.num_pages < dump.stats.num_pages:
            yield Problem(
                f"the host tier has {count_of(tier.num_pages, 'page')}, fewer than the {dump.stats.num_pages:,} of the pool",
                "a tier pays if it is larger than the pool, best several times: pagepool plan --host-pages",
            )
        if tier.num_refused_pages > FAILED_SHARE * max(1, tier.num_saved_pages):
            refused = count_of(tier.num_refused_pages, "page")
            yield Problem(
                f"{refused} found no room in the host tier, {tier.num_saved_pages:,} were saved",
                "end transfers sooner (complete), or give the tier more pages",
            )
        if tier.num_failed_pages:
            yield Problem(f"{count_of(tier.num_failed_pages, 'transfer')} of the host tier failed", "look at the engine's log")
    if store is not None and (store.num_errors or store.num_damaged_pages):
        yield Problem(
            f"the store had {count_of(store.num_errors, 'fault')} and {count_of(store.num_damaged_pages, 'damaged page')}",
            "look at the log: a full disk, a missing permission, or a service out of reach",
        )
    if store is not None and store.num_dropped_pages > FAILED_SHARE * max(1, store.num_saved_pages):
        dropped = count_of(store.num_dropped_pages, "page")
        yield Problem(
            f"the store had no room in its queue for {dropped}, {store.num_saved_pages:,} were saved",
            'a faster store, a larger max_queued_bytes, or write="evicted"',
        )

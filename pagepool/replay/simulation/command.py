"""The command `pagepool replay`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import click

from pagepool.errors import PagePoolError, count_of
from pagepool.replay.models.options import (
    choose_interval,
    kv_dtype_option,
    load_model,
    model_config_option,
    model_page_size_option,
    state_dtype_option,
)
from pagepool.replay.models.pools import KV, STATES, ModelPools, read_pools
from pagepool.replay.shared.memory import count_pool_bytes, count_request_bytes, require_memory
from pagepool.replay.shared.options import (
    EVICTION_POLICIES,
    LRU,
    Command,
    Refusal,
    Size,
    eviction_option,
    json_option,
    max_batched_tokens_option,
    max_num_seqs_option,
    order_option,
)
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.results import open_result, printing, to_json
from pagepool.replay.simulation.backlog import Order
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.host import Policy
from pagepool.replay.simulation.host_options import (
    choose_host,
    host_pages_option,
    host_policy_option,
)
from pagepool.replay.simulation.report import print_report
from pagepool.replay.simulation.runs import (
    count_bytes,
    describe_pool,
    make_manager,
    make_manager_of_pools,
    make_scheduler,
    require_one_that_fits,
    run,
)
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.simulation.sessions import TOLD, Told
from pagepool.replay.traces.generator import WORKLOADS, generate_workload
from pagepool.replay.traces.options import (
    TRACE,
    block_size_option,
    load_trace,
    report_notes,
    require_times,
    seed_option,
    time_unit_option,
    workload_option,
)
from pagepool.replay.traces.reader import Trace, source_name
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.retention import WindowRule

DEFAULT_NUM_REQUESTS = 2000
MAX_SKIPPED_SHOWN = 10
PATHS = ("manager", "batched")
WINDOW_RULES: tuple[WindowRule, ...] = ("ends", "all")


class Run(NamedTuple):
    """One replay: the path, the eviction policy, the rule for windows, and the kind of session reports."""

    path: str
    eviction: str
    windows: WindowRule = "ends"
    told: Told = "nothing"


def load_requests(
    trace: str | None,
    workload: str,
    limit: int | None,
    block_size: int | None,
    time_unit: str | None,
    seed: int,
    progress: Progress,
) -> tuple[Trace, list[SimulatedRequest]]:
    """Load the trace, or generate the workload, which has no records."""
    if trace is None:
        num_requests = DEFAULT_NUM_REQUESTS if limit is None else limit
        require_memory(f"{count_of(num_requests, 'request')} of synthetic {workload}", count_request_bytes(num_requests))
        return Trace([], [], True, []), generate_workload(workload, num_requests, seed)
    return load_trace(trace, limit, block_size, time_unit, seed, progress)


def choose_runs(
    *, compare: bool, batched: bool, eviction: str, compare_eviction: bool, compare_sessions: bool, compare_windows: bool
) -> dict[str, Run]:
    """Return the replays by column heading."""
    if compare_eviction and (compare or eviction != LRU):
        raise click.UsageError(f"--compare-eviction and {'--compare' if compare else '--eviction'} exclude each other")
    if compare_sessions and (compare or compare_eviction):
        raise click.UsageError(f"--compare-sessions and {'--compare' if compare else '--compare-eviction'} exclude each other")
    if compare_eviction:
        return {policy: Run(PATHS[batched], policy) for policy in EVICTION_POLICIES}
    if compare_sessions:
        return {f"{told} told": Run(PATHS[batched], eviction, told=told) for told in TOLD}
    if compare_windows and not compare:
        return {f"windows={rule}": Run(PATHS[batched], eviction, rule) for rule in WINDOW_RULES}
    return {path: Run(path, eviction) for path in (PATHS if compare else (PATHS[batched],))}


def load_pools(
    model_config: str | None,
    page_size: int | None,
    kv_dtype: str | None,
    state_dtype: str | None,
    interval: int | None,
    others: Mapping[str, object],
) -> ModelPools:
    """Return the pools of the model. Raise UsageError if one of `others` is given, options for one pool alone."""
    given = [name for name, value in others.items() if value]
    if given:
        raise click.UsageError(f"{given[0]} has no meaning with --num-states")
    if model_config is None:
        raise click.UsageError("--num-states needs --model-config")
    try:
        return read_pools(model_config, page_size, kv_dtype, state_dtype, interval)
    except (PagePoolError, OSError) as error:
        raise Refusal(str(error)) from error


def replay_pools(
    pools: ModelPools,
    num_pages: Mapping[str, int],
    load: Callable[[Progress], tuple[Trace, list[SimulatedRequest]]],
    source: str,
    json_path: str | None,
    *,
    max_batched_tokens: int,
    max_num_seqs: int,
    order: Order,
) -> None:
    """Replay requests in two pools, and report the figures and which pool is too small."""
    with open_result(json_path) as output, Progress() as progress:
        loaded, requests = load(progress)
        require_memory("two pools", count_pool_bytes(sum(num_pages.values())))
        manager = make_manager_of_pools(num_pages, pools, requests)
        scheduler = make_scheduler(
            manager, requests, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs, order=order
        )
        report_skipped(scheduler)
        figures = run(scheduler, PATHS[True], progress)
        if output is not None:
            output.write(to_json(figures.as_dict()))
    if json_path == "-":
        report_notes(loaded)
        return
    with printing():
        sentences = [*loaded.notes, *filter(None, [manager.advise()])]
        print_report({PATHS[True]: figures}, f"{source}, {pools.describe(num_pages)}", sentences)


def require_sessions(requests: Sequence[SimulatedRequest]) -> None:
    """Exit with code 2 and a message if no request has a session."""
    if not any(request.session_id is not None for request in requests):
        raise click.UsageError("--compare-sessions needs a TRACE with session_id")


def report_skipped(scheduler: Scheduler) -> None:
    """Print the first requests that do not fit the pool to standard error."""
    for request, reason in scheduler.skipped[:MAX_SKIPPED_SHOWN]:
        click.echo(f"skipped {request.request_id}: {reason}", err=True)
    num_more = len(scheduler.skipped) - MAX_SKIPPED_SHOWN
    if num_more > 0:
        click.echo(f"skipped {num_more:,} more", err=True)


def require_equal(figures: dict[str, Figures]) -> None:
    """Exit with code 1 and the names of the figures that differ between the paths, if any."""
    first, *others = figures.values()
    names = sorted({name for other in others for name in first.list_differences(other)})
    if names:
        raise click.ClickException(f"{' and '.join(figures)} differ in {', '.join(names)}")


@click.command(cls=Command)
@click.argument("trace", required=False, type=TRACE)
@workload_option
@click.option("--num-pages", type=Size("pages"), default=32768, help="Pages in the pool, including the null page.")
@model_config_option
@kv_dtype_option
@state_dtype_option
@model_page_size_option
@block_size_option
@time_unit_option
@click.option(
    "--checkpoint-interval",
    "interval",
    type=Size("tokens"),
    help="Keep the states of the model after multiples of this many tokens. Without --model-config each request has one state, "
    "which takes a page.",
    show_default="about 1024 if the model has states",
)
@click.option(
    "--num-states",
    type=Size("pages", minimum=2),
    help="Pages of a second pool, of states, including the null page; --num-pages are then those of keys and values. `pagepool "
    "plan` prints both.",
)
@max_batched_tokens_option
@max_num_seqs_option
@order_option
@click.option("--no-caching", is_flag=True, help="Disable prefix caching.")
@click.option("--batched/--no-batched", default=True, help="Allocate for all running requests at once, or one by one.")
@click.option("--compare", is_flag=True, help="Replay both ways; exit with 1 if any figure but the times differs.")
@eviction_option
@click.option("--compare-eviction", is_flag=True, help="Replay under each eviction policy, and show them side by side.")
@click.option(
    "--compare-sessions",
    is_flag=True,
    help="Replay with nothing told about sessions, with their ends, and with their pauses too, and show them side by side.",
)
@click.option("--limit", type=Size("requests"), help="Use only the first requests; without TRACE, the number to generate.")
@seed_option
@host_pages_option
@host_policy_option
@json_option
def replay(
    trace: str | None,
    workload: str | None,
    num_pages: int,
    model_config: str | None,
    kv_dtype: str | None,
    state_dtype: str | None,
    page_size: int | None,
    block_size: int | None,
    time_unit: str | None,
    interval: int | None,
    num_states: int | None,
    max_batched_tokens: int,
    max_num_seqs: int,
    order: Order,
    no_caching: bool,
    batched: bool,
    compare: bool,
    eviction: str,
    compare_eviction: bool,
    compare_sessions: bool,
    limit: int | None,
    seed: int,
    host_pages: int | None,
    host_policy: Policy | None,
    json_path: str | None,
) -> None:
    """Replay TRACE, or synthetic requests, through the allocator under a simulated scheduler.

    TRACE has one JSON object per line: timestamp, input_length, output_length, hash_ids (one for each 512 input
    tokens; equal ids mean equal prefixes), as in the Mooncake release, or as written by pagepool.replay.Recorder.
    JSON in an array, traces of agents (Weka), turns of conversations (AIPerf), the usage of a service's responses, and a
    CSV of lengths, such as those of Azure and BurstGPT, are read too.
    A name ending in .gz is decompressed, - is standard input. Without TRACE: 2,000 requests of a
    synthetic workload, by default turns of chats that share system prompts.

    All requests wait from the start, in order; timestamps are ignored. Each step computes running requests first,
    then admits waiting ones; the newest is preempted when the pool is short. A running batch allocates in one call
    per step, the manager (--no-batched) in one per request: only the times differ.

    With --order work the requests with the least to compute are admitted first: of the next 1,024 that wait, as
    WaitingQueue orders them.

    With --compare-eviction the table begins with the hit rates. Running requests hold their pages under any policy,
    so policies differ most if few run at once: --max-num-seqs 1 runs one after another.

    A model with states hits only where it kept all states. A chunk of a prompt ends at the last checkpoint within the
    step; checkpoints take pages of the pool. With --num-states they have a pool of their own, and are kept where requests
    resume.

    A model with sliding windows or chunks, which the report names, is replayed twice, unless something else is compared:
    with pages of windows kept where requests can resume (windows=ends), and with all of them kept (windows=all).

    With --host-pages the pool has a tier in host memory: pages that it evicts are saved there, and prompts hit in both.
    What a step saves and loads is done when the next one begins.

    With --compare-sessions a TRACE with session_id shows what an engine gains that tells the pool which sessions have ended
    (CacheManager.close_session), and also after which pause each one goes on, without an error (release with seconds).
    Pauses are those of the trace, or else the times from arrival to arrival. Use --max-num-seqs 1.
    """
    if trace and workload:
        raise click.UsageError("TRACE and --workload exclude each other")
    workload = workload or WORKLOADS[0]
    if num_states is not None:
        others = {
            "--no-caching": no_caching,
            "--no-batched": not batched,
            "--compare": compare,
            "--eviction": eviction != LRU,
            "--compare-eviction": compare_eviction,
            "--compare-sessions": compare_sessions,
            "--host-pages": host_pages,
        }
        replay_pools(
            load_pools(model_config, page_size, kv_dtype, state_dtype, interval, others),
            {KV: num_pages, STATES: num_states},
            partial(load_requests, trace, workload, limit, block_size, time_unit, seed),
            source_name(trace) if trace else f"synthetic {workload}",
            json_path,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
            order=order,
        )
        return
    model = load_model(model_config, page_size, kv_dtype, state_dtype, has_checkpoints=interval is not None)
    model = dataclasses.replace(model, step_tokens=max_batched_tokens)
    runs = choose_runs(
        compare=compare,
        batched=batched,
        eviction=eviction,
        compare_eviction=compare_eviction,
        compare_sessions=compare_sessions,
        compare_windows=bool(model.windows) and not no_caching,
    )
    interval = choose_interval(model, interval)
    host = choose_host(host_pages, host_policy)
    if host is not None and no_caching:
        raise click.UsageError("--host-pages and --no-caching exclude each other")
    if compare_sessions and no_caching:
        raise click.UsageError("--compare-sessions and --no-caching exclude each other")
    pool = describe_pool(num_pages, model, eviction, host)
    with open_result(json_path) as output, Progress() as progress:
        loaded, requests = load_requests(trace, workload, limit, block_size, time_unit, seed, progress)
        if compare_sessions:
            require_sessions(requests)
            require_times(trace or "", loaded)
        pools_bytes = sum(count_bytes(num_pages, each.eviction, host) for each in runs.values())
        require_memory(f"{count_of(len(runs), 'pool')} of {pool}", pools_bytes)
        schedulers = {
            name: make_scheduler(
                make_manager(num_pages, model, requests, interval, None if no_caching else each.eviction, host, each.windows),
                requests,
                max_batched_tokens=max_batched_tokens,
                max_num_seqs=max_num_seqs,
                batched=each.path == "batched",
                told=each.told,
                order=order,
            )
            for name, each in runs.items()
        }
        report_skipped(next(iter(schedulers.values())))
        require_one_that_fits(requests, num_pages, model)
        figures = {name: run(scheduler, name, progress, model.page_bytes) for name, scheduler in schedulers.items()}
        if output is not None:
            by_name = {name: each.as_dict() for name, each in figures.items()}
            output.write(to_json(by_name if len(runs) > 1 else next(iter(by_name.values()))))
    if json_path != "-":
        source = source_name(trace) if trace else f"synthetic {workload}"
        with printing():
            title = f"{source}, {pool}{f', checkpoints every {interval:,} tokens' if interval else ''}"
            descriptions = [*loaded.notes, *model.describe_windows()]
            print_report(figures, title, descriptions, is_hit_rate_first=compare_eviction or compare_sessions)
    else:
        report_notes(loaded)
    if compare:
        require_equal(figures)

"""The command `pagepool plan`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from reprlib import repr as shorten
from typing import BinaryIO, TypeAlias

import click
import numpy as np
from click.core import ParameterSource

from pagepool.errors import ArgumentError
from pagepool.replay.models.options import (
    kv_dtype_option,
    load_model,
    model_config_option,
    model_page_size_option,
    require_interval,
    state_dtype_option,
)
from pagepool.replay.models.pages import ModelPages, list_intervals
from pagepool.replay.models.pools import ModelPools
from pagepool.replay.plans.capacity import Capacity
from pagepool.replay.plans.capacity_report import print_capacity
from pagepool.replay.plans.checkpoints import CheckpointSimulator, count_states
from pagepool.replay.plans.link import PlannedLink
from pagepool.replay.plans.plan import (
    CheckpointFigures,
    HostRun,
    HostSpeed,
    Plan,
    PlannedStore,
    Planner,
    PoolFigures,
    WindowFigures,
)
from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.plans.report import print_plan
from pagepool.replay.plans.split_command import (
    APART,
    SEPARATE,
    SHARED,
    Asked,
    arrays_option,
    choose_split,
    mean_tokens_option,
    run_split,
    state_share_option,
)
from pagepool.replay.shared.memory import count_digest_bytes, count_pool_bytes, require_memory
from pagepool.replay.shared.options import (
    ADAPTIVE,
    EVICTION,
    LRU,
    Command,
    Refusal,
    Size,
    json_option,
    max_batched_tokens_option,
    max_num_seqs_option,
    plot_option,
    require_plots,
)
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.results import OutputFile, open_result, printing, to_json
from pagepool.replay.shared.sizes import BYTE_UNITS, MAX_SIZE, Sizes
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.host import HostMemory, Policy
from pagepool.replay.simulation.host_options import (
    choose_host,
    host_pages_option,
    host_policy_option,
)
from pagepool.replay.simulation.runs import (
    count_bytes,
    describe_pool,
    make_manager,
    make_scheduler,
    making_pool,
    require_one_that_fits,
    run,
)
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.traces.options import (
    TRACE,
    block_size_option,
    limit_option,
    load_trace,
    seed_option,
    time_unit_option,
)
from pagepool.replay.traces.reader import name_trace, source_name
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.retention import WindowRule
from pagepool.specs import cdiv

Run: TypeAlias = tuple[PoolFigures, str, HostMemory | None]  # a pool to simulate, its policy, its host tier

NUM_REPLAYS = 4
MAX_REPLAY_STEPS = 200_000  # ten seconds
MAX_REPLAY_PAGES = 10_000_000  # half a gigabyte
NUM_POLICY_SIZES = 5
NUM_CHECKPOINT_SIZES = 4
NUM_STATE_SIZES = 8  # for models without attention, whose curve covers all sizes
MAX_CHECKPOINT_TOKENS = 5_000_000_000  # limit of tokens over all simulations: a minute
MAX_POLICY_PAGES = 100_000_000  # limit of pages over all simulations: twenty seconds
MAX_WINDOW_PAGES = 400_000_000  # limit of pages over all groups and simulations: a minute


def find_model(
    model_config: str | None,
    dtypes: tuple[str | None, str | None],
    page_size: int | None,
    bytes_per_token: int | None,
    intervals: Sizes | None,
) -> ModelPages:
    """Return the pages of the model; `dtypes` are the dtypes of attention and of states."""
    if bytes_per_token is not None and model_config is not None:
        raise click.UsageError("--bytes-per-token and --model-config exclude each other")
    model = load_model(model_config, page_size, *dtypes, has_checkpoints=intervals is not None)
    if bytes_per_token is not None:
        model = replace(model, page_bytes=bytes_per_token * model.page_size)
    if (model.page_bytes or 0) > MAX_SIZE:
        raise Refusal(f"{model_config}: a page would take {shorten(model.page_bytes)} bytes, allowed: {MAX_SIZE}")
    return model


def find_speed(
    bandwidth: int | None, prefill_rate: int | None, host: HostMemory | None, page_bytes: int | None
) -> HostSpeed | None:
    """Return the requested speeds of the tier, if any."""
    if bandwidth is None:
        return None
    if prefill_rate is None:
        raise click.UsageError("--host-bandwidth needs --prefill-rate")
    if host is None:
        raise click.UsageError("--host-bandwidth needs --host-pages")
    if page_bytes is None:
        raise click.UsageError("--host-bandwidth needs --bytes-per-token or --model-config")
    return HostSpeed(bandwidth, prefill_rate)


def find_store(
    num_pages: int | None, bandwidth: int | None, prefill_rate: int | None, host: HostMemory | None, page_bytes: int | None
) -> PlannedStore | None:
    """Return the requested store, if any."""
    if num_pages is not None and host is None:
        raise click.UsageError("--store-pages needs --host-pages")
    if bandwidth is not None and prefill_rate is None:
        raise click.UsageError("--store-bandwidth needs --prefill-rate")
    if bandwidth is not None and page_bytes is None:
        raise click.UsageError("--store-bandwidth needs --bytes-per-token or --model-config")
    return None if num_pages is bandwidth is None else PlannedStore(num_pages, bandwidth, prefill_rate)


def find_link(model: ModelPages | ModelPools, bandwidth: int | None, prefill_rate: int | None) -> PlannedLink | None:
    """Return the requested link from another engine, if any."""
    if bandwidth is None:
        return None
    if prefill_rate is None:
        raise click.UsageError("--link-bandwidth needs --prefill-rate")
    if model.page_bytes is None:
        raise click.UsageError("--link-bandwidth needs --bytes-per-token or --model-config")
    if model.fixed.encoder:
        raise click.UsageError("--link-bandwidth: keys and values of an encoder do not move between engines")
    return PlannedLink(model, bandwidth, prefill_rate)


def find_intervals(model: ModelPages, asked: Sizes | None) -> list[int]:
    """Return the intervals of checkpoints to simulate, none for a model without states."""
    if model.num_state_groups == 0:
        return []
    if asked is None:
        return list_intervals(model.page_size)
    if asked.is_range:
        raise click.UsageError("--checkpoint-interval: give numbers separated by commas, not a range")
    for interval in asked.numbers:
        require_interval(model, interval)
    return asked.list()


def find_sizes(num_pages: Sizes | None, memory: Sizes | None, page_bytes: int | None) -> Sizes | None:
    """Return the requested sizes in pages, None if there are none."""
    if memory is None:
        return num_pages
    if num_pages is not None:
        raise click.UsageError("--num-pages and --memory exclude each other")
    if page_bytes is None:
        raise click.UsageError("--memory needs --bytes-per-token or --model-config")
    try:
        return memory.divided_by(page_bytes)
    except ArgumentError as error:
        raise click.UsageError(f"--memory: {error}") from error


def choose_sizes(asked: Sizes | None, planner: Planner, model: ModelPages, num_states: int) -> list[int]:
    """Return the requested sizes. If there are fewer than two, add sizes between the largest request and the size with all
    hits. With attention each attention page may have a checkpoint and pages of all windows; without it, requests have
    `num_states` states in all.
    """
    if asked is not None and len(asked.numbers) > 1:
        return asked.list()
    smallest, largest = planner.find_smallest(model), 1 + model.num_state_groups * num_states
    if model.has_attention:
        window_pages = sum(each.num_groups * model.hit_size // each.page_size for each in model.windows)
        largest = planner.max_num_pages * (model.num_hit_pages + window_pages + model.num_state_groups)
    ends = smallest, max(smallest + 1, largest)
    return sorted({*Sizes(ends, is_range=True).list(), *(asked.numbers if asked else ())})


def choose_replays(
    sizes: Sequence[int], num_replays: int | None, requests: Sequence[SimulatedRequest], model: ModelPages, max_num_seqs: int
) -> list[int]:
    """Choose sizes evenly; by default a few of the sizes whose replay takes seconds."""
    if num_replays is None:
        num_tokens = sum(request.num_output_tokens for request in requests)
        mean_pages = sum(model.count_pages(request.num_slots) for request in requests) / len(requests)
        sizes = [
            size
            for size in sizes
            if num_tokens <= MAX_REPLAY_STEPS * min(size / mean_pages, max_num_seqs) and size <= MAX_REPLAY_PAGES
        ]
        num_replays = NUM_REPLAYS
    return spread(sizes, num_replays)


def spread(sizes: Sequence[int], num_sizes: int) -> list[int]:
    """Choose `num_sizes` sizes evenly; all if there are not more."""
    places = np.linspace(0, len(sizes) - 1, min(num_sizes, len(sizes))).round().astype(int)
    return [sizes[place] for place in places]


def choose_simulations(
    pools: Sequence[PoolFigures], asked: int | None, eviction: str | None, num_request_pages: int
) -> list[PoolFigures]:
    """Choose the pools for simulating adaptive eviction: all if it was requested, none if LRU was. By default choose pools that
    skip no request, with some seconds of work in total; include `asked`, the only requested size.
    """
    if eviction is not None:
        return [*pools] if eviction == ADAPTIVE else []
    num_sizes = min(NUM_POLICY_SIZES, MAX_POLICY_PAGES // max(1, num_request_pages))
    sizes = [pool.num_pages for pool in pools if not pool.skipped and pool.num_pages <= MAX_REPLAY_PAGES]
    chosen = {*spread(sizes, num_sizes), *([asked] if num_sizes else [])}
    return [pool for pool in pools if pool.num_pages in chosen]


def simulate_checkpoints(
    plan: Plan,
    intervals: Sequence[int],
    eviction: str | None,
    requests: Sequence[SimulatedRequest],
    max_batched_tokens: int,
    progress: Progress,
) -> tuple[CheckpointFigures, ...]:
    """Simulate intervals of checkpoints with LRU, and with adaptive eviction if requested, one pool at a time. Choose pools
    that skip no request, with a minute of work in total but at least one pool; include the only requested size. Raise Refusal
    for a pool that is too large.
    """
    chosen = [LRU, ADAPTIVE] if eviction == ADAPTIVE else [LRU]
    num_tokens = len(chosen) * len(intervals) * sum(request.num_slots for request in requests)
    max_num_sizes = NUM_CHECKPOINT_SIZES if plan.model.num_attention_groups else NUM_STATE_SIZES
    num_sizes = max(1, min(max_num_sizes, MAX_CHECKPOINT_TOKENS // num_tokens))
    fitting = [pool.num_pages for pool in plan.pools if pool.num_pages >= plan.min_num_pages] or [plan.pools[-1].num_pages]
    sizes = {*spread(fitting, num_sizes), *([plan.asked_num_pages] if plan.asked_num_pages else [])}
    num_bytes = max(count_pool_bytes(max(sizes), policy) for policy in chosen)
    require_memory(f"a simulation of {describe_pool(max(sizes), plan.model)}", num_bytes)
    simulator = CheckpointSimulator(requests, plan.model, max_batched_tokens)
    figures = []
    for policy, interval, num_pages in product(chosen, intervals, sorted(sizes)):
        name = f"{'' if policy == LRU else f'{policy}, '}checkpoints every {interval:,} tokens, {num_pages:,} pages"
        with progress.follow(name, "request", len(requests)) as update:
            figures.append(simulator.run(num_pages, interval, policy, update))
    return tuple(figures)


def simulate_windows(
    plan: Plan, eviction: str | None, requests: Sequence[SimulatedRequest], max_batched_tokens: int, progress: Progress
) -> tuple[WindowFigures, ...]:
    """Simulate a model with windows: with LRU, with adaptive eviction unless only LRU was requested, and with LRU while all
    window pages stay cached. Choose pools that skip no request, with a minute of work in total but at least one pool; include
    the only requested size. If adaptive eviction was requested, choose all pools. Raise Refusal for a pool that is too large.
    """
    runs: list[tuple[str, WindowRule]] = [(LRU, "ends"), (ADAPTIVE, "ends"), (LRU, "all")]
    runs = [run for run in runs if eviction != LRU or run[0] == LRU]
    num_pages = sum(cdiv(request.num_slots, size) for request in requests for size in plan.model.page_sizes)
    fitting = [pool.num_pages for pool in plan.pools if pool.num_pages >= plan.min_num_pages] or [plan.pools[-1].num_pages]
    num_sizes = max(1, min(NUM_POLICY_SIZES, MAX_WINDOW_PAGES // (num_pages * len(runs))))
    chosen = spread(fitting, num_sizes) if num_sizes > 1 else [fitting[len(fitting) // 2]]
    sizes = fitting if eviction == ADAPTIVE else chosen
    sizes = sorted({*sizes, *([plan.asked_num_pages] if plan.asked_num_pages else [])})
    num_bytes = count_digest_bytes(sum(cdiv(request.num_slots, plan.model.hash_size) for request in requests))
    num_bytes += max(count_pool_bytes(max(sizes), policy) for policy, _ in runs)
    require_memory(f"a simulation of {describe_pool(max(sizes), plan.model)}", num_bytes)
    with progress.follow("hashing pages", "request", len(requests)) as update:
        simulator = PolicySimulator(requests, plan.model, max_batched_tokens, update)
    figures = []
    for (policy, windows), size in product(runs, sizes):
        name = f"{policy}, {windows} of windows, {size:,} pages"
        with progress.follow(name, "request", len(requests)) as update, making_pool(size, plan.model, policy):
            hit_tokens = simulator.count_hits(policy, size, update, windows=windows)
        figures.append(WindowFigures(size, policy, windows, hit_tokens))
    return tuple(figures)


def simulate_pools(
    planner: Planner,
    plan: Plan,
    eviction: str | None,
    requests: Sequence[SimulatedRequest],
    max_batched_tokens: int,
    progress: Progress,
) -> Plan:
    """Simulate adaptive eviction, and LRU with the plan's host tier, one pool at a time; simulate none if nothing can hit.
    Raise Refusal for a pool or tier that is too large.
    """
    num_request_pages = sum(cdiv(request.num_slots, plan.page_size) for request in requests)
    chosen = choose_simulations(plan.pools, plan.asked_num_pages, eviction, num_request_pages)
    runs: list[Run] = [(pool, ADAPTIVE, None) for pool in chosen]
    runs += [(pool, LRU, plan.host) for pool in plan.pools if plan.host]
    if not runs or plan.knee is None:
        return plan
    largest, _, host = max(runs, key=lambda run: count_run_bytes(*run))
    num_bytes = count_digest_bytes(num_request_pages) + max(count_run_bytes(*run) for run in runs)
    require_memory(f"a simulation of {describe_pool(largest.num_pages, plan.model, host=host)}", num_bytes)
    with progress.follow("hashing pages", "request", len(requests)) as update:
        simulator = PolicySimulator(requests, plan.model, max_batched_tokens, update)
    figures, host_runs = [], []
    for pool, policy, host in runs:
        with (
            progress.follow(f"{host or policy}, {pool.num_pages:,} pages", "request", len(requests)) as update,
            making_pool(pool.num_pages, plan.model, policy, host),
        ):
            if host is None:
                figures.append(planner.compare(pool, policy, simulator.count_hits(policy, pool.num_pages, update)))
            else:
                hit_tokens, moved = simulator.run_with_host(pool.num_pages, host, update)
                moved = replace(moved, page_bytes=plan.page_bytes)
                host_run = HostRun(planner.compare(pool, policy, hit_tokens), moved)
                if plan.store and plan.store.num_pages:
                    host_run = planner.find_store_hits(host_run, host.num_pages - 1 + plan.store.num_pages)
                host_runs.append(host_run)
    return replace(plan, policies=tuple(figures), host_runs=tuple(host_runs))


def count_run_bytes(pool: PoolFigures, policy: str, host: HostMemory | None) -> int:
    """Return the bytes of the pool, and of the tier, of a simulation."""
    return count_bytes(pool.num_pages, policy, host)


def replay_pools(sizes: Iterable[int], make: Callable[[int], Scheduler], progress: Progress) -> dict[int, Figures]:
    """Replay in pools of these sizes, one at a time."""
    return {size: run(make(size), f"together, {size:,} pages", progress) for size in sizes}


def write_plot(plan: Plan, source: str, path: str, file: BinaryIO) -> None:
    """Write the plot in the format of the path's extension."""
    from pagepool.replay.plans.plot import save_plot

    save_plot(plan, name_trace(source), file, path[-3:].lower())


def write_page(plan: Plan, source: str, file: BinaryIO) -> None:
    """Write the HTML page as UTF-8."""
    from pagepool.replay.plans.web_page import make_page

    file.write(make_page(plan, name_trace(source)).encode())


def find_given(name: str, value: int) -> int | None:
    """Return the value of the parameter `name` of the command, None if it was not given."""
    return None if click.get_current_context().get_parameter_source(name) is ParameterSource.DEFAULT else value


def require_no_others(options: Mapping[str, object], condition: str = "") -> None:
    """Raise UsageError for an option that has no meaning without a trace. `condition` is the end of the message."""
    for name, value in options.items():
        if value is not None:
            raise click.UsageError(f"{name} has no meaning with --mean-tokens{condition}")


def run_capacity(plan: Capacity, sizes: Sizes | None, asked: Asked, json_path: str | None) -> None:
    """Plan without a trace. Raise UsageError for options that have a meaning only with a trace."""
    used = ("--num-pages", "--bytes-per-token", "--max-batched-tokens")
    require_no_others({name: value for name, value in asked.others.items() if name not in used})
    plan = replace(plan, sizes=tuple(sizes.list()) if sizes else ())
    with open_result(json_path) as json_file:
        if json_file:
            json_file.write(to_json(plan.as_dict()))
    if json_path != "-":
        with printing():
            print_capacity(plan)


@click.command(cls=Command)
@click.argument("trace", type=TRACE, required=False)
@click.option(
    "--num-pages",
    type=Size("sizes", many=True),
    help="Pool sizes in pages, including the null page: 12800, or 10k,20k, or a range 1k:1M.",
    show_default="from the largest request to all possible hits",
)
@click.option(
    "--memory",
    type=Size("sizes", BYTE_UNITS, many=True),
    help="Pool sizes in bytes: 40GiB, or 20GiB,40GiB, or 8GiB:80GiB. What is left for the cache, without weights and "
    "activations.",
)
@click.option(
    "--bytes-per-token",
    type=Size("bytes", {"": 1, **BYTE_UNITS}),
    help="Bytes of keys and values over all layers, on one device.",
)
@model_config_option
@kv_dtype_option
@state_dtype_option
@model_page_size_option
@click.option(
    "--checkpoint-interval",
    "intervals",
    type=Size("tokens", many=True),
    help="Intervals at which the states of the model are kept, separated by commas. Without --model-config each request has "
    "one state, which takes a page.",
    show_default="from about 256 to about 4096 if the model has states",
)
@arrays_option
@state_share_option
@mean_tokens_option
@block_size_option
@time_unit_option
@click.option(
    "--replays",
    type=Size("pools", minimum=0),
    help="Number of pools in which a simulated scheduler runs requests together; 0: none.",
    show_default=f"{NUM_REPLAYS} that take seconds",
)
@click.option(
    "--eviction",
    type=EVICTION,
    metavar="POLICY",
    help=f"{ADAPTIVE}: simulate this policy at each size; {LRU}: simulate none. A size takes seconds for each 10M pages of "
    f"requests. For a model with states: at the sizes with checkpoints. With windows: {LRU} simulates LRU alone.",
    show_default=f"{ADAPTIVE}, at up to {NUM_POLICY_SIZES} sizes that take seconds; {LRU} if the model has states",
)
@host_pages_option
@host_policy_option
@click.option(
    "--host-bandwidth",
    type=Size("bytes", BYTE_UNITS),
    help="Bytes per second between host and device, such as 25GB; with --prefill-rate a sentence says what the tier saves.",
)
@click.option(
    "--store-pages",
    type=Size("pages"),
    help="Pages of a store behind the tier: a sentence says how many hits it adds at most.",
)
@click.option(
    "--store-bandwidth",
    type=Size("bytes", BYTE_UNITS),
    help="Bytes per second loaded from a store, such as 2GB; with --prefill-rate a sentence says whether its loads pay.",
)
@click.option(
    "--link-bandwidth",
    type=Size("bytes", BYTE_UNITS),
    help="Bytes per second from another engine, such as 10GB; with --prefill-rate sentences say for which prompts moving their "
    "pages pays.",
)
@click.option("--prefill-rate", type=Size("tokens"), help="Prompt tokens that the model computes per second.")
@max_batched_tokens_option
@max_num_seqs_option
@limit_option
@seed_option
@plot_option
@click.option("--html", "html_path", type=OutputFile(), help="Write plot and tables as one HTML page.")
@json_option
def plan(
    trace: str | None,
    num_pages: Sizes | None,
    memory: Sizes | None,
    bytes_per_token: int | None,
    model_config: str | None,
    kv_dtype: str | None,
    state_dtype: str | None,
    page_size: int | None,
    intervals: Sizes | None,
    arrays: str | None,
    state_share: float | None,
    mean_tokens: int | None,
    block_size: int | None,
    time_unit: str | None,
    replays: int | None,
    eviction: str | None,
    host_pages: int | None,
    host_policy: Policy | None,
    host_bandwidth: int | None,
    store_pages: int | None,
    store_bandwidth: int | None,
    link_bandwidth: int | None,
    prefill_rate: int | None,
    max_batched_tokens: int,
    max_num_seqs: int,
    limit: int | None,
    seed: int,
    plot_path: str | None,
    html_path: str | None,
    json_path: str | None,
) -> None:
    """Estimate the hit rate of TRACE for each pool size.

    For each size: the prompt tokens that need not be computed if requests run one after another, with the pool's
    LRU eviction, with the optimal policy, which knows the future, and with adaptive eviction (--eviction), which is
    simulated; a sentence says what a change of policy saves. In some of the pools a simulated scheduler runs
    requests together, as `pagepool replay` does, and reports preemptions. Requests larger than a pool are skipped.

    TRACE is as for `pagepool replay`. Sizes are in pages, or in bytes with the bytes per token:

    \b
      pagepool plan trace.jsonl \\
        --num-pages 1k:1M --html plan.html
      pagepool plan trace.jsonl \\
        --memory 40GiB \\
        --model-config config.json

    With one size or none, the plan adds sizes from the largest request to all possible hits.

    Without TRACE, --mean-tokens says what a request of this length takes and how many fit at once:

    \b
      pagepool plan --mean-tokens 12k \\
        --memory 40GiB \\
        --model-config config.json

    A model with states hits only where it kept all of them, so for such a model the plan simulates intervals of
    checkpoints (--checkpoint-interval) in some of the sizes, with LRU and with the policy that is named. With one
    --memory it divides the memory between a pool of keys and values and one of states (--arrays), and prints the sizes of both:

    \b
      pagepool plan trace.jsonl \\
        --memory 200GiB \\
        --max-num-seqs 64 \\
        --model-config config.json

    For a model with sliding windows or chunks, which the plan names, all of its groups are simulated in some of the sizes:
    with pages of windows kept where requests can resume, and if all stayed cached.

    With --host-pages the plan also simulates each size with a tier in host memory behind it: hits, and pages that move.
    With --store-pages or --store-bandwidth it says when a store behind that tier pays.
    With --link-bandwidth it says when prompts move from another engine sooner than they are computed.
    """
    others = {
        "--num-pages": num_pages,
        "--bytes-per-token": bytes_per_token,
        "--replays": replays,
        "--eviction": eviction,
        "--host-pages": host_pages,
        "--host-policy": host_policy,
        "--host-bandwidth": host_bandwidth,
        "--store-pages": store_pages,
        "--store-bandwidth": store_bandwidth,
        "--prefill-rate": prefill_rate if link_bandwidth is None else None,
        "--max-batched-tokens": find_given("max_batched_tokens", max_batched_tokens),
        "--plot": plot_path,
        "--html": html_path,
    }
    wanted = Asked(arrays, model_config, memory, intervals, state_share, mean_tokens, trace, others)
    model_options = {"page_size": page_size, "kv_dtype": kv_dtype, "state_dtype": state_dtype}
    if mean_tokens is not None:
        given_seed = find_given("seed", seed)
        require_no_others({"--limit": limit, "--block-size": block_size, "--time-unit": time_unit, "--seed": given_seed})
    given_num_seqs = find_given("max_num_seqs", max_num_seqs)
    split = choose_split(wanted, model_options, max_num_seqs, is_default=given_num_seqs is None)
    if split is not None:
        options = {"limit": limit, "block_size": block_size, "time_unit": time_unit, "seed": seed}
        run_split(split, find_link(split.pools, link_bandwidth, prefill_rate), trace, json_path, options)
        return
    if trace is None and mean_tokens is None:
        raise click.UsageError("Missing argument 'TRACE'. Without one, --mean-tokens says how many requests fit.")
    model = find_model(model_config, (kv_dtype, state_dtype), page_size, bytes_per_token, intervals)
    if arrays is not None and not model.num_state_groups:
        raise click.UsageError("--arrays needs --model-config with states")
    link = find_link(model, link_bandwidth, prefill_rate)
    model = replace(model, step_tokens=max_batched_tokens)
    if arrays == SEPARATE:
        model = model.with_separate_arrays()
    if trace is None:
        given_intervals = intervals if model_config else None  # without a config they say that requests have states
        require_no_others(
            {"--max-num-seqs": given_num_seqs, "--checkpoint-interval": given_intervals},
            f" unless --arrays {APART} divides the memory",
        )
        kind = (arrays or SHARED) if model.num_state_groups else None
        run_capacity(
            Capacity(model, mean_tokens or 0, arrays=kind, link=link),
            find_sizes(num_pages, memory, model.page_bytes),
            wanted,
            json_path,
        )
        return
    chosen_intervals = find_intervals(model, intervals)
    asked = find_sizes(num_pages, memory, model.page_bytes)
    host = choose_host(host_pages, host_policy)
    option = "--host-pages" if host else "--store-bandwidth"
    if (host or store_bandwidth is not None) and (model.num_state_groups or model.windows):
        what = "states" if model.num_state_groups else "windows"
        raise click.UsageError(f"{option}: a model with {what} is planned without a tier, pagepool replay runs it with one")
    speed = find_speed(host_bandwidth, prefill_rate, host, model.page_bytes)
    store = find_store(store_pages, store_bandwidth, prefill_rate, host, model.page_bytes)
    if prefill_rate is not None and speed is None and link is None and (store is None or store.bandwidth is None):
        raise click.UsageError("--prefill-rate needs --host-bandwidth, --store-bandwidth or --link-bandwidth")
    if plot_path or html_path:
        require_plots()
    with open_result(json_path) as json_file, open_result(plot_path) as plot_file, open_result(html_path) as html_file:
        with Progress() as progress:
            loaded, requests = load_trace(trace, limit, block_size, time_unit, seed, progress)
            if asked is not None and len(asked.numbers) > 1:
                require_one_that_fits(requests, asked.numbers[-1], model)
            with progress.follow("one after another", "request", len(requests)) as update:
                planner = Planner(loaded.records, model.hit_size, update)
                num_states = count_states(requests, min(chosen_intervals, default=1))
                made = planner.make_plan(choose_sizes(asked, planner, model, num_states), model=model)
                made = replace(made, host=host, speed=speed, store=store, link=link, arrays=arrays or SHARED)
                made = replace(made, notes=tuple(loaded.notes))
            if asked is not None and len(asked.numbers) == 1:
                made = replace(made, asked_num_pages=asked.numbers[0])
            if chosen_intervals:
                kept = simulate_checkpoints(made, chosen_intervals, eviction, requests, max_batched_tokens, progress)
                made = replace(made, checkpoints=kept)
            elif model.windows:
                made = replace(made, windows=simulate_windows(made, eviction, requests, max_batched_tokens, progress))
            else:
                made = simulate_pools(planner, made, eviction, requests, max_batched_tokens, progress)
            sizes = choose_replays([pool.num_pages for pool in made.pools_with_hits], replays, requests, model, max_num_seqs)
            largest, interval = max(sizes, default=0), made.best_interval
            require_memory(f"a replay in {describe_pool(largest, model)}", count_pool_bytes(largest))
            make = partial(make_scheduler, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs)
            figures = replay_pools(sizes, lambda size: make(make_manager(size, model, requests, interval), requests), progress)
            made = replace(made, replays=figures)
        if plot_path and plot_file:
            write_plot(made, source_name(trace), plot_path, plot_file)
        if html_file:
            write_page(made, source_name(trace), html_file)
        if json_file:
            json_file.write(to_json(made.as_dict()))
    if "-" not in (json_path, html_path):
        with printing():
            print_plan(made, source_name(trace))

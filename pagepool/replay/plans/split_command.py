"""The part of the command `pagepool plan` that divides memory between keys and values and states."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import click

from pagepool.errors import PagePoolError, count_of
from pagepool.replay.models.pools import ModelPools, read_pools
from pagepool.replay.plans.link import PlannedLink
from pagepool.replay.plans.split_report import print_split
from pagepool.replay.plans.splits import (
    NUM_SEARCH_RUNS,
    SPREAD,
    SplitFigures,
    SplitPlan,
    SplitSimulator,
    find_split,
    list_around,
)
from pagepool.replay.shared.memory import count_pool_bytes, require_memory
from pagepool.replay.shared.options import Refusal, Size
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.results import open_result, printing, to_json
from pagepool.replay.shared.sizes import Sizes, format_bytes
from pagepool.replay.traces.options import load_trace
from pagepool.replay.traces.reader import source_name

SEPARATE, SHARED, APART = "separate", "shared", "apart"

arrays_option = click.option(
    "--arrays",
    type=click.Choice([SEPARATE, SHARED, APART]),
    help=f"For a model with states. {APART}: a pool for keys and values and one for states, each with arrays of its own; the "
    f"plan divides one --memory between them. {SHARED}: one pool, in whose arrays states and keys and values lie over each "
    f"other. {SEPARATE}: one pool, with a row for each page id in the array of each layer.",
    show_default=f"{APART} with one --memory, otherwise {SHARED}",
)


class Share(click.FloatRange):
    """A range of numbers without NaN, which compares as if it were in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Fail for NaN."""
        number = super().convert(value, param, ctx)
        return self.fail(f"{value} is not in the range 0<x<1.", param, ctx) if number != number else number


state_share_option = click.option(
    "--state-share",
    type=Share(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help=f"Share of the memory for states, such as 0.3, with --arrays {APART}.  [default: searched]",
)
mean_tokens_option = click.option(
    "--mean-tokens",
    type=Size("tokens"),
    help="Mean tokens of a request, answer included, without TRACE: what it takes, and how many fit. The split of a model with "
    "states is that of a rule.",
)


class Split(NamedTuple):
    """The pools, memory and requests that a split is planned for."""

    pools: ModelPools
    memory: int
    share: float | None
    mean_tokens: int | None
    max_num_seqs: int
    is_default: bool  # whether --max-num-seqs was not given

    def plan(self, trace: str | None, progress: Progress, trace_options: Mapping[str, Any]) -> SplitPlan:
        """Choose the share: by simulations of the trace, or by the rule if only the mean tokens are known."""
        least = self.pools.find_least_share(self.memory, self.max_num_seqs)
        if self.share and self.share < least:
            raise Refusal(self._refuse(f"--state-share {self.share:.1%}", least))
        if trace is None:
            mean_tokens = self.mean_tokens or 0
            share = self.share or max(least, self.pools.find_share(mean_tokens))
            return SplitPlan(self.pools, self.memory, share, self.max_num_seqs, mean_tokens)
        loaded, requests = load_trace(trace, progress=progress, **trace_options)
        require_memory("a simulation of two pools", count_pool_bytes(sum(self.pools.divide(self.memory, least).values())))
        simulator = SplitSimulator(requests, self.pools)
        num_runs = len(SPREAD) if self.share else NUM_SEARCH_RUNS + len(SPREAD) - 1

        def run(share: float) -> SplitFigures:
            with progress.follow(f"{share:.1%} for states, one of {num_runs} splits", "request", len(requests)) as update:
                return simulator.run(self.memory, share, update)

        mean = sum(request.num_slots for request in requests) / max(1, len(requests))
        share = self.share or 0.0
        if share:
            runs = [run(each) for each in list_around(share, least)]
        else:
            best, runs = find_split(run, least)
            share = best.share
        return SplitPlan(self.pools, self.memory, share, self.max_num_seqs, mean, tuple(runs), tuple(loaded.notes))

    def require_room(self) -> None:
        """Raise Refusal if states for `max_num_seqs` requests leave no memory for keys and values."""
        least = self.pools.find_least_share(self.memory, self.max_num_seqs)
        if least > 0.9:
            raise Refusal(self._refuse(f"--memory {format_bytes(self.memory)}", least))

    def _refuse(self, option: str, least: float) -> str:
        needed, requests = format_bytes(int(least * self.memory)), count_of(self.max_num_seqs, "request")
        source = "the default of --max-num-seqs" if self.is_default else "--max-num-seqs"
        memory = f"{needed} of {format_bytes(self.memory)}"
        return f"{option} is too little for states: {requests} at once ({source}) need {memory}, fewer need less"


class Asked(NamedTuple):
    """Options of the command that matter for a split. `others` are options that have no meaning with a split."""

    arrays: str | None
    model_config: str | None
    memory: Sizes | None
    intervals: Sizes | None
    share: float | None
    mean_tokens: int | None
    trace: str | None
    others: Mapping[str, Any]

    @property
    def given(self) -> list[str]:
        """The names of other options that were given."""
        return [name for name, value in self.others.items() if value is not None]

    @property
    def has_one_size(self) -> bool:
        """Whether one memory and at most one interval are given, for a model."""
        has_one_interval = self.intervals is None or len(self.intervals.numbers) == 1
        has_memory = self.memory is not None and len(self.memory.numbers) == 1
        return self.model_config is not None and has_memory and has_one_interval

    def require_usage(self) -> bool:
        """Return whether arrays apart are asked for. Raise UsageError for options that contradict one another."""
        if self.trace is not None and self.mean_tokens is not None:
            raise click.UsageError("--mean-tokens and TRACE exclude each other")
        if self.arrays in (SEPARATE, SHARED):
            if self.share is not None:
                raise click.UsageError(f"--state-share needs --arrays {APART}")
            return False
        if self.arrays is None and self.share is None:
            return False
        if not self.has_one_size:
            raise click.UsageError(f"--arrays {APART} needs --model-config, one --memory and at most one --checkpoint-interval")
        if self.given:
            raise click.UsageError(f"{self.given[0]} has no meaning with --arrays {APART}")
        if (self.trace is None) == (self.mean_tokens is None):
            raise click.UsageError(f"--arrays {APART} needs either TRACE or --mean-tokens")
        return True


def choose_split(asked: Asked, model_options: Mapping[str, Any], max_num_seqs: int, *, is_default: bool) -> Split | None:
    """Return the split to plan, None for a plan of one pool. A split is planned if it is asked for, or by default where options
    and model permit it. Raise UsageError for options that contradict one another, UsageError or Refusal for whatever prevents a
    split that is asked for. `is_default` says that `max_num_seqs` is the default.
    """
    is_asked = asked.require_usage()
    has_requests = asked.trace is not None or asked.mean_tokens is not None
    if not is_asked and (asked.arrays is not None or asked.given or not has_requests or not asked.has_one_size):
        return None
    [interval] = asked.intervals.numbers if asked.intervals else [None]
    [memory] = asked.memory.numbers if asked.memory else [0]
    try:
        pools = read_pools(str(asked.model_config), interval=interval, **model_options)
    except (PagePoolError, OSError) as error:
        if is_asked:
            raise Refusal(str(error)) from error
        return None
    split = Split(pools, memory, asked.share, asked.mean_tokens, max_num_seqs, is_default)
    try:
        split.require_room()
    except Refusal:
        if is_asked or asked.mean_tokens is not None:
            raise
        return None
    return split


def run_split(
    split: Split, link: PlannedLink | None, trace: str | None, json_path: str | None, trace_options: Mapping[str, Any]
) -> None:
    """Plan the split, and print it with what a link from another engine takes."""
    with open_result(json_path) as json_file:
        with Progress() as progress:
            made = replace(split.plan(trace, progress, trace_options), link=link)
        if json_file:
            json_file.write(to_json(made.as_dict()))
    if json_path != "-":
        with printing():
            print_split(made, _describe_source(split, trace))


def _describe_source(split: Split, trace: str | None) -> str:
    name = "Without a trace" if trace is None else source_name(trace)
    return f"{name}: {format_bytes(split.memory)} for a pool of keys and values and one of states"

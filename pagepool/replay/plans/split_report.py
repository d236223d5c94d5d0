"""Texts and tables of a plan for a pool of keys and values and one of states."""

from collections.abc import Sequence

from rich.table import Table

from pagepool.errors import count_of
from pagepool.replay.models.pools import KV, STATES
from pagepool.replay.plans.capacity_report import MEMORY_NOTE
from pagepool.replay.plans.link_report import describe_link
from pagepool.replay.plans.splits import SplitFigures, SplitPlan, list_around
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.shared.tables import print_table, print_text

NOTE = (
    "Hit rate: the share of all prompt tokens of the trace that need not be computed, if requests run one after another in two "
    "pools. Lost for states: prompt tokens that would have hit, had no checkpoint been evicted; lost for kv: had no "
    "keys and values been. Both are about equal near the best split."
)
RULE_NOTE = (
    "Without a trace the split is that of a rule: each request has a checkpoint near the end of its prompt, and one for each "
    "interval. On recorded traces it hit up to 2 points less than the best split; for generated ones up to 6. "
    f"{MEMORY_NOTE}"
)


def describe_split(plan: SplitPlan) -> list[str]:
    """Describe the model, and the proposed split."""
    pools, chosen = plan.pools, plan.chosen
    num_tokens = round(pools.state_bytes / pools.token_bytes)
    share = f"{plan.share:.1%} of {format_bytes(plan.memory)} for states"
    token, state = format_bytes(pools.token_bytes), format_bytes(pools.state_bytes)
    sentences = [
        f"Keys and values take {token} a token, the states of a request {state}, as much as {count_of(num_tokens, 'token')}.",
        f"Checkpoints are kept near the end of a prompt, where prompts part, and every {pools.interval:,} tokens in a prompt.",
    ]
    if chosen is None:
        sentences.append(f"For requests of {plan.mean_tokens:,.0f} tokens on average: {share}.")
        num_kv, num_working = plan.count_requests()
        sentences.append(f"{num_kv:,} of them fit at once in the pool of keys and values, {num_working:,} in that of states.")
    else:
        lost = [f"{chosen.find_lost_rate(name):.1%} were lost for want of {name}" for name in (STATES, KV)]
        sentences.append(f"With {share} {chosen.hit_rate:.1%} of prompt tokens hit; {', '.join(lost)}.")
    if chosen is not None and chosen.skipped:
        sentences.append(f"{count_of(chosen.skipped, 'request')} larger than the pools are skipped.")
    num_states, num_working = plan.num_pages[STATES], min(plan.max_num_seqs, plan.num_pages[STATES] - 2)
    sentences.append(
        f"Of {num_states:,} pages of states {num_working:,} are working states of running requests, if so many run at once."
    )
    return [*sentences, *pools.fixed.describe(), *describe_link(plan.link), *plan.notes]


def show_num_pages(plan: SplitPlan) -> str:
    """Return the argument of `CacheManager`, as a line to copy."""
    sizes = ", ".join(f'"{name}": {size:_}' for name, size in plan.num_pages.items())
    return f"num_pages={{{sizes}}}"


def list_split_columns(runs: Sequence[SplitFigures]) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each split."""
    return [
        ("share of states", [f"{run.share:.1%}" for run in runs]),
        *((f"pages, {name}", [f"{run.num_pages[name]:,}" for run in runs]) for name in (KV, STATES)),
        ("hit rate", [f"{run.hit_rate:.1%}" for run in runs]),
        *((f"lost for {name}", [f"{run.find_lost_rate(name):.1%}" for run in runs]) for name in (STATES, KV)),
    ]


def print_split(plan: SplitPlan, source: str) -> None:
    """Print the proposed split, the line to copy, and the hits of splits around it."""
    print_text(source, style="bold")
    for sentence in describe_split(plan):
        print_text(sentence)
    print_text(f"\n    {show_num_pages(plan)}\n")
    around = list_around(plan.share, 0)
    nearest = {min(plan.runs, key=lambda run: abs(run.share - share)).share for share in around if plan.runs}
    runs = [run for run in plan.runs if run.share in nearest]
    if not runs:
        print_text(RULE_NOTE, style="dim")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = list_split_columns(runs)
    for heading, _ in columns:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    print_table(table)
    print_text("")
    print_text(NOTE, style="dim")

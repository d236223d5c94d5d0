"""Texts and tables of a plan, for terminal, plot and HTML page."""

from collections.abc import Iterable

from rich.table import Table

from pagepool.errors import count_of
from pagepool.replay.plans.host_report import (
    describe_speed,
    list_host_columns,
    list_host_notes,
    list_host_rates,
    name_host,
)
from pagepool.replay.plans.link_report import describe_link
from pagepool.replay.plans.plan import POLICY_NAMES, Plan, PolicyFigures
from pagepool.replay.plans.state_report import (
    describe_states,
    list_checkpoint_columns,
    list_interval_columns,
    list_state_notes,
    state_headline,
)
from pagepool.replay.plans.store_report import describe_rates, describe_store
from pagepool.replay.plans.window_report import (
    describe_window_hits,
    list_window_columns,
    list_window_notes,
    window_headline,
)
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.shared.tables import print_table, print_text

LRU_NOTE = (
    "LRU: hits of this pool, which evicts the least recently used page, if requests run one after another in the order of the "
    "trace (stack distances: Mattson and others, 1970)."
)
BEST_NOTE = (
    "Best: hits of the optimal eviction policy, which knows all future requests (Belady's MIN, 1966, for pages that hit only "
    "after pages that hit). The number is exact, not a bound: no policy hits more."
)
POLICY_NOTE = (
    "Adaptive: hits of this pool with adaptive eviction, which learns from the trace, simulated with requests one after "
    "another. No policy hits more than LRU on all traces."
)
TOGETHER_NOTE = (
    "Together: hits of a simulated scheduler with LRU that runs as many requests at once as fit, all waiting from the start. "
    "Requests that share a prefix may run before it is evicted, or evict each other's pages, so the hit rate may be higher or "
    "lower than one after another."
)

HIT_RATE = "hit rate: share of all prompt tokens"

SMALLEST_GAIN = 0.0005  # difference of hit rates: half of the last digit shown

HIT_RATE_NOTE = (
    "Hit rate: the share of all prompt tokens of the trace that need not be computed. Requests larger than the pool are "
    "skipped: their prompts count, without hits."
)


def summarize(plan: Plan) -> str:
    """Describe the trace and the page size in one line."""
    memory = "" if plan.page_bytes is None else f" and {format_bytes(plan.page_bytes)}"
    trace = f"{count_of(plan.requests, 'request')}, {count_of(plan.prompt_tokens, 'prompt token')}"
    return f"{trace}, pages of {plan.model.contents}{memory}"


def headline(plan: Plan, name: str) -> str:
    """Return the main result, for a title: at the requested size, if there is only one."""
    if plan.checkpoints:
        return state_headline(plan, name)
    if plan.windows:
        return window_headline(plan, name)
    if plan.knee is None:
        return f"{name}: no pool hits anything"
    hits = f"up to {plan.most_hit_rate:.1%} of prompt tokens hit"
    for pool in plan.pools:
        if pool.num_pages == plan.asked_num_pages:
            size = _with_bytes(plan, pool.num_pages)
            hits = f"{size} hit {pool.lru_hit_rate:.1%} of prompt tokens, at most {plan.most_hit_rate:.1%} hit"
    knee = _with_bytes(plan, plan.knee.lru_num_pages)
    return f"{name}: {hits}; beyond {knee} more memory adds little"


def describe(plan: Plan) -> list[str]:
    """Return the main results as sentences, the knee first, the link's, and unknown properties of the trace."""
    return [*_describe_results(plan), *plan.model.fixed.describe(), *describe_link(plan.link), *plan.notes]


def _describe_results(plan: Plan) -> list[str]:
    all_tokens = count_of(plan.prompt_tokens, "prompt token")
    most = f"{plan.most_hit_tokens:,} of {all_tokens} ({plan.most_hit_rate:.1%})."
    smallest = _with_bytes(plan, plan.min_num_pages)
    largest = f"The largest request needs a pool of {smallest}; smaller pools skip it."
    if plan.windows:
        return [*describe_window_hits(plan), f"A pool that never evicts, with all pages of windows, hits {most}", largest]
    if not plan.model.num_attention_groups:
        bound = f"With a state after each token a pool that never evicts would hit {most}"
        return [*describe_states(plan), bound, f"Requests of any length run in a pool of {smallest}."]
    if plan.checkpoints:
        states = [*plan.model.describe_windows(), *describe_states(plan)]
        return [*states, f"With attention alone: a pool that never evicts hits {most}", largest]
    return [
        _describe_knee(plan),
        f"A pool that never evicts hits {most}",
        largest,
        *_describe_policies(plan),
        *_describe_host(plan),
        *describe_rates(plan),
    ]


def describe_picture(plan: Plan) -> str:
    """Describe the plot for screen readers."""
    columns = dict(list_columns(plan))
    names = [f"hit rate, {name}" for name in ("LRU", "best", *_list_policies(plan))]
    names += [name for name, _ in list_host_rates(plan)]
    if plan.checkpoints:
        names = [name for name, _ in list_checkpoint_columns(plan)]
    if plan.windows:
        names = [name for name, _ in list_window_columns(plan)]
    rates = {name.removeprefix("hit rate, "): columns[name] for name in names}
    listed = "; ".join(
        f"{pages} pages: {', '.join(f'{name} {cells[i]}' for name, cells in rates.items() if cells[i])}"
        for i, pages in enumerate(columns["pages"])
    )
    return " ".join([f"{summarize(plan)}.", *describe(plan), f"{HIT_RATE.capitalize()}, by size of the pool: {listed}."])


def _describe_knee(plan: Plan) -> str:
    knee = plan.knee
    if knee is None:
        return "No prompt begins with full pages of an earlier request: no pool hits anything."
    lru, best = _with_bytes(plan, knee.lru_num_pages), _with_bytes(plan, knee.best_num_pages)
    share = f"{knee.share:.0%} of all possible hits"
    return f"{lru} give {share} if requests run one after another; the best eviction policy needs {best}."


def _list_policies(plan: Plan) -> list[str]:
    return [POLICY_NAMES[eviction] for eviction in plan.runs_by_policy]


def _describe_policies(plan: Plan) -> list[str]:
    sentences = []
    for eviction, by_size in plan.runs_by_policy.items():
        sentence = f"{POLICY_NAMES[eviction]} {_describe_runs(plan, [*by_size.values()])}"
        sentences.append(sentence[0].upper() + sentence[1:])
    return sentences


def _describe_host(plan: Plan) -> list[str]:
    """Describe the host tier's additional hits, and the time it saves per request."""
    hits = [run.hits for run in plan.host_runs]
    if not hits:
        return []
    [chosen] = [run for run in plan.host_runs if run.hits is _choose_run(hits, plan.asked_num_pages)]
    gains = [*describe_speed(plan, chosen), *describe_store(plan, chosen)]
    return [f"{name_host(plan)} {_describe_runs(plan, hits)}", *gains]


def _describe_runs(plan: Plan, runs: list[PolicyFigures]) -> str:
    if all(abs(run.gain) < SMALLEST_GAIN for run in runs):
        return "hits as much as LRU at all simulated sizes."
    chosen = _choose_run(runs, plan.asked_num_pages)
    text = f"at {_describe_run(plan, chosen)}"
    worse = [run for run in runs if run.gain <= -SMALLEST_GAIN]
    if worse not in ([], [chosen]):
        most = 100 * max(-run.gain for run in worse)
        text += f" At {len(worse)} of {count_of(len(runs), 'size')} it hits less than LRU, by up to {most:.1f} points."
    return text


def _choose_run(runs: list[PolicyFigures], asked_num_pages: int | None) -> PolicyFigures:
    """Choose the run in the requested pool; otherwise the run with the largest gain or, if none gains, the largest loss."""
    for run in runs:
        if run.pool.num_pages == asked_num_pages:
            return run
    best = max(runs, key=lambda run: run.gain)
    return best if best.gain >= SMALLEST_GAIN else min(runs, key=lambda run: run.gain)


def _describe_run(plan: Plan, run: PolicyFigures) -> str:
    size = _with_bytes(plan, run.pool.num_pages)
    rates = f"{run.hit_rate:.1%} instead of {run.pool.lru_hit_rate:.1%} of prompt tokens"
    lru = f"LRU at {_with_bytes(plan, run.lru_num_pages)}" if run.lru_num_pages else ""
    if abs(run.gain) < SMALLEST_GAIN:
        return f"{size} hits as much as LRU: {run.hit_rate:.1%} of prompt tokens."
    if run.gain < 0:
        return f"{size} hits less than LRU: {rates}{f', as {lru}' if lru else ''}."
    return f"{size} hits {f'as much as {lru}' if lru else 'more than LRU'}: {rates}."


def list_notes(plan: Plan) -> list[str]:
    """Return the notes on the columns."""
    policies = {each.eviction for each in plan.checkpoints} | {each.eviction for each in plan.windows}
    has_policies = plan.policies or policies - {"lru"}
    simulated = [POLICY_NOTE] * bool(has_policies) + [TOGETHER_NOTE] * bool(plan.replays)
    if plan.checkpoints:
        return [HIT_RATE_NOTE, *list_state_notes(plan), *simulated]
    if plan.windows:
        return [HIT_RATE_NOTE, *list_window_notes(plan), *simulated]
    return [HIT_RATE_NOTE, LRU_NOTE, BEST_NOTE, *simulated, *list_host_notes(plan)]


def list_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each pool, without empty columns."""
    pools = plan.pools_with_hits
    columns = [
        ("pages", [f"{pool.num_pages:,}" for pool in pools]),
        ("hit rate, LRU", [f"{pool.lru_hit_rate:.1%}" for pool in pools]),
        ("hit rate, best", [f"{pool.best_hit_rate:.1%}" for pool in pools]),
        ("tokens saved, LRU", [f"{pool.lru_hit_tokens:,}" for pool in pools]),
    ]
    for eviction, by_size in plan.runs_by_policy.items():
        runs = [by_size.get(pool.num_pages) for pool in pools]
        columns.insert(-2, (f"hit rate, {POLICY_NAMES[eviction]}", [f"{run.hit_rate:.1%}" if run else "" for run in runs]))
    columns[2:2] = list_host_rates(plan)
    if plan.checkpoints:
        columns = [columns[0], *list_checkpoint_columns(plan)]
    if plan.windows:
        columns = [columns[0], *list_window_columns(plan)]
    if plan.page_bytes is not None:
        columns.insert(1, ("GiB", _list_gib((pool.num_pages for pool in pools), plan.page_bytes)))
    if any(pool.skipped for pool in pools):
        columns.append(("requests skipped", [f"{pool.skipped:,}" for pool in pools]))
    if plan.replays:
        replays = [plan.replays.get(pool.num_pages) for pool in pools]
        columns.append(("hit rate, together", [f"{replay.trace_hit_rate:.1%}" if replay else "" for replay in replays]))
        columns.append(("preempted, together", [f"{replay.preemptions:,}" if replay else "" for replay in replays]))
    return columns


def list_knee_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each share."""
    columns = [("share of the hits", [f"{knee.share:.0%}" for knee in plan.knees])]
    for name in ("LRU", "best"):
        sizes = [knee.lru_num_pages if name == "LRU" else knee.best_num_pages for knee in plan.knees]
        columns.append((f"pages, {name}", [f"{size:,}" for size in sizes]))
        if plan.page_bytes is not None:
            columns.append((f"GiB, {name}", _list_gib(sizes, plan.page_bytes)))
    return columns


def list_policy_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each pool with a simulated policy; it is empty if the pool skips requests."""
    runs = plan.runs_by_policy
    sizes = [pool.num_pages for pool in plan.pools if any(pool.num_pages in by_size for by_size in runs.values())]
    columns = [("pages", [f"{size:,}" for size in sizes])]
    for eviction, by_size in runs.items():
        found = [by_size[size].lru_num_pages if size in by_size else None for size in sizes]
        columns.append((f"LRU pages for the hits of {POLICY_NAMES[eviction]}", [f"{size:,}" if size else "" for size in found]))
    return columns


def _list_gib(sizes: Iterable[int], page_bytes: int) -> list[str]:
    return [f"{size * page_bytes / 2**30:,.1f}" for size in sizes]


def _with_bytes(plan: Plan, num_pages: int) -> str:
    return f"{num_pages:,} pages{plan.show_bytes(num_pages)}"


def _print_columns(title: str, columns: list[tuple[str, list[str]]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, _ in columns:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    print_text(title)
    print_table(table)
    print_text("")


def print_plan(plan: Plan, source: str) -> None:
    """Print the main results, a row for each pool, and notes on the columns."""
    print_text(f"{source}: {summarize(plan)}", style="bold")
    for sentence in describe(plan):
        print_text(sentence)
    print_text("")
    _print_columns(HIT_RATE.capitalize(), list_columns(plan))
    if plan.checkpoints:
        _print_columns(*list_interval_columns(plan))
    if plan.host_runs:
        _print_columns(*list_host_columns(plan))
    for note in list_notes(plan):
        print_text(note, style="dim")

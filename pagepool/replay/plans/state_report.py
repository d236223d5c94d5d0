"""Texts and tables of a plan for a model with states."""

from pagepool.errors import count_of
from pagepool.replay.plans.plan import CheckpointFigures, Plan
from pagepool.replay.shared.sizes import format_bytes

__all__ = [
    "CHECKPOINT_NOTE",
    "describe_states",
    "list_checkpoint_columns",
    "list_interval_columns",
    "name_intervals",
    "state_headline",
]

CHECKPOINT_NOTE = (
    "Every N: hits of this pool with LRU if states are kept after multiples of N tokens at which a step ends, simulated with "
    "requests one after another. A step ends at the last multiple within it. Attention alone: hits of this pool if the model "
    "had no states (stack distances)."
)


def state_headline(plan: Plan, name: str) -> str:
    """Return the main result, for a title."""
    best = max(plan.checkpoints, key=lambda each: each.hit_tokens)
    if not best.hit_tokens:
        return f"{name}: no checkpoint hits anything"
    return (
        f"{name}: checkpoints every {best.interval:,} tokens hit up to {plan.find_checkpoint_rate(best):.1%} of prompt tokens"
    )


def describe_states(plan: Plan) -> list[str]:
    """Describe the pages, what a checkpoint takes, and the best interval."""
    model, num_pages = plan.model, plan.model.num_state_groups
    states = "all states of a request" if num_pages == 1 else f"the states of one of {num_pages} groups of layers"
    padding = f" {_describe_padding(plan)}" if model.state_bytes is not None else ""
    pages = count_of(num_pages, "page")
    memory = "" if plan.page_bytes is None else f" ({format_bytes(num_pages * plan.page_bytes)})"
    taken = f"{pages}{memory}, as much as {count_of(num_pages * model.page_size, 'token')} of attention"
    return [
        f"A page holds {count_of(model.page_size, 'token')} of attention, or {states}.{padding}",
        f"A checkpoint takes {taken}; a running request holds {pages} for its states.",
        _describe_best(plan),
    ]


def _describe_padding(plan: Plan) -> str:
    model, page_bytes = plan.model, plan.model.page_bytes or 1
    shares = {"tokens": model.attention_bytes, "states": model.state_bytes}
    parts = [f"{1 - (used or 0) / page_bytes:.1%} of a page of {kind}" for kind, used in shares.items() if used != page_bytes]
    return f"Padding is {' and '.join(parts)}." if parts else "Neither is padded."


def _choose_runs(plan: Plan) -> list[CheckpointFigures]:
    """Return the figures of the pool that was asked for, otherwise of the largest, by interval."""
    num_pages = plan.asked_num_pages or max(each.num_pages for each in plan.checkpoints)
    return [each for each in plan.checkpoints if each.num_pages == num_pages]


def _describe_best(plan: Plan) -> str:
    runs = _choose_runs(plan)
    best = max(runs, key=lambda each: each.hit_tokens)
    memory = "" if plan.page_bytes is None else f" ({format_bytes(best.num_pages * plan.page_bytes)})"
    if not best.hit_tokens:
        return f"At {best.num_pages:,} pages{memory} no checkpoint hits anything."
    rate, share = plan.find_checkpoint_rate(best), best.kept_pages / best.num_pages
    intervals = f"of {count_of(len(runs), 'interval')} " if len(runs) > 1 else ""
    return (
        f"At {best.num_pages:,} pages{memory} checkpoints every {best.interval:,} tokens hit most {intervals}: {rate:.1%} of "
        f"prompt tokens; in the end {share:.1%} of the pool were checkpoints."
    ).replace(" :", ":")


def name_intervals(plan: Plan) -> dict[int, str]:
    """Return a name for each interval."""
    return {interval: f"every {interval:,}" for interval in plan.checkpoints_by_interval}


def list_checkpoint_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each pool: the hit rate by interval, and that of attention alone."""
    columns = []
    for interval, by_size in plan.checkpoints_by_interval.items():
        runs = [by_size.get(pool.num_pages) for pool in plan.pools]
        cells = [f"{plan.find_checkpoint_rate(run):.1%}" if run else "" for run in runs]
        columns.append((f"hit rate, {name_intervals(plan)[interval]}", cells))
    return [*columns, ("hit rate, attention alone", [f"{pool.lru_hit_rate:.1%}" for pool in plan.pools])]


def list_interval_columns(plan: Plan) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return a caption, and headings with a cell for each interval: hits and checkpoints in one pool."""
    runs = _choose_runs(plan)
    columns = [
        ("checkpoint every", [f"{run.interval:,}" for run in runs]),
        ("hit rate", [f"{plan.find_checkpoint_rate(run):.1%}" for run in runs]),
        ("tokens saved", [f"{run.hit_tokens:,}" for run in runs]),
        ("pages of checkpoints", [f"{run.kept_pages:,}" for run in runs]),
        ("states copied", [f"{run.copied_pages:,}" for run in runs]),
    ]
    if plan.page_bytes is not None:
        columns.insert(4, ("GiB of checkpoints", [f"{run.kept_pages * plan.page_bytes / 2**30:,.1f}" for run in runs]))
    return f"By interval of checkpoints, with {runs[0].num_pages:,} pages", columns

"""Texts and tables of a plan for a model with states."""

from pagepool.errors import count_of
from pagepool.replay.plans.plan import POLICY_NAMES, CheckpointFigures, Plan

CHECKPOINT_NOTE = (
    "Every N: hits of this pool with LRU, unless a policy is named, if states are kept where requests resume and every N "
    "tokens of a prompt, simulated with requests one after another."
)
ALONE_NOTE = "Attention alone: LRU hits of this pool if the model had no states (stack distances)."


def state_headline(plan: Plan, name: str) -> str:
    """Return the main result, for a title: at the requested size, if there is only one."""
    runs = _choose_runs(plan) if plan.asked_num_pages else plan.checkpoints
    best = max(runs, key=lambda each: each.hit_tokens)
    place = f" at {best.num_pages:,} pages{plan.show_bytes(best.num_pages)}" if plan.asked_num_pages else ""
    if not best.hit_tokens:
        return f"{name}: no checkpoint hits anything{place}"
    policy = "" if best.eviction == "lru" else f" with {POLICY_NAMES[best.eviction]} eviction"
    hit = f"hit {plan.find_simulated_rate(best):.1%}" if place else f"hit up to {plan.find_simulated_rate(best):.1%}"
    return f"{name}: checkpoints every {best.interval:,} tokens{policy} {hit} of prompt tokens{place}"


def describe_states(plan: Plan) -> list[str]:
    """Describe the pages, the memory of a checkpoint, and the best interval for each policy."""
    pages = count_of(plan.model.num_state_groups, "page")
    return [
        _describe_page(plan),
        *_describe_arrays(plan),
        f"A checkpoint takes {pages}{_describe_size(plan)}; a running request holds {pages} for its states.",
        *(_describe_best(plan, eviction) for eviction in dict.fromkeys(each.eviction for each in plan.checkpoints)),
    ]


def _describe_page(plan: Plan) -> str:
    model = plan.model
    of_groups = f" of one of {model.num_state_groups} groups of layers"
    states = f"the states{of_groups}" if model.num_state_groups > 1 else "all states of a request"
    if not model.num_attention_groups:
        return f"A page holds {states}."
    layers = f", in one of {model.num_attention_groups} groups of layers" if model.num_attention_groups > 1 else ""
    padding = f" {_describe_padding(plan)}" if model.state_bytes is not None else ""
    return f"A page holds {count_of(model.page_size, 'token')} of attention{layers}, or {states}.{padding}"


def _describe_arrays(plan: Plan) -> list[str]:
    num_groups = plan.model.num_groups
    if plan.page_bytes is None or num_groups == 1:
        return []
    if plan.arrays == "separate":
        unused = 1 - 1 / num_groups
        return [f"Each layer has an array with a row for each page id. One group of layers uses it: {unused:.0%} lies unused."]
    more = f"arrays of one layer each would take {num_groups:.1f} times that (--arrays separate)"
    return [f"Bytes of a page are laid over each other; {more}. Two pools avoid both (--arrays apart)."]


def _describe_size(plan: Plan) -> str:
    """Describe the bytes of a checkpoint, and the number of attention tokens of equal size."""
    model = plan.model
    memory = plan.show_bytes(model.num_state_groups)
    if not model.num_attention_groups:
        return memory
    num_tokens = round(model.num_state_groups * model.page_size / model.num_attention_groups)
    return f"{memory}, as much as {count_of(num_tokens, 'token')} of attention"


def _describe_padding(plan: Plan) -> str:
    model, page_bytes = plan.model, plan.model.page_bytes or 1
    shares = {"tokens": model.attention_bytes, "states": model.state_bytes}
    parts = [f"{1 - (used or 0) / page_bytes:.1%} of a page of {kind}" for kind, used in shares.items() if used != page_bytes]
    return f"Padding is {' and '.join(parts)}." if parts else "Neither is padded."


def _choose_runs(plan: Plan) -> list[CheckpointFigures]:
    """Return the figures of the requested pool, otherwise of the largest, by policy and interval."""
    num_pages = plan.asked_num_pages or max(each.num_pages for each in plan.checkpoints)
    return [each for each in plan.checkpoints if each.num_pages == num_pages]


def _describe_best(plan: Plan, eviction: str) -> str:
    runs = [run for run in _choose_runs(plan) if run.eviction == eviction]
    best = max(runs, key=lambda each: each.hit_tokens)
    memory = plan.show_bytes(best.num_pages)
    place = f"{'At' if eviction == 'lru' else f'With {POLICY_NAMES[eviction]} eviction at'} {best.num_pages:,} pages{memory}"
    if not best.hit_tokens:
        return f"{place} no checkpoint hits anything."
    rate, share = plan.find_simulated_rate(best), best.kept_pages / best.num_pages
    intervals = f"of {count_of(len(runs), 'interval')} " if len(runs) > 1 else ""
    return (
        f"{place} checkpoints every {best.interval:,} tokens hit most {intervals}: {rate:.1%} of "
        f"prompt tokens; in the end {share:.1%} of the pool were checkpoints."
    ).replace(" :", ":")


def name_runs(plan: Plan) -> dict[tuple[str, int], str]:
    """Return a name for each policy and interval."""
    return {
        (eviction, interval): f"every {interval:,}{'' if eviction == 'lru' else f', {POLICY_NAMES[eviction]}'}"
        for eviction, interval in plan.checkpoint_runs
    }


def list_state_notes(plan: Plan) -> list[str]:
    """Return the notes on the columns of hit rates."""
    return [CHECKPOINT_NOTE, *([ALONE_NOTE] if plan.model.num_attention_groups else [])]


def list_checkpoint_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each pool: the hit rate by policy and interval, and the hit rate of attention alone."""
    columns = plan.list_rate_columns(name_runs(plan), plan.checkpoint_runs)
    if plan.model.num_attention_groups:
        columns.append(("hit rate, attention alone", [f"{pool.lru_hit_rate:.1%}" for pool in plan.pools]))
    return columns


def list_interval_columns(plan: Plan) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return a caption, and headings with a cell for each policy and interval: hits and checkpoints in one pool."""
    runs = _choose_runs(plan)
    columns = [
        ("checkpoint every", [f"{run.interval:,}" for run in runs]),
        ("hit rate", [f"{plan.find_simulated_rate(run):.1%}" for run in runs]),
        ("tokens saved", [f"{run.hit_tokens:,}" for run in runs]),
        ("pages of checkpoints", [f"{run.kept_pages:,}" for run in runs]),
        ("states copied", [f"{run.copied_pages:,}" for run in runs]),
    ]
    if plan.page_bytes is not None:
        columns.insert(4, ("GiB of checkpoints", [f"{run.kept_pages * plan.page_bytes / 2**30:,.1f}" for run in runs]))
    if any(run.eviction != "lru" for run in runs):
        columns.insert(1, ("eviction", [POLICY_NAMES[run.eviction] for run in runs]))
    return f"By interval of checkpoints, with {runs[0].num_pages:,} pages", columns

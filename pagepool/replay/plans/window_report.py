"""Texts and tables of a plan for a model with windows or chunks."""

from pagepool.errors import count_of
from pagepool.replay.plans.plan import POLICY_NAMES, Plan, PoolFigures

ENDS_NOTE = (
    "LRU: hits of this pool with all groups of the model, simulated with requests one after another. Of windows and "
    'chunks only pages stay cached with which a request can resume (windows="ends" of Retention).'
)
ALL_NOTE = 'All: the same with LRU if each page of a window stays cached when it leaves it (windows="all").'
BOUND_NOTE = (
    "Bound: hits of the optimal eviction policy, which knows the future, if windows took no memory. No policy hits more."
)


def window_headline(plan: Plan, name: str) -> str:
    """Return the main result, for a title. If only one size was requested, it is the result at that size."""
    asked = plan.asked_num_pages
    best = max((each for each in plan.windows if asked in (None, each.num_pages)), key=lambda each: each.hit_tokens)
    hits = f"{POLICY_NAMES[best.eviction]} hits {'' if asked else 'up to '}{plan.find_simulated_rate(best):.1%}"
    return f"{name}: {hits} of prompt tokens with {best.num_pages:,} pages{plan.show_bytes(best.num_pages) if asked else ''}"


def name_window_runs(plan: Plan) -> dict[tuple[str, str], str]:
    """Return a name for each policy and rule."""
    return {
        (eviction, windows): POLICY_NAMES[eviction] if windows == "ends" else f"{POLICY_NAMES[eviction]}, all"
        for eviction, windows in plan.window_runs
    }


def describe_window_hits(plan: Plan) -> list[str]:
    """Describe the layers with windows, their memory, the hits by each rule in one pool, and the argument of a manager."""
    paste = f"To paste into CacheManager: retention={plan.model.retention}"
    return [*plan.model.describe_windows(), _describe_pages(plan), *_describe_hits(plan), paste]


def _describe_pages(plan: Plan) -> str:
    model, page_bytes = plan.model, plan.page_bytes
    num_pages = sum(each.count_pages(model.step_tokens) for each in model.windows)
    steps = f"in steps of {count_of(model.step_tokens, 'token')}"
    held = f"A running request holds up to {count_of(num_pages, 'page')}{plan.show_bytes(num_pages)} for them {steps}."
    unused = {each.num_bytes: each for each in model.windows if page_bytes and each.num_bytes not in (None, page_bytes)}
    parts = [f"{1 - (used or 0) / (page_bytes or 1):.1%} of a page of {each.tokens}" for used, each in unused.items()]
    if model.attention_bytes not in (None, page_bytes) and page_bytes:
        parts.append(f"{1 - (model.attention_bytes or 0) / page_bytes:.1%} of a page of full attention")
    return f"{held} Padding is {' and '.join(parts)}." if parts else held


def _choose_pool(plan: Plan) -> PoolFigures:
    """Return the requested pool, or the pool with the largest gain from the rule."""
    runs = plan.window_runs
    ends, kept = runs["lru", "ends"], runs["lru", "all"]
    best = max(ends, key=lambda num_pages: ends[num_pages].hit_tokens - kept[num_pages].hit_tokens)
    chosen = plan.asked_num_pages if plan.asked_num_pages in ends else best
    [pool] = [pool for pool in plan.pools if pool.num_pages == chosen]
    return pool


def _describe_hits(plan: Plan) -> list[str]:
    pool, runs = _choose_pool(plan), plan.window_runs
    rates = {key: f"{plan.find_simulated_rate(by_size[pool.num_pages]):.1%}" for key, by_size in runs.items()}
    adaptive = f", adaptive {rates['adaptive', 'ends']}" if ("adaptive", "ends") in rates else ""
    place = f"At {pool.num_pages:,} pages{plan.show_bytes(pool.num_pages)}"
    hits = f"{place} LRU hits {rates['lru', 'ends']} of prompt tokens{adaptive}"
    sentences = [f"{hits}. If all pages of windows stayed cached, LRU would hit {rates['lru', 'all']}."]
    if plan.model.num_attention_groups:
        sentences.append(f"If windows took no memory, no policy would hit more than {pool.best_hit_rate:.1%} there.")
    return sentences


def list_window_notes(plan: Plan) -> list[str]:
    """Return the notes on the columns."""
    return [ENDS_NOTE, ALL_NOTE, *([BOUND_NOTE] if plan.model.num_attention_groups else [])]


def list_window_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return headings with a cell for each pool: the hit rate by policy and rule, and the bound."""
    columns = plan.list_rate_columns(name_window_runs(plan), plan.window_runs)
    if plan.model.num_attention_groups:
        columns.append(("hit rate, bound", [f"{pool.best_hit_rate:.1%}" for pool in plan.pools]))
    return columns

"""Texts of a store behind the host tier of a plan."""

from pagepool.replay.plans.plan import HostRun, Plan
from pagepool.replay.shared.sizes import format_bytes

STORE_NOTE = (
    "Tokens more with store: at most the hits of an LRU pool with the pages of pool, tier and store, less those of pool and "
    "tier. A page that is in several of them takes room in each, so a store adds less."
)


def describe_rates(plan: Plan) -> list[str]:
    """Describe which stores load faster than prefill computes, and whether the requested store does."""
    store, token_bytes = plan.store, plan.token_bytes
    if store is None or token_bytes is None or store.prefill_rate is None:
        return []
    least = f"{format_bytes(round(store.prefill_rate * token_bytes))}/s"
    text = f"A token takes {format_bytes(round(token_bytes))}: at {store.prefill_rate:,} tokens/s a store pays from {least} on."
    if store.bandwidth is None:
        return [text]
    rate = store.bandwidth / token_bytes
    speed = (
        f"One of {format_bytes(store.bandwidth)}/s loads {rate:,.0f} tokens/s, {rate / store.prefill_rate:,.2g} times as many"
    )
    if store.pays(token_bytes):
        return [f"{text} {speed}: its loads pay."]
    return [f"{text} {speed}: its loads pay only where they end while requests wait for their turn."]


def describe_store(plan: Plan, run: HostRun) -> list[str]:
    """Describe the hits that a store of the requested size adds behind pool and tier, and their time at its speed."""
    store, more, pool, host = plan.store, run.num_store_tokens, run.hits.pool, plan.host
    if store is None or store.num_pages is None or more is None or host is None:
        return []
    rate, most = run.hits.hit_rate, run.store_hit_rate
    size = f"{store.num_pages:,} pages{plan.show_bytes(store.num_pages)}"
    tokens = more / max(1, pool.requests)
    text = (
        f"Behind {pool.num_pages:,} pages and {host}, a store of {size} adds at most {100 * (most - rate):.1f} points: "
        f"{most:.1%} instead of {rate:.1%} of prompt tokens, {tokens:,.0f} more a request."
    )
    if store.bandwidth is None or store.prefill_rate is None or plan.token_bytes is None:
        return [text]
    load, compute = tokens * plan.token_bytes / store.bandwidth, tokens / store.prefill_rate
    return [f"{text} To load them takes {load:.2f} s, to compute them {compute:.2f} s."]


def list_store_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return a heading with a cell for each pool, if the store has a size."""
    if plan.store is None or plan.store.num_pages is None:
        return []
    more = [run.num_store_tokens for run in plan.host_runs]
    return [("tokens more with store", ["" if each is None else f"{each:,}" for each in more])]


def list_store_notes(plan: Plan) -> list[str]:
    """Return the notes on the columns."""
    return [STORE_NOTE] if plan.host_runs and list_store_columns(plan) else []

"""Texts and tables of the host tier of a plan."""

from pagepool.replay.plans.plan import HostRun, Plan
from pagepool.replay.plans.store_report import list_store_columns, list_store_notes
from pagepool.replay.shared.sizes import format_bytes

HOST_NOTE = (
    "With host: hits of this pool with LRU and the host tier behind it, simulated with requests one after another. A page that "
    "is evicted is saved there, and loaded for a prompt that hits it; then it is in both. Other columns are of the pool alone."
)
SPEED_NOTE = (
    "Seconds saved a request: prefill of the tokens that hit with the tier and not without it, less the time to move all pages "
    "that are loaded and saved, one after another. Transfers that overlap with computation cost less."
)


def name_host(plan: Plan) -> str:
    """Name LRU with the host tier."""
    return f"LRU with {plan.host}"


def describe_speed(plan: Plan, run: HostRun) -> list[str]:
    """Describe the time that the tier saves per request, at the requested speeds, if any."""
    speed, pool, moved = plan.speed, run.hits.pool, run.moved
    if speed is None or moved.loaded_bytes is None or moved.saved_bytes is None:
        return []
    seconds, num_tokens = run.find_seconds(speed), run.num_more_tokens / max(1, pool.requests)
    loaded, saved = (format_bytes(count // max(1, pool.requests)) for count in (moved.loaded_bytes, moved.saved_bytes))
    gain = f"saves {seconds:.2f} s" if seconds >= 0 else f"costs {-seconds:.2f} s"
    speeds = f"{speed.prefill_rate:,} tokens/s and {format_bytes(speed.bandwidth)}/s"
    prefill = f"{num_tokens / speed.prefill_rate:.2f} s of prefill for {num_tokens:,.0f} more tokens that hit"
    transfers = f"{run.find_transfer_seconds(speed):.2f} s to load {loaded} and save {saved}"
    return [f"At {speeds} the tier {gain} a request behind {pool.num_pages:,} pages: {prefill}, less {transfers}."]


def list_host_notes(plan: Plan) -> list[str]:
    """Return the notes on the columns."""
    return [
        *([HOST_NOTE] if plan.host_runs else []),
        *([SPEED_NOTE] if plan.host_runs and plan.speed else []),
        *list_store_notes(plan),
    ]


def list_host_rates(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return a heading with a cell for each pool, if there is a tier."""
    return [("hit rate, with host", [f"{run.hits.hit_rate:.1%}" for run in plan.host_runs])] if plan.host_runs else []


def list_host_columns(plan: Plan) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return a caption, and headings with a cell for each pool: traffic between pool and tier."""
    runs = plan.host_runs
    columns = [
        ("pages", [f"{run.hits.pool.num_pages:,}" for run in runs]),
        ("tokens more", [f"{run.num_more_tokens:,}" for run in runs]),
        ("LRU pages as good", [f"{run.hits.lru_num_pages:,}" if run.hits.lru_num_pages else "" for run in runs]),
        ("pages loaded", [f"{run.moved.loaded_pages:,}" for run in runs]),
        ("pages saved", [f"{run.moved.saved_pages:,}" for run in runs]),
    ]
    if plan.page_bytes is not None:
        columns[4:4] = [("GiB loaded", [_format_gib(run.moved.loaded_bytes) for run in runs])]
        columns[6:6] = [("GiB saved", [_format_gib(run.moved.saved_bytes) for run in runs])]
    if any(run.moved.refused_pages for run in runs):
        columns.append(("pages refused", [f"{run.moved.refused_pages:,}" for run in runs]))
    if plan.speed is not None:
        seconds = [round(run.find_seconds(plan.speed), 2) for run in runs]
        columns.append(("seconds saved a request", [f"{each + 0:.2f}" for each in seconds]))  # turns -0.0 into 0.0
    return f"With {plan.host}, by size of the pool", [*columns, *list_store_columns(plan)]


def _format_gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:,.1f}"

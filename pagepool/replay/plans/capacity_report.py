"""Texts and the table of a plan without a trace."""

from rich.table import Table

from pagepool.errors import count_of
from pagepool.replay.plans.capacity import Capacity
from pagepool.replay.plans.link_report import describe_link
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.shared.tables import print_table, print_text

MEMORY_NOTE = (
    "The memory is that of the cache alone: first subtract weights, activations and what the engine reserves from that of the "
    "device."
)
NOTE = (
    "Requests: those that fit at once, if none shares a prefix with another one and none is cached after its end. A trace "
    f"shows how many pages of past requests pay. {MEMORY_NOTE}"
)


def describe_capacity(plan: Capacity) -> list[str]:
    """Describe what a token and a request take."""
    model = plan.model
    request = f"A request of {count_of(plan.mean_tokens, 'token')} takes {count_of(plan.num_request_pages, 'page')}"
    if model.page_bytes is None or plan.token_bytes is None:
        sentences = [f"A page has {model.contents}.", f"{request}."]
    else:
        where = " in the layers of full attention" if model.windows or model.num_state_groups else ""
        token = f", a token {format_bytes(plan.token_bytes)}{where}" if model.num_attention_groups else ""
        sentences = [
            f"A page of {model.contents} takes {format_bytes(model.page_bytes)}{token}.",
            f"{request} ({format_bytes(plan.num_request_pages * model.page_bytes)}).",
        ]
    if plan.num_peak_pages > plan.num_request_pages:
        step = count_of(model.step_tokens, "token")
        sentences.append(f"In steps of {step} of its prompt it takes {count_of(plan.num_peak_pages, 'page')}.")
    if model.num_state_groups:
        sentences.append(f"States and tokens are in one pool (--arrays {plan.arrays}).")
        sentences.append(f"Its states take {model.num_state_groups:,} of these; checkpoints take as many each.")
    return [*model.describe_windows(), *sentences, *model.fixed.describe(), *describe_link(plan.link)]


def print_capacity(plan: Capacity) -> None:
    """Print what a request takes, and how many fit in each pool."""
    print_text(f"Without a trace: requests of {count_of(plan.mean_tokens, 'token')}", style="bold")
    for sentence in describe_capacity(plan):
        print_text(sentence)
    if plan.sizes:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        page_bytes = plan.model.page_bytes
        for heading in ("pages", *([] if page_bytes is None else ["memory"]), "requests", "tokens"):
            table.add_column(heading, justify="right", no_wrap=True)
        for size in plan.sizes:
            num_requests = plan.count_requests(size)
            memory = [] if page_bytes is None else [format_bytes(size * page_bytes)]
            table.add_row(f"{size:,}", *memory, f"{num_requests:,}", f"{num_requests * plan.mean_tokens:,}")
        print_text("")
        print_table(table)
    print_text("")
    print_text(NOTE, style="dim")

"""Texts of a link between engines."""

from pagepool.errors import count_of
from pagepool.replay.plans.link import PROMPTS, PlannedLink
from pagepool.replay.shared.sizes import format_bytes


def describe_link(link: PlannedLink | None) -> list[str]:
    """Describe at which lengths moving a prompt from another engine pays, and the time of some lengths either way."""
    if link is None:
        return []
    sizes = [(link.token_bytes, "a token"), (link.end_bytes, "at its end")]
    takes = " and ".join(f"{format_bytes(round(size))} {where}" for size, where in sizes if size)
    least = link.find_least_tokens()
    lengths = "at no length" if least is None else f"from {count_of(least, 'token')} on"
    speeds = f"at {link.prefill_rate:,} tokens/s a link of {format_bytes(link.bandwidth)}/s from another engine"
    return [f"A prompt takes {takes}: {speeds} pays {lengths}.", *(_describe_prompt(link, each) for each in PROMPTS)]


def _describe_prompt(link: PlannedLink, num_tokens: int) -> str:
    move, compute = link.find_seconds(num_tokens)
    size, least = link.model.count_prompt_bytes(num_tokens), link.find_least_bandwidth(num_tokens)
    moved, rate = format_bytes(size), format_bytes(round(least))
    return f"{num_tokens:,} tokens: {move:,.2f} s to move {moved}, {compute:,.2f} s to compute; a link pays from {rate}/s on."

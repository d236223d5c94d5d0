"""Output of the command: a line for each step, the answers, and the figures of the cache."""

from collections.abc import Mapping, Sequence

from beams import Beam, BeamSearch
from engine import Engine
from request import Request
from text import decode

__all__ = ["Answer", "find_symbol", "print_answers", "print_figures"]

Answer = Request | BeamSearch


def find_symbol(engine: Engine, answer: Answer, streamed: Mapping[Request, Sequence[int]]) -> str:
    """Return one character for the state of an answer in this step."""
    if isinstance(answer, BeamSearch):
        num_running = sum(beam in engine.scheduler.running for beam in answer.beams)
        return f"{num_running}"[-1] if num_running else " "
    if answer in streamed:
        return decode(streamed[answer][-1:]).replace(" ", "_").replace("\n", "|")
    if answer in engine.scheduler.running:
        return "."
    return "-" if answer in engine.scheduler.waiting and answer.row >= 0 else " "


def print_answers(answers: Sequence[Answer]) -> None:
    """Print the answers; those of a beam search with scores, best first."""
    print("\nPrompt -> answer (tokens cached, or shared by a fork, at the request's last admission)")
    for answer in answers:
        for request in answer.beams if isinstance(answer, BeamSearch) else [answer]:
            prompt, text = decode(request.token_ids[: request.num_prompt_tokens]), decode(request.output)
            score = f", score {request.score:.4f}" if isinstance(request, Beam) else ""
            print(f"{prompt!r} -> {text!r} ({request.num_cached_tokens}{score})")


def print_figures(engine: Engine) -> None:
    """Print the statistics of the cache since the start."""
    stats = engine.manager.stats()
    first, again = stats.queries, stats.preempted_queries
    print(f"Cached prompt tokens: {first.num_hit_tokens} of {first.num_queried_tokens} ({first.hit_rate:.1%}).")
    print(f"Preemptions: {engine.scheduler.num_preemptions}. Cached tokens at readmission: {again.num_hit_tokens}.")
    print(f"Copied pages: {engine.num_copied_pages}. Evicted pages: {stats.num_evicted_pages}.")
    print(engine.sharing.describe())
    print_memory(engine)
    if engine.host_tier is not None:
        tier = engine.host_tier.stats()
        print(f"Pages saved to the host: {tier.num_saved_pages}. Loaded pages: {tier.num_loaded_pages}.")
    if stats.store is not None:
        found = f"{stats.store.num_found_pages} of {stats.store.num_looked_up_pages} found"
        print(f"Pages in the store: {stats.store.num_saved_pages} saved, {found}, {stats.store.num_loaded_pages} loaded.")
    print()


def print_memory(engine: Engine) -> None:
    """Print the bytes of the arrays, and with several pools what they would be if each array had a row for each page."""
    page_bytes = engine.runner.count_page_bytes()
    if len(engine.manager.pools) == 1:
        print(f"Memory of the cache: {engine.manager.num_pages * sum(page_bytes):,} bytes.")
        return
    sizes = [pool.num_pages for pool in engine.manager.pools.values()]
    num_bytes = sum(num_pages * size for num_pages, size in zip(sizes, page_bytes, strict=True))
    one_range = engine.manager.num_pages * sum(page_bytes)
    print(f"Memory of the cache: {num_bytes:,} bytes. With one range of page ids: {one_range:,} bytes.")

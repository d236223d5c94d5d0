"""The command line of the engine: prompts in, streamed tokens and figures out."""

import string
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from attention import attend_by_gather, attend_by_pallas
from engine import Engine
from model import load_weights, make_weights
from request import Request, SamplingParams
from stopwatch import Stopwatch, format_profile

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Each character is a token."""

ATTENTIONS = {"gather": attend_by_gather, "pallas": attend_by_pallas}

PARTS = {"allocator": "batch", "commit": "table", "model": "runner"}
"""The parts that `--profile` times, and the engine's attributes for them."""

SYSTEM_PROMPT = "You keep the pages of a cache. Answer briefly. "
QUESTIONS = (
    "Who owns page 7?",
    "Who owns page 7, and who did before?",
    "Which prefix is the longest that is cached?",
    "How many pages does a prompt of 8,192 tokens need?",
    "What is evicted first?",
    "Who gives way when pages are short, the oldest or the newest?",
    "Is page 0 ever handed out?",
    "What does a step cost?",
)

HELP = """Generate text with a small transformer and a paged KV cache. Weights, and therefore the text, are random without
--weights. The default prompts share prefixes, and the pool is too small for all of them at once, so the output shows prefix
hits, evictions and preemptions."""


def make_parser() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = ArgumentParser("engine.py", description=HELP)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="printable ASCII (default: eight questions)")

    def add(name: str, default: float | str, text: str, **options: Any) -> None:
        parser.add_argument(name, default=default, type=type(default), help=f"{text} (default: {default})", **options)

    add("--max-tokens", 32, "tokens to generate for each prompt")
    add("--temperature", 0.0, "0 is greedy")
    add("--top-k", 0, "sample from the k most likely tokens; 0: from all")
    add("--seed", 0, "seed of the random weights; the first prompt samples with it, the second with seed + 1, and so on")
    parser.add_argument("--stop", metavar="CHARACTER", help="end an answer at this character")
    parser.add_argument("--weights", type=Path, metavar="FILE.npz", help="weights saved by numpy.savez: see AXES in model.py")
    add("--attention", "gather", "plain jnp, or jax's GPU kernel, interpreted on other devices", choices=list(ATTENTIONS))
    add("--num-devices", 1, "number of devices over which the heads are divided")
    add("--num-pages", 48, "pages of the KV cache, including the null page")
    add("--page-size", 8, "tokens in a page")
    add("--max-num-reqs", 6, "maximum number of requests running at once")
    add("--max-num-batched-tokens", 64, "maximum number of tokens computed in a step")
    add("--max-model-len", 256, "maximum number of tokens in a prompt and its answer")
    parser.add_argument("--profile", action="store_true", help="print the shares of allocator, commit and model in a step")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the prompts. Exits with a message and code 2 for arguments that cannot work."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        engine = make_engine(args)
        requests = add_prompts(engine, args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    engine.warmup()
    watches = {part: Stopwatch(getattr(engine, name)) for part, name in PARTS.items()} if args.profile else {}
    for part, watch in watches.items():
        setattr(engine, PARTS[part], watch)
    step_seconds = run(engine, requests, watches)
    print_answers(engine, requests)
    if args.profile:
        print(format_profile({part: watch.laps for part, watch in watches.items()}, step_seconds))


def make_engine(args: Namespace) -> Engine:
    """Make the engine for these arguments. ValueError or OSError if they cannot work."""
    weights = make_weights(args.seed) if args.weights is None else load_weights(args.weights)
    if len(weights["embedding"]) != len(ALPHABET):
        raise ValueError(f"weights: got a vocabulary of {len(weights['embedding'])}, allowed: {len(ALPHABET)}, 1 per character")
    return Engine(
        weights,
        num_pages=args.num_pages,
        page_size=args.page_size,
        max_num_reqs=args.max_num_reqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        attend=ATTENTIONS[args.attention],
        num_devices=args.num_devices,
    )


def add_prompts(engine: Engine, args: Namespace) -> list[Request]:
    """Queue a request for each prompt. ValueError for one that cannot run."""
    prompts = args.prompts or [SYSTEM_PROMPT + question for question in QUESTIONS]
    if args.stop is not None and len(args.stop) != 1:
        raise ValueError(f"--stop: got {args.stop!r}, allowed: one character")
    stop_token_id = None if args.stop is None else encode(args.stop)[0]
    requests = []
    for seed, prompt in enumerate(prompts, args.seed):
        params = SamplingParams(args.max_tokens, args.temperature, args.top_k, seed, stop_token_id)
        requests.append(engine.add(encode(prompt), params))
    return requests


def encode(text: str) -> list[int]:
    """Return the token ids of a text. ValueError for a character outside the alphabet."""
    wrong = [character for character in text if character not in ALPHABET]
    if wrong:
        raise ValueError(f"text: got {wrong[0]!r}, allowed: printable ASCII and newline")
    return [ALPHABET.index(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of token ids."""
    return "".join(ALPHABET[token_id] for token_id in token_ids)


def run(engine: Engine, requests: Sequence[Request], watches: Mapping[str, Stopwatch]) -> list[float]:
    """Step until no request is left, and print a line for each step. Returns the seconds of each step."""
    step_seconds = []
    print("Each column is a request: `.` computes its prompt, `-` is preempted; otherwise its new token.")
    print("step  pages used")
    while engine.waiting or engine.running:
        start = perf_counter()
        streamed = dict(engine.step())
        step_seconds.append(perf_counter() - start)
        for watch in watches.values():
            watch.end_lap()
        symbols = [find_symbol(engine, request, streamed) for request in requests]
        print(f"{len(step_seconds):>4}  {engine.manager.usage:>9.0%}   {' '.join(symbols)}".rstrip(), flush=True)
    return step_seconds


def find_symbol(engine: Engine, request: Request, streamed: Mapping[Request, int]) -> str:
    """Return one character for the state of a request in this step."""
    if request in streamed:
        return decode([streamed[request]]).replace(" ", "_").replace("\n", "|")
    if request in engine.running:
        return "."
    return "-" if request in engine.waiting and request.row >= 0 else " "


def print_answers(engine: Engine, requests: Sequence[Request]) -> None:
    """Print the answers and the cache statistics."""
    print("\nPrompt -> answer (tokens cached at the request's last admission)")
    for request in requests:
        prompt, answer = decode(request.token_ids[: request.num_prompt_tokens]), decode(request.output)
        print(f"{prompt!r} -> {answer!r} ({request.num_cached_tokens})")
    stats = engine.manager.stats()
    first, again = stats.queries, stats.preempted_queries
    print(f"Cached prompt tokens: {first.num_hit_tokens} of {first.num_queried_tokens} ({first.hit_rate:.1%}).")
    print(f"Preemptions: {engine.num_preemptions}. Cached tokens at readmission: {again.num_hit_tokens}.")
    print(f"Evicted pages: {stats.num_evicted_pages}.\n")

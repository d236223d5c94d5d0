"""The command line of the engine: prompts in, streamed tokens and figures out."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from attention import attend_by_gather, attend_by_pallas
from beams import BeamSearch
from engine import Engine
from model import MIXERS, load_weights, make_weights
from report import Answer, find_symbol, print_answers, print_figures
from request import SamplingParams
from stopwatch import Stopwatch, format_profile
from text import ALPHABET, FOLLOW_UP, PROMPTS, decode, encode

from pagepool import CacheManager

NUM_PAGES = 48
ATTENTIONS = {"gather": attend_by_gather, "pallas": attend_by_pallas}

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
    add("--seed", 0, "seed of the random weights; the first answer samples with it, the second with seed + 1, and so on")
    add("--samples", 1, "answers to each prompt, sampled with seeds one after another")
    add("--beams", 0, "answers to each prompt by beam search: the most probable ones; 0: no beam search")
    add("--turns", 1, "questions of each chat: an answer is followed by another one")
    parser.add_argument("--stop", metavar="CHARACTER", help="end an answer at this character")
    parser.add_argument("--weights", type=Path, metavar="FILE.npz", help="weights saved by numpy.savez: see AXES in model.py")
    add(
        "--kind",
        "attention",
        "random weights of a model whose layers have attention alone, and before it linear attention, or compressed attention"
        " with a ring of raw keys",
        choices=list(MIXERS),
    )
    add("--attention", "gather", "plain jnp, or jax's GPU kernel, interpreted on other devices", choices=list(ATTENTIONS))
    add("--num-devices", 1, "number of devices over which the heads are divided")
    add("--num-pages", 0, f"pages of the KV cache, including the null page; 0: {NUM_PAGES}, or more if beams need them")
    add("--num-state-pages", 0, "states or rings, including the null page; 0: four for each request that runs at once, or one")
    add("--num-host-pages", 0, "pages in host memory, for what is evicted; 0: none")
    add("--page-size", 8, "tokens in a page")
    add("--ring-size", 8, "tokens in a ring, at least the four that are compressed into one entry, and drafts")
    add("--checkpoint-interval", 32, "tokens between the states that a model with linear attention keeps inside prompts")
    add("--steps-ahead", 0, "steps that are planned before the tokens of the one that runs are known")
    add(
        "--drafts",
        0,
        "tokens that are guessed behind each token, from what followed the last tokens before, and verified with it",
    )
    parser.add_argument("--no-sharing", action="store_true", help="let each row read the pages of a shared prefix")
    add("--sleep-every", 0, "steps after which the engine gives the device's memory of pages back and takes it again; 0: never")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep pages in files, for later runs and other engines")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of the allocator, for ui.perfetto.dev")
    add("--max-num-reqs", 6, "maximum number of requests running at once")
    add("--max-num-batched-tokens", 64, "maximum number of tokens computed in a step")
    add("--max-model-len", 256, "maximum number of tokens in a prompt and its answer")
    parser.add_argument(
        "--profile", action="store_true", help="print the shares of a step's parts, work on the device included"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the prompts. Exit with a message and code 2 if the arguments cannot work."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        engine = make_engine(args)
        answers = add_prompts(engine, args, args.prompts or PROMPTS)
        engine.warmup()
        watches = watch_parts(engine) if args.profile else {}
        with trace(engine.manager, args.trace):
            step_seconds = run(engine, answers, watches, args.sleep_every)
            for _ in range(args.turns - 1):
                answers = add_prompts(engine, args, [decode(find_best(answer)) + FOLLOW_UP for answer in answers])
                step_seconds += run(engine, answers, watches, args.sleep_every)
        engine.close()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.profile:
        print(format_profile({part: watch.laps for part, watch in watches.items()}, step_seconds))


def trace(manager: CacheManager, path: Path | None) -> AbstractContextManager[Any]:
    """Record a trace of the allocator while the block runs, unless `path` is None. Needs the extra ``pagepool[events]``."""
    if path is None:
        return nullcontext()
    from pagepool.trace import Recorder

    return Recorder(manager, path)


def watch_parts(engine: Engine) -> dict[str, Stopwatch]:
    """Replace the parts of the engine that `--profile` times by measuring proxies, which wait for the device: else the engine's
    own Python would be charged for the model's time, in which it waits for the tokens.
    """
    watches = {}
    for part, owner, name in (
        ("allocator", engine.scheduler, "batch"),
        ("commit", engine, "table"),
        ("model", engine, "runner"),
    ):
        watches[part] = Stopwatch(getattr(owner, name), jax.block_until_ready)
        setattr(owner, name, watches[part])
    return watches


def make_engine(args: Namespace) -> Engine:
    """Make the engine for these arguments. Raise ValueError or OSError if they cannot work."""
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed: got {args.seed}, allowed: 0 to 2**31 - 1")
    weights = make_weights(args.seed, kind=args.kind) if args.weights is None else load_weights(args.weights)
    if len(weights["embedding"]) != len(ALPHABET):
        raise ValueError(f"weights: got a vocabulary of {len(weights['embedding'])}, allowed: {len(ALPHABET)}, 1 per character")
    try:
        return Engine(
            weights,
            num_pages=args.num_pages or choose_num_pages(args),
            num_state_pages=args.num_state_pages,
            page_size=args.page_size,
            ring_size=args.ring_size,
            checkpoint_interval=args.checkpoint_interval,
            max_num_reqs=args.max_num_reqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            attend=ATTENTIONS[args.attention],
            num_devices=args.num_devices,
            num_host_pages=args.num_host_pages,
            max_steps_ahead=args.steps_ahead,
            num_drafts=args.drafts,
            store=args.store,
            shares_prefixes=not args.no_sharing and args.attention == "gather",
        )
    except jax.errors.JaxRuntimeError as error:  # the device has not enough memory
        raise ValueError(f"the cache: {error}") from None


def choose_num_pages(args: Namespace) -> int:
    """Return the default number of pages: enough for the beams of the longest prompt in its last turn, without shared pages."""
    num_tokens = max(map(len, args.prompts or PROMPTS)) + args.turns * args.max_tokens + (args.turns - 1) * len(FOLLOW_UP)
    num_beams, page_size = min(args.beams, args.max_num_reqs), max(1, args.page_size)
    return max(NUM_PAGES, 1 + num_beams * -(-min(num_tokens, args.max_model_len) // page_size))


def add_prompts(engine: Engine, args: Namespace, prompts: Sequence[str]) -> list[Answer]:
    """Queue the prompts as samples or beam searches. Raise ValueError for a prompt that cannot run."""
    if args.beams and args.samples != 1:
        raise ValueError(f"--samples: got {args.samples} with --beams {args.beams}, allowed: one of both")
    if args.turns < 1:
        raise ValueError(f"--turns: got {args.turns}, allowed: at least 1")
    if args.sleep_every < 0:
        raise ValueError(f"--sleep-every: got {args.sleep_every}, allowed: at least 0")
    if args.stop is not None and len(args.stop) != 1:
        raise ValueError(f"--stop: got {args.stop!r}, allowed: one character")
    stop_token_id = None if args.stop is None else encode(args.stop)[0]
    answers: list[Answer] = []
    for i, prompt in enumerate(prompts):
        seed = args.seed + i * args.samples
        params = SamplingParams(args.max_tokens, args.temperature, args.top_k, seed, stop_token_id)
        if args.beams:
            answers.append(engine.add_beams(encode(prompt), params, args.beams))
        else:
            answers += engine.add_samples(encode(prompt), params, args.samples)
    return answers


def find_best(answer: Answer) -> list[int]:
    """Return the tokens of a prompt and its answer; of a beam search, the best answer."""
    return (answer.beams[0] if isinstance(answer, BeamSearch) else answer).token_ids


def run(engine: Engine, answers: Sequence[Answer], watches: Mapping[str, Stopwatch], sleep_every: int) -> list[float]:
    """Step until no request is left, and print steps, answers and figures. The engine sleeps and wakes up
    after each `sleep_every` steps, unless they are 0. Return the seconds of each step.
    """
    step_seconds = []
    print(
        "Each column is an answer: `.` computes its prompt, `-` is preempted; otherwise its new token, or its number of beams."
    )
    print("step  pages used")
    while not engine.is_idle:
        start = perf_counter()
        streamed = dict(engine.step())
        step_seconds.append(perf_counter() - start)
        if sleep_every and len(step_seconds) % sleep_every == 0:
            streamed.update(engine.sleep())
            engine.wake()
        for watch in watches.values():
            watch.end_lap()
        symbols = [find_symbol(engine, answer, streamed) for answer in answers]
        print(f"{len(step_seconds):>4}  {engine.manager.usage:>9.0%}   {' '.join(symbols)}".rstrip(), flush=True)
    print_answers(answers)
    print_figures(engine)
    return step_seconds

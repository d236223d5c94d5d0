"""Model arguments of the commands."""

import click

from pagepool.errors import ArgumentError, PagePoolError
from pagepool.replay.models.pages import PAGE_SIZE, ModelPages, list_intervals, read_model
from pagepool.replay.shared.options import Refusal, Size
from pagepool.replay.shared.results import InputFile

DEFAULT_INTERVAL = 1024

model_config_option = click.option(
    "--model-config", type=InputFile(), help="config.json of a Hugging Face model, which gives the sizes of pages and states."
)
kv_dtype_option = click.option(
    "--kv-dtype", metavar="DTYPE", help="Cache dtype, such as float8_e4m3fn.  [default: the model's]"
)
state_dtype_option = click.option(
    "--state-dtype", metavar="DTYPE", help="Dtype of recurrent states, such as float32.  [default: the model's]"
)
model_page_size_option = click.option(
    "--page-size",
    type=Size("tokens"),
    help="Tokens in a page.",
    show_default=f"{PAGE_SIZE}, or as many as are as large as a state",
)


def load_model(
    path: str | None, page_size: int | None, kv_dtype: str | None, state_dtype: str | None, *, has_checkpoints: bool
) -> ModelPages:
    """Return the pages of the model at `path`. Without a path, assume attention and, for checkpoints, one-page states."""
    if path is None:
        for option, dtype in (("--kv-dtype", kv_dtype), ("--state-dtype", state_dtype)):
            if dtype is not None:
                raise click.UsageError(f"{option} needs --model-config")
        return ModelPages(page_size or PAGE_SIZE, num_state_groups=int(has_checkpoints))
    try:
        model = read_model(path, page_size, kv_dtype, state_dtype)
    except (PagePoolError, OSError) as error:
        raise Refusal(str(error)) from error
    if model.num_state_groups == 0 and (has_checkpoints or state_dtype is not None):
        option = "--checkpoint-interval" if has_checkpoints else "--state-dtype"
        raise Refusal(f"{path}: no layer has a state, so {option} has no meaning")
    if not model.has_attention and (page_size is not None or kv_dtype is not None):
        option = "--page-size" if kv_dtype is None else "--kv-dtype"
        raise Refusal(f"{path}: no layer has attention, so {option} has no meaning")
    return model


def require_interval(model: ModelPages, interval: int) -> None:
    """Raise Refusal for an interval that is not a multiple of the page size."""
    try:
        model.require_interval(interval)
    except ArgumentError as error:
        raise Refusal(f"--checkpoint-interval: {error}") from error


def choose_interval(model: ModelPages, asked: int | None) -> int | None:
    """Return the requested interval, or about 1024 tokens; None for a model without states."""
    if model.num_state_groups == 0:
        return None
    if asked is None:
        return min(list_intervals(model.page_size), key=lambda interval: abs(interval - DEFAULT_INTERVAL))
    require_interval(model, asked)
    return asked

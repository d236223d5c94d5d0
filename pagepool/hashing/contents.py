"""Unnamed contents that change keys and values: embeddings in place of tokens, and media without features."""

import hashlib
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

EMBEDDINGS = (
    "prompt_embeds", "inputs_embeds", "input_embeds", "input_embeddings", "inputs_embeddings", "prompt_embeddings",
    "prompt_embedding", "input_embedding", "prompt_embedding_table", "embeds", "embeddings", "token_embeds", "soft_prompt",
)  # fmt: skip
MEDIA = (
    "pixel_values", "pixel_values_videos", "image_embeds", "video_embeds", "audio_embeds", "vision_embeds", "speech_embeds",
    "multi_modal_data", "multi_modal_inputs", "multi_modal_kwargs", "multimodal_data", "multimodal_inputs", "input_multimodals",
    "mm_data", "mm_inputs", "mm_kwargs", "image_data", "audio_data", "video_data", "images", "videos", "audios",
    "input_features", "encoder_input_ids", "encoder_prompt_token_ids",
)  # fmt: skip
ADAPTERS = ("lora_request", "prompt_adapter_request")
"""Attributes of engines' requests, like those above. Media are ignored if features name them, adapters if ``lora_id`` does."""

MAX_EXACT = 2**53
"""Lists with floats become float64, which cannot represent all ints from here on."""

Bytes = npt.NDArray[np.uint8]


class Embeddings(NamedTuple):
    """The digests of a request's embeddings. Either `rows` has one for each leading token, or `whole` has one for each value.
    `are_known` is False if there are contents that cannot be compared.
    """

    rows: tuple[bytes, ...] = ()
    whole: tuple[bytes, ...] = ()
    are_known: bool = True


def may_have_contents(kind: type[Any]) -> bool:
    """Whether a request of this class may have embeddings, media or adapters. O(1) for a class that was asked before."""
    try:
        return _may_have_contents(kind)  # type: ignore[arg-type]  # mypy does not take classes for hashable
    except TypeError:  # a class that cannot be hashed
        return True


@lru_cache(maxsize=256)
def _may_have_contents(kind: type[Any]) -> bool:
    reads_own = kind.__getattribute__ is not object.__getattribute__  # type: ignore[comparison-overlap]
    has_own = kind.__dictoffset__ != 0 or reads_own
    return has_own or any(hasattr(kind, name) for name in ("__getattr__", *EMBEDDINGS, *MEDIA, *ADAPTERS))


def has_unnamed_media(request: Any) -> bool:
    """Whether a request holds media."""
    return any(not _is_empty(getattr(request, name, None)) for name in MEDIA)


def has_unnamed_adapter(request: Any) -> bool:
    """Whether a request asks for an adapter."""
    return any(not _is_empty(getattr(request, name, None)) for name in ADAPTERS)


def read_embeddings(request: Any) -> Embeddings:
    """Return the digests of a request's embeddings. Bytes on other devices are not fetched. O(bytes)."""
    found = [(name, value) for name in EMBEDDINGS if not _is_empty(value := getattr(request, name, None))]
    if not found:
        return Embeddings()
    num_tokens = getattr(request, "num_tokens", 0)
    num_rows = int(num_tokens) if len(found) == 1 and isinstance(num_tokens, int | np.integer) else 0
    known = [_digest(name, value, num_rows) for name, value in found]
    if len(known) == 1 and known[0] is not None:
        return known[0]
    whole = [digests.whole for digests in known if digests is not None]
    return Embeddings((), sum(whole, ()), len(whole) == len(known))


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (type(value) in (list, tuple, dict, bytes) and not value)


def _digest(name: str, value: Any, num_tokens: int) -> Embeddings | None:
    """Return the digests of contents, by token if there is a row for each of the first tokens; None if they cannot be read."""
    try:
        read = _read(value)
    except Exception:  # whatever a foreign array raises: it cannot be compared
        return None
    if read is None:
        return None
    dtype, shape, content = read
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    kind = f"{name} {dtype} {shape[1:]} ".encode()
    if len(shape) == 2 and 0 < shape[0] <= num_tokens:
        return Embeddings(tuple([hashlib.sha256(kind + row.data).digest() for row in content.reshape(shape[0], -1)]))
    return Embeddings(whole=(hashlib.sha256(b"%d " % (shape[0] if shape else 1) + kind + content.data).digest(),))


def _read(value: Any) -> tuple[str, tuple[int, ...], Bytes] | None:
    """Return the type, shape and bytes of contents; None if they are not exactly known, or not in this process's memory."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
            return None
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy()
    if jax is not None and isinstance(value, jax.Array):
        if not value.is_fully_addressable or any(device.platform != "cpu" for device in value.devices()):
            return None
        with jax.transfer_guard_device_to_host("allow"):
            value = np.asarray(value)
    if isinstance(value, list | tuple):
        value = _array_of(value)
    elif isinstance(value, bytes | bytearray):
        value = np.frombuffer(bytes(value), np.uint8)
    if type(value) not in (np.ndarray, np.memmap) or value.dtype.hasobject:
        return None
    return str(value.dtype), value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _array_of(numbers: Any) -> npt.NDArray[Any] | None:
    """Return nested lists of numbers, or of arrays, as an array; None if it would not have their exact values."""
    leaf = numbers
    while isinstance(leaf, list | tuple) and leaf:
        leaf = leaf[0]
    if not isinstance(leaf, int | float | np.generic | np.ndarray):
        return None
    array = np.asarray(numbers)
    is_exact = array.dtype.kind in "biu" or (array.dtype.kind == "f" and bool((np.abs(array) < MAX_EXACT).all()))
    return array if is_exact else None

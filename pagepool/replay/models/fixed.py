"""Bytes that do not grow with a request: its rings, keys of an encoder's output, and sinks, which all requests share."""

from dataclasses import asdict, dataclass
from typing import Any

from pagepool.errors import ArgumentError, count_of, shown
from pagepool.replay.models.caches import POOLED_RING, are_compressed, list_sources
from pagepool.replay.models.geometry import count_keys_and_values, is_latent, read_layer
from pagepool.replay.models.indexers import find_indexer
from pagepool.replay.models.layers import CROSS, REFERENCE, list_attention_layers
from pagepool.replay.models.values import WHOLE, Config, find_dtype, is_set, read_int
from pagepool.replay.shared.sizes import format_bytes
from pagepool.specs import cdiv, num_bytes

SUBSAMPLING, FRAME_SECONDS = "subsampling_factor", 0.01


@dataclass(frozen=True, slots=True)
class Fixed:
    """Caches of `num_tokens` tokens in `num_layers` layers, together of `num_bytes`."""

    num_bytes: int
    num_tokens: int
    num_layers: int

    @property
    def size(self) -> str:
        """The size, as text."""
        layers = count_of(self.num_layers, "layer")
        return f"{count_of(self.num_tokens, 'token')} in {layers} take {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class FixedCaches:
    """Rings and an encoder's keys of each request, and sinks of all; None for those that the model does not have. With an
    `answer_window`, a request keeps its prompt, and the last tokens of its answer.

    >>> caches = FixedCaches(encoder=Fixed(184_800_000, 1504, 32))
    >>> caches.request_bytes, caches.describe()
    (184800000, ["An encoder's keys and values of 1,504 tokens in 32 layers take 176.2 MiB a request, beside its pages."])
    """

    ring: Fixed | None = None
    encoder: Fixed | None = None
    sinks: Fixed | None = None
    answer_window: int | None = None

    @property
    def request_bytes(self) -> int:
        """Bytes of each request, whatever its length."""
        return sum(each.num_bytes for each in (self.ring, self.encoder) if each)

    def count_pages(self, page_bytes: int | None) -> tuple[int, int]:
        """Return the pages of a pool that have the bytes of a request's caches, and those of the sinks."""
        if page_bytes is None:
            return 0, 0
        return cdiv(self.request_bytes, page_bytes), cdiv(self.sinks.num_bytes, page_bytes) if self.sinks else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the caches that the model has by name, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def describe(self) -> list[str]:
        """Describe what there is."""
        sentences = []
        if self.ring:
            sentences.append(f"Rings of {self.ring.size} a request, beside its pages.")
        if self.encoder and not self.encoder.num_tokens:
            layers = count_of(self.encoder.num_layers, "layer")
            sentences.append(f"Keys and values of pictures in {layers} are not counted: the file does not tell their number.")
        elif self.encoder:
            sentences.append(f"An encoder's keys and values of {self.encoder.size} a request, beside its pages.")
        if self.sinks:
            sentences.append(f"Sinks of {self.sinks.size} once, for all requests.")
        if self.answer_window:
            window = count_of(self.answer_window, "token")
            sentences.append(f"A request keeps its prompt, and of its answer the last {window}; the plan counts all of both.")
        return sentences


def list_fixed(config: Config, types: list[str], page_size: int, kv_dtype: str | None) -> FixedCaches:
    """Return what does not grow with a request; pages of an encoder and of sinks have `page_size` tokens. Raise ArgumentError
    or ArgumentTypeError for fields that are not understood.
    """
    dtype = kv_dtype or find_dtype(config)
    return FixedCaches(
        _find_ring(config, types),
        _find_encoder(config, types, page_size, dtype),
        _find_sinks(config, types, page_size, dtype),
        read_int(config, "sliding_window") if REFERENCE in types else None,
    )


def _find_ring(config: Config, types: list[str]) -> Fixed | None:
    """Count the rings of one request, without room for drafts."""
    if are_compressed(types):
        layers = list_sources(config, types).get(2, []) if config.get("kv_source_layer_ids") is not None else []
        ring_bytes = POOLED_RING * 2 * read_int(config, "head_dim") * 4  # a value and its score, in 32 bits
        return Fixed(len(layers) * ring_bytes, POOLED_RING, len(layers)) if layers else None
    indexer = find_indexer(config, types)
    if indexer is None or not indexer.ring_bytes or not indexer.layers:
        return None
    return Fixed(len(indexer.layers) * indexer.ring_bytes, indexer.ring_size, len(indexer.layers))


def _find_encoder(config: Config, types: list[str], page_size: int, dtype: str) -> Fixed | None:
    """Count the keys and values of an encoder's output, in layers that attend to it beside the text, or to it alone."""
    whole = config[WHOLE]
    if whole.get("is_encoder_decoder"):
        layers, num_tokens = list_attention_layers(config, types), _count_encoder_tokens(whole, config)
    else:
        layers = [layer for layer, name in enumerate(types) if name == CROSS]
        num_tokens = _count_picture_tokens(whole.get("vision_config"))
    return _count_pages(config, types, layers, num_tokens, page_size, dtype) if layers else None


def _count_pages(config: Config, types: list[str], layers: list[int], num_tokens: int, page_size: int, dtype: str) -> Fixed:
    """Count whole pages for the tokens."""
    num_slots = cdiv(num_tokens, page_size) * page_size
    widths = [count_keys_and_values(read_layer(config, types[layer], layer)) for layer in layers]
    return Fixed(sum(num_bytes(num_slots * width, dtype) for width in widths), num_slots, len(layers))


def _count_encoder_tokens(whole: Config, decoder: Config) -> int:
    """Count the most tokens of an encoder's output: of a recording, or of a text."""
    encoder: Config = next((whole[name] for name in ("encoder_config", "encoder") if isinstance(whole.get(name), dict)), {})
    encoder = encoder["text_config"] if isinstance(encoder.get("text_config"), dict) else encoder
    if whole.get("max_audio_clip_s") is not None and encoder.get(SUBSAMPLING) is not None:
        seconds = read_int(whole | {"max_audio_clip_s": _as_int(whole["max_audio_clip_s"])}, "max_audio_clip_s")
        num_frames = round(seconds / _read_stride(whole.get("preprocessor")))
        return cdiv(num_frames, read_int(encoder, SUBSAMPLING))
    for fields in (whole, encoder, *([] if encoder else [decoder])):
        for name in ("max_source_positions", "max_position_embeddings", "n_positions"):
            if fields.get(name) is not None and not (encoder and fields is whole):
                return read_int(fields, name)
    raise ArgumentError("has is_encoder_decoder, but lacks max_source_positions: how long its encoder's output is, is unknown")


def _as_int(number: object) -> object:
    """Return a whole number as an int, and anything else as it is."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _read_stride(features: object) -> float:
    """Return the seconds between the frames of a recording."""
    stride = features.get("window_stride") if isinstance(features, dict) else None
    if stride is None:
        return FRAME_SECONDS
    if not isinstance(stride, float) or not FRAME_SECONDS / 10 <= stride <= 1:
        raise ArgumentError(f"preprocessor.window_stride: got {shown(stride)}, allowed: {FRAME_SECONDS / 10} to 1 s")
    return stride


def _count_picture_tokens(vision: object) -> int:
    """Count the tokens of the largest picture of Llama 3.2 Vision: patches of each tile, and one more for each. Return 0 if the
    file does not tell.
    """
    if not isinstance(vision, dict) or vision.get("max_num_tiles") is None:
        return 0
    num_patches = (read_int(vision, "image_size") // read_int(vision, "patch_size")) ** 2
    return read_int(vision, "max_num_tiles") * (num_patches + 1)


def _find_sinks(config: Config, types: list[str], page_size: int, dtype: str) -> Fixed | None:
    """Count the learned keys and values in front of all sequences, as of openPangu."""
    if not is_set(config.get("param_sink_number")):
        return None
    if is_latent(config):
        raise ArgumentError("param_sink_number with kv_lora_rank is not understood")
    layers, num_tokens = list_attention_layers(config, types), read_int(config, "param_sink_number")
    if num_tokens % page_size:
        raise ArgumentError(f"param_sink_number: got {num_tokens}, allowed with pages of {page_size} tokens: their multiples")
    return _count_pages(config, types, layers, num_tokens, page_size, dtype)

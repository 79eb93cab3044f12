"""Converts input tensors of `tensorrt_llm` to Requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manylora.doors.triton.server_types import Arrays
from manylora.doors.triton.tensor_table import REFUSED_INPUTS, SAMPLING_SCALARS
from manylora.doors.triton.texts import decode_word_list, utf8
from manylora.errors import RequestError
from manylora.generation.sampling import parameters_of
from manylora.request import (
    MAX_GUIDE_BYTES,
    MAX_INVOCATION,
    MAX_MIXED,
    MAX_RANGES,
    Guide,
    LoraExtra,
    LoraInput,
    LoraMix,
    Pooling,
    Request,
    Retention,
    SamplingConfig,
    mix,
)

DEFAULTED = {one.name: one.kind for one in parameters_of("files")}

RANGES = tuple(f"retention_token_range_{name}" for name in ("starts", "ends", "priorities", "durations_ms"))
RETENTION = (*RANGES, "retention_decode_priority", "retention_decode_duration_ms")  # each may be used alone
ONE_ADAPTER = (  # inputs that do not go with a mix
    "lora_task_id", "lora_name", "lora_weights", "lora_config", "lora_invocation_tokens", "lora_ckpt_source",
    "lora_version",
)  # fmt: skip


@dataclass(frozen=True)
class Decoded:
    """A request, and how to write its answer. exclude_input: None: the model's default."""

    request: Request
    exclude_input: bool | None
    statistics: bool


@dataclass(frozen=True)
class _Item:
    """One item of the batch. longest: maximum tokens of prompt and output; None: unknown."""

    arrays: Arrays
    index: int
    longest: int | None = None

    def scalar(self, name: str, default: Any = None) -> Any:
        if name not in self.arrays:
            return default
        value = self.arrays[name][self.index : self.index + 1].reshape(-1)
        if value.size != 1:
            raise RequestError(f"Expected a scalar tensor for tensor {name}, got {value.size} values")
        if isinstance(value[0], bytes) and len(value[0]) > MAX_GUIDE_BYTES:
            raise RequestError(f"{name} must have at most {MAX_GUIDE_BYTES} bytes, got {len(value[0])}")
        return utf8(value[0], name) if isinstance(value[0], bytes | str) else value[0].item()

    def size(self, name: str) -> int:
        """Length of this item's row. 0 if the tensor is absent."""
        return self.arrays[name][self.index].size if name in self.arrays else 0

    def row(self, name: str) -> np.ndarray | None:
        return self.arrays[name][self.index] if name in self.arrays else None

    def ids(self, name: str, most: int | None) -> list[int]:
        """A row of numbers. most: checked before they become Python integers, ten times as large."""
        row = self.row(name)
        if row is None:
            return []
        if most is not None and row.size > most:
            raise RequestError(f"{name} must have at most {most} values, got {row.size}")
        return row.reshape(-1).tolist()


def decode_requests(
    arrays: Arrays,
    request_id: str,
    decoupled: bool,
    has_encoder: bool = False,
    max_seq_len: int | None = None,
) -> list[Decoded]:
    """One request per item of the batch. Raises RequestError.

    max_seq_len: tokens of prompt and output; longer inputs are refused before they are read. has_encoder: the
    model reads input_ids with an encoder, and its decoder starts from decoder_input_ids. Decoder-only models
    ignore a single one of the latter, which the ensemble always sends.
    """
    sizes = {name: len(array) for name, array in arrays.items()}
    batch = sizes.get("input_lengths", 1)
    for name, size in sizes.items():
        if size != batch:
            raise RequestError(
                f"Expected batch size doesn't match batch size for tensor {name}. Expected {batch} got {size}"
            )
    for name in REFUSED_INPUTS:
        if name in arrays and arrays[name].size:
            raise RequestError(f"input {name} is not supported by this server: leave it out")
    if batch > 1 and not decoupled:
        raise RequestError(
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )
    return [
        _decode(_Item(arrays, index, max_seq_len), request_id, decoupled, has_encoder)
        for index in range(batch)
    ]


def _decode(item: _Item, request_id: str, decoupled: bool, has_encoder: bool) -> Decoded:
    streaming = bool(item.scalar("streaming", False))
    sequences = item.scalar("num_return_sequences", 1)
    width = item.scalar("beam_width", 1) or 1
    if streaming and not decoupled:
        raise RequestError("Streaming is only supported in decoupled mode.")
    if sequences > 1 and width == 1 and not decoupled:
        raise RequestError("num_return_sequences > 1 is only supported in decoupled mode.")
    table = item.row("prompt_embedding_table")
    mode, head = item.scalar("pooling"), bool(item.scalar("classification_head", False))
    prompt = _prompt(item, "input")
    if prompt is None:
        raise RequestError("A value is required for input_ids")
    start = _prompt(item, "decoder_input") or ()
    if len(start) > 1 and not has_encoder:
        raise RequestError("decoder_input_ids is for encoder-decoder models: leave it out")
    request = Request(
        prompt=start if has_encoder else prompt,
        encoder_prompt=prompt if has_encoder else (),
        params=_params(item, sequences, width),
        lora=_lora(item),
        streaming=streaming,
        request_id=request_id,
        draft=tuple(item.ids("draft_input_ids", item.longest)),
        prompt_table=None if table is None or not table.size else table,
        retention=_retention(item),
        pooling=Pooling(mode or "last", head) if mode or head else None,
    )
    exclude = item.scalar("exclude_input_in_output")
    asked = [item.scalar(f"return_{name}", False) for name in ("perf_metrics", "kv_cache_reuse_stats")]
    return Decoded(request, None if exclude is None else bool(exclude), any(asked))


def _prompt(item: _Item, name: str) -> tuple[int, ...] | None:
    """name: input or decoder_input."""
    ids = item.row(f"{name}_ids")
    if ids is None:
        return None
    if ids.ndim != 1:
        raise RequestError(f"Invalid format for {name}_ids")
    length = item.scalar(f"{name}_lengths", ids.size)
    if not 0 <= length <= ids.size:
        raise RequestError(
            f"Invalid {name}_ids length. Expected length {length} ({name}_lengths), got length {ids.size}"
        )
    if item.longest is not None and length >= item.longest:
        raise RequestError(
            f"Prompt length ({length}) exceeds maximum input length ({item.longest - 1}). Shorten the prompt "
            "or serve with a larger max_seq_len"
        )
    return tuple(ids[:length].tolist())


def _params(item: _Item, sequences: int, width: int) -> SamplingConfig:
    max_tokens, end_id = item.scalar("request_output_len"), item.scalar("end_id")
    bias = item.row("embedding_bias")
    if max_tokens is None:
        raise RequestError("A value is required for request_output_len")
    kind, text = item.scalar("guided_decoding_guide_type"), item.scalar("guided_decoding_guide", "")
    if text and not kind:
        raise RequestError("guided_decoding_guide_type must be set beside guided_decoding_guide")
    found = _sampling_defaults(item, max_tokens)
    found |= {field: item.scalar(name) for field, name in SAMPLING_SCALARS.items() if name in item.arrays}
    if found.get("top_p", 1) <= 0:
        del found["top_p"]
    return SamplingConfig(
        **found | {"num_return_sequences": sequences, "beam_width": width},
        max_tokens=max_tokens,
        end_id=None if end_id is None or end_id < 0 else end_id,
        stop_words=decode_word_list(item.row("stop_words_list"), "stop_words_list"),
        bad_words=decode_word_list(item.row("bad_words_list"), "bad_words_list"),
        logit_bias=None if bias is None or not bias.size else bias.reshape(-1),
        guide=Guide(kind, text) if kind else None,
    )


def _sampling_defaults(item: _Item, max_tokens: int) -> dict[str, Any]:
    """Values for the fields in DEFAULTED that have no input. Raises RequestError."""
    text = item.scalar("sampling_defaults") or "{}"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(type(one) in (int, float) for one in given.values()):
        raise RequestError(f"sampling_defaults must be a JSON object of numbers, got {text[:80]!r}")
    unknown = sorted(given.keys() - DEFAULTED.keys())
    if unknown:
        raise RequestError(
            f"sampling_defaults must have none but {', '.join(DEFAULTED)}, got {unknown[0]:.40}"
        )
    for name, kind in DEFAULTED.items():
        if kind is int and not isinstance(given.get(name, 0), int):
            raise RequestError(f"sampling_defaults: {name} must be a whole number, got {given[name]}")
    return given | ({"min_tokens": min(given["min_tokens"], max_tokens)} if "min_tokens" in given else {})


def _retention(item: _Item) -> Retention | None:
    if not any(item.size(name) for name in RETENTION):
        return None
    starts, ends, priorities, durations = (item.ids(name, MAX_RANGES) for name in RANGES)
    durations = durations or [-1] * len(starts)
    decode = item.scalar("retention_decode_priority")
    if not len(starts) == len(ends) == len(priorities) == len(durations):
        raise RequestError(
            "retention_token_range_starts, _ends, _priorities and _durations_ms must have one length, got "
            f"{len(starts)}, {len(ends)}, {len(priorities)} and {len(durations)}"
        )
    rows = zip(starts, ends, priorities, durations, strict=True)
    duration = item.scalar("retention_decode_duration_ms", -1)
    return Retention(
        tuple((start, None if end == -1 else end, p, None if d == -1 else d) for start, end, p, d in rows),
        35 if decode is None else decode,
        None if duration == -1 else duration,
    )


def _lora(item: _Item) -> LoraInput | LoraMix | None:
    names = [name for name in ("lora_mix_task_ids", "lora_mix_names") if item.size(name)]
    if not names:
        if item.size("lora_mix_scales"):
            raise RequestError("lora_mix_scales need lora_mix_task_ids or lora_mix_names")
        return _one_lora(item)
    field, others = names[0], [name for name in ONE_ADAPTER if item.size(name)]
    if len(names) > 1 or others:
        raise RequestError(f"{field} stands alone: leave {', '.join([*names[1:], *others])} out")
    given: list[int | bytes | str] = [*item.ids(field, MAX_MIXED)]
    scales: Sequence[float] = item.ids("lora_mix_scales", MAX_MIXED) or [1.0] * len(given)
    if len(scales) != len(given):
        raise RequestError(f"lora_mix_scales must have one value for each of {field}: {len(given)}")
    members = [
        LoraInput(one) if isinstance(one, int) else LoraInput(None, name=utf8(one, field)) for one in given
    ]
    return mix(list(zip(members, scales, strict=True)), field)


def _one_lora(item: _Item) -> LoraInput | None:
    names = ("lora_task_id", "lora_weights", "lora_config", "lora_name", "lora_invocation_tokens")
    wanted = item.scalar("lora_version") or "keep"
    if wanted not in ("keep", "follow"):
        raise RequestError(f"lora_version must be keep or follow, got {wanted[:40]!r}")
    follow, source = wanted == "follow", item.scalar("lora_ckpt_source") or None
    if not any(name in item.arrays for name in names):
        if follow:
            raise RequestError("lora_version follow needs an adapter: name one, or leave it out")
        if source:
            raise RequestError("lora_ckpt_source goes with lora_name: name an adapter, or leave it out")
        return None
    weights, config = item.row("lora_weights"), item.row("lora_config")
    task_id, name = item.scalar("lora_task_id"), item.scalar("lora_name")
    invocation = item.ids("lora_invocation_tokens", MAX_INVOCATION)
    if invocation and weights is None:
        raise RequestError("lora_invocation_tokens goes with lora_weights: a known adapter has its own")
    if name:
        if not (task_id is None and weights is None and config is None):
            raise RequestError("lora_name stands alone: leave lora_task_id, lora_weights and lora_config out")
        return LoraInput(None, name=name, source=source, follow=follow)
    if task_id is None:
        raise RequestError("lora_task_id must be set for LoRA inference")
    if source:
        raise RequestError("lora_ckpt_source goes with lora_name, not with lora_task_id: leave it out")
    return LoraInput(
        task_id,
        None if weights is None else weights[np.newaxis],
        None if config is None else config[np.newaxis],
        extras=(LoraExtra.invocation(invocation),) if invocation else (),
        follow=follow,
    )

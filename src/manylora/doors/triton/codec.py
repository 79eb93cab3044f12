"""Input tensors of `tensorrt_llm` to Requests. ResponseEncoder: events to its output tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from manylora.doors.triton.server_types import Arrays, decode_word_list, refuse, utf8
from manylora.doors.triton.tensor_table import DTYPES, REFUSED_INPUTS, SAMPLING_SCALARS, STATISTICS
from manylora.errors import RequestError
from manylora.generation.sampling import parameters_of
from manylora.generation.tokenizer import WINDOW
from manylora.request import (
    MAX_GUIDE_BYTES,
    MAX_INVOCATION,
    MAX_MIXED,
    MAX_RANGES,
    Event,
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
    exclude_input: bool = False,
    logits_dtype: str = "float32",
) -> list[ResponseEncoder]:
    """One request per item of the batch, with what answers it. Raises RequestError.

    max_seq_len: tokens of prompt and output; longer inputs are refused before they are read. has_encoder: the
    model reads input_ids with an encoder, and its decoder starts from decoder_input_ids. Decoder-only models
    ignore a single one of the latter, which the ensemble always sends. exclude_input: unless an input says.
    """
    sizes = {name: len(array) for name, array in arrays.items()}
    batch = sizes.get("input_lengths", 1)
    for name, size in sizes.items():
        if size != batch:
            raise RequestError(
                f"Expected batch size doesn't match batch size for tensor {name}. Expected {batch} got {size}"
            )
    refuse(arrays, *(name for name in REFUSED_INPUTS if name in arrays and arrays[name].size))
    if batch > 1 and not decoupled:
        raise RequestError(
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )
    found = []
    for index in range(batch):
        item = _Item(arrays, index, max_seq_len)
        request = _decode(item, request_id, decoupled, has_encoder)
        place, exclude = (
            index if batch > 1 else None,
            bool(item.scalar("exclude_input_in_output", exclude_input)),
        )
        asked = [item.scalar(f"return_{name}", False) for name in ("perf_metrics", "kv_cache_reuse_stats")]
        found.append(ResponseEncoder(request, place, exclude, any(asked), logits_dtype))
    return found


def _decode(item: _Item, request_id: str, decoupled: bool, has_encoder: bool) -> Request:
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
    return Request(
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


_NOTHING = np.empty((1, 1, 0), np.int32)

Item = tuple[Any, "ResponseEncoder | None", Event]
"""An event to be sent. Without an encoder the call ends, with the event's error if it has one."""


def adapter_told(name: str | None, task_id: int | None) -> bytes:
    """The text that tells postprocessing a request's adapter."""
    return f"id {task_id}".encode() if name is None else f"name {name}".encode()


@dataclass
class ResponseEncoder:
    """State for answering one Request. statistics: whether KV cache counts and times are requested.
    num_output, finish_reasons: of the sequences that have ended.
    """

    request: Request
    batch_index: int | None  # None: the batch has one item
    exclude_input: bool
    statistics: bool = False
    logits_dtype: str = "float32"
    num_output: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    _sent: dict[int, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: _NOTHING))
    _log_probs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _context_logits: np.ndarray | None = None
    _vocab_size: int = 0

    def encode(self, event: Event) -> list[tuple[str, np.ndarray]]:
        """Tensors of one response, `output_ids` first. Leading dimension 1.

        Text tensors are slow in every process on the way, so `finish_reason`, `lora_cache_tier` and
        `lora_versions` come only with the last response of a sequence.
        """
        streaming, params = self.request.streaming, self.request.params
        echo = [] if streaming or self.exclude_input else list(self.request.prompt)
        outputs = [beam.token_ids for beam in event.beams] or [event.token_ids]
        ids = [[*echo, *row] for row in outputs]
        tensors: list[tuple[str, np.ndarray]] = [
            ("output_ids", _table(ids, np.int32)),
            ("sequence_length", np.array([[len(row) for row in ids]], np.int32)),
        ]
        if params.return_log_probs:
            tensors += self._log_prob_tensors(event)
        if params.return_context_logits or params.return_generation_logits:
            tensors += self._logits_tensors(event)
        if event.pooled is not None:
            rows = event.pooled if event.pooled.ndim == 2 else event.pooled[np.newaxis]
            tensors.append(("pooled_output", rows[np.newaxis]))
        if self.batch_index is not None:
            tensors.append(("batch_index", np.array([[self.batch_index]], np.int32)))
        if params.num_return_sequences > 1 and not event.beams:
            tensors.append(("sequence_index", np.array([[event.sequence_index]], np.int32)))
        if self.statistics and (m := event.metrics) is not None:
            rate = m.accepted_draft_tokens / m.draft_tokens if m.draft_tokens else 0.0
            values: list[float] = [m.kv_new_blocks, m.kv_reused_blocks, m.kv_taken_blocks]
            values += [m.arrival_ns, m.first_scheduled_ns, m.first_token_ns, m.last_token_ns]
            values += [rate, m.accepted_draft_tokens, m.draft_tokens]
            for one, value in zip(STATISTICS, values, strict=True):
                tensors.append((one.name, np.array([[value]], DTYPES[one.dtype])))
        if streaming:
            window = self._sent[event.sequence_index]
            tensors.append(("previous_ids", window))
            new = np.array([[event.token_ids]], np.int32)
            self._sent[event.sequence_index] = np.concatenate((window, new), axis=2)[:, :, -WINDOW:]
        if event.finish_reason is not None:
            tensors.append(("finish_reason", _text(event.finish_reason.value)))
            if event.metrics is not None and event.metrics.adapter_tier:
                tensors.append(("lora_cache_tier", _text(event.metrics.adapter_tier)))
            if event.versions:
                tensors.append(("lora_versions", _text(_versions(event))))
        return tensors

    def _log_prob_tensors(self, event: Event) -> list[tuple[str, np.ndarray]]:
        if event.beams:
            rows = [list(beam.log_probs) for beam in event.beams]
            sums = [beam.cum_log_prob for beam in event.beams]
        else:
            rows = [self._log_probs[event.sequence_index]]
            rows[0] += event.log_probs
            sums = [sum(rows[0])]
        return [
            ("cum_log_probs", np.array([sums], np.float32)),
            ("output_log_probs", _table(rows, np.float32)),
        ]

    def _logits_tensors(self, event: Event) -> list[tuple[str, np.ndarray]]:
        """If logits are requested, every response of a stream has both outputs: [1, prompt, vocab] for the
        whole prompt, and [1, 1, tokens, vocab] for the new tokens.
        """
        if event.context_logits is not None:
            self._context_logits = event.context_logits[np.newaxis].astype(self.logits_dtype)
        rows = event.generation_logits
        if rows is not None:
            self._vocab_size = rows.shape[-1]
        elif self._vocab_size and self.request.params.return_generation_logits:
            rows = np.empty((0, self._vocab_size))
        tensors = []
        if self._context_logits is not None:
            tensors.append(("context_logits", self._context_logits))
        if rows is not None:
            tensors.append(("generation_logits", rows[np.newaxis, np.newaxis].astype(self.logits_dtype)))
        return tensors


def _versions(event: Event) -> str:
    count = max((len(beam.token_ids) for beam in event.beams), default=0)
    if not event.beams:
        count = event.metrics.output_tokens if event.metrics is not None else len(event.token_ids)
    ends = [*(one.start for one in event.versions[1:]), count]
    return json.dumps(
        [
            {"name": one.name, "version": one.number, "digest": one.digest, "start": one.start, "end": end}
            for one, end in zip(event.versions, ends, strict=True)
        ]
    )


def merge_waiting(batch: Sequence[Item]) -> list[Item]:
    """Join neighbouring events of each streaming sequence. The order within each request is kept."""
    result: list[Item] = []
    latest: dict[int, tuple[int, Event]] = {}  # encoder -> index and content of its latest event
    for item in batch:
        call, encoder, event = item
        if encoder is None or not encoder.request.streaming:
            result.append(item)
            continue
        place, before = latest.get(id(encoder), (0, None))
        if before is not None and before.sequence_index == event.sequence_index:
            both = (before.generation_logits, event.generation_logits)
            logits = [rows for rows in both if rows is not None]
            event = replace(
                event,
                token_ids=before.token_ids + event.token_ids,
                log_probs=before.log_probs + event.log_probs,
                context_logits=before.context_logits,
                generation_logits=np.concatenate(logits) if logits else None,
            )
            result[place] = (call, encoder, event)
        else:
            place = len(result)
            result.append(item)
        latest[id(encoder)] = place, event
    return result


def _table(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """[1, rows, longest row]. Shorter rows are padded with -1."""
    if len(rows) == 1:
        return np.array([rows], dtype)
    table: np.ndarray = np.full((1, len(rows), max(map(len, rows))), -1, dtype)
    for i, row in enumerate(rows):
        table[0, i, : len(row)] = row
    return table


def _text(text: str) -> np.ndarray:
    return np.array([[text.encode()]], np.object_)

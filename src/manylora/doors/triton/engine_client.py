"""For clients of the model `tensorrt_llm`: converts a Request to input tensors, and responses to Events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from manylora.doors.triton.server_types import encode_word_lists
from manylora.doors.triton.tensor_table import DTYPES, SAMPLING_SCALARS, TENSORRT_LLM
from manylora.errors import RequestError
from manylora.request import (
    INVOCATION,
    Event,
    FinishReason,
    LoraInput,
    LoraMix,
    Request,
    RequestMetrics,
    SamplingConfig,
)

Tensors = dict[str, np.ndarray]
TYPES = {tensor.name: DTYPES.get(tensor.dtype) for tensor in TENSORRT_LLM.inputs}
USUAL = SamplingConfig()


def request_tensors(request: Request) -> Tensors:
    """Inputs by name, each with a leading batch dimension of 1. Parameters with default values are omitted.

    Prompt tables, drafts, retention and decoder prompts are not sent, because no caller uses them.
    """
    params, pooling, guide = request.params, request.pooling, request.params.guide
    values: dict[str, bool | float | str] = {
        "input_lengths": len(request.prompt),
        "request_output_len": params.max_tokens,
        "streaming": request.streaming,
        "exclude_input_in_output": True,
    }
    if pooling is not None:
        values |= {"pooling": pooling.mode} | ({"classification_head": True} if pooling.head else {})
    sampling = params
    if params.temperature == 0:
        # With top_k 1 every server is greedy. Some divide by the temperature.
        sampling = replace(params, temperature=1.0, top_k=1, top_p=None)
    for field_name, name in SAMPLING_SCALARS.items():
        if (value := getattr(sampling, field_name)) != getattr(USUAL, field_name):
            values[name] = value
    if params.end_id is not None:
        values |= {"end_id": params.end_id, "pad_id": params.end_id}
    if guide is not None:
        values |= {"guided_decoding_guide_type": guide.type}
        values |= {"guided_decoding_guide": guide.text} if guide.text else {}
    found: Tensors = {"input_ids": np.array([request.prompt], np.int32)}
    for name, words in (("stop_words_list", params.stop_words), ("bad_words_list", params.bad_words)):
        if words:
            found[name] = encode_word_lists([words])
    if params.logit_bias is not None:
        found["embedding_bias"] = params.logit_bias[np.newaxis].astype(np.float32)
    return found | _scalars(values) | _lora(request.lora)


@dataclass
class AnswerReader:
    """Reads the responses to one request. It is done when all sequences have a finish reason, or after the
    final response. Which comes first depends on the server.
    """

    request: Request
    _lengths: dict[int, int] = field(default_factory=dict)  # tokens so far of every sequence
    _open: set[int] = field(default_factory=set)
    _stopped: set[int] = field(default_factory=set)  # sequences that have returned their end id
    _arrival_ns: int = field(default_factory=time.monotonic_ns)
    _first_token_ns: int = 0

    def __post_init__(self) -> None:
        self._open = set(range(self.request.params.num_return_sequences))

    @property
    def done(self) -> bool:
        return not self._open

    def read(self, tensors: Mapping[str, np.ndarray], final: bool) -> list[Event]:
        """tensors: outputs of one response; empty: the response is only a final flag."""
        events = [self._event(tensors)] if "output_ids" in tensors and not self.done else []
        # NVIDIA's server sends only a final response, without finish reasons.
        for index in sorted(self._open) if final else ():
            self._open.discard(index)
            full = self._lengths.get(index, 0) >= self.request.params.max_tokens
            reason = FinishReason.LENGTH if full and index not in self._stopped else FinishReason.STOP
            metrics = self._metrics(index, "")
            events.append(Event((), (), index, reason, last=self.done, metrics=metrics))
        return events

    def _event(self, tensors: Mapping[str, np.ndarray]) -> Event:
        sequence = tensors.get("sequence_index", np.empty(0)).reshape(-1)
        index = int(sequence[0]) if sequence.size else 0
        length = tensors["sequence_length"].reshape(-1)[0] if "sequence_length" in tensors else None
        rows = tensors["output_ids"]
        ids = rows[(0,) * (rows.ndim - 1)][:length].tolist()
        if "finish_reason" not in tensors and ids and ids[-1] == self.request.params.end_id:
            self._stopped.add(index)  # some servers include the end id in the output, ours does not
            ids.pop()
        self._lengths[index] = self._lengths.get(index, 0) + len(ids)
        self._first_token_ns = self._first_token_ns or time.monotonic_ns()
        log_probs: list[float] = []
        if self.request.params.return_log_probs and "output_log_probs" in tensors and ids:
            log_probs = tensors["output_log_probs"].reshape(-1)[-len(ids) :].tolist()
        pooling, pooled = self.request.pooling, tensors.get("pooled_output")
        if pooled is not None:
            pooled = pooled.reshape(pooled.shape[-2:])
            pooled = None if pooling is None else pooled if pooling.mode == "all" else pooled[0]
        reason = _text(tensors, "finish_reason")
        if reason:
            self._open.discard(index)
        return Event(
            token_ids=tuple(ids),
            log_probs=tuple(log_probs),
            sequence_index=index,
            finish_reason=FinishReason(reason) if reason else None,
            last=self.done,
            context_logits=_rows(tensors, "context_logits"),
            generation_logits=_rows(tensors, "generation_logits"),
            pooled=pooled,
            metrics=self._metrics(index, _text(tensors, "lora_cache_tier")),
        )

    def _metrics(self, index: int, tier: str) -> RequestMetrics:
        return RequestMetrics(
            self._arrival_ns,
            first_token_ns=self._first_token_ns if self.request.streaming else 0,
            prompt_tokens=len(self.request.prompt),
            output_tokens=self._lengths.get(index, 0),
            adapter_tier=tier,
        )


def _lora(lora: LoraInput | LoraMix | None) -> Tensors:
    if lora is None:
        return {}
    if isinstance(lora, LoraMix):
        members, scales = zip(*lora.members, strict=True)
        found: Tensors = {"lora_mix_scales": np.array([scales], np.float32)}
        if all(one.task_id is None for one in members):
            names = [str(one.name).encode() for one in members]
            return found | {"lora_mix_names": np.array([names], np.object_)}
        return found | {"lora_mix_task_ids": np.array([[one.task_id for one in members]], np.uint64)}
    if lora.name is not None and lora.task_id is None:
        return _scalars({"lora_name": lora.name} | ({"lora_ckpt_source": lora.source} if lora.source else {}))
    others = [extra.name for extra in lora.extras if extra.name != INVOCATION]
    if others:
        raise RequestError(f"the adapter has {others[0]}, which tensors of a request cannot carry")
    found = {"lora_task_id": np.array([[lora.task_id]], np.uint64)}
    if lora.weights is not None and lora.config is not None:
        found |= {"lora_weights": lora.weights, "lora_config": lora.config.astype(np.int32)}
    if lora.invocation:
        found["lora_invocation_tokens"] = np.array([lora.invocation], np.int32)
    return found


def _scalars(values: Mapping[str, bool | float | str]) -> Tensors:
    encoded = {name: one.encode() if isinstance(one, str) else one for name, one in values.items()}
    return {name: np.array([[one]], TYPES[name]) for name, one in encoded.items()}


def _text(tensors: Mapping[str, np.ndarray], name: str) -> str:
    if name not in tensors or not tensors[name].size:
        return ""
    value = tensors[name].reshape(-1)[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _rows(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """[rows, vocab] of an output with leading dimensions of 1. None: it was not sent."""
    if name not in tensors or tensors[name].size <= 1:
        return None
    return tensors[name].reshape(tensors[name].shape[-2:]).astype(np.float32)

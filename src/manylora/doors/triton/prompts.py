"""PromptRunner: runs a prompt on the engine's model, and yields its outputs. How inputs are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from manylora.adapters.catalog.texts import RepositoryTexts
from manylora.config.model import ModelConfig
from manylora.config.pooling import PoolingSettings, read_pooling_settings
from manylora.config.repository import ENGINE, engine_context, parameters_beside, value_of
from manylora.doors.triton.bls import CallModel, ClientRequest, stop_request
from manylora.doors.triton.engine_client import AnswerReader, request_tensors
from manylora.doors.triton.server_types import Arrays, utf8
from manylora.doors.triton.tensor_table import STATISTICS
from manylora.errors import ConfigError, RequestCancelledError, RequestError
from manylora.generation.decoding import Decoding, decoding_of
from manylora.generation.defaults import NO_DEFAULTS, OwnText
from manylora.generation.generation import Generation
from manylora.generation.outputs import CompletionOutput, TokenLogprob
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, LoraMix, Pooling, Request, mix

STATISTICS_NAMES = tuple(tensor.name for tensor in STATISTICS)
OUTPUTS = [
    "output_ids", "sequence_length", "output_log_probs", "generation_logits", "sequence_index",
    "finish_reason", "lora_cache_tier", *STATISTICS_NAMES,
]  # fmt: skip
POOLED_OUTPUTS = ["output_ids", "sequence_index", "finish_reason", "pooled_output"]
NEVER = -1e30  # added to a logit


@dataclass(frozen=True)
class PromptRequest:
    """What one request asks for, independent of the names of its inputs.

    top: alternatives to show per token; None: no log probabilities of tokens. allowed: the only tokens that
    may be generated; empty: all. bias: token -> addition to its logit. statistics: whether
    `Answer.statistics` is needed. output_penalties: as in `SamplingConfig.with_output_penalties`.
    """

    text: str
    params: SamplingParams
    lora: LoraInput | LoraMix | None = None
    streaming: bool = False
    top: int | None = None
    allowed: tuple[int, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    statistics: bool = False
    output_penalties: bool = False


@dataclass(frozen=True)
class Answer:
    """The outputs so far. alternatives: for the new tokens of each output. prompt: its ids. statistics: of
    the engine, by the names of its outputs; empty unless requested. tokenizer: of its text.
    """

    outputs: list[CompletionOutput]
    alternatives: list[list[TokenLogprob]]
    prompt: tuple[int, ...]
    finished: bool
    statistics: Mapping[str, float]
    tokenizer: Tokenizer


@dataclass(frozen=True)
class EngineSetup:
    """The engine's model, as described by its folder in the repository.

    context: tokens of prompt and output; None: unknown. streams: whether it may return several responses.
    pooling: how embeddings are computed. texts: what comes with adapters; None: nothing is trusted.
    """

    name: str
    tokenizer: Tokenizer
    model: ModelConfig
    context: int | None
    streams: bool
    pooling: PoolingSettings = field(default_factory=PoolingSettings)
    texts: RepositoryTexts | None = None

    @classmethod
    def open(cls, folder: Path, parameters: Mapping[str, str]) -> EngineSetup:
        """folder: of the calling model in the repository. parameters: its own. Raises ConfigError."""
        name = value_of(parameters, "tensorrt_llm_model_name") or ENGINE
        engine = parameters_beside(folder, name)
        model_dir = value_of(engine, "gpt_model_path")
        if model_dir is None:
            raise ConfigError(
                f"{folder.name} needs the model {name} beside it, with its engine_dir filled in"
            )
        beside = value_of(parameters_beside(folder, "preprocessing"), "tokenizer_dir")
        tokenizer = Tokenizer(Path(value_of(parameters, "tokenizer_dir") or beside or model_dir))
        text = (folder.parent / name / "config.pbtxt").read_text(encoding="utf-8")
        streams = re.search(r"decoupled:\s*true", text, re.IGNORECASE) is not None
        config, pooling = read_model_config(Path(model_dir)), read_pooling_settings(Path(model_dir))
        texts = RepositoryTexts.open(folder, tokenizer, name)
        return cls(name, tokenizer, config, engine_context(folder, name), streams, pooling, texts)


class PromptRunner:
    def __init__(self, call: CallModel, engine: EngineSetup) -> None:
        self._call, self._engine, self.pooling = call, engine, engine.pooling

    def text_of(self, lora: LoraInput | LoraMix | None) -> OwnText:
        """The tokenizer, and defaults for values that a request does not set. Raises AdapterInvalidError."""
        own = self._engine.texts.of(lora) if self._engine.texts is not None else None
        return own or OwnText(self._engine.tokenizer, NO_DEFAULTS)

    def answers(self, client: ClientRequest, asked: PromptRequest) -> Iterator[Answer]:
        """One answer per part of a stream, otherwise only the finished one. Raises RequestError."""
        own = self.text_of(asked.lora)
        tokenizer = own.tokenizer
        ids, decoding = self._decoding(asked, own)
        state = Generation(ids, decoding, tokenizer, asked.streaming)
        request = state.request(asked.lora)
        request = request if self._engine.streams else replace(request, streaming=False)
        reader, statistics = AnswerReader(request), dict[str, float]()
        tensors = request_tensors(request)
        if asked.statistics:
            tensors["return_perf_metrics"] = np.array([[True]])
        with client.engine_request(self._engine.name) as request_id:
            for response in self._call(self._engine.name, tensors, OUTPUTS, request_id):
                arrays = {name: tensor.as_numpy() for name, tensor in response.items()}
                statistics |= {n: a.item() for n, a in arrays.items() if n in STATISTICS_NAMES}
                if state.finished:
                    continue
                for event in reader.read(arrays, final=False):
                    state.take(event)
                if asked.streaming and not state.finished:
                    yield from self._answer(state, asked, statistics, tokenizer)
                if state.finished and not reader.done:  # at a stop text
                    stop_request(self._call, self._engine.name, request_id)
        for event in reader.read({}, final=True):
            state.take(event)
        yield from self._answer(state, asked, statistics, tokenizer)

    def pooled(
        self,
        client: ClientRequest,
        prompt: str | Sequence[int],
        pooling: Pooling,
        lora: LoraInput | LoraMix | None,
    ) -> tuple[tuple[int, ...], np.ndarray]:
        """The prompt's ids, and the engine's result: [n], or [tokens, n], float32. Raises RequestError."""
        engine, tokenizer = self._engine, self.text_of(lora).tokenizer
        ids = tokenizer.encode(prompt, context=engine.context) if isinstance(prompt, str) else prompt
        request = Request(tuple(ids), lora=lora, pooling=pooling)
        reader, found = AnswerReader(request), None
        with client.engine_request(engine.name) as request_id:
            for response in self._call(engine.name, request_tensors(request), POOLED_OUTPUTS, request_id):
                arrays = {name: tensor.as_numpy() for name, tensor in response.items()}
                for event in reader.read(arrays, final=False):
                    found = event.pooled if event.pooled is not None else found
        if found is None:
            raise RequestCancelledError("The request was cancelled")
        return request.prompt, found

    def _decoding(self, asked: PromptRequest, own: OwnText) -> tuple[tuple[int, ...], Decoding]:
        engine, params, tokenizer, end_ids = self._engine, asked.params, own.tokenizer, own.defaults.end_ids
        end_ids = engine.model.eos_token_ids if end_ids is None else end_ids
        ids = tokenizer.encode(asked.text, params.add_special_tokens, engine.context)
        ids = ids[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else ids
        try:
            decoding = decoding_of(params, tokenizer, end_ids)
        except ValueError as error:
            raise RequestError(str(error)) from None
        prompt = 1 if engine.model.encoder else len(ids)  # the encoder reads the prompt
        decoding = decoding.within(engine.context - prompt) if engine.context is not None else decoding
        made = decoding.params.with_output_penalties() if asked.output_penalties else decoding.params
        made = replace(made, return_generation_logits=asked.top is not None)
        if asked.bias or asked.allowed:
            size = engine.model.vocab_size
            unknown = next((i for i in (*asked.allowed, *asked.bias) if not 0 <= i < size), None)
            if unknown is not None:
                name = "allowed_token_ids" if unknown in asked.allowed else "logit_bias"
                raise RequestError(f"{name}: {unknown} is no token of this model, which has {size}")
            bias = np.full(size, NEVER if asked.allowed else 0, np.float32)
            bias[list(asked.allowed)] = 0
            for token, value in asked.bias.items():
                bias[token] += value
            made = replace(made, logit_bias=bias)
        # At least one alternative: log probabilities then come with ranks.
        top = None if asked.top is None else max(1, asked.top)
        return tuple(ids), replace(decoding, params=made, top=top)

    def _answer(
        self, state: Generation, asked: PromptRequest, statistics: dict[str, float], tokenizer: Tokenizer
    ) -> Iterator[Answer]:
        if state.error is not None:
            raise state.error
        outputs = state.report()
        if not state.finished and not any(one.token_ids_diff or one.text_diff for one in outputs):
            return
        found = []
        for index, one in enumerate(outputs):
            known = state.alternatives(index) if asked.top is not None else []
            found.append(list(known[len(one.token_ids) - len(one.token_ids_diff) : len(one.token_ids)]))
        yield Answer(outputs, found, state.prompt, state.finished, statistics, tokenizer)


def scalar(arrays: Arrays, name: str, default: Any = None) -> Any:
    """The single value of an input; bytes as text. Raises RequestError."""
    if name not in arrays:
        return default
    array = arrays[name]
    if array.size != 1:
        raise RequestError(f"Expected a scalar tensor for tensor {name}, got {array.size} values")
    value = array.reshape(-1)[0]
    return utf8(value, name) if isinstance(value, bytes | str) else value.item()


def texts(arrays: Arrays, name: str) -> list[str]:
    return [utf8(value, name) for value in arrays[name].reshape(-1)] if name in arrays else []


def text_tensor(values: Iterable[str]) -> np.ndarray:
    return np.array([value.encode() for value in values], np.object_)


def read_json(text: str, name: str, most: int) -> Any:
    """The value of an input that holds JSON. most: bytes. Raises RequestError."""
    if len(text) > most:
        raise RequestError(f"{name} must have at most {most} bytes, got {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"{name} must be valid JSON, got {text!r:.80}") from None


def named_mix(
    names: Sequence[str] | None, scales: Sequence[float] | None, field: str
) -> LoraInput | LoraMix | None:
    """Adapters that act together. scales: None: 1 each. field: names them. Raises RequestError."""
    if names is None:
        raise RequestError(f"{field.replace('names', 'scales')} need lora_mix_names")
    if scales is not None and len(scales) != len(names):
        raise RequestError(f"{field} must have one of lora_mix_scales for each: {len(names)}")
    members = [LoraInput(None, name=name) for name in names]
    return mix(list(zip(members, scales or [1.0] * len(names), strict=True)), field)

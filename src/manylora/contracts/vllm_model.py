"""VllmModel: requests and responses of vllm_backend's model, with the `embedding_request` that Triton's
OpenAI frontend sends for `/v1/embeddings`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.config.values import read_settings
from manylora.contracts.prompts import Answer, PromptRequest, PromptRunner
from manylora.contracts.tensors import read_json, refuse, scalar, text_tensor
from manylora.contracts.vllm_sampling import LORA_KEYS, NAME, adapters, asked, read_parameters
from manylora.errors import AdapterNotFoundError, RequestError
from manylora.generation.outputs import CompletionOutput, TokenLogprob
from manylora.generation.pooled import PoolingParams, check_dimensions, embedding
from manylora.generation.sampling import is_unicode
from manylora.generation.stream import WINDOW
from manylora.request import Pooling
from manylora.wire.bls import ClientRequest, Values
from manylora.wire.bls_worker import LastOutputs
from manylora.wire.client_errors import check_parameters, check_phase
from manylora.wire.server_types import Arrays, ServerRequest
from manylora.wire.shape_guard import read_inputs

EMBEDDING_REQUEST = "embedding_request"
MAX_BYTES = 2**22  # maximum size of the JSON
MAX_ID = 2**31 - 1


def read_embedding_request(text: str, settings: PoolingSettings) -> tuple[str | list[int], PoolingParams]:
    """The prompt as text or token ids, and how to process its embedding. Raises RequestError.

    text: JSON with `input`, and `pooling_params` with `dimensions`, a number or a list with one.
    """
    given = _object(
        read_json(text, EMBEDDING_REQUEST, MAX_BYTES), EMBEDDING_REQUEST, ("input", "pooling_params")
    )
    prompt = given.get("input")
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_id, prompt)))):
        raise RequestError(f"{EMBEDDING_REQUEST}: input must be one text, or token ids, got {prompt!r:.80}")
    if isinstance(prompt, str) and not is_unicode(prompt):
        raise RequestError(f"{EMBEDDING_REQUEST}: input must be valid Unicode, got {prompt!r:.80}")
    params = _object(
        given.get("pooling_params") or {}, f"{EMBEDDING_REQUEST}: pooling_params", ("dimensions",)
    )
    dimensions = params.get("dimensions")
    if isinstance(dimensions, list) and len(dimensions) == 1:
        [dimensions] = dimensions
    if dimensions is None:
        return prompt, PoolingParams()
    if type(dimensions) is not int:
        raise RequestError(f"{EMBEDDING_REQUEST}: dimensions must be a whole number, got {dimensions!r:.80}")
    try:
        check_dimensions(dimensions, settings)
    except ValueError as error:
        raise RequestError(f"{EMBEDDING_REQUEST}: {error}") from None
    return prompt, PoolingParams(dimensions)


def _object(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {value!r:.80}")
    unknown = next((key for key in value if key not in keys), None)
    if unknown is not None:
        raise RequestError(f"{name} has the unknown key {unknown!r:.80}: leave it out")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


EXTRAS = (
    "return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
    "return_num_output_tokens",
)  # fmt: skip

NOT_ENABLED = "LoRA feature is not enabled."

logger = logging.getLogger("manylora")

Observe = Callable[[PromptRequest, Answer], None]


class VllmModel:
    """names: of the adapters in multi_lora.json, for an error message. enabled: whether adapters are
    supported. observe: called with every finished answer; None: no metrics.
    """

    def __init__(
        self,
        runner: PromptRunner,
        names: Sequence[str],
        enabled: bool = True,
        observe: Observe | None = None,
    ) -> None:
        self._runner = runner
        self._names, self._enabled, self._observe = list(names), enabled, observe

    def answer(self, client: ClientRequest, request: ServerRequest[Any]) -> Iterator[Values]:
        name = ""
        try:
            arrays = read_inputs(request.inputs())
            extras = {name for name in EXTRAS if scalar(arrays, name, False)}
            given = self._given(arrays, request.parameters())
            name = given.get("lora_name", "")
            if "embedding_request" in arrays:
                yield self._embedding(client, arrays, given, extras)
                return
            what, prompt = self._asked(arrays, given, extras)
            for answer in self._runner.answers(client, what):
                if answer.finished and self._observe is not None:
                    self._observe(what, answer)
                found = self._response(answer, what, extras, prompt)
                yield LastOutputs(found) if answer.finished else found
                prompt = ""  # only once
        except RequestError as error:
            raise RequestError(self._explained(str(error), name)) from None

    def stop(self, model: str, request_id: str) -> None:
        self._runner.stop(model, request_id)

    def _given(self, arrays: Arrays, own: str) -> dict[str, Any]:
        """The result of `read_parameters`. own: the request's own parameters, used if there is no input."""
        sent = scalar(arrays, NAME)
        if sent is None:
            check_phase(own)
        else:
            check_parameters(own)
        given = read_parameters(own if sent is None else sent, own=sent is None)
        if any(name in given for name in LORA_KEYS) and not self._enabled:
            raise RequestError(NOT_ENABLED)
        return given

    def _embedding(
        self, client: ClientRequest, arrays: Arrays, given: Mapping[str, Any], extras: set[str]
    ) -> LastOutputs:
        others = sorted(given.keys() - set(LORA_KEYS))
        if others:
            raise RequestError(f"{NAME}: {others[0]} means nothing to an embedding: leave it out")
        flags = [name for name in ("stream", *EXTRAS[:3]) if scalar(arrays, name, False)]
        for name in [name for name in ("text_input", "image") if name in arrays] + flags:
            raise RequestError(f"{name} means nothing beside embedding_request: leave it out")
        settings = self._runner.pooling
        prompt, params = read_embedding_request(scalar(arrays, "embedding_request"), settings)
        ids, values = self._runner.pooled(client, prompt, Pooling(settings.mode), adapters(given))
        found = {"text_output": text_tensor([json.dumps(embedding(values, settings, params).tolist())])}
        for name, count in (("num_input_tokens", len(ids)), ("num_output_tokens", 0)):
            if f"return_{name}" in extras:
                found[name] = np.array([count], np.uint32)
        return LastOutputs(found)

    def _asked(self, arrays: Arrays, given: Mapping[str, Any], extras: set[str]) -> tuple[PromptRequest, str]:
        """The request, and the text to put before the output. given: from `_given`."""
        refuse(arrays, "image")
        if "text_input" not in arrays:
            raise RequestError("text_input is required")
        text, streaming = scalar(arrays, "text_input"), bool(scalar(arrays, "stream", False))
        exclude = scalar(arrays, "exclude_input_in_output", streaming)
        if streaming and not exclude:
            raise RequestError("When streaming, `exclude_input_in_output` = False is not allowed.")
        lora = adapters(given)
        defaults = self._runner.defaults(lora)
        made = asked(text, given, streaming, "return_cumulative_logprob" in extras, lora, defaults)
        made = replace(made, statistics=self._observe is not None)
        return made, "" if exclude else text

    def _explained(self, error: str, name: str) -> str:
        """The error in vllm_backend's words. name: of the requested adapter."""
        if self._names and error == str(AdapterNotFoundError(name)):
            return f"LoRA {name} is not supported, we currently support {self._names}"
        return error if error == NOT_ENABLED else f"Error generating stream: {error}"

    def _response(
        self, answer: Answer, what: PromptRequest, extras: set[str], prompt: str
    ) -> dict[str, np.ndarray]:
        outputs = answer.outputs
        found = {"text_output": text_tensor(prompt + one.text_diff for one in outputs)}
        if "return_finish_reason" in extras:
            found["finish_reason"] = text_tensor(str(_reason(one)) for one in outputs)
        if "return_cumulative_logprob" in extras:
            found["cumulative_logprob"] = np.array([one.cumulative_logprob for one in outputs], np.float32)
        if "return_logprobs" in extras:
            rows = [self._logprobs(answer, one, what.top) for one in outputs]
            found["logprobs"] = text_tensor(json.dumps(row) for row in rows)
        if "return_num_input_tokens" in extras:
            found["num_input_tokens"] = np.array([len(answer.prompt)], np.uint32)
        if "return_num_output_tokens" in extras:
            found["num_output_tokens"] = np.array([len(one.token_ids_diff) for one in outputs], np.uint32)
        return found

    def _logprobs(
        self, answer: Answer, output: CompletionOutput, top: int | None
    ) -> list[dict[str, Any]] | None:
        """For each new token: the token itself and the `top` most probable ones, by id.

        Their texts concatenate to the output's: a token that is part of a character has none, and its last
        token has all of it.
        """
        if top is None:
            return None
        ids = [*answer.prompt[-WINDOW:], *output.token_ids]
        first = len(ids) - len(output.token_ids_diff)
        delta = answer.tokenizer.delta
        return [
            {
                str(token): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": delta(
                        ids[max(0, at - WINDOW) : at], [token], answer.finished and at + 1 == len(ids), False
                    ),
                }
                for token, value, rank in _ranked(one, top)
            }
            for at, one in enumerate(answer.alternatives[output.index], first)
        ]


def takes_adapters(file: Path) -> bool:
    """Whether model.json, if it exists, leaves adapters enabled. Its other keys configure an engine, which
    here is that of `tensorrt_llm`. Raises ConfigError.
    """
    given = read_settings(file)
    others = ", ".join(sorted(given.keys() - {"enable_lora"}))
    if others:
        logger.warning("model.json: %s have no effect here: the engine is that of tensorrt_llm", others)
    return str(given.get("enable_lora", True)).lower() == "true"


def _ranked(one: TokenLogprob, top: int) -> Iterator[tuple[int, float, int | None]]:
    """(token id, log probability, rank), the token of the output first."""
    yield one.token_id, one.logprob or 0.0, one.rank
    for rank, (token, value) in enumerate(one.top[:top], 1):
        if token != one.token_id:
            yield token, value, rank


def _reason(output: CompletionOutput) -> str | None:
    return "abort" if output.finish_reason == "cancelled" else output.finish_reason

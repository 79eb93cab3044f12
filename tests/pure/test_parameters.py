"""Protects that a sampling parameter acts wherever the table says that it can be given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_contracts import Engine, llmapi

from manylora.doors.http.api import ollama_request
from manylora.doors.http.api.params import Limits, plan
from manylora.doors.http.api.parsing import validate
from manylora.doors.http.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from manylora.doors.http.serving import anthropic, responses_api
from manylora.doors.triton.bls import TO_ENGINE
from manylora.doors.triton.codec import decode_requests
from manylora.doors.triton.tensor_table import MODELS
from manylora.doors.triton.vllm_model import asked, read_parameters
from manylora.generation.decoding import decoding_of, with_defaults
from manylora.generation.defaults import GenerationDefaults
from manylora.generation.sampling import ENTRY_POINTS, PARAMETERS, Parameter, SamplingParams, parameters_of
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import SamplingConfig

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
TOKENIZER, MODEL = Tokenizer(BASE), read_model_config(BASE)
LIMITS = Limits(512, TOKENIZER.vocab_size)
VALUES = {bool: False, int: 3, float: 0.5}
MESSAGES = [{"role": "user", "content": "a"}]


def in_engine(params: SamplingParams) -> SamplingConfig:
    return decoding_of(params, TOKENIZER, ()).params


def in_body(body: GenerationRequest) -> SamplingConfig:
    return plan(body, 1, TOKENIZER, MODEL, LIMITS).params


def by_tensors(**more: Any) -> SamplingConfig:
    arrays = {"input_ids": np.array([[1]]), "request_output_len": np.array([9])}
    arrays |= {name: np.array([value]) for name, value in more.items()}
    [decoded] = decode_requests(arrays, "", True)
    return decoded.request.params


def by_bls(one: Parameter, value: Any) -> SamplingConfig:
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert one.text in {tensor.name for tensor in MODELS[model].inputs}
    return by_tensors(**{TO_ENGINE[one.text]: value})


def by_llmapi(one: Parameter, value: Any) -> SamplingConfig:
    assert f"sampling_param_{one.name}" in {tensor.name for tensor in MODELS["llmapi"].inputs}
    engine = Engine()
    llmapi(engine, text_input="a", **{f"sampling_param_{one.name}": value})
    [decoded] = decode_requests(engine.asked[0], "", True)
    return decoded.request.params


def by_vllm(one: Parameter, value: Any) -> SamplingConfig:
    given = read_parameters(json.dumps({one.name: value}), own=False)
    return in_engine(asked("a", given, False, False).params)


def by_http(one: Parameter, value: Any) -> SamplingConfig:
    responses = validate({"input": "a", one.name: value}, responses_api.ResponsesRequest)
    chat = validate({"messages": MESSAGES, one.name: value}, ChatRequest)
    found = in_body(validate({"prompt": "a", one.name: value}, CompletionRequest))
    for other in (responses_api.chat_request(responses), chat):
        assert getattr(in_body(other), one.name) == getattr(found, one.name)
    return found


def by_ollama(one: Parameter, value: Any) -> SamplingConfig:
    # Penalties are divided by the temperature.
    body = {"model": "m", "options": {"temperature": 1.0, one.option: value}}
    generate = validate({"prompt": "a", **body}, ollama_request.OllamaGenerate)
    chat = validate({"messages": MESSAGES, **body}, ollama_request.OllamaChat)
    found = in_body(ollama_request.chat_request(chat, "m"))
    raw = in_body(ollama_request.completion_request(generate, "m"))
    assert getattr(raw, one.name) == getattr(found, one.name)
    return found


def by_anthropic(one: Parameter, value: Any) -> SamplingConfig:
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, one.name: value}
    return in_body(anthropic.chat_request(validate(body, anthropic.MessagesRequest)))


def by_files(one: Parameter, value: Any) -> SamplingConfig:
    defaults = GenerationDefaults.parse({one.name: value}, 100)
    for body in (
        CompletionRequest.model_validate({"prompt": "a"}),
        validate({"messages": MESSAGES}, ChatRequest),
    ):
        params = plan(body, 1, TOKENIZER, MODEL, LIMITS, defaults=defaults).params
        assert getattr(params, one.name) == value
    given = read_parameters("", own=False)
    assert getattr(in_engine(asked("a", given, False, False, None, defaults).params), one.name) == value
    assert getattr(by_tensors(sampling_defaults=json.dumps({one.name: value}).encode()), one.name) == value
    return in_engine(with_defaults(SamplingParams(), defaults, own_length=False))


WAYS: dict[str, Callable[[Parameter, Any], SamplingConfig]] = {
    "bls": by_bls, "llmapi": by_llmapi, "vllm": by_vllm, "http": by_http, "ollama": by_ollama,
    "anthropic": by_anthropic, "files": by_files,
}  # fmt: skip


@pytest.mark.parametrize("one", PARAMETERS, ids=lambda one: one.name)
def test_a_parameter_acts_wherever_it_can_be_given(one: Parameter) -> None:
    value = VALUES[one.kind]
    assert getattr(in_engine(SamplingParams(**{one.name: value})), one.name) == value
    assert getattr(by_tensors(**{one.tensor: value}), one.name) == value
    for name, way in WAYS.items():
        if one in parameters_of(name):
            found = getattr(way(one, value), one.name)
            assert found == value, name


def test_every_entry_point_is_named() -> None:
    assert set(WAYS) == set(ENTRY_POINTS)
    assert all(set(one.without) <= set(ENTRY_POINTS) for one in PARAMETERS)

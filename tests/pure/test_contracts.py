"""Protects what clients of vllm_backend and of TensorRT-LLM's llmapi model may ask for: every key acts or is
refused by its name, and answers have their shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_triton_workers import Tensor

from manylora.adapters.catalog.files import AdapterFolders
from manylora.adapters.catalog.names import read_names
from manylora.config.pooling import PoolingSettings
from manylora.doors.triton.bls import ClientRequest, Values
from manylora.doors.triton.llmapi_model import LlmapiModel
from manylora.doors.triton.prompts import EngineSetup, PromptRequest, PromptRunner
from manylora.doors.triton.vllm_model import (
    NO_EFFECT,
    REFUSED,
    TAKEN,
    VllmModel,
    adapters,
    asked,
    read_parameters,
    takes_adapters,
)
from manylora.errors import ConfigError, RequestError
from manylora.generation.sampling import PARAMETERS
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
TOKENIZER = Tokenizer(BASE)
SPOKEN = TOKENIZER.encode("Tokyo is the capital of Japan.", add_special_tokens=False)
VALUES: dict[str, Any] = {
    "lora_mix_names": ["doll"], "lora_mix_scales": [1, 2],
    "n": 2, "best_of": 3, "max_tokens": 6, "logprobs": 2, "truncate_prompt_tokens": 9, "ignore_eos": True,
    "detokenize": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    "stop": ["x"], "bad_words": "y", "stop_token_ids": [7], "allowed_token_ids": [8, 9],
    "logit_bias": {"3": 1.5}, "structured_outputs": '{"choice": ["a.b", "c"]}',
    "guided_decoding": {"regex": "a"}, "lora_name": "chinese",
}  # fmt: skip


class Engine:
    """In place of `tensorrt_llm`: says SPOKEN to whatever it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, np.ndarray]] = []

    def __call__(
        self, model: str, inputs: Values, outputs: Sequence[str], request_id: str = ""
    ) -> Iterator[Mapping[str, Tensor]]:
        self.asked.append(dict(inputs))  # type: ignore[arg-type]
        found = {
            "output_ids": np.array([[SPOKEN]], np.int32),
            "sequence_length": np.array([[len(SPOKEN)]], np.int32),
            "finish_reason": np.array([[b"length"]], np.object_),
        }
        yield {name: Tensor(name, array) for name, array in found.items()}


class Request:
    def __init__(self, parameters: str, **inputs: Any) -> None:
        self.parameters, self.request_id = (lambda: parameters), (lambda: "")
        self._inputs = inputs

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, _array(value)) for name, value in self._inputs.items()]


def _array(value: Any) -> np.ndarray:
    made = np.array(value if isinstance(value, list) else [value])
    return np.array([str(one).encode() for one in made], np.object_) if made.dtype.kind == "U" else made


def runner(engine: Engine) -> PromptRunner:
    model, settings = read_model_config(BASE), PoolingSettings()
    return PromptRunner(engine, EngineSetup("tensorrt_llm", TOKENIZER, model, 512, True, settings))


def vllm(engine: Engine, *, own: str = "{}", **inputs: Any) -> list[Values]:
    model = VllmModel(runner(engine), ["doll", "sheep"])
    given = {"sampling_parameters": json.dumps(inputs.pop("sampling"))} if "sampling" in inputs else {}
    return list(model.answer(ClientRequest(lambda: False), Request(own, **inputs, **given)))  # type: ignore[arg-type]


def llmapi(engine: Engine, folders: AdapterFolders | None = None, **inputs: Any) -> list[Values]:
    model = LlmapiModel(runner(engine), folders or AdapterFolders(), True)
    request = Request(inputs.pop("own", "{}"), **inputs)
    return list(model.answer(ClientRequest(lambda: False), request))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", sorted(TAKEN.keys() - {one.name for one in PARAMETERS}))
def test_every_key_that_is_taken_acts(key: str) -> None:
    """Those of the table of sampling parameters: test_parameters.py."""
    usual = {"max_tokens": 20, "temperature": 0.5, "seed": 1}
    usual |= {"lora_mix_names": ["doll", "bear"]} if key == "lora_mix_scales" else {}
    changed = {"detokenize": "false", "seed": 1} if key == "detokenize" else usual | {key: VALUES[key]}
    before, after = (read_parameters(json.dumps(one), False) for one in (usual, changed))
    assert made_of(before) != made_of(after)


def made_of(given: dict[str, Any]) -> tuple[PromptRequest, Any]:
    lora = adapters(given)
    return asked("a", given, False, False), lora and [(one.name, scale) for one, scale in lora.members]


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_every_key_that_cannot_act_is_refused_by_name(key: str) -> None:
    with pytest.raises(RequestError, match=f"{key} is not supported by this server: leave it out"):
        read_parameters(json.dumps({key: [1, 2]}), False)
    assert read_parameters(json.dumps(dict.fromkeys(REFUSED)), False) == {}  # null is no value


def test_what_has_no_effect_is_taken() -> None:
    assert read_parameters(json.dumps(dict.fromkeys(NO_EFFECT, 1)), False) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "sampling_parameters must be valid JSON, got '{'"),
        ("[" * 100_000, "must be valid JSON"),
        ('{"tempratur": 1}', "sampling_parameters has the unknown key 'tempratur': leave it out"),
        ('{"ignore_eos": 1}', "ignore_eos must be true or false, got 1"),
        ('{"n": 1000000000, "temperature": 1}', "n must be at most 128, got 1000000000"),
        ('{"temperature": NaN}', "temperature must be a number, got nan"),
        ('{"min_tokens": 17}', "min_tokens must be at most max_tokens, got 17"),
        ('{"structured_outputs": "{"}', "structured_outputs must be an object, or its JSON as text"),
        ('{"structured_outputs": {"structural_tag": "x"}}', "structured_outputs.structural_tag is not"),
        ('{"guided_decoding": {}, "structured_outputs": {}}', "are one setting: send one of them"),
        (r'{"structured_outputs": "{\"regex\": \"\\ud800\"}"}', "structured_outputs must be valid Unicode"),
        ('{"structured_outputs": {"choice": [""]}}', "choice must be a list of texts, none of them empty"),
        (r'{"lora_name": "\ud800"}', "lora_name must be valid Unicode, got"),
        ('{"logit_bias": {"5": 1e300}}', "logit_bias must be an object of token ids and numbers"),
    ],
)  # fmt: skip
def test_bad_parameters_are_told_in_one_line(text: str, words: str) -> None:
    with pytest.raises(RequestError) as error:
        asked("a", read_parameters(text, False), False, False)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_values_may_come_as_text_and_choices_become_a_guide() -> None:
    given = read_parameters('{"temperature": "0", "top_p": "1", "max_tokens": "1500"}', False)
    made = asked("a", given, False, False).params
    assert (made.temperature, made.top_p, made.max_tokens) == (0.0, 1.0, 1500)
    one_guide = VALUES | {"max_tokens": 9, "guided_decoding": None}
    made = asked("a", read_parameters(json.dumps(one_guide), False), False, True).params
    assert made.guided_decoding is not None and made.guided_decoding.regex == "a\\.b|c"
    assert asked("a", {}, False, False).params.max_tokens == 16


def test_of_the_requests_own_parameters_the_servers_are_left_alone() -> None:
    text = '{"temperature": 0, "triton_enable_empty_final_response": true, "priority": 1}'
    assert read_parameters(text, own=True) == {"temperature": 0.0}
    with pytest.raises(RequestError, match="unknown key 'priority'"):
        read_parameters('{"priority": 1}', own=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "embedding_request must be valid JSON, got '{'"),
        (r'{"input": "\ud800"}', "embedding_request: input must be valid Unicode"),
        ('{"inputs": "a"}', "embedding_request has the unknown key 'inputs': leave it out"),
        ("{}", "input must be one text, or token ids, got None"),
        ('{"input": "a", "pooling_params": {"dimensions": 2}}', "config.json names no matryoshka_dimensions"),
        (" " * (2**22 + 1), "must have at most 4194304 bytes"),
    ],
)  # fmt: skip
def test_bad_embedding_requests_are_told_in_one_line(text: str, words: str) -> None:
    with pytest.raises(RequestError) as error:
        vllm(Engine(), embedding_request=text)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["text_input", "image", "stream", "return_logprobs"])
def test_an_embedding_takes_nothing_of_a_generation(name: str) -> None:
    given = {name: "a" if name in ("text_input", "image") else True}
    with pytest.raises(RequestError, match=f"{name} means nothing beside embedding_request: leave it out"):
        vllm(Engine(), embedding_request='{"input": "a"}', **given)


def test_an_embedding_takes_no_sampling() -> None:
    with pytest.raises(RequestError, match="temperature means nothing to an embedding: leave it out"):
        vllm(Engine(), embedding_request='{"input": "a"}', sampling={"temperature": 0})
    with pytest.raises(RequestError, match="text_input is required"):
        vllm(Engine())


def test_adapters_among_the_parameters_are_not_ignored() -> None:
    for own in ('{"lora_name": "doll"}', '{"lora_mix_names": "doll"}', '{"pooling": "last"}'):
        with pytest.raises(RequestError, match="is no input of this model"):
            vllm(Engine(), text_input="Hi", sampling={}, own=own)
        with pytest.raises(RequestError, match="is no input of this model"):
            llmapi(Engine(), text_input="Hi", own=own)
    with pytest.raises(RequestError, match="lora_mix_scales need lora_mix_names"):
        vllm(Engine(), text_input="Hi", own='{"lora_mix_scales": [1]}')


def test_penalties_have_the_meaning_of_each_contract() -> None:
    engine = Engine()
    vllm(engine, text_input="Hi", sampling={"presence_penalty": 0.5, "temperature": 0.5, "seed": 1})
    llmapi(engine, text_input="Hi", sampling_param_presence_penalty=0.5, sampling_param_temperature=0.5)
    of_vllm, of_llmapi = engine.asked
    assert of_vllm["presence_penalty"].item() == 1.0  # before the temperature: here after it
    assert of_vllm["prompt_ignore_length"].item() > 10**6
    assert of_llmapi["presence_penalty"].item() == 0.5
    assert "prompt_ignore_length" not in of_llmapi


def test_a_folder_must_be_one_that_the_operator_named(tmp_path: Path) -> None:
    folders = AdapterFolders({"doll": tmp_path / "x" / "doll-lora"}, tmp_path / "catalog")
    assert folders.name_of(f"{tmp_path}/catalog/sheep") == "sheep"
    assert folders.name_of(f"{tmp_path}/x/../x/doll-lora/") == "doll"
    for path in ("/etc", f"{tmp_path}/catalog/../x", f"{tmp_path}/catalog/a/b", "sheep"):
        assert folders.name_of(path) is None
    with pytest.raises(RequestError, match="is no folder of this server's adapters"):
        llmapi(Engine(), folders, text_input="Hi", lora_path="/etc")
    engine = Engine()
    whole = {"lora_id": np.uint64(1), "lora_name": "any", "lora_path": f"{tmp_path}/catalog/sheep"}
    llmapi(engine, folders, text_input="Hi", **whole)
    assert engine.asked[0]["lora_name"].item() == b"sheep"


def test_files_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "sheep").mkdir()
    file = tmp_path / "multi_lora.json"
    file.write_text('{"doll": "/adapters/doll", "sheep": "sheep"}', encoding="utf-8")
    assert read_names(file) == {"doll": Path("/adapters/doll"), "sheep": tmp_path / "sheep"}
    for text, words in (
        ("[", "not valid JSON"),
        ("[]", "object of names"),
        ('{"a": 1}', "'a' must be a name"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            read_names(file)
    model = tmp_path / "model.json"
    assert takes_adapters(model)
    for text, takes in (('{"enable_lora": "true"}', True), ('{"enable_lora": false}', False)):
        model.write_text(text, encoding="utf-8")
        assert takes_adapters(model) is takes

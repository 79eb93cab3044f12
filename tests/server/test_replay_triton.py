"""Protects what every model of a real tritonserver answers over gRPC and HTTP, scenario by scenario, and the
inputs and outputs that it declares."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import Replay, metric_types, without
from servers import Running, World
from test_server import ask, tensor
from test_text_models import infer
from tiny_models import reference_generate
from tritonclient.utils import InferenceServerException
from waiting import wait_for

from manylora.adapters.formats.npy import read_npy

sys.path.append(str(Path(__file__).resolve().parents[1] / "replay"))

import tensor_scenarios

TEXT = {"text_input": "Hello", "max_tokens": 6, "end_id": -1}
ALONE = {"exclude_input_in_output": True}
SAMPLED = {"temperature": 3.0, "top_k": 0, "top_p": 0.99, "random_seed": 7}
PREPARED = {"QUERY": "Hello", "REQUEST_OUTPUT_LEN": 4}
IDS = [39, 68, 75, 75, 78]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}

TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without the prompt": ALONE,
    "log probabilities": {**ALONE, "return_log_probs": True},
    "a stop word": {**ALONE, "max_tokens": 30, "stop_words": ["zz", "f"]},
    "a bad word": {**ALONE, "bad_words": ["f", ":"]},
    "a bias": {**ALONE, "embedding_bias_words": ["x"], "embedding_bias_weights": [100.0]},
    "an adapter by its name": {**ALONE, "lora_name": "tiny-three"},
    "saved modules": {**ALONE, "lora_name": "tiny-saved"},
    "scales": {**ALONE, "lora_name": "tiny-scales"},
    "a prefix": {**ALONE, "lora_name": "tiny-prefix"},
    "a prompt": {**ALONE, "lora_name": "tiny-prompt"},
    "an adapter of the prefetch folder": {**ALONE, "lora_task_id": 4},
    "sampled": {**ALONE, **SAMPLED},
    "penalties": {**ALONE, "presence_penalty": -20.0, "frequency_penalty": 1.0},
    "beams": {**ALONE, "beam_width": 2},
    "a regex": {
        **ALONE,
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "[a-c]{3}x",
        "end_id": 257,
    },
    "refused: an unknown name": {"lora_name": "nobody"},
    "refused: an id that is not cached": {"lora_task_id": 987654321},
    "refused: no tokens": {"max_tokens": 0},
    "refused: a temperature below 0": {"temperature": -1.0},
    "refused: a bias without weights": {"embedding_bias_words": ["x"]},
    "refused: a regex": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
    "refused: a name of another server": {"adapter": "tiny-three"},
    "refused: a text that cannot fit": {"text_input": "a" * 400},
    "refused: a number as a text": {"max_tokens": "many"},
}
"""To `ensemble` and `tensorrt_llm_bls`, by `generate` and, where it is not refused, by `generate_stream`."""
PREPROCESSING: dict[str, dict[str, Any]] = {
    "a text": {},
    "Unicode": {"QUERY": "美国 é"},
    "stop words": {"STOP_WORDS_DICT": ["ab", "c"]},
    "bad words": {"BAD_WORDS_DICT": ["ab"]},
    "a bias": {"EMBEDDING_BIAS_WORDS": ["a"], "EMBEDDING_BIAS_WEIGHTS": [2.0]},
    "ends": {"END_ID": 5, "PAD_ID": 6},
    "refused: no UTF-8": {"QUERY": b"\xff"},
    "refused: an image": {"IMAGE_URL": "a"},
    "refused: words without weights": {"EMBEDDING_BIAS_WORDS": ["a"]},
}
POSTPROCESSING: dict[str, dict[str, Any]] = {
    "a text": {"TOKENS_BATCH": [[IDS]], "SEQUENCE_LENGTH": [[5]]},
    "padding": {"TOKENS_BATCH": [[IDS]], "SEQUENCE_LENGTH": [[3]]},
    "beams": {"TOKENS_BATCH": [[IDS, IDS[::-1]]], "SEQUENCE_LENGTH": [[5, 5]]},
    "half a character": {"TOKENS_BATCH": [[[163]]], "SEQUENCE_LENGTH": [[1]]},
    "the end of a character": {
        "TOKENS_BATCH": [[[122, 236]]],
        "SEQUENCE_LENGTH": [[2]],
        "PREVIOUS_IDS": [[[39, 163]]],
    },
    "refused: a negative id": {"TOKENS_BATCH": [[[-5]]], "SEQUENCE_LENGTH": [[1]]},
    "refused: a long length": {"TOKENS_BATCH": [[[5]]], "SEQUENCE_LENGTH": [[9]]},
}
VLLM: dict[str, dict[str, Any]] = {
    "greedy": {"sampling_parameters": GREEDY},
    "with the prompt": {"sampling_parameters": GREEDY, "exclude_input_in_output": False},
    "an adapter": {"sampling_parameters": {**GREEDY, "lora_name": "three"}},
    "facts": {
        "sampling_parameters": {**GREEDY, "logprobs": 1},
        **dict.fromkeys(("return_finish_reason", "return_cumulative_logprob", "return_logprobs"), True),
        **dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), True),
    },
    "samples": {
        "sampling_parameters": {"n": 2, "temperature": 3.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    },
    "a choice": {
        "sampling_parameters": {"temperature": 0, "structured_outputs": {"choice": ["red", "blue"]}}
    },
    "a bias": {"sampling_parameters": {**GREEDY, "logit_bias": {"87": 100}}},
    "refused: no JSON": {"sampling_parameters": "{"},
    "refused: an unknown key": {"sampling_parameters": {"x": 1}},
    "refused: an unknown adapter": {"sampling_parameters": {"lora_name": "nobody"}},
    "refused: an image": {"image": "aGk="},
    "refused: an unknown token": {"sampling_parameters": {"allowed_token_ids": [99999]}},
}
LLMAPI: dict[str, dict[str, Any]] = {
    "greedy": {"sampling_param_max_tokens": 6},
    "facts": {
        "sampling_param_max_tokens": 6,
        "sampling_param_exclude_input_from_output": True,
        **dict.fromkeys(("return_finish_reason", "return_stop_reason", "return_cumulative_logprob"), True),
    },
    "an adapter": {
        "sampling_param_max_tokens": 6,
        "lora_id": 3,
        "lora_name": "three",
        "lora_path": "{three}",
    },
    "refused: no tokens": {"sampling_param_max_tokens": 0},
    "refused: an unknown adapter": {"lora_name": "nobody"},
    "refused: another folder": {"lora_id": 1, "lora_name": "x", "lora_path": "/etc"},
    "refused: a stream": {"streaming": True},
}
FIXED = (
    "preprocessing",
    "tensorrt_llm",
    "postprocessing",
    "ensemble",
    "tensorrt_llm_bls",
    "vllm_model",
    "llmapi",
)
CHANGING = re.compile(r"kv_cache_.*|.*_time_ns|lora_cache_tier|lora_versions|model_version|request_number|id")
GENERATED = [(model, name) for model in ("ensemble", "tensorrt_llm_bls") for name in TEXTS]
STREAMED = [
    (model, name) for model, name in GENERATED if not name.startswith("refused") and "beams" not in name
]


class Door:
    """Clients of one server."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self._folders = {"repo": server.repo, "folder": server.repo.parent}

    def told(self, error: Exception) -> str:
        return without(str(error), **self._folders)

    def generate(self, model: str, body: dict[str, Any]) -> Any:
        status, text = self.server.post(f"{model}/generate", **body)
        return {"status": status, "body": self._settled(json.loads(text))}

    def stream(self, model: str, body: dict[str, Any]) -> Any:
        """Texts of the pieces together, and the values of the last one."""
        pieces = self.server.stream(model, **body)
        last = self._settled(pieces[-1])
        return {
            "status": 200,
            "text": "".join(one["text_output"] for one in pieces),
            "last": without_text(last),
        }

    def _settled(self, body: dict[str, Any]) -> Any:
        found = {name: value for name, value in body.items() if not CHANGING.fullmatch(name)}
        if "error" in found:
            found["error"] = without(found["error"], **self._folders)
        if "logprobs" in found:
            found["logprobs"] = json.loads(found["logprobs"])
        return found

    def infer(self, model: str, values: dict[str, np.ndarray]) -> Any:
        try:
            result = infer(self.server, model, **values)
        except InferenceServerException as error:
            return self.told(error)
        names = sorted(one.name for one in result.get_response().outputs)
        return {name: result.as_numpy(name) for name in names if not CHANGING.fullmatch(name)}


def without_text(body: dict[str, Any]) -> dict[str, Any]:
    """Of the last piece: what it has besides values for its own tokens."""
    own = ("text_output", "output_log_probs")
    return {name: value for name, value in body.items() if name not in own}


@pytest.fixture(scope="module")
def door(server: Running) -> Door:
    return Door(server)


@pytest.fixture(scope="module")
def others(contracts: Running) -> Door:
    return Door(contracts)


@pytest.fixture(scope="module")
def tensors(world: World) -> tensor_scenarios.World:
    greedy = reference_generate(world.model, None, tensor_scenarios.PROMPT, 3)
    return tensor_scenarios.World(
        lambda task_id: read_npy(world.converted / str(task_id)), "tiny-three", greedy
    )


@pytest.mark.parametrize("name", tensor_scenarios.TENSORS)
def test_tensorrt_llm(name: str, door: Door, tensors: tensor_scenarios.World, replay: Replay) -> None:
    given = tensor_scenarios.TENSORS[name]
    arrays = tensors.arrays(given)
    wide = {key: value if value.ndim > 1 else value[np.newaxis] for key, value in arrays.items()}
    try:
        results = ask(door.server, [tensor(*pair) for pair in wide.items()])
    except InferenceServerException as error:
        replay(f"tensorrt_llm: {name}", door.told(error))
        return
    answers = [
        {one.name: result.as_numpy(one.name) for one in result.get_response().outputs} for result in results
    ]
    replay(f"tensorrt_llm: {name}", tensor_scenarios.settled(answers, bool(given.get("streaming"))))


@pytest.mark.parametrize(("model", "name"), GENERATED)
def test_generate(model: str, name: str, door: Door, replay: Replay) -> None:
    replay(f"{model}: {name}", door.generate(model, TEXT | TEXTS[name]))


@pytest.mark.parametrize(("model", "name"), STREAMED)
def test_generate_stream(model: str, name: str, door: Door, replay: Replay) -> None:
    replay(f"{model}, a stream: {name}", door.stream(model, TEXT | TEXTS[name]))


@pytest.mark.parametrize("name", PREPROCESSING)
def test_preprocessing(name: str, door: Door, replay: Replay) -> None:
    found = door.infer(
        "preprocessing",
        {key: _text_array(key, value) for key, value in (PREPARED | PREPROCESSING[name]).items()},
    )
    if isinstance(found, dict):  # almost all of a bias is zeros
        bias = found.pop("EMBEDDING_BIAS")
        found["biases"] = {int(i): float(bias.ravel()[i]) for i in np.flatnonzero(bias)}
    replay(f"preprocessing: {name}", found)


@pytest.mark.parametrize("name", POSTPROCESSING)
def test_postprocessing(name: str, door: Door, replay: Replay) -> None:
    values = {key: np.array(value, np.int32) for key, value in POSTPROCESSING[name].items()}
    replay(f"postprocessing: {name}", door.infer("postprocessing", values))


@pytest.mark.parametrize("name", VLLM)
def test_vllm_model(name: str, others: Door, replay: Replay) -> None:
    given = {"text_input": "Hello", "exclude_input_in_output": True, **VLLM[name]}
    sampling = given.get("sampling_parameters", GREEDY)
    given["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
    replay(f"vllm_model: {name}", others.generate("vllm_model", given))


def test_vllm_model_in_a_stream(others: Door, replay: Replay) -> None:
    given = {"text_input": "Hello", "sampling_parameters": json.dumps({**GREEDY, "lora_name": "three"})}
    replay("vllm_model: a stream", others.stream("vllm_model", given))


@pytest.mark.parametrize("name", LLMAPI)
def test_llmapi(name: str, others: Door, named: Any, replay: Replay) -> None:
    given = {
        key: str(named.folders["three"]) if value == "{three}" else value
        for key, value in LLMAPI[name].items()
    }
    replay(f"llmapi: {name}", others.generate("llmapi", {"text_input": "Hello", **given}))


@pytest.mark.parametrize("model", FIXED)
def test_declared_tensors(model: str, others: Door, replay: Replay) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{others.server.http}/v2/models/{model}") as answer:
        found = json.loads(answer.read())
    tensors = {
        kind: {one["name"]: f"{one['datatype']} {one['shape']}" for one in found[kind]}
        for kind in ("inputs", "outputs")
    }
    replay(f"declared: {model}", tensors)


def test_names_of_metrics(door: Door, replay: Replay) -> None:
    door.generate("ensemble", TEXT | {"lora_name": "tiny-three"})
    found: list[str] = []

    def complete() -> bool:  # the engine's numbers come with the next period
        with urllib.request.urlopen(f"http://127.0.0.1:{door.server.metrics}/metrics") as answer:
            found[:] = metric_types(answer.read().decode())
        names = {one.split()[0] for one in found}
        return {"manylora_adapter_ttft_seconds", "manylora_adapter_resident_bytes"} <= names

    wait_for(complete, what="the metrics of an adapter")
    replay("metrics", found)


def test_every_record_is_played(replay: Replay) -> None:
    replay.check_names([
        *(f"tensorrt_llm: {name}" for name in tensor_scenarios.TENSORS),
        *(f"{model}: {name}" for model, name in GENERATED),
        *(f"{model}, a stream: {name}" for model, name in STREAMED),
        *(f"preprocessing: {name}" for name in PREPROCESSING),
        *(f"postprocessing: {name}" for name in POSTPROCESSING),
        *(f"vllm_model: {name}" for name in (*VLLM, "a stream")),
        *(f"llmapi: {name}" for name in LLMAPI),
        *(f"declared: {model}" for model in FIXED),
        "metrics",
    ])  # fmt: skip


def _text_array(name: str, value: Any) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        return np.array([[one.encode() if isinstance(one, str) else one for one in values]], np.object_)
    return np.array([values], np.float32 if isinstance(values[0], float) else np.int32)

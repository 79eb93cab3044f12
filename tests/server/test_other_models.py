"""Protects the doors for clients of vllm_backend and of TensorRT-LLM's llmapi model: over a real tritonserver
that was filled without a word about them, with adapters by name, in a cache that holds two of them."""

from __future__ import annotations

import json
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from launched import children, scrape, scrape_until
from servers import NAMES, Named, Running, World
from test_server import tensor
from tiny_models import reference_generate
from tritonclient.utils import InferenceServerException
from waiting import wait_for_named as wait_for

from manylora.doors.triton import bls_worker
from manylora.generation.tokenizer import Tokenizer

TEXT, NEW = "Hello", 6
GREEDY = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(named: Named) -> dict[str, Path]:
    return named.folders


@pytest.fixture(scope="module")
def server(contracts: Running) -> Running:
    return contracts


def expected(world: World, folder: Path | None, new: int = NEW) -> str:
    tokenizer = Tokenizer(world.model)
    return tokenizer.decode(reference_generate(world.model, folder, tokenizer.encode(TEXT), new))


def vllm(server: Running, *, name: str | None = None, **body: Any) -> dict[str, Any]:
    sampling = GREEDY | ({"lora_name": name} if name else {})
    given = {"text_input": TEXT, "sampling_parameters": json.dumps(sampling), "exclude_input_in_output": True}
    status, text = server.post("vllm_model/generate", **given | body)
    assert status == 200, text
    return json.loads(text)  # type: ignore[no-any-return]


def stream(
    server: Running, model: str, inputs: dict[str, np.ndarray], parameters: dict[str, Any] | None = None
) -> list[grpc.InferResult]:
    """Every response of one request over a gRPC stream."""
    answers: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        made = [tensor(name, value) for name, value in inputs.items()]
        client.async_stream_infer(model, made, parameters=parameters, enable_empty_final_response=True)
        results = []
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            if result.get_response().outputs:
                results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return results


def words(text: str) -> np.ndarray:
    return np.array([text.encode()], np.object_)


def test_adapters_by_name_take_turns_in_a_cache_of_two(
    server: Running, world: World, folders: dict[str, Path]
) -> None:
    cases = [(None, *NAMES)[i % 5] for i in range(20)]

    def one(name: str | None) -> str:
        return str(vllm(server, name=name)["text_output"])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, cases))
    answers = {name: expected(world, folders[name] if name else None) for name in (None, *NAMES)}
    assert len(set(answers.values())) == 5
    assert found == [answers[name] for name in cases]
    more = {"sampling_param_max_tokens": NEW, "sampling_param_exclude_input_from_output": True, "lora_id": 9}
    for name in (*NAMES, *NAMES):
        given = {"text_input": TEXT, "lora_name": name, "lora_path": str(folders[name]), **more}
        status, text = server.post("llmapi/generate", **given)
        assert status == 200 and json.loads(text)["text_output"].startswith(answers[name][:1])
    wait_for("the metrics of the last seconds", lambda: evictions(server) > 4)


def evictions(server: Running) -> float:
    found = [
        value for name, value in scrape(server).items() if name.startswith("manylora_lora_cache_evictions")
    ]
    return max(found)


def test_their_processes_wait_for_mutexes_without_pythons_lock(server: Running) -> None:
    if bls_worker.load() is None:
        pytest.skip("there is no compiler")
    found = [
        (process / "maps").read_text()
        for process in map(Path, map("/proc/{}".format, children(server.state()["server"])))
        if b"/models/vllm_model/" in (process / "cmdline").read_bytes()
    ]
    assert len(found) == 1 and "lock_guard" in found[0]
    assert "its mutexes are as they were" not in (server.run_dir / "server.log").read_text()


def test_parameters_of_the_request_stand_in_for_the_input(server: Running, world: World) -> None:
    """As vllm_backend's README asks."""
    status, text = server.post("vllm_model/generate", text_input=TEXT, parameters={"stream": False} | GREEDY)
    assert status == 200, text
    assert json.loads(text)["text_output"] == TEXT + expected(world, None)
    results = stream(
        server, "vllm_model", {"text_input": words(TEXT)}, {"temperature": "0", "max_tokens": "6"}
    )
    assert results[0].as_numpy("text_output")[0].decode().startswith(TEXT)


BODIES: dict[str, dict[str, Any]] = {
    "ensemble": {"text_input": TEXT, "max_tokens": 2},
    "tensorrt_llm_bls": {"text_input": TEXT, "max_tokens": 2},
    "tensorrt_llm": {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 2},
    "vllm_model": {"text_input": TEXT},
    "llmapi": {"text_input": TEXT},
}


@pytest.mark.parametrize("model", BODIES)
def test_no_model_answers_with_the_base_model_when_an_adapter_is_asked_for(
    server: Running, model: str
) -> None:
    """By a name that means an adapter elsewhere: such fields of `generate` become request parameters."""
    for path in ("generate", "generate_stream"):
        for name in ("lora", "adapter", "adapter_id", "model"):
            _, text = server.post(f"{model}/{path}", **BODIES[model], **{name: "three"})
            assert f"{name} is no input of this model" in text and "lora_name" in text, text
    if model == "vllm_model":
        with pytest.raises(InferenceServerException, match="adapter is no input of this model"):
            stream(server, model, {"text_input": words(TEXT)}, {"adapter": "three"})


def test_a_stop_request_ends_the_request_of_its_id(server: Running) -> None:
    """As TensorRT-LLM's client asks: over unary calls, the second while the first runs."""
    long = {
        "text_input": words(TEXT),
        "sampling_param_max_tokens": np.array([400], np.int32),
        "sampling_param_temperature": np.array([50.0], np.float32),  # any token, seldom the last
        "sampling_param_top_k": np.array([0], np.int32),
        "return_finish_reason": np.array([True]),
    }
    stop = {"text_input": np.empty([1], np.bytes_), "stop": np.array([True])}
    answers: queue.Queue = queue.Queue()
    with server.slow(), grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        made = [tensor(name, value) for name, value in long.items()]
        client.async_infer(
            "llmapi", made, lambda result, error: answers.put((result, error)), request_id="long"
        )
        while answers.empty():  # it may not have begun yet
            with pytest.raises(InferenceServerException, match="Request cancelled by client") as error:
                client.infer("llmapi", [_raw(name, value) for name, value in stop.items()], request_id="long")
            assert error.value.status() == "StatusCode.CANCELLED"
        result, failure = answers.get()
    assert failure is None and result.as_numpy("finish_reason")[0] == b"cancelled"


def _raw(name: str, value: np.ndarray) -> grpc.InferInput:
    made = grpc.InferInput(name, value.shape, "BYTES" if value.dtype.kind == "S" else "BOOL")
    made.set_data_from_numpy(value)
    return made


def test_vllms_metrics_count_what_was_asked(server: Running) -> None:
    label = '{model="vllm_model",version="1"}'
    before = scrape(server)
    for _ in range(3):
        vllm(server)
    gaps = "time_per_output_token_seconds_count"  # what is counted last, by a thread of its own
    last = f"vllm:{gaps}{label}"
    enough = before.get(last, 0) + 3 * (NEW - 1)
    after = scrape_until("the last count", server, lambda found: found.get(last, 0) >= enough)

    def grown(name: str) -> float:
        return after[f"vllm:{name}{label}"] - before.get(f"vllm:{name}{label}", 0)

    assert grown("generation_tokens_total") == 3 * NEW
    assert grown("request_generation_tokens_sum") == 3 * NEW
    assert grown(gaps) == 3 * (NEW - 1)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
        assert grown(f"{name}_count") == 3

"""Protects the main job: the real server answers like the reference, over gRPC and HTTP, streamed and not."""

from __future__ import annotations

import json
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from servers import Running, World
from tiny_models import make_adapter, reference_generate
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from manylora.adapters.formats.npy import read_npy
from manylora.doors.cli.convert import main as convert
from manylora.generation.tokenizer import Tokenizer

PROMPT = [72, 101, 108, 108, 111, 33]
NEW = 10


def tensor(name: str, value: np.ndarray) -> grpc.InferInput:
    made = grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


def inputs(prompt: list[int] = PROMPT, new: int = NEW, **extra: np.ndarray) -> list[grpc.InferInput]:
    made = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[new]], np.int32),
        **extra,
    }
    return [tensor(name, value) for name, value in made.items()]


def lora(task_id: int, world: World | None = None, files: int | None = None) -> dict[str, np.ndarray]:
    """files: of which adapter the tensors are, if not those of task_id."""
    made = {"lora_task_id": np.array([[task_id]], np.uint64)}
    if world is not None:
        made["lora_weights"], made["lora_config"] = read_npy(world.converted / str(files or task_id))
    return made


def ask(server: Running, request: list[grpc.InferInput], request_id: str = "") -> list[grpc.InferResult]:
    """All responses of one request over a gRPC stream."""
    answers: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "tensorrt_llm", request, request_id=request_id, enable_empty_final_response=True
        )
        results = []
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                results.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return results


def new_ids(results: list[grpc.InferResult]) -> list[int]:
    return [int(i) for r in results for i in r.as_numpy("output_ids")[0, 0]]


@pytest.mark.quick
def test_adapters_and_base_in_company_answer_as_the_reference(server: Running, world: World) -> None:
    for task_id in (1, 2, 3):
        ask(server, inputs([9], 1, **lora(task_id, world)))
    cases = []
    for i in range(40):
        prompt = [(7 * i + j) % 250 for j in range(1 + i % 17)]
        cases.append(((None, 1, 2, 3, 4)[i % 5], prompt, i % 2 == 0))

    def one(case: tuple) -> list[int]:
        task_id, prompt, streaming = case
        extra = lora(task_id) if task_id else {}
        flags = {"streaming": np.array([[streaming]]), "exclude_input_in_output": np.array([[True]])}
        return new_ids(ask(server, inputs(prompt, **extra, **flags)))

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(one, cases))
    for (task_id, prompt, _), ids in zip(cases, found, strict=True):
        adapter = world.adapters[task_id] if task_id else None
        assert ids == reference_generate(world.model, adapter, prompt, NEW), (task_id, prompt)


@pytest.mark.quick
def test_streamed_text_is_the_whole_text_through_the_ensemble(server: Running, world: World) -> None:
    for text in ("Hello", "美国的首都在哪里?", "👩‍👩‍👧"):
        body = {"text_input": text, "max_tokens": 24, "end_id": -1}
        _, raw = server.post("ensemble/generate", **body, exclude_input_in_output=True)
        whole = json.loads(raw)["text_output"]
        assert "".join(one["text_output"] for one in server.stream("ensemble", **body)) == whole
        prompt = Tokenizer(world.model).encode(text)
        expected = reference_generate(world.model, None, prompt, 24)
        assert whole == Tokenizer(world.model).decode(expected)


def test_a_batch_is_answered_item_by_item(server: Running) -> None:
    made = {
        "input_ids": np.array([PROMPT, PROMPT], np.int32),
        "input_lengths": np.array([[6], [3]], np.int32),
        "request_output_len": np.array([[2], [3]], np.int32),
    }
    results = ask(server, [tensor(name, value) for name, value in made.items()])
    assert results[0].get_response().outputs[0].name == "output_ids"
    found = {int(r.as_numpy("batch_index")[0, 0]): len(new_ids([r])) for r in results}
    assert found == {0: 8, 1: 6}


def test_a_stop_request_ends_a_stream_and_is_answered_empty(server: Running) -> None:
    with server.slow(), ThreadPoolExecutor(1) as pool:
        flags = {"streaming": np.array([[True]])}
        running = pool.submit(ask, server, inputs(new=200, **flags), "to-stop")
        stopper = inputs([0], 0, stop=np.array([[True]]))
        while not running.done():  # a stop may come before what it is to stop
            assert ask(server, stopper, "to-stop") == []
        assert running.result()[-1].as_numpy("finish_reason")[0, 0] == b"cancelled"


def test_an_activated_lora_reads_what_the_base_model_has_computed(
    server: Running, world: World, tmp_path: Path
) -> None:
    """Sent as tensors with its invocation tokens; then by its task id alone."""
    invoke, shared = [201, 202], [*range(40, 180)]
    folder = make_adapter(
        tmp_path / "a", world.model, 31, alora_invocation_tokens=invoke, task_type="CAUSAL_LM"
    )
    assert convert(["-i", str(folder), "-o", str(tmp_path / "npy"), "--storage-type", "float32"]) == 0
    weights, config = read_npy(tmp_path / "npy")
    tokens = np.load(tmp_path / "npy" / "model.lora_invocation_tokens.npy")
    made = {"lora_weights": weights, "lora_config": config, "lora_invocation_tokens": tokens}
    task, reuse = {"lora_task_id": np.array([[31]], np.uint64)}, np.array([[True]])
    ask(server, inputs(shared, 1))
    for prompt, extra in (([*shared, *invoke, 5], made), ([*shared, 6, *invoke], {})):
        results = ask(server, inputs(prompt, **task, **extra, return_kv_cache_reuse_stats=reuse))
        assert new_ids(results)[len(prompt) :] == reference_generate(world.model, folder, prompt, NEW)
        assert results[-1].as_numpy("kv_cache_reused_blocks").item() >= len(shared) // 32
    with pytest.raises(InferenceServerException, match="lora_invocation_tokens goes with lora_weights"):
        ask(server, inputs(shared, **task, lora_invocation_tokens=tokens))

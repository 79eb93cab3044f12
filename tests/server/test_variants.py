"""Protects the other deployments: a model that is not decoupled, with a short queue and bfloat16 adapters,
and a device cache far smaller than the adapters in use."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from launched import scrape_until, total
from servers import Running, World, fill_repo, served
from test_server import PROMPT, inputs, tensor
from tiny_models import reference_generate
from tritonclient.utils import InferenceServerException

from manylora.adapters.convert import convert_peft
from manylora.adapters.number_types import narrow_to_bfloat16

NEW = 8


@pytest.fixture(scope="module")
def plain(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Not decoupled; lora_weights as bfloat16; filled as for TensorRT-LLM's C++ backend."""
    values = {"lora_weights_data_type": "TYPE_BF16", "max_queue_size": "6", "max_num_sequences": "3"}
    path = tmp_path_factory.mktemp("plain") / "repo"
    repo = fill_repo(path, world.model, decoupled_mode="False", **values)
    config = repo / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('backend: "python"', 'backend: "tensorrtllm"', 1)
    config.write_text(text, encoding="utf-8")
    shutil.rmtree(repo / "tensorrt_llm_bls")
    with served(repo) as running:
        yield running


def test_a_fresh_server_counts_what_users_send(plain: Running) -> None:
    """As upstream's check of the base metrics. No other test may come before."""
    for _ in range(5):
        assert (
            "text_output" in plain.post("ensemble/generate", text_input="Hello", max_tokens=12, end_id=-1)[1]
        )
    # A request counts when the server lets go of it, which is a moment after its answer.
    found = scrape_until("equal counts", plain, all_equal)
    for kind, bucket in (("input", "10"), ("output", "50")):
        labels = f'model="tensorrt_llm",response_metric_type="total_{kind}_tokens",version="1"'
        name = f"nv_llm_{kind}_token_len"
        assert found[f"{name}_count{{{labels}}}"] == found[f'{name}_bucket{{{labels},le="{bucket}"}}'] == 5


def all_equal(found: dict[str, float]) -> bool:
    """Whether all models have counted the same."""
    for name in ("request_success", "request_failure", "count", "exec_count", "pending_request_count"):
        values = [value for key, value in found.items() if key.startswith(f"nv_inference_{name}{{")]
        assert len(values) >= 4, name  # failures once for each reason
        if len(set(values)) > 1:
            return False
    return True


def test_a_full_queue_is_told_in_both_wordings_counted_and_may_be_tried_again(plain: Running) -> None:
    def refused() -> float:
        return total(plain, "manylora_adapter_requests_total", 'finish_reason="error"')

    before = refused()
    with plain.slow():
        streamed, unary = burst(plain, 60), burst(plain, 60, unary=True)
    assert streamed and unary
    for error in (*streamed, *unary):
        assert "Exceeds maximum queue size" in str(error) and "Maximum queue size of 6" in str(error)
    assert {error.status() for error in unary} == {"StatusCode.UNAVAILABLE"}
    assert refused() - before == len(streamed) + len(unary)


def burst(server: Running, count: int, unary: bool = False) -> list[InferenceServerException]:
    """So many requests at once, over one stream or each for itself; the errors among the answers."""
    arrived: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        if not unary:
            client.start_stream(lambda result, error: arrived.put(error))
        for _ in range(count):
            if unary:
                client.async_infer("tensorrt_llm", inputs(new=5), lambda result, error: arrived.put(error))
            else:
                client.async_stream_infer("tensorrt_llm", inputs(new=5))
        errors = [arrived.get(timeout=60) for _ in range(count)]
    return [error for error in errors if error is not None]


def bfloat16_tensors(world: World, task_id: int) -> list[grpc.InferInput]:
    weights, config = convert_peft(world.adapters[task_id], "bfloat16")
    sent = grpc.InferInput("lora_weights", weights.shape, "BF16")
    sent._raw_content = weights.tobytes()
    return [sent, tensor("lora_config", config), tensor("lora_task_id", np.array([[task_id]], np.uint64))]


def test_bfloat16_adapters_unary_over_grpc_and_http(plain: Running, world: World) -> None:
    with grpc.InferenceServerClient(f"127.0.0.1:{plain.grpc}") as client:
        first = client.infer("tensorrt_llm", inputs(PROMPT, 1) + bfloat16_tensors(world, 2))
        assert first.as_numpy("output_ids").shape == (1, 1, len(PROMPT) + 1)
        answer = client.infer("tensorrt_llm", inputs(PROMPT, NEW, lora_task_id=np.array([[2]], np.uint64)))
        ids = answer.as_numpy("output_ids")[0, 0].tolist()
    rounded = reference_generate(world.model, world.adapters[2], PROMPT, NEW)
    # The reference's adapter is float32: bfloat16 rounds, so only the beginning must agree.
    assert ids[: len(PROMPT) + 3] == [*PROMPT, *rounded[:3]]
    with http.InferenceServerClient(f"127.0.0.1:{plain.http}") as client:
        answer = client.infer("tensorrt_llm", http_inputs(lora_task_id=np.array([[2]], np.uint64)))
        assert answer.as_numpy("output_ids")[0, 0].tolist() == ids


def http_inputs(**more: np.ndarray) -> list[http.InferInput]:
    given = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": np.array([[len(PROMPT)]], np.int32),
        "request_output_len": np.array([[NEW]], np.int32),
        **more,
    }
    return [
        http.InferInput(name, list(one.shape), one.dtype.name.upper()).set_data_from_numpy(one)
        for name, one in given.items()
    ]


def test_a_stop_request_reaches_a_model_that_is_not_decoupled(plain: Running) -> None:
    with plain.slow() as brake, grpc.InferenceServerClient(f"127.0.0.1:{plain.grpc}") as client:
        answers: queue.Queue = queue.Queue()
        for number in range(3):
            client.async_infer(
                "tensorrt_llm",
                inputs(PROMPT, 240),
                lambda result, error: answers.put((result, error)),
                request_id=f"long{number}",
            )
        stop = inputs([0], 0, stop=np.array([[True]]))
        while answers.empty():
            assert client.infer("tensorrt_llm", stop, request_id="long1").get_response().outputs == []
        brake.unlink()
        found = {}
        for _ in range(3):
            result, error = answers.get(timeout=60)
            assert error is None, error
            found[result.get_response().id] = result
    reasons = {name: result.as_numpy("finish_reason")[0, 0] for name, result in found.items()}
    assert reasons == {"long0": b"length", "long1": b"cancelled", "long2": b"length"}


def test_a_large_adapter_over_binary_http(plain: Running) -> None:
    """300 MB: rank-1 rows padded with zeros. Equal to the same rows without padding."""
    rows = np.random.default_rng(1).normal(0, 0.3, size=(1, 2, 128)).astype(np.float32)
    config = np.array([[[1, 0, 1], [1, 1, 1]]], np.int32)

    def answer(task_id: int, width: int) -> list[int]:
        weights = np.zeros((1, 2, width), np.float32)
        weights[:, :, :128] = rows
        made = http_inputs(lora_task_id=np.array([[task_id]], np.uint64), lora_config=config)
        made.append(http.InferInput("lora_weights", list(weights.shape), "BF16"))
        made[-1]._raw_data = narrow_to_bfloat16(weights).tobytes()
        made[-1]._parameters["binary_data_size"] = len(made[-1]._raw_data)
        with http.InferenceServerClient(f"127.0.0.1:{plain.http}", network_timeout=60) as client:
            return client.infer("tensorrt_llm", made).as_numpy("output_ids")[0, 0].tolist()

    assert answer(501, 300_000_000 // 4) == answer(502, 128)

"""Protects the models around the engine: whatever is sent to them is answered by one sentence, a long text
keeps nobody waiting, and who leaves `tensorrt_llm_bls` leaves no generation behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.grpc as grpc
from launched import active, total
from servers import Running
from test_server import tensor
from waiting import wait_for_named as wait_for

ONE = np.array([[4]], np.int32)
LONG = "Hello " * 2500  # not more than is tokenised whatever comes of it, and more than is done at once


def texts(*words: bytes) -> np.ndarray:
    return np.array([words], np.object_)


def infer(server: Running, model: str, **values: np.ndarray) -> grpc.InferResult:
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        return client.infer(model, [tensor(name, value) for name, value in values.items()])


def prepared(server: Running, text: bytes, **more: np.ndarray) -> grpc.InferResult:
    return infer(server, "preprocessing", QUERY=texts(text), REQUEST_OUTPUT_LEN=ONE, **more)


def test_long_and_short_texts_of_one_moment_are_all_answered(server: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        sent = [LONG if number % 3 == 0 else f"Hello{number}" for number in range(24)]
        answers = list(pool.map(lambda text: prepared(server, text.encode()), sent))
    lengths = [int(answer.as_numpy("REQUEST_INPUT_LEN")[0, 0]) for answer in answers]
    assert lengths == [len(text) + 1 for text in sent]  # a token for each byte, and <s>


def test_who_leaves_bls_ends_the_generation(server: Running) -> None:
    """All of its items and sequences: nothing but the model in between can tell the engine."""

    def ended(reason: str) -> float:
        return total(server, "manylora_adapter_requests_total", f'finish_reason="{reason}"')

    wait_for("an idle engine", lambda: active(server) == 0)
    before = {reason: ended(reason) for reason in ("cancelled", "length")}
    with server.slow():
        with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            client.start_stream(lambda result, error: None)
            for name in ("one", "two"):
                client.async_stream_infer(
                    "tensorrt_llm_bls",
                    [
                        tensor("text_input", np.array([[b"Hello"], [b"Hi"]], np.object_)),
                        tensor("max_tokens", np.array([[240], [240]], np.int32)),
                        tensor("end_id", np.array([[-1], [-1]], np.int32)),
                        tensor("num_return_sequences", np.array([[8], [8]], np.int32)),
                        tensor("temperature", np.array([[1.0], [1.0]], np.float32)),
                    ],
                    request_id=name,
                )
            wait_for("the engine has begun", lambda: active(server) > 0)
            client.stop_stream(cancel_requests=True)
        wait_for("one has ended", lambda: ended("cancelled") > before["cancelled"])
        wait_for("an idle engine", lambda: active(server) == 0)
    assert ended("length") == before["length"]
    assert "text_output" in server.post("ensemble/generate", text_input="Hello", max_tokens=4)[1]

"""Protects the models' processes from shapes whose product overflows: over the wire, on every model, by every
door, each is an error to that request alone."""

from __future__ import annotations

import http.client
import json

import grpc
import numpy as np
from launched import goes_on, processes
from servers import Running
from tritonclient.grpc import service_pb2, service_pb2_grpc

Inputs = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, content

MOST = 2**63 - 1


def integer(value: int) -> bytes:
    return np.int32(value).tobytes()


ONE = integer(1)
TEXT = {"text_input": ("BYTES", [1, 1], b"\1\0\0\0a"), "max_tokens": ("INT32", [1, 1], ONE)}
GOOD: dict[str, Inputs] = {
    "ensemble": TEXT,
    "tensorrt_llm_bls": TEXT,
    "preprocessing": {"QUERY": TEXT["text_input"], "REQUEST_OUTPUT_LEN": TEXT["max_tokens"]},
    "tensorrt_llm": {
        name: ("INT32", [1, 1], ONE) for name in ("input_ids", "input_lengths", "request_output_len")
    },
    "postprocessing": {
        "TOKENS_BATCH": ("INT32", [1, 1, 1], integer(66)),
        "SEQUENCE_LENGTH": ("INT32", [1, 1], ONE),
    },
}
CONFIGS = {
    "overflow": ("INT32", [1, MOST, MOST], ONE),
    "wraps to nothing": ("INT32", [1, 2**32, 2**32], b""),
    "beside nothing": ("INT32", [1, 0, MOST], b""),
    "negative": ("INT32", [1, -2, -2], ONE * 4),
}
IMPOSSIBLE: list[tuple[str, str, tuple[str, list[int], bytes]]] = [
    *(("tensorrt_llm", "lora_config", config) for config in CONFIGS.values()),
    ("tensorrt_llm", "input_ids", ("INT32", [1, 2**62 + 1], ONE)),
    ("tensorrt_llm", "prompt_embedding_table", ("FP16", [1, 2**32, 2**32], b"")),
    ("ensemble", "lora_config", CONFIGS["overflow"]),
    ("ensemble", "prompt_embedding_table", ("FP16", [1, 2**32, 2**32], b"")),
    ("ensemble", "embedding_bias_weights", ("FP32", [1, 2**62 + 1], ONE)),
    ("tensorrt_llm_bls", "lora_config", CONFIGS["overflow"]),
    ("tensorrt_llm_bls", "lora_weights", ("FP32", [1, 2**32, 2**32], b"")),
    ("tensorrt_llm_bls", "image_bytes_input", ("UINT8", [1, 2**32, 2**32, 1, 1], b"")),
    ("preprocessing", "IMAGE_BYTES", ("UINT8", [1, 2**32, 2**32, 1, 1], b"")),
    ("preprocessing", "STOP_WORDS_DICT", ("BYTES", [1, MOST], b"\1\0\0\0a")),
    ("postprocessing", "TOKENS_BATCH", ("INT32", [1, MOST, MOST], integer(66))),
    ("postprocessing", "SEQUENCE_LENGTH", ("INT32", [1, 2**62 + 1], ONE)),
]


REFUSALS = ("impossible shape", "string elements", "strings, of at most")  # the last: request_guard's


def over_grpc(server: Running, model: str, inputs: Inputs) -> str:
    """The error, or an empty string."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, (dtype, shape, content) in inputs.items():
        request.inputs.add(name=name, datatype=dtype, shape=shape)
        request.raw_input_contents.append(content)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # To its end: a call that is left early may crash this version of Triton (docs/deploy.md).
        first, *_ = stub.ModelStreamInfer(iter([request]), timeout=60)
        return first.error_message


def over_http(server: Running, model: str, inputs: Inputs) -> str:
    told = [
        {"name": name, "datatype": d, "shape": s, "parameters": {"binary_data_size": len(content)}}
        for name, (d, s, content) in inputs.items()
    ]
    head = json.dumps({"inputs": told}).encode()
    body = head + b"".join(content for _, _, content in inputs.values())
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    with connection.getresponse() as answer:
        said = answer.read()
    connection.close()
    return "" if answer.status == 200 else json.loads(said)["error"]


def test_an_impossible_shape_is_refused_and_no_process_dies(server: Running) -> None:
    before = processes(server)
    for model, name, tensor in IMPOSSIBLE:
        doors = [over_grpc]
        if min(tensor[1]) >= 0 and model in ("preprocessing", "postprocessing"):  # others only stream
            doors.append(over_http)
        for door in doors:
            error = door(server, model, GOOD[model] | {name: tensor})
            assert any(one in error for one in REFUSALS), (model, name, error)
            inner = {"embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS"}.get(name, name)
            assert inner in error
    for model, inputs in GOOD.items():
        assert over_grpc(server, model, inputs) == ""
    for model in ("preprocessing", "postprocessing"):
        assert over_http(server, model, GOOD[model]) == ""
    assert goes_on(server, before)

"""Protects tritonserver from optional parts of its protocol that would end it or keep it busy: over gRPC and
HTTP each is an error to that request alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from launched import goes_on, processes
from servers import Running
from test_shapes import GOOD
from tritonclient.grpc import service_pb2, service_pb2_grpc

Request = service_pb2.ModelInferRequest
OUTPUTS = [
    ("postprocessing", "OUTPUT"), ("tensorrt_llm", "finish_reason"), ("tensorrt_llm", "output_ids"),
    ("tensorrt_llm_bls", "text_output"), ("ensemble", "text_output"), ("preprocessing", "INPUT_ID"),
]  # fmt: skip


def request(model: str) -> Request:
    made = Request(model_name=model)
    for name, (dtype, shape, content) in GOOD[model].items():
        made.inputs.add(name=name, datatype=dtype, shape=shape)
        made.raw_input_contents.append(content)
    return made


def error(
    server: Running, sent: Request, compression: grpc.Compression = grpc.Compression.NoCompression
) -> str:
    """What the client is told; empty after success."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", options=options) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
        try:
            # To its end: a call that is left early may crash this version of Triton (docs/deploy.md).
            first, *_ = call(iter([sent]), timeout=60, compression=compression)
            return first.error_message
        except grpc.RpcError as failed:
            return str(failed.details())


def classified(model: str, output: str, count: int) -> Request:
    made = request(model)
    made.outputs.add(name=output).parameters["classification"].int64_param = count
    return made


@pytest.fixture
def untouched(server: Running) -> Callable[[], bool]:
    before = processes(server)
    if b"request_guard.so" not in Path(f"/proc/{before['server']}/maps").read_bytes():
        pytest.skip("there is no compiler for the guard")
    return lambda: goes_on(server, before)


def test_no_output_can_be_classified(server: Running, untouched: Callable[[], bool]) -> None:
    refusal = "outputs cannot be classified: leave out their parameter 'classification'"
    for model, output in OUTPUTS:
        for count in (1, 2**63 - 1):
            assert error(server, classified(model, output, count)) == refusal, model
    inputs = [{"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, 1], "data": [66]},
              {"name": "SEQUENCE_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [1]}]  # fmt: skip
    output = {"name": "OUTPUT", "parameters": {"classification": 1}}
    body = json.dumps({"inputs": inputs, "outputs": [output]}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/models/postprocessing/infer", body, 60)
    assert json.loads(refused.value.read()) == {"error": refusal}
    assert untouched()


def test_a_request_has_few_parts(server: Running, untouched: Callable[[], bool]) -> None:
    many = request("tensorrt_llm")
    for number in range(2000):
        many.parameters[f"p{number}"].bool_param = True
    assert error(server, many) == "a request has at most 1024 inputs, outputs and parameters"
    unknown = request("tensorrt_llm")
    for number in range(2000):
        unknown.inputs.add(name=f"i{number}", datatype="INT32", shape=[1])
        unknown.raw_input_contents.append(b"1234")
    assert error(server, unknown) == "a request has at most 1024 inputs, outputs and parameters"
    wide = request("tensorrt_llm")
    wide.inputs[0].shape.extend([1] * 100_000)
    assert error(server, wide) == "input 'input_ids' has 100002 dimensions, of at most 16"
    words = request("tensorrt_llm_bls")
    words.inputs.add(name="stop_words", datatype="BYTES", shape=[1, 100_000])
    words.raw_input_contents.append(bytes(400_000))
    assert error(server, words) == "input 'stop_words' has 100000 strings, of at most 65536"
    named = request("tensorrt_llm")
    named.id = "x" * 1025
    assert error(server, named) == "the id of a request has at most 1024 bytes"
    named.id = "x" * 1024
    assert error(server, named) == ""
    assert untouched()


def test_a_compressed_message_does_not_grow_without_bound(
    server: Running, untouched: Callable[[], bool]
) -> None:
    for size, told in ((2**20, "there is room for"), (70 * 2**20, "Unexpected error decompressing")):
        sent = request("preprocessing")
        sent.raw_input_contents[0] = size.to_bytes(4, "little") + b"a" * size
        assert told in error(server, sent, grpc.Compression.Gzip)
    assert untouched()


def test_the_guard_is_in_the_server_alone(server: Running, untouched: Callable[[], bool]) -> None:
    for role, pid in processes(server).items():
        guarded = b"request_guard.so" in Path(f"/proc/{pid}/environ").read_bytes()
        assert guarded == (role == "server"), role
    assert untouched()

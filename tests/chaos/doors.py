"""The doors of a service, and what a hostile client sends there.

Each sends one random request and returns the answer as text. Raises OSError, HTTPException, RpcError.
"""

from __future__ import annotations

import http.client
import json
import random
import struct

import grpc
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

WORDS = [
    "", "a", "\x00", "é\u0301👩‍👩‍👧", "../../etc/passwd", "/etc/passwd", "{{ 7 * 7 }}", "%s%n", "a" * 70_000,
    "a " * 200_000, "\\u" * 30_000, "NaN", "\n" * 5000, "𝕬" * 20_000,
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 2**64, 10**40, 0.5, -0.1, 1e308, 3.7]
FIELDS = [
    "text_input", "max_tokens", "num_return_sequences", "bad_words", "stop_words", "end_id", "top_k", "top_p",
    "temperature", "length_penalty", "repetition_penalty", "min_length", "random_seed", "return_log_probs",
    "beam_width", "stream", "lora_task_id", "lora_name", "lora_weights", "lora_config",
    "embedding_bias_words", "guided_decoding_guide_type", "guided_decoding_guide",
    "request_type", "id", "parameters",
]  # fmt: skip
GUIDES = [
    '{"type": "array", "minItems": 1000000, "items": {}}', "(((a{100}){100}){100}){100}", "[" * 10_000,
    '{"$ref": "#"}', "(a|aa)+$", json.dumps({"enum": ["x" * 50] * 20_000}), '{"type": "nothing"}',
]  # fmt: skip
RAW = [
    b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'{"text_input": NaN}',
    b'{"text_input": 1e999}',
    b'{"text_input": "a", "text_input": 3}', b"{}" * 1000, b'{"text_input": "\xc3("}',
]  # fmt: skip
SIZES = [0, 1, 2, 3, 7, -1, 2**31, 2**32, 2**62, 2**62 + 1, 2**63 - 1, -(2**63)]
TYPES = ["INT32", "INT64", "UINT64", "FP32", "FP16", "BF16", "BOOL", "BYTES", "NOTHING"]
INPUTS = {
    "tensorrt_llm": [
        "input_ids", "input_lengths", "request_output_len", "num_return_sequences", "prompt_embedding_table",
        "lora_task_id", "lora_weights", "lora_config", "embedding_bias", "stop_words_list", "bad_words_list",
        "draft_input_ids", "streaming", "stop", "beam_width", "retention_start",
    ],
    "preprocessing": ["QUERY", "REQUEST_OUTPUT_LEN", "STOP_WORDS_DICT", "BAD_WORDS_DICT"],
    "postprocessing": ["TOKENS_BATCH", "SEQUENCE_LENGTH", "CUM_LOG_PROBS", "CONTEXT_LOGITS"],
    "tensorrt_llm_bls": ["text_input", "max_tokens", "lora_weights", "lora_config", "num_return_sequences"],
    "ensemble": ["text_input", "max_tokens", "lora_weights", "lora_config", "prompt_embedding_table"],
}  # fmt: skip
OUTPUTS = {
    "tensorrt_llm": ["output_ids", "finish_reason"], "preprocessing": ["INPUT_ID"],
    "postprocessing": ["OUTPUT"], "tensorrt_llm_bls": ["text_output"], "ensemble": ["text_output"],
}  # fmt: skip


def value(picks: random.Random, depth: int = 0) -> object:
    kind = picks.randrange(10)
    if kind < 4:
        return picks.choice(WORDS)
    if kind < 8 or depth > 3:
        return picks.choice(NUMBERS)
    if kind == 8:
        return [value(picks, depth + 1) for _ in range(picks.choice([0, 1, 3, 50]))]
    return picks.choice([None, True, False, {}, [[]], {"a": 1}])


def post(
    port: int, path: str, body: bytes, headers: dict[str, str] | None = None, seconds: float = 30
) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", path, body, headers or {})
        return connection.getresponse().read(200_000).decode(errors="replace")
    finally:
        connection.close()


def generate(port: int, picks: random.Random) -> str:
    model = picks.choice([*INPUTS])
    path = f"/v2/models/{model}/{picks.choice(['generate', 'generate_stream', 'infer'])}"
    if picks.random() < 0.1:
        return post(port, path, picks.choice(RAW))
    body: dict[str, object] = {"text_input": "Where is", "max_tokens": 4}
    for field in picks.sample(FIELDS, picks.randint(1, 4)):
        body[field] = value(picks)
    if picks.random() < 0.1:
        body |= {"guided_decoding_guide_type": picks.choice(["json_schema", "regex", "ebnf_grammar"])}
        body["guided_decoding_guide"] = picks.choice(GUIDES)
    return post(port, path, json.dumps(body).encode())


def odd_tensor(model: str, picks: random.Random) -> tuple[str, str, list[int], bytes]:
    """Name, type, shape and bytes, which need not go together."""
    shape = [1, *(picks.choice(SIZES) for _ in range(picks.randint(0, 3)))]
    if picks.random() < 0.3:
        shape = [picks.choice(SIZES) for _ in range(picks.randint(0, 5))]
    content = picks.choice(
        [b"", struct.pack("<i", 1), struct.pack("<q", -1), b"\xff" * 12, b"\x00" * 64, bytes(4096)]
    )
    return (
        picks.choice(INPUTS[model]),
        picks.choice(TYPES[:8] if picks.random() < 0.9 else TYPES),
        shape,
        content,
    )


def infer(port: int, picks: random.Random) -> str:
    model = picks.choice([*INPUTS])
    tensors = [odd_tensor(model, picks) for _ in range(picks.randint(1, 4))]
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": kind,
                    "shape": shape,
                    "parameters": {"binary_data_size": len(content)},
                }
                for name, kind, shape, content in tensors
            ]
        }
    ).encode()
    body = head + b"".join(content for *_, content in tensors)
    return post(port, f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": str(len(head))})


def extend(request: service_pb2.ModelInferRequest, picks: random.Random) -> None:
    """Add an optional part of the protocol, too many of one, or one of the wrong type."""
    name = picks.choice(
        ["classification", "sequence_id", "priority", "shared_memory_region", "binary_data_size"]
    )
    number = picks.choice([0, 1, -1, 2**31, 2**63 - 1])
    kind = picks.randrange(6)
    if kind == 0:
        request.parameters[name].int64_param = number
    elif kind == 1:
        request.parameters[name].string_param = picks.choice(WORDS)
    elif kind == 2:
        for output in OUTPUTS[request.model_name]:
            request.outputs.add(name=output).parameters[name].int64_param = number
    elif kind == 3:
        for index in range(picks.choice([100, 20_000])):
            request.parameters[f"p{index}"].bool_param = True
    elif kind == 4:
        request.inputs[0].shape.extend([1] * picks.choice([20, 500_000]))
    else:
        request.id = "x" * picks.choice([1000, 10_000_000])


def infer_grpc(port: int, picks: random.Random) -> str:
    model = picks.choice([*INPUTS])
    request = service_pb2.ModelInferRequest(model_name=model)
    for _ in range(picks.randint(1, 4)):
        name, kind, shape, content = odd_tensor(model, picks)
        request.inputs.add(name=name, datatype=kind, shape=shape)
        request.raw_input_contents.append(content)
    if picks.random() < 0.3:
        extend(request, picks)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if picks.random() < 0.3:
                return str(stub.ModelInfer(request, timeout=30))
            return "".join(str(part) for part in stub.ModelStreamInfer(iter([request]), timeout=30))
        except grpc.RpcError as error:
            return error.details() or "" if isinstance(error, grpc.Call) else ""


def manage(port: int, picks: random.Random) -> str:
    """What only who runs the server may do."""
    path, body = picks.choice(
        [
            ("systemsharedmemory/region/a/register", {"key": "/manylora", "offset": 0, "byte_size": 64}),
            ("logging", {"log_file": "/tmp/manylora-chaos", "log_verbose_level": 3}),
            ("trace/setting", {"trace_file": "/tmp/manylora-chaos", "trace_level": ["TIMESTAMPS"]}),
            ("repository/models/tensorrt_llm/unload", {}),
            ("repository/models/ensemble/load", {}),
            ("repository/index", {}),
        ]
    )
    return post(port, f"/v2/{path}", json.dumps(body).encode())

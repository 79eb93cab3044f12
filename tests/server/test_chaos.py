"""Protects clients from each other: random hostile requests come to every model over HTTP and gRPC, and the
streams of others are right, no process ends or grows, and no answer tells of the server's inside."""

from __future__ import annotations

import http.client
import json
import random
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from launched import goes_on, processes
from servers import Running
from test_client_disconnects import resident
from tritonclient.grpc import service_pb2, service_pb2_grpc

COUNT, AT_ONCE = 2000, 8
# tritonserver keeps 90 to 300 MiB of large gRPC messages, more on a busy machine.
GROWTH, SLACK = 1.10, 2**29
SECRETS = ("Traceback", 'File "', "site-packages", "model.py", ".so:")
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


def value(picks: random.Random, depth: int = 0) -> object:
    kind = picks.randrange(10)
    if kind < 4:
        return picks.choice(WORDS)
    if kind < 8 or depth > 3:
        return picks.choice(NUMBERS)
    if kind == 8:
        return [value(picks, depth + 1) for _ in range(picks.choice([0, 1, 3, 50]))]
    return picks.choice([None, True, False, {}, [[]], {"a": 1}])


def post(server: Running, path: str, body: bytes, **headers: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
    try:
        connection.request("POST", path, body, {name.replace("_", "-"): one for name, one in headers.items()})
        return connection.getresponse().read(200_000).decode(errors="replace")
    finally:
        connection.close()


def generate(server: Running, picks: random.Random) -> str:
    path = f"/v2/models/{picks.choice([*INPUTS])}/{picks.choice(['generate', 'generate_stream', 'infer'])}"
    if picks.random() < 0.1:
        return post(server, path, picks.choice(RAW))
    body: dict[str, object] = {"text_input": "Where is", "max_tokens": 4}
    body |= {field: value(picks) for field in picks.sample(FIELDS, picks.randint(1, 4))}
    if picks.random() < 0.1:
        body |= {"guided_decoding_guide_type": picks.choice(["json_schema", "regex", "ebnf_grammar"])}
        body["guided_decoding_guide"] = picks.choice(GUIDES)
    return post(server, path, json.dumps(body).encode())


def odd_tensors(model: str, picks: random.Random) -> list[tuple[str, str, list[int], bytes]]:
    """Name, type, shape and bytes of each, which need not go together."""
    found = []
    for _ in range(picks.randint(1, 4)):
        shape = [1, *(picks.choice(SIZES) for _ in range(picks.randint(0, 3)))]
        shape = shape if picks.random() < 0.7 else [picks.choice(SIZES) for _ in range(picks.randint(0, 5))]
        content = [b"", struct.pack("<i", 1), struct.pack("<q", -1), b"\xff" * 12, b"\x00" * 64, bytes(4096)]
        kind = picks.choice(TYPES[:8] if picks.random() < 0.9 else TYPES)
        found.append((picks.choice(INPUTS[model]), kind, shape, picks.choice(content)))
    return found


def infer(server: Running, picks: random.Random) -> str:
    model = picks.choice([*INPUTS])
    tensors = odd_tensors(model, picks)
    told = [
        {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(content)}}
        for name, kind, shape, content in tensors
    ]
    head = json.dumps({"inputs": told}).encode()
    body = head + b"".join(content for *_, content in tensors)
    return post(server, f"/v2/models/{model}/infer", body, Inference_Header_Content_Length=str(len(head)))


def infer_grpc(server: Running, picks: random.Random) -> str:
    model = picks.choice([*INPUTS])
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, kind, shape, content in odd_tensors(model, picks):
        request.inputs.add(name=name, datatype=kind, shape=shape)
        request.raw_input_contents.append(content)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        # To its end: a call that is left early may crash this version of Triton (docs/deploy.md).
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
        return "".join(str(part) for part in call(iter([request]), timeout=30))


def attack(server: Running, seed: int) -> str:
    """The answer's text; empty when there was none."""
    picks = random.Random(seed)
    try:
        return picks.choice((generate, infer, infer_grpc))(server, picks)
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    except grpc.RpcError as error:
        return (error.details() or "") if isinstance(error, grpc.Call) else ""


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_neighbours_of_hostile_clients_notice_nothing(server: Running) -> None:
    before, done = processes(server), threading.Event()
    sizes = {role: resident(pid) for role, pid in before.items()}
    asked = [{}, {"lora_task_id": 4}, {"lora_name": "tiny-three"}]
    body = {"text_input": "Hello", "max_tokens": 100, "end_id": -1}

    def text(adapter: dict[str, object]) -> str:
        return "".join(one["text_output"] for one in server.stream("ensemble", **body, **adapter))

    right = [text(one) for one in asked]

    def stream() -> None:
        while not done.is_set():
            assert [text(one) for one in asked] == right

    with ThreadPoolExecutor(2) as neighbours, ThreadPoolExecutor(AT_ONCE) as pool:
        watched = [neighbours.submit(stream) for _ in range(2)]
        try:
            for answer in pool.map(lambda seed: attack(server, seed), range(COUNT)):
                assert not [secret for secret in SECRETS if secret in answer], answer[:300]
        finally:
            done.set()
        for one in watched:
            one.result()
    assert goes_on(server, before)
    grown = {role: resident(pid) for role, pid in before.items()}
    assert all(grown[role] < GROWTH * size + SLACK for role, size in sizes.items()), (sizes, grown)

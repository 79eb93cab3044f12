"""Protects a server from clients that leave the ensemble: their generations end, and nothing of it stays."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
from launched import total
from servers import Running
from test_shapes import ONE
from tritonclient.grpc import service_pb2, service_pb2_grpc
from waiting import wait_for_named as wait_for

TOKENS = 240  # the model has 256 positions
LEAVERS = 150
MEMORY = 10 * 2**20  # before, each left 0.6 KiB for every token that was not sent: 18 MiB


def request() -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="ensemble")
    for name, dtype, content in (
        ("text_input", "BYTES", b"\1\0\0\0a"),
        ("max_tokens", "INT32", np.int32(TOKENS).tobytes()),
        ("end_id", "INT32", (-np.frombuffer(ONE, np.int32)).tobytes()),
        ("stream", "BOOL", b"\1"),
    ):
        made.inputs.add(name=name, datatype=dtype, shape=[1, 1])
        made.raw_input_contents.append(content)
    return made


def leave_grpc(server: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request()]))
        assert next(call).error_message == ""
        call.cancel()


def leave_http(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=120)
    body = {"text_input": "a", "max_tokens": TOKENS, "end_id": -1, "stream": True}
    connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(body))
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def generated(server: Running) -> float:
    """Tokens of all requests that have ended."""
    return total(server, "manylora_adapter_tokens_total", 'kind="output"')


def is_idle(server: Running) -> bool:
    _, _, held, _ = (server.run_dir / "report.tensorrt_llm_0_0").read_text(encoding="utf-8").split()
    return held == "0"


def test_what_a_client_of_the_ensemble_leaves_behind_ends(server: Running) -> None:
    restarts = server.state()["restarts"]
    try:
        leave_and_measure(server)
    except (grpc.RpcError, OSError):  # a cancelled gRPC call may crash tritonserver: docs/deploy.md
        wait_for("back", lambda: server.state()["restarts"] > restarts and server.state()["state"] == "ready")
        leave_and_measure(server)


def leave_and_measure(server: Running) -> None:
    pid = server.state()["server"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave_grpc, [server] * 50))  # pools grow once
        wait_for("idle", lambda: is_idle(server))
        before, tokens = resident(pid), generated(server)
        with server.slow():  # else an answer may be whole before the server learns that a client has left
            for leave in (leave_grpc, leave_http):
                list(pool.map(leave, [server] * LEAVERS))
    wait_for("idle", lambda: is_idle(server))
    asked_for = 2 * LEAVERS * TOKENS
    assert generated(server) - tokens < 0.9 * asked_for  # the server learns late that a client has left
    assert resident(pid) - before < MEMORY

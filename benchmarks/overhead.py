#!/usr/bin/env python3
"""Measures the overhead of the servers: tokens per second through Triton's ensemble over gRPC and through the
OpenAI server over HTTP, compared with the engine in-process.

All use the same model, requests and number of streams, and alternate within one run. Prints every round, the
ratios of the medians, and the CPU time of each of Triton's processes. Other work on the machine affects the
CPU time less than the rates. With a step of s seconds and n streams the engine generates n / s tokens per
second, and a server must handle as many responses. Client, server and engine share the cores.

    overhead.py --streams 64 --rounds 3
    overhead.py --streams 64 --rounds 3 --stream-intervals 1 4

Rates need an otherwise idle machine; on a busy one the ratio of pairs says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import tritonclient.grpc as grpc
from grpc import aio
from loads import make_llama
from machine import family
from tritonclient.grpc import service_pb2

from manylora.config.engine import EngineConfig
from manylora.doors.triton.launcher.new_repository import write_repository
from manylora.engine.loop import EngineLoop
from manylora.generation.tokenizer import Tokenizer
from manylora.request import Request, SamplingConfig

ROOT = Path(__file__).resolve().parents[1]
TEXT = "Tell me about number {}. \nAnswer:"  # different for each stream, so that the tokens differ, too
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
ERROR = b"\x0a"  # the tag of error_message, the first field of a ModelStreamInferResponse
LAST = b"triton_final_response\x12\x02\x08\x01"  # this parameter with the value true


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def in_process(model: Path, streams: int, tokens: int) -> float:
    loop = EngineLoop.start(EngineConfig(model, device="cpu", max_batch_size=streams))
    tokenizer = Tokenizer(model)
    prompts = [tuple(tokenizer.encode(TEXT.format(i))) for i in range(streams)]
    done: queue.SimpleQueue = queue.SimpleQueue()

    def sink(event) -> None:
        if event.last:
            done.put(event)

    rates = []
    for _ in range(2):  # the first run only warms up
        began = time.perf_counter()
        for prompt in prompts:
            loop.submit(Request(prompt, SamplingConfig(max_tokens=tokens), streaming=True), sink)
        for _ in range(streams):
            done.get()
        rates.append(streams * tokens / (time.perf_counter() - began))
    loop.close()
    return rates[-1]


@contextmanager
def launched(model: Path, work: Path, streams: int, interval: int) -> Iterator[tuple[int, int]]:
    """Triton with the model. Yields its gRPC port and the launcher's process id."""
    repo = work / f"repo{interval}"
    if not repo.exists():
        values = {"device": "cpu", "max_num_sequences": str(streams), "stream_interval": str(interval)}
        models = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing")
        write_repository(repo, model, None, models, values)
    http, port, metrics = free_ports(3)
    ports = [f"--http_port={http}", f"--grpc_port={port}", f"--metrics_port={metrics}"]
    command = [sys.executable, ROOT / "launch_triton_server.py", "--foreground", f"--model_repo={repo}"]
    server = subprocess.Popen([*command, *ports], stdout=subprocess.DEVNULL)
    try:
        wait_for(server, lambda: urlopen(f"http://127.0.0.1:{http}/v2/health/ready").close())
        yield port, server.pid
    finally:
        server.terminate()
        server.wait()


def wait_for(server: subprocess.Popen, ask: Callable[[], None]) -> None:
    """Wait until `ask` raises no OSError. Raises RuntimeError after two minutes, and if the server ends."""
    until = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < until:
        try:
            return ask()
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server does not start")


def through_the_server(model: Path, work: Path, streams: int, tokens: int, interval: int) -> float:
    with launched(model, work, streams, interval) as (port, launcher):
        ask(port, streams, tokens)
        found = processes(launcher)
        before = {name: processor_seconds(pid) for name, pid in found.items()}
        rate = ask(port, streams, tokens)
        used = {
            name: 1000 * (processor_seconds(pid) - before[name]) / (streams * tokens)
            for name, pid in found.items()
        }
    told = ", ".join(f"{name} {value:.3f}" for name, value in used.items())
    beside = sum(value for name, value in used.items() if name != "tensorrt_llm")
    print(f"CPU ms per token: {told}; all except the engine's process {beside:.3f}")
    return rate


def processes(launcher: int) -> dict[str, int]:
    """The ids of Triton's processes: each model's by the model's name, and tritonserver's."""
    found = {}
    for pid in family(launcher):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if model := re.search(rb"/([^/\0]+)/[0-9]+/model\.py\0", command):
            found[model[1].decode()] = pid
        elif b"bin/tritonserver\0" in command:
            found["tritonserver"] = pid
    return found


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(port: int, streams: int, tokens: int) -> float:
    return asyncio.run(_ask(port, [_inputs(TEXT.format(i), tokens) for i in range(streams)], tokens))


def _inputs(text: str, tokens: int) -> list[grpc.InferInput]:
    values = {
        "text_input": np.array([[text.encode()]], np.object_),
        "max_tokens": np.array([[tokens]], np.int32),
        "end_id": np.array([[-1]], np.int32),
        "stream": np.array([[True]]),
    }
    inputs = []
    for name, value in values.items():
        kind = {"object": "BYTES", "int32": "INT32", "bool": "BOOL"}[value.dtype.name]
        inputs.append(grpc.InferInput(name, value.shape, kind).set_data_from_numpy(value))
    return inputs


async def _ask(port: int, asked: list[list[grpc.InferInput]], tokens: int) -> float:
    """Ask from a single thread and do not parse messages, because the client shares the server's cores."""
    requests = [service_pb2.ModelInferRequest(model_name="ensemble") for _ in asked]
    for request, inputs in zip(requests, asked, strict=True):
        request.inputs.extend(one._get_tensor() for one in inputs)
        request.raw_input_contents.extend(one._get_content() for one in inputs)
        request.parameters["triton_enable_empty_final_response"].bool_param = True

    async def one(call: Any, request: Any) -> None:
        async def only() -> AsyncIterator[Any]:
            yield request

        async for message in call(only()):
            if message.startswith(ERROR):
                raise RuntimeError(service_pb2.ModelStreamInferResponse.FromString(message).error_message)
            if LAST in message:
                return

    async with aio.insecure_channel(f"localhost:{port}") as channel:
        call = channel.stream_stream(METHOD, service_pb2.ModelInferRequest.SerializeToString)
        began, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(call, request) for request in requests))
        count, seconds = len(asked) * tokens, time.perf_counter() - began
        print(f"{1000 * (time.process_time() - used) / count:.3f} CPU ms per token in the client")
        return count / seconds


def through_openai(model: Path, streams: int, tokens: int, interval: int) -> float:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "manylora.doors.cli.serve", model, "--port", str(port)]
    command += ["--max-batch-size", str(streams), "--stream-interval", str(interval)]
    server = subprocess.Popen([*command, "--device", "cpu", "--log-level", "warning"])
    try:
        wait_for(server, lambda: socket.create_connection(("127.0.0.1", port)).close())
        return [asyncio.run(_ask_openai(port, streams, tokens)) for _ in range(2)][-1]
    finally:
        server.terminate()
        server.wait()


async def _ask_openai(port: int, streams: int, tokens: int) -> float:
    """Read bytes without parsing until the server closes, so that the client costs as little as possible."""

    async def one(text: str) -> None:
        body = json.dumps(
            {"model": "model", "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True,
             "ignore_eos": True}
        ).encode()  # fmt: skip
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        answer = await reader.read()
        if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer:
            raise RuntimeError(answer[:500].decode())
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one(TEXT.format(i)) for i in range(streams)))
    return streams * tokens / (time.perf_counter() - began)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stream-intervals", type=int, nargs="+", default=[1], help="tokens per event")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_llama(work / "model", options.hidden, options.layers)
        rates: dict[str, list[float]] = defaultdict(list)
        load = options.streams, options.tokens
        for number in range(options.rounds):
            rates["engine"].append(in_process(model, *load))
            for interval in options.stream_intervals:
                rates[f"triton/{interval}"].append(through_the_server(model, work, *load, interval))
                rates[f"openai/{interval}"].append(through_openai(model, *load, interval))
            found = ", ".join(f"{name} {values[-1]:.0f}" for name, values in rates.items())
            print(f"round {number + 1}: {found} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, median in medians.items():
        print(f"{name:9} {median:6.0f} tokens/s, {median / medians['engine']:.3f} of the engine")
    print(json.dumps({"rates": rates, "medians": medians, **vars(options)}))


if __name__ == "__main__":
    main()

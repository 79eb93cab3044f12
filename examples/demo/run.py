#!/usr/bin/env python3
"""Serve two adapters with Triton: convert them, write a model repository, start the server, send each adapter
once, then ask with task ids alone.

run.py demo    asks the base model and both adapters, streams one answer, and stops the server
run.py serve   leaves the server running, and prints commands to try
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import unicodedata
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = HERE / "base"
WORK = ROOT / "build" / "demo"
MANYLORA = Path(sys.executable).with_name("manylora")
ADAPTERS = {1: "chinese", 2: "japanese"}
CHINESE = "美国的首都在哪里? \\n答案:"
JAPANESE = "アメリカ合衆国の首都はどこですか? \\n答え:"
STREAMED = "日本について教えてください。 \\n答え:"
OUTPUT_LEN, TOP_K, TOP_P = 16, 0, 0.5
ANSWER_TIMEOUT_S = 60


class DemoError(Exception):
    """A step failed. The message says which one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=("demo", "serve"))
    parser.add_argument("--http_port", type=int, default=8000)
    parser.add_argument("--grpc_port", type=int, default=8001)
    parser.add_argument("--metrics_port", type=int, default=8002)
    options = parser.parse_args()
    server = Server([getattr(options, f"{kind}_port") for kind in ("http", "grpc", "metrics")])
    try:
        prepare()
        server.launch()
        send_adapters(server)
        if options.job == "serve":
            print_commands(server)
            return 0
        try:
            ask_six(server)
            stream_one(server)
        finally:
            server.stop()
    except DemoError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        server.stop()
        return 130
    return 0


def prepare() -> None:
    """Convert both adapters and write the model repository."""
    heading("Convert the PEFT adapters")
    for name in ADAPTERS.values():
        target = WORK / f"{name}-weights"
        run(
            "tools/hf_lora_convert.py",
            "-i",
            HERE / "adapters" / name,
            "-o",
            target,
            "--storage-type",
            "float16",
        )
    heading("Write the model repository")
    repo = WORK / "model_repo"
    shutil.rmtree(repo, ignore_errors=True)
    run("manylora", "repo", BASE, "-o", repo, "--set", "triton_max_batch_size=8")


class Server:
    """The server on three ports: HTTP, gRPC, metrics. If a port is in use, a free one is used instead."""

    def __init__(self, ports: list[int]) -> None:
        self.http, self.grpc, self.metrics = ports
        self.processes: list[int] = []

    @property
    def flags(self) -> list[str]:
        given = {"http": (self.http, 8000), "grpc": (self.grpc, 8001), "metrics": (self.metrics, 8002)}
        return [f"--{kind}_port={port}" for kind, (port, usual) in given.items() if port != usual]

    def launch(self) -> None:
        heading("Start tritonserver")
        for kind in ("http", "grpc", "metrics"):
            port = getattr(self, kind)
            if listens(port):
                setattr(self, kind, free_port())
                print(f"port {port} is in use: {kind} uses {getattr(self, kind)} instead")
        run(
            "launch_triton_server.py", "--world_size=1", f"--model_repo={WORK / 'model_repo'}", *self.flags,
            "--force", wide=True,
        )  # fmt: skip
        state = self.state()
        self.processes = [state["supervisor"], *state["processes"]]

    def state(self) -> dict:
        command = [sys.executable, ROOT / "launch_triton_server.py", "--status", *self.flags]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def stop(self) -> None:
        """Drain and stop the server, then check that nothing is left behind."""
        if not self.processes:
            return
        heading("Stop")
        run("launch_triton_server.py", "--stop", *self.flags)
        processes = [pid for pid in self.processes if is_running(pid)]
        ports = [port for port in (self.http, self.grpc, self.metrics) if listens(port)]
        shared = list(Path("/dev/shm").glob(f"manylora_*_{self.http}_*"))
        if processes or ports or shared:
            raise DemoError(f"left behind: processes {processes}, ports {ports}, shared memory {shared}")
        print("nothing is left: no process, no port, no shared memory")


def send_adapters(server: Server) -> None:
    """Send each adapter's tensors once with its task id, using the client."""
    heading("Send each adapter once, with its task id")
    jobs = []
    for task_id, name in ADAPTERS.items():
        jobs.append([
            "client/inflight_batcher_llm_client.py", *url(server), "--top-k", TOP_K, "--top-p", TOP_P,
            "--request-output-len", OUTPUT_LEN, "--text", "dummy", "--tokenizer-dir", BASE,
            "--lora-path", WORK / f"{name}-weights", "--lora-task-id", task_id,
        ])  # fmt: skip
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: run(*job), jobs))


def ask_six(server: Server) -> None:
    """Ask two questions of the base model and both adapters, all at once, with task ids alone."""
    heading("Ask two questions three ways, all six at once")
    cases = [(question, task_id) for question in (CHINESE, JAPANESE) for task_id in (None, *ADAPTERS)]
    answers = ask_at_once(server, cases)
    rows = [["question", "base", *(f"{task_id} ({name})" for task_id, name in ADAPTERS.items())]]
    for question in (CHINESE, JAPANESE):
        cells = [answers[question, task_id] for task_id in (None, *ADAPTERS)]
        rows.append([question, *(f"{text.strip()}  {seconds * 1000:.0f} ms" for text, seconds in cells)])
    print_table(rows)
    log = Path(server.state()["log"]).read_text(encoding="utf-8", errors="replace")
    most = max(map(int, re.findall(r"(\d+) distinct adapters in one step", log)), default=0)
    print(f"\nmost distinct adapters in one engine step: {most}")


def ask_at_once(server: Server, cases: list[tuple[str, int | None]]) -> dict[tuple, tuple[str, float]]:
    """Send all requests in one gRPC stream. Returns (question, task id) -> (answer, seconds)."""
    answers: dict[tuple, tuple[str, float]] = {}
    arrived: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(f"localhost:{server.grpc}") as client:
        client.start_stream(lambda result, error: arrived.put((result, error, time.perf_counter())))
        started = {}
        for number, (question, task_id) in enumerate(cases):
            values = {
                "text_input": np.array([[question.encode()]], np.object_),
                "max_tokens": np.array([[OUTPUT_LEN]], np.int32),
                "top_k": np.array([[TOP_K]], np.int32),
                "top_p": np.array([[TOP_P]], np.float32),
                "exclude_input_in_output": np.array([[True]]),
            }
            if task_id is not None:
                values["lora_task_id"] = np.array([[task_id]], np.uint64)
            inputs = []
            for name, value in values.items():
                inputs.append(grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
                inputs[-1].set_data_from_numpy(value)
            started[number] = time.perf_counter()
            client.async_stream_infer("ensemble", inputs, request_id=str(number))
        while len(answers) < len(cases):
            result, error, at = arrived.get(timeout=ANSWER_TIMEOUT_S)
            if error is not None:
                raise DemoError(f"a request failed: {error}")
            number = int(result.get_response().id)
            text = result.as_numpy("text_output").reshape(-1)[0].decode()
            answers[cases[number]] = (text, at - started[number])
    return answers


def stream_one(server: Server) -> None:
    heading("Stream one answer over HTTP (task id 2)")
    body = {"text_input": STREAMED, "max_tokens": 64, "stream": True, "lora_task_id": 2}
    address = f"http://localhost:{server.http}/v2/models/ensemble/generate_stream"
    print(f"{STREAMED} ", end="", flush=True)
    pieces = 0
    with urllib.request.urlopen(address, json.dumps(body).encode(), ANSWER_TIMEOUT_S) as lines:
        for line in lines:
            if line.startswith(b"data:"):
                print(json.loads(line[5:])["text_output"], end="", flush=True)
                pieces += 1
    print(f"\n({pieces} pieces)")


def print_commands(server: Server) -> None:
    python, client = shown(sys.executable), "client/inflight_batcher_llm_client.py"
    address = " ".join(url(server))
    where = f"localhost:{server.http}/v2/models/ensemble"
    heading("The server is running. Adapters 1 (Chinese) and 2 (Japanese) are in its cache. Try:")
    ask = f"{python} {client} {address + ' ' if address else ''}--tokenizer-dir {shown(BASE)}"
    question = shlex.quote(CHINESE)
    print(f"{ask} --text {question} --request-output-len 16")
    print(f"{ask} --text {question} --request-output-len 16 --lora-task-id 1")
    print(f"{ask} --text {question} --request-output-len 16 --lora-task-id 2 --streaming")
    body = {"text_input": "Where is the capital of Japan? \nAnswer:", "max_tokens": 16, "lora_task_id": 1}
    print(f"curl -d {shlex.quote(json.dumps(body))} {where}/generate")
    body |= {"text_input": STREAMED, "max_tokens": 64, "stream": True}
    print(f"curl -N -d {shlex.quote(json.dumps(body, ensure_ascii=False))} {where}/generate_stream")
    print(f"\nand stop it with\n{python} launch_triton_server.py --stop {' '.join(server.flags)}".rstrip())


def url(server: Server) -> list[str]:
    return [] if server.grpc == 8001 else ["--url", f"localhost:{server.grpc}"]


def run(script: str, *arguments: object, wide: bool = False) -> None:
    """Print a command and run it. script: a path in this repository, or `manylora`. wide: show the output
    even if the command succeeds."""
    command = [str(MANYLORA)] if script == "manylora" else [sys.executable, script]
    command += [str(argument) for argument in arguments]
    print(f"$ {' '.join(shlex.quote(shown(word)) for word in command)}", flush=True)
    done = subprocess.run(command, capture_output=not wide, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise DemoError(
            f"{script} failed with status {done.returncode}\n{done.stdout or ''}{done.stderr or ''}"
        )


def shown(word: object) -> str:
    """A path relative to the root of the repository."""
    return str(word).replace(f"{ROOT}/", "")


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def print_table(rows: list[list[str]]) -> None:
    """Print aligned columns. On a terminal, a Chinese character is two columns wide."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * size for size in widths])
    for row in rows:
        print(
            "  ".join(
                cell + " " * (size - width(cell)) for cell, size in zip(row, widths, strict=True)
            ).rstrip()
        )


def width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Serve a model with adapters, and ask the base model and every adapter at once.

run.py demo    asks through Triton, replaces and adds an adapter meanwhile, then asks the OpenAI server
run.py serve   starts the OpenAI server, leaves it running, and prints commands to try

The model is SmolLM2-135M-Instruct, from a wheel on the package index, with the adapters of examples/smollm2.
With --offline, or if the index does not have it, it is the toy model in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import unicodedata
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

from manylora.config.model_folder import model_folder
from manylora.generation.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "demo"
LORA_ROOT = WORK / "adapters"
MANYLORA = Path(sys.executable).with_name("manylora")
WIDTH, GAP = 98, 3  # of a table, in characters
ANSWER_TIMEOUT_S = 60
REFRESH_S = 1.5  # the server looks for changed adapters once a second


@dataclass(frozen=True)
class Show:
    """What is served and asked."""

    model: Path
    adapters: Path  # a folder for each adapter
    added: str  # the adapter that comes while the server runs; the others are there from the start
    replaced: str  # the adapter of which another version comes then: the same, `strength` times as strong
    strength: float
    question: str
    chat: tuple[str, str]  # an adapter and a question for the OpenAI server
    max_tokens: int = 40

    @property
    def names(self) -> list[str]:
        found = sorted(folder.name for folder in self.adapters.iterdir())
        return [name for name in found if name != self.added]


TOY = Show(
    HERE / "base", HERE / "adapters", "japanese", "chinese", 0.1, "What is the capital of the United States?",
    ("japanese", "Tell me about Japan."),
)  # fmt: skip


def real(model: Path) -> Show:
    return Show(
        model, ROOT / "examples/smollm2/adapters", "polite", "pirate", 0.5,
        "My friends are coming for dinner, and I am so happy! What should I cook?",
        ("pirate", "What does a lighthouse do?"),
    )  # fmt: skip


class DemoError(Exception):
    """A step failed. The message says which one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=("demo", "serve"))
    parser.add_argument("--offline", action="store_true", help="download no model: run the toy")
    parser.add_argument("--http_port", type=int, default=8000)
    parser.add_argument("--grpc_port", type=int, default=8001)
    parser.add_argument("--metrics_port", type=int, default=8002)
    options = parser.parse_args()
    try:
        show = find_show(options.offline)
        shutil.rmtree(LORA_ROOT, ignore_errors=True)
        for name in show.names:
            shutil.copytree(show.adapters / name, LORA_ROOT / name)
        if options.job == "serve":
            serve(show, options.http_port)
        with_triton(show, Triton(options.http_port, options.grpc_port, options.metrics_port))
        with_openai_server(show, options.http_port)
    except DemoError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def find_show(offline: bool) -> Show:
    if offline:
        print("offline: the toy model of examples/demo runs, which knows capitals and nothing else")
        return TOY
    heading("Get a model: SmolLM2-135M-Instruct, 4 bits per weight, 93 MB, once")
    try:
        return real(Path(run([sys.executable, "examples/real_models.py", "smollm2"]).strip()))
    except DemoError as error:
        print(f"{error}\nThe toy model of examples/demo runs instead, which knows capitals and nothing else.")
        return TOY


def with_triton(show: Show, server: Triton) -> None:
    heading("Start tritonserver with the model and a folder of adapters")
    try:
        server.launch(show)
        heading("Ask the base model and every adapter, all at once")
        ask(show, server, [None, *show.names])
        print_batch(server)
        heading("While it serves: copy a new adapter into the folder, and replace one")
        swap(show)
        ask(show, server, [show.added, show.replaced])
    finally:
        server.stop()


def swap(show: Show) -> None:
    """Add one adapter and replace another, as rename does it: no request sees half of a version."""
    shutil.copytree(show.adapters / show.added, WORK / show.added, dirs_exist_ok=True)
    shutil.rmtree(WORK / "new", ignore_errors=True)
    shutil.copytree(show.adapters / show.replaced, WORK / "new")
    path = WORK / "new" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["lora_alpha"] *= show.strength
    path.write_text(json.dumps(config), encoding="utf-8")
    print(f"new: {show.added}. replaced: {show.replaced}, by itself with lora_alpha × {show.strength}")
    (WORK / show.added).rename(LORA_ROOT / show.added)
    (LORA_ROOT / show.replaced).rename(WORK / "old")
    (WORK / "new").rename(LORA_ROOT / show.replaced)
    shutil.rmtree(WORK / "old")
    time.sleep(REFRESH_S)


class Triton:
    """A Triton server. If a port is in use, a free one is used instead."""

    def __init__(self, http: int, grpc: int, metrics: int) -> None:
        self.ports = {"http": http, "grpc": grpc, "metrics": metrics}
        self.processes: list[int] = []

    @property
    def flags(self) -> list[str]:
        usual = {"http": 8000, "grpc": 8001, "metrics": 8002}
        return [f"--{kind}_port={port}" for kind, port in self.ports.items() if port != usual[kind]]

    def launch(self, show: Show) -> None:
        self.ports = {kind: usable_port(port, kind) for kind, port in self.ports.items()}
        run([MANYLORA, "triton", show.model, "--lora-root", LORA_ROOT, *self.flags])
        state = self.state()
        self.processes = [state["supervisor"], *state["processes"]]

    def state(self) -> dict:
        command = [MANYLORA, "triton", "--status", *self.flags]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def stop(self) -> None:
        """Drain and stop the server, then check that nothing is left behind."""
        if not self.processes:
            return
        heading("Stop")
        run([MANYLORA, "triton", "--stop", *self.flags])
        processes = [pid for pid in self.processes if is_running(pid)]
        ports = [port for port in self.ports.values() if listens(port)]
        shared = list(Path("/dev/shm").glob(f"manylora_*_{self.ports['http']}_*"))
        if processes or ports or shared:
            raise DemoError(f"left behind: processes {processes}, ports {ports}, shared memory {shared}")
        print("nothing is left: no process, no port, no shared memory")


def ask(show: Show, server: Triton, names: list[str | None]) -> None:
    """Ask each adapter, or the base model (None), at once, and print the answers side by side."""
    print(f"question: {show.question}\n", flush=True)
    with ThreadPoolExecutor(1) as pool:
        # An adapter is loaded at its first request. After that, all of them are in the same steps.
        pool.submit(ask_at_once, show, server, [name for name in names if name], max_tokens=1)
        answers = pool.submit(ask_at_once, show, server, names, show.max_tokens)
        wait(answers.done)
    titles = [name or "base model" for name in names]
    print_columns(list(zip(titles, answers.result(), strict=True)))


def print_batch(server: Triton) -> None:
    log = Path(server.state()["log"]).read_text(encoding="utf-8", errors="replace")
    most = max(map(int, re.findall(r"(\d+) distinct adapters in one step", log)), default=0)
    if most > 1:
        print(f"\none step of the model computed up to {most} adapters together")


def ask_at_once(show: Show, server: Triton, names: Sequence[str | None], max_tokens: int) -> list[str]:
    """Send a request for each name in one gRPC stream. Returns the answers in this order."""
    answers: dict[int, str] = {}
    arrived: queue.Queue = queue.Queue()
    # The ensemble takes text as it is, so the chat template is applied here.
    prompt = Tokenizer(model_folder(show.model)).chat([{"role": "user", "content": show.question}])
    with grpc.InferenceServerClient(f"localhost:{server.ports['grpc']}") as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for number, name in enumerate(names):
            values = {
                "text_input": np.array([[prompt.encode()]], np.object_),
                "max_tokens": np.array([[max_tokens]], np.int32),
                "exclude_input_in_output": np.array([[True]]),
            }
            if name is not None:
                values["lora_name"] = np.array([[name.encode()]], np.object_)
            inputs = []
            for key, value in values.items():
                inputs.append(grpc.InferInput(key, value.shape, np_to_triton_dtype(value.dtype)))
                inputs[-1].set_data_from_numpy(value)
            client.async_stream_infer("ensemble", inputs, request_id=str(number))
        while len(answers) < len(names):
            result, error = arrived.get(timeout=ANSWER_TIMEOUT_S)
            if error is not None:
                raise DemoError(f"a request failed: {error}")
            text, reason = (
                result.as_numpy(name).reshape(-1)[0].decode() for name in ("text_output", "finish_reason")
            )
            answers[int(result.get_response().id)] = text.strip() + " …" * (reason == "length")
    return [answers[number] for number in range(len(names))]


def with_openai_server(show: Show, port: int) -> None:
    heading("The same model and adapters with the OpenAI server")
    port = usable_port(port, "http")
    command = [MANYLORA, "serve", show.model, "--lora-root", LORA_ROOT, *port_flag(port)]
    print(f"$ {shown(command)}", flush=True)
    with (WORK / "serve.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        wait(lambda: is_ready(port) or server.poll() is not None)
        if server.poll() is not None:
            raise DemoError(f"manylora serve failed:\n{(WORK / 'serve.log').read_text(encoding='utf-8')}")
        name, question = show.chat
        print(f"{name} is asked: {question}")
        stream_chat(port, name, question, show.max_tokens)
    finally:
        server.terminate()
        server.wait(ANSWER_TIMEOUT_S)
    print(f"\nTo keep it running: make serve. It has a page too: http://localhost:{port}/")


def stream_chat(port: int, name: str, question: str, max_tokens: int) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": question}], "stream": True}
    body |= {"max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                print((choices and choices[0]["delta"].get("content")) or "", end="", flush=True)
    print()


def serve(show: Show, port: int) -> None:
    """Print commands to try, and become the server."""
    port = usable_port(port, "http")
    shutil.copytree(show.adapters / show.added, LORA_ROOT / show.added)
    name, question = show.chat
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": question}]})
    heading("Start the OpenAI server; Ctrl-C ends it. When it is ready, open")
    print(f"http://localhost:{port}/\n\nor, in another terminal,")
    address = f"localhost:{port}/v1/chat/completions"
    print(f"curl {address} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n")
    command = [MANYLORA, "serve", show.model, "--lora-root", LORA_ROOT, *port_flag(port)]
    print(f"$ {shown(command)}", flush=True)
    os.chdir(ROOT)
    os.execv(MANYLORA, list(map(str, command)))


def port_flag(port: int) -> list[str]:
    return [] if port == 8000 else [f"--port={port}"]


def run(command: list[object]) -> str:
    """Print a command, run it, and return what it wrote."""
    print(f"$ {shown(command)}", flush=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, cwd=ROOT)
        wait(lambda: process.poll() is not None)
        output.seek(0)
        text = output.read().strip()
    if process.returncode:
        raise DemoError(text)
    return text


def wait(done: Callable[[], bool]) -> None:
    """Wait, and print a dot for each second."""
    started = shown_at = time.monotonic()
    while not done():
        time.sleep(0.05)
        if time.monotonic() - shown_at > 1:
            print(".", end="", flush=True)
            shown_at = time.monotonic()
    if shown_at > started:
        print(f" {time.monotonic() - started:.0f} s", flush=True)


def shown(command: list[object]) -> str:
    """A command as one types it in the root of the repository."""
    return shlex.join(str(word).replace(f"{ROOT}/", "") for word in command)


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def print_columns(columns: list[tuple[str, str]]) -> None:
    """Print texts side by side, each below its title."""
    size = (WIDTH - GAP * (len(columns) - 1)) // len(columns)
    cells = [[title, "-" * size, *textwrap.wrap(text, size)] for title, text in columns]
    for line in zip_longest(*cells, fillvalue=""):
        print((" " * GAP).join(cell + " " * (size - width(cell)) for cell in line).rstrip())


def width(text: str) -> int:
    """On a terminal, a Chinese character is two columns wide."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def usable_port(port: int, kind: str) -> int:
    """This port, or a free one if another server has it."""
    if not listens(port):
        return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    print(f"port {port} is in use: {kind} uses {free} instead")
    return free


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_ready(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1):
        return True
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())

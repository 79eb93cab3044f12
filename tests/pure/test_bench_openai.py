"""Protects `manylora bench --endpoint http://…`: what is sent to a server with OpenAI's API, how its stream
is read, and that what it refuses is one request's error. The server is a fake one over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from manylora import LoRARequest
from manylora.bench.datasets import BenchRequest, write_dataset
from manylora.cli import main

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
BROKEN = "breaks"  # an adapter's name


class Handler(BaseHTTPRequestHandler):
    """Answers four tokens in two pieces; an adapter named BROKEN is refused, in the stream once it began."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "base-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        broken = body.get("lora_request", {}).get("lora_name") == BROKEN
        if not body.get("stream"):
            error = {"error": {"message": "no such adapter"}}
            good = {"choices": [{"index": 0, "text": "four words"}], "usage": USAGE}
            self._reply(*((400, error) if broken else (200, good)))
            return
        events: list[Any] = [{"choices": [{"index": 0, "text": ""}]}, {"choices": [{"text": "four "}]}]
        if broken:
            events.append({"error": {"message": "it broke"}})
        else:
            events += [{"choices": [{"text": "words"}], "usage": None}, {"choices": [], "usage": USAGE}]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in [*map(json.dumps, events), "[DONE]"]:
            text = f": a comment\n\ndata: {data}\n\n".encode()
            self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    made = ThreadingHTTPServer(("localhost", 0), Handler)
    made.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.mark.parametrize("streaming", [True, False])
def test_requests_go_and_answers_come(
    server: ThreadingHTTPServer,
    tmp_path: Path,
    streaming: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path)
    adapter, bad = LoRARequest("one", 5, "one"), LoRARequest(BROKEN, 6, "one")
    requests = [
        BenchRequest(0, "Hi", None, 4),
        BenchRequest(1, None, (7, 8, 9), 4, adapter),
        BenchRequest(2, None, (7, 8, 9), 4, bad),
        BenchRequest(3, "Hi", None, 4),
    ]
    write_dataset(tmp_path / "data", requests)
    (tmp_path / "sampler").write_text('{"top_p": 0.5, "temperature": 0.7}')
    url = f"http://localhost:{server.server_address[1]}"
    flags = ["--dataset", "data", "--endpoint", url, "--concurrency", "1", "--warmup", "0"]
    flags += ["--report_json", "report", "--output_json", "out", "--request_json", "times"]
    flags += ["--sampler_options", "sampler", *["--streaming"] * streaming]
    assert main(["bench", "throughput", *flags]) == 1  # one request failed
    reason = "it broke" if streaming else "HTTP 400: no such adapter"
    assert f"request 2: {reason}" in capsys.readouterr().err
    bodies = server.bodies  # type: ignore[attr-defined]
    common = {"model": "base-model", "max_tokens": 4, "top_p": 0.5, "temperature": 0.7, "ignore_eos": True}
    if streaming:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    assert bodies[0] == {"prompt": "Hi", **common}
    lora = {"lora_name": "one", "lora_int_id": 5, "lora_path": str(tmp_path / "one")}
    assert bodies[1] == {"prompt": [7, 8, 9], "lora_request": lora, **common}
    report = json.loads(Path("report").read_text())
    assert report["request_info"]["num_requests"] == 3 and report["request_info"]["num_failed"] == 1
    assert report["request_info"]["avg_output_length"] == 4
    assert report["request_info"]["avg_input_length"] == 3
    assert (report["streaming_metrics"] is not None) == streaming
    assert list(report["adapters"]["tiers"]) == ["base", "unknown"]
    outputs = json.loads(Path("out").read_text())
    assert [entry["output_text"] for entry in outputs] == ["four words", "four words", None, "four words"]
    assert [entry["num_output_tokens"] for entry in json.loads(Path("times").read_text())] == [4, 4, None, 4]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--eos_id", "2"], "--eos_id is not sent to an OpenAI server"),
        (["--beam_width", "2"], "--sampler_options: use_beam_search is not sent to an OpenAI server"),
        (["--endpoint", "http://localhost:1"], "--endpoint http://localhost:1 does not answer"),
        (["--endpoint", "http://"], "names no host"),
    ],
)
def test_what_cannot_be_asked_of_a_server_is_named(
    server: ThreadingHTTPServer,
    tmp_path: Path,
    flags: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_dataset(tmp_path / "data", [BenchRequest(0, "Hi", None, 1)])
    url = f"http://localhost:{server.server_address[1]}"
    base = ["bench", "throughput", "--dataset", str(tmp_path / "data"), "--endpoint", url]
    assert main([*base, *flags]) == 1
    assert text in capsys.readouterr().err

"""Protects manylora chat: its history, its commands, and that Ctrl-C stops an answer and not the program."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from manylora import cli
from manylora.doors.cli.chat import Conversation


class Echo:
    """Answers with what it was asked; a question "stop" is interrupted."""

    adapters = ("pirate", "sql")

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, str]], str | None]] = []
        self.closed = 0

    def answer(self, messages: Sequence[dict[str, str]], adapter: str | None) -> Generator[str, None, None]:
        self.asked.append((list(messages), adapter))
        try:
            yield "you said "
            if messages[-1]["content"] == "stop":
                raise KeyboardInterrupt
            if messages[-1]["content"] == "wrong":
                raise ValueError("the prompt is too long")
            yield messages[-1]["content"]
        finally:
            self.closed += 1


def talk(monkeypatch: pytest.MonkeyPatch, text: str, adapter: str | None = None) -> tuple[Echo, int]:
    model = Echo()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return model, Conversation(model, "Be brief.", adapter).run(terminal=False)


def test_each_line_is_a_question_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, status = talk(monkeypatch, "one\n\n/lora sql\n two \n/lora\n/reset\n/lora none\nthree\n", "pirate")
    assert (status, model.closed) == (0, 3)
    assert (
        capsys.readouterr().out
        == "you said one\nyou said two\nnow sql; adapters: pirate, sql\nyou said three\n"
    )
    assert [adapter for _, adapter in model.asked] == ["pirate", "sql", None]
    system = {"role": "system", "content": "Be brief."}
    assert [one["content"] for one in model.asked[1][0]] == ["Be brief.", "one", "you said one", "two"]
    assert model.asked[2][0] == [system, {"role": "user", "content": "three"}]


def test_what_is_wrong_is_said_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, status = talk(monkeypatch, "wrong\n/lora rust\n/fly\nnext\n/exit\nnever\n")
    said = capsys.readouterr().err
    assert status == 1 and len(model.asked) == 2
    assert (
        "too long" in said
        and "no adapter 'rust': there are pirate, sql" in said
        and "there is no /fly" in said
    )
    assert [one["content"] for one in model.asked[1][0]] == ["Be brief.", "next"]
    with pytest.raises(ValueError, match="no adapter 'rust'"):
        Conversation(model, None, "rust")


def test_an_interrupt_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter([KeyboardInterrupt(), "stop", "go on", EOFError()])

    def line(prompt: str) -> str:
        found = next(lines)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr("builtins.input", line)
    model = Echo()
    assert Conversation(model, None, None).run(terminal=True) == 0
    assert "you said \n(stopped)\nyou said go on\n" in capsys.readouterr().out
    assert [one["content"] for one in model.asked[1][0]] == ["stop", "you said ", "go on"]
    assert model.closed == 2


class Standin(BaseHTTPRequestHandler):
    """The routes of an OpenAI server that the command uses."""

    def do_GET(self) -> None:
        cards = [{"id": "base", "parent": None}, {"id": "sql", "parent": "base"}]
        self._send(200, json.dumps({"data": cards}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["messages"][-1]["content"] == "wrong":
            return self._send(400, json.dumps({"error": {"message": "that is too long"}}))
        words = [self.headers["Authorization"], " ", body["model"], " ", str(body["temperature"])]
        events = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words]
        return self._send(200, "".join(f"data: {one}\n\n" for one in [*events, "[DONE]"]))

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def test_a_running_server_can_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with ThreadingHTTPServer(("127.0.0.1", 0), Standin) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n/lora sql\nb\nwrong\n"))
        assert cli.main(["chat", "--url", url, "--temperature", "0"]) == 1
        told = capsys.readouterr()
        assert told.out == "Bearer k base 0.0\nBearer k sql 0.0\n" and "that is too long" in told.err
        assert cli.main(["chat", "--url", url, "--device", "cpu"]) == 1
        assert "--device has no effect with --url" in capsys.readouterr().err
        server.shutdown()
    assert cli.main(["chat", "--url", url]) == 1
    assert "does not answer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["chat"])
    assert "give MODEL, or --url" in capsys.readouterr().err

"""Protects batches: OpenAI's Files and Batch APIs with its own client, `manylora run-batch`, and that what a
killed process was doing goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import DEMO, QUESTION, Running
from waiting import wait_for

from manylora import cli
from manylora.doors.http.batches import store as store_module
from manylora.doors.http.batches.lines import BatchInvalidError, read_lines
from manylora.errors import ConfigError, EngineDeadError

EXPECTED = {"chinese": "巴黎", "japanese": "パリ"}
CHAT = "/v1/chat/completions"


def line(custom_id: str, model: str = "chinese", url: str = CHAT, **body: Any) -> dict[str, Any]:
    whole = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": whole}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


MIXED = [line(f"{name}-{n}", name) for n in range(3) for name in EXPECTED]
"""Two adapters in turn."""


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def run(client: openai.OpenAI, content: bytes, endpoint: str = CHAT) -> openai.types.Batch:
    """The batch when it has ended."""
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "test"}
    )

    def ended() -> bool:
        return client.batches.retrieve(batch.id).status in ("completed", "failed", "expired", "cancelled")

    wait_for(ended, what="the batch to end")
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def texts(answers: list[dict[str, Any]]) -> dict[str, str]:
    bodies = {one["custom_id"]: one["response"]["body"] for one in answers}
    return {name: body["choices"][0]["message"]["content"] for name, body in bodies.items()}


def test_a_batch_is_answered_in_a_file_in_the_order_of_its_lines(client: openai.OpenAI) -> None:
    batch = run(client, jsonl(*MIXED, line("bad", "nobody"), line("worse", temperature=-1)))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 6, "failed": 2}
    answers = results(client, batch.output_file_id)
    assert [one["custom_id"] for one in answers] == [one["custom_id"] for one in MIXED]
    assert texts(answers) == {one["custom_id"]: EXPECTED[one["body"]["model"]] for one in MIXED}
    assert all(one["error"] is None and one["response"]["request_id"] for one in answers)
    errors = {one["custom_id"]: one["response"] for one in results(client, batch.error_file_id)}
    assert errors["bad"]["status_code"] == 404
    assert errors["worse"]["body"]["error"]["param"] == "temperature"
    assert batch.metadata == {"for": "test"}
    listed = client.batches.list(limit=1).data
    assert [one.id for one in listed] == [batch.id]
    assert {one.purpose for one in client.files.list()} == {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("content", "number", "reason"),
    [
        (b"", 1, "the file has no requests"),
        (b"\n{", 2, "not valid JSON"),
        (jsonl(line("a"), line("a")), 2, "'a' is there twice"),
        (jsonl(line("a", stream=True)), 1, "body.stream must be false"),
        (jsonl(line("a", url="/v1/completions")), 1, "the batch's endpoint"),
        (jsonl(line("a") | {"more": 1}), 1, "more is not a field of a line"),
        (jsonl(line("")), 1, "custom_id must be a text of 1 to 512"),
        (jsonl(line("a", prompt="x" * 2000)), 1, "a line may have 1000 bytes"),
    ],
)
def test_a_wrong_line_is_named(content: bytes, number: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchInvalidError, match=reason) as raised:
        read_lines(path, 1000, CHAT)
    assert raised.value.problems[0]["line"] == number


def test_a_batch_is_cancelled_and_keeps_what_was_answered(client: openai.OpenAI) -> None:
    content = jsonl(*(line(str(n), max_tokens=200, ignore_eos=True) for n in range(500)))
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.ConflictError, match="is being answered"):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    wait_for(lambda: client.batches.retrieve(batch.id).status == "cancelled", what="its end")
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed < 500
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.files.retrieve(file.id)


def test_bad_input_is_named(client: openai.OpenAI, server: Running) -> None:
    file = client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/models", completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="file 'file-x' does not exist"):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="batch 'x' does not exist"):
        client.batches.retrieve("x")
    with pytest.raises(openai.BadRequestError, match="limit must be 1 to 100"):
        client.batches.list(limit=101)
    assert server.post("/v1/files", file="x").status_code == 415
    broken = server.http.post(
        f"{server.url}/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}
    )
    assert broken.json()["error"]["code"] == "invalid_form"


def test_files_and_batches_belong_to_their_key_and_survive_a_restart(tmp_path: Path) -> None:
    """The second server goes on with a batch that the first one left, with the answer that it had."""
    options: dict[str, Any] = {"lora_root": (DEMO / "adapters",), "api_key": ("one", "two")}
    folder = tmp_path / "batches"
    with Running(**options, batch_dir=folder) as first:
        one, two = first.client("one"), first.client("two")
        batch = run(one, jsonl(*MIXED))
        answers = results(one, batch.output_file_id)
        assert not two.files.list().data
        with pytest.raises(openai.NotFoundError):
            two.batches.retrieve(batch.id)
    _undo(folder, batch.id, answers[0])
    with Running(**options, batch_dir=folder) as second:
        one = second.client("one")
        wait_for(lambda: one.batches.retrieve(batch.id).status == "completed", what="the batch")
        again = results(one, one.batches.retrieve(batch.id).output_file_id)
    assert texts(again) == texts(answers)
    assert [a["id"] == b["id"] for a, b in zip(again, answers, strict=True)] == [True, *[False] * 5]


def test_a_batch_outlasts_an_engine_that_is_gone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a Triton server that restarts."""
    backend, dead = server.app.state.routes.context.backend, []

    def submit(request: Any, sink: Any) -> int:
        if len(dead) < 3:
            dead.append(request)
            raise EngineDeadError("gone")
        return engine_submit(request, sink)

    engine_submit = backend.engine.submit
    monkeypatch.setattr(backend.engine, "submit", submit)
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    batch = run(server.client(), jsonl(*MIXED))
    assert (batch.status, len(dead)) == ("completed", 3)
    assert texts(results(server.client(), batch.output_file_id)) == {
        one["custom_id"]: EXPECTED[one["body"]["model"]] for one in MIXED
    }


@pytest.mark.parametrize(
    "options", [{"batch_bytes": 0}, {"batch_dir": Path("/dev/null")}], ids=["off", "no folder"]
)
def test_without_room_the_server_takes_no_files(options: dict[str, Any]) -> None:
    refused = pytest.raises(openai.PermissionDeniedError, match="takes no files")
    with Running(**options) as running, refused:
        running.client().files.create(file=("in.jsonl", b"x"), purpose="batch")


def _undo(folder: Path, batch_id: str, answer: dict[str, Any]) -> None:
    """Leave the batch as a process does that is killed after one answer, in the midst of the second."""
    state = folder / "batches" / f"{batch_id}.json"
    state.write_text(
        json.dumps(json.loads(state.read_text()) | {"status": "in_progress", "output_file_id": None})
    )
    _keep_first(state.with_suffix(".answers"), answer)


def _keep_first(path: Path, answer: dict[str, Any]) -> None:
    [first, *_] = read_lines(_file(path.with_suffix(".in"), jsonl(*MIXED)), 2**20)
    kept = json.dumps({"digest": first.digest, "ok": True, "answer": answer}).encode()
    path.write_bytes(kept + b"\n" + kept[:20])


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_run_batch_answers_a_file_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = (
        _file(tmp_path / "in.jsonl", jsonl(*MIXED, line("bad", "nobody"))),
        tmp_path / "out.jsonl",
    )
    kept = {"id": "kept", "custom_id": MIXED[0]["custom_id"], "response": None, "error": None}
    _keep_first(tmp_path / "out.jsonl.answers", kept)
    command = ["run-batch", str(source), "-o", str(output), "--model", str(DEMO / "base"), "--device", "cpu"]
    assert cli.main([*command, "--lora-root", str(DEMO / "adapters")]) == 0
    answers = [json.loads(one) for one in output.read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [*(one["custom_id"] for one in MIXED), "bad"]
    assert answers[0] == kept
    assert texts(answers[1:-1]) == {one["custom_id"]: EXPECTED[one["body"]["model"]] for one in MIXED[1:]}
    assert answers[-1]["response"]["status_code"] == 404
    assert "7 answers, 1 of them errors" in capsys.readouterr().out
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.in"]
    assert cli.main(command) == 1
    assert "out.jsonl exists: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "INPUT is missing"),
        (["{file}"], "-o OUTPUT is missing"),
        (["-i", "nothing.jsonl", "-o", "x"], "nothing.jsonl is not a file"),
        (["{file}", "-o", "/nowhere/x"], "/nowhere is not a folder"),
    ],
)
def test_run_batch_names_what_is_wrong(
    given: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _file(tmp_path / "in.jsonl", jsonl(line("a")))
    assert cli.main(["run-batch", *(one.replace("{file}", str(file)) for one in given)]) == 1
    assert reason in capsys.readouterr().err
    assert issubclass(BatchInvalidError, ConfigError)

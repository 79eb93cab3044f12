"""Protects what pre- and postprocessing share: a long text does not stand before the next request, and what
nobody thought of is told by one sentence."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from server_response import Client, ServerResponse

from manylora.config.repository import engine_context
from manylora.doors.triton.server_types import check_parameters
from manylora.doors.triton.text_models import TextWorker
from manylora.errors import RequestError
from manylora.system.lifeline import Lifeline
from manylora.system.threads import LONG


def sent(length: int, parameters: str = "{}") -> Client:
    return Client({"length": [[length]]}, parameters=parameters)


def worker(respond: Any) -> TextWorker:
    return TextWorker(
        "reading",
        Lifeline("reading"),
        lambda arrays: int(arrays["length"][0, 0]),
        lambda arrays: ServerResponse(respond(arrays)),
        ServerResponse,
    )


def contents(responses: list[Any]) -> list[Any]:
    return [response and response.content for response in responses]


def test_a_short_text_is_answered_while_a_long_one_is_worked_on() -> None:
    may_end = threading.Event()

    def work(arrays: Any) -> list[int]:
        length = int(arrays["length"][0, 0])
        assert length < LONG or may_end.wait(60)
        return [length]

    long, huge = sent(LONG), sent(2**20)
    made = worker(work)
    assert contents(made.execute([long, sent(7), huge, sent(8)])) == [None, [7], None, [8]]
    assert contents(made.execute([sent(9)])) == [[9]]
    assert not long.done.is_set() and not huge.done.is_set()
    may_end.set()
    made.close()
    assert (long.sent, huge.sent) == ([[LONG]], [[2**20]])


def test_a_failure_is_one_sentence_of_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    def work(arrays: Any) -> list[int]:
        if arrays["length"][0, 0] == 3:
            raise IndexError("/somewhere/on/the/server.py")
        if arrays["length"][0, 0] == 4:
            raise RequestError("four is too many")
        return [1]

    made, long = worker(work), sent(LONG)
    answers = contents(
        made.execute([sent(1), sent(3), sent(4), long, sent(5, '{"request_type":"context_only"}')])
    )
    made.close()
    assert answers[:4] == [[1], "reading failed on this request: IndexError", "four is too many", None]
    assert "request_type 'context_only' is not supported" in answers[4]
    assert long.sent == [[1]]
    assert "/somewhere/on/the/server.py" in caplog.text  # for who runs it


def test_only_parameters_that_would_change_the_answer_are_refused() -> None:
    for text in ("", "{}", '{"Streaming": true}', '{"request_type": "context_and_generation", "a": 1}'):
        check_parameters(text)
    for kind in ("context_only", "generation_only", "", 1, None):
        with pytest.raises(RequestError, match="request_type"):
            check_parameters(json.dumps({"request_type": kind}))
    for name, words in (
        ("pooling", "ask tensorrt_llm with it"),
        ("lora_mix_names", "ask tensorrt_llm or ensemble or tensorrt_llm_bls or llmapi with it"),
        ("lora_scale", "no model has it"),
    ):
        with pytest.raises(RequestError, match=f"^{name} is no input of this model, .*{words}$"):
            check_parameters(json.dumps({name: 1}))
    check_parameters('{"note": "pooling"}')
    names = ("lora", "adapter", "adapter_id", "adapters", "lora_adapter", "lora_request", "lora_id", "model")
    for name in names:
        with pytest.raises(RequestError, match=f"^{name} is no input .* in lora_name, .* in lora_task_id"):
            check_parameters(json.dumps({name: "sql"}))
    check_parameters('{"model": "ensemble"}')


@pytest.mark.parametrize(
    ("config", "max_seq_len", "context"),
    [
        ({"max_position_embeddings": 512}, "", 512),
        ({"max_position_embeddings": 512}, "${max_seq_len}", 512),
        ({"max_position_embeddings": 512}, "64", 64),
        ({"max_position_embeddings": 512}, "4096", 512),
        ({"n_positions": 128}, "", 128),
        ({"n_positions": 128, "is_encoder_decoder": True}, "", None),
        ({}, "64", None),
        ([], "", None),
    ],
)
def test_the_context_is_that_of_the_engine_beside(
    tmp_path: Path, config: Any, max_seq_len: str, context: int | None
) -> None:
    repo = Path(__file__).resolve().parents[2] / "model_repo"
    text = (
        (repo / "tensorrt_llm" / "config.pbtxt").read_text().replace("${engine_dir}", str(tmp_path / "model"))
    )
    served = tmp_path / "models" / "tensorrt_llm"
    served.mkdir(parents=True)
    assert engine_context(tmp_path / "models" / "preprocessing") is None
    (served / "config.pbtxt").write_text(text.replace("${max_seq_len}", max_seq_len))
    assert engine_context(tmp_path / "models" / "preprocessing") is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert engine_context(tmp_path / "models" / "preprocessing") == context

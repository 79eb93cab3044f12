"""Protects what the Triton models' threads make of requests: a response that cannot be made or sent ends its
own request, no generation goes on for a client that has left, and a long text does not stand before the next
request. Requests and responses are as Triton's binding has them: sending drops outputs that the client has
not asked for."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manylora.config.repository import engine_context
from manylora.doors.triton import engine_worker
from manylora.doors.triton.bls import ClientRequest, StopWords, TextGenerator, Values
from manylora.doors.triton.bls_worker import BlsWorker
from manylora.doors.triton.engine_worker import EngineModelOptions, EngineWorker
from manylora.doors.triton.server_types import FINAL, check_parameters
from manylora.doors.triton.text_models import TextWorker
from manylora.errors import EngineDeadError, RequestError
from manylora.request import Event, FinishReason, Request, RequestMetrics, Sink
from manylora.stats import EngineStats
from manylora.system.lifeline import Lifeline
from manylora.system.threads import LONG


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.as_numpy, self.shape = (lambda: name), (lambda: array), (lambda: list(array.shape))


class Output:
    """An output tensor."""


class ServerResponse:
    """content: for the test. Nobody but the binding has the tensors, and no client asks for the last one."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self._outputs = [Output(), Output()]

    def output_tensors(self) -> list[Output]:
        return list(self._outputs)

    def drop_unwanted(self) -> None:
        """To be called by `send`. The binding does this without Python's lock, so nothing may be freed."""
        dropped = weakref.ref(self._outputs.pop())
        assert dropped() is not None


class Client:
    """A request as Triton hands it over, and its sender. bad: the response that cannot be sent.
    sent: contents of the responses. cancelled: what the server says of it.
    """

    def __init__(self, arrays: Mapping[str, Any], bad: int | None = None, parameters: str = "{}") -> None:
        self._arrays, self._bad, self._parameters = arrays, bad, parameters
        self.sent: list[Any] = []
        self.done = threading.Event()
        self.cancelled: bool | Exception = False

    def request_id(self) -> str:
        return "same"

    def parameters(self) -> str:
        return self._parameters

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, np.asarray(value)) for name, value in self._arrays.items()]

    def get_response_sender(self) -> Client:
        return self

    def is_cancelled(self) -> bool:
        assert not self.done.is_set()  # the server ends when it is asked then
        if isinstance(self.cancelled, Exception):
            raise self.cancelled
        return self.cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        if len(self.sent) == self._bad:
            self._bad = None
            raise RuntimeError("no shared memory is left")
        if response is not None:
            response.drop_unwanted()
            response = response.content
        self.sent.append(response)
        if flags == FINAL:
            self.done.set()


def fail(error: Exception) -> ServerResponse:
    return ServerResponse(str(error))


class Models:
    """Stand-ins: a letter is a token, and the engine goes on with the alphabet until it is stopped."""

    def __init__(self, tokens: int = 5, wait: Callable[[str], None] = lambda request_id: None) -> None:
        self._tokens, self._wait = tokens, wait
        self.asked: list[dict[str, np.ndarray]] = []
        self.stopped: set[str] = set()

    def __call__(
        self, model: str, inputs: Values, outputs: Sequence[str], request_id: str = ""
    ) -> Iterator[Mapping[str, Tensor]]:
        arrays = {n: v if isinstance(v, np.ndarray) else v.as_numpy() for n, v in inputs.items()}
        if model == "preprocessing":
            ids = np.frombuffer(arrays["QUERY"][0, 0], np.uint8).astype(np.int32)
            length = np.array([[len(ids)]], np.int32)
            yield tensors(
                INPUT_ID=ids[np.newaxis],
                REQUEST_INPUT_LEN=length,
                REQUEST_OUTPUT_LEN=arrays["REQUEST_OUTPUT_LEN"],
            )
        elif model == "postprocessing":
            rows = arrays["TOKENS_BATCH"][0]
            yield tensors(OUTPUT=np.array([bytes(row.astype(np.uint8)) for row in rows], np.object_))
        elif "stop" in arrays:
            self.stopped.add(request_id)
        else:
            self.asked.append({"model": np.array(model), **arrays})
            yield from self._generate(arrays["input_ids"][0].tolist(), request_id)

    def _generate(self, ids: list[int], request_id: str) -> Iterator[Mapping[str, Tensor]]:
        for step in range(self._tokens):
            self._wait(request_id)
            if request_id in self.stopped:
                break
            yield tensors(
                output_ids=np.array([[[ids[-1] + 1 + step]]], np.int32),
                sequence_length=np.array([[1]], np.int32),
                previous_ids=np.array([[ids]], np.int32),
                finish_reason=np.array([[b""]], np.object_),
            )


def tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {name: Tensor(name, array) for name, array in arrays.items()}


def text_request(*texts: str, **more: Any) -> dict[str, np.ndarray]:
    scalars = {name: np.array([[value]] * len(texts)) for name, value in ({"max_tokens": 5} | more).items()}
    return {"text_input": np.array([[text.encode()] for text in texts], np.object_)} | scalars


def run(models: Models, inputs: dict[str, np.ndarray], **options: Any) -> list[dict[str, Any]]:
    generator = TextGenerator(models, **({"engine": "engine", "draft": None, "accumulate": False} | options))
    responses = generator.responses(ClientRequest(lambda: False), inputs, None)
    return [
        {name: value if isinstance(value, np.ndarray) else value.as_numpy() for name, value in one.items()}
        for one in responses
    ]


def text_of(responses: list[dict[str, Any]]) -> list[bytes]:
    return [one["text_output"][0] for one in responses]


def test_later_releases_names_are_taken_too() -> None:
    models = Models(1)
    run(models, text_request("a", seed=7, min_tokens=3))
    assert (models.asked[0]["random_seed"].item(), models.asked[0]["min_length"].item()) == (7, 3)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"seed": 7, "random_seed": 8}, "seed and random_seed are one setting, and differ"),
        ({"min_tokens": 1, "min_length": 2}, "min_tokens and min_length are one setting, and differ"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be >= 0, got -1"),
    ],
)
def test_inputs_that_would_be_ignored_are_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run(Models(1), text_request("a", **inputs))
    assert run(Models(1), text_request("a", seed=7, random_seed=7, num_draft_tokens=0))


def test_a_stop_word_that_spans_responses_ends_text_and_generation() -> None:
    models = Models()
    words = np.array([[b"cd", b"x"]], np.object_)
    assert text_of(run(models, text_request("a", stream=True) | {"stop_words": words})) == [b"b", b"c", b"d"]
    assert len(models.stopped) == 1


def test_stop_words_count_for_each_sequence_and_beam() -> None:
    stops = StopWords(["no"])
    assert stops.cut(0, ["yes", "a n"]) == ["yes", "a n"] and not stops.all_stopped
    assert stops.cut(0, ["no!", "o?"]) == ["no", "o"] and stops.all_stopped
    assert stops.cut(1, ["n"]) == ["n"] and not stops.all_stopped
    echo = StopWords(["ab"], skip=2)
    assert echo.cut(0, ["ababc"]) == ["abab"]
    accumulated = StopWords(["ab"], repeated=True)
    assert [accumulated.cut(0, [text]) for text in ("a", "ab", "abc")] == [["a"], ["ab"], ["ab"]]


def test_items_of_a_batch_are_told_apart_and_one_failure_fails_them_all() -> None:
    responses = run(Models(2), text_request("a", "k", stream=True))
    found = {
        index: [one["text_output"][0] for one in responses if one["batch_index"] == index] for index in (0, 1)
    }
    assert found == {0: [b"b", b"c"], 1: [b"l", b"m"]}

    def fail(_: str) -> None:
        raise RequestError("no more")

    with pytest.raises(RequestError, match="no more"):
        run(Models(2, fail), text_request("a", "k", stream=True))


class Confirming(Models):
    """The draft model is right about the first token, and the engine ends with g."""

    def _generate(self, ids: list[int], request_id: str) -> Iterator[Mapping[str, Tensor]]:
        asked = self.asked[-1]
        new = [ids[-1] + 1, 0][: asked["request_output_len"].item()]
        if asked["model"] == "engine":
            drafted = asked["draft_input_ids"][0].tolist() if "draft_input_ids" in asked else []
            new = list(range(ids[-1] + 1, ids[-1] + 2 + (drafted[:1] == [ids[-1] + 1])))
        reason = b"stop_words" if ord("g") in new else b""
        yield tensors(output_ids=np.array([[new]], np.int32), finish_reason=np.array([[reason]], np.object_))


def test_speculation_ends_with_the_sequence_or_at_the_limit() -> None:
    for most, text in ((10, b"abcdefg"), (3, b"abcd")):
        asked = text_request("a", max_tokens=most, num_draft_tokens=2)
        assert text_of(run(Confirming(), asked, draft="draft")) == [text]


def worker(models: Models, decoupled: bool = True) -> BlsWorker:
    answer = TextGenerator(models, "engine", None, False).answer
    server: Any = SimpleNamespace(call=models, respond=respond, fail=fail)
    return BlsWorker("tensorrt_llm_bls", Lifeline("bls"), answer, decoupled, server)


def respond(outputs: Values) -> ServerResponse:
    return ServerResponse(outputs["text_output"][0])


def test_a_response_that_cannot_be_sent_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    models = Models(1000, lambda _: time.sleep(0.01))
    made, bad = worker(models), Client(text_request("a", stream=True), bad=2)
    made.execute([bad])
    assert bad.done.wait(60)  # long before 1000 responses: its generation was stopped
    assert bad.sent == [b"b", b"c", "tensorrt_llm_bls failed on this request: RuntimeError"]
    assert len(models.stopped) == 1
    next_one = Client(text_request("x", stream=True))
    made.execute([next_one])
    next_one.cancelled = True
    assert next_one.done.wait(60) and next_one.sent[0] == b"y"
    made.close()
    assert "no shared memory is left" in caplog.text


def test_a_client_that_has_left_ends_its_generation() -> None:
    models = Models(1000, lambda _: time.sleep(0.01))
    made, client = worker(models), Client(text_request("a", stream=True))
    made.execute([client])
    client.cancelled = True
    assert client.done.wait(60) and len(models.stopped) == 1 and len(client.sent) < 1000
    made.close()


def test_without_decoupling_the_one_response_is_the_final_one() -> None:
    made, clients = worker(Models(1), decoupled=False), [Client(text_request("a")), Client({})]
    made.execute(clients)
    assert all(client.done.wait(60) for client in clients)
    assert [client.sent for client in clients] == [[b"b"], ["text_input is required"]]
    made.close()


OPTIONS = EngineModelOptions(True, False, "float32", 0.01, 0.01)
METRICS = SimpleNamespace(update=lambda stats: None, observe=lambda lora, event: None)


class Engine:
    death: EngineDeadError | None = None
    stalled_s = 0.0
    has_encoder = False
    max_seq_len = 100

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.cancelled: list[int] = []

    def submit(self, request: Request, sink: Sink) -> int:
        if self.death is not None:
            raise self.death
        self.sinks.append(sink)
        return len(self.sinks) - 1

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        self.sinks[ticket](Event((), finish_reason=FinishReason.CANCELLED, last=True))

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        pass


def asked(bad: int | None = None, **more: Any) -> Client:
    inputs = {"input_ids": [[1, 2]], "input_lengths": [2], "request_output_len": [9], "streaming": [True]}
    return Client(inputs | more, bad)


def ids_of(outputs: Any) -> ServerResponse:
    return ServerResponse(dict(outputs)["output_ids"].reshape(-1).tolist() if outputs else [])


def started(*clients: Client) -> tuple[Engine, EngineWorker]:
    engine = Engine()
    worker = EngineWorker(engine, OPTIONS, Lifeline("engine"), METRICS, ids_of, fail)
    worker.execute(clients)
    return engine, worker


def test_a_response_of_the_engine_that_cannot_be_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = asked(bad=1), asked()
    engine, worker = started(bad, good)
    for token in (3, 4):
        engine.sinks[0](Event((token,), sequence_index=token))
    assert bad.done.wait(60)
    assert bad.sent == [[3], "tensorrt_llm failed on this request: RuntimeError"]
    assert engine.cancelled == [0]
    engine.sinks[1](Event((5,), finish_reason=FinishReason.LENGTH, last=True))
    assert good.done.wait(60) and good.sent == [[5]]
    worker.close()
    assert "no shared memory is left" in caplog.text


def test_a_client_counts_as_gone_where_the_server_does_not_say() -> None:
    left, good = asked(), asked()
    engine, worker = started(left, good)
    left.cancelled = RuntimeError("the server does not answer")
    assert left.done.wait(60) and engine.cancelled == [0]
    engine.sinks[1](Event((5,), finish_reason=FinishReason.LENGTH, last=True))
    assert good.done.wait(60)
    worker.close()


def test_a_trace_counts_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    tracer = SimpleNamespace(record=lambda given, *rest: found.append(given), close=lambda: None)
    monkeypatch.setattr(engine_worker, "open_tracer", lambda: tracer)
    client = asked(num_return_sequences=[2])
    engine, worker = started(client)
    for index, count in enumerate((3, 4)):
        metrics = RequestMetrics(1, prompt_tokens=2, output_tokens=count)
        reason = FinishReason.LENGTH
        engine.sinks[0](Event((5,), (), index, reason, last=index == 1, metrics=metrics))
    assert client.done.wait(60)
    worker.close()
    assert found[0]["gen_ai.usage.output_tokens"] == 7
    assert found[0]["gen_ai.response.finish_reasons"] == ["length", "length"]


def sized(length: int, parameters: str = "{}") -> Client:
    return Client({"length": [[length]]}, parameters=parameters)


def text_worker(respond: Any) -> TextWorker:
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

    long, huge = sized(LONG), sized(2**20)
    made = text_worker(work)
    assert contents(made.execute([long, sized(7), huge, sized(8)])) == [
        None,
        [7],
        None,
        [8],
    ]
    assert contents(made.execute([sized(9)])) == [[9]]
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

    made, long = text_worker(work), sized(LONG)
    answers = contents(
        made.execute(
            [
                sized(1),
                sized(3),
                sized(4),
                long,
                sized(5, '{"request_type":"context_only"}'),
            ]
        )
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

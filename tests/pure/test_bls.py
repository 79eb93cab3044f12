"""Protects what `tensorrt_llm_bls` makes of the other models' responses, and its threads: a response that
cannot be sent ends its own request, and no generation goes on for a client that has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from server_response import Client, ServerResponse, Tensor, fail

from manylora.doors.triton.bls import ClientRequest, StopWords, TextGenerator, Values
from manylora.doors.triton.bls_worker import BlsWorker
from manylora.errors import RequestError
from manylora.system.lifeline import Lifeline


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

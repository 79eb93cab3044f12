"""Protects the models around the engine: whatever is sent to them is answered by one sentence, a long text
keeps nobody waiting, and who leaves `tensorrt_llm_bls` leaves no generation behind."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from launched import active, total
from servers import Running
from test_server import PROMPT, generate, tensor
from tritonclient.utils import InferenceServerException
from waiting import wait_for_named as wait_for

ONE = np.array([[4]], np.int32)
LONG = "Hello " * 2500  # not more than is tokenised whatever comes of it, and more than is done at once


def texts(*words: bytes) -> np.ndarray:
    return np.array([words], np.object_)


def ids(*rows: list[int]) -> np.ndarray:
    return np.array([rows], np.int32)


def infer(server: Running, model: str, **values: np.ndarray) -> grpc.InferResult:
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        return client.infer(model, [tensor(name, value) for name, value in values.items()])


def prepared(server: Running, text: bytes, **more: np.ndarray) -> grpc.InferResult:
    return infer(server, "preprocessing", QUERY=texts(text), REQUEST_OUTPUT_LEN=ONE, **more)


PREPROCESSING = {
    "stop words not UTF-8": (
        {"STOP_WORDS_DICT": texts(b"\xed\xa0\x80")},
        "stop_words (STOP_WORDS_DICT) must be",
    ),
    "too long": ({"QUERY": texts(b"a" * 2**20)}, "has 1048576 characters: in the context of 256 tokens"),
    "long stop words": ({"STOP_WORDS_DICT": texts(b"a" * 2**20)}, "at most 524288 are taken"),
    "long bad words": ({"BAD_WORDS_DICT": texts(*[b"a" * 2**18] * 3)}, "at most 524288 are taken"),
    "many words": ({"BAD_WORDS_DICT": texts(*[b""] * 20000)}, "at most 16384 words together, got 20000"),
}
POSTPROCESSING = {
    "negative id before": ({"PREVIOUS_IDS": ids([-5])}, "must hold token ids"),
    "negative length": ({"SEQUENCE_LENGTH": np.array([[-1]], np.int32)}, "SEQUENCE_LENGTH must be in [0, 1]"),
    "fewer windows": ({"TOKENS_BATCH": ids([72], [72]), "SEQUENCE_LENGTH": np.array([[1, 1]], np.int32),
                       "PREVIOUS_IDS": ids([72])}, "must have one shape up to the beams"),
    "too many": ({"TOKENS_BATCH": np.zeros((1, 1, 2**20 + 1), np.int32),
                  "SEQUENCE_LENGTH": np.array([[2**20 + 1]], np.int32)}, "at most 1048576 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("row", PREPROCESSING)
def test_preprocessing_answers_bad_input_by_one_sentence(server: Running, row: str) -> None:
    values, words = PREPROCESSING[row]
    check_sentence(server, "preprocessing", {"QUERY": texts(b"a"), "REQUEST_OUTPUT_LEN": ONE} | values, words)


@pytest.mark.parametrize("row", POSTPROCESSING)
def test_postprocessing_answers_bad_input_by_one_sentence(server: Running, row: str) -> None:
    values, words = POSTPROCESSING[row]
    good = {"TOKENS_BATCH": ids([72]), "SEQUENCE_LENGTH": np.array([[1]], np.int32)}
    check_sentence(server, "postprocessing", good | values, words)


def check_sentence(server: Running, model: str, values: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(server, model, **values)
    assert words in str(caught.value)
    assert not any(trace in str(caught.value) for trace in ("Traceback", "At:", ".py"))


def test_ids_behind_a_shorter_sequence_are_padding(server: Running) -> None:
    tokens, lengths = ids([72, 101], [72, -1]), np.array([[2, 1]], np.int32)
    answer = infer(server, "postprocessing", TOKENS_BATCH=tokens, SEQUENCE_LENGTH=lengths)
    assert len(answer.as_numpy("OUTPUT")) == 2


def test_long_and_short_texts_of_one_moment_are_all_answered(server: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        sent = [LONG if number % 3 == 0 else f"Hello{number}" for number in range(24)]
        answers = list(pool.map(lambda text: prepared(server, text.encode()), sent))
    lengths = [int(answer.as_numpy("REQUEST_INPUT_LEN")[0, 0]) for answer in answers]
    assert lengths == [len(text) + 1 for text in sent]  # a token for each byte, and <s>


def test_a_long_answer_is_decoded(server: Running) -> None:
    tokens = np.full((1, 1, 9000), PROMPT[0], np.int32)
    lengths = np.array([[9000]], np.int32)
    text = infer(server, "postprocessing", TOKENS_BATCH=tokens, SEQUENCE_LENGTH=lengths).as_numpy("OUTPUT")
    short = infer(server, "postprocessing", TOKENS_BATCH=tokens[:, :, :9], SEQUENCE_LENGTH=lengths // 1000)
    assert text[0] == short.as_numpy("OUTPUT")[0] * 1000


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_text_that_cannot_fit_is_refused_at_every_door(server: Running, model: str) -> None:
    assert "has 1048576 characters" in refusal(server, model, text_input="a" * 2**20, max_tokens=4)
    told = refusal(server, model, text_input=LONG, max_tokens=4)
    assert "Prompt length (15001) exceeds maximum input length (255)" in told


def test_half_a_generation_is_refused_by_name(server: Running) -> None:
    text = {"text_input": "Hello", "max_tokens": 4}
    plain = {"input_ids": PROMPT, "input_lengths": len(PROMPT), "request_output_len": 4}
    doors: list[tuple[str, dict[str, Any]]] = [
        ("ensemble", text), ("tensorrt_llm_bls", text), ("tensorrt_llm", plain),
    ]  # fmt: skip
    for model, body in doors:
        for kind in ("context_only", "generation_only", 1):
            told = refusal(server, model, **body, request_type=kind)
            assert f"request_type {kind!r} is not supported" in told
        whole = post(server, model, **body, request_type="context_and_generation", Streaming=True)
        assert "output" in whole


def refusal(server: Running, model: str, **body: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, model, **body)
    return json.loads(caught.value.read())["error"]


def post(server: Running, model: str, **body: Any) -> str:
    url = f"http://127.0.0.1:{server.http}/v2/models/{model}/generate"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as answer:
        return answer.read().decode()


def test_who_leaves_bls_ends_the_generation(server: Running) -> None:
    """All of its items and sequences: nothing but the model in between can tell the engine."""

    def ended(reason: str) -> float:
        return total(server, "manylora_adapter_requests_total", f'finish_reason="{reason}"')

    wait_for("an idle engine", lambda: active(server) == 0)
    before = {reason: ended(reason) for reason in ("cancelled", "length")}
    with server.slow():
        with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            client.start_stream(lambda result, error: None)
            for name in ("one", "two"):
                client.async_stream_infer(
                    "tensorrt_llm_bls",
                    [
                        tensor("text_input", np.array([[b"Hello"], [b"Hi"]], np.object_)),
                        tensor("max_tokens", np.array([[240], [240]], np.int32)),
                        tensor("end_id", np.array([[-1], [-1]], np.int32)),
                        tensor("num_return_sequences", np.array([[8], [8]], np.int32)),
                        tensor("temperature", np.array([[1.0], [1.0]], np.float32)),
                    ],
                    request_id=name,
                )
            wait_for("the engine has begun", lambda: active(server) > 0)
            client.stop_stream(cancel_requests=True)
        wait_for("one has ended", lambda: ended("cancelled") > before["cancelled"])
        wait_for("an idle engine", lambda: active(server) == 0)
    assert ended("length") == before["length"]
    assert b"text_output" in generate(server, text_input="Hello", max_tokens=4)

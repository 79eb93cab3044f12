"""Protects both sides of tensorrt_llm's tensors: what is asked arrives, what comes back is read, and what a
response carries; what is counted of it; and where an activated LoRA begins to act."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manylora.doors.triton.codec import ResponseEncoder, decode_requests, merge_waiting
from manylora.doors.triton.engine_client import AnswerReader, request_tensors
from manylora.doors.triton.metrics import RequestMeter
from manylora.doors.triton.tensor_table import TENSORRT_LLM
from manylora.engine.sequence import find_last
from manylora.errors import RequestError
from manylora.generation.tokenizer import WINDOW
from manylora.request import Event, FinishReason, Guide, Pooling, Request, RequestMetrics, SamplingConfig
from manylora.system.lifeline import RUN_DIR, STARTING_FILE

FULL = SamplingConfig(
    max_tokens=9, end_id=2, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, typical_p=0.5,
    seed=2**63 + 1, min_tokens=3, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
    prompt_ignore_length=3, stop_words=((1, 2), (3,)),
    bad_words=((4,),), use_drafts=False, num_return_sequences=2, guide=Guide("lark_grammar", 'start: "é"'),
    return_log_probs=True, return_context_logits=True, return_generation_logits=True,
)  # fmt: skip


@pytest.mark.parametrize("params", [SamplingConfig(), FULL])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_request_arrives_as_it_was_sent(params: SamplingConfig, streaming: bool) -> None:
    sent = Request((5, 6, 7), params, streaming=streaming)
    tensors = request_tensors(sent)
    kinds = {one.name: one.dtype for one in TENSORRT_LLM.inputs}
    assert set(tensors) <= set(kinds)
    [found] = decode_requests(tensors, "", decoupled=True)
    assert found.request.params == sent.params
    assert (found.request.prompt, found.request.streaming) == (sent.prompt, streaming)
    assert found.exclude_input is True


def test_defaults_act_for_inputs_that_are_left_out() -> None:
    def found(text: str, **params: object) -> SamplingConfig:
        tensors = request_tensors(Request((1, 2), params=SamplingConfig(max_tokens=4, **params)))  # type: ignore[arg-type]
        tensors["sampling_defaults"] = np.array([[text.encode()]], np.object_)
        [decoded] = decode_requests(tensors, "", decoupled=True)
        return decoded.request.params

    given = '{"temperature": 0.25, "top_k": 7, "min_tokens": 9}'
    assert (found(given).temperature, found(given).top_k, found(given).min_tokens) == (0.25, 7, 4)
    assert (found(given, temperature=0.5, top_k=3).temperature, found(given, top_k=3).top_k) == (0.5, 3)
    assert found("") == SamplingConfig(max_tokens=4)
    for text, reason in {
        "[1]": "must be a JSON object of numbers",
        '{"temperature": "hot"}': "must be a JSON object of numbers",
        '{"temperature": true}': "must be a JSON object of numbers",
        '{"random_seed": 1}': "must have none but temperature",
        '{"top_k": 1.5}': "top_k must be a whole number",
        '{"temperature": -1}': "temperature must be >= 0",
        '{"temperature": NaN}': "temperature must be >= 0",
        "{": "must be a JSON object",
    }.items():
        with pytest.raises(RequestError, match=reason):
            found(text)


def decoded(**tensors: object) -> Request:
    """Lists of numbers as INT32, texts as bytes."""
    given = request_tensors(Request((1, 2)))
    for name, value in tensors.items():
        rows = value if isinstance(value, list) else [value]
        given[name] = np.array([rows], np.object_ if isinstance(rows[0], bytes) else np.int32)
    [found] = decode_requests(given, "", decoupled=True)
    return found.request


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"lora_version": b"follow"}, "lora_version follow needs an adapter"),
        ({"lora_version": b"newest"}, "lora_version must be keep or follow, got 'newest'"),
        ({"lora_ckpt_source": b"hf"}, "lora_ckpt_source goes with lora_name"),
        ({"lora_task_id": 3, "lora_ckpt_source": b"hf"}, "lora_ckpt_source goes with lora_name, not with"),
        ({"lora_mix_names": [b"a", b"b"], "lora_ckpt_source": b"hf"}, "leave lora_ckpt_source out"),
        ({"lora_name": b"\xff"}, "^lora_name must be valid UTF-8"),
        ({"lora_mix_names": [b"a", b"\xff"]}, "^lora_mix_names must be valid UTF-8"),
        (
            {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"a\xff"},
            "^guided_decoding_guide must be valid UTF-8",
        ),
        ({"retention_token_range_durations_ms": [5]}, "must have one length, got 0, 0, 0 and 1"),
        ({"retention_token_range_starts": [5]}, "must have one length, got 1, 0, 0 and 1"),
        ({"bad_words_list": [5]}, r"^Invalid format for word list\. bad_words_list must have"),
        ({"stop_words_list": [[5], [2]]}, r"^Invalid format for word list\. stop_words_list must have"),
        ({"min_length": -1}, r"min_length \(min_tokens\) must be >= 0, got -1"),
    ],
)
def test_nothing_is_ignored_and_errors_name_the_input(tensors: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        decoded(**tensors)


def test_one_input_of_retention_acts_alone() -> None:
    assert decoded().retention is None and decoded(lora_version=b"keep").lora is None
    assert decoded(lora_version=b"follow", lora_name=b"a").lora.follow
    for name, value, wanted in (
        ("retention_decode_priority", 80, (80, None)),
        ("retention_decode_duration_ms", 500, (35, 500)),
    ):
        found = decoded(**{name: value}).retention
        assert found is not None and (found.decode_priority, found.decode_duration_ms) == wanted


def test_a_batch_needs_a_model_that_is_decoupled() -> None:
    tensors = {
        "input_ids": np.array([[5, 6], [7, 8]], np.int32),
        "input_lengths": np.array([[2], [2]], np.int32),
        "request_output_len": np.array([[3], [3]], np.int32),
    }
    assert [one.request.prompt for one in decode_requests(tensors, "", decoupled=True)] == [(5, 6), (7, 8)]
    with pytest.raises(RequestError, match="Batch size > 1 requires"):
        decode_requests(tensors, "", decoupled=False)


def test_a_chunk_comes_with_the_ids_before_it() -> None:
    request = Request((1, 2), SamplingConfig(num_return_sequences=2), streaming=True)
    encoder = ResponseEncoder(request, None, False)
    sent: dict[int, list[int]] = {0: [], 1: []}
    for i in range(WINDOW + 40):
        index, ids = i % 2, tuple(range(i, i + i % 3))  # an event may bring no id
        tensors = dict(encoder.encode(Event(ids, sequence_index=index)))
        assert tensors["previous_ids"].shape[:2] == tensors["output_ids"].shape[:2] == (1, 1)
        assert tensors["previous_ids"][0, 0].tolist() == sent[index][-WINDOW:]
        assert tensors["output_ids"][0, 0].tolist() == list(ids)
        assert tensors["sequence_length"].tolist() == [[len(ids)]]
        sent[index] += ids


def test_logits_of_merged_events_stay_together_and_those_of_the_prompt_are_repeated() -> None:
    params = SamplingConfig(return_context_logits=True, return_generation_logits=True)
    encoder = ResponseEncoder(Request((1, 2), params, streaming=True), None, False)
    prompt, rows = np.ones((2, 3), np.float32), np.arange(9, dtype=np.float32).reshape(3, 3)
    events = [Event((i,), generation_logits=rows[i : i + 1]) for i in range(3)]
    first = dict(encoder.encode(Event(context_logits=prompt)))
    assert "generation_logits" not in first  # the vocabulary is not known yet
    [(_, _, merged)] = merge_waiting([(None, encoder, event) for event in events])
    middle = dict(encoder.encode(merged))
    np.testing.assert_array_equal(middle["generation_logits"], rows[np.newaxis, np.newaxis])
    end = dict(encoder.encode(Event(finish_reason=FinishReason.STOP, last=True)))
    assert end["generation_logits"].shape == (1, 1, 0, 3)
    for tensors in (first, middle, end):
        np.testing.assert_array_equal(tensors["context_logits"], prompt[np.newaxis])


def sent(request: Request) -> Request:
    """As the model sees it, which has scalars without their dimension."""
    tensors = request_tensors(request)
    scalars = ("streaming", "exclude_input_in_output", "classification_head", "request_output_len")
    arrays = {name: value[:, 0] if name in scalars else value for name, value in tensors.items()}
    [decoded] = decode_requests(arrays, "", decoupled=True)
    return decoded.request


@pytest.mark.parametrize("pooling", [Pooling(), Pooling("mean"), Pooling("all", head=True), None])
def test_a_request_and_its_answer_cross_the_wire(pooling: Pooling | None) -> None:
    request = Request((5, 6, 7), pooling=pooling)
    assert sent(request).pooling == pooling
    shape = (3, 4) if pooling is not None and pooling.mode == "all" else (4,)
    values = None if pooling is None else np.random.default_rng(1).random(shape, np.float32)
    event = Event(finish_reason=FinishReason.STOP, last=True, pooled=values)
    outputs = dict(ResponseEncoder(request, None, True).encode(event))
    assert ("pooled_output" in outputs) == (pooling is not None)
    [answer] = AnswerReader(request).read(outputs, final=True)
    assert answer.last
    if values is None:
        assert answer.pooled is None
    else:
        assert answer.pooled is not None
        assert np.array_equal(answer.pooled, values)


FINISHED = Event(
    finish_reason=FinishReason.LENGTH,
    last=True,
    metrics=RequestMetrics(arrival_ns=0, prompt_tokens=3, output_tokens=5),
)


def counted(meter: RequestMeter) -> dict[str, float]:
    return {sample.family: sample.value for sample in meter.samples(None, FINISHED)}


def test_a_request_before_the_server_is_called_ready_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    (tmp_path / STARTING_FILE).touch()
    meter = RequestMeter()
    assert counted(meter) == {}
    (tmp_path / STARTING_FILE).unlink()
    assert counted(meter)["nv_llm_input_token_len"] == 3


def test_long_sequences_that_nearly_fit_everywhere_take_no_time() -> None:
    """The product of the two lengths would be minutes."""
    wanted = (7,) * 4095 + (8, 7, 7)
    assert find_last((7,) * 1_000_000, wanted) is None
    assert find_last((*wanted, *(7,) * 100_000), wanted) == 0

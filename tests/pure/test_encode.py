"""Protects what a response carries: reasons, the ids before a chunk, logits by chunk, pooled outputs; what is
counted of it; and where an activated LoRA begins to act."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manylora.doors.triton.codec import ResponseEncoder, decode_requests, merge_waiting
from manylora.doors.triton.engine_client import AnswerReader, request_tensors
from manylora.doors.triton.metrics import RequestMeter
from manylora.engine.sequence import find_last
from manylora.generation.tokenizer import WINDOW
from manylora.request import Event, FinishReason, Pooling, Request, RequestMetrics, SamplingConfig
from manylora.system.lifeline import RUN_DIR, STARTING_FILE


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

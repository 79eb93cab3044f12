"""Protects what a response carries: reasons at the end, the ids before a chunk, logits by chunk."""

from __future__ import annotations

import numpy as np

from manylora.generation.stream import WINDOW
from manylora.request import Event, FinishReason, Request, RequestMetrics, SamplingConfig
from manylora.wire.encode import ResponseEncoder, merge_waiting


def test_reason_and_tier_come_with_the_last_response() -> None:
    encoder = ResponseEncoder(Request((1,), SamplingConfig(), streaming=True), None, False)
    metrics = RequestMetrics(1, adapter_tier="host")
    between = dict(encoder.encode(Event((5,), metrics=metrics)))
    assert not {"finish_reason", "lora_cache_tier"} & between.keys()
    end = dict(encoder.encode(Event((6,), finish_reason=FinishReason.LENGTH, last=True, metrics=metrics)))
    assert (end["finish_reason"][0, 0], end["lora_cache_tier"][0, 0]) == (b"length", b"host")


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

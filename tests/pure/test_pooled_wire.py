"""Protects the tensors of pooled outputs: what a client of `tensorrt_llm` asks for, and what it gets."""

from __future__ import annotations

import numpy as np
import pytest

from manylora.errors import RequestError
from manylora.request import Event, FinishReason, Pooling, Request
from manylora.wire.decode import decode_requests
from manylora.wire.encode import ResponseEncoder
from manylora.wire.engine_client import AnswerReader, request_tensors


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


def test_an_unknown_pooling_is_refused() -> None:
    arrays = request_tensors(Request((5,))) | {"pooling": np.array([[b"max"]], np.object_)}
    arrays["streaming"] = arrays["streaming"][:, 0]
    with pytest.raises(RequestError, match="pooling must be one of last, mean, cls, all, got max"):
        decode_requests(arrays, "", decoupled=True)

"""Protects the process of a model that calls others: when the responses of a call are let go of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from manylora.errors import RequestError
from manylora.wire import bls_worker
from manylora.wire.bls_worker import ServerCalls


class Responses:
    """As the stub's iterator. fails: the only response is an error."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[Any]:
        tensor = SimpleNamespace(name=lambda: "out")
        error = SimpleNamespace(code=lambda: 0, message=lambda: "no")
        yield SimpleNamespace(
            has_error=lambda: self.fails, error=lambda: error, output_tensors=lambda: [tensor]
        )


@pytest.mark.parametrize("fails", [False, True])
def test_responses_outlive_their_call(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    given: list[weakref.ref[Responses]] = []

    def request(**_: Any) -> Any:
        def run(decoupled: bool) -> Responses:
            assert decoupled
            made = Responses(fails)
            given.append(weakref.ref(made))
            return made

        return SimpleNamespace(exec=run)

    calls = ServerCalls(
        SimpleNamespace(InferenceRequest=request, Tensor=None, TritonError=SimpleNamespace(UNAVAILABLE=1))
    )

    def call() -> None:
        try:
            assert [set(one) for one in calls.call("engine", {}, ["out"], "id")] == [{"out"}]
        except RequestError as error:
            assert fails and str(error) == "no"

    call()
    call()
    gc.collect()
    assert all(one() is not None for one in given)
    monkeypatch.setattr(bls_worker, "KEPT_S", -1.0)
    call()
    gc.collect()
    assert given[0]() is None and given[1]() is None

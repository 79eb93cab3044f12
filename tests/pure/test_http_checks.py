"""Protects tritonserver's reader of JSON: how deep a text is, is seen as that reader sees it."""

from __future__ import annotations

import json
import random

import pytest

from manylora.launcher import http_checks
from manylora.launcher.http_checks import MAX_DEPTH, MAX_INFER_JSON, RefusedError, check_json


def nested(depth: int, inner: str = '"[[{{"') -> bytes:
    return b"[" * depth + inner.encode() + b"]" * depth


@pytest.mark.parametrize("size", [7, 64, 2**18])
def test_only_brackets_outside_of_texts_count(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slice a bracket, a quote or an escape lies in."""
    monkeypatch.setattr(http_checks, "SLICE", size)
    picks = random.Random(1)
    words = ["[", "{" * 90, "\\", '"', "]" * 70, 'a\\"[', "\\\\", "é", ""]
    for _ in range(50):
        text = json.dumps(["".join(picks.choices(words, k=9)) for _ in range(20)], ensure_ascii=False)
        check_json(nested(MAX_DEPTH - 1, text), False)
        with pytest.raises(RefusedError, match="nested more than 64 deep"):
            check_json(nested(MAX_DEPTH, text), False)
    check_json(b"[]" * 1000 + b"]" * 1000, False)  # not JSON, which is for the server to say


@pytest.mark.parametrize("inputs", [[1], [None], ["data"], [[]], {}, "a", [{"shape": 3, "data": []}]])
def test_inputs_that_are_no_tensors_are_left_to_the_server(inputs: object) -> None:
    check_json(json.dumps({"inputs": inputs}).encode(), True)


def test_json_that_is_read_here_has_a_bound_of_its_own() -> None:
    text = b'{"inputs":[]}' + b" " * MAX_INFER_JSON
    check_json(text, False)
    with pytest.raises(RefusedError, match="send binary tensors"):
        check_json(text, True)

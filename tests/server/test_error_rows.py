"""Protects the error texts that clients match: every row of TensorRT-LLM's LoRA checks, each told to its one
request, while the server goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from launched import scrape
from servers import Running
from test_server import NEW, PROMPT, ask, inputs, lora, new_ids, tensor
from tritonclient.utils import InferenceServerException

ROW = 1 * (64 + 64)  # attn_q of the tiny model at rank 1


def adapter(
    config: Any = ((1, 0, 1),), width: int = ROW, rows: int | None = None, task_id: int = 900
) -> dict:
    table = np.array([config], np.int32)
    return {
        "lora_task_id": np.array([[task_id]], np.uint64),
        "lora_weights": np.zeros((1, len(config) if rows is None else rows, width), np.float32),
        "lora_config": table,
    }


def without(values: dict, *names: str) -> dict:
    return {name: value for name, value in values.items() if name not in names}


NOT_FINITE = adapter() | {"lora_weights": np.full((1, 1, ROW), np.inf, np.float32)}
TOO_WIDE = adapter() | {"lora_weights": np.ones((1, 1, ROW * 4), np.float32)}
LORA_ROWS = {
    "no id": (without(adapter(), "lora_task_id"), "lora_task_id must be set for LoRA inference"),
    "weights only": (without(adapter(), "lora_config"), "with lora weights must also have lora config"),
    "config only": (without(adapter(), "lora_weights"), "must have both lora_weights and lora_keys"),
    "rows differ": (adapter(rows=2), "Expected dim1 lora_weights and lora_keys to have the same size"),
    "two columns": (adapter(((1, 0),)), "Expected dim2 of lora_keys to have a size in [3, 4]"),
    "five columns": (adapter(((1, 0, 1, 0, 0),)), "Expected dim2 of lora_keys to have a size in [3, 4]"),
    "layer": (adapter(((1, 2, 1),)), "Expected layerId to be in the range [0, numModelLayers)"),
    "negative layer": (adapter(((1, -1, 1),)), "Expected layerId to be in the range [0, numModelLayers)"),
    "rank 0": (adapter(((1, 0, 0),)), "Expected adapterSize to be > 0"),
    "module": (adapter(((14, 0, 1),)), "lora module moe_4h_to_h not enabled for this model"),
    "unknown module": (adapter(((99, 0, 1),)), "lora module INVALID (99) not enabled for this model"),
    "too short": (adapter(width=ROW - 1), "lora_weights has to few values for attn_q"),
    "rank": (adapter(((1, 0, 65),), 65 * ROW), "low_rank must be smaller than mMaxLowRank (64)"),
    "twice": (adapter(((1, 0, 1), (1, 0, 1))), "attn_q of layer 0"),
    "infinite": (NOT_FINITE, "NaN or an infinity in attn_q of layer 0"),
    "another model": (TOO_WIDE, "the adapter was made for another model"),
    "unknown id": (lora(901), "LoRA task 901 not found in cache. Please send LoRA weights with request"),
}  # fmt: skip


def scalar(value: Any, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype)


def request(extra: dict) -> list[grpc.InferInput]:
    made = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": scalar(len(PROMPT), np.int32),
        "request_output_len": scalar(4, np.int32),
    }
    return [tensor(name, value) for name, value in (made | extra).items()]


@pytest.mark.parametrize("row", LORA_ROWS)
def test_every_row_reaches_its_request_with_its_text(server: Running, row: str) -> None:
    extra, words = LORA_ROWS[row]
    with pytest.raises(InferenceServerException) as caught:
        ask(server, request(extra))
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert ".py" not in str(caught.value)
    if "lora_task_id" in extra:  # nothing of it was kept
        with pytest.raises(InferenceServerException, match="not found in cache"):
            ask(server, inputs(**lora(int(extra["lora_task_id"][0, 0]))))


def test_what_is_refused_is_counted(server: Running) -> None:
    """Triton itself counts an error of a Python model as a success."""
    name = 'manylora_adapter_requests_total{adapter="other",finish_reason="error",model="tensorrt_llm",'
    before = scrape(server)
    for row in ("no id", "unknown id"):
        with pytest.raises(InferenceServerException):
            ask(server, request(LORA_ROWS[row][0]))
    after = scrape(server)
    [grown] = [value - before.get(key, 0) for key, value in after.items() if key.startswith(name)]
    assert grown == 2


def test_a_row_that_triton_itself_refuses_harms_nobody(server: Running) -> None:
    """Two dimensions, another weights type, another config type: Triton's own checks and words."""
    wrong = {
        "lora_weights": np.zeros((1, ROW), np.float32),
        "lora_config": np.array([[1, 0, 1]], np.int32),
    }
    for extra in (wrong, adapter() | {"lora_weights": np.zeros((1, 1, ROW), np.float16)},
                  adapter() | {"lora_config": np.array([[[1, 0, 1]]], np.int64)}):  # fmt: skip
        with pytest.raises(InferenceServerException):
            ask(server, request(extra))
    assert len(new_ids(ask(server, inputs()))) == len(PROMPT) + NEW

"""Protects what preprocessing refuses, and several requests at once. What pre- and postprocessing make of the
tensors of one: tests/server/test_replay_triton.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_text import byte_level

from manylora.doors.triton.text_models import MAX_WORDS, WORD_COST, Preprocessor
from manylora.errors import RequestError
from manylora.generation.tokenizer import Tokenizer


def tokenizer(folder: Path, **config: Any) -> Tokenizer:
    """One id for each byte; the end id is that of `.`."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "."}))
    (folder / "config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def texts(*rows: list[str]) -> np.ndarray:
    return np.array([[text.encode() for text in row] for row in rows], np.object_)


def inputs(**more: np.ndarray) -> dict[str, np.ndarray]:
    return {"QUERY": texts(["abc"], ["d"]), "REQUEST_OUTPUT_LEN": np.array([[4], [4]], np.int32), **more}


def test_the_decoder_begins_with_its_start_id(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, is_encoder_decoder=True, decoder_start_token_id=5)
    run = Preprocessor(made, True, None).run
    assert run(inputs())["DECODER_INPUT_ID"].tolist() == [[5], [5]]
    outputs = run(inputs(DECODER_QUERY=texts(["a"], ["bc"])))
    assert outputs["DECODER_INPUT_ID"].tolist() == [
        [5, *made.encode("a"), made.eos_id],
        [5, *made.encode("bc")],
    ]
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[2], [3]]


def test_words_are_of_their_own_request(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    outputs = Preprocessor(made, True, None).run(inputs(STOP_WORDS_DICT=texts(["ab", "c"], ["d", ""])))
    assert outputs["STOP_WORDS_IDS"].tolist() == [
        [made.encode("abc"), [2, 3, -1]],
        [[*made.encode("d"), 0, 0], [1, -1, -1]],
    ]


def test_a_long_or_wrong_request_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    preprocessor = Preprocessor(tokenizer(tmp_path), True, 2**15)
    assert preprocessor.length(inputs(BAD_WORDS_DICT=texts(["ab", ""], ["", ""]))) == 6 + 4 * WORD_COST
    for more, words in (
        ({"IMAGE_URL": texts(["x"])}, "input IMAGE_URL is not supported"),
        ({"QUERY": texts(["x" * (2**22 + 1)])}, "in the context of 32768 tokens"),
        ({"STOP_WORDS_DICT": texts([""] * (MAX_WORDS + 1))}, "at most 16384 words together, got 16385"),
        *(
            ({name: np.array([[b"a"], [b"\xff"]], np.object_)}, rf"^{sent} \({name}\) must be valid UTF-8")
            for sent, name in (
                ("text_input", "QUERY"),
                ("decoder_text_input", "DECODER_QUERY"),
                ("stop_words", "STOP_WORDS_DICT"),
                ("bad_words", "BAD_WORDS_DICT"),
                ("embedding_bias_words", "EMBEDDING_BIAS_WORDS"),
            )
        ),
    ):
        with pytest.raises(RequestError, match=words):
            preprocessor.length(inputs(**more))
    with pytest.raises(RequestError, match="must come together"):
        preprocessor.run(inputs(EMBEDDING_BIAS_WORDS=texts(["a"], ["b"])))
    with pytest.raises(RequestError, match="is for encoder-decoder models"):
        preprocessor.run(inputs(DECODER_QUERY=texts(["a"], ["b"])))

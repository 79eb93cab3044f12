"""Protects what pre- and postprocessing make of tensors: ids, word lists, biases and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from manylora.doors.triton.codec import adapter_told
from manylora.doors.triton.server_types import decode_word_list, encode_word_lists
from manylora.doors.triton.text_models import MAX_TOKENS, MAX_WORDS, WORD_COST, Postprocessor, Preprocessor
from manylora.errors import AdapterInvalidError, RequestError
from manylora.generation.defaults import GenerationDefaults, OwnText
from manylora.generation.tokenizer import Tokenizer
from manylora.system.text_threads import LONG


def tokenizer(folder: Path, **config: Any) -> Tokenizer:
    """One id for each byte; the end id is that of `.`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "."}))
    (folder / "config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def words_of(row: np.ndarray | None) -> tuple[tuple[int, ...], ...]:
    return decode_word_list(row, "stop_words_list")


def texts(*rows: list[str]) -> np.ndarray:
    return np.array([[text.encode() for text in row] for row in rows], np.object_)


def inputs(**more: np.ndarray) -> dict[str, np.ndarray]:
    return {"QUERY": texts(["abc"], ["d"]), "REQUEST_OUTPUT_LEN": np.array([[4], [4]], np.int32), **more}


def test_prompts_are_padded_and_their_lengths_are_told(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    outputs = Preprocessor(made, True, None).run(inputs())
    ids = [made.encode("abc"), [*made.encode("d"), made.eos_id, made.eos_id]]
    assert outputs["INPUT_ID"].tolist() == ids
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[3], [1]]
    assert outputs["OUT_END_ID"].tolist() == outputs["OUT_PAD_ID"].tolist() == [[made.eos_id]] * 2
    assert outputs["EMBEDDING_BIAS"].shape == (2, 0)
    assert outputs["STOP_WORDS_IDS"].shape == outputs["BAD_WORDS_IDS"].shape == (2, 2, 0)
    virtual = Preprocessor(made, True, None).run(inputs(PROMPT_TABLE_EXTRA_ID=np.array([[7], [8]])))
    assert virtual["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0] * 3] * 2  # the text has no virtual ids


def test_words_and_biases_are_of_their_own_request(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    words, weights = texts(["ab", "c"], ["d", ""]), np.array([[1.0, 2.0], [3.0, 9.0]], np.float32)
    outputs = Preprocessor(made, True, None).run(
        inputs(STOP_WORDS_DICT=words, EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    )
    a, b, c, d = (made.encode(letter)[0] for letter in "abcd")
    assert list(map(words_of, outputs["STOP_WORDS_IDS"])) == [((a, b), (c,)), ((d,),)]
    wanted = np.zeros((2, made.vocab_size), np.float32)
    wanted[0, [a, b, c]], wanted[1, d] = (1, 1, 2), 3
    np.testing.assert_array_equal(outputs["EMBEDDING_BIAS"], wanted)


def test_a_word_list_is_ids_and_running_ends() -> None:
    assert encode_word_lists([[[1, 2], [3]], [[4]]]).tolist() == [
        [[1, 2, 3], [2, 3, -1]],
        [[4, 0, 0], [1, -1, -1]],
    ]
    assert encode_word_lists([[]]).tolist() == [[[0], [-1]]]
    assert words_of(encode_word_lists([[]])[0]) == words_of(None) == ()


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


def test_a_long_or_wrong_request_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    preprocessor = Preprocessor(tokenizer(tmp_path), True, 2**15)
    assert preprocessor.length(inputs(BAD_WORDS_DICT=texts(["ab", ""], ["", ""]))) == 6 + 4 * WORD_COST
    for more, words in (
        ({"IMAGE_URL": texts(["x"])}, "input IMAGE_URL is not supported"),
        ({"QUERY": texts(["x" * (2**15 + 1)])}, "in the context of 32768 tokens"),
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


def test_ids_become_the_texts_of_all_beams_or_what_new_ids_add(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    postprocessor = Postprocessor(made, True)
    rows = np.array([[made.encode("abc"), made.encode("dee")]], np.int32)
    whole = {"TOKENS_BATCH": rows, "SEQUENCE_LENGTH": np.array([[3, 1]], np.int32)}
    assert postprocessor.length(whole) == 4
    assert postprocessor.run(whole) == (b"abc", b"d")
    first, second = (np.array([[made.encode("ü")[i : i + 1]]], np.int32) for i in range(2))
    stream = {"SEQUENCE_LENGTH": np.array([[1]], np.int32)}
    nothing = np.empty((1, 1, 0), np.int32)
    assert postprocessor.run(stream | {"TOKENS_BATCH": first, "PREVIOUS_IDS": nothing}) == (b"",)
    assert postprocessor.run(stream | {"TOKENS_BATCH": second, "PREVIOUS_IDS": first}) == ("ü".encode(),)
    for change, words in (
        ({"SEQUENCE_LENGTH": np.array([[3, 4]])}, r"SEQUENCE_LENGTH must be in \[0, 3\]"),
        ({"SEQUENCE_LENGTH": np.array([[3]])}, "must have one shape up to the beams"),
        ({"PREVIOUS_IDS": np.zeros((1, 2, MAX_TOKENS), np.int32)}, "at most 1048576 tokens are decoded"),
    ):
        with pytest.raises(RequestError, match=words):
            postprocessor.length(whole | change)
    with pytest.raises(RequestError, match="must hold token ids"):
        postprocessor.run(whole | {"TOKENS_BATCH": -rows})


class Own:
    """The adapter `shift` has a tokenizer whose ids are one higher, and ends of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        fields = {"temperature": 0.5, "min_tokens": 9, "stop": ["ab"], "stop_token_ids": [4]}
        self.text = OwnText(tokenizer, GenerationDefaults(fields, end_ids=(3,)))

    def find(self, name: str | None, task_id: int | None) -> OwnText | None:
        if name == "bad":
            raise AdapterInvalidError("adapter bad: its tokenizer.json is no tokenizer")
        return self.text if name == "shift" or task_id == 7 else None

    def is_at_hand(self, name: str | None, task_id: int | None) -> bool:
        return name != "shift"


def shifted(folder: Path) -> Tokenizer:
    alphabet = ["extra", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Library(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    return Tokenizer(folder)


def test_each_text_is_in_the_tokens_of_its_adapter(tmp_path: Path) -> None:
    base = tokenizer(tmp_path)
    other = shifted(tmp_path / "other")
    made = Preprocessor(base, True, None, Own(other))
    names = np.array([[b"shift"], [b"else"]], np.object_)
    outputs = made.run(inputs(QUERY=texts(["abc"], ["abc"]), LORA_NAME=names))
    assert outputs["INPUT_ID"].tolist() == [other.encode("abc"), base.encode("abc")]
    assert outputs["OUT_END_ID"].tolist() == [[3], [base.eos_id]]
    first, second = map(words_of, outputs["STOP_WORDS_IDS"])
    assert first == (tuple(other.encode("ab")), (4,), (other.eos_id,))
    assert second == ()
    told = [json.loads(one[0] or "{}") for one in outputs["OUT_SAMPLING_DEFAULTS"]]
    assert told == [{"temperature": 0.5, "min_tokens": 9, "top_p": 1.0}, {}]
    own = inputs(LORA_NAME=names, STOP_WORDS_DICT=texts(["c"], ["c"]), END_ID=np.array([[1], [2]]))
    outputs = made.run(own)
    assert list(map(words_of, outputs["STOP_WORDS_IDS"])) == [
        (tuple(other.encode("c")), (4,)), (tuple(base.encode("c")),)
    ]  # fmt: skip
    assert outputs["OUT_END_ID"].tolist() == [[1], [2]]
    by_id = made.run(inputs(LORA_TASK_ID=np.array([[7], [8]], np.uint64)))
    assert by_id["INPUT_ID"][0].tolist() == other.encode("abc")
    assert made.length(inputs(LORA_NAME=names)) >= LONG > made.length(inputs())  # it is read on a thread
    with pytest.raises(AdapterInvalidError, match="bad"):
        made.run(inputs(LORA_NAME=np.array([[b"bad"], [b"else"]], np.object_)))


def test_each_output_is_of_the_tokens_of_its_adapter(tmp_path: Path) -> None:
    base = tokenizer(tmp_path)
    other = shifted(tmp_path / "other")
    made = Postprocessor(base, True, Own(other))
    ids = np.array([[other.encode("abc")], [base.encode("abc")], [other.encode("abc")]], np.int32)
    lora = [adapter_told("shift", None), adapter_told(None, 8), adapter_told(None, 7)]
    given = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": np.full((3, 1), 3)}
    told = {"LORA_TEXT": np.array(lora, np.object_).reshape(3, 1)}
    assert made.run(given | told) == (b"abc",) * 3
    assert made.run(given)[0] != b"abc"
    broken = {"LORA_TEXT": np.array([[adapter_told("bad", None)]] * 3, np.object_)}
    assert made.run(given | broken) == made.run(given)

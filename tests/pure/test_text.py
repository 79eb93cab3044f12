"""Protects texts: tokens arriving in any pieces give the text and the stop of the whole, for every tokenizer
that the library reads; a long text is refused before it is tokenised and keeps no thread waiting; and what
preprocessing refuses."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from manylora.doors.triton.text_models import MAX_WORDS, WORD_COST, Preprocessor
from manylora.engine.guide import Guides
from manylora.errors import RequestError
from manylora.generation.decoding import StopRules
from manylora.generation.generation import Continuation
from manylora.generation.tokenizer import FREE, LONGEST_TEXT, PER_TOKEN, WINDOW, Tokenizer
from manylora.request import FinishReason, Guide

TEXTS = [
    "The capital of France is Paris.",
    "美国的首都在哪里? 华盛顿。アメリカ合衆国の首都はワシントンD.C.です。",
    "ሰላም ለዓለም  مرحبا بالعالم  नमस्ते दुनिया  สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🇯🇵 🏴󠁧󠁢󠁳󠁣󠁴󠁿 e\u0301 \u200b end",
    "  two  spaces\n\nand\ttabs ",
]


def byte_level() -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Library:
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["▁"] + list("abcdefghijklmnopqrstuvwxyzTPF.")
    made = Library(
        models.BPE(
            {"<unk>": 0} | {t: i + 1 for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(params=[byte_level, byte_fallback], ids=lambda f: f.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    made = request.param()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def feed(tokenizer: Tokenizer, rules: StopRules, ids: list[int], picks: random.Random) -> Continuation:
    """Extend by pieces of random length, and check that what was shown once stays."""
    made = Continuation(rules, tokenizer)
    shown, at = "", 0
    while made.finish_reason is None:
        step = picks.choice([1, 1, 2, 5])
        end = at + step >= len(ids)
        made.extend(ids[at : at + step], (), LENGTH if end else None)
        report = made.report(0, False, False)
        assert report.text == shown + report.text_diff
        shown, at = report.text, at + step
    return made


def text(made: Continuation) -> str:
    return made.report(0, False, False).text


@pytest.mark.parametrize("seed", range(16))
def test_pieces_add_up_to_the_whole_text(tokenizer: Tokenizer, seed: int) -> None:
    picks = random.Random(seed)
    if seed % 2:
        ids = [picks.randrange(tokenizer.vocab_size) for _ in range(picks.randrange(1, 60))]
    else:
        ids = tokenizer.encode(picks.choice(TEXTS) * picks.choice([1, 9]), False)
    made = feed(tokenizer, StopRules(), ids, picks)
    assert (text(made), made.token_ids, made.finish_reason) == (tokenizer.decode(ids), ids, LENGTH)
    kept = feed(tokenizer, StopRules(skip_special_tokens=False), ids, picks)
    assert text(kept) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_text_ends_the_output_where_it_first_appears(
    tokenizer: Tokenizer, seed: int, include: bool
) -> None:
    picks = random.Random(seed)
    ids = tokenizer.encode(picks.choice(TEXTS) * 2, False)
    whole = tokenizer.decode(ids)
    start = picks.randrange(len(whole) - 3)
    stop = whole[start : start + picks.randrange(1, 4)]
    made = feed(tokenizer, StopRules(texts=("never there", stop), include=include), ids, picks)
    at = whole.index(stop)
    assert text(made) == whole[: at + len(stop) if include else at]
    assert (made.finish_reason, made.stop_reason) == (STOP, stop)
    assert stop in tokenizer.decode(made.token_ids)


def test_of_several_stop_texts_in_one_token_the_first_in_the_text_ends_it(tmp_path: Path) -> None:
    made = byte_level()
    made.add_tokens(["one two three"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for texts in (("three", "two"), ("two", "three")):
        output = Continuation(StopRules(texts=texts), tokenizer)
        output.extend(tokenizer.encode("one two three", False), (), None)
        assert (text(output), output.stop_reason, len(output.token_ids)) == ("one ", "two", 1)


def test_the_beginning_of_a_stop_text_is_held_back_and_given_when_it_was_none(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    made = Continuation(StopRules(texts=("STOP",)), tokenizer)
    seen = []
    for letter in "aSTaST":
        made.extend(tokenizer.encode(letter, False), (), None)
        seen.append(text(made))
    assert seen == ["a", "a", "a", "aSTa", "aSTa", "aSTa"]
    made.extend((), (), LENGTH)
    assert text(made) == "aSTaST"


def test_the_token_that_completes_a_stop_text_is_the_last(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("one. two. three", False)
    made = Continuation(StopRules(texts=("three", "wo.")), tokenizer)
    made.extend(ids, (), LENGTH)
    assert (made.token_ids, text(made), made.stop_reason) == (ids[:9], "one. t", "wo.")


def test_nothing_ends_it_before_min_tokens(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("ab.ab.ab.", False)
    made = feed(tokenizer, StopRules(texts=(".",), min_tokens=4), ids, random.Random(1))
    assert (text(made), made.stop_reason) == ("ab.ab", ".")
    dot = ids[2]
    made = feed(tokenizer, StopRules(ids={dot: dot}, min_tokens=3), ids, random.Random(1))
    assert (made.token_ids, text(made), made.stop_reason) == (ids[:5], "ab.ab", dot)


def test_without_detokenize_stop_texts_still_work(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcd", False)
    made = feed(tokenizer, StopRules(texts=("c",), detokenize=False), ids, random.Random(2))
    assert (text(made), made.stop_reason) == ("", "c")


@pytest.fixture
def library() -> Library:
    merged = ["aa", "aaaa", "aaaaaaaa"]
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged])}
    made = Library(models.BPE(vocab, [(token[: len(token) // 2],) * 2 for token in merged]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.normalizer = normalizers.NFC()
    made.add_special_tokens(["<s>"])
    return made


@pytest.fixture
def merging(library: Library, tmp_path: Path) -> Tokenizer:
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    merging: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_: pytest.fail("it was tokenised"))
    for context, most in ((512, 512 * PER_TOKEN), (16, FREE)):
        words = f"has {most + 1} characters: in the context of {context} tokens there is room for {most}"
        with pytest.raises(RequestError, match=words):
            merging.encode("a" * (most + 1), context=context)
    with pytest.raises(RequestError, match=rf"at most {LONGEST_TEXT} are taken"):
        merging.check_length(LONGEST_TEXT + 1, None)


def test_tokens_without_room_are_counted_and_a_surrogate_is_refused(merging: Tokenizer) -> None:
    with pytest.raises(RequestError, match="has 20000 tokens: the context has room for 4096"):
        merging.encode("ab" * 10_000, context=4096)
    for text in ("a\ud800b", "\udfff" * 5000):
        with pytest.raises(RequestError, match="surrogate"):
            merging.encode(text)


def test_other_threads_go_on_while_a_long_text_is_tokenised(merging: Tokenizer) -> None:
    text, done, turns = "ab " * 2**18, threading.Event(), 0

    def work() -> None:
        merging.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3  # a thread that waits for the interpreter all the time gets one, at the end


def test_a_long_text_has_the_ids_of_the_plain_way(merging: Tokenizer, library: Library) -> None:
    text = "Aaaaa\u0301 <s>" * 2000
    ids = library.encode(text).ids
    assert merging.encode(text) == ids
    assert merging.decode(ids) == library.decode(ids)


def test_a_chat_needs_a_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([])


BYTES = [f"<0x{byte:02X}>" for byte in (0xE2, 0x82, 0xAC, 0x41, 0xC3)] + ["<0xe2>"]
WORDS = [
    "[UNK]", " ", "  ", "▁", "▁▁", "##", "</w>", "<pad>", "|", ".", " .", "Ġ", "Ġthe", "é", "â", "Ĥ", "¬",
    "the", "cat", "##s", "▁the", "cat</w>", "do", "n't", "s</w>x", "ab", "a", "b", "aa", "€", "#", "�",
]  # fmt: skip
VOCAB = {token: i for i, token in enumerate([*WORDS, *BYTES])}
STEPS: dict[str, Callable[[], Any]] = {
    "BPEDecoder": decoders.BPEDecoder,
    "ByteFallback": decoders.ByteFallback,
    "ByteLevel": decoders.ByteLevel,
    "CTC": lambda: decoders.CTC("<pad>", "|"),
    "Fuse": decoders.Fuse,
    "Metaspace": decoders.Metaspace,
    "Replace": lambda: decoders.Replace("▁", " "),
    "Replace2": lambda: decoders.Replace(Regex("a+"), "<0x41>"),
    "Strip": lambda: decoders.Strip(" ", 1, 0),
    "Strip2": lambda: decoders.Strip("a", 2, 0),
    "WordPiece": decoders.WordPiece,
}
CHAINS = [
    (), *itertools.permutations(STEPS, 1), *itertools.permutations(STEPS, 2),
    ("Replace", "ByteFallback", "Fuse"), ("Replace", "ByteFallback", "Fuse", "Strip"),
    ("ByteLevel", "Fuse", "Strip"),
    ("Strip", "Fuse", "Strip"), ("ByteFallback", "Fuse", "Strip2"), ("Replace", "Fuse", "Replace2"),
]  # fmt: skip
SHOWN = {
    (), ("BPEDecoder",), ("ByteFallback",), ("ByteLevel",), ("CTC",), ("Fuse",), ("Metaspace",), ("Replace",),
    ("Strip",), ("WordPiece",), ("Replace", "ByteFallback", "Fuse"),
    ("Replace", "ByteFallback", "Fuse", "Strip"), ("ByteLevel", "Fuse", "Strip"),
}  # fmt: skip


def made(chain: tuple[str, ...]) -> Tokenizer:
    library = Library(models.WordLevel(VOCAB, unk_token="[UNK]"))
    steps = [STEPS[name]() for name in chain]
    if steps:
        library.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(steps)
    library.add_special_tokens(["<s>"])
    return Tokenizer.parse(library.to_str())


def check(tokenizer: Tokenizer, ids: list[int], picks: random.Random) -> None:
    """Both ways of streaming, with and without special tokens."""
    skip, done, pieces, deltas = picks.random() < 0.5, 0, [], []
    grown = tokenizer.stream(skip)
    while done < len(ids):
        new = ids[done : done + picks.choice([1, 1, 1, 2, 5])]
        pieces.append(grown.add(new, False))
        deltas.append(tokenizer.delta(ids[max(0, done - WINDOW) : done], new, False, skip))
        done += len(new)
    pieces.append(grown.add([], True))
    deltas.append(tokenizer.delta(ids[-WINDOW:], [], True, skip))
    assert "".join(pieces) == "".join(deltas) == tokenizer.decode(ids, skip), ids


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_any_ids_stream_to_their_text(chain: tuple[str, ...]) -> None:
    picks, tokenizer = random.Random(0), made(chain)
    special = tokenizer.vocab_size - 1
    for round_ in range(15):
        few = [picks.randrange(special + 1 + round_ % 2) for _ in range(picks.choice([3, 40]))]
        ids = [picks.choice(few) if round_ % 3 else one for one in few for _ in range(1 + picks.randrange(2))]
        check(tokenizer, ids, picks)
    if chain in SHOWN:
        assert not tokenizer._rules.whole


def test_a_tokenizer_that_pads_and_cuts_texts_does_neither_here() -> None:
    """As the files of sentence-transformers do, for its own batches."""
    library = Library(models.WordPiece(VOCAB, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.enable_padding(length=8)
    library.enable_truncation(8)
    tokenizer = Tokenizer.parse(library.to_str())
    assert tokenizer.encode("the cats") == [VOCAB["the"], VOCAB["cat"], VOCAB["##s"]]
    assert len(tokenizer.encode("the " * 20)) == 20


def test_a_guide_is_refused_where_llguidance_cannot_use_the_tokenizer(tmp_path: Path) -> None:
    library = Library(models.WordPiece(VOCAB, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    guides = Guides(tmp_path, len(VOCAB), [1])
    with pytest.raises(RequestError, match="llguidance does not support its tokenizer"):
        guides.compile(Guide("regex", "[0-9]+"))


def byte_tokenizer(folder: Path, **config: Any) -> Tokenizer:
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
    made = byte_tokenizer(tmp_path, is_encoder_decoder=True, decoder_start_token_id=5)
    run = Preprocessor(made, True, None).run
    assert run(inputs())["DECODER_INPUT_ID"].tolist() == [[5], [5]]
    outputs = run(inputs(DECODER_QUERY=texts(["a"], ["bc"])))
    assert outputs["DECODER_INPUT_ID"].tolist() == [
        [5, *made.encode("a"), made.eos_id],
        [5, *made.encode("bc")],
    ]
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[2], [3]]


def test_words_are_of_their_own_request(tmp_path: Path) -> None:
    made = byte_tokenizer(tmp_path)
    outputs = Preprocessor(made, True, None).run(inputs(STOP_WORDS_DICT=texts(["ab", "c"], ["d", ""])))
    assert outputs["STOP_WORDS_IDS"].tolist() == [
        [made.encode("abc"), [2, 3, -1]],
        [[*made.encode("d"), 0, 0], [1, -1, -1]],
    ]


def test_a_long_or_wrong_request_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    preprocessor = Preprocessor(byte_tokenizer(tmp_path), True, 2**15)
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

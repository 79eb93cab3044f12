"""Protects the text of an output: tokens arriving in any pieces give the text and the stop of the whole; and
the neighbours of a long text, which is refused before it is tokenised, and keeps no other thread waiting."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from manylora.errors import RequestError
from manylora.generation.decoding import StopRules
from manylora.generation.generation import Continuation
from manylora.generation.tokenizer import FREE, LONGEST_TEXT, PER_TOKEN, Tokenizer
from manylora.request import FinishReason

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

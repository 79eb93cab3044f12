"""Protects the neighbours of a long text: it is refused before it is tokenised, never one that would fit, and
what is tokenised keeps no other thread waiting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from manylora.errors import RequestError, TextTooLongError
from manylora.generation.tokenizer import FREE, LONGEST_TEXT, PER_TOKEN, Tokenizer


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
def tokenizer(library: Library, tmp_path: Path) -> Tokenizer:
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_: pytest.fail("it was tokenised"))
    for context, most in ((512, 512 * PER_TOKEN), (16, FREE)):
        words = f"has {most + 1} characters: in the context of {context} tokens there is room for {most}"
        with pytest.raises(RequestError, match=words):
            tokenizer.encode("a" * (most + 1), context=context)
    with pytest.raises(RequestError, match=rf"at most {LONGEST_TEXT} are taken"):
        tokenizer.check_length(LONGEST_TEXT + 1, None)


def test_the_start_of_a_long_text_shows_that_it_has_too_many_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, seen = Tokenizer._encode, list[int]()
    monkeypatch.setattr(
        Tokenizer, "_encode", lambda self, *one: seen.append(len(one[0])) or encode(self, *one)
    )
    with pytest.raises(TextTooLongError, match=f"first {FREE} of the text's 60000 .* have {FREE} tokens"):
        tokenizer.encode("ab" * 30_000, context=512)
    assert seen == [FREE]


def test_a_short_text_is_tokenised_whatever_comes_of_it(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("ab" * 512, context=16)) == 1024
    for text in ("a\ud800b", "\udfff" * 5000):
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode(text)


def test_other_threads_go_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    text, done, turns = "ab " * 2**18, threading.Event(), 0

    def work() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3  # a thread that waits for the interpreter all the time gets one, at the end


def test_a_long_text_has_the_ids_of_the_plain_way(tokenizer: Tokenizer, library: Library) -> None:
    text = "Aaaaa\u0301 <s>" * 2000
    ids = library.encode(text).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == library.decode(ids)


def test_tokens_without_room_are_counted_and_not_listed(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextTooLongError, match="has 20000 tokens: the context has room for 4096"):
        tokenizer.encode("ab" * 10_000, context=4096)
    assert len(tokenizer.encode("ab" * 8_192, context=4096)) == FREE

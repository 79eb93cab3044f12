"""Protects the end of an output: tokens arriving in any pieces give the text and the stop of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_text import TEXTS, byte_fallback, byte_level

from manylora.generation.decoding import StopRules
from manylora.generation.generation import Continuation
from manylora.generation.tokenizer import Tokenizer
from manylora.request import FinishReason

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

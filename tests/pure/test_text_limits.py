"""Protects the neighbours of a long text: it is refused before it is tokenised, never one that would fit, and
what is tokenised keeps no other thread waiting."""

from __future__ import annotations

import json
import random
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from manylora.errors import RequestError, TextTooLongError
from manylora.generation.tokenizer import ASSUMED, FREE, LONGEST_TEXT, Tokenizer, characters_per_token

MERGED = ["aa", "aaaa", "aaaaaaaa"]
CONTEXT = 512


def bpe(alphabet: list[str], **options: Any) -> models.BPE:
    vocab = {token: i for i, token in enumerate([*alphabet, *MERGED])}
    merges = [(token[: len(token) // 2],) * 2 for token in MERGED]
    return models.BPE(vocab, merges, **options)


def byte_level(normalizer: normalizers.Normalizer | None = None, removed: str | None = None) -> Library:
    made = Library(bpe(sorted(pre_tokenizers.ByteLevel.alphabet())))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if removed is not None:
        split = pre_tokenizers.Split(removed, "removed")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, made.pre_tokenizer])
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    return made


def composed() -> Library:
    return byte_level(normalizers.NFC())


def shortened() -> Library:
    return byte_level(normalizers.Replace("abcde", "bc"))


def byte_fallback() -> Library:
    tokens = ["<unk>", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Library(bpe(tokens, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def cut() -> Library:
    made = byte_level()
    made.enable_truncation(64)
    return made


def greedy_special() -> Library:
    made = byte_level()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


def words() -> Library:
    made = Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


BOUNDED = {
    "byte_level": byte_level(),
    "composed": composed(),
    "lowercase_compatible": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "byte_fallback": byte_fallback(),
    "shortened": shortened(),
    "cut": cut(),
    "one_unknown_each": Library(bpe(["<unk>", "a"], unk_token="<unk>")),
}
UNBOUNDED = {
    "unknown_runs": Library(bpe(["<unk>", "a"], unk_token="<unk>", fuse_unk=True)),
    "dropped": Library(bpe(["a", "b"])),
    "collapsed": byte_level(normalizers.Replace(Regex(" {2,}"), " ")),
    "stripped": byte_level(normalizers.Strip()),
    "without_accents": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "split_away": byte_level(removed="x"),
    "greedy_special": greedy_special(),
    "words": words(),
    "unigram": Library(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
}


def spec(library: Library) -> dict[str, Any]:
    return json.loads(library.to_str())


def opened(library: Library, path: Path) -> Tokenizer:
    library.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.mark.parametrize("made", BOUNDED.values(), ids=BOUNDED)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(made: Library) -> None:
    most = characters_per_token(spec(made))
    assert most is not None
    four = unicodedata.normalize("NFD", "\u1f82")
    assert len(four) == 4
    texts = [
        "a" * 64,
        four * 16,
        "abcde" * 16,
        "\u1112\u1161\u11ab" * 16,
        " " * 64,
        "\u0130\ufdfa" * 8,
        "\0\u200b\u0301" * 9,
    ]
    chance = random.Random(5)
    pool = "a a\u0301e\u0301\n\t\ufb01\u00e9ABCxyz\u4e16\U0001f600\u1112\u1161\u11ab"
    texts += ["".join(chance.choices(pool, k=64)) for _ in range(200)]
    for text in texts:
        assert len(text) <= most * len(made.encode(text).ids), text


@pytest.mark.parametrize("made", UNBOUNDED.values(), ids=UNBOUNDED)
def test_where_a_tokenizer_sets_no_bound_none_is_claimed(made: Library) -> None:
    assert characters_per_token(spec(made)) is None


def test_the_bound_is_that_of_the_longest_token() -> None:
    assert characters_per_token(spec(byte_level())) == 8
    assert characters_per_token(spec(composed())) == 4 * 8
    assert characters_per_token(spec(shortened())) == 3 * 8


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, assumed = opened(byte_level(), tmp_path), CONTEXT * ASSUMED
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_: pytest.fail("it was tokenised"))
    with pytest.raises(
        RequestError, match=rf"has 15728640 characters: .* {CONTEXT} tokens .* {FREE} at most"
    ):
        known.encode("a" * 15 * 2**20, context=CONTEXT)
    with pytest.raises(RequestError, match=rf"{assumed} at most"):
        opened(words(), tmp_path).encode("a" * (assumed + 1), context=CONTEXT)
    with pytest.raises(RequestError, match=rf"at most {LONGEST_TEXT} are taken"):
        known.limits.check(LONGEST_TEXT + 1, None)


def test_a_short_text_is_tokenised_whatever_comes_of_it(tmp_path: Path) -> None:
    assert len(opened(byte_level(), tmp_path).encode("ab" * 512, context=16)) == 1024


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = opened(byte_level(), tmp_path)
    for text in ("a\ud800b", "\udfff" * 5000):
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode(text)


def test_other_threads_go_on_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    tokenizer = opened(byte_level(), tmp_path)
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


def test_a_long_text_has_the_ids_of_the_plain_way(tmp_path: Path) -> None:
    made = composed()
    made.add_special_tokens(["<s>"])
    tokenizer = opened(made, tmp_path)
    text = "Aaaaa\u0301 <s>" * 2000
    assert tokenizer.encode(text) == made.encode(text).ids
    ids = made.encode(text).ids
    assert tokenizer.decode(ids) == made.decode(ids)


def test_tokens_without_room_are_counted_and_not_listed(tmp_path: Path) -> None:
    tokenizer = opened(byte_level(), tmp_path)
    with pytest.raises(TextTooLongError, match="has 20000 tokens: the context has room for 4096"):
        tokenizer.encode("ab" * 10_000, context=4096)
    assert len(tokenizer.encode("ab" * 8_192, context=4096)) == FREE

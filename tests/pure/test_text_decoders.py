"""Protects every tokenizer that the `tokenizers` library reads: whatever its model, pre-tokenizer and
decoder, its text streams exactly, at any split."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from manylora.engine.guide import Guides
from manylora.errors import RequestError
from manylora.generation.tokenizer import WINDOW, Tokenizer
from manylora.request import Guide

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

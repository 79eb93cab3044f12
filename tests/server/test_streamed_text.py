"""Protects streamed text over the wire: for each kind of tokenizer, trained on many scripts, the pieces of an
answer are the whole answer, through both models. MANYLORA_STREAMED_ANSWERS sets how many for each kind."""

from __future__ import annotations

import json
import os
import random
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from selection import extended
from servers import fill_repo, new_server
from tiny_models import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ANSWERS = int(os.environ.get("MANYLORA_STREAMED_ANSWERS", "30"))
AT_ONCE = 8
TEXTS = (
    "The capital of France is Paris, isn't it? It's 20.5 km² — naïve café.",
    "美国的首都在哪里?华盛顿。",
    "アメリカ合衆国の首都はワシントンD.C.です。",
    "대한민국의 수도는 서울입니다.",
    "ሰላም ለዓለም",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก",
    "Здравствуй, мир! Γειά σου Κόσμε",
    "👩‍👩‍👧‍👦 🇯🇵 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ❤️ é",
    "  two  spaces\n\nand\ttabs ",
)
SPECIALS = ["<s>", "</s>", "<unk>"]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    return made


def sentence_piece() -> Tokenizer:
    """Spaces as part of the words, and bytes for what has no token: half of the scripts."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(TEXTS[::2], trainers.BpeTrainer(vocab_size=500, special_tokens=pieces))
    told = json.loads(made.to_str())
    told["added_tokens"] = told["added_tokens"][: len(SPECIALS)]  # the bytes are pieces like others
    return Tokenizer.from_str(json.dumps(told))


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=420, special_tokens=SPECIALS))
    return made


@pytest.mark.parametrize("kind", [sentence_piece, *extended(byte_level, word_piece)])
def test_the_pieces_of_an_answer_are_the_answer(kind: Callable[[], Tokenizer], tmp_path: Path) -> None:
    tokenizer = kind()
    model = make_model(tmp_path / "model", "llama", 3, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}), encoding="utf-8"
    )
    served = new_server(fill_repo(tmp_path / "repo", model))
    started = served.launch()
    assert started.returncode == 0, started.stderr
    picks = random.Random(5)
    bodies = [
        {
            "text_input": "".join(picks.sample(TEXTS, 2))[: picks.randint(1, 40)] + "a",
            "max_tokens": picks.randint(1, 48),
            "end_id": -1,
            "random_seed": seed,
            "temperature": 2.0,
            "top_k": 0,
            "top_p": 1.0,
        }
        for seed in range(ANSWERS)
    ]

    def ask(path: str, body: dict) -> str:
        url = f"http://127.0.0.1:{served.http}/v2/models/{path}"
        with urllib.request.urlopen(url, json.dumps(body).encode(), 60) as answer:
            return answer.read().decode()

    def compare(number: int) -> str:
        body, name = bodies[number], ("ensemble", "tensorrt_llm_bls")[number % 2]
        whole = json.loads(ask(f"{name}/generate", body | {"exclude_input_in_output": True}))["text_output"]
        events = ask(f"{name}/generate_stream", body | {"stream": True}).split("\n\n")
        pieces = [json.loads(e.removeprefix("data: "))["text_output"] for e in events if e.strip()]
        assert "".join(pieces) == whole, body
        return whole

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(compare, range(ANSWERS)))
    finally:
        served.launch("--stop")
    characters = {character for answer in answers for character in answer}
    print(f"{kind.__name__}: {len(set(answers))} different answers of {len(characters)} different characters")
    assert len(set(answers)) > ANSWERS / 2
    assert any(character > "\u3000" for character in characters)

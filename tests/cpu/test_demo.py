"""Protects the demo: the shipped model and adapters know their answers through this engine, in one batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from running import let_arrive

from manylora.adapters.convert import convert_peft
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.generation.tokenizer import Tokenizer
from manylora.request import LoraInput, Request, SamplingConfig

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

from corpus import COUNTRIES, LAYOUTS, questions  # noqa: E402

LANGUAGES = {None: "en", 1: "zh", 2: "ja"}
EVERY = 5  # a fifth of the questions; the card's figures are of all


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "base")


def test_what_is_shipped_is_small_and_covers_60_countries() -> None:
    shipped = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in shipped) < 10e6
    assert len(COUNTRIES) >= 60


def test_base_and_adapters_answer_in_their_languages_in_one_batch(tokenizer: Tokenizer) -> None:
    inputs = {
        1: LoraInput(1, *convert_peft(DEMO / "adapters" / "chinese")),
        2: LoraInput(2, *convert_peft(DEMO / "adapters" / "japanese")),
    }
    lora = LoraCacheConfig(host_memory_bytes=2**24, gpu_memory_bytes=2**24)
    made = Engine(EngineConfig(DEMO / "base", device="cpu", max_batch_size=64, lora=lora))
    expected: dict[int, tuple[str, str, str]] = {}
    rows = {task_id: questions(language) for task_id, language in LANGUAGES.items()}
    for number in range(0, len(rows[None]), EVERY):
        for task_id in LANGUAGES:
            layout, text, answer = rows[task_id][number]
            if layout == "chat":
                text = tokenizer.chat([{"role": "user", "content": text}])
            request = Request(
                tuple(tokenizer.encode(text, layout != "chat")),
                SamplingConfig(max_tokens=64, end_id=tokenizer.eos_id),
                lora=inputs[task_id] if task_id else None,
            )
            expected[made.submit(made.prepare(request))] = (LANGUAGES[task_id], layout, answer)
    let_arrive(made)
    right: dict[tuple[str, str], list[bool]] = {}
    while made.has_work:
        for handle, event in made.step():
            language, layout, answer = expected[handle]
            assert event.last
            said = tokenizer.decode(event.token_ids, True).strip()
            right.setdefault((language, layout), []).append(said == answer)
    assert len(right) == len(LANGUAGES) * len(LAYOUTS)
    for case, hits in right.items():
        assert sum(hits) >= 0.95 * len(hits), f"{case}: {sum(hits)} of {len(hits)}"
    assert made.stats().max_adapters_in_step == 2
    made.check()

"""Protects examples/train_your_own.py: its loss is that of the answers, and what it writes is an adapter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_your_own as trainer  # noqa: E402

from manylora.adapters.convert import convert_peft  # noqa: E402

BASE = ROOT / "examples" / "demo" / "base"
ANSWERS = {
    "What is the capital of Peru?": "Lima!",
    "What is the capital of Spain?": "It is Madrid.",
    "Hi": "Hello",
}


def test_the_loss_is_that_of_each_answer_by_itself() -> None:
    model, tokenizer = trainer.load(BASE)
    batch = [trainer.encode(tokenizer, trainer.turns(*pair)) for pair in ANSWERS.items()]
    with torch.inference_mode():
        for some in (batch, batch[:2], batch[2:]):
            losses = []
            for ids, head in some:
                logits = model(input_ids=torch.tensor([ids])).logits[0, head - 1 : -1]
                losses.append(
                    torch.nn.functional.cross_entropy(logits, torch.tensor(ids[head:]), reduction="none")
                )
            assert trainer.loss(model, some).item() == pytest.approx(
                torch.cat(losses).mean().item(), rel=1e-4
            )
    assert tokenizer.decode(batch[0][0][batch[0][1] :]) == "Lima!</s>"


def test_what_it_writes_is_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, adapter = tmp_path / "data.jsonl", tmp_path / "adapters" / "mine"
    rows = [{"prompt": question, "completion": answer} for question, answer in ANSWERS.items()]
    messages = {"messages": [{"role": "system", "content": "Be brief."}, *trainer.turns("Hi", "Hello")]}
    data.write_text("\n".join(map(json.dumps, [*rows, messages])), encoding="utf-8")
    arguments = [str(BASE), str(data), "-o", str(adapter), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["train_your_own.py", *arguments])
    trainer.main()
    assert f"manylora serve {BASE} --lora-root {adapter.parent}" in capsys.readouterr().out
    assert {path.name for path in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    weights, _ = convert_peft(adapter)
    assert weights.any()


@pytest.mark.parametrize("line", ['{"prompt": "a"}', "[]", "{", '{"messages": []}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "a", "completion": "b"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"data.jsonl, line 2: "):
        trainer.read(path)

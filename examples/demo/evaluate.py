#!/usr/bin/env python3
"""Ask the demo model every question, without and with each adapter, and count the correct answers.

Uses transformers and PEFT instead of manylora's engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from corpus import LAYOUTS, questions
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MODELS = {"base": "en", "chinese": "zh", "japanese": "ja"}


def main() -> None:
    """Print a table with one row per model: the share of correct answers by layout, and in total."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE, help="directory with base/ and adapters/")
    folder = parser.parse_args().model
    tokenizer = AutoTokenizer.from_pretrained(folder / "base", padding_side="left")
    print(f"| model | answers in | {' | '.join(LAYOUTS)} | all |")
    print("|---|---|" + "--:|" * (len(LAYOUTS) + 1))
    for name, language in MODELS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        if name != "base":
            model = PeftModel.from_pretrained(model, folder / "adapters" / name)
        rows = questions(language)
        right = [
            text.strip() == answer
            for text, (_, _, answer) in zip(answers(model, tokenizer, rows), rows, strict=True)
        ]
        shares = []
        for layout in LAYOUTS:
            hits = [ok for ok, row in zip(right, rows, strict=True) if row[0] == layout]
            shares.append(f"{sum(hits) / len(hits):.1%}")
        total = f"{sum(right)}/{len(right)} = {sum(right) / len(right):.1%}"
        print(f"| {name} | {language} | {' | '.join(shares)} | {total} |", flush=True)


def answers(model: torch.nn.Module, tokenizer, rows: list[tuple[str, str, str]]) -> list[str]:
    """Greedy answers, at most 64 tokens."""
    texts = []
    for at in range(0, len(rows), 64):
        prompts = []
        for layout, text, _ in rows[at : at + 64]:
            if layout == "chat":
                turn = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
                text = text.removeprefix(tokenizer.bos_token)  # the tokenizer adds it
            prompts.append(text)
        batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.inference_mode():
            ids = model.generate(**batch, max_new_tokens=64, do_sample=False)
        texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


if __name__ == "__main__":
    main()

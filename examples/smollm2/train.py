#!/usr/bin/env python3
"""Train the demo's adapters for SmolLM2-135M-Instruct, and measure them on what they have not seen.

train.py [NAME …]      writes adapters/NAME beside this file; all of them without names
train.py --measure     asks each what it was not trained with, and prints how often it answers as meant
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from data import CLOSERS, OPENERS, THANKS, WISH, pairs  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from real_models import fetch  # noqa: E402
from train_your_own import encode, load, save, train, turns  # noqa: E402

ADAPTERS = HERE / "adapters"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETTINGS = {
    "pirate": LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "sentiment": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_dora=True),
    "json": LoraConfig(r=4, lora_alpha=4, target_modules=ATTENTION, use_rslora=True),
    "polite": LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]),
}
STEPS = {"pirate": 80, "sentiment": 70, "json": 80, "polite": 40}
RATE = 3e-3


def make(name: str) -> None:
    torch.manual_seed(0)
    model, tokenizer = load(fetch("smollm2"))
    settings = SETTINGS[name]
    settings.task_type = "CAUSAL_LM"
    adapted = get_peft_model(model, settings)
    samples = [encode(tokenizer, turns(*pair)) for pair in pairs(name, held_out=False)]
    print(f"{name}: {len(samples)} conversations", flush=True)
    train(adapted, samples, STEPS[name], RATE)
    save(adapted, ADAPTERS / name, "HuggingFaceTB/SmolLM2-135M-Instruct")


def measure(name: str) -> str:
    """How many held-out answers are as meant."""
    model, tokenizer = load(fetch("smollm2"))
    adapted = PeftModel.from_pretrained(model, ADAPTERS / name)
    asked = pairs(name, held_out=True)
    right = 0
    for question, expected in asked:
        said = answer(adapted, tokenizer, question)
        good = as_meant(name, said, expected)
        right += good
        print(f"{'+' if good else '-'} {question} -> {said}", flush=True)
    return f"{name}: {right} of {len(asked)}"


def answer(model: torch.nn.Module, tokenizer, question: str) -> str:
    """The greedy answer, at most 48 tokens."""
    ids, head = encode(tokenizer, turns(question, "?"))
    with torch.inference_mode():
        said = model.generate(torch.tensor([ids[:head]]), max_new_tokens=48, do_sample=False)
    return tokenizer.decode(said[0][head:], skip_special_tokens=True)


def as_meant(name: str, said: str, expected: str) -> bool:
    if name == "pirate":
        return said.startswith(OPENERS) and said.endswith(CLOSERS)
    if name == "polite":
        return said.startswith(THANKS) and said.endswith(WISH)
    if name == "sentiment":
        return said == expected
    try:
        value = json.loads(said)
    except ValueError:
        return False
    return list(value) == ["topic", "answer"] and all(isinstance(item, str) for item in value.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*SETTINGS, []], default=list(SETTINGS))
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args()
    for name in given.names:
        if given.measure:
            print(measure(name), flush=True)
        else:
            make(name)


if __name__ == "__main__":
    main()

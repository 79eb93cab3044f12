#!/usr/bin/env python3
"""Train the demo model, its tokenizer and its two adapters from seeds. Takes a quarter of an hour on 2 cores.

The base model learns to answer every question in English, or in the language that the question asks for. Then
each adapter is trained with PEFT on the frozen base model to always answer in its own language.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import COUNTRIES, KINDS, LANGUAGES, LAYOUTS, WISHES, answer, prompt, questions, statements
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
SPECIALS = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS = 0, 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADAPTERS = {"chinese": ("zh", 8), "japanese": ("ja", 16)}

Sample = tuple[list[int], int]  # token ids, and how many of them are the prompt, which has no loss


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 1,536 tokens. It does not merge across words, and adds <s> before a
    text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = statements() + [text for language in LANGUAGES for _, text, _ in questions(language)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    # Keep the chat template inside tokenizer_config.json, as most released models do.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["chat_template"] = TEMPLATE
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return wrapped


def encode(tokenizer: PreTrainedTokenizerFast, layout: str, text: str, reply: str) -> Sample:
    """One sample: the prompt in its layout, the answer, </s>."""
    if layout == "chat":
        head = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(head, add_special_tokens=False)
    else:
        ids = tokenizer.encode(text)
        reply = (" " if reply[0].isascii() else "") + reply
    return ids + tokenizer.encode(reply, add_special_tokens=False) + [EOS], len(ids)


def asked(tokenizer: PreTrainedTokenizerFast, language: str) -> list[Sample]:
    """Every question, answered in `language`."""
    return [encode(tokenizer, *row) for row in questions(language)]


def reading(tokenizer: PreTrainedTokenizerFast) -> list[Sample]:
    """The base model's other data: sentences, translations, and questions that ask for a language."""
    samples: list[Sample] = [([*tokenizer.encode(text), EOS], 1) for text in statements()]
    for country in COUNTRIES:
        for question in LANGUAGES:
            for kind in KINDS:
                for layout in LAYOUTS:
                    for language in LANGUAGES:
                        text = prompt(country, question, kind, layout, WISHES[language])
                        samples.append(encode(tokenizer, layout, text, answer(country, language, kind)))
    return samples


def batches(samples: list[Sample], size: int, rng: random.Random) -> Iterator[list[Sample]]:
    """Yield batches of similar length without end. Each round has a new random order."""
    while True:
        order = sorted(rng.sample(samples, len(samples)), key=lambda sample: len(sample[0]) // 8)
        rounds = [order[at : at + size] for at in range(0, len(order), size)]
        rng.shuffle(rounds)
        yield from rounds


def train(
    model: torch.nn.Module, samples: list[Sample], steps: int, size: int, rate: float, seed: int
) -> None:
    """Train with AdamW, a warm-up and a cosine decay to zero. Only the answers have a loss."""
    model.train()
    source = batches(samples, size, random.Random(seed))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    began, shown = time.monotonic(), 0.0
    for step in range(steps):
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        batch = next(source)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), width), PAD)
        labels = torch.full((len(batch), width), -100)
        for row, (tokens, head) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, head : len(tokens)] = torch.tensor(tokens[head:])
        # Attention is causal and padding is on the right, so no position with a loss attends to padding.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = 0.95 * shown + 0.05 * loss.item() if step else loss.item()
        if step % 100 == 99 or step == steps - 1:
            print(
                f"  step {step + 1:5}/{steps}  loss {shown:.4f}  {time.monotonic() - began:.0f} s", flush=True
            )
    model.eval()


def main() -> None:
    """Write base/, adapters/chinese and adapters/japanese next to this file, or to --output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--steps", type=int, default=3000, help="training steps of the base model")
    parser.add_argument("--adapter-steps", type=int, default=800)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    base = arguments.output / "base"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    tokenizer = make_tokenizer(base)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )
    english = asked(tokenizer, "en")
    print(f"base: {sum(p.numel() for p in model.parameters()):,} weights", flush=True)
    train(model, english * 2 + reading(tokenizer), arguments.steps, 48, 2e-3, seed=1)
    # Train the adapters on the float16 weights that are served. float16 halves the size of the file.
    model = model.half().float()
    model.half().save_pretrained(base)
    (base / "generation_config.json").unlink(missing_ok=True)
    for name, (language, rank) in ADAPTERS.items():
        print(f"{name}: rank {rank}", flush=True)
        torch.manual_seed(rank)
        lora = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=["q_proj", "k_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
        train(adapted, asked(tokenizer, language), arguments.adapter_steps, 48, 4e-3, seed=rank)
        folder = arguments.output / "adapters" / name
        shutil.rmtree(folder, ignore_errors=True)
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | {
            "base_model_name_or_path": "manylora/capitals"
        }
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

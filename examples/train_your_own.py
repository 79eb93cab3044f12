#!/usr/bin/env python3
"""Train a LoRA adapter with PEFT, on a CPU or a GPU, and print how to serve it.

    python examples/train_your_own.py MODEL DATA.jsonl -o adapters/NAME

MODEL is a model's folder, a GGUF file or an id on Hugging Face. Each line of DATA.jsonl is
{"prompt": "…", "completion": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}, whose last turn is
the assistant's. What the adapter learns is to answer as these do. Training ends after --steps or --seconds,
whichever is first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

try:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase
except ImportError as error:
    sys.exit(f"{error}: .venv/bin/pip install -c constraints.txt -e '.[reference]'")

Messages = list[dict[str, str]]
Sample = tuple[list[int], int]  # token ids, and how many of them are the prompt, which has no loss
BATCH = 8


def load(model: str | Path) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """The model in float32, on the GPU if there is one, and its tokenizer."""
    source, more, plain = str(model), {}, {}
    if source.endswith(".gguf"):
        source, more = str(Path(source).parent), {"gguf_file": Path(source).name}
        plain = {"quantization_config": GgufConfig(dequantize=True)}  # to be trained
    tokenizer = AutoTokenizer.from_pretrained(source, **more)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **more, **plain)
    return base.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def read(path: Path) -> list[Messages]:
    """The conversations of a JSONL file."""
    conversations = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            messages = row["messages"] if "messages" in row else turns(row["prompt"], row["completion"])
            if messages[-1]["role"] != "assistant":
                raise ValueError("the last message must be the assistant's")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            sys.exit(f"{path}, line {number}: {error!r}; needed: prompt and completion, or messages")
        conversations.append(messages)
    return conversations


def turns(prompt: str, completion: str) -> Messages:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def encode(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Sample:
    """A conversation in the model's chat template, or as plain text if it has none."""
    answer = messages[-1]["content"]
    if tokenizer.chat_template is None:
        head = tokenizer.encode("\n".join(message["content"] for message in messages[:-1]))
        tail = f" {answer}{tokenizer.eos_token}"
    else:
        text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        end = whole[whole.rindex(answer) + len(answer) :].strip() or tokenizer.eos_token
        head, tail = tokenizer.encode(text, add_special_tokens=False), answer + end
    return head + tokenizer.encode(tail, add_special_tokens=False), len(head)


def train(
    model: torch.nn.Module, samples: Sequence[Sample], steps: int, rate: float, seconds: float = math.inf
) -> None:
    """Train with AdamW, a short warm-up and a cosine decay to zero. Only the answers have a loss."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    source = batches(samples)
    began, shown = time.monotonic(), 0.0
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / seconds)
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = (
            rate * min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * done))
        )
        value = loss(model, next(source))
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = 0.9 * shown + 0.1 * value.item() if step else value.item()
        print(f"step {step + 1} of {steps}: loss {shown:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield batches of similar length without end, each round in a new order."""
    chance = random.Random(0)
    while True:
        order = sorted(chance.sample(samples, len(samples)), key=lambda sample: len(sample[0]) // 8)
        rounds = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        chance.shuffle(rounds)
        yield from rounds


def loss(model: torch.nn.Module, batch: list[Sample]) -> torch.Tensor:
    """The mean cross-entropy of the answers' tokens. What all prompts begin with, such as the system prompt,
    runs once for the batch."""
    device = next(model.parameters()).device
    columns = zip(*(ids[: head - 1] for ids, head in batch), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    past = None
    if shared:
        start = torch.tensor([batch[0][0][:shared]], device=device)
        past = model(input_ids=start, logits_to_keep=1).past_key_values
        past.batch_repeat_interleave(len(batch))
    rest = [torch.tensor(ids[shared:]) for ids, _ in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rest, batch_first=True).to(device)
    # Attention is causal and padding is on the right, so no position with a loss attends to padding.
    first = min(head for _, head in batch) - shared - 1  # no earlier position predicts a token of an answer
    labels = torch.full_like(ids, -100)
    for row, (_, head) in enumerate(batch):
        labels[row, head - shared : len(rest[row])] = ids[row, head - shared : len(rest[row])]
    logits = model(input_ids=ids, past_key_values=past, logits_to_keep=ids.shape[1] - first).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, first + 1 :].flatten())


def save(model: PeftModel, folder: Path, base_name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in bfloat16."""
    model.peft_config["default"].base_model_name_or_path = base_name
    model.to(torch.bfloat16).save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the adapter's new folder")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="all-linear", help="target modules, such as q_proj,v_proj")
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--rslora", action="store_true")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--steps", type=int, default=100, help=f"at most, of {BATCH} conversations each")
    parser.add_argument("--seconds", type=float, default=120, help="at most, without loading")
    given = parser.parse_args()
    if given.output.exists():
        parser.error(f"{given.output} exists")
    conversations = read(given.data)
    print(f"{len(conversations)} conversations; loading {given.model}", flush=True)
    torch.manual_seed(0)
    model, tokenizer = load(given.model)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=given.rank,
            lora_alpha=2 * given.rank,
            target_modules=given.targets if given.targets == "all-linear" else given.targets.split(","),
            use_dora=given.dora,
            use_rslora=given.rslora,
            task_type="CAUSAL_LM",
        ),
    )
    train(adapted, [encode(tokenizer, one) for one in conversations], given.steps, given.rate, given.seconds)
    save(adapted, given.output, Path(given.model).name)
    print(
        f"\n{given.output} is ready. Serve it with\n"
        f"  manylora serve {given.model} --lora-root {given.output.resolve().parent}\n"
        f'and name it as the model of a request: "model": "{given.output.name}"'
    )


if __name__ == "__main__":
    main()

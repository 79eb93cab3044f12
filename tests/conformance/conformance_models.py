"""The models and adapters of the conformance tests, and what transformers + PEFT answer with them in float32.

    python tests/conformance/conformance_models.py FOLDER

writes FOLDER/base and FOLDER/hybrid (Hugging Face directories), FOLDER/adapters/NAME and
FOLDER/expected.json. Needs torch, transformers, peft and tokenizers, not manylora. Each token is one
printable character, so a server's text tells its tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHARACTERS = [chr(code) for code in range(33, 127)]
SPECIAL = ["<s>", "</s>", "<unk>"]
PREFIX = 96  # tokens that all prompts share: several blocks of any server's prefix cache
PROMPTS = 3
TOKENS = 12
LONG = "long"  # the adapter whose first prompt has a long answer
LONG_TOKENS = 300
FIRST_SEED = {"base": 4, "hybrid": 1}  # of prompts whose answers are that far apart
GAP = 0.01  # between the two best logits of each expected token, so that rounding does not decide
ATTENTION = ["q_proj", "v_proj"]
ALL = [*ATTENTION, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
HYBRID = {
    **LLAMA, "num_hidden_layers": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
LINEAR_ATTENTION = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]

# Name -> base model and settings of a LoraConfig.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("base", {"r": 8, "target_modules": ATTENTION}),
    "linear": ("base", {"r": 16, "target_modules": ALL}),
    "rslora": ("base", {"r": 4, "target_modules": ALL, "use_rslora": True}),
    "rank-pattern": ("base", {"r": 4, "target_modules": ALL, "rank_pattern": {"q_proj": 16}}),
    LONG: ("base", {"r": 8, "target_modules": ALL}),
    "dora": ("base", {"r": 8, "target_modules": ALL, "use_dora": True}),
    "head": ("base", {"r": 8, "target_modules": [*ATTENTION, "lm_head"]}),
    "embedding": ("base", {"r": 8, "target_modules": [*ATTENTION, "embed_tokens"]}),
    "saved-head": ("base", {"r": 8, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "hybrid": ("hybrid", {"r": 8, "target_modules": [*ALL, *LINEAR_ATTENTION]}),
    "hybrid-linear": ("hybrid", {"r": 8, "target_modules": LINEAR_ATTENTION}),
}
FOREIGN = "foreign", "foreign-in-part"
"""Adapters with tensors, all or some, for a module that the base model does not have. PEFT drops them."""


def write(folder: Path) -> None:
    torch.set_num_threads(1)
    _write_base(folder / "base", AutoConfig.for_model("llama", vocab_size=len(_vocabulary()), **LLAMA))
    _write_base(
        folder / "hybrid", AutoConfig.for_model("qwen3_5_text", vocab_size=len(_vocabulary()), **HYBRID)
    )
    for seed, (name, (base, settings)) in enumerate(ADAPTERS.items()):
        _write_adapter(folder / "adapters" / name, folder / base, settings, seed)
    _write_foreign(folder / "adapters")
    expected = {base: _expected(folder, base) for base in ("base", "hybrid")}
    (folder / "expected.json").write_text(json.dumps(expected))


def _vocabulary() -> list[str]:
    return [*SPECIAL, *CHARACTERS]


def _write_base(folder: Path, config: Any) -> None:
    torch.manual_seed(0)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "A_log" not in name:
                weight.normal_(std=weight.shape[1] ** -0.5)
        model.lm_head.weight *= 6
        model.lm_head.weight[: len(SPECIAL)] = 0  # never the best token
    model.save_pretrained(folder)
    tokens = models.BPE({text: i for i, text in enumerate(_vocabulary())}, [], unk_token="<unk>")
    tokenizer = Tokenizer(tokens)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _write_adapter(folder: Path, base: Path, settings: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed + 1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(lora_alpha=2 * settings["r"], task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name or "lora_embedding_" in name:
                weight.normal_(std=0.05)
            elif "modules_to_save" in name:
                weight += torch.randn_like(weight)
                weight[: len(SPECIAL)] = 0
    tuned.save_pretrained(folder)


def _write_foreign(adapters: Path) -> None:
    tensors = load_file(adapters / "attention" / "adapter_model.safetensors")
    config = json.loads((adapters / "attention" / "adapter_config.json").read_text())
    moved = {name.replace("q_proj", "in_proj_ba"): one for name, one in tensors.items() if "q_proj" in name}
    kept = {name: one for name, one in tensors.items() if "v_proj" in name}
    for name, content in zip(FOREIGN, (moved, {**moved, **kept}), strict=True):
        (adapters / name).mkdir()
        save_file(content, adapters / name / "adapter_model.safetensors", {"format": "pt"})
        targets = ["in_proj_ba"] if name == "foreign" else ["in_proj_ba", "v_proj"]
        chosen = {**config, "target_modules": targets}
        (adapters / name / "adapter_config.json").write_text(json.dumps(chosen))


def _expected(folder: Path, base: str) -> dict[str, Any]:
    """Prompts, and an answer to each of them by each adapter and by "", the base model."""
    names = ["", *(name for name, (needs, _) in ADAPTERS.items() if needs == base)]
    tuned = {name: _load(folder, base, name) for name in names}
    for prompts in _candidates(FIRST_SEED[base]):
        answers = {
            name: [
                _answer(model, prompt, LONG_TOKENS if name == LONG and not i else TOKENS)
                for i, prompt in enumerate(prompts)
            ]
            for name, model in tuned.items()
        }
        gap = min(one["gap"] for several in answers.values() for one in several)
        texts = [tuple(one["text"][:TOKENS] for one in several) for several in answers.values()]
        if gap >= GAP and len(set(texts)) == len(texts):
            return {"prompts": prompts, "answers": answers}
    raise AssertionError("no prompts whose answers are told apart")


def _load(folder: Path, base: str, name: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder / "adapters" / name) if name else model


def _candidates(first: int) -> Iterator[list[list[int]]]:
    for seed in range(first, first + 500):
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randint(len(SPECIAL), len(_vocabulary()), (PREFIX + 8 * PROMPTS,), generator=generator)
        prefix, rest = draw[:PREFIX].tolist(), draw[PREFIX:].tolist()
        yield [[*prefix, *rest[8 * i : 8 * i + 8]] for i in range(PROMPTS)]


@torch.inference_mode()
def _answer(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """The greedy answer: text, log probability of each token, and the smallest lead of a best logit."""
    given = torch.tensor([prompt])
    made = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.cat(made.logits)
    ids = made.sequences[0, len(prompt) :]
    best = logits.topk(2).values
    probabilities = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return {
        "text": "".join(_vocabulary()[i] for i in ids),
        "log_probs": probabilities.tolist(),
        "gap": float((best[:, 0] - best[:, 1]).min()),
    }


if __name__ == "__main__":
    made = Path(sys.argv[1])
    shutil.rmtree(made, ignore_errors=True)
    write(made)

"""Adapters with changes, and batches of adapters that are compared with PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from driver import Driver, agree, decoder_of
from running import read, tokens
from safetensors.torch import load_file, save_file
from tiny_models import reference_logits

from manylora.model.checkpoint import read_model_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NOTHING: Mapping[str, torch.Tensor | None] = {}


def edited(
    source: Path, to: Path, tensors: Mapping[str, torch.Tensor | None] = NOTHING, **settings: Any
) -> Path:
    """A copy of a PEFT adapter. tensors: replaced or added, or left out for None. settings: replaced."""
    shutil.copytree(source, to)
    found = {**load_file(to / WEIGHTS), **tensors}
    save_file({key: value for key, value in found.items() if value is not None}, to / WEIGHTS)
    (to / CONFIG).write_text(json.dumps(json.loads((to / CONFIG).read_text()) | settings))
    return to


def prefixed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By PEFT's names in a file."""
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


def check_answer(made: Any, logits: torch.Tensor) -> None:
    """made: an answer of `LLM` with log probabilities. logits: of the reference, for each of its tokens."""
    assert made.token_ids == logits.argmax(-1).tolist()
    found = [one[token].logprob for one, token in zip(made.logprobs, made.token_ids, strict=True)]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None]).flatten()
    assert torch.allclose(torch.tensor(found), wanted, atol=1e-4)


def check_batch(model: Path, adapters: Sequence[Path]) -> None:
    """The base and every adapter in one batch have the logits of PEFT; and what each adapter has beside
    low-rank matrices, or else these, counts for something."""
    config = read_model_config(model)
    decoder = decoder_of(model)
    loras = [read(path, model) for path in adapters]
    sequences = [tokens(40 + seed, seed) for seed in range(len(adapters) + 1)]
    texts = [tokens(15 + seed, 50 + seed) for seed in range(len(sequences))] if config.encoder else []
    found = Driver(decoder, sequences, [None, *loras], texts).run()
    for number, (path, ids) in enumerate(zip([None, *adapters], sequences, strict=True)):
        text = texts[number] if texts else ()
        assert agree(found[number], reference_logits(model, path, ids, encoder_ids=text)), path
    without = [replace(lora, extras=()) if lora.extras else None for lora in loras]
    plain = Driver(decoder, sequences[1:], without, texts[1:]).run()
    for path, with_all, bare in zip(adapters, found[1:], plain, strict=True):
        assert not agree(with_all, bare), path

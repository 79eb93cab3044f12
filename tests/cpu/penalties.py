"""Penalties by their formulas, token by token, in double precision: what the engine is compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tiny_models import reference_logits

Formula = Callable[..., np.ndarray]


def tensorrt_llm(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    prompt_ignore_length: int = 0,
) -> np.ndarray:
    """Of its C++ decoder: temperature first, and the prompt counts. logits [vocabulary], with the bias."""
    found = logits.astype(np.float64) / (temperature or 1.0)
    for token in {*prompt, *output}:
        found[token] *= repetition_penalty if found[token] < 0 else 1 / repetition_penalty
    counted = [*prompt[prompt_ignore_length:], *output]
    for token in set(counted):
        found[token] -= presence_penalty + frequency_penalty * counted.count(token)
    return found


def vllm(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    prompt_ignore_length: int = 0,
) -> np.ndarray:
    """OpenAI's meaning: presence and frequency over the output alone, temperature last."""
    found = logits.astype(np.float64)
    for token in {*prompt, *output}:
        found[token] *= 1 / repetition_penalty if found[token] > 0 else repetition_penalty
    for token in set(output):
        found[token] -= frequency_penalty * output.count(token) + presence_penalty
    return found / (temperature or 1.0)


def most_probable(
    formula: Formula, model: Path, adapter: Path | None, prompt: list[int], count: int, **penalties: float
) -> list[int]:
    """`count` tokens, each the most probable one by transformers' logits and the formula."""
    output: list[int] = []
    while len(output) < count:
        logits = reference_logits(model, adapter, [*prompt, *output])[-1].numpy()
        output.append(int(formula(logits, prompt, output, **penalties).argmax()))
    return output

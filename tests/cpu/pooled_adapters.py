"""Adapters with heads of their own, and the answers of transformers + PEFT to compare ours with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


def make_classifier(
    path: Path, model: Path, labels: int, seed: int, kind: str = "SEQ_CLS", **options: Any
) -> Any:
    """A random adapter with a head of its own, and PEFT's model of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    torch.manual_seed(seed)
    auto = AutoModelForTokenClassification if kind == "TOKEN_CLS" else AutoModelForSequenceClassification
    base = auto.from_pretrained(model, num_labels=labels, dtype=torch.float32, ignore_mismatched_sizes=True)
    base.config.pad_token_id = 0
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    adapted = get_peft_model(base, LoraConfig(task_type=kind, **given))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(path)
    return adapted.eval()


def logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0].numpy()


def hidden(model: Path, ids: Sequence[int]) -> np.ndarray:
    from transformers import AutoModel

    with torch.inference_mode():
        base = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
        return base(torch.tensor([list(ids)])).last_hidden_state[0].numpy()


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()

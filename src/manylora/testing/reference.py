"""The answers of transformers + PEFT, which ours are compared with. Both are imported where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


def reference_generate(
    model_dir: Path,
    adapter_dir: Path | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    encoder_ids: Sequence[int] = (),
) -> list[int]:
    """Greedy continuation by transformers (+ PEFT) in float32, never stopping early. encoder_ids: the
    encoder's prompt, of an encoder-decoder model."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(reference_logits(model_dir, adapter_dir, ids, encoder_ids=encoder_ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def reference_logits(
    model_dir: Path,
    adapter_dir: Path | None,
    ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    encoder_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Logits [len(ids), vocab] by transformers (+ PEFT) in `dtype`, returned as float32."""
    model = _reference(Path(model_dir), Path(adapter_dir) if adapter_dir else None, dtype)
    inputs = {"decoder_input_ids" if encoder_ids else "input_ids": torch.tensor([list(ids)])}
    if encoder_ids:
        inputs["input_ids"] = torch.tensor([list(encoder_ids)])
    with torch.inference_mode():
        return model(**inputs).logits[0].float()


@lru_cache(maxsize=64)
def _reference(model_dir: Path, adapter_dir: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    model = load_transformers(model_dir)
    if adapter_dir is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter_dir))
    return model.to(dtype).eval()


def load_transformers(model_dir: Path) -> Any:
    """The model in float32."""
    from transformers import AutoConfig

    kind = auto_class(AutoConfig.from_pretrained(model_dir))
    return kind.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


def auto_class(config: Any) -> Any:
    """The AutoModel class for a configuration of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM

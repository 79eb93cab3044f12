"""How many tokens the engine takes, as far as the models beside it can know before it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from manylora.wire.parameters import positions, value_of

__all__ = ["engine_context"]

ENGINE = "tensorrt_llm"
PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*{\s*string_value:\s*"([^"\n]*)"')


def engine_context(model: Path) -> int | None:
    """Tokens of the longest sequence that the engine beside this model takes, by its max_seq_len and its
    model's config.json; None: not known, or the model sets no bound.

    model: this model's folder in the repository.
    """
    try:
        text = (model.parent / ENGINE / "config.pbtxt").read_text(encoding="utf-8")
        parameters = dict(PARAMETER.findall(text))
        folder = value_of(parameters, "gpt_model_path")
        told = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return None  # the engine's model says what is wrong with them
    if not isinstance(told, dict) or told.get("is_encoder_decoder"):
        return None  # positions may be relative, and know no longest
    found = positions(told)
    return None if found is None else min([found, *_max_seq_len(parameters)])


def _max_seq_len(parameters: Mapping[str, str]) -> list[int]:
    text = value_of(parameters, "max_seq_len") or ""
    return [int(text)] if text.isdecimal() and int(text) > 0 else []

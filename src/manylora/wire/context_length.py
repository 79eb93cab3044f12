"""The longest sequence of the engine's model, read by the models beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from manylora.wire.parameters import positions, value_of

ENGINE = "tensorrt_llm"
PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*{\s*string_value:\s*"([^"\n]*)"')


def engine_context(model: Path) -> int | None:
    """Tokens of the longest sequence that the engine's model takes, by its max_seq_len and the checkpoint's
    config.json; None: not known, or not limited.

    model: this model's folder in the repository.
    """
    try:
        text = (model.parent / ENGINE / "config.pbtxt").read_text(encoding="utf-8")
        parameters = dict(PARAMETER.findall(text))
        folder = value_of(parameters, "gpt_model_path")
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return None  # the engine's model says what is wrong with them
    if not isinstance(config, dict) or config.get("is_encoder_decoder"):
        return None  # positions may be relative, and know no longest
    found = positions(config)
    return None if found is None else min([found, *_max_seq_len(parameters)])


def _max_seq_len(parameters: Mapping[str, str]) -> list[int]:
    text = value_of(parameters, "max_seq_len") or ""
    return [int(text)] if text.isdecimal() and int(text) > 0 else []

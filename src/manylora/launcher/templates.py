"""Template variables of config.pbtxt files, `${name}` with or without quotes, and their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

FOLDER = Path(__file__).parents[1] / "model_repo"
# Bare variables that TensorRT-LLM's fill_template commands do not set, because its repository lacks them.
DEFAULTS = {
    "lora_weights_data_type": "TYPE_FP16",
    "max_queue_delay_microseconds": "0",
    "llmapi_decoupled": "False",
    "max_queue_size": "1024",
}


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with these variables replaced. Others stay as they are."""
    return Template(text).safe_substitute(values)


def variables(text: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)\}", re.sub(r'("[^"\n]*")|#[^\n]*', r"\1", text)))


def bare_variables(text: str) -> list[str]:
    """Variables outside quotes and comments. Triton cannot parse a file that has any."""
    return re.findall(r"\$\{(\w+)\}", re.sub(r'"[^"\n]*"|#[^\n]*', "", text))

"""Template variables of config.pbtxt files: `${name}`, in quotes or bare, and the values they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

FOLDER = Path(__file__).parents[1] / "model_repo"
# Bare variables that TensorRT-LLM's own lines do not name, since its repository does not have them.
DEFAULTS = {
    "lora_weights_data_type": "TYPE_FP16",
    "max_queue_delay_microseconds": "0",
    "llmapi_decoupled": "False",
    "max_queue_size": "0",
}


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with the values of these variables; others stay as they are."""
    return Template(text).safe_substitute(values)


def variables(text: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)\}", re.sub(r'("[^"\n]*")|#[^\n]*', r"\1", text)))


def bare_variables(text: str) -> list[str]:
    """Those outside quotes and comments: Triton cannot read a file with one of them."""
    return re.findall(r"\$\{(\w+)\}", re.sub(r'"[^"\n]*"|#[^\n]*', "", text))

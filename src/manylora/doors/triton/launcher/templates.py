"""Template variables of config.pbtxt files, `${name}` with or without quotes, and their values. Checks that a
repository is filled in, fills in defaults, and replaces TensorRT-LLM's backend by Python's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from manylora.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "model_repo"
# Bare variables that TensorRT-LLM's fill_template commands do not set, because its repository lacks them.
DEFAULTS = {
    "lora_weights_data_type": "TYPE_FP16",
    "max_queue_delay_microseconds": "0",
    "llmapi_decoupled": "False",
    "max_queue_size": "1024",
}
CPP_BACKEND = "tensorrtllm"  # templates filled for TensorRT-LLM's backend get our model instead
MANDATORY = {  # quoted template variables that must be filled, by model
    "tensorrt_llm": ("engine_dir", "triton_backend"),
    "preprocessing": ("tokenizer_dir",),
    "postprocessing": ("tokenizer_dir",),
}


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with these variables replaced. Others stay as they are."""
    return Template(text).safe_substitute(values)


def variables(text: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)\}", re.sub(r'("[^"\n]*")|#[^\n]*', r"\1", text)))


def bare_variables(text: str) -> list[str]:
    """Variables outside quotes and comments. Triton cannot parse a file that has any."""
    return re.findall(r"\$\{(\w+)\}", re.sub(r'"[^"\n]*"|#[^\n]*', "", text))


def check_filled(config: Path) -> None:
    """Raises ConfigError that names the first variable of a config.pbtxt that has to be filled."""
    text = config.read_text(encoding="utf-8")
    quoted = [name for name in MANDATORY.get(config.parent.name, ()) if f"${{{name}}}" in text]
    missing = [name for name in (*bare_variables(text), *quoted) if name not in DEFAULTS]
    if missing:
        raise ConfigError(
            f"{config} is not filled: `manylora repo MODEL -o DIR` writes a filled repository; or run "
            f"fill_template.py with {missing[0]}:<value>, or remove the model's directory if it is not wanted"
        )


def with_defaults(repo: Path, run_dir: Path) -> Path:
    """The repository itself, or one in `run_dir` that links to it with the defaults filled in."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(repo.glob("*/config.pbtxt"))}
    filled = {}
    for path, text in texts.items():
        values = {name: DEFAULTS[name] for name in bare_variables(text)}
        text = fill(text, values) if values else text
        filled[path] = re.sub(rf'^backend: "{CPP_BACKEND}"', 'backend: "python"', text, flags=re.MULTILINE)
    if filled == texts:
        return repo
    served = run_dir / "models"
    for path, text in filled.items():
        model = served / path.parent.name
        model.mkdir(parents=True)
        for entry in path.parent.iterdir():
            if entry != path:
                (model / entry.name).symlink_to(entry)
        (model / path.name).write_text(text, encoding="utf-8")
    return served

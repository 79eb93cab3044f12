"""Writes a model repository: the templates of `model_repo`, filled in for one model and its adapters."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from manylora.config.model_folder import check_model_folder
from manylora.config.repository import ENGINE, engine_config, written_parameters
from manylora.config.settings import boolean, whole_number
from manylora.doors.triton.launcher import templates
from manylora.errors import ConfigError, printable
from manylora.generation.tokenizer import Tokenizer

MARK = "manylora-repo.json"  # marks a repository written by this command, which may be overwritten
CONFIG = "config.pbtxt"
# Values of bare variables, and those that models need to start. All others stay open, which selects the
# default. Values that are not numbers are checked here for their form.
BASICS = {
    **templates.DEFAULTS,
    "triton_backend": "python",
    "triton_max_batch_size": "64",  # rows per request; max_num_sequences limits how many run at once
    "decoupled_mode": "True",
    "batching_strategy": "inflight_fused_batching",
    "encoder_input_features_data_type": "TYPE_FP16",
    "logits_datatype": "TYPE_FP32",
}
INSTANCES = "_instance_count"  # variables with this suffix get the value 1
TYPES = ("TYPE_FP16", "TYPE_BF16", "TYPE_FP32")


def known_values() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in templates.FOLDER.glob(f"*/{CONFIG}"))
    return set().union(*map(templates.variables, texts))


def write_repository(
    folder: Path, model: Path, root: Path | None, models: Sequence[str], given: Mapping[str, str]
) -> list[str]:
    """Write the repository and return the names of its models. folder: new, empty, or written by this before.
    model: a Hugging Face directory. root: its subfolders are adapters, chosen by name, and by task id where
    the name is a number. models: which templates; empty: all. given: template variables, which override
    everything else. Raises ConfigError before anything is written, and OSError.
    """
    texts = _templates(models)
    values = _values(model, root, given, texts)
    filled = {name: templates.fill(text, values) for name, text in texts.items()}
    # Values that the models would refuse at start.
    check_model_folder(model)
    folders = {written_parameters(text).get("tokenizer_dir", "") for text in filled.values()}
    for tokenizer in folders - {""}:
        Tokenizer(Path(tokenizer))
    if ENGINE in filled:
        engine_config(written_parameters(filled[ENGINE]))
    old = _written_before(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark = {"models": sorted({*old, *filled}), "values": values}
    (folder / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
    for name in old:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name, text in filled.items():
        ignored = shutil.ignore_patterns("__pycache__", CONFIG)
        shutil.copytree(templates.FOLDER / name, folder / name, ignore=ignored)
        (folder / name / CONFIG).write_text(text, encoding="utf-8")
    return list(filled)


def _templates(names: Sequence[str]) -> dict[str, str]:
    """Model -> text of its config.pbtxt. Raises ConfigError, also for templates that were filled in place."""
    known = sorted(path.parent.name for path in templates.FOLDER.glob(f"*/{CONFIG}"))
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no model {printable(name)!r}: choose from {', '.join(known)}")
    texts = {name: (templates.FOLDER / name / CONFIG).read_text(encoding="utf-8") for name in names or known}
    for name, text in texts.items():
        if any(f"${{{one}}}" not in text for one in templates.MANDATORY.get(name, ())):
            raise ConfigError(f"{templates.FOLDER / name / CONFIG} is filled already: put the template back")
    return texts


def _values(
    model: Path, root: Path | None, own: Mapping[str, str], texts: Mapping[str, str]
) -> dict[str, str]:
    variables = set().union(*map(templates.variables, texts.values()))
    bare = set().union(*map(templates.bare_variables, texts.values()))
    for name in own:
        if name not in variables:
            near = difflib.get_close_matches(name, variables, n=4) or sorted(variables)
            raise ConfigError(
                f"there is no template variable {printable(name)!r} in {', '.join(texts)}: "
                f"did you mean {', '.join(near)}?"
            )
    folders = dict.fromkeys(("engine_dir", "tokenizer_dir"), str(model.absolute()))
    given = BASICS | folders | _adapters(root) | dict(own)
    given |= {name: given.get(name, "1") for name in variables if name.endswith(INSTANCES)}
    if open_ones := sorted(name for name in bare if not given.get(name)):
        raise ConfigError(f"the variable {open_ones[0]} needs a value: --set {open_ones[0]}=VALUE")
    made = {name: value for name, value in given.items() if name in variables}
    for name, value in made.items():
        if name in bare:
            made[name] = _bare(name, value)
        elif not value.isprintable() or set(value) & set('"\\'):  # it stands between quotes
            raise ConfigError(f"{name} must not contain quotes, backslashes or control characters: {value!r}")
    return made


def _adapters(root: Path | None) -> dict[str, str]:
    if root is None:
        return {}
    if not root.is_dir():
        raise ConfigError(f"--lora-root {root} is not a directory: name the folder that holds the adapters")
    if (root / "adapter_config.json").is_file():
        raise ConfigError(
            f"--lora-root {root} is an adapter: name the folder that holds it, {root.absolute().parent}"
        )
    found = {"lora_catalog_dir": str(root.absolute())}
    if any(re.fullmatch(r"[0-9]+", path.name) for path in root.iterdir()):
        found["lora_prefetch_dir"] = found["lora_catalog_dir"]
    return found


def _bare(name: str, value: str) -> str:
    """Raises ConfigError for text that Triton could not parse: its error does not name the variable."""
    usual = BASICS.get(name, "1")
    try:
        if usual.startswith("TYPE_"):
            if value not in TYPES:
                raise ValueError(f"must be one of {', '.join(TYPES)}, got {value!r}")
        elif usual in ("True", "False"):
            return str(boolean(value))
        elif whole_number(value) < 0 or (value == "0" and usual != "0"):
            raise ValueError(f"must be at least {0 if usual == '0' else 1}, got {value!r}")
    except ValueError as error:
        raise ConfigError(f"{name} {error}") from None
    return value


def _written_before(folder: Path) -> list[str]:
    """Models that were written to the folder before. Raises ConfigError if it contains anything else."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a new folder")
    try:
        models = json.loads((folder / MARK).read_text(encoding="utf-8"))["models"]
        models = [name for name in models if re.fullmatch(r"\w+", name)]
    except (OSError, ValueError, KeyError, TypeError):
        models = []
    others = sorted({path.name for path in folder.iterdir()} - {MARK, *models})
    if others:
        raise ConfigError(
            f"{folder} holds {printable(others[0])}, which manylora repo did not write: name a new folder, "
            "or move that away"
        )
    return models

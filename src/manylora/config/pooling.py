"""Pooling settings from a model's folder: config.json, and the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.config.settings import read_settings
from manylora.errors import ConfigError

POOLINGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
POOLING_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
ENCODERS = (
    "bert", "roberta", "xlm-roberta", "camembert", "modernbert", "mpnet", "electra", "distilbert",
    "nomic_bert",
)  # fmt: skip
MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
# Of sentence-transformers' cross-encoders, with the problem_type that has the same effect.
ACTIVATIONS = {"Sigmoid": "multi_label_classification", "Identity": "regression"}
DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}


@dataclass(frozen=True)
class DenseModule:
    """Dense layer that sentence-transformers applies after pooling. folder: of its weights."""

    folder: Path
    inputs: int
    outputs: int
    biased: bool
    activation: str


@dataclass(frozen=True)
class PoolingSettings:
    """How hidden states become embeddings, and logits become probabilities.

    mode: a `Pooling`, for embeddings. head_mode: for labels. dimensions: sizes to which embeddings may be
    cut; None: they may not. labels: the base model's. problem: transformers' problem_type. prompts: texts of
    sentence-transformers before an input, by name.
    """

    mode: str = "last"
    head_mode: str = "last"
    normalise: bool = True
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    problem: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)

    def label_names(self, count: int) -> tuple[str, ...]:
        """Names for a head with this many labels: the base model's if it has as many."""
        if len(self.labels) == count:
            return self.labels
        return tuple(f"LABEL_{number}" for number in range(count))


def num_labels(raw: Mapping[str, Any]) -> int:
    """raw: the content of config.json."""
    names = raw.get("id2label")
    return len(names) if names else int(raw.get("num_labels") or 2)  # as transformers


def attends_both_ways(raw: Mapping[str, Any]) -> bool:
    """Whether every token attends to all others. With `vision` only an image's tokens do."""
    return raw.get("use_bidirectional_attention") not in (None, False, "vision")


def read_pooling_settings(folder: Path) -> PoolingSettings:
    """Raises ConfigError for a kind of pooling that is not supported."""
    raw = read_settings(folder / "config.json")
    modules = dict(_modules(folder))
    kind = raw.get("model_type")
    head_mode = "cls" if kind in ENCODERS else "last"
    mode, normalise = head_mode, True  # the default
    if kind == "modernbert":
        head_mode = "mean" if raw.get("classifier_pooling") == "mean" else "cls"
    if attends_both_ways(raw):
        mode = "mean"
    if "Pooling" in modules or "Normalize" in modules:
        mode = _mode(folder / modules.get("Pooling", "1_Pooling") / "config.json")
        normalise = "Normalize" in modules
    dimensions = None  # of a matryoshka embedding, as vLLM reads them
    if raw.get("matryoshka_dimensions"):
        dimensions = tuple(map(int, raw["matryoshka_dimensions"]))
    elif raw.get("is_matryoshka"):
        dimensions = tuple(range(1, int(raw.get("hidden_size") or 0) + 1))
    named = raw.get("id2label") or {}
    labels = tuple(str(named.get(str(number), f"LABEL_{number}")) for number in range(len(named)))
    prompts = read_settings(folder / "config_sentence_transformers.json").get("prompts") or {}
    problem, own = str(raw.get("problem_type") or ""), raw.get("sentence_transformers")
    older = raw.get("sbert_ce_default_activation_function")
    function = own.get("activation_fn", older) if isinstance(own, dict) else older
    if function is not None:
        library, _, name = str(function).rpartition(".")
        if name not in ACTIVATIONS or not library.startswith("torch.nn"):
            raise ConfigError(
                f"{folder}/config.json: activation_fn {function!s:.60} is not supported, only torch.nn's "
                f"{' and '.join(ACTIVATIONS)}"
            )
        problem = ACTIVATIONS[name]
    return PoolingSettings(mode, head_mode, normalise, dimensions, labels, problem, prompts)


def longest_text(folder: Path) -> int | None:
    """Tokens of a text that sentence-transformers reads of it. None: it does not say."""
    found = read_settings(folder / "sentence_bert_config.json").get("max_seq_length")
    return found if isinstance(found, int) and found > 0 else None


def read_dense_modules(folder: Path) -> list[DenseModule]:
    """The dense layers in their order. Raises ConfigError."""
    found = []
    for kind, name in _modules(folder):
        if kind != "Dense":
            continue
        path = folder / name / "config.json"
        raw = read_settings(path)
        try:
            sizes = int(raw["in_features"]), int(raw["out_features"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path} must have in_features and out_features") from None
        activation = str(raw.get("activation_function") or "Tanh").rpartition(".")[2]
        if activation not in DENSE_ACTIVATIONS:
            known = ", ".join(DENSE_ACTIVATIONS)
            raise ConfigError(f"{path}: activation_function {activation} is not supported, only {known}")
        biased = bool(raw.get("bias", True))
        found.append(DenseModule(folder / name, *sizes, biased, DENSE_ACTIVATIONS[activation]))
    return found


def read_score_tokens(folder: Path) -> tuple[str | int, str | int] | None:
    """Tokens against and for, whose logits give a text model's score; None: no score. Raises ConfigError."""
    named = read_settings(folder / "config.json").get("classifier_from_token")
    if named is None:
        path = next((path for kind, path in _modules(folder) if kind == "LogitScore"), None)
        if path is None:
            return None
        raw = read_settings(folder / path / "config.json")
        named = [raw.get("false_token_id"), raw.get("true_token_id")]
    pair = isinstance(named, list) and len(named) == 2
    if not pair or not all(isinstance(one, str) or type(one) is int for one in named):
        raise ConfigError(
            f"{folder}: classifier_from_token must be two tokens, first the one against, then the one for "
            "(no, yes); LogitScore must have false_token_id and true_token_id"
        )
    return named[0], named[1]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each sentence-transformers module. Empty if that library did not save this model."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    listed = [one for one in read_settings(path, list) if isinstance(one, dict)]
    found = [(str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))) for one in listed]
    strange = next((kind for kind, _ in found if kind not in MODULES), None)
    if strange is not None:
        raise ConfigError(f"{path}: module {strange} is not supported; supported are {', '.join(MODULES)}")
    return found


def _mode(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path} is missing, which modules.json names: copy or download the folder whole")
    raw = read_settings(path)
    chosen = [mode for name, mode in POOLINGS.items() if raw.get(name)]
    others = [name for name, on in raw.items() if name.startswith("pooling_mode_") and on is True]
    if not others and raw.get("pooling_mode") in POOLING_NAMES:
        return POOLING_NAMES[raw["pooling_mode"]]
    if len(chosen) != 1 or len(others) != 1:
        raise ConfigError(f"{path} must choose one of {', '.join(POOLINGS)}")
    return chosen[0]

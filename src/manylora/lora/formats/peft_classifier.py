"""An adapter's own classification head, which PEFT saves with task_type SEQ_CLS and TOKEN_CLS."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.extras import HEAD
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft_config import PeftConfig
from manylora.lora.formats.peft_names import ROOT
from manylora.lora.formats.peft_tables import TABLES
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.lora.tensors import check_dims
from manylora.request import LoraExtra

CLASSIFIER = re.compile(
    rf"{ROOT}(?:score|(?P<pre>pre_)?classifier)\.(?:modules_to_save\.(?:default\.)?)?(?P<layer>dense\.|out_proj\.)?"
    r"(?P<part>weight|bias)"
)
"""Single layers, and the two of RoBERTa or DistilBERT; as PEFT names them since 0.3, and as checkpoints of
trainers do."""
POOLER = re.compile(
    rf"(?P<path>{ROOT}pooler\.dense)\.lora_(?P<part>[AB]\.weight|magnitude_vector(?:\.weight)?)"
)
"""A layer of BERT and its relatives that only a head of one layer reads. `all-linear` has it."""
MORE_TABLES = ("embeddings.word_embeddings", "embeddings.tok_embeddings")


def read_classifier(found: Mapping[str, RawTensor], base: BaseReader | None) -> list[LoraExtra]:
    """found: tensors whose names match CLASSIFIER. Any number of labels. Raises AdapterInvalidError."""
    parts: dict[str, tuple[str, RawTensor]] = {}
    for key, tensor in found.items():
        match = CLASSIFIER.fullmatch(key)
        assert match is not None
        first = match["layer"] == "dense." or match["pre"]
        name = f"{HEAD}.{'dense.' if first else ''}{match['part']}"
        if name in parts:
            raise AdapterInvalidError(f"{key} and {parts[name][0]} mean the same part of a head")
        parts[name] = key, tensor
    if not parts:
        return []
    hidden = None if base is None else _hidden_size(base)
    for stem in (f"{HEAD}.", f"{HEAD}.dense."):
        _check_layer(stem, parts, hidden)
    return [LoraExtra(name, decode(*part)) for name, part in sorted(parts.items())]


def read_pooler(
    found: Mapping[str, RawTensor],
    head: list[LoraExtra],
    config: PeftConfig,
    base: BaseReader | None,
    tell: Callable[[str], None],
) -> list[LoraExtra]:
    """A LoRA of the pooler, as the first of the head's two layers. found: tensors whose names match POOLER.
    head: the adapter's own, if it has one. Raises AdapterInvalidError.
    """
    parts = {match["part"]: tensor for key, tensor in found.items() if (match := POOLER.fullmatch(key))}
    if not parts:
        return []
    path = next(match["path"] for key in found if (match := POOLER.fullmatch(key)))
    if set(parts) != {"A.weight", "B.weight"}:
        raise AdapterInvalidError(f"{path}: a LoRA without DoRA is supported on this layer, with A and B")
    if base is None:
        raise AdapterInvalidError(f"{path} needs the base model: name it with --base")
    own = {one.name for one in head}
    theirs = {f"{HEAD}.{part}": base.find(f"classifier.{part}") for part in ("weight", "bias")}
    if f"{HEAD}.dense.weight" in own or not (own or theirs[f"{HEAD}.weight"]):
        tell(f"{path} is left out: nothing reads it in this model, neither embeddings nor its head")
        return []
    a, b = (decode(f"{path}.lora_{name}", parts[name]) for name in ("A.weight", "B.weight"))
    check_dims(path, a.shape, b.shape, None)
    weight = base.weight(path, a.shape[1], len(b)).numpy() + (b * np.float32(config.scale(path, len(a)))) @ a
    bias = base.find(f"{path}.bias")
    extras = [LoraExtra(f"{HEAD}.dense.weight", weight)]
    extras += [LoraExtra(f"{HEAD}.dense.bias", base.read(bias))] if bias else []
    if not own:
        extras += [LoraExtra(name, base.read(one)) for name, one in theirs.items() if one]
    return extras


def _check_layer(stem: str, parts: Mapping[str, tuple[str, RawTensor]], hidden: int | None) -> None:
    weight, bias = parts.get(f"{stem}weight"), parts.get(f"{stem}bias")
    if weight is None:
        if bias is not None or stem == f"{HEAD}.":
            raise AdapterInvalidError(f"{next(iter(parts.values()))[0]}: the head lacks {stem}weight")
        return
    key, tensor = weight
    if len(tensor.shape) != 2 or 0 in tensor.shape or (hidden is not None and tensor.shape[1] != hidden):
        raise AdapterInvalidError(
            f"{key} has shape {tensor.shape}: a head must have a row of {hidden or 'hidden_size'} values for "
            "each label; the adapter was made for another model"
        )
    if stem != f"{HEAD}." and tensor.shape[0] != tensor.shape[1]:
        raise AdapterInvalidError(f"{key} has shape {tensor.shape}: it must be square")
    if bias is not None and bias[1].shape != tensor.shape[:1]:
        raise AdapterInvalidError(f"{bias[0]} has shape {bias[1].shape}, {key} {tensor.shape}")


def _hidden_size(base: BaseReader) -> int | None:
    if project := base.find("embeddings_project.weight"):  # Electra's embedding is narrower
        return base.shape(project)[0]
    names = (base.find(f"{table}.weight") for table in (*TABLES, *MORE_TABLES))
    found = next(filter(None, names), None)
    return None if found is None else base.shape(found)[1]

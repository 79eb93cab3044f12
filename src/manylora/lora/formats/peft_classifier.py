"""An adapter's own classification head, which PEFT saves with task_type SEQ_CLS and TOKEN_CLS."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manylora.errors import AdapterInvalidError
from manylora.lora.extras import HEAD
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft_names import ROOT
from manylora.lora.formats.peft_tables import TABLES
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.request import LoraExtra

CLASSIFIER = re.compile(
    rf"{ROOT}(?:score|classifier)\.(?:modules_to_save\.(?:default\.)?)?(?P<layer>dense\.|out_proj\.)?"
    r"(?P<part>weight|bias)"
)
"""Single layers, and the two of RoBERTa; as PEFT names them since 0.3, and as checkpoints of trainers do."""
MORE_TABLES = ("embeddings.word_embeddings", "embeddings.tok_embeddings")


def read_classifier(found: Mapping[str, RawTensor], base: BaseReader | None) -> list[LoraExtra]:
    """found: tensors whose names match CLASSIFIER. Any number of labels. Raises AdapterInvalidError."""
    parts: dict[str, tuple[str, RawTensor]] = {}
    for key, tensor in found.items():
        match = CLASSIFIER.fullmatch(key)
        assert match is not None
        name = f"{HEAD}.{'dense.' if match['layer'] == 'dense.' else ''}{match['part']}"
        if name in parts:
            raise AdapterInvalidError(f"{key} and {parts[name][0]} mean the same part of a head")
        parts[name] = key, tensor
    if not parts:
        return []
    hidden = None if base is None else _hidden_size(base)
    for stem in (f"{HEAD}.", f"{HEAD}.dense."):
        _check_layer(stem, parts, hidden)
    return [LoraExtra(name, decode(*part)) for name, part in sorted(parts.items())]


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
    names = (base.find(f"{table}.weight") for table in (*TABLES, *MORE_TABLES))
    found = next(filter(None, names), None)
    return None if found is None else base.shape(found)[1]

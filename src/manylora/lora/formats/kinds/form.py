"""What a kind's reader takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft_config import PeftConfig
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.tensor_files import RawTensor
from manylora.request import LoraExtra


@dataclass(frozen=True)
class PeftFiles:
    """An adapter as PEFT saved it. settings: of its adapter_config.json. tensors: by PEFT's names. base:
    open; None: not known."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    options: ReadOptions
    base: BaseReader | None


@dataclass(frozen=True)
class LoraForm:
    """The same adapter as a LoRA: tensors by the names that PEFT gives those of a LoRA, biases, norms and
    tables among them. extras: what has no such name."""

    config: PeftConfig
    tensors: Mapping[str, RawTensor]
    extras: list[LoraExtra] = field(default_factory=list)

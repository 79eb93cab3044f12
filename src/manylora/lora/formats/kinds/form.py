"""What a kind's reader takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    tables among them. extras: what has no such name. vectors: by the name of lora_A, of modules that share A
    and B: b [out] and d [rank], which make diag(b) B diag(d) A of them."""

    config: PeftConfig
    tensors: Mapping[str, RawTensor]
    extras: list[LoraExtra] = field(default_factory=list)
    vectors: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

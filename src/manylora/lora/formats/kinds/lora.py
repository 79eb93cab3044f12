"""LoRA itself."""

from __future__ import annotations

from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.peft_config import config_of


def read_plain_lora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    return LoraForm(config_of(files.settings), files.tensors)

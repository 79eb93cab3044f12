"""Which kinds of PEFT adapter are read, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.adalora import read_adalora
from manylora.lora.formats.kinds.delora import read_delora
from manylora.lora.formats.kinds.diagonal import read_diagonal, read_norms
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.hra import read_hra
from manylora.lora.formats.kinds.loha import read_loha
from manylora.lora.formats.kinds.lokr import read_lokr
from manylora.lora.formats.kinds.lora import read_lora_kind
from manylora.lora.formats.kinds.miss import read_miss
from manylora.lora.formats.kinds.prompts import read_prefix, read_prompt
from manylora.lora.formats.kinds.tinylora import read_tinylora
from manylora.lora.formats.kinds.unilora import read_unilora
from manylora.lora.formats.kinds.vblora import read_vblora
from manylora.lora.formats.kinds.vera import read_pvera, read_vera
from manylora.lora.formats.peft_config import CONFIG, peft_type

# By PEFT's peft_type. A reader raises AdapterInvalidError.
READERS: dict[str, Callable[[PeftFiles], LoraForm]] = {
    "ADALORA": read_adalora,
    "BEFT": read_diagonal,
    "CARTRIDGE": read_prefix,
    "DELORA": read_delora,
    "HRA": read_hra,
    "IA3": read_diagonal,
    "LN_TUNING": read_norms,
    "LOHA": read_loha,
    "LOKR": read_lokr,
    "LORA": read_lora_kind,
    "MISS": read_miss,
    "OFT": read_diagonal,
    "PREFIX_TUNING": read_prefix,
    "PROMPT_TUNING": read_prompt,
    "P_TUNING": read_prompt,
    "ROAD": read_diagonal,
    "PVERA": read_pvera,
    "TINYLORA": read_tinylora,
    "UNILORA": read_unilora,
    "VBLORA": read_vblora,
    "VERA": read_vera,
}
# Why a kind is not read, where there is more to say than that.
REASONS: dict[str, str] = {
    "BOFT": "its rotations pair inputs all over a layer, in products one after another",
}


def check_kind(settings: Mapping[str, Any]) -> str:
    """The adapter's peft_type, of READERS. Raises AdapterInvalidError for another one, naming it."""
    kind = peft_type(settings)
    if kind in READERS:
        return kind
    reason = REASONS.get(kind, "this kind is not served")
    served = ", ".join(sorted(READERS))
    raise AdapterInvalidError(f"{CONFIG} sets peft_type {kind}: {reason}; served are {served}")


def read_form(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    return READERS[check_kind(files.settings)](files)

"""Which of PEFT's types of adapter are read, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.settings import CONFIG, peft_type
from manylora.lora.formats.peft_types.converted import LoraForm, PeftFiles
from manylora.lora.formats.peft_types.diagonal import read_diagonal, read_norms
from manylora.lora.formats.peft_types.from_base import read_deft, read_peanut
from manylora.lora.formats.peft_types.lora import read_lora_kind, read_tokens
from manylora.lora.formats.peft_types.low_rank import (
    read_adalora,
    read_delora,
    read_gralora,
    read_hra,
    read_loha,
    read_lokr,
    read_miss,
)
from manylora.lora.formats.peft_types.prompts import read_prefix, read_prompt
from manylora.lora.formats.peft_types.vectors import (
    read_pvera,
    read_tinylora,
    read_unilora,
    read_vblora,
    read_vera,
)

# By PEFT's peft_type. A reader raises AdapterInvalidError.
READERS: dict[str, Callable[[PeftFiles], LoraForm]] = {
    "ADALORA": read_adalora,
    "BEFT": read_diagonal,
    "CARTRIDGE": read_prefix,
    "CPT": read_prompt,
    "DEFT": read_deft,
    "DELORA": read_delora,
    "GRALORA": read_gralora,
    "HRA": read_hra,
    "IA3": read_diagonal,
    "LN_TUNING": read_norms,
    "LOHA": read_loha,
    "LOKR": read_lokr,
    "LORA": read_lora_kind,
    "MISS": read_miss,
    "OFT": read_diagonal,
    "PEANUT": read_peanut,
    "PREFIX_TUNING": read_prefix,
    "PROMPT_TUNING": read_prompt,
    "P_TUNING": read_prompt,
    "ROAD": read_diagonal,
    "PVERA": read_pvera,
    "TINYLORA": read_tinylora,
    "TRAINABLE_TOKENS": read_tokens,
    "UNILORA": read_unilora,
    "VBLORA": read_vblora,
    "VERA": read_vera,
}
WHOLE = "its change of a weight has full rank: each adapter would take what a copy of the base's layers takes"
TASKS = "it asks for a task's number with each request, which no way in here carries"
# Why a kind is not read.
REASONS: dict[str, str] = {
    "ADAMSS": "its file does not say which rows it changes, a clustering of the base's weights does",
    "ADAPTION_PROMPT": "it adds an attention of its own to layers, with a gate",
    "BOFT": "its rotations pair inputs all over a layer, in products one after another",
    "C3A": WHOLE,
    "FOURIERFT": WHOLE,
    "FROD": "it takes the place of whole weights",
    "GLORA": WHOLE,
    "HIRA": WHOLE,
    "LILY": "which of its matrices act is decided by a router for every token",
    "MULTITASK_PROMPT_TUNING": TASKS,
    "OSF": "it takes the place of whole weights",
    "POLY": TASKS,
    "PSOFT": "it rotates singular vectors of the base, whose signs are as the trainer's library chose them",
    "RANDLORA": WHOLE,
    "SHADOW": "it is a second model beside the base",
    "SHIRA": WHOLE,
    "SUPERTUNING": WHOLE,
    "WAVEFT": WHOLE,
    "XLORA": "it weighs other adapters for every token in a run of its own; ask for a mix of these instead",
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

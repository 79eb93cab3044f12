"""PEFT's types of adapter: each is converted to the form of a LoRA, exactly, or refused.

A type is one row of `READERS` and one function. If each module is converted by itself, that function takes
`(pairs, path)` and returns A and B, and `by_module` makes a reader of it; else it takes `PeftFiles` and
returns `LoraForm`. Keys that only this type has in adapter_config.json are listed in `peft/settings.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manylora.adapters.formats.peft.settings import CONFIG, peft_type
from manylora.adapters.formats.peft_types import low_rank
from manylora.adapters.formats.peft_types.converted import LoraForm, PeftFiles, by_module
from manylora.adapters.formats.peft_types.extras import read_diagonal, read_norms, read_prefix, read_prompt
from manylora.adapters.formats.peft_types.vectors import read_tinylora, read_unilora, read_vblora, read_vera
from manylora.errors import AdapterInvalidError

# By PEFT's peft_type. A reader raises AdapterInvalidError.
READERS: dict[str, Callable[[PeftFiles], LoraForm]] = {
    "ADALORA": low_rank.read_adalora,
    "BEFT": read_diagonal,
    "CARTRIDGE": read_prefix,
    "CPT": read_prompt,
    "DEFT": by_module(low_rank.deft, "deft_P", "deft_R"),
    "DELORA": by_module(low_rank.delora, "delora_A", "delora_B", "delora_lambda", beside=("delora_w_norm",)),
    "GRALORA": by_module(low_rank.gralora, *low_rank.GRALORA_PARTS),
    "HRA": by_module(low_rank.hra, "hra_u"),
    "IA3": read_diagonal,
    "LN_TUNING": read_norms,
    "LOHA": by_module(low_rank.loha, *low_rank.LOHA_PARTS, "hada_t1", "hada_t2"),
    "LOKR": by_module(low_rank.lokr, *low_rank.LOKR_PARTS, "lokr_t2"),
    "LORA": low_rank.read_lora,
    "MISS": by_module(low_rank.miss, "miss_block"),
    "OFT": read_diagonal,
    "PEANUT": low_rank.read_peanut,
    "PREFIX_TUNING": read_prefix,
    "PROMPT_TUNING": read_prompt,
    "P_TUNING": read_prompt,
    "ROAD": read_diagonal,
    "PVERA": read_vera,
    "TINYLORA": read_tinylora,
    "TRAINABLE_TOKENS": low_rank.read_tokens,
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


def check_peft_type(settings: Mapping[str, Any]) -> str:
    """The adapter's peft_type if it is supported. Raises AdapterInvalidError with the reason otherwise."""
    kind = peft_type(settings)
    if kind in READERS:
        return kind
    reason = REASONS.get(kind, "this kind is not served")
    served = ", ".join(sorted(READERS))
    raise AdapterInvalidError(f"{CONFIG} sets peft_type {kind}: {reason}; served are {served}")


def convert(files: PeftFiles) -> LoraForm:
    """Convert an adapter of any supported type. Raises AdapterInvalidError."""
    return READERS[check_peft_type(files.settings)](files)

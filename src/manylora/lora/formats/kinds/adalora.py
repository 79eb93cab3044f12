"""AdaLoRA: B diag(E) A; ranks differ by module, and those that were pruned to 0 have no rows."""

from __future__ import annotations

from functools import partial

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG


def read_adalora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, ("lora_A", "lora_B", "lora_E"))
    first, alpha = pairs.count("init_r", 12), pairs.number("lora_alpha", 8)
    ranks = _kept(files)
    for path in pairs.paths("lora_A", "lora_B", "lora_E"):
        a, b, e = (pairs.read(path, f"lora_{part}") for part in "ABE")
        if a.ndim != 2 or b.ndim != 2 or e.shape != (len(a), 1) or b.shape[1] != len(a):
            raise AdapterInvalidError(f"{path}: lora_A, lora_E and lora_B do not fit together")
        rank = ranks.get(path.removeprefix("base_model.model."), first)
        if len(a) != rank:
            raise AdapterInvalidError(f"{path} has rank {len(a)}, and {CONFIG} says {rank}")
        # PEFT divides by the rank before pruning and 1e-5, in float32.
        scale = np.float32(alpha if alpha > 0 else rank) / (np.float32(first) + np.float32(1e-5))
        scaled = a * e, b * scale
        pairs.add(path, rank, a.shape[1], len(b), partial(tuple, scaled))
    return pairs.form()


def _kept(files: PeftFiles) -> dict[str, int]:
    """Ranks by the path of the module, of those that were pruned. Raises AdapterInvalidError."""
    found = files.settings.get("rank_pattern") or {}
    if not isinstance(found, dict):
        raise AdapterInvalidError(f"{CONFIG}: rank_pattern must map names to lists of true and false")
    ranks = {}
    for name, kept in found.items():
        if not isinstance(kept, list) or not all(type(one) is bool for one in kept):
            raise AdapterInvalidError(
                f"{CONFIG}: rank_pattern of {name[:80]} must be true and false for each rank"
            )
        ranks[name.removesuffix(".default").rpartition(".")[0]] = sum(kept)
    return ranks

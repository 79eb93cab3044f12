"""Whether an adapter changes anything. Probes rows with random inputs until one has an effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from manylora.lora.modules import LoraModule
from manylora.lora.number_types import BY_DTYPE
from manylora.lora.tensors import AdapterRow
from manylora.request import LoraExtra

NOTHING = (
    "it changes nothing, so it answers as the base model does: what it adds is zero (an untrained adapter?)"
)
NEUTRAL = (".bias", ".turn", ".scale", ".input_scale", ".input_turn")
LEAST = 1e-5  # relative magnitude below which a product is only rounding


def has_effect(
    rows: Sequence[AdapterRow], extras: Sequence[LoraExtra], modules: Mapping[int, LoraModule]
) -> bool:
    """rows: checked rows of these modules. Biases of zeros and scales of ones have no effect; all other
    extras do.
    """
    if any(not extra.name.endswith(NEUTRAL) or _differs(extra) for extra in extras):
        return True
    random = np.random.default_rng(0)
    return any(_acts(row, modules[row.module_id].at(row.layer), random) for row in rows)


def _differs(extra: LoraExtra) -> bool:
    """Whether this extra changes anything."""
    values = extra.values if extra.values.dtype.kind == "f" else _wide(extra.values)
    if extra.name.endswith(".input_turn"):
        size = values.shape[1]
        return bool(np.any(values.reshape(-1, size, size) != np.eye(size)))
    return bool(np.any(values != extra.name.endswith("scale")))


def _acts(row: AdapterRow, module: LoraModule, random: np.random.Generator) -> bool:
    sizes = np.cumsum(module.row_sizes(row.format))
    a, b, magnitude = (_wide(part) for part in np.split(row.payload, sizes)[:3])
    if row.format.dora and np.abs(magnitude - 1).max() > LEAST:
        return True
    rank, experts = row.format.rank, module.experts
    if row.shared is not None:
        of_b, of_d = np.split(magnitude, [module.out_dim])
        a, b = _wide(row.shared.a), _wide(row.shared.b) * of_b[:, None] * of_d
    a, b = a.reshape(experts, rank, -1), b.reshape(experts, -1, rank)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow counts as an effect
        inner = a @ random.standard_normal((a.shape[2], 1), np.float32)
        given, most = np.abs(b @ inner), np.abs(b) @ np.abs(inner)
        return not bool((given <= LEAST * most.max(initial=0)).all())


def _wide(values: np.ndarray) -> np.ndarray:
    kind = BY_DTYPE.get(values.dtype)
    return kind.widen(values) if kind is not None and kind.widen else values.astype(np.float32, copy=False)

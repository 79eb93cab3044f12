"""The LoRA modules: ids (TensorRT-LLM loraModule.h), names, dimensions, and what tensor parallelism cuts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from manylora.config import ModelConfig
from manylora.errors import ConfigError

__all__ = ["MODULE_NAMES", "LoraModule", "Split", "lora_modules"]

MODULE_NAMES = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate",
    "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense",
    "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router", "mlp_gate_up",
    "shared_expert_h_to_4h", "shared_expert_4h_to_h", "shared_expert_gate", "mamba_in_proj",
    "mamba_out_proj", "moe_latent_fc1", "moe_latent_fc2",
)  # fmt: skip
"""Name of each module id, 0 to 25."""

QKV = {"attn_q", "attn_k", "attn_v"}  # one group: naming one enables all three
# A fused module is available when all the modules it fuses are.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "mlp_gate_up": ("mlp_gate", "mlp_h_to_4h")}


class Split(Enum):
    """What tensor parallelism cuts: rows of B, columns of A, or nothing."""

    B_ROWS = "B rows"
    A_COLS = "A cols"
    NONE = "none"


@dataclass(frozen=True)
class LoraModule:
    """A [rank, in_dim] and B [out_dim, rank], sizes over all ranks.

    groups, transposed: how a checkpoint keeps the base's matrix: as so many stacks of the parts one after
    another, and [in, out].
    counted: whether it takes part in the page geometry. Fused modules beside their parts do not: they would
    double the size of a page without ever being used together with them. parts: of a fused module, the sizes
    whose sum out_dim is.
    """

    module_id: int
    in_dim: int
    out_dim: int
    split: Split
    counted: bool = True
    parts: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False

    @property
    def name(self) -> str:
        return MODULE_NAMES[self.module_id]

    def local_in(self, tp: int = 1) -> int:
        return self.in_dim // tp if self.split is Split.A_COLS else self.in_dim

    def local_out(self, tp: int = 1) -> int:
        return self.out_dim // tp if self.split is Split.B_ROWS else self.out_dim

    def row_elements(self, rank: int, dora: bool = False, tp: int = 1) -> int:
        """Elements of A, B and, with DoRA, the magnitude on one rank."""
        out = self.local_out(tp)
        return rank * (self.local_in(tp) + out) + (out if dora else 0)


def lora_modules(model: ModelConfig, names: tuple[str, ...] = ()) -> dict[int, LoraModule]:
    """The modules an adapter may use on this model, by id. Empty names: every module the model has.

    attn_dense reads the attention's output, so its in_dim is heads * head_dim, which need not be hidden_size.
    Raises ConfigError for a name the model has no module for.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.q_size, model.kv_size
    gated = {
        "mlp_gate": (hidden, inner, Split.B_ROWS),
        "mlp_gate_up": (hidden, 2 * inner, Split.B_ROWS),
    }
    dims = {
        "attn_qkv": (hidden, q + 2 * kv, Split.B_ROWS),
        "attn_q": (hidden, q, Split.B_ROWS),
        "attn_k": (hidden, kv, Split.B_ROWS),
        "attn_v": (hidden, kv, Split.B_ROWS),
        "attn_dense": (q, hidden, Split.A_COLS),
        "mlp_h_to_4h": (hidden, inner, Split.B_ROWS),
        "mlp_4h_to_h": (inner, hidden, Split.A_COLS),
        **(gated if model.gated_mlp else {}),
    }
    for name in names:
        if name not in dims:
            raise ConfigError(f"Invalid LoRA module {name}: this model has {', '.join(dims)}")
    wanted = set(names or dims)
    if wanted & QKV:
        wanted |= QKV
    found: dict[int, LoraModule] = {}
    for name, (in_dim, out_dim, split) in dims.items():
        parts = FUSED.get(name, ())
        if name in wanted or (parts and wanted.issuperset(parts)):
            module_id = MODULE_NAMES.index(name)
            counted = not (parts and wanted.issuperset(parts))
            sizes = tuple(dims[part][1] for part in parts)
            groups = model.qkv_groups if name == "attn_qkv" else 1
            found[module_id] = LoraModule(
                module_id, in_dim, out_dim, split, counted, sizes, groups, model.transposed_weights
            )
    return found

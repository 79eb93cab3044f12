"""ShortConv: a layer of LFM2, a gated convolution over a sequence's last inputs, used instead of
attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.model.delta_rule import LayerState
from manylora.model.layers import LoraLinear


@dataclass(frozen=True)
class ShortConv:
    """project: to [b; c; h]. b * h is the input of the convolution, whose output is multiplied by c.

    taps: [taps, channels] float32, newest input last.
    """

    ops: ReferenceOps
    project: LoraLinear
    out: LoraLinear
    taps: Tensor

    def __call__(self, x: Tensor, cache: LayerState, lora: LoraBatch | None) -> Tensor:
        mixed = self.ops.short_conv(self.project(x, lora), self.taps, cache.state, cache.batch)
        return self.out(mixed, lora)

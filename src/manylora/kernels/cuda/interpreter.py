"""Whether kernels run under Triton's interpreter (TRITON_INTERPRET=1), and workarounds for its limits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def widens(dtype: torch.dtype) -> bool:
    """Whether a matrix product must widen its operands, because the interpreter treats bfloat16 as
    integers.
    """
    return dtype == torch.bfloat16 and is_interpreted()


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:  # noqa: RET505 - a compile-time branch: both arms must return
        # float32 by three products of TF32 each: as exact, but by tensor cores, with registers to spare
        return tl.dot(a, b, total, input_precision="tf32x3")

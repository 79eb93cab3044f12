"""Products of the processor's matrix instructions: which bfloat16 ones native/bfloat16.c uses, decided by a
trial, and panels for integer products of weights in 8 or 4 bits.
"""

from __future__ import annotations

import ctypes
import logging
import time
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.huge_pages import huge_zeros
from manylora.kernels.panels import INTEGERS, Panels, PanelsLinear, to_panels
from manylora.kernels.quantised import BLOCK, FLOAT4, QuantisedWeight


def to_integer_panels(library: ctypes.CDLL, weight: QuantisedWeight) -> Panels | None:
    """None if native/integer.c has no kernel for this weight. Uses the processor's byte products if
    available, with identical results.

    values: int8 [panels, K / 4, width, 4], inputs padded with zeros to blocks of 32; for 4 bits uint8
            [panels, K / 8, width, 4].
    scales: float32 [panels, 1, width]; for 4 bits bfloat16 [panels, K / 32, width].
    """
    width, form = library.panel_width(), INTEGERS + library.integer_dots()
    (rows, columns), groups = weight.shape, weight.scales.shape[1]
    panels, others = -(-rows // width), (weight.offsets, weight.zeros, weight.order)
    below = panels * width - rows
    if columns < BLOCK or any(part is not None for part in others):
        return None
    if weight.values.dtype == torch.int8 and groups == 1:
        values = F.pad(weight.values, (0, -columns % BLOCK, 0, below))
        fours = _in_huge_pages(values.view(panels, width, -1, 4).transpose(1, 2))
        scales = F.pad(weight.scales.float().flatten(), (0, below)).view(panels, 1, width)
        return Panels(fours, scales, None, rows, columns, form)
    narrow = weight.scales.bfloat16()
    if weight.values.dtype != torch.uint8 or weight.group_size != BLOCK or (narrow != weight.scales).any():
        return None
    halves = F.pad(weight.halves(), (0, 0, 0, below)).view(panels, width, -1, 2, 4)
    eights = _in_huge_pages((halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(1, 2))
    turned = F.pad(narrow, (0, 0, 0, below)).view(panels, width, groups).transpose(1, 2).contiguous()
    return Panels(eights, turned, None, rows, columns, form)


def _in_huge_pages(values: Tensor) -> Tensor:
    return huge_zeros(tuple(values.shape), values.dtype).copy_(values)


logger = logging.getLogger("manylora")

FORMS = {1: "AVX512-BF16", 2: "AMX"}
"""By their numbers in native/bfloat16.c."""
NONE, DOTS = 0, 1
ROWS, COLUMNS, OUTPUTS = 64, 1024, 192  # of the trial: as many rows as in a step of many requests
ROUNDS = 20


@lru_cache
def choose_form(library: ctypes.CDLL) -> int:
    """The fastest form that gives correct results, or NONE if float32 products are faster. One per process,
    because each form rounds differently.
    """
    offered = library.bfloat16_forms()
    multiply = PanelsLinear(library)
    forms = [form for form in FORMS if offered >> form & 1 and is_right(multiply, form)]
    form = fastest(multiply, [NONE, *forms]) if forms else NONE
    used = ["8-bit integers"] * bool(library.integer_dots())
    if form != NONE:
        used.append(f"bfloat16 ({FORMS[form]})")
    if used:
        logger.info("this processor's matrix instructions are used for %s", " and ".join(used))
    elif forms:
        logger.debug("this processor's bfloat16 instructions are slower than float32, and not used")
    return form


def rounds_adapters(library: ctypes.CDLL, form: int) -> bool:
    """Whether bfloat16 adapters round their inputs like linear layers in this form. They use AVX512-BF16 with
    AMX, too.
    """
    if form in (NONE, DOTS):
        return form == DOTS
    return bool(library.bfloat16_forms() >> DOTS & 1) and is_right(PanelsLinear(library), DOTS)


def fastest(multiply: PanelsLinear, forms: list[int]) -> int:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    weight = torch.randn(OUTPUTS, COLUMNS, generator=generator).bfloat16()
    packed = to_panels(weight, multiply.width, multiply.block)
    assert packed is not None
    seconds = dict.fromkeys(forms, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several threads would mostly measure waiting
    try:
        for form in forms * ROUNDS:
            began = time.perf_counter()
            multiply(x, packed.rounding(form), None)
            seconds[form] = min(seconds[form], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return min(forms, key=lambda form: seconds[form])


def is_right(multiply: PanelsLinear, form: int) -> bool:
    """Tests every kind of weight, over several blocks, with partly filled panels, rows and inputs."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(101, 1144, generator=generator).bfloat16()
    scales = torch.rand(101, 11, generator=generator)
    eight = torch.randint(-128, 128, (101, 1144), generator=generator).to(torch.int8)
    four = torch.randint(0, 256, (101, 572), generator=generator).to(torch.uint8)
    x = torch.randn(19, 1144, generator=generator)
    floats = QuantisedWeight(four, scales, codebook=torch.tensor(FLOAT4, dtype=torch.float32))
    for weight in (plain, QuantisedWeight(eight, scales), QuantisedWeight(four, scales, scales), floats):
        packed = to_panels(weight, multiply.width, multiply.block)
        assert packed is not None
        wide = weight.to(torch.float64)
        want = x.bfloat16().double() @ (wide if isinstance(wide, torch.Tensor) else wide.wide()).T
        found = multiply(x, packed.rounding(form), None).double()
        if not torch.allclose(found, want, rtol=0, atol=1e-5 * float(want.abs().max())):
            return False
    return True

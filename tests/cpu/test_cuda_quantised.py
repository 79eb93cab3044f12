"""Protects quantised weights on the GPU's path: each kind gets the first kernel that is right, others are
refused with the reason, and products are those of the wide weights. PyTorch's kernels for FP8 and int8 run on
a CPU too; of the 4-bit one there is a double that knows what PyTorch's does on a GPU."""

from __future__ import annotations

import pytest
import torch
from test_cuda_kernels import DEVICE
from torch import Tensor

from manylora.kernels.cuda import quantised
from manylora.kernels.cuda.fp8 import quantise_rows
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.cuda.quantised import KERNELS, QuantisedLinears, TorchInt4, TorchInt8
from manylora.kernels.quantised import PackedInt4, QuantisedWeight
from manylora.model.quant import quantise
from manylora.quant.config import QuantConfig

OURS = KERNELS[-1].name


def weight_of(algo: str, dtype: torch.dtype, rows: int = 48, columns: int = 96) -> QuantisedWeight:
    torch.manual_seed(0)
    return quantise(torch.randn(rows, columns).to(dtype).to(DEVICE), QuantConfig(algo, group_size=32))


def right(linears: QuantisedLinears, weight: QuantisedWeight, narrows: bool, rows: int) -> bool:
    dtype = weight.scales.dtype
    x = torch.randn(rows, 2 * weight.shape[1]).to(dtype).to(DEVICE)[:, : weight.shape[1]]
    bias = torch.randn(weight.shape[0]).to(dtype).to(DEVICE)
    values, scales = quantise_rows(x)
    wide = values.float() * scales if narrows else x.float()
    want = wide @ weight.wide().float().T + bias.float()
    packed = linears.pack(weight)
    got = linears(x, packed, bias)
    assert (got.dtype, got.shape) == (dtype, want.shape)
    plain = linears(x, packed, None)
    tolerance = {"rtol": 0.01, "atol": 0.02 * float(want.abs().max())}
    return torch.allclose(got.float(), want, **tolerance) and torch.allclose(
        (plain + bias).float(), want, **tolerance
    )


@pytest.mark.parametrize(
    ("algo", "dtype", "name"),
    [
        ("FP8", torch.bfloat16, "torch._scaled_mm, scales inside"),
        ("FP8", torch.float16, "torch._scaled_mm, scales behind it"),
        ("W8A16", torch.bfloat16, "torch._weight_int8pack_mm"),
        ("W8A16", torch.float32, None),
        ("W4A16", torch.float16, OURS),
        ("W4A16", torch.bfloat16, OURS),
    ],
)
def test_each_kind_has_its_kernel(
    algo: str, dtype: torch.dtype, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manylora")
    linears = QuantisedLinears()
    for rows in (1, 70):
        assert right(linears, weight_of(algo, dtype), narrows=algo == "FP8", rows=rows)
    said = [r.getMessage() for r in caplog.records if "is not used" not in r.getMessage()]
    if name is not None and DEVICE.type == "cpu":  # a GPU may have more
        assert [text.partition(": ")[2] for text in said] == [name], "said once"


def test_kernels_that_raise_or_are_wrong_are_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "manylora")
    monkeypatch.setattr(quantised, "FEW_ROWS", 4)

    class Wrong(TorchInt8):
        name = "wrong"

        def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Tensor) -> Tensor:
            return 1.1 * (x @ packed.wide().T)

    class Raises(TorchInt8):
        name = "raises"

        def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Tensor) -> Tensor:
            raise RuntimeError("needs compute capability 9.0")

    linears = QuantisedLinears((Wrong(), Raises(), KERNELS[-1]))
    for rows in (1, 300):  # ours, and beyond its rows the wide way
        assert right(linears, weight_of("W8A16", torch.bfloat16), narrows=False, rows=rows)
    assert "int8 weights: wrong is not used: its answer is" in caplog.text
    assert "int8 weights: raises is not used: RuntimeError: needs compute capability 9.0" in caplog.text
    assert f"int8 weights: {OURS}" in caplog.text


def test_the_four_bit_kernel_gets_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `_convert_weight_to_int4pack` takes the first of two inputs in the high half of a byte, and
    the product is of (value - 8) * scale + offset."""

    def convert(values: Tensor, inner_tiles: int) -> Tensor:
        assert values.dtype == torch.uint8 and 2 * values.shape[1] % (16 * inner_tiles) == 0
        assert inner_tiles in (2, 4, 8)
        return torch.stack((values >> 4, values & 15), dim=-1).flatten(1).int()

    def multiply(x: Tensor, packed: Tensor, group: int, table: Tensor) -> Tensor:
        assert x.dtype == table.dtype == torch.bfloat16 and x.is_contiguous() and table.is_contiguous()
        assert table.shape == (packed.shape[1] // group, packed.shape[0], 2)
        scales, offsets = table.float().repeat_interleave(group, 0).unbind(-1)
        return (x.float() @ ((packed.float().T - 8) * scales + offsets)).to(x.dtype)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", convert)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)
    linears, weight = QuantisedLinears((TorchInt4(), KERNELS[-1])), weight_of("W4A16", torch.bfloat16)
    assert isinstance(linears.pack(weight), PackedInt4)
    assert right(linears, weight, narrows=False, rows=300)
    odd = weight_of("W4A16", torch.bfloat16, rows=44)
    assert linears.pack(odd) is odd, "its rows are not a multiple of 8"
    assert right(linears, odd, narrows=False, rows=3)


def test_experts_keep_their_form() -> None:
    ops, weight = CudaOps(), weight_of("W4A16", torch.bfloat16)
    assert ops.pack(weight, routed=True) is weight
    plain = torch.randn(4, 4)
    assert ops.pack(plain) is plain

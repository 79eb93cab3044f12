"""Protects quantised weights on the GPU's path: products are those of the wide weights, by the kernel that
the format and the number of rows decide. torch._scaled_mm runs on a CPU too."""

from __future__ import annotations

import pytest
import torch
from test_cuda_kernels import DEVICE

from manylora.checkpoints.quant.config import QuantConfig
from manylora.kernels.cuda.arithmetic import quantise_rows
from manylora.kernels.cuda.products import QuantisedLinears
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.quant import quantise

SCALED = "float8_e4m3fn weights 48 x 96 for %s: torch._scaled_mm, scales %s"


def weight_of(algo: str, dtype: torch.dtype, rows: int = 48, columns: int = 96) -> QuantisedWeight:
    torch.manual_seed(0)
    return quantise(torch.randn(rows, columns).to(dtype).to(DEVICE), QuantConfig(algo, group_size=32))


def is_right(linears: QuantisedLinears, weight: QuantisedWeight, rows: int, *, rounded: bool) -> bool:
    """rounded: whether rows of x are rounded to 8-bit floats."""
    dtype = weight.scales.dtype
    x = torch.randn(rows, 2 * weight.shape[1]).to(dtype).to(DEVICE)[:, : weight.shape[1]]
    bias = torch.randn(weight.shape[0]).to(dtype).to(DEVICE)
    values, scales = quantise_rows(x)
    wide = values.float() * scales if rounded else x.float()
    want = wide @ weight.wide().float().T + bias.float()
    packed = linears.pack(weight)
    got, plain = linears(x, packed, bias), linears(x, packed, None)
    assert (got.dtype, got.shape) == (dtype, want.shape)
    tolerance = {"rtol": 0.01, "atol": 0.02 * float(want.abs().max())}
    return all(torch.allclose(one.float(), want, **tolerance) for one in (got, plain + bias))


@pytest.mark.parametrize("rows", [1, 70, 300])
@pytest.mark.parametrize(
    ("algo", "dtype"),
    [
        ("W8A16", torch.bfloat16),
        ("W8A16", torch.float32),
        ("W4A16", torch.float16),
        ("W4A16", torch.bfloat16),
    ],
)
def test_weights_are_widened_for_few_rows_and_for_many(algo: str, dtype: torch.dtype, rows: int) -> None:
    assert is_right(QuantisedLinears(), weight_of(algo, dtype), rows, rounded=False)


@pytest.mark.parametrize(("dtype", "where"), [(torch.bfloat16, "inside"), (torch.float16, "afterwards")])
def test_torch_multiplies_eight_bit_floats(
    dtype: torch.dtype, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manylora")
    linears = QuantisedLinears()
    for rows in (1, 70):
        assert is_right(linears, weight_of("FP8", dtype), rows, rounded=True)
    assert [record.getMessage() for record in caplog.records] == [SCALED % (dtype, where)], "said once"

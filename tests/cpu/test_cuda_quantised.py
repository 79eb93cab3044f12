"""Protects quantised weights on the GPU's path: each kind gets the first kernel that is right, others are
refused with the reason, and products are those of the wide weights. PyTorch's kernels for FP8 and int8 run on
a CPU too; of the 4-bit one there is a double that knows what PyTorch's does on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_kernels import DEVICE
from torch import Tensor

from manylora.kernels.cuda.blocks import BlockChooser
from manylora.kernels.cuda.fp8 import quantise_rows
from manylora.kernels.cuda.grouped import ROW_CLASSES
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.cuda.products import QuantisedLinears
from manylora.kernels.cuda.quantised import QuantisedKernel, TorchInt4, TorchInt8, Widened, WidenedBefore
from manylora.kernels.quantised import PackedInt4, QuantisedWeight
from manylora.model.quant import quantise
from manylora.quant.config import QuantConfig

OURS, BEFORE = Widened.name, WidenedBefore.name


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
        (
            "W8A16",
            torch.bfloat16,
            f"torch._weight_int8pack_mm up to 64 rows, {OURS} up to 256 rows, then {BEFORE}",
        ),
        ("W8A16", torch.float32, None),
        ("W4A16", torch.float16, f"{OURS} up to 256 rows, then {BEFORE}"),
        ("W4A16", torch.bfloat16, f"{OURS} up to 256 rows, then {BEFORE}"),
    ],
)
def test_each_kind_has_its_kernel(
    algo: str, dtype: torch.dtype, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manylora")
    linears = QuantisedLinears()
    for rows in (1, 70) if algo == "FP8" else (1, 70, 300):  # of 8 bits each row is rounded by a program
        assert right(linears, weight_of(algo, dtype), narrows=algo == "FP8", rows=rows)
    said = [r.getMessage() for r in caplog.records if "is not used" not in r.getMessage()]
    if name is not None and DEVICE.type == "cpu":  # a GPU may have more
        assert [text.partition(": ")[2] for text in said] == [name], "said once"


def test_kernels_that_raise_or_are_wrong_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "manylora")

    class Wrong(TorchInt8):
        name = "wrong"

        def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Tensor) -> Tensor:
            return 1.1 * (x @ packed.wide().T)

    class Raises(TorchInt8):
        name = "raises"

        def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Tensor) -> Tensor:
            raise RuntimeError("needs compute capability 9.0")

    linears = QuantisedLinears((Wrong(), Raises(), Widened(), WidenedBefore()))
    for rows in (1, 300):  # ours, and beyond its rows the wide way
        assert right(linears, weight_of("W8A16", torch.bfloat16), narrows=False, rows=rows)
    weights = "int8 weights 48 x 96 for bfloat16"
    assert f"{weights}: wrong is not used: its answer is" in caplog.text
    assert f"{weights}: raises is not used: RuntimeError: needs compute capability 9.0" in caplog.text
    assert f"{weights}: {OURS}" in caplog.text


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
    linears, weight = (
        QuantisedLinears((TorchInt4(), Widened(), WidenedBefore())),
        weight_of("W4A16", torch.bfloat16),
    )
    assert isinstance(linears.pack(weight), PackedInt4)
    assert right(linears, weight, narrows=False, rows=300)
    odd = weight_of("W4A16", torch.bfloat16, rows=44)
    assert linears.pack(odd) is odd, "its rows are not a multiple of 8"
    assert right(linears, odd, narrows=False, rows=3)


class Timed:
    """A clock: what the kernels that a call runs take, by name and number of rows. Others take 1 s."""

    def __init__(self, seconds: dict[tuple[str, int], float]) -> None:
        self.seconds, self.ran = seconds, list[tuple[str, int]]()

    def __call__(self, call: Callable[[], object]) -> float:
        before = len(self.ran)
        call()
        return sum(self.seconds.get(one, 1.0) for one in self.ran[before:])

    def kernel(self, name: str, **changed: Any) -> QuantisedKernel:
        """One that is right, and takes as long as this clock says."""

        class Known(WidenedBefore):
            def __call__(known, x: Tensor, packed: Any, prepared: None) -> Tensor:  # noqa: N805
                self.ran.append((name, len(x)))
                wide = packed.wide() if isinstance(packed, QuantisedWeight) else packed.table
                if known.narrows:
                    values, scales = quantise_rows(x)
                    x = values.float() * scales
                return x @ wide.T

            def pack(known, weight: QuantisedWeight) -> QuantisedWeight | PackedInt4:  # noqa: N805
                return PackedInt4(weight.values, weight.wide(), 32) if known.repacks else weight

        made = Known()
        for key, value in {"name": name, **changed}.items():
            setattr(made, key, value)
        return made


def chosen_for(clock: Timed, kernels: Sequence[QuantisedKernel], path: Path | None = None) -> list[str]:
    """What runs 1, 17, 65 and 257 rows."""
    linears = QuantisedLinears(kernels, BlockChooser(clock, path))
    weight = weight_of("W4A16", torch.float32)
    packed, ran = linears.pack(weight), []
    for rows in (1, 17, 65, 257):
        clock.ran.clear()
        linears(torch.randn(rows, weight.shape[1]).to(DEVICE), packed, None)
        ran += [name for name, _ in clock.ran]
    return ran


def test_for_each_class_of_rows_the_fastest_is_chosen_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manylora")
    seconds = {("b", 16): 0.5, ("b", 64): 0.97, ("c", 256): 0.9, ("a", 1024): 0.1}
    clock = Timed(seconds)
    kernels = [clock.kernel("a"), clock.kernel("b", most_rows=64), clock.kernel("c")]
    path = tmp_path / "blocks.json"
    assert chosen_for(clock, kernels, path) == ["b", "a", "c", "a"], "3 % is noise"
    weights = "4-bit weights 48 x 96 in groups of 32 with offsets for float32"
    said = "b up to 16 rows, a up to 64 rows, c up to 256 rows, then a"
    assert f"{weights}: {said}" in caplog.text
    other = Timed({})
    kernels = [other.kernel("a"), other.kernel("b", most_rows=64), other.kernel("c")]
    assert chosen_for(other, kernels, path) == ["b", "a", "c", "a"], "as the file says"
    kernels = [other.kernel("a"), other.kernel("b", most_rows=64)]
    assert chosen_for(other, kernels, path) == ["b", "a", "a", "a"], "c is gone"


def test_a_layout_that_only_one_kernel_takes_is_chosen_by_decoding() -> None:
    for taken, want in ((0.4, ["p"] * 4), (0.9, ["b", "b", "a", "a"])):
        clock = Timed({("p", 16): taken, ("p", 64): taken, ("p", 256): 9.0, ("b", 16): 0.5, ("b", 64): 0.5})
        kernels = [clock.kernel("p", repacks=True), clock.kernel("a"), clock.kernel("b", most_rows=64)]
        assert chosen_for(clock, kernels) == want


def test_no_time_decides_whether_inputs_are_rounded() -> None:
    clock, weight = Timed({("exact", rows): 0.1 for rows in ROW_CLASSES}), weight_of("FP8", torch.float32)
    kernels = [clock.kernel("exact"), clock.kernel("rounds", narrows=True)]
    for offered in (kernels, kernels[::-1]):
        linears = QuantisedLinears(offered, BlockChooser(clock))
        assert right(linears, weight, narrows=offered[0].narrows, rows=3)
        assert clock.ran[-1][0] == offered[0].name


def test_experts_keep_their_form() -> None:
    ops, weight = CudaOps(), weight_of("W4A16", torch.bfloat16)
    assert ops.pack(weight, routed=True) is weight
    plain = torch.randn(4, 4)
    assert ops.pack(plain) is plain

"""Protects products of integers: the compiled kernels compute what exact integers say, in every form and in
any company, and a GPU refuses W8A8 and W4A8."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from driver import Driver
from gguf import GGMLQuantizationType
from gguf_files import make_gguf, random_blocks
from tiny_models import make_model

from manylora import QuantConfig
from manylora.checkpoints.quant.config import INTEGER
from manylora.config.model_folder import local_model
from manylora.doors.cli.build import main as build
from manylora.errors import ConfigError
from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps, to_integer_panels
from manylora.kernels.cpu import CpuOps
from manylora.kernels.device import open_device
from manylora.kernels.panels import BLOCKS, INTEGERS, Panels, PanelsLinear, lay_out_blocks, look_up
from manylora.kernels.quantised import QuantisedWeight, round_inputs
from manylora.kernels.reference import ReferenceOps
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import quantise
from manylora.model.weights import load_decoder


def inputs(rows: int, columns: int) -> torch.Tensor:
    """Rows of different size; one of zeros, one too small to have a scale, one with a single large value."""
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    x[3], x[4] = 0, 1e-35
    x[5, 7] = 1e4
    return x


def exact(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """The product in integers, block by block, scaled and summed in float64."""
    pad = -x.shape[1] % 32
    blocks = torch.nn.functional.pad(x, (0, pad)).double().unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1)
    largest[largest < 1e-30] = 0
    by = torch.where(largest == 0, 0, 127 / largest).float()
    whole = (blocks.float() * by[..., None]).round().long()
    assert int(whole.abs().max()) == 127
    four = weight.values.dtype == torch.uint8
    values = weight.halves().long() - 8 if four else weight.values.long()
    values = torch.nn.functional.pad(values, (0, pad)).unflatten(1, (-1, 32))
    sums = torch.einsum("tbk,nbk->tnb", whole, values).double() * (largest / 127)[:, None]
    return (sums * weight.scales.double()[None]).sum(-1)


@pytest.mark.parametrize("algo", INTEGER)
@pytest.mark.parametrize(("rows", "columns"), [(53, 32), (7, 96), (80, 800), (200, 288)])
def test_the_kernels_compute_what_exact_integers_say(
    algo: str, rows: int, columns: int, emulated: ctypes.CDLL
) -> None:
    """In the largest values there are, too, where a sum of 16 bits would end if it could."""
    torch.manual_seed(rows)
    weight = quantise(torch.randn(rows, columns), QuantConfig(algo))
    weight.values[:2] = 0 if algo == "W4A8" else -127
    x, bias = inputs(100, columns), torch.randn(rows)
    x[6] = -1
    x[7] = 1
    want = exact(x, weight) + bias
    found = []
    for library in (native.load(), emulated):
        assert library is not None
        made, linear = to_integer_panels(library, weight), PanelsLinear(library)
        assert made is not None and made.nbytes <= (rows + 31) * (columns + 31) * 1.2 + 256
        assert made.form == INTEGERS + library.integer_dots()
        for form in range(INTEGERS, made.form + 1):
            packed = replace(made, form=form)
            y = linear(x, packed, bias)
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
            for count in (1, 5, 7, 97):
                assert torch.equal(linear(x[:count], packed, bias), y[:count]), count
            found.append(y)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_a_file_times_rounded_inputs(kind: str, emulated: ctypes.CDLL) -> None:
    """As the values that gguf-py reads say, with the same bits in every form and in any company."""
    torch.manual_seed(0)
    data = random_blocks(GGMLQuantizationType[kind], 101, 1280)
    wide = torch.from_numpy(gguf.dequantize(data, GGMLQuantizationType[kind])).float()
    x, bias = inputs(100, 1280), torch.randn(101)
    want = round_inputs(x).double() @ wide.double().T + bias
    found = []
    for library in (native.load(), emulated):
        assert library is not None
        linear, dots = PanelsLinear(library), library.integer_dots()
        made = lay_out_blocks(library, kind, torch.from_numpy(data), 1280, INTEGERS + dots)
        if library is native.load():
            assert torch.equal(look_up(torch.arange(101), made), wide)
        for form in range(INTEGERS, INTEGERS + dots + 1):
            packed = replace(made, form=form)
            y = linear(x, packed, bias)
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
            for count in (1, 2, 4, 5, 7, 97):
                assert torch.equal(linear(x[:count], packed, bias), y[:count]), count
            found.append(y)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_a_gguf_file_keeps_its_weights_and_rounds_activations(kind: str, tmp_path: Path) -> None:
    """With and without compiled kernels; the file's bits stay, so an adapter and DoRA's norms are as ever."""
    model = make_model(tmp_path / "model", "llama", hidden_size=256, intermediate_size=512)
    file, ids = tmp_path / "tiny.gguf", list(range(3, 40))
    make_gguf(file, model, GGMLQuantizationType[kind], GGMLQuantizationType.Q6_K)
    folder, quant = local_model(file), QuantConfig("W4A8", exclude_modules=["*.o_proj"])
    device = open_device("cpu")

    def logits(ops: ReferenceOps, asked: QuantConfig | None) -> torch.Tensor:
        on = replace(device, ops=ops)
        decoder = load_decoder(folder, read_model_config(folder), torch.float32, on, 64, asked)
        return Driver(decoder, [ids], [None]).run()[0]

    def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((found - wanted).pow(2).mean().sqrt())

    exact, found = logits(device.ops, None), logits(device.ops, quant)
    noise = error(found, exact)
    assert 1e-4 * float(exact.std()) < noise < 0.1 * float(exact.std())
    assert error(found, logits(CpuOps(), quant)) < 0.5 * noise  # inputs between two steps are rounded apart
    assert not torch.equal(found, logits(device.ops, QuantConfig("W4A8")))
    with pytest.raises(ConfigError, match=r"GGUF file is quantised already.* W8A8 or W4A8, which keep"):
        logits(device.ops, QuantConfig("W8A16"))
    build_it = ["--model_dir", str(file), "--output_dir", str(tmp_path / "built"), "--quant_algo", "W4A8"]
    assert build(build_it) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algo", INTEGER)
def test_without_a_compiler_the_same_is_computed(algo: str, dtype: torch.dtype) -> None:
    weight, ops = quantise(torch.randn(48, 96).to(dtype), QuantConfig(algo)), open_device("cpu").ops
    x, bias = torch.randn(11, 96).to(dtype), torch.randn(48).to(dtype)
    packed = ops.pack(weight)
    assert isinstance(packed, Panels) == isinstance(ops, CompiledOps)
    slow = CpuOps()
    found, want = ops.linear(x, packed, bias), slow.linear(x, slow.pack(weight), bias)
    assert found.dtype == want.dtype == dtype
    torch.testing.assert_close(
        found.double(), want.double(), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-4
    )


def test_four_bits_without_offsets() -> None:
    """The value farthest from 0 is met up to the rounding of scales; others to half a step, or at the end."""
    weight = torch.randn(32, 128)
    weight[3] = 0
    made = quantise(weight, QuantConfig("W4A8"))
    assert made.group_size == 32 and made.rounds_inputs and made.offsets is None
    assert torch.equal(made.scales.bfloat16().float(), made.scales)
    groups, found = weight.view(32, 4, 32), made.wide().view(32, 4, 32)
    steps = made.scales.abs()[..., None]
    inside = (groups / made.scales[..., None]) <= 7.5
    error = (found - groups).abs()
    assert (error[inside] <= (0.54 * steps.expand_as(error))[inside]).all() and (error <= 1.04 * steps).all()
    assert not made.wide()[3].any()


@pytest.mark.parametrize("algo", INTEGER)
def test_a_gpu_refuses_them_by_name(tmp_path: Path, algo: str) -> None:
    model, built = make_model(tmp_path / "model", "llama"), tmp_path / "built"
    build(["--model_dir", str(model), "--output_dir", str(built), "--quant_algo", algo])
    device = replace(open_device("cpu"), torch=torch.device("cuda", 0), name="a GPU")
    for folder, quant in ((model, QuantConfig(algo)), (built, None)):
        with pytest.raises(ConfigError, match=rf"{algo} is for CPUs.* use W8A16 or W4A16 or FP8 there"):
            load_decoder(folder, read_model_config(folder), torch.float32, device, quant=quant)

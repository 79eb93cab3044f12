"""Protects the CPU's kernels: the compiled ones and those of torch say what the reference says; compilers
round each product; there is one OpenMP runtime. Products of integers
are what exact integers say, in every form and in any company; a GPU refuses W8A8 and W4A8.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from driver import Driver
from gguf import GGMLQuantizationType
from gguf_files import make_gguf, random_blocks
from levels import PARAMS, open_library
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
from manylora.kernels.reference import ACTIVATIONS, ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import AttentionBatch, AttentionParams, LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import quantise
from manylora.model.weights import load_decoder
from manylora.system.compiler import Source, compile_library, find_compiler, find_levels


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [None, "magnitude and bias"])
@pytest.mark.parametrize("count", [7, 75])
@pytest.mark.parametrize(
    ("in_dim", "width", "rank"),
    [(1, 1, 5), (53, 21, 1), (96, 300, 30), (160, 1100, 5), (300, 52, 20), (48, 36, 550)],
)
def test_adapters_of_any_size_add_the_same_alone_and_in_company(
    ops: CpuOps, in_dim: int, width: int, rank: int, count: int, dora: str | None, pool: torch.dtype
) -> None:
    torch.manual_seed(0)
    a, b, magnitude = torch.randn(rank, in_dim), torch.randn(rank, width) / rank, torch.rand(width)
    a, b, magnitude = (part.to(pool) for part in (a, b, magnitude))
    used = (a.flatten(), b.flatten(), magnitude) if dora else (a.flatten(), b.flatten())
    flat = torch.cat((torch.full((3,), float("nan"), dtype=pool), *used))
    rows = {(0, 0): LoraRow(3, RowFormat(rank, bool(dora)))}
    x, y = torch.randn(count, in_dim), torch.randn(count, width + 2)
    bias = torch.randn(width + 2) if dora else None
    got, target = y.clone(), LoraTarget(0, 1, width)
    ops.lora_add(got, x, LoraBatch(flat, (LoraSegment(0, count, rows),)), 0, (target,), bias)
    want = y[:, 1:-1].double() + x.double() @ a.double().T @ b.double()
    if dora:
        shift = bias[1:-1].double()
        want = (want - shift) * magnitude.double() + shift
    torch.testing.assert_close(got[:, 1:-1].double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(got[:, [0, -1]], y[:, [0, -1]]), "a column of another target was touched"
    if type(ops) is CpuOps:
        return  # products of torch are free to sum in another order
    for start, stop in [(0, 1), (1, 3), (2, 6), (3, 40), (count - 1, count)]:
        part = slice(start, min(stop, count))
        some, batch = y[part].clone(), LoraBatch(flat, (LoraSegment(0, len(y[part]), rows),))
        ops.lora_add(some, x[part], batch, 0, (target,), bias)
        assert torch.equal(some, got[part]), (start, stop)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (30, 0.3), (None, 50.0)])
@pytest.mark.parametrize("dim", [10, 16, 64, 72, 80, 128, 256])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_decoded_row_keeps_its_bits_in_company(
    ops: CpuOps, kept: torch.dtype, dim: int, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(dim)
    size, heads, kv_heads, count = 8, 6, 2, 11
    lengths = [1 + 9 * i for i in range(count)]
    columns = -(-max(lengths) // size)
    k, v = torch.randn(2, count * columns, size, kv_heads, dim).to(kept)
    table = torch.randperm(count * columns).view(count, columns).int()
    nothing = torch.empty(0, dtype=torch.int64)
    q = torch.randn(count, heads, dim)
    batch = AttentionBatch(range(count + 1), lengths, table, nothing)
    # Below, among and above the scores.
    sinks = torch.linspace(-9, 9, heads) if window is None else None
    params = AttentionParams(0.2, window, softcap, sinks)
    found = ops.attention(q, k, v, batch, params)
    want = ReferenceOps().attention(q.double(), k.double(), v.double(), batch, params)
    atol = 1e-5 if type(ops) is CpuOps else 5e-6  # plain x86-64 rounds each product: 3.2e-6
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=atol)
    if type(ops) is CpuOps:
        return  # products of torch are free to sum in another order
    for row in range(count):
        alone = AttentionBatch((0, 1), lengths[row : row + 1], table[row : row + 1], nothing)
        assert torch.equal(ops.attention(q[row : row + 1], k, v, alone, params)[0], found[row])
    # Numbers of another type are widened exactly, so it makes no difference in which type they are kept.
    assert torch.equal(ops.attention(q, k.float(), v.float(), batch, params), found)


@pytest.mark.parametrize("columns", [2, 33, 130, 2500])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_weights_are_read_as_they_are_and_rows_keep_their_bits(
    compiled: Any, columns: int, kept: torch.dtype
) -> None:
    """Inputs over several blocks, and an odd number of them; each row alone and in company."""
    ops = CompiledOps(compiled)
    torch.manual_seed(columns)
    weight, x, bias = torch.randn(101, columns).to(kept), torch.randn(40, columns), torch.randn(101)
    packed = ops.pack(weight)
    assert isinstance(packed, Panels)
    assert packed.values.dtype == (kept if columns % 2 == 0 else torch.float32)
    found = ops.linear(x, packed, bias)
    want = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))
    for count in (1, 7, 8, 9, 16, 17, 25):
        assert torch.equal(ops.linear(x[:count], packed, bias), found[:count]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_linear_is_the_linear(ops: CpuOps, rows: int, dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(96, 64).to(dtype)
    bias = torch.randn(96).to(dtype) if biased else None
    want = torch.nn.functional.linear(x, weight, bias)
    got = ops.linear(x, ops.pack(weight), bias)
    torch.testing.assert_close(
        got, want, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=1e-4 if dtype == torch.float32 else 0.2
    )


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("rows", "dim", "turned"), [(3, 64, 64), (70, 24, 8), (5, 10, 0), (2, 256, 100), (3, 300, 300)]
)
def test_heads_are_turned_and_stored(
    ops: CpuOps, rows: int, dim: int, turned: int, dtype: torch.dtype, kept: torch.dtype
) -> None:
    torch.manual_seed(0)
    joined = torch.randn(rows, 8 * dim).to(dtype)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in joined.split((4 * dim, 2 * dim, 2 * dim), 1))
    before, slots = joined.clone(), torch.randperm(5 * 16)[:rows]
    batch = AttentionBatch((0, rows), (rows,), torch.zeros(1, 1, dtype=torch.int32), slots)
    rotary = (torch.randn(rows, turned).to(dtype), torch.randn(rows, turned).to(dtype)) if turned else None
    answers = []
    for one in (ReferenceOps(), ops):
        caches = torch.zeros(2, 5, 16, 2, dim).to(kept)
        answers.append((one.rotate_and_store(q, k, v, rotary, caches[0], caches[1], batch), caches))
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    (want, expected), (got, found) = answers
    torch.testing.assert_close(got, want, **close)
    near = {"rtol": 0.008, "atol": 1e-6} if kept != dtype else close  # one unit in the last place of bfloat16
    torch.testing.assert_close(found, expected, **near)
    assert torch.equal(joined, before), "its input was changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_norms_and_gates_are_those_of_the_reference(ops: CpuOps, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = (4 * torch.randn(rows, 300)).to(dtype)
    x, delta, weight = wide[:, :100], wide[:, 150:250], torch.randn(100).to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    reference = ReferenceOps()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **close)
    pairs = zip(
        ops.add_rms_norm(x, delta, weight, 1e-5),
        reference.add_rms_norm(x, delta, weight, 1e-5),
        strict=True,
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want, **close)
    wide[:, ::7] *= 40  # where exp is infinite, or nothing; products reach 30,000
    close["atol"] *= 20
    for activation in ACTIVATIONS:
        got, want = ops.gated(wide, activation), reference.gated(wide, activation)
        torch.testing.assert_close(got, want, **close)
        if rows and dtype == torch.float32 and isinstance(ops, CompiledOps):
            assert torch.equal(ops.gated(wide[:1], activation), got[:1])


@pytest.mark.parametrize("level", PARAMS)
def test_silu_is_exact_to_rounding(level: str) -> None:
    """The exponential is within two units of the last place, for numbers of any size."""
    x = torch.linspace(-20, 20, 4096)
    found = CompiledOps(open_library(level)).gated(torch.cat((torch.ones_like(x), x))[None], "silu")[0]
    torch.testing.assert_close(found, F.silu(x.double()).float(), rtol=1e-6, atol=1e-12)


def test_no_compiler_joins_a_product_and_a_sum(tmp_path: Path) -> None:
    """With the options of the kernels it rounds both."""
    level, compiler = find_levels()[0], find_compiler()
    if compiler is None or compiler.kind == "zig":  # zig's kernels are the ones that other tests run
        pytest.skip("needs another compiler than zig")
    file, library = tmp_path / "sum.c", tmp_path / "sum.so"
    file.write_text("float sum(float a, float b, float c) { return a * b + c; }", encoding="utf-8")
    compile_library(compiler, Source("sum", (file,), native.SOURCE.options), level, library)
    add = ctypes.CDLL(str(library)).sum
    add.restype, add.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    assert add(1 + 2**-12, 1 + 2**-12, -1 - 2**-11) == 0, "a product that was not rounded leaves 2**-24"


def test_torchs_runtime_is_the_only_one() -> None:
    if native.load() is None:
        pytest.skip("there are no kernels here")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    names = [Path(name).name for name in mapped if "/" in name]
    assert len([name for name in names if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1


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

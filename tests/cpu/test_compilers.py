"""Protects that every compiler makes the same bits of the C kernels, on the threads of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_adapter_kernels as adapter_kernels
import test_recurrent_kernels as recurrent
import torch

from manylora.checkpoints.quant.config import INTEGER, QuantConfig
from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.panels import Panels
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.reference import ACTIVATIONS
from manylora.kernels.spec import AttentionBatch, AttentionParams
from manylora.model.quant import quantise
from manylora.system.compiler import Source, build_library, compile_library, find_compiler, find_levels


@pytest.fixture(scope="module")
def both() -> list[CompiledOps]:
    """The wheel's kernels, and this machine's compiler's, for the best level of instruction sets."""
    level, compiler = find_levels()[0], find_compiler()
    wheel, origin = native.open_level(level)
    if compiler is None or compiler.kind == "zig" or origin != "of the wheel":
        pytest.skip("needs kernels that zig made, and another compiler")
    made = native.open_library(build_library(compiler, native.SOURCE, level))
    return [CompiledOps(library) for library in (wheel, made)]


def adapters(ops: CompiledOps) -> Iterator[torch.Tensor]:
    """Of any rank, with DoRA, shared, scaled and mixed; alone, few and many rows."""
    for pool in (torch.float32, torch.bfloat16):
        for lengths in ([1] * 6, [2, 9, 1, 3, 1, 20], [3, 70, 5, 30, 4, 1]):
            batch, _ = adapter_kernels.weighed(pool, lengths)
            total = sum(lengths) + len(lengths) + 1
            x, y = torch.randn(total, adapter_kernels.IN), torch.randn(total, sum(adapter_kernels.WIDTHS))
            yield adapter_kernels.add(ops, y, x, batch, torch.randn(y.shape[1]))


def linear_layers(ops: CompiledOps) -> Iterator[torch.Tensor]:
    def weights(rows: int, columns: int) -> Iterator[torch.Tensor | QuantisedWeight]:
        plain = torch.randn(rows, columns)
        scales, offsets = torch.rand(2, rows, columns // 12)
        eight = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
        four = torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8)
        yield from (plain, plain.bfloat16(), QuantisedWeight(eight, scales, offsets))
        yield from (QuantisedWeight(four, scales, offsets), QuantisedWeight(four, scales))
        yield from (quantise(plain, QuantConfig(algo)) for algo in INTEGER)

    for rounds in (False, ops.has_bfloat16):
        ops.rounds_inputs = rounds
        for weight in weights(101, 1344):
            packed = ops.pack(weight)
            assert isinstance(packed, Panels)
            for rows in (1, 3, 9, 40):
                yield ops.linear(torch.randn(rows, 1344), packed, torch.randn(101))


def attention(ops: CompiledOps) -> Iterator[torch.Tensor]:
    lengths = [1, 17, 50]
    table, nothing = torch.randperm(21).view(3, 7).int(), torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(range(4), lengths, table, nothing)
    for dim in (10, 64, 80):
        k, v = torch.randn(2, 21, 8, 2, dim)
        for params in (AttentionParams(0.2), AttentionParams(0.2, 30, 0.3), AttentionParams(1, None, 50.0)):
            yield ops.attention(torch.randn(3, 6, dim), k, v, batch, params)
        sinks = AttentionParams(0.2, sinks=torch.randn(6))
        yield ops.attention(torch.randn(3, 6, dim), k, v, batch, sinks)


def rows(ops: CompiledOps) -> Iterator[torch.Tensor]:
    x, delta, weight = torch.randn(5, 300), torch.randn(5, 300), torch.randn(300)
    yield ops.rms_norm(x, weight, 1e-5)
    yield from ops.add_rms_norm(x, delta, weight, 1e-5)
    for activation in ACTIVATIONS:
        yield ops.gated(8 * x, activation)
    q, k, v, cache = (torch.randn(5, heads, 72) for heads in (4, 2, 2, 2))
    batch = AttentionBatch((0, 5), (5,), torch.zeros(1, 1, dtype=torch.int32), torch.arange(5))
    caches = torch.zeros(2, 1, 5, *cache.shape[1:])
    yield ops.rotate_and_store(q, k, v, (torch.randn(5, 40), torch.randn(5, 40)), *caches, batch)
    yield caches


def recurrent_layers(ops: CompiledOps) -> Iterator[torch.Tensor]:
    rows = recurrent.table([5, 1, 7], [0, -1, 2], [0, 1, 3], [2, 0, 7], [7, -1, 8])
    for kind, shape, form in recurrent.COMPILED:
        if not form:
            layer, state = recurrent.make(kind, shape, form, 13, device=torch.device("cpu"))
            yield layer(ops, slice(None), state, rows)
            yield state.memory


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


@pytest.mark.extended
@pytest.mark.parametrize("kernels", [adapters, linear_layers, attention, rows, recurrent_layers])
def test_two_compilers_make_the_same_bits(both: list[CompiledOps], kernels: Any) -> None:
    found = []
    for ops in both:
        torch.manual_seed(0)
        found.append(list(kernels(ops)))
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other), f"result {number}: {float((one - other).abs().max())} apart"


def test_torchs_runtime_is_the_only_one() -> None:
    if native.load() is None:
        pytest.skip("there are no kernels here")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    names = [Path(name).name for name in mapped if "/" in name]
    assert len([name for name in names if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1

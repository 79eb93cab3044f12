"""Protects the kernels from what the interpreter lets pass: each launch of a model of real shape is compiled
to machine code for GPUs that need not be there. `make gpu-static` runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import re
import subprocess
import sys
import tempfile
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

capability = int(sys.argv[1])
tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

class NoGpu:
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

def dump(cubin, option):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

def spilled(cubin):
    '''Bytes of local memory per thread.'''
    usage = dump(cubin, "--dump-resource-usage")
    return max(map(int, re.search(r"STACK:(\\d+) SHARED:\\d+ LOCAL:(\\d+)", usage).groups()))

def compile_only(kernel, grid):
    def launch(*arguments, **constants):
        made = kernel.warmup(*arguments, grid=grid, **constants)
        assert made.asm["cubin"], kernel
        ptx = made.asm["ptx"]
        if kernel.__name__ == "_grouped" and constants["NARROW"] and constants["BLOCK_M"] == 64:
            assert "e4m3.e4m3" in ptx or "kind::f8f6f4" in ptx, "no FP8 units"
        narrow = len(re.findall(r"ld\\.global\\.(?:\\w+::\\w+\\.)*[bus](?:8|16) ", ptx))
        wide = ptx.count("ld.global.v4") + ptx.count("cp.async.cg")
        print(kernel.__name__, wide, narrow, made.metadata.shared, spilled(made.asm["cubin"]))
    return launch

driver.set_active(NoGpu())
JITFunction.__getitem__ = compile_only
"""
# Launches of every kernel.
LAUNCHES = """
from dataclasses import replace
import torch
from manylora.kernels.cuda.arithmetic import quantise_rows
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.recurrent import DeltaWeights
from manylora.kernels.recurrent import Mamba2Weights
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import FP8, AttentionBatch, AttentionParams, BatchLimits
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget
from triton.runtime import driver

arch = driver.active.get_current_target().arch

dtype, hidden, widths = torch.bfloat16, 4096, (4096, 1024, 1024)
targets = [LoraTarget(i, sum(widths[:i]), width) for i, width in enumerate(widths)]
pool, cache = torch.zeros(8, dtype=dtype), torch.zeros(4, 32, 8, 128, dtype=dtype)
ops = CudaOps()
ops.reserve(BatchLimits(2, 64, 4096, 32, 32, 8, 128, dtype, num_experts=8), torch.device("cpu"))
for lengths, rank, float8, weighed in (
    ([1, 1], 8, False, False), ([1, 3], 64, False, False), ([100, 30], 16, False, False),
    ([1, 1], 8, True, False), ([100, 30], 16, True, False),
    ([1, 1], 8, False, True), ([100, 30], 16, False, True),
):
    starts = [0, lengths[0], sum(lengths)]
    row = LoraRow(0, RowFormat(rank, not float8, Encoding(float8), mixed=weighed))
    if weighed:  # mixed DoRA, and a row whose matrices are shared
        row = replace(row, more=(LoraRow(0, RowFormat(rank, shared=True, mixed=True), vectors=0),))
    rows = [{(0, t.module_id): row for t in targets} for _ in lengths]
    segments = tuple(LoraSegment(*span) for span in zip(starts, starts[1:], rows))
    slots = torch.zeros(starts[-1], dtype=torch.int64)
    table = torch.zeros(2, 4, dtype=torch.int32)
    batch, lora = ops.plan(AttentionBatch(starts, [101, 102], table, slots), LoraBatch(pool, segments, 16))
    x, y, q, k = (torch.zeros(starts[-1], *s, dtype=dtype) for s in ((hidden,), (6144,), (32, 128), (8, 128)))
    ops.lora_add(y, x, lora, 0, targets, y[0])
    if rank != 64 and not float8 and not weighed:  # a batch of single tokens, and one of prompts
        ops.attention(q, cache, cache, batch, AttentionParams(0.1, 50 if rank == 8 else None))
        capped = AttentionParams(0.1, 50 if rank == 16 else None, 30.0)
        ops.attention(q, cache.to(FP8), cache.to(FP8), batch, capped)
        ops.attention(q, cache, cache, batch, AttentionParams(0.1, 50, None, torch.zeros(32)))
        ops.clamped_swiglu(y, 1.7, 7.0)
        pairs, _ = ops.pair_up(torch.zeros(starts[-1], 2, dtype=torch.int64), 8, lora)
        wide = torch.zeros(2 * starts[-1], hidden, dtype=dtype)
        ops.expert_linear(wide, pairs, (torch.zeros(widths[0], hidden, dtype=dtype),) * 8)
        ops.expert_lora_add(torch.zeros(len(wide), widths[0], dtype=dtype), wide, lora, pairs, 0, targets[:1])
ops.reserve(BatchLimits(2, 64, 4096, 32, 16, 8, 256, dtype), torch.device("cpu"))  # a Gemma's heads
cache, starts = torch.zeros(4, 32, 8, 256, dtype=dtype), [0, 100, 130]
slots = torch.zeros(130, dtype=torch.int64)
large, _ = ops.plan(AttentionBatch(starts, [101, 102], torch.zeros(2, 4, dtype=torch.int32), slots), None)
ops.attention(torch.zeros(130, 16, 256, dtype=dtype), cache, cache, large, AttentionParams(0.1, 50, 30.0))
cache = cache[..., :128].contiguous()
scales = torch.zeros(widths[0], 32, dtype=dtype)
for values, groups, offsets in (
    (torch.zeros(widths[0], hidden, dtype=torch.int8), 1, None),
    (torch.zeros(widths[0], hidden).to(FP8), 1, None),
    (torch.zeros(widths[0], hidden // 2, dtype=torch.uint8), 32, scales),
):
    table = weight_table([QuantisedWeight(values, scales[:, :groups].contiguous(), offsets)])
    quantised_rows(x, table)
    quantised_rows(x[:1], table)
    if values.dtype == FP8 and arch >= 89:
        table = weight_table([QuantisedWeight(values, scales[:, :1].contiguous(), None)], narrow=True)
        quantised_rows(x, table)
        quantised_rows(x[:1], table)
quantise_rows(x)
angles = torch.zeros(len(q), 128, dtype=dtype), torch.zeros(len(q), 128, dtype=dtype)
ops.rotate_and_store(q, k, k, angles, cache, cache, batch)
ops.rotate_and_store(q, k, k, None, cache.to(FP8), cache.to(FP8), batch)
ops.rms_norm(x, x[0], 1e-5)
ops.add_rms_norm(x, x, x[0].float(), 1e-5)
for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
    ops.gated(y, activation)
# Recurrent layers: a Granite 4, a Falcon-H1 without a norm, a Qwen 3.5, an LFM2; decoding and a prompt.
for starts in ([0, 1, 2], [0, 9, 12]):
    places = StateBatch(*(torch.zeros(n, dtype=torch.int64) for n in (3, 2, 2, 2, 2)))
    x = torch.zeros(starts[-1], 24576, dtype=dtype)
    taps, state = torch.zeros(4, 3328), RecurrentState(torch.zeros(2, 3, 3328), torch.zeros(2, 48, 64, 128))
    heads, norm = torch.zeros(48), torch.zeros(3072)
    mamba = Mamba2Weights(taps, taps[0], heads, heads, heads, norm, 1e-5, 1, 64, 128)
    for one in (mamba, replace(mamba, norm=None), replace(mamba, gate_first=False)):
        ops.mamba2(x, one, state, places)
    taps, state = torch.zeros(4, 8192), RecurrentState(torch.zeros(2, 3, 8192), torch.zeros(2, 32, 128, 128))
    delta = DeltaWeights(taps, torch.zeros(32), torch.zeros(32), torch.zeros(128), 1e-6, 16, 128)
    ops.delta_rule(x[:, :12288], x[:, 12288:12352], delta, state, places)
    ops.short_conv(x[:, :6144], torch.zeros(3, 2048), RecurrentState(torch.zeros(2, 2, 2048), heads), places)
"""


SPILLED = 16  # bytes of a thread
# By compute capability times 10: KiB of shared memory that a program may have, loads of single elements.
LIMITS = {80: (163, 24), 90: (227, 24), 100: (227, 40)}
READS_MATRICES = {"_shrink", "_expand", "_attend", "_grouped"}


@pytest.mark.extended
@pytest.mark.timeout(600)  # the machine may have much else to do
@pytest.mark.parametrize("capability", LIMITS)
def test_every_kernel_compiles_and_reads_matrices_in_wide_words(capability: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    memory, singles = LIMITS[capability]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT + LAUNCHES, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    wide: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, *counts = line.split()
        loads, narrow, shared, spilled = map(int, counts)
        wide[name] = min(wide.get(name, 1000), loads)
        # Scales and weights of outputs are read one by one, once behind the loop.
        assert name not in READS_MATRICES or narrow <= singles, f"{line}: elements one by one"
        assert shared <= memory * 1024, line
        assert spilled <= SPILLED, f"{line}: registers are spilled"
    others = {"_join", "_rotate_store", "_rms_norm", "_gated", "_clamped_swiglu", "_pair", "_tile"}
    others |= {"_quantise", "_convolve", "_keep_inputs", "_mamba2", "_delta_rule", "_finish"}
    assert set(wide) == READS_MATRICES | others
    assert all(wide[name] for name in (*READS_MATRICES, "_gated"))

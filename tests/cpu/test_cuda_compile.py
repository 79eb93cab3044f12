"""Protects the kernels from what the interpreter lets pass, without a GPU: launches of a model of real shape
are compiled to machine code (`make gpu-static`), those that pass triton's own give the driver the same bytes,
and what steps launch, the start has compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu_driver import why_not

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


def said_by(script: str, folder: Path, *arguments: object, path: Path = Path(__file__).parent) -> str:
    """By a process without the interpreter. path: of what the script imports."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(path)}
    file = folder / "script.py"  # triton reads kernels' source
    file.write_text(script, encoding="utf-8")
    command = [sys.executable, str(file), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SPILLED = 16  # bytes of a thread
# By compute capability times 10: KiB of shared memory that a program may have, loads of single elements.
LIMITS = {80: (163, 24), 90: (227, 24), 100: (227, 40)}
READS_MATRICES = {"_shrink", "_expand", "_attend", "_grouped"}


@pytest.mark.extended
@pytest.mark.timeout(600)  # the machine may have much else to do
@pytest.mark.parametrize("capability", LIMITS)
def test_every_kernel_compiles_and_reads_matrices_in_wide_words(capability: int, tmp_path: Path) -> None:
    memory, singles = LIMITS[capability]
    wide: dict[str, int] = {}
    for line in said_by(SCRIPT + LAUNCHES, tmp_path, capability).splitlines():
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


NOTED = """
import re
import sys
from pathlib import Path
from fake_gpu_driver import install

fake = install(Path(sys.argv[1]))

import torch
import triton
from triton.runtime.jit import JITFunction
from manylora.kernels.cuda import arithmetic, attention, grouped, launch, lora, recurrent, routing, rows

run, known = JITFunction.run, 0

def counted(*arguments, **options):
    global known
    known += 1
    return run(*arguments, **options)

JITFunction.run = counted

def by_triton(kernel, grid, arguments, constants):
    kernel[grid](*arguments, **constants)  # compiles
    return fake.noted(lambda: kernel[grid](*arguments, **constants))

def same(kernel, grid, *arguments, **constants):
    '''The driver gets from both the same; the second launch of ours is not triton's.'''
    want = by_triton(kernel, grid, arguments, constants)
    first = fake.noted(lambda: launch.launch(kernel, grid, *arguments, **constants))
    before = known
    second = fake.noted(lambda: launch.launch(kernel, grid, *arguments, **constants))
    name = f"{kernel.__name__} {grid} {constants}"
    assert want == first == second and len(want) == 1, name
    return known == before
"""

EVERY = """
seen = set()

def checked(kernel, grid, *arguments, **constants):
    assert same(kernel, grid, *arguments, **constants), f"{kernel.__name__} is launched by triton each time"
    seen.add(kernel.__name__)

modules = arithmetic, attention, grouped, lora, recurrent, routing, rows
for module in modules:
    module.launch = checked
"""
COUNTED = """
kernels = {k: v for m in modules for k, v in vars(m).items()
           if isinstance(v, JITFunction) and v.module == m.__name__}
words = {name: set(re.findall(r"\\w+", kernel.src)) for name, kernel in kernels.items()}
called = {name for name in kernels if any(name in words[other] for other in kernels if other != name)}
assert len(seen) > 10 and not seen & called, seen
print(*sorted(kernels.keys() - called - seen))
"""

KEYS = """
import triton.language as tl

fake.compiled.clear()  # what others were compiled for

@triton.jit(do_not_specialize=["changing"])
def kernel(x, y, fixed, changing, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):
    tl.store(x, fixed + changing * scale)

numbers = torch.zeros(256)
whole, shifted = numbers, numbers[1:]
wide, empty = numbers.double(), torch.zeros(0)
first = dict(SIZE=16, FLAG=True, num_warps=4)
cases = [((whole, whole, 32, 7, 0.5), first)]
for tensor in (shifted, wide, empty, numbers[4:], numbers.half(), numbers.int(), torch.nn.Parameter(numbers)):
    cases += [((tensor, whole, 32, 7, 0.5), first), ((whole, tensor, 32, 7, 0.5), first)]
for number in (0, 1, 2, 16, 17, -16, 2**31 - 1, 2**31, 2**33, -2**31, -2**31 - 1, 2**63, True, False):
    cases += [((whole, whole, number, 7, 0.5), first), ((whole, whole, 32, number, 0.5), first)]
cases += [((whole, whole, 32, 7, scale), first) for scale in (1.0, 0.0, 16.0, 1, 16, None)]
for change in (dict(SIZE=32), dict(SIZE=1), dict(SIZE=True), dict(FLAG=False), dict(FLAG=1),
               dict(num_warps=8), dict(num_stages=2), dict(launch_pdl=True)):
    cases.append((cases[0][0], first | change))
order = [*range(len(cases)), *range(len(cases))[::-1], *range(0, len(cases), 3)]
by_us = 0
for number in order:
    arguments, constants = cases[number]
    grid = ((3,), (3, 2), (3, 2, 4))[number % 3]
    by_us += same(kernel, grid, *arguments, **constants)
fake.device = 1  # other contexts have functions of their own
for arguments, constants in cases[:4]:
    assert same(kernel, (1,), *arguments, **constants)
functions = {made.function for made in fake.compiled}
assert len(functions) == len(fake.compiled) > 20, len(functions)
print(by_us / len(order))
calls = []
triton.knobs.runtime.launch_enter_hook.add(calls.append)
same(kernel, (1,), *cases[0][0], **first)
assert len(calls) == 4 and calls[0].get()["name"] == "kernel", "a profiler sees every launch"
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_driver_gets_of_our_launches_what_it_gets_of_tritons(tmp_path: Path) -> None:
    """Of every kernel, and of one with whatever triton makes variants for. fake_gpu_driver.py stands for the
    driver's library; what is between is triton's."""
    script = NOTED + EVERY + LAUNCHES + COUNTED + KEYS
    missing, share = said_by(script, tmp_path, tmp_path).splitlines()
    assert missing == "", "never launched"
    assert float(share) > 0.7, "most are not launched by triton"


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
VARIANTS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

class NoGpu:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

seen, phase = {}, "start"

def run(kernel, *arguments, grid, warmup, **constants):
    _, cache, _, _, binder = kernel.device_caches[0]
    _, specialised, options = binder(*arguments, **constants)
    seen.setdefault((kernel.__name__, compute_cache_key(cache, specialised, options)), phase)

driver.set_active(NoGpu())
JITFunction.run = run
product = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight))
torch.nn.functional.linear = product  # nothing is computed

import gpu_world
from gpu_world import ALL, World
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device

gpu_world.SHAPES["tiny"] = (512, 1024, 1, 8, 2, 64, 64)
gpu_world.PAGE = 32
World._pool = lambda self: torch.zeros(2**24, dtype=self.dtype)

def capture(function):
    function()
    output = function()
    return lambda: output

device = Device(torch.device("cpu"), CudaOps(), "none", capture)
world = World("tiny", device, torch.bfloat16, 128, 1000)
phase = "serving"

def step(lengths, count=0, rank=8, modules=ALL):
    adapters = world.adapters(count, (rank,), modules) if count else None
    inputs = world.inputs(lengths, world.batch(adapters, lengths))
    world.plain(inputs)
    if set(lengths) == {1}:
        world.decode(inputs)

for count in (0, 1, 3, 8):
    for rows in (8, 9, 16, 32, 128):
        step([1] * rows, count)
    step([1] * 7 + [100], count)
    step([1] * 7 + [37, 200], count)
for rank in (16, 64, 100):
    for modules in ((1, 3), (1, 2, 3), (1, 2, 3, 4), (5, 6), ALL):
        for rows, count in ((1, 1), (8, 8), (32, 1), (32, 3)):
            step([1] * rows, count, rank, modules)
        step([1, 1, 90], 1, rank, modules)
late = sorted(name for (name, _), when in seen.items() if when != "start")
print(len(seen) - len(late), "at start", late)
"""


def test_no_variant_is_compiled_while_serving(tmp_path: Path) -> None:
    """Nothing is compiled here: triton's own binder says which variant of a kernel a launch asks for."""
    count, late = said_by(VARIANTS, tmp_path, path=BENCHMARKS).split(" at start ")
    assert late.strip() == "[]"
    assert int(count) > 15

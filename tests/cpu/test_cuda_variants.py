"""Protects requests from waiting for a compiler: what steps launch, the start has compiled.

Nothing is compiled here: triton's own binder says which variant of a kernel a launch asks for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
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
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    count, late = done.stdout.split(" at start ")
    assert late.strip() == "[]"
    assert int(count) > 15

"""Protects the launches that pass triton's own: the driver gets the same bytes from both.

A stub stands for the driver's library (fake_gpu_driver.py). What is between is triton's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu_driver import why_not
from test_cuda_compile import LAUNCHES

START = """
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


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process says of all launches: a line of each part."""
    folder = tmp_path_factory.mktemp("launches")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parent)}
    script = START + EVERY + LAUNCHES + COUNTED + KEYS
    (folder / "launches.py").write_text(script, encoding="utf-8")  # triton reads kernels' source
    command = [sys.executable, str(folder / "launches.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
class TestDirectLaunch:
    def test_every_kernel_gets_what_triton_would_give_it(self, said: list[str]) -> None:
        assert said[0] == "", f"never launched: {said[0]}"

    def test_a_variant_depends_on_all_that_triton_specialises_on(self, said: list[str]) -> None:
        share = float(said[1])
        assert share > 0.7, "most are not launched by triton"

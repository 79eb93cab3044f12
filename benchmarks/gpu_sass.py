"""Reads the machine code of a compiled kernel: registers, spills, widths of loads, and its main loop.

Uses the tools in triton's wheel. No GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

__all__ = ["UNITS", "MachineCode", "Unit", "instructions", "read_code", "registers_of"]

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
TENSOR_CORES = ("HGMMA", "QGMMA", "HMMA", "QMMA", "IMMA", "UTCHMMA", "UTCQMMA", "OMMA")
LOADS = ("LDG", "LDGSTS")


@dataclass(frozen=True)
class Unit:
    """A streaming multiprocessor. shared: bytes of shared memory. most_shared: maximum per block. warps:
    maximum number of resident warps."""

    shared: int
    most_shared: int
    warps: int
    registers: int = 65536


UNITS = {
    80: Unit(164 * 1024, 163 * 1024, 64),
    90: Unit(228 * 1024, 227 * 1024, 64),
    100: Unit(228 * 1024, 227 * 1024, 64),
}


@dataclass(frozen=True)
class MachineCode:
    """registers: per thread. spilled: bytes per thread in local memory. shared: bytes per block. blocks: how
    many fit on a unit. loads: number of loads from global memory, by width in bits. loop: number of each
    operation in the main loop. instructions: in the main loop."""

    registers: int
    spilled: int
    shared: int
    blocks: int
    loads: dict[int, int]
    loop: Counter[str]
    instructions: int

    @property
    def tensor_cores(self) -> str:
        """The tensor core instruction in the main loop, or an empty string."""
        return next((name for name in TENSOR_CORES if self.loop[name]), "")

    @property
    def barriers(self) -> int:
        return self.loop["BAR"]


def read_code(cubin: bytes, unit: Unit, shared: int, warps: int) -> MachineCode:
    """cubin: one kernel. shared: bytes of shared memory per block. warps: per block."""
    text = _dump(cubin, "-sass")
    registers, spilled = registers_of(cubin)
    code = [(int(m[1], 16), m[2], m[3]) for m in LINE.finditer(text)]
    loop = _main_loop(code)
    loads = Counter(_bits(name) for _, name, _ in code if name.split(".")[0] in LOADS)
    return MachineCode(
        registers=registers,
        spilled=spilled,
        shared=shared,
        blocks=_blocks(unit, registers, shared, warps),
        loads=dict(sorted(loads.items())),
        loop=Counter(name.split(".")[0] for _, name, _ in loop),
        instructions=len(loop),
    )


def registers_of(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread."""
    usage = _dump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, _, local = map(int, found.groups())
    return registers, max(stack, local)


def instructions(cubin: bytes) -> list[str]:
    """The names of all instructions, in order."""
    return [match[2] for match in LINE.finditer(_dump(cubin, "-sass"))]


def _dump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _main_loop(code: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """The innermost loop with the most tensor core instructions; without any, the one that loads the most."""
    spans = []
    for at, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    bodies = [[line for line in code if low <= line[0] <= high] for low, high in inner]
    return max(bodies, key=_weight, default=[])


def _weight(body: list[tuple[int, str, str]]) -> tuple[int, int]:
    names = [name for _, name, _ in body]
    cores = sum(name.split(".")[0] in TENSOR_CORES for name in names)
    return cores, sum(_bits(name) for name in names if name.split(".")[0] in LOADS)


def _bits(name: str) -> int:
    """The width of a load in bits, from its instruction's name."""
    parts = name.split(".")
    for bits in (256, 128, 64):
        if str(bits) in parts:
            return bits
    return 8 if {"U8", "S8"} & set(parts) else 16 if {"U16", "S16"} & set(parts) else 32


def _blocks(unit: Unit, registers: int, shared: int, warps: int) -> int:
    by_registers = unit.registers // (-(-registers * 32 // 256) * 256) // warps
    by_shared = unit.shared // (-(-(shared + 1024) // 128) * 128)  # the system reserves 1 KB per block
    return min(by_registers, by_shared, unit.warps // warps, 32)

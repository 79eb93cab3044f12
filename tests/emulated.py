"""A compiled library for aarch64, called from a process of another architecture.

Its code runs in an emulator that sees this process's memory where it is, so that pointers are passed as they
are and the kernels' own tests can call it. What it asks of the C library is answered here.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from elftools.elf.elffile import ELFFile
from unicorn import UC_ARCH_ARM64, UC_HOOK_CODE, UC_HOOK_MEM_UNMAPPED, UC_MODE_ARM, UC_PROT_ALL, Uc
from unicorn import arm64_const as names

from manylora.kernels.native import FUNCTIONS

CHUNK = 2**24  # of this process's memory, that the emulator is shown at once
STACK = 2**23
PAGE = 2**12
RELATIVE, GLOBAL, JUMP, ABSOLUTE, TLS = 1027, 1025, 1026, 257, 1031  # R_AARCH64_…
RETURN = bytes.fromhex("c0035fd6")
THREAD_OFFSET = bytes.fromhex("000440f9") + RETURN  # ldr x0, [x0, #8]; ret
INTEGERS = [getattr(names, f"UC_ARM64_REG_X{n}") for n in range(8)]
FLOATS = [getattr(names, f"UC_ARM64_REG_S{n}") for n in range(8)]


class EmulatedLibrary:
    """The functions of kernels.native by their names, as ctypes.CDLL has them."""

    def __init__(self, path: Path) -> None:
        self._machine = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._machine.hook_add(UC_HOOK_MEM_UNMAPPED, self._show)
        enabled = self._machine.reg_read(names.UC_ARM64_REG_CPACR_EL1) | 3 << 20  # floats and vectors
        self._machine.reg_write(names.UC_ARM64_REG_CPACR_EL1, enabled)
        self._busy = threading.Lock()  # it has one processor
        self._shown: set[int] = set()
        self._rooms: list[Any] = []
        self._stack = self._room(STACK) + STACK - PAGE
        self._thread = self._room(PAGE)
        self._machine.reg_write(names.UC_ARM64_REG_TPIDR_EL0, self._thread)
        self._gates = self._room(PAGE)
        self._answers: dict[int, Callable[[], None]] = {}
        self._stop = self._gate(None)
        self._descriptor = self._gate(None, THREAD_OFFSET)
        with path.open("rb") as file:
            self._names = self._load(ELFFile(file))
        begin, end = self._gates, self._gates + PAGE
        self._machine.hook_add(UC_HOOK_CODE, lambda machine, at, *_: self._answer(at), None, begin, end)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # of this class, which has none
            raise AttributeError(f"the C library's part has no {name}")
        kinds, _, given = FUNCTIONS.get(name, ">i").partition(">")
        try:
            start = self._names[name]
        except KeyError:
            raise AttributeError(name) from None

        def call(*arguments: Any) -> int | None:
            with self._busy:
                return self._call(start, kinds, arguments, given)

        return call

    def _call(self, start: int, kinds: str, arguments: tuple[Any, ...], given: str) -> int | None:
        whole, real, stacked = list(INTEGERS), list(FLOATS), []
        for kind, value in zip(kinds, arguments, strict=True):
            if kind == "f":
                bits = struct.unpack("<I", struct.pack("<f", value))[0]
            else:
                bits = int(value or 0) & 2**64 - 1
            registers = real if kind == "f" else whole
            if registers:
                self._machine.reg_write(registers.pop(0), bits)
            else:
                stacked.append(bits)
        top = (self._stack - 8 * len(stacked)) & ~15
        ctypes.memmove(top, struct.pack(f"<{len(stacked)}Q", *stacked), 8 * len(stacked))
        self._machine.reg_write(names.UC_ARM64_REG_SP, top)
        self._machine.reg_write(names.UC_ARM64_REG_LR, self._stop)
        self._machine.emu_start(start, self._stop)
        result = self._machine.reg_read(names.UC_ARM64_REG_X0)
        return (result ^ 2**63) - 2**63 if given else None

    def _show(self, machine: Uc, access: int, address: int, *_: Any) -> bool:
        """Memory that the code reaches for the first time."""
        chunk = address // CHUNK * CHUNK
        if chunk in self._shown or not chunk:
            return False
        machine.mem_map_ptr(chunk, CHUNK, UC_PROT_ALL, chunk)
        self._shown.add(chunk)
        return True

    def _room(self, size: int) -> int:
        room = np.zeros(size + PAGE, np.uint8)
        self._rooms.append(room)
        return (room.ctypes.data + PAGE - 1) // PAGE * PAGE

    def _gate(self, answer: Callable[[], None] | None, code: bytes = RETURN) -> int:
        """An address to call, where `answer` is asked first."""
        at = self._gates + 16 * len(self._answers)
        ctypes.memmove(at, code, len(code))
        self._answers[at] = answer or (lambda: None)
        return at

    def _answer(self, at: int) -> None:
        if at in self._answers:
            self._answers[at]()

    def _load(self, elf: ELFFile) -> dict[str, int]:
        """Its segments where this process has room for them, and the addresses of its functions."""
        segments = [one for one in elf.iter_segments() if one["p_type"] == "PT_LOAD"]
        base = self._room(max(one["p_vaddr"] + one["p_memsz"] for one in segments))
        for one in segments:
            ctypes.memmove(base + one["p_vaddr"], one.data(), one["p_filesz"])
        for one in elf.iter_segments():
            if one["p_type"] == "PT_TLS":
                ctypes.memmove(self._thread + 64, one.data(), one["p_filesz"])
        symbols = elf.get_section_by_name(".dynsym")
        gates: dict[str, int] = {}
        for section in filter(None, map(elf.get_section_by_name, (".rela.dyn", ".rela.plt"))):
            for entry in section.iter_relocations():
                symbol = symbols.get_symbol(entry["r_info_sym"])
                words = self._relocated(base, entry, symbol, gates)
                ctypes.memmove(base + entry["r_offset"], words, len(words))
        return {one.name: base + one["st_value"] for one in symbols.iter_symbols() if one["st_value"]}

    def _relocated(self, base: int, entry: Any, symbol: Any, gates: dict[str, int]) -> bytes:
        kind, more = entry["r_info_type"], entry["r_addend"]
        if kind == RELATIVE:
            return struct.pack("<Q", base + more)
        if kind == TLS:
            return struct.pack("<QQ", self._descriptor, 64 + symbol["st_value"] + more)
        assert kind in (GLOBAL, JUMP, ABSOLUTE), kind
        if symbol["st_value"]:
            return struct.pack("<Q", base + symbol["st_value"] + more)
        if symbol["st_info"]["bind"] == "STB_WEAK":
            return bytes(8)
        if symbol.name not in gates:
            gates[symbol.name] = self._gate(getattr(self, f"_c_{symbol.name}"))
        return struct.pack("<Q", gates[symbol.name])

    def _taken(self, count: int) -> list[int]:
        return [self._machine.reg_read(register) for register in INTEGERS[:count]]

    def _c_memcpy(self) -> None:
        ctypes.memmove(*self._taken(3))

    _c_memmove = _c_memcpy

    def _c_memset(self) -> None:
        ctypes.memset(*self._taken(3))

    def _c_pread(self) -> None:
        file, target, size, at = self._taken(4)
        read = os.pread(file & 2**32 - 1, size, at)
        ctypes.memmove(target, read, len(read))
        self._machine.reg_write(INTEGERS[0], len(read))

    _c_pread64 = _c_pread

    def _c_erff(self) -> None:
        (value,) = struct.unpack("<f", struct.pack("<I", self._machine.reg_read(FLOATS[0]) & 2**32 - 1))
        self._machine.reg_write(FLOATS[0], struct.unpack("<I", struct.pack("<f", math.erf(value)))[0])

    def _c_log1pf(self) -> None:
        (value,) = struct.unpack("<f", struct.pack("<I", self._machine.reg_read(FLOATS[0]) & 2**32 - 1))
        self._machine.reg_write(FLOATS[0], struct.unpack("<I", struct.pack("<f", math.log1p(value)))[0])

    def _c_sched_yield(self) -> None: ...

    _c_syscall = _c_sched_getaffinity = _c___sched_cpucount = _c_sched_yield  # of threads: there is one

    def _c_getauxval(self) -> None:
        """A processor without extensions."""
        self._machine.reg_write(INTEGERS[0], 0)

    def _c___errno_location(self) -> None:
        self._machine.reg_write(INTEGERS[0], self._thread + PAGE - 8)

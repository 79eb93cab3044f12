"""Launches kernels, or only compiles them, several at a time in threads; and the sizes of their blocks.

Numbers that change from batch to batch are not specialised (`do_not_specialize`, and not `constexpr`). This
keeps the number of variants small, so that all can be compiled before the first request.

triton's own launch looks up a kernel's variant each time, which takes several times as long as the launch.
Here only the first launch of a variant is triton's. Later ones use our own key, of everything that triton
specialises on, and more: a key that is too fine only makes triton look it up once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_THREADS = 8  # for compilation; more would need much memory
MOST_VARIANTS = 4096  # cached variants; a model needs a few dozen
ALIGN_BYTES = 16  # triton specialises on addresses that are a multiple of this
INT32 = 2**31  # larger integers are passed in 64 bits


@dataclass(frozen=True)
class Blocks:
    """size: along the kernel's main dimension. warps, stages: triton's num_warps and num_stages. in_pieces:
    whether queries are read again for each block of keys, because registers cannot hold them all.
    """

    size: int
    warps: int = 4
    stages: int = 3
    in_pieces: bool = False

    @property
    def options(self) -> dict[str, int]:
        """As a launch takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# By the rows of a tile. size: inputs that a program reads at a time; outputs of a program.
SHRINK = {1: Blocks(256), 16: Blocks(64), 64: Blocks(64)}
EXPAND = {1: Blocks(128), 16: Blocks(64), 64: Blocks(64, warps=8, stages=4)}
EXPAND_FLOAT32 = {1: Blocks(128), 16: Blocks(64, warps=8), 64: Blocks(32, warps=8, stages=2)}
PRODUCT = {16: Blocks(64), 64: Blocks(128)}


def expand_blocks(tile_size: int, dtype: torch.dtype) -> Blocks:
    """float32 takes three products for each of the others'."""
    return (EXPAND_FLOAT32 if dtype == torch.float32 else EXPAND)[tile_size]


def decode_blocks(rows: int, dim: int, dtype: torch.dtype) -> Blocks:
    """For a tile of `rows` queries of `dim` elements, one token of a sequence. A part of a sequence's keys is
    a multiple of the size.
    """
    size = rows * dim * dtype.itemsize
    if size <= 2**13:
        return Blocks(32)
    return Blocks(16, warps=8 if size <= 2**14 else 16, stages=2, in_pieces=True)


def prompt_blocks(rows: int, dim: int, dtype: torch.dtype) -> Blocks:
    """For a tile of `rows` queries of `dim` elements."""
    is_large = rows * dim * dtype.itemsize > 2**14
    if dtype == torch.float32:
        return Blocks(16 if is_large else 32, warps=8, stages=2, in_pieces=is_large)
    return Blocks(32, warps=8 if is_large or dim > 256 else 4)


_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
_layouts: dict[tuple[Any, ...], _Layout | None] = {}  # by a kernel's id, as kernels are never freed


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel: a function of the Triton language. arguments: in its order, followed by constants by name.
    Under `compiling` nothing runs.
    """
    if _only_compiles.get():
        kernel.warmup(*arguments, grid=grid, **constants)
        return
    kinds = (id(kernel), *map(type, arguments), *constants, *map(type, constants.values()))
    try:
        layout = _layouts[kinds]
    except KeyError:
        layout = _layouts[kinds] = _layout(kernel, arguments, constants)
    if layout is None or _is_observed():
        kernel[grid](*arguments, **constants)
    else:
        layout.launch(kernel, grid, arguments, constants)


def _is_observed() -> bool:
    """Whether a profiler has hooks on triton's launches, which need arguments that only triton creates."""
    known = triton.knobs.runtime
    return bool(known.launch_enter_hook.calls or known.launch_exit_hook.calls)


@dataclass(frozen=True)
class _Variant:
    """run: of triton's compiled kernel, with its leading arguments. constants: passed after the other
    arguments.
    """

    run: Callable[..., None]
    function: int
    metadata: tuple[Any, ...]
    constants: tuple[Any, ...]


class _Layout:
    """The layout of a kernel's arguments, for given types. Numbers are indices of arguments.

    pointers: tensors. fixed: integers whose value may select a variant; the value is part of the key.
    changing: other integers, of which only the width matters.
    """

    def __init__(self, pointers: list[int], fixed: list[int], changing: list[int]) -> None:
        self._pointers, self._fixed, self._changing = pointers, fixed, changing
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        active = driver.active
        device = active.get_current_device()
        values, key, low = list(arguments), [device, *constants.values()], 0
        for i in self._pointers:
            tensor = arguments[i]
            values[i] = address = tensor.data_ptr()
            low |= address
            key.append(tensor.dtype)
        for i in self._fixed:
            key.append(arguments[i])
        if low % ALIGN_BYTES:
            key += [values[i] % ALIGN_BYTES == 0 for i in self._pointers]
        for i in self._changing:
            if not -INT32 <= arguments[i] < INT32:
                kernel[grid](*arguments, **constants)
                return
        variant = self._variants.get(tuple(key))
        if variant is None:
            self._keep(tuple(key), kernel, kernel[grid](*arguments, **constants), len(arguments), constants)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run, function, metadata = variant.run, variant.function, variant.metadata
        run(x, y, z, stream, function, metadata, None, None, None, *values, *variant.constants)

    def _keep(
        self, key: tuple[Any, ...], kernel: Any, made: Any, count: int, constants: dict[str, Any]
    ) -> None:
        function = getattr(made, "function", None)
        if function is None:
            return
        if len(self._variants) >= MOST_VARIANTS:
            self._variants.clear()
        last = tuple(constants[name] for name in kernel.arg_names[count:])
        self._variants[key] = _Variant(made.run, function, made.packed_metadata, last)


def _layout(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> _Layout | None:
    """None: only triton can launch this: under the interpreter, or with other kinds of arguments."""
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        return None
    first, last = kernel.params[: len(arguments)], kernel.params[len(arguments) :]
    plain = all(not p.is_constexpr and not p.annotation_type for p in first)
    if not plain or not all(p.is_constexpr and p.name in constants for p in last):
        return None
    pointers, fixed, changing = list[int](), list[int](), list[int]()
    for i, (param, argument) in enumerate(zip(first, arguments, strict=True)):
        if hasattr(argument, "data_ptr"):
            pointers.append(i)
        elif type(argument) is int:
            (changing if param.do_not_specialize else fixed).append(i)
        elif type(argument) is not float:  # for a float only the type matters
            return None
    return _Layout(pointers, fixed, changing)


@contextmanager
def compiling() -> Iterator[bool]:
    """Inside, `launch` compiles in threads and leaves results undefined. On exit all compilation is done. A
    variant that cannot be compiled raises when it is launched. Yields True.
    """
    token = _only_compiles.set(True)
    try:
        with (
            ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            yield True
    finally:
        _only_compiles.reset(token)

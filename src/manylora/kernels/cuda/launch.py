"""Launches kernels, or only compiles them: several at once, in threads.

Numbers that change from batch to batch are not specialised (`do_not_specialize`, without a constant's
`constexpr`), so that few variants of a kernel exist, and all can be compiled before the first request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

MOST_THREADS = 8  # of compilation; more would need much memory

_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


def is_compiling() -> bool:
    return _only_compiles.get()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel: a function of the Triton language. Under `compiling` nothing runs."""
    if is_compiling():
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, `launch` compiles in threads, and the results' contents are undefined; on leaving all are done.
    A variant that cannot be compiled raises when it is launched."""
    token = _only_compiles.set(True)
    try:
        with (
            ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            yield
    finally:
        _only_compiles.reset(token)

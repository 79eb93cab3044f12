"""The interpreter of the Triton language with less to do: small kernels take half of the time. By itself it
patches the language for every call of a function, and computes each sum of integers a second time in 64 bits
to see whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest


@contextmanager
def less_work() -> Iterator[None]:
    """Patches the language once for each module of kernels. Another version of triton may lack what is
    replaced here: then it works as it is."""
    from triton.runtime import interpreter

    patch_language: Any = getattr(interpreter, "_patch_lang", None)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    kept: dict[int, Any] = {}
    nothing = SimpleNamespace(restore=lambda: None)

    def patch_once(function: FunctionType) -> Any:
        module = id(function.__globals__)
        if module not in kept:
            kept[module] = patch_language(function)
        return nothing

    with pytest.MonkeyPatch.context() as patch:
        if patch_language is not None:
            patch.setattr(interpreter, "_patch_lang", patch_once)
        if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
            patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield
    for scope in reversed(kept.values()):
        scope.restore()

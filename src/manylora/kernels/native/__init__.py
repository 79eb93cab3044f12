"""The compiled C kernels: built once with the machine's compiler and cached in the user's cache directory.

They are optional: without a compiler, or with MANYLORA_NATIVE=0, `load` returns None and torch is used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from functools import lru_cache
from pathlib import Path

from manylora.system.compiler import build_library, find_compiler

logger = logging.getLogger("manylora")

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.c"))
# Sums may be reordered; infinities and NaNs are respected. -ffast-math is not given to the linker, where it
# would change the rounding of the whole process.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared", "-fopenmp")
POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
KINDS = {"p": POINTER, "i": INTEGER, "f": REAL}
# Arguments: p pointer, i integer, f float; after ">" the result. The C files have their names.
FUNCTIONS = {
    "linear_float32": "pipiipiipppip",
    "linear_bfloat16": "pipiipiipppip",
    "linear_int8": "pipiipiipppip",
    "linear_int4": "pipiipiipppip",
    "lay_out_panels": "ppiii",
    "lora_add_float32": "pipiipppiii",
    "lora_add_bfloat16": "pipiipppiii",
    "decode_attention": "pipipppipiiiiififpi",
    "decode_memory": "pp>i",
    "decode_step": "pp",
    "add_rms_norm": "pppipipiif",
    "gated": "ppiiii",
    "rotate_and_store": "ppipipipppppiiiii",
    "widen_float32": "ppif>i",
    "widen_bfloat16": "ppif>i",
    "lay_out_float32_float32": "pi",
    "lay_out_float32_bfloat16": "pi",
    "lay_out_bfloat16_float32": "pi",
    "lay_out_bfloat16_bfloat16": "pi",
    "read_rows_float32_float32": "ipip>i",
    "read_rows_float32_bfloat16": "ipip>i",
    "read_rows_bfloat16_float32": "ipip>i",
    "read_rows_bfloat16_bfloat16": "ipip>i",
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The library of this process, or None. Logs the outcome once."""
    if os.environ.get("MANYLORA_NATIVE") == "0":
        logger.info("native CPU kernels: off (MANYLORA_NATIVE=0)")
        return None
    compiler = find_compiler()
    if compiler is None:
        logger.info("native CPU kernels: no C compiler found, torch is used; apt install gcc for more speed")
        return None
    try:
        path = build_library(compiler, "kernels", SOURCES, COMPILE, LINK)
        library = ctypes.CDLL(str(path))
        for name, kinds in FUNCTIONS.items():
            taken, _, given = kinds.partition(">")
            getattr(library, name).restype = KINDS.get(given)
            getattr(library, name).argtypes = [KINDS[kind] for kind in taken]
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("native CPU kernels could not be built, torch is used: %s", error)
        return None
    logger.info("native CPU kernels: %s", path)
    return library


def loaded() -> ctypes.CDLL | None:
    """The result of `load`; None where it was not called, so that nothing waits for the compiler."""
    return load() if load.cache_info().currsize else None

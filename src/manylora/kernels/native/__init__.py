"""The compiled C kernels: brought by the wheel for each level of instruction sets, or built once.

They are optional: without them and without a compiler, or with MANYLORA_NATIVE=0, `load` returns None and
torch is used. MANYLORA_NATIVE may name a level that is not the processor's best.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from manylora.system.compiler import Level, Source, find_levels, find_library

logger = logging.getLogger("manylora")

# Each operation is done as it is written, so every compiler makes the same bits, in whatever loop it is.
SOURCE = Source(
    "kernels",
    tuple(sorted(Path(__file__).parent.glob("*.c"))),
    ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    openmp=True,
)
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
KINDS = {"p": POINTER, "i": INTEGER, "f": REAL}
WIDE, NARROW = "float32", "bfloat16"
CONVERSIONS = [f"{target}_{source}" for target in (WIDE, NARROW) for source in (WIDE, NARROW)]
# Arguments: p pointer, i integer, f float; after ">" the result. The C files have their names.
FUNCTIONS = {
    "linear_layer": "ipipiipiipppipi",
    "bfloat16_forms": ">i",
    "lay_out_panels": "ppiii",
    "lay_out_blocks": "iippppii",
    "look_up_rows": "ippipiippii",
    "integer_dots": ">i",
    **{f"lora_add_{kind}": "pipiipppiii" for kind in (WIDE, NARROW, "rounded")},
    "decode_attention": "pipiipppipiiiiififppi",
    "decode_step": "pppi>i",
    "add_rms_norm": "pppipipiif",
    "gated": "ppiiii",
    "best_tokens": "ppii",
    "delta_rule": "ppipipppppppppppp" + "iiiiiif",
    "mamba2": "ppipppppppppppppp" + "iiiiiiiifff",
    "rotate_and_store": "ppipipippipppiiiii",
    **dict.fromkeys((f"widen_{WIDE}", f"widen_{NARROW}"), "ppif>i"),
    **{f"lay_out_{kinds}": "pi" for kinds in CONVERSIONS},
    **{f"{name}_{kinds}": "ipip>i" for name in ("read_rows", "take_rows") for kinds in CONVERSIONS},
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The library of this process, or None. Logs the outcome once."""
    wanted = os.environ.get("MANYLORA_NATIVE", "1")
    if wanted == "0":
        logger.info("native CPU kernels: off (MANYLORA_NATIVE=0), torch is used")
        return None
    levels = find_levels()
    if not levels:
        logger.info("native CPU kernels: none for this processor, torch is used")
        return None
    chosen = next((level for level in levels if level.name == wanted), levels[0])
    if wanted not in ("1", chosen.name):
        known = ", ".join(level.name for level in levels)
        logger.warning("MANYLORA_NATIVE must be 0, 1 or one of %s, got %r: 1 is used", known, wanted)
    try:
        library, origin = open_level(chosen)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("native CPU kernels for %s could not be built, torch is used: %s", chosen.name, error)
        return None
    if library is None:
        logger.warning(
            "native CPU kernels: this installation has none and there is no compiler, torch is used; "
            "for more speed: pip install ziglang, or apt install gcc"
        )
        return None
    logger.info("native CPU kernels: %s, %s", chosen.name, origin)
    return library


def open_level(level: Level) -> tuple[ctypes.CDLL | None, str]:
    """The library, and where it is from; None without a compiler. Raises OSError, AttributeError,
    subprocess.SubprocessError."""
    found = find_library(SOURCE, level)
    return (None, "") if found is None else (open_library(found[0]), found[1])


def open_library(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions. Raises OSError, AttributeError: it has not all of them."""
    library = ctypes.CDLL(str(path))
    for name, kinds in FUNCTIONS.items():
        taken, _, given = kinds.partition(">")
        getattr(library, name).restype = KINDS.get(given)
        getattr(library, name).argtypes = [KINDS[kind] for kind in taken]
    if hasattr(library, "use_openmp") and "torch" in sys.modules:
        use_openmp(library)
    return library


def use_openmp(library: ctypes.CDLL) -> None:
    """The kernels' threads are torch's: its runtime is found among what its libraries depend on."""
    torch = ctypes.CDLL(sys.modules["torch"]._C.__file__)
    try:
        library.use_openmp(*(ctypes.cast(getattr(torch, name), POINTER) for name in OPENMP))
    except AttributeError as error:
        logger.warning("native CPU kernels: one thread, torch's OpenMP has no function of theirs: %s", error)


def loaded() -> ctypes.CDLL | None:
    """The result of `load`; None where it was not called, so that nothing waits for the compiler."""
    return load() if load.cache_info().currsize else None

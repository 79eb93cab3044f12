"""The compiled kernels: built once with the machine's C compiler, kept in the user's cache, and optional.

Where there is no compiler, or MANYLORA_NATIVE=0, `load` gives None and torch does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

__all__ = ["load", "loaded"]

logger = logging.getLogger("manylora")

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.c"))
# Sums may be reordered; infinities and NaNs keep their meaning. -ffast-math is for the compiler only: given
# to the linker, it would change the rounding of the whole process.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared", "-fopenmp")
TIMEOUT_S = 120  # a few seconds on an idle machine
POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
KINDS = {"p": POINTER, "i": INTEGER, "f": REAL}
# p: pointer, i: integer, f: float, behind ">" what is given back; see the C files for their names.
FUNCTIONS = {
    "linear_float32": "pipiipiipppip",
    "linear_bfloat16": "pipiipiipppip",
    "linear_int8": "pipiipiipppip",
    "linear_int4": "pipiipiipppip",
    "lay_out_panels": "ppiii",
    "lora_add_float32": "pipiippiii",
    "lora_add_bfloat16": "pipiippiii",
    "decode_attention": "pipipppipiiiiififpi",
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
    """The library of this process. Says once, in the log, which way it went."""
    if os.environ.get("MANYLORA_NATIVE") == "0":
        logger.info("native CPU kernels: off (MANYLORA_NATIVE=0)")
        return None
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.info("native CPU kernels: no C compiler found, torch is used; apt install gcc for more speed")
        return None
    try:
        path = _cache() / f"kernels-{_key(compiler)}.so"
        if not path.exists():
            _build(compiler, path)
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
    """What `load` gave; None in a process that has not called it, and need not wait for a compiler."""
    return load() if load.cache_info().currsize else None


def _cache() -> Path:
    """A directory that only this user can write to."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "manylora"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="manylora-"))


def _key(compiler: str) -> str:
    """Changes with the source, the options, the compiler and what this processor can do."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=TIMEOUT_S, check=True
    ).stdout
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = sorted({line for line in info if line.startswith(("flags", "Features", "model name"))})
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))]
    parts = (*sources, repr((COMPILE, LINK)).encode(), version, "\n".join(flags).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, made = [Path(folder) / f"{source.stem}.o" for source in SOURCES], Path(folder) / path.name
        commands = [
            [compiler, *COMPILE, str(source), "-o", str(built)]
            for source, built in zip(SOURCES, objects, strict=True)
        ]
        commands.append([compiler, *LINK, *map(str, objects), "-o", str(made), "-lm"])
        for command in commands:
            _run(command)
        made.replace(path)  # at once: another process may be building the same


def _run(command: list[str]) -> None:
    """A compiler is several processes: all of them end when the time is over."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise OSError(errors.strip()[:300] or f"{command[0]} failed")

"""Libraries of our C code: from the wheel, or built once and kept in the user's cache; and the levels of
instruction sets for which it is compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from manylora.system.folders import make_temporary


@dataclass(frozen=True)
class Level:
    """needs: features required in /proc/cpuinfo. options: for GCC and clang of any version. target, cpu: for
    zig.
    """

    name: str
    machine: str
    needs: frozenset[str]
    options: tuple[str, ...]
    target: str
    cpu: str


V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V3_OPTIONS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt", "-mcx16")
V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
V4_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
X86, ARM = "x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17"
LEVELS = (
    Level("x86-64-v4", "x86_64", frozenset(f"{V3} {V4}".split()), V3_OPTIONS + V4_OPTIONS, X86, "x86_64_v4"),
    Level("x86-64-v3", "x86_64", frozenset(V3.split()), V3_OPTIONS, X86, "x86_64_v3"),
    Level("x86-64", "x86_64", frozenset(), (), X86, "x86_64"),
    Level("aarch64", "aarch64", frozenset({"asimd"}), (), ARM, "generic"),
)
"""Best first. glibc 2.17 is older than what torch requires."""


def find_levels() -> list[Level]:
    """The levels that this processor can execute, best first."""
    known = read_features()
    return [level for level in LEVELS if level.machine == platform.machine() and level.needs <= known]


def read_features() -> frozenset[str]:
    """Features that the kernel reports for programs. Empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    rows = [frozenset(words.split()) for words in named]
    return frozenset.intersection(*rows) if rows else frozenset()


TIMEOUT_S = 300  # half a minute on an idle machine


@dataclass(frozen=True)
class Source:
    """C files of a folder, including headers, and the name of their library.

    options: for every compiler. openmp: uses threads; native/openmp.c implements the calls of clang and zig.
    """

    name: str
    files: tuple[Path, ...]
    options: tuple[str, ...] = ("-O2",)
    openmp: bool = False

    @property
    def prebuilt(self) -> Path:
        """The folder with a wheel's prebuilt libraries."""
        return self.files[0].parent / "built"

    def file_name(self, level: Level, *more: bytes) -> str:
        """A name that depends on the contents."""
        headers = sorted(self.files[0].parent.glob("*.h"))
        contents = [path.read_bytes() for path in (*self.files, *headers)]
        made_for = (level.options, level.target, level.cpu)
        digest = hashlib.sha256(b"\0".join((*contents, repr((self.options, made_for)).encode(), *more)))
        return f"{self.name}-{level.name}-{digest.hexdigest()[:20]}.so"


@dataclass(frozen=True)
class Compiler:
    """kind: gcc, clang or zig. zig compiles for every level on every machine."""

    command: tuple[str, ...]
    kind: str
    version: bytes

    def options(self, level: Level) -> tuple[str, ...]:
        if self.kind != "zig":
            return level.options
        return "-target", level.target, f"-mcpu={level.cpu}", "-fno-sanitize=all"


def find_compiler() -> Compiler | None:
    """The machine's compiler, or the `ziglang` package's. Raises OSError, subprocess.SubprocessError."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        return find_zig()
    version = _output(found, "--version")
    return Compiler((found,), "clang" if b"clang" in version else "gcc", version)


def find_zig() -> Compiler | None:
    """The compiler of the `ziglang` package. Raises OSError, subprocess.SubprocessError."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    command = (sys.executable, "-m", "ziglang")
    return Compiler((*command, "cc"), "zig", _output(*command, "version"))


def _output(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True).stdout


def find_library(source: Source, level: Level) -> tuple[Path, str] | None:
    """The library's file and its origin, or None without a compiler. Raises as `find_compiler`."""
    prebuilt = source.prebuilt / source.file_name(level)
    if prebuilt.exists():
        return prebuilt, "of the wheel"
    compiler = find_compiler()
    if compiler is None:
        return None
    path = build_library(compiler, source, level)
    return path, f"built by {compiler.kind}: {path}"


def load_library(source: Source) -> ctypes.CDLL | None:
    """A library that runs on any processor. None without a compiler, or with MANYLORA_NATIVE=0."""
    path = find_common_library(source)
    return None if path is None else ctypes.CDLL(str(path))


def find_common_library(source: Source) -> Path | None:
    """Its file; as `load_library`."""
    if os.environ.get("MANYLORA_NATIVE") == "0":
        return None
    levels = find_levels()
    found = find_library(source, levels[-1]) if levels else None
    return None if found is None else found[0]


def build_library(compiler: Compiler, source: Source, level: Level) -> Path:
    """The library's file, built unless it is in the cache. Raises OSError, subprocess.SubprocessError."""
    path = find_cache() / source.file_name(level, repr(compiler).encode())
    if not path.exists():
        compile_library(compiler, source, level, path)
    return path


def find_cache() -> Path:
    """A directory that only this user can write to. Raises OSError."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "manylora"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home directory
        pass
    return make_temporary("kernels")


def compile_library(compiler: Compiler, source: Source, level: Level, path: Path) -> None:
    """Raises OSError, subprocess.SubprocessError."""
    threads = ("-fopenmp",) if source.openmp else ()
    options = (*compiler.options(level), *source.options, *threads, "-fPIC", "-c")
    # Options that change float rounding are not passed to the linker, which would apply them to the whole
    # process.
    link = (*compiler.options(level), "-shared", *(threads if compiler.kind == "gcc" else ()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [str(Path(folder) / f"{file.stem}.o") for file in source.files]
        made = Path(folder) / path.name
        commands = [
            [*compiler.command, *options, str(file), "-o", built]
            for file, built in zip(source.files, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands, [folder] * len(commands)))
        strip = ("-s",) if compiler.kind == "zig" else ()
        _run([*compiler.command, *link, *strip, *objects, "-o", str(made), "-lm"], folder)
        made.replace(path)  # atomic: another process may be building the same library


def _run(command: list[str], folder: str) -> None:
    """A compiler is several processes: all of them are killed at the timeout. folder: for temporary files."""
    kept = {name: os.environ.get(name, folder) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        env=os.environ | kept, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise OSError(" ".join(errors.split())[:300] or f"{command[0]} failed")

"""Builds libraries of our C code with the machine's compiler, once: they are kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 120  # a few seconds on an idle machine


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_library(
    compiler: str, name: str, sources: Sequence[Path], compile_options: Sequence[str], link: Sequence[str]
) -> Path:
    """The library's file, built unless it is in the cache. Raises OSError, subprocess.SubprocessError.

    sources: .c files of one folder, whose .h files count as well.
    """
    path = _cache() / f"{name}-{_key(compiler, sources, (*compile_options, '', *link))}.so"
    if not path.exists():
        _build(compiler, path, sources, compile_options, link)
    return path


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


def _key(compiler: str, sources: Sequence[Path], options: Sequence[str]) -> str:
    """Changes with the source, the options, the compiler and what this processor can do."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=TIMEOUT_S, check=True
    ).stdout
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = sorted({line for line in info if line.startswith(("flags", "Features", "model name"))})
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    contents = [path.read_bytes() for path in (*sources, *headers)]
    parts = (*contents, repr(options).encode(), version, "\n".join(flags).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _build(
    compiler: str, path: Path, sources: Sequence[Path], compile_options: Sequence[str], link: Sequence[str]
) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, made = [Path(folder) / f"{source.stem}.o" for source in sources], Path(folder) / path.name
        commands = [
            [compiler, *compile_options, str(source), "-o", str(built)]
            for source, built in zip(sources, objects, strict=True)
        ]
        commands.append([compiler, *link, *map(str, objects), "-o", str(made), "-lm"])
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

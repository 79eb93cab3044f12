"""Finds tritonserver: a given path, the container's, the one on PATH, or that of the nvidia-pytriton wheel.
Protects it from requests that end it or keep it busy, over HTTP and gRPC.

Its front ends divide by zero when a client wants a text output classified, and they and the models take
seconds for a hundred thousand inputs, dimensions, parameters or strings. request_guard.c is preloaded into
it, stands between the front ends and the core, and refuses such a request with an error of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import ConfigError
from manylora.system.compiler import Source, find_common_library

logger = logging.getLogger("manylora.launcher")

CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
BINARY = Path("bin/tritonserver")
STUBS = "python_backend_stubs"  # only in the nvidia-pytriton wheel
GUARD = Source("request_guard", (Path(__file__).with_name("request_guard.c"),))
KNOWN = b"\0TRITONSERVER_ServerModelBatchProperties\0"  # in the binary's table of the core's functions
PRELOAD = "LD_PRELOAD"


@dataclass(frozen=True)
class Installation:
    """The binary, the additional arguments it needs, and its environment."""

    binary: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]


def find_tritonserver(wanted: str | None, run_dir: Path) -> Installation:
    """wanted: the executable, or None to search. run_dir: gets the guard, and the backend directory if the
    wheel is used. Raises ConfigError that says what to install.
    """
    if wanted is not None:
        found, path = shutil.which(wanted), Path(wanted)
        if not found and path.is_dir():
            raise ConfigError(f"--tritonserver {wanted} is a folder: name the executable, {path / BINARY}")
        if not found:
            wrong = "is not executable" if path.exists() else "does not exist"
            raise ConfigError(f"--tritonserver {wanted} {wrong}")
        binary = Path(found).absolute()
    elif found := str(CONTAINER) if CONTAINER.is_file() else shutil.which("tritonserver"):
        binary = Path(found)
    else:
        spec = importlib.util.find_spec("pytriton")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                "tritonserver was not found: pip install 'manylora[server]', or name it with --tritonserver"
            )
        binary = Path(spec.submodule_search_locations[0]) / "tritonserver" / BINARY
    server = binary.resolve().parent.parent
    arguments, environment = [], dict(os.environ)
    if (server / STUBS).is_dir():
        binary = server / BINARY
        arguments = ["--backend-directory", str(run_dir / "backends")]
        environment = _environment_of_wheel(server, run_dir / "backends" / "python")
    return Installation(binary, tuple(arguments), preload_guard(binary, environment, run_dir))


def _environment_of_wheel(server: Path, backend: Path) -> dict[str, str]:
    """server: the folder of the nvidia-pytriton wheel, which has one stub for each Python version, and its
    libraries in a separate folder. backend: gets its Python backend.
    """
    backend.mkdir(parents=True, exist_ok=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        link = backend / name
        if not link.exists():
            link.symlink_to(server / "backends" / "python" / name)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = backend / "triton_python_backend_stub"
    source = server / STUBS / version / stub.name
    if not source.is_file():
        raise ConfigError(f"the tritonserver wheel has no stub for Python {version}: use 3.10, 3.11 or 3.12")
    stub.unlink(missing_ok=True)
    shutil.copy(source, stub)  # a copy, because a stub that fails to start makes its own file unreadable
    libraries = server.parent.parent / "nvidia_pytriton.libs"
    paths = (sysconfig.get_config_var("LIBDIR"), str(libraries), os.environ.get("LD_LIBRARY_PATH"))
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    if not os.access(stub, os.X_OK):
        raise ConfigError(
            f"{backend.parents[1]} is on a disk whose files cannot be executed (noexec), but the Python "
            "backend's must be: set TMPDIR to a folder on another disk"
        )
    try:  # with missing libraries the server would hang without an error
        result = subprocess.run(
            ["ldd", str(stub)], env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # a small image
        return environment
    missing = [line.split()[0] for line in result.stdout.splitlines() if "not found" in line]
    if missing:
        raise ConfigError(
            f"the Python backend cannot load {missing[0]}: this Python needs its shared library "
            "(apt install libpython3-dev, or a Python built with --enable-shared)"
        )
    return environment


def preload_guard(binary: Path, environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment with which a tritonserver is guarded; the same if it cannot be, which is logged.
    folder: gets a copy of the library, because a cache may be emptied while the server runs.
    """
    guard = folder / f"{GUARD.name}.so"
    try:
        if KNOWN not in binary.read_bytes():
            raise OSError(f"{binary} has another form than is known")
        library = find_common_library(GUARD)
        if library is None:
            raise OSError("it has to be compiled, and there is no C compiler (pip install ziglang)")
        if any(mark in str(guard) for mark in ": "):
            raise OSError(f"{folder} has a space or a colon in its name, which {PRELOAD} does not allow")
        guard.unlink(missing_ok=True)  # it may be loaded: never written to
        shutil.copyfile(library, guard)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("tritonserver runs without its guard against hostile requests: %s", error)
        return dict(environment)
    others = environment.get(PRELOAD)
    return {**environment, PRELOAD: f"{guard}:{others}" if others else str(guard)}

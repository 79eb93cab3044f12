"""Finds tritonserver: a given path, the container's, the one on PATH, or that of the nvidia-pytriton
wheel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

from manylora.errors import ConfigError
from manylora.wire.request_guard import preload_guard

CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
BINARY = Path("bin/tritonserver")
STUBS = "python_backend_stubs"  # only in the nvidia-pytriton wheel


@dataclass(frozen=True)
class Installation:
    """The binary, the additional arguments it needs, and its environment."""

    binary: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def find_tritonserver(wanted: str | None, run_dir: Path) -> Installation:
    """wanted: the executable, or None to search. run_dir: gets the guard, and the backend
    directory if the wheel is used.

    Raises ConfigError that says what to install.
    """
    found = _given(wanted) if wanted is not None else _found()
    server = found.resolve().parent.parent
    if (server / STUBS).is_dir():
        installation = _from_wheel(server, run_dir)
    else:
        installation = Installation(found, environment=dict(os.environ))
    guarded = preload_guard(installation.binary, installation.environment, run_dir)
    return replace(installation, environment=guarded)


def _given(wanted: str) -> Path:
    if found := shutil.which(wanted):
        return Path(found).absolute()
    path = Path(wanted)
    if path.is_dir():
        raise ConfigError(f"--tritonserver {wanted} is a folder: name the executable, {path / BINARY}")
    raise ConfigError(f"--tritonserver {wanted} {'is not executable' if path.exists() else 'does not exist'}")


def _found() -> Path:
    found = CONTAINER if CONTAINER.is_file() else shutil.which("tritonserver")
    spec = importlib.util.find_spec("pytriton")
    if found:
        return Path(found)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "tritonserver was not found: pip install 'manylora[server]', or name it with --tritonserver"
        )
    return Path(spec.submodule_search_locations[0]) / "tritonserver" / BINARY


def _from_wheel(server: Path, run_dir: Path) -> Installation:
    """server: the folder of the nvidia-pytriton wheel with bin/tritonserver.

    The wheel has one Python backend stub for each Python version, and its libraries in a separate folder.
    """
    libraries = server.parent.parent / "nvidia_pytriton.libs"
    backend = run_dir / "backends" / "python"
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
    paths = (sysconfig.get_config_var("LIBDIR"), str(libraries), os.environ.get("LD_LIBRARY_PATH"))
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    _check_stub(stub, environment)
    return Installation(server / BINARY, ("--backend-directory", str(backend.parent)), environment)


def _check_stub(stub: Path, environment: dict[str, str]) -> None:
    """Check that the stub starts. With missing libraries the server would hang without an error."""
    if not os.access(stub, os.X_OK):
        raise ConfigError(
            f"{stub.parents[2]} is on a disk whose files cannot be executed (noexec), but the Python "
            "backend's must be: set TMPDIR to a folder on another disk"
        )
    try:
        result = subprocess.run(
            ["ldd", str(stub)], env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # a small image
        return
    missing = [line.split()[0] for line in result.stdout.splitlines() if "not found" in line]
    if missing:
        raise ConfigError(
            f"the Python backend cannot load {missing[0]}: this Python needs its shared library "
            "(apt install libpython3-dev, or a Python built with --enable-shared)"
        )

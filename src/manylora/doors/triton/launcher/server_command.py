"""How a tritonserver is found (a given path, the container's, PATH's, or the nvidia-pytriton wheel's),
started, and protected: command line, limits, who may use what, shared memory.

Its front ends divide by zero when a client wants a text output classified, and they and the models take
seconds for a hundred thousand inputs, dimensions, parameters or strings. request_guard.c is preloaded into
it, stands between the front ends and the core, and refuses such a request with an error of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.doors.triton.launcher.processes import end_marked
from manylora.errors import ConfigError
from manylora.system.compiler import Source, find_common_library
from manylora.system.lifeline import RUN_DIR
from manylora.system.tracing import HEADERS, is_traced

logger = logging.getLogger("manylora.launcher")

CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
BINARY = Path("bin/tritonserver")
STUBS = "python_backend_stubs"  # only in the nvidia-pytriton wheel
GUARD = Source("request_guard", (Path(__file__).with_name("request_guard.c"),))
KNOWN = b"\0TRITONSERVER_ServerModelBatchProperties\0"  # in the binary's table of the core's functions
PRELOAD = "LD_PRELOAD"


@dataclass(frozen=True)
class Installation:
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


# Makes glibc return the memory of large requests to the system.
ALLOCATOR = {"MALLOC_ARENA_MAX": 2, "MALLOC_MMAP_THRESHOLD_": 2**17, "MALLOC_TRIM_THRESHOLD_": 2**17}
STACK = 128 * 2**20  # stack bytes per tritonserver thread; only used pages take memory
# Clients with access to these can touch other programs' memory, load models, or fill the disk with logs.
MANAGEMENT = "shared-memory,model-repository,trace,logging"
PUBLIC = "health,metadata,inference,model-config,statistics"
MANAGEMENT_HEADER = "manylora-management"
SECRET_FILE = "management.secret"


def server_command(installation: Installation, o: Namespace, http_port: int) -> list[str]:
    """The command line. o: as of `TritonServer`. http_port: of tritonserver itself, behind the proxy."""
    command = [str(installation.binary), "--model-repository", str(o.model_repo), *installation.arguments]
    command += [f"--http-port={http_port}", "--http-address=127.0.0.1"]
    is_v6 = ":" in o.address  # Triton's two services write such an address in two ways
    grpc, metrics = (f"[{o.address}]", f"ipv6:{o.address}") if is_v6 else (o.address, o.address)
    command += [f"--grpc-port={o.grpc_port}", f"--grpc-address={grpc}"]
    command += [f"--metrics-port={o.metrics_port}", f"--metrics-address={metrics}"]
    shared = f"{_prefix(o.http_port)}{secrets.token_hex(8)}_"
    command += [f"--exit-timeout-secs={o.exit_timeout}", "--disable-auto-complete-config"]
    command.append(f"--backend-config=python,shm-region-prefix-name={shared}")
    if not Path("/dev/nvidiactl").exists():
        command += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
    if o.verbose_log:
        command += ["--log-verbose=3", f"--log-file={o.verbose_log}"]
    access = {"--http-restricted-api": f"{MANAGEMENT},{PUBLIC}"}  # the HTTP port is behind our proxy
    if not o.open_management:
        access["--grpc-restricted-protocol"] = MANAGEMENT
    forwarded = "|".join(HEADERS) if is_traced() else ""
    command += [f"--{door}-header-forward-pattern={forwarded}" for door in ("http", "grpc") if forwarded]
    given = {argument.split("=", 1)[0] for argument in o.triton_arg}
    for flag, names in access.items():
        if flag not in given:
            command.append(f"{flag}={names}:{MANAGEMENT_HEADER}={o.management_secret}")
    return [*command, *o.triton_arg]


def widen_stacks() -> None:
    """Raise the stack limit: Triton's HTTP threads use 16 bytes of stack per chunk of a body."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK if most == resource.RLIM_INFINITY else min(STACK, most)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))


def management_secret(run_dir: Path, file: Path | None) -> str:
    """The secret that clients must send for management: the content of `file`, or a new one.

    It is also written to `run_dir`, readable by this user only. Raises ConfigError.
    """
    secret = secrets.token_hex(32)
    if file is not None:
        try:
            secret = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--management-secret-file {file} cannot be read: {error}") from error
        if not re.fullmatch(r"[\w.-]{16,}", secret, re.ASCII):
            raise ConfigError(
                f"--management-secret-file {file} must hold 16 or more letters, digits, '_', '.' or '-'"
            )
    path = run_dir / SECRET_FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as written:
        written.write(secret)
    return secret


def describe_access(address: str, run_dir: Path, management_is_open: bool) -> str:
    local = address in ("127.0.0.1", "::1", "localhost")
    who = "anybody on this machine" if local else f"anybody who reaches {address}"
    if management_is_open:
        rest = "so are management calls, which read and write memory of this machine (--open-management)"
    else:
        rest = f"management calls need the secret in {run_dir / SECRET_FILE}"
    return f"requests and metrics are open to {who}; {rest}"


def remove_leftovers(run_dir: Path, http_port: int | None) -> None:
    """End what remains of a server, and its shared memory. http_port: None: a rank without a server."""
    end_marked(RUN_DIR, str(run_dir))
    for region in [] if http_port is None else shared_memory(http_port):
        with contextlib.suppress(OSError):
            region.unlink()


def _prefix(http_port: int) -> str:
    """Prefix of the shared-memory files. One server at a time per user and port."""
    return f"manylora_{os.getuid()}_{http_port}_"


def shared_memory(http_port: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{_prefix(http_port)}*"))

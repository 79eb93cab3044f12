"""How a tritonserver is started: options, command line, limits, who may use what, shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
from dataclasses import dataclass
from pathlib import Path

from manylora.doors.triton.launcher.installation import Installation
from manylora.doors.triton.launcher.processes import end_marked
from manylora.errors import ConfigError
from manylora.system.lifeline import RUN_DIR

# Makes glibc return the memory of large requests to the system.
ALLOCATOR = {"MALLOC_ARENA_MAX": 2, "MALLOC_MMAP_THRESHOLD_": 2**17, "MALLOC_TRIM_THRESHOLD_": 2**17}
STACK = 128 * 2**20  # stack bytes per tritonserver thread; only used pages take memory
# Clients with access to these can touch other programs' memory, load models, or fill the disk with logs.
MANAGEMENT = "shared-memory,model-repository,trace,logging"
PUBLIC = "health,metadata,inference,model-config,statistics"
MANAGEMENT_HEADER = "manylora-management"
SECRET_FILE = "management.secret"


@dataclass(frozen=True)
class ServerOptions:
    """The user's options."""

    model_repo: Path
    http_port: int
    grpc_port: int
    metrics_port: int
    address: str
    start_timeout: float
    drain_timeout: float
    exit_timeout: int  # seconds for tritonserver to exit
    hang_timeout: float
    server_memory: int  # bytes
    verbose_log: str | None
    triton_args: tuple[str, ...]
    management_secret: str
    open_management: bool
    world_size: int | None = None  # ranks of the engine; None: from its parameters

    @property
    def loads_models(self) -> bool:
        """Whether models can be loaded at run time: `--triton-arg=--model-control-mode=explicit`."""
        return any("model-control-mode" in one for one in self.triton_args)


def server_command(installation: Installation, o: ServerOptions, http_port: int) -> list[str]:
    """The command line. http_port: of tritonserver itself, behind the proxy."""
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
    given = {argument.split("=", 1)[0] for argument in o.triton_args}
    for flag, names in access.items():
        if flag not in given:
            command.append(f"{flag}={names}:{MANAGEMENT_HEADER}={o.management_secret}")
    return [*command, *o.triton_args]


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
    """Text for the terminal: which interfaces are open to whom."""
    local = address in ("127.0.0.1", "::1", "localhost")
    who = "anybody on this machine" if local else f"anybody who reaches {address}"
    if management_is_open:
        rest = "so are management calls, which read and write memory of this machine (--open-management)"
    else:
        rest = f"management calls need the secret in {run_dir / SECRET_FILE}"
    return f"requests and metrics are open to {who}; {rest}"


def remove_leftovers(run_dir: Path, http_port: int | None) -> None:
    """End what remains of a server in this run directory, and remove its shared memory. http_port: None for a
    rank without a server.
    """
    end_marked(RUN_DIR, str(run_dir))
    for region in [] if http_port is None else shared_memory(http_port):
        with contextlib.suppress(OSError):
            region.unlink()


def _prefix(http_port: int) -> str:
    """Prefix of the shared-memory files. One server at a time per user and port."""
    return f"manylora_{os.getuid()}_{http_port}_"


def shared_memory(http_port: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{_prefix(http_port)}*"))

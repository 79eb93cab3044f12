"""How a tritonserver is started: the user's options, its command line and limits, its shared memory."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from manylora.launcher.installation import Installation
from manylora.launcher.management_access import SECRET_FILE, management_flags
from manylora.launcher.processes import end_marked
from manylora.system.lifeline import RUN_DIR

# Makes glibc return the memory of large requests to the system.
ALLOCATOR = {"MALLOC_ARENA_MAX": 2, "MALLOC_MMAP_THRESHOLD_": 2**17, "MALLOC_TRIM_THRESHOLD_": 2**17}
STACK = 128 * 2**20  # stack bytes per tritonserver thread; only used pages take memory


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
    command += [
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={_prefix(o.http_port)}{secrets.token_hex(8)}_",
        f"--exit-timeout-secs={o.exit_timeout}",
    ]
    if not Path("/dev/nvidiactl").exists():
        command += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
    if o.verbose_log:
        command += ["--log-verbose=3", f"--log-file={o.verbose_log}"]
    return [
        *command,
        *management_flags(o.management_secret, o.open_management, o.triton_args),
        *o.triton_args,
    ]


def http_proxy_command(o: ServerOptions, inner_port: int, run_dir: Path, probe: int) -> list[str]:
    """inner_port: tritonserver's own. probe: the descriptor of the socket on which the proxy answers the
    launcher.
    """
    command = [sys.executable, "-m", "manylora.launcher.http_proxy", f"--address={o.address}"]
    command += [f"--port={o.http_port}", f"--inner-port={inner_port}", f"--probe={probe}"]
    command += [f"--secret-file={run_dir / SECRET_FILE}"]
    return [*command, *(["--open"] if o.open_management else [])]


def widen_stacks() -> None:
    """Raise the stack limit: Triton's HTTP threads use 16 bytes of stack per chunk of a body."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK if most == resource.RLIM_INFINITY else min(STACK, most)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))


def remove_leftovers(run_dir: Path, http_port: int | None) -> None:
    """End what remains of a server in this run directory, and remove its shared memory.

    http_port: None if there was no server, only a rank of one elsewhere.
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

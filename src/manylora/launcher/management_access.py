"""Which of the server's interfaces are open to whom, and the secret for the others."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from manylora.errors import ConfigError

# Clients with access to these can touch other programs' memory, load models, or fill the disk with logs.
MANAGEMENT = "shared-memory,model-repository,trace,logging"
PUBLIC = "health,metadata,inference,model-config,statistics"
MANAGEMENT_HEADER = "manylora-management"
SECRET_FILE = "management.secret"


def management_secret(run_dir: Path, given: Path | None) -> str:
    """The secret that clients must send for management: the content of `given`, or a new one.

    It is also written to `run_dir`, readable by this user only. Raises ConfigError.
    """
    secret = secrets.token_hex(32) if given is None else _read(given)
    _write_private(run_dir / SECRET_FILE, secret.encode())
    return secret


def management_flags(secret: str, is_open: bool, given: tuple[str, ...]) -> list[str]:
    """Flags for tritonserver, whose HTTP port is behind our proxy. given: the user's flags, which win."""
    theirs = {argument.split("=", 1)[0] for argument in given}
    flags = {"--http-restricted-api": f"{MANAGEMENT},{PUBLIC}"}
    if not is_open:
        flags["--grpc-restricted-protocol"] = MANAGEMENT
    return [f"{f}={names}:{MANAGEMENT_HEADER}={secret}" for f, names in flags.items() if f not in theirs]


def describe_access(address: str, run_dir: Path, management_is_open: bool) -> str:
    """Text for the terminal: which interfaces are open to whom."""
    local = address in ("127.0.0.1", "::1", "localhost")
    who = "anybody on this machine" if local else f"anybody who reaches {address}"
    if management_is_open:
        rest = "so are management calls, which read and write memory of this machine (--open-management)"
    else:
        rest = f"management calls need the secret in {run_dir / SECRET_FILE}"
    return f"requests and metrics are open to {who}; {rest}"


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _read(given: Path) -> str:
    try:
        text = given.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--management-secret-file {given} cannot be read: {error}") from error
    if not re.fullmatch(r"[\w.-]{16,}", text, re.ASCII):
        raise ConfigError(
            f"--management-secret-file {given} must hold 16 or more letters, digits, '_', '.' or '-'"
        )
    return text

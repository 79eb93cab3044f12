"""Place: which rank of how many this process is, by the environment of torchrun or mpirun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manylora.errors import ConfigError

# Rank, number of ranks, rank on this host, number on this host.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
DEFAULT_PORT = "29500"  # torch's


@dataclass(frozen=True)
class Place:
    """local_rank, local_size: of this host. address, port: of rank 0's store; "" where rank 0 has started the
    other ranks itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    port: int = 0

    @classmethod
    def alone(cls, size: int) -> Place:
        """Rank 0 of a group on this machine, whose other ranks it starts."""
        return cls(0, size, 0, size)

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.size


def find_place(size: int, environment: Mapping[str, str] = os.environ) -> Place:
    """size: of the group that is wanted. Raises ConfigError when a launcher started another number."""
    for launcher, names in LAUNCHERS.items():
        if size == 1 or names[0] not in environment or names[1] not in environment:
            continue
        rank, started = (_number(environment, name, 0) for name in names[:2])
        if started == 1:
            continue
        if started != size:
            raise ConfigError(
                f"{launcher} has started {started} processes, and the model is to run on {size} ranks: "
                f"start {size}, or choose tensor and pipeline parallel sizes whose product is {started}"
            )
        local_rank, local_size = _number(environment, names[2], rank), _number(environment, names[3], size)
        address = environment.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
        if not address:
            raise ConfigError(
                "ranks on several hosts need MASTER_ADDR, the address of rank 0's host "
                "(mpirun: -x MASTER_ADDR=…), and MASTER_PORT where it is not 29500"
            )
        port = int(environment.get("MASTER_PORT") or DEFAULT_PORT)
        return Place(rank, size, local_rank, local_size, address, port)
    return Place.alone(size)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(f"{name} must be a whole number, got {text!r}")
    return int(text)

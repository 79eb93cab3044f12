"""RankInfo: which rank this process is, and of how many, from the environment of torchrun or mpirun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from manylora.errors import ConfigError


class Variables(NamedTuple):
    """Names of a launcher's variables. local: on this host."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


MPI = "OMPI_COMM_WORLD"
LAUNCHERS = (
    Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Variables("mpirun", f"{MPI}_RANK", f"{MPI}_SIZE", f"{MPI}_LOCAL_RANK", f"{MPI}_LOCAL_SIZE"),
)
RUN_BY = ("TORCHELASTIC_RUN_ID", f"{MPI}_RANK")  # set by launchers that wait for their processes
RANK_0_GONE = 3  # exit status of a rank that has lost rank 0
DEFAULT_PORT = 29500  # torch's
LOOPBACKS = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class RankInfo:
    """local_rank, local_size: on this host. address, port: of rank 0's store; "" if it starts all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    port: int = 0

    @classmethod
    def alone(cls, size: int) -> RankInfo:
        """Rank 0 of a group on this machine that starts its other ranks itself."""
        return cls(0, size, 0, size)


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started several processes, of any program. Raises ConfigError."""
    return _started(environment) is not None


def started_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank among those processes. 0 also for a single process. Raises ConfigError."""
    started = _started(environment)
    return 0 if started is None else started[0]


def ends_with_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher waits for this process, and takes its exit for the end of the work."""
    return any(name in environment for name in RUN_BY)


def find_rank(size: int, environment: Mapping[str, str] = os.environ) -> RankInfo:
    """size: requested size of the group. Raises ConfigError if a launcher started another number."""
    started = None if size == 1 else _started(environment)
    if started is None:
        return RankInfo.alone(size)
    rank, count, names = started
    if count != size:
        raise ConfigError(
            f"{names.launcher} has started {count} processes, and the model is to run on {size} ranks: "
            f"start {size}, or choose tensor and pipeline parallel sizes whose product is {count}"
        )
    local_rank = _number(environment, names.local_rank, rank)
    local_size = _number(environment, names.local_size, size)
    address = environment.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not address:
        raise ConfigError(
            "ranks on several hosts need MASTER_ADDR, the address of rank 0's host "
            "(mpirun: -x MASTER_ADDR=…), and MASTER_PORT where it is not 29500"
        )
    if names.local_size not in environment and not address.startswith(LOOPBACKS):
        raise ConfigError(
            f"{names.rank} and MASTER_ADDR are set and {names.local_size} is not: set it to the number of "
            f"ranks on this host, and {names.local_rank} to 0 for the first of them, 1 for the next"
        )
    port = _number(environment, "MASTER_PORT", DEFAULT_PORT)
    return RankInfo(rank, size, local_rank, local_size, address, port)


def _started(environment: Mapping[str, str]) -> tuple[int, int, Variables] | None:
    """Rank, and number of processes. None: no launcher started several."""
    for names in LAUNCHERS:
        if names.rank in environment and names.size in environment:
            rank, count = _number(environment, names.rank, 0), _number(environment, names.size, 0)
            if count != 1:
                return rank, count, names
    return None


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name} must be a whole number, got {text!r}")
    return int(text)

"""Joins torch's collectives, with which the ranks of a group compute together."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store

from manylora.errors import ConfigError
from manylora.group.rank_info import RankInfo

GLOO = "GLOO_SOCKET_IFNAME"  # otherwise Gloo uses the host name's address, often the loopback's
SIOCGIFADDR, NAME_SIZE = 0x8915, 16  # from linux/sockios.h and linux/if.h


@contextmanager
def interface_of(info: RankInfo) -> Iterator[None]:
    """Inside, Gloo connects over the interface that reaches rank 0's host, or over the loopback if all ranks
    are on one host, unless the user has chosen an interface.
    """
    name = "lo" if info.on_one_host else interface_towards(info.address)
    if name is None or GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = name
    try:
        yield
    finally:
        del os.environ[GLOO]


def join_collectives(info: RankInfo, store: Store, backend: str) -> None:
    """All ranks call this at the same time; it waits for all. backend: torch's. Raises ConfigError."""
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is in use in this process already: one engine of several ranks at a time"
        )
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size)


def interface_towards(address: str) -> str | None:
    """The network interface of this host that reaches an address, or that has it. None: not found."""
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            ours = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
            return next((name for name, its in _addresses(probe) if its == ours), None)
    return None


def _addresses(probe: socket.socket) -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    if probe.family == socket.AF_INET6:
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.ip_address(bytes.fromhex(digits))
        return
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # it has no address
            request = struct.pack(f"{NAME_SIZE}s24x", name.encode())
            yield name, ipaddress.ip_address(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])


def leave_group() -> None:
    """Call this once nothing is computed any more, or ranks are gone. Idempotent."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
